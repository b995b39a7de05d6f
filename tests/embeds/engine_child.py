"""An engine in a process of its own, forked from one that has imported everything."""

import hashlib
import multiprocessing
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import NamedTuple

import pytest
import torch

from tests.embeds.engines import Engine, embeddings
from vllm_kvpool.config import EmbedsConfig, Transport
from vllm_kvpool.embeds.dataplane.row_bytes import RowCopy
from vllm_kvpool.embeds.dataplane.shared_memory import SharedWriter
from vllm_kvpool.embeds.protocol.messages import PeerRole, SharedWindow

HEARTBEAT_S = 0.3
SLOW_WRITE_S = 0.002

forks = multiprocessing.get_context("forkserver")
forks.set_forkserver_preload([__name__])


class Order(NamedTuple):
    """`encode` an item of so many rows, `receive` one from a peer, or `begin` to."""

    verb: str
    mm_hash: str
    rows: int
    peer: str = ""


def slow_writes(patch: pytest.MonkeyPatch) -> None:
    """A network of so many round trips a second: transfers that last, and cost little."""
    usual = SharedWriter.write

    def write(
        self: SharedWriter, window: SharedWindow, writes: Sequence[RowCopy]
    ) -> list[tuple[int, ...]]:
        time.sleep(SLOW_WRITE_S)
        return usual(self, window, writes)

    patch.setattr(SharedWriter, "write", write)


def digest_of(tensor: torch.Tensor) -> str:
    return hashlib.blake2b(tensor.numpy().tobytes(), digest_size=16).hexdigest()


def answer_to(engine: Engine, order: Order) -> str:
    match order.verb:
        case "encode":
            engine.encode(order.mm_hash, embeddings(order.rows))
            return "encoded"
        case "receive":
            (tensor,) = engine.receive(order.mm_hash, order.rows, peers=(order.peer,))
            return digest_of(tensor)
        case _:
            view = engine.request("begin", (order.mm_hash, order.rows), peers=(order.peer,))
            engine.awaits(view)
            return "begun"


def serve(role: PeerRole, port: int, arena_bytes: int, orders: Connection) -> None:
    """The child's whole life; it ends with the connection."""
    slow_writes(pytest.MonkeyPatch())
    config = EmbedsConfig(
        transport=Transport.LOCAL, heartbeat_s=HEARTBEAT_S, arena_bytes=arena_bytes
    )
    with Engine(role, ports=[port], configs=[config]) as engine:
        orders.send("ready")
        while True:
            try:
                orders.send(answer_to(engine, orders.recv()))
            except EOFError:
                return
