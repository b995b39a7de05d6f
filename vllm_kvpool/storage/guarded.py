"""A store that may be away: opening it, retrying, and failing calls at once while it is away.

`GuardedStore` wraps every store that an engine opens. `health.py` decides which calls a store may
be given; other calls raise `StoreUnreachable` at once. A thread of the guard opens or probes a
store that is away, with growing pauses, so no request pays for an attempt.
"""

import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from vllm_kvpool.errors import ConfigError, StoreError, StoreUnreachable
from vllm_kvpool.storage.base import (
    Buffer,
    Capabilities,
    ChunkRef,
    GetOutcome,
    PutOutcome,
    Store,
)
from vllm_kvpool.storage.health import CallKind, StoreAccess, StoreHealth

logger = logging.getLogger(__name__)

T = TypeVar("T")

OPEN_WAIT_S = 10.0  # for the first attempt to open, at the engine's start
LISTING_S = 60.0  # for what goes through a whole store
JOIN_S = 0.5
CLOSE_S = 2.0  # for the store's own `close`; vLLM leaves its workers about 4 s
PAUSE_JITTER = 0.25
CHECK_KEY = "kvpool-check"
MAX_LEFT_BEHIND = 4  # hanging calls; until one returns, further calls fail at once


_Answer = SimpleQueue[tuple[Any, BaseException | None]]
Listener = Callable[[bool, bool], None]
"""Takes whether a store is up, and whether it takes writes while it is up."""


class CallLeftBehind(StoreUnreachable):
    """A call took too long; it may still return."""


class _Thread(threading.Thread):
    """A daemon thread that performs the calls of its inbox until it gets None."""

    def __init__(self, name: str, on_start: Callable[[], None]) -> None:
        super().__init__(name=name, daemon=True)
        self._on_start: Callable[[], None] | None = on_start
        self.inbox: SimpleQueue[tuple[Callable[[], Any], _Answer] | None] = SimpleQueue()
        self.was_left = False
        self.start()

    def run(self) -> None:
        while (item := self.inbox.get()) is not None:
            call, answer = item
            try:
                if self._on_start is not None:
                    self._on_start()
                    self._on_start = None
                answer.put((call(), None))
            except BaseException as error:
                answer.put((None, error))


