"""A real `mooncake_master` on loopback for tests and benchmarks.

Owns one child process, which is killed at the end of the `with` and, where `setpriv` exists, also
when the thread that started it dies.
"""

import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import IO, Self

START_ATTEMPTS = 3  # a free port may be taken before the master binds it
START_TIMEOUT_S = 20.0
STOP_TIMEOUT_S = 5.0
POLL_S = 0.02
HOST = "127.0.0.1"


def free_port() -> int:
    """A port of the loopback that was free a moment ago."""
    with socket.create_server((HOST, 0)) as server:
        port: int = server.getsockname()[1]
        return port


class MooncakeMaster:
    """`with MooncakeMaster() as master:` runs one; `master.address` is `host:port`."""

    def __init__(self, *, lease_ms: int = 10_000) -> None:
        self.port = 0
        self._lease_ms = lease_ms
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by __exit__

    @property
    def address(self) -> str:
        return f"{HOST}:{self.port}"

    def __enter__(self) -> Self:
        for _ in range(START_ATTEMPTS):
            self.port = free_port()
            if self.start():
                return self
        raise RuntimeError(f"mooncake_master does not start:\n{self.log()}")

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()
        self._log.close()

    def start(self) -> bool:
        """Run the master on `port`, again after `kill`; False if it does not come up."""
        assert self._process is None
        command = [
            str(Path(sys.executable).with_name("mooncake_master")),
            f"--rpc_port={self.port}",
            f"--rpc_address={HOST}",
            f"--metrics_port={free_port()}",
            f"--metrics_host={HOST}",
            f"--default_kv_lease_ttl={self._lease_ms}",
        ]
        if setpriv := shutil.which("setpriv"):
            command = [setpriv, "--pdeathsig", "KILL", "--", *command]
        self._process = subprocess.Popen(command, stdout=self._log, stderr=self._log)
        deadline = time.monotonic() + START_TIMEOUT_S
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
        """`kill -9`."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(STOP_TIMEOUT_S)
        self._process = None

    def pause(self) -> None:
        """Freeze the master: it accepts connections and never answers."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Undo `pause`."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """End the master, if it runs."""
        if self._process is None:
            return
        self.resume()
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
        self._process = None

    def log(self) -> str:
        """What the master has said."""
        self._log.seek(0)
        return self._log.read().decode(errors="replace")
