"""Deadlines of requests that wait."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from vllm_kvpool.router.control.requests import SLACK, Deadlines, RequestId

IDS = [RequestId(f"r{number}") for number in range(8)]
ids = st.sampled_from(IDS)
times = st.sampled_from([*range(20), float("inf")])


class Waits(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.deadlines = Deadlines()
        self.model: dict[RequestId, float] = {}

    @rule(request_id=ids, at=times)
    def wait(self, request_id: RequestId, at: float) -> None:
        self.deadlines.set(request_id, at)
        self.model.pop(request_id, None)
        if at < float("inf"):
            self.model[request_id] = at

    @rule(request_id=ids)
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
        self.deadlines.check()
        assert len(self.deadlines) == len(self.model)
        assert [key for key in IDS if key in self.deadlines] == [k for k in IDS if k in self.model]
        assert self.deadlines.next() == min(self.model.values(), default=float("inf"))


TestWaits = Waits.TestCase
TestWaits.settings = settings(stateful_step_count=40)


def test_nothing_is_kept_of_requests_that_have_no_deadline_or_wait_no_more() -> None:
    deadlines = Deadlines()
    for number in range(10 * SLACK):
        deadlines.set(RequestId(f"never{number}"), float("inf"))
        deadlines.set(RequestId(f"r{number}"), 1e9)
        deadlines.clear(RequestId(f"r{number}"))
        deadlines.check()
    assert len(deadlines) == 0
