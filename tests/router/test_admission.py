"""Admission by estimated capacity: bursts to idle engines, and overload."""

import random
from dataclasses import replace
from itertools import count

import pytest

from tests.support.router_engines import engine_spec
from tests.support.router_world import World
from tests.support.scripted_spec import ScriptedSpec
from vllm_kvpool.router.control.controller import Controller
from vllm_kvpool.router.control.requests import RequestId, RequestSpec
from vllm_kvpool.router.control.states import Role

SINGLES, BURST = 12, 64
KIND = engine_spec(
    prefill_tokens_per_s=8_000.0, step_base_s=0.01, decode_sequence_s=0.0002, kv_blocks=20_000
)
OUTPUT_TOKENS = 128
SECONDS, WARM_UP_S = 150.0, 30.0
COMPUTED_IN_DECODE = 0.6
"""Fraction of prompt tokens that decoders compute although prefill engines exist.

Measured with prompts of 500 tokens: short prompts and last chunks are computed in decoders.
"""


def ask(number: int, prompt_tokens: int) -> RequestSpec:
    return RequestSpec(
        request_id=RequestId(f"r{number}"),
        prompt_tokens=prompt_tokens,
        max_output_tokens=OUTPUT_TOKENS,
    )


def one_by_one(world: World, numbers: range, prompt_tokens: int) -> None:
    for number in numbers:
        world.arrive(ask(number, prompt_tokens), OUTPUT_TOKENS)
        while world.calls.clients:
            world.run(0.1)


@pytest.mark.parametrize("prompt_tokens", [50, 300])
@pytest.mark.parametrize("num_prefill", [0, 1])
@pytest.mark.parametrize("pause_s", [0.0, 600.0])
def test_a_burst_to_idle_engines_is_served_whole(
    prompt_tokens: int, num_prefill: int, pause_s: float
) -> None:
    """`vllm bench serve --request-rate inf` sends such a burst; some single requests precede it."""
    world = World(Controller(), kind=KIND)
    world.add("d", Role.DECODE)
    for number in range(num_prefill):
        world.add(f"p{number}", Role.PREFILL)
    world.run(2.0)
    one_by_one(world, range(SINGLES), prompt_tokens)
    world.run(pause_s)
    for number in range(SINGLES, SINGLES + BURST):
        world.arrive(ask(number, prompt_tokens), OUTPUT_TOKENS)
    world.run(120.0)
    assert world.calls.fates["served"] == SINGLES + BURST


def sustained(kind: ScriptedSpec, num_prefill: int, prompt_tokens: int) -> float:
    """Return the requests per second that one decoder and these prefill engines sustain."""
    fits = kind.kv_blocks * 0.95 // ((prompt_tokens + OUTPUT_TOKENS) / kind.block_size)
    running = min(kind.max_num_seqs, int(fits))
    decode_s = OUTPUT_TOKENS * (kind.decode_sequence_s + kind.step_base_s / running)
    computed = prompt_tokens * (COMPUTED_IN_DECODE if num_prefill else 1.0)
    decoded = 1 / (decode_s + computed / kind.prefill_tokens_per_s)
    return min(decoded, max(1, num_prefill) * kind.prefill_tokens_per_s / prompt_tokens)


@pytest.mark.parametrize("times", [2.0, 4.0])
@pytest.mark.parametrize(
    ("kind", "num_prefill", "prompt_tokens"),
    [
        pytest.param(KIND, 1, 2000, id="prefill"),
        pytest.param(KIND, 0, 2000, id="prefill-in-decode"),
        pytest.param(replace(KIND, kv_blocks=1000, max_model_len=16_000), 2, 500, id="blocks"),
        pytest.param(replace(KIND, max_num_seqs=8), 0, 50, id="few-sequences"),
        pytest.param(replace(KIND, max_num_seqs=32, step_base_s=0.05), 1, 500, id="slow-steps"),
    ],
)
def test_under_too_much_load_those_let_in_are_answered_soon_and_none_is_lost(
    kind: ScriptedSpec, num_prefill: int, prompt_tokens: int, times: float
) -> None:
    world = World(Controller(), kind=kind, check_every=0)
    world.add("d", Role.DECODE)
    for number in range(num_prefill):
        world.add(f"p{number}", Role.PREFILL)
    world.run(2.0)
    capacity = sustained(kind, num_prefill, prompt_tokens)
    chance, numbers = random.Random(1), count()

    def arrive() -> None:
        if world.now < SECONDS:
            tokens = int(prompt_tokens * chance.uniform(0.5, 1.5))
            world.arrive(ask(next(numbers), tokens), OUTPUT_TOKENS)
            world.timeline.after(chance.expovariate(times * capacity), arrive)

    world.timeline.after(0.0, arrive)
    world.run(WARM_UP_S)
    before = world.calls.fates["served"]
    world.run(SECONDS - world.now)
    served = world.calls.fates["served"] - before
    world.run(60.0)
    waits = sorted(wait_s for at, wait_s in world.calls.waits if at >= WARM_UP_S)
    p99 = waits[int(0.99 * len(waits))]

    # Sequences of one length begin and end together: a wait may be as long as an answer, 6.4 s.
    assert p99 <= 7.5
    assert served >= 0.9 * capacity * (SECONDS - WARM_UP_S)
