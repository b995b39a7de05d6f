"""Facts about a model and its engine, and the place of a rank in it (pure)."""

from dataclasses import dataclass

from vllm_kvpool.identity.keys import Namespace
from vllm_kvpool.layout.topology import Context, KVCacheGroup, LayerGroup


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Facts about the model and its engine that scheduler and workers share."""

    namespace: Namespace
    """Empty in a worker, which is sent it later (`WorkerPart.use_namespace`)."""
    layer_groups: tuple[LayerGroup, ...]
    groups: tuple[KVCacheGroup, ...]
    num_blocks: int
    num_ranks: int
    loads: bool = True  # False where the engine does not survive a failed load
    stops_at_first: bool = False  # a request without blocks holds up those behind it
    in_lockstep: bool = False  # data-parallel engines step together: one that waits holds up all
    max_drafted_tokens: int | None = None
    """The drafter computes nothing in a step in which a request comes to have more tokens."""

    @property
    def lookahead(self) -> int:
        """The largest of the layers."""
        return max(layer_group.lookahead for layer_group in self.layer_groups)

    @property
    def context(self) -> Context:
        """Context parallelism, which is the same for all layer groups."""
        return self.layer_groups[0].topology.context

    @property
    def has_ends(self) -> bool:
        """True if a prompt's end can be stored: each rank has a row for each token of a chunk."""
        return self.context.dcp_size == 1 and not any(
            each.is_state or each.tail_tokens or each.tokens_per_row > 1
            for each in self.layer_groups
        )

    @property
    def cells_per_chunk(self) -> int:
        """The number of cells in a chunk of the whole model."""
        return sum(
            len(layer_group.topology.all_shards()) * len(layer_group.topology.all_spans())
            for layer_group in self.layer_groups
        )


@dataclass(frozen=True, slots=True)
class RankPlace:
    """The place of a worker among its engine's ranks."""

    tp_rank: int
    pp_rank: int
    rank: int
    pcp_rank: int = 0
    dp_rank: int = 0
    ranks_on_host: int = 1  # workers that are configured alike, this one included, as far as known

    def number(self, num_ranks: int) -> int:
        """Return the worker's number in all data-parallel engines of `num_ranks` ranks each.

        It keeps their files apart, since these engines are configured alike.
        """
        return self.dp_rank * num_ranks + self.rank
