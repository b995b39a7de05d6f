"""The launcher with real, small processes in the place of engines."""

import asyncio
import contextlib
import errno
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.processes import is_alive, session
from tests.support.server_process import free_port
from vllm_kvpool.router.control.settings import HostConfig
from vllm_kvpool.router.ops import launcher as launcher_module
from vllm_kvpool.router.ops.launcher import (
    Alive,
    Exited,
    Launcher,
    Presence,
    check_command,
    describe_code,
    read_presence,
)
from vllm_kvpool.router.ops.state_file import EngineRecord, StateFile

BOUND_S = 20.0
HERE = HostConfig(name="here")
BOX = HostConfig(name="box", command=("sh", "-c", '"$@"', "docker", "{command...}"))

# Answers /health, and on SIGTERM ends a slow request before it exits, as vLLM does.
SERVER = """
import http.server, signal, sys, threading, time

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/slow":
            print("slow begins", flush=True)
            time.sleep(0.5)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"done")

server = http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
server.daemon_threads = False
signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown).start())
print("ready", flush=True)
server.serve_forever()
server.server_close()
print("drained", flush=True)
"""
# A leader with a child, both deaf to SIGTERM.
DEAF = "trap '' TERM; sleep 300 & echo deaf; wait; wait"
STAYS = "trap 'echo asked' TERM; echo up; while :; do sleep 300 & wait; done"
QUIET = "echo up; exec sleep 300"


def session_of(pid: int) -> list[int]:
    """The live processes of the session of an engine; none if it has ended."""
    with contextlib.suppress(ProcessLookupError):
        if (leader := os.getsid(pid)) != os.getsid(0):
            return session(leader)
    return []


def kill(pids: list[int]) -> None:
    """SIGKILL to each; some end by themselves when others have."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


async def end(pids: list[int]) -> None:
    """Wait until none is left: what was killed still has to get to its end."""
    async with asyncio.timeout(BOUND_S):
        while any(map(is_alive, pids)):
            await asyncio.sleep(0.01)


# What ssh does, as far as it matters: it hands one string to a shell in a session of its own, with
# which it shares no fate. The file `down` stands for a network that is away, for so long.
SSH = """\
if [ -e {down} ]; then sleep "$(cat {down})"; echo no route; exit 255; fi
[ "$1" = far ] || exit 9; shift
setsid --wait sh -c "$*"
"""


class Bench:
    """A launcher on files of its own, and the ends of engines that it has told."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.ends: list[tuple[str, Exited]] = []
        self.down = root / "down"
        script = root / "ssh.sh"
        script.write_text(SSH.format(down=shlex.quote(str(self.down))))
        command = ("sh", str(script), "{host}", "{command}")
        self.far = HostConfig(name="far", address="far", command=command)
        self.launcher = self.another()

    def another(self) -> Launcher:
        self.records = StateFile(self.root / "engines.json")
        hosts = (HERE, BOX, self.far)
        self.launcher = Launcher(hosts, self.records, lambda *end: self.ends.append(end))
        return self.launcher

    def start(
        self,
        *command: str,
        replica_id: str = "r1",
        host: str = "here",
        stop_timeout_s: float = 10.0,
    ) -> None:
        self.launcher.start(self.record(replica_id, host, stop_timeout_s), command)

    async def exited(self, count: int = 1) -> Exited:
        """The last end of an engine, once there are so many."""
        async with asyncio.timeout(BOUND_S):
            while len(self.ends) < count:
                await asyncio.sleep(0.01)
        return self.ends[-1][1]

    async def started(self, *command: str, replica_id: str = "r1", **options: Any) -> int:
        """Start an engine; its process, once its host has one."""
        self.start(*command, replica_id=replica_id, **options)
        async with asyncio.timeout(BOUND_S):
            while (found := self.launcher._engines.get(replica_id)) and not found.pid:
                await asyncio.sleep(0.01)
        return self.pid(replica_id)

    async def said(self, words: str, replica_id: str = "r1") -> None:
        """Wait until an engine has printed something."""
        async with asyncio.timeout(BOUND_S):
            while words not in (self.root / "logs" / f"{replica_id}.log").read_text():
                await asyncio.sleep(0.01)

    def record(
        self, replica_id: str, host: str = "here", stop_timeout_s: float = 1.0
    ) -> EngineRecord:
        return EngineRecord(
            replica_id=replica_id,
            host=host,
            port=8001,
            role="decode",
            log_path=str(self.root / "logs" / f"{replica_id}.log"),
            stop_timeout_s=stop_timeout_s,
        )

    def pid(self, replica_id: str = "r1") -> int:
        """Of an engine, as its host knows it."""
        return int((self.root / "logs" / f"{replica_id}.log.pid").read_text().split()[1])

    def state_file(self) -> dict[str, object]:
        content = msgspec.json.decode((self.root / "engines.json").read_bytes())
        return {engine["replica_id"]: engine for engine in content["engines"]}


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(launcher_module, "POLL_S", 0.01)
    monkeypatch.setattr(launcher_module, "CHECK_S", 0.1)
    monkeypatch.setattr(launcher_module, "STOP_CHECK_S", 0.05)
    bench = Bench(tmp_path)
    yield bench
    for path in tmp_path.glob("logs/*.log.pid"):
        _, *stat = path.read_text().split()
        if stat:
            kill(session_of(int(stat[0])))
    bench.records.close()


