"""The three forms of a client's answer, each made of one call to an engine or of several.

`OnePiece`: the engine's answer as it is. `PassedOn`: an engine's stream as it comes. `Resumed`: a
stream that is read, so that another engine's stream can go on from where it breaks off. An answer
in one piece is assembled from a stream, so that it is failed over and timed token by token as well.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from functools import partial

import msgspec

from vllm_kvpool.router.control.events import Outcome
from vllm_kvpool.router.dataplane.calls import AnswerCall, ClientExchange
from vllm_kvpool.router.dataplane.headers import (
    EVENT_STREAM,
    JSON,
    JSON_HEADERS,
    STREAM_HEADERS,
    answer_headers,
)
from vllm_kvpool.router.dataplane.request_body import MAX_ANSWER_BYTES, ClientRequest
from vllm_kvpool.router.dataplane.responses import (
    OK,
    SERVER_ERROR,
    UNKNOWN,
    EngineLost,
    TokenCounts,
    error_event,
    outcome_of,
    read_detokenized,
    read_reply,
    read_usage,
)
from vllm_kvpool.router.dataplane.resume.chunks import has_other_details, with_details
from vllm_kvpool.router.dataplane.resume.policy import Detokenize, ResumeMode, stop_strings
from vllm_kvpool.router.dataplane.resume.stream_resumer import (
    Finish,
    Refusal,
    Resume,
    Step,
    StreamResumer,
)
from vllm_kvpool.router.dataplane.resume.whole_answer import (
    NotAssembled,
    WholeAnswer,
    is_streamable,
    streamed,
)
from vllm_kvpool.router.dataplane.sse import frames
from vllm_kvpool.router.dataplane.upstream import EngineResponse

log = logging.getLogger(__name__)

DETOKENIZE_PATH = "/detokenize"
DETOKENIZE_TIMEOUT_S = 5.0
MAX_DETOKENIZERS = 3
"""Engines that are asked, one after the other."""
PROMPT_GRACE_S = 0.25
"""Time that a usage waits for the counts of a prompt whose decoder was done before prefill."""


class OnePiece:
    """An answer in one piece, and what all forms have in common. Owned by the request's task."""

    def __init__(self, exchange: ClientExchange, request: ClientRequest) -> None:
        self._exchange = exchange
        self._http = exchange.http
        self._request = request
        """The request as engines are sent it."""

    @property
    def has_ended(self) -> bool:
        """True once all of a stream's answer has been read."""
        return False

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt, as far as a stream has told them."""
        return 0

    async def serve(self, call: AnswerCall) -> bool:
        """Make a call; return True if the client is answered, False if another call is to come.

        Raises EngineLost, NotAssembled; then the call has not been reported.
        """
        exchange = self._exchange
        body = call.body(self._request)
        call.is_in_one_piece = True
        if not exchange.prompt.is_computing:
            call.note_unseen()
        url, most_bytes = exchange.url(call.directive), min(exchange.most_bytes, MAX_ANSWER_BYTES)
        answer = await exchange.upstream.ask(url, body, exchange.headers, most_bytes=most_bytes)
        if outcome_of(answer.status) is not Outcome.OK:
            return await self._failed(call, answer)
        is_read = not self._request.is_passed_on
        if is_read:
            counts = read_reply(answer.body, stop_strings(self._request))
        else:
            counts = read_usage(answer.body)
        call.report(Outcome.OK, counts)
        if counts.details != UNKNOWN:
            await self._await_details()
        body, details = answer.body, exchange.prompt.details
        if is_read and details is not None and has_other_details(counts.details, details):
            body = with_details(body, details)
        await self._http.send(answer.status, answer_headers(answer.headers), exchange.told(body))
        return True

    async def lost(self, call: AnswerCall, outcome: Outcome) -> bool:
        """Report that the engine of a call is gone, and return as `serve` does."""
        call.report(outcome)
        return False

    async def _failed(self, call: AnswerCall, answer: EngineResponse) -> bool:
        """Report that an engine has refused the request, or has failed with it."""
        outcome = outcome_of(answer.status)
        call.report(outcome)
        if outcome is not Outcome.REJECTED:
            if answer.status >= SERVER_ERROR and outcome is Outcome.FAILED:
                self._exchange.failure = answer
            return False
        body = answer.body
        if self._http.status:  # of a stream that has brought comments alone
            body = error_event(answer.status, body, self._http.path)
        headers = answer_headers(answer.headers)
        await self._exchange.send_error(answer.status, body, headers)
        return True

    async def _await_details(self) -> None:
        """Give the prompt's call a moment to end, so that its counts are known."""
        call = self._exchange.prompt_call
        if call is not None:
            await asyncio.wait({call.task}, timeout=PROMPT_GRACE_S)


