"""A store that may be away: when it counts as away, and when it is there again."""

import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from tests.storage import guard_bench
from tests.storage.guard_bench import (
    ANSWER_S,
    BOUND_S,
    BUFFERS,
    LIMIT_S,
    LONG_S,
    Stage,
    scripts,
)
from tests.support.faults import Fault
from tests.support.scripts import Example
from vllm_kvpool.errors import StoreUnreachable
from vllm_kvpool.storage import guarded
from vllm_kvpool.storage.base import ChunkRef, GetOutcome, PutOutcome, namespaces_of
from vllm_kvpool.storage.breaker import FAILURES_TO_OPEN
from vllm_kvpool.storage.guarded import CHECK_KEY, MAX_LEFT_BEHIND
from vllm_kvpool.storage.health import SLOW_FAILURE_S

NUM_THREADS = 8


@pytest.fixture
def stage() -> Iterator[Stage]:
    with guard_bench.stage() as stage:
        yield stage


@pytest.fixture
def up(stage: Stage) -> Stage:
    """Return a stage whose store is up and whose calls have no time limit."""
    stage.start()
    assert stage.next_news() is True
    return stage


@pytest.fixture
def hasty(stage: Stage) -> Stage:
    """Return a stage whose store's calls time out after `ANSWER_S`."""
    stage.start(answer_s=ANSWER_S)
    assert stage.next_news() is True
    return stage


@scripts(
    """
store that fails three times in a row is away
    up; fail exists 2; quiet; fail exists 1; news -> away; unused; heard -> up away
success in between starts the count anew
    up
    each 0-2: fail exists 2; exists -> False
    heard -> up
one slow failure is enough, and slowness alone is no failure
    up; slow 1.1; exists -> False; heard -> up; fail exists 1; heard -> up away; unused
failure that is not slow is not enough
    up; slow 0.9; fail exists 1; heard -> up
bug passes through and counts as a failure
    up; inject crash exists times=3
    each 0-2: exists -> bug
    heard -> up away
writes that {fail: failed|raise: error} pause writes, and reads go on
    up; put -> stored; inject {} put
    each 0-2: exists -> True; put -> {}
    heard -> up; writable -> yes no; put -> paused; get -> ok
    heal; pass 0.5; writes; put -> existed; heard -> up; writable -> yes no yes
store that is full goes on to be written
    up; inject full put
    each 0-5: put -> full
    writable -> yes
reads go on while a {put|remove} hangs
    up; put -> stored; hang {}; late 6; hung writes
    each 0-2: get -> ok; exists -> True; put -> paused; remove -> paused
    release -> answer; pass; writes; writable -> yes no yes; put; get -> ok; heard -> up
end of a write that was reported as hung is no news
    up; hang put error; late 6; hung writes; release -> error; heard -> up
removal of a namespace may take long
    up; hang remove_namespace error; late 50; put -> stored; release -> error; put -> existed
    heard -> up
end of a call that {fails: error|is lost: unreachable} is no news once the store has answered again
    up; hang get {}; late 6; hung; unused; news -> away; pass; news -> up; put -> stored
    release -> error; put -> existed; heard -> up away up
who waits in vain may say so
    up; hung; hung; hung; unused; heard -> up away; news -> away; pass; news -> up; put -> stored
who waits in vain for a store that is not open changes nothing
    away; hung; heard -> away; pass; news -> up
store that answers again is there again
    up; leave; pass; asked 1; unused; heal; pass; news -> up; put -> stored; heard -> up away up
nothing is asked before its time
    up; leave; heal; pass 0.49; quiet; pass 0.02; news -> up
"""
)
def test_store_is_away_after_failures_and_back_after_a_pause(example: Example) -> None:
    guard_bench.play(example)


# Calls that fail


