"""A session with one peer: greeted, alive, silent, lost, refused (pure; control thread).

Whoever has connected greets until it is answered; whoever was connected to answers. Any frame is a
sign of life. A peer that is silent for `heartbeat_max_failures` heartbeats is lost, and greeted
again, less and less often. A peer that speaks another protocol or encodes with another model is
told nothing but greetings until it, or who comes in its place, says that it has changed.
"""

from dataclasses import dataclass
from enum import Enum

import msgspec

from vllm_kvpool.embeds.protocol import (
    OLDEST_VERSION,
    VERSION,
    Code,
    Heartbeat,
    Hello,
    HelloReject,
    Message,
    Role,
)
from vllm_kvpool.embeds.states import Table

FIRST_GREETING_S = 0.2
LONGEST_GREETING_S = 5.0
HEARTBEATS = 4  # silences of this part of a heartbeat are filled, so that one may be lost


class SessionState(Enum):
    """Of a session."""

    CONNECTING = "connecting"
    UP = "up"
    DEGRADED = "degraded"
    """Nothing was heard for a heartbeat."""
    INCOMPATIBLE = "incompatible"


class SessionEvent(Enum):
    """What happens to a session."""

    WELCOME = "welcome"
    REJECT = "reject"
    HEARD = "heard"
    SILENT = "silent"
    LOST = "lost"


_C, _U, _D = SessionState.CONNECTING, SessionState.UP, SessionState.DEGRADED
_I = SessionState.INCOMPATIBLE
_E = SessionEvent
SESSION_TABLE = Table(
    "session",
    {
        _C: {_E.WELCOME: _U, _E.REJECT: _I},
        _U: {_E.WELCOME: _U, _E.REJECT: _I, _E.SILENT: _D, _E.LOST: _C},
        _D: {_E.WELCOME: _U, _E.REJECT: _I, _E.HEARD: _U, _E.LOST: _C},
        _I: {_E.WELCOME: _U, _E.REJECT: _I, _E.LOST: _C},
    },
)


@dataclass(frozen=True, slots=True)
class Up:
    """The peer is there, or says something new of itself."""

    hello: Hello


@dataclass(frozen=True, slots=True)
class Lost:
    """This incarnation is not to be reached; `quiet` if nothing of it is in flight."""

    incarnation: str
    quiet: bool


@dataclass(frozen=True, slots=True)
class Say:
    """A frame for the peer."""

    body: Message


Action = Up | Lost | Say


@dataclass(frozen=True, slots=True)
class Rhythm:
    """How often a sign of life is due, and how many may be missing."""

    heartbeat_s: float = 5.0
    max_failures: int = 2


