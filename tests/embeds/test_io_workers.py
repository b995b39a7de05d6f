"""Batches and drainers: in order, each piece reported once."""

import itertools
import threading

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.embeds.items import digest_of
from vllm_kvpool.embeds.dataplane.io_workers import (
    BATCH_BYTES,
    BUSY_BYTES,
    Drainers,
    DrainLanes,
    batches_of,
)
from vllm_kvpool.embeds.dataplane.row_bytes import RowCopy
from vllm_kvpool.embeds.faults import DRAINER
from vllm_kvpool.embeds.machines.effects import DrainRows
from vllm_kvpool.embeds.protocol.rows import ItemShape, Plane, RowRun


@given(st.lists(st.integers(0, 2 * BATCH_BYTES)))
def test_batches_keep_the_order_and_their_bound(sizes: list[int]) -> None:
    batches = list(batches_of(sizes, lambda nbytes: nbytes))
    assert [nbytes for batch in batches for nbytes in batch] == sizes
    assert all(len(batch) == 1 or sum(batch) <= BATCH_BYTES for batch in batches)
    for batch, following in itertools.pairwise(batches):
        assert sum(batch) + following[0] > BATCH_BYTES, "they would have gone together"


PATIENCE_S = 10.0
SHAPE = ItemShape(8, (Plane("embedding", "uint8", (16,)),))


def test_small_items_keep_one_thread_busy_and_large_ones_are_spread() -> None:
    small = DrainLanes(4)
    assert [small.take(f"{n}", BUSY_BYTES // 4) for n in range(6)] == [0, 0, 0, 0, 1, 1]
    large = DrainLanes(4)
    assert [large.take(f"{n}", 2 * BUSY_BYTES) for n in range(6)] == [0, 1, 2, 3, 0, 1]


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, BUSY_BYTES)) | st.none()))
def test_pieces_of_an_item_are_never_with_two_threads(
    steps: list[tuple[str, int] | None],
) -> None:
    """A piece comes, or (None) the oldest one of some thread ends."""
    turns = DrainLanes(3)
    queues: list[list[tuple[str, int]]] = [[], [], []]
    for step in steps:
        if step is not None:
            queues[turns.take(*step)].append(step)
        elif any(queues):
            turns.end(*max(queues, key=len).pop(0))
        names = [{name for name, _ in queue} for queue in queues]
        assert not (names[0] & names[1])
        assert not (names[0] & names[2])
        assert not (names[1] & names[2])
    for queue in queues:
        for piece in queue:
            turns.end(*piece)
    assert [turns.take(f"{n}", BUSY_BYTES) for n in range(3)] == [0, 1, 2], "nothing is left"


def test_every_piece_is_reported_once_also_one_that_fails() -> None:
    window = np.arange(1024, dtype=np.uint8)
    reported: dict[int, bool] = {}
    all_there = threading.Event()

    failures: list[str] = []

    def done(gid: int, same: bool) -> None:
        assert gid not in reported
        reported[gid] = same
        if len(reported) == 40:
            all_there.set()

    drainers = Drainers(window, 3, done, lambda kind, _: failures.append(kind))
    items = [np.zeros((8, 16), np.uint8) for _ in range(5)]
    for turn in range(8):
        pieces = []
        for number, planes in enumerate(items):
            gid = 1 + turn * len(items) + number
            run = RowRun(turn, 1, 16 * gid)
            good = np.zeros((8, 16), np.uint8)
            good[turn] = window[16 * gid : 16 * gid + 16]
            digests = (digest_of([good], SHAPE, run, gid),)
            if gid % 7 == 0:
                digests = (digests[0] ^ 1,)
            if gid % 11 == 0:
                run = RowRun(turn, 1, window.nbytes)  # a bug of whoever asks
            work = DrainRows(gid, f"{number}", (run,), digests)
            pieces.append((work, RowCopy([planes], SHAPE, (run,), gid)))
        drainers.put(pieces)
    assert all_there.wait(PATIENCE_S)
    assert reported == {gid: bool(gid % 7 and gid % 11) for gid in range(1, 41)}
    assert failures == [DRAINER] * 3
    drainers.close()
