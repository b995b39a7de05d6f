"""What making room costs in a `file://` store that holds many cells, with four processes at it.

Of the processes three put, of which one is killed (-9) half-way, so the others end what it has
begun; the fourth asks for the index and measures how long it waits. A hold is from the beginning of
a transaction to its end, by the clock and in processor time of its thread: the second shows what a
hold is on a machine that has nothing else to do.

The store is real, and so are the files that are evicted and written while the clock runs. The
cells between them, up to two million, are rows of the index alone: nobody reads or evicts them, and
the store never looks at a file that it does not evict. Called by bench_ssd.py; run by itself, it is
one of the processes.
"""

import contextlib
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.limits import Meter
from tests.support.buffers import make_buffer
from tests.support.orphans import ending_with_parent
from tests.support.store_contract import key_of, new_namespace
from vllm_kvpool.identity.keys import chunk_id_of_key
from vllm_kvpool.storage.base import ChunkRef, GetOutcome
from vllm_kvpool.storage.file.format import write_tail
from vllm_kvpool.storage.file.rows import CELL_ENTRY, Rows
from vllm_kvpool.storage.file.space import FORMAT_DIR, object_name
from vllm_kvpool.storage.file.store import FileStore

KILLED_SEED = 1
NUM_PUTTERS = 3  # and one that only asks for the index, to see how long it waits
CELL_BYTES = 3000
FILE_BYTES = 4096
SPARSE_BYTES = 5 * FILE_BYTES  # of a file that is said to be so long, and is one page
CHAIN = 32  # chunks of a prompt
LIMIT_S = 600.0


def put_prompt(store: FileStore, chance: random.Random) -> float:
    """Seconds of putting one new prompt."""
    namespace = new_namespace()
    first = chance.randrange(1 << 40)
    keys = [key_of(namespace, first + i) for i in range(CHAIN)]
    ids = ["", *map(chunk_id_of_key, keys)]
    chunks = [ChunkRef(ids[i + 1], ids[i], i) for i in range(CHAIN)]
    start = time.perf_counter()
    store.put(keys, [make_buffer(CELL_BYTES)] * CHAIN, chunks)
    return time.perf_counter() - start


