"""Who is given what, and when."""

from collections import deque

import pytest

from tests.support.router_steps import Steps
from vllm_kvpool.router.control.events import Decode, Outcome, Prefill, Refuse
from vllm_kvpool.router.control.overload import Overload
from vllm_kvpool.router.control.request_flow import LOOK_AHEAD, MAX_PASSED_S
from vllm_kvpool.router.control.requests import Phase
from vllm_kvpool.router.control.settings import OverloadConfig, PlannerConfig, Settings
from vllm_kvpool.router.control.states import Role, State

ALL_IN = OverloadConfig(ttft_target_s=1e6, max_queue=100_000)
NEW = "n-1"  # what is started first on the host


def steps_with(settings: Settings | None = None, planner: PlannerConfig | None = None) -> Steps:
    return Steps(settings, planner=planner, overload=ALL_IN)


# Prompts


def test_prompts_are_given_out_by_priority_then_arrival() -> None:
    steps = steps_with(Settings(prefill_requests=1))
    steps.fleet(prefill="p", decode="d")
    steps.ask("first")
    for name, priority in (("late", 1), ("a", 0), ("b", 0), ("urgent", -1)):
        steps.ask(name, priority=priority)
    order = ["first"]
    for _ in range(4):
        given = [e for e in steps.prefilled(order[-1], "p") if isinstance(e, Prefill)]
        order += [each.request_id for each in given]
    assert order == ["first", "urgent", "a", "b", "late"]


def test_a_replica_is_given_no_more_than_its_budget() -> None:
    steps = steps_with(Settings(prefill_tokens=2500))
    steps.fleet(prefill="p", decode="d")
    given = [steps.ask(f"r{number}") for number in range(4)]
    assert given == [[Prefill("r0", "p")], [Prefill("r1", "p")], [], []]
    assert Prefill("r2", "p") in steps.prefilled("r0", "p")


def test_a_short_prompt_does_not_wait_behind_long_ones() -> None:
    steps = steps_with(Settings(prefill_requests=1))
    steps.fleet(prefill="p", decode="d")
    steps.ask("computed")
    steps.ask("waits")
    assert steps.ask("short", 20) == [Decode("short", "d", 0)]


# Without prefill


def test_without_prefill_replicas_prompts_are_computed_where_they_are_decoded() -> None:
    steps = steps_with()
    steps.fleet(decode="d")
    assert steps.ask("r") == [Decode("r", "d", 0)]


def test_without_decoders_prefill_replicas_do_everything() -> None:
    steps = steps_with()
    steps.fleet(prefill="p")
    assert steps.ask("r") == [Decode("r", "p", 0)]


def test_without_a_pool_everybody_does_everything() -> None:
    steps = steps_with()
    steps.fleet(prefill="p", decode="d")
    steps.measure("p", pool_is_up=False)
    steps.measure("d", pool_is_up=False)
    assert {each.replica for name in "ab" for each in steps.ask(name)} == {"p", "d"}
    steps.measure("d", pool_is_up=True)
    assert steps.ask("c") == [Prefill("c", "p")]


def test_what_was_computed_before_the_pool_went_is_not_expected() -> None:
    steps = steps_with(Settings(decode_requests=1))
    steps.fleet(prefill="p", decode="d")
    steps.ask("first", 20)
    steps.ask("r")
    steps.prefilled("r", "p", saved=992)
    steps.measure("p", pool_is_up=False)
    assert Decode("r", "p", 0) in steps.measure("d", pool_is_up=False)


def test_a_pool_that_comes_back_is_taken_for_empty() -> None:
    steps = steps_with()
    steps.fleet(prefill="p", decode="d")
    known = {"prefix": (1, 2, 3), "prefix_tokens": 256}
    steps.ask("a", 800, **known)
    steps.prefilled("a", "p")
    steps.began("a")
    for up in (False, True):
        steps.measure("p", pool_is_up=up)
        steps.measure("d", pool_is_up=up)
    assert steps.ask("b", 800, **known) == [Prefill("b", "p")]


def test_old_news_of_the_pool_do_not_count() -> None:
    steps = steps_with(Settings(stale_after_s=10.0))
    steps.fleet(prefill="p", decode="d")
    steps.measure("p", pool_is_up=False)
    steps.measure("d", pool_is_up=False)
    steps.tick(10.1)
    assert steps.ask("a") == [Prefill("a", "p")]


