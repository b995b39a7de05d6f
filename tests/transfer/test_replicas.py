"""The exchange between replicas: what each answer means, and what ends a connection.

A borrower asks for two slabs: `a` has two cells, `b` one.
"""

import contextlib
import mmap
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from queue import SimpleQueue

import msgspec
import pytest

from vllm_kvpool.identity.keys import HeadShard, LayerSpan
from vllm_kvpool.layout.topology import LocalCell, ReplicaRank
from vllm_kvpool.staging.arena import Arena
from vllm_kvpool.staging.slots import Slot
from vllm_kvpool.storage.base import ChunkRef
from vllm_kvpool.transfer import replicas
from vllm_kvpool.transfer.ops import (
    CellOutcome,
    JobPages,
    Lend,
    Lent,
    LoanEnded,
    LoanOver,
    Slab,
    SlabKind,
)
from vllm_kvpool.transfer.replicas import Card, ReplicaExchange

DONE, MISSING = CellOutcome.DONE, CellOutcome.MISSING
TIMED_OUT, UNREACHABLE = CellOutcome.TIMED_OUT, CellOutcome.UNREACHABLE
CELL_BYTES, GENERATION, PATIENCE_S, LIMIT_S = 5000, 7, 1.0, 20.0
SMALL_BYTES = 700
SLOTS = ((Slot(5), Slot(9)), (Slot(2),))  # of a lender, for the cells of each slab
PLACE = LocalCell(HeadShard(0), LayerSpan(0, 1), 0, 1, 0, 1)
KINDS = (
    SlabKind(("x@", "y@"), (CELL_BYTES, SMALL_BYTES), (PLACE,) * 2),
    SlabKind(("z@",), (CELL_BYTES,), (PLACE,), part="/1"),
)


def slab_of(name: str, place: int, number: int) -> Slab:
    """The slab of a chunk, of kind `number`, as a borrower knows it."""
    chunk = ChunkRef(name, "parent", place)
    slab = Slab.of(KINDS[number], chunk, name * 2)
    return slab._replace(fetcher=1, pages=(JobPages((7,), 0, 0, 32),))


SLABS = (slab_of("a", 0, 0), slab_of("b", 1, 1))

Answer = Callable[["Lender", Lend | LoanOver], None]


class Lender:
    """An end whose engine is a script: `answer` is called with each event."""

    def __init__(self, answer: Answer) -> None:
        self.arena = Arena(1 << 20, CELL_BYTES, shared=True)
        for slot in range(self.arena.num_slots):
            self.arena.buffers([Slot(slot)], [CELL_BYTES])[0].view[:] = bytes([slot]) * CELL_BYTES
        self.exchange = ReplicaExchange(ReplicaRank(1, 0), 1)
        self.events: SimpleQueue[Lend | LoanOver] = SimpleQueue()
        self.answer = answer

    def post(self, event: Lend | LoanOver) -> None:
        self.events.put(event)
        self.answer(self, event)


def lends(lender: Lender, event: Lend | LoanOver) -> None:
    """As an engine that has everything."""
    if isinstance(event, Lend):
        lender.exchange.answer(Lent(event.loan_id, SLOTS[: len(event.slabs)]))
    else:
        lender.exchange.answer(LoanEnded(event.loan_id, held=True))


def lends_one(lender: Lender, event: Lend | LoanOver) -> None:
    if isinstance(event, Lend):
        lender.exchange.answer(Lent(event.loan_id, ((), SLOTS[1])))
    else:
        lends(lender, event)


def was_late(lender: Lender, event: Lend | LoanOver) -> None:
    """Its loan has run out: the slots may be anything by now."""
    if isinstance(event, Lend):
        lends(lender, event)
    else:
        lender.exchange.answer(LoanEnded(event.loan_id, held=False))


def says_nothing(lender: Lender, event: Lend | LoanOver) -> None:
    pass


def never_confirms(lender: Lender, event: Lend | LoanOver) -> None:
    if isinstance(event, Lend):
        lends(lender, event)


def lends_these(*slots: Sequence[Slot]) -> Answer:
    """As an engine that has these."""

    def answer(lender: Lender, event: Lend | LoanOver) -> None:
        if isinstance(event, Lend):
            lender.exchange.answer(Lent(event.loan_id, slots))
        else:
            lends(lender, event)

    return answer


def ends(lender: Lender, event: Lend | LoanOver) -> None:
    threading.Thread(target=lender.exchange.close).start()


