"""The router's decisions: `step(event, now) -> actions` (pure).

Owns every replica, request, queue and lock. It has no clock, socket or task, so whole days are
simulated in seconds; the loop in `run.py` performs its actions and tells it what comes of them.
"""

from typing import TYPE_CHECKING

from vllm_kvpool.router.control.admission import Admission
from vllm_kvpool.router.control.autoscaler import Autoscaler
from vllm_kvpool.router.control.controller_state import ControllerState
from vllm_kvpool.router.control.events import (
    ASKED_BY_ADMIN,
    Action,
    Added,
    Arrived,
    Cancelled,
    DecodeBegan,
    DecodeEnded,
    Drain,
    Event,
    Failed,
    Measured,
    ModelsListed,
    PrefillEnded,
    Remove,
    ReplicaEvent,
    ReplicaLoaded,
    SetMode,
    SetRole,
    SleepFailed,
    Tick,
    Warmed,
)
from vllm_kvpool.router.control.fleet import Fleet
from vllm_kvpool.router.control.lifecycle import Lifecycle
from vllm_kvpool.router.control.rates import RateEstimator, Rates
from vllm_kvpool.router.control.request_flow import Dispatcher, RequestFlow
from vllm_kvpool.router.control.settings import (
    HealthConfig,
    OverloadConfig,
    PlannerConfig,
    Settings,
)
from vllm_kvpool.router.control.states import Goal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_kvpool.router.control.fleet import Replica

LOCK_EVERY_S = 0.1


class Controller:
    """Owned by one thread."""

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        planner: PlannerConfig | None = None,
        overload: OverloadConfig | None = None,
        health: HealthConfig | None = None,
        rates: Rates | None = None,
    ) -> None:
        planner = planner or PlannerConfig()
        self.state = ControllerState(
            settings or Settings(),
            rates=RateEstimator(rates or Rates()),
            fleet=Fleet(health),
        )
        self.admission = Admission(self.state, overload or OverloadConfig())
        self.actions: list[Action] = []
        """Actions of the present or last step. They count also if the step has raised."""
        self.flow = RequestFlow(self.state, self.admission, self._emit)
        self.dispatch = Dispatcher(self.state, self.flow, self._emit)
        self.lifecycle = Lifecycle(
            self.state,
            self.flow,
            self.dispatch,
            self._emit,
            takes_over=planner.live_takeover,
        )
        self.scaling = Autoscaler(self.state, self.lifecycle, planner)
        self._lock_due = 0.0
        self._decoders: Sequence[Replica] = ()
        """The decoders among which locks were last set."""

    def step(self, event: Event, now: float) -> list[Action]:
        """Apply one event and return the actions to perform, in order. `now` never goes back.

        What is due by time alone is done at the next event: a `Tick`, if nothing else comes.
        ConfigError where people ask for what cannot be; then nothing has changed.
        """
        state = self.state
        assert now >= state.now
        state.now, self.actions = now, []
        self._apply(event)
        self.scaling.tick()
        self.lifecycle.settle()
        self._lock()
        self.dispatch.dispatch()
        # Giving out work may have ended what a replica waited for.
        version = state.fleet.version
        self.lifecycle.settle()
        if state.fleet.version != version:
            self._lock()
            self.dispatch.dispatch()
        self.admission.watch_starts()
        return self.actions

    def _emit(self, action: Action) -> None:
        self.actions.append(action)

    def _apply(self, event: Event) -> None:
        match event:
            case Arrived(ask):
                self.flow.arrived(ask)
            case Cancelled(request_id):
                self.flow.cancelled(request_id)
            case PrefillEnded():
                self.flow.prefill_ended(event)
            case DecodeBegan(request_id, is_seen):
                self.flow.decode_began(request_id, is_seen=is_seen)
            case DecodeEnded():
                self.flow.decode_ended(event)
            case Added():
                self.lifecycle.added(event)
            case SetMode(mode):
                self.scaling.mode = mode
            case Tick():
                self.state.watch_pool()
            case ReplicaEvent():
                self._of_replica(event)

    def _of_replica(self, event: ReplicaEvent) -> None:
        replica = self.state.fleet.get(event.replica)
        if replica is None:
            return  # it has been removed meanwhile
        match event:
            case ReplicaLoaded():
                self.lifecycle.loaded(replica)
            case Failed(why=why):
                self.lifecycle.failed(replica, why)
            case Measured(sample=sample):
                self.lifecycle.measured(replica, sample)
                self.state.watch_pool()
            case ModelsListed(models=models):
                self.state.fleet.list_models(replica, models)
            case SleepFailed(why=why):
                self.lifecycle.sleep_failed(replica, why)
            case Warmed():
                self.lifecycle.warmed(replica)
            case Drain():
                self.lifecycle.drain(replica, ASKED_BY_ADMIN, Goal.HOLD)
            case Remove():
                self.lifecycle.drain(replica, ASKED_BY_ADMIN, Goal.REMOVE)
            case SetRole(role=role):
                self.lifecycle.give(replica, role, ASKED_BY_ADMIN)

    def _lock(self) -> None:
        """Update the locks: every LOCK_EVERY_S, and at once when a decoder has come or gone."""
        state, decoders = self.state, self.state.fleet.decoders()
        if decoders == self._decoders and state.now < self._lock_due:
            return
        self._decoders, self._lock_due = decoders, state.now + LOCK_EVERY_S
        changed = state.overload.step(state.now, *state.loads())
        if changed:
            state.fleet.changed.update(state.fleet[each] for each in changed if each in state.fleet)
            state.counts.events["locks"] += len(changed & state.overload.locked)
            state.counts.events["releases"] += len(changed - state.overload.locked)
