"""Orders of a scheduler count only with the token that its own worker has drawn."""

from collections.abc import Iterator
from contextlib import closing
from typing import cast

import msgspec
import pytest
import torch
import zmq

from tests.embeds.engines import Engine, embeddings, wait_for
from tests.embeds.sessions import frame
from vllm_kvpool.embeds.control import Control
from vllm_kvpool.embeds.protocol.messages import (
    MAX_VERSION,
    Expect,
    Forget,
    Goodbye,
    Heartbeat,
    HelloReject,
    Message,
    PeerHello,
    PeerRole,
    Push,
    Reorder,
    Requested,
    WeightsChanged,
    decode,
    decode_body,
    encode_body,
)
from vllm_kvpool.errors import ProtocolError

ORDERS: list[Message] = [
    Expect("other", 0),
    Reorder("image", 1),
    Requested(("forged",)),
    Forget("image"),
    Push("image", ("tcp://127.0.0.1:1",)),
    WeightsChanged(MAX_VERSION, "forged"),
    Heartbeat(answer=True),  # the engine's own scheduler sends others
]


class FalseScheduler:
    """Another process of this machine, which knows all that a hello's answer tells."""

    def __init__(self, engine: Engine) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set(zmq.LINGER, 0)
        self._socket.connect(engine.endpoint)
        consumer = msgspec.structs.replace(
            engine.workers[0]._control._peers.hello, incarnation="false", role=PeerRole.CONSUMER
        )
        self.told = cast("PeerHello", self.ask(consumer))

    def ask(self, *bodies: Message) -> Message:
        """Return the first message of the answer. A heartbeat may come before the answer."""
        self._socket.send(frame("false", *bodies))
        while True:
            assert self._socket.poll(10_000)
            body = decode_body(decode(self._socket.recv()).bodies[0])
            if not isinstance(body, Heartbeat):
                return body

    def order(self, order: Message, token: bytes) -> Message:
        """Present itself as the scheduler, and give an order."""
        hello = msgspec.structs.replace(
            self.told, incarnation="false", role=PeerRole.SCHEDULER, answer=False, token=token
        )
        return self.ask(hello, order)

    def close(self) -> None:
        self._socket.close()
        self._context.term()


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine(PeerRole.BOTH) as engine:
        yield engine


def test_every_order_to_a_worker_is_in_the_table() -> None:
    """A new message of the scheduler is tried here."""
    of_scheduler = {each for each in Message.__args__ if (each.__doc__ or "").startswith("S→")}
    assert of_scheduler == {type(each) for each in ORDERS} - {Heartbeat}


@pytest.mark.parametrize("token", [b"", b"guess" * 3, b"x" * 64], ids=["none", "short", "long"])
@pytest.mark.parametrize("order", ORDERS, ids=lambda each: type(each).__name__)
def test_order_of_another_process_of_this_machine_is_refused(
    engine: Engine, order: Message, token: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`WeightsChanged` took an encoder out of service for good."""
    engine.awaits(engine.request("r", ("image", 4)))
    orders: list[Message] = []
    monkeypatch.setattr(
        Control, "_on_scheduler_message", lambda self, body, now: orders.append(body)
    )
    with closing(FalseScheduler(engine)) as false:
        assert false.told.token == b""
        assert isinstance(false.order(order, token), HelloReject)
        control = engine.workers[0]._control
        wait_for(lambda: control.counts["false_schedulers"] == 1)
        assert order not in orders
        assert control.weights_version == 0


def test_encoder_serves_on_after_a_false_scheduler() -> None:
    with Engine(PeerRole.PRODUCER) as producer, Engine(PeerRole.CONSUMER) as consumer:
        for each in (producer, consumer):
            with closing(FalseScheduler(each)) as false:
                for order in ORDERS:
                    false.order(order, b"")
                false.order(Goodbye(), b"")
        producer.encode("image", embeddings(4), to=(consumer.endpoint,))
        (got,) = consumer.receive("image", 4)
        assert torch.equal(got, embeddings(4))


def test_token_of_one_worker_is_no_proof_to_another() -> None:
    with Engine(PeerRole.CONSUMER, ranks=2) as engine, closing(FalseScheduler(engine)) as false:
        assert isinstance(false.order(Forget("a"), engine.workers[1].scheduler_token), HelloReject)


@pytest.mark.parametrize("version", [-1, MAX_VERSION + 1, 1 << 62])
def test_version_of_the_weights_is_bounded(version: int) -> None:
    with pytest.raises(ProtocolError):
        decode_body(encode_body(WeightsChanged(version, "")))
