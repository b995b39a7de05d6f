"""The queue from which a worker's process of vLLM reads its steps."""

from collections.abc import Iterator
from contextlib import contextmanager

from vllm.distributed.device_communicators.shm_broadcast import MessageQueue


@contextmanager
def step_queue() -> Iterator[tuple[MessageQueue, MessageQueue]]:
    """Yield the engine's end, which writes, and the worker's, which reads; close both."""
    writer = MessageQueue(1, 1)
    reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
    try:
        yield writer, reader
    finally:
        for end in (reader, writer):
            assert end.local_socket is not None
            end.local_socket.context.destroy(linger=0)
