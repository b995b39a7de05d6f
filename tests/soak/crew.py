"""The processes of a soak: started, given work, watched and killed. Owned by one thread.

`Crew.work` keeps every engine at work and takes its answers until something holds. What must never
be is a `Trouble`: bytes that are not a reader's own, an answer that is late, a process that dies by
itself. Numbers of what was answered are kept for each engine and in all.
"""

import contextlib
import multiprocessing
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.soak.child import Answer, Ended, Quit, Serve, Started, run
from tests.soak.engine import (
    LOAD_TIMEOUT_S,
    SERVED_TIMES,
    EngineSpec,
    Served,
)

SLACK_S = 4.0  # of two busy cores
START_LIMIT_S = 60.0
SAVE_LIMIT_S = 3.0  # a save with no slot free is dropped after a second, in each step
END_LIMIT_S = 20.0  # Mooncake's clients take a second or two each, one after another
DUMP_WAIT_S = 3.0
POLL_S = 0.2
LOG_TAIL_BYTES = 6_000
IO_URING_THREADS = "iou-"
CLOSE_WAIT = "08"  # in /proc/net/tcp
STATE = 3  # its column there
SOCKET_TABLES = {
    "tcp": 9,
    "tcp6": 9,
    "udp": 9,
    "udp6": 9,
    "unix": 6,
    "netlink": 9,
}  # inode's column
BUSY = ("held", "quarantined")
PARENT, USER_TIME = 1, 11  # columns of `_stat`
TICKS_PER_S = os.sysconf("SC_CLK_TCK")

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["tests.soak.preload"])


class Trouble(AssertionError):
    """Something that must never be."""


@dataclass(frozen=True, slots=True)
class Vitals:
    """Resources that a process holds at a moment.

    `half_closed`: sockets whose peer has ended or reset the connection. Mooncake keeps its sockets
    to killed peers (kvcache-ai/Mooncake#2930), so `files` does not count them.
    """

    rss_bytes: int
    threads: int
    files: int
    half_closed: int
    slots: int  # of staging memory, not free

    @classmethod
    def of(cls, member: "Member") -> "Vitals":
        """Return the vitals of a running member."""
        pid = member.pid
        status = Path(f"/proc/{pid}/status").read_text().splitlines()
        values = dict(line.split(":", 1) for line in status)
        files = _open_files(pid)
        half_closed = len(ended_sockets(pid))
        return cls(
            rss_bytes=int(values["VmRSS"].split()[0]) << 10,
            threads=len(_threads(pid)),
            files=len(files) - half_closed,
            half_closed=half_closed,
            slots=int(sum(member.counted[f"kvpool_slots{{state={state}}}"] for state in BUSY)),
        )


def _threads(pid: int) -> list[str]:
    """Return the names of a process's threads, without the kernel's io_uring threads."""
    names = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # ended meanwhile
            names.append((task / "comm").read_text())
    return [name for name in names if not name.startswith(IO_URING_THREADS)]


def _open_files(pid: int) -> list[str]:
    """Return the targets of a process's file descriptors."""
    links = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            links.append(os.readlink(entry))
    return links


def ended_sockets(pid: int) -> set[str]:
    """Return open sockets whose peer has ended or reset the connection."""
    sockets = {file for file in _open_files(pid) if file.startswith("socket:")}
    return sockets - _live_sockets(pid)


def _live_sockets(pid: int) -> set[str]:
    """Return the live sockets of a process's network namespace, named as in its descriptors.

    TCP sockets whose peer has ended the connection are left out. Reset sockets are in no table.
    """
    found = set()
    for name, inode in SOCKET_TABLES.items():
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            columns = line.split()
            if not (name.startswith("tcp") and columns[STATE] == CLOSE_WAIT):
                found.add(f"socket:[{columns[inode]}]")
    return found


def cpu_seconds(pid: int, *, ended: bool) -> float:
    """Return a process's CPU time; with `ended`, include its ended children."""
    columns = _stat(pid)[USER_TIME : USER_TIME + (4 if ended else 2)]
    return sum(map(int, columns)) / TICKS_PER_S


