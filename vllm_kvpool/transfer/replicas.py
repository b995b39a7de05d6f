"""Ranks of one host that hold the same KV copy slabs out of each other's host memory.

borrower's get-replica lane                      lender's replicas thread     its engine thread
    Ask (slabs, generation)   ────────────────▶  Lend  ──────────────────▶  fetch, pin
    Lent (offsets)            ◀──────────────────────────────────────────  Lent
    copies out of the lender's arena, which it has mapped read-only
    Copied                    ────────────────▶  LoanOver ───────────────▶  unpin
    Ended (held)              ◀──────────────────────────────────────────  LoanEnded
"""

import array
import contextlib
import fcntl
import hashlib
import hmac
import logging
import mmap
import os
import secrets
import select
import selectors
import socket
import struct
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np

from vllm_kvpool.layout.topology import ReplicaRank
from vllm_kvpool.parsing import UNREADABLE
from vllm_kvpool.staging.arena import Arena
from vllm_kvpool.storage.base import Buffer, ChunkRef
from vllm_kvpool.storage.breaker import Breaker
from vllm_kvpool.transfer.ops import (
    CellOutcome,
    Lend,
    Lent,
    LoanEnded,
    LoanOver,
    Slab,
    SlabKind,
)

logger = logging.getLogger(__name__)

MAX_MESSAGE = 1 << 16
MAX_LINKS = 64  # connections of borrowers
JOIN_S = 0.5
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = "/proc/self/ns/net"  # abstract sockets are known within one
_CREDENTIALS = struct.Struct("3i")  # process, user, group
_CARD = struct.Struct("<16s16s16sIII")


class Card(msgspec.Struct, frozen=True):
    """The card that ranks exchange at start; ranks with the same `host` can share memory."""

    host: bytes
    name: bytes
    token: bytes
    place: ReplicaRank
    rank: int  # of the engine

    def pack(self) -> bytes:
        """Bytes; of the same length for every card."""
        return _CARD.pack(self.host, self.name, self.token, *self.place, self.rank)

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        host, name, token, tp_rank, pcp_rank, rank = _CARD.unpack(data)
        return cls(host, name, token, ReplicaRank(tp_rank, pcp_rank), rank)

    @property
    def address(self) -> str:
        """The abstract address of its socket."""
        return f"\0kvpool-replica-{self.name.hex()}"


def host_digest() -> bytes:
    """Equal in processes that can pass each other memory: same kernel, network and user."""
    try:
        parts = (BOOT_ID.read_text().strip(), os.readlink(_NETWORK), str(os.geteuid()))
    except OSError:  # unknown: then no other process is on this host
        return secrets.token_bytes(16)
    return hashlib.blake2b("/".join(parts).encode(), digest_size=16).digest()


_Kind = tuple[str, tuple[str, ...]]  # `SlabKind.part` and `key_prefixes`
_Name = tuple[int, ChunkRef, str, tuple[int, ...]]  # which kind; as the fields of a `Slab`


class _Hello(msgspec.Struct, tag="hello"):
    token: bytes
    number: int


class _Ask(msgspec.Struct, tag="ask"):
    generation: int
    kinds: list[_Kind]
    slabs: list[_Name]


class _Copied(msgspec.Struct, tag="copied"):
    pass


class _Welcome(msgspec.Struct, tag="welcome"):
    """With it comes the arena's descriptor."""

    nbytes: int


class _LentSlabs(msgspec.Struct, tag="lent"):
    offsets: list[list[int]]  # of each slab's cells in the arena's file; none: it is not here


class _Ended(msgspec.Struct, tag="ended"):
    held: bool


_encode = msgspec.msgpack.Encoder().encode
_FROM_BORROWER = msgspec.msgpack.Decoder(_Hello | _Ask | _Copied)
_FROM_LENDER = msgspec.msgpack.Decoder(_Welcome | _LentSlabs | _Ended)


def _ask_for(slabs: Sequence[Slab], generation: int) -> _Ask:
    kinds: dict[SlabKind, int] = {}
    names = [
        (kinds.setdefault(slab.kind, len(kinds)), slab.chunk, slab.chunk_hex, slab.sizes)
        for slab in slabs
    ]
    return _Ask(generation, [(kind.part, kind.key_prefixes) for kind in kinds], names)


