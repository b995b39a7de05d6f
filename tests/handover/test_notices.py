"""Notices over real sockets, from an engine's ranks to engines that wait: told, lost, refused,
killed, doubled, late and forged."""

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager

import msgspec
import pytest

from tests.embeds.strangers import GREETING, RawStranger, large, ready
from tests.handover.clients import LOST, SOON_S, Client, wait_for
from tests.support.relay import Relay
from vllm_kvpool.errors import ConfigError
from vllm_kvpool.handover import consumer
from vllm_kvpool.handover.messages import (
    MAX_FRAME_BYTES,
    TOPIC_BYTES,
    VERSION,
    Notice,
    Unwatch,
    Watch,
    decode,
    encode,
)
from vllm_kvpool.handover.producer import NoticePlace, NoticeServer, open_server
from vllm_kvpool.metrics import MetricsRegistry
from vllm_kvpool.network import allowed_peers, transport_zmq
from vllm_kvpool.network.allowed_peers import AllowedPeers
from vllm_kvpool.network.transport_zmq import ZmqTransport

TOPIC, OTHER = bytes(range(TOPIC_BYTES)), b"x" * TOPIC_BYTES
LOCAL = "tcp://127.0.0.1:*"
PLACE = NoticePlace(LOCAL, "127.0.0.1", is_required=True)
FAR_PLACE = NoticePlace("tcp://127.0.0.2:*", "127.0.0.2", is_required=True)
KILL_S = 0.05  # a killed process is noticed, on one host


@contextmanager
def server(allowed: AllowedPeers | None = None) -> Iterator[NoticeServer]:
    with closing(NoticeServer(PLACE, allowed or AllowedPeers(), MetricsRegistry())) as made:
        yield made


@pytest.fixture
def client() -> Iterator[Client]:
    with closing(Client()) as made:
        yield made


def sent(of: NoticeServer, event: str) -> float:
    name = f"kvpool_notices{{side=prefill,event={event}}}"
    return of._registry.snapshot().get(name, 0)


def test_decode_hears_every_change_of_what_it_waits_for(client: Client) -> None:
    with server() as one:
        one.tell(TOPIC, 1)
        client.watch([one.endpoint], TOPIC)
        assert client.hears() == (TOPIC, 1, None)
        one.tell(OTHER, 9, 9)
        one.tell(TOPIC, 2)
        assert client.hears() == (TOPIC, 2, None)
        one.tell(TOPIC, 3, 3)
        assert client.hears() == (TOPIC, 3, 3)
        client.unwatch(TOPIC)
        wait_for(lambda: not one._state.num_watches)
        one.tell(TOPIC, 4, 4)
        assert client.hears_nothing()


def test_decode_that_asks_before_prefill_begins_hears_of_it_later(client: Client) -> None:
    with server() as one:
        client.watch([one.endpoint], TOPIC)
        assert client.answers.get(timeout=SOON_S) == TOPIC
        one.tell(TOPIC, 1)
        assert client.hears() == (TOPIC, 1, None)


def test_ranks_of_an_engine_are_merged(client: Client) -> None:
    with server() as one, server() as other:
        client.watch([one.endpoint, other.endpoint], TOPIC)
        one.tell(TOPIC, 5)
        other.tell(TOPIC, 2)
        assert client.hears() == (TOPIC, 2, None)
        other.tell(TOPIC, 2, 2)
        assert client.hears() == (TOPIC, 2, 2)


def test_two_engines_that_wait_are_both_told(client: Client) -> None:
    with server() as one, closing(Client()) as second:
        for each in (client, second):
            each.watch([one.endpoint], TOPIC)
        wait_for(lambda: one._state.num_watches == 2)
        one.tell(TOPIC, 1)
        assert client.hears() == second.hears() == (TOPIC, 1, None)


def test_prefill_that_ends_in_order_ends_the_wait(client: Client) -> None:
    with server() as one:
        client.watch([one.endpoint], TOPIC)
        one.tell(TOPIC, 1)
        assert client.hears() == (TOPIC, 1, None)
        one.tell(TOPIC, 2)
        one.close()
        assert client.hears() == (TOPIC, 2, None), "what it has said is heard first"
        assert client.hears() == (TOPIC, LOST)
        assert client.hears_nothing()


