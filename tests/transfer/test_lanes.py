"""Lanes: outcomes of each cell of a batch against tiers with faults, and the metrics.

`"key-a"` is a slab of one cell, `"key-a key-b"` a slab of two cells; each slab has one outcome.
"""

import re
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count

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
from vllm_kvpool.storage.base import ChunkRef, GetOutcome, PutOutcome, Retention, Store
from vllm_kvpool.storage.contents.cell_format import HEADER_BYTES, verify, write_header
from vllm_kvpool.transfer.graph import Batch, Op, Owner, Priority
from vllm_kvpool.transfer.lanes import BatchRunner
from vllm_kvpool.transfer.ops import (
    HOST,
    CellOutcome,
    Cells,
    JobPages,
    LaneName,
    OpKind,
    Outcome,
    Part,
    Slab,
    SlabKind,
)
from vllm_kvpool.transfer.trace import Span

PAYLOAD_BYTES = 1000
CELL_BYTES = HEADER_BYTES + PAYLOAD_BYTES
CHUNK_TOKENS, ROW_BYTES = 32, 8
DONE, EXISTED, MISSING = CellOutcome.DONE, CellOutcome.EXISTED, CellOutcome.MISSING
CORRUPT, FAILED, FULL = CellOutcome.CORRUPT, CellOutcome.FAILED, CellOutcome.FULL
KEYS = ("key-a", "key-b", "key-c")
GET = LaneName(OpKind.GET, 0)
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
        self.takes_s = 0.25  # duration of a SLOW call
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

    def perform(self, kind: OpKind, *slabs: str, tier: int = 0) -> tuple[Outcome, ...]:
        return tuple(self.runner.perform(batch_of(kind, *slabs, tier=tier)))

    def fill(self, slot: int, payload: bytes) -> None:
        self.arena.buffers([Slot(slot)], [CELL_BYTES])[0].view[HEADER_BYTES:] = payload

    def payload(self, slot: int) -> bytes:
        return bytes(self.arena.buffers([Slot(slot)], [CELL_BYTES])[0].view[HEADER_BYTES:])

    def store_cell(self, key: str, payload: bytes, *, sealed_as: str = "", tier: int = 0) -> None:
        buffer = make_buffer(HEADER_BYTES + len(payload))
        buffer.view[HEADER_BYTES:] = payload
        write_header(buffer.view, key_digest(sealed_as or key))
        assert self.memories[tier].put([key], [buffer], [ChunkRef("")]) == [PutOutcome.STORED]

    def get(self, *keys: str, tier: int = 0) -> tuple[Outcome, ...]:
        """GET, then CHECK the fetched cells, as a load does."""
        got = self.perform(OpKind.GET, *keys, tier=tier)
        checked = self.perform(OpKind.CHECK, *keys)
        return tuple(c if g is DONE else g for g, c in zip(got, checked, strict=True))

    def by_labels(self, name: str) -> dict[str, float]:
        """Return a metric by the values of its labels, such as `load near done`."""
        found = {k: v for k, v in self.counts(name).items() if k.startswith(name + "{")}
        return {" ".join(re.findall(r"=([^,}]+)", k)): v for k, v in found.items()}

    def counts(self, name: str) -> dict[str, float]:
        return {k: v for k, v in self.registry.snapshot().items() if k.startswith(name)}


@dataclass
class Reached:
    """A fence that is reached. With `works` False, the device has failed."""

    works: bool = True

    def synchronize(self) -> None:
        assert self.works


def batch_of(
    kind: OpKind,
    *slabs: str,
    tier: int = 0,
    pages: tuple[JobPages, ...] | None = None,
    pieces: Sequence[Piece] = (),
    chunk: int = 0,
    ready_at: float = 99.5,
    attempt: int = 1,
    cells: Cells = None,
    fence: Reached | None = None,
) -> Batch:
    """Return the batch of `slabs`, whose cells are in slots 0, 1, and so on. `cells`: the moved
    cells of each slab."""
    where = pages or (JobPages((7,), 0, 0, CHUNK_TOKENS),)
    moves = kind in (OpKind.GATHER, OpKind.SCATTER)
    slots = count()
    parts = []
    for keys in map(str.split, slabs):
        places = tuple(place(head, pieces) for head in range(1, 1 + len(keys)))
        slab_kind = SlabKind(tuple(keys), (CELL_BYTES,) * len(keys), places if moves else ())
        slab = Slab.of(slab_kind, ChunkRef("chunk", "", chunk), "")
        slab = slab._replace(pages=where if moves else ())
        moved = range(len(keys)) if cells is None else cells
        taken = () if kind is OpKind.REMOVE else [Slot(next(slots)) for _ in moved]
        parts.append(Part(slab, taken, cells))
    if kind is OpKind.FENCE:
        parts, fences = [], [fence or Reached()]
    else:
        fences = []
    owners = (Owner(Priority.LOAD, "a", 1), Owner(Priority.LOAD, "b", 2))
    ops = [Op(owners[0], None, None, 0, False, 0, 1) for _ in parts or fences]
    return Batch(
        LaneName(kind, tier if kind in TIERS else HOST),
        ops,
        sum(sum(part.sizes()) for part in parts),
        parts,
        fences,
        ready_at,
        owners,
        attempt,
    )


