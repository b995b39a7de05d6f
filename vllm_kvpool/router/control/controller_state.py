"""The state that the parts of the controller share, and the actions of the present step (pure)."""

from collections import Counter, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from vllm_kvpool.router.control.events import Action
from vllm_kvpool.router.control.fleet import Fleet, Replica
from vllm_kvpool.router.control.overload import BlockLoad, Overload
from vllm_kvpool.router.control.placement import LoadTable, Totals
from vllm_kvpool.router.control.prefix_index import PrefixIndex, spans_of
from vllm_kvpool.router.control.rates import CounterRate, RateEstimator, Rates
from vllm_kvpool.router.control.requests import (
    WAITS,
    Ask,
    Phase,
    PromptPath,
    Request,
    RequestId,
    RequestQueue,
)
from vllm_kvpool.router.control.settings import Settings
from vllm_kvpool.router.control.states import HAS_BOUND, ReplicaId

MAX_WAITS = 1024
RATES_EVERY_S = 0.01
"""They are means of a minute: one more sample moves them little."""
RATE_WINDOW_S = 60.0
"""Window of arrival rates: in a shorter window a few long prompts look like another load."""


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
    pool: PrefixIndex = field(default_factory=PrefixIndex)
    """Beginnings of prompts that the pool should have."""
    counts: Counter[str] = field(default_factory=Counter)
    """Counts of requests by event, for the metrics."""
    refusals: Counter[int] = field(default_factory=Counter)
    """Requests refused, by HTTP status."""
    prompts: Counter[PromptPath] = field(default_factory=Counter)
    """Prompts given to be decoded for the first time, by where they are computed."""
    waits: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_WAITS))
    """Seconds from arrival to first token, of the requests that began last."""
    asked: CounterRate = field(default_factory=lambda: CounterRate(RATE_WINDOW_S))
    """Prompt tokens to be computed apart, of all that have arrived, those refused too."""
    handed: CounterRate = field(default_factory=lambda: CounterRate(RATE_WINDOW_S))
    """Prompt tokens of all that have been computed apart."""
    now: float = 0.0
    actions: list[Action] = field(default_factory=list)
    pool_is_up: bool = True
    _rates: Rates | None = None
    _rates_due: float = 0.0

    def __post_init__(self) -> None:
        self.table = LoadTable(self.fleet, self.settings)

    def refresh(self) -> None:
        """Bring `table` up to the replicas as they are now."""
        if self.fleet.changed:
            self.table.refresh(self.overload.locked, is_collapsed=self.collapse() is not None)

    def totals(self, model: str = "") -> Totals:
        """Over the replicas as they are now, that serve a model or all; `table` is up to date."""
        self.refresh()
        return self.table.totals(model)

    def begin(self, now: float) -> None:
        """A step begins."""
        self.now, self.actions = now, []

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
            self.fleet.version += 1

    def watch_pool(self) -> None:
        """Somebody has said something of it, or time has passed."""
        was_up, self.pool_is_up = self.pool_is_up, self._says_pool_is_up()
        if was_up and not self.pool_is_up:
            self.pool = PrefixIndex()  # it may come back empty
        if was_up is not self.pool_is_up:
            self.fleet.changed.update(self.fleet)  # who decodes depends on it

    def _says_pool_is_up(self) -> bool:
        """False only where all that have said something lately say that it is down."""
        says_down = False
        for each in self.fleet:
            if not self.is_stale(each):
                if each.sample.pool_is_up:
                    return True
                says_down = True
        return not says_down

    def snapshot(self) -> Rates:
        """The rates as measured up to now, or RATES_EVERY_S ago."""
        if self._rates is None or self.now >= self._rates_due:
            self._rates = self.rates.snapshot(self.now)
            self._rates_due = self.now + RATES_EVERY_S
        return self._rates

    def collapse(self) -> PromptPath | None:
        """Return why all prompts are computed where they are decoded; None if they are not."""
        if not self.settings.hands_over:
            return PromptPath.SWITCHED_OFF
        if not self.pool_is_up:
            return PromptPath.POOL_DOWN
        if not (self.fleet.prefillers() and self.fleet.decoders()):
            return PromptPath.NO_PREFILL_REPLICA
        if self.fleet.handovers.is_any_apart and not self.fleet.sharing():
            return PromptPath.NO_SHARED_STORE
        return None

    def servers(self) -> Sequence[Replica]:
        """Return the replicas that may be given a request whole, or to decode."""
        prefillers, decoders = self.fleet.prefillers(), self.fleet.decoders()
        if not prefillers or (decoders and self.collapse() is None):
            return decoders
        return (*decoders, *prefillers)

    def unknown_tokens(self, ask: Ask) -> int:
        """Prompt tokens that the pool is not known to have."""
        if not self.pool_is_up:
            return ask.prompt_tokens
        known = spans_of(self.pool.depth(ask.prefix)) * ask.prefix_tokens
        return max(0, ask.prompt_tokens - known)

    def tokens_of(self, ask: Ask) -> int:
        """Tokens that a request will take at a replica: its prompt, and the answer expected."""
        usual_tokens = round(self.snapshot().output_tokens_per_request) or 1
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
        """Prompt tokens that no replica computes yet: the prompt that each is at does not wait."""
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
