"""A cluster in virtual time around a router's controller: engines, clients, a driver, faults.

The world performs the controller's actions as the router's loop does, and tells it what comes of
them. Hours without anything to do cost next to nothing: metrics are then asked for rarely.
"""

from typing import TYPE_CHECKING

from tests.support.router_calls import Client
from tests.support.router_engines import Engine, Kind
from tests.support.router_timeline import Habits, Timeline
from tests.support.router_watch import Watch
from vllm_kvpool.errors import ConfigError
from vllm_kvpool.router.controller import Controller
from vllm_kvpool.router.events import (
    Abort,
    Action,
    Added,
    Arrived,
    Cancelled,
    Decode,
    Event,
    Load,
    Prefill,
    Probe,
    Refuse,
    ReplicaSpec,
    Rest,
    Tick,
    Warm,
)
from vllm_kvpool.router.requests import Ask, RequestId
from vllm_kvpool.router.states import LOADING, ReplicaId, Role

if TYPE_CHECKING:
    from collections.abc import Callable


class World:
    """Owned by a test or a benchmark. All in it follows from its arguments."""

    def __init__(
        self,
        controller: Controller,
        *,
        seed: int = 0,
        kind: Kind | None = None,
        habits: Habits | None = None,
        checks: bool = True,
    ) -> None:
        """`checks`: whether the controller is checked after each step."""
        self.controller = controller
        self.habits = habits or Habits()
        self.timeline = Timeline(seed)
        self.watch = Watch(self.timeline, self.habits, kind or Kind(), self.post)
        self.calls = self.watch.calls
        self.num_steps = 0
        self.after_steps: list[Callable[[], None]] = []
        """Called after each step."""
        self._checks = checks
        self._held: dict[ReplicaId, list[Client]] = {}
        self._stirred_at = self._scraped_at = 0.0

    @property
    def now(self) -> float:
        return self.timeline.now

    # Time

    def run(self, seconds: float) -> None:
        """Let so much time pass."""
        timeline, end = self.timeline, self.now + seconds
        while True:
            habits, is_quiet = self.habits, self.is_quiet()
            scrape = self._scraped_at + (habits.quiet_scrape_s if is_quiet else habits.scrape_s)
            due = max(self.now, min(timeline.due(), scrape))
            if due > self.now and not is_quiet:
                due = max(self.now, min(due, self.controller.next_due()))
            if due > end:
                timeline.now = end
                return
            timeline.now = due
            if timeline.due() <= due:
                timeline.pop()()
            elif scrape <= due:
                self._scraped_at = due
                self.watch.look_at_all()
                self.post(Tick())
            else:
                self.post(Tick())

    def is_quiet(self) -> bool:
        """Whether there is nothing to do, nor was there for a while."""
        return self.now - self._stirred_at > self.habits.quiet_after_s

    def stir(self) -> None:
        """Something is about to happen."""
        self._stirred_at = self.now

    # The loop of the router

    def post(self, event: Event) -> None:
        """Tell the controller, and do what it wants done."""
        fleet = self.controller.desk.fleet
        moves = fleet.num_moves
        actions = self.controller.step(event, self.now)
        self.num_steps += 1
        if actions or self.calls.clients or moves != fleet.num_moves:
            self.stir()
        if self._checks:
            self.controller.check()
        for action in actions:
            self._perform(action)
        if self._checks:
            assert len(self.calls.live) == sum(len(r.prefills) + len(r.stays) for r in fleet)
        if moves != fleet.num_moves and self._held:
            self._let_go()
        for each in self.after_steps:
            each()

    def ask_admin(self, event: Event) -> bool:
        """What a person asks for; False if it cannot be."""
        before = self._what_holds()
        try:
            self.post(event)
        except ConfigError:
            assert self._what_holds() == before
            self.controller.check()
            return False
        return True

    def _what_holds(self) -> object:
        desk = self.controller.desk
        replicas = [(each.replica_id, each.state, each.role) for each in desk.fleet]
        return replicas, sorted(desk.requests), desk.counts.copy(), desk.fleet.num_moves

    def _perform(self, action: Action) -> None:
        match action:
            case Prefill(request_id, replica):
                self.calls.prefill(request_id, replica)
            case Decode(request_id, replica, expect_tokens):
                self.calls.decode(request_id, replica, expect_tokens)
            case Refuse(request_id):
                self.calls.finish(self.calls.clients[request_id], "refused")
            case Abort(request_id):
                self.calls.abort(request_id)
            case Load(replica):
                self.watch.load(self.controller.desk.fleet[replica].spec)
            case Warm(replica):
                self.watch.warm(replica)
            case Probe(replica):
                self.timeline.after(self.timeline.moment(), lambda: self.watch.look(replica))
            case Rest(replica, forget):
                self.watch.rest(replica, forget=forget)

    # Engines and clients

    def add(
        self, replica_id: str, role: Role | None, *, is_up: bool = True, kind: Kind | None = None
    ) -> Engine:
        """An engine that others start is added to the router."""
        spec = ReplicaSpec(replica_id=ReplicaId(replica_id), url=f"http://{replica_id}")
        engine = self.watch.add(spec, is_up=is_up, kind=kind)
        self.post(Added(spec=spec, role=role))
        return engine

    def arrive(self, ask: Ask, output_tokens: int) -> Client:
        """A client asks, now."""
        client = self.calls.arrive(ask, output_tokens)
        loading = self._share_of_new() if self.habits.holds_for_new else None
        if loading is not None:
            self._held.setdefault(loading, []).append(client)
            self.stir()
        else:
            self.post(Arrived(ask))
        return client

    def cancel(self, request_id: RequestId) -> None:
        """A client goes, if it is still there."""
        client = self.calls.clients.get(request_id)
        if client is not None:
            self.calls.finish(client, "cancelled")
            self.post(Cancelled(request_id))

    def _share_of_new(self) -> ReplicaId | None:
        """The loading prefill replica that one more request is for, if it is one's turn."""
        fleet = self.controller.desk.fleet
        loading = [r.replica_id for r in fleet.in_states(LOADING) if r.role is Role.PREFILL]
        places = [*loading, *(each.replica_id for each in fleet.prefillers())]
        place = places[self.calls.fates["arrived"] % len(places)] if places else None
        return place if place in loading else None

    def _let_go(self) -> None:
        """What was held for replicas that do not load any more arrives."""
        fleet = self.controller.desk.fleet
        for replica_id in list(self._held):
            replica = fleet.get(replica_id)
            if replica is None or replica.state not in LOADING:
                for client in self._held.pop(replica_id):
                    if not client.fate:
                        self.post(Arrived(client.ask))
