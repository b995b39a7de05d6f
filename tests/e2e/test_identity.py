"""Requests that differ in identity must not share cells in the pool; equal requests must."""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.e2e.compare import LOGPROB_TOLERANCE, logprob_distance
from tests.e2e.conftest import EngineShelf
from tests.e2e.engine import Engine, EngineSpec, Image, Prompt
from tests.e2e.pool import expecting, files, fresh, pool, same, tokens
from tests.e2e.vision import about
from tests.support.models import LlamaShape, LlavaShape, make_lora
from vllm_kvpool.cli.common.prompt import presence
from vllm_kvpool.cli.common.stores import NamedStore
from vllm_kvpool.cli.explain import reports
from vllm_kvpool.identity.keys import namespace_of
from vllm_kvpool.storage.backends import open_store
from vllm_kvpool.storage.contents.manifest import manifest_in
from vllm_kvpool.storage.url import parse_store_url

pytestmark = pytest.mark.e2e

SHAPE = LlamaShape(kv_heads=2)
IDS = tokens(seed=1, count=600)
HIT = 512


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("identity")


@pytest.fixture
def engine(llama: Callable[[LlamaShape], Path], engines: EngineShelf, directory: Path) -> Engine:
    return engines.get(
        EngineSpec(
            model=llama(SHAPE),
            kv_transfer_config=pool(files(directory / "pool")),
            llm={"enable_lora": True, "max_lora_rank": 8, "enable_prompt_embeds": True},
        )
    )


@pytest.fixture
def base(llama: Callable[[LlamaShape], Path], engines: EngineShelf, directory: Path) -> Engine:
    """Without adapters: with them, CPU engines save no requests that have none."""
    return engines.get(
        EngineSpec(
            model=llama(SHAPE),
            kv_transfer_config=pool(files(directory / "pool")),
            llm={"enable_prompt_embeds": True},
        )
    )


def embeddings(path: Path, seed: int) -> Path:
    """Prompt embeddings of as many tokens as `IDS`."""
    rows = np.random.default_rng(seed).normal(0, 0.3, (len(IDS), SHAPE.hidden))
    np.save(path, rows.astype(np.float32))
    return path


def requests(directory: Path) -> Mapping[str, Mapping[str, Any]]:
    """Requests that no two may share a chunk, although most have the same tokens."""
    return {
        "plain": {"ids": IDS},
        "salted": {"ids": IDS, "cache_salt": "tenant-a"},
        "salted otherwise": {"ids": IDS, "cache_salt": "tenant-b"},
        "adapter": {"ids": IDS, "lora": make_lora(directory / "one", SHAPE, seed=1)},
        "adapter of other content": {
            "ids": IDS,
            "lora": make_lora(directory / "two", SHAPE, seed=2),
        },
        "embeddings": {"embeds": embeddings(directory / "a.npy", 1)},
        "other embeddings": {"embeds": embeddings(directory / "b.npy", 2)},
    }


@pytest.mark.small
def test_different_requests_miss_and_equal_ones_hit(
    engine: Engine, base: Engine, directory: Path
) -> None:
    kinds = requests(directory)
    asked = [(engine if "lora" in each else base, Prompt(**each)) for each in kinds.values()]
    first = [fresh(engine, prompt) for engine, prompt in asked]
    assert [c.cached_tokens for c in first] == [0] * len(kinds)
    again = [fresh(engine, expecting(prompt, HIT)) for engine, prompt in asked]
    assert [c.cached_tokens for c in again] == [HIT] * len(kinds)
    assert [c.token_ids for c in again] == [c.token_ids for c in first]


@pytest.mark.small
def test_values_of_an_adapter_are_not_handed_to_the_base_model(
    llama: Callable[[LlamaShape], Path], engines: EngineShelf, engine: Engine, directory: Path
) -> None:
    """vLLM's LoRA kernels for CPUs give them to requests without one in the same step."""
    ids = tokens(seed=2, count=600)
    lora = make_lora(directory / "beside", SHAPE, seed=3)
    (expected,) = engines.get(EngineSpec(model=llama(SHAPE))).generate(Prompt(ids=ids))
    beside, adapted = engine.generate(Prompt(ids=ids), Prompt(ids=ids, lora=lora))
    assert logprob_distance(beside, expected) > LOGPROB_TOLERANCE, "vLLM computes it rightly now"
    assert beside.kv_transfer_params is None
    assert adapted.kv_transfer_params == {"kvpool": {"tokens": HIT}}
    same(fresh(engine, expecting(Prompt(ids=ids, lora=lora), HIT)), adapted)
    without = engines.get(
        EngineSpec(model=llama(SHAPE), kv_transfer_config=pool(files(directory / "pool")))
    )
    for reader in (engine, without):
        read = fresh(reader, Prompt(ids=ids))
        same(read, expected)
        assert read.cached_tokens == 0


