"""Rounds of a soak: work, a strike at a random moment, repair, and what must hold after it.

A `Scene` says which stores there are and which engines; two of them are never killed, and must not
grow. A `Strike` is drawn before it is performed, so that a seed gives the same strikes again (their
effects depend on what the processes were doing at that moment).
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from random import Random

from tests.soak.crew import START_LIMIT_S, Crew, Member, Trouble, Vitals
from tests.soak.directory import Directory, Found
from tests.soak.engine import EngineSpec
from tests.support.mooncake_master import MooncakeMaster
from vllm_kvpool.config import KVRole

SURVIVE_LIMIT_S = 20.0  # until everybody has answered twice after a strike
RECOVER_LIMIT_S = 40.0  # until hits come back after a server was away
FILE_BYTES = 96 << 20  # about twenty prompts: there are evictions all the time
WINDOW = 16  # prompts that are asked for again
WARM_UP_ROUNDS = 4
GROWTH_ROUNDS = 12  # from so many on, growth can be told from warming up
RSS_GROWTH_BYTES = 64 << 20
THREAD_GROWTH = 8
FILE_GROWTH = 16
SAVED_BY_MOONCAKE = "kvpool_cells{direction=save,store=mooncake,outcome=done}"


@dataclass(frozen=True, slots=True)
class Strike:
    """What befalls whom."""

    after_s: float = 0.0  # of work
    victims: tuple[str, ...] = ()
    server: str = ""  # "kill" or "pause"
    rot: int = 0  # objects of the directory
    lasts_s: float = 0.0
    starts_meanwhile: bool = False  # victims come back while the server is away

    def after(self, seconds: float) -> "Strike":
        """The same after so much work."""
        return replace(self, after_s=seconds)

    def __str__(self) -> str:
        parts = [f"rot {self.rot} objects"] * bool(self.rot)
        parts += [f"{self.server} the master for {self.lasts_s:.2f} s"] * bool(self.server)
        parts += [f"kill {' and '.join(self.victims)}"] * bool(self.victims)
        parts += ["who come back meanwhile"] * (self.starts_meanwhile and bool(self.server))
        return f"after {self.after_s:.2f} s " + ", ".join(parts)


def draw_strike(chance: Random, scene: "Scene") -> Strike:
    """At least somebody is killed or some server is away."""
    killable = [name for name in scene.specs if name not in scene.veterans]
    server = chance.choice(["", "kill", "pause"]) if scene.master is not None else ""
    victims = [name for name in killable if chance.random() < 0.6]
    if not victims and not server:
        victims = [chance.choice(killable)]
    return Strike(
        after_s=chance.uniform(0.05, 1.5),
        victims=tuple(victims),
        server=server,
        rot=chance.choice([0, 0, 1, 3]) if scene.directory is not None else 0,
        lasts_s=chance.uniform(0.1, 5.0),
        starts_meanwhile=chance.random() < 0.5,
    )


@dataclass(frozen=True, slots=True)
class Scene:
    """Stores, servers and engines."""

    name: str
    specs: dict[str, EngineSpec]
    veterans: tuple[str, ...]
    directory: Directory | None
    master: MooncakeMaster | None


@contextmanager
def open_scene(name: str, directory: Path) -> Iterator[Scene]:
    """`file`, `mooncake` or `tiers` (host memory, both of these); ends its servers."""
    with ExitStack() as stack:
        urls = ["host://16MiB"] if name == "tiers" else []
        files = Directory(directory / "cells", FILE_BYTES) if name != "mooncake" else None
        urls += [files.url] if files is not None else []
        master = stack.enter_context(MooncakeMaster()) if name != "file" else None
        urls += [f"mooncake://{master.address}?segment=64MiB"] if master is not None else []
        stores = tuple(urls)
        policy = "back" if name == "tiers" else "through"
        specs = {
            "writer": EngineSpec(stores, 1, 16),
            "old-writer": EngineSpec(stores, 2, 32, write_policy=policy),
            "reader": EngineSpec(stores, 2, 64, KVRole.CONSUMER),
            "old-reader": EngineSpec(stores, 1, 16, KVRole.CONSUMER),
        }
        yield Scene(name, specs, ("old-writer", "old-reader"), files, master)


@dataclass(slots=True)
class Prompts:
    """Which prompts are asked for: writers go on to new ones, readers follow."""

    chance: Random
    newest: int = 0

    def choose(self, member: Member) -> tuple[int, ...]:
        count = self.chance.randint(1, 3)
        numbers: set[int] = set()
        while len(numbers) < count:
            if member.spec.role is not KVRole.CONSUMER and self.chance.random() < 0.6:
                self.newest += 1
                numbers.add(self.newest)
            else:
                numbers.add(self.chance.randint(max(0, self.newest - WINDOW), self.newest + 2))
        return tuple(numbers)


@dataclass(slots=True)
class Soak:
    """Performs rounds in one scene; `say` takes a line for each."""

    scene: Scene
    seed: int
    say: Callable[[str], None]
    directory: Path  # for logs
    crew: Crew = field(init=False)
    rounds: int = 0
    slowest_recovery_s: float = 0.0
    vitals: dict[str, list[Vitals]] = field(default_factory=dict)
    found: Found | None = None
    _chance: Random = field(init=False)
    _prompts: Prompts = field(init=False)

    def __post_init__(self) -> None:
        self._chance = Random(self.seed)
        self._prompts = Prompts(Random(self.seed + 1))
        self.crew = Crew(self.directory, self._prompts.choose)

    def begin(self) -> None:
        """Start all engines and wait until they use the stores."""
        for name, spec in self.scene.specs.items():
            self.crew.start(name, spec)
        self._all_started()
        self._recovered(dict.fromkeys(self.crew.members, 0.0), "at the start")

    def round(self, strike: Strike | None = None) -> None:
        """One strike, or one drawn by chance; Trouble if what must hold after it does not."""
        strike = strike or draw_strike(self._chance, self.scene)
        before = self.crew.totals.copy()
        began = time.monotonic()
        try:
            took_s = self._perform(strike)
        except Trouble as trouble:
            what = f"{self.scene.name}, seed {self.seed}, round {self.rounds + 1}, {strike}"
            raise Trouble(f"{what}: {trouble}") from trouble
        self.rounds += 1
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
        if self.scene.directory is not None:
            self.found = self.scene.directory.check_after_all()
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
            **{name: self.crew.totals[name] for name in ("requests", "hits", "wrong", "kills")},
            "totals": dict(self.crew.totals),
            "slowest": self.crew.slowest,
            "slowest_recovery_s": self.slowest_recovery_s,
            "vitals": {
                name: {"first": asdict(seen[0]), "last": asdict(seen[-1])}
                for name, seen in self.vitals.items()
            },
            "directory": None if self.found is None else asdict(self.found),
        }

    def _perform(self, strike: Strike) -> float:
        """How long hits took to come back after the repair."""
        crew, scene = self.crew, self.scene
        crew.work_for(strike.after_s)
        for _ in range(strike.rot):
            assert scene.directory is not None
            crew.totals["rot"] += bool(scene.directory.rot(self._chance))
        if scene.master is not None and strike.server:
            scene.master.kill() if strike.server == "kill" else scene.master.pause()
            crew.totals["server faults"] += 1
        for victim in strike.victims:
            crew.kill(victim)
        if scene.directory is not None and strike.victims:
            crew.totals["half-written files"] += scene.directory.num_half_written()
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
        """At what the survivors hold, and at the directory."""
        for name in self.scene.veterans:
            self.vitals.setdefault(name, []).append(Vitals.of(self.crew.members[name].pid))
        if self.scene.directory is not None:
            self.crew.rest()
            num_stores = sum(1 + m.spec.tp_size for m in self.crew.members.values())
            self.found = self.scene.directory.check(num_stores, self._prompts.newest + 3)

    def _state(self) -> str:
        vitals = [
            f"{name} {seen[-1].rss_bytes >> 20} MiB {seen[-1].threads} threads "
            f"{seen[-1].files} files"
            for name, seen in self.vitals.items()
        ]
        found = self.found
        files = [] if found is None else [f"{found.objects} objects, {found.rotten} rotten"]
        return ", ".join([*vitals, *files])


def _progress(member: Member) -> float:
    """What grows only while an engine uses the scene's shared store."""
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
    }
    for what, limit in limits.items():
        early, late = (
            min(getattr(seen, what) for seen in part) for part in (warm[:third], warm[-third:])
        )
        if late > early + limit:
            raise Trouble(f"{name} has grown: {what} from {early} to {late}")
