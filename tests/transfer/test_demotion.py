"""Cells that a store would evict next, copied into the tier after it: the engine's part, and the
thread that asks the stores."""

import threading
from queue import Empty, SimpleQueue

import pytest

from tests.transfer.engine_bench import DISK, FAILED, FAR, MISSING, Bench
from vllm_kvpool.errors import StoreError, StoreUnreachable
from vllm_kvpool.storage.base import ChunkRef, EvictionCandidate
from vllm_kvpool.transfer import demotion
from vllm_kvpool.transfer.demotion import DemotionThread
from vllm_kvpool.transfer.ops import Cell, CellOutcome, DemotionJob, LaneName, OpKind

LIMIT_S = 10.0


def test_cells_are_fetched_put_into_the_next_tier_and_removed() -> None:
    bench = Bench(DISK, FAR, write_back=True)
    assert bench.demote(0, "a b") == ["0 get-0 a b"]
    assert bench.run() == [
        "check a b",
        "seal a b",
        "put-1 a b",
        "remove-0 a b",
        "demoted 2",
    ]
    assert bench.is_clean
    assert bench.cells() == ""
    assert bench.counted("kvpool_evicted_cells", tier="disk", fate="demoted") == 2


def test_host_memory_does_not_keep_them() -> None:
    bench = Bench(DISK, FAR, slots=8, keep=4, write_back=True)
    bench.demote(0, "a")
    bench.run()
    assert bench.cells() == ""


def test_what_is_in_host_memory_is_not_read_again_and_stays() -> None:
    bench = Bench(DISK, FAR, slots=8, keep=4, write_back=True)
    bench.load(1, "a")
    bench.run()
    assert bench.demote(0, "a") == ["3 seal a"]
    assert bench.run() == ["put-1 a", "remove-0 a", "demoted 1"]
    assert bench.cells() == "a"


@pytest.mark.parametrize("lane", ["get-0", "put-1", "remove-0"])
def test_what_fails_stays_where_it_is(lane: str) -> None:
    bench = Bench(DISK, DISK, write_back=True)
    bench.demote(0, "a b")

    def outcome(name: LaneName, key: str) -> CellOutcome:
        return FAILED if str(name).startswith(lane[:3]) and key == "a" else CellOutcome.DONE

    told = bench.run(outcome)
    assert told[-1] == "demoted 1"
    removed = [line for line in told if line.startswith("remove-0")]
    assert removed == (["remove-0 a b"] if lane == "remove-0" else ["remove-0 b"])
    assert bench.is_clean


def test_a_cell_that_has_gone_meanwhile_is_asked_of_the_next_tier_and_does_no_harm() -> None:
    bench = Bench(DISK, DISK, write_back=True)
    bench.demote(0, "a")

    def outcome(name: LaneName, key: str) -> CellOutcome:
        return MISSING if name.kind is OpKind.GET else CellOutcome.DONE

    assert bench.run(outcome)[-1] == "demoted 0"
    assert bench.is_clean


def test_with_no_tier_after_it_nothing_is_done() -> None:
    bench = Bench(DISK, write_back=True)
    assert bench.demote(0, "a b") == ["demoted 0"]
    assert bench.is_clean


def test_cells_of_larger_models_are_left_alone() -> None:
    bench = Bench(DISK, FAR, write_back=True)
    bench.engine.context.slot_bytes = 10
    assert bench.demote(0, "a") == ["demoted 0"]


def test_a_load_of_a_cell_on_its_way_shares_the_fetch() -> None:
    bench = Bench(DISK, FAR, write_back=True)
    bench.demote(0, "a")
    bench.load(2, "a")
    told = bench.run()
    assert "loaded 2 to 1 done" in told
    assert sum(line.startswith("get-") for line in told) == 0  # the one that ran already
    assert "demoted 1" in told
    assert bench.is_clean


class Store:
    """Names cells until they are said to have moved."""

    def __init__(self, *answers: list[EvictionCandidate]) -> None:
        self.answers = list(answers)
        self.turns_ended = 0
        self.fails: StoreError | None = None
        self.failures: SimpleQueue[None] = SimpleQueue()

    def eviction_candidates(self, max_keys: int) -> list[EvictionCandidate]:
        if fails := self.fails:  # read once: the test ends it meanwhile
            self.failures.put(None)
            raise fails
        return self.answers.pop(0) if self.answers else []

    def release_candidates(self) -> None:
        self.turns_ended += 1


