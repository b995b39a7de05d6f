"""A client's request, and its calls to engines, from the directive to the report of their ends.

Each call is reported exactly once. A request's calls and its answer share one `ClientExchange`.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from multidict import CIMultiDict

from vllm_kvpool.config import MAX_EXPECT_TIMEOUT_MS
from vllm_kvpool.router.config import FrontConfig
from vllm_kvpool.router.control.events import (
    ANSWERED,
    Decode,
    DecodeBegan,
    DecodeEnded,
    Outcome,
    Prefill,
    PrefillEnded,
)
from vllm_kvpool.router.control.requests import RequestId
from vllm_kvpool.router.dataplane.control_plane import ControlPlane
from vllm_kvpool.router.dataplane.headers import (
    JSON_HEADERS,
    REQUEST_ID,
    STREAM_HEADERS,
    with_request_id,
)
from vllm_kvpool.router.dataplane.http_server import HttpRequest
from vllm_kvpool.router.dataplane.request_body import (
    MAX_ANSWER_BYTES,
    ClientRequest,
    error_body,
    is_anthropic,
)
from vllm_kvpool.router.dataplane.responses import (
    MAY_HAVE_COMPUTED,
    UNKNOWN,
    PromptUsage,
    TokenCounts,
    outcome_of,
    read_reply,
    without_reserved,
)
from vllm_kvpool.router.dataplane.resume.chunks import DONE
from vllm_kvpool.router.dataplane.sse import Events, frames
from vllm_kvpool.router.dataplane.upstream import (
    EngineBroke,
    EngineResponse,
    Upstream,
    UpstreamResponse,
)
from vllm_kvpool.router.ops.request_log import RequestLog

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class ClientExchange:
    """A client's request, with the state that its handler, calls and answer share."""

    request_id: RequestId
    request: ClientRequest
    """The request as the client sent it."""
    headers: CIMultiDict[str]
    """Headers for engines."""
    http: HttpRequest
    control: ControlPlane
    upstream: Upstream
    config: FrontConfig
    clock: Callable[[], float] = time.monotonic
    log: RequestLog = field(init=False)
    prompt: PromptUsage = field(default_factory=PromptUsage)
    prompt_call: "PromptCall | None" = None
    """The prompt's call, while it runs."""
    prompt_ended_s: float = 0.0
    """Time of the loop at which that call has ended; 0 if there was none."""
    most_bytes: int = field(init=False)
    """Limit of the bytes of each engine's answer."""
    failure: EngineResponse | None = None
    """The answer of the engine that has failed last."""
    is_over: bool = False
    """True once the controller knows that the request is over."""

    def __post_init__(self) -> None:
        self.log = RequestLog(self.clock(), self.request.tenant)
        self.most_bytes = self.request.most_answer_bytes(self.headers.get(REQUEST_ID, ""))

    def url(self, directive: Prefill | Decode) -> str:
        """Return the URL of a directive's replica for this request."""
        return self.control.url_of(directive.replica) + self.request.api_path.value

    def report(self, event: PrefillEnded | DecodeEnded) -> None:
        """Tell the controller and the log that a call has ended."""
        self.log.call_ended(event, self.clock())
        self.control.post(event)

    def told(self, body: bytes) -> bytes:
        """Return an engine's answer, or an event of its stream, as the client may see it."""
        return body if self.config.trust_clients else without_reserved(body)

    async def tell(self, status: int, why: str, headers: Mapping[str, str] | None = None) -> None:
        """Send the client an error of the router's own."""
        body = error_body(status, why, self.http.path)
        await self.send_error(status, body, {**JSON_HEADERS, **(headers or {})})

    async def send_error(
        self, status: int, body: bytes, headers: Mapping[str, str] = JSON_HEADERS
    ) -> None:
        """Answer with an error, or put it into the stream if that has begun and not ended."""
        http, body = self.http, self.told(body)
        if http.is_answered:
            return
        if not http.status:
            await http.send(status, headers, body)
        elif is_anthropic(http.path):
            await http.end(b"event: error\n" + frames((body,)), STREAM_HEADERS)
        else:
            await http.end(frames((body, DONE)), STREAM_HEADERS)


@dataclass(slots=True, eq=False)
class PromptCall:
    """The call that has the prompt computed; its task runs beside the request's."""

    exchange: ClientExchange
    directive: Prefill
    task: asyncio.Task[None] = field(init=False)

    async def perform(self) -> tuple[Outcome, TokenCounts]:
        """Make the call. Raises EngineLost."""
        exchange, directive = self.exchange, self.directive
        answer = await exchange.upstream.ask(
            exchange.url(directive),
            exchange.request.prefill_body(hands_over=directive.hands_over),
            with_request_id(exchange.headers, "prefill"),
            exchange.config.answer_timeout_s,
            min(exchange.most_bytes, MAX_ANSWER_BYTES),
        )
        outcome = outcome_of(answer.status)
        return outcome, read_reply(answer.body) if outcome is Outcome.OK else TokenCounts()

    def report(self, outcome: Outcome, counts: TokenCounts) -> None:
        """Report the end of the call."""
        prompt = self.exchange.prompt
        self.exchange.prompt_call, prompt.is_computing = None, False
        self.exchange.prompt_ended_s = asyncio.get_running_loop().time()
        prompt.note(outcome, counts.details)
        prompt.notices = counts.notices
        event = PrefillEnded(
            request_id=self.exchange.request_id,
            replica=self.directive.replica,
            outcome=outcome,
            prompt_tokens=counts.prompt_tokens,
            saved_tokens=counts.saved_tokens,
            cached_tokens=counts.details.cached_tokens or 0,
        )
        self.exchange.report(event)


