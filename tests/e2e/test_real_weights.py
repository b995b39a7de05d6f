"""A small model with real weights: with the pool its perplexity and its answers are the same.

One engine of a pair computes the heads of texts. The other engine loads the heads, then scores and
answers the whole texts. The first engine then loads the whole texts. The expected values come from
an engine without a pool.
Blocks are of 32 tokens and more: vLLM's attention on CPUs takes multiples of 32.

A text is scored by vLLM's `prompt_logprobs`. For them vLLM reads no cache unless it is told to, and
then scores what follows the cached tokens. With LoRA they fail on CPUs (0.32.0, without any pool):
there each scored token is the only one that a request of its own may answer with.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from tests.e2e.compare import logprob_distance
from tests.e2e.conftest import EngineShelf
from tests.e2e.engine import Completion, Engine, EngineSpec, Prompt
from tests.e2e.pool import files, pool
from tests.support.models import LlamaShape, make_lora
from tests.support.real_model import ModelUnavailable, real_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

TEXT = Path(__file__).parents[2] / "examples" / "demo_guide.md"
SHAPE = LlamaShape(layers=30, heads=9, kv_heads=3, head_dim=64, hidden=576)
TOKEN_BYTES = SHAPE.layers * SHAPE.kv_heads * 2 * SHAPE.head_dim * 4
CHUNK = 64
STARTS = (0, 400)  # of the texts, in tokens of the guide
# The fifth token of an answer begins another block, whatever its size.
HEAD, WHOLE, ANSWER = 272, 508, 16
FORCED = range(HEAD + 20, HEAD + 84, 8)  # tokens that are scored where LoRA is on
# Float32 rounding of other sums (TP, sizes of steps) comes to 5e-5.
TOLERANCE = 1e-3
LORA_SCALE = 0.004  # enough to change the answers
PATIENCE_S = 300.0  # three ranks on two cores that others use too wait for each other
SCORED = {"prompt_logprobs": 0, "skip_reading_prefix_cache": False}
CHUNKED = {"max_num_batched_tokens": 128}
DRAFTS = {
    "speculative_config": {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 3,
    }
}
LORA = {"enable_lora": True, "max_lora_rank": 8}


@dataclass(frozen=True, kw_only=True)
class Kind:
    """An engine: how it is cut, and what else vLLM does in it."""

    tp: int
    block: int
    chunked: bool = False
    drafts: bool = False
    preempts: bool = False

    def found(self, count: int) -> int:
        """Return the hit of a stored prompt of `count` tokens: whole chunks and blocks."""
        return count // CHUNK * CHUNK // self.block * self.block

    def llm(self, lora: bool) -> dict[str, Any]:
        llm: dict[str, Any] = {"max_model_len": 1024, "max_num_seqs": 8}
        for is_on, more in ((self.chunked, CHUNKED), (self.drafts, DRAFTS), (lora, LORA)):
            llm |= more if is_on else {}
        if self.preempts:  # the prompts fit, and one block of the answers; one is of no use
            blocks = 2 + len(STARTS) * -(-WHOLE // self.block)
            llm["kv_cache_memory_bytes"] = blocks * self.block * TOKEN_BYTES // self.tp
        return llm


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two engines on one pool."""

    one: Kind
    other: Kind
    lora: bool = False
    slow: bool = False
    """Steps of three ranks on two cores."""


PAIRS = {
    "chunked TP 3, drafts and preemption at TP 1": Pair(
        one=Kind(tp=3, block=32, chunked=True),
        other=Kind(tp=1, block=128, chunked=True, drafts=True, preempts=True),
    ),
    "TP 1, drafts and preemption at TP 3": Pair(
        one=Kind(tp=1, block=64),
        other=Kind(tp=3, block=32, drafts=True, preempts=True),
        slow=True,
    ),
    # Not chunked: with LoRA, vLLM's CPU build computes other tokens in small steps (0.32.0, without
    # any pool).
    "LoRA": Pair(
        one=Kind(tp=1, block=32, drafts=True),
        other=Kind(tp=3, block=64, preempts=True),
        lora=True,
        slow=True,
    ),
}


@dataclass(frozen=True)
class Texts:
    """Texts, for an adapter or for the model without one."""

    tokens: Sequence[Sequence[int]]
    lora: Path | None

    def heads(self) -> list[Prompt]:
        """Return requests for the first tokens of each text."""
        return [Prompt(ids=ids[:HEAD], max_tokens=1, lora=self.lora) for ids in self.tokens]

    def whole(self) -> list[Prompt]:
        """Return requests that answer each whole text, and score it if there is no adapter."""
        sampling = SCORED if self.lora is None else {}
        return [
            Prompt(ids=ids, max_tokens=ANSWER, lora=self.lora, sampling=sampling)
            for ids in self.tokens
        ]

    def forced(self) -> list[Prompt]:
        """Return requests that score some tokens of the first text, if there is an adapter."""
        first = self.tokens[0]
        return [
            Prompt(
                ids=first[:at],
                max_tokens=1,
                lora=self.lora,
                sampling={"allowed_token_ids": [first[at]]},
            )
            for at in FORCED
            if self.lora is not None
        ]


