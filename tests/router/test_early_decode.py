"""A decoder is asked while a prompt is computed: who, how many, what becomes of both calls."""

import pytest

from tests.support.router_steps import Steps
from vllm_kvpool.router.control.events import (
    EVERYTHING,
    Abort,
    Decode,
    Outcome,
    Prefill,
    PrefillEnded,
    Probe,
    Refuse,
)
from vllm_kvpool.router.control.handovers import APART_AFTER, FIRST_PAUSE_S, ExpectedPrompts
from vllm_kvpool.router.control.rates import COLD_SAMPLES
from vllm_kvpool.router.control.request_flow import MAX_PASSED_S
from vllm_kvpool.router.control.requests import Phase, PromptPath, RequestId
from vllm_kvpool.router.control.settings import OverloadConfig, Settings
from vllm_kvpool.router.control.states import ReplicaId, Role, State

UNHURRIED = OverloadConfig(ttft_target_s=1000.0)
FAILURES = [Outcome.BUSY, Outcome.REJECTED, Outcome.FAILED, Outcome.UNREACHED, Outcome.LOST]


def endpoint(replica_id: str) -> str:
    return f"tcp://{replica_id}:5555"


def told(prefill: str = "p", decode: str = "d", settings: Settings | None = None) -> Steps:
    """Replicas whose engines have notices."""
    steps = Steps(settings, overload=UNHURRIED)
    steps.fleet(prefill=prefill, decode=decode)
    for each in (*prefill.split(), *decode.split()):
        steps.measure(each, notices=[endpoint(each)])
    return steps


def early(request_id: str, source: str = "p", decoder: str = "d") -> list[object]:
    """The actions of a prompt whose decoder is asked at once."""
    prefill = Prefill(RequestId(request_id), ReplicaId(source), hands_over=True)
    return [prefill, Decode(RequestId(request_id), ReplicaId(decoder), EVERYTHING)]


def late(request_id: str, source: str = "p") -> list[object]:
    return [Prefill(RequestId(request_id), ReplicaId(source), hands_over=True)]


def decodes(steps: Steps) -> list[Decode]:
    return [each for each in steps.history if isinstance(each, Decode)]


def test_decoder_is_asked_with_the_prompt_and_told_where_notices_come_from() -> None:
    steps = told()
    assert steps.ask("r") == early("r")
    [call] = decodes(steps)
    assert call.notices == (endpoint("p"),)
    assert steps.phase("r") is Phase.DECODING
    assert steps.replica("d").work.committed_blocks > 0
    assert steps.replica("p").work.prefill_tokens == 1000
    assert steps.prefilled("r", "p", saved=992) == []
    assert steps.replica("p").work.prefill_tokens == 0
    assert steps.replica("d").work.num_awaiting == 0
    assert steps.began("r") == []
    assert steps.decoded("r", "d") == []
    assert steps.phase("r") is None
    assert +steps.controller.state.counts.prompts == {PromptPath.HANDED_OVER: 1}
    assert steps.count("served") == 1


@pytest.mark.parametrize(("without", "says_so"), [("p", False), ("d", True)])
def test_engine_of_a_release_without_notices_is_handed_over_to_as_before(
    without: str, says_so: bool
) -> None:
    """It would save nothing of a request with options that it does not know."""
    steps = told()
    steps.measure(without)
    assert steps.ask("r") == [Prefill("r", "p", hands_over=says_so)]
    assert steps.prefilled("r", "p", saved=992) == [Decode("r", "d", 992)]
    assert decodes(steps)[0].notices == (None if without == "d" else ())


def test_prefill_replica_whose_endpoints_are_not_known_is_waited_for() -> None:
    """Of several engines behind one address any may get the request."""
    steps = told()
    steps.measure("p", notices=[])
    assert steps.ask("r") == late("r")
    assert steps.prefilled("r", "p", saved=992) == [Decode("r", "d", 992)]


