"""What making room costs in a `file://` store that holds many cells, with four processes at it.

The store is real, and so are the files that are evicted and written while the clock runs. The
cells between them, up to two million, are rows of the index alone: nobody reads or evicts them, and
the store never looks at a file that it does not evict. Called by bench_ssd.py; run by itself, it is
one of the processes.
"""

import contextlib
import json
import os
import random
import sqlite3
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_kvpool.keys import group_of_key
from vllm_kvpool.store.base import ChunkRef
from vllm_kvpool.store.file.space import FORMAT_DIR
from vllm_kvpool.store.file.store import FileStore
from vllm_kvpool.testing.contract import key_of, new_namespace
from vllm_kvpool.testing.memory import make_buffer

NUM_PUTTERS = 3  # and one that only asks for the index, to see how long it waits
CELL_BYTES = 3000
FILE_BYTES = 4096
CHAIN = 32  # chunks of a prompt
LIMIT_S = 600.0


def put_prompt(store: FileStore, chance: random.Random) -> float:
    """Seconds of putting one new prompt."""
    namespace = new_namespace()
    first = chance.randrange(1 << 40)
    keys = [key_of(namespace, first + i) for i in range(CHAIN)]
    ids = ["", *map(group_of_key, keys)]
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
        [first] = db.execute("SELECT max(id) + 1 FROM chunk").fetchone()
        chunks = (
            (
                first + i,
                os.urandom(16),
                first + i - 1 if i % CHAIN else None,
                i % CHAIN,
                int(i % CHAIN < CHAIN - 1 and i + 1 < count),
                FILE_BYTES,
                now + i,
            )
            for i in range(count)
        )
        db.executemany(
            "INSERT INTO chunk (id, name, namespace, parent, position, children, bytes, score) "
            "VALUES (?, ?, 1, ?, ?, ?, ?, ?)",
            chunks,
        )
        db.executemany(
            "INSERT INTO cell VALUES (?, ?, ?)",
            ((first + i, os.urandom(20), FILE_BYTES) for i in range(count)),
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

    def timed(*args: Any) -> Any:
        start, cpu = time.perf_counter(), time.thread_time()
        try:
            return reserve(*args)
        finally:
            walls.append(time.perf_counter() - start)
            cpus.append(time.thread_time() - cpu)

    store._space.reserve = timed  # type: ignore[method-assign]
    chance = random.Random(seed)
    for _ in range(num_prompts):
        put_prompt(store, chance)
    store.close()
    return {"wall": walls, "cpu": cpus}


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


def measure_room(root: Path, num_cells: int, prompts_each: int) -> dict[str, list[float]]:
    """Seconds of making room for a prompt, and of waits for the index."""
    size = fill(root, num_cells, (NUM_PUTTERS + 1) * prompts_each * CHAIN)
    command = [sys.executable, "-m", "benchmarks.store_room", str(root)]
    putters = [
        subprocess.Popen(
            [*command, "put", str(size), str(prompts_each), str(seed)], stdout=subprocess.PIPE
        )
        for seed in range(1, NUM_PUTTERS + 1)
    ]
    asker = subprocess.Popen([*command, "ask", "5"], stdout=subprocess.PIPE)
    found: dict[str, list[float]] = {"wall": [], "cpu": [], "wait": []}
    for process in [*putters, asker]:
        output, _ = process.communicate(timeout=LIMIT_S)
        for name, values in json.loads(output).items():
            found[name] += values
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
