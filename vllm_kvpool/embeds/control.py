"""The control thread's loop: what arrives, both machines, and what their effects ask for.

Owner of all sockets, of `Consumer`, `Producer` and `Peers`. Inbox: frames, and calls that other
threads post. It decides nothing that a machine can decide and moves no rows: hands do that. A bug
costs the message or the effect that shows it (`guard.py`); what ends the loop is told to the
engine's scheduler.
"""

import logging
import queue
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Protocol

import msgspec

from vllm_kvpool.embeds.allowed import AllowedPeers
from vllm_kvpool.embeds.consumer import Consumer
from vllm_kvpool.embeds.effects import (
    Allocate,
    Connect,
    Discard,
    Drain,
    Effect,
    Prepare,
    Ready,
    Release,
    Send,
    Tell,
    Write,
)
from vllm_kvpool.embeds.guard import BEGIN, PERFORM, TICK, CannotGoOn, Guard
from vllm_kvpool.embeds.log_limit import LogLimit
from vllm_kvpool.embeds.peers import Peers
from vllm_kvpool.embeds.producer import Producer
from vllm_kvpool.embeds.protocol import (
    Cancel,
    CancelAck,
    Code,
    Complete,
    Envelope,
    Epoch,
    Expect,
    Forget,
    Goodbye,
    Grant,
    Heartbeat,
    Held,
    Hello,
    ItemNews,
    Message,
    NeedGrant,
    Numbers,
    Offer,
    OfferAck,
    Push,
    Revoke,
    RevokeAck,
    RowsAck,
    Unknown,
    Want,
    WantAck,
    Withdraw,
    WriteFailed,
    Wrote,
    decode,
    decode_body,
)
from vllm_kvpool.embeds.resolver import Resolver
from vllm_kvpool.embeds.rows import ItemShape
from vllm_kvpool.embeds.session import Rhythm, Session, SessionState
from vllm_kvpool.embeds.sockets import Frame, Sockets
from vllm_kvpool.embeds.threads import CONTROL
from vllm_kvpool.errors import ProtocolError
from vllm_kvpool.metrics import Tally

logger = logging.getLogger(__name__)

TICK_S = 0.1
NUMBERS_EVERY_S = 1.0
LOOK_EVERY_S = 0.01  # a step of the model asks once; with many wishes a look takes its time
FINISH_S = 1.0

Call = Callable[[float], None]


class Hands(Protocol):
    """Who moves rows. None of these blocks; each that ends in a report posts it.

    What is to be drained, prepared and written begins with `begin`, once for all of a turn.
    """

    def allocate(self, mm_hash: str, shape: ItemShape) -> None:
        """MemoryError or OSError if there is none."""

    def discard(self, mm_hash: str) -> None: ...
    def ready(self, mm_hash: str) -> None: ...
    def drain(self, work: Drain) -> None: ...
    def prepare(self, sid: int) -> None: ...
    def write(self, work: Write) -> None: ...
    def release(self, sid: int) -> None: ...
    def begin(self) -> None: ...


