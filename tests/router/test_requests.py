"""The phases of a request."""

from itertools import product

import pytest

from tests.support.router_steps import ask
from vllm_kvpool.router.control.requests import (
    ENDS,
    NEXT_PHASES,
    IllegalPhaseChange,
    Phase,
    Request,
)


def test_a_request_enters_the_phases_of_the_table_and_no_others() -> None:
    for phase, after in product(Phase, Phase):
        request = Request(ask("r"), arrived=1.0, number=1, phase=phase, began=1.0)
        if after in NEXT_PHASES[phase]:
            request.enter(after, 2.0)
            assert (request.phase, request.began) == (after, 2.0)
        else:
            why = f"{phase.value} is not followed by {after.value}"
            with pytest.raises(IllegalPhaseChange, match=why):
                request.enter(after, 2.0)
            assert (request.phase, request.began, request.waited_s) == (phase, 1.0, 0.0)


def test_a_request_can_be_cancelled_and_refused_until_its_end_which_is_final() -> None:
    for phase, following in NEXT_PHASES.items():
        assert not following if phase in ENDS else {Phase.CANCELLED, Phase.REFUSED} < following


def test_priority_goes_before_arrival() -> None:
    first, second = Request(ask("a"), 0.0, 1), Request(ask("b", priority=-1), 0.0, 2)
    third = Request(ask("c"), 0.0, 3)
    assert sorted((third, first, second), key=lambda each: each.order) == [second, first, third]
