"""Batches and drainers: in order, each piece reported once."""

import itertools
import threading
from collections.abc import Sequence

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.embeds.items import digest_of
from tests.embeds.world import shape_of
from vllm_kvpool.embeds.dataplane.io_workers import BATCH_BYTES, IoWorkers
from vllm_kvpool.embeds.dataplane.tensors import to_host
from vllm_kvpool.embeds.faults import DRAINER, PREPARER, WRITER
from vllm_kvpool.embeds.machines.effects import Allocate, DrainRows, Prepare, Write
from vllm_kvpool.embeds.protocol.messages import SharedWindow, WriteFailed, Wrote, batches_of
from vllm_kvpool.embeds.protocol.rows import ItemShape, RowRun


@given(st.lists(st.integers(0, 2 * BATCH_BYTES)))
def test_batches_keep_the_order_and_their_bound(sizes: list[int]) -> None:
    batches = list(batches_of(sizes, lambda nbytes: nbytes, BATCH_BYTES))
    assert [nbytes for batch in batches for nbytes in batch] == sizes
    assert all(len(batch) == 1 or sum(batch) <= BATCH_BYTES for batch in batches)
    for batch, following in itertools.pairwise(batches):
        assert sum(batch) + following[0] > BATCH_BYTES, "they would have gone together"


PATIENCE_S = 10.0
SHAPE = ItemShape(8, "uint8", (16,))


class Landing:
    """A window in this process alone."""

    nbytes = 1024
    window = SharedWindow("host", "path", nbytes)

    def __init__(self) -> None:
        self.array = np.arange(self.nbytes, dtype=np.uint8)

    def close(self) -> None: ...


class Reports:
    """Results of the I/O workers by number; each may be reported only once."""

    def __init__(self, expected: int) -> None:
        self.expected = expected
        self.results: dict[int, object] = {}
        self.failures: list[str] = []
        self.all_there = threading.Event()

    def _reported(self, number: int, result: object) -> None:
        assert number not in self.results
        self.results[number] = result
        if len(self.results) == self.expected:
            self.all_there.set()

    def drained(self, gid: int, same: bool) -> None:
        self._reported(gid, same)

    def prepared(self, item_id: int, digest: str) -> None:
        self._reported(item_id, digest)

    def written(self, result: Wrote | WriteFailed) -> None:
        self._reported(result.gid, result)

    def work_failed(self, kind: str, error: BaseException) -> None:
        self.failures.append(kind)


def test_every_piece_is_reported_once_also_one_that_fails() -> None:
    landing, reports = Landing(), Reports(40)
    workers = IoWorkers(landing, None)
    workers.start(reports, writers=0, drainers=3)
    for number in range(5):
        workers.perform(Allocate(f"{number}", SHAPE))
    for turn in range(8):
        for number in range(5):
            gid = 1 + turn * 5 + number
            run = RowRun(turn, 1, 16 * gid)
            good = np.zeros((8, 16), np.uint8)
            good[turn] = landing.array[16 * gid : 16 * gid + 16]
            digests = (digest_of(good, run, gid),)
            if gid % 7 == 0:
                digests = (digests[0] ^ 1,)
            if gid % 11 == 0:
                run = RowRun(turn, 1, landing.nbytes)  # a bug of whoever asks
            workers.perform(DrainRows(gid, f"{number}", (run,), digests))
        workers.begin()
    assert reports.all_there.wait(PATIENCE_S)
    assert reports.results == {gid: bool(gid % 7 and gid % 11) for gid in range(1, 41)}
    assert reports.failures == [DRAINER] * 3
    workers.close()


class BrokenWriter:
    """A writer with a bug."""

    def write(self, *_: object) -> Sequence[tuple[int, ...]]:
        raise ZeroDivisionError("a bug")

    def close(self) -> None: ...


class BrokenCopy:
    """A device that has lost what the encoder computed."""

    def wait(self) -> object:
        raise RuntimeError("the device is gone")


def test_threads_that_meet_a_bug_report_failures_and_go_on() -> None:
    reports, workers = Reports(3), IoWorkers(None, BrokenWriter())
    workers.start(reports, writers=1, drainers=0)
    workers.keep(1, shape_of(1), BrokenCopy())  # type: ignore[arg-type]
    workers.perform(Prepare(1))
    workers.keep(2, shape_of(1), to_host(torch.zeros(1)))
    workers._outputs[2].data = np.zeros((1, 1), np.uint8)
    for gid in (7, 8):
        workers.perform(Write(5, gid, 2, SharedWindow("host", "path", 8), (RowRun(0, 1, 0),)))
    workers.begin()
    workers.close()
    results = reports.results
    assert results.pop(1) == ""
    assert all(isinstance(each, WriteFailed) and not each.quiesced for each in results.values())
    assert results.keys() == {7, 8}
    assert sorted(reports.failures) == [PREPARER, WRITER]
