"""The router against vLLM's own (package vllm-router) in front of the same scripted engines.

    VLLM_ROUTER=path/to/vllm-router python benchmarks/bench_router.py [--json FILE] [--quick]

Engines, router and load are a process each. Engines compute nothing: they take as long as their
`ScriptedSpec` says, with batches, queues and limits of memory, so that both routers face the same.
Two questions: what a router adds to a request and how many it can pass on; what happens to those it
lets in at twice the load that can be sustained. Without VLLM_ROUTER the peer's rows are missing.
`limited by` is about requests at once; under overload it is the engines' own steps, which are
pauses.
"""

import asyncio
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import aiohttp

from benchmarks.common import LIMITED_BY, Result, Row, Target, percentile, run_script, spread
from benchmarks.limits import Meter
from benchmarks.router_load import LoadSpec, Outcomes, run_load
from benchmarks.router_sides import (
    IMPORTED,
    TOKEN,
    peer_release,
    process,
    router_command,
    toml,
    wait_ready,
    wait_serving,
)
from tests.support.server_process import free_ports

TTFT_TARGET_S = 3.0
PROMPT_WORDS = 400  # when overloaded
CLIENTS = 128  # about as many as four engines run at a time
FAST = ("--step-base-s", "0", "--decode-sequence-s", "0", "--prefill-tokens-per-s", "1e9")
BUSY = (
    *("--step-base-s", "0.01", "--decode-sequence-s", "0.0005"),
    *("--prefill-tokens-per-s", "8000", "--kv-blocks", "1024", "--max-num-seqs", "32"),
)
PEER = os.environ.get("VLLM_ROUTER", "")
OURS, THEIRS, DIRECT = "ours, whole", "vllm-router, whole", "no router"
OURS_PD, THEIRS_PD = "ours, PD", "vllm-router, PD"


@contextlib.contextmanager
def side(name: str, engine_args: Sequence[str], scratch: Path) -> Iterator[str]:
    """Four engines, and one router in front of them (or none); the address for clients."""
    ports = free_ports(4)
    front, admin = free_ports(2)
    python, urls = sys.executable, [f"http://127.0.0.1:{port}" for port in ports]
    engines = [
        *(python, "-m", "tests.support.scripted_engine", "--count", "4"),
        *("--port", str(ports[0]), "--pool", "memory", "--eos-probability", "0", *engine_args),
    ]
    with contextlib.ExitStack() as stack:
        stack.enter_context(process(engines, scratch / "engines.log"))
        wait_ready(urls[0], scratch / "engines.log")
        if name == DIRECT:
            yield urls[0]
            return
        if name in (OURS, OURS_PD):
            command = router_command(write_config(name, scratch, urls, front, admin))
        else:
            command = [PEER, "--host", "127.0.0.1", "--port", str(front), "--log-level", "error"]
            command += ["--prometheus-port", str(admin)]
            if name == THEIRS:
                command += ["--worker-urls", *urls]
            else:
                command += ["--vllm-pd-disaggregation", "--kv-connector", "nixl"]
                for url in urls[:2]:
                    command += ["--prefill", url]
                for url in urls[2:]:
                    command += ["--decode", url]
        stack.enter_context(process(command, scratch / "router.log"))
        url = f"http://127.0.0.1:{front}"
        wait_ready(url, scratch / "router.log")
        if name in (OURS, OURS_PD):
            # One that serves is enough to be ready.
            wait_serving(f"http://127.0.0.1:{admin}", len(urls), scratch / "router.log")
        yield url


def write_config(name: str, scratch: Path, urls: Sequence[str], front: int, admin: int) -> Path:
    def role_of(number: int) -> str:
        return "both" if name == OURS else "prefill" if number < 2 else "decode"

    sections: dict[str, dict[str, object]] = {
        "front": {"listen": f"127.0.0.1:{front}"},
        "admin": {"listen": f"127.0.0.1:{admin}", "token": TOKEN},
        "overload": {"ttft_target_s": TTFT_TARGET_S},
    }
    replicas = [
        {"in": "replicas", "url": url, "role": role_of(number)} for number, url in enumerate(urls)
    ]
    path = scratch / "router.toml"
    path.write_text(toml(sections, replicas))
    return path


async def one_after_the_other(url: str, count: int) -> list[float]:
    """Seconds of short requests, one at a time on a kept connection."""
    body = {"model": "scripted", "prompt": "a short prompt", "max_tokens": 4, "temperature": 0}
    seconds = []
    async with aiohttp.ClientSession() as session:
        for _ in range(count):
            began = time.perf_counter()
            async with session.post(f"{url}/v1/completions", json=body | {"stream": True}) as got:
                await got.read()
                assert got.status == 200, got.status
            seconds.append(time.perf_counter() - began)
    return seconds[count // 10 :]


async def many_at_once(url: str, clients: int, seconds: float, body: Row) -> float:
    """Requests per second of so many clients, each with one request at a time, once all are busy:
    those that end in the second half of the time."""
    done = 0
    until = time.monotonic() + seconds

    async def client(session: aiohttp.ClientSession, number: int) -> None:
        nonlocal done
        turn = 0
        while time.monotonic() < until:
            turn += 1
            prompt = f"{number} {turn} {body['prompt']}"
            async with session.post(
                f"{url}/v1/completions", json={**body, "prompt": prompt}
            ) as got:
                await got.read()
                done += got.status == 200 and until - seconds / 2 <= time.monotonic() < until

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(client(session, number) for number in range(clients)))
    return done / (seconds / 2)