def place(head: int, pieces: Sequence[Piece] = ()) -> LocalCell:
    """Return the cell of a head. `pieces` are given if they differ between layers."""
    whole = LocalCell(HeadShard(0), LayerSpan(4, 6), head, head + 1, 0, 2, ROW_BYTES)
    return replace(whole, pieces=tuple(pieces)) if pieces else whole.with_groups((0, 0))


def with_places(batch: Batch, **changes: object) -> Batch:
    """Return the batch with changed cells in its first slab."""
    part = batch.parts[0]
    kind = part.slab.kind
    cells = tuple(replace(cell, **changes) for cell in kind.cells)
    slab = part.slab._replace(kind=replace(kind, cells=cells))
    return replace(batch, parts=[part._replace(slab=slab), *batch.parts[1:]])


def payload_of(key: str) -> bytes:
    return random_bytes(PAYLOAD_BYTES, sum(key.encode()))


# Cells


@pytest.mark.parametrize("tier", [0, 1])
@pytest.mark.parametrize("slabs", [KEYS, ("key-a key-b", "key-c")], ids=["cells", "slabs"])
def test_what_is_sealed_and_put_is_got_back_and_checked(tier: int, slabs: tuple[str, ...]) -> None:
    """Each cell is sealed with its own key, in any slab."""
    bench = Bench()
    for i, key in enumerate(KEYS):
        bench.fill(i, payload_of(key))
    for kind in (OpKind.SEAL, OpKind.CHECK, OpKind.PUT):
        assert bench.perform(kind, *slabs, tier=tier) == (DONE,) * len(slabs)
    assert bench.stores[tier].calls == {"exists": 1, "put": 1}
    stored = make_buffer(CELL_BYTES)
    for key in KEYS:
        assert bench.memories[tier].get([key], [stored]) == [GetOutcome.OK]
        assert verify(stored.view, key_digest(key), checksum=True) is None
    for i in range(len(KEYS)):
        bench.fill(i, bytes(PAYLOAD_BYTES))
    assert bench.get(*reversed(slabs), tier=tier) == (DONE,) * len(slabs)
    got = " ".join(reversed(slabs)).split()
    assert [bench.payload(i) for i in range(3)] == [payload_of(key) for key in got]
    name = bench.runner.names[tier]
    moved = {f"save {name}": 3 * CELL_BYTES, f"load {name}": 3 * CELL_BYTES}
    assert bench.by_labels("kvpool_bytes") == moved
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
    assert bench.by_labels("kvpool_failures") == {"cell_magic": 1, "cell_key": 1}


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
    expected = {"load near done": 2, f"load near {got.value}": 1}
    assert bench.by_labels("kvpool_cells") == (
        expected if got is not DONE else {"load near done": 3}
    )
    if got is DONE:
        assert bench.perform(OpKind.CHECK, *KEYS) == (DONE, checked, DONE)
    assert bench.counts("kvpool_failures") == failures


def test_without_the_checksum_the_header_still_counts() -> None:
    bench = Bench(verify_checksum=False)
    bench.store_cell("key-a", payload_of("key-a"))
    bench.store_cell("key-b", payload_of("key-b"), sealed_as="key-a")
    bench.stores[0].inject(Fault.FLIPPED, "get", "key-a")
    assert bench.get("key-a", "key-b") == (DONE, CORRUPT)


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
    assert span.outcomes == {outcome: 3}
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
    assert bench.runner.perform(nowhere) == [FAILED]  # its cell describes no pages
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
    payloads = bench.arena.payload_addresses([Slot(0), Slot(1)]).tolist()
    rows = pages.block_ids, 64, chunk * CHUNK_TOKENS, CHUNK_TOKENS, *tokens
    assert [plain(move) for move in moves] == [
        plain(slab([payload], [(0, 2, 1, 2)], *rows)) for payload in payloads
    ]
    assert bench.by_labels("kvpool_copy_bytes") == {kind.value: 2 * CELL_BYTES}


