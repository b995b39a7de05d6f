"""Lanes: what becomes of each cell of a batch, against tiers with faults, and what is counted."""

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from queue import SimpleQueue

import pytest

from tests.support.buffers import make_buffer, random_bytes
from tests.support.fakes import FakeClock, FakeCopier, FakeTrace
from tests.support.faults import Fault, FaultyStore
from tests.support.memory_store import MemoryStore
from tests.support.moves import plain, slab
from tests.support.store_contract import StoreContract
from vllm_kvpool.identity.keys import HeadShard, LayerSpan, key_digest
from vllm_kvpool.layout.topology import LocalCell, Piece
from vllm_kvpool.metrics import MetricsRegistry
from vllm_kvpool.staging.arena import SLOT_ALIGNMENT, Arena
from vllm_kvpool.staging.slots import Slot
from vllm_kvpool.storage.base import ChunkRef, GetOutcome, PutOutcome, Store
from vllm_kvpool.storage.contents.cell_format import HEADER_BYTES, verify, write_header
from vllm_kvpool.transfer import lanes
from vllm_kvpool.transfer.graph import Batch, BatchDone, Owner, Priority
from vllm_kvpool.transfer.lanes import BatchRunner, LaneThread
from vllm_kvpool.transfer.ops import (
    HOST,
    Cell,
    CellOutcome,
    JobPages,
    LaneName,
    OpKind,
)
from vllm_kvpool.transfer.trace import Span

PAYLOAD_BYTES = 1000
CELL_BYTES = HEADER_BYTES + PAYLOAD_BYTES
CHUNK_TOKENS, ROW_BYTES = 32, 8
DONE, EXISTED, MISSING = CellOutcome.DONE, CellOutcome.EXISTED, CellOutcome.MISSING
CORRUPT, FAILED, FULL = CellOutcome.CORRUPT, CellOutcome.FAILED, CellOutcome.FULL
KEYS = ("key-a", "key-b", "key-c")
GET = LaneName(OpKind.GET, 0)
LIMIT_S = 10.0
TIERS = (OpKind.GET, OpKind.PUT, OpKind.REMOVE)


class TestFaultyStoreWithoutRules(StoreContract):
    @pytest.fixture
    def store(self) -> Iterator[Store]:
        store = FaultyStore(MemoryStore("", 64 << 20))
        yield store
        store.close()


class Bench:
    """Lanes over two tiers, "near" and "far"."""

    def __init__(self, *, verify_checksum: bool = True) -> None:
        self.memories = [MemoryStore("", 1 << 20) for _ in range(2)]
        self.clock = FakeClock(100.0)
        self.takes_s = 0.25  # how long a call that is SLOW takes
        self.stores = [FaultyStore(memory, self._wait) for memory in self.memories]
        self.arena = Arena(8 * SLOT_ALIGNMENT, CELL_BYTES)
        self.gatherer, self.scatterer = FakeCopier(), FakeCopier()
        self.registry, self.trace = MetricsRegistry(), FakeTrace()
        self.runner = BatchRunner(
            tuple(self.stores),
            ("near", "far"),
            self.arena,
            self.gatherer,
            self.scatterer,
            CHUNK_TOKENS,
            verify_checksum,
            self.registry,
            self.trace,
            self.clock,
        )

    def _wait(self) -> None:
        self.clock.advance(self.takes_s)

    def perform(self, kind: OpKind, *keys: str, tier: int = 0) -> tuple[CellOutcome, ...]:
        return tuple(self.runner.perform(batch_of(kind, *keys, tier=tier)))

    def fill(self, slot: int, payload: bytes) -> None:
        self.arena.buffer(Slot(slot), CELL_BYTES).view[HEADER_BYTES:] = payload

    def payload(self, slot: int) -> bytes:
        return bytes(self.arena.buffer(Slot(slot), CELL_BYTES).view[HEADER_BYTES:])

    def store_cell(self, key: str, payload: bytes, *, sealed_as: str = "", tier: int = 0) -> None:
        buffer = make_buffer(HEADER_BYTES + len(payload))
        buffer.view[HEADER_BYTES:] = payload
        write_header(buffer.view, key_digest(sealed_as or key))
        assert self.memories[tier].put([key], [buffer], [ChunkRef("")]) == [PutOutcome.STORED]

    def get(self, *keys: str, tier: int = 0) -> tuple[CellOutcome, ...]:
        """GET, then CHECK of what came: as a load does."""
        got = self.perform(OpKind.GET, *keys, tier=tier)
        checked = self.perform(OpKind.CHECK, *keys)
        return tuple(c if g is DONE else g for g, c in zip(got, checked, strict=True))

    def counts(self, name: str) -> dict[str, float]:
        return {k: v for k, v in self.registry.snapshot().items() if k.startswith(name)}


