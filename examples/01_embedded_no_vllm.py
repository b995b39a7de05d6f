"""The data path without vLLM: two ranks write a prompt's KV heads, one rank reads them all.

Pages are plain tensors in the form that GPU attention backends use. The writers run TP=2 with
blocks of 16 tokens, the reader TP=1 with blocks of 64. Run it with the project's environment:

    .venv/bin/python examples/01_embedded_no_vllm.py
"""

import tempfile
import time

import torch

from vllm_kvpool.config import read_config
from vllm_kvpool.identity.chunk_hash import ChunkChain, RequestIdentity
from vllm_kvpool.identity.keys import make_namespace
from vllm_kvpool.layout.engine_shape import ModelShape, RankPlace
from vllm_kvpool.layout.page_formats import from_token_content
from vllm_kvpool.layout.topology import KVCacheGroup, LayerGroup, Topology
from vllm_kvpool.scheduler.messages import StepPlan
from vllm_kvpool.staging.copy_cpu import CpuCopier
from vllm_kvpool.transfer.ops import JobId, JobPages, LoadPlan, SavePlan
from vllm_kvpool.worker.worker_part import WorkerPart

LAYERS, HEADS, HEAD_DIM, TOKENS, CHUNK = 4, 2, 64, 512, 256
CONTENT = 2 * HEAD_DIM  # K and V of a token, side by side
ROW_BYTES = CONTENT * 2  # float16


def worker(store: str, tp_rank: int, tp_size: int, block: int) -> tuple[WorkerPart, torch.Tensor]:
    """One rank's side of the pool, and its pages `[layers, blocks, heads, tokens, content]`."""
    topology = Topology(HEADS, tp_size, ((0, LAYERS),), layer_span=1)
    pages = torch.zeros(
        LAYERS, 1 + TOKENS // block, HEADS // tp_size, block, CONTENT, dtype=torch.float16
    )
    layers = [from_token_content(layer) for layer in pages]
    CpuCopier(layers).warm_up()  # a first time it compiles, which takes longer than a save may
    model = ModelShape(
        namespace=make_namespace("example", "0" * 12),
        layer_groups=(LayerGroup(topology, ROW_BYTES),),
        groups=(KVCacheGroup(block),),
        num_blocks=1 + TOKENS // block,
        num_ranks=tp_size,
    )
    part = WorkerPart(
        read_config({"store": store, "chunk_tokens": CHUNK, "staging_bytes": "16MiB"}),
        model,
        RankPlace(tp_rank, 0, tp_rank),
        layers,
        CpuCopier,
        finish_in_step=True,
    )
    return part, pages


def whole_prompt(block: int) -> tuple[JobPages, ...]:
    """Return the blocks that hold the tokens, in the only KV cache group. Block 0 means none."""
    return (JobPages(tuple(range(1, 1 + TOKENS // block)), 0, 0, TOKENS),)


def main() -> None:
    """Save under TP 2 and load under TP 1, through a file store."""
    chain = ChunkChain(CHUNK, RequestIdentity())
    chain.extend(range(TOKENS))
    hashes = tuple(chain.hashes)
    # [layers, heads, tokens, content], as if a model had computed it.
    truth = torch.randn(LAYERS, HEADS, TOKENS, CONTENT).half()
    with tempfile.TemporaryDirectory() as directory:
        store = f"file://{directory}/pool?size=64MiB"
        for rank in range(2):
            part, pages = worker(store, rank, tp_size=2, block=16)
            mine = truth[:, rank : rank + 1]
            pages[:, 1:] = mine.unflatten(2, (-1, 16)).transpose(1, 2)
            save = SavePlan(JobId(1), "request", 0, hashes, whole_prompt(block=16))
            part.worker.start_saves(StepPlan(saves=(save,)))
            part.close()  # waits for the puts
        part, pages = worker(store, 0, tp_size=1, block=64)
        load = LoadPlan(JobId(2), "request", 0, hashes, whole_prompt(block=64), 0, TOKENS)
        plan = StepPlan(loads=(load,), idle=True)
        part.worker.start_loads(plan)
        deadline = time.monotonic() + 10
        while "request" not in part.worker.finish_step(plan, set()).loaded:
            assert time.monotonic() < deadline, "the load did not end"
        read = pages[:, 1:].transpose(1, 2).flatten(2, 3)
        print("bytes equal after TP=2, block 16 -> TP=1, block 64:", torch.equal(read, truth))
        part.close()


if __name__ == "__main__":
    main()
