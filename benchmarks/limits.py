"""What a row of a benchmark was limited by, from counters read around what it measures.

A `Meter` sums, by name, what this process and those it has started used while actions of that name
ran: time of all cores, the busiest thread, switches between threads; and the time in which a disk
had requests. `limited_by` is the rule that makes a text of it.
"""

import os
import resource
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from pathlib import Path

import psutil  # type: ignore[import-untyped]

FULL = 0.85  # of the time, or of a medium's own rate
TAKES_TURNS = 0.25  # the least of a disk that is said to take turns with a thread
HAND_OVERS = 10_000.0  # switches between threads, a second
RULE = (
    "limited by: what was in use for at least 85 % of the time that the row took, from counters "
    "read around it: the cores together, one thread (it ran, polled, or waited for a core), a disk "
    "(it had requests), a link or memory (of its own rate), or a thread and a disk in turn. If "
    "nothing was: `hand-overs` where there were more than 10,000 switches between threads a second "
    "(locks, queues), else `waits`, for pauses that the benchmark makes itself, for answers of "
    "other processes, or for locks"
)
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
SECTOR_BYTES = 512  # as the kernel counts them, whatever the disk's are
CPU_TIMES = slice(11, 15)  # of what follows a process's name in its `stat`; with ended children


@dataclass(frozen=True)
class Usage:
    """What one or several periods used; times in seconds."""

    wall_s: float = 0.0
    cores_s: float = 0.0
    """What there was of all cores."""
    used_s: float = 0.0
    """What this process and its descendants used of it."""
    thread_s: float = 0.0
    """In which the busiest thread of each period ran or waited for a core."""
    disk_s: float = 0.0
    """In which the busiest disk had requests, of periods in which most bytes were of these."""
    switches: int = 0
    """How often threads began to run."""

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
    if disk >= TAKES_TURNS and thread + disk >= FULL:
        return f"CPU and disk in turn (a thread {thread:.0%}, a disk {disk:.0%})"
    switches = usage.switches / wall_s
    if switches > HAND_OVERS:
        return f"hand-overs ({switches / 1000:.0f} thousand a second)"
    return f"waits (cores {cores:.0%} in use, a thread {thread:.0%}, a disk {disk:.0%})"


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
        own = psutil.Process()
        self._used_s = 0.0
        self._threads: dict[str, float] = {}
        self._switches = self._disk_bytes = 0
        for pid in (each.pid for each in own.children(recursive=True)):
            with suppress(OSError):  # it has ended
                self._add(Path(f"/proc/{pid}"))
        others = self._switches
        self._add(Path(f"/proc/{own.pid}"))
        of_self = resource.getrusage(resource.RUSAGE_SELF)  # with its threads that have ended
        self._switches = others + of_self.ru_nvcsw + of_self.ru_nivcsw
        self._disks = dict(_disks())
        self._at_s = time.monotonic()

    def _add(self, process: Path) -> None:
        counts = (process / "stat").read_text().rpartition(")")[2].split()
        self._used_s += sum(map(int, counts[CPU_TIMES])) * TICK_S
        moved = dict(line.split(": ") for line in (process / "io").read_text().splitlines())
        self._disk_bytes += int(moved["read_bytes"]) + int(moved["write_bytes"])
        for task in (process / "task").iterdir():
            with suppress(OSError):
                ran_ns, waited_ns, times = (task / "schedstat").read_text().split()
                self._threads[task.name] = (int(ran_ns) + int(waited_ns)) / 1e9
                self._switches += int(times)

    def __sub__(self, before: "_Reading") -> Usage:
        wall_s = self._at_s - before._at_s
        return Usage(
            wall_s=wall_s,
            cores_s=wall_s * len(os.sched_getaffinity(0)),
            used_s=self._used_s - before._used_s,
            thread_s=max(s - before._threads.get(name, 0.0) for name, s in self._threads.items()),
            disk_s=self._disk_s(before),
            # Those of other processes' threads that have ended are gone.
            switches=max(0, self._switches - before._switches),
        )

    def _disk_s(self, before: "_Reading") -> float:
        if not self._disks:
            return 0.0
        busiest = max(self._disks, key=lambda name: self._disks[name][0] - before._disks[name][0])
        (busy_s, moved), (busy_before_s, moved_before) = (
            each._disks[busiest] for each in (self, before)
        )
        own = self._disk_bytes - before._disk_bytes
        return busy_s - busy_before_s if 2 * own >= moved - moved_before else 0.0


def _disks() -> Iterator[tuple[str, tuple[float, int]]]:
    """Seconds in which each disk has had requests, and bytes that were read and written."""
    for line in Path("/proc/diskstats").read_text().splitlines():
        _, _, name, *counts = line.split()
        yield name, (int(counts[9]) / 1e3, SECTOR_BYTES * (int(counts[2]) + int(counts[6])))
