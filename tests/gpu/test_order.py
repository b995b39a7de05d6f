"""Streams, events and buffers of the Triton copier: nothing relies on work being done early.

`LateStreams` runs everything as late as allowed, in random order. Work that no stream or event
orders fails for some seed.
"""

import random

import numpy as np
import pytest

from tests.gpu.conftest import Interpreter
from tests.staging.page_bench import POISON, SLOT_POISON, Cell, Pages, block_table, random_rows
from tests.support.late_streams import LateStreams
from vllm_kvpool.layout.pages import SlabMove

pytestmark = pytest.mark.triton

CHUNK = 32
BUFFER_BYTES = 1024  # one cell
SEEDS = range(6)


class Rig:
    """A copier over late streams, and cells of one chunk each, more of them than buffers."""

    def __init__(self, seed: int) -> None:
        from vllm_kvpool.staging.copy_triton import TritonCopier

        self.streams = LateStreams(seed)
        self.pages = Pages(num_layers=1, num_heads=4, num_ids=12, key_dim=8, value_dim=8)
        self.ids = block_table(self.pages, 2 * CHUNK)
        self.copier = TritonCopier(self.pages.layers, self.streams, BUFFER_BYTES)
        self.rows = random_rows(self.pages, 2 * CHUNK)
        where = self.pages.indices(self.ids, 0, 2 * CHUNK)
        self.image = self.pages.read()
        self.image[where] = self.rows
        self.cells = [
            Cell(self.pages, self.ids, start, (start, start + CHUNK), heads, (0, 1), CHUNK)
            for start in (0, CHUNK)
            for heads in ((0, 1), (1, 2), (2, 3), (3, 4))
        ]

    @property
    def moves(self) -> list[SlabMove]:
        return [cell.move() for cell in self.cells]

    def check_slots(self) -> None:
        for cell in self.cells:
            np.testing.assert_array_equal(cell.payload, cell.part_of(self.rows))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_gather_comes_after_what_the_model_was_given_before_the_fence(
    interpreter: Interpreter, seed: int
) -> None:
    rig = Rig(seed)
    rig.streams.model.do(lambda: rig.pages.write(rig.image))
    rig.streams.model_event().synchronize()
    rig.copier.gather(rig.moves)
    rig.check_slots()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_scatter_comes_after_what_the_model_was_given_before_the_fence(
    interpreter: Interpreter, seed: int
) -> None:
    """Otherwise, writes that are still queued would spoil blocks that have a new owner."""
    rig = Rig(seed)
    for cell in rig.cells:
        cell.payload[:] = cell.part_of(rig.rows)
    rig.streams.model.do(rig.pages.poison)
    rig.streams.model_event().synchronize()
    rig.copier.scatter(rig.moves)
    np.testing.assert_array_equal(rig.pages.read(), rig.image)


def test_a_fence_waits_for_nothing(interpreter: Interpreter) -> None:
    rig = Rig(0)
    rig.streams.model.do(lambda: rig.pages.write(rig.image))
    rig.streams.model_event()
    assert (rig.pages.read() == POISON).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_what_the_model_is_given_after_the_fence_is_not_waited_for(
    interpreter: Interpreter, seed: int
) -> None:
    rig = Rig(seed)
    rig.pages.write(rig.image)
    fence = rig.streams.model_event()
    rig.streams.model.wait(rig.streams.never())
    rig.streams.model_event()  # the fence of a later plan
    fence.synchronize()
    rig.copier.gather(rig.moves)
    rig.check_slots()


@pytest.mark.parametrize("seed", SEEDS)
def test_calls_one_after_another_in_both_directions(interpreter: Interpreter, seed: int) -> None:
    rig = Rig(seed)
    order = random.Random(seed)
    for _ in range(3):
        rig.pages.write(rig.image)
        for cell in rig.cells:
            cell.slot[:] = SLOT_POISON
        order.shuffle(rig.cells)
        rig.copier.gather(rig.moves)
        rig.check_slots()
        rig.pages.poison()
        rig.copier.scatter(rig.moves)
        np.testing.assert_array_equal(rig.pages.read(), rig.image)


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_is_on_its_way_when_a_call_fails(
    interpreter: Interpreter, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots may get a new owner as soon as a call has returned, also with an error."""
    rig = Rig(seed)
    rig.pages.write(rig.image)
    streams = [buffer.stream for buffer in rig.copier._buffers]

    def fail(*args: object, **constants: object) -> None:
        raise RuntimeError("out of memory")

    launches = iter([streams[1].launch, fail])
    monkeypatch.setattr(streams[1], "launch", lambda *a, **k: next(launches)(*a, **k))
    with pytest.raises(RuntimeError, match="out of memory"):
        rig.copier.gather(rig.moves)
    done = [cell.slot.copy() for cell in rig.cells]
    for stream in streams:
        stream.record().synchronize()
    for cell, before in zip(rig.cells, done, strict=True):
        np.testing.assert_array_equal(cell.slot, before)


def test_device_memory_is_bounded_and_taken_once(interpreter: Interpreter) -> None:
    rig = Rig(0)
    taken: list[int] = []
    rig.streams.device_memory = taken.append  # type: ignore[method-assign,assignment]
    rig.copier.gather(rig.moves)
    rig.copier.scatter(rig.moves)
    assert taken == []
