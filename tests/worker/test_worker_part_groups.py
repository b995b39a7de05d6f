"""Worker parts of a model with several kinds of layers, or with tokens distributed over ranks.

The reading engine has other tensor parallelism, block sizes and KV cache groups than the writer.
Everything but the engine is the package's own.
"""

import itertools
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from tests.support import memory_store
from tests.support.copiers import warm_copier
from tests.support.fakes import FakePins
from tests.support.worker_steps import prompt_hashes
from vllm_kvpool.config import KVRole, read_config
from vllm_kvpool.identity.keys import make_namespace
from vllm_kvpool.layout.engine_shape import ModelShape, RankPlace
from vllm_kvpool.layout.page_formats import from_token_content
from vllm_kvpool.layout.topology import (
    FULL_ATTENTION,
    NO_CONTEXT,
    AttentionWindow,
    Context,
    KVCacheGroup,
    LayerGroup,
    Topology,
)
from vllm_kvpool.scheduler.blocks import GroupTables, Place
from vllm_kvpool.scheduler.messages import StepPlan
from vllm_kvpool.scheduler.prefix_search import CellNames
from vllm_kvpool.scheduler.scheduler_part import SchedulerPart
from vllm_kvpool.storage.file.store import FileStore
from vllm_kvpool.transfer.ops import NULL_BLOCK, JobId, LoadPlan, SavePlan
from vllm_kvpool.worker.pool_worker import StepResults
from vllm_kvpool.worker.worker_part import WorkerPart

# Legend: L layers, B blocks, H heads, N tokens of a block on a rank, C content, T tokens.
CHUNK, TOKENS, LIMIT_S = 96, 3 * 96, 30.0
MODEL = make_namespace("model", "0" * 12)
NUMBERS = itertools.count()
UNWRITTEN = -1


@dataclass(frozen=True)
class Layers:
    """Layers of one kind in a model."""

    name: str
    count: int
    heads: int
    content: int
    window: AttentionWindow = FULL_ATTENTION


FULL, WINDOW = Layers("full", 2, 4, 16), Layers("window", 5, 2, 24, AttentionWindow(sliding=100))
HYBRID, PLAIN = (FULL, WINDOW), (Layers("", 3, 2, 16),)
KV = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Grouping:
    """The KV cache groups of an engine: for each kind of layers the group of each layer, and block
    sizes."""

    groups: tuple[tuple[int, ...], ...]
    blocks: tuple[int, ...]


WRITER = Grouping(((0, 0), (1, 2, 3, 1, 2)), (16, 32, 32, 32))
READERS = (
    Grouping(((0, 0), (1, 1, 1, 1, 1)), (48, 16)),
    Grouping(((2, 2), (1, 3, 3, 0, 1)), (8, 24, 96, 8)),
    Grouping(((0, 1), (4, 3, 2, 3, 2)), (16, 16, 48, 48, 32)),
)


def random_kv(model: Sequence[Layers]) -> KV:
    """Return random KV, `[L, H, T, C]` for each kind of layers."""
    return tuple(
        torch.randint(0, 2**15, (each.count, each.heads, TOKENS, each.content), dtype=torch.int16)
        for each in model
    )


HASHES = prompt_hashes(range(TOKENS), CHUNK)


def kinds_of(
    model: Sequence[Layers], tp_size: int, context: Context, *, per_head: bool = True
) -> tuple[LayerGroup, ...]:
    return tuple(
        LayerGroup(
            Topology(each.heads, tp_size, ((0, each.count),), 2, per_head, each.name, context),
            each.content * 2,
            each.window,
        )
        for each in model
    )


