"""Windows and writes with Mooncake's transfer engine.

Rows are copied into registered staging memory, piece by piece; each piece is written while the
next one is filled. The rows' own memory is never registered: Mooncake refuses overlapping
regions, and items come and go. Writes are submitted and polled: the engine's blocking calls spin
on a core and cannot be given up. A failed write has ended on this side, but its bytes may still
be in sockets; one that was given up may still read its piece, which is quarantined.
"""

import contextlib
import logging
import mmap
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from vllm_kvpool.embeds.dataplane.row_bytes import (
    Bytes,
    RowCopy,
    WriteError,
    copy_digested,
    other_transport,
)
from vllm_kvpool.embeds.protocol.messages import MooncakeWindow, Window
from vllm_kvpool.errors import ConfigError
from vllm_kvpool.storage.base import Buffer
from vllm_kvpool.storage.mooncake_engine import (
    FAILED,
    OK,
    REFUSED,
    WRITTEN,
    NativeEngine,
    SharedEngine,
    session_of,
)

logger = logging.getLogger(__name__)

PIECE_BYTES = 4 << 20
MIN_PIECES = 2  # one is filled while the other is written
MAX_FLYING = 2  # pieces of one call in flight
PAGE_BYTES = 4096
MAX_RANGES = 32  # writes submitted for one piece; Mooncake queues 1024 for a peer
MAX_SESSIONS = 1024
MAX_KINDS = 8 * MAX_SESSIONS  # (session, size) pairs whose write times are known

TRANSFER_TIMEOUT_S = 30.0  # Mooncake's own; plus a second for each GiB of a piece
BYTES_PER_S: Final = 1 << 30  # of the slowest network that is waited for
QUARANTINE_FACTOR = 2
CLOSE_WAIT_S = 2.0

SPIN_S = 150e-6  # a small write ends within it; sleeping would double its time
MIN_PAUSE_S = 50e-6
MAX_PAUSE_S = 1e-3
PAUSE_SHARE = 0.125  # of a write's time so far: its end is seen so late at most
# A write is not polled before the time that writes of its size usually take: a poll costs a turn on
# a core that the network's threads could use.
SURE_SHARE = 0.5  # of the usual time
MAX_SURE_S = 5e-3  # bounds the delay once a slow network is fast again
LAST_SHARE = 0.25  # weight of the last write in the usual time
WAIT_STEP_S = 0.02  # the end of a quarantine is not signalled
ALIGNMENT = 2 << 20  # of huge pages; devices that want any ask for no more

_retired: list["RegisteredMemory"] = []


