"""Encrypted cells beside plain ones: processor time of a save and a load, seconds a GB.

    python benchmarks/bench_encryption.py [--quick] [--json encryption.json]

Through a rank's real lanes (SEAL and PUT, then GET and CHECK) over a store in memory, so a GB is
also copied once in the put and once in the get. The first two columns are sealing and checking
alone, without store. Cells are 256 KiB or 1 MiB, 16 MiB a batch, and change between rounds.
"""

import time
from collections.abc import Callable
from statistics import median

from benchmarks.common import Result, Row, Target, interleaved, run_script
from tests.support.memory_store import MemoryStore
from vllm_kvpool.identity.keys import key_digest
from vllm_kvpool.storage.base import Buffer, ChunkRef, GetOutcome, PutOutcome, map_buffer
from vllm_kvpool.storage.contents.cell_format import verify, write_header
from vllm_kvpool.storage.contents.encryption import CellCipher, EncryptedCells

BATCH_BYTES = 16 << 20
ROUNDS, QUICK_ROUNDS = 40, 5
CELL_KIB = (256, 1024)
MOST = 3.0  # times the processor time of a plain save and load


class Side:
    """Saves a batch of cells and loads it again; encrypted or plain."""

    def __init__(self, cell_bytes: int, *, encrypts: bool) -> None:
        count = BATCH_BYTES // cell_bytes
        self.keys = [f"cell-{i}" for i in range(count)]
        self.digests = [key_digest(key) for key in self.keys]
        memory, self.copy = map_buffer(BATCH_BYTES), map_buffer(BATCH_BYTES)
        memory.view[:] = b"\x5a" * BATCH_BYTES
        self.buffers = cut(memory, cell_bytes)
        self.copies = cut(self.copy, cell_bytes)
        self.store = MemoryStore("", 4 * BATCH_BYTES)
        self.cells = EncryptedCells(CellCipher([bytes(32)]), [self.store]) if encrypts else None
        self.cipher = CellCipher([bytes(32)])
        self.chunks = [ChunkRef(key) for key in self.keys]

    def save_and_load(self) -> tuple[float, float]:
        """CPU seconds a GB of a save and of a load."""
        return cpu_s_per_gb(self._save), cpu_s_per_gb(self._load)

    def seal_and_check(self) -> tuple[float, float]:
        """CPU seconds a GB without the store."""
        return cpu_s_per_gb(self._seal), cpu_s_per_gb(self._check)

    def _save(self) -> None:
        if self.cells is not None:
            outcomes = self.cells.put(0, self.keys, self.buffers, self.chunks)
        else:
            for buffer, digest in zip(self.buffers, self.digests, strict=True):
                write_header(buffer.view, digest)
            outcomes = self.store.put(self.keys, self.buffers, self.chunks)
        assert set(outcomes) == {PutOutcome.STORED}

    def _load(self) -> None:
        assert set(self.store.get(self.keys, self.buffers)) == {GetOutcome.OK}
        for key, digest, buffer in zip(self.keys, self.digests, self.buffers, strict=True):
            fault = (
                verify(buffer.view, digest, checksum=True)
                if self.cells is None
                else self.cells.decrypt(key, buffer.view)
            )
            assert fault is None, fault
        self.store.remove(self.keys)

    def _seal(self) -> None:
        for key, digest, buffer, copy in zip(
            self.keys, self.digests, self.buffers, self.copies, strict=True
        ):
            if self.cells is None:
                write_header(buffer.view, digest)
            else:
                self.cipher.encrypt(key, buffer.view, copy.view)

    def _check(self) -> None:
        for key, digest, buffer, copy in zip(
            self.keys, self.digests, self.buffers, self.copies, strict=True
        ):
            if self.cells is None:
                fault = verify(buffer.view, digest, checksum=True)
            else:
                fault = self.cipher.decrypt(key, copy.view)
            assert fault is None, fault


def cut(memory: Buffer, cell_bytes: int) -> list[Buffer]:
    """Cells side by side."""
    return [memory.part(at, at + cell_bytes) for at in range(0, memory.nbytes, cell_bytes)]


def cpu_s_per_gb(action: Callable[[], None]) -> float:
    """Processor time of an action on a batch."""
    began = time.process_time()
    action()
    return (time.process_time() - began) / BATCH_BYTES * 1e9


def measure(quick: bool) -> Result:
    """Both sides in turn; medians of rounds, and the median of the rounds' ratios."""
    result = Result()
    for kib in CELL_KIB:
        sides = {
            name: Side(kib << 10, encrypts=name == "encrypted") for name in ("plain", "encrypted")
        }
        rounds = QUICK_ROUNDS if quick else ROUNDS
        alone = interleaved({name: side.seal_and_check for name, side in sides.items()}, rounds)
        whole = interleaved({name: side.save_and_load for name, side in sides.items()}, rounds)
        for name in sides:
            row: Row = {"cell": f"{kib} KiB", "cells are": name}
            for what, times in (("alone", alone), ("with store", whole)):
                for i, call in enumerate(("save", "load")):
                    row[f"{call} {what}, CPU s/GB"] = round(median(t[i] for t in times[name]), 3)
            result.rows.append(row)
        for i, call in enumerate(("save", "load")):
            pairs = zip(whole["encrypted"], whole["plain"], strict=True)
            ratio = median(mine[i] / plain[i] for mine, plain in pairs)
            what = f"{kib} KiB, {call} with encryption over plain: processor time"
            result.targets.append(Target(what, ratio, MOST, at_least=False))
    return result


if __name__ == "__main__":
    run_script(__doc__, measure)
