"""What the controller is told of the end of a call."""

import pytest

from vllm_kvpool.router.control.events import Decode, DecodeEnded, Outcome, Prefill, PrefillEnded
from vllm_kvpool.router.control.requests import RequestId
from vllm_kvpool.router.control.states import ReplicaId
from vllm_kvpool.router.dataplane.request_handler import outcome_of_error
from vllm_kvpool.router.dataplane.responses import EngineLost, TokenCounts, call_ended
from vllm_kvpool.router.dataplane.upstream import EngineBroke, EngineUnreached

ONE, REPLICA = RequestId("1"), ReplicaId("r")
SAID = TokenCounts(prompt_tokens=5, output_tokens=6, cached_tokens=7, saved_tokens=8)


def test_each_call_has_its_event() -> None:
    assert call_ended(Prefill(ONE, REPLICA), Outcome.OK, SAID) == PrefillEnded(
        request_id=ONE,
        replica=REPLICA,
        outcome=Outcome.OK,
        prompt_tokens=5,
        saved_tokens=8,
        cached_tokens=7,
    )
    assert call_ended(Decode(ONE, REPLICA, 0), Outcome.LOST, SAID) == DecodeEnded(
        request_id=ONE, replica=REPLICA, outcome=Outcome.LOST, prompt_tokens=5, output_tokens=6
    )


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (EngineUnreached("x", is_refused=True), Outcome.UNREACHED),
        (EngineBroke("x"), Outcome.LOST),
        (EngineLost("x"), Outcome.FAILED),
    ],
)
def test_what_an_engine_that_does_not_answer_means(error: Exception, outcome: Outcome) -> None:
    assert outcome_of_error(error) is outcome