@pytest.mark.parametrize("kind", [OpKind.GATHER, OpKind.SCATTER])
def test_a_state_is_one_row_in_the_place_of_the_last_token_before_its_boundary(
    kind: OpKind,
) -> None:
    """The state's layers lie in two KV cache groups, each with its own block."""
    bench = Bench()
    last = 3 * CHUNK_TOKENS - 1
    pages = tuple(JobPages((block,), last, last, last + 1) for block in (7, 9))
    pieces = (Piece(0, 0, 1, 0, 1, 0), Piece(1, 1, 2, 0, 1, 1))
    batch = batch_of(kind, "key-a", pages=pages, pieces=pieces, chunk=2)
    assert bench.runner.perform(with_places(batch, is_state=True)) == [DONE]
    [payload] = bench.arena.payload_addresses([Slot(0)]).tolist()
    moved = bench.gatherer.gathered if kind is OpKind.GATHER else bench.scatterer.scattered
    assert [plain(move) for move in moved] == [
        plain(slab([payload], [(0, 1, 0, 1)], (7,), last, last, 1, last, last + 1)),
        plain(slab([payload + ROW_BYTES], [(1, 2, 0, 1)], (9,), last, last, 1, last, last + 1)),
    ]


def test_layers_whose_group_does_not_need_the_chunk_are_not_moved() -> None:
    """Copiers refuse a move that ends before it begins, and the whole batch with it."""
    bench = Bench()
    pages = (
        JobPages((7,), 96, 96, 128),
        JobPages((6,), 160, 160, 224),  # begins a chunk later: its blocks are of another size
        JobPages((), 0, 0, 0),  # no row of the chunk is left
    )
    pieces = (Piece(1, 0, 1, 1, 2, 0), Piece(0, 1, 2, 1, 2, 3), Piece(2, 2, 3, 1, 2, 6))
    batch = batch_of(OpKind.SCATTER, "key-a", pages=pages, pieces=pieces, chunk=3)
    assert bench.runner.perform(batch) == [DONE]
    [moved] = bench.scatterer.scattered
    assert moved.places.tolist() == [[1, 2, 1, 2]]
    assert (moved.block_ids, moved.token_start) == ((7,), 96)


# Metrics and records


def buckets(counts: dict[str, float], part: str) -> dict[str, float]:
    """Return the sum of a part over a histogram's buckets, by series."""
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
    assert bench.by_labels("kvpool_cells") == {
        f"{direction} far {outcome}": count for outcome, count in outcomes.items()
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
    [outcome] = bench.runner.perform(batch)
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
        cells=0 if kind is OpKind.FENCE else 1,
        nbytes=CELL_BYTES if outcome is DONE and kind is not OpKind.FENCE else 0,
        outcomes={outcome: 1},
        requests=["a", "b"],
        jobs=[1, 2],
        attempt=attempt,
    )


def test_a_batch_that_was_ready_only_now_has_not_waited() -> None:
    """Two threads may read their clocks in the other order."""
    bench = Bench()
    bench.runner.perform(batch_of(OpKind.SEAL, "key-a", ready_at=bench.clock() + 0.001))
    assert buckets(bench.counts("kvpool_op_wait"), ".sum") == {"lane=seal,tier=host": 0}


# Cells of a drafter


def test_rows_before_the_prompt_are_zeros_in_a_drafters_first_cell() -> None:
    """A slot has its previous content. Rows after the zeros are gathered from the prompt's
    start."""
    bench = Bench()
    pages = (JobPages((7, 8), 0, 0, 2 * CHUNK_TOKENS),)
    for chunk in (0, 1):
        batch = batch_of(OpKind.GATHER, "key-a key-b", pages=pages, chunk=chunk)
        batch = with_places(batch, lookahead=1)
        [part] = batch.parts
        batch.parts = [part._replace(slots=[Slot(slot + 2 * chunk) for slot in part.slots])]
        for slot in batch.parts[0].slots:
            bench.fill(slot, b"\1" * PAYLOAD_BYTES)
        assert bench.runner.perform(batch) == [DONE]
    assert [bench.payload(slot) for slot in (0, 1)] == [bytes(PAYLOAD_BYTES)] * 2
    assert [bench.payload(slot) for slot in (2, 3)] == [b"\1" * PAYLOAD_BYTES] * 2
    moves = bench.gatherer.gathered
    assert [(move.chunk_start, move.token_start, move.token_stop) for move in moves] == [
        (-1, 0, CHUNK_TOKENS - 1),
        (CHUNK_TOKENS - 1, CHUNK_TOKENS - 1, 2 * CHUNK_TOKENS - 1),
    ]


