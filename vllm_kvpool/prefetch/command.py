"""`kvpool prefetch`: copies cells into this host's files while an engine is still loading.

A low-priority process beside the engine, with the engine's configuration of the pool. It reads
orders (`ChunkNames`) as lines of JSON and writes a line with the result (`Brought`) of each.
By hand, `bring` does the same for one prompt.

The main thread waits at most `max_seconds`, a reader has the input, a mover the stores. The input
ends when its writer wants no more or has died; then the process stops, unless it was told to finish
its orders. A store call that is under way is abandoned after `GRACE_S`.
"""

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from io import BytesIO
from queue import Full, Queue
from typing import BinaryIO, NoReturn

import msgspec

from vllm_kvpool.config import KVPoolConfig, read_engine_config, set_where_unset
from vllm_kvpool.errors import ConfigError, StoreError
from vllm_kvpool.identity.cell_names import Brought, ChunkNames
from vllm_kvpool.prefetch.mover import BadNames, Mover
from vllm_kvpool.prefetch.route import route_of
from vllm_kvpool.storage.backends import capabilities_of, open_store
from vllm_kvpool.storage.guarded import CallTimeouts, GuardedStore
from vllm_kvpool.storage.tiers import tier_specs
from vllm_kvpool.storage.url import FileOptions, StoreSpec, environment_for, uses_device

logger = logging.getLogger(__name__)

NICENESS = 10
GRACE_S = 2.0
OPEN_WAIT_S = 5.0
MAX_ORDERS = 64  # waiting; further ones are dropped
MAX_LINE_BYTES = 4 << 20
NEAR_SHARE = 4  # at most a quarter of the near tier is filled

_decode = msgspec.json.Decoder(ChunkNames).decode


def chosen(config: KVPoolConfig) -> tuple[StoreSpec, tuple[StoreSpec, ...]]:
    """The near tier and the far ones; ConfigError if there is nothing to prefetch."""
    specs = tier_specs(config).stores
    route = route_of([spec.scheme for spec in specs])
    far = () if route is None else tuple(specs[i] for i in route.far if not uses_device(specs[i]))
    if route is None or not far:
        raise ConfigError(
            "nothing to prefetch: store needs a file:// tier, and mooncake:// or s3:// behind it "
            "(not over the engine's own device)"
        )
    return specs[route.near], far


def guarded(spec: StoreSpec, timeouts: CallTimeouts) -> GuardedStore:
    """Open a store, in the background if it cannot be reached now."""
    set_where_unset(environment_for(spec))
    known = capabilities_of(spec)
    opening = partial(open_store, spec, segment=False)
    return GuardedStore(opening, known, known.name, timeouts, OPEN_WAIT_S)


class Prefetch:
    """The mover's thread and the queue of its orders; other methods from any thread."""

    def __init__(
        self,
        config: KVPoolConfig,
        max_bytes: int,
        out: BinaryIO,
        ended: threading.Event,
        report: Callable[[Brought], None] = lambda done: None,
    ) -> None:
        """ConfigError as in `chosen`, or if a store can never work.

        `ended` is set when the thread ends. `report` is told on that thread what each batch of an
        order has done.
        """
        near, far = chosen(config)
        if isinstance(near.options, FileOptions):
            max_bytes = min(max_bytes, near.options.size_bytes // NEAR_SHARE)
        timeouts = CallTimeouts(call_s=config.call_timeout_s, answer_s=config.call_timeout_s)
        self._stores = [guarded(spec, timeouts) for spec in (near, *far)]
        self._mover = Mover(self._stores[0], self._stores[1:], max_bytes)
        self._orders: Queue[ChunkNames | None] = Queue(MAX_ORDERS + 1)
        self._is_over = threading.Event()
        self._out = out
        self._ended = ended
        self._report = report
        self._thread = threading.Thread(target=self._run, name="kvpool-prefetch", daemon=True)
        self._thread.start()

    def order(self, names: ChunkNames) -> None:
        """Queue an order; dropped if `MAX_ORDERS` wait."""
        if self._orders.qsize() < MAX_ORDERS:
            self._orders.put_nowait(names)

    def finish(self) -> None:
        """End after the orders so far."""
        self._orders.put_nowait(None)

    def end(self) -> bool:
        """Stop between two batches; whether that took less than `GRACE_S`."""
        self._is_over.set()
        with contextlib.suppress(Full):  # then it is not waiting for an order
            self._orders.put_nowait(None)
        self._thread.join(GRACE_S)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while (names := self._orders.get()) is not None:
                self._move(names)
                if self._is_over.is_set() or self._mover.is_spent:
                    break
            self._mover.close()
            _close(self._stores)
        except Exception:
            logger.exception("prefetch: the mover failed")
        finally:
            self._ended.set()

    def _move(self, names: ChunkNames) -> None:
        try:
            done = self._mover.move(names, lambda: not self._is_over.is_set(), self._report)
        except (BadNames, StoreError) as error:
            logger.warning("prefetch: order failed: %s", error)
            done = Brought()
        self._out.write(msgspec.json.encode(done) + b"\n")
        self._out.flush()


def _close(stores: Sequence[GuardedStore]) -> None:
    for store in stores:
        try:
            store.close()
        except StoreError as error:
            logger.info("%s", error)


def _read(lines: BinaryIO, prefetch: Prefetch, at_end: Callable[[], None]) -> None:
    while line := lines.readline(MAX_LINE_BYTES):
        try:
            prefetch.order(_decode(line))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            logger.warning("prefetch: line ignored, not an order: %s", error)
    at_end()


def bring(
    kv_transfer_config: str,
    names: ChunkNames,
    max_bytes: int,
    max_seconds: float,
    report: Callable[[Brought], None],
) -> Brought:
    """Bring the cells of one prompt near, for at most `max_seconds`. ConfigError if it cannot.

    Threads of stores may be left: the caller ends the process by `os._exit`.
    """
    ended = threading.Event()
    done = BytesIO()
    work = Prefetch(read_engine_config(kv_transfer_config), max_bytes, done, ended, report)
    work.order(names)
    work.finish()
    if not ended.wait(max_seconds):
        logger.warning("prefetch: stopped at --max-seconds=%g", max_seconds)
    work.end()
    return msgspec.json.decode(done.getvalue() or b"{}", type=Brought)


def run(kv_transfer_config: str, max_bytes: int, max_seconds: float, *, finish: bool) -> NoReturn:
    """Serve orders until the input ends, or with `finish` until they are done; ends the process.

    ConfigError if it cannot serve.
    """
    os.nice(NICENESS)
    ended = threading.Event()
    work = Prefetch(read_engine_config(kv_transfer_config), max_bytes, sys.stdout.buffer, ended)
    reading = (sys.stdin.buffer, work, work.finish if finish else ended.set)
    threading.Thread(target=_read, args=reading, name="kvpool-orders", daemon=True).start()
    if not ended.wait(max_seconds):
        logger.info("prefetch: stopped at --max-seconds=%g", max_seconds)
    work.end()
    # Native threads of stores, and a reader blocked on its input, cannot be joined.
    os._exit(0)
