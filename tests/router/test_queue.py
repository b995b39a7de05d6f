"""The queue of prompts against a plain list."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.support.router_steps import ask
from vllm_kvpool.router.control.requests import SLACK, PromptQueue, Request


class Queue(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.queue = PromptQueue()
        self.model: list[Request] = []
        self.gone: list[Request] = []
        self.number = 0

    @rule(tokens=st.integers(1, 5000), priority=st.integers(-1, 1))
    def arrive(self, tokens: int, priority: int) -> None:
        self.number += 1
        request = Request(ask(f"r{self.number}", tokens, priority=priority), 0.0, self.number)
        self.queue.append(request)
        self.model.append(request)

    @precondition(lambda self: self.model)
    @rule()
    def take(self) -> None:
        head = self.queue.head()
        assert head is min(self.model, key=lambda each: each.order)
        self.leave(head)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.leave(data.draw(st.sampled_from(self.model)))

    @precondition(lambda self: self.gone)
    @rule(data=st.data())
    def come_back(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.gone))
        self.gone.remove(request)
        self.queue.append(request)
        self.model.append(request)

    def leave(self, request: Request) -> None:
        assert self.queue.remove(request.ask.request_id) is request
        assert self.queue.remove(request.ask.request_id) is None
        self.model.remove(request)
        self.gone.append(request)

    @invariant()
    def agrees(self) -> None:
        self.queue.check()
        assert len(self.queue) == len(self.model)
        assert self.queue.tokens == sum(each.ask.prompt_tokens for each in self.model)
        assert all(each.ask.request_id in self.queue for each in self.model)
        assert all(each.ask.request_id not in self.queue for each in self.gone)
        if not self.model:
            assert self.queue.head() is None


TestQueue = Queue.TestCase
TestQueue.settings = settings(stateful_step_count=40)


def test_what_leaves_behind_a_head_that_stays_is_not_kept() -> None:
    queue = PromptQueue()
    queue.append(Request(ask("head"), 0.0, 0))
    for number in range(1, 10 * SLACK):
        request = Request(ask(f"r{number}"), 0.0, number)
        queue.append(request)
        queue.remove(request.ask.request_id)
        queue.check()
    assert len(queue) == 1