def run(story: Callable[[], Coroutine[None, None, None]]) -> None:
    asyncio.run(asyncio.wait_for(story(), 3 * BOUND_S))


async def test_an_engine_is_started_drained_and_stopped(bench: Bench) -> None:
    port = free_port()
    assert port

    pid = await bench.started(sys.executable, "-c", SERVER, str(port))
    await bench.said("ready")
    assert is_alive(pid)
    assert os.getsid(pid) != os.getsid(0)
    assert list(bench.state_file()) == ["r1"]
    slow = asyncio.create_task(
        asyncio.to_thread(
            lambda: urllib.request.urlopen(f"http://127.0.0.1:{port}/slow", timeout=9).read()
        )
    )
    await bench.said("slow begins")
    bench.launcher.stop("r1")
    assert await slow == b"done"
    ended = await bench.exited()
    assert ended.why == "exit code 0"
    assert ended.log_lines[0] == "ready"
    assert ended.log_lines[-1] == "drained"
    assert bench.state_file() == {}
    assert bench.launcher.replica_ids == ()
    assert len(bench.ends) == 1


async def test_an_engine_that_does_not_drain_is_killed_with_all_it_has_started(
    bench: Bench,
) -> None:
    pid = await bench.started("sh", "-c", DEAF)
    await bench.said("deaf")
    all_of_it = session_of(pid)
    assert len(all_of_it) == 3, "with the shell above it"
    begun = time.monotonic()
    bench.launcher.stop("r1", drain_s=0.2)
    ended = await bench.exited()
    assert time.monotonic() - begun >= 0.2
    assert isinstance(ended, Exited)
    assert ended.why == "ended by SIGKILL"
    await end(all_of_it)


async def test_an_engine_that_exits_is_reported_with_its_last_words(bench: Bench) -> None:
    bench.start("sh", "-c", "for i in $(seq 50); do echo line $i; done; exit 3")
    ended = await bench.exited()
    assert ended == Exited("exit code 3", tuple(f"line {i}" for i in range(31, 51)))
    assert bench.state_file() == {}


async def test_what_a_crashed_engine_leaves_behind_is_ended(bench: Bench) -> None:
    pid = await bench.started("sh", "-c", "sleep 300 & echo up; wait")
    await bench.said("up")
    left = [other for other in session_of(pid) if other != pid]
    os.kill(pid, signal.SIGKILL)
    ended = await bench.exited()
    assert ended.why == "ended by SIGKILL"
    assert len(left) == 2
    await end(left)


