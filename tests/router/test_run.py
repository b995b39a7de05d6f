"""The router as a whole: its fleet changes, fails and comes back while clients are served."""

import asyncio
import logging
import random
import statistics
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import aiohttp
import pytest

from tests.support.router_invariants import check_controller
from tests.support.router_rig import COMPLETIONS, Reply, RouterRig, assert_whole, run
from tests.support.scripted_engine import ScriptedEngine
from tests.support.scripted_spec import FaultKind, ScriptedSpec
from vllm_kvpool.router.config import read_config
from vllm_kvpool.router.control.events import (
    Added,
    Drain,
    Event,
    Measured,
    Remove,
    ReplicaSpec,
    SetRole,
    Tick,
)
from vllm_kvpool.router.control.states import ReplicaId, Role, State
from vllm_kvpool.router.run import Router

pytestmark = pytest.mark.alone

LONG = "hello world " * 150  # just worth a prefill of its own
STREAM: dict[str, Any] = {
    **{"prompt": LONG, "max_tokens": 30},
    **{"return_token_ids": True, "stream": True},
}
K = FaultKind


def name(number: int) -> ReplicaId:
    return ReplicaId(f"r{number}")


# Roles and replicas change


@asynccontextmanager
async def _crowd(rig: RouterRig, num_streams: int) -> AsyncIterator[None]:
    """Streams that are on their way at first, and whole in the end."""
    bodies = [
        {**STREAM, "prompt": f"{number} {LONG}", "max_tokens": 50 + number}
        for number in range(num_streams)
    ]
    asked = [asyncio.ensure_future(rig.complete(each)) for each in bodies]
    requests = rig.router.controller.state.requests
    await rig.until(lambda: len(requests) == num_streams, "all are there")
    direct = [asyncio.ensure_future(rig.direct(each)) for each in bodies]
    yield
    for each, known in zip(asked, direct, strict=True):
        assert_whole(await each, await known)


@pytest.mark.parametrize(
    "changes",
    [
        [SetRole(name(3), Role.PREFILL), SetRole(name(0), Role.DECODE)],
        [Drain(name(3)), Drain(name(0))],
        [Remove(name(3)), Remove(name(0))],
    ],
    ids=["flip", "drain", "remove"],
)
async def test_the_fleet_changes_under_fifty_streams(changes: list[Event]) -> None:
    async with RouterRig(
        2, 2, overload={"ttft_target_s": 60.0}, flow={"drain_timeout_s": 0.2}
    ) as rig:
        async with _crowd(rig, 50):
            for change in changes:
                await asyncio.sleep(0.1)
                rig.router.post(change)
                check_controller(rig.router.controller)
        assert "given_up" not in rig.counts
        match changes[0]:
            case SetRole():
                await rig.in_state(3, State.PREFILL)
                await rig.in_state(0, State.DECODE)
            case Drain():
                await rig.in_state(3, State.SHUTTING_NULL, State.INACTIVE)
            case Remove():
                await rig.until(lambda: rig.state(3) is None, "it is forgotten")
                await rig.until(lambda: rig.state(0) is None, "it is forgotten")


async def test_an_engine_joins_while_streams_run_and_one_that_was_removed_comes_back() -> None:
    async with (
        RouterRig(1, 1, overload={"ttft_target_s": 60.0}) as rig,
        ScriptedEngine(rig.spec, rig.pool) as more,
    ):
        new, fleet = ReplicaId("new"), rig.router.controller.state.fleet
        added = Added(spec=ReplicaSpec(replica_id=new, url=more.url), role=Role.DECODE)
        for number in range(3):
            async with _crowd(rig, 0 if number else 20):
                rig.router.post(added)
                await rig.until(lambda: fleet[new].state is State.DECODE, "it serves")
            assert len(rig.router.replicas.monitors) == 3
            rig.router.post(Remove(new))
            await rig.until(lambda: new not in fleet, "it is forgotten")


