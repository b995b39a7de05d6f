"""Rows into a window and out of it, over both transports; Mooncake for real and with faults.

`fake` is a Mooncake engine that ends writes as a test says; marked tests use the real one.
"""

import ctypes
import gc
import itertools
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.fakes import FakeClock
from tests.support.server_process import free_port
from tests.support.transfer_engine import FakeTransferEngine, Fate
from vllm_kvpool.config import Transport
from vllm_kvpool.embeds.dataplane import mooncake as mooncake_plane
from vllm_kvpool.embeds.dataplane import shared_memory
from vllm_kvpool.embeds.dataplane.row_bytes import (
    STEP_BYTES,
    RowCopy,
    WriteError,
    drain,
)
from vllm_kvpool.embeds.dataplane.shared_memory import PREFIX
from vllm_kvpool.embeds.dataplane.transports import (
    LandingWindow,
    RowWriter,
    open_landing,
    open_writer,
)
from vllm_kvpool.embeds.protocol.messages import MooncakeWindow, SharedWindow
from vllm_kvpool.embeds.protocol.rows import RowRun
from vllm_kvpool.errors import ConfigError
from vllm_kvpool.storage import mooncake_engine

from .items import digest_of, empty_item, expected, item_of, scattered, shape_of_width, write_runs
from .writer_child import Answer, Order

HOST = "127.0.0.1"
KIB = 1 << 10
SEED = 0x1234_5678_9ABC_DEF0
WINDOW_BYTES = 1 << 20
STAGING_BYTES = 64 * KIB  # pieces of 32 KiB
CHILD_LIMIT_S = 60
ROOT = Path(__file__).parents[2]

real = pytest.mark.mooncake
TRANSPORTS = ("local", pytest.param("mooncake", marks=real))


@contextmanager
def planes_of(
    transport: str, nbytes: int = WINDOW_BYTES, staging_bytes: int = STAGING_BYTES
) -> Iterator[tuple[LandingWindow, RowWriter]]:
    """A consumer's window and a producer's plane, in this process."""
    landing = open_landing(Transport(transport), nbytes, host=HOST)
    plane = open_writer(Transport(transport), staging_bytes, host=HOST)
    try:
        yield landing, plane
    finally:
        plane.close()
        landing.close()


def quarantined_bytes(plane: RowWriter) -> int:
    """Staging memory that transfers which do not end may still read."""
    assert isinstance(plane, mooncake_plane.MooncakeWriter)
    return plane.staging.quarantined_bytes()


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeTransferEngine]:
    """Replace this process's transfer engine; at the end no memory may be registered."""
    engine = FakeTransferEngine()
    monkeypatch.setattr(mooncake_engine, "_engines", {})
    mooncake_engine.use_engine_of("tcp", engine.open)
    yield engine
    assert not engine.regions


class PassingClock(FakeClock):
    """Passes while somebody sleeps, and a little whenever it is looked at."""

    step_s = 1e-6

    def __call__(self) -> float:
        self.now += self.step_s
        return self.now


@contextmanager
def faulty(
    fake: FakeTransferEngine, staging_bytes: int = STAGING_BYTES
) -> Iterator[tuple[LandingWindow, RowWriter, PassingClock]]:
    clock = PassingClock()
    landing = open_landing(Transport.MOONCAKE, WINDOW_BYTES, host=HOST)
    plane = open_writer(
        Transport.MOONCAKE, staging_bytes, host=HOST, clock=clock, sleep=lambda s: clock.advance(s)
    )
    try:
        yield landing, plane, clock
    finally:
        plane.close()
        landing.close()


def check_moved(landing: LandingWindow, plane: RowWriter, width: int) -> None:
    """An item of 97 rows goes through the window in runs of odd sizes, and nothing else changes."""
    shape = shape_of_width(97, width)
    item, target = item_of(shape, 1), empty_item(shape)
    landing.array[:] = 0
    runs = scattered(shape, [1, 1, 31, 2, 1, 61], gap=13)
    digests = write_runs(plane, landing.window, item, shape, runs, SEED)
    assert np.array_equal(landing.array, expected(item, runs, landing.nbytes))
    assert digests == tuple(digest_of(item, run, SEED) for run in runs)
    assert drain(landing.array, RowCopy(target, shape, runs, SEED)) == digests
    assert np.array_equal(target, item)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("width", [1, 7, 1053, 4099])
