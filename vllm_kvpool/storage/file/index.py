"""The index of a `file://` store: what is stored, how much, and what is evicted next.

All processes on the directory share it. Only leaves, chunks that no stored chunk comes after, are
evicted, lowest score first. Rows are written before files and removed after them, so `kill -9`
leaves a count that is too high, never too low. The charge of a cell ends only in a transaction that
finds no file of it and no other writer that holds its chunk; a writer publishes files of chunks
that it holds. A transaction changes about `MAX_ROWS` rows and touches no other file, except to ask
for files of cells whose charge may end. Nothing is synced, so the first process that opens
the index after a reboot checks all rows. It sets an index aside whose rows do not agree, and adds
missing files to a sound one. A lost index is rebuilt from the files, which are read without it.
"""

import contextlib
import errno
import logging
import os
import sqlite3
import stat
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm_kvpool.errors import StoreError
from vllm_kvpool.storage.eviction import EvictionPolicy, highest_score
from vllm_kvpool.storage.file.file_system import NO_ROOM, file_system_of
from vllm_kvpool.storage.file.paths import create_file, set_aside
from vllm_kvpool.storage.file.rows import (
    LEAVING,
    MAX_EVICTED,
    MAX_ROWS,
    MAX_TIME_NS,
    WAIT_S,
    ChunkRow,
    DamagedIndex,
    Rows,
    StoredCell,
    check_consistency,
    files_of,
    number_in,
    prepare,
)

logger = logging.getLogger(__name__)

POLL_S = 0.0005
MAX_NOTED_HITS = 65_536  # waiting to be written; further hits are dropped
SOFT_SHARE = 0.02  # of the size, by which it may be exceeded
PINNED_SHARE = 0.5  # of the size, at most, is pinned
LEAST_BYTES = 256 << 10  # free space that an index and its journal need
LEAST_FILES = 3
BOOT_ID = "/proc/sys/kernel/random/boot_id"

_ERRNOS = {
    sqlite3.SQLITE_FULL: errno.ENOSPC,
    sqlite3.SQLITE_IOERR: errno.EIO,
    sqlite3.SQLITE_NOMEM: errno.ENOMEM,
    sqlite3.SQLITE_PERM: errno.EACCES,
    sqlite3.SQLITE_CANTOPEN: errno.ENOENT,
    sqlite3.SQLITE_READONLY: errno.EROFS,
}
_MISUSE = (sqlite3.ProgrammingError, sqlite3.InterfaceError, sqlite3.DataError)
"""SQLite's errors for a caller's mistake. They do not mean damage."""


class IndexBusy(StoreError):
    """Another process or thread has held the index for `WAIT_S`."""


@dataclass(eq=False, slots=True)
class Reservation:
    """Space for one round of a put, from `reserve` to `close_reservation`; one thread at a time."""

    writer: str
    round: int = 0
    opened: tuple[int, int] | None = None  # identifies the index file it was made in
    cells: tuple[StoredCell, ...] = ()
    """The cells that were charged: all but those whose chunk or its parent is being evicted."""
    evicted: tuple[StoredCell, ...] = ()
    """Cells whose files the caller must delete before it writes."""
    room_bytes: int = 0
    """Free space after `cells`. If negative, nothing was charged: close and reserve again."""
    stored: set[bytes] = field(default_factory=set)
    """Names of the cells whose file exists, whichever writer wrote it."""
    undeleted: set[bytes] = field(default_factory=set)
    """Names of the evicted cells whose file the caller could not delete; they stay charged."""

    def unstored(self) -> list[StoredCell]:
        """Return the reserved cells whose put has not succeeded."""
        return [cell for cell in self.cells if cell.name not in self.stored]


class _Hits(NamedTuple):
    """The number of a chunk's cells that were read, and the time of the last read."""

    num_cells: int
    time_ns: int


