"""The scheduler's side of the embedding connector: items that requests wait for or can load.

An item is ready when every rank has reported the same encoding. A ready item stays until it is
loaded or no request waits for it, since the engine does not ask twice. If ranks are offered
different encodings, the scheduler chooses one for all. Windows, rounds and rows are the
workers'. Everything runs on the scheduler's thread.
"""

import logging
import time
from collections.abc import Callable, Collection, Container, Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

import msgspec

from vllm_kvpool.config import EmbedsConfig
from vllm_kvpool.embeds.availability import (
    Availability,
    EmbedsRequest,
    Encodings,
    Feature,
    ItemRecord,
    Situation,
    availability,
)
from vllm_kvpool.embeds.protocol.messages import (
    LOADING_S,
    STARTED,
    Code,
    Expect,
    Forget,
    HeldBytes,
    ItemNews,
    MetricSamples,
    Push,
    Reorder,
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
WORKERS_LOST_S = 30.0  # without an answer: requests no longer wait for the workers


def workers_lost_s(config: EmbedsConfig) -> float:
    """Return the seconds of the workers' silence after which requests go on without them."""
    missed_s = config.heartbeat_s * config.heartbeat_max_failures
    return max(missed_s, min(WORKERS_LOST_S, config.bootstrap_timeout_s))


FIRST_WEIGHTS = WeightsChanged(0, "")
LOST_WORKERS = Code.UNREACHABLE, "the engine's workers do not answer"
NO_ENCODER = Code.GONE, "the request names no encoder, or the item has a number for a name"
OTHER_NAMES = (
    Code.GONE,
    "the request's ec_transfer_params name other items: start the encoder and this engine with the "
    "same --model, whose name is in items' names, or give media multi_modal_uuids",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRole:
    """The engine that a scheduler's side belongs to."""

    is_producer: bool
    is_consumer: bool
    has_peers: bool
    """True if encoders are configured."""
    retain_bytes: int
    max_step_tokens: int
    own_endpoint: str = ""
    workers_lost_s: float = WORKERS_LOST_S


class ItemLoad(NamedTuple):
    """An item that the workers put into the engine's encoder cache."""

    mm_hash: str
    """The engine's name."""
    name: str
    """The producer's name."""


class UntakenLoad(NamedTuple):
    """A planned load: the ranks that have not said that they have taken the item."""

    ranks: set[int]
    until: float


@dataclass(frozen=True)
class StepMeta:
    """A step's metadata for the workers."""

    weights: WeightsChanged = FIRST_WEIGHTS
    loads: tuple[ItemLoad, ...] = ()
    reused: tuple[str, ...] = ()
    """Items of an encoder's requests that it does not encode again."""


@dataclass(slots=True)
class EmbedsRequestState:
    """A request with items, until it ends."""

    age: int  # older requests are lower
    is_started: bool = False  # the request holds blocks
    encoded_here: set[str] = field(default_factory=set)  # items that it encodes here
    pushes: dict[str, Push] = field(default_factory=dict)  # the messages sent for it, by item

    @property
    def order(self) -> int:
        """The order of its items among those of other requests."""
        return self.age + STARTED if self.is_started else self.age


class EmbedsScheduler:
    """The scheduler's side of one engine. `fingerprint(weights_version)` names its encodings."""

    def __init__(
        self,
        channel: WorkerChannel,
        engine: EngineRole,
        fingerprint: Callable[[str], str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._channel = channel
        self._engine = engine
        self._fingerprint = fingerprint
        self._clock = clock
        self._log = LogLimit(logger, clock)
        self._items: dict[str, ItemRecord] = {}
        self._by_name: dict[str, ItemRecord] = {}  # items that are requested or loaded
        self._offered: dict[str, None] = {}  # names of items that no request waits for
        self._requests: dict[str, EmbedsRequestState] = {}
        self._next_order = 0
        self._num_waits = 0
        self._loads: list[ItemLoad] = []  # of this step
        self._untaken: dict[str, UntakenLoad] = {}  # by the item's name, to `LOADING_S` at most
        self._reused: dict[str, list[str]] = {}  # by request that may go in this step
        self._allocated: set[str] = set()  # in this step
        self._may_have_evicted = False  # in this step
        self._is_endangered = False  # a request waits for a step without evictions
        self._may_evict = True  # requests of this step may make room in the engine's cache
        self._unavailable: set[str] = set()
        self._held_bytes = 0
        self._is_encoding_held = False
        self._are_workers_lost = False
        self._weights = FIRST_WEIGHTS  # the last message
        self.registry = MetricsRegistry()
        self._from_workers: Samples = {}

    # From the engine

    def ensure(
        self, request: EmbedsRequest, num_computed_tokens: int, *, is_started: bool = False
    ) -> bool:
        """Return True if the request's items allow it to be scheduled.

        `is_started`: True if the request holds blocks.
        """
        self._poll_workers()
        self._check_workers()
        if not (self._channel.are_up or self._are_workers_lost):
            return False  # a message would be lost now
        ahead = [
            feature
            for feature in request.features
            if num_computed_tokens < feature.end
            and feature.start <= num_computed_tokens + self._engine.max_step_tokens
        ]
        if is_started:  # before, the blocks of a prefix may still go
            to_come = {each.mm_hash for each in request.features if num_computed_tokens < each.end}
            self._stop_waiting(request, keep=to_come)
        may_go = True
        if ahead:
            self._set_started(request, is_started)
        if self._engine.is_consumer:
            others = self._availabilities(request, ahead) - {Availability.AVAILABLE}
            may_go = not others
            self._is_endangered |= others == {Availability.ENDANGERED}
        if self._engine.is_producer:
            may_go &= self._may_encode(request, ahead)
        if may_go and not all(self._is_resident(each.mm_hash) for each in ahead):
            # vLLM evicts before it allocates, and may then not allocate.
            may_go = self._may_evict
            self._may_have_evicted |= may_go
        return may_go

    def _check_workers(self) -> None:
        """Note whether the workers have been silent too long for requests to wait."""
        were_lost = self._are_workers_lost
        self._are_workers_lost = self._channel.silent_s > self._engine.workers_lost_s
        if self._are_workers_lost and not were_lost:
            self._count("workers_lost")
            logger.error(
                "kvpool: the engine's workers have not answered at their control ports for %.0f s: "
                "items are encoded here, and requests without their media fail; look for an error "
                "of kvpool-ec-control in the workers' logs, and for another process at these ports",
                self._engine.workers_lost_s,
            )

    def _is_resident(self, mm_hash: str) -> bool:
        item = self._items.get(mm_hash)
        return item is not None and item.is_resident

    def _availabilities(
        self, request: EmbedsRequest, ahead: Iterable[Feature]
    ) -> set[Availability]:
        """Return what the request may do about its next items, which the engine reaches in order.

        The engine keeps an item that it has reached.
        """
        found: dict[str, Availability] = {}
        makes_room = False
        for feature in ahead:
            if feature.mm_hash not in found:
                found[feature.mm_hash] = self._availability(request, feature, makes_room)
                makes_room |= not self._is_resident(feature.mm_hash)
        return set(found.values())

    def _availability(
        self, request: EmbedsRequest, feature: Feature, makes_room: bool
    ) -> Availability:
        """Return what a request may do about an item, after asking for it or giving it up.

        `makes_room`: an item of the request that the engine reaches first is not resident.
        """
        mm_hash, request_id = feature.mm_hash, request.request_id
        if mm_hash in self._state_of(request_id).encoded_here:
            return Availability.AVAILABLE
        item = self._items.get(mm_hash) or ItemRecord(mm_hash)
        situation = Situation(
            num_ranks=self._channel.num_ranks,
            may_arrive=self._may_arrive(request, feature),
            makes_room=makes_room,
            may_have_evicted=self._may_have_evicted,
            is_being_taken=self._is_being_taken(item, request.delivery.name_of(mm_hash)),
            are_workers_lost=self._are_workers_lost,
        )
        found = availability(item, request_id, feature.has_media, situation)
        if found is Availability.UNREQUESTED:
            if not self._request_item(request, feature, item):
                return Availability.PENDING
            return self._availability(request, feature, makes_room)
        if found is Availability.UNAVAILABLE and self._encode_here_or_fail(request, feature, item):
            return Availability.AVAILABLE
        return found

    def _is_being_taken(self, item: ItemRecord, name: str) -> bool:
        """Return True if the workers may still take the item, or another one of this name."""
        return any(each.is_loading(self._clock()) for each in (item, self._by_name.get(name, item)))

    def _state_of(self, request_id: str) -> EmbedsRequestState:
        state = self._requests.get(request_id)
        if state is None:
            state = self._requests[request_id] = EmbedsRequestState(self._next_order)
            self._next_order += 1
        return state

    def _set_started(self, request: EmbedsRequest, is_started: bool) -> None:
        """Note whether a request holds blocks, and tell the workers the new order of its items."""
        state = self._state_of(request.request_id)
        if state.is_started == is_started:
            return
        state.is_started = is_started
        for mm_hash in {feature.mm_hash for feature in request.features}:
            item = self._items.get(mm_hash)
            expect = item.requests.get(request.request_id) if item is not None else None
            if item is not None and expect is not None:
                before = item.order
                expect = msgspec.structs.replace(expect, order=state.order)
                item.requests[request.request_id] = expect
                self._tell_order(item, before)

    def _may_arrive(self, request: EmbedsRequest, feature: Feature) -> bool:
        delivery = request.delivery
        name = delivery.name_of(feature.mm_hash)
        if name == feature.mm_hash and not feature.is_named:
            return False
        return self._engine.has_peers or delivery.brings_items or name in self._offered

    def _name_for(self, request: EmbedsRequest, feature: Feature, order: int) -> str:
        """Return the name to ask for.

        The result is '' while an older request asks for another item by that name.
        """
        mm_hash = feature.mm_hash
        name = request.delivery.name_of(mm_hash)
        holder = self._by_name.get(name)
        if holder is None or holder.mm_hash == mm_hash:
            return name
        if not (holder.requests or holder.is_loading(self._clock())):
            return name
        if any(expect.order < order for expect in holder.requests.values()):
            return ""
        # Maybe no producer knows this name, but older requests must not wait for younger ones.
        return mm_hash if mm_hash not in self._by_name else f"{mm_hash} of {order}"

    def _request_item(self, request: EmbedsRequest, feature: Feature, item: ItemRecord) -> bool:
        """Tell the workers that a request waits for an item; False if that has to wait."""
        order, joins = self._state_of(request.request_id).order, bool(item.requests)
        if not joins:
            is_loading = item.is_loading(self._clock())  # the workers are lost
            name = item.name if is_loading else self._name_for(request, feature, order)
            if not name:
                return False
            self._hold_name(item, name)
            self._begin_wait(item)
            if self._are_workers_lost:
                # They are not asked, and so need not forget what a step may have to load.
                item.failure = LOST_WORKERS
                self._count("failed_items")
        named = request.delivery.peers_of(feature.mm_hash)
        peers = tuple(each for each in named if each != self._engine.own_endpoint)
        is_sent = request.delivery.brings_items
        is_elsewhere = is_sent and (bool(peers) or not named)
        # An engine that has the item or its encoder only asks whether another has it already.
        is_probe = item.is_resident or (self._engine.is_producer and not is_elsewhere)
        patience_s = PROBE_S if is_probe else 0.0
        is_pushed = request.delivery.is_pushed
        expect = Expect(item.name, order, peers, feature.rows, patience_s, is_pushed)
        item.requests[request.request_id] = expect
        if item.failure is None:
            self._send_expect(item, expect, joins=joins)
        return True

    def _begin_wait(self, item: ItemRecord) -> None:
        """Give the wait a new number: news from before it do not count."""
        self._num_waits += 1
        item.wait_id = self._num_waits

    def _hold_name(self, item: ItemRecord, name: str) -> None:
        """Ask for an item by this name from now on."""
        for each in (item, self._by_name.get(name, item)):
            if not each.is_loading(self._clock()):
                each.loading.clear()  # it was not confirmed in time
                self._drop_unused(each)
        item.name = name
        self._items[item.mm_hash] = self._by_name[name] = item
        self._offered.pop(name, None)

    def _send_expects(self, item: ItemRecord, rank: int | None = None) -> None:
        """Tell a rank, or all, of each request that waits for an item."""
        for number, expect in enumerate(item.requests.values()):
            self._send_expect(item, expect, rank, joins=number > 0)

    def _send_expect(
        self, item: ItemRecord, expect: Expect, rank: int | None = None, *, joins: bool
    ) -> None:
        """Tell a rank, or all, that a request waits for an item, and how old the oldest one is.

        `joins`: they know that another request waits.
        """
        message = msgspec.structs.replace(
            expect,
            order=item.order,
            digest=item.encodings.chosen,
            wait_id=item.wait_id,
            joins=joins,
        )
        self._channel.send(message, rank)

    def _tell_order(self, item: ItemRecord, before: int) -> None:
        """Tell the workers an item's order if it was another one before.

        The workers may be handing over the item at this moment, and then do not bring it again.
        """
        if item.order != before and item.failure is None:
            self._channel.send(Reorder(item.name, item.order))

    def _encode_here_or_fail(
        self, request: EmbedsRequest, feature: Feature, item: ItemRecord
    ) -> bool:
        """Encode an item here that cannot be received, or fail the request."""
        request_id = request.request_id
        is_requested = request_id in item.requests
        is_of_others = feature.is_named and request.delivery.is_of_others
        if is_requested and item.failure is None:
            self._fail(item, *LOST_WORKERS)
        code, text = item.failure or (OTHER_NAMES if is_of_others else NO_ENCODER)
        self._remove_request(request_id, item)
        if not feature.has_media:
            return self._fail_request(request_id, feature.mm_hash, code, text)
        self._state_of(request_id).encoded_here.add(feature.mm_hash)
        if is_requested or is_of_others:
            self._count("local_encodes")
            self._log.log(
                logging.WARNING,
                "local encode",
                code.value,
                "kvpool: item %s is encoded here, since it could not be received (%s: %s)",
                feature.mm_hash,
                code.value,
                text,
            )
        return True

    def _remove_request(self, request_id: str, item: ItemRecord) -> bool:
        """Remove a request that no longer waits for an item; return True if no other one does."""
        if request_id not in item.requests:
            return False
        before = item.order
        del item.requests[request_id]
        if not item.requests:
            item.end_requests()
            self._drop_unused(item)
            return True
        self._tell_order(item, before)
        return False

    def _drop_unused(self, item: ItemRecord) -> None:
        """Drop a record that nothing needs, and its name if the item is only resident."""
        if item.requests or item.loading:
            return
        if self._by_name.get(item.name) is item:
            del self._by_name[item.name]
        if not item.is_resident:
            self._items.pop(item.mm_hash, None)

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

    def _may_encode(self, request: EmbedsRequest, ahead: Iterable[Feature]) -> bool:
        """Push a request's items; False while consumers must take others first (`retain_bytes`)."""
        pushes = self._state_of(request.request_id).pushes
        encodes = False
        reused = self._reused[request.request_id] = []
        for feature in ahead:
            if not self._is_resident(feature.mm_hash):
                encodes = True
            elif feature.is_named:
                reused.append(feature.mm_hash)
            is_new = feature.is_named and feature.mm_hash not in pushes
            if is_new and request.delivery.consumers:
                push = pushes[feature.mm_hash] = Push(feature.mm_hash, request.delivery.consumers)
                self._channel.send(push)
        # Nothing waits for items of lost workers: they will not be taken.
        is_waited_for = encodes and not self._are_workers_lost
        is_full = is_waited_for and self._held_bytes > self._engine.retain_bytes
        if is_full and not self._is_encoding_held:
            self._count("deferred_encodes")
            self._log.log(
                logging.WARNING,
                "deferred encode",
                "",
                "kvpool: encoding waits: consumers have not taken %d bytes of items, and "
                "retain_bytes is %d; items that nobody takes are dropped after waiting_timeout_s",
                self._held_bytes,
                self._engine.retain_bytes,
            )
        self._is_encoding_held = is_full
        return not is_full

    def has(self, mm_hash: str) -> bool:
        """Return True if an item can be loaded.

        The item stays loadable until it is loaded or no request waits for it.
        """
        self._set_evicted(mm_hash)  # the engine asks only for items that it does not have
        item = self._items.get(mm_hash)
        return item is not None and item.is_ready(self._channel.num_ranks)

    def _set_evicted(self, mm_hash: str) -> None:
        """Note that an item is not in the engine's cache any more."""
        item = self._items.get(mm_hash)
        if item is not None:
            item.is_resident = False
            self._drop_unused(item)

    def allocated(self, mm_hash: str) -> None:
        """Note room for an item in the engine's cache: it is loaded in this step, or encoded."""
        item = self._items.setdefault(mm_hash, ItemRecord(mm_hash))
        item.is_resident = True
        self._allocated.add(mm_hash)
        self._may_have_evicted = True
        if item.is_ready(self._channel.num_ranks):
            self._loads.append(ItemLoad(mm_hash, item.name))
            item.loading = set(range(self._channel.num_ranks))
            item.loading_until = self._clock() + LOADING_S
            self._untaken[item.name] = UntakenLoad(item.loading.copy(), item.loading_until)
            self._count("loaded_items")
            item.end_requests()  # other requests find it in the engine's cache

    def plan(
        self,
        freed: Iterable[str],
        scheduled: Container[str] = (),
        *,
        is_idle: bool,
        idle_wait_s: float,
    ) -> StepMeta:
        """Return the step's metadata; `freed` has left the engine's cache.

        `scheduled` are the step's requests: only they reuse items. A request that waits would keep
        items that no consumer takes, and may itself wait for the room. An idle engine waits a
        little for the workers if a request waits for them.
        """
        for mm_hash in freed:
            if mm_hash not in self._allocated:
                self._set_evicted(mm_hash)
        self._allocated.clear()
        # The engine may refuse an item its room in every step, and other requests must not wait so
        # long. One of them may hold the very room.
        self._may_evict = not self._is_endangered
        self._may_have_evicted = self._is_endangered = False
        self._log.tick()
        loads, self._loads = tuple(self._loads), []
        names = (each for name, each in self._reused.items() if name in scheduled)
        reused = tuple(dict.fromkeys(chain.from_iterable(names)))
        self._reused.clear()
        self._channel.flush()
        if is_idle and self.is_waiting:
            self._poll_workers(idle_wait_s)
        return StepMeta(self._weights, loads, reused)

    @property
    def is_waiting(self) -> bool:
        """True while an idle engine must poll: for an item, an encoding or a worker."""
        is_requested = any(each.requests for each in self._by_name.values())
        return is_requested or self._is_encoding_held or not self._channel.are_up

    def finished(self, request: EmbedsRequest) -> None:
        """Drop an ended request, and tell workers to forget the items that none needs now."""
        self._stop_waiting(request)
        self._requests.pop(request.request_id, None)
        self._unavailable.discard(request.request_id)

    def _stop_waiting(self, request: EmbedsRequest, keep: Collection[str] = ()) -> None:
        """Remove a request from its items, except the items `keep`.

        A received item that no request takes would hold its memory until the request ends.
        """
        for feature in request.features:
            item = self._items.get(feature.mm_hash)
            if item is None or feature.mm_hash in keep:
                continue
            if self._remove_request(request.request_id, item):
                self._channel.send(Forget(item.name))

    def take_unavailable(self) -> set[str]:
        """Return the requests whose items can neither be received nor encoded."""
        taken, self._unavailable = self._unavailable, set()
        return taken

    def weights_changed(self, weights_version: str) -> None:
        """Use nothing any more that was encoded with the weights before."""
        version, fingerprint = self._weights.version + 1, self._fingerprint(weights_version)
        self._weights = WeightsChanged(version, fingerprint)
        self._send_weights()
        self._offered.clear()
        for item in self._by_name.values():
            item.encodings, item.failure = Encodings(), None
            self._send_expects(item)

    def _send_weights(self, rank: int | None = None) -> None:
        """Tell a rank, or all, the weights, and which items a step may still have to take."""
        (first, *_) = Requested.all(self._names_untaken())  # others are more than a step loads
        self._channel.send(msgspec.structs.replace(self._weights, loading=first.names), rank)

    def _names_untaken(self) -> list[str]:
        """Return the items that a step may still have to take."""
        now = self._clock()
        self._untaken = {name: load for name, load in self._untaken.items() if now < load.until}
        return list(self._untaken)

    def encoder_cache_was_reset(self) -> None:
        """Treat all items as evicted from the encoder cache."""
        for mm_hash in tuple(self._items):
            self._set_evicted(mm_hash)

    def close(self) -> None:
        """Close the connections to the workers."""
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
                    self._taken(rank, name)
                    self._loaded(rank, name)
                case HeldBytes(nbytes):
                    self._held_bytes = nbytes
                case MetricSamples(samples):
                    merge_samples(self._from_workers, samples)
                case _:
                    pass

    def _taken(self, rank: int, name: str) -> None:
        load = self._untaken.get(name)
        if load is not None:
            load.ranks.discard(rank)
            if not load.ranks:
                del self._untaken[name]

    def _loaded(self, rank: int, name: str) -> None:
        """Note that a rank has handed an item to the engine, or never will."""
        item = self._by_name.get(name)
        if item is not None:
            item.loading.discard(rank)
            self._drop_unused(item)

    def _resync_worker(self, rank: int) -> None:
        """Send a worker the whole state: it is in session, maybe again."""
        if self._weights.version:
            self._send_weights(rank)
        # Workers were told to forget failed items.
        wanted = [each for each in self._by_name.values() if each.requests and not each.failure]
        # What is being loaded stays where it is until the step has taken it. Requests do not wait
        # for that: the worker's word of it may be lost.
        loading = self._names_untaken()
        for requested in Requested.all((*(each.name for each in wanted), *loading)):
            self._channel.send(requested, rank)
        for name in loading:
            self._loaded(rank, name)
        for item in wanted:
            item.encodings.remove(rank)
            self._send_expects(item, rank)
        for state in self._requests.values():
            for push in state.pushes.values():
                self._channel.send(push, rank)

    def _on_item_news(self, rank: int, news: ItemNews) -> None:
        if news.weights_version != self._weights.version:
            return
        item = self._by_name.get(news.mm_hash)
        if item is None or not item.requests:
            self._offered.pop(news.mm_hash, None)
            if news.offered:
                self._offered[news.mm_hash] = None
                while len(self._offered) > MAX_OFFERED:
                    del self._offered[next(iter(self._offered))]
        elif news.wait_id != item.wait_id:
            pass  # of requests that have ended
        elif news.code is not None:
            self._on_item_failed(item, news.code, news.text)
        elif news.digest and item.failure is None:
            chosen = item.encodings.add(rank, news.digest, is_ready=not news.offered)
            if chosen:
                self._choose_encoding(item, chosen)

    def _choose_encoding(self, item: ItemRecord, digest: str) -> None:
        """Ask every rank for this encoding."""
        self._count("chosen_encodings")
        item.encodings.choose(digest)
        self._begin_wait(item)
        self._send_expects(item)

    def _on_item_failed(self, item: ItemRecord, code: Code, text: str) -> None:
        """Try the next encoding of an item that a rank cannot receive in the chosen one.

        Without another encoding the item fails.
        """
        digest = item.encodings.next_choice
        if item.failure is None and digest:
            self._choose_encoding(item, digest)
        else:
            self._fail(item, code, text)

    def _fail(self, item: ItemRecord, code: Code, text: str) -> None:
        item.failure = (code, text)
        self._count("failed_items")
        self._channel.send(Forget(item.name))  # other ranks may still wait for it, or have it

    # Metrics

    def _count(self, event: str) -> None:
        self.registry.add("kvpool_ec_events", 1, side="scheduler", event=event)

    def take_samples(self) -> Samples:
        """Return the metric samples of this side and of the workers since the last call."""
        numbers, self._from_workers = self._from_workers, {}
        merge_samples(numbers, self.registry.take_changes())
        return numbers
