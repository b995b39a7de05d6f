"""`make up` as a newcomer runs it: a load of `vllm bench serve`, Ctrl-C; SIGTERM; a second one."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.deployment import running
from tests.support.engine_control import is_running
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
UP_LIMIT_S = 300.0
LOAD_LIMIT_S = 120.0
STOP_LIMIT_S = 90.0
PNG = b"\x89PNG\r\n"


class Up:
    """`examples/07_router.py` with one engine of each role, in a directory of its own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._log = directory / "up.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(ROOT / "examples/07_router.py"), "--prefill=1", "--decode=1"],
                cwd=directory,
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
                start_new_session=True,
                # Where the tests run in the background of a script it would be ignored.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )

    def said(self) -> str:
        return self._log.read_text()

    def wait_until_it_says(self, words: str) -> None:
        deadline = time.monotonic() + UP_LIMIT_S
        while words not in self.said():
            assert self._process.poll() is None, self.said()
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.2)

    def engines(self) -> list[int]:
        """Return the engines' process ids."""
        return [*running(self.directory / "up").values()]

    def interrupt(self, number: signal.Signals = signal.SIGINT) -> int:
        """Send Ctrl-C or another signal, and return the exit status."""
        self._process.send_signal(number)
        return self._process.wait(STOP_LIMIT_S)

    def end(self) -> None:
        """End the deployment; kill its processes if an interrupt does not end them."""
        if self._process.poll() is not None:
            return
        try:
            self.interrupt()
        except subprocess.TimeoutExpired:
            for pid in (*self.engines(), self._process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._process.wait()


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Up]:
    started = Up(tmp_path)
    yield started
    started.end()


def test_a_newcomers_deployment_and_load(up: Up) -> None:
    up.wait_until_it_says("Ctrl-C here ends everything")
    addresses = dict(
        line.split("=", 1) for line in (up.directory / "up/addresses.sh").read_text().split()
    )
    # What it says, with a smaller load: of options given twice the last one counts.
    command, _, _ = up.said().partition("a load:")[2].partition("its record:")
    command = command.strip() + " --random-input-len 100 --random-output-len 8"
    command += " --num-prompts 24 --request-rate 6 --save-result"
    record = [sys.executable, str(ROOT / "examples/08_router_record.py"), addresses["ADMIN"]]
    with subprocess.Popen([*record, "--token-file=up/token"], cwd=up.directory) as recorder:
        load = subprocess.run(
            ["sh", "-c", command],
            cwd=up.directory,
            capture_output=True,
            text=True,
            timeout=LOAD_LIMIT_S,
        )
        recorder.send_signal(signal.SIGINT)
    assert load.returncode == 0, load.stderr
    kept = json.loads(next(up.directory.glob("*.json")).read_bytes())
    assert kept["completed"] == 24, load.stdout
    recorded = (up.directory / "router.jsonl").read_text()
    states = [json.loads(line) for line in recorded.splitlines()]
    assert len(states[-1]["replicas"]) == 2
    assert (up.directory / "router.png").read_bytes().startswith(PNG)
    pids = up.engines()
    assert len(pids) == 2
    assert up.interrupt() == 0, up.said()
    assert not list(filter(is_running, pids))


def test_sigterm_while_it_starts_ends_all_that_it_has_started(up: Up) -> None:
    up.wait_until_it_says("engine prefill-")
    second = subprocess.run(
        [sys.executable, str(ROOT / "examples/07_router.py")],
        cwd=up.directory,
        capture_output=True,
        text=True,
        timeout=LOAD_LIMIT_S,
    )
    assert second.returncode == 1
    assert "runs already" in second.stderr
    wait_until(lambda: up.engines(), UP_LIMIT_S, pause_s=0.1)
    router = int((up.directory / "up/router.pid").read_text())
    assert up.interrupt(signal.SIGTERM) == 128 + signal.SIGTERM, up.said()
    assert not Path(f"/proc/{router}").exists()
    directory = str(up.directory / "up")
    left = [each for each in Path("/proc").glob("[0-9]*") if _directory_of(each) == directory]
    assert not left, left


def _directory_of(process: Path) -> str:
    try:
        return os.readlink(process / "cwd")
    except OSError:
        return ""
