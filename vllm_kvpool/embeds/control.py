"""The control thread: it turns frames and posted calls into calls of both machines.

It performs the machines' effects and owns all sockets, `Consumer`, `Producer` and `Peers`. It
decides nothing that a machine can decide and moves no rows: the data plane does. A bug costs the
message or effect that shows it (`Guard`); an error that ends the loop is reported to the engine's
scheduler.
"""

import logging
import queue
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Protocol

import msgspec

from vllm_kvpool.embeds.faults import (
    BEGIN,
    CONTROL,
    OF_FAILED_WORK,
    PERFORM,
    RESOLVER,
    TICK,
    ControlThreadError,
    Guard,
)
from vllm_kvpool.embeds.machines.consumer import Consumer
from vllm_kvpool.embeds.machines.effects import (
    Allocate,
    Connect,
    DrainRows,
    Effect,
    NotifyScheduler,
    Prepare,
    Ready,
    Send,
    Write,
)
from vllm_kvpool.embeds.machines.producer import Producer
from vllm_kvpool.embeds.machines.session import HeartbeatPolicy, SessionState
from vllm_kvpool.embeds.peers import Peers
from vllm_kvpool.embeds.protocol.messages import (
    Cancel,
    CancelAck,
    Code,
    Complete,
    Envelope,
    Expect,
    Forget,
    Goodbye,
    Grant,
    Heartbeat,
    HeldBytes,
    ItemNews,
    Message,
    MetricSamples,
    Offer,
    OfferAck,
    PeerHello,
    Push,
    Reorder,
    Requested,
    Revoke,
    RevokeAck,
    Unknown,
    Want,
    WantAck,
    WeightsChanged,
    Withdraw,
    WriteFailed,
    Wrote,
    decode,
    decode_body,
)
from vllm_kvpool.errors import ProtocolError
from vllm_kvpool.metrics import MetricsRegistry
from vllm_kvpool.network.allowed_peers import AllowedPeers, Resolver
from vllm_kvpool.network.log_limit import LogLimit
from vllm_kvpool.network.transport_zmq import Frame, ZmqTransport

logger = logging.getLogger(__name__)

TICK_S = 0.1
METRICS_EVERY_S = 1.0
REFRESH_EVERY_S = 0.01  # a step of the model reads `missing` once; many wants take time to scan
FINISH_S = 1.0

Call = Callable[[float], None]


class ItemDataPlane(Protocol):
    """Moves rows. Neither call blocks, and work that ends in a report posts it."""

    def perform(self, effect: Effect) -> None:
        """Raise MemoryError or OSError if the host has no memory for an item."""

    def begin(self) -> None:
        """Start the work that this turn's effects ask for."""


