"""A server's process group: it is waited for, and ends as a whole, whatever it does."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.http_answers import http_server
from tests.support.processes import session
from tests.support.waiting import wait_until
from vllm_kvpool.cli.common import engine_server
from vllm_kvpool.cli.common.engine_server import EngineFailed, EngineServer, group_cpu_seconds

NOBODY = "http://127.0.0.1:1"
END_LIMIT_S = 10.0


@contextlib.contextmanager
def started(script: str, log: Path, url: str = NOBODY) -> Iterator[EngineServer]:
    """A shell that has printed a line, which `script` must begin with, as a server."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["bash", "-c", f"echo begun; {script}"],
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        yield EngineServer(process.pid, lambda: process.poll() is None, url, log)
        wait_until(  # a killed process needs a moment
            lambda: not session(process.pid),
            END_LIMIT_S,
            "a process outlived the server",
        )
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_for_log(log: Path, words: str) -> None:
    wait_until(lambda: words in log.read_text())


@pytest.mark.parametrize(
    "script",
    ["sleep 100 & wait", "trap '' TERM; echo deaf; sleep 100", "sleep 100 & exec true"],
    ids=["ends when asked", "ignores SIGTERM", "has ended, its child has not"],
)
def test_stop_ends_every_process_of_the_group(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_server, "STOP_LIMIT_S", 0.5)
    with started(script, tmp_path / "log") as server:
        wait_for_log(tmp_path / "log", "deaf" if "deaf" in script else "begun")
        server.stop()


def test_stop_that_is_interrupted_kills_the_group_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with started("trap '' TERM; echo deaf; sleep 100", tmp_path / "log") as server:
        wait_for_log(tmp_path / "log", "deaf")
        interrupted = iter([KeyboardInterrupt])

        def sleep(_: float) -> None:
            for each in interrupted:
                raise each

        with monkeypatch.context() as patch:
            patch.setattr(engine_server.time, "sleep", sleep)
            with pytest.raises(KeyboardInterrupt):
                server.stop()


def test_wait_ready_of_a_server_that_ended_has_its_first_error_and_last_lines(
    tmp_path: Path,
) -> None:
    script = "echo 'x.ConfigError: no room'; seq 100; echo 'RuntimeError: see above'"
    with started(script, tmp_path / "log") as server, pytest.raises(EngineFailed) as failed:
        server.wait_ready()
    text = str(failed.value)
    assert text.startswith("the engine ended while it started. The end of its log:\n77\n")
    assert text.endswith("RuntimeError: see above\nFirst error in it: x.ConfigError: no room")


def test_wait_ready_of_a_silent_server_reports_and_ends_at_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    monkeypatch.setattr(engine_server, "REPORT_EVERY_S", 0.05)
    with started("sleep 100", tmp_path / "log") as server:
        server.start_limit_s = 0.3
        with pytest.raises(EngineFailed, match=r"did not answer within 0\.3 s"):
            server.wait_ready(waited.append)
        server.stop()
    assert all(0.05 < each < 1 for each in waited)
    assert waited


def test_wait_ready_ends_once_the_server_answers_well(tmp_path: Path) -> None:
    statuses = iter([503, 200])
    with (
        http_server(lambda path, body: (next(statuses), b"")) as url,
        started("sleep 100", tmp_path / "log", url) as server,
    ):
        server.wait_ready()
        server.stop()
    assert list(statuses) == []


def test_cpu_seconds_are_those_of_all_processes_of_the_group(tmp_path: Path) -> None:
    busy = "(for i in $(seq 300000); do :; done); echo done; sleep 100"
    with started(busy, tmp_path / "log") as server:
        wait_for_log(tmp_path / "log", "done")
        assert server.cpu_seconds() > 0.05
        server.stop()


def test_time_of_a_group_is_read_beside_a_process_of_any_name() -> None:
    """The kernel keeps 15 bytes of a name, so a character may be cut."""
    script = r"printf 'caf\351' > /proc/$$/comm; echo named; read"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(["bash", "-c", script], **pipes) as beside:
        assert beside.stdout is not None
        assert beside.stdout.readline() == b"named\n"
        assert group_cpu_seconds(os.getpgid(0)) > 0
        beside.communicate()
