"""Work threads go on after a death; messages in the log that peers cause are limited."""

import logging
import queue
import threading
import weakref

import pytest

from vllm_kvpool.network.log_limit import EVERY_S, MAX_SUBJECTS, LogLimit
from vllm_kvpool.network.work_thread import WorkThread

PATIENCE_S = 20.0


@pytest.mark.parametrize("error", [RuntimeError, MemoryError, SystemExit, KeyboardInterrupt])
def test_every_piece_is_reported_once_whatever_the_thread_meets(
    error: type[BaseException],
) -> None:
    inbox: queue.SimpleQueue[list[int] | None] = queue.SimpleQueue()
    told: list[tuple[int, bool]] = []
    failures: list[str] = []

    def perform(work: int) -> bool:
        if work % 3 == 0:
            raise error
        return True

    def report(work: int, result: bool) -> None:
        told.append((work, result))
        if work == 4:
            raise error

    thread = WorkThread(
        "worker",
        0,
        take=inbox.get,
        perform=perform,
        failed=lambda work: False,
        report=report,
        work_failed=lambda kind, error: failures.append(kind),
    )
    for work in range(0, 10, 2):
        inbox.put([work, work + 1])
    inbox.put(None)
    assert thread.join(PATIENCE_S)
    assert told == [(work, bool(work % 3)) for work in range(10)]
    assert failures == ["worker"] * 5


class Piece:
    """Stands for work that refers to an item's memory; can be referred to weakly."""


def test_a_thread_that_waits_holds_no_work() -> None:
    """Else each of them would keep the memory of an item."""
    inbox: queue.SimpleQueue[list[Piece] | None] = queue.SimpleQueue()
    are_reported = threading.Event()
    thread = WorkThread(
        "worker",
        0,
        take=inbox.get,
        perform=lambda work: None,
        failed=lambda work: None,
        report=lambda work, result: are_reported.set(),
        work_failed=lambda kind, error: None,
    )
    piece = Piece()
    is_gone = threading.Event()
    weakref.finalize(piece, is_gone.set)
    inbox.put([piece])
    del piece
    assert are_reported.wait(PATIENCE_S)
    assert is_gone.wait(PATIENCE_S)
    inbox.put(None)
    assert thread.join(PATIENCE_S)


class Logged:
    """A limit, its clock and the lines that pass it."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self.now = 0.0
        self._caplog = caplog
        self.limit = LogLimit(logging.getLogger("limited"), lambda: self.now)

    def log(self, kind: str = "kind", subject: str = "peer") -> None:
        self.limit.log(logging.WARNING, kind, subject, "%s of %s", kind, subject)

    def lines(self) -> list[str]:
        found = [each.getMessage() for each in self._caplog.records]
        self._caplog.clear()
        return found


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Logged:
    return Logged(caplog)


def test_a_message_is_logged_once_and_then_with_the_number_of_the_others(logged: Logged) -> None:
    for _ in range(1000):
        logged.log()
    assert logged.lines() == ["kind of peer"]
    logged.now += EVERY_S
    logged.limit.tick()
    logged.log()
    assert logged.lines() == [
        "kvpool: kind, peer: 999 more messages were not logged in 60 s",
        "kind of peer",
    ]


def test_what_was_suppressed_is_said_though_nothing_follows(logged: Logged) -> None:
    for _ in range(8):
        logged.log()
    logged.lines()
    logged.limit.tick()
    assert logged.lines() == []
    logged.now += EVERY_S
    logged.limit.tick()
    assert logged.lines() == ["kvpool: kind, peer: 7 more messages were not logged in 60 s"]
    logged.limit.tick()
    assert logged.lines() == []


def test_peers_and_kinds_do_not_silence_each_other(logged: Logged) -> None:
    for kind in ("a", "b"):
        for subject in ("x", "y"):
            logged.log(kind, subject)
    assert logged.lines() == ["a of x", "a of y", "b of x", "b of y"]


def test_any_number_of_peers_is_a_bounded_number_of_lines(logged: Logged) -> None:
    for number in range(10_000):
        logged.log(subject=f"peer {number}")
    assert len(logged.lines()) == MAX_SUBJECTS + 1
    logged.now += EVERY_S
    logged.limit.tick()
    (line,) = logged.lines()
    assert str(10_000 - MAX_SUBJECTS - 1) in line
