"""A cluster in virtual time around a router's controller: engines, clients, a driver, faults.

`World` performs the controller's actions like the router's loop, and posts the resulting events.
`Calls` holds the clients' requests and the engine calls for them. `Watch` holds the engines and
their health checks and metrics. Every call ends with exactly one event, even if it was aborted.
Assertions fail if a request has two calls of a kind at a time, ends twice, or begins again after
its end. Idle hours cost next to nothing: metrics are then scraped rarely.
"""

import heapq
import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from tests.support.router_engines import Call, Engine, engine_spec
from tests.support.router_invariants import check_controller
from tests.support.scripted_batch import ScriptedPool
from tests.support.scripted_spec import ScriptedSpec
from vllm_kvpool.errors import ConfigError
from vllm_kvpool.router.control.controller import Controller
from vllm_kvpool.router.control.events import (
    EVERYTHING,
    Abort,
    Action,
    Added,
    Arrived,
    Cancelled,
    Decode,
    DecodeBegan,
    DecodeEnded,
    Event,
    Failed,
    Load,
    Measured,
    Outcome,
    Prefill,
    PrefillEnded,
    Probe,
    Refuse,
    ReplicaLoaded,
    ReplicaSpec,
    Retire,
    Tick,
    Warm,
    Warmed,
)
from vllm_kvpool.router.control.requests import RequestId, RequestSpec
from vllm_kvpool.router.control.states import LOADING, ReplicaId, Role

