"""A server of vLLM that leads a process group of its own: its readiness, CPU time, log and end."""

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

from vllm_kvpool.direct_http import open_directly
from vllm_kvpool.errors import ConfigError
from vllm_kvpool.host_memory import text_of

START_LIMIT_S = 1800.0  # large weights come over a network
STOP_LIMIT_S = 20.0
POLL_S = 0.2
HEALTH_TIMEOUT_S = 2.0
REPORT_EVERY_S = 30.0
MAX_TAIL_LINES = 25
_TICKS = os.sysconf("SC_CLK_TCK")
_ERROR = re.compile(r"\b[A-Z]\w*(?:Error|Exception): ")


class EngineFailed(ConfigError):
    """An engine ended, or does not answer; the text has the end of its log."""


class EngineServer:
    """A running server and all processes of its group, on this host.

    The group's id is that of its first process; `is_running` says whether that process lives, and
    reaps it once it has ended.
    """

    start_limit_s = START_LIMIT_S

    def __init__(self, pid: int, is_running: Callable[[], bool], url: str, log: Path) -> None:
        self.url = url
        self._pid = pid
        self._is_running = is_running
        self._log = log

    def wait_ready(self, on_wait: Callable[[float], None] = lambda _: None) -> None:
        """Wait until the server answers. Blocks; calls `on_wait` now and then with the seconds.

        Raises:
            EngineFailed: The server ended, or did not answer within `start_limit_s`.
        """
        began, report_s = time.monotonic(), REPORT_EVERY_S
        while not self._answers():
            waited_s = time.monotonic() - began
            if not self._is_running():
                raise self.failure("the engine ended while it started")
            if waited_s > self.start_limit_s:
                raise self.failure(f"the engine did not answer within {self.start_limit_s:g} s")
            if waited_s > report_s:
                on_wait(waited_s)
                report_s += REPORT_EVERY_S
            time.sleep(POLL_S)

    def _answers(self) -> bool:
        with (
            contextlib.suppress(OSError),
            open_directly(f"{self.url}/health", HEALTH_TIMEOUT_S) as answer,
        ):
            return answer.status == 200
        return False

    def failure(self, what: str) -> EngineFailed:
        """Return the error that says what happened, the first error in the log, and its end."""
        lines = self._log.read_text(errors="replace").splitlines()
        first = next((line.strip() for line in lines if _ERROR.search(line)), "none")
        tail = "\n".join(lines[-MAX_TAIL_LINES:])
        return EngineFailed(f"{what}. The end of its log:\n{tail}\nFirst error in it: {first}")

    def cpu_seconds(self) -> float:
        """Return the processor time of the group's processes and of their children that ended."""
        return group_cpu_seconds(self._pid)

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to all processes of the group that live."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, number)

    def stop(self) -> None:
        """Ask the server to end, then kill what is left of the group after `STOP_LIMIT_S`.

        An exception that arrives meanwhile, such as a second Ctrl-C, kills the group at once.
        """
        try:
            if self._is_running():
                os.kill(self._pid, signal.SIGTERM)
            self._wait_end()
        finally:
            self.kill()

    def kill(self) -> None:
        """Kill all processes of the group, as a crash would, and wait for the first one's end."""
        self.send_signal(signal.SIGKILL)
        self._wait_end()

    def _wait_end(self) -> None:
        deadline = time.monotonic() + STOP_LIMIT_S
        while self._is_running() and time.monotonic() < deadline:
            time.sleep(POLL_S / 4)


def group_cpu_seconds(group: int) -> float:
    """Return the processor time of a process group, with that of children that ended."""
    total = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        fields = text_of(stat).rpartition(")")[2].split()
        if fields and int(fields[2]) == group:
            total += sum(map(int, fields[11:15]))
    return total / _TICKS
