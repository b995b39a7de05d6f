"""Real weights under load: conversations with two engines, and prompts that are never seen again.

    python benchmarks/bench_real_weights.py --json real_weights.json

The model is SmolLM2-135M-Instruct in bfloat16: 22.5 KiB of KV a token (support/real_model.py).

* Conversations: two servers of vLLM, one core each, answer three questions about each of some
  documents of 1,700 tokens; two conversations are about the same document. Turns go from one server
  to the other. The engines' own caches hold four documents. Sides take turns: each has the same
  conversations before the next rate or round begins, about documents that were not seen before.
  Which turns meet in a batch, and which find their prompt at the engine that they come to, is
  chance: the notes have each round's ratios. `nothing cached` are the same servers in the first
  round, each request with a `cache_salt` of its own. Requests are timed by the client of `vllm
  bench serve`, which itself has no conversations. `found`: prompt tokens that were not computed, of
  all; `pool`: the connector's part.
* Nothing is reused: engines in turn are given new prompts of 1,024 tokens with 16 of answer, and
  save all. `speed` is the median over neighbouring rounds, CPU that of the engine's whole process.
  The second model has random weights in float32, as many KV heads as heads, and much KV for what it
  computes: that of bench_away.py.

Both Mooncake sides keep their bytes in the memory of one more process. Its CPU is counted in
conversations, the master's nowhere.
"""

import asyncio
import itertools
import json
import random
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.bench_away import ANSWER_TOKENS, PROMPT_TOKENS
from benchmarks.bench_away import SHAPE as MHA
from benchmarks.common import LIMITED_BY, Child, Result, Row, percentile, run_script
from benchmarks.limits import Meter
from benchmarks.model_free_engine import mooncake_environment
from benchmarks.served import (
    IMPORTED,
    Answered,
    Conversation,
    Server,
    at_rate,
    converse,
)
from benchmarks.sides import Holder
from tests.e2e.engine import Engine, EngineSpec, Prompt
from tests.support.models import make_model
from tests.support.mooncake_master import MooncakeMaster, free_port
from tests.support.real_model import NAME, ModelUnavailable, real_model
from vllm_kvpool.cli.common.engine_server import group_cpu_seconds

ROOT = Path(__file__).parents[1]
DOCUMENT_CHARS = 5_600  # about 1,700 tokens
QUESTIONS = (
    "What is this text about?",
    "Which part of it matters most to an operator?",
    "What happens when a store fails?",
    "Which numbers does it name, and for what?",
    "Who should read it first?",
    "What would you leave out of it?",
)
TURNS, OUTPUT_TOKENS, THINK_S = 3, 16, 1.0
RATES, ONE_RATE = (1.0, 3.0), (1.0,)  # turns a second, over both engines
DOCUMENTS, QUICK_DOCUMENTS = 2, 1  # of a round
SEED = 7
REAL_KV_BYTES = 30 * 3 * 64 * 2 * 2
DTYPE = "bfloat16"
BLOCK = 128  # vLLM's default on a CPU
CACHE_BYTES = 184 << 20
MHA_CACHE_BYTES = 368 << 20
POOL_BYTES = 2 << 30
SERVER = (
    *("--dtype", DTYPE, "--max-model-len", "4096", "--enforce-eager", "--max-num-seqs", "16"),
    *("--kv-cache-memory-bytes", str(CACHE_BYTES), "--disable-uvicorn-access-log"),
)
TALKS, QUICK_TALKS = 2, 1  # rounds of conversations at each rate
PROMPTS, ROUNDS, QUICK_ROUNDS = 2, 3, 1
SETTLE_S = 1.0


@dataclass(frozen=True)
class Side:
    """What an engine caches with; `store` takes a directory and a master."""

    name: str
    connector: str = ""
    store: str = ""

    def transfer(self, directory: Path, master: str) -> dict[str, Any] | None:
        if not self.connector:
            return None
        extra: dict[str, Any] = {"lookup_rpc_port": free_port()}
        if self.store:
            extra = {"store": self.store.format(directory=directory, master=master)}
        return {
            "kv_connector": self.connector,
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }


OURS, THEIRS = "KVPoolConnector", "MooncakeStoreConnector"
OWN_CACHE = Side("the engines' own caches")
FILES = Side("kvpool, files", connector=OURS, store="file://{directory}/pool?size=8GiB")
HOST_MEMORY = Side("kvpool, host memory", connector=OURS, store="host://2GiB")
MOONCAKE = Side("kvpool, Mooncake", connector=OURS, store="mooncake://{master}?segment=0")
IN_TREE = Side("vLLM's MooncakeStore", connector=THEIRS)
NOTHING = "nothing cached"
SERVED = (OWN_CACHE, FILES, MOONCAKE, IN_TREE)
SAVING = (Side("no pool"), FILES, HOST_MEMORY, MOONCAKE, IN_TREE)


def documents() -> Iterator[str]:
    """Pieces of this project's own documents, all different."""
    text = "\n".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))
    for start in range(0, len(text) - DOCUMENT_CHARS, DOCUMENT_CHARS):
        yield text[start : start + DOCUMENT_CHARS]


