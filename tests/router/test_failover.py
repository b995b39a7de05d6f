"""Engines fail in every way they can; clients get one whole and true answer, or a clean error."""

import asyncio
import itertools
import math
import random
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from multidict import CIMultiDict

from tests.support.player import CUT, END, HEAD, chunk, events, whole
from tests.support.router_rig import CHAT, COMPLETIONS, DONE, FAST, RouterRig, assert_whole
from tests.support.scripted_spec import FaultKind, ScriptedSpec
from tests.support.upstreams import quick_upstream
from vllm_kvpool.router.config import FrontConfig
from vllm_kvpool.router.control.events import (
    Action,
    Arrived,
    Cancelled,
    Decode,
    DecodeBegan,
    DecodeEnded,
    Event,
    Outcome,
    Prefill,
    PrefillEnded,
)
from vllm_kvpool.router.control.requests import RequestId
from vllm_kvpool.router.control.states import ReplicaId, State
from vllm_kvpool.router.dataplane.calls import AnswerCall, ClientExchange
from vllm_kvpool.router.dataplane.request_body import ApiPath, parse_request
from vllm_kvpool.router.dataplane.request_handler import RequestHandler
from vllm_kvpool.router.dataplane.responses import UNKNOWN, PromptDetails, TokenCounts
from vllm_kvpool.router.dataplane.upstream import EngineBroke

pytestmark = pytest.mark.alone

TOKENS_PER_STRIKE = 150  # of all engines, between two that die
LONG = "hello world " * 150  # just worth a prefill of its own
Body = dict[str, Any]

SLOW = ScriptedSpec(step_base_s=0.002, put_s=0.005)
STREAM: Body = {"prompt": LONG, "max_tokens": 60, "return_token_ids": True, "stream": True}
CHAT_STREAM: Body = {
    **{"messages": [{"role": "user", "content": LONG}], "max_tokens": 60},
    **{"return_token_ids": True, "stream": True},
}
HIDDEN: Body = {
    **{"prompt": LONG, "max_tokens": 60, "stream": True},
    "stream_options": {"include_usage": True},
}
WHOLE: Body = {"prompt": LONG, "max_tokens": 60, "return_token_ids": True}
UNSTREAMED: Body = {**WHOLE, "prompt_logprobs": 0}
TALKS = {
    "stream": (COMPLETIONS, STREAM),
    "chat": (CHAT, CHAT_STREAM),
    "whole": (COMPLETIONS, WHOLE),
    "unstreamed": (COMPLETIONS, UNSTREAMED),
    "ids hidden": (COMPLETIONS, HIDDEN),
    "short": (COMPLETIONS, {**STREAM, "prompt": "hello"}),
    "chat, whole": (CHAT, {**CHAT_STREAM, "stream": False}),
    "two choices, whole": (COMPLETIONS, {**WHOLE, "n": 2}),
}
PAIRS = list(zip([*TALKS][::2], [*TALKS][1::2], strict=True))

K = FaultKind
FAULTS: dict[str, Body] = {
    "die at once": {"kind": K.DIE, "after_tokens": 0},
    "die at first token": {"kind": K.DIE, "after_tokens": 1},
    "die in the middle": {"kind": K.DIE, "after_tokens": 23},
    "die at the last token": {"kind": K.DIE, "after_tokens": 60},
    "cut at once": {"kind": K.CUT, "after_tokens": 0},
    "cut in the middle": {"kind": K.CUT, "after_tokens": 31},
    "stall at once": {"kind": K.STALL, "after_tokens": 0},
    "stall in the middle": {"kind": K.STALL, "after_tokens": 17},
    "hang before headers": {"kind": K.HANG},
    "no end": {"kind": K.NO_DONE},
    "no end in the middle": {"kind": K.NO_DONE, "after_tokens": 9},
    "broken JSON": {"kind": K.BROKEN_JSON, "after_tokens": 12},
    "error in the stream": {"kind": K.ERROR, "after_tokens": 12},
    "error at once": {"kind": K.ERROR, "after_tokens": 0},
    "500": {"kind": K.STATUS, "status": 500},
    "502 in HTML": {"kind": K.STATUS, "status": 502},
    "200 in HTML": {"kind": K.STATUS, "status": 200},
    "busy": {"kind": K.BUSY},
    "429": {"kind": K.STATUS, "status": 429},
    "no HTTP": {"kind": K.NOT_HTTP},
}
FEW = ("ids hidden", "short", "chat, whole", "two choices, whole")
SOME = ("die at once", "die in the middle", "stall in the middle", "no end", "500")
IMPATIENT = {
    "front": {"engine_timeout_s": 0.15, "answer_timeout_s": 0.3},
    "flow": {"max_attempts": 20, "max_lost": 20},
}
"""On a busy machine answers without a fault may be late, too: hence many attempts."""


