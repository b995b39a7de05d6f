"""A real `mooncake_master` on loopback for tests and benchmarks."""

import os
import signal
import subprocess
import time

from tests.support.server_process import (
    HOST,
    POLL_S,
    STOP_TIMEOUT_S,
    ServerProcess,
    free_port,
)

__all__ = ["HOST", "MooncakeMaster", "free_port"]


class MooncakeMaster(ServerProcess):
    """`with MooncakeMaster() as master:` runs one; `master.address` is `host:port`."""

    program = "mooncake_master"
    start_timeout_s = 20.0

    def __init__(self, *, lease_ms: int = 10_000) -> None:
        super().__init__()
        self._lease_ms = lease_ms

    @property
    def address(self) -> str:
        return f"{HOST}:{self.port}"

    def arguments(self) -> list[str]:
        return [
            f"--rpc_port={self.port}",
            f"--rpc_address={HOST}",
            f"--metrics_port={free_port()}",
            f"--metrics_host={HOST}",
            f"--default_kv_lease_ttl={self._lease_ms}",
        ]

    def pause(self) -> None:
        """Freeze the master: it accepts connections and never answers."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        # A thread of the master on another core may answer one more call before it stops.
        deadline = time.monotonic() + STOP_TIMEOUT_S
        how = os.WSTOPPED | os.WNOHANG
        while os.waitid(os.P_PID, self._process.pid, how) is None:
            if time.monotonic() > deadline:
                raise RuntimeError("the master does not stop")
            time.sleep(POLL_S)

    def resume(self) -> None:
        """Undo `pause`."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """Let the master shut down regularly, if it runs."""
        if self._process is None:
            return
        self.resume()
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
        self._process = None
