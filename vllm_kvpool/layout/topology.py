"""The cells that exist, and those that a rank reads and writes (pure).

The only place that reasons about parallelism. With `heads` KV heads in the whole model:

1. heads >= TP (and TP divides heads): rank r holds heads [r*heads/TP, (r+1)*heads/TP).
2. heads < TP (and heads divides TP): TP/heads consecutive ranks hold the same head. These replicas
   take turns by chunk index: one writes the chunk, one on each host fetches it (`fetchers`).
3. MLA is case 2 with one head, the latent.

Units of a recurrent state (`states.py`) are as heads in case 1; one held whole by all is case 3.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, groupby, pairwise
from typing import NamedTuple

from vllm_kvpool.errors import ConfigError
from vllm_kvpool.identity.keys import ContextRank, HeadShard, LayerSpan, RankShard

DEFAULT_SPAN_PIECES = 4
MAX_DEFAULT_CELL_BYTES = 4 << 20
STATE_TOKENS = 2048  # between the states of an answer, in a model without attention


def default_layer_span(num_layers: int, row_bytes: int, chunk_tokens: int) -> int:
    """Return ceil(layers / 4), halved (rounded up) while a one-head cell exceeds 4 MiB."""
    span = -(-num_layers // DEFAULT_SPAN_PIECES)
    while span > 1 and span * chunk_tokens * row_bytes > MAX_DEFAULT_CELL_BYTES:
        span = -(-span // 2)
    return span


def cut_layers(
    start: int, stop: int, layer_span: int, layer_group: str = ""
) -> tuple[LayerSpan, ...]:
    """Return the spans of layers [start, stop) of a layer group, cut at multiples of `layer_span`.

    So the spans of all pipeline stages have the same bounds, but for short ones at their ends.
    """
    if start == stop:  # a pipeline stage may hold no layer of a group
        return ()
    edges = [start, *range((start // layer_span + 1) * layer_span, stop, layer_span), stop]
    return tuple(LayerSpan(a, b, layer_group) for a, b in pairwise(edges))


@dataclass(frozen=True, slots=True)
class Context:
    """The tokens of a request that a rank holds under context parallelism.

    Decode context parallelism (DCP) deals tokens out in turn, `interleave` to each rank. Ranks that
    differ only in prefill context parallelism (PCP) hold the same KV: they are replicas, and keys
    do not name them.
    """

    pcp_size: int = 1
    dcp_size: int = 1
    interleave: int = 1

    def rank(self, tp_rank: int, pcp_rank: int) -> ContextRank:
        """Return the part that a rank holds, as keys name it.

        A DCP group takes in PCP ranks first, then TP ranks.
        """
        dcp_rank = (tp_rank * self.pcp_size + pcp_rank) % self.dcp_size
        return ContextRank(dcp_rank, self.dcp_size)

    def all_ranks(self) -> tuple[ContextRank, ...]:
        """Return all parts of a complete chunk."""
        return tuple(ContextRank(d, self.dcp_size) for d in range(self.dcp_size))

    def held(self, rank: ContextRank, tokens: int) -> int:
        """Return how many of a request's first `tokens` tokens a part has."""
        rounds, rest = divmod(tokens, self.interleave * self.dcp_size)
        own = rest - rank.dcp_rank * self.interleave
        return rounds * self.interleave + min(max(own, 0), self.interleave)


NO_CONTEXT = Context()


@dataclass(frozen=True, slots=True)
class AttentionWindow:
    """The earlier tokens that an attention layer reads: all, unless one of the fields is set.

    `sliding` is the window in tokens, the current one included (sliding window attention); `local`
    the length of an attention chunk (chunked local attention).
    """

    sliding: int = 0
    local: int = 0

    @property
    def is_full(self) -> bool:
        """True if the layer reads all earlier tokens."""
        return not (self.sliding or self.local)

    def first_read(self, computed: int) -> int:
        """Return the first token that computing token `computed` reads."""
        if self.sliding:
            return max(0, computed - self.sliding + 1)
        if self.local:
            return computed - computed % self.local
        return 0


FULL_ATTENTION = AttentionWindow()


class ReplicaRank(NamedTuple):
    """A rank of those in a pipeline stage that hold the same KV."""

    tp_rank: int
    pcp_rank: int


