"""Lookup of a 131,072-token prompt with 8 KV heads in a real Mooncake master.

    python benchmarks/bench_lookup.py --json lookup.json

A process fills the master with the cells of 512 chunks (8 heads, 4 spans: 16,384 keys of a few
bytes). The scheduler side then looks up prompts that share their first 0 to 512 chunks with what is
stored. Times in milliseconds:

* `answer`: from the request's arrival until its answer is there; it holds all of the following
  but `match`. The scheduler's thread sleeps meanwhile;
* `chain`: hashing the prompt, on the lookup thread; `asking`: the store calls of the tier's thread;
* `add`, `match`: what the scheduler's thread spends when the request comes, and when it is matched.

The rows with states are of a model that has recurrent states too (16 units, 4 spans), stored after
three chunks: a hit ends at the largest boundary with a state that the stored prefix reaches.

The rows of all cells are of a tier that loses single cells (Mooncake before 0.3.12), or of a
request whose load has failed: a further call asks for up to 8,192 of the other cells of what was
found.

The rows of a slow far tier have a near tier in this process that holds all, or part, of a short
prompt, and a far one that takes a second for each call: how many chunks are found, in what time.

Every store call's thread is checked. The other way, beside it: one call that asks for all keys, of
the pool's cells and of vLLM's (every 16-token block of every head).
"""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from benchmarks.common import (
    LIMITED_BY,
    Child,
    Result,
    Row,
    Target,
    run_script,
    spread,
)
from benchmarks.limits import Meter
from benchmarks.sides import native_client
from tests.support.buffers import make_buffer, random_bytes
from tests.support.fakes import FakePins, FakeRequest
from tests.support.memory_store import MemoryStore
from tests.support.mooncake_master import MooncakeMaster
from vllm_kvpool.config import KVPoolConfig, KVRole, RequestOptions
from vllm_kvpool.identity.chunk_hash import ChunkChain, RequestIdentity
from vllm_kvpool.identity.keys import make_namespace
from vllm_kvpool.layout.topology import KVCacheGroup, LayerGroup, Topology
from vllm_kvpool.metrics import MetricsRegistry
from vllm_kvpool.scheduler.lookup import Lookup
from vllm_kvpool.scheduler.lookup_service import LOOKUP_TIMEOUT_S, LookupService
from vllm_kvpool.scheduler.pool_scheduler import PoolScheduler
from vllm_kvpool.scheduler.prefix_search import CellNames
from vllm_kvpool.scheduler.request import PoolShape, ScheduledStep
from vllm_kvpool.scheduler.request_lookups import ANSWER_SHARE
from vllm_kvpool.storage.backends import open_store
from vllm_kvpool.storage.base import ChunkRef, Store
from vllm_kvpool.storage.url import parse_store_url

PROMPT_TOKENS, CHUNK, BLOCK = 131_072, 256, 16
NUM_CHUNKS = PROMPT_TOKENS // CHUNK
TOPOLOGY = Topology(num_heads=8, tp_size=1, stages=((0, 32),), layer_span=8)
NAMES = CellNames(make_namespace("bench", "0" * 12), [LayerGroup(TOPOLOGY, row_bytes=512)])
STORED_CHUNKS = (0, 1, 100, 317, 511, 512)
STATES = LayerGroup(
    Topology(num_heads=16, tp_size=1, stages=((0, 32),), layer_span=8, layer_group="state"),
    row_bytes=4096,
    is_state=True,
)
HYBRID = CellNames(NAMES.namespace, [*NAMES.layer_groups, STATES])
BOUNDARIES = (1, 100, 317)  # chunks before a stored state
CELL_BYTES = 64
REPEATS, QUICK_REPEATS = 60, 10
EXISTS_REPEATS = 10
FAR_CALL_S = 1.0
FAR_LOOKUPS = 8
SHORT_CHUNKS = 64
ANSWER_TIMEOUT_S = 10.0
MAX_ANSWER_MS = 3.0
MAX_NEAR_MS = 10.0


