"""The queue between prefill and decode against a plain list."""

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.support.router_steps import ask
from vllm_kvpool.router.control.requests import MigrationQueue, Request
from vllm_kvpool.router.control.states import ReplicaId

SOURCES = [ReplicaId("a"), ReplicaId("b"), None]


@dataclass
class Entry:
    request: Request
    source: ReplicaId | None


class Migration(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.queue = MigrationQueue()
        self.model: list[Entry] = []
        self.number = 0

    def request(self, priority: int) -> Request:
        self.number += 1
        return Request(ask(f"r{self.number}", 1000, priority=priority), 0.0, self.number)

    @rule(priority=st.integers(-1, 1), source=st.sampled_from(SOURCES))
    def append(self, priority: int, source: ReplicaId | None) -> None:
        request = self.request(priority)
        self.queue.append(request, source)
        self.model.append(Entry(request, source))

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(self.model))
        assert self.queue.remove(entry.request.ask.request_id)
        assert not self.queue.remove(entry.request.ask.request_id)
        self.model.remove(entry)

    @invariant()
    def agrees(self) -> None:
        self.queue.check()
        ready = sorted(self.model, key=lambda each: each.request.order)
        assert self.queue.ready() == [each.request for each in ready]
        assert self.queue.ready(2) == [each.request for each in ready][:2]
        assert len(self.queue) == len(self.model)
        assert self.queue.tokens == 1000 * len(self.model)
        for source in SOURCES[:2]:
            assert source is not None
            own = [each.request for each in ready if each.source == source]
            assert list(self.queue.flush(source)) == own
            assert self.queue.num_from(source) == sum(e.source == source for e in self.model)


TestMigration = Migration.TestCase
TestMigration.settings = settings(stateful_step_count=40)
