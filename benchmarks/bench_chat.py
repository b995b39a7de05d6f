"""A three-turn chat trace that does not fit in host memory, over more and more tiers.

    python benchmarks/bench_chat.py --json chat.json

Conversations of three turns take turns at random on one real engine, whose own cache holds little
more than one of them; prompts that are never seen again come between. Every variant sees the same
requests: no pool, host memory, host memory and files, and those with Mooncake behind, each tier too
small for all. Hit rate: prompt tokens that were not computed. The plot is written to
`results/chat.svg`.
"""

import json
import random
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common import LIMITED_BY, Result, Row, Target, run_script
from benchmarks.limits import Meter
from tests.e2e.engine import Engine, EngineSpec, Prompt
from tests.support.models import LlamaShape, make_model
from tests.support.mooncake_master import HOST, MooncakeMaster

SHAPE = LlamaShape(layers=8, heads=8, kv_heads=4, head_dim=64, hidden=512, intermediate=768)
TURN_TOKENS, TURNS, SYSTEM_TOKENS = 768, 3, 256
CONVERSATIONS, QUICK_CONVERSATIONS = 9, 2
ONE_OFFS = 0.3  # for each turn, so many prompts that are never seen again
LIMIT_S = 60.0
PLOT = Path(__file__).parent / "results" / "chat.svg"

MIB = 1 << 20
TOKEN_BYTES = SHAPE.layers * SHAPE.kv_heads * SHAPE.head_dim * 2 * 4
HOST_MIB, FILES_MIB, POOL_MIB = 96, 256, 1024
ENGINE_CACHE = 4352 * TOKEN_BYTES  # about the least for this context length


@dataclass(frozen=True)
class Ask:
    """One request of the trace; turn 0 is never seen again."""

    turn: int
    ids: tuple[int, ...]


@dataclass
class Variant:
    name: str
    store: list[str]
    asked: int = 0
    cached: int = 0
    first_token_s: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    sources: Mapping[str, float] = field(default_factory=dict)
    meter: Meter = field(default_factory=Meter)


def trace(conversations: int, seed: int = 1, one_offs: float = ONE_OFFS) -> Iterator[Ask]:
    """Turns in random order, each conversation's own in sequence."""
    order = random.Random(seed)

    def words(count: int) -> tuple[int, ...]:
        return tuple(order.choices(range(3, SHAPE.vocab), k=count))

    system = words(SYSTEM_TOKENS)
    so_far = [system] * conversations
    turns = [number for number in range(conversations) for _ in range(TURNS)]
    order.shuffle(turns)
    taken = [0] * conversations
    for number in turns:
        taken[number] += 1
        so_far[number] += words(TURN_TOKENS)
        yield Ask(taken[number], so_far[number])
        for _ in range(int(one_offs + order.random())):
            yield Ask(0, words(TURN_TOKENS))