def test_decoder_without_room_is_asked_once_the_prompt_is_computed() -> None:
    steps = told(settings=Settings(decode_requests=1))
    steps.ask("first", 20)
    assert steps.ask("r") == late("r")
    assert steps.phase("r") is Phase.PREFILLING
    assert steps.prefilled("r", "p", saved=992) == []
    assert steps.decoded("first", "d") == [Decode("r", "d", 992)]


def test_prompts_that_are_computed_have_a_decoder_before_those_that_are_not() -> None:
    steps = told()
    steps.ask("first", 8000, hands_over=False)
    assert steps.ask("large", 10_000) == late("large"), "it does not fit"
    steps.prefilled("large", "p", saved=9984)
    assert steps.phase("large") is Phase.HANDING
    assert steps.ask("small") == late("small"), "it fits, and would take what is freed"
    assert steps.decoded("first", "d") == [Decode("large", "d", 9984)]


def test_blocks_for_which_others_wait_are_not_held_for_a_prompt() -> None:
    steps = told()
    steps.ask("first", 8000, hands_over=False)
    assert steps.ask("large", 4000) == late("large"), "room for one and a half"
    assert steps.prefilled("large", "p", saved=3840) == [Decode("large", "d", 3840)]


def test_half_of_the_requests_that_a_decoder_starts_may_wait_for_prompts() -> None:
    """Others are started beside them, however long prefill replicas take."""
    steps = told(settings=Settings(max_pending_handoffs=4, prefill_requests=8))
    for name in "ab":
        assert steps.ask(name) == early(name)
    for name in "cd":
        assert steps.ask(name) == late(name)
    assert steps.ask("short", 20) == [Decode("short", "d", 0)]
    assert steps.prefilled("a", "p", saved=992) == []
    assert steps.ask("e") == early("e"), "one fewer waits"
    assert steps.replica("d").work.num_awaiting == 2


def test_decoders_full_of_requests_that_wait_serve_all_in_the_end() -> None:
    """Half of what each may start waits for prompts; others come once theirs are computed."""
    steps = told("p q", "d e", settings=Settings(max_pending_handoffs=2, prefill_requests=4))
    names = [f"r{number}" for number in range(8)]
    for name in names:
        steps.ask(name)
    waiting = [each for each in names if steps.phase(each) is Phase.DECODING]
    assert len(waiting) == 2, "one at each decoder"
    for name in names:
        source = steps.controller.state.requests[RequestId(name)].source
        steps.prefilled(name, source or "", saved=992)
        if steps.phase(name) is Phase.DECODING:
            steps.began(name)
    for name in names:
        assert steps.phase(name) is Phase.DECODING
        steps.began(name)
        steps.decoded(name, steps.place(name))
    assert steps.count("served") == 8


# What is learned


def test_time_of_a_hand_over_is_that_from_the_end_of_its_prefill() -> None:
    known: list[object] = []
    for has_notices in (True, False):
        steps = told() if has_notices else Steps(overload=UNHURRIED)
        if not has_notices:
            steps.fleet(prefill="p", decode="d")
        for number in range(COLD_SAMPLES + 3):
            name = f"r{number}"
            steps.ask(name)
            steps.now += 0.3
            steps.prefilled(name, "p", saved=992)
            steps.now += 0.05
            steps.began(name)
            steps.decoded(name, "d", output=1)
        known.append(steps.controller.state.rates.snapshot(steps.now).measured())
    assert known[0] == known[1]
    assert "handoff_overhead_s" in known[0]


def test_first_token_before_the_prompts_answer_teaches_nothing() -> None:
    """The decoder may have computed it, too."""
    steps = told()
    for number in range(COLD_SAMPLES + 3):
        name = f"r{number}"
        steps.ask(name)
        steps.now += 0.3
        steps.began(name)
        steps.prefilled(name, "p", saved=992)
        steps.decoded(name, "d", output=1)
    unmeasured = steps.controller.state.rates.snapshot(steps.now).unmeasured
    assert {"handoff_overhead_s", "transfer_tokens_per_s"} <= unmeasured
    assert "prefill_tokens_per_s" not in unmeasured


