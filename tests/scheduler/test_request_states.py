"""States of a request: allowed transitions, and calls of vLLM that lead through all states."""

from enum import Enum

import pytest

from tests.scheduler.scheduler_bench import CHUNK, LIMIT_S, PENDING, Bench
from tests.support.faults import Fault
from tests.support.state_tables import assert_moves_along, pairs_of, reached_from
from vllm_kvpool.config import RequestOptions
from vllm_kvpool.scheduler.states import TRANSITIONS, AdmissionState, LookupState, RetryState, moved

FIRST = (LookupState.PENDING, AdmissionState.QUEUED, RetryState.NONE)


@pytest.mark.parametrize(("old", "new"), pairs_of(*FIRST), ids=str)
def test_state_moves_along_the_table_alone(old: Enum, new: Enum) -> None:
    assert_moves_along(TRANSITIONS, moved, old, new)


@pytest.mark.parametrize("first", FIRST, ids=str)
def test_every_state_is_reached_from_the_first(first: Enum) -> None:
    assert reached_from(TRANSITIONS, first) == set(type(first))


def admission(bench: Bench) -> AdmissionState:
    return bench.scheduler._requests["a"].admission


def test_request_that_loads_goes_through_every_state_of_its_admission(bench: Bench) -> None:
    bench.hold(range(1000), range(3))
    view = bench.add()
    seen = [admission(bench)]
    bench.match()
    seen.append(admission(bench))
    bench.allocate("a", 0, 3 * CHUNK)
    seen.append(admission(bench))
    bench.step()
    seen.append(admission(bench))
    bench.scheduler.load_ended("a")
    seen.append(admission(bench))
    assert seen == [each for each in AdmissionState if each is not AdmissionState.RUNNING]
    bench.allocate("a", 3 * CHUNK, 0)  # as vLLM does once the load has ended
    assert admission(bench) is AdmissionState.WAITING
    bench.step(a=100 - 3 * CHUNK)
    assert admission(bench) is AdmissionState.RUNNING
    view.preempt()
    bench.match()
    assert admission(bench) is AdmissionState.MATCHED


def test_request_whose_load_brings_nothing_is_queued_again(bench: Bench) -> None:
    bench.hold(range(1000), range(3))
    bench.add()
    bench.admit()
    bench.step()
    bench.load_stops("a", 0)
    assert admission(bench) is AdmissionState.LOADED
    bench.match()
    assert admission(bench) is AdmissionState.MATCHED


def test_lookup_that_is_late_ends_with_its_answer(bench: Bench) -> None:
    bench.store.inject(Fault.BLOCKED, "exists")
    bench.add()
    state = bench.scheduler._requests["a"]
    assert bench.store.entered.wait(LIMIT_S)
    assert bench.scheduler.match("a", 0) == PENDING
    assert state.lookup.state is LookupState.PENDING
    bench.clock.advance(LIMIT_S)
    bench.scheduler.match("a", 0)
    assert state.lookup.state is LookupState.LATE
    bench.store.release()
    bench.take_answers()
    assert state.lookup.state is LookupState.ENDED


@pytest.mark.parametrize("hand_over", [False, True])
def test_lookup_of_a_request_that_has_ended_goes_on_for_its_hand_over_alone(
    bench: Bench, hand_over: bool
) -> None:
    bench.store.inject(Fault.BLOCKED, "exists")
    bench.add("first")
    assert bench.store.entered.wait(LIMIT_S)  # the next one is not answered before it
    bench.add(options=RequestOptions(hand_over=hand_over))
    state = bench.scheduler._requests["a"]
    bench.finish()
    assert state.lookup.state is (LookupState.UNNAMED if hand_over else LookupState.ENDED)
    assert bench.scheduler.has_pending is hand_over
    bench.store.release()
    bench.take_answers()
    assert state.lookup.state is LookupState.ENDED
    assert not bench.scheduler.saves.has_pins


def test_failed_load_is_looked_up_anew_once_after_a_preemption(bench: Bench) -> None:
    """The engine resumes at the first missing block. Only a preemption restarts the request."""
    bench.hold(range(1000), range(3))
    view = bench.add()
    state = bench.scheduler._requests["a"]
    bench.admit()
    bench.step()
    assert (state.retry, state.limit_tokens) == (RetryState.NONE, None)
    bench.load_stops("a", CHUNK)
    assert (state.retry, state.limit_tokens) == (RetryState.LIMITED, CHUNK)
    view.preempt()
    bench.match()
    assert (state.retry, state.limit_tokens) == (RetryState.DONE, None)
