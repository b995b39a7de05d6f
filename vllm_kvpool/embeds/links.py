"""A scheduler's connections to its own engine's workers. Everything runs on the scheduler's thread.

The same sockets, sessions and messages as between peers; without a thread, since the scheduler
looks often enough while it waits for something, and has nothing to say while it does not. What a
step's requests need is said at its end, in one frame.

While it looks it asks each worker for a sign of life. A worker that has not answered for
`heartbeat_s * heartbeat_max_failures` counts as lost, whatever has become of its threads: the time
is this clock's.
"""

import logging
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vllm_kvpool.embeds.outbox import Outbox
from vllm_kvpool.embeds.protocol import (
    OLDEST_VERSION,
    VERSION,
    Expect,
    Goodbye,
    Heartbeat,
    Hello,
    HelloReject,
    Message,
    Push,
    Role,
    decode,
    decode_body,
)
from vllm_kvpool.embeds.session import HEARTBEATS, Lost, Rhythm, Say, Session, Up
from vllm_kvpool.embeds.sockets import Keys, Link, Sockets
from vllm_kvpool.errors import ConfigError, ProtocolError

logger = logging.getLogger(__name__)

OF_A_STEP: frozenset[type] = frozenset((Expect, Push))
"""What waits for the end of the step; where none comes, for the first look after a while."""


USUAL = Rhythm()


class Said(NamedTuple):
    """What a rank has said; None: it is there, maybe again, and knows of nothing."""

    rank: int
    body: Message | None


@dataclass(slots=True)
class _Worker:
    """A rank, and how long it has not answered."""

    rank: int
    session: Session
    asked_at: float = float("-inf")
    is_asked: bool = False  # and has not answered
    silent_s: float = 0.0
    lost_since: float | None = None  # of one that was there


class WorkerLinks:
    """See the module docstring. `endpoints` are the workers' by rank."""

    def __init__(
        self,
        endpoints: Sequence[str],
        engine_id: str,
        keys: Keys | None = None,
        rhythm: Rhythm = USUAL,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._ask_every_s = rhythm.heartbeat_s / HEARTBEATS
        self._longest_silence_s = rhythm.heartbeat_s * rhythm.max_failures
        self._sockets = Sockets(None, keys)
        self._hello = Hello(
            versions=(OLDEST_VERSION, VERSION),
            incarnation=secrets.token_hex(8),
            engine_id=engine_id,
            role=Role.SCHEDULER,
            fingerprint="",
            heartbeat_s=1.0,
        )
        now = self._looked_at = clock()
        self._ranks: dict[Link, _Worker] = {}
        for rank, endpoint in enumerate(endpoints):
            session = Session(self._hello, rhythm, active=True, now=now)
            try:
                link = self._sockets.connect(endpoint)
            except ConfigError:
                self.close()
                raise
            self._ranks[link] = _Worker(rank, session)
        self._outbox = Outbox(self._hello.incarnation, OF_A_STEP)
        self.poll()  # greet: they will have answered when somebody asks

    @property
    def num_ranks(self) -> int:
        return len(self._ranks)

    @property
    def are_up(self) -> bool:
        """Whether what is said now reaches all ranks; one that was lost has to answer first."""
        return all(
            worker.session.is_up and worker.lost_since is None for worker in self._ranks.values()
        )

    @property
    def lost_since(self) -> float | None:
        """Since when a rank that was there has not answered, by the clock; -inf where it has said
        that it ends, None where none is lost."""
        lost = (each.lost_since for each in self._ranks.values() if each.lost_since is not None)
        return min(lost, default=None)

    def send(self, body: Message, rank: int | None = None) -> None:
        """To all ranks that are there, or to one; what is lost is said again when they are.

        What is for a step's requests waits for `flush`, or for what does not wait.
        """
        for link, worker in self._ranks.items():
            if worker.session.is_up and rank in (None, worker.rank):
                self._add(link, worker.session, body)
        self._say_due(self._clock())

    def _add(self, link: Link, session: Session, body: Message) -> None:
        target = session.peer.incarnation if session.peer is not None else ""
        self._outbox.add(link, target, body, self._clock())

    def flush(self) -> None:
        """The step has been planned: say what waits."""
        self._say_due(float("inf"))

    def _say_due(self, until: float) -> None:
        for link, said in self._outbox.take(until):
            if not all(self._sockets.send(link, frame) for frame in self._outbox.frames(said)):
                self._ranks[link].session.lost()

    def poll(self, timeout_s: float = 0.0) -> list[Said]:
        """What the workers have said; waits for the first word at most so long."""
        # What has not been said is not answered.
        self._say_due(float("inf") if timeout_s else self._clock())
        said: list[Said] = []
        frames = self._sockets.poll(timeout_s)
        now = self._clock()
        for frame in frames:
            worker = self._ranks[frame.link]
            for body in _bodies(frame.data):
                said += self._heard(worker, body, now)
                said += self._act(frame.link, worker, now)
        # Who has not looked for long has not let a worker answer either.
        looked_s = min(now - self._looked_at, self._longest_silence_s / 2)
        self._looked_at = now
        for link, worker in self._ranks.items():
            if worker.session.is_up:
                self._watch(link, worker, looked_s, now)
            worker.session.tick(now)
            said += self._act(link, worker, now)
        return said

    def _heard(self, worker: _Worker, body: Message, now: float) -> list[Said]:
        match body:
            case Hello():
                worker.session.hello(body, now)
            case HelloReject():
                worker.session.rejected(body, now)
            case Goodbye():
                worker.session.goodbye()
                worker.lost_since = float("-inf")
            case _:
                worker.is_asked, worker.lost_since = False, None
                return [] if isinstance(body, Heartbeat) else [Said(worker.rank, body)]
        return []

    def _watch(self, link: Link, worker: _Worker, looked_s: float, now: float) -> None:
        """Ask a worker whether it is there; it is lost where it does not answer for long."""
        if not worker.is_asked:
            worker.silent_s = 0.0
            if now - worker.asked_at >= self._ask_every_s:
                worker.asked_at, worker.is_asked = now, True
                self._add(link, worker.session, Heartbeat())
                self._say_due(now)
            return
        worker.silent_s += looked_s
        if worker.silent_s > self._longest_silence_s:
            worker.session.lost()

    def _act(self, link: Link, worker: _Worker, now: float) -> list[Said]:
        said = []
        for action in worker.session.take_actions():
            match action:
                case Say(body):
                    self._add(link, worker.session, body)
                    self._say_due(now)
                case Up():
                    worker.is_asked = False
                    worker.asked_at = now if worker.lost_since is None else float("-inf")
                    said.append(Said(worker.rank, None))
                case Lost() if worker.lost_since is None:
                    worker.lost_since = now - worker.silent_s
        return said

    def close(self) -> None:
        """End the connections."""
        self._sockets.close()


def _bodies(data: bytes) -> Iterator[Message]:
    """The messages of a frame that are any."""
    try:
        envelope = decode(data)
    except ProtocolError as error:
        logger.warning("kvpool: what is no word of a worker: %s", error)
        return
    yield envelope.body
    for raw in envelope.more:
        try:
            yield decode_body(raw)
        except ProtocolError as error:
            logger.warning("kvpool: what is no word of a worker: %s", error)
