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
from vllm_kvpool.embeds.dataplane.host_memory import MemorySource, RegisteredMemory, from_host
from vllm_kvpool.embeds.dataplane.mooncake import MooncakeWriter
from vllm_kvpool.embeds.dataplane.row_bytes import (
    Bytes,
    RowWrite,
    WriteError,
)
from vllm_kvpool.embeds.dataplane.shared_memory import SharedLandingWindow, SharedWriter
from vllm_kvpool.embeds.protocol.messages import MooncakeWindow, SharedWindow, Window
from vllm_kvpool.embeds.protocol.rows import ItemShape, RowRun
from vllm_kvpool.errors import ConfigError, nearest
from vllm_kvpool.storage.mooncake_engine import (
    NativeEngine,
    SharedEngine,
    environment_of,
    session_of,
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


class MooncakeLandingWindow:
    """A window registered with this process's Mooncake engine."""

    def __init__(
        self,
        engine: SharedEngine,
        native: NativeEngine,
        nbytes: int,
        host: str,
        source: MemorySource,
    ) -> None:
        self._engine = engine
        self._memory: RegisteredMemory | None = RegisteredMemory(nbytes, source)
        buffer = self._memory.buffer
        engine.register(buffer.address, nbytes)
        self.nbytes = nbytes
        self.array = self._memory.array
        self.window = MooncakeWindow(session_of(host, native), buffer.address, nbytes)

    def close(self) -> None:
        """Unregister the memory and free its pages; its addresses stay."""
        if self._memory is not None:
            self._engine.unregister(self._memory.buffer.address)
            self._memory.retire()
            self._memory = None


def open_landing(
    transport: str,
    nbytes: int,
    *,
    host: str,
    protocol: str = "tcp",
    device: str = "",
    memory_from: MemorySource = from_host,
) -> LandingWindow:
    """A landing window of `nbytes`; `host` is the address at which producers reach this process.

    Over a device's protocol the calling thread must have entered the device, and `memory_from`
    is its `host_memory`. ConfigError for an impossible configuration, StoreError if the network
    refuses.
    """
    if nbytes < 1:
        raise ConfigError(f"arena_bytes={nbytes} must be at least one byte")
    if _checked(transport) == LOCAL:
        return SharedLandingWindow(nbytes)
    engine, native = _opened(host, protocol, device)
    return MooncakeLandingWindow(engine, native, nbytes, host, memory_from)


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
        memory_from: MemorySource = from_host,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._mooncake: MooncakeWriter | None = None
        self._shared: SharedWriter | None = None
        if _checked(transport) == LOCAL:
            self._shared = SharedWriter()
            return
        engine, native = _opened(host, protocol, device)
        self._mooncake = MooncakeWriter(
            engine, native, staging_bytes, memory_from=memory_from, clock=clock, sleep=sleep
        )

    def write(
        self,
        window: Window,
        planes: Sequence[Bytes],
        shape: ItemShape,
        runs: Sequence[RowRun],
        seed: int,
    ) -> tuple[int, ...]:
        """Write runs of an item; they are in the window when it returns. A digest for each;
        WriteError.

        `planes` are uint8 arrays [rows, row_bytes], C-contiguous, of the whole item, unchanged
        meanwhile.
        """
        (result,) = self.write_all(window, (RowWrite(planes, shape, runs, seed),))
        if isinstance(result, WriteError):
            raise result
        return result

    def write_all(self, window: Window, writes: Sequence[RowWrite]) -> list[Result]:
        """Several writes to one window: for each what `write` returns or raises.

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
