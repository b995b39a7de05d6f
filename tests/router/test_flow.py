"""What happens to a request: let in, computed, handed over, decoded, and how long it waits."""

from typing import Any

import pytest

from tests.support.router_steps import Steps
from vllm_kvpool.router.control.events import (
    Decode,
    DecodeEnded,
    Outcome,
    Prefill,
    PrefillEnded,
    Refuse,
)
from vllm_kvpool.router.control.rates import COLD_SAMPLES
from vllm_kvpool.router.control.request_flow import HANDOVER_GRACE_S
from vllm_kvpool.router.control.requests import Phase, PromptPath, RequestId
from vllm_kvpool.router.control.settings import OverloadConfig, Settings
from vllm_kvpool.router.control.states import ReplicaId

FAILED = Outcome.FAILED
UNHURRIED = OverloadConfig(ttft_target_s=1000.0)


@pytest.fixture
def steps() -> Steps:
    return Steps()


def refused(actions: list[object]) -> list[tuple[str, int]]:
    return [(each.request_id, each.status) for each in actions if isinstance(each, Refuse)]


# The way of a request


def test_a_prompt_is_computed_handed_over_and_decoded(steps: Steps) -> None:
    steps.fleet(prefill="p", decode="d")
    assert steps.ask("r") == [Prefill("r", "p")]
    assert steps.prefilled("r", "p", saved=992) == [Decode("r", "d", expect_tokens=992)]
    assert steps.began("r") == []
    assert steps.decoded("r", "d") == []
    assert steps.phase("r") is None
    assert (steps.count("arrived"), steps.count("served")) == (1, 1)


def test_a_short_prompt_is_decoded_at_once(steps: Steps) -> None:
    steps.fleet(prefill="p", decode="d")
    assert steps.ask("r", 100) == [Decode("r", "d", 0)]


def test_a_prompt_that_the_pool_has_is_decoded_at_once(steps: Steps) -> None:
    steps.fleet(prefill="p", decode="d")
    known = {"prefix": (1, 2, 3), "prefix_tokens": 256}
    assert steps.ask("a", 800, **known) == [Prefill("a", "p")]
    steps.prefilled("a", "p")
    steps.began("a")
    assert steps.ask("b", 800, **known) == [Decode("b", "d", 0)]


def test_a_request_that_cannot_be_handed_over_is_decoded_at_once(steps: Steps) -> None:
    steps.fleet(prefill="p", decode="d")
    assert steps.ask("r", hands_over=False) == [Decode("r", "d", 0)]


def test_the_first_token_counts_once(steps: Steps) -> None:
    steps.fleet(decode="d e")
    [call] = steps.ask("r", 20)
    steps.now += 2.0
    steps.began("r")
    steps.began("r")
    [_, again] = steps.decoded("r", call.replica, FAILED)
    steps.now += 2.0
    steps.began("r")
    assert list(steps.controller.state.counts.waits) == [2.0]
    assert steps.replica(again.replica).work.num_starting == 0


def test_an_end_that_brings_the_first_token_counts_as_both() -> None:
    """All that is known afterwards is what it is after two events of the same moment."""
    known: list[object] = []
    for is_one in (True, False):
        steps = Steps()
        steps.fleet(decode="d e")
        for number in range(4):
            name = f"r{number}"
            [call] = steps.ask(name, 20, prefix=(7,), prefix_tokens=16)
            steps.now += 2.0
            if not is_one:
                steps.began(name)
            end = DecodeEnded(
                request_id=RequestId(name),
                replica=call.replica,
                outcome=Outcome.OK,
                output_tokens=3,
                began=is_one,
            )
            assert steps.step(end) == []
        steps.tick()
        state = steps.controller.state
        rates = state.rates.current(state.now)
        held = [(each.replica_id, each.cache.num_held) for each in state.fleet]
        known.append(
            (rates, state.counts.events, list(state.counts.waits), held, len(state.pool.prefixes))
        )
    assert known[0] == known[1]