EXPECT_MS, LONG_MS = 10_000, 600_000
"""Time that a decoder waits for chunks: of a finished prefill, and of a prefill in progress."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """Delays, timeouts and failure rates of the network, the clients and the health checks."""

    tick_s: float = 0.25
    """Interval between ticks while the cluster is not idle."""
    scrape_s: float = 1.0
    quiet_scrape_s: float = 60.0
    """Interval between scrapes after the cluster was idle for `quiet_after_s`."""
    quiet_after_s: float = 20.0
    lag_s: float = 0.3
    """Maximum age of metrics when they arrive."""
    lost_share: float = 0.02
    """Share of scrapes that are lost."""
    load_timeout_s: float = 120.0
    load_fails_share: float = 0.0
    """Share of loads that fail although the engine is healthy."""
    warm_timeout_s: float = 60.0
    silence_s: float = 60.0
    """Time after which a call to a hung engine fails."""
    failed_share: float = 0.0
    """Share of calls that fail although the engine is alive."""
    rejected_share: float = 0.0
    hopeless_share: float = 0.0
    late_answer_share: float = 0.3
    """Share of abandoned loads whose result still arrives."""
    wake_s: float = 2.0
    """Time from a load until a sleeping engine answers."""
    holds_for_new: bool = False
    """Model an autoscaler without live takeover.

    Each loading prefill replica gets its share of new requests, which wait until it is loaded.
    """


class Timeline:
    """The agenda of future events, and the random generator. All parts of a world share one."""

    def __init__(self, seed: int) -> None:
        self.now = 0.0
        self.chance = random.Random(seed)
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._entries = 0

    def at(self, when: float, what: Callable[[], None]) -> None:
        """Schedule a function at a time."""
        self._entries += 1
        heapq.heappush(self._agenda, (max(when, self.now), self._entries, what))

    def after(self, seconds: float, what: Callable[[], None]) -> None:
        self.at(self.now + seconds, what)

    def due(self) -> float:
        """Return the time of the next event."""
        return self._agenda[0][0] if self._agenda else float("inf")

    def pop(self) -> Callable[[], None]:
        return heapq.heappop(self._agenda)[2]

    def moment(self) -> float:
        """Return a random network delay in seconds."""
        return 0.0005 + self.chance.random() * 0.01


@dataclass(slots=True, eq=False)
class Client:
    """A request as its client sees it."""

    ask: RequestSpec
    arrived: float
    output_tokens: int
    received: int = 0
    first_token: float | None = None
    fate: str = ""
    """Outcome of the request; empty until its end."""


class Calls:
    """The clients' requests, and the calls to engines for them. Owned by a world."""

    def __init__(
        self,
        timeline: Timeline,
        habits: Habits,
        engines: Mapping[ReplicaId, Engine],
        post: Callable[[Event], None],
    ) -> None:
        self._timeline = timeline
        self._habits = habits
        self._engines = engines
        self._post = post
        self.clients: dict[RequestId, Client] = {}
        """Clients whose requests have not ended."""
        self.live: dict[tuple[RequestId, bool], Call] = {}
        """Calls in progress, by request and `is_prefill`."""
        self.fates: Counter[str] = Counter()
        self.num_early = 0
        """Number of decodes sent while the prompt was being computed."""
        self.waits: list[tuple[float, float]] = []
        """Arrival time of each request, and the delay of its first token."""
        self.pool = ScriptedPool()

    # Requests

    def arrive(self, ask: RequestSpec, output_tokens: int) -> Client:
        client = Client(ask, self._timeline.now, output_tokens)
        assert ask.request_id not in self.clients
        self.clients[ask.request_id] = client
        self.fates["arrived"] += 1
        return client

    def finish(self, client: Client, fate: str) -> None:
        """End a request. A request ends only once."""
        assert client.fate == "", f"{client.ask.request_id} was {client.fate}, is {fate}"
        client.fate = fate
        self.fates[fate] += 1
        if client.first_token is not None:
            self.waits.append((client.arrived, client.first_token - client.arrived))
        request_id = client.ask.request_id
        del self.clients[request_id]
        prompt = self.of(request_id, is_prefill=True)
        if prompt is not None:  # the request has ended without it
            self._timeline.after(0.0, lambda: self.drop(prompt, Outcome.CANCELLED))

    def lose_pool(self) -> None:
        """Take the pool down and empty it."""
        self.pool.up = False
        self.pool.clear()

    # The controller's actions

    def prefill(self, request_id: RequestId, replica: ReplicaId) -> None:
        client = self.clients[request_id]
        assert client.first_token is None, "computed again what is being answered"
        self._begin(
            Call(
                ask=client.ask,
                spec=self._engines[replica].spec,
                is_prefill=True,
                prompt_tokens=client.ask.prompt_tokens,
            )
        )

    def decode(self, action: Decode) -> None:
        request_id, expect_tokens = action.request_id, action.expect_tokens
        client, prompt = self.clients[request_id], self.of(request_id, is_prefill=True)
        if expect_tokens == EVERYTHING:
            self.num_early += 1
            assert prompt is not None, "nobody computes what it is to wait for"
            assert action.notices == self._engines[prompt.spec.replica_id].notices
            assert prompt.spec.replica_id != action.replica
        else:
            assert expect_tokens <= client.ask.prompt_tokens
            assert not action.notices
        assert action.notices is None or self._engines[action.replica].has_notices
        self._begin(
            Call(
                ask=client.ask,
                spec=self._engines[action.replica].spec,
                is_prefill=False,
                prompt_tokens=client.ask.prompt_tokens + client.received,
                expect_tokens=expect_tokens,
                expect_timeout_ms=LONG_MS if expect_tokens == EVERYTHING else EXPECT_MS,
                output_tokens=client.output_tokens - client.received,
            )
        )

    def of(self, request_id: RequestId, *, is_prefill: bool) -> Call | None:
        """Return the prefill or decode call of a request, or None."""
        return self.live.get((request_id, is_prefill))

    def abort(self, request_id: RequestId, replica: ReplicaId) -> None:
        for is_prefill in (True, False):
            call = self.of(request_id, is_prefill=is_prefill)
            if call is not None and call.spec.replica_id == replica:
                drop = partial(self.drop, call, Outcome.CANCELLED)
                self._timeline.after(self._timeline.moment(), drop)

    def _begin(self, call: Call) -> None:
        request_id, engine = call.ask.request_id, self._engines[call.spec.replica_id]
        key = request_id, call.is_prefill
        assert key not in self.live, f"{request_id} has two calls of a kind at a time"
        beside = self.of(request_id, is_prefill=not call.is_prefill)
        assert beside is None or beside.spec != call.spec, f"{request_id} waits for itself"
        self.live[key] = call
        self._timeline.after(self._timeline.moment(), lambda: self._send(call, engine))

    def _send(self, call: Call, engine: Engine) -> None:
        """Deliver a call to its engine, or fail it."""
        now, habits, draw = self._timeline.now, self._habits, self._timeline.chance.random()
        if call.outcome is not None:
            return
        if not engine.is_up or engine.is_asleep:
            self._refuse(call, Outcome.FAILED)
        elif engine.refuses_until > now:
            self._refuse(call, Outcome.BUSY)
        elif draw < habits.failed_share:
            self._refuse(call, Outcome.FAILED)
        elif draw < habits.failed_share + habits.rejected_share:
            self._refuse(call, Outcome.REJECTED)
        elif draw < habits.failed_share + habits.rejected_share + habits.hopeless_share:
            self._refuse(call, Outcome.FAILED if call.is_prefill else Outcome.HOPELESS)
        else:
            engine.take(call, now)
            self.wake(engine)
            if engine.is_hung:
                self.watch_silence(call, engine)

    def _refuse(self, call: Call, outcome: Outcome) -> None:
        call.outcome = outcome
        self.ended(call)

    def watch_silence(self, call: Call, engine: Engine) -> None:
        """Fail a call if its engine still hangs after `silence_s`."""

        def give_up() -> None:
            if engine.is_hung:
                self.drop(call, Outcome.FAILED)

        self._timeline.after(self._habits.silence_s, give_up)

    def drop(self, call: Call, outcome: Outcome) -> None:
        """End a call before it is complete, unless it has just ended."""
        if call.outcome is not None:
            return
        engine = self._engines[call.spec.replica_id]
        if call in engine.calls:
            engine.drop(call, outcome, self._timeline.now)
            self.wake(engine)
        else:  # the engine does not have the call yet
            self._refuse(call, outcome)

    # Results of calls

    def wake(self, engine: Engine) -> None:
        """Schedule the engine's next `tell`."""
        due = engine.due()

        def tell() -> None:
            if engine.due() <= due:  # otherwise a later entry is scheduled
                engine.tell(self._timeline.now)
                self.wake(engine)

        if due < float("inf"):
            self._timeline.at(due, tell)

    def began(self, call: Call) -> None:
        """Report the first token of a call."""

        def post() -> None:
            client = self.clients.get(call.ask.request_id)
            if client is not None and client.first_token is None:
                client.first_token = self._timeline.now
            if self.live.get((call.ask.request_id, False)) is call:
                self._post(DecodeBegan(call.ask.request_id))

        self._timeline.after(0.0, post)

    def ended(self, call: Call) -> None:
        """Report the end of a call."""
        is_ok = call.outcome is Outcome.OK
        delay_s = 0.0 if is_ok else self._timeline.moment()
        self._timeline.after(delay_s, lambda: self._answer(call))

    def _answer(self, call: Call) -> None:
        request_id, outcome = call.ask.request_id, call.outcome
        assert outcome is not None
        assert self.live.pop((request_id, call.is_prefill)) is call
        if call.is_prefill:
            self._answer_prefill(call, outcome)
            return
        client = self.clients.get(request_id)
        if client is not None:
            client.received += call.generated
            assert client.received <= client.output_tokens
            if outcome is Outcome.OK:
                assert client.received == client.output_tokens
                self.finish(client, "served")
            elif outcome in (Outcome.REJECTED, Outcome.HOPELESS):
                self.finish(client, outcome.value)
        self._post(
            DecodeEnded(
                request_id=request_id,
                replica=call.spec.replica_id,
                outcome=outcome,
                prompt_tokens=call.prompt_tokens,
                output_tokens=call.generated,
            )
        )

    def _answer_prefill(self, call: Call, outcome: Outcome) -> None:
        is_saved = outcome is Outcome.OK and self.pool.is_up()
        waiting = self.of(call.ask.request_id, is_prefill=False)
        if waiting is not None and waiting.expect_tokens == EVERYTHING:
            # The decoder learns of the end, too: either its chunks will come, or its wait is over.
            engine = self._engines[waiting.spec.replica_id]
            engine.hears(waiting, self._timeline.now, EXPECT_MS if is_saved else 0)
            self.wake(engine)
        self._post(
            PrefillEnded(
                request_id=call.ask.request_id,
                replica=call.spec.replica_id,
                outcome=outcome,
                prompt_tokens=call.prompt_tokens,
                saved_tokens=call.saved_tokens if is_saved else 0,
            )
        )


