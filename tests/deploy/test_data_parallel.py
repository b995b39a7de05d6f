"""Two data-parallel engines behind one server share the pool, and their files lie side by side.

A server with two engines takes a minute to start; `make test-deploy` runs this.
"""

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.deploy.server import Server
from tests.e2e.pool import files, pool, tokens
from tests.support.deployment import MODEL
from tests.support.models import TEXT_VOCAB, LlamaShape, add_tokenizer, make_model

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(900)]

CHUNK = 64
ENGINES = 2
ANSWER_LIMIT_S = 60.0
STATS_LIMIT_S = 20.0


@dataclass(frozen=True)
class Deployed:
    server: Server
    stats: Path

    def complete(self, engine: int, ids: list[int], **wish: Any) -> dict[str, Any]:
        """Return the answer of one engine; `wish` are the request's options for the pool."""
        answer = httpx.post(
            f"{self.server.url}/v1/completions",
            json={
                **{"model": MODEL, "prompt": ids, "max_tokens": 4, "temperature": 0},
                **{"logprobs": 5, "ignore_eos": True},
                **({"kv_transfer_params": {"kvpool": wish}} if wish else {}),
            },
            headers={"X-data-parallel-rank": str(engine)},
            timeout=ANSWER_LIMIT_S,
        )
        assert answer.status_code == 200, answer.text
        return dict(answer.json())


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    directory = tmp_path_factory.mktemp("data-parallel")
    model = make_model(directory / "models", LlamaShape(vocab=TEXT_VOCAB))
    add_tokenizer(model)
    stats = directory / "stats"
    transfer = pool(files(directory / "pool"), chunk_tokens=CHUNK, stats_file=str(stats))
    args = ("--data-parallel-size", str(ENGINES))
    with Server(model, json.dumps(transfer), directory / "server.log", args) as server:
        yield Deployed(server, stats)


def cached(answer: dict[str, Any]) -> int:
    details = answer["usage"]["prompt_tokens_details"]
    return int(details["cached_tokens"]) if details else 0


def logprobs(answer: dict[str, Any]) -> list[float]:
    return list(answer["choices"][0]["logprobs"]["token_logprobs"])


def test_one_engine_reads_what_another_has_written(deployed: Deployed) -> None:
    ids = tokens(seed=1, count=4 * CHUNK + 20, vocab=TEXT_VOCAB)
    written = deployed.complete(0, ids)
    assert cached(written) == 0
    read = deployed.complete(1, ids, expect_tokens=4 * CHUNK, expect_timeout_ms=20_000)
    assert cached(read) == 4 * CHUNK
    assert read["choices"][0]["text"] == written["choices"][0]["text"]
    assert logprobs(read) == pytest.approx(logprobs(written), abs=2e-3)


def test_without_the_pool_they_have_nothing_of_each_other(deployed: Deployed) -> None:
    """The two ranks are separate engines: neither has the other's prefix cache."""
    ids = tokens(seed=2, count=4 * CHUNK + 20, vocab=TEXT_VOCAB)
    assert cached(deployed.complete(0, ids)) == 0
    assert cached(deployed.complete(1, ids, load=False)) == 0
    assert cached(deployed.complete(0, ids, load=False)) == 4 * CHUNK


def test_each_engine_counts_in_files_of_its_own(deployed: Deployed) -> None:
    for engine in range(ENGINES):
        deployed.complete(engine, tokens(seed=10 + engine, count=2 * CHUNK, vocab=TEXT_VOCAB))
    names = {
        f"{deployed.stats.name}.kv.{kind}.{n}" for kind in ("scheduler", "worker") for n in (0, 1)
    }
    deadline = time.monotonic() + STATS_LIMIT_S
    while not names <= (found := set(os.listdir(deployed.stats.parent))):
        assert time.monotonic() < deadline, found
        time.sleep(0.1)
