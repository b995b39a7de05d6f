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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from vllm_kvpool.router.control.settings import HostConfig
from vllm_kvpool.router.ops.commands import command_on
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
mkdir -p "${log%/*}" || exit 1
[ -O "${log%/*}" ] || { echo "${log%/*} is another user's; choose another state_dir"; exit 1; }
for file in "$log" "$log.1"; do
    [ ! -s "$file" ] || [ "$(head -n 1 "$file")" = "MARK log" ] && continue
    echo "$file is no log that a router began: move it away"; exit 1
done
[ ! -s "$log.pid" ] || grep -Eq '^[0-9a-f-]{36} ' "$log.pid" || {
    echo "$log.pid was not written by a router: move it away"; exit 1
}
rm -f "$log.pid" || exit 1
[ ! -e "$log" ] || mv "$log" "$log.1" || exit 1
echo "MARK log" >"$log"
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
    [ "$(wc -c <"$log")" -le "$max_bytes" ] || { cp "$log" "$log.1" && echo "MARK log" >"$log"; }
    echo "MARK alive $pid"; exit 0 ;;
esac
for _ in 1 2 3 4 5 6 7 8 9 10; do
    ! tail -n 1 "$log" | grep -q "^MARK exit" || break
    sleep 0.1
done
echo "MARK gone"; tail -n "$lines" "$log"
""".replace("MARK", MARK)


@dataclass(frozen=True, slots=True)
class Alive:
    """An engine's process runs; whether it is ready is another matter."""

    pid: int
    """On the engine's host."""


@dataclass(frozen=True, slots=True)
class Exited:
    """An engine's process is gone, with all it had started."""

    why: str
    log_lines: tuple[str, ...] = ()
    """The last lines of its log."""


Presence = Alive | Exited | None
"""Whether an engine's process is there; None: its host does not answer."""


def check_command(
    host: HostConfig, log_path: str, sent: str, max_log_bytes: int = MAX_LOG_BYTES
) -> tuple[str, ...]:
    """What sends a signal to an engine, by name or `0` for none, and says whether it is there."""
    # Three more lines: the exit code, an empty one, and one that the engine has not ended.
    numbers = (str(max_log_bytes), str(LOG_TAIL_LINES + 3))
    return command_on(host, ("sh", "-c", _CHECK, "kvpool-check", log_path, sent, *numbers))


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
                why = describe_code(int(codes[-1])) if codes else "exit code unknown"
                return Exited(why, tuple(own[-LOG_TAIL_LINES:]))
    return None


def describe_code(code: int) -> str:
    """An exit code as a shell gives it, in words."""
    if code > 128 and code - 128 in {member.value for member in signal.Signals}:
        return f"ended by {signal.Signals(code - 128).name}"
    return f"exit code {code}"


@dataclass(slots=True)
class _Engine:
    record: EngineRecord
    host: HostConfig
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
        is_here = bool(self.pid) and not self.host.command
        return is_here and not Path(f"/proc/{self.pid}").exists()


class Launcher:
    """All engines that this router has started or found again."""

    def __init__(
        self,
        hosts: Iterable[HostConfig],
        state_file: StateFile,
        ended: Callable[[str, Exited], None],
    ) -> None:
        """`ended` is told each end of an engine, in the loop's thread, and must not block."""
        self._hosts = {host.name: host for host in hosts}
        self._state_file = state_file
        self._ended = ended
        self._engines: dict[str, _Engine] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    @property
    def replica_ids(self) -> tuple[str, ...]:
        """Engines that have not ended."""
        return tuple(self._engines)

    def start(self, record: EngineRecord, command: Sequence[str]) -> None:
        """Start an engine with a command; its end will be told."""
        assert record.replica_id not in self._engines, f"{record.replica_id} runs already"
        assert len(self._engines) < MAX_ENGINES
        # Before there is a process, so that a router that dies in between leaves none unrecorded.
        self._state_file.put(record)
        self._own(_Engine(record, self._hosts[record.host]), command)

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
        if isinstance(await engine.check(), Exited):
            self._state_file.remove(record.replica_id)
            return None
        self._own(engine, ())
        return record

    def stop(self, replica_id: str, drain_s: float | None = None) -> None:
        """SIGTERM to an engine, SIGKILL after `drain_s` (its own time to stop, if None).

        One that survives it, or whose host does not answer, is logged and still watched. Without
        effect on an engine that has ended.
        """
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

    def _own(self, engine: _Engine, command: Sequence[str]) -> None:
        replica_id = engine.record.replica_id
        self._engines[replica_id] = engine
        self._tasks[replica_id] = asyncio.create_task(self._live(engine, command))

    async def _live(self, engine: _Engine, command: Sequence[str]) -> None:
        """An engine's whole life; the top of its task. Without a command it runs already."""
        replica_id = engine.record.replica_id
        try:
            exited = await self._start(engine, command) if command else None
            exited = exited or await self._watch(engine)
            self._state_file.remove(replica_id)
        except Exception as error:
            # It stays in the state file: the next router may find it running.
            log.exception("%s: the launcher has failed", replica_id)
            exited = Exited(f"{type(error).__name__}: {error}")
        del self._engines[replica_id], self._tasks[replica_id]
        self._ended(replica_id, exited)

    async def _start(self, engine: _Engine, command: Sequence[str]) -> Exited | None:
        """None if it has a process."""
        record, host = engine.record, engine.host
        arguments = ("sh", "-c", _START, "kvpool-start", record.log_path, *command)
        printed = await _call(command_on(host, arguments), START_TIMEOUT_S)
        found = read_presence(printed)
        if isinstance(found, Alive):
            engine.pid = found.pid
            log.info("%s has been started, as process %d", record.replica_id, found.pid)
            return None
        await engine.check("KILL")  # a host that was too slow may have started it after all
        lines = tuple(printed.splitlines()[-LOG_TAIL_LINES:])
        return Exited(f"host {host.name!r} has started nothing", lines)

    async def _watch(self, engine: _Engine) -> Exited:
        """Until the engine has ended, by itself or because it was stopped."""
        while True:
            end = _now() + CHECK_S
            while _now() < end and not engine.stopping.is_set() and not engine.has_vanished():
                await asyncio.sleep(POLL_S)
            if engine.stopping.is_set():
                engine.stopping.clear()
                if (exited := await self._stop(engine)) is not None:
                    return exited
            elif isinstance(found := await engine.check(), Exited):
                return found

    async def _stop(self, engine: _Engine) -> Exited | None:
        """None if it cannot be ended."""
        found: Presence = None
        for sent, limit_s in (("TERM", engine.drain_s), ("KILL", KILL_TIMEOUT_S)):
            found = await engine.check(sent)
            end = _now() + limit_s
            while not isinstance(found, Exited) and _now() < end:
                ask_at = min(end, _now() + STOP_CHECK_S)
                while _now() < ask_at and not engine.has_vanished():
                    await asyncio.sleep(min(POLL_S, ask_at - _now()))
                found = await engine.check()
            if isinstance(found, Exited):
                return found
        why = f"still there {KILL_TIMEOUT_S:g} s after SIGKILL"
        if found is None:
            why = f"host {engine.host.name!r} does not answer"
        log.error("%s cannot be stopped: %s", engine.record.replica_id, why)
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
