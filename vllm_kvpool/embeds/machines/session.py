"""A session with one peer: greeted, alive, silent, lost, refused (pure; control thread).

The side that has connected sends hellos until they are answered. Any frame counts as a heartbeat. A
peer that is silent for `heartbeat_max_failures` heartbeats is lost, and greeted again at growing
intervals. A peer with another protocol or fingerprint gets nothing but hellos until its own hello
changes.
"""

import hmac
from dataclasses import dataclass
from enum import Enum

import msgspec

from vllm_kvpool.embeds.protocol.messages import (
    OLDEST_VERSION,
    VERSION,
    Code,
    Heartbeat,
    HelloReject,
    Message,
    PeerHello,
    PeerRole,
)

FIRST_GREETING_S = 0.2
LONGEST_GREETING_S = 5.0
HEARTBEATS = 4  # heartbeats are sent after 1/n of heartbeat_s, so that some may be lost


class SessionState(Enum):
    """States of a session."""

    CONNECTING = "connecting"
    UP = "up"
    DEGRADED = "degraded"
    """Silent for a heartbeat."""
    INCOMPATIBLE = "incompatible"


@dataclass(frozen=True, slots=True)
class PeerUp:
    """The peer is in session, or has changed."""

    hello: PeerHello


@dataclass(frozen=True, slots=True)
class PeerLost:
    """The peer's incarnation cannot be reached; `quiesced` if none of its writes is in flight."""

    incarnation: str
    quiesced: bool


@dataclass(frozen=True, slots=True)
class SendMessage:
    """Send this to the peer."""

    body: Message


Action = PeerUp | PeerLost | SendMessage


@dataclass(frozen=True, slots=True)
class HeartbeatPolicy:
    """The interval of heartbeats, and how many may be missed."""

    heartbeat_s: float = 5.0
    max_failures: int = 2


