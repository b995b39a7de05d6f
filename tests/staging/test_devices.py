"""Page-locked staging memory, with a recording locker in place of NVIDIA's driver."""

import logging
import threading
from dataclasses import dataclass, field

import pytest

from vllm_kvpool.staging import arena as arena_module
from vllm_kvpool.staging.arena import Arena
from vllm_kvpool.staging.devices import PageLock
from vllm_kvpool.storage.base import Buffer

CELL_BYTES = 5000


@dataclass
class Accounts:
    """Stands in for `CudaLocker`: records its calls, and refuses from the `refuse_at`-th on."""

    refuse_at: int = 10**9
    locked: dict[int, int] = field(default_factory=dict)
    calls: int = 0

    def lock(self, address: int, nbytes: int) -> str:
        assert address not in self.locked
        self.calls += 1
        if self.calls >= self.refuse_at:
            return "out of memory"
        self.locked[address] = nbytes
        return ""

    def unlock(self, address: int) -> None:
        del self.locked[address]


def test_every_slot_is_locked_in_one_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "COMMIT_STEP_BYTES", 3 * 8192 + 100)
    arena = Arena(1 << 20, CELL_BYTES, host_nbytes=1 << 20)
    accounts = Accounts()
    page_lock = PageLock(accounts)
    arena.commit_in_background(page_lock.lock)
    [thread] = arena._threads
    thread.join(30)
    assert arena.close()
    ends = [arena.whole.address]
    for address, nbytes in accounts.locked.items():
        assert address == ends[-1]
        ends.append(address + nbytes)
    assert ends[-1] == arena.whole.address + arena.whole.nbytes
    assert len(ends) > 10
    assert all((end - arena.whole.address) % arena.slot_bytes == 0 for end in ends)
    page_lock.close()
    assert accounts.locked == {}


def test_memory_that_is_committed_already_is_locked_too() -> None:
    arena = Arena(1 << 20, CELL_BYTES)
    accounts = Accounts()
    arena.commit_in_background(PageLock(accounts).lock)
    [thread] = arena._threads
    thread.join(30)
    assert accounts.locked == {arena.whole.address: arena.whole.nbytes}


def test_a_refusal_is_one_warning_and_the_end_of_trying(caplog: pytest.LogCaptureFixture) -> None:
    accounts = Accounts(refuse_at=2)
    page_lock = PageLock(accounts)
    for address in (4096, 8192, 12288):
        page_lock.lock(Buffer(address, memoryview(bytearray(4096))))
    assert [(r.levelno, "out of memory" in r.message) for r in caplog.records] == [
        (logging.WARNING, True)
    ]
    assert accounts.calls == 2
    page_lock.close()
    assert accounts.locked == {}


def test_closing_an_arena_ends_its_thread_between_two_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(arena_module, "COMMIT_STEP_BYTES", 8192)
    arena = Arena(1 << 20, CELL_BYTES, host_nbytes=1 << 20)
    begun, go_on = threading.Event(), threading.Event()
    parts = []

    def slow(part: Buffer) -> None:
        parts.append(part)
        begun.set()
        assert go_on.wait(30)

    arena.commit_in_background(slow)
    assert begun.wait(30)
    monkeypatch.setattr(arena_module, "CLOSE_WAIT_S", 0.01)
    assert not arena.close()  # its thread is in the middle of a part
    go_on.set()
    monkeypatch.setattr(arena_module, "CLOSE_WAIT_S", 30.0)
    assert arena.close()
    assert len(parts) == 1
