"""A work thread: what it died of is reported as failed, once, and it goes on."""

import queue

import pytest

from vllm_kvpool.embeds.faults import WorkThread

PATIENCE_S = 20.0


@pytest.mark.parametrize("error", [RuntimeError, MemoryError, SystemExit, KeyboardInterrupt])
def test_every_piece_is_reported_once_whatever_the_thread_dies_of(
    error: type[BaseException],
) -> None:
    inbox: queue.SimpleQueue[int | None] = queue.SimpleQueue()
    told: list[tuple[int, bool]] = []
    deaths: list[str] = []

    def perform(work: int) -> tuple[int, bool]:
        if work % 3 == 0:
            raise error
        return work, True

    def report(result: tuple[int, bool]) -> None:
        told.append(result)
        if result[0] == 5:
            raise error

    thread = WorkThread(
        "worker",
        take=inbox.get,
        perform=perform,
        failed=lambda work: (work, False),
        report=report,
        died=lambda name, error: deaths.append(name),
    )
    for work in range(10):
        inbox.put(work)
    inbox.put(None)
    assert thread.join(PATIENCE_S)
    assert told == [(work, bool(work % 3)) for work in range(10)]
    assert deaths == ["worker"] * 5
