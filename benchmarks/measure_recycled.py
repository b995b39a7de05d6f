"""What writing over the files of evicted cells is worth (`RecycledFiles`).

    python benchmarks/measure_recycled.py [--dir DIRECTORY] [--rounds 16]

Two full stores on one file system take the same puts in turns, each round in the other order. One
writes over the files of what it evicts, the other deletes them and makes new ones. The figures are
medians over rounds of new files over recycled ones, in wall time and in processor time of the
process, and of one batch of 16 MiB.
"""

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

from tests.support.store_contract import key_of, new_namespace
from vllm_kvpool.identity.keys import chunk_id_of_key
from vllm_kvpool.storage.base import Buffer, ChunkRef, PutOutcome, map_buffer
from vllm_kvpool.storage.file.store import FileStore

BATCH_BYTES = 16 << 20
STORE_BYTES = 512 << 20
BATCHES = 4  # of a round
CELL_SIZES = (256 << 10, 1 << 20)


class Side:
    """A full store, and what its rounds took."""

    def __init__(self, path: Path, memory: Buffer, cell_bytes: int, *, recycles: bool) -> None:
        self._store = FileStore(str(path), STORE_BYTES)
        if not recycles:
            self._store._space._is_local = False  # a network file system's are never written over
        self._memory = memory
        self._store.register(memory)
        starts = range(0, BATCH_BYTES, cell_bytes)
        self._buffers = [memory.part(start, start + cell_bytes) for start in starts]
        self._namespace, self._num_keys = new_namespace(), 0
        self.wall_s: list[float] = []
        self.cpu_s: list[float] = []
        for _ in range(STORE_BYTES // BATCH_BYTES + BATCHES):
            self._put()

    def _put(self) -> None:
        numbers = range(self._num_keys, self._num_keys + len(self._buffers))
        keys = [key_of(self._namespace, number) for number in numbers]
        self._num_keys += len(keys)
        chunks = [ChunkRef(chunk_id_of_key(key)) for key in keys]
        assert set(self._store.put(keys, self._buffers, chunks)) == {PutOutcome.STORED}

    def round(self) -> None:
        began, cpu = time.perf_counter(), time.process_time()
        for _ in range(BATCHES):
            self._put()
        self.wall_s.append(time.perf_counter() - began)
        self.cpu_s.append(time.process_time() - cpu)

    def close(self) -> None:
        self._store.unregister(self._memory)
        self._store.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", help="where to write; default: the system's temporary directory")
    parser.add_argument("--rounds", type=int, default=16)
    given = parser.parse_args()
    memory = map_buffer(BATCH_BYTES)
    memory.view[:] = os.urandom(BATCH_BYTES)
    for cell_bytes in CELL_SIZES:
        with tempfile.TemporaryDirectory(dir=given.dir, prefix="kvpool-measured-") as name:
            sides = [
                Side(Path(name) / kind, memory, cell_bytes, recycles=kind == "recycled")
                for kind in ("recycled", "new")
            ]
            for number in range(given.rounds):
                for side in sides if number % 2 else sides[::-1]:
                    side.round()
            recycled, new = sides
            for what, ours, theirs in (
                ("wall", recycled.wall_s, new.wall_s),
                ("CPU", recycled.cpu_s, new.cpu_s),
            ):
                ratio = statistics.median(b / a for a, b in zip(ours, theirs, strict=True))
                one, other = (1e3 * statistics.median(x) / BATCHES for x in (ours, theirs))
                print(
                    f"cells of {cell_bytes >> 10} KiB, {what}: {ratio:.2f} times "
                    f"({other:.1f} ms new, {one:.1f} ms recycled)"
                )
            for side in sides:
                side.close()


if __name__ == "__main__":
    main()
