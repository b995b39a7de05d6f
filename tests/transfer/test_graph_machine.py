"""The scheduler of dependency graphs beside a naive model, with calls in any order."""

from collections import Counter
from dataclasses import dataclass

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.support.fakes import FakeClock
from tests.support.invariants import check_graph
from vllm_kvpool.transfer.graph import (
    Batch,
    Lane,
    LaneLimits,
    Op,
    OpState,
    Owner,
    Priority,
    Scheduler,
)

OVER = (OpState.DONE, OpState.FAILED, OpState.CANCELLED)
LOST = (OpState.FAILED, OpState.CANCELLED)
NOT_STARTED = (OpState.WAITING, OpState.READY)


@dataclass
class Known:
    """An op of the naive model, which has no counters and examines everything again."""

    lane: Lane | None
    before: frozenset[int]
    always: bool
    state: OpState = OpState.WAITING


class SchedulerMachine(RuleBasedStateMachine):
    """The scheduler beside the model: equal states after each step, and each end reported once."""

    @initialize(
        limits=st.builds(
            LaneLimits, st.integers(1, 3), st.integers(1, 3), st.integers(1, 8), st.integers(1, 9)
        )
    )
    def begin(self, limits: LaneLimits) -> None:
        self.refused: set[int] = set()
        self.scheduler = Scheduler(
            {"x": limits, "y": LaneLimits(2, 2, 9, 9)},
            dict.fromkeys("xy", lambda op: op.what not in self.refused),
        )
        self.lanes = (*self.scheduler.lanes.values(), None)
        self.clock = FakeClock()
        self.known: list[Known] = []
        self.ops: list[Op] = []
        self.running: list[Batch] = []
        self.reached: set[int] = set()
        self.lost: set[int] = set()

    # Building

    @rule(
        specs=st.lists(
            st.tuples(
                st.sampled_from(Priority),
                st.sampled_from((0, 0, 1, 2)),
                st.integers(0, 12),
                st.lists(st.integers(0, 99), max_size=3),
                st.booleans(),
                st.integers(1, 4),
            ),
            min_size=1,
            max_size=6,
        )
    )
    def add_ops(self, specs: list[tuple[Priority, int, int, list[int], bool, int]]) -> None:
        for priority, where, nbytes, befores, always, size in specs:
            owner, lane = Owner(priority), self.lanes[where]
            before = [each % len(self.ops) for each in befores if self.ops]
            first = [self.ops[each] for each in before]
            op = self.scheduler.add(
                *(owner, lane, len(self.ops), nbytes, first), always=always, size=size
            )
            self.ops.append(op)
            self.known.append(Known(lane, frozenset(before), always))

    # Running

    @rule(seconds=st.sampled_from((0.0, 0.5, 2.0)), refused=st.sets(st.integers(0, 20)))
    def take(self, seconds: float, refused: set[int]) -> None:
        self.refused = refused
        self.clock.advance(seconds)
        for batch in self.scheduler.take(self.clock()):
            self.started(batch)
        for lane in self.scheduler.lanes.values():
            self.nothing_more_may_start(lane)

    def started(self, batch: Batch) -> None:
        lane = self.scheduler.lanes[batch.lane]
        limits = lane.limits
        sizes = [op.nbytes for op in batch.ops]
        assert len({op.priority for op in batch.ops}) == 1
        assert len(batch.ops) == 1 or sum(op.size for op in batch.ops) <= limits.batch_ops
        assert batch.ops
        assert sum(sizes[:-1]) < limits.batch_bytes
        assert batch.nbytes == sum(sizes)
        for op in batch.ops:
            known = self.known[op.what]
            assert (known.state, known.lane) == (OpState.READY, lane)
            assert op.what not in self.refused
            known.state = OpState.RUNNING
        self.running.append(batch)
        beside = [each for each in self.running if each.lane == lane.key]
        assert len(beside) <= limits.batches
        total = sum(each.nbytes for each in beside)
        assert total <= limits.budget_bytes or (len(beside), len(batch.ops)) == (1, 1)

    def nothing_more_may_start(self, lane: Lane) -> None:
        beside = [each for each in self.running if each.lane == lane.key]
        if len(beside) < lane.limits.batches:
            room = lane.limits.budget_bytes - sum(each.nbytes for each in beside)
            heads = {op.priority: op for op in reversed(self.ready_in(lane))}
            blocked = [
                op.what in self.refused or (bool(beside) and op.nbytes > room)
                for op in heads.values()
            ]
            assert not heads or any(blocked)

    def ready_in(self, lane: Lane) -> list[Op]:
        return self.scheduler.waiting_in(lane)

    @precondition(lambda self: self.running)
    @rule(
        number=st.integers(0, 9),
        hows=st.lists(st.sampled_from("ffffxmn"), min_size=3, max_size=3),
        lane=st.sampled_from((0, 1)),
    )
    def end(self, number: int, hows: list[str], lane: int) -> None:
        batch = self.running.pop(number % len(self.running))
        self.scheduler.batch_ended(batch)
        for how, op in zip(hows, batch.ops, strict=False):
            self.op_ended(op, how, self.lanes[lane])

    def op_ended(self, op: Op, how: str, lane: Lane | None) -> None:
        known = self.known[op.what]
        match how:
            case "f":
                self.scheduler.finish(op)
                known.state = OpState.DONE
            case "x":
                self.scheduler.fail(op)
                known.state = OpState.FAILED
            case _:
                assert lane is not None
                if how == "n":  # some of its cells have arrived: it moves the others
                    op.size, op.nbytes = max(1, op.size - 1), op.nbytes // 2
                self.scheduler.move(op, lane)
                known.state, known.lane = OpState.READY, lane
        self.settle()

    @precondition(lambda self: self.ops)
    @rule(number=st.integers(0, 99))
    def cancel(self, number: int) -> None:
        known = self.known[number % len(self.known)]
        possible = known.state in NOT_STARTED
        assert self.scheduler.cancel(self.ops[number % len(self.ops)]) == possible
        if possible:
            known.state = OpState.CANCELLED

    @precondition(lambda self: self.ops)
    @rule(number=st.integers(0, 99), lane=st.sampled_from((None, 0, 1)))
    def end_early(self, number: int, lane: int | None) -> None:
        """Fail an op that has not started, or move it to another lane."""
        op = self.ops[number % len(self.ops)]
        if lane is None and op.state in NOT_STARTED:
            self.op_ended(op, "x", None)
        elif op.state is OpState.READY:
            self.op_ended(op, "m", self.lanes[lane or 0])

    @precondition(lambda self: self.ops)
    @rule(number=st.integers(0, 99), priority=st.sampled_from(Priority))
    def raise_priority(self, number: int, priority: Priority) -> None:
        op = self.ops[number % len(self.ops)]
        before, movable = op.priority, op.state in {*NOT_STARTED, OpState.RUNNING}
        self.scheduler.raise_priority(op, priority)
        assert op.priority == (min(before, priority) if movable else before)

    # The model

    def settle(self) -> None:
        """Update all ops until nothing changes."""
        changed = True
        while changed:
            changed = False
            for i, known in enumerate(self.known):
                if known.state is not OpState.WAITING:
                    continue
                before = [self.known[number].state for number in known.before]
                if not known.always and any(state in LOST for state in before):
                    known.state = OpState.CANCELLED
                    self.lost.add(i)
                elif all(state in OVER for state in before):
                    known.state = OpState.DONE if known.lane is None else OpState.READY
                changed |= known.state is not OpState.WAITING

    @invariant()
    def agrees(self) -> None:
        self.settle()
        check_graph(self.scheduler, self.ops)
        assert [op.state for op in self.ops] == [known.state for known in self.known]
        for lane in self.scheduler.lanes.values():
            ready = {
                number
                for number, known in enumerate(self.known)
                if known.state is OpState.READY and known.lane is lane
            }
            waiting = self.ready_in(lane)
            assert Counter(op.what for op in waiting) == Counter(ready)
            assert [op.priority for op in waiting] == sorted(op.priority for op in waiting)
            assert lane.num_ready == sum(op.size for op in waiting)
        self.events_agree()

    def events_agree(self) -> None:
        """Assert that each reached marker and each lost op is reported exactly once."""
        reached = {
            number
            for number, known in enumerate(self.known)
            if known.lane is None and known.state is OpState.DONE
        }
        for op in self.scheduler.take_reached():
            assert {n for n in self.known[op.what].before if n in reached} <= self.reached
            assert op.what not in self.reached
            self.reached.add(op.what)
        assert self.reached == reached
        lost = self.scheduler.take_lost()
        assert Counter(op.what for op, _ in lost) == Counter(self.lost)
        assert all(self.known[cause.what].state in LOST for _, cause in lost)
        self.lost = set()

    def teardown(self) -> None:
        """End all ops, and assert that nothing is left."""
        if not hasattr(self, "scheduler"):
            return
        self.agrees()
        for _ in range(3 * len(self.ops) + 1):
            self.take(0.0, set())
            while self.running:
                self.end(0, ["f"] * 3, 0)
            self.agrees()
        assert all(known.state in OVER for known in self.known)


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    stateful_step_count=30, phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink)
)