@pytest.mark.parametrize("method", ["exists", "get", "put"])
def test_log_of_a_store_that_fails_has_the_error_of_its_last_call(
    up: Stage, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    up.fail(FAILURES_TO_OPEN, method)
    [line] = [each.getMessage() for each in caplog.records if "in a row failed" in each.message]
    assert line.endswith("calls in a row failed: injected")


def test_calls_of_which_a_key_has_not_failed_say_nothing(up: Stage) -> None:
    up.store.inject(Fault.FAILED, key="bad")
    keys, buffers, chunks = ["bad", "good"], BUFFERS[:2], [ChunkRef("")] * 2
    for _ in range(FAILURES_TO_OPEN):
        assert up.guard.put(keys, buffers, chunks)[0] is PutOutcome.FAILED
        assert up.guard.get(keys, buffers) == [GetOutcome.FAILED, GetOutcome.OK]
        assert up.guard.get([], []) == up.guard.put([], [], []) == []
    assert (up.heard, up.heard_writable) == ([True], [True])


def test_a_store_that_answers_queries_and_fails_each_cell_is_away_for_longer_and_longer(
    up: Stage,
) -> None:
    up.put()
    up.store.inject(Fault.FAILED, "get")
    num_gets = 0
    for _ in range(100):
        up.pass_time(1.0)
        up.wait_until(lambda: up.guard._pause_s() > 0)
        assert up.guard.exists(["key"]) == [True] if up.heard[-1] else up.is_away()
        with suppress(StoreUnreachable):
            assert up.get() == [GetOutcome.FAILED]
            num_gets += 1
    assert num_gets <= 11
    up.store.heal()
    up.pass_time(LONG_S)
    up.wait_until(lambda: up.heard[-1])
    assert up.get() == [GetOutcome.OK]


# Answers that are waited for so long


def test_answers_are_waited_for_so_long_and_few_threads_are_left_behind(hasty: Stage) -> None:
    hasty.store.inject(Fault.BLOCKED, "exists")
    for turn in range(3 * MAX_LEFT_BEHIND):
        began = time.monotonic()
        with pytest.raises(StoreUnreachable):
            hasty.guard.exists(["key"])
        assert time.monotonic() - began < BOUND_S
        if turn >= FAILURES_TO_OPEN:
            hasty.pass_time(LONG_S)  # the store is asked in the background as well
            hasty.wait_until(lambda: hasty.guard._pause_s() > 0)
        assert hasty.store.faults.num_blocked <= MAX_LEFT_BEHIND
    assert hasty.store.calls["exists"] == MAX_LEFT_BEHIND
    assert hasty.heard == [True, False]
    assert len(guard_bench.threads()) == 1 + MAX_LEFT_BEHIND
    hasty.store.release()
    for thread in guard_bench.threads():
        if thread.name.startswith("kvpool-calls"):
            thread.join(LIMIT_S)
    hasty.pass_time(LONG_S)
    assert [hasty.next_news(), hasty.next_news()] == [False, True]
    assert hasty.guard.exists(["key"]) == [False]
    assert len(guard_bench.threads()) == 2


def test_an_answer_that_takes_long_enough_makes_the_store_away_at_once(hasty: Stage) -> None:
    hasty.store.inject(Fault.BLOCKED, "exists")
    hasty.store.faults.on_call = lambda *call: hasty.clock.advance(SLOW_FAILURE_S + 0.1)
    with pytest.raises(StoreUnreachable, match="no answer"):
        hasty.guard.exists(["key"])
    assert hasty.is_away()


def test_a_namespace_may_be_large_but_not_for_ever(
    hasty: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    hasty.store.inject(Fault.BLOCKED, "remove_namespace")
    with hasty.hanging(lambda: hasty.guard.remove_namespace("n")) as ends:
        time.sleep(2 * ANSWER_S)  # it has more time than others
        assert ends == []
    assert ends == [0]
    monkeypatch.setattr(guarded, "LISTING_S", ANSWER_S)
    hasty.store.inject(Fault.BLOCKED, "remove_namespace")
    with pytest.raises(StoreUnreachable, match="no answer"):
        hasty.guard.remove_namespace("n")
    assert hasty.guard.exists(["key"]) == [False]
    assert hasty.heard == [True]


def test_a_listing_may_take_long_but_not_for_ever(
    hasty: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guarded, "LISTING_S", ANSWER_S)
    hasty.store.inject(Fault.BLOCKED, "namespaces")
    with pytest.raises(StoreUnreachable, match="no answer"):
        hasty.guard.go_through(namespaces_of)
    hasty.store.release()
    assert hasty.heard == [True]


def test_calls_that_lend_memory_are_made_by_their_caller(hasty: Stage) -> None:
    """They cannot be cut short."""
    made_by: dict[str, str] = {}
    hasty.store.faults.on_call = lambda store, method, keys: made_by.update(
        {method: threading.current_thread().name}
    )
    hasty.put()
    hasty.guard.get(["key"], [BUFFERS[0]])
    hasty.guard.remove(["key"])
    hasty.guard.exists(["key"])
    mine = threading.current_thread().name
    assert made_by.pop("exists") == "kvpool-calls-stage"
    assert set(made_by.values()) == {mine}
    assert made_by.keys() == {"put", "get", "remove"}


# Coming back


def test_a_store_that_answers_too_slowly_is_not_there(hasty: Stage) -> None:
    hasty.guard.report_hung()
    assert hasty.next_news() is False
    hasty.store.inject(Fault.BLOCKED, "exists", key=CHECK_KEY)
    hasty.pass_time(LONG_S)
    hasty.wait_until(lambda: hasty.store.calls["exists"] == 1 and hasty.guard._pause_s() > 0)
    hasty.store.release()  # too late
    assert hasty.no_news()
    assert hasty.is_away()
    hasty.pass_time(LONG_S)
    assert hasty.next_news() is True
