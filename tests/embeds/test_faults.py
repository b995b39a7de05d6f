"""Processes that are killed, stopped or cut off from each other, and strangers at the port."""

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import zmq
import zmq.auth

from tests.embeds.engine_child import HEARTBEAT_S, Order, digest_of, forks, serve, slow_writes
from tests.embeds.engines import Engine, embeddings, wait_for
from tests.embeds.sessions import frame
from tests.support.relay import Relay
from tests.support.server_process import free_ports
from vllm_kvpool.embeds.availability import EmbedsRequest
from vllm_kvpool.embeds.dataplane.shared_memory import DIRECTORY, PREFIX
from vllm_kvpool.embeds.protocol.messages import (
    MAX_FRAME_BYTES,
    Forget,
    Goodbye,
    Grant,
    Offer,
    PeerRole,
)
from vllm_kvpool.embeds.protocol.rows import Extent, ItemShape

ROW_BYTES = 64 * 4
WINDOW_BYTES = 16 * ROW_BYTES
ROWS = 2_000  # hundreds of rounds, each of which waits for its write
LONG = 3 * ROWS
PATIENCE_S = 60.0

pytestmark = pytest.mark.usefixtures("slow_network")


@pytest.fixture
def slow_network(monkeypatch: pytest.MonkeyPatch) -> None:
    slow_writes(monkeypatch)


class Child:
    """An engine in a process of its own."""

    def __init__(self, role: PeerRole, port: int | None = None) -> None:
        self.port = port or free_ports(1)[0]
        self.endpoint = f"tcp://127.0.0.1:{self.port}"
        self.orders, theirs = forks.Pipe()
        self.process = forks.Process(
            target=serve, args=(role, self.port, WINDOW_BYTES, theirs), daemon=True
        )
        self.process.start()
        theirs.close()
        assert self.orders.recv() == "ready"

    def ask(self, verb: str, mm_hash: str, rows: int, peer: str = "") -> str:
        self.orders.send(Order(verb, mm_hash, rows, peer))
        answer: str = self.orders.recv()
        return answer

    def signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.process.kill()
        self.process.join(PATIENCE_S)
        self.orders.close()

    def windows(self) -> list[Path]:
        return list(DIRECTORY.glob(f"{PREFIX}{self.process.pid}-*"))


@pytest.fixture
def children() -> Iterator[list[Child]]:
    """Kill the processes that a test has added to this list."""
    started: list[Child] = []
    yield started
    for child in started:
        child.kill()


def consumer(**options: object) -> Engine:
    usual = {"arena_bytes": WINDOW_BYTES, "heartbeat_s": HEARTBEAT_S}
    return Engine(PeerRole.CONSUMER, **{**usual, **options})


def rows_here(engine: Engine) -> float:
    return engine.counts().get("rows", 0)


def assert_nothing_is_lent(engine: Engine) -> None:
    wait_for(
        lambda: engine.gauges()["granted_bytes"] == engine.gauges()["landing_bytes"] == 0,
        lambda: str(engine.gauges()),
    )


def begin(engine: Engine, mm_hash: str, producer: str, rows: int = ROWS) -> EmbedsRequest:
    """A request waits for an item, some rows of which are here when this returns."""
    view = engine.request(mm_hash, (mm_hash, rows), peers=(producer,))
    engine.awaits(view)
    until_transferring(engine, mm_hash)
    at = rows_here(engine)
    wait_for(lambda: rows_here(engine) > at + 100)
    return view


def finish(engine: Engine, view: EmbedsRequest, seed: int = 0) -> None:
    """The item comes, with every byte where it belongs."""
    name = view.request_id
    wait_for(
        lambda: engine.may_go(view),
        lambda: engine.describe(name),
        patience_s=PATIENCE_S,
    )
    (got,) = engine.get(name)
    assert torch.equal(got, embeddings(view.features[0].rows, seed=seed))


def until_transferring(engine: Engine, name: str) -> None:
    """Until it has a part of the window, for which others wait as well."""
    wait_for(lambda: "transferring" in engine.describe(name), lambda: engine.describe(name))


def noted(engine: Engine, event: str) -> float:
    """Return the control thread's count of an event, without adding a key to its table."""
    return engine.workers[0]._control.counts.get(event, 0)


def losses(engine: Engine) -> float:
    return noted(engine, "lost_peers")


