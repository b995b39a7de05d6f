"""A guarded store on a bench: what it stands before is scripted, and time passes when told to.

The guard's own thread waits in real seconds for a time of the fake clock; `pass_time` wakes it.
"""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue

import pytest

from tests.support.buffers import make_buffer
from tests.support.fakes import FakeClock
from tests.support.faults import Fault, FaultyStore
from tests.support.memory_store import CAPABILITIES, MemoryStore
from vllm_kvpool.errors import StoreError, StoreUnreachable
from vllm_kvpool.storage.base import Buffer, ChunkRef, GetOutcome, PutOutcome
from vllm_kvpool.storage.guarded import CallTimeouts, GuardedStore

LIMIT_S = 10.0
SHORT_S = 0.05  # a wait that is in vain
ANSWER_S = 0.25  # so long answers are waited for where they are
BOUND_S = 3.0  # what is to end soon has ended, on a machine with other things to do
CALL_S = 5.0
LONG_S = 100.0  # after it every pause is over
NAME = "stage"
THREADS = (f"kvpool-guard-{NAME}", f"kvpool-calls-{NAME}")
GUARD_LOG = "vllm_kvpool.storage.guarded"
BUFFERS = [make_buffer(100) for _ in range(4)]


class Inner(MemoryStore):
    """Tells what is done with it besides calls."""

    def __init__(self) -> None:
        super().__init__("", 1 << 20)
        self.told: list[str] = []
        self.on_register: Callable[[Buffer], None] = lambda buffer: None
        self.sheds: list[tuple[str, int]] = []

    def register(self, buffer: Buffer) -> None:
        self.on_register(buffer)
        self.told.append(f"register {name_of(buffer)}")

    def unregister(self, buffer: Buffer) -> None:
        self.told.append(f"unregister {name_of(buffer)}")

    def close(self) -> None:
        self.told.append("close")


def name_of(buffer: Buffer) -> int:
    return next(i for i, each in enumerate(BUFFERS) if each is buffer)


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name in THREADS]


class Stage:
    """`troubles` are raised by attempts to open, one after another, until none is left."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.inner = Inner()
        self.store = FaultyStore(self.inner, self._slow)
        self.troubles: list[Exception] = []
        self.attempts = 0
        self.slow_s = 0.0
        self.on_open: Callable[[], None] = lambda: None
        self.heard: list[bool] = []  # whether the store is up, each time that changed
        self.heard_writable: list[bool] = []  # whether it takes writes, likewise
        self._news: SimpleQueue[bool] = SimpleQueue()
        self._guard: GuardedStore | None = None

    def _slow(self) -> None:
        self.clock.advance(self.slow_s)

    def _open(self) -> FaultyStore:
        self.attempts += 1
        self.on_open()
        if self.troubles:
            raise self.troubles.pop(0)
        return self.store

    @property
    def guard(self) -> GuardedStore:
        assert self._guard is not None
        return self._guard

    def start(self, *, answer_s: float | None = None, open_wait_s: float = LIMIT_S) -> GuardedStore:
        timeouts = CallTimeouts(call_s=CALL_S, answer_s=answer_s)
        self._guard = GuardedStore(
            self._open, CAPABILITIES, NAME, timeouts, open_wait_s, self.clock
        )
        self._guard.listen(self._hear)
        return self._guard

    def _hear(self, is_up: bool, is_writable: bool) -> None:
        if [is_writable] != self.heard_writable[-1:]:
            self.heard_writable.append(is_writable)
        if [is_up] != self.heard[-1:]:
            self.heard.append(is_up)
            self._news.put(is_up)

    def next_news(self) -> bool:
        """Wait for the guard's next report and return True if it says that the store is up."""
        return self._news.get(timeout=LIMIT_S)

    def no_news(self) -> bool:
        try:
            self._news.get(timeout=SHORT_S)
        except Empty:
            return True
        return False

    def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)
        with self.guard._state:
            self.guard._state.notify_all()

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Until a thread has done something: the guard's, which says so, or another."""
        with self.guard._state:
            tries = int(LIMIT_S / SHORT_S)
            assert any(self.guard._state.wait_for(condition, SHORT_S) for _ in range(tries))

    def fail(self, times: int = 1, method: str = "exists") -> None:
        """Calls that fail at once."""
        self.store.inject(Fault.ERROR, method, times=times)
        for _ in range(times):
            with pytest.raises(StoreError, match="injected"):
                self.call(method)

    def call(self, method: str) -> object:
        calls: dict[str, Callable[[], object]] = {
            "exists": self.exists,
            "get": self.get,
            "put": self.put,
            "remove": lambda: self.guard.remove(["key"]),
        }
        return calls[method]()

    def exists(self) -> list[bool]:
        return self.guard.exists(["key"])

    def get(self) -> list[GetOutcome]:
        return self.guard.get(["key"], [BUFFERS[0]])

    def put(self) -> list[PutOutcome]:
        return self.guard.put(["key"], [BUFFERS[0]], [ChunkRef("")])

    def is_away(self) -> bool:
        """Return True if every call fails at once and none reaches the store."""
        before = self.store.calls.copy()
        calls: list[Callable[[], object]] = [
            lambda: self.guard.exists(["key"]),
            self.put,
            lambda: self.guard.get(["key"], [BUFFERS[0]]),
            lambda: self.guard.remove(["key"]),
            lambda: self.guard.remove_namespace("n"),
        ]
        for call in calls:
            try:
                call()
            except StoreUnreachable:
                continue
            return False
        return self.store.calls == before

    def go_away(self) -> None:
        """The store is away from now on, and does not answer until it is healed."""
        self.store.inject(Fault.UNREACHABLE, "exists")
        self.guard.report_hung()
        assert self.next_news() is False

    @contextmanager
    def hanging(self, call: Callable[[], object]) -> Iterator[list[object]]:
        """While another thread hangs in a call, which is let go at the end; what it gave then."""
        ends: list[object] = []

        def run() -> None:
            try:
                ends.append(call())
            except StoreError as error:
                ends.append(error)

        caller = threading.Thread(target=run)
        caller.start()
        try:
            assert self.store.entered.wait(LIMIT_S)
            yield ends
        finally:
            self.store.release()
            caller.join(LIMIT_S)
            assert not caller.is_alive()


@contextmanager
def stage() -> Iterator[Stage]:
    """A stage that is cleared: afterwards no thread is left."""
    stage = Stage()
    log = logging.getLogger(GUARD_LOG)
    try:
        yield stage
    finally:
        stage.store.heal()
        log.setLevel(logging.NOTSET)
        if stage._guard is not None:
            stage._guard.close()
        for thread in threads():
            thread.join(LIMIT_S)
            assert not thread.is_alive(), thread.name
