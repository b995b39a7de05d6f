"""Connections and mapped memory between the ranks of a host that hold the same KV.

A borrower connects to each member that may lend to it, and sends a token. The lender's first answer
brings the descriptor of its arena, a memory file, which the borrower maps. After that both ends
pass on the messages of their engines (`loans.py`), and tell them when the other end has gone.

Nothing has a name in a file system: sockets are abstract, arenas have no name. Both ends belong to
one user, and the borrower knows the lender's token from its `Card`, which ranks exchange over the
engine's own connections. A message that may not come ends the use of its connection, but no loan:
the other end may still read lent slots. Only the end of its process, or its `close`, ends those.
"""

import array
import contextlib
import fcntl
import hashlib
import hmac
import logging
import os
import secrets
import selectors
import socket
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import msgspec

from vllm_kvpool.layout.topology import ReplicaRank
from vllm_kvpool.parsing import UNREADABLE
from vllm_kvpool.staging.arena import Arena
from vllm_kvpool.storage.base import Buffer, ChunkRef
from vllm_kvpool.transfer.ops import Ask, BorrowerGone, LenderGone, Lent, Returned, Slab, SlabKind

logger = logging.getLogger(__name__)

MAX_MESSAGE = 1 << 16
MAX_LINKS = 64  # connections of borrowers
JOIN_S = 0.5
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = "/proc/self/ns/net"  # abstract sockets are known within one
_CREDENTIALS = struct.Struct("3i")  # process, user, group
_CARD = struct.Struct("<16s16s16sIII")

Post = Callable[[Ask | Lent | Returned | LenderGone | BorrowerGone], None]


class Card(msgspec.Struct, frozen=True):
    """The card that ranks exchange at start; ranks with the same `host` can share memory."""

    host: bytes
    name: bytes
    token: bytes
    place: ReplicaRank
    rank: int  # of the engine

    def pack(self) -> bytes:
        """Return the card in bytes, of the same length for every card."""
        return _CARD.pack(self.host, self.name, self.token, *self.place, self.rank)

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        """Return the card in the bytes that another rank sent at start."""
        host, name, token, tp_rank, pcp_rank, rank = _CARD.unpack(data)
        return cls(host, name, token, ReplicaRank(tp_rank, pcp_rank), rank)

    @property
    def address(self) -> str:
        """The abstract address of its socket."""
        return f"\0kvpool-replica-{self.name.hex()}"


def host_digest() -> bytes:
    """Return a digest that processes share if they can pass each other memory.

    They have the same kernel, network and user.
    """
    try:
        parts = (BOOT_ID.read_text().strip(), os.readlink(_NETWORK), str(os.geteuid()))
    except OSError:  # unknown: then no other process is on this host
        return secrets.token_bytes(16)
    return hashlib.blake2b("/".join(parts).encode(), digest_size=16).digest()


class _Hello(msgspec.Struct, tag="hello"):
    token: bytes
    number: int


class _Ask(msgspec.Struct, tag="ask"):
    generation: int
    kinds: list[tuple[str, tuple[str, ...]]]  # `SlabKind.part` and `key_prefixes`
    loans: list[tuple[int, int, ChunkRef, str, tuple[int, ...]]]  # id, which kind, as in `Slab`


class _Welcome(msgspec.Struct, tag="welcome"):
    """The place of slots in the arena, whose descriptor comes with it."""

    start: int
    slot_bytes: int
    num_slots: int


class _Lent(msgspec.Struct, tag="lent"):
    loans: list[tuple[int, list[int]]]


class _Returned(msgspec.Struct, tag="returned"):
    loans: list[int]


_encode = msgspec.msgpack.Encoder().encode
_FROM_BORROWER = msgspec.msgpack.Decoder(_Hello | _Ask | _Returned)
_FROM_LENDER = msgspec.msgpack.Decoder(_Welcome | _Lent)


def _packed(message: Ask | Lent | Returned) -> list[bytes]:
    """Return the bytes of a message, in parts of `MAX_MESSAGE`."""
    loans: Any = message.loans
    if isinstance(message, Ask):
        kinds: dict[SlabKind, int] = {}
        data = _encode(
            _Ask(
                loans=[
                    (loan_id, kinds.setdefault(s.kind, len(kinds)), s.chunk, s.chunk_hex, s.sizes)
                    for loan_id, s in message.loans
                ],
                generation=message.generation,
                kinds=[(kind.part, kind.key_prefixes) for kind in kinds],
            )
        )
    else:
        data = _encode((_Lent if isinstance(message, Lent) else _Returned)(list(loans)))
    if len(data) <= MAX_MESSAGE or len(loans) == 1:
        return [data]
    half = len(loans) // 2
    first, second = message._replace(loans=loans[:half]), message._replace(loans=loans[half:])
    return [*_packed(first), *_packed(second)]


