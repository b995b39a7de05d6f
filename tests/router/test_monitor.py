"""A replica's monitor: its reports, and when it sends them."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import aiohttp
import msgspec
import pytest

from tests.support.router_rig import COMPLETIONS, FAST
from tests.support.scripted_batch import ScriptedPool
from tests.support.scripted_core import EngineCore
from tests.support.scripted_engine import ScriptedEngine
from tests.support.scripted_spec import Fault, FaultKind, ScriptedSpec
from tests.support.upstreams import quick_upstream
from tests.support.waiting import until
from vllm_kvpool.router.control.events import (
    Event,
    Failed,
    Measured,
    ReplicaLoaded,
    ReplicaSpec,
    SleepFailed,
    Warmed,
)
from vllm_kvpool.router.control.settings import HealthConfig
from vllm_kvpool.router.control.states import ReplicaId
from vllm_kvpool.router.ops.monitor import Monitor

ONE = ReplicaId("one")
LIMIT_S = 30.0
QUICK = HealthConfig(every_s=0.02, timeout_s=LIMIT_S, failures=2, load_timeout_s=LIMIT_S)
IDLE = HealthConfig(every_s=60.0, timeout_s=LIMIT_S, failures=2, load_timeout_s=LIMIT_S)
IMPATIENT = HealthConfig(every_s=0.02, timeout_s=0.5, failures=2, load_timeout_s=LIMIT_S)
"""The limits exceed the time of an expected answer on a busy machine."""


class Bench:
    """An engine, its monitor, and the monitor's reports."""

    def __init__(self, engine: ScriptedEngine, watch: Monitor, events: list[Event]) -> None:
        self.engine = engine
        self.watch = watch
        self.events = events

    def told(self, kind: type[Event]) -> list[Event]:
        return [each for each in self.events if isinstance(each, kind)]

    async def until(self, kind: type[Event], count: int = 1) -> Event:
        """Wait for the next reports of a kind."""
        known = len(self.told(kind))
        await self.so(lambda: len(self.told(kind)) >= known + count)
        return self.told(kind)[-1]

    async def load(self) -> None:
        """Load the replica, and wait for the report."""
        self.watch.load()
        await self.until(ReplicaLoaded)

    def fail(self, kind: FaultKind, **more: Any) -> None:
        self.engine.fail(Fault(kind=kind, **more))

    async def so(self, is_so: Callable[[], object]) -> None:
        """Wait until the condition holds."""
        await until(is_so, LIMIT_S, what=lambda: self.events)


@asynccontextmanager
async def bench(
    config: HealthConfig = QUICK, spec: ScriptedSpec = FAST, saves_timeout_s: float = LIMIT_S
) -> AsyncIterator[Bench]:
    engine = ScriptedEngine(spec, ScriptedPool())
    url = await engine.start()
    engines = quick_upstream(api_key=spec.api_key)
    events: list[Event] = []
    watch = Monitor(
        ReplicaSpec(replica_id=ONE, url=url),
        engines,
        config,
        events.append,
        saves_timeout_s=saves_timeout_s,
    )
    watch.start()
    try:
        yield Bench(engine, watch, events)
    finally:
        await watch.stop()
        await engines.close()
        await engine.stop()


async def test_it_is_loaded_once_it_has_answered_a_request() -> None:
    async with bench() as each:
        each.watch.load()
        assert await each.until(ReplicaLoaded) == ReplicaLoaded(ONE)
        assert each.engine.counts.received[COMPLETIONS] == 1
        assert each.engine.counts.asked["max_tokens"] == 1
        assert list(each.watch.models) == ["scripted"]
        await each.until(Measured, 3)
        assert len(each.told(ReplicaLoaded)) == 1
        assert not each.told(Failed)


async def test_an_engine_that_comes_late_is_waited_for() -> None:
    for listens in (True, False):
        spec = ScriptedSpec(load_s=0.4, listens_while_loading=listens)
        began = time.monotonic()
        async with bench(spec=spec) as each:
            await each.load()
            assert time.monotonic() - began > spec.load_s
            assert not each.told(Failed), "that it was not there was nothing new"


async def test_an_engine_that_does_not_come_has_failed() -> None:
    async with bench(msgspec.structs.replace(QUICK, load_timeout_s=0.2)) as each:
        each.engine.fail(FaultKind.DIE)
        each.watch.load()
        assert "not loaded within" in str(await each.until(Failed))
        assert not each.watch.has_failed, "it has never been there"
        await asyncio.sleep(0.1)
        assert len(each.told(Failed)) == 1