def test_requests_that_wait_for_prompts_do_not_make_a_decoder_look_behind() -> None:
    steps = told()
    steps.ask("r")
    steps.measure("d", notices=[endpoint("d")], waiting=1)
    assert steps.controller.state.table.models_behind() == []
    steps.ask("short", 20)
    steps.measure("d", notices=[endpoint("d")], waiting=1)
    assert steps.controller.state.table.models_behind() == [], "the one that waits is not short"
    steps.measure("d", notices=[endpoint("d")], waiting=2)
    assert steps.controller.state.table.models_behind() != []


def test_short_prompt_beside_one_that_waits_is_alone_in_its_engine() -> None:
    steps = told()
    steps.ask("r")
    steps.ask("short", 200)
    replica = steps.replica("d")
    assert replica.work.alone is replica.work.active[RequestId("short")]
    steps.ask("s")
    assert replica.work.alone is replica.work.active[RequestId("short")], "s does nothing there yet"
    steps.began("short")
    steps.prefilled("r", "p", saved=992)
    assert replica.work.alone is replica.work.active[RequestId("r")]


# Failures


@pytest.mark.parametrize("outcome", FAILURES)
def test_decoder_whose_prompt_fails_is_asked_again_to_wait_no_more(outcome: Outcome) -> None:
    steps = told()
    steps.ask("r")
    actions = steps.prefilled("r", "p", outcome)
    assert [each for each in actions if not isinstance(each, Probe)] == [Abort("r", "d")]
    assert steps.decoded("r", "d", Outcome.LOST, output=0) == [Decode("r", "d", 0)]
    assert decodes(steps)[-1].notices == ()
    assert steps.began("r") == steps.decoded("r", "d") == []
    assert steps.count("served") == 1
    assert (Probe("p") in actions) is (outcome not in (Outcome.BUSY, Outcome.REJECTED))


@pytest.mark.parametrize("outcome", FAILURES)
def test_decoder_that_has_brought_a_token_is_left_alone_when_the_prompt_fails(
    outcome: Outcome,
) -> None:
    steps = told()
    steps.ask("r")
    steps.began("r")
    assert [x for x in steps.prefilled("r", "p", outcome) if not isinstance(x, Probe)] == []
    assert steps.decoded("r", "d") == []
    assert steps.count("served") == 1


def test_decoder_that_brings_a_token_as_it_is_asked_again_goes_on_elsewhere() -> None:
    """The order crosses the token."""
    steps = told()
    steps.ask("r")
    steps.prefilled("r", "p", Outcome.FAILED)
    steps.began("r")
    assert steps.decoded("r", "d", Outcome.LOST) == [Decode("r", "d", 0)]
    assert steps.decoded("r", "d") == []
    assert steps.count("served") == 1


def test_prompt_that_fails_after_its_request_costs_nothing_but_the_replicas_good_name() -> None:
    steps = told()
    steps.ask("r")
    steps.began("r")
    steps.decoded("r", "d")
    assert steps.prefilled("r", "p", Outcome.CANCELLED) == []
    assert steps.replica("p").work.prefill_tokens == 0
    assert not steps.replica("p").health.is_doubted


def test_failures_of_both_calls_count_towards_the_same_limit() -> None:
    """A prompt that kills who computes it is not tried at every engine."""
    steps = told(settings=Settings(max_lost=2))
    steps.ask("r")
    steps.prefilled("r", "p", Outcome.LOST)
    steps.decoded("r", "d", Outcome.LOST, output=0)  # as it was given up
    assert steps.phase("r") is Phase.DECODING
    actions = steps.decoded("r", "d", Outcome.LOST, output=0)
    assert [each.status for each in actions if isinstance(each, Refuse)] == [502]


