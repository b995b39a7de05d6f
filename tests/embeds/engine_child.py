"""An engine in a process of its own: reads orders as JSON lines, answers each with a line.

python -m tests.embeds.engine_child ROLE PORT ARENA_BYTES
"""

import hashlib
import sys

import msgspec
import torch

from vllm_kvpool.config import EmbedsConfig, Transport
from vllm_kvpool.embeds.protocol.messages import PeerRole

from .engines import Engine, embeddings

HEARTBEAT_S = 0.3


class Order(msgspec.Struct):
    """`encode` an item of so many rows, `receive` one from a peer, or say `counts`."""

    verb: str
    mm_hash: str = ""
    rows: int = 0
    seed: int = 0
    peer: str = ""


def digest_of(tensor: torch.Tensor) -> str:
    return hashlib.blake2b(tensor.numpy().tobytes(), digest_size=16).hexdigest()


def answer_to(engine: Engine, order: Order) -> object:
    match order.verb:
        case "encode":
            engine.encode(order.mm_hash, embeddings(order.rows, seed=order.seed))
            return "encoded"
        case "receive":
            ((tensor,),) = engine.receive(order.mm_hash, order.rows, peers=(order.peer,))
            return digest_of(tensor)
        case "begin":
            view = engine.request("begin", (order.mm_hash, order.rows), peers=(order.peer,))
            engine.awaits(view)
            return "begun"
        case _:
            return engine.counts()


def main() -> None:
    role, port, arena_bytes = PeerRole(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    config = EmbedsConfig(
        transport=Transport.LOCAL, heartbeat_s=HEARTBEAT_S, arena_bytes=arena_bytes
    )
    with Engine(role, ports=[port], configs=[config]) as engine:
        print("READY", flush=True)
        for line in sys.stdin:
            answer = answer_to(engine, msgspec.json.decode(line, type=Order))
            print(msgspec.json.encode(answer).decode(), flush=True)


if __name__ == "__main__":
    main()
