"""A store that may be away: it is opened again and again, and left alone while it fails.

`GuardedStore` stands before every store that an engine opens. While the store is away its calls
raise `StoreUnreachable` at once, so no caller waits for what is known not to answer. It is away

* until it could be opened, which is tried in the background, with growing pauses;
* after `FAILURES_TO_OPEN` calls in a row that ended with `StoreError`, or one that took longer than
  `SLOW_FAILURE_S` to do so;
* as soon as a call that reads has not returned for `call_timeout_s`.

Then a thread of the guard's own asks for a key until the store answers in time. So no request pays
for the attempt, however slowly it fails.

A call that writes (`put`, `remove`) and does not return says nothing of reads, which go on: after
it there is a pause, growing from call to call, in which writes fail at once.

`patience_s` bounds calls that lend the store no memory (`exists`, `remove_namespace`): they run on
a thread that can be left behind. Calls that read or write a caller's buffers cannot be cut short
here: their caller watches over the memory (`transfer/engine.py`).

Any thread may call. The guard's thread is a daemon and ends with `close`, or when what it waits for
returns; threads left behind end with their call, and there are at most `MAX_LEFT_BEHIND`.
"""

import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, TypeVar, cast

from vllm_kvpool.errors import ConfigError, StoreError, StoreUnreachable
from vllm_kvpool.storage.base import (
    Buffer,
    Capabilities,
    ChunkRef,
    EvictionCandidate,
    GetOutcome,
    PutOutcome,
    Shedding,
    Store,
)
from vllm_kvpool.storage.breaker import Breaker

logger = logging.getLogger(__name__)

T = TypeVar("T")

OPEN_WAIT_S = 10.0  # the engine's start waits so long for a store that neither opens nor fails
SLOW_FAILURE_S = 1.0  # a failure that took longer is enough
REMOVE_ALL_S = 60.0  # a namespace may be large
JOIN_S = 0.5
CLOSE_S = 2.0  # for the store's own end; vLLM leaves its workers about 4 s
PAUSE_JITTER = 0.25
CHECK_KEY = "kvpool-check"
MAX_LEFT_BEHIND = 4  # calls that have not returned; further calls fail at once until one has


class _Answer(NamedTuple):
    value: Any
    error: BaseException | None


class _Task(NamedTuple):
    call: Callable[[], Any]
    answer: "SimpleQueue[_Answer]"


class _Thread:
    """Runs the tasks of its inbox until it is told to end."""

    def __init__(self, name: str, on_start: Callable[[], None]) -> None:
        self._on_start = on_start
        self.inbox: SimpleQueue[_Task | None] = SimpleQueue()
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        started = _answer_of(self._on_start)
        while (task := self.inbox.get()) is not None:
            task.answer.put(_answer_of(task.call) if started.error is None else started)


def _answer_of(call: Callable[[], Any]) -> _Answer:
    try:
        return _Answer(call(), None)
    except BaseException as error:
        return _Answer(None, error)


