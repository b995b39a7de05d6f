"""A server of the test environment as a child process on loopback.

Owns the process and kills it at the end of the `with`. Where `setpriv` exists, the process also
dies with the thread that started it. Its output is kept for error messages.
"""

import contextlib
import random
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Self

from tests.support.orphans import ending_with_parent

PORT_ATTEMPTS = 100
# Below the kernel's ephemeral ports and above the ports that Mooncake chooses by itself. A port
# that is free now therefore stays free until its server binds it.
PORTS = range(18_000, 32_000)
START_ATTEMPTS = 3  # a free port may be taken before the server binds it
STOP_TIMEOUT_S = 5.0
POLL_S = 0.02
HOST = "127.0.0.1"
_CHANCE = random.SystemRandom()  # forked processes must not choose the same ports


CONTAINER = (
    *("unshare", "--user", "--map-root-user", "--pid", "--fork"),
    *("--mount-proc", "--kill-child"),
)
"""Prefix that runs a command as process 1 of a PID namespace; requires user namespaces only."""


def free_ports(count: int) -> list[int]:
    """Return consecutive ports of the loopback that were free a moment ago."""
    for _ in range(PORT_ATTEMPTS):
        first = _CHANCE.choice(PORTS[:-count])
        with contextlib.ExitStack() as held:
            try:
                for port in range(first, first + count):
                    held.enter_context(socket.create_server((HOST, port)))
            except OSError:
                continue
            return list(range(first, first + count))
    raise RuntimeError(f"no {count} free ports that follow each other")


def free_port() -> int:
    """Return a port that was free a moment ago."""
    return free_ports(1)[0]


class ServerProcess:
    """A program of the environment, next to the Python interpreter, that listens at `port`."""

    program: str
    start_timeout_s: float

    def __init__(self) -> None:
        self.port = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by __exit__

    @property
    def pid(self) -> int:
        """Process id of the running server."""
        assert self._process is not None
        return self._process.pid

    def arguments(self) -> list[str]:
        """Return the program's arguments, which let it listen at `port`."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as undo:
            undo.callback(self._log.close)
            for _ in range(START_ATTEMPTS):
                self.port = free_port()
                if self._start_once():
                    undo.pop_all()
                    return self
            raise RuntimeError(f"{self.program} does not start:\n{self.log()}")

    def __exit__(self, *exc: object) -> None:
        self.stop()
        self._log.close()

    def start(self) -> bool:
        """Start the server on `port` after `kill`, without its data. Return False if it fails.

        The start is attempted several times: on a busy machine the kernel may refuse a thread.
        """
        return any(self._start_once() for _ in range(START_ATTEMPTS))

    def _start_once(self) -> bool:
        assert self._process is None
        program = str(Path(sys.executable).with_name(self.program))
        command = ending_with_parent([program, *self.arguments()])
        self._process = subprocess.Popen(command, stdout=self._log, stderr=self._log)
        deadline = time.monotonic() + self.start_timeout_s
        while self._process.poll() is None and time.monotonic() < deadline:
            try:
                socket.create_connection((HOST, self.port), timeout=1).close()
            except OSError:
                time.sleep(POLL_S)
            else:
                return True
        self.stop()
        return False

    def kill(self) -> None:
        """Kill the server with SIGKILL; its data is lost."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(STOP_TIMEOUT_S)
        self._process = None

    def stop(self) -> None:
        """End the server if it runs."""
        if self._process is not None:
            self.kill()

    def log(self) -> str:
        """Return the server's output."""
        self._log.seek(0)
        return self._log.read().decode(errors="replace")
