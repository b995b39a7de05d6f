"""Both calls of a request at once: a prefill engine fails at any moment, and answers stay right."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from tests.support.router_rig import CHAT, COMPLETIONS, FAST, RouterRig
from tests.support.scripted_spec import FaultKind, ScriptedSpec
from vllm_kvpool.router.control.events import EVERYTHING
from vllm_kvpool.router.control.states import ReplicaId

pytestmark = pytest.mark.alone

LONG = "hello world " * 400
Body = dict[str, Any]


def transfer(**options: Any) -> Body:
    return {"kv_transfer_params": {"kvpool": options}}


TALKS: dict[str, tuple[str, Body]] = {
    "stream": (COMPLETIONS, {"prompt": LONG, "stream": True}),
    "whole": (COMPLETIONS, {"prompt": LONG}),
    "in one piece": (COMPLETIONS, {"prompt": LONG, **transfer(tenant="search")}),
    "choices": (COMPLETIONS, {"prompt": LONG, "n": 2, "stream": True}),
    "chat": (CHAT, {"messages": [{"role": "user", "content": LONG}]}),
}
SLOW = ScriptedSpec(step_base_s=0.001, put_s=0.005, prefill_tokens_per_s=3000)
TRUSTING = {"front": {"trust_clients": True}}


def _options(rig: RouterRig, number: int) -> Body:
    """Return the pool's options in the last request to an engine."""
    asked = rig.engines[number].counts.asked
    return dict((asked.get("kv_transfer_params") or {}).get("kvpool") or {})


async def _begun(rig: RouterRig) -> None:
    """Wait until both engines have the request."""
    await rig.until(lambda: rig.holders() == [0, 1], "both engines have it")


@pytest.mark.parametrize("talk", TALKS)
async def test_decoder_has_the_request_while_its_prompt_is_computed(talk: str) -> None:
    path, body = TALKS[talk]
    async with RouterRig(1, 1, spec=SLOW, **TRUSTING) as rig:
        direct = await rig.direct(body, path)
        answer = asyncio.ensure_future(rig.complete(body, path))
        await _begun(rig)
        reply = await answer
        assert reply.text == direct.text
        options = _options(rig, 1)
        assert options["expect_tokens"] == EVERYTHING
        assert tuple(options["notices"]) == rig.spec.notices
        assert options["expect_timeout_ms"] == 600_000, "a prompt takes as long as it takes"
        assert rig.counts["served"] == 1
        assert "resumed" not in rig.counts


async def test_answer_in_one_piece_counts_as_begun_once_its_prompt_is_computed() -> None:
    """From then on the decoder may start other requests."""
    path, body = TALKS["in one piece"]
    async with RouterRig(1, 1, spec=SLOW, **TRUSTING) as rig:
        replica = rig.router.controller.state.fleet[ReplicaId("r1")]
        answer = asyncio.ensure_future(rig.complete({**body, "max_tokens": 900}, path))
        await _begun(rig)
        assert (replica.work.num_starting, replica.work.num_awaiting) == (1, 1)
        await rig.until(lambda: rig.holders() == [1], "it is being decoded")
        await rig.until(lambda: not replica.work.num_starting, "it counts as begun")
        assert replica.work.active
        assert (await answer).status == 200


FAULTS: dict[str, Body] = {
    "busy": {"kind": FaultKind.BUSY},
    "500": {"kind": FaultKind.STATUS, "status": 500},
    "400": {"kind": FaultKind.STATUS, "status": 400},
    "cut": {"kind": FaultKind.CUT, "after_tokens": 0},
    "no HTTP": {"kind": FaultKind.NOT_HTTP},
}


@pytest.mark.parametrize("talk", TALKS)
@pytest.mark.parametrize("fault", FAULTS)
async def test_decoder_waits_no_more_for_a_prompt_that_fails(talk: str, fault: str) -> None:
    path, body = TALKS[talk]
    async with RouterRig(1, 1, **TRUSTING) as rig:
        direct = await rig.direct(body, path)
        rig.fail(0, times=1, **FAULTS[fault])
        reply = await asyncio.wait_for(rig.complete(body, path), 5.0)
        assert reply.text == direct.text
        assert rig.counts["served"] == 1
        assert not _options(rig, 1).keys() & {"expect_tokens", "notices"}, "it computes all"


