"""Hooks into stores that tests open through whole configurations."""

import time
from collections.abc import Callable
from typing import Any

from vllm_kvpool.storage.backends import BACKENDS, Backend
from vllm_kvpool.storage.base import Store
from vllm_kvpool.storage.file.store import FileStore


def wrap_stores(wrap: Callable[[Store], Store]) -> Callable[[], None]:
    """Pass every store opened from now on through `wrap`. Return a function that undoes it."""
    before = dict(BACKENDS)
    for kind, backend in before.items():
        BACKENDS[kind] = _wrapped(backend, wrap)
    return lambda: BACKENDS.update(before)


def _wrapped(
    backend: Callable[[Any, bool], Backend], wrap: Callable[[Store], Store]
) -> Callable[[Any, bool], Backend]:
    def wrapped(options: Any, segment: bool) -> Backend:
        capabilities, opener = backend(options, segment)
        return capabilities, lambda: wrap(opener())

    return wrapped


def wait_complete(store: FileStore, timeout_s: float) -> bool:
    """Wait until a store's index lists every file. Return False after `timeout_s`."""
    space, deadline = store._space, time.monotonic() + timeout_s
    while not (is_complete := space.index.is_complete) and time.monotonic() < deadline:
        space._woken.set()
        time.sleep(0.01)
    return is_complete