@dataclass
class Cluster:
    """A Mooncake master, and a process that gives it memory."""

    master: str
    holder: Child


@contextmanager
def cluster() -> Iterator[Cluster]:
    with MooncakeMaster() as master, Child(Holder, master.address, POOL_BYTES) as holder:
        yield Cluster(master.address, holder.wait_ready())


def engine_environment(directory: Path, master: str) -> dict[str, str]:
    """Of vLLM's connector."""
    env = mooncake_environment(master, directory, 0)
    config = directory / "mooncake.json"
    # An engine that owns none of the cluster's memory reads all of it over TCP.
    config.write_text(json.dumps(json.loads(config.read_text()) | {"mode": "standalone-store"}))
    return env


# Conversations


@dataclass
class Pair:
    """Two servers of one side, a core each, and the pool that theirs may be."""

    side: Side
    servers: list[Server]
    pool: Cluster

    def cpu_seconds(self) -> float:
        servers = sum(server.cpu_seconds() for server in self.servers)
        return servers + self.pool.holder.cpu_seconds()

    def counters(self) -> Counter[str]:
        totals: Counter[str] = Counter()
        for server in self.servers:
            totals.update(server.counters())
        return totals

    def converse(self, conversations: Sequence[Conversation], *, salted: bool = False) -> "Talk":
        cpu, before, began = self.cpu_seconds(), self.counters(), time.monotonic()
        urls = [server.url for server in self.servers]
        turns = asyncio.run(converse(urls, conversations, OUTPUT_TOKENS, THINK_S, salted=salted))
        seconds, counted = time.monotonic() - began, self.counters()
        counted.subtract(before)
        return Talk(turns, seconds, self.cpu_seconds() - cpu, counted)


@dataclass
class Talk:
    """What was measured of some conversations; times in seconds."""

    turns: list[Answered]
    seconds: float
    cpu_seconds: float
    counted: Counter[str]

    @property
    def mean_ttft(self) -> float:
        return fmean(turn.ttft for turn in self.turns)


@contextmanager
def pair(side: Side, model: Path) -> Iterator[Pair]:
    """Servers that have started and have each answered once: an engine's first passes are slow."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench")))
        pool = stack.enter_context(cluster())
        servers = []
        for core in range(2):
            place = directory / str(core)
            place.mkdir()
            transfer = side.transfer(directory, pool.master)
            options = ("--kv-transfer-config", json.dumps(transfer)) if transfer else ()
            env = engine_environment(place, pool.master) if side is IN_TREE else {}
            log = place / "server.log"
            servers.append(stack.enter_context(Server(model, core, (*SERVER, *options), env, log)))
        warm = Conversation(0.0, next(documents()), QUESTIONS[:1])
        for server in servers:
            server.wait_ready()
            asyncio.run(converse([server.url], [warm], OUTPUT_TOKENS, THINK_S))
        yield Pair(side, servers, pool)


def serve(model: Path, quick: bool) -> Result:
    """All sides at every rate, round by round."""
    result, meter = Result(), Meter()
    pieces = itertools.islice(documents(), 1, None)  # the first has been seen
    talks: defaultdict[tuple[str, float], list[Talk]] = defaultdict(list)
    with ExitStack() as stack:
        sides = (FILES,) if quick else SERVED
        pairs = [stack.enter_context(pair(side, model)) for side in sides]
        rates = ONE_RATE if quick else RATES
        for number, rate in itertools.product(range(QUICK_TALKS if quick else TALKS), rates):
            asked = list(itertools.islice(pieces, QUICK_DOCUMENTS if quick else DOCUMENTS))
            conversations = at_rate(asked, QUESTIONS, TURNS, rate, SEED + number)
            for each in pairs:
                with meter.of(f"{each.side.name} {rate}"):
                    talks[each.side.name, rate].append(each.converse(conversations))
            # Without a cache the cores are full at any rate, and first tokens take several times as
            # long: one round shows it.
            if (number, rate) == (0, *ONE_RATE) and not quick:
                with meter.of(f"{NOTHING} {rate}"):
                    talks[NOTHING, rate].append(pairs[0].converse(conversations, salted=True))
    for (name, rate), had in talks.items():
        limit = meter.limited_by(f"{name} {rate}")
        result.rows.append(talk_row(name, rate, had) | {LIMITED_BY: limit})
    if not quick:
        result.notes += [beside_in_tree(rate, talks) for rate in rates]
    return result


def talk_row(name: str, rate: float, had: Sequence[Talk]) -> Row:
    turns = [turn for talk in had for turn in talk.turns]
    counted = sum((talk.counted for talk in had), Counter())
    prompts = counted["vllm:prompt_tokens_total"]
    loaded = counted["vllm:external_prefix_cache_hits_total"]
    first = [1e3 * turn.ttft for turn in turns]
    between = [1e3 * each for turn in turns for each in turn.between_tokens]
    seconds = sum(talk.seconds for talk in had)
    return {
        "part": "conversations",
        "side": name,
        "turns/s": rate,
        "turns": len(turns),
        "found": (counted["vllm:prefix_cache_hits_total"] + loaded) / prompts,
        "pool": loaded / prompts,
        "TTFT mean ms": fmean(first),
        "TTFT p50 ms": median(first),
        "TTFT p99 ms": percentile(first, 0.99),
        "between tokens mean ms": fmean(between),
        "between tokens p99 ms": percentile(between, 0.99),
        "tokens/s": sum(turn.output_tokens for turn in turns) / seconds,
        "CPU s / turn": sum(talk.cpu_seconds for talk in had) / len(turns),
    }


def beside_in_tree(rate: float, talks: Mapping[tuple[str, float], Sequence[Talk]]) -> str:
    """Each round over Mooncake beside that of vLLM's connector."""
    pairs = list(zip(talks[MOONCAKE.name, rate], talks[IN_TREE.name, rate], strict=True))
    first = ", ".join(f"{ours.mean_ttft / theirs.mean_ttft:.2f}" for ours, theirs in pairs)
    cpu = ", ".join(f"{ours.cpu_seconds / theirs.cpu_seconds:.2f}" for ours, theirs in pairs)
    return (
        f"{rate:g} turns/s, {MOONCAKE.name} over {IN_TREE.name}, each round: "
        f"TTFT mean {first}; CPU {cpu}"
    )


