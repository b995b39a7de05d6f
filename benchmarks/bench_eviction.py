"""What a full tier still finds of real traffic: our policies, the literature's, clairvoyance.

    python benchmarks/bench_eviction.py --trace conversation_trace.jsonl --json eviction.json

The trace is Mooncake's (`FAST25-release/traces/conversation_trace.jsonl`, published with its paper
at FAST'25): 12,031 requests of a production chat service in an hour, each with the ids of its
prompt's blocks of 512 tokens. It is not part of this project; `CONVERSATION_TRACE` names it to
run_all.py, and without it only made-up traffic is measured. A block counts as found if all before
it are.

* Simulated, at five capacities: share of the blocks found by each policy of eviction_policies.py.
  `mean` and `worst` compare with `clairvoyant` over the capacities; `first half` and `second half`
  are the means of the two half hours. The half-life and the size of the memory were chosen on the
  first half.
* Made-up traffic at one capacity: chats, chats whose users take their time, chats among prompts
  that are never seen again, shared beginnings, and prompts asked in turn that are together a fifth
  larger than the cache, of which nothing ordered by time finds any.
* The real tiers, with cells of a few bytes: `host` is transfer/host_cache.py over all requests,
  `file` is `file://` over the first of them. The bound of files counts blocks of the disk, so they
  may be a few cells less.
"""

import ctypes
import heapq
import json
import mmap
import os
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any, Self

from benchmarks.common import Result, Row, Target, run_script
from benchmarks.eviction_policies import (
    BASELINES,
    Belady,
    Cache,
    Lru,
    Played,
    Request,
    Scored,
    Unbounded,
    play,
    total_chunks,
)
from vllm_kvpool.staging.slots import SlotPool, SlotUse
from vllm_kvpool.storage.base import Buffer, ChunkRef
from vllm_kvpool.storage.eviction import DEFAULT_POLICY, POLICIES
from vllm_kvpool.storage.file.store import FileStore
from vllm_kvpool.transfer.host_cache import CacheEntry, HostCache
from vllm_kvpool.transfer.ops import Slab, SlabKind

VARIABLE = "CONVERSATION_TRACE"
CAPACITIES, QUICK_CAPACITIES = (1000, 2000, 5000, 10_000, 30_000), (1000, 2000)
HOST_CAPACITIES, FILE_CAPACITIES = (1000, 5000, 10_000), (2000, 5000)
QUICK_REQUESTS, FILE_REQUESTS, QUICK_FILE_REQUESTS = 3000, 1000, 300
MADE_UP_CAPACITY, QUICK_MADE_UP = 5000, 0.1
DEFAULT = f"{DEFAULT_POLICY} (default)"
FORGETFUL = f"{DEFAULT_POLICY} without memory"
CLAIRVOYANT = "clairvoyant"
NAMES = (CLAIRVOYANT, DEFAULT, FORGETFUL, "lru", "LRU of single blocks", *BASELINES)
FILE_BYTES = 4096  # what a small cell takes of a disk
EPOCH_NS = 10**18  # the trace's first moment on the stores' clock
MOST_CELLS = 256
SECOND, MINUTE = 10**9, 60 * 10**9
SEED = 19


def read_trace(path: Path) -> list[Request]:
    with path.open() as lines:
        records = [json.loads(line) for line in lines]
    return [
        Request(EPOCH_NS + int(record["timestamp"]) * 10**6, tuple(record["hash_ids"]))
        for record in records
    ]


# Made-up traffic


class Numbers:
    """Numbers of chunks that have not been yet."""

    def __init__(self) -> None:
        self._next = 0

    def take(self, count: int) -> tuple[int, ...]:
        self._next += count
        return tuple(range(self._next - count, self._next))


def chats(
    order: random.Random, count: int, *, one_offs: float, think_s: float
) -> Iterator[Request]:
    """Conversations that begin within an hour, and prompts that are never seen again."""
    numbers = Numbers()
    systems = [numbers.take(order.randint(2, 20)) for _ in range(50)]
    popularity = [1 / (rank + 1) for rank in range(len(systems))]
    line: list[tuple[int, int, tuple[int, ...]]] = [
        (order.randrange(60 * MINUTE), number, ()) for number in range(count)
    ]
    heapq.heapify(line)
    while line:
        now_ns, number, prompt = heapq.heappop(line)
        if not prompt and order.random() < one_offs:
            yield Request(now_ns, numbers.take(order.randint(5, 60)))
            continue
        if prompt:
            prompt += numbers.take(order.randint(1, 6))
        else:
            (system,) = order.choices(systems, popularity)
            prompt = system + numbers.take(order.randint(1, 20))
        yield Request(now_ns, prompt)
        then_ns = now_ns + round((10 + order.lognormvariate(0, 0.8) * think_s) * SECOND)
        if order.random() < 0.6 and then_ns < 60 * MINUTE:
            heapq.heappush(line, (then_ns, number, prompt))