@pytest.mark.parametrize("talks", PAIRS, ids=" and ".join)
async def test_whatever_happens_to_one_decode_engine(talks: Sequence[str]) -> None:
    """Two conversations at a time, each with its own router and engines: they mostly wait."""

    async def faults_in(talk: str) -> None:
        path, body = TALKS[talk]
        async with RouterRig(1, 2, **IMPATIENT) as rig:
            direct = await rig.direct(body, path)
            for name, fault in FAULTS.items():
                if (name == "no end" and talk == "unstreamed") or (
                    talk in FEW and name not in SOME
                ):
                    continue
                rig.fail((1, 2), **fault, times=1)
                reply = await rig.complete(body, path)
                # Of two, both may have had it.
                assert any(not each.board.faults() for each in rig.engines[1:]), name
                assert_whole(reply, direct, name)
                await rig.recovered(1, 2)

    await asyncio.gather(*map(faults_in, talks))


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_whatever_happens_to_a_prefill_engine(path: str) -> None:
    async with RouterRig(2, 1, **IMPATIENT) as rig:
        for name, fault in FAULTS.items():
            is_late = fault.get("after_tokens", 0) > 1
            if is_late or name == "no end" or (path == CHAT and name not in SOME):
                continue
            prompt = f"{name} {LONG}"
            body = {**STREAM, "prompt": prompt}
            if path == CHAT:
                body = {**CHAT_STREAM, "messages": [{"role": "user", "content": prompt}]}
            rig.fail((0, 1), **fault, times=1)
            await rig.whole(body, path, what=name)
            assert any(not each.board.faults() for each in rig.engines[:2]), name
            await rig.recovered(0, 1)


async def test_a_stream_whose_engines_die_one_after_the_other() -> None:
    async with RouterRig(1, 3) as rig:
        for path, body in (TALKS["stream"], TALKS["chat"], TALKS["ids hidden"]):
            rig.fail((1, 2, 3), K.DIE, after_tokens=15, seconds=0.3, times=1)
            await rig.whole(body, path)
            assert sum(each.counts.deaths for each in rig.engines) >= 3
            await rig.recovered(1, 2, 3)


async def test_many_streams_while_engines_die_at_random_and_come_back() -> None:
    rolled = random.Random(5)
    async with RouterRig(
        2, 4, spec=SLOW, flow={"max_attempts": 8, "max_lost": 8}, overload={"ttft_target_s": 60.0}
    ) as rig:
        bodies = [
            {
                **{"prompt": f"{number} {LONG}", "max_tokens": rolled.randrange(20, 120)},
                **{"return_token_ids": True, "stream": number % 4 != 0},
            }
            for number in range(24)
        ]
        direct = await asyncio.gather(*map(rig.direct, bodies))
        asked = [asyncio.ensure_future(rig.complete(each)) for each in bodies]
        begun = sum(each.counts.tokens for each in rig.engines)
        for strike in itertools.count(1):
            due = begun + strike * TOKENS_PER_STRIKE
            await rig.until(
                lambda due=due: (  # type: ignore[misc]
                    sum(each.counts.tokens for each in rig.engines) >= due
                    or all(each.done() for each in asked)
                ),
                "tokens",
            )
            if all(each.done() for each in asked):
                break
            number = rolled.randrange(6)
            kind = rolled.choice([K.DIE, K.DIE, K.CUT])
            rig.fail(number, kind, after_tokens=rolled.randrange(100), seconds=0.15, times=1)
        rig.restart(*range(6))
        for each, known in zip(asked, direct, strict=True):
            assert_whole(await each, known)
        assert rig.counts["resumed"] > 0, rig.describe()


# What cannot go on

HOPELESS: dict[str, Body] = {
    "sampled with a penalty": {"temperature": 1.0, "seed": 3, "presence_penalty": 0.5},
    "two choices": {"n": 2},
    "two prompts": {"prompt": [LONG, "hello"]},
}


