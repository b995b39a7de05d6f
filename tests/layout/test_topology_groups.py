"""Kinds of layers and context parallelism: what each rank holds, and who writes it."""

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_kvpool.errors import ConfigError
from vllm_kvpool.identity.keys import ContextRank, HeadShard, LayerSpan, RankShard
from vllm_kvpool.layout.topology import (
    AttentionWindow,
    Context,
    LayerGroup,
    LocalCell,
    Piece,
    Topology,
    cells_of_rank,
)

WINDOW = AttentionWindow(sliding=64)


def kinds_of(
    full: tuple[tuple[int, int], ...],
    window: tuple[tuple[int, int], ...],
    *,
    tp_size: int = 2,
    span: int = 2,
    per_head: bool = True,
) -> tuple[LayerGroup, LayerGroup]:
    """Full attention of 4 heads, sliding windows of 2."""
    return (
        LayerGroup(Topology(4, tp_size, full, span, per_head, "full"), row_bytes=16),
        LayerGroup(
            Topology(2, tp_size, window, span, per_head, "window"), row_bytes=6, window=WINDOW
        ),
    )


# Layers of several kinds


def test_layers_are_counted_within_their_kind_and_found_behind_the_others() -> None:
    layer_groups = kinds_of(((0, 1), (1, 3)), ((0, 3), (3, 5)))
    cells = cells_of_rank(layer_groups, 1, 1, 0, (4, 4, 7, 7))
    assert [(c.shard, c.span, c.layer_start, c.layer_stop, c.row_bytes) for c in cells] == [
        (HeadShard(2), LayerSpan(1, 2, "full"), 0, 1, 16),
        (HeadShard(3), LayerSpan(1, 2, "full"), 0, 1, 16),
        (HeadShard(2), LayerSpan(2, 3, "full"), 1, 2, 16),
        (HeadShard(3), LayerSpan(2, 3, "full"), 1, 2, 16),
        (HeadShard(1), LayerSpan(3, 4, "window"), 2, 3, 6),
        (HeadShard(1), LayerSpan(4, 5, "window"), 3, 4, 6),
    ]
    assert [{piece.group for piece in cell.pieces} for cell in cells] == [{4}] * 4 + [{7}] * 2
    assert [cell.window for cell in cells] == [AttentionWindow()] * 4 + [WINDOW] * 2


@pytest.mark.parametrize(
    ("stage", "names"),
    [(0, {"full"}), (1, {"window"}), (2, {"full", "window"})],
)
def test_a_stage_may_hold_no_layer_of_a_kind(stage: int, names: set[str]) -> None:
    layer_groups = kinds_of(((0, 2), (2, 2), (2, 4)), ((0, 0), (0, 3), (3, 4)))
    cells = cells_of_rank(layer_groups, 0, stage)
    assert {cell.span.layer_group for cell in cells} == names
    layers = sum(
        stop - start
        for start, stop in (layer_group.topology.stages[stage] for layer_group in layer_groups)
    )
    rows = {layer for cell in cells for layer in range(cell.layer_start, cell.layer_stop)}
    assert rows == set(range(layers))


def test_a_stage_without_layers_has_no_spans() -> None:
    layer_groups = kinds_of(((0, 2), (2, 2), (2, 4)), ((0, 0), (0, 3), (3, 4)))
    assert [span.start for span in layer_groups[0].topology.all_spans()] == [0, 2]
    assert [(span.start, span.stop) for span in layer_groups[1].topology.all_spans()] == [
        (0, 2),
        (2, 3),
        (3, 4),
    ]


def test_where_all_layers_share_a_table_heads_are_moved_at_once() -> None:
    cell = LocalCell(RankShard(0, 1), LayerSpan(0, 3), 0, 4, 2, 5).with_groups((9, 9, 1, 1, 1))
    assert cell.pieces == (Piece(1, 2, 5, 0, 4, 0),)


def test_a_cell_is_cut_where_the_table_changes_head_by_head() -> None:
    cell = LocalCell(RankShard(0, 1), LayerSpan(0, 4), 1, 3, 1, 5).with_groups((9, 1, 1, 2, 1))
    assert cell.pieces == (
        Piece(1, 1, 3, 1, 2, 0),
        Piece(2, 3, 4, 1, 2, 2),
        Piece(1, 4, 5, 1, 2, 3),
        Piece(1, 1, 3, 2, 3, 4),
        Piece(2, 3, 4, 2, 3, 6),
        Piece(1, 4, 5, 2, 3, 7),
    )


