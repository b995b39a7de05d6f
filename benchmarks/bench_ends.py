"""Prompts that share no whole number of chunks: aliases of 64 tokens beside smaller chunks.

    python benchmarks/bench_ends.py --json ends.json

One engine computes and stores prompts in files, and another engine answers later ones: the same
511 tokens, 540 tokens of which the first 500 are stored, and 511 that nobody has stored. All
engines have one rank, blocks of 32 tokens and the Llama of bench_ttft.py (64 KiB of KV a token).
Sides take turns, prompt by prompt, and the reader's own cache is emptied before each answer.

* `keys` and `MiB`: what the store has of a prompt, aliases included.
* `store CPU ms`: CPU of the writer for a prompt until the store has it, its computing included.
* `lookup ms`: from a request's arrival to its lookup's answer.
* `first token ms` and `CPU ms`: of the reader, for an answer of one token.
"""

import json
import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.bench_ttft import CASES
from benchmarks.common import LIMITED_BY, Result, Row, Target, run_script, wait_until
from benchmarks.limits import Meter
from tests.e2e.engine import Engine, EngineSpec, Prompt
from tests.e2e.pool import cell_files, fresh, pool
from tests.support.models import make_model
from vllm_kvpool.cli.common.engine_server import group_cpu_seconds
from vllm_kvpool.metrics import STATS_EVERY_S

SHAPE, BLOCK = CASES[0].shape, 32
PROMPTS, QUICK_PROMPTS = 12, 2
SETTLE_S, LIMIT_S = 0.3, 60.0
PATIENCE_S = 120.0
WHOLE, PARTS, NEW = "511 of 511", "500 of 540", "0 of 511"
SHORT = Prompt(ids=list(range(3, 8)), max_tokens=1, logprobs=None)
ALIASES = "chunks of 256, aliases of 64"
SIDES: Mapping[str, Mapping[str, Any]] = {
    "chunks of 256": {"chunk_tokens": 256},
    ALIASES: {"chunk_tokens": 256, "alias_tokens": 64},
    "chunks of 64": {"chunk_tokens": 64},
    "chunks of 32": {"chunk_tokens": 32},
}


@dataclass
class Side:
    """A writer and a reader over files, and what was measured of them by case."""

    name: str
    writer: Engine
    reader: Engine
    directory: Path
    stats: Path
    stored: dict[str, list[tuple[int, int, float]]] = field(default_factory=dict)
    """Keys, bytes and CPU seconds of each prompt."""
    answered: dict[str, list[tuple[int, float, float]]] = field(default_factory=dict)
    """Tokens found, and seconds: to the first token, of CPU."""
    lookup_s: dict[str, float] = field(default_factory=dict)
    """Of a lookup, the mean by case."""

    def store(self, case: str, prompt: Prompt) -> None:
        before, cpu = self._kept(), group_cpu_seconds(self.writer.pid)
        fresh(self.writer, prompt)
        seen = [before, self._kept()]

        def is_settled() -> bool:
            time.sleep(SETTLE_S)
            self.writer.generate(SHORT)  # an idle `LLM` makes no step, in which saves are reported
            seen.append(self._kept())
            return seen[-1] == seen[-2] != before

        wait_until(is_settled, LIMIT_S)
        keys, nbytes = (after - was for after, was in zip(seen[-1], before, strict=True))
        took = group_cpu_seconds(self.writer.pid) - cpu
        self.stored.setdefault(case, []).append((keys, nbytes, took))

    def _kept(self) -> tuple[int, int]:
        sizes = [path.stat().st_size for path in cell_files(self.directory)]
        return len(sizes), sum(sizes)

    def answer(self, case: str, prompt: Prompt) -> None:
        assert self.reader.reset_prefix_cache()
        cpu = group_cpu_seconds(self.reader.pid)
        (answer,) = self.reader.generate(prompt, timeout_s=PATIENCE_S)
        took = group_cpu_seconds(self.reader.pid) - cpu
        self.answered.setdefault(case, []).append(
            (answer.cached_tokens, answer.first_token_s, took)
        )

    def lookups(self) -> tuple[float, float]:
        """Return the number of the reader's lookups, and their seconds in all."""
        time.sleep(3 * STATS_EVERY_S)  # nothing tells when a thread has written the last values
        samples: dict[str, float] = json.loads(self.stats.read_bytes())
        count = sum(value for name, value in samples.items() if name.startswith("kvpool_lookups"))
        return count, samples["kvpool_lookup_seconds"]

    def row(self, case: str, meter: Meter) -> Row:
        found, first, cpu = (fmean(each) for each in zip(*self.answered[case], strict=True))
        row: Row = {"side": self.name, "known": case}
        if case in self.stored:
            keys, nbytes, took = (fmean(each) for each in zip(*self.stored[case], strict=True))
            row |= {"keys": keys, "MiB": nbytes / 2**20, "store CPU ms": 1e3 * took}
        return row | {
            "tokens found": found,
            "lookup ms": 1e3 * self.lookup_s[case],
            "first token ms": 1e3 * first,
            "CPU ms": 1e3 * cpu,
            LIMITED_BY: meter.limited_by(f"{self.name}, {case}"),
        }


