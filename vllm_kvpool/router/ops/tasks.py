"""Tasks of one owner, by name: at most one runs under a name, and no failure of one is lost."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

log = logging.getLogger(__name__)


class Tasks:
    """The tasks of one owner. Owned by the router's loop; `start` and `cancel`, then `stop`.

    A task has its name until it ends or is cancelled. So a name never refers to a task that has
    ended, and a start never replaces a task that runs.
    """

    def __init__(self, owner: str) -> None:
        """Begin without tasks; the log names `owner` if a task fails."""
        self._owner = owner
        self._named: dict[str, asyncio.Task[None]] = {}
        self._cancelled: set[asyncio.Task[None]] = set()

    def start(self, name: str, run: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a coroutine under a name; without effect if a task of that name runs."""
        running = self._named.get(name)
        if running is None or running.done():
            task = self._named[name] = asyncio.get_running_loop().create_task(run())
            task.add_done_callback(partial(self._ended, name))

    def cancel(self, name: str) -> None:
        """Cancel the task of a name, if one runs. The name is free at once."""
        if (task := self._named.pop(name, None)) is not None:
            self._cancelled.add(task)
            task.cancel()

    async def wait(self, name: str) -> None:
        """Return once no task of that name runs."""
        if (task := self._named.get(name)) is not None:
            await asyncio.wait({task})

    async def join(self) -> None:
        """Return once all tasks have ended, cancelled ones too."""
        await asyncio.gather(*self._named.values(), *self._cancelled, return_exceptions=True)

    async def stop(self) -> None:
        """Cancel all tasks and wait for their ends."""
        for name in list(self._named):
            self.cancel(name)
        await self.join()

    def _ended(self, name: str, task: asyncio.Task[None]) -> None:
        if self._named.get(name) is task:
            del self._named[name]
        self._cancelled.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s: the task %r has failed", self._owner, name, exc_info=error)
