"""Real processes: workers and a controller that are killed in streams and in whole answers."""

import asyncio
import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil  # type: ignore[import-untyped]
import pytest

from tests.support.server_process import CONTAINER, free_ports
from vllm_kvpool.errors import ConfigError
from vllm_kvpool.router.config import read_config
from vllm_kvpool.router.processes import REAP_S, Supervisor, _Signals, bind

LIMIT_S = 30.0
TOKENS, FEW_TOKENS, REQUESTS = 150, 20, 12
ENGINE = ("--eos-probability", "0", "--step-base-s", "0.01")
_STARTED = re.compile(r"(\w+): started, process (\d+)")
CLI = (sys.executable, "-m", "vllm_kvpool.cli", "router", "--config")
LOOKS_TWICE_AS_OFTEN = """
import runpy, sys
from vllm_kvpool.router import processes
processes.REAP_S /= 2
sys.argv = ["kvpool", "router", "--config", sys.argv[1]]
runpy.run_module("vllm_kvpool.cli", run_name="__main__")
"""


@dataclass
class Deployment:
    """A router of two workers before two engines."""

    url: str
    admin_url: str
    config: Path
    log: Path
    supervisor: subprocess.Popen[bytes]

    def pids(self) -> dict[str, int]:
        """The latest process of each name."""
        return {name: int(pid) for name, pid in _STARTED.findall(self.log.read_text())}

    def replaced(self, before: dict[str, int]) -> set[str]:
        """The names of those that have another process than before."""
        now = self.pids()
        return {name for name in now if now[name] != before[name]}

    def kill(self, name: str) -> None:
        os.kill(self.pids()[name], signal.SIGKILL)

    def ready(self, replicas: int = 2) -> None:
        """So many replicas are known, and serve; a worker listens."""

        def serving() -> int:
            try:
                with self.ask_admin("/state") as got:
                    return sum(each["state"] == "decode" for each in json.load(got)["replicas"])
            except OSError:
                return 0

        def listens() -> bool:
            host, port = self.url.removeprefix("http://").split(":")
            with contextlib.suppress(OSError), socket.create_connection((host, int(port))):
                return True
            return False

        self.until(lambda: serving() == replicas, "all replicas serve")
        self.until(listens, "a worker listens")

    def ask_admin(self, path: str) -> Any:
        """The answer of the administration's address."""
        headers = {"Authorization": "Bearer t"}
        request = urllib.request.Request(self.admin_url + path, headers=headers)
        return urllib.request.urlopen(request, timeout=LIMIT_S)

    def until(self, is_so: Callable[[], object], what: str) -> None:
        end = time.monotonic() + LIMIT_S
        while not is_so():
            assert time.monotonic() < end, f"{what}\n{self.log.read_text()}"
            time.sleep(0.02)

    def in_flight(self) -> int:
        """Requests that the controller knows."""
        with self.ask_admin("/metrics") as got:
            [line] = re.findall(rb"^kvpool_router_in_flight_requests (\S+)", got.read(), re.M)
        return int(float(line))


@contextmanager
def deployed(
    tmp_path: Path, front_options: str = "", command: Sequence[str] = CLI
) -> Iterator[Deployment]:
    """`command`, given a configuration, runs the router."""
    *ports, front, admin = free_ports(4)
    engines = [sys.executable, "-m", "tests.support.scripted_engine", "--count", "2"]
    engines += ["--port", str(ports[0]), "--pool", str(tmp_path / "pool"), *ENGINE]
    config = tmp_path / "router.toml"
    config.write_text(
        f"""
        [front]
        listen = "127.0.0.1:{front}"
        workers = 2
        shutdown_timeout_s = 2.0
        {front_options}
        [admin]
        listen = "127.0.0.1:{admin}"
        token = "t"
        """
        + "".join(
            f'[[replicas]]\nurl = "http://127.0.0.1:{port}"\nrole = "both"\n' for port in ports[:2]
        )
    )
    log = tmp_path / "router.log"
    with (tmp_path / "engines.log").open("wb") as out, log.open("wb") as router_out:
        started = [
            subprocess.Popen(engines, stdout=out, stderr=out),
            subprocess.Popen([*command, str(config)], stdout=router_out, stderr=router_out),
        ]
        try:
            deployment = Deployment(
                *(f"http://127.0.0.1:{front}", f"http://127.0.0.1:{admin}"),
                *(config, log, started[1]),
            )
            deployment.ready()
            yield deployment
        finally:
            for each in reversed(started):
                each.terminate()
                each.wait(LIMIT_S)