@pytest.mark.parametrize(
    ("command", "code"), [(("no-such-program",), 127), (("/etc/passwd",), 126)]
)
async def test_a_program_that_cannot_be_run_is_an_exit(
    bench: Bench, command: tuple[str, ...], code: int
) -> None:
    bench.start(*command)
    ended = await bench.exited()
    assert ended.why == f"exit code {code}"
    assert command[0] in ended.log_lines[-1]


async def test_a_log_that_cannot_be_written_is_no_start(bench: Bench) -> None:
    (bench.root / "logs").write_text("a file")

    bench.start("true")
    ended = await bench.exited()
    assert ended.why == "host 'here' has started nothing"
    assert "logs" in ended.log_lines[0]
    assert bench.ends == [("r1", ended)]


def test_an_engine_that_has_ended_before_its_host_looks_at_it_is_gone(tmp_path: Path) -> None:
    log = tmp_path / "r1.log"
    log.write_text("no such model\n\nkvpool-launch exit 3\n")
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    Path(f"{log}.pid").write_text(f"{boot} \n")
    command = check_command(HERE, str(log), "0")
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert read_presence(printed) == Exited("exit code 3", ("no such model",))


def test_the_log_before_is_kept_and_nobody_else_reads_it(bench: Bench) -> None:
    async def story() -> None:
        for words in ("first", "second", "third"):
            bench.start("echo", words)
            await bench.exited({"first": 1, "second": 2, "third": 3}[words])

    run(story)
    logs = bench.root / "logs"
    assert sorted(path.name for path in logs.iterdir()) == ["r1.log", "r1.log.1", "r1.log.pid"]
    assert "second" in (logs / "r1.log.1").read_text()
    assert "third" in (logs / "r1.log").read_text()
    assert (logs / "r1.log").stat().st_mode & 0o777 == 0o600


def test_engines_run_on_without_the_router_and_are_found_again(bench: Bench) -> None:
    async def first() -> None:
        await bench.started("sh", "-c", QUIET)
        bench.launcher.set_role("r1", "prefill")
        await bench.launcher.close()

    async def second() -> None:
        bench.another()
        (adopted,) = await bench.launcher.adopt()
        assert (adopted.replica_id, adopted.host) == ("r1", "here")
        assert (adopted.port, adopted.role) == (8001, "prefill")
        assert is_alive(bench.pid())
        assert await bench.launcher.adopt() == ()
        bench.launcher.stop("r1")
        ended = await bench.exited()
        assert ended.why == "ended by SIGTERM"

    run(first)
    run(second)


ROUTER = """
import asyncio, sys
from pathlib import Path
from tests.router.test_launcher import QUIET, Bench

async def story():
    bench = Bench(Path(sys.argv[1]))
    await bench.started("sh", "-c", QUIET)
    print("up", flush=True)
    await asyncio.sleep(300)

asyncio.run(story())
"""


async def test_engines_survive_a_router_that_is_killed(bench: Bench) -> None:
    bench.records.close()
    with subprocess.Popen(
        [sys.executable, "-c", ROUTER, str(bench.root)], stdout=subprocess.PIPE
    ) as router:
        assert router.stdout
        assert router.stdout.readline() == b"up\n"
        router.kill()
    assert router.returncode == -9

    await bench.another().adopt()
    os.kill(bench.pid(), signal.SIGUSR1)
    ended = await bench.exited()
    assert ended.why == "ended by SIGUSR1"