def fill(root: Path, num_cells: int, num_real: int) -> int:
    """Real prompts, the coldest of all, and after them rows alone; the size that is full then."""
    size = num_cells * FILE_BYTES
    store = FileStore(str(root), size)
    chance = random.Random(0)
    for _ in range(num_real // CHAIN):
        put_prompt(store, chance)
    used = store._space.index.used_bytes()
    store.close()
    count = (size - used) // FILE_BYTES
    now = time.time_ns()
    with contextlib.closing(sqlite3.connect(root / FORMAT_DIR / "index")) as db:
        db.execute("PRAGMA synchronous = OFF")
        db.execute("PRAGMA cache_size = -1000000")  # KiB: else pages are written again and again
        [first] = db.execute("SELECT max(id) + 1 FROM chunk").fetchone()
        chunks = (
            (
                first + i,
                os.urandom(16),
                i % CHAIN,
                first + i - 1 if i % CHAIN else None,
                int(i % CHAIN < CHAIN - 1 and i + 1 < count),
                now + i,
                CELL_ENTRY.pack(os.urandom(20), FILE_BYTES),
            )
            for i in range(count)
        )
        db.executemany(
            f"INSERT INTO chunk VALUES (?, ?, 1, ?, ?, ?, 0, {FILE_BYTES}, ?, 0, 0, 0, 0, 0, ?)",
            chunks,
        )
        db.execute("UPDATE store SET used_bytes = used_bytes + ?", (count * FILE_BYTES,))
        db.commit()
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return size


def put_for(root: str, size: int, num_prompts: int, seed: int) -> dict[str, list[float]]:
    """Put prompts; seconds of making room for each, in this process's own time and by the clock."""
    store = FileStore(root, size)
    reserve = store._space.reserve
    walls: list[float] = []
    cpus: list[float] = []

    def timed(*args: Any, **how: Any) -> Any:
        start, cpu = time.perf_counter(), time.thread_time()
        try:
            return reserve(*args, **how)
        finally:
            walls.append(time.perf_counter() - start)
            cpus.append(time.thread_time() - cpu)

    store._space.reserve = timed  # type: ignore[method-assign, assignment]
    index = store._space.index
    begin = index._writing
    holds: list[float] = []
    hold_cpus: list[float] = []

    @contextlib.contextmanager
    def timed_hold() -> Iterator[Rows]:
        with contextlib.ExitStack() as transaction:
            rows = transaction.enter_context(begin())
            start, cpu = time.perf_counter(), time.thread_time()
            yield rows
            transaction.close()
            holds.append(time.perf_counter() - start)
            hold_cpus.append(time.thread_time() - cpu)

    index._writing = timed_hold  # type: ignore[method-assign]
    chance = random.Random(seed)
    for number in range(num_prompts):
        put_prompt(store, chance)
        if seed == KILLED_SEED and number >= num_prompts // 2:
            os.kill(os.getpid(), signal.SIGKILL)
        store._space._reclaim()
    store.close()
    return {"wall": walls, "cpu": cpus, "hold": holds, "hold_cpu": hold_cpus}


def ask_for(root: str, seconds: float) -> dict[str, list[float]]:
    """Take the index again and again; seconds of waiting for it."""
    waits: list[float] = []
    with contextlib.closing(sqlite3.connect(Path(root) / FORMAT_DIR / "index", timeout=0)) as db:
        db.isolation_level = None
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            start = time.perf_counter()
            while True:
                try:
                    db.execute("BEGIN IMMEDIATE")
                    break
                except sqlite3.OperationalError:
                    time.sleep(0.0002)
            waits.append(time.perf_counter() - start)
            db.execute("ROLLBACK")
            time.sleep(0.002)
    return {"wait": waits}


def measure_room(
    root: Path, num_cells: int, prompts_each: int, meter: Meter
) -> dict[str, list[float]]:
    """Seconds of making room for a prompt, of holding the index, and of waiting for it."""
    size = fill(root, num_cells, (NUM_PUTTERS + 1) * prompts_each * CHAIN)
    command = ending_with_parent([sys.executable, "-m", "benchmarks.store_room", str(root)])
    found: dict[str, list[float]] = {}
    with meter.of("room"):
        putters = [
            subprocess.Popen(
                [*command, "put", str(size), str(prompts_each), str(seed)], stdout=subprocess.PIPE
            )
            for seed in range(1, NUM_PUTTERS + 1)
        ]
        asker = subprocess.Popen([*command, "ask", "5"], stdout=subprocess.PIPE)
        for process in [*putters, asker]:
            output, _ = process.communicate(timeout=LIMIT_S)
            for name, values in json.loads(output or "{}").items():  # what was killed says nothing
                found.setdefault(name, []).extend(values)
    return found


def measure_rebuild(root: Path, num_cells: int, meter: Meter) -> dict[str, float]:
    """Seconds of opening a store whose index is lost, of its first hit, and until all is known.

    The files are sparse: each is its last page alone, of which the index is made.
    """
    namespace = new_namespace()
    store = FileStore(str(root), 2 * num_cells * SPARSE_BYTES)
    objects, parent = Path(store._space.objects), ""
    put_prompt(store, random.Random(0))
    content = memoryview(bytes(SPARSE_BYTES - FILE_BYTES))
    folders: set[Path] = set()
    for i in range(num_cells):
        key = key_of(namespace, i)
        path = objects / object_name(key)
        if path.parent not in folders:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            folders.add(path.parent)
        tail = memoryview(bytearray(FILE_BYTES))
        parent = parent if i % CHAIN else ""
        write_tail(tail, content, key, parent, i % CHAIN)
        parent = chunk_id_of_key(key)
        file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        os.pwrite(file, tail, len(content))
        os.close(file)
    store.close()
    for index in (root / FORMAT_DIR).glob("index*"):
        index.unlink()
    buffer = make_buffer(SPARSE_BYTES - FILE_BYTES)
    start, cpu = time.perf_counter(), time.process_time()
    with meter.of("rebuild"):
        store = FileStore(str(root), 2 * num_cells * SPARSE_BYTES)
        opened_s = time.perf_counter() - start
        outcomes = store.get([key], [buffer])
        assert outcomes == [GetOutcome.OK], outcomes
        hit_s = time.perf_counter() - start
        gets = []
        while not store._space.index.is_complete:
            begun = time.perf_counter()
            assert store.get([key], [buffer]) == [GetOutcome.OK]
            gets.append(time.perf_counter() - begun)
            time.sleep(0.05)
    found = {
        "opened": opened_s,
        "first hit": hit_s,
        "rebuilt": time.perf_counter() - start,
        "rebuilt, CPU": time.process_time() - cpu,
        "p99 of gets meanwhile": sorted(gets)[int(0.99 * len(gets))] if gets else hit_s,
    }
    store.close()
    return found


def main(arguments: Sequence[str]) -> None:
    root, what, *rest = arguments
    if what == "put":
        found = put_for(root, int(rest[0]), int(rest[1]), int(rest[2]))
    else:
        found = ask_for(root, float(rest[0]))
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
