"""Retention options of requests on a running engine: pin, time to live, no store, and tenant."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import EngineShelf
from tests.e2e.engine import Engine, EngineSpec, Prompt
from tests.e2e.pool import cell_files, fresh, pool, tokens
from tests.support.models import LlamaShape

pytestmark = pytest.mark.e2e

HIT = 1024  # tokens of a prompt in whole chunks, about 1 MiB
MOST = 8  # prompts that the directory has room for
LIMIT_S = 60.0
TTL_S = 6  # longer than a busy machine takes for two requests


def asking(seed: int, **options: Any) -> Prompt:
    ids = tokens(seed=seed, count=HIT + 76)
    return Prompt(ids=ids, kv_transfer_params={"kvpool": options})


def held(engine: Engine, seed: int, expected: int = 0) -> int:
    """Tokens that the pool has of a prompt, waiting for `expected`; the question saves nothing."""
    wish = {"expect_tokens": expected, "expect_timeout_ms": 20_000} if expected else {}
    return fresh(engine, asking(seed, save=False, **wish)).cached_tokens


def test_a_prompt_is_kept_forgotten_or_never_stored_as_its_request_says(
    llama: Callable[[LlamaShape], Path], engines: EngineShelf, tmp_path: Path
) -> None:
    directory = tmp_path / "pool"
    store = f"file://{directory}?size={MOST}MiB&shares=tenant"
    engine = engines.get(
        EngineSpec(model=llama(LlamaShape(kv_heads=2)), kv_transfer_config=pool(store))
    )
    engine.generate(asking(seed=1, save=False))
    assert held(engine, seed=1) == 0
    assert cell_files(directory) == []

    began = time.monotonic()
    engine.generate(asking(seed=2, ttl_s=TTL_S))
    expired = time.monotonic() + TTL_S
    assert held(engine, seed=2, expected=HIT) == HIT
    while cell_files(directory):
        assert time.monotonic() < expired + LIMIT_S
        time.sleep(0.1)
    assert time.monotonic() >= began + TTL_S, "it was saved at some time after that"
    assert held(engine, seed=2) == 0

    # Three prompts that all have a hit, and then a flood from the tenant of two of them.
    for seed, options in ((3, {"pin_s": 3600}), (4, {}), (5, {"tenant": "quiet"})):
        engine.generate(asking(seed, **{"tenant": "loud", **options}))
        assert held(engine, seed, expected=HIT) == HIT
    for seed in range(10, 10 + 2 * MOST):
        engine.generate(asking(seed, tenant="loud"))
    assert held(engine, seed=9 + 2 * MOST, expected=HIT) == HIT
    pinned, unpinned, quiet = (held(engine, seed) for seed in (3, 4, 5))
    assert (pinned, quiet) == (HIT, HIT)
    assert unpinned < HIT
