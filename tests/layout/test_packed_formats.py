"""Packed page formats of vLLM's backends: a copier reads and writes the rows that kernels do.

The tests place each element of a page where the kernel's source puts it. A copier must read the
right rows from these pages, and must write the same pages from rows.

Legend: B blocks, H heads, N tokens per block, R bytes of a row.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from tests.support.moves import cell_move
from vllm_kvpool.errors import ConfigError
from vllm_kvpool.layout.page_formats import from_nvfp4, from_planes, from_values_and_scales
from vllm_kvpool.layout.pages import LayerPages, SlabMove
from vllm_kvpool.staging.copy_torch import TorchCopier

BLOCKS, HEADS, TOKENS = 5, 3, 32
DIM, ELEM = 128, 2  # of K and of V
CPU = torch.device("cpu")

# The address in a block of a byte of a row: (head, token, byte) -> offset.
Where = Callable[[int, int, int], int]


@dataclass(frozen=True)
class Case:
    """`shape` and `strides` of one layer, in bytes, and where each byte of a row lies."""

    make: Callable[[torch.Tensor], LayerPages]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    row_bytes: int
    where: Where
    heads: int = HEADS


def planes(pack: int) -> Case:
    half, content = DIM * ELEM, HEADS * DIM * ELEM

    def where(head: int, token: int, byte: int) -> int:
        is_value, at = divmod(byte, half)
        plane = is_value * TOKENS * content
        if not pack:  # B12X: [N, H, D]
            return plane + token * content + head * half + at
        elem, rest = divmod(at, ELEM)
        if is_value:  # [H, D, N]
            return plane + ((head * DIM + elem) * TOKENS + token) * ELEM + rest
        x = pack // ELEM  # [H, D / x, N, x]
        place = ((head * (DIM // x) + elem // x) * TOKENS + token) * x + elem % x
        return plane + place * ELEM + rest

    def make(pages: torch.Tensor) -> LayerPages:
        return from_planes(pages.view(torch.bfloat16), HEADS, pack_bytes=pack)

    shape = (BLOCKS, 2, TOKENS, content)
    return Case(make, shape, (2 * TOKENS * content, TOKENS * content, content, 1), 2 * half, where)


def nvfp4(*, swizzled: bool = False, by_token: bool = False) -> Case:
    data, scales = DIM // 2, DIM // 16
    content = data + scales

    def place(head: int, token: int, nbytes: int) -> int:
        return (token * HEADS + head if by_token else head * TOKENS + token) * nbytes

    def where(head: int, token: int, byte: int) -> int:
        is_value, at = divmod(byte, content)
        side = is_value * HEADS * TOKENS * content
        if at < data:
            return side + place(head, token, data) + at
        scale = at - data
        if is_value and swizzled:
            # As vLLM's `swizzle_scale_offset`.
            group = scales // 4
            other = token // 4 * 4 + scale // group
            scale = scale % group * 4 + token % 4
            token = other
        return side + HEADS * TOKENS * data + place(head, token, scales) + scale

    shape = (BLOCKS, 2 * HEADS, TOKENS, content)
    inner = (content, 2 * HEADS * content) if by_token else (TOKENS * content, content)
    return Case(
        lambda pages: from_nvfp4(pages, HEADS, swizzled=swizzled),
        shape,
        (2 * HEADS * TOKENS * content, *inner, 1),
        2 * content,
        where,
    )


def indexer(*, shuffled: bool = False) -> Case:
    values, scales = DIM, 4

    def where(head: int, token: int, byte: int) -> int:
        if byte >= values:
            return TOKENS * values + token * scales + byte - values
        if shuffled:  # [N / 16, D / 16, 16, 16]
            tile, inner = token // 16 * 16 * values, token % 16 * 16
            return tile + byte // 16 * 256 + inner + byte % 16
        return token * values + byte

    row = values + scales
    return Case(
        lambda pages: from_values_and_scales(pages, scales, shuffled=shuffled),
        (BLOCKS, 1, TOKENS, row),
        (TOKENS * row, TOKENS * row, row, 1),
        row,
        where,
        heads=1,
    )


CASES = {
    "B12X": planes(0),
    "ROCm": planes(16),
    "NVFP4": nvfp4(),
    "NVFP4 by token": nvfp4(by_token=True),
    "NVFP4 swizzled": nvfp4(swizzled=True),
    "indexer": indexer(),
    "indexer shuffled": indexer(shuffled=True),
}


def block_of(case: Case, rows_htr: np.ndarray) -> np.ndarray:
    """Return a block's bytes; assert that each byte has its own place."""
    block = np.zeros(rows_htr.size, np.uint8)
    places = [case.where(*index) for index in np.ndindex(rows_htr.shape)]
    assert sorted(places) == list(range(rows_htr.size))
    block[places] = rows_htr.reshape(-1)
    return block


@pytest.mark.parametrize("clip", [(0, 2 * TOKENS), (3, 2 * TOKENS - 1), (17, 22)])
@pytest.mark.parametrize("name", CASES)
def test_rows_are_read_and_written_where_kernels_have_them(
    name: str, clip: tuple[int, int]
) -> None:
    case, (start, stop) = CASES[name], clip
    generator = np.random.default_rng(1)
    rows = generator.integers(0, 256, (case.heads, 2 * TOKENS, case.row_bytes), np.uint8)
    written, wanted = np.zeros((2, BLOCKS, case.heads * TOKENS * case.row_bytes), np.uint8)
    ids, clipped = (3, 1), np.zeros_like(rows)
    clipped[:, start:stop] = rows[:, start:stop]
    for i, block in enumerate(ids):
        of_block = slice(i * TOKENS, (i + 1) * TOKENS)
        written[block] = block_of(case, rows[:, of_block])
        wanted[block] = block_of(case, clipped[:, of_block])

    def move(slot: np.ndarray) -> SlabMove:
        place = 0, 1, 0, case.heads
        return cell_move(slot.ctypes.data, place, ids, chunk_tokens=2 * TOKENS, clip=clip)

    memory = torch.from_numpy(written)
    copier = TorchCopier([case.make(memory.as_strided(case.shape, case.strides))], CPU)
    slot = np.zeros_like(rows)
    copier.gather([move(slot)])
    assert np.array_equal(slot, clipped)
    memory.zero_()
    copier.scatter([move(rows)])
    assert np.array_equal(memory.numpy(), wanted)


@pytest.mark.parametrize(
    "make",
    [
        lambda: from_planes(torch.zeros(4, 3, 8, 64), 2),
        lambda: from_planes(torch.zeros(4, 2, 8, 64), 3),
        lambda: from_nvfp4(torch.zeros(4, 4, 8, 72, dtype=torch.uint8), 3, swizzled=False),
        lambda: from_nvfp4(torch.zeros(4, 4, 6, 72, dtype=torch.uint8), 2, swizzled=True),
        lambda: from_values_and_scales(torch.zeros(4, 2, 16, 132, dtype=torch.uint8), 4),
        lambda: from_values_and_scales(
            torch.zeros(4, 1, 24, 132, dtype=torch.uint8), 4, shuffled=True
        ),
    ],
)
def test_other_shapes_are_refused(make: Callable[[], LayerPages]) -> None:
    with pytest.raises(ConfigError, match=r"choose another|set --block-size"):
        make()
