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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

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
from vllm_kvpool.keys import ContextRank, KeyMaker, Namespace
from vllm_kvpool.layout.pages import LayerPages
from vllm_kvpool.layout.topology import Topology
from vllm_kvpool.metrics import Tally, write_stats
from vllm_kvpool.pool.lookup import CellNames
from vllm_kvpool.pool.probe import Probe
from vllm_kvpool.pool.scheduler import PoolScheduler, PoolShape
from vllm_kvpool.pool.worker import PoolWorker
from vllm_kvpool.staging.arena import Arena
from vllm_kvpool.staging.copier import Copier
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


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What both sides know of the model and its engine."""

    namespace: Namespace
    topology: Topology
    block_size: int
    num_blocks: int
    num_ranks: int
    row_bytes: int
    context: ContextRank = ContextRank()  # noqa: RUF009 - frozen


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


def open_tiers(specs: Sequence[StoreSpec], patience: Patience, *, segment: bool) -> OpenTiers:
    """Open the stores; one that cannot be reached is looked for later, unless it is required.

    `segment`: whether to give memory to a pool that is made of its members' memory.
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
            store = GuardedStore(opening, each, name, patience, wait_s)
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
    ) -> None:
        self.tally = Tally()
        specs = tier_specs(config)
        lookup_s = max(LOOKUP_CALL_S, config.lookup_timeout_ms / 1000)
        patience = Patience(call_s=config.call_timeout_s, answer_s=lookup_s)
        self._tiers = open_tiers(specs.stores, patience, segment=False)
        names = CellNames(model.namespace, model.topology, model.context)
        self.tier_names = ("host",) * (specs.host.nbytes > 0) + self._tiers.names
        host_ranks = model.num_ranks if specs.host.nbytes else 0
        self._probe = Probe(self._tiers.stores, names, config.chunk_tokens, host_ranks)
        least = -(-config.chunk_tokens // model.block_size) + 1
        shape = PoolShape(
            chunk_tokens=config.chunk_tokens,
            block_size=model.block_size,
            num_ranks=model.num_ranks,
            max_pinned_blocks=max(least, model.num_blocks // PINNED_SHARE),
            prefetches=config.prefetch and specs.host.nbytes > 0,
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


class WorkerSide:
    """One rank's process. `make_copier` is called once for each lane that moves pages."""

    def __init__(
        self,
        config: KVPoolConfig,
        model: ModelShape,
        place: RankPlace,
        pages: Sequence[LayerPages],
        make_copier: Callable[[Sequence[LayerPages]], Copier],
        *,
        finish_in_step: bool,
    ) -> None:
        self.tally = Tally()
        specs = tier_specs(config)
        planner = Planner(
            topology=model.topology,
            tp_rank=place.tp_rank,
            cells=model.topology.local_cells(place.tp_rank, place.pp_rank),
            keys=KeyMaker(model.namespace, model.context),
            chunk_tokens=config.chunk_tokens,
            row_bytes=model.row_bytes,
            load_timeout_s=config.load_timeout_s,
            keeps_all=specs.host.nbytes > 0,
        )
        check_tiers(config, planner.max_cell_bytes())
        patience = Patience(call_s=config.call_timeout_s)
        self._tiers = open_tiers(specs.stores, patience, segment=True)
        self._trace: Trace = NO_TRACE
        self._arena: Arena | None = None
        self._custodian: Custodian | None = None
        with contextlib.ExitStack() as undo:
            undo.callback(self._tiers.close)
            copiers = [make_copier(pages), make_copier(pages)]
            self._executor = self._start(config, specs, planner, place, copiers)
            undo.pop_all()
        self.worker = PoolWorker(
            self._executor,
            config.chunk_tokens,
            model.block_size,
            finish_in_step,
            self.tally,
            copiers,
            place.rank,
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
        arena = Arena(config.staging_nbytes, planner.max_cell_bytes(), specs.host.nbytes)
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
            chunk_tokens=config.chunk_tokens,
            verify_checksum=config.verify is Verify.CHECKSUM,
            tally=self.tally,
            trace=self._trace,
        )
        lanes = lane_counts(self._tiers)
        engine = make_engine(config, specs, self._tiers, arena, len(planner.cells), lanes)
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
        )
        for tier, store in enumerate(stores):
            store.listen(partial(_tell_health, executor, tier))
        arena.commit_in_background()
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
        else:
            self._tiers.leave()
        self._trace.close()
        self.stats.write(force=True)


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
    cells_per_chunk: int,
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
