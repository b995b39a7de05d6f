"""What happens to a request that is cancelled, or that something fails."""

import pytest

from tests.support.router_steps import Steps
from vllm_kvpool.router.control.events import Abort, Decode, Outcome, Prefill, Probe, Refuse
from vllm_kvpool.router.control.requests import Phase
from vllm_kvpool.router.control.settings import Settings

FAILED = Outcome.FAILED


@pytest.fixture
def steps() -> Steps:
    return Steps()


def refused(actions: list[object]) -> list[tuple[str, int]]:
    return [(each.request_id, each.status) for each in actions if isinstance(each, Refuse)]


# Cancelled


@pytest.mark.parametrize("until", ["computing", "handing", "decoding", "flowing"])
def test_a_request_can_be_cancelled_at_any_time(until: str) -> None:
    steps = Steps(Settings(decode_requests=1))
    steps.fleet(prefill="p", decode="d")
    if until == "handing":
        steps.ask("other", 100)
    steps.ask("r")
    if until != "computing":
        steps.prefilled("r", "p")
    if until == "flowing":
        steps.began("r")
    assert steps.cancel("r") == [], "whoever serves it has ended its call already"
    assert steps.phase("r") is None
    assert steps.cancel("r") == []
    if until == "computing":
        assert steps.prefilled("r", "p", Outcome.CANCELLED) == []
    elif until != "handing":
        assert steps.began("r") == []
        assert steps.decoded("r", "d", Outcome.CANCELLED) == []
    assert not steps.replica("p").work
    assert steps.count("cancelled") == 1


def test_an_answer_that_is_there_after_its_client_has_gone_changes_nothing(steps: Steps) -> None:
    steps.fleet(prefill="p", decode="d")
    steps.ask("r")
    steps.cancel("r")
    assert steps.prefilled("r", "p") == []
    assert steps.phase("r") is None


# Failures


def test_a_prompt_that_fails_is_computed_elsewhere(steps: Steps) -> None:
    steps.fleet(prefill="a b", decode="d")
    assert steps.ask("r") == [Prefill("r", "a")]
    assert steps.prefilled("r", "a", FAILED) == [Probe("a"), Prefill("r", "b")]


def test_a_prompt_that_is_rejected_is_decoded_for_the_engines_own_words(steps: Steps) -> None:
    steps.fleet(prefill="p", decode="d")
    steps.ask("r")
    assert steps.prefilled("r", "p", Outcome.REJECTED) == [Decode("r", "d", 0)]
    assert steps.decoded("r", "d", Outcome.REJECTED) == []
    assert steps.count("rejected") == 1


def test_who_refuses_work_is_left_alone_for_a_moment(steps: Steps) -> None:
    steps.fleet(prefill="p", decode="d")
    steps.ask("r")
    assert steps.prefilled("r", "p", Outcome.BUSY) == []
    assert steps.phase("r") is Phase.QUEUED
    assert steps.tick(0.9) == []
    assert steps.tick(0.1) == [Prefill("r", "p")]


def test_an_answer_goes_on_elsewhere(steps: Steps) -> None:
    steps.fleet(prefill="p", decode="d e")
    steps.ask("r")
    [call] = steps.prefilled("r", "p", saved=992)
    other = "e" if call.replica == "d" else "d"
    steps.began("r")
    assert steps.decoded("r", call.replica, FAILED) == [
        Probe(call.replica),
        Decode("r", other, 992),
    ]
    assert steps.count("resumed") == 1


def test_an_answer_that_nobody_can_go_on_with_ends(steps: Steps) -> None:
    steps.fleet(decode="d e")
    [call] = steps.ask("r", 20)
    steps.began("r")
    assert steps.decoded("r", call.replica, Outcome.HOPELESS) == [Probe(call.replica)]
    assert (steps.phase("r"), steps.count("hopeless")) == (None, 1)