# Waiting


def test_a_request_that_waits_in_the_queue_is_refused_at_its_deadline() -> None:
    steps = Steps(Settings(prefill_requests=1), overload=UNHURRIED)
    steps.fleet(prefill="p", decode="d")
    steps.ask("first")
    steps.ask("r", deadline=30.0)
    steps.ask("patient")
    assert steps.phase("r") is Phase.QUEUED
    assert steps.tick(29.9) == []
    assert refused(steps.tick(0.1)) == [("r", 503)]
    assert steps.count("late") == 1
    assert steps.prefilled("first", "p")[0] == Prefill("patient", "p")


def test_a_request_that_waits_for_a_decoder_is_refused_at_its_deadline() -> None:
    steps = Steps(Settings(decode_requests=1), overload=UNHURRIED)
    steps.fleet(prefill="p", decode="d")
    steps.ask("first", 20)
    steps.ask("r", deadline=30.0)
    steps.prefilled("r", "p")
    assert steps.phase("r") is Phase.HANDING
    assert steps.tick(29.9) == []
    assert refused(steps.tick(0.1)) == [("r", 503)]


def test_who_was_let_in_and_waits_for_others_at_twice_the_target_is_refused_after_all() -> None:
    """As rates were not known yet: a burst at the start, say."""
    steps = Steps(Settings(prefill_requests=1), overload=OverloadConfig(ttft_target_s=5.0))
    steps.fleet(prefill="p", decode="d")
    steps.ask("first")
    steps.ask("waits")
    assert steps.tick(9.9) == []
    assert refused(steps.tick(0.1)) == [("waits", 503)]
    assert steps.count("late") == 1
    # What is computed is not begun later by that.
    assert steps.prefilled("first", "p") == [Decode("first", "d", 0)]


@pytest.mark.parametrize(
    ("deadline", "words"),
    [
        (8.0, "it has waited 8.0 s for a replica, longer than front.max_wait_s"),
        (60.0, "it has waited 10.0 s for a replica, longer than twice overload.ttft_target_s (10"),
    ],
)
def test_who_is_refused_late_reads_which_limit_has_passed(deadline: float, words: str) -> None:
    steps = Steps(Settings(prefill_requests=1), overload=OverloadConfig(ttft_target_s=5.0))
    steps.fleet(prefill="p", decode="d")
    steps.ask("first")
    steps.ask("waits", deadline=deadline)
    [refusal] = steps.tick(min(deadline, 10.0))
    assert isinstance(refusal, Refuse)
    assert refusal.why.startswith(words)


def test_who_waits_for_an_engine_to_come_back_is_not_refused_for_it() -> None:
    steps = Steps(Settings(decode_requests=1))
    steps.fleet(decode="d")
    steps.ask("first", 20)
    steps.ask("r", 20, deadline=100.0)
    steps.failed("d")
    assert not refused(steps.tick(60.0))
    assert steps.phase("r") is Phase.HANDING
    assert refused(steps.tick(40.0)) == [("r", 503)]


def test_who_has_been_failed_by_an_engine_may_wait_for_others_longer() -> None:
    steps = Steps(Settings(decode_requests=1))
    steps.fleet(decode="d e")
    calls = [steps.ask(name, 20)[0] for name in "ab"]
    lost = calls[0]
    steps.failed(lost.replica)
    steps.decoded(lost.request_id, lost.replica, FAILED)
    assert steps.phase(lost.request_id) is Phase.HANDING
    assert not refused(steps.tick(30.0))
    assert steps.phase(lost.request_id) is Phase.HANDING


def test_short_prompts_do_not_make_a_prefill_replica_look_slow() -> None:
    """A step takes its time, however little it computes."""
    steps = Steps(overload=UNHURRIED)
    steps.fleet(prefill="p", decode="d")
    for number in range(40):
        name = RequestId(f"r{number}")
        assert steps.ask(name, 300) == [Prefill(name, "p")]
        steps.now += 0.06
        steps.step(
            PrefillEnded(
                request_id=name,
                replica=ReplicaId("p"),
                outcome=Outcome.OK,
                prompt_tokens=300,
                cached_tokens=290,
            )
        )
        steps.cancel(name)
    assert steps.controller.state.rates.snapshot(steps.now).prefill_tokens_per_s > 2000


