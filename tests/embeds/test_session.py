"""Sessions: hello, refusal, silence, loss and return, by a given clock."""

from itertools import pairwise

import pytest

from tests.embeds.sessions import HEARTBEAT_S, RHYTHM, hello, news, said, session_with
from vllm_kvpool.embeds.machines.session import (
    FIRST_GREETING_S,
    HEARTBEATS,
    LONGEST_GREETING_S,
    PeerLost,
    PeerUp,
    Session,
    SessionState,
)
from vllm_kvpool.embeds.protocol.messages import (
    OLDEST_VERSION,
    VERSION,
    Code,
    Heartbeat,
    HelloReject,
    PeerHello,
    PeerRole,
)

TOKEN = b"token"
CONNECTING, UP = SessionState.CONNECTING, SessionState.UP
DEGRADED, INCOMPATIBLE = SessionState.DEGRADED, SessionState.INCOMPATIBLE
LOST_AFTER_S = HEARTBEAT_S * RHYTHM.max_failures


def greetings(session: Session, since: float, until: float) -> list[float]:
    """When it greets."""
    times = []
    for tenths in range(int(since * 10), int(until * 10)):
        session.tick(tenths / 10)
        times += [tenths / 10 for body in said(session) if isinstance(body, PeerHello)]
    return times


# Greeting


def test_who_connects_greets_less_and_less_often() -> None:
    session = session_with(CONNECTING)
    times = greetings(session, 0, 60)
    pauses = [later - sooner for sooner, later in pairwise(times)]
    assert times[0] == 0
    assert pauses[0] == pytest.approx(FIRST_GREETING_S)
    assert all(later >= sooner - 1e-9 for sooner, later in pairwise(pauses))
    assert pauses[-1] == pytest.approx(LONGEST_GREETING_S)


def test_who_was_connected_to_waits() -> None:
    session = session_with(CONNECTING, active=False)
    assert greetings(session, 0, 60) == []


def test_a_hello_is_answered_and_an_answer_is_not() -> None:
    for answer in (False, True):
        session = session_with(CONNECTING, active=False)
        session.hello(hello("peer", answer=answer), 1.0)
        assert session.is_up
        actions = session.take_actions()
        assert [each for each in actions if isinstance(each, PeerUp)]
        answers = [each for each in actions if not isinstance(each, PeerUp)]
        assert len(answers) == (not answer)


def test_two_who_greet_at_once_do_not_answer_each_other_for_ever() -> None:
    one, other = session_with(CONNECTING), session_with(CONNECTING, active=False)
    wire = [(other, hello("own")), (one, hello("peer"))]
    frames = 0
    while wire and frames < 20:
        frames += 1
        target, body = wire.pop(0)
        target.hello(body, 1.0)
        back = one if target is other else other
        wire += [(back, each) for each in said(target) if isinstance(each, PeerHello)]
    assert frames <= 5
    assert one.is_up
    assert other.is_up


def test_a_session_that_is_up_does_not_greet() -> None:
    session = session_with(UP)
    for tenths in range(100):
        session.received(tenths / 10)
        session.tick(tenths / 10)
    assert not any(isinstance(body, PeerHello) for body in said(session))


# Who is refused


@pytest.mark.parametrize(
    ("versions", "fits"),
    [
        ((OLDEST_VERSION, VERSION), True),
        ((VERSION, VERSION), True),
        ((0, OLDEST_VERSION), True),
        ((VERSION, VERSION + 7), True),
        ((VERSION + 1, VERSION + 7), False),
        ((0, OLDEST_VERSION - 1), False),
    ],
)
def test_versions_that_overlap_are_welcome(versions: tuple[int, int], fits: bool) -> None:
    session = session_with(CONNECTING)
    session.hello(hello("peer", versions=versions, answer=True), 1.0)
    assert session.is_up == fits
    if not fits:
        (refusal,) = said(session)
        assert isinstance(refusal, HelloReject)
        assert refusal.code is Code.INCOMPATIBLE
        assert f"{versions[0]} to {versions[1]}" in refusal.text
        assert f"{OLDEST_VERSION} to {VERSION}" in refusal.text


def test_another_fingerprint_is_refused_with_both() -> None:
    session = session_with(CONNECTING)
    session.hello(hello("peer", fingerprint="theirs", answer=True), 1.0)
    assert session.state is INCOMPATIBLE
    (refusal,) = said(session)
    assert isinstance(refusal, HelloReject)
    assert "theirs" in refusal.text
    assert "model" in refusal.text
    assert "weights_id" in refusal.text