def prompt(stored: int) -> list[int]:
    """Shares exactly its first `stored` chunks with the stored one."""
    # Token ids that do not fit a byte cost what real ones cost.
    tokens = [1000 + i % 100_000 for i in range(PROMPT_TOKENS)]
    if stored < NUM_CHUNKS:
        tokens[stored * CHUNK] += 1
    return tokens


def chain_of(tokens: Sequence[int]) -> ChunkChain:
    chain = ChunkChain(CHUNK, RequestIdentity())
    chain.extend(tokens)
    return chain


class Arrived(FakeRequest[RequestOptions, RequestIdentity]):
    """A request whose tokens are one list that grows in place, as vLLM's."""

    def tokens(self) -> Sequence[int]:
        return self.prompt


class Filler:
    """Gives the cluster its memory and puts the keys there."""

    def __init__(self, url: str) -> None:
        self._store = open_store(parse_store_url(url), segment=True)
        self._buffer = make_buffer(CELL_BYTES)
        self._buffer.view[:] = random_bytes(CELL_BYTES, 0)
        self._store.register(self._buffer)

    def fill(self, keys: Sequence[str], chunks: Sequence[ChunkRef]) -> None:
        self._store.put(keys, [self._buffer] * len(keys), chunks)
        missing = self._store.exists(keys).count(False)
        assert not missing, f"{missing} of {len(keys)} keys are not stored"


class TimedStore:
    """The tier's store: what its `exists` calls cost, and who makes them."""

    def __init__(self, inner: Store) -> None:
        self._inner = inner
        self.forget()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def forget(self) -> None:
        self.seconds, self.calls, self.keys = 0.0, 0, 0

    def exists(self, keys: Sequence[str]) -> list[bool]:
        assert threading.current_thread() is not threading.main_thread()
        start = time.perf_counter()
        found = self._inner.exists(keys)
        self.seconds += time.perf_counter() - start
        self.calls += 1
        self.keys += len(keys)
        return found


@dataclass
class Times:
    """Milliseconds of every lookup of one prompt."""

    answer: list[float] = field(default_factory=list)
    asking: list[float] = field(default_factory=list)
    chain: list[float] = field(default_factory=list)
    add: list[float] = field(default_factory=list)
    match: list[float] = field(default_factory=list)