def test_scattered_rows_of_odd_sizes_arrive(transport: str, width: int) -> None:
    with planes_of(transport) as (landing, plane):
        check_moved(landing, plane, width)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_run_larger_than_any_step_arrives(transport: str) -> None:
    """More than a piece of the default size, and a digest in several steps."""
    shape = shape_of_width(1009, 3 * STEP_BYTES // 1009 + 1)
    item, target = item_of(shape, 3), empty_item(shape)
    runs = [RowRun(0, 1009, 5)]
    with planes_of(transport, shape.nbytes + 64, 8 << 20) as (landing, plane):
        digests = write_runs(plane, landing.window, item, shape, runs, SEED)
        assert drain(landing.array, RowCopy(target, shape, runs, SEED)) == digests
    assert np.array_equal(target, item)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_several_threads_write_to_one_window(transport: str) -> None:
    shape = shape_of_width(64, 1028)
    item = item_of(shape, 5)
    runs = scattered(shape, [1] * 64, gap=3)
    with planes_of(transport) as (landing, plane), ThreadPoolExecutor(8) as threads:
        landing.array[:] = 0
        parts = [runs[i::8] for i in range(8)]

        def write_part(part: Sequence[RowRun]) -> tuple[int, ...]:
            return write_runs(plane, landing.window, item, shape, part, SEED)

        for part, digests in zip(parts, threads.map(write_part, parts), strict=True):
            assert digests == tuple(digest_of(item, run, SEED) for run in part)
        assert np.array_equal(landing.array, expected(item, runs, landing.nbytes))


@given(
    width=st.integers(1, 1200),
    cuts=st.lists(st.integers(1, 9), min_size=1, max_size=40),
    gap=st.integers(0, 70),
    first=st.integers(0, 5),
    pages=st.integers(2, 9),
)
def test_any_item_arrives_through_any_staging_memory(
    width: int, cuts: list[int], gap: int, first: int, pages: int
) -> None:
    engine = FakeTransferEngine()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mooncake_engine, "_engines", {})
        mooncake_engine.use_engine_of("tcp", engine.open)
        shape = shape_of_width(first + sum(cuts) + 2, width)
        item, target = item_of(shape, 6), empty_item(shape)
        runs = scattered(shape, cuts, gap, first)
        nbytes = sum(cuts) * shape.row_bytes + gap * len(cuts)
        with planes_of("mooncake", nbytes, pages * 4096) as (landing, plane):
            digests = write_runs(plane, landing.window, item, shape, runs, SEED)
            assert np.array_equal(landing.array, expected(item, runs, nbytes))
            assert drain(landing.array, RowCopy(target, shape, runs, SEED)) == digests
        stop = first + sum(cuts)
        assert np.array_equal(target[first:stop], item[first:stop])
        assert not target[:first].any()
        assert not target[stop:].any()
        assert engine.flying_bytes() == 0


# Digests


def test_every_byte_that_changes_on_the_way_shows_in_the_digest() -> None:
    shape = shape_of_width(13, 36)
    item = item_of(shape, 7)
    run = RowRun(2, 11, 3)
    window = expected(item, [run], 3 + 11 * 36 + 2)
    good = digest_of(item, run, SEED)
    for index in range(window.nbytes):
        window[index] ^= 1 << (index % 8)
        same = drain(window, RowCopy(empty_item(shape), shape, [run], SEED)) == (good,)
        assert same == (not 3 <= index < 3 + 11 * 36), index
        window[index] ^= 1 << (index % 8)


def test_what_another_grant_brought_does_not_pass_for_this_one() -> None:
    shape = shape_of_width(4, 8)
    item = item_of(shape, 8)
    digests = {digest_of(item, RowRun(0, 4, 0), seed) for seed in (0, 1, SEED, -1, 2**64 - 2)}
    assert len(digests) == 5


def test_a_window_that_changes_during_the_drain_does_not_matter() -> None:
    """The copy itself changes it here: the item's memory overlaps the window's second half."""
    memory = np.arange(12, dtype=np.uint8)
    shape = shape_of_width(2, 4)
    target = memory[4:].reshape(2, 4)
    digests = drain(memory[:8], RowCopy(target, shape, [RowRun(0, 2, 0)], SEED))
    assert target.reshape(-1).tolist() == list(range(8))
    assert memory[:8].tolist() != list(range(8))
    assert digests == (digest_of(target, RowRun(0, 2, 0), SEED),)


