"""The places of KV heads' bytes in an engine's pages, as strides.

A cell's canonical form is, for each head, layer and token, one **row**: `K[D] | V[Dv]`. A page
format is a value: the **runs** that a row consists of. Copiers see only runs, on any device.

    address(block, head, token, i) = base + block * block_stride + head * head_stride
                                          + token * token_stride + i * elem_stride

Where the tokens of a block lie in tiles, `token // tile_tokens * tile_stride +
token % tile_tokens * token_stride` takes the place of `token * token_stride`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import torch

Int64s = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class Run:
    """Equally spaced elements of a row; strides in bytes, `base` the address of index zero.

    `num_elems` elements of `elem_bytes` bytes each, `elem_stride` apart in the page and adjacent in
    the row, beginning at `row_offset`. Token-major pages and vLLM's `[B, H, N, C]` views are one
    run with one element, a whole row; pages of CPU attention are two or more: K, stored transposed,
    and V. `tile_tokens` is 0 where tokens do not lie in tiles. A `head_stride` of 0 means that all
    heads of a rank have the same bytes there.
    """

    base: int
    block_stride: int
    head_stride: int
    token_stride: int
    elem_stride: int
    elem_bytes: int
    num_elems: int
    row_offset: int
    tile_tokens: int = 0
    tile_stride: int = 0

    @classmethod
    def of_bytes(
        cls,
        base: int,
        block_stride: int,
        head_stride: int,
        token_stride: int,
        nbytes: int,
        row_offset: int = 0,
    ) -> "Run":
        """Return the run whose bytes of a row lie together."""
        return cls(base, block_stride, head_stride, token_stride, nbytes, nbytes, 1, row_offset)

    def interleaved(self, tokens: int, elem_bytes: int, block_tokens: int) -> "Run":
        """Return the run of the same bytes where tokens take turns.

        `tokens` tokens of a block take turns with `elem_bytes` each.
        """
        is_one_tile = tokens == block_tokens
        return replace(
            self,
            token_stride=elem_bytes,
            elem_stride=tokens * elem_bytes,
            elem_bytes=elem_bytes,
            num_elems=self.nbytes // elem_bytes,
            tile_tokens=0 if is_one_tile else tokens,
            tile_stride=0 if is_one_tile else tokens * self.nbytes,
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.elem_bytes * self.num_elems


@dataclass(frozen=True, slots=True)
class LayerPages:
    """The pages of a layer on this rank.

    `owner` keeps the memory alive and names the device. `group` is the KV cache group whose block
    table names the layer's blocks. A manager block (the scheduler's id) is `blocks_per_id`
    consecutive kernel blocks of `tokens_per_block` tokens. Let n be tokens_per_block and r be
    blocks_per_id: token t of a request lies in kernel block `ids[t // (n * r)] * r + t // n % r`.
    """

    runs: tuple[Run, ...]
    num_heads: int
    tokens_per_block: int
    blocks_per_id: int
    owner: "tuple[torch.Tensor, ...]"
    group: int = 0

    def __post_init__(self) -> None:
        covered = sorted((r.row_offset, r.row_offset + r.nbytes) for r in self.runs)
        ends = [0, *(stop for _, stop in covered)]
        assert [start for start, _ in covered] == ends[:-1], "runs must tile the row"

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, in all runs."""
        return sum(run.nbytes for run in self.runs)


class SlabMove(NamedTuple):
    """A copy between staging memory and pages: pieces of one chunk's cells.

    The layers of the pieces share a block table. The payload of a piece is laid out
    `[heads][layers][chunk_tokens][row_bytes]`, from token `chunk_start` on; only tokens
    `[token_start, token_stop)` are copied. `block_ids` are manager blocks; the first begins with
    token `table_start`. Tokens count from the start of the request. Where one row is for several
    tokens, all numbers count rows.
    """

    addresses: Int64s
    """The address of each piece's payload in staging memory, `[pieces]`."""
    places: Int64s
    """A template, `[pieces, 4]`: layer_start, layer_stop, head_start, head_stop; local, half open.
    All chunks have the same array object, which is never modified: copiers keep what they derive
    from it."""
    block_ids: Sequence[int]
    table_start: int
    chunk_start: int
    chunk_tokens: int
    token_start: int
    token_stop: int