def batch_of(
    kind: OpKind,
    *keys: str,
    tier: int = 0,
    pages: tuple[JobPages, ...] | None = None,
    pieces: Sequence[Piece] = (),
    chunk: int = 0,
    ready_at: float = 99.5,
    attempt: int = 1,
) -> Batch:
    """The batch of `keys`, in slots 0, 1, …"""
    whole = LocalCell(HeadShard(0), LayerSpan(4, 6), 1, 2, 0, 2, ROW_BYTES)
    cell = replace(whole, pieces=tuple(pieces)) if pieces else whole.with_groups((0, 0))
    where = pages or (JobPages((7,), 0, 0, CHUNK_TOKENS),)
    moves = kind in (OpKind.GATHER, OpKind.SCATTER)
    batch = Batch(LaneName(kind, tier if kind in TIERS else HOST), (), CELL_BYTES * len(keys))
    batch.cells = [
        Cell(key, ChunkRef("chunk", "", chunk), CELL_BYTES, cell, where)
        if moves
        else Cell(key, ChunkRef("chunk"), CELL_BYTES)
        for key in keys
    ]
    batch.slots = [None if kind is OpKind.REMOVE else Slot(i) for i in range(len(keys))]
    batch.ready_at, batch.attempt, batch.generation = ready_at, attempt, 0
    batch.owners = (Owner(Priority.LOAD, "a", 1), Owner(Priority.LOAD, "b", 2))
    return batch


def payload_of(key: str) -> bytes:
    return random_bytes(PAYLOAD_BYTES, sum(key.encode()))


# Cells


@pytest.mark.parametrize("tier", [0, 1])
def test_what_is_sealed_and_put_is_got_back_and_checked(tier: int) -> None:
    bench = Bench()
    for i, key in enumerate(KEYS):
        bench.fill(i, payload_of(key))
    assert bench.perform(OpKind.SEAL, *KEYS) == (DONE,) * 3
    assert bench.perform(OpKind.PUT, *KEYS, tier=tier) == (DONE,) * 3
    stored = make_buffer(CELL_BYTES)
    for key in KEYS:
        assert bench.memories[tier].get([key], [stored]) == [GetOutcome.OK]
        assert verify(stored.view, key_digest(key), checksum=True) is None
    for i in range(len(KEYS)):
        bench.fill(i, bytes(PAYLOAD_BYTES))
    assert bench.get(*reversed(KEYS), tier=tier) == (DONE,) * 3
    assert [bench.payload(i) for i in range(3)] == [payload_of(k) for k in reversed(KEYS)]
    # A lane of one tier leaves the others alone.
    assert bench.stores[1 - tier].calls == {}
    assert bench.perform(OpKind.REMOVE, "key-a", "absent", tier=tier) == (DONE, DONE)
    assert bench.memories[tier].exists(KEYS) == [False, True, True]


def test_what_is_sealed_is_checked_without_a_store() -> None:
    bench = Bench()
    bench.fill(0, payload_of("key-a"))
    assert bench.perform(OpKind.CHECK, "key-a") == (CORRUPT,)
    assert bench.perform(OpKind.SEAL, "key-a") == (DONE,)
    assert bench.perform(OpKind.CHECK, "key-a") == (DONE,)
    assert bench.perform(OpKind.CHECK, "key-b") == (CORRUPT,)
    assert bench.payload(0) == payload_of("key-a")
    assert bench.counts("kvpool_failures") == {
        "kvpool_failures{kind=cell_magic}": 1,
        "kvpool_failures{kind=cell_key}": 1,
    }


def test_what_is_stored_is_not_sent_again() -> None:
    bench = Bench()
    bench.store_cell("key-b", payload_of("old"))
    assert bench.perform(OpKind.PUT, *KEYS) == (DONE, EXISTED, DONE)
    assert bench.perform(OpKind.PUT, *KEYS) == (EXISTED, EXISTED, EXISTED)
    assert bench.stores[0].calls == {"exists": 2, "put": 1}
    assert bench.get("key-b") == (DONE,)
    assert bench.payload(0) == payload_of("old")


