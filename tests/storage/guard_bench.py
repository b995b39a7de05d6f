"""A guarded store on a bench: what it stands before is scripted, and time passes when told to.

The guard's own thread waits in real seconds for a time of the fake clock; `pass_time` wakes it.
`scripts` marks a test with examples in words (`tests/support/scripts.py`): they begin with `up`,
`hasty` (calls have little time) or `away 2` (so many attempts to open fail), and then

- call the guard (`get`, `fail get 3`: so many failures), and compare what it answers;
- have the store fail (`inject error get times=2`, `slow 1.1`), or not any more (`heal`);
- have a second thread call (`hang put error`: it waits until `release`, and is refused then), and
  close the guard meanwhile (`abandon`);
- have attempts to open fail (`refuse no such bucket`, `unreachable`), and wait: `attempts 2`;
- let time pass (`pass 0.5`, `pass`: until every pause is over), or tell of a call (`hung writes`);
- look: `news`, `quiet`, `heard`, `writable`, `warned`, `unused` (no call reaches the store),
  `asked 2` (in vain), `opened 3` (at the third attempt), `seen` (what it was told besides calls).
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import pytest

from tests.support.buffers import make_buffer
from tests.support.fakes import FakeClock
from tests.support.faults import Fault, FaultyStore
from tests.support.memory_store import CAPABILITIES, MemoryStore
from tests.support.scripts import Example, examples
from vllm_kvpool.errors import ConfigError, StoreError, StoreUnreachable
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
        self.warned: list[str] = []  # the guard's warnings, without the store's name
        self._news: SimpleQueue[bool] = SimpleQueue()
        self._guard: GuardedStore | None = None
        self.hung = ExitStack()  # ends the call that hangs
        self.ends: list[object] = []

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
            "remove_namespace": lambda: self.guard.remove_namespace("n"),
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

    def abandon(self) -> None:
        """Close the guard while a call hangs: soon, with a warning, and not the store."""
        began = time.monotonic()
        self.guard.close()
        assert time.monotonic() - began < BOUND_S
        assert "not closed, as a call has not returned" in self.warned
        assert "close" not in self.inner.told

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
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: stage.warned.append(  # type: ignore[method-assign]
        record.getMessage().removeprefix(f"kvpool: store {NAME}: ")
    )
    log.addHandler(handler)
    try:
        yield stage
    finally:
        stage.store.heal()
        log.setLevel(logging.NOTSET)
        log.removeHandler(handler)
        if stage._guard is not None:
            stage._guard.close()
        for thread in threads():
            thread.join(LIMIT_S)
            assert not thread.is_alive(), thread.name


# Scripts


AWAY = StoreUnreachable("nobody answers")


def _begin(stage: Stage, how: str, troubles: str = "1") -> Stage:
    stage.troubles = [AWAY] * int(troubles) if how == "away" else []
    stage.start(answer_s=ANSWER_S if how == "hasty" else None)
    assert stage.next_news() is (how != "away")
    return stage


def _answer(stage: Stage, method: str) -> list[str]:
    """Call the guard and say what it answers in a word."""
    try:
        found = stage.call(method)
    except StoreUnreachable as error:
        words = {"writes are paused": "paused", "no answer": "unanswered"}
        return [next((say for text, say in words.items() if text in str(error)), "unreachable")]
    except StoreError:
        return ["error"]
    except RuntimeError:
        return ["bug"]
    [answer] = found if isinstance(found, list) else [found]
    return [answer.value if isinstance(answer, GetOutcome | PutOutcome) else str(answer)]


def _inject(stage: Stage, fault: str, method: str, times: int | None = None) -> None:
    stage.store.inject(Fault(fault), method, times=times)


def _hang(stage: Stage, method: str, end: str = "") -> None:
    stage.store.inject(Fault.BLOCKED, method)
    if end:
        stage.store.inject(Fault(end), method)
    stage.ends = stage.hung.enter_context(stage.hanging(lambda: stage.call(method)))


def _release(stage: Stage) -> list[str]:
    """Let the call that hangs go on, and say how it has ended."""
    stage.hung.close()
    [end] = stage.ends
    return ["error" if isinstance(end, StoreError) else "answer"]


def _slow(stage: Stage, seconds: str) -> None:
    stage.slow_s = float(seconds)
    stage.store.inject(Fault.SLOW, "exists")


def _attempts(stage: Stage, number: str) -> None:
    """Wait until so many attempts to open have ended, the last one without success."""
    stage.wait_until(lambda: stage.attempts == int(number) and stage.guard._pause_s() > 0)


def _asked(stage: Stage, number: str) -> None:
    """Wait until the store has been asked so often, the last time in vain."""
    calls = stage.store.calls
    stage.wait_until(lambda: calls["exists"] == int(number) and stage.guard._pause_s() > 0)


def _close(stage: Stage) -> None:
    stage.guard.close()
    assert not threads()


def _opened(stage: Stage, attempts: str) -> None:
    assert stage.guard.opened
    assert stage.attempts == int(attempts)


def _never_called(stage: Stage) -> None:
    assert stage.is_away()


def _quiet(stage: Stage) -> None:
    assert stage.no_news()


VERBS: dict[str, Callable[..., Any]] = {
    "abandon": Stage.abandon,
    **{
        name: lambda stage, name=name: _answer(stage, name)
        for name in ("exists", "get", "put", "remove")
    },
    "asked": _asked,
    "attempts": _attempts,
    "close": _close,
    "fail": lambda stage, method, times: stage.fail(int(times), method),
    "hang": _hang,
    "heal": lambda stage: stage.store.heal(),
    "heard": lambda stage: [" ".join("up" if each else "away" for each in stage.heard)],
    "hung": lambda stage, *writes: stage.guard.report_hung(writes=bool(writes)),
    "inject": _inject,
    "late": lambda stage, seconds: stage.clock.advance(float(seconds)),
    "leave": Stage.go_away,
    "news": lambda stage: ["up" if stage.next_news() else "away"],
    "opened": _opened,
    "pass": lambda stage, seconds=LONG_S: stage.pass_time(float(seconds)),
    "quiet": _quiet,
    "register": lambda stage, number: stage.guard.register(BUFFERS[int(number)]),
    "release": _release,
    "refuse": lambda stage, *why: stage.troubles.append(ConfigError(" ".join(why))),
    "seen": lambda stage: stage.inner.told,
    "slow": _slow,
    "trouble": lambda stage: [stage.guard.trouble],
    "unreachable": lambda stage: stage.troubles.append(AWAY),
    "unregister": lambda stage, number: stage.guard.unregister(BUFFERS[int(number)]),
    "unused": _never_called,
    "warned": lambda stage: stage.warned,
    "writable": lambda stage: [" ".join("yes" if each else "no" for each in stage.heard_writable)],
    "writes": lambda stage: stage.wait_until(lambda: stage.heard_writable[-1]),
}


def scripts(text: str) -> pytest.MarkDecorator:
    """Return a mark: the test's parameter `example` is each script of the text."""
    return examples(text, _begin, VERBS)


def play(example: Example) -> None:
    """Play a script on a stage that is cleared at its end."""
    with stage() as made, made.hung:
        example._replace(begin=partial(example.begin, made)).play()
