"""Models with several kinds of attention, whose KV cache has several groups."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.conftest import IS_NEWEST, EngineShelf
from tests.e2e.engine import Engine, EngineSpec, Prompt
from tests.e2e.pool import cell_files, expecting, files, fresh, pool, same, tokens, unpooled
from tests.support.models import HybridShape, LlamaShape, LoopedShape, UnevenShape, make_model

pytestmark = pytest.mark.e2e

CHUNK = 256
PROMPT_TOKENS = 1264
STORED = PROMPT_TOKENS // CHUNK * CHUNK


def found(tokens_stored: int) -> int:
    """Return the number of stored tokens that a hit may have in this release of vLLM.

    Releases that would not survive a failed load (`compat.reports_failed_loads_by_request`) load
    nothing.
    """
    return tokens_stored if IS_NEWEST else 0


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models"), HybridShape())


@pytest.fixture(scope="module")
def engine(
    hybrid: Path, engines: EngineShelf, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Engine]:
    """`engine(tp)`: with the pool; `engine()`: without."""
    store = files(tmp_path_factory.mktemp("pool"))

    def get(tp: int = 0, **llm: Any) -> Engine:
        if not tp:
            return engines.get(EngineSpec(model=hybrid))
        return engines.get(
            EngineSpec(
                model=hybrid,
                tp=tp,
                block_size=32 if tp == 1 else 64,
                kv_transfer_config=pool(store),
                llm=llm,
            )
        )

    return get


@pytest.mark.parametrize(("writer", "reader"), [(1, 2), (2, 1)])
def test_other_tensor_parallel_size_reads(
    engine: Callable[..., Engine], writer: int, reader: int
) -> None:
    prompt = Prompt(ids=tokens(seed=writer, count=PROMPT_TOKENS))
    (expected,) = engine().generate(prompt)
    # Steps shorter than a chunk, whose window the engine lets go before the chunk is complete.
    (written,) = engine(writer, max_num_batched_tokens=160).generate(prompt)
    assert written.cached_tokens == 0
    same(written, expected)
    (read,) = engine(reader, max_num_batched_tokens=160).generate(expecting(prompt, STORED))
    assert read.cached_tokens == found(STORED)
    same(read, expected)


@pytest.mark.parametrize(("writer", "reader"), [(1, 2), (2, 1)])
def test_ranks_that_hold_one_head_of_each_kind(
    engines: EngineShelf, tmp_path: Path, writer: int, reader: int
) -> None:
    """Its windows have two KV heads, one on each of two ranks; its other layers one, which both
    hold. They share with an engine of one rank."""
    model = make_model(tmp_path, UnevenShape())
    prompt = Prompt(ids=tokens(seed=60, count=PROMPT_TOKENS))
    (expected,) = engines.get(EngineSpec(model=model)).generate(prompt)
    config = pool(files(tmp_path / "pool"))
    writes, reads = (
        engines.get(EngineSpec(model=model, tp=tp, block_size=32 * tp, kv_transfer_config=config))
        for tp in (writer, reader)
    )
    same(writes.generate(prompt)[0], expected)
    for each in (writes, reads):
        read = fresh(each, expecting(prompt, STORED))
        assert read.cached_tokens == found(STORED)
        same(read, expected)


@pytest.mark.skipif(not torch.cpu._is_avx512_supported(), reason="KV in fp8 on CPUs needs AVX-512")
@pytest.mark.parametrize(("writer", "reader"), [(1, 2), (2, 1)])
def test_layers_of_several_types_in_one_group(
    llama: Callable[[LlamaShape], Path],
    engines: EngineShelf,
    tmp_path: Path,
    writer: int,
    reader: int,
) -> None:
    """Layers in `kv_cache_dtype_skip_layers` keep KV in the model's dtype, other layers in fp8."""
    model = llama(LlamaShape(kv_heads=2))
    prompt = Prompt(ids=tokens(seed=62, count=PROMPT_TOKENS))

    def get(tp: int, *skipped: int, **config: Any) -> Engine:
        llm = {
            "kv_cache_dtype": "fp8",
            "kv_cache_dtype_skip_layers": [str(layer) for layer in skipped],
        }
        return engines.get(EngineSpec(model=model, tp=tp, block_size=32 * tp, llm=llm, **config))

    shared = {"kv_transfer_config": pool(files(tmp_path / "pool"))}
    (expected,) = get(1, 0, 1).generate(prompt)
    same(get(writer, 0, 1, **shared).generate(prompt)[0], expected)
    read = get(reader, 0, 1, **shared).generate(expecting(prompt, STORED))[0]
    assert read.cached_tokens == STORED
    same(read, expected)
    # As many layers, but others: equal keys would be of other layers.
    assert get(1, 2, 3, **shared).generate(prompt)[0].cached_tokens == 0