class PassedOn(OnePiece):
    """A stream that is passed on as it comes; only its counts are read.

    Once it has begun no other engine can go on: if it breaks off, the client's stream does.
    """

    async def serve(self, call: AnswerCall) -> bool:
        """Send the client an engine's stream, as `OnePiece.serve` does an answer."""
        http = self._http
        with await call.open(self._request.whole_body()) as engine:
            if engine.status != OK:
                return await self._failed(call, await engine.read())
            call.headers = answer_headers(engine.headers)
            while not await engine.pump(partial(self._feed, call)):
                await http.drain()
        call.report(Outcome.OK, self._counted(call))
        await http.end(self._line(call, bytes(call.line)), call.headers)
        return True

    def _feed(self, call: AnswerCall, data: bytes) -> bool:
        """Send the client bytes of a stream; True while it takes no more."""
        if call.is_aborted:
            return False  # the request's task learns of the abort in the loop's next turn
        call.line += data
        if b"\n" not in data:
            return False
        *lines, rest = bytes(call.line).split(b"\n")
        call.line = bytearray(rest)
        if not call.num_payloads:
            call.note_begin()
        call.num_payloads += data.count(b"data:") or 1
        told = b"\n".join([*(self._line(call, line) for line in lines), b""])
        return not self._http.put(told, call.headers)

    def _line(self, call: AnswerCall, line: bytes) -> bytes:
        """Read a line of a stream, and return it as the client may see it."""
        if not line.startswith(b"data:"):
            return line
        payload = line[5:]  # vLLM's events have one such line
        if b'"usage"' in payload and (counts := read_usage(payload)).prompt_tokens:
            call.counts = counts
        told = self._exchange.told(payload)
        return line if told is payload else b"data: " + told

    async def lost(self, call: AnswerCall, outcome: Outcome) -> bool:
        """Break the client's stream off, if it has begun."""
        if not self._http.status:
            call.report(outcome, self._counted(call))
            return False
        request_id = self._exchange.request_id
        log.warning("%s breaks off: no other engine can go on with it", request_id)
        call.report(Outcome.HOPELESS, self._counted(call))
        self._http.abort()
        return True

    def _counted(self, call: AnswerCall) -> TokenCounts:
        # Before the usage at the stream's end: mostly one token each.
        tokens = call.counts.output_tokens or call.num_payloads
        return msgspec.structs.replace(call.counts, output_tokens=tokens)