class Piece(NamedTuple):
    """A part of a cell whose layers share a block table; local indices, half open.

    `rows_before`: how many of the cell's rows, in chunks of tokens, come before it.
    """

    group: int
    layer_start: int
    layer_stop: int
    head_start: int
    head_stop: int
    rows_before: int


@dataclass(frozen=True, slots=True)
class LocalCell:
    """A cell that every chunk has, on this rank: the parts of its name, and its local indices.

    `row_bytes` is what one head in one layer has of `tokens_per_row` tokens; of a state
    (`is_state`) what one unit has there, for all tokens before a boundary. `tail_tokens`,
    `is_draft`, `lookahead` and `is_optional`: see `LayerGroup`. `replicas` are the ranks that hold
    the same cell, this one at `replica_index`; empty if it is the only one.
    """

    shard: HeadShard | RankShard
    span: LayerSpan
    head_start: int
    head_stop: int
    layer_start: int
    layer_stop: int
    row_bytes: int = 0
    replicas: tuple[ReplicaRank, ...] = ()
    replica_index: int = 0
    window: AttentionWindow = FULL_ATTENTION
    pieces: tuple[Piece, ...] = ()
    is_state: bool = False
    tokens_per_row: int = 1
    tail_tokens: int = 0
    is_draft: bool = False
    lookahead: int = 0
    is_optional: bool = False

    def rows(self, chunk_tokens: int) -> int:
        """Return the number of rows of a head in a layer."""
        return _rows(self, chunk_tokens)

    def payload_bytes(self, chunk_tokens: int) -> int:
        """Return the bytes of the cell's rows for a chunk of `chunk_tokens`, without header."""
        heads = self.head_stop - self.head_start
        layers = self.layer_stop - self.layer_start
        return heads * layers * self.rows(chunk_tokens) * self.row_bytes

    def writes_chunk(self, chunk_index: int) -> bool:
        """Return True if this rank writes a chunk: exactly one of the replicas does.

        It depends on the index only: ranks that asked the store and then decided would leave holes,
        since they ask at different times.
        """
        return not self.replicas or chunk_index % len(self.replicas) == self.replica_index

    def fetchers(self, on_this_host: Collection[ReplicaRank]) -> tuple[ReplicaRank, ...]:
        """Return the replicas on this host that fetch chunks for the others.

        Chunk i is fetched by the replica at i modulo the length. Empty without other replicas on
        this host.

        The writer of a chunk also fetches it, if it is on this host. `on_this_host` includes this
        rank and is the same on all of them.
        """
        here = [replica for replica in self.replicas if replica in on_this_host]
        if len(here) < 2:
            return ()
        instead = cycle(here)
        return tuple(each if each in here else next(instead) for each in self.replicas)

    def with_groups(self, groups: Sequence[int]) -> "LocalCell":
        """Return the same cell, cut where the block table changes.

        `groups` has one entry a layer.
        """
        layers = range(self.layer_start, self.layer_stop)
        runs = [list(run) for _, run in groupby(layers, key=lambda layer: groups[layer])]
        heads = range(self.head_start, self.head_stop)
        if len(runs) == 1:  # consecutive heads are moved at once
            pieces = [(runs[0], self.head_start, self.head_stop, 0)]
        else:
            pieces = [
                (run, head, head + 1, i * len(layers) + run[0] - self.layer_start)
                for i, head in enumerate(heads)
                for run in runs
            ]
        return replace(
            self,
            pieces=tuple(
                Piece(groups[run[0]], run[0], run[-1] + 1, first, stop, before)
                for run, first, stop, before in pieces
            ),
        )


