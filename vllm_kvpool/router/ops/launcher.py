"""Starts, watches and stops the processes of engines, and reports what happens to them.

Owns one task for each engine, from its start, or from being found again, to its end, which it
reports exactly once. Whether an engine is ready, its monitor finds out.
Runs in the router's loop, into which it reports; nothing it does raises there. Engines survive the
router: `close` leaves them running, as a crash does, and `adopt` finds them again.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import msgspec

from vllm_kvpool.router.ops.commands import LaunchHost, LaunchSpec
from vllm_kvpool.router.ops.state_file import StateFile
from vllm_kvpool.router.ops.supervisor import (
    EngineRecord,
    Presence,
    Process,
    Signal,
    describe_code,
    end_supervisor,
    last_lines,
    launch_command,
    log_text,
    open_log,
    read_marks,
    read_presence,
    rotate_log,
    signal_command,
    supervisor_lives,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Started:
    """The engine's process runs; whether it is ready is another matter."""

    replica_id: str
    pid: int
    """On the engine's host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adopted:
    """An engine of a former router runs on."""

    replica_id: str
    host: str
    port: int
    role: str
    pid: int


class EndCause(Enum):
    """Why an engine's process has ended."""

    NOT_STARTED = "not_started"
    BY_ITSELF = "by_itself"
    STOPPED = "stopped"  # after SIGTERM, drained
    KILLED = "killed"  # not drained in time
    UNWATCHED = "unwatched"  # the launcher has a bug; the next router may find it running


@dataclass(frozen=True, slots=True, kw_only=True)
class Exited:
    """The engine's process is gone, with all it had started."""

    replica_id: str
    end: EndCause
    code: int | None
    """As a shell gives it, 128 and more for a signal; None if unknown."""
    why: str
    log_lines: tuple[str, ...]
    """The last lines of its log."""


@dataclass(frozen=True, slots=True)
class StopFailed:
    """The process survives SIGKILL, or its host does not answer. It is still watched."""

    replica_id: str
    why: str


LauncherEvent = Started | Exited | StopFailed


MAX_ENGINES = 256
CALL_TIMEOUT_S = 15.0  # a command on a host, with the connection it needs
IDENTITY_TIMEOUT_S = 30.0  # until a started engine has logged its identity, over ssh
ADOPT_TIMEOUT_S = 5.0  # likewise, of an engine whose router died just then
WATCH_POLL_S = 0.1
ROTATE_EVERY_S = 10.0
LOST_POLL_S = 5.0  # between two questions to a host whose connection has ended
LOG_TAIL_LINES = 20
ANSWER_BYTES = 64 << 10  # of what a command prints