@pytest.mark.parametrize(
    ("fault", "got", "checked", "failures"),
    [
        (Fault.MISSING, MISSING, MISSING, {}),
        (Fault.WRONG_SIZE, CORRUPT, CORRUPT, {"kvpool_failures{kind=cell_length}": 1}),
        (Fault.FLIPPED, DONE, CORRUPT, {"kvpool_failures{kind=cell_checksum}": 1}),
        (Fault.SWAPPED, DONE, CORRUPT, {"kvpool_failures{kind=cell_key}": 1}),
        (Fault.FAILED, FAILED, FAILED, {}),
    ],
)
def test_a_fault_of_one_cell_is_its_outcome_alone(
    fault: Fault, got: CellOutcome, checked: CellOutcome, failures: dict[str, float]
) -> None:
    bench = Bench()
    for key in KEYS:
        bench.store_cell(key, payload_of(key))
    bench.stores[0].inject(fault, "get", "key-b", other="key-c")
    assert bench.perform(OpKind.GET, *KEYS) == (DONE, got, DONE)
    cells = "kvpool_cells{direction=load,store=near,outcome="
    expected = {f"{cells}done}}": 2, f"{cells}{got.value}}}": 1}
    assert bench.counts("kvpool_cells") == (expected if got is not DONE else {f"{cells}done}}": 3})
    if got is DONE:
        assert bench.perform(OpKind.CHECK, *KEYS) == (DONE, checked, DONE)
    assert bench.counts("kvpool_failures") == failures


@pytest.mark.parametrize("size", [PAYLOAD_BYTES - 1, PAYLOAD_BYTES + 1, 1])
def test_an_object_of_another_size_is_corrupt(size: int) -> None:
    bench = Bench()
    bench.store_cell("key-a", bytes(size))
    assert bench.perform(OpKind.GET, "key-a") == (CORRUPT,)


def test_without_the_checksum_the_header_still_counts() -> None:
    bench = Bench(verify_checksum=False)
    bench.store_cell("key-a", payload_of("key-a"))
    bench.store_cell("key-b", payload_of("key-b"), sealed_as="key-a")
    bench.stores[0].inject(Fault.FLIPPED, "get", "key-a")
    assert bench.get("key-a", "key-b") == (DONE, CORRUPT)


@pytest.mark.parametrize(
    ("fault", "outcome"), [(Fault.FULL, FULL), (Fault.FAILED, FAILED), (Fault.MISSING, DONE)]
)
def test_a_put_says_what_became_of_each_cell(fault: Fault, outcome: CellOutcome) -> None:
    bench = Bench()
    bench.stores[1].inject(fault, "put", "key-b")
    assert bench.perform(OpKind.PUT, *KEYS, tier=1) == (DONE, outcome, DONE)
    assert bench.memories[1].exists(KEYS) == [True, False, True]


# Failures


@pytest.mark.parametrize("kind", TIERS)
@pytest.mark.parametrize(
    ("fault", "outcome", "failure"),
    [
        (Fault.ERROR, FAILED, "store_error"),
        (Fault.UNREACHABLE, CellOutcome.UNREACHABLE, "store_unreachable"),
    ],
)
def test_a_store_that_fails_as_a_whole_fails_every_cell(
    kind: OpKind, fault: Fault, outcome: CellOutcome, failure: str
) -> None:
    bench = Bench()
    bench.stores[1].inject(fault)
    assert bench.perform(kind, *KEYS, tier=1) == (outcome,) * 3
    assert bench.counts("kvpool_failures") == {f"kvpool_failures{{kind={failure}}}": 1}
    assert not any(bench.counts("kvpool_bytes").values())
    [span] = bench.trace.of(Span)
    assert span.outcomes == [outcome] * 3
    assert span.nbytes == 0


def test_a_put_that_fails_after_its_question_fails_every_cell() -> None:
    bench = Bench()
    bench.store_cell("key-a", b"")
    bench.stores[0].inject(Fault.ERROR, "put")
    assert bench.perform(OpKind.PUT, *KEYS) == (FAILED, FAILED, FAILED)


def test_what_is_no_fault_of_the_store_fails_and_is_counted() -> None:
    bench = Bench()
    bench.gatherer.broken = bench.scatterer.broken = True
    bench.stores[0].inject(Fault.CRASH)
    for kind in (OpKind.GATHER, OpKind.SCATTER, *TIERS):
        assert bench.perform(kind, "key-a") == (FAILED,)
    nowhere = batch_of(OpKind.GET, "key-a")
    nowhere.lane = LaneName(OpKind.SCATTER, HOST)
    assert bench.runner.perform(nowhere) == [FAILED]  # its cell says nothing of pages
    bugs = bench.registry.snapshot()["kvpool_failures{kind=bug}"]
    assert bugs == 3 + len(TIERS)