class FileIndex:
    """The index, as one open store uses it: one connection, under a lock; any thread may call.

    An index is damaged if SQLite says so, or if rows were read that no release can have written
    (`DamagedIndex`). It is then renamed, and the files that were renamed last are kept. What a
    caller does wrong raises as it is and changes nothing.

    `check_path` raises OSError if the path to the index passes a symbolic link; `has_file` is False
    for a cell that certainly has no file.
    """

    def __init__(
        self,
        path: str,
        policy: EvictionPolicy,
        clock_ns: Callable[[], int],
        check_path: Callable[[str], None],
        has_file: Callable[[StoredCell], bool],
    ) -> None:
        self._path = path
        self._has_file = has_file
        self._check_path = check_path
        self._policy = policy
        self._wall_ns = clock_ns
        self._lock = threading.Lock()  # guards the connection
        self._db: sqlite3.Connection | None = None
        self._opened: tuple[int, int] | None = None  # device, inode
        self._hits_lock = threading.Lock()
        self._hits: dict[bytes, _Hits] = {}  # by chunk, not written yet; guarded by `_hits_lock`
        # On a network file system a reboot of this host loses no writes.
        is_local = file_system_of(os.path.dirname(path)).is_local
        check = self._check_after_reboot if is_local else self.used_bytes
        with contextlib.suppress(OSError):
            check()  # replaces a damaged index
        check()

    def close(self) -> None:
        """Close the connection to the database; a call under way ends first."""
        with self._lock:
            self._disconnect()

    def _clock_ns(self) -> int:
        """Return the wall clock, cut to what a row can hold."""
        return min(max(self._wall_ns(), 1), MAX_TIME_NS)

    # Puts

    def reserve(
        self,
        writer: str,
        cells: Sequence[StoredCell],
        size_bytes: int,
        recycled_bytes: int = 0,
        disk_bytes: int = sys.maxsize,
    ) -> Reservation | None:
        """Hold the chunks of up to `MAX_ROWS` cells, evict and charge; None if the store is full.

        The cells have one owner; what is evicted is of the owner who uses the most. The caller
        deletes the files of `evicted`, writes its own and closes the reservation. If one
        transaction cannot evict enough (`room_bytes` < 0), the caller closes it and calls again.
        `recycled_bytes` are those of files that the writer keeps, `disk_bytes` what the disk has
        for more files (below 0: it needs some of what is here). While the index is incomplete, new
        chunks may take `SOFT_SHARE` of the size and are evicted for each other only.
        """
        assert len(cells) <= MAX_ROWS, len(cells)
        if sum(cell.nbytes for cell in cells) > size_bytes:
            return None
        with contextlib.suppress(_NoRoom), self._writing() as rows:
            rows.set_recycled(writer, recycled_bytes)
            self._write_hits(rows)
            chunks = self._find(rows, cells)
            for chunk in chunks.values():
                chunk.holders += 1
            accepted = tuple(cell for cell in cells if cell.chunk in chunks)
            # Files that are charged and not written yet will take of what the disk has free.
            fitting_bytes = min(size_bytes, rows.used_bytes + disk_bytes - rows.unwritten_bytes())
            evicted, room_bytes = self._evict(rows, fitting_bytes, accepted)
            made = Reservation(writer, rows.add_round(writer, chunks.values(), evicted))
            made.opened, made.room_bytes = self._opened, room_bytes
            made.evicted = rows.cells_of(evicted)
            if room_bytes >= 0:
                self._charge(rows, chunks, accepted, size_bytes)
                made.cells = accepted
                rows.set_unwritten(made.round, sum(cell.nbytes for cell in accepted))
            else:  # no other writer may use this space before the files are deleted
                freed_bytes = sum(chunk.nbytes for chunk in evicted)
                rows.set_recycled(writer, recycled_bytes + freed_bytes)
            return made
        return None

    def hold(self, writer: str, chunks: Sequence[bytes], recycled_bytes: int) -> Reservation:
        """Protect up to `MAX_ROWS` stored chunks from eviction until `close_reservation`."""
        assert len(chunks) <= MAX_ROWS, len(chunks)
        with self._writing() as rows:
            rows.set_recycled(writer, recycled_bytes)
            held = [chunk for chunk in rows.named(chunks) if chunk.holders != LEAVING]
            for chunk in held:
                chunk.holders += 1
            return Reservation(writer, rows.add_round(writer, held, ()), self._opened)

    def close_reservation(
        self, reservation: Reservation, recycled_bytes: int | None = None
    ) -> None:
        """End a round whose writes have ended and whose evicted files are deleted."""
        stored = [cell for cell in reservation.cells if cell.name in reservation.stored]
        with self._writing() as rows:
            if recycled_bytes is not None:
                rows.set_recycled(reservation.writer, recycled_bytes)
            if reservation.opened != self._opened:  # the index was replaced: add what was written
                self._charge(rows, self._find(rows, stored), stored, 0)
                return
            held, evicted = rows.round(reservation.writer, reservation.round)
            rows.remove_round(reservation.writer, reservation.round)
            now_ns = self._clock_ns()
            for chunk in evicted:
                chunk.holders = 0
                chunk.keep_only(reservation.undeleted)
                if chunk.nbytes:  # the next round evicts another
                    chunk.evicted, chunk.score = 0, self._policy.on_put(now_ns)
                else:
                    chunk.expires = 0
            chunks = {chunk.name: chunk for chunk in held}
            for chunk in held:
                chunk.holders = max(chunk.holders - 1, 0)
            self._end_charges(chunks, reservation.unstored())
            for cell in stored:  # damaged files may have been removed meanwhile
                if cell.chunk in chunks:
                    chunks[cell.chunk].add(cell.name, cell.nbytes)

    def expire(self, writer: str) -> Reservation | None:
        """Evict up to `MAX_EVICTED` chunks whose time to live has ended; None if there are none.

        The caller deletes the files of `evicted` and closes the reservation.
        """
        now_ns = self._clock_ns()
        with self._reading() as db:
            query = (
                "SELECT 1 FROM chunk INDEXED BY expiring WHERE expires > 0 AND expires <= ? LIMIT 1"
            )
            if db.execute(query, (now_ns,)).fetchone() is None:
                return None
        with self._writing() as rows:
            rows.end_pins(now_ns)
            evicted = rows.expired_leaves(now_ns, MAX_EVICTED)
            if not evicted:
                return None
            for chunk in evicted:
                rows.evict(chunk)
            number = rows.add_round(writer, (), evicted)
            return Reservation(writer, number, self._opened, evicted=rows.cells_of(evicted))

    def pin(self, chunks: Sequence[bytes], until_ns: int, size_bytes: int) -> int:
        """Pin stored chunks until a time, within `PINNED_SHARE` of the size; 0 ends their pins.

        Returns the number of chunks that are pinned, or were unpinned.
        """
        count = 0
        until_ns = min(until_ns, MAX_TIME_NS)
        for i in range(0, len(chunks), MAX_ROWS):
            with self._writing() as rows:
                rows.end_pins(self._clock_ns())
                found = [chunk for chunk in rows.named(chunks[i : i + MAX_ROWS]) if chunk.nbytes]
                if until_ns:
                    count += self._pin(rows, found, until_ns, size_bytes)
                for chunk in found if not until_ns else ():
                    count += chunk.pinned_until > 0
                    chunk.pinned_until = 0
        return count

    def left_by(self, writer: str) -> Reservation | None:
        """Return a round that a killed writer has left open; None if none is left.

        Its `cells` are those that no other writer holds. The caller deletes the files of `evicted`
        and closes the reservation.
        """
        with self._writing() as rows:
            number = rows.round_of(writer)
            if number is None:
                return None
            held, evicted = rows.round(writer, number)
            begun = rows.cells_of(chunk for chunk in held if chunk.holders == 1)
            return Reservation(writer, number, self._opened, begun, rows.cells_of(evicted))

    def remove_writer(self, writer: str) -> None:
        """Remove a writer whose rounds are all closed, and its recycled files."""
        with self._writing() as rows:
            rows.remove_writer(writer)

    # Reads

    def note_hits(self, chunks: Iterable[bytes]) -> None:
        """Remember that cells of these chunks, a name each, were read.

        The next put or `write_hits` writes it.
        """
        now_ns = self._clock_ns()
        with self._hits_lock:
            if len(self._hits) < MAX_NOTED_HITS:
                for name, num_cells in Counter(chunks).items():
                    before, _ = self._hits.get(name, (0, 0))
                    self._hits[name] = _Hits(before + num_cells, now_ns)

    def write_hits(self) -> None:
        """Write the hits so far, `MAX_ROWS` in a transaction."""
        for _ in range(0, len(self._hits), MAX_ROWS):
            with self._writing() as rows:
                self._write_hits(rows)

    def used_bytes(self) -> int:
        """Return the bytes of all cells and reservations, of every process."""
        with self._reading() as db:
            return number_in(db.execute("SELECT used_bytes FROM store").fetchone())

    def written_bytes(self) -> int:
        """Return the charge of files that the disk has."""
        with self._reading() as db:
            query = "SELECT used_bytes - (SELECT coalesce(sum(unwritten), 0) FROM round) FROM store"
            return number_in(db.execute(query).fetchone())

    def coldest(self, max_cells: int) -> list[tuple[StoredCell, ...]]:
        """Return the cells of leaves, a tuple for each chunk, in order of eviction.

        Whole chunks, so there may be more than `max_cells`.
        """
        found: list[tuple[StoredCell, ...]] = []
        with self._reading() as db:
            rows = Rows(db)
            for owner in rows.owners_by_use(0, 0):
                for chunk in rows.leaves(owner, max_cells):
                    found.append(rows.cells_of([chunk]))
                    max_cells -= len(found[-1])
                    if max_cells <= 0:
                        return found
        return found

    # Removals: the callers have deleted the files. Charges of chunks that a writer holds stay until
    # the writer closes their round or the chunk is evicted.

    def remove_cells(self, cells: Sequence[StoredCell]) -> None:
        """Remove cells that have no file any more."""
        for i in range(0, len(cells), MAX_ROWS):
            part = cells[i : i + MAX_ROWS]
            with self._writing() as rows:
                found = rows.named(cell.chunk for cell in part)
                self._end_charges({chunk.name: chunk for chunk in found}, part)

    def remove_namespace(self, namespace: str) -> None:
        """Remove every cell of a namespace that has no file any more."""
        last = 0
        while True:
            with self._writing() as rows:
                number = rows.namespace(namespace)
                chunks = rows.after(last)
                own = {chunk.name: chunk for chunk in chunks if chunk.namespace == number}
                self._end_charges(own, rows.cells_of(own.values()))
            if not chunks:
                return
            last = chunks[-1].id

    # Rebuilding

    @property
    def is_complete(self) -> bool:
        """True if the index lists every file; a new one does not."""
        with self._reading() as db:
            return number_in(db.execute("SELECT incomplete_since FROM store").fetchone()) == 0

    def add_found(self, found: Sequence[tuple[StoredCell, int]]) -> None:
        """Add up to `MAX_ROWS` existing files, with their times of writing in nanoseconds.

        Their scores are not above `incomplete_since`, which protects them from eviction until
        `complete`: their children may not have been added yet.
        """
        assert len(found) <= MAX_ROWS, len(found)
        with self._writing() as rows:
            used_bytes = rows.used_bytes
            chunks = self._find(rows, [cell for cell, _ in found])
            owners = {name: rows.owner(name) for name in {cell.owner for cell, _ in found}}
            for cell, written_ns in found:
                chunk = chunks.get(cell.chunk)
                if chunk is not None:
                    if not chunk.nbytes:
                        chunk.owner = owners[cell.owner]
                    chunk.add(cell.name, cell.nbytes)
                    written_ns = min(max(written_ns, 0), rows.incomplete_since)
                    chunk.score = max(chunk.score, written_ns)
            rows.found_bytes += rows.used_bytes - used_bytes

    def complete(self) -> None:
        """Mark the index as complete: every file has been added."""
        with self._writing() as rows:
            rows.incomplete_since = 0

    def _check_after_reboot(self) -> None:
        """Replace an index that a power loss has damaged, and mark a sound one incomplete."""
        boot = _boot()
        with self._reading() as db:
            db.execute("BEGIN")
            try:
                row = db.execute("SELECT boot FROM store").fetchone()
                if row is not None and row[0] == boot:
                    return
                check_consistency(db)
            finally:
                db.execute("ROLLBACK")
        with self._writing() as rows:
            rows.incomplete_since, rows.found_bytes = self._clock_ns(), rows.used_bytes
            rows.db.execute("UPDATE store SET boot = ?", (boot,))

    # Decisions within a transaction

    def _find(self, rows: Rows, cells: Sequence[StoredCell]) -> dict[bytes, ChunkRow]:
        """Return the chunks of cells by name; new ones are made.

        Without those that are being evicted or whose parent is.
        """
        rows.named(name for cell in cells for name in (cell.chunk, cell.parent))
        found: dict[bytes, ChunkRow] = {}
        for cell in cells:
            if cell.chunk not in found:
                chunk = self._find_one(rows, cell)
                if chunk is not None:
                    found[cell.chunk] = chunk
        return found

    def _find_one(self, rows: Rows, cell: StoredCell) -> ChunkRow | None:
        chunk = rows.by_name.get(cell.chunk)
        if chunk is not None and chunk.holders == LEAVING:
            return None
        parent: ChunkRow | None = None
        if cell.parent and (chunk is None or chunk.parent is None):
            position = cell.position if chunk is None else chunk.position
            parent = rows.by_name.get(cell.parent)
            if parent is None:  # not stored, or not yet: a row without bytes
                parent = rows.new(cell.parent, cell.namespace, position - 1)
            if parent.holders == LEAVING:
                return None
            if parent.position >= position:
                parent = None
        if chunk is None:
            chunk = rows.new(cell.chunk, cell.namespace, cell.position)
        if parent is not None:
            chunk.parent = parent.id
            parent.children += 1
        return chunk

    def _charge(
        self,
        rows: Rows,
        chunks: Mapping[bytes, ChunkRow],
        cells: Sequence[StoredCell],
        size_bytes: int,
    ) -> None:
        """Add cells.

        A chunk without cells gets a first score, or the score of a hit if its last eviction is
        remembered. It also gets the time to live of its first writer.
        """
        now_ns = self._clock_ns()
        first = {cell.chunk: cell for cell in reversed(cells)}
        owners = {name: rows.owner(name) for name in {cell.owner for cell in cells}}
        for chunk in chunks.values():
            if chunk.nbytes == 0:
                is_known, chunk.evicted = chunk.evicted > 0, 0
                score = self._policy.on_hit(chunk.score, now_ns) if is_known else None
                chunk.score = self._policy.on_put(now_ns) if score is None else score
                chunk.pinned_until = chunk.expires = chunk.hits = 0
                if chunk.name in first:
                    chunk.expires = first[chunk.name].retention.expires_ns
                    chunk.owner = owners[first[chunk.name].owner]
        for cell in cells:
            if cell.chunk in chunks:
                chunks[cell.chunk].add(cell.name, cell.nbytes)
        pins = {cell.chunk: cell.retention.pinned_until_ns for cell in cells}
        for name, until_ns in pins.items():
            if until_ns and name in chunks:
                self._pin(rows, [chunks[name]], until_ns, size_bytes)

    def _end_charges(self, chunks: Mapping[bytes, ChunkRow], cells: Iterable[StoredCell]) -> None:
        """Remove those of cells that have no file and whose chunk no writer holds."""
        ended: defaultdict[bytes, set[bytes]] = defaultdict(set)
        for cell in cells:
            chunk = chunks.get(cell.chunk)
            if chunk is not None and chunk.holders == 0 and not self._has_file(cell):
                ended[cell.chunk].add(cell.name)
        for name, names in ended.items():
            chunks[name].remove(names)

    def _pin(self, rows: Rows, chunks: Iterable[ChunkRow], until_ns: int, size_bytes: int) -> int:
        """Pin chunks while their share of the size has room; how many are pinned."""
        if until_ns <= self._clock_ns():
            return 0
        room_bytes = int(PINNED_SHARE * size_bytes) - rows.pinned_bytes()
        count = 0
        for chunk in sorted(chunks, key=lambda chunk: chunk.position):
            if chunk.pinned_until == 0 and chunk.nbytes > room_bytes:
                break  # those that come after it are useless without it
            room_bytes -= chunk.nbytes if chunk.pinned_until == 0 else 0
            chunk.pinned_until = max(chunk.pinned_until, until_ns)
            count += 1
        return count

    def _evict(
        self, rows: Rows, size_bytes: int, cells: Sequence[StoredCell]
    ) -> tuple[list[ChunkRow], int]:
        """Evict up to `MAX_EVICTED` leaves until there is room for cells; _NoRoom if too few.

        Returns them, and the free space after `cells`. Their rows stay until `close_reservation`,
        and then as many as the policy asks for, to remember their scores.
        """
        if rows.incomplete_since:
            size_bytes = min(rows.found_bytes, size_bytes) + int(size_bytes * SOFT_SHARE)
        used_bytes = rows.used_bytes
        room_bytes = size_bytes - used_bytes - sum(cell.nbytes for cell in cells)
        evicted: list[ChunkRow] = []
        if room_bytes < 0:
            self._repair_scores(rows)
            rows.end_pins(self._clock_ns())
            owner = rows.owner(cells[0].owner) if cells else 0
            owners = rows.owners_by_use(owner, sum(cell.nbytes for cell in cells))
            with contextlib.closing(rows.take_leaves(owners)) as leaves:
                for chunk in leaves:
                    evicted.append(chunk)
                    room_bytes += chunk.nbytes
                    if room_bytes >= 0 or len(evicted) == MAX_EVICTED:
                        break
                else:
                    raise _NoRoom
            # In bytes, since chunks differ in size: an alias has a thousandth of a cell's.
            rows.forgotten_bytes = rows.evicted_bytes - self._policy.remembered * used_bytes
        return evicted, room_bytes

    def _repair_scores(self, rows: Rows) -> None:
        """Lower the scores of leaves that only a wrong clock can have given."""
        now_ns = self._clock_ns()
        for owner in rows.owners_by_use(0, 0):
            for chunk in rows.leaves(owner, MAX_ROWS, above=highest_score(now_ns)):
                chunk.score = now_ns

    def _write_hits(self, rows: Rows) -> None:
        if rows.incomplete_since:  # a raised score would expose found chunks to eviction
            return
        with self._hits_lock:
            hits = dict(self._hits.popitem() for _ in range(min(MAX_ROWS, len(self._hits))))
        for chunk in rows.named(hits):
            num_cells, time_ns = hits[chunk.name]
            chunk.hits += num_cells
            chunk.score = self._policy.on_hit(chunk.score, time_ns)

    # The connection

    @contextlib.contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        with self._locked(), self._replacing_damage():
            yield self._connected()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[Rows]:
        """Begin a transaction, ended by `Rows.write`; an exception rolls it back."""
        with self._locked(), self._replacing_damage():
            db = self._connected()
            deadline = time.monotonic() + WAIT_S
            while True:
                try:
                    db.execute("BEGIN IMMEDIATE")
                    break
                except sqlite3.OperationalError as error:
                    if not _is_busy(error):
                        raise
                    if time.monotonic() > deadline:
                        raise IndexBusy(
                            f"{self._path} was locked by another process for {WAIT_S:g} s"
                        ) from None
                time.sleep(POLL_S)
            try:
                rows = Rows(db)
                yield rows
                rows.write()
                db.execute("COMMIT")
            except BaseException:
                if db.in_transaction:
                    db.execute("ROLLBACK")
                raise

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        if not self._lock.acquire(timeout=WAIT_S):
            raise IndexBusy(f"{self._path} was in use by another thread for {WAIT_S:g} s")
        try:
            yield
        finally:
            self._lock.release()

    @contextlib.contextmanager
    def _replacing_damage(self) -> Iterator[None]:
        """Set a damaged index aside: the call fails with OSError ESTALE, the next makes one."""
        try:
            yield
        except _MISUSE:
            raise
        except (sqlite3.Error, DamagedIndex) as error:
            # An error without a code is of Python's module: text that is not UTF-8.
            code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF
            if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                raise IndexBusy(f"{self._path} is locked by another process") from None
            if code in _ERRNOS:
                number, text = _ERRNOS[code], f"the index cannot be used: {error}"
                if _is_full(self._path):  # SQLite may say SQLITE_IOERR then
                    number, text = errno.ENOSPC, os.strerror(errno.ENOSPC)
                elif self._opened != _identity(self._path):  # then SQLite may say any error
                    number, text = errno.ESTALE, f"the index was removed meanwhile: {error}"
                raise OSError(number, text, self._path) from error
            self._set_aside(error)
            raise OSError(errno.ESTALE, f"the index was replaced: {error}", self._path) from error

    def _set_aside(self, error: Exception) -> None:
        """Rename the damaged index, unless another process has done so and made a new one."""
        damaged = self._opened
        self._disconnect()
        if damaged is None or damaged != _identity(self._path):
            return
        kept = [set_aside(each) for each in reversed(files_of(self._path))]  # the index last
        logger.warning(
            "file store index %s is damaged or of another release (%s): kept as %s and made anew "
            "from the files, without pins and times to live",
            *(self._path, error, kept[-1]),
        )

    def _connected(self) -> sqlite3.Connection:
        """Return the connection; connect anew if the file was replaced."""
        self._check_path(self._path)
        if self._db is not None and _identity(self._path) == self._opened:
            return self._db
        self._disconnect()
        create_safely(self._path)
        self._opened = _identity(self._path)
        db = sqlite3.connect(self._path, timeout=0, isolation_level=None, check_same_thread=False)
        try:
            prepare(db, self._path, self._clock_ns(), _boot())
        except BaseException:
            db.close()
            raise
        self._db = db
        return db

    def _disconnect(self) -> None:
        if self._db is not None:
            self._db.close()
        self._db = self._opened = None


