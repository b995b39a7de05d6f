"""Production chat replayed through real connectors, over pages in memory, without a model.

    python benchmarks/bench_trace.py --trace conversation_trace.jsonl --json trace.json

The trace is Mooncake's (`FAST25-release/traces/conversation_trace.jsonl`, published with its paper
at FAST'25): 12,031 requests of a production chat service in an hour, each with the ids of its
prompt's blocks of 512 tokens. It is not part of this project; `CONVERSATION_TRACE` names it to
run_all.py, and any file in its format will do. Each request goes in the
trace's order through vLLM's real scheduler and a real connector (benchmarks/model_free_engine.py),
each side in a process of its own, over a store that starts empty. A block of the trace, 512 tokens,
is replayed as 64 tokens of 4 KiB each, so that 256 KiB stand for it; an answer has two tokens. The
forward pass takes 5 us a token, writes each block's number into its pages and compares the numbers
of what was loaded: one wrong block ends the side. A cell of ours is such a block, of all layers;
vLLM's MooncakeStore has a key for each 16 tokens.

* `found`: tokens of prompts that were not computed, of all. `pool`: those that the connector
  loaded; the rest the engine's own cache had. `unbounded` and `clairvoyant` are simulated over
  blocks of the trace, the latter at the store's capacity plus the engines' own.
* CPU: of the engines' processes, without the forward pass; Mooncake's master not counted.
* `held`: what a step with tokens waits in the connector's hooks, both sides together. On a CPU the
  pool copies a step's saves inside it. `lookup`: from a request's first question to its answer; an
  answer that is not there at once is taken a step later. `paused`: of the time, what the forward
  passes slept.
* `chunks of 4 blocks` are of 256 tokens, in which prompts of the trace part after 64, 128 or 192;
  with `alias_tokens: 64` hits end there, too, and prompts' ends are stored.
* `written`: bytes that the processes gave to files, for each byte of KV that was computed (write
  amplification), and for each found again in the pool.
* `three engines` take the requests in turn, at the same time and over one store, with pages of 16,
  32 and 64 tokens.

Of others: vLLM's OffloadingConnector runs with a stand-in for its device's copies
(benchmarks/offloading_on_cpu.py), whose CPU counts. LMCache 0.5.6 has no connector for pages in
host memory ("No supported cpu connector found"); FlexKV is in no package index.
"""

import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import LIMITED_BY, Child, Result, Row, run_script, spread
from benchmarks.limits import Meter
from benchmarks.model_free_engine import (
    GATHER,
    IMPORTED,
    EngineShape,
    ModelFreeEngine,
    mooncake_environment,
)
from benchmarks.trace_caches import found_by_clairvoyance, found_without_bounds, read_trace
from tests.support.models import LlamaShape, make_model
from tests.support.mooncake_master import MooncakeMaster

VARIABLE = "CONVERSATION_TRACE"
BLOCKS, TRACE_BLOCK = (16, 32, 64), 64  # tokens
SHAPE = LlamaShape(layers=4, heads=1, kv_heads=1, head_dim=128, max_position=20_480)
TOKEN_BYTES = SHAPE.layers * SHAPE.kv_heads * SHAPE.head_dim * 2 * 4
OWN_TOKENS = 65_536  # of an engine's own cache
REQUESTS, QUICK_REQUESTS = 1_000, 100
OUTPUT_TOKENS = 2
TOKEN_S, IDLE_S = 5e-6, 1e-3
CAPACITIES, QUICK_CAPACITIES = (512 << 20, 2 << 30), (1 << 30,)
MAIN_CAPACITY = 2 << 30
RUN_TIMEOUT_S = 240.0


def engine_shape(block: int) -> EngineShape:
    return EngineShape(
        model=SHAPE,
        block=block,
        num_blocks=OWN_TOKENS // block,
        max_seqs=16,
        max_model_len=SHAPE.max_position,
        max_batched_tokens=8_192,
    )


