"""A loop per replica, which loads it, reads its health and metrics, and reports changes.

It sleeps until the next check is due, or `ask` wants one at once. An engine at rest is not checked.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

import msgspec

from vllm_kvpool.parsing import UNREADABLE
from vllm_kvpool.router.control.events import (
    Event,
    Failed,
    Measured,
    ModelsListed,
    ReplicaLoaded,
    ReplicaSpec,
    SleepFailed,
    Warmed,
)
from vllm_kvpool.router.control.settings import HealthConfig
from vllm_kvpool.router.dataplane.engine_metrics import sample
from vllm_kvpool.router.dataplane.responses import BUSY_STATUSES, NOT_FOUND, OK, EngineLost
from vllm_kvpool.router.dataplane.upstream import EngineResponse, EngineUnreached, Upstream
from vllm_kvpool.router.ops.tasks import Tasks

log = logging.getLogger(__name__)

FIRST_POLL_S, MAX_POLL_S = 0.05, 1.0  # of an engine that is not healthy yet
WARM_TIMEOUT_S = 60.0
SLEEP_TIMEOUT_S = 60.0
SAVES_TIMEOUT_S, SAVES_POLL_S = 30.0, 0.1
"""Longest wait for the saves of an engine that will end or sleep, and the pause between samples."""
NO_SLEEP = (
    "is not needed and keeps its memory: {error}; start it with VLLM_SERVER_DEV_MODE=1 and "
    "--enable-sleep-mode, or give it start and stop commands"
)
MAX_MODELS = 1024
SAMPLES_PER_HEALTH, SAMPLES_PER_MODELS = 2, 10
"""Samples of an engine's metrics between two checks of its health, and of its models."""