class Lookups:
    """The scheduler side of a model, perhaps of one with states, on one store. The main thread is
    the scheduler's."""

    def __init__(self, url: str, model: str = "attention") -> None:
        self._store = TimedStore(open_store(parse_store_url(url), segment=False))
        self._model = model
        states = self._states = model == "states"
        names = HYBRID if states else NAMES
        block = CHUNK if states else BLOCK
        lookups: Any = LookupService(
            *((self._store,), names, CHUNK),
            block=block,
            timeout_s=ANSWER_TIMEOUT_S,
            loses_cells=model == "all cells",
        )
        config = KVPoolConfig(lookup_timeout_ms=int(1000 * ANSWER_TIMEOUT_S))
        groups = (KVCacheGroup(block), KVCacheGroup(block, is_state=True))[: 1 + states]
        shape = PoolShape(CHUNK, groups, 1, 1 << 20)
        self._scheduler = PoolScheduler(
            config, KVRole.BOTH, shape, lookups, MetricsRegistry(), FakePins()
        )
        # Something runs: `match` does not wait.
        self._scheduler.plan_step(ScheduledStep({"other": 1}, lambda request_id: ()))
        self._lookups = lookups
        self._count = 0

    def one(self, tokens: list[int], stored: int, times: Times) -> tuple[int, int]:
        """Look the prompt up once; store calls and keys that took."""
        self._count += 1
        view = Arrived(f"r{self._count}", tokens, RequestOptions(), RequestIdentity())
        self._store.forget()
        start = time.perf_counter()
        self._scheduler.add(view)
        added = time.perf_counter()
        self._lookups.wait(ANSWER_TIMEOUT_S)
        answered = time.perf_counter()
        found, _ = self._scheduler.match(view.request_id, 0)
        matched = time.perf_counter()
        hit = min(stored * CHUNK, PROMPT_TOKENS - 1)
        if self._states:
            hit = max((each * CHUNK for each in BOUNDARIES if each <= stored), default=0)
        assert found == hit, (found, stored)
        self._scheduler.finish(view.request_id, ((),))
        begun = time.perf_counter()
        chain_of(tokens)
        times.chain.append(1e3 * (time.perf_counter() - begun))
        times.answer.append(1e3 * (answered - start))
        times.asking.append(1e3 * self._store.seconds)
        times.add.append(1e3 * (added - start))
        times.match.append(1e3 * (matched - answered))
        return self._store.calls, self._store.keys

    def rows(self, repeats: int) -> list[Row]:
        """A row for each stored prefix; the prompts take turns."""
        prompts = {stored: prompt(stored) for stored in STORED_CHUNKS}
        times = {stored: Times() for stored in STORED_CHUNKS}
        cost = {}
        for _ in range(repeats):
            for stored, tokens in prompts.items():
                cost[stored] = self.one(tokens, stored, times[stored])
        rows = []
        for stored, spent in times.items():
            calls, keys = cost[stored]
            suffix = {"states": ", with states", "all cells": ", all cells"}.get(self._model)
            what = f"{stored}{suffix}" if suffix else stored
            row: Row = {"stored chunks": what, "calls": calls, "keys": keys}
            for name, values in vars(spent).items():
                row |= spread(name, "", values)
            rows.append(row)
        return rows


class AllKeys:
    """One call for every key: the pool's, and as many as vLLM asks for."""

    def __init__(self, master: str) -> None:
        self._native = native_client(master, 0)

    def rows(self, keys: Sequence[str]) -> list[Row]:
        per_key = CHUNK // BLOCK // len(TOPOLOGY.all_spans())
        many = [f"{key}{i}" for key in keys for i in range(per_key)]
        rows: list[Row] = []
        for what, asked in (("cells of the pool", list(keys)), ("blocks and heads, as vLLM", many)):
            taken = []
            for _ in range(EXISTS_REPEATS):
                start = time.perf_counter()
                self._native.batch_is_exist(asked)
                taken.append(1e3 * (time.perf_counter() - start))
            row: Row = {"stored chunks": f"one call: {what}", "calls": 1, "keys": len(asked)}
            rows.append(row | spread("asking", "", taken))
        return rows


class SlowStore:
    """A tier far away."""

    def __init__(self, inner: Store) -> None:
        self._inner = inner

    def exists(self, keys: Sequence[str]) -> list[bool]:
        time.sleep(FAR_CALL_S)
        return self._inner.exists(keys)


