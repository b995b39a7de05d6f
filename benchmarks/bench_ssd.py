"""The file store against fio on the same directory, in the same run.

    python benchmarks/bench_ssd.py [--dir DIRECTORY] [--json ssd.json] [--quick]

fio writes and reads one file per cell with `--ioengine=io_uring --direct=1`, each file in one
request, as many requests in flight as the store has. The store puts and gets cells of the same
count through the slots of a staging arena: in batches, as the put lane does, and in two lanes at a
time; all at once, as fio does; and with its threads instead of a ring. Sides take turns, with
fresh keys each and in another order in each round: whoever comes after fio finds the file system's
journal full. `ratio` is the
median over the rounds of ours over fio's.

The store is full, as a cache is but for its first hours, so each put also evicts, and writes over
the files of what it evicts; fio writes new files, which it makes before its clock starts, so for
writes `ratio` compares recycled files with new ones, and says so. How fast the store was filled is
a note: there each cell makes a file. ext4 gives no inode out again for minutes after its file was
deleted, and each new file walks over all of those (`recently_deleted`): after 60,000 deletions,
empty files, it took 0.9 ms of the kernel's time to make one, else 0.07. So stores are filled first,
and wait for a run that has just deleted its files.

The last rows are what making room costs, and how long the index is held and waited for, with few
and with two million cells, and what making a lost index anew costs (store_room.py).
"""

import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.common import LIMITED_BY, Result, Row, Target, run_script
from benchmarks.limits import Meter
from benchmarks.store_room import measure_rebuild, measure_room
from tests.support.store_contract import key_of, new_namespace
from vllm_kvpool.staging.arena import Arena
from vllm_kvpool.staging.slots import Slot
from vllm_kvpool.storage.base import ChunkRef, GetOutcome, PutOutcome
from vllm_kvpool.storage.eviction import POLICIES
from vllm_kvpool.storage.file.format import file_bytes
from vllm_kvpool.storage.file.io import RING_DEPTH
from vllm_kvpool.storage.file.store import FileStore
from vllm_kvpool.worker.lane_limits import BATCH_BYTES

CELL_SIZES = ((1 << 20) + 64, (256 << 10) + 64)
TOTAL_BYTES, QUICK_TOTAL_BYTES = 128 << 20, 32 << 20
ROUNDS, QUICK_ROUNDS = 5, 1
STORE_BYTES, QUICK_STORE_BYTES = 512 << 20, 256 << 20
FIO_LIMIT_S = 60.0
WANTED_RATIO = 0.9

NUM_OPENED, QUICK_NUM_OPENED = 10_000, 1_000
WANTED_OPEN_S = 2.0
ROOM_CELLS, QUICK_ROOM_CELLS = (20_000, 2_000_000), (20_000,)
REBUILT_CELLS, QUICK_REBUILT_CELLS = 200_000, 5_000
WANTED_WAIT_S = 0.02

NO_FIO = """
*** fio is not installed, so there is nothing to compare with: only our own figures follow. ***
*** Install it with:  apt-get install -y fio                                                ***
"""


@dataclass
class Side:
    """One way to write and read cells; bytes per second and CPU seconds, one figure a round."""

    name: str
    io: str  # of the store; "" for fio
    batch_bytes: int
    lanes: int
    writes: list[float]
    reads: list[float]
    write_cpu_s: list[float] = field(default_factory=list)  # of a cell
    read_cpu_s: list[float] = field(default_factory=list)


def run_fio(directory: Path, cell_bytes: int, count: int, rw: str) -> float:
    """Bytes per second of one fio job; `write` lays the files out that `read` reads."""
    nbytes = file_bytes(cell_bytes, key_of(new_namespace(), 0))
    command = ["fio", "--name=cells", f"--directory={directory}", "--ioengine=io_uring"]
    command += ["--direct=1", f"--rw={rw}", f"--bs={nbytes}", f"--filesize={nbytes}"]
    command += [f"--nrfiles={count}", f"--iodepth={RING_DEPTH}", "--output-format=json"]
    process = subprocess.run(command, capture_output=True, check=True, timeout=FIO_LIMIT_S)
    [job] = json.loads(process.stdout)["jobs"]
    rate = job[rw]["bw_bytes"]
    assert job[rw]["io_bytes"] == count * nbytes, job[rw]
    return float(rate)


