"""Opens the store of a `StoreSpec` (url.py); imports only the backend that it needs.

Opening blocks, for Mooncake and S3 for seconds.
"""

from collections.abc import Callable
from typing import Any

from vllm_kvpool.errors import ConfigError
from vllm_kvpool.storage.base import Capabilities, Store
from vllm_kvpool.storage.eviction import POLICIES
from vllm_kvpool.storage.mooncake import MooncakeOptions
from vllm_kvpool.storage.url import FileOptions, S3Options, StoreSpec

Backend = tuple[Capabilities, Callable[[], Store]]
"""The capabilities of a kind of store, and the call that opens one."""


def open_store(spec: StoreSpec, *, segment: bool) -> Store:
    """Open a store; with `segment`, a Mooncake client contributes memory to its pool.

    ConfigError if it can never work as configured, StoreUnreachable if it cannot be reached now.
    """
    return BACKENDS[type(spec.options)](spec.options, segment)[1]()


def capabilities_of(spec: StoreSpec) -> Capabilities:
    """Return the store's capabilities before it is opened."""
    return BACKENDS[type(spec.options)](spec.options, False)[0]


def _file(options: FileOptions, segment: bool) -> Backend:
    from vllm_kvpool.storage.file import store

    rule = POLICIES[options.policy]
    return store.CAPABILITIES, lambda: store.open_file_store(
        options.path, options.size_bytes, options.io, rule, options.shares
    )


def _mooncake(options: MooncakeOptions, segment: bool) -> Backend:
    from vllm_kvpool.storage import mooncake

    return mooncake.capabilities(), lambda: mooncake.MooncakeStore(options, segment=segment)


def _s3(options: S3Options, segment: bool) -> Backend:
    try:
        from vllm_kvpool.storage import s3
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"s3:// needs obstore ({error}); run: pip install 'vllm-kvpool[s3]'"
        ) from error
    return s3.CAPABILITIES, lambda: s3.S3Store(options)


BACKENDS: dict[type, Callable[[Any, bool], Backend]] = {
    FileOptions: _file,
    MooncakeOptions: _mooncake,
    S3Options: _s3,
}
