"""Beside vLLM's own machinery: speculative decoding, preemption, chunked prefill or LoRA.

One engine writes under them, one reads without any, and every answer is that of an engine
without a pool. Drafts that are refused leave rows in the pages that are of no token of the answer:
were one of them saved, the reader's log-probabilities would show it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import EngineShelf
from tests.e2e.engine import Completion, Engine, EngineSpec, Prompt
from tests.e2e.pool import expecting, files, fresh, pool, same, tokens
from tests.support.models import LlamaShape, make_lora

pytestmark = pytest.mark.e2e

Llama = Callable[[LlamaShape], Path]
SHAPE = LlamaShape(kv_heads=2)
CHUNK = 32
ANSWER = 64
LORA = {"enable_lora": True, "max_lora_rank": 8}
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 3,
}
BLOCK_BYTES = 32 * SHAPE.layers * SHAPE.kv_heads * 2 * SHAPE.head_dim * 4
PATIENCE_S = 200.0  # small steps on cores that others use too
FEW_BLOCKS = 46  # of 32 tokens: enough for four prompts, not for their answers


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    return files(tmp_path_factory.mktemp("composed"))


@pytest.fixture
def plain(llama: Llama, engines: EngineShelf) -> Engine:
    """No pool."""
    return engines.get(EngineSpec(model=llama(SHAPE), llm=LORA))


@pytest.fixture
def reader(llama: Llama, engines: EngineShelf, store: str) -> Engine:
    config = pool(store, chunk_tokens=CHUNK, save_decode=True)
    return engines.get(EngineSpec(model=llama(SHAPE), kv_transfer_config=config, llm=LORA))


@dataclass(frozen=True)
class Kind:
    """A feature of the writer besides drafting and preemption: LoRA or chunked prefill.

    The two are not combined. With LoRA, small steps change the tokens of vLLM's CPU build. So do
    batches of requests with and without an adapter (0.32.0, without any pool).
    """

    lora: bool
    llm: tuple[tuple[str, Any], ...]


KINDS = [Kind(True, tuple(LORA.items())), Kind(False, (("max_num_batched_tokens", 128),))]


@pytest.fixture(params=KINDS, ids=["lora", "chunked"])
def kind(request: pytest.FixtureRequest) -> Kind:
    kind: Kind = request.param
    return kind


@pytest.fixture
def writer(llama: Llama, engines: EngineShelf, store: str, kind: Kind) -> Engine:
    """Drafts, and a cache that is too small."""
    config = pool(store, chunk_tokens=CHUNK, save_decode=True)
    own = {
        "speculative_config": NGRAM,
        "max_num_seqs": 4,
        "max_model_len": 1024,
        "kv_cache_memory_bytes": FEW_BLOCKS * BLOCK_BYTES,
    }
    return engines.get(
        EngineSpec(model=llama(SHAPE), kv_transfer_config=config, llm={**own, **dict(kind.llm)})
    )


@pytest.fixture
def prompts(tmp_path_factory: pytest.TempPathFactory, kind: Kind) -> list[Prompt]:
    """Few words again and again, so that there are drafts."""
    lora = make_lora(tmp_path_factory.mktemp("adapter"), SHAPE) if kind.lora else None
    return [
        Prompt(ids=[*tokens(300 + i, 20) * 15, *tokens(400 + i, 40)], max_tokens=ANSWER, lora=lora)
        for i in range(4)
    ]


def test_what_is_saved_under_drafts_and_preemptions_is_what_anybody_would_compute(
    plain: Engine, writer: Engine, reader: Engine, prompts: list[Prompt]
) -> None:
    expected = plain.generate(*prompts)
    # Once while everything is computed and saved, and once while it is loaded.
    for _ in range(2):
        assert writer.reset_prefix_cache()
        all_same(writer.generate(*prompts, timeout_s=PATIENCE_S), expected)
    counted = writer.metrics()
    drafts = counted["vllm:spec_decode_num_draft_tokens"]
    assert counted["vllm:num_preemptions"] > 0
    assert 0 <= counted["vllm:spec_decode_num_accepted_tokens"] < drafts, "no draft was refused"
    assert counted["vllm:kvpool_hit_tokens"] > 0

    # The answers are prefixes now, read by an engine that has no drafts.
    turns = [
        replace(prompt, ids=[*prompt.ids, *answer.token_ids, 7, 8, 9], max_tokens=4)
        for prompt, answer in zip(prompts, expected, strict=True)
    ]
    before = reader.by_label("vllm:prompt_tokens_cached_by_source", "source")
    hits = 0
    for turn, wanted in zip(turns, plain.generate(*turns), strict=True):
        stored = (len(turn.ids) - 4) // CHUNK * CHUNK  # the answer's last token has no KV
        read = fresh(reader, expecting(turn, stored))
        assert read.cached_tokens == stored
        hits += stored
        same(read, wanted)
    after = reader.by_label("vllm:prompt_tokens_cached_by_source", "source")
    assert {each: after[each] - before[each] for each in after} == {
        each: hits if each == "disk" else 0 for each in after
    }


def all_same(actual: list[Completion], expected: list[Completion]) -> None:
    for one, other in zip(actual, expected, strict=True):
        same(one, other)
