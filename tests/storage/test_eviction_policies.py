"""The simulated caches of bench_eviction.py on small traffic: bounds, what they are known for."""

import random
from collections.abc import Callable

import pytest

from benchmarks.eviction_policies import (
    BASELINES,
    Belady,
    Cache,
    Lru,
    Request,
    Scored,
    Unbounded,
    play,
    total_chunks,
)
from vllm_kvpool.storage.eviction import DEFAULT_POLICY, POLICIES

SECOND = 10**9
CAPACITY = 40


def chats(seed: int, count: int = 300) -> list[Request]:
    """Turns of 20 conversations, and prompts that are never seen again."""
    order = random.Random(seed)
    length = [0] * 20
    requests = []
    for number in range(count):
        now_ns = number * 10 * SECOND
        if order.random() < 0.5:
            start = 10_000 * (number + 1)
            requests.append(Request(now_ns, tuple(range(start, start + 5))))
            continue
        who = order.randrange(20)
        length[who] = min(9, length[who] + 1)
        requests.append(Request(now_ns, (0, *range(100 * who + 1, 100 * who + 1 + length[who]))))
    return requests


def loop(size: int) -> list[Request]:
    return [Request(i * SECOND, (i % size,)) for i in range(20 * size)]


MAKERS: dict[str, Callable[[int], Cache]] = {
    "lru of leaves": lambda capacity: Scored(capacity, POLICIES["lru"]),
    "default": lambda capacity: Scored(capacity, POLICIES[DEFAULT_POLICY]),
    "LRU": Lru,
    **BASELINES,
}
every = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


@every
@pytest.mark.parametrize("capacity", [10, 40])
def test_a_cache_has_no_more_than_its_capacity(make: Callable[[int], Cache], capacity: int) -> None:
    cache, known = make(capacity), set()
    for request in chats(1):
        cache.serve(request, next((i for i, c in enumerate(request.chunks) if c not in cache), 0))
        known.update(request.chunks)
        assert sum(chunk in cache for chunk in known) <= capacity


@every
@pytest.mark.parametrize("seed", range(3))
def test_none_finds_more_than_clairvoyance_and_all_find_something(
    make: Callable[[int], Cache], seed: int
) -> None:
    requests = chats(seed)
    found = play(make(CAPACITY), requests).ratio
    assert 0 < found <= play(Belady(CAPACITY, requests), requests).ratio + 0.01  # of blocks alone
    assert found < play(Unbounded(), requests).ratio


@every
def test_what_fits_is_found_again(make: Callable[[int], Cache]) -> None:
    requests = [Request(i * SECOND, (0, 1 + i % 5)) for i in range(500)]
    assert total_chunks(requests) == 6
    assert play(make(200), requests).ratio > 0.98


@pytest.mark.parametrize(
    ("name", "is_found"),
    [("LRU", False), ("default", False), ("LIRS", True), ("W-TinyLFU", True), ("S3-FIFO", True)],
)
def test_a_loop_that_does_not_fit(name: str, is_found: bool) -> None:
    found = play(MAKERS[name](100), loop(120)).ratio
    assert found > 0.4 if is_found else found == 0


def test_only_leaves_leave() -> None:
    cache = Scored(3, POLICIES["lru"])
    cache.serve(Request(0, (1, 2, 3)), 0)
    cache.serve(Request(SECOND, (4,)), 0)
    assert [chunk in cache for chunk in (1, 2, 3, 4)] == [True, True, False, True]
    cache.serve(Request(2 * SECOND, (5, 6)), 0)
    assert [chunk in cache for chunk in (1, 2, 4, 5, 6)] == [False, False, True, True, True]


def test_halves_of_the_time_are_counted_apart() -> None:
    played = play(Lru(9), [Request(at * SECOND, (1,)) for at in (0, 1, 8, 9, 10)])
    assert (played.asked, played.found) == ((2, 3), (1, 3))
