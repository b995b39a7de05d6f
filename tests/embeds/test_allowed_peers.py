"""Rules of allowed peers, name resolution, and what strangers can make an engine do."""

import logging
from collections.abc import Iterator
from contextlib import suppress
from ipaddress import ip_network
from pathlib import Path

import msgspec
import pytest
import torch
import zmq

from tests.embeds.engines import Engine, embeddings, wait_for
from tests.embeds.sessions import frame
from tests.embeds.strangers import GREETING, RawStranger, ready
from tests.support.threads import few_threads
from vllm_kvpool.embeds.protocol.messages import (
    Expect,
    HelloReject,
    MooncakeWindow,
    PeerHello,
    PeerRole,
    decode,
    decode_body,
)
from vllm_kvpool.errors import ConfigError
from vllm_kvpool.network import allowed_peers
from vllm_kvpool.network.allowed_peers import (
    Allowed,
    AllowedPeers,
    NeedsLookup,
    Refused,
    Rule,
    address_of,
    check_advertised,
    is_own,
)

OWN = "192.168.7.7"


def peers_of(*allowed: str, peers: tuple[str, ...] = ()) -> AllowedPeers:
    return AllowedPeers(allowed, peers, lambda address: str(address) in (OWN, "127.0.0.1"), "here")


GOOD_RULES = [
    ("10.42.0.0/16", "tcp://10.42.3.4:14579", "tcp://10.43.3.4:14579"),
    ("10.42.0.0/16:14579", "tcp://10.42.3.4:14579", "tcp://10.42.3.4:14580"),
    ("10.0.0.7:100-200", "tcp://10.0.0.7:150", "tcp://10.0.0.7:201"),
    ("10.0.0.7", "tcp://10.0.0.7:1", "tcp://10.0.0.8:1"),
    ("tcp://10.0.0.7:5", "tcp://10.0.0.7:5", "tcp://10.0.0.7:6"),
    ("fd00::/8", "tcp://[fd00::1]:5", "tcp://[fe00::1]:5"),
    ("[fd00::/8]:5", "tcp://[fd00::1]:5", "tcp://[fd00::1]:6"),
    ("10.0.0.0/8", "tcp://[::ffff:10.1.1.1]:5", "tcp://[::ffff:11.1.1.1]:5"),
    ("::ffff:10.0.0.1", "tcp://10.0.0.1:5", "tcp://10.0.0.2:5"),
    ("[::ffff:10.0.0.1]:5", "tcp://[::ffff:10.0.0.1]:5", "tcp://10.0.0.1:6"),
    ("::ffff:a00:0/104", "tcp://10.255.0.1:5", "tcp://11.0.0.1:5"),
    ("0.0.0.0/0", "tcp://8.8.8.8:5", "tcp://[fd00::1]:5"),
    ("encoder-0.encoder", "tcp://encoder-0.encoder:5", "tcp://10.0.0.1:5"),
    ("Encoder:5", "tcp://encoder:5", "tcp://10.0.0.1:5"),
]


@pytest.mark.parametrize(("rule", "good", "bad"), GOOD_RULES)
def test_a_rule_allows_what_it_names(rule: str, good: str, bad: str) -> None:
    allowed = peers_of(rule)
    assert isinstance(allowed.judge(good), Allowed)
    assert isinstance(allowed.judge(bad), Refused)
    assert isinstance(peers_of().judge(good), Refused | NeedsLookup)


AMBIGUOUS = ["010.0.0.1", "10.1", "10.0.0.1.", "167772161", "0x0a000001", "0x7f.1", "host.1", "1"]
"""Names to some programs, and addresses to others."""


@pytest.mark.parametrize(
    "text",
    [
        *AMBIGUOUS,
        *("10.0.0.0/255.0.0.0", "10.0.0.0/0.255.255.255", "10.0.0.1:\uff11", "fe80::1%eth0"),
        *("[encoder]", "10.0.0.0/8/8", "::/129"),
        "",
        "a b",
        "10.0.0.0/33",
        "10.0.0.1:0",
        "x:70000",
        "x:5-4",
        "*",
        "ipc:///x",
        "[x]:1",
    ],
)
def test_what_is_no_rule_is_refused_by_the_options_name(text: str) -> None:
    with pytest.raises(ConfigError, match="allowed_peers"):
        Rule.parse(text)


