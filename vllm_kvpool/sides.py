"""The two sides of the connector: what each opens, starts and closes, in order.

`SchedulerSide` owns stores for metadata, the lookup service and the scheduler's state; `WorkerSide`
owns stores, the staging arena, the engine and its lanes. Each is made, used and closed by one
thread.

A store that cannot be reached is opened in the background (`storage/guarded.py`), unless its URL
says `required=1`. Until it is open, lookups miss and saves are dropped.
"""

import contextlib
import logging
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vllm_kvpool.config import KVPoolConfig, KVRole, Verify, WritePolicy, set_where_unset
from vllm_kvpool.errors import ConfigError, StoreError
from vllm_kvpool.handover.consumer import NoticeClient
from vllm_kvpool.handover.producer import NoticePlace, NoticeServer, open_server
from vllm_kvpool.host_memory import check_memory, huge_pages_left, meminfo
from vllm_kvpool.identity.keys import KeyMaker, Namespace, with_weights
from vllm_kvpool.layout.pages import LayerPages
from vllm_kvpool.layout.topology import (
    Context,
    KVCacheGroup,
    LayerGroup,
    LocalCell,
    ReplicaRank,
    cells_of_rank,
    state_stride,
)
from vllm_kvpool.metrics import MetricsRegistry, StatsFile
from vllm_kvpool.network.allowed_peers import AllowedPeers
from vllm_kvpool.scheduler.aliases import Aliases
from vllm_kvpool.scheduler.blocks import HELD_SHARE, GroupTables
from vllm_kvpool.scheduler.lookup_service import LookupService
from vllm_kvpool.scheduler.pool_scheduler import PoolScheduler
from vllm_kvpool.scheduler.prefix_search import CellNames
from vllm_kvpool.scheduler.request import PoolShape
from vllm_kvpool.staging.arena import Arena, slot_bytes
from vllm_kvpool.staging.copier import Copier
from vllm_kvpool.staging.devices import Device, HostDevice, PageLock, page_lock_for
from vllm_kvpool.staging.slots import SlotPool
from vllm_kvpool.storage.backends import capabilities_of, open_store
from vllm_kvpool.storage.base import Buffer
from vllm_kvpool.storage.contents.alias import alias_step
from vllm_kvpool.storage.contents.manifest import MANIFEST_BYTES
from vllm_kvpool.storage.contents.manifest_writer import ManifestWriter
from vllm_kvpool.storage.eviction import POLICIES, Shares
from vllm_kvpool.storage.guarded import OPEN_WAIT_S, CallTimeouts, GuardedStore
from vllm_kvpool.storage.mooncake import MooncakeOptions
from vllm_kvpool.storage.mooncake_wheel import transport
from vllm_kvpool.storage.start_notes import StoreState, host_in_words, store_in_words
from vllm_kvpool.storage.tiers import TierSpecs, tier_specs
from vllm_kvpool.storage.url import (
    StoreSpec,
    check_capacity,
    environment_for,
    uses_device,
)
from vllm_kvpool.transfer.context import Tier, tier_names
from vllm_kvpool.transfer.engine import Engine, lane_names
from vllm_kvpool.transfer.executor import Executor, UseNamespace
from vllm_kvpool.transfer.graph import LaneLimits
from vllm_kvpool.transfer.host_cache import HostCache
from vllm_kvpool.transfer.lanes import BatchRunner
from vllm_kvpool.transfer.loans import ReplicaSet
from vllm_kvpool.transfer.ops import COPIES, HOST, REPLICA, WRITES, LaneName, OpKind, TierHealth
from vllm_kvpool.transfer.planner import Planner
from vllm_kvpool.transfer.replicas import ReplicaExchange
from vllm_kvpool.transfer.trace import NO_TRACE, RecordSpan, Trace, TraceFile, no_span
from vllm_kvpool.worker import PoolWorker

