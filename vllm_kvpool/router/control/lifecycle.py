"""The way of a replica: loading, serving, flipping, draining, failing, coming back (pure).

What the engine, a person or the plan wants of a replica becomes a cause here; `Fleet.move` follows
the edge. Draining ends by itself: whenever a replica's last work ends, it takes the next edge. A
replica that keeps failing is left alone by its `ReplicaBreaker`.
"""

import math

from vllm_kvpool.errors import ConfigError
from vllm_kvpool.router.control import placement
from vllm_kvpool.router.control.controller_state import ControllerState
from vllm_kvpool.router.control.events import (
    Abort,
    Added,
    Emit,
    Load,
    Retire,
    Sample,
    Warm,
)
from vllm_kvpool.router.control.fleet import Replica
from vllm_kvpool.router.control.request_flow import Dispatcher, RequestFlow
from vllm_kvpool.router.control.requests import RequestId
from vllm_kvpool.router.control.states import (
    BROKEN,
    DRAINING,
    HAS_BOUND,
    LOADING,
    UP,
    Cause,
    Goal,
    Role,
    State,
)
from vllm_kvpool.router.control.work import ActiveRequest

LOAD_CAUSE = {Role.PREFILL: Cause.LOAD_PREFILL, Role.DECODE: Cause.LOAD_DECODE}
USE_CAUSE = {Role.PREFILL: Cause.USE_PREFILL, Role.DECODE: Cause.USE_DECODE}

_PASSING = DRAINING | BROKEN | {State.REFRACTORY_PREFILL}
"""States that are left without anybody's asking."""
_LEAVING = DRAINING | BROKEN | {State.SHUTTING_NULL, State.INACTIVE}
_UNSETTLED = _PASSING | _LEAVING | HAS_BOUND | {State.OLD_PREFILL}


