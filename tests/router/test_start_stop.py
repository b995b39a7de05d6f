"""Replicas' `start` and `stop` commands, run as an operator writes them."""

import os
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.support.processes import is_alive
from tests.support.router_rig import QUICK, quick_router, run
from tests.support.server_process import free_ports
from tests.support.waiting import until
from vllm_kvpool.router.config import read_config
from vllm_kvpool.router.control.events import Remove
from vllm_kvpool.router.control.states import ReplicaId, State
from vllm_kvpool.router.dataplane.responses import EngineLost
from vllm_kvpool.router.ops.commands import run_command
from vllm_kvpool.router.run import Router

NAME = ReplicaId("engine")
ASK = {"model": "scripted", "prompt": "hello " * 300, "max_tokens": 3, "temperature": 0}
# A script as operators write them: in the background, with a file that has its process id.
START = """\
cd {folder} && echo started >>orders
nohup {python} -m tests.support.scripted_engine --port {port} >engine.log 2>&1 &
echo $! >pid
"""
STOP = "cd {folder} && echo stopped >>orders && kill -9 $(cat pid) 2>/dev/null; rm -f pid"


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (("/nonexistent/program",), "start: /nonexistent/program cannot be run"),
        (("sh", "-c", "exit 3"), "start: exit code 3"),
        (("sh", "-c", "kill -9 $$"), "start: signal 9"),
        (("sleep", "60"), "start: no end within 0.2 s"),
    ],
)
async def test_command_that_fails_says_why(command: tuple[str, ...], why: str) -> None:
    with pytest.raises(EngineLost) as caught:
        await run_command(NAME, "start", command, 0.2 if command[0] == "sleep" else 20.0)
    assert str(caught.value).startswith(why)


async def test_command_that_takes_too_long_is_killed_with_all_it_has_started(
    tmp_path: Path,
) -> None:
    script = f"sleep 60 & echo $! >{tmp_path}/pid; wait"
    with pytest.raises(EngineLost):
        await run_command(NAME, "start", ("sh", "-c", script), 1.0)
    pid = int((tmp_path / "pid").read_text())
    await until(lambda: not is_alive(pid), what="its child has ended")


async def test_what_a_script_leaves_in_the_background_is_not_waited_for(tmp_path: Path) -> None:
    """The background process survives the script."""
    script = f"sleep 60 & echo $! >{tmp_path}/pid"
    await run_command(NAME, "start", ("sh", "-c", script), 20.0)
    pid = int((tmp_path / "pid").read_text())
    assert is_alive(pid)
    os.kill(pid, 9)


class Bench:
    """An engine with scripts, and routers that use it one after the other."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        values = {"folder": folder, "python": sys.executable, "port": free_ports(1)[0]}
        self.replica: dict[str, Any] = {
            **{"url": f"http://127.0.0.1:{values['port']}", "role": "decode", "id": NAME},
            "start": ["sh", "-c", START.format(**values)],
            "stop": ["sh", "-c", STOP.format(**values)],
        }

    def router(self) -> Router:
        health = {**QUICK["health"], "timeout_s": 0.5, "failures": 2}
        return quick_router(read_config({**QUICK, "health": health, "replicas": [self.replica]}))

    def orders(self) -> list[str]:
        path = self.folder / "orders"
        return path.read_text().split() if path.exists() else []

    def pid(self) -> int:
        try:
            return int((self.folder / "pid").read_text() or 0)
        except FileNotFoundError:  # `STOP` removes it
            return 0


async def serves(router: Router) -> None:
    fleet = router.controller.state.fleet
    await until(lambda: len(fleet.in_states(State.DECODE)) == 1, what="it serves")
    async with aiohttp.ClientSession() as session:
        url = f"http://127.0.0.1:{router.front_port}/v1/completions"
        async with session.post(url, json=ASK) as got:
            assert got.status == 200, await got.text()


@pytest.mark.slow
def test_engine_is_started_when_it_dies_or_hangs_and_ended_when_it_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    bench = Bench(tmp_path)

    async def main() -> None:
        router = bench.router()
        await router.start()
        try:
            await serves(router)
            assert bench.orders() == ["started"]
            first = bench.pid()
            os.kill(first, 9)
            await until(lambda: bench.pid() not in (0, first), what="it is started again")
            await serves(router)
            second = bench.pid()
            os.kill(second, 19)  # it is there, and does nothing
            await until(lambda: bench.pid() not in (0, second), what="it is started again")
            await serves(router)
            assert not is_alive(second)
        finally:
            await router.stop()
        third = bench.pid()
        assert is_alive(third), "engines go on without the router"
        num_orders = len(bench.orders())

        router = bench.router()
        await router.start()
        try:
            await serves(router)
            assert len(bench.orders()) == num_orders, "it runs already"
            router.post(Remove(NAME))
            await until(lambda: not is_alive(third), what="it has been ended")
        finally:
            await router.stop()
        assert bench.orders()[-1] == "stopped"

    try:
        run(main, 120.0)
    finally:
        if pid := bench.pid():
            os.kill(pid, 9)


def test_start_that_fails_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    bench = Bench(tmp_path)
    works = bench.replica["start"][2]
    bench.replica["start"][2] = f"test -e {tmp_path}/go || exit 3; {works}"

    async def main() -> None:
        router = bench.router()
        await router.start()
        try:
            fleet = router.controller.state.fleet
            whys = lambda: [each.why for each in fleet.transitions]  # noqa: E731
            said = "cannot be started: start: exit code 3"
            await until(lambda: whys().count(said) >= 2, what="it has been tried again")
            (tmp_path / "go").touch()
            await serves(router)
        finally:
            await router.stop()

    try:
        run(main, 120.0)
    finally:
        if pid := bench.pid():
            os.kill(pid, 9)
