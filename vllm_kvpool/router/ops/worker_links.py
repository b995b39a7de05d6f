"""The controller's side of its connections to workers' processes.

A worker's requests are the router's own, performed elsewhere. What a worker held is freed when its
connection ends. Owned by the router's loop.
"""

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_kvpool.router.control.events import (
    Abort,
    Cancelled,
    Decode,
    DecodeBegan,
    DecodeEnded,
    Outcome,
    Prefill,
    PrefillEnded,
    Refuse,
)
from vllm_kvpool.router.control.requests import RequestId
from vllm_kvpool.router.control.states import ReplicaId
from vllm_kvpool.router.dataplane.messages import (
    Bug,
    Directive,
    Do,
    FromWorker,
    Hello,
    MessageConnection,
    Over,
    Query,
    Reply,
    RequestEvent,
    RequestOpen,
    TokensPerByte,
)
from vllm_kvpool.router.dataplane.responses import TokenCounts, call_ended
from vllm_kvpool.router.ops.request_log import Observation

if TYPE_CHECKING:
    from vllm_kvpool.router.run import Router

log = logging.getLogger(__name__)


class _WorkerRequest:
    """The handler of a request that a worker performs."""

    def __init__(self, request_id: RequestId, link: "WorkerLink") -> None:
        self._request_id = request_id
        self._link = link
        self.calls: list[Prefill | Decode] = []
        """Directives that have not been reported as ended."""

    def enqueue(self, directive: Directive) -> None:
        url = ""
        if not isinstance(directive, Refuse):
            self.calls.append(directive)
            url = self._link.router.url_of(directive.replica)
        self._link.send(Do(directive, url))

    def abort(self, replica: ReplicaId) -> None:
        self._link.send(Abort(self._request_id, replica))

    def fail(self) -> None:
        self._link.send(Bug(self._request_id))

    def take(self, event: PrefillEnded | DecodeEnded) -> bool:
        """Whether a call of ours has ended so."""
        kind = Prefill if isinstance(event, PrefillEnded) else Decode
        for call in self.calls:
            if isinstance(call, kind) and call.replica == event.replica:
                self.calls.remove(call)
                return True
        return False


class WorkerLink:
    """What one worker holds. `send` does not wait."""

    def __init__(self, router: "Router", send: Callable[[Any], None]) -> None:
        self.router = router
        self.send = send
        self.worker = ""
        self._open: dict[RequestId, _WorkerRequest] = {}

    @property
    def num_open(self) -> int:
        """Requests that it holds."""
        return len(self._open)

    def receive(self, message: FromWorker) -> None:
        """Of the worker, in its order."""
        match message:
            case Hello(worker):
                self.worker = worker
                self.send(TokensPerByte(self.router.tokens_per_byte))
            case RequestOpen(ask, tenant, waits, is_let_in, running):
                handler = self._open[ask.request_id] = _WorkerRequest(ask.request_id, self)
                if running is not None:
                    handler.calls.append(running.call)
                self.router.begin(
                    ask, tenant, handler, waits=waits, is_let_in=is_let_in, running=running
                )
            case PrefillEnded() | DecodeEnded() | DecodeBegan() | Cancelled():
                self._event(message)
            case Over(request_id, observed):
                self._over(request_id, observed)
            case Query(number, question, args):
                self.send(Reply(number, self.router.answer(question, *args)))

    def closed(self) -> None:
        """The worker is gone, and what it held with it."""
        for request_id in list(self._open):
            self.router.post(Cancelled(request_id))
            self._over(request_id, [])

    def _event(self, event: RequestEvent) -> None:
        request = self._open.get(event.request_id)
        if request is None:
            return
        if isinstance(event, PrefillEnded | DecodeEnded) and not request.take(event):
            return
        self.router.post(event)

    def _over(self, request_id: RequestId, observed: list[Observation]) -> None:
        request = self._open.pop(request_id, None)
        if request is None:
            return
        # A directive may have crossed the end of its request.
        for call in request.calls:
            self.router.post(call_ended(call, Outcome.CANCELLED, TokenCounts()))
        self.router.over(request_id, observed)


class WorkerLinks:
    """All workers' connections. Owned by the router's loop; `start`, then `stop`."""

    def __init__(self, router: "Router") -> None:
        self._router = router
        self._server: asyncio.Server | None = None
        self._links: dict[WorkerLink, MessageConnection] = {}
        self._rate = 0.0

    async def start(self, listening: socket.socket) -> None:
        """Accept workers at a socket that is bound."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(self._connection, sock=listening)

    async def stop(self) -> None:
        """Workers that are still there look for the next controller."""
        if self._server is not None:
            self._server.close()
        for connection in tuple(self._links.values()):
            connection.close()
        while self._links:
            await asyncio.wait([each.ended for each in self._links.values()])

    def tick(self) -> None:
        """Tell workers the tokens by byte that were learned; called by the router's loop."""
        rate = self._router.tokens_per_byte
        if rate != self._rate:
            self._rate = rate
            for link in self._links:
                link.send(TokensPerByte(rate))

    def _connection(self) -> MessageConnection:
        connection = MessageConnection(FromWorker, lambda message: link.receive(message))
        link = WorkerLink(self._router, connection.send)
        self._links[link] = connection
        connection.ended.add_done_callback(lambda _: self._closed(link))
        return connection

    def _closed(self, link: WorkerLink) -> None:
        del self._links[link]
        level = logging.WARNING if link.num_open else logging.INFO
        log.log(level, "worker %s is gone, with %d requests", link.worker, link.num_open)
        link.closed()