@given(
    st.integers(0, 3),
    st.integers(1, 3),
    st.lists(st.integers(0, 3), min_size=1, max_size=7),
    st.integers(0, 6),
)
def test_pieces_are_the_cells_rows_in_order(
    first_head: int, num_heads: int, groups: list[int], skipped: int
) -> None:
    """Rows of a cell are ordered by head, then by layer, for any division into groups."""
    start = min(skipped, len(groups) - 1)
    whole = LocalCell(
        RankShard(0, 1),
        LayerSpan(0, len(groups) - start),
        first_head,
        first_head + num_heads,
        start,
        len(groups),
    )
    rows: dict[int, tuple[int, int, int]] = {}
    for piece in whole.with_groups(groups).pieces:
        row = piece.rows_before
        for head in range(piece.head_start, piece.head_stop):
            for layer in range(piece.layer_start, piece.layer_stop):
                assert row not in rows
                rows[row] = (head, layer, piece.group)
                row += 1
    assert [rows[row] for row in range(len(rows))] == [
        (head, layer, groups[layer])
        for head in range(first_head, first_head + num_heads)
        for layer in range(start, len(groups))
    ]


@st.composite
def models(draw: st.DrawFn) -> tuple[tuple[LayerGroup, ...], int, int]:
    """Kinds over the same parallelism; also its tensor and pipeline sizes."""
    tp_size = draw(st.sampled_from((1, 2, 4)))
    pp_size = draw(st.integers(1, 3))
    per_head = draw(st.booleans())
    context = Context(pcp_size=draw(st.integers(1, 2)))
    layer_groups = []
    for i in range(draw(st.integers(1, 3))):
        counts = draw(st.lists(st.integers(0, 4), min_size=pp_size, max_size=pp_size))
        if not sum(counts):
            counts[0] = 1
        edges = [0]
        for count in counts:
            edges.append(edges[-1] + count)
        heads = draw(
            st.sampled_from([h for h in (1, 2, 4, 8) if not (h % tp_size and tp_size % h)])
        )
        span = draw(st.integers(1, 5))
        topology = Topology(
            heads, tp_size, tuple(pairwise(edges)), span, per_head, f"k{i}", context
        )
        layer_groups.append(LayerGroup(topology, row_bytes=i + 1))
    return tuple(layer_groups), tp_size, pp_size


@given(models(), st.integers(0, 5))
def test_the_ranks_together_write_every_cell_of_every_kind_once(
    model: tuple[tuple[LayerGroup, ...], int, int], chunk: int
) -> None:
    layer_groups, tp_size, pp_size = model
    wanted = {
        (shard, span)
        for layer_group in layer_groups
        for shard in layer_group.topology.all_shards()
        for span in layer_group.topology.all_spans()
    }
    pcp_size = layer_groups[0].topology.context.pcp_size
    written: Counter[object] = Counter()
    for tp in range(tp_size):
        for pp in range(pp_size):
            for pcp in range(pcp_size):
                cells = cells_of_rank(layer_groups, tp, pp, pcp)
                written.update((c.shard, c.span) for c in cells if c.writes_chunk(chunk))
                layers = [
                    layer_group.topology.stages[pp][1] - layer_group.topology.stages[pp][0]
                    for layer_group in layer_groups
                ]
                rows = Counter(
                    (head, layer)
                    for cell in cells
                    for head in range(cell.head_start, cell.head_stop)
                    for layer in range(cell.layer_start, cell.layer_stop)
                )
                before = 0
                for layer_group, count in zip(layer_groups, layers, strict=True):
                    for layer in range(before, before + count):
                        for head in range(layer_group.topology.heads_per_rank):
                            assert rows.pop((head, layer)) == 1
                    before += count
                assert not rows
    assert written == dict.fromkeys(wanted, 1)


# Context parallelism


def slot_mapping(
    tokens: int, block_size: int, context: Context, dcp_rank: int
) -> Iterator[tuple[int, int]]:
    """(token, its place in the rank's blocks) as vLLM's slot mapping kernel computes them.

    vllm/v1/worker/gpu/block_table.py, `_compute_slot_mappings_kernel`.
    """
    virtual_block = block_size * context.dcp_size
    for token in range(tokens):
        offset = token % virtual_block
        if offset // context.interleave % context.dcp_size == dcp_rank:
            round_ = offset // (context.interleave * context.dcp_size)
            local = round_ * context.interleave + offset % context.interleave
            yield token, token // virtual_block * block_size + local


contexts = st.builds(
    Context, st.sampled_from((1, 2)), st.sampled_from((1, 2, 4)), st.sampled_from((1, 2, 16))
)


@given(contexts, st.integers(1, 4), st.integers(0, 300))
def test_a_part_holds_the_tokens_that_the_engine_deals_to_it(
    context: Context, rounds_per_block: int, tokens: int
) -> None:
    """A rank stores its tokens without gaps, so a token's place follows from a count."""
    block_size = rounds_per_block * context.interleave
    everywhere: list[int] = []
    for rank in context.all_ranks():
        mapped = list(slot_mapping(tokens, block_size, context, rank.dcp_rank))
        assert [place for _, place in mapped] == list(range(len(mapped)))
        assert context.held(rank, tokens) == len(mapped)
        for token, place in mapped:
            assert context.held(rank, token) == place
        everywhere += [token for token, _ in mapped]
    assert sorted(everywhere) == list(range(tokens))


