"""Resets: which ranks must have answered before lookups and saves start again."""

import logging

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from vllm_kvpool.scheduler.validity import Reset


@pytest.mark.parametrize("acks", [[4], [1, 1, 1, 1], [1, 3], [5]])
def test_the_last_rank_is_told_once(acks: list[int]) -> None:
    reset = Reset(num_ranks=4)
    reset.start()
    assert [reset.acked(ranks) for ranks in acks] == [*[False] * (len(acks) - 1), True]
    assert not reset.acked(0)
    assert reset.pending
    reset.finish(reset.generation, removed=True)
    assert not reset.pending


def test_a_removal_that_failed_is_told(caplog: pytest.LogCaptureFixture) -> None:
    reset = Reset(num_ranks=1)
    reset.start()
    with caplog.at_level(logging.WARNING):
        reset.finish(reset.generation, removed=False)
    assert "did not remove" in caplog.text
    assert not reset.pending


class Resets(RuleBasedStateMachine):
    """Resets at any time, ranks that drop their saves, and removals under way."""

    NUM_RANKS = 2

    def __init__(self) -> None:
        super().__init__()
        self.reset = Reset(self.NUM_RANKS)
        self.dirty: set[int] = set()  # ranks that may still put what the newest reset is to remove
        self.has_rest = False  # something of it may have been put
        self.removals: list[tuple[int, tuple[str, ...]]] = []
        self.to_remove: set[str] = set()

    @rule(weights_version=st.sampled_from("ab"))
    def begin(self, weights_version: str) -> None:
        self.reset.start(weights_version)
        self.dirty, self.has_rest = set(range(self.NUM_RANKS)), True
        self.to_remove.add(weights_version)

    @precondition(lambda self: self.dirty)
    @rule()
    def drop(self) -> None:
        self.dirty.pop()
        assert self.reset.acked(1) == (not self.dirty)
        if not self.dirty:
            weights_versions = self.reset.take_weights_versions()
            assert set(weights_versions) == self.to_remove
            self.to_remove = set()
            self.removals.append((self.reset.generation, weights_versions))

    @precondition(lambda self: self.removals)
    @rule(removed=st.booleans())
    def end(self, removed: bool) -> None:
        generation, _ = self.removals.pop(0)
        self.reset.finish(generation, removed)
        self.has_rest = self.has_rest and generation != self.reset.generation

    @invariant()
    def is_pending_as_long_as_anything_may_be_left(self) -> None:
        assert self.reset.pending == self.has_rest


TestResets = Resets.TestCase
