"""Engines that share no store: how the router notices, what it stops, and when it tries again."""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import pytest

from tests.support.router_rig import FAST, RouterRig, run
from tests.support.router_steps import Steps
from vllm_kvpool.router.control.events import Decode, Prefill
from vllm_kvpool.router.control.handovers import (
    APART_AFTER,
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    NONE_EXPECTED,
    ExpectedPrompts,
    Handovers,
)
from vllm_kvpool.router.control.request_flow import MAX_PASSED_S
from vllm_kvpool.router.control.requests import PromptPath
from vllm_kvpool.router.control.settings import OverloadConfig
from vllm_kvpool.router.control.states import ReplicaId
from vllm_kvpool.router.ops.compatibility import problems
from vllm_kvpool.router.ops.snapshot import health_of

P, D = ReplicaId("p"), ReplicaId("d")
KNOWN = frozenset({P, D, ReplicaId("q"), ReplicaId("e")})


class Pairs:
    """`Handovers`, told of growth."""

    def __init__(self) -> None:
        self.handovers = Handovers()
        self.counts: dict[str, ExpectedPrompts] = {}
        self.tell()

    def tell(self, now: float = 0.0, source: str = "p", found: int = 0, missing: int = 0) -> None:
        before = self.counts.get(source, NONE_EXPECTED)
        self.counts[source] = ExpectedPrompts(before.found + found, before.missing + missing)
        self.handovers.measured(D, dict(self.counts), KNOWN, now)

    @property
    def is_apart(self) -> bool:
        assert self.handovers.is_any_apart == bool(list(self.handovers.apart()))
        return self.handovers.is_apart(P, D)


def test_pair_that_misses_several_prompts_in_a_row_is_apart() -> None:
    pairs = Pairs()
    pairs.tell(missing=APART_AFTER - 1)
    assert not pairs.is_apart
    pairs.tell(missing=1)
    assert pairs.is_apart
    assert not pairs.handovers.may_hand_over(P, D, FIRST_PAUSE_S - 1)
    assert pairs.handovers.may_hand_over(ReplicaId("q"), D, 0.0), "another source"


def test_found_prompt_ends_the_row() -> None:
    pairs = Pairs()
    pairs.tell(missing=APART_AFTER - 1)
    pairs.tell(found=1)
    pairs.tell(missing=APART_AFTER - 1)
    assert not pairs.is_apart
    pairs.tell(missing=1)
    pairs.tell(found=1)
    assert not pairs.is_apart, "a later one was found after all"


def test_pair_that_is_apart_is_tried_by_one_prompt_after_growing_pauses() -> None:
    pairs, now, pauses = Pairs(), 0.0, list[float]()
    pairs.tell(now, missing=APART_AFTER)
    for _ in range(7):
        pairs.tell(now, missing=5)  # were on their way before: nothing new
        began = now
        while not pairs.handovers.may_hand_over(P, D, now):
            now += 1.0
        pauses.append(now - began)
        pairs.handovers.hand_over(P, D, now)
        assert not pairs.handovers.may_hand_over(P, D, now + LONGEST_PAUSE_S - 1)
        pairs.tell(now, missing=1)
    assert pauses == [30.0, 60.0, 120.0, 240.0, 480.0, 600.0, 600.0]
    pairs.tell(now, found=1)
    assert not pairs.is_apart


def test_try_whose_outcome_never_comes_is_followed_by_another() -> None:
    """Its client may go away before the decoder has looked."""
    pairs = Pairs()
    pairs.tell(missing=APART_AFTER)
    pairs.handovers.hand_over(P, D, FIRST_PAUSE_S)
    assert pairs.handovers.may_hand_over(P, D, FIRST_PAUSE_S + LONGEST_PAUSE_S)


def test_what_was_counted_before_the_first_sample_says_nothing() -> None:
    handovers = Handovers()
    handovers.measured(D, {"p": ExpectedPrompts(missing=9)}, KNOWN, 0.0)
    assert not handovers.is_any_apart
    assert handovers.measured(D, {"p": ExpectedPrompts(missing=10)}, KNOWN, 0.0) == ExpectedPrompts(
        missing=1
    )


def test_counts_of_an_engine_that_was_started_anew_begin_again() -> None:
    pairs = Pairs()
    pairs.tell(found=10)
    assert pairs.handovers.measured(D, {"p": ExpectedPrompts(0, 3)}, KNOWN, 0.0) == ExpectedPrompts(
        0, 3
    )
    assert pairs.is_apart


