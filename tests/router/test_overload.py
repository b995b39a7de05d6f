"""Locks of decode replicas: a locked replica gets no new requests."""

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


def test_watermark_below_the_share_of_the_mean_locks_at_its_value() -> None:
    overload = Overload(lock_at=0.4)
    overload.step(0.0, loads(400, 399))
    assert locked(overload) == "a"


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


HISTORIES = f"""
each change is told once => 0 a=950 b=0 -> a +a; 1 a=960 b=0 -> a; 2 a=100 b=0 -> +a
    ; 3 a=700 b=10 c=10 -> a +a; 4 b=10 c=10 -> +a
lock by the watermark is released below a lower one => 0 a=900 b=0 c=0 -> a +a
    ; 10 a=851 b=600 c=600 -> a; 20 a=850 b=600 c=600 -> +a
lock by the mean is released below 1.6 times the mean => 0 a=700 b=100 c=100 -> a +a
    ; 10 a=641 b=280 c=280 -> a; 20 a=640 b=280 c=280 -> +a
lock by the mean is released below 0.4 of the capacity => 0 a=700 b=100 c=100 -> a +a
    ; 10 a=401 b=0 c=0 -> a; 20 a=400 b=0 c=0 -> +a
lock holds for a while whatever comes => 10 a=950 b=0 -> a +a
    ; {10 + MIN_HOLD_S - 0.01} a=0 b=0 -> a; {10 + MIN_HOLD_S} a=0 b=0 -> +a
lock by the mean that passes the watermark obeys the watermark => 0 a=700 b=10 c=10 -> a +a
    ; 10 a=950 b=700 c=700 -> a; 20 a=860 b=700 c=700 -> a; 30 a=850 b=700 c=700 -> +a
with two left the rule of the mean lets go => 0 a=700 b=10 c=10 -> a +a; 5 a=700 b=10 -> +a
last open one stays open beside equals => 0 a=800 b=950 c=950 -> bc +b +c
    ; 1 a=990 b=950 c=950 -> bc; 2 a=1000 b=945 c=950 -> ac +a +b
another one opens at once when the last open one leaves => 0 a=100 b=950 c=960 -> bc +b +c
    ; 0.01 b=950 c=960 -> c +b
groups are judged apart, as one of other models can take no work => 0 a=700 b=10 c=10 -> a +a
    ; 10 a=700 / b=10 c=10 -> +a; 20 a=950 b=960 / c=950 d=10 -> bc +b +c
"""
"""Loads by time, what is locked then, and with a sign whose lock has changed."""


@pytest.mark.parametrize(
    "history",
    [
        pytest.param(each.partition(" => ")[2], id=each.partition(" => ")[0])
        for each in HISTORIES.replace("\n    ;", ";").strip().splitlines()
    ],
)
def test_locks_follow_loads(history: str) -> None:
    overload = Overload(lock_at=0.9)
    for moment in history.split("; "):
        told, _, expected = moment.partition(" -> ")
        now, _, groups = told.partition(" ")
        pairs = [[each.split("=") for each in group.split()] for group in groups.split(" / ")]
        given = [{ReplicaId(x): BlockLoad(int(y), CAPACITY) for x, y in each} for each in pairs]
        changed = overload.step(float(now), *given)
        known = [each for each in expected.split() if each[0] != "+"]
        assert (moment, locked(overload)) == (moment, "".join(known))
        assert (moment, {f"+{x}" for x in changed}) == (moment, set(expected.split()) - {*known})


def test_all_full_ones_are_known_though_the_last_is_open() -> None:
    overload = Overload(lock_at=0.9)
    overload.step(0.0, loads(990, 950, 950))
    assert sorted(overload.full) == ["a", "b", "c"]
    overload.step(1.0, loads(950, 960), loads(950, 10, names="cd"))
    assert sorted(overload.full) == ["a", "b", "c"]


names = st.sampled_from([ReplicaId(name) for name in "abcdef"])
blocks = st.one_of(st.integers(0, 1200), st.sampled_from([400, 500, 800, 900, 1000]))
any_loads = st.dictionaries(
    names, st.builds(BlockLoad, blocks, st.sampled_from([CAPACITY, 500])), max_size=6
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
