"""How an engine stands, into the registry and the trace (engine thread)."""

import logging
import time

from vllm_kvpool.metrics import MetricsRegistry
from vllm_kvpool.transfer.engine import Engine
from vllm_kvpool.transfer.ops import NO_STORE, LaneName
from vllm_kvpool.transfer.trace import Trace

logger = logging.getLogger(__name__)


class Gauges:
    """Levels, what the engine has counted since the last time, and tiers that go down or up."""

    def __init__(self, engine: Engine, registry: MetricsRegistry, trace: Trace) -> None:
        self._engine = engine
        self._registry = registry
        self._trace = trace
        self._up = [True] * len(engine.context.tiers)
        self._num_untraced = 0

    def update(self) -> None:
        context, registry, trace = self._engine.context, self._registry, self._trace
        slots = context.host_cache.slots
        registry.set("kvpool_slots", slots.num_free, state="free")
        read_by_stuck = len(self._engine.hung_calls.slots_read)
        quarantined = slots.num_quarantined + read_by_stuck
        registry.set("kvpool_slots", slots.num_held - read_by_stuck, state="held")
        registry.set("kvpool_slots", quarantined, state="quarantined")
        trace.counter("free slots", slots.num_free)
        for lane in context.scheduler.lanes.values():
            name = lane.key
            assert isinstance(name, LaneName)
            tier = NO_STORE.get(name.tier) or context.tiers[name.tier].name
            registry.set("kvpool_queue_cells", lane.num_ready, lane=name.kind.value, tier=tier)
            trace.counter(f"{name.kind.value} {tier}", lane.num_ready)
        context.fill(registry)
        self._say_what_changed()
        dropped = trace.dropped
        if dropped > self._num_untraced:
            registry.add("kvpool_trace_dropped", dropped - self._num_untraced)
        self._num_untraced = dropped

    def _say_what_changed(self) -> None:
        now = time.monotonic()
        for place, tier in enumerate(self._engine.context.tiers):
            up = not self._engine.context.breakers[place].is_open(now)
            if up != self._up[place]:
                self._up[place] = up
                self._trace.instant("tier up" if up else "tier down", tier=tier.name)
                what = (
                    "is asked again" if up else "fails; it is not asked until a later try succeeds"
                )
                logger.warning("kvpool: tier %s %s", tier.name, what)