def _slabs_of(message: _Ask) -> tuple[Slab, ...] | None:
    """The slabs that a borrower asks for; None if the message is not sound."""
    kinds = [SlabKind(prefixes, (), part=part) for part, prefixes in message.kinds]
    slabs = []
    for number, chunk, chunk_hex, sizes in message.slabs:
        if not 0 <= number < len(kinds) or not sizes or min(sizes) <= 0:
            return None
        if len(sizes) != len(kinds[number].key_prefixes):
            return None
        kind = kinds[number]
        slabs.append(Slab(chunk.id + kind.part, kind, chunk, chunk_hex, sizes, sum(sizes)))
    return tuple(slabs)


class ReplicaExchange:
    """The end of a rank, as borrower and lender.

    Copied bytes count only if the lender confirms that it held the cells until then. A connection
    carries one loan at a time, and its end, even by `kill -9`, ends the loan; any unexpected
    message ends the connection, and the borrower asks the tiers. A borrower waits `timeout_s`; a
    replica that was late or gone is not asked for a while (`storage/breaker.py`).

    Nothing has a name in a file system: sockets are abstract, arenas are memory files sealed
    against other writers. Both ends belong to one user, and the borrower knows the lender's token
    from its `Card`, which ranks exchange over the engine's own connections.

    Make it, exchange cards, `join`, then `start` it when there is an engine. `borrow` is for lanes,
    `answer` for the engine thread, the rest for the thread that made it.
    """

    def __init__(self, place: ReplicaRank, rank: int, *, shares: bool = True) -> None:
        self.card = Card(
            host_digest() if shares else secrets.token_bytes(16),
            secrets.token_bytes(16),
            secrets.token_bytes(16),
            place,
            rank,
        )
        self._listener = _new_socket()
        self._listener.bind(self.card.address)
        self._listener.listen(MAX_LINKS)
        self._listener.setblocking(False)
        self.number = 0
        self._cards: dict[int, Card] = {}  # of the others on this host
        self._lender: _LenderThread | None = None
        self._borrower: _Borrower | None = None

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
        self, arena: Arena, post: Callable[[Lend | LoanOver], None], timeout_s: float
    ) -> None:
        """Begin to lend; `post` takes the engine's events."""
        self._borrower = _Borrower(self.number, self._cards, timeout_s)
        self._lender = _LenderThread(self._listener, self.card.token, self._cards, arena, post)

    def borrow(
        self, slabs: Sequence[Slab], buffers: Sequence[Sequence[Buffer]], generation: int
    ) -> list[CellOutcome]:
        """Copy slabs out of the host memory of the members that fetch them, within `timeout_s`.

        `buffers` has one for each cell of each slab. MISSING: the lender has not got it; TIMED_OUT,
        UNREACHABLE: the lender did not answer.
        """
        if self._borrower is None:  # not started yet
            return [CellOutcome.UNREACHABLE] * len(slabs)
        return self._borrower.borrow(slabs, buffers, generation)

    def answer(self, message: Lent | LoanEnded) -> None:
        if self._lender is not None:
            self._lender.answer(message)

    def close(self) -> None:
        """Lend and borrow nothing any more; ends calls in progress. May be called twice."""
        if self._borrower is not None:
            self._borrower.close()
        if self._lender is not None:
            self._lender.close()
        else:
            self._listener.close()


def _new_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)


def _shut(peer: socket.socket) -> None:
    """End a connection that another thread may use."""
    with contextlib.suppress(OSError):  # it has ended already
        peer.shutdown(socket.SHUT_RDWR)


def _is_own_user(peer: socket.socket) -> bool:
    data = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(data)[1] == os.geteuid())


# The lender's side


@dataclass(eq=False)
class _Link:
    """A borrower's connection; `number` is the borrower's, once it has sent the token."""

    peer: socket.socket
    number: int | None = None
    loan_id: int | None = None


