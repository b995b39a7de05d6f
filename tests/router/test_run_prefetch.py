"""While an engine loads, the cells of what waits for it are brought to its host."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from tests.router.test_run_launches import COMMAND, serves, until
from tests.support.router_rig import QUICK, run
from tests.support.scripted_spec import STEMS
from tests.support.server_process import free_ports
from vllm_kvpool.identity.cell_names import ChunkNames
from vllm_kvpool.router.config import read_config
from vllm_kvpool.router.control.events import Spawn
from vllm_kvpool.router.control.states import Role
from vllm_kvpool.router.run import Router

SLOW = ("--prefill-tokens-per-s", "1500", "--eos-probability", "0")
PREFIX = "the same words come first " * 160
TELLS = """
import json, pathlib, sys
told = pathlib.Path(sys.argv[1])
for line in sys.stdin:
    with told.open("a") as file:
        file.write(line)
    print(json.dumps({"brought": len(json.loads(line)["chunks"]), "nbytes": 1}), flush=True)
told.with_name("over").touch()
"""
STORE = '["file:///nvme/x", "mooncake://127.0.0.1:9"]'


def router_of(path: Path, store: str, **launch: Any) -> Router:
    script = f'if [ -e {path}/slowly ]; then load=4; else load=0; fi; exec "$@" --load-s $load'
    engine = [*COMMAND, "--pool", str(path / "pool"), *SLOW]
    given = {
        **{"model": "scripted", "prefill": 1, "decode": 1, "stop_timeout_s": 3.0},
        **{"state_dir": str(path), "keep_on_exit": False},
        "command": ["sh", "-c", script, "sh", *engine],
        "prefetch_command": [
            *(sys.executable, "-c", TELLS, str(path / "told")),
            *("{kv_transfer_config}", "{max_bytes}", "{max_seconds}"),
        ],
        "kv_transfer_config": '{"kv_connector":"KVPoolConnector","kv_connector_extra_config":'
        f'{{"store":{store}}}}}',
        **launch,
    }
    host = {"name": "here", "first_port": free_ports(3)[0], "max_replicas": 3}
    flow = {**QUICK["flow"], "prefill_requests": 1}
    sections = {"flow": flow, "overload": {"ttft_target_s": 100.0}, "launch": given}
    return Router(read_config({**QUICK, **sections, "hosts": [host]}, "test"))


async def ask(session: aiohttp.ClientSession, router: Router, number: int) -> int:
    # What is the prompt's own is worth to be computed apart.
    prompt = PREFIX + f"and {number} words of its own " * 100
    body = {"model": "scripted", "prompt": prompt, "max_tokens": 2, "temperature": 0}
    url = f"http://127.0.0.1:{router.front_port}/v1/completions"
    async with session.post(url, json=body) as got:
        answer = await got.json()
        assert "cells" not in str(answer)
        return got.status


async def burst_while_one_loads(path: Path, router: Router) -> None:
    """All are served; some of them wait for the engine that loads."""
    await router.start()
    try:
        await serves(router)
        async with aiohttp.ClientSession() as session:
            assert await ask(session, router, 0) == 200
            (path / "slowly").touch()
            router.post(Spawn(Role.PREFILL))
            answers = asyncio.gather(*(ask(session, router, i) for i in range(1, 11)))
            fleet = router.controller.state.fleet
            await until(lambda: any(each.bound for each in fleet), "a request is bound")
            assert set(await answers) == {200}
    finally:
        await router.stop()


@pytest.mark.slow
def test_what_waits_for_an_engine_that_loads_is_brought_to_its_host(tmp_path: Path) -> None:
    async def main() -> None:
        router = router_of(tmp_path, STORE)
        await burst_while_one_loads(tmp_path, router)
        lines = (tmp_path / "told").read_bytes().splitlines()
        told = [msgspec.json.decode(line, type=ChunkNames) for line in lines]
        chunks = [chunk for names in told for chunk in names.chunks]
        # Of the words that all have in common, and of each prompt no more than its own end.
        assert {names.key_prefixes for names in told} == {STEMS}
        assert len(chunks) == len(set(chunks)) > 2
        assert (tmp_path / "over").exists()
        counts = router.prefetches.counts
        assert (counts["begun"], counts["failed"]) == (1, 0)
        assert counts["brought"] == len(chunks)
        metrics = router.telemetry.expose().body.decode()
        assert f'prefetch_cells_total{{outcome="brought"}} {len(chunks)}.0' in metrics

    run(main, 120.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("store", "launch"),
    [
        (STORE, {"prefetch_bytes": 0}),
        ('"file:///nvme/x"', {}),
        (STORE, {"prefetch_command": ["/no/such", "{kv_transfer_config}"]}),
    ],
    ids=["off", "one tier", "fails"],
)
def test_requests_are_served_without_it(tmp_path: Path, store: str, launch: dict[str, Any]) -> None:
    async def main() -> None:
        router = router_of(tmp_path, store, **launch)
        await burst_while_one_loads(tmp_path, router)
        assert not (tmp_path / "told").exists()
        assert router.prefetches.counts["begun"] == ("prefetch_command" in launch)
        assert router.prefetches.counts["failed"] == ("prefetch_command" in launch)
        assert bool(len(router.prefetches.known)) == ("prefetch_command" in launch)

    run(main, 120.0)
