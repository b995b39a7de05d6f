"""Calls that may be left behind."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.support.threads import few_threads
from tests.support.waiting import wait_until
from vllm_kvpool.errors import StoreError, StoreUnreachable
from vllm_kvpool.storage.guarded import MAX_LEFT_BEHIND, BoundedCalls

LIMIT_S = 10.0
SHORT_S = 0.02  # a wait that is in vain
NAME = "kvpool-test-calls"


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == NAME]


def end_of(found: list[threading.Thread]) -> bool:
    for thread in found:
        thread.join(LIMIT_S)
    return not any(thread.is_alive() for thread in found)


class Gate:
    """A call that waits until it is let through."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.released = threading.Event()

    def __call__(self) -> str:
        self.entered.set()
        assert self.released.wait(LIMIT_S), "never released"
        return "late"


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.released.set()


@pytest.fixture
def calls(gate: Gate) -> Iterator[BoundedCalls]:
    calls = BoundedCalls(NAME)
    yield calls
    gate.released.set()
    assert calls.close(LIMIT_S)
    assert end_of(threads())


def leave_behind(calls: BoundedCalls, call: Callable[[], object]) -> None:
    with pytest.raises(StoreUnreachable, match=r"no answer within 0\.02 s"):
        calls.run(call, SHORT_S)


def test_a_call_gives_what_it_returns_or_raises(calls: BoundedCalls) -> None:
    def fails() -> None:
        raise StoreError("gone")

    assert calls.run(lambda: 7, LIMIT_S) == 7
    with pytest.raises(StoreError, match="gone"):
        calls.run(fails, LIMIT_S)
    with pytest.raises(SystemExit):
        calls.run(lambda: exec("raise SystemExit"), LIMIT_S)
    assert calls.run(lambda: None, LIMIT_S) is None


def test_calls_one_after_another_share_a_thread(calls: BoundedCalls) -> None:
    idents = {calls.run(threading.get_ident, LIMIT_S) for _ in range(20)}
    assert len(idents) == 1
    assert threading.get_ident() not in idents
    assert len(threads()) == 1


def test_a_call_that_takes_too_long_is_left_and_the_next_gets_another_thread(
    calls: BoundedCalls, gate: Gate
) -> None:
    leave_behind(calls, gate)
    assert calls.num_left_behind == 1
    assert calls.run(lambda: 1, LIMIT_S) == 1
    assert len(threads()) == 2


def test_a_thread_that_was_left_ends_with_its_call(calls: BoundedCalls, gate: Gate) -> None:
    leave_behind(calls, gate)
    left = threads()
    gate.released.set()
    assert end_of(left)
    assert calls.num_left_behind == 0


def test_with_too_many_left_behind_calls_fail_at_once_until_one_returns(
    calls: BoundedCalls,
) -> None:
    gates = [Gate() for _ in range(MAX_LEFT_BEHIND)]
    with ExitStack() as undo:
        for gate in gates:
            undo.callback(gate.released.set)
            leave_behind(calls, gate)
        ran: list[int] = []
        began = time.monotonic()
        with pytest.raises(StoreUnreachable, match="have not returned yet"):
            calls.run(lambda: ran.append(1), LIMIT_S)
        assert time.monotonic() - began < LIMIT_S / 2
        assert len(threads()) == MAX_LEFT_BEHIND
        before = threads()
        gates[0].released.set()
        assert end_of(before[:1])
        calls.run(lambda: ran.append(2), LIMIT_S)
        assert ran == [2]


def test_call_of_a_process_without_more_threads_fails_as_unreachable(calls: BoundedCalls) -> None:
    with few_threads(), pytest.raises(StoreUnreachable, match="no thread for a call"):
        calls.run(lambda: 1, LIMIT_S)
    assert calls.run(lambda: 1, LIMIT_S) == 1


def test_a_late_answer_is_nobody_elses(calls: BoundedCalls, gate: Gate) -> None:
    leave_behind(calls, gate)
    left = threads()
    gate.released.set()
    assert calls.run(lambda: "in time", LIMIT_S) == "in time"
    assert end_of(left)
    assert calls.run(lambda: "in time", LIMIT_S) == "in time"


def test_an_answer_at_the_last_moment_loses_no_thread(calls: BoundedCalls) -> None:
    """Whichever comes first, the answer or the end of the wait."""
    answers = 0
    for _ in range(300):
        try:
            calls.run(lambda: time.sleep(0.0005), 0.0005)
            answers += 1
        except StoreUnreachable:
            pass
        assert len(threads()) <= 2 * MAX_LEFT_BEHIND
    wait_until(
        lambda: not (calls.num_left_behind or len(threads()) > 1), LIMIT_S, what=lambda: threads()
    )
    assert calls.run(lambda: 1, LIMIT_S) == 1


def test_calls_at_once_have_a_thread_each(calls: BoundedCalls) -> None:
    together = threading.Barrier(4)
    results: list[int] = []

    def run() -> None:
        results.append(calls.run(lambda: together.wait(LIMIT_S), LIMIT_S))

    callers = [threading.Thread(target=run) for _ in range(4)]
    for caller in callers:
        caller.start()
    assert end_of(callers)
    assert sorted(results) == [0, 1, 2, 3]


def test_a_thread_that_was_killed_costs_one_call(calls: BoundedCalls) -> None:
    calls.run(lambda: None, LIMIT_S)
    [thread] = calls._idle
    thread.inbox.put(None)
    assert end_of(threads())
    leave_behind(calls, lambda: None)
    assert calls.num_left_behind == 0
    assert calls.run(lambda: 1, LIMIT_S) == 1


# The end


def test_closing_ends_idle_threads(calls: BoundedCalls) -> None:
    calls.run(lambda: None, LIMIT_S)
    found = threads()
    assert calls.close(LIMIT_S)
    assert not any(thread.is_alive() for thread in found)


@pytest.mark.alone
def test_closing_says_that_a_call_is_left_behind_and_waits_no_longer_than_told(
    calls: BoundedCalls,
) -> None:
    """The timeout of `close` covers all abandoned calls together."""
    with ExitStack() as undo:
        for _ in range(MAX_LEFT_BEHIND):
            gate = Gate()
            undo.callback(gate.released.set)
            leave_behind(calls, gate)
        began = time.monotonic()
        assert not calls.close(0.5)
        assert 0.45 < time.monotonic() - began < 1.5


def test_closing_says_that_a_call_is_under_way(calls: BoundedCalls, gate: Gate) -> None:
    answers: list[str] = []
    caller = threading.Thread(target=lambda: answers.append(calls.run(gate, LIMIT_S)))
    caller.start()
    assert gate.entered.wait(LIMIT_S)
    assert not calls.close(SHORT_S)
    found = threads()
    gate.released.set()
    assert end_of([caller, *found])
    assert answers == ["late"]
    assert calls.close(SHORT_S)
