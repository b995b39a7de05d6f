"""Dependency graphs: examples for each rule, and the cost of an op's end."""

import string
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from tests.support.fakes import FakeClock
from tests.support.invariants import check_graph
from tests.transfer.lines import counted_lines
from vllm_kvpool.transfer.graph import (
    FAIR_EVERY,
    Batch,
    LaneLimits,
    Op,
    OpState,
    Owner,
    Priority,
    Scheduler,
)

LOAD, SAVE, PREFETCH, COPY = Priority
MANY = 1 << 20
WIDE = LaneLimits(batches=MANY, batch_ops=1, batch_bytes=MANY, budget_bytes=MANY)
NARROW = LaneLimits(batches=1, batch_ops=1, batch_bytes=MANY, budget_bytes=MANY)
NAMES = string.ascii_lowercase
LETTERS = {
    OpState.WAITING: ".",
    OpState.READY: "r",
    OpState.RUNNING: "R",
    OpState.DONE: "D",
    OpState.FAILED: "F",
    OpState.CANCELLED: "C",
}


class Bench:
    """A scheduler under test. Ops have names of one letter, markers have upper case letters. A
    batch is the names of its ops."""

    def __init__(
        self, limits: LaneLimits = WIDE, admit: Callable[[Op], bool] | None = None
    ) -> None:
        self.scheduler = Scheduler({"x": limits, "y": WIDE}, {"x": admit} if admit else {})
        self.lane = self.scheduler.lanes["x"]
        self.other = self.scheduler.lanes["y"]
        self.clock = FakeClock()
        self.num_jobs = 0
        self.ops: dict[str, Op] = {}  # the latest op of each name
        self.all_ops: list[Op] = []
        self.running: dict[str, Batch] = {}

    def graph(self, spec: str = "", priority: Priority = LOAD) -> Owner:
        """`"a b<a C!<ab"`: b after a; the marker C after both, however they end. `"a*3"`: a moves
        three cells."""
        owner = Owner(priority, "r", self.num_jobs)
        self.num_jobs += 1
        for word in spec.split():
            head, _, after = word.partition("<")
            size = int(head.partition("*")[2] or 1)
            self.add(owner, head[0], after, always=head.endswith("!"), size=size)
        return owner

    def add(
        self,
        owner: Owner,
        name: str,
        after: str = "",
        nbytes: int = 0,
        *,
        always: bool = False,
        size: int = 1,
    ) -> Op:
        lane = None if name.isupper() else self.lane
        before = [self.ops[each] for each in after]
        op = self.scheduler.add(owner, lane, name, nbytes, before, always=always, size=size)
        self.ops[name] = op
        self.all_ops.append(op)
        check_graph(self.scheduler, self.all_ops)
        return op

    def take(self, seconds: float = 0.0) -> list[str]:
        """Advance the clock, and return the batches that start."""
        self.clock.advance(seconds)
        started = []
        for batch in self.scheduler.take(self.clock()):
            names = "".join(op.what for op in batch.ops)
            self.running[names] = batch
            started.append(names)
        check_graph(self.scheduler, self.all_ops)
        return started

    def end(self, names: str, how: Callable[..., None] = Scheduler.finish, *args: Any) -> None:
        """End a batch, and finish, fail or move all its ops."""
        batch = self.running.pop(names)
        self.scheduler.batch_ended(batch)
        for op in batch.ops:
            how(self.scheduler, op, *args)
        check_graph(self.scheduler, self.all_ops)

    def drain(self, fail: str = "") -> str:
        """Return the markers and batches of each round. All running batches end before the next
        round."""
        rounds = []
        while now := self.reached() + "".join(self.take()):
            rounds.append(now)
            for names in list(self.running):
                self.end(names, Scheduler.fail if names in fail else Scheduler.finish)
        return " ".join(rounds)

    def one_by_one(self) -> str:
        """End the oldest batch again and again. Return the batches that start at first and after
        each end."""
        takes = [",".join(self.take())]
        while self.running:
            self.end(next(iter(self.running)))
            takes.append(",".join(self.take()))
        return " ".join(takes).rstrip()

    def reached(self) -> str:
        return "".join(op.what for op in self.scheduler.take_reached())

    def lost(self) -> dict[str, str]:
        """Return each op that was cancelled because of another op, with that op."""
        lost = self.scheduler.take_lost()
        assert len({op for op, _ in lost}) == len(lost)
        return {op.what: cause.what for op, cause in lost}

    def states(self) -> str:
        """Return a letter for the state of each op, in order of addition."""
        return "".join(LETTERS[op.state] for op in self.ops.values())