@pytest.mark.parametrize(
    ("text", "host", "block"),
    [
        ("10.0.0.1/0", "10.0.0.1", "0.0.0.0/0"),
        ("10.0.0.1/24:5", "10.0.0.1", "10.0.0.0/24"),
        ("[fd00::1/8]:5", "fd00::1", "fd00::/8"),
        ("::ffff:10.0.0.1/96", "::ffff:10.0.0.1", "::ffff:0:0/96"),
    ],
)
def test_address_within_a_block_is_refused_with_both_ways_to_write_it(
    text: str, host: str, block: str
) -> None:
    """`10.0.0.1/0` let every host in."""
    with pytest.raises(ConfigError, match="allowed_peers") as error:
        Rule.parse(text)
    assert f"write {host} for" in str(error.value)
    assert f"or {block.replace('::ffff:0:0', str(ip_network(block).network_address))} for" in str(
        error.value
    )


@pytest.mark.parametrize("host", AMBIGUOUS)
def test_ambiguous_host_is_refused_wherever_an_endpoint_is_written(host: str) -> None:
    """The name server's client would take it for an address that nobody has written."""
    with pytest.raises(ConfigError, match=r"^peers: "):
        peers_of(peers=(f"tcp://{host}:5",))
    with pytest.raises(ConfigError, match="advertise"):
        check_advertised(f"tcp://{host}:5")
    assert isinstance(peers_of("0.0.0.0/0").judge(f"tcp://{host}:5"), Refused)
    assert not peers_of("0.0.0.0/0").allows_host(host)


@pytest.mark.parametrize("host", ["10.0.0.1", "encoder-0.encoder", "[fd00::1]", "1st", "x1.y2"])
def test_host_that_peers_can_use_may_be_advertised(host: str) -> None:
    check_advertised(f"tcp://{host}:5")


@pytest.mark.parametrize(
    "text",
    [
        *("ipc:///tmp/x", "inproc://x", "udp://127.0.0.1:5", "tcp://127.0.0.1", "127.0.0.1:5"),
        *("tcp://127.0.0.1:0", "tcp://127.0.0.1:99999", "tcp://10.0.0.1;127.0.0.1:5", "tcp://*:5"),
        *("tcp://0.0.0.0:5", "tcp://[::]:5", "", "tcp://8.8.8.8:53", "tcp://127.0.0.1:5\n"),
    ],
)
def test_what_is_not_a_tcp_endpoint_of_a_peer_is_refused(text: str) -> None:
    assert isinstance(peers_of("10.42.0.0/16").judge(text), Refused)


def test_this_machine_and_the_hosts_of_peers_need_no_rule() -> None:
    allowed = peers_of(peers=("tcp://10.0.0.2:14579", "tcp://enc:1", "tcp://[fd00::2]:1"))
    for text in (f"tcp://{OWN}:5", "tcp://10.0.0.2:14580", "tcp://enc:2", "tcp://[fd00::2]:2"):
        assert isinstance(allowed.judge(text), Allowed), text
    assert allowed.allows_host("here")
    assert allowed.allows_host("enc")
    assert not allowed.allows_host("elsewhere")


def test_a_name_is_connected_to_by_the_address_that_was_checked() -> None:
    allowed = peers_of("10.42.0.0/16")
    endpoint = "tcp://encoder:5"
    assert allowed.judge(endpoint) == NeedsLookup("encoder")
    found = allowed.judge(endpoint, ("8.8.8.8", "10.42.1.1"))
    assert found == Allowed("tcp://10.42.1.1:5")
    assert isinstance(allowed.judge(endpoint, ("8.8.8.8",)), Refused)
    assert isinstance(allowed.judge(endpoint, ()), Refused)


def test_who_connects_from_a_listed_names_address_may() -> None:
    allowed = peers_of("encoder:5")
    assert not allowed.allows_address("10.0.0.9")
    allowed.learn("encoder", ("10.0.0.9",))
    assert allowed.allows_address("10.0.0.9")
    allowed.learn("encoder", ("10.0.0.10",))
    assert not allowed.allows_address("10.0.0.9")
    assert not allowed.allows_address("")