def test_pages_of_a_slab_without_slots_are_filled_with_zeros() -> None:
    bench = Bench()
    zeros = make_buffer(PAYLOAD_BYTES)
    bench.runner = replace(bench.runner, zeros=zeros)
    batch = batch_of(OpKind.SCATTER, "key-a key-b")
    batch.parts = [part._replace(slots=()) for part in batch.parts]
    assert bench.runner.perform(batch) == [DONE]
    [move] = bench.scatterer.scattered
    assert move.addresses.tolist() == [zeros.address] * 2
    assert move.places[:, 2].tolist() == [1, 2]


# Slabs of several cells


def test_cells_of_one_slab_may_have_other_sizes_than_those_beside_them() -> None:
    """The last span of layers is shorter, and so is a prompt's end."""
    bench = Bench()
    payloads = {"key-a": bytes([1]) * 1000, "key-b": bytes([2]) * 24, "key-c": bytes([3]) * 512}
    sizes = tuple(HEADER_BYTES + len(payload) for payload in payloads.values())
    kind = SlabKind(tuple(payloads), (CELL_BYTES,) * 3)
    slab = Slab.of(kind, ChunkRef("chunk"), "")._replace(sizes=sizes, nbytes=sum(sizes))

    def perform(op: OpKind, cells: Cells = None) -> Outcome:
        batch = batch_of(op, "key-a key-b key-c", cells=cells)
        batch.parts = [part._replace(slab=slab) for part in batch.parts]
        batch.nbytes = sum(batch.parts[0].sizes())
        [outcome] = bench.runner.perform(batch)
        return outcome

    for slot, payload in enumerate(payloads.values()):
        whole = bench.arena.buffers([Slot(slot)], [CELL_BYTES])[0].view
        whole[HEADER_BYTES : HEADER_BYTES + len(payload)] = payload
    for op in (OpKind.SEAL, OpKind.PUT, OpKind.GET, OpKind.CHECK):
        assert perform(op) is DONE
    for op in (OpKind.GET, OpKind.CHECK):
        assert perform(op, (1, 2)) is DONE
    assert bench.payload(0)[:24] == payloads["key-b"]
    assert bench.payload(1)[:512] == payloads["key-c"]
    loads = bench.counts("kvpool_bytes{direction=load")
    assert loads == {"kvpool_bytes{direction=load,store=near}": sum(sizes) + sum(sizes[1:])}


def test_a_get_says_which_cells_of_a_slab_are_missing_or_bad() -> None:
    bench = Bench()
    bench.store_cell("key-a", payload_of("key-a"))
    bench.store_cell("key-b", bytes(1))  # of another size
    bench.store_cell("key-d", payload_of("key-d"))
    bench.store_cell("key-f", payload_of("key-f"))
    slabs = ("key-a key-b key-c", "key-d", "key-e key-g", "key-d key-f")
    got = bench.perform(OpKind.GET, *slabs)
    assert got == ((DONE, CORRUPT, MISSING), DONE, MISSING, DONE)
    cells = {"load near done": 4, "load near corrupt": 1, "load near missing": 3}
    assert bench.by_labels("kvpool_cells") == cells
    assert bench.by_labels("kvpool_bytes") == {"load near": 4 * CELL_BYTES}
    [span] = bench.trace.of(Span)
    assert span.outcomes == {DONE: 4, CORRUPT: 1, MISSING: 3}
    assert (span.cells, span.nbytes) == (8, 4 * CELL_BYTES)
    assert bench.counts("kvpool_failures") == {"kvpool_failures{kind=cell_length}": 1}


