"""Every option of the embedding connector has an effect, seen by peers, requests or the host.

A case sets an option and observes the difference. An option without a case fails the walk at the
end. Engines have no model: real workers, sockets and windows (`engines.py`), and, where vLLM's part
reads the option, vLLM's scheduler and the connector itself (`vision_engine.py`).
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq
import zmq.auth

from tests.embeds.engines import PATIENCE_S, Engine, embeddings, wait_for
from tests.embeds.sessions import frame, hello
from tests.embeds.test_allowed_peers import Stranger
from tests.embeds.vision_engine import VisionEngine, encoded
from tests.support.server_process import free_ports
from tests.support.threads import NewThreads
from tests.support.transfer_engine import FakeTransferEngine
from vllm_kvpool.config import EmbedsConfig, Transport
from vllm_kvpool.embeds.availability import EmbedsRequest
from vllm_kvpool.embeds.dataplane.row_bytes import RowCopy
from vllm_kvpool.embeds.dataplane.shared_memory import SharedWriter
from vllm_kvpool.embeds.protocol.messages import MooncakeWindow, PeerRole, SharedWindow
from vllm_kvpool.network.allowed_peers import AllowedPeers
from vllm_kvpool.storage import mooncake_engine

ROW_BYTES = 64 * 4
LARGE_ROWS = 40_000  # 10 MB: more than all writes that a producer's threads share
SHORT_S, LONG_S = 0.1, 3600.0
LATE_S = 2.0  # on a busy machine


@dataclass(frozen=True, slots=True)
class Bench:
    """A factory of engines for the cases."""

    tmp_path: Path
    monkeypatch: pytest.MonkeyPatch

    def whole(self, role: str, **options: Any) -> VisionEngine:
        return VisionEngine(self.tmp_path, role, self.monkeypatch, **options)


Case = Callable[[Bench], None]
CASES: dict[str, Case] = {}


def shows(case: Case) -> Case:
    """Register a case under the name of its option."""
    CASES[case.__name__] = case
    return case


def window_of(engine: Engine) -> object:
    return engine.workers[0]._control._peers.hello.window


@contextlib.contextmanager
def pair(role: PeerRole = PeerRole.CONSUMER, **options: object) -> Iterator[tuple[Engine, Engine]]:
    """A producer and an engine with these options."""
    with Engine(PeerRole.PRODUCER) as producer, Engine(role, **options) as engine:
        yield producer, engine


@shows
def listen(bench: Bench) -> None:
    """A consumer is reached at a port of its own choice instead of vLLM's `ec_port`."""
    port, other = free_ports(2)
    with (
        bench.whole("ec_producer") as producer,
        bench.whole("ec_consumer", port=other, listen=f"tcp://127.0.0.1:{port}") as consumer,
    ):
        consumer.add("use", "image", has_media=False, consumer_zmq="")
        consumer.step()
        producer.add("make", "image", consumer_zmq=f"tcp://127.0.0.1:{port}")
        producer.run()
        consumer.run(producer)
        assert torch.equal(consumer.seen["use"].used["image"], encoded("image"))


@shows
def advertise(bench: Bench) -> None:
    """Peers and the answers of requests are told the advertised host."""
    with bench.whole("ec_producer", listen="tcp://0.0.0.0:7123", advertise="192.0.2.9") as engine:
        assert engine.side._control._peers.hello.endpoints == ("tcp://192.0.2.9:7123",)
        engine.add("make", "image")
        engine.run()
        params = engine.seen["make"].params
        assert params is not None
        assert "tcp://192.0.2.9:7123" in str(params["image"])


@shows
def peers(bench: Bench) -> None:
    """A request that names no encoder takes what a configured one has."""

    def is_found(*known: str) -> bool:
        with Engine(PeerRole.CONSUMER, peers=known, bootstrap_timeout_s=SHORT_S) as consumer:
            wait_for(lambda: len(consumer.workers[0]._control._peers.known) == len(known))
            view = consumer.request("use", ("image", 9), is_sent=False, has_media=True)
            wait_for(lambda: consumer.may_go(view))
            return consumer.scheduler.has("image")

    with Engine(PeerRole.PRODUCER) as producer:
        producer.encode("image", embeddings(9))
        assert is_found(producer.endpoint)
        assert not is_found()