class Cells:
    """An arena full of cells of one size, each with bytes of its own."""

    def __init__(self, cell_bytes: int, count: int) -> None:
        self.cell_bytes = cell_bytes
        self.count = count
        self._namespace = new_namespace()
        self._num_keys = 0
        self._arena = Arena((count + 8) * (cell_bytes + 4096), cell_bytes)
        slots = [Slot(i) for i in range(count)]
        self.buffers = self._arena.buffers(slots, [cell_bytes] * count)

    def fresh_keys(self) -> list[str]:
        self._num_keys += self.count
        return [key_of(self._namespace, self._num_keys + i) for i in range(self.count)]

    def fill(self) -> None:
        for i, buffer in enumerate(self.buffers):
            buffer.view[:] = bytes([1 + i % 255]) * self.cell_bytes

    def check(self) -> None:
        for i, buffer in enumerate(self.buffers):
            ends = bytes(buffer.view[:64]) + bytes(buffer.view[-64:])
            assert ends == bytes([1 + i % 255]) * 128, i

    def batches(self, batch_bytes: int) -> Iterator[slice]:
        step = max(batch_bytes // self.cell_bytes, 1)
        return (slice(i, i + step) for i in range(0, self.count, step))


def run_store(store: FileStore, cells: Cells, side: Side, meter: Meter) -> tuple[float, float]:
    """Bytes per second of putting and getting all cells under fresh keys."""
    lanes = ThreadPoolExecutor(side.lanes)

    def put(part: slice) -> None:
        buffers = cells.buffers[part]
        outcomes = store.put(keys[part], buffers, [ChunkRef("")] * len(buffers))
        assert set(outcomes) == {PutOutcome.STORED}, outcomes

    def get(part: slice) -> None:
        outcomes = store.get(keys[part], cells.buffers[part])
        assert set(outcomes) == {GetOutcome.OK}, outcomes

    keys = cells.fresh_keys()
    total = cells.cell_bytes * cells.count
    cells.fill()
    with meter.of(side.name):
        start, cpu = time.perf_counter(), time.process_time()
        list(lanes.map(put, cells.batches(side.batch_bytes)))
        write_rate = total / (time.perf_counter() - start)
        side.write_cpu_s.append((time.process_time() - cpu) / cells.count)
    for buffer in cells.buffers:
        buffer.view[:] = bytes(cells.cell_bytes)
    with meter.of(side.name):
        start, cpu = time.perf_counter(), time.process_time()
        list(lanes.map(get, cells.batches(side.batch_bytes)))
        read_rate = total / (time.perf_counter() - start)
        side.read_cpu_s.append((time.process_time() - cpu) / cells.count)
    cells.check()
    lanes.shutdown()
    return write_rate, read_rate


def compare(
    root: Path, cell_bytes: int, quick: bool, fio: bool, meter: Meter
) -> tuple[list[Side], float]:
    """All sides, and the rate at which the empty store was filled."""
    total_bytes = QUICK_TOTAL_BYTES if quick else TOTAL_BYTES
    store_bytes = QUICK_STORE_BYTES if quick else STORE_BYTES
    cells = Cells(cell_bytes, max(total_bytes // cell_bytes, 1))
    directory = root / f"store-{cell_bytes}"
    # By `lru`, so that what is put is there to be read: `lrfu` may drop cells that came just now
    # before those that were read once, as they are in a cache.
    lru = POLICIES["lru"]
    stores = {io: FileStore(str(directory), store_bytes, io, lru) for io in ("uring", "threads")}
    batch_bytes = stores["uring"].capabilities.batches_per_put * BATCH_BYTES
    name = f"{batch_bytes >> 20} MiB"
    sides = [
        Side(f"store, {name}", "uring", batch_bytes, 1, [], []),
        Side(f"store, {name} x 2 lanes", "uring", batch_bytes, 2, [], []),
        Side("store, at once", "uring", total_bytes * 2, 1, [], []),
        Side(f"threads, {name}", "threads", batch_bytes, 1, [], []),
    ]
    if fio:
        sides.insert(0, Side("fio", "", 0, 1, [], []))
    filling = Side("filling", "", batch_bytes, 1, [], [])
    for _ in range(store_bytes // total_bytes - 1):
        filling.writes.append(run_store(stores["uring"], cells, filling, meter)[0])
    for store in 2 * [*stores.values()]:  # until both have begun to evict
        run_store(store, cells, filling, meter)
    for turn in range(QUICK_ROUNDS if quick else ROUNDS):
        for side in random.Random(turn).sample(sides, len(sides)):
            if side.io:
                write_rate, read_rate = run_store(stores[side.io], cells, side, meter)
            else:
                files = Path(tempfile.mkdtemp(prefix="fio-", dir=root))
                write_rate = run_fio(files, cell_bytes, cells.count, "write")
                read_rate = run_fio(files, cell_bytes, cells.count, "read")
            side.writes.append(write_rate)
            side.reads.append(read_rate)
    for store in stores.values():
        store.close()
    return sides, statistics.median(filling.writes)


def ratio_of(ours: list[float], theirs: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def report(result: Result, cell_bytes: int, sides: list[Side], meter: Meter) -> None:
    fio = sides[0] if not sides[0].io else None
    label = f"{cell_bytes // 1024} KiB"
    for side in sides:
        row: Row = {"cell": label, "side": side.name}
        for what in ("write", "read"):
            rates: list[float] = getattr(side, f"{what}s")
            row[f"{what}_mb_s"] = round(statistics.median(rates) / 1e6)
            ratio = ratio_of(rates, getattr(fio, f"{what}s")) if fio else None
            if fio and side is not fio:
                row[f"{what}_ratio"] = ratio
            cpu_s: list[float] = getattr(side, f"{what}_cpu_s")
            if cpu_s:
                row[f"{what}_cpu_us"] = round(1e6 * statistics.median(cpu_s))
            if side.io == "uring":
                files = " (recycled files over new ones)" if what == "write" else ""
                text = f"{what} of {label} cells, {side.name.split(', ')[1]}, over fio{files}"
                result.targets.append(Target(text, ratio, WANTED_RATIO, at_least=True))
        # fio itself is mostly its start; of the rest it says nothing here.
        row[LIMITED_BY] = meter.limited_by(side.name) if side.io else ""
        result.rows.append(row)


def time_opening(root: Path, count: int) -> float:
    """Seconds from opening a store of so many objects to its first hit."""
    namespace = new_namespace()
    memory = Arena(1 << 20, 4096)
    [buffer] = memory.buffers([Slot(0)], [100])
    keys = [key_of(namespace, i) for i in range(count)]
    store = FileStore(str(root), STORE_BYTES)
    for i in range(0, count, 500):
        part = keys[i : i + 500]
        assert set(store.put(part, [buffer] * len(part), [ChunkRef("")] * len(part))) == {
            PutOutcome.STORED
        }
    store.close()
    start = time.perf_counter()
    store = FileStore(str(root), STORE_BYTES)
    assert store.get(keys[-1:], [buffer]) == [GetOutcome.OK]
    taken_s = time.perf_counter() - start
    store.close()
    return taken_s


def report_room(result: Result, root: Path, quick: bool) -> None:
    """Rows of what room for a prompt of 32 cells costs, and how long others wait for the index."""
    for num_cells in QUICK_ROOM_CELLS if quick else ROOM_CELLS:
        meter = Meter()
        found = measure_room(root / f"room-{num_cells}", num_cells, 5 if quick else 40, meter)
        for what, name in (
            ("wall", "room"),
            ("cpu", "room, CPU"),
            ("wait", "wait for the index"),
            ("hold", "hold of the index"),
            ("hold_cpu", "hold of the index, CPU"),
        ):
            times = sorted(found[what])
            row: Row = {"cell": f"{num_cells} stored", "side": name}
            row["p50_ms"] = 1000 * statistics.median(times)
            row["mean_ms"] = 1000 * statistics.fmean(times)
            row["p99_ms"] = 1000 * times[int(0.99 * len(times))]
            row["max_ms"] = 1000 * times[-1]
            row[LIMITED_BY] = meter.limited_by("room")
            result.rows.append(row)
        for what, text in (
            ("wait", "99 of 100 waits of another process for the index"),
            ("hold_cpu", "99 of 100 holds of the index, processor time"),
        ):
            times = sorted(found[what])
            p99_s = times[int(0.99 * len(times))]
            text = f"{text}, {num_cells} cells stored"
            result.targets.append(Target(text, p99_s, WANTED_WAIT_S, at_least=False, unit="s"))
        text = f"longest hold of the index, processor time, {num_cells} cells stored"
        longest_s = max(found["hold_cpu"])
        result.targets.append(Target(text, longest_s, WANTED_WAIT_S, at_least=False, unit="s"))


def report_rebuild(result: Result, root: Path, quick: bool) -> None:
    """Rows of making a lost index anew, of sparse files, and a target for the engine's start."""
    num_cells = QUICK_REBUILT_CELLS if quick else REBUILT_CELLS
    meter = Meter()
    found = measure_rebuild(root, num_cells, meter)
    shutil.rmtree(root)
    for name, taken_s in found.items():
        side = f"index lost: {name}"
        row: Row = {"cell": f"{num_cells} sparse files", "side": side, "s": taken_s}
        result.rows.append(row | {LIMITED_BY: meter.limited_by("rebuild")})
    text = f"opening a store whose index is lost, to the first hit, {num_cells} cells stored"
    target = Target(text, found["first hit"], WANTED_OPEN_S, at_least=False, unit="s")
    result.targets.append(target)


def measure(quick: bool, dir: str) -> Result:  # noqa: A002 - the option's name
    with tempfile.TemporaryDirectory(
        prefix="kvpool-ssd-", dir=dir or None, ignore_cleanup_errors=True
    ) as name:
        return measure_in(Path(name), quick)


def measure_in(directory: Path, quick: bool) -> Result:
    result = Result()
    fio = shutil.which("fio") is not None
    if not fio:
        print(NO_FIO, file=sys.stderr, flush=True)
        result.notes.append(
            "fio is not installed (apt-get install -y fio): nothing to compare with"
        )
    for cell_bytes in CELL_SIZES:
        meter = Meter()
        sides, filling_rate = compare(directory, cell_bytes, quick, fio, meter)
        report(result, cell_bytes, sides, meter)
        label = f"{cell_bytes // 1024} KiB"
        rate = f"{filling_rate / 1e6:.0f} MB/s"
        result.notes.append(f"an empty store is filled with {label} cells at {rate}")
    count = QUICK_NUM_OPENED if quick else NUM_OPENED
    open_s = time_opening(directory / "opened", count)
    what = f"opening a store of {count} objects, to the first hit"
    result.targets.append(Target(what, open_s, WANTED_OPEN_S, at_least=False, unit="s"))
    report_room(result, directory, quick)
    report_rebuild(result, directory / "rebuilt", quick)
    result.notes.append("all with O_DIRECT, so no page cache")
    return result


if __name__ == "__main__":
    run_script(__doc__, measure, dir="where to write; default: the system's temporary directory")
