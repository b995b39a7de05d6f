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
BURST_ENGINES = (
    *("--eos-probability", "0", "--step-base-s", "0.01", "--decode-sequence-s", "0.0005"),
    *("--prefill-tokens-per-s", "8000", "--kv-blocks", "20000"),
)


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


def wait_ready(url: str, log: Path) -> None:
    """Until somebody answers a request there; RuntimeError with the log's end if nobody does."""

    async def asked() -> bool:
        async with aiohttp.ClientSession() as session:
            body = {"model": "scripted", "prompt": "hello", "max_tokens": 1}
            async with session.post(f"{url}/v1/completions", json=body) as answer:
                return answer.status == 200

    _until(lambda: asyncio.run(asked()), f"{url} is ready", log)


def wait_serving(admin: str, count: int, log: Path) -> None:
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


def router_command(config: Path) -> list[str]:
    """The router's own process."""
    command = [sys.executable, "-m", "vllm_kvpool", "router", "--log-level", "warning"]
    return [*command, "--config", str(config)]


def toml(
    sections: Mapping[str, Mapping[str, object]], tables: Sequence[Mapping[str, object]]
) -> str:
    """A router's configuration; `tables` name theirs by `in`."""
    lines = []
    for name, values in sections.items():
        lines += [f"[{name}]", *_values(values)]
    for table in tables:
        lines += [f"[[{table['in']}]]", *_values({k: v for k, v in table.items() if k != "in"})]
    return "\n".join(lines) + "\n"


def _values(values: Mapping[str, object]) -> list[str]:
    # Strings, numbers, booleans and lists of them are the same in TOML as in JSON.
    return [f"{name} = {msgspec.json.encode(value).decode()}" for name, value in values.items()]


@contextlib.contextmanager
def burst_side(scratch: Path, load_s: float, *, live_takeover: bool) -> Iterator[tuple[str, str]]:
    """Two engines of each role that serve, a router that can start two more for prefill.

    Those load for `load_s`. Gives the addresses for clients and for people.
    """
    *ports, front, admin, first, _ = free_ports(8)
    common = [*("--pool", str(scratch / "pool")), *BURST_ENGINES]
    serving = [sys.executable, "-m", MODULE, "--count", "4", "--port", str(ports[0]), *common]
    spares = [_spare(scratch, port, load_s, common) for port in (first, first + 1)]
    config = scratch / "router.toml"
    config.write_text(
        toml(
            {
                "front": {"listen": f"127.0.0.1:{front}"},
                "admin": {"listen": f"127.0.0.1:{admin}", "token": TOKEN},
                "planner": {"live_takeover": live_takeover},
                "overload": {"ttft_target_s": 1000.0},
            },
            [
                *(
                    {"in": "replicas", "url": f"http://127.0.0.1:{port}", "role": role}
                    for port, role in zip(
                        ports, ("prefill", "prefill", "decode", "decode"), strict=True
                    )
                ),
                *spares,
            ],
        )
    )
    url, people = f"http://127.0.0.1:{front}", f"http://127.0.0.1:{admin}"
    with (
        process(serving, scratch / "engines.log"),
        process(router_command(config), scratch / "router.log"),
    ):
        wait_ready(url, scratch / "router.log")
        wait_serving(people, 4, scratch / "router.log")
        try:
            yield url, people
        finally:
            for path in scratch.glob("spare-*.pid"):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(int(path.read_text()), signal.SIGKILL)


def _spare(scratch: Path, port: int, load_s: float, common: Sequence[str]) -> dict[str, object]:
    """An engine that the router can start."""
    engine = [sys.executable, "-m", MODULE, "--port", str(port), "--load-s", str(load_s), *common]
    name = f"spare-{port}"
    pid, log = (shlex.quote(str(scratch / f"{name}.{kind}")) for kind in ("pid", "log"))
    return {
        **{"in": "replicas", "id": name, "url": f"http://127.0.0.1:{port}", "role": "spare"},
        "start": ["sh", "-c", f"setsid {shlex.join(engine)} >{log} 2>&1 & echo $! >{pid}"],
        "stop": ["sh", "-c", f"kill -9 -- -$(cat {pid}); rm {pid}"],
    }
