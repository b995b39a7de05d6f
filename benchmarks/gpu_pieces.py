"""Pieces of `gpu_report.py` that need no vLLM. Each row is printed as JSON when it is measured.

    python benchmarks/gpu_pieces.py start | copies | replay

* `start`: whether the kernels copy exactly, with compiling and without; page-locking of 24 GiB.
* `copies`: lists of 64 KiB to 16 MiB by a compiled loop, by one call of the driver, and merged.
* `replay`: loads and saves of prompts. `kvpool` is the worker, engine, lanes and copier of
  `bench_device.py` over the GPU's pages, from the plan to its report. `list of blocks` is what
  vLLM's SimpleCPUOffloadConnector does: a thread makes a descriptor of each block of each layer
  and starts all by one driver call; loads wait for no step, as in vLLM. `plain` is one copy of as
  many bytes. Beside a busy thread (one that launches layers for 16 tokens; `longest gap` lies
  between two launches), and under steps (the model's stream is 50 ms ahead, and each side saves a
  chunk every 50 ms). Times begin with the plan, or at the end of the step before it.

`replay --simulated` needs no GPU; its times say nothing.
"""

import argparse
import ctypes
import json
import os
import platform
import queue
import random
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks import bench_device as bench
from benchmarks.common import Row, Target, interleaved, wait_until
from vllm_kvpool.staging.arena import Arena
from vllm_kvpool.staging.copy_triton import DeviceStream
from vllm_kvpool.staging.devices import CudaLocker, Fence, PageLock, device_for
from vllm_kvpool.staging.driver_copies import copy_loop, driver_copies
from vllm_kvpool.staging.gpu_check import check_gpus
from vllm_kvpool.storage.base import Buffer, map_buffer

OURS, THEIRS, PLAIN, GAP = "kvpool", "list of blocks", "plain", "longest gap ms"
REPEATS = 5
BLOCK_BYTES = np.uint64(bench.BLOCK_BYTES)
LOCKED_BYTES, LOCK_TIMEOUT_S = 24 << 30, 60.0
LIST_BYTES = 512 << 20
MODEL_DIM, FEW_TOKENS, LAUNCHES = 4096, 16, 256
CALIBRATION_CYCLES = 50_000_000
PLAIN_WANTED, LOAD_WANTED = 0.95, {8192: 1.0, 32768: 0.9}


def show(row: Mapping[str, object]) -> None:
    print(json.dumps(row), flush=True)


def judge(what: str, value: float, wanted: float, *, at_least: bool) -> None:
    target = Target(what, value, wanted, at_least)
    show({"target": str(target), "reached": target.reached})


def seconds_of(action: Callable[[], object]) -> float:
    """Return the seconds until the device has done what `action` started."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    action()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def medians(actions: dict[str, Callable[[], float]], repeats: int = REPEATS) -> dict[str, float]:
    """Return the median of each action's seconds; they take turns, the first turn not counted."""
    for action in actions.values():
        action()
    return {name: statistics.median(t) for name, t in interleaved(actions, repeats).items()}


def locked(buffer: Buffer) -> Buffer:
    lock = PageLock(CudaLocker(torch.cuda.current_device()))
    lock.lock(buffer)
    if lock.num_bytes != buffer.nbytes:
        raise SystemExit(f"{buffer.nbytes} bytes of host memory could not be page-locked")
    return buffer


def locked_arena(num_slots: int) -> Arena:
    staging = bench.STAGING_CELLS * bench.SLOT_BYTES
    arena = Arena(staging, bench.SLOT_BYTES, num_slots * bench.SLOT_BYTES - staging)
    lock = PageLock(CudaLocker(torch.cuda.current_device()))
    arena.commit_in_background(lock.lock)
    wait_until(lambda: lock.num_bytes == arena.whole.nbytes, LOCK_TIMEOUT_S)
    return arena


# --- Pieces before the replay -------------------------------------------------------------------