# Dependencies and markers


@pytest.mark.parametrize(
    ("how", "always", "expected"),
    [
        (Scheduler.finish, False, OpState.DONE),
        (Scheduler.fail, False, OpState.CANCELLED),
        (Scheduler.fail, True, OpState.DONE),
    ],
)
def test_chains_may_be_longer_than_the_call_stack(
    how: Callable[..., None], always: bool, expected: OpState
) -> None:
    bench = Bench()
    owner = bench.graph("a")
    op = bench.ops["a"]
    for _ in range(100_000):
        op = bench.scheduler.add(owner, None, "M", 0, [op], always=always)
        bench.all_ops.append(op)
    bench.take()
    bench.end("a", how)
    markers = bench.all_ops[1:]
    assert {marker.state for marker in markers} == {expected}
    assert bench.scheduler.take_reached() == (markers if expected is OpState.DONE else [])


# Failing, cancelling, moving and trying again


@pytest.mark.parametrize("how", [Scheduler.fail, Scheduler.cancel])
def test_what_is_lost_is_told_once_with_its_cause(how: Callable[..., Any]) -> None:
    bench = Bench()
    owner = bench.graph("a b<a c!<a d<b e x")
    how(bench.scheduler, bench.ops["a"])
    assert bench.lost() == {"b": "a", "d": "a"}
    bench.add(owner, "f", "a")
    bench.add(owner, "g", "ea")
    bench.add(owner, "h", "f")
    assert bench.lost() == {"f": "a", "g": "a", "h": "f"}
    bench.scheduler.cancel(bench.ops["e"])
    bench.scheduler.cancel(bench.ops["x"])
    assert bench.lost() == {}


def test_an_op_that_is_tried_again_goes_behind_those_that_wait() -> None:
    bench = Bench(NARROW)
    bench.graph("a b c<a")
    bench.take()
    bench.end("a", Scheduler.move, bench.lane)
    assert bench.one_by_one() == "b a c"


# Batches, budgets, admission


def test_an_op_that_is_not_admitted_keeps_its_place() -> None:
    refused = set("c")
    asked: list[str] = []

    def admit(op: Op) -> bool:
        asked.append(op.what)
        return op.what not in refused

    bench = Bench(LaneLimits(9, 9, MANY, MANY), admit)
    bench.graph("a b c d")
    assert bench.take() == ["ab"]
    assert bench.take() == []
    refused.clear()
    asked.clear()
    assert bench.take() == ["cd"]
    assert asked == ["c", "d"]


def test_a_batch_has_so_many_cells_at_most_or_one_op() -> None:
    """An op moves all its cells at once. Ops keep their order."""
    bench = Bench(LaneLimits(MANY, batch_ops=4, batch_bytes=MANY, budget_bytes=MANY))
    bench.graph("a*2 b*2 c*3 d*2 e*9 f g*4 h")
    assert bench.lane.num_ready == 24
    assert bench.take() == ["ab", "c", "d", "e", "f", "g", "h"]
    assert bench.lane.num_ready == 0