@pytest.mark.parametrize("name", HOPELESS)
async def test_a_stream_that_cannot_go_on_ends_with_an_error(name: str) -> None:
    async with RouterRig(1, 2) as rig:
        body = {**STREAM, **HOPELESS[name]}
        rig.fail((1, 2), K.DIE, after_tokens=20, times=1)
        reply = await rig.complete(body)
        assert reply.status == 200
        assert reply.error["code"] == 500
        assert re.search("cannot be continued|looks at the tokens", reply.error["message"])
        assert reply.payloads[-1] == DONE
        assert rig.counts["hopeless"] == 1
        # What is answered in one piece is asked for again.
        await rig.recovered(1, 2)
        rig.fail(1, K.DIE, after_tokens=20, times=1)
        assert (await rig.complete({**body, "stream": False})).status == 200


async def test_a_sampled_stream_goes_on_without_a_token_lost_or_doubled() -> None:
    async with RouterRig(1, 2) as rig:
        for path, body in (TALKS["stream"], TALKS["chat"]):
            rig.fail((1, 2), K.CUT, after_tokens=20, times=1)
            reply = await rig.complete({**body, "temperature": 1.0, "seed": 11}, path)
            assert reply.is_done
            assert reply.error is None
            assert len(reply.token_ids) == 60
            assert reply.finish_reason == "length"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_sampled_answer_in_one_piece_of_unknown_text_is_begun_again(path: str) -> None:
    """Engines sampled its last text anew, three times in vain: 502."""
    async with RouterRig(0, 2) as rig:
        for number in (0, 1):
            rig.fail(number, K.CUT, after_tokens=40, times=1)
            rig.fail(number, K.STATUS, paths=("/detokenize",))
        asked = CHAT_STREAM if path == CHAT else STREAM
        body = {**asked, "stream": False, "stop": ["zzzz"], "temperature": 1.0}
        reply = await rig.complete(body, path)
        assert reply.status == 200
        assert reply.finish_reason == "length"


async def test_what_all_engines_say_of_their_failure_reaches_the_client() -> None:
    async with RouterRig(1, 2) as rig:
        error = '{"error":{"message":"out of luck","type":"InternalServerError","code":500}}'
        rig.fail((1, 2), K.STATUS, status=500, body=error, content_type="application/json")
        for body in (WHOLE, STREAM):
            reply = await rig.complete(body)
            assert (reply.status, reply.body.decode()) == (500, error)
        assert rig.counts["given_up"] == 2
        assert [rig.state(number) for number in (1, 2)] == [State.DECODE] * 2


@pytest.mark.parametrize(
    ("kind", "status"), [(K.NOT_HTTP, 200), (K.STATUS, 200), (K.STATUS, 502)], ids=str
)
async def test_rubbish_of_all_engines_is_a_bad_gateway(kind: FaultKind, status: int) -> None:
    """A proxy's page of HTML is no answer to a client of the API."""
    async with RouterRig(1, 2) as rig:
        rig.fail((1, 2), kind, status=status)
        for body in (WHOLE, STREAM):
            reply = await rig.complete(body)
            assert reply.status == 502, reply
            assert reply.error["code"] == 502
            assert int(reply.headers["Retry-After"]) >= 1


POISON = {"X-Request-Id": "poison"}


@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_that_ends_every_engine_it_reaches_ends_two(stream: bool) -> None:
    async with RouterRig(1, 5) as rig:
        rig.fail(range(6), K.DIE, after_tokens=0, request_id="poison")
        asked = {"prompt": LONG, "max_tokens": 50, "return_token_ids": True, "stream": True}
        direct = await rig.direct(asked)
        others = [asyncio.ensure_future(rig.complete(asked)) for _ in range(10)]
        reply = await rig.complete({"prompt": "hello", "stream": stream}, headers=POISON)
        assert reply.status == 502
        assert sum(each.counts.deaths for each in rig.engines) == 2
        for each in others:
            assert_whole(await each, direct)


async def test_a_prompt_that_ends_every_prefill_engine_ends_two() -> None:
    async with RouterRig(4, 1, spec=replace(FAST, notices=None)) as rig:
        rig.fail(range(4), K.DIE, after_tokens=0, request_id="poison-prefill")
        assert (await rig.complete(STREAM, headers=POISON)).status == 502
        assert sum(each.counts.deaths for each in rig.engines) == 2


async def test_prompt_whose_decoder_waits_ends_four_engines_at_most() -> None:
    """Two have it at once. A decoder that was given up as it ended is not counted.

    Which of the two dies first depends on the machine. Four: a decoder; then the prefill replica,
    and the next decoder as it is given up; then the decoder after that.
    """
    async with RouterRig(4, 3, flow={"max_attempts": 9}) as rig:
        for request_id in ("poison", "poison-prefill"):
            rig.fail(range(7), K.DIE, after_tokens=0, request_id=request_id)
        assert (await rig.complete(STREAM, headers=POISON)).status == 502
        assert 2 <= sum(each.counts.deaths for each in rig.engines) <= 4