def starved_s(pid: int) -> float:
    """Return how long a process's threads have waited for a processor; constant during a hang."""
    nanoseconds = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # ended meanwhile
            nanoseconds += int((task / "schedstat").read_text().split()[1])
    return nanoseconds / 1e9


def _stat(pid: int) -> list[str]:
    """The columns of /proc/pid/stat after the program's name."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


@dataclass(slots=True, eq=False)
class Member:
    """An engine's process and its answers so far."""

    name: str
    spec: EngineSpec
    process: BaseProcess
    pipe: Connection
    log: Path
    deadline: float
    starved_s: float = 0.0  # before it was asked, or started
    started: bool = False
    asked: tuple[int, ...] = ()
    num_answers: int = 0
    hit_tokens: int = 0
    counted: dict[str, float] = field(default_factory=dict)
    last: tuple[Served, ...] = ()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def parent_pid(self) -> int:
        """The process it was forked from."""
        return int(_stat(self.pid)[PARENT])

    def is_late(self, now: float) -> bool:
        """Return True if an answer is due and its deadline has passed.

        Time that the process's threads waited for a processor extends the deadline.
        """
        if (self.started and not self.asked) or now <= self.deadline:
            return False
        return now > self.deadline + starved_s(self.pid) - self.starved_s

    def log_tail(self) -> str:
        """The end of its log."""
        if not self.log.exists():
            return ""
        return self.log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")


