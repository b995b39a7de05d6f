"""The exchange between ranks of a host: messages, mapped memory, and the end of a connection."""

import contextlib
import ctypes
import mmap
import os
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from queue import SimpleQueue

import msgspec
import pytest

from vllm_kvpool.identity.keys import HeadShard, LayerSpan
from vllm_kvpool.layout.topology import LocalCell, ReplicaRank
from vllm_kvpool.staging.arena import Arena
from vllm_kvpool.staging.slots import Slot
from vllm_kvpool.storage.base import Buffer, ChunkRef
from vllm_kvpool.storage.contents.cell_format import HEADER_BYTES
from vllm_kvpool.transfer import replicas
from vllm_kvpool.transfer.engine import Event
from vllm_kvpool.transfer.ops import (
    Ask,
    BorrowerGone,
    JobPages,
    LenderGone,
    Lent,
    Returned,
    Slab,
    SlabKind,
)
from vllm_kvpool.transfer.replicas import Card, ReplicaExchange

CELL_BYTES, SMALL_BYTES, GENERATION, LIMIT_S = 5000, 700, 7, 20.0
PLACE = LocalCell(HeadShard(0), LayerSpan(0, 1), 0, 1, 0, 1)
KINDS = (
    SlabKind(("x@", "y@"), (CELL_BYTES, SMALL_BYTES), (PLACE,) * 2),
    SlabKind(("z@",), (CELL_BYTES,), (PLACE,), part="/1"),
)
BORROWER, LENDER = 0, 1


def slab_of(name: str, place: int, number: int) -> Slab:
    """Return the slab of a chunk, of kind `number`, as a borrower knows it."""
    chunk = ChunkRef(name, "parent", place)
    slab = Slab.of(KINDS[number], chunk, name * 2)
    return slab._replace(fetcher=LENDER, pages=(JobPages((7,), 0, 0, 32),))


ASK = Ask(LENDER, ((3, slab_of("a", 0, 0)), (4, slab_of("b", 1, 1))), GENERATION)
LENT = Lent(BORROWER, ((3, (Slot(5), Slot(9))), (4, ())))


class End:
    """A rank's exchange, its arena, and its engine's events. Each slot is full of its own
    number."""

    def __init__(self, number: int) -> None:
        self.arena = Arena(1 << 20, CELL_BYTES, shared=True)
        for slot in range(self.arena.num_slots):
            view = self.arena.buffers([Slot(slot)], [CELL_BYTES])[0].view
            view[:] = bytes([slot]) * CELL_BYTES
        self.exchange = ReplicaExchange(ReplicaRank(number, 0), number)
        self.events: SimpleQueue[Event] = SimpleQueue()

    def next_event(self) -> Event:
        return self.events.get(timeout=LIMIT_S)

    def close(self) -> None:
        self.exchange.close()
        self.arena.close()


class Pair:
    """A borrower and a lender with the same configuration."""

    def __init__(self, on_mapped: Callable[[Buffer], None] | None = None) -> None:
        self.ends = self.borrower, self.lender = End(BORROWER), End(LENDER)
        cards = [end.exchange.card.pack() for end in self.ends]
        for end in self.ends:
            end.exchange.join(cards)
        for end in self.ends:
            end.exchange.start(end.arena, end.events.put, on_mapped)

    def ask(self) -> Event:
        self.borrower.exchange.send(ASK)
        return self.lender.next_event()

    def lend(self, message: Lent = LENT) -> Event:
        self.lender.exchange.send(message)
        return self.borrower.next_event()

    def close(self) -> None:
        for end in self.ends:
            end.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


def described(slabs: Iterable[Slab]) -> list[tuple[object, ...]]:
    """Return slabs with keys of their cells in place of their kinds, which compare by identity."""
    return [(*slab._replace(kind=None), slab.cell_keys(), slab.kind.part) for slab in slabs]


def wanted(slabs: Iterable[Slab]) -> list[tuple[object, ...]]:
    return described(slab._replace(pages=(), fetcher=None) for slab in slabs)