@dataclass(frozen=True, slots=True)
class Topology:
    """The cells of a layer group under one engine's parallelism.

    `num_heads` counts the KV heads of the whole model; `stages` are the group's layers [start,
    stop) in each pipeline rank. Without `per_head` there is a cell for each distinct rank instead
    of each head.
    """

    num_heads: int
    tp_size: int
    stages: tuple[tuple[int, int], ...]
    layer_span: int
    per_head: bool = True
    layer_group: str = ""
    context: Context = NO_CONTEXT

    def __post_init__(self) -> None:
        if self.num_heads % self.tp_size and self.tp_size % self.num_heads:
            raise ConfigError(
                f"{self.num_heads} KV heads cannot be cut evenly over tensor-parallel size "
                f"{self.tp_size}; choose a size that divides the heads or is a multiple of them"
            )
        shared_by = self.replicas * self.context.pcp_size
        if shared_by % self.context.dcp_size:
            raise ConfigError(
                f"decode context parallelism over {self.context.dcp_size} ranks needs as many "
                f"ranks that hold the same KV heads; here {shared_by} do. Lower "
                "decode_context_parallel_size"
            )
        bounds = [0, *(stop for _, stop in self.stages)]
        assert [start for start, _ in self.stages] == bounds[:-1], self.stages

    @property
    def replicas(self) -> int:
        """The number of consecutive TP ranks that hold the same heads."""
        return max(1, self.tp_size // self.num_heads)

    @property
    def heads_per_rank(self) -> int:
        """KV heads of a rank: at least one, as ranks may share a head."""
        return max(1, self.num_heads // self.tp_size)

    def first_head(self, tp_rank: int) -> int:
        """Return the first global KV head of TP rank `tp_rank`."""
        return tp_rank // self.replicas * self.heads_per_rank

    def replicas_of(self, tp_rank: int, pcp_rank: int = 0) -> tuple[ReplicaRank, ...]:
        """Return the ranks that hold the same KV as this one, itself included."""
        first = tp_rank - tp_rank % self.replicas
        mine = self.context.rank(tp_rank, pcp_rank)
        return tuple(
            ReplicaRank(tp, pcp)
            for tp in range(first, first + self.replicas)
            for pcp in range(self.context.pcp_size)
            if self.context.rank(tp, pcp) == mine
        )

    def all_shards(self) -> tuple[HeadShard | RankShard, ...]:
        """Return all heads (or distinct ranks) of a complete chunk."""
        if self.per_head:
            return tuple(HeadShard(h) for h in range(self.num_heads))
        count = self.tp_size // self.replicas
        return tuple(RankShard(r, count) for r in range(count))

    def all_spans(self) -> tuple[LayerSpan, ...]:
        """Return all layer spans, of all pipeline stages, of a complete chunk."""
        return tuple(
            span
            for start, stop in self.stages
            for span in cut_layers(start, stop, self.layer_span, self.layer_group)
        )

    def local_cells(
        self,
        tp_rank: int,
        pp_rank: int,
        row_bytes: int = 0,
        *,
        pcp_rank: int = 0,
        layers_before: int = 0,
    ) -> tuple[LocalCell, ...]:
        """Return the cells of a chunk that this rank's pages hold, span by span, head by head.

        `layers_before`: how many layers of other groups come first in the rank's pages.
        """
        start, stop = self.stages[pp_rank]
        offset = layers_before - start
        heads = self.heads_per_rank
        first = self.first_head(tp_rank)
        replicas = self.replicas_of(tp_rank, pcp_rank)
        index = replicas.index(ReplicaRank(tp_rank, pcp_rank))
        if len(replicas) == 1:
            replicas = ()
        pieces: list[tuple[HeadShard | RankShard, int, int]]
        if self.per_head:
            pieces = [(HeadShard(first + i), i, i + 1) for i in range(heads)]
        else:
            rank = tp_rank // self.replicas
            pieces = [(RankShard(rank, self.tp_size // self.replicas), 0, heads)]
        return tuple(
            LocalCell(
                shard,
                span,
                a,
                b,
                span.start + offset,
                span.stop + offset,
                row_bytes,
                replicas,
                index,
            )
            for span in cut_layers(start, stop, self.layer_span, self.layer_group)
            for shard, a, b in pieces
        )


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that are alike: their topology, the length of their rows, their attention window.

    `layers` are the model's layers in the group, of all pipeline stages in order: each by its
    number, and that of its attention if a layer has several. Keys count layers within a group, so
    the namespace includes `layers`. Empty where there is no model. Layers with a recurrent state
    (`is_state`) have a row for each boundary and no window; others one for `tokens_per_row` tokens,
    which divide chunks and blocks. With `tail_tokens` a cell holds the last tokens of its chunk
    alone, as many as a hit that ends with the chunk needs of them; 0: all.

    `is_draft`: a drafter's layers. A row of theirs may depend on as many later tokens as
    `lookahead` says. So a cell holds the rows from `lookahead` tokens before its chunk to as many
    before the chunk's end: they depend on tokens up to the chunk's end alone, as its hash does.
    `is_optional`: a load fills rows of cells that are not stored with zeros, and a hit needs none.
    """

    topology: Topology
    row_bytes: int
    window: AttentionWindow = FULL_ATTENTION
    layers: tuple[tuple[int, ...], ...] = ()
    is_state: bool = False
    tokens_per_row: int = 1
    tail_tokens: int = 0
    is_draft: bool = False
    lookahead: int = 0
    is_optional: bool = False

    def __post_init__(self) -> None:
        assert len(self.layers) in (0, self.topology.stages[-1][1]), self

    @property
    def name(self) -> str:
        """The group's name in keys."""
        return self.topology.layer_group

    def payload_bytes(self, span: LayerSpan, chunk_tokens: int) -> int:
        """Return the bytes of a cell; `chunk_tokens` counts those of all context-parallel ranks."""
        heads = 1 if self.topology.per_head else self.topology.heads_per_rank
        tokens = chunk_tokens // self.topology.context.dcp_size
        return heads * len(span) * _rows(self, tokens) * self.row_bytes


def state_stride(layer_groups: Sequence[LayerGroup], chunk_tokens: int, step: int) -> int:
    """Return the distance, in tokens, at which the states of an answer are stored.

    A multiple of `step`. The states take at most as many bytes as the attention between them, or,
    in a model without attention, lie `STATE_TOKENS` apart.
    """
    state_bytes, chunk_bytes = (
        sum(
            group.payload_bytes(span, chunk_tokens) * len(group.topology.all_shards())
            for group in layer_groups
            if group.is_state is is_state
            for span in group.topology.all_spans()
        )
        for is_state in (True, False)
    )
    tokens = -(-chunk_tokens * state_bytes // chunk_bytes) if chunk_bytes else STATE_TOKENS
    return -(-tokens // step) * step


def _rows(of: LocalCell | LayerGroup, chunk_tokens: int) -> int:
    if of.is_state:
        return 1
    return (of.tail_tokens or chunk_tokens) // of.tokens_per_row


@dataclass(frozen=True, slots=True)
class KVCacheGroup:
    """A KV cache group of the engine: layers with a common block table.

    `block_size` counts the tokens of a block on all context-parallel ranks. The pool stores nothing
    of a group that is not `shared`. A block of a group with `is_state` holds the state at one
    boundary. `tail_tokens`: see `LayerGroup`; blocks divide them. `lookahead`: the largest of its
    layers.
    """

    block_size: int
    window: AttentionWindow = FULL_ATTENTION
    shared: bool = True
    is_state: bool = False
    tail_tokens: int = 0
    lookahead: int = 0


def cells_of_rank(
    layer_groups: Sequence[LayerGroup],
    tp_rank: int,
    pp_rank: int,
    pcp_rank: int = 0,
    groups: Sequence[int] = (),
) -> tuple[LocalCell, ...]:
    """Return the cells of a chunk that a rank's pages hold, layer group by layer group.

    `groups` is the block table of each of its layers, in the same order; empty: the first one of
    all.
    """
    cells: list[LocalCell] = []
    before = 0
    for layer_group in layer_groups:
        start, stop = layer_group.topology.stages[pp_rank]
        tables = groups or (0,) * (before + stop - start)
        local = layer_group.topology.local_cells(
            tp_rank, pp_rank, layer_group.row_bytes, pcp_rank=pcp_rank, layers_before=before
        )
        cells += [
            replace(
                cell,
                window=layer_group.window,
                is_state=layer_group.is_state,
                tokens_per_row=layer_group.tokens_per_row,
                tail_tokens=layer_group.tail_tokens,
                is_draft=layer_group.is_draft,
                lookahead=layer_group.lookahead,
                is_optional=layer_group.is_optional,
            ).with_groups(tables)
            for cell in local
        ]
        before += stop - start
    return tuple(cells)