def prompts_of(case: str, number: int) -> tuple[Prompt | None, Prompt]:
    """A prompt to store, if any, and the one to answer."""
    rng = random.Random(f"{case} {number}")

    def ids(count: int) -> list[int]:
        return rng.choices(range(3, SHAPE.vocab), k=count)

    def prompt(ids: Sequence[int]) -> Prompt:
        return Prompt(ids=ids, max_tokens=1, logprobs=None)

    if case == PARTS:
        shared = ids(500)
        return prompt(shared + ids(40)), prompt(shared + ids(40))
    whole = prompt(ids(511))
    return (None if case == NEW else whole), whole


def measure(quick: bool) -> Result:
    result, meter = Result(), Meter()
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench")))
        model = make_model(directory, SHAPE)
        sides = []
        for number, (name, options) in enumerate(SIDES.items()):
            files, engines = directory / f"pool-{number}", []
            for each in ("writer", "reader"):
                stats = directory / f"{each}-{number}"
                spec = EngineSpec(
                    model=model,
                    block_size=BLOCK,
                    kv_transfer_config=pool(
                        f"file://{files}?size=8GiB", stats_file=str(stats), **options
                    ),
                    llm={"kv_cache_memory_bytes": 512 << 20},
                )
                engines.append(stack.enter_context(Engine(spec, stats.with_suffix(".log"))))
            stats = directory / f"reader-{number}.kv.scheduler.0"
            writer, reader = engines
            sides.append(Side(name, writer, reader, files, stats))
        for case in (WHOLE, PARTS, NEW):
            for side in sides:  # the first of its kind compiles and touches memory
                _measure(side, case, -1)
                side.stored.pop(case, None)
                side.answered.pop(case)
            before = [side.lookups() for side in sides]
            for number in range(QUICK_PROMPTS if quick else PROMPTS):
                for side in sides:
                    with meter.of(f"{side.name}, {case}"):
                        _measure(side, case, number)
            for side, (count, seconds) in zip(sides, before, strict=True):
                total, total_s = side.lookups()
                side.lookup_s[case] = (total_s - seconds) / (total - count)
        result.rows = [side.row(case, meter) for case in (WHOLE, PARTS, NEW) for side in sides]
    first: dict[tuple[object, object], Any] = {
        (row["side"], row["known"]): row["first token ms"] for row in result.rows
    }
    for case in (WHOLE, PARTS):
        ratio = first["chunks of 256", case] / first[ALIASES, case]
        what = f"first token with chunks of 256 alone, of that with aliases: {case}"
        result.targets.append(Target(what, ratio, 1.5, at_least=True))
    return result


def _measure(side: Side, case: str, number: int) -> None:
    stored, asked = prompts_of(case, number)
    if stored is not None:
        side.store(case, stored)
    side.answer(case, asked)


if __name__ == "__main__":
    run_script(__doc__, measure)
