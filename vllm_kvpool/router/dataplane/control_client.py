"""A worker's side of the connection to the controller's process.

While the controller is away, calls to engines go on and requests that want to be told what to do
wait. `connected` tells the next controller of all that are open, and of the calls that run.

Owned by the worker's loop; `send` is given by the connection and does not wait.
"""

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import msgspec
from msgspec.structs import replace

from vllm_kvpool.router.control.events import (
    Abort,
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
    Opened,
    Over,
    Query,
    RelayBegan,
    RelayOver,
    Reply,
    RequestEvent,
    RequestOpen,
    Running,
    TokensPerByte,
    ToWorker,
)
from vllm_kvpool.router.dataplane.responses import ANSWERED
from vllm_kvpool.router.ops.request_log import Observation
from vllm_kvpool.router.ops.tenants import Denied

T = TypeVar("T")

QUERY_TIMEOUT_S = 10.0
UNAVAILABLE = 503


class ControlPlane(Protocol):
    """What a data plane needs decided. Questions raise `Denied` where there is no answer."""

    @property
    def tokens_per_byte(self) -> float:
        """What was learned of prompts."""

    def unknown_tokens(self, ask: Ask) -> int:
        """Prompt tokens that are not known to be in the pool; all of them where nothing is."""

    def begin(self, opened: Opened, handler: "Handler") -> None:
        """A request wants a directive; `over` follows."""

    def post(self, event: RequestEvent) -> None:
        """A call to an engine has begun or ended, or the client has gone."""

    def over(self, request_id: RequestId, observed: list[Observation]) -> None:
        """Nothing more comes of a request."""

    def url_of(self, replica: ReplicaId) -> str:
        """Of a replica that a directive has named."""

    async def others(self, replica: ReplicaId) -> list[str]:
        """URLs of engines that answer, that one's last."""

    async def relay_to(self, model: str, tenant: str) -> list[str]:
        """URLs of engines for a call that is only passed on, the least busy first.

        `relay_over` follows.
        """

    def relay_over(self, tenant: str) -> None:
        """Such a call has ended."""

    async def models(self) -> list[dict[str, Any]]:
        """What engines list."""

    async def health(self) -> tuple[int, bytes]:
        """Status and body for `/health`."""

    async def metrics(self) -> tuple[str, bytes]:
        """Content type and body for `/metrics`."""


class Handler(Protocol):
    """What performs the directives of one request."""

    def enqueue(self, directive: Directive) -> None:
        """Do this next."""

    def abort(self) -> None:
        """End the call in hand."""

    def fail(self) -> None:
        """The controller has failed with the request."""