@pytest.mark.parametrize("talk", TALKS)
async def test_answer_is_right_when_prefill_dies_while_it_computes(talk: str) -> None:
    path, body = TALKS[talk]
    async with RouterRig(1, 1, spec=SLOW, **TRUSTING) as rig:
        direct = await rig.direct(body, path)
        answer = asyncio.ensure_future(rig.complete(body, path))
        await _begun(rig)
        rig.kill(0)
        assert (await asyncio.wait_for(answer, 5.0)).text == direct.text
        assert rig.counts["served"] == 1


@pytest.mark.parametrize("notices", [SLOW.notices, None])
async def test_answer_is_right_when_prefill_dies_before_all_is_stored(
    notices: tuple[str, ...] | None,
) -> None:
    """Prefill has answered, but its unfinished saves are lost.

    The decoder must not wait for them until its timeout.
    """
    async with RouterRig(1, 1, spec=replace(FAST, put_s=5.0, notices=notices)) as rig:
        body = {"prompt": LONG, "stream": True}
        direct = await rig.direct(body)
        answer = asyncio.ensure_future(rig.complete(body))
        state = rig.router.controller.state
        await rig.until(lambda: state.rates.handed_tokens.per_second(state.now), "it is computed")
        await rig.until(lambda: rig.holders() == [1], "the decoder has it")
        rig.kill(0)
        assert (await asyncio.wait_for(answer, 5.0)).text == direct.text
        assert rig.counts["resumed"] == 1


async def test_next_decoder_waits_for_the_same_prompt() -> None:
    async with RouterRig(1, 2, spec=SLOW, **TRUSTING) as rig:
        body = {"prompt": LONG, "stream": True}
        direct = await rig.direct(body)
        before = rig.engines[0].counts.received[COMPLETIONS]
        answer = asyncio.ensure_future(rig.complete(body))
        await rig.until(lambda: len(rig.holders()) == 2, "both engines have it")
        [decoder] = [each for each in rig.holders() if each]
        rig.kill(decoder)
        assert (await answer).text == direct.text
        assert rig.engines[0].counts.received[COMPLETIONS] == before + 1
        assert _options(rig, 3 - decoder)["expect_tokens"] == EVERYTHING


async def test_prompt_is_given_up_once_its_client_is_answered() -> None:
    """A decoder that waits no longer computes it: nobody blames the prefill engine for that."""
    async with RouterRig(1, 1, **TRUSTING) as rig:
        rig.fail(0, FaultKind.STALL, after_tokens=0, times=1)
        aborted = rig.engines[0].counts.aborted
        reply = await rig.complete({"prompt": LONG, **transfer(expect_timeout_ms=50)})
        assert reply.status == 200
        await rig.until(lambda: rig.engines[0].counts.aborted == aborted + 1, "it is given up")
        assert "resumed" not in rig.counts
        assert (await rig.complete({"prompt": "other " + LONG})).status == 200


async def test_notices_of_the_prompts_answer_go_to_a_decoder_that_is_asked_after_it() -> None:
    spec = replace(FAST, notices=("tcp://127.0.0.1:1", "tcp://127.0.0.1:2"))
    async with RouterRig(1, 1, spec=spec, flow={"decode_requests": 1}) as rig:
        first = asyncio.ensure_future(rig.complete({"prompt": "hello", "max_tokens": 5000}))
        await rig.until(lambda: rig.holders() == [1], "the decoder is full")
        answer = asyncio.ensure_future(rig.complete({"prompt": LONG}))
        await rig.until(lambda: len(rig.router.controller.state.migration), "it is computed")
        first.cancel()
        assert (await answer).status == 200
        options = _options(rig, 1)
        assert tuple(options["notices"]) == spec.notices
        assert 0 < options["expect_tokens"] < EVERYTHING
        assert options["expect_timeout_ms"] == 10_000