class Resumed(OnePiece):
    """A stream that goes on at another engine; with `is_whole` it is assembled to one piece."""

    def __init__(self, exchange: ClientExchange, request: ClientRequest, *, is_whole: bool) -> None:
        super().__init__(exchange, request)
        self._is_whole = is_whole
        self._begin()

    def _begin(self) -> None:
        self._resumer = StreamResumer(self._request, self._exchange.prompt)
        self._resume: Resume | None = None
        self._whole = WholeAnswer(self._request.api_path) if self._is_whole else None

    @property
    def has_ended(self) -> bool:
        """True once the client has all of the answer, or is about to."""
        return self._resumer.ended

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt, as far as the stream has told them."""
        return self._resumer.prompt_tokens or 0

    async def serve(self, call: AnswerCall) -> bool:
        """Feed the client's stream an engine's stream, and send the client what comes of it."""
        resumer, resume = self._resumer, self._resume
        if resume is None or resume.mode is ResumeMode.REPEAT:
            body = call.body(self._request, track=self._request.trackable)
        else:
            body = resume.body
        call.num_delivered = resumer.answer.num_delivered
        with await call.open(body) as engine:
            if engine.status != OK:
                return await self._failed(call, await engine.read())
            if not engine.headers.get("Content-Type", "").startswith(EVENT_STREAM):
                raise EngineLost("answers what is no stream of events")
            call.headers = answer_headers(engine.headers)
            if self._whole is not None:
                call.headers["Content-Type"] = JSON
            while not resumer.ended:
                if await engine.pump(partial(self._feed, call)):
                    break
                await self._http.drain()
            if resumer.ended:
                await self._end(call)
                engine.finish()
                return True
        raise EngineLost("its stream has no end")

    def _feed(self, call: AnswerCall, data: bytes) -> bool:
        """Send the client an engine's bytes; True to stop reading. EngineLost.

        Called by the engine's connection, also while the request's task is elsewhere.
        """
        if call.is_aborted:
            return False  # the request's task learns of the abort in the loop's next turn
        out, lost = self._read(call, data)
        if call.begins and not self._resumer.ended:
            call.note_begin()
        self._add_to_whole(out)
        if self._resumer.ended:
            call.last += out
            return True
        is_full = False
        if self._whole is None:
            # Comments keep proxies from closing a silent connection.
            data = frames(out) or call.events.take_comment()
            if data:
                is_full = not self._http.put(data, call.headers)
        if lost is not None:
            raise lost
        return is_full

    def _read(self, call: AnswerCall, data: bytes) -> tuple[list[bytes], EngineLost | None]:
        """Read an engine's bytes; return the client's payloads, and why the engine is lost.

        The client must be sent the payloads also if the engine is lost after them.
        """
        out: list[bytes] = []
        for payload in call.events.feed(data):
            try:
                out += self._resumer.feed(self._exchange.told(payload))
            except EngineLost as error:
                return out, error
            call.begins |= call.num_payloads == 0
            call.num_payloads += 1
            if self._resumer.ended:
                break  # an engine's events after the end of its answer are dropped
        return out, None

    async def _end(self, call: AnswerCall) -> None:
        """Report a call whose stream has ended, and send the client the rest."""
        resumer = self._resumer
        self._add_to_whole(resumer.held_usage())
        if self._whole is not None and not self._whole.is_complete:
            raise NotAssembled("the stream has no usage")
        call.report(Outcome.OK, self._counted(call))
        if resumer.holds_usage:
            await self._await_details()
            held = resumer.held_usage()
            self._add_to_whole(held)
            call.last[:0] = held
        await self._send_last(call.last, call.headers)

    async def _send_last(
        self, payloads: Sequence[bytes], headers: Mapping[str, str] | None = None
    ) -> None:
        """Send the last payloads; a whole answer has its part of them already."""
        if self._whole is None:
            await self._http.end(frames(payloads), headers or STREAM_HEADERS)
        else:
            status, body = self._whole.answer()
            await self._http.send(status, headers or JSON_HEADERS, body)

    def _add_to_whole(self, payloads: Sequence[bytes]) -> None:
        if self._whole is not None:
            for payload in payloads:
                self._whole.add(payload)

    def _counted(self, call: AnswerCall) -> TokenCounts:
        """Return the tokens that the call's stream has brought."""
        resumer = self._resumer
        if self._request.trackable:
            tokens = resumer.answer.num_delivered - call.num_delivered
        elif (counted := resumer.output_tokens) is not None:
            tokens = counted
        else:
            # Without a usage: mostly one token each; the last one is the end.
            tokens = max(0, call.num_payloads - 1)
        return TokenCounts(self.prompt_tokens, tokens, resumer.engine_details)

    async def _failed(self, call: AnswerCall, answer: EngineResponse) -> bool:
        if outcome_of(answer.status) is not Outcome.REJECTED or not self._resumer.has_begun:
            return await super()._failed(call, answer)
        replica, request_id = call.directive.replica, self._exchange.request_id
        log.info("%s: %s does not go on: %s", request_id, replica, answer.status)
        return await self._go_on(call, Outcome.FAILED, self._resumer.lost(rejected=True))

    async def lost(self, call: AnswerCall, outcome: Outcome) -> bool:
        """Have another engine go on, or tell the client that none can."""
        return await self._go_on(call, outcome, self._resumer.lost())

    async def _go_on(self, call: AnswerCall, outcome: Outcome, step: Step) -> bool:
        """Perform the resumer's step after the loss of a call's engine."""
        counts = self._counted(call)
        if isinstance(step, Detokenize):
            step = await self._detokenize(step, call)
        if self._has_to_begin_again(step):
            self._begin()
            call.report(outcome, counts)
            return False
        if isinstance(step, Resume):
            self._resume = step
            call.report(outcome, counts)
            return False
        if isinstance(step, Finish):
            call.report(Outcome.OK, counts)
            await self._send_last(step.payloads)
            return True
        call.report(Outcome.HOPELESS, counts)
        log.warning("%s cannot go on: %s", self._exchange.request_id, step.why)
        await self._exchange.send_error(SERVER_ERROR, step.payloads[0])
        return True

    def _has_to_begin_again(self, step: Resume | Finish | Refusal) -> bool:
        """Return True if a whole answer, of which the client has nothing, is to be begun again."""
        if self._whole is None:
            return False
        match step:
            case Resume():
                return step.is_draw_repeated
            case Finish():
                self._add_to_whole(step.payloads)
                return not self._whole.is_complete
            case Refusal():
                return True

    async def _detokenize(self, step: Detokenize, call: AnswerCall) -> Resume | Finish | Refusal:
        """Ask engines for the text of tokens, and return the resumer's next step.

        Takes DETOKENIZE_TIMEOUT_S at most; then the resumer goes on without the text.
        """
        exchange, time = self._exchange, asyncio.get_running_loop().time
        urls = exchange.control.others(call.directive.replica)[:MAX_DETOKENIZERS]
        deadline = time() + DETOKENIZE_TIMEOUT_S
        after: Step = step
        while isinstance(after, Detokenize):
            text: str | None = None
            for url in urls:
                left_s = deadline - time()
                if left_s <= 0:
                    break
                try:
                    answer = await exchange.upstream.ask(
                        url + DETOKENIZE_PATH, after.body, exchange.headers, left_s
                    )
                    if answer.status == OK:
                        text = read_detokenized(answer.body)
                        break
                except EngineLost:
                    continue
            after = self._resumer.detokenized(text)
        return after


def answer_of(exchange: ClientExchange) -> OnePiece:
    """Return the form of the answer to a request."""
    request = exchange.request
    if request.is_passed_on:
        return PassedOn(exchange, request) if request.stream else OnePiece(exchange, request)
    if request.stream:
        return Resumed(exchange, request, is_whole=False)
    if is_streamable(request):
        return Resumed(exchange, streamed(request), is_whole=True)
    return OnePiece(exchange, request)