class _NoRoom(Exception):
    """There are too few leaves; rolls the transaction back."""


def _identity(path: str) -> tuple[int, int] | None:
    """Return the device and inode; None if nothing is there."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def create_safely(path: str) -> None:
    """Create an index that only this user may read, unless a plain file with one name is there.

    What else is there, such as a link, is set aside.
    """
    for each in files_of(path):
        with contextlib.suppress(FileNotFoundError):
            status = os.lstat(each)
            if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
                kept = set_aside(each)
                logger.warning("file store index %s is no file of one name, kept as %s", each, kept)
    with contextlib.suppress(FileExistsError):
        os.close(create_file(path, 0))


def _is_full(path: str) -> bool:
    """Return True if the file system has no blocks or inodes for an index, or a quota refuses them.

    SQLite does not tell EDQUOT from other errors, and `statvfs` shows no quota, so bytes are
    written.
    """
    directory = os.path.dirname(path)
    with contextlib.suppress(OSError):
        left = os.statvfs(directory)
        has_no_inode = left.f_files > 0 and left.f_favail < LEAST_FILES
        if has_no_inode or left.f_bavail * left.f_frsize < LEAST_BYTES:
            return True
    try:
        with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
            file.write(bytes(LEAST_BYTES))
    except OSError as error:
        return error.errno in NO_ROOM
    return False


def _is_busy(error: sqlite3.OperationalError) -> bool:
    return error.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def _boot() -> str:
    with contextlib.suppress(OSError), open(BOOT_ID) as file:
        return file.read().strip()
    return "unknown"