class _LenderThread:
    """Reads borrowers' messages and hands them to the engine."""

    def __init__(
        self,
        listener: socket.socket,
        token: bytes,
        siblings: Mapping[int, Card],
        arena: Arena,
        post: Callable[[Lend | LoanOver], None],
    ) -> None:
        self._listener = listener
        self._token = token
        self._siblings = siblings
        self._arena = arena
        self._post = post
        self._next_loan = 0
        self._links: set[_Link] = set()
        self._lock = threading.Lock()  # guards `_loans`, and sockets against being closed in use
        self._loans: dict[int, _Link] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, None)
        self._wake, self._woken = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="kvpool-replicas", daemon=True)
        self._thread.start()

    def answer(self, message: Lent | LoanEnded) -> None:
        with self._lock:
            link = self._loans.get(message.loan_id)
            if link is None:  # the borrower has gone
                return
            if isinstance(message, LoanEnded):
                del self._loans[message.loan_id]
                link.loan_id = None
                reply: _LentSlabs | _Ended = _Ended(message.held)
            else:
                place_of = self._arena.file_offset
                reply = _LentSlabs([[place_of(slot) for slot in slots] for slots in message.slots])
            try:
                link.peer.send(_encode(reply), socket.MSG_DONTWAIT)
            except OSError:
                _shut(link.peer)  # `_run` sees the end

    def close(self) -> None:
        self._closing = True
        with contextlib.suppress(OSError):  # it has ended
            self._wake.send(b"x")
        self._thread.join(JOIN_S)
        self._wake.close()

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
                "kvpool: lending to replicas on this host failed; until vLLM restarts they fetch "
                "from the tiers"
            )
        finally:
            self._selector.close()
            self._listener.close()
            self._woken.close()
            for link in list(self._links):
                self._drop(link)

    def _accept(self) -> None:
        try:
            peer, _ = self._listener.accept()
        except OSError:
            return
        if len(self._links) >= MAX_LINKS or not _is_own_user(peer):
            peer.close()
            return
        link = _Link(peer)
        self._links.add(link)
        self._selector.register(peer, selectors.EVENT_READ, link)

    def _read(self, link: _Link) -> None:
        try:
            data = link.peer.recv(MAX_MESSAGE, socket.MSG_DONTWAIT)
            message = _FROM_BORROWER.decode(data) if data else None
        except BlockingIOError:
            return
        except (OSError, *UNREADABLE):
            message = None
        if message is None or not self._take(link, message):
            self._selector.unregister(link.peer)
            self._drop(link)

    def _take(self, link: _Link, message: _Hello | _Ask | _Copied) -> bool:
        """Handle a message; False if it may not come now."""
        if isinstance(message, _Hello):
            if link.number is not None or message.number not in self._siblings:
                return False
            if not hmac.compare_digest(message.token, self._token):
                return False
            link.number = message.number
            return self._welcome(link)
        if isinstance(message, _Ask):
            if link.number is None or link.loan_id is not None:
                return False
            slabs = _slabs_of(message)
            if slabs is None or any(max(each.sizes) > self._arena.slot_bytes for each in slabs):
                return False
            self._next_loan += 1
            link.loan_id = self._next_loan
            with self._lock:
                self._loans[link.loan_id] = link
            self._post(Lend(link.loan_id, link.number, message.generation, slabs))
            return True
        loan_id = link.loan_id
        if loan_id is None:
            return False
        self._post(LoanOver(loan_id))
        return True

    def _welcome(self, link: _Link) -> bool:
        descriptor = self._arena.descriptor
        if descriptor is None:
            return False
        passed = array.array("i", [descriptor])
        try:
            link.peer.sendmsg(
                [_encode(_Welcome(self._arena.file_bytes))],
                [(socket.SOL_SOCKET, socket.SCM_RIGHTS, passed)],
                socket.MSG_DONTWAIT,
            )
        except OSError:
            return False
        return True

    def _drop(self, link: _Link) -> None:
        self._links.discard(link)
        with self._lock:
            loan_id, link.loan_id = link.loan_id, None
            if loan_id is not None:
                self._loans.pop(loan_id, None)
            link.peer.close()
        if loan_id is not None:
            self._post(LoanOver(loan_id))


