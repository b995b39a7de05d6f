"""The state that the parts of the controller share (pure)."""

from collections.abc import Collection
from dataclasses import dataclass, field

from vllm_kvpool.router.control.fleet import Fleet, Replica
from vllm_kvpool.router.control.overload import BlockLoad, Overload
from vllm_kvpool.router.control.placement import LoadTable, Totals
from vllm_kvpool.router.control.prefix_index import PoolIndex
from vllm_kvpool.router.control.rates import RateEstimator
from vllm_kvpool.router.control.requests import (
    WAITS,
    Phase,
    PromptPath,
    Request,
    RequestCounts,
    RequestId,
    RequestQueue,
    RequestSpec,
)
from vllm_kvpool.router.control.settings import Settings
from vllm_kvpool.router.control.states import HAS_BOUND, ReplicaId


@dataclass(slots=True)
class ControllerState:
    """Owned by the controller; `now` is the time of the event in hand."""

    settings: Settings
    rates: RateEstimator
    overload: Overload = field(default_factory=Overload)
    fleet: Fleet = field(default_factory=Fleet)
    table: LoadTable = field(init=False)
    queue: RequestQueue = field(default_factory=RequestQueue)
    """Prompts to be computed."""
    migration: RequestQueue = field(default_factory=RequestQueue)
    """Requests to be decoded, whose prompts are in the pool or need not be."""
    requests: dict[RequestId, Request] = field(default_factory=dict)
    pool: PoolIndex = field(default_factory=PoolIndex)
    counts: RequestCounts = field(default_factory=RequestCounts)
    now: float = 0.0

    def __post_init__(self) -> None:
        self.table = LoadTable(self.fleet, self.settings)

    def refresh(self) -> None:
        """Bring `table` up to the replicas as they are now."""
        if self.fleet.changed:
            self.table.refresh(self.overload.locked, is_collapsed=self.collapse() is not None)

    def totals(self, model: str = "") -> Totals:
        """Return the totals over the replicas that serve a model now, or all.

        `table` is up to date.
        """
        self.refresh()
        return self.table.totals(model)

    def enter(self, request: Request, phase: Phase, replica: Replica | None = None) -> None:
        """Move a request from where it is to where it is in a phase: a queue, or a replica.

        `replica` computes or decodes it, or will once it is loaded.
        """
        before = request.phase
        if before in WAITS:
            request.waited_s += self.now - request.began
            if before is Phase.QUEUED:
                self.queue.remove(request)
            elif before is Phase.HANDING:
                self.migration.remove(request)
            elif request.replica is not None:
                self.fleet[request.replica].work.bound.remove(request)
        request.phase, request.began = phase, self.now
        request.replica = None if replica is None else replica.replica_id
        if phase is Phase.QUEUED:
            self.queue.append(request)
        elif phase is Phase.HANDING:
            self.migration.append(request)

    def watch_pool(self) -> None:
        """Note whether the pool is up, by the engines' latest metrics."""
        if self.pool.set_up(is_up=self._says_pool_is_up()):
            self.fleet.changed.update(self.fleet)  # which replicas decode depends on the pool
            self.fleet.version += 1

    def _says_pool_is_up(self) -> bool:
        """Return False if every replica with recent metrics says that the pool is down."""
        is_any_fresh = False
        for each in self.fleet:
            if self.is_stale(each):
                continue
            if each.sample.pool_is_up:
                return True
            is_any_fresh = True
        return not is_any_fresh

    def collapse(self) -> PromptPath | None:
        """Return why all prompts are computed where they are decoded; None if they are not."""
        if not self.settings.hands_over:
            return PromptPath.SWITCHED_OFF
        if not self.pool.is_up:
            return PromptPath.POOL_DOWN
        if not (self.fleet.prefillers() and self.fleet.decoders()):
            return PromptPath.NO_PREFILL_REPLICA
        if self.fleet.handovers.is_any_apart and not self.fleet.sharing():
            return PromptPath.NO_SHARED_STORE
        return None

    def tokens_of(self, ask: RequestSpec) -> int:
        """Return the tokens that a request will take at a replica.

        They are its prompt and the expected answer.
        """
        usual_tokens = round(self.rates.current(self.now).output_tokens_per_request) or 1
        output = min(ask.max_output_tokens, usual_tokens)
        return ask.prompt_tokens + ask.num_sequences * output

    def loads(self) -> Collection[dict[ReplicaId, BlockLoad]]:
        """Return the load of each model group, over decoders whose capacity is known."""
        groups: dict[frozenset[str], dict[ReplicaId, BlockLoad]] = {}
        of_models: dict[frozenset[str], dict[ReplicaId, BlockLoad]] = {}
        fresh_from = self.now - self.settings.stale_after_s
        for each in self.fleet.decoders():
            sample, used = each.sample, each.work.committed_blocks
            if not sample.total_blocks:
                continue
            if sample.used_blocks > used and (each.sampled_at or 0.0) >= fresh_from:
                used = sample.used_blocks
            group = of_models.get(each.models)
            if group is None:
                group = groups.setdefault(self.fleet.group_of(each.models), {})
                of_models[each.models] = group
            group[each.replica_id] = BlockLoad(used, sample.total_blocks)
        return groups.values()

    def backlog_tokens(self) -> int:
        """Return the prompt tokens that no replica computes yet.

        The prompt that a replica computes now does not wait.
        """
        bound = (each for replica in self.fleet.in_states(HAS_BOUND) for each in replica.work.bound)
        behind = (
            each.work.prefill_tokens - next(iter(each.work.prefills.values()))
            for each in self.fleet
            if each.work.prefills
        )
        return self.queue.uncached_tokens + sum(each.uncached for each in bound) + sum(behind)

    def is_stale(self, replica: Replica) -> bool:
        """Return True if a replica's metrics are too old, or have never come."""
        at = replica.sampled_at
        return at is None or self.now - at > self.settings.stale_after_s