async def _ask(url: str, number: int, tokens: int, *, stream: bool) -> str | None:
    """The whole text; None where the connection broke off. On a connection of its own."""
    body = {
        "model": "scripted",
        "prompt": f"prompt {number}",
        "max_tokens": tokens,
        "temperature": 0,
        "stream": stream,
    }
    timeout = aiohttp.ClientTimeout(total=LIMIT_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.post(f"{url}/v1/completions", json=body) as got,
        ):
            assert got.status == 200, await got.text()
            if not stream:
                return str((await got.json())["choices"][0]["text"])
            data = (await got.read()).decode()
            assert data.endswith("data: [DONE]\n\n"), data[-500:]
            return "".join(re.findall(r'"text":"([^"]*)"', data))
    except aiohttp.ClientError:
        return None


def _through(
    deployment: Deployment, during: Callable[[], None], tokens: int = TOKENS
) -> list[tuple[Any, Any]]:
    """Answers of undisturbed requests beside those of the same with something done in between."""

    async def ask_all(
        tokens: int, wait_s: float = 0.0, then: Callable[[], None] = lambda: None
    ) -> list[str | None]:
        asked = [
            asyncio.create_task(_ask(deployment.url, number, tokens, stream=number % 2 == 0))
            for number in range(REQUESTS)
        ]
        await asyncio.sleep(wait_s)
        then()
        return await asyncio.gather(*asked)

    async def main() -> list[tuple[Any, Any]]:
        calm = await ask_all(tokens)
        assert None not in calm
        found = await ask_all(tokens, 0.7, during)
        after = await ask_all(FEW_TOKENS)
        assert all(
            text and whole and whole.startswith(text)
            for whole, text in zip(calm, after, strict=True)
        ), "what comes later is served"
        return list(zip(calm, found, strict=True))

    return asyncio.run(main())


def test_a_killed_worker_loses_its_requests_and_nothing_else(tmp_path: Path) -> None:
    with deployed(tmp_path) as deployment:
        before = deployment.pids()
        found = _through(deployment, lambda: deployment.kill("worker1"))
        lost = [text for _, text in found if text is None]
        assert 0 < len(lost) < len(found)
        assert all(text == calm for calm, text in found if text is not None)
        now = deployment.pids()
        assert now["worker1"] != before["worker1"]
        assert (now["worker2"], now["controller"]) == (before["worker2"], before["controller"])


def _known(deployment: Deployment) -> int:
    """Requests that the controller knows; 0 while there is none."""
    try:
        return deployment.in_flight()
    except OSError:
        return 0


def test_a_killed_controller_delays_and_loses_nothing(tmp_path: Path) -> None:
    """The next one also knows what engines do, which the workers tell it: nothing else arrives."""
    with deployed(tmp_path) as deployment:
        before = deployment.pids()

        def die() -> None:
            assert deployment.in_flight() == REQUESTS
            deployment.kill("controller")
            deployment.until(lambda: _known(deployment), "its successor knows of requests")

        found = _through(deployment, die, tokens=3 * TOKENS)
        assert all(text == calm for calm, text in found)
        assert deployment.pids()["controller"] != before["controller"]
        assert deployment.in_flight() == 0


def test_what_comes_while_the_controller_is_away_is_served(tmp_path: Path) -> None:
    async def ask_all(deployment: Deployment) -> list[str | None]:
        asked = []
        for number in range(REQUESTS):
            asked.append(asyncio.create_task(_ask(deployment.url, number, FEW_TOKENS, stream=True)))
            await asyncio.sleep(0.1)
        return await asyncio.gather(*asked)

    with deployed(tmp_path) as deployment:
        deployment.kill("controller")
        assert all(asyncio.run(ask_all(deployment)))


def test_a_process_that_hangs_is_replaced(tmp_path: Path) -> None:
    hung = {"worker2", "controller"}
    command = (sys.executable, "-c", LOOKS_TWICE_AS_OFTEN)
    with deployed(tmp_path, command=command) as deployment:
        before = deployment.pids()
        for name in hung:
            os.kill(before[name], signal.SIGSTOP)
        deployment.until(lambda: deployment.replaced(before) == hung, "others are started")
        assert all(f"{name} has hung for 5 s" in deployment.log.read_text() for name in hung)
        deployment.ready()
        asked = (_ask(deployment.url, number, TOKENS, stream=True) for number in range(REQUESTS))

        async def ask_all() -> list[str | None]:
            return await asyncio.gather(*asked)

        assert None not in asyncio.run(ask_all())


