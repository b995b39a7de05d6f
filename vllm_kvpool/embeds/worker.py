"""A worker's side of the embedding connector: the window, the sockets and the threads.

The model's thread calls `produced`, `cached` and `take`; none of them waits for a peer.
"""

import logging
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial

from vllm_kvpool.config import EmbedsConfig, Transport
from vllm_kvpool.embeds.control import Control
from vllm_kvpool.embeds.dataplane.io_workers import IoWorkers
from vllm_kvpool.embeds.dataplane.tensors import Tensor, shape_of, to_host
from vllm_kvpool.embeds.dataplane.transports import (
    LandingWindow,
    RowWriter,
    open_landing,
    open_writer,
)
from vllm_kvpool.embeds.faults import start_control
from vllm_kvpool.embeds.machines.consumer import Consumer
from vllm_kvpool.embeds.machines.items import QUARANTINE_S, ConsumerLimits
from vllm_kvpool.embeds.machines.producer import Producer, ProducerLimits
from vllm_kvpool.embeds.machines.session import HeartbeatPolicy
from vllm_kvpool.embeds.protocol.messages import (
    MAX_FRAME_BYTES,
    OLDEST_VERSION,
    VERSION,
    PeerHello,
    PeerRole,
    WeightsChanged,
)
from vllm_kvpool.errors import ConfigError
from vllm_kvpool.host_memory import check_memory
from vllm_kvpool.metrics import open_stats_file
from vllm_kvpool.network.allowed_peers import AllowedPeers
from vllm_kvpool.network.log_limit import LogLimit
from vllm_kvpool.network.transport_zmq import ZmqTransport, read_keys
from vllm_kvpool.storage.mooncake_wheel import uses_rdma

logger = logging.getLogger(__name__)

JOIN_S = 2.0
TOKEN_BYTES = 16
KEPT_PARTS = 8  # 1/n of max_landing_bytes is kept, beside it, for reuse by large items
LEAST_STAGING_BYTES = 64 << 10  # of a producer, however small its arena_bytes
SLOWEST_BYTES_PER_S = 1 << 30  # by which Mooncake extends its time limit of a transfer


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """The identity of a rank's process in its engine, and its address."""

    role: PeerRole
    fingerprint: str
    rank: int
    listen: tuple[str, ...]
    """Endpoints that the ranks bind."""
    endpoints: tuple[str, ...]
    """Endpoints at which peers reach the ranks."""
    host: str
    """Host at which peers reach this machine's data plane."""
    dp_rank: int = 0
    ranks_on_host: int = 1  # of this engine

    @property
    def number(self) -> int:
        """The worker's number in all data-parallel engines, which share a configuration."""
        return self.dp_rank * len(self.listen) + self.rank

    @property
    def sends(self) -> bool:
        """True if this rank sends: encoder outputs are the same on all ranks."""
        return self.role in (PeerRole.PRODUCER, PeerRole.BOTH) and self.rank == 0

    @property
    def receives(self) -> bool:
        """True if this rank receives: each rank needs every item."""
        return self.role in (PeerRole.CONSUMER, PeerRole.BOTH)