if TYPE_CHECKING:
    from vllm_kvpool.storage.base import Store
    from vllm_kvpool.storage.contents.encryption import EncryptedCells

logger = logging.getLogger(__name__)

BATCH_BYTES = 16 << 20  # of a store call
BATCH_CELLS = 64
SLABS_IN_FLIGHT = 8  # at least: a slab waits for all its slots
COPY_SHARE = 8  # a copy's batch is an eighth of the slots at most
COPY_CELL_BYTES = 128 << 10  # of smaller cells a copy's batch has fewer bytes
BUDGET_BATCHES = 4  # bytes in flight in a lane, in batches
LOAD_RESERVE = 4  # a quarter of the slots is for loads alone
REPLICA_ASKS = 256  # slabs that a rank waits for from others
REPLICA_BUDGETS = 2  # so that it asks before a lender fetches them for itself
KEPT_SHARE = 4  # at most a quarter of the slots is kept for ranks that have not asked yet
REPLICA_CALLS = 1.5  # call_timeout_s that a borrower waits: its lender may ask a second store
REPLICA_LOADS = 0.5  # and of load_timeout_s at most: then there is time to ask the tiers instead
PINNED_SHARE = 4  # at most a quarter of the engine's blocks wait for their gather
PROMISED_SHARE = 4  # at most a quarter waits for chunks that another engine has not stored yet
LOOKUP_CALL_S = 2.0  # a store that answers later counts as away for lookups
LEAST_JOIN_S = 0.5
VLLM_SHUTDOWN_S = 4.0  # vLLM kills worker processes about a second later
REQUIRED_WAIT_S = 120.0  # Mooncake tries for 90 s
SPARE_SHARE = 4  # a quarter of a worker's cores computes checksums
MAX_SEAL_THREADS = 4  # more than a link to a device brings
HOST_DEVICE: Device = HostDevice()


@dataclass(frozen=True, slots=True)
class OpenTiers:
    """The open stores, nearest first: their names in metrics, and the threads of their lanes."""

    stores: tuple[GuardedStore, ...]
    names: tuple[str, ...]
    get_lanes: tuple[int, ...]
    put_lanes: tuple[int, ...]

    def close(self, arena: Arena | None = None) -> None:
        """Close every store, after taking back the memory that was registered with it."""
        for store in self.stores:
            try:
                if arena is not None:
                    store.unregister(arena.whole)
                store.close()
            except StoreError as error:
                logger.warning("kvpool: closing %s: %s", store.capabilities.name, error)
                store.leave_open()

    def leave_open(self) -> None:
        """A store call has not returned: leave the stores open until the process ends."""
        logger.warning(
            "kvpool: a store call has not returned; the stores and the staging memory stay open "
            "until the process exits"
        )
        for store in self.stores:
            store.leave_open()


def open_tiers(
    specs: Sequence[StoreSpec],
    timeouts: CallTimeouts,
    *,
    segment: bool,
    device: Device = HOST_DEVICE,
) -> OpenTiers:
    """Open the stores; ConfigError if a required one cannot be reached.

    `segment`: whether to give memory to a pool that is made of its members' memory. Threads that
    work for a store enter `device` if the store uses it.
    """
    known = [capabilities_of(spec) for spec in specs]
    names = tier_names([each.name for each in known])
    gets = [spec.get_lanes or each.parallel_gets for spec, each in zip(specs, known, strict=True)]
    puts = [spec.put_lanes or each.parallel_puts for spec, each in zip(specs, known, strict=True)]
    stores: list[GuardedStore] = []
    with contextlib.ExitStack() as undo:
        for spec, each, name in zip(specs, known, names, strict=True):
            set_where_unset(environment_for(spec))
            wait_s = REQUIRED_WAIT_S if spec.required else OPEN_WAIT_S
            opening = partial(open_store, spec, segment=segment)
            enter = (device if uses_device(spec) else HOST_DEVICE).enter_thread
            store = GuardedStore(opening, each, name, timeouts, wait_s, on_start=enter)
            undo.callback(store.close)
            stores.append(store)
            if not store.opened and spec.required:
                raise ConfigError(f"{store.trouble}; the store is required (required=1)")
            if not store.opened:
                logger.warning("kvpool: %s; it is tried again in the background", store.trouble)
        undo.pop_all()
    if specs and not any(store.opened for store in stores):
        logger.warning("kvpool: no store can be reached; nothing is loaded or saved until one can")
    return OpenTiers(tuple(stores), names, tuple(gets), tuple(puts))


