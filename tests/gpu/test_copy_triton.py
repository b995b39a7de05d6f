"""The Triton copier against the oracle of `page_bench.py` and against the torch copier on the host.

In the interpreter with small shapes; on a GPU the same tests, unchanged.
"""

import random

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.gpu.conftest import Place
from tests.staging.page_bench import (
    CPU,
    DTYPES,
    FORMATS,
    LAYOUTS,
    POISON,
    SLOT_POISON,
    Cell,
    Pages,
    aligned_bytes,
    block_table,
    cells,
    check_both_ways,
    check_gather,
    check_scatter,
    random_rows,
    single_moves,
    slab_moves,
)
from vllm_kvpool.staging.copy_torch import TorchCopier

CHUNK = 48
SMALL_BUFFER = 4096  # so that a call takes many rounds
OF_CHUNK = {"chunk_start": CHUNK, "chunk_tokens": CHUNK}


def whole_and_clipped(place: Place, pages: Pages, **cell: int | tuple[int, int]) -> None:
    check_both_ways(pages, place.copier, **OF_CHUNK, **cell)
    clip = (CHUNK + 5, 2 * CHUNK - 10)
    check_both_ways(pages, place.copier, **OF_CHUNK, clip=clip, **cell)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.uint8], ids=str)
@pytest.mark.parametrize("page_format", FORMATS)
def test_every_format_and_dtype(place: Place, page_format: str, dtype: torch.dtype) -> None:
    wide = 16 if page_format == "planes" else 24
    pages = Pages(page_format, dtype, num_ids=8, key_dim=16, value_dim=wide, device=place.device)
    check_both_ways(pages, place.copier, **OF_CHUNK)