# Moves


@pytest.mark.parametrize("kind", [OpKind.GATHER, OpKind.SCATTER])
@pytest.mark.parametrize(
    ("pages", "chunk", "tokens"),
    [
        (JobPages((5, 6), 64, 64, 128), 2, (64, 96)),
        (JobPages((5, 6), 64, 64, 128), 3, (96, 128)),
        (JobPages((5, 6), 64, 70, 127), 2, (70, 96)),
        (JobPages((5, 6), 64, 70, 127), 3, (96, 127)),
        (JobPages((5,), 64, 70, 80), 2, (70, 80)),
    ],
)
def test_a_move_is_clipped_to_its_job(
    kind: OpKind, pages: JobPages, chunk: int, tokens: tuple[int, int]
) -> None:
    bench = Bench()
    batch = batch_of(kind, "key-a", "key-b", pages=(pages,), chunk=chunk)
    assert bench.runner.perform(batch) == [DONE, DONE]
    moves, others = bench.gatherer.gathered, bench.scatterer.scattered
    if kind is OpKind.SCATTER:
        moves, others = others, moves
    assert others == []
    payloads = [bench.arena.payload_address(Slot(slot)) for slot in (0, 1)]
    rows = pages.block_ids, 64, chunk * CHUNK_TOKENS, CHUNK_TOKENS, *tokens
    assert [plain(move) for move in moves] == [plain(slab(payloads, [(0, 2, 1, 2)] * 2, *rows))]
    assert bench.counts("kvpool_copy_bytes") == {
        f"kvpool_copy_bytes{{direction={kind.value}}}": 2 * CELL_BYTES
    }


@pytest.mark.parametrize("kind", [OpKind.GATHER, OpKind.SCATTER])
def test_pieces_of_a_cell_are_moved_by_tables_of_their_own(kind: OpKind) -> None:
    bench = Bench()
    pages = (JobPages((5, 6), 64, 70, 128), JobPages((9,), 0, 0, 20), JobPages((7,), 96, 96, 120))
    pieces = (Piece(2, 0, 1, 1, 2, 0), Piece(0, 1, 2, 1, 2, 3))
    batch = batch_of(kind, "key-a", pages=pages, pieces=pieces, chunk=3)
    assert bench.runner.perform(batch) == [DONE]
    payload = bench.arena.payload_address(Slot(0))
    moved = bench.gatherer.gathered if kind is OpKind.GATHER else bench.scatterer.scattered
    later = payload + 3 * CHUNK_TOKENS * ROW_BYTES
    first = slab([payload], [(0, 1, 1, 2)], (7,), 96, 96, CHUNK_TOKENS, 96, 120)
    second = slab([later], [(1, 2, 1, 2)], (5, 6), 64, 96, CHUNK_TOKENS, 96, 128)
    assert [plain(move) for move in moved] == [plain(first), plain(second)]


@pytest.mark.parametrize("kind", [OpKind.GATHER, OpKind.SCATTER])
def test_a_state_is_one_row_in_the_place_of_the_last_token_before_its_boundary(
    kind: OpKind,
) -> None:
    """Its layers lie in two KV cache groups, each with a block of its own."""
    bench = Bench()
    last = 3 * CHUNK_TOKENS - 1
    pages = tuple(JobPages((block,), last, last, last + 1) for block in (7, 9))
    pieces = (Piece(0, 0, 1, 0, 1, 0), Piece(1, 1, 2, 0, 1, 1))
    batch = batch_of(kind, "key-a", pages=pages, pieces=pieces, chunk=2)
    [cell] = batch.cells
    assert cell.local is not None
    batch.cells = [cell._replace(local=replace(cell.local, is_state=True))]
    assert bench.runner.perform(batch) == [DONE]
    payload = bench.arena.payload_address(Slot(0))
    moved = bench.gatherer.gathered if kind is OpKind.GATHER else bench.scatterer.scattered
    assert [plain(move) for move in moved] == [
        plain(slab([payload], [(0, 1, 0, 1)], (7,), last, last, 1, last, last + 1)),
        plain(slab([payload + ROW_BYTES], [(1, 2, 0, 1)], (9,), last, last, 1, last, last + 1)),
    ]