@pytest.mark.parametrize(("outcome", "status"), [(FAILED, 502), (Outcome.BUSY, 503)])
def test_a_request_that_fails_everywhere_is_given_up(outcome: Outcome, status: int) -> None:
    steps = Steps(Settings(max_attempts=3, max_lost=3))
    steps.fleet(decode="a b c d")
    [call] = steps.ask("r", 20)
    for _ in range(2):
        *_, call = steps.decoded("r", call.replica, outcome)
    actions = steps.decoded("r", call.replica, outcome)
    assert refused(actions) == [("r", status)]
    assert (steps.phase("r"), steps.count("given_up")) == (None, 1)
    [why] = [each.why for each in actions if isinstance(each, Refuse)]
    limit = "flow.max_attempts" if outcome is Outcome.BUSY else "flow.max_lost"
    assert why == f"3 attempts have failed ({limit}=3), the last one at {call.replica}"


def test_a_prompt_that_fails_everywhere_is_given_up() -> None:
    steps = Steps(Settings(max_attempts=1))
    steps.fleet(prefill="p", decode="d")
    steps.ask("r")
    assert refused(steps.prefilled("r", "p", FAILED)) == [("r", 502)]


def test_who_ends_with_its_replica_is_not_asked_about_again(steps: Steps) -> None:
    steps.fleet(decode="d e")
    [call] = steps.ask("r", 20)
    other = "e" if call.replica == "d" else "d"
    assert steps.failed(call.replica) == [Abort("r", call.replica)]
    assert steps.phase("r") is Phase.DECODING  # until its call has ended
    assert steps.decoded("r", call.replica, Outcome.CANCELLED) == [Decode("r", other, 0)]


def test_a_prompt_that_was_done_when_its_replica_failed_is_handed_over(steps: Steps) -> None:
    steps.fleet(prefill="p", decode="d")
    steps.ask("r")
    steps.failed("p")
    assert steps.prefilled("r", "p", saved=992) == [Decode("r", "d", 992)]


def test_what_is_sent_away_by_a_drain_has_not_failed() -> None:
    steps = Steps(Settings(drain_timeout_s=10.0, max_attempts=1))
    steps.fleet(decode="d e")
    [call] = steps.ask("r", 20)
    other = "e" if call.replica == "d" else "d"
    steps.began("r")
    steps.drain(call.replica)
    assert steps.tick(9.9) == []
    assert steps.tick(0.1) == [Abort("r", call.replica)]
    assert steps.tick(10.0) == []  # once
    assert steps.decoded("r", call.replica, Outcome.CANCELLED) == [Decode("r", other, 0)]


def test_an_answer_that_went_on_elsewhere_counts_whole(steps: Steps) -> None:
    steps.fleet(decode="d e")
    for number in range(30):
        name = f"r{number}"
        [call] = steps.ask(name, 20)
        steps.began(name)
        [_, again] = steps.decoded(name, call.replica, FAILED, output=500)
        steps.began(name)
        steps.decoded(name, again.replica, output=500)
        steps.now += 1.0
    assert steps.controller.state.rates.snapshot(
        steps.now
    ).output_tokens_per_request == pytest.approx(1000)


def test_only_a_first_attempt_tells_how_long_a_start_takes(steps: Steps) -> None:
    steps.fleet(decode="d e")
    before = steps.controller.state.rates.snapshot(steps.now)
    for number in range(30):
        name = f"r{number}"
        [call] = steps.ask(name, 100)
        steps.now += 0.01
        steps.began(name)
        [_, again] = steps.decoded(name, call.replica, FAILED)
        steps.now += 1000.0
        steps.began(name)
        steps.decoded(name, again.replica)
    learned = steps.controller.state.rates.snapshot(steps.now).local_prefill_s_per_token
    assert learned == pytest.approx(0.01 / 100)
    assert before.local_prefill_s_per_token == pytest.approx(0.0001)


@pytest.mark.parametrize("outcome", [FAILED, Outcome.LOST, Outcome.CANCELLED])
def test_what_may_end_engines_reaches_one_other_at_most(outcome: Outcome) -> None:
    """As it answers 500 or nothing, or is found to have ended before its answer has."""
    steps = Steps()
    steps.fleet(decode="a b c d")
    [call] = steps.ask("r", 20)
    *_, again = steps.decoded("r", call.replica, outcome)
    assert again.replica != call.replica
    assert refused(steps.decoded("r", again.replica, outcome)) == [("r", 502)]
