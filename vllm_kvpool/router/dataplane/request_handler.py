"""The handler of one request: performs the controller's directives and reports their ends.

A handler lives in the task of the client's connection. The controller chooses the replicas that
compute the prompt and answer; the handler makes the calls, the prompt's call in a task of its own.
It sends the client the answer as it comes. If the engine is lost in mid-stream, the next engine's
stream goes on from there. An answer in one piece is assembled from a stream, so that it is failed
over and timed token by token as well.
Each call is reported exactly once, and the controller always learns that the request is over.
"""

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import msgspec
from multidict import CIMultiDict

from vllm_kvpool.config import MAX_EXPECT_TIMEOUT_MS
from vllm_kvpool.router.config import FrontConfig
from vllm_kvpool.router.control.events import (
    ANSWERED,
    Cancelled,
    Decode,
    DecodeBegan,
    Outcome,
    Prefill,
    Refuse,
)
from vllm_kvpool.router.control.requests import RequestId
from vllm_kvpool.router.control.states import ReplicaId
from vllm_kvpool.router.dataplane.calls import (
    AnswerCall,
    AnswerStream,
    PassedStream,
    PromptCall,
)
from vllm_kvpool.router.dataplane.control_plane import ControlPlane, Directive
from vllm_kvpool.router.dataplane.headers import (
    EVENT_STREAM,
    JSON,
    JSON_HEADERS,
    REQUEST_ID,
    STREAM_HEADERS,
    answer_headers,
    with_request_id,
)
from vllm_kvpool.router.dataplane.http_server import ClientGone, HttpRequest
from vllm_kvpool.router.dataplane.request_body import (
    MAX_ANSWER_BYTES,
    ClientRequest,
    error_body,
    is_anthropic,
)
from vllm_kvpool.router.dataplane.responses import (
    OK,
    SERVER_ERROR,
    UNKNOWN,
    EngineLost,
    PromptDetails,
    TokenCounts,
    call_ended,
    error_event,
    outcome_of,
    read_detokenized,
    read_reply,
    read_usage,
)
from vllm_kvpool.router.dataplane.resume.chunks import DONE, has_other_details, with_details
from vllm_kvpool.router.dataplane.resume.policy import Detokenize, ResumeMode
from vllm_kvpool.router.dataplane.resume.stream_resumer import (
    Finish,
    Refusal,
    Resume,
    StreamResumer,
)
from vllm_kvpool.router.dataplane.resume.whole_answer import (
    NotAssembled,
    WholeAnswer,
    is_streamable,
    streamed,
)
from vllm_kvpool.router.dataplane.sse import frames
from vllm_kvpool.router.dataplane.upstream import (
    EngineBroke,
    EngineResponse,
    EngineUnreached,
    Upstream,
)
from vllm_kvpool.router.ops.request_log import RequestLog

log = logging.getLogger(__name__)

T = TypeVar("T")

DETOKENIZE_PATH = "/detokenize"
DETOKENIZE_TIMEOUT_S = 5.0
MAX_DETOKENIZERS = 3
"""Engines that are asked, one after the other."""
PROMPT_GRACE_S = 0.25
"""Time that a usage waits for the counts of a prompt whose decoder was done before prefill."""
_MAY_HAVE_COMPUTED = frozenset({Outcome.LOST, Outcome.FAILED})
"""Outcomes of calls whose engine may have put a part of the prompt into the pool."""


