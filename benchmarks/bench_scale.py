"""What one call, one row and one event cost where many engines meet: the units of docs/scale.md.

    python benchmarks/bench_scale.py --json scale.json

* Microseconds of a real Mooncake master's CPU by kind of call and keys of it. Cells are small, as
  their bytes do not pass through the master.
* Milliseconds of the `file://` index at a million and ten million cells, 32 a chunk as of a model
  with 8 KV heads and 4 spans: one round of 4 chunks (reserve and settle), the same with evictions,
  128 hits written, the coldest 512 cells, opening; and its bytes a cell.
* Microseconds of the router's controller by event, with 512 and 4,096 replicas.
"""

import os
import random
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

from benchmarks.bench_router_cpu import DECODE, LOADS, PREFILL, cost
from benchmarks.common import LIMITED_BY, Result, Row, run_script
from benchmarks.limits import Meter
from tests.support.buffers import BufferArena
from tests.support.mooncake_master import HOST, MooncakeMaster
from tests.support.store_contract import key_of, new_namespace
from vllm_kvpool.identity.keys import chunk_id_of_key, make_namespace
from vllm_kvpool.storage.base import ChunkRef
from vllm_kvpool.storage.eviction import DEFAULT_POLICY, POLICIES
from vllm_kvpool.storage.file.index import FileIndex
from vllm_kvpool.storage.file.rows import CELL_ENTRY, StoredCell, chunk_name
from vllm_kvpool.storage.mooncake import MooncakeOptions, MooncakeStore

KEYS_A_CALL = (1, 8, 64, 256)
KEYS, QUICK_KEYS = 20_000, 2_000  # of each size and kind
CELL_BYTES = 4096
SEGMENT_BYTES = 512 << 20
CELLS_A_CHUNK = 32
CHAIN = 32  # chunks of a prompt
CELLS, QUICK_CELLS = (1_000_000, 10_000_000), (100_000,)
ROUND_CHUNKS = 4
ROUNDS, QUICK_ROUNDS = 200, 20
COLDEST_CELLS = 512
NUM_HITS = 128
REPLICAS, QUICK_REPLICAS = (512, 4096), (512,)
WARM_S, MEASURED_S, QUICK_S = 4.0, 2.0, 0.5
BEARABLE = dict(LOADS)["bearable"]
NAMESPACE = make_namespace("scale", "0" * 12)