def passing(result: Result, scratch: Path, quick: bool) -> None:
    """What a router adds, and how much it passes on."""
    count, seconds = (100, 1.0) if quick else (500, 4.0)
    repeats = 1 if quick else 2
    body: Row = {"model": "scripted", "prompt": "short", "max_tokens": 4, "stream": True}
    times: dict[str, list[float]] = {}
    rates: dict[str, float] = {}
    meter = Meter()
    for turn in range(repeats):
        for name in [DIRECT, OURS, *([THEIRS] if PEER else [])]:
            with side(name, FAST, scratch) as url:
                times.setdefault(name, []).extend(asyncio.run(one_after_the_other(url, count)))
                if turn == 0:
                    with meter.of(name):
                        rates[name] = asyncio.run(many_at_once(url, 64, seconds, body))
    spreads = {
        name: spread("", "ms", [1e3 * each for each in found]) for name, found in times.items()
    }

    def added_ms(name: str, what: str) -> float:
        return float(str(spreads[name][what])) - float(str(spreads[DIRECT][what]))

    for name, found in spreads.items():
        row: Row = {"what": "short requests", "side": name, **found}
        row |= {f"added {what}": added_ms(name, what) for what in found}
        row |= {"requests/s": rates[name], LIMITED_BY: meter.limited_by(name)}
        result.rows.append(row)
    added = added_ms(OURS, "p50 ms")
    result.targets.append(Target("added latency, p50", added, 3.0, at_least=False, unit="ms"))


def overload(result: Result, scratch: Path, quick: bool) -> None:
    """Twice the load that the faster of the two sustains."""
    seconds, sustained_s = (4.0, 4.0) if quick else (12.0, 8.0)
    meter = Meter()
    body: Row = {
        "model": "scripted",
        "prompt": "word " * PROMPT_WORDS,
        "max_tokens": 64,
        "stream": True,
    }
    pairs = ((OURS, THEIRS), (OURS_PD, THEIRS_PD))[: 1 if quick else None]
    names = [name for pair in pairs for name in (pair if PEER else pair[:1])]
    sustained = {}
    for name in names:
        with side(name, BUSY, scratch) as url:
            sustained[name] = asyncio.run(many_at_once(url, CLIENTS, sustained_s, body))
    rate = 2 * max(sustained.values())
    result.notes.append(f"sustained: with {CLIENTS} clients, each one request at a time")
    spec = LoadSpec(
        seconds=seconds,
        rate=rate,
        prompt_words=(PROMPT_WORDS, PROMPT_WORDS),
        output_tokens=(64, 64),
    )
    loads: dict[str, Outcomes] = {}
    for name in names:
        with side(name, BUSY, scratch) as url, meter.of(name):
            loads[name] = asyncio.run(run_load(spec, url))
    ttft: dict[str, float] = {}
    goodput: dict[str, float] = {}
    for name, load in loads.items():
        ttft[name] = percentile(load.first_token_s, 0.99)
        goodput[name] = sum(each <= seconds for each in load.ends_s) / seconds
        result.rows.append(
            {
                "what": f"{rate:.0f} requests/s for {seconds:g} s, twice the sustained",
                "side": name,
                "sustained/s": sustained[name],
                "served/s in time": goodput[name],
                **spread("first token", "s", load.first_token_s),
                "refused": load.counts["shed"],
                **spread("refused after", "s", load.shed_after_s or [0.0]),
                "failed": load.counts["failed"],
                LIMITED_BY: meter.limited_by(name),
            }
        )
    for mine, other in pairs if PEER else ():
        result.targets += [
            Target(f"p99 to first token, {other} / {mine}", ttft[other] / ttft[mine], 5.0, True),
            Target(f"goodput, {mine} / {other}", goodput[mine] / goodput[other], 1.0, True),
        ]


def measure(quick: bool) -> Result:
    result = Result()
    with tempfile.TemporaryDirectory() as scratch:
        passing(result, Path(scratch), quick)
        overload(result, Path(scratch), quick)
    result.notes.append(
        "4 scripted engines: each serves whole requests, or 2 compute prompts and 2 decode (PD)"
    )
    result.notes.append(
        peer_release(PEER) if PEER else "VLLM_ROUTER is not set: nothing to compare with"
    )
    return result


if __name__ == "__main__":
    run_script(__doc__, measure, IMPORTED)
