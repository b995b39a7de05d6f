"""What a row of a benchmark was limited by, from counters read around what it measures.

A `Meter` sums, by name, what was used while actions of that name ran: time of all cores, the
busiest thread of this process and of those it has started, time in which a disk had requests, and
switches between threads. `limited_by` is the rule that makes a text of it.
"""

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from pathlib import Path

import psutil  # type: ignore[import-untyped]

FULL = 0.85  # of the time, or of a medium's own rate
HAND_OVERS = 10_000.0  # switches between threads, a second
RULE = (
    "limited by: what was in use for at least 85 % of the time that the row took, from counters "
    "read around it: the cores together, one thread (it ran, polled, or waited for a core), a disk "
    "(it had requests), a link or memory (of its own rate). If nothing was: `hand-overs` where "
    "there were more than 10,000 switches between threads a second (locks, queues), else `waits`, "
    "for pauses that the benchmark makes itself, for answers of other processes, or for locks"
)
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
IDLE = slice(3, 5)  # of the columns of /proc/stat: idle, and idle while a disk works
TIMES = slice(0, 8)  # guests' time is in the first ones already


@dataclass(frozen=True)
class Usage:
    """What one or several periods used; times in seconds."""

    wall_s: float = 0.0
    cores_s: float = 0.0
    """What there was of all cores."""
    used_s: float = 0.0
    """What was used of it, by whomever."""
    thread_s: float = 0.0
    """Of the busiest thread of each period."""
    disk_s: float = 0.0
    """In which the busiest disk of each period had requests."""
    switches: float = 0.0

    def __add__(self, other: "Usage") -> "Usage":
        pairs = ((getattr(self, f.name), getattr(other, f.name)) for f in fields(self))
        return Usage(*(one + two for one, two in pairs))


def limited_by(usage: Usage, media: Mapping[str, float] | None = None) -> str:
    """The rule, in words; `media` has the share of a medium's own rate at which bytes went."""
    wall_s = max(usage.wall_s, 1e-9)
    cores = usage.used_s / max(usage.cores_s, 1e-9)
    thread, disk = usage.thread_s / wall_s, usage.disk_s / wall_s
    rates = (media or {}).items()
    found = [f"{name} ({share:.0%} of its rate)" for name, share in rates if share >= FULL]
    if disk >= FULL:
        found.append(f"disk ({min(disk, 1.0):.0%})")
    if cores >= FULL:
        found.append(f"CPU (all cores, {min(cores, 1.0):.0%})")
    elif thread >= FULL:
        found.append(f"CPU (one thread, {min(thread, 1.0):.0%})")
    if found:
        return " and ".join(found)
    switches = usage.switches / wall_s
    if switches > HAND_OVERS:
        return f"hand-overs ({switches / 1000:.0f} thousand a second)"
    return f"waits (cores {cores:.0%} in use, a thread {thread:.0%})"


class Meter:
    """Sums of what ran, by name. Not thread-safe."""

    def __init__(self) -> None:
        self.used: dict[str, Usage] = {}

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """Count what is used meanwhile."""
        before = _Reading()
        try:
            yield
        finally:
            self.used[name] = self.used.get(name, Usage()) + (_Reading() - before)

    def limited_by(self, name: str, media: Mapping[str, float] | None = None) -> str:
        """What all that was counted under this name was limited by; `media` as above."""
        return limited_by(self.used[name], media)


class _Reading:
    """All counters at one moment."""

    def __init__(self) -> None:
        self._threads = dict(_threads())
        lines = Path("/proc/stat").read_text().splitlines()
        ticks = [int(each) for each in lines[0].split()[1:]]
        self._cores_s = sum(ticks[TIMES]) * TICK_S
        self._idle_s = sum(ticks[IDLE]) * TICK_S
        self._switches = next(int(line.split()[1]) for line in lines if line.startswith("ctxt"))
        self._disks = dict(_disks())
        self._at_s = time.monotonic()

    def __sub__(self, before: "_Reading") -> Usage:
        cores_s = self._cores_s - before._cores_s
        return Usage(
            wall_s=self._at_s - before._at_s,
            cores_s=cores_s,
            used_s=cores_s - (self._idle_s - before._idle_s),
            thread_s=_most(self._threads, before._threads),
            disk_s=_most(self._disks, before._disks),
            switches=self._switches - before._switches,
        )


def _most(now: dict[str, float], before: dict[str, float]) -> float:
    return max((value - before.get(name, 0.0) for name, value in now.items()), default=0.0)


def _threads() -> Iterator[tuple[str, float]]:
    """Seconds that each thread of this process and its descendants ran or waited for a core."""
    own = psutil.Process()
    for pid in (own.pid, *(each.pid for each in own.children(recursive=True))):
        with suppress(OSError):  # it has ended
            for task in Path(f"/proc/{pid}/task").iterdir():
                with suppress(OSError):
                    ran, waited, _ = (task / "schedstat").read_text().split()
                    yield task.name, (int(ran) + int(waited)) / 1e9


def _disks() -> Iterator[tuple[str, float]]:
    """Seconds in which each disk has had requests."""
    for line in Path("/proc/diskstats").read_text().splitlines():
        _, _, name, *counts = line.split()
        yield name, int(counts[9]) / 1e3