def start() -> None:
    import triton

    versions = {"python": platform.python_version(), "cuda": torch.version.cuda}
    versions |= {"torch": torch.__version__, "triton": triton.__version__}
    row = {"what": "machine", "gpu": torch.cuda.get_device_name(), **versions}
    one_call = hasattr(ctypes.CDLL("libcuda.so.1"), "cuMemcpyBatchAsync")
    show(row | {"cores": len(os.sched_getaffinity(0)), "copies in one call": one_call})
    problems = []
    for turn in ("first", "again"):
        for check in check_gpus():
            show({"what": f"kernels, {turn}"} | check._asdict())
            problems += [check.problem] if check.problem else []
    num_slots = LOCKED_BYTES // bench.SLOT_BYTES
    began = time.perf_counter()
    arena = locked_arena(num_slots)
    seconds = time.perf_counter() - began
    show({"what": "page-locking", "GiB": arena.whole.nbytes / 2**30, "s": seconds})
    if problems:
        raise SystemExit(f"the kernels do not copy exactly: {problems[0]}")


def copies() -> None:
    host = locked(map_buffer(LIST_BYTES))
    pages = torch.empty(LIST_BYTES, dtype=torch.uint8, device="cuda")
    loop = copy_loop(ctypes.CDLL("libcuda.so.1"))
    stream = torch.cuda.Stream().cuda_stream
    for is_save in (False, True):
        ends = (host.address, pages.data_ptr())
        target, source = ends if is_save else ends[::-1]
        for kib in (64, 256, 1024, 4096, 16384):
            offsets = np.arange(0, LIST_BYTES, kib << 10, dtype=np.uint64)
            rows = np.stack(
                (target + offsets, source + offsets, np.full_like(offsets, kib << 10)), axis=1
            )
            whole = np.array([[target, source, LIST_BYTES]], np.uint64)
            ways = {
                "loop": partial(loop, rows, stream),
                "one call": partial(driver_copies(), rows, stream),
                "merged": partial(loop, whole, stream),
            }
            found = medians({name: partial(seconds_of, way) for name, way in ways.items()})
            for name, seconds in found.items():
                row: Row = {"what": "to host" if is_save else "from host", "KiB": kib, "by": name}
                show(row | {"GB/s": LIST_BYTES / seconds / 1e9})


