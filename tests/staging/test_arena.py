"""The arena: equal aligned slots in one registered block of memory, whose commit changes no
content."""

import ctypes
import logging
import mmap
import os
import threading

import numpy as np
import pytest

from tests.support.threads import NewThreads
from vllm_kvpool.errors import ConfigError
from vllm_kvpool.staging import arena as arena_module
from vllm_kvpool.staging.arena import (
    HUGE_PAGE_BYTES,
    MAX_SLOTS,
    MIN_SLOTS,
    SLOT_ALIGNMENT,
    Arena,
)
from vllm_kvpool.staging.slots import Slot
from vllm_kvpool.storage.contents.cell_format import HEADER_BYTES

LIMIT_S = 30.0
CELL_BYTES = 5000  # two pages
SLOT_BYTES = 2 * SLOT_ALIGNMENT
NO_ADVICE = 9999  # an advice that every kernel refuses


def fill(arena: Arena, slot: int) -> None:
    arena.buffers([Slot(slot)], [arena.slot_bytes])[0].view[:] = pattern(arena, slot)


def pattern(arena: Arena, slot: int) -> bytes:
    return bytes([slot % 255 + 1]) * arena.slot_bytes


def held(arena: Arena, slot: int) -> bytes:
    return bytes(arena.buffers([Slot(slot)], [arena.slot_bytes])[0].view)


