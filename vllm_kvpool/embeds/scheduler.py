"""The scheduler's side of the embedding connector: which items requests wait for, and which are
here.

An item is ready when every rank has reported the same encoding. A ready item stays until it is
loaded or no request waits for it, since the engine does not ask twice. If ranks are offered
different encodings, the scheduler chooses one for all. Windows, rounds and rows are the
workers'. Everything runs on the scheduler's thread.
"""

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from vllm_kvpool.config import EmbedsConfig
from vllm_kvpool.embeds.params import Delivery
from vllm_kvpool.embeds.protocol.messages import (
    Code,
    Expect,
    Forget,
    HeldBytes,
    ItemNews,
    MetricSamples,
    Push,
    Requested,
    Taken,
    WeightsChanged,
)
from vllm_kvpool.embeds.worker_channel import WorkerChannel
from vllm_kvpool.metrics import MetricsRegistry, Samples, merge_samples
from vllm_kvpool.network.log_limit import LogLimit

logger = logging.getLogger(__name__)

MAX_OFFERED = 1 << 16
PROBE_S = 0.25
LOADING_S = 30.0  # the longest from planning a load to the step that takes it
MAX_CHOICES = 4  # encodings of one item that are tried
WORKERS_LOST_S = 30.0  # without an answer: requests no longer wait for the workers


def workers_lost_s(config: EmbedsConfig) -> float:
    """Seconds of the workers' silence after which requests go on without them."""
    missed_s = config.heartbeat_s * config.heartbeat_max_failures
    return max(missed_s, min(WORKERS_LOST_S, config.bootstrap_timeout_s))


FIRST_WEIGHTS = WeightsChanged(0, "")
LOST_WORKERS = Code.UNREACHABLE, "the engine's workers do not answer"


class Feature(NamedTuple):
    """A multimodal item of a request, at [start, end) of its prompt."""

    mm_hash: str
    start: int
    end: int
    rows: int
    has_media: bool
    """True if this engine could encode the item."""
    is_named: bool = True
    """False where vLLM has numbered it: another engine gives that number to another item."""


class EmbedsRequest(NamedTuple):
    """The scheduler side's record of a request."""

    request_id: str
    features: tuple[Feature, ...]
    delivery: Delivery


class ItemLoad(NamedTuple):
    """An item that the workers put into the engine's encoder cache."""

    mm_hash: str
    """The engine's name."""
    name: str
    """The producer's name."""


@dataclass(frozen=True)
class StepMeta:
    """A step's metadata for the workers."""

    weights: WeightsChanged = FIRST_WEIGHTS
    loads: tuple[ItemLoad, ...] = ()


@dataclass(slots=True)
class PendingItem:
    """An item that requests wait for."""

    mm_hash: str
    name: str
    requests: dict[str, Expect] = field(default_factory=dict)  # and the message sent for each
    digests: dict[int, str] = field(default_factory=dict)  # by rank; there, or on its way
    ready: set[int] = field(default_factory=set)  # ranks where it is
    digest: str = ""  # the encoding chosen for all ranks; empty: none had to be
    others: dict[str, None] = field(default_factory=dict)  # encodings that have not been tried
    choices: int = 0
    failure: tuple[Code, str] | None = None


@dataclass(slots=True)
class EmbedsRequestState:
    """A request with items, until it ends."""

    order: int  # by age: older requests are lower
    encoded_here: set[str] = field(default_factory=set)  # items that it encodes here
    pushes: dict[str, Push] = field(default_factory=dict)  # the messages sent for it, by item


