"""Starts, watches and stops the processes of engines, and reports what happens to them.

An engine outlives the router that has started it, and the next router finds it (`adopt`). So it is
detached on its own host, below a shell that logs its exit code and ends what it leaves behind.
`LOG.pid` beside its log names it by boot, pid and time of its start, since pids are used again.

Owns one task for each engine until its end, which it reports exactly once. Whether an engine is
ready, its monitor finds out. Runs in the router's loop; nothing it does raises there.
"""

import asyncio
import contextlib
import logging
import os
import re
import signal
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from vllm_kvpool.router.ops.commands import LaunchHost, LaunchSpec
from vllm_kvpool.router.ops.state_file import EngineRecord, StateFile

log = logging.getLogger(__name__)

MAX_ENGINES = 256
START_TIMEOUT_S = 30.0  # until a host has started an engine, with the connection it needs
CALL_TIMEOUT_S = 15.0  # likewise of a question to a host
KILL_TIMEOUT_S = 10.0  # how long an engine may still be there after SIGKILL
CHECK_S = 5.0  # between two questions to a host whether an engine is there
STOP_CHECK_S = 1.0  # likewise while it is stopped
POLL_S = 0.1  # of processes of this machine, and of orders to stop
MAX_LOG_BYTES = 64 << 20  # of an engine's log, until it is rotated
LOG_TAIL_LINES = 20
ANSWER_BYTES = 64 << 10  # of what a command prints

MARK = "kvpool-launch"
# The inner shell is the engine's parent. A trap, unlike an ignored signal, is not inherited.
_START = """\
log=$1 mask=$(umask); shift
umask 077
mkdir -p "${log%/*}" && rm -f "$log.pid" || exit 1
[ ! -e "$log" ] || mv "$log" "$log.1" || exit 1
: >"$log"
umask "$mask"
{ setsid sh -c '
trap : HUP INT TERM
log=$1; shift
"$@" 3>&- &
engine=$!
read -r boot </proc/sys/kernel/random/boot_id; read -r stat <"/proc/$engine/stat"
echo "$boot $stat" >"$log.pid"
echo "MARK started $engine" >&3
exec 3>&-
while wait "$engine"; code=$?; kill -s 0 "$engine" 2>/dev/null; do true; done
printf "\\nMARK exit %s\\n" "$code"
kill -s KILL 0
' kvpool-engine "$log" "$@" 3>&1 >>"$log" 2>&1 </dev/null & } | head -n 1
""".replace("MARK", MARK)
# Sends a signal (0: none) to an engine, says if it is there, and rotates its log: in place, since
# the engine has it open, so what comes between copy and truncation is lost.
_CHECK = """\
exec 2>/dev/null
log=$1 signal=$2 max_bytes=$3 lines=$4 boot= known= stat= now=
read -r boot </proc/sys/kernel/random/boot_id
read -r known stat <"$log.pid"
pid=${stat%% *}
[ -z "$pid" ] || [ "$boot" != "$known" ] || read -r now <"/proc/$pid/stat"
set -- ${now##*) }; state=${1:-X} ticks=${20}
set -- ${stat##*) }
case $state/$ticks in [ZX]/*) ;; */"${20}")
    [ "$signal" = 0 ] || kill -s "$signal" "$pid"
    [ "$(wc -c <"$log")" -le "$max_bytes" ] || { cp "$log" "$log.1" && true >"$log"; }
    echo "MARK alive $pid"; exit 0 ;;
esac
for _ in 1 2 3 4 5 6 7 8 9 10; do
    ! tail -n 1 "$log" | grep -q "^MARK exit" || break
    sleep 0.1
done
echo "MARK gone"; tail -n "$lines" "$log"
""".replace("MARK", MARK)


@dataclass(frozen=True, slots=True)
class Started:
    """The engine's process runs; whether it is ready is another matter."""

    replica_id: str
    pid: int
    """On the engine's host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exited:
    """The engine's process is gone, with all it had started."""

    replica_id: str
    why: str
    log_lines: tuple[str, ...] = ()
    """The last lines of its log."""


@dataclass(frozen=True, slots=True)
class StopFailed:
    """The process survives SIGKILL, or its host does not answer. It is still watched."""

    replica_id: str
    why: str


LauncherEvent = Started | Exited | StopFailed


@dataclass(frozen=True, slots=True)
class Alive:
    pid: int


@dataclass(frozen=True, slots=True)
class Gone:
    exit_code: int | None
    log_lines: tuple[str, ...]


Presence = Alive | Gone | None
"""Whether an engine's process is there; None: its host does not answer."""


def start_command(spec: LaunchSpec) -> tuple[str, ...]:
    """What starts an engine, and returns when it has a process."""
    arguments = ("sh", "-c", _START, "kvpool-start", str(spec.log_path), *spec.command())
    return spec.host.command(arguments)