class Pair:
    """A borrower and its lender."""

    def __init__(self, answer: Answer) -> None:
        self.borrower = ReplicaExchange(ReplicaRank(0, 0), 0)
        self.lender = Lender(answer)
        self.arena = Arena(1 << 20, CELL_BYTES)
        cards = [self.borrower.card.pack(), self.lender.exchange.card.pack()]
        self.borrower.join(cards)
        self.lender.exchange.join(cards)
        self.borrower.start(self.arena, lambda event: None, PATIENCE_S)
        self.lender.exchange.start(self.lender.arena, self.lender.post, PATIENCE_S)

    def borrow(self) -> list[CellOutcome]:
        """Borrow `SLABS` into slots 0, 1 and 2."""
        slots = map(Slot, range(3))
        buffers = [
            self.arena.buffers([next(slots) for _ in slab.sizes], slab.sizes) for slab in SLABS
        ]
        return self.borrower.borrow(SLABS, buffers, GENERATION)

    def here(self) -> list[int | None]:
        """The slots of the lender whose bytes are in slots 0, 1 and 2, or None for none."""
        cells = [
            bytes(self.arena.buffers([Slot(place)], [nbytes])[0].view)
            for place, nbytes in enumerate((CELL_BYTES, SMALL_BYTES, CELL_BYTES))
        ]
        return [cell[0] or None if len(set(cell)) == 1 else -1 for cell in cells]

    def next_event(self) -> Lend | LoanOver:
        return self.lender.events.get(timeout=LIMIT_S)

    def close(self) -> None:
        for end in (self.borrower, self.lender.exchange):
            end.close()
        for arena in (self.arena, self.lender.arena):
            arena.close()


@pytest.fixture
def pair_of() -> Iterator[Callable[[Answer], Pair]]:
    made: list[Pair] = []

    def make(answer: Answer) -> Pair:
        made.append(Pair(answer))
        return made[-1]

    yield make
    for pair in made:
        pair.close()


def described(slabs: Iterable[Slab]) -> list[tuple[object, ...]]:
    """Slabs with the keys of their cells in place of their kinds, which are equal to no others."""
    return [(*slab._replace(kind=None), slab.cell_keys(), slab.kind.part) for slab in slabs]


def test_what_is_lent_and_confirmed_is_here(pair_of: Callable[[Answer], Pair]) -> None:
    pair = pair_of(lends)
    for _ in range(2):  # the second time over the same connection
        assert pair.borrow() == [DONE, DONE]
        assert pair.here() == [5, 9, 2]
        event = pair.next_event()
        assert isinstance(event, Lend)
        assert (event.borrower, event.generation) == (0, GENERATION)
        assert described(event.slabs) == described(
            slab._replace(pages=(), fetcher=None) for slab in SLABS
        )
        assert all(not slab.kind.cells for slab in event.slabs), "pages of the borrower"
        assert pair.next_event() == LoanOver(event.loan_id)


@pytest.mark.parametrize(
    ("answer", "outcomes"),
    [
        (lends_one, [MISSING, DONE]),
        (was_late, [TIMED_OUT, TIMED_OUT]),
        (says_nothing, [TIMED_OUT, TIMED_OUT]),
        (never_confirms, [TIMED_OUT, TIMED_OUT]),
        (lends_these(SLOTS[0]), [UNREACHABLE, UNREACHABLE]),
        (lends_these(*SLOTS, SLOTS[1]), [UNREACHABLE, UNREACHABLE]),
        (lends_these((), ()), [MISSING, MISSING]),
        (ends, [UNREACHABLE, UNREACHABLE]),
    ],
)
def test_nothing_counts_that_is_not_confirmed(
    pair_of: Callable[[Answer], Pair], answer: Answer, outcomes: list[CellOutcome]
) -> None:
    pair = pair_of(answer)
    began = time.monotonic()
    assert pair.borrow() == outcomes
    assert time.monotonic() - began < LIMIT_S
    event = pair.next_event()
    assert isinstance(event, Lend)
    assert pair.next_event() == LoanOver(event.loan_id), "whatever has come of it, it is over"


@pytest.mark.parametrize("slot", [Slot(10**6), Slot(-1)])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_nothing_is_read_beyond_the_lenders_memory(
    pair_of: Callable[[Answer], Pair], place: int, slot: Slot
) -> None:
    slots = [5, 9, 2]
    slots[place] = slot
    pair = pair_of(lends_these(slots[:2], slots[2:]))
    assert DONE not in pair.borrow()
    assert pair.here()[place] is None


@pytest.mark.parametrize(
    "slots",
    [
        (SLOTS[0][:1], SLOTS[1]),
        ((*SLOTS[0], Slot(3)), SLOTS[1]),
        (SLOTS[0], (*SLOTS[1], Slot(3))),
        ((), (Slot(3), *SLOTS[1])),
    ],
)
def test_a_lender_of_more_or_fewer_cells_than_a_slab_has_is_left_alone(
    pair_of: Callable[[Answer], Pair], slots: tuple[Sequence[Slot], ...]
) -> None:
    """None of its slabs count, and the tiers are asked."""
    pair = pair_of(lends_these(*slots))
    assert DONE not in pair.borrow()
    event = pair.next_event()
    assert isinstance(event, Lend)
    assert pair.next_event() == LoanOver(event.loan_id)
    assert pair.borrow() == [UNREACHABLE] * 2
    assert pair.lender.events.empty()