# Nothing is reused


@dataclass
class Saver:
    """An engine, and what its rounds took, in seconds."""

    side: Side
    engine: Engine
    began_cpu: float = 0.0
    rounds: list[float] = field(default_factory=list)

    def work(self, seeds: range) -> None:
        began = time.monotonic()
        for seed in seeds:
            self.engine.generate(prompt(seed))
        self.rounds.append(time.monotonic() - began)

    def cpu_seconds(self) -> float:
        return group_cpu_seconds(self.engine.pid)


def prompt(seed: int) -> Prompt:
    ids = random.Random(seed).choices(range(3, MHA.vocab), k=PROMPT_TOKENS)
    return Prompt(ids=ids, max_tokens=ANSWER_TOKENS, logprobs=None)


def save_all(
    name: str, kv_token_bytes: int, model: Path, quick: bool, **llm: object
) -> Iterator[Row]:
    """Engines over each store take turns with one that has none; `llm`: arguments of all."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench")))
        pool = stack.enter_context(cluster())
        savers, meter = [], Meter()
        for number, side in enumerate(SAVING[:2] if quick else SAVING):
            place = directory / str(number)
            place.mkdir()
            spec = EngineSpec(
                model=model,
                block_size=BLOCK,
                kv_transfer_config=side.transfer(place, pool.master),
                env=engine_environment(place, pool.master) if side is IN_TREE else {},
                llm=llm,
            )
            savers.append(Saver(side, Engine(spec, place / "engine.log")))
            stack.callback(savers[-1].engine.kill)
        for saver in savers:
            saver.engine.generate(prompt(-1))
        time.sleep(SETTLE_S)
        for saver in savers:
            saver.began_cpu = saver.cpu_seconds()
        rounds = QUICK_ROUNDS if quick else ROUNDS
        for number in range(rounds):
            for saver in savers:
                with meter.of(saver.side.name):
                    saver.work(range(number * PROMPTS, (number + 1) * PROMPTS))
        time.sleep(SETTLE_S)
        base = savers[0]
        thousands = rounds * PROMPTS * PROMPT_TOKENS / 1e3
        base_cpu = base.cpu_seconds() - base.began_cpu
        for saver in savers:
            cpu = saver.cpu_seconds() - saver.began_cpu
            pairs = zip(base.rounds, saver.rounds, strict=True)
            yield {
                "part": f"nothing reused, {name}, {kv_token_bytes / 1024:g} KiB a token",
                "side": saver.side.name,
                "tokens/s": PROMPTS * PROMPT_TOKENS / median(saver.rounds),
                "speed": median(without / with_it for without, with_it in pairs),
                "CPU s / 1000 tokens": cpu / thousands,
                "CPU over no pool": cpu / base_cpu,
                LIMITED_BY: meter.limited_by(saver.side.name),
            }


def measure(quick: bool) -> Result:
    result = Result()
    try:
        model = real_model(Path(sys.prefix) / "kvpool-demo")
    except ModelUnavailable as error:
        result.notes.append(f"{NAME} cannot be had: {error}")
        return result
    served = serve(model, quick)
    result.rows += served.rows
    result.notes += served.notes
    llm: dict[str, Any] = {"kv_cache_memory_bytes": CACHE_BYTES, "dtype": DTYPE}
    result.rows += save_all(f"{NAME} (GQA)", REAL_KV_BYTES, model, quick, **llm)
    if quick:
        return result
    with tempfile.TemporaryDirectory(prefix="bench") as directory:
        mha = make_model(Path(directory), MHA)
        nbytes = MHA.layers * MHA.kv_heads * MHA.head_dim * 2 * 4
        llm = {"kv_cache_memory_bytes": MHA_CACHE_BYTES}
        result.rows += save_all("random weights (MHA)", nbytes, mha, quick, **llm)
    return result


if __name__ == "__main__":
    run_script(__doc__, measure, IMPORTED)
