"""Outcomes of planned saves, over all ranks of the engine. Owned by the scheduler's thread.

A chunk counts as saved once every rank has said that a store has its cells, put by this save or
found there. Cells that host memory alone keeps make it a chunk in host memory, a cell that neither
has makes it unsaved. Without a host tier, a chunk that another save of this engine has on its way
is counted by that save alone.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vllm_kvpool.identity.chunk_hash import ChunkChain
from vllm_kvpool.metrics import MetricsRegistry, NameLabels
from vllm_kvpool.scheduler.messages import Stored
from vllm_kvpool.scheduler.request import PoolShape
from vllm_kvpool.transfer.ops import CellOutcome, JobId, SavePlan

END_WAIT_S = 2.0
"""Seconds in which an engine without requests makes steps to learn of its last save's end."""


HashedPrompt = tuple[ChunkChain, Sequence[int]]
"""The chain of a request, and its tokens, of which more may become known."""


@dataclass(slots=True)
class _OpenSave:
    plan: SavePlan
    prompt: HashedPrompt | None = None
    how: Stored | None = None  # of the ranks that have reported


class EndedSave(NamedTuple):
    """A save that has ended in every rank. `prompt`: of a save whose chunks get aliases."""

    plan: SavePlan
    how: Stored
    prompt: HashedPrompt | None = None


class SaveOutcomes:
    """Counts planned saves in the metrics by their outcome. `has_host`: ranks have a host tier."""

    def __init__(
        self,
        shape: PoolShape,
        registry: MetricsRegistry,
        clock: Callable[[], float],
        *,
        has_host: bool,
    ) -> None:
        self._shape = shape
        self._has_host = has_host
        self._registry = registry
        self._clock = clock
        self._tenants = NameLabels()
        self._open: dict[JobId, _OpenSave] = {}
        self._pending_chunks = 0
        self._planned_at = float("-inf")

    @property
    def is_awaited(self) -> bool:
        """True if a further step is likely to bring an outcome."""
        return bool(self._open) and self._clock() < self._planned_at + END_WAIT_S

    def planned(self, plan: SavePlan, prompt: HashedPrompt | None = None) -> None:
        """Count a planned save; `ended` follows for every rank, or `dropped`."""
        self._open[plan.job_id] = _OpenSave(plan, prompt)
        self._planned_at = self._clock()
        self._pend(len(plan.hashes))

    def ended(self, job_id: JobId, how: Stored) -> EndedSave | None:
        """Count the end of a save in `how.ranks` more ranks; return it after the last rank."""
        save = self._open.get(job_id)
        if save is None:  # dropped before
            return None
        save.how = how if save.how is None else save.how.merged(how)
        if save.how.ranks < self._shape.num_ranks:
            return None
        del self._open[job_id]
        self._pend(-len(save.plan.hashes))
        self._count(save.plan, save.how)
        return EndedSave(save.plan, save.how, save.prompt)

    def dropped(self, job_id: JobId) -> None:
        """Forget a save that is not sent to the ranks."""
        plan = self._open.pop(job_id).plan
        self._pend(-len(plan.hashes))
        if not plan.is_state:
            tokens = plan.end_tokens or self._shape.chunk_tokens
            self._count_lost({CellOutcome.CANCELLED.value: len(plan.hashes)}, tokens)

    def _pend(self, chunks: int) -> None:
        """Show that so many more chunks, or fewer, are in saves that have not ended."""
        self._pending_chunks += chunks
        tokens = self._pending_chunks * self._shape.chunk_tokens
        self._registry.set("kvpool_pending_save_tokens", tokens)

    def _count(self, plan: SavePlan, how: Stored) -> None:
        chunks = range(plan.first_chunk, plan.first_chunk + len(plan.hashes))
        lost = Counter(how.lost[chunk] for chunk in chunks if chunk in how.lost)
        stored = sum(chunk not in how.missed for chunk in chunks) if how.tiers else 0
        in_host = sum(chunk in how.missed and chunk not in how.lost for chunk in chunks)
        if not self._has_host:
            in_host = 0
        if plan.is_state:
            self._add("kvpool_saved_states", stored + in_host)
            return
        tokens = plan.end_tokens or self._shape.chunk_tokens
        self._add("kvpool_saved_tokens", stored * tokens)
        self._add("kvpool_host_saved_tokens", in_host * tokens)
        self._count_lost(lost, tokens)
        self.count_tenant(plan.tenant, "save", (stored + in_host) * tokens)

    def count_tenant(self, tenant: str, direction: str, tokens: int) -> None:
        """Count tokens of a request for its tenant, if it has one."""
        if tenant:
            labels = {"tenant": self._tenants.of(tenant), "direction": direction}
            self._add("kvpool_tenant_tokens", tokens, **labels)

    def _count_lost(self, chunks_by_reason: dict[str, int], tokens: int) -> None:
        """Count chunks of `tokens` tokens that were not saved."""
        for reason, chunks in chunks_by_reason.items():
            self._add("kvpool_unsaved_tokens", chunks * tokens, reason=reason)

    def _add(self, name: str, amount: float, **labels: str) -> None:
        if amount:
            self._registry.add(name, amount, **labels)