def test_layers_whose_group_does_not_need_the_chunk_are_not_moved() -> None:
    """Copiers refuse a move that ends before it begins, and with it all of the batch."""
    bench = Bench()
    pages = (
        JobPages((7,), 96, 96, 128),
        JobPages((6,), 160, 160, 224),  # begins a chunk later: its blocks are of another size
        JobPages((), 0, 0, 0),  # none of it is left
    )
    pieces = (Piece(1, 0, 1, 1, 2, 0), Piece(0, 1, 2, 1, 2, 3), Piece(2, 2, 3, 1, 2, 6))
    batch = batch_of(OpKind.SCATTER, "key-a", pages=pages, pieces=pieces, chunk=3)
    assert bench.runner.perform(batch) == [DONE]
    [moved] = bench.scatterer.scattered
    assert moved.places.tolist() == [[1, 2, 1, 2]]
    assert (moved.block_ids, moved.token_start) == ((7,), 96)


# What is counted and recorded


def buckets(counts: dict[str, float], part: str) -> dict[str, float]:
    """A histogram's series -> the sum of that part over its buckets."""
    sums: dict[str, float] = {}
    for name, value in counts.items():
        if name.endswith(part):
            series = name.partition(",le=")[0].partition("{")[2]
            sums[series] = sums.get(series, 0) + value
    return sums


@pytest.mark.parametrize(
    ("kind", "direction", "nbytes"),
    [
        (OpKind.GET, "load", 2 * CELL_BYTES),
        (OpKind.PUT, "save", CELL_BYTES),
        (OpKind.REMOVE, "remove", None),
    ],
)
def test_a_call_of_a_tier_is_counted_by_its_name(
    kind: OpKind, direction: str, nbytes: int | None
) -> None:
    bench = Bench()
    for key in KEYS[:2]:
        bench.store_cell(key, payload_of(key), tier=1)
    bench.stores[1].inject(Fault.SLOW, kind.value)
    bench.perform(kind, *KEYS, tier=1)
    labels = f"{{direction={direction},store=far}}"
    assert bench.counts("kvpool_bytes") == (
        {} if nbytes is None else {f"kvpool_bytes{labels}": nbytes}
    )
    assert bench.counts("kvpool_seconds") == {f"kvpool_seconds{labels}": bench.takes_s}
    outcomes = {
        OpKind.GET: {"done": 2, "missing": 1},
        OpKind.PUT: {"existed": 2, "done": 1},
        OpKind.REMOVE: {"done": 3},
    }[kind]
    assert bench.counts("kvpool_cells") == {
        f"kvpool_cells{{direction={direction},store=far,outcome={outcome}}}": count
        for outcome, count in outcomes.items()
    }
    assert bench.counts("kvpool_retries") == bench.counts("kvpool_copy") == {}


@pytest.mark.parametrize("kind", list(OpKind))
@pytest.mark.parametrize("attempt", [1, 3])
def test_every_batch_is_timed_and_traced(kind: OpKind, attempt: int) -> None:
    bench = Bench()
    tier = "far" if kind in TIERS else "host"
    batch = batch_of(kind, "key-a", tier=1, ready_at=99.5, attempt=attempt)
    if kind in TIERS:
        bench.stores[1].inject(Fault.SLOW, kind.value)
    began = bench.clock()
    outcomes = tuple(bench.runner.perform(batch))
    took = bench.clock() - began
    assert (took > 0) == (kind in TIERS)
    series = f"lane={kind.value},tier={tier}"
    for name, seconds in (("kvpool_op_seconds", took), ("kvpool_op_wait_seconds", began - 99.5)):
        counts = bench.counts(name + "{")
        assert buckets(counts, ".count") == {series: 1}
        assert buckets(counts, ".sum") == {series: seconds}
    retried = {f"kvpool_retries{{{series}}}": 1} if attempt > 1 else {}
    assert bench.counts("kvpool_retries") == retried
    [span] = bench.trace.of(Span)
    assert span == Span(
        threading.current_thread(),
        kind.value,
        began,
        began + took,
        tier,
        cells=1,
        nbytes=CELL_BYTES if outcomes == (DONE,) else 0,
        outcomes=list(outcomes),
        requests=["a", "b"],
        jobs=[1, 2],
        attempt=attempt,
    )


def test_a_batch_that_was_ready_only_now_has_not_waited() -> None:
    """Clocks of two threads may be read in the other order."""
    bench = Bench()
    bench.runner.perform(batch_of(OpKind.SEAL, "key-a", ready_at=bench.clock() + 0.001))
    assert buckets(bench.counts("kvpool_op_wait"), ".sum") == {"lane=seal,tier=host": 0}