def test_a_producer_is_killed_in_a_transfer(children: list[Child]) -> None:
    """Other transfers continue, a restarted producer delivers the item, and the window is freed."""
    children.append(Child(PeerRole.PRODUCER))
    first = children[0]
    with consumer() as engine, Engine(PeerRole.PRODUCER) as other:
        first.ask("encode", "film", LONG)
        other.encode("other", embeddings(ROWS, seed=1))
        view = begin(engine, "film", first.endpoint, LONG)
        others = begin(engine, "other", other.endpoint)
        until_transferring(engine, "film")
        first.kill()
        finish(engine, others, seed=1)
        wait_for(lambda: losses(engine) == 1)
        assert "suspended" in engine.describe("film")
        assert not engine.may_go(view)
        assert 0 < engine.gauges()["quarantined_bytes"] < WINDOW_BYTES
        children.append(Child(PeerRole.PRODUCER, first.port))
        children[1].ask("encode", "film", LONG)
        finish(engine, view)
        assert engine.counts()["resumed_rows"] > 0
        assert engine.counts()["rows"] == LONG + ROWS, "a row was brought twice"
        assert_nothing_is_lent(engine)


def test_a_consumer_is_killed_in_a_transfer(children: list[Child]) -> None:
    """The next process asks again; the killed one's memory is gone with its start."""
    with Engine(PeerRole.PRODUCER, heartbeat_s=HEARTBEAT_S, waiting_timeout_s=4.0) as producer:
        children.append(Child(PeerRole.CONSUMER))
        producer.encode("film", embeddings(ROWS))  # kept for seconds, and a start may take them
        first = children[0]
        (window,) = first.windows()
        first.ask("begin", "film", ROWS, peer=producer.endpoint)
        wait_for(lambda: producer.counts().get("written_rows", 0) > 100)
        first.kill()
        assert producer.counts()["written_rows"] < ROWS
        assert window.exists()
        children.append(Child(PeerRole.CONSUMER, first.port))
        assert not window.exists(), "a killed process's window stays"
        producer.encode("film", embeddings(ROWS))  # where the start has taken longer than that
        digest = children[1].ask("receive", "film", ROWS, peer=producer.endpoint)
        assert digest == digest_of(embeddings(ROWS))
        wait_for(lambda: producer.gauges()["transfers"] == producer.gauges()["writes"] == 0)
        wait_for(lambda: producer.gauges()["held_bytes"] == 0)


def test_a_producer_that_was_stopped_for_long_writes_over_nothing(children: list[Child]) -> None:
    """The window it was granted stays in quarantine until it returns and reports no open write."""
    children.append(Child(PeerRole.PRODUCER))
    stopped = children[0]
    with consumer() as engine, Engine(PeerRole.PRODUCER) as other:
        stopped.ask("encode", "film", LONG)
        view = begin(engine, "film", stopped.endpoint, LONG)
        for number in (1, 2):
            other.encode(f"other{number}", embeddings(ROWS, seed=number))
            others = begin(engine, f"other{number}", other.endpoint)
            before = losses(engine)
            until_transferring(engine, "film")
            stopped.signal(signal.SIGSTOP)
            wait_for(lambda before=before: losses(engine) > before)  # type: ignore[misc]
            assert engine.gauges()["quarantined_bytes"] > 0
            finish(engine, others, seed=number)
            stopped.signal(signal.SIGCONT)
        finish(engine, view)
        assert engine.counts()["resumed_rows"] > 0
        assert_nothing_is_lent(engine)
        wait_for(lambda: engine.gauges()["quarantined_bytes"] == 0, lambda: str(engine.gauges()))


@pytest.mark.parametrize("outage_s", [0.0, 4 * HEARTBEAT_S], ids=["shorter", "longer"])
def test_a_link_is_cut_in_a_transfer_and_comes_back(outage_s: float) -> None:
    """Shorter than anybody notices, or so long that each loses the other."""
    with (
        Engine(PeerRole.PRODUCER, heartbeat_s=HEARTBEAT_S) as producer,
        Relay(producer.ports[0]) as relay,
        consumer() as engine,
    ):
        producer.encode("film", embeddings(ROWS))
        view = begin(engine, "film", relay.endpoint)
        relay.cut()
        if outage_s:
            wait_for(lambda: losses(engine) == losses(producer) == 1)
            assert engine.gauges()["quarantined_bytes"] == WINDOW_BYTES
        cut_at = rows_here(engine)
        assert cut_at < ROWS, "it was too fast to be cut in the middle"
        relay.restore()
        finish(engine, view)
        assert engine.counts()["rows"] == ROWS, "a row was brought twice"
        assert producer.counts()["written_rows"] < ROWS * 1.2
        if outage_s:
            assert engine.counts()["resumed_rows"] >= cut_at
            # The producer has come back and said that it writes nothing of what it was lent.
            wait_for(lambda: engine.gauges()["quarantined_bytes"] == 0)


