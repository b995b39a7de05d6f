"""Puts the two sides together and takes them apart: what is opened, started, closed, in order.

`SchedulerSide` owns metadata-only stores, the probe thread and the scheduler's bookkeeping;
`WorkerSide` stores, the staging arena, the engine and its lanes. Both are made, used and closed by
one thread. A store that cannot be reached is looked for in the background (`store/guard.py`),
unless it is required; until it is there lookups miss and saves are dropped.
"""

import contextlib
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

from vllm_kvpool.config import (
    KVPoolConfig,
    Role,
    Verify,
    WritePolicy,
    default_store_url,
    environment,
    json_named_by,
    set_where_unset,
)
from vllm_kvpool.errors import ConfigError, StoreError
from vllm_kvpool.keys import KeyMaker, Namespace
from vllm_kvpool.layout.pages import LayerPages
from vllm_kvpool.layout.topology import Context, Group, Kind, Topology, cells_of_rank
from vllm_kvpool.metrics import Tally, write_stats
from vllm_kvpool.pool.lookup import CellNames
from vllm_kvpool.pool.pins import HELD_SHARE
from vllm_kvpool.pool.probe import Probe
from vllm_kvpool.pool.scheduler import PoolScheduler, PoolShape
from vllm_kvpool.pool.tables import GroupTables
from vllm_kvpool.pool.worker import PoolWorker
from vllm_kvpool.staging.arena import Arena
from vllm_kvpool.staging.copier import Copier
from vllm_kvpool.staging.devices import Device, HostDevice
from vllm_kvpool.staging.pinned import PageLock, page_lock_for
from vllm_kvpool.staging.slots import SlotPool
from vllm_kvpool.store.guard import OPEN_WAIT_S, GuardedStore, Patience
from vllm_kvpool.store.open import (
    MOONCAKE_CONFIG_ENV,
    StoreSpec,
    capabilities_of,
    check_capacity,
    environment_for,
    names_no_master,
    open_store,
    uses_device,
)
from vllm_kvpool.store.tiers import TierSpecs, parse_tiers
from vllm_kvpool.transfer.engine import Engine, lane_names
from vllm_kvpool.transfer.executor import Executor, PassOn
from vllm_kvpool.transfer.graph import LaneLimits
from vllm_kvpool.transfer.handdown import Custodian
from vllm_kvpool.transfer.lanes import LaneWork
from vllm_kvpool.transfer.ops import LaneName, OpKind, TierHealth
from vllm_kvpool.transfer.planner import Planner
from vllm_kvpool.transfer.policy import POLICIES
from vllm_kvpool.transfer.residency import Residency
from vllm_kvpool.transfer.tiers import Tier, tier_names
from vllm_kvpool.transfer.trace import NO_TRACE, Trace, TraceFile

logger = logging.getLogger(__name__)

