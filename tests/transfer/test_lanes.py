"""Lanes: what becomes of each cell of an op, against a store with faults."""

from collections.abc import Iterator

import pytest

from vllm_kvpool.cells import HEADER_BYTES, seal, verify
from vllm_kvpool.keys import HeadPart, LayerSpan, key_digest
from vllm_kvpool.layout.pages import CellMove
from vllm_kvpool.layout.topology import LocalCell
from vllm_kvpool.metrics import Tally
from vllm_kvpool.staging.arena import SLOT_ALIGNMENT, Arena
from vllm_kvpool.staging.slots import Slot
from vllm_kvpool.store.base import GetOutcome, PutOutcome, Store
from vllm_kvpool.store.memory import MemoryStore
from vllm_kvpool.testing.contract import StoreContract
from vllm_kvpool.testing.fakes import FakeCopier, Fault, FaultyStore
from vllm_kvpool.testing.memory import make_buffer, random_bytes
from vllm_kvpool.transfer.lanes import LaneWork
from vllm_kvpool.transfer.ops import (
    CellOutcome,
    CellTask,
    JobId,
    JobPages,
    Op,
    OpCell,
    OpId,
    OpKind,
)

PAYLOAD_BYTES = 1000
CELL_BYTES = HEADER_BYTES + PAYLOAD_BYTES
CHUNK_TOKENS = 32
DONE, EXISTED, MISSING = CellOutcome.DONE, CellOutcome.EXISTED, CellOutcome.MISSING
CORRUPT, FAILED, FULL = CellOutcome.CORRUPT, CellOutcome.FAILED, CellOutcome.FULL
KEYS = ("key-a", "key-b", "key-c")


class TestFaultyStoreWithoutRules(StoreContract):
    @pytest.fixture
    def store(self) -> Iterator[Store]:
        store = FaultyStore(MemoryStore("", 64 << 20))
        yield store
        store.close()


class Bench:
    def __init__(self, *, verify_checksum: bool = True) -> None:
        self.memory = MemoryStore("", 1 << 20)
        self.store = FaultyStore(self.memory)
        self.arena = Arena(8 * SLOT_ALIGNMENT, CELL_BYTES)
        self.gatherer, self.scatterer = FakeCopier(), FakeCopier()
        self.tally = Tally()
        self.work = LaneWork(
            self.store,
            self.arena,
            self.gatherer,
            self.scatterer,
            CHUNK_TOKENS,
            verify_checksum,
            self.tally,
        )

    def perform(self, kind: OpKind, *keys: str) -> tuple[CellOutcome, ...]:
        return self.work.perform(op(kind, *keys))

    def fill(self, slot: int, payload: bytes) -> None:
        self.arena.buffer(Slot(slot), CELL_BYTES).view[HEADER_BYTES:] = payload

    def payload(self, slot: int) -> bytes:
        return bytes(self.arena.buffer(Slot(slot), CELL_BYTES).view[HEADER_BYTES:])

    def store_cell(self, key: str, payload: bytes, *, sealed_as: str = "") -> None:
        buffer = make_buffer(HEADER_BYTES + len(payload))
        buffer.view[HEADER_BYTES:] = payload
        seal(buffer.view, key_digest(sealed_as or key))
        assert self.memory.put([key], [buffer], [""]) == [PutOutcome.STORED]

    def counts(self, name: str) -> dict[str, float]:
        return {k: v for k, v in self.tally.snapshot().items() if k.startswith(name)}


def op(kind: OpKind, *keys: str, pages: JobPages | None = None, chunk: int = 0) -> Op:
    """The op on `keys`, in slots 0, 1, …"""
    cell = LocalCell(HeadPart(0), LayerSpan(4, 6), 1, 2, 0, 2)
    where = pages or JobPages((7,), 0, 0, CHUNK_TOKENS)
    return Op(
        OpId(0),
        kind,
        tuple(
            OpCell(
                CellTask(key, "group", chunk, cell, where, CELL_BYTES),
                JobId(1),
                None if kind is OpKind.REMOVE else Slot(i),
            )
            for i, key in enumerate(keys)
        ),
    )


def payload_of(key: str) -> bytes:
    return random_bytes(PAYLOAD_BYTES, sum(key.encode()))


def test_what_is_put_is_sealed_and_got_back() -> None:
    bench = Bench()
    for i, key in enumerate(KEYS):
        bench.fill(i, payload_of(key))
    assert bench.perform(OpKind.PUT, *KEYS) == (DONE, DONE, DONE)
    stored = make_buffer(CELL_BYTES)
    for key in KEYS:
        assert bench.memory.get([key], [stored]) == [GetOutcome.OK]
        assert verify(stored.view, key_digest(key), checksum=True) is None
    for i in range(len(KEYS)):
        bench.fill(i, bytes(PAYLOAD_BYTES))
    assert bench.perform(OpKind.GET, *reversed(KEYS)) == (DONE, DONE, DONE)
    assert [bench.payload(i) for i in range(3)] == [payload_of(k) for k in reversed(KEYS)]
    assert bench.counts("kvpool_bytes") == {
        "kvpool_bytes{direction=save,store=memory}": 3 * CELL_BYTES,
        "kvpool_bytes{direction=load,store=memory}": 3 * CELL_BYTES,
    }


