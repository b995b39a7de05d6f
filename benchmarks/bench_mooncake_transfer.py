"""Save and load of one prompt over Mooncake's TCP, between two processes.

    python benchmarks/bench_mooncake_transfer.py --json transfer.json

One process gives the cluster's memory, another one moves a 64 MiB prompt into it and back, so
every byte crosses TCP both ways. The movers, each in a process of its own, take turns:

* `kvpool`: the worker side with its lanes, copies and checksums, from the plan until every cell is
  stored, or every byte is in the pages (compared outside the timing);
* `in-tree`: the send and receive threads of vLLM's MooncakeStoreConnector at the same head
  sharding, one segment per layer and key. `whole` is what vLLM does, the request in one call; where
  that hangs or loses keys, the ratio counts from the time limit. `64 keys` cuts the calls;
* `plain`: one plain buffer per key, as many keys and bytes as the pool's cells, in one call or in
  batches of the pool's size. No pages, copies or checksums: what the transport itself does;
* `copied and hashed, else plain`: the same in batches, where each buffer is besides one memcpy of
  contiguous bytes and one xxh3 of it, on a second thread while other batches move. That is the
  least that a pool can do whose pages are not what is sent and whose bytes are verified, in
  Mooncake's batch calls.

`cpu_s_per_gb` is the processor time of the mover's process for each gigabyte moved: transport,
copies, hashes and Python together. Over loopback the transport fills both cores, with work and
with waits that poll, so a rate tells how the two share them; processor time tells what a mover
takes from the engine beside it, and is what the targets are about. A target is the median of the
ratios of single rounds, as polling counts the time that others hold the cores. Notes have the
quartiles. The thread that calls Mooncake polls until its call is done in every mover but `kvpool`,
whose waits sleep.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median, quantiles
from types import SimpleNamespace
from typing import Any, NamedTuple

from benchmarks.common import (
    LIMITED_BY,
    Child,
    DidNotFinish,
    Result,
    Target,
    children,
    run_script,
    wait_until,
)
from benchmarks.limits import Meter
from benchmarks.plain_sides import CopiedSide, PlainSide
from benchmarks.sides import Geometry, Holder, OurSide, PageKeeper, chunk_hashes, native_client
from tests.support.mooncake_master import MooncakeMaster
from vllm_kvpool.storage.mooncake import import_wheel
from vllm_kvpool.worker.lane_limits import BATCH_BYTES

GEOMETRIES = (Geometry(block=16), Geometry(block=128))
SEGMENT_BYTES = 512 << 20
BOUNDED_KEYS = 64
LIMIT_S = 10.0
WHOLE_LIMIT_S = 3.0  # of vLLM's one call: ten times what its calls of 64 keys take
GRACE_S = 5.0  # a child reports its own limit; if even that does not come, it is killed
WARM_UP = "warm-up"
COPIED = "copied and hashed, else plain"
WHOLE = "in-tree, whole"
BOUNDED = f"in-tree, {BOUNDED_KEYS} keys"
REPEATS, QUICK_REPEATS = 8, 2
INTREE_BLOCK = 16  # vLLM's default, whose segments are small; with large ones it is less slow
MIN_INTREE_RATIO, MAX_CPU_RATIO = 5.0, 1.5
IN_TREE_IMPORTED = ("vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.worker",)
IDLE_S = 2.0

WAYS = ("save", "load")
Outcome = float | str  # seconds, or what went wrong


class Spent(NamedTuple):
    """What one move took: wall time, and processor time of the mover's process."""

    seconds: float
    cpu_seconds: float


Rounds = dict[str, list[Spent]]  # by way


class BoundedStore:
    """The native client; multi-buffer calls are cut into at most `max_keys` keys."""

    def __init__(self, native: Any, max_keys: int) -> None:
        self._native = native
        self.max_keys = max_keys

    def __getattr__(self, name: str) -> Any:
        return getattr(self._native, name)

    def batch_put_from_multi_buffers(self, *args: Any) -> list[int]:
        *lists, config = args
        put = self._native.batch_put_from_multi_buffers
        return self._cut(lambda *part: put(*part, config), lists)

    def batch_get_into_multi_buffers(self, *lists: list[Any]) -> list[int]:
        return self._cut(self._native.batch_get_into_multi_buffers, lists)

    def _cut(self, call: Callable[..., list[int]], lists: Any) -> list[int]:
        codes: list[int] = []
        for start in range(0, len(lists[0]), self.max_keys):
            codes += call(*(values[start : start + self.max_keys] for values in lists))
        return codes


