"""Processes of engines: which one is meant, how it is started, watched and signalled.

An engine outlives the router that has started it, and the next router finds it. So it is no child
of the router:

    setsid --fork sh SUPERVISOR    on the router's machine; says who it is, and the exit code
      └ [ssh host …]               the host's prefix, if it has one
          └ setsid --wait sh ENGINE    on the engine's host; says who it is, then becomes it

Both speak in the engine's log, in lines that begin with MARK. A pid alone is no name, since pids
are used again: a process is named by its pid, the time of its start and its machine's boot. What
is not pure here are short calls of the operating system, which the router's loop can afford.
"""

import contextlib
import logging
import os
import shutil
import signal
from enum import Enum
from functools import cache
from pathlib import Path
from typing import IO, NamedTuple

import msgspec

from vllm_kvpool.router.ops.commands import LaunchHost, LaunchSpec

log = logging.getLogger(__name__)

MARK = "kvpool-launch"
BOOT_ID_PATH = "/proc/sys/kernel/random/boot_id"
# Of /proc/PID/stat, counted behind the name in parentheses, which may hold anything.
STATE_FIELD = 0
START_FIELD = 19
ENDED_STATES = ("Z", "X")

# What runs detached from the router. A trap, unlike an ignored signal, does not go on to children.
_SUPERVISOR = """\
trap : HUP INT TERM
id=$1; shift
read -r boot <BOOT; read -r stat </proc/$$/stat
printf 'MARK %s supervisor %s %s\\n' "$id" "$boot" "$stat"
"$@"
printf '\\nMARK %s exit %s\\n' "$id" "$?"
"""
_ENGINE = """\
id=$1; shift
read -r boot <BOOT; read -r stat </proc/$$/stat
printf 'MARK %s engine %s %s\\n' "$id" "$boot" "$stat"
exec "$@"
"""
# Sends $4 (KILL to the whole session, TERM to the engine, 0 to none), and says if it is there.
_SIGNAL = """\
read -r boot <BOOT
pid=$2 start=$3 signal=$4
if [ "$boot" != "$1" ]; then echo MARK gone; exit 0; fi
line=$(cat "/proc/$pid/stat" 2>/dev/null)
set -- ${line##*) }
case $signal/${20:-none} in KILL/none | KILL/"$start") kill -s KILL -- "-$pid" 2>/dev/null ;; esac
case ${20:-none}/$1 in
"$start"/[ZX]) echo MARK gone ;;
"$start"/*) if [ "$signal" = TERM ]; then kill -s TERM "$pid"; fi; echo MARK alive ;;
*) echo MARK gone ;;
esac
"""


def _script(text: str) -> str:
    return text.replace("BOOT", BOOT_ID_PATH).replace("MARK", MARK)


class Process(msgspec.Struct, frozen=True):
    """The name of a process; no other process ever has it."""

    boot_id: str
    pid: int
    start_ticks: int


class EngineRecord(msgspec.Struct, frozen=True, kw_only=True):
    """An engine that has been started, and by which process to know it again."""

    replica_id: str
    host: str
    port: int
    role: str
    launch_id: str
    log_path: str
    stop_timeout_s: float
    kill_timeout_s: float
    supervisor: Process | None = msgspec.field(default=None, name="keeper")
    """On the router's machine; None until its identity is in the log."""
    engine: Process | None = None
    """On the engine's machine; likewise."""


class Stat(NamedTuple):
    state: str
    start_ticks: int


class Marks(NamedTuple):
    """What a log says of one launch."""

    supervisor: Process | None = None
    engine: Process | None = None
    exit_code: int | None = None


class Presence(Enum):
    """Whether an engine's process is there."""

    ALIVE = "alive"
    GONE = "gone"
    UNKNOWN = "unknown"  # its host does not answer


class Signal(Enum):
    """What can be sent to an engine."""

    NONE = "0"
    TERM = "TERM"
    KILL = "KILL"


def parse_stat(line: str) -> Stat:
    """What a line of /proc/PID/stat says; ValueError if it is none."""
    fields = line.rpartition(") ")[2].split()
    if len(fields) <= START_FIELD:
        raise ValueError(f"no line of /proc/PID/stat: {line[:100]!r}")
    return Stat(fields[STATE_FIELD], int(fields[START_FIELD]))


def is_there(process: Process, boot_id: str, stat_line: str | None) -> bool:
    """Whether a process of this machine lives; `stat_line` is None where there is no such pid."""
    if stat_line is None or boot_id != process.boot_id:
        return False
    stat = parse_stat(stat_line)
    return stat.start_ticks == process.start_ticks and stat.state not in ENDED_STATES