async def test_a_standby_sleeps_and_wakes() -> None:
    async with RouterRig(1, 2, planner={"mode": "automatic", "standby_ttl_s": 0.2}) as rig:
        rig.router.post(Drain(name(2)))
        await rig.in_state(2, State.INACTIVE)
        core = rig.engines[2].running
        await rig.until(lambda: core.sleep_level == 1, "it sleeps")
        rig.router.post(SetRole(name(2), Role.DECODE))
        await rig.in_state(2, State.DECODE)
        assert core.sleep_level is None


async def test_log_has_a_line_for_each_step_of_a_drain_and_of_the_exit(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    async with RouterRig(1, 2) as rig:
        rig.router.post(Drain(name(2)))
        await rig.in_state(2, State.SHUTTING_NULL)
        await rig.router.stop()
        lines = [record.getMessage() for record in caplog.records]
    assert [line.split(" (")[0] for line in lines if line.startswith(f"{name(2)}: ")][-2:] == [
        f"{name(2)}: decode -> draining_decode",
        f"{name(2)}: draining_decode -> standby",
    ]
    assert [line for line in lines if line.startswith("stop")] == [
        "stopping: no new requests; 0 running requests have 0.2 s (front.shutdown_timeout_s)",
        "stopped: 0 requests were cut off; engines go on",
    ]


# Failures


async def test_a_router_that_is_started_again_finds_its_engines() -> None:
    async with RouterRig(1, 2) as rig:
        await rig.whole(STREAM)
        first = rig.router
        running = asyncio.ensure_future(rig.complete({**STREAM, "max_tokens": 4000}))
        await rig.until(rig.holders, "an engine has it")
        await first.stop()
        with pytest.raises(aiohttp.ClientPayloadError):
            await running
        await rig.until(lambda: not rig.holders(), "its engine has given it up")
        await rig.start_router()
        await rig.whole(STREAM)


async def test_a_second_router_in_front_of_the_same_engines() -> None:
    """Each serves; one that stops takes nothing from the other."""
    async with RouterRig(1, 2) as rig:
        direct = await rig.direct(STREAM)
        first, url = rig.router, rig.url
        await rig.start_router()
        assert rig.url != url

        async def ask_first() -> bytes:
            async with rig.session.post(url + COMPLETIONS, json=rig.body(STREAM)) as answer:
                assert answer.status == 200
                return await answer.read()

        both = [ask_first() for _ in range(4)], [rig.complete(STREAM) for _ in range(4)]
        answers, replies = await asyncio.gather(*(asyncio.gather(*each) for each in both))
        assert all(each.endswith(b"data: [DONE]\n\n") for each in answers)
        asked = [asyncio.ensure_future(rig.complete(STREAM)) for _ in range(4)]
        await first.stop()
        for reply in (*replies, *await asyncio.gather(*asked)):
            assert_whole(reply, direct)


async def test_requests_may_end_while_the_router_stops() -> None:
    async with RouterRig(1, 1, front={"shutdown_timeout_s": 10.0}) as rig:
        running = asyncio.ensure_future(rig.whole({**STREAM, "max_tokens": 300}))
        await rig.until(rig.holders, "an engine has it")
        began = time.monotonic()
        stopping = asyncio.ensure_future(rig.router.stop())
        await asyncio.sleep(0.01)
        with pytest.raises(OSError, match="onnect"):
            await rig.complete(STREAM)
        await running
        await stopping
        assert time.monotonic() - began < 5


async def test_requests_that_do_not_end_hold_up_no_stop(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with RouterRig(
        0, 1, spec=ScriptedSpec(step_base_s=0.05), front={"shutdown_timeout_s": 2.0}
    ) as rig:
        running = asyncio.ensure_future(rig.complete({**STREAM, "max_tokens": 2000}))
        await rig.until(rig.holders, "an engine has it")
        began = time.monotonic()
        await rig.router.stop()
        # A timer of the event loop counts whole milliseconds, so it may end that much early.
        assert 1.99 < time.monotonic() - began < 3.5
        with pytest.raises(aiohttp.ClientError):
            await running
        assert f"clients: http://127.0.0.1:{rig.router.front_port}" in caplog.text
        assert "1 running requests have 2 s (front.shutdown_timeout_s)" in caplog.text
        assert "stopped: 1 requests were cut off" in caplog.text


async def test_a_frozen_engine_is_noticed_and_its_streams_go_on() -> None:
    health = {"timeout_s": 0.1, "failures": 2}
    async with RouterRig(1, 2, health=health) as rig:
        async with _crowd(rig, 6):
            await rig.until(lambda: len(rig.holders()) > 1, "they are decoded")
            rig.fail(1, K.FREEZE)
            await rig.until(lambda: rig.state(1) is State.FAILED, "it is noticed")
        await rig.recovered(1)


# Overload and deadlines


@pytest.mark.slow
@pytest.mark.parametrize("decode_requests", [8, 256], ids=["as engines", "as vLLM"])
async def test_three_times_too_much(decode_requests: int) -> None:
    """Refused at once with a time to come again; what is let in is answered soon, and enough is."""

    # Two decoders of 8 sequences: a request of 20 tokens takes 0.45 s. The figures are small,
    # as clients, router and engines share this process.
    spec = ScriptedSpec(step_base_s=0.02, decode_sequence_s=0.0003, max_num_seqs=8, kv_blocks=512)
    async with RouterRig(
        1, 2, spec=spec, overload={"ttft_target_s": 1.0}, flow={"decode_requests": decode_requests}
    ) as rig:
        capacity = 2 * 8 / (20 * (0.02 + 8 * 0.0003))

        async def ask(number: int) -> tuple[Reply, float]:
            began = time.monotonic()
            body = {"prompt": f"{number} hello", "max_tokens": 20, "stream": True}
            return await rig.complete(body), time.monotonic() - began

        async def load(per_s: float, seconds: float) -> list[tuple[Reply, float]]:
            rolled = random.Random(3)
            asked, began, due = [], time.monotonic(), 0.0
            while due < seconds:
                await asyncio.sleep(max(0.0, began + due - time.monotonic()))
                asked.append(asyncio.ensure_future(ask(len(asked))))
                due += rolled.expovariate(per_s)
            return await asyncio.gather(*asked)

        async def fill(count: int) -> float:
            """Let as many clients as there are sequences ask in turn; return requests a second."""
            began, numbers = time.monotonic(), iter(range(count))

            async def ask_in_turn() -> None:
                for number in numbers:
                    reply, _ = await ask(number)
                    assert reply.is_done

            await asyncio.gather(*(ask_in_turn() for _ in range(16)))
            return count / (time.monotonic() - began)

        # Rates are learned. A slow machine has less room than the engines, and takes longer.
        room = await fill(64)
        slower = max(1.0, capacity / room)
        began = time.monotonic()
        results = await load(3 * room, 2.5 * slower)
        took_s = time.monotonic() - began
        served = [reply for reply, _ in results if reply.status == 200]
        refused = [(reply, took) for reply, took in results if reply.status != 200]
        print(
            f"capacity {room:.0f}/s of {capacity:.0f}/s, served {len(served) / took_s:.0f}/s, "
            f"refused {len(refused)} of {len(results)}, first tokens after "
            f"{sorted(r.first_s for r in served)[len(served) // 2]:.2f} s (median), "
            f"{sorted(r.first_s for r in served)[int(0.99 * len(served))]:.2f} s (p99)"
        )
        assert len(refused) > len(results) / 4
        for reply, _ in refused:
            assert reply.status in (429, 503)
            assert int(reply.headers["Retry-After"]) >= 1
        # The tail is wide: engines, clients and the router share one process here.
        refusals = [took for _, took in refused]
        assert statistics.median(refusals) < 0.1 * slower
        assert statistics.quantiles(refusals, n=20)[-1] < 0.5 * slower
        assert all(reply.is_done and not reply.error for reply in served)
        waits = sorted(reply.first_s for reply in served)
        assert waits[int(0.99 * len(waits))] < 2.5 * slower
        assert len(served) / took_s > 0.6 * room


async def test_who_waits_longer_than_allowed_is_refused() -> None:
    async with RouterRig(
        1,
        1,
        front={"max_wait_s": 0.5},
        flow={"prefill_tokens": 1},
        overload={"ttft_target_s": 60.0},
    ) as rig:
        rig.fail(0, K.STALL, after_tokens=0, times=1)
        first = asyncio.ensure_future(rig.complete(STREAM))
        await rig.until(lambda: not rig.engines[0].board.faults(), "the first is computed")
        began = time.monotonic()
        reply = await rig.complete({**STREAM, "prompt": "two " + LONG})
        assert reply.status == 503
        assert int(reply.headers["Retry-After"]) >= 1
        assert 0.4 < time.monotonic() - began < 2.0
        first.cancel()


# Bugs


@contextmanager
def _a_bug(rig: RouterRig, kind: type[Event]) -> Iterator[list[int]]:
    """The controller breaks down over the next event of a kind; yields what is empty from then."""
    controller = rig.router.controller
    real = controller.step
    left = [1]

    def step(event: Event, now: float) -> Any:
        if isinstance(event, kind) and left:
            left.clear()
            controller.actions = []
            raise AssertionError("a bug")
        return real(event, now)

    controller.step = step  # type: ignore[method-assign]
    yield left
    controller.step = real  # type: ignore[method-assign]


def test_a_bug_costs_one_request_and_not_the_router(caplog: pytest.LogCaptureFixture) -> None:
    from vllm_kvpool.router.control.events import Arrived, DecodeBegan, DecodeEnded, PrefillEnded

    async def main() -> None:
        async with RouterRig(1, 1) as rig:
            for kind in (Arrived, PrefillEnded, DecodeBegan):
                with _a_bug(rig, kind):
                    body = {**STREAM, "prompt": f"{kind.__name__} {LONG}", "max_tokens": 2000}
                    reply = await rig.complete(body)
                    assert reply.status == 500 or reply.error is not None, kind
                    assert not rig.router._open
                state = rig.router.controller.state
                assert not state.requests, kind
                for each in state.fleet:  # what was not told of is not known
                    each.work.prefills.clear()
                    each.work.active.clear()
                    each.work.prefill_tokens = each.work.committed_blocks = (
                        each.work.num_starting
                    ) = 0
                    each.work.num_sequences = 0
            with _a_bug(rig, DecodeEnded):
                assert (await rig.complete(STREAM)).is_done, "it has its answer"
            for each in rig.router.controller.state.fleet:
                each.work.active.clear()
                each.work.committed_blocks = each.work.num_sequences = 0
            for kind in (Tick, Measured):
                with _a_bug(rig, kind) as left:
                    await rig.until(lambda left=left: not left, "it breaks down")
            at = rig.router.controller.state.now
            await rig.until(lambda: rig.router.controller.state.now > at + 0.3, "its clock goes on")
            assert (await rig.complete({"prompt": "x"})).status == 200

    with caplog.at_level(logging.ERROR):
        run(main)
    assert caplog.text.count("AssertionError: a bug") == 6


# Start


async def test_an_address_that_is_taken() -> None:
    async with RouterRig(1, 1) as rig:
        raw: dict[str, Any] = {
            "front": {"listen": f"127.0.0.1:{rig.router.front_port}"},
            "admin": {"listen": "127.0.0.1:0"},
            "replicas": [{"url": "http://127.0.0.1:1", "role": "decode"}],
        }
        router = Router(read_config(raw))
        with pytest.raises(OSError, match="in use"):
            await router.start()
        await router.stop()


async def test_engines_that_are_not_there_yet_are_waited_for() -> None:
    async with RouterRig(1, 1) as rig:
        for number in (0, 1):
            rig.kill(number)
        await rig.start_router(waits=False)
        assert (await rig.complete({"prompt": "x"})).status == 503
        for number in (0, 1):
            rig.restart(number)
        await rig.serving()
        assert (await rig.complete({"prompt": "x"})).status == 200