class InTreeSide(PageKeeper):
    """vLLM's send and receive threads on a client of ours."""

    def __init__(self, master: str, geometry: Geometry) -> None:
        super().__init__(geometry)
        from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store import data, worker

        self._data = data
        native = native_client(master, 0)
        assert native.register_buffer(self.pages.data_ptr(), self.pages.nbytes) == 0
        self._store = store = BoundedStore(native, BOUNDED_KEYS)
        metadata = data.KeyMetadata("bench", 0, 0, 0, 0)
        layout = data.LBHNCStoreLayout(
            metadata,
            geometry.block,
            geometry.block,
            local_tp_size=1,
            store_tp_size=geometry.heads,
            tp_rank=0,
            num_kv_heads=geometry.heads,
        )
        layout.register_kv_caches(list(self.pages), geometry.num_blocks)
        database = data.ChunkedTokenDatabase(metadata, geometry.block, store_layout=layout)
        num_blocks = geometry.tokens // geometry.block
        every_block = [True] * num_blocks
        coordinator: Any = SimpleNamespace(
            lcm_block_size=geometry.block,
            hash_block_size=geometry.block,
            store_mask=lambda *args, **kwargs: (every_block,),
            load_mask=lambda *args, **kwargs: (every_block,),
        )
        common = (coordinator, [database], geometry.block, 0)
        self._sender = worker.KVCacheStoreSendingThread(
            store,
            *common,
            [1],
            "kv_both",
            threading.Event(),
            replicate_config=import_wheel().ReplicateConfig(),
            record_operation=self._record,
        )
        self._receiver = worker.KVCacheStoreRecvingThread(
            store, *common, threading.Event(), record_operation=self._record
        )
        self._sender.start()
        self._receiver.start()
        self._jobs = 0
        self._failed_keys = 0

    def unbound(self) -> None:
        """From now on a request is one call."""
        self._store.max_keys = 1 << 30

    def _record(self, *, num_failed_keys: int = 0, **_: object) -> None:
        self._failed_keys += num_failed_keys

    def shape(self) -> tuple[int, int]:
        """Keys of the prompt, and bytes of one."""
        geometry = self.geometry
        keys = geometry.tokens // geometry.block * geometry.heads
        return keys, geometry.total_bytes // keys

    def _request(self, seed: int, **more: Any) -> Any:
        self._jobs += 1
        return self._data.ReqMeta(
            req_id=f"{self._jobs}",
            token_len_chunk=self.geometry.tokens,
            block_ids=(self.ids,),
            block_hashes=list(chunk_hashes(seed, len(self.ids))),
            store_job_id=self._jobs,
            **more,
        )

    def save(self, seed: int, limit_s: float) -> float:
        """Seconds until the send thread reports the job."""
        request = self._request(seed, can_save=True, prefill_end_tokens=self.geometry.tokens)
        start = time.perf_counter()
        self._sender.add_request(request)
        wait_until(lambda: bool(self._sender.take_completed_saves()), limit_s)
        return self._ended(start)

    def load(self, seed: int, limit_s: float) -> float:
        """Seconds until the receive thread reports the request."""
        tokens = self.geometry.tokens
        spec = self._data.LoadSpec(0, tokens, True, token_len=tokens)
        request = self._request(seed, load_spec=spec)
        start = time.perf_counter()
        self._receiver.add_request(request)
        wait_until(lambda: bool(self._receiver.get_and_clear_finished_requests()), limit_s)
        return self._ended(start)

    def _ended(self, start: float) -> float:
        seconds = time.perf_counter() - start
        if self._failed_keys:
            failed, self._failed_keys = self._failed_keys, 0
            raise DidNotFinish(f"{failed} of {self.shape()[0]} keys failed")
        return seconds


