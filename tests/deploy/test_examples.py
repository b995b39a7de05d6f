"""The examples that start engines, as their first lines say to run them."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.support.models import TEXT_VOCAB, LlamaShape, add_tokenizer, make_model

pytestmark = pytest.mark.deploy

EXAMPLES = Path(__file__).parents[2] / "examples"
LIMIT_S = 300.0
PROMPT = [7 * i * i % 251 + 5 for i in range(600)]
TINY = (
    *("--dtype", "float32", "--max-model-len", "1024", "--kv-cache-memory-bytes", "67108864"),
    *("--enforce-eager", "--served-model-name", "model"),
)


def ask(port: int) -> dict[str, Any]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps({"model": "model", "prompt": PROMPT, "max_tokens": 4}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
        decoded: dict[str, Any] = json.loads(answer.read())
    return decoded


def wait_until_up(port: int, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + LIMIT_S
    while True:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
            return
        except (urllib.error.URLError, OSError):
            assert process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < deadline, log.read_text()[-4000:]
        time.sleep(0.5)


def test_two_servers_of_different_parallelism_share(tmp_path: Path) -> None:
    """`02_vllm_embedded.sh MODEL`, whose servers take the ports 8001 and 8002."""
    model = make_model(tmp_path, LlamaShape(kv_heads=2, vocab=TEXT_VOCAB))
    add_tokenizer(model)
    log = tmp_path / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            ["bash", str(EXAMPLES / "02_vllm_embedded.sh"), str(model), *TINY],
            stdout=out,
            stderr=out,
            env={
                **os.environ,
                "PYTHON": sys.executable,
                "XDG_CACHE_HOME": str(tmp_path),
                "VLLM_CPU_OMP_THREADS_BIND": "0|1",
            },
            start_new_session=True,
        )
        try:
            for port in (8001, 8002):
                wait_until_up(port, process, log)
            first = ask(8001)
            time.sleep(2.0)  # until it is saved
            deadline = time.monotonic() + LIMIT_S
            assert ask(8002)["choices"][0]["text"] == first["choices"][0]["text"]
            while "hit_tokens=512" not in (text := log.read_text()):
                assert time.monotonic() < deadline, text[-4000:]
                time.sleep(0.5)
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(60)


def test_embeddings_come_in_rounds() -> None:
    """`05_embeddings.py` without arguments."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "05_embeddings.py")],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "engine is up" in done.stdout
    assert "16 rows, 8192 bytes, through a window of 4KiB: 4 rounds" in done.stdout


@pytest.mark.parametrize("arguments", [(), ("--random",)], ids=["real", "random"])
def test_the_demo_has_the_same_answers_with_and_without_the_pool(
    arguments: tuple[str, ...],
) -> None:
    """`make demo`, which takes random weights where the package of the real ones cannot be had."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "demo.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=4 * LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the pool works" in done.stdout
    if "model: random weights" not in done.stdout:
        assert "The lighthouse has 168 steps." in done.stdout
