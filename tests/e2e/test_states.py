"""Models with recurrent states beside attention: what one engine computed, another goes on from."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import EngineShelf
from tests.e2e.engine import Engine, EngineSpec, Prompt
from tests.e2e.pool import expecting, files, fresh, pool, same, tokens
from tests.support.models import Lfm2Shape, make_model

pytestmark = pytest.mark.e2e

CHUNK = 256
PROMPT_TOKENS = 1264
STORED = PROMPT_TOKENS // CHUNK * CHUNK
# In queries with a dimension of heads, as this model has, vLLM's rotary kernel for CPUs reads and
# writes elsewhere: what it answers depends on what else is computed in the step.
EXACT = {"compilation_config": {"custom_ops": ["all", "-rotary_embedding"]}}


@pytest.fixture(scope="module")
def lfm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models"), Lfm2Shape())


@pytest.fixture(scope="module")
def engine(
    lfm2: Path, engines: EngineShelf, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Engine]:
    """`engine(tp)`: with the pool; `engine(tp, pooled=False)`: without."""
    store = files(tmp_path_factory.mktemp("pool"))

    def get(tp: int, *, pooled: bool = True, **llm: Any) -> Engine:
        return engines.get(
            EngineSpec(
                model=lfm2,
                tp=tp,
                block_size=256,
                kv_transfer_config=pool(store) if pooled else None,
                llm=EXACT | llm,
            )
        )

    return get


@pytest.mark.parametrize(("writer", "reader"), [(1, 2), (2, 1)])
def test_other_tensor_parallel_size_reads(
    engine: Callable[..., Engine], writer: int, reader: int
) -> None:
    prompt = Prompt(ids=tokens(seed=writer, count=PROMPT_TOKENS))
    (expected,) = engine(reader, pooled=False).generate(prompt)
    (written,) = engine(writer).generate(prompt)
    assert written.cached_tokens == 0
    (read,) = engine(reader).generate(expecting(prompt, STORED))
    assert read.cached_tokens == STORED
    same(read, expected)


def test_the_same_engine_reads_what_it_wrote(engine: Callable[..., Engine]) -> None:
    prompt = Prompt(ids=tokens(seed=5, count=PROMPT_TOKENS))
    with_pool = engine(1)
    (expected,) = with_pool.generate(prompt)
    read = fresh(with_pool, expecting(prompt, STORED))
    assert read.cached_tokens == STORED
    same(read, expected)