async def test_engines_that_are_not_there_any_more_are_no_reason_to_suspect_a_request() -> None:
    async with RouterRig(1, 6, health={"every_s": 60.0}) as rig:
        for number in range(1, 6):
            rig.kill(number)  # and nobody has told the router
        await rig.whole(STREAM)


# Engines with bad manners

KEEP_ALIVE = b": keep-alive\n\n"  # as vLLM says it with --sse-keep-alive-interval
COMMENT = chunk(KEEP_ALIVE)
REFUSED = ("422 No", "Content-Type: application/json")
REJECTION = whole(b'{"detail":"no"}', *REFUSED)
NO = b'{"error": {"message": "no",\n "type": "BadRequestError", "param": null, "code": 422}}'
REJECTION_OF_VLLM = whole(NO, *REFUSED)


async def _half(rig: RouterRig) -> Sequence[bytes]:
    """An answer to STREAM, or to HIDDEN, that breaks in the middle of an event."""
    tracked = await rig.direct(STREAM)
    return (HEAD, events(*tracked.payloads[:7], b'{"broken'), CUT)


async def test_what_came_just_before_the_failure_is_not_lost() -> None:
    async with RouterRig(0, 2) as rig:
        for body in (STREAM, HIDDEN):
            async with rig.played(await _half(rig), then_engines=True) as heard:
                await rig.whole(body)
            assert len(heard.bodies) == 1
        assert rig.counts["resumed"] >= 2


async def test_a_rejection_after_a_failure_is_passed_on() -> None:
    async with RouterRig(0, 2) as rig:
        for body in (WHOLE, STREAM):
            async with rig.played((HEAD, CUT), REJECTION):
                reply = await rig.complete(body)
                assert (reply.status, reply.body) == (422, b'{"detail":"no"}')
                assert rig.counts["resumed"] > 0
                assert "given_up" not in rig.counts


async def test_who_does_not_go_on_from_tokens_is_asked_for_all_of_it() -> None:
    async with RouterRig(0, 2) as rig:
        half = await _half(rig)
        async with rig.played(half, REJECTION, REJECTION, then_engines=True) as heard:
            await rig.whole(STREAM)
        first, tokens, again = (each["prompt"] for each in heard.asked)
        assert first == again == STREAM["prompt"]
        assert isinstance(tokens, list)


async def test_an_engine_keeps_the_clients_connection_alive() -> None:
    """Before the first token too, when an answer takes longest."""
    async with RouterRig(0, 1) as rig:
        first, *more = (await rig.direct(STREAM)).payloads
        said = (COMMENT, COMMENT, events(first), COMMENT, events(*more))
        async with rig.played((HEAD, *said, END)):
            answer = await rig.told(COMPLETIONS, STREAM)
        frames = [b"data: %b\n\n" % each for each in (first, *more)]
        assert answer == b"".join([KEEP_ALIVE * 2, frames[0], KEEP_ALIVE, *frames[1:]])


async def test_an_engine_that_dies_after_a_comment_is_replaced() -> None:
    async with RouterRig(0, 2) as rig:
        async with rig.played((HEAD, COMMENT, CUT), then_engines=True) as heard:
            await rig.whole(STREAM)
        assert len(heard.bodies) == 1


@pytest.mark.parametrize(
    ("rejection", "why"),
    [(REJECTION, 'The engine refuses: {"detail":"no"}'), (REJECTION_OF_VLLM, "no")],
)
async def test_a_rejection_after_a_comment_is_told_within_the_stream(
    rejection: Sequence[bytes], why: str
) -> None:
    """By the first that rejects it: it is none of that engine's failures."""
    async with RouterRig(0, 2) as rig, rig.played((HEAD, COMMENT, CUT), rejection) as heard:
        reply = await rig.complete(STREAM)
        assert (reply.status, reply.is_done) == (200, True)
        assert (reply.error["message"], reply.error["code"]) == (why, 422)
        assert len(heard.bodies) == 2