BATCH_BYTES = 16 << 20
BATCH_CELLS = 64
BUDGET_BATCHES = 4  # bytes in flight in a lane, in batches
LOAD_RESERVE = 4  # a quarter of the slots is for loads alone
PINNED_SHARE = 4  # at most a quarter of the engine's blocks wait for their gather
STATS_EVERY_S = 1.0
LOOKUP_CALL_S = 2.0  # a store whose answer takes longer is of no use to lookups
REQUIRED_WAIT_S = 120.0  # Mooncake tries for 90 s
VLLM_SHUTDOWN_S = 4.0  # vLLM kills worker processes about a second later
HOST_DEVICE: Device = HostDevice()


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What both sides know of the model and its engine."""

    namespace: Namespace
    kinds: tuple[Kind, ...]
    groups: tuple[Group, ...]
    num_blocks: int
    num_ranks: int
    loads: bool = True  # False where the engine could not survive a load that fails

    @classmethod
    def of_one_kind(
        cls,
        namespace: Namespace,
        topology: Topology,
        block_size: int,
        num_blocks: int,
        num_ranks: int,
        row_bytes: int,
    ) -> Self:
        """A model whose layers are all alike."""
        kinds, groups = (Kind(topology, row_bytes),), (Group(block_size),)
        return cls(namespace, kinds, groups, num_blocks, num_ranks)

    @property
    def context(self) -> Context:
        """Context parallelism, which is the same for all kinds."""
        return self.kinds[0].topology.context

    @property
    def cells_per_chunk(self) -> int:
        """Of the whole model."""
        return sum(
            len(kind.topology.all_parts()) * len(kind.topology.all_spans()) for kind in self.kinds
        )


def tier_specs(config: KVPoolConfig) -> TierSpecs:
    """The tiers that the configuration names, or the default one."""
    urls = tuple(url or default_store_url() for url in config.store_urls)
    nameless = any(names_no_master(url) for url in urls)
    mooncake_config = json_named_by(MOONCAKE_CONFIG_ENV) if nameless else None
    return parse_tiers(urls, mooncake_config, environment())


@dataclass(frozen=True, slots=True)
class OpenTiers:
    """The stores, nearest first, and what they are called in metrics."""

    stores: tuple[GuardedStore, ...]
    names: tuple[str, ...]
    get_lanes: tuple[int, ...] = ()
    put_lanes: tuple[int, ...] = ()

    def close(self, arena: Arena | None = None) -> None:
        """Close every store, after taking back the memory that was registered with it."""
        for store in self.stores:
            try:
                if arena is not None:
                    store.unregister(arena.whole)
                store.close()
            except StoreError as error:
                logger.warning("kvpool: closing %s: %s", store.capabilities.name, error)
                store.leave()

    def leave(self) -> None:
        """Some call has not ended: the stores stay as they are, until the process ends."""
        logger.warning("kvpool: a store call has not ended; its memory is left behind")
        for store in self.stores:
            store.leave()


def open_tiers(
    specs: Sequence[StoreSpec],
    patience: Patience,
    *,
    segment: bool,
    device: Device = HOST_DEVICE,
) -> OpenTiers:
    """Open the stores; one that cannot be reached is looked for later, unless it is required.

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
            enter = device.enter_thread if uses_device(spec) else _enter_nothing
            store = GuardedStore(opening, each, name, patience, wait_s, on_start=enter)
            undo.callback(store.close)
            stores.append(store)
            if not store.opened and spec.required:
                raise ConfigError(f"{store.trouble}; the store is required (required=1)")
            if not store.opened:
                logger.warning("kvpool: %s. It is looked for in the background.", store.trouble)
        undo.pop_all()
    if specs and not any(store.opened for store in stores):
        logger.warning("kvpool: no store can be reached: the engine runs without the pool for now.")
    return OpenTiers(tuple(stores), names, tuple(gets), tuple(puts))


def _enter_nothing() -> None:
    pass


def check_tiers(config: KVPoolConfig, cell_bytes: int) -> None:
    """ConfigError if a configured store could not hold one cell."""
    for spec in tier_specs(config).stores:
        check_capacity(spec, cell_bytes)


class StatsFile:
    """Writes a tally's values where `stats_file` says: now and then, and at the end.

    Not only at the end, because a process may be killed before it. Never raises: a disk that is
    full must not stop an engine.
    """

    def __init__(self, stats_file: str, side: str, rank: int, tally: Tally) -> None:
        self._path = Path(f"{stats_file}.kv.{side}.{rank}") if stats_file else None
        self._tally = tally
        self._next = 0.0

    def write(self, *, force: bool = False) -> None:
        """Write if something is due."""
        now = time.monotonic()
        if self._path is None or (now < self._next and not force):
            return
        self._next = now + STATS_EVERY_S
        try:
            write_stats(self._path, self._tally.snapshot())
        except OSError as error:
            logger.warning("kvpool: stats_file %s: %s", self._path, error)
            self._path = None


