"""Resets: who must have answered before anything is found or saved again."""

import logging

import pytest

from vllm_kvpool.pool.reset import Reset


@pytest.mark.parametrize("acks", [[4], [1, 1, 1, 1], [1, 3], [5]])
def test_the_last_rank_is_told_once(acks: list[int]) -> None:
    reset = Reset(num_ranks=4)
    reset.begin()
    assert [reset.acked(ranks) for ranks in acks] == [*[False] * (len(acks) - 1), True]
    assert not reset.acked(0)
    assert reset.pending
    reset.end(removed=True)
    assert not reset.pending


def test_a_second_reset_starts_anew() -> None:
    reset = Reset(num_ranks=2)
    reset.begin()
    assert not reset.acked(1)
    reset.begin()
    assert reset.generation == 2
    assert not reset.acked(1)
    assert reset.acked(1)


def test_a_removal_that_failed_is_told(caplog: pytest.LogCaptureFixture) -> None:
    reset = Reset(num_ranks=1)
    reset.begin()
    with caplog.at_level(logging.WARNING):
        reset.end(removed=False)
    assert "could not remove" in caplog.text
    assert not reset.pending
