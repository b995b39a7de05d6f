"""Moving bytes: the loop over a scripted queue, real rings and threads, and the choice of one."""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.buffers import make_buffer, random_bytes
from tests.support.os_faults import os_faults
from tests.support.threads import NewThreads, few_threads
from vllm_kvpool.errors import ConfigError
from vllm_kvpool.storage.file import io as disk_module
from vllm_kvpool.storage.file.io import (
    MAX_REPEATS,
    RING_DEPTH,
    THREAD_COUNT,
    Disk,
    Done,
    Ring,
    Transfer,
    choose_disk,
    probe,
    pump,
)

PAGE = 4096


def has_ring() -> bool:
    try:
        Ring().close()
    except OSError:
        return False
    return True


needs_ring = pytest.mark.skipif(not has_ring(), reason="the kernel refuses io_uring")


class ScriptedQueue:
    """Answers what the script says of each post of a tag, all bytes when it says no more.

    A script is a list per tag of results (bytes or -errno). Remembers how many were in flight.
    """

    def __init__(self, script: dict[int, list[int]] | None = None, depth: int = 4) -> None:
        self.depth = depth
        self.script = script or {}
        self.posts: list[tuple[int, int]] = []
        self.in_flight: dict[int, int] = {}
        self.peak = 0

    def post(self, transfer: Transfer, skip_bytes: int) -> None:
        assert transfer.tag not in self.in_flight
        self.posts.append((transfer.tag, skip_bytes))
        self.in_flight[transfer.tag] = transfer.nbytes - skip_bytes
        self.peak = max(self.peak, len(self.in_flight))

    def submit(self) -> None:
        pass

    def wait(self) -> list[tuple[int, int]]:
        assert self.in_flight, "waited for nothing"
        tag, rest = next(reversed(self.in_flight.items()))  # the last first: any order is allowed
        del self.in_flight[tag]
        results = self.script.get(tag)
        return [(tag, results.pop(0) if results else rest)]


def transfer(tag: int, nbytes: int = 3 * PAGE, *, writes: bool = True) -> Transfer:
    memory = make_buffer(nbytes)
    parts = (memory.part(0, nbytes - PAGE), memory.part(nbytes - PAGE, nbytes))
    return Transfer(tag, -1, parts, writes)


def test_what_was_moved_in_part_is_continued_where_it_stopped() -> None:
    queue = ScriptedQueue({0: [100, PAGE]})
    assert list(pump(queue, [transfer(0)])) == [Done(0, 0)]
    assert queue.posts == [(0, 0), (0, 100), (0, 100 + PAGE)]


@pytest.mark.parametrize(("writes", "error"), [(True, errno.EIO), (False, errno.ENODATA)])
def test_nothing_moved_is_an_error_and_no_success(writes: bool, error: int) -> None:
    queue = ScriptedQueue({0: [PAGE, 0]})
    assert list(pump(queue, [transfer(0, writes=writes)])) == [Done(0, error)]


@pytest.mark.parametrize("number", [errno.EINTR, errno.EAGAIN])
def test_interruptions_are_repeated_within_a_bound(number: int) -> None:
    few, many = [-number] * MAX_REPEATS, [-number] * (MAX_REPEATS + 1)
    queue = ScriptedQueue({0: [PAGE, *few], 1: many})
    assert sorted(pump(queue, [transfer(0), transfer(1)])) == [Done(0, 0), Done(1, number)]
    assert queue.posts.count((0, PAGE)) == MAX_REPEATS + 1


def test_the_depth_bounds_what_is_open() -> None:
    queue = ScriptedQueue(depth=3)
    opened: list[int] = []
    finished: list[int] = []

    def source() -> Iterator[Transfer]:
        for tag in range(20):
            opened.append(tag)
            assert len(opened) - len(finished) <= 3
            yield transfer(tag)

    for done in pump(queue, source()):
        finished.append(done.tag)  # noqa: PERF401 - the source looks at it meanwhile
    assert sorted(finished) == list(range(20))
    assert queue.peak == 3


def test_closing_early_waits_for_what_is_in_flight() -> None:
    queue = ScriptedQueue({0: [PAGE]})
    run = pump(queue, [transfer(tag) for tag in range(9)])
    next(run)
    assert queue.in_flight
    run.close()
    assert queue.in_flight == {}


