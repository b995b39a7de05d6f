"""Calls that may be left behind: they run on a thread of their own, and their caller waits so long.

Only for calls that touch no memory of the caller's. A call that does not return keeps its thread;
the next call gets another one, up to `MAX_LEFT_BEHIND` of them, after which calls fail at once
until one has returned.
"""

import logging
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, TypeVar

from vllm_kvpool.errors import StoreUnreachable

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_LEFT_BEHIND = 4


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
    """See the module docstring. Any thread may call; each of several calls at once has a thread.

    Every thread calls `on_start` first; if that fails, so does every call on it.
    """

    def __init__(self, name: str, on_start: Callable[[], None] = lambda: None) -> None:
        self._name = name
        self._on_start = on_start
        self._lock = threading.Lock()  # guards what follows
        self._idle: list[_Thread] = []
        self._busy: set[_Thread] = set()  # somebody waits for them
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
