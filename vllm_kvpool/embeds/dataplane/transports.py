"""Windows and writes over the transports: `mooncake`, Mooncake's transfer engine over any of its
protocols, and `local`, memory that processes of one host share.

A consumer opens one window; producers write runs of rows into the extents that they were granted
and report a digest of each run; the consumer drains and compares. Nothing here knows grants,
peers or names of items, and nothing starts threads: calls block in their caller's.
"""

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from vllm_kvpool.config import set_where_unset
from vllm_kvpool.embeds.dataplane.mooncake import MooncakeLandingWindow, MooncakeWriter
from vllm_kvpool.embeds.dataplane.row_bytes import (
    Bytes,
    RowWrite,
    WriteError,
)
from vllm_kvpool.embeds.dataplane.shared_memory import SharedLandingWindow, SharedWriter
from vllm_kvpool.embeds.protocol.messages import MooncakeWindow, SharedWindow, Window
from vllm_kvpool.errors import ConfigError, nearest
from vllm_kvpool.storage.mooncake_engine import (
    NativeEngine,
    SharedEngine,
    environment_of,
    shared_engine,
)

MOONCAKE = "mooncake"
LOCAL = "local"
TRANSPORTS = (MOONCAKE, LOCAL)

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


def open_landing(
    transport: str,
    nbytes: int,
    *,
    host: str,
    protocol: str = "tcp",
    device: str = "",
) -> LandingWindow:
    """A landing window of `nbytes`; `host` is the address at which producers reach this process.

    ConfigError for an impossible configuration, StoreError if the network refuses.
    """
    if nbytes < 1:
        raise ConfigError(f"arena_bytes={nbytes} must be at least one byte")
    if _checked(transport) == LOCAL:
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
        transport: str,
        staging_bytes: int,
        *,
        host: str,
        protocol: str = "tcp",
        device: str = "",
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._mooncake: MooncakeWriter | None = None
        self._shared: SharedWriter | None = None
        if _checked(transport) == LOCAL:
            self._shared = SharedWriter()
            return
        engine, native = _opened(host, protocol, device)
        self._mooncake = MooncakeWriter(engine, native, staging_bytes, clock=clock, sleep=sleep)

    def write(self, window: Window, writes: Sequence[RowWrite]) -> list[Result]:
        """Write runs of items, which are in the window when it returns; a result for each write.

        Over Mooncake they are sent together, and fail together.
        """
        results: list[Result] = [_checked_write(write, window) for write in writes]
        good = [
            number
            for number, write in enumerate(writes)
            if write.runs and not isinstance(results[number], WriteError)
        ]
        try:
            found = self._write(window, [writes[number] for number in good]) if good else ()
        except WriteError as error:
            found = [error] * len(good)
        for number, result in zip(good, found, strict=True):
            results[number] = result
        return results

    def _write(self, window: Window, writes: Sequence[RowWrite]) -> Sequence[Result]:
        if isinstance(window, MooncakeWindow) and self._mooncake is not None:
            return self._mooncake.write(window, writes)
        if isinstance(window, SharedWindow) and self._shared is not None:
            return self._shared.write(window, writes)
        own = MOONCAKE if self._mooncake is not None else LOCAL
        raise WriteError(
            f"the window is of another transport than {own}: set the same transport on both sides",
            quiesced=True,
        )

    def quarantined_bytes(self) -> int:
        """Staging memory that transfers which do not end may still read."""
        return 0 if self._mooncake is None else self._mooncake.staging.quarantined_bytes()

    def close(self) -> None:
        """End writes under way with a WriteError. Called once; no write may follow."""
        if self._mooncake is not None:
            self._mooncake.close()
        if self._shared is not None:
            self._shared.close()


def _checked_write(write: RowWrite, window: Window) -> Result:
    try:
        write.check(window.nbytes)
    except WriteError as error:
        return error
    return ()


def _checked(transport: str) -> str:
    if transport not in TRANSPORTS:
        raise ConfigError(f"transport={transport!r}: {nearest(transport, TRANSPORTS)}")
    return transport


def _opened(host: str, protocol: str, device: str) -> tuple[SharedEngine, NativeEngine]:
    set_where_unset(environment_of(protocol))
    engine = shared_engine(protocol)
    return engine, engine.open(host, device)