@dataclass(slots=True, eq=False)
class AnswerCall:
    """A call to an engine that answers."""

    exchange: ClientExchange
    directive: Decode
    is_aborted: bool = False
    """True once the controller does not want the call any more."""
    is_reported: bool = False
    """True once the controller knows the call's end; the client may still take the rest."""
    is_in_one_piece: bool = False
    """True once the engine was asked for an answer without a stream."""
    num_payloads: int = 0
    """Events of the stream so far."""
    begins: bool = False
    """True while the first event is in hand, and the controller does not know yet."""
    events: Events = field(default_factory=Events)
    headers: CIMultiDict[str] = field(default_factory=CIMultiDict)
    """Headers of the client's answer."""
    last: list[bytes] = field(default_factory=list)
    """Payloads at the stream's end, which the client has not been sent yet."""
    num_delivered: int = 0
    """Tokens that the client had before this call."""
    counts: TokenCounts = field(default_factory=TokenCounts)
    """Counts that a stream which is passed on has told so far."""
    line: bytearray = field(default_factory=bytearray)
    """The line that has not ended, of a stream which is passed on."""
    _task: asyncio.Task[Any] | None = None
    """The request's task, while it makes the call and has not been cancelled."""

    def abort(self) -> None:
        """Give the call up, begun or not; without effect the second time."""
        if self._task is not None and not self.is_aborted:
            # Not from here, which may be that task itself: it might get past the call uncancelled.
            self._task.get_loop().call_soon(self._cancel)
        self.is_aborted = True

    def _cancel(self) -> None:
        if self._task is not None and not self.is_reported:
            self._task.cancel()
            self._task = None

    async def attempt(self, make: Callable[[], Awaitable[T]]) -> T:
        """Make the call in the present task; EngineBroke if it is aborted."""
        # A scope of asyncio.timeout would do the same, at a hundredth of a short request's CPU.
        self._task = task = asyncio.current_task()
        try:
            if not self.is_aborted:
                return await make()
        except asyncio.CancelledError:
            if self._task is not None or task is None or task.uncancel():
                raise  # its client has gone
        finally:
            self._task = None
        raise EngineBroke("given up by the router")

    def body(self, request: ClientRequest, *, track: bool = False) -> bytes:
        """Return the body for the engine, of a request that is answered from its beginning."""
        directive, exchange = self.directive, self.exchange
        if not directive.expect_tokens:
            return request.whole_body(track=track)
        timeout_ms, prompt = exchange.config.expect_timeout_ms, exchange.prompt
        if prompt.is_computing:
            # As long as the prompt may take: where its call fails, this one is given up.
            timeout_ms += math.ceil(1000 * exchange.config.answer_timeout_s)
        notices = directive.notices
        return request.whole_body(
            directive.expect_tokens,
            min(timeout_ms, MAX_EXPECT_TIMEOUT_MS),
            track=track,
            expect_from=directive.source,
            notices=None if notices is None else prompt.notices or notices,
        )

    async def open(self, body: bytes) -> UpstreamResponse:
        """Ask the engine for a stream. Raises EngineLost."""
        exchange, url = self.exchange, self.exchange.url(self.directive)
        return await exchange.upstream.open(
            url, body, exchange.headers, exchange.most_bytes, self._silent_until
        )

    def _silent_until(self) -> float:
        """Return until when the engine that is to answer has waited for the prompt's."""
        if self.num_payloads:
            return 0.0
        is_computing = self.exchange.prompt.is_computing
        return asyncio.get_running_loop().time() if is_computing else self.exchange.prompt_ended_s

    # Reports

    def note_begin(self) -> None:
        """Tell the controller that the first token has come."""
        self.begins = False
        self.exchange.log.decode_has_begun(self.exchange.clock())
        self.exchange.control.post(DecodeBegan(self.exchange.request_id))

    def note_unseen(self) -> None:
        """Tell the controller that a call decodes, whose first token will not be seen."""
        self.exchange.control.post(DecodeBegan(self.exchange.request_id, is_seen=False))

    def report(self, outcome: Outcome, counts: TokenCounts | None = None) -> None:
        """Report the end of the call."""
        exchange, prompt = self.exchange, self.exchange.prompt
        self.is_reported = True
        counts = counts or TokenCounts()
        if exchange.request.num_sequences == 1:  # else an engine tells the details of one of them
            prompt.answer_details = counts.details
        has_waited = self.directive.expect_tokens and not self.num_payloads
        if prompt.details is None and outcome in MAY_HAVE_COMPUTED and not has_waited:
            prompt.note(outcome, UNKNOWN)
        exchange.is_over |= outcome in ANSWERED
        if self.begins:
            exchange.log.decode_has_begun(exchange.clock())
        event = DecodeEnded(
            request_id=exchange.request_id,
            replica=self.directive.replica,
            outcome=outcome,
            prompt_tokens=counts.prompt_tokens,
            output_tokens=counts.output_tokens,
            began=self.begins,
        )
        exchange.report(event)