def test_sequences_of_requests_fill_a_decoder_as_requests_do() -> None:
    """A request of many choices had an engine to itself for seconds, and others were sent there."""
    steps = Steps(Settings(decode_requests=4), overload=UNHURRIED)
    steps.fleet(decode="d e")
    many = steps.ask("many", 16, 16, num_sequences=4)[0]
    others = [steps.ask(f"r{number}", 16, 16)[0] for number in range(4)]
    assert {each.replica for each in others} == {"d", "e"} - {many.replica}
    assert steps.ask("last", 16, 16) == []
    steps.decoded("many", many.replica)
    assert steps.replica(many.replica).work.num_sequences == 1


def test_every_sequence_of_a_request_takes_blocks() -> None:
    steps = Steps(overload=UNHURRIED)
    steps.fleet(decode="d e")
    one = steps.ask("one", 160, 160)[0]
    four = steps.ask("four", 160, 160, num_sequences=4)[0]
    committed = [steps.replica(each.replica).work.committed_blocks for each in (one, four)]
    assert committed == [20, 50]


def test_a_prompt_that_is_computed_may_still_find_a_decoder_after_its_deadline() -> None:
    steps = Steps(Settings(decode_requests=1))
    steps.fleet(prefill="p", decode="d")
    steps.ask("first", 20)
    steps.ask("r", deadline=30.0)
    steps.now = 40.0
    assert steps.prefilled("r", "p") == []
    assert steps.tick(HANDOVER_GRACE_S - 0.1) == []
    assert steps.decoded("first", "d") == [Decode("r", "d", 0)]


def test_what_is_being_computed_has_no_deadline(steps: Steps) -> None:
    steps.fleet(prefill="p", decode="d")
    steps.ask("r", deadline=30.0)
    assert steps.tick(100.0) == []
    assert steps.prefilled("r", "p") == [Decode("r", "d", 0)]
    assert steps.tick(100.0) == []


def test_an_answer_that_has_stopped_is_given_up_in_the_end() -> None:
    steps = Steps(Settings(resume_within_s=60.0, retry_pause_s=1000.0))
    steps.fleet(decode="d")
    steps.ask("r", 20, deadline=1.0)
    steps.began("r")
    steps.failed("d")
    steps.decoded("r", "d", Outcome.CANCELLED)
    assert steps.phase("r") is Phase.HANDING
    assert steps.tick(59.9) == []
    assert refused(steps.tick(0.1)) == [("r", 503)]


# Who is let in


def with_a_measured_prefill_rate() -> Steps:
    """One prefill and one decode replica, 10,000 tokens a second, a target of 1 s."""
    steps = Steps(overload=OverloadConfig(ttft_target_s=1.0))
    steps.fleet(prefill="p", decode="d")
    for number in range(COLD_SAMPLES + 1):
        steps.ask(f"m{number}")
        steps.now += 0.1  # 10,000 tokens by second
        steps.prefilled(f"m{number}", "p")
    return steps


def test_a_request_that_would_wait_too_long_is_refused_at_once() -> None:
    steps = with_a_measured_prefill_rate()
    steps.ask("large", 9_000)
    [refuse] = steps.ask("r", 9_000)
    assert isinstance(refuse, Refuse)
    assert (refuse.status, refuse.retry_after_s >= 1) == (429, True)
    assert (steps.phase("r"), steps.count("shed")) == (None, 1)