def transfer(store: list[str], stats: Path) -> dict[str, Any]:
    extra = {"store": store, "lookup_timeout_ms": 5000, "stats_file": str(stats)}
    extra["staging_bytes"] = "64MiB"
    return {
        "kv_connector": "KVPoolConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }


def run(variant: Variant, asks: Sequence[Ask], model: Path, directory: Path) -> None:
    """The whole trace on a fresh engine."""
    stats = directory / f"{variant.name.replace(' ', '')}.stats"
    spec = EngineSpec(
        model=model,
        block_size=128,
        kv_transfer_config=transfer(variant.store, stats) if variant.store else None,
        env={"VLLM_HOST_IP": HOST},
        llm={"kv_cache_memory_bytes": ENGINE_CACHE, "max_num_batched_tokens": 4096},
    )
    with Engine(spec, directory / f"{stats.stem}.log") as engine:
        warm = Prompt(ids=(7,) * 1000, max_tokens=1, logprobs=None)
        engine.generate(warm, timeout_s=LIMIT_S)  # the first pass of an engine is slow
        with variant.meter.of("trace"):
            for ask in asks:
                prompt = Prompt(ids=ask.ids, max_tokens=1, logprobs=None)
                (answer,) = engine.generate(prompt, timeout_s=LIMIT_S)
                variant.asked += len(ask.ids)
                variant.cached += answer.cached_tokens
                variant.first_token_s[ask.turn].append(answer.first_token_s)
    for path in stats.parent.glob(f"{stats.name}.kv.worker.*"):
        samples = json.loads(path.read_text())
        variant.sources = {
            name.partition("tier=")[2].rstrip("}"): value
            for name, value in samples.items()
            if name.startswith("kvpool_hit_cells")
        }


def measure(quick: bool) -> Result:
    asks = list(trace(QUICK_CONVERSATIONS if quick else CONVERSATIONS))
    with (
        tempfile.TemporaryDirectory(prefix="bench") as name,
        MooncakeMaster() as master,
    ):
        directory = Path(name)
        model = make_model(directory, SHAPE)
        variants = make_variants(directory, master.address)
        for variant in variants:
            run(variant, asks, model, directory)
    result = report(asks, variants)
    if not quick:
        draw(variants, PLOT)
    return result


def make_variants(directory: Path, master: str) -> list[Variant]:
    host = f"host://{HOST_MIB}MiB"

    def files(name: str) -> str:
        return f"file://{directory}/{name}?size={FILES_MIB}MiB"

    return [
        Variant("no pool", []),
        Variant("host", [host]),
        Variant("host + SSD", [host, files("two")]),
        Variant(
            "host + SSD + Mooncake",
            [host, files("three"), f"mooncake://{master}?segment={POOL_MIB}MiB"],
        ),
    ]


def report(asks: Sequence[Ask], variants: Sequence[Variant]) -> Result:
    result = Result()
    unique = sum(TURN_TOKENS if ask.turn > 1 else len(ask.ids) for ask in asks)
    room = {"engine": ENGINE_CACHE // MIB, "host": HOST_MIB, "files": FILES_MIB}
    room["Mooncake"] = POOL_MIB
    result.notes.append(
        f"{len(asks)} requests, {unique * TOKEN_BYTES / MIB:.0f} MiB of KV; room in MiB: "
        + ", ".join(f"{name} {mib}" for name, mib in room.items())
    )
    for variant in variants:
        row: Row = {"tiers": variant.name, "hit rate": variant.cached / variant.asked}
        for turn in sorted(variant.first_token_s):
            label = f"turn {turn} ms" if turn else "one-off ms"
            row[label] = 1e3 * median(variant.first_token_s[turn])
        row |= {f"cells from {tier}": count for tier, count in sorted(variant.sources.items())}
        row[LIMITED_BY] = variant.meter.limited_by("trace")
        result.rows.append(row)
    by_name = {variant.name: variant for variant in variants}

    def last_turn(name: str) -> float:
        return median(by_name[name].first_token_s[TURNS])

    rates = {variant.name: variant.cached / variant.asked for variant in variants}
    more = rates["host + SSD"] / max(rates["host"], 1e-9)
    result.targets += [
        Target("hit rate, host + SSD over host", more, 1.0, True),
        Target(
            "hit rate, with Mooncake behind over host + SSD",
            rates["host + SSD + Mooncake"] / rates["host + SSD"],
            1.0,
            True,
        ),
        Target(
            f"first token of turn {TURNS}, all tiers over no pool",
            last_turn("host + SSD + Mooncake") / last_turn("no pool"),
            1.0,
            False,
        ),
    ]
    return result


def draw(variants: Sequence[Variant], path: Path) -> None:
    """One plot: hit rate, and time to the first token by turn."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "chat"  # the same numbers give the same file
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.6), width_ratios=(2, 3))
    names = [variant.name for variant in variants]
    rates = [100 * variant.cached / variant.asked for variant in variants]
    bars = left.barh(names, rates, color="#4477aa")
    left.bar_label(bars, fmt="%.0f %%", padding=3)
    left.set(xlim=(0, 100), xlabel="prompt tokens not computed, %")
    left.invert_yaxis()
    width = 0.8 / len(variants)
    for place, variant in enumerate(variants):
        heights = [1e3 * median(variant.first_token_s[turn]) for turn in range(1, TURNS + 1)]
        at = [turn + place * width for turn in range(TURNS)]
        right.bar(at, heights, width, label=variant.name)
    right.set(ylabel="time to first token, ms (median)")
    right.set_xticks([turn + 0.4 - width / 2 for turn in range(TURNS)])
    right.set_xticklabels([f"turn {turn}" for turn in range(1, TURNS + 1)])
    right.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    run_script(__doc__, measure)
