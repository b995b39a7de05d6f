"""Page copies on an NVIDIA GPU against plain copies of the same bytes in the same run.

    python benchmarks/gpu_copy.py [--json FILE] [--quick]

Needs a GPU, torch and Triton; neither vLLM nor a store. Both sides of every ratio take turns, and
medians are compared. Pages are an 8B model's with bfloat16 KV, in blocks drawn at random from
twice as many as are moved; cells are one head, eight layers and 256 tokens, 1 MiB.

* `kernel`: gather and scatter between pages and memory on the device, by device events around the
  kernels, against one device-to-device copy.
* `to host`, `from host`: the whole path between pages and page-locked slots, against one copy of
  page-locked memory; by each copier, in calls of few cells, of a lane's whole batch, and of all.
* `layers`: matrix products and attention in bfloat16, with and without a thread that saves what
  they would have computed, or that saves endlessly.
"""

import argparse
import json
import mmap
import platform
import random
import shlex
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, Self

import numpy as np

try:
    import torch
    import triton
except ImportError as missing:
    sys.exit(
        f"gpu_copy: {missing}; run it with a Python that has torch and Triton (GPU_PYTHON=...)"
    )
if not torch.cuda.is_available():
    sys.exit("gpu_copy: no NVIDIA GPU here, or torch is a build without CUDA; nothing was measured")

from benchmarks.common import Result, Row, Target, interleaved
from vllm_kvpool.layout.page_formats import from_token_content
from vllm_kvpool.layout.pages import CellMove
from vllm_kvpool.staging.copier import Copier
from vllm_kvpool.staging.copy_torch import TorchCopier
from vllm_kvpool.staging.copy_triton import TritonCopier
from vllm_kvpool.staging.cuda_streams import CudaStream, CudaStreams
from vllm_kvpool.staging.devices import CudaLocker, Fence, PageLock, device_for
from vllm_kvpool.staging.triton_tables import RunTable
from vllm_kvpool.storage.base import Buffer

NUM_LAYERS, LAYER_SPAN = 32, 8
NUM_HEADS, HEAD_DIM, BLOCK = 8, 128, 16
CHUNK = 256
ROW_BYTES = 2 * HEAD_DIM * 2
CELL_BYTES = LAYER_SPAN * CHUNK * ROW_BYTES
CHUNK_CELLS = NUM_HEADS * NUM_LAYERS // LAYER_SPAN
SLOT_BYTES = CELL_BYTES + 4096
PAYLOAD_OFFSET = 64  # as behind a cell's header
BATCH_CELLS = 64  # the most that a lane of the pool takes at a time: 64 MiB
FEW_CELLS = 16  # as where a file has just been read
LAYOUTS = ("LBHNC", "LBNHC")

GATHER_WANTED, PATH_WANTED, SLOWDOWN_WANTED = 0.8, 0.9, 0.03

MODEL_DIM, MLP_DIM, TOKENS = 4096, 14336, 2048  # of the layers that are slowed
STACK_LAYERS = 32