def test_blocks_that_vllm_takes_for_a_mixed_prompts_are_not_handed_on(
    llama: Callable[[LlamaShape], Path], engines: EngineShelf, tmp_path: Path
) -> None:
    """The rows of both are equal, and the places of their tokens are not: vLLM's own hashes do not
    tell them apart. An engine that never saw the first answers the second as one without a pool.
    """
    rows, count = embeddings(tmp_path / "rows.npy", 3), len(IDS)
    first, second = (
        Prompt(ids=[0] * count, embeds=rows, token_rows=[place < tokens for place in range(count)])
        for tokens in (count // 2, 10)
    )
    llm = {"enable_prompt_embeds": True}
    (expected,) = engines.get(EngineSpec(model=llama(SHAPE), llm=llm)).generate(second)
    spec = EngineSpec(
        model=llama(SHAPE), kv_transfer_config=pool(files(tmp_path / "pool")), llm=llm
    )
    writer = engines.get(spec)
    (written,) = writer.generate(first)
    (mistaken,) = writer.generate(second)
    assert logprob_distance(mistaken, expected) > LOGPROB_TOLERANCE, "vLLM tells them apart now"
    reader = engines.get(replace(spec, llm=llm | {"max_num_seqs": 4}))
    read = fresh(reader, second)
    same(read, expected)
    assert read.cached_tokens == 0
    same(fresh(reader, expecting(first, HIT)), written)
    # What an engine computes from the beginning on is saved.
    assert fresh(engines.get(spec), expecting(second, HIT)).cached_tokens == HIT
    same(fresh(engines.get(spec), expecting(second, HIT)), expected)


def test_models_of_one_name_and_shape_do_not_meet(
    llama: Callable[[LlamaShape], Path], engines: EngineShelf, directory: Path, tmp_path: Path
) -> None:
    """The weights differ; the name, the architecture and the store do not."""
    store = pool(files(tmp_path / "pool"))
    one, two = directory / "x" / "model", directory / "y" / "model"
    for link, seed in ((one, 0), (two, 9)):
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(llama(LlamaShape(kv_heads=2, seed=seed)))
    spec = EngineSpec(model=one, kv_transfer_config=store)
    assert engines.get(spec).generate(Prompt(ids=IDS))[0].cached_tokens == 0
    assert fresh(engines.get(spec), expecting(Prompt(ids=IDS), HIT)).cached_tokens == HIT
    namesake = engines.get(EngineSpec(model=two, kv_transfer_config=store))
    assert namesake.generate(Prompt(ids=IDS))[0].cached_tokens == 0
    assert re.search(r"differs in weights \(sample:\w+ here, sample:\w+ there\)", log_of(namesake))


def log_of(engine: Engine) -> str:
    """Return the log of an engine after its namespace was compared with others."""
    fresh(engine, expecting(Prompt(ids=IDS), HIT))
    return engine.log.read_text()


def test_images_that_are_prepared_otherwise_do_not_meet(
    llava: Callable[[LlavaShape], Path], engines: EngineShelf, tmp_path: Path
) -> None:
    shape = LlavaShape(kv_heads=2)
    prompt = about(*(Image(seed=i) for i in range(4)))
    store = pool(files(tmp_path / "pool"), chunk_tokens=32)
    spec = EngineSpec(model=llava(shape), images=4, kv_transfer_config=store)
    assert fresh(engines.get(spec), prompt).cached_tokens == 0
    assert fresh(engines.get(spec), expecting(prompt, 128)).cached_tokens >= 96
    other = replace(spec, llm={"mm_processor_kwargs": {"do_normalize": False}})
    (actual,) = engines.get(other).generate(prompt)
    assert actual.cached_tokens == 0


def test_a_store_says_what_its_namespace_stands_for(
    llama: Callable[[LlamaShape], Path], engines: EngineShelf, tmp_path: Path
) -> None:
    options = pool(files(tmp_path / "pool"), log_requests=True)
    spec = EngineSpec(model=llama(SHAPE), kv_transfer_config=options)
    engine = engines.get(spec)
    fresh(engine, Prompt(ids=IDS))
    fresh(engine, expecting(Prompt(ids=IDS), HIT))
    found = re.search(r"namespace (\S+), tiers .* stored as (\S+)", engine.log.read_text())
    assert found is not None
    namespace = namespace_of(found[2])
    assert namespace == found[1]
    store = open_store(parse_store_url(files(tmp_path / "pool")), segment=False)
    manifest = manifest_in(store, namespace)
    assert manifest is not None
    assert manifest.values["files"]["config.json"]["num_key_value_heads"] == 2
    assert manifest.values["engine"]["model_config.dtype"] == "torch.float32"
    held = presence([NamedStore("pool", store)], manifest, [*IDS, 0])
    assert held.usable_tokens == HIT
    store.close()
    first, second = reports(engine.log.read_text().splitlines(), "")
    assert (first.loaded, first.missed) == (0, {"absent": HIT, "short": len(IDS) - HIT})
    assert (second.loaded, second.missed) == (HIT, {"short": len(IDS) - HIT})
