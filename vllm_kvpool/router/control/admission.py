"""Admission of requests, by the requests that wait before them (pure).

`Shedder` has the rules; here is what they are told of the fleet.
"""

from collections.abc import Set

from vllm_kvpool.router.control.controller_state import ControllerState
from vllm_kvpool.router.control.overload import OVERDUE, Pressure, Rejection, Shedder
from vllm_kvpool.router.control.rates import StartRate
from vllm_kvpool.router.control.requests import Request, Waiting
from vllm_kvpool.router.control.settings import OverloadConfig
from vllm_kvpool.router.control.states import HAS_BOUND

MAX_START_RATES = 64
"""Groups of models change with what replicas list."""
NO_GROUPS: Set[frozenset[str]] = frozenset()


class Admission:
    """Owned by the controller."""

    def __init__(self, state: ControllerState, config: OverloadConfig) -> None:
        self._state = state
        self.shedder = Shedder(config)
        self.overdue_s = OVERDUE * config.ttft_target_s
        """Seconds after which an admitted request has waited too long."""
        self._starts: dict[frozenset[str], StartRate] = {}
        """By the group of models (`Fleet.group_of`) whose requests have waited for decoders."""
        self._waited = NO_GROUPS
        """Groups of models whose requests waited for decoders at the end of the last step."""

    def decide(self, request: Request) -> Rejection | None:
        """Return why a new request is refused; None if it is admitted."""
        return self.shedder.decide(self.pressure(request.ask.model), request)

    def watch_starts(self) -> None:
        """Note of which groups of models requests wait for decoders, from now on."""
        state = self._state
        state.refresh()
        waiting = self._waiting_groups()
        if waiting and not state.table.totals().decode_replicas:
            waiting = NO_GROUPS
        if waiting == self._waited:
            return
        self._waited = waiting
        for group in waiting:
            self._starts.setdefault(group, StartRate())
        for group, rate in self._starts.items():
            rate.watch(state.now, is_waiting=group in waiting)
        if len(self._starts) > MAX_START_RATES:
            self._starts = {group: each for group, each in self._starts.items() if group in waiting}

    def _waiting_groups(self) -> Set[frozenset[str]]:
        """Return the groups of models of which requests wait for a decoder, or in one."""
        state = self._state
        behind = state.table.models_behind()
        if not behind and not state.migration:
            return NO_GROUPS
        group_of = state.fleet.group_of
        groups = {group_of(each) for each in behind}
        for model in state.migration.by_model:
            groups.add(group_of((model,)))
        return groups

    def note_first_token(self, model: str) -> None:
        """Note that a request has brought its first token."""
        state = self._state
        if (rate := self._starts.get(state.fleet.group_of((model,)))) is not None:
            rate.started(state.now)

    def waiting(self, model: str) -> Waiting:
        """Sum up the requests that may be served before a new one of a model.

        Requests of another model count by the share of its replicas that serve this model as well.
        """
        state = self._state
        found, bound = Waiting(), state.fleet.in_states(HAS_BOUND)
        if not (state.queue.by_model or state.migration.by_model or bound):
            return found
        share_of = state.fleet.share_of
        for replica in bound:
            for request in replica.work.bound:
                found.add(request, share_of(model, request.ask.model))
        for other, each in state.queue.by_model.items():
            found.add_all(each, share_of(model, other))
        to_compute = found.uncached_tokens
        for other, each in state.migration.by_model.items():
            found.add_all(each, share_of(model, other))
        # Requests that wait for a decoder wait for no prefill replica.
        found.uncached_tokens = to_compute
        return found

    def pressure(self, model: str) -> Pressure:
        """Return the load that a new request meets on the replicas that serve its model."""
        state = self._state
        snapshot = state.rates.current(state.now)
        totals, waiting = state.totals(model), self.waiting(model)
        answer_tokens = snapshot.output_tokens_per_request
        group = state.fleet.group_of((model,))
        starts = self._starts.get(group)
        return Pressure(
            now=state.now,
            model=model,
            queued_requests=waiting.requests,
            queued_tokens=waiting.uncached_tokens + totals.prefill_tokens,
            prefill_replicas=0 if state.collapse() is not None else totals.prefill_replicas,
            decode_replicas=totals.decode_replicas,
            reserved_tokens=waiting.prompt_tokens + waiting.requests * answer_tokens,
            room_tokens=float("inf") if totals.num_unsized else totals.room_tokens,
            committed_tokens=totals.committed_tokens,
            committed_requests=totals.committed_requests,
            is_saturated=self._is_saturated(model),
            rates=snapshot,
            starting_requests=totals.starting_requests,
            starts_per_s=starts.per_second(state.now) if starts is not None else float("inf"),
            is_waiting_for_decoder=group in self._waiting_groups(),
        )

    def _is_saturated(self, model: str) -> bool:
        """Return True if every decoder that serves a model is full."""
        state = self._state
        full = state.overload.full
        if not full:
            return False
        decoders = (each for each in state.fleet.decoders() if each.serves(model))
        return all(each.replica_id in full for each in decoders)