def test_next_decoder_waits_for_the_prompt_while_it_is_computed() -> None:
    steps = told(decode="d e")
    [_, first] = steps.ask("r")
    other = "e" if first.replica == "d" else "d"
    [again] = [
        x
        for x in steps.decoded("r", first.replica, Outcome.LOST, output=0)
        if isinstance(x, Decode)
    ]
    assert again == Decode("r", other, EVERYTHING)
    assert decodes(steps)[-1].notices == (endpoint("p"),)
    steps.prefilled("r", "p", saved=992)
    steps.serve("f", Role.DECODE)
    steps.measure("f", notices=[endpoint("f")])
    [last] = [
        x for x in steps.decoded("r", other, Outcome.UNREACHED, output=0) if isinstance(x, Decode)
    ]
    assert last == Decode("r", "f", 992), "as the answer says"
    assert decodes(steps)[-1].notices == ()


def test_prompt_that_is_computed_while_its_next_decoder_is_sought_is_handed_over() -> None:
    steps = told()
    steps.ask("r", deadline=1.0)
    steps.now = 2.0
    steps.failed("d")
    steps.decoded("r", "d", Outcome.LOST, output=0)
    assert steps.phase("r") is Phase.HANDING, "p computes it, and does not wait for itself"
    steps.measure("p", notices=[endpoint("p")])
    assert steps.prefilled("r", "p", saved=992) == [Decode("r", "p", 992)]


def test_prompt_that_fails_while_its_next_decoder_is_sought_is_computed_there() -> None:
    steps = told()
    steps.ask("r")
    steps.failed("d")
    steps.decoded("r", "d", Outcome.LOST, output=0)
    assert steps.phase("r") is Phase.HANDING
    actions = steps.prefilled("r", "p", Outcome.BUSY)
    assert not any(isinstance(each, Decode) for each in actions), "p is left alone for a while"
    assert Decode(RequestId("r"), ReplicaId("p"), 0) in steps.tick(2.0)


def test_client_that_goes_leaves_neither_call_behind() -> None:
    steps = told()
    steps.ask("r")
    assert steps.cancel("r") == []
    steps.decoded("r", "d", Outcome.CANCELLED, output=0)
    steps.prefilled("r", "p", Outcome.CANCELLED)
    assert not steps.replica("p").work
    assert not steps.replica("d").work
    assert steps.replica("d").work.committed_blocks == 0


# Replicas that come and go


def test_replica_that_dies_loses_its_own_call_alone() -> None:
    steps = told()
    steps.ask("r")
    assert steps.failed("p") == [Abort("r", "p")]
    assert steps.failed("d") == [Abort("r", "d")]


def test_replica_that_dies_after_its_answer_is_waited_for_no_more() -> None:
    """What it was still saving is lost."""
    steps = told(settings=Settings(decode_requests=2))
    steps.ask("r")
    steps.ask("begun")
    steps.ask("s")
    for name in ("r", "begun", "s"):
        steps.prefilled(name, "p", saved=992)
    steps.began("begun")
    assert steps.phase("s") is Phase.HANDING
    assert steps.failed("p") == [Abort("r", "d")]
    assert steps.decoded("r", "d", Outcome.LOST, output=0) == [Decode("r", "d", 0)]
    assert steps.decoded("begun", "d") == [Decode("s", "d", 0)]
    assert steps.count("resumed") == 1


@pytest.mark.parametrize("replica", ["p", "d"])
def test_replica_that_is_drained_ends_its_call_first(replica: str) -> None:
    steps = told(decode="d e")
    [_, call] = steps.ask("r")
    replica = call.replica if replica == "d" else replica
    steps.drain(replica)
    steps.tick()
    assert steps.state(replica) in (State.SHUTTING_PREFILL, State.SHUTTING_DECODE)
    steps.prefilled("r", "p", saved=992)
    steps.began("r")
    steps.decoded("r", call.replica)
    steps.tick()
    assert steps.state(replica) is State.SHUTTING_NULL