def master_costs(num_keys: int) -> Iterator[Row]:
    """A row for each kind of call."""
    with MooncakeMaster() as master:
        options = MooncakeOptions(
            HOST, master.port, "tcp", "", "P2PHANDSHAKE", SEGMENT_BYTES, 16 << 20, ""
        )
        with closing(MooncakeStore(options, segment=True)) as store:
            arena = BufferArena(KEYS_A_CALL[-1] * CELL_BYTES)
            store.register(arena.buffer)
            all_buffers = [arena.take(CELL_BYTES) for _ in range(KEYS_A_CALL[-1])]
            kinds = ("put", "exists", "get")
            rows: dict[str, Row] = {kind: {"what": f"Mooncake master, {kind}"} for kind in kinds}
            for size in KEYS_A_CALL:
                calls = max(1, min(num_keys, size * 2000) // size)
                buffers = all_buffers[:size]
                namespace = new_namespace()
                keys = [
                    [key_of(namespace, i * size + j) for j in range(size)] for i in range(calls)
                ]
                chunks = [ChunkRef(chunk_id_of_key(each[0])) for each in keys]
                actions: dict[str, Callable[[int], object]] = {
                    "put": lambda i: store.put(keys[i], buffers, [chunks[i]] * size),  # noqa: B023
                    "exists": lambda i: store.exists(keys[i]),  # noqa: B023
                    "get": lambda i: store.get(keys[i], buffers),  # noqa: B023
                }
                for kind, act in actions.items():
                    before = cpu_s(master.pid)
                    for i in range(calls):
                        act(i)
                    used = cpu_s(master.pid) - before
                    rows[kind][f"us a call of {size}"] = 1e6 * used / calls
                store.remove([key for each in keys for key in each])
    yield from rows.values()


def cpu_s(pid: int) -> float:
    """Of all threads of a process."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def open_index(path: str) -> FileIndex:
    """The index of a store that has no files."""
    policy = POLICIES[DEFAULT_POLICY]
    return FileIndex(path, policy, time.time_ns, lambda path: None, lambda cell: False)


def fill(path: str, num_cells: int) -> None:
    """An index with prompts of `CHAIN` chunks, as if puts had made it."""
    open_index(path).close()
    now_ns = time.time_ns()
    num_chunks = num_cells // CELLS_A_CHUNK

    def rows() -> Iterator[tuple[object, ...]]:
        for number in range(num_chunks):
            place = number % CHAIN
            is_last = place == CHAIN - 1 or number == num_chunks - 1
            names = os.urandom(20 * CELLS_A_CHUNK)
            cells = b"".join(
                CELL_ENTRY.pack(names[at : at + 20], CELL_BYTES) for at in range(0, len(names), 20)
            )
            yield (
                *(number + 1, chunk_name(NAMESPACE, f"old{number}"), 1, place),
                *(number if place else None, int(not is_last), 0, CELLS_A_CHUNK * CELL_BYTES),
                *(now_ns - 10**9 * (num_chunks - number), 0, 0, 0, 0, 0, cells),
            )

    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA synchronous = OFF")
        db.execute("INSERT INTO namespace VALUES (1, ?)", (NAMESPACE,))
        db.executemany(f"INSERT INTO chunk VALUES ({'?, ' * 14}?)", rows())
        used_bytes = num_chunks * CELLS_A_CHUNK * CELL_BYTES
        db.execute("UPDATE store SET used_bytes = ?, incomplete_since = 0", (used_bytes,))
        db.commit()


def cells_of_round(number: int) -> list[StoredCell]:
    """The next chunks of a new prompt."""
    ids = [f"new{number}.{i}" for i in range(ROUND_CHUNKS)]
    names = [chunk_name(NAMESPACE, each) for each in ids]
    return [
        StoredCell(NAMESPACE, os.urandom(20), CELL_BYTES, name, parent, place)
        for place, (name, parent) in enumerate(zip(names, [b"", *names], strict=False))
        for _ in range(CELLS_A_CHUNK)
    ]


def index_costs(num_cells: int, rounds: int, path: str) -> Row:
    """CPU time of this thread."""
    fill(path, num_cells)
    size = os.path.getsize(path)
    full_bytes = num_cells // CELLS_A_CHUNK * CELLS_A_CHUNK * CELL_BYTES
    chance = random.Random(1)

    def spent_ms(act: Callable[..., object], *arguments: object) -> float:
        before = time.thread_time()
        act(*arguments)
        return 1e3 * (time.thread_time() - before)

    def put(number: int, size_bytes: int) -> None:
        cells = cells_of_round(number)
        while (made := index.reserve("w", cells, size_bytes)) is not None:
            made.stored.update(cell.name for cell in made.cells)
            index.close_reservation(made, 0)
            if made.room_bytes >= 0:
                return
        raise AssertionError("no room")

    def hit() -> None:
        numbers = (chance.randrange(num_cells // CELLS_A_CHUNK) for _ in range(NUM_HITS))
        index.note_hits(chunk_name(NAMESPACE, f"old{number}") for number in numbers)
        index.write_hits()

    row: Row = {"what": "file index", "cells": num_cells, "bytes a cell": size / num_cells}
    row["open ms"] = spent_ms(lambda: open_index(path).close())
    with closing(open_index(path)) as index:
        free_bytes = 2 * full_bytes
        row["put ms"] = mean(spent_ms(put, n, free_bytes) for n in range(rounds))
        size_bytes = index.used_bytes()
        row["put and evict ms"] = mean(
            spent_ms(put, n, size_bytes) for n in range(rounds, 2 * rounds)
        )
        row["hits ms"] = mean(spent_ms(hit) for _ in range(rounds))
        row["coldest ms"] = mean(spent_ms(index.coldest, COLDEST_CELLS) for _ in range(5))
    return row


def mean(values: Iterator[float]) -> float:
    """Of at least one."""
    all_values = list(values)
    return sum(all_values) / len(all_values)


def controller_costs(num_replicas: int, seconds: float) -> Row:
    """At the load that the replicas can bear, once their first requests have ended."""
    row, _ = cost(BEARABLE, seconds, num_replicas // (PREFILL + DECODE), WARM_S)
    return {"what": "router's controller"} | row


def measure(quick: bool) -> Result:
    result = Result()
    meter = Meter()
    with meter.of("master"):
        result.rows += master_costs(QUICK_KEYS if quick else KEYS)
    for row in result.rows:
        row[LIMITED_BY] = meter.limited_by("master")
    with tempfile.TemporaryDirectory() as directory:
        for num_cells in QUICK_CELLS if quick else CELLS:
            path = str(Path(directory) / f"index{num_cells}")
            result.rows.append(index_costs(num_cells, QUICK_ROUNDS if quick else ROUNDS, path))
            os.unlink(path)
    for num_replicas in QUICK_REPLICAS if quick else REPLICAS:
        result.rows.append(controller_costs(num_replicas, QUICK_S if quick else MEASURED_S))
    result.notes.append("CPU time: of the master's process, of the index's and controller's thread")
    return result


if __name__ == "__main__":
    run_script(__doc__, measure)
