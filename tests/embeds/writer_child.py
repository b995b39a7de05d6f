"""A producer in a process of its own: reads writes as JSON lines, answers with their digests.

python -m tests.embeds.writer_child TRANSPORT STAGING_BYTES
"""

import sys

import msgspec

from vllm_kvpool.config import Transport
from vllm_kvpool.embeds.dataplane.row_bytes import WriteError
from vllm_kvpool.embeds.dataplane.transports import open_writer
from vllm_kvpool.embeds.protocol.messages import Window
from vllm_kvpool.embeds.protocol.rows import ItemShape, RowRun

from .items import item_of, write_runs


class Order(msgspec.Struct):
    """An order to write the item made from `item_seed`."""

    window: Window
    shape: ItemShape
    item_seed: int
    runs: list[tuple[int, int, int]]
    seed: int


class Answer(msgspec.Struct):
    """The result of a write; `error` is empty on success."""

    digests: tuple[int, ...] = ()
    error: str = ""
    quiesced: bool = True


def main() -> None:
    writer = open_writer(Transport(sys.argv[1]), int(sys.argv[2]), host="127.0.0.1")
    for line in sys.stdin:
        order = msgspec.json.decode(line, type=Order)
        item = item_of(order.shape, order.item_seed)
        runs = [RowRun(*run) for run in order.runs]
        try:
            answer = Answer(write_runs(writer, order.window, item, order.shape, runs, order.seed))
        except WriteError as error:
            answer = Answer((), str(error), error.quiesced)
        print("ANSWER", msgspec.json.encode(answer).decode(), flush=True)
    writer.close()


if __name__ == "__main__":
    main()