class Lifecycle:
    """Owned by the controller."""

    def __init__(
        self,
        state: ControllerState,
        flow: RequestFlow,
        dispatch: Dispatcher,
        emit: Emit,
        *,
        takes_over: bool,
    ) -> None:
        self._state = state
        self._flow = flow
        self._dispatch = dispatch
        self._emit = emit
        self._takes_over = takes_over

    # What engines do

    def added(self, event: Added) -> None:
        """Raise ConfigError where there is one of that name or address already."""
        for each in self._state.fleet:
            if event.spec.replica_id == each.replica_id or event.spec.url == each.spec.url:
                leaves = ", and is being removed" if each.goal is Goal.REMOVE else ""
                raise ConfigError(f"{each.replica_id} at {each.spec.url} is there already{leaves}")
        replica = self._state.fleet.add(event.spec, self._state.now)
        if event.role is not None:
            # The first engines are bound to nothing: no replica could steal it.
            is_started = bool(event.spec.start) and bool(self._state.fleet.prefillers())
            self.load(replica, event.role, "added", live=is_started)

    def loaded(self, replica: Replica) -> None:
        """Make a replica serve or stand by, as its engine is healthy and has answered a request."""
        role = replica.goal.role
        if replica.is_retried and role is not None:
            self._move(replica, USE_CAUSE[role], "healthy again")
        elif replica.state in LOADING:
            self._move(replica, Cause.LOADED, "healthy, and has answered a request")
        else:
            return  # it was given up meanwhile
        replica.health.busy_until, replica.health.is_doubted = 0.0, False
        self._ready(replica, "it has answered a request while it was loaded")

    def sleep_failed(self, replica: Replica, why: str) -> None:
        """Note that an engine that is not wanted keeps its memory."""
        if replica.state is State.INACTIVE:
            replica.health.sleep_error = why

    def warmed(self, replica: Replica) -> None:
        """Make a warming replica serve after its first answer; others stay as they are."""
        self._ready(replica, "has answered a request")

    def failed(self, replica: Replica, why: str) -> None:
        """Take a replica out of service whose engine has ended, or does not answer."""
        state = self._state
        is_known = replica.state in BROKEN and not replica.is_retried
        if is_known or replica.state is State.INACTIVE:
            return  # one end of an engine is told by more than one
        self._flow.abandon(replica)
        self._move(replica, Cause.FAIL, why)
        replica.forget_engine()
        state.fleet.handovers.forget(replica.replica_id)
        replica.health.retry_at = state.now + state.settings.retry_pause_s
        breaker = replica.health.breaker
        if breaker.failed(state.now):
            replica.health.retry_at = max(replica.health.retry_at, breaker.until)
            why = f"fails too often; left alone for {breaker.until - state.now:.0f} s"
            self._move(replica, Cause.QUARANTINE, why)

    def measured(self, replica: Replica, sample: Sample) -> None:
        """Take a replica's metrics: its load, its health and the hand-overs that it found."""
        state, fleet, replica_id = self._state, self._state.fleet, replica.replica_id
        replica.measured(sample, state.now)
        if (expected := sample.expected) is not None:
            more = fleet.handovers.measured(
                replica_id, expected, fleet, lambda each: fleet[each].state in UP, state.now
            )
            state.counts.events["handovers_found"] += more.found
            state.counts.events["handovers_missing"] += more.missing
        replica.health.is_doubted = False
        if replica.state in UP:
            replica.health.breaker.succeeded(state.now)

    # What people and plans want

    def load(self, replica: Replica, role: Role, why: str, *, live: bool = False) -> None:
        """Start, wake or await an engine; `live`: give it requests already while it loads."""
        live = live and role is Role.PREFILL and self._takes_over
        replica.goal, replica.health.sleep_error = Goal.serve(role), ""
        self._move(replica, Cause.TAKE_OVER if live else LOAD_CAUSE[role], why)
        self._emit(Load(replica.replica_id, role))

    def give(self, replica: Replica, role: Role, why: str) -> None:
        """See to it that a replica gets a role, whatever it does now; it may be drained first.

        Nothing is done if it is being removed.
        """
        if replica.goal is Goal.REMOVE:
            return
        replica.goal = Goal.serve(role)
        if replica.role is not role:
            self._conclude(replica, why)
        state = replica.state
        if state is State.INACTIVE:
            self.load(replica, role, why, live=bool(self._state.fleet.prefillers()))
        elif state is State.SHUTTING_NULL:
            self._use(replica, role, why)
        elif state in DRAINING:
            self._give_draining(replica, role, why)
        elif state is State.PREFILL and role is Role.DECODE:
            self._move(replica, Cause.MUTATE, why)
        elif state is State.DECODE and role is Role.PREFILL:
            self._move(replica, Cause.DEACTIVATE, why)

    def _conclude(self, replica: Replica, why: str) -> None:
        """Move a replica to the role that it is on the way to, or to nothing.

        A replica that is paired with another one is on the way, too.
        """
        if replica.state in LOADING:
            self._flow.unbind(replica)
            self._move(replica, Cause.GIVE_UP, why)
        elif replica.state is State.REFRACTORY_PREFILL:
            self._flow.unbind(replica)
            self._move(replica, Cause.RELAYED, why)
        elif replica.state is State.OLD_PREFILL:
            self._move(replica, Cause.UNPAIR, why)
        else:
            self._ready(replica, why)

    def _give_draining(self, replica: Replica, role: Role, why: str) -> None:
        if replica.state is State.SHUTTING_PREFILL and role is Role.PREFILL:
            self._move(replica, Cause.REVIVE, why)
        elif replica.state is State.SHUTTING_DECODE and role is Role.DECODE:
            self._move(replica, Cause.REVIVE, why)
            self._ready(replica, "it has never stopped answering")

    def drain(self, replica: Replica, why: str, goal: Goal = Goal.STANDBY) -> None:
        """See to it that a replica ends up without work; requests it has are not lost.

        A replica that is to be removed stays so, whatever the goal.
        """
        if replica.goal is not Goal.REMOVE:
            replica.goal = goal
        is_loading = replica.state in LOADING
        self._conclude(replica, why)
        if replica.state is State.PREFILL or replica.state is State.DECODE:
            self._move(replica, Cause.DEACTIVATE, why)
        elif is_loading:
            self._retire(replica)
        elif replica.is_retried:
            replica.health.retry_at = self._state.now

    def expire(self, replica: Replica, why: str) -> None:
        """Unload an idle standby that is not needed any more."""
        self._move(replica, Cause.EXPIRE, why)
        self._retire(replica)

    def _retire(self, replica: Replica) -> None:
        """Retire an engine that is not needed: it sleeps, or its operator's command ends it."""
        if replica.goal is not Goal.REMOVE:
            self._emit(Retire(replica.replica_id))

    # What follows by itself

    def settle(self) -> None:
        """Take the edges that are due: work has ended, a pause is over, a partner has gone."""
        fleet = self._state.fleet
        if not fleet.in_states(_UNSETTLED):
            return
        for replica in fleet.in_states(_PASSING):
            if replica.state is State.MUTATING_TO_DECODE and not replica.work.prefills:
                self._flushed(replica)
            elif replica.state is State.SHUTTING_PREFILL or replica.state is State.SHUTTING_DECODE:
                self._drain_on(replica)
            elif replica.state is State.REFRACTORY_PREFILL and not replica.work.bound:
                self._move(replica, Cause.RELAYED, "its own queue is empty")
            elif replica.state in BROKEN:
                self._try_again(replica)
        for replica in fleet.in_states(_LEAVING):
            if replica.goal is Goal.REMOVE:
                self._leave(replica)
        placement.pair(fleet, self._state.now)

    def _flushed(self, replica: Replica) -> None:
        self._move(replica, Cause.FLUSHED, "no prompt is left to compute")
        if replica.goal is Goal.DECODE:
            self._dispatch.flush(replica)
        else:
            self._move(replica, Cause.DEACTIVATE, "not wanted as a decoder any more")

    def _drain_on(self, replica: Replica) -> None:
        """Let a replica go once it has no work, and others have what it has computed."""
        state = self._state
        drained_s = state.now - replica.since
        is_late = drained_s >= state.settings.drain_timeout_s
        source = replica.replica_id
        # Other engines stay up and go on with what was forwarded to them.
        is_done = replica.is_idle if replica.goal.is_final else not replica.work
        if is_done and (is_late or all(each.source != source for each in state.migration)):
            self._drained(replica)
        elif is_late and (state.fleet.prefillers() or state.fleet.decoders()):
            # Each goes on elsewhere where it stopped, or ends; so no drain takes for ever.
            ends = drained_s >= state.settings.answer_timeout_s
            for request_id, active in replica.work.active.items():
                if not active.is_sent_away and (ends or self._goes_on(request_id, active)):
                    active.is_sent_away = True
                    self._emit(Abort(request_id, source))

    def _goes_on(self, request_id: RequestId, active: ActiveRequest) -> bool:
        """Return True if another replica can go on with an answer, or nobody needs it any more."""
        if active.goes_on_elsewhere is None:
            request = self._state.requests.get(request_id)
            active.goes_on_elsewhere = request is None or request.ask.goes_on_elsewhere()
        return active.goes_on_elsewhere

    def _drained(self, replica: Replica) -> None:
        self._move(replica, Cause.DRAINED, "without work")
        if (role := replica.goal.role) is not None:
            self._use(replica, role, "drained for it")

    def _try_again(self, replica: Replica) -> None:
        """Ask whether a failed replica is back, or start it again."""
        state = self._state
        if replica.work or replica.goal is Goal.REMOVE or state.now < replica.health.retry_at:
            return
        role = replica.goal.role
        if role is None:
            self._move(replica, Cause.RESET, "its pause is over, and it is not wanted")
            self._retire(replica)
            return
        if replica.state is State.QUARANTINED:
            self._move(replica, Cause.RETRY, "its pause is over")
        replica.health.retry_at = math.inf
        self._emit(Load(replica.replica_id, role))

    def _leave(self, replica: Replica) -> None:
        if replica.state is State.SHUTTING_NULL and replica.is_idle:
            self._move(replica, Cause.EXPIRE, "to be removed")
        if replica.state in (State.INACTIVE, *BROKEN) and not replica.work:
            self._emit(Retire(replica.replica_id, forget=True))
            self._state.fleet.forget(replica.replica_id)

    def _use(self, replica: Replica, role: Role, why: str) -> None:
        self._move(replica, USE_CAUSE[role], why)
        self._emit(Warm(replica.replica_id))

    def _ready(self, replica: Replica, why: str) -> None:
        if replica.state in (State.AUS_PREFILL, State.AUS_DECODE):
            self._move(replica, Cause.READY, why)

    def _move(self, replica: Replica, cause: Cause, why: str) -> None:
        self._state.fleet.move(replica, cause, why, self._state.now)