def test_engines_that_ended_meanwhile_and_their_namesakes_are_not_adopted(bench: Bench) -> None:
    async def first() -> None:
        pid = await bench.started("sh", "-c", QUIET)
        await bench.launcher.close()
        os.kill(pid, signal.SIGKILL)
        while is_alive(pid):  # `run` has a bound
            await asyncio.sleep(0.01)

    async def second() -> None:
        bench.another()
        # As if the pid of another engine had been given to this very process.
        stat = Path(f"/proc/{os.getpid()}/stat").read_text().rsplit(" ", 40)
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        ticks = stat[0].rpartition(") ")[2].split() + stat[1:]
        ticks[19] = "1"
        (bench.root / "logs/r2.log.pid").write_text(
            f"{boot_id} {os.getpid()} (x) {' '.join(ticks)}"
        )
        bench.records.put(bench.record("r2"))
        assert await bench.launcher.adopt() == ()
        assert bench.state_file() == {}
        assert is_alive(os.getpid())

    run(first)
    run(second)


async def test_a_record_without_a_process_is_given_up(bench: Bench) -> None:
    bench.records.put(bench.record("r1"))
    bench.records.put(bench.record("r2", host="no more"))

    assert await bench.launcher.adopt() == ()
    assert list(bench.state_file()) == ["r2"], "an unknown host may be known again tomorrow"


async def test_a_stop_that_comes_early_late_or_twice(bench: Bench) -> None:
    bench.launcher.stop("r1")
    bench.start("sh", "-c", QUIET)
    bench.launcher.stop("r1")
    bench.launcher.stop("r1")
    await bench.exited()
    bench.launcher.stop("r1")
    assert len(bench.ends) == 1


async def test_all_are_stopped_at_once(bench: Bench) -> None:
    names = [f"r{number}" for number in range(4)]
    pids = [await bench.started("sh", "-c", STAYS, replica_id=name) for name in names]
    for name in names:
        await bench.said("up", name)
    stopping = asyncio.create_task(bench.launcher.stop_all(drain_s=10 * BOUND_S))
    for name in names:
        await bench.said("asked", name)
    assert not bench.ends, "each of them is asked before one has ended"
    kill([each for pid in pids for each in session_of(pid)])
    await stopping
    assert sorted(name for name, _ in bench.ends) == names
    assert bench.launcher.replica_ids == ()


async def test_what_does_not_drain_is_killed_with_all(bench: Bench) -> None:
    names = [f"r{number}" for number in range(2)]
    for name in names:
        await bench.started("sh", "-c", DEAF, replica_id=name, stop_timeout_s=10 * BOUND_S)
    for name in names:
        await bench.said("deaf", name)
    async with asyncio.timeout(BOUND_S):
        await bench.launcher.stop_all(drain_s=0.2)
    assert [exited.why for _, exited in bench.ends] == ["ended by SIGKILL"] * 2
    assert bench.launcher.replica_ids == ()


async def test_an_engine_elsewhere_is_started_and_stopped_through_its_prefix(bench: Bench) -> None:
    words = """it's "$HOME" `x` {"a":1}"""
    script = 'echo "$1 $2"; exec sleep 300'
    command = ("env", "K=a b", "sh", "-c", script, "x", words)
    pid = await bench.started(*command, host="far")
    await bench.said(words)
    assert b"K=a b" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    bench.launcher.stop("r1")
    ended = await bench.exited()
    assert ended.why == "ended by SIGTERM"


async def test_a_prefix_without_a_shell(bench: Bench) -> None:
    pid = await bench.started("sh", "-c", DEAF, host="box")
    await bench.said("deaf")
    bench.launcher.stop("r1", drain_s=0.1)
    ended = await bench.exited()
    assert ended.why == "ended by SIGKILL"
    assert not is_alive(pid)


async def test_a_host_that_is_away_for_a_while_is_no_end_of_the_engine(bench: Bench) -> None:
    pid = await bench.started("sh", "-c", QUIET, host="far")
    bench.down.write_text("0")
    await asyncio.sleep(0.3)  # several times CHECK_S
    await bench.launcher.close()
    (adopted,) = await bench.another().adopt()
    assert adopted.replica_id == "r1", "whether it is there, nobody can say"
    bench.down.unlink()
    assert bench.ends == []
    os.kill(pid, signal.SIGTERM)
    ended = await bench.exited()
    assert ended.why == "ended by SIGTERM"