def test_a_source_that_fails_leaves_nothing_in_flight() -> None:
    queue = ScriptedQueue()

    def source() -> Iterator[Transfer]:
        yield transfer(0)
        yield transfer(1)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), contextlib.closing(pump(queue, source())) as run:
        list(run)
    assert queue.posts == [(0, 0), (1, 0)]
    assert queue.in_flight == {}


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    depth=st.integers(1, 5),
    data=st.data(),
)
def test_every_transfer_is_reported_once_and_all_its_bytes_are_moved(
    sizes: list[int], depth: int, data: st.DataObject
) -> None:
    script: dict[int, list[int]] = {}
    expected: set[Done] = set()
    for tag, size in enumerate(sizes):
        rest, results, error = size, [], 0
        while rest and not error and data.draw(st.booleans()):
            match data.draw(st.sampled_from(["short", "again", "fail"])):
                case "short":
                    moved = data.draw(st.integers(1, rest))
                    rest -= moved
                    results.append(moved)
                case "again" if results.count(-errno.EAGAIN) < MAX_REPEATS:
                    results.append(-errno.EAGAIN)
                case "fail":
                    error = errno.EIO
                    results.append(-error)
                case _:
                    break
        script[tag] = results
        expected.add(Done(tag, error))
    memory = make_buffer(64)
    transfers = [Transfer(tag, -1, (memory.part(0, size),), True) for tag, size in enumerate(sizes)]
    queue = ScriptedQueue(script, depth)
    done = list(pump(queue, transfers))
    assert len(done) == len(sizes)
    assert set(done) == expected
    assert queue.peak <= depth


@given(first=st.integers(1, 20), second=st.integers(1, 20), skip=st.integers(0, 39))
def test_what_remains_of_parts(first: int, second: int, skip: int) -> None:
    memory = make_buffer(64)
    memory.view[:] = bytes(range(64))
    parts = (memory.part(0, first), memory.part(30, 30 + second))
    rest = Transfer(0, -1, parts, True).after(skip)
    joined = b"".join(bytes(part.view) for part in parts)
    assert b"".join(bytes(part.view) for part in rest) == joined[skip:]
    for part in rest:
        assert bytes(part.view) == bytes(
            memory.view[part.address - memory.address :][: part.nbytes]
        )


# Real files.


@pytest.fixture(params=["threads", pytest.param("io_uring", marks=needs_ring)])
def real(request: pytest.FixtureRequest) -> Iterator[Disk]:
    disk = Disk(uring=request.param == "io_uring")
    yield disk
    disk.close()


@contextlib.contextmanager
def files(directory: Path, count: int, flags: int = os.O_RDWR) -> Iterator[list[int]]:
    fds = [os.open(directory / str(n), os.O_CREAT | flags, 0o600) for n in range(count)]
    try:
        yield fds
    finally:
        for fd in fds:
            os.close(fd)


def run_all(disk: Disk, transfers: list[Transfer]) -> list[Done]:
    with contextlib.closing(disk.run(transfers)) as run:
        return sorted(run)


def test_bytes_come_back(real: Disk, tmp_path: Path) -> None:
    count, nbytes = 3 * RING_DEPTH, 5 * PAGE + 17
    memory = make_buffer(2 * count * nbytes)
    with files(tmp_path, count) as fds:
        for writes in (True, False):
            transfers = []
            for n, fd in enumerate(fds):
                at = (n + count * (not writes)) * nbytes
                part = memory.part(at, at + nbytes)
                if writes:
                    part.view[:] = random_bytes(nbytes, n)
                halves = (part.part(0, PAGE), part.part(PAGE, nbytes))
                transfers.append(Transfer(n, fd, halves, writes))
            assert run_all(real, transfers) == [Done(n, 0) for n in range(count)]
    assert memory.view[: count * nbytes] == memory.view[count * nbytes :]
    assert (tmp_path / "7").read_bytes() == random_bytes(nbytes, 7)


def test_a_short_file_and_a_bad_descriptor_are_errors(real: Disk, tmp_path: Path) -> None:
    (tmp_path / "0").write_bytes(b"x" * 5000)
    memory = make_buffer(3 * PAGE)
    parts = (memory.part(0, PAGE), memory.part(PAGE, 2 * PAGE))
    with files(tmp_path, 1) as [fd]:
        transfers = [Transfer(0, fd, parts, False), Transfer(1, 1 << 20, parts, False)]
        assert run_all(real, transfers) == [Done(0, errno.ENODATA), Done(1, errno.EBADF)]


def test_threads_end_with_the_run(tmp_path: Path) -> None:
    threads = NewThreads()
    with files(tmp_path, 20) as fds:
        run = Disk().run([Transfer(n, fd, (make_buffer(PAGE),), True) for n, fd in enumerate(fds)])
        next(run)
        helpers = threads.alive("kvpool-disk")
        assert 0 < len(helpers) <= THREAD_COUNT
        run.close()
        for thread in helpers:
            thread.join(10)
        assert not any(thread.is_alive() for thread in helpers)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("left", range(THREAD_COUNT))
def test_run_of_a_process_without_more_threads_moves_all_bytes(tmp_path: Path, left: int) -> None:
    with files(tmp_path, 20) as fds, few_threads(left):
        transfers = [Transfer(n, fd, (make_buffer(PAGE),), True) for n, fd in enumerate(fds)]
        assert run_all(Disk(), transfers) == [Done(n, 0) for n in range(20)]
        assert {os.fstat(fd).st_size for fd in fds} == {PAGE}


# Rings whose kernel says other things.


@pytest.fixture
def ring() -> Iterator[Ring]:
    if not has_ring():
        pytest.skip("the kernel refuses io_uring")
    made = Ring()
    yield made
    made.close()