class BoundedCalls:
    """Calls that may be left behind: each runs on a thread, and its caller waits a limited time.

    Only for calls that touch no memory of the caller's. A call that does not return keeps its
    thread; the next call gets another one, up to `MAX_LEFT_BEHIND` of them. Any thread may call.

    Every thread calls `on_start` first; if that fails, so does every call on it.
    """

    def __init__(self, name: str, on_start: Callable[[], None] = lambda: None) -> None:
        self._name = name
        self._on_start = on_start
        self._lock = threading.Lock()  # guards what follows
        self._idle: list[_Thread] = []
        self._busy: set[_Thread] = set()  # their callers wait
        self._left: list[_Thread] = []
        self._closed = False

    def run(self, call: Callable[[], T], timeout_s: float) -> T:
        """The call's result, or what it raised; StoreUnreachable if it takes too long."""
        thread = self._take()
        answer: SimpleQueue[_Answer] = SimpleQueue()
        thread.inbox.put(_Task(call, answer))
        try:
            value, error = answer.get(timeout=timeout_s)
        except Empty:
            self._leave(thread)
            raise StoreUnreachable(f"no answer in {timeout_s:g} s") from None
        self._give_back(thread)
        if error is not None:
            raise error
        return value  # type: ignore[no-any-return]

    def close(self, timeout_s: float) -> bool:
        """End the threads; whether no call is under way any more."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            self._closed = True
            threads = [*self._idle, *self._busy, *self._left]
            for thread in self._idle:
                thread.inbox.put(None)
            self._idle.clear()
        for thread in threads:
            thread.thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.thread.is_alive() for thread in threads)

    @property
    def num_left_behind(self) -> int:
        """Calls that have not returned in time, and still have not."""
        with self._lock:
            self._left = [thread for thread in self._left if thread.thread.is_alive()]
            return len(self._left)

    def _take(self) -> _Thread:
        if self.num_left_behind >= MAX_LEFT_BEHIND:
            raise StoreUnreachable(f"{MAX_LEFT_BEHIND} calls have not returned yet")
        with self._lock:
            thread = self._idle.pop() if self._idle else _Thread(self._name, self._on_start)
            self._busy.add(thread)
            return thread

    def _leave(self, thread: _Thread) -> None:
        thread.inbox.put(None)  # it ends when its call returns
        with self._lock:
            self._busy.remove(thread)
            self._left.append(thread)

    def _give_back(self, thread: _Thread) -> None:
        with self._lock:
            self._busy.remove(thread)
            if not self._closed:
                self._idle.append(thread)
                return
        thread.inbox.put(None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long a call may take before the store counts as away."""

    call_s: float  # any call
    answer_s: float | None = None  # `exists` and the like, which then end; None: as they please


