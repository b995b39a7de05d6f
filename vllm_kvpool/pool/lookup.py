"""How long the stored prefix of a request is, in few questions (pure).

A prefix is stored from its first chunk on, so the search asks for the first and the last chunk,
then narrows between them, `FANOUT` chunks a round: about log8 of the chunks in rounds, each of
which is one batched `exists`. Eviction can leave a hole that no question meets; loads verify.
"""

from collections.abc import Sequence

from vllm_kvpool.keys import CellKey, ContextRank, KeyMaker, Namespace, group_of, in_epoch
from vllm_kvpool.layout.topology import Topology
from vllm_kvpool.transfer.ops import HostChange

FANOUT = 7


class PrefixSearch:
    """Narrows [found, absent): chunks before `found` are taken as stored, `absent` is not."""

    def __init__(self, num_chunks: int) -> None:
        self.found = 0
        self._absent = num_chunks
        self._first_round = True

    @property
    def done(self) -> bool:
        return self.found >= self._absent

    def questions(self) -> tuple[int, ...]:
        """The chunk indices to ask for next, ascending; empty when the search is done."""
        if self.done:
            return ()
        low, high = self.found, self._absent
        if self._first_round:
            return (low, high - 1) if high - low > 1 else (low,)
        width = high - low
        if width <= FANOUT:
            return tuple(range(low, high))
        return tuple(low + width * i // (FANOUT + 1) for i in range(1, FANOUT + 1))

    def tell(self, questions: Sequence[int], present: Sequence[bool]) -> None:
        """Take the answers to `questions`."""
        self._first_round = False
        for chunk, there in zip(questions, present, strict=True):
            if not there:
                self._absent = chunk
                return
            self.found = chunk + 1


class HostMirror:
    """Which chunks each rank has in host memory, as far as the ranks have told."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._ranks_of: dict[str, set[int]] = {}  # group -> ranks

    def apply(self, rank: int, change: HostChange) -> None:
        for group in change.added:
            self._ranks_of.setdefault(group, set()).add(rank)
        for group in change.removed:
            ranks = self._ranks_of.get(group)
            if ranks is not None:
                ranks.discard(rank)
                if not ranks:
                    del self._ranks_of[group]

    def has(self, group: str) -> bool:
        """Whether every rank has the whole chunk."""
        return len(self._ranks_of.get(group, ())) == self.num_ranks > 0

    def clear(self) -> None:
        self._ranks_of.clear()


class CellNames:
    """The keys of every cell of a chunk: all heads, all spans, all context-parallel ranks."""

    def __init__(self, namespace: Namespace, topology: Topology, context: ContextRank) -> None:
        self.namespace = namespace
        self._of = (topology, context)
        # All of a key but its hash is the same for every chunk.
        self._stems = tuple(
            KeyMaker(namespace, ContextRank(p, context.pcp_size, d, context.dcp_size)).stem(
                part, span
            )
            for p in range(context.pcp_size)
            for d in range(context.dcp_size)
            for span in topology.all_spans()
            for part in topology.all_parts()
        )

    def in_epoch(self, epoch: str) -> "CellNames":
        """The same cells where the weights are others."""
        return CellNames(in_epoch(self.namespace, epoch), *self._of) if epoch else self

    def group(self, chunk_hash: bytes) -> str:
        """What all of them are called together."""
        return group_of(self.namespace, chunk_hash.hex())

    @property
    def per_chunk(self) -> int:
        return len(self._stems)

    def of_chunk(self, chunk_hash: bytes) -> list[CellKey]:
        """Every key that must exist for the chunk to be a hit."""
        text = chunk_hash.hex()
        return [CellKey(stem + text) for stem in self._stems]
