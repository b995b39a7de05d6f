"""Decode's merge of notices from several ranks and engines, without sockets."""

from hypothesis import given
from hypothesis import strategies as st

from tests.support.invariants import check
from vllm_kvpool.handover.messages import TOPIC_BYTES, Notice, Unwatch, Watch
from vllm_kvpool.handover.watches import Action, Lost, Progress, SendTo, Watches

TOPIC, OTHER = bytes(TOPIC_BYTES), b"x" * TOPIC_BYTES
A, B, C = "tcp://a:1", "tcp://b:1", "tcp://c:1"


def said(watches: Watches, endpoint: str, stored: int, ended: int | None = None) -> list[Action]:
    actions = watches.notice(endpoint, Notice(TOPIC, stored, ended))
    check(watches)
    assert actions is not None
    return actions


def test_chunk_counts_as_stored_once_all_ranks_have_it() -> None:
    watches = Watches()
    assert watches.watch([A, B], TOPIC) == [SendTo(A, Watch(TOPIC)), SendTo(B, Watch(TOPIC))]
    assert said(watches, A, 3) == []
    assert said(watches, B, 2) == [Progress(TOPIC, 2, None)]
    assert said(watches, B, 2) == [], "nothing has changed"
    assert said(watches, B, 5) == [Progress(TOPIC, 3, None)]


def test_end_is_known_once_any_rank_ends() -> None:
    watches = Watches()
    watches.watch([A, B], TOPIC)
    said(watches, A, 4)
    assert said(watches, B, 1, 2) == [Progress(TOPIC, 1, 2)]
    assert said(watches, A, 4, 4) == []
    assert said(watches, B, 2, 2) == [Progress(TOPIC, 2, 2)]


def test_late_notice_takes_nothing_back_that_is_stored() -> None:
    watches = Watches()
    watches.watch([A], TOPIC)
    assert said(watches, A, 5) == [Progress(TOPIC, 5, None)]
    assert said(watches, A, 3) == []
    assert said(watches, A, 3, 2) == [Progress(TOPIC, 5, 5)], "an end is not before it"


def test_notice_of_an_endpoint_that_is_not_watched_is_a_stray() -> None:
    watches = Watches()
    watches.watch([A], TOPIC)
    assert watches.notice(B, Notice(TOPIC, 9, 9)) is None
    assert watches.notice(A, Notice(OTHER, 9, 9)) is None
    watches.unwatch(TOPIC)
    assert watches.notice(A, Notice(TOPIC, 9, 9)) is None


def test_second_request_is_told_what_is_known_and_the_last_ends_the_watch() -> None:
    watches = Watches()
    watches.watch([A], TOPIC)
    said(watches, A, 2)
    assert watches.watch([A], TOPIC) == [Progress(TOPIC, 2, None)]
    assert watches.unwatch(TOPIC) == []
    assert said(watches, A, 3) == [Progress(TOPIC, 3, None)]
    assert watches.unwatch(TOPIC) == [SendTo(A, Unwatch(TOPIC))]
    assert watches.unwatch(TOPIC) == [], "one too many"
    assert not list(watches.topics_at(A))


def test_engine_with_a_rank_that_is_gone_stores_nothing_more() -> None:
    watches = Watches()
    watches.watch([A, B], TOPIC)
    said(watches, A, 2)
    assert watches.lost(B) == [SendTo(A, Unwatch(TOPIC)), Lost(TOPIC)]
    check(watches)
    assert watches.lost(A) == [], "once"
    assert watches.watch([A, B], TOPIC) == [SendTo(A, Watch(TOPIC)), SendTo(B, Watch(TOPIC))]


def test_other_engine_with_the_same_prompt_goes_on() -> None:
    """Two replicas compute one prompt: the wait ends when both are gone."""
    watches = Watches()
    watches.watch([A], TOPIC)
    watches.watch([B, C], TOPIC)
    assert said(watches, A, 3, 3) == [Progress(TOPIC, 3, None)], "the other one goes on"
    assert watches.lost(A) == []
    said(watches, B, 4)
    assert said(watches, C, 5) == [Progress(TOPIC, 4, None)]
    assert said(watches, C, 5, 5) == [Progress(TOPIC, 4, 5)]
    assert watches.lost(C) == [SendTo(B, Unwatch(TOPIC)), Lost(TOPIC)]


def test_new_connection_watches_what_is_waited_for() -> None:
    watches = Watches()
    watches.watch([A], TOPIC)
    watches.watch([A], OTHER)
    watches.watch([B], OTHER)
    assert watches.connected(A) == [SendTo(A, Watch(TOPIC)), SendTo(A, Watch(OTHER))]


def test_watch_without_endpoints_waits_for_nobody() -> None:
    watches = Watches()
    assert watches.watch([], TOPIC) == []
    check(watches)
    assert watches.unwatch(TOPIC) == []


ENDPOINTS = (A, B, C)


@given(
    st.lists(
        st.one_of(
            st.tuples(
                st.just("watch"),
                st.lists(st.sampled_from(ENDPOINTS), max_size=3),
                st.sampled_from((TOPIC, OTHER)),
            ),
            st.tuples(st.just("forget"), st.just(()), st.sampled_from((TOPIC, OTHER))),
            st.tuples(st.just("lost"), st.sampled_from(ENDPOINTS), st.just(TOPIC)),
            st.tuples(
                st.just("notice"),
                st.tuples(st.sampled_from(ENDPOINTS), st.integers(0, 4), st.integers(0, 4)),
                st.sampled_from((TOPIC, OTHER)),
            ),
        ),
        max_size=40,
    )
)
def test_invariants_hold_and_stored_only_grows_in_any_order_of_events(
    events: list[tuple[str, object, bytes]],
) -> None:
    watches = Watches()
    counts = {TOPIC: 0, OTHER: 0}
    stored = {TOPIC: 0, OTHER: 0}
    for event, what, topic in events:
        actions: list[Action] | None
        if event == "watch":
            assert isinstance(what, list)
            counts[topic] += 1
            actions = watches.watch(what, topic)
        elif event == "forget":
            counts[topic] = max(0, counts[topic] - 1)
            stored[topic] = stored[topic] if counts[topic] else 0
            actions = watches.unwatch(topic)
        elif event == "lost":
            assert isinstance(what, str)
            actions = watches.lost(what)
        else:
            assert isinstance(what, tuple)
            endpoint, count, ended = what
            actions = watches.notice(endpoint, Notice(topic, count, ended or None))
        check(watches)
        for action in actions or ():
            if isinstance(action, Progress):
                assert counts[action.topic]
                assert action.stored >= stored[action.topic]
                assert action.ended is None or action.ended >= action.stored
                stored[action.topic] = action.stored
            elif isinstance(action, Lost):
                assert counts[action.topic]
    for topic, count in counts.items():
        for _ in range(count):
            watches.unwatch(topic)
    assert not any(list(watches.topics_at(endpoint)) for endpoint in ENDPOINTS)
