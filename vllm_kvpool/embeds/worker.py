"""A worker's side of the embedding connector: opens everything, runs the control thread, ends it.

The model's thread calls `produced`, `cached` and `take`; none of them waits for a peer.
"""

import logging
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from vllm_kvpool.config import EmbedsConfig
from vllm_kvpool.embeds.allowed import AllowedPeers
from vllm_kvpool.embeds.consumer import Consumer
from vllm_kvpool.embeds.control import Control
from vllm_kvpool.embeds.dataplane import LandingMemory, WriterPlane, open_landing
from vllm_kvpool.embeds.hands import MovingHands
from vllm_kvpool.embeds.limits import QUARANTINE_S, ConsumerLimits, ProducerLimits
from vllm_kvpool.embeds.log_limit import LogLimit
from vllm_kvpool.embeds.producer import Producer
from vllm_kvpool.embeds.protocol import OLDEST_VERSION, VERSION, Hello, Role, WriteFailed, Wrote
from vllm_kvpool.embeds.session import Rhythm
from vllm_kvpool.embeds.sockets import Sockets, read_keys
from vllm_kvpool.embeds.tensors import Tensor, shape_of, to_host
from vllm_kvpool.embeds.threads import start_control
from vllm_kvpool.errors import ConfigError
from vllm_kvpool.metrics import StatsFile

logger = logging.getLogger(__name__)

JOIN_S = 2.0
KEPT_PARTS = 8  # of the memory for items, what is kept beside it for the next ones
LEAST_STAGING_BYTES = 64 << 10  # of a writer, however small the window that it writes to


@dataclass(frozen=True, slots=True)
class Place:
    """Which process of which engine this is."""

    role: Role
    engine_id: str
    fingerprint: str
    rank: int
    listen: tuple[str, ...]
    """What each rank binds."""
    endpoints: tuple[str, ...]
    """Where peers reach each rank."""
    host: str
    """Where peers reach this machine's data plane."""
    dp_rank: int = 0

    @property
    def number(self) -> int:
        """Among the workers of all data-parallel engines, which are configured alike."""
        return self.dp_rank * len(self.listen) + self.rank

    @property
    def sends(self) -> bool:
        """Encoder outputs are the same on all ranks: one sends."""
        return self.role in (Role.PRODUCER, Role.BOTH) and self.rank == 0

    @property
    def receives(self) -> bool:
        """Each rank needs every item."""
        return self.role in (Role.CONSUMER, Role.BOTH)