def block_ids(num_tokens: int) -> list[int]:
    return random.Random(0).sample(range(1, bench.NUM_BLOCKS), num_tokens // bench.BLOCK)


# --- The replay ---------------------------------------------------------------------------------


class Gaps:
    """The longest time between two launches of a thread that stands for a model."""

    def __init__(self) -> None:
        self.longest_s, self._last = 0.0, time.perf_counter()

    def pause(self) -> None:
        """Do not count the time since the last launch."""
        self._last = time.perf_counter()

    def mark(self) -> None:
        """Count the time since the last launch."""
        now = time.perf_counter()
        self.longest_s, self._last = max(self.longest_s, now - self._last), now


class SimulatedMachine:
    """The link of `bench_device.py`."""

    pages_address, host_address = 1 << 44, 1 << 45

    def __init__(self) -> None:
        self._streams = bench.SimulatedStreams(takes_time=True)
        self.place = bench.simulated(self._streams)
        pages = range(self.pages_address, self.host_address)
        self._streams.device_addresses.ranges.append(pages)

    def new_stream(self) -> DeviceStream:
        return self._streams.new_stream()

    def plain_s(self, nbytes: int, *, is_save: bool) -> float:
        return nbytes / bench.LINK_BYTES_S

    def give_step(self) -> None:
        until = max(time.perf_counter(), self._streams.model_until)
        self._streams.model_until = until + bench.STEP_S

    def mark(self) -> Callable[[], float]:
        until = self._streams.model_until
        return lambda: until

    def launch_layers(self, gaps: Gaps) -> None:
        bench.hold_lock()
        gaps.mark()

    def settle(self) -> None:
        self._streams.model_until = 0.0


class GpuMachine:
    """The first GPU. Its model's stream is the default one of every thread."""

    def __init__(self) -> None:
        from vllm_kvpool.staging.cuda_streams import CudaStreams

        device = torch.device("cuda", torch.cuda.current_device())
        self._streams = CudaStreams(device)
        pages = torch.zeros(bench.PAGES_SHAPE, dtype=torch.bfloat16, device=device)
        self.place = bench.Place(device_for(device), self._streams, pages, locked_arena)
        self._memory = locked(map_buffer(max(bench.SIZES) * bench.TOKEN_BYTES))
        self._host = torch.frombuffer(self._memory.view, dtype=torch.uint8)
        self._pages = pages.view(torch.uint8).view(-1)
        self.pages_address, self.host_address = pages.data_ptr(), self._memory.address
        make = partial(torch.randn, device=device, dtype=torch.bfloat16)
        self._input, self._weight = make(FEW_TOKENS, MODEL_DIM), make(MODEL_DIM, MODEL_DIM)
        seconds = [seconds_of(partial(torch.cuda._sleep, CALIBRATION_CYCLES)) for _ in range(2)]
        self._began = torch.cuda.Event(enable_timing=True)
        self._began.record()
        self._began.synchronize()
        self._began_at = time.perf_counter()
        self._step_cycles = int(bench.STEP_S * CALIBRATION_CYCLES / seconds[1])

    def new_stream(self) -> DeviceStream:
        return self._streams.new_stream()

    def plain_s(self, nbytes: int, *, is_save: bool) -> float:
        host, pages = self._host[:nbytes], self._pages[:nbytes]
        target, source = (host, pages) if is_save else (pages, host)
        return seconds_of(lambda: target.copy_(source, non_blocking=True))

    def give_step(self) -> None:
        torch.cuda._sleep(self._step_cycles)

    def mark(self) -> Callable[[], float]:
        event = torch.cuda.Event(enable_timing=True)
        event.record()

        def reached_at() -> float:
            event.synchronize()
            return self._began_at + self._began.elapsed_time(event) / 1000

        return reached_at

    def launch_layers(self, gaps: Gaps) -> None:
        """Launch the products of a stack of layers, and wait for them."""
        gaps.pause()
        for _ in range(LAUNCHES):
            torch.mm(self._input, self._weight)
            gaps.mark()
        torch.cuda.current_stream().synchronize()

    def settle(self) -> None:
        torch.cuda.synchronize()


Machine = SimulatedMachine | GpuMachine


class BlockLists:
    """Copies lists of blocks between pages and host memory, in a thread of its own."""

    def __init__(self, machine: Machine) -> None:
        layers = np.arange(bench.NUM_LAYERS)[:, None]
        layer_blocks, host_blocks = bench.NUM_BLOCKS, max(bench.SIZES) // bench.BLOCK
        self._pages = machine.pages_address + layers * (layer_blocks * BLOCK_BYTES)
        self._host = machine.host_address + layers * (host_blocks * BLOCK_BYTES)
        self._streams = {is_save: machine.new_stream() for is_save in (False, True)}
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def start(self, blocks: Sequence[int], fence: Fence | None = None) -> Callable[[], float]:
        """Begin a load, or a save after a fence; returns what waits for its end and says when."""
        answer: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._inbox.put((blocks, fence, answer))

        def wait() -> float:
            event = answer.get()
            if isinstance(event, Exception):
                raise event
            event.synchronize()
            return time.perf_counter()

        return wait

    def _run(self) -> None:
        while True:
            blocks, fence, answer = self._inbox.get()
            is_save = fence is not None
            try:
                if fence is not None:
                    self._streams[is_save].wait(fence)
                ids, places = np.array(blocks, np.int64), np.arange(len(blocks))
                rows = np.empty((bench.NUM_LAYERS * len(blocks), 3), np.int64)
                rows[:, 1 if is_save else 0] = (self._pages + ids * BLOCK_BYTES).ravel()
                rows[:, 0 if is_save else 1] = (self._host + places * BLOCK_BYTES).ravel()
                rows[:, 2] = BLOCK_BYTES
                self._streams[is_save].copy(rows)
                answer.put(self._streams[is_save].record())
            except Exception as error:  # the waiting thread raises it
                answer.put(error)


class Replay:
    """Both sides over one machine."""

    def __init__(self, machine: Machine) -> None:
        self._machine, self._rig = machine, bench.Rig(machine.place)
        self._lists = BlockLists(machine)
        self._stored: tuple[bytes, ...] = ()

    def measure(self, sizes: Sequence[int], repeats: int) -> None:
        """Show a row for each prompt, direction, situation and side; then end the worker."""
        with self._in(bench.BESIDE, "") as gaps:
            time.sleep(10 * bench.STEP_S)
        show({"what": "nothing", "situation": bench.BESIDE, GAP: 1000 * gaps.longest_s})
        for num_tokens in sizes:
            for situation in (bench.ALONE, bench.BESIDE, bench.STEPS):
                self._stored = bench.save(self._rig, num_tokens)
                for is_save in (False, True):
                    self._measure(num_tokens, situation, repeats, is_save=is_save)
        self._rig.close()

    def _measure(self, num_tokens: int, situation: str, repeats: int, *, is_save: bool) -> None:
        gaps_s: defaultdict[str, float] = defaultdict(float)

        def one(side: str) -> float:
            with self._in(situation, side) as gaps:
                seconds = self._seconds(num_tokens, side, is_save=is_save)
            gaps_s[side] = max(gaps_s[side], gaps.longest_s)
            return seconds

        sides = (OURS, THEIRS, PLAIN) if situation == bench.ALONE else (OURS, THEIRS)
        found = medians({side: partial(one, side) for side in sides}, repeats)
        what = "save" if is_save else "load"
        for side, seconds in found.items():
            row: Row = {"what": what, "tokens": num_tokens, "situation": situation, "by": side}
            row |= {"ms": 1000 * seconds, "GB/s": num_tokens * bench.TOKEN_BYTES / seconds / 1e9}
            show(row | ({GAP: 1000 * gaps_s[side]} if situation == bench.BESIDE else {}))
        if situation == bench.ALONE:
            name = f"rate of a {what} of {num_tokens} tokens, of a plain copy's"
            judge(name, found[PLAIN] / found[OURS], PLAIN_WANTED, at_least=True)
        if not is_save and num_tokens in LOAD_WANTED:
            name = f"load of {num_tokens} tokens, {situation}, of a list of blocks"
            wanted = LOAD_WANTED[num_tokens]
            judge(name, found[OURS] / found[THEIRS], wanted, at_least=False)

    def _seconds(self, num_tokens: int, side: str, *, is_save: bool) -> float:
        """Return the seconds of one load or save, from its plan or the step before it."""
        if side == PLAIN:
            return self._machine.plain_s(num_tokens * bench.TOKEN_BYTES, is_save=is_save)
        hashes = bench.new_hashes(num_tokens) if is_save else self._stored
        plan = self._rig.request(num_tokens, is_save, hashes)
        start, stepped_at = time.perf_counter(), self._machine.mark()
        if side == OURS:
            end = bench.perform(self._rig, plan)
        else:
            fence = self._machine.place.device.new_event() if is_save else None
            end = self._lists.start(block_ids(num_tokens), fence)()
        waits = is_save or side == OURS
        return end - max(start, stepped_at() if waits else start)

    @contextmanager
    def _in(self, situation: str, side: str) -> Iterator[Gaps]:
        gaps = Gaps()

        def step() -> None:
            self._machine.give_step()
            if side == OURS:
                plan = self._rig.request(bench.CHUNK, True, bench.new_hashes(bench.CHUNK))
                self._rig.post(plan)
            else:
                self._lists.start(block_ids(bench.CHUNK), self._machine.place.device.new_event())

        around: Any = nullcontext()
        if situation == bench.BESIDE:
            around = bench.repeated(lambda: self._machine.launch_layers(gaps))
        elif situation == bench.STEPS:
            around = bench.repeated(step, bench.STEP_S)
        with around:
            if situation != bench.ALONE:
                time.sleep(2.5 * bench.STEP_S)  # until the model is ahead
            gaps.longest_s = 0.0
            yield gaps
        self._machine.settle()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("piece", choices=("start", "copies", "replay"))
    parser.add_argument("--simulated", action="store_true", help="a replay without a GPU")
    args = parser.parse_args()
    if args.piece == "replay" and args.simulated:
        Replay(SimulatedMachine()).measure(bench.SIZES[:1], repeats=1)
    elif not torch.cuda.is_available():
        raise SystemExit("no NVIDIA GPU here, or torch is a build without CUDA")
    elif args.piece == "replay":
        Replay(GpuMachine()).measure(bench.SIZES, REPEATS)
    else:
        {"start": start, "copies": copies}[args.piece]()


if __name__ == "__main__":
    main()
