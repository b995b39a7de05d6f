"""A store that may be away: how it is opened, what is registered with it, and how it ends."""

import logging
import random
import threading
import time
from collections.abc import Iterator

import pytest

from tests.storage import guard_bench
from tests.storage.guard_bench import (
    ANSWER_S,
    AWAY,
    BOUND_S,
    BUFFERS,
    GUARD_LOG,
    LIMIT_S,
    LONG_S,
    SHORT_S,
    Stage,
    scripts,
)
from tests.support.faults import Fault
from tests.support.memory_store import CAPABILITIES, MemoryStore
from tests.support.scripts import Example
from tests.support.store_contract import StoreContract
from vllm_kvpool.errors import ConfigError, StoreError, StoreUnreachable
from vllm_kvpool.storage.base import Buffer, Store
from vllm_kvpool.storage.breaker import FIRST_PAUSE_S, LONGEST_PAUSE_S
from vllm_kvpool.storage.guarded import PAUSE_JITTER, CallTimeouts, GuardedStore


@pytest.fixture
def stage() -> Iterator[Stage]:
    with guard_bench.stage() as stage:
        yield stage


class TestGuardedStore(StoreContract):
    @pytest.fixture
    def store(self) -> Iterator[Store]:
        inner = MemoryStore("", 64 << 20)
        timeouts = CallTimeouts(call_s=LIMIT_S, answer_s=LIMIT_S)
        store = GuardedStore(lambda: inner, CAPABILITIES, "contract", timeouts)
        yield store
        store.close()


# Opening


@scripts(
    """
store that cannot be reached is opened later, and registers what is in use then
    away 2; trouble -> nobody answers; unused
    register 0; register 1; register 2; unregister 1; pass; attempts 2; seen -> nothing
    pass; news -> up; seen -> register 0 | register 2; exists -> False; opened 3
memory that is registered once the store is open goes straight through
    up; register 1; unregister 1; seen -> register 1 | unregister 1
log says once that a store which was away refuses
    away 2; refuse no such bucket; refuse no such bucket; unreachable; refuse no such bucket
    each 2-6: pass; attempts $
    warned -> still unavailable: no such bucket
log says once why a store fails, for calls and for probes
    up; fail exists 3; inject error exists; pass; asked 4; pass; asked 5
    warned -> unavailable: 3 query calls in a row failed: injected
log names a refusal again after the store recovered and hung
    up
    each 1 3: inject error exists; hung; news -> away; pass; asked $; heal; pass; news -> up
    warned -> only still unavailable: injected | still unavailable: injected
store is not closed under a call with memory of its caller, as of a thread of `kvpool serve`
    up; hang get; abandon; release -> answer
store that is closed while it is away needs no pause
    away; close; warned -> no not closed; seen -> nothing
"""
)
def test_store_is_opened_when_it_can_be_reached(example: Example) -> None:
    guard_bench.play(example)


def test_a_store_that_is_there_is_opened_at_once(stage: Stage) -> None:
    stage.on_open = lambda: time.sleep(SHORT_S)  # it takes a moment
    guard = stage.start()
    assert guard.opened
    assert guard.capabilities is CAPABILITIES
    assert stage.heard == [True]
    assert guard.exists(["key"]) == [False]
    assert stage.attempts == 1


@pytest.mark.parametrize("error", [ConfigError("bad"), RuntimeError("bug"), StoreError("broken")])
def test_what_the_first_attempt_says_is_raised_and_no_thread_is_left(
    stage: Stage, error: Exception
) -> None:
    stage.on_open = lambda: time.sleep(SHORT_S)
    stage.troubles = [error]
    with pytest.raises(type(error), match=str(error)):
        stage.start()
    assert guard_bench.threads() == []
    assert stage.attempts == 1


