"""vLLM's entry for embeddings: chooses a part by role and forwards; it has no logic of its own.

The scheduler's process has an `EmbedsScheduler`; every worker that sends or receives has an
`EmbedsWorker` once its model is loaded. The process's main loop thread calls all hooks. Step
metadata names the items that a step loads or reuses, and the version of the weights. Some runners
drop it in steps without tokens, which load and reuse nothing.
"""

import atexit
import logging
import os
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm.distributed.ec_transfer import get_ec_transfer
from vllm.distributed.ec_transfer.ec_connector.base import (
    ECConnectorBase,
    ECConnectorMetadata,
    ECConnectorRole,
)

from vllm_kvpool.config import EmbedsConfig, read_embeds_config
from vllm_kvpool.embeds.availability import EmbedsRequest, Feature
from vllm_kvpool.embeds.machines.session import HeartbeatPolicy
from vllm_kvpool.embeds.params import read_delivery
from vllm_kvpool.embeds.protocol.messages import PeerRole
from vllm_kvpool.embeds.scheduler import EmbedsScheduler, EngineRole, StepMeta, workers_lost_s
from vllm_kvpool.embeds.worker import EmbedsWorker, WorkerIdentity
from vllm_kvpool.embeds.worker_channel import WorkerCard, WorkerChannel, host_name, tokens_of
from vllm_kvpool.metrics import StatsFile, open_stats_file
from vllm_kvpool.network.allowed_peers import AllowedPeers, check_advertised
from vllm_kvpool.network.transport_zmq import read_keys
from vllm_kvpool.plugin import log_as_vllm, register
from vllm_kvpool.vllm_adapt import ascend, compat
from vllm_kvpool.vllm_adapt import embeds as adapt
from vllm_kvpool.vllm_adapt.engine_config import rank_place
from vllm_kvpool.vllm_adapt.identity import weights_version

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

CARDS_S = 60.0  # until all workers, idle at the start, have answered the scheduler
IDLE_WAIT_S = 0.002  # an engine with nothing to compute may wait so long for an item


@dataclass
class KVPoolECMetadata(ECConnectorMetadata):
    """A step's metadata on its way to the workers."""

    step: StepMeta


