"""Import vLLM before the tests do. Warnings of vLLM and torch during the import are not ours."""

import warnings
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import vllm
    import vllm.engine.arg_utils
    import vllm.v1.core.sched.scheduler

    from tests.faults.scene import Library
    from tests.faults.workshop import Workshop

from tests.support.left_out import left_out
from tests.support.releases import NEWEST
from vllm_kvpool.scheduler import pool_scheduler as scheduler
from vllm_kvpool.scheduler import scheduler_part
from vllm_kvpool.storage import breaker
from vllm_kvpool.transfer import executor
from vllm_kvpool.vllm_adapt import compat
from vllm_kvpool.vllm_adapt.identity import model_code

# Where a failed load cannot be told by request, models with several groups load nothing
# (tests/vllm_adapt/kv_cache_specs/test_layer_groups.py says so), and these are about what is
# loaded. That release has no MLA on CPUs, for which rigs are configured, and offers no recurrent
# states.
NEWER_FILES = left_out(
    __file__,
    *("test_windows.py", "test_latents.py", "test_states.py", "test_ends.py", "test_indexers.py"),
    "test_layer_kinds.py",
)
collect_ignore = [] if compat.reports_failed_loads_by_request() else NEWER_FILES
if vllm.__version__ != NEWEST:  # older releases call other hooks, and refuse some options
    collect_ignore += left_out(__file__, "test_connector_hooks.py", "test_option_effects.py")
if not compat.tells_locality():  # in older releases the pool publishes no events (test_releases.py)
    collect_ignore += left_out(__file__, "test_events.py")


installed_plugins = cache(model_code.entry_points)
read_configuration = compat.configuration
configurations: dict[str, Any] = {}


def known_configuration(model: Any) -> Any:
    if model.model not in configurations:
        configurations[model.model] = read_configuration(model)
    return configurations[model.model]


@pytest.fixture(autouse=True)
def _read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cache reads of installed packages and model files, which are equal in all rigs.

    The reads take a tenth of a test's time.
    """
    monkeypatch.setattr(model_code, "entry_points", installed_plugins)
    monkeypatch.setattr(compat, "configuration", known_configuration)


@pytest.fixture(scope="session")
def _models(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("rigs"))


@pytest.fixture
def workshop(_models: Workshop) -> Iterator[Workshop]:
    """Yield a workshop, and take apart the rigs that a test has left."""
    with _models:
        yield _models


@pytest.fixture(scope="session")
def _library(_models: Workshop) -> Library:
    with _models:
        return Library(_models)


@pytest.fixture
def library(_library: Library, monkeypatch: pytest.MonkeyPatch) -> Library:
    """Return the library, and shorten pauses: the tests check that pauses end, not their length."""
    monkeypatch.setattr(breaker, "FIRST_PAUSE_S", 0.02)
    monkeypatch.setattr(breaker, "LONGEST_PAUSE_S", 0.1)
    monkeypatch.setattr(executor, "WATCH_S", 0.05)
    monkeypatch.setattr(scheduler, "RESET_WAIT_S", 0.2)
    monkeypatch.setattr(scheduler_part, "LOOKUP_CALL_S", 0.2)
    return _library