def shared(order: random.Random, count: int) -> Iterator[Request]:
    """Prompts that begin with one of 2,000 documents, by Zipf's law."""
    numbers = Numbers()
    documents = [numbers.take(order.randint(5, 60)) for _ in range(2000)]
    popularity = [1 / (rank + 1) ** 0.9 for rank in range(len(documents))]
    for number, document in enumerate(order.choices(documents, popularity, k=count)):
        yield Request(number * SECOND // 3, document + numbers.take(order.randint(1, 10)))


def loop(count: int, chunks: int) -> Iterator[Request]:
    """The same prompts in turn, `chunks` of them all."""
    prompts = [tuple(range(start, start + 20)) for start in range(0, chunks, 20)]
    for number in range(count):
        yield Request(number * SECOND // 3, prompts[number % len(prompts)])


def made_up(scale: float) -> dict[str, list[Request]]:
    order = random.Random(SEED)
    count = int(5000 * scale)
    return {
        "chats": list(chats(order, count, one_offs=0.0, think_s=90)),
        "chats, slow users": list(chats(order, count, one_offs=0.0, think_s=400)),
        "70 % one-off prompts": list(chats(order, 2 * count, one_offs=0.7, think_s=90)),
        "shared beginnings": list(shared(order, 2 * count)),
        "a loop": list(loop(2 * count, int(1.2 * MADE_UP_CAPACITY * scale))),
    }


# Caches


KIND = SlabKind(("",), (1,))  # a chunk is one cell


class HostTierCache:
    """The host tier, without an engine around it."""

    def __init__(self, capacity: int, policy: str) -> None:
        slots = SlotPool(capacity + 2, 1)
        self._host = HostCache(slots, capacity, POLICIES[policy], {"": 1})

    def __contains__(self, chunk: int) -> bool:
        return self._host.get(str(chunk)) is not None

    def serve(self, request: Request, found: int) -> None:
        host, parent = self._host, ""
        for position, chunk in enumerate(request.chunks):
            key = str(chunk)
            if position < found:
                host.hit(key, request.now_ns)
            elif host.get(key) is None:
                slab = Slab.of(KIND, ChunkRef(key, parent, position), key)
                self._bring(host.begin(slab), request.now_ns)
            parent = key

    def _bring(self, entry: CacheEntry, now_ns: int) -> None:
        assert self._host.assign_slots(entry, SlotUse.SAVE), entry.slab.id
        self._host.arrived(entry, now_ns)
        self._host.unpin(entry)


class FileCache:
    """`file://`, by the calls that engines make."""

    def __init__(self, directory: str, capacity: int) -> None:
        self._now_ns = 0
        self._store: Any = FileStore(
            directory, capacity * FILE_BYTES, clock_ns=lambda: self._now_ns
        )
        self._memory = mmap.mmap(-1, MOST_CELLS * FILE_BYTES)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        view = memoryview(self._memory)
        self._buffers = [
            Buffer(start + at, view[at : at + 64])
            for at in range(0, MOST_CELLS * FILE_BYTES, FILE_BYTES)
        ]

    def __contains__(self, chunk: int) -> bool:
        return bool(self._store.exists([str(chunk)])[0])

    def serve(self, request: Request, found: int) -> None:
        self._now_ns = request.now_ns
        keys = list(map(str, request.chunks))
        parents = ["", *keys]
        refs = [ChunkRef(key, parents[i], i) for i, key in enumerate(keys)]
        for start in range(0, found, MOST_CELLS):
            part = keys[start : min(found, start + MOST_CELLS)]
            self._store.get(part, self._buffers[: len(part)])
        for start in range(found, len(keys), MOST_CELLS):
            part = keys[start : start + MOST_CELLS]
            self._store.put(part, self._buffers[: len(part)], refs[start : start + MOST_CELLS])

    def close(self) -> None:
        self._store.close()


# Measuring


def played_by(name: str, requests: Sequence[Request], capacity: int) -> Played:
    """What one of `NAMES` finds."""
    policy = POLICIES[DEFAULT_POLICY]
    makers: dict[str, Callable[[int], Cache]] = {
        CLAIRVOYANT: lambda capacity: Belady(capacity, requests),
        DEFAULT: lambda capacity: Scored(capacity, policy),
        FORGETFUL: lambda capacity: Scored(capacity, policy, remembers=False),
        "lru": lambda capacity: Scored(capacity, POLICIES["lru"]),
        "LRU of single blocks": Lru,
        **BASELINES,
    }
    return play(makers[name](capacity), requests)


def played_by_host(policy: str, requests: Sequence[Request], capacity: int) -> Played:
    return play(HostTierCache(capacity, policy), requests)


def played_by_files(requests: Sequence[Request], capacity: int) -> Played:
    with tempfile.TemporaryDirectory(prefix="bench") as directory:
        cache = FileCache(directory, capacity)
        played = play(cache, requests)
        cache.close()
    return played


def played_by_scores(policy: str, requests: Sequence[Request], capacity: int) -> Played:
    return play(Scored(capacity, POLICIES[policy]), requests)


class Table:
    """Rows of one traffic, played by all cores: nothing is timed."""

    def __init__(
        self, pool: Executor, traffic: str, requests: Sequence[Request], capacities: Sequence[int]
    ) -> None:
        self._pool = pool
        self._traffic = traffic
        self._requests = requests
        self._capacities = capacities
        self._players: dict[str, dict[int, Future[Played]]] = {}

    def play(self, name: str, function: Callable[..., Played], *args: Any) -> None:
        """Begin a row: `function(*args, requests, capacity)` at each capacity."""
        self._players[name] = {
            capacity: self._pool.submit(function, *args, self._requests, capacity)
            for capacity in self._capacities
        }

    def play_all(self) -> Self:
        """A row for each policy, clairvoyance first."""
        for name in NAMES:
            self.play(name, played_by, name)
        return self

    def rows(self) -> list[Row]:
        """What was found."""
        return [
            {"traffic": self._traffic, "policy": name}
            | {f"{capacity}": player.result().ratio for capacity, player in players.items()}
            for name, players in self._players.items()
        ]

    def judged_rows(self) -> list[Row]:
        """The same beside the best, which is the first row."""
        rows = self.rows()
        best = self._of(NAMES[0])
        for row in rows:
            played = self._of(str(row["policy"]))
            shares = [_share(played[c].ratio, best[c].ratio) for c in played]
            row["mean"] = sum(shares) / len(shares)
            if len(shares) == 1:
                continue
            row["worst"] = min(shares)
            for half, label in enumerate(("first half", "second half")):
                parts = [_share(played[c].ratio_of(half), best[c].ratio_of(half)) for c in played]
                row[label] = sum(parts) / len(parts)
        return rows

    def _of(self, name: str) -> dict[int, Played]:
        return {capacity: player.result() for capacity, player in self._players[name].items()}


def _share(found: float, best: float) -> float:
    return found / best if best else 1.0


def measure(quick: bool, trace: str) -> Result:
    result = Result()
    path = trace or os.environ.get(VARIABLE, "")
    scale = QUICK_MADE_UP if quick else 1.0
    with ProcessPoolExecutor() as pool:
        of_trace = begin_trace(pool, Path(path), quick) if path else None
        others = [
            Table(pool, traffic, requests, (int(MADE_UP_CAPACITY * scale),)).play_all()
            for traffic, requests in made_up(scale).items()
        ]
        if of_trace is None:
            result.notes.append(f"no trace: name it with --trace or {VARIABLE}")
        else:
            add_trace(result, *of_trace)
        for table in others:
            result.rows += table.judged_rows()
    return result


def begin_trace(
    pool: Executor, path: Path, quick: bool
) -> tuple[Sequence[Request], Table, Table, Table]:
    """The requests; all policies, the real host tier, and real files, which take longest."""
    requests = read_trace(path)[: QUICK_REQUESTS if quick else None]
    first = requests[: QUICK_FILE_REQUESTS if quick else FILE_REQUESTS]
    traffic = f"the first {len(first)} requests"
    files = Table(pool, traffic, first, (200,) if quick else FILE_CAPACITIES)
    files.play("file://", played_by_files)
    for policy in POLICIES:
        files.play(f"{policy}, simulated", played_by_scores, policy)
    host = Table(pool, "trace", requests, QUICK_CAPACITIES[:1] if quick else HOST_CAPACITIES)
    for policy in POLICIES:
        host.play(f"host://?policy={policy}", played_by_host, policy)
    policies = Table(pool, "trace", requests, QUICK_CAPACITIES if quick else CAPACITIES)
    return requests, policies.play_all(), host, files


def add_trace(
    result: Result, requests: Sequence[Request], policies: Table, host: Table, files: Table
) -> None:
    rows, tiers = policies.judged_rows(), host.rows()
    result.rows += [*rows, *tiers, *files.rows()]
    ratio = play(Unbounded(), requests).ratio
    result.notes.append(
        f"trace: {len(requests)} requests, {total_chunks(requests)} blocks; "
        f"unbounded finds {ratio:.3f}"
    )
    judge(result, rows, tiers)


def judge(result: Result, rows: Sequence[Row], tiers: Sequence[Row]) -> None:
    """The default against all others that cannot see the future, and the host tier against it."""
    by_name = {str(row["policy"]): row for row in rows}
    ours = by_name.pop(DEFAULT)
    del by_name[CLAIRVOYANT]
    for label in ("mean", "worst", "second half"):
        name, best = max(((n, float(str(r[label]))) for n, r in by_name.items()), key=_second)
        what = f"{label} over the capacities, default over the best other ({name})"
        result.targets.append(Target(what, float(str(ours[label])) / best, 1.0, True))
    host = tiers[0]
    for capacity in set(host) & set(ours) - {"traffic", "policy"}:
        what = f"the real host tier over the simulation, {capacity} blocks"
        ratio = float(str(host[capacity])) / float(str(ours[capacity]))
        result.targets.append(Target(what, ratio, 0.98, True))


def _second(pair: tuple[str, float]) -> float:
    return pair[1]


if __name__ == "__main__":
    run_script(__doc__, measure, trace=f"a trace of requests; also {VARIABLE}")