class EmbedsWorker:
    """See the module docstring. ConfigError or StoreError if something cannot be opened."""

    def __init__(self, config: EmbedsConfig, place: Place) -> None:
        self._config = config
        self._place = place
        self._closed = False
        keys = read_keys(config.curve_dir)
        allowed = AllowedPeers(config.allowed_peers, config.peers)
        log = LogLimit(logger)
        landing, plane = _open_planes(config, place)
        self._hands = MovingHands(
            self,
            landing,
            plane,
            writers=config.writer_threads,
            drainers=config.queue_shards,
            kept_bytes=config.nbytes("max_landing_bytes") // KEPT_PARTS,
            log=log,
        )
        try:
            sockets = Sockets(place.listen[place.rank], keys)
        except Exception:
            self._hands.close()
            raise
        self._consumer = _consumer(config, landing, len(place.endpoints))
        self._producer = _producer(config, plane)
        hello = Hello(
            versions=(OLDEST_VERSION, VERSION),
            incarnation=secrets.token_hex(8),
            engine_id=place.engine_id,
            role=place.role,
            fingerprint=place.fingerprint,
            heartbeat_s=config.heartbeat_s,
            rank=place.rank,
            endpoints=place.endpoints,
            window=landing.window if landing is not None else None,
        )
        self._sockets = sockets
        self._control = Control(
            hello,
            sockets,
            Rhythm(config.heartbeat_s, config.heartbeat_max_failures),
            self._hands,
            consumer=self._consumer,
            producer=self._producer,
            peers=config.peers,
            allowed=allowed,
            log=log,
        )
        self._thread = start_control(self._run)
        logger.info("kvpool: embeddings: rank %d at %s", place.rank, sockets.endpoint)

    def _run(self) -> None:
        try:
            self._control.run()
        finally:
            # zmq's sockets are closed by the thread that owns them.
            self._sockets.close()

    # The model's thread

    def produced(
        self, mm_hash: str, tensor: Tensor, epoch: int, aux: Mapping[str, Tensor] | None = None
    ) -> None:
        """The encoder has computed an item, [rows, ...], under these weights; it is kept.

        What cannot be sent costs whoever waits for it, and not the engine.
        """
        producer = self._producer
        if producer is None or self._control.is_over:
            return
        try:
            shape = shape_of(tensor, aux)
        except ConfigError as error:
            logger.error("kvpool: %s is used here alone: %s", mm_hash, error)
            self._control.post(lambda now: _count(producer, "unsendable_outputs"))
            return
        copies = [to_host(_own(each)) for each in (tensor, *(aux or {}).values())]

        def call(now: float) -> None:
            if epoch > self._control.epoch:
                self._control.when_epoch(epoch, call)  # the scheduler's word is on its way
                return
            if epoch < self._control.epoch:
                producer.counts["stale_outputs"] += 1
                return
            sid = producer.produced(mm_hash, shape, b"", now)
            if sid:
                self._hands.keep(sid, shape, copies)

        self._control.post(call)

    def cached(self, encoder_cache: Mapping[str, Tensor], epoch: int) -> None:
        """What the engine still has from earlier steps, for those who wait for it."""
        for mm_hash in self._control.missing:
            if mm_hash in encoder_cache:
                self.produced(mm_hash, encoder_cache[mm_hash], epoch)

    def take(self, mm_hash: str) -> list[Tensor] | None:
        """An item that the scheduler was told of, a tensor for each plane; the caller's now.

        None if it is not there, which the scheduler's pin excludes.
        """
        tensors = self._hands.take(mm_hash)
        consumer = self._consumer
        if tensors is not None and consumer is not None:
            self._control.post(lambda now: consumer.taken(mm_hash, now))
        return tensors

    # Hands

    def drained(self, grants: Sequence[tuple[int, bool]]) -> None:
        """Any thread."""
        consumer = self._consumer
        assert consumer is not None
        for gid, same in grants:
            self._control.post(partial(consumer.drained, gid, same))

    def prepared(self, sources: Sequence[tuple[int, str]]) -> None:
        """Any thread."""
        producer = self._producer
        assert producer is not None
        for sid, digest in sources:
            self._control.post(partial(producer.prepared, sid, digest))

    def written(self, results: Sequence[Wrote | WriteFailed]) -> None:
        """Any thread."""
        producer = self._producer
        assert producer is not None
        for each in results:
            self._control.post(partial(producer.written, each.tid, each.gid, each))

    def thread_died(self, name: str, error: BaseException) -> None:
        """Any thread."""
        self._control.thread_died(name, error)

    def close(self) -> None:
        """Say goodbye and end, within a bounded time; again does nothing."""
        if self._closed:
            return
        self._closed = True
        self._control.stop()
        self._thread.join(JOIN_S)
        self._hands.close()
        if self._config.stats_file:
            path = Path(f"{self._config.stats_file}.ec.worker.{self._place.number}")
            StatsFile(path, self._control.tally).close()


def _count(producer: Producer, event: str) -> None:
    producer.counts[event] += 1


def _own(tensor: Tensor) -> Tensor:
    """The tensor, or a copy if it is a part of a larger one, which would be kept with it."""
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor


def _open_planes(
    config: EmbedsConfig, place: Place
) -> tuple[LandingMemory | None, WriterPlane | None]:
    nbytes, transport = config.nbytes("arena_bytes"), config.transport.value
    host, protocol, device = place.host, config.protocol, config.device
    landing: LandingMemory | None = None
    plane: WriterPlane | None = None
    if place.receives:
        landing = open_landing(transport, nbytes, host=host, protocol=protocol, device=device)
    try:
        if place.sends:
            staging = max(nbytes, LEAST_STAGING_BYTES)
            plane = WriterPlane(transport, staging, host=host, protocol=protocol, device=device)
    except Exception:
        if landing is not None:
            landing.close()
        raise
    return landing, plane


def _consumer(
    config: EmbedsConfig, landing: LandingMemory | None, num_ranks: int
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


def _producer(config: EmbedsConfig, plane: WriterPlane | None) -> Producer | None:
    if plane is None:
        return None
    limits = ProducerLimits(
        retain_bytes=config.nbytes("retain_bytes"),
        waiting_timeout_s=config.waiting_timeout_s,
        writers=config.writer_threads,
    )
    return Producer(limits)


SLOWEST_BYTES_PER_S = 1 << 30  # what Mooncake adds to its own limit of a transfer's time