# The thread of a lane


class Deed:
    """What a lane thread does with a batch: waits until it may end."""

    def __init__(self) -> None:
        self.entered: SimpleQueue[Batch] = SimpleQueue()
        self.may_end: SimpleQueue[None] = SimpleQueue()

    def __call__(self, batch: Batch) -> tuple[CellOutcome, ...]:
        self.entered.put(batch)
        self.may_end.get(timeout=LIMIT_S)
        return ()


BATCHES = [Batch(GET, (), 0) for _ in range(4)]


def test_a_thread_tells_what_it_is_doing_and_takes_nothing_else_when_it_is_abandoned() -> None:
    deed = Deed()
    inbox: SimpleQueue[Batch | None] = SimpleQueue()
    outbox: SimpleQueue[object] = SimpleQueue()
    lane = LaneThread(GET, "kvpool-test", deed, inbox, outbox, MetricsRegistry())
    assert lane.busy_since() is None
    for number in range(3):
        before = time.monotonic()
        inbox.put(BATCHES[number])
        assert deed.entered.get(timeout=LIMIT_S) is BATCHES[number]
        busy = lane.busy_since()
        assert busy is not None
        assert busy[0] is BATCHES[number]
        assert before <= busy[1] <= time.monotonic()
        if number == 1:
            assert not lane.abandon(BATCHES[0])  # it is past that
        if number == 2:
            assert lane.abandon(busy[0])
            inbox.put(BATCHES[3])
        deed.may_end.put(None)
        assert outbox.get(timeout=LIMIT_S) == BatchDone(BATCHES[number], ())
    lane.thread.join(LIMIT_S)
    assert not lane.thread.is_alive()
    assert lane.busy_since() is None
    assert inbox.get_nowait() is BATCHES[3]


def test_a_batch_that_has_only_just_been_taken_has_not_lasted_yet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor as long as the one before it."""
    looks: list[tuple[Batch, float] | None] = []

    class Clock:
        def monotonic(self) -> float:
            looks.append(lane.busy_since())
            return 7.0

    monkeypatch.setattr(lanes, "time", Clock())
    inbox: SimpleQueue[Batch | None] = SimpleQueue()
    outbox: SimpleQueue[object] = SimpleQueue()
    lane = LaneThread(GET, "kvpool-test", lambda batch: (), inbox, outbox, MetricsRegistry())
    for number in range(3):
        inbox.put(BATCHES[number])
        assert outbox.get(timeout=LIMIT_S) == BatchDone(BATCHES[number], ())
    inbox.put(None)
    lane.thread.join(LIMIT_S)
    assert not lane.thread.is_alive()
    assert looks == [None] * 3


# Cells of a drafter


def test_rows_before_the_prompt_are_zeros_in_a_drafters_first_cell() -> None:
    """A slot holds what was in it before; rows behind them are gathered from the prompt's start."""
    bench = Bench()
    batches = [batch_of(OpKind.GATHER, "key-a", chunk=chunk) for chunk in (0, 1)]
    for slot, batch in enumerate(batches):
        [cell] = batch.cells
        assert cell.local is not None
        batch.cells = [cell._replace(local=replace(cell.local, lookahead=1))]
        batch.slots = [Slot(slot)]
        pages = JobPages((7, 8), 0, 0, 2 * CHUNK_TOKENS)
        batch.cells = [batch.cells[0]._replace(pages=(pages,))]
        bench.fill(slot, b"\1" * PAYLOAD_BYTES)
        assert bench.runner.perform(batch) == [DONE]
    assert bench.payload(0) == bytes(PAYLOAD_BYTES)
    assert bench.payload(1) == b"\1" * PAYLOAD_BYTES
    moves = bench.gatherer.gathered
    assert [(move.chunk_start, move.token_start, move.token_stop) for move in moves] == [
        (-1, 0, CHUNK_TOKENS - 1),
        (CHUNK_TOKENS - 1, CHUNK_TOKENS - 1, 2 * CHUNK_TOKENS - 1),
    ]


def test_pages_of_a_cell_without_a_slot_are_filled_with_zeros() -> None:
    bench = Bench()
    zeros = make_buffer(PAYLOAD_BYTES)
    bench.runner = replace(bench.runner, zeros=zeros)
    batch = batch_of(OpKind.SCATTER, "key-a")
    batch.slots = [None]
    assert bench.runner.perform(batch) == [DONE]
    [move] = bench.scatterer.scattered
    assert move.addresses.tolist() == [zeros.address]