class KVPoolECConnector(ECConnectorBase):
    """Moves embeddings of any size from encoders to language engines. See docs/embeddings.md."""

    def __init__(self, vllm_config: "VllmConfig", role: ECConnectorRole) -> None:
        super().__init__(vllm_config=vllm_config, role=role)
        log_as_vllm()
        self._config: EmbedsConfig = read_embeds_config(adapt.extra_config(vllm_config))
        adapt.check_model(vllm_config)
        ascend.share_engine()
        AllowedPeers(self._config.allowed_peers, self._config.peers)  # ConfigError before a start
        self._endpoints = adapt.endpoints_of(vllm_config, self._config)
        check_advertised(self._endpoints.advertised[0])
        self._scheduler_part: EmbedsScheduler | None = None
        self._worker_part: EmbedsWorker | None = None
        self._stats_file: StatsFile | None = None  # of the scheduler part
        self._views: dict[str, EmbedsRequest] = {}
        self._closed = False
        if role is ECConnectorRole.SCHEDULER:
            adapt.warn_of_numbers(vllm_config)
            self._base = adapt.base_fingerprint(vllm_config, self._config)
            self._scheduler_part = self._make_scheduler()
            rank = vllm_config.parallel_config.data_parallel_index
            self._stats_file = open_stats_file(
                self._config.stats_file, f"ec.scheduler.{rank}", self._scheduler_part.registry
            )
            weights_version.install()
            weights_version.watch(self._scheduler_part, vllm_config)
            weights_version.watch_encoder_cache(self._scheduler_part, vllm_config.model_config)
            self._resolver = adapt.metadata_resolver(vllm_config)
        self._pid = os.getpid()
        atexit.register(self.shutdown)

    def _make_scheduler(self) -> EmbedsScheduler:
        # An encoder's output is the same on all of its ranks: one sends.
        local = self._endpoints.local if self.is_consumer else self._endpoints.local[:1]
        cards = compat.ask_workers(_worker_card, CARDS_S)
        tokens = tokens_of(cards, len(local), host_name())
        config = self._config
        keys = read_keys(config.curve_dir)
        heartbeats = HeartbeatPolicy(config.heartbeat_s, config.heartbeat_max_failures)
        engine = EngineRole(
            is_producer=self.is_producer,
            is_consumer=self.is_consumer,
            has_peers=bool(config.peers),
            retain_bytes=config.nbytes("retain_bytes"),
            max_step_tokens=adapt.max_step_tokens(self._vllm_config),
            own_endpoint=self._endpoints.advertised[0],
            workers_lost_s=workers_lost_s(config),
        )
        channel = WorkerChannel(local, tokens, keys, heartbeats)
        return EmbedsScheduler(channel, engine, partial(adapt.fingerprint_with, self._base))

    # The worker part

    @property
    def worker_card(self) -> WorkerCard | None:
        """The card of this rank for the engine's scheduler; None without a control port."""
        worker = self._worker_part
        if worker is None:
            return None
        return WorkerCard(worker.rank, worker.scheduler_token, host_name())

    def start_worker_services(self) -> None:
        """Open the window and the sockets, now that the model is loaded."""
        assert self.role is ECConnectorRole.WORKER
        place = rank_place(self._vllm_config)
        # Only the first stage of a pipeline gathers embeddings.
        if place.pp_rank or self._worker_part is not None:
            return
        identity = WorkerIdentity(
            role=_ROLES[self.is_producer, self.is_consumer],
            fingerprint=adapt.broadcast_from_first_rank(
                lambda: adapt.base_fingerprint(self._vllm_config, self._config)
            ),
            rank=place.tp_rank,
            listen=self._endpoints.listen,
            endpoints=self._endpoints.advertised,
            host=self._endpoints.host,
            dp_rank=place.dp_rank,
            ranks_on_host=min(place.ranks_on_host, len(self._endpoints.listen)),
        )
        if identity.sends or identity.receives:
            self._worker_part = EmbedsWorker(self._config, identity)

    def start_save_caches(self, **kwargs: Any) -> None:
        """Offer what the engine's cache has and consumers ask for, as a step begins."""
        encoder_cache = kwargs.get("encoder_cache")
        if self._worker_part is not None and encoder_cache:
            step = self._step()
            self._worker_part.cached(encoder_cache, step.reused, step.weights)

    def save_caches(
        self, encoder_cache: "dict[str, torch.Tensor]", mm_hash: str, **kwargs: Any
    ) -> None:
        """Offer an item that the encoder has computed."""
        if self._worker_part is not None and self.is_producer and adapt.is_name(mm_hash):
            self._worker_part.produced(mm_hash, encoder_cache[mm_hash], self._step().weights)

    def start_load_caches(self, encoder_cache: "dict[str, torch.Tensor]", **kwargs: Any) -> None:
        """Put the step's items into the engine's cache."""
        if self._worker_part is None:
            return
        for load in self._step().loads:
            tensor = self._worker_part.take(load.name)
            if tensor is None:
                raise RuntimeError(f"kvpool: item {load.name} was reported ready and is not here")
            encoder_cache[load.mm_hash] = adapt.on_device(tensor, self._vllm_config)

    def _step(self) -> StepMeta:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, KVPoolECMetadata)
        return metadata.step

    # The scheduler part

    def has_cache_item(self, identifier: str) -> bool:
        """Return True if an item can be loaded in this step."""
        return self.is_consumer and self._side.has(identifier)

    def ensure_cache_available(self, request: "Request", num_computed_tokens: int) -> bool:
        """Return True if a request's items allow it to be scheduled; never waits."""
        is_started = adapt.is_started(request)
        return self._side.ensure(self._view(request), num_computed_tokens, is_started=is_started)

    def update_state_after_alloc(self, request: "Request", index: int) -> None:
        """Note that the engine's cache has room for an item of this step."""
        self._side.allocated(request.mm_features[index].identifier)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> ECConnectorMetadata:
        """Return the step's metadata for the workers."""
        # Data-parallel engines step together: one that waits holds up all.
        is_alone = self._vllm_config.parallel_config.data_parallel_size == 1
        is_idle = is_alone and not scheduler_output.total_num_scheduled_tokens
        freed = scheduler_output.free_encoder_mm_hashes
        scheduled = scheduler_output.num_scheduled_tokens
        step = self._side.plan(freed, scheduled, is_idle=is_idle, idle_wait_s=IDLE_WAIT_S)
        return KVPoolECMetadata(step)

    def take_unavailable_requests(self) -> set[str]:
        """Return the requests whose items can neither be received nor encoded here."""
        return self._side.take_unavailable()

    def request_finished(self, request: "Request") -> tuple[bool, dict[str, Any] | None]:
        """Return the parameters about an ended request's items for the next engine.

        Never keep the request: vLLM would not free it later.
        """
        view = self._view(request)
        self._side.finished(view)
        self._views.pop(request.request_id, None)
        if not self.is_producer or not view.features:
            return False, None
        endpoint, ids = self._endpoints.advertised[0], view.delivery.transfer_ids
        return False, adapt.answer_of(request, self._resolver, endpoint, ids)

    def get_ec_connector_stats(self) -> adapt.EmbedsStats | None:
        """Return the samples since the last call; the workers' samples come to the scheduler."""
        if self._scheduler_part is None:
            return None
        numbers = self._scheduler_part.take_samples()
        return adapt.EmbedsStats(numbers) if numbers else None

    @classmethod
    def build_ec_connector_stats(cls, data: dict[str, Any] | None = None) -> adapt.EmbedsStats:
        """Return the statistics object of `data`, in the process that logs."""
        return adapt.EmbedsStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: "VllmConfig",
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> adapt.EmbedsProm:
        """Return the Prometheus metrics, in the process that serves them."""
        return adapt.EmbedsProm(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def _view(self, request: "Request") -> EmbedsRequest:
        view = self._views.get(request.request_id)
        if view is None or len(view.features) != len(request.mm_features):
            features = tuple(Feature(*each) for each in adapt.features_of(request, self._resolver))
            names = [feature.mm_hash for feature in features]
            delivery = read_delivery(adapt.transfer_params(request), names)
            view = EmbedsRequest(request.request_id, features, delivery)
            self._views[request.request_id] = view
        return view

    @property
    def _side(self) -> EmbedsScheduler:
        assert self._scheduler_part is not None
        return self._scheduler_part

    # Both parts

    def shutdown(self) -> None:
        """End everything within a bounded time.

        A second call does nothing, nor does one in a copy of this process.
        """
        if self._closed or self._pid != os.getpid():
            return
        self._closed = True
        atexit.unregister(self.shutdown)
        if self._worker_part is not None:
            self._worker_part.close()
        if self._scheduler_part is not None:
            self._scheduler_part.close()
        if self._stats_file is not None:
            self._stats_file.close()


def _worker_card(worker: Any) -> WorkerCard | None:
    """Return the connector's `worker_card` in the process of this worker of vLLM's."""
    connector = get_ec_transfer()
    assert isinstance(connector, KVPoolECConnector)
    return connector.worker_card


_ROLES = {
    (True, False): PeerRole.PRODUCER,
    (False, True): PeerRole.CONSUMER,
    (True, True): PeerRole.BOTH,
}

register()  # for engines that name this module instead of the plugin
