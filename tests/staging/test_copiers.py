"""Both copiers against an oracle that looks every byte up in an index map of the pages."""

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_kvpool.layout.formats import from_cpu_attention, from_pair, from_token_content
from vllm_kvpool.layout.pages import CellMove, LayerPages
from vllm_kvpool.staging.copier import Copier
from vllm_kvpool.staging.copy_cpu import LINE_BYTES, CpuCopier
from vllm_kvpool.staging.copy_torch import TorchCopier

# Legend: L layers, B kernel blocks, H heads, N tokens per kernel block, D, E key and value row,
# C = D + E, R bytes of a row.
LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
FORMATS = (*LAYOUTS, "cpu", "pair", "planes")
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int8)
POISON, SLOT_POISON = 0xA5, 0x5A
CHUNK = 256


def host_torch_copier(layers: list[LayerPages]) -> Copier:
    return TorchCopier(layers, torch.device("cpu"))


COPIERS = (CpuCopier, host_torch_copier)


def aligned_bytes(nbytes: int) -> np.ndarray:
    """Poisoned memory at a line's start, so that only `misaligned` decides about alignment."""
    memory = np.full(nbytes + LINE_BYTES, POISON, np.uint8)
    start = -memory.ctypes.data % LINE_BYTES
    return memory[start : start + nbytes]