@pytest.mark.parametrize(("fault", "outcome"), [(Fault.FULL, FULL), (Fault.FAILED, FAILED)])
def test_a_put_says_which_cells_of_a_slab_were_taken(fault: Fault, outcome: CellOutcome) -> None:
    """The store is not sent the cells that it has."""
    bench = Bench()
    bench.store_cell("key-a", payload_of("old"))
    bench.store_cell("key-d", payload_of("old"))
    bench.stores[0].inject(fault, "put", "key-b")
    slabs = ("key-a key-b key-c", "key-d", "key-e key-f")
    put = bench.perform(OpKind.PUT, *slabs)
    assert put == ((EXISTED, outcome, DONE), EXISTED, DONE)
    assert bench.memories[0].exists(" ".join(slabs).split()) == [True, False, *[True] * 4]
    assert bench.by_labels("kvpool_bytes") == {"save near": 3 * CELL_BYTES}
    cells = {"save near existed": 2, f"save near {outcome.value}": 1, "save near done": 3}
    assert bench.by_labels("kvpool_cells") == cells


@pytest.mark.parametrize("slabs", [("key-a key-b key-c",), KEYS])
def test_a_check_says_which_cell_of_a_slab_is_bad(slabs: tuple[str, ...]) -> None:
    bench = Bench()
    for key in KEYS:
        bench.store_cell(key, payload_of(key), sealed_as="key-x" if key == "key-b" else "")
    assert bench.perform(OpKind.GET, *slabs) == (DONE,) * len(slabs)
    checked = bench.perform(OpKind.CHECK, *slabs)
    each = (DONE, CORRUPT, DONE)
    assert checked == (each if len(slabs) == 3 else (each,))
    assert bench.counts("kvpool_failures") == {"kvpool_failures{kind=cell_key}": 1}


@pytest.mark.parametrize("kind", [OpKind.GET, OpKind.PUT, OpKind.CHECK, OpKind.SEAL])
def test_an_op_of_some_cells_of_a_slab_leaves_the_others_alone(kind: OpKind) -> None:
    """The slots are in the order of the op's cells."""
    bench = Bench()
    held = {"key-b": 0, "key-d": 1}  # the slots of cells 1 and 3
    for key, slot in held.items():
        bench.fill(slot, payload_of(key))
    some = batch_of(OpKind.SEAL, "key-a key-b key-c key-d", cells=(1, 3))
    assert bench.runner.perform(some) == [DONE]
    if kind is OpKind.GET:
        for key in KEYS:
            bench.store_cell(key, payload_of(key))
    batch = batch_of(kind, "key-a key-b key-c key-d", cells=(1, 3))
    assert batch.num_cells == 2
    before = len(bench.trace.of(Span))
    outcomes = bench.runner.perform(batch)
    assert outcomes == ([(DONE, MISSING)] if kind is OpKind.GET else [DONE])
    assert [bench.payload(slot) for slot in (0, 1)] == [payload_of(key) for key in held]
    if kind is OpKind.PUT:
        assert bench.memories[0].exists([*KEYS, "key-d"]) == [False, True, False, True]
    span = bench.trace.of(Span)[before]
    assert span.cells == 2
    assert span.nbytes == (1 if kind is OpKind.GET else 2) * CELL_BYTES


def test_one_bad_cell_of_a_slab_is_removed_alone() -> None:
    bench = Bench()
    for key in KEYS:
        bench.store_cell(key, b"")
    batch = batch_of(OpKind.REMOVE, "key-a key-b key-c", cells=(1,))
    assert bench.runner.perform(batch) == [DONE]
    assert bench.memories[0].exists(KEYS) == [True, False, True]
    assert bench.by_labels("kvpool_cells") == {"remove near done": 1}


@pytest.mark.parametrize("kind", [OpKind.GATHER, OpKind.SCATTER])
def test_cells_of_a_slab_are_moved_each_between_its_slot_and_its_pages(kind: OpKind) -> None:
    """The slabs are of two chunks, each clipped to its own tokens."""
    bench = Bench()
    pages = (JobPages((5, 6), 64, 70, 127),)
    batch = batch_of(kind, "key-a key-b", pages=pages, chunk=2)
    later = batch_of(kind, "key-c key-d key-e", pages=pages, chunk=3)
    [part] = later.parts
    batch.parts = [*batch.parts, part._replace(slots=[Slot(7), Slot(2), Slot(5)])]
    batch.ops = [*batch.ops, *later.ops]
    batch.nbytes += later.nbytes
    assert bench.runner.perform(batch) == [DONE, DONE]
    moved = bench.gatherer.gathered if kind is OpKind.GATHER else bench.scatterer.scattered
    assert [plain(move) for move in moved] == [
        plain(
            slab(
                bench.arena.payload_addresses(slots).tolist(),
                [(0, 2, head, head + 1) for head in heads],
                *((5, 6), 64, start, CHUNK_TOKENS, *tokens),
            )
        )
        for slots, heads, start, tokens in [
            ([Slot(0), Slot(1)], (1, 2), 64, (70, 96)),
            ([Slot(7), Slot(2), Slot(5)], (1, 2, 3), 96, (96, 127)),
        ]
    ]
    assert bench.by_labels("kvpool_copy_bytes") == {kind.value: 5 * CELL_BYTES}