def test_what_the_pool_is_known_to_have_is_no_reason_to_refuse() -> None:
    """Neither a request itself, nor those that come after it."""
    steps = with_a_measured_prefill_rate()
    steps.controller.state.pool.add((1, 2, 3))
    known: dict[str, Any] = {"prefix": (1, 2, 3), "prefix_tokens": 2_967}
    soon = steps.now + 0.7
    assert refused(steps.ask("late", 9_000, deadline=soon)) == [("late", 503)]
    assert refused(steps.ask("soon", 9_000, deadline=soon, **known)) == []
    for number in range(5):
        assert refused(steps.ask(f"known{number}", 9_000, **known)) == []
    assert refused(steps.ask("large", 9_000)) == []
    assert refused(steps.ask("larger", 9_000)) == [("larger", 429)]
    # Who does not wait in the queue is not refused for its length.
    assert refused(steps.ask("known", 9_000, **known)) == []
    assert refused(steps.ask("short", 50)) == []


def test_a_pool_that_is_down_has_nothing_whatever_is_known(steps: Steps) -> None:
    steps.fleet(prefill="p", decode="d")
    steps.measure("p", pool_is_up=False)
    steps.measure("d", pool_is_up=False)
    state = steps.controller.state
    state.pool.add((1, 2, 3))
    steps.ask("r", 2000, prefix=(1, 2, 3), prefix_tokens=600)
    [request] = state.requests.values()
    assert state.pool.unknown_tokens(request.ask) == 2000


def test_nothing_is_refused_by_rates_that_are_only_assumed() -> None:
    steps = Steps(Settings(max_pending_handoffs=2), overload=OverloadConfig(ttft_target_s=1.0))
    steps.fleet(prefill="p", decode="d")
    for number in range(40):
        assert refused(steps.ask(f"r{number}", 9_000, deadline=60.0)) == []
        assert refused(steps.ask(f"s{number}", 50)) == []


def test_without_a_replica_everything_is_refused(steps: Steps) -> None:
    assert refused(steps.ask("r")) == [("r", 503)]


def test_a_full_queue_refuses() -> None:
    steps = Steps(
        Settings(prefill_requests=1),
        overload=OverloadConfig(ttft_target_s=1000.0, max_queue=6),
    )
    steps.fleet(prefill="p", decode="d")
    for number in range(6):
        assert refused(steps.ask(f"r{number}")) == []
    assert refused(steps.ask("r6")) == [("r6", 429)]


def test_what_the_pool_has_does_not_ask_for_prefill_replicas(steps: Steps) -> None:
    steps.fleet(prefill="p", decode="d")
    state = steps.controller.state
    known = {"prefix": (1, 2, 3), "prefix_tokens": 256}
    steps.ask("a", 2000, **known)
    assert state.rates.asked_tokens._total == 2000
    steps.prefilled("a", "p")
    steps.began("a")
    steps.ask("b", 2000, **known)
    assert state.rates.asked_tokens._total == 2000 + (2000 - 768)
    steps.ask("c", 100)
    assert state.rates.asked_tokens._total == 2000 + (2000 - 768)