def num_resident_pages(arena: Arena) -> int:
    """Return the number of the arena's pages that the system has backed with memory."""
    count = -(-arena.whole.nbytes // mmap.PAGESIZE)
    pages = (ctypes.c_ubyte * count)()
    address, nbytes = ctypes.c_void_p(arena.whole.address), ctypes.c_size_t(arena.whole.nbytes)
    assert ctypes.CDLL(None).mincore(address, nbytes, pages) == 0
    return sum(page & 1 for page in pages)


def wait_for_commit() -> None:
    for thread in threading.enumerate():
        if thread.name == "kvpool-arena":
            thread.join(LIMIT_S)
            assert not thread.is_alive()


@pytest.fixture(params=["populated", "touched"])
def commit(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Commit memory as new kernels can ("populated"), or as on old kernels, which refuse
    ("touched")."""
    if request.param == "touched":
        monkeypatch.setattr(arena_module, "_MADV_POPULATE_WRITE", NO_ADVICE)
    return str(request.param)


# Slots


@pytest.mark.parametrize("cell_bytes", [1, 4095, 4096, 4097, CELL_BYTES, 100_000])
def test_slots_are_aligned_apart_and_large_enough(cell_bytes: int) -> None:
    arena = Arena(3 << 20, cell_bytes, host_nbytes=1 << 20)
    assert arena.slot_bytes % SLOT_ALIGNMENT == 0
    assert cell_bytes <= arena.slot_bytes < cell_bytes + SLOT_ALIGNMENT
    assert arena.num_slots - arena.num_kept == (3 << 20) // arena.slot_bytes
    assert arena.num_kept == (1 << 20) // arena.slot_bytes
    assert arena.whole.nbytes == arena.num_slots * arena.slot_bytes
    for slot in range(arena.num_slots):
        buffer = arena.buffers([Slot(slot)], [cell_bytes])[0]
        assert buffer.nbytes == cell_bytes
        assert buffer.address == arena.whole.address + slot * arena.slot_bytes
        assert buffer.address % SLOT_ALIGNMENT == 0
        assert arena.payload_addresses([Slot(slot)]).tolist() == [buffer.address + HEADER_BYTES]


def test_an_address_is_where_the_view_is() -> None:
    arena = Arena(1 << 20, CELL_BYTES, host_nbytes=1 << 20)
    for slot in range(arena.num_slots):
        fill(arena, slot)
    for slot in range(arena.num_slots):
        buffer = arena.buffers([Slot(slot)], [CELL_BYTES])[0]
        assert ctypes.string_at(buffer.address, CELL_BYTES) == buffer.view
        assert held(arena, slot) == pattern(arena, slot)


def test_a_buffer_keeps_the_memory_alive() -> None:
    view = Arena(1 << 20, CELL_BYTES).buffers([Slot(3)], [CELL_BYTES])[0].view
    view[:] = bytes([7]) * CELL_BYTES
    assert set(view) == {7}


def test_the_slots_for_cells_on_their_way_are_bounded() -> None:
    arena = Arena((MAX_SLOTS + 5) * SLOT_ALIGNMENT, 1, host_nbytes=2 * SLOT_ALIGNMENT)
    assert (arena.num_slots, arena.num_kept) == (MAX_SLOTS + 2, 2)


# Sizes that do not fit


def test_too_little_staging_says_how_much_is_enough() -> None:
    enough = MIN_SLOTS * SLOT_BYTES
    with pytest.raises(ConfigError, match=f"set staging_bytes to {enough} or more"):
        Arena(enough - 1, CELL_BYTES)
    assert Arena(enough, CELL_BYTES).num_slots == MIN_SLOTS


def test_too_little_host_memory_says_how_much_is_enough() -> None:
    with pytest.raises(ConfigError, match=f"give it {SLOT_BYTES} bytes or more"):
        Arena(1 << 20, CELL_BYTES, host_nbytes=SLOT_BYTES - 1)
    assert Arena(1 << 20, CELL_BYTES, host_nbytes=SLOT_BYTES).num_kept == 1
    assert Arena(1 << 20, CELL_BYTES, host_nbytes=0).num_kept == 0


def test_memory_that_the_system_refuses_names_the_options() -> None:
    """An example is more memory than the machine can address. The kernel's "Cannot allocate memory"
    names no option."""
    with pytest.raises(ConfigError, match=rf"staging_bytes={1 << 20} and host://{1 << 55} ask for"):
        Arena(1 << 20, CELL_BYTES, host_nbytes=1 << 55)


# Committing


def test_memory_for_cells_on_their_way_is_committed_at_once(commit: str) -> None:
    arena = Arena(1 << 20, CELL_BYTES)
    assert num_resident_pages(arena) == arena.whole.nbytes // mmap.PAGESIZE
    threads = NewThreads()
    arena.commit_in_background()  # nothing is left to commit
    assert not threads.alive("kvpool-arena")
    assert not np.frombuffer(arena.whole.view, np.uint8).any()


def test_committing_the_rest_changes_nothing_that_slots_hold(
    commit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every slot is in use before its memory is committed."""
    arena = Arena(1 << 20, CELL_BYTES, host_nbytes=2 << 20)
    monkeypatch.setattr(arena_module, "COMMIT_STEP_BYTES", 10_000)  # no multiple of a page
    steps = []
    really = arena_module._madvise

    def madvise(address: int, nbytes: int, advice: int) -> bool:
        start = address - arena.whole.address
        assert 0 <= start < start + nbytes <= arena.whole.nbytes
        assert start % mmap.PAGESIZE == 0
        steps.append((start, start + nbytes))
        first, last = start // arena.slot_bytes, (start + nbytes - 1) // arena.slot_bytes
        for slot in range(first, last + 1):
            fill(arena, slot)
        return really(address, nbytes, advice)

    monkeypatch.setattr(arena_module, "_madvise", madvise)
    arena.commit_in_background()
    wait_for_commit()
    assert len(steps) > 200
    first_kept = arena.num_slots - arena.num_kept
    for slot in range(first_kept, arena.num_slots):
        assert held(arena, slot) == pattern(arena, slot)
    # Piece by piece, to the end, without a gap.
    assert steps[0][0] <= first_kept * arena.slot_bytes
    assert all(start <= stop for (start, _), (_, stop) in zip(steps[1:], steps, strict=False))
    assert steps[-1][1] == arena.whole.nbytes


def test_committing_the_rest_gives_it_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "COMMIT_STEP_BYTES", 1 << 20)
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", mmap.MADV_NOHUGEPAGE)
    arena = Arena(1 << 20, CELL_BYTES, host_nbytes=8 << 20)
    all_pages = arena.whole.nbytes // mmap.PAGESIZE
    assert num_resident_pages(arena) < all_pages
    arena.commit_in_background()
    wait_for_commit()
    assert num_resident_pages(arena) == all_pages


# Huge pages


def test_without_transparent_huge_pages_there_is_memory(
    commit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", NO_ADVICE)
    arena = Arena(1 << 20, CELL_BYTES, host_nbytes=1 << 20)
    fill(arena, arena.num_slots - 1)
    assert held(arena, arena.num_slots - 1) == pattern(arena, arena.num_slots - 1)


def test_without_huge_pages_set_aside_a_host_tier_has_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    of_32_bytes = arena_module._MAP_HUGETLB | 5 << 26  # more than any machine has
    monkeypatch.setattr(arena_module, "_MAP_HUGETLB", of_32_bytes)
    with caplog.at_level(logging.INFO, arena_module.__name__):
        arena = Arena(1 << 20, CELL_BYTES, host_nbytes=1 << 20)
    assert "no huge pages are set aside" in caplog.text
    fill(arena, arena.num_slots - 1)


@pytest.mark.parametrize("shared", [False, True])
def test_huge_pages_beyond_the_control_group_are_not_taken(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, *, shared: bool
) -> None:
    """Such pages can be mapped, but touching the first would kill the process (SIGBUS)."""
    monkeypatch.setattr(arena_module, "_MAP_HUGETLB", 0)  # simulates enough huge pages
    monkeypatch.setattr(os, "MFD_HUGETLB", 0)
    monkeypatch.setattr(arena_module, "huge_pages_left", lambda: HUGE_PAGE_BYTES)
    with caplog.at_level(logging.INFO, arena_module.__name__):
        arena = Arena(1 << 20, CELL_BYTES, host_nbytes=2 << 20, shared=shared)
    assert "in huge pages" not in caplog.text
    assert len(arena._memory) == 3 << 20
    arena.close()


def test_huge_pages_are_whole_and_only_for_a_host_tier(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(arena_module, "_MAP_HUGETLB", 0)  # simulates enough huge pages
    with caplog.at_level(logging.INFO, arena_module.__name__):
        assert len(Arena(1 << 20, CELL_BYTES)._memory) == 1 << 20
        assert caplog.text == ""
        arena = Arena(1 << 20, CELL_BYTES, host_nbytes=2 << 20)
    assert "4 MiB of staging memory in huge pages" in caplog.text
    assert len(arena._memory) == 2 * HUGE_PAGE_BYTES
    assert arena.whole.nbytes == arena.num_slots * SLOT_BYTES <= 3 << 20
