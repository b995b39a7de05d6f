"""The way of a request: queue, prefill, hand-over, decode, and again where something fails (pure).

`RequestFlow` follows events; `Dispatcher` gives requests to replicas as far as these have room:
first what is bound to loading replicas, then the queue, then what waits for a decoder. A request
goes to a decoder whole where that is cheaper or there is no choice.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from msgspec.structs import replace

from vllm_kvpool.router.control import placement
from vllm_kvpool.router.control.admission import Admission
from vllm_kvpool.router.control.controller_state import ControllerState
from vllm_kvpool.router.control.events import (
    ANSWERED,
    EVERYTHING,
    REFUSALS,
    Abort,
    Decode,
    DecodeEnded,
    Emit,
    Outcome,
    Prefill,
    PrefillEnded,
    Probe,
    Refuse,
)
from vllm_kvpool.router.control.fleet import Fleet, Replica
from vllm_kvpool.router.control.placement import MAX_TRIED, Ranking
from vllm_kvpool.router.control.requests import (
    QUEUED_PATHS,
    Phase,
    PromptPath,
    Request,
    RequestId,
    RequestSpec,
)
from vllm_kvpool.router.control.states import HAS_BOUND, UP, ReplicaId, State
from vllm_kvpool.router.control.work import ActiveRequest

BAD_GATEWAY, UNAVAILABLE = 502, 503
LATE_RETRY_S = 5
LATE_EVERY_S = 0.05
"""Between two looks at what has waited too long."""
HANDOVER_GRACE_S = 5.0
"""A prompt that has been computed may wait so long for a decoder, whatever its deadline."""
LEAST_PREFILL_TOKENS = 256
"""A step takes its time however little it computes: a shorter prompt says nothing of the rate."""


class RequestFlow:
    """Owned by the controller."""

    def __init__(self, state: ControllerState, admission: Admission, emit: Emit) -> None:
        self._state = state
        self._emit = emit
        self._admission = admission
        self._arrivals = 0
        self._late_due = 0.0

    # What happens to requests

    def arrived(self, ask: RequestSpec) -> None:
        """Register a request, choose its path, and start, queue or refuse it."""
        state = self._state
        assert ask.request_id not in state.requests, ask.request_id
        state.counts.events["arrived"] += 1
        request = self._register(ask, state.now)
        ask = request.ask
        request.uncached = uncached = state.pool.unknown_tokens(ask)
        request.path = self.path(request, uncached)
        is_apart = request.path in QUEUED_PATHS
        if is_apart:
            state.rates.asked_tokens.add(state.now, uncached)
        verdict = self._admission.decide(request)
        if verdict is not None:
            state.counts.events["shed"] += 1
            self._refuse(request, verdict.status, verdict.retry_after_s, verdict.why)
        elif is_apart:
            self._wait(request)
        else:
            # It does not wait behind those that are computed apart.
            self.migrate(request, None)

    def _register(self, ask: RequestSpec, arrived: float) -> Request:
        """Register a request, by the model that replicas list, and return it.

        A model that no replica lists is for an engine to judge.
        """
        state = self._state
        if ask.model and ask.model not in state.fleet.listed.groups:
            ask = replace(ask, model="", hands_over=False)
        self._arrivals += 1
        tokens = state.tokens_of(ask)
        request = Request(ask, arrived, self._arrivals, tokens, began=state.now)
        state.requests[ask.request_id] = request
        return request

    def path(self, request: Request, uncached: int) -> PromptPath:
        """Return where a prompt should be computed; the pool lacks `uncached` tokens of the prompt.

        On a prefill replica if that costs less than what it keeps from the decoders.
        """
        ask, state = request.ask, self._state
        if not ask.hands_over:
            return PromptPath.NOT_SPLITTABLE
        rates = state.rates.current(state.now)
        handoff_s = rates.handoff_s(ask.prompt_tokens)
        if rates.local_prefill_s(uncached) > handoff_s:
            why = state.collapse()
            if why is not None and why is not PromptPath.NO_SHARED_STORE:
                return why
            serving = [each for each in state.fleet.prefillers() if each.serves(ask.model)]
            if not serving:
                return PromptPath.NO_PREFILL_REPLICA
            # Of replicas that share no store, one prompt from time to time tries whether they do.
            is_shared = any(state.fleet.may_compute_apart(each, state.now) for each in serving)
            return PromptPath.HANDED_OVER if is_shared else PromptPath.NO_SHARED_STORE
        is_known = rates.local_prefill_s(ask.prompt_tokens) > handoff_s
        return PromptPath.IN_POOL if is_known else PromptPath.FASTER_LOCALLY

    def cancelled(self, request_id: RequestId) -> None:
        """Give up a request whose client has gone; the ends of its calls are to come."""
        request = self._state.requests.get(request_id)
        if request is None:
            return
        self._state.counts.events["cancelled"] += 1
        self._end(request)

    def prefill_ended(self, event: PrefillEnded) -> None:
        """Measure a prefill that ended, then hand its request over, or compute it again."""
        state = self._state
        replica = state.fleet[event.replica]
        uncached = replica.work.end_prefill(event.request_id)
        replica.last_work = state.now
        if event.outcome is Outcome.OK:
            computed = event.prompt_tokens - event.cached_tokens
            tokens = max(LEAST_PREFILL_TOKENS, computed if event.prompt_tokens else uncached)
            busy_s = state.now - replica.work.prefill_since
            state.rates.prefilled(replica.left_out, state.now, tokens, busy_s)
            replica.work.prefill_since = state.now
        request = state.requests.get(event.request_id)
        if request is None:
            return
        request.is_computing = False
        is_asked = request.phase is not Phase.PREFILLING
        if event.outcome is Outcome.OK:
            self._computed(request, event, replica)
            if is_asked:
                self._prompt_came(request)
            else:
                self.migrate(request, event.replica)
            return
        request.source = None
        if is_asked:
            self._prompt_failed(request, replica, event.outcome)
        elif event.outcome is Outcome.REJECTED:
            # The client is to read what is wrong with its request in the answer to the request.
            request.path = PromptPath.REJECTED
            self.migrate(request, None)
        elif self._may_go_on(request, replica, event.outcome):
            self._wait(request)

    def _computed(self, request: Request, event: PrefillEnded, replica: Replica) -> None:
        """Hand over a request whose prompt is computed and on its way into the pool."""
        state, ask = self._state, request.ask
        request.path = PromptPath.HANDED_OVER
        request.saved_tokens = event.saved_tokens
        state.rates.counted(state.now, event.prompt_tokens, ask.prompt_bytes)
        state.rates.handed_tokens.add(state.now, ask.prompt_tokens)
        replica.remember(ask.prefix)

    def _prompt_came(self, request: Request) -> None:
        """Continue a request with a decoder, asked or sought, whose prompt is computed now."""
        state, now = self._state, self._state.now
        if request.replica is None:
            request.deadline = max(request.deadline, now + HANDOVER_GRACE_S)
            return
        request.began = now  # the hand-over's time is that from here to the first token
        state.fleet[request.replica].work.note_prompt(request.ask.request_id, now)

    def _prompt_failed(self, request: Request, replica: Replica, outcome: Outcome) -> None:
        """Continue a request with a decoder, asked or sought, whose prompt will not be computed.

        Decoders compute what is missing. One that waits is asked again, to wait no more: the
        prefill replica may live, and never have had the request.
        """
        if outcome is not Outcome.REJECTED:
            self._note_failure(request, replica, outcome)
        self._wait_no_more(request)

    def _wait_no_more(self, request: Request) -> None:
        """Ask the decoder that waits for a prompt, if there is one, again: to wait no more."""
        if request.replica is None:
            return
        active = self._state.fleet[request.replica].work.active[request.ask.request_id]
        if active.is_handed and not (active.has_first_token or active.is_sent_away):
            active.is_sent_away = True
            self._emit(Abort(request.ask.request_id, request.replica))

    def decode_began(self, request_id: RequestId, *, is_seen: bool) -> None:
        """Take the first token; not `is_seen`: it will not be seen, and says nothing."""
        state = self._state
        request = state.requests.get(request_id)
        if request is None or request.phase is not Phase.DECODING:
            return
        assert request.replica is not None
        replica = state.fleet[request.replica]
        active = replica.work.active[request_id]
        if active.has_first_token:
            return
        replica.work.note_first_token(request_id, state.now)
        self._admission.note_first_token(request.ask.model)
        if not is_seen:
            return
        self._remember_prompt(request, replica)
        self._learn_start(request, replica, active)
        if request.first_token is None:
            request.first_token = state.now
            state.counts.waits.append(state.now - request.arrived)

    def _remember_prompt(self, request: Request, replica: Replica) -> None:
        """Note that the replica and the pool have a prompt, which is computed."""
        replica.remember(request.ask.prefix)
        self._state.pool.add(request.ask.prefix)

    def _learn_start(self, request: Request, replica: Replica, active: ActiveRequest) -> None:
        """Learn the seconds from the hand-over, or local start, to the first token.

        Only of a request that did not wait for others in the engine.
        """
        is_alone = active is replica.work.alone
        ask, rates, now = request.ask, self._state.rates, self._state.now
        seconds = now - request.began
        # What goes on elsewhere brings more than its prompt.
        is_first = request.attempts == 0 and request.first_token is None
        if request.is_computing:
            return  # its decoder may have computed it, too
        if active.is_handed:
            busy_s = now - replica.work.transfer_since
            rates.transferred(replica.left_out, now, ask.prompt_tokens, busy_s)
            replica.work.transfer_since = now
            if is_first and is_alone:
                rates.handed_over(replica.left_out, now, ask.prompt_tokens, seconds)
        elif is_first and is_alone and 2 * request.uncached >= ask.prompt_tokens:
            # Where the pool has more of it than that, the time is that of loading.
            rates.prefilled_locally(replica.left_out, now, request.uncached, seconds)

    def decode_ended(self, event: DecodeEnded) -> None:
        """Measure a decode call that ended, then end its request, or continue it elsewhere."""
        state = self._state
        if event.began:
            self.decode_began(event.request_id, is_seen=True)
        replica = state.fleet[event.replica]
        active = replica.work.end_decode(event.request_id, state.now)
        replica.last_work = state.now
        if active.has_first_token and event.output_tokens > 1:
            step_s = (state.now - active.decodes_since) / (event.output_tokens - 1)
            beside = replica.work.decoded_beside(active)
            state.rates.decoded(replica.left_out, state.now, beside, step_s)
        request = state.requests.get(event.request_id)
        if request is None or request.phase is not Phase.DECODING:
            return
        request.output_tokens += event.output_tokens
        if event.outcome in ANSWERED:
            is_served = event.outcome is Outcome.OK
            state.counts.events["served" if is_served else event.outcome.value] += 1
            if is_served:
                state.rates.counted(state.now, event.prompt_tokens, request.ask.prompt_bytes)
                state.rates.answered(state.now, request.output_tokens)
                if request.first_token is None:
                    self._remember_prompt(request, replica)
            if event.outcome is Outcome.HOPELESS:
                self._emit(Probe(event.replica))
            self._end(request)
        elif active.is_sent_away or self._may_go_on(request, replica, event.outcome):
            state.counts.events["resumed"] += 1
            self.migrate(request, request.source)
            if active.is_sent_away:
                request.deadline = max(request.deadline, state.now + HANDOVER_GRACE_S)

    # Where requests wait

    def _wait(self, request: Request) -> None:
        """Queue a request in its place."""
        request.uncached = self._state.pool.unknown_tokens(request.ask)
        request.deadline = self._patience(request)
        self._state.enter(request, Phase.QUEUED)

    def _patience(self, request: Request) -> float:
        """Return until when a request may wait here: not for long if it waits for others alone."""
        deadline = request.ask.deadline
        if request.attempts or request.avoid:
            return deadline
        return min(deadline, self._state.now + self._admission.overdue_s)

    def migrate(self, request: Request, source: ReplicaId | None) -> None:
        """Put a request into the migration queue.

        `source` puts its prompt into the pool, or is None.
        """
        state = self._state
        request.source, request.deadline = source, self._patience(request)
        if request.first_token is not None:
            request.deadline = state.now + state.settings.resume_within_s
        elif source is not None:
            request.deadline = max(request.deadline, state.now + HANDOVER_GRACE_S)
        state.enter(request, Phase.HANDING)

    def unbind(self, replica: Replica) -> None:
        """Put what a replica was bound to into the queue again."""
        for request in tuple(replica.work.bound):
            self._wait(request)

    def abandon(self, replica: Replica) -> None:
        """End the calls of a replica that is gone, and queue the requests bound to it again."""
        for request_id in (*replica.work.prefills, *replica.work.active):
            self._emit(Abort(request_id, replica.replica_id))
        self.unbind(replica)
        for request in self._state.requests.values():
            if request.source == replica.replica_id and not request.is_computing:
                # What it has not stored by now will never come.
                request.source, request.saved_tokens = None, 0
                if request.phase is Phase.DECODING:
                    self._wait_no_more(request)

    # Ends

    def refuse_late(self) -> None:
        """Refuse what has waited too long."""
        state = self._state
        if state.now < self._late_due:
            return
        self._late_due = state.now + LATE_EVERY_S
        bound = (each.work.bound for each in state.fleet.in_states(HAS_BOUND))
        for request in [*state.queue, *state.migration, *chain.from_iterable(bound)]:
            if state.now < request.deadline:
                continue
            is_expected = (
                request.phase is Phase.BOUND or not state.totals(request.ask.model).decode_replicas
            )
            if is_expected and state.now < request.ask.deadline:
                request.deadline = request.ask.deadline  # not others, but an engine
                continue
            state.counts.events["late"] += 1
            self._refuse(request, UNAVAILABLE, LATE_RETRY_S, self._why_late(request))

    def _why_late(self, request: Request) -> str:
        """Return a sentence: how long a request has waited, and the limit that has passed."""
        state = self._state
        if request.first_token is not None:
            limit = f"{state.settings.resume_within_s:g} s"
            if request.deadline == request.ask.deadline:
                limit = "front.max_wait_s"
            return f"it could not go on at another engine within {limit}"
        waited_s = state.now - request.arrived
        limit = "front.max_wait_s"
        if request.deadline < request.ask.deadline:
            limit = f"twice overload.ttft_target_s ({self._admission.overdue_s:g} s)"
        return f"it has waited {waited_s:.1f} s for a replica, longer than {limit}"

    def _note_failure(self, request: Request, replica: Replica, outcome: Outcome) -> bool:
        """Note that a replica has failed a request; False where nothing was tried."""
        state = self._state
        if outcome is Outcome.BUSY:
            replica.pause(state.now + state.settings.busy_pause_s)
        else:
            is_first = replica.replica_id not in request.avoid
            request.avoid |= {replica.replica_id}
            if replica.state in UP:
                replica.health.is_doubted |= outcome in (Outcome.UNREACHED, Outcome.LOST)
                self._emit(Probe(replica.replica_id))
            if outcome is Outcome.UNREACHED and is_first:
                return False  # it has not had it
        request.attempts += 1
        # Also where it answers 500, or is found to have ended: the request may be why.
        may_have_run = outcome not in (Outcome.BUSY, Outcome.UNREACHED)
        request.num_lost += may_have_run and request.first_token is None
        return True

    def _may_go_on(self, request: Request, replica: Replica, outcome: Outcome) -> bool:
        """Note that a replica has failed a request; False if that was its last chance."""
        if not self._note_failure(request, replica, outcome):
            return True
        state = self._state
        is_suspect = request.num_lost >= state.settings.max_lost
        if request.attempts < state.settings.max_attempts and not is_suspect:
            return True
        state.counts.events["given_up"] += 1
        status = UNAVAILABLE if outcome is Outcome.BUSY else BAD_GATEWAY
        limit = f"flow.max_lost={state.settings.max_lost}"
        if not is_suspect:
            limit = f"flow.max_attempts={state.settings.max_attempts}"
        number, last = request.attempts, replica.replica_id
        why = f"{number} attempts have failed ({limit}), the last one at {last}"
        self._refuse(request, status, LATE_RETRY_S, why)
        return False

    def _refuse(self, request: Request, status: int, retry_after_s: int, why: str) -> None:
        assert status in REFUSALS, status
        self._state.counts.refusals[status] += 1
        self._emit(Refuse(request.ask.request_id, status, retry_after_s, why))
        self._end(request)

    def _end(self, request: Request) -> None:
        """End a request; calls in flight end by themselves."""
        self._state.enter(request, Phase.ENDED)
        del self._state.requests[request.ask.request_id]


NEAREST = 2
"""Replicas with least to do that are compared for a request, beside MAX_HOLDERS that have most of
its prompt."""
MAX_HOLDERS = 4
MAX_CLEARED_OF = 16
NOWHERE = -1.0
"""Room where no decoder takes anything."""
LOOK_AHEAD = 32
"""Requests that may pass some in front of them that fit nowhere."""
RETRY_EVERY_S = 0.05
"""Pause between two tries of requests that wait for room, while no replica has gained any."""
MAX_PASSED_S = 2.0
"""A request that has waited longer is not passed any more: a decoder is cleared for it, whether it
finds its prompt or has to compute it."""


@dataclass(slots=True)
class Retry:
    """When the requests of a queue that found no room at the replicas of a ranking are retried."""

    _fleet: Fleet
    _ranking: Ranking
    _seen: tuple[int, int] | None = None
    """The fleet's version and the ranking's gains at the last try."""
    _due: float = 0.0

    def take_due(self, now: float) -> bool:
        """Return True if a replica may have gained room, or RETRY_EVERY_S are over."""
        seen = self._fleet.version, self._ranking.num_gains
        if seen == self._seen and now < self._due:
            return False
        self._seen, self._due = seen, now + RETRY_EVERY_S
        return True


class Dispatcher:
    """Owned by the controller."""

    def __init__(self, state: ControllerState, flow: RequestFlow, emit: Emit) -> None:
        self._state = state
        self._emit = emit
        self._flow = flow
        self._prefill_retry = Retry(state.fleet, state.table.prefillers)
        self._decode_retry = Retry(state.fleet, state.table.decoders)
        self._num_tried = 0
        """Requests that had entered `migration` when these were last tried."""
        self._blocked: dict[str, Request] = {}
        """Heads of the queue, by model, that found no prefill replica with room."""
        self._room: dict[str, float] = {}
        """By model, the tokens from which on requests found no decoder with room, less one."""

    def dispatch(self) -> None:
        """Give out what can be given out now."""
        state = self._state
        self._flow.refuse_late()
        if state.fleet.in_states(HAS_BOUND):
            if state.collapse() is not None:
                for replica in state.fleet.in_states(HAS_BOUND):
                    self._flow.unbind(replica)  # replicas that serve compute it
            self._work_off_bound()
            self._take_over_bound()
        if state.queue:
            state.refresh()
            if self._prefill_retry.take_due(state.now) or state.fleet.in_states(HAS_BOUND):
                self._blocked.clear()
            self._give_prompts()
        if state.migration:
            state.refresh()
            if self._decode_retry.take_due(state.now):
                self._room.clear()
            elif state.migration.num_entered == self._num_tried:
                return
            self._num_tried = state.migration.num_entered
            self._give_decodes()

    def flush(self, replica: Replica) -> None:
        """Decode on a former prefill replica what it has computed and holds."""
        for request in self._state.migration.first():
            has_room = request.tokens <= placement.room_of(replica, self._state.settings)
            if has_room and request.source == replica.replica_id:
                self._decode(request, replica)

    # Prompts

    def _work_off_bound(self) -> None:
        """Start the requests bound to a replica, which is loaded now."""
        state = self._state
        for replica in state.fleet.in_states(State.REFRACTORY_PREFILL):
            while replica.work.bound:
                choice = self._choose_prefill(replica.work.bound[0], (replica,))
                if choice is None:
                    break
                self._prefill(replica.work.bound[0], choice)

    def _take_over_bound(self) -> None:
        """Give bound requests to old replicas, those in front of the whole queue."""
        state = self._state
        while (found := placement.next_bound(state.fleet)) is not None:
            request = found[1]
            head = state.queue.head()
            if head is not None and head.order < request.order:
                return
            choice = self._choose_prefill(request, state.fleet.in_states(State.OLD_PREFILL))
            if choice is None:
                return
            state.counts.events["stolen"] += 1
            self._prefill(request, choice)

    def _give_prompts(self) -> None:
        state = self._state
        skipped: set[str] = set()
        """Models whose next prompt finds no room."""
        while (request := state.queue.head(skipped)) is not None:
            model = request.ask.model
            if self._blocked.get(model) is request:
                skipped.add(model)
                continue
            path = self._flow.path(request, state.pool.unknown_tokens(request.ask))
            if path is not PromptPath.HANDED_OVER:
                # More whole requests stay here: prefill replicas that come back may compute them.
                if len(state.migration) >= LOOK_AHEAD * max(1, len(state.fleet)):
                    return
                request.path = path
                self._flow.migrate(request, None)
                continue
            choice = self._choose_prefill(request)
            if choice is not None:
                self._prefill(request, choice)
            elif not self._bind(request):
                self._blocked[model] = request
                skipped.add(model)

    def _choose_prefill(
        self, request: Request, replicas: Sequence[Replica] | None = None
    ) -> placement.PrefillChoice | None:
        """Choose one of `replicas`; without them, of those that have most of it or least to do.

        Replicas that take over bound requests are chosen only if no bound request comes first: else
        small prompts would pass a larger one that is bound and waits for room there.
        """
        state, fleet = self._state, self._state.fleet
        held = fleet.holders(request.ask, MAX_HOLDERS)
        if replicas is None:
            bound = placement.next_bound(fleet)
            if bound is not None and bound[1].order < request.order:
                replicas = [
                    each
                    for each in fleet.in_states(State.PREFILL)
                    if fleet.may_compute_apart(each, state.now)
                ]
            else:
                state.refresh()
                replicas = self._candidates(
                    request,
                    held,
                    state.table.prefillers,
                    lambda each: (
                        each.health.is_open(state.now) and fleet.may_compute_apart(each, state.now)
                    ),
                )
        return placement.choose_prefill(request, replicas, state.settings, state.now, held)

    def _candidates(
        self,
        request: Request,
        held: Mapping[Replica, int],
        ranking: Ranking,
        accepts: Callable[[Replica], bool],
    ) -> list[Replica]:
        """Return the ranked replicas that accept a request: with most of it, or first."""
        avoid, model = request.avoid, request.ask.model

        def is_next(replica: Replica) -> bool:
            return replica.replica_id not in avoid and accepts(replica)

        having = (each for each in held if each in ranking and each.serves(model))
        found = [each for each in having if accepts(each)]
        first = ranking.first(NEAREST, is_next if avoid else accepts, model)
        if not first and not found and avoid:
            first = ranking.first(1, accepts, model)
        return [*found, *(each for each in first if each not in found)]

    def _bind(self, request: Request) -> bool:
        state = self._state
        replica = placement.choose_new(state.fleet, state.now, request.ask.model)
        if replica is None:
            return False
        state.enter(request, Phase.BOUND, replica)
        replica.work.assign(request)
        return True

    def _prefill(self, request: Request, choice: placement.PrefillChoice) -> None:
        state, request_id = self._state, request.ask.request_id
        replica = choice.replica
        request.tries = None
        if not state.fleet.shares(replica):
            request.tries = state.fleet.decoder_to_try(replica, state.now)
        if request.tries is not None:
            state.fleet.handovers.hand_over(replica.replica_id, request.tries, state.now)
        state.enter(request, Phase.PREFILLING, replica)
        request.source, request.is_computing = replica.replica_id, True
        replica.work.begin_prefill(request_id, choice.uncached_tokens, state.now)
        notices = replica.sample.notices
        self._emit(Prefill(request_id, replica.replica_id, hands_over=notices is not None))
        # What is computed already comes first; what tries a pair may find nothing.
        if notices and not state.migration and request.tries is None:
            found = self._find_decoder(request, lambda each: self._suits(request, each))
            if found is not None:
                self._decode(request, found)

    # What is to be decoded

    def _give_decodes(self) -> None:
        state, settings = self._state, self._state.settings
        totals, ranking = state.totals(), state.table.decoders
        num_more = settings.max_pending_handoffs * len(ranking) - totals.starting_requests
        passed, most = 0, max(0, num_more) + LOOK_AHEAD
        cleared: set[Replica] = set()
        clearable: dict[str, list[Replica]] = {}

        def is_open(replica: Replica) -> bool:
            return replica.health.is_open(state.now) and replica not in cleared

        is_of_one_model = state.fleet.listed.is_single_set
        for request in state.migration.first(most):
            if passed >= LOOK_AHEAD:
                return
            model, tokens = request.ask.model, request.tokens
            if tokens <= self._room.get(model, math.inf):
                if self._decode_somewhere(request, cleared):
                    continue
                found = ranking.first(MAX_TRIED, is_open, model)
                room = max((placement.room_of(each, settings) for each in found), default=NOWHERE)
                self._room[model] = min(room, tokens - 1)
            if self._room[model] == NOWHERE:
                if is_of_one_model:
                    return
                continue
            passed += 1
            if state.now - request.began > MAX_PASSED_S:
                if model not in clearable:
                    clearable[model] = ranking.first(MAX_CLEARED_OF, is_open, model)
                if decoders := clearable[model]:
                    decoder = placement.choose_to_clear(tokens, decoders, settings)
                    decoders.remove(decoder)
                    cleared.add(decoder)

    def _decode_somewhere(self, request: Request, cleared: set[Replica]) -> bool:
        """Give a request to a decoder, if one has room; not to those that are being cleared."""
        state = self._state
        # It waits for one that finds its prompt, if there is any, but not for long.
        is_choosy = state.now - request.began <= MAX_PASSED_S and any(
            self._suits(request, each)
            for each in state.fleet.decoders()
            if each.serves(request.ask.model)
        )

        def accepts(replica: Replica) -> bool:
            return replica not in cleared and (not is_choosy or self._suits(request, replica))

        replica = self._find_decoder(request, accepts)
        if replica is None:
            return False
        self._decode(request, replica)
        state.refresh()
        return True

    def _find_decoder(self, request: Request, accepts: Callable[[Replica], bool]) -> Replica | None:
        """Return the best accepted decoder with room for a request, if there is one."""
        state, settings, tokens = self._state, self._state.settings, request.tokens

        def fits(replica: Replica) -> bool:
            if request.is_computing and replica.replica_id == request.source:
                return False  # it would wait for itself
            is_open = replica.health.is_open(state.now) and accepts(replica)
            return is_open and tokens <= placement.room_of(replica, settings)

        totals = state.totals(request.ask.model)
        held = state.fleet.holders(request.ask, MAX_HOLDERS)
        decoders = self._candidates(request, held, state.table.decoders, fits)
        mean_requests = totals.committed_requests / max(1, totals.decode_replicas)
        return placement.choose_decode(request, decoders, held, mean_requests)

    def _suits(self, request: Request, replica: Replica) -> bool:
        """Return True if a decoder is to find a request's prompt, computed by now or later.

        Half of the requests that a decoder starts at a time may wait for prefill replicas, and only
        where there is room for another one: others are started beside them.
        """
        state = self._state
        if not state.fleet.may_take(request, replica, state.now):
            return False
        return not request.is_computing or (
            replica.sample.notices is not None
            and replica.work.num_awaiting < state.settings.max_pending_handoffs // 2
            and 2 * request.tokens <= placement.room_of(replica, state.settings)
        )

    def _decode(self, request: Request, replica: Replica) -> None:
        state, ask = self._state, request.ask
        request_id = ask.request_id
        state.enter(request, Phase.DECODING, replica)
        source, is_found = request.source, self._suits(request, replica)
        awaits = is_found and request.is_computing
        expected = EVERYTHING if awaits else request.saved_tokens
        if not (state.pool.is_up and is_found):
            awaits, expected = False, 0
        request.uncached = min(state.pool.unknown_tokens(ask), max(0, ask.prompt_tokens - expected))
        is_handed = source is not None and is_found
        notices: tuple[str, ...] | None = None if replica.sample.notices is None else ()
        if source is not None and is_found:
            state.fleet.handovers.hand_over(source, replica.replica_id, state.now)
            if awaits:
                notices = state.fleet[source].sample.notices
        elif source is not None and not state.fleet.may_take(request, replica, state.now):
            request.path = PromptPath.NO_SHARED_STORE
        counts_sources = replica.sample.expected is not None and source != replica.replica_id
        blocks = placement.blocks_for(request.tokens, replica)
        active = ActiveRequest(
            blocks,
            is_handed,
            num_sequences=ask.num_sequences,
            awaits_prompt=awaits,
        )
        replica.work.begin_decode(request_id, active, state.now)
        if request.attempts == 0 and request.first_token is None:
            state.counts.prompts[request.path] += 1
        self._emit(
            Decode(
                request_id,
                replica.replica_id,
                expected,
                waited_s=request.waited_s,
                source=source if counts_sources else None,
                notices=notices,
            )
        )
