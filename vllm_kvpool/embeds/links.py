"""A scheduler's connections to its own engine's workers. Everything runs on the scheduler's thread.

The same sockets, sessions and messages as between peers; without a thread, since the scheduler
looks often enough while it waits for something, and has nothing to say while it does not. What a
step's requests need is said at its end, in one frame.
"""

import logging
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from vllm_kvpool.embeds.outbox import Outbox
from vllm_kvpool.embeds.protocol import (
    OLDEST_VERSION,
    VERSION,
    Expect,
    Hello,
    HelloReject,
    Message,
    Push,
    Role,
    decode,
    decode_body,
)
from vllm_kvpool.embeds.session import Rhythm, Say, Session, Up
from vllm_kvpool.embeds.sockets import Keys, Link, Sockets
from vllm_kvpool.errors import ConfigError, ProtocolError

logger = logging.getLogger(__name__)

OF_A_STEP: frozenset[type] = frozenset((Expect, Push))
"""What waits for the end of the step; where none comes, for the first look after a while."""


class Said(NamedTuple):
    """What a rank has said; None: it is there, maybe again, and knows of nothing."""

    rank: int
    body: Message | None


class WorkerLinks:
    """See the module docstring. `endpoints` are the workers' by rank."""

    def __init__(
        self,
        endpoints: Sequence[str],
        engine_id: str,
        keys: Keys | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._sockets = Sockets(None, keys)
        self._hello = Hello(
            versions=(OLDEST_VERSION, VERSION),
            incarnation=secrets.token_hex(8),
            engine_id=engine_id,
            role=Role.SCHEDULER,
            fingerprint="",
            heartbeat_s=1.0,
        )
        now = clock()
        self._ranks: dict[Link, tuple[int, Session]] = {}
        for rank, endpoint in enumerate(endpoints):
            session = Session(self._hello, Rhythm(), active=True, now=now)
            try:
                link = self._sockets.connect(endpoint)
            except ConfigError:
                self.close()
                raise
            self._ranks[link] = (rank, session)
        self._outbox = Outbox(self._hello.incarnation, OF_A_STEP)
        self.poll()  # greet: they will have answered when somebody asks

    @property
    def num_ranks(self) -> int:
        return len(self._ranks)

    @property
    def are_up(self) -> bool:
        """Whether what is said now reaches all ranks."""
        return all(session.is_up for _, session in self._ranks.values())

    def send(self, body: Message, rank: int | None = None) -> None:
        """To all ranks that are there, or to one; what is lost is said again when they are.

        What is for a step's requests waits for `flush`, or for what does not wait.
        """
        for link, (number, session) in self._ranks.items():
            if session.is_up and rank in (None, number):
                self._add(link, session, body)
        self._say_due(self._clock())

    def _add(self, link: Link, session: Session, body: Message) -> None:
        target = session.peer.incarnation if session.peer is not None else ""
        self._outbox.add(link, target, body, self._clock())

    def flush(self) -> None:
        """The step has been planned: say what waits."""
        self._say_due(float("inf"))

    def _say_due(self, until: float) -> None:
        for link, said in self._outbox.take(until):
            _, session = self._ranks[link]
            if not all(self._sockets.send(link, frame) for frame in self._outbox.frames(said)):
                session.lost()

    def poll(self, timeout_s: float = 0.0) -> list[Said]:
        """What the workers have said; waits for the first word at most so long."""
        # What has not been said is not answered.
        self._say_due(float("inf") if timeout_s else self._clock())
        said: list[Said] = []
        frames = self._sockets.poll(timeout_s)
        now = self._clock()
        for frame in frames:
            rank, session = self._ranks[frame.link]
            for body in _bodies(frame.data):
                if isinstance(body, Hello):
                    session.hello(body, now)
                elif isinstance(body, HelloReject):
                    session.rejected(body, now)
                else:
                    said.append(Said(rank, body))
                said += self._act(frame.link, rank, session)
        for link, (rank, session) in self._ranks.items():
            session.tick(now)
            said += self._act(link, rank, session)
        return said

    def _act(self, link: Link, rank: int, session: Session) -> list[Said]:
        said = []
        for action in session.take_actions():
            if isinstance(action, Say):
                self._add(link, session, action.body)
                self._say_due(self._clock())
            elif isinstance(action, Up):
                said.append(Said(rank, None))
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
