"""The way of a request: queue, prefill, hand-over, decode, and again where something fails (pure).

A prompt waits in the queue (or is bound to a replica that loads), is computed by a prefill replica,
which puts it into the pool, waits in the migration queue, and is decoded by whoever has room. What
happens to requests is told here; `Dispatch` gives them out.
"""

from dataclasses import replace

from vllm_kvpool.router.control.desk import Desk
from vllm_kvpool.router.control.events import (
    REFUSALS,
    Abort,
    DecodeEnded,
    Outcome,
    PrefillEnded,
    Probe,
    Refuse,
)
from vllm_kvpool.router.control.fleet import Replica
from vllm_kvpool.router.control.placement import DEFAULT_BLOCK_SIZE
from vllm_kvpool.router.control.rates import Stage
from vllm_kvpool.router.control.requests import (
    ENDS,
    Ask,
    Phase,
    PromptPath,
    Request,
    RequestId,
    Turn,
)
from vllm_kvpool.router.control.shedding import Ask as Admission
from vllm_kvpool.router.control.shedding import Refuse as Shed
from vllm_kvpool.router.control.states import UP, ReplicaId

BAD_GATEWAY, UNAVAILABLE = 502, 503
LATE_RETRY_S = 5
POOL = 0
"""The only holder of `ControllerState.pool`."""
HANDED_GRACE_S = 5.0
"""A prompt that has been computed may wait so long for a decoder, whatever its deadline."""
APART = frozenset(
    {
        *(PromptPath.HANDED_OVER, PromptPath.NO_PREFILL_REPLICA),
        *(PromptPath.POOL_DOWN, PromptPath.SWITCHED_OFF),
    }
)
"""Prompts that wait in the queue: for a prefill replica, or for a decoder while there is none."""
LEAST_PREFILL_TOKENS = 256
"""A step takes its time however little it computes: a shorter prompt says nothing of the rate."""


