"""Which decode replicas take nothing new."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.router_invariants import check_overload
from vllm_kvpool.router.control.controller import Controller
from vllm_kvpool.router.control.events import ReplicaSpec, Sample
from vllm_kvpool.router.control.overload import MIN_HOLD_S, BlockLoad, Overload
from vllm_kvpool.router.control.states import ReplicaId, State

CAPACITY = 1000


def loads(*used: int, names: str = "abcdefgh") -> dict[ReplicaId, BlockLoad]:
    return {
        ReplicaId(name): BlockLoad(blocks, CAPACITY)
        for name, blocks in zip(names, used, strict=False)
    }


def locked(overload: Overload) -> str:
    check_overload(overload)
    return "".join(sorted(overload.locked))


@pytest.mark.parametrize(
    ("used", "expected"),
    [
        ((), ""),
        ((0, 0, 0), ""),
        # The watermark: 900 of 1000.
        ((899, 0), ""),
        ((900, 0), "a"),
        ((900, 950, 0, 1000), "abd"),
        # Twice the mean and half of the capacity. The mean of 600, 150, 150 is 300.
        ((600, 150, 150), ""),
        ((601, 150, 150), "a"),
        ((600, 149, 150), "a"),
        ((500, 10, 10), ""),  # 2.9 times the mean, half of the capacity and no more
        ((501, 10, 10), "a"),
        # Several at once: the mean of 700, 700, 0, 0, 0 is 280.
        ((700, 700, 0, 0, 0), "ab"),
        # Of two, none holds more than twice the mean.
        ((898, 0), ""),
        # Never the last.
        ((1000,), ""),
        ((1000, 990), "a"),
        ((950, 950, 950), "bc"),
        ((950, 900, 950), "ac"),
    ],
)
def test_full_replicas_are_locked_but_not_the_last(used: tuple[int, ...], expected: str) -> None:
    overload = Overload(lock_at=0.9)
    overload.step(0.0, loads(*used))
    assert locked(overload) == expected


@pytest.mark.parametrize(
    ("engine", "committed", "used"),
    [(0, 90, 90), (90, 0, 90), (None, 90, 90), (80, 90, 90), (None, 0, 0)],
)
def test_the_greater_of_both_counts_is_used(engine: int | None, committed: int, used: int) -> None:
    state = Controller().state
    replica = state.fleet.add(ReplicaSpec(replica_id=ReplicaId("a"), url="a"), 0.0)
    replica.state, replica.work.committed_blocks = State.DECODE, committed
    replica.measured(Sample(used_blocks=engine or 0, total_blocks=100), 0.0)
    state.now = 0.0 if engine is not None else 2 * state.settings.stale_after_s
    [loads_of_group] = state.loads()
    assert loads_of_group == {ReplicaId("a"): BlockLoad(used, 100)}


def test_each_change_is_told_once() -> None:
    overload = Overload(lock_at=0.9)
    assert overload.step(0.0, loads(950, 0)) == {"a"}
    assert overload.step(1.0, loads(960, 0)) == set()
    assert overload.step(2.0, loads(100, 0)) == {"a"}
    assert overload.step(3.0, loads(700, 10, 10)) == {"a"}
    assert overload.step(4.0, loads(10, 10, names="bc")) == {"a"}
    assert locked(overload) == ""


@pytest.mark.parametrize(
    ("full", "still", "calm"),
    [
        ((900, 0, 0), (851, 600, 600), (850, 600, 600)),
        # 1.6 times the mean: of 640, 280, 280 that is 640
        ((700, 100, 100), (641, 280, 280), (640, 280, 280)),
        # 0.4 of the capacity
        ((700, 100, 100), (401, 0, 0), (400, 0, 0)),
    ],
)
def test_a_lock_is_released_below_lower_bounds(
    full: tuple[int, ...], still: tuple[int, ...], calm: tuple[int, ...]
) -> None:
    overload = Overload(lock_at=0.9)
    overload.step(0.0, loads(*full))
    overload.step(10.0, loads(*still))
    assert locked(overload) == "a"
    overload.step(20.0, loads(*calm))
    assert locked(overload) == ""


def test_a_lock_holds_for_a_while_whatever_comes() -> None:
    overload = Overload(lock_at=0.9)
    overload.step(10.0, loads(950, 0))
    overload.step(10.0 + MIN_HOLD_S - 0.01, loads(0, 0))
    assert locked(overload) == "a"
    overload.step(10.0 + MIN_HOLD_S, loads(0, 0))
    assert locked(overload) == ""


def test_what_was_over_the_mean_and_passes_the_watermark_obeys_the_watermark() -> None:
    overload = Overload(lock_at=0.9)
    overload.step(0.0, loads(700, 10, 10))
    overload.step(10.0, loads(950, 700, 700))
    overload.step(20.0, loads(860, 700, 700))  # calm by the mean
    assert locked(overload) == "a"
    overload.step(30.0, loads(850, 700, 700))
    assert locked(overload) == ""


def test_with_two_left_the_rule_of_the_mean_lets_go() -> None:
    overload = Overload(lock_at=0.9)
    overload.step(0.0, loads(700, 10, 10))
    assert locked(overload) == "a"
    overload.step(5.0, loads(700, 10))
    assert locked(overload) == ""


def test_the_last_open_one_does_not_change_among_equals() -> None:
    overload = Overload(lock_at=0.9)
    overload.step(0.0, loads(800, 950, 950))
    assert locked(overload) == "bc"
    # It fills up, a little above the others: one that is as full is no better.
    assert overload.step(1.0, loads(990, 950, 950)) == set()
    assert len(overload.full) == 3
    assert overload.step(2.0, loads(1000, 945, 950)) == {"a", "b"}
    assert locked(overload) == "ac"


def test_when_the_last_open_one_leaves_another_one_opens_at_once() -> None:
    overload = Overload(lock_at=0.9)
    overload.step(0.0, loads(100, 950, 960))
    assert overload.step(0.01, loads(950, 960, names="bc")) == {"b"}
    assert locked(overload) == "c"


def test_groups_are_judged_apart() -> None:
    """One that is fuller than those of other models cannot give them its work."""
    overload = Overload(lock_at=0.9)
    overload.step(0.0, loads(700, 10, 10))
    assert locked(overload) == "a"
    overload.step(10.0, loads(700), loads(10, 10, names="bc"))
    assert locked(overload) == ""
    overload.step(20.0, loads(950, 960, names="ab"), loads(950, 10, names="cd"))
    assert locked(overload) == "bc"
    assert sorted(overload.full) == ["a", "b", "c"]


names = st.sampled_from([ReplicaId(name) for name in "abcdef"])
blocks = st.one_of(st.integers(0, 1200), st.sampled_from([400, 500, 800, 900, 1000]))
any_loads = st.dictionaries(
    names,
    st.builds(BlockLoad, blocks, st.sampled_from([CAPACITY, 500])),
    max_size=6,
)
histories = st.lists(st.tuples(st.floats(0.0, 3.0), any_loads), max_size=20)


@given(histories)
def test_the_last_one_is_never_locked_and_every_lock_ends_when_load_falls(
    history: list[tuple[float, dict[ReplicaId, BlockLoad]]],
) -> None:
    overload, now, open_now = Overload(lock_at=0.9), 0.0, set[ReplicaId]()
    was: frozenset[ReplicaId] = frozenset()
    for pause_s, given_loads in history:
        now += pause_s
        changed = overload.step(now, given_loads)
        check_overload(overload)
        assert changed == was ^ overload.locked
        was = overload.locked
        open_now = set(given_loads) - was
        assert bool(open_now) == bool(given_loads)
        for replica in open_now:
            # What is open and over the watermark is so because all are full.
            assert given_loads[replica].share < 0.9 or len(overload.full) == len(given_loads)
    now += 1.01 * MIN_HOLD_S
    overload.step(now, dict.fromkeys(was | open_now, BlockLoad(0, CAPACITY)))
    check_overload(overload)
    assert overload.locked == frozenset()


@given(st.lists(st.integers(851, 899), min_size=20, max_size=60))
def test_a_load_between_the_bounds_changes_nothing(noise: list[int]) -> None:
    for start, expected in ((950, 1), (100, 0)):
        overload = Overload(lock_at=0.9)
        overload.step(0.0, loads(start, 500))
        changes = [overload.step(5.0 + at, loads(used, 500)) for at, used in enumerate(noise)]
        assert not any(changes)
        assert len(overload.locked) == expected