def test_without_hand_over_every_replica_serves() -> None:
    steps = steps_with(Settings(hands_over=False))
    steps.fleet(prefill="p", decode="d")
    assert {each.replica for name in "ab" for each in steps.ask(name, 2000)} == {"p", "d"}


def test_not_all_that_waits_goes_to_decoders_when_prefill_is_away_for_a_moment() -> None:
    steps = steps_with(Settings(prefill_requests=1, decode_requests=1))
    steps.fleet(prefill="p")
    steps.serve("d", Role.DECODE, blocks=100_000)
    for number in range(200):
        steps.ask(f"r{number}")
    steps.failed("p")
    steps.prefilled("r0", "p", Outcome.FAILED)
    state = steps.controller.state
    assert len(state.migration) == 2 * LOOK_AHEAD
    assert len(state.queue) == 200 - 1 - 2 * LOOK_AHEAD
    steps.tick(1.0)
    assert [type(each) for each in steps.loaded("p")] == [Prefill]


# What is to be decoded


def test_a_decoder_is_given_no_more_hand_overs_at_a_time_than_it_may_have() -> None:
    steps = steps_with(Settings(max_pending_handoffs=2))
    steps.fleet(decode="d")
    assert [len(steps.ask(name, 20)) for name in "abc"] == [1, 1, 0]
    assert steps.began("a") == [Decode("c", "d", 0)]


def test_a_locked_decoder_gets_nothing() -> None:
    steps = Steps(overload=ALL_IN)
    steps.fleet(decode="d e")
    steps.measure("d", used=990)
    steps.tick(0.1)
    assert steps.controller.state.overload.locked == {"d"}
    assert {steps.ask(name, 20)[0].replica for name in "abcd"} == {"e"}
    steps.measure("d", used=0)
    steps.tick(2.0)
    assert steps.controller.state.overload.locked == frozenset()
    assert {steps.ask(name, 20)[0].replica for name in "efgh"} == {"d"}


def test_the_last_decoder_is_not_locked() -> None:
    steps = Steps(Settings(max_pending_handoffs=1), overload=ALL_IN)
    steps.controller.state.overload = Overload(lock_at=0.9)
    steps.fleet(decode="d e")
    steps.measure("d", used=940)
    steps.measure("e", used=950)
    steps.tick(1.0)
    assert steps.controller.state.overload.locked == {"e"}
    assert steps.ask("r", 20) == [Decode("r", "d", 0)]


def test_decoders_that_are_as_full_as_the_router_fills_them_are_not_locked() -> None:
    """Each answer that ends makes room for the next: no batch runs emptier than it has to."""
    steps = steps_with(Settings(max_pending_handoffs=1000))
    steps.fleet(decode="d e f")
    given = deque(each for number in range(400) for each in steps.ask(f"r{number}", 200))
    full = [each.work.committed_blocks for each in steps.controller.state.fleet]
    assert min(full) > 900
    for each in given:
        steps.began(each.request_id)
    for _ in range(100):
        ended = given.popleft()
        more = steps.decoded(ended.request_id, ended.replica, output=100)
        assert len(more) == 1
        given += more
        steps.began(more[0].request_id)
        steps.tick(0.1)
        assert steps.controller.state.overload.locked == frozenset()
        assert [each.work.committed_blocks for each in steps.controller.state.fleet] == full


def test_small_requests_pass_one_that_fits_nowhere_but_not_for_ever() -> None:
    steps = steps_with()
    for name in "de":
        steps.serve(name, Role.DECODE, blocks=100)
    for name in ("a", "b", "c"):
        steps.ask(name, 16 * 29, 16, hands_over=False)
    assert len(steps.replica("d").work.active) == 2
    steps.ask("large", 16 * 89, 16, hands_over=False)
    assert steps.ask("small", 16 * 5, 16) == [Decode("small", "e", 0)]
    steps.tick(MAX_PASSED_S + 0.1)
    assert steps.phase("large") is Phase.HANDING
    # The emptier one is kept free for it; the other one goes on.
    assert steps.ask("next", 16 * 5, 16) == [Decode("next", "d", 0)]
    assert steps.decoded("small", "e") == []
    assert steps.decoded("b", "e") == [Decode("large", "e", 0)]