class SchedulerSide:
    """The scheduler's process."""

    def __init__(
        self,
        config: KVPoolConfig,
        role: Role,
        model: ModelShape,
        rank: int = 0,
        first_epoch: str = "",
        device: Device = HOST_DEVICE,
    ) -> None:
        self.tally = Tally()
        specs = tier_specs(config)
        lookup_s = max(LOOKUP_CALL_S, config.lookup_timeout_ms / 1000)
        patience = Patience(call_s=config.call_timeout_s, answer_s=lookup_s)
        self._tiers = open_tiers(specs.stores, patience, segment=False, device=device)
        names = CellNames(model.namespace, model.kinds)
        self.tier_names = ("host",) * (specs.host.nbytes > 0) + self._tiers.names
        self.tier_kinds = tuple(store.capabilities.name for store in self._tiers.stores)
        self.host_ranks = host_ranks = model.num_ranks if specs.host.nbytes else 0
        tables = GroupTables(model.groups)
        block = tables.block_size
        self._probe = Probe(self._tiers.stores, names, config.chunk_tokens, host_ranks, block)
        least = sum(-(-config.chunk_tokens // group.block_size) + 1 for group in model.groups)
        if tables.forgets:
            least *= HELD_SHARE  # a chunk can always be saved, whatever is held
        shape = PoolShape(
            chunk_tokens=config.chunk_tokens,
            groups=model.groups,
            num_ranks=model.num_ranks,
            max_pinned_blocks=max(least, model.num_blocks // PINNED_SHARE),
            prefetches=config.prefetch and specs.host.nbytes > 0,
            loads=model.loads,
        )
        self.scheduler = PoolScheduler(config, role, shape, self._probe, self.tally)
        self.stats = StatsFile(config.stats_file, "scheduler", rank, self.tally)
        self.first_epoch = first_epoch

    def weights_changed(self, epoch: str) -> None:
        """The weights are others now; an epoch equal to `first_epoch` is a return to the first."""
        self.scheduler.begin_epoch("" if epoch == self.first_epoch else epoch)

    def close(self) -> None:
        """End the probe thread and close the store."""
        if self._probe.close():
            self._tiers.close()
        else:
            self._tiers.leave()
        self.stats.write(force=True)


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Which worker of the engine this is."""

    tp_rank: int
    pp_rank: int
    rank: int
    pcp_rank: int = 0


class WorkerSide:
    """One rank's process. `make_copier` is called once for each lane that moves pages, which lie on
    `device`."""

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
    ) -> None:
        self._device = device
        self.tally = Tally()
        specs = tier_specs(config)
        context = model.context
        planner = Planner(
            cells=cells_of_rank(
                model.kinds,
                place.tp_rank,
                place.pp_rank,
                place.pcp_rank,
                [layer.group for layer in pages],
            ),
            keys=KeyMaker(model.namespace, context.rank(place.tp_rank, place.pcp_rank)),
            chunk_tokens=config.chunk_tokens,
            load_timeout_s=config.load_timeout_s,
            keeps_all=specs.host.nbytes > 0,
            block_sizes=tuple(group.block_size // context.dcp_size for group in model.groups),
            context=context,
        )
        check_tiers(config, planner.max_cell_bytes())
        patience = Patience(call_s=config.call_timeout_s)
        self._tiers = open_tiers(specs.stores, patience, segment=True, device=device)
        self._trace: Trace = NO_TRACE
        self._arena: Arena | None = None
        self._page_lock = page_lock_for(pages)
        self._custodian: Custodian | None = None
        with contextlib.ExitStack() as undo:
            undo.callback(self._tiers.close)
            copiers = [make_copier(pages), make_copier(pages)]
            self._executor = self._start(config, specs, planner, place, copiers)
            undo.pop_all()
        self.worker = PoolWorker(
            self._executor,
            config.chunk_tokens,
            model.groups[0].block_size,
            finish_in_step,
            self.tally,
            copiers,
            place.rank,
            GroupTables(model.groups).resumes,
        )
        self.stats = StatsFile(config.stats_file, "worker", place.rank, self.tally)
        self._shutdown_s = min(config.shutdown_timeout_s, VLLM_SHUTDOWN_S)

    def _start(
        self,
        config: KVPoolConfig,
        specs: TierSpecs,
        planner: Planner,
        place: RankPlace,
        copiers: Sequence[Copier],
    ) -> Executor:
        """Memory, engine and lanes over the open tiers."""
        arena = Arena(
            config.staging_nbytes,
            planner.max_cell_bytes(),
            specs.host.nbytes,
            alignment=self._device.memory_alignment,
            memory_from=memory_source(self._device, specs.stores),
        )
        for store in self._tiers.stores:
            store.register(arena.whole)
        if config.trace_file:
            path = Path(f"{config.trace_file}.{place.rank}.json")
            self._trace = TraceFile(path, f"kvpool rank {place.rank}", os.getpid())
        work = LaneWork(
            stores=self._tiers.stores,
            names=self._tiers.names,
            arena=arena,
            gather_copier=copiers[0],
            scatter_copier=copiers[1],
            chunk_tokens=planner.local_chunk_tokens,
            verify_checksum=config.verify is Verify.CHECKSUM,
            tally=self.tally,
            trace=self._trace,
        )
        lanes = lane_counts(self._tiers)
        per_chunk = Counter(cell.span.kind for cell in planner.cells)
        engine = make_engine(config, specs, self._tiers, arena, per_chunk, lanes)
        self._arena = arena
        stores = self._tiers.stores
        executor = Executor(
            engine,
            planner,
            work.perform,
            lanes,
            self.tally,
            self._trace,
            config.call_timeout_s,
            lambda lane: stores[lane.tier].report_stuck(),
            self._device.enter_thread,
        )
        for tier, store in enumerate(stores):
            store.listen(partial(_tell_health, executor, tier))
        arena.commit_in_background(self._page_lock.lock if self._page_lock else None)
        shedding = {
            tier: store for tier, store in enumerate(stores[:-1]) if store.capabilities.sheds
        }
        if shedding and config.write_policy is WritePolicy.BACK:
            self._custodian = Custodian(
                shedding, lambda tier, cells, answer: executor.post(PassOn(tier, cells, answer))
            )
        return executor

    def close(self) -> None:
        """Finish saves for a bounded time, end the threads, release memory and store."""
        if self._custodian is not None:
            self._custodian.close()
        if self._executor.close(self._shutdown_s):
            self._tiers.close(self._arena)
            _release(self._arena, self._page_lock)
        else:  # what still runs may use the memory, which therefore stays as it is
            self._tiers.leave()
        self._trace.close()
        self.stats.write(force=True)


def memory_source(device: Device, specs: Sequence[StoreSpec]) -> Callable[[int], memoryview | None]:
    """Where staging memory comes from: the device's runtime, unless files are written from it.

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


def _tell_health(executor: Executor, tier: int, is_up: bool) -> None:
    executor.post(TierHealth(tier, is_up))


def lane_counts(tiers: OpenTiers) -> dict[LaneName, int]:
    """How many threads each lane has."""
    counts = dict.fromkeys(lane_names(len(tiers.stores)), 1)
    for tier, (gets, puts) in enumerate(zip(tiers.get_lanes, tiers.put_lanes, strict=True)):
        counts[LaneName(OpKind.GET, tier)] = gets
        counts[LaneName(OpKind.PUT, tier)] = puts
    return counts


def make_engine(
    config: KVPoolConfig,
    specs: TierSpecs,
    tiers: OpenTiers,
    arena: Arena,
    cells_per_chunk: Mapping[str, int],
    lanes: Mapping[LaneName, int],
) -> Engine:
    """The engine over an arena and open tiers."""
    limits = {
        # One batch more than threads, so that none waits for the engine.
        lane: LaneLimits(count + 1, BATCH_CELLS, BATCH_BYTES, BUDGET_BATCHES * BATCH_BYTES)
        for lane, count in lanes.items()
    }
    staging = arena.num_slots - arena.num_kept
    residency = Residency(
        SlotPool(arena.num_slots, staging // LOAD_RESERVE),
        arena.num_kept,
        POLICIES[specs.host.policy](arena.num_kept),
        cells_per_chunk,
    )
    known = tuple(
        Tier(name, store.capabilities.durable, store.capabilities.remote)
        for name, store in zip(tiers.names, tiers.stores, strict=True)
    )
    return Engine(
        residency,
        known,
        limits,
        write_back=config.write_policy is WritePolicy.BACK,
        slot_bytes=arena.slot_bytes,
    )