def test_messages_reach_the_other_engine(pair: Pair) -> None:
    event = pair.ask()
    assert isinstance(event, Ask)
    assert (event.member, event.generation) == (BORROWER, GENERATION)
    assert [loan_id for loan_id, _ in event.loans] == [3, 4]
    assert described(slab for _, slab in event.loans) == wanted(slab for _, slab in ASK.loans)
    assert all(not slab.kind.cells for _, slab in event.loans), "pages of the borrower"
    lent = pair.lend()
    assert isinstance(lent, Lent)
    assert (lent.member, [len(slots) for _, slots in lent.loans]) == (LENDER, [2, 0])
    pair.borrower.exchange.send(Returned(LENDER, (3,)))
    assert pair.lender.next_event() == Returned(BORROWER, (3,))


def test_lent_slots_are_mapped(pair: Pair) -> None:
    """A copier reads the lender's bytes at the addresses of its slots."""
    pair.ask()
    lent = pair.lend()
    assert isinstance(lent, Lent)
    addresses = pair.borrower.arena.payload_addresses([*lent.loans[0][1], Slot(4)])
    payload = CELL_BYTES - HEADER_BYTES
    read = [bytes((ctypes.c_char * payload).from_address(int(a))) for a in addresses]
    assert read == [bytes([number]) * payload for number in (5, 9, 4)], "the last is its own"


def test_mapping_of_lent_slots_cannot_be_written(pair: Pair) -> None:
    pair.ask()
    pair.lend()
    [slots] = pair.borrower.arena._mapped
    assert slots.view.readonly
    descriptor = pair.lender.arena.descriptor
    assert descriptor is not None
    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, 0)


def test_mapping_is_page_locked_in_parts_of_whole_slots() -> None:
    parts: SimpleQueue[Buffer] = SimpleQueue()
    pair = Pair(parts.put)
    try:
        pair.ask()
        pair.lend()
        part = parts.get(timeout=LIMIT_S)
        slots = pair.borrower.arena.num_slots * pair.borrower.arena.slot_bytes
        assert part.nbytes == slots, "less than a step"
        assert part.address % mmap.PAGESIZE == 0
    finally:
        pair.close()


@pytest.mark.parametrize("slot", [Slot(10**6), Slot(-1)])
def test_slots_beyond_the_lenders_memory_end_its_lending(pair: Pair, slot: Slot) -> None:
    pair.ask()
    assert pair.lend(Lent(BORROWER, ((3, (Slot(1), slot)),))) == LenderGone(LENDER)
    pair.borrower.exchange.send(Returned(LENDER, (3,)))
    assert pair.lender.next_event() == Returned(BORROWER, (3,)), "its other loans go on"


@pytest.mark.parametrize("number", [BORROWER, LENDER])
def test_end_that_closes_is_gone_as_borrower_and_lender(pair: Pair, number: int) -> None:
    closing, other = pair.ends[number], pair.ends[1 - number]
    closing.exchange.send(ASK._replace(member=1 - number))
    assert isinstance(other.next_event(), Ask), "it is known as a borrower"
    closing.exchange.close()
    told = {other.next_event(), other.next_event()}
    assert told == {LenderGone(number), BorrowerGone(number)}


def test_lender_that_cannot_be_reached_is_gone() -> None:
    ends = End(BORROWER), End(LENDER)
    cards = [end.exchange.card.pack() for end in ends]
    ends[1].close()
    ends[0].exchange.join(cards)
    ends[0].exchange.start(ends[0].arena, ends[0].events.put)
    assert ends[0].next_event() == LenderGone(LENDER)
    ends[0].close()


def test_message_is_cut_where_it_is_too_long(pair: Pair) -> None:
    """Each part is a complete message."""
    slabs = [slab_of(f"chunk{place}" * 20, place, place % 2) for place in range(400)]
    pair.borrower.exchange.send(Ask(LENDER, tuple(enumerate(slabs)), GENERATION))
    found: list[tuple[int, Slab]] = []
    while len(found) < len(slabs):
        event = pair.lender.next_event()
        assert isinstance(event, Ask)
        found += event.loans
    assert [loan_id for loan_id, _ in found] == list(range(len(slabs)))
    assert described(slab for _, slab in found) == wanted(slabs)