class Flow:
    """Owned by the controller."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._arrivals = 0

    # What happens to requests

    def arrived(self, ask: Ask) -> None:
        desk = self._desk
        assert ask.request_id not in desk.requests, ask.request_id
        desk.counts["arrived"] += 1
        self._arrivals += 1
        if ask.model:
            ask = replace(ask, model=desk.fleet.listed(ask.model))
        request = Request(ask, desk.now, self._arrivals, began=desk.now)
        desk.requests[ask.request_id] = request
        request.path = self.path(request)
        is_apart = request.path in APART
        if is_apart:
            desk.asked_tokens += desk.unknown_tokens(ask)
            desk.asked.read(desk.now, desk.asked_tokens)
        verdict = desk.shedder.decide(desk.pressure(), self._admission(ask))
        if isinstance(verdict, Shed):
            desk.counts["shed"] += 1
            self._refuse(request, verdict.status, verdict.retry_after_s, verdict.why)
        elif is_apart:
            self._wait(request)
        else:
            # It does not wait behind those that are computed apart.
            self.hand(request, None)

    def path(self, request: Request) -> PromptPath:
        """Where its prompt should be computed.

        On a prefill replica if that costs less than what it keeps from the decoders.
        """
        ask, desk = request.ask, self._desk
        if not ask.hands_over:
            return PromptPath.NOT_SPLITTABLE
        rates = desk.snapshot()
        handoff_s = rates.handoff_s(ask.prompt_tokens)
        if rates.stolen_s(desk.unknown_tokens(ask)) > handoff_s:
            if (why := desk.collapse()) is not None:
                return why
            serving = any(each.serves(ask.model) for each in desk.fleet.prefillers())
            return PromptPath.HANDED_OVER if serving else PromptPath.NO_PREFILL_REPLICA
        is_known = rates.stolen_s(ask.prompt_tokens) > handoff_s
        return PromptPath.IN_POOL if is_known else PromptPath.FASTER_LOCALLY

    def _admission(self, ask: Ask) -> Admission:
        desk = self._desk
        output = min(ask.max_output_tokens, desk.snapshot().output_tokens_per_request)
        tokens = ask.prompt_tokens + ask.num_choices * output
        return Admission(
            prompt_tokens=ask.prompt_tokens,
            uncached_tokens=desk.unknown_tokens(ask),
            blocks=tokens / (desk.table.block_size or DEFAULT_BLOCK_SIZE),
            priority=ask.priority,
            deadline_s=None if ask.deadline == float("inf") else ask.deadline - desk.now,
        )

    def cancelled(self, request_id: RequestId) -> None:
        """The client has gone. Nothing is done if it was served just before."""
        request = self._desk.requests.get(request_id)
        if request is None:
            return
        self._desk.counts["cancelled"] += 1
        if request.phase in (Phase.PREFILLING, Phase.DECODING):
            self._desk.actions.append(Abort(request_id))
        self._end(request, Turn.CANCEL)

    def prefill_ended(self, event: PrefillEnded) -> None:
        desk = self._desk
        replica = desk.fleet[event.replica]
        uncached = replica.end_prefill(event.request_id)
        replica.last_work = desk.now
        if event.outcome is Outcome.OK:
            computed = event.prompt_tokens - event.cached_tokens
            tokens = max(LEAST_PREFILL_TOKENS, computed if event.prompt_tokens else uncached)
            desk.rates.did(Stage.PREFILL, event.replica, desk.now, tokens)
        desk.rates.ended(Stage.PREFILL, event.replica)
        request = desk.requests.get(event.request_id)
        if request is None or request.phase is not Phase.PREFILLING:
            return
        if event.outcome is Outcome.OK:
            self._computed(request, event, replica)
        elif event.outcome is Outcome.REJECTED:
            # The client is to read what is wrong with its request in the answer to the request.
            request.path = PromptPath.REJECTED
            self.hand(request, None)
        elif self._may_go_on(request, replica, event.outcome):
            request.turn(Turn.REQUEUE, desk.now)
            self._wait(request)

    def _computed(self, request: Request, event: PrefillEnded, replica: Replica) -> None:
        """A prompt is computed and on its way into the pool."""
        desk, ask = self._desk, request.ask
        request.path = PromptPath.HANDED_OVER
        request.saved_tokens, request.cached_tokens = event.saved_tokens, event.cached_tokens
        desk.handed_tokens += ask.prompt_tokens
        desk.handed.read(desk.now, desk.handed_tokens)
        replica.remember(ask.prefix)
        self.hand(request, event.replica)

    def decode_began(self, request_id: RequestId, *, is_seen: bool) -> None:
        """The first token has come; not `is_seen`: it will not be seen, and says nothing."""
        desk = self._desk
        request = desk.requests.get(request_id)
        if request is None or request.phase is not Phase.DECODING:
            return
        assert request.replica is not None
        replica = desk.fleet[request.replica]
        if replica.stays[request_id].is_flowing:
            return
        stay = replica.stays[request_id]
        replica.flows(request_id, desk.now)
        desk.starts.started(desk.now)
        if not is_seen:
            if request.source is not None:
                desk.rates.ended(Stage.TRANSFER, replica.replica_id)
            return
        self._remember_prompt(request, replica)
        self._learn_start(request, replica.replica_id, is_alone=stay.is_alone)
        if request.first_token is None:
            request.first_token = desk.now
            desk.waits.append(desk.now - request.arrived)

    def _remember_prompt(self, request: Request, replica: Replica) -> None:
        """It is computed: the replica has its beginnings, and so has the pool."""
        replica.remember(request.ask.prefix)
        if self._desk.pool_is_up:
            self._desk.pool.add(request.ask.prefix, POOL)

    def _learn_start(self, request: Request, replica_id: ReplicaId, *, is_alone: bool) -> None:
        """How long it took from the hand-over to the first token, and what of.

        What waits for others in the engine says nothing of its own time: only who is alone does.
        """
        desk, ask = self._desk, request.ask
        seconds = desk.now - request.began
        # What goes on elsewhere brings more than its prompt.
        is_first = request.attempts == 0 and request.first_token is None
        if request.source is not None:
            desk.rates.did(Stage.TRANSFER, replica_id, desk.now, ask.prompt_tokens)
            desk.rates.ended(Stage.TRANSFER, replica_id)
            if is_first and is_alone:
                desk.rates.handed_over(replica_id, desk.now, ask.prompt_tokens, seconds)
        elif is_first and is_alone and request.uncached > 0:
            desk.rates.prefilled_locally(replica_id, desk.now, request.uncached, seconds)

    def decode_ended(self, event: DecodeEnded) -> None:
        desk = self._desk
        replica = desk.fleet[event.replica]
        stay = replica.end_stay(event.request_id, desk.now)
        replica.last_work = desk.now
        if stay.is_flowing:
            if event.output_tokens > 1:
                step_s = (desk.now - stay.flows_since) / (event.output_tokens - 1)
                beside = replica.decoded_beside(stay)
                desk.rates.decoded(event.replica, desk.now, beside, step_s)
        elif stay.is_handed:
            desk.rates.ended(Stage.TRANSFER, event.replica)
        request = desk.requests.get(event.request_id)
        if request is None or request.phase is not Phase.DECODING:
            return
        request.output_tokens += event.output_tokens
        if event.outcome in (Outcome.OK, Outcome.REJECTED, Outcome.HOPELESS):
            desk.counts["served" if event.outcome is Outcome.OK else event.outcome.value] += 1
            if event.outcome is Outcome.OK:
                desk.rates.answered(desk.now, request.output_tokens)
                if request.first_token is None:
                    self._remember_prompt(request, replica)
            if event.outcome is Outcome.HOPELESS:
                desk.actions.append(Probe(event.replica))
            self._end(request, Turn.FINISH)
        elif stay.is_sent_away or self._may_go_on(request, replica, event.outcome):
            desk.counts["resumed"] += 1
            self.hand(request, request.source)

    # Where requests wait

    def _wait(self, request: Request) -> None:
        """In the queue, in its place."""
        request.replica = None
        request.uncached = self._desk.unknown_tokens(request.ask)
        self._desk.queue.append(request)
        self._desk.deadlines.set(request.ask.request_id, self._patience(request))

    def _patience(self, request: Request) -> float:
        """Until when a request may wait here: not for long if all that it waits for is others."""
        deadline = request.ask.deadline
        if request.attempts or request.avoid:
            return deadline
        return min(deadline, self._desk.now + self._desk.shedder.overdue_s)

    def hand(self, request: Request, source: ReplicaId | None) -> None:
        """To whoever decodes it; what `source` has computed is in the pool."""
        desk, request_id = self._desk, request.ask.request_id
        request.turn(Turn.HAND, desk.now)
        request.source, request.replica = source, None
        desk.migration.append(request, source)
        deadline = self._patience(request)
        if request.first_token is not None:
            deadline = desk.now + desk.settings.resume_within_s
        elif source is not None:
            deadline = max(deadline, desk.now + HANDED_GRACE_S)
        desk.deadlines.set(request_id, deadline)

    def unbind(self, replica: Replica) -> None:
        """What a replica was bound to waits in the queue again."""
        for request in replica.bound:
            request.turn(Turn.UNBIND, self._desk.now)
            self._wait(request)
        replica.bound.clear()

    def abandon(self, replica: Replica) -> None:
        """A replica is gone: its calls are ended, what it was bound to waits in the queue again."""
        for request_id in (*replica.prefills, *replica.stays):
            self._desk.actions.append(Abort(request_id))
        self.unbind(replica)

    # Ends

    def refuse_late(self) -> None:
        """Refuse what has waited too long."""
        desk = self._desk
        for request_id in desk.deadlines.take(desk.now):
            request = desk.requests[request_id]
            is_expected = request.phase is Phase.BOUND or not desk.servers()
            if is_expected and desk.now < request.ask.deadline:
                desk.deadlines.set(request_id, request.ask.deadline)  # not others, but an engine
                continue
            desk.counts["late"] += 1
            self._refuse(request, UNAVAILABLE, LATE_RETRY_S, "waited longer than its deadline")

    def _may_go_on(self, request: Request, replica: Replica, outcome: Outcome) -> bool:
        """Note that a replica has failed a request; False if that was its last chance."""
        desk = self._desk
        if outcome is Outcome.BUSY:
            replica.pause(desk.now + desk.settings.busy_pause_s)
        else:
            is_first = replica.replica_id not in request.avoid
            request.avoid.add(replica.replica_id)
            if replica.state in UP:
                replica.is_doubted |= outcome in (Outcome.UNREACHED, Outcome.LOST)
                desk.actions.append(Probe(replica.replica_id))
            if outcome is Outcome.UNREACHED and is_first:
                return True  # it has not had it: nothing was tried
        request.attempts += 1
        # Also where it answers 500, or is found to have ended: the request may be why.
        may_have_run = outcome not in (Outcome.BUSY, Outcome.UNREACHED)
        request.num_lost += may_have_run and request.first_token is None
        is_suspect = request.num_lost >= desk.settings.max_lost
        if request.attempts < desk.settings.max_attempts and not is_suspect:
            return True
        desk.counts["given_up"] += 1
        status = UNAVAILABLE if outcome is Outcome.BUSY else BAD_GATEWAY
        why = f"{request.attempts} replicas could not serve it, the last one {replica.replica_id}"
        self._refuse(request, status, LATE_RETRY_S, why)
        return False

    def _refuse(self, request: Request, status: int, retry_after_s: int, why: str) -> None:
        assert status in REFUSALS, status
        self._desk.refusals[status] += 1
        self._desk.actions.append(Refuse(request.ask.request_id, status, retry_after_s, why))
        self._end(request, Turn.REFUSE)

    def _end(self, request: Request, turn: Turn) -> None:
        """Wherever it waits, it does not any more. Calls in flight end by themselves."""
        desk, request_id = self._desk, request.ask.request_id
        desk.queue.remove(request_id)
        desk.migration.remove(request_id)
        desk.deadlines.clear(request_id)
        if request.phase is Phase.BOUND and request.replica is not None:
            desk.fleet[request.replica].bound.remove(request)
        request.turn(turn, desk.now)
        assert request.phase in ENDS
        del desk.requests[request_id]
