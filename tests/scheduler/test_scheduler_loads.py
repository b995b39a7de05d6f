"""The wait of an idle engine, and the choice between loading and computing."""

import pytest

from vllm_kvpool.scheduler.loads import (
    IDLE_WAIT_MAX_S,
    IDLE_WAIT_MIN_S,
    MAX_STEP_S,
    RETRY_EVERY,
    LoadCostModel,
    idle_wait_s,
)


@pytest.mark.parametrize(
    ("waited", "expected"),
    [(0.0, IDLE_WAIT_MIN_S), (0.02, 0.002), (0.1, 0.01), (60.0, IDLE_WAIT_MAX_S)],
)
def test_a_long_wait_is_waited_for_in_longer_pieces(waited: float, expected: float) -> None:
    assert idle_wait_s(waited) == pytest.approx(expected)


def measured(compute: float, load: float) -> LoadCostModel:
    """A pace at which so many tokens a second are computed and loaded."""
    pace = LoadCostModel()
    pace.step_planned(0.0, {"a": 1000})
    pace.step_planned(1000 / compute, {})
    pace.loaded(1000, 1000 / load)
    return pace


def test_until_both_are_known_loads_are_taken() -> None:
    assert LoadCostModel().loading_beats_computing(1000)
    pace = LoadCostModel()
    pace.loaded(1, 100.0)
    assert pace.loading_beats_computing(1000)


def test_the_faster_one_is_taken() -> None:
    assert measured(compute=100, load=1000).loading_beats_computing(500)
    assert not measured(compute=1000, load=100).loading_beats_computing(500)


@pytest.mark.parametrize(
    ("missing", "is_taken"), [(0, True), (500, True), (1000, False)], ids=["none", "half", "all"]
)
def test_a_load_that_costs_more_speculation_than_it_saves_is_not_taken(
    missing: int, is_taken: bool
) -> None:
    """Loading saves 4.5 s; an answer of 100 tokens takes 8 s longer without the drafter's KV."""
    pace = measured(compute=100, load=1000)
    pace.answered(100, 2.0, has_drafts=True)
    pace.answered(100, 10.0, has_drafts=False)
    for _ in range(50):
        pace.drafts_loaded(1000, missing)
    assert pace.loading_beats_computing(500) is is_taken


def test_speculation_counts_for_nothing_until_both_kinds_of_answers_are_known() -> None:
    pace = measured(compute=100, load=1000)
    pace.drafts_loaded(1000, 1000)
    pace.answered(100, 1000.0, has_drafts=False)
    assert pace.loading_beats_computing(500)


def test_a_refused_load_is_tried_now_and_then() -> None:
    pace = measured(compute=1000, load=100)
    taken = [pace.loading_beats_computing(500) for _ in range(2 * RETRY_EVERY)]
    assert taken.count(True) == 2


def test_pauses_and_decode_steps_tell_nothing_of_computing() -> None:
    pace = LoadCostModel()
    pace.loaded(1000, 100.0)
    pace.step_planned(0.0, {"a": 1000})
    pace.step_planned(MAX_STEP_S + 1, {"a": 8})
    pace.step_planned(MAX_STEP_S + 1.001, {})
    assert pace.loading_beats_computing(500)
