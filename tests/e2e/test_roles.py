"""Roles, the wishes of single requests, and a conversation whose turns change engines."""

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.e2e.conftest import EngineShelf
from tests.e2e.engine import Completion, Engine, EngineSpec, Prompt
from tests.e2e.pool import expecting, files, fresh, pool, same, tokens
from tests.support.models import LlamaShape

pytestmark = pytest.mark.e2e

SHAPE = LlamaShape(kv_heads=4)
CHUNK = 64
Engines = Callable[[str, int], Engine]


@pytest.fixture(scope="module")
def start(
    llama: Callable[[LlamaShape], Path],
    engines: EngineShelf,
    tmp_path_factory: pytest.TempPathFactory,
) -> Engines:
    """`start(role, tp)`: an engine on the module's store; role "" has no pool."""
    store = files(tmp_path_factory.mktemp("roles"))

    def start(role: str, tp: int) -> Engine:
        config = pool(store, role=role, chunk_tokens=CHUNK, save_decode=True) if role else None
        return engines.get(EngineSpec(model=llama(SHAPE), tp=tp, kv_transfer_config=config))

    return start


@pytest.mark.parametrize(
    ("prefill_tp", "decode_tp"), [pytest.param(1, 2, marks=pytest.mark.small), (2, 1)]
)
def test_an_answer_is_the_next_turns_prefix(
    start: Engines, prefill_tp: int, decode_tp: int
) -> None:
    """The decoder's answer, written by its ranks, is read by the prefiller's in the next turn."""
    turn1 = tokens(seed=prefill_tp, count=300)
    prefill, decode = start("kv_producer", prefill_tp), start("kv_consumer", decode_tp)
    (first,) = prefill.generate(Prompt(ids=turn1, max_tokens=1))
    assert first.kv_transfer_params == {"kvpool": {"tokens": 300 // CHUNK * CHUNK}}
    (answer,) = decode.generate(expecting(Prompt(ids=turn1, max_tokens=160), 300))
    assert answer.cached_tokens == 300 // CHUNK * CHUNK
    # The last token has no KV.
    stored = (300 + 160 - 1) // CHUNK * CHUNK
    assert answer.kv_transfer_params == {"kvpool": {"tokens": stored}}

    turn2 = Prompt(ids=[*turn1, *answer.token_ids, *tokens(seed=5, count=40)])
    second = fresh(prefill, expecting(turn2, stored))
    assert second.cached_tokens == stored
    (expected,) = start("", 1).generate(turn2)
    same(second, expected)


@pytest.mark.parametrize(
    ("prefill_tp", "decode_tp"), [pytest.param(1, 2, marks=pytest.mark.small), (2, 1)]
)
def test_prompt_that_is_handed_over_is_loaded_to_its_last_token(
    start: Engines, prefill_tp: int, decode_tp: int
) -> None:
    """Decode computes one token, told by prefill's answer, or asked before prefill has answered."""
    prefill, decode = start("kv_producer", prefill_tp), start("kv_consumer", decode_tp)
    for seed, early in ((60 + prefill_tp, False), (70 + prefill_tp, True)):
        prompt = Prompt(ids=tokens(seed=seed, count=300), max_tokens=8)
        (answer,) = prefill.generate(
            replace(prompt, max_tokens=1, kv_transfer_params={"kvpool": {"hand_over": True}})
        )
        params = answer.kv_transfer_params
        assert params is not None
        assert params["kvpool"]["tokens"] == 300
        told = {"kvpool": {"expect_tokens": 1 << 30}} if early else params
        decoded = fresh(decode, replace(prompt, kv_transfer_params=told))
        assert decoded.cached_tokens == 299
        (expected,) = start("", 1).generate(prompt)
        same(decoded, expected)


def test_a_request_may_keep_out(start: Engines) -> None:
    engine = start("kv_both", 1)
    ids = tokens(seed=40, count=200)
    unsaved = Prompt(ids=ids, kv_transfer_params={"kvpool": {"save": False}})
    assert fresh(engine, unsaved).kv_transfer_params is None
    assert fresh(engine, unsaved).cached_tokens == 0
    misspelt = Prompt(ids=ids, kv_transfer_params={"kvpool": {"save": "no"}})
    assert fresh(engine, misspelt).kv_transfer_params is None
    assert fresh(engine, misspelt).cached_tokens == 0
    fresh(engine, Prompt(ids=ids))
    unloaded = Prompt(ids=ids, kv_transfer_params={"kvpool": {"load": False}})
    assert fresh(engine, unloaded).cached_tokens == 0
    assert fresh(engine, expecting(Prompt(ids=ids), 192)).cached_tokens == 192


def test_a_consumer_without_save_decode_writes_nothing(
    llama: Callable[[LlamaShape], Path], engines: EngineShelf, tmp_path: Path
) -> None:
    consumer = engines.get(
        EngineSpec(
            model=llama(SHAPE),
            kv_transfer_config=pool(files(tmp_path / "pool"), role="kv_consumer"),
        )
    )
    (done,) = consumer.generate(Prompt(ids=tokens(seed=50, count=600)))
    assert done.kv_transfer_params is None
    assert not [p for p in (tmp_path / "pool").rglob("*@*") if p.is_file()]


# What vLLM's example of a proxy for disaggregated prefill asks of a prefill engine.
OF_A_PROXY = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def test_a_proxy_passes_the_answer_on_as_it_is(start: Engines) -> None:
    prefill, decode = start("kv_producer", 1), start("kv_both", 1)
    ids = tokens(seed=61, count=1472)
    (first,) = prefill.generate(Prompt(ids=ids, max_tokens=1, kv_transfer_params=OF_A_PROXY))
    passed_on = first.kv_transfer_params
    assert passed_on is not None
    answered = dict(passed_on["kvpool"])
    (endpoint,) = answered.pop("notices")
    assert endpoint.startswith("tcp://")
    assert answered == {"tokens": 1472}
    (answer,) = decode.generate(Prompt(ids=ids, kv_transfer_params=passed_on))
    assert answer.cached_tokens == 1471
    same(answer, start("", 1).generate(Prompt(ids=ids))[0])


@pytest.mark.parametrize(
    "wish", [{"expect_tokens": 300}, {"tokens": 256}], ids=["asked for", "an answer passed on"]
)
def test_a_decoder_waits_for_what_it_expects(start: Engines, wish: dict[str, int]) -> None:
    """No channel joins the two engines but the pool."""
    prefill, decode = start("kv_producer", 1), start("kv_both", 1)
    ids = tokens(seed=60 + sum(wish.values()), count=300)
    params = OF_A_PROXY | {"kvpool": wish}
    answers: list[Completion] = []
    waiting = threading.Thread(
        target=lambda: answers.extend(decode.generate(Prompt(ids=ids, kv_transfer_params=params)))
    )
    waiting.start()
    waiting.join(0.5)
    assert waiting.is_alive(), "the decoder did not wait"
    prefill.generate(Prompt(ids=ids, max_tokens=1))
    waiting.join(30)
    assert answers[0].cached_tokens == 256


def test_an_expectation_ends_with_its_timeout(start: Engines) -> None:
    wish = {"kvpool": {"expect_tokens": 256, "expect_timeout_ms": 300}}
    prompt = Prompt(ids=tokens(seed=70, count=300), kv_transfer_params=wish)
    assert start("kv_both", 1).generate(prompt)[0].cached_tokens == 0