class Rank:
    """A rank of an engine: its worker part, its pages and its block tables."""

    def __init__(
        self,
        store: str,
        model: Sequence[Layers],
        grouping: Grouping,
        place: RankPlace,
        tp_size: int,
        context: Context = NO_CONTEXT,
        *,
        per_head: bool = True,
    ) -> None:
        self.layer_groups = kinds_of(model, tp_size, context, per_head=per_head)
        self.grouping, self.context = grouping, context
        self.part = context.rank(place.tp_rank, place.pcp_rank)
        window_of = {
            group: each.window
            for each, groups in zip(model, grouping.groups, strict=True)
            for group in groups
        }
        self.groups = tuple(KVCacheGroup(b, window_of[i]) for i, b in enumerate(grouping.blocks))
        self.heads = [
            slice(first := k.topology.first_head(place.tp_rank), first + k.topology.heads_per_rank)
            for k in self.layer_groups
        ]
        chance = random.Random(next(NUMBERS))
        self.tables = [
            chance.sample(range(1, 1 + 2 * (TOKENS // block)), TOKENS // block)
            for block in grouping.blocks
        ]
        self.pages: list[list[torch.Tensor]] = []  # by kind and layer, `[B, H, N, C]`
        layers = []
        for layer_group, each, groups in zip(
            self.layer_groups, model, grouping.groups, strict=True
        ):
            held = layer_group.topology.heads_per_rank
            tensors = []
            for group in groups:
                block = grouping.blocks[group]
                shape = (
                    1 + 2 * (TOKENS // block),
                    held,
                    block // context.dcp_size,
                    each.content,
                )
                tensors.append(torch.full(shape, UNWRITTEN, dtype=torch.int16))
                layers.append(replace(from_token_content(tensors[-1]), group=group))
            self.pages.append(tensors)
        shape = ModelShape(MODEL, self.layer_groups, self.groups, 1000, tp_size * context.pcp_size)
        extra = {"store": store, "chunk_tokens": CHUNK, "staging_bytes": "1MiB"}
        self.pool = WorkerPart(
            read_config(extra, env={}), shape, place, layers, warm_copier, finish_in_step=True
        )
        self.jobs = itertools.count(1)

    def positions(self, group: int) -> tuple[list[int], list[int], list[int]]:
        """Return this rank's tokens, their blocks, and their positions in the blocks."""
        block, dcp = self.groups[group].block_size, self.context.dcp_size
        tokens, blocks, places = [], [], []
        for token in range(TOKENS):  # as vLLM's slot mapping
            offset = token % block
            if offset // self.context.interleave % dcp == self.part.dcp_rank:
                rounds = offset // (self.context.interleave * dcp)
                tokens.append(token)
                blocks.append(self.tables[group][token // block])
                places.append(rounds * self.context.interleave + offset % self.context.interleave)
        return tokens, blocks, places

    def save(self, kv: KV, gone: dict[int, range] | None = None) -> None:
        """Write the KV to the pages and save all chunks. `gone`: indices of freed blocks, by
        group."""
        for layer_group, each in enumerate(kv):
            for layer, group in enumerate(self.grouping.groups[layer_group]):
                tokens, blocks, places = self.positions(group)
                rows_htc = each[layer, self.heads[layer_group]][:, tokens]
                self.pages[layer_group][layer][blocks, :, places] = rows_htc.transpose(0, 1)
        tables = [list(table) for table in self.tables]
        for group, indices in (gone or {}).items():
            for index in indices:
                tables[group][index] = NULL_BLOCK
        pages = GroupTables(self.groups).of_save(tables, 0, TOKENS, 0, {})
        assert pages is not None
        plan = SavePlan(JobId(next(self.jobs)), "r", 0, HASHES, pages)
        self.pool.worker.start_saves(StepPlan(saves=(plan,)))

    def load(self, start: int = 0, stop: int = TOKENS) -> StepResults:
        pages = GroupTables(self.groups).of_load(self.tables, start, stop)
        first, last = start // CHUNK, -(-stop // CHUNK)
        job = JobId(next(self.jobs))
        load = LoadPlan(job, "r", first, HASHES[first:last], pages, start, stop)
        plan = StepPlan(loads=(load,), idle=True)
        self.pool.worker.start_loads(plan)
        deadline = time.monotonic() + LIMIT_S
        while "r" not in (results := self.pool.worker.finish_step(plan, set())).loaded:
            assert time.monotonic() < deadline, "the load did not end"
        return results

    def check(self, kv: KV, start: int = 0, stop: int = TOKENS) -> None:
        """Assert that a load of tokens [start, stop) has written their KV, and nothing else."""
        for layer_group, each in enumerate(kv):
            for layer, group in enumerate(self.grouping.groups[layer_group]):
                block = self.groups[group].block_size
                read = self.groups[group].window.first_read(stop)
                first = max(start, read - read % block)
                tokens, blocks, places = self.positions(group)
                found = self.pages[layer_group][layer][blocks, :, places].transpose(0, 1)
                expected = each[layer, self.heads[layer_group]][:, tokens].clone()
                expected[:, [not first <= token < stop for token in tokens]] = UNWRITTEN
                assert torch.equal(found, expected), (layer_group, layer)

    def close(self) -> dict[str, float]:
        self.pool.close()
        return self.pool.registry.snapshot()


def engine(
    store: str,
    model: Sequence[Layers],
    grouping: Grouping,
    tp_size: int,
    context: Context = NO_CONTEXT,
    *,
    per_head: bool = True,
) -> Iterator[Rank]:
    for pcp_rank, tp_rank in itertools.product(range(context.pcp_size), range(tp_size)):
        place = RankPlace(tp_rank, 0, pcp_rank * tp_size + tp_rank, pcp_rank)
        yield Rank(store, model, grouping, place, tp_size, context, per_head=per_head)


def write(ranks: Iterator[Rank], kv: KV, gone: dict[int, range] | None = None) -> None:
    for rank in ranks:
        rank.save(kv, gone)
        counted = rank.close()
        assert not any("failures" in name for name in counted), counted


def read(ranks: Iterator[Rank], kv: KV, start: int = 0, stop: int = TOKENS) -> None:
    for rank in ranks:
        results = rank.load(start, stop)
        assert not results.failed
        assert not results.invalid_blocks
        rank.check(kv, start, stop)
        rank.close()


@pytest.fixture
def memory() -> str:
    return f"memory://kinds{next(NUMBERS)}"


# Layers of two kinds


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("reader_tp", [1, 2, 4])
@pytest.mark.parametrize("writer_tp", [1, 2, 4])
def test_any_grouping_of_the_layers_is_read_by_any_other(
    memory: str, writer_tp: int, reader_tp: int, reader: Grouping
) -> None:
    kv = random_kv(HYBRID)
    write(engine(memory, HYBRID, WRITER, writer_tp), kv)
    read(engine(memory, HYBRID, reader, reader_tp), kv)


@pytest.mark.parametrize(("start", "stop"), [(0, 192), (96, 288), (192, 287), (0, 95)])
def test_part_of_a_prompt_is_read(memory: str, start: int, stop: int) -> None:
    kv = random_kv(HYBRID)
    write(engine(memory, HYBRID, WRITER, 1), kv)
    read(engine(memory, HYBRID, READERS[1], 2), kv, start, stop)


@pytest.mark.parametrize("tp_size", [1, 2])
def test_a_cell_for_each_rank_does_not_tell_of_groups_either(memory: str, tp_size: int) -> None:
    """Cells have several heads, and are cut where the block table changes."""
    kv = random_kv(HYBRID)
    write(engine(memory, HYBRID, WRITER, tp_size, per_head=False), kv)
    for grouping in READERS:
        read(engine(memory, HYBRID, grouping, tp_size, per_head=False), kv)


def test_what_was_let_go_is_not_stored_and_what_is_not_read_is_not_missed(tmp_path: Path) -> None:
    store = f"file://{tmp_path}/cells?size=1GiB"
    kv = random_kv(HYBRID)
    gone = {1: range(5), 2: range(5), 3: range(5)}  # of 9: tokens before 160
    write(engine(store, HYBRID, WRITER, 2), kv, gone)
    names = CellNames(MODEL, kinds_of(HYBRID, 1, NO_CONTEXT))
    files = FileStore(str(tmp_path / "cells"), 1 << 30)
    stored = [
        [all(files.exists(names.of_chunk(chunk_hash, layer_group))) for chunk_hash in HASHES]
        for layer_group in range(2)
    ]
    assert [any(files.exists(names.of_chunk(chunk_hash, 1))) for chunk_hash in HASHES[:2]] == [
        False,
        False,
    ]
    files.close()
    assert stored == [[True] * 3, [False, False, True]]
    # A window of 100 tokens before 288 begins at 189, in the second chunk.
    [rank] = engine(store, HYBRID, READERS[0], 1)
    results = rank.load()
    assert results.failed == {"r"}
    assert not results.invalid_blocks
    rank.close()


def test_what_a_window_does_not_reach_is_not_missed(memory: str) -> None:
    short = (FULL, replace(WINDOW, window=AttentionWindow(sliding=90)))
    kv = random_kv(short)
    gone = {1: range(6), 2: range(6), 3: range(6)}  # tokens before 192
    write(engine(memory, short, WRITER, 1), kv, gone)
    read(engine(memory, short, READERS[0], 4), kv)


@pytest.mark.parametrize("loses_cells", [False, True])
def test_an_engine_whose_store_loses_single_cells_asks_for_every_one(
    monkeypatch: pytest.MonkeyPatch, loses_cells: bool
) -> None:
    lossy = replace(memory_store.CAPABILITIES, loses_cells=loses_cells)
    monkeypatch.setattr(memory_store, "CAPABILITIES", lossy)
    shape = ModelShape(MODEL, kinds_of(HYBRID, 1, NO_CONTEXT), (KVCacheGroup(16),), 20, 1)
    config = read_config({"store": "memory://lossy", "chunk_tokens": CHUNK}, env={})
    part = SchedulerPart(config, KVRole.BOTH, shape, FakePins())
    assert part._lookups.core._loses_cells is loses_cells
    part.close()


@pytest.mark.parametrize("blocks", [(16, 16), (16, 48, 128), (7, 96)])
def test_a_chunk_can_be_saved_whatever_is_held_for_others(blocks: tuple[int, ...]) -> None:
    """The room for a chunk remains even in an engine with few blocks."""
    groups = tuple(
        KVCacheGroup(block, AttentionWindow(sliding=i and 40)) for i, block in enumerate(blocks)
    )
    shape = ModelShape(MODEL, kinds_of(HYBRID, 1, NO_CONTEXT), groups, 20, 1)
    config = read_config({"store": "memory://held", "chunk_tokens": CHUNK}, env={})
    part = SchedulerPart(config, KVRole.BOTH, shape, FakePins())
    ledger = part.scheduler.saves.ledger
    held = 0
    while ledger.hold("other", Place(1, held), 1 + held):
        held += 1
    most = max(GroupTables(groups).num_blocks(n * CHUNK, (n + 1) * CHUNK) for n in range(400))
    assert ledger.room >= most
    assert held >= sum(-(-CHUNK // block) + 1 for block in blocks[1:])
    ledger.release_all_held()
    part.close()


# Tokens dealt out


@pytest.mark.parametrize("interleave", [1, 16])
@pytest.mark.parametrize("blocks", [(32, 32), (32, 96), (96, 32)])
def test_tokens_that_are_dealt_out_are_read_where_they_are_dealt_out_alike(
    memory: str, blocks: tuple[int, int], interleave: int
) -> None:
    context = Context(dcp_size=2, interleave=interleave)
    kv = random_kv(PLAIN)
    writer, reader = (Grouping(((0, 0, 0),), (block,)) for block in blocks)
    write(engine(memory, PLAIN, writer, 4, context), kv)
    read(engine(memory, PLAIN, reader, 4, context), kv)


@pytest.mark.parametrize("shape", [(2, 2), (4, 1), (2, 1)])
def test_ranks_of_prefill_context_parallelism_hold_the_same(
    memory: str, shape: tuple[int, int]
) -> None:
    tp_size, pcp_size = shape
    kv = random_kv(PLAIN)
    grouping = Grouping(((0, 0, 0),), (32,))
    write(engine(memory, PLAIN, grouping, tp_size, Context(pcp_size=pcp_size)), kv)
    read(engine(memory, PLAIN, grouping, 1), kv)
    read(engine(memory, PLAIN, grouping, 2, Context(pcp_size=2)), kv)


def test_a_load_of_part_of_a_prompt_that_is_dealt_out(memory: str) -> None:
    context = Context(dcp_size=2, interleave=16)
    kv = random_kv(PLAIN)
    grouping = Grouping(((0, 0, 0),), (32,))
    write(engine(memory, PLAIN, grouping, 4, context), kv)
    for start, stop in ((0, TOKENS - 1), (32, 192), (96, 269)):
        read(engine(memory, PLAIN, grouping, 4, context), kv, start, stop)


def test_two_kinds_of_layers_may_be_dealt_out(memory: str) -> None:
    model = (replace(FULL, heads=2), WINDOW)
    context = Context(dcp_size=2, interleave=4)
    kv = random_kv(model)
    writer = Grouping(WRITER.groups, (16, 32, 32, 32))
    reader = Grouping(READERS[1].groups, (8, 24, 96, 8))
    write(engine(memory, model, writer, 4, context), kv)
    read(engine(memory, model, reader, 4, context), kv)


@pytest.mark.parametrize(
    ("writer", "reader"), [*itertools.permutations((NO_CONTEXT, Context(1, 2), Context(1, 4)), 2)]
)
def test_engines_that_deal_tokens_out_differently_do_not_see_each_others_cells(
    memory: str, writer: Context, reader: Context
) -> None:
    model = (Layers("", 3, 1, 16),)
    grouping = Grouping(((0, 0, 0),), (32,))
    kv = random_kv(model)
    write(engine(memory, model, grouping, 4, writer), kv)
    for rank in engine(memory, model, grouping, 4, reader):
        results = rank.load()
        assert results.invalid_blocks == set(rank.tables[0])
        rank.check(tuple(torch.full_like(each, UNWRITTEN) for each in kv))
        rank.close()
