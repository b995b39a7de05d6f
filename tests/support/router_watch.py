"""Who watches the engines of a simulated cluster: metrics, loads, warming, what fails.

As the router's own watch does: metrics are asked for all the time, an engine that refuses the
connection has failed, one that does not answer has failed after some questions; a load is
answered once, unless another one or a rest comes before, then perhaps late or not at all.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from tests.support.router_calls import Calls
from tests.support.router_engines import Engine, Kind
from tests.support.router_timeline import Habits, Timeline
from vllm_kvpool.router.events import Event, Failed, Loaded, Measured, ReplicaSpec, Warmed
from vllm_kvpool.router.states import ReplicaId

MISSED_UNTIL_FAILED = 3
ASK_AGAIN_S = 1.0
NEVER = float("inf")


@dataclass(slots=True, eq=False)
class _Loading:
    until: float
    is_over: bool = False


class Watch:
    """Owned by a world; owns its engines."""

    def __init__(
        self, timeline: Timeline, habits: Habits, kind: Kind, post: Callable[[Event], None]
    ) -> None:
        self._timeline = timeline
        self._habits = habits
        self._kind = kind
        self._post = post
        self.engines: dict[ReplicaId, Engine] = {}
        self.calls = Calls(timeline, habits, self.engines, post)
        self._up_at: dict[ReplicaId, float] = {}
        """When engines that are down are up again by themselves."""
        self._loads: dict[ReplicaId, _Loading] = {}
        self._missed: Counter[ReplicaId] = Counter()

    def add(self, spec: ReplicaSpec, *, is_up: bool = True, kind: Kind | None = None) -> Engine:
        """An engine; the controller is not told."""
        calls = self.calls
        engine = Engine(spec, kind or self._kind, calls.began, calls.ended, is_up=is_up)
        engine.tell(self._timeline.now)
        self.engines[spec.replica_id] = engine
        return engine

    # What the controller wants done

    def load(self, spec: ReplicaSpec) -> None:
        self._supersede(spec.replica_id)
        loading = _Loading(self._timeline.now + self._habits.load_timeout_s)
        self._loads[spec.replica_id] = loading
        engine = self.engines.get(spec.replica_id) or self.add(spec, is_up=False)
        if spec.is_ours and not engine.is_up and self._up_at.get(spec.replica_id, NEVER) == NEVER:
            self.start_after(engine, engine.kind.load_s * self._timeline.chance.uniform(0.8, 1.5))
        elif engine.is_up and engine.is_asleep:
            self.start_after(engine, engine.kind.wake_s)
        self._timeline.after(self._timeline.moment(), lambda: self._ask(engine, loading))

    def start_after(self, engine: Engine, seconds: float) -> None:
        """Its process is there, or awake, so much later."""
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
                self._post(Loaded(replica))
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
            late = Loaded(replica) if is_loaded else Failed(replica, "not loaded")
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

    # What is seen of engines

    def look(self, replica: ReplicaId) -> None:
        """Ask for its metrics."""
        engine = self.engines.get(replica)
        if engine is None:
            return
        if engine.answers:
            self._missed[replica] = 0
            engine.tell(self._timeline.now)
            self.calls.wake(engine)
            seen = Measured(replica, engine.sample(pool_is_up=self.calls.pool_is_up))
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
        """Its process ends; others start it again so much later. Ours is seen to end."""
        engine.crash(self._timeline.now)
        self.start_after(engine, NEVER if engine.spec.is_ours else restart_s)
        if engine.spec.is_ours:
            replica = engine.spec.replica_id
            loading = self._loads.get(replica)
            if loading is not None:
                loading.is_over = True
            self._timeline.after(
                self._timeline.moment(), lambda: self._post(Failed(replica, "exited with -9"))
            )

    def hang(self, engine: Engine, seconds: float) -> None:
        self._change_for(engine, seconds, is_hung=True)
        for call in engine.calls:
            self.calls.watch_silence(call, engine)

    def slow(self, engine: Engine, seconds: float, slowness: float) -> None:
        self._change_for(engine, seconds, slowness=slowness)

    def refuse(self, engine: Engine, seconds: float) -> None:
        """It refuses new work."""
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
