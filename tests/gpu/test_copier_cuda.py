"""The torch copier on a GPU against the same on the host; needs neither vLLM nor numba.

Run by `make gpu-test` on a machine with a GPU. Pages of both are filled with fresh random bytes;
what one gathers, the other scatters, and every byte of the pages is compared.
"""

import mmap
import random

import numpy as np
import pytest
import torch

from tests.support.moves import slab
from vllm_kvpool.layout.page_formats import from_token_content
from vllm_kvpool.layout.pages import SlabMove
from vllm_kvpool.staging.copy_torch import TorchCopier
from vllm_kvpool.staging.devices import device_for

pytestmark = pytest.mark.gpu

LAYERS, BLOCKS, HEADS, DIM, CHUNK = 4, 40, 8, 128, 256
CUDA = torch.device("cuda")


def wait_for_model() -> None:
    """Wait as the fence lane does before a plan's copies."""
    fence = device_for(CUDA).new_event()
    assert fence is not None
    fence.synchronize()


def pages(order: str, block: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return random pages `[L, B, H, N, C]` in the stride order that `order` names."""
    sizes = {"L": LAYERS, "B": BLOCKS * 16 // block + 8, "H": HEADS, "N": block, "C": 2 * DIM}
    shape = [sizes[d] for d in order]
    words = torch.randint(0, 255, [*shape[:-1], shape[-1] * dtype.itemsize], dtype=torch.uint8)
    stored = words.view(dtype).to(device)
    return stored.permute(*(order.index(d) for d in "LBHNC"))


def moves(address: int, block: int, blocks: list[int], clip: tuple[int, int]) -> list[SlabMove]:
    """Return moves of a cell for each head and span, in one slab."""
    cell_bytes = 2 * CHUNK * 2 * DIM * 2
    places = [(span, span + 2, head, head + 1) for head in range(HEADS) for span in (0, 2)]
    addresses = range(address, address + len(places) * cell_bytes, cell_bytes)
    return [slab(addresses, places, blocks, 0, 0, CHUNK, *clip)]


@pytest.mark.parametrize("order", ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"])
@pytest.mark.parametrize("block", [16, 64, 96])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gpu_and_host_agree(order: str, block: int, dtype: torch.dtype) -> None:
    rng = random.Random(f"{order}{block}{dtype}")
    on_gpu = pages(order, block, dtype, CUDA)
    on_host = pages(order, block, dtype, torch.device("cpu"))
    gpu = TorchCopier([from_token_content(layer) for layer in on_gpu], CUDA)
    host = TorchCopier([from_token_content(layer) for layer in on_host], torch.device("cpu"))
    memory = mmap.mmap(-1, HEADS * LAYERS * CHUNK * 2 * DIM * 2)
    address = int(np.frombuffer(memory, np.uint8).__array_interface__["data"][0])
    table = rng.sample(range(on_gpu.shape[1]), -(-CHUNK // block))
    for clip in ((0, CHUNK), (block, CHUNK), (0, CHUNK - 40)):
        wait_for_model()
        gpu.gather(moves(address, block, table, (0, CHUNK)))
        expected = on_host.clone()
        rows = on_gpu.cpu()[:, table].transpose(1, 2).flatten(2, 3)[:, :, :CHUNK]
        for token in range(*clip):
            expected[:, table[token // block], :, token % block] = rows[:, :, token]
        host.scatter(moves(address, block, table, clip))
        assert torch.equal(on_host.view(torch.int16), expected.view(torch.int16))
        # And back, into poisoned pages.
        on_gpu.fill_(7)
        host.gather(moves(address, block, table, (0, CHUNK)))
        gpu.scatter(moves(address, block, table, clip))
        poisoned = torch.full_like(expected, 7)
        for token in range(*clip):
            place = (slice(None), table[token // block], slice(None), token % block)
            poisoned[place] = expected[place]
        assert torch.equal(on_gpu.cpu().view(torch.int16), poisoned.view(torch.int16))


def test_a_gather_waits_for_the_fence() -> None:
    """The pages are written by work that is queued but has not run yet."""
    on_gpu = pages("LBHNC", 16, torch.float16, CUDA)
    copier = TorchCopier([from_token_content(layer) for layer in on_gpu], CUDA)
    memory = mmap.mmap(-1, HEADS * LAYERS * CHUNK * 2 * DIM * 2)
    staged = torch.frombuffer(memory, dtype=torch.float16)
    address = int(np.frombuffer(memory, np.uint8).__array_interface__["data"][0])
    busy = torch.randn(8192, 8192, device=CUDA)
    torch.cuda.synchronize()
    for _ in range(40):
        busy = busy @ busy * 1e-5
    on_gpu.fill_(3)
    wait_for_model()
    copier.gather(moves(address, 16, list(range(CHUNK // 16)), (0, CHUNK)))
    assert bool((staged == 3).all())
