"""A scheduler's side of the embedding connector: which items requests wait for, and are there.

For each item a request is PENDING, READY or FAILED; windows, rounds and rows stay with the workers.
An item is ready when every rank has said so, of the same bytes; it is pinned from then on until it
is loaded or no request waits for it, since the engine is not asked twice. Where ranks are brought
different encodings of an item, by different encoders, all are told which one to have.

Everything runs on the scheduler's thread. Requests come as `RequestView`s, workers as `Links`.
"""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import msgspec

from vllm_kvpool.embeds.params import Delivery
from vllm_kvpool.embeds.protocol import (
    Code,
    Epoch,
    Expect,
    Forget,
    Held,
    ItemNews,
    Message,
    Numbers,
    Push,
    Taken,
)
from vllm_kvpool.metrics import Tally, merge_samples

logger = logging.getLogger(__name__)

MAX_OFFERED = 1 << 16
ASK_ONLY_S = 0.25
LOADING_S = 30.0  # a step that has not been run by then will not be
MAX_CHOICES = 4  # of an encoding of one item
ALONE_S = 30.0  # the workers of one machine answer within milliseconds of their start


class Feature(NamedTuple):
    """One item of a request, at [start, end) of its prompt."""

    mm_hash: str
    start: int
    end: int
    rows: int
    has_media: bool
    """Whether this engine could encode it."""


class RequestView(NamedTuple):
    """What is to be known of a request."""

    request_id: str
    features: tuple[Feature, ...]
    delivery: Delivery


class Load(NamedTuple):
    """An item that the workers put into the engine's encoder cache."""

    mm_hash: str
    """The engine's name of it."""
    name: str
    """The producer's."""


@dataclass(frozen=True)
class StepMeta:
    """What a step's workers are told."""

    epoch: int = 0
    loads: tuple[Load, ...] = ()


class Said(Protocol):
    """One word of a worker."""

    @property
    def rank(self) -> int: ...
    @property
    def body(self) -> Message | None: ...


class Links(Protocol):
    """The engine's workers."""

    @property
    def num_ranks(self) -> int: ...
    @property
    def are_up(self) -> bool: ...
    @property
    def lost_since(self) -> float | None: ...
    def send(self, body: Message, rank: int | None = None) -> None: ...
    def flush(self) -> None: ...
    def poll(self, timeout_s: float = 0.0) -> Sequence[Said]: ...
    def close(self) -> None: ...


@dataclass(slots=True)
class Wanted:
    """An item that requests wait for."""

    mm_hash: str
    name: str
    requests: dict[str, Expect] = field(default_factory=dict)  # and what was said for each
    ready: dict[int, str] = field(default_factory=dict)  # rank -> digest
    coming: dict[int, str] = field(default_factory=dict)  # the same, also of what is on its way
    digest: str = ""  # of the encoding that was chosen for all ranks; empty: none had to be
    others: dict[str, None] = field(default_factory=dict)  # encodings that could be chosen yet
    choices: int = 0
    failure: tuple[Code, str] | None = None


