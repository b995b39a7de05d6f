"""Loads of worker sides that are waited for, and the hashes of prompts that they are planned by."""

import time
from collections.abc import Sequence

from vllm_kvpool.identity.chunk_hash import ChunkChain, RequestIdentity
from vllm_kvpool.scheduler.messages import StepPlan
from vllm_kvpool.sides import WorkerSide
from vllm_kvpool.transfer.ops import LoadPlan

LIMIT_S = 60.0


def prompt_hashes(tokens: Sequence[int], chunk_tokens: int) -> tuple[bytes, ...]:
    """Hashes of a prompt's whole chunks."""
    chain = ChunkChain(chunk_tokens, RequestIdentity())
    chain.extend(tokens)
    return tuple(chain.hashes)


def load_all(sides: Sequence[WorkerSide], load: LoadPlan) -> frozenset[int]:
    """Load in a step of an idle engine; returns the blocks that were not filled, of all sides."""
    plan, invalid = StepPlan(loads=(load,), idle=True), frozenset[int]()
    for side in sides:
        side.worker.start_loads(plan)
    for side in sides:
        deadline = time.monotonic() + LIMIT_S
        while load.request_id not in (ended := side.worker.finish_step(plan, set())).loaded:
            assert time.monotonic() < deadline, "the load did not end"
        invalid |= ended.invalid_blocks
    return invalid