def test_a_slab_that_is_not_there_is_missing_with_all_its_cells(
    pair_of: Callable[[Answer], Pair],
) -> None:
    pair = pair_of(lends_one)
    assert pair.borrow() == [MISSING, DONE]
    assert pair.here() == [None, None, 2]


def test_who_has_failed_is_left_alone_for_a_while(pair_of: Callable[[Answer], Pair]) -> None:
    pair = pair_of(says_nothing)
    pair.borrow()
    began = time.monotonic()
    assert pair.borrow() == [UNREACHABLE] * 2
    assert time.monotonic() - began < PATIENCE_S / 2


def test_a_borrower_that_is_closed_waits_for_nobody(pair_of: Callable[[Answer], Pair]) -> None:
    def closes(lender: Lender, event: Lend | LoanOver) -> None:
        if isinstance(event, Lend):
            threading.Thread(target=pair.borrower.close).start()

    pair = pair_of(closes)
    began = time.monotonic()
    assert pair.borrow() == [UNREACHABLE] * 2
    assert time.monotonic() - began < PATIENCE_S


def test_a_borrower_that_is_closed_as_it_connects_waits_for_nobody(
    pair_of: Callable[[Answer], Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = pair_of(says_nothing)

    def connected(peer: socket.socket) -> bool:
        if threading.current_thread() is threading.main_thread():  # not the lender's
            pair.borrower.close()
        return True

    monkeypatch.setattr(replicas, "_is_own_user", connected)
    began = time.monotonic()
    assert pair.borrow() == [UNREACHABLE] * 2
    assert time.monotonic() - began < PATIENCE_S / 2


def test_the_borrowers_mapping_cannot_be_written(pair_of: Callable[[Answer], Pair]) -> None:
    pair = pair_of(lends)
    descriptor = pair.lender.arena.descriptor
    assert descriptor is not None
    with pytest.raises(PermissionError):
        mmap.mmap(descriptor, mmap.PAGESIZE)
    before = pair.lender.arena.file_bytes
    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, 0)
    assert before == pair.lender.arena.file_bytes


# Strangers


def hello(pair: Pair, token: bytes | None = None, number: int = 0) -> bytes:
    card = pair.lender.exchange.card
    return msgspec.msgpack.encode(replicas._Hello(token or card.token, number))


def ask(*sizes: object, kinds: Sequence[object] = (("", ("x@",)),), number: object = 0) -> bytes:
    """A message that asks for a slab."""
    return msgspec.msgpack.encode(replicas._Ask(0, kinds, [(number, ChunkRef("a"), "aa", sizes)]))


ASK = ask(CELL_BYTES)
COPIED = msgspec.msgpack.encode(replicas._Copied())
# `_Copied` with a field that nests more deeply than a parser goes.
NESTED = b"\x82" + COPIED[1:] + b"\xa1x" + b"\x91" * 50_000 + b"\xc0"
PAIR = (("", ("x@", "y@")),)  # a kind of two cells
UNSOUND = (
    ask(1 << 20),  # larger than a slot
    ask(CELL_BYTES, 1 << 20, kinds=PAIR),
    ask(CELL_BYTES, number=1),  # no such kind
    ask(CELL_BYTES, number=-1),
    ask(CELL_BYTES, kinds=()),
    ask(),
    ask(kinds=(("", ()),)),  # a slab without cells
    ask(CELL_BYTES, CELL_BYTES),  # more sizes than cells
    ask(CELL_BYTES, kinds=PAIR),
    ask(0),
    ask(-CELL_BYTES),
    ask(CELL_BYTES, 0, kinds=PAIR),
    ask(str(CELL_BYTES)),
    ask(CELL_BYTES, kinds=("x@",)),
)


@pytest.mark.parametrize(
    "said",
    [
        lambda pair: [hello(pair, bytes(16))],
        lambda pair: [hello(pair, number=9)],
        lambda pair: [hello(pair), hello(pair)],
        lambda pair: [ASK],
        lambda pair: [COPIED],
        lambda pair: [hello(pair), COPIED],
        lambda pair: [hello(pair), ASK, ASK],
        *(partial(lambda unsound, pair: [hello(pair), unsound], each) for each in UNSOUND),
        lambda pair: [hello(pair), b"\xc1"],
        lambda pair: [b"{}"],
        lambda pair: [NESTED],
        lambda pair: [bytes(100)],
    ],
)
def test_whoever_says_what_may_not_come_is_let_go(
    pair_of: Callable[[Answer], Pair], said: Callable[[Pair], list[bytes]]
) -> None:
    """And others are served as before; a loan that was open ends."""
    pair = pair_of(says_nothing)
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    peer.settimeout(LIMIT_S)
    peer.connect(pair.lender.exchange.card.address)
    with peer:
        for message in said(pair):
            peer.send(message)
        while peer.recv(1 << 16):  # a greeting may come first
            pass
    pair.lender.answer = lends
    assert pair.borrow() == [DONE, DONE]
    told = [pair.lender.events.get_nowait() for _ in range(pair.lender.events.qsize())]
    begun = [event.loan_id for event in told if isinstance(event, Lend)]
    assert begun == [event.loan_id for event in told if isinstance(event, LoanOver)]


def test_an_unsound_ask_reaches_no_engine(pair_of: Callable[[Answer], Pair]) -> None:
    pair = pair_of(lends)
    for said in UNSOUND:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
            peer.settimeout(LIMIT_S)
            peer.connect(pair.lender.exchange.card.address)
            peer.send(hello(pair))
            peer.send(said)
            assert len(end_of(peer)) == 1, said
    assert pair.lender.events.empty()


def test_an_ask_names_the_cells_of_each_kind_once() -> None:
    """Many slabs of a message are of the same few kinds."""
    slabs = [slab_of(f"chunk{place}", place, place % 2) for place in range(6)]
    message = replicas._ask_for(slabs, GENERATION)
    assert message.kinds == [("", ("x@", "y@")), ("/1", ("z@",))]
    decoded = replicas._FROM_BORROWER.decode(replicas._encode(message))
    assert isinstance(decoded, replicas._Ask)
    asked = replicas._slabs_of(decoded)
    assert asked is not None
    assert described(asked) == described(slab._replace(pages=(), fetcher=None) for slab in slabs)
    assert len({slab.kind for slab in asked}) == 2


def test_a_prompt_end_is_lent_by_its_own_sizes() -> None:
    end = slab_of("a", 0, 0)._replace(sizes=(90, 80), nbytes=170, end_tokens=5)
    [asked] = replicas._slabs_of(replicas._ask_for([end], GENERATION)) or ()
    assert (asked.id, asked.sizes, asked.nbytes) == ("a", (90, 80), 170)


def end_of(peer: socket.socket) -> list[bytes]:
    """What is received until the other end closes."""
    received = []
    while data := peer.recv(1 << 16):
        received.append(data)
    return received


def test_process_of_another_user_is_not_read(
    pair_of: Callable[[Answer], Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is let go as it connects, whatever it knows and sends."""
    pair = pair_of(lends)
    monkeypatch.setattr(replicas, "_is_own_user", lambda peer: False)
    was_read = threading.Event()

    def read(lender: object, link: replicas._Link) -> None:
        was_read.set()
        link.peer.shutdown(socket.SHUT_RDWR)
        link.peer.recv(1 << 16)

    monkeypatch.setattr(replicas._LenderThread, "_read", read)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
        peer.settimeout(LIMIT_S)
        peer.connect(pair.lender.exchange.card.address)
        with contextlib.suppress(BrokenPipeError):
            peer.send(hello(pair))
        with contextlib.suppress(ConnectionResetError):
            assert end_of(peer) == []
    assert not was_read.is_set()


def test_message_over_the_limit_ends_its_connection(pair_of: Callable[[Answer], Pair]) -> None:
    """No more of a message than the limit is ever read."""
    pair = pair_of(says_nothing)
    slabs = [(0, ChunkRef(f"slab{number}"), "aa", (CELL_BYTES,)) for number in range(5_000)]
    large = msgspec.msgpack.encode(replicas._Ask(0, [("", ("x@",))], slabs))
    assert len(large) > replicas.MAX_MESSAGE
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
        peer.settimeout(LIMIT_S)
        peer.connect(pair.lender.exchange.card.address)
        peer.send(hello(pair))
        peer.send(large)
        assert len(end_of(peer)) == 1
    assert pair.lender.events.empty()


def test_a_card_is_as_long_as_any_other() -> None:
    card = Card(b"h" * 16, b"n" * 16, b"t" * 16, ReplicaRank(3, 1), 7)
    assert Card.unpack(card.pack()) == card
    other = Card(b"x" * 16, b"y" * 16, b"z" * 16, ReplicaRank(70_000, 0), 1 << 31)
    assert len(card.pack()) == len(other.pack())


def test_hosts_are_told_apart() -> None:
    """Each host has a set of its own, whose members all know it."""
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
