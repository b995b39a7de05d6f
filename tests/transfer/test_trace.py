"""The trace: fields of each event for Perfetto, and a file that is complete after any end."""

import errno
import inspect
import io
import itertools
import json
import logging
import re
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from tests.support.fakes import FakeClock
from vllm_kvpool.transfer import trace as trace_module
from vllm_kvpool.transfer.ops import CellOutcome
from vllm_kvpool.transfer.trace import (
    END_BYTES,
    MAX_FLOWS,
    MAX_QUEUED,
    NO_TRACE,
    SHOWN_CHARS,
    SHOWN_REQUESTS,
    Instant,
    Level,
    Span,
    Trace,
    TraceFile,
)

LIMIT_S = 30.0
NOW_S = 1000.0  # of the clock
PID = 4242
WALL_NS = 1_790_000_000_123_456_789
DOCUMENT = Path(__file__).parents[2] / "docs" / "tracing.md"
Event = dict[str, Any]


class Gate:
    """A file whose writes wait until the test opens the gate."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self.reached = threading.Event()
        self.open = threading.Event()

    def __enter__(self) -> "Gate":
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def write(self, data: bytes) -> int:
        self.reached.set()
        assert self.open.wait(LIMIT_S)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()


class FullDisk(io.BytesIO):
    """A disk that accepts the head of the file and nothing more."""

    def write(self, data: Any) -> int:
        if self.tell():
            raise OSError(errno.ENOSPC, "no space")
        return super().write(data)


class Recorder(TraceFile):
    """A trace file with a method for each kind of record, and its own clock."""

    def __init__(self, path: Path, name: str, pid: int, clock: Any = time.monotonic, **more: Any):
        super().__init__(path, name, pid, clock, **more)
        self.clock = clock

    def batch(self, name: str, start_s: float, stop_s: float, **what: Any) -> None:
        self.add(Span(threading.current_thread(), name, start_s, stop_s, **what))

    def instant(self, name: str, **what: Any) -> None:
        self.add(Instant(self.clock(), name, **what))

    def counter(self, name: str, value: float) -> None:
        self.add(Level(self.clock(), name, value))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.0.json"


def make(path: Path, clock: FakeClock | None = None, pid: int = PID, **options: Any) -> Recorder:
    return Recorder(
        path, f"rank of {pid}", pid, clock or FakeClock(NOW_S), wall_ns=lambda: WALL_NS, **options
    )


def closed(trace: TraceFile, path: Path) -> list[Event]:
    """Close the trace, and return its events. The file must be valid JSON."""
    trace.close(LIMIT_S)
    return list(json.loads(path.read_bytes()))


def of(events: list[Event], phase: str) -> list[Event]:
    return [event for event in events if event["ph"] == phase]


def assert_nested(events: list[Event]) -> None:
    """Assert that batches of a track follow or enclose one another, to the microsecond."""
    tracks = defaultdict(list)
    for event in of(events, "X"):
        tracks[event["pid"], event["tid"]].append((event["ts"], -event["dur"]))
    for spans in tracks.values():
        ends: list[int] = []
        for start, minus_duration in sorted(spans):
            while ends and ends[-1] <= start:
                ends.pop()
            assert not ends or start - minus_duration <= ends[-1]
            ends.append(start - minus_duration)


def in_thread(name: str, target: Any) -> threading.Thread:
    thread = threading.Thread(target=target, name=name, daemon=True)
    thread.start()
    return thread


def test_a_batch_is_all_that_is_known_of_it(path: Path) -> None:
    clock = FakeClock(NOW_S)
    trace = make(path, clock)
    requests = ["r0", "r1" * SHOWN_CHARS, "r0", "r2", "r3", "r4", "r5"]
    in_thread(
        "kvpool-get-0",
        lambda: trace.batch(
            "get",
            1001.0,
            1001.0025,
            tier="file",
            cells=3,
            nbytes=4096,
            outcomes={CellOutcome.DONE: 2, CellOutcome.FAILED: 1},
            requests=requests,
            jobs=(7, 7, 8),
            attempt=2,
        ),
    ).join()
    events = closed(trace, path)
    process, thread = of(events, "M")
    assert process == events[0] | {"name": "process_name", "args": {"name": f"rank of {PID}"}}
    assert (thread["name"], thread["args"]) == ("thread_name", {"name": "kvpool-get-0"})
    (batch,) = of(events, "X")
    shown = ["r0", ("r1" * SHOWN_CHARS)[:SHOWN_CHARS], "r2", "r3"]
    assert len(shown) == SHOWN_REQUESTS
    assert batch == {
        "ph": "X",
        "pid": PID,
        "tid": thread["tid"],
        "ts": WALL_NS // 1000 + 1_000_000,
        "dur": 2500,
        "cat": "get",
        "name": "get",
        "args": {
            "tier": "file",
            "cells": 3,
            "bytes": 4096,
            "outcomes": {"done": 2, "failed": 1},
            "requests": shown,
            "more_requests": 2,
            "jobs": [7, 8],
            "attempt": 2,
        },
    }
    assert trace.dropped == 0


def test_batches_of_a_plan_are_joined_in_the_order_in_which_they_ended(path: Path) -> None:
    clock = FakeClock(NOW_S)
    trace = make(path, clock)

    def record(name: str, start: float, stop: float, *jobs: int) -> None:
        trace.batch(name, start, stop, jobs=jobs)

    # Recorded out of order, as threads may do.
    record("scatter", 1005.0, 1006.0, 1)
    record("get b", 1002.0, 1004.0, 1, 2)
    record("get a", 1001.0, 1003.0, 1)
    events = closed(trace, path)
    spans = {e["ts"] + e["dur"] - 1: e["name"] for e in of(events, "X")}
    points = [(e["ph"], e["id"], spans[e["ts"]]) for e in events if e["ph"] in "st"]
    one, two = f"0x{PID:x}00000001", f"0x{PID:x}00000002"
    assert points == [
        ("s", one, "get a"),
        ("t", one, "get b"),
        ("s", two, "get b"),
        ("t", one, "scatter"),
    ]
    # Perfetto identifies a flow by these three.
    assert {(e["cat"], e["name"]) for e in events if e["ph"] in "st"} == {("plan", "plan")}


def test_arrows_end_with_the_report_and_are_bounded_without(path: Path) -> None:
    clock = FakeClock(NOW_S)
    trace = make(path, clock)
    for job in range(MAX_FLOWS + 1):  # the first job is forgotten
        trace.batch("put", clock.now, clock.now, jobs=(job,))
        clock.advance(1)
    trace.instant("save done", job=5)
    clock.advance(1)
    for job in (0, 5, 6):
        trace.batch("put", clock.now, clock.now, jobs=(job,))
    events = closed(trace, path)
    later = [e["ph"] for e in events if e["ph"] in "st"][-3:]
    assert later == ["s", "s", "t"]


def test_levels_are_written_when_they_change(path: Path) -> None:
    clock = FakeClock(NOW_S)
    trace = make(path, clock)
    for value in (3, 3, 4, 4, 3):
        trace.counter("queue get", value)
        trace.counter("free", 3)
        clock.advance(0.001)
    found = [(e["ts"], e["name"], e["args"]) for e in of(closed(trace, path), "C")]
    start = WALL_NS // 1000
    assert found == [
        (start, "queue get", {"cells": 3}),
        (start, "free", {"cells": 3}),
        (start + 2000, "queue get", {"cells": 4}),
        (start + 4000, "queue get", {"cells": 3}),
    ]


def test_reports_are_marks_of_the_process(path: Path) -> None:
    trace = make(path)
    trace.instant("load done", job=0, request="r")
    trace.instant("tier down", tier="mooncake")
    done, down = of(closed(trace, path), "i")
    assert done["args"] == {"job": 0, "request": "r"}
    assert (down["name"], down["args"]) == ("tier down", {"tier": "mooncake"})
    assert {(e["s"], e["ts"]) for e in (done, down)} == {("p", WALL_NS // 1000)}


def test_processes_of_a_host_share_a_time_line(tmp_path: Path) -> None:
    """The processes' clocks start at different times."""
    times = []
    for pid, begin in ((1, 10.0), (2, 5e6)):
        trace = make(tmp_path / str(pid), FakeClock(begin), pid)
        trace.batch("get", begin + 2.5, begin + 2.75)
        times += [(e["ts"], e["dur"]) for e in of(closed(trace, tmp_path / str(pid)), "X")]
    assert times == [(WALL_NS // 1000 + 2_500_000, 250_000)] * 2


def test_many_threads_lose_nothing_and_nest(path: Path) -> None:
    trace = Recorder(path, "rank", PID)
    each = 300

    def lane() -> None:
        for i in range(each):
            start = time.monotonic()
            inner = time.monotonic()
            trace.batch("part", inner, time.monotonic(), jobs=(i,))
            trace.batch("whole", start, time.monotonic())
            trace.counter("queue", time.monotonic())
            trace.instant("load done", job=i)

    threads = [in_thread(f"lane-{n}", lane) for n in range(4)]
    for thread in threads:
        thread.join()
    events = closed(trace, path)
    assert trace.dropped == 0
    assert {ph: len(of(events, ph)) for ph in "XCi"} == {"X": 2400, "C": 1200, "i": 1200}
    assert_nested(events)
    names = {e["tid"]: e["args"]["name"] for e in of(events, "M") if e["name"] == "thread_name"}
    assert sorted(names.values()) == [f"lane-{n}" for n in range(4)]
    assert {e["tid"] for e in of(events, "X")} == set(names)
    for event in events[1:]:
        assert event["ph"] == "M" or isinstance(event["ts"], int)


def test_batches_that_touch_do_not_overlap_for_being_rounded(path: Path) -> None:
    trace = make(path)
    times = [1000 + i * 1.6e-6 for i in range(1000)]
    for start, stop in itertools.pairwise(times):
        trace.batch("get", start, stop)
    events = closed(trace, path)
    assert len(of(events, "X")) == len(times) - 1
    assert_nested(events)


def test_a_slow_disk_holds_up_nobody_and_what_is_too_much_is_counted(path: Path) -> None:
    gate = Gate(path)
    trace = make(path, open_file=lambda _: gate)
    assert gate.reached.wait(LIMIT_S)
    more = 10
    for i in range(MAX_QUEUED + more):
        trace.counter("n", i)
    assert trace.dropped == more
    trace.close(timeout_s=0.01)
    assert not gate.open.is_set()
    gate.open.set()
    events = closed(trace, path)
    assert [e["args"]["cells"] for e in of(events, "C")] == list(range(MAX_QUEUED))
    assert trace.dropped == more


def test_a_file_that_is_full_says_so_and_grows_no_more(path: Path) -> None:
    ended = threading.Event()

    class Watched(io.FileIO):
        def close(self) -> None:
            super().close()
            ended.set()

    limit, count = END_BYTES + 5000, 500
    trace = make(path, open_file=lambda p: Watched(p, "wb"), max_bytes=limit)
    for i in range(count):
        trace.counter("n", i)
    assert ended.wait(LIMIT_S)  # without being closed
    trace.instant("too late")
    events = closed(trace, path)
    size = path.stat().st_size
    assert limit - END_BYTES - 200 < size <= limit
    assert [e["name"] for e in of(events, "i")] == ["trace full"]
    assert events[-1]["name"] == "trace full"
    written = [e["args"]["cells"] for e in of(events, "C")]
    assert written == list(range(len(written)))
    assert trace.dropped == count - len(written) + 1
    assert not trace.on


def test_records_are_in_the_file_soon_and_all_flushes_count(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_module, "FLUSH_S", 0.0)
    flushed = threading.Semaphore(0)
    ended = threading.Event()

    class Watched(io.BufferedWriter):
        def flush(self) -> None:
            super().flush()
            flushed.release()

        def close(self) -> None:
            super().close()
            ended.set()
            flushed.release()

    limit, count = END_BYTES + 5000, 200
    trace = make(path, open_file=lambda p: Watched(io.FileIO(p, "wb")), max_bytes=limit)
    assert flushed.acquire(timeout=LIMIT_S)  # the head
    for i in range(count):
        trace.instant(f"mark {i}")
        assert flushed.acquire(timeout=LIMIT_S)
        if ended.is_set():
            break
        if i < 5:
            assert f"mark {i}" in path.read_text()
    events = closed(trace, path)
    assert events[-1]["name"] == "trace full"
    assert 5 < len(of(events, "i")) < count
    assert path.stat().st_size <= limit


@pytest.mark.parametrize("content", [b"precious", b"[]", b'[{"ph":"X","pid":7'])
def test_a_file_that_is_no_trace_stays(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "trace.0.json"
    path.write_bytes(content)
    TraceFile(path, "rank 0", 7).close(LIMIT_S)
    assert path.read_bytes() == content
    assert "something else is in" in caplog.text
    path.unlink()
    for _ in range(2):  # replaces an earlier process's file
        TraceFile(path, "rank 0", 7).close(LIMIT_S)
    assert len(json.loads(path.read_bytes())) == 1


@pytest.mark.parametrize("fault", ["open", "write"])
def test_a_broken_disk_is_told_once_and_ends_the_trace(
    fault: str, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def open_file(path: Path) -> BinaryIO:
        if fault == "open":
            raise PermissionError(errno.EACCES, "not yours")
        return FullDisk()

    with caplog.at_level(logging.WARNING):
        trace = make(path, open_file=open_file)
        for _ in range(3):
            trace.instant("one")
        trace.close(LIMIT_S)
        assert trace.dropped == 3
        for _ in range(3):
            trace.batch("get", 1.0, 2.0)
            trace.counter("n", 1)
        trace.close(LIMIT_S)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert str(path) in caplog.text
    assert not trace.on
    assert trace.dropped == 9


def test_what_json_cannot_say_is_left_out(path: Path) -> None:
    trace = make(path)
    trace.instant("done", request="\ud800")
    trace.instant("done", request='"\\\n}]')
    (done,) = of(closed(trace, path), "i")
    assert done["args"]["request"] == '"\\\n}]'
    assert trace.dropped == 1


def test_closing_again_changes_nothing_and_later_records_are_counted(path: Path) -> None:
    trace = make(path)
    trace.instant("done")
    first = closed(trace, path)
    trace.instant("too late")
    assert closed(trace, path) == first
    assert trace.dropped == 1


CHILD = """
import itertools, sys, threading, time
from pathlib import Path
from vllm_kvpool.transfer import trace as module
module.FLUSH_S = 0.001
trace = module.TraceFile(Path(sys.argv[1]), "child", 7)
for i in itertools.count():
    start = time.monotonic()
    thread = threading.current_thread()
    requests = ("request",) * 3
    span = module.Span(thread, "get", start, time.monotonic(), requests=requests, jobs=(i,))
    trace.add(span)
    time.sleep(0.0001)
"""


def test_a_process_killed_while_it_writes_leaves_a_file_that_opens(path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(path)])
    try:
        deadline = time.monotonic() + LIMIT_S
        while not path.exists() or path.stat().st_size < 50_000:
            assert child.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.005)
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait(LIMIT_S)
    # The kernel may stop a write of several pages between two of them.
    whole, _, rest = path.read_bytes().rpartition(b"\n")
    assert not rest.endswith(b"}")
    events = json.loads(whole + b"]")
    assert len(of(events, "X")) > 100
    assert_nested(events)


def test_the_command_that_joins_files(tmp_path: Path) -> None:
    """The files are of three ranks: the first ended, the others were killed, between lines and
    within a line."""
    (command,) = re.findall(r"^ *({ sed .*)$", DOCUMENT.read_text(), re.MULTILINE)
    for rank in range(3):
        path = tmp_path / f"trace.{rank}.json"
        trace = make(path, pid=rank)
        for _ in range(2):
            trace.batch("get", 1000.0, 1001.0, outcomes={CellOutcome.DONE: 1}, jobs=(1,))
        closed(trace, path)
        lines = path.read_bytes().splitlines(keepends=True)
        kept = {0: lines, 1: lines[:-1], 2: [*lines[:-2], lines[-2][:20]]}[rank]
        path.write_bytes(b"".join(kept))
    subprocess.run(["sh", "-c", command], cwd=tmp_path, check=True, timeout=LIMIT_S)
    events = json.loads((tmp_path / "joined.json").read_bytes())
    assert [e["pid"] for e in events if e["name"] == "process_name"] == [0, 1, 2]
    assert [e["pid"] for e in of(events, "X")] == [0, 0, 1, 1, 2, 2]
    assert len({e["id"] for e in events if "id" in e}) == 3


def public(kind: type) -> Iterator[tuple[str, Any]]:
    return ((name, value) for name, value in vars(kind).items() if not name.startswith("_"))


def test_a_trace_that_is_off_takes_the_same_calls_and_does_nothing(tmp_path: Path) -> None:
    kept = dict(public(TraceFile))
    for name, method in public(Trace):
        if not isinstance(method, property):
            assert inspect.signature(method) == inspect.signature(kept.pop(name))
        else:
            del kept[name]
    assert kept == {}
    NO_TRACE.add(Instant(1.0, "done", job=1))
    NO_TRACE.close()
    assert (NO_TRACE.on, NO_TRACE.dropped) == (False, 0)
