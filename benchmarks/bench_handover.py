"""Handing a prompt over, from prefill's answer to decode's first token, and what each hop takes.

    python benchmarks/bench_handover.py --json handover.json

Two servers of vLLM on a core each, prefill and decode, for each way: the pool over Mooncake (each
engine gives 2 GiB of memory) and over files of one host, vLLM's NixlConnector and its
MooncakeConnector, both in host memory. The benchmark itself is the proxy of all: it sends the
prompt to prefill for one token, and the same prompt to decode: for the peers once that answer is
there, with what it says of its blocks, for the pool at the same time, as its router does. `gap` is
the time from prefill's answer to decode's first token. Every prompt is new and ends a random number
of tokens behind the named length. The ways take turns, request by request. The
model has 8 layers, random weights and 16 KiB of KV a token.

* `loaded`: prompt tokens that decode did not compute, of all. `CPU s`: processor time of both
  servers and their engines a request, prefill included; Mooncake's master is not counted.
* `decode` names what decode is started with: as prefill (blocks of 128 tokens, one rank), with
  blocks of 256, with two ranks, which share the cores with prefill.
  With two ranks Linux can leave prefill's worker without a core for seconds: decode's engine core
  polls for its ranks with `sched_yield`.
* A worker of vLLM polls for a second after each step; the pool's sleeps after a step that
  computes nothing. With `no spinning` the workers of both servers, of all ways, poll for 10 ms.
* Prefill killed: all of its processes end right after its answer; `first token` is decode's, of one
  request, beside that of a prompt of the same length that decode computes alone.
* The servers of a pair that has failed stand still: a request without an end keeps an engine
  making steps, on the cores of the others.
* NIXL (UCX, its own choice of transports) polls in a thread of each engine without a pause; here
  the thread pauses for 1 ms between two polls, and the servers are stopped while the other ways
  have their turn. vLLM would move all ranks to the machine's last core for NIXL: here each keeps
  its own, and NIXL's threads may use both. MooncakeConnector (TCP) asks for its GPU's number, which
  is answered with 0; its prefill gives up what decode does not fetch after 60 s, not 480.
* Hops: the pool's two engines without a model (benchmarks/model_free_engine.py; a forward pass
  sleeps for 50 us a token), from the end of prefill's last forward pass: all cells gathered from
  the pages (0: before the last pass), all in the store, the answer known to decode's scheduler,
  decode's pages filled. Decode asks when prefill answers, or once all is stored; `found` is what
  the answer promises of the whole chunks.
"""

import asyncio
import contextlib
import itertools
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

import aiohttp

from benchmarks.common import (
    LIMITED_BY,
    Child,
    DidNotFinish,
    Result,
    Row,
    children,
    run_script,
    spread,
)
from benchmarks.handover_hops import Answered, HopEngine, Taken, prompt
from benchmarks.handover_sides import (
    Pair,
    Servers,
    Shape,
    Way,
    first_token,
    hand_over,
    in_time,
    started,
    ways,
)
from benchmarks.limits import Meter
from benchmarks.model_free_engine import IMPORTED as ENGINE_IMPORTED
from benchmarks.model_free_engine import EngineShape
from benchmarks.served import IMPORTED as SERVER_IMPORTED
from benchmarks.served import Server
from tests.support.models import TEXT_VOCAB, LlamaShape, add_tokenizer, make_model
from tests.support.mooncake_master import HOST, MooncakeMaster

