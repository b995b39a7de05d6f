"""Windows and writes over the transports: Mooncake's transfer engine over any of its protocols, or
memory that processes of one host share.

A consumer opens one window; producers write runs of rows into the extents that they were granted
and report a digest of each run; the consumer drains and compares. Nothing here knows grants,
peers or names of items, and nothing starts threads: calls block in their caller's.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from vllm_kvpool.config import Transport, set_where_unset
from vllm_kvpool.embeds.dataplane.mooncake import MooncakeLandingWindow, MooncakeWriter
from vllm_kvpool.embeds.dataplane.row_bytes import Bytes, RowWrite, WriteError
from vllm_kvpool.embeds.dataplane.shared_memory import SharedLandingWindow, SharedWriter
from vllm_kvpool.embeds.protocol.messages import MooncakeWindow, SharedWindow, Window
from vllm_kvpool.errors import ConfigError
from vllm_kvpool.storage.mooncake_engine import (
    NativeEngine,
    SharedEngine,
    environment_of,
    shared_engine,
)

Result = tuple[int, ...] | WriteError
"""Of a write: a digest for each run, or why its rows are not in the window."""


class LandingWindow(Protocol):
    """A consumer's window, which producers may write to at any time."""

    nbytes: int
    array: Bytes
    """The window's bytes, uint8 [nbytes]; not to be used after `close`."""

    @property
    def window(self) -> Window:
        """The window's address for producers."""

    def close(self) -> None:
        """No write can start any more. Does nothing when called again."""


class RowWriter(Protocol):
    """Writes rows to windows of one transport. Any thread."""

    def write(self, window: Any, writes: Sequence[RowWrite]) -> Sequence[tuple[int, ...]]:
        """A digest for each run of each write; after a WriteError none is certain."""

    def close(self) -> None:
        """End writes under way with a WriteError."""


def open_landing(
    transport: Transport, nbytes: int, *, host: str, protocol: str = "tcp", device: str = ""
) -> LandingWindow:
    """A landing window of `nbytes`; `host` is the address at which producers reach this process.

    ConfigError for an impossible configuration, StoreError if the network refuses.
    """
    if nbytes < 1:
        raise ConfigError(f"arena_bytes={nbytes} must be at least one byte")
    if transport is Transport.LOCAL:
        return SharedLandingWindow(nbytes)
    engine, native = _opened(host, protocol, device)
    return MooncakeLandingWindow(engine, native, nbytes, host)


class WriterPlane:
    """Writes rows into consumers' windows of its own transport. Any number of threads may write.

    Over Mooncake, rows go through `staging_bytes` of registered memory, however many threads
    write.
    """

    def __init__(
        self,
        transport: Transport,
        staging_bytes: int,
        *,
        host: str,
        protocol: str = "tcp",
        device: str = "",
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._transport = transport
        self._writer: RowWriter
        if transport is Transport.LOCAL:
            self._windows: type[Window] = SharedWindow
            self._writer = SharedWriter()
            return
        engine, native = _opened(host, protocol, device)
        self._windows = MooncakeWindow
        self._writer = MooncakeWriter(engine, native, staging_bytes, clock=clock, sleep=sleep)

    def write(self, window: Window, writes: Sequence[RowWrite]) -> list[Result]:
        """Write runs of items, which are in the window when it returns; a result for each write.

        Over Mooncake they are sent together, and fail together.
        """
        results: list[Result] = [_checked(write, window) for write in writes]
        good = [at for at, write in enumerate(writes) if write.runs and results[at] == ()]
        try:
            found = self._write(window, [writes[at] for at in good]) if good else ()
        except WriteError as error:
            found = [error] * len(good)
        for at, result in zip(good, found, strict=True):
            results[at] = result
        return results

    def _write(self, window: Window, writes: Sequence[RowWrite]) -> Sequence[Result]:
        if isinstance(window, self._windows):
            return self._writer.write(window, writes)
        raise WriteError(
            f"the window is of another transport than {self._transport.value}: set the same "
            "transport on both sides",
            quiesced=True,
        )

    def close(self) -> None:
        """End writes under way with a WriteError. Called once; no write may follow."""
        self._writer.close()


def _checked(write: RowWrite, window: Window) -> Result:
    try:
        write.check(window.nbytes)
    except WriteError as error:
        return error
    return ()


def _opened(host: str, protocol: str, device: str) -> tuple[SharedEngine, NativeEngine]:
    set_where_unset(environment_of(protocol))
    engine = shared_engine(protocol)
    return engine, engine.open(host, device)
