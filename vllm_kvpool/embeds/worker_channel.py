"""A scheduler's connections to its own engine's workers, on the scheduler's thread.

The sockets, sessions and messages are those between peers, without a thread: the scheduler polls
often while it waits for something. Messages about a step's requests are sent at its end, in one
frame. While it polls it asks each worker for heartbeats, and counts for how long one has not
answered, whatever became of its threads.
"""

import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec

from vllm_kvpool.embeds.machines.session import (
    HEARTBEATS,
    HeartbeatPolicy,
    PeerUp,
    SendMessage,
    Session,
)
from vllm_kvpool.embeds.protocol.messages import (
    MAX_FRAME_BYTES,
    OLDEST_VERSION,
    VERSION,
    Expect,
    Goodbye,
    Heartbeat,
    HelloReject,
    Message,
    PeerHello,
    PeerRole,
    Push,
    Reorder,
    decode,
    decode_body,
)
from vllm_kvpool.embeds.protocol.outbox import Outbox
from vllm_kvpool.errors import ConfigError, ProtocolError
from vllm_kvpool.network.transport_zmq import CurveKeys, Link, ZmqTransport

logger = logging.getLogger(__name__)

STEP_MESSAGES: frozenset[type] = frozenset((Expect, Push, Reorder))
"""Messages that wait for the end of the step or, if there is none, for a later poll."""


BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
DEFAULT_HEARTBEATS = HeartbeatPolicy()


class WorkerCard(NamedTuple):
    """A worker's answer to its engine's scheduler at the start, over vLLM's connections."""

    rank: int
    token: bytes
    """Secret that the scheduler must show to this worker."""
    host: str
    """Equal in processes of one host."""


def host_name() -> str:
    """Return a name that processes of one host alone share: the random id of this boot."""
    return BOOT_ID.read_text().strip()


def tokens_of(cards: Iterable[WorkerCard | None], num_ranks: int, host: str) -> list[bytes]:
    """Return the tokens of the first ranks.

    None stands for a worker that exchanges no embeddings.
    ConfigError if one of them is on another host than the scheduler's.
    """
    known = {card.rank: card for card in cards if card is not None}
    for rank in range(num_ranks):
        if known[rank].host != host:
            raise ConfigError(
                f"rank {rank} is on another host than the engine's scheduler: the {num_ranks} "
                "tensor-parallel ranks of an engine that receives embeddings must be on one host; "
                "lower --tensor-parallel-size, or start without KVPoolECConnector"
            )
    return [known[rank].token for rank in range(num_ranks)]


class WorkerMessage(NamedTuple):
    """A rank's message; None: a session with the rank has begun and has no state yet."""

    rank: int
    body: Message | None


@dataclass(slots=True)
class _Worker:
    """A rank, and for how long it has not answered."""

    rank: int
    session: Session
    asked_at: float = float("-inf")
    is_asked: bool = False  # for a heartbeat, and has not answered
    silent_s: float = 0.0  # of polled time; inf: it has ended