@dataclass(slots=True)
class _PendingRequest:
    opened: Opened
    handler: Handler
    is_let_in: bool
    """Whether any controller has had it."""
    directive: Directive | None = None
    """What is not done."""
    began: bool = False
    """Whether a call that decodes has brought its first token."""
    is_answered: bool = False
    """Whether the client has got, or is being sent, all that it will."""


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
        self._relays: Counter[str] = Counter()
        self._queries: dict[int, tuple[Query, asyncio.Future[Any]]] = {}
        self._numbers = itertools.count(1)
        self.tokens_per_byte = tokens_per_byte

    @property
    def num_requests(self) -> int:
        """Requests that are open."""
        return len(self._open)

    # The connection

    def connected(self, send: Callable[[Any], None]) -> None:
        """A controller is there; it is told what is open, and asked again what was not answered."""
        self._send = send
        send(Hello(self._worker))
        for tenant in self._relays.elements():
            send(RelayBegan(tenant))
        for each in self._open.values():
            self._announce(each)
        for query, _ in self._queries.values():
            send(query)

    def lost(self) -> None:
        """The controller is away."""
        self._send = None
        waited_for = {n: each for n, each in self._queries.items() if not each[1].done()}
        self._queries = waited_for

    def receive(self, message: ToWorker) -> None:
        """Of the present controller."""
        match message:
            case Do(action, url):
                each = self._open.get(action.request_id)
                if each is None:
                    return  # its client has gone meanwhile; `Over` is on its way
                if not isinstance(action, Refuse):
                    self._urls[action.replica] = url
                each.directive, each.began = action, False
                each.handler.enqueue(action)
            case Abort(request_id):
                if request_id in self._open:
                    self._open[request_id].handler.abort()
            case Bug(request_id):
                if request_id in self._open:
                    self._open[request_id].handler.fail()
            case TokensPerByte(value):
                self.tokens_per_byte = value
            case Reply(number):
                query, answer = self._queries.pop(number)
                if answer.done():
                    self._give_back(query, message)
                else:
                    answer.set_result(message)

    def _tell(self, message: Any) -> None:
        if self._send is not None:
            self._send(message)

    # Requests

    def unknown_tokens(self, ask: Ask) -> int:
        """All: what the controller knows of the pool is in its process."""
        return ask.prompt_tokens

    def begin(self, opened: Opened, handler: Handler) -> None:
        """A client's request, which waits for a directive from now on."""
        self._open[opened.request_id] = _PendingRequest(opened, handler, self._send is not None)
        self._tell(RequestOpen(opened))

    def _announce(self, each: _PendingRequest) -> None:
        """Tell the present controller of a request that was begun before it was there."""
        opened, directive, running = each.opened, each.directive, None
        if isinstance(directive, Prefill | Decode):
            running = Running(directive, opened.ask.deadline - self._max_wait_s, each.began)
        # It has been served for a while, or the controller was away: it may wait anew.
        ask = replace(opened.ask, deadline=self._clock() + self._max_wait_s)
        waits = directive is None and not each.is_answered
        again = RequestOpen(replace(opened, ask=ask), waits, each.is_let_in, running)
        each.is_let_in = True
        self._tell(again)

    def post(self, event: RequestEvent) -> None:
        """A call to an engine has begun or ended, or the client has gone."""
        each = self._open[event.request_id]
        match event:
            case PrefillEnded():
                each.directive = None
            case DecodeEnded(outcome=outcome):
                each.directive, each.is_answered = None, outcome in ANSWERED
            case DecodeBegan():
                each.began = True
            case Cancelled():
                each.is_answered = True
        self._tell(event)

    def over(self, request_id: RequestId, observed: list[Observation]) -> None:
        """Nothing more comes of a request."""
        del self._open[request_id]
        self._tell(Over(request_id, observed))

    def url_of(self, replica: ReplicaId) -> str:
        """Of a replica that a directive has named."""
        return self._urls[replica]

    # Questions

    async def others(self, replica: ReplicaId) -> list[str]:
        """URLs of engines that answer, that one's last; none while the controller is away."""
        try:
            return await self._ask("others", list[str], replica)
        except Denied:
            return []

    async def relay_to(self, model: str, tenant: str) -> list[str]:
        """URLs of engines for a call that is only passed on, the least busy first."""
        urls = await self._ask("relay_to", list[str], model, tenant)
        self._relays[tenant] += 1
        return urls

    def relay_over(self, tenant: str) -> None:
        """Such a call has ended."""
        self._relays[tenant] -= 1
        self._tell(RelayOver(tenant))

    async def models(self) -> list[dict[str, Any]]:
        """What engines list."""
        return await self._ask("models", list[dict[str, Any]])

    async def health(self) -> tuple[int, bytes]:
        """Status and body for `/health`."""
        return await self._ask("health", tuple[int, bytes])

    async def metrics(self) -> tuple[str, bytes]:
        """Content type and body for `/metrics`."""
        return await self._ask("metrics", tuple[str, bytes])

    async def _ask(self, name: str, kind: type[T], *args: str) -> T:
        number = next(self._numbers)
        query = Query(number, name, args)
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._queries[number] = query, answer
        self._tell(query)
        reply: Reply | None = None
        try:
            async with asyncio.timeout(QUERY_TIMEOUT_S):
                reply = await answer
        except TimeoutError:
            why = f"The router's controller has not answered within {QUERY_TIMEOUT_S:g} s."
            raise Denied(UNAVAILABLE, why, 1.0) from None
        finally:
            if reply is None:
                self._left(number, query, answer)
        if reply.status:
            raise Denied(reply.status, reply.why, reply.retry_after_s)
        return msgspec.convert(reply.value, kind)

    def _left(self, number: int, query: Query, answer: asyncio.Future[Reply]) -> None:
        """The caller has been cancelled, or has waited QUERY_TIMEOUT_S; its reply may have come in
        the same turn of the loop."""
        if answer.done() and not answer.cancelled():
            self._give_back(query, answer.result())
        elif self._send is None:
            self._queries.pop(number, None)  # no controller will answer it

    def _give_back(self, query: Query, reply: Reply) -> None:
        """The caller of a query is gone: end what the controller has begun with its reply."""
        if query.name == "relay_to" and not reply.status:
            self._tell(RelayOver(query.args[1]))
