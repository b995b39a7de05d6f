"""The worker part of the connector: what it consists of, opens, starts and closes, in order.

Made, used and closed by the model's thread.
"""

import contextlib
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from vllm_kvpool.config import KVPoolConfig, Verify, WritePolicy
from vllm_kvpool.handover.producer import NoticePlace, open_server
from vllm_kvpool.host_memory import check_memory, worker_needs
from vllm_kvpool.identity.keys import KeyMaker, Namespace
from vllm_kvpool.layout.engine_shape import ModelShape, RankPlace
from vllm_kvpool.layout.pages import LayerPages
from vllm_kvpool.layout.topology import LocalCell, ReplicaRank, cells_of_rank
from vllm_kvpool.metrics import MetricsRegistry, open_stats_file
from vllm_kvpool.network.allowed_peers import AllowedPeers
from vllm_kvpool.scheduler.blocks import GroupTables
from vllm_kvpool.staging.arena import Arena
from vllm_kvpool.staging.copier import Copier
from vllm_kvpool.staging.devices import HOST_DEVICE, Device, page_lock_for
from vllm_kvpool.staging.slots import SlotPool
from vllm_kvpool.storage.base import Buffer
from vllm_kvpool.storage.contents.manifest import MANIFEST_BYTES
from vllm_kvpool.storage.contents.manifest_writer import ManifestWriter
from vllm_kvpool.storage.eviction import POLICIES, Shares
from vllm_kvpool.storage.guarded import CallTimeouts
from vllm_kvpool.storage.mooncake import MooncakeOptions
from vllm_kvpool.storage.mooncake_wheel import uses_rdma
from vllm_kvpool.storage.open_tiers import OpenTiers, encrypted_cells, open_tiers
from vllm_kvpool.storage.tiers import HostTier, TierSpecs, tier_specs
from vllm_kvpool.storage.url import StoreSpec, check_capacity, uses_device
from vllm_kvpool.transfer.context import Tier
from vllm_kvpool.transfer.engine import Engine
from vllm_kvpool.transfer.executor import Executor, UseNamespace
from vllm_kvpool.transfer.graph import LaneLimits
from vllm_kvpool.transfer.host_cache import HostCache
from vllm_kvpool.transfer.lanes import BatchRunner
from vllm_kvpool.transfer.loans import ReplicaSet
from vllm_kvpool.transfer.ops import WRITES, LaneName, TierHealth
from vllm_kvpool.transfer.planner import Planner
from vllm_kvpool.transfer.replicas import ReplicaExchange
from vllm_kvpool.transfer.trace import NO_TRACE, RecordSpan, Trace, TraceFile, no_span
from vllm_kvpool.worker.lane_limits import (
    copy_batch_bytes,
    lanes_of,
    spare_threads,
    with_slab_limits,
)
from vllm_kvpool.worker.pool_worker import PoolWorker

logger = logging.getLogger(__name__)

LOAD_RESERVE = 4  # a quarter of the slots is for loads alone
KEPT_SHARE = 4  # at most a quarter of the slots is kept for ranks that have not asked yet
REPLICA_CALLS = 1.5  # call_timeout_s that a borrower waits: its lender may ask a second store
REPLICA_LOADS = 0.5  # and of load_timeout_s at most: then there is time to ask the tiers instead
LEAST_JOIN_S = 0.5
VLLM_SHUTDOWN_S = 4.0  # vLLM kills worker processes about a second later