class RequestHandler:
    """Owned by its task; `enqueue`, `abort` and `fail` are called in the same loop."""

    def __init__(
        self,
        request_id: RequestId,
        request: ClientRequest,
        headers: CIMultiDict[str],
        http: HttpRequest,
        control: ControlPlane,
        upstream: Upstream,
        config: FrontConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.request_id = request_id
        self.log = RequestLog(clock(), request.tenant)
        self._client_request = self._request = request
        """The request as the client sent it, and as engines are sent it."""
        self._headers = headers
        self._http = http
        self._control = control
        self._upstream = upstream
        self._config = config
        self._clock = clock
        self._calls: deque[AnswerCall | Refuse] = deque()
        """Calls to be made, or the refusal to be sent, in order."""
        self._wake = asyncio.Event()
        self._prompt_call: PromptCall | None = None
        """The prompt's call, while it runs."""
        self._details: PromptDetails | None = None
        """Details of the prompt by the first engine that had it; None: the one that answers."""
        self._answer_details = UNKNOWN
        """Details of the prompt by the engine that answered last."""
        self._is_part_computed = False
        """True once an engine may have computed a part of the prompt and has not said how much."""
        self._notices: tuple[str, ...] = ()
        """Endpoints that the prompt's call has answered."""
        self._call: AnswerCall | None = None
        """The present call, until its end has been reported."""
        self._is_over = False
        """True once the controller knows that the request is over."""
        self._has_failed = False
        self._whole: WholeAnswer | None = None
        """The answer that is assembled for a client without a stream."""
        if not (request.stream or request.is_passed_on) and is_streamable(request):
            self._whole = WholeAnswer(request.api_path)
            self._request = streamed(request)
        self._resumer = self._new_resumer()
        self._resume: Resume | None = None
        self._most_bytes = request.most_answer_bytes(headers.get(REQUEST_ID, ""))
        """Limit of the bytes of each engine's answer."""
        self._failure: EngineResponse | None = None
        """The answer of an engine that has failed."""

    def _new_resumer(self) -> StreamResumer | None:
        request = self._request
        if not request.stream or request.is_passed_on:
            return None
        return StreamResumer(request)

    # Called by the router

    def enqueue(self, directive: Directive) -> None:
        """Do this next; a `Prefill` at once, beside what is done."""
        if isinstance(directive, Prefill):
            self._begin_prefill(directive)
            return
        self._calls.append(AnswerCall(directive) if isinstance(directive, Decode) else directive)
        self._wake.set()

    def abort(self, replica: ReplicaId) -> None:
        """The call at a replica, begun or not, is not wanted any more; it ends as lost.

        Without effect on an answer that has been read to its end, or a call that has been reported.
        """
        prompt_call = self._prompt_call
        if prompt_call is not None and prompt_call.directive.replica == replica:
            log.info("%s: %s is lost: given up by the router", self.request_id, replica)
            self._end_prefill(Outcome.LOST)
            return
        if self._resumer is not None and self._resumer.ended:
            return
        call = self._next_call()
        if call is not None and call.directive.replica == replica:
            call.abort()

    def _next_call(self) -> AnswerCall | None:
        """Return the call that is made or will be made next, if there is one."""
        call = self._call or next(iter(self._calls), None)
        return call if isinstance(call, AnswerCall) else None

    def fail(self) -> None:
        """The router has a bug; the client is told so, if it waits."""
        self._has_failed = True
        if (call := self._next_call()) is not None:
            call.abort()
        self._wake.set()

    # The task

    async def run(self) -> None:
        """Serve the client; the request has been announced to the controller."""
        try:
            await self._serve()
        except ClientGone as error:
            log.info("%s: its client %s", self.request_id, error)
        except Exception:
            # The top of the request's lane: a bug costs this request, and no other.
            log.exception("%s has failed", self.request_id)
            await self._tell_failure()
        finally:
            self._end_all()

    async def _serve(self) -> None:
        is_answered = False
        while not is_answered:
            call = await self._next()
            if isinstance(call, Refuse):
                self._is_over = is_answered = True
                await self._refuse(call)
                continue
            self.log.asks(call.directive, self._clock())
            is_answered = await self._decode(call)

    async def _next(self) -> AnswerCall | Refuse:
        while not self._calls:
            if self._has_failed:
                raise RuntimeError("the controller has failed with it")
            self._wake.clear()
            await self._wake.wait()
        return self._calls.popleft()

    async def _tell_failure(self) -> None:
        try:
            await self._tell(SERVER_ERROR, "The router has failed.")
        except (ClientGone, RuntimeError) as error:
            log.info("%s: its client cannot be told: %s", self.request_id, error)

    def _end_all(self) -> None:
        """Report what was begun, or was to be, and is not done; and that it is over."""
        if not self._is_over or self._has_failed:
            self._control.post(Cancelled(self.request_id))
        if self._call is not None:
            self._report(Outcome.CANCELLED)
        while self._calls:
            call = self._calls.popleft()
            if not isinstance(call, Refuse):
                self._call = call
                self._report(Outcome.CANCELLED)
        self._log_prompt()
        self._end_prefill(Outcome.CANCELLED)

    def _report(self, outcome: Outcome, counts: TokenCounts | None = None) -> None:
        """The call that decodes has ended."""
        call, self._call = self._call, None
        assert call is not None
        call.is_reported = True
        counts = counts or TokenCounts()
        if self._request.num_sequences == 1:  # else an engine tells the details of one of them
            self._answer_details = counts.details
        has_waited = call.directive.expect_tokens and not call.num_payloads
        if self._details is None and outcome in _MAY_HAVE_COMPUTED and not has_waited:
            self._note_prompt(outcome, UNKNOWN)
        self._is_over |= outcome in ANSWERED
        event = call_ended(call.directive, outcome, counts, began=call.begins)
        now = self._clock()
        if call.begins:
            self.log.decode_has_begun(now)
        self.log.call_ended(event, now)
        self._control.post(event)

    def _post_began(self, call: AnswerCall) -> None:
        call.begins = False
        self.log.decode_has_begun(self._clock())
        self._control.post(DecodeBegan(self.request_id))

    def _post_unseen(self) -> None:
        """Tell that a call counts as decoding: the time of its first token will not be known."""
        self._control.post(DecodeBegan(self.request_id, is_seen=False))

    async def _attempt(self, call: AnswerCall, make: Callable[[], Awaitable[T]]) -> T:
        """Make a call that can be aborted; EngineBroke if it is."""
        # A scope of asyncio.timeout would do the same, at a hundredth of a short request's CPU.
        call.task = task = asyncio.current_task()
        try:
            if not call.is_aborted:
                return await make()
        except asyncio.CancelledError:
            if call.task is not None or task is None or task.uncancel():
                raise  # its client has gone
        finally:
            call.task = None
        raise EngineBroke("given up by the router")

    # Prefill

    def _begin_prefill(self, directive: Prefill) -> None:
        assert self._prompt_call is None, directive
        self.log.asks(directive, self._clock())
        task = asyncio.get_running_loop().create_task(self._run_prefill(directive))
        self._prompt_call = PromptCall(directive, task)
        self._set_details(UNKNOWN)

    async def _run_prefill(self, directive: Prefill) -> None:
        counts = TokenCounts()
        try:
            answer = await self._upstream.post(
                self._url(directive),
                self._request.prefill_body(hands_over=directive.hands_over),
                with_request_id(self._headers, "prefill"),
                self._config.answer_timeout_s,
                min(self._most_bytes, MAX_ANSWER_BYTES),
            )
            outcome = outcome_of(answer.status)
            if outcome is Outcome.OK:
                counts = read_reply(answer.body)
        except EngineLost as error:
            log.info("%s: %s is lost: %s", self.request_id, directive.replica, error)
            outcome = outcome_of_error(error)
        except Exception:
            # The top of the prompt's lane, as `run` is of the request's.
            log.exception("%s has failed", self.request_id)
            self.fail()
            return
        self._report_prefill(outcome, counts)

    def _end_prefill(self, outcome: Outcome) -> None:
        """Give up the prompt's call, if it runs."""
        if self._prompt_call is not None:
            self._prompt_call.task.cancel()
            self._report_prefill(outcome, TokenCounts())

    def _report_prefill(self, outcome: Outcome, counts: TokenCounts) -> None:
        prompt_call, self._prompt_call = self._prompt_call, None
        assert prompt_call is not None
        self._note_prompt(outcome, counts.details)
        self._notices = counts.notices
        event = call_ended(prompt_call.directive, outcome, counts)
        self.log.call_ended(event, self._clock())
        self._control.post(event)
        call = self._call
        if call is not None and call.is_in_one_piece and outcome is Outcome.OK:
            self._post_unseen()

    def _note_prompt(self, outcome: Outcome, details: PromptDetails) -> None:
        """Choose the details that the client is told, after a call whose engine had the prompt.

        The details are those of the first engine that had the prompt: later engines find what the
        first one has computed. Where that engine was lost, the details are unknown.
        """
        self._is_part_computed |= outcome in _MAY_HAVE_COMPUTED
        if self._is_part_computed:
            self._set_details(UNKNOWN)
        else:
            self._set_details(details if outcome is Outcome.OK else None)

    def _set_details(self, details: PromptDetails | None) -> None:
        self._details = details
        self._show_details()

    def _show_details(self) -> None:
        if self._resumer is not None:
            self._resumer.details = self._details
            self._resumer.awaits_details = self._prompt_call is not None

    async def _await_details(self) -> None:
        """Give the prompt's call a moment to end, so that its counts are known."""
        if self._prompt_call is not None:
            await asyncio.wait({self._prompt_call.task}, timeout=PROMPT_GRACE_S)

    def _log_prompt(self) -> None:
        """Log the prompt's tokens, and the cached tokens that the client was told."""
        details = self._answer_details if self._details is None else self._details
        self.log.cached_tokens = details.cached_tokens
        if self._resumer is not None:  # of an answer that its client has not taken to its end
            tokens = self._resumer.prompt_tokens or 0
            self.log.prompt_tokens = max(self.log.prompt_tokens, tokens)

    # Decode

    async def _decode(self, call: AnswerCall) -> bool:
        """Make a call; return True if the client has been answered, else another engine goes on."""
        self._call = call
        directive = call.directive
        resumer = self._resumer
        self._show_details()
        try:
            if resumer is not None:
                return await self._attempt(call, partial(self._answer_stream, call, resumer))
            if self._request.stream:
                return await self._attempt(call, partial(self._pass_on, call))
            return await self._attempt(call, partial(self._answer_whole, call))
        except NotAssembled as error:
            log.info("%s: asked again without a stream: %s", self.request_id, error)
            self._whole = self._resumer = self._resume = None
            if self._details is None:
                self._note_prompt(Outcome.LOST, UNKNOWN)  # the engine has computed the prompt
            if call.begins:
                self._post_began(call)
            self._request = self._client_request
            return await self._decode(call)
        except EngineLost as error:
            log.info("%s: %s is lost: %s", self.request_id, directive.replica, error)
            if self._request.is_passed_on and self._http.status:
                log.warning("%s breaks off: no other engine can go on with it", self.request_id)
                self._report(Outcome.HOPELESS, self._stream_counts(call))
                self._http.abort()
                return True
            return await self._lost(call, outcome_of_error(error))

    async def _lost(self, call: AnswerCall, outcome: Outcome, *, rejected: bool = False) -> bool:
        """The engine is gone: another one goes on, or the client is told that none can.

        `rejected`: it is there, and does not take what the stream would go on from.
        """
        counts = self._stream_counts(call)
        after = self._resumer.lost(rejected=rejected) if self._resumer is not None else None
        if isinstance(after, Detokenize):
            assert self._resumer is not None
            urls = self._control.others(call.directive.replica)
            after = await self._detokenize(self._resumer, after, urls)
        if isinstance(after, Finish | Refusal) and self._begin_anew(after):
            self._report(outcome, counts)
            return False
        if isinstance(after, Finish):
            self._report(Outcome.OK, counts)
            await self._end(after.payloads)
            return True
        if isinstance(after, Refusal):
            self._report(Outcome.HOPELESS, counts)
            log.warning("%s cannot go on: %s", self.request_id, after.why)
            await self._send_error(SERVER_ERROR, after.payloads[0])
            return True
        self._resume = after
        self._report(outcome, counts)
        return False

    def _begin_anew(self, after: Finish | Refusal) -> bool:
        """Forget an answer that cannot be completed, if the client has nothing of it yet."""
        if self._whole is None:
            return False
        if isinstance(after, Finish):
            for payload in after.payloads:
                self._whole.add(payload)
            if self._whole.is_complete:
                return False
        self._whole = WholeAnswer(self._request.api_path)
        self._resumer, self._resume = self._new_resumer(), None
        return True

    def _url(self, directive: Prefill | Decode) -> str:
        return self._control.url_of(directive.replica) + self._request.api_path.value

    def _whole_body(self, directive: Decode, *, track: bool) -> bytes:
        if not directive.expect_tokens:
            return self._request.whole_body(track=track)
        timeout_ms = self._config.expect_timeout_ms
        if self._prompt_call is not None:
            # As long as the prompt may take: where its call fails, this one is given up.
            timeout_ms += math.ceil(1000 * self._config.answer_timeout_s)
        notices = directive.notices
        return self._request.whole_body(
            directive.expect_tokens,
            min(timeout_ms, MAX_EXPECT_TIMEOUT_MS),
            track=track,
            expect_from=directive.source,
            notices=None if notices is None else self._notices or notices,
        )

    def _awaits_prompt(self, call: AnswerCall) -> bool:
        """Return True while the engine that is to answer may wait for the prompt's."""
        return self._prompt_call is not None and not call.num_payloads

    async def _answer_whole(self, call: AnswerCall) -> bool:
        url = self._url(call.directive)
        body = self._whole_body(call.directive, track=False)
        call.is_in_one_piece = True
        if self._prompt_call is None:
            self._post_unseen()
        most_bytes = min(self._most_bytes, MAX_ANSWER_BYTES)
        answer = await self._upstream.post(url, body, self._headers, most_bytes=most_bytes)
        if outcome_of(answer.status) is not Outcome.OK:
            return await self._answer_error(call, answer)
        read = read_usage if self._request.is_passed_on else read_reply
        counts = read(answer.body)
        self._report(Outcome.OK, counts)
        if counts.details != UNKNOWN:
            await self._await_details()
        body, details, is_read = answer.body, self._details, not self._request.is_passed_on
        if is_read and details is not None and has_other_details(counts.details, details):
            body = with_details(body, details)
        await self._http.send(answer.status, answer_headers(answer.headers), body)
        return True

    async def _pass_on(self, call: AnswerCall) -> bool:
        """Send the client a stream as it comes.

        Once it has begun no other engine can go on: if it breaks off, the client's stream does.
        """
        http = self._http
        url = self._url(call.directive)
        body = self._request.whole_body()
        with await self._upstream.open(url, body, self._headers, self._most_bytes) as engine:
            if engine.status != OK:
                return await self._answer_error(call, await engine.read())
            headers = answer_headers(engine.headers)
            stream = PassedStream(call, headers)
            while not await engine.pump(partial(self._forward, stream)):
                await http.drain()
        self._report(Outcome.OK, self._stream_counts(call))
        await http.end(b"", headers)
        return True

    def _forward(self, stream: PassedStream, data: bytes) -> bool:
        """Send the client bytes of a stream as they come; False while it takes no more."""
        call = stream.call
        if call.is_aborted:
            return True  # as in `_send_on`
        if not call.num_payloads:
            self._post_began(call)
        call.num_payloads += data.count(b"data:") or 1
        stream.feed(data)
        return self._http.put(data, stream.headers)

    async def _answer_stream(self, call: AnswerCall, resumer: StreamResumer) -> bool:
        resume = self._resume
        if resume is None or resume.mode is ResumeMode.REPEAT:
            body = self._whole_body(call.directive, track=self._request.trackable)
        else:
            body = resume.body
        url = self._url(call.directive)
        call.num_delivered = resumer.answer.num_delivered
        awaits_prompt = partial(self._awaits_prompt, call)
        with await self._upstream.open(
            url, body, self._headers, self._most_bytes, awaits_prompt
        ) as engine:
            if engine.status != OK:
                return await self._answer_error(call, await engine.read())
            if not engine.headers.get("Content-Type", "").startswith(EVENT_STREAM):
                raise EngineLost("answers what is no stream of events")
            headers = answer_headers(engine.headers)
            whole = self._whole
            if whole is not None:
                headers["Content-Type"] = JSON
            stream = AnswerStream(call, resumer, headers)
            while not resumer.ended:
                if await engine.pump(partial(self._send_on, stream)):
                    break
                await self._http.drain()
            if resumer.ended:
                self._add_to_whole(resumer.held_usage())
                if whole is not None and not whole.is_complete:
                    raise NotAssembled("the stream has no usage")
                self._report(Outcome.OK, self._stream_counts(call))
                if resumer.holds_usage:
                    await self._await_details()
                    held = resumer.held_usage()
                    stream.last[:0] = held
                    self._add_to_whole(held)
                await self._end(stream.last, headers)
                engine.finish()
                return True
        raise EngineLost("its stream has no end")

    def _send_on(self, stream: AnswerStream, data: bytes) -> bool:
        """Send the client an engine's bytes; False to stop reading. EngineLost.

        Called by the engine's connection, also while the request's task is elsewhere.
        """
        call, resumer, whole = stream.call, stream.resumer, self._whole
        if call.is_aborted:
            return True  # the request's task learns of the abort in the loop's next turn
        out, lost = stream.feed(data)
        if call.begins and not resumer.ended:
            self._post_began(call)
        self._add_to_whole(out)
        if resumer.ended:
            stream.last.extend(out)
            return False
        goes_on = True
        if whole is None:
            # Comments keep proxies from closing a silent connection.
            data = frames(out) or stream.events.take_comment()
            if data:
                goes_on = self._http.put(data, stream.headers)
        if lost is not None:
            raise lost
        return goes_on

    def _add_to_whole(self, payloads: Sequence[bytes]) -> None:
        if self._whole is not None:
            for payload in payloads:
                self._whole.add(payload)

    async def _end(
        self, payloads: Sequence[bytes], headers: Mapping[str, str] | None = None
    ) -> None:
        """The last payloads, of which `_whole` has its part already."""
        if self._whole is None:
            await self._http.end(frames(payloads), headers or STREAM_HEADERS)
        else:
            status, body = self._whole.answer()
            await self._http.send(status, headers or JSON_HEADERS, body)

    def _stream_counts(self, call: AnswerCall) -> TokenCounts:
        """Return the tokens that the call's stream has brought."""
        if self._request.is_passed_on:
            # Before the usage at the stream's end: mostly one token each.
            tokens = call.counts.output_tokens or call.num_payloads
            return msgspec.structs.replace(call.counts, output_tokens=tokens)
        if self._resumer is None:
            return TokenCounts()
        prompt_tokens = self._resumer.prompt_tokens or 0
        details = self._resumer.engine_details
        if not self._request.trackable:
            # Without a usage: mostly one token each; the last one is the end.
            counted = self._resumer.output_tokens
            tokens = max(0, call.num_payloads - 1) if counted is None else counted
            return TokenCounts(prompt_tokens, tokens, details)
        tokens = self._resumer.answer.num_delivered - call.num_delivered
        return TokenCounts(prompt_tokens, tokens, details)

    async def _answer_error(self, call: AnswerCall, answer: EngineResponse) -> bool:
        """An engine has refused the request, or has failed with it, and says so."""
        outcome = outcome_of(answer.status)
        has_tokens = self._resumer is not None and self._resumer.has_begun
        if outcome is Outcome.REJECTED and has_tokens:
            replica = call.directive.replica
            log.info("%s: %s does not go on: %s", self.request_id, replica, answer.status)
            return await self._lost(call, Outcome.FAILED, rejected=True)
        if outcome is not Outcome.REJECTED:
            if answer.status >= SERVER_ERROR and outcome is Outcome.FAILED:
                self._failure = answer
            self._report(outcome)
            return False
        self._report(outcome)
        body = answer.body
        if self._http.status:  # of a stream that has brought comments alone
            body = error_event(answer.status, body, self._http.path)
        await self._send_error(answer.status, body, answer_headers(answer.headers))
        return True

    async def _refuse(self, directive: Refuse) -> None:
        failure = self._failure
        if failure is not None and not self._http.status and _is_json(failure):
            # All that were asked have failed; what they say of it says more.
            headers = answer_headers(failure.headers)
            await self._http.send(failure.status, headers, failure.body)
            return
        wait_s = directive.retry_after_s
        more = {"Retry-After": str(wait_s)} if wait_s else {}
        await self._tell(directive.status, directive.why, more)

    async def _tell(self, status: int, why: str, headers: Mapping[str, str] | None = None) -> None:
        """An error of the router's own."""
        body = error_body(status, why, self._http.path)
        await self._send_error(status, body, {**JSON_HEADERS, **(headers or {})})

    async def _send_error(
        self, status: int, body: bytes, headers: Mapping[str, str] = JSON_HEADERS
    ) -> None:
        """Answer with it, or say it within the stream if that has begun and not ended."""
        http = self._http
        if http.is_answered:
            return
        if not http.status:
            await http.send(status, headers, body)
        elif is_anthropic(http.path):
            await http.end(b"event: error\n" + frames((body,)), STREAM_HEADERS)
        else:
            await http.end(frames((body, DONE)), STREAM_HEADERS)

    async def _detokenize(
        self, resumer: StreamResumer, step: Detokenize, urls: Sequence[str]
    ) -> Resume | Finish | Refusal:
        """Ask engines at `urls` for the text of tokens, and return the resumer's next step.

        Takes DETOKENIZE_TIMEOUT_S at most; then the resumer goes on without the text.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + DETOKENIZE_TIMEOUT_S
        after: Resume | Finish | Refusal | Detokenize = step
        while isinstance(after, Detokenize):
            text: str | None = None
            for url in urls[:MAX_DETOKENIZERS]:
                left_s = deadline - loop.time()
                if left_s <= 0:
                    break
                try:
                    url += DETOKENIZE_PATH
                    answer = await self._upstream.post(url, after.body, self._headers, left_s)
                    if answer.status == OK:
                        text = read_detokenized(answer.body)
                        break
                except EngineLost:
                    continue
            after = resumer.detokenized(text)
        return after


def _is_json(answer: EngineResponse) -> bool:
    return answer.headers.get("Content-Type", "").startswith(JSON)


def outcome_of_error(error: EngineLost) -> Outcome:
    """Return the outcome of a call whose engine has broken off or cannot be reached."""
    match error:
        case EngineUnreached():
            return Outcome.UNREACHED
        case EngineBroke():
            return Outcome.LOST
    return Outcome.FAILED
