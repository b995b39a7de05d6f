"""Cells written under one tensor parallelism and page format, read under another, by real copiers.

The store is a dict with a cell per (head, layer span, chunk), whoever wrote it.
"""

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from tests.support.moves import cell_move
from vllm_kvpool.layout.page_formats import from_cpu_attention, from_token_content
from vllm_kvpool.layout.pages import SlabMove
from vllm_kvpool.staging.copy_cpu import CpuCopier

# Legend: L layers, B blocks, H local heads, G global heads, T tokens, N tokens per block,
# D key row, C key and value row.
NUM_LAYERS, LAYER_SPAN = 4, 2
DIM = 8
CHUNK, NUM_CHUNKS = 32, 3
NUM_TOKENS = CHUNK * NUM_CHUNKS
CellKey = tuple[int, int, int]
Store = dict[CellKey, np.ndarray]


@dataclass(frozen=True)
class Engine:
    """Settings that decide an engine's pages; two engines may differ in each of them."""

    tp_size: int
    block: int
    format: str


class Rank:
    """A tensor-parallel rank with its pages, block table and copier."""

    def __init__(self, engine: Engine, tp_rank: int, num_kv_heads: int) -> None:
        self.block = engine.block
        self.is_transposed = engine.format == "cpu"
        self.num_heads = max(1, num_kv_heads // engine.tp_size)
        self.num_replicas = max(1, engine.tp_size // num_kv_heads)
        self.replica = tp_rank % self.num_replicas
        self.first_head = num_kv_heads * tp_rank // engine.tp_size
        num_blocks = 2 * NUM_TOKENS // engine.block
        self.ids = random.Random(tp_rank).sample(range(num_blocks), NUM_TOKENS // engine.block)
        shape = (NUM_LAYERS, num_blocks, self.num_heads, engine.block, 2 * DIM)
        self.pages = torch.full(shape, -1, dtype=torch.int16)
        if engine.format == "token-major":
            self.pages = self.pages.transpose(2, 3).contiguous().transpose(2, 3)
        self.copier = CpuCopier(
            [
                from_cpu_attention(layer, DIM, DIM)
                if self.is_transposed
                else from_token_content(layer)
                for layer in self.pages
            ]
        )

    @property
    def heads(self) -> slice:
        return slice(self.first_head, self.first_head + self.num_heads)

    def fill(self, kv_lgtc: torch.Tensor) -> None:
        blocks = kv_lgtc[:, self.heads].unflatten(2, (len(self.ids), self.block)).transpose(1, 2)
        if self.is_transposed:
            k, v = blocks[..., :DIM].transpose(3, 4).flatten(3), blocks[..., DIM:].flatten(3)
            blocks = torch.cat([k, v], 3).unflatten(3, (self.block, 2 * DIM))
        self.pages[:, self.ids] = blocks

    def tokens_lhtc(self) -> torch.Tensor:
        blocks = self.pages[:, self.ids]
        if self.is_transposed:
            flat = blocks.flatten(3)
            k = flat[..., : self.block * DIM].unflatten(3, (DIM, self.block)).transpose(3, 4)
            v = flat[..., self.block * DIM :].unflatten(3, (self.block, DIM))
            blocks = torch.cat([k, v], 4)
        return blocks.transpose(1, 2).flatten(2, 3)

    def moves(self, chunks: range, slots: Store) -> Iterator[SlabMove]:
        spans = range(0, NUM_LAYERS, LAYER_SPAN)
        for head, layer, chunk in itertools.product(range(self.num_heads), spans, chunks):
            slot = slots[self.first_head + head, layer, chunk]
            start, stop = chunk * CHUNK, (chunk + 1) * CHUNK
            yield cell_move(
                slot.ctypes.data,
                (layer, layer + LAYER_SPAN, head, head + 1),
                self.ids[start // self.block : -(-stop // self.block)],
                table_start=start // self.block * self.block,
                chunk_start=start,
                chunk_tokens=CHUNK,
            )

    def save(self, store: Store) -> None:
        """Replicas of a head take turns by chunk."""
        chunks = range(self.replica, NUM_CHUNKS, self.num_replicas)
        spans = range(0, NUM_LAYERS, LAYER_SPAN)
        heads = range(self.first_head, self.first_head + self.num_heads)
        slots = {key: empty_cell() for key in itertools.product(heads, spans, chunks)}
        self.copier.gather(list(self.moves(chunks, slots)))
        assert not slots.keys() & store.keys(), "written twice"
        store.update(slots)

    def load(self, store: Store) -> None:
        self.copier.scatter(list(self.moves(range(NUM_CHUNKS), store)))


def empty_cell() -> np.ndarray:
    return np.zeros((LAYER_SPAN, CHUNK, 2 * DIM), np.int16)


def global_kv(num_kv_heads: int) -> torch.Tensor:
    shape = (NUM_LAYERS, num_kv_heads, NUM_TOKENS, 2 * DIM)
    return torch.arange(int(np.prod(shape))).remainder(2**15).to(torch.int16).view(shape)


WRITERS = (("token-major", 16), ("head-major", 32), ("cpu", 16), ("token-major", 96), ("cpu", 32))
READERS = (("cpu", 32), ("token-major", 16), ("head-major", 96), ("head-major", 16), ("cpu", 96))
TP_SIZES = (1, 2, 4, 8, 16)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 8])
@pytest.mark.parametrize("reader_tp", TP_SIZES)
@pytest.mark.parametrize("writer_tp", TP_SIZES)
def test_any_writer_to_any_reader(writer_tp: int, reader_tp: int, num_kv_heads: int) -> None:
    kv = global_kv(num_kv_heads)
    store: Store = {}
    page_format, block = WRITERS[TP_SIZES.index(writer_tp)]
    for tp_rank in range(writer_tp):
        rank = Rank(Engine(writer_tp, block, page_format), tp_rank, num_kv_heads)
        rank.fill(kv)
        rank.save(store)
    assert len(store) == num_kv_heads * (NUM_LAYERS // LAYER_SPAN) * NUM_CHUNKS
    for (head, layer, chunk), cell in store.items():
        expected = kv[layer : layer + LAYER_SPAN, head, chunk * CHUNK : (chunk + 1) * CHUNK]
        np.testing.assert_array_equal(cell, expected.numpy())
    page_format, block = READERS[TP_SIZES.index(reader_tp)]
    for tp_rank in range(reader_tp):
        rank = Rank(Engine(reader_tp, block, page_format), tp_rank, num_kv_heads)
        rank.load(store)
        assert torch.equal(rank.tokens_lhtc(), kv[:, rank.heads])