def test_an_op_of_many_cells_ends_a_batch_of_small_ones() -> None:
    """Small ops behind it do not overtake it, even if they would fit."""
    bench = Bench(LaneLimits(1, batch_ops=4, batch_bytes=MANY, budget_bytes=MANY))
    bench.graph("a b c*3 d")
    assert bench.one_by_one() == "ab cd"


def test_a_class_that_is_not_admitted_lets_others_pass() -> None:
    refused = set("a")
    bench = Bench(NARROW, lambda op: op.what not in refused)
    bench.graph("a b")
    bench.graph("c d", SAVE)
    assert bench.take() == ["c"]
    refused.clear()
    bench.end("c")
    assert bench.one_by_one() == "a b d"


# Priorities


def test_a_higher_class_goes_first_and_a_class_in_order() -> None:
    bench = Bench(NARROW)
    for priority, names in zip((COPY, SAVE, LOAD, PREFETCH), ("ab", "cd", "ef", "gh"), strict=True):
        bench.graph(" ".join(names), priority)
    assert bench.one_by_one() == "e f c d g h a b"


def served(bench: Bench, count: int) -> list[Priority]:
    """Return the priorities of the next batches of one op each."""
    classes = []
    for _ in range(count):
        (batch,) = bench.scheduler.take(0.0)
        (op,) = batch.ops
        classes.append(Priority(op.priority))
        bench.scheduler.batch_ended(batch)
        bench.scheduler.finish(op)
    return classes


def fill(bench: Bench, *classes: Priority, count: int = 200) -> None:
    for priority in classes:
        owner = bench.graph(priority=priority)
        for _ in range(count):
            bench.scheduler.add(owner, bench.lane)


@pytest.mark.parametrize("lower", [SAVE, PREFETCH, COPY])
def test_no_class_waits_for_more_than_so_many_batches(lower: Priority) -> None:
    bench = Bench(NARROW)
    fill(bench, LOAD)
    assert served(bench, 2 * FAIR_EVERY) == [LOAD] * 2 * FAIR_EVERY
    fill(bench, lower)  # ops served before it came do not count
    assert served(bench, 2 * FAIR_EVERY + 2) == 2 * [*[LOAD] * FAIR_EVERY, lower]


def test_no_class_starves_another() -> None:
    bench = Bench(NARROW)
    fill(bench, *Priority)
    order = served(bench, 200)
    for priority in Priority:
        places = [-1, *(i for i, each in enumerate(order) if each is priority)]
        # Ops that are equally late may go first.
        waits = [b - a - 1 for a, b in pairwise(places)]
        assert max(waits) < FAIR_EVERY + len(Priority) - 1
    assert Counter(order)[LOAD] > len(order) / 2


@pytest.mark.parametrize(("large", "small"), [(LOAD, SAVE), (SAVE, LOAD)])
def test_a_large_op_does_not_starve_behind_small_ones(large: Priority, small: Priority) -> None:
    bench = Bench(LaneLimits(batches=2, batch_ops=1, batch_bytes=100, budget_bytes=100))
    owner = bench.graph(priority=small)
    for _ in range(40):
        bench.scheduler.add(owner, bench.lane, "s", 10)
    running = bench.scheduler.take(0.0)
    op = bench.scheduler.add(bench.graph(priority=large), bench.lane, "l", 100)
    for _ in range(20):
        batch = running.pop(0)
        bench.scheduler.batch_ended(batch)
        for each in batch.ops:
            bench.scheduler.finish(each)
        running += bench.scheduler.take(0.0)
    assert op.state is not OpState.READY


def test_an_op_can_be_raised_wherever_it_stands() -> None:
    bench = Bench(NARROW)
    bench.graph("a b c")
    bench.graph("d e f<d g", COPY)
    for name, priority in (("e", SAVE), ("e", LOAD), ("f", LOAD), ("d", LOAD), ("b", COPY)):
        bench.scheduler.raise_priority(bench.ops[name], priority)
    assert bench.one_by_one() == "a b c e d f g"


