"""Rounds of a soak: busy engines are killed one after another, then the invariants are checked.

A `Scene` names the stores and the engines. Two of the engines are never killed, and must not grow.
A `Strike` is drawn before it is performed, so a seed gives the same strikes again. Their effects
depend on the state of the processes at that moment. Every round checks the surviving engines and
the directories' sums. Every `DEPTH_ROUNDS`-th round reads every object.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from random import Random
from typing import NamedTuple

from tests.soak.crew import SLACK_S, START_LIMIT_S, Crew, Member, Trouble, Vitals
from tests.soak.directory import Directory, Found
from tests.soak.engine import EngineSpec
from tests.support.mooncake_master import MooncakeMaster
from vllm_kvpool.config import KVRole

SURVIVE_LIMIT_S = 60.0  # until everybody has answered twice after a strike
RECOVER_LIMIT_S = 90.0  # until hits come back after a server was away
FILE_BYTES = 96 << 20  # about twenty prompts: there are evictions all the time
# Sizes of the directories. In `levels` the first evicts what the second still has; `tiers` has host
# memory before the directory and Mooncake behind it.
SCENES = {"file": (FILE_BYTES,), "levels": (FILE_BYTES // 3, FILE_BYTES), "mooncake": ()}
SCENES["tiers"] = (FILE_BYTES,)
KILLS = 30  # in a round, each of up to `MOST_VICTIMS` engines
MOST_VICTIMS = 3
AT_WORK = 0.7  # of the kills, the others may come while stores are opened
SERVER_FAULTS = 0.2  # of the rounds with a server
DEPTH_ROUNDS = 5
WINDOW = 16  # prompts that are asked for again
NUM_PROMPTS = 4096  # then the first ones again, which are evicted long since
WARM_UP_ROUNDS = 4
GROWTH_ROUNDS = 12  # from so many on, growth can be told from warming up
RSS_GROWTH_BYTES = 64 << 20
THREAD_GROWTH = 8
FILE_GROWTH = 16
SLOT_GROWTH = 8
SAVED_BY_MOONCAKE = "kvpool_cells{direction=save,store=mooncake,outcome=done}"


class Kill(NamedTuple):
    """Engines are killed, and started again at once, after so many more answers of all engines
    and so many seconds."""

    victims: tuple[str, ...]
    answers: int
    seconds: float
    awaits_start: bool = False  # before these; else they may still be opening their stores


@dataclass(frozen=True, slots=True)
class Strike:
    """Faults of one round: the kills come first, then all other faults at one moment."""

    kills: tuple[Kill, ...] = ()
    after_s: float = 0.0  # of work
    victims: tuple[str, ...] = ()
    server: str = ""  # "kill" or "pause"
    rot: int = 0  # objects of each directory
    lasts_s: float = 0.0
    starts_meanwhile: bool = False  # victims come back while the server is away

    def after(self, seconds: float) -> "Strike":
        """The same after so much work."""
        return replace(self, after_s=seconds)

    def __str__(self) -> str:
        parts = [f"{sum(len(kill.victims) for kill in self.kills)} kills"] * bool(self.kills)
        parts += [f"rot {self.rot} objects"] * bool(self.rot)
        parts += [f"{self.server} the master for {self.lasts_s:.2f} s"] * bool(self.server)
        parts += [f"kill {' and '.join(self.victims)}"] * bool(self.victims)
        parts += ["who come back meanwhile"] * (self.starts_meanwhile and bool(self.server))
        return f"after {self.after_s:.2f} s " + ", ".join(parts)


def draw_strike(chance: Random, scene: "Scene") -> Strike:
    """`KILLS` in a row, then the rest; now and then a server is among it."""
    killable = [name for name in scene.specs if name not in scene.veterans]
    has_fault = scene.master is not None and chance.random() < SERVER_FAULTS
    return Strike(
        kills=tuple(
            Kill(
                tuple(chance.sample(killable, chance.randint(1, MOST_VICTIMS))),
                chance.randint(0, 2),
                chance.uniform(0, 0.02),
                chance.random() < AT_WORK,
            )
            for _ in range(KILLS)
        ),
        after_s=chance.uniform(0, 0.3),
        victims=tuple(chance.sample(killable, chance.randint(1, MOST_VICTIMS))),
        server=chance.choice(["kill", "pause"]) if has_fault else "",
        rot=chance.choice([0, 0, 1, 3]) if scene.directories else 0,
        lasts_s=chance.uniform(0.1, 5.0),
        starts_meanwhile=chance.random() < 0.5,
    )


@dataclass(frozen=True, slots=True)
class Scene:
    """Stores, servers and engines."""

    name: str
    specs: dict[str, EngineSpec]
    veterans: tuple[str, ...]
    directories: tuple[Directory, ...]
    master: MooncakeMaster | None


@contextmanager
def open_scene(name: str, directory: Path) -> Iterator[Scene]:
    """Open one of `SCENES`, and stop its servers at the end."""
    with ExitStack() as stack:
        sizes = SCENES[name]
        files = tuple(Directory(directory / f"cells{i}", size) for i, size in enumerate(sizes))
        urls = ["host://16MiB"] if name == "tiers" else []
        urls += [each.url for each in files]
        has_master = name in ("mooncake", "tiers")
        master = stack.enter_context(MooncakeMaster()) if has_master else None
        urls += [f"mooncake://{master.address}?segment=64MiB"] if master is not None else []
        stores = tuple(urls)
        policy = "back" if len(stores) > 1 else "through"
        specs = {
            "writer": EngineSpec(stores, 1, 16),
            "writer-2": EngineSpec(stores, 2, 32),
            "writer-3": EngineSpec(stores, 1, 64),
            "old-writer": EngineSpec(stores, 2, 32, write_policy=policy),
            "reader": EngineSpec(stores, 2, 64, KVRole.CONSUMER),
            "reader-2": EngineSpec(stores, 1, 32, KVRole.CONSUMER),
            "old-reader": EngineSpec(stores, 1, 16, KVRole.CONSUMER),
        }
        yield Scene(name, specs, ("old-writer", "old-reader"), files, master)


@dataclass(slots=True)
class Prompts:
    """The choice of the next prompts: writers advance to new prompts, readers follow."""

    chance: Random
    newest: int = 0

    @property
    def count(self) -> int:
        """No prompt that was asked for has this number, or a higher one."""
        return min(self.newest + 3, NUM_PROMPTS)

    def choose(self, member: Member) -> tuple[int, ...]:
        count = self.chance.randint(1, 3)
        numbers: set[int] = set()
        while len(numbers) < count:
            if member.spec.role is not KVRole.CONSUMER and self.chance.random() < 0.6:
                self.newest += 1
                number = self.newest
            else:
                number = self.chance.randint(max(0, self.newest - WINDOW), self.newest + 2)
            numbers.add(number % NUM_PROMPTS)
        return tuple(numbers)


@dataclass(slots=True)
class Soak:
    """Performs rounds in one scene; `say` takes a line for each, `keep` its figures."""

    scene: Scene
    seed: int
    say: Callable[[str], None]
    directory: Path  # for logs
    keep: Callable[[dict[str, object]], None] = lambda sample: None
    slack_s: float = SLACK_S
    crew: Crew = field(init=False)
    rounds: int = 0
    slowest_recovery_s: float = 0.0
    cpu_s: float = 0.0  # of all processes but servers
    vitals: dict[str, list[Vitals]] = field(default_factory=dict)
    found: tuple[Found, ...] = ()
    _cpu_before_s: float = 0.0
    _began: float = field(default_factory=time.monotonic)
    _chance: Random = field(init=False)
    _prompts: Prompts = field(init=False)

    def __post_init__(self) -> None:
        self._chance = Random(self.seed)
        self._prompts = Prompts(Random(self.seed + 1))
        self.crew = Crew(self.directory, self._prompts.choose, self.slack_s)

    def begin(self) -> None:
        """Start all engines and wait until they use the stores."""
        self._start_missing()
        self._cpu_before_s = self.crew.cpu_s()  # of former scenes, too
        self._all_started()
        self._recovered(dict.fromkeys(self.crew.members, 0.0), "at the start")

    def round(self, strike: Strike | None = None) -> None:
        """Perform a strike, by default a random one; raise Trouble if an invariant fails."""
        strike = strike or draw_strike(self._chance, self.scene)
        before = self.crew.totals.copy()
        began = time.monotonic()
        try:
            took_s = self._perform(strike)
        except Trouble as trouble:
            what = f"{self.scene.name}, seed {self.seed}, round {self.rounds + 1}, {strike}"
            raise Trouble(f"{what}: {trouble}") from trouble
        self.rounds += 1
        self.cpu_s = self.crew.cpu_s() - self._cpu_before_s
        self.keep(self._sample())
        seen = self.crew.totals - before
        self.say(
            f"{self.scene.name} {self.rounds}: {strike} | requests {seen['requests']} hits "
            f"{seen['hits']} misses {seen['requests'] - seen['hits']} lost tokens "
            f"{seen['lost_tokens']} wrong {seen['wrong']} kills {seen['kills']} | back after "
            f"{took_s:.1f} s, round {time.monotonic() - began:.1f} s | {self._state()}"
        )

    def end(self) -> None:
        """Close all engines in order; nothing must be left and nobody must have grown."""
        self.crew.end()
        self.found = tuple(
            each.check_after_all(self._prompts.count) for each in self.scene.directories
        )
        for name, vitals in self.vitals.items():
            check_growth(name, vitals)

    def close(self) -> None:
        """Kill whoever is left."""
        self.crew.close()

    def summary(self) -> dict[str, object]:
        """Everything that was counted."""
        return {
            "scene": self.scene.name,
            "seed": self.seed,
            "rounds": self.rounds,
            "seconds": time.monotonic() - self._began,
            "cpu_s": self.cpu_s,
            **{name: self.crew.totals[name] for name in ("requests", "hits", "wrong", "kills")},
            "totals": dict(self.crew.totals),
            "slowest": self.crew.slowest,
            "slowest_recovery_s": self.slowest_recovery_s,
            "vitals": {
                name: {"first": asdict(seen[0]), "last": asdict(seen[-1])}
                for name, seen in self.vitals.items()
            },
            "directories": [asdict(found) for found in self.found],
        }

    def _sample(self) -> dict[str, object]:
        """Return the figures of a round that are plotted over time."""
        return {
            "scene": self.scene.name,
            "round": self.rounds,
            "seconds": round(time.monotonic() - self._began, 1),
            "cpu_s": round(self.cpu_s, 1),
            **{name: self.crew.totals[name] for name in ("requests", "hits", "wrong", "kills")},
            "engines": {name: asdict(seen[-1]) for name, seen in self.vitals.items()},
            "directories": [asdict(found) for found in self.found],
        }

    def _perform(self, strike: Strike) -> float:
        """Perform a strike and return the seconds from the repair until hits came back."""
        crew, scene = self.crew, self.scene
        for kill in strike.kills:
            self._kill_one(kill)
        crew.work_for(strike.after_s)
        for directory in scene.directories * strike.rot:
            crew.totals["rot"] += bool(directory.rot(self._chance))
        if scene.master is not None and strike.server:
            scene.master.kill() if strike.server == "kill" else scene.master.pause()
            crew.totals["server faults"] += 1
        for victim in strike.victims:
            crew.kill(victim)
        crew.reap()
        for directory in scene.directories:
            crew.totals["half-written files"] += directory.num_half_written()
        if strike.starts_meanwhile:
            self._start_missing()
        if strike.server:
            crew.work_for(strike.lasts_s)
        if scene.master is not None and strike.server == "pause":
            scene.master.resume()
        if scene.master is not None and strike.server == "kill" and not scene.master.start():
            raise Trouble(f"the master does not come back:\n{scene.master.log()}")
        self._start_missing()
        repaired = time.monotonic()
        self._all_started()
        self._survived()
        self._recovered({name: _progress(m) for name, m in crew.members.items()}, str(strike))
        took_s = time.monotonic() - repaired
        self.slowest_recovery_s = max(self.slowest_recovery_s, took_s)
        self._look()
        return took_s

    def _kill_one(self, kill: Kill) -> None:
        if kill.awaits_start:
            victims = [self.crew.members[name] for name in kill.victims]
            self.crew.work(
                lambda: all(member.started for member in victims), START_LIMIT_S, "a start"
            )
        goal = self.crew.totals["answers"] + kill.answers
        self.crew.work(
            lambda: self.crew.totals["answers"] >= goal, SURVIVE_LIMIT_S, "answers between kills"
        )
        self.crew.work_for(kill.seconds)
        for victim in kill.victims:
            self.crew.kill(victim)
        for victim in kill.victims:
            self.crew.start(victim, self.scene.specs[victim])

    def _start_missing(self) -> None:
        for name, spec in self.scene.specs.items():
            if name not in self.crew.members:
                self.crew.start(name, spec)

    def _all_started(self) -> None:
        members = self.crew.members
        all_there = lambda: all(m.started for m in members.values())  # noqa: E731
        self.crew.work(all_there, START_LIMIT_S, "every engine has started")

    def _survived(self) -> None:
        """Everybody goes on answering."""
        goals = {name: m.num_answers + 2 for name, m in self.crew.members.items()}
        self.crew.work(
            lambda: all(self.crew.members[name].num_answers >= goals[name] for name in goals),
            SURVIVE_LIMIT_S,
            "everybody answers after a strike",
        )

    def _recovered(self, before: dict[str, float], after_what: str) -> None:
        """Every engine, restarted or not, uses the stores again; of tiers, the furthest one."""

        def missing() -> list[str]:
            return [n for n, m in self.crew.members.items() if _progress(m) <= before[n]]

        if not self.crew.work(lambda: not missing(), RECOVER_LIMIT_S):
            names = ", ".join(missing())
            logs = "\n".join(self.crew.members[name].log_tail() for name in missing())
            raise Trouble(f"no use of the store {after_what} by {names}\n{logs}")

    def _look(self) -> None:
        """At what the survivors hold, and at the directories."""
        self.crew.rest()
        for name in self.scene.veterans:
            self.vitals.setdefault(name, []).append(Vitals.of(self.crew.members[name]))
        num_stores = sum(1 + m.spec.tp_size for m in self.crew.members.values())
        self.found = tuple(each.check(num_stores) for each in self.scene.directories)
        if self.rounds % DEPTH_ROUNDS == 0:
            self.found = tuple(
                each.check_in_depth(num_stores, self._prompts.count)
                for each in self.scene.directories
            )

    def _state(self) -> str:
        vitals = [
            f"{name} {seen[-1].rss_bytes >> 20} MiB {seen[-1].threads} threads "
            f"{seen[-1].files} files {seen[-1].slots} slots"
            for name, seen in self.vitals.items()
        ]
        return ", ".join([*vitals, *(f"{found.files} files" for found in self.found)])


def _progress(member: Member) -> float:
    """Return a counter that grows only while an engine uses the scene's shared store."""
    if member.spec.stores[0].startswith("host:") and member.spec.role is not KVRole.CONSUMER:
        return member.counted.get(SAVED_BY_MOONCAKE, 0.0)
    return member.hit_tokens


def check_growth(name: str, vitals: list[Vitals]) -> None:
    """Trouble if a process holds more at the end than once it was warm.

    The least of many rounds counts: what is in use just then comes and goes, a leak stays.
    """
    if len(vitals) < GROWTH_ROUNDS:
        return
    warm = vitals[WARM_UP_ROUNDS:]
    third = len(warm) // 3
    limits = {
        "rss_bytes": RSS_GROWTH_BYTES,
        "threads": THREAD_GROWTH,
        "files": FILE_GROWTH,
        "slots": SLOT_GROWTH,
    }
    for what, limit in limits.items():
        early, late = (
            min(getattr(seen, what) for seen in part) for part in (warm[:third], warm[-third:])
        )
        if late > early + limit:
            raise Trouble(f"{name} has grown: {what} from {early} to {late}")