def test_layers_that_are_run_through_twice(engines: EngineShelf, tmp_path: Path) -> None:
    """At a full hit only the last token is computed, on loaded KV alone."""
    model = make_model(tmp_path, LoopedShape())
    prompt = Prompt(ids=tokens(seed=61, count=2 * CHUNK))
    (expected,) = engines.get(EngineSpec(model=model)).generate(prompt)
    config = pool(files(tmp_path / "pool"))
    for tp in (1, 2):
        spec = EngineSpec(model=model, tp=tp, block_size=32 * tp, kv_transfer_config=config)
        same(engines.get(spec).generate(prompt)[0], expected)
        read = fresh(engines.get(spec), expecting(prompt, 2 * CHUNK))
        assert read.cached_tokens == found(2 * CHUNK - 1)
        same(read, expected)


def test_a_load_that_fails_begins_again(
    hybrid: Path, engine: Callable[..., Engine], engines: EngineShelf, tmp_path: Path
) -> None:
    """With several groups vLLM computes all of such a request; what was bad is stored anew."""
    config = pool(files(tmp_path / "pool"))
    damaged = engines.get(EngineSpec(model=hybrid, kv_transfer_config=config))
    prompt = Prompt(ids=tokens(seed=50, count=4 * CHUNK + 9))
    (expected,) = engine().generate(prompt)
    damaged.generate(prompt)
    fresh(damaged, expecting(prompt, 4 * CHUNK))
    for path in cell_files(tmp_path / "pool"):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    same(fresh(damaged, prompt), expected)
    same(again := fresh(damaged, expecting(prompt, 4 * CHUNK)), expected)
    assert again.cached_tokens == found(4 * CHUNK)


@dataclass(frozen=True, kw_only=True)
class Source:
    """The first tokens of a prompt that prefill has before the prompt is handed over."""

    tokens: int
    in_host: bool  # host memory has saved them; no store has
    in_own_cache: bool  # vLLM's prefix cache has them
    loaded: int  # of them prefill computes nothing


HANDED = 4 * CHUNK + 20  # the window of its last token begins in the chunk before
SOURCES = {
    "nowhere": Source(tokens=8, in_host=False, in_own_cache=False, loaded=0),
    "host memory": Source(tokens=HANDED, in_host=True, in_own_cache=False, loaded=4 * CHUNK),
    "host memory in part": Source(tokens=600, in_host=True, in_own_cache=False, loaded=2 * CHUNK),
    "own cache in part": Source(tokens=700, in_host=False, in_own_cache=True, loaded=672),
    "host memory and own cache": Source(
        tokens=HANDED, in_host=True, in_own_cache=True, loaded=4 * CHUNK
    ),
}


@pytest.fixture(scope="module")
def pair(
    hybrid: Path, engines: EngineShelf, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Engine]:
    """`pair(role)`: prefill writes back to the store that it shares with decode."""
    store = files(tmp_path_factory.mktemp("pair"))
    configs = {
        "prefill": pool(["host://64MiB", store], role="kv_producer", write_policy="back"),
        "decode": pool(store, role="kv_consumer"),
    }

    def get(role: str) -> Engine:
        config, tp = configs[role], 1 if role == "prefill" else 2
        spec = EngineSpec(model=hybrid, tp=tp, block_size=32 * tp, kv_transfer_config=config)
        return engines.get(spec)

    return get


@pytest.mark.parametrize("name", SOURCES)
def test_prompt_that_is_handed_over_is_loaded_whole_wherever_prefill_had_it(
    pair: Callable[[str], Engine], engine: Callable[..., Engine], name: str
) -> None:
    source = SOURCES[name]
    prompt = Prompt(ids=tokens(seed=70 + list(SOURCES).index(name), count=HANDED), max_tokens=8)
    prefill = pair("prefill")
    known = Prompt(ids=prompt.ids[: source.tokens], max_tokens=1)
    prefill.generate(known if source.in_host else unpooled(known))
    if not source.in_own_cache:
        assert prefill.reset_prefix_cache()
    hand_over = {"kvpool": {"hand_over": True}}
    (handed,) = prefill.generate(replace(prompt, max_tokens=1, kv_transfer_params=hand_over))
    assert handed.cached_tokens == (source.loaded if source.in_own_cache else found(source.loaded))
    params = handed.kv_transfer_params
    assert params is not None
    assert params["kvpool"]["tokens"] == HANDED
    (decoded,) = pair("decode").generate(replace(prompt, kv_transfer_params=params))
    assert decoded.cached_tokens == found(HANDED - 1)
    same(decoded, engine().generate(prompt)[0])
