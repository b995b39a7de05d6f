"""Metrics of saves count outcomes of all ranks, never plans."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.fakes import FakeClock
from vllm_kvpool.layout.topology import KVCacheGroup
from vllm_kvpool.metrics import METRICS, MetricsRegistry
from vllm_kvpool.scheduler.messages import Stored
from vllm_kvpool.scheduler.request import PoolShape
from vllm_kvpool.scheduler.save_outcomes import END_WAIT_S, EndedSave, SaveOutcomes
from vllm_kvpool.transfer.ops import JobId, SavePlan

CHUNK = 32
DISK = frozenset({0})


class Bench:
    def __init__(self, num_ranks: int = 1, *, has_host: bool = False) -> None:
        self.registry, self.clock = MetricsRegistry(), FakeClock()
        shape = PoolShape(CHUNK, (KVCacheGroup(16),), num_ranks, 1000)
        self.outcomes = SaveOutcomes(shape, self.registry, self.clock, has_host=has_host)

    def plan(self, job: int = 1, first: int = 0, count: int = 2, **more: Any) -> None:
        hashes = tuple(bytes([i]) for i in range(count))
        self.outcomes.planned(SavePlan(JobId(job), "r", first, hashes, (), **more))

    def end(
        self, missed: Any = (), lost: Any = None, tiers: Any = DISK, job: int = 1
    ) -> EndedSave | None:
        how = Stored(1, tiers, frozenset(missed), lost or {})
        return self.outcomes.ended(JobId(job), how)

    @property
    def counts(self) -> dict[str, float]:
        """Return the counters, without the gauge of unfinished saves."""
        found = {k.removeprefix("kvpool_"): v for k, v in self.registry.snapshot().items()}
        found.pop("pending_save_tokens", None)
        return found

    @property
    def pending_tokens(self) -> float:
        return self.registry.snapshot()["kvpool_pending_save_tokens"]


def test_a_save_counts_once_its_last_rank_has_confirmed_it() -> None:
    bench = Bench(num_ranks=2)
    bench.plan()
    assert bench.end(missed={1}) is None
    assert bench.counts == {}
    ended = bench.end()
    assert ended is not None
    assert (ended.plan.job_id, ended.how.ranks, ended.how.missed) == (1, 2, {1})
    assert bench.end() is None, "it has ended before"
    assert bench.counts == {"saved_tokens": CHUNK}
    assert bench.pending_tokens == 0


def test_saves_are_pending_until_their_last_rank_has_reported_them() -> None:
    """A router waits for this before it ends an engine."""
    bench = Bench(num_ranks=2)
    bench.plan(1)
    bench.plan(2, count=3)
    bench.plan(3)
    assert bench.pending_tokens == 7 * CHUNK
    bench.outcomes.dropped(JobId(3))
    for job in (1, 1, 2):
        bench.end(job=job)
    assert bench.pending_tokens == 3 * CHUNK
    bench.end(job=2)
    assert bench.pending_tokens == 0


def test_a_chunk_that_one_rank_has_lost_is_not_saved() -> None:
    bench = Bench(num_ranks=2)
    bench.plan(first=5, count=3)
    bench.end()
    bench.end(missed={6}, lost={6: "full"})
    assert bench.counts == {"saved_tokens": 2 * CHUNK, "unsaved_tokens{reason=full}": CHUNK}


def test_a_dead_store_saves_nothing() -> None:
    bench = Bench()
    bench.plan()
    bench.end({0, 1}, {0: "unreachable", 1: "unreachable"}, tiers=frozenset())
    assert bench.counts == {"unsaved_tokens{reason=unreachable}": 2 * CHUNK}


@pytest.mark.parametrize(
    ("has_host", "counts"), [(True, {"host_saved_tokens": 2 * CHUNK}), (False, {})]
)
def test_host_memory_alone_is_a_count_of_its_own(has_host: bool, counts: dict[str, float]) -> None:
    """Without a host tier, another save is storing the chunk and counts it."""
    bench = Bench(has_host=has_host)
    bench.plan()
    bench.end({0, 1}, tiers=frozenset())
    assert bench.counts == counts


def test_tokens_count_for_the_tenant_once_they_are_saved() -> None:
    bench = Bench()
    bench.plan(tenant="team")
    bench.end({1}, {1: "full"})
    assert bench.counts["tenant_tokens{tenant=team,direction=save}"] == CHUNK


def test_states_count_by_boundary_and_only_if_they_are_somewhere() -> None:
    bench = Bench()
    bench.plan(1, count=1, is_state=True)
    bench.plan(2, count=1, is_state=True)
    bench.end()
    bench.end({0}, {0: "full"}, tiers=frozenset(), job=2)
    assert bench.counts == {"saved_states": 1}


def test_a_save_that_is_not_sent_is_unsaved() -> None:
    bench = Bench()
    bench.plan()
    bench.outcomes.dropped(JobId(1))
    assert bench.counts == {"unsaved_tokens{reason=cancelled}": 2 * CHUNK}
    bench.end()
    assert "saved_tokens" not in bench.counts


def test_an_outcome_is_awaited_for_a_bounded_time() -> None:
    bench = Bench()
    assert not bench.outcomes.is_awaited
    bench.plan()
    assert bench.outcomes.is_awaited
    bench.clock.advance(END_WAIT_S)
    assert not bench.outcomes.is_awaited
    bench.plan(2)
    assert bench.outcomes.is_awaited
    bench.end()
    bench.end(job=2)
    assert not bench.outcomes.is_awaited


fates = st.sampled_from(["stored", "host", "lost"])


@given(st.lists(st.lists(fates, min_size=4, max_size=4), min_size=1, max_size=3))
def test_every_planned_token_is_counted_once_by_its_worst_fate(ranks: list[list[str]]) -> None:
    bench = Bench(len(ranks), has_host=True)
    bench.plan(count=4)
    for fate_of in ranks:
        missed = {chunk for chunk, fate in enumerate(fate_of) if fate != "stored"}
        lost = {chunk: "full" for chunk, fate in enumerate(fate_of) if fate == "lost"}
        bench.end(missed, lost)
    worst = [
        next(fate for fate in ("lost", "host", "stored") if fate in of_chunk)
        for of_chunk in zip(*ranks, strict=True)
    ]
    names = {"stored": "saved_tokens", "host": "host_saved_tokens", "lost": "unsaved_tokens"}
    expected = {
        name + ("{reason=full}" if fate == "lost" else ""): CHUNK * worst.count(fate)
        for fate, name in names.items()
        if fate in worst
    }
    assert bench.counts == expected


def test_no_metric_counts_plans() -> None:
    """Users read a count as something that has happened."""
    counts = [metric for metric in METRICS.values() if metric.kind.value == "counter"]
    assert [metric.name for metric in counts if "plan" in metric.help] == []