@shows
def allowed_peers(bench: Bench) -> None:
    """An encoder that a request names on another host is connected to only if it is allowed."""
    usual = AllowedPeers.__init__

    def far(self: AllowedPeers, allowed: object = (), peers: object = ()) -> None:
        usual(self, allowed, peers, lambda address: str(address) == "127.0.0.1")  # type: ignore[arg-type]

    bench.monkeypatch.setattr(AllowedPeers, "__init__", far)
    stranger = Stranger()
    endpoint = stranger.endpoint.replace("127.0.0.1", "127.0.0.2")
    stranger.socket.bind(endpoint)

    def is_refused(*allowed: str) -> bool:
        with Engine(PeerRole.CONSUMER, allowed_peers=allowed) as engine:
            view = engine.request("r", ("image", 4), peers=(endpoint,))
            counts = engine.workers[0]._control.counts
            wait_for(
                lambda: (
                    not engine.may_go(view)
                    and bool(stranger.hears(0) or counts["refused_endpoints"])
                )
            )
            return bool(counts["refused_endpoints"])

    assert is_refused()
    assert not is_refused("127.0.0.2/32")
    stranger.close()


@shows
def transport(bench: Bench) -> None:
    for value, kind in ((Transport.LOCAL, SharedWindow), (Transport.MOONCAKE, MooncakeWindow)):
        with Engine(PeerRole.CONSUMER, transport=value) as engine:
            assert isinstance(window_of(engine), kind)


class Told(FakeTransferEngine):
    """Mooncake's engine, which tells what it was started with."""

    def __init__(self) -> None:
        super().__init__()
        self.started: list[tuple[str, str]] = []

    def initialize(self, hostname: str, metadata: str, protocol: str, device: str) -> int:
        self.started.append((protocol, device))
        return 0


def started(bench: Bench, **options: object) -> list[tuple[str, str]]:
    """Return what Mooncake's engine is started with: protocol and device."""
    told = Told()

    class Wheel:
        TransferEngine = staticmethod(lambda: told)

    bench.monkeypatch.setattr(mooncake_engine, "_engine_wheel", lambda: Wheel)
    bench.monkeypatch.setattr(mooncake_engine, "_engines", {})
    Engine(PeerRole.CONSUMER, transport=Transport.MOONCAKE, **options).close()
    return told.started


@shows
def protocol(bench: Bench) -> None:
    assert started(bench, protocol="rdma") == [("rdma", "")]


@shows
def device(bench: Bench) -> None:
    assert started(bench, device="mlx5_1") == [("tcp", "mlx5_1")]


@shows
def arena_bytes(bench: Bench) -> None:
    """A window of three rows needs many rounds for an item."""
    for rows, rounds in ((3, 14), (40, 1)):
        with pair(arena_bytes=rows * ROW_BYTES) as (producer, consumer):
            producer.encode("image", embeddings(40), to=(consumer.endpoint,))
            consumer.receive("image", 40)
            assert (consumer.counts()["rounds"] >= 14) is (rounds == 14)


@shows
def default_allocate_tokens(bench: Bench) -> None:
    with pair(default_allocate_tokens=5) as (producer, consumer):
        producer.encode("image", embeddings(40), to=(consumer.endpoint,))
        consumer.receive("image", 40)
        assert consumer.counts()["rounds"] >= 8


@shows
def max_item_bytes(bench: Bench) -> None:
    def is_taken(rows: int) -> bool:
        name = f"image of {rows}"
        with pair(max_item_bytes=10 * ROW_BYTES) as (producer, consumer):
            producer.encode(name, embeddings(rows), to=(consumer.endpoint,))
            view = consumer.request(name, (name, rows), has_media=True)
            wait_for(lambda: consumer.may_go(view))
            return consumer.scheduler.has(name)

    assert is_taken(10)
    assert not is_taken(11)


