"""What `per_head_storage: false` costs or saves: one cell per rank beside one per head.

    python benchmarks/bench_storage_mode.py --json storage_mode.json

Without tensor parallelism, so that a rank's cell holds all 8 heads: the modes move the same bytes
in as many or an eighth as many cells. Save and load of a 64 MiB prompt through the worker side
(checksums on; over Mooncake's TCP between two processes, and over files on this machine's disk),
and the lookup of a 16,384-token prompt of which all but the last chunk are stored, as the probe
does it: from the question to its answer, hashing included. Repeats of all four take turns;
`limited by` is about saves and loads.
"""

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from benchmarks.common import LIMITED_BY, Child, Result, Row, children, run_script
from benchmarks.limits import Meter
from benchmarks.sides import Geometry, Holder, OurSide
from tests.support.buffers import make_buffer
from tests.support.mooncake_master import MooncakeMaster
from vllm_kvpool.identity.chunk_hash import ChunkChain, RequestIdentity
from vllm_kvpool.identity.keys import make_namespace
from vllm_kvpool.layout.topology import LayerGroup
from vllm_kvpool.scheduler.lookup import Lookup
from vllm_kvpool.scheduler.lookup_service import LookupService
from vllm_kvpool.scheduler.prefix_search import CellNames
from vllm_kvpool.storage.backends import open_store
from vllm_kvpool.storage.base import ChunkRef
from vllm_kvpool.storage.url import parse_store_url

GEOMETRY = Geometry(block=16)
LOOKUP_TOKENS = 16_384
CELL_BYTES = 64
SEGMENT_BYTES = 1 << 30
LIMIT_S = 30.0
REPEATS, QUICK_REPEATS = 5, 1
LOOKUPS_PER_REPEAT = 5


class Asker:
    """Stores the keys of a prompt but its last chunk's, and looks the prompt up."""

    def __init__(self, url: str, per_head: bool) -> None:
        self._store = open_store(parse_store_url(url), segment=True)
        namespace = make_namespace("lookup", "0" * 12)
        names = CellNames(namespace, [LayerGroup(GEOMETRY.topology(per_head), GEOMETRY.row_bytes)])
        self._tokens = list(range(LOOKUP_TOKENS))
        chain = ChunkChain(GEOMETRY.chunk, RequestIdentity())
        chain.extend(self._tokens)
        self._stored = len(chain) - 1
        keys = [key for chunk in chain.hashes[: self._stored] for key in names.of_chunk(chunk)]
        self._put([str(key) for key in keys])
        self._lookups = LookupService((self._store,), names, GEOMETRY.chunk)

    def _put(self, keys: Sequence[str]) -> None:
        buffer = make_buffer(CELL_BYTES)
        self._store.register(buffer)
        self._store.put(keys, [buffer] * len(keys), [ChunkRef(key) for key in keys])
        assert all(self._store.exists(keys))

    def lookup(self) -> list[float]:
        """Milliseconds from the question to the answer."""
        times = []
        for lookup_id in range(LOOKUPS_PER_REPEAT):
            deadline = time.monotonic() + LIMIT_S
            start = time.perf_counter()
            self._lookups.submit(
                Lookup(lookup_id, RequestIdentity, self._tokens, True, 0, deadline, deadline)
            )
            self._lookups.wait(LIMIT_S)
            times.append(1e3 * (time.perf_counter() - start))
            (answer,) = self._lookups.take_results()
            assert answer.found_chunks == self._stored, answer
        return times


class Mode:
    """The processes of one store and mode, and what they have measured."""

    def __init__(self, store: str, mover_url: str, asker_url: str, per_head: bool) -> None:
        self.store, self.per_head = store, per_head
        self.mover = Child(OurSide, mover_url, GEOMETRY, per_head)
        self.asker = Child(Asker, asker_url, per_head)
        self.saves: list[float] = []
        self.loads: list[float] = []
        self.lookups: list[float] = []
        self.meter = Meter()

    def round(self, number: int) -> None:
        """The first one warms up and compares bytes."""
        seed = 2 * number + self.per_head
        with self.meter.of("moves" if number else "warm-up"):
            saved = self.mover.call("save", seed, LIMIT_S)
            if number == 0:
                self.mover.call("wipe")
            loaded = self.mover.call("load", seed, LIMIT_S)
        looked_up = self.asker.call("lookup")
        if number == 0:
            self.mover.call("check")
            return
        self.saves.append(saved)
        self.loads.append(loaded)
        self.lookups += looked_up

    def row(self) -> Row:
        cells, cell_bytes = GEOMETRY.cells(self.per_head)
        save, load = median(self.saves), median(self.loads)
        return {
            "store": self.store,
            "cells": "per head" if self.per_head else "per rank",
            "number": cells,
            "KiB each": cell_bytes / 1024,
            "save ms": 1e3 * save,
            "save GB/s": GEOMETRY.total_bytes / save / 1e9,
            "load ms": 1e3 * load,
            "load GB/s": GEOMETRY.total_bytes / load / 1e9,
            "lookup ms": median(self.lookups),
            LIMITED_BY: self.meter.limited_by("moves"),
        }


def measure(quick: bool) -> Result:
    result = Result()
    repeats = QUICK_REPEATS if quick else REPEATS
    with MooncakeMaster() as master, tempfile.TemporaryDirectory(prefix="bench") as directory:
        cluster = f"mooncake://{master.address}?segment="
        holder = Child(Holder, master.address, SEGMENT_BYTES).wait_ready()
        modes = []
        for per_head in (True, False):
            # Else a put could land in the asker's own memory, which is no part of this.
            modes.append(Mode("mooncake", f"{cluster}0", f"{cluster}0", per_head))
            files = f"file://{Path(directory) / str(per_head)}?size=4GiB"
            modes.append(Mode("file", files, files, per_head))
        with children(holder, *(child for m in modes for child in (m.mover, m.asker))):
            for number in range(repeats + 1):
                for mode in modes:
                    mode.round(number)
                    # Memory that no prompt has been in would cost the next save more.
                    holder.call("remove_prompts")
    result.rows = [mode.row() for mode in sorted(modes, key=lambda mode: mode.store)]
    add_ratios(result.rows)
    return result


def add_ratios(rows: list[Row]) -> None:
    """In the rows of cells per rank: their time over that of cells per head."""
    for per_head, per_rank in zip(rows[::2], rows[1::2], strict=True):
        for what in ("save ms", "load ms", "lookup ms"):
            per_rank[f"{what} ratio"] = float(str(per_rank[what])) / float(str(per_head[what]))


if __name__ == "__main__":
    run_script(__doc__, measure)
