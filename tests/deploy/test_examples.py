"""The examples that start engines, as their first lines say to run them."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.metrics_page import wait_for_metrics
from tests.support.models import TEXT_VOCAB, LlamaShape, add_tokenizer, make_model
from tests.support.mooncake_master import MooncakeMaster
from tests.support.server_process import free_port

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
LIMIT_S = 300.0
START_LIMIT_S = 500.0  # servers import vLLM beside whatever else there is to do
HITS = "vllm:kvpool_hit_tokens_total"
PROMPT = [7 * i * i % 251 + 5 for i in range(600)]
TINY = (
    *("--dtype", "float32", "--max-model-len", "1024", "--kv-cache-memory-bytes", "67108864"),
    *("--enforce-eager", "--served-model-name", "model"),
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    made = make_model(tmp_path, LlamaShape(kv_heads=2, vocab=TEXT_VOCAB))
    add_tokenizer(made)
    return made


@contextlib.contextmanager
def running(log: Path, *command: str, **environment: str) -> Iterator["subprocess.Popen[bytes]"]:
    """A command and all that it starts, ended in order."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=out,
            env={**os.environ, **environment},
            start_new_session=True,
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)


def ask(port: int, **options: object) -> dict[str, Any]:
    body = {"model": "model", "prompt": PROMPT, "max_tokens": 4, "temperature": 0, **options}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
        decoded: dict[str, Any] = json.loads(answer.read())
    return decoded


def wait_until_up(ports: Iterable[int], process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    for port in ports:
        while not is_up(port):
            assert process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < deadline, log.read_text()[-4000:]
            time.sleep(0.5)


def is_up(port: int) -> bool:
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
    except OSError:
        return False
    return True


def test_two_servers_of_different_parallelism_share(tmp_path: Path, model: Path) -> None:
    """`02_vllm_embedded.sh MODEL`, whose servers take the ports 8001 and 8002."""
    log = tmp_path / "log"
    with running(
        log,
        *("bash", str(EXAMPLES / "02_vllm_embedded.sh"), str(model), *TINY),
        PYTHON=sys.executable,
        XDG_CACHE_HOME=str(tmp_path),
        VLLM_CPU_OMP_THREADS_BIND="0|1",
    ) as process:
        wait_until_up((8001, 8002), process, log)
        first = ask(8001)
        deadline = time.monotonic() + LIMIT_S
        until_saved = {"kvpool": {"expect_tokens": 512, "expect_timeout_ms": 20_000}}
        second = ask(8002, kv_transfer_params=until_saved)
        assert second["choices"][0]["text"] == first["choices"][0]["text"]
        while "hit_tokens=512" not in (text := log.read_text()):
            assert time.monotonic() < deadline, text[-4000:]
            time.sleep(0.5)


def mooncake_config(role: str, master: str) -> str:
    """A configuration of `03_mooncake`, changed as its README says for one machine."""
    text = (ROOT / "configs" / f"mooncake_{role}.json").read_text()
    for written, own in (
        ("10.0.0.1:50051", master),
        ("protocol=rdma", "protocol=tcp"),
        ("segment=16GiB", "segment=256MiB"),
    ):
        assert written in text
        text = text.replace(written, own)
    return text


def test_prefill_and_decode_over_mooncake(tmp_path: Path, model: Path) -> None:
    """`03_mooncake/README.md`: its doctor, its engines at TP 2 and 1, and what its proxy does."""
    with contextlib.ExitStack() as stack:
        master = stack.enter_context(MooncakeMaster())
        ports = {}
        for role, tp in (("prefill", 2), ("decode", 1)):
            config = mooncake_config(role, master.address)
            ports[role] = free_port()
            log = tmp_path / f"{role}.log"
            server = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
            options = ["--model", str(model), "--port", str(ports[role]), *TINY]
            options += ["--tensor-parallel-size", str(tp), "--kv-transfer-config", config]
            cores = "|".join(map(str, range(tp)))
            process = stack.enter_context(
                running(log, *server, *options, VLLM_CPU_OMP_THREADS_BIND=cores)
            )
            wait_until_up((ports[role],), process, log)
        doctor = [sys.executable, "-m", "vllm_kvpool", "doctor"]
        doctor += ["--kv-transfer-config", mooncake_config("prefill", master.address)]
        done = subprocess.run(doctor, capture_output=True, text=True, timeout=LIMIT_S)
        assert done.returncode == 0, done.stdout + done.stderr
        told = ask(ports["prefill"], max_tokens=1)["kv_transfer_params"]
        assert told["kvpool"]["tokens"] == 512
        answer = ask(ports["decode"], kv_transfer_params=told)
        assert answer["choices"][0]["text"] == ask(ports["prefill"])["choices"][0]["text"]
        url = f"http://127.0.0.1:{ports['decode']}"
        page = wait_for_metrics(url, lambda page: page.total(HITS) > 0)
        assert page.total(HITS) == 512


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