@dataclass
class Pages:
    """One rank's poisoned pages of a format; `where_lbhnr` maps each row byte into `memory`."""

    format: str = "LBHNC"
    dtype: torch.dtype = torch.float16
    num_layers: int = 2
    num_heads: int = 2
    block: int = 16
    blocks_per_id: int = 1
    num_ids: int = 40
    key_dim: int = 8
    value_dim: int = 8
    padded: str = ""
    misaligned: int = 0  # elements between the start of the memory and the first page
    memory: np.ndarray = field(init=False)
    where_lbhnr: np.ndarray = field(init=False)
    layers: list[LayerPages] = field(init=False)

    def __post_init__(self) -> None:
        build = {"cpu": self._cpu, "pair": self._pair, "planes": self._planes}
        elems = torch.arange(self._num_elems() + self.misaligned)
        self.memory = aligned_bytes(len(elems) * self.dtype.itemsize)
        tensors = torch.from_numpy(self.memory).view(self.dtype)
        where, _ = build.get(self.format, self._token_content)(elems[self.misaligned :])
        _, self.layers = build.get(self.format, self._token_content)(tensors[self.misaligned :])
        size = self.dtype.itemsize
        expanded = where.unsqueeze(-1) * size + torch.arange(size)
        self.where_lbhnr = expanded.flatten(-2).numpy()

    @property
    def id_tokens(self) -> int:
        return self.block * self.blocks_per_id

    @property
    def row_bytes(self) -> int:
        return (self.key_dim + self.value_dim) * self.dtype.itemsize

    def _sizes(self) -> dict[str, int]:
        blocks = self.num_ids * self.blocks_per_id
        content = self.key_dim + self.value_dim
        return {
            "L": self.num_layers,
            "B": blocks,
            "H": self.num_heads,
            "N": self.block,
            "C": content,
        }

    def _num_elems(self) -> int:
        return int(np.prod([n + (dim == self.padded) for dim, n in self._sizes().items()]))

    # Each builder takes all elements of the memory, or their indices, and cuts them to
    # [L, B, H, N, C]; as layers it means something only for the elements themselves.

    def _token_content(self, flat: torch.Tensor) -> tuple[torch.Tensor, list[LayerPages]]:
        sizes = self._sizes()
        physical = flat.view(*(sizes[dim] + (dim == self.padded) for dim in self.format))
        for axis, dim in enumerate(self.format):
            physical = physical.narrow(axis, 0, sizes[dim])
        lbhnc = physical.permute(*(self.format.index(dim) for dim in "LBHNC"))
        return lbhnc, [from_token_content(x, blocks_per_id=self.blocks_per_id) for x in lbhnc]

    def _cpu(self, flat: torch.Tensor) -> tuple[torch.Tensor, list[LayerPages]]:
        lbhnc = flat.view(*self._sizes().values())
        layers = [
            from_cpu_attention(x, self.key_dim, self.value_dim, blocks_per_id=self.blocks_per_id)
            for x in lbhnc
        ]
        head_blocks = lbhnc.flatten(3)
        k = head_blocks[..., : self.block * self.key_dim].unflatten(3, (self.key_dim, self.block))
        v = head_blocks[..., self.block * self.key_dim :].unflatten(3, (self.block, self.value_dim))
        if flat.dtype == self.dtype:
            return lbhnc, layers
        return torch.cat([k.transpose(3, 4), v], 4), layers

    def _pair(self, flat: torch.Tensor) -> tuple[torch.Tensor, list[LayerPages]]:
        sizes = self._sizes()
        lbnh = [sizes[dim] for dim in "LBNH"]
        cut = int(np.prod(lbnh)) * self.key_dim
        k, v = flat[:cut].view(*lbnh, self.key_dim), flat[cut:].view(*lbnh, self.value_dim)
        return self._joined_planes(k, v)

    def _planes(self, flat: torch.Tensor) -> tuple[torch.Tensor, list[LayerPages]]:
        assert self.key_dim == self.value_dim
        sizes = self._sizes()
        planes = flat.view(sizes["L"], 2, *(sizes[dim] for dim in "BNH"), self.key_dim)
        return self._joined_planes(planes[:, 0], planes[:, 1])

    def _joined_planes(
        self, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, list[LayerPages]]:
        layers = [
            from_pair(x, y, blocks_per_id=self.blocks_per_id) for x, y in zip(k, v, strict=True)
        ]
        if k.dtype == self.dtype:
            return k, layers
        return torch.cat([k, v], 4).transpose(2, 3), layers

    def indices(self, ids: list[int], start: int, stop: int) -> np.ndarray:
        """Where rows `[start, stop)` of a request with this block table lie: [L, H, tokens, R]."""
        tokens = np.arange(start, stop)
        part = tokens % self.id_tokens // self.block
        blocks = np.array(ids)[tokens // self.id_tokens] * self.blocks_per_id + part
        picked = self.where_lbhnr[:, blocks, :, tokens % self.block]  # [tokens, L, H, R]
        return picked.transpose(1, 2, 0, 3)


def random_rows(pages: Pages, num_tokens: int) -> np.ndarray:
    shape = (pages.num_layers, pages.num_heads, num_tokens, pages.row_bytes)
    return np.random.default_rng(7).integers(0, 256, shape, dtype=np.uint8)


def block_table(pages: Pages, num_tokens: int) -> list[int]:
    return random.Random(3).sample(range(pages.num_ids), -(-num_tokens // pages.id_tokens))


@dataclass
class Cell:
    """A move of one chunk, and the slot it goes through, which lies between poisoned guards."""

    pages: Pages
    ids: list[int]  # of the whole request
    chunk_start: int
    clip: tuple[int, int]
    heads: tuple[int, int]
    layers: tuple[int, int]
    chunk_tokens: int = CHUNK
    misaligned: int = 0
    slot: np.ndarray = field(init=False)

    GUARD_BYTES = 2 * LINE_BYTES

    def __post_init__(self) -> None:
        heads, layers = (stop - start for start, stop in (self.heads, self.layers))
        self._shape = (heads, layers, self.chunk_tokens, self.pages.row_bytes)
        self.slot = aligned_bytes(int(np.prod(self._shape)) + 3 * self.GUARD_BYTES)
        self.slot[:] = SLOT_POISON
        self._start = self.GUARD_BYTES + self.misaligned

    @property
    def payload(self) -> np.ndarray:
        return self.slot[self._start :][: int(np.prod(self._shape))].reshape(self._shape)

    def move(self) -> CellMove:
        table_first = self.chunk_start // self.pages.id_tokens
        table_last = -(-(self.chunk_start + self.chunk_tokens) // self.pages.id_tokens)
        return CellMove(
            address=self.slot.ctypes.data + self._start,
            layer_start=self.layers[0],
            layer_stop=self.layers[1],
            head_start=self.heads[0],
            head_stop=self.heads[1],
            block_ids=self.ids[table_first:table_last],
            table_start=table_first * self.pages.id_tokens,
            chunk_start=self.chunk_start,
            chunk_tokens=self.chunk_tokens,
            token_start=self.clip[0],
            token_stop=self.clip[1],
        )

    def part_of(self, rows_lhtr: np.ndarray) -> np.ndarray:
        """The clipped rows of this cell, [heads, layers, tokens, R]."""
        part = rows_lhtr[slice(*self.layers), slice(*self.heads), slice(*self.clip)]
        return part.swapaxes(0, 1)

    def clipped(self, payload: np.ndarray) -> np.ndarray:
        return payload[:, :, self.clip[0] - self.chunk_start : self.clip[1] - self.chunk_start]


def check_gather(cell: Cell, make: Callable[[list[LayerPages]], Copier]) -> None:
    pages, num_tokens = cell.pages, len(cell.ids) * cell.pages.id_tokens
    rows = random_rows(pages, num_tokens)
    pages.memory[pages.indices(cell.ids, 0, num_tokens)] = rows
    before, expected_slot = pages.memory.copy(), cell.slot.copy()
    make(pages.layers).gather([cell.move()])
    got = cell.slot.copy()
    cell.slot[:] = expected_slot
    cell.clipped(cell.payload)[:] = cell.part_of(rows)
    np.testing.assert_array_equal(got, cell.slot)
    np.testing.assert_array_equal(pages.memory, before)


def check_scatter(cell: Cell, make: Callable[[list[LayerPages]], Copier]) -> None:
    pages, num_tokens = cell.pages, len(cell.ids) * cell.pages.id_tokens
    rows = random_rows(pages, num_tokens)
    cell.clipped(cell.payload)[:] = cell.part_of(rows)
    expected = np.full_like(pages.memory, POISON)
    where = pages.indices(cell.ids, *cell.clip)[slice(*cell.layers), slice(*cell.heads)]
    expected[where] = cell.part_of(rows).swapaxes(0, 1)
    slot_before = cell.slot.copy()
    pages.memory[:] = POISON
    make(pages.layers).scatter([cell.move()])
    np.testing.assert_array_equal(pages.memory, expected)
    np.testing.assert_array_equal(cell.slot, slot_before)


def check_both_ways(pages: Pages, chunk_start: int = CHUNK, **cell: int | tuple[int, int]) -> None:
    ids = block_table(pages, chunk_start + CHUNK)
    whole = {
        "clip": (chunk_start, chunk_start + CHUNK),
        "heads": (0, pages.num_heads),
        "layers": (0, pages.num_layers),
    }
    for make in COPIERS:
        for check in (check_gather, check_scatter):
            check(Cell(pages, ids, chunk_start, **{**whole, **cell}), make)


@pytest.mark.parametrize(
    ("block", "blocks_per_id"), [(16, 1), (32, 2), (64, 1), (96, 1), (128, 1), (16, 8)]
)
@pytest.mark.parametrize("page_format", FORMATS)
def test_every_format_and_block_size(page_format: str, block: int, blocks_per_id: int) -> None:
    num_ids = 2 * -(-2 * CHUNK // (block * blocks_per_id))
    check_both_ways(Pages(page_format, block=block, blocks_per_id=blocks_per_id, num_ids=num_ids))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("page_format", [f for f in FORMATS if f != "planes"])
def test_every_dtype_with_k_and_v_of_different_size(page_format: str, dtype: torch.dtype) -> None:
    check_both_ways(Pages(page_format, dtype, key_dim=24, value_dim=40, block=32, num_ids=20))


@pytest.mark.parametrize("padded", ["B", "H", "N", "C"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_padded_pages(layout: str, padded: str) -> None:
    check_both_ways(Pages(layout, padded=padded))


@pytest.mark.parametrize("block", [16, 128])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int8])
def test_transposed_keys_of_whole_lines(dtype: torch.dtype, block: int) -> None:
    pages = Pages("cpu", dtype, key_dim=128, value_dim=128, block=block, num_heads=1, num_layers=1)
    check_both_ways(pages)
    check_both_ways(pages, clip=(256 + block, 300 + block))


@pytest.mark.parametrize("key_dim", [1, 3, 64, 80])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int8])
def test_transposed_keys_of_ragged_sizes(dtype: torch.dtype, key_dim: int) -> None:
    pages = Pages("cpu", dtype, key_dim=key_dim, value_dim=5, block=48, num_ids=12, num_heads=1)
    check_both_ways(pages, clip=(257, 510))


@pytest.mark.parametrize("clip", [(256, 257), (300, 301), (290, 303), (271, 500), (256, 256)])
@pytest.mark.parametrize("page_format", ["LBHNC", "LBNHC", "cpu", "pair"])
def test_a_clip_moves_only_its_tokens(page_format: str, clip: tuple[int, int]) -> None:
    for block, blocks_per_id, num_ids in ((16, 1, 40), (96, 1, 8), (32, 3, 8)):
        pages = Pages(page_format, block=block, blocks_per_id=blocks_per_id, num_ids=num_ids)
        check_both_ways(pages, clip=clip)


@pytest.mark.parametrize("page_format", ["LBHNC", "LBNHC", "BHLNC", "cpu", "pair"])
def test_a_subset_of_heads_and_layers(page_format: str) -> None:
    pages = Pages(page_format, num_layers=4, num_heads=4)
    check_both_ways(pages, heads=(1, 3), layers=(1, 3))


@pytest.mark.parametrize("misaligned", [1, 8, 63])
@pytest.mark.parametrize("page_format", ["LBHNC", "LBNHC", "cpu", "pair"])
def test_addresses_need_no_alignment(page_format: str, misaligned: int) -> None:
    pages = Pages(page_format, torch.bfloat16, key_dim=48, value_dim=48, misaligned=misaligned)
    check_both_ways(pages, misaligned=misaligned)


def test_an_opaque_latent_of_656_bytes() -> None:
    check_both_ways(Pages("LBHNC", torch.int8, num_heads=1, key_dim=656, value_dim=0, num_ids=33))


@pytest.mark.parametrize("make", COPIERS)
def test_writer_and_reader_of_any_two_formats(make: Callable[[list[LayerPages]], Copier]) -> None:
    blocks = ((16, 1, 40), (96, 1, 8), (32, 4, 5))
    for writer_format in FORMATS:
        for i, reader_format in enumerate(FORMATS):
            writer = Pages(writer_format, block=32, num_ids=20)
            block, blocks_per_id, num_ids = blocks[i % 3]
            reader = Pages(reader_format, block=block, blocks_per_id=blocks_per_id, num_ids=num_ids)
            span = {"clip": (CHUNK, 2 * CHUNK), "heads": (0, 2), "layers": (0, 2)}
            cell = Cell(writer, block_table(writer, 2 * CHUNK), CHUNK, **span)
            num_tokens = len(cell.ids) * writer.id_tokens
            rows = random_rows(writer, num_tokens)
            writer.memory[writer.indices(cell.ids, 0, num_tokens)] = rows
            make(writer.layers).gather([cell.move()])
            read = Cell(reader, block_table(reader, 2 * CHUNK), CHUNK, **span)
            read.payload[:] = cell.payload
            make(reader.layers).scatter([read.move()])
            got = reader.memory[reader.indices(read.ids, CHUNK, 2 * CHUNK)]
            np.testing.assert_array_equal(got, rows[:, :, CHUNK : 2 * CHUNK])


@pytest.mark.parametrize("make", COPIERS)
@pytest.mark.parametrize("page_format", ["LBNHC", "LBHNC", "cpu"])
def test_many_moves_in_one_call(
    page_format: str, make: Callable[[list[LayerPages]], Copier]
) -> None:
    """Cells of each head, span and chunk, so that some form groups and some do not."""
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
    pages.memory[pages.indices(ids, 0, 2 * CHUNK)] = rows
    copier = make(pages.layers)
    copier.gather([cell.move() for cell in cells])
    for cell in cells:
        np.testing.assert_array_equal(cell.clipped(cell.payload), cell.part_of(rows))
    written, pages.memory[:] = pages.memory.copy(), POISON
    copier.scatter([cell.move() for cell in cells])
    skipped = pages.indices(ids, CHUNK, CHUNK + CHUNK // 16)
    written[skipped] = POISON
    np.testing.assert_array_equal(pages.memory, written)


@st.composite
def cells(draw: st.DrawFn) -> Cell:
    page_format = draw(st.sampled_from([f for f in FORMATS if f != "planes"]))
    block, blocks_per_id = draw(st.integers(1, 40)), draw(st.integers(1, 4))
    chunk_tokens = draw(st.integers(1, 96))
    chunk_start = chunk_tokens * draw(st.integers(0, 3))
    num_tokens = chunk_start + chunk_tokens
    pages = Pages(
        page_format,
        draw(st.sampled_from((torch.float64, *DTYPES))),
        num_layers=draw(st.integers(1, 3)),
        num_heads=draw(st.integers(1, 3)),
        block=block,
        blocks_per_id=blocks_per_id,
        num_ids=-(-num_tokens // (block * blocks_per_id)) + 3,
        key_dim=draw(st.integers(1, 70)),
        value_dim=draw(st.integers(1, 70)),
        padded=draw(st.sampled_from("BHNC")) if page_format in LAYOUTS else "",
        misaligned=draw(st.integers(0, 5)),
    )

    def half_open(stop: int, start: int = 0) -> tuple[int, int]:
        first = draw(st.integers(start, stop - 1))
        return first, draw(st.integers(first + 1, stop))

    return Cell(
        pages,
        block_table(pages, num_tokens),
        chunk_start,
        clip=half_open(num_tokens, chunk_start),
        heads=half_open(pages.num_heads),
        layers=half_open(pages.num_layers),
        chunk_tokens=chunk_tokens,
        misaligned=draw(st.integers(0, 64)),
    )


@settings(max_examples=100, deadline=None)
@given(cells())
def test_any_geometry(cell: Cell) -> None:
    for make in COPIERS:
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


def test_copiers_run_on_several_threads_at_once() -> None:
    def work(seed: int) -> None:
        for _ in range(5):
            check_both_ways(Pages("cpu" if seed % 2 else "LBNHC"))
        finished.append(seed)

    finished: list[int] = []
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(finished) == [0, 1, 2, 3]
