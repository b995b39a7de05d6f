"""Full stores of a model with recurrent states: what is evicted is computed again, and no hit goes
beyond the largest boundary that has a state and all attention before it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import EngineShelf
from tests.e2e.engine import Completion, Engine, EngineSpec, Prompt
from tests.e2e.pool import fresh, pool, same, tokens
from tests.e2e.test_states import CHUNK, EXACT
from tests.support.models import Lfm2Shape, make_model
from vllm_kvpool.cli.common.prompt import PromptPresence, presence
from vllm_kvpool.cli.common.stores import NamedStore
from vllm_kvpool.storage.backends import open_store
from vllm_kvpool.storage.base import Listing
from vllm_kvpool.storage.contents.manifest import manifest_in
from vllm_kvpool.storage.url import parse_store_url

pytestmark = pytest.mark.e2e

# What is evicted is of the tenant that has more: "loud", who goes on writing. A chunk of attention
# takes 0.5 MiB; a state takes 0.1 MiB in a file and 2 MiB in host memory, as its 32 cells have
# slots of one size.
FILES = "size=8MiB&shares=tenant&policy=lru"
HOST = "host://24MiB?shares=tenant&policy=lru"
FLOOD = [tokens(seed, 2 * CHUNK + 9) for seed in range(10)]

STEM = tokens(100, 2 * CHUNK)
LONG = [*STEM, *tokens(101, 2 * CHUNK + 9)]
SHORT = [*STEM, *tokens(102, 60)]
OTHER_STEM = tokens(200, 2 * CHUNK)
OTHER_LONG = [*OTHER_STEM, *tokens(201, 2 * CHUNK + 9)]
OTHER_SHORT = [*OTHER_STEM, *tokens(202, 60)]
TURN = tokens(300, 2 * CHUNK + 40)
NEXT_TURN = [*TURN, *tokens(301, 2 * CHUNK)]

# In this order: what is computed, for whom, and how much of it another request can load then.
WRITTEN = [
    (LONG, "quiet", 4 * CHUNK),
    (SHORT, "loud", 2 * CHUNK),  # the state alone: its attention is there
    (OTHER_LONG, "loud", 4 * CHUNK),
    (OTHER_SHORT, "quiet", 2 * CHUNK),
    (TURN, "quiet", 2 * CHUNK),
    (NEXT_TURN, "loud", 4 * CHUNK),
    *((each, "loud", 2 * CHUNK) for each in FLOOD),
]
LEFT = {
    "whole": (LONG, 4 * CHUNK),
    "its state was evicted, its attention is there": (SHORT, 0),
    "its attention was evicted, its state is there": (OTHER_SHORT, 0),
    "all of it was evicted": (OTHER_LONG, 0),
    "an earlier boundary is whole": (NEXT_TURN, 2 * CHUNK),
    "the last one that was written": (FLOOD[-1], 2 * CHUNK),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models"), Lfm2Shape())


@pytest.fixture(scope="module")
def cold(path: Path, engines: EngineShelf) -> dict[str, Completion]:
    """The answers of an engine of the same shape without a pool."""
    prompts = {name: Prompt(ids=ids) for name, (ids, _) in LEFT.items()}
    engine = engines.get(spec_of(path))
    return {name: fresh(engine, prompt) for name, prompt in prompts.items()}


def spec_of(path: Path, config: Mapping[str, Any] | None = None) -> EngineSpec:
    return EngineSpec(model=path, block_size=256, kv_transfer_config=config, llm=EXACT)


def fill(engine: Engine) -> None:
    """Write all prompts one after another; a prompt begins when the one before is stored."""
    for ids, tenant, whole in WRITTEN:
        wish = {"expect_tokens": whole, "expect_timeout_ms": 20_000}
        for more in ({}, wish):
            params = {"kvpool": {"tenant": tenant, **more}}
            answer = fresh(engine, Prompt(ids=ids, max_tokens=1, kv_transfer_params=params))
        assert answer.cached_tokens == whole


def read(engine: Engine, ids: list[int], cold: Completion) -> int:
    """The tokens that a hit of a prompt has; its answer is that of an engine without a pool."""
    params = {"kvpool": {"save": False}}  # what is stored stays as it is
    answer = fresh(engine, Prompt(ids=ids, kv_transfer_params=params))
    same(answer, cold)
    return answer.cached_tokens


def stored(url: str, ids: list[int]) -> PromptPresence:
    """Return the chunks and states of a prompt that a store holds."""
    store = open_store(parse_store_url(url), segment=False)
    try:
        assert isinstance(store, Listing)
        [namespace] = store.namespaces()
        manifest = manifest_in(store, namespace)
        assert manifest is not None
        return presence([NamedStore("pool", store)], manifest, ids)
    finally:
        store.close()


def largest_boundary(found: PromptPresence) -> int:
    """The largest one with a state of every layer and all attention before it."""
    missing = [each.chunk for each in found.chunks if each.missing]
    attention = min(missing, default=found.num_tokens) * CHUNK
    [states] = found.states_after_tokens.values()
    return max((each for each in states if each <= attention), default=0)


def test_another_engine_reads_what_a_full_directory_has_kept(
    path: Path, cold: dict[str, Completion], engines: EngineShelf, tmp_path: Path
) -> None:
    url = f"file://{tmp_path / 'pool'}?{FILES}"
    fill(engines.get(spec_of(path, pool(url))))
    short, other = stored(url, SHORT), stored(url, OTHER_SHORT)
    assert not any(each.missing for each in short.chunks)
    assert [*short.states_after_tokens.values()] == [()]
    assert any(each.missing for each in other.chunks)
    assert [*other.states_after_tokens.values()] == [(2 * CHUNK,)]
    reader = engines.get(spec_of(path, pool(url, role="kv_consumer")))
    for name, (ids, left) in LEFT.items():
        assert read(reader, ids, cold[name]) == largest_boundary(stored(url, ids)) == left


def test_an_engine_reads_what_its_full_host_memory_has_kept(
    path: Path, cold: dict[str, Completion], engines: EngineShelf
) -> None:
    engine = engines.get(spec_of(path, pool([HOST])))
    fill(engine)
    for name, (ids, left) in LEFT.items():
        assert read(engine, ids, cold[name]) == left, name
