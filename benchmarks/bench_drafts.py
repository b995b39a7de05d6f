"""How many drafts are accepted after a hit, with the drafter's KV in the pool and without.

    python benchmarks/bench_drafts.py --json drafts.json

Each drafter is as good as its model: SmolLM2-135M-Instruct drafts for itself, EAGLE and MTP of tiny
models compute what the models do (`support/drafters.py`). One engine computes prompts and answers
greedily, then answers them after a hit of its own cache. Another one loads the prompts from files
and answers, and answers again after a hit of its own cache, which has the loaded blocks now. With
`drafts: off` the pool has the model's KV alone. All answers are the same text.
"""

import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from benchmarks.bench_real_weights import documents
from benchmarks.common import LIMITED_BY, Result, Row, Target, run_script, wait_until
from benchmarks.limits import Meter
from tests.e2e.engine import Completion, Engine, EngineSpec, Prompt
from tests.e2e.pool import cell_files, expecting, files, pool, tokens, unpooled
from tests.support.drafters import EvenShape, MimoShape, make_eagle, make_mimo, speculation
from tests.support.models import make_model
from tests.support.real_model import NAME, ModelUnavailable, real_model

CHUNK, BLOCK = 256, 32
ANSWER_TOKENS = 96
PROMPT_TOKENS = 3 * CHUNK + 40
PROMPTS, QUICK_PROMPTS = 4, 1
SETTLE_S, LIMIT_S = 1.0, 60.0
PATIENCE_S = 600.0
SIDES = ("stored", "off")
COLD, OWN, POOL, OWN_AFTER = "computing", "vLLM's own hit", "a hit of the pool", "vLLM's own, then"


@dataclass(frozen=True)
class Drafter:
    """A drafter, with its model and prompts."""

    name: str
    method: str
    num_tokens: int
    model: Path
    drafter: Path
    prompts: Sequence[Prompt]

    def spec(self, store: str, side: str) -> EngineSpec:
        drafts = speculation(self.method, self.drafter, self.num_tokens)
        return EngineSpec(
            model=self.model,
            block_size=BLOCK,
            kv_transfer_config=pool(
                store, chunk_tokens=CHUNK, drafts="prefer" if side == "stored" else "off"
            ),
            llm={"speculative_config": drafts, "kv_cache_memory_bytes": 1 << 30},
        )


class Answered(NamedTuple):
    """Some prompts' answers in one engine, one after another."""

    accepted: int
    drafted: int
    seconds: list[float]
    answers: list[Completion]


def answer(engine: Engine, prompts: Sequence[Prompt]) -> Answered:
    names = [f"vllm:spec_decode_num_{each}_tokens" for each in ("accepted", "draft")]
    before, seconds, answers = engine.metrics(), [], []
    for prompt in prompts:
        began = time.monotonic()
        answers += engine.generate(prompt, timeout_s=PATIENCE_S)
        seconds.append(time.monotonic() - began)
    after = engine.metrics()
    accepted, drafted = (int(after[name] - before[name]) for name in names)
    return Answered(accepted, drafted, seconds, answers)


def settled(directory: Path) -> None:
    """Wait until no more cells come: no request waits for those of drafters."""
    counts = [-1]

    def is_same() -> bool:
        time.sleep(SETTLE_S)
        counts.append(len(cell_files(directory)))
        return counts[-1] == counts[-2]

    wait_until(is_same, LIMIT_S)


def rows_of(drafter: Drafter, side: str) -> Iterator[Row]:
    meter = Meter()
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench")))
        spec = drafter.spec(files(directory / "pool"), side)
        writer, reader = (Engine(spec, directory / f"{each}.log") for each in ("writer", "reader"))
        for engine in (writer, reader):
            stack.callback(engine.kill)
            engine.generate(unpooled(Prompt(ids=tokens(0, CHUNK), max_tokens=8)))
        found = PROMPT_TOKENS // CHUNK * CHUNK
        own = [unpooled(each) for each in drafter.prompts]
        had: dict[str, Answered] = {}
        for after, engine, prompts in (
            (COLD, writer, drafter.prompts),
            (OWN, writer, own),
            (POOL, reader, [expecting(each, found) for each in drafter.prompts]),
            (OWN_AFTER, reader, own),
        ):
            if after == POOL:
                settled(directory / "pool")
            with meter.of(after):
                had[after] = answer(engine, prompts)
        texts = [[each.token_ids for each in answered.answers] for answered in had.values()]
        assert all(one == other for one, other in pairwise(texts)), "answers differ"
        for after, answered in had.items():
            yield {
                "drafter": drafter.name,
                "drafters' KV": side,
                "after": after,
                "tokens found": round(fmean(each.cached_tokens for each in answered.answers)),
                "accepted": answered.accepted,
                "drafted": answered.drafted,
                "accepted of drafted": answered.accepted / answered.drafted,
                "s an answer": fmean(answered.seconds),
                LIMITED_BY: meter.limited_by(after),
            }


def drafters(directory: Path, quick: bool) -> Iterator[Drafter]:
    def random_prompts(shape: EvenShape) -> list[Prompt]:
        return [
            Prompt(ids=tokens(seed, PROMPT_TOKENS, shape.vocab), max_tokens=ANSWER_TOKENS)
            for seed in range(1, 1 + (QUICK_PROMPTS if quick else PROMPTS))
        ]

    shape, mimo = EvenShape(), MimoShape()
    eagle = make_eagle(directory, shape)
    yield Drafter(
        "EAGLE, k=3", "eagle", 3, make_model(directory, shape), eagle, random_prompts(shape)
    )
    path = make_mimo(directory, mimo)
    yield Drafter("MTP (MiMo), k=1", "mtp", 1, path, path, random_prompts(mimo))
    if quick:
        return
    smol = real_model(Path(sys.prefix) / "kvpool-demo")
    prompts = [Prompt(ids=ids, max_tokens=ANSWER_TOKENS) for ids in texts(smol)]
    yield Drafter(f"{NAME} for itself, k=3", "draft_model", 3, smol, smol, prompts)


def texts(model: Path) -> Iterator[Any]:
    """Beginnings of some of this project's own documents."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    for text, _ in zip(documents(), range(2), strict=False):
        yield tokenizer.encode(text, add_special_tokens=False).ids[:PROMPT_TOKENS]


def measure(quick: bool) -> Result:
    result = Result()
    with tempfile.TemporaryDirectory(prefix="bench") as directory:
        try:
            for drafter in drafters(Path(directory), quick):
                for side in SIDES:
                    result.rows += rows_of(drafter, side)
        except ModelUnavailable as error:
            result.notes.append(f"without real weights: {error}")
    shares: dict[tuple[object, object], Any] = {
        (row["drafter"], row["after"]): row["accepted of drafted"]
        for row in result.rows
        if row["drafters' KV"] == "stored"
    }
    for (name, after), share in shares.items():
        if after == POOL:
            what = f"drafts accepted after a hit of the pool, of those after computing: {name}"
            ratio = share / shares[name, COLD]
            result.targets.append(Target(what, ratio, 0.99, at_least=True))
    return result


if __name__ == "__main__":
    run_script(__doc__, measure)