# Keys


def keys_in(directory: Path) -> str:
    directory.mkdir()
    zmq.auth.create_certificates(directory, "cluster")
    (directory / "cluster.key_secret").chmod(0o600)
    return str(directory)


def pair_with_keys(producers: str, consumers: str) -> tuple[Engine, Engine]:
    options = {"heartbeat_s": HEARTBEAT_S, "bootstrap_timeout_s": 1.5}
    return (
        Engine(PeerRole.PRODUCER, curve_dir=producers, **options),
        Engine(PeerRole.CONSUMER, curve_dir=consumers, **options),
    )


def test_with_the_clusters_key_items_pass(tmp_path: Path) -> None:
    keys = keys_in(tmp_path / "keys")
    producer, engine = pair_with_keys(keys, keys)
    with producer, engine:
        producer.encode("image", embeddings(40), to=(engine.endpoint,))
        (got,) = engine.receive("image", 40)
        assert torch.equal(got, embeddings(40))


@pytest.mark.parametrize(("ours", "theirs"), [(True, True), (True, False), (False, True)])
def test_with_another_key_or_none_nothing_passes(tmp_path: Path, ours: bool, theirs: bool) -> None:
    producer, engine = pair_with_keys(
        keys_in(tmp_path / "ours") if ours else "", keys_in(tmp_path / "theirs") if theirs else ""
    )
    with producer, engine:
        producer.encode("image", embeddings(40), to=(engine.endpoint,))
        view = engine.request("r", ("image", 40), peers=(producer.endpoint,), has_media=True)
        wait_for(lambda: engine.may_go(view))
        assert not engine.scheduler.has("image")
        for side in (producer, engine):
            assert not side.workers[0]._control._peers.known


# Strangers


def test_strangers_at_the_port_disturb_nothing() -> None:
    with Engine(PeerRole.PRODUCER) as producer, consumer() as engine:
        control = engine.workers[0]._control
        producer.encode("film", embeddings(ROWS))
        view = begin(engine, "film", producer.endpoint)
        raw = [socket.create_connection(("127.0.0.1", engine.ports[0])) for _ in range(8)]
        for number, each in enumerate(raw):
            each.sendall(os.urandom(1000) if number % 2 else b"GET / HTTP/1.1\r\n\r\n")
        context = zmq.Context()
        stranger = context.socket(zmq.DEALER)
        stranger.set(zmq.LINGER, 0)
        stranger.connect(engine.endpoint)
        offer = Offer(1, "film", ItemShape(ROWS, "float32", (16,)), "x")
        impossible = Offer(1, "film", ItemShape(1 << 50, "float32", ()), "x")
        grant = Grant(1, 1, 0, 1, (Extent(0, 1 << 40),))
        own = producer.workers[0]._control._peers.hello.incarnation
        foreign = [
            frame(source, body, target=target)
            for source in ("stranger", own)
            for target in ("", "nobody", control._peers.hello.incarnation)
            for body in (offer, grant, Goodbye(), Forget("film"))
        ]
        bad = (b"", b"\0" * 100, os.urandom(100), b"\x91" * 1000, frame(own, impossible))
        for data in (*bad, *foreign):
            stranger.send(data)
        stranger.send_multipart([b"two", b"parts"])
        wait_for(lambda: noted(engine, "strays") >= len(foreign), lambda: str(dict(control.counts)))
        assert noted(engine, "bad_messages") >= len(bad)
        stranger.send(b"\0" * (MAX_FRAME_BYTES + 1))
        finish(engine, view)
        assert noted(engine, "internal_errors") == losses(engine) == 0
        assert engine.workers[0]._thread.is_alive()
        for each in raw:
            each.close()
        stranger.close()
        context.term()