@pytest.mark.parametrize(
    ("block", "blocks_per_id"), [(16, 1), (32, 1), (64, 1), (96, 1), (16, 2), (8, 4), (1, 3)]
)
@pytest.mark.parametrize("page_format", ["LBNHC", "BHLNC", "cpu", "pair"])
def test_every_block_size(place: Place, page_format: str, block: int, blocks_per_id: int) -> None:
    num_ids = 3 + -(-2 * CHUNK // (block * blocks_per_id))
    sizes = {"block": block, "blocks_per_id": blocks_per_id, "num_ids": num_ids}
    whole_and_clipped(place, Pages(page_format, device=place.device, **sizes))


@pytest.mark.parametrize("padded", ["B", "H", "N", "C"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_padded_pages(place: Place, layout: str, padded: str) -> None:
    pages = Pages(layout, torch.bfloat16, padded=padded, num_ids=8, device=place.device)
    check_both_ways(pages, place.copier, **OF_CHUNK)


@pytest.mark.parametrize("clip", [(48, 49), (60, 61), (63, 65), (50, 90), (64, 80), (70, 70)])
@pytest.mark.parametrize("page_format", ["LBHNC", "cpu", "pair"])
def test_a_clip_moves_only_its_tokens(
    place: Place, page_format: str, clip: tuple[int, int]
) -> None:
    pages = Pages(page_format, num_ids=8, device=place.device)
    check_both_ways(pages, place.copier, **OF_CHUNK, clip=clip)


@pytest.mark.parametrize("page_format", ["LBHNC", "LBNHC", "BHLNC", "cpu", "pair"])
def test_a_drafters_cell_begins_a_token_before_its_chunk(place: Place, page_format: str) -> None:
    """EAGLE's and MTP's rows are shifted by one. The first cell has a row before the prompt, which
    no page has."""
    pages = Pages(page_format, num_ids=8, device=place.device)
    check_both_ways(pages, place.copier, chunk_start=-1, chunk_tokens=CHUNK, clip=(0, CHUNK - 1))
    check_both_ways(pages, place.copier, chunk_start=CHUNK - 1, chunk_tokens=CHUNK)
    clip = (CHUNK - 1, CHUNK + 3)
    check_both_ways(pages, place.copier, chunk_start=CHUNK - 1, chunk_tokens=CHUNK, clip=clip)


@pytest.mark.parametrize("page_format", ["LBHNC", "cpu", "pair"])
def test_zeros_of_one_buffer_replace_what_pages_held_for_several_cells(
    place: Place, page_format: str
) -> None:
    """So rows of a drafter are cleared whose cells are lost. The pages held NaN."""
    pages = Pages(page_format, num_heads=2, num_ids=8, device=place.device)
    ids = block_table(pages, 2 * CHUNK)
    lost = [
        Cell(pages, ids, CHUNK - 1, (CHUNK - 1, 2 * CHUNK - 1), (head, head + 1), (0, 2), CHUNK)
        for head in (0, 1)
    ]
    zeros = aligned_bytes(lost[0].payload.nbytes)
    zeros[:] = 0
    moves = [
        move._replace(addresses=np.full(len(move.addresses), zeros.ctypes.data, np.int64))
        for move in slab_moves(lost)
    ]
    pages.poison()
    copier = place.copier(pages.layers)
    place.wait_for_model()
    copier.scatter(moves)
    expected = np.full(len(pages.memory), POISON, np.uint8)
    expected[pages.indices(ids, CHUNK - 1, 2 * CHUNK - 1)] = 0
    np.testing.assert_array_equal(pages.read(), expected)


@pytest.mark.parametrize("page_format", ["LBHNC", "LBNHC", "BHLNC", "cpu", "pair"])
def test_a_subset_of_heads_and_layers(place: Place, page_format: str) -> None:
    pages = Pages(page_format, num_layers=4, num_heads=4, num_ids=8, device=place.device)
    whole_and_clipped(place, pages, heads=(1, 3), layers=(1, 3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("page_format", ["cpu amx", "cpu bfmmla"])
def test_tokens_in_tiles(place: Place, page_format: str, dtype: torch.dtype) -> None:
    """Tokens lie in tiles in NVFP4 pages of trtllm's kernels and in pages of indexers on AMD."""
    sizes = {"key_dim": 32, "value_dim": 32, "block": 32, "num_ids": 6}
    whole_and_clipped(place, Pages(page_format, dtype, device=place.device, **sizes))


@pytest.mark.parametrize("misaligned", [1, 2, 4, 8])
@pytest.mark.parametrize("page_format", ["LBHNC", "cpu", "pair"])
def test_addresses_need_no_alignment(place: Place, page_format: str, misaligned: int) -> None:
    sizes = {"key_dim": 24, "value_dim": 24, "num_ids": 8, "misaligned": misaligned}
    for dtype in (torch.int8, torch.bfloat16):
        pages = Pages(page_format, dtype, device=place.device, **sizes)
        check_both_ways(pages, place.copier, **OF_CHUNK, misaligned=misaligned)


@pytest.mark.parametrize("latent_bytes", [656, 1152])
def test_an_opaque_latent(place: Place, latent_bytes: int) -> None:
    sizes = {"num_heads": 1, "key_dim": latent_bytes, "value_dim": 0, "num_ids": 8}
    whole_and_clipped(place, Pages("LBHNC", torch.int8, device=place.device, **sizes))


@pytest.mark.parametrize("buffer_bytes", [SMALL_BUFFER, 3 * SMALL_BUFFER, 1 << 20])
@pytest.mark.parametrize("page_format", ["LBNHC", "cpu"])
def test_many_moves_in_one_call(place: Place, page_format: str, buffer_bytes: int) -> None:
    """The moves cover each head, span and chunk. Some are clipped, some exceed a buffer."""
    pages = Pages(page_format, num_layers=4, num_heads=3, num_ids=8, device=place.device)
    ids = block_table(pages, 2 * CHUNK)
    moved = [
        Cell(pages, ids, start, (start + start // 16, start + CHUNK), (head, head + 1), span, CHUNK)
        for start in (0, CHUNK)
        for span in ((0, 3), (3, 4))
        for head in range(3)
    ]
    random.Random(5).shuffle(moved)
    rows = random_rows(pages, 2 * CHUNK)
    written = pages.read()
    written[pages.indices(ids, 0, 2 * CHUNK)] = rows
    pages.write(written)
    copier = place.copier(pages.layers, buffer_bytes=buffer_bytes)
    for moves_of in (single_moves, slab_moves):  # buffers are used again by the next call
        for cell in moved:
            cell.slot[:] = SLOT_POISON
        place.wait_for_model()
        copier.gather(moves_of(moved))
        for cell in moved:
            got, cell.slot[:] = cell.slot.copy(), SLOT_POISON
            cell.clipped(cell.payload)[:] = cell.part_of(rows)
            np.testing.assert_array_equal(got, cell.slot)
        pages.poison()
        place.wait_for_model()
        copier.scatter(moves_of(moved))
        expected = written.copy()
        expected[pages.indices(ids, CHUNK, CHUNK + CHUNK // 16)] = POISON
        np.testing.assert_array_equal(pages.read(), expected)
        pages.write(written)


def test_layers_of_several_formats_share_a_copier(place: Place) -> None:
    """Models with full and sliding attention mix page formats.

    A move covers layers of one format.
    """
    kinds = [
        Pages("LBNHC", torch.bfloat16, key_dim=16, value_dim=16, num_ids=8, device=place.device),
        Pages("pair", torch.int8, key_dim=24, value_dim=8, num_ids=8, device=place.device),
        Pages("cpu", torch.float32, key_dim=5, value_dim=3, num_ids=8, device=place.device),
    ]
    layers = [layer for pages in kinds for layer in pages.layers]
    for index, pages in enumerate(kinds):
        ids = block_table(pages, CHUNK)
        rows = random_rows(pages, CHUNK)
        image = pages.read()
        image[pages.indices(ids, 0, CHUNK)] = rows
        pages.write(image)
        first = index * pages.num_layers
        cell = Cell(pages, ids, 0, (0, CHUNK), (0, 2), (0, pages.num_layers), CHUNK)
        move = cell.move(first_layer=first)
        copier = place.copier(layers)
        copier.gather([move])
        np.testing.assert_array_equal(cell.payload, cell.part_of(rows))
        pages.poison()
        place.wait_for_model()
        copier.scatter([move])
        np.testing.assert_array_equal(pages.read()[pages.indices(ids, 0, CHUNK)], rows)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_geometry(place: Place, data: st.DataObject) -> None:
    cell = data.draw(cells(max_tokens=40, device=place.device))
    for check in (check_gather, check_scatter):
        cell.slot[:] = SLOT_POISON
        check(cell, lambda layers: place.copier(layers, buffer_bytes=SMALL_BUFFER))


@pytest.mark.parametrize("page_format", FORMATS)
def test_the_torch_copier_on_the_host_does_the_same(place: Place, page_format: str) -> None:
    here = Pages(page_format, torch.bfloat16, num_ids=8, device=place.device)
    there = Pages(page_format, torch.bfloat16, num_ids=8)
    image = np.random.default_rng().integers(0, 256, len(here.memory), dtype=np.uint8)
    here.write(image)
    there.write(image)
    ids = block_table(here, CHUNK)
    mine, theirs = (
        Cell(pages, ids, 0, (3, CHUNK), (0, 2), (0, 2), CHUNK) for pages in (here, there)
    )
    place.copier(here.layers).gather([mine.move()])
    TorchCopier(there.layers, CPU).gather([theirs.move()])
    np.testing.assert_array_equal(mine.slot, theirs.slot)
    here.poison()
    there.poison()
    place.copier(here.layers).scatter([mine.move()])
    TorchCopier(there.layers, CPU).scatter([theirs.move()])
    np.testing.assert_array_equal(here.read(), there.read())


def test_a_move_outside_the_pages_moves_nothing(place: Place) -> None:
    pages = Pages(num_ids=8, device=place.device)
    ids = block_table(pages, CHUNK)
    good = Cell(pages, ids, 0, (0, CHUNK), (0, 2), (0, 2), CHUNK)
    for wrong in (
        Cell(pages, ids, 0, (0, CHUNK), (1, 3), (0, 2), CHUNK),
        Cell(pages, ids, 0, (0, CHUNK), (0, 2), (1, 3), CHUNK),
        Cell(pages, [*ids[:-1], 8], 0, (0, CHUNK), (0, 2), (0, 2), CHUNK),
        Cell(pages, ids[:-1], 0, (0, CHUNK), (0, 2), (0, 2), CHUNK),
    ):
        with pytest.raises(AssertionError):
            place.copier(pages.layers).gather([good.move(), wrong.move()])
        assert (good.slot == SLOT_POISON).all()


def test_nothing_to_move(place: Place) -> None:
    place.copier(Pages(num_ids=8, device=place.device).layers).gather([])
