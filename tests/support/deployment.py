"""A deployment on one machine: a `kvpool router` process and the engines that it starts.

Used by tests, the demonstration and measurements. Engines serve a tiny random model on CPU. The
output of the router and the engines goes to files in the deployment's directory.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import httpx

from tests.support import engine_control
from tests.support.models import TEXT_VOCAB, LlamaShape, add_tokenizer, make_model
from tests.support.server_process import free_ports

MODEL = "tiny"
TOKEN = "only-for-this-machine"
START_TIMEOUT_S = 400.0
STOP_TIMEOUT_S = 60.0
CALL_TIMEOUT_S = 60.0
POLL_S = 0.2
LOG_TAIL_CHARS = 4000
ENGINE_ARGS = (
    *("--served-model-name", MODEL, "--dtype", "float32", "--max-model-len", "2048"),
    *("--kv-cache-memory-bytes", "67108864", "--enforce-eager", "--block-size", "32"),
    *("--enable-prompt-tokens-details", "--disable-uvicorn-access-log"),
)
ENGINE_ENV = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
NO_COMPILER = {"TORCH_COMPILE_DISABLE": "1"}
LEAN_SERVER = Path(__file__).parents[1] / "deploy" / "lean_server.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentSpec:
    prefill: int = 1
    decode: int = 1
    chunk_tokens: int = 64
    engine_args: tuple[str, ...] = ENGINE_ARGS
    sections: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Options added to the router's configuration, section by section."""
    pool: Mapping[str, Any] = field(default_factory=dict)
    """More options of the engines' connector."""
    shares: bool = True
    """False: each engine has a file store of its own, like engines on different hosts."""
    is_lean: bool = False
    """Start engines faster: without the compiler, and with `lean_server.py`."""

    def server(self) -> tuple[str, ...]:
        """Return the command of an engine's server, without its arguments."""
        if self.is_lean:
            return sys.executable, "-P", str(LEAN_SERVER)
        return sys.executable, "-m", "vllm.entrypoints.openai.api_server"