class WorkerPart:
    """The pool in one rank's process.

    Args:
        make_copier: called once for each lane that moves pages, which lie on `device`.
        gather: gives this rank's bytes to all ranks of its pipeline stage and returns all of
            theirs, in one order; where ranks hold the same KV every rank calls it.
        notices: where to tell how far prompts are stored that other engines go on with.
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
        self.registry = MetricsRegistry()
        self._namespace = model.namespace
        self._has_drafter = any(layer_group.is_draft for layer_group in model.layer_groups)
        number = place.number(model.num_ranks)
        specs = tier_specs(config)
        cells = _cells_of(model, place, pages)
        self._page_lock = page_lock_for(pages)
        allowed = AllowedPeers(config.allowed_peers)
        with contextlib.ExitStack() as undo:
            exchange = self._exchange = _join(place, cells, gather, model, device)
            if exchange is not None:
                undo.callback(exchange.close)
            members = {} if exchange is None else _members(cells, exchange)
            planner = _planner_of(config, model, place, cells, exchange, keeps_all=_has_host(specs))
            planner = with_slab_limits(
                planner, device, config.staging_nbytes, by_span=bool(layer_spans)
            )
            for spec in specs.stores:
                check_capacity(spec, planner.max_cell_bytes())
            _check_memory(config, specs, place.ranks_on_host)
            timeouts = CallTimeouts(call_s=config.call_timeout_s)
            self._tiers = open_tiers(
                specs.stores, timeouts, segment=True, enter_device=device.enter_thread
            )
            undo.callback(self._tiers.close)
            stores = self._tiers.stores
            self._encrypted = encrypted_cells(config, stores)
            self._notices = (
                None if notices is None else open_server(notices, allowed, self.registry)
            )
            if self._notices is not None:
                undo.callback(self._notices.close)
            gather_copier, scatter_copier = make_copier(pages), make_copier(pages)
            arena = self._arena = Arena(
                config.staging_nbytes,
                planner.max_cell_bytes(),
                specs.host.nbytes,
                spare_nbytes=MANIFEST_BYTES,
                alignment=device.memory_alignment,
                memory_from=memory_source(device, specs.stores),
                shared=exchange is not None,
            )
            for store in stores:
                store.register(arena.whole)
            self._trace = _open_trace(config, number)
            runner = BatchRunner(
                stores=stores,
                names=self._tiers.names,
                arena=arena,
                gather_copier=gather_copier,
                scatter_copier=scatter_copier,
                chunk_tokens=planner.local_chunk_tokens,
                verify_checksum=config.verify is Verify.CHECKSUM,
                registry=self.registry,
                trace=self._trace,
                encrypted=self._encrypted,
                zeros=_zeros(planner),
            )
            lanes = lanes_of(
                self._tiers,
                copy_batch_bytes(device, (arena.num_slots - arena.num_kept) * arena.slot_bytes),
                min(copier.num_threads for copier in (gather_copier, scatter_copier)),
                spare_threads(device, place.ranks_on_host),
                replicas=exchange is not None,
            )
            replicas = None if exchange is None else _replica_set(config, members, arena)
            self._executor = Executor(
                _engine_of(config, specs.host, self._tiers, planner, arena, lanes, replicas),
                planner,
                runner.perform,
                {lane: threads for lane, (threads, _) in lanes.items()},
                self.registry,
                trace=self._trace,
                call_timeout_s=config.call_timeout_s,
                on_hung=lambda lane: stores[lane.tier].report_hung(writes=lane.kind in WRITES),
                on_lane_start=device.enter_thread,
                exchange=exchange,
                notices=self._notices,
                record_span=record_span,
            )
            lock_pages = self._lock_pages if self._page_lock is not None else None
            if exchange is not None:
                exchange.start(arena, self._executor.post, lock_pages)
            for tier, store in enumerate(stores):
                store.listen(partial(_post_health, self._executor, tier))
            has_manifests = bool(stores) and place.rank == 0
            self._manifests = ManifestWriter(stores, arena.spare) if has_manifests else None
            arena.commit_in_background(lock_pages)
            undo.pop_all()
        served = {} if exchange is None else _ranks_served(members, exchange)
        self.worker = PoolWorker(
            self._executor,
            config.chunk_tokens,
            model.groups[0].block_size,
            finish_in_step,
            self.registry,
            new_fence=device.new_event,
            rank=place.rank,
            ranks_served=served,
            resumes=GroupTables(model.groups).resumes,
            layer_spans=layer_spans,
            load_timeout_s=config.load_timeout_s,
            notices="" if self._notices is None else self._notices.endpoint,
            has_drafts=any(cell.is_draft for cell in cells),
            lookahead=model.lookahead,
        )
        self._stats = open_stats_file(config.stats_file, f"kv.worker.{number}", self.registry)
        self._shutdown_s = min(config.shutdown_timeout_s, VLLM_SHUTDOWN_S)

    def _lock_pages(self, part: Buffer) -> None:
        """Page-lock a part of the arena, and tell how much is locked (the arena's thread)."""
        assert self._page_lock is not None
        self._page_lock.lock(part)
        share = self._page_lock.num_bytes / self._arena.num_mapped_bytes
        self.registry.set("kvpool_page_locked_share", share)

    def use_namespace(self, namespace: Namespace, drafter: str = "") -> None:
        """Use this namespace for cells in plans, and this drafter's for drafts, from now on."""
        if namespace != self._namespace:
            self._namespace = namespace
            self.worker.lacks_drafts = bool(drafter) and not self._has_drafter
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
            self._tiers.close(self._arena.whole)
            if self._arena.close() and self._page_lock is not None:
                self._page_lock.close()
        else:  # calls that still run may use the memory
            self._tiers.leave_open()
        self._trace.close()
        if self._stats is not None:
            self._stats.close()


# What a worker consists of


def _has_host(specs: TierSpecs) -> bool:
    return specs.host.nbytes > 0


def _cells_of(
    model: ModelShape, place: RankPlace, pages: Sequence[LayerPages]
) -> tuple[LocalCell, ...]:
    """Return the cells of this rank."""
    groups = [layer.group for layer in pages]
    return cells_of_rank(model.layer_groups, place.tp_rank, place.pp_rank, place.pcp_rank, groups)


def _planner_of(
    config: KVPoolConfig,
    model: ModelShape,
    place: RankPlace,
    cells: tuple[LocalCell, ...],
    exchange: ReplicaExchange | None,
    *,
    keeps_all: bool,
) -> Planner:
    """Return this rank's planner, without limits of slabs."""
    context = model.context
    return Planner(
        cells=cells,
        keys=KeyMaker(model.namespace, context.rank(place.tp_rank, place.pcp_rank)),
        chunk_tokens=config.chunk_tokens,
        load_timeout_s=config.load_timeout_s,
        keeps_all=keeps_all,
        block_sizes=tuple(group.block_size // context.dcp_size for group in model.groups),
        context=context,
        siblings={} if exchange is None else exchange.siblings,
    )


def _engine_of(
    config: KVPoolConfig,
    host: HostTier,
    tiers: OpenTiers,
    planner: Planner,
    arena: Arena,
    lanes: Mapping[LaneName, tuple[int, LaneLimits]],
    replicas: ReplicaSet | None,
) -> Engine:
    """Return the engine over the open tiers and the arena's slots."""
    cells_of_groups = Counter(cell.span.layer_group for cell in planner.cells)
    return Engine(
        HostCache(
            SlotPool(arena.num_slots, (arena.num_slots - arena.num_kept) // LOAD_RESERVE),
            arena.num_kept,
            POLICIES[host.policy],
            planner.slabs_per_chunk,
            has_shares=host.shares is Shares.TENANT,
            least_cells=min(cells_of_groups.values(), default=1),
        ),
        tuple(
            Tier(name, store.capabilities.durable, store.capabilities.remote)
            for name, store in zip(tiers.names, tiers.stores, strict=True)
        ),
        {lane: limits for lane, (_, limits) in lanes.items()},
        write_back=config.write_policy is WritePolicy.BACK,
        slot_bytes=arena.slot_bytes,
        replicas=replicas,
    )


def _open_trace(config: KVPoolConfig, number: int) -> Trace:
    if not config.trace_file:
        return NO_TRACE
    path = Path(f"{config.trace_file}.{number}.json")
    return TraceFile(path, f"kvpool rank {number}", os.getpid())


def _zeros(planner: Planner) -> Buffer | None:
    """Return zeros for the pages of optional cells that cannot be had.

    The result is None if no cell is optional.
    """
    tokens = planner.local_chunk_tokens
    nbytes = max((c.payload_bytes(tokens) for c in planner.cells if c.is_optional), default=0)
    if not nbytes:
        return None
    zeros = np.zeros(nbytes, np.uint8)  # never written, so it takes no memory
    return Buffer(int(zeros.ctypes.data), zeros.data)


def _check_memory(config: KVPoolConfig, specs: TierSpecs, ranks: int) -> None:
    """Raise ConfigError if the host lacks the memory that options set, for one worker or all."""
    arena = {"staging_bytes": config.staging_nbytes, "host://": specs.host.nbytes}
    locked = {
        f"segment= of {spec.url}": options.segment_bytes
        for spec in specs.stores
        if isinstance(options := spec.options, MooncakeOptions)
        and not options.fabric
        and uses_rdma(options.protocol, options.device)
    }
    check_memory(
        worker_needs(arena, specs.client_bytes, has_host=_has_host(specs)),
        ranks=ranks,
        locked={**arena, **locked} if locked else None,
    )


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


def _post_health(executor: Executor, tier: int, is_up: bool, is_writable: bool) -> None:
    executor.post(TierHealth(tier, is_up, is_writable))


# Ranks on this host that hold the same KV


def _join(
    place: RankPlace,
    cells: Sequence[LocalCell],
    gather: Callable[[bytes], Sequence[bytes]] | None,
    model: ModelShape,
    device: Device,
) -> ReplicaExchange | None:
    """Return the exchange with ranks on this host that hold the same KV; None without any."""
    if gather is None or not model.loads or not any(cell.replicas for cell in cells):
        return None
    exchange = ReplicaExchange(
        ReplicaRank(place.tp_rank, place.pcp_rank), place.rank, shares=device.shares_memory
    )
    with contextlib.ExitStack() as undo:
        undo.callback(exchange.close)
        exchange.join(gather(exchange.card.pack()))
        if any(set(cell.replicas) & exchange.siblings.keys() for cell in cells):
            undo.pop_all()
            return exchange
    return None


def _members(cells: Sequence[LocalCell], exchange: ReplicaExchange) -> dict[str, frozenset[int]]:
    """Return the ranks that share each layer group.

    Groups that no other rank holds are left out.
    """
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


def _ranks_served(
    members: Mapping[str, frozenset[int]], exchange: ReplicaExchange
) -> dict[str, tuple[int, ...]]:
    """Return by layer group the engine's ranks that load from this rank's host memory."""
    return {group: exchange.ranks_of(sorted(numbers)) for group, numbers in members.items()}


def _replica_set(
    config: KVPoolConfig, members: Mapping[str, frozenset[int]], arena: Arena
) -> ReplicaSet:
    """Return the limits of loans. A borrower has as long for its scatter as for its ask."""
    ask_s = min(REPLICA_CALLS * config.call_timeout_s, REPLICA_LOADS * config.load_timeout_s)
    return ReplicaSet(members, ask_s, 2 * ask_s, arena.num_slots // KEPT_SHARE)
