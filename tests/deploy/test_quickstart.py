"""README's quickstart, run as written: two servers, two requests, and the expected output."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.support.deployment import LEAN_SERVER
from tests.support.metrics_page import wait_for_metrics
from tests.support.models import LlamaShape, add_tokenizer, make_model
from tests.support.server_process import free_ports
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
START_LIMIT_S = 300.0
LIMIT_S = 60.0
MODEL = "Qwen/Qwen3-0.6B"
PORTS = ("8000", "8002")
SAVED = "vllm:kvpool_saved_tokens_total"


def section() -> dict[str, list[str]]:
    """Return the quickstart's fenced blocks by language."""
    text = (ROOT / "README.md").read_text()
    part = re.search(r"^## Quickstart.*?(?=^## )", text, re.DOTALL | re.MULTILINE)
    assert part is not None
    blocks: dict[str, list[str]] = {}
    for language, block in re.findall(r"^```(\w+)\n(.*?)^```$", part[0], re.DOTALL | re.MULTILINE):
        blocks.setdefault(language, []).append(block)
    return blocks


class Quickstart:
    """The two servers of README on free ports, started by README's own commands."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        _, *self._serve, self._requests = section()["bash"]
        self._ports = dict(zip(PORTS, map(str, free_ports(2)), strict=True))
        model = make_model(directory / "models", LlamaShape(vocab=1024))
        add_tokenizer(model, 1024)
        program = directory / "bin" / "vllm"
        program.parent.mkdir()
        # A small model under the name of README's model. `shift 2` drops `serve` and the name.
        program.write_text(
            f'#!/bin/bash\nshift 2\nexec {sys.executable} -P {LEAN_SERVER} --model {model} "$@" '
            f"--served-model-name {MODEL} --dtype float32 --max-model-len 2048 --enforce-eager "
            f"--kv-cache-memory-bytes 67108864\n"
        )
        program.chmod(0o755)
        self._env = {
            **os.environ,
            "PATH": f"{program.parent}:{os.environ['PATH']}",
            "XDG_CACHE_HOME": str(directory / "cache"),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "TORCH_COMPILE_DISABLE": "1",
            "VLLM_LOG_STATS_INTERVAL": "1",
        }
        self.logs = [directory / f"{port}.log" for port in PORTS]
        for command, log in zip(self._serve, self.logs, strict=True):
            stack.callback(self._stop, self._start(command, log))
        for port, log in zip(PORTS, self.logs, strict=True):
            wait(lambda port=port: self._is_up(port), START_LIMIT_S, log)  # type: ignore[misc]

    def url(self, port: str) -> str:
        return f"http://localhost:{self._ports[port]}"

    def request(self, line: int) -> str:
        """Run the block's assignment and one of its `curl`s; return the answer."""
        prompt, *curls = self._requests.splitlines()
        script = self._on_free_ports(f"{prompt}\n{curls[line]}\n")
        done = subprocess.run(
            ["bash", "-c", script], env=self._env, capture_output=True, text=True, timeout=LIMIT_S
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def _on_free_ports(self, script: str) -> str:
        for port, free in self._ports.items():
            script = re.sub(rf"(--port |localhost:){port}\b", rf"\g<1>{free}", script)
        return script

    def _start(self, command: str, log: Path) -> subprocess.Popen[bytes]:
        script = "exec " + self._on_free_ports(command)
        with log.open("wb") as output:
            return subprocess.Popen(
                ["bash", "-c", script], env=self._env, stdout=output, stderr=output
            )

    @staticmethod
    def _stop(process: subprocess.Popen[bytes]) -> None:
        process.terminate()
        process.wait(LIMIT_S)

    def _is_up(self, port: str) -> bool:
        try:
            return httpx.get(f"{self.url(port)}/health").status_code == 200
        except httpx.TransportError:
            return False


def wait(condition, limit_s: float, log: Path) -> None:  # type: ignore[no-untyped-def]
    """Poll until the condition holds; fail with the log's end after `limit_s` seconds."""
    wait_until(condition, limit_s, what=lambda: log.read_text()[-4000:], pause_s=0.2)


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Quickstart]:
    assert shutil.which("curl")
    with ExitStack() as stack:
        yield Quickstart(tmp_path_factory.mktemp("quickstart"), stack)


def test_quickstart_second_server_shows_the_hit_as_documented(quickstart: Quickstart) -> None:
    answers, [log_line] = (block.splitlines() for block in section()["text"])
    assert answers[0] in quickstart.request(0)
    wait_for_metrics(quickstart.url(PORTS[0]), lambda page: page.total(SAVED) >= 512)
    assert answers[1] in quickstart.request(1)
    wait(lambda: log_line in quickstart.logs[1].read_text(), LIMIT_S, quickstart.logs[1])
