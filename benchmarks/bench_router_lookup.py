"""What a router would gain by asking the pool how much of a prompt it has.

    python benchmarks/bench_router_lookup.py --json router_lookup.json

Chats in virtual time; each turn's beginning is in the pool. `restart`: a new router begins in the
middle of them. `two routers`: each turn comes to one of two by chance, which has not seen what the
other was asked. `known`: it knows all the same, at no cost, as if it had asked and been answered
at once. `asked`: as with `flow.lookup_url`: of a prompt of which the router does not know enough it
learns what the pool has, after the time that the answer takes.
"""

import itertools
import random
from bisect import bisect_right
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from statistics import mean

from msgspec.structs import replace

from benchmarks.common import Result, Row, run_script
from tests.support.router_engines import engine_spec
from tests.support.router_world import Client, World
from vllm_kvpool.router.control.controller import Controller
from vllm_kvpool.router.control.prefix_index import SEGMENT_ENDS, Holder, PrefixIndex, spans_of
from vllm_kvpool.router.control.requests import Ask, RequestId
from vllm_kvpool.router.control.states import Role
from vllm_kvpool.router.dataplane.pool_lookup import LEAST_TOKENS, MAX_WAIT_S, WAIT_S_PER_TOKEN

PREFILL, DECODE = 2, 4
KIND = engine_spec(step_base_s=0.01, decode_sequence_s=0.0005, kv_blocks=40_000)
TOKENS_A_SPAN, OUTPUT_TOKENS, TURNS, SPANS_A_TURN = 256, 100, 8, 4
CHATS = ((30, 16), (60, 16), (40, 64))  # how many at a time, and spans of their first prompts
PAUSE_S = (0.5, 10.0)
BEGIN_S, RESTART_S, MEASURED_S = 60.0, 150.0, 60.0
SEEDS = (1, 2, 3)
ASKING_S_PER_TOKEN, ASKING_S = 4e-6, 0.002
"""Of a text, by SmolLM2's tokenizer, and of a lookup of its tokens in files by `kvpool serve`."""


