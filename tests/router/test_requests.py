"""The phases of a request; a queue of requests, and their deadlines, against plain lists."""

from itertools import product

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.support.router_invariants import check_deadlines, check_queue
from tests.support.router_steps import ask
from vllm_kvpool.router.control.requests import (
    ENDS,
    NEXT_PHASES,
    Deadlines,
    IllegalPhaseChange,
    Phase,
    Request,
    RequestId,
    RequestQueue,
)
from vllm_kvpool.router.control.states import ReplicaId

MODELS = ["", "m", "n"]
SOURCES = [ReplicaId("a"), ReplicaId("b"), None]
IDS = [RequestId(f"r{number}") for number in range(8)]


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


class Queue(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.queue = RequestQueue()
        self.model: list[Request] = []
        self.gone: list[Request] = []
        self.number = 0

    @rule(
        tokens=st.integers(1, 5000),
        priority=st.integers(-1, 1),
        model=st.sampled_from(MODELS),
        source=st.sampled_from(SOURCES),
    )
    def arrive(self, tokens: int, priority: int, model: str, source: ReplicaId | None) -> None:
        self.number += 1
        made = ask(f"r{self.number}", tokens, priority=priority, model=model)
        request = Request(made, 0.0, self.number, source=source)
        self.queue.append(request)
        self.model.append(request)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.model))
        assert self.queue.remove(request.ask.request_id)
        assert not self.queue.remove(request.ask.request_id)
        self.model.remove(request)
        self.gone.append(request)

    @precondition(lambda self: self.gone)
    @rule(data=st.data())
    def come_back(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.gone))
        self.gone.remove(request)
        self.queue.append(request)
        self.model.append(request)

    @invariant()
    def agrees(self) -> None:
        queue = self.queue
        check_queue(queue)
        ready = sorted(self.model, key=lambda each: each.order)
        assert queue.first() == ready
        of_models = ([each for each in ready if each.ask.model == model] for model in MODELS)
        firsts = [each for found in of_models for each in found[:2]]
        assert queue.first(2) == sorted(firsts, key=lambda each: each.order)
        for without in ((), MODELS[:1], MODELS):
            heads = [each for each in ready if each.ask.model not in without]
            assert queue.head(without) is (heads[0] if heads else None)
        assert len(queue) == len(self.model)
        assert queue.tokens == sum(each.ask.prompt_tokens for each in self.model)
        assert all(each.ask.request_id in queue for each in self.model)
        assert all(each.ask.request_id not in queue for each in self.gone)
        for source in SOURCES[:2]:
            assert queue.has_from(source) == any(each.source == source for each in self.model)


TestQueue = Queue.TestCase
TestQueue.settings = settings(stateful_step_count=40)


class Waits(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.deadlines = Deadlines()
        self.model: dict[RequestId, float] = {}

    @rule(request_id=st.sampled_from(IDS), at=st.sampled_from([*range(20), float("inf")]))
    def wait(self, request_id: RequestId, at: float) -> None:
        self.deadlines.set(request_id, at)
        self.model.pop(request_id, None)
        if at < float("inf"):
            self.model[request_id] = at

    @rule(request_id=st.sampled_from(IDS))
    def go_on(self, request_id: RequestId) -> None:
        self.deadlines.clear(request_id)
        self.model.pop(request_id, None)

    @rule(now=st.integers(0, 20))
    def pass_by(self, now: int) -> None:
        late = {key for key, at in self.model.items() if at <= now}
        taken = list(self.deadlines.take(now))
        assert set(taken) == late
        assert len(taken) == len(late)
        assert [self.model[key] for key in taken] == sorted(self.model[key] for key in taken)
        self.model = {key: at for key, at in self.model.items() if key not in late}

    @invariant()
    def agrees(self) -> None:
        check_deadlines(self.deadlines)
        assert len(self.deadlines) == len(self.model)
        assert [key for key in IDS if key in self.deadlines] == [k for k in IDS if k in self.model]
        assert self.deadlines.next() == min(self.model.values(), default=float("inf"))


TestWaits = Waits.TestCase
TestWaits.settings = settings(stateful_step_count=40)
