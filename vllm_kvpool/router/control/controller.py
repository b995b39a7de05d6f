"""The router's decisions: `step(event, now) -> actions` (pure).

Owns every replica, request, queue and lock. It has no clock, socket or task, so whole days are
simulated in seconds; the loop in `run.py` performs its actions and tells it what comes of them.
"""

from collections import Counter

from vllm_kvpool.router.control.breaker import BreakerLimits
from vllm_kvpool.router.control.desk import Desk, Settings
from vllm_kvpool.router.control.dispatch import Dispatch
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
    Loaded,
    Measured,
    ModelsListed,
    PrefillEnded,
    Remove,
    SetMode,
    SetRole,
    Spawn,
    Tick,
    Warmed,
)
from vllm_kvpool.router.control.flow import Flow
from vllm_kvpool.router.control.lifecycle import Lifecycle
from vllm_kvpool.router.control.overload import Overload, OverloadLimits
from vllm_kvpool.router.control.rates import Measured as MeasuredRates
from vllm_kvpool.router.control.rates import Rates
from vllm_kvpool.router.control.requests import ENDS, Phase, Request
from vllm_kvpool.router.control.scaling import Scaling, ScalingSettings
from vllm_kvpool.router.control.shedding import Shedder, ShedLimits

MAX_SLEEP_S = 1.0
"""Locks are looked at, and old measurements noticed, at least so often."""
LOCK_EVERY_S = 0.1


class Controller:
    """Owned by one thread."""

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        scaling: ScalingSettings | None = None,
        rates: Rates | None = None,
        overload: OverloadLimits | None = None,
        shed: ShedLimits | None = None,
        breaker: BreakerLimits | None = None,
    ) -> None:
        self.desk = Desk(
            settings or Settings(),
            rates=MeasuredRates(rates or Rates()),
            overload=Overload(overload),
            shedder=Shedder(shed),
        )
        self.flow = Flow(self.desk)
        self.dispatch = Dispatch(self.desk, self.flow)
        self.lifecycle = Lifecycle(self.desk, self.flow, self.dispatch, breaker or BreakerLimits())
        self.scaling = Scaling(self.desk, self.lifecycle, scaling or ScalingSettings())
        self._lock_due = 0.0
        self._locked_moves = 0

    def step(self, event: Event, now: float) -> list[Action]:
        """One event; what is to be done then, in this order. `now` never goes back.

        ConfigError where people ask for what cannot be; then nothing has changed.
        """
        desk = self.desk
        assert now >= desk.now
        desk.begin(now)
        self._apply(event)
        if isinstance(event, PrefillEnded | DecodeBegan | DecodeEnded | Tick):
            desk.learned()
        if isinstance(event, Measured | Tick):
            desk.watch_pool()
        self.scaling.tick()
        self.lifecycle.settle()
        self._lock()
        self.dispatch.dispatch()
        # What was given out may have been the last thing that somebody waited for.
        num_moves = desk.fleet.num_moves
        self.lifecycle.settle()
        if desk.fleet.num_moves != num_moves:
            self._lock()
            self.dispatch.dispatch()
        desk.totals()
        desk.starts.watch(desk.now, is_waiting=len(desk.migration) > 0 and len(desk.servers()) > 0)
        return desk.actions

    def next_due(self) -> float:
        """When something is due by time alone: a `Tick` should come then, if nothing else does."""
        desk = self.desk
        waits = self.desk.deadlines.next(), self.lifecycle.next_due(), self.scaling.next_due()
        held = desk.now + MAX_SLEEP_S
        return max(desk.now, min(held, *waits, desk.table.next_open(desk.now)))

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
            case Spawn(role, host, why):
                self.scaling.spawn(role, host, why)
            case SetMode(mode):
                self.scaling.set_mode(mode)
            case Tick():
                pass
            case _:
                self._of_replica(event)

    def _of_replica(
        self,
        event: Loaded | Failed | Measured | ModelsListed | Warmed | Drain | Remove | SetRole,
    ) -> None:
        replica = self.desk.fleet.get(event.replica)
        if replica is None:
            return  # it has been removed meanwhile
        match event:
            case Loaded():
                self.lifecycle.loaded(replica)
                self.scaling.loaded(replica)
            case Failed():
                self.lifecycle.failed(event)
            case Measured():
                self.lifecycle.measured(event)
            case ModelsListed(models=models):
                self.desk.fleet.list_models(replica, models)
            case Warmed():
                self.lifecycle.warmed(replica)
            case Drain():
                replica.is_held = True
                self.lifecycle.drain(replica, ASKED_BY_ADMIN)
            case Remove():
                self.lifecycle.remove(replica, ASKED_BY_ADMIN)
            case SetRole():
                replica.is_held = False
                self.lifecycle.give(replica, event.role, ASKED_BY_ADMIN)

    def _lock(self) -> None:
        """Not for each of many events at once: locks are for what lasts longer."""
        desk, moves = self.desk, self.desk.fleet.num_moves
        if moves == self._locked_moves and desk.now < self._lock_due:
            return
        self._locked_moves, self._lock_due = moves, desk.now + LOCK_EVERY_S
        for change in desk.overload.step(desk.now, desk.loads()):
            desk.counts["locks" if change.replica in desk.overload.locked else "releases"] += 1
        desk.locked = desk.overload.locked

    def check(self) -> None:
        """What always holds between steps; for tests and simulations."""
        desk = self.desk
        desk.fleet.check()
        desk.queue.check()
        desk.migration.check()
        desk.deadlines.check()
        desk.overload.check()
        desk.table.check()
        assert desk.locked <= {each.replica_id for each in desk.fleet.decoders()}
        phases = Counter(each.phase for each in desk.requests.values())
        num_due = 0
        for request in desk.requests.values():
            self._check_request(request)
            num_due += request.ask.request_id in desk.deadlines
        assert len(desk.queue) == phases[Phase.QUEUED]
        assert sum(len(each.bound) for each in desk.fleet) == phases[Phase.BOUND]
        assert len(desk.migration) == phases[Phase.HANDING]
        assert len(desk.deadlines) == num_due

    def _check_request(self, request: Request) -> None:
        """It is where its phase says, and nowhere else."""
        desk, request_id = self.desk, request.ask.request_id
        phase = request.phase
        replica = desk.fleet.get(request.replica) if request.replica is not None else None
        assert phase not in ENDS
        assert (replica is None) == (phase in (Phase.QUEUED, Phase.HANDING)), request
        assert (request_id in desk.queue) == (phase is Phase.QUEUED), request
        assert (request_id in desk.migration) == (phase is Phase.HANDING), request
        if replica is not None:
            is_here = {
                Phase.BOUND: request in replica.bound,
                Phase.PREFILLING: request_id in replica.prefills,
                Phase.DECODING: request_id in replica.stays,
            }
            assert is_here[phase], request
        if request_id in desk.deadlines:
            assert phase in (Phase.QUEUED, Phase.BOUND, Phase.HANDING), request