@pytest.mark.parametrize("error", [ConfigError("bad"), RuntimeError("bug"), StoreError("broken")])
def test_what_a_later_attempt_says_is_survived(
    stage: Stage, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    stage.troubles = [AWAY, error]
    with caplog.at_level(logging.ERROR, GUARD_LOG):
        stage.start()
        assert stage.next_news() is False
        stage.pass_time(LONG_S)
        stage.wait_until(lambda: stage.attempts == 2 and stage.guard._pause_s() > 0)
        assert stage.is_away()
    assert len(caplog.records) == isinstance(error, RuntimeError)
    stage.pass_time(LONG_S)
    assert stage.next_news() is True


def test_pauses_grow_are_bounded_and_are_not_the_same_everywhere(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    draws = [0.0, 1.0] * 6
    drawn = iter(draws)
    monkeypatch.setattr(random, "random", lambda: next(drawn))
    stage.troubles = [AWAY] * len(draws)
    guard = stage.start()
    pauses = [guard._pause_s()]
    for attempt in range(2, len(draws) + 1):
        stage.pass_time(pauses[-1])
        stage.wait_until(lambda n=attempt: stage.attempts == n and guard._pause_s() > 0)
        pauses.append(guard._pause_s())
    expected = [
        min(FIRST_PAUSE_S * 2**i, LONGEST_PAUSE_S) * (1 + PAUSE_JITTER * draw)
        for i, draw in enumerate(draws)
    ]
    assert pauses == pytest.approx(expected)
    stage.pass_time(pauses[-1] - 0.01)
    assert stage.no_news() is False  # what was heard at first
    assert stage.no_news()
    stage.pass_time(0.02)
    assert stage.next_news() is True


def test_opening_that_hangs_does_not_hold_up_the_start(stage: Stage) -> None:
    go_on = threading.Event()
    stage.on_open = lambda: go_on.wait(LIMIT_S) and None
    began = time.monotonic()
    guard = stage.start(open_wait_s=SHORT_S)
    assert time.monotonic() - began < BOUND_S
    assert not guard.opened
    assert "has not answered yet" in guard.trouble
    assert stage.next_news() is False
    assert stage.is_away()
    guard.register(BUFFERS[0])
    go_on.set()
    assert stage.next_news() is True
    assert stage.inner.told == ["register 0"]
    assert guard.exists(["key"]) == [False]
    assert stage.attempts == 1


def test_opening_that_fails_late_is_tried_again_whatever_it_says(stage: Stage) -> None:
    go_on = threading.Event()
    stage.on_open = lambda: go_on.wait(LIMIT_S) and None
    stage.troubles = [ConfigError("bad")]
    guard = stage.start(open_wait_s=SHORT_S)
    assert stage.next_news() is False
    go_on.set()
    stage.wait_until(lambda: guard._pause_s() > 0)
    assert guard.trouble == "bad"
    stage.pass_time(LONG_S)
    assert stage.next_news() is True


# Memory that is registered


def test_memory_that_comes_while_others_is_registered_is_registered_too(stage: Stage) -> None:
    stage.troubles = [AWAY]
    guard = stage.start()
    assert stage.next_news() is False

    def another(buffer: Buffer) -> None:
        number = guard_bench.name_of(buffer)
        assert stage.heard == [False]
        if number < 3:
            guard.register(BUFFERS[number + 1])

    stage.inner.on_register = another
    guard.register(BUFFERS[0])
    stage.pass_time(LONG_S)
    assert stage.next_news() is True
    assert stage.inner.told == [f"register {i}" for i in range(4)]


def test_registering_does_not_wait_for_that_of_others(stage: Stage) -> None:
    """The guard holds no lock during calls of the store, since registering may take long."""
    stage.troubles = [AWAY]
    guard = stage.start()
    assert stage.next_news() is False
    inside, go_on = threading.Event(), threading.Event()

    def hang(buffer: Buffer) -> None:
        if guard_bench.name_of(buffer) == 0:
            guard.register(BUFFERS[1])
        else:
            inside.set()
            assert go_on.wait(LIMIT_S)

    stage.inner.on_register = hang
    guard.register(BUFFERS[0])
    stage.pass_time(LONG_S)
    assert inside.wait(LIMIT_S)
    calls = threading.Thread(target=lambda: (stage.is_away(), guard.register(BUFFERS[2])))
    calls.start()
    calls.join(BOUND_S)
    assert not calls.is_alive()
    go_on.set()
    assert stage.next_news() is True
    assert stage.inner.told == ["register 0", "register 1", "register 2"]


@pytest.mark.parametrize("bad", [0, 1], ids=["first", "late"])
@pytest.mark.parametrize("error", [StoreError("no memory"), RuntimeError("bug")])
def test_a_store_that_takes_no_memory_is_closed_and_opened_again(
    stage: Stage, bad: int, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    """The store must not be used with memory that it has not registered."""
    caplog.set_level(logging.CRITICAL, GUARD_LOG)
    stage.troubles = [AWAY]
    guard = stage.start()
    assert stage.next_news() is False

    def refuse(buffer: Buffer) -> None:
        number = guard_bench.name_of(buffer)
        if stage.attempts == 2 and number == 0:
            guard.register(BUFFERS[1])
        if stage.attempts == 2 and number == bad:
            raise error

    stage.inner.on_register = refuse
    guard.register(BUFFERS[0])
    stage.pass_time(LONG_S)
    stage.wait_until(lambda: stage.attempts == 2 and guard._pause_s() > 0)
    assert stage.is_away()
    assert not guard.opened
    assert stage.inner.told == ["register 0"] * bad + ["close"]
    stage.pass_time(LONG_S)
    assert stage.next_news() is True
    assert stage.inner.told[bad + 1 :] == ["register 0", "register 1"]
    assert stage.attempts == 3


# The end


def test_closing_closes_the_store_once_and_ends_every_thread(stage: Stage) -> None:
    guard = stage.start(answer_s=LIMIT_S)
    guard.exists(["key"])
    guard.register(BUFFERS[0])
    guard.unregister(BUFFERS[0])
    stage._guard = None
    guard.close()
    assert stage.inner.told == ["register 0", "unregister 0", "close"]
    assert guard_bench.threads() == []
    with pytest.raises(StoreUnreachable):
        guard.exists(["key"])
    assert stage.store.calls["exists"] == 1


@pytest.mark.parametrize("moment", ["opening", "registering"])
def test_a_store_that_is_opened_too_late_is_closed_and_never_used(
    stage: Stage, moment: str
) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def hang(buffer: Buffer | None = None) -> None:
        if stage.attempts == 2:
            inside.set()
            assert go_on.wait(LIMIT_S)

    if moment == "opening":
        stage.on_open = hang
    else:
        stage.inner.on_register = hang
    stage.troubles = [AWAY]
    guard = stage.start()
    assert stage.next_news() is False
    guard.register(BUFFERS[0])
    stage.pass_time(LONG_S)
    assert inside.wait(LIMIT_S)
    stage.abandon()
    [thread] = guard_bench.threads()
    go_on.set()
    thread.join(LIMIT_S)
    assert not thread.is_alive()
    assert stage.inner.told == ["register 0"] * (moment == "registering") + ["close"]
    assert stage.store.calls == {"close": 1}
    assert stage.no_news()


def test_closing_while_the_store_is_asked_leaves_it_and_no_thread_for_ever(stage: Stage) -> None:
    guard = stage.start(answer_s=LIMIT_S)
    assert stage.next_news() is True
    assert guard.exists(["key"]) == [False]  # its thread is idle now
    together = threading.Barrier(2)
    stage.store.faults.on_call = lambda *call: together.wait(LIMIT_S) and None
    callers = [threading.Thread(target=guard.exists, args=(["key"],)) for _ in range(2)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(LIMIT_S)
    stage.store.faults.on_call = lambda *call: None
    stage.store.inject(Fault.BLOCKED, "exists")
    guard.report_hung()
    stage.pass_time(LONG_S)
    assert stage.store.entered.wait(LIMIT_S)
    stage.abandon()
    stage.store.release()
    for thread in guard_bench.threads():
        thread.join(LIMIT_S)
    assert guard_bench.threads() == []


def test_closing_with_a_call_left_behind_is_bounded_and_says_so(stage: Stage) -> None:
    guard = stage.start(answer_s=ANSWER_S)
    stage.store.inject(Fault.BLOCKED, "exists")
    for _ in range(2):
        with pytest.raises(StoreUnreachable, match="no answer"):
            guard.exists(["key"])
    stage.abandon()
