"""Calls that a store may receive after failures: a table, and random orders of events."""

import math

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from vllm_kvpool.storage.breaker import FAILURES_TO_OPEN, FIRST_PAUSE_S, LONGEST_PAUSE_S
from vllm_kvpool.storage.health import SLOW_FAILURE_S, CallKind, StoreAccess, StoreHealth

NONE, READ, FULL = StoreAccess.NONE, StoreAccess.READ, StoreAccess.FULL
KINDS = {"q": CallKind.QUERY, "r": CallKind.READ, "w": CallKind.WRITE}
LIMIT_S = 5.0


def after(steps: str, health: StoreHealth | None = None, now: float = 0.0) -> StoreHealth:
    """The health after calls at one time: `r-` is a read that failed, `w+` a write that succeeded,
    `q~` a query that failed slowly, `r!` a read that hangs. Without `health`, of an open store."""
    if health is None:
        health = StoreHealth()
        health.recovered(-math.inf)
    for step in steps.split():
        kind, end = step[0], step[1]
        if end == "!":
            health.call_hung(KINDS[kind], now, LIMIT_S)
        else:
            began = now - 2 * SLOW_FAILURE_S if end == "~" else now
            health.call_ended(KINDS[kind], began, now, failed=end != "+")
    return health


@pytest.mark.parametrize(
    ("steps", "access"),
    [
        ("", FULL),
        ("q- q-", FULL),
        ("q- q- q-", NONE),
        ("q- q- q+ q- q-", FULL),
        ("r- r- r-", NONE),
        ("r- q+ r- q+ r-", NONE),  # a store that answers queries and fails each cell
        ("r- r- r+ r- r-", FULL),
        ("q- r+ q- w+ q-", FULL),  # the store can be reached
        ("q- r- w- q- r- w-", FULL),
        ("w- w-", FULL),
        ("w- w- w-", READ),
        ("w- q+ w- r+ w-", READ),
        ("w- w- w+ w- w-", FULL),
        ("w- w- w- r- r- r-", NONE),
        ("q~", NONE),
        ("r~", NONE),
        ("w~", READ),
        ("r!", NONE),
        ("w!", READ),
        ("w! r+ q+ w+", READ),  # a call that began before the pause does not end it
        ("w! r!", NONE),
        ("r! w!", NONE),
        ("r! r+ q+ w+", NONE),  # a probe alone brings it back
    ],
)
def test_calls_restrict_access_as_the_table_says(steps: str, access: StoreAccess) -> None:
    assert after(steps).access is access


@pytest.mark.parametrize(("kind", "access"), [("q", NONE), ("r", NONE), ("w", READ)])
def test_a_pause_is_twice_as_long_while_no_call_of_the_kind_succeeds(
    kind: str, access: StoreAccess
) -> None:
    health, now, pauses = after(f"{kind}- {kind}-"), 0.0, []
    for _ in range(9):
        after(f"{kind}-", health, now)
        assert health.access is access
        pauses.append(health.due - now)
        now = health.due
        health.recovered(now)
        assert (health.access, health.due) == (FULL, math.inf)
    assert pauses == [min(FIRST_PAUSE_S * 2**i, LONGEST_PAUSE_S) for i in range(9)]
    after(f"{kind}+", health, now)
    assert after(f"{kind}- {kind}-", health, now).access is FULL


def test_a_success_of_queries_does_not_shorten_the_next_pause_of_reads() -> None:
    health = after("r- r- r-")
    health.recovered(FIRST_PAUSE_S)
    after("q+ r-", health, FIRST_PAUSE_S)
    assert (health.access, health.due) == (NONE, 3 * FIRST_PAUSE_S)


def test_each_probe_that_fails_delays_the_next() -> None:
    health, now, pauses = StoreHealth(), 0.0, []
    assert health.due <= now
    for jitter in (0.0, 0.25, 0.0):
        health.probe_failed(now, jitter)
        pauses.append(health.due - now)
        now = health.due
    assert pauses == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S * 1.25, 4 * FIRST_PAUSE_S]


def test_calls_that_began_before_the_store_recovered_do_not_count() -> None:
    health = after("r!")
    health.recovered(10.0)
    for kind in CallKind:
        for _ in range(FAILURES_TO_OPEN):
            assert not health.call_ended(kind, 9.0, 20.0, failed=True)
    assert health.access is FULL


def test_the_end_of_a_hung_write_does_not_count() -> None:
    health = after("")
    health.call_hung(CallKind.WRITE, 10.0, LIMIT_S)
    health.recovered(10.5)
    assert not health.call_ended(CallKind.WRITE, 1.0, 20.0, failed=True)
    assert health.access is FULL