SHAPE = LlamaShape(
    layers=8,
    heads=4,
    kv_heads=4,
    head_dim=64,
    hidden=256,
    intermediate=512,
    vocab=TEXT_VOCAB,
    max_position=8192,
)
CHUNK, BLOCK = 256, 128
SAME = Shape(BLOCK)
STILL = Shape(BLOCK, spins=False)
OTHERS = (Shape(2 * BLOCK), Shape(BLOCK, ranks=2))
SHORT, MIDDLE, LONG = 512, 2048, 6144
BATCHED_TOKENS = 2048
SERVER = (
    *("--dtype", "float32", "--max-model-len", str(SHAPE.max_position), "--enforce-eager"),
    *("--max-num-seqs", "16", "--max-num-batched-tokens", str(BATCHED_TOKENS)),
    *("--kv-cache-memory-bytes", str(512 << 20), "--disable-uvicorn-access-log"),
)
SEGMENT = 2 << 30
HOP_SEGMENT = 4 << 30  # both hold all prompts of the hops: a put that waits for room fails
REQUESTS, QUICK_REQUESTS = 20, 2
LONG_REQUESTS = 10  # each takes four seconds
OTHER_REQUESTS, QUICK_OTHER_REQUESTS = 6, 1
TOGETHER, TOGETHER_ROUNDS, QUICK_TOGETHER_ROUNDS = 8, 3, 1
HOP_REQUESTS, QUICK_HOP_REQUESTS = 20, 3
LIMIT_S = 60.0  # whatever takes longer is said not to end
SETTLE_S = 0.2  # saves that go on after the first token are of this request
ENV = {"VLLM_HOST_IP": HOST, "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
ENGINE = EngineShape(
    model=SHAPE,
    block=BLOCK,
    num_blocks=16_384 // BLOCK,
    max_seqs=1,
    max_model_len=SHAPE.max_position,
    max_batched_tokens=BATCHED_TOKENS,
)
_seeds = itertools.count()


def with_tail(seed: int, tokens: int) -> int:
    """A length that ends within the next chunk."""
    return tokens + random.Random(seed).randrange(1, CHUNK)


def new_prompt(tokens: int) -> list[int]:
    """A prompt of the named length and a tail, whose beginning no other one shares."""
    seed = next(_seeds)
    return prompt(seed, with_tail(seed, tokens), SHAPE.vocab)


# Two engines and a proxy


@dataclass
class Figures:
    """Of one way, at one length of prompts."""

    gaps: list[float] = field(default_factory=list)  # s
    tokens: int = 0
    loaded: float = 0.0
    cpu_s: float = 0.0

    def row(self) -> Row:
        """The columns of what was measured, if anything was."""
        if not self.gaps:
            return {}
        return {
            "requests": len(self.gaps),
            "loaded": self.loaded / self.tokens,
            **spread("gap", "ms", [1e3 * gap for gap in self.gaps]),
            "CPU s": self.cpu_s / len(self.gaps),
        }


async def take_turn(
    pair: Pair, asked: Sequence[Sequence[int]], limit_s: float, figures: Figures
) -> None:
    """Hand all prompts over at once. A pair that fails is asked no more."""
    async with aiohttp.ClientSession() as session:
        cpu_s, loaded = pair.cpu_seconds(), pair.loaded_tokens()
        got = await asyncio.gather(
            *(hand_over(session, pair, ids, limit_s) for ids in asked), return_exceptions=True
        )
        for each in got:
            if isinstance(each, BaseException) and not isinstance(each, DidNotFinish):
                raise each
    if failures := [str(each) for each in got if isinstance(each, DidNotFinish)]:
        pair.failure = f"{len(failures)} of {len(got)} requests: {failures[0]}"
        return
    await asyncio.sleep(SETTLE_S)
    figures.gaps += [each for each in got if isinstance(each, float)]
    figures.cpu_s += pair.cpu_seconds() - cpu_s
    figures.loaded += pair.loaded_tokens() - loaded
    figures.tokens += sum(map(len, asked))


def take_turns(
    some: Sequence[Pair], decode: Shape, tokens: int, together: int, rounds: int, limit_s: float
) -> Iterator[Row]:
    """Hand new prompts over, `together` at a time, each way in turn; a row for each way."""
    figures: defaultdict[str, Figures] = defaultdict(Figures)
    meter = Meter()
    for _ in range(rounds):
        asked = [new_prompt(tokens) for _ in range(together)]
        for pair in some:
            if not pair.failure:
                with pair.turn(), meter.of(pair.way.name):
                    asyncio.run(take_turn(pair, asked, limit_s, figures[pair.way.name]))
    for pair in some:
        row: Row = {
            **{"way": pair.way.name, "decode": str(decode)},
            **{"tokens": tokens, "at a time": together},
            **figures[pair.way.name].row(),
        }
        if pair.failure:
            row["gave up"] = pair.failure
        if pair.way.name in meter.used:
            row[LIMITED_BY] = meter.limited_by(pair.way.name)
        yield row


def warm_up(some: Sequence[Pair], tokens: int, limit_s: float) -> None:
    """The first passes of an engine are slow, and peers connect with their first request."""
    for pair in some:
        if not pair.failure:
            with pair.turn():
                asked = [new_prompt(tokens)]
                asyncio.run(take_turn(pair, asked, limit_s, Figures()))


def kill_prefills(some: Sequence[Pair], limit_s: float) -> Iterator[Row]:
    """Kill each prefill right after an answer of its own; a row for each way."""
    for pair in some:
        named: Row = {"way": pair.way.name, "prefill": "killed after its answer", "tokens": MIDDLE}
        with pair.turn():
            yield named | asyncio.run(kill_prefill(pair, limit_s))


async def kill_prefill(pair: Pair, limit_s: float) -> Row:
    """Seconds of decode to the first token of a prompt computed alone, and of one whose prefill
    died; the latter a text where none came."""
    row: Row = {}
    async with aiohttp.ClientSession() as session:
        try:
            async with in_time(limit_s):
                began = time.perf_counter()
                alone = await first_token(session, pair.decode, new_prompt(MIDDLE)) - began
            row["computed alone s"] = alone
            row["first token s"] = await hand_over(
                session, pair, new_prompt(MIDDLE), limit_s, kill_prefill=True
            )
        except DidNotFinish as error:
            row["first token s"] = str(error)
    return row


@contextlib.contextmanager
def prefill_servers(
    shape: Shape = SAME,
) -> Iterator[tuple[Servers, list[Way], list[Server], list[Row]]]:
    """A prefill of each way, and a row for each way that there is none of."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench")))
        servers = Servers(add_tokenizer(make_model(directory, SHAPE)), directory, SERVER)
        master = stack.enter_context(MooncakeMaster())
        some, missing = ways(master.address, directory, SEGMENT)
        prefills = stack.enter_context(started(servers, some, shape, is_decode=False))
        yield (
            servers,
            some,
            prefills,
            [{"way": way, "gave up": why} for way, why in missing.items()],
        )


def measure_engines(quick: bool, result: Result) -> None:
    """Decode is started as prefill."""
    requests = QUICK_REQUESTS if quick else REQUESTS
    rounds = QUICK_TOGETHER_ROUNDS if quick else TOGETHER_ROUNDS
    with (
        prefill_servers() as (servers, some, prefills, missing),
        started(servers, some, SAME, is_decode=True) as decodes,
    ):
        result.rows += missing
        pairs = [Pair(*each) for each in zip(some, prefills, decodes, strict=True)]
        for tokens in (SHORT, MIDDLE) if quick else (SHORT, MIDDLE, LONG):
            warm_up(pairs, tokens, LIMIT_S)
            count = min(requests, LONG_REQUESTS) if tokens == LONG else requests
            result.rows += take_turns(pairs, SAME, tokens, 1, count, LIMIT_S)
        result.rows += take_turns(pairs, SAME, MIDDLE, TOGETHER, rounds, LIMIT_S)
        result.rows += kill_prefills(pairs, LIMIT_S)


def measure_still(quick: bool, result: Result) -> None:
    """No worker polls between its steps: the processor time of what is done."""
    requests = QUICK_REQUESTS if quick else REQUESTS
    with (
        prefill_servers(STILL) as (servers, some, prefills, _),
        started(servers, some, STILL, is_decode=True) as decodes,
    ):
        pairs = [Pair(*each) for each in zip(some, prefills, decodes, strict=True)]
        for tokens in (SHORT, MIDDLE):
            warm_up(pairs, tokens, LIMIT_S)
            result.rows += take_turns(pairs, STILL, tokens, 1, requests, LIMIT_S)


def measure_shapes(quick: bool, result: Result) -> None:
    """Decode has another block size, or another tensor-parallel size, than prefill."""
    requests = QUICK_OTHER_REQUESTS if quick else OTHER_REQUESTS
    with prefill_servers() as (servers, some, prefills, _):
        for decode in OTHERS[: 1 if quick else None]:
            with started(servers, some, decode, is_decode=True) as decodes:
                pairs = [Pair(*each) for each in zip(some, prefills, decodes, strict=True)]
                warm_up(pairs, MIDDLE, LIMIT_S)
                result.rows += take_turns(pairs, decode, MIDDLE, 1, requests, LIMIT_S)


# Without models


@dataclass
class Hops:
    """Milliseconds since the end of prefill's last forward pass, by hop."""

    ms: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    found: list[float] = field(default_factory=list)

    def rows(self, store: str, tokens: int, asked: str) -> Iterator[Row]:
        for hop, values in self.ms.items():
            row: Row = {"store": store, "tokens": tokens, "decode asks": asked, "hop": hop}
            row |= spread("", "ms", values)
            if hop in ("known", "loaded"):
                row["found"] = fmean(self.found)
            yield row


def hand_over_without_models(
    prefill: Child, decode: Child, seed: int, tokens: int, at_once: bool, hops: Hops
) -> None:
    """One prompt, through every hop; `at_once`: decode asks when prefill answers."""
    answered: Answered = prefill.call("compute", seed, tokens)
    moments = {"gathered": answered.gathered}
    if at_once:
        prefill.begin("stored")
        taken: Taken = decode.call("take", seed, tokens)
        moments["stored"] = prefill.finish()
    else:
        moments["stored"] = prefill.call("stored")
        taken = decode.call("take", seed, tokens)
    moments |= {"known": taken.known, "loaded": taken.loaded}
    for hop, at in moments.items():
        hops.ms[hop].append(1e3 * (at - answered.ended))
    hops.found.append(taken.found / (tokens // CHUNK * CHUNK))


def hop_rows(
    store: str, prefill: Child, decode: Child, repeats: int, lengths: Sequence[int]
) -> Iterator[Row]:
    """Of all lengths, asked at once and later in turn; pages are compared once a length."""
    for length in lengths:
        both = {at_once: Hops() for at_once in (True, False)}
        meter = Meter()
        for number in range(-1, repeats):
            for at_once, hops in both.items():
                seed = next(_seeds)
                tokens = with_tail(seed, length)
                with meter.of(str(at_once)) if number >= 0 else contextlib.nullcontext():
                    into = hops if number >= 0 else Hops()
                    hand_over_without_models(prefill, decode, seed, tokens, at_once, into)
            whole = tokens // CHUNK * CHUNK
            if number < 0 and prefill.call("content", whole) != decode.call("content", whole):
                raise RuntimeError("decode's pages have another content than prefill's")
        for at_once, hops in both.items():
            asked = "when prefill answers" if at_once else "once all is stored"
            for row in hops.rows(store, length, asked):
                yield row | {LIMITED_BY: meter.limited_by(str(at_once))}


def measure_hops(quick: bool, result: Result) -> None:
    repeats = QUICK_HOP_REQUESTS if quick else HOP_REQUESTS
    lengths = (SHORT, MIDDLE) if quick else (SHORT, MIDDLE, LONG)
    with tempfile.TemporaryDirectory(prefix="bench") as name, MooncakeMaster() as master:
        directory = Path(name)
        model = str(make_model(directory, SHAPE))
        for store, url in (
            ("Mooncake", f"mooncake://{master.address}?segment={HOP_SEGMENT}"),
            ("files", f"file://{directory}/pool?size=8GiB"),
        ):
            prefill, decode = (
                Child(HopEngine, core, ENGINE, "KVPoolConnector", {"store": url}, model, env=ENV)
                for core in range(2)
            )
            with children(prefill, decode):
                prefill.call("fill")
                result.rows += hop_rows(store, prefill, decode, repeats, lengths)


PARTS = {
    "engines": measure_engines,
    "still": measure_still,
    "shapes": measure_shapes,
    "hops": measure_hops,
}


def measure(quick: bool, part: str) -> Result:
    result = Result()
    for name in [part] if part else PARTS:
        PARTS[name](quick, result)
    return result


if __name__ == "__main__":
    preload = [*SERVER_IMPORTED, *ENGINE_IMPORTED]
    run_script(__doc__, measure, preload, part=f"only {' or '.join(PARTS)}")