@pytest.mark.parametrize("more", [(events(b'{"more":1}'), END), ()], ids=["speaks", "stays"])
async def test_an_engine_that_goes_on_after_its_last_event_holds_up_nobody(
    more: Sequence[bytes],
) -> None:
    """The router ignores bytes after the last event, and does not wait for the connection's end."""
    async with RouterRig(0, 1) as rig:
        payloads = (await rig.direct(STREAM)).payloads
        async with rig.played((HEAD, events(*payloads) + b"".join(more))):
            began = time.monotonic()
            for _ in range(3):
                await rig.whole(STREAM)
            assert time.monotonic() - began < 2.0


async def test_connections_to_engines_are_used_again() -> None:
    async with RouterRig(0, 1) as rig:
        payloads = (await rig.direct(STREAM)).payloads
        async with rig.played((HEAD, events(*payloads), END)) as heard:
            for _ in range(5):
                await rig.whole(STREAM)
                await rig.kept(0)  # the end of the body comes by itself
            assert heard.num_connections == 1


async def test_an_event_without_end_is_no_event() -> None:
    async with RouterRig(0, 1) as rig, rig.played((HEAD, chunk(b"x" * (65 << 20)), CUT)):
        assert (await rig.complete(STREAM)).status == 502


@pytest.mark.parametrize("body", [WHOLE, STREAM], ids=["whole", "stream"])
@pytest.mark.parametrize("num_pieces", [1, 3])
async def test_first_token_is_told_once_or_with_the_end_that_comes_with_it(
    num_pieces: int, body: Body
) -> None:
    """For an answer that comes at once, a single event reports both the first token and the end."""
    async with RouterRig(0, 1) as rig:
        told: list[Event] = []
        step = rig.router.controller.step
        tracked = {**STREAM, "stream_options": {"include_usage": True}}
        payloads = (await rig.direct(tracked)).payloads
        size = math.ceil(len(payloads) / num_pieces)
        pieces = (events(*payloads[at : at + size]) for at in range(0, len(payloads), size))

        def seen(event: Event, now: float) -> list[Action]:
            if isinstance(event, Arrived | DecodeBegan | DecodeEnded):
                told.append(event)
            return step(event, now)

        rig.router.controller.step = seen  # type: ignore[method-assign]
        async with rig.played((HEAD, *pieces, END)):
            assert (await rig.complete(body)).status == 200
        arrived, *begun, ended = told
        assert isinstance(arrived, Arrived)
        assert [type(each) for each in begun] == [DecodeBegan] * (num_pieces > 1)
        assert isinstance(ended, DecodeEnded)
        assert ended.began is (num_pieces == 1)
        assert ended.output_tokens == STREAM["max_tokens"]
        assert len(rig.router.controller.state.counts.waits) == 1
        await rig.until(lambda: not rig.router._open, "the request is counted")
        _, text = rig.router.metrics()
        assert b"kvpool_router_first_token_seconds_count 1" in text


async def test_what_cannot_be_assembled_is_asked_for_again_as_it_came() -> None:
    """Something that no rule puts into a whole answer, and a stream that has no usage."""
    async with RouterRig(0, 1) as rig:
        payloads = (await rig.direct(STREAM)).payloads
        unknown = payloads[0].replace(b'"logprobs":null', b'"citations":[1]')
        for said in ([unknown], payloads):
            async with rig.played((HEAD, events(*said), END), then_engines=True) as heard:
                await rig.whole(WHOLE)
            assert heard.asked[0]["stream"] is True
            assert rig.engines[0].counts.asked == rig.body(WHOLE)
        assert "resumed" not in rig.counts
        assert len(rig.router.controller.state.counts.waits) == 2, "its first token has come"


# Decisions that come late

ONE, R = RequestId("1"), ReplicaId("r")
DECODE = Decode(ONE, R, 0)
FOUND = PromptDetails(cached_tokens=7, created_cache_tokens=90)


def _exchange(told: list[Event]) -> ClientExchange:
    """Return an exchange without a client, whose engines cannot be reached."""
    request = parse_request(ApiPath.COMPLETION, b'{"model":"m","prompt":"x","stream":true}')
    control: Any = SimpleNamespace(post=told.append, url_of=lambda replica: "http://127.0.0.1:9")
    client: Any = None
    headers = CIMultiDict({"X-Request-Id": "1"})
    return ClientExchange(ONE, request, headers, client, control, quick_upstream(), FrontConfig())


