"""Time to the first token of a hit with and without `layerwise`, over files on this machine.

    python benchmarks/bench_layerwise.py --json layerwise.json

One engine after another asks for the same stored beginning with some tokens behind it that nobody
has computed: `new` of them, or none (a full hit computes its last token). Engines that load whole
requests first and engines that load layer by layer read the same cells, of a quarter of the layers,
which is the default. Their own prefix caches are emptied before every request, and `new`
tokens are other ones each time. Two take turns, so that what else runs here hits them alike; what
counts is the ratio.

Where the model computes on these very cores, what loads takes them from it. The other rows are of
layers that compute elsewhere, as on a device: they sleep, for half as long as, as long as and twice
as long as the load takes; with cells of a quarter of the layers, and of one.
"""

import contextlib
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks.common import (
    LIMITED_BY,
    DidNotFinish,
    Result,
    Row,
    Target,
    interleaved,
    run_script,
    wait_until,
)
from benchmarks.limits import Meter
from benchmarks.sides import Geometry, OurSide
from tests.e2e.engine import Engine, EngineSpec, Prompt
from tests.support.models import LlamaShape, make_model

LAYERS = 16
SHAPE = LlamaShape(
    layers=LAYERS,
    heads=8,
    kv_heads=8,
    head_dim=64,
    hidden=512,
    intermediate=768,
    max_position=6144,
)
STORED, BLOCK = 4096, 128
NEW = (0, 512)
REPEATS, QUICK_REPEATS = 3, 1
LIMIT_S = 60.0
MAX_RATIO = 1.0
DEFAULT_SPAN = LAYERS // 4
SPANS = (DEFAULT_SPAN, 1)
ELSEWHERE_TOKENS = 4096
SHARES = (0.5, 1.0, 2.0)  # time that layers compute, in times of the load


@dataclass
class Side:
    """An engine; `seconds` by how many tokens were new."""

    name: str
    layerwise: bool
    engine: Engine
    seconds: dict[int, list[float]] = field(default_factory=dict)
    meter: Meter = field(default_factory=Meter)


def tokens(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(3, SHAPE.vocab), k=count)


def ask(engine: Engine, ids: Sequence[int]) -> tuple[float, int]:
    """Seconds to the first token, and how many tokens were not computed."""
    wait_until(engine.reset_prefix_cache, LIMIT_S)
    prompt = Prompt(ids=ids, max_tokens=1, logprobs=None)
    (answer,) = engine.generate(prompt, timeout_s=LIMIT_S)
    return answer.first_token_s, answer.cached_tokens


def is_found(engine: Engine, ids: Sequence[int]) -> bool:
    return ask(engine, ids)[1] == len(ids) - 1