def check_command(
    host: LaunchHost, log_path: str, sent: str, max_log_bytes: int = MAX_LOG_BYTES
) -> tuple[str, ...]:
    """What sends a signal to an engine, by name or `0` for none, and says whether it is there."""
    # Three more lines: the exit code, an empty one, and one that the engine has not ended.
    numbers = (str(max_log_bytes), str(LOG_TAIL_LINES + 3))
    return host.command(("sh", "-c", _CHECK, "kvpool-check", log_path, sent, *numbers))


def read_presence(printed: str) -> Presence:
    """What `check_command` has answered; hosts may print greetings before it."""
    lines = printed.splitlines()
    for number, line in enumerate(lines):
        match line.split():
            case [mark, "alive" | "started", pid] if mark == MARK:
                return Alive(int(pid))
            case [mark, "gone"] if mark == MARK:
                tail = lines[number + 1 :]
                codes = re.findall(rf"^{MARK} exit (\d+)$", "\n".join(tail), re.MULTILINE)
                own = [line for line in tail if line.strip() and not line.startswith(MARK)]
                return Gone(int(codes[-1]) if codes else None, tuple(own[-LOG_TAIL_LINES:]))
    return None


def describe_code(code: int | None) -> str:
    """An exit code as a shell gives it, in words."""
    if code is None:
        return "exit code unknown"
    if code > 128 and code - 128 in {member.value for member in signal.Signals}:
        return f"ended by {signal.Signals(code - 128).name}"
    return f"exit code {code}"


@dataclass(slots=True)
class _Engine:
    record: EngineRecord
    host: LaunchHost
    pid: int = 0
    """0: not known."""
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    drain_s: float = 0.0

    async def check(self, sent: str = "0") -> Presence:
        """Send a signal, or none; whether the engine was there. Bounded by CALL_TIMEOUT_S."""
        command = check_command(self.host, self.record.log_path, sent)
        found = read_presence(await _call(command, CALL_TIMEOUT_S))
        if isinstance(found, Alive):
            self.pid = found.pid
        return found

    def has_vanished(self) -> bool:
        """Whether it is certain, without asking, that its process is gone."""
        return (
            bool(self.pid) and self.host.prefix is None and not Path(f"/proc/{self.pid}").exists()
        )


