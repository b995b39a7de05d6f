"""Real engines share KV of half types, and of layers that have none of their own."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.compare import logprob_distance
from tests.e2e.conftest import EngineShelf
from tests.e2e.engine import Completion, EngineSpec, Prompt
from tests.e2e.pool import expecting, files, pool, tokens
from tests.support.models import GemmaShape, LlamaShape, make_model

pytestmark = pytest.mark.e2e

HIT = 512
IDS = tokens(seed=5, count=HIT + 90)
# What the engine computes itself in other pieces than the first rounds in other places; a wrong
# token in the cache moves log-probabilities by more.
TOLERANCES = {"float32": 2e-3, "float16": 2e-2, "bfloat16": 1e-1}
# A head that no other kernel than "vec16" takes, and one for "vec".
HEAD_DIMS = {"float16": 80, "bfloat16": 32}


def share(
    engines: EngineShelf, model: Path, directory: Path, dtype: str, block: int = 96
) -> tuple[Completion, Completion, float]:
    """Return (writer's answer, reader's answer, effect of one changed token on log-probabilities).

    Hits of the reader end at multiples of `block` tokens.
    """
    store = pool(files(directory / "pool"))
    llm = {"dtype": dtype}
    writer, reader = (
        engines.get(EngineSpec(model=model, block_size=n, kv_transfer_config=store, llm=llm))
        for n in (32, 96)
    )
    changed = [*IDS[:300], (IDS[300] + 1) % 1000 + 3, *IDS[301:]]
    # One after the other: together, either may find what the other has just computed.
    (computed,) = writer.generate(Prompt(ids=IDS))
    (other,) = writer.generate(Prompt(ids=changed))
    assert computed.cached_tokens == 0
    (read,) = reader.generate(expecting(Prompt(ids=IDS), HIT))
    assert read.cached_tokens == HIT // block * block
    return computed, read, logprob_distance(other, computed)


@pytest.mark.parametrize("dtype", HEAD_DIMS)
def test_engines_share(
    llama: Callable[[LlamaShape], Path], engines: EngineShelf, tmp_path: Path, dtype: str
) -> None:
    model = llama(LlamaShape(kv_heads=2, layers=2, head_dim=HEAD_DIMS[dtype]))
    computed, read, one_token = share(engines, model, tmp_path, dtype)
    assert logprob_distance(read, computed) < TOLERANCES[dtype] < one_token


def test_layers_that_share_kv(engines: EngineShelf, tmp_path: Path) -> None:
    model = make_model(tmp_path, GemmaShape(kv_heads=2))
    # Heads half as large: vLLM gives the windows blocks of twice as many tokens.
    computed, read, one_token = share(engines, model, tmp_path, "float32", block=192)
    assert logprob_distance(read, computed) < TOLERANCES["float32"] < one_token