def test_the_thread_asks_until_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demotion, "ASK_EVERY_S", 0.01)
    posted: SimpleQueue[tuple[int, tuple[Cell, ...]]] = SimpleQueue()

    def post(job: DemotionJob) -> None:
        posted.put((job.tier, job.cells))
        job.answer.put(len(job.cells))

    store = Store(
        [
            EvictionCandidate("n@x@aa", ChunkRef("n@x@aa"), 10),
            EvictionCandidate("n@x@bb", ChunkRef("n@x@bb"), 20),
        ],
        [EvictionCandidate("n@x@cc", ChunkRef("n@x@cc"), 30)],
    )
    thread = DemotionThread({3: store}, post)
    assert posted.get(timeout=LIMIT_S) == (
        3,
        (Cell("n@x@aa", ChunkRef("n@x@aa"), 10), Cell("n@x@bb", ChunkRef("n@x@bb"), 20)),
    )
    assert posted.get(timeout=LIMIT_S) == (3, (Cell("n@x@cc", ChunkRef("n@x@cc"), 30),))
    thread.close()
    assert store.turns_ended == 2
    with pytest.raises(Empty):
        posted.get_nowait()
    assert "kvpool-demotion" not in [thread.name for thread in threading.enumerate()]


def test_a_demotion_without_an_end_does_not_keep_others_from_their_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(demotion, "ASK_EVERY_S", 0.01)
    monkeypatch.setattr(demotion, "WAIT_S", 0.05)
    asked: SimpleQueue[int] = SimpleQueue()
    store = Store(
        [EvictionCandidate("n@x@aa", ChunkRef("n@x@aa"), 10)],
        [EvictionCandidate("n@x@aa", ChunkRef("n@x@aa"), 10)],
    )
    thread = DemotionThread({0: store}, lambda job: asked.put(job.tier))
    for _ in range(2):
        asked.get(timeout=LIMIT_S)
    thread.close()
    assert store.turns_ended >= 1


def test_closing_waits_for_no_demotion(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine may end before it; the thread lived on for a minute, and then asked the store."""
    monkeypatch.setattr(demotion, "ASK_EVERY_S", 0.01)
    asked: SimpleQueue[int] = SimpleQueue()
    store = Store([EvictionCandidate("n@x@aa", ChunkRef("n@x@aa"), 10)])
    thread = DemotionThread({0: store}, lambda job: asked.put(job.tier))
    assert asked.get(timeout=LIMIT_S) == 0
    assert thread.close()
    assert store.turns_ended == 1
    assert "kvpool-demotion" not in [thread.name for thread in threading.enumerate()]


def test_a_demotion_that_begins_while_closing_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(demotion, "ASK_EVERY_S", 0.01)
    asked, go_on = threading.Event(), threading.Event()

    class SlowStore(Store):
        def eviction_candidates(self, max_keys: int) -> list[EvictionCandidate]:
            asked.set()
            assert go_on.wait(LIMIT_S)
            return super().eviction_candidates(max_keys)

    store = SlowStore([EvictionCandidate("n@x@aa", ChunkRef("n@x@aa"), 10)])
    thread = DemotionThread({0: store}, lambda job: None)
    assert asked.wait(LIMIT_S)
    monkeypatch.setattr(demotion, "JOIN_S", 0.01)
    assert not thread.close(), "the store is still being asked"
    go_on.set()
    monkeypatch.setattr(demotion, "JOIN_S", LIMIT_S)
    assert thread.close()
    assert store.turns_ended == 1


@pytest.mark.parametrize("fails", [StoreError("gone"), StoreUnreachable("away")])
def test_a_store_that_fails_is_asked_again(
    fails: StoreError, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The guard of a store that is away has logged it; a line for each question would bury that."""
    monkeypatch.setattr(demotion, "ASK_EVERY_S", 0.01)
    asked: SimpleQueue[int] = SimpleQueue()
    store = Store([EvictionCandidate("n@x@aa", ChunkRef("n@x@aa"), 10)])
    store.fails = fails

    def post(job: DemotionJob) -> None:
        job.answer.put(0)
        asked.put(job.tier)

    thread = DemotionThread({0: store}, post)
    for _ in range(3):
        store.failures.get(timeout=LIMIT_S)
    assert asked.empty()
    store.fails = None
    assert asked.get(timeout=LIMIT_S) == 0
    thread.close()
    is_told = any(str(fails) in each.getMessage() for each in caplog.records)
    assert is_told is not isinstance(fails, StoreUnreachable)