MISSED_UNTIL_FAILED = 3
ASK_AGAIN_S = 1.0
NEVER = float("inf")


@dataclass(slots=True, eq=False)
class _Loading:
    until: float
    is_over: bool = False


class Watch:
    """The health checks and metrics of engines, and the engines themselves. Owned by a world."""

    def __init__(
        self, timeline: Timeline, habits: Habits, kind: ScriptedSpec, post: Callable[[Event], None]
    ) -> None:
        self._timeline = timeline
        self._habits = habits
        self._kind = kind
        self._post = post
        self.engines: dict[ReplicaId, Engine] = {}
        self.calls = Calls(timeline, habits, self.engines, post)
        self._up_at: dict[ReplicaId, float] = {}
        """Time at which each stopped or sleeping engine answers again."""
        self._loads: dict[ReplicaId, _Loading] = {}
        self._missed: Counter[ReplicaId] = Counter()

    def add(
        self, spec: ReplicaSpec, *, is_up: bool = True, kind: ScriptedSpec | None = None
    ) -> Engine:
        """Make an engine, without telling the controller."""
        calls = self.calls
        engine = Engine(spec, kind or self._kind, calls.pool, calls.began, calls.ended, is_up=is_up)
        self.engines[spec.replica_id] = engine
        return engine

    # The controller's actions

    def load(self, spec: ReplicaSpec) -> None:
        self._supersede(spec.replica_id)
        loading = _Loading(self._timeline.now + self._habits.load_timeout_s)
        self._loads[spec.replica_id] = loading
        engine = self.engines.get(spec.replica_id) or self.add(spec, is_up=False)
        if spec.start and not engine.is_up and self._up_at.get(spec.replica_id, NEVER) == NEVER:
            self.start_after(engine, engine.kind.load_s * self._timeline.chance.uniform(0.8, 1.5))
        elif engine.is_up and engine.is_asleep:
            self.start_after(engine, self._habits.wake_s)
        self._timeline.after(self._timeline.moment(), lambda: self._ask(engine, loading))

    def start_after(self, engine: Engine, seconds: float) -> None:
        """Start or wake the engine after this many seconds."""
        replica, at = engine.spec.replica_id, self._timeline.now + seconds
        self._up_at[replica] = at

        def start() -> None:
            if self._up_at.get(replica) == at and self.engines.get(replica) is engine:
                del self._up_at[replica]
                engine.start(self._timeline.now)

        if at < NEVER:
            self._timeline.at(at, start)

    def _ask(self, engine: Engine, loading: _Loading) -> None:
        replica, now = engine.spec.replica_id, self._timeline.now
        if loading.is_over:
            return
        if engine.answers and not engine.is_asleep:
            loading.is_over = True
            if self._timeline.chance.random() < self._habits.load_fails_share:
                self._post(Failed(replica, "healthy, but does not answer"))
            else:
                self._post(ReplicaLoaded(replica))
        elif now >= loading.until:
            loading.is_over = True
            self._post(Failed(replica, "not loaded in time"))
        else:
            again = max(now + ASK_AGAIN_S, min(self._up_at.get(replica, now), loading.until))
            self._timeline.at(again, lambda: self._ask(engine, loading))

    def _supersede(self, replica: ReplicaId) -> None:
        loading = self._loads.pop(replica, None)
        if loading is None or loading.is_over:
            return
        loading.is_over = True
        if self._timeline.chance.random() < self._habits.late_answer_share:
            is_loaded = self._timeline.chance.random() < 0.5
            late = ReplicaLoaded(replica) if is_loaded else Failed(replica, "not loaded")
            self._timeline.after(self._timeline.moment(), lambda: self._post(late))

    def warm(self, replica: ReplicaId) -> None:
        def end() -> None:
            engine = self.engines.get(replica)
            if engine is not None and engine.answers:
                self._post(Warmed(replica))
            else:
                self._post(Failed(replica, "does not answer"))

        engine = self.engines[replica]
        self._timeline.after(0.1 if engine.answers else self._habits.warm_timeout_s, end)

    def rest(self, replica: ReplicaId, *, forget: bool) -> None:
        self._supersede(replica)
        engine = self.engines.get(replica)
        if engine is None:
            return
        assert not engine.calls, f"{replica} is put to rest with {len(engine.calls)} calls"
        if forget:
            self._up_at.pop(replica, None)
            self._loads.pop(replica, None)
            self._missed.pop(replica, None)
            del self.engines[replica]
        else:
            engine.is_asleep = True

    # Metrics and health checks

    def look(self, replica: ReplicaId) -> None:
        """Scrape the metrics of a replica; report it as failed after too many misses."""
        engine = self.engines.get(replica)
        if engine is None:
            return
        if engine.answers:
            self._missed[replica] = 0
            seen = Measured(replica, engine.sample(self._timeline.now))
            self.calls.wake(engine)
            lag_s = self._habits.lag_s * self._timeline.chance.random() if engine.calls else 0.0
            self._timeline.after(lag_s, lambda: self._post(seen))
            return
        self._missed[replica] += 1
        loading = self._loads.get(replica)
        is_refused = not engine.is_up
        if loading is not None and not loading.is_over:
            return
        if is_refused or self._missed[replica] >= MISSED_UNTIL_FAILED:
            self._post(Failed(replica, "refuses" if is_refused else "does not answer"))

    def look_at_all(self) -> None:
        for replica in list(self.engines):
            if self._timeline.chance.random() >= self._habits.lost_share:
                self.look(replica)

    # Faults

    def crash(self, engine: Engine, restart_s: float) -> None:
        """End an engine's process. It restarts after `restart_s`, unless the router starts it."""
        engine.crash(self._timeline.now)
        self.start_after(engine, NEVER if engine.spec.start else restart_s)

    def hang(self, engine: Engine, seconds: float) -> None:
        self._change_for(engine, seconds, is_hung=True)
        for call in engine.calls:
            self.calls.watch_silence(call, engine)

    def slow(self, engine: Engine, seconds: float, slowness: float) -> None:
        self._change_for(engine, seconds, slowness=slowness)

    def refuse(self, engine: Engine, seconds: float) -> None:
        """Let the engine refuse new work for this many seconds."""
        engine.refuses_until = self._timeline.now + seconds

    def _change_for(
        self, engine: Engine, seconds: float, *, is_hung: bool = False, slowness: float = 1.0
    ) -> None:
        def heal() -> None:
            engine.change(self._timeline.now)
            self.calls.wake(engine)

        engine.change(self._timeline.now, is_hung=is_hung, slowness=slowness)
        self.calls.wake(engine)
        self._timeline.after(seconds, heal)


