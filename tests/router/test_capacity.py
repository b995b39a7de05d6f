"""Replicas that a load needs: each equation, calculated by hand."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_kvpool.router.control.planner import (
    DECODE_BAND,
    HANDOFF_BAND,
    MAX_REPLICAS,
    PREFILL_BAND,
    Band,
    Counts,
    Equation,
    PlanInputs,
    equations,
)
from vllm_kvpool.router.control.rates import Rates
from vllm_kvpool.router.control.states import Role

TARGET_S = 2.0
NOTHING = PlanInputs(
    now=0.0,
    metrics_age_s=0.0,
    prefill=Counts(1),
    decode=Counts(1),
    used_blocks=0,
    blocks_per_replica=1000,  # 16,000 tokens
    block_tokens=16,
    waiting_tokens=0.0,
    prompt_tokens_per_s=0.0,
    incoming_tokens=0.0,
    handoff_tokens_per_s=0.0,
    rates=Rates(prefill_tokens_per_s=10_000.0, transfer_tokens_per_s=20_000.0),
)
MEMORY, TAKING, COMPUTING = range(3)


def numbers(inputs: PlanInputs, which: int) -> tuple[float, int, int, int]:
    term = equations(inputs, TARGET_S)[which]
    return pytest.approx(term.demand), term.least, term.target, term.most  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("which", "expected", "load"),
    [
        # blocks / (1000 blocks / replica); least at 0.8, target at 0.625, most at 0.45
        (MEMORY, (0.0, 0, 0, 0), {}),
        (MEMORY, (0.4, 1, 1, 1), {"used_blocks": 400}),
        (MEMORY, (0.8, 1, 2, 2), {"used_blocks": 800}),
        (MEMORY, (0.801, 2, 2, 2), {"used_blocks": 801}),
        (MEMORY, (2.4, 3, 4, 6), {"used_blocks": 2400}),
        # 16,000 tokens are 1000 blocks that will be needed
        (MEMORY, (3.4, 5, 6, 8), {"used_blocks": 2400, "incoming_tokens": 16_000}),
        # (tokens/s + tokens / 2 s) / (20,000 tokens/s of a replica); at 0.8, 0.5, 0.2
        (TAKING, (0.0, 0, 0, 0), {}),
        (TAKING, (0.5, 1, 1, 3), {"handoff_tokens_per_s": 10_000}),
        (TAKING, (1.0, 2, 2, 5), {"incoming_tokens": 40_000}),
        (TAKING, (1.5, 2, 3, 8), {"handoff_tokens_per_s": 10_000, "incoming_tokens": 40_000}),
        # (tokens/s + tokens / 2 s) / (10,000 tokens/s of a replica); at 0.8, 0.6, 0.4
        (COMPUTING, (0.0, 0, 0, 0), {}),
        (COMPUTING, (0.8, 1, 2, 2), {"prompt_tokens_per_s": 8_000}),
        (COMPUTING, (1.0, 2, 2, 3), {"waiting_tokens": 20_000}),
        (COMPUTING, (2.6, 4, 5, 7), {"prompt_tokens_per_s": 16_000, "waiting_tokens": 20_000}),
    ],
)
def test_demand_is_load_by_what_a_replica_has_or_does(
    which: int, expected: tuple[float, int, int, int], load: dict[str, Any]
) -> None:
    assert numbers(replace(NOTHING, **load), which) == expected


@given(st.integers(1, 50), st.integers(1, 50))
def test_a_demand_does_not_depend_on_the_replicas_there_are(prefill: int, decode: int) -> None:
    """Rates are those of one replica: folded with their number, the result would be a ratio."""
    load = replace(NOTHING, handoff_tokens_per_s=3e3, incoming_tokens=2e3, used_blocks=500)
    there = replace(load, prefill=Counts(prefill), decode=Counts(decode))
    assert equations(there, TARGET_S) == equations(load, TARGET_S)


def test_what_waits_while_decode_is_short_does_not_count_for_prefill() -> None:
    load = replace(NOTHING, prompt_tokens_per_s=8_000.0, waiting_tokens=1e6)
    assert numbers(load, COMPUTING)[1] > 1
    for short in (
        replace(load, used_blocks=900),
        replace(load, incoming_tokens=64_000),
        replace(load, decode=Counts(0, coming=3), used_blocks=500),  # those are not there yet
    ):
        assert numbers(short, COMPUTING) == (0.8, 1, 2, 2)
        assert "while decode is short" in equations(short, TARGET_S)[COMPUTING].why


def test_a_backlog_of_migration_never_counts_for_prefill() -> None:
    load = replace(NOTHING, incoming_tokens=1e9)
    assert numbers(load, COMPUTING)[1] == 0


def test_the_words_hold_the_numbers_and_their_units() -> None:
    load = replace(NOTHING, prompt_tokens_per_s=16_000.0, waiting_tokens=20_000.0)
    assert equations(load, TARGET_S)[COMPUTING].why == (
        "prefill: (16000 tokens/s + 20000 tokens in 2 s) / 10000 tokens/s of a replica = "
        "2.60 replicas; 4 at 80%, 5 at 60%, 7 at 40%"
    )


@given(st.floats(0.0, 1e12), st.sampled_from([PREFILL_BAND, DECODE_BAND, HANDOFF_BAND]))
def test_least_target_and_most_stand_in_this_order(demand: float, band: Band) -> None:
    term = Equation("a demand", Role.DECODE, demand, band, "")
    assert 0 <= term.least <= term.target <= term.most <= MAX_REPLICAS


@pytest.mark.parametrize("demand", [0.3 * 10, 0.1 * 3 * 10, 3.0 + 1e-12])
def test_a_rounding_error_costs_no_replica(demand: float) -> None:
    assert Equation("a demand", Role.DECODE, demand, Band(0.5, 1.0), "").least == 3