def test_an_op_that_is_raised_leaves_the_turn_of_its_class_to_others() -> None:
    bench = Bench(NARROW)
    bench.graph("a b", PREFETCH)
    fill(bench, LOAD, count=FAIR_EVERY)
    bench.scheduler.raise_priority(bench.ops["a"], LOAD)
    assert served(bench, FAIR_EVERY + 2) == [*[LOAD] * FAIR_EVERY, PREFETCH, LOAD]


def test_what_waits_in_a_lane_is_listed_in_order() -> None:
    bench = Bench(NARROW)
    bench.graph("f a b c", SAVE)
    bench.graph("d e<d", PREFETCH)
    bench.take()
    bench.end("f", Scheduler.move, bench.lane)
    bench.scheduler.raise_priority(bench.ops["c"], LOAD)
    bench.scheduler.cancel(bench.ops["a"])
    assert [op.what for op in bench.scheduler.waiting_in(bench.lane)] == ["c", "b", "f", "d"]
    bench.scheduler.move(bench.ops["b"], bench.other)
    bench.scheduler.move(bench.ops["f"], bench.other)
    assert [op.what for op in bench.scheduler.waiting_in(bench.lane)] == ["c", "d"]
    assert [op.what for op in bench.scheduler.waiting_in(bench.other)] == ["b", "f"]


def test_an_idle_lane_holds_no_ops() -> None:
    bench = Bench()
    for name in NAMES:
        bench.graph(name, PREFETCH)
        bench.scheduler.raise_priority(bench.ops[name], LOAD)
        assert bench.drain() == name
    assert not any(bench.lane.queues)


# Cost of an end


def cost_of_an_end(bench: Bench, how: Callable[..., None]) -> int:
    """Return the lines that run when one of the running ops ends."""
    scheduler = bench.scheduler
    batches = scheduler.take(0.0)
    batch = batches[len(batches) // 2]
    with counted_lines() as count:
        scheduler.batch_ended(batch)
        how(scheduler, batch.ops[0])
        scheduler.take(1.0)
        scheduler.take_reached()
    return count[0]


def wide(num_ops: int) -> Bench:
    """Return a bench with running ops, a waiting op after each of them, and a marker after all."""
    bench = Bench()
    scheduler = bench.scheduler
    owner = bench.graph()
    lasts = []
    for _ in range(num_ops // 2):
        first = scheduler.add(owner, bench.lane)
        lasts.append(scheduler.add(owner, bench.lane, after=[first]))
    scheduler.add(owner, None, after=lasts)
    return bench


def many(num_jobs: int) -> Bench:
    """Return a bench with many graphs, each a chain of three ops."""
    bench = Bench()
    for _ in range(num_jobs):
        owner = bench.graph()
        op = bench.scheduler.add(owner, bench.lane)
        for _ in range(2):
            op = bench.scheduler.add(owner, bench.lane, after=[op])
    return bench


@pytest.mark.parametrize("how", [Scheduler.finish, Scheduler.fail])
@pytest.mark.parametrize(("make", "few", "lots"), [(wide, 64, 4096), (many, 1, 2048)])
def test_an_end_costs_the_same_in_any_company(
    make: Callable[[int], Bench], few: int, lots: int, how: Callable[..., None]
) -> None:
    alone = cost_of_an_end(make(few), how)
    assert alone > 20  # otherwise the count is broken
    # The cost may depend on whether the op was its graph's last.
    assert abs(cost_of_an_end(make(lots), how) - alone) <= 4


def test_an_end_costs_its_successors() -> None:
    costs = []
    for fan_out in (2, 12, 22):
        bench = Bench(NARROW)
        bench.graph("a " + " ".join(f"{name}<a" for name in NAMES[1 : 1 + fan_out]))
        costs.append(cost_of_an_end(bench, Scheduler.finish))
    assert costs[1] - costs[0] == costs[2] - costs[1] > 0