class Session:
    """The session of one connection, made by us (`active`) or by the peer.

    `scheduler_token` is what the own scheduler proves itself with, to a worker; empty: nobody can.
    """

    def __init__(
        self,
        hello: PeerHello,
        heartbeats: HeartbeatPolicy,
        *,
        active: bool,
        now: float,
        scheduler_token: bytes = b"",
    ) -> None:
        self.state = SessionState.CONNECTING
        self.peer: PeerHello | None = None
        self._refused_by_peer = ""
        self._own = hello
        self._heartbeats = heartbeats
        self._active = active
        self._scheduler_token = scheduler_token
        self._received_at = self._sent_at = now
        self._hello_at = now
        self._hello_interval_s = FIRST_GREETING_S
        self._actions: list[Action] = []

    def take_actions(self) -> list[Action]:
        """Return the actions since the last call, in order."""
        actions, self._actions = self._actions, []
        return actions

    @property
    def is_up(self) -> bool:
        """True if messages may be sent to the peer."""
        return self.state in (SessionState.UP, SessionState.DEGRADED)

    @property
    def is_of_scheduler(self) -> bool:
        """True if the peer is the own engine's scheduler."""
        return self.peer is not None and self.peer.role is PeerRole.SCHEDULER

    @property
    def is_silence_checked(self) -> bool:
        """True if silence ends the session.

        A scheduler checks its own workers in `worker_channel`.
        """
        return self.peer is not None and PeerRole.SCHEDULER not in (self._own.role, self.peer.role)

    def update_hello(self, hello: PeerHello) -> None:
        """Send the own hello anew, which has changed: the weights are others."""
        self._own = hello
        self._send(hello)
        if self.peer is not None:
            self._evaluate(self.peer)

    def sent(self, now: float) -> None:
        """Note that a message was sent, so that no heartbeat is due."""
        self._sent_at = now

    def hello(self, message: PeerHello, now: float) -> None:
        """Take the peer's hello: begin the session, or refuse it."""
        self._received_at = now
        if self.peer is not None and self.peer.incarnation != message.incarnation:
            self._lose(quiesced=False)
        if not message.answer and not self._is_false_scheduler(message):
            self._send(_as_answer(self._own))
        self._evaluate(message)

    def _is_false_scheduler(self, message: PeerHello) -> bool:
        token = self._scheduler_token
        return message.role is PeerRole.SCHEDULER and not (
            token and hmac.compare_digest(message.token, token)
        )

    def _evaluate(self, message: PeerHello) -> None:
        was_up, self.peer = self.is_up, message
        refusal = _refusal(self._own, message)
        if self._is_false_scheduler(message):
            refusal = HelloReject(Code.INCOMPATIBLE, "a scheduler of another engine")
        if refusal is not None:
            self.state = SessionState.INCOMPATIBLE
            if was_up:
                self._actions.append(PeerLost(message.incarnation, quiesced=False))
            self._send(refusal)
            return
        self.state = SessionState.UP
        self._hello_interval_s = FIRST_GREETING_S
        self._actions.append(PeerUp(message))

    def rejected(self, message: HelloReject, now: float) -> bool:
        """Take the peer's refusal of a session, and return True if the reason is new."""
        self._received_at = now
        is_news = self._refused_by_peer != message.text
        self._refused_by_peer = message.text
        if self.is_up and self.peer is not None:
            self._actions.append(PeerLost(self.peer.incarnation, quiesced=False))
        self.state = SessionState.INCOMPATIBLE
        return is_news

    def received(self, now: float) -> None:
        """Note that the peer has sent something else."""
        self._received_at = now
        if self.state is SessionState.DEGRADED:
            self.state = SessionState.UP

    def goodbye(self) -> None:
        """End the session in order, as the peer does."""
        if self.is_up:
            self._lose(quiesced=True)

    def tick(self, now: float) -> None:
        """Send what is due and check for silence; called several times a second."""
        if not self.is_up:
            if self._active and now >= self._hello_at:
                self._hello_at = now + self._hello_interval_s
                self._hello_interval_s = min(2 * self._hello_interval_s, LONGEST_GREETING_S)
                self._send(self._own)
            return
        assert self.peer is not None
        if self.is_silence_checked:
            self._check_silence(now - self._received_at, self.peer.heartbeat_s, now)
        # A scheduler reads only while it waits for something, so heartbeats to it would pile up.
        if (
            not self.is_of_scheduler
            and now - self._sent_at > self._heartbeats.heartbeat_s / HEARTBEATS
        ):
            self._sent_at = now
            self._send(Heartbeat())

    def _check_silence(self, silent_s: float, peers_heartbeat_s: float, now: float) -> None:
        beat_s = max(self._heartbeats.heartbeat_s, peers_heartbeat_s)
        if silent_s > beat_s * self._heartbeats.max_failures:
            self._lose(quiesced=False)
            self._hello_at = now
        elif silent_s > beat_s:
            self.state = SessionState.DEGRADED

    def lost(self) -> None:
        """End the session, as the connection is broken."""
        if self.is_up:
            self._lose(quiesced=False)

    def _lose(self, *, quiesced: bool) -> None:
        if self.is_up and self.peer is not None:
            self._actions.append(PeerLost(self.peer.incarnation, quiesced))
        self.state = SessionState.CONNECTING
        self.peer = None

    def _send(self, body: Message) -> None:
        self._actions.append(SendMessage(body))


def _as_answer(hello: PeerHello) -> PeerHello:
    return msgspec.structs.replace(hello, answer=True)


def _refusal(own: PeerHello, message: PeerHello) -> HelloReject | None:
    """Return the reason against a session; None if there can be one."""
    low, high = message.versions
    if high < OLDEST_VERSION or low > VERSION:
        return HelloReject(
            Code.INCOMPATIBLE,
            f"this engine speaks versions {OLDEST_VERSION} to {VERSION} of the protocol, the peer "
            f"{low} to {high}: bring both to the same release",
        )
    if PeerRole.SCHEDULER in (own.role, message.role):
        return None
    if own.fingerprint != message.fingerprint:
        return HelloReject(
            Code.INCOMPATIBLE,
            f"the peer encodes with another model, revision, weights, dtype or processor (its "
            f"fingerprint is {message.fingerprint}, ours {own.fingerprint}); if the same weights "
            "are kept in different files, set the same weights_id on both",
        )
    return None
