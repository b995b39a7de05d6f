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
from tests.e2e.engine import Completion, Engine, EngineSpec, Prompt
from tests.e2e.pool import expecting, files, fresh, pool, same, tokens
from tests.support.models import Lfm2Shape, LlamaShape, Qwen3NextShape, make_model
from vllm_kvpool.config import read_config
from vllm_kvpool.identity.keys import key_digest
from vllm_kvpool.storage.backends import open_store
from vllm_kvpool.storage.base import (
    ChunkRef,
    DetailedListing,
    GetOutcome,
    Listing,
    PutOutcome,
    Store,
)
from vllm_kvpool.storage.cell_format import HEADER_BYTES, write_header
from vllm_kvpool.storage.tiers import tier_specs
from vllm_kvpool.testing.memory import make_buffer

pytestmark = pytest.mark.e2e

CHUNK = 256
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

    def same(self, actual: Completion, expected: Completion) -> None:
        assert actual.token_ids == expected.token_ids
        assert logprob_distance(actual, expected) < self.tolerance


MODELS = {
    # Two rows of 32 channels.
    "LFM2": Model(Lfm2Shape(), LOGPROB_TOLERANCE, 8, 2 * 32 * 4, 4, 0, EXACT),
    # Three rows of Q and K of one head and V of two; two matrices of 64 x 64 in float32. One token
    # of 1,264 that is another moves log-probabilities by 0.01, other tensor parallelism by 0.016.
    "Qwen3-Next": Model(
        *(Qwen3NextShape(), 0.03, 2, 3 * 256 * 2 + 2 * 64 * 64 * 4, 3, 3 * 256 * 2),
        EXACT | {"dtype": "bfloat16"},
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
    """`engine(tp)`: with the pool; `engine(tp, pooled=False)`: without."""
    store = files(tmp_path_factory.mktemp("pool"))

    def get(tp: int, *, pooled: bool = True) -> Engine:
        return engines.get(
            EngineSpec(
                model=path,
                tp=tp,
                block_size=256,
                kv_transfer_config=pool(store) if pooled else None,
                llm=model.llm,
            )
        )

    return get


@pytest.mark.parametrize(("writer", "reader"), [(1, 2), (2, 1)])
def test_other_tensor_parallel_size_reads(
    model: Model, engine: Callable[..., Engine], writer: int, reader: int
) -> None:
    # Few tokens: in bfloat16 the likeliest two may be equally likely but for rounding.
    prompt = Prompt(ids=tokens(seed=writer, count=PROMPT_TOKENS), max_tokens=3)
    (expected,) = engine(reader, pooled=False).generate(prompt)
    (written,) = engine(writer).generate(prompt)
    assert written.cached_tokens == 0
    (read,) = engine(reader).generate(expecting(prompt, STORED))
    assert read.cached_tokens == STORED
    model.same(read, expected)


def test_the_same_engine_reads_what_it_wrote(model: Model, engine: Callable[..., Engine]) -> None:
    prompt = Prompt(ids=tokens(seed=5, count=PROMPT_TOKENS))
    with_pool = engine(1)
    (expected,) = with_pool.generate(prompt)
    read = fresh(with_pool, expecting(prompt, STORED))
    assert read.cached_tokens == STORED
    same(read, expected)


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
    assert isinstance(store, DetailedListing)
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


def test_a_wrong_state_shows(
    model: Model, path: Path, engines: EngineShelf, tmp_path: Path
) -> None:
    config = pool(files(tmp_path / "pool"))
    spec = EngineSpec(model=path, kv_transfer_config=config, block_size=256, llm=model.llm)
    with_pool = engines.get(spec)
    prompt, other = (Prompt(ids=tokens(seed=seed, count=4 * CHUNK + 3)) for seed in (50, 51))
    (expected,) = with_pool.generate(prompt)
    same(fresh(with_pool, expecting(prompt, 4 * CHUNK)), expected)
    with stored_states(tmp_path / "pool", model.unit_bytes) as (_, right):
        assert len(right) == model.units * model.layers
    with_pool.generate(other)
    fresh(with_pool, expecting(other, 4 * CHUNK))
    with stored_states(tmp_path / "pool", model.unit_bytes) as (store, every):
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
