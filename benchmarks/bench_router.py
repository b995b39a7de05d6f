"""The router's process before scripted engines, over HTTP: beside vLLM's own, and in a burst.

    VLLM_ROUTER=path/to/vllm-router python benchmarks/bench_router.py router|router_burst [--quick]

Engines, router and load are a process each. Engines compute nothing: they take as long as their
`ScriptedSpec` says, with batches, queues and limits of memory.
"""

import asyncio
import contextlib
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import aiohttp
import msgspec

from benchmarks.common import LIMITED_BY, Result, Row, Target, percentile, run_script, spread
from benchmarks.limits import Meter
from benchmarks.router_load import LoadSpec, Outcomes, run_load
from benchmarks.router_sides import (
    IMPORTED,
    TOKEN,
    Router,
    engines,
    other_router,
    our_router,
    peer_arguments,
    peer_release,
    spares,
)
from vllm_kvpool.router.ops.snapshot import RouterView

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
    is_pd = name in (OURS_PD, THEIRS_PD)
    with engines(scratch, "--pool", "memory", "--eos-probability", "0", *engine_args) as urls:
        if name == DIRECT:
            yield urls[0]
        elif name in (OURS, OURS_PD):
            roles = ("prefill", "prefill", "decode", "decode") if is_pd else ("both",) * 4
            replicas = [{"url": u, "role": role} for u, role in zip(urls, roles, strict=True)]
            limit = {"ttft_target_s": TTFT_TARGET_S}
            with our_router(scratch, replicas, len(urls), overload=limit) as router:
                yield router.url
        else:
            given = ["--worker-urls", *urls]
            if is_pd:
                given = ["--vllm-pd-disaggregation", "--kv-connector", "nixl"]
                given += [each for url in urls[:2] for each in ("--prefill", url)]
                given += [each for url in urls[2:] for each in ("--decode", url)]
            with other_router(
                lambda front, admin: [PEER, *peer_arguments(front, admin), *given], scratch
            ) as (url, _):
                yield url


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


def bench_router(quick: bool) -> Result:
    """The router against vLLM's own (package vllm-router) in front of the same scripted engines.

    Two questions: what a router adds to a request and how many it can pass on; what happens to
    those it lets in at twice the load that can be sustained. Without VLLM_ROUTER the peer's rows
    are missing. `limited by` is about requests at once; under overload it is the engines' own
    steps, which are pauses.
    """
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


# A burst while engines load

CALM_S, BURST_S, QUICK_S = 2.0, 15.0, 4.0
LOAD_S, QUICK_LOAD_S = 9.0, 2.0
SEED = 0
MOST_OF_WAITING = 0.7
STATE_EVERY_S = 0.05
LIMIT_S = 90.0
STARTED = 2
LOADING = ("loading_prefill", "loading_prefill_assigned")
SERVING = ("prefill", "prefill_stealing", "prefill_assigned")
BURST_ENGINES = (
    *("--eos-probability", "0", "--step-base-s", "0.01", "--decode-sequence-s", "0.0005"),
    *("--prefill-tokens-per-s", "8000", "--kv-blocks", "20000"),
)


class Way(Enum):
    """What is done with requests while a replica loads."""

    TAKE_OVER = "given to it, stolen by others"
    QUEUE = "given to nobody that loads"
    WAIT = "given to it, wait until it is loaded"


@dataclass
class Watch:
    """What the router says of its replicas: id -> state; read again and again."""

    states: dict[str, str] = field(default_factory=dict)
    stolen: int = 0
    most_loading: int = 0

    async def run(self, session: aiohttp.ClientSession, admin: str) -> None:
        decode = msgspec.json.Decoder(RouterView).decode
        while True:
            async with session.get(f"{admin}/state") as got:
                view = decode(await got.read())
            self.states = {each.id: each.state.value for each in view.replicas}
            self.stolen = view.counts["stolen"]
            self.most_loading = max(self.most_loading, len(self.loading()))
            await asyncio.sleep(STATE_EVERY_S)

    def loading(self) -> list[str]:
        return [name for name, state in self.states.items() if state in LOADING]

    def share_of(self, number: int) -> str | None:
        """The loading replica that a request is for, if it is one's turn."""
        loading = self.loading()
        places = [*loading, *(name for name, state in self.states.items() if state in SERVING)]
        place = places[number % len(places)]
        return place if place in loading else None