class TraceEngine(ModelFreeEngine):
    """Replays requests; their pages say which block of the trace they hold."""

    def replay(self, prompts: Sequence[tuple[int, ...]]) -> dict[str, Any]:
        """What the requests found and cost."""
        self._numbers: dict[str, np.ndarray] = {}
        self._new: set[str] = set()
        self._forward_s = self._paused_s = 0.0
        self._cached = self._loaded = 0
        self._asked_at: dict[str, float] = {}
        self._lookups: list[float] = []
        self._watch()
        waiting = list(reversed(prompts))
        held: list[float] = []
        began, cpu, written = time.monotonic(), time.process_time(), _written_bytes()
        connector = self.scheduler.connector
        while waiting or self.scheduler.requests or connector.has_pending_push_work():
            while waiting and len(self.scheduler.requests) < self._shape.max_seqs:
                self._arrive(waiting.pop())
            computed = self.step(self._forward)
            hooks = self.scheduler_clock.take(), self.worker_clock.take()
            if computed:
                held.append(
                    sum(each for hook in hooks for name, each in hook.items() if name != GATHER)
                )
        seconds = time.monotonic() - began
        return {
            "tokens": TRACE_BLOCK * sum(map(len, prompts)),
            "found": self._cached,
            "pool": self._loaded,
            "seconds": seconds,
            "cpu": time.process_time() - cpu - self._forward_s,
            "held": held,
            "lookups": self._lookups,
            "written": _written_bytes() - written,
            "paused": self._paused_s / seconds,
        }

    def _arrive(self, blocks: tuple[int, ...]) -> None:
        numbers = np.repeat(np.array(blocks, np.int64) + 1, TRACE_BLOCK)
        tokens = ((numbers * 31 + np.tile(np.arange(TRACE_BLOCK), len(blocks))) % 1000).tolist()
        # The number itself is in a block's first tokens, so different blocks are different prompts.
        for place, block in enumerate(blocks):
            tokens[place * TRACE_BLOCK : place * TRACE_BLOCK + 2] = divmod(block, 1000)
        request_id = self.add(tokens, OUTPUT_TOKENS)
        self._new.add(request_id)
        self._numbers[request_id] = numbers.astype(np.float32)

    def _watch(self) -> None:
        """Count what the connector is asked and what it promises."""
        connector = self.scheduler.connector
        match, allocated = (
            connector.get_num_new_matched_tokens,
            connector.update_state_after_alloc,
        )

        def timed_match(request: Any, num_computed: int) -> Any:
            asked_at = self._asked_at.setdefault(request.request_id, time.monotonic())
            answer = match(request, num_computed)
            if answer[0] is not None:
                self._lookups.append(time.monotonic() - asked_at)
                del self._asked_at[request.request_id]
            return answer

        def counted_allocated(request: Any, blocks: Any, num_external: int) -> Any:
            self._loaded += num_external
            return allocated(request, blocks, num_external)

        connector.get_num_new_matched_tokens = timed_match
        connector.update_state_after_alloc = counted_allocated

    def _forward(self, scheduled: Mapping[str, int]) -> None:
        """Write what is computed, compare what was not."""
        began = time.thread_time()
        for request_id, count in scheduled.items():
            request, numbers = self.scheduler.requests[request_id], self._numbers[request_id]
            stop = request.num_computed_tokens
            start = stop - count
            if request_id in self._new:
                self._new.remove(request_id)
                self._cached += start
            (table,) = self.scheduler.kv_cache_manager.get_block_ids(request_id)
            block = self._shape.block
            first, last = start // block, -(-min(stop, len(numbers)) // block)
            for each in self.pages.values():
                pages = each.numpy()
                if start < len(numbers):
                    pages[table[first:last]] = numbers[first * block : last * block : block][
                        :, None, None, None
                    ]
            if stop >= request.num_prompt_tokens > start:
                self._check(request_id, table)
        self._forward_s += time.thread_time() - began
        # As long as a pass takes; without tokens, an engine looks again after a moment.
        pause_s = max(IDLE_S, TOKEN_S * sum(scheduled.values()))
        self._paused_s += pause_s
        time.sleep(pause_s)

    def _check(self, request_id: str, table: Sequence[int]) -> None:
        numbers = self._numbers[request_id]
        wanted = numbers[:: self._shape.block]
        for name, each in self.pages.items():
            pages = each.numpy()[table[: len(wanted)]]
            wrong = np.flatnonzero((pages != wanted[:, None, None, None]).any(axis=(1, 2, 3)))
            if len(wrong):
                raise AssertionError(f"{request_id}, {name}: {len(wrong)} blocks are of others")


