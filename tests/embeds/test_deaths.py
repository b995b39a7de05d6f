"""Threads that die, and bugs in each message kind and phase: requests go on within the stated time.

Real sockets, threads and windows. A fault raises from its n-th call on, on whichever thread calls:
a bug (RuntimeError), or what ends a thread (SystemExit).
"""

import random
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.embeds.engines import Engine, embeddings, wait_for
from tests.support.threads import NewThreads
from vllm_kvpool.embeds import faults
from vllm_kvpool.embeds.control import Control
from vllm_kvpool.embeds.dataplane import io_workers
from vllm_kvpool.embeds.dataplane.io_workers import IoWorkers
from vllm_kvpool.embeds.dataplane.shared_memory import SharedWriter
from vllm_kvpool.embeds.faults import CONTROL, DRAINER, PREPARER, RESOLVER, WRITER
from vllm_kvpool.embeds.machines.consumer import Consumer
from vllm_kvpool.embeds.machines.producer import Producer
from vllm_kvpool.embeds.peers import Peers
from vllm_kvpool.embeds.protocol.messages import PeerRole
from vllm_kvpool.embeds.scheduler import FIRST_WEIGHTS
from vllm_kvpool.network import allowed_peers, work_thread
from vllm_kvpool.network.transport_zmq import ZmqTransport

ROWS = 40
OPTIONS = {
    "arena_bytes": 16 * 64 * 4,
    "heartbeat_s": 0.15,
    "bootstrap_timeout_s": 0.5,
    "waiting_timeout_s": 0.75,
}
PATIENCE_S = 30.0  # of a busy machine; what is waited for ends within a second
MESSAGES: list[tuple[type, str]] = [
    *((Consumer, name) for name in ("expect", "forget", "offer", "want_ack", "wrote", "drained")),
    *((Consumer, name) for name in ("taken", "peer_up", "peer_lost", "tick", "take_effects")),
    *((Producer, name) for name in ("want", "push", "offer_ack", "grant", "complete")),
    *((Producer, name) for name in ("prepared", "written", "peer_up", "tick", "take_effects")),
]
PHASES: list[tuple[Any, str]] = [
    *(
        (Control, name)
        for name in ("_tick", "_perform", "_refresh_missing", "_receive", "_report_metrics")
    ),
    *(
        (Peers, name)
        for name in ("on_message", "send_to", "notify_scheduler", "flush", "tick", "act", "connect")
    ),
    *((IoWorkers, name) for name in ("perform", "begin")),
    *((ZmqTransport, name) for name in ("poll", "send")),
]
POINTS: dict[str, list[tuple[Any, str]]] = {
    CONTROL: MESSAGES + PHASES,
    PREPARER: [(io_workers, "item_name"), (io_workers, "as_bytes")],
    WRITER: [(SharedWriter, "write")],
    DRAINER: [(io_workers, "drain")],
    RESOLVER: [(allowed_peers, "addresses_of")],
}
ALL = [(thread, owner, name) for thread, points in POINTS.items() for owner, name in points]


class Fault:
    """Raises in threads of workers once it is armed, from a call on that chance chooses."""

    def __init__(self, error: type[BaseException], seed: str) -> None:
        self.error = error
        self.is_armed = False
        self.after = random.Random(seed).randrange(4)
        self.raised = 0

    def meet(self) -> None:
        if not self.is_armed or not threading.current_thread().name.startswith("kvpool-ec"):
            return
        self.after -= 1
        if self.after < 0:
            self.raised += 1
            raise self.error("a fault")


@contextmanager
def faulty(owner: Any, name: str, error: type[BaseException]) -> Iterator[Fault]:
    fault, usual = Fault(error, f"{owner} {name}"), getattr(owner, name)

    def call(*args: Any, **options: Any) -> Any:
        fault.meet()
        return usual(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, call)
        yield fault


def test_every_thread_is_in_the_table_and_has_a_point() -> None:
    folders = [Path(each.__file__).parent for each in (faults, work_thread)]
    starts = {
        path.name
        for folder in folders
        for path in folder.rglob("*.py")
        if "Thread(target" in path.read_text()
    }
    assert starts == {"faults.py", "work_thread.py"}
    threads = NewThreads()
    with Engine(PeerRole.BOTH):
        names = {each.name for each in threads.alive("kvpool-ec")}
    assert {re.sub(r"-\d+$", "", name) for name in names} == set(POINTS) - {RESOLVER}