@pytest.mark.parametrize("known", [TOKEN, b""])
@pytest.mark.parametrize("shown", [TOKEN, b"", b"another", TOKEN[:-1]])
def test_scheduler_without_the_workers_token_gets_a_refusal_alone(
    known: bytes, shown: bytes
) -> None:
    """Only the token proves that a peer is the scheduler; a hello's other fields do not."""
    session = Session(hello("own"), RHYTHM, active=False, now=0.0, scheduler_token=known)
    # A scheduler does not know the fingerprint that its workers have found.
    session.hello(hello("s", role=PeerRole.SCHEDULER, token=shown, fingerprint=""), 1.0)
    assert session.is_up == (known == shown == TOKEN)
    assert [type(body) for body in said(session)] == [PeerHello if session.is_up else HelloReject]


def test_peer_in_session_that_says_it_is_the_scheduler_is_lost() -> None:
    session = Session(hello("own"), RHYTHM, active=False, now=0.0, scheduler_token=TOKEN)
    session.hello(hello("peer"), 1.0)
    assert session.is_up
    session.hello(hello("peer", role=PeerRole.SCHEDULER), 2.0)
    assert not session.is_up
    assert PeerLost("peer", quiesced=False) in news(session)


def test_a_session_that_is_refused_later_is_lost() -> None:
    for refuse in (
        lambda session: session.hello(hello("peer", fingerprint="new", answer=True), 2.0),
        lambda session: session.rejected(HelloReject(Code.INCOMPATIBLE, "no"), 2.0),
        lambda session: session.update_hello(hello("own", fingerprint="new")),
    ):
        session = session_with(UP)
        refuse(session)
        assert session.state is INCOMPATIBLE
        assert news(session) == [PeerLost("peer", quiesced=False)]


def test_a_refusal_is_news_once() -> None:
    session = session_with(CONNECTING)
    no = HelloReject(Code.INCOMPATIBLE, "no")
    assert session.rejected(no, 1.0)
    assert not session.rejected(no, 2.0)
    assert session.rejected(HelloReject(Code.INCOMPATIBLE, "still no"), 3.0)


@pytest.mark.parametrize("incarnation", ["peer", "next"])
def test_incompatible_until_the_peer_changes(incarnation: str) -> None:
    session = session_with(CONNECTING)
    session.hello(hello("peer", fingerprint="old", answer=True), 1.0)
    session.take_actions()
    for now in (2.0, 3.0):
        session.received(now)
        session.hello(hello("peer", fingerprint="old", answer=True), now)
        assert session.state is INCOMPATIBLE
    session.take_actions()
    changed = hello(incarnation, fingerprint="model", answer=True)
    session.hello(changed, 4.0)
    assert session.state is UP
    assert news(session) == [PeerUp(changed)]


def test_incompatible_until_we_change() -> None:
    session = session_with(CONNECTING)
    theirs = hello("peer", fingerprint="new", answer=True)
    session.hello(theirs, 1.0)
    session.take_actions()
    session.update_hello(hello("own", fingerprint="new"))
    assert session.state is UP
    actions = session.take_actions()
    assert PeerUp(theirs) in actions


def test_a_peer_that_was_lost_is_not_back_because_we_change() -> None:
    session = session_with(UP)
    session.lost()
    session.update_hello(hello("own"))
    assert session.state is CONNECTING


def test_who_has_been_refused_is_greeted_seldom_in_case_another_comes_in_its_place() -> None:
    session = session_with(INCOMPATIBLE)
    times = greetings(session, 1, 61)
    assert 60 / LONGEST_GREETING_S <= len(times) <= 60 / LONGEST_GREETING_S + 6
    session.hello(hello("next", answer=True), 70.0)
    assert session.state is UP
    assert isinstance(news(session)[-1], PeerUp)


# Signs of life


def test_a_silent_peer_is_lost_and_greeted_at_once() -> None:
    session = session_with(UP)
    session.tick(HEARTBEAT_S + 0.1)
    assert session.state is DEGRADED
    assert session.is_up
    session.tick(LOST_AFTER_S)
    assert session.is_up
    session.take_actions()
    session.tick(LOST_AFTER_S + 0.1)
    assert session.state is CONNECTING
    assert news(session) == [PeerLost("peer", quiesced=False)]
    session.tick(LOST_AFTER_S + 0.2)
    assert [type(body) for body in said(session)] == [PeerHello]


