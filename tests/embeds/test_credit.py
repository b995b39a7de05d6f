"""Who is let in, in which order, and how much is granted."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from vllm_kvpool.embeds import credit
from vllm_kvpool.embeds.credit import NOT_ASKED, Landing, Line, RecentRows

producers = st.sampled_from(["p0", "p1", "p2", "p3"])


@given(st.lists(st.tuples(st.integers(0, 9), producers), max_size=30))
def test_requests_are_served_in_their_order(arrivals: list[tuple[int, str]]) -> None:
    line = Line()
    for number, (order, producer) in enumerate(arrivals):
        line.add(f"i{number}", producer, order)
    expected = [
        f"i{number}" for number, _ in sorted(enumerate(arrivals), key=lambda e: (e[1][0], e[0]))
    ]
    served = []
    while (mm_hash := line.first_asked()) is not None:
        served.append(mm_hash)
        line.remove(mm_hash)
    assert served == expected
    assert not len(line)


@given(st.lists(producers, min_size=1, max_size=60))
def test_producers_take_turns(arrivals: list[str]) -> None:
    """While two have something to send, neither is more than one item ahead of the other."""
    line = Line()
    sent: dict[str, list[str]] = {}
    for number, producer in enumerate(arrivals):
        line.add(f"i{number}", producer, NOT_ASKED)
        sent.setdefault(producer, []).append(f"i{number}")
    served: Counter[str] = Counter()
    left = {producer: len(items) for producer, items in sent.items()}
    while any(left.values()):
        mm_hash = next(line.unasked())
        producer = arrivals[int(mm_hash[1:])]
        assert mm_hash == sent[producer][served[producer]], "not in the producer's own order"
        line.remove(mm_hash)
        line.took(producer)
        served[producer] += 1
        left[producer] -= 1
        waiting = [each for each, count in left.items() if count]
        for each in waiting:
            assert max(served.values()) - served[each] <= 1
    assert list(line.unasked()) == []


class LineMachine(RuleBasedStateMachine):
    """A line beside a plain list of who waits."""

    @initialize()
    def open(self) -> None:
        self.line = Line()
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
        """As a consumer does: a request's item first, else one of the producer whose turn it is."""
        mm_hash = self.line.first_asked() or next(self.line.unasked())
        self.line.remove(mm_hash)
        order, _ = self.waiting.pop(mm_hash)
        if order == NOT_ASKED:
            self.line.took(self.producer[mm_hash])

    @invariant()
    def it_says_who_waits(self) -> None:
        assert len(self.line) == len(self.waiting)
        assert all(f"i{item}" in self.line for item in range(7) if f"i{item}" in self.waiting)
        asked = {name: at for name, at in self.waiting.items() if at[0] != NOT_ASKED}
        first = self.line.first_asked()
        assert (first is None) == (not asked)
        if first is not None:
            assert asked[first][0] == min(order for order, _ in asked.values())
        unasked = set(self.waiting) - set(asked)
        heads = list(self.line.unasked())
        assert len(heads) == len(set(heads))
        assert set(heads) <= unasked
        assert bool(heads) == bool(unasked), "somebody is never served"


TestLine = LineMachine.TestCase
TestLine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


class LandingMachine(RuleBasedStateMachine):
    """Memory for items under its limit, but for what the oldest request needs."""

    LIMIT = 100

    @initialize()
    def open(self) -> None:
        self.landing = Landing(self.LIMIT)
        self.items: list[tuple[int, bool]] = []
        self.beyond = 0  # bytes of the oldest request's items

    @rule(nbytes=st.integers(1, 150), asked=st.booleans())
    def let_in(self, nbytes: int, asked: bool) -> None:
        if self.landing.admits(nbytes, asked=asked):
            self.landing.take(nbytes, asked)
            self.items.append((nbytes, asked))

    @rule(nbytes=st.integers(1, 150))
    def let_in_the_oldest(self, nbytes: int) -> None:
        self.landing.take(nbytes, asked=True)
        self.items.append((nbytes, True))
        self.beyond = max(0, sum(size for size, _ in self.items) - self.LIMIT)

    @precondition(lambda self: self.items)
    @rule(at=st.integers(0, 1000))
    def give_back(self, at: int) -> None:
        nbytes, asked = self.items.pop(at % len(self.items))
        self.landing.give_back(nbytes, asked)

    @precondition(lambda self: any(not asked for _, asked in self.items))
    @rule()
    def ask(self) -> None:
        at = next(at for at, (_, asked) in enumerate(self.items) if not asked)
        self.landing.now_asked(self.items[at][0])
        self.items[at] = (self.items[at][0], True)

    @invariant()
    def it_is_bounded(self) -> None:
        unasked = sum(nbytes for nbytes, asked in self.items if not asked)
        assert self.landing.taken == sum(nbytes for nbytes, _ in self.items)
        assert self.landing.unasked == unasked
        assert self.landing.taken <= self.LIMIT + self.beyond
        assert unasked <= self.LIMIT // credit.UNASKED_SHARE
        # What nobody asked for never keeps out what somebody asks for.
        room = self.LIMIT - self.landing.taken
        if room >= 1:
            assert self.landing.admits(room, asked=True)
            assert not self.landing.admits(room + 1, asked=True)


TestLanding = LandingMachine.TestCase
TestLanding.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@given(st.integers(1, 1 << 40), st.integers(0, 1000))
def test_windows_share_the_arena(arena: int, active: int) -> None:
    share = credit.window_bytes(arena, active)
    parts = credit.WINDOWS_IN_FLIGHT * max(1, min(active, credit.MOST_SHARES))
    assert share * parts <= arena
    assert share == credit.MOST_WINDOW_BYTES or arena < (share + 1) * parts


@given(st.integers(1, 1000), st.integers(1, 1000))
def test_progress_is_never_refused(got: int, wanted: int) -> None:
    arena = 1000
    assert credit.is_worth_it(got, wanted, arena, True)
    worth = credit.is_worth_it(got, wanted, arena, False)
    assert worth == (got >= wanted or got >= arena / credit.SMALLEST_SHARE)


@given(st.lists(st.integers(1, 5000), max_size=40), st.integers(1, 8192))
def test_a_first_grant_is_as_long_as_recent_items(rows: list[int], most: int) -> None:
    recent = RecentRows()
    for each in rows:
        recent.add(each)
    first = recent.first_grant(most)
    if len(rows) < credit.FEWEST_RECENT:
        assert first == most
    else:
        assert first == min(most, max(rows[-credit.RECENT_ITEMS :]))


@pytest.mark.parametrize("later", [0, 3])
def test_a_request_for_an_item_that_waits_moves_it(later: int) -> None:
    line = Line()
    line.add("pushed", "p0", NOT_ASKED)
    line.add("other", "p1", 5)
    line.add("pushed", "p0", later)
    assert line.first_asked() == "pushed"
    assert list(line.unasked()) == []
