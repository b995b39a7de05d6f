"""Reuse of one engine's KV by engines with other TP sizes and block sizes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.conftest import EngineShelf
from tests.e2e.engine import Engine, EngineSpec, Prompt
from tests.e2e.pool import expecting, files, fresh, pool, same, tokens
from tests.support.models import LlamaShape

pytestmark = pytest.mark.e2e

Llama = Callable[[LlamaShape], Path]
CHUNK = 256
PROMPT_TOKENS = 1264


@dataclass(frozen=True)
class Pair:
    """Two engines on one store: KV heads, and the block sizes at TP 1 and at TP 2."""

    kv_heads: int
    one: int
    two: int
    seeded: bool = False  # the engine at TP 1 is given a hash seed, so it is a new Python

    def env(self, tp: int) -> Mapping[str, str]:
        return {"PYTHONHASHSEED": "1"} if self.seeded and tp == 1 else {}


# One head for two ranks: test_replicas.py.
PAIRS = [
    Pair(4, 32, 64),
    pytest.param(Pair(2, 128, 96, seeded=True), marks=pytest.mark.small),
]


@pytest.fixture(scope="module", params=PAIRS, ids=str)
def pair(
    request: pytest.FixtureRequest,
    llama: Llama,
    engines: EngineShelf,
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Callable[[int], Engine], Callable[[], Engine], Pair]:
    """Access to the engine with the pool at TP 1 or 2, and to one without a pool."""
    shape: Pair = request.param
    model = llama(LlamaShape(kv_heads=shape.kv_heads))
    store = files(tmp_path_factory.mktemp("pool"))

    def with_pool(tp: int) -> Engine:
        return engines.get(
            EngineSpec(
                model=model,
                tp=tp,
                block_size=shape.one if tp == 1 else shape.two,
                kv_transfer_config=pool(store),
                # Neither the hash seed nor the hash algorithm of an engine may matter.
                env=shape.env(tp),
                llm={"prefix_caching_hash_algo": "sha256" if tp == 1 else "sha256_cbor"},
            )
        )

    return with_pool, lambda: engines.get(EngineSpec(model=model)), shape


@pytest.mark.parametrize(("writer", "reader"), [(1, 2), (2, 1)])
def test_other_tensor_parallel_size_reads(
    pair: tuple[Callable[[int], Engine], Callable[[], Engine], Pair], writer: int, reader: int
) -> None:
    with_pool, without_pool, shape = pair
    prompt = Prompt(ids=tokens(seed=writer, count=PROMPT_TOKENS))
    (expected,) = without_pool().generate(prompt)
    (written,) = with_pool(writer).generate(prompt)
    assert written.cached_tokens == 0
    same(written, expected)
    stored = PROMPT_TOKENS // CHUNK * CHUNK
    (read,) = with_pool(reader).generate(expecting(prompt, stored))
    block = shape.one if reader == 1 else shape.two
    assert read.cached_tokens == stored // block * block
    same(read, expected)


def test_full_hit_computes_the_last_token_only(
    pair: tuple[Callable[[int], Engine], Callable[[], Engine], Pair],
) -> None:
    with_pool, without_pool, _ = pair
    prompt = Prompt(ids=tokens(seed=11, count=3 * CHUNK))
    (expected,) = without_pool().generate(prompt)
    engine = with_pool(1)
    engine.generate(prompt)
    read = fresh(engine, expecting(prompt, 3 * CHUNK))
    assert read.cached_tokens == 3 * CHUNK - 1
    same(read, expected)


def test_one_batch_mixes_hits_and_misses(
    pair: tuple[Callable[[int], Engine], Callable[[], Engine], Pair],
) -> None:
    with_pool, without_pool, _ = pair
    prompts = [Prompt(ids=tokens(seed=20 + i, count=600 + 40 * i)) for i in range(4)]
    expected = without_pool().generate(*prompts)
    engine = with_pool(1)
    engine.generate(prompts[0], prompts[2])
    assert engine.reset_prefix_cache()
    wanted_chunks = [expecting(prompts[i], 512) if i in (0, 2) else prompts[i] for i in range(4)]
    read = engine.generate(*wanted_chunks)
    assert [r.cached_tokens > 0 for r in read] == [True, False, True, False]
    for actual, wanted in zip(read, expected, strict=True):
        same(actual, wanted)


def test_local_prefix_and_pool_join(
    pair: tuple[Callable[[int], Engine], Callable[[], Engine], Pair],
) -> None:
    """The engine's own cache has the first part of a prompt, the pool a longer one."""
    with_pool, without_pool, shape = pair
    ids = tokens(seed=31, count=4 * CHUNK + 50)
    (expected,) = without_pool().generate(Prompt(ids=ids))
    engine = with_pool(1)
    engine.generate(Prompt(ids=ids))
    # 300 tokens are no multiple of a chunk: the load begins inside of one.
    fresh(engine, Prompt(ids=ids[:300]))
    (read,) = engine.generate(expecting(Prompt(ids=ids), 4 * CHUNK))
    assert read.cached_tokens == 4 * CHUNK // shape.one * shape.one
    same(read, expected)
