"""Models with recurrent states beside attention: what one engine computed, another goes on from."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.e2e.compare import LOGPROB_TOLERANCE, logprob_distance
from tests.e2e.conftest import EngineShelf
from tests.e2e.engine import Completion, Engine, EngineSpec, Image, Prompt
from tests.e2e.pool import expecting, files, fresh, pool, same, tokens, unpooled
from tests.support.buffers import make_buffer
from tests.support.models import (
    IMAGE_TOKEN_ID,
    GraniteShape,
    Lfm2Shape,
    LlamaShape,
    Qwen3NextShape,
    Qwen35Shape,
    make_model,
)
from vllm_kvpool.config import read_config
from vllm_kvpool.identity.keys import key_digest
from vllm_kvpool.storage.backends import open_store
from vllm_kvpool.storage.base import (
    ChunkRef,
    GetOutcome,
    Listing,
    PutOutcome,
    Store,
)
from vllm_kvpool.storage.contents.cell_format import HEADER_BYTES, write_header
from vllm_kvpool.storage.file.store import DirectoryReader
from vllm_kvpool.storage.tiers import tier_specs

pytestmark = pytest.mark.e2e

CHUNK = 256
BLOCK = 2 * CHUNK  # a multiple of that of any engine here
PROMPT_TOKENS = 1264
STORED = PROMPT_TOKENS // CHUNK * CHUNK
# In queries with a dimension of heads, as LFM2's, vLLM's rotary kernel for CPUs reads and writes
# elsewhere: what it answers depends on what else is computed in the step.
EXACT = {"compilation_config": {"custom_ops": ["all", "-rotary_embedding"]}}


@dataclass(frozen=True)
class Model:
    """A model; how far rounding of other tensor parallelism moves its log-probabilities; and of its
    states the units, the bytes of one in a layer, the number of layers, and where float32 begins.
    """

    shape: LlamaShape
    tolerance: float
    units: int
    unit_bytes: int
    layers: int
    floats_at: int
    llm: Mapping[str, Any]
    images: int = 0

    def same(self, actual: Completion, expected: Completion) -> None:
        assert actual.token_ids == expected.token_ids
        assert logprob_distance(actual, expected) < self.tolerance


# By default it depends on the processor whether vLLM keeps matrices in float32.
HALF_WITH_FLOATS = {"dtype": "bfloat16", "mamba_ssm_cache_dtype": "float32"}
MODELS = {
    # Two rows of 32 channels.
    "LFM2": Model(Lfm2Shape(), LOGPROB_TOLERANCE, 8, 2 * 32 * 4, 4, 0, EXACT),
    # Three rows of Q and K of one head and V of two; two matrices of 64 x 64 in float32. One token
    # of 1,264 that is another moves log-probabilities by 0.01, other tensor parallelism by 0.016.
    "Qwen3-Next": Model(
        *(Qwen3NextShape(), 0.03, 2, 3 * 256 * 2 + 2 * 64 * 64 * 4, 3, 3 * 256 * 2),
        EXACT | HALF_WITH_FLOATS,
    ),
    # The same of one of 1,264 tokens.
    "Qwen3.5": Model(
        *(Qwen35Shape(), 0.03, 2, 3 * 256 * 2 + 2 * 64 * 64 * 4, 3, 3 * 256 * 2),
        *(EXACT | HALF_WITH_FLOATS | {"limit_mm_per_prompt": {"image": 1, "video": 0}}, 1),
    ),
    # Three rows of x of two heads, B and C, and two matrices of 32 x 64. vLLM's Mamba2 for CPUs
    # raises where a block ends within a step.
    "Granite 4": Model(
        *(GraniteShape(), LOGPROB_TOLERANCE, 4, 3 * 192 * 4 + 2 * 32 * 64 * 4, 3, 3 * 192 * 4),
        EXACT | {"max_num_batched_tokens": 256},
    ),
}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> Model:
    return MODELS[request.param]


@pytest.fixture(scope="module")
def path(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models"), model.shape)


@pytest.fixture(scope="module")
def engine(
    model: Model, path: Path, engines: EngineShelf, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Engine]:
    """`engine(tp)`. What it answers `unpooled`, it computes."""
    store = files(tmp_path_factory.mktemp("pool"))

    def get(tp: int) -> Engine:
        return engines.get(
            EngineSpec(
                model=path,
                tp=tp,
                block_size=256,
                kv_transfer_config=pool(store),
                llm=model.llm,
                images=model.images,
            )
        )

    return get


@pytest.mark.parametrize(("writer", "reader"), [(1, 2), (2, 1)])
def test_other_tensor_parallel_size_reads(
    model: Model, engine: Callable[..., Engine], writer: int, reader: int
) -> None:
    # Few tokens: in bfloat16 the likeliest two may be equally likely but for rounding.
    prompt = Prompt(ids=tokens(seed=writer, count=PROMPT_TOKENS), max_tokens=3)
    (expected,) = engine(reader).generate(unpooled(prompt))
    (written,) = engine(writer).generate(prompt)
    assert written.cached_tokens == 0
    (read,) = engine(reader).generate(expecting(prompt, STORED))
    assert read.cached_tokens == STORED
    model.same(read, expected)


def test_turns_of_a_conversation_in_either_engine(
    model: Model, engine: Callable[..., Engine]
) -> None:
    turn = tokens(seed=80, count=BLOCK + 40)
    (first,) = engine(1).generate(Prompt(ids=turn, max_tokens=3))
    second = Prompt(ids=[*turn, *first.token_ids, *tokens(seed=81, count=BLOCK)], max_tokens=3)
    (expected,) = engine(2).generate(unpooled(second))
    (read,) = engine(2).generate(expecting(second, BLOCK))
    assert read.cached_tokens == BLOCK
    model.same(read, expected)
    third = Prompt(ids=[*second.ids, *read.token_ids, *tokens(seed=82, count=30)], max_tokens=3)
    (expected,) = engine(1).generate(unpooled(third))
    (read,) = engine(1).generate(expecting(third, 2 * BLOCK))
    assert read.cached_tokens == 2 * BLOCK
    model.same(read, expected)


def test_next_turn_finds_the_answer_of_this_one(engines: EngineShelf, tmp_path: Path) -> None:
    """With `save_decode`. Blocks of 128 tokens; the states of this model are small, so that one is
    stored at the end of each chunk."""
    lfm2 = make_model(tmp_path, Lfm2Shape())
    store = files(tmp_path / "pool")

    def engine_of(**options: Any) -> Engine:
        config = pool(store, **options)
        return engines.get(EngineSpec(model=lfm2, kv_transfer_config=config, llm=EXACT))

    turn = Prompt(ids=tokens(seed=90, count=300), max_tokens=337)
    (first,) = engine_of(save_decode=True).generate(turn)
    second = Prompt(ids=[*turn.ids, *first.token_ids, *tokens(seed=91, count=40)])
    (expected,) = engine_of().generate(unpooled(second))
    (read,) = engine_of().generate(expecting(second, 512))
    assert read.cached_tokens == 512
    same(read, expected)


@pytest.mark.parametrize("model", ["Qwen3.5"], indirect=True)
def test_a_state_counts_the_images_before_it(model: Model, engine: Callable[..., Engine]) -> None:
    text = tokens(seed=60, count=2 * CHUNK + 60)

    def with_image(seed: int) -> Prompt:
        ids = [*text[: CHUNK + 20], IMAGE_TOKEN_ID, *text[CHUNK + 20 :]]
        return Prompt(ids=ids, images=(Image(seed=seed),), max_tokens=3)

    (expected,) = engine(2).generate(unpooled(with_image(1)))
    engine(1).generate(with_image(1))
    (read,) = engine(2).generate(expecting(with_image(1), 2 * CHUNK))
    assert read.cached_tokens == 2 * CHUNK
    model.same(read, expected)
    (other,) = engine(2).generate(with_image(2))
    assert other.cached_tokens == 0  # of the chunk before the image there is no state yet


@pytest.mark.parametrize(("writer", "reader"), [(256, None), (None, 256)])
def test_blocks_of_vllms_own_size(
    engines: EngineShelf, tmp_path: Path, writer: int | None, reader: int | None
) -> None:
    """vLLM chooses 128 tokens here; of the last block's end there is a state, at 1,280 tokens."""
    lfm2 = make_model(tmp_path, Lfm2Shape())
    config = pool(files(tmp_path / "pool"))

    def engine_of(block: int | None) -> Engine:
        llm = EXACT | {"block_size": block}
        return engines.get(EngineSpec(model=lfm2, kv_transfer_config=config, llm=llm))

    prompt = Prompt(ids=tokens(seed=30, count=1290))
    (expected,) = engine_of(writer).generate(prompt)
    (read,) = engine_of(reader).generate(expecting(prompt, 1280))
    assert read.cached_tokens == 1280
    same(read, expected)


