"""Conversations and shared prompts of a model with recurrent states, between TP 1 and 2: what each
engine goes on from, and that it answers as one without a pool."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import EngineShelf
from tests.e2e.engine import Engine, EngineSpec, Prompt
from tests.e2e.pool import cell_files, expecting, files, fresh, pool, same, tokens
from tests.e2e.test_states import CHUNK, EXACT
from tests.support.models import Lfm2Shape, make_model

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pool")


@pytest.fixture(scope="module")
def engine(
    engines: EngineShelf, store: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Engine]:
    """`engine(tp)`: with the pool; `engine(tp, pooled=False)`: without."""
    model = make_model(tmp_path_factory.mktemp("models"), Lfm2Shape())

    def get(tp: int, *, pooled: bool = True) -> Engine:
        config: Any = pool(files(store)) if pooled else None
        return engines.get(
            EngineSpec(model=model, tp=tp, block_size=256, kv_transfer_config=config, llm=EXACT)
        )

    return get


def boundary(num_tokens: int) -> int:
    """The last one that leaves a token to compute."""
    return (num_tokens - 1) // CHUNK * CHUNK


def test_turns_of_a_conversation_go_on_from_the_last_one(engine: Callable[..., Engine]) -> None:
    said, known = tokens(seed=1, count=700), 0
    for number, tp in enumerate((2, 1, 2, 1)):
        prompt = Prompt(ids=said, max_tokens=8)
        (expected,) = engine(1, pooled=False).generate(prompt)
        answer = fresh(engine(tp), expecting(prompt, known) if known else prompt)
        assert answer.cached_tokens == known
        same(answer, expected)
        known = boundary(len(said))
        said = [*said, *answer.token_ids, *tokens(seed=10 + number, count=300)]


def test_a_shared_prompt_has_a_state_from_its_second_request_on(
    engine: Callable[..., Engine],
) -> None:
    system = tokens(seed=2, count=3 * CHUNK)
    # The second one waits for nothing: what it lacks is the state, and no attention.
    for number, (tp, known) in enumerate([(2, 0), (1, 0), (2, len(system)), (1, len(system))]):
        prompt = Prompt(ids=[*system, *tokens(seed=20 + number, count=400)])
        (expected,) = engine(1, pooled=False).generate(prompt)
        answer = fresh(engine(tp), expecting(prompt, known) if known else prompt)
        assert answer.cached_tokens == known
        same(answer, expected)
        if number == 0:  # its attention is stored
            engine(tp).generate(expecting(Prompt(ids=prompt.ids), boundary(len(prompt.ids))))


def test_many_requests_at_once(engine: Callable[..., Engine]) -> None:
    """Loads, saves and computing beside each other, of prompts that begin alike."""
    stem = tokens(seed=3, count=2 * CHUNK + 1)
    prompts = [
        Prompt(ids=[*stem[: CHUNK * (1 + number % 2)], *tokens(seed=40 + number, count=500)])
        for number in range(6)
    ]
    expected = engine(1, pooled=False).generate(*prompts)
    for answer, right in zip(engine(2).generate(*prompts), expected, strict=True):
        same(answer, right)
    assert engine(1).reset_prefix_cache()
    cached = []
    waiting = [expecting(prompt, boundary(len(prompt.ids))) for prompt in prompts]
    for answer, right in zip(engine(1).generate(*waiting), expected, strict=True):
        same(answer, right)
        cached.append(answer.cached_tokens)
    assert cached == [boundary(len(prompt.ids)) for prompt in prompts]


def test_damaged_and_evicted_states_are_computed_again(
    engine: Callable[..., Engine], store: Path
) -> None:
    prompt = Prompt(ids=tokens(seed=4, count=4 * CHUNK + 9))
    before = set(cell_files(store))
    engine(2).generate(prompt)
    (expected,) = engine(1, pooled=False).generate(prompt)
    same(fresh(engine(1), expecting(prompt, 4 * CHUNK)), expected)
    new = sorted(set(cell_files(store)) - before)
    states = [path for path in new if b"@kind:state" in path.read_bytes()[:4096]]
    assert states
    data = bytearray(states[0].read_bytes())
    data[-5] ^= 1
    states[0].write_bytes(data)
    answer = fresh(engine(1), prompt)
    assert answer.cached_tokens == 0
    same(answer, expected)
    answer = fresh(engine(1), expecting(prompt, 4 * CHUNK))
    assert answer.cached_tokens == 4 * CHUNK  # what was damaged was saved again
    same(answer, expected)
    for path in set(cell_files(store)) - before:
        path.unlink()
    answer = fresh(engine(1), prompt)
    same(answer, expected)