@contextmanager
def child() -> Iterator[tuple[subprocess.Popen[str], str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.handover.server_child"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.communicate()


@pytest.mark.alone
def test_killed_prefill_ends_the_wait_within_milliseconds(client: Client) -> None:
    with child() as (process, endpoint):
        assert process.stdin is not None
        process.stdin.write(f"{TOPIC.hex()} 1 -\n")
        process.stdin.flush()
        client.watch([endpoint], TOPIC)
        client.watch([endpoint], OTHER)
        assert client.hears() == (TOPIC, 1, None)
        os.kill(process.pid, signal.SIGKILL)
        killed = time.monotonic()
        assert {client.hears(), client.hears()} == {(TOPIC, LOST), (OTHER, LOST)}
        assert time.monotonic() - killed < KILL_S


@pytest.mark.alone
def test_endpoint_where_nobody_listens_ends_the_wait_at_once(client: Client) -> None:
    """The engine has died before decode was told of it; a later engine there is heard."""
    with server() as one:
        endpoint = one.endpoint
    asked = time.monotonic()
    client.watch([endpoint], TOPIC)
    assert client.hears() == (TOPIC, LOST)
    # The listener may accept and cut one connection as it closes; libzmq makes the next one then.
    assert time.monotonic() - asked < KILL_S + transport_zmq.RECONNECT_MS / 1000
    with closing(
        NoticeServer(PLACE._replace(listen=endpoint), AllowedPeers(), MetricsRegistry())
    ) as again:
        again.tell(TOPIC, 1)
        client.watch([endpoint], TOPIC)
        assert client.hears() == (TOPIC, 1, None)


@pytest.mark.parametrize("accepts", [False, True])
def test_prefill_that_ends_while_decode_connects_ends_the_wait_at_once(
    accepts: bool, client: Client
) -> None:
    """The connection is made by the kernel, and the process ends before it has greeted."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        asked = time.monotonic()
        client.watch([f"tcp://127.0.0.1:{listener.getsockname()[1]}"], TOPIC)
        wait_for(lambda: bool(select.select([listener], [], [], 0)[0]))
        accepted = listener.accept()[0] if accepts else None
    if accepted is not None:
        accepted.close()
    assert client.hears() == (TOPIC, LOST)
    assert time.monotonic() - asked < consumer.RETRY_S
    assert not client.count("refused")


def test_prefill_is_heard_though_a_connection_to_it_was_cut_in_its_handshake(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transport_zmq, "SILENT_MS", 60_000)
    monkeypatch.setattr(consumer, "RETRY_S", 600.0)
    with server() as one, closing(Client()) as waiting:
        one.tell(TOPIC, 1)
        with Relay(int(one.endpoint.rpartition(":")[2])) as relay:
            relay.cut()
            waiting.watch([relay.endpoint], TOPIC)
            wait_for(lambda: bool(waiting.client._sockets._cut))
            relay.restore()
            assert waiting.hears() == (TOPIC, 1, None)


def test_host_that_vanishes_ends_the_wait_after_missed_heartbeats(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped process reads and sends nothing, and its connection stays, as of a host without
    power."""
    with child() as (process, endpoint):
        monkeypatch.setattr(transport_zmq, "HEARTBEAT_MS", 100)
        monkeypatch.setattr(transport_zmq, "SILENT_MS", 300)
        with closing(Client()) as waiting:
            waiting.watch([endpoint], TOPIC)
            assert process.stdin is not None
            process.stdin.write(f"{TOPIC.hex()} 1 -\n")
            process.stdin.flush()
            assert waiting.hears() == (TOPIC, 1, None)
            os.kill(process.pid, signal.SIGSTOP)
            assert waiting.hears() == (TOPIC, LOST)


@pytest.mark.parametrize("closes", [False, True], ids=["a firewall", "a proxy"])
def test_port_that_does_not_answer_as_the_channel_does_is_left_to_polling(
    closes: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A firewall, or a proxy, is no engine that has died."""
    monkeypatch.setattr(transport_zmq, "SILENT_MS", 200)
    with socket.create_server(("127.0.0.1", 0)) as listener, closing(Client()) as waiting:
        endpoint = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        waiting.watch([endpoint], TOPIC)
        waiting.watch([endpoint], OTHER)
        accepted, _ = listener.accept()
        with accepted:
            if closes:
                accepted.close()
            wait_for(lambda: waiting.count("refused") == 1)
            assert waiting.hears_nothing()
        assert sum("lookups poll" in each.message for each in caplog.records) == 1


def test_prefill_that_does_not_list_this_host_is_left_to_polling_and_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Prefill's `allowed_peers` lacks decode's host: decode must not take prefill for dead."""
    monkeypatch.setattr(consumer, "RETRY_S", 0.1)
    admits = AllowedPeers(is_own=lambda address: False)
    with server(admits) as one, closing(Client()) as waiting:
        one.tell(TOPIC, 1)
        waiting.watch([one.endpoint], TOPIC)
        wait_for(lambda: waiting.count("refused") >= 1)
        wait_for(lambda: sent(one, "refused") >= 1)
        assert waiting.hears_nothing()
        assert any("allowed_peers" in each.message for each in caplog.records)
        admits._is_own = lambda address: True
        assert waiting.hears() == (TOPIC, 1, None)


@pytest.mark.parametrize(
    ("endpoint", "why"),
    [
        ("tcp://127.0.0.2:5555", "neither this machine's nor listed"),
        ("tcp://elsewhere:5555", "neither this machine's nor listed"),
        ("ipc:///tmp/socket", "not of the form"),
        ("inproc://zeromq.zap.01", "not of the form"),
    ],
)
def test_request_cannot_have_decode_connect_to_hosts_that_are_not_listed(
    endpoint: str,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    usual = allowed_peers.socket.getaddrinfo
    monkeypatch.setattr(
        allowed_peers.socket, "getaddrinfo", lambda name, *a, **o: usual("127.0.0.2", *a, **o)
    )
    own = AllowedPeers(is_own=lambda address: str(address) == "127.0.0.1")
    with closing(Client(own)) as waiting:
        for _ in range(3):
            waiting.watch([endpoint], TOPIC)
        wait_for(lambda: waiting.count("refused") >= 1)
        assert waiting.hears_nothing()
        assert waiting.count("refused") == 1
        assert not waiting.client._used_at
    (line,) = [each.getMessage() for each in caplog.records if "lookups poll" in each.message]
    assert why in line
    assert endpoint in line


def test_listed_host_is_connected_to() -> None:
    own = AllowedPeers(["127.0.0.2/32"], is_own=lambda address: str(address) == "127.0.0.1")
    with (
        closing(NoticeServer(FAR_PLACE, AllowedPeers(), MetricsRegistry())) as far,
        closing(Client(own)) as waiting,
    ):
        far.tell(TOPIC, 1)
        waiting.watch([far.endpoint], TOPIC)
        assert waiting.hears() == (TOPIC, 1, None)


def test_rank_that_may_not_be_connected_to_leaves_the_rest_to_polling(client: Client) -> None:
    """Without that rank's notices, no chunk is known to be stored by all ranks.

    An end of any other rank still ends the wait.
    """
    with server() as one:
        client.watch([one.endpoint, "ipc:///tmp/socket"], TOPIC)
        one.tell(TOPIC, 4)
        assert client.hears_nothing()
        one.tell(TOPIC, 4, 4)
        assert client.hears() == (TOPIC, 0, 4)


def test_connections_are_bounded_and_idle_ones_make_room(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumer, "MAX_CONNECTIONS", 2)
    with ExitStack() as stack:
        servers = [stack.enter_context(server()) for _ in range(3)]
        for each in servers:
            each.tell(TOPIC, 1)
            each.tell(OTHER, 1)
            client.watch([each.endpoint], TOPIC)
            assert client.hears() == (TOPIC, 1, None)
        wait_for(lambda: client.count("refused") == 1)
        assert len(client.client._used_at) == 2
        for _ in servers:
            client.unwatch(TOPIC)
        monkeypatch.setattr(consumer, "RETRY_S", 0.0)
        client.client._retry_at.clear()
        client.watch([servers[2].endpoint], OTHER)
        assert client.hears() == (OTHER, 1, None)
        assert len(client.client._used_at) == 2


def test_connection_that_nothing_is_watched_at_is_closed(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    with server() as one:
        one.tell(TOPIC, 1)
        client.watch([one.endpoint], TOPIC)
        client.hears()
        client.unwatch(TOPIC)
        monkeypatch.setattr(consumer, "IDLE_S", 0.0)
        client.unwatch(OTHER)  # a turn
        wait_for(lambda: not client.client._used_at)


# Peers that do not keep to the protocol


class FalseServer:
    """A listener that answers watches as it likes."""

    def __init__(self) -> None:
        self.sockets = ZmqTransport(LOCAL, 1 << 20)
        self.endpoint = self.sockets.endpoint

    def answers(self, *frames: bytes) -> None:
        """Wait for a watch and answer it."""
        deadline = time.monotonic() + SOON_S
        while time.monotonic() < deadline:
            for frame in self.sockets.poll(0.1):
                for each in frames:
                    assert self.sockets.send(frame.link, each)
                self.sockets.poll(0.0)
                return
        raise AssertionError("nobody watches")


@pytest.fixture
def false_server() -> Iterator[FalseServer]:
    made = FalseServer()
    with closing(made.sockets):
        yield made


def test_doubled_late_and_forged_notices_cost_nothing(
    client: Client, false_server: FalseServer
) -> None:
    client.watch([false_server.endpoint], TOPIC)
    false_server.answers(
        encode(Notice(OTHER, 9, 9)),
        encode(Watch(TOPIC)),
        b"nonsense",
        msgspec.msgpack.encode([VERSION + 1, ["notice", TOPIC, 9, 9]]),
        encode(Notice(TOPIC, 2, None)),
        encode(Notice(TOPIC, 2, None)),
        encode(Notice(TOPIC, 1, None)),
        encode(Notice(TOPIC, 3, 3)),
    )
    assert client.hears() == (TOPIC, 2, None)
    assert client.hears() == (TOPIC, 3, 3)
    assert client.count("stray") == 2
    assert client.count("invalid") == 2
    assert client.count("received") == 4


def test_frame_over_the_limit_ends_decodes_connection(
    client: Client, false_server: FalseServer
) -> None:
    client.watch([false_server.endpoint], TOPIC)
    false_server.answers(bytes(MAX_FRAME_BYTES + 1))
    wait_for(lambda: not (false_server.sockets.poll(0.0), client.client._used_at)[1])
    assert client.hears() == (TOPIC, LOST)


@pytest.mark.parametrize(
    "frame", [b"nonsense", b"\xff" * MAX_FRAME_BYTES, encode(Notice(TOPIC, 1, 1))]
)
def test_frame_that_is_no_watch_is_counted_and_ends_nothing(frame: bytes) -> None:
    with server() as one, closing(ZmqTransport(None, MAX_FRAME_BYTES)) as peer:
        one.tell(TOPIC, 1)
        link = peer.connect(one.endpoint)
        assert peer.send(link, frame)
        assert peer.send(link, encode(Watch(TOPIC)))
        answer = next(frame for _ in range(200) for frame in peer.poll(0.1))
        assert decode(answer.data) == Notice(TOPIC, 1, None)
        assert sent(one, "invalid") == 1
        assert peer.send(link, encode(Unwatch(TOPIC)))
        wait_for(lambda: not one._state.num_watches)


def test_large_frame_ends_its_connection_alone(client: Client) -> None:
    with server() as one:
        client.watch([one.endpoint], TOPIC)
        stranger = RawStranger(one.endpoint, "127.0.0.2")
        stranger.send(GREETING + ready())
        assert not stranger.send(large(MAX_FRAME_BYTES + 1), 1 << 16)
        stranger.close()
        one.tell(TOPIC, 1)
        assert client.hears() == (TOPIC, 1, None)


def test_host_that_is_not_listed_is_refused_before_it_is_read(
    caplog: pytest.LogCaptureFixture,
) -> None:
    own = AllowedPeers(is_own=lambda address: str(address) != "127.0.0.3")
    with server(own) as one:
        stranger = RawStranger(one.endpoint, "127.0.0.3")
        stranger.send(GREETING + ready())
        wait_for(lambda: sent(one, "refused") == 1)
        assert sent(one, "invalid") == sent(one, "watched") == 0
        stranger.close()
    assert any("127.0.0.3 was refused" in each.getMessage() for each in caplog.records)


def test_peer_that_is_gone_is_watched_for_no_longer() -> None:
    with server() as one:
        with closing(Client()) as gone:
            gone.watch([one.endpoint], TOPIC)
            wait_for(lambda: one._state.num_watches == 1)

        def is_forgotten() -> bool:
            one.tell(TOPIC, int(time.monotonic() * 1000))
            return not one._state.num_watches

        wait_for(is_forgotten)


def test_bug_in_the_thread_ends_the_connection_and_no_caller(
    client: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with server() as one:
        client.watch([one.endpoint], TOPIC)
        wait_for(lambda: one._state.num_watches == 1)
        monkeypatch.setattr(one._state, "tell", lambda notice: 1 / 0)
        one.tell(TOPIC, 1)
        assert client.hears() == (TOPIC, LOST)
        one.tell(TOPIC, 2)
        assert one._inbox.empty(), "nothing is kept that nobody takes"
        failures = one._registry.snapshot()
    assert failures["kvpool_failures{kind=notices}"] == 1
    assert any("internal error" in each.message for each in caplog.records)


def test_place_that_is_taken_is_an_error_where_the_user_has_named_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with server() as one:
        taken = PLACE._replace(listen=one.endpoint)
        with pytest.raises(ConfigError, match="notice_listen"):
            open_server(taken, AllowedPeers(), MetricsRegistry())
        unnamed = taken._replace(is_required=False)
        assert open_server(unnamed, AllowedPeers(), MetricsRegistry()) is None
    assert any("poll stores" in each.getMessage() for each in caplog.records)
