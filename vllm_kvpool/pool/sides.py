"""Puts the two sides together and takes them apart: what is opened, started, closed, in order.

`SchedulerSide` owns a metadata-only store, the probe thread and the scheduler's bookkeeping;
`WorkerSide` a store, the staging arena, the engine and its lanes. Both are made, used and closed
by one thread. A store that cannot be reached leaves the side without one, unless it is required:
every lookup then misses and every save is dropped.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm_kvpool.config import KVPoolConfig, Role, Verify, default_store_url, json_named_by
from vllm_kvpool.errors import ConfigError, StoreError, StoreUnreachable
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
from vllm_kvpool.store.base import Store
from vllm_kvpool.store.open import (
    MOONCAKE_CONFIG_ENV,
    StoreSpec,
    check_capacity,
    names_no_master,
    open_store,
    parse_store_url,
)
from vllm_kvpool.transfer.engine import Engine, Limits
from vllm_kvpool.transfer.executor import Executor
from vllm_kvpool.transfer.lanes import LaneWork
from vllm_kvpool.transfer.ops import OpKind
from vllm_kvpool.transfer.planner import Planner

logger = logging.getLogger(__name__)

LANES = {OpKind.SCATTER: 1, OpKind.GATHER: 1, OpKind.PUT: 1, OpKind.REMOVE: 1}
OP_BYTES = 16 << 20
OP_CELLS = 64
LOAD_RESERVE = 4  # a quarter of the slots is for loads alone
PINNED_SHARE = 4  # at most a quarter of the engine's blocks wait for their gather
STATS_EVERY_S = 1.0
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


def store_spec(config: KVPoolConfig) -> StoreSpec:
    """The store that the configuration names, or the default one."""
    url = config.store_urls[0] or default_store_url()
    return parse_store_url(
        url, json_named_by(MOONCAKE_CONFIG_ENV) if names_no_master(url) else None
    )


def open_configured_store(config: KVPoolConfig, *, segment: bool) -> Store | None:
    """Open the store that the configuration names; None if it cannot be reached and need not be.

    `segment`: whether to give memory to a pool that is made of its members' memory.
    """
    spec = store_spec(config)
    try:
        return open_store(spec, segment=segment)
    except StoreUnreachable as error:
        if spec.required:
            raise ConfigError(f"{error}; the store is required (required=1)") from error
        logger.warning("kvpool: %s. The engine runs without the pool.", error)
        return None


def check_store(config: KVPoolConfig, cell_bytes: int) -> None:
    """ConfigError if the configured store could not hold one cell."""
    check_capacity(store_spec(config), cell_bytes)


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

    def __init__(self, config: KVPoolConfig, role: Role, model: ModelShape, rank: int = 0) -> None:
        self.tally = Tally()
        self._store = open_configured_store(config, segment=False)
        self.store_name = self._store.capabilities.name if self._store else "none"
        names = CellNames(model.namespace, model.topology, model.context)
        self._probe = Probe(self._store, names, config.chunk_tokens)
        least = -(-config.chunk_tokens // model.block_size) + 1
        shape = PoolShape(
            chunk_tokens=config.chunk_tokens,
            block_size=model.block_size,
            num_ranks=model.num_ranks,
            max_pinned_blocks=max(least, model.num_blocks // PINNED_SHARE),
        )
        self.scheduler = PoolScheduler(config, role, shape, self._probe, self.tally)
        self.stats = StatsFile(config.stats_file, "scheduler", rank, self.tally)

    def close(self) -> None:
        """End the probe thread and close the store."""
        if self._probe.close() and self._store is not None:
            self._store.close()
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
        planner = Planner(
            topology=model.topology,
            tp_rank=place.tp_rank,
            cells=model.topology.local_cells(place.tp_rank, place.pp_rank),
            keys=KeyMaker(model.namespace, model.context),
            chunk_tokens=config.chunk_tokens,
            row_bytes=model.row_bytes,
            load_timeout_s=config.load_timeout_s,
        )
        check_store(config, planner.max_cell_bytes())
        self._arena = Arena(config.staging_nbytes, planner.max_cell_bytes())
        self._store = open_configured_store(config, segment=True)
        self._executor: Executor | None = None
        copiers: list[Copier] = []
        if self._store is not None:
            self._store.register(self._arena.whole)
            copiers = [make_copier(pages), make_copier(pages)]
            work = LaneWork(
                store=self._store,
                arena=self._arena,
                gather_copier=copiers[0],
                scatter_copier=copiers[1],
                chunk_tokens=config.chunk_tokens,
                verify_checksum=config.verify is Verify.CHECKSUM,
                tally=self.tally,
            )
            lanes = LANES | {OpKind.GET: self._store.capabilities.parallel_gets}
            # One op more than lanes, so that none waits for the engine.
            in_flight = {kind: count + 1 for kind, count in lanes.items()}
            slots = SlotPool(self._arena.num_slots, self._arena.num_slots // LOAD_RESERVE)
            engine = Engine(slots, Limits(in_flight, OP_BYTES, OP_CELLS))
            self._executor = Executor(engine, planner, work.perform, lanes, self.tally)
        self.worker = PoolWorker(
            self._executor,
            config.chunk_tokens,
            model.block_size,
            finish_in_step,
            self.tally,
            copiers,
        )
        self.stats = StatsFile(config.stats_file, "worker", place.rank, self.tally)
        self._shutdown_s = min(config.shutdown_timeout_s, VLLM_SHUTDOWN_S)

    def close(self) -> None:
        """Finish saves for a bounded time, end the threads, release memory and store."""
        ended = self._executor.close(self._shutdown_s) if self._executor is not None else True
        if self._store is not None and ended:
            try:
                self._store.unregister(self._arena.whole)
                self._store.close()
            except StoreError as error:
                logger.warning("kvpool: closing the store: %s", error)
        elif self._store is not None:
            logger.warning("kvpool: a store call has not ended; its memory is left behind")
        self.stats.write(force=True)