async def test_health_is_not_enough() -> None:
    async with bench() as each:
        each.fail(FaultKind.STATUS, status=500)
        each.watch.load()
        assert "answered 500" in str(await each.until(Failed))
        each.engine.board.clear()
        each.fail(FaultKind.BUSY)
        await each.load()


async def test_engine_that_generates_nothing_is_loaded_once_it_has_pooled() -> None:
    """vLLM has no completions of a pooling model, which therefore never served."""
    async with bench() as each:
        none = Fault(kind=FaultKind.STATUS, status=404)
        each.engine.fail(none)
        each.watch.load()
        assert "answered 404" in str(await each.until(Failed)), "nor does it pool"
        pools = Fault(kind=FaultKind.STATUS, status=200, body="{}", paths=("/pooling",))
        each.engine.fail(pools)
        await each.load()
        assert json.loads(each.engine.counts.body_of["/pooling"])["model"] == FAST.model


async def test_a_key_is_needed() -> None:
    async with bench(spec=ScriptedSpec(api_key="secret")) as each:
        await each.load()


async def test_a_dead_engine_has_failed_at_once() -> None:
    async with bench() as each:
        await each.load()
        each.engine.fail(FaultKind.DIE)
        await each.until(Failed)
        assert each.watch.has_failed
        await asyncio.sleep(0.1)
        assert len(each.told(Failed)) == 1, "once is enough"
        each.engine.recover()
        await each.load()
        assert not each.watch.has_failed


async def test_one_answer_that_is_late_is_no_failure_and_two_are() -> None:
    async with bench(IMPATIENT) as each:
        await each.load()
        for path in ("/health", "/metrics"):
            each.fail(FaultKind.HANG, paths=(path,), times=1)
            await each.until(Measured, 4)
            assert not each.engine.board.faults()
            assert not each.told(Failed)
        each.fail(FaultKind.HANG, paths=("/health",), times=2)
        assert "no answer within" in str(await each.until(Failed))


async def test_rubbish_of_metrics_is_a_missed_answer() -> None:
    async with bench() as each:
        await each.load()
        each.fail(FaultKind.STATUS, status=200, paths=("/metrics",), times=1)
        await each.until(Measured, 2)
        assert not each.told(Failed)
        each.fail(FaultKind.STATUS, status=200, paths=("/metrics",), times=2)
        await each.until(Failed)


async def test_who_asks_is_answered_at_once() -> None:
    async with bench(IDLE) as each:
        await each.load()
        each.engine.fail(FaultKind.DIE)
        await asyncio.sleep(0.1)
        assert not each.told(Failed)
        each.watch.ask()
        await each.until(Failed)


async def test_a_standby_is_warm_or_has_failed() -> None:
    async with bench() as each:
        await each.load()
        each.watch.warm()
        assert await each.until(Warmed) == Warmed(ONE)
        each.fail(FaultKind.STATUS, status=500)
        each.watch.warm()
        assert "does not answer" in str(await each.until(Failed))


async def test_at_rest_nothing_is_asked_and_a_sleeper_is_woken() -> None:
    async with bench() as each:
        await each.load()
        each.watch.rest(sleeps=True)
        core = each.engine.running
        await each.so(lambda: core.sleep_level == 1)
        known = len(each.events)
        each.engine.fail(FaultKind.REFUSE)
        await asyncio.sleep(0.1)
        assert len(each.events) <= known + 1, "but for what was on its way"
        assert not each.told(Failed)
        each.engine.recover()
        await each.load()
        assert core.sleep_level is None
        await each.until(Measured)


async def test_a_load_after_a_rest_waits_for_the_sleep() -> None:
    async with bench() as each:
        await each.load()
        each.fail(FaultKind.SLOW, seconds=0.3, paths=("/sleep",), times=1)
        each.watch.rest(sleeps=True)
        await each.load()
        core = each.engine.running
        await asyncio.sleep(0.3)
        assert core.sleep_level is None, "it would sleep now, and nobody would know"


async def test_engine_with_a_request_to_sleep_is_sent_no_other_which_would_hide_the_first() -> None:
    """The last load waited for the second request alone, and the first then put it to sleep."""
    async with bench() as each:
        await each.load()
        each.fail(FaultKind.SLOW, seconds=0.5, paths=("/sleep",), times=1)
        each.watch.rest(sleeps=True)
        await each.so(lambda: each.engine.counts.received["/sleep"])
        each.watch.load()
        each.watch.rest(sleeps=True)
        await each.load()
        core = each.engine.running
        await asyncio.sleep(0.5)
        assert core.sleep_level is None
        assert each.engine.counts.received["/sleep"] == 1


