"""Rows written to other processes' windows with Mooncake's transfer engine.

Rows are copied into registered staging memory, piece by piece, and each piece is written while the
next one is filled, by one thread. Whatever memory they come from is never registered: Mooncake
refuses regions that overlap, and items come and go.

Writes are begun and asked about, rather than made with the engine's blocking calls: those spin on a
core until the write has ended, and cannot be left. A write that fails has ended on this side; its
bytes may still be on their way, in sockets of both hosts. One that is given up on may also still
read its piece, which is quarantined.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from vllm_kvpool.embeds.host_memory import HostMemory, MemorySource
from vllm_kvpool.embeds.protocol import MooncakeWindow
from vllm_kvpool.embeds.run_bytes import Bytes, copy_digested, new_digest, segments
from vllm_kvpool.embeds.write_staging import Piece, Staging
from vllm_kvpool.embeds.writes import RowWrite, WriteError
from vllm_kvpool.errors import ConfigError
from vllm_kvpool.storage.mooncake_engine import (
    FAILED,
    OK,
    REFUSED,
    WRITTEN,
    NativeEngine,
    SharedEngine,
)

logger = logging.getLogger(__name__)

PIECE_BYTES = 4 << 20
MIN_PIECES = 2  # one is filled while the other is written
MAX_FLYING = 2  # pieces of writes that go together
PAGE_BYTES = 4096
MAX_RANGES = 32  # writes begun for one piece; Mooncake queues 1024 for a peer
MAX_SESSIONS = 1024
MAX_KINDS = 8 * MAX_SESSIONS  # of writes: to a session, of a size

TRANSFER_TIMEOUT_S = 30.0  # Mooncake's own; for a piece, beside a second for each GiB
BYTES_PER_S: Final = 1 << 30  # the slowest network that is waited for
QUARANTINE_FACTOR = 2
CLOSE_WAIT_S = 2.0

SPIN_S = 150e-6  # a small write has ended by then; sleeping would double what it takes
MIN_PAUSE_S = 50e-6
MAX_PAUSE_S = 1e-3
PAUSE_SHARE = 0.125  # of the time that a write has taken so far: about as late its end is seen
# A write of its size should take so long that it is not asked about before; a question costs its
# thread a turn on a core that the network's threads could use.
SURE_SHARE = 0.5  # of what such writes have taken
MAX_SURE_S = 5e-3  # after a network that was slow is fast again
LAST_SHARE = 0.25  # of the last one, in what they have taken


def timeout_of(nbytes: int) -> float:
    """How long writes of so many bytes may take."""
    return TRANSFER_TIMEOUT_S + nbytes / BYTES_PER_S


@dataclass(slots=True)
class _Range:
    """Bytes of a piece, from `start` on, for bytes of the window."""

    start: int
    offset: int
    nbytes: int


@dataclass(slots=True)
class _Sent:
    """A piece on its way."""

    piece: Piece
    nbytes: int
    begun: float
    numbers: list[int] = field(default_factory=list)  # of transfers that have not ended


class MooncakeWriter:
    """See the module docstring. Any thread may write; each write runs in its caller's."""

    def __init__(
        self,
        engine: SharedEngine,
        native: NativeEngine,
        staging_bytes: int,
        *,
        memory_from: MemorySource,
        clock: Callable[[], float],
        sleep: Callable[[float], None],
    ) -> None:
        piece_bytes = min(PIECE_BYTES, staging_bytes // MIN_PIECES // PAGE_BYTES * PAGE_BYTES)
        if not piece_bytes:
            raise ConfigError(
                f"staging_bytes={staging_bytes} is too little; {MIN_PIECES * PAGE_BYTES} is the "
                f"least, and {MIN_PIECES * PIECE_BYTES} or more for each writer is fast"
            )
        self._engine = engine
        self.native = native
        self.clock = clock
        self._sleep = sleep
        nbytes = staging_bytes // piece_bytes * piece_bytes
        self._memory = HostMemory(nbytes, memory_from)
        buffer = self._memory.buffer
        engine.register(buffer.address, buffer.nbytes)
        self.staging = Staging(buffer, self._memory.array, piece_bytes, self._has_ended, clock)
        self._closing = threading.Event()
        # By writes to a session, of so many bits of bytes. Without a lock: an update may be lost.
        self._taken_s: dict[tuple[str, int], float] = {}
        self._lock = threading.Lock()  # guards what follows
        self._reached: set[str] = set()  # sessions whose last write has succeeded

    def write(self, window: MooncakeWindow, writes: Sequence[RowWrite]) -> list[tuple[int, ...]]:
        """A digest for each run of each; WriteError says that none of them is certain."""
        self._reach(window.session)
        flight = _Flight(self, window)
        try:
            digests = [flight.carry(write) for write in writes]
            flight.finish()
        except WriteError:
            with self._lock:
                self._reached.discard(window.session)
            raise
        finally:
            flight.leave()
        with self._lock:
            if len(self._reached) >= MAX_SESSIONS:
                self._reached.clear()
            self._reached.add(window.session)
        return digests

    def close(self) -> None:
        """End writes that go on, and let the memory go once nothing reads it any more."""
        self._closing.set()
        self.staging.close()
        deadline = self.clock() + CLOSE_WAIT_S
        while not (is_quiet := self.staging.is_quiet()) and self.clock() < deadline:
            self._sleep(MAX_PAUSE_S)
        if not is_quiet:
            logger.warning("kvpool: embedding writes are still on their way at the end")
        self._engine.unregister(self._memory.buffer.address)
        self._memory.retire()

    def take(self, *, wait: bool) -> Piece | None:
        """A piece of the staging memory; WriteError if it is waited for in vain."""
        if not wait:
            return self.staging.try_take()
        piece = self.staging.take(TRANSFER_TIMEOUT_S)
        if piece is None:
            self._check_open()
            raise WriteError(
                f"no staging memory for {TRANSFER_TIMEOUT_S:g} s: "
                f"{self.staging.quarantined_bytes()} of "
                f"{self.staging.num_pieces * self.staging.piece_bytes} bytes are in quarantine",
                quiesced=True,
            )
        return piece

    def send(self, window: MooncakeWindow, sent: _Sent, ranges: list[_Range]) -> None:
        """Begin the writes of a piece."""
        for part in ranges:
            source, target = sent.piece.address + part.start, window.base + part.offset
            number = self.native.transfer_submit_write(window.session, source, target, part.nbytes)
            sent.numbers.append(number)
            if number == REFUSED:
                raise WriteError(f"Mooncake refuses to write to {window.session}", quiesced=False)

    def wait(self, window: MooncakeWindow, sent: _Sent) -> None:
        """Return when all writes of a piece have ended well."""
        deadline = sent.begun + timeout_of(sent.nbytes)
        kind = window.session, sent.nbytes.bit_length()
        known_s = self._taken_s.get(kind, 0.0)
        sure_at = sent.begun + min(SURE_SHARE * known_s, MAX_SURE_S)
        was_early = False  # so that it is known when the write ended
        while sent.numbers:
            now = self.clock()
            if now < sure_at - MIN_PAUSE_S:
                self._sleep(min(sure_at - now, MAX_PAUSE_S))
                continue
            answer = self.native.transfer_check_status(sent.numbers[-1])
            if answer in (WRITTEN, FAILED):
                sent.numbers.pop()
                if answer == FAILED:
                    raise WriteError("Mooncake's transfer failed", quiesced=False)
                continue
            was_early = True
            if now >= deadline:
                raise WriteError("Mooncake's transfer does not end", quiesced=False)
            if self._closing.is_set():
                raise WriteError("the process ends", quiesced=False)
            spent = now - sent.begun
            if spent >= SPIN_S:
                self._sleep(min(max(PAUSE_SHARE * spent, MIN_PAUSE_S), MAX_PAUSE_S))
        taken_s = self.clock() - sent.begun if was_early else 0.0
        if len(self._taken_s) >= MAX_KINDS:
            self._taken_s.clear()
        self._taken_s[kind] = known_s + LAST_SHARE * (taken_s - known_s)

    def leave(self, sent: _Sent) -> None:
        """A piece comes back, as soon as nothing reads it."""
        if sent.numbers:
            quarantine_s = QUARANTINE_FACTOR * timeout_of(self.staging.piece_bytes)
            self.staging.quarantine(sent.piece, sent.numbers, quarantine_s)
        else:
            self.staging.give(sent.piece)

    def _check_open(self) -> None:
        if self._closing.is_set():
            raise WriteError("the process ends", quiesced=True)

    def _has_ended(self, number: int) -> bool:
        # What is refused may have been begun in part, and has no number to ask about.
        if number == REFUSED:
            return False
        return self.native.transfer_check_status(number) in (WRITTEN, FAILED)

    def _reach(self, session: str) -> None:
        """WriteError if nobody answers there.

        Only so it is certain that nothing has been sent; and the engine connects to a session under
        a lock that holds up writes to all others.
        """
        self._check_open()
        with self._lock:
            if session in self._reached:
                return
        if (code := self.native.send_probe(session)) != OK:
            raise WriteError(f"no Mooncake engine answers at {session} ({code})", quiesced=True)


class _Flight:
    """What writes that go together have filled and sent. One thread's."""

    def __init__(self, writer: MooncakeWriter, window: MooncakeWindow) -> None:
        self._writer = writer
        self._window = window
        self._piece: Piece | None = None
        self._used = 0
        self._ranges: list[_Range] = []
        self._flying: deque[_Sent] = deque()

    def carry(self, write: RowWrite) -> tuple[int, ...]:
        """Send the runs of a write; a digest for each."""
        digests = []
        for run in write.runs:
            digest = new_digest(write.seed)
            for offset, data in segments(write.planes, write.shape, run):
                self.add(offset, data, digest)
            digests.append(int(digest.intdigest()))
        return tuple(digests)

    def add(self, offset: int, data: Bytes, digest: object) -> None:
        """Send bytes to `offset` of the window, at the latest with `finish`."""
        at = 0
        while at < data.nbytes:
            piece = self._room(offset + at)
            nbytes = min(data.nbytes - at, piece.array.nbytes - self._used)
            target = piece.array[self._used : self._used + nbytes]
            copy_digested(target, data[at : at + nbytes], digest)
            last = self._ranges[-1] if self._ranges else None
            if last is not None and last.offset + last.nbytes == offset + at:
                last.nbytes += nbytes
            else:
                self._ranges.append(_Range(self._used, offset + at, nbytes))
            self._used += nbytes
            at += nbytes

    def finish(self) -> None:
        """Send what is left, and wait for everything."""
        self._send()
        while self._flying:
            self._land()

    def leave(self) -> None:
        """Give all pieces back, those that something may still read to quarantine."""
        if self._piece is not None:
            self._writer.staging.give(self._piece)
            self._piece = None
        while self._flying:
            self._writer.leave(self._flying.popleft())

    def _room(self, offset: int) -> Piece:
        """The piece that the next bytes, for `offset`, go to."""
        if self._piece is not None:
            is_next = self._ranges[-1].offset + self._ranges[-1].nbytes == offset
            is_full = len(self._ranges) == MAX_RANGES and not is_next
            if is_full or self._used == self._piece.array.nbytes:
                self._send()
        if self._piece is None:
            if len(self._flying) == MAX_FLYING:
                self._land()
            while self._piece is None:
                self._piece = self._writer.take(wait=not self._flying)
                if self._piece is None:
                    self._land()
        return self._piece

    def _send(self) -> None:
        if self._piece is None:
            return
        sent = _Sent(self._piece, self._used, self._writer.clock())
        self._flying.append(sent)
        ranges, self._ranges = self._ranges, []
        self._piece, self._used = None, 0
        self._writer.send(self._window, sent, ranges)

    def _land(self) -> None:
        """Wait for the oldest piece."""
        self._writer.wait(self._window, self._flying[0])
        self._writer.leave(self._flying.popleft())
