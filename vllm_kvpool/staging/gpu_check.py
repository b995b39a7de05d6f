"""A check that copies between pages of this machine's GPUs and host memory are exact.

`kvpool doctor` asks, before an engine depends on it. Needs neither vLLM nor a model.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from vllm_kvpool.layout.page_formats import from_token_content
from vllm_kvpool.layout.pages import LayerPages, SlabMove
from vllm_kvpool.staging.copier import Copier
from vllm_kvpool.staging.copy_torch import TorchCopier
from vllm_kvpool.staging.devices import device_for
from vllm_kvpool.storage.base import map_buffer

LAYERS, BLOCKS, HEADS, BLOCK_TOKENS, ROW_BYTES = 2, 24, 4, 16, 512
CHUNK_TOKENS = 256

CopierMaker = Callable[[Sequence[LayerPages]], Copier]


class GpuCheck(NamedTuple):
    """The check of a GPU: its copier, the seconds with compiling, and the error."""

    gpu: str
    copier: str
    seconds: float
    problem: str
    """"" if every byte was right."""


def check_gpus() -> Iterator[GpuCheck]:
    """Check each GPU that torch can use, with the copier that an engine would take. Blocks."""
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        what, make = _copier_for(device)
        began = time.perf_counter()
        try:
            problem = "" if copies_exactly(device, make) else "bytes differ from those of a CPU"
        except Exception as error:  # compilers and drivers raise what they like: it is the answer
            problem = f"{type(error).__name__}: {error}"
        name = f"{device} {torch.cuda.get_device_name(device)}"
        yield GpuCheck(name, what, time.perf_counter() - began, problem)


def copies_exactly(device: torch.device, make: CopierMaker) -> bool:
    """Return True if random pages survive a copy to host memory and back, in a CPU's form."""
    pages = torch.randint(256, (LAYERS, BLOCKS, HEADS, BLOCK_TOKENS, ROW_BYTES), dtype=torch.uint8)
    on_device = pages.clone().to(device)
    ids = torch.randperm(BLOCKS)[: CHUNK_TOKENS // BLOCK_TOKENS].tolist()
    slot, expected = (map_buffer(LAYERS * HEADS * CHUNK_TOKENS * ROW_BYTES) for _ in range(2))
    copier = make([from_token_content(layer) for layer in on_device])
    if (fence := device_for(device).new_event()) is not None:
        fence.synchronize()
    copier.gather([_whole_chunk(slot.address, ids)])
    on_host = TorchCopier([from_token_content(layer) for layer in pages], torch.device("cpu"))
    on_host.gather([_whole_chunk(expected.address, ids)])
    if slot.view != expected.view:
        return False
    on_device.zero_()
    if (fence := device_for(device).new_event()) is not None:
        fence.synchronize()
    copier.scatter([_whole_chunk(slot.address, ids)])
    whole = torch.zeros_like(pages)
    whole[:, ids] = pages[:, ids]
    return torch.equal(on_device.cpu(), whole)


def _whole_chunk(address: int, ids: list[int]) -> SlabMove:
    return SlabMove(
        addresses=np.array([address]),
        places=np.array([(0, LAYERS, 0, HEADS)]),
        block_ids=ids,
        table_start=0,
        chunk_start=0,
        chunk_tokens=CHUNK_TOKENS,
        token_start=0,
        token_stop=CHUNK_TOKENS,
    )


def _copier_for(device: torch.device) -> tuple[str, CopierMaker]:
    """Return the name of a GPU's copier, and the function that makes it."""
    try:
        from vllm_kvpool.staging.copy_triton import TritonCopier
        from vllm_kvpool.staging.cuda_streams import CudaStreams
    except ModuleNotFoundError:
        return "torch, as Triton is not installed", lambda layers: TorchCopier(layers, device)

    def make(layers: Sequence[LayerPages]) -> Copier:
        copier = TritonCopier(layers, CudaStreams(device))
        copier.warm_up()
        return copier

    return "Triton", make