@shows
def max_landing_bytes(bench: Bench) -> None:
    """The second item waits until the engine has taken the first."""
    with (
        Engine(PeerRole.PRODUCER) as producer,
        Engine(PeerRole.CONSUMER, max_landing_bytes=12 * ROW_BYTES) as consumer,
    ):
        views = [consumer.request(name, (name, 10)) for name in ("one", "two")]
        for name in ("one", "two"):
            producer.encode(name, embeddings(10), to=(consumer.endpoint,))

        def ready() -> list[EmbedsRequest]:
            return [view for view in views if consumer.may_go(view)]

        wait_for(lambda: bool(ready()))
        (first,) = ready()
        consumer.get(first.request_id)
        consumer.scheduler.finished(first)
        consumer.scheduler.plan((first.request_id,), is_idle=False, idle_wait_s=0.0)
        (second,) = [view for view in views if view is not first]
        wait_for(lambda: consumer.may_go(second))


@shows
def retain_bytes(bench: Bench) -> None:
    """An encoder whose items nobody takes encodes no more."""
    with Engine(PeerRole.PRODUCER, retain_bytes=20 * ROW_BYTES) as producer:
        for number in range(3):
            producer.encode(f"image{number}", embeddings(10, seed=number))
        late = producer.request("late", ("image9", 10))
        wait_for(lambda: not producer.may_go(late))
    with Engine(PeerRole.PRODUCER) as roomy:
        for number in range(3):
            roomy.encode(f"image{number}", embeddings(10, seed=number))
        wait_for(lambda: roomy.gauges()["encoded_items"] == 3)
        assert roomy.may_go(roomy.request("late", ("image9", 10)))


class Gate:
    """Holds writes of a producer's threads, and counts those that wait."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.is_open = threading.Event()
        self.waiting = 0
        self._lock = threading.Lock()
        usual = SharedWriter.write
        gate = self

        def write(
            self: SharedWriter, window: SharedWindow, writes: Sequence[RowCopy]
        ) -> list[tuple[int, ...]]:
            with gate._lock:
                gate.waiting += 1
            assert gate.is_open.wait(20.0)
            return usual(self, window, writes)

        patch.setattr(SharedWriter, "write", write)


@shows
def writer_threads(bench: Bench) -> None:
    """At most so many large writes run at a time, each in a thread of its own."""
    for count in (1, 3):
        hold_large_writes(bench, count)


def hold_large_writes(bench: Bench, count: int) -> None:
    threads = NewThreads()
    with bench.monkeypatch.context() as patch, contextlib.ExitStack() as engines:
        gate = Gate(patch)
        enter = engines.enter_context
        producer = enter(Engine(PeerRole.PRODUCER, writer_threads=count))
        consumers = [
            enter(Engine(PeerRole.CONSUMER, default_allocate_tokens=LARGE_ROWS)) for _ in range(4)
        ]
        assert len(threads.alive("kvpool-ec-write")) == count
        endpoints = tuple(consumer.endpoint for consumer in consumers)
        producer.encode("film", embeddings(LARGE_ROWS), to=endpoints)
        views = [consumer.request("use", ("film", LARGE_ROWS)) for consumer in consumers]
        machine = producer.workers[0]._producer
        assert machine is not None

        def are_held() -> bool:
            steps = [each.may_go(view) for each, view in zip(consumers, views, strict=True)]
            return gate.waiting >= count and len(machine.transfers) == len(steps)

        wait_for(are_held)
        assert machine.num_writes == gate.waiting == count
        gate.is_open.set()
        wait_for(lambda: consumers[0].may_go(views[0]))


@shows
def queue_shards(bench: Bench) -> None:
    """So many threads copy rows out of the window."""
    threads = NewThreads()
    for count in (1, 3):
        with Engine(PeerRole.CONSUMER, queue_shards=count):
            assert len(threads.alive("kvpool-ec-drain")) == count


def silent_peer_is_lost(**options: Any) -> bool:
    """Return True if an engine gives up an encoder that greets it and says nothing more.

    Another engine, whose limits are the shortest, has given up its own by then.
    """
    quick = {"heartbeat_s": SHORT_S, "heartbeat_max_failures": 1}
    greeting = hello("silent", role=PeerRole.PRODUCER, heartbeat_s=SHORT_S / 4)

    def knows(engine: Engine) -> bool:
        return "silent" in engine.workers[0]._control._peers.known

    with contextlib.ExitStack() as stack:
        context = stack.enter_context(zmq.Context())
        engine, other = (
            stack.enter_context(Engine(PeerRole.CONSUMER, **each)) for each in (options, quick)
        )
        for each in (engine, other):
            socket = stack.enter_context(context.socket(zmq.DEALER))
            socket.set(zmq.LINGER, 0)
            socket.connect(each.endpoint)
            socket.send(frame("silent", greeting))
            assert socket.poll(1000 * PATIENCE_S)  # it is known: the engine greets it, too
        wait_for(lambda: not knows(other))
        with contextlib.suppress(AssertionError):
            wait_for(lambda: not knows(engine), patience_s=LATE_S)
        return not knows(engine)


@shows
def heartbeat_s(bench: Bench) -> None:
    assert silent_peer_is_lost(heartbeat_s=SHORT_S / 4, heartbeat_max_failures=1)
    assert not silent_peer_is_lost(heartbeat_s=LONG_S, heartbeat_max_failures=1)


@shows
def heartbeat_max_failures(bench: Bench) -> None:
    assert not silent_peer_is_lost(heartbeat_s=SHORT_S, heartbeat_max_failures=1000)


@shows
def bootstrap_timeout_s(bench: Bench) -> None:
    """A request whose item no encoder offers is encoded here, after a while."""
    with (
        Engine(PeerRole.PRODUCER) as producer,
        Engine(PeerRole.CONSUMER, bootstrap_timeout_s=LONG_S) as patient,
        Engine(PeerRole.CONSUMER, bootstrap_timeout_s=SHORT_S) as hasty,
    ):
        views = []
        for engine in (patient, hasty):
            view = engine.request("r", ("image", 4), peers=(producer.endpoint,), has_media=True)
            engine.awaits(view)
            views.append(view)
        wait_for(lambda: hasty.may_go(views[1]))
        assert not patient.may_go(views[0])


@shows
def waiting_timeout_s(bench: Bench) -> None:
    """An encoder lets go of what nobody has taken."""
    with (
        Engine(PeerRole.PRODUCER, waiting_timeout_s=LONG_S) as patient,
        Engine(PeerRole.PRODUCER, waiting_timeout_s=SHORT_S) as hasty,
    ):
        for engine in (patient, hasty):
            engine.encode("image", embeddings(4))
        wait_for(lambda: hasty.counts().get("never_taken") == 1)
        assert patient.gauges()["encoded_items"] == 1


def told_apart(bench: Bench, one: dict[str, str], other: dict[str, str]) -> bool:
    """Return whether engines with these options refuse each other's embeddings."""
    with bench.whole("ec_producer", **one) as first, bench.whole("ec_consumer", **other) as second:
        sides = [each.side._control._peers.hello.fingerprint for each in (first, second)]
        return sides[0] != sides[1]


