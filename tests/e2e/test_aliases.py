"""Hits that end inside a chunk, where a prompt parts from a stored one or ends."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.conftest import EngineShelf
from tests.e2e.engine import Completion, Engine, EngineSpec, Prompt
from tests.e2e.pool import (
    cell_files,
    files,
    fresh,
    num_aliases,
    pool,
    same,
    tokens,
    unpooled,
)
from tests.support.models import LlamaShape
from tests.support.waiting import wait_until

pytestmark = pytest.mark.e2e

CHUNK = 256
STEP = 64
SPANS = 2  # of two layers
HEADS = 4
LIMIT_S = 30.0

Pair = tuple[Engine, Engine, Path]


@pytest.fixture(scope="module")
def pair(
    llama: Callable[[LlamaShape], Path],
    engines: EngineShelf,
    tmp_path_factory: pytest.TempPathFactory,
) -> Pair:
    """A writer at TP 2, a reader at TP 1 with smaller blocks, and their store's directory."""
    directory = tmp_path_factory.mktemp("pool")
    writer, reader = (
        engines.get(
            EngineSpec(
                model=llama(LlamaShape(kv_heads=HEADS)),
                tp=tp,
                block_size=block,
                kv_transfer_config=pool(files(directory), alias_tokens=STEP),
            )
        )
        for tp, block in ((2, 64), (1, 32))
    )
    return writer, reader, directory


def write(pair: Pair, prompt: Prompt, aliases: int) -> Completion:
    """The writer's answer, once so many new aliases are stored: they follow their cells."""
    writer, _, directory = pair
    before = num_aliases(directory)
    answer = fresh(writer, prompt)
    wait_until(
        lambda: not (num_aliases(directory) < before + aliases),
        LIMIT_S,
        what=lambda: f"{num_aliases(directory) - before} of {aliases} aliases",
        pause_s=0.05,
    )
    return answer


def test_prompt_that_parts_inside_a_chunk_is_found_up_to_there(pair: Pair) -> None:
    shared = tokens(seed=1, count=500)
    first, second = (Prompt(ids=shared + tokens(seed=seed, count=60)) for seed in (2, 3))
    write(pair, first, aliases=2 * 3)
    expected = fresh(pair[1], unpooled(second))
    read = fresh(pair[1], second)
    assert read.cached_tokens == 480  # 500 in blocks of 32
    same(read, expected)


def test_prompt_is_found_up_to_its_end(pair: Pair) -> None:
    prompt = Prompt(ids=tokens(seed=11, count=511))
    written = write(pair, prompt, aliases=3 + 3)
    expected = fresh(pair[1], unpooled(prompt))
    same(written, expected)
    read = fresh(pair[1], prompt)
    assert read.cached_tokens == 510
    same(read, expected)


def test_next_turn_goes_on_inside_the_chunk_of_the_turn_before(pair: Pair) -> None:
    """Both turns are shorter than a chunk."""
    first = tokens(seed=21, count=150)
    write(pair, Prompt(ids=first), aliases=2)
    second = Prompt(ids=first + tokens(seed=22, count=70))
    expected = fresh(pair[1], unpooled(second))
    read = fresh(pair[1], second)
    assert read.cached_tokens == 128  # 150 in blocks of 32
    same(read, expected)


def test_load_begins_inside_the_chunk_that_an_alias_leads_to(pair: Pair) -> None:
    """The reader's own cache has the first blocks of the chunk."""
    shared = tokens(seed=31, count=460)
    write(pair, Prompt(ids=shared + tokens(seed=32, count=60)), aliases=2 * 3)
    second = Prompt(ids=shared + tokens(seed=33, count=60))
    expected = fresh(pair[1], unpooled(second))
    fresh(pair[1], unpooled(Prompt(ids=shared[:300])))
    (read,) = pair[1].generate(second)
    assert read.cached_tokens == 448  # 460 in blocks of 32
    same(read, expected)


def test_chunk_of_an_alias_that_is_gone_is_computed(pair: Pair) -> None:
    shared = tokens(seed=41, count=200)
    write(pair, Prompt(ids=shared + tokens(seed=42, count=100)), aliases=3)
    for path in cell_files(pair[2]):
        if b"@kind:alias@" not in path.read_bytes():
            path.unlink(missing_ok=True)
    second = Prompt(ids=shared + tokens(seed=43, count=100))
    expected = fresh(pair[1], unpooled(second))
    read = fresh(pair[1], second)
    assert read.cached_tokens == 0
    same(read, expected)
