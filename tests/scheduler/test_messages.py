"""Messages between scheduler and workers: merged over ranks, in any order."""

import pickle

from hypothesis import given
from hypothesis import strategies as st

from vllm_kvpool.scheduler.messages import Loaded, StepPlan, StepReport, Stored
from vllm_kvpool.scheduler.prefix_search import HostCacheIndex
from vllm_kvpool.transfer.ops import (
    HostCacheChange,
    JobId,
    JobPages,
    LoadPlan,
    PrefetchPlan,
    SavePlan,
)

CHUNKS = ["w", "x", "y", "z"]
RANKS = range(3)

groups = st.lists(st.sampled_from(CHUNKS), unique=True)
changes = st.builds(  # a chunk that has come is not among those that have left
    lambda added, removed: HostCacheChange(
        tuple(added), tuple(group for group in removed if group not in added)
    ),
    groups,
    groups,
)
hosts = st.dictionaries(st.sampled_from(RANKS), changes, max_size=len(RANKS))
tiers = st.frozensets(st.integers(0, 2))
losses = st.dictionaries(st.integers(0, 2), st.just("full"), max_size=2)
ends = st.dictionaries(
    st.integers(0, 3).map(JobId),
    st.builds(Stored, st.integers(1, 2), tiers, tiers, losses),
    max_size=3,
)
loads = st.builds(
    Loaded, st.integers(0, 1000), st.floats(0, 1000), st.frozensets(st.integers(0, 3))
)
reports = st.builds(
    StepReport,
    st.dictionaries(st.integers(0, 3).map(JobId), st.integers(1, 3), max_size=3),
    st.dictionaries(st.sampled_from("abc"), loads, max_size=3),
    st.dictionaries(st.integers(0, 3), st.integers(1, 3), max_size=3),
    stored=ends,
)


def merged(*reports: StepReport) -> StepReport:
    return StepReport.merge(reports)


def test_a_save_has_missed_what_any_rank_has_missed() -> None:
    one = StepReport(stored={JobId(1): Stored(1, frozenset({0}), frozenset({5}))})
    other = StepReport(stored={JobId(1): Stored(1, frozenset({1})), JobId(2): Stored()})
    assert merged(one, other).stored == {
        JobId(1): Stored(2, frozenset({0, 1}), frozenset({5})),
        JobId(2): Stored(),
    }


def test_endpoints_of_all_ranks_are_told() -> None:
    """An engine that continues a prompt listens to every rank."""
    one, other = (StepReport(notices={rank: f"tcp://{rank}"}) for rank in range(2))
    assert merged(one, other).notices == {0: "tcp://0", 1: "tcp://1"}


def test_ranks_add_up_and_the_shortest_load_counts() -> None:
    one = StepReport(
        {JobId(1): 1, JobId(2): 1},
        {"a": Loaded(512, 2.0, frozenset({1})), "b": Loaded(256, 1.0)},
        {1: 1},
    )
    other = StepReport(
        {JobId(2): 1, JobId(3): 2},
        {"a": Loaded(256, 3.0, frozenset({0})), "c": Loaded(0)},
        {1: 1, 2: 1},
    )
    assert merged(one, other) == StepReport(
        {JobId(1): 1, JobId(2): 2, JobId(3): 2},
        {"a": Loaded(256, 3.0, frozenset({0, 1})), "b": Loaded(256, 1.0), "c": Loaded(0)},
        {1: 2, 2: 1},
    )
    assert one.gathered == {JobId(1): 1, JobId(2): 1}  # a report never changes


@given(reports, reports, reports)
def test_the_order_of_ranks_does_not_matter(a: StepReport, b: StepReport, c: StepReport) -> None:
    assert merged(a, b) == merged(b, a)
    assert merged(merged(a, b), c) == merged(a, merged(b, c))
    assert merged(a, StepReport()) == a


def state(reports: list[StepReport]) -> dict[tuple[int, str], bool]:
    """Return whether each rank has each chunk after these reports, in this order."""
    mirrors = {rank: HostCacheIndex(1) for rank in RANKS}
    for report in reports:
        for rank, change in report.host.items():
            mirrors[rank].apply(0, change)
    return {(rank, chunk): mirrors[rank].has(chunk) for rank in RANKS for chunk in CHUNKS}


@given(st.lists(hosts, max_size=6))
def test_merged_over_steps_host_memory_is_as_told_one_by_one(
    hosts: list[dict[int, HostCacheChange]],
) -> None:
    single = [StepReport(host=host) for host in hosts]
    whole = merged(*single)
    pairwise = StepReport()
    for report in single:
        pairwise = merged(pairwise, report)
    assert state([whole]) == state([pairwise]) == state(single)
    for change in whole.host.values():  # each chunk has come or left
        assert len(set(change.added + change.removed)) == len(change.added + change.removed)


@given(st.lists(changes, min_size=3, max_size=3))
def test_the_order_of_ranks_host_changes_does_not_matter(three: list[HostCacheChange]) -> None:
    a, b, c = (StepReport(host={rank: change}) for rank, change in enumerate(three))
    assert merged(merged(a, b), c) == merged(merged(c, a), b)
    assert merged(merged(a, b), c) == merged(a, merged(b, c))


def test_merging_costs_what_there_is_to_merge() -> None:
    """The cost is linear: a burst of evictions is reported on the model's thread."""

    class Counted(str):
        hashes = 0

        def __hash__(self) -> int:
            Counted.hashes += 1
            return super().__hash__()

    changes = [HostCacheChange((Counted(f"a{i}"),), (Counted(f"r{i}"),)) for i in range(2000)]
    whole = merged(*(StepReport(host={0: change}) for change in changes))
    assert whole.host[0].added == tuple(change.added[0] for change in changes)
    assert Counted.hashes <= 4 * 2 * len(changes)


def test_what_came_and_left_within_a_report_has_left() -> None:
    first, second = HostCacheChange(("a", "b"), ("c",)), HostCacheChange(("c",), ("a",))
    report = merged(StepReport(host={0: first}), StepReport(host={0: second, 1: first}))
    assert report.host == {0: HostCacheChange(("b", "c"), ("a",)), 1: first}


def test_both_survive_the_way_between_processes() -> None:
    plan = StepPlan(
        (LoadPlan(JobId(1), "a", 0, (b"x",), (JobPages((1, 2), 0, 3, 30),), 3, 30),),
        (SavePlan(JobId(2), "b", 1, (b"y",), (JobPages((3,), 16, 16, 32),)),),
        (PrefetchPlan("c", (b"z",)),),
        idle=True,
        generation=2,
    )
    report = StepReport(
        {JobId(1): 1}, {"a": Loaded(5, 2.0)}, {3: 1}, {1: HostCacheChange(("x",), ("y",))}
    )
    assert pickle.loads(pickle.dumps((plan, report))) == (plan, report)
