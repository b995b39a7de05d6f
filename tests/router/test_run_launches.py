"""A router that starts its engines, keeps them running, and finds them again."""

import asyncio
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from tests.support.processes import is_alive
from tests.support.router_rig import QUICK, quick_router, run
from tests.support.server_process import free_ports
from vllm_kvpool.errors import ConfigError
from vllm_kvpool.router.config import read_config
from vllm_kvpool.router.control.events import ASKED_BY_ADMIN
from vllm_kvpool.router.control.states import State
from vllm_kvpool.router.ops.replicas import stop_engines
from vllm_kvpool.router.run import Router

COMMAND = [sys.executable, "-m", "tests.support.scripted_engine", "--port", "{port}"]
ASK = {"model": "scripted", "prompt": "hello " * 300, "max_tokens": 3, "temperature": 0}


class Bench:
    """Routers one after the other, with one configuration."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._port = free_ports(3)[0]

    def router(self, *, keeps: bool, **launch: Any) -> Router:
        host = {"name": "here", "first_port": self._port, "max_replicas": 3}
        given = {
            **{"model": "scripted", "command": COMMAND, "prefill": 1, "decode": 1},
            **{"state_dir": str(self._path)},
            **{"keep_on_exit": keeps, "stop_timeout_s": 3.0, **launch},
        }
        health = {**QUICK["health"], "timeout_s": 0.5, "failures": 2}
        # Engines in processes of their own share no pool: what they expect of it never comes.
        front = {**QUICK["front"], "expect_timeout_ms": 500}
        sections = {**QUICK, "front": front, "health": health, "launch": given}
        return quick_router(read_config({**sections, "hosts": [host]}))

    def pids(self) -> dict[str, int]:
        """Of the engines that the router keeps in mind."""
        content = msgspec.json.decode((self._path / "engines.json").read_bytes())
        paths = {each["replica_id"]: Path(each["log_path"] + ".pid") for each in content["engines"]}
        return {
            name: int(path.read_text().split()[1]) for name, path in paths.items() if path.exists()
        }


async def until(is_so: Callable[[], object], what: str, limit_s: float = 30.0) -> None:
    end = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < end, what
        await asyncio.sleep(0.01)


async def serves(router: Router, count: int = 2) -> None:
    fleet = router.controller.state.fleet
    up = (State.PREFILL, State.DECODE)
    await until(lambda: len(fleet.in_states(up)) == count, f"{count} engines serve")
    async with aiohttp.ClientSession() as session:
        url = f"http://127.0.0.1:{router.front_port}/v1/completions"
        async with session.post(url, json=ASK) as got:
            assert got.status == 200, await got.text()


@pytest.mark.slow
def test_engines_are_started_kept_running_and_found_again(tmp_path: Path) -> None:
    async def main() -> None:
        router = bench.router(keeps=True)
        await router.start()
        try:
            await serves(router)
            first = bench.pids()
            assert len(first) == 2
            whys = {each.why for each in router.controller.state.fleet.transitions}
            assert "asked for by the configuration" in whys
            assert ASKED_BY_ADMIN not in whys

            # One ends.
            victim = router.controller.state.fleet.decoders()[0].replica_id
            os.kill(first[victim], signal.SIGKILL)
            await until(lambda: bench.pids().get(victim, first[victim]) != first[victim], "anew")
            await serves(router)

            # One is still there, and does nothing.
            second = bench.pids()
            os.kill(second[victim], signal.SIGSTOP)
            await until(lambda: bench.pids().get(victim, second[victim]) != second[victim], "anew")
            await serves(router)
            assert not is_alive(second[victim])
        finally:
            await router.stop()
        third = bench.pids()
        assert len(third) == 2
        assert all(map(is_alive, third.values()))

        # The next router has other wishes, and takes what there is.
        router = bench.router(keeps=False, prefill=2, decode=0)
        await router.start()
        try:
            await serves(router)
            assert bench.pids() == third
        finally:
            await router.stop()
        await until(lambda: not any(map(is_alive, third.values())), "they have ended")

    bench = Bench(tmp_path)
    try:
        run(main, 120.0)
    finally:
        for pid in bench.pids().values():
            os.kill(pid, signal.SIGKILL)


def test_engines_that_run_on_are_ended_by_a_command(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    config = bench.router(keeps=True).config

    async def main() -> None:
        router = Router(config)
        await router.start()
        try:
            await serves(router)
            with pytest.raises(ConfigError, match="another router"):
                await asyncio.to_thread(stop_engines, config)
        finally:
            await router.stop()

    run(main, 120.0)
    pids = bench.pids()
    assert all(map(is_alive, pids.values()))
    assert sorted(stop_engines(config)) == sorted(pids)
    assert not any(map(is_alive, pids.values()))
    assert stop_engines(config) == ()


def test_an_engine_that_cannot_be_started_is_tried_again(tmp_path: Path) -> None:
    async def main() -> None:
        bench = Bench(tmp_path)
        flag = tmp_path / "go"
        script = f"test -e {shlex.quote(str(flag))} || exit 3; exec {' '.join(COMMAND)}"
        router = bench.router(keeps=False, command=["sh", "-c", script], prefill=0)
        await router.start()
        try:
            fleet = router.controller.state.fleet
            await until(lambda: any(each.state is State.LOADING_DECODE for each in fleet), "begun")
            counts = fleet.counts
            await until(lambda: sum(counts.values()) >= 6, "it has been tried again")
            assert any("ended" in each.why for each in fleet.transitions)
            flag.touch()
            await serves(router, 1)
        finally:
            await router.stop()
        assert bench.pids() == {}

    run(main, 120.0)
