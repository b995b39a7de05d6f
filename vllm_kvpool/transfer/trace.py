"""A trace of every batch, in the Chrome trace event format (ui.perfetto.dev). See docs/tracing.md.

    any thread ──record──▶ bounded deque ──▶ writer thread ──lines, every FLUSH_S──▶ file

The recording thread pays for a tuple and an append; the writer thread makes names, sums and JSON.
Nothing here raises into a caller or makes it wait: records that find the deque or the file full,
broken or closed are counted in `dropped`.
"""

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, NamedTuple

import msgspec

from vllm_kvpool.private_files import open_to_write

logger = logging.getLogger(__name__)

FLUSH_S = 0.25
CLOSE_JOIN_S = 0.5
MAX_QUEUED = 16384  # records: a few MiB
MAX_TRACE_BYTES = 256 << 20  # about a million events; Perfetto takes some seconds to open them
END_BYTES = 1024  # kept free for the event that says the file is full, and the end of the array
MAX_FLOWS = 4096  # jobs without a report; beyond it the oldest begin a new row of arrows
SHOWN_REQUESTS = 4
SHOWN_CHARS = 80  # of a request's id, which may be a user's


class Span(NamedTuple):
    """A batch that a thread has performed, from `start_s` to `at_s`.

    Spans with a job in common are joined by arrows in the order in which they ended. Spans of one
    thread may follow or enclose one another. Sequences are read later, by another thread: they must
    not change.
    """

    thread: threading.Thread
    name: str
    start_s: float
    at_s: float
    tier: str = ""
    cells: int = 0
    nbytes: int = 0
    outcomes: Mapping[Any, int] = MappingProxyType({})  # cells by outcome
    requests: Sequence[str] = ()
    jobs: Sequence[int] = ()
    attempt: int = 1


class Instant(NamedTuple):
    """An event at one time. With a job: its last report, after which no arrow follows."""

    at_s: float
    name: str
    job: int | None = None
    request: str = ""
    tier: str = ""


class Level(NamedTuple):
    """A value that holds from `at_s` on; one that has not changed is not written."""

    at_s: float
    name: str
    value: float  # cells


Record = Span | Instant | Level


RecordSpan = Callable[[Mapping[str, str] | None, str, float, Mapping[str, int | str]], None]
"""Adds a span that ends now to the trace that headers name: its name, seconds and attributes."""


def no_span(
    headers: Mapping[str, str] | None,
    name: str,
    seconds: float,
    attributes: Mapping[str, int | str],
) -> None:
    """Record no span."""


class Trace:
    """Takes records, with times of `time.monotonic`. This one drops them: tracing is off."""

    @property
    def on(self) -> bool:
        """True if records are kept."""
        return False

    @property
    def dropped(self) -> int:
        """Events that were not written."""
        return 0

    def add(self, record: Record) -> None:
        """Record a batch. Any thread; returns at once and never raises."""

    def close(self, timeout_s: float = CLOSE_JOIN_S) -> None:
        """Write what is left and end, within `timeout_s`; may be called again."""


NO_TRACE = Trace()


_Event = dict[str, Any]


class _Renderer:
    """Turns records into trace events. Owned by the writer thread."""

    def __init__(self, process_name: str, pid: int, epoch_s: float, epoch_ns: int) -> None:
        """Set the clocks.

        At `epoch_s` of the recorders' clock it was `epoch_ns` since the epoch.
        """
        self._process_name = process_name
        self._pid = pid
        self._epoch_s = epoch_s
        self._epoch_ns = epoch_ns
        self._tracks: set[tuple[int | None, str]] = set()
        self._flows: OrderedDict[int, None] = OrderedDict()  # jobs with a batch and no report
        self._levels: dict[str, float] = {}

    def head(self) -> _Event:
        return self._named("process_name", self._process_name, {})

    def events(self, records: Iterable[Record]) -> Iterator[_Event]:
        # Sorted: threads do not append in the order of their times, and only the earliest span of a
        # job may begin its arrows.
        for record in sorted(records, key=lambda r: r.at_s):
            match record:
                case Span():
                    yield from self._span(record)
                case Instant():
                    yield self.instant(record)
                case Level(at_s, name, value):
                    if self._levels.get(name) != value:
                        self._levels[name] = value
                        yield {**self._at("C", at_s), "name": name, "args": {"cells": value}}

    def instant(self, record: Instant) -> _Event:
        texts = {"request": record.request, "tier": record.tier}
        args: _Event = {key: text[:SHOWN_CHARS] for key, text in texts.items() if text}
        if record.job is not None:
            args["job"] = record.job
            self._flows.pop(record.job, None)
        event = {**self._at("i", record.at_s), "s": "p", "cat": "report", "name": record.name}
        return {**event, "args": args}

    def _span(self, span: Span) -> Iterator[_Event]:
        thread = span.thread
        place = {"tid": thread.native_id}
        if (thread.native_id, thread.name) not in self._tracks:
            self._tracks.add((thread.native_id, thread.name))
            yield self._named("thread_name", thread.name, place)
        # Both ends are rounded down, so that two spans in a row still do not overlap.
        start, stop = self._micros(span.start_s), self._micros(span.at_s)
        jobs = list(dict.fromkeys(span.jobs))
        requests = list(dict.fromkeys(span.requests))
        args: _Event = {
            "tier": span.tier,
            "cells": span.cells,
            "bytes": span.nbytes,
            "outcomes": {outcome.value: count for outcome, count in span.outcomes.items()},
            "requests": [request[:SHOWN_CHARS] for request in requests[:SHOWN_REQUESTS]],
            "jobs": jobs[:SHOWN_REQUESTS],
            "attempt": span.attempt,
        }
        if len(requests) > SHOWN_REQUESTS:
            args["more_requests"] = len(requests) - SHOWN_REQUESTS
        event = {**self._at("X", span.start_s), **place, "dur": max(0, stop - start)}
        yield {**event, "cat": span.name, "name": span.name, "args": args}
        for job in jobs:
            point: _Event = {"ph": "t" if job in self._flows else "s", "pid": self._pid, **place}
            # Perfetto ties a point to the span that its track is in at that time.
            point["ts"] = max(start, stop - 1)
            # Ranks have the same job ids, and files of several ranks may be joined.
            point["id"] = f"0x{self._pid:x}{job & 0xFFFFFFFF:08x}"
            yield {**point, "cat": "plan", "name": "plan"}
            self._flows[job] = None
            if len(self._flows) > MAX_FLOWS:
                self._flows.popitem(last=False)

    def _named(self, what: str, name: str, place: _Event) -> _Event:
        return {"ph": "M", "pid": self._pid, **place, "name": what, "args": {"name": name}}

    def _at(self, phase: str, at_s: float) -> _Event:
        return {"ph": phase, "pid": self._pid, "ts": self._micros(at_s)}

    def _micros(self, at_s: float) -> int:
        return (self._epoch_ns + round((at_s - self._epoch_s) * 1e9)) // 1000


