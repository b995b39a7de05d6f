"""Random lives of a simulated cluster: bursts of requests, faults, and commands of operators.

The seed alone determines all events. `heal` ends the faults and lets the cluster recover.
"""

import random
from collections.abc import Callable, Sequence

from tests.support.router_engines import Engine
from tests.support.router_world import World
from vllm_kvpool.router.control.events import Drain, Remove, SetRole
from vllm_kvpool.router.control.requests import RequestId, RequestSpec
from vllm_kvpool.router.control.states import ReplicaId, Role, State

CHUNK_TOKENS = 256
SIZES = (20, 100, 300, 1000, 2000, 4000, 12_000)
ROOTS = 6  # number of different prompt beginnings
HOUR_S = 3600.0
PASSING = frozenset(State) - {State.PREFILL, State.DECODE, State.INACTIVE}


class Chaos:
    """A generator of random requests, faults and commands for one world. Owned by a test."""

    def __init__(self, world: World, seed: int, sizes: Sequence[int] = SIZES) -> None:
        """`sizes`: approximate numbers of prompt tokens."""
        self.world = world
        self._sizes = sizes
        self.chance = random.Random(seed)
        self._asked = 0
        self._added = 0
        self._faults: tuple[Callable[[Engine], None], ...] = (
            self._crash,
            self._crash,
            self._flap,
            lambda engine: world.watch.hang(engine, self.chance.uniform(2.0, 200.0)),
            lambda engine: world.watch.slow(engine, self.chance.uniform(5.0, 60.0), 10.0),
            lambda engine: world.watch.refuse(engine, self.chance.uniform(0.5, 20.0)),
        )

    # Requests

    def ask(self) -> None:
        """Send a request with random size, prefix, priority and deadline."""
        chance, now = self.chance, self.world.now
        self._asked += 1
        tokens = chance.choice(self._sizes)
        tokens = int(tokens * chance.uniform(0.5, 1.5))
        chunks = tokens // CHUNK_TOKENS
        root = chance.randrange(ROOTS)
        request_id = RequestId(f"r{self._asked}")
        self.world.arrive(
            RequestSpec(
                request_id=request_id,
                prompt_tokens=tokens,
                max_output_tokens=400,
                prefix=tuple(root * 1000 + number for number in range(min(chunks, 12))),
                prefix_tokens=CHUNK_TOKENS,
                hands_over=chance.random() < 0.95,
                priority=chance.choice((-1, 0, 0, 0, 1)),
                deadline=float("inf") if chance.random() < 0.5 else now + chance.uniform(0.5, 90),
            ),
            chance.randint(1, 400),
        )
        if chance.random() < 0.1:
            self._after(chance.expovariate(0.3), lambda: self.world.cancel(request_id))

    def burst(self, requests: int, seconds: float) -> None:
        """Send a number of requests, at random times within the next `seconds`."""
        for _ in range(requests):
            self._after(self.chance.uniform(0.0, seconds), self.ask)

    # Faults

    def fault(self) -> None:
        """Inject a fault into an engine, or take the pool down for a while."""
        engines = list(self.world.watch.engines.values())
        if self.chance.random() < 0.15 or not engines:
            self.world.calls.lose_pool()
            self._after(self.chance.uniform(1.0, 60.0), self._pool_is_back)
        else:
            self.chance.choice(self._faults)(self.world.watch.engines[self._victim(engines)])

    def _victim(self, engines: list[Engine]) -> ReplicaId:
        """Return a random engine; in half of the cases one whose replica changes its state."""
        passing = [
            each.replica_id
            for each in self.world.controller.state.fleet.in_states(PASSING)
            if each.replica_id in self.world.watch.engines
        ]
        if passing and self.chance.random() < 0.5:
            return self.chance.choice(passing)
        return self.chance.choice(engines).spec.replica_id

    def _pool_is_back(self) -> None:
        self.world.calls.pool.up = True

    def _crash(self, engine: Engine) -> None:
        self.world.watch.crash(engine, self.chance.uniform(0.1, 60.0))

    def _flap(self, engine: Engine) -> None:
        for number in range(self.chance.randint(2, 6)):
            self._after(number * self.chance.uniform(1.0, 15.0), lambda: self._crash(engine))

    # Operators

    def command(self) -> None:
        """Issue a random command of an operator."""
        chance, replicas = (
            self.chance,
            [each.replica_id for each in self.world.controller.state.fleet],
        )
        role = chance.choice((Role.PREFILL, Role.DECODE))
        draw = chance.random()
        if draw < 0.1 or not replicas:
            self.add(role)
        elif draw < 0.2:
            self.add(role, is_started=True)
        else:
            replica = chance.choice(replicas)
            event = (
                Drain(replica),
                Remove(replica),
                SetRole(replica, role),
                SetRole(replica, role),
            )
            self.world.ask_admin(chance.choice(event))

    def add(self, role: Role, *, is_started: bool = False) -> ReplicaId:
        """Add an engine."""
        self._added += 1
        name = f"x{self._added}"
        engine = self.world.add(name, role, is_up=not is_started, is_started=is_started)
        engine.has_notices = self.chance.random() < 0.8
        return engine.spec.replica_id

    # Whole runs

    def hour(self) -> None:
        """Run an hour with one storm: a burst, with random faults and commands around it."""
        chance = self.chance
        at, seconds = chance.uniform(40.0, 0.9 * HOUR_S), chance.choice((0.1, 5.0, 30.0, 60.0))
        requests = chance.choice((1, 10, 30, 60))
        self._after(at, lambda: self.burst(requests, seconds))
        for _ in range(chance.choice((0, 0, 1, 3, 6))):
            self._after(at + chance.uniform(-5.0, seconds + 10.0), self.fault)
        for _ in range(chance.choice((0, 0, 1, 3, 6))):
            self._after(at + chance.uniform(-40.0, seconds + 10.0), self.command)
        self.world.run(HOUR_S)

    def storm(self, seconds: float) -> None:
        """Run a time with constant load, faults and commands."""
        chance = self.chance
        self.burst(int(seconds * chance.choice((0.5, 2.0))), seconds)
        for every_s, what in ((chance.choice((5.0, 20.0)), self.command), (10.0, self.fault)):
            for _ in range(int(seconds / every_s)):
                self._after(chance.uniform(0.0, seconds), what)
        self.world.run(seconds)

    def heal(self, seconds: float) -> None:
        """End all faults, add an engine for each role, and give the cluster time to recover."""
        world = self.world
        world.run(300.0)  # faults and commands scheduled here last until then
        self._pool_is_back()
        for engine in world.watch.engines.values():
            engine.change(world.now)
            engine.refuses_until = 0.0
            if not engine.is_up and not engine.spec.start:
                engine.start(world.now)
            world.calls.wake(engine)
        for role in Role:
            self.add(role)
        world.stir()
        world.run(seconds)

    def _after(self, seconds: float, what: Callable[[], None]) -> None:
        def do() -> None:
            self.world.stir()
            what()

        self.world.timeline.after(seconds, do)
