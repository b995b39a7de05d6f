"""Families of models with recurrent states beside those of `test_states.py`: between TP 1 and 2.

A state that is wrong would show.
"""

from pathlib import Path

import pytest

from tests.e2e.compare import LOGPROB_TOLERANCE, logprob_distance
from tests.e2e.conftest import EngineShelf
from tests.e2e.engine import Engine, EngineSpec, Prompt
from tests.e2e.pool import expecting, files, fresh, pool, tokens, unpooled
from tests.e2e.test_states import BLOCK, EXACT, Model, put_again, scaled, stored_states
from tests.support.models import FalconH1Shape, NemotronHShape, PureMambaShape, make_model

pytestmark = pytest.mark.e2e

# vLLM's Mamba2 for CPUs raises where a block ends within a step.
LLM = EXACT | {"max_num_batched_tokens": 256}

FAMILIES = {
    # Three rows of x of two heads, B and C, and two matrices of 32 x 64.
    "Falcon-H1": Model(
        FalconH1Shape(), LOGPROB_TOLERANCE, 4, 3 * 192 * 4 + 2 * 32 * 64 * 4, 4, 3 * 192 * 4, LLM
    ),
    # The same of four heads and one of two groups.
    "Nemotron-H": Model(
        NemotronHShape(), LOGPROB_TOLERANCE, 2, 3 * 256 * 4 + 4 * 32 * 64 * 4, 4, 3 * 256 * 4, LLM
    ),
    # The same of one head. vLLM caches prefixes of models without attention where it is asked to.
    "Mamba 2": Model(
        *(PureMambaShape(), LOGPROB_TOLERANCE, 8, 3 * 160 * 4 + 32 * 64 * 4, 4, 3 * 160 * 4),
        LLM | {"enable_prefix_caching": True},
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_another_engine_goes_on_from_its_states(
    family: str, engines: EngineShelf, tmp_path: Path
) -> None:
    model, store = FAMILIES[family], tmp_path / "pool"
    path = make_model(tmp_path, model.shape)

    def engine(tp: int) -> Engine:
        config = pool(files(store))
        spec = EngineSpec(
            model=path, tp=tp, block_size=256, kv_transfer_config=config, llm=model.llm
        )
        return engines.get(spec)

    turn = Prompt(ids=tokens(seed=1, count=BLOCK + 9), max_tokens=3)
    (expected,) = engine(2).generate(unpooled(turn))
    engine(1).generate(turn)
    (read,) = engine(2).generate(expecting(turn, BLOCK))
    assert read.cached_tokens == BLOCK
    model.same(read, expected)
    second = Prompt(ids=[*turn.ids, *read.token_ids, *tokens(seed=2, count=BLOCK)], max_tokens=3)
    engine(2).generate(second)
    (expected,) = engine(1).generate(unpooled(second))
    read = fresh(engine(1), expecting(second, 2 * BLOCK))
    assert read.cached_tokens == 2 * BLOCK
    model.same(read, expected)
    with stored_states(store, model.unit_bytes) as (open_store, states):
        assert len(states) == 2 * model.units * model.layers
        for key, payload in states.items():
            put_again(open_store, key, scaled(payload, model.floats_at))
    read = fresh(engine(1), second)
    assert read.cached_tokens == 2 * BLOCK
    assert logprob_distance(read, expected) > 3 * model.tolerance
