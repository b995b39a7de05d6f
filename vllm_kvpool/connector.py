"""`KVPoolConnector`, the class that vLLM loads: forwards vLLM's hooks to one of its two parts.

The scheduler's process holds a `SchedulerPart`, every worker a `WorkerPart` from the moment its KV
caches are registered. vLLM calls all hooks on the process's main loop thread.
"""

import atexit
import logging
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from vllm_kvpool.config import read_config
from vllm_kvpool.identity.keys import Namespace, chunk_id_of, manifest_key, with_weights
from vllm_kvpool.layout.description import described
from vllm_kvpool.network.allowed_peers import AllowedPeers
from vllm_kvpool.plugin import log_as_vllm, register
from vllm_kvpool.scheduler.messages import StepPlan, StepReport
from vllm_kvpool.scheduler.pool_scheduler import PoolScheduler
from vllm_kvpool.scheduler.request import ScheduledStep, StateOffer
from vllm_kvpool.scheduler.scheduler_part import SchedulerPart
from vllm_kvpool.storage.contents.manifest import Manifest, fitted, write_manifest
from vllm_kvpool.storage.start_notes import (
    without_effect,
    without_shared_store,
    work_in_words,
)
from vllm_kvpool.storage.tiers import tier_specs
from vllm_kvpool.vllm_adapt import ascend, compat, engine_config, kv_events
from vllm_kvpool.vllm_adapt.identity import weights_version
from vllm_kvpool.vllm_adapt.requests import RequestReader
from vllm_kvpool.vllm_adapt.stats import HitSources, KVPoolProm, KVPoolStats
from vllm_kvpool.vllm_adapt.tracing import record_span
from vllm_kvpool.worker.pool_worker import NOTHING_ENDED, StepResults
from vllm_kvpool.worker.worker_part import WorkerPart

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)


@dataclass
class KVPoolMetadata(KVConnectorMetadata):
    """A step's plan and the namespace of its cells, on their way to the workers."""

    plan: StepPlan
    namespace: Namespace
    manifest: tuple[Namespace, bytes] | None = None
    """A namespace and its manifest; sent once for each namespace."""
    drafter: str = ""
    """The identity of the drafter whose layers are stored, too; empty without."""
    is_empty: bool = False
    """True if the step computes nothing."""


@dataclass
class KVPoolWorkerMetadata(KVConnectorWorkerMetadata):
    """The workers' reports on their way to the scheduler, which merges them."""

    reports: list[StepReport]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "KVPoolWorkerMetadata":
        """Add another rank's report."""
        assert isinstance(other, KVPoolWorkerMetadata)
        return KVPoolWorkerMetadata(self.reports + other.reports)