def test_what_the_kernel_does_not_take_is_an_error_of_its_transfers(
    ring: Ring, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system_call = disk_module._system_call
    refusals = [-errno.ENOMEM, -errno.EBUSY]

    def refuse_to_submit(number: int, *args: int) -> int:
        if args[1] and refusals:  # entries to take
            return refusals.pop(0)
        return system_call(number, *args)

    with files(tmp_path, 3) as fds:
        transfers = [Transfer(n, fd, (make_buffer(PAGE),), True) for n, fd in enumerate(fds)]
        monkeypatch.setattr(disk_module, "_system_call", refuse_to_submit)
        assert sorted(pump(ring, transfers[:2])) == [Done(0, errno.ENOMEM), Done(1, errno.ENOMEM)]
        assert list(pump(ring, transfers[2:])) == [Done(2, errno.EBUSY)]
        assert sorted(pump(ring, transfers)) == [Done(n, 0) for n in range(3)], "the ring is dirty"


def test_a_submission_taken_in_part_is_finished_later(
    ring: Ring, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system_call = disk_module._system_call
    taken: list[int] = []

    def take_one(number: int, *args: int) -> int:
        if args[1]:
            args = (args[0], 1, *args[2:])
            taken.append(args[1])
        return system_call(number, *args)

    monkeypatch.setattr(disk_module, "_system_call", take_one)
    with files(tmp_path, 5) as fds:
        transfers = [Transfer(n, fd, (make_buffer(PAGE),), True) for n, fd in enumerate(fds)]
        assert sorted(pump(ring, transfers)) == [Done(n, 0) for n in range(5)]
    assert len(taken) >= 5


@pytest.mark.parametrize("number", [errno.EINTR, errno.EBUSY])
def test_a_wait_that_fails_is_repeated(
    ring: Ring, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    system_call = disk_module._system_call
    failing = [number] * 3

    def busy(call: int, *args: int) -> int:
        is_wait = args[2] > 0
        return -failing.pop() if is_wait and failing else system_call(call, *args)

    monkeypatch.setattr(disk_module, "_system_call", busy)
    monkeypatch.setattr(disk_module, "ERROR_PAUSE_S", 0.001)
    with files(tmp_path, 1) as [fd]:
        assert list(pump(ring, [Transfer(0, fd, (make_buffer(PAGE),), True)])) == [Done(0, 0)]
    assert not failing


@needs_ring
def test_a_thread_that_gets_no_ring_goes_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk = Disk(uring=True)
    disk.close()
    monkeypatch.setattr(disk_module, "_system_call", lambda *args: -errno.EMFILE)
    with files(tmp_path, 2) as fds:
        transfers = [Transfer(n, fd, (make_buffer(PAGE),), True) for n, fd in enumerate(fds)]
        assert run_all(disk, transfers) == [Done(0, 0), Done(1, 0)]
        assert run_all(disk, transfers) == [Done(0, 0), Done(1, 0)]
    assert caplog.text.count("Too many open files") == 1


# The choice.


def test_threads_are_chosen_if_asked_for(tmp_path: Path) -> None:
    choice = choose_disk("threads", str(tmp_path))
    assert not choice.disk.uring
    assert choice.reason.startswith("threads, as configured")
    assert list(tmp_path.iterdir()) == []


@needs_ring
@pytest.mark.parametrize("io", ["auto", "uring"])
def test_a_ring_is_chosen_if_it_works(tmp_path: Path, io: str) -> None:
    choice = choose_disk(io, str(tmp_path))
    assert choice.disk.uring
    assert choice.reason.startswith("io_uring and ")
    assert list(tmp_path.iterdir()) == []
    choice.disk.close()


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOSYS])
def test_a_kernel_that_refuses_rings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(disk_module, "_system_call", lambda *args: -number)
    choice = choose_disk("auto", str(tmp_path))
    assert not choice.disk.uring
    assert f"io_uring does not work ({os.strerror(number)})" in choice.reason
    with pytest.raises(ConfigError, match=f"io=uring does not work here: {os.strerror(number)}"):
        choose_disk("uring", str(tmp_path))


@needs_ring
def test_a_ring_that_reads_other_bytes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def claim_all(self: Ring) -> list[tuple[int, int]]:
        return [(0, PAGE)]

    monkeypatch.setattr(Ring, "wait", claim_all)
    choice = choose_disk("auto", str(tmp_path))
    assert not choice.disk.uring


def test_a_file_system_without_direct_io(tmp_path: Path) -> None:
    with os_faults() as faults:
        faults.refuse_direct()
        choice = choose_disk("auto", str(tmp_path))
        assert not choice.direct
        assert "page cache, as O_DIRECT is refused" in choice.reason
        assert probe(Disk(), str(tmp_path), os.O_DIRECT) == errno.EINVAL
    choice.disk.close()


def test_a_full_disk_is_no_reason_against_direct_io(tmp_path: Path) -> None:
    with os_faults() as faults:
        faults.refuse("pwritev", errno.ENOSPC)
        assert choose_disk("threads", str(tmp_path)).direct
