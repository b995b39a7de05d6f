"""A recurrent state's save and load, beside those of the attention cells of one chunk.

    python benchmarks/bench_states.py --json states.json

The sizes are Qwen3-Next-80B's on one rank: 36 layers with gated delta networks, whose states are
cut into 16 units, and 12 with attention over 2 heads. The worker side saves and loads the states at
one boundary or the cells of one chunk at a time, in turns, over memory and over files on this
machine's disk (checksums on). A save ends when the store has it, a load when its pages are filled.
A prompt has states at one boundary or two, and cells for every 256 tokens.
"""

import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

import tests.support.memory_store  # noqa: F401  (its scheme)
from benchmarks.common import LIMITED_BY, Result, interleaved, run_script, wait_until
from benchmarks.limits import Meter
from vllm_kvpool.config import read_config
from vllm_kvpool.identity.keys import make_namespace
from vllm_kvpool.layout.engine_shape import ModelShape, RankPlace
from vllm_kvpool.layout.page_formats import from_state, from_token_content
from vllm_kvpool.layout.states import StateForm, WindowPart
from vllm_kvpool.layout.topology import KVCacheGroup, LayerGroup, Topology
from vllm_kvpool.scheduler.blocks import NO_PAGES, state_page
from vllm_kvpool.scheduler.messages import StepPlan
from vllm_kvpool.staging.copy_cpu import CpuCopier
from vllm_kvpool.transfer.ops import JobId, JobPages, LoadPlan, SavePlan
from vllm_kvpool.worker.worker_part import WorkerPart

CHUNK = 256
HEADS, ROW_BYTES, ATTENTION_LAYERS = 2, 2 * 256 * 2, 12
UNITS, STATE_LAYERS, SPAN = 16, 36, 9
# Of one key head of 128 with two value heads of 128, in bfloat16: three rows, and two matrices.
FORM = StateForm(
    num_units=UNITS,
    window_rows=3,
    item_bytes=2,
    parts=(WindowPart(128), WindowPart(128), WindowPart(256)),
    recurrent_bytes=2 * 128 * 128 * 2,
)
NUM_BLOCKS = 4
REPEATS, QUICK_REPEATS = 15, 2
LIMIT_S = 30.0
GROUPS = (
    LayerGroup(
        Topology(HEADS, 1, ((0, ATTENTION_LAYERS),), 3, layer_group="full-2x1024"), ROW_BYTES
    ),
    LayerGroup(
        Topology(UNITS, 1, ((0, STATE_LAYERS),), SPAN, layer_group="state-gdn-16x68608"),
        FORM.row_bytes,
        is_state=True,
    ),
)


class Took(NamedTuple):
    """Seconds of the clock, and of this process's threads on cores."""

    wall: float
    cpu: float


class Side:
    """A rank's worker side with the pages of four blocks of either kind."""

    def __init__(self, store: str, url: str) -> None:
        self.store = store
        rows = torch.ones(ATTENTION_LAYERS, NUM_BLOCKS, HEADS, CHUNK, ROW_BYTES, dtype=torch.uint8)
        nbytes = UNITS * FORM.row_bytes
        states = torch.ones(STATE_LAYERS, NUM_BLOCKS, 1, 1, nbytes, dtype=torch.uint8)
        pages = [from_token_content(layer) for layer in rows]
        pages += [replace(from_state(layer, FORM, UNITS), group=1) for layer in states]
        options = {"store": url, "chunk_tokens": CHUNK, "staging_bytes": "256MiB"}
        self._part = WorkerPart(
            read_config(options, env={}),
            ModelShape(
                namespace=make_namespace("states", "0" * 12),
                layer_groups=GROUPS,
                groups=(KVCacheGroup(CHUNK), KVCacheGroup(CHUNK, is_state=True)),
                num_blocks=NUM_BLOCKS,
                num_ranks=1,
            ),
            RankPlace(0, 0, 0),
            pages,
            CpuCopier,
            finish_in_step=True,
        )
        self._number = 0

    def round(self, *, is_state: bool) -> tuple[Took, Took]:
        """What it took to save, and then to load, one boundary's states or one chunk's cells."""
        self._number += 1
        job, request = JobId(self._number), f"r{self._number}"
        hashes = (self._number.to_bytes(16, "big"),)
        block = self._number % NUM_BLOCKS
        cells, state = JobPages((block,), 0, 0, CHUNK), state_page(block, CHUNK)
        pages = (NO_PAGES, state) if is_state else (cells, NO_PAGES)
        save = StepPlan(saves=(SavePlan(job, request, 0, hashes, pages, is_state=is_state),))
        load = StepPlan(loads=(LoadPlan(job, request, 0, hashes, pages, 0, CHUNK),), idle=True)
        return self._timed(save, job), self._timed(load, request)

    def _timed(self, plan: StepPlan, awaited: JobId | str) -> Took:
        worker = self._part.worker
        wall, cpu = time.perf_counter(), time.process_time()
        worker.start_loads(plan)
        worker.start_saves(plan)

        def is_over() -> bool:
            results = worker.finish_step(plan, set())
            assert not results.invalid_blocks, "a load has failed"
            report = worker.take_report()
            return awaited in results.loaded or (report is not None and awaited in report.stored)

        wait_until(is_over, LIMIT_S)
        return Took(time.perf_counter() - wall, time.process_time() - cpu)

    def close(self) -> None:
        self._part.close()


def measure(quick: bool) -> Result:
    result = Result()
    with tempfile.TemporaryDirectory(prefix="bench") as directory:
        sides = [
            Side("memory", "memory://bench-states?size=4GiB"),
            Side("file", f"file://{Path(directory) / 'pool'}?size=8GiB"),
        ]
        for side in sides:
            actions = {
                "cells of a chunk": lambda side=side: side.round(is_state=False),
                "states at a boundary": lambda side=side: side.round(is_state=True),
            }
            interleaved(actions, 1)  # first touches of memory
            meter, repeats = Meter(), QUICK_REPEATS if quick else REPEATS
            for what, took in interleaved(actions, repeats, meter).items():
                group = GROUPS[what.startswith("states")]
                spans, shards = group.topology.all_spans(), group.topology.all_shards()
                nbytes = len(shards) * sum(group.payload_bytes(span, CHUNK) for span in spans)
                saves, loads = zip(*took, strict=True)
                result.rows.append(
                    {
                        "store": side.store,
                        "what": what,
                        "cells": len(spans) * len(shards),
                        "MiB": nbytes / 2**20,
                        "save ms": 1e3 * median(each.wall for each in saves),
                        "save GB/s": nbytes / median(each.wall for each in saves) / 1e9,
                        "save CPU ms": 1e3 * median(each.cpu for each in saves),
                        "load ms": 1e3 * median(each.wall for each in loads),
                        "load GB/s": nbytes / median(each.wall for each in loads) / 1e9,
                        "load CPU ms": 1e3 * median(each.cpu for each in loads),
                        LIMITED_BY: meter.limited_by(what),
                    }
                )
            side.close()
    return result


if __name__ == "__main__":
    run_script(__doc__, measure)