class Launcher:
    """All engines that this router has started or found again."""

    def __init__(
        self,
        hosts: Mapping[str, LaunchHost],
        state_file: StateFile,
        report: Callable[[LauncherEvent], None],
    ) -> None:
        """`report` is called in the loop's thread and must not block."""
        self._hosts = dict(hosts)
        self._state_file = state_file
        self._report = report
        self._engines: dict[str, _Engine] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    @property
    def replica_ids(self) -> tuple[str, ...]:
        """Engines that have not ended."""
        return tuple(self._engines)

    def start(self, spec: LaunchSpec) -> None:
        """Start an engine; `Started` and at last `Exited` are reported."""
        assert spec.replica_id not in self._engines, f"{spec.replica_id} runs already"
        assert len(self._engines) < MAX_ENGINES
        record = EngineRecord(
            replica_id=spec.replica_id,
            host=spec.host.name,
            port=spec.port,
            role=spec.role,
            log_path=str(spec.log_path),
            stop_timeout_s=spec.stop_timeout_s,
        )
        # Before there is a process, so that a router that dies in between leaves none unrecorded.
        self._state_file.put(record)
        self._own(_Engine(record, spec.host), spec)

    async def adopt(self) -> tuple[EngineRecord, ...]:
        """Take over what a former router has left running; bounded by a call to each host."""
        known = [r for r in self._state_file.records.values() if r.replica_id not in self._engines]
        found = await asyncio.gather(*(self._adopt(record) for record in known))
        return tuple(record for record in found if record is not None)

    async def _adopt(self, record: EngineRecord) -> EngineRecord | None:
        host = self._hosts.get(record.host)
        if host is None:
            # It stays in the state file: with the host in the configuration again, it is found.
            log.error("%s runs on host %s, which is unknown", record.replica_id, record.host)
            return None
        engine = _Engine(record, host)
        if isinstance(await engine.check(), Gone):
            self._state_file.remove(record.replica_id)
            return None
        self._own(engine, None)
        return record

    def stop(self, replica_id: str, drain_s: float | None = None) -> None:
        """SIGTERM to an engine, SIGKILL after `drain_s` (its own time to stop, if None).

        `Exited` or `StopFailed` is reported. Without effect on an engine that has ended."""
        engine = self._engines.get(replica_id)
        if engine is not None:
            engine.drain_s = engine.record.stop_timeout_s if drain_s is None else drain_s
            engine.stopping.set()

    def set_role(self, replica_id: str, role: str) -> None:
        """Keep the role for the next router."""
        engine = self._engines[replica_id]
        engine.record = msgspec.structs.replace(engine.record, role=role)
        self._state_file.put(engine.record)

    async def stop_all(self, drain_s: float | None = None) -> None:
        """Stop every engine and wait, bounded, until it has ended or cannot be ended."""
        limit_s = 0.0
        for replica_id, engine in self._engines.items():
            self.stop(replica_id, drain_s)
            limit_s = max(limit_s, engine.drain_s)
        if self._tasks:
            limit_s += KILL_TIMEOUT_S + START_TIMEOUT_S + 4 * CALL_TIMEOUT_S
            await asyncio.wait(self._tasks.values(), timeout=limit_s)

    async def close(self) -> None:
        """Stop watching; the engines run on."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._state_file.close()

    def _own(self, engine: _Engine, spec: LaunchSpec | None) -> None:
        replica_id = engine.record.replica_id
        self._engines[replica_id] = engine
        self._tasks[replica_id] = asyncio.create_task(self._live(engine, spec))

    async def _live(self, engine: _Engine, spec: LaunchSpec | None) -> None:
        """An engine's whole life; the top of its task."""
        replica_id = engine.record.replica_id
        try:
            exited = await self._start(engine, spec) if spec else None
            if exited is None:
                gone = await self._watch(engine)
                why = describe_code(gone.exit_code)
                exited = Exited(replica_id=replica_id, why=why, log_lines=gone.log_lines)
            self._state_file.remove(replica_id)
        except Exception as error:
            # It stays in the state file: the next router may find it running.
            log.exception("%s: the launcher has failed", replica_id)
            exited = Exited(replica_id=replica_id, why=f"{type(error).__name__}: {error}")
        del self._engines[replica_id], self._tasks[replica_id]
        self._report(exited)

    async def _start(self, engine: _Engine, spec: LaunchSpec) -> Exited | None:
        """None if it has a process."""
        printed = await _call(start_command(spec), START_TIMEOUT_S)
        found = read_presence(printed)
        if isinstance(found, Alive):
            engine.pid = found.pid
            self._report(Started(spec.replica_id, found.pid))
            return None
        await engine.check("KILL")  # a host that was too slow may have started it after all
        why = f"host {spec.host.name!r} has started nothing"
        lines = tuple(printed.splitlines()[-LOG_TAIL_LINES:])
        return Exited(replica_id=spec.replica_id, why=why, log_lines=lines)

    async def _watch(self, engine: _Engine) -> Gone:
        """Until the engine has ended, by itself or because it was stopped."""
        while True:
            end = _now() + CHECK_S
            while _now() < end and not engine.stopping.is_set() and not engine.has_vanished():
                await asyncio.sleep(POLL_S)
            if engine.stopping.is_set():
                engine.stopping.clear()
                gone = await self._stop(engine)
                if gone is not None:
                    return gone
            elif isinstance(found := await engine.check(), Gone):
                return found

    async def _stop(self, engine: _Engine) -> Gone | None:
        """None if it cannot be ended."""
        found: Presence = None
        for sent, limit_s in (("TERM", engine.drain_s), ("KILL", KILL_TIMEOUT_S)):
            found = await engine.check(sent)
            end = _now() + limit_s
            while not isinstance(found, Gone) and _now() < end:
                ask_at = min(end, _now() + STOP_CHECK_S)
                while _now() < ask_at and not engine.has_vanished():
                    await asyncio.sleep(min(POLL_S, ask_at - _now()))
                found = await engine.check()
            if isinstance(found, Gone):
                return found
        why = f"still there {KILL_TIMEOUT_S:g} s after SIGKILL"
        if found is None:
            why = f"host {engine.host.name!r} does not answer"
        self._report(StopFailed(engine.record.replica_id, why))
        return None


def _now() -> float:
    return asyncio.get_running_loop().time()


async def _call(command: Sequence[str], timeout_s: float) -> str:
    """What a short command has printed; nothing if it takes too long, why if it cannot be run."""
    try:
        # Not through a pipe: one that a left-over of the command holds open is never at its end.
        with tempfile.TemporaryFile() as printed:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=printed,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                async with asyncio.timeout(timeout_s):
                    await process.wait()
            except TimeoutError:
                log.warning("%s has not answered within %g s", command[0], timeout_s)
                return ""
            finally:
                if process.returncode is None:
                    # It may have ended before asyncio has noticed.
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                    await process.wait()
            printed.seek(0)
            return printed.read(ANSWER_BYTES).decode(errors="replace")
    except OSError as error:
        log.warning("%s cannot be run: %s", command[0], error)
        return str(error)
