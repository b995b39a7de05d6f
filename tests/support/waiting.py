"""Waits for a condition, by polling. A wait in vain fails and says what was waited for."""

import asyncio
import time
from collections.abc import Callable

LIMIT_S = 30.0
PAUSE_S = 0.005


def wait_until(
    is_so: Callable[[], object],
    limit_s: float = LIMIT_S,
    what: str | Callable[[], object] = "waited in vain",
    pause_s: float = PAUSE_S,
) -> None:
    """Wait in a thread. `what`: a text, or what tells the state that was found at last."""
    deadline = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < deadline, what() if callable(what) else what
        time.sleep(pause_s)


async def until(
    is_so: Callable[[], object],
    limit_s: float = LIMIT_S,
    what: str | Callable[[], object] = "waited in vain",
    pause_s: float = PAUSE_S,
) -> None:
    """Wait in an event loop; the same otherwise. `pause_s` 0: look at each turn of the loop."""
    deadline = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < deadline, what() if callable(what) else what
        await asyncio.sleep(pause_s)
