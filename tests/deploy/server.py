"""A vLLM server as a separate process."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

import httpx

from tests.support.deployment import ENGINE_ARGS
from tests.support.server_process import HOST, free_ports

START_LIMIT_S = 300.0
STOP_LIMIT_S = 60.0


class Server:
    """A `vllm serve` process; its engines end with it. `python` is its release's interpreter."""

    def __init__(
        self,
        model: Path,
        transfer: str,
        log: Path,
        args: Sequence[str] = (),
        python: Path = Path(sys.executable),
        env: Mapping[str, str] | None = None,
        program: Sequence[str] = ("-m", "vllm.entrypoints.openai.api_server"),
    ) -> None:
        (port,) = free_ports(1)
        self.url = f"http://{HOST}:{port}"
        self._log = log
        command = [
            *(str(python), *program, "--model", str(model)),
            *("--host", HOST, "--port", str(port), *ENGINE_ARGS),
            *("--kv-transfer-config", transfer, *args),
        ]
        own = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                stdout=output,
                stderr=output,
                env={**os.environ, **own, "TORCH_COMPILE_DISABLE": "1", **(env or {})},
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """PID of the server; its child processes are the engines."""
        return self._process.pid

    def log(self) -> str:
        """Return the server's output so far."""
        return self._log.read_text()

    def __enter__(self) -> Self:
        deadline = time.monotonic() + START_LIMIT_S
        while not self._is_up():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.end()
                raise AssertionError(self._log.read_text()[-6000:])
            time.sleep(0.2)
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(STOP_LIMIT_S)
        finally:
            self.end()

    def _is_up(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{self.url}/health", verify=False).status_code == 200
        return False

    def end(self) -> None:
        """Kill whatever is left of its process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(STOP_LIMIT_S)
