"""Which cells exist, and which of them a rank reads and writes (pure integers).

The only place that reasons about parallelism. Cases, with `heads` KV heads in the whole model:

1. heads >= TP (and TP divides heads): rank r holds heads [r*heads/TP, (r+1)*heads/TP).
2. heads < TP (and heads divides TP): TP/heads consecutive ranks hold the same head; these
   replicas take turns writing, by chunk index, and all of them read.
3. MLA is case 2 with one head, the latent.

Layers are cut into spans of `layer_span` counted from layer 0, and again at every pipeline
boundary; the last span of a piece is short.
"""

from dataclasses import dataclass
from itertools import pairwise

from vllm_kvpool.errors import ConfigError
from vllm_kvpool.keys import HeadPart, LayerSpan, RankPart

DEFAULT_SPAN_PIECES = 4
MAX_DEFAULT_CELL_BYTES = 4 << 20


def default_layer_span(num_layers: int, row_bytes: int, chunk_tokens: int) -> int:
    """ceil(layers / 4), halved (rounded up) while a one-head cell exceeds 4 MiB."""
    span = -(-num_layers // DEFAULT_SPAN_PIECES)
    while span > 1 and span * chunk_tokens * row_bytes > MAX_DEFAULT_CELL_BYTES:
        span = -(-span // 2)
    return span


def cut_layers(start: int, stop: int, layer_span: int, kind: str = "") -> tuple[LayerSpan, ...]:
    """The spans of global layers [start, stop): cut at multiples of `layer_span` from layer 0."""
    edges = [start, *range((start // layer_span + 1) * layer_span, stop, layer_span), stop]
    return tuple(LayerSpan(a, b, kind) for a, b in pairwise(edges))


@dataclass(frozen=True, slots=True)
class LocalCell:
    """One cell of every chunk, as this rank sees it: its name parts and its local indices."""

    part: HeadPart | RankPart
    span: LayerSpan
    head_start: int
    head_stop: int
    layer_start: int
    layer_stop: int

    def payload_bytes(self, chunk_tokens: int, row_bytes: int) -> int:
        heads = self.head_stop - self.head_start
        return heads * (self.layer_stop - self.layer_start) * chunk_tokens * row_bytes


@dataclass(frozen=True, slots=True)
class Topology:
    """The cells of a model under one engine's parallelism.

    `num_heads` counts the KV heads of the whole model; `per_head` False stores one cell per
    distinct rank instead of one per head.
    """

    num_heads: int
    tp_size: int
    stages: tuple[tuple[int, int], ...]
    layer_span: int
    per_head: bool = True

    def __post_init__(self) -> None:
        if self.num_heads % self.tp_size and self.tp_size % self.num_heads:
            raise ConfigError(
                f"{self.num_heads} KV heads cannot be cut evenly over tensor-parallel size "
                f"{self.tp_size}; choose a size that divides the heads or is a multiple of them"
            )
        bounds = [0, *(stop for _, stop in self.stages)]
        assert [start for start, _ in self.stages] == bounds[:-1], self.stages

    @property
    def replicas(self) -> int:
        """How many consecutive ranks hold the same heads."""
        return max(1, self.tp_size // self.num_heads)

    @property
    def heads_per_rank(self) -> int:
        return max(1, self.num_heads // self.tp_size)

    def first_head(self, tp_rank: int) -> int:
        """The first global KV head that rank `tp_rank` holds."""
        return tp_rank // self.replicas * self.heads_per_rank

    def writes_chunk(self, tp_rank: int, chunk_index: int) -> bool:
        """Whether it is this rank's turn: exactly one of a head's replicas writes each chunk.

        The turn depends on nothing but the index; a rank that looked first and decided then
        would leave holes when two ranks look at different moments.
        """
        return chunk_index % self.replicas == tp_rank % self.replicas

    def all_parts(self) -> tuple[HeadPart | RankPart, ...]:
        """Every head (or distinct rank) that a complete chunk consists of."""
        if self.per_head:
            return tuple(HeadPart(h) for h in range(self.num_heads))
        count = self.tp_size // self.replicas
        return tuple(RankPart(r, count) for r in range(count))

    def all_spans(self) -> tuple[LayerSpan, ...]:
        """Every layer span, of all pipeline stages, that a complete chunk consists of."""
        return tuple(
            span for start, stop in self.stages for span in cut_layers(start, stop, self.layer_span)
        )

    def local_cells(self, tp_rank: int, pp_rank: int) -> tuple[LocalCell, ...]:
        """The cells of a chunk that this rank's pages hold, span by span, head by head."""
        start, stop = self.stages[pp_rank]
        heads = self.heads_per_rank
        first = self.first_head(tp_rank)
        pieces: list[tuple[HeadPart | RankPart, int, int]]
        if self.per_head:
            pieces = [(HeadPart(first + i), i, i + 1) for i in range(heads)]
        else:
            rank = tp_rank // self.replicas
            pieces = [(RankPart(rank, self.tp_size // self.replicas), 0, heads)]
        return tuple(
            LocalCell(part, span, a, b, span.start - start, span.stop - start)
            for span in cut_layers(start, stop, self.layer_span)
            for part, a, b in pieces
        )