@pytest.mark.parametrize("call", [Prefill(ONE, R), DECODE])
async def test_a_call_that_is_aborted_before_it_begins_is_not_made(call: Prefill | Decode) -> None:
    """The replica has failed between the decision and its performance."""
    told: list[Event] = []
    handler = RequestHandler(_exchange(told))
    handler.enqueue(call)
    handler.abort(R)
    task = asyncio.ensure_future(handler.run())
    for _ in range(3):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    first, last = told
    assert isinstance(first, PrefillEnded if isinstance(call, Prefill) else DecodeEnded)
    assert first.outcome is Outcome.LOST
    assert last == Cancelled(ONE)


async def test_a_call_that_was_given_to_a_client_that_has_gone_is_reported() -> None:
    told: list[Event] = []
    handler = RequestHandler(_exchange(told))
    task = asyncio.ensure_future(handler.run())
    await asyncio.sleep(0)
    handler.enqueue(DECODE)
    task.cancel()
    await asyncio.wait([task])
    ended = DecodeEnded(request_id=ONE, replica=R, outcome=Outcome.CANCELLED)
    assert told == [Cancelled(ONE), ended]


@pytest.mark.parametrize(
    ("outcomes", "told"),
    [
        ([Outcome.OK], FOUND),
        ([Outcome.BUSY], None),
        ([Outcome.UNREACHED], None),
        ([Outcome.REJECTED], None),
        ([Outcome.LOST], UNKNOWN),
        ([Outcome.FAILED], UNKNOWN),
        ([Outcome.BUSY, Outcome.OK], FOUND),
        ([Outcome.LOST, Outcome.OK], UNKNOWN),
    ],
    ids=str,
)
async def test_details_of_the_prompt_are_those_of_the_first_engine_that_had_it(
    outcomes: list[Outcome], told: PromptDetails | None
) -> None:
    """While a prompt's call runs, and after its engine was lost, they are unknown."""
    exchange = _exchange([])
    handler = RequestHandler(exchange)
    for outcome in outcomes:
        handler.enqueue(Prefill(ONE, R))
        assert exchange.prompt.details == UNKNOWN
        call = exchange.prompt_call
        call.task.cancel()
        call.report(outcome, TokenCounts(details=FOUND))
        await asyncio.wait([call.task])
    assert exchange.prompt.details == told


@pytest.mark.parametrize(
    ("expects", "num_payloads", "told"), [(7, 0, None), (7, 1, UNKNOWN), (0, 0, UNKNOWN)]
)
async def test_decoder_that_is_lost_while_it_waits_has_not_computed_the_prompt(
    expects: int, num_payloads: int, told: PromptDetails | None
) -> None:
    exchange = _exchange([])
    call = AnswerCall(exchange, Decode(ONE, R, expects), num_payloads=num_payloads)
    call.report(Outcome.LOST)
    assert exchange.prompt.details == told


def _at_call() -> tuple[AnswerCall, asyncio.Event, asyncio.Task[bool]]:
    """Return a call that does not end by itself; the event is set once the call has begun."""
    made, begun = AnswerCall(_exchange([]), DECODE), asyncio.Event()

    async def call() -> bool:
        begun.set()
        await asyncio.Event().wait()
        return True

    return made, begun, asyncio.ensure_future(made.attempt(call))


ORDERS = ("abort gone", "gone abort", "abort turn gone", "gone turn abort")


@pytest.mark.parametrize("order", ORDERS)
async def test_a_client_that_goes_as_its_call_is_given_up_is_not_served_on(order: str) -> None:
    made, begun, task = _at_call()
    await begun.wait()
    for what in order.split():
        match what:
            case "abort":
                made.abort()
            case "gone":
                task.cancel()
            case _:
                await asyncio.sleep(0)
    await asyncio.wait([task])
    assert task.cancelled()


async def test_a_call_that_is_given_up_leaves_no_cancel_behind() -> None:
    made, begun, task = _at_call()
    await begun.wait()
    made.abort()
    await asyncio.wait([task])
    assert isinstance(task.exception(), EngineBroke)
    assert task.cancelling() == 0


@pytest.mark.parametrize("is_early", [False, True])
async def test_what_is_given_up_as_it_has_been_reported_is_sent_to_its_end(is_early: bool) -> None:
    """The order crosses the report, and comes while the client takes the rest."""

    told: list[Event] = []
    made = AnswerCall(_exchange(told), DECODE)

    async def call() -> bool:
        if is_early:
            made.abort()
        made.report(Outcome.OK)
        if not is_early:
            made.abort()
        await asyncio.sleep(0.01)
        return True

    assert await made.attempt(call)
    assert [each.outcome for each in told if isinstance(each, DecodeEnded)] == [Outcome.OK]
