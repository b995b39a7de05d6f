"""Beside a connector whose loads fail: what was never loaded must not reach the pool."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import EngineShelf
from tests.e2e.engine import Engine, EngineSpec, Prompt
from tests.e2e.pool import files, pool, same, tokens
from tests.support.models import LlamaShape

pytestmark = pytest.mark.e2e

SHAPE = LlamaShape(kv_heads=2)
CHUNK = 64
COUNT = 600
LOADED = 512


def beside(store: Path, policy: str, *, asynchronous: bool) -> Mapping[str, Any]:
    """The configuration of the pool behind a connector whose loads bring nothing."""
    empty = {
        "kv_connector": "EmptyLoads",
        "kv_connector_module_path": "tests.support.empty_loads",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"asynchronous": asynchronous},
    }
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": {
            "connectors": [empty, pool(files(store), chunk_tokens=CHUNK)]
        },
    }


@pytest.mark.parametrize("asynchronous", [False, True], ids=["within a step", "asynchronous"])
@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_what_another_connector_failed_to_load_is_not_saved(
    llama: Callable[[LlamaShape], Path],
    engines: EngineShelf,
    tmp_path: Path,
    policy: str,
    asynchronous: bool,
) -> None:
    model, store = llama(SHAPE), tmp_path / "pool"
    one_step = Prompt(ids=tokens(seed=1, count=COUNT), max_tokens=1)
    longer = Prompt(ids=tokens(seed=2, count=COUNT))
    expected = engines.get(EngineSpec(model=model)).generate(one_step, longer)
    spec = EngineSpec(
        model=model, kv_transfer_config=beside(store, policy, asynchronous=asynchronous)
    )
    with Engine(spec, tmp_path / "engine.log") as engine:
        for prompt, right in zip((one_step, longer), expected, strict=True):
            promised = replace(prompt, kv_transfer_params={"empty_loads": LOADED})
            (answer,) = engine.generate(promised)
            if policy == "recompute":
                same(answer, right)
            else:
                assert answer.finish_reason == "error"
    reader = EngineSpec(model=model, kv_transfer_config=pool(files(store), chunk_tokens=CHUNK))
    for prompt, right in zip((one_step, longer), expected, strict=True):
        (answer,) = engines.get(reader).generate(prompt)
        same(answer, right)
        if policy == "recompute":
            assert answer.cached_tokens == (COUNT // CHUNK * CHUNK if asynchronous else 0)
