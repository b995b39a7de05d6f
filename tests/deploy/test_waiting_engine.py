"""An engine that waits for tokens of another one costs next to nothing, and holds up nobody."""

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.deploy.server import Server
from tests.e2e.pool import files, pool, tokens
from tests.support.deployment import MODEL
from tests.support.models import TEXT_VOCAB, LlamaShape, add_tokenizer, make_model
from vllm_kvpool.scheduler.pool_scheduler import STREAM_WAIT_S

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(600)]

CHUNK = 64
WAIT_S = 10.0
SETTLE_S = 1.5
LIMIT_S = 60.0
IDLE_SHARE = 0.05  # of a core, beside other tests; it was all of one
PROMPT = tokens(1, 10 * CHUNK, TEXT_VOCAB)


def ask(server: Server, prompt: list[int], **wish: object) -> float:
    """Send a prompt, and return the seconds until its only token."""
    began = time.monotonic()
    answer = httpx.post(
        f"{server.url}/v1/completions",
        json={
            **{"model": MODEL, "prompt": prompt, "max_tokens": 1, "temperature": 0},
            "kv_transfer_params": {"kvpool": wish},
        },
        timeout=LIMIT_S,
    )
    assert answer.status_code == 200, answer.text
    return time.monotonic() - began


def engine_seconds(server: Server) -> float:
    """Return the CPU seconds of the server's child processes."""
    children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
    ticks = 0
    for child in children:
        fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / 100


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Start a server without worker processes: vLLM's workers spin for a second after each step."""
    directory = tmp_path_factory.mktemp("waiting")
    model = make_model(directory / "models", LlamaShape(vocab=TEXT_VOCAB))
    add_tokenizer(model)
    transfer = json.dumps(pool(files(directory / "pool"), chunk_tokens=CHUNK))
    args = ("--distributed-executor-backend", "uni")
    with Server(model, transfer, directory / "server.log", args) as made:
        ask(made, tokens(2, CHUNK, TEXT_VOCAB))
        yield made


def test_waiting_engine_is_idle_and_takes_other_requests_at_once(server: Server) -> None:
    took: list[float] = []
    waiting = threading.Thread(
        target=lambda: took.append(
            ask(server, PROMPT, expect_tokens=len(PROMPT), expect_timeout_ms=int(WAIT_S * 1000))
        )
    )
    waiting.start()
    time.sleep(SETTLE_S)  # the first steps are over
    before, began = engine_seconds(server), time.monotonic()
    time.sleep(WAIT_S / 2)
    share = (engine_seconds(server) - before) / (time.monotonic() - began)
    others = [ask(server, tokens(3 + number, CHUNK, TEXT_VOCAB)) for number in range(3)]
    assert waiting.is_alive()
    waiting.join(LIMIT_S)
    assert took[0] >= WAIT_S
    assert share < IDLE_SHARE
    assert max(others) < STREAM_WAIT_S / 5