@pytest.mark.parametrize("error", [RuntimeError, SystemExit], ids=["a bug", "a death"])
@pytest.mark.parametrize(
    ("thread", "owner", "name"), ALL, ids=[f"{t}: {o.__name__}.{n}" for t, o, n in ALL]
)
def test_whatever_dies_requests_go_on(
    thread: str, owner: Any, name: str, error: type[BaseException]
) -> None:
    with (
        faulty(owner, name, error) as fault,
        Engine(PeerRole.PRODUCER, **OPTIONS) as producer,
        Engine(PeerRole.CONSUMER, **OPTIONS) as consumer,
    ):
        peers = (producer.endpoint, f"tcp://localhost:{producer.ports[0]}")
        producer.encode("first", embeddings(ROWS))
        fault.is_armed = True
        media = consumer.request("media", ("first", ROWS), peers=peers, has_media=True)
        without = consumer.request("without", ("second", ROWS), peers=peers)
        wait_for(lambda: not consumer.may_go(without))
        late = producer.request("late", ("second", ROWS), consumers=(consumer.endpoint,))
        wait_for(lambda: producer.may_go(late), patience_s=PATIENCE_S)
        producer.workers[0].produced("second", embeddings(ROWS, seed=1), FIRST_WEIGHTS)
        for seed, view in enumerate((media, without)):
            wait_for(
                lambda view=view: (  # type: ignore[misc]
                    consumer.may_go(view)
                    or view.request_id in consumer.scheduler.take_unavailable()
                ),
                lambda: consumer.describe("first") + consumer.describe("second"),
                PATIENCE_S,
            )
            (feature,) = view.features
            if consumer.scheduler.has(feature.mm_hash):
                (got,) = consumer.get(feature.mm_hash)
                assert torch.equal(got, embeddings(ROWS, seed=seed)), "wrong bytes"
            consumer.scheduler.finished(view)


def test_a_control_thread_that_dies_says_so_at_once(caplog: pytest.LogCaptureFixture) -> None:
    """The scheduler learns of the death at once, without waiting for missed heartbeats."""
    options = {**OPTIONS, "heartbeat_s": 3600.0, "bootstrap_timeout_s": 3600.0}
    with Engine(PeerRole.CONSUMER, **options) as engine:
        view = engine.request("r", ("image", 4), peers=("tcp://127.0.0.1:1",), has_media=True)
        engine.awaits(view)

        def die(now: float) -> None:
            raise SystemExit

        engine.workers[0]._control.post(die)
        wait_for(lambda: engine.may_go(view))
        later = engine.request("later", ("other", 4), peers=("tcp://127.0.0.1:1",))
        wait_for(lambda: not engine.may_go(later))
        assert "later" in engine.scheduler.take_unavailable()
    assert [each.levelname for each in caplog.records if "has died" in each.message] == ["CRITICAL"]


def test_a_control_thread_that_hangs_is_found_out_by_the_schedulers_clock() -> None:
    release = threading.Event()
    with Engine(PeerRole.CONSUMER, **OPTIONS) as engine:
        view = engine.request("r", ("image", 4), peers=("tcp://127.0.0.1:1",), has_media=True)
        engine.awaits(view)
        engine.workers[0]._control.post(lambda now: release.wait(PATIENCE_S) and None)
        try:
            wait_for(lambda: engine.may_go(view))
            assert engine.scheduler._are_workers_lost
        finally:
            release.set()
        wait_for(
            lambda: (
                engine.scheduler._channel.poll() is None or not engine.scheduler._channel.silent_s
            )
        )


def test_a_bug_that_every_turn_meets_ends_the_thread_rather_than_nothing() -> None:
    tick = faulty(Consumer, "tick", RuntimeError)
    with tick as fault, Engine(PeerRole.CONSUMER, **OPTIONS) as engine:
        view = engine.request("r", ("image", 4), peers=("tcp://127.0.0.1:1",), has_media=True)
        engine.awaits(view)
        fault.is_armed = True
        wait_for(lambda: engine.may_go(view))
        wait_for(lambda: engine.workers[0]._control.is_over)
        assert fault.raised > 1
