"""States cut into units: written under one tensor parallelism and layout, read under another.

The store is a dict with a row per (unit, boundary), whoever wrote it. What a rank's block holds is
made from the whole model's state by slices, as vLLM deals it out; bytes must be equal.
"""

import itertools
from dataclasses import dataclass
from math import lcm

import numpy as np
import pytest
import torch

from tests.support.moves import cell_move
from vllm_kvpool.errors import ConfigError
from vllm_kvpool.identity.keys import HeadShard
from vllm_kvpool.layout.page_formats import from_state
from vllm_kvpool.layout.states import MAX_TP_SIZE, StateForm, WindowPart, num_units
from vllm_kvpool.layout.topology import LayerGroup, Topology, cells_of_rank
from vllm_kvpool.staging.copy_cpu import CpuCopier
from vllm_kvpool.staging.copy_torch import TorchCopier

NUM_BLOCKS, LAYERS, SPAN = 5, 3, 2
POISON = 0xA5
BOUNDARIES = {"boundary-1": 3, "boundary-2": 1}  # -> the block that holds the state
Store = dict[tuple[str, str, str], bytes]

FORMS = {
    "short convolution": StateForm(8, 2, 4, (WindowPart(6),)),
    "one part and a state": StateForm(8, 3, 2, (WindowPart(4),), 32),
    "three unequal parts": StateForm(4, 3, 2, (WindowPart(8), WindowPart(8), WindowPart(20)), 96),
    "shared parts": StateForm(
        8, 3, 2, (WindowPart(16), WindowPart(12, True), WindowPart(12, True)), 64
    ),
    "no window": StateForm(8, recurrent_bytes=48),
    "odd sizes": StateForm(6, 3, 2, (WindowPart(3), WindowPart(5)), 10),
}


@dataclass(frozen=True)
class Engine:
    """Settings of an engine's state layout; two engines may differ in each of them."""

    tp_size: int
    dim_first: bool = False
    draft_rows: int = 0
    padding: int = 0


ENGINES = [
    Engine(1),
    Engine(1, dim_first=True),
    Engine(1, draft_rows=2, padding=24),
    Engine(2),
    Engine(2, dim_first=True, draft_rows=1, padding=3),
    Engine(4),
    Engine(8),
    Engine(8, dim_first=True, draft_rows=3),
]


@dataclass(frozen=True)
class WholeState:
    """A layer's state of the whole model: parts as `[rows, channels, item]`, recurrent bytes."""

    parts: tuple[torch.Tensor, ...]
    recurrent: torch.Tensor

    @staticmethod
    def random(form: StateForm, seed: int) -> "WholeState":
        generator = torch.Generator().manual_seed(seed)

        def some(*shape: int) -> torch.Tensor:
            return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)

        parts = (
            some(
                form.window_rows,
                part.channels * (1 if part.is_shared else form.num_units),
                form.item_bytes,
            )
            for part in form.parts
        )
        return WholeState(tuple(parts), some(form.num_units * form.recurrent_bytes))

    def of_rank(self, form: StateForm, engine: Engine, tp_rank: int) -> torch.Tensor:
        """Return the bytes of a rank's block; rows for drafts are poison."""
        mine = []
        for part, whole in zip(form.parts, self.parts, strict=True):
            size = whole.shape[1] // (1 if part.is_shared else engine.tp_size)
            first = 0 if part.is_shared else tp_rank * size
            mine.append(whole[:, first : first + size])
        window = torch.empty(0, dtype=torch.uint8)
        if mine:
            rows = torch.cat(mine, dim=1)
            drafts = torch.full((engine.draft_rows, *rows.shape[1:]), POISON, dtype=torch.uint8)
            window = torch.cat([rows, drafts])
            window = window.transpose(0, 1) if engine.dim_first else window
        size = len(self.recurrent) // engine.tp_size
        return torch.cat(
            [window.reshape(-1), self.recurrent[tp_rank * size : (tp_rank + 1) * size]]
        )


class Rank:
    """A tensor-parallel rank with its pages and copier."""

    def __init__(self, form: StateForm, engine: Engine, tp_rank: int, with_torch: bool) -> None:
        units = form.num_units // engine.tp_size
        empty = WholeState.random(form, 0).of_rank(form, engine, tp_rank)
        stride = len(empty) + engine.padding
        self.memory = torch.full((LAYERS, NUM_BLOCKS, stride), POISON, dtype=torch.uint8)
        self.blocks_lbc = self.memory[:, :, : len(empty)]
        self.layers = [
            from_state(
                blocks_bc[:, None, None].view(torch.int8),
                form,
                units,
                dim_first=engine.dim_first,
                draft_rows=engine.draft_rows if form.parts else 0,
            )
            for blocks_bc in self.blocks_lbc
        ]
        group = LayerGroup(
            Topology(form.num_units, engine.tp_size, ((0, LAYERS),), SPAN, layer_group="state"),
            form.row_bytes,
            is_state=True,
        )
        self.cells = cells_of_rank([group], tp_rank, 0)
        self.copier: CpuCopier | TorchCopier = (
            TorchCopier(self.layers, torch.device("cpu")) if with_torch else CpuCopier(self.layers)
        )

    def move(self, store: Store, *, is_gather: bool) -> None:
        for cell, (boundary, block) in itertools.product(self.cells, BOUNDARIES.items()):
            slot = np.zeros(cell.payload_bytes(256), np.uint8)
            key = (str(cell.shard), str(cell.span), boundary)
            if not is_gather:
                slot[:] = np.frombuffer(store[key], np.uint8)
            [piece] = cell.pieces
            assert piece.rows_before == 0
            place = piece.layer_start, piece.layer_stop, piece.head_start, piece.head_stop
            move = cell_move(slot.ctypes.data, place, [block], chunk_tokens=1)
            if is_gather:
                self.copier.gather([move])
                assert key not in store
                store[key] = slot.tobytes()
            else:
                self.copier.scatter([move])