def test_prompts_of_another_routers_replicas_do_not_count() -> None:
    pairs = Pairs()
    pairs.tell(source="-", missing=9)
    pairs.tell(source="elsewhere", missing=9)
    assert not pairs.handovers.is_any_apart


@pytest.mark.parametrize("replica", [P, D])
def test_replica_whose_engine_has_ended_is_tried_anew(replica: ReplicaId) -> None:
    pairs = Pairs()
    pairs.tell(missing=APART_AFTER)
    pairs.handovers.forget(replica)
    assert not pairs.is_apart
    assert pairs.handovers.may_hand_over(P, D, 0.0)


# The controller


class Told(Steps):
    """A controller whose decoders count what they find."""

    def __init__(self, prefill: str, decode: str) -> None:
        super().__init__(overload=OverloadConfig(ttft_target_s=1000.0))
        self.counts: dict[str, dict[str, ExpectedPrompts]] = {}
        self.fleet(prefill=prefill, decode=decode)
        for each in (*prefill.split(), *decode.split()):
            self.counts[each] = {}
            self.measure(each, expected={})

    def count_for(self, decoder: str, source: str, *, found: int = 0, missing: int = 0) -> None:
        counts = self.counts[decoder]
        before = counts.get(source, NONE_EXPECTED)
        counts[source] = ExpectedPrompts(before.found + found, before.missing + missing)
        self.measure(decoder, expected=dict(counts))

    def are_apart(self, decoder: str, source: str) -> None:
        self.count_for(decoder, source, missing=APART_AFTER)

    @property
    def prompts(self) -> Mapping[PromptPath, int]:
        return +self.controller.state.counts.prompts

    def finish(self, name: str) -> None:
        place = self.place(name)
        self.began(name)
        self.decoded(name, place)


def test_decode_says_who_has_saved_the_prompt_if_the_engine_counts_it() -> None:
    """An engine of an earlier release would not read a request's options that it does not know."""
    steps = Told("p", "d")
    steps.ask("r")
    steps.prefilled("r", "p", saved=992)
    steps.measure("d")
    steps.ask("s")
    steps.prefilled("s", "p", saved=992)
    calls = [each for each in steps.history if isinstance(each, Decode)]
    assert [(each.expect_tokens, each.source) for each in calls] == [(992, "p"), (992, None)]


def test_engines_that_share_no_store_hand_nothing_over() -> None:
    steps = Told("p", "d")
    for name in "abc":
        assert steps.ask(name) == [Prefill(name, "p")]
        assert steps.prefilled(name, "p", saved=992) == [Decode(name, "d", 992)]
        steps.finish(name)
        steps.count_for("d", "p", missing=1)
    assert steps.controller.state.collapse() is PromptPath.NO_SHARED_STORE
    for name in "ef":
        [call] = steps.ask(name)
        assert isinstance(call, Decode)
        assert call.expect_tokens == 0, "it waits for nothing"
    assert {steps.place("e"), steps.place("f")} == {"p", "d"}, "both serve"
    assert steps.prompts == {PromptPath.HANDED_OVER: 3, PromptPath.NO_SHARED_STORE: 2}
    assert (steps.count("handovers_found"), steps.count("handovers_missing")) == (0, 3)


def test_prompt_that_is_computed_by_then_is_decoded_where_it_is() -> None:
    steps = Told("p", "d")
    steps.ask("r", prefix=(1, 2, 3), prefix_tokens=256)
    steps.are_apart("d", "p")
    assert steps.prefilled("r", "p", saved=992) == [Decode("r", "p", 992)]


def test_engines_that_share_no_store_are_named() -> None:
    steps = Told("p", "d")
    steps.are_apart("d", "p")
    fleet = steps.controller.state.fleet
    assert health_of(fleet).status == "degraded"
    assert health_of(fleet).mismatches == {"d": "no_shared_store"}
    assert "that p computed" in problems(fleet)[D].why
    steps.count_for("d", "p", found=1)
    assert health_of(fleet).status == "ok"


def test_one_prompt_from_time_to_time_tries_whether_they_share() -> None:
    steps = Told("p", "d")
    steps.are_apart("d", "p")
    steps.tick(FIRST_PAUSE_S - 1)
    [call] = steps.ask("early")
    assert isinstance(call, Decode)
    steps.finish("early")
    steps.tick(1.0)
    assert steps.ask("try") == [Prefill("try", "p")]
    [call] = steps.ask("other")
    assert isinstance(call, Decode)
    assert call.expect_tokens == 0
    assert steps.prefilled("try", "p", saved=992) == [Decode("try", "d", 992)]
    steps.count_for("d", "p", found=1)
    assert steps.controller.state.collapse() is None
    assert steps.ask("again") == [Prefill("again", "p")]


