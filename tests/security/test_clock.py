"""A file store whose clock jumps, or that holds files of a clock that was wrong.

Only the order of eviction follows the wall clock. Where the clock has jumped, that order is lost
for a while; which cells are whole, what is charged and who holds a lock never depend on it.
"""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.security.planted import CELL, FILE, MIB, NAMESPACE
from tests.support.buffers import make_buffer
from tests.support.store_contract import get_one, key_of
from vllm_kvpool.storage.base import ChunkRef, GetOutcome, PutOutcome
from vllm_kvpool.storage.eviction import POLICIES
from vllm_kvpool.storage.file.paths import HeldLock
from vllm_kvpool.storage.file.space import FORMAT_DIR, WriterDirectory
from vllm_kvpool.storage.file.store import FileStore

S = 10**9
DAY = 24 * 3600
JUMPS = (DAY, -DAY, 3650 * DAY, -3650 * DAY)
FITS = MIB // FILE


class WallClock:
    """A clock that advances a second at each reading, and jumps when the test says so."""

    def __init__(self) -> None:
        self.now_s = 1_700_000_000

    def __call__(self) -> int:
        self.now_s += 1
        return self.now_s * S


class Bench:
    """A store of one process with a clock of its own."""

    def __init__(self, root: Path, policy: str) -> None:
        self.root = root
        self.clock = WallClock()
        self.store = FileStore(str(root), MIB, policy=POLICIES[policy], clock_ns=self.clock)
        self._buffer = make_buffer(CELL)

    def put(self, start: int, stop: int) -> None:
        """Put each cell in a batch of its own, as lanes do."""
        for number in range(start, stop):
            outcomes = self.store.put([key_of(NAMESPACE, number)], [self._buffer], [ChunkRef("g")])
            assert outcomes == [PutOutcome.STORED], number

    def get(self, *numbers: int) -> None:
        for number in numbers:
            get_one(self.store, key_of(NAMESPACE, number), self._buffer)

    def present(self, start: int, stop: int) -> set[int]:
        keys = [key_of(NAMESPACE, number) for number in range(start, stop)]
        return {
            n for n, there in zip(range(start, stop), self.store.exists(keys), strict=True) if there
        }


@pytest.fixture(params=[*POLICIES])
def bench(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Bench]:
    bench = Bench(tmp_path / "pool", request.param)
    yield bench
    bench.store.close()


@pytest.mark.parametrize("jump_s", JUMPS)
def test_after_a_jump_what_is_used_stays_and_the_rest_makes_room(bench: Bench, jump_s: int) -> None:
    bench.put(0, FITS)
    bench.clock.now_s += jump_s
    bench.put(100, 100 + 3 * FITS)
    # The newest cells are there, except cells of the scan that noticed the jump of the clock.
    newest = bench.present(100 + 2 * FITS, 100 + 3 * FITS)
    assert len(newest) >= FITS - 4
    assert max(newest) == 99 + 3 * FITS


@pytest.mark.parametrize("jump_s", JUMPS)
def test_a_clock_that_jumps_there_and_back_does_no_lasting_harm(bench: Bench, jump_s: int) -> None:
    for round_number in range(3):
        bench.put(1000 * round_number, 1000 * round_number + FITS)
        bench.clock.now_s += jump_s
        bench.get(*range(1000 * round_number, 1000 * round_number + 4))
        bench.put(1000 * round_number + 100, 1000 * round_number + 104)
        bench.clock.now_s -= jump_s
    bench.put(9000, 9000 + 2 * FITS)
    assert len(bench.present(9000 + FITS, 9000 + 2 * FITS)) >= FITS - 4


@pytest.mark.parametrize("jump_s", JUMPS)
def test_locks_and_writers_do_not_depend_on_the_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump_s: int
) -> None:
    """A held lock is not stolen and a free lock is acquired, whatever the time."""
    root = tmp_path / "pool"
    store = FileStore(str(root), MIB)
    writers = str(root / FORMAT_DIR / "writers")
    real_ns, real_s = time.time_ns, time.time
    monkeypatch.setattr(time, "time_ns", lambda: real_ns() + jump_s * S)
    monkeypatch.setattr(time, "time", lambda: real_s() + jump_s)
    lock = HeldLock(str(root / FORMAT_DIR / "rebuild.lock"))
    assert lock.take()
    assert not HeldLock(str(root / FORMAT_DIR / "rebuild.lock")).take()
    lock.release()
    assert list(store._space._dead_writers()) == []
    WriterDirectory(writers).close()
    again = FileStore(str(root), MIB)
    assert again.put([key_of(NAMESPACE, 0)], [make_buffer(CELL)], [ChunkRef("g")]) == [
        PutOutcome.STORED
    ]
    assert get_one(store, key_of(NAMESPACE, 0), make_buffer(CELL)) is GetOutcome.OK
    again.close()
    store.close()