# What a wrong state would do: more than rounding does.


@contextmanager
def stored_states(
    directory: Path, unit_bytes: int
) -> Iterator[tuple[Store, dict[str, "np.ndarray[Any, Any]"]]]:
    """The store, open beside the engine, and the payload of each cell of a state in it."""
    [spec] = tier_specs(read_config({"store": files(directory)}, env={})).stores
    store = open_store(spec, segment=False)
    assert isinstance(store, DirectoryReader)
    assert isinstance(store, Listing)
    [namespace] = store.namespaces()
    every = store.keys_written_before(namespace, time.time_ns() + 10**12)
    try:
        yield (
            store,
            {key: payload_of(store, key, unit_bytes) for key in every if "@kind:state-" in key},
        )
    finally:
        store.close()


def payload_of(store: Store, key: str, nbytes: int) -> "np.ndarray[Any, Any]":
    cell = make_buffer(HEADER_BYTES + nbytes)
    assert store.get([key], [cell]) == [GetOutcome.OK]
    return np.frombuffer(bytes(cell.view[HEADER_BYTES:]), np.uint8)


def put_again(store: Store, key: str, payload: "np.ndarray[Any, Any]") -> None:
    """Put another payload in place of a cell's, sealed as its own."""
    cell = make_buffer(HEADER_BYTES + payload.nbytes)
    cell.view[HEADER_BYTES:] = payload.tobytes()
    write_header(cell.view, key_digest(key))
    store.remove([key])
    assert store.put([key], [cell], [ChunkRef("state")]) == [PutOutcome.STORED]


