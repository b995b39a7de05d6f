"""KV cache kept in host memory: a prompt that comes again is answered sooner, and the same.

vLLM's `test_cpu_offloading`: latency and accuracy of its OffloadingConnector.
"""

import statistics
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.conftest import EngineShelf
from tests.e2e.engine import Engine, EngineSpec, Prompt
from tests.e2e.pool import expecting, fresh, pool, same, tokens
from tests.support.models import LlamaShape

pytestmark = pytest.mark.e2e

# Large enough that computing a prompt takes ten times as long as copying it, which other engines
# on the same cores make longer both.
SHAPE = LlamaShape(layers=8, hidden=512, intermediate=1024, heads=8, kv_heads=2, head_dim=64)
COUNT, CHUNK = 1_600, 256
STORED = COUNT // CHUNK * CHUNK
ATTEMPTS = 5
HOST = "host://128MiB"


@pytest.fixture
def engine(llama: Callable[[LlamaShape], Path], engines: EngineShelf) -> Engine:
    config = pool(HOST, chunk_tokens=CHUNK)
    return engines.get(EngineSpec(model=llama(SHAPE), kv_transfer_config=config))


def test_a_prompt_that_is_in_host_memory_is_answered_sooner(engine: Engine) -> None:
    computed_s, loaded_s = [], []
    for number in range(ATTEMPTS):
        prompt = Prompt(ids=tokens(700 + number, COUNT), max_tokens=1)
        first = fresh(engine, prompt)
        again = fresh(engine, expecting(prompt, STORED))
        assert (first.cached_tokens, again.cached_tokens) == (0, STORED)
        computed_s.append(first.first_token_s)
        loaded_s.append(again.first_token_s)
    assert statistics.median(loaded_s) < statistics.median(computed_s) / 2


def test_prompts_from_host_memory_have_the_same_answers(engine: Engine) -> None:
    """More of them than the engine's own cache has room for, all at once."""
    prompts = [Prompt(ids=tokens(720 + number, 600), max_tokens=8) for number in range(8)]
    expected = engine.generate(*prompts)
    assert [each.cached_tokens for each in expected] == [0] * len(prompts)
    assert engine.reset_prefix_cache()
    loaded = engine.generate(*(expecting(prompt, 512) for prompt in prompts))
    for actual, wanted in zip(loaded, expected, strict=True):
        assert actual.cached_tokens == 512
        same(actual, wanted)