class BoundedCalls:
    """Runs calls on threads and waits for each a limited time; thread-safe.

    A call that does not return keeps its thread, up to `MAX_LEFT_BEHIND` of them, so it must not
    access memory that the caller uses again. Every thread calls `on_start` first; a call whose
    thread cannot start fails.
    """

    def __init__(self, name: str, on_start: Callable[[], None] = lambda: None) -> None:
        self._name = name
        self._on_start = on_start
        self._lock = threading.Lock()  # guards what follows
        self._threads: list[_Thread] = []
        self._idle: list[_Thread] = []
        self._closed = False

    def run(self, call: Callable[[], T], timeout_s: float) -> T:
        """Return or raise what the call does.

        Raises:
            CallLeftBehind: The call takes longer.
            StoreUnreachable: Too many earlier calls have not returned.
        """
        thread = self._take()
        answer: _Answer = SimpleQueue()
        thread.inbox.put((call, answer))
        try:
            value, error = answer.get(timeout=timeout_s)
        except Empty:
            thread.was_left = True
            thread.inbox.put(None)  # it ends when its call returns
            raise CallLeftBehind(f"no answer within {timeout_s:g} s") from None
        with self._lock:
            if self._closed:
                thread.inbox.put(None)
            else:
                self._idle.append(thread)
        if error is not None:
            raise error
        return value  # type: ignore[no-any-return]

    def close(self, timeout_s: float) -> bool:
        """End the threads; whether all calls have returned."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            self._closed = True
            threads = [*self._threads]
            for thread in self._idle:
                thread.inbox.put(None)
            self._idle.clear()
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    @property
    def num_left_behind(self) -> int:
        """The number of calls that were left behind and have not returned."""
        with self._lock:
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            return sum(thread.was_left for thread in self._threads)

    def _take(self) -> _Thread:
        if self.num_left_behind >= MAX_LEFT_BEHIND:
            raise StoreUnreachable(f"{MAX_LEFT_BEHIND} earlier calls have not returned yet")
        with self._lock:
            if self._idle:
                return self._idle.pop()
            try:
                thread = _Thread(self._name, self._on_start)
            except RuntimeError as error:  # the process may have no more threads
                raise StoreUnreachable(f"no thread for a call of a store: {error}") from error
            self._threads.append(thread)
            return thread


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTimeouts:
    """Seconds that calls may take before the store counts as away."""

    call_s: float  # any call
    answer_s: float | None = None  # calls without buffers, which then raise; None for no limit


class GuardedStore:
    """Wraps a store that may be away; implements `Store`. Any thread may call.

    Calls without a buffer of the caller run on threads that are left behind after `answer_s`, those
    that go through the whole store after LISTING_S. Calls with buffers cannot be cut short here:
    `transfer/engine.py` watches over their memory. All threads of the guard are daemons.

    The constructor raises what the first attempt to open raised, except `StoreUnreachable`, after
    which it is retried in the background. `name` is for messages. Every thread of the guard calls
    `on_start` first; if that fails on the thread that opens, opening fails.
    """

    def __init__(
        self,
        open_store: Callable[[], Store],
        capabilities: Capabilities,
        name: str,
        timeouts: CallTimeouts,
        open_wait_s: float = OPEN_WAIT_S,
        clock: Callable[[], float] = time.monotonic,
        on_start: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_start = on_start
        self._open_store = open_store
        self._capabilities = capabilities
        self._name = name
        self._timeouts = timeouts
        self._clock = clock
        self._calls = BoundedCalls(f"kvpool-calls-{name}", on_start)
        self._end_calls = BoundedCalls(f"kvpool-end-{name}", on_start)
        self._state = threading.Condition()  # guards what follows
        self._store: Store | None = None
        self._closed = False
        self._num_calls = 0  # under way
        self._health = StoreHealth()
        self._buffers: list[Buffer] = []
        self._first_error: Exception | None = None
        self._logged_error = ""
        self._tried = False
        self._is_waited_for = True
        self._listeners: list[Listener] = []
        self._thread = threading.Thread(target=self._run, name=f"kvpool-guard-{name}", daemon=True)
        self._thread.start()
        error = self._first_try(open_wait_s)
        if error is not None and not isinstance(error, StoreUnreachable):
            self._end()
            raise error

    def _first_try(self, timeout_s: float) -> Exception | None:
        """Wait for the first attempt to open; its error, None if it has not failed so far."""
        with self._state:
            self._state.wait_for(lambda: self._tried, timeout_s)
            self._is_waited_for = False
            return self._first_error

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of the store when it was last open."""
        return self._capabilities

    @property
    def writable(self) -> bool:
        """True if the store takes cells; True until it was opened."""
        store = self._store
        return store is None or store.capabilities.writable

    @property
    def opened(self) -> bool:
        """True if the store has been opened."""
        return self._store is not None

    @property
    def trouble(self) -> str:
        """The error of the first attempt to open."""
        return str(self._first_error or f"{self._name} has not answered yet")

    def listen(self, listener: Listener) -> None:
        """Tell a listener which calls the store takes, now and at each change; any thread."""
        with self._state:
            self._listeners.append(listener)
            self._tell([listener])

    # The contract of a store

    def register(self, buffer: Buffer) -> None:
        """Register memory with the store, and again each time it is opened anew."""
        with self._state:
            self._buffers.append(buffer)
            store = self._store
        if store is not None:
            store.register(buffer)

    def unregister(self, buffer: Buffer) -> None:
        """Unregister memory; return after CLOSE_S even if the store hangs."""
        with self._state:
            self._buffers.remove(buffer)
            store = None if self._closed else self._store
        if store is not None:
            self._end_calls.run(partial(store.unregister, buffer), CLOSE_S)

    def exists(self, keys: Sequence[str]) -> list[bool]:
        """Return for each key whether its cell is stored; StoreUnreachable after `answer_s`."""
        return self._call(CallKind.QUERY, lambda store: store.exists(keys), self._timeouts.answer_s)

    def put(
        self, keys: Sequence[str], buffers: Sequence[Buffer], chunks: Sequence[ChunkRef]
    ) -> list[PutOutcome]:
        """Put without a time limit; a call whose keys all failed counts as the store's failure."""
        return self._call(
            CallKind.WRITE,
            lambda store: store.put(keys, buffers, chunks),
            has_failed=lambda each: each.count(PutOutcome.FAILED) == len(keys) > 0,
        )

    def get(self, keys: Sequence[str], buffers: Sequence[Buffer]) -> list[GetOutcome]:
        """Get without a time limit; a call whose keys all failed counts as the store's failure."""
        return self._call(
            CallKind.READ,
            lambda store: store.get(keys, buffers),
            has_failed=lambda each: each.count(GetOutcome.FAILED) == len(keys) > 0,
        )

    def remove(self, keys: Sequence[str]) -> int:
        """Remove cells without a time limit, and return how many there were."""
        return self._call(CallKind.WRITE, lambda store: store.remove(keys))

    def remove_namespace(self, namespace: str) -> int:
        """Remove a namespace's cells and return their number; for LISTING_S at most."""
        return self.go_through(lambda store: store.remove_namespace(namespace))

    def pin(self, keys: Sequence[str], until_ns: int) -> int:
        """Pin the stored keys until `until_ns` and return how many there are."""
        return self._call(CallKind.WRITE, lambda store: store.pin(keys, until_ns))

    def go_through(self, method: Callable[[Store], T]) -> T:
        """Run a call that goes through the whole store; its duration says nothing of the store.

        The call is left behind after `LISTING_S`, so `method` must not access the caller's memory.
        """
        longest_s = None if self._timeouts.answer_s is None else LISTING_S
        return self._call(CallKind.QUERY, method, longest_s, is_timed=False)

    def close(self) -> None:
        """Close the store; if a call does not end, leave it open.

        StoreUnreachable if the store's own `close` takes longer than `CLOSE_S`.
        """
        if not self._end():
            logger.warning("kvpool: store %s: not closed, as a call has not returned", self._name)
        elif self._store is not None:
            self._end_calls.run(self._store.close, CLOSE_S)
        self._end_calls.close(JOIN_S)

    def leave_open(self) -> None:
        """End the guard and leave the store open, as a call is under way."""
        self._end()
        self._end_calls.close(JOIN_S)

    # A call

    def _call(
        self,
        kind: CallKind,
        method: Callable[[Store], T],
        longest_s: float | None = None,
        *,
        has_failed: Callable[[T], bool] = lambda result: False,
        is_timed: bool = True,
    ) -> T:
        """Run a call and count its outcome; without `is_timed` its duration does not count."""
        store, began = self._begin(kind)
        failed, cause = True, ""  # also for exceptions that stores must not raise
        try:
            if longest_s is None:
                result = method(store)
            else:
                result = self._calls.run(partial(method, store), longest_s)
            failed = has_failed(result)
            return result
        except Exception as error:
            cause = str(error)
            raise
        finally:
            self._ended(kind, began if is_timed else None, failed=failed, cause=cause)

    def _begin(self, kind: CallKind) -> tuple[Store, float]:
        with self._state:
            store, access = self._store, self._health.access
            if access is StoreAccess.NONE or store is None or self._closed:
                raise StoreUnreachable(f"store {self._name} is unavailable")
            if kind is CallKind.WRITE and access is StoreAccess.READ:
                raise StoreUnreachable(f"store {self._name}: writes are paused")
            self._num_calls += 1
            return store, self._clock()

    def _ended(self, kind: CallKind, began: float | None, *, failed: bool, cause: str) -> None:
        with self._state:
            now = self._clock()
            self._num_calls -= 1
            if self._closed:
                self._state.notify_all()
                return
            began = now if began is None else began
            if why := self._health.call_ended(kind, began, now, failed=failed):
                self._note(why, cause)

    def report_hung(self, *, writes: bool = False, limit_s: float | None = None) -> None:
        """Count a call with buffers as hanging; called by who waits for it.

        `limit_s`: how long the call was waited for, if not `call_s`.
        """
        kind = CallKind.WRITE if writes else CallKind.READ
        with self._state:
            if self._closed:
                return
            limit_s = self._timeouts.call_s if limit_s is None else limit_s
            if why := self._health.call_hung(kind, self._clock(), limit_s):
                self._note(why)

    def _note(self, why: str, cause: str = "") -> None:
        """Log and tell that the access was restricted; `cause` is the error, if there was one."""
        self._logged_error = cause
        why = f"{why}: {cause}" if cause else why
        if self._health.access is StoreAccess.NONE:
            logger.warning("kvpool: store %s: unavailable: %s", self._name, why)
        else:
            pause_s = self._health.due - self._clock()
            logger.warning(
                "kvpool: store %s: no writes for %.1f s, reads go on: %s", self._name, pause_s, why
            )
        self._tell(self._listeners)

    def _recovered(self, why: str) -> None:
        """Allow all calls again, log and tell it."""
        self._health.recovered(self._clock())
        logger.info("kvpool: store %s: available: %s", self._name, why)
        self._tell(self._listeners)

    def _tell(self, listeners: Sequence[Listener]) -> None:
        """Call listeners, with the lock held, so they see changes in order."""
        access = self._health.access
        is_writable = access is not StoreAccess.READ and self.writable
        for listener in listeners:
            listener(access is not StoreAccess.NONE, is_writable)
        self._state.notify_all()

    # The guard's thread

    def _run(self) -> None:
        while True:
            with self._state:
                while not self._closed and (pause_s := self._pause_s()) > 0:
                    self._state.wait(None if pause_s == float("inf") else pause_s)
                if self._closed:
                    return
                if self._health.access is StoreAccess.READ:
                    self._recovered("writes are tried again")
                    continue
            try:
                if self._store is None:
                    self._try_open()
                else:
                    self._check(self._store)
            except Exception as error:
                self._not_yet(error)

    def _pause_s(self) -> float:
        """Return the seconds until the guard's thread has work."""
        return self._health.due - self._clock()

    def _try_open(self) -> None:
        self._on_start()
        store = self._open_store()
        registered: list[Buffer] = []
        try:
            while late := self._take_over(store, registered):
                for buffer in late:
                    store.register(buffer)
                registered += late
        finally:
            if self._store is not store:  # registering failed, or the guard was closed
                store.close()

    def _take_over(self, store: Store, registered: Sequence[Buffer]) -> list[Buffer]:
        """Use the store from now on, unless the buffers returned must be registered first."""
        with self._state:
            if self._closed:
                return []
            late = [buffer for buffer in self._buffers if buffer not in registered]
            if not late:
                self._store, self._tried = store, True
                self._recovered("opened")
            return late

    def _check(self, store: Store) -> None:
        longest = self._timeouts.answer_s or self._timeouts.call_s
        self._calls.run(lambda: store.exists([CHECK_KEY]), longest)
        with self._state:
            if not self._closed:
                self._recovered("it answers again")

    def _not_yet(self, error: Exception) -> None:
        with self._state:
            first, self._tried = not self._tried, True
            is_refusal = not isinstance(error, StoreUnreachable)
            is_news = is_refusal and str(error) != self._logged_error
            if first:
                self._first_error = error
            if self._is_waited_for:
                pass  # the constructor raises it, or its caller logs it
            elif first:
                logger.warning("kvpool: store %s: cannot be opened: %s", self._name, error)
            elif not isinstance(error, StoreError | ConfigError):
                logger.error("kvpool: store %s: opening it failed", self._name, exc_info=error)
            elif is_news:
                logger.warning("kvpool: store %s: still unavailable: %s", self._name, error)
            else:
                logger.debug("kvpool: store %s: still unavailable: %s", self._name, error)
            if first or is_news:
                self._logged_error = str(error)
            # So that engines which lost a store together do not retry together.
            self._health.probe_failed(self._clock(), PAUSE_JITTER * random.random())
            self._state.notify_all()

    def _end(self) -> bool:
        """End the guard's threads and wait for calls; whether all have ended."""
        until = time.monotonic() + JOIN_S
        with self._state:
            self._closed = True
            self._state.notify_all()
            no_calls = self._state.wait_for(lambda: not self._num_calls, JOIN_S)
        self._thread.join(max(0.0, until - time.monotonic()))
        none_left = self._calls.close(max(0.0, until - time.monotonic()))
        return no_calls and none_left and not self._thread.is_alive()
