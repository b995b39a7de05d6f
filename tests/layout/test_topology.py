"""The cells of each rank: together the ranks hold all, and one rank writes each cell of a chunk."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_kvpool.errors import ConfigError
from vllm_kvpool.identity.keys import HeadShard, LayerSpan, RankShard
from vllm_kvpool.layout.topology import (
    MAX_DEFAULT_CELL_BYTES,
    Context,
    LayerGroup,
    LocalCell,
    ReplicaRank,
    Topology,
    cells_of_rank,
    cut_layers,
    default_layer_span,
    state_stride,
)

TP_SIZES = (1, 2, 4, 8, 16)
HEADS = (1, 2, 8)
STAGES = (
    ((0, 8),),
    ((0, 4), (4, 8)),
    ((0, 3), (3, 8)),  # the boundary is not one of a span
    ((0, 2), (2, 4), (4, 6), (6, 8)),
    ((0, 1), (1, 2), (2, 8)),
)
NUM_CHUNKS = 17


def ranks(topology: Topology) -> list[tuple[int, int]]:
    return [(tp, pp) for tp in range(topology.tp_size) for pp in range(len(topology.stages))]


def check_cover(topology: Topology) -> None:
    """Every cell of a chunk is held by as many ranks as there are replicas, and written once."""
    wanted = {(shard, span) for shard in topology.all_shards() for span in topology.all_spans()}
    held = Counter(
        (cell.shard, cell.span)
        for tp, pp in ranks(topology)
        for cell in topology.local_cells(tp, pp)
    )
    assert held == dict.fromkeys(wanted, topology.replicas)
    for chunk in range(NUM_CHUNKS):
        written = Counter(
            (cell.shard, cell.span)
            for tp, pp in ranks(topology)
            for cell in topology.local_cells(tp, pp)
            if cell.writes_chunk(chunk)
        )
        assert written == dict.fromkeys(wanted, 1)


def check_places(topology: Topology) -> None:
    """A cell's local indices are its global ones, counted from where the rank begins."""
    for tp, pp in ranks(topology):
        start, stop = topology.stages[pp]
        rows = [
            (head, layer)
            for cell in topology.local_cells(tp, pp)
            for head in range(cell.head_start, cell.head_stop)
            for layer in range(cell.layer_start, cell.layer_stop)
        ]
        every = {(h, n) for h in range(topology.heads_per_rank) for n in range(stop - start)}
        assert len(rows) == len(set(rows))
        assert set(rows) == every
        for cell in topology.local_cells(tp, pp):
            assert (cell.span.start, cell.span.stop) == (
                start + cell.layer_start,
                start + cell.layer_stop,
            )
            if isinstance(cell.shard, HeadShard):
                assert cell.shard.head == topology.first_head(tp) + cell.head_start


@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize("heads", HEADS)
def test_no_tensor_parallel_size_changes_the_names(
    heads: int, stages: tuple[tuple[int, int], ...]
) -> None:
    names = {
        (Topology(heads, tp, stages, 2).all_shards(), Topology(heads, tp, stages, 2).all_spans())
        for tp in TP_SIZES
    }
    assert len(names) == 1


def test_stages_that_end_with_a_span_share_their_names() -> None:
    spans = {Topology(2, 1, stages, 2).all_spans() for stages in (STAGES[0], STAGES[1], STAGES[3])}
    assert len(spans) == 1
    assert Topology(2, 1, STAGES[2], 2).all_spans() not in spans


