"""Fakes for tests: clock, lane faults, request, pins, copier, executor and trace.

Each fake keeps the contract of the object that it replaces, and asserts that its caller keeps it
too. A test names each misbehaviour before it uses the fake. `FaultyPerform` may be called from any
thread, the other fakes only from the test's thread. Stores with faults are in faults.py.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from tests.support.faults import BLOCK_LIMIT_S
from vllm_kvpool.layout.pages import SlabMove
from vllm_kvpool.scheduler.lookup import Lookup
from vllm_kvpool.scheduler.lookup_service import LookupService
from vllm_kvpool.scheduler.request import OwnKV

NULL_BLOCK = 0
ANSWER_LIMIT_S = 60.0

OptionsT = TypeVar("OptionsT")
IdentityT = TypeVar("IdentityT")


class FakeClock:
    """A clock that moves only when a test calls `advance`."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        assert seconds >= 0, seconds
        self.now += seconds

    def ns(self) -> int:
        """Return the time in nanoseconds, as clocks of file stores do."""
        return int(self.now * 1e9)


class PatientLookups(LookupService):
    """A lookup service that waits for its stores even if the scheduler's clock stands still."""

    def submit(self, lookup: Lookup) -> None:
        super().submit(replace(lookup, answer_by=time.monotonic() + ANSWER_LIMIT_S))


class FaultyPerform:
    """A wrapper of the lanes' `perform` that adds faults. Without faults it calls `perform`."""

    def __init__(self, perform: Callable[[Any], Any]) -> None:
        self._perform = perform
        self._lock = threading.Lock()
        self._deaths: list[tuple[str, int, int]] = []  # lane, first and last call, from 1
        self._held: set[str] = set()
        self._released = threading.Event()
        self.entered = threading.Event()
        """Set as soon as a batch is held."""
        self.on_batch: Callable[[str], None] = lambda lane: None
        """Called with the lane, in the lane's thread, before a batch is handled."""
        self.calls: Counter[str] = Counter()  # by lane
        self.threads: dict[str, threading.Thread] = {}  # thread of the last call, by lane

    def kill(self, lane: str, after: int = 0, times: int = 1) -> None:
        """Let a lane's thread die in its next `times` batches, after `after` good batches."""
        with self._lock:
            first = self.calls[lane] + after + 1
            self._deaths.append((lane, first, first + times - 1))

    def spare(self) -> None:
        """Cancel all deaths that have not happened."""
        with self._lock:
            self._deaths.clear()

    def hold(self, lane: str) -> None:
        """Block each batch of a lane until `release`."""
        self._held.add(lane)

    def release(self) -> None:
        """Let held batches go on, and hold no later batches."""
        self._released.set()

    def __call__(self, work: Any) -> Any:
        lane = str(work.lane)
        with self._lock:
            self.calls[lane] += 1
            self.threads[lane] = threading.current_thread()
            call = self.calls[lane]
        self.on_batch(lane)
        if lane in self._held:
            self.entered.set()
            assert self._released.wait(BLOCK_LIMIT_S), "never released"
        if any(name == lane and first <= call <= last for name, first, last in self._deaths):
            raise SystemExit(f"{lane} dies")
        return self._perform(work)


@dataclass(slots=True)
class FakeRequest(Generic[OptionsT, IdentityT]):
    """A request as the scheduler side sees it (`RequestView`), advanced by the test."""

    request_id: str
    prompt: list[int]
    options: OptionsT
    identified: IdentityT | None
    """Result of `identity`, unless `identify` is set."""
    output: list[int] = field(default_factory=list)
    shareable: bool = True
    reads_cache: bool = True
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    identify: Callable[[], IdentityT | None] | None = None
    reads_files: bool = False
    has_media: bool = False
    own: OwnKV = field(default_factory=OwnKV)
    """Result of `admit`."""
    admissions: int = 0
    tenant: str = ""
    trace_headers: Mapping[str, str] | None = None
    spans: list[tuple[str, float, Mapping[str, int | str]]] = field(default_factory=list)
    kept_state: int = 0
    """Number of tokens before the state that the engine is to keep."""

    def keep_state_at(self, boundary: int) -> None:
        self.kept_state = boundary

    def record_span(self, name: str, seconds: float, attributes: Mapping[str, int | str]) -> None:
        self.spans.append((name, seconds, attributes))

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.output)

    def tokens(self) -> Sequence[int]:
        return self.prompt + self.output

    def identity(self) -> IdentityT | None:
        return self.identified if self.identify is None else self.identify()

    def admit(self) -> OwnKV:
        self.admissions += 1
        return self.own

    def preempt(self) -> None:
        self.num_computed_tokens = 0
        self.num_preemptions += 1


class FakePins:
    """Reference counts of blocks. Unpinning a block that is not pinned is an AssertionError."""

    def __init__(self) -> None:
        self.references: Counter[int] = Counter()
        self.num_pins = 0
        self.all_blocks = 0  # number of blocks if all are free
        self.forgotten: list[int] = []

    def pin(self, block_ids: Sequence[int]) -> None:
        self.num_pins += 1
        self.references.update(block_ids)

    def unpin(self, block_ids: Sequence[int]) -> None:
        self.references.subtract(block_ids)
        assert min(self.references.values(), default=0) >= 0, self.references
        self.references += Counter()  # drops zeros

    def evict(self, block_ids: Sequence[int]) -> None:
        self.forgotten += block_ids

    def num_if_all_free(self) -> int:
        return self.all_blocks

    def check(self) -> None:
        assert NULL_BLOCK not in self.references
        assert all(count > 0 for count in self.references.values())


class FakeCopier:
    """A copier that records moves and copies nothing; if `broken` is set, each call raises."""

    num_threads = 1

    def __init__(self) -> None:
        self.gathered: list[SlabMove] = []
        self.scattered: list[SlabMove] = []
        self.broken = False

    def gather(self, moves: Sequence[SlabMove]) -> None:
        self._move(self.gathered, moves)

    def scatter(self, moves: Sequence[SlabMove]) -> None:
        self._move(self.scattered, moves)

    def _move(self, record: list[SlabMove], moves: Sequence[SlabMove]) -> None:
        if self.broken:
            raise RuntimeError("the copier is broken")
        record.extend(moves)


class FakeExecutor:
    """An executor that records posts and returns the test's reports; `wait` never blocks."""

    def __init__(self) -> None:
        self.posted: list[object] = []
        self.reports: list[object] = []
        self.waited: list[float] = []
        self.ready: list[bool] = []
        self.on_wait: Callable[[], None] = lambda: None

    def post(self, message: object) -> None:
        self.posted.append(message)

    def drain(self) -> list[object]:
        reports, self.reports = self.reports, []
        return reports

    def wait(self, ready: Callable[[Sequence[object]], bool], timeout_s: float) -> bool:
        self.waited.append(timeout_s)
        self.on_wait()
        self.ready.append(ready(self.reports))
        return self.ready[-1]


class FakeTrace:
    """A trace that keeps its records in order."""

    on = True
    dropped = 0

    def __init__(self) -> None:
        self.records: list[Any] = []

    def add(self, record: Any) -> None:
        self.records.append(record)

    def close(self, timeout_s: float = 0) -> None:
        pass

    def of(self, kind: type) -> list[Any]:
        """Return all records of one kind."""
        return [record for record in self.records if isinstance(record, kind)]