def test_any_frame_is_a_sign_of_life() -> None:
    session = session_with(DEGRADED)
    session.received(1.9)
    assert session.state is UP
    session.tick(1.9 + HEARTBEAT_S)
    assert session.state is UP


def test_the_slower_of_two_rhythms_holds() -> None:
    session = session_with(CONNECTING)
    session.hello(hello("peer", heartbeat_s=10.0, answer=True), 0.0)
    session.tick(19.0)
    assert session.is_up
    session.tick(21.0)
    assert not session.is_up


def test_silence_is_filled_so_that_one_beat_may_be_lost() -> None:
    session = session_with(UP)
    beats = []
    for hundredths in range(400):
        now = hundredths / 100
        session.received(now)
        session.tick(now)
        beats += [now for body in said(session) if isinstance(body, Heartbeat)]
    assert max(later - sooner for sooner, later in pairwise([0.0, *beats])) <= HEARTBEAT_S / 2
    assert len(beats) <= 4 * HEARTBEATS + 1


def test_who_speaks_need_not_beat() -> None:
    session = session_with(UP)
    for tenths in range(100):
        session.received(tenths / 10)
        session.sent(tenths / 10)
        session.tick(tenths / 10)
    assert said(session) == []


@pytest.mark.parametrize(
    ("incarnation", "number"), [("peer", 0), ("another", 0), ("peer", 1), ("another", 1)]
)
def test_back_after_a_loss(incarnation: str, number: int) -> None:
    """The same incarnation or another one, that answers or that greets."""
    session = session_with(UP)
    session.tick(LOST_AFTER_S + 1)
    session.take_actions()
    told = hello(incarnation, answer=bool(number))
    session.hello(told, 20.0)
    assert session.is_up
    assert news(session) == [PeerUp(told)]
    session.tick(20.5)
    assert session.state is UP


def test_another_incarnation_ends_the_first() -> None:
    session = session_with(UP)
    told = hello("another", answer=True)
    session.hello(told, 1.0)
    assert news(session) == [PeerLost("peer", quiesced=False), PeerUp(told)]


def test_the_same_incarnation_says_something_new_without_a_loss() -> None:
    session = session_with(UP)
    told = hello("peer", endpoints=("tcp://elsewhere:1",), answer=True)
    session.hello(told, 1.0)
    assert news(session) == [PeerUp(told)]


def test_greetings_begin_anew_after_a_session() -> None:
    session = session_with(CONNECTING)
    greetings(session, 0, 30)
    session.hello(hello("peer", answer=True), 30.0)
    session.tick(30.0 + LOST_AFTER_S + 1)
    session.take_actions()
    first, second = greetings(session, 34, 40)[:2]
    assert second - first == pytest.approx(FIRST_GREETING_S)


def test_goodbye_is_quiet() -> None:
    session = session_with(UP)
    session.goodbye()
    assert news(session) == [PeerLost("peer", quiesced=True)]
    session.goodbye()
    assert news(session) == []


def test_a_broken_connection_is_not_quiet() -> None:
    session = session_with(UP)
    session.lost()
    assert news(session) == [PeerLost("peer", quiesced=False)]
    session.lost()
    assert news(session) == []


# A scheduler and its workers


def test_a_worker_does_not_lose_its_scheduler_by_silence_and_does_not_bother_it() -> None:
    session = Session(hello("own"), RHYTHM, active=False, now=0.0, scheduler_token=TOKEN)
    told = hello("s", role=PeerRole.SCHEDULER, token=TOKEN, fingerprint="")
    session.hello(told, 0.0)
    session.take_actions()
    for now in range(1, 1000):
        session.tick(float(now))
    assert session.is_up
    assert session.take_actions() == []


def test_a_scheduler_does_not_lose_a_worker_by_silence_and_tells_it_that_it_is_there() -> None:
    session = session_with(CONNECTING, role=PeerRole.SCHEDULER, fingerprint="")
    session.hello(hello("w", answer=True), 0.0)
    session.take_actions()
    for now in range(1, 100):
        session.tick(float(now))
    assert session.is_up
    # A worker that has been restarted answers a stray beat with a greeting.
    assert {type(body) for body in said(session)} == {Heartbeat}
    told = hello("w2", answer=True)
    session.hello(told, 101.0)
    assert news(session) == [PeerLost("w", quiesced=False), PeerUp(told)]
