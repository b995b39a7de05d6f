"""Sessions in any state, their actions, and frames of a peer."""

import msgspec

from vllm_kvpool.embeds.machines.session import (
    HeartbeatPolicy,
    PeerLost,
    PeerUp,
    SendMessage,
    Session,
    SessionState,
)
from vllm_kvpool.embeds.protocol.messages import (
    OLDEST_VERSION,
    VERSION,
    Code,
    Envelope,
    HelloReject,
    Message,
    PeerHello,
    PeerRole,
    encode,
    encode_body,
)

HEARTBEAT_S = 1.0
RHYTHM = HeartbeatPolicy(HEARTBEAT_S, max_failures=2)


def hello(incarnation: str = "own", **changes: object) -> PeerHello:
    """Return the hello of a consumer; `changes` replaces its fields."""
    usual = PeerHello(
        versions=(OLDEST_VERSION, VERSION),
        incarnation=incarnation,
        role=PeerRole.CONSUMER,
        fingerprint="model",
        heartbeat_s=HEARTBEAT_S,
    )
    return msgspec.structs.replace(usual, **changes)  # type: ignore[arg-type]


def session_with(state: SessionState, *, active: bool = True, **own: object) -> Session:
    """A session in a state, with the incarnation `peer`, since time 0."""
    session = Session(hello("own", **own), RHYTHM, active=active, now=0.0)
    if state is SessionState.INCOMPATIBLE:
        session.rejected(HelloReject(Code.INCOMPATIBLE, "another model"), 0.0)
    elif state is not SessionState.CONNECTING:
        session.hello(hello("peer", answer=True), 0.0)
        if state is SessionState.DEGRADED:
            session.tick(1.5 * HEARTBEAT_S)
    session.take_actions()
    assert session.state is state
    return session


def said(session: Session) -> list[Message]:
    """Return the messages that the session has sent since its actions were last taken."""
    return [each.body for each in session.take_actions() if isinstance(each, SendMessage)]


def news(session: Session) -> list[PeerUp | PeerLost]:
    """Return the peers found or lost since the session's actions were last taken."""
    return [each for each in session.take_actions() if not isinstance(each, SendMessage)]


def frame(source: str, *bodies: Message, target: str = "") -> bytes:
    """A frame of an incarnation."""
    return encode(Envelope(source, target, tuple(map(encode_body, bodies))))