class WorkerChannel:
    """Connections to the workers; `endpoints` and `tokens` are theirs, by rank."""

    def __init__(
        self,
        endpoints: Sequence[str],
        tokens: Sequence[bytes],
        keys: CurveKeys | None = None,
        heartbeats: HeartbeatPolicy = DEFAULT_HEARTBEATS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._ask_interval_s = heartbeats.heartbeat_s / HEARTBEATS
        self._most_polled_s = heartbeats.heartbeat_s * heartbeats.max_failures / 2
        self._sockets = ZmqTransport(None, MAX_FRAME_BYTES, keys)
        self._hello = PeerHello(
            versions=(OLDEST_VERSION, VERSION),
            incarnation=secrets.token_hex(8),
            role=PeerRole.SCHEDULER,
            fingerprint="",
            heartbeat_s=1.0,
        )
        now = self._polled_at = clock()
        self._ranks: dict[Link, _Worker] = {}
        for rank, (endpoint, token) in enumerate(zip(endpoints, tokens, strict=True)):
            hello = msgspec.structs.replace(self._hello, token=token)
            session = Session(hello, heartbeats, active=True, now=now)
            try:
                link = self._sockets.connect(endpoint)
            except ConfigError:
                self.close()
                raise
            self._ranks[link] = _Worker(rank, session)
        self._outbox = Outbox(self._hello.incarnation, STEP_MESSAGES)
        self.poll()  # send hellos: they are answered by the time of the first request

    @property
    def num_ranks(self) -> int:
        """Number of workers of the engine."""
        return len(self._ranks)

    @property
    def are_up(self) -> bool:
        """True if a message sent now goes to all ranks."""
        return all(worker.session.is_up for worker in self._ranks.values())

    @property
    def silent_s(self) -> float:
        """For how long a rank has not answered while this side polled; inf if one has ended."""
        return max(worker.silent_s for worker in self._ranks.values())

    def send(self, body: Message, rank: int | None = None) -> None:
        """Send to all ranks in session, or to one; the caller repeats what is lost.

        Messages about a step's requests wait for `flush`.
        """
        for link, worker in self._ranks.items():
            if worker.session.is_up and rank in (None, worker.rank):
                self._add(link, worker.session, body)
        self._send_due(self._clock())

    def _add(self, link: Link, session: Session, body: Message) -> None:
        target = session.peer.incarnation if session.peer is not None else ""
        self._outbox.add(link, target, body, self._clock())

    def flush(self) -> None:
        """Send the messages that wait, at the end of a step's plan."""
        self._send_due(float("inf"))

    def _send_due(self, until: float) -> None:
        for link, messages in self._outbox.take(until):
            if not all(self._sockets.send(link, frame) for frame in self._outbox.frames(messages)):
                self._ranks[link].session.lost()
                self._sockets.disconnect(link)  # libzmq gives up after a handshake that was refused
                with contextlib.suppress(ConfigError):  # no descriptor: the next hello tries again
                    self._sockets.connect(link.endpoint)

    def poll(self, timeout_s: float = 0.0) -> list[WorkerMessage]:
        """Return the workers' messages; waits at most `timeout_s` for the first."""
        # A message that is still queued is not answered.
        self._send_due(float("inf") if timeout_s else self._clock())
        messages: list[WorkerMessage] = []
        frames = self._sockets.poll(timeout_s)
        now = self._clock()
        for frame in frames:
            worker = self._ranks[frame.link]
            for body in _bodies(frame.data):
                messages += self._receive(worker, body, now)
                messages += self._perform_actions(frame.link, worker, now)
        # Time in which this side did not poll does not count as a worker's silence.
        polled_s = min(now - self._polled_at, self._most_polled_s)
        self._polled_at = now
        for link, worker in self._ranks.items():
            if worker.is_asked or not worker.session.is_up:
                worker.silent_s += polled_s
            if worker.session.is_up and now - worker.asked_at >= self._ask_interval_s:
                worker.asked_at, worker.is_asked = now, True
                self._add(link, worker.session, Heartbeat())
                self._send_due(now)
            worker.session.tick(now)
            messages += self._perform_actions(link, worker, now)
        return messages

    def _receive(self, worker: _Worker, body: Message, now: float) -> list[WorkerMessage]:
        match body:
            case PeerHello():
                worker.session.hello(body, now)
            case HelloReject():
                if worker.session.rejected(body, now):
                    logger.error(
                        "kvpool: what listens at the control port of rank %d refuses this engine's "
                        "scheduler (%s): every engine of a host needs ports of its own (ec_port)",
                        worker.rank,
                        body.text,
                    )
            case Goodbye():
                worker.session.goodbye()
                worker.silent_s = float("inf")
            case _:
                worker.is_asked, worker.silent_s = False, 0.0
                return [] if isinstance(body, Heartbeat) else [WorkerMessage(worker.rank, body)]
        return []

    def _perform_actions(self, link: Link, worker: _Worker, now: float) -> list[WorkerMessage]:
        messages = []
        for action in worker.session.take_actions():
            match action:
                case SendMessage(body):
                    self._add(link, worker.session, body)
                    self._send_due(now)
                case PeerUp():
                    worker.asked_at, worker.is_asked, worker.silent_s = now, False, 0.0
                    messages.append(WorkerMessage(worker.rank, None))
        return messages

    def close(self) -> None:
        """Close the sockets; unsent messages are dropped."""
        self._sockets.close()


def _bodies(data: bytes) -> Iterator[Message]:
    """Yield the messages of a frame; what cannot be decoded is logged and skipped."""
    try:
        bodies = decode(data).bodies
    except ProtocolError as error:
        _log_ignored(error)
        return
    for raw in bodies:
        try:
            yield decode_body(raw)
        except ProtocolError as error:
            _log_ignored(error)


def _log_ignored(error: ProtocolError) -> None:
    logger.warning("kvpool: a message at the scheduler's control connection was ignored: %s", error)