def test_a_store_that_recovers_during_the_pause_of_writes_takes_writes() -> None:
    health = after("w! r!")
    health.recovered(FIRST_PAUSE_S / 2)
    assert health.access is FULL
    after("w-", health, FIRST_PAUSE_S / 2)  # one failure is enough
    assert (health.access, health.due) == (READ, FIRST_PAUSE_S / 2 + 2 * FIRST_PAUSE_S)


def test_writes_that_hang_again_after_their_pause_restrict_nothing_new() -> None:
    health = after("w!")
    after("w!", health, 2 * FIRST_PAUSE_S)  # before the guard's thread has allowed writes
    assert health.due == 4 * FIRST_PAUSE_S
    assert health.call_hung(CallKind.WRITE, 5 * FIRST_PAUSE_S, LIMIT_S) == ""
    assert health.access is READ


def test_the_reason_names_the_kind_of_call_and_its_figure() -> None:
    def why(steps: str, kind: str, took_s: float) -> str:
        return after(steps).call_ended(KINDS[kind], -took_s, 0.0, failed=True)

    assert why("r- r-", "r", 0.0) == "3 read calls in a row failed"
    assert why("", "w", 1.25) == "a write call failed after 1.2 s"
    hung = after("").call_hung(CallKind.READ, 0.0, LIMIT_S)
    assert hung == "a read call has not returned within 5 s"


class HealthMachine(RuleBasedStateMachine):
    """Calls of all kinds begin and end, well or badly, or hang; probes and pauses end in time."""

    @initialize()
    def begin(self) -> None:
        self.health, self.now = after(""), 0.0
        self.running: list[tuple[CallKind, float]] = []
        self.in_a_row = dict.fromkeys(CallKind, 0)  # failures that count
        self.has_paused = dict.fromkeys(CallKind, False)  # since a call of the kind succeeded
        self.valid_from = dict.fromkeys(CallKind, -math.inf)

    @rule(seconds=st.sampled_from((0.125, 1.0, 40.0)))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self.health.access is not NONE)
    @rule(kind=st.sampled_from(CallKind))
    def call(self, kind: CallKind) -> None:
        if kind is not CallKind.WRITE or self.health.access is FULL:
            self.running.append((kind, self.now))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), failed=st.booleans())
    def end(self, data: st.DataObject, failed: bool) -> None:
        kind, began = data.draw(st.sampled_from(self.running))
        self.running.remove((kind, began))
        before, due = self.health.access, self.health.due
        why = self.health.call_ended(kind, began, self.now, failed=failed)
        if before is NONE or began < self.valid_from[kind]:
            assert (why, self.health.access, self.health.due) == ("", before, due)
        elif not failed:
            for each in {kind, CallKind.QUERY}:
                self.in_a_row[each], self.has_paused[each] = 0, False
            assert (why, self.health.access) == ("", before)
        else:
            self.in_a_row[kind] += 1
            is_slow = self.now - began > SLOW_FAILURE_S
            enough = is_slow or self.has_paused[kind] or self.in_a_row[kind] >= FAILURES_TO_OPEN
            self.restricts(kind, before, why, enough=enough)

    @rule(writes=st.booleans())
    def hang(self, writes: bool) -> None:
        kind = CallKind.WRITE if writes else CallKind.READ
        before = self.health.access
        why = self.health.call_hung(kind, self.now, LIMIT_S)
        if before is NONE:
            assert (why, self.health.access) == ("", NONE)
        else:
            self.valid_from[kind] = self.now
            self.restricts(kind, before, why, enough=True)

    def restricts(self, kind: CallKind, before: StoreAccess, why: str, *, enough: bool) -> None:
        is_paused = before is READ and kind is CallKind.WRITE
        if not enough or is_paused:
            assert (why, self.health.access) == ("", before)
            return
        assert why
        assert self.health.access is (READ if kind is CallKind.WRITE else NONE)
        self.has_paused[kind] = True
        assert FIRST_PAUSE_S <= self.health.due - self.now <= LONGEST_PAUSE_S

    @precondition(lambda self: self.health.due <= self.now)
    @rule(answers=st.booleans(), jitter=st.sampled_from((0.0, 0.25)))
    def due(self, answers: bool, jitter: float) -> None:
        if answers or self.health.access is READ:
            self.health.recovered(self.now)
            self.valid_from = dict.fromkeys(CallKind, self.now)
        else:
            self.health.probe_failed(self.now, jitter)
            self.has_paused[CallKind.QUERY] = True
            assert self.health.access is NONE
            assert self.health.due > self.now
            return
        assert self.health.access is FULL

    @invariant()
    def waits_for_something_unless_all_is_allowed(self) -> None:
        assert (self.health.access is FULL) == (self.health.due == math.inf)


TestHealthMachine = HealthMachine.TestCase