def one_round(child: Child, seed: int, *, check: bool) -> tuple[Spent, Spent]:
    """A save and a load of the same bytes."""
    saved = _move(child, "save", seed)
    if check:
        child.call("wipe")
    loaded = _move(child, "load", seed)
    if check:
        child.call("check")
    return saved, loaded


def _move(child: Child, way: str, seed: int) -> Spent:
    before = child.cpu_seconds()
    seconds = child.call(way, seed, LIMIT_S, timeout_s=LIMIT_S + GRACE_S)
    return Spent(seconds, child.cpu_seconds() - before)


def measure_sides(
    sides: dict[str, Child], holder: Child, repeats: int, meter: Meter
) -> dict[str, Rounds]:
    """Each side's moves, all sides in turn; a round before them warms up and compares bytes."""
    rounds: dict[str, Rounds] = {name: {way: [] for way in WAYS} for name in sides}
    names = list(sides)
    for seed in range(repeats + 1):
        for name in names:
            with meter.of(name if seed else WARM_UP):
                moved = one_round(sides[name], seed, check=seed == 0)
            if seed:
                for way, spent in zip(WAYS, moved, strict=True):
                    rounds[name][way].append(spent)
            holder.call("remove_all")
        names.append(names.pop(0))  # so that none always comes after the same one
    return rounds


def idle_ms_per_s(sides: Mapping[str, Child]) -> dict[str, float]:
    """Processor time that movers take while none has anything to move."""
    before = {name: child.cpu_seconds() for name, child in sides.items()}
    time.sleep(IDLE_S)
    spent = {name: child.cpu_seconds() - before[name] for name, child in sides.items()}
    return {name: 1e3 * seconds / IDLE_S for name, seconds in spent.items()}


def wall_seconds(rounds: Rounds, way: str) -> float:
    """The median of wall times."""
    return median(spent.seconds for spent in rounds[way])


def cpu_seconds(rounds: Rounds, way: str) -> float:
    """The median of processor times."""
    return median(spent.cpu_seconds for spent in rounds[way])


def measure_whole(geometry: Geometry, ways: Sequence[str]) -> dict[str, Outcome]:
    """vLLM's way, each direction in a cluster of its own: it may hang, and its peer with it."""
    outcomes: dict[str, Outcome] = {}
    for way in ways:
        with (
            MooncakeMaster() as master,
            Child(Holder, master.address, SEGMENT_BYTES) as holder,
            Child(InTreeSide, master.address, geometry) as mover,
        ):
            holder.wait_ready()
            if way == "load":
                mover.call("save", 0, LIMIT_S, timeout_s=LIMIT_S + GRACE_S)
            mover.call("unbound")
            try:
                limits = (WHOLE_LIMIT_S, WHOLE_LIMIT_S + GRACE_S)
                outcomes[way] = mover.call(way, 0, limits[0], timeout_s=limits[1])
            except DidNotFinish as error:
                outcomes[way] = str(error)
            # What hangs would not hear an order to end.
            for child in (mover, holder):
                child.end(orderly=False)
    return outcomes