# The borrower's side


@dataclass(eq=False)
class _OpenLoan:
    """The part of a `borrow` that one lender answers; `places` index the slabs of the call."""

    number: int
    peer: socket.socket
    places: list[int]
    copied: list[int] = field(default_factory=list)


class _Borrower:
    """Asks lenders, on the lanes' threads."""

    def __init__(self, number: int, siblings: Mapping[int, Card], timeout_s: float) -> None:
        self._number = number
        self._siblings = siblings
        self._timeout_s = timeout_s
        self._lock = threading.Lock()  # guards all below
        self._idle: defaultdict[int, list[socket.socket]] = defaultdict(list)
        self._busy: set[socket.socket] = set()
        self._arenas: dict[int, Any] = {}  # mapped for as long as this process lives
        self._breakers: defaultdict[int, Breaker] = defaultdict(Breaker)
        self._closed = False

    def borrow(
        self, slabs: Sequence[Slab], buffers: Sequence[Sequence[Buffer]], generation: int
    ) -> list[CellOutcome]:
        deadline = time.monotonic() + self._timeout_s
        outcomes = [CellOutcome.UNREACHABLE] * len(slabs)
        places_of: defaultdict[int, list[int]] = defaultdict(list)
        for place, slab in enumerate(slabs):
            assert slab.fetcher is not None, slab
            places_of[slab.fetcher].append(place)
        loans: dict[int, _OpenLoan] = {}  # by file descriptor
        poll = select.poll()
        for number, places in places_of.items():
            peer = self._connection(number)
            if peer is None:
                continue
            if not self._send(peer, _ask_for([slabs[place] for place in places], generation)):
                self._end(number, peer, failed=True)
                continue
            loans[peer.fileno()] = _OpenLoan(number, peer, places)
            poll.register(peer, select.POLLIN)
        while loans:
            left_ms = max(0.0, deadline - time.monotonic()) * 1000
            ready = poll.poll(left_ms)
            if not ready:
                break
            for fd, _ in ready:
                loan, failed = loans[fd], False
                try:
                    has_ended = self._take(loan, buffers, outcomes)
                except BlockingIOError:
                    continue
                except (OSError, ValueError) as error:
                    has_ended = failed = True
                    logger.warning(
                        "kvpool: replica %d on this host failed, its chunks are fetched from the "
                        "tiers: %s",
                        loan.number,
                        error,
                    )
                if has_ended:
                    poll.unregister(fd)
                    del loans[fd]
                    self._end(loan.number, loan.peer, failed=failed)
        for loan in loans.values():
            logger.warning(
                "kvpool: replica %d on this host did not lend %d parts of chunks within %.1f s; "
                "they are fetched from the tiers",
                loan.number,
                len(loan.places),
                self._timeout_s,
            )
            for place in loan.places:
                outcomes[place] = CellOutcome.TIMED_OUT
            self._end(loan.number, loan.peer, failed=True)
        return outcomes

    def _take(
        self,
        loan: _OpenLoan,
        buffers: Sequence[Sequence[Buffer]],
        outcomes: list[CellOutcome],
    ) -> bool:
        """Take an answer; whether the loan has ended.

        BlockingIOError if there is none yet; OSError or ValueError if the lender has failed.
        """
        match self._receive(loan.number, loan.peer):
            case _Welcome():
                return False
            case _LentSlabs(offsets) if not loan.copied:
                self._copy(loan, offsets, buffers, outcomes)
                if not self._send(loan.peer, _Copied()):
                    raise OSError("connection closed")
                return False
            case _Ended(held):
                for place in loan.copied:
                    outcomes[place] = CellOutcome.DONE if held else CellOutcome.TIMED_OUT
                return True
        raise ValueError("an unexpected message")

    def _copy(
        self,
        loan: _OpenLoan,
        offsets: Sequence[Sequence[int]],
        buffers: Sequence[Sequence[Buffer]],
        outcomes: list[CellOutcome],
    ) -> None:
        """Copy what is lent out of the lender's arena; it lacks a slab without offsets."""
        arena = self._arenas.get(loan.number)
        if arena is None or len(offsets) != len(loan.places):
            raise ValueError("its answer does not match the request")
        for place, starts in zip(loan.places, offsets, strict=True):
            outcomes[place] = CellOutcome.MISSING
            if not starts:
                continue
            if len(starts) != len(buffers[place]):
                raise ValueError("it lends a slab of another size")
            for start, buffer in zip(starts, buffers[place], strict=True):
                lent = arena[start : start + buffer.nbytes] if start >= 0 else arena[:0]
                if len(lent) < buffer.nbytes:
                    raise ValueError("it lends memory beyond the end of its arena")
                np.copyto(np.frombuffer(buffer.view, np.uint8), lent)
            outcomes[place] = CellOutcome.UNREACHABLE  # until it is confirmed
            loan.copied.append(place)

    def _connection(self, number: int) -> socket.socket | None:
        """A connection of this call's own, with the hello sent; None if there is none now."""
        with self._lock:
            if self._closed or self._breakers[number].is_open(time.monotonic()):
                return None
            if self._idle[number]:
                peer = self._idle[number].pop()
                self._busy.add(peer)
                return peer
        peer = _new_socket()
        peer.setblocking(False)
        try:
            peer.connect(self._siblings[number].address)
            if not _is_own_user(peer):
                raise OSError("another user listens on its socket")
            peer.send(_encode(_Hello(self._siblings[number].token, self._number)))
        except OSError as error:
            peer.close()
            with self._lock:
                self._breakers[number].tripped(time.monotonic())
            logger.warning(
                "kvpool: replica %d on this host cannot be reached, its chunks are fetched from "
                "the tiers: %s",
                number,
                error,
            )
            return None
        return peer if self._use(peer) else None

    def _use(self, peer: socket.socket) -> bool:
        """Record a new connection as busy; False after `close`, which would not end it."""
        with self._lock:
            if self._closed:
                peer.close()
                return False
            self._busy.add(peer)
        return True

    def _receive(self, number: int, peer: socket.socket) -> _Welcome | _LentSlabs | _Ended:
        """Receive a message; a welcome brings the lender's arena, which is mapped."""
        # Not `socket.recv_fds`, which drops the flags (CPython 3.11).
        room = socket.CMSG_SPACE(array.array("i").itemsize)
        flags = socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT
        data, ancillary, _, _ = peer.recvmsg(MAX_MESSAGE, room, flags)
        descriptors = array.array("i")
        for _, _, passed in ancillary:
            descriptors.frombytes(passed)
        try:
            if not data:
                raise OSError("connection closed")
            try:
                message: _Welcome | _LentSlabs | _Ended = _FROM_LENDER.decode(data)
            except UNREADABLE as error:
                raise ValueError(f"an unreadable message: {error}") from None
            if isinstance(message, _Welcome):
                self._map(number, descriptors[0] if descriptors else -1, message.nbytes)
            return message
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _map(self, number: int, descriptor: int, nbytes: int) -> None:
        with self._lock:
            if number in self._arenas:
                return
            seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
            if not seals & fcntl.F_SEAL_SHRINK:  # reading beyond the end would kill this process
                raise OSError("its memory file is not sealed against shrinking")
            memory = mmap.mmap(descriptor, nbytes, prot=mmap.PROT_READ)
            self._arenas[number] = np.frombuffer(memory, np.uint8)

    @staticmethod
    def _send(peer: socket.socket, message: msgspec.Struct) -> bool:
        try:
            peer.send(_encode(message), socket.MSG_DONTWAIT)
        except OSError:
            return False
        return True

    def _end(self, number: int, peer: socket.socket, *, failed: bool) -> None:
        """Return the connection for other calls, or close it if the lender has failed."""
        with self._lock:
            self._busy.discard(peer)
            if not failed:
                self._breakers[number].succeeded()
            elif not self._closed:
                self._breakers[number].tripped(time.monotonic())
            if failed or self._closed:
                peer.close()
            else:
                self._idle[number].append(peer)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for peer in self._busy:
                _shut(peer)
            for idle in self._idle.values():
                for peer in idle:
                    peer.close()
            self._idle.clear()