class SlowFar:
    """Lookups while the far tier takes seconds, in a process that does nothing else."""

    def rows(self) -> list[Row]:
        """One lookup after another."""
        near, far = MemoryStore("", 1 << 24), MemoryStore("", 1 << 24)
        tokens = prompt(NUM_CHUNKS)[: SHORT_CHUNKS * CHUNK]
        hashes = chain_of(tokens).hashes
        buffer = make_buffer(1)
        for store, stored in ((near, SHORT_CHUNKS // 2), (far, SHORT_CHUNKS)):
            for chunk in hashes[:stored]:
                keys = NAMES.of_chunk(chunk)
                store.put(keys, [buffer] * len(keys), [ChunkRef("")] * len(keys))
        whole = MemoryStore("", 1 << 24)
        for chunk in hashes:
            keys = NAMES.of_chunk(chunk)
            whole.put(keys, [buffer] * len(keys), [ChunkRef("")] * len(keys))
        rows: list[Row] = []
        for what, stores in (
            ("far tier of 1 s a call, all near", (whole, SlowStore(far))),
            ("far tier of 1 s a call, half near", (near, SlowStore(far))),
        ):
            lookups: Any = LookupService(cast("Any", stores), NAMES, CHUNK)
            found, times = [], []
            for number in range(FAR_LOOKUPS):
                start = time.monotonic()
                answer_by = start + ANSWER_SHARE * LOOKUP_TIMEOUT_S
                lookups.submit(
                    Lookup(number, RequestIdentity, tokens, True, 0, start, answer_by=answer_by)
                )
                lookups.wait(ANSWER_TIMEOUT_S)
                times.append(1e3 * (time.monotonic() - start))
                (answer,) = lookups.take_results()
                found.append(answer.found_chunks)
            lookups.close()
            rows.append(
                {
                    "stored chunks": what,
                    "found": f"{min(found)} of {SHORT_CHUNKS}",
                    **spread("answer", "", times),
                }
            )
        return rows


def rows_of(child: Child, *args: Any) -> list[Row]:
    """What a child has measured, and what that was limited by."""
    meter = Meter()
    with meter.of("rows"):
        rows = child.wait_ready().call("rows", *args)
    return [row | {LIMITED_BY: meter.limited_by("rows")} for row in rows]


def measure(quick: bool) -> Result:
    result = Result()
    hashes = chain_of(prompt(NUM_CHUNKS)).hashes
    keys = [str(key) for chunk in hashes for key in NAMES.of_chunk(chunk)]
    chunks = [ChunkRef(chunk.hex()) for chunk in hashes for _ in NAMES.of_chunk(chunk)]
    states = [key for each in BOUNDARIES for key in HYBRID.of_chunk(hashes[each - 1], 1)]
    with (
        MooncakeMaster(lease_ms=60_000) as master,
        Child(Filler, f"mooncake://{master.address}?segment=256MiB") as filler,
        Child(Lookups, f"mooncake://{master.address}") as lookups,
        Child(Lookups, f"mooncake://{master.address}", "states") as hybrid,
        Child(Lookups, f"mooncake://{master.address}", "all cells") as exact,
        Child(AllKeys, master.address) as all_keys,
    ):
        for child in (filler, lookups, hybrid, exact, all_keys):
            child.wait_ready()
        start = time.perf_counter()
        filler.call("fill", keys, chunks)
        filler.call("fill", states, [ChunkRef("state")] * len(states))
        result.notes.append(f"{len(keys)} keys put in {time.perf_counter() - start:.1f} s")
        repeats = QUICK_REPEATS if quick else REPEATS
        rows = rows_of(lookups, repeats)
        result.rows += rows
        result.rows += rows_of(hybrid, repeats)
        whole = rows_of(exact, repeats)
        result.rows += whole
        ratio = float(str(whole[-1]["answer p50"])) / float(str(rows[-1]["answer p50"]))
        result.notes.append(f"all cells of a full hit: {ratio:.1f} times the sampled answer, p50")
        result.rows += rows_of(all_keys, keys)
    with Child(SlowFar) as slow_far:
        far = rows_of(slow_far)
    result.rows += far
    near_hit = float(str(far[0]["answer p99"]))
    what = "hit in the near tier beside a far one of 1 s a call, p99"
    result.targets.append(Target(what, near_hit, MAX_NEAR_MS, False, "ms"))
    for name, what in (
        ("answer", "from arrival to answer, hashing included"),
        ("asking", "asking the store"),
    ):
        slowest = max(float(str(row[f"{name} p50"])) for row in rows)
        result.targets.append(Target(f"slowest p50, {what}", slowest, MAX_ANSWER_MS, False, "ms"))
    result.notes.append("no store call was made on the scheduler's thread (checked at each)")
    return result


if __name__ == "__main__":
    run_script(__doc__, measure)