def test_replicas_take_turns() -> None:
    topology = Topology(2, 8, ((0, 1),), 1)
    assert topology.replicas == 4
    assert [topology.first_head(rank) for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    cells = [topology.local_cells(rank, 0)[0] for rank in range(8)]
    writers = [[r for r in range(8) if cells[r].writes_chunk(chunk)] for chunk in range(5)]
    assert writers == [[0, 4], [1, 5], [2, 6], [3, 7], [0, 4]]


@given(
    replicas=st.sampled_from([2, 4, 8]),
    pcp_size=st.sampled_from([1, 2]),
    hosts=st.lists(st.integers(0, 2), min_size=16, max_size=16),
    chunk=st.integers(0, 40),
)
def test_one_replica_of_each_host_fetches_a_chunk(
    replicas: int, pcp_size: int, hosts: list[int], chunk: int
) -> None:
    """The chunk's writer fetches it, if it is on the host. All replicas agree on the fetcher."""
    topology = Topology(1, replicas, ((0, 1),), 1, context=Context(pcp_size=pcp_size))
    ranks = [ReplicaRank(tp, pcp) for tp in range(replicas) for pcp in range(pcp_size)]
    host_of = dict(zip(ranks, hosts, strict=False))
    cells = {
        each: topology.local_cells(each.tp_rank, 0, pcp_rank=each.pcp_rank)[0] for each in ranks
    }
    for host in set(host_of.values()):
        here = {each for each in ranks if host_of[each] == host}
        answers = {cells[each].fetchers(here) for each in here}
        assert len(answers) == 1, "all agree"
        [fetchers] = answers
        if len(here) == 1:
            assert not fetchers, "there is nobody to share with"
            continue
        fetcher = fetchers[chunk % len(fetchers)]
        assert fetcher in here
        assert all(each == fetcher for each in here if cells[each].writes_chunk(chunk))
        counts = Counter(fetchers).values()
        assert set(fetchers) == here
        assert max(counts) - min(counts) <= 1, "none has more to do than another"


def test_a_cell_per_rank_names_the_distinct_ranks() -> None:
    topology = Topology(8, 4, ((0, 4),), 2, per_head=False)
    assert topology.all_shards() == tuple(RankShard(r, 4) for r in range(4))
    first, second = LayerSpan(0, 2), LayerSpan(2, 4)
    assert topology.local_cells(3, 0) == (
        LocalCell(RankShard(3, 4), first, 0, 2, 0, 2),
        LocalCell(RankShard(3, 4), second, 0, 2, 2, 4),
    )
    replicated = Topology(2, 8, ((0, 4),), 2, per_head=False)
    assert replicated.all_shards() == (RankShard(0, 2), RankShard(1, 2))
    assert replicated.local_cells(5, 0)[0].shard == RankShard(1, 2)


def test_cells_come_span_by_span_head_by_head() -> None:
    topology = Topology(4, 2, ((0, 2), (2, 4)), 1)
    a, b = LayerSpan(2, 3), LayerSpan(3, 4)
    assert topology.local_cells(1, 1) == (
        LocalCell(HeadShard(2), a, 0, 1, 0, 1),
        LocalCell(HeadShard(3), a, 1, 2, 0, 1),
        LocalCell(HeadShard(2), b, 0, 1, 1, 2),
        LocalCell(HeadShard(3), b, 1, 2, 1, 2),
    )


def test_a_cells_payload_is_its_heads_layers_tokens_and_rows() -> None:
    cell = LocalCell(RankShard(0, 1), LayerSpan(0, 3), 0, 2, 0, 3, row_bytes=10)
    assert cell.payload_bytes(chunk_tokens=16) == 2 * 3 * 16 * 10
    state = replace(cell, is_state=True)
    assert state.payload_bytes(chunk_tokens=16) == 2 * 3 * 10


@pytest.mark.parametrize("per_head", [True, False])
def test_a_cell_of_a_state_has_one_row_a_layer(per_head: bool) -> None:
    group = LayerGroup(Topology(4, 2, ((0, 3),), 2, per_head), row_bytes=10, is_state=True)
    span = LayerSpan(0, 2)
    heads = 1 if per_head else 2
    assert group.payload_bytes(span, chunk_tokens=16) == heads * 2 * 10
    cells = cells_of_rank([group], 0, 0)
    assert all(cell.is_state for cell in cells)
    assert {cell.payload_bytes(16) for cell in cells if len(cell.span) == 2} == {heads * 2 * 10}


@pytest.mark.parametrize(("heads", "tp"), [(8, 3), (2, 3), (3, 2), (6, 4), (4, 6)])
def test_heads_that_cannot_be_cut_evenly_are_refused(heads: int, tp: int) -> None:
    with pytest.raises(ConfigError, match=f"{heads} KV heads .* size {tp}"):
        Topology(heads, tp, ((0, 1),), 1)


@pytest.mark.parametrize("stages", [((1, 2),), ((0, 2), (3, 4)), ((0, 2), (1, 4))])
def test_stages_must_join(stages: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(AssertionError):
        Topology(1, 1, stages, 1)


@pytest.mark.parametrize(
    ("start", "stop", "layer_span", "edges"),
    [
        (0, 8, 4, [0, 4, 8]),
        (0, 7, 4, [0, 4, 7]),
        (3, 8, 4, [3, 4, 8]),
        (3, 4, 4, [3, 4]),
        (5, 6, 4, [5, 6]),
        (4, 8, 4, [4, 8]),
        (0, 3, 8, [0, 3]),
        (2, 5, 1, [2, 3, 4, 5]),
    ],
)
def test_spans_are_counted_from_layer_zero_and_cut_at_boundaries(
    start: int, stop: int, layer_span: int, edges: list[int]
) -> None:
    spans = cut_layers(start, stop, layer_span, "kind")
    assert spans == tuple(LayerSpan(a, b, "kind") for a, b in pairwise(edges))


MIB = 1 << 20


@pytest.mark.parametrize(
    ("layers", "row_bytes", "chunk_tokens", "span"),
    [
        (1, 1, 256, 1),
        (4, 512, 256, 1),
        (32, 512, 256, 8),
        (33, 512, 256, 9),
        (80, 512, 256, 20),
        (80, 1024, 256, 10),  # 20 layers would be 5 MiB
        (64, 1024, 256, 16),  # 4 MiB exactly
        (61, 1152, 256, 8),
        (36, 4096, 256, 3),  # 9 -> 5 -> 3
        (8, 8 * MIB, 256, 1),
    ],
)
def test_the_default_span_is_a_quarter_or_what_fits(
    layers: int, row_bytes: int, chunk_tokens: int, span: int
) -> None:
    assert default_layer_span(layers, row_bytes, chunk_tokens) == span


@given(st.integers(1, 200), st.integers(1, 1 << 16), st.integers(16, 4096))
def test_a_default_cell_is_bounded(layers: int, row_bytes: int, chunk_tokens: int) -> None:
    span = default_layer_span(layers, row_bytes, chunk_tokens)
    assert 1 <= span <= -(-layers // 4)
    assert span == 1 or span * row_bytes * chunk_tokens <= MAX_DEFAULT_CELL_BYTES


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    heads = draw(st.integers(1, 8))
    factor = draw(st.integers(1, 24 // heads))
    divisors = [n for n in range(1, heads + 1) if heads % n == 0]
    tp = heads * factor if draw(st.booleans()) else draw(st.sampled_from(divisors))
    edges = [0, *sorted(draw(st.sets(st.integers(1, 12), min_size=1, max_size=4)))]
    stages = tuple(pairwise(edges))
    return Topology(heads, tp, stages, draw(st.integers(1, 13)), draw(st.booleans()))


@given(topologies())
def test_any_topology_is_covered_once(topology: Topology) -> None:
    check_cover(topology)
    check_places(topology)
    layers = topology.stages[-1][1]
    covered = [layer for s in topology.all_spans() for layer in range(s.start, s.stop)]
    assert covered == list(range(layers))
    assert all(len(span) <= topology.layer_span for span in topology.all_spans())


@pytest.mark.parametrize(
    ("state_bytes", "row_bytes", "step", "stride"),
    [
        (64, 16, 32, 32),  # a state is four tokens of attention
        (16 * 32, 16, 32, 32),
        (16 * 32 + 1, 16, 32, 64),
        (16 * 1000, 16, 96, 1056),
        (64, 0, 96, 2112),  # without attention
    ],
)
def test_states_of_an_answer_take_no_more_room_than_its_attention(
    state_bytes: int, row_bytes: int, step: int, stride: int
) -> None:
    topology = Topology(2, 1, ((0, 3),), 1)
    attention = [LayerGroup(topology, row_bytes)] if row_bytes else []
    states = LayerGroup(replace(topology, layer_group="state"), state_bytes, is_state=True)
    assert state_stride([*attention, states], 32, step) == stride
