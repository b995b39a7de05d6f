"""A worker's side of the connection to the controller's process.

While the controller is away, calls to engines go on and requests that want to be told what to do
wait. `connected` tells the next controller of all that are open, and of the calls that run.

Owned by the worker's loop; `send` is given by the connection and does not wait.
"""

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from msgspec.structs import replace

from vllm_kvpool.router.control.events import (
    ANSWERED,
    Abort,
    Adopted,
    Cancelled,
    Decode,
    DecodeBegan,
    DecodeEnded,
    Prefill,
    PrefillEnded,
    Refuse,
)
from vllm_kvpool.router.control.requests import Ask, RequestId
from vllm_kvpool.router.control.states import ReplicaId
from vllm_kvpool.router.dataplane.messages import (
    Bug,
    Directive,
    Do,
    Hello,
    Over,
    Query,
    Question,
    Reply,
    RequestEvent,
    RequestOpen,
    TokensPerByte,
    ToWorker,
)
from vllm_kvpool.router.ops.request_log import Observation
from vllm_kvpool.router.ops.tenants import Denied

QUERY_TIMEOUT_S = 10.0
UNAVAILABLE = 503


class ControlPlane(Protocol):
    """What a data plane needs decided. Questions raise `Denied` where there is no answer.

    What is only passed on is a request that does not wait: it is refused, or nothing is said of it.
    """

    @property
    def tokens_per_byte(self) -> float:
        """What was learned of prompts."""

    def model_length(self, model: str) -> int | None:
        """The most tokens of a sequence of a model, as engines list it; None if it is unknown."""

    def begin(self, ask: Ask, tenant: str, handler: "Handler", *, waits: bool = True) -> None:
        """A request has come, and waits for a directive, if not for another one; `over` follows."""

    def post(self, event: RequestEvent) -> None:
        """A call to an engine has begun or ended, or the client has gone."""

    def over(self, request_id: RequestId, observed: list[Observation]) -> None:
        """A request is over; `observed` goes into the histograms."""

    def url_of(self, replica: ReplicaId) -> str:
        """The URL of a replica that a directive has named."""

    async def ask(self, question: Question, *args: str) -> Any:
        """The answer of the controller's process to a question; Denied while it is away."""


class Handler(Protocol):
    """What performs the directives of one request."""

    def enqueue(self, directive: Directive) -> None:
        """Perform a directive, after those before it."""

    def abort(self, replica: ReplicaId) -> None:
        """End the call at a replica."""

    def fail(self) -> None:
        """The controller has failed with the request."""


@dataclass(slots=True)
class _PendingRequest:
    ask: Ask
    tenant: str
    handler: Handler
    is_let_in: bool
    """Whether any controller has had it."""
    is_answered: bool
    """Whether the client has got, or is being sent, all that it will, or it is only passed on."""
    calls: list[Prefill | Decode] = field(default_factory=list)
    """Directives that are not done, in their order."""
    began: bool = False
    """Whether a call that decodes has brought its first token."""