def test_a_supervisor_that_was_paused_goes_on(tmp_path: Path) -> None:
    """As by a debugger or `docker pause`, beyond the end of its wait for signals."""
    killed = {"worker1", "controller"}
    with deployed(tmp_path) as deployment:
        before = deployment.pids()
        deployment.supervisor.send_signal(signal.SIGSTOP)
        time.sleep(1.1 * REAP_S)
        deployment.supervisor.send_signal(signal.SIGCONT)
        for name in killed:
            deployment.kill(name)
        deployment.until(lambda: deployment.replaced(before) == killed, "others are started")
        deployment.ready()


def test_a_signal_that_comes_as_they_are_taken_over_is_not_lost() -> None:
    """After each line of it: what was there before is called, or `wait` tells of it."""
    told: list[int] = []
    line, num_lines = 0, 1
    before = signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
    while line < num_lines:
        told.clear()
        num_lines = 0

        def trace(frame: Any, event: str, _: Any, line: int = line) -> Any:
            nonlocal num_lines
            if frame.f_code is not _Signals.__init__.__code__:
                return None
            if event in ("line", "return"):
                if num_lines == line:
                    os.kill(os.getpid(), signal.SIGTERM)
                num_lines += 1
            return trace

        traced = sys.gettrace()
        sys.settrace(trace)
        try:
            signals = _Signals()
        finally:
            sys.settrace(traced)
        with contextlib.closing(signals):
            told += signals.wait(0)
        assert signal.SIGTERM in told, line
        line += 1
    signal.signal(signal.SIGTERM, before)


def _status(port: int) -> int:
    """Status of the answer to the new key."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)
    with contextlib.closing(connection):
        body = json.dumps({"model": "scripted", "prompt": "x", "max_tokens": 1})
        headers = {"Authorization": f"Bearer {NEW_KEY}", "Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", body, headers)
        return connection.getresponse().status


OLD_KEY, NEW_KEY = "an old key of someone", "a new key of someone"


def test_a_hangup_reaches_all_processes(tmp_path: Path) -> None:
    """Keys are the workers', replicas the controller's."""

    def write(key: str) -> None:
        keys = tmp_path / "keys.toml"
        keys.touch(mode=0o600)
        keys.write_text(f'[[tenants]]\nname = "one"\nkey = "{key}"\n')

    write(OLD_KEY)
    with deployed(tmp_path, 'keys_file = "keys.toml"') as deployment:
        port = int(deployment.url.rpartition(":")[2])
        assert {_status(port) for _ in range(REQUESTS)} == {401}
        write(NEW_KEY)
        [third] = free_ports(1)
        text = deployment.config.read_text()
        more = f'[[replicas]]\nurl = "http://127.0.0.1:{third}"\nrole = "both"\n'
        deployment.config.write_text(text + more)
        deployment.supervisor.send_signal(signal.SIGHUP)

        def served() -> set[int]:
            return {_status(port) for _ in range(REQUESTS)}

        deployment.until(lambda: served() == {200}, "all workers have read them")
        with deployment.ask_admin("/state") as got:
            assert len(json.load(got)["replicas"]) == 3
        assert len(deployment.pids()) == 3


def test_all_end_with_the_supervisor_however_it_does(tmp_path: Path) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        folder = tmp_path / number.name
        folder.mkdir()
        with deployed(folder) as deployment:
            pids = deployment.pids().values()
            deployment.supervisor.send_signal(number)
            code = deployment.supervisor.wait(LIMIT_S)
            assert code == (0 if number == signal.SIGTERM else -number)
            end = time.monotonic() + LIMIT_S
            while any(Path(f"/proc/{pid}").exists() for pid in pids):
                assert time.monotonic() < end, deployment.log.read_text()
                time.sleep(0.05)
            if number == signal.SIGTERM:
                text = deployment.log.read_text()
                assert not re.search(r"Traceback|ERROR|WARNING|<\w|\w=\w", text), text


def test_what_cannot_start_ends_the_router(tmp_path: Path) -> None:
    (taken,) = bind("127.0.0.1:0")
    taken.listen()
    port = taken.getsockname()[1]
    given: dict[str, Any] = {
        "front": {"listen": "127.0.0.1:0", "workers": 2},
        "admin": {"listen": "127.0.0.1:0", "token": "t"},
        "replicas": [{"url": "http://127.0.0.1:9", "role": "both"}],
    }
    for wrong in (
        {"admin": {"listen": f"127.0.0.1:{port}", "token": "t"}},
        {"front": {**given["front"], "keys_file": str(tmp_path / "none")}},
    ):
        supervisor = Supervisor(read_config({**given, **wrong}), lambda: read_config(given))
        with pytest.raises(ConfigError, match="process cannot start"):
            supervisor.run()
        supervisor.close()
    taken.close()


def test_what_dies_before_it_serves_and_then_cannot_start_ends_the_router(tmp_path: Path) -> None:
    """As a process that is killed on a busy machine, because it takes too long to start."""
    keys = tmp_path / "keys.toml"
    os.mkfifo(keys)  # who reads it waits
    config = read_config(
        {
            "front": {"listen": "127.0.0.1:0", "workers": 2, "keys_file": str(keys)},
            "admin": {"listen": "127.0.0.1:0", "token": "t"},
            "replicas": [{"url": "http://127.0.0.1:9", "role": "both"}],
        }
    )
    with contextlib.closing(Supervisor(config, lambda: config)) as supervisor:

        def kill_first_lives() -> None:
            killed: set[int] = set()
            while len(killed) < 3:
                for pid in {each.pid for each in supervisor._processes} - {0, *killed}:
                    killed.add(pid)
                    if len(killed) == 3:
                        (tmp_path / "wrong").write_text("[[tenants]]\nname = 3\n")
                        (tmp_path / "wrong").replace(keys)
                        for each in killed:
                            os.kill(each, signal.SIGKILL)
                time.sleep(0.01)

        killer = threading.Thread(target=kill_first_lives)
        killer.start()
        with pytest.raises(ConfigError, match="process cannot start"):
            supervisor.run()
        killer.join()


@contextmanager
def with_own_engine(tmp_path: Path, *command: str) -> Iterator[Deployment]:
    """What `command`, given a configuration, runs: a router that has started one engine."""
    port, front, admin = free_ports(3)
    engine = [sys.executable, "-m", "tests.support.scripted_engine", "--port", "{port}"]
    config = tmp_path / "router.toml"
    config.write_text(
        f"""
        [front]
        listen = "127.0.0.1:{front}"
        shutdown_timeout_s = 2.0
        [admin]
        listen = "127.0.0.1:{admin}"
        token = "t"
        [launch]
        model = "scripted"
        command = {json.dumps(engine)}
        state_dir = "{tmp_path}"
        decode = 1
        keep_on_exit = false
        [[hosts]]
        name = "here"
        first_port = {port}
        max_replicas = 1
        """
    )
    log = tmp_path / "router.log"
    with log.open("wb") as out:
        deployment = Deployment(
            f"http://127.0.0.1:{front}",
            f"http://127.0.0.1:{admin}",
            config,
            log,
            subprocess.Popen([*command, str(config)], stdout=out, stderr=out),
        )
    try:
        deployment.ready(1)
        yield deployment
    finally:
        deployment.supervisor.terminate()
        deployment.supervisor.wait(LIMIT_S)


def zombies(parent: psutil.Process) -> list[int]:
    return [each.pid for each in parent.children() if each.status() == psutil.STATUS_ZOMBIE]


def engine_pid(tmp_path: Path) -> int:
    """In the namespace of the router's processes."""
    [pid_file] = tmp_path.glob("**/*.log.pid")
    return int(pid_file.read_text().split()[1])


