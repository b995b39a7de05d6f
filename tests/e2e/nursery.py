"""Processes for engines: a new Python, or one forked from a process that has imported vLLM.

The imports of vLLM and of the pool are most of an engine's start: 10 s of a core, of 12. Forked
engines share them, and fork their ranks. An engine whose environment has what Python and native
libraries read as they start (`FRESH`) is a new one, and so are its ranks.
"""

import atexit
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO

NURSERY_CHILD = Path(__file__).with_name("nursery_child.py")
FRESH = ("PYTHON", "LD_", "OMP_", "MKL_", "TORCH")
STOP_TIMEOUT_S = 20.0


class NurseryError(AssertionError):
    """The process that was to fork has ended, or did not answer in time."""


class Forked:
    """An engine's process: of `subprocess.Popen`, what `Engine` uses."""

    def __init__(self, pid: int, stdin: IO[bytes], status_fd: int) -> None:
        self.pid = pid
        self.stdin = stdin
        self._status_fd = status_fd
        self._status: int | None = None

    def poll(self) -> int | None:
        """Return the exit status, or None while the process lives."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self._status

    def wait(self, timeout_s: float) -> int:
        """Return the exit status; raises `subprocess.TimeoutExpired`."""
        if self._status is None:
            if not select.select([self._status_fd], [], [], timeout_s)[0]:
                raise subprocess.TimeoutExpired(f"engine {self.pid}", timeout_s)
            # Nothing where the nursery itself was killed: then nobody knows.
            self._status = int(os.read(self._status_fd, 16) or -signal.SIGKILL)
            os.close(self._status_fd)
        return self._status


class Nursery:
    """Owns the forking process of one Python. Not thread-safe."""

    def __init__(self, python: Path, env: Mapping[str, str], log: IO[bytes]) -> None:
        """Start it; what it prints before it forks goes to `log`."""
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [str(python), str(NURSERY_CHILD), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=dict(env),
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def fork(self, env: Mapping[str, str], log: IO[bytes], replies: int, deadline: float) -> Forked:
        """Return a new engine's process, at the latest at `deadline` (monotonic seconds)."""
        stdin_read, stdin_write = os.pipe()
        status_read, status_write = os.pipe()
        try:
            ends = [stdin_read, log.fileno(), replies, status_write]
            socket.send_fds(self._orders, [json.dumps(dict(env)).encode()], ends)
            pid = self._answer(deadline)
        except (OSError, NurseryError) as error:
            os.close(stdin_write)
            os.close(status_read)
            raise NurseryError(f"no process could be forked: {error}") from error
        finally:
            os.close(stdin_read)
            os.close(status_write)
        return Forked(pid, os.fdopen(stdin_write, "wb"), status_read)

    def _answer(self, deadline: float) -> int:
        left_s = max(0.0, deadline - time.monotonic())
        if not select.select([self._orders], [], [], left_s)[0]:
            self.close()
            raise NurseryError("vLLM was not imported in time")
        answer = self._orders.recv(32)
        if not answer:
            raise NurseryError("the process that imports vLLM has ended")
        return int(answer)

    def close(self) -> None:
        """End it; engines that it forked live on until their input ends."""
        self._orders.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_TIMEOUT_S)
        self._process.kill()
        self._process.wait(STOP_TIMEOUT_S)


_nurseries: dict[Path, Nursery] = {}


def nursery_of(python: Path, env: Mapping[str, str], log: IO[bytes]) -> Nursery:
    """Return this process's nursery of engines under one Python; ends as this process does."""
    nursery = _nurseries.get(python)
    if nursery is None or not nursery.alive:
        nursery = _nurseries[python] = Nursery(python, env, log)
        atexit.register(nursery.close)
    return nursery


def needs_new_python(env: Mapping[str, str]) -> bool:
    """Whether an engine that is given these variables cannot be forked."""
    return any(name.startswith(FRESH) for name in env)