class World:
    """A simulated cluster. Its arguments determine all events. Owned by a test or a benchmark."""

    def __init__(
        self,
        controller: Controller,
        *,
        seed: int = 0,
        kind: ScriptedSpec | None = None,
        habits: Habits | None = None,
        check_every: int = 1,
    ) -> None:
        """`check_every`: number of steps between two checks of the controller; 0: no checks."""
        self.controller = controller
        self.habits = habits or Habits()
        self.timeline = Timeline(seed)
        self.watch = Watch(self.timeline, self.habits, kind or engine_spec(), self.post)
        self.calls = self.watch.calls
        self.num_steps = 0
        self.after_steps: list[Callable[[], None]] = []
        """Functions called after each step."""
        self._check_every = check_every
        self._held: dict[ReplicaId, list[Client]] = {}
        self._stirred_at = self._scraped_at = self._ticked_at = 0.0

    @property
    def now(self) -> float:
        return self.timeline.now

    # Time

    def run(self, seconds: float) -> None:
        """Let this many seconds of virtual time pass."""
        timeline, end = self.timeline, self.now + seconds
        while True:
            habits, is_quiet = self.habits, self.is_quiet()
            scrape = self._scraped_at + (habits.quiet_scrape_s if is_quiet else habits.scrape_s)
            tick = scrape if is_quiet else self._ticked_at + habits.tick_s
            due = max(self.now, min(timeline.due(), scrape, tick))
            if due > end:
                timeline.now = end
                return
            timeline.now = due
            if timeline.due() <= due:
                timeline.pop()()
                continue
            if scrape <= due:
                self._scraped_at = due
                self.watch.look_at_all()
            self._ticked_at = due
            self.post(Tick())

    def is_quiet(self) -> bool:
        """Return True if the cluster has been idle for `quiet_after_s`."""
        return self.now - self._stirred_at > self.habits.quiet_after_s

    def stir(self) -> None:
        """Mark the cluster as busy."""
        self._stirred_at = self.now

    # The loop of the router

    def post(self, event: Event) -> None:
        """Post an event to the controller and perform its actions."""
        fleet = self.controller.state.fleet
        moves = fleet.counts.total()
        actions = self.controller.step(event, self.now)
        self.num_steps += 1
        if actions or self.calls.clients or moves != fleet.counts.total():
            self.stir()
        is_checked = self._check_every and self.num_steps % self._check_every == 0
        if is_checked:
            check_controller(self.controller)
        for action in actions:
            self._perform(action)
        if is_checked:
            assert len(self.calls.live) == sum(
                len(r.work.prefills) + len(r.work.active) for r in fleet
            )
        if moves != fleet.counts.total() and self._held:
            self._let_go()
        for each in self.after_steps:
            each()

    def ask_admin(self, event: Event) -> bool:
        """Post an operator's command. Return False if the controller rejects it."""
        before = self._what_holds()
        try:
            self.post(event)
        except ConfigError:
            assert self._what_holds() == before
            check_controller(self.controller)
            return False
        return True

    def _what_holds(self) -> object:
        state = self.controller.state
        replicas = [(each.replica_id, each.state, each.role) for each in state.fleet]
        return (
            replicas,
            sorted(state.requests),
            state.counts.events.copy(),
            state.fleet.counts.copy(),
        )

    def _perform(self, action: Action) -> None:
        match action:
            case Prefill(request_id, replica):
                self.calls.prefill(request_id, replica)
            case Decode():
                self.calls.decode(action)
            case Refuse(request_id):
                self.calls.finish(self.calls.clients[request_id], "refused")
            case Abort(request_id, replica):
                self.calls.abort(request_id, replica)
            case Load(replica):
                self.watch.load(self.controller.state.fleet[replica].spec)
            case Warm(replica):
                self.watch.warm(replica)
            case Probe(replica):
                self.timeline.after(self.timeline.moment(), lambda: self.watch.look(replica))
            case Retire(replica, forget):
                self.watch.rest(replica, forget=forget)

    # Engines and clients

    def add(
        self,
        replica_id: str,
        role: Role | None,
        *,
        is_up: bool = True,
        is_started: bool = False,
        kind: ScriptedSpec | None = None,
    ) -> Engine:
        """Add an engine to the router. `is_started`: the router starts and stops the engine."""
        commands = {"start": ("start",), "stop": ("stop",)} if is_started else {}
        spec = ReplicaSpec(replica_id=ReplicaId(replica_id), url=f"http://{replica_id}", **commands)
        engine = self.watch.add(spec, is_up=is_up)
        self.post(Added(spec=spec, role=role))
        return engine

    def arrive(self, ask: RequestSpec, output_tokens: int) -> Client:
        """Let a client send a request now."""
        client = self.calls.arrive(ask, output_tokens)
        loading = self._share_of_new() if self.habits.holds_for_new else None
        if loading is not None:
            self._held.setdefault(loading, []).append(client)
            self.stir()
        else:
            self.post(Arrived(ask))
        return client

    def cancel(self, request_id: RequestId) -> None:
        """Cancel a request if it has not ended."""
        client = self.calls.clients.get(request_id)
        if client is not None:
            self.calls.finish(client, "cancelled")
            self.post(Cancelled(request_id))
            answering = self.calls.of(request_id, is_prefill=False)
            if answering is not None:
                self.calls.abort(request_id, answering.spec.replica_id)

    def _share_of_new(self) -> ReplicaId | None:
        """Return the loading prefill replica whose turn the next request is, or None."""
        fleet = self.controller.state.fleet
        loading = [r.replica_id for r in fleet.in_states(LOADING) if r.role is Role.PREFILL]
        places = [*loading, *(each.replica_id for each in fleet.prefillers())]
        place = places[self.calls.fates["arrived"] % len(places)] if places else None
        return place if place in loading else None

    def _let_go(self) -> None:
        """Send the requests that were held for replicas that no longer load."""
        fleet = self.controller.state.fleet
        for replica_id in list(self._held):
            replica = fleet.get(replica_id)
            if replica is None or replica.state not in LOADING:
                for client in self._held.pop(replica_id):
                    if not client.fate:
                        self.post(Arrived(client.ask))
