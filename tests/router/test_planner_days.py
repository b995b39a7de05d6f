"""Plans over simulated hours: they follow the load and do not flap."""

import random

import pytest

from tests.router.toy_fleet import RATES, ToyFleet
from vllm_kvpool.router.control.settings import PlannerConfig
from vllm_kvpool.router.control.states import Role

HOUR_S = 3600.0
LIMITS = PlannerConfig()
# Each turn the wrong way doubles the next pause, from 30 s to 1800 s: six doublings, then one up
# and one down in every half hour at most.
MOST_TURNS_AT_FIRST = 12
MOST_TURNS_AN_HOUR = 4


@pytest.mark.parametrize(
    ("per_second", "prompt_tokens"),
    [
        (2.0, 200),  # far less than one of each
        (0.5, 6000),  # rare and long: a burst is 3 to 30 times the mean
        (2.0, 2000),  # at the edge from one to two
        (10.0, 2000),
    ],
)
def test_a_constant_load_does_not_make_plans_flap(per_second: float, prompt_tokens: int) -> None:
    fleet = ToyFleet(LIMITS, lambda now: (per_second, prompt_tokens), seed=prompt_tokens)
    hours = 2
    fleet.run(hours * HOUR_S)
    for role in Role:
        assert fleet.turns(role) <= MOST_TURNS_AT_FIRST
    need = per_second * prompt_tokens / RATES.prefill_tokens_per_s
    assert fleet.serving[Role.PREFILL] >= need
    assert len(fleet.queue) <= 10 * per_second


def wandering(seed: int, every_s: float) -> list[tuple[float, int]]:
    chance = random.Random(seed)
    return [
        (chance.choice([0.0, 0.5, 2.0, 6.0, 10.0]), chance.choice([500, 2000, 4000]))
        for _ in range(int(24 * HOUR_S / every_s))
    ]


@pytest.mark.parametrize("seed", [1, 2])
def test_a_load_that_wanders_is_followed_with_few_turns(seed: int) -> None:
    every_s = 0.5 * HOUR_S
    levels = wandering(seed, every_s)
    fleet = ToyFleet(LIMITS, lambda now: levels[int(now // every_s)], seed)
    steps = 5
    fleet.run(steps * every_s - 1)
    for role in Role:
        assert fleet.turns(role) <= 2 * steps


@pytest.mark.slow
@pytest.mark.parametrize(
    ("per_second", "prompt_tokens"), [(0.5, 6000), (1.0, 6000), (2.0, 2000), (2.0, 6000)]
)
def test_plans_do_not_flap_for_hours(per_second: float, prompt_tokens: int) -> None:
    fleet = ToyFleet(LIMITS, lambda now: (per_second, prompt_tokens), seed=3)
    hours = 3
    fleet.run(hours * HOUR_S)
    for role in Role:
        assert fleet.turns(role) <= MOST_TURNS_AT_FIRST + hours * MOST_TURNS_AN_HOUR / 2