def measure_geometry(geometry: Geometry, quick: bool, result: Result) -> None:
    meter = Meter()
    with MooncakeMaster() as master:
        url = f"mooncake://{master.address}?segment=0"
        num_keys, key_bytes = geometry.cells()
        batch = -(-BATCH_BYTES // key_bytes)  # the engine closes an op once it is this large
        holder = Child(Holder, master.address, SEGMENT_BYTES)
        sides = {
            "kvpool": Child(OurSide, url, geometry),
            "plain, one call": Child(PlainSide, master.address, num_keys, key_bytes, num_keys),
            f"plain, {batch} keys": Child(PlainSide, master.address, num_keys, key_bytes, batch),
            COPIED: Child(CopiedSide, master.address, num_keys, key_bytes, batch),
            BOUNDED: Child(InTreeSide, master.address, geometry),
        }
        with children(holder, *sides.values()):
            rounds = measure_sides(sides, holder, QUICK_REPEATS if quick else REPEATS, meter)
            shapes = {name: child.call("shape") for name, child in sides.items()}
            idle = idle_ms_per_s(sides)
    shapes[WHOLE] = shapes[BOUNDED]
    with meter.of(WHOLE):
        whole = measure_whole(geometry, () if quick else WAYS)
    report(geometry, rounds, whole, shapes, result)
    for row in result.rows[-len(shapes) :]:
        row[LIMITED_BY] = meter.limited_by(str(row["side"]))
    shown = ", ".join(f"{name} {spent:.2f}" for name, spent in idle.items())
    result.notes.append(f"block {geometry.block}, idle: processor time in ms a second: {shown}")


def report(
    geometry: Geometry,
    rounds: dict[str, Rounds],
    whole: dict[str, Outcome],
    shapes: dict[str, tuple[int, int]],
    result: Result,
) -> None:
    """Rows for each side; ratios of rates, ours over theirs, and of processor time."""
    outcomes: dict[str, dict[str, Outcome]] = {
        name: {way: wall_seconds(own, way) for way in WAYS} for name, own in rounds.items()
    }
    outcomes[WHOLE] = whole
    ours = outcomes["kvpool"]
    gigabytes = geometry.total_bytes / 1e9
    for name, own in outcomes.items():
        row: dict[str, object] = {"block": geometry.block, "side": name, "keys": shapes[name][0]}
        for way, outcome in own.items():
            finished = isinstance(outcome, float)
            row[f"{way}_gbs"] = gigabytes / seconds(outcome) if finished else outcome
            ratio = seconds(outcome) / seconds(ours[way])
            row[f"{way}_ratio"] = ratio if finished else f"{ratio:.3g} from limit"
            if name in rounds:
                row[f"{way}_cpu_s_per_gb"] = cpu_seconds(rounds[name], way) / gigabytes
        result.rows.append(row)
    for way in WAYS:
        label = f"block {geometry.block}, {way}"
        plain = min(wall_seconds(own, way) for name, own in rounds.items() if is_plain(name))
        least = wall_seconds(rounds[COPIED], way)
        result.notes.append(
            f"{label}: one memcpy and one hash of each leave {plain / least:.3g} of plain buffers' "
            f"rate; kvpool has {least / seconds(ours[way]):.3g} of what is left"
        )
        add_cpu_target(label, way, rounds, result)
        if geometry.block != INTREE_BLOCK or way not in whole:
            continue
        one_call = (
            "one call"
            if isinstance(whole[way], float)
            else f"one call ({whole[way]}: its limit counts)"
        )
        for theirs, text in (
            (seconds(whole[way]), f"over in-tree, {one_call}"),
            (wall_seconds(rounds[BOUNDED], way), f"over {BOUNDED} a call"),
        ):
            ratio = theirs / seconds(ours[way])
            result.targets.append(Target(f"{label} {text}", ratio, MIN_INTREE_RATIO, True))


def is_plain(side: str) -> bool:
    return side.startswith("plain")


def add_cpu_target(label: str, way: str, rounds: dict[str, Rounds], result: Result) -> None:
    """Our processor time over that of plain buffers moved the cheaper way, round by round."""
    plain = min(filter(is_plain, rounds), key=lambda name: cpu_seconds(rounds[name], way))
    ratios = [
        ours.cpu_seconds / theirs.cpu_seconds
        for ours, theirs in zip(rounds["kvpool"][way], rounds[plain][way], strict=True)
    ]
    what = f"{label}: processor time over plain buffers"
    result.targets.append(Target(what, median(ratios), MAX_CPU_RATIO, False))
    low, _, high = quantiles(ratios, n=4, method="inclusive")
    result.notes.append(
        f"{what}: {len(ratios)} rounds beside `{plain}`, quartiles {low:.3g} and {high:.3g}"
    )


def seconds(outcome: Outcome) -> float:
    """How long it took; the limit if it did not come to a good end."""
    return outcome if isinstance(outcome, float) else WHOLE_LIMIT_S


def measure(quick: bool) -> Result:
    result = Result()
    for geometry in GEOMETRIES[:1] if quick else GEOMETRIES:
        measure_geometry(geometry, quick, result)
    result.notes.append(
        f"{GEOMETRIES[0].total_bytes >> 20} MiB prompt, ratios are rates of kvpool over the side's"
    )
    return result


if __name__ == "__main__":
    run_script(__doc__, measure, IN_TREE_IMPORTED)
