"""A queue of requests against plain lists."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.support.router_invariants import check_queue
from tests.support.router_steps import ask
from vllm_kvpool.router.control.requests import Request, RequestQueue
from vllm_kvpool.router.control.states import ReplicaId

MODELS = ["", "m", "n"]
SOURCES = [ReplicaId("a"), ReplicaId("b"), None]


def test_priority_goes_before_arrival() -> None:
    first, second = Request(ask("a"), 0.0, 1, 9), Request(ask("b", priority=-1), 0.0, 2, 9)
    third = Request(ask("c"), 0.0, 3, 9)
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
        request = Request(made, 0.0, self.number, tokens, source=source)
        self.queue.append(request)
        self.model.append(request)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.model))
        self.queue.remove(request)
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
        assert bool(queue) == bool(self.model)
        assert sorted(queue, key=lambda each: each.order) == ready


TestQueue = Queue.TestCase
TestQueue.settings = settings(stateful_step_count=40)