def test_time_in_which_the_pool_is_read_is_not_learned_as_computing(steps: Steps) -> None:
    """Small remainders of long prompts looked dear, and were handed over."""
    steps.fleet(decode="d")

    def serve(name: str, tokens: int, first: int, seconds: float) -> None:
        prefix = tuple(range(first, first + tokens // 256))
        steps.ask(name, tokens, prefix=prefix, prefix_tokens=256)
        steps.now += seconds
        steps.began(name)
        steps.decoded(name, "d")

    for number in range(COLD_SAMPLES + 3):
        serve(f"new-{number}", 2048, 1000 * number, seconds=0.2)
    learned = steps.controller.state.rates.snapshot(steps.now).local_prefill_s_per_token
    assert learned == pytest.approx(0.2 / 2048, rel=0.01)
    for number in range(5):  # the pool has most of it, which takes time too
        serve(f"known-{number}", 2048 + 256, 0, seconds=0.1)
    assert steps.controller.state.rates.snapshot(steps.now).local_prefill_s_per_token == learned


def test_what_the_pool_has_is_no_work_for_those_that_come_later(steps: Steps) -> None:
    steps = Steps(Settings(prefill_requests=1), overload=UNHURRIED)
    steps.fleet(prefill="p", decode="d")
    prefix = tuple(range(1, 29))
    steps.ask("known", 8000, prefix=prefix, prefix_tokens=256)
    steps.prefilled("known", "p")
    steps.began("known")
    steps.ask("busy", 5000)
    for number in range(4):
        long = {"prefix": (*prefix, 100 + number), "prefix_tokens": 256}
        assert steps.ask(f"r{number}", 12_000, **long) == []
    state = steps.controller.state
    assert [steps.phase(f"r{number}") for number in range(4)] == [Phase.QUEUED] * 4
    assert steps.controller.admission.pressure("").queued_tokens == 5000 + 4 * (12_000 - 28 * 256)
    assert state.backlog_tokens() == 4 * (12_000 - 28 * 256)
    assert steps.controller.admission.pressure("").queued_blocks >= 4 * 12_000 / 16


def decode_of(actions: list[object]) -> Decode:
    [found] = [each for each in actions if isinstance(each, Decode)]
    return found


@pytest.mark.parametrize(
    ("settings", "prefill", "ask", "path"),
    [
        ({}, "p", {}, PromptPath.HANDED_OVER),
        ({}, "p", {"tokens": 50}, PromptPath.FASTER_LOCALLY),
        ({}, "p", {"prefix": (1, 2, 3), "prefix_tokens": 320}, PromptPath.IN_POOL),
        ({}, "p", {"hands_over": False}, PromptPath.NOT_SPLITTABLE),
        ({}, "", {}, PromptPath.NO_PREFILL_REPLICA),
        ({"hands_over": False}, "p", {}, PromptPath.SWITCHED_OFF),
    ],
)
def test_where_a_prompt_is_computed_is_counted_with_the_reason(
    settings: dict[str, bool], prefill: str, ask: dict[str, Any], path: PromptPath
) -> None:
    steps = Steps(Settings(**settings))
    steps.fleet(prefill=prefill, decode="d")
    steps.controller.state.pool.add((1, 2, 3))
    actions = steps.ask("r", **ask)
    if path is PromptPath.HANDED_OVER:
        actions = steps.prefilled("r", "p")
    call = decode_of(actions)
    steps.decoded("r", call.replica, FAILED)  # another attempt is not counted again
    assert steps.controller.state.counts.prompts == {path: 1}


def test_a_decode_says_how_long_the_request_has_waited() -> None:
    steps = Steps(Settings(prefill_requests=1))
    steps.fleet(prefill="p", decode="d")
    steps.ask("first")
    steps.ask("r")
    steps.now += 2.0
    steps.prefilled("first", "p")
    steps.now += 0.5  # computing is no waiting
    event = PrefillEnded(
        request_id=RequestId("r"),
        replica=ReplicaId("p"),
        outcome=Outcome.OK,
        prompt_tokens=1000,
        cached_tokens=320,
    )
    steps.history.clear()
    steps.step(event)
    call = decode_of(steps.history)
    assert call.waited_s == pytest.approx(2.0)
    steps.history.clear()
    steps.ask("local", 50)
    assert decode_of(steps.history).waited_s == 0.0


def test_the_tokens_in_a_prompts_bytes_are_learned_where_an_engine_says_them(steps: Steps) -> None:
    steps.fleet(decode="d")
    for number in range(20):
        steps.ask(f"r{number}", prompt_bytes=3000)
        steps.began(f"r{number}")
        steps.step(
            DecodeEnded(
                request_id=RequestId(f"r{number}"),
                replica=ReplicaId("d"),
                outcome=Outcome.OK,
                prompt_tokens=1000,
                output_tokens=10,
            ),
            after=0.1,
        )
    steps.tick()
    assert steps.controller.state.rates.snapshot(steps.now).tokens_per_byte == pytest.approx(1 / 3)