class EmbedsScheduler:
    """The scheduler's side of one engine."""

    def __init__(
        self,
        channel: WorkerChannel,
        *,
        is_producer: bool,
        is_consumer: bool,
        has_peers: bool,
        fingerprint: Callable[[str], str],
        retain_bytes: int,
        max_step_tokens: int,
        own_endpoint: str = "",
        workers_lost_s: float = WORKERS_LOST_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._channel = channel
        self._workers_lost_s = workers_lost_s
        self._is_producer = is_producer
        self._is_consumer = is_consumer
        self._has_peers = has_peers
        self._fingerprint = fingerprint
        self._retain_bytes = retain_bytes
        self._max_step_tokens = max_step_tokens
        self._clock = clock
        self._log = LogLimit(logger, clock)
        self.own_endpoint = own_endpoint
        self._pending: dict[str, PendingItem] = {}
        self._by_name: dict[str, str] = {}
        # item -> ranks that have not loaded it, and until when that is waited for
        self._loading: dict[str, tuple[set[int], float]] = {}
        self._offered: dict[str, None] = {}
        self._resident: set[str] = set()  # in the engine's encoder cache, as far as known
        self._requests: dict[str, EmbedsRequestState] = {}
        self._next_order = 0
        self._loads: list[ItemLoad] = []
        self._allocated: set[str] = set()  # in this step
        self._unavailable: set[str] = set()
        self._held_bytes = 0
        self._is_encoding_held = False
        self._are_workers_lost = False
        self._weights = FIRST_WEIGHTS  # the last message
        self.registry = MetricsRegistry()
        self._from_workers: Samples = {}

    # From the engine

    def ensure(self, request: EmbedsRequest, num_computed_tokens: int) -> bool:
        """Return True if the request's items allow it to be scheduled."""
        self._poll_workers()
        self._check_workers()
        if not (self._channel.are_up or self._are_workers_lost):
            return False  # a message would be lost now
        ahead = [
            feature
            for feature in request.features
            if num_computed_tokens < feature.end
            and feature.start <= num_computed_tokens + self._max_step_tokens
        ]
        may_go = True
        if self._is_consumer:
            lacks = any(each.mm_hash not in self._resident for each in ahead)
            for feature in ahead:
                may_go &= self._is_available(request, feature, lacks)
        if self._is_producer:
            may_go &= self._may_encode(request, ahead)
        return may_go

    def _check_workers(self) -> None:
        """Note whether the workers have been silent too long for requests to wait."""
        were_lost = self._are_workers_lost
        self._are_workers_lost = self._channel.silent_s > self._workers_lost_s
        if self._are_workers_lost and not were_lost:
            self._count("workers_lost")
            logger.error(
                "kvpool: the engine's workers have not answered at their control ports for %.0f s: "
                "items are encoded here, and requests without their media fail; look for an error "
                "of kvpool-ec-control in the workers' logs, and for another process at these ports",
                self._workers_lost_s,
            )

    def _is_available(self, request: EmbedsRequest, feature: Feature, lacks: bool) -> bool:
        """Return True if an item does not hold its request back.

        `lacks`: another item of the request is not resident.
        """
        mm_hash, request_id = feature.mm_hash, request.request_id
        state = self._state_of(request_id)
        if mm_hash in state.encoded_here:
            return True
        is_resident = mm_hash in self._resident
        if is_resident and feature.has_media:
            return True
        # Without media: room for another item may evict this one, which is known only at the end of
        # the step; the engine would then encode an item that it does not have, and end.
        if is_resident and self._allocated:
            return False
        if is_resident and not lacks:
            return True
        pending = self._pending.get(mm_hash)
        if pending is None and not self._may_arrive(request, feature):
            if is_resident:
                return True
            if not feature.has_media:
                text = "the request names no encoder, or the item has a number for a name"
                return self._fail_request(request_id, mm_hash, Code.GONE, text)
            state.encoded_here.add(mm_hash)
            return True
        if not self._are_workers_lost and self._is_loading(request.delivery.name_of(mm_hash)):
            return False  # requested now, it would be reported ready and then be taken
        if pending is None or request_id not in pending.requests:
            name = pending.name if pending is not None else self._name_for(request, feature)
            if not name:
                return False
            pending = self._request_item(request, feature, name, is_resident=is_resident)
        if self._are_workers_lost and pending.failure is None:
            self._fail(pending, *LOST_WORKERS)
        if pending.failure is not None:
            return is_resident or self._encode_here_or_fail(request_id, feature, pending)
        return self._is_ready(pending)

    def _state_of(self, request_id: str) -> EmbedsRequestState:
        state = self._requests.get(request_id)
        if state is None:
            state = self._requests[request_id] = EmbedsRequestState(self._next_order)
            self._next_order += 1
        return state

    def _may_arrive(self, request: EmbedsRequest, feature: Feature) -> bool:
        delivery = request.delivery
        name = delivery.name_of(feature.mm_hash)
        if name == feature.mm_hash and not feature.is_named:
            return False
        return self._has_peers or delivery.is_sent or name in self._offered

    def _name_for(self, request: EmbedsRequest, feature: Feature) -> str:
        """The name to ask for; '' while an older request asks for another item by that name."""
        mm_hash, request_id = feature.mm_hash, request.request_id
        name = request.delivery.name_of(mm_hash)
        holder = self._by_name.get(name, mm_hash)
        if holder == mm_hash:
            return name
        order = self._state_of(request_id).order
        if any(expect.order < order for expect in self._pending[holder].requests.values()):
            return ""
        # Maybe no producer knows this name, but older requests must not wait for younger ones.
        return mm_hash if mm_hash not in self._by_name else f"{mm_hash} of {order}"

    def _request_item(
        self, request: EmbedsRequest, feature: Feature, name: str, *, is_resident: bool
    ) -> PendingItem:
        named = request.delivery.peers_of(feature.mm_hash)
        peers = tuple(each for each in named if each != self.own_endpoint)
        is_elsewhere = request.delivery.is_sent and (bool(peers) or not named)
        # An engine that has the item or its encoder only asks whether another has it already.
        is_probe = is_resident or (self._is_producer and not is_elsewhere)
        patience_s = PROBE_S if is_probe else 0.0
        is_pushed = request.delivery.is_pushed
        order = self._state_of(request.request_id).order
        expect = Expect(name, order, peers, feature.rows, patience_s, is_pushed)
        pending = self._pending.get(feature.mm_hash)
        if pending is None:
            pending = self._pending[feature.mm_hash] = PendingItem(feature.mm_hash, name)
            self._by_name[name] = feature.mm_hash
            self._offered.pop(name, None)
            if self._are_workers_lost:
                # They are not asked, and so need not forget what a step may have to load.
                pending.failure = LOST_WORKERS
                self._count("failed_items")
        pending.requests[request.request_id] = expect
        if pending.failure is None:
            self._send_expect(pending, expect)
        return pending

    def _send_expect(self, pending: PendingItem, expect: Expect, rank: int | None = None) -> None:
        """Tell a rank, or all, that a request waits for an item."""
        if pending.digest:
            expect = msgspec.structs.replace(expect, digest=pending.digest)
        self._channel.send(expect, rank)

    def _encode_here_or_fail(self, request_id: str, feature: Feature, pending: PendingItem) -> bool:
        """An item cannot be received: encode it here, or fail the request."""
        assert pending.failure is not None
        code, text = pending.failure
        del pending.requests[request_id]
        if not pending.requests:
            self._drop(pending)
        if feature.has_media:
            self._state_of(request_id).encoded_here.add(feature.mm_hash)
            self._count("local_encodes")
            logger.warning(
                "kvpool: item %s is encoded here, since it could not be received (%s: %s)",
                feature.mm_hash,
                code.value,
                text,
            )
            return True
        return self._fail_request(request_id, feature.mm_hash, code, text)

    def _fail_request(self, request_id: str, mm_hash: str, code: Code, text: str) -> bool:
        """Fail a request: the engine would end if it had to encode media that it does not have."""
        self._unavailable.add(request_id)
        self._count("failed_requests")
        logger.error(
            "kvpool: request %s fails: item %s could not be received (%s: %s), and its media are "
            "not here; send the request to an encoder again",
            request_id,
            mm_hash,
            code.value,
            text,
        )
        return False

    def _is_ready(self, pending: PendingItem) -> bool:
        return pending.failure is None and len(pending.ready) == self._channel.num_ranks

    def _may_encode(self, request: EmbedsRequest, ahead: Iterable[Feature]) -> bool:
        """Push a request's items; False while consumers must take others first (`retain_bytes`)."""
        pushes = self._state_of(request.request_id).pushes
        encodes = False
        for feature in ahead:
            encodes |= feature.mm_hash not in self._resident
            is_new = feature.is_named and feature.mm_hash not in pushes
            if is_new and request.delivery.consumers:
                push = pushes[feature.mm_hash] = Push(feature.mm_hash, request.delivery.consumers)
                self._channel.send(push)
        # Nothing waits for items of lost workers: they will not be taken.
        is_full = encodes and not self._are_workers_lost and self._held_bytes > self._retain_bytes
        if is_full and not self._is_encoding_held:
            self._count("deferred_encodes")
            self._log.log(
                logging.WARNING,
                "deferred encode",
                "",
                "kvpool: encoding waits: consumers have not taken %d bytes of items, and "
                "retain_bytes is %d; items that nobody takes are dropped after waiting_timeout_s",
                self._held_bytes,
                self._retain_bytes,
            )
        self._is_encoding_held = is_full
        return not is_full

    def has(self, mm_hash: str) -> bool:
        """Return True if an item can be loaded.

        The item stays loadable until it is loaded or no request waits for it.
        """
        if mm_hash in self._resident:
            # The engine asks only for items that it does not have: its cache was emptied.
            self._resident.discard(mm_hash)
        pending = self._pending.get(mm_hash)
        return pending is not None and self._is_ready(pending)

    def allocated(self, mm_hash: str) -> None:
        """The engine has made room for an item: it is loaded in this step, or encoded."""
        self._resident.add(mm_hash)
        self._allocated.add(mm_hash)
        pending = self._pending.get(mm_hash)
        if pending is not None and self._is_ready(pending):
            self._loads.append(ItemLoad(mm_hash, pending.name))
            ranks = set(range(self._channel.num_ranks))
            self._loading[pending.name] = (ranks, self._clock() + LOADING_S)
            self._count("loaded_items")
            self._drop(pending)  # other requests find it in the engine's cache

    def plan(self, freed: Iterable[str], *, is_idle: bool, idle_wait_s: float) -> StepMeta:
        """The step's metadata; `freed` has left the engine's cache.

        An idle engine waits a little for the workers if a request waits for them.
        """
        for mm_hash in freed:
            if mm_hash not in self._allocated:
                self._resident.discard(mm_hash)
        self._allocated.clear()
        self._log.tick()
        loads, self._loads = tuple(self._loads), []
        self._channel.flush()
        if is_idle and self.is_waiting:
            self._poll_workers(idle_wait_s)
        return StepMeta(self._weights, loads)

    @property
    def is_waiting(self) -> bool:
        return bool(self._pending) or self._is_encoding_held or not self._channel.are_up

    def finished(self, request: EmbedsRequest) -> None:
        for feature in request.features:
            pending = self._pending.get(feature.mm_hash)
            if pending is not None:
                pending.requests.pop(request.request_id, None)
                if not pending.requests:
                    self._channel.send(Forget(pending.name))
                    self._drop(pending)
        self._requests.pop(request.request_id, None)
        self._unavailable.discard(request.request_id)

    def take_unavailable(self) -> set[str]:
        """Requests whose items can neither be received nor encoded."""
        taken, self._unavailable = self._unavailable, set()
        return taken

    def weights_changed(self, weights_version: str) -> None:
        """The weights have changed: nothing encoded before is used."""
        version, fingerprint = self._weights.version + 1, self._fingerprint(weights_version)
        self._weights = WeightsChanged(version, fingerprint)
        self._channel.send(self._weights)
        self._offered.clear()
        for pending in self._pending.values():
            pending.ready.clear()
            pending.digests.clear()
            pending.others.clear()
            pending.failure, pending.digest, pending.choices = None, "", 0
            for expect in pending.requests.values():
                self._channel.send(expect)

    def encoder_cache_was_reset(self) -> None:
        self._resident.clear()

    def close(self) -> None:
        self._channel.close()

    # From the workers

    def _poll_workers(self, timeout_s: float = 0.0) -> None:
        for rank, body in self._channel.poll(timeout_s):
            match body:
                case None:
                    self._resync_worker(rank)
                case ItemNews():
                    self._on_item_news(rank, body)
                case Taken(name):
                    self._loaded(rank, name)
                case HeldBytes(nbytes):
                    self._held_bytes = nbytes
                case MetricSamples(samples):
                    merge_samples(self._from_workers, samples)
                case _:
                    pass

    def _loaded(self, rank: int, name: str) -> None:
        ranks, _ = self._loading.get(name, (set(), 0.0))
        ranks.discard(rank)
        if not ranks:
            self._loading.pop(name, None)

    def _is_loading(self, name: str) -> bool:
        _, until = self._loading.get(name, (set(), 0.0))
        return self._clock() < until

    def _resync_worker(self, rank: int) -> None:
        """A worker is in session, maybe again: send it the whole state."""
        if self._weights.version:
            self._channel.send(self._weights, rank)
        # Workers were told to forget failed items.
        wanted = [each for each in self._pending.values() if each.failure is None]
        # What is being loaded stays where it is until the step has taken it.
        names = (*(each.name for each in wanted), *self._loading)
        for requested in Requested.all(names):
            self._channel.send(requested, rank)
        for name in tuple(self._loading):
            self._loaded(rank, name)
        for pending in wanted:
            pending.ready.discard(rank)
            pending.digests.pop(rank, None)
            for expect in pending.requests.values():
                self._send_expect(pending, expect, rank)
        for state in self._requests.values():
            for push in state.pushes.values():
                self._channel.send(push, rank)

    def _on_item_news(self, rank: int, news: ItemNews) -> None:
        if news.weights_version != self._weights.version:
            return
        mm_hash = self._by_name.get(news.mm_hash)
        if news.offered and mm_hash is None:
            self._offered[news.mm_hash] = None
            while len(self._offered) > MAX_OFFERED:
                del self._offered[next(iter(self._offered))]
        elif mm_hash is None:
            self._offered.pop(news.mm_hash, None)
        elif news.code is not None:
            self._on_item_failed(self._pending[mm_hash], news.code, news.text)
        elif news.digest:
            self._on_encoding(self._pending[mm_hash], rank, news)

    def _on_encoding(self, pending: PendingItem, rank: int, news: ItemNews) -> None:
        """A rank has an encoding of an item, or is being sent one."""
        if pending.failure is not None or pending.digest not in ("", news.digest):
            return  # sent before the rank knew which one was chosen
        pending.digests[rank] = news.digest
        if not news.offered:
            pending.ready.add(rank)
        if len(set(pending.digests.values())) > 1:
            # Choose an encoding that a rank has already, else the lowest rank's.
            pending.others |= dict.fromkeys(pending.digests.values())
            first = min(pending.ready or pending.digests)
            self._choose_encoding(pending, pending.digests[first])

    def _choose_encoding(self, pending: PendingItem, digest: str) -> None:
        """Ask every rank for this encoding; a rank with another one starts anew."""
        self._count("chosen_encodings")
        pending.choices += 1
        pending.digest = digest
        pending.others.pop(digest, None)
        for rank in [rank for rank, each in pending.digests.items() if each != digest]:
            del pending.digests[rank]
            pending.ready.discard(rank)
        for expect in pending.requests.values():
            self._send_expect(pending, expect)

    def _on_item_failed(self, pending: PendingItem, code: Code, text: str) -> None:
        """A rank cannot receive an item in the chosen encoding: try the next one, or fail the
        item.
        """
        if pending.failure is None and pending.others and pending.choices < MAX_CHOICES:
            self._choose_encoding(pending, next(iter(pending.others)))
        else:
            self._fail(pending, code, text)

    def _fail(self, pending: PendingItem, code: Code, text: str) -> None:
        pending.failure = (code, text)
        self._count("failed_items")
        self._channel.send(Forget(pending.name))  # other ranks may still wait for it, or have it

    def _drop(self, pending: PendingItem) -> None:
        self._pending.pop(pending.mm_hash, None)
        self._by_name.pop(pending.name, None)

    # Metrics

    def _count(self, event: str) -> None:
        self.registry.add("kvpool_ec_events", 1, side="scheduler", event=event)

    def take_samples(self) -> Samples:
        """Metric samples of this side and of the workers since the last call."""
        numbers, self._from_workers = self._from_workers, {}
        merge_samples(numbers, self.registry.take_changes())
        return numbers
