"""The scheduler part of the connector: what it consists of, opens and closes, in order.

Made, used and closed by the scheduler's thread.
"""

import logging
import math
from collections.abc import Callable, Sequence
from functools import partial

from vllm_kvpool.config import KVPoolConfig, KVRole
from vllm_kvpool.handover.consumer import NoticeClient
from vllm_kvpool.identity.keys import with_weights
from vllm_kvpool.layout.engine_shape import ModelShape
from vllm_kvpool.layout.topology import state_stride
from vllm_kvpool.metrics import MetricsRegistry, open_stats_file
from vllm_kvpool.network.allowed_peers import AllowedPeers
from vllm_kvpool.scheduler.aliases import Aliases
from vllm_kvpool.scheduler.blocks import HELD_SHARE, BlockPins, GroupTables
from vllm_kvpool.scheduler.lookup_service import LookupService
from vllm_kvpool.scheduler.pool_scheduler import PoolScheduler
from vllm_kvpool.scheduler.prefix_search import CellNames
from vllm_kvpool.scheduler.request import PoolShape
from vllm_kvpool.storage.contents.alias import alias_step
from vllm_kvpool.storage.guarded import CallTimeouts, GuardedStore
from vllm_kvpool.storage.open_tiers import encrypted_cells, open_tiers, tiers_in_words
from vllm_kvpool.storage.tiers import tier_specs
from vllm_kvpool.storage.url import StoreSpec, uses_device

logger = logging.getLogger(__name__)

PINNED_SHARE = 4  # at most a quarter of the engine's blocks wait for their gather
PROMISED_SHARE = 4  # at most a quarter waits for chunks that another engine has not stored yet
LOOKUP_CALL_S = 2.0  # a store that answers later counts as away for lookups

WatchArrivals = Callable[[Callable[[], None]], Callable[[], bool] | None]