class EmbedsWorker:
    """The worker's side. ConfigError or StoreError if something cannot be opened."""

    def __init__(self, config: EmbedsConfig, identity: WorkerIdentity) -> None:
        self._closed = False
        self._log = LogLimit(logger)
        self.rank = identity.rank
        keys = read_keys(config.curve_dir)
        allowed = AllowedPeers(config.allowed_peers, config.peers)
        landing, writer = _open_data_plane(config, identity)
        self._io_workers = IoWorkers(
            landing, writer, kept_bytes=config.nbytes("max_landing_bytes") // KEPT_PARTS
        )
        try:
            sockets = ZmqTransport(
                identity.listen[identity.rank], MAX_FRAME_BYTES, keys, allowed.allows_address
            )
        except Exception:
            self._io_workers.close()
            raise
        self.scheduler_token = secrets.token_bytes(TOKEN_BYTES)
        """Secret that the engine's scheduler must show. It travels over vLLM's own connections."""
        self._consumer = _consumer(config, landing, len(identity.endpoints))
        self._producer = _producer(config, identity)
        hello = PeerHello(
            versions=(OLDEST_VERSION, VERSION),
            incarnation=secrets.token_hex(8),
            role=identity.role,
            fingerprint=identity.fingerprint,
            heartbeat_s=config.heartbeat_s,
            rank=identity.rank,
            endpoints=identity.endpoints,
            window=landing.window if landing is not None else None,
        )
        self._sockets = sockets
        self._control = Control(
            hello,
            sockets,
            HeartbeatPolicy(config.heartbeat_s, config.heartbeat_max_failures),
            self._io_workers,
            consumer=self._consumer,
            producer=self._producer,
            peers=config.peers,
            allowed=allowed,
            scheduler_token=self.scheduler_token,
            log=self._log,
        )
        self._io_workers.start(
            self._control, writers=config.writer_threads, drainers=config.queue_shards
        )
        self._thread = start_control(self._run)
        self._stats_file = open_stats_file(
            config.stats_file, f"ec.worker.{identity.number}", self._control.registry
        )
        logger.info("kvpool: embeddings: rank %d listens at %s", identity.rank, sockets.endpoint)

    def _run(self) -> None:
        try:
            self._control.run()
        finally:
            # The thread that owns zmq's sockets closes them.
            self._sockets.close()

    # The model's thread

    def produced(self, mm_hash: str, tensor: Tensor, weights: WeightsChanged) -> None:
        """Offer an item, [rows, ...], that the encoder has computed with these weights.

        An item that cannot be sent fails the requests that wait for it, not the engine.
        """
        producer = self._producer
        if producer is None or self._control.is_over:
            return
        try:
            shape = shape_of(tensor)
        except ConfigError as error:
            text = "kvpool: item %s is not sent to other engines: %s"
            self._log.log(logging.ERROR, "unsendable output", mm_hash, text, mm_hash, error)
            self._control.post(lambda now: _count(producer, "unsendable_outputs"))
            return
        copy = to_host(_own(tensor))

        def call(now: float) -> None:
            self._control.change_weights(weights, now)  # the scheduler's message may come later
            if weights.version < self._control.weights_version:
                producer.counts["stale_outputs"] += 1
                return
            item_id = producer.produced(mm_hash, shape, now)
            if item_id:
                self._io_workers.keep(item_id, shape, copy)

        self._control.post(call)

    def cached(
        self, encoder_cache: Mapping[str, Tensor], reused: Iterable[str], weights: WeightsChanged
    ) -> None:
        """Offer what the engine still has from earlier steps.

        Consumers wait for these items, or a request of this step reuses them: its consumer asks
        next, maybe when this engine runs no steps. An item that the producer drops at this very
        moment is offered again only when a later request reuses it.
        """
        producer = self._producer
        if producer is None:
            return
        for mm_hash in self._control.missing.union(reused):
            if producer.keeps(mm_hash):
                self._control.post(partial(producer.reused, mm_hash))
            elif mm_hash in encoder_cache:
                self.produced(mm_hash, encoder_cache[mm_hash], weights)

    def take(self, mm_hash: str) -> Tensor | None:
        """Return an item's tensor, which is the caller's now; None if it is not here.

        The scheduler names only items that are ready, and those stay until they are taken.
        """
        tensor = self._io_workers.take(mm_hash)
        consumer = self._consumer
        if tensor is not None and consumer is not None:
            self._control.post(lambda now: consumer.taken(mm_hash, now))
        return tensor

    def close(self) -> None:
        """End everything within a bounded time; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._control.stop()
        self._thread.join(JOIN_S)
        self._io_workers.close()
        if self._stats_file is not None:
            self._stats_file.close()


def _count(producer: Producer, event: str) -> None:
    producer.counts[event] += 1


def _own(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy if it is part of a larger one, which would be kept alive."""
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor


def _open_data_plane(
    config: EmbedsConfig, identity: WorkerIdentity
) -> tuple[LandingWindow | None, RowWriter | None]:
    nbytes, transport = config.nbytes("arena_bytes"), config.transport
    _check_memory(config, identity)
    host, protocol, device = identity.host, config.protocol, config.device
    landing: LandingWindow | None = None
    writer: RowWriter | None = None
    if identity.receives:
        landing = open_landing(transport, nbytes, host=host, protocol=protocol, device=device)
    try:
        if identity.sends:
            staging = max(nbytes, LEAST_STAGING_BYTES)
            writer = open_writer(transport, staging, host=host, protocol=protocol, device=device)
    except Exception:
        if landing is not None:
            landing.close()
        raise
    return landing, writer


def _check_memory(config: EmbedsConfig, identity: WorkerIdentity) -> None:
    """Raise ConfigError if the host lacks the memory that options set, for one rank or all."""
    is_network = config.transport is Transport.MOONCAKE
    windows = identity.receives + (identity.sends and is_network)
    arena = {"arena_bytes": config.nbytes("arena_bytes") * windows}
    grows = {
        name: config.nbytes(name)
        for name, is_used in (
            ("max_landing_bytes", identity.receives),
            ("retain_bytes", identity.sends),
        )
        if is_used
    }
    is_locked = is_network and uses_rdma(config.protocol, config.device)
    check_memory(
        arena,
        ranks=1 if identity.sends else identity.ranks_on_host,  # only the first rank sends, too
        grows=grows,
        locked=arena if is_locked else None,
    )


def _consumer(
    config: EmbedsConfig, landing: LandingWindow | None, num_ranks: int
) -> Consumer | None:
    if landing is None:
        return None
    limits = ConsumerLimits(
        num_ranks=num_ranks,
        max_landing_bytes=config.nbytes("max_landing_bytes"),
        max_item_bytes=config.nbytes("max_item_bytes"),
        default_allocate_tokens=config.default_allocate_tokens,
        bootstrap_timeout_s=config.bootstrap_timeout_s,
        waiting_timeout_s=config.waiting_timeout_s,
        quarantine_s=QUARANTINE_S + landing.nbytes / SLOWEST_BYTES_PER_S,
    )
    return Consumer(landing.nbytes, limits)


def _producer(config: EmbedsConfig, identity: WorkerIdentity) -> Producer | None:
    if not identity.sends:
        return None
    limits = ProducerLimits(
        retain_bytes=config.nbytes("retain_bytes"),
        waiting_timeout_s=config.waiting_timeout_s,
        writers=config.writer_threads,
    )
    return Producer(limits)
