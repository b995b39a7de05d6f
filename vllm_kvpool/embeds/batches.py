"""Small pieces of work in order, together as far as that is worth a thread's waking (pure)."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

BATCH_BYTES = 1 << 20  # copied, they take long beside the waking of a thread

W = TypeVar("W")


def batches_of(
    works: Iterable[W], nbytes_of: Callable[[W], int], most_bytes: int = BATCH_BYTES
) -> Iterator[list[W]]:
    """Batches of at most so many bytes, or of one piece."""
    batch: list[W] = []
    batch_bytes = 0
    for work in works:
        nbytes = nbytes_of(work)
        if batch and batch_bytes + nbytes > most_bytes:
            yield batch
            batch, batch_bytes = [], 0
        batch.append(work)
        batch_bytes += nbytes
    if batch:
        yield batch
