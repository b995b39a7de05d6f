"""The planner's number of replicas for each role."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_kvpool.router.control.planner import (
    Counts,
    Plan,
    PlanInputs,
    PlanMemory,
    RoleMemory,
    floor_of,
    plan,
)
from vllm_kvpool.router.control.rates import Rates
from vllm_kvpool.router.control.settings import PlannerConfig
from vllm_kvpool.router.control.states import MAX_REPLICAS, Role

LIMITS = PlannerConfig(down_hold_s=30.0)
AFRESH = PlanMemory()
QUIET = PlanInputs(
    now=1000.0,
    metrics_age_s=0.0,
    prefill=Counts(2),
    decode=Counts(2),
    used_blocks=1100,  # 0.55 of both
    blocks_per_replica=1000,
    block_tokens=16,
    waiting_tokens=0.0,
    prompt_tokens_per_s=11_000.0,  # 0.55 of both
    incoming_tokens=0.0,
    handoff_tokens_per_s=11_000.0,
    rates=Rates(prefill_tokens_per_s=10_000.0, transfer_tokens_per_s=50_000.0),
)
BUSY_PREFILL = replace(QUIET, prompt_tokens_per_s=30_000.0)  # 4 at 0.8, 5 at 0.6, 8 at 0.4
BUSY_DECODE = replace(QUIET, used_blocks=1900)  # 3 at 0.8, 4 at 0.625, 5 at 0.45
IDLE_PREFILL = replace(QUIET, prompt_tokens_per_s=1_000.0)  # 1 at any
IDLE_DECODE = replace(QUIET, used_blocks=100, handoff_tokens_per_s=0.0)  # 1 at any


def outcome(inputs: PlanInputs, memory: PlanMemory = AFRESH, **limits: Any) -> tuple[int, int, Any]:
    made, _ = plan(inputs, msgspec.structs.replace(LIMITS, **limits), memory)
    return made.prefill.delta, made.decode.delta, made.flip_to


def repeated(
    inputs: PlanInputs, seconds: float, memory: PlanMemory = AFRESH, limits: PlannerConfig = LIMITS
) -> list[tuple[float, Plan]]:
    """The plans that change anything, one call a second, nothing carried out."""
    changes = []
    for second in range(int(seconds) + 1):
        made, memory = plan(replace(inputs, now=inputs.now + second), limits, memory)
        if made.prefill.delta or made.decode.delta:
            changes.append((float(second), made))
    return changes


P, D = Role.PREFILL, Role.DECODE
ALL_IDLE = replace(IDLE_PREFILL, used_blocks=100, handoff_tokens_per_s=0.0)
BLIND = replace(QUIET, metrics_age_s=None)
FLIPS_TO_PREFILL = replace(BUSY_PREFILL, used_blocks=100, handoff_tokens_per_s=0.0)
STARVED = replace(IDLE_DECODE, prompt_tokens_per_s=30_000.0)
STUCK = replace(
    IDLE_PREFILL, used_blocks=1950, incoming_tokens=100_000.0, waiting_tokens=1_000_000.0
)


@pytest.mark.parametrize(
    ("inputs", "limits", "expected"),
    [
        (QUIET, {}, (0, 0, None)),
        # Up is at once, and by as many as it takes.
        (BUSY_PREFILL, {}, (3, 0, None)),  # to 5; two decoders at 0.55 can spare none
        (BUSY_DECODE, {}, (0, 2, None)),  # to 4
        (replace(BUSY_PREFILL, used_blocks=1900), {}, (3, 2, None)),
        # Two that load already are as good as there.
        (replace(BUSY_PREFILL, prefill=Counts(2, coming=3)), {}, (0, 0, None)),
        (replace(BUSY_PREFILL, prefill=Counts(2, coming=1)), {}, (2, 0, None)),
        # 60,000 tokens in 2 s are 30,000 tokens/s, beside 11,000: 6 at 0.8, 7 at 0.6
        (replace(QUIET, waiting_tokens=60_000.0), {}, (5, 0, None)),
        # A replica that one role spares is flipped to the other.
        (FLIPS_TO_PREFILL, {}, (3, -1, P)),
        (replace(BUSY_DECODE, prompt_tokens_per_s=1_000.0), {}, (-1, 2, D)),
        (replace(STARVED, decode=Counts(1)), {}, (3, 0, None)),  # it is at its least
        # Others come: first see what they do.
        (replace(STARVED, decode=Counts(1, coming=1)), {}, (3, 0, None)),
        # A role below its floor is filled without measurements.
        (replace(BLIND, prefill=Counts(0)), {}, (1, -1, P)),
        (replace(BLIND, decode=Counts(0)), {}, (-1, 1, D)),
        (replace(BLIND, decode=Counts(0)), {"min_decode": 3}, (-1, 3, D)),
        (replace(BLIND, decode=Counts(0, coming=1)), {}, (0, 0, None)),
        (replace(BLIND, prefill=Counts(1), decode=Counts(0)), {}, (0, 1, None)),
        (replace(BLIND, prefill=Counts(0), decode=Counts(0)), {}, (1, 1, None)),
        (replace(BLIND, prefill=Counts(0), decode=Counts(0)), {"min_prefill": 0}, (1, 1, None)),
        # Prompts wait for decode: prefill that can be spared goes over to it.
        (STUCK, {}, (-1, 12, D)),
        (replace(STUCK, used_blocks=900, incoming_tokens=0.0), {}, (82, 0, None)),  # 50.1 at 0.6
    ],
)
def test_plan_changes_replicas_by_load(
    inputs: PlanInputs, limits: dict[str, Any], expected: tuple[int, int, Any]
) -> None:
    assert outcome(inputs, **limits) == expected


@pytest.mark.parametrize(
    ("before", "inputs", "seconds", "expected"),
    [
        ([], QUIET, 1000.0, {}),
        # Up waits for its cooldown.
        ([], BUSY_PREFILL, 14.0, {0.0: (3, 0), 5.0: (3, 0), 10.0: (3, 0)}),
        # Down is one at a time, after there were too many for a while.
        (
            *([], replace(QUIET, prefill=Counts(4), prompt_tokens_per_s=0.0), 130.0),
            {30.0: (-1, 0), 90.0: (-1, 0)},
        ),
        # Too many with a break, or while nothing was seen, start anew.
        (
            *([IDLE_PREFILL, replace(QUIET, now=1029.0)], replace(IDLE_PREFILL, now=1031.0), 40.0),
            {30.0: (-1, 0)},
        ),
        (
            [IDLE_PREFILL, replace(IDLE_PREFILL, now=1010.0, metrics_age_s=None)],
            *(replace(IDLE_PREFILL, now=1011.0), 35.0, {30.0: (-1, 0)}),
        ),
        # Down waits while others come.
        ([], replace(IDLE_PREFILL, prefill=Counts(2, coming=1)), 1000.0, {}),
        # Of two roles the one with too many for longer goes first.
        (*([replace(IDLE_DECODE, now=995.0)], ALL_IDLE, 31.0), {25.0: (0, -1), 30.0: (-1, 0)}),
    ],
)
def test_plan_changes_replicas_over_time(
    before: list[PlanInputs],
    inputs: PlanInputs,
    seconds: float,
    expected: dict[float, tuple[int, int]],
) -> None:
    memory = AFRESH
    for each in before:
        _, memory = plan(each, LIMITS, memory)
    changes = repeated(inputs, seconds, memory)
    assert {at: (made.prefill.delta, made.decode.delta) for at, made in changes} == expected


def test_a_flip_back_waits_for_its_cooldown() -> None:
    made, memory = plan(FLIPS_TO_PREFILL, LIMITS, AFRESH)
    assert made.flip_to is Role.PREFILL
    back = replace(IDLE_PREFILL, prefill=Counts(5), decode=Counts(1), used_blocks=1900)
    made, _ = plan(replace(back, now=1019.0), LIMITS, memory)
    assert (made.decode.delta, made.flip_to) == (3, None)
    made, _ = plan(replace(back, now=1020.0), LIMITS, memory)
    assert (made.decode.delta, made.flip_to) == (3, Role.DECODE)


def test_a_flip_on_does_not_wait_for_it() -> None:
    there = replace(STARVED, decode=Counts(4))
    _, memory = plan(there, LIMITS, AFRESH)
    assert outcome(replace(there, now=1005.0), memory)[2] is Role.PREFILL


def test_what_was_taken_away_too_soon_is_kept_twice_as_long_from_then_on() -> None:
    memory, pauses, count, since = AFRESH, [], 2, 0
    for second in range(4000):
        # Idle, until one is taken away; then busy at once.
        tokens_per_s = 1_000.0 if count == 2 else 9_000.0
        inputs = replace(
            QUIET, now=float(second), prefill=Counts(count), prompt_tokens_per_s=tokens_per_s
        )
        made, memory = plan(inputs, LIMITS, memory)
        count = made.prefill.wanted
        if made.prefill.delta < 0:
            pauses.append(second - since)
        if made.prefill.delta > 0:
            since = second + 1
    assert pauses == [30, 60, 120, 240, 480, 960, 1800]


@pytest.mark.parametrize(("later_s", "patience"), [(1000.0, 3), (20_000.0, 1)])
def test_what_was_not_missed_for_long_is_kept_less_long_again(
    later_s: float, patience: int
) -> None:
    memory = PlanMemory()
    memory.roles[Role.PREFILL] = RoleMemory(down_at=0.0, patience=2)
    _, after = plan(replace(BUSY_PREFILL, now=later_s), LIMITS, memory)
    assert after.roles[Role.PREFILL].patience == patience


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"metrics_age_s": None}, "hold: measurements are missing"),
        ({"metrics_age_s": 10.5}, "hold: measurements are 10.5 s old, 10 s at most count"),
        ({"blocks_per_replica": 0}, "hold: no engine has reported its KV blocks"),
    ],
)
def test_without_measurements_the_plan_is_to_stay(wrong: dict[str, Any], words: str) -> None:
    for load in (BUSY_PREFILL, BUSY_DECODE, replace(IDLE_PREFILL, prefill=Counts(8))):
        blind = replace(load, **wrong)
        assert repeated(blind, 200.0) == []
        made, _ = plan(blind, LIMITS, AFRESH)
        assert made.held == words
        assert made.why.startswith(words)


def test_a_role_below_its_floor_is_filled_from_one_that_cannot_spare_any() -> None:
    flipped_away = replace(AFRESH, flipped_to=Role.PREFILL, flipped_at=999.0)
    dead = replace(BUSY_PREFILL, decode=Counts(0))
    assert outcome(dead, flipped_away) == (2, 2, Role.DECODE)


def test_the_words_say_what_each_role_has_and_wants_and_what_it_waits_for() -> None:
    _, memory = plan(BUSY_PREFILL, LIMITS, AFRESH)
    made, memory = plan(replace(BUSY_PREFILL, now=1001.0), LIMITS, memory)
    lines = made.why.splitlines()
    assert len(lines) == 5
    assert lines[3] == "prefill: 2 replicas, wanted 2, 3 more after the cooldown"
    assert lines[4] == "decode: 2 replicas, wanted 2"
    made, _ = plan(replace(IDLE_PREFILL, now=1001.0), LIMITS, memory)
    made, _ = plan(replace(IDLE_PREFILL, now=1003.0), LIMITS, _)
    assert "prefill: 2 replicas, wanted 2, too many for 2 s" in made.why


counts = st.builds(Counts, st.integers(0, 8), st.integers(0, 4))
tokens = st.one_of(st.just(0.0), st.floats(0.0, 1e6))
loads = st.builds(
    lambda prefill, decode, age_s, used_blocks, flows: replace(
        QUIET,
        metrics_age_s=age_s,
        prefill=prefill,
        decode=decode,
        used_blocks=used_blocks,
        waiting_tokens=flows[0],
        prompt_tokens_per_s=flows[1],
        incoming_tokens=flows[2],
        handoff_tokens_per_s=flows[3],
    ),
    counts,
    counts,
    st.sampled_from([0.0, 0.0, 0.0, 100.0, None]),
    st.integers(0, 20_000),
    st.tuples(tokens, tokens, tokens, tokens),
)
limits_of_all_kinds = st.builds(
    lambda prefill, decode: PlannerConfig(min_prefill=prefill, min_decode=decode),
    *[st.integers(0, 4)] * 2,
)
role_memories = st.builds(
    RoleMemory,
    st.sampled_from([float("-inf"), 0.0, 990.0, 999.0]),
    st.sampled_from([float("-inf"), 0.0, 900.0, 990.0]),
    st.sampled_from([None, 0.0, 960.0, 999.0]),
    st.integers(0, 6),
)
memories = st.builds(
    PlanMemory,
    st.fixed_dictionaries(dict.fromkeys(Role, role_memories)),
    st.sampled_from([None, *Role]),
    st.sampled_from([float("-inf"), 900.0, 990.0]),
)


@given(loads, limits_of_all_kinds, memories)
def test_a_plan_keeps_the_bounds(
    inputs: PlanInputs, limits: PlannerConfig, memory: PlanMemory
) -> None:
    made, after = plan(inputs, limits, memory)
    for role in Role:
        have, wanted = made.of(role).have, made.of(role).wanted
        assert have == inputs.of(role).all
        assert wanted >= min(have, floor_of(role, limits))
        assert wanted <= max(have, MAX_REPLICAS)
        assert wanted >= have - 1
        if wanted < have and made.flip_to is None:
            assert have > floor_of(role, limits)
            assert not inputs.of(role).coming
            assert not made.held
    assert min(made.prefill.delta, made.decode.delta) >= -1
    if made.flip_to is not None:
        assert made.of(made.flip_to).delta >= 1
        assert inputs.of(made.flip_to.other).serving > floor_of(made.flip_to.other, limits)
        assert (after.flipped_to, after.flipped_at) == (made.flip_to, inputs.now)
        back = memory.flipped_to is made.flip_to.other and inputs.now - memory.flipped_at < 30.0
        assert not back or made.of(made.flip_to).have < floor_of(made.flip_to, limits)
    else:
        assert made.prefill.delta + made.decode.delta >= -1


@given(loads, limits_of_all_kinds, memories, st.floats(0.0, 1e6))
def test_more_waiting_tokens_never_want_fewer_prefills(
    inputs: PlanInputs, limits: PlannerConfig, memory: PlanMemory, more: float
) -> None:
    made, _ = plan(inputs, limits, memory)
    other, _ = plan(replace(inputs, waiting_tokens=inputs.waiting_tokens + more), limits, memory)
    assert other.prefill.wanted >= made.prefill.wanted


@given(loads, limits_of_all_kinds, memories, st.floats(0.0, 1e6))
def test_more_to_take_over_never_wants_more_prefills(
    inputs: PlanInputs, limits: PlannerConfig, memory: PlanMemory, more: float
) -> None:
    urgent = inputs.prefill.all < floor_of(Role.PREFILL, limits)
    made, _ = plan(inputs, limits, memory)
    other, _ = plan(replace(inputs, incoming_tokens=inputs.incoming_tokens + more), limits, memory)
    assert urgent or other.prefill.wanted <= made.prefill.wanted


@given(loads, limits_of_all_kinds)
def test_plans_carried_out_come_to_rest(inputs: PlanInputs, limits: PlannerConfig) -> None:
    """Under a load that does not move, after the last step there is none."""
    memory, last = AFRESH, -1
    inputs = replace(inputs, prefill=Counts(inputs.prefill.all), decode=Counts(inputs.decode.all))
    seen: list[tuple[int, int]] = []
    for second in range(0, 6000, 20):
        made, memory = plan(replace(inputs, now=float(second)), limits, memory)
        if made.prefill.delta or made.decode.delta:
            last = second
            seen.append((made.prefill.delta, made.decode.delta))
        inputs = replace(
            inputs, prefill=Counts(made.prefill.wanted), decode=Counts(made.decode.wanted)
        )
    assert last < 5000, seen
