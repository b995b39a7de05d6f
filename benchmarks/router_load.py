"""A load that does not wait for answers, for measurements of the router.

Arrivals are a Poisson process, faster in a burst at the end; a server that falls behind meets the
same load (an open loop). Times count from when a request was due.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import aiohttp

REQUEST_TIMEOUT_S = 120.0
SHED_STATUSES = frozenset({429, 503})
SYLLABLES = ("ba", "do", "fe", "gi", "ko", "lu", "ma", "ne", "pi", "ro", "su", "ta", "ve", "zo")
WORDS = tuple(first + second for first in SYLLABLES for second in SYLLABLES)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSpec:
    """Requests per second, and words and tokens of each; `burst_s` 0: no bursts."""

    seconds: float
    rate: float
    prompt_words: tuple[int, int]
    """At least and at most; short ones are as frequent as long ones on a scale of powers."""
    output_tokens: tuple[int, int]
    burst_rate: float = 0.0
    burst_s: float = 0.0
    """At the end of the load."""
    seed: int = 0


class Arrival(NamedTuple):
    """One request, due `at_s` after the begin of the load."""

    at_s: float
    prompt: str
    output_tokens: int


def arrivals(spec: LoadSpec) -> Iterator[Arrival]:
    """The requests in order of time; the same for the same spec."""
    chance = random.Random(spec.seed)
    calm_s = spec.seconds - spec.burst_s
    for begin, end, rate in ((0.0, calm_s, spec.rate), (calm_s, spec.seconds, spec.burst_rate)):
        at_s = begin
        while rate > 0 and (at_s := at_s + chance.expovariate(rate)) < end:
            words = chance.choices(WORDS, k=_length(chance, *spec.prompt_words))
            yield Arrival(at_s, " ".join(words), _length(chance, *spec.output_tokens))


def _length(chance: random.Random, low: int, high: int) -> int:
    return min(high, int(low * ((high + 1) / low) ** chance.random()))


@dataclass(slots=True)
class Outcomes:
    """The outcomes of a load's requests; times in seconds."""

    counts: Counter[str] = field(default_factory=Counter)
    """`completed`, `shed` (429, 503) or `failed`."""
    first_token_s: list[float] = field(default_factory=list)
    """Of those that completed."""
    ends_s: list[float] = field(default_factory=list)
    """Of the same, from the begin of the load."""
    shed_after_s: list[float] = field(default_factory=list)


async def run_load(
    spec: LoadSpec, url: str, hold: Callable[[int], Awaitable[None]] | None = None
) -> Outcomes:
    """Send the load to `/v1/completions` as streams, and wait for all of it.

    A request that is due waits for `hold`, which is given its number.
    """
    outcomes = Outcomes()
    zero = time.monotonic()

    async def one(session: aiohttp.ClientSession, number: int, arrival: Arrival) -> None:
        if hold is not None:
            await hold(number)
        body = {"model": "scripted", "prompt": arrival.prompt, "max_tokens": arrival.output_tokens}
        first_s: float | None = None
        tail = b""
        try:
            async with session.post(
                f"{url}/v1/completions", json={**body, "temperature": 0, "stream": True}
            ) as got:
                async for data in got.content.iter_any():
                    first_s = first_s if first_s is not None else time.monotonic() - zero
                    tail = (tail + data)[-64:]
                status = got.status
        except (aiohttp.ClientError, TimeoutError):
            status = 0
        now_s = time.monotonic() - zero
        if status in SHED_STATUSES:
            outcomes.counts["shed"] += 1
            outcomes.shed_after_s.append(now_s - arrival.at_s)
        elif status == 200 and first_s is not None and b"[DONE]" in tail:
            outcomes.counts["completed"] += 1
            outcomes.first_token_s.append(first_s - arrival.at_s)
            outcomes.ends_s.append(now_s)
        else:
            outcomes.counts["failed"] += 1

    async with (
        aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S),
        ) as session,
        asyncio.TaskGroup() as group,
    ):
        for number, arrival in enumerate(arrivals(spec)):
            await asyncio.sleep(max(0.0, arrival.at_s - (time.monotonic() - zero)))
            group.create_task(one(session, number, arrival))
    return outcomes