class GuardedStore:
    """See the module docstring. Implements `Store`.

    Raises what the first attempt to open raised, except `StoreUnreachable`: then it is tried again
    in the background (`opened` tells). `name` is for messages. Every thread of the guard's own
    calls `on_start` first; if that fails on the thread that opens, so does opening.
    """

    def __init__(
        self,
        open_store: Callable[[], Store],
        capabilities: Capabilities,
        name: str,
        patience: Patience,
        open_wait_s: float = OPEN_WAIT_S,
        clock: Callable[[], float] = time.monotonic,
        on_start: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_start = on_start
        self._open_store = open_store
        self._capabilities = capabilities
        self._name = name
        self._patience = patience
        self._clock = clock
        self._calls = BoundedCalls(f"kvpool-calls-{name}", on_start)
        self._end_calls = BoundedCalls(f"kvpool-end-{name}", on_start)
        self._state = threading.Condition()  # guards what follows
        self._store: Store | None = None
        self._is_up = False
        self._closed = False
        self._breaker = Breaker()
        self._buffers: list[Buffer] = []
        self._running: dict[int, float] = {}  # reads under way, oldest first -> when they began
        self._writing: dict[int, float] = {}  # and writes
        self._writes = Breaker()
        self._num_calls = 0
        self._first_error: Exception | None = None
        self._tried = False
        self._is_waited_for = True
        self._listeners: list[Callable[[bool], None]] = []
        self._thread = threading.Thread(target=self._run, name=f"kvpool-guard-{name}", daemon=True)
        self._thread.start()
        error = self._first_try(open_wait_s)
        if error is not None and not isinstance(error, StoreUnreachable):
            self._end()
            raise error

    def _first_try(self, timeout_s: float) -> Exception | None:
        """Wait for the first attempt to open; how it failed, as far as is known."""
        with self._state:
            self._state.wait_for(lambda: self._tried, timeout_s)
            self._is_waited_for = False
            return self._first_error

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    @property
    def writable(self) -> bool:
        """Whether saves may go to the store, as far as is known by now."""
        store = self._store
        return store is None or store.capabilities.writable

    @property
    def opened(self) -> bool:
        """Whether the store has been opened by now."""
        return self._store is not None

    @property
    def trouble(self) -> str:
        """Why the store could not be opened at first."""
        return str(self._first_error or f"{self._name} has not answered yet")

    def listen(self, listener: Callable[[bool], None]) -> None:
        """Tell whether the store is there, now and at every change; from whichever thread."""
        with self._state:
            self._listeners.append(listener)
            listener(self._is_up)

    # The contract of a store

    def register(self, buffer: Buffer) -> None:
        with self._state:
            self._buffers.append(buffer)
            store = self._store
        if store is not None:
            store.register(buffer)

    def unregister(self, buffer: Buffer) -> None:
        with self._state:
            self._buffers.remove(buffer)
            store = self._store
        if store is not None:
            self._end_calls.run(partial(store.unregister, buffer), CLOSE_S)

    def exists(self, keys: Sequence[str]) -> list[bool]:
        return self._call(lambda store: store.exists(keys), self._patience.answer_s)

    def put(
        self, keys: Sequence[str], buffers: Sequence[Buffer], chunks: Sequence[ChunkRef]
    ) -> list[PutOutcome]:
        return self._call(lambda store: store.put(keys, buffers, chunks), writes=True)

    def get(self, keys: Sequence[str], buffers: Sequence[Buffer]) -> list[GetOutcome]:
        return self._call(lambda store: store.get(keys, buffers))

    def remove(self, keys: Sequence[str]) -> int:
        return self._call(lambda store: store.remove(keys), writes=True)

    def remove_namespace(self, namespace: str) -> int:
        longest = None if self._patience.answer_s is None else REMOVE_ALL_S
        return self._call(lambda store: store.remove_namespace(namespace), longest, aside=True)

    def surplus(self, max_keys: int) -> list[EvictionCandidate]:
        """See `Shedding`."""
        if not self.writable:
            return []
        return self._call(lambda store: cast("Shedding", store).surplus(max_keys), aside=True)

    def surplus_done(self) -> None:
        """See `Shedding`."""
        if self.writable:
            self._call(lambda store: cast("Shedding", store).surplus_done(), aside=True)

    def close(self) -> None:
        """Close the store; one that is still being opened or asked is closed, or left, later.

        StoreUnreachable if the store's own end takes longer than `CLOSE_S`.
        """
        if not self._end():
            logger.warning(
                "kvpool: store %s: a call does not end; the store stays open", self._name
            )
        elif self._store is not None:
            self._end_calls.run(self._store.close, CLOSE_S)
        self._end_calls.close(JOIN_S)

    def leave(self) -> None:
        """End the guard alone: a call is still under way, so the store cannot be closed."""
        self._end()
        self._end_calls.close(JOIN_S)

    # A call

    def _call(
        self,
        method: Callable[[Store], T],
        longest_s: float | None = None,
        *,
        aside: bool = False,
        writes: bool = False,
    ) -> T:
        """Run a call and learn from it; `aside`: however long it takes says nothing."""
        ticket, store = self._begin(aside=aside, writes=writes)
        failed = False
        try:
            if longest_s is None:
                return method(store)
            return self._calls.run(partial(method, store), longest_s)
        except Exception:
            failed = True  # an exception that no store may raise says no more of its keys
            raise
        finally:
            self._ended(ticket, failed)

    def _begin(self, *, aside: bool, writes: bool) -> tuple[int | None, Store]:
        with self._state:
            now = self._clock()
            oldest = next(iter(self._running.values()), now)
            if self._is_up and now - oldest > self._patience.call_s:
                self._went_away("a call has not returned", now)
            store = self._store
            if not self._is_up or store is None or self._closed:
                raise StoreUnreachable(f"{self._name} is away")
            if writes:
                self._drop_late_writes(now)
                if self._writes.is_open(now):
                    raise StoreUnreachable(f"{self._name} takes no writes for now")
            if aside:
                return None, store
            self._num_calls += 1
            (self._writing if writes else self._running)[self._num_calls] = now
            return self._num_calls, store

    def _drop_late_writes(self, now: float) -> None:
        """A write that has not returned in time is followed by a pause, once."""
        latest = now - self._patience.call_s
        num_late = sum(began < latest for began in self._writing.values())
        if num_late:
            self._writing = {call: t for call, t in self._writing.items() if t >= latest}
            self._pause_writes(now)

    def _pause_writes(self, now: float) -> None:
        if self._writes.tripped(now):
            logger.warning(
                "kvpool: %s has not returned from a write within call_timeout_s=%g: no writes for "
                "%.1f s, reads go on",
                self._name,
                self._patience.call_s,
                self._writes.pause_s,
            )

    def _ended(self, ticket: int | None, failed: bool) -> None:
        with self._state:
            now = self._clock()
            calls = self._writing if ticket in self._writing else self._running
            began = now if ticket is None else calls.pop(ticket, None)
            if began is None or not self._is_up:
                return  # no news, or no news any more
            if not failed:
                self._breaker.succeeded()
                if calls is self._writing:
                    self._writes.succeeded()
            elif now - began > SLOW_FAILURE_S:
                self._went_away(f"a call failed after {now - began:.1f} s", now)
            elif self._breaker.failed(now):
                self._change(False, "calls fail")

    def report_stuck(self, *, writes: bool = False) -> None:
        """A caller has waited for a call in vain."""
        with self._state:
            now = self._clock()
            if not writes:
                self._went_away("a call has not returned", now)
            elif self._writing:
                self._writing.pop(next(iter(self._writing)))
                self._pause_writes(now)

    def _went_away(self, why: str, now: float) -> None:
        if self._is_up:
            self._breaker.tripped(now)
            self._change(False, why)

    def _change(self, is_up: bool, why: str) -> None:
        """Called with the lock held, so that listeners hear of changes in their order."""
        self._is_up = is_up
        level = logging.INFO if is_up else logging.WARNING
        state = "available" if is_up else "unavailable"
        logger.log(level, "kvpool: store %s: %s: %s", self._name, state, why)
        for listener in self._listeners:
            listener(is_up)
        self._state.notify_all()

    # The guard's thread

    def _run(self) -> None:
        while True:
            with self._state:
                while not self._closed and (pause_s := self._pause_s()) > 0:
                    self._state.wait(None if pause_s == float("inf") else pause_s)
                if self._closed:
                    return
            try:
                if self._store is None:
                    self._try_open()
                else:
                    self._check(self._store)
            except Exception as error:
                self._not_yet(error)

    def _pause_s(self) -> float:
        """Until there is something to do."""
        if self._is_up:
            return float("inf")
        return self._breaker.closed_at - self._clock()

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
        """Use the store from now on, unless these buffers are still to be registered with it."""
        with self._state:
            if self._closed:
                return []
            late = [buffer for buffer in self._buffers if buffer not in registered]
            if not late:
                self._store, self._tried = store, True
                self._change(True, "opened")
            return late

    def _check(self, store: Store) -> None:
        longest = self._patience.answer_s or self._patience.call_s
        self._calls.run(lambda: store.exists([CHECK_KEY]), longest)
        with self._state:
            if self._closed:
                return
            # Calls that are still waited for elsewhere are no news any more.
            latest = self._clock() - self._patience.call_s
            self._running = {call: t for call, t in self._running.items() if t > latest}
            self._change(True, "it answers again")

    def _not_yet(self, error: Exception) -> None:
        with self._state:
            first, self._tried = not self._tried, True
            if first:
                self._first_error = error
            if self._is_waited_for:
                pass  # the caller that waits logs it
            elif first:
                logger.warning("kvpool: store %s: cannot be opened: %s", self._name, error)
            elif not isinstance(error, StoreError | ConfigError):
                logger.error("kvpool: store %s: opening it failed", self._name, exc_info=error)
            else:
                logger.debug("kvpool: store %s: still unavailable: %s", self._name, error)
            self._breaker.tripped(self._clock())
            # Engines that lost a store together shall not come back together.
            self._breaker.closed_at += self._breaker.pause_s * PAUSE_JITTER * random.random()
            self._state.notify_all()

    def _end(self) -> bool:
        """End the guard's threads; whether they have ended."""
        with self._state:
            self._closed, self._is_up = True, False
            self._state.notify_all()
        self._thread.join(JOIN_S)
        no_calls = self._calls.close(JOIN_S)
        return no_calls and not self._thread.is_alive()
