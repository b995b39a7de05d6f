"""A burst that comes while two engines are started: the router's process, scripted engines, HTTP.

    python benchmarks/bench_router_burst.py [--json FILE] [--quick]

Two prefill and two decode engines serve; as the burst begins, two more for prefill are started, by
the router, and take their time to load. The same trace three times: requests are
given to engines that load and stolen by those that serve (`live_takeover`); nothing is given to
them before they serve (one common queue); or each is given its share, which waits until it serves,
which is what scaling costs without either. For that one the client holds a request back for as long
as the engine that it is for loads. Times run from a request's arrival in all three.
"""

import asyncio
import tempfile
import time
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import aiohttp
import msgspec

from benchmarks.common import LIMITED_BY, Result, Row, Target, percentile, run_script, spread
from benchmarks.limits import Meter
from benchmarks.router_load import Arrival, LoadSpec, arrivals
from benchmarks.router_sides import IMPORTED, TOKEN, burst_side
from vllm_kvpool.router.ops.snapshot import RouterView

CALM_S, BURST_S, QUICK_S = 2.0, 15.0, 4.0
LOAD_S, QUICK_LOAD_S = 9.0, 2.0
SEED = 0
MOST_OF_WAITING = 0.7
STATE_EVERY_S = 0.05
LIMIT_S = 90.0
STARTED = 2
LOADING = ("loading_prefill", "loading_prefill_assigned")
SERVING = ("prefill", "prefill_stealing", "prefill_assigned")


class Way(Enum):
    """What is done with requests while a replica loads."""

    TAKE_OVER = "given to it, stolen by others"
    QUEUE = "given to nobody that loads"
    WAIT = "given to it, wait until it is loaded"


@dataclass
class Watch:
    """What the router says of its replicas: id -> state; read again and again."""

    states: dict[str, str]
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


async def ask(session: aiohttp.ClientSession, url: str, arrival: Arrival) -> float:
    """When the first piece of its answer has come, on the monotonic clock."""
    body = {
        **{"model": "scripted", "prompt": arrival.prompt, "max_tokens": arrival.output_tokens},
        **{"temperature": 0, "stream": True},
    }
    async with session.post(f"{url}/v1/completions", json=body) as got:
        assert got.status == 200, (got.status, await got.text())
        await got.content.readany()
        first = time.monotonic()
        await got.read()
        return first


async def load(way: Way, spec: LoadSpec, url: str, admin: str) -> tuple[list[float], Watch]:
    """Seconds to the first token of each request, and what was seen of the replicas."""
    headers = {"Authorization": f"Bearer {TOKEN}"}
    watch = Watch({})
    waits: list[float] = []
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as clients,
        aiohttp.ClientSession(headers=headers) as people,
        asyncio.timeout(LIMIT_S),
        asyncio.TaskGroup() as group,
    ):
        looking = group.create_task(watch.run(people, admin))
        zero = time.monotonic()

        async def one(number: int, arrival: Arrival) -> None:
            place = watch.share_of(number) if way is Way.WAIT else None
            while place is not None and watch.states[place] in LOADING:
                await asyncio.sleep(STATE_EVERY_S)
            waits.append(await ask(clients, url, arrival) - zero - arrival.at_s)

        async def start() -> None:
            await asyncio.sleep(CALM_S)
            for name in [name for name in watch.states if name.startswith("spare-")]:
                order = f"{admin}/replicas/{name}/role"
                async with people.post(order, json={"role": "prefill"}) as got:
                    assert got.status == 202, await got.text()

        async with asyncio.TaskGroup() as requests:
            requests.create_task(start())
            for number, arrival in enumerate(arrivals(spec)):
                await asyncio.sleep(max(0.0, zero + arrival.at_s - time.monotonic()))
                requests.create_task(one(number, arrival))
        looking.cancel()
    assert watch.most_loading == STARTED, "no engine has loaded in the burst"
    return waits, watch


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


def measure(quick: bool) -> Result:
    result = Result()
    burst_s, load_s = (QUICK_S, QUICK_LOAD_S) if quick else (BURST_S, LOAD_S)
    waits: dict[Way, list[float]] = {}
    stolen: dict[Way, int] = {}
    meter = Meter()
    for way in (Way.TAKE_OVER, Way.WAIT) if quick else Way:
        with tempfile.TemporaryDirectory() as scratch:
            live = way is Way.TAKE_OVER
            with (
                burst_side(Path(scratch), load_s, live_takeover=live) as (url, admin),
                meter.of(way.value),
            ):
                waits[way], watch = asyncio.run(load(way, trace(SEED, burst_s), url, admin))
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
    run_script(__doc__, measure, IMPORTED)