async def save(each: Bench) -> EngineCore:
    """Load the engine and have it compute a prompt, whose chunks are then on their way."""
    await each.load()
    body = {"model": "scripted", "prompt": "x " * 2000, "max_tokens": 1}
    url = each.engine.url + COMPLETIONS
    async with aiohttp.ClientSession() as session, session.post(url, json=body) as answer:
        assert answer.status == 200
    core = each.engine.running
    assert core.stats.pending_chunks
    return core


async def test_engine_is_put_to_sleep_once_its_saves_have_ended() -> None:
    async with bench(spec=replace(FAST, put_s=0.4)) as each:
        core = await save(each)
        each.watch.rest(sleeps=True)
        await each.so(lambda: core.sleep_level == 1 or not core.stats.pending_chunks)
        assert core.sleep_level is None
        await each.so(lambda: core.sleep_level == 1)


async def test_engine_whose_saves_do_not_end_is_put_to_sleep_all_the_same(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with bench(spec=replace(FAST, put_s=3600.0), saves_timeout_s=0.5) as each:
        core = await save(each)
        left = core.stats.pending_chunks * FAST.chunk_tokens
        each.watch.rest(sleeps=True)
        await each.so(lambda: core.sleep_level == 1)
        assert f"one: saves of {left} tokens have not ended within 0.5 s" in caplog.text


async def test_engine_that_is_wanted_while_its_saves_end_is_not_put_to_sleep() -> None:
    async with bench(spec=replace(FAST, put_s=0.3)) as each:
        core = await save(each)
        each.watch.rest(sleeps=True)
        await each.load()
        await each.so(lambda: not core.stats.pending_chunks)
        await asyncio.sleep(0.3)
        assert core.sleep_level is None
        assert each.engine.counts.received["/sleep"] == 0


async def test_engine_whose_saves_cannot_be_asked_for_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with bench(spec=replace(FAST, put_s=3600.0)) as each:
        core = await save(each)
        each.fail(FaultKind.STATUS, status=500)
        each.watch.rest(sleeps=True)
        await each.so(lambda: core.sleep_level == 1)
        assert "one: whether its saves have ended is not known" in caplog.text


@pytest.mark.parametrize("status", [404, 500])
async def test_engine_that_does_not_sleep_is_named_with_what_to_set(status: int) -> None:
    """vLLM has /sleep with VLLM_SERVER_DEV_MODE alone; a 404 counted as asleep."""
    async with bench() as each:
        await each.load()
        each.fail(FaultKind.STATUS, status=status, paths=("/sleep",))
        each.watch.rest(sleeps=True)
        failed = await each.until(SleepFailed)
        assert f"/sleep?level=1 answers {status}" in str(failed)
        assert "VLLM_SERVER_DEV_MODE=1" in str(failed)


async def test_engine_that_does_not_wake_up_has_failed_and_says_why() -> None:
    async with bench(msgspec.structs.replace(QUICK, load_timeout_s=0.5)) as each:
        await each.load()
        each.watch.rest(sleeps=True)
        core = each.engine.running
        await each.so(lambda: core.sleep_level == 1)
        each.fail(FaultKind.STATUS, status=404, paths=("/wake_up",))
        each.watch.load()
        assert "/wake_up answers 404" in str(await each.until(Failed))


async def test_a_load_that_was_given_up_reports_nothing() -> None:
    async with bench() as each:
        each.fail(FaultKind.STATUS, status=503, paths=("/health",))
        before = each.engine.counts.received["/health"]
        each.watch.load()
        # The first answer after this may be that of a question before it.
        await each.so(lambda: each.engine.counts.received["/health"] > before + 1)
        each.watch.rest(sleeps=False)
        each.engine.board.clear()
        await asyncio.sleep(0.2)
        assert not each.told(ReplicaLoaded)
        assert not each.told(Failed)


async def test_models_come_and_go() -> None:
    async with bench() as each:
        await each.load()
        body = '{"object":"list","data":[{"id":"a"},{"id":"b"},{"no":"id"}]}'
        each.fail(FaultKind.STATUS, status=200, body=body, paths=("/v1/models",))
        await each.so(lambda: list(each.watch.models) == ["a", "b"])
