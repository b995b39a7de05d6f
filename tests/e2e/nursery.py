"""Processes for engines: a new Python, or one forked from a process that has imported vLLM.

The imports of vLLM and of the pool are most of an engine's start: 10 s of a core, of 12. Forked
engines share them, and fork their ranks. All processes of a run of pytest order from one nursery.
An engine whose environment has what Python and native libraries read as they start (`FRESH`) is a
new one, and so are its ranks.
"""

import atexit
import contextlib
import errno
import hashlib
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
RETRY_S = 0.02
FRESH = ("PYTHON", "LD_", "OMP_", "MKL_", "TORCH")


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
    """A connection to the forking process of one Python, which ends with the last of them.

    Not thread-safe.
    """

    def __init__(self, address: str, python: Path, env: Mapping[str, str], log: IO[bytes]) -> None:
        """Connect to the one at this address, a name without a file; start it where none is.

        What it prints before it forks goes to the `log` of whoever started it: `started` is its
        process there.
        """
        self.started: subprocess.Popen[bytes] | None = None
        self._orders = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        while not self._connect(address):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
                try:
                    listener.bind(address)
                except OSError as error:
                    if error.errno != errno.EADDRINUSE:
                        raise
                    time.sleep(RETRY_S)  # another process of the run has it, and listens soon
                    continue
                listener.listen()
                self.started = _start(python, env, log, listener)

    def _connect(self, address: str) -> bool:
        try:
            self._orders.connect(address)
        except ConnectionRefusedError:
            return False
        return True

    @property
    def alive(self) -> bool:
        """True if the forking process takes orders; a readable connection has been closed."""
        try:
            return not select.select([self._orders], [], [], 0)[0]
        except ValueError:  # closed
            return False

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
        """Order no more; engines that it forked live on until their input ends."""
        self._orders.close()


def _start(
    python: Path, env: Mapping[str, str], log: IO[bytes], listener: socket.socket
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [str(python), str(NURSERY_CHILD), str(listener.fileno())],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        env=dict(env),
        pass_fds=[listener.fileno()],
        start_new_session=True,
    )


# Those of one run of pytest, or of this process if it is alone, have this in common.
RUN = os.environ.get("PYTEST_XDIST_TESTRUNUID", f"{os.getpid()}")
_nurseries: dict[Path, Nursery] = {}


def nursery_of(python: Path, env: Mapping[str, str], log: IO[bytes]) -> Nursery:
    """Return this run's nursery of engines under one Python; ends as the run's processes do."""
    nursery = _nurseries.get(python)
    if nursery is None or not nursery.alive:
        if nursery is not None:
            _leave(nursery)
        address = f"\0kvpool-nursery-{RUN}-{hashlib.sha1(bytes(python)).hexdigest()}"
        nursery = _nurseries[python] = Nursery(address, python, env, log)
        atexit.register(_leave, nursery)
    return nursery


def _leave(nursery: Nursery) -> None:
    nursery.close()
    if nursery.started is not None and nursery.started.poll() is None:
        nursery.started.returncode = 0  # not waited for: others may order yet


def needs_new_python(env: Mapping[str, str]) -> bool:
    """Return True if an engine with these variables needs a new Python instead of a fork."""
    return any(name.startswith(FRESH) for name in env)