def _slabs_of(message: _Ask, slot_bytes: int) -> tuple[tuple[int, Slab], ...]:
    """Return the slabs that a borrower asks for; ValueError if the message is not sound."""
    kinds = [SlabKind(prefixes, (), part=part) for part, prefixes in message.kinds]
    slabs = []
    for loan_id, number, chunk, chunk_hex, sizes in message.loans:
        kind = kinds[number] if 0 <= number < len(kinds) else None
        if kind is None or not sizes or len(sizes) != len(kind.key_prefixes):
            raise ValueError("it asks for cells that its message does not name")
        if min(sizes) <= 0 or max(sizes) > slot_bytes:
            raise ValueError("it asks for cells that fill no slot")
        slab = Slab(chunk.id + kind.part, kind, chunk, chunk_hex, sizes, sum(sizes))
        slabs.append((loan_id, slab))
    return tuple(slabs)


@dataclass(slots=True, eq=False)
class _Link:
    """A connection: to a lender, or of a borrower, whose number is known from its hello on."""

    peer: socket.socket
    number: int | None
    is_to_lender: bool


class ReplicaExchange:
    """The end of a rank, as borrower and lender.

    Make it, exchange cards, `join`, then `start` it when there is an engine. `send` is for the
    engine thread, the rest for the thread that made it.
    """

    def __init__(self, place: ReplicaRank, rank: int, *, shares: bool = True) -> None:
        host = host_digest() if shares else secrets.token_bytes(16)
        name, token = secrets.token_bytes(16), secrets.token_bytes(16)
        self.card = Card(host, name, token, place, rank)
        self._listener = _new_socket()
        self._listener.bind(self.card.address)
        self._listener.listen(MAX_LINKS)
        self._listener.setblocking(False)
        self.number = 0
        self._cards: dict[int, Card] = {}  # of the others on this host
        self._links: set[_Link] = set()
        self._lenders: dict[int, _Link] = {}
        self._borrowers: dict[int, _Link] = {}
        self._lock = threading.Lock()  # guards sockets against being closed in use
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._thread: threading.Thread | None = None
        self._closing = False

    def join(self, cards: Sequence[bytes]) -> None:
        """Take the cards of all ranks of the pipeline stage, in the same order on all of them."""
        every = dict(enumerate(map(Card.unpack, cards)))
        [self.number] = [number for number, card in every.items() if card == self.card]
        del every[self.number]
        self._cards = {n: card for n, card in every.items() if card.host == self.card.host}

    @property
    def siblings(self) -> Mapping[ReplicaRank, int]:
        """The numbers of the other ranks on this host, which need not all be replicas."""
        return {card.place: number for number, card in self._cards.items()}

    def ranks_of(self, numbers: Sequence[int]) -> tuple[int, ...]:
        """Return the names of these ranks in the engine."""
        cards = self._cards | {self.number: self.card}
        return tuple(cards[number].rank for number in numbers)

    def start(
        self, arena: Arena, post: Post, on_mapped: Callable[[Buffer], None] | None = None
    ) -> None:
        """Begin to lend and to borrow; `post` takes the engine's events.

        `on_mapped`, if given, is called with each part of a lender's arena, of whole slots, in
        a thread of the arena.
        """
        self._arena, self._post, self._on_mapped = arena, post, on_mapped
        for each in (self._listener, self._woken):
            self._selector.register(each, selectors.EVENT_READ, None)
        for number, card in self._cards.items():
            peer = _new_socket()
            try:
                peer.connect(card.address)
                if not _is_own_user(peer):
                    raise OSError("another user listens on its socket")
                peer.send(_encode(_Hello(card.token, self.number)))
            except OSError as error:
                peer.close()
                self._leave(number, error)
            else:
                self._lenders[number] = link = _Link(peer, number, is_to_lender=True)
                self._add(link)
        self._thread = threading.Thread(target=self._run, name="kvpool-replicas", daemon=True)
        self._thread.start()

    def send(self, message: Ask | Lent | Returned) -> None:
        """Send a message. A lost one ends with the time of its ask or loan."""
        links = self._borrowers if isinstance(message, Lent) else self._lenders
        if (link := links.get(message.member)) is None:
            return
        with self._lock, contextlib.suppress(OSError):
            for data in _packed(message):
                link.peer.send(data, socket.MSG_DONTWAIT)

    def close(self) -> None:
        """Lend and borrow nothing any more; no copy out of lent slots may run. Idempotent."""
        self._closing = True
        with contextlib.suppress(OSError):  # closed already
            self._wake.send(b"x")
        if self._thread is not None:
            self._thread.join(JOIN_S)
        with self._lock:
            self._selector.close()
            for each in (self._listener, self._wake, self._woken):
                each.close()
            for link in self._links:
                link.peer.close()

    # The thread

    def _run(self) -> None:
        try:
            while not self._closing:
                for key, _ in self._selector.select():
                    if key.fileobj is self._listener:
                        self._accept()
                    elif isinstance(key.data, _Link):
                        self._read(key.data)
        except Exception:
            logger.exception(
                "kvpool: sharing host memory with ranks on this host failed; until vLLM restarts "
                "each fetches from the tiers"
            )
            for number in self._lenders:  # connections stay open, as in `_read`
                self._post(LenderGone(number))

    def _add(self, link: _Link) -> None:
        self._links.add(link)
        self._selector.register(link.peer, selectors.EVENT_READ, link)

    def _accept(self) -> None:
        try:
            peer, _ = self._listener.accept()
        except OSError:
            return
        if len(self._links) >= MAX_LINKS + len(self._lenders) or not _is_own_user(peer):
            peer.close()
        else:
            self._add(_Link(peer, None, is_to_lender=False))

    def _read(self, link: _Link) -> None:
        """Take a message, or the end of a connection."""
        try:
            data, descriptors = _receive(link.peer)
        except BlockingIOError:
            return
        except OSError:
            data, descriptors = b"", []
        try:
            if not data:
                self._end(link)
            elif link.is_to_lender:
                self._take_answer(link, _FROM_LENDER.decode(data), descriptors)
            else:
                self._take(link, _FROM_BORROWER.decode(data))
        except (OSError, ValueError, *UNREADABLE) as error:
            self._selector.unregister(link.peer)
            if link.is_to_lender:  # stays open: its end would say that this rank reads no more
                assert link.number is not None
                self._leave(link.number, error)
            else:
                self._drop(link)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _end(self, link: _Link) -> None:
        """Close a connection whose other end has closed it, or whose process has ended."""
        self._selector.unregister(link.peer)
        self._drop(link)
        if link.number is None:
            return
        if link.is_to_lender:
            self._leave(link.number, OSError("connection closed"))
        else:
            self._post(BorrowerGone(link.number))

    def _leave(self, number: int, error: Exception) -> None:
        logger.warning(
            "kvpool: rank %d on this host lends nothing any more, its chunks are fetched from the "
            "tiers: %s",
            self._cards[number].rank,
            error,
        )
        self._post(LenderGone(number))

    def _drop(self, link: _Link) -> None:
        self._links.discard(link)
        with self._lock:
            link.peer.close()

    def _take(self, link: _Link, message: _Hello | _Ask | _Returned) -> None:
        """Pass on a borrower's message; ValueError if it may not come now."""
        number, arena = link.number, self._arena
        if isinstance(message, _Hello) and number is None:
            is_free = message.number in self._cards and message.number not in self._borrowers
            if not (is_free and hmac.compare_digest(message.token, self.card.token)):
                raise ValueError("a stranger")
            if arena.descriptor is None:
                raise ValueError("there is no memory to share")
            welcome = _encode(_Welcome(arena.file_start, arena.slot_bytes, arena.num_slots))
            passed = array.array("i", [arena.descriptor])
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, passed)]
            link.peer.sendmsg([welcome], rights, socket.MSG_DONTWAIT)
            link.number, self._borrowers[message.number] = message.number, link
        elif isinstance(message, _Ask) and number is not None:
            slabs = _slabs_of(message, arena.slot_bytes)
            self._post(Ask(number, slabs, message.generation))
        elif isinstance(message, _Returned) and number is not None:
            self._post(Returned(number, tuple(message.loans)))
        else:
            raise ValueError("an unexpected message")

    def _take_answer(
        self, link: _Link, message: _Welcome | _Lent, descriptors: Sequence[int]
    ) -> None:
        """Pass on a lender's message; OSError or ValueError if it cannot be used."""
        assert link.number is not None
        if isinstance(message, _Lent):
            slots_of = self._arena.member_slots
            loans = [(loan_id, slots_of(link.number, slots)) for loan_id, slots in message.loans]
            self._post(Lent(link.number, tuple(loans)))
            return
        if len(descriptors) != 1:
            raise ValueError("no memory file")
        if not fcntl.fcntl(descriptors[0], fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise ValueError("its memory may shrink, and reading beyond the end would kill us")
        place = message.start, message.slot_bytes, message.num_slots
        self._arena.add_member(link.number, descriptors[0], *place, self._on_mapped)


def _new_socket() -> socket.socket:
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    peer.setblocking(False)
    return peer


def _is_own_user(peer: socket.socket) -> bool:
    data = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(data)[1] == os.geteuid())


def _receive(peer: socket.socket) -> tuple[bytes, list[int]]:
    """Receive a message and the descriptors that came with it."""
    # Not `socket.recv_fds`, which drops the flags (CPython 3.11).
    room = socket.CMSG_SPACE(array.array("i").itemsize)
    flags = socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT
    data, ancillary, _, _ = peer.recvmsg(MAX_MESSAGE, room, flags)
    descriptors = array.array("i")
    for _, _, passed in ancillary:
        descriptors.frombytes(passed)
    return data, list(descriptors)
