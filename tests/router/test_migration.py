"""The queue between prefill and decode against a plain list."""

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.support.router_steps import ask
from vllm_kvpool.router.migration import MigrationQueue
from vllm_kvpool.router.requests import Request
from vllm_kvpool.router.states import ReplicaId

SOURCES = [ReplicaId("a"), ReplicaId("b"), None]


@dataclass
class Entry:
    request: Request
    source: ReplicaId | None
    tokens: int
    is_ready: bool


class Migration(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.queue = MigrationQueue()
        self.model: list[Entry] = []
        self.number = 0

    def request(self, priority: int) -> Request:
        self.number += 1
        made = Request(ask(f"r{self.number}", 1000, priority=priority), 0.0, self.number)
        made.split_at = 512
        return made

    @rule(priority=st.integers(-1, 1), source=st.sampled_from(SOURCES))
    def append(self, priority: int, source: ReplicaId | None) -> None:
        request = self.request(priority)
        self.queue.append(request, source)
        self.model.append(Entry(request, source, 1000, is_ready=True))

    @rule(priority=st.integers(-1, 1), source=st.sampled_from(SOURCES[:2]))
    def append_first(self, priority: int, source: ReplicaId) -> None:
        request = self.request(priority)
        self.queue.append_first(request, source)
        self.model.append(Entry(request, source, 512, is_ready=False))

    @precondition(lambda self: any(not each.is_ready for each in self.model))
    @rule(data=st.data(), source=st.sampled_from(SOURCES[:2]))
    def append_second(self, data: st.DataObject, source: ReplicaId) -> None:
        entry = data.draw(st.sampled_from([each for each in self.model if not each.is_ready]))
        self.queue.append_second(entry.request, source)
        entry.source, entry.tokens, entry.is_ready = source, 1000, True

    @precondition(lambda self: any(each.is_ready for each in self.model))
    @rule(data=st.data())
    def consume(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from([each for each in self.model if each.is_ready]))
        assert self.queue.consume(entry.request.ask.request_id) == entry.source
        self.model.remove(entry)

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
        ready = sorted((e for e in self.model if e.is_ready), key=lambda e: e.request.order)
        assert self.queue.ready() == [each.request for each in ready]
        assert self.queue.ready(2) == [each.request for each in ready][:2]
        assert len(self.queue) == len(self.model)
        assert self.queue.tokens == sum(each.tokens for each in self.model)
        for source in SOURCES[:2]:
            assert source is not None
            own = [each.request for each in ready if each.source == source]
            assert list(self.queue.flush(source)) == own
            assert self.queue.num_from(source) == sum(e.source == source for e in self.model)


TestMigration = Migration.TestCase
TestMigration.settings = settings(stateful_step_count=40)


def test_a_first_part_cannot_be_consumed() -> None:
    queue, request = MigrationQueue(), Request(ask("r"), 0.0, 1, split_at=512)
    queue.append_first(request, ReplicaId("a"))
    with pytest.raises(AssertionError):
        queue.consume(request.ask.request_id)
    assert len(queue) == 1
