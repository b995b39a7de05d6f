"""README's quickstart, run as written: two servers, two requests, and the expected output."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.deployment import LEAN_SERVER
from tests.support.models import LlamaShape, add_tokenizer, make_model
from tests.support.server_process import free_ports
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
START_LIMIT_S = 300.0
LIMIT_S = 60.0
MODEL = "Qwen/Qwen3-0.6B"
PORTS = ("8000", "8002")


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

    def run_requests(self) -> list[str]:
        """Run the block of requests as pasted into a shell; return the answers."""
        script = self._on_free_ports(self._requests)
        done = subprocess.run(
            ["bash", "-c", script],
            env=self._env,
            capture_output=True,
            text=True,
            timeout=START_LIMIT_S,
        )
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout.splitlines()

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


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Quickstart]:
    assert shutil.which("curl")
    with ExitStack() as stack:
        yield Quickstart(tmp_path_factory.mktemp("quickstart"), stack)


def test_quickstart_second_server_shows_the_hit_as_documented(quickstart: Quickstart) -> None:
    expected, [log_line] = (block.splitlines() for block in section()["text"])
    answers = quickstart.run_requests()
    for answer, part in zip(answers, expected, strict=True):
        assert part in answer
    log = quickstart.logs[1]
    wait_until(lambda: log_line in log.read_text(), LIMIT_S, what=lambda: log.read_text()[-4000:])
