"""The queue between prefill and decode against a plain list."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.support.router_steps import ask
from vllm_kvpool.router.control.requests import MigrationQueue, Request
from vllm_kvpool.router.control.states import ReplicaId

SOURCES = [ReplicaId("a"), ReplicaId("b"), None]


class Migration(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.queue = MigrationQueue()
        self.model: list[Request] = []
        self.number = 0

    @rule(priority=st.integers(-1, 1), source=st.sampled_from(SOURCES))
    def append(self, priority: int, source: ReplicaId | None) -> None:
        self.number += 1
        made = ask(f"r{self.number}", 1000, priority=priority)
        request = Request(made, 0.0, self.number, source=source)
        self.queue.append(request)
        self.model.append(request)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.model))
        assert self.queue.remove(request.ask.request_id)
        assert not self.queue.remove(request.ask.request_id)
        self.model.remove(request)

    @invariant()
    def agrees(self) -> None:
        self.queue.check()
        ready = sorted(self.model, key=lambda each: each.order)
        assert list(self.queue.ready()) == ready
        assert list(self.queue.ready(2)) == ready[:2]
        assert len(self.queue) == len(self.model)
        assert self.queue.tokens == 1000 * len(self.model)
        for source in SOURCES:
            assert self.queue.num_from(source) == sum(e.source == source for e in self.model)


TestMigration = Migration.TestCase
TestMigration.settings = settings(stateful_step_count=40)
