"""What the next turn of a conversation finds of an answer, beside recurrent states.

    python benchmarks/bench_answers.py --json answers.json

`known` are a prompt of 300 tokens and its answer of 337. An engine of a small Qwen3-Next in blocks
of 256 computes both, forgets them, and answers the next turn, which begins with them. Sides take
turns: without `save_decode`, with it, and with it where vLLM itself keeps the state at each end of
a block (`--prefix-cache-retention-interval 256`). The store is a directory for each side.
"""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.bench_drafts import settled
from benchmarks.bench_ttft import NO_KERNEL, SAME
from benchmarks.common import LIMITED_BY, Result, Row, Target, run_script
from benchmarks.limits import Meter
from tests.e2e.engine import Completion, Engine, EngineSpec, Prompt
from tests.e2e.pool import expecting, files, fresh, pool, tokens, unpooled
from tests.support.models import Qwen3NextShape, make_model

CHUNK = 256
SHAPE = Qwen3NextShape(layers=4, kv_heads=4, key_heads=4, value_heads=8, **SAME)
PROMPT_TOKENS, ANSWER_TOKENS, NEXT_TOKENS = 300, 337, 40
KNOWN = PROMPT_TOKENS + ANSWER_TOKENS
TURNS, QUICK_TURNS = 2, 1
PATIENCE_S = 600.0
ALONE, ANSWERS, EACH_BLOCK = "prompts", "answers", "answers, a state each block"
# Side -> tokens of the next turn that it should find, the pool's options, and the engine's.
SAVES: Mapping[str, tuple[int, Mapping[str, Any], Mapping[str, Any]]] = {
    ALONE: (PROMPT_TOKENS // CHUNK * CHUNK, {}, {}),
    ANSWERS: (KNOWN // CHUNK * CHUNK, {"save_decode": True}, {}),
    EACH_BLOCK: (
        KNOWN // CHUNK * CHUNK,
        {"save_decode": True},
        {"prefix_cache_retention_interval": CHUNK},
    ),
}


def next_turns(quick: bool) -> Iterator[Row]:
    """What the next turn of a conversation finds, by what is saved of the turn before."""
    meter = Meter()
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench")))
        model = make_model(directory, SHAPE)
        engines, read = dict[str, Engine](), dict[str, list[Completion]]()
        for side, (_, options, llm) in SAVES.items():
            spec = EngineSpec(
                model=model,
                block_size=CHUNK,
                kv_transfer_config=pool(files(directory / side), **options),
                llm={**NO_KERNEL, "dtype": "bfloat16", "kv_cache_memory_bytes": 512 << 20, **llm},
            )
            engines[side] = stack.enter_context(Engine(spec, directory / f"{side}.log"))
            engines[side].generate(unpooled(Prompt(ids=tokens(0, CHUNK, SHAPE.vocab))))
        for turn in range(QUICK_TURNS if quick else TURNS):
            for side, engine in engines.items():
                ids = tokens(turn, PROMPT_TOKENS, SHAPE.vocab)
                first = Prompt(ids=ids, max_tokens=ANSWER_TOKENS, logprobs=None)
                (answer,) = engine.generate(first, timeout_s=PATIENCE_S)
                settled(directory / side)
                new = tokens(100 + turn, NEXT_TOKENS, SHAPE.vocab)
                second = Prompt(ids=[*ids, *answer.token_ids, *new], max_tokens=1)
                with meter.of(side):
                    found = fresh(engine, expecting(second, SAVES[side][0]))
                (expected,) = engine.generate(unpooled(second), timeout_s=PATIENCE_S)
                assert found.token_ids == expected.token_ids, "answers differ"
                read.setdefault(side, []).append(found)
        for side, answers in read.items():
            yield {
                "saved": side,
                "known": KNOWN,
                "tokens found": fmean(each.cached_tokens for each in answers),
                "first token ms": 1e3 * fmean(each.first_token_s for each in answers),
                LIMITED_BY: meter.limited_by(side),
            }


def measure(quick: bool) -> Result:
    result = Result()
    result.rows += next_turns(quick)
    found: dict[object, Any] = {row["saved"]: row["tokens found"] for row in result.rows}
    what = "tokens of an answer that the next turn finds, of those with a state each block"
    ratio = found[ANSWERS] / found[EACH_BLOCK] if found[EACH_BLOCK] else None
    result.targets.append(Target(what, ratio, 1.0, at_least=True))
    return result


if __name__ == "__main__":
    run_script(__doc__, measure)