def test_few_pass_at_a_time() -> None:
    steps = steps_with()
    steps.serve("d", Role.DECODE, blocks=100)
    steps.ask("first", 16 * 19, 16, hands_over=False)
    for number in range(LOOK_AHEAD):
        steps.ask(f"large{number}", 16 * 89, 16, hands_over=False)
    assert steps.ask("small", 20) == []


# Bound to a replica that loads


def with_new(settings: Settings | None = None) -> Steps:
    """`p` computes a prompt, and another engine is loading."""
    steps = steps_with(settings or Settings(prefill_requests=1))
    steps.fleet(prefill="p", decode="d")
    steps.ask("first")
    steps.start(Role.PREFILL)
    assert steps.states() == {
        "p": State.OLD_PREFILL,
        "d": State.DECODE,
        NEW: State.NEW_PREFILL,
    }
    return steps


def test_what_finds_no_room_is_bound_to_a_loading_replica_up_to_its_limit() -> None:
    steps = with_new()
    for number in range(6):
        assert steps.ask(f"r{number}") == []
    assert [each.ask.request_id for each in steps.replica(NEW).work.bound] == [
        "r0",
        "r1",
        "r2",
        "r3",
    ]
    assert [steps.phase(f"r{number}") for number in (3, 4)] == [Phase.BOUND, Phase.QUEUED]


def test_a_loaded_replica_works_off_what_it_was_bound_to() -> None:
    steps = with_new()
    for number in range(3):
        steps.ask(f"r{number}")
    assert steps.loaded(NEW) == [Prefill("r0", NEW)]
    assert steps.state(NEW) is State.REFRACTORY_PREFILL
    assert Prefill("r1", NEW) in steps.prefilled("r0", NEW)
    assert Prefill("r2", NEW) in steps.prefilled("r1", NEW)
    assert steps.state(NEW) is State.PREFILL
    assert steps.state("p") is State.PREFILL


def test_once_it_has_worked_off_what_it_was_bound_to_the_queue_is_its_own_at_once() -> None:
    steps = with_new(Settings(prefill_requests=8, prefill_tokens=1500))
    for number in range(6):
        steps.ask(f"r{number}", 300)
    steps.loaded(NEW)
    assert steps.state(NEW) is State.PREFILL
    assert steps.phase("r5") is Phase.PREFILLING


def test_an_old_replica_takes_bound_requests_before_younger_ones_of_the_queue() -> None:
    steps = with_new()
    for name in "abcdef":
        steps.ask(name)
    assert Prefill("a", "p") in steps.prefilled("first", "p")
    assert Prefill("b", "p") in steps.prefilled("a", "p")
    assert steps.count("stolen") == 2


def test_a_more_urgent_request_of_the_queue_goes_before_bound_ones() -> None:
    steps = with_new()
    for name in "abcd":
        steps.ask(name)
    steps.ask("urgent", priority=-1)
    assert Prefill("urgent", "p") in steps.prefilled("first", "p")


def test_small_prompts_do_not_pass_a_larger_one_that_is_bound() -> None:
    steps = with_new(Settings(prefill_tokens=3000))
    steps.ask("large", 2500)
    assert steps.phase("large") is Phase.BOUND
    for number in range(8):
        steps.ask(f"small{number}", 500)
    assert steps.replica("p").work.prefill_tokens == 1000
    assert Prefill("large", "p") in steps.prefilled("first", "p")


def test_an_old_replica_steals_from_a_loaded_one_what_that_has_no_room_for() -> None:
    steps = with_new()
    for name in "abc":
        steps.ask(name)
    steps.loaded(NEW)
    assert steps.phase("b") is Phase.BOUND
    assert Prefill("b", "p") in steps.prefilled("first", "p")


def test_a_bound_request_is_refused_at_its_deadline_and_can_be_cancelled() -> None:
    steps = with_new()
    steps.ask("late", deadline=30.0)
    steps.ask("gone")
    assert steps.cancel("gone") == []
    assert [type(each) for each in steps.tick(30.0)] == [Refuse]
    assert steps.replica(NEW).work.bound == []