class HalfIndex(PrefixIndex):
    """Does not learn of every second prompt; `whole` does."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.whole = PrefixIndex()
        self._chance = random.Random(seed)

    def add(self, prefix: tuple[int, ...], holder: Holder) -> None:  # type: ignore[override]
        self.whole.add(prefix, holder)
        if self._chance.random() < 0.5:
            super().add(prefix, holder)


class Chats:
    """So many at a time, each followed by a new one after its last turn."""

    def __init__(self, number: int, first_spans: int, seed: int) -> None:
        self.clients: list[Client] = []
        self._first_spans = first_spans
        self._chance = random.Random(seed)
        self._numbers = itertools.count(1)
        self._turns = {next(self._numbers): 0 for _ in range(number)}
        self.pool: PrefixIndex | None = None
        """What the pool has, where the router asks."""

    def begin(self, world: World, spread_s: float) -> None:
        """All that are open go on, in this world."""
        self._world, self.clients = world, []
        for chat in list(self._turns):
            self._later(chat, self._chance.uniform(0.0, spread_s))

    def _later(self, chat: int, seconds: float) -> None:
        self._world.timeline.after(seconds, lambda: self._ask(chat))

    def _ask(self, chat: int) -> None:
        spans = self._first_spans + SPANS_A_TURN * self._turns[chat]
        depth = bisect_right(SEGMENT_ENDS, spans)
        ask = Ask(
            request_id=RequestId(f"c{chat}-{self._turns[chat]}-{self._world.now}"),
            prompt_tokens=spans * TOKENS_A_SPAN,
            max_output_tokens=OUTPUT_TOKENS,
            prefix=tuple(chat * 1_000_000 + number for number in range(depth)),
            prefix_tokens=TOKENS_A_SPAN,
        )
        delay_s, asked = 0.0, self._world.now
        state = self._world.controller.state
        if self.pool is not None and state.unknown_tokens(ask) >= LEAST_TOKENS:
            delay_s = ASKING_S + ASKING_S_PER_TOKEN * ask.prompt_tokens
            assert delay_s < min(WAIT_S_PER_TOKEN * ask.prompt_tokens, MAX_WAIT_S)
            pooled = spans_of(self.pool.depth(ask.prefix)) * TOKENS_A_SPAN
            ask = replace(ask, pooled_tokens=pooled)
        self._world.timeline.after(delay_s, lambda: self._arrive(chat, ask, asked))

    def _arrive(self, chat: int, ask: Ask, asked: float) -> None:
        client = self._world.arrive(ask, OUTPUT_TOKENS)
        client.arrived = asked
        self.clients.append(client)
        self._look(chat, client)

    def _look(self, chat: int, client: Client) -> None:
        if not client.fate:
            self._world.timeline.after(0.2, lambda: self._look(chat, client))
            return
        self._turns[chat] += 1
        if self._turns[chat] == TURNS:
            del self._turns[chat]
            chat = next(self._numbers)
            self._turns[chat] = 0
        self._later(chat, self._chance.uniform(*PAUSE_S))


def cluster(seed: int) -> World:
    world = World(Controller(), seed=seed, kind=KIND, check_every=0)
    for role, number in ((Role.PREFILL, PREFILL), (Role.DECODE, DECODE)):
        for each in range(number):
            world.add(f"{role.value}{each}", role)
    world.run(2.0)
    return world


def after_restart(chats: Chats, seed: int, way: str) -> World:
    before, after = cluster(seed), cluster(seed + 100)
    chats.begin(before, BEGIN_S)
    before.run(RESTART_S)
    after.calls.pool = before.calls.pool
    for engine in after.watch.engines.values():
        engine.pool = before.calls.pool
        engine.crash(after.now)  # its batch takes the pool when it begins
        engine.start(after.now)
    if way == "known":
        after.controller.state.pool = before.controller.state.pool
    elif way == "asked":
        chats.pool = before.controller.state.pool
    chats.begin(after, PAUSE_S[1])
    after.run(MEASURED_S)
    return after


def of_two(chats: Chats, seed: int, way: str) -> World:
    world = cluster(seed)
    if way != "known":
        world.controller.state.pool = half = HalfIndex(seed)
        chats.pool = half.whole if way == "asked" else None
    chats.begin(world, BEGIN_S)
    world.run(BEGIN_S + 2 * MEASURED_S)
    return world


LIVES = {"restart": after_restart, "two routers": of_two}


@dataclass(frozen=True)
class Case:
    """What is simulated of one row."""

    what: str
    number: int
    spans: int
    way: str

    def waits(self, seed: int) -> tuple[list[float], int]:
        """Seconds to the first token of each request, in order, and how many were refused."""
        chats = Chats(self.number, self.spans, seed)
        LIVES[self.what](chats, seed, self.way)
        since = 0.0 if self.what == "restart" else BEGIN_S
        found = [each for each in chats.clients if each.arrived >= since]
        refused = sum(each.fate == "refused" for each in found)
        return sorted(e.first_token - e.arrived for e in found if e.first_token), refused


def measure(quick: bool) -> Result:
    """In virtual time, so all cores play."""
    result = Result()
    cases = [
        Case(what, number, spans, way)
        for what in LIVES
        for number, spans in (CHATS[:1] if quick else CHATS)
        for way in ("not known", "known", "asked")
    ]
    seeds = SEEDS[:1] if quick else SEEDS
    with ProcessPoolExecutor() as pool:
        played = {case: [pool.submit(case.waits, seed) for seed in seeds] for case in cases}
        for case, lives in played.items():
            waits, refused = zip(*(each.result() for each in lives), strict=True)
            row: Row = {"case": case.what, "chats": case.number}
            row |= {"first prompt": case.spans * TOKENS_A_SPAN, "the pool is": case.way}
            row |= {"requests": sum(map(len, waits)), "refused": sum(refused)}
            row["mean s"] = mean(mean(each) for each in waits)
            row["p99 s"] = mean(each[int(0.99 * len(each))] for each in waits)
            result.rows.append(row)
    return result


if __name__ == "__main__":
    run_script(__doc__, measure)