async def test_a_host_that_cannot_be_reached_starts_nothing(bench: Bench) -> None:
    bench.down.write_text("0")

    bench.start("sh", "-c", QUIET, host="far")
    ended = await bench.exited()
    assert ended.why == "host 'far' has started nothing"
    assert ended.log_lines == ("no route",)


async def test_a_host_that_does_not_answer_is_given_up(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher_module, "START_TIMEOUT_S", 0.3)
    monkeypatch.setattr(launcher_module, "CALL_TIMEOUT_S", 0.3)
    bench.down.write_text("300")

    bench.start("sh", "-c", QUIET, host="far")
    ended = await bench.exited()
    assert ended.why == "host 'far' has started nothing"


@pytest.mark.parametrize("seconds", ["0", "300"])
async def test_what_cannot_be_stopped_is_said_and_can_be_stopped_later(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, seconds: str
) -> None:
    pid = await bench.started("sh", "-c", QUIET, host="far")
    monkeypatch.setattr(launcher_module, "CALL_TIMEOUT_S", 0.3)
    monkeypatch.setattr(launcher_module, "KILL_TIMEOUT_S", 0.2)
    bench.down.write_text(seconds)
    bench.launcher.stop("r1", drain_s=0.1)
    async with asyncio.timeout(BOUND_S):
        while "r1 cannot be stopped: host 'far' does not answer" not in caplog.text:
            await asyncio.sleep(0.01)
    assert is_alive(pid)
    assert list(bench.state_file()) == ["r1"]
    bench.down.unlink()
    monkeypatch.setattr(launcher_module, "CALL_TIMEOUT_S", BOUND_S)
    bench.launcher.stop("r1")
    await bench.exited()
    assert len(bench.ends) == 1


async def test_a_command_that_ends_as_it_is_given_up_is_no_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its number is nobody's then, and asyncio is still to be told."""
    create = asyncio.create_subprocess_exec

    class Ended:
        """A process that was waited for elsewhere, which is not known here yet."""

        returncode = None

        def __init__(self, pid: int) -> None:
            self.pid = pid
            self._is_known = False

        async def wait(self) -> int:
            if not self._is_known:
                self._is_known = True
                await asyncio.Event().wait()
            return 0

    async def ended(*command: str, **options: Any) -> Ended:
        process = await create(*command, **options)
        await process.wait()
        return Ended(process.pid)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", ended)
    assert await launcher_module._call(["true"], 0.01) == ""


@pytest.mark.parametrize("turns", range(8))
async def test_a_command_that_ends_as_the_router_does_keeps_it_from_nothing(
    bench: Bench, turns: int
) -> None:
    """Python 3.11's `wait_for` swallows a cancel then, and the engine was watched on for ever."""
    begun, ends = bench.root / "begun", bench.root / "ends"
    os.mkfifo(ends)

    command = ["sh", "-c", 'echo >"$0"; read _ <"$1"', str(begun), str(ends)]
    call = asyncio.create_task(launcher_module._call(command, BOUND_S))
    while not begun.exists():
        await asyncio.sleep(0)
    ends.write_text("now")
    os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)  # the loop learns of it in its next turns
    for _ in range(turns):
        await asyncio.sleep(0)
    is_early = not call.done()
    call.cancel()
    await asyncio.wait((call,))
    assert call.cancelled() is is_early


