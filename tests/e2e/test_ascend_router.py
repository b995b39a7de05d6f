"""Prefill and decode of the published vLLM-Ascend behind the router, with its guide's options.

Both are servers on the emulated NPU with the shipped configurations: `kv_producer` at TP 2,
`kv_consumer` at TP 1 with `recompute_scheduler_enable`. The consumer has few blocks, so its
scheduler gives requests back (`stop_reason` "recomputed") where others preempt, and the router goes
on with them. `make test-ascend` makes the environment.
"""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from tests.deploy.server import Server
from tests.e2e.compare import LOGPROB_TOLERANCE
from tests.e2e.conftest import EngineShelf
from tests.e2e.engine import Completion, EngineSpec, Prompt
from tests.e2e.pool import files, tokens
from tests.e2e.test_ascend import BLOCK, CHUNK, COUNT, FEW_BLOCKS, PYTHON, shipped
from tests.support.deployment import MODEL
from tests.support.metrics_page import wait_for_metrics
from tests.support.models import TEXT_VOCAB, LlamaShape, add_tokenizer, make_model
from tests.support.server_process import HOST, ServerProcess, free_port

pytestmark = [pytest.mark.e2e, pytest.mark.ascend, pytest.mark.timeout(900)]

ANSWER, LONG_ANSWER = 40, 300
CALL_TIMEOUT_S = 180.0
START_LIMIT_S = 60.0
HITS, RUNNING = "vllm:kvpool_hit_tokens_total", "vllm:num_requests_running"


class Router(ServerProcess):
    """`kvpool router` in front of a prefill and a decode engine."""

    program = "kvpool"
    start_timeout_s = START_LIMIT_S

    def __init__(self, directory: Path, prefill: str, decode: str) -> None:
        super().__init__()
        self._directory = directory
        self._replicas = {"prefill": prefill, "decode": decode}

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def arguments(self) -> list[str]:
        lines = [
            f'[front]\nlisten = "{HOST}:{self.port}"',
            f'[admin]\nlisten = "{HOST}:{free_port()}"\ntoken = "only-for-this-machine"',
            *(
                f'[[replicas]]\nid = "{role}"\nrole = "{role}"\nurl = "{url}"'
                for role, url in self._replicas.items()
            ),
        ]
        path = self._directory / "router.toml"
        path.write_text("\n".join(lines))
        return ["router", "--config", str(path)]


class Pair(NamedTuple):
    router: Router
    decode: Server
    model: Path


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    directory = tmp_path_factory.mktemp("pair")
    model = make_model(directory, LlamaShape(vocab=TEXT_VOCAB, kv_heads=2))
    add_tokenizer(model)

    def server(name: str, tp: int, *args: str) -> Server:
        config = shipped(f"ascend_{name}.yaml", files(directory / "pool"))
        return Server(
            model,
            json.dumps(config["kv-transfer-config"]),
            directory / f"{name}.log",
            (
                *("--tensor-parallel-size", str(tp), "--block-size", str(BLOCK["npu"])),
                *("--additional-config", json.dumps(config["additional-config"]), *args),
            ),
            PYTHON,
        )

    few = str(FEW_BLOCKS["num_gpu_blocks_override"])
    servers = [server("prefill", 2), server("decode", 1, "--num-gpu-blocks-override", few)]
    with ExitStack() as stack, ThreadPoolExecutor(len(servers)) as starts:
        prefill, decode = starts.map(stack.enter_context, servers)
        router = stack.enter_context(Router(directory, prefill.url, decode.url))
        yield Pair(router, decode, model)


def ask(url: str, prompt: Prompt) -> dict[str, Any]:
    body = {
        **{"model": MODEL, "prompt": list(prompt.ids), "max_tokens": prompt.max_tokens},
        **{"temperature": 0, "logprobs": 5, "ignore_eos": True, "return_token_ids": True},
    }
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=CALL_TIMEOUT_S)
    assert answer.status_code == 200, answer.text
    [choice] = answer.json()["choices"]
    assert isinstance(choice, dict)
    return choice


def same(choice: dict[str, Any], expected: Completion) -> None:
    assert choice["finish_reason"] == "length"
    assert choice["token_ids"] == expected.token_ids
    wanted = [
        step[token] for step, token in zip(expected.logprobs, expected.token_ids, strict=True)
    ]
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(wanted, abs=LOGPROB_TOLERANCE)


def prompts(seed: int, count: int) -> list[Prompt]:
    return [
        Prompt(ids=tokens(seed=seed + i, count=COUNT, vocab=TEXT_VOCAB), max_tokens=ANSWER)
        for i in range(count)
    ]


def test_what_prefill_computed_at_tp_2_decode_loads_at_tp_1(
    pair: Pair, engines: EngineShelf
) -> None:
    """Two prompts, since vLLM 0.23.0 may report the hits of a load with the next load's."""
    for prompt in prompts(seed=950, count=2):
        [expected] = engines.get(EngineSpec(model=pair.model)).generate(prompt)
        same(ask(pair.router.url, prompt), expected)
    hits = COUNT // CHUNK * CHUNK // BLOCK["npu"] * BLOCK["npu"]
    wait_for_metrics(pair.decode.url, lambda page: page.total(HITS) >= hits)


def test_a_request_that_decode_gives_back_goes_on(pair: Pair, engines: EngineShelf) -> None:
    """Direct requests hold the blocks, so the decode engine preempts the router's, the latest."""
    [mine, *others] = [replace(each, max_tokens=LONG_ANSWER) for each in prompts(960, 3)]
    [expected] = engines.get(EngineSpec(model=pair.model)).generate(mine)
    with ThreadPoolExecutor(len(others)) as clients:
        calls = [clients.submit(ask, pair.decode.url, each) for each in others]
        wait_for_metrics(
            pair.decode.url, lambda page: page.total(RUNNING) == len(others), limit_s=START_LIMIT_S
        )
        same(ask(pair.router.url, mine), expected)
        for call in calls:
            call.result()
    assert "Recompute triggered" in pair.decode.log(), "no request was given back"