def launch_command(spec: LaunchSpec, launch_id: str) -> tuple[str, ...]:
    """What starts an engine. It returns at once and prints nothing but through the engine's log."""
    engine = ("setsid", "--wait", "sh", "-c", _script(_ENGINE), "kvpool-engine", launch_id)
    client = spec.host.command((*engine, *spec.command()))
    return (
        "setsid",
        "--fork",
        "sh",
        "-c",
        _script(_SUPERVISOR),
        "kvpool-supervisor",
        launch_id,
        *client,
    )


def signal_command(host: LaunchHost, process: Process, sent: Signal) -> tuple[str, ...]:
    """What sends a signal to an engine, if that is still the process of that name."""
    arguments = (process.boot_id, str(process.pid), str(process.start_ticks), sent.value)
    return host.command(("sh", "-c", _script(_SIGNAL), "kvpool-signal", *arguments))


def read_presence(printed: str) -> Presence:
    """What `signal_command` has answered; hosts may print greetings around it."""
    for line in reversed(printed.splitlines()):
        match line.split():
            case [mark, "alive"] if mark == MARK:
                return Presence.ALIVE
            case [mark, "gone"] if mark == MARK:
                return Presence.GONE
    return Presence.UNKNOWN


def read_marks(text: str, launch_id: str) -> Marks:
    """What a log says of a launch. A line that is not whole yet says nothing."""
    marks = Marks()
    for line in text.splitlines(keepends=True):
        if not line.startswith(f"{MARK} {launch_id} ") or not line.endswith("\n"):
            continue
        match line.split()[2:]:
            case ["supervisor", boot_id, pid, *_]:
                marks = marks._replace(supervisor=_process(boot_id, pid, line))
            case ["engine", boot_id, pid, *_]:
                marks = marks._replace(engine=_process(boot_id, pid, line))
            case ["exit", code]:
                marks = marks._replace(exit_code=int(code))
    return marks


def _process(boot_id: str, pid: str, line: str) -> Process:
    return Process(boot_id, int(pid), parse_stat(line).start_ticks)


def last_lines(text: str, count: int) -> tuple[str, ...]:
    """The last lines of a log that are not marks."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith(MARK)]
    return tuple(lines[-count:])


def describe_code(code: int | None) -> str:
    """An exit code as a shell gives it, in words."""
    if code is None:
        return "exit code unknown"
    if code > 128 and code - 128 in {member.value for member in signal.Signals}:
        return f"ended by {signal.Signals(code - 128).name}"
    return f"exit code {code}"


LOG_BYTES = 64 << 10  # read of a log, at its begin or end
MAX_LOG_BYTES = 64 << 20  # of an engine's log, until it is rotated


def open_log(path: Path) -> IO[bytes]:
    """A new log, readable by its owner alone; a former one is kept as `.1`. Raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.exists():
        path.replace(path.with_name(f"{path.name}.1"))
    return open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600), "ab")


def rotate_log(path: Path, max_bytes: int = MAX_LOG_BYTES) -> None:
    """Copy a log that has grown too large to `.1`, and begin it anew.

    The engine has it open and appends, so it is truncated in place: what comes between copy and
    truncation is lost. Takes as long as the copy.
    """
    try:
        if path.stat().st_size <= max_bytes:
            return
        shutil.copyfile(path, path.with_name(f"{path.name}.1"))
        os.truncate(path, 0)
    except OSError as error:
        log.warning("log %s cannot be rotated at %d bytes: %s", path, max_bytes, error)


@cache
def _boot_id() -> str:
    return Path(BOOT_ID_PATH).read_text().strip()


def supervisor_lives(record: EngineRecord) -> bool:
    """Whether the supervisor is there, and so the engine, or the connection to it."""
    if record.supervisor is None:
        return False
    try:
        line = Path(f"/proc/{record.supervisor.pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    if is_there(record.supervisor, _boot_id(), line):
        return True
    # Where the router is pid 1 of a container, orphans become its children, to be reaped.
    with contextlib.suppress(ChildProcessError):
        os.waitpid(record.supervisor.pid, os.WNOHANG)
    return False


def end_supervisor(record: EngineRecord) -> None:
    """Kill the supervisor, and the connection to an engine elsewhere, if they are still there."""
    if record.supervisor is not None and supervisor_lives(record):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(record.supervisor.pid, signal.SIGKILL)


def log_text(record: EngineRecord, *, from_end: bool = False) -> str:
    """The first or the last of what an engine has printed."""
    try:
        with open(record.log_path, "rb") as file:
            if from_end:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(size - LOG_BYTES, 0))
            return file.read(LOG_BYTES).decode(errors="replace")
    except OSError:
        return ""