@pytest.mark.parametrize("how", ["fails", "drained", "removed", "decode"])
def test_what_was_bound_waits_again_when_the_replica_does_not_come(how: str) -> None:
    steps = with_new()
    steps.ask("r")
    if how == "fails":
        steps.failed(NEW)
    elif how == "drained":
        steps.drain(NEW)
    elif how == "removed":
        steps.remove(NEW)
    else:
        steps.set_role(NEW, Role.DECODE)
    assert steps.phase("r") is Phase.QUEUED
    assert steps.state("p") is State.PREFILL
    assert Prefill("r", "p") in steps.prefilled("first", "p")


@pytest.mark.parametrize(
    ("how", "after"),
    [
        ("drained", State.SHUTTING_PREFILL),
        ("removed", State.SHUTTING_PREFILL),
        ("decode", State.MUTATING_TO_DECODE),
        ("fails", State.FAILED),
    ],
)
def test_what_is_still_bound_to_a_loaded_replica_waits_again_when_it_goes(
    how: str, after: State
) -> None:
    steps = with_new()
    for name in ("r", "s"):
        steps.ask(name)
    steps.loaded(NEW)
    assert steps.state(NEW) is State.REFRACTORY_PREFILL
    if how == "fails":
        steps.failed(NEW)
    elif how == "drained":
        steps.drain(NEW)
    elif how == "removed":
        steps.remove(NEW)
    else:
        steps.set_role(NEW, Role.DECODE)
    assert steps.state(NEW) is after
    assert (steps.phase("r"), steps.phase("s")) == (Phase.PREFILLING, Phase.QUEUED)
    assert Prefill("s", "p") in steps.prefilled("first", "p")


def test_bound_requests_go_to_decoders_when_nobody_is_left_to_compute_them() -> None:
    steps = with_new()
    steps.ask("r")
    assert Decode("r", "d", 0) in steps.failed("p")


def test_without_take_over_nothing_is_bound() -> None:
    steps = steps_with(Settings(prefill_requests=1), PlannerConfig(live_takeover=False))
    steps.fleet(prefill="p", decode="d")
    steps.ask("first")
    steps.start(Role.PREFILL)
    assert steps.state(NEW) is State.LOADING_PREFILL
    steps.ask("r")
    assert steps.phase("r") is Phase.QUEUED
    assert steps.loaded(NEW) == [Prefill("r", NEW)]


# A flip


def test_what_a_flipped_replica_has_computed_it_decodes_itself() -> None:
    steps = steps_with(Settings(decode_requests=1))
    steps.fleet(prefill="p", decode="d")
    steps.ask("first", 20)
    steps.ask("r")
    steps.ask("s")
    steps.prefilled("r", "p")
    steps.set_role("p", Role.DECODE)
    assert steps.state("p") is State.MUTATING_TO_DECODE
    assert steps.phase("r") is Phase.HANDING
    done = steps.prefilled("s", "p")
    assert {each.request_id for each in done if isinstance(each, Decode)} >= {"r"}
    assert steps.state("p") is State.DECODE


def test_others_do_not_take_its_place_before() -> None:
    steps = steps_with(Settings(decode_requests=1))
    steps.fleet(prefill="p q", decode="d")
    steps.ask("first", 20)
    for name in ("older", "own", "last"):
        steps.ask(name)
    steps.ask("short", 20)
    assert steps.place("older") == steps.place("last") == "p"
    steps.prefilled("older", "p")
    steps.prefilled("own", "q")
    steps.set_role("q", Role.DECODE)
    assert steps.place("own") == "q"
    assert steps.phase("older") is Phase.HANDING


def test_who_was_loaded_again_is_not_left_alone_for_what_it_said_before() -> None:
    steps = steps_with(Settings(busy_pause_s=100.0))
    steps.fleet(prefill="p", decode="d")
    steps.ask("r")
    steps.prefilled("r", "p", Outcome.BUSY)
    steps.failed("p")
    steps.tick(1.0)
    steps.loaded("p")
    assert steps.ask("s") == [Prefill("s", "p")]


# What found no room


def test_a_prompt_that_goes_first_is_tried_though_the_one_behind_it_found_no_room() -> None:
    steps = Steps(Settings(prefill_tokens=2000))
    steps.fleet(prefill="p", decode="d")
    steps.ask("first", 1000)
    assert steps.ask("large", 1500) == []
    assert steps.ask("urgent", 500, priority=-1) == [Prefill("urgent", "p")]