# What is refused


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    "run",
    [
        RowRun(0, 10, WINDOW_BYTES - 99),
        RowRun(0, 1, -1),
        RowRun(0, 1, WINDOW_BYTES),
        RowRun(0, 1, 1 << 70),
        RowRun(-1, 2, 0),
        RowRun(5, 6, 0),
        RowRun(0, 0, 0),
        RowRun(3, -1, 0),
    ],
)
def test_a_run_outside_is_refused_before_anything_is_written(transport: str, run: RowRun) -> None:
    shape = shape_of_width(10, 10)
    with planes_of(transport) as (landing, plane):
        landing.array[:] = 0
        with pytest.raises(AssertionError):
            write_runs(
                plane, landing.window, item_of(shape, 1), shape, [RowRun(0, 1, 0), run], SEED
            )
        assert not landing.array.any()
        check_moved(landing, plane, 3)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_writes_that_go_together_arrive_as_each_alone(transport: str) -> None:
    shape = shape_of_width(8, 19)
    items = [item_of(shape, number) for number in range(6)]
    runs = [(RowRun(0, 8, 400 * number),) for number in range(6)]
    with planes_of(transport) as (landing, plane):
        results = plane.write(
            landing.window,
            [RowCopy(item, shape, each, 7) for item, each in zip(items, runs, strict=True)],
        )
        for number, (item, result) in enumerate(zip(items, results, strict=True)):
            target = empty_item(shape)
            assert drain(landing.array, RowCopy(target, shape, runs[number], 7)) == result
            assert np.array_equal(target, item)


def test_windows_of_the_other_transport_are_refused(fake: FakeTransferEngine) -> None:
    shape = shape_of_width(1, 1)
    item = item_of(shape, 1)
    with planes_of("local") as (shared, to_shared), planes_of("mooncake") as (far, to_far):
        for landing, plane in ((shared, to_far), (far, to_shared)):
            with pytest.raises(WriteError, match="another transport") as caught:
                write_runs(plane, landing.window, item, shape, [RowRun(0, 1, 0)], SEED)
            assert caught.value.quiesced


def test_a_drain_of_other_places_is_our_own_mistake() -> None:
    shape = shape_of_width(2, 4)
    with pytest.raises(AssertionError):
        drain(np.zeros(7, np.uint8), RowCopy(empty_item(shape), shape, [RowRun(0, 2, 0)], SEED))
    with pytest.raises(AssertionError):
        drain(np.zeros(99, np.uint8), RowCopy(empty_item(shape), shape, [RowRun(1, 2, 0)], SEED))


def test_a_window_of_no_byte_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one"):
        open_landing(Transport.LOCAL, 0, host=HOST)


def test_staging_memory_of_less_than_two_pages_is_refused(fake: FakeTransferEngine) -> None:
    with pytest.raises(ConfigError, match="staging_bytes=8191"):
        open_writer(Transport.MOONCAKE, 8191, host=HOST)


# Two processes


@contextmanager
def producer(transport: str) -> Iterator[Callable[[Order], Answer]]:
    """Another process, told what to write."""
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.embeds.writer_child", transport, str(STAGING_BYTES)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=ROOT,
    )
    stdin, stdout = child.stdin, child.stdout
    assert stdin is not None
    assert stdout is not None

    def ask(order: Order) -> Answer:
        stdin.write(msgspec.json.encode(order).decode() + "\n")
        stdin.flush()
        for line in stdout:  # between which the engine's log may be
            if line.startswith("ANSWER "):
                return msgspec.json.decode(line.split(" ", 1)[1], type=Answer)
        raise AssertionError("the producer ended")

    try:
        yield ask
        stdin.close()
        assert child.wait(CHILD_LIMIT_S) == 0
    finally:
        child.kill()
        child.wait()
        stdin.close()
        stdout.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_another_process_writes(transport: str) -> None:
    shape = shape_of_width(97, 1036)
    item, target = item_of(shape, 11), empty_item(shape)
    runs = scattered(shape, [1, 1, 31, 2, 1, 61], gap=13)
    landing = open_landing(Transport(transport), WINDOW_BYTES, host=HOST)
    landing.array[:] = 0
    order = Order(landing.window, shape, 11, [(r.row, r.rows, r.offset) for r in runs], SEED)
    with producer(transport) as ask:
        for _ in range(3):
            answer = ask(order)
            assert not answer.error
            assert drain(landing.array, RowCopy(target, shape, runs, SEED)) == answer.digests
            assert np.array_equal(target, item)
            assert np.array_equal(landing.array, expected(item, runs, landing.nbytes))
        landing.close()
        answer = ask(order)
        assert answer.error
        assert answer.quiesced == (transport == "local")


CONSUMER = """
import sys, msgspec
from vllm_kvpool.config import Transport
from vllm_kvpool.embeds.dataplane.transports import open_landing
landing = open_landing(Transport(sys.argv[1]), 1 << 20, host="127.0.0.1")
print("WINDOW", msgspec.json.encode(landing.window).decode(), flush=True)
sys.stdin.read()
"""