class Control:
    """See the module docstring. `post` and `stop` may be called by any thread."""

    def __init__(
        self,
        hello: Hello,
        sockets: Sockets,
        rhythm: Rhythm,
        hands: Hands,
        *,
        consumer: Consumer | None,
        producer: Producer | None,
        peers: Iterable[str] = (),
        allowed: AllowedPeers | None = None,
        log: LogLimit | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sockets = sockets
        self._hands = hands
        self._consumer = consumer
        self._producer = producer
        self._endpoints = tuple(peers)
        self._clock = clock
        self._inbox: queue.SimpleQueue[Call] = queue.SimpleQueue()
        self._is_asleep = False  # or about to be, and to be woken
        self._held = 0
        self._next_tick = self._next_numbers = 0.0
        self._next_look = float("inf")
        self._last_look = 0.0
        self._told: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._stopping = False
        self._is_over = False
        self._early: list[tuple[int, Call]] = []  # of epochs that have not begun here yet
        self._handlers = _handlers_of(consumer, producer)
        self.counts: defaultdict[str, float] = defaultdict(float)
        self._guard = Guard(self.counts, log or LogLimit(logger, clock))
        self._resolver = Resolver(
            lambda answer: self.post(lambda now: self._peers.resolved(*answer, now)),
            self.thread_died,
        )
        self._peers = Peers(
            hello,
            sockets,
            rhythm,
            consumer,
            producer,
            self.counts,
            self._tell_all,
            clock,
            self._guard,
            allowed or AllowedPeers(),
            self._resolver.look_up,
        )
        self.tally = Tally()
        self.missing: frozenset[str] = frozenset()
        """Items that consumers wait for and that are not here; read by any thread."""

    def post(self, call: Call) -> None:
        """Have something done on the control thread, before any frame that comes later.

        Nothing is kept for a thread that has ended, of a bug too: calls hold tensors.
        """
        if self._is_over:
            return
        self._inbox.put(call)
        if self._is_asleep:
            self._is_asleep = False  # one is enough
            self._sockets.wake()

    @property
    def is_over(self) -> bool:
        """Whether the loop has ended, in order or not. Read by any thread."""
        return self._is_over

    def thread_died(self, name: str, error: BaseException) -> None:
        """Note the death of a thread. Any thread."""
        text = "kvpool: the thread %s has died; what it was about counts as failed"
        self._guard.log.log(logging.ERROR, "death", name, text, name, error=error)
        self.post(lambda now: self._count("dead_threads"))

    def _count(self, event: str) -> None:
        self.counts[event] += 1

    def stop(self) -> None:
        """End the loop."""
        self.post(self._stop)

    def _stop(self, now: float) -> None:
        self._stopping = True

    def _finish(self) -> None:
        """Let writes end, for a bounded time; only then nothing of this process is in flight."""
        deadline = self._clock() + FINISH_S
        while self._writes and self._clock() < deadline:
            self.turn(self._timeout())
        now = self._clock()
        self._tell_numbers(now)  # the last ones
        if not self._writes:
            self._peers.say_goodbye(now)
        self._peers.flush(float("inf"))

    @property
    def _writes(self) -> float:
        return self._producer.gauges()["writes"] if self._producer is not None else 0

    # The loop

    def run(self) -> None:
        """Until `stop`. Nothing that a peer sends ends it; where something does, that is logged and
        told to the own scheduler."""
        try:
            now = self._clock()
            self._peers.look_up_names(now)
            for endpoint in self._endpoints:
                self._peers.connect_configured(endpoint, now)
            while not self._stopping:
                self.turn(self._timeout())
            self._finish()
        except BaseException as error:
            self._die(error)
        finally:
            self._is_over = True
            self.missing = frozenset()
            self._inbox = queue.SimpleQueue()
            self._early.clear()
            self._resolver.close()

    def _die(self, error: BaseException) -> None:
        """Say so while that works: whoever does not hear of it finds out by its own clock."""
        logger.critical(
            "kvpool: the thread %s has died: this rank sends and takes no embeddings until the "
            "engine is restarted; requests are encoded here where their media are, or fail",
            CONTROL,
            exc_info=error,
        )
        with suppress(BaseException):
            self._count("dead_threads")
            now = self._clock()
            self._tell_numbers(now)
            self._peers.tell(Goodbye(), now)
            self._peers.flush(float("inf"))

    def turn(self, timeout_s: float) -> None:
        """Wait for something, and do all that is due."""
        # Who posts after this looks sees that this thread sleeps.
        self._is_asleep = True
        frames = self._sockets.poll(timeout_s if self._inbox.empty() else 0.0)
        self._is_asleep = False
        now = self._clock()
        # What threads have posted happened before what peers have heard of it and answer.
        for _ in range(self._inbox.qsize()):
            self._guard("call", self._inbox.get_nowait(), now)
        for frame in frames:
            self._receive(frame, now)
        if now >= self._next_tick:
            self._next_tick = now + TICK_S
            self._guard(TICK, self._tick, now)
        self._perform(now)
        self._guard(BEGIN, self._hands.begin)
        self._peers.flush(now)
        if now >= self._next_look:
            self._guard("look", self._look, now)

    def _timeout(self) -> float:
        next_at = min(self._next_tick, self._next_look, self._peers.outbox.next_at())
        return max(0.001, next_at - self._clock())

    def _tick(self, now: float) -> None:
        self._peers.tick(now)
        if self._consumer is not None:
            self._consumer.tick(now)
        if self._producer is not None:
            self._producer.tick(now)
            self._look(now)
        if now >= self._next_numbers:
            self._next_numbers = now + NUMBERS_EVERY_S
            self._tell_numbers(now)

    def _tell_all(self) -> None:
        self._held = -1

    # What is to be done

    def _perform(self, now: float) -> None:
        if self._consumer is not None:
            self._guard(PERFORM, self._do_all, self._consumer.take_effects, now)
        if self._producer is not None:
            self._guard(PERFORM, self._do_all, self._producer.take_effects, now)

    def _do_all(self, take: Callable[[], list[Effect]], now: float) -> None:
        effects = take()
        lost: set[str] = set()  # items that are not ready after all
        for effect in effects:
            if type(effect) is Send:  # every other one
                self._guard("send", self._peers.send_to, effect.peer, effect.body, now)
            elif lost and isinstance(effect, Tell) and effect.news.mm_hash in lost:
                pass
            elif not self._guard("effect", self._do, effect, now):
                if isinstance(effect, Ready):
                    lost.add(effect.mm_hash)
                self._guard("effect", self._do_without, effect, now)
        if effects and self._producer is not None:
            self._next_look = min(self._next_look, self._last_look + LOOK_EVERY_S)

    def _do_without(self, effect: Effect, now: float) -> None:
        """An effect has failed: say so to whoever waits for what it was to begin."""
        consumer, producer, text = self._consumer, self._producer, "a bug in this engine"
        match effect:
            case Tell():
                raise CannotGoOn("the own scheduler cannot be told what became of an item")
            case Drain(gid) if consumer is not None:
                consumer.drained(gid, False, now)
            case Allocate(mm_hash) if consumer is not None:
                consumer.no_memory(mm_hash, text, now)
            case Ready(mm_hash) if consumer is not None:
                consumer.not_ready(mm_hash, text, now)
            case Prepare(sid) if producer is not None:
                producer.prepared(sid, "", now)
            case Write(tid, gid) if producer is not None:
                producer.written(tid, gid, WriteFailed(tid, gid, False, text), now)
            case _:
                pass

    def _look(self, now: float) -> None:
        """What is missing at the producer, and how much it holds."""
        assert self._producer is not None
        self.missing = frozenset(self._producer.missing())
        self._last_look, self._next_look = now, float("inf")
        self._tell_held(now)

    def _do(self, effect: Effect, now: float) -> None:
        # By how many of them an item has.
        match effect:
            case Tell(news):
                if isinstance(news, ItemNews) and news.epoch != self._peers.hello.epoch:
                    news = msgspec.structs.replace(news, epoch=self._peers.hello.epoch)
                self._peers.tell(news, now)
            case Drain():
                self._hands.drain(effect)
            case Write():
                self._hands.write(effect)
            case Allocate():
                self._allocate(effect, now)
            case Ready(mm_hash):
                self._hands.ready(mm_hash)
            case Discard(mm_hash):
                self._hands.discard(mm_hash)
            case Prepare(sid):
                self._hands.prepare(sid)
            case Release(sid):
                self._hands.release(sid)
            case Connect(endpoint):
                self._peers.connect(endpoint, now)

    def _allocate(self, wanted: Allocate, now: float) -> None:
        try:
            self._hands.allocate(wanted.mm_hash, wanted.shape)
        except (MemoryError, OSError) as error:
            assert self._consumer is not None
            self._consumer.no_memory(wanted.mm_hash, str(error), now)

    def _tell_held(self, now: float) -> None:
        assert self._producer is not None
        held = self._producer.held_bytes
        if held != self._held:
            self._held = held
            self._peers.tell(Held(held), now)

    def _tell_numbers(self, now: float) -> None:
        sides: dict[str, tuple[Mapping[str, float], Mapping[str, float]]] = {
            "channel": (self.counts, {})
        }
        for side, machine in (("consumer", self._consumer), ("producer", self._producer)):
            if machine is not None:
                sides[side] = (machine.counts, machine.gauges())
        for side, (counts, levels) in sides.items():
            for event, value in counts.items():
                growth = value - self._told[side, event]
                if growth:
                    self.tally.add("kvpool_ec_events", growth, side=side, event=event)
                    self._told[side, event] = value
            for level, value in levels.items():
                self.tally.set("kvpool_ec_levels", value, side=side, level=level)
        states = self._peers.states()
        for state in SessionState:
            self.tally.set("kvpool_ec_peers", states[state], state=state.value)
        changes = self.tally.take_changes()
        if changes:
            self._peers.tell(Numbers(changes), now)

    # What arrives

    def _receive(self, frame: Frame, now: float) -> None:
        """What is in a frame, each message on its own."""
        self._guard.peer = frame.link.endpoint or frame.address
        try:
            envelope = decode(frame.data)
        except ProtocolError as error:
            self._guard.bad_message(error)
            return
        self._guard("message", self._hear, frame, envelope, envelope.body, now)
        more = iter(envelope.more)
        for _ in envelope.more:  # each bad one ends a call, and the next goes on behind it
            if self._guard("message", self._hear_further, frame, envelope, more, now):
                return

    def _hear_further(
        self, frame: Frame, envelope: Envelope, more: Iterator[msgspec.Raw], now: float
    ) -> None:
        is_told = self._peers.is_told_by_peer(frame.link, envelope)
        for raw in more:
            body = decode_body(raw)
            handler = self._handlers.get(type(body))
            if handler is not None and is_told:
                handler(envelope.source, body, now)  # the first message was a sign of life
            else:
                self._hear(frame, envelope, body, now)
                is_told = self._peers.is_told_by_peer(frame.link, envelope)

    def _hear(self, frame: Frame, envelope: Envelope, body: Message, now: float) -> None:
        session = self._peers.hear(frame, envelope, body, now)
        if session is None:
            pass
        elif session.is_of_scheduler:
            self._from_scheduler(body, now)
        else:
            session.heard(now)
            self._from_peer(envelope.source, session, body, now)
        self._peers.act(frame.link, now)

    def _from_peer(self, source: str, session: Session, body: Message, now: float) -> None:
        if isinstance(body, Unknown):
            machine = self._producer if body.yours else self._consumer
            if machine is not None:
                machine.unknown(source, body, now)
            return
        handler = self._handlers.get(type(body))
        if handler is not None:
            handler(source, body, now)
        elif isinstance(body, Goodbye):
            session.goodbye()

    def _from_scheduler(self, body: Message, now: float) -> None:
        match body:
            case Expect(mm_hash) if self._consumer is not None:
                if not self._guard("expect", self._consumer.expect, body, now):
                    news = ItemNews(mm_hash, code=Code.CLOSED, text="a bug in this engine")
                    self._do(Tell(news), now)
            case Forget(mm_hash) if self._consumer is not None:
                self._consumer.forget(mm_hash, now)
            case Push() if self._producer is not None:
                self._producer.push(body, now)
            case Epoch(number, fingerprint):
                try:
                    self.begin_epoch(number, fingerprint, now)
                except Exception as error:  # it may still send what was encoded before
                    raise CannotGoOn("a change of the weights was not taken in") from error
            case Heartbeat(answer=False):
                self._peers.tell(Heartbeat(answer=True), now)
            case _:
                pass

    def begin_epoch(self, number: int, fingerprint: str, now: float) -> None:
        """The weights are others now; sessions go on with those who have them too."""
        if number <= self._peers.hello.epoch:
            return
        if self._consumer is not None:
            self._consumer.begin_epoch(now)
        if self._producer is not None:
            self._producer.begin_epoch(now)
        self._perform(now)  # what is stale is withdrawn while there still is a session
        hello = self._peers.hello
        self._peers.introduce(
            msgspec.structs.replace(hello, fingerprint=fingerprint, epoch=number), now
        )
        early, self._early = self._early, []
        for epoch, call in early:
            if epoch > number:
                self._early.append((epoch, call))
            else:
                call(now)

    def when_epoch(self, epoch: int, call: Call) -> None:
        """Have something done once this epoch has begun. On the control thread."""
        self._early.append((epoch, call))

    @property
    def epoch(self) -> int:
        """Of the weights; read by the control thread."""
        return self._peers.hello.epoch


Handler = Callable[..., None]


def _handlers_of(consumer: Consumer | None, producer: Producer | None) -> dict[type, Handler]:
    """Who hears what of peers; but for `Unknown`, which either may."""
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
            NeedGrant: consumer.need_grant,
        }
    if producer is not None:
        handlers |= {
            Want: producer.want,
            OfferAck: producer.offer_ack,
            Grant: producer.grant,
            Revoke: producer.revoke,
            RowsAck: producer.rows_ack,
            Complete: producer.complete,
            Cancel: producer.cancel,
        }
    return handlers
