"""Opens the store of a `StoreSpec` (url.py); imports only the backend that it needs.

Opening blocks, for Mooncake and S3 for seconds.
"""

from collections.abc import Callable
from functools import partial

from vllm_kvpool.errors import ConfigError
from vllm_kvpool.storage.base import Capabilities, Store
from vllm_kvpool.storage.eviction import POLICIES
from vllm_kvpool.storage.mooncake import MooncakeOptions
from vllm_kvpool.storage.url import FileOptions, MemoryOptions, S3Options, StoreSpec

_wraps: list[Callable[[Store], Store]] = []


def wrap_stores(wrap: Callable[[Store], Store]) -> Callable[[], None]:
    """Pass every store opened from now on through `wrap`; returns a function that undoes it.

    For fault injection and tests.
    """
    _wraps.append(wrap)
    return partial(_wraps.remove, wrap)


def open_store(spec: StoreSpec, *, segment: bool) -> Store:
    """Open a store; with `segment`, a Mooncake client contributes memory to its pool.

    ConfigError if it can never work as configured, StoreUnreachable if it cannot be reached now.
    """
    store = _backend_of(spec, segment)[1]()
    for wrap in _wraps:
        store = wrap(store)
    return store


def capabilities_of(spec: StoreSpec) -> Capabilities:
    """What the store will be able to do, before it is opened."""
    return _backend_of(spec)[0]


def _backend_of(spec: StoreSpec, segment: bool = False) -> tuple[Capabilities, Callable[[], Store]]:
    """What a backend can do, and the call that opens the store."""
    match spec.options:
        case MemoryOptions(name, size_bytes):
            from vllm_kvpool.storage import memory

            return memory.CAPABILITIES, lambda: memory.MemoryStore(name, size_bytes)
        case FileOptions(path, size_bytes, io, policy, shares):
            from vllm_kvpool.storage.file import store as file

            rule = POLICIES[policy]
            return file.CAPABILITIES, lambda: file.open_file_store(
                path, size_bytes, io, rule, shares
            )
        case MooncakeOptions() as options:
            from vllm_kvpool.storage import mooncake

            return mooncake.capabilities(), lambda: mooncake.MooncakeStore(options, segment=segment)
        case S3Options() as options:
            try:
                import vllm_kvpool.storage.s3 as module
            except ModuleNotFoundError as error:
                raise ConfigError(
                    f"s3:// needs obstore ({error}); run: pip install vllm-kvpool[s3]"
                ) from error
            return module.CAPABILITIES, lambda: module.S3Store(options)
