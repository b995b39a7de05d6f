"""The admission queue, and the size of grants."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.embeds.world import shape_of
from vllm_kvpool.embeds.machines import window
from vllm_kvpool.embeds.machines.admission import AdmissionQueue, ItemAdmission
from vllm_kvpool.embeds.machines.items import NOT_REQUESTED, Item
from vllm_kvpool.embeds.protocol.messages import Offer

producers = st.sampled_from(["p0", "p1", "p2", "p3"])


@given(st.lists(st.tuples(st.integers(0, 9), producers), max_size=30))
def test_requests_are_served_in_their_order(arrivals: list[tuple[int, str]]) -> None:
    line = AdmissionQueue()
    for number, (order, producer) in enumerate(arrivals):
        line.add(f"i{number}", producer, order)
    expected = [
        f"i{number}" for number, _ in sorted(enumerate(arrivals), key=lambda e: (e[1][0], e[0]))
    ]
    served = []
    while (mm_hash := line.first_requested()) is not None:
        served.append(mm_hash)
        line.remove(mm_hash)
    assert served == expected
    assert not len(line)


@given(st.lists(producers, min_size=1, max_size=60))
def test_producers_take_turns(arrivals: list[str]) -> None:
    """While two have something to send, neither is more than one item ahead of the other."""
    line = AdmissionQueue()
    sent: dict[str, list[str]] = {}
    for number, producer in enumerate(arrivals):
        line.add(f"i{number}", producer, NOT_REQUESTED)
        sent.setdefault(producer, []).append(f"i{number}")
    served: Counter[str] = Counter()
    left = {producer: len(items) for producer, items in sent.items()}
    while any(left.values()):
        mm_hash = next(line.unrequested())
        producer = arrivals[int(mm_hash[1:])]
        assert mm_hash == sent[producer][served[producer]], "not in the producer's own order"
        line.remove(mm_hash)
        line.move_to_end(producer)
        served[producer] += 1
        left[producer] -= 1
        waiting = [each for each, count in left.items() if count]
        for each in waiting:
            assert max(served.values()) - served[each] <= 1
    assert list(line.unrequested()) == []


class LineMachine(RuleBasedStateMachine):
    """A line beside a plain list of who waits."""

    @initialize()
    def open(self) -> None:
        self.line = AdmissionQueue()
        self.waiting: dict[str, tuple[int, int]] = {}  # item -> order, number of its arrival
        self.producer: dict[str, str] = {}
        self.number = 0

    @rule(item=st.integers(0, 6), producer=producers, order=st.integers(-1, 3))
    def add(self, item: int, producer: str, order: int) -> None:
        mm_hash = f"i{item}"
        self.line.add(mm_hash, producer, order)
        if self.waiting.get(mm_hash, (None,))[0] != order:
            self.number += 1
            self.waiting[mm_hash] = (order, self.number)
            self.producer[mm_hash] = producer

    @rule(item=st.integers(0, 6))
    def remove(self, item: int) -> None:
        self.line.remove(f"i{item}")
        self.waiting.pop(f"i{item}", None)

    @precondition(lambda self: self.waiting)
    @rule()
    def serve(self) -> None:
        """Admit the first requested item, else an item of the next producer in turn."""
        mm_hash = self.line.first_requested() or next(self.line.unrequested())
        self.line.remove(mm_hash)
        order, _ = self.waiting.pop(mm_hash)
        if order == NOT_REQUESTED:
            self.line.move_to_end(self.producer[mm_hash])

    @invariant()
    def it_says_who_waits(self) -> None:
        assert len(self.line) == len(self.waiting)
        assert all(f"i{item}" in self.line for item in range(7) if f"i{item}" in self.waiting)
        requested = {name: at for name, at in self.waiting.items() if at[0] != NOT_REQUESTED}
        first = self.line.first_requested()
        assert (first is None) == (not requested)
        if first is not None:
            assert requested[first][0] == min(order for order, _ in requested.values())
        unrequested = set(self.waiting) - set(requested)
        heads = list(self.line.unrequested())
        assert len(heads) == len(set(heads))
        assert set(heads) <= unrequested
        assert bool(heads) == bool(unrequested), "somebody is never served"


TestLine = LineMachine.TestCase
TestLine.settings = settings(stateful_step_count=40)


@given(st.integers(1, 1 << 40), st.integers(0, 1000))
def test_windows_share_the_arena(arena: int, active: int) -> None:
    share = window.window_bytes(arena, active)
    parts = window.WINDOWS_IN_FLIGHT * max(1, min(active, window.MOST_SHARES))
    assert share * parts <= arena
    assert share == window.MOST_WINDOW_BYTES or arena < (share + 1) * parts


@given(st.integers(1, 1000), st.integers(1, 1000))
def test_progress_is_never_refused(got: int, wanted: int) -> None:
    arena = 1000
    assert window.is_worth_it(got, wanted, arena, True)
    worth = window.is_worth_it(got, wanted, arena, False)
    assert worth == (got >= wanted or got >= arena / window.SMALLEST_SHARE)


@pytest.mark.parametrize("later", [0, 3])
def test_a_request_for_an_item_that_waits_moves_it(later: int) -> None:
    line = AdmissionQueue()
    line.add("pushed", "p0", NOT_REQUESTED)
    line.add("other", "p1", 5)
    line.add("pushed", "p0", later)
    assert line.first_requested() == "pushed"
    assert list(line.unrequested()) == []


class CountedItems(dict[str, Item]):
    """Items, and how often one was looked at."""

    looks = 0

    def __getitem__(self, mm_hash: str) -> Item:
        self.looks += 1
        return super().__getitem__(mm_hash)


def test_a_turn_in_which_nothing_has_changed_looks_at_no_item_that_waits() -> None:
    """There is one for each producer: turns would cost as much as there are producers."""
    items, shape = CountedItems(), shape_of(4)
    admission = ItemAdmission(items, 2 * shape.nbytes)
    for number in range(20):
        name, ref = f"i{number}", (f"p{number}", 1)
        items[name] = Item(name, 0.0, shape=shape, offers={ref: Offer(1, name, shape, "digest")})
        admission.wait(items[name])
    (first,) = admission.admit(0.0)
    items.looks = 0
    assert [*admission.admit(1.0)] == []
    assert items.looks == 0
    admission.deactivate(first)
    admission.release_memory(first)
    (second,) = admission.admit(2.0)
    assert (first.mm_hash, second.mm_hash) == ("i0", "i1")
    admission.request(second, 1)
    assert [each.mm_hash for each in admission.admit(3.0)] == ["i2"], "its half is free again"
