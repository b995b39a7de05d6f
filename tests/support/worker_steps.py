"""Loads that a test waits for, on worker parts, and the prompt hashes to plan them."""

import time
from collections.abc import Sequence

from vllm_kvpool.identity.chunk_hash import ChunkChain, RequestIdentity
from vllm_kvpool.scheduler.messages import StepPlan
from vllm_kvpool.transfer.ops import LoadPlan
from vllm_kvpool.worker.worker_part import WorkerPart

LIMIT_S = 60.0


def prompt_hashes(tokens: Sequence[int], chunk_tokens: int) -> tuple[bytes, ...]:
    """Return the hashes of a prompt's whole chunks."""
    chain = ChunkChain(chunk_tokens, RequestIdentity())
    chain.extend(tokens)
    return tuple(chain.hashes)


def load_all(parts: Sequence[WorkerPart], load: LoadPlan) -> frozenset[int]:
    """Load in a step of an idle engine. Return the blocks of all parts that were not filled."""
    plan, invalid = StepPlan(loads=(load,), idle=True), frozenset[int]()
    for part in parts:
        part.worker.start_loads(plan)
    for part in parts:
        deadline = time.monotonic() + LIMIT_S
        while load.request_id not in (ended := part.worker.finish_step(plan, set())).loaded:
            assert time.monotonic() < deadline, "the load did not end"
        invalid |= ended.invalid_blocks
    return invalid
