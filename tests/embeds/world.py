"""Both machines in one world: real bytes, a network that loses, doubles and reorders, a clock.

Nothing runs by itself. `step` lets one thing happen, chosen by a random generator: a message
arrives, a write or a drain ends, time passes, a link is cut, a process dies. `settle` lets all that
is under way come to its end, with nothing lost any more.
"""

import hashlib
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.embeds.invariants import check_consumer, check_producer, describe
from vllm_kvpool.embeds.control import handlers_of
from vllm_kvpool.embeds.machines.consumer import Consumer
from vllm_kvpool.embeds.machines.effects import (
    Allocate,
    Connect,
    Discard,
    DrainRows,
    Effect,
    NotifyScheduler,
    Prepare,
    Ready,
    Release,
    Send,
    Write,
)
from vllm_kvpool.embeds.machines.items import ConsumerLimits
from vllm_kvpool.embeds.machines.producer import Producer, ProducerLimits
from vllm_kvpool.embeds.protocol import messages as p
from vllm_kvpool.embeds.protocol.rows import ItemShape, RowRun

SETTLE_STEPS = 50_000
QUARANTINE_S = 120.0  # longer than anybody's patience, though windows are in it as a whole


def limits(**options: Any) -> ConsumerLimits:
    """Bounds of a small consumer."""
    return ConsumerLimits(**{"quarantine_s": QUARANTINE_S, **options})


def shape_of(rows: int, row_bytes: int = 4) -> ItemShape:
    """An item of so many rows."""
    return ItemShape(rows, "uint8", (row_bytes,))


def content(mm_hash: str, shape: ItemShape, salt: str = "") -> bytes:
    """Return the bytes of an item; no two rows are equal."""
    rows = (f"{mm_hash}{salt}{row}".encode() for row in range(shape.rows))
    return b"".join(hashlib.shake_128(row).digest(shape.row_bytes) for row in rows)


def span_of(shape: ItemShape, run: RowRun) -> slice:
    """Return the byte range of a run's rows in its item."""
    return slice(run.row * shape.row_bytes, (run.row + run.rows) * shape.row_bytes)


def digest(data: bytes | bytearray, shape: ItemShape, run: RowRun, gid: int) -> int:
    """Return the digest of a run's rows in an item's bytes."""
    hasher = hashlib.blake2b(str(gid).encode(), digest_size=8)
    hasher.update(data[span_of(shape, run)])
    return int.from_bytes(hasher.digest(), "little")


@dataclass
class ConsumerNode:
    """A consumer with its window and its tensors."""

    name: str
    arena_bytes: int
    machine: Consumer
    window: bytearray
    tensors: dict[str, list[bytearray]] = field(default_factory=dict)
    shapes: dict[str, ItemShape] = field(default_factory=dict)
    drains: list[tuple[DrainRows, list[bytearray], ItemShape]] = field(default_factory=list)
    ready: set[str] = field(default_factory=set)
    told: list[p.ItemNews] = field(default_factory=list)
    most_bytes: int = 0


@dataclass
class ProducerNode:
    """A producer with its sources."""

    name: str
    machine: Producer
    sources: dict[int, tuple[ItemShape, list[bytes], str]] = field(default_factory=dict)
    preparing: deque[int] = field(default_factory=deque)
    writes: list[tuple[Write, int]] = field(default_factory=list)  # and attempts