@contextmanager
def consumer(transport: str) -> Iterator[tuple["subprocess.Popen[str]", Any]]:
    """Another process with a window, which does nothing but receive."""
    child = subprocess.Popen(
        [sys.executable, "-c", CONSUMER, transport],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=ROOT,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        line = next(line for line in child.stdout if line.startswith("WINDOW "))
        window: Any = msgspec.json.decode(line.split(" ", 1)[1], type=MooncakeWindow | SharedWindow)
        yield child, window
    finally:
        child.kill()
        child.wait()
        child.stdin.close()
        child.stdout.close()


@real
def test_a_consumer_that_dies_fails_writes_at_once() -> None:
    """The first write may have started. The second fails at its probe, before any byte is sent."""
    shape = shape_of_width(100, 1000)
    item = item_of(shape, 12)
    with consumer("mooncake") as (child, window), planes_of("mooncake") as (_, plane):
        write_runs(plane, window, item, shape, [RowRun(0, 100, 0)], SEED)
        child.kill()
        child.wait()
        for quiesced in (False, True):
            with pytest.raises(WriteError) as caught:
                write_runs(plane, window, item, shape, [RowRun(0, 100, 0)], SEED)
            assert caught.value.quiesced == quiesced
        deadline = time.monotonic() + CHILD_LIMIT_S
        while quarantined_bytes(plane):  # until both pieces' sockets have failed
            assert time.monotonic() < deadline


@real
def test_a_consumer_that_was_never_there() -> None:
    shape = shape_of_width(1, 1)
    window = MooncakeWindow(f"{HOST}:{free_port()}", 1 << 20, 1)
    with planes_of("mooncake") as (landing, plane):
        with pytest.raises(WriteError, match="no Mooncake engine answers") as caught:
            write_runs(plane, window, item_of(shape, 1), shape, [RowRun(0, 1, 0)], SEED)
        assert caught.value.quiesced
        check_moved(landing, plane, 3)


@real
def test_memory_that_is_not_registered_is_not_written_to() -> None:
    shape = shape_of_width(1, 64)
    with planes_of("mooncake") as (landing, plane):
        assert isinstance(landing.window, MooncakeWindow)
        other = np.zeros(64, np.uint8)
        window = MooncakeWindow(landing.window.session, other.ctypes.data, 64)
        with pytest.raises(WriteError) as caught:
            write_runs(plane, window, item_of(shape, 1), shape, [RowRun(0, 1, 0)], SEED)
        assert not caught.value.quiesced
        assert not other.any()
        check_moved(landing, plane, 3)


# Mooncake's faults


SHAPE = shape_of_width(90, 1000)  # three pieces
RUNS = (RowRun(0, 90, 0),)
PIECE = STAGING_BYTES // 2


def write_all(landing: LandingWindow, plane: RowWriter, runs: Sequence[RowRun] = RUNS) -> None:
    write_runs(plane, landing.window, item_of(SHAPE, 13), SHAPE, runs, SEED)


@pytest.mark.parametrize("failing", range(3))
@pytest.mark.parametrize("fate", [Fate.FAILS, Fate.IS_REFUSED])
def test_a_write_that_fails_may_still_arrive(
    fake: FakeTransferEngine, fate: Fate, failing: int
) -> None:
    with faulty(fake) as (landing, plane, clock):
        fake.fate = lambda index: fate if index == failing else Fate.LANDS
        with pytest.raises(WriteError) as caught:
            write_all(landing, plane)
        assert not caught.value.quiesced
        # What has failed has ended here, and others do soon; what was refused may have been begun.
        assert settled(plane) == (PIECE if fate is Fate.IS_REFUSED else 0)
        fake.fate = lambda index: Fate.LANDS
        check_moved(landing, plane, 1024)
        clock.advance(mooncake_plane.QUARANTINE_FACTOR * mooncake_plane.timeout_of(PIECE))
        assert quarantined_bytes(plane) == 0


def settled(plane: RowWriter) -> int:
    """Return the bytes in quarantine after every finished write has been collected."""
    for _ in range(2):
        quarantined_bytes(plane)
    return quarantined_bytes(plane)


def test_a_write_that_does_not_end_keeps_its_staging_memory(
    fake: FakeTransferEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mooncake_plane, "PIECE_BYTES", PIECE)
    with faulty(fake, 4 * PIECE) as (landing, plane, clock):
        fake.fate = lambda index: Fate.HANGS if index == 0 else Fate.LANDS
        with pytest.raises(WriteError, match="did not end") as caught:
            write_all(landing, plane)
        assert not caught.value.quiesced
        timeout_s = mooncake_plane.timeout_of(PIECE)
        assert timeout_s <= clock.now < timeout_s + 0.1
        assert settled(plane) == fake.writes[0].nbytes == PIECE
        # That no other write uses the memory meanwhile is for the engine to see.
        for _ in range(20):
            check_moved(landing, plane, 1024)
        clock.advance(2 * timeout_s - 1)
        assert quarantined_bytes(plane) == PIECE
        clock.advance(1.1)
        assert quarantined_bytes(plane) == 0


def test_quarantine_ends_when_the_write_does(fake: FakeTransferEngine) -> None:
    with faulty(fake) as (landing, plane, _):
        fake.fate = lambda index: Fate.HANGS if index == 0 else Fate.LANDS
        with pytest.raises(WriteError):
            write_all(landing, plane)
        assert settled(plane) == PIECE
        landing.array[:] = 0
        fake.land(fake.writes[0])  # late, and still what it was to be
        assert np.array_equal(landing.array[:PIECE], item_of(SHAPE, 13).reshape(-1)[:PIECE])
        assert quarantined_bytes(plane) == 0
        check_moved(landing, plane, 1024)


def test_with_all_staging_memory_in_quarantine_nothing_is_sent(fake: FakeTransferEngine) -> None:
    with faulty(fake) as (landing, plane, clock):
        fake.fate = lambda index: Fate.HANGS
        with pytest.raises(WriteError, match="did not end"):
            write_all(landing, plane)
        assert quarantined_bytes(plane) == STAGING_BYTES
        num_writes = len(fake.writes)
        clock.step_s = 1.0
        with pytest.raises(WriteError, match="65536 of 65536 bytes are in quarantine") as caught:
            write_all(landing, plane)
        assert caught.value.quiesced
        assert len(fake.writes) == num_writes
        for write in fake.writes:
            fake.land(write)
        fake.fate = lambda index: Fate.LANDS
        check_moved(landing, plane, 1024)


def test_eight_writers_share_bounded_staging_memory(fake: FakeTransferEngine) -> None:
    """Two pieces for eight threads that want three each: nobody waits with a piece in hand."""
    most = 0
    submit = fake.transfer_submit_write

    def watched(session: str, source: int, target: int, nbytes: int) -> int:
        nonlocal most
        number = submit(session, source, target, nbytes)
        most = max(most, fake.flying_bytes())
        return number

    fake.transfer_submit_write = watched  # type: ignore[method-assign]
    shape = shape_of_width(800, 1000)
    item = item_of(shape, 14)
    with planes_of("mooncake") as (landing, plane), ThreadPoolExecutor(8) as threads:
        runs = [RowRun(i * 100, 100, i * 100_000) for i in range(8)]
        jobs = [
            threads.submit(write_runs, plane, landing.window, item, shape, [run], SEED)
            for run in runs * 4
        ]
        for run, job in zip(itertools.cycle(runs), jobs, strict=False):
            assert job.result(CHILD_LIMIT_S) == (digest_of(item, run, SEED),)
        assert np.array_equal(landing.array, expected(item, runs, landing.nbytes))
        assert len(fake.regions) == 2
        assert sorted(fake.regions.values()) == [STAGING_BYTES, WINDOW_BYTES]
    assert 0 < most <= STAGING_BYTES


def test_neighbouring_extents_are_one_transfer(fake: FakeTransferEngine) -> None:
    with faulty(fake) as (landing, plane, _):
        write_all(landing, plane, [RowRun(0, 3, 5), RowRun(3, 2, 3005), RowRun(5, 1, 9000)])
        assert [write.nbytes for write in fake.writes] == [5000, 1000]


def test_writes_that_go_together_share_pieces_and_fail_together(fake: FakeTransferEngine) -> None:
    shape = shape_of_width(2, 100)
    writes = [RowCopy(item_of(shape, n), shape, (RowRun(0, 2, 300 * n),), n) for n in range(8)]
    with faulty(fake) as (landing, plane, _):
        good = plane.write(landing.window, writes)
        assert good == [
            tuple(digest_of(each.data, run, each.seed) for run in each.runs) for each in writes
        ]
        assert len({write.source for write in fake.writes}) == 8, "all lie in one piece"
        assert max(write.source for write in fake.writes) - fake.writes[0].source < 8 * 200
        fake.fate = lambda index: Fate.FAILS if index == 10 else Fate.LANDS
        with pytest.raises(WriteError) as caught:
            plane.write(landing.window, writes)
        assert not caught.value.quiesced


def test_few_transfers_are_under_way_at_a_time(fake: FakeTransferEngine) -> None:
    """Mooncake queues so many for a peer, and fails what comes after."""
    shape = shape_of_width(256, 10)
    most = 0

    def watch(index: int) -> Fate:
        nonlocal most
        most = max(most, sum(not write.is_over for write in fake.writes) + 1)
        return Fate.LANDS

    fake.fate = watch
    with faulty(fake) as (landing, plane, _):
        write_runs(
            plane, landing.window, item_of(shape, 1), shape, scattered(shape, [1] * 256, 1), SEED
        )
        assert len(fake.writes) == 256
        assert most <= 2 * mooncake_plane.MAX_RANGES


class TimedWrites:
    """Each write of one row ends so long after it was begun as was said before."""

    def __init__(
        self, fake: FakeTransferEngine, landing: LandingWindow, plane: RowWriter, clock: FakeClock
    ) -> None:
        self._fake, self._landing, self._plane, self._clock = fake, landing, plane, clock
        self._ends_at = 0.0
        self._check = fake.transfer_check_status
        fake.fate = lambda index: Fate.HANGS
        fake.transfer_check_status = self._watched  # type: ignore[method-assign]

    def _watched(self, number: int) -> int:
        if self._clock.now >= self._ends_at:
            self._fake.land(self._fake.writes[number - 1])
        return self._check(number)

    def write(self, takes_s: float) -> tuple[float, int]:
        """Write for `takes_s` and return (seconds until the end is noticed, number of polls)."""
        self._ends_at = self._clock.now + takes_s
        write_all(self._landing, self._plane, [RowRun(0, 1, 0)])
        return self._clock.now - self._ends_at, self._fake.writes[-1].num_asked


STEP_S = 5e-6  # what a question takes


@pytest.mark.parametrize(
    ("takes_s", "later"), [(0.0001, 1.0), (0.0005, 0.5), (0.003, 0.5), (0.05, 1.0)]
)
def test_the_end_of_a_write_is_soon_seen_and_seldom_asked_for(
    fake: FakeTransferEngine, takes_s: float, later: float
) -> None:
    """`later`: the share of questions that is left when it is known how long such writes take."""
    with faulty(fake) as (landing, plane, clock):
        writes = TimedWrites(fake, landing, plane, clock)
        clock.step_s = STEP_S
        most_late_s = max(takes_s * 0.15, mooncake_plane.MIN_PAUSE_S) + 4 * STEP_S
        first = writes.write(takes_s)
        assert first[0] < most_late_s
        assert first[1] < mooncake_plane.SPIN_S / STEP_S + 80
        for _ in range(20):
            late_s, num_asked = writes.write(takes_s)
            assert late_s < most_late_s
        assert num_asked <= later * first[1] + 1, (num_asked, first[1])


def test_a_network_that_is_fast_again_is_soon_known_to_be(fake: FakeTransferEngine) -> None:
    with faulty(fake) as (landing, plane, clock):
        writes = TimedWrites(fake, landing, plane, clock)
        clock.step_s = STEP_S
        for _ in range(20):
            writes.write(20.0)
        late = [writes.write(0.0005)[0] for _ in range(60)]
        assert max(late) <= mooncake_plane.MAX_SURE_S + mooncake_plane.MAX_PAUSE_S
        assert late[-1] < 2 * mooncake_plane.MIN_PAUSE_S


def test_a_session_is_asked_for_before_the_first_write_and_after_a_failure(
    fake: FakeTransferEngine,
) -> None:
    with faulty(fake) as (landing, plane, _):
        for _ in range(3):
            write_all(landing, plane)
        assert fake.num_probes == 1
        fake.fate = lambda index: Fate.FAILS
        with pytest.raises(WriteError):
            write_all(landing, plane)
        fake.is_reachable = False
        num_writes = len(fake.writes)
        with pytest.raises(WriteError, match="no Mooncake engine answers") as caught:
            write_all(landing, plane)
        assert caught.value.quiesced
        assert (fake.num_probes, len(fake.writes)) == (2, num_writes)


def test_closing_ends_writes_and_keeps_what_they_may_still_touch(
    fake: FakeTransferEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mooncake_plane, "CLOSE_WAIT_S", 0.1)
    fake.fate = lambda index: Fate.HANGS
    landing = open_landing(Transport.MOONCAKE, WINDOW_BYTES, host=HOST)
    plane = open_writer(Transport.MOONCAKE, STAGING_BYTES, host=HOST)
    is_flying = threading.Event()
    check = fake.transfer_check_status

    def watched(number: int) -> int:
        is_flying.set()
        return check(number)

    fake.transfer_check_status = watched  # type: ignore[method-assign]
    with ThreadPoolExecutor(1) as threads:
        job = threads.submit(write_all, landing, plane)
        assert is_flying.wait(CHILD_LIMIT_S)
        plane.close()
        with pytest.raises(WriteError) as caught:
            job.result(CHILD_LIMIT_S)
    assert not caught.value.quiesced
    landing.close()
    landing.close()
    assert not fake.regions
    for write in fake.writes:
        fake.land(write)  # from memory, and to memory, that the owner has let go of
    with pytest.raises(WriteError) as caught:
        write_all(landing, plane)
    assert caught.value.quiesced


def test_a_closed_window_gives_its_memory_back_but_not_its_addresses(
    fake: FakeTransferEngine,
) -> None:
    landing = open_landing(Transport.MOONCAKE, WINDOW_BYTES, host=HOST)
    window = landing.window
    assert isinstance(window, MooncakeWindow)
    landing.array[:] = 7
    landing.close()
    del landing
    gc.collect()
    maps = Path("/proc/self/maps").read_text().splitlines()
    first, stop = window.base, window.base + window.nbytes
    areas = [line.split()[0].split("-") for line in maps]
    assert any(int(low, 16) <= first and stop <= int(high, 16) for low, high in areas)
    late = (ctypes.c_uint8 * 2).from_address(first)
    assert late[0] == 0
    late[1] = 9


@pytest.mark.parametrize(
    ("host", "session"),
    [("10.0.0.1", "10.0.0.1:12345"), ("::1", "[::1]:12345"), ("[::1]", "[::1]:12345")],
)
def test_a_window_says_where_its_engine_is(
    fake: FakeTransferEngine, host: str, session: str
) -> None:
    landing = open_landing(Transport.MOONCAKE, 1, host=host)
    assert isinstance(landing.window, MooncakeWindow)
    assert landing.window.session == session
    landing.close()


# Shared memory


@pytest.fixture
def own_directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A directory of windows for this test alone; engines of the host remove unlocked files."""
    with tempfile.TemporaryDirectory(dir=shared_memory.DIRECTORY) as directory:
        monkeypatch.setattr(shared_memory, "DIRECTORY", Path(directory))
        yield


def windows() -> set[Path]:
    return set(shared_memory.DIRECTORY.glob(f"{PREFIX}*"))


def write_row(plane: RowWriter, window: SharedWindow) -> tuple[int, ...]:
    shape = shape_of_width(1, 3)
    return write_runs(plane, window, item_of(shape, 1), shape, [RowRun(0, 1, 0)], SEED)


def shared_window(landing: LandingWindow) -> SharedWindow:
    assert isinstance(landing.window, SharedWindow)
    return landing.window


def test_a_windows_file_is_its_owners_alone_and_goes_with_it() -> None:
    landing = open_landing(Transport.LOCAL, 4097, host=HOST)
    path = Path(shared_window(landing).path)
    status = path.stat()
    assert (status.st_mode & 0o777, status.st_size) == (0o600, 4097)
    assert status.st_blocks * 512 >= 4097
    assert f"-{os.getpid()}-" in path.name
    landing.close()
    landing.close()
    assert not path.exists()


def test_windows_of_the_dead_are_removed_and_of_the_living_are_not() -> None:
    with consumer("local") as (child, window), consumer("local") as (_, living):
        assert Path(window.path).exists()
        child.kill()
        child.wait()
        landing = open_landing(Transport.LOCAL, 1, host=HOST)
        assert not Path(window.path).exists()
        assert Path(living.path).exists()
        second = open_landing(Transport.LOCAL, 1, host=HOST)
        assert Path(shared_window(landing).path).exists()
        second.close()
        landing.close()
    shared_memory.remove_leftovers()
    assert Path(living.path) not in windows()


@pytest.mark.usefixtures("own_directory")
def test_what_only_looks_like_a_leftover_stays(tmp_path: Path) -> None:
    names = [f"{PREFIX}notes", f"{PREFIX}1-{'0' * 31}", f"{PREFIX}1-{'0' * 32}.old"]
    link = shared_memory.DIRECTORY / f"{PREFIX}1-{'0' * 32}"
    pipe = shared_memory.DIRECTORY / f"{PREFIX}2-{'0' * 32}"
    others = [shared_memory.DIRECTORY / name for name in names]
    try:
        for path in others:
            path.touch()
        (tmp_path / "file").touch()
        link.symlink_to(tmp_path / "file")
        os.mkfifo(pipe)
        assert shared_memory.remove_leftovers() == 0
        assert all(os.path.lexists(path) for path in (*others, link, pipe, tmp_path / "file"))
    finally:
        for path in (*others, link, pipe):
            path.unlink(missing_ok=True)


@pytest.mark.usefixtures("own_directory")
def test_a_window_that_does_not_fit_is_refused_with_the_numbers() -> None:
    before = windows()
    with pytest.raises(ConfigError, match=f"arena_bytes={1 << 60} .* bytes free; lower"):
        open_landing(Transport.LOCAL, 1 << 60, host=HOST)
    assert windows() == before


@pytest.mark.usefixtures("own_directory")
def test_a_window_that_finds_no_room_after_all_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(28, "No space left on device")

    before = windows()
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ConfigError, match="No space left"):
        open_landing(Transport.LOCAL, 4096, host=HOST)
    assert windows() == before


def test_a_window_of_another_host_is_refused() -> None:
    with planes_of("local") as (landing, plane):
        window = msgspec.structs.replace(shared_window(landing), host="elsewhere/19/1")
        with pytest.raises(WriteError, match=r"elsewhere/19/1.*mooncake transport") as caught:
            write_row(plane, window)
        assert caught.value.quiesced
        assert not landing.array.any()


@pytest.mark.usefixtures("own_directory")
def test_a_window_that_is_gone_or_replaced_is_not_written_to() -> None:
    with planes_of("local") as (landing, plane):
        window = shared_window(landing)
        write_row(plane, window)
        landing.array[:] = 0
        moved = Path(window.path).rename(shared_memory.DIRECTORY / f"{PREFIX}kept")
        try:
            with pytest.raises(WriteError, match="gone") as caught:
                write_row(plane, window)
            assert caught.value.quiesced
            assert not landing.array.any()
            other = Path(window.path)
            other.write_bytes(b"\0" * landing.nbytes)
            write_row(plane, window)
            assert any(other.read_bytes())
            assert not landing.array.any()
        finally:
            moved.rename(window.path)
        write_row(plane, window)
        assert landing.array.any()


@pytest.mark.usefixtures("own_directory")
def test_what_a_peer_calls_a_window_must_be_one(tmp_path: Path) -> None:
    """A path elsewhere, a link to elsewhere, a pipe, or fewer bytes than it says."""
    victim = tmp_path / "victim"
    victim.write_bytes(b"\0" * 64)
    elsewhere = tmp_path / f"{PREFIX}1-{'a' * 32}"
    elsewhere.write_bytes(b"\0" * 64)
    link = shared_memory.DIRECTORY / f"{PREFIX}1-{'b' * 32}"
    pipe = shared_memory.DIRECTORY / f"{PREFIX}1-{'c' * 32}"
    short = shared_memory.DIRECTORY / f"{PREFIX}1-{'d' * 32}"
    link.symlink_to(victim)
    os.mkfifo(pipe)
    short.write_bytes(b"\0" * 63)
    empty = shared_memory.DIRECTORY / f"{PREFIX}1-{'e' * 32}"
    empty.touch()
    dots = f"{shared_memory.DIRECTORY}/../{victim}"
    plane = open_writer(Transport.LOCAL, 0, host=HOST)
    try:
        for path in (
            victim,
            elsewhere,
            link,
            pipe,
            short,
            empty,
            dots,
            f"{shared_memory.DIRECTORY}/x",
            "",
            "a\0b",
        ):
            window = SharedWindow(shared_memory.host_identity(), str(path), 64)
            with pytest.raises(WriteError) as caught:
                write_row(plane, window)
            assert caught.value.quiesced
        assert not any(victim.read_bytes() + elsewhere.read_bytes() + short.read_bytes())
    finally:
        plane.close()
        for path in (link, pipe, short, empty):
            path.unlink()


def mapped_windows() -> int:
    gc.collect()  # what errors of other tests keep
    return Path("/proc/self/maps").read_text().count(str(shared_memory.DIRECTORY / PREFIX))


def test_a_producer_keeps_few_windows_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "MAX_MAPPED", 3)
    plane = open_writer(Transport.LOCAL, 0, host=HOST)
    landings = [open_landing(Transport.LOCAL, 4096, host=HOST) for _ in range(6)]
    before = mapped_windows()
    for _ in range(2):
        for landing in landings:
            landing.array[:] = 0
            write_row(plane, shared_window(landing))
            assert landing.array[:3].any()
    assert mapped_windows() - before == 3
    plane.close()
    assert mapped_windows() == before
    for landing in landings:
        landing.close()
