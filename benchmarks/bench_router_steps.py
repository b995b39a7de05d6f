"""The router's controller: what one event costs.

    python benchmarks/bench_router_steps.py --json router_steps.json

Engines and clients are simulated in virtual time, nothing runs beside the controller. Microseconds
of `Controller.step` by kind of event, with 24 prefill and 40 decode replicas and with eight times
as many, requests by chance at a rate that they can bear, and at one that is too high for them (a
part is refused, the rest waits).
"""

import gc
import itertools
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable

from benchmarks.common import Result, Row, Target, run_script
from tests.support.router_engines import engine_spec
from tests.support.router_world import World
from vllm_kvpool.router.control.controller import Controller
from vllm_kvpool.router.control.events import Action, Event, Mode
from vllm_kvpool.router.control.requests import RequestId, RequestSpec
from vllm_kvpool.router.control.settings import PlannerConfig
from vllm_kvpool.router.control.states import Role
from vllm_kvpool.router.run import GC_THRESHOLD

PREFILL, DECODE, TIMES = 24, 40, (1, 8)
KIND = engine_spec(kv_blocks=16_000)
LOADS = (("bearable", 80.0), ("too high", 200.0))  # requests by second
WARM_S, MEASURED_S, QUICK_S = 25.0, 20.0, 2.0
PREFIXES, PREFIX_TOKENS = 200, 256
MAX_MEAN_US = 60.0


class TimedController(Controller):
    """Counts the CPU time of each step by kind of event."""

    def __init__(self) -> None:
        super().__init__(planner=PlannerConfig(mode=Mode.DRY_RUN))
        self.spent_s: defaultdict[str, float] = defaultdict(float)
        self.steps: Counter[str] = Counter()

    def step(self, event: Event, now: float) -> list[Action]:
        begun = time.thread_time()
        actions = super().step(event, now)
        self.spent_s[type(event).__name__] += time.thread_time() - begun
        self.steps[type(event).__name__] += 1
        return actions


def arrivals(world: World, per_second: float) -> Callable[[], None]:
    """Requests by chance, for ever."""
    chance = random.Random(1)

    def arrive() -> None:
        root = chance.randrange(PREFIXES)
        asked = RequestSpec(
            request_id=RequestId(f"r{world.num_steps}"),
            prompt_tokens=chance.randint(100, 3000),
            max_output_tokens=600,
            prefix=tuple(root * 100 + number for number in range(chance.randint(0, 11))),
            prefix_tokens=PREFIX_TOKENS,
        )
        world.arrive(asked, chance.randint(200, 600))
        world.timeline.after(chance.expovariate(per_second), arrive)

    return arrive


def cost(
    per_second: float, seconds: float, times: int, warm_s: float | None = None
) -> tuple[Row, float]:
    """A row, and the mean over all events, in microseconds; replicas and requests so many times."""
    # As the router's process does; and what is left of the row before is nothing of this row's.
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)
    controller = TimedController()
    world = World(controller, kind=KIND, check_every=0)
    for number in range(times * PREFILL):
        world.add(f"p{number}", Role.PREFILL)
    for number in range(times * DECODE):
        world.add(f"d{number}", Role.DECODE)
    world.run(2.0)
    arrivals(world, times * per_second)()
    world.run(WARM_S / times if warm_s is None else warm_s)
    controller.spent_s.clear()
    controller.steps.clear()
    world.run(seconds)
    row: Row = {
        "replicas": times * (PREFILL + DECODE),
        "requests/s": times * per_second,
        "in flight": len(world.calls.clients),
    }
    row["waiting"] = len(controller.state.queue) + len(controller.state.migration)
    mean_us = 1e6 * sum(controller.spent_s.values()) / controller.steps.total()
    row |= {"events": controller.steps.total(), "mean us": mean_us}
    row["cores"] = sum(controller.spent_s.values()) / seconds
    for kind, number in sorted(controller.steps.items()):
        row[f"{kind} us"] = 1e6 * controller.spent_s[kind] / number
    return row, mean_us


def measure(quick: bool) -> Result:
    result = Result()
    for times, (name, per_second) in itertools.product(TIMES, LOADS):
        row, mean_us = cost(per_second, (QUICK_S if quick else MEASURED_S) / times, times)
        result.rows.append({"load": name} | row)
        what = f"an event, {times * (PREFILL + DECODE)} replicas, load {name}"
        result.targets.append(Target(what, mean_us, MAX_MEAN_US, False, "us"))
    return result


if __name__ == "__main__":
    run_script(__doc__, measure)