class KVPoolConnector(KVConnectorBase_V1, SupportsHMA):
    """vLLM's connector to the pool of KV cache. docs/configuration.md has the options."""

    _scheduler: PoolScheduler  # in the scheduler's process alone

    def __init__(
        self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig"
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        log_as_vllm()
        self._config = read_config(engine_config.extra_config(vllm_config))
        AllowedPeers(self._config.allowed_peers)  # ConfigError before a start
        ascend.share_engine()
        # Ranks are sent the namespace: only one process reads a sample of the weights.
        self._facts = engine_config.read_engine(
            vllm_config,
            kv_cache_config,
            self._config,
            with_namespace=role is KVConnectorRole.SCHEDULER,
        )
        self._scheduler_part: SchedulerPart | None = None
        self._worker_part: WorkerPart | None = None
        self._end_polling: Callable[[], None]  # of the worker's process
        self._invalid_blocks: frozenset[int] = frozenset()
        self._outer_error: BaseException | None = None  # that a caller handles, not this step's
        self._open_meta: KVPoolWorkerMetadata | None = (
            None  # of a step whose drafter still computes
        )
        self._closed = False
        if role is KVConnectorRole.SCHEDULER:
            engine_config.prefer_recompute(vllm_config, self._config)
            weights_version.install()
            compat.step_while_pending()
            self._block_tables = compat.BlockTables()
            self._pins = engine_config.PoolPins(
                self._own_cache_was_reset, lambda: self._scheduler.saves.drop_late()
            )
            self._scheduler_part = SchedulerPart(
                self._config,
                engine_config.role_of(vllm_config),
                self._facts.shape,
                self._pins,
                engine_config.rank_place(vllm_config).dp_rank,
                engine_config.first_weights_version(vllm_config),
                engine_config.scheduler_device().enter_thread,
                compat.watch_arrivals,
            )
            self._scheduler = self._scheduler_part.scheduler
            lora = vllm_config.lora_config
            self._requests = RequestReader(
                self._scheduler_part.registry,
                media_are_named=compat.names_media(vllm_config),
                defects=self._facts.defects,
                has_own_cache=bool(vllm_config.cache_config.enable_prefix_caching),
                has_adapters=lora is not None,
                adapts_encoders=lora is not None and lora.enable_tower_connector_lora,
                on_replaced=self._scheduler.adapter_was_replaced,
            )
            for defect in self._facts.defects:
                logger.warning("kvpool: %s", defect.warning)
            weights_version.watch(self._scheduler_part, vllm_config)
            weights_version.watch_adapters(self._requests, vllm_config.model_config)
            for watcher in (self._scheduler, self._requests):
                weights_version.watch_encoder_cache(watcher, vllm_config.model_config)
            self._shown_values = fitted(self._facts.values)
            self._described_version: str | None = None
            logger.info(
                "kvpool: namespace %s, tiers %s, %s, chunk_tokens=%d, %d cells per chunk; the "
                "values behind the namespace are stored as %s",
                self._facts.shape.namespace,
                ", ".join(self._scheduler_part.tiers_in_words) or "none",
                work_in_words(
                    self._config,
                    engine_config.role_of(vllm_config),
                    loads=self._facts.shape.loads,
                ),
                self._config.chunk_tokens,
                self._facts.shape.cells_per_chunk,
                manifest_key(self._facts.shape.namespace),
            )
            specs = tier_specs(self._config)
            num_hosts = vllm_config.parallel_config.nnodes_within_dp
            for note in (
                *without_effect(self._config, specs),
                *without_shared_store(specs, num_hosts),
            ):
                logger.warning("kvpool: %s", note)
            self._hit_sources = HitSources([tier.name for tier in self._scheduler_part.tiers])
            self._events = self._make_events()
        # vLLM does not call `shutdown` in every way a process can end.
        self._pid = os.getpid()
        atexit.register(self.shutdown)

    def _make_events(self) -> kv_events.KVEvents | None:
        part, shape = self._scheduler_part, self._facts.shape
        if not kv_events.are_on(self._vllm_config):
            return None
        if not compat.tells_locality():
            logger.warning(
                "kvpool: the pool publishes no KV events: this release of vLLM names no locality "
                "in them, so host memory and Mooncake would be one medium; use vLLM 0.26 or newer"
            )
            return None
        assert part is not None
        assert self._kv_cache_config is not None
        return kv_events.KVEvents(
            self._vllm_config,
            self._kv_cache_config,
            self._facts.reference_group,
            shape.namespace,
            self._config.chunk_tokens,
            part.tiers,
            part.scheduler.host,
        )

    # What the engine asks before it starts

    @property
    def requires_kv_delivery(self) -> bool:
        """False: what the pool cannot deliver is computed."""
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: "VllmConfig") -> str | None:
        """Return head-major pages where the model has heads: they are gathered in larger pieces."""
        return engine_config.preferred_layout(vllm_config)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Return True if layers wait for their load, which they cannot do inside a CUDA graph."""
        return read_config(extra_config).layerwise

    # The worker part

    def register_kv_caches(self, kv_caches: "dict[str, Any]") -> None:
        """Open the stores and start the lanes, now that the pages are allocated."""
        weights_version.models.watch_callers()
        self._end_polling = compat.polling_end()
        device = engine_config.device_of(kv_caches)
        self._worker_part = WorkerPart(
            self._config,
            self._facts.shape,
            engine_config.rank_place(self._vllm_config),
            engine_config.layer_pages(kv_caches, self._facts, self._vllm_config, device),
            partial(engine_config.make_copier, device=device),
            finish_in_step=engine_config.gathers_in_step(device),
            device=device,
            layer_spans=engine_config.layer_spans(self._facts, self._vllm_config)
            if self._config.layerwise
            else None,
            gather=engine_config.gather_in_stage,
            record_span=record_span,
            notices=engine_config.notice_place(
                self._vllm_config, self._config, self._facts.shape.num_ranks
            ),
        )

    def unregister_kv_caches(self) -> None:
        """Wait until no copy uses the pages, whose memory vLLM 0.33 frees while it sleeps.

        After it has woken up they have the addresses that they had before.
        """
        if self._worker_part is not None:
            self._worker_part.worker.wait_for_copies()

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Take the step's plan and start its loads, beside the forward pass."""
        super().bind_connector_metadata(connector_metadata)
        self._outer_error = sys.exc_info()[1]
        assert isinstance(connector_metadata, KVPoolMetadata)
        if self._worker_part is not None:
            self._worker_part.use_namespace(
                connector_metadata.namespace, connector_metadata.drafter
            )
            if connector_metadata.manifest is not None:
                self._worker_part.keep_manifest(*connector_metadata.manifest)
        self.start_load_kv(None)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Start the step's loads."""
        if self._worker_part is not None:
            self._worker_part.worker.start_loads(self._metadata().plan)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Wait until the layer's KV is loaded, with `layerwise`."""
        if self._worker_part is not None:
            self._worker_part.worker.wait_for_layer(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: "torch.Tensor", attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Do nothing: saves start when the step has ended (`wait_for_save`)."""

    def wait_for_save(self) -> None:
        """Start the step's saves.

        vLLM's first runner asks for the report before its drafter computes, and sends it after it.
        An in-process engine may make no further step in which blocks could be released.
        """
        if self._worker_part is None:
            return
        worker = self._worker_part.worker
        if self._step_fails:
            worker.fail_step()
        worker.start_saves(self._metadata().plan)
        meta, self._open_meta = self._open_meta, None
        if meta is not None and (report := worker.take_gathered()) is not None:
            meta.reports.append(report)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return the requests whose load has ended in this rank; for vLLM before 0.32."""
        return None, set(self._finish_step(finished_req_ids).loaded) or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Return the requests whose load has ended in this rank, and which of them have failed."""
        results = self._finish_step(finished_req_ids)
        return compat.transfer_results(results.loaded, results.failed)

    def _finish_step(self, finished_req_ids: set[str]) -> StepResults:
        if self._worker_part is None or self._step_fails:
            return NOTHING_ENDED
        metadata = self._metadata() if self.has_connector_metadata() else None
        plan = None if metadata is None else metadata.plan
        if plan is not None and not self._worker_part.worker.has_drafts:
            # Some releases skip `wait_for_save` in steps without tokens. With drafts, which some
            # compute after this call, such saves start with the next step.
            self._worker_part.worker.start_saves(plan)
        results = self._worker_part.worker.finish_step(plan, finished_req_ids)
        if metadata is not None and metadata.is_empty:
            self._end_polling()
        if results.invalid_blocks:
            self._invalid_blocks |= results.invalid_blocks
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that ended loads have not filled, since the last call."""
        if self._step_fails:
            return set()
        blocks, self._invalid_blocks = self._invalid_blocks, frozenset()
        return set(blocks)

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Return the rank's report for the scheduler part."""
        if self._worker_part is None or self._step_fails:
            return None
        report = self._worker_part.worker.take_report()
        meta = KVPoolWorkerMetadata([] if report is None else [report])
        self._open_meta = meta if self._worker_part.worker.awaits_saves else None
        return meta if meta.reports or self._open_meta is not None else None

    @property
    def _step_fails(self) -> bool:
        """True if an error of the step's forward pass is under way.

        vLLM's first runner calls the hooks of the step's end even so, and drops their results.
        """
        return sys.exc_info()[1] is not self._outer_error

    def _metadata(self) -> KVPoolMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, KVPoolMetadata)
        return metadata

    # The scheduler part

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Take the block pool, in which saves hold references."""
        self._pins.use_pool(gpu_block_pool)

    def _own_cache_was_reset(self, is_empty: bool) -> None:
        weights_version.own_cache_was_reset()
        if is_empty and self._events is not None:
            self._events.own_cache_was_reset()
        if is_empty:
            self._scheduler.own_cache_was_reset()
            self._requests.own_cache_was_reset()

    def on_new_request(self, request: "Request") -> None:
        """Begin the lookup of a request that has arrived."""
        if self._events is not None:
            self._events.add(request)
        self._scheduler.add(self._requests.read(request))

    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return the number of tokens beyond the computed ones that a load can bring.

        Never waits for a store.
        """
        matched = self._scheduler.match(request.request_id, num_computed_tokens)
        # vLLM ends a step there and offers the state, as where its own cache sees a common prefix.
        own_boundary = getattr(request, "shared_prefix_boundary", 0)  # not in vLLM 0.27.1
        boundary = self._scheduler.wanted_boundary(request.request_id, own_boundary)
        if boundary > num_computed_tokens:
            request.shared_prefix_boundary = boundary
        return matched

    def get_loaded_kv_cache_group_ids(self, request: "Request") -> tuple[int, ...]:
        """Return the KV cache groups whose blocks a load fills in every layer: none.

        A drafter's layers are in the same blocks, and the drafter's cells may be missing. vLLM
        zeroes the blocks of all other groups if these may hold bytes of another type (recurrent
        states, mixed types). It does so before the step's loads; scatters wait (`Copier.fence`).
        """
        return ()

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        """Take the blocks that vLLM has allocated for the request."""
        tables = blocks.get_block_ids() if num_external_tokens else ()
        self._scheduler.allocated(request.request_id, tables, num_external_tokens)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KVConnectorMetadata:
        """Return the step's plan for the workers."""
        tables = self._block_tables.of_step(scheduler_output)
        preempted = scheduler_output.preempted_req_ids or ()
        states = {
            request_id: [StateOffer(*offer) for offer in offers]
            for request_id, offers in compat.state_offers(scheduler_output).items()
        }
        drafted = scheduler_output.scheduled_spec_decode_tokens
        scheduled = scheduler_output.num_scheduled_tokens
        step = ScheduledStep(scheduled, tables, preempted, states, drafted)
        plan, version = self._scheduler.plan_step(step), self._scheduler.weights_version
        if self._events is not None:
            self._events.planned(plan, version)
        manifest = None
        if version != self._described_version:  # no step has been planned with these weights yet
            self._described_version, manifest = version, self._manifest_of(version)
        facts = self._facts
        return KVPoolMetadata(
            plan, facts.shape.namespace, manifest, facts.drafter, is_empty=not scheduled
        )

    def _manifest_of(self, weights_version: str) -> tuple[Namespace, bytes]:
        first = self._facts.shape.namespace
        namespace = with_weights(first, weights_version)
        return namespace, write_manifest(
            Manifest(
                *(namespace, first, weights_version, self._shown_values),
                # Equal in engines with and without drafts.
                described([each for each in self._facts.shape.layer_groups if not each.is_draft]),
            )
        )

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        """Take the workers' reports."""
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, KVPoolWorkerMetadata):
            report = StepReport.merge(meta.reports)
            ended = self._scheduler.apply(report)
            if self._events is not None:
                self._events.apply(report, ended)
        self._scheduler.step_ended()
        for request_id in connector_output.finished_recving or ():
            self._scheduler.load_ended(request_id)

    def request_finished(
        self, request: "Request", block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Plan the last saves of a request that has ended; vLLM may free its blocks at once."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """End a request as `request_finished`, with one block table for each KV cache group."""
        self._block_tables.drop_request(request.request_id)
        if self._events is not None:
            self._events.finished(request.request_id)
        answer = self._scheduler.finish(request.request_id, block_ids)
        return False, answer if engine_config.may_answer(request) else None

    def has_pending_block_frees(self) -> bool:
        """Return True if saves hold blocks, so that waiting frees some without a preemption."""
        return self._scheduler.saves.has_pins

    def has_pending_push_work(self) -> bool:
        """Return True if vLLM is to make a further step although no request is left."""
        is_telling = self._events is not None and self._events.has_pending
        pool = self._scheduler
        return pool.has_pending or pool.saves.outcomes.is_awaited or is_telling

    def reset_cache(self) -> bool | None:
        """Remove every cell of this engine's namespace; False if a store has not confirmed it.

        Waits for the stores, at most `RESET_WAIT_S`. When vLLM resets caches because it pauses or
        sleeps, nothing is removed: other engines share the cells.
        """
        if weights_version.is_pausing():
            return True
        if self._events is not None:
            self._events.reset()
        return self._scheduler.reset()

    def take_events(self) -> Iterable[Any]:
        """Return the KV events of the pool's tiers since the last call."""
        return () if self._events is None else self._events.take()

    def get_external_cache_hit_sources(
        self, request: "Request", num_external_tokens: int
    ) -> dict[Any, int]:
        """Return the tokens of the request's hit by the medium that they come from."""
        load = self._scheduler.load_of(request.request_id)
        namespace = with_weights(self._facts.shape.namespace, self._scheduler.weights_version)
        layer_group = self._facts.reference_group.name
        return self._hit_sources.of(
            load,
            num_external_tokens,
            self._config.chunk_tokens,
            lambda chunk_hash: self._scheduler.host.has(
                chunk_id_of(namespace, chunk_hash.hex(), layer_group)
            ),
        )

    # Both parts

    def get_kv_connector_stats(self) -> KVPoolStats | None:
        """Return the samples that have changed since the last call."""
        part = self._scheduler_part or self._worker_part
        return None if part is None else KVPoolStats.since_last(part.registry)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVPoolStats | None:
        """Return the statistics of `data`, in the process that logs."""
        return KVPoolStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: "VllmConfig",
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVPoolProm:
        """Return the Prometheus metrics, in the process that serves them."""
        return KVPoolProm(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """Finish saves for a bounded time, then close its part.

        A second call does nothing, nor does one in a copy of this process: a program with an
        in-process engine may have forked.
        """
        if self._closed or self._pid != os.getpid():
            return
        self._closed = True
        atexit.unregister(self.shutdown)
        for part in (self._scheduler_part, self._worker_part):
            if part is not None:
                part.close()


register()  # for engines that name this module instead of the plugin