def states_of(form: StateForm) -> dict[tuple[int, str], WholeState]:
    return {
        (layer, boundary): WholeState.random(form, 1 + 10 * layer + i)
        for layer in range(LAYERS)
        for i, boundary in enumerate(BOUNDARIES)
    }


def filled(form: StateForm, engine: Engine, tp_rank: int) -> torch.Tensor:
    """The memory of a rank that has computed the states itself."""
    rank = Rank(form, engine, tp_rank, with_torch=False)
    for (layer, boundary), state in states_of(form).items():
        rank.blocks_lbc[layer, BOUNDARIES[boundary]] = state.of_rank(form, engine, tp_rank)
    return rank.memory


def saved(form: StateForm, engine: Engine, with_torch: bool = False) -> Store:
    store: Store = {}
    for tp_rank in range(engine.tp_size):
        rank = Rank(form, engine, tp_rank, with_torch)
        rank.memory.copy_(filled(form, engine, tp_rank))
        rank.move(store, is_gather=True)
    return store


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_every_engine_writes_the_same_rows_and_reads_what_it_would_have_computed(
    form: StateForm,
) -> None:
    engines = [engine for engine in ENGINES if form.num_units % engine.tp_size == 0]
    first = saved(form, engines[0])
    for engine, with_torch in itertools.product(engines, (False, True)):
        assert saved(form, engine, with_torch) == first, engine
        for tp_rank in range(engine.tp_size):
            rank = Rank(form, engine, tp_rank, with_torch)
            rank.move(first, is_gather=False)
            assert torch.equal(rank.memory, filled(form, engine, tp_rank)), (engine, with_torch)


def test_a_row_has_parts_then_rows_then_channels_then_the_recurrent_state() -> None:
    form = FORMS["three unequal parts"]
    store = saved(form, Engine(2, dim_first=True, draft_rows=1))
    states = states_of(form)
    for unit in range(form.num_units):
        payload = store[(str(HeadShard(unit)), "layers:0-2@kind:state", "boundary-2")]
        assert len(payload) == SPAN * form.row_bytes
        for layer in range(SPAN):
            state = states[layer, "boundary-2"]
            row = b"".join(
                whole[:, unit * part.channels :][:, : part.channels].numpy().tobytes()
                for part, whole in zip(form.parts, state.parts, strict=True)
            )
            row += state.recurrent.view(form.num_units, -1)[unit].numpy().tobytes()
            assert payload[layer * form.row_bytes :][: form.row_bytes] == row


def test_the_number_of_units_is_divided_by_every_size_that_cuts_all_counts() -> None:
    assert num_units(2048, 32) == 16
    assert num_units(24, 48) == 24
    assert num_units(2, 4, 8) == 2
    assert num_units(7) == 7
    assert num_units(17) == 1
    for counts in itertools.product((1, 6, 8, 12, 40, 64), (8, 12, 32)):
        units = num_units(*counts)
        allowed = [n for n in range(1, MAX_TP_SIZE + 1) if all(c % n == 0 for c in counts)]
        assert units == lcm(*allowed)
        assert all(count % units == 0 for count in counts)


def test_a_block_of_another_size_is_refused() -> None:
    form = FORMS["short convolution"]
    nbytes = form.num_units * form.row_bytes
    from_state(torch.zeros(2, 1, 1, nbytes, dtype=torch.int8), form, form.num_units)
    for shape in ((2, 1, 1, nbytes + 4), (2, 1, 2, nbytes // 2)):
        with pytest.raises(ConfigError, match=f"{nbytes} bytes were expected"):
            from_state(torch.zeros(shape, dtype=torch.int8), form, form.num_units)


def test_a_layer_group_counts_one_row_a_boundary_whatever_the_chunk() -> None:
    topology = Topology(8, 2, ((0, 3),), 2, layer_group="state")
    group = LayerGroup(topology, 100, is_state=True)
    [first, second] = topology.all_spans()
    assert [group.payload_bytes(span, 256) for span in (first, second)] == [200, 100]
    assert {cell.payload_bytes(64) for cell in cells_of_rank([group], 0, 0)} == {200, 100}


def test_a_row_may_be_for_several_tokens() -> None:
    group = LayerGroup(Topology(1, 2, ((0, 3),), 3), 100, tokens_per_row=16)
    [span] = group.topology.all_spans()
    assert group.payload_bytes(span, 256) == 3 * 16 * 100
    assert {cell.payload_bytes(64) for cell in cells_of_rank([group], 0, 0)} == {3 * 4 * 100}