_BEGINNING = b'[{"ph":"M","pid":'


def _create(path: Path) -> BinaryIO:
    """Create the file of a trace, or empty that of an earlier one; OSError if it is another."""
    return open_to_write(path, _BEGINNING)


class TraceFile(Trace):
    """A trace in a file. The writer thread is a daemon; `close` leaves one that hangs behind.

    The file is a JSON array, an event a line: `[` and the process's name first, then `,` and an
    event. It may end after any line, or in a line if the process was killed: Perfetto takes an
    array without its `]` and leaves out half an event.

    Times are microseconds since the epoch: each process reads the wall clock once and counts on
    with `clock`, so all processes of a host lie on one time line. They are whole numbers: doubles
    of this size are a quarter of a microsecond apart, and batches that follow one another must not
    overlap.
    """

    def __init__(
        self,
        path: Path,
        process_name: str,
        pid: int,
        clock: Callable[[], float] = time.monotonic,
        *,
        wall_ns: Callable[[], int] = time.time_ns,
        open_file: Callable[[Path], BinaryIO] = _create,
        max_bytes: int = MAX_TRACE_BYTES,
    ) -> None:
        """Start the writer thread, which creates the file or empties an older trace.

        `clock` is the records'; `pid` tells processes of a host apart.
        """
        self._path = path
        self._clock = clock
        self._open_file = open_file
        self._max_bytes = max_bytes
        before = clock()
        epoch_ns = wall_ns()
        self._renderer = _Renderer(process_name, pid, (before + clock()) / 2, epoch_ns)
        self._encoder = msgspec.json.Encoder()
        self._queue: deque[Record] = deque()
        self._on = True
        self._lock = threading.Lock()  # guards _dropped; held for an addition only
        self._dropped = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvpool-trace", daemon=True)
        self._thread.start()

    @property
    def on(self) -> bool:
        """True until `close`, or an error of the file."""
        return self._on

    @property
    def dropped(self) -> int:
        """Number of records that were not written, as the file was too slow."""
        return self._dropped

    def add(self, record: Record) -> None:
        """Queue a record for the writer thread; beyond MAX_QUEUED it is dropped and counted."""
        # Other threads may append after the length was read: each may pass the bound by one record.
        if self._on and len(self._queue) < MAX_QUEUED:
            self._queue.append(record)
        else:
            self._drop(1)

    def close(self, timeout_s: float = CLOSE_JOIN_S) -> None:
        """Write the queued records, for at most `timeout_s`."""
        self._on = False
        self._closing.set()
        self._thread.join(timeout_s)

    def _drop(self, count: int) -> None:
        with self._lock:
            self._dropped += count

    # The writer thread

    def _run(self) -> None:
        try:
            with self._open_file(self._path) as file:
                self._write(file)
        except Exception as error:  # of the disk or of ours: a trace must not fail requests
            logger.warning(
                "kvpool: trace_file %s: writing failed, tracing ends: %r", self._path, error
            )
        self._on = False
        self._drop(len(self._queue))
        self._queue.clear()

    def _write(self, file: BinaryIO) -> None:
        left = self._max_bytes - END_BYTES
        left -= file.write(b"[" + self._encoder.encode(self._renderer.head()) + b"\n")
        file.flush()
        closing = False
        while not closing:
            # Before the queue is read, so that all of it is written.
            closing = self._closing.wait(FLUSH_S)
            records = [self._queue.popleft() for _ in range(len(self._queue))]
            lines = [self._line(event) for event in self._renderer.events(records)]
            sizes = 0
            for fitting, line in enumerate(lines):
                sizes += len(line)
                if sizes > left:
                    self._drop(len(lines) - fitting)
                    full = Instant(self._clock(), "trace full")
                    lines[fitting:] = [self._line(self._renderer.instant(full))]
                    closing = True
                    break
            if lines:
                try:
                    file.write(b"".join(lines))
                    file.flush()
                except OSError:
                    self._drop(len(lines))
                    raise
                left -= sizes
        file.write(b"]\n")

    def _line(self, event: _Event) -> bytes:
        """Return an event as JSON; empty if JSON cannot express it."""
        try:
            return b"," + self._encoder.encode(event) + b"\n"
        except (TypeError, ValueError):
            self._drop(1)
            return b""
