"""Prefill's record of hand-overs and their watchers, without sockets."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.invariants import check
from vllm_kvpool.handover import producer
from vllm_kvpool.handover.messages import TOPIC_BYTES, Notice
from vllm_kvpool.handover.producer import HandOvers, Told

PEERS = (b"one", b"two", b"three", b"four")


def topic(number: int) -> bytes:
    return number.to_bytes(TOPIC_BYTES, "big")


def notice(number: int, stored: int, ended: int | None = None) -> Notice:
    return Notice(topic(number), stored, ended)


@pytest.fixture(autouse=True)
def small_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, most in {
        "MAX_TOPICS": 3,
        "MAX_PEERS": 3,
        "MAX_WATCHES_OF_PEER": 3,
        "MAX_WATCHES": 5,
    }.items():
        monkeypatch.setattr(producer, name, most)


def test_watcher_is_told_the_state_at_once_and_every_change() -> None:
    state = HandOvers()
    state.tell(notice(1, 2))
    assert state.watch(b"one", topic(1)) == [Told(b"one", notice(1, 2))]
    assert state.tell(notice(1, 2)) == []
    assert state.tell(notice(1, 3)) == [Told(b"one", notice(1, 3))]
    assert state.tell(notice(1, 3, 3)) == [Told(b"one", notice(1, 3, 3))]
    state.unwatch(b"one", topic(1))
    assert state.tell(notice(1, 4, 4)) == []


def test_watch_of_an_unknown_topic_is_answered_with_nothing_stored() -> None:
    state = HandOvers()
    assert state.watch(b"one", topic(1)) == [Told(b"one", notice(1, 0))]
    assert state.tell(notice(2, 1)) == []
    assert state.tell(notice(1, 1)) == [Told(b"one", notice(1, 1))]


def test_second_watch_of_a_topic_is_answered_and_counts_once() -> None:
    state = HandOvers()
    state.tell(notice(1, 2))
    state.watch(b"one", topic(1))
    assert state.watch(b"one", topic(1)) == [Told(b"one", notice(1, 2))]
    assert state.num_watches == 1
    assert state.tell(notice(1, 3)) == [Told(b"one", notice(1, 3))]


def test_oldest_ended_topic_leaves_before_one_that_goes_on() -> None:
    state = HandOvers()
    state.tell(notice(1, 1))
    state.tell(notice(2, 5, 5))
    state.tell(notice(3, 1))
    state.tell(notice(4, 1))
    assert state.watch(b"one", topic(2)) == [Told(b"one", notice(2, 0))], "it has left"
    assert state.watch(b"one", topic(1)) == [Told(b"one", notice(1, 1))]
    state.tell(notice(5, 1))
    state.unwatch(b"one", topic(2))
    without = "without an ended one the oldest leaves"
    assert state.watch(b"two", topic(1)) == [Told(b"two", notice(1, 0))], without


def test_peer_over_its_bound_loses_its_oldest_watch() -> None:
    state = HandOvers()
    for number in range(4):
        state.watch(b"one", topic(number))
        check(state)
    assert state.num_dropped == 1
    assert state.tell(notice(0, 1)) == []
    assert state.tell(notice(3, 1)) == [Told(b"one", notice(3, 1))]


def test_peer_that_is_silent_longest_leaves_when_there_are_too_many() -> None:
    state = HandOvers()
    for peer in PEERS[:3]:
        state.watch(peer, topic(1))
    state.watch(b"one", topic(2))  # not the most silent any more
    state.watch(b"four", topic(1))
    check(state)
    assert {told.peer for told in state.tell(notice(1, 1))} == {b"one", b"three", b"four"}


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("watch"), st.sampled_from(PEERS), st.integers(0, 5)),
            st.tuples(st.just("unwatch"), st.sampled_from(PEERS), st.integers(0, 5)),
            st.tuples(st.just("lost"), st.sampled_from(PEERS), st.just(0)),
            st.tuples(st.just("tell"), st.integers(0, 3), st.integers(0, 5)),
        ),
        max_size=40,
    )
)
def test_every_watcher_hears_the_newest_state_in_any_order_of_events(
    events: list[tuple[str, bytes | int, int]],
) -> None:
    """A peer that is not dropped knows what was told last, or that nothing is stored."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("MAX_TOPICS", "MAX_PEERS", "MAX_WATCHES_OF_PEER", "MAX_WATCHES"):
            patch.setattr(producer, name, 100)
        state = HandOvers()
        newest: dict[int, Notice] = {}
        watched: dict[tuple[bytes, int], Notice | None] = {}
        for event, who, number in events:
            told: list[Told] = []
            if event == "tell":
                assert isinstance(who, int)
                newest[number] = notice(number, who, who if who == 3 else None)
                told = state.tell(newest[number])
            else:
                assert isinstance(who, bytes)
                if event == "watch":
                    watched.setdefault((who, number), None)
                    told = state.watch(who, topic(number))
                elif event == "unwatch":
                    watched.pop((who, number), None)
                    state.unwatch(who, topic(number))
                else:
                    state.lost(who)
                    for key in [key for key in watched if key[0] == who]:
                        del watched[key]
            for each in told:
                key = each.peer, int.from_bytes(each.notice.topic, "big")
                assert key in watched
                watched[key] = each.notice
            check(state)
            for (_, number), heard in watched.items():
                assert heard == newest.get(number, notice(number, 0))


@given(
    st.lists(
        st.tuples(
            st.sampled_from(("watch", "unwatch", "tell")),
            st.sampled_from(PEERS),
            st.integers(0, 5),
        ),
        max_size=60,
    )
)
def test_bounds_hold_in_any_order_of_events(events: list[tuple[str, bytes, int]]) -> None:
    state = HandOvers()
    for event, peer, number in events:
        if event == "tell":
            state.tell(notice(number, 1, number if number % 2 else None))
        else:
            getattr(state, event)(peer, topic(number))
        check(state)
