"""Engines that share no store: how the router notices, what it stops, and when it tries again."""

import asyncio
import logging
from dataclasses import replace
from functools import partial

import pytest

from tests.router.scripts import Example, examples
from tests.support.router_rig import FAST, RouterRig
from tests.support.router_steps import Steps
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
        self.handovers.measured(D, dict(self.counts), KNOWN, lambda source: True, now)

    @property
    def is_apart(self) -> bool:
        assert self.handovers.is_any_apart == bool(list(self.handovers.apart()))
        return self.handovers.is_apart(P, D)


def _measured(handovers: Handovers, counts: ExpectedPrompts) -> ExpectedPrompts:
    return handovers.measured(D, {"p": counts}, KNOWN, lambda source: True, 0.0)


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
    assert _measured(handovers, ExpectedPrompts(missing=9)) == NONE_EXPECTED
    assert not handovers.is_any_apart
    assert _measured(handovers, ExpectedPrompts(missing=10)) == ExpectedPrompts(missing=1)


def test_counts_of_an_engine_that_was_started_anew_begin_again() -> None:
    pairs = Pairs()
    pairs.tell(found=10)
    assert _measured(pairs.handovers, ExpectedPrompts(0, 3)) == ExpectedPrompts(0, 3)
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


@examples(
    f"""
decode names the replica that has saved the prompt if the engine counts it
    # An engine of an earlier release would not read a request's options that it does not know.
    counted p / d; ask r; prefilled r p saved=992; measure d; ask s; prefilled s p saved=992
    assert [(x.expect_tokens, x.source) for x in decodes] == [(992, 'p'), (992, None)]
engines that share no store hand nothing over
    counted p / d
    each 1 2 3: ask r$ -> prefill r$ p; prefilled r$ p saved=992 -> decode r$ d 992; began r$
        ; decoded r$ d; measure d expected p 0 $
    assert state.collapse().value == 'no_shared_store'
    # Both serve, and wait for nothing.
    ask e -> decode e d; ask f -> decode f p; paths handed_over=3 no_shared_store=2
    count handovers_found 0; count handovers_missing 3
prompt that is computed by then is decoded where it is
    counted p / d; ask r prefix=1,2,3 prefix_tokens=256; measure d expected p 0 {APART_AFTER}
    prefilled r p saved=992 -> decode r p 992
prompt from time to time tries whether engines share a store
    counted p / d; measure d expected p 0 {APART_AFTER}; tick {FIRST_PAUSE_S - 1}
    ask early -> decode early d; began early; decoded early d; tick 1; ask try -> prefill try p
    ask other -> decode other d; prefilled try p saved=992 -> decode try d 992
    measure d expected p 1 {APART_AFTER}; assert state.collapse() is None
    ask again -> prefill again p
try that finds nothing is followed by a longer pause
    counted p / d; measure d expected p 0 {APART_AFTER}; tick {FIRST_PAUSE_S}; ask try
    prefilled try p saved=992; began try; decoded try d; measure d expected p 0 {APART_AFTER + 1}
    tick {2 * FIRST_PAUSE_S - 1}; ask early -> decode early d; tick 1; ask late -> prefill late p
prompt is decoded within its group of engines
    # Two hosts with a prefill and a decode engine each, and files of their own.
    counted p q / d e; measure e expected p 0 {APART_AFTER}; measure d expected q 0 {APART_AFTER}
    each 0-5: ask a$ -> prefill a$ p; prefilled a$ p saved=992 -> decode a$ d 992
        ; ask b$ -> prefill b$ p; prefilled b$ p saved=992 -> decode b$ d 992
    paths handed_over=12
prompt is computed anew rather than wait long for its group
    counted p / d e; measure e expected p 0 {APART_AFTER}
    ask large 15000; prefilled large p saved=14848 -> decode large d 14848
    # d is full.
    ask r; prefilled r p saved=992 -> nothing; tick {MAX_PASSED_S / 2} -> nothing
    tick {MAX_PASSED_S} -> decode r e; paths handed_over=1 no_shared_store=1
replica that no decoder shares with computes no prompts
    counted p q / d; measure d expected q 0 {APART_AFTER}
    each 0-5: ask r$ -> prefill r$ p
prompts of an engine that has died do not tell that its store is another one
    counted p / d; failed p; measure d expected p 0 {APART_AFTER}; tick 2; loaded p
    count handovers_missing {APART_AFTER}; ask r -> prefill r p
engine that is started anew is handed prompts again
    counted p / d; measure d expected p 0 {APART_AFTER}; failed d; tick 2; loaded d
    measure d expected; ask r -> prefill r p
""",
    given="ttft_target_s=1000",
)
def test_engines_that_may_share_no_store(example: Example) -> None:
    example.play()


def test_engines_that_share_no_store_are_named() -> None:
    steps = Steps()
    steps.fleet(prefill="p", decode="d")
    for counts in ((0, 0), (0, APART_AFTER)):
        steps.measure("d", expected={"p": ExpectedPrompts(*counts)})
    fleet = steps.controller.state.fleet
    assert health_of(fleet).status == "degraded"
    assert health_of(fleet).mismatches == {"d": "no_shared_store"}
    assert "that p computed" in problems(fleet)[D].why
    steps.measure("d", expected={"p": ExpectedPrompts(1, APART_AFTER)})
    assert health_of(fleet).status == "ok"


# The whole


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("with_details", [True, False])
async def test_engines_without_a_common_store_stop_waiting_for_each_other(
    stream: bool, with_details: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Each prompt was handed over and waited for the whole time, and nothing was said of it."""
    caplog.set_level(logging.WARNING)
    spec = replace(FAST, enable_prompt_tokens_details=with_details)
    async with RouterRig(1, 1, spec=spec, front={"expect_timeout_ms": 1500}, shares=False) as rig:
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
        health = (await rig.ask("GET", "/health")).json
        assert health["mismatches"] == {"r1": "no_shared_store"}
        text = (await rig.ask("GET", "/metrics")).body.decode()
        assert 'kvpool_router_handovers_total{outcome="missing"} 3.0' in text
        assert 'kvpool_router_prompts_total{path="no_shared_store"} 6.0' in text
