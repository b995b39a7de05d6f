"""Windows and writes over the transports: Mooncake's transfer engine, or shared memory.

Mooncake's engine moves rows over any of its protocols, shared memory between processes of one
host. A consumer opens one window; producers write runs of rows into the extents that they were
granted and report a digest of each run; the consumer drains and compares. Nothing here knows
grants, peers or names of items, and nothing starts threads: calls block in their caller's.
"""

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from vllm_kvpool.config import Transport, set_where_unset
from vllm_kvpool.embeds.dataplane.mooncake import MooncakeLandingWindow, MooncakeWriter
from vllm_kvpool.embeds.dataplane.row_bytes import Bytes, RowCopy
from vllm_kvpool.embeds.dataplane.shared_memory import SharedLandingWindow, SharedWriter
from vllm_kvpool.embeds.protocol.messages import Window
from vllm_kvpool.errors import ConfigError
from vllm_kvpool.storage.mooncake_engine import (
    NativeEngine,
    SharedEngine,
    environment_of,
    shared_engine,
)


class LandingWindow(Protocol):
    """A consumer's window, which producers may write to at any time."""

    nbytes: int
    array: Bytes
    """The window's bytes, uint8 [nbytes]; not to be used after `close`."""

    @property
    def window(self) -> Window:
        """The window's address for producers."""

    def close(self) -> None:
        """Start no write any more; a second call does nothing."""


class RowWriter(Protocol):
    """Writes rows into consumers' windows of one transport. Any number of threads may write."""

    def write(self, window: Window, writes: Sequence[RowCopy]) -> Sequence[tuple[int, ...]]:
        """Write runs of items, which are in the window when it returns.

        A digest for each run of each write; after a WriteError none is certain.
        """

    def close(self) -> None:
        """End writes under way with a WriteError. Called once; no write may follow."""


def open_landing(
    transport: Transport, nbytes: int, *, host: str, protocol: str = "tcp", device: str = ""
) -> LandingWindow:
    """Return a landing window of `nbytes`.

    `host` is the address at which producers reach this process.
    ConfigError for an impossible configuration, StoreError if the network refuses.
    """
    if nbytes < 1:
        raise ConfigError(f"arena_bytes={nbytes} must be at least one byte")
    if transport is Transport.LOCAL:
        return SharedLandingWindow(nbytes)
    engine, native = _opened(host, protocol, device)
    return MooncakeLandingWindow(engine, native, nbytes, host)


def open_writer(
    transport: Transport,
    staging_bytes: int,
    *,
    host: str,
    protocol: str = "tcp",
    device: str = "",
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> RowWriter:
    """Return a writer; raises as `open_landing`.

    Over Mooncake, rows go through `staging_bytes` of registered memory for all threads that write.
    """
    if transport is Transport.LOCAL:
        return SharedWriter()
    engine, native = _opened(host, protocol, device)
    return MooncakeWriter(engine, native, staging_bytes, clock=clock, sleep=sleep)


def _opened(host: str, protocol: str, device: str) -> tuple[SharedEngine, NativeEngine]:
    set_where_unset(environment_of(protocol))
    engine = shared_engine(protocol)
    return engine, engine.open(host, device)