class Monitor:
    """Watches one replica. Owned by the router's loop; `post` takes its events."""

    def __init__(
        self,
        spec: ReplicaSpec,
        engines: Upstream,
        config: HealthConfig,
        post: Callable[[Event], None],
        *,
        saves_timeout_s: float = SAVES_TIMEOUT_S,
    ) -> None:
        self.spec = spec
        self.replica = spec.replica_id
        self.url = spec.url
        self.models: dict[str, dict[str, Any]] = {}
        """Models of the engine's /v1/models, by name."""
        self.has_failed = False
        """True if the engine was loaded and has failed since."""
        self._engines = engines
        self._config = config
        self._post = post
        self._asked = asyncio.Event()
        self._tasks = Tasks(f"monitor of {self.replica}")
        """By name: poll, load, warm, sleep."""
        self._is_asked_to_sleep = False
        """True while the engine has the request to sleep."""
        self._saves_timeout_s = saves_timeout_s
        self._load_error = ""
        self._is_loaded = False
        self._is_resting = False
        self._missed = 0

    def start(self) -> None:
        """Start the loop that polls the replica."""
        self._tasks.start("poll", self._poll)

    def ask(self) -> None:
        """Check at once whether it is alive."""
        self._asked.set()

    def load(self, *, start: Callable[[], Awaitable[None]] | None = None) -> None:
        """Wait until it is healthy and has answered a request; reports `ReplicaLoaded` or `Failed`.

        `start`: starts its engine, or raises EngineLost. An engine that others start is woken, if
        it sleeps.
        """
        self._cancel_steps()
        self._is_resting = self._is_loaded = self.has_failed = False
        self._missed = 0
        self._tasks.start("load", partial(self._load, start))
        self.ask()

    def rest(self, *, sleeps: bool) -> None:
        """Stop checking it. `sleeps`: have it release its memory if it can sleep."""
        self._cancel_steps()
        self._is_resting = True
        if sleeps:
            self._tasks.start("sleep", self._sleep)

    def warm(self) -> None:
        """Send a request of one token; reports `Warmed` or `Failed`."""
        self._tasks.cancel("warm")  # each order is answered, also one given while a task reports
        self._tasks.start("warm", self._warm)

    async def await_saves(self) -> None:
        """Wait until the engine's saves have ended, at most `saves_timeout_s`; log what is left.

        Of an engine that has no requests any more.
        """
        if not self._is_loaded:
            return
        left: int | None = None
        num_done = 0
        try:
            async with asyncio.timeout(self._saves_timeout_s):
                while num_done < 2:  # an answer may overtake the metrics of its step
                    left = await self._pending_save_tokens()
                    num_done = 0 if left else num_done + 1
                    await asyncio.sleep(SAVES_POLL_S if num_done < 2 else 0)
        except TimeoutError:
            log.warning(
                "%s: saves of %s tokens have not ended within %g s; it is ended or put to sleep "
                "all the same, and they may be lost",
                self.replica,
                "an unknown number of" if left is None else left,
                self._saves_timeout_s,
            )
        except EngineLost as error:
            log.warning("%s: whether its saves have ended is not known: %s", self.replica, error)

    async def _pending_save_tokens(self) -> int:
        # vLLM's metrics change with steps alone, and an engine without requests makes none.
        await self._one_token()
        found = await sample(self._engines, self.url, self._config.timeout_s)
        return found.pending_save_tokens or 0

    async def stop(self) -> None:
        """Cancel the loops of the replica and wait for their end."""
        await self._tasks.stop()

    def _cancel_steps(self) -> None:
        """Cancel a load, and a sleep that waits for saves; a request to sleep goes on."""
        self._tasks.cancel("load")
        if not self._is_asked_to_sleep:
            self._tasks.cancel("sleep")

    # While it serves

    async def _poll(self) -> None:
        """Read health and metrics, until stopped."""
        loop = asyncio.get_running_loop()
        health_due = models_due = loop.time()
        while True:
            self._asked.clear()
            now = loop.time()
            if not self._is_resting:
                try:
                    if now >= health_due:
                        await self._check_health()
                        health_due = now + SAMPLES_PER_HEALTH * self._config.every_s
                    measured = await sample(self._engines, self.url, self._config.timeout_s)
                    self._post(Measured(self.replica, measured))
                    self._missed = 0
                    if self._is_loaded and now >= models_due:
                        models_due = now + SAMPLES_PER_MODELS * self._config.every_s
                        await self._learn_models()
                except EngineLost as error:
                    self._missed_answer(error)
            try:
                async with asyncio.timeout(self._config.every_s):
                    await self._asked.wait()
                    health_due = loop.time()
            except TimeoutError:
                pass

    def _missed_answer(self, error: EngineLost) -> None:
        if self._is_resting or not self._is_loaded:
            return  # it is not expected to answer yet
        self._missed += 1
        is_gone = isinstance(error, EngineUnreached) and error.is_refused
        if is_gone or self._missed >= self._config.failures:
            self._fail(str(error))

    def _fail(self, why: str) -> None:
        self.has_failed = self._is_loaded
        self._is_loaded = False
        self._post(Failed(self.replica, why))

    async def _check_health(self) -> None:
        await self._get("/health")

    async def _get(self, path: str) -> bytes:
        """Send a GET; raises EngineLost unless it is answered 200."""
        answer = await self._engines.ask(f"{self.url}{path}", timeout_s=self._config.timeout_s)
        if answer.status != OK:
            raise EngineLost(f"{path} answers {answer.status}")
        return answer.body

    async def _warm(self) -> None:
        try:
            await self._one_token()
        except EngineLost as error:
            self._fail(f"does not answer: {error}")
        else:
            self._post(Warmed(self.replica))

    # Until it serves

    async def _load(self, start: Callable[[], Awaitable[None]] | None) -> None:
        timeout_s = self._config.load_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await self._tasks.wait("sleep")
                if start is not None:
                    try:
                        await start()
                    except EngineLost as error:
                        self._fail(f"cannot be started: {error}")
                        return
                await self._become_healthy(wakes=start is None)
                await self._learn_models()
                await self._one_token()
        except TimeoutError:
            last = f": {self._load_error}" if self._load_error else ""
            self._fail(f"not loaded within {timeout_s:.0f} s{last}")
        except EngineLost as error:
            self._fail(f"healthy, but does not answer: {error}")
        else:
            self._is_loaded = True
            self._post(ReplicaLoaded(self.replica))

    async def is_healthy(self) -> bool:
        """Ask once; False if it does not say so."""
        try:
            await self._check_health()
        except EngineLost:
            return False
        return True

    async def _become_healthy(self, *, wakes: bool) -> None:
        pause_s = FIRST_POLL_S
        while True:
            try:
                await self._check_health()
                if wakes:
                    await self._wake()
                self._load_error = ""
                return
            except EngineLost as error:
                self._load_error = str(error)
                await asyncio.sleep(pause_s)
                pause_s = min(1.5 * pause_s, MAX_POLL_S)

    async def _sleep(self) -> None:
        """Have an engine give its memory back, once its saves have ended; reports `SleepFailed`."""
        await self.await_saves()
        self._is_asked_to_sleep = True
        try:
            try:
                await self._order("/sleep?level=1")
            finally:
                self._is_asked_to_sleep = False
        except EngineLost as error:
            self._post(SleepFailed(self.replica, NO_SLEEP.format(error=error)))

    async def _order(self, path: str) -> None:
        """Send a POST; raises EngineLost unless it is answered 200."""
        answer = await self._engines.ask(f"{self.url}{path}", b"", timeout_s=SLEEP_TIMEOUT_S)
        if answer.status != OK:
            raise EngineLost(f"{path} answers {answer.status}")

    async def _wake(self) -> None:
        """End the sleep of an engine that can sleep, and does."""
        url, timeout_s = f"{self.url}/is_sleeping", self._config.timeout_s
        answer = await self._engines.ask(url, timeout_s=timeout_s)
        if answer.status == OK and b"true" in answer.body:
            await self._order("/wake_up")

    async def _learn_models(self) -> None:
        body = await self._get("/v1/models")
        try:
            found = msgspec.json.decode(body, type=_Models).data
        except UNREADABLE as error:
            raise EngineLost(f"/v1/models cannot be read: {error}") from None
        named = [(each.get("id"), each) for each in found[:MAX_MODELS]]
        before = self.models.keys()
        self.models = {name: each for name, each in named if isinstance(name, str)}
        if self.models.keys() != before:
            self._post(ModelsListed(self.replica, frozenset(self.models)))

    async def _one_token(self) -> None:
        if not self.models:
            raise EngineLost("serves no model")
        model = next(iter(self.models))
        # Computed here and nowhere else: it shows that this engine works.
        own = {"kvpool": {"save": False, "load": False}}
        completion = {"prompt": "hello", "max_tokens": 1, "kv_transfer_params": own}
        answer = await self._post_small("/v1/completions", {"model": model, **completion})
        if answer.status == NOT_FOUND:  # servers of pooling models have no completions
            answer = await self._post_small("/pooling", {"model": model, "input": "hello"})
        # One that others have filled up answers, too.
        if answer.status != OK and answer.status not in BUSY_STATUSES:
            raise EngineLost(f"a request of one token is answered {answer.status}")

    async def _post_small(self, path: str, body: Mapping[str, Any]) -> EngineResponse:
        data = msgspec.json.encode(body)
        return await self._engines.ask(self.url + path, data, timeout_s=WARM_TIMEOUT_S)


class _Models(msgspec.Struct):
    data: list[dict[str, Any]]