class Control:
    """The control thread's loop. `post` and `stop` may be called by any thread."""

    def __init__(
        self,
        hello: PeerHello,
        sockets: ZmqTransport,
        heartbeats: HeartbeatPolicy,
        dataplane: ItemDataPlane,
        *,
        consumer: Consumer | None,
        producer: Producer | None,
        peers: Iterable[str] = (),
        allowed: AllowedPeers | None = None,
        scheduler_token: bytes = b"",
        log: LogLimit | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sockets = sockets
        self._dataplane = dataplane
        self._consumer = consumer
        self._producer = producer
        self._machines = {
            side: machine
            for side, machine in (("consumer", consumer), ("producer", producer))
            if machine is not None
        }
        self._endpoints = tuple(peers)
        self._clock = clock
        self._inbox: queue.SimpleQueue[Call] = queue.SimpleQueue()
        self._is_asleep = False  # or about to: `post` must wake it
        self._reported_held_bytes = 0
        self._next_tick = self._next_metrics = 0.0
        self._next_refresh = float("inf")
        self._last_refresh = 0.0
        self._reported: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._requested: set[str] = set()  # of the parts of a list that is arriving
        self._stopping = False
        self.is_over = False
        """True if the loop has ended, in order or not. Read by any thread."""
        self.weights_version = 0
        """The version of this rank's weights. Control thread only."""
        self._handlers = handlers_of(consumer, producer)
        self.counts: defaultdict[str, float] = defaultdict(float)
        self._guard = Guard(self.counts, log or LogLimit(logger, clock))
        self._resolver = Resolver(
            RESOLVER,
            lambda name, found: self.post(partial(self._peers.resolved, name, found)),
            self.work_failed,
        )
        self._peers = Peers(
            hello,
            sockets,
            heartbeats,
            consumer,
            producer,
            counts=self.counts,
            on_scheduler=self._on_scheduler_connected,
            clock=clock,
            guard=self._guard,
            allowed=allowed or AllowedPeers(),
            scheduler_token=scheduler_token,
            resolve=self._resolver.look_up,
        )
        self.registry = MetricsRegistry()
        self.missing: frozenset[str] = frozenset()
        """Items that consumers wait for and that are not encoded yet; read by any thread."""

    def post(self, call: Call) -> None:
        """Run a call on the control thread, before any frame that arrives later.

        Dropped if the thread has ended, by a bug too: calls hold tensors.
        """
        if self.is_over:
            return
        self._inbox.put(call)
        if self._is_asleep:
            self._is_asleep = False  # one wake is enough
            self._sockets.wake()

    # Reports of the data plane: any thread

    def drained(self, gid: int, same: bool) -> None:
        """Tell the consumer that a grant's rows are copied, and whether their digest matched."""
        assert self._consumer is not None
        self.post(partial(self._consumer.drained, gid, same))

    def prepared(self, item_id: int, digest: str) -> None:
        """Tell the producer the digest of an item that is now in host memory."""
        assert self._producer is not None
        self.post(partial(self._producer.prepared, item_id, digest))

    def written(self, result: Wrote | WriteFailed) -> None:
        """Tell the producer how a write ended."""
        assert self._producer is not None
        self.post(partial(self._producer.written, result))

    def work_failed(self, kind: str, error: BaseException) -> None:
        """Fail the work of a thread that ended by an error of ours, or of the device."""
        text = f"kvpool: {kind}: {OF_FAILED_WORK[kind]}"
        self._guard.log.log(logging.ERROR, "failed work", kind, text, error=error)
        event = "internal_errors" if isinstance(error, Exception) else "dead_threads"
        self.post(lambda now: self._count(event))

    # Its end

    def _count(self, event: str) -> None:
        self.counts[event] += 1

    def stop(self) -> None:
        """Ask the loop to end; it ends writes and says goodbye first."""
        self.post(self._stop)

    def _stop(self, now: float) -> None:
        self._stopping = True

    def _finish(self) -> None:
        """Let writes end, for FINISH_S at most; only then is nothing of this process in flight."""
        deadline = self._clock() + FINISH_S
        while self._writes and self._clock() < deadline:
            self.turn(self._timeout())
        now = self._clock()
        self._report_metrics(now)
        if not self._writes:
            self._peers.say_goodbye(now)
        self._peers.flush(float("inf"))

    @property
    def _writes(self) -> int:
        return self._producer.num_writes if self._producer is not None else 0

    # The loop

    def run(self) -> None:
        """Run until `stop`; nothing that a peer sends ends the loop.

        An error that does is logged and reported to the own scheduler.
        """
        try:
            now = self._clock()
            self._peers.resolve_listed_names(now)
            for endpoint in self._endpoints:
                self._peers.connect_configured(endpoint, now)
            while not self._stopping:
                self.turn(self._timeout())
            self._finish()
        except BaseException as error:
            self._die(error)
        finally:
            self.is_over = True
            self.missing = frozenset()
            self._inbox = queue.SimpleQueue()
            self._resolver.close()

    def _die(self, error: BaseException) -> None:
        """Report the error while that works; the scheduler otherwise notices its silence."""
        logger.critical(
            "kvpool: the thread %s has died: this rank sends and receives no embeddings until "
            "the engine is restarted; requests whose media are here are encoded here, others fail",
            CONTROL,
            exc_info=error,
        )
        with suppress(BaseException):
            self._count("dead_threads")
            now = self._clock()
            self._report_metrics(now)
            self._peers.notify_scheduler(Goodbye(), now)
            self._peers.flush(float("inf"))

    def turn(self, timeout_s: float) -> None:
        """Wait for frames, calls or a deadline, and handle all that are due."""
        # A `post` after the inbox was read sees that this thread sleeps.
        self._is_asleep = True
        frames = self._sockets.poll(timeout_s if self._inbox.empty() else 0.0)
        self._is_asleep = False
        now = self._clock()
        for refused in self._sockets.take_refused():
            self._peers.refused_handshake(refused, now)
        # Posted calls come first: peers' frames may already answer them.
        for _ in range(self._inbox.qsize()):
            self._guard("call", self._inbox.get_nowait(), now)
        for frame in frames:
            self._receive(frame, now)
        if now >= self._next_tick:
            self._next_tick = now + TICK_S
            self._guard(TICK, self._tick, now)
        self._perform(now)
        self._guard(BEGIN, self._dataplane.begin)
        self._peers.flush(now)
        if now >= self._next_refresh:
            self._guard("refresh", self._refresh_missing, now)

    def _timeout(self) -> float:
        next_at = min(self._next_tick, self._next_refresh, self._peers.outbox.next_at())
        return max(0.001, next_at - self._clock())

    def _tick(self, now: float) -> None:
        self._peers.tick(now)
        for machine in self._machines.values():
            machine.tick(now)
        if self._producer is not None:
            self._refresh_missing(now)
        if now >= self._next_metrics:
            self._next_metrics = now + METRICS_EVERY_S
            self._report_metrics(now)

    def _on_scheduler_connected(self) -> None:
        self._reported_held_bytes = -1

    # Effects

    def _perform(self, now: float) -> None:
        for machine in self._machines.values():
            self._guard(PERFORM, self._perform_effects, machine.take_effects, now)

    def _perform_effects(self, take: Callable[[float], list[Effect]], now: float) -> None:
        effects = take(now)
        for effect in effects:
            if type(effect) is Send:  # half of all effects
                self._guard("send", self._peers.send_to, effect.peer, effect.body, now)
            elif not self._guard("effect", self._perform_effect, effect, now):
                self._guard("effect", self._on_failed_effect, effect, now)
        if effects and self._producer is not None:
            self._next_refresh = min(self._next_refresh, self._last_refresh + REFRESH_EVERY_S)

    def _on_failed_effect(self, effect: Effect, now: float) -> None:
        """Report a failed effect to the machine that waits for its result."""
        consumer, producer, text = self._consumer, self._producer, "internal error"
        match effect:
            case NotifyScheduler() | Ready():
                raise ControlThreadError("an item cannot be handed to the own engine")
            case DrainRows(gid) if consumer is not None:
                consumer.drained(gid, False, now)
            case Allocate(mm_hash) if consumer is not None:
                consumer.no_memory(mm_hash, text)
            case Prepare(item_id) if producer is not None:
                producer.prepared(item_id, "", now)
            case Write(tid, gid) if producer is not None:
                producer.written(WriteFailed(tid, gid, False, text), now)
            case _:
                pass

    def _refresh_missing(self, now: float) -> None:
        """Update `missing`, and report how much the producer holds."""
        assert self._producer is not None
        self.missing = frozenset(self._producer.missing())
        self._last_refresh, self._next_refresh = now, float("inf")
        held = self._producer.cache.held_bytes
        if held != self._reported_held_bytes:
            self._reported_held_bytes = held
            self._peers.notify_scheduler(HeldBytes(held), now)

    def _perform_effect(self, effect: Effect, now: float) -> None:
        match effect:
            case NotifyScheduler(news):
                if isinstance(news, ItemNews) and self.weights_version:
                    news = msgspec.structs.replace(news, weights_version=self.weights_version)
                self._peers.notify_scheduler(news, now)
            case Allocate(mm_hash) if self._consumer is not None:
                try:
                    self._dataplane.perform(effect)
                except (MemoryError, OSError) as error:
                    self._consumer.no_memory(mm_hash, str(error))
            case Connect(endpoint):
                self._peers.connect(endpoint, now)
            case _:
                self._dataplane.perform(effect)

    def _report_metrics(self, now: float) -> None:
        self._add_events("channel", self.counts)
        for side, machine in self._machines.items():
            self._add_events(side, machine.counts)
            for level, value in machine.gauges().items():
                self.registry.set("kvpool_ec_levels", value, side=side, level=level)
        peers = self._peers.states()
        for session in SessionState:
            self.registry.set("kvpool_ec_peers", peers[session], state=session.value)
        items = self._consumer.states() if self._consumer is not None else {}
        for state, num_items in items.items():
            self.registry.set("kvpool_ec_items", num_items, state=state.value)
        changes = self.registry.take_changes()
        if changes:
            self._peers.notify_scheduler(MetricSamples(changes), now)

    def _add_events(self, side: str, counts: Mapping[str, float]) -> None:
        for event, value in counts.items():
            growth = value - self._reported[side, event]
            if growth:
                self.registry.add("kvpool_ec_events", growth, side=side, event=event)
                self._reported[side, event] = value

    # Frames

    def _receive(self, frame: Frame, now: float) -> None:
        """Handle a frame's messages, each on its own."""
        self._guard.peer = frame.link.endpoint or frame.address
        try:
            envelope = decode(frame.data)
        except ProtocolError as error:
            self._guard.bad_message(error)
            return
        bodies = iter(envelope.bodies)
        for _ in envelope.bodies:  # a bad message ends the call; the next one continues after it
            if self._guard("message", self._on_messages, frame, envelope, bodies, now):
                return

    def _on_messages(
        self, frame: Frame, envelope: Envelope, bodies: Iterator[msgspec.Raw], now: float
    ) -> None:
        for raw in bodies:
            self._on_message(frame, envelope, decode_body(raw), now)

    def _on_message(self, frame: Frame, envelope: Envelope, body: Message, now: float) -> None:
        session = self._peers.on_message(frame, envelope, body, now)
        if session is not None and session.is_of_scheduler:
            self._on_scheduler_message(body, now)
        elif session is not None:
            session.received(now)
            if handler := self._handlers.get(type(body)):
                handler(envelope.source, body, now)
            elif isinstance(body, Goodbye):
                session.goodbye()
        self._peers.act(frame.link, now)

    def _on_scheduler_message(self, body: Message, now: float) -> None:
        match body:
            case Expect(mm_hash, wait_id=wait_id) if self._consumer is not None:
                if not self._guard("expect", self._consumer.expect, body, now):
                    text = "internal error"
                    news = ItemNews(mm_hash, code=Code.CLOSED, text=text, wait_id=wait_id)
                    self._perform_effect(NotifyScheduler(news), now)
            case Reorder(mm_hash, order) if self._consumer is not None:
                self._consumer.reorder(mm_hash, order)
            case Requested() if self._consumer is not None:
                self._keep_requested(self._consumer, body)
            case Forget(mm_hash) if self._consumer is not None:
                self._consumer.forget(mm_hash)
            case Push() if self._producer is not None:
                self._producer.push(body, now)
            case WeightsChanged():
                self.change_weights(body, now)
            case Heartbeat(answer=False):
                self._peers.notify_scheduler(Heartbeat(answer=True), now)
            case _:
                pass

    def _keep_requested(self, consumer: Consumer, message: Requested) -> None:
        if message.part == 0:
            self._requested = set()
        self._requested.update(message.names)
        if message.part == message.parts - 1:
            consumer.keep_requested(self._requested)
            self._requested = set()

    def change_weights(self, message: WeightsChanged, now: float) -> None:
        """Set the weights' version: sessions continue with peers that have the same."""
        if message.version <= self.weights_version:
            return
        try:
            if self._consumer is not None:
                self._consumer.weights_changed(now, message.loading)
            if self._producer is not None:
                self._producer.weights_changed(now)
            self._perform(now)  # withdraw stale items while there still is a session
            self.weights_version = message.version
            hello = msgspec.structs.replace(self._peers.hello, fingerprint=message.fingerprint)
            self._peers.update_hello(hello, now)
        except Exception as error:  # stale items might still be sent
            raise ControlThreadError("the change of the weights could not be applied") from error


Handler = Callable[..., None]


def handlers_of(consumer: Consumer | None, producer: Producer | None) -> dict[type, Handler]:
    """Return the machine's handler of each message of a peer."""
    handlers: dict[type, Handler] = {}
    if consumer is not None:
        handlers |= {
            Offer: consumer.offer,
            WantAck: consumer.want_ack,
            Wrote: consumer.wrote,
            WriteFailed: consumer.write_failed,
            RevokeAck: consumer.revoke_ack,
            CancelAck: consumer.cancel_ack,
            Withdraw: consumer.withdraw,
            Unknown: consumer.unknown,
        }
    if producer is not None:
        handlers |= {
            Want: producer.want,
            OfferAck: producer.offer_ack,
            Grant: producer.grant,
            Revoke: producer.revoke,
            Complete: producer.complete,
            Cancel: producer.cancel,
        }
    return handlers
