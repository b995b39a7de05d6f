"""A store that may be away, and many threads: those who listen, and those who call."""

import random
import threading
import time
from collections.abc import Iterator
from itertools import pairwise

import pytest

from tests.storage import guard_bench
from tests.storage.guard_bench import BOUND_S, LIMIT_S, LONG_S, Stage
from tests.support.buffers import make_buffer
from tests.support.faults import Fault, FaultyStore
from tests.support.memory_store import CAPABILITIES, MemoryStore
from tests.support.waiting import wait_until
from vllm_kvpool.errors import StoreError
from vllm_kvpool.storage import breaker, health
from vllm_kvpool.storage import guarded as guard
from vllm_kvpool.storage.base import ChunkRef
from vllm_kvpool.storage.guarded import CallTimeouts, GuardedStore

NUM_THREADS = 8
STORM_S = 60.0  # at most; a second where there is time


@pytest.fixture
def up() -> Iterator[Stage]:
    with guard_bench.stage() as stage:
        stage.start()
        assert stage.next_news() is True
        yield stage


# Those who listen


def test_every_listener_hears_how_it_stands_and_then_each_change(up: Stage) -> None:
    heard: list[tuple[str, bool]] = []
    up.guard.listen(lambda is_up, is_writable: heard.append(("first", is_up)))
    up.guard.report_hung()
    up.guard.listen(lambda is_up, is_writable: heard.append(("second", is_up)))
    assert up.next_news() is False
    up.pass_time(LONG_S)
    assert up.next_news() is True
    up.guard.listen(lambda is_up, is_writable: heard.append(("third", is_up)))
    of = {name: [is_up for who, is_up in heard if who == name] for name, _ in heard}
    assert of == {"first": [True, False, True], "second": [False, True], "third": [True]}


# All of it at once


def test_any_thread_may_call_whatever_the_store_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call ends soon; with the faults gone the store is there, and nobody is left."""
    monkeypatch.setattr(breaker, "FIRST_PAUSE_S", 0.002)
    monkeypatch.setattr(breaker, "LONGEST_PAUSE_S", 0.02)
    monkeypatch.setattr(health, "SLOW_FAILURE_S", 0.01)
    monkeypatch.setattr(guard, "LISTING_S", 0.02)
    store = FaultyStore(MemoryStore("", 1 << 20), lambda: time.sleep(0.015))
    timeouts = CallTimeouts(call_s=0.02, answer_s=0.005)
    guarded = GuardedStore(lambda: store, CAPABILITIES, guard_bench.NAME, timeouts)
    heard: list[tuple[bool, bool]] = []
    guarded.listen(lambda *access: heard.append(access))
    stop = threading.Event()
    counts = [0] * NUM_THREADS
    worst = [0.0] * NUM_THREADS

    def call(number: int) -> None:
        chance = random.Random(number)
        buffer = make_buffer(100)
        while not stop.is_set():
            keys = [f"n@{chance.randrange(8)}"]
            began = time.monotonic()
            try:
                match chance.randrange(6):
                    case 0:
                        guarded.put(keys, [buffer], [ChunkRef("")])
                    case 1:
                        guarded.get(keys, [buffer])
                    case 2:
                        guarded.remove(keys)
                    case 3:
                        guarded.remove_namespace("n")
                    case 4:
                        guarded.report_hung(writes=chance.random() < 0.5)
                    case _:
                        guarded.exists(keys)
            except StoreError:
                pass
            counts[number] += 1
            worst[number] = max(worst[number], time.monotonic() - began)
            time.sleep(0.0005)

    callers = [threading.Thread(target=call, args=(n,)) for n in range(NUM_THREADS)]
    for caller in callers:
        caller.start()
    chance = random.Random(1)
    deadline = time.monotonic() + STORM_S
    rounds = 0
    try:
        while rounds < 40 or min(counts) <= 10 or len(heard) < 3:  # away and back
            assert time.monotonic() < deadline, (counts, heard)
            rounds += 1
            store.inject(chance.choice([Fault.ERROR, Fault.UNREACHABLE, Fault.SLOW, Fault.BLOCKED]))
            time.sleep(0.02)
            store.heal()
            time.sleep(0.005)
    finally:
        stop.set()
    for caller in callers:
        caller.join(LIMIT_S)
        assert not caller.is_alive()
    assert max(worst) < BOUND_S

    def answers() -> bool:
        try:
            return guarded.exists(["key"]) == [False]
        except StoreError:
            return False

    wait_until(answers, STORM_S)
    assert all(before != now for before, now in pairwise(heard))
    guarded.close()
    assert guard_bench.threads() == []