@pytest.mark.parametrize("kind", [OpKind.GATHER, OpKind.SCATTER])
def test_cells_of_a_slab_whose_layers_are_in_several_groups_are_moved_by_their_own(
    kind: OpKind,
) -> None:
    """Each cell leaves out a group that does not need the chunk."""
    bench = Bench()
    pages = (JobPages((5,), 0, 0, 32), JobPages((9,), 96, 96, 128), JobPages((7,), 96, 100, 120))
    batch = batch_of(kind, "key-a key-b", pages=pages, chunk=3)
    [part] = batch.parts
    places = (
        place(0, (Piece(1, 0, 1, 0, 1, 0), Piece(0, 1, 2, 0, 1, 1))),
        place(0, (Piece(2, 2, 3, 0, 1, 0), Piece(1, 3, 4, 0, 1, 1))),
    )
    slab_kind = replace(part.slab.kind, cells=places)
    batch.parts = [part._replace(slab=part.slab._replace(kind=slab_kind))]
    assert bench.runner.perform(batch) == [DONE]
    moved = bench.gatherer.gathered if kind is OpKind.GATHER else bench.scatterer.scattered
    first, second = bench.arena.payload_addresses([Slot(0), Slot(1)]).tolist()
    after_one = second + CHUNK_TOKENS * ROW_BYTES
    assert [plain(move) for move in moved] == [
        plain(
            slab(
                *([first, after_one], [(0, 1, 0, 1), (3, 4, 0, 1)], (9,), 96, 96, CHUNK_TOKENS),
                *(96, 128),
            )
        ),
        plain(slab([second], [(2, 3, 0, 1)], (7,), 96, 96, CHUNK_TOKENS, 100, 120)),
    ]


def test_prompt_end_of_a_slab_is_moved_and_whole_chunks_after_it() -> None:
    """Lanes cache the pieces of a slab's cells, and these depend on its number of tokens."""
    bench = Bench()
    pages = (JobPages((7,), 0, 0, CHUNK_TOKENS),)
    batch = batch_of(OpKind.GATHER, "key-a", pages=pages)
    [part] = batch.parts
    for end_tokens in (0, 5, 0, 5):
        batch.parts = [part._replace(slab=part.slab._replace(end_tokens=end_tokens))]
        assert bench.runner.perform(batch) == [DONE]
    moves = bench.gatherer.gathered
    assert [(each.chunk_tokens, each.token_stop) for each in moves] == [(32, 32), (5, 5)] * 2


def test_stored_cells_of_a_slab_are_pinned_where_its_chunk_is() -> None:
    bench = Bench()
    pins: list[tuple[list[str], int]] = []

    class Pinning(MemoryStore):
        def pin(self, keys: Sequence[str], until_ns: int) -> None:
            pins.append((list(keys), until_ns))

    memory = Pinning("", 1 << 20)
    memory.capabilities = replace(memory.capabilities, pins=True)
    bench.runner = replace(bench.runner, stores=(memory,), names=("near",))
    bench.memories[0] = memory
    for key in ("key-a", "key-c", "key-d"):
        bench.store_cell(key, b"")
    batch = batch_of(OpKind.PUT, "key-a key-b key-c", "key-d")
    first, second = batch.parts
    chunk = first.slab.chunk._replace(retention=Retention(77, 0))
    batch.parts = [first._replace(slab=first.slab._replace(chunk=chunk)), second]
    assert bench.runner.perform(batch) == [(EXISTED, DONE, EXISTED), EXISTED]
    assert pins == [(["key-a", "key-c"], 77)]


def test_a_fence_that_fails_is_traced_as_such() -> None:
    """The batch has no cells whose outcomes would show the failure."""
    bench = Bench()
    for works in (True, False):
        batch = batch_of(OpKind.FENCE, fence=Reached(works))
        assert bench.runner.perform(batch) == [DONE if works else FAILED]
    assert [span.outcomes for span in bench.trace.of(Span)] == [{DONE: 1}, {FAILED: 1}]
