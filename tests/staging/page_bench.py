"""Pages of every format, cells to move in and out of them, and an oracle for both.

The oracle looks up every byte in an index map of the pages' memory. Pages may lie on a GPU; slots
and all compared bytes lie on the host. The module needs torch, numpy and hypothesis, but neither
vLLM nor numba. Bytes that must not move are poisoned, and compared too.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from hypothesis import strategies as st

from tests.support.moves import cell_move, slab
from vllm_kvpool.layout.page_formats import (
    AMX_FORM,
    BFMMLA_FORM,
    PLAIN_CPU_FORM,
    from_cpu_attention,
    from_pair,
    from_token_content,
)
from vllm_kvpool.layout.pages import LayerPages, SlabMove
from vllm_kvpool.staging.copier import Copier

# Legend: L layers, B kernel blocks, H heads, N tokens per kernel block, D, E key and value row,
# C = D + E, R bytes of a row.
LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
FORMATS = (*LAYOUTS, "cpu", "pair", "planes")
CPU_FORMS = {"cpu": PLAIN_CPU_FORM, "cpu amx": AMX_FORM, "cpu bfmmla": BFMMLA_FORM}
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int8)
POISON, SLOT_POISON = 0xA5, 0x5A
CHUNK = 256
LINE_BYTES = 64

MakeCopier = Callable[[list[LayerPages]], Copier]
CPU = torch.device("cpu")


def aligned_bytes(nbytes: int) -> np.ndarray:
    """Return poisoned memory that starts at a cache line. Then only `misaligned` decides about
    alignment."""
    memory = np.full(nbytes + LINE_BYTES, POISON, np.uint8)
    start = -memory.ctypes.data % LINE_BYTES
    return memory[start : start + nbytes]


@dataclass
class Pages:
    """The poisoned pages of one rank in one format. `where_lbhnr` maps each row byte into
    `memory`."""

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
    device: torch.device = CPU
    memory: torch.Tensor = field(init=False)  # uint8, on the device
    where_lbhnr: np.ndarray = field(init=False)
    layers: list[LayerPages] = field(init=False)

    def __post_init__(self) -> None:
        build = {**dict.fromkeys(CPU_FORMS, self._cpu), "pair": self._pair, "planes": self._planes}
        elems = torch.arange(self._num_elems() + self.misaligned, dtype=torch.int32)
        poisoned = torch.from_numpy(aligned_bytes(len(elems) * self.dtype.itemsize))
        self.memory = poisoned.to(self.device)
        tensors = self.memory.view(self.dtype)
        where, _ = build.get(self.format, self._token_content)(elems[self.misaligned :])
        _, self.layers = build.get(self.format, self._token_content)(tensors[self.misaligned :])
        size = self.dtype.itemsize
        expanded = where.unsqueeze(-1) * size + torch.arange(size, dtype=torch.int32)
        self.where_lbhnr = expanded.flatten(-2).numpy()

    def read(self) -> np.ndarray:
        """Return a copy of all bytes of the memory."""
        return self.memory.cpu().numpy().copy()

    def write(self, image: np.ndarray) -> None:
        """Overwrite all bytes of the memory."""
        self.memory.copy_(torch.from_numpy(image))

    def poison(self) -> None:
        self.memory.fill_(POISON)

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

    # Each builder takes all elements of the memory, or their indices, and shapes them to
    # [L, B, H, N, C]. The returned layers are valid only when it got the elements.

    def _token_content(self, flat: torch.Tensor) -> tuple[torch.Tensor, list[LayerPages]]:
        sizes = self._sizes()
        physical = flat.view(*(sizes[dim] + (dim == self.padded) for dim in self.format))
        for axis, dim in enumerate(self.format):
            physical = physical.narrow(axis, 0, sizes[dim])
        lbhnc = physical.permute(*(self.format.index(dim) for dim in "LBHNC"))
        return lbhnc, [from_token_content(x, blocks_per_id=self.blocks_per_id) for x in lbhnc]

    def _cpu(self, flat: torch.Tensor) -> tuple[torch.Tensor, list[LayerPages]]:
        lbhnc = flat.view(*self._sizes().values())
        form = CPU_FORMS[self.format]
        if flat.dtype == self.dtype:
            dims = self.key_dim, self.value_dim
            layers = [
                from_cpu_attention(x, *dims, form=form, blocks_per_id=self.blocks_per_id)
                for x in lbhnc
            ]
            return lbhnc, layers
        k, v = lbhnc.flatten(3).split(
            [self.block * self.key_dim, self.block * self.value_dim], dim=3
        )
        tile, word = form.key_tile or self.block, form.key_word
        k = k.unflatten(3, (self.block // tile, self.key_dim // word, tile, word))
        tile, group = form.value_tile, form.value_group or self.value_dim
        v = v.unflatten(3, (self.value_dim // group, self.block // tile, group, tile))
        lbhnd, lbhne = k.transpose(4, 5).flatten(5).flatten(3, 4), v.permute(0, 1, 2, 4, 6, 3, 5)
        return torch.cat([lbhnd, lbhne.flatten(5).flatten(3, 4)], 4), []

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
        """Return the positions of rows `[start, stop)`, [L, H, tokens, R], for a request with these
        block ids."""
        tokens = np.arange(start, stop)
        part = tokens % self.id_tokens // self.block
        blocks = np.array(ids)[tokens // self.id_tokens] * self.blocks_per_id + part
        picked = self.where_lbhnr[:, blocks, :, tokens % self.block]  # [tokens, L, H, R]
        return picked.transpose(1, 2, 0, 3)


def random_rows(pages: Pages, num_tokens: int) -> np.ndarray:
    shape = (pages.num_layers, pages.num_heads, num_tokens, pages.row_bytes)
    return np.random.default_rng().integers(0, 256, shape, dtype=np.uint8)


def block_table(pages: Pages, num_tokens: int) -> list[int]:
    return random.Random(3).sample(range(pages.num_ids), -(-num_tokens // pages.id_tokens))


@dataclass
class Cell:
    """A move of one chunk, and its slot, which lies between poisoned guards.

    `chunk_start` is -1 for the first cell of a drafter, whose rows begin a token before the chunk.
    """

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

    def move(self, first_layer: int = 0) -> SlabMove:
        """Return this cell's move, for a copier whose layers from `first_layer` on are these pages'
        layers."""
        table_first = max(0, self.chunk_start) // self.pages.id_tokens
        table_last = -(-(self.chunk_start + self.chunk_tokens) // self.pages.id_tokens)
        layer_start, layer_stop = (first_layer + layer for layer in self.layers)
        return cell_move(
            self.slot.ctypes.data + self._start,
            (layer_start, layer_stop, *self.heads),
            self.ids[table_first:table_last],
            table_start=table_first * self.pages.id_tokens,
            chunk_start=self.chunk_start,
            chunk_tokens=self.chunk_tokens,
            clip=self.clip,
        )

    def part_of(self, rows_lhtr: np.ndarray) -> np.ndarray:
        """Return the clipped rows of this cell, [heads, layers, tokens, R]."""
        part = rows_lhtr[slice(*self.layers), slice(*self.heads), slice(*self.clip)]
        return part.swapaxes(0, 1)

    def clipped(self, payload: np.ndarray) -> np.ndarray:
        return payload[:, :, self.clip[0] - self.chunk_start : self.clip[1] - self.chunk_start]


def check_gather(cell: Cell, make: MakeCopier) -> None:
    pages, num_tokens = cell.pages, len(cell.ids) * cell.pages.id_tokens
    rows = random_rows(pages, num_tokens)
    before, expected_slot = pages.read(), cell.slot.copy()
    before[pages.indices(cell.ids, 0, num_tokens)] = rows
    pages.write(before)
    make(pages.layers).gather([cell.move()])
    got = cell.slot.copy()
    cell.slot[:] = expected_slot
    cell.clipped(cell.payload)[:] = cell.part_of(rows)
    np.testing.assert_array_equal(got, cell.slot)
    np.testing.assert_array_equal(pages.read(), before)


def check_scatter(cell: Cell, make: MakeCopier) -> None:
    pages, num_tokens = cell.pages, len(cell.ids) * cell.pages.id_tokens
    rows = random_rows(pages, num_tokens)
    cell.clipped(cell.payload)[:] = cell.part_of(rows)
    expected = np.full(len(pages.memory), POISON, np.uint8)
    where = pages.indices(cell.ids, *cell.clip)[slice(*cell.layers), slice(*cell.heads)]
    expected[where] = cell.part_of(rows).swapaxes(0, 1)
    slot_before = cell.slot.copy()
    pages.poison()
    make(pages.layers).scatter([cell.move()])
    np.testing.assert_array_equal(pages.read(), expected)
    np.testing.assert_array_equal(cell.slot, slot_before)


def check_both_ways(
    pages: Pages, make: MakeCopier, chunk_start: int = CHUNK, **cell: int | tuple[int, int]
) -> None:
    """Check gather and scatter of one cell: all of its chunk, unless `cell` says otherwise."""
    chunk_tokens = cell.get("chunk_tokens", CHUNK)
    assert isinstance(chunk_tokens, int)
    ids = block_table(pages, chunk_start + chunk_tokens)
    whole = {
        "clip": (chunk_start, chunk_start + chunk_tokens),
        "heads": (0, pages.num_heads),
        "layers": (0, pages.num_layers),
    }
    for check in (check_gather, check_scatter):
        check(Cell(pages, ids, chunk_start, **{**whole, **cell}), make)


def single_moves(cells: Sequence[Cell]) -> list[SlabMove]:
    """Return a move for each cell."""
    return [cell.move() for cell in cells]


def slab_moves(cells: Sequence[Cell]) -> list[SlabMove]:
    """Return a move for each chunk and clip of the cells, as lanes make them."""
    slabs: dict[tuple[object, ...], list[SlabMove]] = {}
    for cell in cells:
        move = cell.move()
        slabs.setdefault((*move[3:], *move.block_ids), []).append(move)
    return [
        slab(
            [int(address) for move in moves for address in move.addresses],
            [place for move in moves for place in map(tuple, move.places.tolist())],
            *moves[0][2:],
        )
        for moves in slabs.values()
    ]


@st.composite
def cells(draw: st.DrawFn, max_tokens: int = 96, device: torch.device = CPU) -> Cell:
    """Draw a clipped cell of any geometry, in pages of any format except "planes"."""
    page_format = draw(st.sampled_from([f for f in FORMATS if f != "planes"]))
    block, blocks_per_id = draw(st.integers(1, 40)), draw(st.integers(1, 4))
    chunk_tokens = draw(st.integers(1, max_tokens))
    lookahead = draw(st.integers(0, min(1, chunk_tokens - 1)))  # of a drafter
    chunk_start = chunk_tokens * draw(st.integers(0, 3)) - lookahead
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
        device=device,
    )

    def half_open(stop: int, start: int = 0) -> tuple[int, int]:
        first = draw(st.integers(start, stop - 1))
        return first, draw(st.integers(first + 1, stop))

    return Cell(
        pages,
        block_table(pages, num_tokens),
        chunk_start,
        clip=half_open(num_tokens, max(0, chunk_start)),
        heads=half_open(pages.num_heads),
        layers=half_open(pages.num_layers),
        chunk_tokens=chunk_tokens,
        misaligned=draw(st.integers(0, 64)),
    )
