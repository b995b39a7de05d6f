"""Scripted engines and a router before them, each in a process of its own, for measurements."""

import asyncio
import contextlib
import os
import runpy
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import aiohttp
import msgspec
import psutil  # type: ignore[import-untyped]

from benchmarks.common import FORKED, become
from tests.support.orphans import ending_with_parent
from tests.support.server_process import free_ports
from vllm_kvpool.router.ops.snapshot import RouterView

READY_TIMEOUT_S = 30.0
POLL_S = 0.1
TOKEN = "only-for-this-machine"
MODULE = "tests.support.scripted_engine"
END_TIMEOUT_S = 10.0
IMPORTED = (
    MODULE,
    "vllm_kvpool.cli.commands.router",
    "vllm_kvpool.cli.main",
    "vllm_kvpool.router.ops.replicas",
    "vllm_kvpool.router.run",
)
SERVES = ("prefill", "decode")


class Router(NamedTuple):
    """A router that runs: its addresses for clients and for people, and its process."""

    url: str
    admin: str
    pid: int


def peer_release(program: str) -> str:
    """Which vllm-router this is, a program of an environment."""
    question = "import importlib.metadata as m; print(m.version('vllm-router'))"
    command = [str(Path(program).with_name("python")), "-c", question]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return f"vllm-router {found.stdout.strip() or 'of an unknown release'}"


@contextlib.contextmanager
def process(command: Sequence[str], log: Path) -> Iterator[int]:
    """A process (its id), ended with all it has started; forked if it is a module of Python's."""
    if tuple(command[:2]) == (sys.executable, "-m"):
        forked = FORKED.Process(target=_run_module, args=(command[2:], str(log)))
        forked.start()
        assert forked.pid is not None
        pid = forked.pid
    else:
        with log.open("wb") as out:
            pid = subprocess.Popen(
                ending_with_parent(command), stdout=out, stderr=out, start_new_session=True
            ).pid
    started = psutil.Process(pid)
    try:
        yield pid
    finally:
        for how in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, how)
            psutil.wait_procs([started], END_TIMEOUT_S)


def _run_module(command: Sequence[str], log: str) -> None:
    os.setsid()
    become(log, {})
    sys.argv = list(command)
    runpy.run_module(command[0], run_name="__main__", alter_sys=True)


@contextlib.contextmanager
def engines(scratch: Path, *arguments: str) -> Iterator[list[str]]:
    """Four scripted engines in one process; their URLs."""
    ports = free_ports(4)
    command = [sys.executable, "-m", MODULE, "--count", "4", "--port", str(ports[0]), *arguments]
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    with process(command, scratch / "engines.log"):
        wait_ready(urls[0], scratch / "engines.log")
        yield urls


@contextlib.contextmanager
def our_router(
    scratch: Path,
    replicas: Sequence[Mapping[str, object]],
    num_serving: int,
    **sections: Mapping[str, object],
) -> Iterator[Router]:
    """The router's own process before these replicas, of which so many are to serve."""
    front, admin = (f"127.0.0.1:{port}" for port in free_ports(2))
    listening = {"front": {"listen": front}, "admin": {"listen": admin, "token": TOKEN}}
    lines = []
    for name, values in {**listening, **sections}.items():
        lines += [f"[{name}]", *_values(values)]
    for replica in replicas:
        lines += ["[[replicas]]", *_values(replica)]
    (config := scratch / "router.toml").write_text("\n".join(lines) + "\n")
    command = [sys.executable, "-m", "vllm_kvpool", "router", "--log-level", "warning"]
    log = scratch / "router.log"
    with process([*command, "--config", str(config)], log) as pid:
        wait_ready(f"http://{front}", log)
        _wait_serving(f"http://{admin}", num_serving, log)
        yield Router(f"http://{front}", f"http://{admin}", pid)


def _values(values: Mapping[str, object]) -> list[str]:
    # Strings, numbers, booleans and lists of them are the same in TOML as in JSON.
    return [f"{name} = {msgspec.json.encode(value).decode()}" for name, value in values.items()]


@contextlib.contextmanager
def other_router(
    command: Callable[[int, int], Sequence[str]], scratch: Path
) -> Iterator[tuple[str, int]]:
    """Another proxy's process; `command` is given two ports, the first for clients."""
    front, admin = free_ports(2)
    url = f"http://127.0.0.1:{front}"
    with process(command(front, admin), scratch / "router.log") as pid:
        wait_ready(url, scratch / "router.log")
        yield url, pid


def peer_arguments(front: int, admin: int) -> list[str]:
    """Arguments of vllm-router, but for its engines."""
    return [
        *("--host", "127.0.0.1", "--port", str(front), "--log-level", "error"),
        *("--prometheus-port", str(admin)),
    ]


def wait_ready(url: str, log: Path) -> None:
    """Until somebody answers a request there; RuntimeError with the log's end if nobody does."""

    async def asked() -> bool:
        async with aiohttp.ClientSession() as session:
            body = {"model": "scripted", "prompt": "hello", "max_tokens": 1}
            async with session.post(f"{url}/v1/completions", json=body) as answer:
                return answer.status == 200

    _until(lambda: asyncio.run(asked()), f"{url} is ready", log)


def _wait_serving(admin: str, count: int, log: Path) -> None:
    """Until so many replicas serve in a role, and have told their metrics."""

    async def asked() -> bool:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with (
            aiohttp.ClientSession(headers=headers) as session,
            session.get(f"{admin}/state") as got,
        ):
            view = msgspec.json.decode(await got.read(), type=RouterView)
            up = [each for each in view.replicas if each.state.value in SERVES]
            return sum(each.sampled_at is not None for each in up) >= count

    _until(lambda: asyncio.run(asked()), f"{count} replicas serve", log)


def _until(is_so: Callable[[], bool], what: str, log: Path) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    while True:
        with contextlib.suppress(aiohttp.ClientError, OSError):
            if is_so():
                return
        if time.monotonic() > deadline:
            raise RuntimeError(f"{what}: not in time\n{log.read_text()[-2000:]}")
        time.sleep(POLL_S)


@contextlib.contextmanager
def spares(
    scratch: Path, count: int, load_s: float, *arguments: str
) -> Iterator[list[dict[str, object]]]:
    """Engines that the router can start, which load for `load_s`; as replicas of its file."""
    found: list[dict[str, object]] = []
    for port in free_ports(count):
        engine = [sys.executable, "-m", MODULE, "--port", str(port), "--load-s", str(load_s)]
        name = f"spare-{port}"
        pid, log = (shlex.quote(str(scratch / f"{name}.{kind}")) for kind in ("pid", "log"))
        start = f"setsid {shlex.join([*engine, *arguments])} >{log} 2>&1 & echo $! >{pid}"
        found.append(
            {
                **{"id": name, "url": f"http://127.0.0.1:{port}", "role": "spare"},
                "start": ["sh", "-c", start],
                "stop": ["sh", "-c", f"kill -9 -- -$(cat {pid}); rm {pid}"],
            }
        )
    try:
        yield found
    finally:
        for path in scratch.glob("spare-*.pid"):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(int(path.read_text()), signal.SIGKILL)