def scaled(payload: "np.ndarray[Any, Any]", floats_at: int) -> "np.ndarray[Any, Any]":
    changed = payload.copy()
    changed[floats_at:].view(np.float32)[:] *= 1.5
    return changed


@pytest.fixture(scope="module")
def alone(
    model: Model, path: Path, engines: EngineShelf, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Engine, Path]:
    """An engine and its store, that no other engine uses."""
    store = tmp_path_factory.mktemp("alone")
    config = pool(files(store))
    spec = EngineSpec(
        model=path,
        block_size=256,
        images=model.images,
        kv_transfer_config=config,
        llm=model.llm,
    )
    return engines.get(spec), store


def test_a_wrong_state_shows(model: Model, alone: tuple[Engine, Path]) -> None:
    with_pool, directory = alone
    prompt, other = (Prompt(ids=tokens(seed=seed, count=4 * CHUNK + 3)) for seed in (50, 51))
    (expected,) = with_pool.generate(prompt)
    same(fresh(with_pool, expecting(prompt, 4 * CHUNK)), expected)
    with stored_states(directory, model.unit_bytes) as (_, right):
        assert len(right) == model.units * model.layers
    with_pool.generate(other)
    fresh(with_pool, expecting(other, 4 * CHUNK))
    with stored_states(directory, model.unit_bytes) as (store, every):
        assert len(every) == 2 * len(right)
        [theirs] = {key.rpartition("@")[2] for key in every.keys() - right.keys()}
        wrong = {
            "scaled": {key: scaled(value, model.floats_at) for key, value in right.items()},
            "another unit's": {
                key: every[key.replace("@head:0@", "@head:1@")]
                for key in right
                if "@head:0@" in key
            },
            "of another prefix": {
                key: every[f"{key.rpartition('@')[0]}@{theirs}"] for key in right
            },
        }
        distances = {}
        for name, payloads in wrong.items():
            for key, payload in payloads.items():
                put_again(store, key, payload)
            read = fresh(with_pool, expecting(prompt, 4 * CHUNK))
            assert read.cached_tokens == 4 * CHUNK
            distances[name] = logprob_distance(read, expected)
            for key in payloads:
                put_again(store, key, right[key])
        same(fresh(with_pool, expecting(prompt, 4 * CHUNK)), expected)
    assert min(distances.values()) > 3 * model.tolerance, distances


def test_states_that_are_bad_or_gone_are_computed(model: Model, alone: tuple[Engine, Path]) -> None:
    """From the boundary before: that of the turn before, here."""
    with_pool, directory = alone
    turn = tokens(seed=70, count=BLOCK + 3)
    with_pool.generate(Prompt(ids=turn))
    fresh(with_pool, expecting(Prompt(ids=turn), BLOCK))
    with stored_states(directory, model.unit_bytes) as (_, first):
        pass
    prompt = Prompt(ids=turn + tokens(seed=71, count=BLOCK), max_tokens=3)
    with_pool.generate(prompt)
    expected = fresh(with_pool, expecting(prompt, 2 * BLOCK))
    assert expected.cached_tokens == 2 * BLOCK
    with stored_states(directory, model.unit_bytes) as (store, every):
        key = min(every.keys() - first.keys())
        bad = make_buffer(HEADER_BYTES + every[key].nbytes)  # no cell at all
        store.remove([key])
        assert store.put([key], [bad], [ChunkRef("state")]) == [PutOutcome.STORED]
        read = fresh(with_pool, expecting(prompt, 2 * BLOCK))
        assert read.cached_tokens == BLOCK
        model.same(read, expected)
    for left, cached in ((first, BLOCK), ({}, 0)):
        fresh(with_pool, expecting(prompt, 2 * BLOCK))  # what was computed again is stored
        with stored_states(directory, model.unit_bytes) as (store, every):
            store.remove(sorted(every.keys() - left.keys()))
        read = fresh(with_pool, prompt)
        assert read.cached_tokens == cached
        model.same(read, expected)
