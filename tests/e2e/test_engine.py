"""The harness and the tiny models, without a pool: what the other end-to-end tests stand on."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.compare import LOGPROB_TOLERANCE, logprob_distance
from tests.e2e.conftest import EngineShelf
from tests.e2e.engine import EngineError, EngineSpec, Prompt
from tests.support.models import LlamaShape

pytestmark = pytest.mark.e2e

SHAPE = LlamaShape(kv_heads=2)
PROMPT = random.Random(7).choices(range(3, SHAPE.vocab), k=1264)

Llama = Callable[[LlamaShape], Path]


def test_tensor_parallel_engines_agree(llama: Llama, engines: EngineShelf) -> None:
    one = engines.get(EngineSpec(model=llama(SHAPE), tp=1, block_size=32))
    two = engines.get(EngineSpec(model=llama(SHAPE), tp=2, block_size=96))
    (expected,) = one.generate(Prompt(ids=PROMPT))
    (actual,) = two.generate(Prompt(ids=PROMPT))
    assert actual.token_ids == expected.token_ids
    assert logprob_distance(actual, expected) < LOGPROB_TOLERANCE


@pytest.mark.parametrize("position", [0, 640, 1263])
def test_one_changed_token_shows(llama: Llama, engines: EngineShelf, position: int) -> None:
    engine = engines.get(EngineSpec(model=llama(SHAPE)))
    changed = [*PROMPT[:position], PROMPT[position] ^ 1, *PROMPT[position + 1 :]]
    expected, actual = engine.generate(
        Prompt(ids=PROMPT, max_tokens=1), Prompt(ids=changed, max_tokens=1)
    )
    assert logprob_distance(actual, expected) > 5 * LOGPROB_TOLERANCE


def test_second_turn_reuses_the_first(llama: Llama, engines: EngineShelf) -> None:
    engine = engines.get(EngineSpec(model=llama(SHAPE)))
    (first,) = engine.generate(Prompt(ids=PROMPT, max_tokens=40))
    (second,) = engine.generate(Prompt(ids=[*PROMPT, *first.token_ids, 9, 9, 9]))
    assert first.cached_tokens == 0
    # The last token's keys and values are not computed until it is followed by another.
    assert second.cached_tokens == (len(PROMPT) + 40 - 1) // 32 * 32


def test_a_failed_call_names_the_cause_and_the_engine_goes_on(
    llama: Llama, engines: EngineShelf
) -> None:
    engine = engines.get(EngineSpec(model=llama(SHAPE)))
    with pytest.raises(EngineError, match="4096"):
        engine.generate(Prompt(ids=[5] * 5000))
    assert engine.generate(Prompt(ids=PROMPT))[0].cached_tokens == 0