def namespace_pid(process: psutil.Process) -> int:
    """What a process is called in its own PID namespace."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(re.findall(r"^NSpid:.*\s(\d+)$", status, re.M)[0])


def test_as_process_1_of_a_container_it_supervises_itself(tmp_path: Path) -> None:
    """Children and orphans that are killed are reaped and replaced; SIGTERM, which the kernel keeps
    from a process 1 that has not asked for it, ends all."""
    with with_own_engine(tmp_path, *CONTAINER, *CLI) as deployment:
        [router] = psutil.Process(deployment.supervisor.pid).children()
        assert namespace_pid(router) == 1

        def process(pid: int) -> psutil.Process:
            """Of the container's."""
            below = router.children(recursive=True)
            return next(each for each in below if namespace_pid(each) == pid)

        def killed(victim: psutil.Process, what: str) -> None:
            victim.kill()
            deployment.until(lambda: not victim.is_running(), f"{what} has ended")
            deployment.until(lambda: not zombies(router), f"{what} is reaped")

        first = deployment.pids()["controller"]
        controller = process(first)
        assert controller.ppid() == router.pid
        engine = process(engine_pid(tmp_path))
        killed(engine.parent(), "the engine's shell")
        assert engine.ppid() == router.pid, "an orphan"
        killed(engine, "the orphan")
        killed(controller, "the controller")
        deployment.until(lambda: deployment.pids()["controller"] != first, "a successor")
        deployment.ready(1)
        left = router.children(recursive=True)
        assert len(left) > 2, "a controller, and an engine below its shell"
        router.send_signal(signal.SIGTERM)
        assert deployment.supervisor.wait(LIMIT_S) == 0, deployment.log.read_text()
        assert not any(each.is_running() for each in left)