def test_decoder_that_is_drained_too_long_hands_its_wait_to_another() -> None:
    steps = told(decode="d e", settings=Settings(drain_timeout_s=10.0))
    [_, call] = steps.ask("r")
    other = "e" if call.replica == "d" else "d"
    steps.drain(call.replica)
    assert steps.tick(10.0) == [Abort("r", call.replica)]
    assert steps.decoded("r", call.replica, Outcome.LOST, output=0) == [
        Decode("r", other, EVERYTHING)
    ]


def test_prefill_replica_that_becomes_a_decoder_computes_its_prompts_first() -> None:
    steps = told()
    steps.ask("r")
    steps.set_role("p", Role.DECODE)
    assert steps.state("p") is State.MUTATING_TO_DECODE
    steps.prefilled("r", "p", saved=992)
    assert steps.state("p") is State.DECODE
    steps.began("r")
    assert steps.decoded("r", "d") == []


def test_endpoints_of_an_engine_that_has_ended_are_forgotten() -> None:
    steps = told()
    steps.failed("p")
    steps.tick(2.0)
    steps.loaded("p")
    assert steps.ask("r") == [Prefill("r", "p")]


# Pairs that share no store


def test_pair_that_is_apart_is_tried_by_a_prompt_that_is_computed_first() -> None:
    """A decoder that finds nothing waits no longer than it did."""
    steps = told()
    sample = {"notices": [endpoint("d")]}
    steps.measure("d", expected={}, **sample)
    assert steps.ask("first") == early("first")
    steps.prefilled("first", "p", saved=992)
    steps.began("first")
    steps.decoded("first", "d")
    steps.measure("d", expected={"p": ExpectedPrompts(0, APART_AFTER)}, **sample)
    assert steps.controller.state.collapse() is PromptPath.NO_SHARED_STORE
    steps.tick(FIRST_PAUSE_S)
    assert steps.ask("try") == late("try")
    assert steps.prefilled("try", "p", saved=992) == [Decode("try", "d", 992)]
    steps.began("try")
    steps.decoded("try", "d")
    steps.measure("d", expected={"p": ExpectedPrompts(1, APART_AFTER)}, **sample)
    assert steps.ask("again") == early("again")


def test_decoder_that_does_not_find_the_prompts_of_a_replica_waits_for_none() -> None:
    steps = told(decode="d e")
    for each in "de":
        steps.measure(each, expected={}, notices=[endpoint(each)])
    steps.measure("e", expected={"p": ExpectedPrompts(0, APART_AFTER)}, notices=[endpoint("e")])
    for number in range(4):
        [_, call] = steps.ask(f"r{number}")
        assert call.replica == "d"


def test_prompt_does_not_wait_long_for_a_decoder_that_would_find_it() -> None:
    steps = told(decode="d e", settings=Settings(decode_requests=1))
    for each in "de":
        steps.measure(each, expected={}, notices=[endpoint(each)])
    steps.measure("e", expected={"p": ExpectedPrompts(0, APART_AFTER)}, notices=[endpoint("e")])
    assert steps.ask("r") == early("r")
    assert steps.ask("s") == late("s")
    assert steps.prefilled("s", "p", saved=992) == []
    assert steps.tick(MAX_PASSED_S + 0.1) == [Decode("s", "e", 0)]


def test_usage_of_an_early_request_counts_what_the_prefill_replica_computed() -> None:
    """`PrefillEnded` says what was cached; the rate is that of what was computed."""
    steps = told()
    for number in range(COLD_SAMPLES + 3):
        name = f"r{number}"
        steps.ask(name)
        steps.now += 0.1
        steps.step(
            PrefillEnded(
                request_id=RequestId(name),
                replica=ReplicaId("p"),
                outcome=Outcome.OK,
                prompt_tokens=1000,
                saved_tokens=992,
                cached_tokens=500,
            )
        )
        steps.cancel(name)
        steps.decoded(name, "d", Outcome.CANCELLED)
    assert steps.controller.state.rates.snapshot(steps.now).prefill_tokens_per_s == pytest.approx(
        5000, rel=0.1
    )