class Session:
    """One connection, made by us (`active`) or by the peer."""

    def __init__(self, hello: Hello, rhythm: Rhythm, *, active: bool, now: float) -> None:
        self.state = SessionState.CONNECTING
        self.peer: Hello | None = None
        self.refusal = self.refused_by_peer = ""
        self._own = hello
        self._rhythm = rhythm
        self._active = active
        self._heard_at = self._said_at = now
        self._greet_at = now
        self._pause_s = FIRST_GREETING_S
        self._actions: list[Action] = []

    def take_actions(self) -> list[Action]:
        """What is to be done, in order."""
        actions, self._actions = self._actions, []
        return actions

    @property
    def is_up(self) -> bool:
        """Whether messages may go to the peer."""
        return self.state in (SessionState.UP, SessionState.DEGRADED)

    @property
    def is_of_scheduler(self) -> bool:
        """Whether the peer is the own engine's scheduler."""
        return self.peer is not None and self.peer.role is Role.SCHEDULER

    @property
    def is_watched(self) -> bool:
        """Silence between a scheduler and its workers is for the scheduler to judge: `links.py`."""
        return self.peer is not None and Role.SCHEDULER not in (self._own.role, self.peer.role)

    def introduce(self, hello: Hello) -> None:
        """We have changed: the weights are others now."""
        self._own = hello
        self._say(hello)
        if self.peer is not None:
            self._judge(self.peer)

    def said(self, now: float) -> None:
        """Something was sent."""
        self._said_at = now

    def hello(self, told: Hello, now: float) -> None:
        """The peer has introduced itself."""
        self._heard_at = now
        if self.peer is not None and self.peer.incarnation != told.incarnation:
            self._lose(quiet=False)
        if not told.answer:
            self._say(_as_answer(self._own))
        self._judge(told)

    def _judge(self, told: Hello) -> None:
        was_up, self.peer = self.is_up, told
        refusal = _refusal(self._own, told)
        if refusal is not None:
            self.refusal = refusal.text
            self.state = SESSION_TABLE.after(self.state, SessionEvent.REJECT)
            if was_up:
                self._actions.append(Lost(told.incarnation, quiet=False))
            self._say(refusal)
            return
        self.state = SESSION_TABLE.after(self.state, SessionEvent.WELCOME)
        self._pause_s = FIRST_GREETING_S
        self._actions.append(Up(told))

    def rejected(self, told: HelloReject, now: float) -> bool:
        """The peer wants nothing of us; whether it says so for the first time."""
        self._heard_at = now
        is_news = self.refused_by_peer != told.text
        self.refused_by_peer = told.text
        if self.is_up and self.peer is not None:
            self._actions.append(Lost(self.peer.incarnation, quiet=False))
        self.state = SESSION_TABLE.after(self.state, SessionEvent.REJECT)
        return is_news

    def heard(self, now: float) -> None:
        """Any other frame of the peer."""
        self._heard_at = now
        if self.state is SessionState.DEGRADED:
            self.state = SESSION_TABLE.after(self.state, SessionEvent.HEARD)

    def goodbye(self) -> None:
        """The peer ends in order."""
        if self.is_up:
            self._lose(quiet=True)

    def tick(self, now: float) -> None:
        """Whatever is due. Called often."""
        if not self.is_up:
            if self._active and now >= self._greet_at:
                self._greet_at = now + self._pause_s
                self._pause_s = min(2 * self._pause_s, LONGEST_GREETING_S)
                self._say(self._own)
            return
        assert self.peer is not None
        if self.is_watched:
            self._watch(now - self._heard_at, self.peer.heartbeat_s, now)
        # A scheduler only listens when it waits for something. What it says itself shows a worker
        # that has been restarted.
        if not self.is_of_scheduler and now - self._said_at > self._rhythm.heartbeat_s / HEARTBEATS:
            self._said_at = now
            self._say(Heartbeat())

    def _watch(self, silent_s: float, peers_heartbeat_s: float, now: float) -> None:
        beat_s = max(self._rhythm.heartbeat_s, peers_heartbeat_s)
        if silent_s > beat_s * self._rhythm.max_failures:
            self._lose(quiet=False)
            self._greet_at = now
        elif silent_s > beat_s and self.state is SessionState.UP:
            self.state = SESSION_TABLE.after(self.state, SessionEvent.SILENT)

    def lost(self) -> None:
        """The connection is certainly broken."""
        if self.is_up:
            self._lose(quiet=False)

    def _lose(self, *, quiet: bool) -> None:
        if self.peer is None:
            return
        if self.is_up:
            self._actions.append(Lost(self.peer.incarnation, quiet))
        self.state = SESSION_TABLE.after(self.state, SessionEvent.LOST)
        self.peer = None

    def _say(self, body: Message) -> None:
        self._actions.append(Say(body))


def _as_answer(hello: Hello) -> Hello:
    return msgspec.structs.replace(hello, answer=True)


def _refusal(own: Hello, told: Hello) -> HelloReject | None:
    """Why there can be no session; None if there can be one."""
    low, high = told.versions
    if high < OLDEST_VERSION or low > VERSION:
        return HelloReject(
            Code.INCOMPATIBLE,
            f"this engine speaks versions {OLDEST_VERSION} to {VERSION} of the protocol, the peer "
            f"{low} to {high}: bring both to the same release",
        )
    if Role.SCHEDULER in (own.role, told.role):
        if own.engine_id == told.engine_id:
            return None
        return HelloReject(Code.INCOMPATIBLE, "a scheduler of another engine")
    if own.fingerprint != told.fingerprint:
        return HelloReject(
            Code.INCOMPATIBLE,
            f"the peer encodes with another model, revision, weights, dtype or processor "
            f"({told.fingerprint}; here {own.fingerprint}); weights_id says that weights kept in "
            "different files are the same",
        )
    return None