def _written_bytes() -> int:
    """What this process has given to the system to be written to storage."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["write_bytes"])


@dataclass(frozen=True)
class Side:
    """A connector and its options, in which a directory, a master and sizes are filled in."""

    name: str
    connector: str
    options: Callable[[Path, str, int, int], dict[str, Any]]
    """Given a directory, a master, the bytes of the store and an engine's part of them."""


def pool_options(
    *stores: str, chunk: int = TRACE_BLOCK, aliases: int = 0
) -> Callable[[Path, str, int, int], dict[str, Any]]:
    def options(directory: Path, master: str, nbytes: int, part: int) -> dict[str, Any]:
        sizes = {"nbytes": nbytes, "quarter": nbytes // 4, "part": part}
        return {
            "store": [each.format(directory=directory, master=master, **sizes) for each in stores],
            "chunk_tokens": chunk,
            "alias_tokens": aliases,
            "layer_span": SHAPE.layers,
        }

    return options


def offloading_options(directory: Path, master: str, nbytes: int, part: int) -> dict[str, Any]:
    return {
        "spec_name": "SpecOnCpu",
        "spec_module_path": "benchmarks.offloading_on_cpu",
        "cpu_bytes_to_use": nbytes,
        "block_size": TRACE_BLOCK,
    }


DIRECTORY = "file://{directory}/pool?size={nbytes}"
LARGE = 4 * TRACE_BLOCK
FILES = Side("kvpool, files", "KVPoolConnector", pool_options(DIRECTORY))
LARGE_CHUNKS = tuple(
    Side(
        f"kvpool, files, chunks of 4 blocks{what}",
        "KVPoolConnector",
        pool_options(DIRECTORY, chunk=LARGE, aliases=step),
    )
    for what, step in (("", 0), (", aliases", TRACE_BLOCK))
)
MOONCAKE = Side(
    "kvpool, Mooncake", "KVPoolConnector", pool_options("mooncake://{master}?segment={part}")
)
IN_TREE = Side("vLLM's MooncakeStore", "MooncakeStoreConnector", lambda *_: {})
SIDES = (
    FILES,
    Side("kvpool, host memory", "KVPoolConnector", pool_options("host://{nbytes}")),
    Side(
        "kvpool, host memory (1/4) and files",
        "KVPoolConnector",
        pool_options("host://{quarter}", DIRECTORY),
    ),
    *LARGE_CHUNKS,
    MOONCAKE,
    IN_TREE,
    Side("vLLM's OffloadingConnector", "OffloadingConnector", offloading_options),
)
SWEPT = (FILES, *LARGE_CHUNKS, IN_TREE)
SHARED = (MOONCAKE, IN_TREE)
LISTS = ("held", "lookups")


def measure_side(
    side: Side,
    model: Path,
    prompts: Sequence[tuple[int, ...]],
    nbytes: int,
    blocks: Sequence[int] = BLOCKS[:1],
) -> Row:
    """An engine for each size of block, all at once over one store."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench")))
        master = stack.enter_context(MooncakeMaster())
        engines = []
        for number, block in enumerate(blocks):
            place = directory / str(number)
            place.mkdir()
            # Of a Mooncake store, each engine holds its part.
            part = nbytes // len(blocks)
            env = mooncake_environment(master.address, place, part)
            options = side.options(directory, master.address, nbytes, part)
            arguments = (engine_shape(block), side.connector, options, str(model))
            engines.append(stack.enter_context(Child(TraceEngine, *arguments, env=env)))
        for engine in engines:
            engine.wait_ready()
        meter = Meter()
        with meter.of("replay"):
            for number, engine in enumerate(engines):
                engine.begin("replay", prompts[number :: len(engines)])
            done = [engine.finish(RUN_TIMEOUT_S) for engine in engines]
    total = {name: sum(each[name] for each in done) for name in done[0] if name not in LISTS}
    held, lookups = ([value for each in done for value in each[name]] for name in LISTS)
    computed = (total["tokens"] - total["found"]) * TOKEN_BYTES
    loaded = total["pool"] * TOKEN_BYTES
    return {
        "side": side.name,
        "store MiB": nbytes >> 20,
        "found": total["found"] / total["tokens"],
        "pool": total["pool"] / total["tokens"],
        "seconds": max(each["seconds"] for each in done),
        "CPU s": total["cpu"],
        "CPU s / GB computed or loaded": total["cpu"] / ((computed + loaded) / 1e9),
        **spread("held", "us", held),
        **spread("lookup", "ms", [1e3 * each for each in lookups]),
        "written / computed": total["written"] / computed,
        "written / found": total["written"] / loaded if loaded else "",
        "paused": max(each["paused"] for each in done),
        LIMITED_BY: meter.limited_by("replay"),
    }


def simulated(prompts: Sequence[tuple[int, ...]], capacities: Sequence[int]) -> list[Row]:
    """What an unbounded cache, and the best of each size, would have found."""
    nothing: Row = {LIMITED_BY: ""}  # of these, nothing is timed
    found = found_without_bounds(prompts)
    rows: list[Row] = [{"side": "unbounded, simulated", "found": found} | nothing]
    for nbytes in capacities:
        blocks = (nbytes // TOKEN_BYTES + OWN_TOKENS) // TRACE_BLOCK
        found = found_by_clairvoyance(prompts, blocks)
        row: Row = {"side": "clairvoyant, simulated", "store MiB": nbytes >> 20, "found": found}
        rows.append(row | nothing)
    return rows


def measure(quick: bool, trace: str) -> Result:
    result = Result()
    path = trace or os.environ.get(VARIABLE, "")
    if not path:
        result.notes.append(f"no trace: name it with --trace or {VARIABLE}")
        return result
    prompts = read_trace(Path(path))[: QUICK_REQUESTS if quick else REQUESTS]
    capacities = QUICK_CAPACITIES if quick else CAPACITIES
    with tempfile.TemporaryDirectory(prefix="bench") as directory:
        model = make_model(Path(directory), SHAPE)
        for nbytes in capacities:
            sides = SIDES if nbytes == MAIN_CAPACITY else SWEPT
            result.rows += [measure_side(side, model, prompts, nbytes) for side in sides]
        nbytes = capacities[-1]
        for side in SHARED[:1] if quick else SHARED:
            blocks = BLOCKS[:2] if quick else BLOCKS
            row = measure_side(side, model, prompts, nbytes, blocks)
            number = "two" if quick else "three"
            result.rows.append(row | {"side": f"{number} engines: {side.name}"})
    result.rows += simulated(prompts, capacities)
    result.notes.append(
        f"{len(prompts)} requests, {TRACE_BLOCK * sum(map(len, prompts))} tokens; an engine's own "
        f"cache {OWN_TOKENS} tokens"
    )
    return result


if __name__ == "__main__":
    run_script(
        __doc__, measure, IMPORTED, trace="requests to replay, in the format of Mooncake's traces"
    )
