"""A real engine of two ranks on two hosts (`--nnodes 2`), which are network namespaces."""

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from tests.deploy.server import Server
from tests.support.models import TEXT_VOCAB, LlamaShape, add_tokenizer, make_model
from tests.support.namespaces import HostMaster, Inside, entered_or_skipped, joined_hosts
from tests.support.stream_client import words

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(900)]

ADDRESSES = "10.213.79.1", "10.213.79.2"
BITS = 30
RENDEZVOUS = "--master-addr", ADDRESSES[0], "--master-port", "29511"
CHUNK = 64
SIZE = "64MiB"
HEADLESS = Path(__file__).with_name("headless_node.py")
SAVED_LIMIT_S = 60.0
WARNING = "workers run on 2 hosts, and each has its own files"


class Answer(NamedTuple):
    token_ids: list[int]
    cached_tokens: int


class Host(NamedTuple):
    inside: Inside
    address: str


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    with ExitStack() as stack:
        names = stack.enter_context(entered_or_skipped(joined_hosts(*ADDRESSES, BITS)))
        insides = [stack.enter_context(Inside(name)) for name in names]
        yield [Host(*each) for each in zip(insides, ADDRESSES, strict=True)]


def start(rank: int, host: Host, model: Path, store: str, directory: Path) -> Server:
    """Start what one host runs of the engine: the first one has the server."""
    extra = {"store": store, "chunk_tokens": CHUNK}
    transfer = {
        **{"kv_connector": "KVPoolConnector", "kv_role": "kv_both"},
        "kv_connector_extra_config": extra,
    }
    nodes = ["--nnodes", "2", "--node-rank", str(rank), *(["--headless"] if rank else [])]
    return host.inside.call(
        partial(
            Server,
            model,
            json.dumps(transfer),
            directory / f"node{rank}.log",
            ("--tensor-parallel-size", "2", *nodes, *RENDEZVOUS),
            env={
                **{"VLLM_HOST_IP": host.address, "GLOO_SOCKET_IFNAME": "eth0"},
                "VLLM_SERVER_DEV_MODE": "1",  # for reset_prefix_cache
            },
            **({"program": ("-P", str(HEADLESS))} if rank else {}),
        )
    )


def ask(url: str, prompt: str) -> Answer:
    """Answer a prompt that the engine itself has forgotten."""
    httpx.post(f"{url}/reset_prefix_cache", timeout=60).raise_for_status()
    body: dict[str, Any] = {
        **{"model": "tiny", "prompt": prompt, "temperature": 0, "max_tokens": 8},
        **{"ignore_eos": True, "return_token_ids": True},
    }
    told = httpx.post(f"{url}/v1/completions", json=body, timeout=120).raise_for_status().json()
    details = told["usage"]["prompt_tokens_details"] or {}
    return Answer(told["choices"][0]["token_ids"], details.get("cached_tokens") or 0)


@pytest.mark.parametrize("is_shared", [True, False], ids=["mooncake", "files of each host"])
def test_engine_on_two_hosts_hits_only_what_both_hosts_reach(
    hosts: list[Host], tmp_path: Path, is_shared: bool
) -> None:
    model = make_model(tmp_path / "models", LlamaShape(vocab=TEXT_VOCAB))
    add_tokenizer(model)
    prompt = words(1, 150)
    with ExitStack() as stack:
        if is_shared:
            master = HostMaster(ADDRESSES[0])
            stack.enter_context(hosts[0].inside.running(master))
            stores = [f"mooncake://{master.address}?segment={SIZE}"] * 2
        else:
            stores = [f"file://{tmp_path}/{host}/kvpool?size={SIZE}" for host in ("a", "b")]
        server, further = (
            start(rank, host, model, store, tmp_path)
            for rank, (host, store) in enumerate(zip(hosts, stores, strict=True))
        )
        stack.callback(further.end)
        hosts[0].inside.call(server.__enter__)
        stack.push(server)
        answers = [hosts[0].inside.call(partial(ask, server.url, prompt))]
        assert answers[0].cached_tokens == 0
        deadline = time.monotonic() + SAVED_LIMIT_S if is_shared else 0.0
        answers.append(hosts[0].inside.call(partial(ask, server.url, prompt)))
        while not answers[-1].cached_tokens and time.monotonic() < deadline:
            answers.append(hosts[0].inside.call(partial(ask, server.url, prompt)))
        assert {tuple(each.token_ids) for each in answers} == {tuple(answers[0].token_ids)}
        assert (answers[-1].cached_tokens >= CHUNK) is is_shared, server.log()[-3000:]
        assert (WARNING in server.log()) is not is_shared