def test_message_names_the_cells_of_each_kind_once() -> None:
    slabs = [slab_of(f"chunk{place}", place, place % 2) for place in range(6)]
    [data] = replicas._packed(Ask(LENDER, tuple(enumerate(slabs)), GENERATION))
    message = replicas._FROM_BORROWER.decode(data)
    assert isinstance(message, replicas._Ask)
    assert message.kinds == [("", ("x@", "y@")), ("/1", ("z@",))]


def test_prompt_end_is_asked_for_by_its_own_sizes(pair: Pair) -> None:
    end = slab_of("a", 0, 0)._replace(sizes=(90, 80), nbytes=170, end_tokens=5)
    pair.borrower.exchange.send(Ask(LENDER, ((1, end),), GENERATION))
    event = pair.lender.next_event()
    assert isinstance(event, Ask)
    [(_, asked)] = event.loans
    assert (asked.id, asked.sizes, asked.nbytes) == ("a", (90, 80), 170)


def test_thread_that_fails_ends_the_lending_of_the_others(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise loads would wait for answers that no thread reads."""

    def broken(exchange: ReplicaExchange, link: object) -> None:
        raise RuntimeError("it cannot be read")

    monkeypatch.setattr(ReplicaExchange, "_read", broken)
    pair.borrower.exchange.send(ASK)
    assert pair.lender.next_event() == LenderGone(BORROWER)


# Strangers. The tests act as the borrower, which has no connection of its own


@pytest.fixture
def lender() -> Iterator[End]:
    """A lender whose borrower has not connected."""
    end, absent = End(LENDER), ReplicaExchange(ReplicaRank(BORROWER, 0), BORROWER)
    end.exchange.join([absent.card.pack(), end.exchange.card.pack()])
    end.exchange.start(end.arena, end.events.put)
    yield end
    end.close()
    absent.close()


@contextlib.contextmanager
def connected(lender: End) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
        peer.settimeout(LIMIT_S)
        peer.connect(lender.exchange.card.address)
        yield peer


def hello(lender: End, token: bytes | None = None, number: int = BORROWER) -> bytes:
    card = lender.exchange.card
    return msgspec.msgpack.encode(replicas._Hello(token or card.token, number))


def ask(*sizes: object, kinds: Sequence[object] = (("", ("x@",)),), number: object = 0) -> bytes:
    """Return a message that asks for a slab."""
    return msgspec.msgpack.encode(
        replicas._Ask(0, kinds, [(1, number, ChunkRef("a"), "aa", sizes)])
    )


RETURNED = msgspec.msgpack.encode(replicas._Returned([1]))
# A message with a field that nests deeper than a parser's limit.
NESTED = b"\x83" + RETURNED[1:] + b"\xa1x" + b"\x91" * 50_000 + b"\xc0"
TWO_CELLS = (("", ("x@", "y@")),)
UNSOUND = (
    ask(1 << 20),  # larger than a slot
    ask(CELL_BYTES, 1 << 20, kinds=TWO_CELLS),
    ask(CELL_BYTES, number=1),  # no such kind
    ask(CELL_BYTES, number=-1),
    ask(CELL_BYTES, kinds=()),
    ask(),
    ask(kinds=(("", ()),)),  # a slab without cells
    ask(CELL_BYTES, CELL_BYTES),  # more sizes than cells
    ask(CELL_BYTES, kinds=TWO_CELLS),
    ask(0),
    ask(-CELL_BYTES),
    ask(CELL_BYTES, 0, kinds=TWO_CELLS),
    ask(str(CELL_BYTES)),
    ask(CELL_BYTES, kinds=("x@",)),
    NESTED,
    b"\xc1",
    b"{}",
)


def end_of(peer: socket.socket) -> list[bytes]:
    """Return what is received until the other end closes."""
    received = []
    with contextlib.suppress(ConnectionResetError):
        while data := peer.recv(1 << 17):
            received.append(data)
    return received


@pytest.mark.parametrize(
    ("said", "answers"),
    [
        (lambda lender: [hello(lender, bytes(16))], 0),
        (lambda lender: [hello(lender, number=9)], 0),
        (lambda lender: [hello(lender), hello(lender)], 1),
        (lambda lender: [ask(CELL_BYTES)], 0),
        (lambda lender: [RETURNED], 0),
        (lambda lender: [bytes(100)], 0),
        *((partial(lambda unsound, lender: [hello(lender), unsound], each), 1) for each in UNSOUND),
    ],
)
def test_message_that_may_not_come_ends_its_connection(
    lender: End, said: Callable[[End], list[bytes]], answers: int
) -> None:
    """The engine gets no event, and the borrower's loans last as long as before."""
    with connected(lender) as peer:
        for message in said(lender):
            peer.send(message)
        assert len(end_of(peer)) == answers
    with connected(lender) as peer:  # it serves other peers as before
        peer.send(hello(lender, bytes(16)))
        assert not end_of(peer)
    told = [lender.events.get_nowait() for _ in range(lender.events.qsize())]
    assert all(event == LenderGone(BORROWER) for event in told)


def test_second_connection_of_a_borrower_is_refused(lender: End) -> None:
    """The end of one connection would end loans of the other."""
    with connected(lender) as first, connected(lender) as second:
        first.send(hello(lender))
        assert first.recv(1 << 16)
        second.send(hello(lender))
        assert not end_of(second)
        first.send(RETURNED)
        assert lender.next_event() == Returned(BORROWER, (1,))


def test_process_of_another_user_is_not_read(lender: End, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection is closed at once, and nothing of it is read."""
    monkeypatch.setattr(replicas, "_is_own_user", lambda peer: False)
    was_read = threading.Event()
    monkeypatch.setattr(ReplicaExchange, "_read", lambda exchange, link: was_read.set())
    with connected(lender) as peer:
        with contextlib.suppress(BrokenPipeError):
            peer.send(hello(lender))
        assert end_of(peer) == []
    assert not was_read.is_set()


def test_message_over_the_limit_ends_its_connection(lender: End) -> None:
    """The reader stops at the limit."""
    slabs = [(n, 0, ChunkRef(f"slab{n}"), "aa", (CELL_BYTES,)) for n in range(5_000)]
    large = msgspec.msgpack.encode(replicas._Ask(0, [("", ("x@",))], slabs))
    assert len(large) > replicas.MAX_MESSAGE
    with connected(lender) as peer:
        peer.send(hello(lender))
        peer.send(large)
        assert len(end_of(peer)) == 1
    assert lender.events.empty()


# Cards


def test_a_card_is_as_long_as_any_other() -> None:
    card = Card(b"h" * 16, b"n" * 16, b"t" * 16, ReplicaRank(3, 1), 7)
    assert Card.unpack(card.pack()) == card
    other = Card(b"x" * 16, b"y" * 16, b"z" * 16, ReplicaRank(70_000, 0), 1 << 31)
    assert len(card.pack()) == len(other.pack())


def test_hosts_are_told_apart() -> None:
    """Each host has its own set, which all its ranks know."""
    exchanges = [ReplicaExchange(ReplicaRank(rank, 0), 10 + rank) for rank in range(4)]
    cards = [Card.unpack(each.card.pack()) for each in exchanges]
    told = [
        msgspec.structs.replace(card, host=bytes([i // 2]) * 16) for i, card in enumerate(cards)
    ]
    for exchange, card in zip(exchanges, told, strict=True):
        exchange.card = card
        exchange.join([each.pack() for each in told])
    assert [dict(each.siblings) for each in exchanges] == [
        {ReplicaRank(1, 0): 1},
        {ReplicaRank(0, 0): 0},
        {ReplicaRank(3, 0): 3},
        {ReplicaRank(2, 0): 2},
    ]
    assert exchanges[2].ranks_of([2, 3]) == (12, 13)
    for exchange in exchanges:
        exchange.close()


def test_who_cannot_share_its_memory_is_on_no_host() -> None:
    both = [ReplicaExchange(ReplicaRank(rank, 0), rank, shares=rank == 0) for rank in range(2)]
    for each in both:
        each.join([other.card.pack() for other in both])
        assert not each.siblings
        each.close()