async def test_a_router_without_descriptors_takes_no_engine_for_ended(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was started a second time, beside the first."""

    def none_left() -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    pid = await bench.started("sh", "-c", QUIET)
    asked = 0

    def file() -> Any:
        nonlocal asked
        asked += 1
        return none_left() if asked < 3 else make()

    make = tempfile.TemporaryFile
    monkeypatch.setattr(tempfile, "TemporaryFile", file)
    async with asyncio.timeout(BOUND_S):
        while asked < 3:
            await asyncio.sleep(0.01)
    assert is_alive(pid)
    assert bench.launcher.replica_ids == ("r1",)
    bench.launcher.stop("r1", 0.0)
    await bench.exited()


def test_a_bug_of_ours_is_a_report_and_loses_no_engine(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(Launcher, "_watch", broken)

    async def story() -> None:
        pid = await bench.started("sh", "-c", QUIET)
        ended = await bench.exited()
        assert ended.why == "RuntimeError: a bug"
        assert is_alive(pid)
        assert list(bench.state_file()) == ["r1"]

    run(story)
    assert "the launcher has failed" in caplog.text


@pytest.mark.parametrize(
    ("printed", "found"),
    [
        ("kvpool-launch alive 7\n", Alive(7)),
        ("Welcome to far!\nkvpool-launch alive 7\n", Alive(7)),
        ("kvpool-launch gone\n", Exited("exit code unknown")),
        ("kvpool-launch gone\none\n\nkvpool-launch exit 3\n", Exited("exit code 3", ("one",))),
        ("kvpool-launch gone\nkvpool-launch exit x\n", Exited("exit code unknown")),
        ("ssh: no route to host\n", None),
        ("", None),
    ],
)
def test_what_a_host_has_answered(printed: str, found: Presence) -> None:
    assert read_presence(printed) == found


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (0, "exit code 0"),
        (3, "exit code 3"),
        (137, "ended by SIGKILL"),
        (255, "exit code 255"),
    ],
)
def test_an_exit_code_in_words(code: int, words: str) -> None:
    assert describe_code(code) == words


async def test_a_log_is_rotated_while_an_engine_writes_it(bench: Bench) -> None:
    fifo = bench.root / "fifo"
    os.mkfifo(fifo)
    await bench.started("sh", "-c", f"echo before; cat {shlex.quote(str(fifo))}; exec sleep 300")
    await bench.said("before")
    log_path = bench.root / "logs/r1.log"
    head = b"kvpool-launch log\n"
    for max_bytes in (len(head) + 7, len(head) + 6):
        command = check_command(HERE, str(log_path), "0", max_bytes)
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        kept = b"before\n" if max_bytes == len(head) + 7 else b""
        assert log_path.read_bytes() == head + kept
    fifo.write_text("after\n")
    await bench.said("after")
    assert log_path.read_bytes() == head + b"after\n", "and no hole before it"
    assert log_path.with_name("r1.log.1").read_bytes() == head + b"before\n"


@pytest.mark.parametrize("name", ["r1.log", "r1.log.1", "r1.log.pid"])
async def test_a_file_that_no_router_wrote_stays_and_no_engine_starts(
    bench: Bench, name: str
) -> None:
    logs = bench.root / "logs"
    logs.mkdir()
    (logs / name).write_text("precious\n")
    bench.start("sleep", "300")
    ended = await bench.exited()
    assert f"{logs / name} " in str(ended.log_lines)
    assert "move it away" in str(ended.log_lines)
    assert [(path.name, path.read_text()) for path in logs.iterdir()] == [(name, "precious\n")]


async def test_an_engine_has_the_rights_of_its_router_and_not_of_its_log(bench: Bench) -> None:
    old = os.umask(0o022)
    try:
        bench.start("sh", "-c", "umask")
        ended = await bench.exited()
    finally:
        os.umask(old)
    assert isinstance(ended, Exited)
    assert ended.log_lines == ("0022",)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be several users")
async def test_engine_is_not_started_where_another_user_owns_the_folder_of_logs(
    bench: Bench,
) -> None:
    """They could put a link in the place of a log, which is emptied."""
    logs = bench.root / "logs"
    logs.mkdir()
    victim = bench.root / "victim"
    victim.write_text("precious")
    (logs / "r1.log").symlink_to(victim)
    os.chown(logs, 12_345, -1)
    bench.start("sh", "-c", QUIET)
    exited = await bench.exited()
    assert "has started nothing" in exited.why
    assert any("another user's" in line for line in exited.log_lines)
    assert victim.read_text() == "precious"
    await bench.launcher.close()