def copy_batch_bytes(device: Device, staging_bytes: int) -> int:
    """Most of a gather or scatter: slots of two batches are in use, others of gets and puts."""
    most_staged = max(HOST_DEVICE.copy_batch_bytes, staging_bytes // COPY_SHARE)
    return min(device.copy_batch_bytes, most_staged)


def with_slab_limits(
    planner: Planner, device: Device, staging_bytes: int, *, by_span: bool
) -> Planner:
    """Return the planner with slabs that a call of a store or a copy moves at once.

    The staging arena holds `SLABS_IN_FLIGHT` of them, or as many single cells. `by_span`: loads go
    layer by layer, so a slab has the layers of one span.
    """
    slots = staging_bytes // slot_bytes(planner.max_cell_bytes())
    return replace(
        planner,
        slab_cells=max(1, min(BATCH_CELLS, slots // SLABS_IN_FLIGHT)),
        slab_bytes=min(BATCH_BYTES, device.copy_batch_bytes),
        by_span=by_span,
    )


def spare_threads(device: Device, ranks: int) -> int:
    """Return the number of threads that may compute checksums at once.

    Each computes 12 GB/s without the GIL. On a CPU the model needs the cores; beside a device a
    worker has `SPARE_SHARE` of its part.
    """
    if device.is_host:
        return 1
    cores = len(os.sched_getaffinity(0)) // ranks
    return min(MAX_SEAL_THREADS, max(1, cores // SPARE_SHARE))


def lanes_of(
    tiers: OpenTiers,
    copy_bytes: int,
    copy_threads: int,
    seal_threads: int = 1,
    *,
    replicas: bool = False,
) -> dict[LaneName, tuple[int, LaneLimits]]:
    """Return the number of threads of each lane, and its limits.

    `copy_bytes`: most of a gather or scatter; `copy_threads`: as `Copier.num_threads`.
    `seal_threads`: those of seals and of checks, whose checksums take one core each.
    `replicas`: other ranks on this host hold the same KV. No thread waits for those.
    """
    lanes = {}
    for lane in lane_names(len(tiers.stores), replicas=replicas):
        threads, cells, nbytes, budget = 1, BATCH_CELLS, BATCH_BYTES, BUDGET_BATCHES * BATCH_BYTES
        if lane.tier == REPLICA:
            lanes[lane] = 0, LaneLimits(REPLICA_ASKS, 1, 1, REPLICA_BUDGETS * budget)
            continue
        elif lane.kind is OpKind.FENCE:
            cells = 1  # a plan waits for its own fence, not for those after it
        elif lane.kind in COPIES:
            threads, nbytes = copy_threads, copy_bytes
            cells = nbytes // COPY_CELL_BYTES
            # The last cell of a batch may go beyond its bytes, by a header at least.
            budget = max(budget, (threads + 2) * nbytes)
        elif lane.tier == HOST:
            threads, nbytes = seal_threads, HOST_DEVICE.copy_batch_bytes
            budget = max(budget, (threads + 2) * nbytes)
        elif lane.kind is OpKind.GET:
            threads = tiers.get_lanes[lane.tier]
        elif lane.kind is OpKind.PUT:
            threads = tiers.put_lanes[lane.tier]
            num_batches = tiers.stores[lane.tier].capabilities.batches_per_put
            cells, nbytes = num_batches * cells, num_batches * nbytes
        # A batch more than threads, so that none waits for the engine.
        lanes[lane] = threads, LaneLimits(threads + 1, cells, nbytes, budget)
    return lanes


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Facts about the model and its engine that scheduler and workers share."""

    namespace: Namespace
    """Empty in a worker, which is sent it later (`WorkerSide.use_namespace`)."""
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


WatchArrivals = Callable[[Callable[[], None]], Callable[[], bool] | None]


class SchedulerSide:
    """The pool in the scheduler's process.

    `watch_arrivals` has a function called for all that the engine is sent, and returns whether
    anything of it waits; or None where that is not known.
    """

    def __init__(
        self,
        config: KVPoolConfig,
        role: KVRole,
        model: ModelShape,
        rank: int = 0,
        first_weights_version: str = "",
        device: Device = HOST_DEVICE,
        watch_arrivals: WatchArrivals = lambda on_arrival: None,
    ) -> None:
        self.registry = MetricsRegistry()
        specs = tier_specs(config)
        lookup_s = max(LOOKUP_CALL_S, config.lookup_timeout_ms / 1000)
        timeouts = CallTimeouts(call_s=config.call_timeout_s, answer_s=lookup_s)
        self._tiers = open_tiers(specs.stores, timeouts, segment=False, device=device)
        names = CellNames(model.namespace, model.layer_groups)
        self.tiers_in_words = [
            *([host_in_words(specs.host.nbytes)] if specs.host.nbytes else []),
            *(
                store_in_words(name, spec, _state_of(store))
                for name, spec, store in zip(
                    self._tiers.names, specs.stores, self._tiers.stores, strict=True
                )
            ),
        ]
        self.tiers = tuple(store.capabilities for store in self._tiers.stores)
        host_ranks = model.num_ranks if specs.host.nbytes else 0
        tables = GroupTables(model.groups)
        aliases = open_aliases(config, model, specs.stores, self._tiers.stores, names)
        self._lookups = LookupService(
            self._tiers.stores,
            names,
            config.chunk_tokens,
            host_ranks=host_ranks,
            block=tables.block_size,
            timeout_s=config.lookup_timeout_ms / 1000,
            tier_names=self._tiers.names,
            registry=self.registry,
            loses_cells=any(tier.loses_cells for tier in self.tiers),
            open_notices=partial(NoticeClient, AllowedPeers(config.allowed_peers), self.registry),
            aliases=aliases,
        )
        least = sum(
            -(-(config.chunk_tokens + group.lookahead) // group.block_size) + 1
            for group in model.groups
        )
        if tables.forgets:
            least *= HELD_SHARE  # a chunk can always be saved, whatever is held
        shape = PoolShape(
            chunk_tokens=config.chunk_tokens,
            groups=model.groups,
            num_ranks=model.num_ranks,
            max_pinned_blocks=max(least, model.num_blocks // PINNED_SHARE),
            num_replicas=max(
                len(layer_group.topology.replicas_of(0)) for layer_group in model.layer_groups
            ),
            prefetches=config.prefetch and specs.host.nbytes > 0,
            loads=model.loads,
            stops_at_first=model.stops_at_first,
            in_lockstep=model.in_lockstep,
            has_ends=model.has_ends,
            alias_step=0 if aliases is None else aliases.step,
            state_stride=state_stride(
                model.layer_groups,
                config.chunk_tokens,
                math.lcm(config.chunk_tokens, tables.block_size),
            )
            if config.save_decode and tables.has_states
            else 0,
            has_drafts=any(layer_group.is_draft for layer_group in model.layer_groups),
            lookahead=model.lookahead,
            max_drafted_tokens=model.max_drafted_tokens,
            max_promised_blocks=model.num_blocks // PROMISED_SHARE,
        )
        stores = self._tiers.stores
        self.scheduler = PoolScheduler(
            config,
            role,
            shape,
            self._lookups,
            self.registry,
            can_save=lambda: host_ranks > 0 or any(store.writable for store in stores),
            has_arrivals=watch_arrivals(self._lookups.wake),
        )
        self._stats = stats_file(config, "scheduler", rank, self.registry)
        self.first_weights_version = first_weights_version
        self._first_namespace = self._namespace = model.namespace
        self._chunk_tokens = config.chunk_tokens
        self._count_namespace(1)

    def weights_changed(self, weights_version: str) -> None:
        """The weights have changed; `first_weights_version` is a return to the first."""
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
        """The worker's number among all data-parallel engines of `num_ranks` ranks each: it keeps
        their files apart, since they are configured alike."""
        return self.dp_rank * num_ranks + self.rank


class WorkerSide:
    """The pool in one rank's process.

    `make_copier` is called once for each lane that moves pages, which lie on `device`. `gather`
    gives this rank's bytes to all ranks of its pipeline stage and returns all of theirs, in one
    order; where ranks hold the same KV every rank calls it. `notices`: where to tell how far
    prompts are stored that other engines go on with.
    """

    def __init__(
        self,
        config: KVPoolConfig,
        model: ModelShape,
        place: RankPlace,
        pages: Sequence[LayerPages],
        make_copier: Callable[[Sequence[LayerPages]], Copier],
        *,
        finish_in_step: bool,
        device: Device = HOST_DEVICE,
        layer_spans: Mapping[str, int] | None = None,
        gather: Callable[[bytes], Sequence[bytes]] | None = None,
        record_span: RecordSpan = no_span,
        notices: NoticePlace | None = None,
    ) -> None:
        self._device = device
        self._record_span = record_span
        self.registry = MetricsRegistry()
        self._number = place.number(model.num_ranks)
        self._namespace = model.namespace
        specs = tier_specs(config)
        context = model.context
        cells = cells_of_rank(
            model.layer_groups,
            place.tp_rank,
            place.pp_rank,
            place.pcp_rank,
            [layer.group for layer in pages],
        )
        self._trace: Trace = NO_TRACE
        self._arena: Arena | None = None
        self._page_lock = page_lock_for(pages)
        self._manifests: ManifestWriter | None = None
        self._exchange: ReplicaExchange | None = None
        self._notices: NoticeServer | None = None
        allowed = AllowedPeers(config.allowed_peers)
        with contextlib.ExitStack() as undo:
            if gather is not None and model.loads:
                self._exchange = _exchange_of(place, cells, gather, shares=device.shares_memory)
            if self._exchange is not None:
                undo.callback(self._exchange.close)
            planner = Planner(
                cells=cells,
                keys=KeyMaker(model.namespace, context.rank(place.tp_rank, place.pcp_rank)),
                chunk_tokens=config.chunk_tokens,
                load_timeout_s=config.load_timeout_s,
                keeps_all=specs.host.nbytes > 0,
                block_sizes=tuple(group.block_size // context.dcp_size for group in model.groups),
                context=context,
                siblings={} if self._exchange is None else self._exchange.siblings,
            )
            planner = with_slab_limits(
                planner, device, config.staging_nbytes, by_span=bool(layer_spans)
            )
            self._members = {} if self._exchange is None else _members(cells, self._exchange)
            for spec in specs.stores:
                check_capacity(spec, planner.max_cell_bytes())
            _check_memory(config, specs, place.ranks_on_host)
            timeouts = CallTimeouts(call_s=config.call_timeout_s)
            self._tiers = open_tiers(specs.stores, timeouts, segment=True, device=device)
            undo.callback(self._tiers.close)
            self._encrypted = encrypted_cells(config, self._tiers.stores)
            if notices is not None:
                self._notices = open_server(notices, allowed, self.registry)
            if self._notices is not None:
                undo.callback(self._notices.close)
            copiers = [make_copier(pages), make_copier(pages)]
            self._executor = self._start(config, specs, planner, place, copiers)
            undo.pop_all()
        self.worker = PoolWorker(
            self._executor,
            config.chunk_tokens,
            model.groups[0].block_size,
            finish_in_step,
            self.registry,
            new_fence=self._device.new_event,
            rank=place.rank,
            resumes=GroupTables(model.groups).resumes,
            layer_spans=layer_spans,
            load_timeout_s=config.load_timeout_s,
            notices="" if self._notices is None else self._notices.endpoint,
            has_drafts=any(cell.is_draft for cell in cells),
            lookahead=model.lookahead,
        )
        if self._exchange is not None:
            self.worker.ranks_served = {
                layer_group: self._exchange.ranks_of(sorted(members))
                for layer_group, members in self._members.items()
            }
        self._stats = stats_file(config, "worker", self._number, self.registry)
        self._shutdown_s = min(config.shutdown_timeout_s, VLLM_SHUTDOWN_S)

    def _start(
        self,
        config: KVPoolConfig,
        specs: TierSpecs,
        planner: Planner,
        place: RankPlace,
        copiers: Sequence[Copier],
    ) -> Executor:
        """Make memory, engine and lanes over the open tiers."""
        arena = Arena(
            config.staging_nbytes,
            planner.max_cell_bytes(),
            specs.host.nbytes,
            spare_nbytes=MANIFEST_BYTES,
            alignment=self._device.memory_alignment,
            memory_from=memory_source(self._device, specs.stores),
            shared=self._exchange is not None,
        )
        for store in self._tiers.stores:
            store.register(arena.whole)
        if config.trace_file:
            path = Path(f"{config.trace_file}.{self._number}.json")
            self._trace = TraceFile(path, f"kvpool rank {self._number}", os.getpid())
        runner = BatchRunner(
            stores=self._tiers.stores,
            names=self._tiers.names,
            arena=arena,
            gather_copier=copiers[0],
            scatter_copier=copiers[1],
            chunk_tokens=planner.local_chunk_tokens,
            verify_checksum=config.verify is Verify.CHECKSUM,
            registry=self.registry,
            trace=self._trace,
            encrypted=self._encrypted,
            zeros=_zeros(planner),
        )
        ask_s = min(REPLICA_CALLS * config.call_timeout_s, REPLICA_LOADS * config.load_timeout_s)
        staging = arena.num_slots - arena.num_kept
        replicas = None
        if self._exchange is not None:
            replicas = ReplicaSet(
                layer_groups=self._members,
                ask_s=ask_s,
                loan_s=2 * ask_s,  # a borrower has as long for its scatter
                max_retained=arena.num_slots // KEPT_SHARE,
            )
        copy_bytes = copy_batch_bytes(self._device, staging * arena.slot_bytes)
        copy_threads = min(copier.num_threads for copier in copiers)
        seal_threads = spare_threads(self._device, place.ranks_on_host)
        lanes = lanes_of(
            self._tiers, copy_bytes, copy_threads, seal_threads, replicas=replicas is not None
        )
        engine = Engine(
            HostCache(
                SlotPool(arena.num_slots, staging // LOAD_RESERVE),
                arena.num_kept,
                POLICIES[specs.host.policy],
                planner.slabs_per_chunk,
                has_shares=specs.host.shares is Shares.TENANT,
                least_cells=min(
                    Counter(cell.span.layer_group for cell in planner.cells).values(), default=1
                ),
            ),
            tuple(
                Tier(name, store.capabilities.durable, store.capabilities.remote)
                for name, store in zip(self._tiers.names, self._tiers.stores, strict=True)
            ),
            {lane: limits for lane, (_, limits) in lanes.items()},
            write_back=config.write_policy is WritePolicy.BACK,
            slot_bytes=arena.slot_bytes,
            replicas=replicas,
        )
        self._arena = arena
        stores = self._tiers.stores
        executor = Executor(
            engine,
            planner,
            runner.perform,
            {lane: threads for lane, (threads, _) in lanes.items()},
            self.registry,
            trace=self._trace,
            call_timeout_s=config.call_timeout_s,
            on_hung=lambda lane: stores[lane.tier].report_hung(writes=lane.kind in WRITES),
            on_lane_start=self._device.enter_thread,
            exchange=self._exchange,
            notices=self._notices,
            record_span=self._record_span,
        )
        lock_pages = partial(self._lock_pages, arena) if self._page_lock else None
        if self._exchange is not None:
            self._exchange.start(arena, executor.post, lock_pages)
        for tier, store in enumerate(stores):
            store.listen(partial(_post_health, executor, tier))
        if stores and place.rank == 0:
            self._manifests = ManifestWriter(stores, arena.spare)
        arena.commit_in_background(lock_pages)
        return executor

    def _lock_pages(self, arena: Arena, part: Buffer) -> None:
        """Page-lock a part of the arena, and tell how much is locked (the arena's thread)."""
        assert self._page_lock is not None
        self._page_lock.lock(part)
        share = self._page_lock.num_bytes / arena.num_mapped_bytes
        self.registry.set("kvpool_page_locked_share", share)

    def use_namespace(self, namespace: Namespace, drafter: str = "") -> None:
        """The namespace of cells in plans from now on, and the drafter of those of drafts."""
        if namespace != self._namespace:
            self._namespace = namespace
            self._executor.post(UseNamespace(namespace, drafter))

    def keep_manifest(self, namespace: Namespace, manifest: bytes) -> None:
        """Write a namespace's manifest to every store; rank 0 does."""
        if self._manifests is not None:
            self._manifests.write(namespace, manifest)

    def close(self) -> None:
        """Finish saves for a bounded time, end the threads, release memory and stores."""
        until = time.monotonic() + self._shutdown_s
        stores_idle = self._executor.close(self._shutdown_s)
        if self._exchange is not None:  # lent slots are read no more
            self._exchange.close()
        if self._notices is not None:  # what was stored last is told
            self._notices.close()
        if self._manifests is not None:
            left_s = max(LEAST_JOIN_S, until - time.monotonic())
            stores_idle = self._manifests.close(left_s) and stores_idle
        if stores_idle:
            if self._encrypted is not None:
                self._encrypted.close()
            self._tiers.close(self._arena)
            _release(self._arena, self._page_lock)
        else:  # calls that still run may use the memory
            self._tiers.leave_open()
        self._trace.close()
        if self._stats is not None:
            self._stats.close()


def _zeros(planner: Planner) -> Buffer | None:
    """Zeros for the pages of optional cells that cannot be had; None if no cell is optional."""
    tokens = planner.local_chunk_tokens
    nbytes = max((c.payload_bytes(tokens) for c in planner.cells if c.is_optional), default=0)
    if not nbytes:
        return None
    zeros = np.zeros(nbytes, np.uint8)  # never written, so it takes no memory
    return Buffer(int(zeros.ctypes.data), zeros.data)


def _state_of(store: GuardedStore) -> StoreState:
    if not store.opened:
        return StoreState.AWAY
    return StoreState.OPEN if store.writable else StoreState.READ_ONLY


def _check_memory(config: KVPoolConfig, specs: TierSpecs, ranks: int) -> None:
    """ConfigError if this worker, or all on its host, cannot have the memory that options set."""
    arena = {"staging_bytes": config.staging_nbytes, "host://": specs.host.nbytes}
    locked, given = dict(arena), dict[str, int]()
    has_rdma = False
    for spec in specs.stores:
        if isinstance(spec.options, MooncakeOptions) and not spec.options.fabric:
            given[f"segment= of {spec.url}"] = spec.options.segment_bytes
            given[f"local_buffer= of {spec.url}"] = spec.options.local_buffer_bytes
            if transport(spec.options.protocol, spec.options.device)[0] == "rdma":
                has_rdma = True
                locked[f"segment= of {spec.url}"] = spec.options.segment_bytes
    nbytes = sum(arena.values())
    pages = meminfo()
    huge = (pages["HugePages_Free"] - pages["HugePages_Rsvd"]) * pages["Hugepagesize"]
    # Pages that are set aside are not of the memory that is available.
    is_aside = specs.host.nbytes > 0 and min(huge, huge_pages_left()) >= nbytes
    check_memory(
        given if is_aside else arena | given,
        ranks=ranks,
        locked=locked if has_rdma else None,
    )


def encrypted_cells(config: KVPoolConfig, stores: "Sequence[Store]") -> "EncryptedCells | None":
    """Return the encryption of cells; None if cells are not encrypted. Raises ConfigError."""
    if not config.encrypts_cells:
        return None
    try:
        from vllm_kvpool.storage.contents.encryption import CellCipher, EncryptedCells, read_keys
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"encryption of cells needs cryptography ({error}); run: "
            "pip install 'vllm-kvpool[encryption]'"
        ) from error
    return EncryptedCells(CellCipher(read_keys(Path(config.encryption_key_file))), stores)


def open_aliases(
    config: KVPoolConfig,
    model: ModelShape,
    specs: Sequence[StoreSpec],
    stores: Sequence[GuardedStore],
    names: CellNames,
) -> Aliases | None:
    """Return the aliases in the scheduler's stores; None if hits end with whole chunks.

    A store that takes none but a device's memory can have no aliases.
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
    return Aliases(stores, tiers, names, config.chunk_tokens, step, encrypted)


def stats_file(
    config: KVPoolConfig, side: str, number: int, registry: MetricsRegistry
) -> StatsFile | None:
    """The file of one side's counters; None where `stats_file` is not set."""
    if not config.stats_file:
        return None
    return StatsFile(Path(f"{config.stats_file}.kv.{side}.{number}"), registry)


def _exchange_of(
    place: RankPlace,
    cells: Sequence[LocalCell],
    gather: Callable[[bytes], Sequence[bytes]],
    *,
    shares: bool,
) -> ReplicaExchange | None:
    """The exchange with ranks on this host that hold the same KV; None where there are none."""
    if not any(cell.replicas for cell in cells):
        return None
    exchange = ReplicaExchange(
        ReplicaRank(place.tp_rank, place.pcp_rank), place.rank, shares=shares
    )
    with contextlib.ExitStack() as undo:
        undo.callback(exchange.close)
        exchange.join(gather(exchange.card.pack()))
        if any(set(cell.replicas) & exchange.siblings.keys() for cell in cells):
            undo.pop_all()
            return exchange
    return None


def _members(cells: Sequence[LocalCell], exchange: ReplicaExchange) -> dict[str, frozenset[int]]:
    """The ranks that share each layer group; groups that no other rank holds are left out."""
    siblings = exchange.siblings
    members = {
        cell.span.layer_group: {siblings[each] for each in cell.replicas if each in siblings}
        for cell in cells
    }
    return {
        layer_group: frozenset(others | {exchange.number})
        for layer_group, others in members.items()
        if others
    }


def memory_source(device: Device, specs: Sequence[StoreSpec]) -> Callable[[int], memoryview | None]:
    """Return the source of staging memory: the device's runtime, unless files are written from it.

    Page-locked memory of Ascend's runtime has been seen to fail direct I/O (EFAULT), but a store
    that uses the device takes no other.
    """
    if any(uses_device(spec) for spec in specs):
        return device.host_memory
    if any(spec.scheme == "file" for spec in specs):
        return lambda nbytes: None
    return device.host_memory


def _release(arena: Arena | None, page_lock: PageLock | None) -> None:
    is_quiet = arena is None or arena.close()
    if page_lock is not None and is_quiet:
        page_lock.close()


def _post_health(executor: Executor, tier: int, is_up: bool, is_writable: bool) -> None:
    executor.post(TierHealth(tier, is_up, is_writable))
