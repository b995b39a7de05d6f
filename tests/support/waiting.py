"""Waits for a condition, by polling. A wait in vain fails and says what was waited for."""

import asyncio
import time
from collections.abc import Callable, Iterator

LIMIT_S = 30.0
PAUSE_S = 0.005


def wait_until(
    is_so: Callable[[], object],
    limit_s: float = LIMIT_S,
    what: str | Callable[[], object] = "waited in vain",
    pause_s: float = PAUSE_S,
) -> None:
    """Wait in a thread. `what`: a text, or what tells the state that was found at last."""
    for _ in _looks(is_so, limit_s, what):
        time.sleep(pause_s)


async def until(
    is_so: Callable[[], object],
    limit_s: float = LIMIT_S,
    what: str | Callable[[], object] = "waited in vain",
    pause_s: float = PAUSE_S,
) -> None:
    """Wait in an event loop; the same otherwise. `pause_s` 0: look at each turn of the loop."""
    for _ in _looks(is_so, limit_s, what):
        await asyncio.sleep(pause_s)


async def turns(count: int) -> None:
    """Let an event loop turn."""
    for _ in range(count):
        await asyncio.sleep(0)


def _looks(
    is_so: Callable[[], object], limit_s: float, what: str | Callable[[], object]
) -> Iterator[None]:
    """Yield after each look that was in vain; the caller pauses."""
    deadline = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < deadline, what() if callable(what) else what
        yield