@shows
def weights_id(bench: Bench) -> None:
    assert told_apart(bench, {"weights_id": "v1"}, {"weights_id": "v2"})
    assert not told_apart(bench, {"weights_id": "v1"}, {"weights_id": "v1"})


@shows
def namespace(bench: Bench) -> None:
    assert told_apart(bench, {"namespace": "a"}, {"namespace": "b"})


@shows
def curve_dir(bench: Bench) -> None:
    """An encoder without the cluster's key is not heard."""
    keys = bench.tmp_path / "keys"
    keys.mkdir()
    zmq.auth.create_certificates(keys, "cluster")
    (keys / "cluster.key_secret").chmod(0o600)
    with (
        Engine(PeerRole.PRODUCER) as plain,
        Engine(PeerRole.PRODUCER, curve_dir=str(keys)) as member,
        Engine(PeerRole.CONSUMER, curve_dir=str(keys)) as consumer,
    ):
        for producer in (plain, member):
            producer.encode("image", embeddings(4), to=(consumer.endpoint,))
        consumer.receive("image", 4)
        known = consumer.workers[0]._control._peers.known
        assert known.keys() == {member.workers[0]._control._peers.hello.incarnation}


@shows
def stats_file(bench: Bench) -> None:
    bench.whole("ec_consumer", stats_file=str(bench.tmp_path / "stats")).close()
    found = {path.name for path in bench.tmp_path.glob("stats*")}
    assert found == {"stats.ec.scheduler.0", "stats.ec.worker.0"}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_option_has_an_effect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    case(Bench(tmp_path, monkeypatch))


def test_every_option_has_a_case() -> None:
    assert list(CASES) == [field.name for field in fields(EmbedsConfig)]