def scores(whole: list[Completion], forced: list[Completion]) -> list[float]:
    """Log-probabilities of tokens of the texts, all of them behind what the pool has of heads."""
    count = WHOLE - HEAD // CHUNK * CHUNK - 1
    scored = [value for each in whole for value in each.prompt_logprobs[-count:]]
    return scored + [each.logprobs[0][each.token_ids[0]] for each in forced]


def perplexity(logprobs: list[float]) -> float:
    return math.exp(-np.mean(logprobs))


@dataclass(frozen=True)
class Expected:
    """Results of an engine without a pool: answers to heads, answers to whole texts, and scores."""

    to_heads: list[Completion]
    to_texts: list[Completion]
    scores: list[float]


@pytest.fixture(scope="module")
def model() -> Path:
    try:
        return real_model(Path(sys.prefix) / "kvpool-demo")
    except ModelUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def texts(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Texts:
    """For an adapter, if the parameter says so."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    guide = tokenizer.encode(TEXT.read_text(), add_special_tokens=False).ids
    lora = None
    if request.param:
        lora = make_lora(tmp_path_factory.mktemp("adapter"), SHAPE, scale=LORA_SCALE)
    return Texts([guide[start : start + WHOLE] for start in STARTS], lora)


@pytest.fixture(scope="module")
def expected(model: Path, engines: EngineShelf, texts: Texts) -> Expected:
    llm = Kind(tp=1, block=32).llm(texts.lora is not None)
    plain = engines.get(EngineSpec(model=model, llm=llm))
    to_heads = plain.generate(*texts.heads(), timeout_s=PATIENCE_S)
    to_texts = ask(plain, texts.whole())  # nothing is cached: all of it is computed, and scored
    forced = plain.generate(*texts.forced(), timeout_s=PATIENCE_S) if texts.lora else []
    return Expected(to_heads, to_texts, scores(to_texts, forced))


@pytest.mark.parametrize(
    ("texts", "pair"),
    [
        pytest.param(pair.lora, pair, id=name, marks=[pytest.mark.matrix] if pair.slow else [])
        for name, pair in PAIRS.items()
    ],
    indirect=["texts"],
)
def test_perplexity_and_answers_are_those_without_a_pool(
    model: Path,
    engines: EngineShelf,
    texts: Texts,
    expected: Expected,
    pair: Pair,
    tmp_path: Path,
) -> None:
    def start(kind: Kind) -> Engine:
        return engines.get(
            EngineSpec(
                model=model,
                tp=kind.tp,
                block_size=kind.block,
                kv_transfer_config=pool(files(tmp_path / "pool"), chunk_tokens=CHUNK),
                llm=kind.llm(pair.lora),
            )
        )

    first, second = start(pair.one), start(pair.other)

    # One computes the heads, the other goes on from them, and the first then loads both parts.
    all_same(ask(first, texts.heads()), expected.to_heads, 0)
    forced = ask(second, loading(texts.forced(), HEAD, save=False)) if texts.lora else []
    # One that comes later finds blocks of those before it, too.
    assert all(each.cached_tokens >= pair.other.found(HEAD) for each in forced)
    answers = ask(second, loading(texts.whole(), HEAD))
    all_same(answers, expected.to_texts, pair.other.found(HEAD))
    here, there = scores(answers, forced), expected.scores
    assert np.abs(np.subtract(here, there)).max() < TOLERANCE
    assert perplexity(here) == pytest.approx(perplexity(there), rel=TOLERANCE)
    answers = ask(first, loading(texts.whole(), WHOLE))
    all_same(answers, expected.to_texts, pair.one.found(WHOLE))

    for kind, engine in ((pair.one, first), (pair.other, second)):
        counted = engine.metrics()
        assert (counted["vllm:num_preemptions"] > 0) == kind.preempts, kind
        drafts = counted.get("vllm:spec_decode_num_draft_tokens", 0)
        accepted = counted.get("vllm:spec_decode_num_accepted_tokens", 0)
        assert (drafts > accepted) == kind.drafts, kind


def ask(engine: Engine, prompts: list[Prompt]) -> list[Completion]:
    """The answers of an engine that has forgotten what it computed itself."""
    assert engine.reset_prefix_cache()
    return engine.generate(*prompts, timeout_s=PATIENCE_S)


def loading(prompts: list[Prompt], count: int, *, save: bool = True) -> list[Prompt]:
    """The same, once what is to be found of so many tokens is there."""
    stored = count // CHUNK * CHUNK
    wish = {"expect_tokens": stored, "expect_timeout_ms": 20_000, "save": save}
    return [replace(prompt, kv_transfer_params={"kvpool": wish}) for prompt in prompts]


def all_same(actual: list[Completion], expected: list[Completion], cached: int) -> None:
    for here, there in zip(actual, expected, strict=True):
        assert here.cached_tokens == cached
        assert here.token_ids == there.token_ids
        assert logprob_distance(here, there) < TOLERANCE