async def load(way: Way, spec: LoadSpec, router: Router) -> tuple[list[float], Watch]:
    """Seconds to the first token of each request, and what was seen of the replicas."""
    watch = Watch()
    async with (
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as people,
        asyncio.timeout(LIMIT_S),
        asyncio.TaskGroup() as group,
    ):
        looking = group.create_task(watch.run(people, router.admin))

        async def hold(number: int) -> None:
            place = watch.share_of(number) if way is Way.WAIT else None
            while place is not None and watch.states[place] in LOADING:
                await asyncio.sleep(STATE_EVERY_S)

        async def start() -> None:
            await asyncio.sleep(CALM_S)
            for name in [name for name in watch.states if name.startswith("spare-")]:
                order = f"{router.admin}/replicas/{name}/role"
                async with people.post(order, json={"role": "prefill"}) as got:
                    assert got.status == 202, await got.text()

        starting = group.create_task(start())
        outcomes = await run_load(spec, router.url, hold)
        await starting
        looking.cancel()
    assert outcomes.counts.keys() == {"completed"}, outcomes.counts
    assert watch.most_loading == STARTED, "no engine has loaded in the burst"
    return outcomes.first_token_s, watch


@contextlib.contextmanager
def burst_side(scratch: Path, load_s: float, *, live_takeover: bool) -> Iterator[Router]:
    """Two engines of each role that serve, a router that can start two more for prefill."""
    args = ("--pool", str(scratch / "pool"), *BURST_ENGINES)
    roles = ("prefill", "prefill", "decode", "decode")
    with (
        engines(scratch, *args) as urls,
        spares(scratch, STARTED, load_s, *args) as more,
        our_router(
            scratch,
            [*({"url": u, "role": role} for u, role in zip(urls, roles, strict=True)), *more],
            len(urls),
            planner={"live_takeover": live_takeover},
            overload={"ttft_target_s": 1000.0},
        ) as router,
    ):
        yield router


def trace(seed: int, burst_s: float) -> LoadSpec:
    """More than two prefill engines compute, less than four do."""
    return LoadSpec(
        seconds=CALM_S + burst_s,
        rate=4.0,
        burst_s=burst_s,
        burst_rate=16.0,
        prompt_words=(1000, 5000),
        output_tokens=(16, 64),
        seed=seed,
    )


def bench_router_burst(quick: bool) -> Result:
    """A burst that comes while two engines are started: router and engines, over HTTP.

    Two prefill and two decode engines serve; as the burst begins, two more for prefill are started,
    by the router, and take their time to load. The same trace three times: requests are given to
    engines that load and stolen by those that serve (`live_takeover`); nothing is given to them
    before they serve (one common queue); or each is given its share, which waits until it serves,
    which is what scaling costs without either. For that one the client holds a request back for as
    long as the engine that it is for loads. Times run from a request's arrival in all three.
    """
    result = Result()
    burst_s, load_s = (QUICK_S, QUICK_LOAD_S) if quick else (BURST_S, LOAD_S)
    waits: dict[Way, list[float]] = {}
    stolen: dict[Way, int] = {}
    meter = Meter()
    for way in (Way.TAKE_OVER, Way.WAIT) if quick else Way:
        with tempfile.TemporaryDirectory() as scratch:
            live = way is Way.TAKE_OVER
            with (
                burst_side(Path(scratch), load_s, live_takeover=live) as router,
                meter.of(way.value),
            ):
                waits[way], watch = asyncio.run(load(way, trace(SEED, burst_s), router))
        stolen[way] = watch.stolen
    for way, each in waits.items():
        row: Row = {"requests": way.value, "number": len(each), "stolen": stolen[way]}
        row |= {**spread("first token", "s", each), "last s": max(each)}
        row[LIMITED_BY] = meter.limited_by(way.value)
        result.rows.append(row)
    p99 = {way: percentile(each, 0.99) for way, each in waits.items()}
    result.targets += [
        Target(
            "burst while engines load: p99 to first token, taking over / waiting",
            p99[Way.TAKE_OVER] / p99[Way.WAIT],
            MOST_OF_WAITING,
            at_least=False,
        )
    ]
    result.notes += [
        f"2 prefill and 2 decode engines, {STARTED} more for prefill that load for {load_s:g} s",
        "the router's process and scripted engines over HTTP; all requests are let in",
    ]
    return result


if __name__ == "__main__":
    run_script(__doc__, preload=IMPORTED)