@given(contexts, st.integers(1, 5), st.integers(0, 6))
def test_every_part_has_as_much_of_a_chunk(context: Context, rounds: int, chunk: int) -> None:
    chunk_tokens = rounds * context.interleave * context.dcp_size
    for rank in context.all_ranks():
        held = [context.held(rank, n * chunk_tokens) for n in (chunk, chunk + 1)]
        assert held == [n * chunk_tokens // context.dcp_size for n in (chunk, chunk + 1)]


@pytest.mark.parametrize(
    ("tp_size", "pcp_size", "dcp_size"),
    [(4, 1, 2), (4, 1, 4), (2, 2, 2), (2, 2, 4), (4, 2, 2), (1, 4, 2), (8, 2, 4), (2, 4, 2)],
)
def test_ranks_are_numbered_as_the_engine_groups_them(
    tp_size: int, pcp_size: int, dcp_size: int
) -> None:
    """Groups of decode context parallelism, made as in vllm/distributed/parallel_state.py."""
    context = Context(pcp_size, dcp_size)
    all_ranks = torch.arange(tp_size * pcp_size).reshape(1, 1, 1, pcp_size, tp_size)
    groups = all_ranks.transpose(-1, -2).reshape(-1, dcp_size).unbind(0)
    for group in groups:
        for dcp_rank, rank in enumerate(group.tolist()):
            pcp_rank, tp_rank = divmod(rank, tp_size)
            assert context.rank(tp_rank, pcp_rank) == ContextRank(dcp_rank, dcp_size)
    assert context.all_ranks() == tuple(ContextRank(d, dcp_size) for d in range(dcp_size))


@st.composite
def dealt_topologies(draw: st.DrawFn) -> Topology:
    heads = draw(st.sampled_from((1, 2, 4)))
    tp_size = draw(st.sampled_from((1, 2, 4, 8)))
    pcp_size = draw(st.sampled_from((1, 2, 4)))
    shared_by = max(1, tp_size // heads) * pcp_size
    dcp_size = draw(st.sampled_from([n for n in (1, 2, 4, 8) if shared_by % n == 0]))
    return Topology(
        heads, tp_size, ((0, 2),), 2, draw(st.booleans()), "", Context(pcp_size, dcp_size)
    )


@given(dealt_topologies())
def test_each_part_of_each_chunk_has_one_writer(topology: Topology) -> None:
    """Ranks of tensor, prefill context and decode context parallelism all count."""
    context = topology.context
    wanted = {
        (shard, rank, span)
        for shard in topology.all_shards()
        for rank in context.all_ranks()
        for span in topology.all_spans()
    }
    for chunk in range(9):
        written = Counter(
            (cell.shard, context.rank(tp, pcp), cell.span)
            for tp in range(topology.tp_size)
            for pcp in range(context.pcp_size)
            for cell in topology.local_cells(tp, 0, 8, pcp_rank=pcp)
            if cell.writes_chunk(chunk)
        )
        assert written == dict.fromkeys(wanted, 1)


@pytest.mark.parametrize(
    ("heads", "tp_size", "pcp_size", "dcp_size", "shared_by"),
    [(4, 4, 1, 2, 1), (4, 8, 1, 4, 2), (8, 2, 1, 2, 1), (4, 2, 2, 4, 2), (1, 2, 1, 4, 2)],
)
def test_dealing_to_ranks_of_other_heads_is_refused(
    heads: int, tp_size: int, pcp_size: int, dcp_size: int, shared_by: int
) -> None:
    with pytest.raises(ConfigError, match=f"over {dcp_size} ranks .* here {shared_by} do"):
        Topology(heads, tp_size, ((0, 1),), 1, context=Context(pcp_size, dcp_size))


# How far layers look back


@given(st.integers(0, 1000))
def test_whole_attention_reads_everything(computed: int) -> None:
    assert AttentionWindow().is_full
    assert AttentionWindow().first_read(computed) == 0


@given(
    st.one_of(
        st.builds(AttentionWindow, sliding=st.integers(1, 99)),
        st.builds(AttentionWindow, local=st.integers(1, 99)),
    ),
    st.integers(0, 300),
    st.integers(0, 300),
)
def test_what_is_not_read_any_more_is_never_read_again(
    window: AttentionWindow, one: int, more: int
) -> None:
    assert not window.is_full
    assert window.first_read(one) <= window.first_read(one + more)
    assert window.first_read(one) <= one