class ControlClient:
    """The controller, as one worker's data plane sees it (`ControlPlane`)."""

    def __init__(
        self,
        worker: str,
        max_wait_s: float,
        tokens_per_byte: float,
        clock: Callable[[], float],
    ) -> None:
        self._worker = worker
        self._max_wait_s = max_wait_s
        self._clock = clock
        self._send: Callable[[Any], None] | None = None
        self._open: dict[RequestId, _PendingRequest] = {}
        self._urls: dict[ReplicaId, str] = {}
        self._queries: dict[int, tuple[Query, asyncio.Future[Any]]] = {}
        self._numbers = itertools.count(1)
        self.tokens_per_byte = tokens_per_byte

    def model_length(self, model: str) -> None:
        """Unknown here: only the controller's process hears what engines list."""

    @property
    def num_requests(self) -> int:
        """Requests that are open."""
        return len(self._open)

    # The connection

    def connected(self, send: Callable[[Any], None]) -> None:
        """A controller is there; it is told what is open, and asked again what was not answered."""
        self._send = send
        send(Hello(self._worker))
        for each in self._open.values():
            self._announce(each)
        for query, _ in self._queries.values():
            send(query)

    def lost(self) -> None:
        """The controller is away."""
        self._send = None

    def receive(self, message: ToWorker) -> None:
        """Of the present controller."""
        match message:
            case Do(action, url):
                each = self._open.get(action.request_id)
                if each is None:
                    return  # its client has gone meanwhile; `Over` is on its way
                if isinstance(action, Refuse):
                    each.is_answered = True
                else:
                    self._urls[action.replica] = url
                    each.calls.append(action)
                    each.began = False
                each.handler.enqueue(action)
            case Abort(request_id, replica):
                if request_id in self._open:
                    self._open[request_id].handler.abort(replica)
            case Bug(request_id):
                if request_id in self._open:
                    self._open[request_id].handler.fail()
            case TokensPerByte(value):
                self.tokens_per_byte = value
            case Reply(number, value):
                found = self._queries.pop(number, None)
                if found is not None and not found[1].done():
                    found[1].set_result(value)

    def _tell(self, message: Any) -> None:
        if self._send is not None:
            self._send(message)

    # Requests

    def begin(self, ask: Ask, tenant: str, handler: Handler, *, waits: bool = True) -> None:
        """A client's request, which waits for a directive, or is only passed on."""
        is_let_in = self._send is not None
        pending = _PendingRequest(ask, tenant, handler, is_let_in, is_answered=not waits)
        self._open[ask.request_id] = pending
        self._tell(RequestOpen(ask, tenant, waits))

    def _announce(self, each: _PendingRequest) -> None:
        """Tell the present controller of a request that was begun before it was there."""
        running = None
        # It has been served for a while, or the controller was away: it may wait anew.
        ask = replace(each.ask, deadline=self._clock() + self._max_wait_s)
        if each.calls:
            # Of a prompt and a decoder that waits for it, the decoder's call.
            call = each.calls[-1]
            running = Adopted(ask, call, each.ask.deadline - self._max_wait_s, each.began)
        waits = not each.calls and not each.is_answered
        again = RequestOpen(ask, each.tenant, waits, each.is_let_in, running)
        each.is_let_in = True
        self._tell(again)

    def post(self, event: RequestEvent) -> None:
        """A call to an engine has begun or ended, or the client has gone."""
        each = self._open[event.request_id]
        match event:
            case PrefillEnded():
                each.calls = [call for call in each.calls if not isinstance(call, Prefill)]
            case DecodeEnded(outcome=outcome):
                each.calls = [call for call in each.calls if not isinstance(call, Decode)]
                each.is_answered = outcome in ANSWERED
            case DecodeBegan():
                each.began = True
            case Cancelled():
                each.is_answered = True
        self._tell(event)

    def over(self, request_id: RequestId, observed: list[Observation]) -> None:
        """A request is over; `observed` goes into the histograms."""
        del self._open[request_id]
        self._tell(Over(request_id, observed))

    def url_of(self, replica: ReplicaId) -> str:
        """The URL of a replica that a directive has named."""
        return self._urls[replica]

    # Questions

    async def ask(self, question: Question, *args: str) -> Any:
        """What `Router` answers, lists in place of tuples; Denied while the controller is away."""
        number = next(self._numbers)
        query = Query(number, question, args)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._queries[number] = query, answer
        self._tell(query)
        try:
            async with asyncio.timeout(QUERY_TIMEOUT_S):
                return await answer
        except TimeoutError:
            why = f"The router's controller has not answered within {QUERY_TIMEOUT_S:g} s."
            raise Denied(UNAVAILABLE, why, 1.0) from None
        finally:
            self._queries.pop(number, None)