def test_try_that_finds_nothing_is_followed_by_a_longer_pause() -> None:
    steps = Told("p", "d")
    steps.are_apart("d", "p")
    steps.tick(FIRST_PAUSE_S)
    steps.ask("try")
    steps.prefilled("try", "p", saved=992)
    steps.finish("try")
    steps.count_for("d", "p", missing=1)
    steps.tick(2 * FIRST_PAUSE_S - 1)
    [call] = steps.ask("early")
    assert isinstance(call, Decode)
    steps.tick(1.0)
    assert steps.ask("late") == [Prefill("late", "p")]


def test_prompt_is_decoded_within_its_group_of_engines() -> None:
    """Two hosts with a prefill and a decode engine each, and files of their own."""
    steps = Told("p q", "d e")
    for source, decoder in (("p", "e"), ("q", "d")):
        steps.are_apart(decoder, source)
    own = {"p": "d", "q": "e"}
    for number in range(12):
        name = f"r{number}"
        [call] = steps.ask(name)
        assert isinstance(call, Prefill)
        assert steps.prefilled(name, call.replica, saved=992) == [
            Decode(name, own[call.replica], 992)
        ]
    assert steps.prompts == {PromptPath.HANDED_OVER: 12}


def test_prompt_computes_anew_rather_than_wait_long_for_its_group() -> None:
    steps = Told("p", "d e")
    steps.are_apart("e", "p")
    steps.ask("large", 15_000)
    assert steps.prefilled("large", "p", saved=14_848) == [Decode("large", "d", 14_848)]
    steps.ask("r")
    assert steps.prefilled("r", "p", saved=992) == [], "d is full"
    assert steps.tick(MAX_PASSED_S / 2) == []
    assert steps.tick(MAX_PASSED_S) == [Decode("r", "e", 0)]
    assert steps.prompts[PromptPath.NO_SHARED_STORE] == 1


def test_replica_that_no_decoder_shares_with_computes_no_prompts() -> None:
    steps = Told("p q", "d")
    steps.are_apart("d", "q")
    for number in range(6):
        assert steps.ask(f"r{number}") == [Prefill(f"r{number}", "p")]


def test_engine_that_is_started_anew_is_handed_prompts_again() -> None:
    steps = Told("p", "d")
    steps.are_apart("d", "p")
    steps.failed("d")
    steps.tick(2.0)
    steps.loaded("d")
    steps.measure("d", expected={})
    assert steps.ask("r") == [Prefill("r", "p")]


# The whole


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("with_details", [True, False])
def test_engines_without_a_common_store_stop_waiting_for_each_other(
    stream: bool, with_details: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Each prompt was handed over and waited for the whole time, and nothing was said of it."""

    async def main() -> None:
        config = {"front": {"expect_timeout_ms": 1500}}
        spec = replace(FAST, enable_prompt_tokens_details=with_details)
        async with RouterRig(1, 1, spec=spec, config=config, shares=False) as rig:
            waits: list[float] = []
            counts = rig.router.controller.state.counts

            def are_counted(num_prompts: int) -> bool:
                """Return True if each prompt's path is known, and each hand-over's miss."""
                missing = counts.events["handovers_missing"]
                is_known = missing == counts.prompts[PromptPath.HANDED_OVER]
                return is_known and counts.prompts.total() == num_prompts

            for number in range(9):
                body = {"prompt": f"{number} " * 2000, "max_tokens": 4, "stream": stream}
                began = asyncio.get_running_loop().time()
                reply = await rig.complete(body)
                waits.append(asyncio.get_running_loop().time() - began)
                assert reply.status == 200
                await rig.until(partial(are_counted, number + 1), "it is counted")
            slow = [each for each in waits if each >= 1.5]
            assert len(slow) == APART_AFTER, waits
            paths = {PromptPath.HANDED_OVER: 3, PromptPath.NO_SHARED_STORE: 6}
            assert +counts.prompts == paths
            await rig.until(lambda: "file:// on a file system" in caplog.text, "it is logged")
            async with rig.session.get(f"{rig.url}/health") as answer:
                assert (await answer.json())["mismatches"] == {"r1": "no_shared_store"}
            async with rig.session.get(f"{rig.url}/metrics") as answer:
                text = await answer.text()
            assert 'kvpool_router_handovers_total{outcome="missing"} 3.0' in text
            assert 'kvpool_router_prompts_total{path="no_shared_store"} 6.0' in text

    with caplog.at_level(logging.WARNING):
        run(main)
