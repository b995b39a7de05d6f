"""Time that connector hooks take of an engine step, with 64 running requests.

    python benchmarks/bench_hooks.py --json hooks.json

A real vLLM scheduler and a real worker-side connector go through steps as an in-process engine
does; only the forward pass is a pause. Requests come and go: 64 run at any time, prompts are of 256
to 1,023 tokens, half of them have been stored before (an earlier phase computes them, and the
scheduler's own prefix cache is emptied after it), outputs of 64 to 319 tokens.

Every hook of both connector objects is timed from outside and summed per step, in microseconds. On
the scheduler's thread those are the lookup of an arriving request, the step's plan, the workers'
report and so on; on the model's thread those that vLLM calls around the forward pass. Both sides
use one kind of store: a Mooncake cluster of this process alone.

The pool on CPU ends a step's gathers inside the step, which no GPU has: `waiting for its gather` is
that part of the model's thread alone, `the rest` is all else, which is CPU. Each hook has a row of
its own. `limited by` is about the engine that steps: its forward passes are pauses.
"""

import random
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import Child, Result, Row, Target, percentile, run_script, spread
from benchmarks.model_free_engine import (
    GATHER,
    IMPORTED,
    EngineShape,
    ModelFreeEngine,
    mooncake_environment,
)
from tests.support.models import LlamaShape, make_model
from tests.support.mooncake_master import MooncakeMaster

SHAPE = LlamaShape(layers=4, heads=8, kv_heads=4, head_dim=32)
BLOCK, NUM_RUNNING = 32, 64
PROMPT_TOKENS, OUTPUT_TOKENS = range(256, 1024), range(64, 320)
ENGINE = EngineShape(
    model=SHAPE, block=BLOCK, num_blocks=3_500, max_seqs=NUM_RUNNING, max_model_len=2048
)
SEGMENT_BYTES = 1 << 30
FORWARD_S = 0.005
WARM_STEPS, STEPS, QUICK_STEPS = 100, 500, 50
QUIET_TIMEOUT_S = 20.0
RUN_TIMEOUT_S = 120.0
MAX_HOOKS_US = 100.0


class MeasuredEngine(ModelFreeEngine):
    """Times the hooks of each step."""

    def run(self, steps: int) -> dict[str, list[dict[str, float]]]:
        """Hook times of every step, by thread."""
        rng = random.Random(0)
        stored = [random_prompt(rng) for _ in range(2 * NUM_RUNNING)]
        for tokens in stored:
            self.add(tokens, 2)
        self._finish_all()
        # Their cells are to be found, and the scheduler is to look for them in the pool.
        assert self.scheduler.reset_prefix_cache()
        spent: dict[str, list[dict[str, float]]] = {"scheduler": [], "model": []}
        running: list[int] = []
        for number in range(WARM_STEPS + steps):
            while len(self.scheduler.requests) < NUM_RUNNING + 2:
                tokens = stored.pop() if stored and rng.random() < 0.5 else random_prompt(rng)
                self.add(tokens, rng.choice(OUTPUT_TOKENS))
            running.append(self.step(_pause(FORWARD_S)))
            taken = self.scheduler_clock.take(), self.worker_clock.take()
            if number >= WARM_STEPS:
                spent["scheduler"].append(taken[0])
                spent["model"].append(taken[1])
        assert self.num_loads, "nothing was loaded from the pool"
        typical = percentile(running[WARM_STEPS:], 0.5)
        assert typical >= NUM_RUNNING - 8, f"only {typical} requests run"
        return spent

    def _finish_all(self) -> None:
        deadline = time.monotonic() + QUIET_TIMEOUT_S
        connector = self.scheduler.connector
        while self.scheduler.get_num_unfinished_requests() or connector.has_pending_push_work():
            assert time.monotonic() < deadline, "requests do not end"
            self.step(_pause(0.001))


def _pause(seconds: float) -> Callable[[Mapping[str, int]], None]:
    """A forward pass that only takes time."""
    return lambda scheduled: time.sleep(seconds)


def random_prompt(rng: random.Random) -> list[int]:
    return rng.choices(range(3, SHAPE.vocab), k=rng.choice(PROMPT_TOKENS))


def measure_side(side: str, save_decode: bool, model: Path, steps: int) -> dict[str, Any]:
    """Hook times of one connector, in a process and a cluster of its own."""
    with (
        MooncakeMaster() as master,
        tempfile.TemporaryDirectory(prefix="bench") as directory,
    ):
        if side == "kvpool":
            name = "KVPoolConnector"
            url = f"mooncake://{master.address}?segment={SEGMENT_BYTES}"
            extra: dict[str, Any] = {"store": url, "save_decode": save_decode}
        else:
            name = "MooncakeStoreConnector"
            extra = {"save_decode_cache": save_decode}
        env = mooncake_environment(master.address, Path(directory), SEGMENT_BYTES)
        with Child(MeasuredEngine, ENGINE, name, extra, str(model), env=env) as engine:
            spent: dict[str, Any] = engine.call("run", steps, timeout_s=RUN_TIMEOUT_S)
            return spent


def measure(quick: bool) -> Result:
    result = Result()
    with tempfile.TemporaryDirectory(prefix="bench") as directory:
        model = make_model(Path(directory), SHAPE)
        for save_decode in (False,) if quick else (False, True):
            theirs: dict[str, float] = {}
            for side in ("in-tree", "kvpool"):
                steps = QUICK_STEPS if quick else STEPS
                spent = measure_side(side, save_decode, model, steps)
                for thread, per_step in spent.items():
                    row, *parts = step_rows(side, save_decode, thread, per_step)
                    result.rows += [row, *parts]
                    p50 = float(str(row["p50 us"]))
                    if side == "in-tree":
                        theirs[thread] = p50
                        continue
                    row["in-tree p50 / p50"] = theirs[thread] / p50
                    what = f"{thread}'s thread, save_decode {save_decode}, p50"
                    result.targets.append(Target(what, p50, MAX_HOOKS_US, False, "us"))
    return result


def step_rows(
    side: str, save_decode: bool, thread: str, per_step: list[dict[str, float]]
) -> list[Row]:
    """All of a thread's steps, its parts, and each hook that takes a hundredth of it or more."""
    about: Row = {"side": side, "save_decode": save_decode, "thread": thread}
    waited = [step.pop(GATHER, 0.0) for step in per_step]
    totals = [sum(step.values()) for step in per_step]
    rows = [{**about, "what": "all hooks", **in_numbers(totals)}]
    if any(waited):
        rest = [total - wait for total, wait in zip(totals, waited, strict=True)]
        rows.append({**about, "what": GATHER, **in_numbers(waited)})
        rows.append({**about, "what": "the rest", **in_numbers(rest)})
    for name in sorted({name for step in per_step for name in step}):
        values = [step.get(name, 0.0) for step in per_step]
        if sum(values) >= sum(totals) / 100:
            rows.append({**about, "what": name, **in_numbers(values)})
    return rows


def in_numbers(values: Sequence[float]) -> Row:
    return {**spread("", "us", values), "max us": max(values)}


if __name__ == "__main__":
    run_script(__doc__, measure, IMPORTED)
