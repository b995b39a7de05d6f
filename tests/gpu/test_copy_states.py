"""Recurrent states by the Triton copier, against the torch copier on the host.

In the interpreter; on a GPU the same tests, unchanged.
"""

import numpy as np
import pytest
import torch

from tests.gpu.conftest import Place
from tests.support.moves import cell_move
from vllm_kvpool.layout.page_formats import from_state
from vllm_kvpool.layout.pages import LayerPages
from vllm_kvpool.layout.states import StateForm, WindowPart
from vllm_kvpool.staging.copy_torch import TorchCopier

NUM_BLOCKS, LAYERS, BLOCK, POISON = 4, 2, 2, 0xA5
CPU = torch.device("cpu")

FORMS = {
    "short convolution": StateForm(4, 2, 4, (WindowPart(6),)),
    "three parts and a state": StateForm(
        4, 3, 2, (WindowPart(8), WindowPart(8), WindowPart(16)), 96
    ),
    "shared parts": StateForm(
        4, 3, 2, (WindowPart(16), WindowPart(12, True), WindowPart(12, True)), 64
    ),
    "no window": StateForm(4, recurrent_bytes=24 << 10),  # larger than a tile
    "odd sizes": StateForm(4, 3, 2, (WindowPart(3), WindowPart(5)), 10),
}


def pages_of(memory_lbc: torch.Tensor, form: StateForm, dim_first: bool) -> list[LayerPages]:
    return [
        from_state(
            layer_bc[:, None, None].view(torch.int8), form, form.num_units, dim_first=dim_first
        )
        for layer_bc in memory_lbc
    ]


def block_bytes(form: StateForm) -> int:
    """Return the bytes of one block over all units. A shared part counts once."""
    channels = sum(part.channels * (1 if part.is_shared else form.num_units) for part in form.parts)
    return form.window_rows * form.item_bytes * channels + form.num_units * form.recurrent_bytes


@pytest.mark.parametrize("dim_first", [False, True])
@pytest.mark.parametrize("name", FORMS)
def test_states_are_moved_as_on_the_host(place: Place, name: str, dim_first: bool) -> None:
    form = FORMS[name]
    shape = (LAYERS, NUM_BLOCKS, block_bytes(form))
    generator = torch.Generator().manual_seed(1)
    filled = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    poisoned = torch.full(shape, POISON, dtype=torch.uint8)
    for heads in ((0, 1), (1, 3), (0, form.num_units)):
        nbytes = (heads[1] - heads[0]) * LAYERS * form.row_bytes
        slots = np.zeros((2, nbytes + 64), np.uint8)
        at = [row.ctypes.data + -row.ctypes.data % 64 for row in slots]
        span = 0, LAYERS, *heads
        moves = [cell_move(address, span, [BLOCK], chunk_tokens=1) for address in at]
        places = [filled.clone().to(place.device), filled.clone()]
        on_device = place.copier(pages_of(places[0], form, dim_first))
        on_host = TorchCopier(pages_of(places[1], form, dim_first), CPU)
        place.wait_for_model()
        on_device.gather([moves[0]])
        on_host.gather([moves[1]])
        rows = [
            slot[address - slot.ctypes.data :][:nbytes]
            for slot, address in zip(slots, at, strict=True)
        ]
        assert rows[0].any()
        assert np.array_equal(*rows)
        for memory in places:
            memory.copy_(poisoned)
        place.wait_for_model()
        on_device.scatter([moves[0]])
        on_host.scatter([moves[1]])
        assert torch.equal(places[0].cpu(), places[1])
        everything = heads == (0, form.num_units)
        assert torch.equal(places[1][:, BLOCK], filled[:, BLOCK]) is everything
