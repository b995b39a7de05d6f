"""The handler of one request: performs the controller's directives, in their order.

A handler lives in the task of the client's connection. The controller chooses the replicas that
compute the prompt and answer. The prompt's call runs in a task of its own, beside the calls that
answer; what these make of the client's answer is in `answers.py`. The controller always learns that
the request is over.
"""

import asyncio
import logging
from collections import deque

from vllm_kvpool.router.control.events import (
    Cancelled,
    Decode,
    Directive,
    Outcome,
    Prefill,
    Refuse,
)
from vllm_kvpool.router.control.states import ReplicaId
from vllm_kvpool.router.dataplane.answers import OnePiece, answer_of
from vllm_kvpool.router.dataplane.calls import (
    AnswerCall,
    ClientExchange,
    PromptCall,
)
from vllm_kvpool.router.dataplane.headers import JSON, answer_headers
from vllm_kvpool.router.dataplane.http_server import ClientGone
from vllm_kvpool.router.dataplane.responses import SERVER_ERROR, UNKNOWN, EngineLost, TokenCounts
from vllm_kvpool.router.dataplane.resume.whole_answer import NotAssembled

log = logging.getLogger(__name__)


class RequestHandler:
    """Owned by its task; `enqueue`, `abort` and `fail` are called in the same loop."""

    def __init__(self, exchange: ClientExchange) -> None:
        self._exchange = exchange
        self._answer = answer_of(exchange)
        self._calls: deque[AnswerCall | Refuse] = deque()
        """Calls to be made, or the refusal to be sent, in order."""
        self._call: AnswerCall | None = None
        """The present call, or the last one."""
        self._wake = asyncio.Event()
        self._has_failed = False

    # Called by the router

    def enqueue(self, directive: Directive) -> None:
        """Do this next; a `Prefill` at once, beside what is done."""
        match directive:
            case Prefill():
                self._prefill(directive)
            case Decode():
                self._calls.append(AnswerCall(self._exchange, directive))
            case Refuse():
                self._calls.append(directive)
        self._wake.set()

    def abort(self, replica: ReplicaId) -> None:
        """Cancel the call at a replica, begun or not; it ends as lost.

        Without effect on an answer that has been read to its end, or a call that has been reported.
        """
        prompt_call = self._exchange.prompt_call
        if prompt_call is not None and prompt_call.directive.replica == replica:
            log.info("%s: %s is lost: given up by the router", self._exchange.request_id, replica)
            self._end_prefill(Outcome.LOST)
            return
        call = self._next_call()
        if call is not None and call.directive.replica == replica and not self._answer.has_ended:
            call.abort()

    def fail(self) -> None:
        """Tell the client, if it waits, that the router has a bug."""
        self._has_failed = True
        if (call := self._next_call()) is not None:
            call.abort()
        self._wake.set()

    def _next_call(self) -> AnswerCall | None:
        """Return the call that is made or will be made next, if there is one."""
        if self._call is not None and not self._call.is_reported:
            return self._call
        call = next(iter(self._calls), None)
        return call if isinstance(call, AnswerCall) else None

    # The task

    async def run(self) -> None:
        """Serve the client; the request has been announced to the controller."""
        exchange = self._exchange
        try:
            is_answered = False
            while not is_answered:
                is_answered = await self._perform(await self._next())
        except ClientGone as error:
            log.info("%s: its client %s", exchange.request_id, error)
        except Exception:
            # The top of the request's lane: a bug costs this request, and no other.
            log.exception("%s has failed", exchange.request_id)
            try:
                await exchange.tell(SERVER_ERROR, "The router has failed.")
            except (ClientGone, RuntimeError) as error:
                log.info("%s: its client cannot be told: %s", exchange.request_id, error)
        finally:
            self._end_all()

    async def _next(self) -> AnswerCall | Refuse:
        while not self._calls:
            if self._has_failed:
                raise RuntimeError("the controller has failed with it")
            self._wake.clear()
            await self._wake.wait()
        return self._calls.popleft()

    async def _perform(self, call: AnswerCall | Refuse) -> bool:
        """Return True if the client has been answered, else another call is to come."""
        if isinstance(call, Refuse):
            self._exchange.is_over = True
            await self._refuse(call)
            return True
        self._call = call
        self._exchange.log.asks(call.directive, self._exchange.clock())
        return await self._decode(call)

    def _end_all(self) -> None:
        """Report what was begun, or was to be, and is not done; and that it is over."""
        exchange = self._exchange
        if not exchange.is_over or self._has_failed:
            exchange.control.post(Cancelled(exchange.request_id))
        while (call := self._next_call()) is not None:
            if call is not self._call:
                self._calls.popleft()
            call.report(Outcome.CANCELLED)
        exchange.log.note_prompt(self._answer.prompt_tokens, exchange.prompt.cached_tokens)
        self._end_prefill(Outcome.CANCELLED)

    # Prefill

    def _prefill(self, directive: Prefill) -> None:
        exchange = self._exchange
        assert exchange.prompt_call is None, directive
        exchange.log.asks(directive, exchange.clock())
        call = exchange.prompt_call = PromptCall(exchange, directive)
        exchange.prompt.begin()
        call.task = asyncio.get_running_loop().create_task(self._run_prefill(call))

    async def _run_prefill(self, call: PromptCall) -> None:
        counts = TokenCounts()
        try:
            outcome, counts = await call.perform()
        except EngineLost as error:
            replica, request_id = call.directive.replica, self._exchange.request_id
            log.info("%s: %s is lost: %s", request_id, replica, error)
            outcome = error.outcome
        except Exception:
            # The top of the prompt's lane, as `run` is of the request's.
            log.exception("%s has failed", self._exchange.request_id)
            self.fail()
            return
        self._report_prefill(call, outcome, counts)

    def _end_prefill(self, outcome: Outcome) -> None:
        """Give up the prompt's call, if it runs."""
        if (call := self._exchange.prompt_call) is not None:
            call.task.cancel()
            self._report_prefill(call, outcome, TokenCounts())

    def _report_prefill(self, call: PromptCall, outcome: Outcome, counts: TokenCounts) -> None:
        call.report(outcome, counts)
        made = self._call
        is_made = made is not None and made.is_in_one_piece and not made.is_reported
        if made is not None and is_made and outcome is Outcome.OK:
            made.note_unseen()

    # Decode

    async def _decode(self, call: AnswerCall) -> bool:
        """Make a call; return True if the client has been answered, else another engine goes on."""
        exchange, answer = self._exchange, self._answer
        try:
            return await call.attempt(lambda: answer.serve(call))
        except NotAssembled as error:
            log.info("%s: asked again without a stream: %s", exchange.request_id, error)
            if exchange.prompt.details is None:
                exchange.prompt.note(Outcome.LOST, UNKNOWN)  # the engine has computed the prompt
            if call.begins:
                call.note_begin()
            self._answer = OnePiece(exchange, exchange.request)
            return await self._decode(call)
        except EngineLost as error:
            replica = call.directive.replica
            log.info("%s: %s is lost: %s", exchange.request_id, replica, error)
            return await answer.lost(call, error.outcome)

    async def _refuse(self, directive: Refuse) -> None:
        exchange, failure = self._exchange, self._exchange.failure
        if (
            failure is not None
            and not exchange.http.status
            and failure.headers.get("Content-Type", "").startswith(JSON)
        ):
            # All that were asked have failed; what they say of it says more.
            headers = answer_headers(failure.headers)
            await exchange.send_error(failure.status, failure.body, headers)
            return
        wait_s = directive.retry_after_s
        more = {"Retry-After": str(wait_s)} if wait_s else {}
        await exchange.tell(directive.status, directive.why, more)
