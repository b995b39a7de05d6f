"""Both copiers against the oracle of `page_bench.py`."""

import random
import threading
from collections.abc import Callable, Sequence
from typing import Any, overload

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.staging.page_bench import (
    CHUNK,
    CPU,
    CPU_FORMS,
    DTYPES,
    FORMATS,
    POISON,
    SLOT_POISON,
    Cell,
    MakeCopier,
    Pages,
    block_table,
    cells,
    check_both_ways,
    check_gather,
    check_scatter,
    random_rows,
    single_moves,
    slab_moves,
)
from tests.support.moves import slab
from tests.support.npu import FakeNpu, FakeStream
from vllm_kvpool.layout.pages import LayerPages, SlabMove
from vllm_kvpool.staging.copier import Copier
from vllm_kvpool.staging.copy_cpu import CpuCopier
from vllm_kvpool.staging.copy_torch import TorchCopier
from vllm_kvpool.staging.devices import NpuDevice


def host_torch_copier(layers: list[LayerPages]) -> Copier:
    return TorchCopier(layers, CPU)


def device_torch_copier(layers: list[LayerPages]) -> Copier:
    """Return a copier that moves cells together, through a buffer on a device."""
    return TorchCopier(layers, stand_in(FakeNpu()))


def stand_in(npu: FakeNpu) -> NpuDevice:
    npu.set_device(CPU)
    return NpuDevice(CPU, npu, npu.pinned, lambda pages: 2)


COPIERS = (CpuCopier, host_torch_copier)
ALL_COPIERS = (*COPIERS, device_torch_copier)


def check_copiers(pages: Pages, chunk_start: int = CHUNK, **cell: int | tuple[int, int]) -> None:
    for make in COPIERS:
        check_both_ways(pages, make, chunk_start, **cell)


@pytest.mark.parametrize(
    ("block", "blocks_per_id"), [(16, 1), (32, 2), (64, 1), (96, 1), (128, 1), (16, 8)]
)
@pytest.mark.parametrize("page_format", FORMATS)
def test_every_format_and_block_size(page_format: str, block: int, blocks_per_id: int) -> None:
    num_ids = 2 * -(-2 * CHUNK // (block * blocks_per_id))
    check_copiers(Pages(page_format, block=block, blocks_per_id=blocks_per_id, num_ids=num_ids))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("page_format", [f for f in FORMATS if f != "planes"])
def test_every_dtype_with_k_and_v_of_different_size(page_format: str, dtype: torch.dtype) -> None:
    check_copiers(Pages(page_format, dtype, key_dim=24, value_dim=40, block=32, num_ids=20))


@pytest.mark.parametrize("block", [16, 128])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int8])
def test_transposed_keys_of_whole_lines(dtype: torch.dtype, block: int) -> None:
    pages = Pages("cpu", dtype, key_dim=128, value_dim=128, block=block, num_heads=1, num_layers=1)
    check_copiers(pages)
    check_copiers(pages, clip=(256 + block, 300 + block))


@pytest.mark.parametrize("key_dim", [1, 3, 64, 80])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int8])
def test_transposed_keys_of_ragged_sizes(dtype: torch.dtype, key_dim: int) -> None:
    pages = Pages("cpu", dtype, key_dim=key_dim, value_dim=5, block=48, num_ids=12, num_heads=1)
    check_copiers(pages, clip=(257, 510))


@pytest.mark.parametrize("clip", [(256, 257), (300, 301), (290, 303), (271, 500), (256, 256)])
@pytest.mark.parametrize("page_format", ["LBHNC", "LBNHC", "cpu", "pair"])
def test_a_clip_moves_only_its_tokens(page_format: str, clip: tuple[int, int]) -> None:
    for block, blocks_per_id, num_ids in ((16, 1, 40), (96, 1, 8), (32, 3, 8)):
        pages = Pages(page_format, block=block, blocks_per_id=blocks_per_id, num_ids=num_ids)
        check_copiers(pages, clip=clip)


