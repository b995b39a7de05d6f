"""Real weights under load: conversations with two engines, and prompts that are never seen again.

    python benchmarks/bench_real_weights.py --json real_weights.json

The model is SmolLM2-135M-Instruct in float32, 45 KiB of KV a token (tests/support/real_model.py).

* Conversations: two servers of vLLM, one core each, answer three questions about each of some
  documents of 1,700 tokens; two conversations are about the same document. Turns go from one server
  to the other. Each rate has documents of its own. The engines' own caches hold four documents.
  Requests are timed by the client of `vllm bench serve`, which itself has no conversations.
  `found`: prompt tokens that were not computed, of all; `pool`: the connector's part.
* Nothing is reused: engines in turn are given new prompts of 1,024 tokens with 16 of answer, and
  save all. `speed` is the median over neighbouring rounds, CPU that of the engine's whole process.
  The second model has random weights, as many KV heads as heads, and much KV for what it computes:
  that of bench_away.py.

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
from collections import Counter
from collections.abc import Iterator, Sequence
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
from benchmarks.served import Conversation, Server, at_rate, converse, group_cpu_seconds
from benchmarks.sides import Holder
from tests.e2e.engine import Engine, EngineSpec, Prompt
from tests.support.models import make_model
from tests.support.mooncake_master import MooncakeMaster, free_port
from tests.support.real_model import NAME, ModelUnavailable, real_model

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
RATES, ONE_RATE = (1.0, 2.0), (1.0,)  # turns a second, over both engines
DOCUMENTS, QUICK_DOCUMENTS = 3, 1
SEED = 7
REAL_KV_BYTES = 30 * 3 * 64 * 2 * 4
BLOCK = 128  # vLLM's default on a CPU
CACHE_BYTES = 368 << 20
POOL_BYTES = 6 << 30
SERVER = (
    *("--dtype", "float32", "--max-model-len", "4096", "--enforce-eager", "--max-num-seqs", "16"),
    *("--kv-cache-memory-bytes", str(CACHE_BYTES), "--disable-uvicorn-access-log"),
)
PROMPTS, ROUNDS, QUICK_ROUNDS = 2, 3, 1
SETTLE_S = 1.0


@dataclass(frozen=True)
class Side:
    """What an engine caches with; `store` takes a directory and a master."""

    name: str
    arguments: tuple[str, ...] = ()
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
NOTHING = Side("nothing cached", arguments=("--no-enable-prefix-caching",))
SERVED = (
    NOTHING,
    OWN_CACHE,
    FILES,
    MOONCAKE,
    IN_TREE,
)
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
    """Of vLLM's connector, whose block hashes begin with a random one unless Python's are fixed."""
    env = mooncake_environment(master, directory, 0)
    config = directory / "mooncake.json"
    # An engine that owns none of the cluster's memory reads all of it over TCP.
    config.write_text(json.dumps(json.loads(config.read_text()) | {"mode": "standalone-store"}))
    return env | {"PYTHONHASHSEED": "0"}


# Conversations


def serve(side: Side, model: Path, quick: bool) -> Iterator[Row]:
    """One pair of servers at every rate."""
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
            arguments = (*SERVER, *side.arguments, *options)
            log = place / "server.log"
            servers.append(stack.enter_context(Server(model, core, arguments, env, log)))
        for server in servers:
            server.wait_ready()
        pieces = documents()
        warm = Conversation(0.0, next(pieces), QUESTIONS[:1])
        for server in servers:  # the first passes of an engine are slow
            asyncio.run(converse([server.url], [warm], OUTPUT_TOKENS, THINK_S))
        # Without a cache, the cores are full at any rate.
        for rate in ONE_RATE if quick or side is NOTHING else RATES:
            asked = list(itertools.islice(pieces, QUICK_DOCUMENTS if quick else DOCUMENTS))
            conversations = at_rate(asked, QUESTIONS, TURNS, rate, SEED)
            yield {
                "part": "conversations",
                "side": side.name,
                "turns/s": rate,
                **measure_rate(servers, pool, conversations),
            }


def measure_rate(
    servers: Sequence[Server], pool: Cluster, conversations: Sequence[Conversation]
) -> Row:
    def cpu_seconds() -> float:
        return sum(server.cpu_seconds() for server in servers) + pool.holder.cpu_seconds()

    def counters() -> Counter[str]:
        totals: Counter[str] = Counter()
        for server in servers:
            totals.update(server.counters())
        return totals

    cpu, before, began = cpu_seconds(), counters(), time.monotonic()
    urls, meter = [server.url for server in servers], Meter()
    with meter.of("turns"):
        turns = asyncio.run(converse(urls, conversations, OUTPUT_TOKENS, THINK_S))
    seconds = time.monotonic() - began
    counted = counters()
    counted.subtract(before)
    prompts = counted["vllm:prompt_tokens_total"]
    loaded = counted["vllm:external_prefix_cache_hits_total"]
    first = [1e3 * turn.ttft for turn in turns]
    between = [1e3 * each for turn in turns for each in turn.between_tokens]
    return {
        "turns": len(turns),
        "found": (counted["vllm:prefix_cache_hits_total"] + loaded) / prompts,
        "pool": loaded / prompts,
        "TTFT mean ms": fmean(first),
        "TTFT p50 ms": median(first),
        "TTFT p99 ms": percentile(first, 0.99),
        "between tokens mean ms": fmean(between),
        "between tokens p99 ms": percentile(between, 0.99),
        "tokens/s": sum(turn.output_tokens for turn in turns) / seconds,
        "CPU s / turn": (cpu_seconds() - cpu) / len(turns),
        LIMITED_BY: meter.limited_by("turns"),
    }


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


def save_all(name: str, kv_token_bytes: int, model: Path, quick: bool) -> Iterator[Row]:
    """Engines over each store take turns with one that has none."""
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
                llm={"kv_cache_memory_bytes": CACHE_BYTES},
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
    for side in (FILES,) if quick else SERVED:
        result.rows += serve(side, model, quick)
    result.rows += save_all(f"{NAME} (GQA)", REAL_KV_BYTES, model, quick)
    if quick:
        return result
    with tempfile.TemporaryDirectory(prefix="bench") as directory:
        mha = make_model(Path(directory), MHA)
        nbytes = MHA.layers * MHA.kv_heads * MHA.head_dim * 2 * 4
        result.rows += save_all("random weights (MHA)", nbytes, mha, quick)
    return result


if __name__ == "__main__":
    run_script(__doc__, measure)
