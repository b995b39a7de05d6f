"""Waits for a condition, by polling. A wait that times out fails with a description."""

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path

LIMIT_S = 30.0
PAUSE_S = 0.005


def own_s() -> float:
    """Return a clock that stands while this thread could run and waits for a core.

    It goes on while the thread computes, sleeps or waits for I/O, so a limit by it holds on a busy
    machine, too.
    """
    waited_ns = int(Path("/proc/thread-self/schedstat").read_text().split()[1])
    return time.monotonic() - waited_ns / 1e9


def wait_until(
    is_so: Callable[[], object],
    limit_s: float = LIMIT_S,
    what: str | Callable[[], object] = "waited in vain",
    pause_s: float = PAUSE_S,
) -> None:
    """Wait in a thread. `what`: a text for the failure, or a function that returns it."""
    for _ in _looks(is_so, limit_s, what):
        time.sleep(pause_s)


async def until(
    is_so: Callable[[], object],
    limit_s: float = LIMIT_S,
    what: str | Callable[[], object] = "waited in vain",
    pause_s: float = PAUSE_S,
) -> None:
    """Wait in an event loop, like `wait_until`. `pause_s` 0: poll at each turn of the loop."""
    for _ in _looks(is_so, limit_s, what):
        await asyncio.sleep(pause_s)


async def turns(count: int) -> None:
    """Let the event loop turn `count` times."""
    for _ in range(count):
        await asyncio.sleep(0)


def _looks(
    is_so: Callable[[], object], limit_s: float, what: str | Callable[[], object]
) -> Iterator[None]:
    """Yield after each failed poll; the caller pauses. AssertionError after the time limit."""
    deadline = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < deadline, what() if callable(what) else what
        yield