@pytest.mark.parametrize("clip", [(256, 512), (256, 257), (290, 303), (271, 500)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("form", CPU_FORMS)
def test_tokens_in_tiles(form: str, dtype: torch.dtype, clip: tuple[int, int]) -> None:
    for block, blocks_per_id, dim, num_ids in ((32, 1, 32, 20), (96, 2, 80, 5), (64, 1, 128, 10)):
        sizes = {"block": block, "blocks_per_id": blocks_per_id, "num_ids": num_ids}
        pages = Pages(form, dtype, key_dim=dim, value_dim=dim, **sizes)
        check_copiers(pages, clip=clip)


def test_an_opaque_latent_of_656_bytes() -> None:
    check_copiers(Pages("LBHNC", torch.int8, num_heads=1, key_dim=656, value_dim=0, num_ids=33))


@pytest.mark.parametrize("make", COPIERS)
def test_writer_and_reader_of_any_two_formats(make: MakeCopier) -> None:
    blocks = ((16, 1, 40), (96, 1, 8), (32, 4, 5))
    readers = []
    for i, name in enumerate(FORMATS):
        block, blocks_per_id, num_ids = blocks[i % 3]
        readers.append(Pages(name, block=block, blocks_per_id=blocks_per_id, num_ids=num_ids))
    for writer_format in FORMATS:
        writer = Pages(writer_format, block=32, num_ids=20)
        for reader in readers:
            reader.poison()
            span = {"clip": (CHUNK, 2 * CHUNK), "heads": (0, 2), "layers": (0, 2)}
            cell = Cell(writer, block_table(writer, 2 * CHUNK), CHUNK, **span)
            num_tokens = len(cell.ids) * writer.id_tokens
            rows = random_rows(writer, num_tokens)
            written = writer.read()
            written[writer.indices(cell.ids, 0, num_tokens)] = rows
            writer.write(written)
            make(writer.layers).gather([cell.move()])
            read = Cell(reader, block_table(reader, 2 * CHUNK), CHUNK, **span)
            read.payload[:] = cell.payload
            make(reader.layers).scatter([read.move()])
            got = reader.read()[reader.indices(read.ids, CHUNK, 2 * CHUNK)]
            np.testing.assert_array_equal(got, rows[:, :, CHUNK : 2 * CHUNK])


@pytest.mark.parametrize("moves_of", [single_moves, slab_moves])
@pytest.mark.parametrize("make", ALL_COPIERS)
@pytest.mark.parametrize("page_format", ["LBNHC", "LBHNC", "cpu"])
def test_many_moves_in_one_call(
    page_format: str, make: MakeCopier, moves_of: Callable[[Sequence[Cell]], list[SlabMove]]
) -> None:
    """The cells cover each head, span and chunk, so that only some of them form groups."""
    pages = Pages(page_format, num_layers=4, num_heads=3)
    ids = block_table(pages, 2 * CHUNK)
    cells = [
        Cell(pages, ids, start, (start + start // 16, start + CHUNK), (head, head + 1), span)
        for start in (0, CHUNK)
        for span in ((0, 3), (3, 4))
        for head in range(3)
    ]
    random.Random(5).shuffle(cells)
    rows = random_rows(pages, 2 * CHUNK)
    written = pages.read()
    written[pages.indices(ids, 0, 2 * CHUNK)] = rows
    pages.write(written)
    copier = make(pages.layers)
    copier.gather(moves_of(cells))
    for cell in cells:
        np.testing.assert_array_equal(cell.clipped(cell.payload), cell.part_of(rows))
    pages.poison()
    copier.scatter(moves_of(cells))
    skipped = pages.indices(ids, CHUNK, CHUNK + CHUNK // 16)
    written[skipped] = POISON
    np.testing.assert_array_equal(pages.read(), written)


@given(st.data())
def test_any_cells_in_one_call(data: st.DataObject) -> None:
    """A call with many cells moves the same bytes as a call for each cell, in any combination."""
    pages = Pages(
        data.draw(st.sampled_from(("LBNHC", "LBHNC", "cpu", "pair"))),
        num_layers=3,
        num_heads=4,
        block=data.draw(st.sampled_from((8, 16, 48))),
        blocks_per_id=data.draw(st.integers(1, 2)),
        num_ids=30,
    )
    chunk = 32
    ids = block_table(pages, 5 * chunk)

    def cell(number: int, head: int, last_head: int, layer: int, clip: tuple[int, int]) -> Cell:
        start = number * chunk
        tokens = (start + min(clip), start + max(clip) + 1)
        heads, span = (head, max(head, last_head) + 1), (layer, 3)
        return Cell(pages, ids, start, tokens, heads, span, chunk_tokens=chunk)

    head, layer = st.integers(0, 3), st.integers(0, 2)
    token = st.integers(0, chunk - 1)
    clips = st.just((0, chunk - 1)) | st.tuples(token, token)
    drawn = st.builds(cell, st.integers(0, 4), head, head, layer, clips)
    chosen = data.draw(st.lists(drawn, min_size=1, max_size=10))
    pages.write(np.random.default_rng(0).integers(0, 256, len(pages.memory), dtype=np.uint8))
    before = pages.read()
    make = data.draw(st.sampled_from((device_torch_copier, CpuCopier)))
    moves = data.draw(st.sampled_from((single_moves, slab_moves)))(chosen)
    make(pages.layers).gather(moves)
    gathered = [each.slot.copy() for each in chosen]
    for each, slot in zip(chosen, gathered, strict=True):
        each.slot[:] = SLOT_POISON
        CpuCopier(pages.layers).gather([each.move()])
        np.testing.assert_array_equal(slot, each.slot)
    pages.poison()
    make(pages.layers).scatter(moves)
    scattered = pages.read()
    pages.poison()
    for each in chosen:
        CpuCopier(pages.layers).scatter([each.move()])
    np.testing.assert_array_equal(scattered, pages.read())
    moved = scattered != POISON
    np.testing.assert_array_equal(scattered[moved], before[moved])


@pytest.mark.parametrize("is_gather", [True, False], ids=["gather", "scatter"])
def test_cells_of_the_same_layers_go_together(
    monkeypatch: pytest.MonkeyPatch, is_gather: bool
) -> None:
    """A device gets at most three operations per layer, and one copy per cell."""
    npu = FakeNpu()
    layers, heads, chunks = 4, 8, 4
    pages = Pages("LBNHC", num_layers=layers, num_heads=heads, num_ids=chunks * CHUNK // 16)
    copier = TorchCopier(pages.layers, stand_in(npu))
    ids = block_table(pages, chunks * CHUNK)
    cells = [
        Cell(pages, ids, start, (start, start + CHUNK), (head, head + 1), (0, layers))
        for start in range(0, chunks * CHUNK, CHUNK)
        for head in range(heads)
    ]
    moves = slab_moves(cells)
    given_to_device = []
    give = FakeStream.give
    monkeypatch.setattr(
        FakeStream, "give", lambda self, work: (given_to_device.append(work), give(self, work))
    )
    (copier.gather if is_gather else copier.scatter)(moves)
    assert len(given_to_device) <= len(cells) + 3 * layers


class CountingTable(Sequence[int]):
    """A block table that counts how many of its entries are read."""

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids = ids
        self.reads = 0

    def __len__(self) -> int:
        return len(self._ids)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        self.reads += len(self._ids[index]) if isinstance(index, slice) else 1
        return self._ids[index]


@pytest.mark.parametrize("make", ALL_COPIERS)
def test_a_move_reads_its_own_blocks_of_a_table_however_long(make: MakeCopier) -> None:
    pages = Pages(block=16, num_ids=40)
    ids = block_table(pages, 2 * CHUNK)
    reads = []
    for blocks_behind in (0, 8192):
        table = CountingTable([*ids, *[0] * blocks_behind])
        cell = Cell(pages, ids, CHUNK, (CHUNK, 2 * CHUNK), (0, 2), (0, 2))
        make(pages.layers).gather([cell.move()._replace(block_ids=table)])
        reads.append(table.reads)
    assert reads[0] == reads[1] > 0


@given(cells())
def test_any_geometry(cell: Cell) -> None:
    for make in ALL_COPIERS:
        cell.slot[:] = SLOT_POISON
        check_gather(cell, make)
        cell.slot[:] = SLOT_POISON
        check_scatter(cell, make)


def test_a_move_outside_the_pages_trips_an_assertion() -> None:
    pages = Pages()
    ids = block_table(pages, CHUNK)
    inside = {"clip": (0, CHUNK), "heads": (0, 2), "layers": (0, 2)}
    for wrong in ({"heads": (1, 3)}, {"layers": (1, 3)}, {"clip": (0, CHUNK + 1)}):
        outside = Cell(pages, ids, 0, **{**inside, **wrong})
        with pytest.raises(AssertionError):
            CpuCopier(pages.layers).gather([outside.move()])
    with pytest.raises(AssertionError):
        CpuCopier(pages.layers).gather([Cell(pages, ids[:-1], 0, **inside).move()])


@pytest.mark.parametrize("make", ALL_COPIERS)
@pytest.mark.parametrize(
    "wrong",
    [
        {"block_ids": (*range(15), -1)},
        {"block_ids": (*range(15), 40)},
        {"block_ids": range(15)},
        {"table_start": 1},
        {"chunk_start": 1},
        {"chunk_tokens": CHUNK - 1},
        {"token_stop": -1},
        {"addresses": np.zeros(1, np.int64)},
        {"places": np.array([(0, 2, 0, 2), (0, 2, 1, 3)])},
        {"places": np.array([(0, 2, 0, 2), (1, 3, 0, 2)])},
        {"places": np.array([(0, 2, 0, 2), (0, 2, -1, 2)])},
        {"places": np.array([(0, 2, 0, 2), (1, 0, 0, 2)])},
    ],
    ids=str,
)
def test_a_slab_that_is_wrong_moves_nothing(make: MakeCopier, wrong: dict[str, Any]) -> None:
    """The other moves of the call do not happen either."""
    pages = Pages()
    cells = [
        Cell(pages, list(range(16)), 0, (0, CHUNK), (head, head + 1), (0, 2)) for head in (0, 1)
    ]
    [move] = slab_moves(cells)
    with pytest.raises(AssertionError):
        make(pages.layers).gather([move, move._replace(**wrong)])
    for cell in cells:
        assert (cell.slot == SLOT_POISON).all()


def test_a_slab_whose_layers_have_blocks_of_two_sizes_trips_an_assertion() -> None:
    layers = [Pages(num_layers=1, block=block).layers[0] for block in (16, 32)]
    move = slab([0, 0], [(0, 1, 0, 1), (1, 2, 0, 1)], (0,), 0, 0, 16, 0, 16)
    with pytest.raises(AssertionError, match="different sizes"):
        CpuCopier(layers).gather([move])


def test_copiers_run_on_several_threads_at_once() -> None:
    def work(seed: int) -> None:
        for _ in range(5):
            check_copiers(Pages("cpu" if seed % 2 else "LBNHC"))
        finished.append(seed)

    finished: list[int] = []
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(finished) == [0, 1, 2, 3]