def test_what_is_stored_is_not_sent_again() -> None:
    bench = Bench()
    bench.store_cell("key-b", payload_of("old"))
    assert bench.perform(OpKind.PUT, *KEYS) == (DONE, EXISTED, DONE)
    assert bench.perform(OpKind.PUT, *KEYS) == (EXISTED, EXISTED, EXISTED)
    assert bench.store.calls == {"exists": 2, "put": 1}
    assert bench.perform(OpKind.GET, "key-b") == (DONE,)
    assert bench.payload(0) == payload_of("old")


@pytest.mark.parametrize(
    ("fault", "outcome", "failures"),
    [
        (Fault.MISSING, MISSING, {}),
        (Fault.WRONG_SIZE, CORRUPT, {"kvpool_failures{kind=cell_length}": 1}),
        (Fault.FLIPPED, CORRUPT, {"kvpool_failures{kind=cell_checksum}": 1}),
        (Fault.SWAPPED, CORRUPT, {"kvpool_failures{kind=cell_key}": 1}),
        (Fault.FAILED, FAILED, {}),
    ],
)
def test_a_fault_of_one_cell_is_its_outcome_alone(
    fault: Fault, outcome: CellOutcome, failures: dict[str, float]
) -> None:
    bench = Bench()
    for key in KEYS:
        bench.store_cell(key, payload_of(key))
    bench.store.inject(fault, "get", "key-b", other="key-c")
    assert bench.perform(OpKind.GET, *KEYS) == (DONE, outcome, DONE)
    assert bench.counts("kvpool_failures") == failures
    cells = "kvpool_cells{direction=load,store=memory,outcome="
    assert bench.counts("kvpool_cells") == {f"{cells}done}}": 2, f"{cells}{outcome.value}}}": 1}


@pytest.mark.parametrize("size", [PAYLOAD_BYTES - 1, PAYLOAD_BYTES + 1, 1])
def test_an_object_of_another_size_is_corrupt(size: int) -> None:
    bench = Bench()
    bench.store_cell("key-a", bytes(size))
    assert bench.perform(OpKind.GET, "key-a") == (CORRUPT,)


def test_bytes_that_are_no_cell_are_corrupt() -> None:
    bench = Bench()
    buffer = make_buffer(CELL_BYTES)
    buffer.view[:] = random_bytes(CELL_BYTES, 1)
    bench.memory.put(["key-a"], [buffer], [""])
    assert bench.perform(OpKind.GET, "key-a") == (CORRUPT,)
    assert bench.counts("kvpool_failures") == {"kvpool_failures{kind=cell_magic}": 1}


def test_without_the_checksum_the_header_still_counts() -> None:
    bench = Bench(verify_checksum=False)
    bench.store_cell("key-a", payload_of("key-a"))
    bench.store_cell("key-b", payload_of("key-b"), sealed_as="key-a")
    bench.store.inject(Fault.FLIPPED, "get", "key-a")
    assert bench.perform(OpKind.GET, "key-a", "key-b") == (DONE, CORRUPT)


@pytest.mark.parametrize(
    ("fault", "outcome"), [(Fault.FULL, FULL), (Fault.FAILED, FAILED), (Fault.MISSING, DONE)]
)
def test_a_put_says_what_became_of_each_cell(fault: Fault, outcome: CellOutcome) -> None:
    bench = Bench()
    bench.store.inject(fault, "put", "key-b")
    assert bench.perform(OpKind.PUT, *KEYS) == (DONE, outcome, DONE)
    assert bench.memory.exists(KEYS) == [True, False, True]


@pytest.mark.parametrize("kind", [OpKind.GET, OpKind.PUT, OpKind.REMOVE])
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
    bench.store.inject(fault)
    assert bench.perform(kind, *KEYS) == (outcome,) * 3
    assert bench.counts("kvpool_failures") == {f"kvpool_failures{{kind={failure}}}": 1}
    assert not any(bench.counts("kvpool_bytes").values())


def test_a_put_that_fails_after_its_question_fails_every_cell() -> None:
    bench = Bench()
    bench.store_cell("key-a", b"")
    bench.store.inject(Fault.ERROR, "put")
    assert bench.perform(OpKind.PUT, *KEYS) == (FAILED, FAILED, FAILED)


def test_remove_removes() -> None:
    bench = Bench()
    bench.store_cell("key-a", b"")
    assert bench.perform(OpKind.REMOVE, "key-a", "key-b") == (DONE, DONE)
    assert bench.memory.exists(["key-a"]) == [False]


def test_what_is_no_fault_of_the_store_is_raised() -> None:
    bench = Bench()
    bench.gatherer.broken = True
    with pytest.raises(RuntimeError):
        bench.perform(OpKind.GATHER, "key-a")
    bench.store.inject(Fault.CRASH)
    with pytest.raises(RuntimeError):
        bench.perform(OpKind.GET, "key-a")


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
    assert bench.work.perform(op(kind, "key-a", "key-b", pages=pages, chunk=chunk)) == (DONE, DONE)
    moves, others = bench.gatherer.gathered, bench.scatterer.scattered
    if kind is OpKind.SCATTER:
        moves, others = others, moves
    assert others == []
    assert moves == [
        CellMove(
            address=bench.arena.payload_address(Slot(slot)),
            layer_start=0,
            layer_stop=2,
            head_start=1,
            head_stop=2,
            block_ids=pages.block_ids,
            table_start=64,
            chunk_start=chunk * CHUNK_TOKENS,
            chunk_tokens=CHUNK_TOKENS,
            token_start=tokens[0],
            token_stop=tokens[1],
        )
        for slot in (0, 1)
    ]
    assert bench.counts("kvpool_copy_bytes") == {
        f"kvpool_copy_bytes{{direction={kind.value}}}": 2 * CELL_BYTES
    }