class Bench:
    """Pages in one layout, slots in page-locked memory, and the moves between them."""

    def __init__(self, layout: str, num_chunks: int) -> None:
        self.num_cells = num_chunks * CHUNK_CELLS
        self.nbytes = self.num_cells * CELL_BYTES
        blocks = 2 * num_chunks * CHUNK // BLOCK
        sizes = {"L": NUM_LAYERS, "B": blocks, "H": NUM_HEADS, "N": BLOCK, "C": 2 * HEAD_DIM}
        shape = [sizes[dim] for dim in layout]
        stored = torch.randint(-99, 99, shape, dtype=torch.int16, device="cuda")
        pages = stored.view(torch.bfloat16).permute(*(layout.index(dim) for dim in "LBHNC"))
        self.layers = [from_token_content(layer) for layer in pages]
        self.ids = random.Random(0).sample(range(blocks), num_chunks * CHUNK // BLOCK)
        self._memory = mmap.mmap(-1, self.num_cells * SLOT_BYTES)
        array = np.frombuffer(self._memory, np.uint8)
        address = int(array.__array_interface__["data"][0])
        self._lock = PageLock(CudaLocker(torch.cuda.current_device()))
        self._lock.lock(Buffer(address, memoryview(self._memory)))
        self.slots = torch.from_numpy(array)
        assert self.slots.is_pinned(), "staging memory could not be page-locked"
        self.moves = [self._move(address, i) for i in range(self.num_cells)]
        self.on_device = torch.empty(2, self.nbytes, dtype=torch.uint8, device="cuda")
        self.on_host = torch.empty(self.nbytes, dtype=torch.uint8, pin_memory=True)

    def _move(self, address: int, index: int) -> CellMove:
        chunk, cell = divmod(index, CHUNK_CELLS)
        span, head = divmod(cell, NUM_HEADS)
        return CellMove(
            address=address + index * SLOT_BYTES + PAYLOAD_OFFSET,
            layer_start=span * LAYER_SPAN,
            layer_stop=(span + 1) * LAYER_SPAN,
            head_start=head,
            head_stop=head + 1,
            block_ids=self.ids,
            table_start=0,
            chunk_start=chunk * CHUNK,
            chunk_tokens=CHUNK,
            token_start=chunk * CHUNK,
            token_stop=(chunk + 1) * CHUNK,
        )

    def close(self) -> None:
        self._lock.close()


def calls(moves: Sequence[CellMove], cells: int) -> list[Sequence[CellMove]]:
    return [moves[i : i + cells] for i in range(0, len(moves), cells)]


def wall_s(action: Callable[[], object]) -> float:
    """Until the device has done it too."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    action()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def device_s(action: Callable[[], object]) -> float:
    """By events of the current stream."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    action()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) / 1000


def medians(actions: dict[str, Callable[[], float]], repeats: int) -> dict[str, float]:
    """Seconds of each action; one of each in turn, the first turn not counted."""
    for action in actions.values():
        action()
    times = interleaved(actions, repeats)
    return {name: statistics.median(values) for name, values in times.items()}


def rows_of(
    what: str, layout: str, nbytes: int, plain: str, seconds: dict[str, float]
) -> list[Row]:
    """`ratio` is the plain copy's time over that of what the row names."""
    return [
        {
            "what": what,
            "layout": layout,
            "by": name,
            "gbs": round(nbytes / value / 1e9, 2),
            "ratio": round(seconds[plain] / value, 3),
        }
        for name, value in seconds.items()
    ]


class TimedStreams(CudaStreams):
    """Keeps when each kernel began and ended."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def new_stream(self) -> CudaStream:
        return TimedStream(torch.cuda.Stream(), self.spans)

    def take_seconds(self) -> float:
        """Of all kernels since the last call, which must have ended."""
        seconds = sum(start.elapsed_time(stop) for start, stop in self.spans) / 1000
        self.spans.clear()
        return seconds


class TimedStream(CudaStream):
    """A stream of `TimedStreams`."""

    def __init__(
        self, stream: torch.cuda.Stream, spans: list[tuple[torch.cuda.Event, torch.cuda.Event]]
    ) -> None:
        super().__init__(stream)
        self._timed, self._spans = stream, spans

    def launch(self, runs: RunTable, num_programs: int, *args: Any, is_gather: bool) -> None:
        span = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        span[0].record(self._timed)
        super().launch(runs, num_programs, *args, is_gather=is_gather)
        span[1].record(self._timed)
        self._spans.append(span)


def kernel_alone(bench: Bench, layout: str, repeats: int) -> list[Row]:
    """Only what the kernels take is counted, without the copies between host and device."""
    source, target = bench.on_device
    streams = TimedStreams(source.device)
    copier = TritonCopier(bench.layers, streams, buffer_bytes=bench.nbytes)
    copier.warm_up()
    torch.cuda.synchronize()

    def kernel_s(action: Callable[[], object]) -> float:
        streams.take_seconds()
        action()
        return streams.take_seconds()

    actions: dict[str, Callable[[], float]] = {
        "plain copy": lambda: device_s(lambda: target.copy_(source)),
        "gather": lambda: kernel_s(lambda: copier.gather(bench.moves)),
        "scatter": lambda: kernel_s(lambda: copier.scatter(bench.moves)),
    }
    seconds = medians(actions, repeats)
    return rows_of("kernel", layout, bench.nbytes, "plain copy", seconds)


def copiers(bench: Bench) -> dict[str, Copier]:
    device = bench.on_device.device
    triton = TritonCopier(bench.layers, CudaStreams(device))
    triton.warm_up()
    made: dict[str, Copier] = {"torch": TorchCopier(bench.layers, device), "triton": triton}
    torch.cuda.synchronize()
    return made


def whole_path(bench: Bench, layout: str, repeats: int) -> list[Row]:
    plain = bench.on_device[0]
    rows: list[Row] = []
    made = copiers(bench)
    for cells in (FEW_CELLS, BATCH_CELLS, bench.num_cells):
        batches = calls(bench.moves, cells)
        mib = cells * CELL_BYTES >> 20

        def gather(copier: Copier, batches: list[Sequence[CellMove]] = batches) -> None:
            for moves in batches:
                copier.gather(moves)

        def scatter(copier: Copier, batches: list[Sequence[CellMove]] = batches) -> None:
            for moves in batches:
                copier.scatter(moves)

        to_host: dict[str, Callable[[], object]]
        to_host = {"plain copy": partial(bench.on_host.copy_, plain)}
        from_host: dict[str, Callable[[], object]]
        from_host = {"plain copy": partial(plain.copy_, bench.on_host)}
        to_host |= {name: partial(gather, copier) for name, copier in made.items()}
        from_host |= {name: partial(scatter, copier) for name, copier in made.items()}
        for what, actions in (("to host", to_host), ("from host", from_host)):
            seconds = medians({k: partial(wall_s, v) for k, v in actions.items()}, repeats)
            label = f"{what}, calls of {mib} MiB"
            rows += rows_of(label, layout, bench.nbytes, "plain copy", seconds)
    return rows


class Stack:
    """Layers of a transformer, their weights random and their KV thrown away."""

    def __init__(self) -> None:
        kv_dim = NUM_HEADS * HEAD_DIM
        shapes = (
            (MODEL_DIM, MODEL_DIM + 2 * kv_dim),
            (MODEL_DIM, MODEL_DIM),
            (MODEL_DIM, 2 * MLP_DIM),
            (MLP_DIM, MODEL_DIM),
        )
        make = torch.randn
        self._weights = [
            [make(s, device="cuda", dtype=torch.bfloat16) * s[0] ** -0.5 for s in shapes]
            for _ in range(STACK_LAYERS)
        ]
        self._input = make(TOKENS, MODEL_DIM, device="cuda", dtype=torch.bfloat16)

    def run(self) -> None:
        x = self._input
        for qkv_weight, out_weight, up_weight, down_weight in self._weights:
            kv = NUM_HEADS * HEAD_DIM
            q, k, v = (torch.rms_norm(x, x.shape[-1:]) @ qkv_weight).split((MODEL_DIM, kv, kv), 1)
            q, k, v = (t.view(1, TOKENS, -1, HEAD_DIM).transpose(1, 2) for t in (q, k, v))
            mixed = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=True
            )
            x = x + mixed.transpose(1, 2).reshape(TOKENS, MODEL_DIM) @ out_weight
            gate, up = (torch.rms_norm(x, x.shape[-1:]) @ up_weight).chunk(2, dim=1)
            x = x + (torch.nn.functional.silu(gate) * up) @ down_weight


class Saver:
    """A thread that saves as a lane does, while the layers run: everything once, or endlessly."""

    def __init__(self, copier: Copier, batches: Sequence[Sequence[CellMove]], *, endless: bool):
        self._copier, self._batches, self._endless = copier, batches, endless
        self._stop = threading.Event()
        self._fence: Fence | None = None
        self._thread = threading.Thread(target=self._save, daemon=True)
        self.saved_bytes = 0

    def __enter__(self) -> Self:
        self._fence = device_for(torch.device("cuda")).new_event()
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()

    def _save(self) -> None:
        if self._fence is not None:
            self._fence.synchronize()
        for moves in cycle(self._batches) if self._endless else self._batches:
            if self._stop.is_set():
                return
            self._copier.gather(moves)
            self.saved_bytes += len(moves) * CELL_BYTES


def slowdown(bench: Bench, layout: str, repeats: int) -> list[Row]:
    """Seconds of the layers by events of their stream, alone and beside a `Saver`."""
    stack = Stack()
    batches = calls(bench.moves, BATCH_CELLS)
    computed = calls(bench.moves[: TOKENS // CHUNK * CHUNK_CELLS], BATCH_CELLS)
    saved: dict[str, list[int]] = {}

    def beside(name: str, copier: Copier, endless: bool) -> float:
        with Saver(copier, batches if endless else computed, endless=endless) as saver:
            seconds = device_s(stack.run)
        saved.setdefault(name, []).append(saver.saved_bytes)
        return seconds

    actions: dict[str, Callable[[], float]] = {"nothing saved": lambda: device_s(stack.run)}
    for name, copier in copiers(bench).items():
        for endless in (False, True):
            label = f"{name}, {'endlessly' if endless else 'what was computed'}"
            actions[label] = partial(beside, label, copier, endless)
    seconds = medians(actions, repeats)
    alone = seconds["nothing saved"]
    return [
        {
            "what": "layers",
            "layout": layout,
            "by": name,
            "ms": round(value * 1000, 2),
            "saved_mib": int(statistics.median(saved.get(name, [0]))) >> 20,
            "slower": round(value / alone - 1, 4),
        }
        for name, value in seconds.items()
    ]


def targets(rows: Sequence[Row]) -> list[Target]:
    found = []
    for row in rows:
        name = f"{row['what']}, {row['layout']}"
        if row["what"] == "kernel" and row["by"] != "plain copy":
            what = f"{row['by']} by the kernel, {row['layout']}, of a copy on the device"
            found.append(Target(what, _number(row["ratio"]), GATHER_WANTED, at_least=True))
        elif str(row["what"]).startswith(("to host", "from host")) and row["by"] == "triton":
            what = f"{name}, of a plain copy"
            found.append(Target(what, _number(row["ratio"]), PATH_WANTED, at_least=True))
        elif row["what"] == "layers" and str(row["by"]).startswith("triton"):
            what = f"layers slowed, {row['layout']}, by {row['by']}"
            found.append(Target(what, _number(row["slower"]), SLOWDOWN_WANTED, at_least=False))
    return found


def _number(value: object) -> float:
    assert isinstance(value, float)
    return value


def measure(quick: bool) -> Result:
    num_chunks, repeats = (8, 3) if quick else (16, 15)
    rows: list[Row] = []
    for layout in LAYOUTS:
        bench = Bench(layout, num_chunks)
        for part in (kernel_alone, whole_path, slowdown):
            rows += part(bench, layout, repeats)
        bench.close()
    return Result(rows, targets(rows), [f"{repeats} repeats, {num_chunks * 32} MiB moved in each"])


def machine() -> dict[str, str]:
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": str(torch.version.cuda),
        "python": platform.python_version(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="also write the results here")
    parser.add_argument("--quick", action="store_true", help="fewer repeats; to see that it runs")
    args = parser.parse_args()
    result = measure(args.quick)
    result.show()
    if args.json:
        command = shlex.join(["python", "benchmarks/gpu_copy.py", *sys.argv[1:]])
        kept = {"command": command, "machine": machine(), **result.plain()}
        args.json.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