class EmbedsScheduler:
    """See the module docstring."""

    def __init__(
        self,
        links: Links,
        *,
        is_producer: bool,
        is_consumer: bool,
        has_peers: bool,
        fingerprint: Callable[[str], str],
        retain_bytes: int,
        max_step_tokens: int,
        own_endpoint: str = "",
        alone_s: float = ALONE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._links = links
        self._alone_s = alone_s
        self._is_producer = is_producer
        self._is_consumer = is_consumer
        self._has_peers = has_peers
        self._fingerprint = fingerprint
        self._retain_bytes = retain_bytes
        self._max_step_tokens = max_step_tokens
        self._clock = clock
        self.own_endpoint = own_endpoint
        self._wanted: dict[str, Wanted] = {}
        self._by_name: dict[str, str] = {}
        self._loading: dict[str, tuple[set[int], float]] = {}  # ranks to take it, and until when
        self._offered: dict[str, None] = {}
        self._resident: set[str] = set()  # in the engine's encoder cache, as far as it has told us
        self._local: dict[str, set[str]] = {}  # request -> items that it has encoded here
        self._pushed: dict[str, dict[str, Push]] = {}  # request -> what it had sent on
        self._orders: dict[str, int] = {}
        self._next_order = 0
        self._loads: list[Load] = []
        self._allocated: set[str] = set()  # in this step
        self._unavailable: set[str] = set()
        self._held = 0
        self._is_holding = False
        self._alone_since: float | None = None
        self._is_told = False
        self._unsaid: dict[str, None] = {}  # items to forget, while a worker was not to be reached
        self._epoch = 0
        self._epoch_told = Epoch(0, "")
        self.tally = Tally()
        self._from_workers: dict[str, float] = {}

    # What the engine asks

    def ensure(self, request: RequestView, num_computed_tokens: int) -> bool:
        """Whether the request may be scheduled, as far as its items go."""
        self._hear()
        if self._links.are_up:
            self._alone_since, self._is_told = None, False
        elif not self._is_alone():
            return False  # what is said now would be lost
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
                may_go &= self._is_there(request, feature, lacks)
        if self._is_producer:
            may_go &= self._may_encode(request, ahead)
        return may_go

    def _is_alone(self) -> bool:
        """Whether the workers have not answered for so long that requests go on without them.

        Decided by the clock alone: no thread of a worker need be alive.
        """
        now = self._clock()
        if self._alone_since is None:
            self._alone_since = now
        lost_since = self._links.lost_since
        since = self._alone_since if lost_since is None else min(self._alone_since, lost_since)
        is_alone = now - since > self._alone_s
        if is_alone and not self._is_told:
            self._is_told = True
            self._count("workers_lost")
            logger.error(
                "kvpool: the engine's workers do not answer at their control ports: embeddings are "
                "encoded here, and requests without their media fail; look for an error of "
                "kvpool-ec-control in the workers' logs, and for what else listens there"
            )
        return is_alone

    def _is_there(self, request: RequestView, feature: Feature, lacks: bool) -> bool:
        """`lacks`: the engine has to make room for others of the request's items."""
        mm_hash, request_id = feature.mm_hash, request.request_id
        if mm_hash in self._local.get(request_id, ()):
            return True
        is_resident = mm_hash in self._resident
        if is_resident and feature.has_media:
            return True
        # Without its media: to make room for another item may cost this one its place, of which is
        # heard at the end of the step. The engine would then encode what it does not have, and end.
        if is_resident and self._allocated:
            return False
        if is_resident and not lacks:
            return True
        wanted = self._wanted.get(mm_hash)
        if wanted is None and not self._may_come(request, feature):
            if is_resident:
                return True
            if not feature.has_media:
                return self._give_up(
                    request_id, mm_hash, Code.GONE, "nothing says which encoder has it"
                )
            self._local.setdefault(request_id, set()).add(mm_hash)
            return True
        if self._links.are_up and self._is_loading(request.delivery.name_of(mm_hash)):
            return False  # asked for now, it would be promised once more and be gone
        if wanted is None or request_id not in wanted.requests:
            name = wanted.name if wanted is not None else self._name_for(request, feature)
            if not name:
                return False
            wanted = self._want(request, feature, name, is_resident=is_resident)
        if not self._links.are_up:
            wanted.failure = Code.UNREACHABLE, "the engine's workers do not answer"
        if wanted.failure is not None:
            return is_resident or self._without(request_id, feature, wanted)
        return self._is_ready(wanted)

    def _may_come(self, request: RequestView, feature: Feature) -> bool:
        delivery = request.delivery
        return (
            self._has_peers
            or delivery.is_sent
            or delivery.name_of(feature.mm_hash) in (self._offered)
        )

    def _name_for(self, request: RequestView, feature: Feature) -> str:
        """What to ask for; '' while an older request asks for another item by that name."""
        mm_hash, request_id = feature.mm_hash, request.request_id
        name = request.delivery.name_of(mm_hash)
        holder = self._by_name.get(name, mm_hash)
        if holder == mm_hash:
            return name
        order = self._orders.get(request_id, self._next_order)
        if any(self._orders.get(each, order) < order for each in self._wanted[holder].requests):
            return ""
        # Nobody may know it by this one, but it does not wait for who may wait for it.
        return mm_hash if mm_hash not in self._by_name else f"{mm_hash} of {request_id}"

    def _want(
        self, request: RequestView, feature: Feature, name: str, *, is_resident: bool
    ) -> Wanted:
        order = self._orders.setdefault(request.request_id, self._next_order)
        self._next_order = max(self._next_order, order + 1)
        named = request.delivery.peers_of(feature.mm_hash)
        peers = tuple(each for each in named if each != self.own_endpoint)
        is_elsewhere = request.delivery.is_sent and (bool(peers) or not named)
        # Who encodes itself, or has it, only asks whether somebody has done so already.
        asks_only = is_resident or (self._is_producer and not is_elsewhere)
        patience_s = ASK_ONLY_S if asks_only else 0.0
        is_pushed = request.delivery.is_pushed
        expect = Expect(name, order, peers, feature.rows, patience_s, is_pushed)
        wanted = self._wanted.get(feature.mm_hash)
        if wanted is None:
            wanted = self._wanted[feature.mm_hash] = Wanted(feature.mm_hash, name)
            self._by_name[name] = feature.mm_hash
            self._offered.pop(name, None)
        wanted.requests[request.request_id] = expect
        if wanted.failure is None:
            self._send_expect(wanted, expect)
        return wanted

    def _send_expect(self, wanted: Wanted, expect: Expect, rank: int | None = None) -> None:
        """Tell a rank, or all, that a request waits for an item."""
        if wanted.digest:
            expect = msgspec.structs.replace(expect, digest=wanted.digest)
        self._links.send(expect, rank)

    def _without(self, request_id: str, feature: Feature, wanted: Wanted) -> bool:
        """An item cannot be had: encode it here, or give the request up."""
        assert wanted.failure is not None
        code, text = wanted.failure
        del wanted.requests[request_id]
        if not wanted.requests:
            self._drop(wanted)
        if feature.has_media:
            self._local.setdefault(request_id, set()).add(feature.mm_hash)
            self._count("local_encodes")
            logger.warning(
                "kvpool: %s is encoded here, it cannot be had (%s: %s)",
                feature.mm_hash,
                code.value,
                text,
            )
            return True
        return self._give_up(request_id, feature.mm_hash, code, text)

    def _give_up(self, request_id: str, mm_hash: str, code: Code, text: str) -> bool:
        """The engine would end if it were to encode what it does not have."""
        self._unavailable.add(request_id)
        self._count("failed_requests")
        logger.error(
            "kvpool: request %s fails: %s cannot be had (%s: %s) and its media are not here",
            request_id,
            mm_hash,
            code.value,
            text,
        )
        return False

    def _is_ready(self, wanted: Wanted) -> bool:
        return wanted.failure is None and len(wanted.ready) == self._links.num_ranks

    def _may_encode(self, request: RequestView, ahead: Iterable[Feature]) -> bool:
        """Have a request's items sent on; False while consumers are to take others first."""
        pushed = self._pushed.setdefault(request.request_id, {})
        encodes = False
        for feature in ahead:
            encodes |= feature.mm_hash not in self._resident
            if feature.mm_hash not in pushed and request.delivery.consumers:
                push = pushed[feature.mm_hash] = Push(feature.mm_hash, request.delivery.consumers)
                self._links.send(push)
        # What lost workers hold will not be taken: nothing waits for that.
        is_full = encodes and self._links.are_up and self._held > self._retain_bytes
        if is_full and not self._is_holding:
            self._count("deferred_encodes")
        self._is_holding = is_full
        return not is_full

    def has(self, mm_hash: str) -> bool:
        """Whether an item can be loaded; then it can be, until it is or no request waits for it."""
        if mm_hash in self._resident:
            # The engine asks only for what it does not have: its cache was emptied.
            self._resident.discard(mm_hash)
        wanted = self._wanted.get(mm_hash)
        return wanted is not None and self._is_ready(wanted)

    def allocated(self, mm_hash: str) -> None:
        """The engine has made room for an item: it is loaded in this step, or encoded."""
        self._resident.add(mm_hash)
        self._allocated.add(mm_hash)
        wanted = self._wanted.get(mm_hash)
        if wanted is not None and self._is_ready(wanted):
            self._loads.append(Load(mm_hash, wanted.name))
            ranks = set(range(self._links.num_ranks))
            self._loading[wanted.name] = (ranks, self._clock() + LOADING_S)
            self._count("loaded_items")
            self._forget(wanted)

    def plan(self, freed: Iterable[str], *, is_idle: bool, idle_wait_s: float) -> StepMeta:
        """The step's word for the workers; `freed` has left the engine's cache.

        Where nothing runs, waits a little for what requests wait for.
        """
        for mm_hash in freed:
            if mm_hash not in self._allocated:
                self._resident.discard(mm_hash)
        self._allocated.clear()
        loads, self._loads = tuple(self._loads), []
        self._links.flush()
        if is_idle and self.is_waiting:
            self._hear(idle_wait_s)
        return StepMeta(self._epoch, loads)

    @property
    def is_waiting(self) -> bool:
        """Whether a request waits for the workers."""
        return bool(self._wanted) or self._is_holding or not self._links.are_up

    def finished(self, request: RequestView) -> None:
        """A request has ended, however."""
        for feature in request.features:
            wanted = self._wanted.get(feature.mm_hash)
            if wanted is not None:
                wanted.requests.pop(request.request_id, None)
                if not wanted.requests:
                    self._tell_to_forget(wanted.name)
                    self._drop(wanted)
        for kept in (self._local, self._pushed, self._orders):
            kept.pop(request.request_id, None)
        self._unavailable.discard(request.request_id)

    def take_unavailable(self) -> set[str]:
        """Requests that cannot get what they need."""
        taken, self._unavailable = self._unavailable, set()
        return taken

    def weights_changed(self, epoch: str) -> None:
        """The weights are others now: what was encoded before is of no use."""
        self._epoch += 1
        self._epoch_told = Epoch(self._epoch, self._fingerprint(epoch))
        self._links.send(self._epoch_told)
        self._offered.clear()
        for wanted in self._wanted.values():
            wanted.ready.clear()
            wanted.coming.clear()
            wanted.others.clear()
            wanted.failure, wanted.digest, wanted.choices = None, "", 0
            for expect in wanted.requests.values():
                self._links.send(expect)

    def encoder_cache_was_reset(self) -> None:
        """The engine has emptied its encoder cache."""
        self._resident.clear()

    def close(self) -> None:
        """End the connections to the workers."""
        self._links.close()

    # What workers say

    def _hear(self, timeout_s: float = 0.0) -> None:
        for rank, body in ((said.rank, said.body) for said in self._links.poll(timeout_s)):
            match body:
                case None:
                    self._say_all(rank)
                case ItemNews():
                    self._note(rank, body)
                case Taken(name):
                    self._loaded(rank, name)
                case Held(nbytes):
                    self._held = nbytes
                case Numbers(samples):
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

    def _say_all(self, rank: int) -> None:
        """A worker knows of nothing, or of what it should have forgotten."""
        for name in tuple(self._loading):
            self._loaded(rank, name)
        if self._epoch:
            self._links.send(self._epoch_told, rank)
        for name in self._unsaid:
            self._links.send(Forget(name), rank)
        if self._links.are_up:
            self._unsaid.clear()
        for wanted in self._wanted.values():
            wanted.ready.pop(rank, None)
            wanted.coming.pop(rank, None)
            if wanted.failure is None:  # of a failed item the workers were told to forget it
                for expect in wanted.requests.values():
                    self._send_expect(wanted, expect, rank)
        for pushes in self._pushed.values():
            for push in pushes.values():
                self._links.send(push, rank)

    def _note(self, rank: int, news: ItemNews) -> None:
        if news.epoch != self._epoch:
            return
        mm_hash = self._by_name.get(news.mm_hash)
        if news.offered and mm_hash is None:
            self._offered[news.mm_hash] = None
            while len(self._offered) > MAX_OFFERED:
                del self._offered[next(iter(self._offered))]
        elif mm_hash is None:
            self._offered.pop(news.mm_hash, None)
        elif news.code is not None:
            self._without_encoding(self._wanted[mm_hash], news.code, news.text)
        elif news.digest:
            self._note_encoding(self._wanted[mm_hash], rank, news)

    def _note_encoding(self, wanted: Wanted, rank: int, news: ItemNews) -> None:
        """A rank has an encoding of an item, or is being sent one."""
        if wanted.failure is not None or wanted.digest not in ("", news.digest):
            return  # said before the rank was told which one to have
        wanted.coming[rank] = news.digest
        if not news.offered:
            wanted.ready[rank] = news.digest
        if len(set(wanted.coming.values())) > 1:
            # What a rank has already is not sent again; else the lowest rank decides.
            of_ranks = wanted.ready or wanted.coming
            wanted.others |= dict.fromkeys(wanted.coming.values())
            self._choose(wanted, of_ranks[min(of_ranks)])

    def _choose(self, wanted: Wanted, digest: str) -> None:
        """All ranks are to have this encoding: whoever is brought another one begins anew."""
        self._count("chosen_encodings")
        wanted.choices += 1
        wanted.digest = digest
        wanted.others.pop(digest, None)
        for known in (wanted.ready, wanted.coming):
            for rank in [rank for rank, each in known.items() if each != digest]:
                del known[rank]
        for expect in wanted.requests.values():
            self._send_expect(wanted, expect)

    def _without_encoding(self, wanted: Wanted, code: Code, text: str) -> None:
        """A rank cannot have an item, or not in the encoding that was chosen: the next one."""
        if wanted.failure is None and wanted.others and wanted.choices < MAX_CHOICES:
            self._choose(wanted, next(iter(wanted.others)))
        else:
            self._fail(wanted, code, text)

    def _fail(self, wanted: Wanted, code: Code, text: str) -> None:
        wanted.failure = (code, text)
        self._count("failed_items")
        self._tell_to_forget(wanted.name)  # the other ranks may still wait, or have it

    def _tell_to_forget(self, name: str) -> None:
        """Also whoever is not to be reached now: the same process may come back, and has it."""
        self._links.send(Forget(name))
        if not self._links.are_up:
            self._unsaid[name] = None
            while len(self._unsaid) > MAX_OFFERED:
                del self._unsaid[next(iter(self._unsaid))]

    def _forget(self, wanted: Wanted) -> None:
        """It is loaded: whoever else waits for it finds it in the engine's cache."""
        self._drop(wanted)

    def _drop(self, wanted: Wanted) -> None:
        self._wanted.pop(wanted.mm_hash, None)
        self._by_name.pop(wanted.name, None)

    # Numbers

    def _count(self, event: str) -> None:
        self.tally.add("kvpool_ec_events", 1, side="scheduler", event=event)

    def take_numbers(self) -> dict[str, float]:
        """What has been counted here and by the workers since the last call."""
        numbers, self._from_workers = self._from_workers, {}
        merge_samples(numbers, self.tally.take_changes())
        return numbers
