"""From the engine that computes a prompt to the one that answers, through the smallest proxy.

vLLM's accuracy and edge cases of disaggregated prefill (`run_accuracy_test`, `test_edge_cases`):
the proxy asks the prefill engine for one token and passes on, unread, what it says. The engines
differ in tensor-parallel size and block size. The same over HTTP is in tests/deploy.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.e2e.conftest import EngineShelf
from tests.e2e.engine import Completion, Engine, EngineSpec, Prompt
from tests.e2e.pool import files, pool, same, tokens
from tests.e2e.test_roles import OF_A_PROXY
from tests.support.models import LlamaShape

pytestmark = pytest.mark.e2e

SHAPE = LlamaShape(kv_heads=4)
CHUNK, PREFILL_BLOCK, DECODE_BLOCK = 64, 32, 96
ANSWER = 24


@dataclass(frozen=True)
class ToyProxy:
    """Asks one engine to compute prompts, then the other to answer them."""

    prefill: Engine
    decode: Engine

    def answer(self, *prompts: Prompt) -> list[Completion]:
        asked = [replace(prompt, max_tokens=1, kv_transfer_params=OF_A_PROXY) for prompt in prompts]
        told = self.prefill.generate(*asked)
        return self.decode.generate(
            *(
                replace(prompt, kv_transfer_params=each.kv_transfer_params)
                for prompt, each in zip(prompts, told, strict=True)
            )
        )


@dataclass(frozen=True)
class Sides:
    """The proxy, and an engine that does all by itself."""

    proxy: ToyProxy
    alone: Engine

    def check(self, *prompts: Prompt) -> list[int]:
        """Answers are those of the engine without a pool; how many tokens the decoder had."""
        answers = self.proxy.answer(*prompts)
        for actual, expected in zip(answers, self.alone.generate(*prompts), strict=True):
            same(actual, expected)
        return [answer.cached_tokens for answer in answers]


@pytest.fixture(scope="module", params=[(1, 2), (2, 1)], ids=["TP 1 to 2", "TP 2 to 1"])
def ranks(request: pytest.FixtureRequest) -> tuple[int, int]:
    prefill, decode = request.param
    return prefill, decode


@pytest.fixture
def sides(
    ranks: tuple[int, int],
    llama: Callable[[LlamaShape], Path],
    engines: EngineShelf,
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> Sides:
    """With nothing in the engines' own caches. What the pool has is each test's own prompts."""
    model = llama(SHAPE)
    store = files(tmp_path_factory.getbasetemp() / f"hand-over{ranks}")

    def start(role: str, tp: int, block: int) -> Engine:
        config = pool(store, role=role, chunk_tokens=CHUNK)
        return engines.get(
            EngineSpec(model=model, tp=tp, block_size=block, kv_transfer_config=config)
        )

    prefill = start("kv_producer", ranks[0], PREFILL_BLOCK)
    decode = start("kv_consumer", ranks[1], DECODE_BLOCK)
    return Sides(ToyProxy(prefill, decode), engines.get(EngineSpec(model=model)))


def prompt(seed: int, count: int) -> Prompt:
    return Prompt(ids=tokens(seed, count), max_tokens=ANSWER)


def found(count: int) -> int:
    """What the decoder takes of a prompt of so many tokens: whole chunks, and whole blocks."""
    return count // CHUNK * CHUNK // DECODE_BLOCK * DECODE_BLOCK


def test_many_prompts_at_once(sides: Sides) -> None:
    lengths = [70, 200, 333, 500, 640, 801, 1000, 1264]
    prompts = [prompt(100 + length, length) for length in lengths]
    assert sides.check(*prompts) == [found(length) for length in lengths]


@pytest.mark.parametrize(
    ("count", "cached"),
    [
        (1, 0),
        (CHUNK - 1, 0),
        (CHUNK + 1, 0),  # a chunk, and less than a block of the decoder
        (3 * CHUNK - 1, DECODE_BLOCK),
        (3 * CHUNK, 3 * CHUNK - 1),  # all of it; one token is computed
        (3 * CHUNK + 1, 3 * CHUNK),
    ],
)
def test_prompts_that_end_at_boundaries(sides: Sides, count: int, cached: int) -> None:
    assert sides.check(prompt(200 + count, count)) == [cached]


def test_what_an_engine_has_already(sides: Sides) -> None:
    """Nothing, all, or a part of the prompt is in the cache of either engine."""
    first = prompt(301, 400)
    longer = replace(first, ids=[*first.ids, *tokens(302, 300)])
    proxy = sides.proxy
    assert sides.check(first) == [found(400)]
    # Both have it: the decoder has its last whole blocks, computed by itself.
    assert sides.check(first) == [400 // DECODE_BLOCK * DECODE_BLOCK]
    # Both have a part: the decoder loads the rest.
    assert sides.check(longer) == [found(700)]
    # The prefill engine has all, the decoder nothing.
    assert proxy.decode.reset_prefix_cache()
    assert sides.check(longer) == [found(700)]
    # The decoder has all, the prefill engine nothing: it has its own from the pool, or computes.
    assert proxy.prefill.reset_prefix_cache()
    assert sides.check(longer) == [700 // DECODE_BLOCK * DECODE_BLOCK]
    # Only the decoder has a part, and of another's.
    other = replace(longer, ids=[*first.ids, *tokens(303, 300)])
    assert proxy.prefill.reset_prefix_cache()
    assert sides.check(other) == [found(700)]


def test_turns_of_a_conversation(sides: Sides) -> None:
    turn = prompt(401, 300)
    for number in range(3):
        (answer,) = sides.alone.generate(turn)
        sides.check(turn)
        turn = replace(turn, ids=[*turn.ids, *answer.token_ids, *tokens(410 + number, 90)])


def test_without_the_prefill_engine_the_decoder_answers(sides: Sides) -> None:
    """It is told to wait for what never comes, and computes."""
    alone, decode = sides.alone, sides.proxy.decode
    asked = prompt(501, 300)
    wish = {"kvpool": {"tokens": 256, "expect_timeout_ms": 300}}
    (answer,) = decode.generate(replace(asked, kv_transfer_params=wish))
    assert answer.cached_tokens == 0
    same(answer, alone.generate(asked)[0])