class Deployment:
    """A router and its engines. `start` starts them, `stop` ends all of their processes."""

    def __init__(self, spec: DeploymentSpec, directory: Path) -> None:
        self.spec = spec
        self.directory = directory
        self.front = self.admin = ""
        self._process: subprocess.Popen[bytes] | None = None

    @classmethod
    def start(
        cls, spec: DeploymentSpec, directory: Path, say: Callable[[str], None] = lambda _: None
    ) -> Self:
        """Start the router and wait until all engines serve; pass progress messages to `say`."""
        self = cls(spec, directory)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            say("making a tiny model")
            model = make_model(directory / "models", LlamaShape(vocab=TEXT_VOCAB))
            add_tokenizer(model)
            front, admin, *ports = free_ports(2 + spec.prefill + spec.decode)
            self.front, self.admin = f"http://127.0.0.1:{front}", f"http://127.0.0.1:{admin}"
            self._write_config(model, front, admin, ports)
            self.start_router()
            say(f"the router has been started; its log: {directory / 'router.log'}")
            self.wait_for_engines(spec.prefill, spec.decode, say)
        except BaseException:
            self.stop()
            raise
        return self

    def start_router(self) -> None:
        """Start the router alone. It takes over engines that an earlier router has started."""
        log = (self.directory / "router.log").open("ab")
        command = [sys.executable, "-m", "vllm_kvpool", "router"]
        with log:
            self._process = subprocess.Popen(
                [*command, "--config", str(self.directory / "router.toml")],
                stdout=log,
                stderr=log,
                cwd=self.directory,
                env={**os.environ, **ENGINE_ENV, **(NO_COMPILER if self.spec.is_lean else {})},
            )

        (self.directory / "router.pid").write_text(str(self._process.pid))

    def kill_router(self) -> None:
        """Kill the router with SIGKILL; its engines keep running."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def kill_engine(self, replica: str) -> None:
        """Kill an engine and all of its processes with SIGKILL."""
        pid = self.engine_pid(replica)
        assert pid, f"{replica} does not run"
        _kill_group(pid)

    def engine_pid(self, replica: str) -> int:
        """Return the process id of an engine, or 0 if the engine does not run."""
        return self._pids().get(replica, 0)

    def _pids(self) -> dict[str, int]:
        """Return the process ids of the running engines, by replica."""
        return running(self.directory)

    def is_back(self, replica: str, killed: int, state: str) -> bool:
        """Return True if the replica is in `state` again, with a process other than `killed`."""
        is_another = self.engine_pid(replica) not in (0, killed)
        return is_another and self.states()[replica] == state

    def stop(self) -> None:
        """End the router, then the engines; kill a router that does not end in time."""
        process, self._process = self._process, None
        if process is not None and process.poll() is None:
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        with ThreadPoolExecutor() as threads:
            list(threads.map(engine_control.stop, (self.directory / "engines").glob("*.json")))

    def state(self) -> dict[str, Any]:
        """Return the router's `GET /state`."""
        answer = httpx.get(
            f"{self.admin}/state", headers=_AUTHORIZED, timeout=CALL_TIMEOUT_S, verify=False
        )
        answer.raise_for_status()
        found: dict[str, Any] = answer.json()
        return found

    def states(self) -> dict[str, str]:
        """Return the state of each replica."""
        return {each["id"]: each["state"] for each in self.state()["replicas"]}

    def order(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Send a request to the router's admin API and return the decoded answer."""
        answer = httpx.request(
            method, self.admin + path, json=body, headers=_AUTHORIZED, timeout=CALL_TIMEOUT_S
        )
        answer.raise_for_status()
        return answer.json()

    def wait_for_engines(
        self, prefill: int, decode: int, say: Callable[[str], None] = lambda _: None
    ) -> None:
        """Wait until these numbers of prefill and decode engines serve."""
        known: dict[str, str] = {}

        def are_up() -> bool:
            now = self.states()
            for replica, state in now.items():
                if known.get(replica) != state:
                    say(f"engine {replica}: {state}")
            known.update(now)
            states = list(now.values())
            return states.count("prefill") >= prefill and states.count("decode") >= decode

        self.wait(are_up, START_TIMEOUT_S)

    def wait(self, condition: Callable[[], bool], timeout_s: float) -> None:
        """Wait until a condition holds.

        Raises:
            RuntimeError: The router has ended, or the time is over. The text has the ends of all
                logs.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                if condition():
                    return
            except httpx.TransportError:
                pass
            process = self._process
            if time.monotonic() > deadline or process is None or process.poll() is not None:
                raise RuntimeError(f"the deployment does not get there\n{self.logs()}")
            time.sleep(POLL_S)

    def logs(self) -> str:
        """Return the ends of the logs of the router and the engines."""
        files = sorted(self.directory.glob("**/*.log"))
        return "\n".join(f"--- {each.name}\n{each.read_text()[-LOG_TAIL_CHARS:]}" for each in files)

    def _write_config(self, model: Path, front: int, admin: int, ports: Sequence[int]) -> None:
        spec = self.spec
        sections: dict[str, dict[str, Any]] = {
            "front": {"listen": f"127.0.0.1:{front}"},
            "admin": {"listen": f"127.0.0.1:{admin}", "token": TOKEN},
        }
        for name, more in spec.sections.items():
            sections.setdefault(name, {}).update(more)
        engines = self.directory / "engines"
        engines.mkdir()
        lines = [_table(f"[{name}]", values) for name, values in sections.items()]
        for number, port in enumerate(ports):
            role = "prefill" if number < spec.prefill else "decode"
            path = engines / f"{role}-{port}.json"
            path.write_text(json.dumps({"command": self._command(model, port)}))
            control = [sys.executable, engine_control.__file__]
            replica = {
                **{"id": path.stem, "url": f"http://127.0.0.1:{port}", "role": role},
                **{each: [*control, each, str(path)] for each in ("start", "stop")},
            }
            lines.append(_table("[[replicas]]", replica))
        (self.directory / "router.toml").write_text("\n".join(lines))

    def _command(self, model: Path, port: int) -> list[str]:
        """Return the command line of an engine."""
        spec = self.spec
        pool = "pool" if spec.shares else f"pool-{port}"
        extra = {
            **{"store": f"file://{self.directory}/{pool}?size=1GiB"},
            **{"chunk_tokens": spec.chunk_tokens, "save_decode": True, **spec.pool},
        }
        transfer = {
            **{"kv_connector": "KVPoolConnector", "kv_role": "kv_both"},
            "kv_connector_extra_config": extra,
        }
        return [
            *spec.server(),
            *("--model", str(model), "--host", "127.0.0.1", "--port", str(port)),
            *("--shutdown-timeout", "10", "--kv-transfer-config", json.dumps(transfer)),
            *spec.engine_args,
        ]


def running(directory: Path) -> dict[str, int]:
    """Return the process ids of a deployment's running engines, by replica."""
    pids = {
        path.stem: engine_control.pid_of(path) for path in (directory / "engines").glob("*.json")
    }
    return {name: pid for name, pid in pids.items() if engine_control.is_running(pid)}


_AUTHORIZED = {"Authorization": f"Bearer {TOKEN}"}


def _table(head: str, values: Mapping[str, Any]) -> str:
    # Strings, numbers, booleans and lists of them are written alike in TOML and JSON.
    return "\n".join([head, *(f"{name} = {json.dumps(value)}" for name, value in values.items())])


def _kill_group(pid: int) -> None:
    """Send SIGKILL to the process group of an engine."""
    try:
        os.killpg(os.getpgid(pid), signal.SIGKILL)
    except ProcessLookupError:
        return