def pool_shape(
    config: KVPoolConfig, model: ModelShape, *, has_host: bool, alias_step: int
) -> PoolShape:
    """Return the engine as the scheduler part sees it. `has_host`: workers have a host tier."""
    tables, chunk = GroupTables(model.groups), config.chunk_tokens
    least = sum(-(-(chunk + each.lookahead) // each.block_size) + 1 for each in model.groups)
    if tables.forgets:
        least *= HELD_SHARE  # a chunk can always be saved, whatever is held
    stride = 0
    if config.save_decode and tables.has_states:
        stride = state_stride(model.layer_groups, chunk, math.lcm(chunk, tables.block_size))
    return PoolShape(
        chunk_tokens=chunk,
        groups=model.groups,
        num_ranks=model.num_ranks,
        max_pinned_blocks=max(least, model.num_blocks // PINNED_SHARE),
        num_replicas=max(len(each.topology.replicas_of(0)) for each in model.layer_groups),
        prefetches=config.prefetch and has_host,
        loads=model.loads,
        stops_at_first=model.stops_at_first,
        in_lockstep=model.in_lockstep,
        has_ends=model.has_ends,
        alias_step=alias_step,
        state_stride=stride,
        has_drafts=any(layer_group.is_draft for layer_group in model.layer_groups),
        lookahead=model.lookahead,
        max_drafted_tokens=model.max_drafted_tokens,
        max_promised_blocks=model.num_blocks // PROMISED_SHARE,
    )


def open_aliases(
    config: KVPoolConfig,
    model: ModelShape,
    specs: Sequence[StoreSpec],
    stores: Sequence[GuardedStore],
    names: CellNames,
    answer_s: float,
) -> Aliases | None:
    """Return the aliases in the scheduler's stores; None if hits end with whole chunks.

    Reads may take `answer_s`. A store that takes none but a device's memory can have no aliases.
    """
    step = alias_step(config.alias_tokens, config.chunk_tokens)
    if step and not model.has_ends:
        logger.warning(
            "kvpool: alias_tokens has no effect: this model's hits end with whole chunks, since it "
            "has recurrent states, compressed rows or decode context parallelism"
        )
        return None
    tiers = [number for number, spec in enumerate(specs) if not uses_device(spec)]
    if not (step and tiers):
        return None
    encrypted = encrypted_cells(config, stores)
    return Aliases(
        *(stores, tiers, names, config.chunk_tokens, step, encrypted),
        answer_s=answer_s,
        on_hung=lambda tier: stores[tier].report_hung(limit_s=answer_s),
    )


class SchedulerPart:
    """The pool in the scheduler's process.

    Args:
        pins: holds blocks of the engine.
        rank: of this engine among those with data parallelism.
        enter_device: called first by threads that work for a store that uses a device.
        watch_arrivals: has a function called for all that the engine is sent, and returns whether
            anything of it waits; or None where that is not known.
    """

    def __init__(
        self,
        config: KVPoolConfig,
        role: KVRole,
        model: ModelShape,
        pins: BlockPins,
        rank: int = 0,
        first_weights_version: str = "",
        enter_device: Callable[[], None] = lambda: None,
        watch_arrivals: WatchArrivals = lambda on_arrival: None,
    ) -> None:
        self.registry = MetricsRegistry()
        specs = tier_specs(config)
        lookup_s = max(LOOKUP_CALL_S, config.lookup_timeout_ms / 1000)
        timeouts = CallTimeouts(call_s=config.call_timeout_s, answer_s=lookup_s)
        self._tiers = open_tiers(specs.stores, timeouts, segment=False, enter_device=enter_device)
        stores = self._tiers.stores
        self.tiers_in_words = tiers_in_words(specs, self._tiers)
        self.tiers = tuple(store.capabilities for store in stores)
        has_host = specs.host.nbytes > 0
        names = CellNames(model.namespace, model.layer_groups)
        aliases = open_aliases(config, model, specs.stores, stores, names, lookup_s)
        self._lookups = LookupService(
            stores,
            names,
            config.chunk_tokens,
            host_ranks=model.num_ranks if has_host else 0,
            block=GroupTables(model.groups).block_size,
            timeout_s=config.lookup_timeout_ms / 1000,
            tier_names=self._tiers.names,
            registry=self.registry,
            loses_cells=any(tier.loses_cells for tier in self.tiers),
            open_notices=partial(NoticeClient, AllowedPeers(config.allowed_peers), self.registry),
            aliases=aliases,
        )
        step = 0 if aliases is None else aliases.step
        self.scheduler = PoolScheduler(
            config,
            role,
            pool_shape(config, model, has_host=has_host, alias_step=step),
            self._lookups,
            self.registry,
            pins,
            can_save=lambda: has_host or any(store.writable for store in stores),
            has_arrivals=watch_arrivals(self._lookups.wake),
        )
        self._stats = open_stats_file(config.stats_file, f"kv.scheduler.{rank}", self.registry)
        self.first_weights_version = first_weights_version
        self._first_namespace = self._namespace = model.namespace
        self._chunk_tokens = config.chunk_tokens
        self._count_namespace(1)

    def weights_changed(self, weights_version: str) -> None:
        """Set the version of the weights; `first_weights_version` is a return to the first."""
        version = "" if weights_version == self.first_weights_version else weights_version
        self.scheduler.weights_changed(version)
        self._count_namespace(0)
        self._namespace = with_weights(self._first_namespace, version)
        self._count_namespace(1)

    def _count_namespace(self, value: int) -> None:
        labels = {"namespace": self._namespace, "chunk_tokens": str(self._chunk_tokens)}
        self.registry.set("kvpool_info", value, **labels)

    def close(self) -> None:
        """End the lookup service and close the stores."""
        if self._lookups.close():
            self._tiers.close()
        else:
            self._tiers.leave_open()
        if self._stats is not None:
            self._stats.close()