@pytest.mark.parametrize(
    ("text", "own"),
    [
        *(("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("8.8.8.8", False)),
        *(("0.0.0.0", False), ("224.0.0.1", False), ("192.0.2.77", False)),
    ],
)
def test_the_kernel_knows_its_own_addresses(text: str, own: bool) -> None:
    address = address_of(text)
    assert address is not None
    assert is_own(address) is own


# Real sockets


class Stranger:
    """A socket that listens, counts what connects to it and echoes every greeting as a peer's."""

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self._context.socket(zmq.ROUTER)
        port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self.endpoint = f"tcp://127.0.0.1:{port}"

    def hears(self, timeout_ms: int = 300) -> bool:
        return bool(self.socket.poll(timeout_ms))

    def close(self) -> None:
        self.socket.close(linger=0)
        self._context.term()


@pytest.fixture
def stranger() -> Iterator[Stranger]:
    found = Stranger()
    yield found
    found.close()


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat only 127.0.0.1 as this host, and other loopback addresses as remote hosts."""
    usual = AllowedPeers.__init__

    def init(self: AllowedPeers, allowed: object = (), peers: object = ()) -> None:
        usual(self, allowed, peers, lambda address: str(address) == "127.0.0.1")  # type: ignore[arg-type]

    monkeypatch.setattr(AllowedPeers, "__init__", init)


@pytest.mark.parametrize("kind", ["address", "ipc", "name"])
@pytest.mark.usefixtures("far")
def test_a_request_cannot_send_an_engine_to_strangers(
    stranger: Stranger,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's whole path may have 107 bytes
    named = {
        "address": stranger.endpoint.replace("127.0.0.1", "127.0.0.2"),
        "ipc": "ipc://socket",
        "name": stranger.endpoint.replace("127.0.0.1", "stranger"),
    }[kind]
    stranger.socket.bind(named if kind == "ipc" else named.replace("stranger", "127.0.0.2"))
    looked_up = {"stranger": "127.0.0.2"}
    usual = allowed_peers.socket.getaddrinfo
    monkeypatch.setattr(
        allowed_peers.socket, "getaddrinfo", lambda name, *a, **o: usual(looked_up[name], *a, **o)
    )
    with Engine(PeerRole.BOTH, bootstrap_timeout_s=3600.0) as engine:
        for number in range(3):
            without = engine.request(f"r{number}", ("image", 4), peers=(named,), consumers=(named,))
            wait_for(
                lambda without=without: (  # type: ignore[misc]
                    not engine.may_go(without)
                    and without.request_id in engine.scheduler.take_unavailable()
                )
            )
        media = engine.request("media", ("image", 4), peers=(named,), has_media=True)
        wait_for(lambda: engine.may_go(media))
        wait_for(lambda: engine.workers[0]._control.counts["refused_endpoints"] > 3)
    assert not stranger.hears(), "it was connected to"
    lines = [each.getMessage() for each in caplog.records if "not connected to" in each.message]
    refusals = [line for line in lines if line.startswith("kvpool: tcp") or "ipc" in line[:20]]
    assert len(refusals) == 1
    assert "allowed_peers" in refusals[0]


@pytest.mark.parametrize("left", [0, 1])
def test_name_that_came_when_no_thread_could_be_started_is_resolved_later(
    left: int, stranger: Stranger
) -> None:
    named = stranger.endpoint.replace("127.0.0.1", "localhost")
    with Engine(PeerRole.CONSUMER, bootstrap_timeout_s=3600.0) as engine:
        first = engine.request("first", ("image", 4), peers=(named,))
        with few_threads(left):
            engine.awaits(first)
            wait_for(lambda: engine.workers[0]._control.counts["internal_errors"] > 0)
        engine.awaits(engine.request("second", ("other", 4), peers=(named,)))
        assert stranger.hears(10_000)


@pytest.mark.usefixtures("far")
def test_what_the_list_has_is_connected_to(stranger: Stranger) -> None:
    far_end = stranger.endpoint.replace("127.0.0.1", "127.0.0.2")
    stranger.socket.bind(far_end)
    with Engine(PeerRole.CONSUMER, allowed_peers=("127.0.0.2/32",)) as engine:
        view = engine.request("r", ("image", 4), peers=(far_end,))
        engine.awaits(view)
        assert stranger.hears(10_000)


@pytest.mark.usefixtures("far")
def test_a_stranger_at_the_port_is_refused_at_its_handshake(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The refused peer can neither offer nor request items, and cannot flood the log."""
    with Engine(PeerRole.BOTH) as engine, Engine(PeerRole.PRODUCER) as producer:
        producer.encode("image", embeddings(4), to=(engine.endpoint,))
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        other = context.socket(zmq.DEALER)
        other.set(zmq.LINGER, 0)
        other.connect(engine.endpoint.replace("tcp://", "tcp://127.0.0.3:0;"))
        window = MooncakeWindow("10.6.6.6:12345", 0x1000, 1 << 20)
        own = engine.workers[0]._control._peers.hello
        hello = msgspec.structs.replace(own, incarnation="s", role=PeerRole.CONSUMER, window=window)
        for message in (
            frame("s", hello),
            frame("s", Expect("image", 0), target=own.incarnation),
        ):
            with suppress(zmq.Again):  # refused already
                other.send(message, zmq.NOBLOCK)
        strangers = [RawStranger(engine.endpoint) for _ in range(20)]
        for each in strangers:
            each.send(GREETING + ready())
        control = engine.workers[0]._control
        wait_for(lambda: control.counts["strangers"] >= 21)
        assert not other.poll(0)
        wait_for(lambda: control._peers.known)
        assert control._peers.known.keys() == {
            producer.workers[0]._control._peers.hello.incarnation
        }
        for each in strangers:
            each.close()
        (got,) = engine.receive("image", 4)
        assert torch.equal(got, embeddings(4))
        other.close()
        context.term()
    lines = [each for each in caplog.records if "was refused" in each.getMessage()]
    assert len(lines) == 1


@pytest.mark.usefixtures("far")
def test_an_engine_that_was_refused_is_heard_once_its_host_is_listed(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its log names the endpoint and the option; nothing is started anew."""
    listed: set[str] = set()
    usual = AllowedPeers.allows_address
    monkeypatch.setattr(
        AllowedPeers, "allows_address", lambda self, text: usual(self, text) and bool(listed)
    )
    with Engine(PeerRole.PRODUCER) as producer, Engine(PeerRole.CONSUMER) as consumer:
        named = consumer.workers[0]._control._peers
        consumer.workers[0]._control.post(lambda now: named.connect(producer.endpoint, now))
        wait_for(lambda: any("refuses connections" in each.getMessage() for each in caplog.records))
        assert producer.endpoint in caplog.text
        listed.add("this machine")
        (got,) = received(producer, consumer)
        assert torch.equal(got, embeddings(4))


def received(producer: Engine, consumer: Engine) -> list[list[torch.Tensor]]:
    """An item that goes from one to the other."""
    producer.encode("image", embeddings(4))
    return consumer.receive("image", 4, peers=(producer.endpoint,))


def test_rows_are_written_to_no_host_that_is_not_listed(caplog: pytest.LogCaptureFixture) -> None:
    """A peer of this machine names a window elsewhere."""
    with caplog.at_level(logging.WARNING), Engine(PeerRole.PRODUCER) as producer:
        own = producer.workers[0]._control._peers.hello
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        peer = context.socket(zmq.DEALER)
        peer.set(zmq.LINGER, 0)
        peer.connect(producer.endpoint)
        for host, refused in (("10.6.6.6", True), ("evil.example", True), ("127.0.0.1", False)):
            window = MooncakeWindow(f"{host}:12345", 0x1000, 1 << 20)
            told = msgspec.structs.replace(
                own, incarnation=host, role=PeerRole.CONSUMER, window=window, endpoints=()
            )
            peer.send(frame(host, told))
            assert peer.poll(10_000)
            answer = decode_body(decode(peer.recv()).bodies[0])
            assert isinstance(answer, HelloReject if refused else PeerHello), host
        known = producer.workers[0]._producer.peers  # type: ignore[union-attr]
        wait_for(lambda: set(known) == {"127.0.0.1"})
        peer.close()
        context.term()