@dataclass(slots=True)
class _Engine:
    record: EngineRecord
    host: LaunchHost
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    drain_s: float = 0.0
    end: EndCause = EndCause.BY_ITSELF
    has_lost_connection: bool = False
    """The engine has outlived its supervisor, which would have logged its exit code."""


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

    def ports(self, host: str) -> frozenset[int]:
        """Ports of a host that this launcher's engines use."""
        return frozenset(e.record.port for e in self._engines.values() if e.record.host == host)

    def start(self, spec: LaunchSpec) -> None:
        """Start an engine; `Started` and at last `Exited` are reported."""
        assert spec.replica_id not in self._engines, f"{spec.replica_id} runs already"
        assert len(self._engines) < MAX_ENGINES
        record = EngineRecord(
            replica_id=spec.replica_id,
            host=spec.host.name,
            port=spec.port,
            role=spec.role,
            launch_id=secrets.token_hex(8),
            log_path=str(spec.log_path),
            stop_timeout_s=spec.stop_timeout_s,
            kill_timeout_s=spec.kill_timeout_s,
        )
        # Before there is a process, so that a router that dies in between leaves none unrecorded.
        self._state_file.put(record)
        self._own(_Engine(record, spec.host), spec)

    async def adopt(self) -> tuple[Adopted, ...]:
        """Take over what a former router has left running; bounded by a call to each host."""
        known = [r for r in self._state_file.records.values() if r.replica_id not in self._engines]
        found = await asyncio.gather(*(self._adopt(record) for record in known))
        return tuple(adopted for adopted in found if adopted is not None)

    def stop(self, replica_id: str, drain_s: float | None = None) -> None:
        """EndCause an engine: SIGTERM, SIGKILL after `drain_s` (its own time to stop, if None).

        `Exited` or `StopFailed` is reported. Without effect on an engine that has ended."""
        engine = self._engines.get(replica_id)
        if engine is not None:
            engine.drain_s = engine.record.stop_timeout_s if drain_s is None else drain_s
            engine.stopping.set()

    def set_role(self, replica_id: str, role: str) -> None:
        """Keep the role for the next router."""
        engine = self._engines[replica_id]
        self._keep(engine, msgspec.structs.replace(engine.record, role=role))

    async def stop_all(self, drain_s: float | None = None) -> None:
        """Stop every engine and wait, bounded, until it has ended or cannot be ended."""
        limit_s = 0.0
        for replica_id, engine in self._engines.items():
            self.stop(replica_id, drain_s)
            calls_s = IDENTITY_TIMEOUT_S + 4 * CALL_TIMEOUT_S
            limit_s = max(limit_s, engine.drain_s + engine.record.kill_timeout_s + calls_s)
        if self._tasks:
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
        record = engine.record
        try:
            why = await self._start(engine, spec) if spec else ""
            if not why:
                await self._watch(engine)
        except Exception as error:
            log.exception("%s: the launcher has failed", record.replica_id)
            engine.end, why = EndCause.UNWATCHED, f"{type(error).__name__}: {error}"
        text = log_text(record, from_end=True)
        marks = read_marks(text, record.launch_id)
        code = _exit_code(engine, marks.exit_code)
        del self._engines[record.replica_id], self._tasks[record.replica_id]
        if engine.end is not EndCause.UNWATCHED:
            self._state_file.remove(record.replica_id)
        self._report(
            Exited(
                replica_id=record.replica_id,
                end=engine.end,
                code=code,
                why=why or describe_code(code),
                log_lines=last_lines(text, LOG_TAIL_LINES),
            )
        )

    async def _start(self, engine: _Engine, spec: LaunchSpec) -> str:
        """Why there is no process; empty if there is one."""
        engine.end = EndCause.NOT_STARTED
        try:
            await _spawn(spec, engine.record.launch_id)
        except OSError as error:
            return str(error)
        identified = await self._identify(engine, IDENTITY_TIMEOUT_S)
        if identified is None:
            if not supervisor_lives(engine.record):
                return f"host {spec.host.name!r} has started nothing"
            end_supervisor(engine.record)
            return f"host {spec.host.name!r} has started nothing within {IDENTITY_TIMEOUT_S:g} s"
        engine.end = EndCause.BY_ITSELF
        self._report(Started(spec.replica_id, identified.pid))
        return ""

    async def _adopt(self, record: EngineRecord) -> Adopted | None:
        host = self._hosts.get(record.host)
        if host is None:
            # It stays in the state_file: with the host in the configuration again, it is found.
            log.error("%s runs on host %s, which is unknown", record.replica_id, record.host)
            return None
        engine = _Engine(record, host)
        process = record.engine or await self._identify(engine, ADOPT_TIMEOUT_S)
        if process is None or await _signal(engine, Signal.NONE) is Presence.GONE:
            end_supervisor(engine.record)
            self._state_file.remove(record.replica_id)
            return None
        self._own(engine, None)
        return Adopted(
            replica_id=record.replica_id,
            host=record.host,
            port=record.port,
            role=record.role,
            pid=process.pid,
        )

    async def _identify(self, engine: _Engine, timeout_s: float) -> Process | None:
        """Wait for the engine's identity in its log; None if there is none in time."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while True:
            # Looked at first: what a supervisor has written before it ended is in the log.
            ended = engine.record.supervisor is not None and not supervisor_lives(engine.record)
            marks = read_marks(log_text(engine.record), engine.record.launch_id)
            record = msgspec.structs.replace(
                engine.record, supervisor=marks.supervisor, engine=marks.engine
            )
            if record != engine.record:
                self._keep(engine, record)
            if marks.engine or ended or asyncio.get_running_loop().time() >= deadline:
                return marks.engine
            await asyncio.sleep(WATCH_POLL_S)

    async def _watch(self, engine: _Engine) -> None:
        """Until the engine has ended, by itself or because it was stopped."""
        gone = asyncio.create_task(self._await_end(engine))
        try:
            while not gone.done():
                stopping = asyncio.create_task(engine.stopping.wait())
                try:
                    await asyncio.wait({gone, stopping}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    stopping.cancel()
                if not gone.done():
                    engine.stopping.clear()
                    await self._stop(engine, gone)
            await gone
        finally:
            gone.cancel()
        # What it may have left behind holds its devices and its port.
        await _signal(engine, Signal.KILL)
        end_supervisor(engine.record)

    async def _stop(self, engine: _Engine, gone: asyncio.Task[None]) -> None:
        engine.end = EndCause.STOPPED
        await _signal(engine, Signal.TERM)
        if (await asyncio.wait({gone}, timeout=engine.drain_s))[0]:
            return
        engine.end = EndCause.KILLED
        await _signal(engine, Signal.KILL)
        if (await asyncio.wait({gone}, timeout=engine.record.kill_timeout_s))[0]:
            return
        match await _signal(engine, Signal.NONE):
            case Presence.GONE:
                end_supervisor(engine.record)  # its connection alone was left
                return
            case Presence.ALIVE:
                why = f"still there {engine.record.kill_timeout_s:g} s after SIGKILL"
            case Presence.UNKNOWN:
                why = f"host {engine.host.name!r} does not answer"
        self._report(StopFailed(engine.record.replica_id, why))

    async def _await_end(self, engine: _Engine) -> None:
        path, rotate_at = Path(engine.record.log_path), 0.0
        while supervisor_lives(engine.record):
            await asyncio.sleep(WATCH_POLL_S)
            if (now := asyncio.get_running_loop().time()) >= rotate_at:
                rotate_at = now + ROTATE_EVERY_S
                await asyncio.to_thread(rotate_log, path)
        # Of an engine elsewhere, only the connection may have ended.
        while await _signal(engine, Signal.NONE) is not Presence.GONE:
            engine.has_lost_connection = True
            await asyncio.sleep(LOST_POLL_S)

    def _keep(self, engine: _Engine, record: EngineRecord) -> None:
        engine.record = record
        self._state_file.put(record)


def _exit_code(engine: _Engine, code: int | None) -> int | None:
    """The engine's exit code; None where `code` may be that of the connection to its host."""
    if engine.has_lost_connection:
        return None
    # ssh ends with 255 when it loses the host, and with more than 128 when a signal ends it; the
    # engine may have ended as well before its host was asked.
    is_elsewhere = engine.host.prefix is not None and engine.end is EndCause.BY_ITSELF
    return None if is_elsewhere and code is not None and code > 128 else code