class Crew:
    """See the module docstring. `choose` gives the prompts that an engine is asked for next;
    `slack_s` is what answers may be late on top of their limits."""

    def __init__(
        self,
        directory: Path,
        choose: Callable[[Member], tuple[int, ...]],
        slack_s: float = SLACK_S,
    ) -> None:
        self.members: dict[str, Member] = {}
        self.totals: Counter[str] = Counter()
        self.slowest: dict[str, float] = dict.fromkeys((*SERVED_TIMES, "start_s", "end_s"), 0.0)
        self._directory = directory
        self._choose = choose
        self._slack_s = slack_s
        self._num_started = 0
        self._killed: list[Member] = []

    def start(self, name: str, spec: EngineSpec, namespace: str = "") -> Member:
        """Start an engine; `work` waits for it."""
        assert name not in self.members, name
        self._num_started += 1
        log = self._directory / f"{name}.{self._num_started}.log"
        ours, theirs = context.Pipe()
        process = context.Process(
            target=run, args=(spec, theirs, log, namespace), name=name, daemon=True
        )
        process.start()
        theirs.close()
        deadline = time.monotonic() + START_LIMIT_S
        member = Member(name, spec, process, ours, log, deadline)
        self.members[name] = member
        return member

    def kill(self, name: str) -> None:
        """`kill -9`, whatever it is doing."""
        member = self.members.pop(name)
        os.kill(member.pid, signal.SIGKILL)
        self._killed.append(member)
        self.totals["kills"] += 1
        self.totals["kills at the start"] += not member.started

    def work(self, until: Callable[[], bool], limit_s: float, what: str = "") -> bool:
        """Keep all at work until that holds, `limit_s` at most; whether it does.

        `what`: what the time limit is broken for; then a Trouble says so.
        """
        deadline = time.monotonic() + limit_s
        while not until():
            if time.monotonic() > deadline:
                if what:
                    raise self._trouble(f"not in {limit_s:g} s: {what}", self.members.values())
                return False
            for member in self.members.values():
                if member.started and not member.asked:
                    self._ask(member)
            self._take_answers(deadline - time.monotonic())
        return True

    def work_for(self, seconds: float) -> None:
        """Keep all at work for that long."""
        self.work(lambda: False, seconds)

    def reap(self) -> None:
        """Wait until those that were killed have gone; their logs go, too."""
        for member in self._killed:
            self._reap(member)
            member.log.unlink(missing_ok=True)
        self._killed.clear()

    def rest(self) -> None:
        """Let everybody finish what they were asked, and ask for nothing more."""
        while any(m.asked or not m.started for m in self.members.values()):
            self._take_answers()

    def cpu_s(self) -> float:
        """CPU time of all engines that there were, and of this process, whose other children count
        once they have ended."""
        server = next(iter(self.members.values())).parent_pid()
        own = os.times()
        living = sum(cpu_seconds(member.pid, ended=False) for member in self.members.values())
        return sum(own[:4]) + cpu_seconds(server, ended=True) + living

    def end(self) -> None:
        """Let everybody finish, then end in order, side by side."""
        self.rest()
        for member in self.members.values():
            member.pipe.send(Quit())
        for name, member in list(self.members.items()):
            if not member.pipe.poll(END_LIMIT_S):
                raise self._trouble(f"{name} did not close in {END_LIMIT_S:g} s", [member])
            ended = member.pipe.recv()
            assert isinstance(ended, Ended), ended
            self.slowest["end_s"] = max(self.slowest["end_s"], ended.seconds)
            del self.members[name]
            self._reap(member)

    def close(self) -> None:
        """Kill whoever is left."""
        self.reap()
        for member in list(self.members.values()):
            if member.process.is_alive():
                os.kill(member.pid, signal.SIGKILL)
            self._reap(member)
        self.members.clear()

    def _ask(self, member: Member) -> None:
        member.asked = self._choose(member)
        longest_s = member.spec.lookup_timeout_s + LOAD_TIMEOUT_S + SAVE_LIMIT_S + self._slack_s
        member.deadline = time.monotonic() + longest_s
        member.starved_s = starved_s(member.pid)
        member.pipe.send(Serve(member.asked))

    def _take_answers(self, limit_s: float = POLL_S) -> None:
        by_pipe = {member.pipe: member for member in self.members.values()}
        for pipe in wait(list(by_pipe), max(0.0, min(limit_s, POLL_S))):
            assert isinstance(pipe, Connection)
            member = by_pipe[pipe]
            try:
                message = pipe.recv()
            except (EOFError, ConnectionError):
                raise self._trouble(f"{member.name} has died by itself", [member]) from None
            if isinstance(message, Started):
                member.started = True
                self.slowest["start_s"] = max(self.slowest["start_s"], message.seconds)
            else:
                assert isinstance(message, Answer), message
                self._answered(member, message)
        now = time.monotonic()
        late = [m for m in self.members.values() if m.is_late(now)]
        if late:
            names = ", ".join(
                f"{m.name} (prompts {m.asked}, {m.starved_s:.1f} s without a processor before, "
                f"{starved_s(m.pid):.1f} s by now)"
                for m in late
            )
            raise self._trouble(f"no answer within the time limit from {names}", late)

    def _answered(self, member: Member, answer: Answer) -> None:
        member.asked, member.last, member.counted = (), answer.served, answer.counted
        member.num_answers += 1
        self.totals["answers"] += 1
        for served in answer.served:
            self.totals["requests"] += 1
            self.totals["hit_tokens"] += served.kept_tokens
            self.totals["miss_tokens"] += served.chunked_tokens - served.kept_tokens
            self.totals["lost_tokens"] += served.offered_tokens - served.kept_tokens
            self.totals["hits"] += served.kept_tokens > 0
            member.hit_tokens += served.kept_tokens
            for name in SERVED_TIMES:
                self.slowest[name] = max(self.slowest[name], getattr(served, name))
            if served.wrong:
                self.totals["wrong"] += 1
                raise self._trouble(f"{member.name} has wrong bytes: {served.wrong}", [member])
            if served.lookup_s > member.spec.lookup_timeout_s + self._slack_s:
                raise self._trouble(f"{member.name}: a late lookup, {served}", [member])
            if served.load_s > LOAD_TIMEOUT_S + self._slack_s:
                raise self._trouble(f"{member.name}: a late load, {served}", [member])

    def _reap(self, member: Member) -> None:
        member.process.join(END_LIMIT_S)
        member.pipe.close()

    def _trouble(self, what: str, members: Iterable[Member]) -> Trouble:
        """With the stacks of the processes it is about, and the ends of their logs."""
        members = list(members)
        for member in members:
            if member.process.is_alive():
                os.kill(member.pid, signal.SIGUSR1)
        wait([member.process.sentinel for member in members], DUMP_WAIT_S)
        logs = [f"--- {member.name}\n{member.log_tail()}" for member in members]
        return Trouble("\n".join([what, *logs]))
