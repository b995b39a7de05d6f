"""Servers of vLLM and conversations with them, timed as `vllm bench serve` times its requests.

A `Server` is a process of `vllm serve` on one core. `Load` is the conversations of one rate: each
begins at its moment, whatever the servers do, and goes from one to the other turn by turn, as
behind a balancer that knows no caches.
"""

import asyncio
import os
import random
import re
import runpy
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkContext, ForkProcess
from pathlib import Path
from typing import Any, Self

import httpx
import torch

from benchmarks.common import FORKED, become
from tests.support.server_process import HOST, free_port
from vllm_kvpool.cli.common.engine_server import EngineServer

MODEL = "model"
SERVER_MODULE = "vllm.entrypoints.openai.api_server"
IMPORTED = (  # by a server, its engine and its worker as they start
    SERVER_MODULE,
    "vllm.entrypoints.serve.utils.api_utils",
    "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors",
    "vllm.model_executor.model_loader.default_loader",
    "vllm.model_executor.models.llama",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.v1.worker.cpu_worker",
    "vllm_kvpool.connector",
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.entrypoints.cli_args",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
)
SCRAPE_TIMEOUT_S = 20.0

_ENDPOINT = re.compile(r'^vllm:kvpool_notices_info\{.*endpoint="([^"]+)"')


class Server(EngineServer):
    """One engine behind vLLM's HTTP server; starts at once, `wait_ready` waits for it.

    `core` names a core for each rank (`0`, `0|1`). The server's process calls `prepare` before it
    imports anything of its own.
    """

    start_limit_s = 150.0

    def __init__(
        self,
        model: Path,
        core: int | str,
        arguments: Sequence[str],
        env: Mapping[str, str],
        log: Path,
        prepare: Callable[[], None] | None = None,
    ) -> None:
        port = free_port()
        given = [
            *("--model", str(model), "--served-model-name", MODEL),
            *("--host", HOST, "--port", str(port), *arguments),
        ]
        common = {
            "VLLM_CPU_OMP_THREADS_BIND": str(core),
            "TORCH_COMPILE_DISABLE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_HOST_IP": HOST,
        }
        told = (str(log), {**common, **env}, given, prepare)
        process = FORKED.Process(target=_serve, args=told)
        process.start()
        assert process.pid is not None
        super().__init__(process.pid, process.is_alive, f"http://{HOST}:{port}", log)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def counters(self) -> dict[str, float]:
        """vLLM's counters, summed over their labels."""
        totals: dict[str, float] = {}
        for line in self._metrics():
            if line.startswith("vllm:"):
                name, _, value = line.rpartition(" ")
                name = name.partition("{")[0]
                totals[name] = totals.get(name, 0.0) + float(value)
        return totals

    def notice_endpoints(self) -> list[str]:
        """Where each rank of a pool's engine tells how far a prompt is stored; empty before its
        first step."""
        found = (_ENDPOINT.search(line) for line in self._metrics())
        return [each[1] for each in found if each is not None]

    def _metrics(self) -> list[str]:
        return httpx.get(f"{self.url}/metrics", timeout=SCRAPE_TIMEOUT_S).text.splitlines()


class _Bound(ForkProcess):
    """A rank on its core. OpenMP reads of a core only as a new Python starts."""

    def run(self) -> None:
        torch.set_num_threads(1)
        cores = os.environ["VLLM_CPU_OMP_THREADS_BIND"].split("|")
        rank = self._kwargs["local_rank"]  # type: ignore[attr-defined]
        os.sched_setaffinity(0, {int(cores[rank])})
        super().run()


class _Forks(ForkContext):
    Process = _Bound  # type: ignore[assignment]


def _serve(
    log: str,
    env: Mapping[str, str],
    arguments: Sequence[str],
    prepare: Callable[[], None] | None,
) -> None:
    """vLLM's server; what it starts is forked from it and not a new Python."""
    os.setsid()
    become(log, env)
    if prepare is not None:
        prepare()
    from vllm.v1.engine import utils
    from vllm.v1.executor import multiproc_executor

    # A worker that looks for Triton's kernels in all modules fails at the functions of this one.
    sys.modules.pop("llvmlite.binding.ffi", None)
    utils.get_mp_context = ForkContext
    multiproc_executor.get_mp_context = _Forks
    sys.argv = [SERVER_MODULE, *arguments]
    runpy.run_module(SERVER_MODULE, run_name="__main__", alter_sys=True)


@dataclass(frozen=True)
class Conversation:
    """Questions about a document, asked one after another."""

    starts_s: float
    document: str
    questions: tuple[str, ...]


@dataclass(frozen=True)
class Answered:
    """One turn; times in seconds."""

    ttft: float
    between_tokens: list[float]
    output_tokens: int


def at_rate(
    documents: Sequence[str], questions: Sequence[str], turns: int, rate: float, seed: int
) -> list[Conversation]:
    """Two conversations about each document; their turns come `rate` times a second, on average."""
    order = random.Random(seed)
    asked = [*documents, *documents]
    order.shuffle(asked)
    now, conversations = 0.0, []
    for document in asked:
        picked = tuple(order.sample(questions, turns))
        conversations.append(Conversation(now, document, picked))
        now += order.expovariate(rate / turns)
    return conversations


async def converse(
    urls: Sequence[str],
    conversations: Sequence[Conversation],
    output_tokens: int,
    think_s: float,
    *,
    salted: bool = False,
) -> list[Answered]:
    """Have all conversations; RuntimeError if a request fails.

    With `salted`, each request has a `cache_salt` of its own and finds nothing cached.
    """
    import aiohttp
    from vllm.benchmarks.lib.endpoint_request_func import (
        RequestFuncInput,
        async_request_openai_completions,
    )

    def salt() -> dict[str, str]:
        return {"cache_salt": uuid.uuid4().hex} if salted else {}

    async with aiohttp.ClientSession() as session:

        async def have(number: int, conversation: Conversation) -> list[Answered]:
            await asyncio.sleep(conversation.starts_s)
            said, answers = conversation.document, []
            for turn, question in enumerate(conversation.questions):
                if turn:
                    await asyncio.sleep(think_s)
                said += f"\n\nQuestion: {question}\nAnswer:"
                asked = RequestFuncInput(
                    prompt=said,
                    api_url=f"{urls[(number + turn) % len(urls)]}/v1/completions",
                    prompt_len=0,
                    output_len=output_tokens,
                    model=MODEL,
                    ignore_eos=True,
                    extra_body={"temperature": 0.0} | salt(),
                )
                got: Any = await async_request_openai_completions(asked, session)
                if not got.success:
                    raise RuntimeError(f"a request failed: {got.error}")
                said += got.generated_text
                answers.append(Answered(got.ttft, got.itl, got.output_tokens))
            return answers

        had = await asyncio.gather(*(have(*each) for each in enumerate(conversations)))
    return [answer for answers in had for answer in answers]
