"""Gives requests out to replicas, as far as these have room (pure).

First what is bound to loading replicas, as it came first, then the queue, then whatever waits for
a decoder. A request goes to a decoder at once, whole, where that is cheaper or there is no choice:
no prefill replica, no pool, a short prompt, or one that the pool has.
"""

from collections.abc import Callable, Mapping, Sequence

from vllm_kvpool.router.control import placement, takeover
from vllm_kvpool.router.control.desk import Desk
from vllm_kvpool.router.control.events import Decode, Prefill
from vllm_kvpool.router.control.fleet import Replica, Stay
from vllm_kvpool.router.control.flow import Flow
from vllm_kvpool.router.control.load_table import Rankings
from vllm_kvpool.router.control.rates import Stage
from vllm_kvpool.router.control.requests import PromptPath, Request, Turn
from vllm_kvpool.router.control.states import HAS_BOUND, OLD, State

NEAREST = 2
"""Replicas with least to do that are compared for a request, beside MAX_HOLDERS that have most of
its prompt."""
MAX_HOLDERS = 4
MAX_CLEARED_OF = 16
LOOK_AHEAD = 32
"""Requests that may pass some in front of them that fit nowhere."""
MAX_PASSED_S = 2.0
"""Who has waited longer is not passed any more: a decoder is cleared for it."""

_UNPAIRED = frozenset({State.PREFILL})
_REFRACTORY = frozenset({State.REFRACTORY_PREFILL})