def side(directory: Path, model: Path, layerwise: bool) -> Side:
    extra = {
        "store": f"file://{directory}/engines?size=8GiB",
        "lookup_timeout_ms": 20_000,
        "layer_span": DEFAULT_SPAN,
        "layerwise": layerwise,
    }
    how = "layer by layer" if layerwise else "whole requests"
    name = f"{how}, {DEFAULT_SPAN} layers a cell"
    transfer = {
        "kv_connector": "KVPoolConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }
    spec = EngineSpec(
        model=model,
        block_size=BLOCK,
        kv_transfer_config=transfer,
        llm={
            "kv_cache_memory_bytes": 640 << 20,
            "max_model_len": SHAPE.max_position,
            "max_num_batched_tokens": SHAPE.max_position,
        },
    )
    return Side(name, layerwise, Engine(spec, directory / f"{layerwise}.log"))


def measure(quick: bool) -> Result:
    repeats = QUICK_REPEATS if quick else REPEATS
    result = Result()
    with tempfile.TemporaryDirectory(prefix="bench") as name:
        directory = Path(name)
        model = make_model(directory, SHAPE)
        engines(result, directory, model, repeats)
        for span in SPANS[: 1 if quick else None]:
            result.rows += elsewhere(directory, span, repeats)
    result.notes.append(
        f"hits of {STORED} tokens of a {LAYERS}-layer float32 Llama; no file in the page cache"
    )
    return result


def engines(result: Result, directory: Path, model: Path, repeats: int) -> None:
    """Two engines of the same cells, in turn."""
    with contextlib.ExitStack() as stack:
        sides = []
        for layerwise in (False, True):
            sides.append(side(directory, model, layerwise))
            stack.callback(sides[-1].engine.kill)
        run(sides, repeats)
        report(result, *sides)


def run(sides: list[Side], repeats: int) -> None:
    stored = tokens(0, STORED)
    for each in sides:
        ask(each.engine, tokens(2, BLOCK))  # the first pass of an engine is slow
        if not each.layerwise:
            ask(each.engine, stored)
    for each in sides:  # also warms them up
        wait_until(partial(is_found, each.engine, stored), LIMIT_S)
        ask(each.engine, [*stored, *tokens(1, NEW[-1])])
    for repeat in range(repeats):
        for new in NEW:
            for number, each in enumerate(sides):
                ids = [*stored, *tokens(1000 * repeat + 10 * new + number, new)]
                with each.meter.of(f"{new}"):
                    seconds, cached = ask(each.engine, ids)
                if cached != min(STORED, len(ids) - 1):
                    raise DidNotFinish(f"{each.name}: only {cached} tokens were loaded")
                each.seconds.setdefault(new, []).append(seconds)


def elsewhere(directory: Path, span: int, repeats: int) -> list[Row]:
    """The worker side alone, with layers that sleep."""
    here = OurSide(
        f"file://{directory}/elsewhere{span}?size=4GiB",
        Geometry(layers=LAYERS, tokens=ELSEWHERE_TOKENS, span=span),
    )
    here.save(0, LIMIT_S)
    load_s = median(here.load(0, LIMIT_S) for _ in range(repeats))
    rows = [beside(here, load_s, share, repeats) for share in SHARES]
    here.wipe()
    here.load_within(0, 0.0)
    here.check()
    here.close()
    return rows


def beside(here: OurSide, load_s: float, share: float, repeats: int) -> Row:
    """Both ways with layers that compute for so many times the load."""
    layer_s, meter = share * load_s / LAYERS, Meter()
    seconds = interleaved(
        {
            "whole": lambda: here.load(0, LIMIT_S) + computed(layer_s),
            "layers": lambda: here.load_within(0, layer_s),
        },
        repeats,
        meter,
    )
    whole, layers = median(seconds["whole"]), median(seconds["layers"])
    return {
        "loads": f"compute elsewhere, {here.geometry.span} layers a cell",
        "stored": ELSEWHERE_TOKENS,
        "load ms": 1e3 * load_s,
        "compute ms": 1e3 * share * load_s,
        "whole first ms": 1e3 * whole,
        "layer by layer ms": 1e3 * layers,
        "of whole": layers / whole,
        LIMITED_BY: meter.limited_by("layers"),
    }


def computed(layer_s: float) -> float:
    """Seconds in which all layers have slept."""
    began = time.monotonic()
    for _ in range(LAYERS):
        time.sleep(layer_s)
    return time.monotonic() - began


def report(result: Result, whole: Side, layers: Side) -> None:
    for new in NEW:
        ratio = median(layers.seconds[new]) / median(whole.seconds[new])
        for each in (whole, layers):
            mine = each.seconds[new]
            row: Row = {"loads": each.name, "stored": STORED, "new": new}
            row |= {"first token ms": 1e3 * median(mine), "max ms": 1e3 * max(mine)}
            if each.layerwise:
                row["of whole"] = ratio
            row[LIMITED_BY] = each.meter.limited_by(f"{new}")
            result.rows.append(row)
        if new == NEW[-1]:
            what = f"{layers.name}: first token after {new} new tokens, of whole requests"
            result.targets.append(Target(what, ratio, MAX_RATIO, at_least=False))


if __name__ == "__main__":
    run_script(__doc__, measure)
