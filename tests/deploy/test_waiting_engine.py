"""An engine that waits or is idle uses almost no processor time and delays no request."""

import json
import threading
import time
from collections.abc import Iterator
from statistics import median

import httpx
import pytest

from tests.deploy.server import Server
from tests.e2e.pool import files, pool, tokens
from tests.support.deployment import MODEL
from tests.support.models import TEXT_VOCAB, LlamaShape, add_tokenizer, make_model
from vllm_kvpool.cli.common.engine_server import group_cpu_seconds
from vllm_kvpool.scheduler.pool_scheduler import STREAM_WAIT_S

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(600)]

CHUNK = 64
WAIT_S = 10.0
SETTLE_S = 1.5
SAVES_END_S = 0.3  # after an answer
POLLED_S = 0.6  # from then on, in which vLLM's worker would poll
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


@pytest.fixture(scope="module", params=["uni", "mp"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """Start a server without worker processes, or with one."""
    directory = tmp_path_factory.mktemp("waiting")
    model = make_model(directory / "models", LlamaShape(vocab=TEXT_VOCAB))
    add_tokenizer(model)
    transfer = json.dumps(pool(files(directory / "pool"), chunk_tokens=CHUNK))
    args = ("--distributed-executor-backend", request.param)
    with Server(model, transfer, directory / "server.log", args) as made:
        ask(made, tokens(2, CHUNK, TEXT_VOCAB))
        yield made


def busy_share(server: Server, seconds: float) -> float:
    """Return the share of a core that the server's processes take for so long."""
    before, began = group_cpu_seconds(server.pid), time.monotonic()
    time.sleep(seconds)
    return (group_cpu_seconds(server.pid) - before) / (time.monotonic() - began)


def test_engine_sleeps_as_soon_as_its_saves_have_ended(server: Server) -> None:
    """A worker's process of vLLM polled for a second after each step.

    Two of three answers are followed by sleep. Other work of the machine may disturb the third.
    """
    shares = []
    for number in range(3):
        ask(server, tokens(20 + number, 10 * CHUNK, TEXT_VOCAB))
        time.sleep(SAVES_END_S)
        shares.append(busy_share(server, POLLED_S))
    assert median(shares) < IDLE_SHARE


def test_waiting_engine_is_idle_and_takes_other_requests_at_once(server: Server) -> None:
    took: list[float] = []
    waiting = threading.Thread(
        target=lambda: took.append(
            ask(server, PROMPT, expect_tokens=len(PROMPT), expect_timeout_ms=int(WAIT_S * 1000))
        )
    )
    waiting.start()
    time.sleep(SETTLE_S)  # the first steps are over
    share = busy_share(server, WAIT_S / 2)
    others = [ask(server, tokens(3 + number, CHUNK, TEXT_VOCAB)) for number in range(3)]
    assert waiting.is_alive()
    waiting.join(LIMIT_S)
    assert took[0] >= WAIT_S
    assert share < IDLE_SHARE
    assert max(others) < STREAM_WAIT_S / 5
