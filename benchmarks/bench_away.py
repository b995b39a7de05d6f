"""What a store that is away costs an engine: nothing, after the first requests.

    python benchmarks/bench_away.py --json away.json

Engines of one kind, one without a pool and the others over files that fail in a way of their own
from the moment on at which all are warm, take turns with the same work: new prompts of 1,024
tokens, one after another, each with 16 tokens of answer. The first round holds whatever it takes
to find out that the store is away; the others are compared with the engine without a pool, and
`limited by` is about them. What a sound store costs is in bench_real_weights.py. Timeouts are the
defaults (`lookup_timeout_ms` 500, `call_timeout_s` 10).
"""

import contextlib
import random
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from benchmarks.common import LIMITED_BY, Result, Row, Target, run_script
from benchmarks.limits import Meter
from tests.e2e.engine import Engine, EngineSpec, Prompt
from tests.support.faults import Fault, FaultControl
from tests.support.models import LlamaShape, make_model

SHAPE = LlamaShape(layers=8, heads=8, kv_heads=8, head_dim=64, hidden=512, intermediate=768)
PROMPT_TOKENS, ANSWER_TOKENS = 1024, 16
PROMPTS, ROUNDS = 4, 3
QUICK_PROMPTS, QUICK_ROUNDS = 2, 1
SLOW_S = 5.0
FAULTS = {
    "refuses": Fault.UNREACHABLE,
    "5 s a call": Fault.SLOW,
    "never answers": Fault.BLOCKED,
}
FULL_SPEED = 0.95


@dataclass
class Side:
    """One engine, and how long each of its rounds and requests took, in seconds."""

    name: str
    engine: Engine
    faults: FaultControl | None
    rounds: list[float] = field(default_factory=list)
    requests: list[float] = field(default_factory=list)

    def fail(self) -> None:
        if self.faults is None:
            return
        fault = FAULTS[self.name]
        if fault is Fault.SLOW:
            self.faults.slow(SLOW_S)
        else:
            self.faults.inject(fault)

    def work(self, seeds: range) -> None:
        began = time.monotonic()
        for seed in seeds:
            start = time.monotonic()
            self.engine.generate(prompt(seed))
            self.requests.append(time.monotonic() - start)
        self.rounds.append(time.monotonic() - began)


def prompt(seed: int) -> Prompt:
    ids = random.Random(seed).choices(range(3, SHAPE.vocab), k=PROMPT_TOKENS)
    return Prompt(ids=ids, max_tokens=ANSWER_TOKENS, logprobs=None)


def start(name: str, model: Path, directory: Path) -> Side:
    if name == "no pool":
        return Side(name, Engine(EngineSpec(model=model), directory / "none.log"), None)
    place = directory / name.replace(" ", "-")
    place.mkdir()
    faults = FaultControl(place)
    config = {
        "kv_connector": "KVPoolConnector",
        "kv_connector_module_path": "tests.support.faulty",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"store": f"file://{place}/cells?size=4GiB"},
    }
    spec = EngineSpec(model=model, kv_transfer_config=config, env={"KVPOOL_FAULTS": str(place)})
    return Side(name, Engine(spec, place / "engine.log"), faults)


def measure(quick: bool) -> Result:
    with tempfile.TemporaryDirectory(prefix="bench") as name, contextlib.ExitStack() as stack:
        directory = Path(name)
        model = make_model(directory, SHAPE)
        sides = []
        for kind in ("no pool", *FAULTS):
            sides.append(start(kind, model, directory))
            stack.callback(sides[-1].engine.kill)
        for side in sides:  # an engine's first passes are slow
            side.engine.generate(prompt(-1))
            side.engine.generate(prompt(-2))
        for side in sides:
            side.fail()
        meter = Meter()
        prompts, rounds = (QUICK_PROMPTS, QUICK_ROUNDS) if quick else (PROMPTS, ROUNDS)
        for number in range(1 + rounds):
            for side in sides:
                with meter.of(side.name if number else "first round"):
                    side.work(range(number * prompts, (number + 1) * prompts))
        return report(sides, meter)


def report(sides: list[Side], meter: Meter) -> Result:
    result = Result()
    base = sides[0]
    for side in sides:
        row: Row = {
            "store": side.name,
            "first round ms": 1e3 * side.rounds[0],
            "later rounds ms": 1e3 * median(side.rounds[1:]),
            "slowest request ms": 1e3 * max(side.requests),
        }
        if side is not base:
            # Neighbours in time: the machine's speed changes from round to round.
            pairs = zip(base.rounds[1:], side.rounds[1:], strict=True)
            ratio = median(without / with_it for without, with_it in pairs)
            row["speed"] = ratio
            what = f"speed with a store ({side.name}) over no pool, after the first round"
            result.targets.append(Target(what, ratio, FULL_SPEED, True))
        result.rows.append(row | {LIMITED_BY: meter.limited_by(side.name)})
    return result


if __name__ == "__main__":
    run_script(__doc__, measure)