class World:
    """See the module docstring."""

    def __init__(
        self,
        seed: int,
        *,
        producers: int = 1,
        consumers: int = 1,
        arena_bytes: int = 12,
        bounds: ConsumerLimits | None = None,
        sender_limits: ProducerLimits | None = None,
        are_connected: bool = True,
    ) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.limits = bounds or limits(default_allocate_tokens=3)
        self.sender_limits = sender_limits or ProducerLimits(writers=2, small_bytes=8)
        self._arena_bytes = arena_bytes
        self._lives = 0
        self.consumers = [self._consumer(f"c{each}") for each in range(consumers)]
        self.producers = [self._producer(f"p{each}") for each in range(producers)]
        self.links: dict[tuple[str, str], deque[p.Message]] = {}
        self.up: set[tuple[str, str]] = set()  # consumer's and producer's incarnation
        self.late: list[tuple[bytearray, int, bytes]] = []  # what timed-out writes still bring
        self.salt: dict[str, str] = {}
        if are_connected:
            self.connect_all()

    def _consumer(self, name: str) -> ConsumerNode:
        self._lives += 1
        machine = Consumer(self._arena_bytes, self.limits)
        window = bytearray(self._arena_bytes)
        return ConsumerNode(f"{name}.{self._lives}", self._arena_bytes, machine, window)

    def _producer(self, name: str) -> ProducerNode:
        self._lives += 1
        return ProducerNode(f"{name}.{self._lives}", Producer(self.sender_limits))

    # What happens from outside

    def connect(self, consumer: ConsumerNode, producer: ProducerNode) -> None:
        """A session comes up."""
        key = (consumer.name, producer.name)
        if key in self.up:
            return
        self.up.add(key)
        self.links[key] = deque()
        self.links[key[::-1]] = deque()
        window = p.SharedWindow("host", consumer.name, consumer.arena_bytes)
        consumer_at = consumer.name.split(".")[0]
        producer_at = producer.name.split(".")[0]
        producer.machine.peer_up(
            consumer.name, window, frozenset((consumer_at,)), (consumer_at,), self.now
        )
        consumer.machine.peer_up(producer.name, frozenset((producer_at,)), self.now)
        self.perform()

    def connect_all(self) -> None:
        """Every consumer and every producer."""
        for consumer in self.consumers:
            for producer in self.producers:
                self.connect(consumer, producer)

    def cut(self, key: tuple[str, str], *, quiesced: bool = False) -> None:
        """A session is lost, with all that is on its way."""
        self.up.discard(key)
        self.links.pop(key, None)
        self.links.pop(key[::-1], None)
        for consumer in self.consumers:
            if consumer.name == key[0]:
                consumer.machine.peer_lost(key[1], self.now, quiesced=quiesced)
        for producer in self.producers:
            if producer.name == key[1]:
                producer.machine.peer_lost(key[0], self.now)
        self.perform()

    def restart_producer(self, number: int) -> None:
        """Its process is killed, what it wrote last may still land; another one starts."""
        old = self.producers[number]
        for write, _ in old.writes:
            self._strand(old, write)
        for key in [key for key in self.up if key[1] == old.name]:
            self.cut(key)
        self.producers[number] = self._producer(old.name.split(".")[0])

    def restart_consumer(self, number: int) -> None:
        """Its process is killed with all it had; another one starts."""
        old = self.consumers[number]
        for key in [key for key in self.up if key[0] == old.name]:
            self.cut(key)
        self.consumers[number] = self._consumer(old.name.split(".")[0])

    def produce(self, producer: ProducerNode, mm_hash: str, shape: ItemShape) -> None:
        """An item has been encoded."""
        item_id = producer.machine.produced(mm_hash, shape, self.now)
        if item_id:
            salt = self.salt.get(producer.name, "")
            data = content(mm_hash, shape, salt)
            name = hashlib.blake2b(data, digest_size=8).hexdigest()
            producer.sources[item_id] = (shape, data, name)
        self.perform()

    def push(self, producer: ProducerNode, mm_hash: str, *consumers: str) -> None:
        """A request names the consumers."""
        producer.machine.push(p.Push(mm_hash, consumers), self.now)
        self.perform()

    def expect(self, consumer: ConsumerNode, mm_hash: str, order: int = 0, rows: int = 0) -> None:
        """A request starts to wait for the item."""
        consumer.machine.expect(p.Expect(mm_hash, order, rows=rows), self.now)
        self.perform()

    def forget(self, consumer: ConsumerNode, mm_hash: str) -> None:
        """Tell the consumer that no request waits for the item any more."""
        consumer.machine.forget(mm_hash)
        self.perform()

    def change_weights(self, node: ConsumerNode | ProducerNode) -> None:
        """Change a node's weights: its items belong to the former weights."""
        node.machine.weights_changed(self.now)
        self.perform()

    def pass_time(self, seconds: float) -> None:
        """The clock goes on and everybody looks at it."""
        self.now += seconds
        for consumer in self.consumers:
            consumer.machine.tick(self.now)
        for producer in self.producers:
            producer.machine.tick(self.now)
        self.perform()

    # What the machines want done

    def perform(self) -> None:
        """Take all effects and check both machines."""
        for consumer in self.consumers:
            for effect in consumer.machine.take_effects(self.now):
                self._perform_consumers(consumer, effect)
            check_consumer(consumer.machine)
            taken = consumer.machine.gauges()["landing_bytes"]
            consumer.most_bytes = max(consumer.most_bytes, int(taken))
        for producer in self.producers:
            for effect in producer.machine.take_effects(self.now):
                self._perform_producers(producer, effect)
            check_producer(producer.machine)

    def _send(self, source: str, effect: Send) -> None:
        key = (source, effect.peer)
        # All that is said must survive the wire.
        frame = p.encode(p.Envelope(source, effect.peer, (p.encode_body(effect.body),)))
        if key in self.links:
            self.links[key].append(p.decode_body(p.decode(frame).bodies[0]))

    def _perform_consumers(self, node: ConsumerNode, effect: Effect) -> None:
        match effect:
            case Send():
                self._send(node.name, effect)
            case Allocate(mm_hash, shape):
                assert mm_hash not in node.tensors, "allocated twice"
                node.tensors[mm_hash] = bytearray(b"\xee" * shape.nbytes)
                node.shapes[mm_hash] = shape
            case DrainRows(_, mm_hash):
                node.drains.append((effect, node.tensors[mm_hash], node.shapes[mm_hash]))
            case Ready(mm_hash):
                node.ready.add(mm_hash)
            case Discard(mm_hash):
                del node.tensors[mm_hash]
                node.ready.discard(mm_hash)
            case NotifyScheduler(news):
                if isinstance(news, p.ItemNews):
                    node.told.append(news)
            case Connect():
                pass
            case _:
                raise AssertionError(effect)

    def _perform_producers(self, node: ProducerNode, effect: Effect) -> None:
        match effect:
            case Send():
                self._send(node.name, effect)
            case Prepare(item_id):
                node.preparing.append(item_id)
            case Write():
                assert effect.item_id in node.sources, "a released source is written"
                node.writes.append((effect, 0))
            case Release(item_id):
                del node.sources[item_id]
                assert all(write.item_id != item_id for write, _ in node.writes)
            case Connect():
                pass
            case _:
                raise AssertionError(effect)

    # What happens inside

    def deliver(self, key: tuple[str, str]) -> None:
        """The next message of a link arrives."""
        body = self.links[key].popleft()
        self.receive(key, body)

    def receive(self, key: tuple[str, str], body: p.Message) -> None:
        """A message arrives."""
        source, target = key
        for consumer in self.consumers:
            if consumer.name == target:
                handlers_of(consumer.machine, None)[type(body)](source, body, self.now)
        for producer in self.producers:
            if producer.name == target:
                handlers_of(None, producer.machine)[type(body)](source, body, self.now)
        self.perform()

    def prepare(self, node: ProducerNode) -> None:
        """A source is in host memory."""
        item_id = node.preparing.popleft()
        node.machine.prepared(item_id, node.sources[item_id][2], self.now)
        self.perform()

    def end_write(self, node: ProducerNode, at: int, how: str = "ok") -> None:
        """A write ends: `ok`, `failed`, `unsure` (it lands later), `damaged`."""
        write, _ = node.writes.pop(at)
        shape, data, _ = node.sources[write.item_id]
        result: p.Wrote | p.WriteFailed
        if how in ("ok", "damaged"):
            self._land(node, write, damage=how == "damaged")
            digests = tuple(digest(data, shape, run, write.gid) for run in write.runs)
            rows = sum(run.rows for run in write.runs)
            result = p.Wrote(write.tid, write.gid, write.runs[0].row, rows, digests)
        else:
            if how == "unsure":
                self._strand(node, write)
            result = p.WriteFailed(write.tid, write.gid, how == "failed", how)
        node.machine.written(result, self.now)
        self.perform()

    def _window_of(self, write: Write) -> bytearray | None:
        assert isinstance(write.window, p.SharedWindow)
        for consumer in self.consumers:
            if consumer.name == write.window.path:
                return consumer.window
        return None

    def _pieces(self, node: ProducerNode, write: Write) -> list[tuple[int, bytes]]:
        shape, data, _ = node.sources[write.item_id]
        return [(run.offset, data[span_of(shape, run)]) for run in write.runs]

    def _land(self, node: ProducerNode, write: Write, *, damage: bool = False) -> None:
        window = self._window_of(write)
        for offset, data in self._pieces(node, write) if window is not None else ():
            assert window is not None
            window[offset : offset + len(data)] = data
        if damage and window is not None:
            window[write.runs[-1].offset] ^= 0x40

    def _strand(self, node: ProducerNode, write: Write) -> None:
        """A write that nobody knows the end of: it lands within the quarantine."""
        window = self._window_of(write)
        if window is not None:
            self.late.extend((window, offset, data) for offset, data in self._pieces(node, write))

    def land_late(self) -> None:
        """Deliver every stranded write."""
        for window, offset, data in self.late:
            window[offset : offset + len(data)] = data
        self.late.clear()

    def drain(self, node: ConsumerNode, at: int = 0) -> None:
        """A drain is performed: copied first, then compared. Threads take them in any order."""
        effect, data, shape = node.drains.pop(at)
        for run in effect.runs:
            end = run.offset + run.rows * shape.row_bytes
            data[span_of(shape, run)] = node.window[run.offset : end]
        same = effect.digests == tuple(digest(data, shape, run, effect.gid) for run in effect.runs)
        node.machine.drained(effect.gid, same, self.now)
        self.perform()

    # Chance

    def choices(self) -> list[Callable[[], None]]:
        """Everything that can happen next without anything going wrong."""
        result: list[Callable[[], None]] = []
        for key, queue in self.links.items():
            if queue:
                result.append(lambda key=key: self.deliver(key))  # type: ignore[misc]
        for producer in self.producers:
            if producer.preparing:
                result.append(lambda node=producer: self.prepare(node))  # type: ignore[misc]
            for at in range(len(producer.writes)):
                result.append(  # noqa: PERF401
                    lambda node=producer, at=at: self.end_write(node, at)  # type: ignore[misc]
                )
        for consumer in self.consumers:
            for at in range(len(consumer.drains)):
                result.append(  # noqa: PERF401
                    lambda node=consumer, at=at: self.drain(node, at)  # type: ignore[misc]
                )
        return result

    def mishap(self) -> None:
        """Perform one random fault."""
        rng = self.random
        queues = [key for key, queue in self.links.items() if queue]
        writers = [node for node in self.producers if node.writes]
        kind = rng.choice(("lose", "double", "swap", "write", "cut", "late", "time", "time"))
        if kind in ("lose", "double", "swap") and queues:
            queue = self.links[rng.choice(queues)]
            if kind == "lose":
                queue.popleft()
            elif kind == "double":
                queue.append(queue[0])
            else:
                queue.rotate(1)
        elif kind == "write" and writers:
            node = rng.choice(writers)
            how = rng.choice(("failed", "unsure", "damaged"))
            self.end_write(node, rng.randrange(len(node.writes)), how)
        elif kind == "cut" and self.up:
            self.cut(rng.choice(sorted(self.up)))
        elif kind == "late":
            self.land_late()
        else:
            self.pass_time(rng.choice((0.1, 1.5, 10.0)))

    def step(self, mishaps: float = 0.0) -> None:
        """Perform one random step, or a fault with probability `mishaps`."""
        choices = self.choices()
        if self.random.random() < mishaps or not choices:
            self.mishap()
        else:
            self.random.choice(choices)()
        if self.random.random() < 0.1:
            self.connect_all()

    def settle(self) -> None:
        """Run without faults until nothing is in progress."""
        self.land_late()
        self.connect_all()
        idle = 0
        for _ in range(SETTLE_STEPS):
            choices = self.choices()
            if choices:
                self.random.choice(choices)()
                idle = 0
            elif idle > 100:
                return
            else:
                idle += 1
                self.connect_all()
                self.pass_time(1.5)
        raise AssertionError("it does not come to an end")

    # What is to be true

    def assert_item(self, consumer: ConsumerNode, mm_hash: str, salt: str = "") -> None:
        """An item is there, with every byte where it belongs."""
        assert mm_hash in consumer.ready, describe(consumer.machine, mm_hash)
        shape = consumer.shapes[mm_hash]
        assert consumer.tensors[mm_hash] == content(mm_hash, shape, salt)

    def assert_no_wrong_bytes(self) -> None:
        """Assert that every item reported as ready holds the right bytes."""
        salts = {"", *self.salt.values()}
        for consumer in self.consumers:
            for mm_hash in consumer.ready:
                shape = consumer.shapes[mm_hash]
                assert any(
                    consumer.tensors[mm_hash] == content(mm_hash, shape, salt) for salt in salts
                ), f"{mm_hash}: wrong bytes"
