"""The access log: one line a request, with what became of it."""

import logging
import re

import pytest

from tests.support.router_rig import RouterRig
from vllm_kvpool.router.control.events import Decode, Outcome, Prefill, PrefillEnded
from vllm_kvpool.router.control.requests import RequestId
from vllm_kvpool.router.control.states import ReplicaId
from vllm_kvpool.router.ops.request_log import RequestLog

STREAM = {"prompt": "hello " * 800, "max_tokens": 8, "temperature": 0, "stream": True}
NUMBER = r"[0-9.]+"
LINE = re.compile(
    rf"id=mine client=127\.0\.0\.1:\d+ method=POST path=/v1/completions model=scripted "
    rf"replicas=(?P<replicas>\S+) status=(?P<status>\S+) ttft_s=(?P<ttft>\S+) "
    rf"prompt_tokens=(?P<prompt>\d+) output_tokens=(?P<output>\d+) duration_s={NUMBER}"
)


def lines(caplog: pytest.LogCaptureFixture) -> list[re.Match[str]]:
    said = [each.message for each in caplog.records if each.name == "vllm_kvpool.router.access"]
    found = [LINE.fullmatch(each) for each in said]
    assert all(found), said
    return [each for each in found if each]


@pytest.mark.parametrize("is_stream", [True, False])
async def test_a_line_says_who_answered_how_soon_and_how_much(
    is_stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with RouterRig(1, 1, front={"access_log": True}) as rig:
        for more in ({}, {"max_tokens": -1}):
            body = {**STREAM, "stream": is_stream, **more}
            await rig.complete(body, headers={"X-Request-Id": "mine"})
        await rig.until(lambda: len(lines(caplog)) == 2, "both have their lines")
    served, rejected = lines(caplog)
    assert (served["replicas"], served["status"], served["output"]) == ("r0,r1", "200", "8")
    assert 0 < float(served["ttft"]) < 10
    assert int(served["prompt"]) > 50
    assert (rejected["status"], rejected["ttft"], rejected["output"]) == ("400", "-", "0")


async def test_no_line_unless_it_is_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with RouterRig(1, 1) as rig:
        await rig.stream(STREAM)
    assert not lines(caplog)


def test_what_the_router_adds_is_neither_its_queues_nor_its_engines() -> None:
    """A prompt is asked for at 1 and computed at 3; at 6 a decoder has room, at 7 it begins."""
    log = RequestLog(0.0)
    request_id, prefiller = RequestId("r"), ReplicaId("p")
    log.asks(Prefill(request_id, prefiller), 1.0)
    ended = PrefillEnded(request_id=request_id, replica=prefiller, outcome=Outcome.OK)
    log.call_ended(ended, 3.0)
    log.asks(Decode(request_id, ReplicaId("d"), 0, waited_s=3.5), 6.0)
    log.decode_has_begun(7.0)
    seconds = {each.name: each.seconds for each in log.observed}
    assert seconds["first_token_seconds"] == 7.0
    assert seconds["added_seconds"] == pytest.approx(0.5)


def test_what_clients_write_is_one_field() -> None:
    line = RequestLog(0.0).line(
        "i", client="", path="/v1/completions", model="m status=200\nid=x", status=400, now=1.0
    )
    assert line.count("\n") == 0
    assert line.split(" model=")[1].startswith(r"'m status=200\nid=x'")


def test_time_to_a_decoders_first_token_is_without_that_of_its_prompt() -> None:
    """A decoder that waits for a prompt is asked with it; what it adds is what comes after."""
    request_id, decoder = RequestId("r"), ReplicaId("d")
    log = RequestLog(began=0.0)
    log.asks(Prefill(request_id, ReplicaId("p")), 0.1)
    log.asks(Decode(request_id, decoder, 1 << 30), 0.1)
    ended = PrefillEnded(request_id=request_id, replica=ReplicaId("p"), outcome=Outcome.OK)
    log.call_ended(ended, 2.1)
    log.decode_has_begun(2.6)
    seconds = {each.name: (each.replica, each.seconds) for each in log.observed}
    assert seconds["replica_first_token_seconds"] == (decoder, pytest.approx(0.5))
    assert seconds["added_seconds"] == ("", pytest.approx(0.1))
    assert log.engine_s == pytest.approx(2.0)
