"""A burst of requests that arrives while engines start, in a simulated cluster.

The trace is the same for each `Way`, so the three ways can be compared.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from itertools import count

from tests.support.router_engines import engine_spec
from tests.support.router_world import Habits, World
from vllm_kvpool.router.control.controller import Controller
from vllm_kvpool.router.control.requests import RequestId, RequestSpec
from vllm_kvpool.router.control.settings import OverloadConfig, PlannerConfig, Settings
from vllm_kvpool.router.control.states import Role

KIND = engine_spec(prefill_tokens_per_s=8_000.0, decode_sequence_s=0.0005, kv_blocks=20_000)
PROMPT_TOKENS, OUTPUT_TOKENS = (1000, 5000), (50, 400)
CALM_PER_S, BURST_PER_S = 3.0, 7.0
SPAWN_S, BURST_S, CALM_S, END_S = 20.0, (20.0, 50.0), 80.0, 400.0


class Way(Enum):
    """The router's handling of requests while a replica loads.

    * TAKE_OVER: A loading replica is given requests at once; other replicas may steal them.
    * QUEUE: No request is given to a replica before it is loaded.
    * WAIT: A loading replica is given its share, which waits until the replica is loaded.
    """

    TAKE_OVER = "given to it, stolen by others"
    QUEUE = "given to nobody that loads"
    WAIT = "given to it, wait until it is loaded"


def load(world: World, until: float, per_second: Callable[[float], float], seed: int = 0) -> None:
    """Send random requests until a time, at a rate that depends on the time."""
    chance, number = random.Random(seed), count()

    def arrive() -> None:
        if world.now < until:
            asked = RequestSpec(
                request_id=RequestId(f"q{next(number)}"),
                prompt_tokens=chance.randint(*PROMPT_TOKENS),
                max_output_tokens=OUTPUT_TOKENS[1],
            )
            world.arrive(asked, chance.randint(*OUTPUT_TOKENS))
            world.timeline.after(chance.expovariate(per_second(world.now)), arrive)

    world.timeline.after(0.0, arrive)


def burst(way: Way, seed: int, *, load_s: float = 20.0) -> World:
    """Run a burst and return its world. Two prefill engines start when the burst begins.

    The cluster has two engines of each role before. `load_s`: seconds until the new engines answer.
    Every request is admitted, and has ended when the function returns.
    """
    world = World(
        Controller(
            Settings(),
            planner=PlannerConfig(live_takeover=way is Way.TAKE_OVER),
            overload=OverloadConfig(ttft_target_s=1e6, max_queue=100_000),
        ),
        seed=seed,
        kind=replace(KIND, load_s=load_s),
        habits=Habits(holds_for_new=way is Way.WAIT),
        check_every=0,  # random lives check; checks would be half of a burst's cost
    )
    for number in range(2):
        world.add(f"p{number}", Role.PREFILL)
        world.add(f"d{number}", Role.DECODE)
    world.run(5.0)
    begin, end = BURST_S
    load(world, CALM_S, lambda now: BURST_PER_S if begin < now < end else CALM_PER_S, seed)
    world.run(SPAWN_S - world.now)
    for number in range(2):
        world.add(f"n{number}", Role.PREFILL, is_up=False, is_started=True)
    world.run(END_S - world.now)
    return world