class RegisteredMemory:
    """`nbytes` aligned to `ALIGNMENT` for a network to read and write: committed, never unmapped.

    A transfer that was given up may still run when the owner is done: at an unmapped address it
    would end the process or hit other data. So `retire` frees the pages and keeps the addresses.
    Any thread.
    """

    def __init__(self, nbytes: int) -> None:
        try:
            self._memory = mmap.mmap(-1, nbytes + ALIGNMENT, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise ConfigError(
                f"arena_bytes={nbytes} asks for memory that the system refuses ({error}); lower "
                "it, or raise its limit (ulimit -v, vm.overcommit_memory)"
            ) from error
        with contextlib.suppress(OSError):  # a kernel without transparent huge pages
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        whole: Bytes = np.frombuffer(self._memory, np.uint8)
        start = -_address(whole) % ALIGNMENT
        self.array = whole[start : start + nbytes]
        # Commits the pages, or the first transfers would wait for them.
        self.array[:: mmap.PAGESIZE] = 0

    @property
    def buffer(self) -> Buffer:
        """The memory as stores and engines take it."""
        return Buffer(_address(self.array), self.array.data)

    def retire(self) -> None:
        """Free the pages; transfers that still run may end."""
        _retired.append(self)
        self._memory.madvise(mmap.MADV_DONTNEED)


def _address(array: Bytes) -> int:
    return int(array.__array_interface__["data"][0])


class MooncakeLandingWindow:
    """A window registered with this process's Mooncake engine."""

    def __init__(
        self,
        engine: SharedEngine,
        native: NativeEngine,
        nbytes: int,
        host: str,
    ) -> None:
        self._engine = engine
        self._memory: RegisteredMemory | None = RegisteredMemory(nbytes)
        buffer = self._memory.buffer
        engine.register(buffer.address, nbytes)
        self.nbytes = nbytes
        self.array = self._memory.array
        self.window = MooncakeWindow(session_of(host, native), buffer.address, nbytes)

    def close(self) -> None:
        """Unregister the memory and free its pages; its addresses stay."""
        if self._memory is not None:
            self._engine.unregister(self._memory.buffer.address)
            self._memory.retire()
            self._memory = None


@dataclass(slots=True, eq=False)
class _Sent:
    """A piece in flight."""

    piece: Bytes
    nbytes: int
    begun: float
    numbers: list[int] = field(default_factory=list)  # transfers that have not ended


class PiecePool:
    """The registered staging memory: a fixed number of equal pieces.

    FREE -> (take) TAKEN -> (give_back) FREE, or -> (quarantine) QUARANTINED -> FREE when the
    network is done with the piece, or `quarantine_s` later. A writer that holds a piece takes
    another one only without waiting, or writers would wait for one another. `has_ended(transfer)`
    does not block, and is not called again for a transfer that has ended.
    """

    def __init__(
        self,
        array: Bytes,
        piece_bytes: int,
        has_ended: Callable[[int], bool],
        clock: Callable[[], float],
    ) -> None:
        self.piece_bytes = piece_bytes
        self.num_pieces = array.nbytes // piece_bytes
        self._has_ended = has_ended
        self._clock = clock
        self._changed = threading.Condition()  # guards what follows
        self._free = [
            array[start : start + piece_bytes]
            for start in range(0, self.num_pieces * piece_bytes, piece_bytes)
        ]
        self._held: list[tuple[_Sent, float]] = []  # in quarantine, and until when
        self._is_closed = False

    def take(self, timeout_s: float) -> Bytes | None:
        """Return a piece; None if none is free in time, or after `close`.

        A caller that waits must hold no piece.
        """
        deadline = self._clock() + timeout_s
        with self._changed:
            while True:
                self._end_quarantines()
                if self._free and not self._is_closed:
                    return self._free.pop()
                if self._is_closed or self._clock() >= deadline:
                    return None
                self._changed.wait(WAIT_STEP_S)

    def give_back(self, piece: Bytes) -> None:
        """Release a piece that has no reader any more."""
        with self._changed:
            self._free.append(piece)
            self._changed.notify()

    def quarantine(self, sent: _Sent, quarantine_s: float) -> None:
        """Set a piece aside that transfers that were given up may still read."""
        with self._changed:
            self._held.append((sent, self._clock() + quarantine_s))

    def close(self) -> None:
        """Wake all waiting writers, whose `take` fails from now on."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def is_quiet(self) -> bool:
        """Return True if no piece is taken or quarantined."""
        with self._changed:
            self._end_quarantines()
            return len(self._free) == self.num_pieces

    def quarantined_bytes(self) -> int:
        """Return the bytes that the network may still read."""
        with self._changed:
            self._end_quarantines()
            return len(self._held) * self.piece_bytes

    def _end_quarantines(self) -> None:
        # Under the lock, so that no two threads poll the same transfer.
        now = self._clock()
        for sent, until in tuple(self._held):
            while sent.numbers and self._has_ended(sent.numbers[-1]):
                sent.numbers.pop()
            if not sent.numbers or now >= until:
                self._held.remove((sent, until))
                self._free.append(sent.piece)


def timeout_of(nbytes: int) -> float:
    """Return the seconds that writes of so many bytes may take."""
    return TRANSFER_TIMEOUT_S + nbytes / BYTES_PER_S


@dataclass(slots=True)
class _Range:
    """Bytes of a piece from `start` on, for bytes of the window from `offset` on."""

    start: int
    offset: int
    nbytes: int


class MooncakeWriter:
    """Writes to Mooncake windows. Any thread may write; a write runs in its caller's."""

    def __init__(
        self,
        engine: SharedEngine,
        native: NativeEngine,
        staging_bytes: int,
        *,
        clock: Callable[[], float],
        sleep: Callable[[float], None],
    ) -> None:
        piece_bytes = min(PIECE_BYTES, staging_bytes // MIN_PIECES // PAGE_BYTES * PAGE_BYTES)
        if not piece_bytes:
            raise ConfigError(
                f"staging_bytes={staging_bytes} is less than {MIN_PIECES * PAGE_BYTES}, the least; "
                f"{MIN_PIECES * PIECE_BYTES} for each writer thread are fast"
            )
        self._engine = engine
        self.native = native
        self.clock = clock
        self._sleep = sleep
        nbytes = staging_bytes // piece_bytes * piece_bytes
        self._memory = RegisteredMemory(nbytes)
        buffer = self._memory.buffer
        engine.register(buffer.address, buffer.nbytes)
        self.staging = PiecePool(self._memory.array, piece_bytes, self._has_ended, clock)
        self._closing = threading.Event()
        # By session and bits of the size. Without a lock: an update may be lost.
        self._taken_s: dict[tuple[str, int], float] = {}
        self._lock = threading.Lock()  # guards what follows
        self._reached: set[str] = set()  # sessions whose last write succeeded

    def write(self, window: Window, writes: Sequence[RowCopy]) -> list[tuple[int, ...]]:
        """Write, and return a digest for each run of each write.

        After a WriteError none of the runs is certain.
        """
        if not isinstance(window, MooncakeWindow):
            raise other_transport("mooncake")
        for rows in writes:
            rows.check(window.nbytes)
        self._check_reachable(window.session)
        flight = _InFlight(self, window)
        try:
            digests = [rows.copy(flight.add) for rows in writes]
            flight.finish()
        except WriteError:
            with self._lock:
                self._reached.discard(window.session)
            raise
        finally:
            flight.release()
        with self._lock:
            if len(self._reached) >= MAX_SESSIONS:
                self._reached.clear()
            self._reached.add(window.session)
        return digests

    def close(self) -> None:
        """End writes under way, and free the memory once nothing reads it."""
        self._closing.set()
        self.staging.close()
        deadline = self.clock() + CLOSE_WAIT_S
        while not (is_quiet := self.staging.is_quiet()) and self.clock() < deadline:
            self._sleep(MAX_PAUSE_S)
        if not is_quiet:
            logger.warning(
                "kvpool: writes of embeddings are still in flight at shutdown; their memory is kept"
            )
        self._engine.unregister(self._memory.buffer.address)
        self._memory.retire()

    def take(self, *, wait: bool) -> Bytes | None:
        """Return a piece of the staging memory; WriteError if none is free in time."""
        piece = self.staging.take(TRANSFER_TIMEOUT_S if wait else 0.0)
        if piece is None and wait:
            self._check_open()
            raise WriteError(
                f"no staging memory for {TRANSFER_TIMEOUT_S:g} s: "
                f"{self.staging.quarantined_bytes()} of "
                f"{self.staging.num_pieces * self.staging.piece_bytes} bytes are in quarantine",
                quiesced=True,
            )
        return piece

    def submit(self, window: MooncakeWindow, sent: _Sent, ranges: list[_Range]) -> None:
        """Start a write for each range; WriteError if the engine refuses one."""
        address = _address(sent.piece)
        for part in ranges:
            source, target = address + part.start, window.base + part.offset
            number = self.native.transfer_submit_write(window.session, source, target, part.nbytes)
            sent.numbers.append(number)
            if number == REFUSED:
                raise WriteError(f"Mooncake refuses to write to {window.session}", quiesced=False)

    def wait(self, window: MooncakeWindow, sent: _Sent) -> None:
        """Return when all writes of a piece have succeeded; WriteError."""
        deadline = sent.begun + timeout_of(sent.nbytes)
        kind = window.session, sent.nbytes.bit_length()
        known_s = self._taken_s.get(kind, 0.0)
        sure_at = sent.begun + min(SURE_SHARE * known_s, MAX_SURE_S)
        was_early = False  # polled before the end, so that the end is known
        while sent.numbers:
            now = self.clock()
            if now < sure_at - MIN_PAUSE_S:
                self._sleep(min(sure_at - now, MAX_PAUSE_S))
                continue
            answer = self.native.transfer_check_status(sent.numbers[-1])
            if answer in (WRITTEN, FAILED):
                sent.numbers.pop()
                if answer == FAILED:
                    raise WriteError(f"Mooncake's write to {window.session} failed", quiesced=False)
                continue
            was_early = True
            if now >= deadline:
                raise WriteError(
                    f"Mooncake's write to {window.session} did not end within "
                    f"{timeout_of(sent.nbytes):.0f} s",
                    quiesced=False,
                )
            if self._closing.is_set():
                raise WriteError("the process ends", quiesced=False)
            spent = now - sent.begun
            if spent >= SPIN_S:
                self._sleep(min(max(PAUSE_SHARE * spent, MIN_PAUSE_S), MAX_PAUSE_S))
        taken_s = self.clock() - sent.begun if was_early else 0.0
        if len(self._taken_s) >= MAX_KINDS:
            self._taken_s.clear()
        self._taken_s[kind] = known_s + LAST_SHARE * (taken_s - known_s)

    def release(self, sent: _Sent) -> None:
        """Return a piece to the pool, or quarantine it while something may read it."""
        if sent.numbers:
            quarantine_s = QUARANTINE_FACTOR * timeout_of(self.staging.piece_bytes)
            self.staging.quarantine(sent, quarantine_s)
        else:
            self.staging.give_back(sent.piece)

    def _check_open(self) -> None:
        if self._closing.is_set():
            raise WriteError("the process ends", quiesced=True)

    def _has_ended(self, number: int) -> bool:
        # A refused write may have started in part, and has no number to poll.
        if number == REFUSED:
            return False
        return self.native.transfer_check_status(number) in (WRITTEN, FAILED)

    def _check_reachable(self, session: str) -> None:
        """Raise WriteError, quiesced, if no engine answers at a session.

        A probe makes certain that nothing was sent; and the engine connects to a session under a
        lock that delays writes to all others.
        """
        self._check_open()
        with self._lock:
            if session in self._reached:
                return
        if (code := self.native.send_probe(session)) != OK:
            raise WriteError(f"no Mooncake engine answers at {session} ({code})", quiesced=True)


class _InFlight:
    """The pieces of writes that go together, filled and in flight. One thread's."""

    def __init__(self, writer: MooncakeWriter, window: MooncakeWindow) -> None:
        self._writer = writer
        self._window = window
        self._piece: Bytes | None = None
        self._used = 0
        self._ranges: list[_Range] = []
        self._flying: deque[_Sent] = deque()

    def add(self, offset: int, data: Bytes, digest: object) -> None:
        """Send bytes to `offset` of the window, at the latest with `finish`."""
        at = 0
        while at < data.nbytes:
            piece = self._room(offset + at)
            nbytes = min(data.nbytes - at, piece.nbytes - self._used)
            target = piece[self._used : self._used + nbytes]
            copy_digested(target, data[at : at + nbytes], digest)
            last = self._ranges[-1] if self._ranges else None
            if last is not None and last.offset + last.nbytes == offset + at:
                last.nbytes += nbytes
            else:
                self._ranges.append(_Range(self._used, offset + at, nbytes))
            self._used += nbytes
            at += nbytes

    def finish(self) -> None:
        """Send the rest, and wait for everything."""
        self._submit_piece()
        while self._flying:
            self._wait_for_oldest()

    def release(self) -> None:
        """Return all pieces, those that something may still read to quarantine."""
        if self._piece is not None:
            self._writer.staging.give_back(self._piece)
            self._piece = None
        while self._flying:
            self._writer.release(self._flying.popleft())

    def _room(self, offset: int) -> Bytes:
        """Return the piece that the next bytes, for `offset`, go to."""
        if self._piece is not None:
            is_next = self._ranges[-1].offset + self._ranges[-1].nbytes == offset
            is_full = len(self._ranges) == MAX_RANGES and not is_next
            if is_full or self._used == self._piece.nbytes:
                self._submit_piece()
        if self._piece is None:
            if len(self._flying) == MAX_FLYING:
                self._wait_for_oldest()
            while self._piece is None:
                self._piece = self._writer.take(wait=not self._flying)
                if self._piece is None:
                    self._wait_for_oldest()
        return self._piece

    def _submit_piece(self) -> None:
        if self._piece is None:
            return
        sent = _Sent(self._piece, self._used, self._writer.clock())
        self._flying.append(sent)
        ranges, self._ranges = self._ranges, []
        self._piece, self._used = None, 0
        self._writer.submit(self._window, sent, ranges)

    def _wait_for_oldest(self) -> None:
        """Wait for the oldest piece."""
        self._writer.wait(self._window, self._flying[0])
        self._writer.release(self._flying.popleft())