class Dispatch:
    """Owned by the controller."""

    def __init__(self, desk: Desk, flow: Flow) -> None:
        self._desk = desk
        self._flow = flow

    def dispatch(self) -> None:
        """Give out what can be given out now."""
        desk = self._desk
        self._flow.refuse_late()
        if desk.fleet.in_states(HAS_BOUND):
            if desk.is_collapsed():
                for replica in desk.fleet.in_states(HAS_BOUND):
                    self._flow.unbind(replica)  # to whoever serves already
            self._work_off_bound()
            self._steal()
        self._give_prompts()
        self._give_handed()

    def flush(self, replica: Replica) -> None:
        """A prefill replica has become a decoder: what it has computed and holds, it decodes."""
        for request in list(self._desk.migration.flush(replica.replica_id)):
            blocks = placement.blocks_for(self._tokens(request), replica)
            if placement.fits(replica, blocks, self._desk.settings.budgets):
                self._decode(request, replica)

    # Prompts

    def _work_off_bound(self) -> None:
        """A replica that was bound to requests is loaded."""
        desk = self._desk
        for replica in desk.fleet.in_states(_REFRACTORY):
            while replica.bound:
                choice = placement.choose_prefill(
                    replica.bound[0],
                    (replica,),
                    desk.settings.budgets,
                    desk.now,
                    desk.fleet.holders(replica.bound[0].ask, MAX_HOLDERS),
                )
                if choice is None:
                    break
                self._prefill(replica.bound.pop(0), choice)

    def _steal(self) -> None:
        """Old replicas take bound requests, those in front of the whole queue."""
        desk = self._desk
        while (found := takeover.next_bound(desk.fleet)) is not None:
            replica, request = found
            head = desk.queue.head()
            if head is not None and head.order < request.order:
                return
            choice = placement.choose_prefill(
                request,
                desk.fleet.in_states(OLD),
                desk.settings.budgets,
                desk.now,
                desk.fleet.holders(request.ask, MAX_HOLDERS),
            )
            if choice is None:
                return
            desk.counts["stolen"] += 1
            replica.bound.remove(request)
            self._prefill(request, choice)

    def _give_prompts(self) -> None:
        desk = self._desk
        blocked: set[str] = set()
        """Models whose next prompt finds no room."""
        while (request := desk.queue.head(blocked)) is not None:
            path = self._flow.path(request)
            if path is not PromptPath.HANDED_OVER:
                if len(desk.migration) >= self._whole_limit():
                    return
                request.path = path
                desk.queue.remove(request.ask.request_id)
                self._flow.hand(request, None)
                continue
            held = desk.fleet.holders(request.ask, MAX_HOLDERS)
            choice = placement.choose_prefill(
                request,
                self._prefillers_for(request, held),
                desk.settings.budgets,
                desk.now,
                held,
            )
            if self._spills(request, choice):
                desk.counts["spilled"] += 1
                request.path = PromptPath.SPILLED
                desk.queue.remove(request.ask.request_id)
                self._flow.hand(request, None)
            elif choice is not None:
                desk.queue.remove(request.ask.request_id)
                self._prefill(request, choice)
            elif not self._bind(request):
                blocked.add(request.ask.model)

    def _spills(self, request: Request, choice: placement.PrefillChoice | None) -> bool:
        """Whether a decoder computes a prompt, as prefill replicas are behind.

        One prompt at a time for each decoder: what it decodes meanwhile becomes slower, but by no
        more than that. Not while any of them has too much to decode.
        """
        desk = self._desk
        if not desk.settings.spills or desk.locked:
            return False
        rates = desk.snapshot()
        ahead = choice.replica.prefill_tokens if choice is not None else float("inf")
        own_s = desk.unknown_tokens(request.ask) * rates.local_prefill_s_per_token
        if ahead / rates.prefill_tokens_per_s <= own_s:
            return False
        computing = desk.totals().computing_requests
        return computing + desk.migration.num_from(None) < len(desk.fleet.decoders())

    def _prefillers_for(self, request: Request, held: Mapping[Replica, int]) -> Sequence[Replica]:
        """Who may compute a prompt of the queue: those that have most of it, or least to do.

        Old replicas only once what was bound has gone: else small prompts would pass a larger one
        that is bound, and waits for room at them.
        """
        desk, fleet = self._desk, self._desk.fleet
        found = takeover.next_bound(fleet)
        if found is not None and found[1].order < request.order:
            return fleet.in_states(_UNPAIRED)
        desk.totals()
        return self._candidates(request, held, desk.table.prefillers, lambda _: True)

    def _candidates(
        self,
        request: Request,
        held: Mapping[Replica, int],
        ranking: Rankings,
        accepts: Callable[[Replica], bool],
    ) -> list[Replica]:
        """Of the ranked replicas that accept: those that have most of the prompt, and the first."""
        now, avoid, model = self._desk.now, request.avoid, request.ask.model

        def is_open(replica: Replica) -> bool:
            return replica.is_open(now) and accepts(replica)

        found = [each for each in held if each in ranking and is_open(each)]
        first = ranking.first(
            NEAREST, lambda each: each.replica_id not in avoid and is_open(each), model
        )
        if not first and not found:
            first = ranking.first(1, is_open, model)
        return [*found, *(each for each in first if each not in found)]

    def _whole_limit(self) -> int:
        """More stay in the queue: prefill replicas that come back may compute them."""
        return LOOK_AHEAD * max(1, len(self._desk.fleet))

    def _bind(self, request: Request) -> bool:
        desk = self._desk
        replica = takeover.choose_new(desk.fleet, desk.now, request.ask.model)
        if replica is None:
            return False
        desk.queue.remove(request.ask.request_id)
        request.turn(Turn.BIND, desk.now)
        request.replica = replica.replica_id
        replica.assign(request)
        return True

    def _prefill(self, request: Request, choice: placement.PrefillChoice) -> None:
        desk, request_id = self._desk, request.ask.request_id
        replica = choice.replica
        desk.deadlines.clear(request_id)
        request.turn(Turn.PREFILL, desk.now)
        request.replica = replica.replica_id
        replica.begin_prefill(request_id, choice.uncached_tokens)
        desk.rates.began(Stage.PREFILL, replica.replica_id, desk.now)
        desk.actions.append(Prefill(request_id, replica.replica_id))

    # What is to be decoded

    def _give_handed(self) -> None:
        desk, budgets = self._desk, self._desk.settings.budgets
        if not len(desk.migration):
            return
        totals, ranking = desk.totals(), desk.table.decoders
        permits = budgets.permits * len(ranking) - totals.starting_requests
        passed, most = 0, max(0, permits) + LOOK_AHEAD
        too_many: dict[str, int] = {}
        cleared: set[Replica] = set()

        def is_open(replica: Replica) -> bool:
            return replica.is_open(desk.now) and replica not in cleared

        for request in desk.migration.ready(most if desk.fleet.is_of_one_model() else None):
            model = request.ask.model
            if passed >= LOOK_AHEAD or not ranking.first(1, is_open, ""):
                return
            if model and not ranking.first(1, is_open, model):
                continue
            tokens = self._tokens(request)
            # What was too large for all a moment ago need not be tried.
            fewest = too_many.get(model, tokens + 1)
            if tokens < fewest and self._decode_somewhere(request, tokens, cleared):
                continue
            passed += 1
            too_many[model] = min(tokens, fewest)
            if desk.now - request.began > MAX_PASSED_S:
                gates = ranking.first(MAX_CLEARED_OF, is_open, model)
                cleared.add(placement.choose_to_clear(tokens, gates, budgets))

    def _decode_somewhere(self, request: Request, tokens: int, cleared: set[Replica]) -> bool:
        """Give a request to a decoder, if one has room; not to those that are being cleared."""
        desk, budgets = self._desk, self._desk.settings.budgets

        def fits(replica: Replica) -> bool:
            blocks = placement.blocks_for(tokens, replica)
            return replica not in cleared and placement.fits(replica, blocks, budgets)

        held = desk.fleet.holders(request.ask, MAX_HOLDERS)
        gates = self._candidates(request, held, desk.table.decoders, fits)
        mean_requests = desk.totals().committed_requests / max(1, len(desk.servers()))
        replica = placement.choose_decode(request, tokens, gates, budgets, held, mean_requests)
        if replica is None:
            return False
        self._decode(request, replica)
        desk.totals()
        return True

    def _decode(self, request: Request, replica: Replica) -> None:
        desk, ask = self._desk, request.ask
        request_id = ask.request_id
        desk.migration.remove(request_id)
        desk.deadlines.clear(request_id)
        request.turn(Turn.DECODE, desk.now)
        request.replica = replica.replica_id
        expected = request.saved_tokens if desk.pool_is_up else 0
        request.uncached = min(desk.unknown_tokens(ask), ask.prompt_tokens - expected)
        is_handed = request.source is not None
        if is_handed:
            desk.rates.began(Stage.TRANSFER, replica.replica_id, desk.now)
        blocks = placement.blocks_for(self._tokens(request), replica)
        replica.begin_stay(request_id, Stay(blocks, is_handed))
        if request.attempts == 0 and request.first_token is None:
            desk.prompts[request.path] += 1
        desk.actions.append(
            Decode(
                request_id,
                replica.replica_id,
                expected,
                cached_tokens=request.cached_tokens,
                waited_s=request.waited_s,
            )
        )

    def _tokens(self, request: Request) -> int:
        """What a request will take at a replica: its prompt, and the answer expected."""
        ask = request.ask
        output = min(ask.max_output_tokens, self._desk.usual_output_tokens())
        return ask.prompt_tokens + ask.num_choices * output