async def _spawn(spec: LaunchSpec, launch_id: str) -> None:
    with open_log(spec.log_path) as file:
        process = await asyncio.create_subprocess_exec(
            *launch_command(spec, launch_id),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=file,
            stderr=file,
        )
        await asyncio.wait_for(process.wait(), CALL_TIMEOUT_S)


async def _signal(engine: _Engine, sent: Signal) -> Presence:
    """Send a signal, or none, to an engine; whether it was there. Bounded by CALL_TIMEOUT_S."""
    assert engine.record.engine is not None
    return read_presence(await _call(signal_command(engine.host, engine.record.engine, sent)))


async def _call(command: Sequence[str]) -> str:
    """What a short command has printed; nothing if it cannot be run or takes too long."""
    # Not through a pipe: one that a left-over of the command holds open is never at its end.
    with tempfile.TemporaryFile() as printed:
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=printed,
                stderr=asyncio.subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            log.warning("%s cannot be run: %s", command[0], error)
            return ""
        try:
            await asyncio.wait_for(process.wait(), CALL_TIMEOUT_S)
        except TimeoutError:
            log.warning("%s has not answered within %g s", command[0], CALL_TIMEOUT_S)
            return ""
        finally:
            if process.returncode is None:
                # It may have ended before asyncio has noticed.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        printed.seek(0)
        return printed.read(ANSWER_BYTES).decode(errors="replace")
