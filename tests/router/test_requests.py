"""The phases of a request."""

from itertools import product

import pytest

from tests.support.router_steps import ask
from vllm_kvpool.router.control.requests import (
    ENDS,
    PHASES,
    IllegalPhaseChange,
    Phase,
    PhaseChange,
    Request,
)


def test_a_change_leads_where_the_table_says_or_nowhere() -> None:
    for phase, change in product(Phase, PhaseChange):
        request = Request(ask("r"), arrived=1.0, number=1, phase=phase, began=1.0)
        if (phase, change) in PHASES:
            request.advance(change, 2.0)
            assert (request.phase, request.began) == (PHASES[phase, change], 2.0)
        else:
            why = f"{phase.value} does not know {change.value}"
            with pytest.raises(IllegalPhaseChange, match=why):
                request.advance(change, 2.0)
            assert (request.phase, request.began) == (phase, 1.0)


@pytest.mark.parametrize("phase", [each for each in Phase if each not in ENDS])
def test_a_request_can_be_cancelled_and_refused_until_its_end(phase: Phase) -> None:
    assert PHASES[phase, PhaseChange.CANCEL] is Phase.CANCELLED
    assert PHASES[phase, PhaseChange.REFUSE] is Phase.REFUSED


def test_an_end_is_final() -> None:
    assert not [phase for phase, _ in PHASES if phase in ENDS]


def test_priority_goes_before_arrival() -> None:
    first, second = Request(ask("a"), 0.0, 1), Request(ask("b", priority=-1), 0.0, 2)
    third = Request(ask("c"), 0.0, 3)
    assert sorted((third, first, second), key=lambda each: each.order) == [second, first, third]
