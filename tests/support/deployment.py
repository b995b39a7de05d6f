"""A deployment on one machine: `kvpool router` in a process of its own, engines that it starts.

For tests, the demonstration and measurements. Engines serve a tiny random model on CPU; what they
and the router print goes to files in the deployment's directory.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import httpx

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
    slots: int = 0
    """Engines that there is room for; 0: no more than those."""
    chunk_tokens: int = 64
    engine_args: tuple[str, ...] = ENGINE_ARGS
    sections: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Added to the router's configuration, section by section."""
    shares: bool = True
    """False: each engine keeps files of its own, as engines of different hosts do by default."""
    is_lean: bool = False
    """Engines start with half of the work: without the compiler, and see `lean_server.py`."""

    def server(self) -> tuple[str, ...]:
        """What starts an engine's server, without its arguments."""
        if self.is_lean:
            return sys.executable, "-P", str(LEAN_SERVER)
        return sys.executable, "-m", "vllm.entrypoints.openai.api_server"


class Deployment:
    """Started by `start`, ended by `stop`; nothing of it outlives `stop`."""

    def __init__(self, spec: DeploymentSpec, directory: Path) -> None:
        self.spec = spec
        self.directory = directory
        self.front = self.admin = ""
        self._process: subprocess.Popen[bytes] | None = None

    @classmethod
    def start(
        cls, spec: DeploymentSpec, directory: Path, say: Callable[[str], None] = lambda _: None
    ) -> Self:
        """Start everything, and wait until all engines serve; `say` is called with what goes on."""
        self = cls(spec, directory)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            say("making a tiny model")
            model = make_model(directory / "models", LlamaShape(vocab=TEXT_VOCAB))
            add_tokenizer(model)
            front, admin, first = free_ports(2 + max(spec.slots, spec.prefill + spec.decode))[:3]
            self.front, self.admin = f"http://127.0.0.1:{front}", f"http://127.0.0.1:{admin}"
            self._write_config(model, front, admin, first)
            self.start_router()
            say(f"the router has been started; its log: {directory / 'router.log'}")
            self.wait_for_engines(spec.prefill, spec.decode, say)
        except BaseException:
            self.stop()
            raise
        return self

    def start_router(self) -> None:
        """The router alone; it finds engines of a former one again."""
        log = (self.directory / "router.log").open("ab")
        command = [sys.executable, "-m", "vllm_kvpool.cli", "router"]
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
        """kill -9; engines go on."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def kill_engine(self, replica: str) -> None:
        """kill -9 of an engine and of all its processes."""
        pid = self.engine_pid(replica)
        assert pid, f"{replica} does not run"
        _kill_group(pid)

    def engine_pid(self, replica: str) -> int:
        """0 while there is none."""
        return self._pids().get(replica, 0)

    def _pids(self) -> dict[str, int]:
        """Of the engines that the router has recorded, those that have a process."""
        state = self.directory / "state/engines.json"
        records = json.loads(state.read_text())["engines"] if state.exists() else []
        files = {each["replica_id"]: Path(each["log_path"] + ".pid") for each in records}
        return {
            name: int(file.read_text().split()[1]) for name, file in files.items() if file.exists()
        }

    def is_back(self, replica: str, killed: int, state: str) -> bool:
        """Whether a process other than the one that was killed serves as that replica."""
        return self.states()[replica] == state and self.engine_pid(replica) != killed

    def stop(self) -> None:
        """End the router, which ends its engines; kill whatever is left."""
        process, self._process = self._process, None
        if process is not None and process.poll() is None:
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for pid in self._pids().values():
            _kill_group(pid)

    def state(self) -> dict[str, Any]:
        """The router's `GET /state`."""
        answer = httpx.get(
            f"{self.admin}/state", headers=_AUTHORIZED, timeout=CALL_TIMEOUT_S, verify=False
        )
        answer.raise_for_status()
        found: dict[str, Any] = answer.json()
        return found

    def states(self) -> dict[str, str]:
        """The state of each replica."""
        return {each["id"]: each["state"] for each in self.state()["replicas"]}

    def order(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """A request to the administration."""
        answer = httpx.request(
            method, self.admin + path, json=body, headers=_AUTHORIZED, timeout=CALL_TIMEOUT_S
        )
        answer.raise_for_status()
        return answer.json()

    def wait_for_engines(
        self, prefill: int, decode: int, say: Callable[[str], None] = lambda _: None
    ) -> None:
        """Until so many serve."""
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
        """Until a condition holds; RuntimeError with the ends of all logs if it does not."""
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
        """The ends of what all have printed."""
        files = sorted(self.directory.glob("**/*.log"))
        return "\n".join(f"--- {each.name}\n{each.read_text()[-LOG_TAIL_CHARS:]}" for each in files)

    def _write_config(self, model: Path, front: int, admin: int, first: int) -> None:
        spec = self.spec
        store = {"store": f"file://{self.directory}/pool?size=1GiB"} if spec.shares else {}
        extra = {**store, "chunk_tokens": spec.chunk_tokens, "save_decode": True}
        transfer = {
            **{"kv_connector": "KVPoolConnector", "kv_role": "kv_both"},
            "kv_connector_extra_config": extra,
        }
        own = f"KVPOOL_STORE=file://{self.directory}/pool-{{port}}?size=1GiB"
        command = [
            *(() if spec.shares else ("env", own)),
            *spec.server(),
            *("--model", "{model}", "--host", "{host}", "--port", "{port}"),
            *("--shutdown-timeout", "{shutdown_timeout_s}"),
            *("--kv-transfer-config", "{kv_transfer_config}", "{extra...}"),
        ]
        sections: dict[str, dict[str, Any]] = {
            "front": {"listen": f"127.0.0.1:{front}"},
            "admin": {"listen": f"127.0.0.1:{admin}", "token": TOKEN},
            "launch": {
                **{"model": str(model), "command": command, "args": list(spec.engine_args)},
                **{"kv_transfer_config": json.dumps(transfer), "stop_timeout_s": 20},
                **{"prefill": spec.prefill, "decode": spec.decode},
                **{"state_dir": "state", "keep_on_exit": False},
            },
        }
        for name, more in spec.sections.items():
            sections.setdefault(name, {}).update(more)
        hosts = {
            "name": "here",
            "max_replicas": max(spec.slots, spec.prefill + spec.decode),
            "first_port": first,
        }
        lines = [_table(f"[{name}]", values) for name, values in sections.items()]
        text = "\n".join([*lines, _table("[[hosts]]", hosts)])
        (self.directory / "router.toml").write_text(text)


_AUTHORIZED = {"Authorization": f"Bearer {TOKEN}"}


def _table(head: str, values: Mapping[str, Any]) -> str:
    # Strings, numbers, booleans and lists of them are the same in TOML as in JSON.
    return "\n".join([head, *(f"{name} = {json.dumps(value)}" for name, value in values.items())])


def _kill_group(pid: int) -> None:
    """SIGKILL to an engine and all that it has started."""
    try:
        os.killpg(os.getpgid(pid), signal.SIGKILL)
    except ProcessLookupError:
        return
