"""Which chunks a `file://` store holds, how many bytes it uses and what goes next, in SQLite.

One row for each chunk and each cell, shared by every process on the directory. The rules:

* Only a chunk without children in the store is evicted (`leaf`), the lowest score first. So a
  prompt loses its end before its beginning, whichever process writes, reads or restarts.
* Rows come before files and go after them: what lies on the disk is charged, and a kill at any
  point leaves a count that is too high until the chunk is evicted.
* A chunk that is being written or evicted is held by its writer, and no candidate.
* A transaction is about `MAX_ROWS` rows and `MAX_EVICTED` chunks at most, whatever is stored, and
  calls the file system for nothing but the index.
* The index can be lost: it is made anew from the files (`is_complete`), which are read without it.

Triggers keep the sums. Any thread of any process may call; one connection, one lock. The file is
not synced: after a power loss it is checked and, if damaged, replaced.
"""

import contextlib
import errno
import itertools
import logging
import os
import sqlite3
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

from vllm_kvpool.errors import StoreError
from vllm_kvpool.storage.base import ChunkRef
from vllm_kvpool.storage.eviction import EvictionPolicy, highest_score
from vllm_kvpool.storage.file.paths import FILE_MODE

logger = logging.getLogger(__name__)

WAIT_S = 10.0  # for another process's transaction, each of which takes milliseconds
POLL_S = 0.0005
APPLICATION_ID = 0x4B56504C
SCHEMA_VERSION = 3
MAX_ROWS = 128  # cells, hits, holds or chunks without bytes, of one transaction
MAX_EVICTED = 32  # chunks, in one transaction
SWEEP_LEVELS = 4  # of chunks without bytes, each with its parent, that a transaction forgets
MAX_NOTED_HITS = 65_536  # waiting to be written; more are not counted
SOFT_SHARE = 0.02  # how much the size may be exceeded
LEAST_BYTES = 256 << 10  # an index and its journal need so much
LEAST_FILES = 3
MAX_NAMESPACES = 1024  # remembered
ID_BYTES = 16
BOOT_ID = "/proc/sys/kernel/random/boot_id"
LEAVING = -1  # `holders` of a chunk that is being evicted
NOBODY = 0  # the writer that holds what an index which is not complete has found
FOUND_ROUND = 0  # in which it holds that

_SCHEMA = f"""
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS store (
    id INTEGER PRIMARY KEY, used_bytes INTEGER NOT NULL DEFAULT 0,
    found_bytes INTEGER NOT NULL DEFAULT 0, is_complete INTEGER NOT NULL DEFAULT 0,
    boot TEXT NOT NULL DEFAULT '');
INSERT OR IGNORE INTO store (id) VALUES (1);
CREATE TABLE IF NOT EXISTS namespace (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE);
-- A parent's position is lower, so that no chunk comes before itself.
CREATE TABLE IF NOT EXISTS chunk (
    id INTEGER PRIMARY KEY, name BLOB NOT NULL UNIQUE, namespace INTEGER NOT NULL,
    position INTEGER NOT NULL, parent INTEGER, children INTEGER NOT NULL DEFAULT 0,
    holders INTEGER NOT NULL DEFAULT 0, bytes INTEGER NOT NULL DEFAULT 0,
    score INTEGER NOT NULL DEFAULT 0);
CREATE INDEX IF NOT EXISTS leaf ON chunk (score) WHERE children = 0 AND holders = 0 AND bytes > 0;
CREATE INDEX IF NOT EXISTS empty ON chunk (score) WHERE children = 0 AND holders = 0 AND bytes = 0;
CREATE TABLE IF NOT EXISTS cell (
    chunk INTEGER NOT NULL, name BLOB NOT NULL, bytes INTEGER NOT NULL,
    PRIMARY KEY (chunk, name)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS evicted (
    id INTEGER PRIMARY KEY, name BLOB NOT NULL UNIQUE, score INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS writer (
    id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, recycled INTEGER NOT NULL DEFAULT 0);
CREATE TABLE IF NOT EXISTS hold (
    writer INTEGER NOT NULL, round INTEGER NOT NULL, chunk INTEGER NOT NULL,
    PRIMARY KEY (writer, round, chunk)) WITHOUT ROWID;

CREATE TRIGGER IF NOT EXISTS cell_added AFTER INSERT ON cell BEGIN
    UPDATE chunk SET bytes = bytes + NEW.bytes WHERE id = NEW.chunk;
    UPDATE store SET used_bytes = used_bytes + NEW.bytes;
END;
CREATE TRIGGER IF NOT EXISTS cell_removed AFTER DELETE ON cell BEGIN
    UPDATE store SET used_bytes = used_bytes - OLD.bytes
        WHERE (SELECT holders FROM chunk WHERE id = OLD.chunk) != {LEAVING};
    UPDATE chunk SET bytes = bytes - OLD.bytes WHERE id = OLD.chunk;
END;
CREATE TRIGGER IF NOT EXISTS chunk_evicted AFTER UPDATE OF holders ON chunk
WHEN NEW.holders = {LEAVING} BEGIN
    UPDATE store SET used_bytes = used_bytes - NEW.bytes;
    INSERT OR REPLACE INTO evicted (name, score) VALUES (NEW.name, NEW.score);
END;
CREATE TRIGGER IF NOT EXISTS chunk_added AFTER INSERT ON chunk WHEN NEW.parent IS NOT NULL BEGIN
    UPDATE chunk SET children = children + 1 WHERE id = NEW.parent;
END;
CREATE TRIGGER IF NOT EXISTS chunk_moved AFTER UPDATE OF parent ON chunk BEGIN
    UPDATE chunk SET children = children + 1 WHERE id = NEW.parent;
    UPDATE chunk SET children = children - 1 WHERE id = OLD.parent;
END;
CREATE TRIGGER IF NOT EXISTS chunk_removed AFTER DELETE ON chunk BEGIN
    UPDATE chunk SET children = children - 1 WHERE id = OLD.parent;
END;
CREATE TRIGGER IF NOT EXISTS hold_added AFTER INSERT ON hold BEGIN
    UPDATE chunk SET holders = holders + 1 WHERE id = NEW.chunk AND holders != {LEAVING};
END;
CREATE TRIGGER IF NOT EXISTS hold_removed AFTER DELETE ON hold BEGIN
    UPDATE chunk SET holders = max(holders - 1, 0) WHERE id = OLD.chunk;
END;
CREATE TRIGGER IF NOT EXISTS recycled_changed AFTER UPDATE OF recycled ON writer BEGIN
    UPDATE store SET used_bytes = used_bytes + NEW.recycled - OLD.recycled;
END;
CREATE TRIGGER IF NOT EXISTS writer_removed AFTER DELETE ON writer BEGIN
    UPDATE store SET used_bytes = used_bytes - OLD.recycled;
END;
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {SCHEMA_VERSION};
COMMIT;
"""
_ERRNOS = {
    sqlite3.SQLITE_FULL: errno.ENOSPC,
    sqlite3.SQLITE_IOERR: errno.EIO,
    sqlite3.SQLITE_NOMEM: errno.ENOMEM,
    sqlite3.SQLITE_PERM: errno.EACCES,
    sqlite3.SQLITE_CANTOPEN: errno.ENOENT,
    sqlite3.SQLITE_READONLY: errno.ESTALE,
}
_LEAVES = "FROM chunk INDEXED BY leaf WHERE children = 0 AND holders = 0 AND bytes > 0"
_EMPTY = "FROM chunk INDEXED BY empty WHERE children = 0 AND holders = 0 AND bytes = 0"
_CELLS = (
    "SELECT n.name, cell.name, cell.bytes, c.name FROM chunk AS c "
    "JOIN cell ON cell.chunk = c.id JOIN namespace AS n ON n.id = c.namespace "
)
_REMOVE = "DELETE FROM cell WHERE name = ? AND chunk = (SELECT id FROM chunk WHERE name = ?)"


class IndexBusy(StoreError):
    """Another process kept the index locked for too long."""


class Cell(NamedTuple):
    """A cell of the store: where its file is, what it is charged and which chunk it is of."""

    namespace: str
    name: bytes  # the digest in its file's name
    nbytes: int  # whole blocks of the file system
    chunk: bytes  # the chunk's name, as of `chunk_name`
    parent: bytes = b""  # the name of the chunk before it in its prompt; b"" is none, or unknown
    position: int = 0


def new_cell(ref: ChunkRef, namespace: str, name: bytes, nbytes: int) -> Cell:
    """A cell as its writer knows it."""
    parent = b"" if ref.parent in ("", ref.id) else chunk_name(namespace, ref.parent)
    return Cell(namespace, name, nbytes, chunk_name(namespace, ref.id), parent, ref.position)


@dataclass(eq=False, slots=True)
class Reservation:
    """Room for one round of a put, from `reserve` to `settle`. Used by one thread at a time."""

    writer: str
    round: int
    opened: tuple[int, int, int] | None = None  # the index file that it was made in
    cells: tuple[Cell, ...] = ()
    """What is charged: the cells asked for, without those whose chunk is just being evicted."""
    evicted: tuple[Cell, ...] = ()
    """Cells whose files the caller deletes before it writes."""
    room_bytes: int = 0
    """What is free beside `cells`; below 0 nothing is charged, and `reserve` is to be repeated."""
    stored: set[bytes] = field(default_factory=set)
    """The names of the cells that have their file, whichever writer wrote it."""

    def unstored(self) -> list[Cell]:
        return [cell for cell in self.cells if cell.name not in self.stored]


def chunk_name(namespace: str, chunk_id: str) -> bytes:
    """The digest that stands for a chunk."""
    text = f"{namespace}/{chunk_id}".encode("utf-8", "surrogatepass")
    return blake2b(text, digest_size=ID_BYTES).digest()


class FileIndex:
    """See the module docstring. Closed by its owner.

    `check_path` raises OSError if a symbolic link is on the way to the index.
    """

    def __init__(
        self,
        path: str,
        policy: EvictionPolicy,
        clock_ns: Callable[[], int],
        check_path: Callable[[str], None] = lambda path: None,
    ) -> None:
        self._path = path
        self._check_path = check_path
        self._policy = policy
        self._clock_ns = clock_ns
        self._lock = threading.Lock()  # guards the connection
        self._pid = os.getpid()
        self._db: sqlite3.Connection | None = None
        self._opened: tuple[int, int, int] | None = None  # device, inode, process
        self._namespaces: dict[str, int] = {}  # of this file
        self._hits: dict[bytes, int] = {}  # chunks that were read -> when; written at times
        self._rounds = itertools.count(1)
        with contextlib.suppress(OSError):
            self.used_bytes()
        self.used_bytes()  # if it was damaged it is new now

    def close(self) -> None:
        with self._lock:
            self._disconnect()

    # Puts

    def reserve(
        self, writer: str, cells: Sequence[Cell], size_bytes: int, recycled_bytes: int = 0
    ) -> Reservation | None:
        """Hold the chunks of up to `MAX_ROWS` cells, make room and charge them; None if full.

        The caller deletes the files of `evicted`, writes, and settles. Where one transaction cannot
        evict enough (`room_bytes` < 0), it settles and calls again. `recycled_bytes` is what it
        will keep of files that it has evicted before. While the index is not complete, what came
        since may be as much as the bound is soft, and gives way to what comes next.
        """
        assert len(cells) <= MAX_ROWS, len(cells)
        made = Reservation(writer, next(self._rounds))
        if sum(cell.nbytes for cell in cells) > size_bytes:
            return None
        num_leaving = me = 0
        with contextlib.suppress(_NoRoom), self._writing() as db:
            me = self._writer(db, writer, recycled_bytes)
            self._write_hits(db)
            chunks = self._hold(db, me, made.round, cells)
            accepted = tuple(cell for cell in cells if cell.chunk in chunks)
            num_leaving, made.room_bytes = self._evict(db, me, made.round, size_bytes, accepted)
            if made.room_bytes >= 0:
                self._charge(db, chunks, accepted)
                made.cells = accepted
            made.opened = self._opened
        if made.opened is None:
            return None
        if num_leaving:  # after the transaction, as no other writer changes what we have evicted
            with self._reading() as db:
                if self._opened == made.opened:
                    made.evicted = _cells_of_round(db, me, made.round, LEAVING)
        return made

    def hold(self, writer: str, chunks: Iterable[bytes], recycled_bytes: int) -> Reservation:
        """Keep chunks that are there from being evicted, until `settle`."""
        made, names = Reservation(writer, next(self._rounds)), list(dict.fromkeys(chunks))
        for i in range(0, len(names), MAX_ROWS):
            with self._writing() as db:
                me = self._writer(db, writer, recycled_bytes)
                made.opened = self._opened
                db.executemany(
                    "INSERT OR IGNORE INTO hold SELECT ?, ?, id FROM chunk "
                    "WHERE name = ? AND holders != ?",
                    [(me, made.round, name, LEAVING) for name in names[i : i + MAX_ROWS]],
                )
        return made

    def settle(
        self,
        reservation: Reservation,
        absent: Sequence[Cell] = (),
        recycled_bytes: int | None = None,
    ) -> None:
        """The writes have ended, and the evicted files are gone; `absent` are cells without one."""
        gone = [*reservation.evicted, *absent]
        stored = [cell for cell in reservation.cells if cell.name in reservation.stored]
        num_released = MAX_ROWS
        while gone or num_released == MAX_ROWS:
            with self._writing() as db:
                me = self._writer(db, reservation.writer, recycled_bytes)
                if reservation.opened != self._opened:  # made anew since: it knows nothing of them
                    self._charge(db, self._hold(db, me, reservation.round, stored), stored)
                    gone, stored = [], []
                else:
                    _remove(db, gone[:MAX_ROWS])
                    gone = gone[MAX_ROWS:]
                if not gone:
                    # The row is missing if another writer of the cell has failed meanwhile.
                    db.executemany(
                        "INSERT OR IGNORE INTO cell SELECT id, ?, ? FROM chunk WHERE name = ?",
                        [(cell.name, cell.nbytes, cell.chunk) for cell in stored],
                    )
                    num_released = _release(db, me, reservation.round)

    def left_by(self, writer: str) -> Reservation | None:
        """A round that a writer which was killed has not settled, with what only it has begun.

        The caller deletes the files of `evicted` and settles; None if there is no round left.
        """
        with self._reading() as db:
            found = db.execute(
                "SELECT hold.writer, hold.round FROM hold JOIN writer ON writer.id = hold.writer "
                "WHERE writer.name = ? LIMIT 1",
                (writer,),
            ).fetchone()
            if found is None:
                return None
            evicted, begun = (
                _cells_of_round(db, found[0], found[1], holders) for holders in (LEAVING, 1)
            )
            return Reservation(writer, found[1], self._opened, begun, evicted)

    def remove_writer(self, writer: str) -> None:
        """Forget a writer that has settled everything, and what it kept of evicted files."""
        with self._writing() as db:
            db.execute("DELETE FROM writer WHERE name = ?", (writer,))

    # Reads

    def note_hits(self, chunks: Iterable[bytes]) -> None:
        """These chunks were read now. It is written with the next put, or `write_hits`."""
        now_ns = self._clock_ns()
        for name in dict.fromkeys(chunks) if len(self._hits) < MAX_NOTED_HITS else ():
            self._hits[name] = now_ns

    def write_hits(self) -> None:
        """Write all hits that were noted, some at a time."""
        while self._hits:
            with self._writing() as db:
                self._write_hits(db)

    def used_bytes(self) -> int:
        with self._reading() as db:
            return int(db.execute("SELECT used_bytes FROM store").fetchone()[0])

    def coldest(self, max_cells: int) -> list[list[Cell]]:
        """The cells of leaves, by chunk, in the order in which they would be evicted now.

        Whole chunks, so the last one may bring it above `max_cells`.
        """
        found: list[list[Cell]] = []
        with self._reading() as db:
            query = f"SELECT id {_LEAVES} ORDER BY score LIMIT ?"
            for (leaf,) in db.execute(query, (max_cells,)).fetchall():
                found.append(_cells(db, "WHERE c.id = ?", leaf))
                max_cells -= len(found[-1])
                if max_cells <= 0:
                    break
        return found

    # Removals: their callers have deleted the files

    def remove_cells(self, cells: Sequence[tuple[bytes, bytes]]) -> None:
        """Forget cells, by their own names and those of their chunks."""
        for i in range(0, len(cells), MAX_ROWS):
            with self._writing() as db:
                db.executemany(_REMOVE, cells[i : i + MAX_ROWS])

    def remove_namespace(self, namespace: str) -> None:
        """Forget every cell of a namespace, some at a time; what is held goes in its turn."""
        last = 0
        while True:
            with self._reading() as db:
                rows = db.execute(
                    "SELECT c.id, cell.name, c.name, n.name FROM (SELECT * FROM chunk WHERE id > ? "
                    "ORDER BY id LIMIT ?) AS c JOIN namespace AS n ON n.id = c.namespace "
                    "LEFT JOIN cell ON cell.chunk = c.id AND c.holders = 0",
                    (last, MAX_ROWS),
                ).fetchall()
            if not rows:
                return
            last = max(row[0] for row in rows)
            self.remove_cells([(row[1], row[2]) for row in rows if row[1] and row[3] == namespace])

    # Making it anew

    @property
    def is_complete(self) -> bool:
        """Whether every file is known; a new index is not."""
        with self._reading() as db:
            return bool(db.execute("SELECT is_complete FROM store").fetchone()[0])

    def add_found(self, found: Sequence[tuple[Cell, int]]) -> None:
        """Add up to `MAX_ROWS` files that were found, with the times they were written.

        They are held until `complete`, as their children may still be found.
        """
        assert len(found) <= MAX_ROWS, len(found)
        now_ns = self._clock_ns()
        with self._writing() as db:
            [(used_bytes,)] = db.execute("SELECT used_bytes FROM store").fetchall()
            chunks = self._hold(db, NOBODY, FOUND_ROUND, [cell for cell, _ in found])
            _insert(db, chunks, [cell for cell, _ in found if cell.chunk in chunks])
            db.executemany(
                "UPDATE chunk SET score = ?1 WHERE id = ?2 AND score < ?1",
                [(min(written_ns, now_ns), chunks.get(cell.chunk)) for cell, written_ns in found],
            )
            db.execute("UPDATE store SET found_bytes = found_bytes + used_bytes - ?", (used_bytes,))

    def complete(self) -> None:
        """Every file has been found."""
        boot, num_released = _boot(), MAX_ROWS
        while num_released == MAX_ROWS:
            with self._writing() as db:
                num_released = _release(db, NOBODY, FOUND_ROUND)
                if num_released < MAX_ROWS:
                    db.execute("UPDATE store SET is_complete = 1, boot = ?", (boot,))

    def check_after_power_loss(self) -> None:
        """Where the machine has started anew since: look for damage; files may be unknown."""
        boot = _boot()
        with self._reading() as db:
            if db.execute("SELECT boot FROM store").fetchone()[0] in ("", boot):
                return
        with self._replacing_damage(), contextlib.closing(sqlite3.connect(self._path)) as db:
            [first] = db.execute("PRAGMA quick_check(1)").fetchone()
            if first != "ok":
                raise sqlite3.DatabaseError(first)
        with self._writing() as db:
            db.execute(
                "UPDATE store SET is_complete = 0, found_bytes = used_bytes, boot = ?", (boot,)
            )

    # Rows

    def _writer(self, db: sqlite3.Connection, name: str, recycled_bytes: int | None) -> int:
        """A writer's row, which says how much it keeps in recycled files."""
        db.execute("INSERT OR IGNORE INTO writer (name) VALUES (?)", (name,))
        [(me,)] = db.execute("SELECT id FROM writer WHERE name = ?", (name,)).fetchall()
        if recycled_bytes is not None:
            db.execute(
                "UPDATE writer SET recycled = ?1 WHERE id = ?2 AND recycled != ?1",
                (recycled_bytes, me),
            )
        return int(me)

    def _hold(
        self, db: sqlite3.Connection, writer: int, number: int, cells: Sequence[Cell]
    ) -> dict[bytes, int]:
        """Hold the chunks of cells in a round; their ids, without those that are being evicted."""
        rows: dict[bytes, _ChunkRow] = {}  # of these cells' chunks and of their parents
        held: dict[bytes, int] = {}
        for cell in cells:
            if cell.chunk not in held:
                chunk = self._find(db, cell, rows)
                if chunk is not None:
                    held[cell.chunk] = chunk
        _insert_holds(db, writer, number, held.values())
        return held

    def _charge(
        self, db: sqlite3.Connection, chunks: Mapping[bytes, int], cells: Sequence[Cell]
    ) -> None:
        """Add the rows of new cells; a chunk that has no other gets its first score."""
        ids = _places(len(chunks))
        new = db.execute(
            f"SELECT id, name FROM chunk WHERE bytes = 0 AND id IN ({ids})", [*chunks.values()]
        ).fetchall()
        # Of these some may have been evicted lately.
        query = f"DELETE FROM evicted WHERE name IN ({_places(len(new))}) RETURNING name, score"
        known = dict(db.execute(query, [name for _, name in new]).fetchall())
        now_ns = self._clock_ns()
        put, hit = self._policy.on_put(now_ns), self._policy.on_hit
        db.executemany(
            "UPDATE chunk SET score = ? WHERE id = ?",
            [(hit(known[name], now_ns) if name in known else put, i) for i, name in new],
        )
        _insert(db, chunks, [cell for cell in cells if cell.chunk in chunks])

    def _find(
        self, db: sqlite3.Connection, cell: Cell, rows: dict[bytes, "_ChunkRow"]
    ) -> int | None:
        """The id of a cell's chunk, whose row is made if there is none, below its parent's.

        None if one of the two is being evicted. `rows` are those of this transaction so far.
        """
        namespace = self._namespace(db, cell.namespace)
        chunk = rows.get(cell.chunk) or _chunk(db, cell.chunk)
        if chunk is not None and chunk.holders == LEAVING:
            return None
        parent: int | None = None
        if cell.parent and (chunk is None or chunk.parent is None):
            position = cell.position if chunk is None else chunk.position
            above = rows.get(cell.parent) or _chunk(db, cell.parent)
            if above is None:
                # A parent that is not stored, or not yet, has a row without bytes.
                above = _new_chunk(db, cell.parent, namespace, position - 1, None)
            rows[cell.parent] = above
            if above.holders == LEAVING:
                return None
            if above.position < position:
                parent = above.id
        if chunk is None:
            chunk = _new_chunk(db, cell.chunk, namespace, cell.position, parent)
        elif parent is not None:
            db.execute("UPDATE chunk SET parent = ? WHERE id = ?", (parent, chunk.id))
            chunk = chunk._replace(parent=parent)
        rows[cell.chunk] = chunk
        return chunk.id

    def _namespace(self, db: sqlite3.Connection, name: str) -> int:
        """A namespace's row; they are never deleted."""
        known = self._namespaces.get(name)
        if known is None:
            db.execute("INSERT OR IGNORE INTO namespace VALUES (NULL, ?)", (name,))
            [(known,)] = db.execute("SELECT id FROM namespace WHERE name = ?", (name,)).fetchall()
            if len(self._namespaces) < MAX_NAMESPACES:
                self._namespaces[name] = known
        return known

    def _evict(
        self,
        db: sqlite3.Connection,
        writer: int,
        number: int,
        size_bytes: int,
        cells: Sequence[Cell],
    ) -> tuple[int, int]:
        """Take up to `MAX_EVICTED` leaves out of the tree, until there is room for cells.

        Their number and the room that is left then; _NoRoom if there are not enough. Their rows
        stay for `settle`. Their scores are remembered, of as many chunks as the policy asks for.
        """
        [(used_bytes, found_bytes, is_complete)] = db.execute(
            "SELECT used_bytes, found_bytes, is_complete FROM store"
        ).fetchall()
        if not is_complete:
            size_bytes = min(found_bytes, size_bytes) + int(size_bytes * SOFT_SHARE)
        free_bytes = room_bytes = size_bytes - used_bytes - sum(cell.nbytes for cell in cells)
        if room_bytes < 0:
            self._repair_scores(db)
        leaving: list[int] = []
        while room_bytes < 0 and len(leaving) < MAX_EVICTED:
            rows = db.execute(
                "UPDATE chunk SET holders = ?, parent = NULL "
                f"WHERE id = (SELECT id {_LEAVES} ORDER BY score LIMIT 1) RETURNING id, bytes",
                (LEAVING,),
            ).fetchall()
            if not rows:
                raise _NoRoom
            leaving.append(rows[0][0])
            room_bytes += rows[0][1]
        if leaving:
            _insert_holds(db, writer, number, leaving)
            freed_bytes = room_bytes - free_bytes
            # As many as fit if all are as large as these.
            remembered = self._policy.remembered * (used_bytes * len(leaving) // freed_bytes)
            db.execute(
                "DELETE FROM evicted WHERE id IN (SELECT id FROM evicted WHERE "
                "id <= (SELECT max(id) FROM evicted) - ? ORDER BY id LIMIT ?)",
                (remembered, MAX_ROWS),
            )
            if room_bytes < 0:  # until its files are gone too, no other writer may use this room
                db.execute(
                    "UPDATE writer SET recycled = recycled + ? WHERE id = ?", (freed_bytes, writer)
                )
        return len(leaving), room_bytes

    def _repair_scores(self, db: sqlite3.Connection) -> None:
        """Bring leaves down to now whose score no clock can have given."""
        now_ns = self._clock_ns()
        db.execute(
            f"UPDATE chunk SET score = ? WHERE id IN (SELECT id {_LEAVES} AND score > ? LIMIT ?)",
            (now_ns, highest_score(now_ns), MAX_ROWS),
        )

    def _write_hits(self, db: sqlite3.Connection) -> None:
        hits = [self._hits.popitem() for _ in range(min(MAX_ROWS, len(self._hits)))]
        db.executemany(
            "UPDATE chunk SET score = on_hit(score, ?) WHERE name = ?",
            [(now_ns, name) for name, now_ns in hits],
        )

    # The connection

    @contextlib.contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        with self._locked(), self._replacing_damage():
            yield self._connected()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """A transaction; it is undone by an exception."""
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
                yield db
                _sweep(db)
                db.execute("COMMIT")
            except BaseException:
                self._namespaces.clear()  # a new one is undone, too
                if db.in_transaction:
                    db.execute("ROLLBACK")
                raise

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        if self._pid != os.getpid():  # a thread that is lost to this process may have held it
            self._lock, self._pid = threading.Lock(), os.getpid()
        if not self._lock.acquire(timeout=WAIT_S):
            raise IndexBusy(f"{self._path} was in use by another thread for {WAIT_S:g} s")
        try:
            yield
        finally:
            self._lock.release()

    @contextlib.contextmanager
    def _replacing_damage(self) -> Iterator[None]:
        """Put a new index in the place of one that cannot be read; the call itself has failed."""
        try:
            yield
        except (sqlite3.Error, ValueError, TypeError, OverflowError) as error:
            code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF
            if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                raise IndexBusy(f"{self._path} is locked by another process") from None
            if code in _ERRNOS:
                number, text = _ERRNOS[code], f"the index cannot be used: {error}"
                if _is_full(self._path):  # which SQLite may call an error of the disk
                    number, text = errno.ENOSPC, os.strerror(errno.ENOSPC)
                raise OSError(number, text, self._path) from error
            logger.warning("file store index %s is damaged and made anew: %s", self._path, error)
            self._disconnect()
            _delete(self._path)
            raise OSError(errno.ESTALE, f"the index was damaged: {error}", self._path) from error

    def _connected(self) -> sqlite3.Connection:
        """Our connection, made anew where the file is another now, or the process is."""
        self._check_path(self._path)
        try:
            status = os.lstat(self._path)
            now = (status.st_dev, status.st_ino, os.getpid())
        except FileNotFoundError:
            now = None
        if self._db is not None and now == self._opened:
            return self._db
        self._disconnect()
        create_safely(self._path)
        status = os.lstat(self._path)
        db = sqlite3.connect(self._path, timeout=0, isolation_level=None, check_same_thread=False)
        try:
            _prepare(db)
            db.create_function("on_hit", 2, self._policy.on_hit)
        except BaseException:
            db.close()
            raise
        self._db, self._opened = db, (status.st_dev, status.st_ino, os.getpid())
        return db

    def _disconnect(self) -> None:
        # A connection of the process that forked us is not ours to close.
        if self._db is not None and self._opened is not None and self._opened[2] == os.getpid():
            self._db.close()
        self._db = self._opened = None
        self._namespaces.clear()


class _NoRoom(Exception):
    """There are not enough leaves: undo the reservation."""


def create_safely(path: str) -> None:
    """An empty file that we alone may read, in place of anything but a plain file with one name."""

    for each in (path, f"{path}-wal", f"{path}-shm", f"{path}-journal"):
        with contextlib.suppress(FileNotFoundError):
            status = os.lstat(each)
            if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
                os.unlink(each)
    with contextlib.suppress(FileExistsError):
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, FILE_MODE)
        os.fchmod(fd, FILE_MODE)
        os.close(fd)


def _delete(path: str) -> None:
    for each in (path, f"{path}-wal", f"{path}-shm", f"{path}-journal"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(each)


def _prepare(db: sqlite3.Connection) -> None:
    """Set the connection up, and the tables if they are not there; DatabaseError if foreign."""
    db.execute(f"PRAGMA busy_timeout = {int(WAIT_S * 1000)}")
    # A file system of a network has no memory that its hosts share: there a journal does it, whose
    # readers and writers wait for each other.
    mode = ""
    with contextlib.suppress(sqlite3.OperationalError):
        [mode] = db.execute("PRAGMA journal_mode = WAL").fetchone()
    db.execute("PRAGMA synchronous = OFF")
    db.execute("PRAGMA temp_store = MEMORY")
    db.execute("BEGIN")
    asked = ("PRAGMA application_id", "PRAGMA user_version", "SELECT count(*) FROM sqlite_master")
    application, version, num_tables = (db.execute(query).fetchone()[0] for query in asked)
    db.execute("COMMIT")
    if (application, version) != (APPLICATION_ID, SCHEMA_VERSION):
        if num_tables:
            raise sqlite3.DatabaseError("it is no index of this release")
        db.executescript(_SCHEMA)  # another process may be at it, too
    if mode == "wal":
        db.execute("PRAGMA busy_timeout = 0")


def _is_full(path: str) -> bool:
    """Whether a file system has no block or no inode left for another file."""
    with contextlib.suppress(OSError):
        left = os.statvfs(os.path.dirname(path))
        has_no_inode = left.f_files > 0 and left.f_favail < LEAST_FILES
        return has_no_inode or left.f_bavail * left.f_frsize < LEAST_BYTES
    return False


def _is_busy(error: sqlite3.OperationalError) -> bool:
    return error.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def _boot() -> str:
    with contextlib.suppress(OSError), open(BOOT_ID) as file:
        return file.read().strip()
    return "unknown"


class _ChunkRow(NamedTuple):
    id: int
    position: int
    parent: int | None
    holders: int


def _chunk(db: sqlite3.Connection, name: bytes) -> _ChunkRow | None:
    row = db.execute(
        "SELECT id, position, parent, holders FROM chunk WHERE name = ?", (name,)
    ).fetchone()
    return None if row is None else _ChunkRow(*row)


def _new_chunk(
    db: sqlite3.Connection, name: bytes, namespace: int, position: int, parent: int | None
) -> _ChunkRow:
    new = db.execute(
        "INSERT INTO chunk (name, namespace, position, parent) VALUES (?, ?, ?, ?)",
        (name, namespace, position, parent),
    )
    return _ChunkRow(int(new.lastrowid or 0), position, parent, 0)


def _insert_holds(db: sqlite3.Connection, writer: int, number: int, chunks: Iterable[int]) -> None:
    db.executemany(
        "INSERT OR IGNORE INTO hold VALUES (?, ?, ?)",
        [(writer, number, chunk) for chunk in chunks],
    )


def _places(count: int) -> str:
    """So many places for values in a query."""
    return ", ".join("?" * count)


def _cells(db: sqlite3.Connection, which: str, *values: int) -> list[Cell]:
    return [Cell(*row) for row in db.execute(_CELLS + which, values).fetchall()]


def _cells_of_round(
    db: sqlite3.Connection, writer: int, number: int, holders: int
) -> tuple[Cell, ...]:
    """The cells of the chunks that a round holds and that have so many holders."""
    of_round = "JOIN hold ON hold.chunk = c.id WHERE hold.writer = ? AND hold.round = ? "
    return tuple(_cells(db, f"{of_round} AND c.holders = ?", writer, number, holders))


def _insert(db: sqlite3.Connection, chunks: Mapping[bytes, int], cells: Sequence[Cell]) -> None:
    db.executemany(
        "INSERT OR IGNORE INTO cell VALUES (?, ?, ?)",
        [(chunks[cell.chunk], cell.name, cell.nbytes) for cell in cells],
    )


def _remove(db: sqlite3.Connection, cells: Iterable[Cell]) -> None:
    db.executemany(_REMOVE, [(cell.name, cell.chunk) for cell in cells])


def _release(db: sqlite3.Connection, writer: int, number: int) -> int:
    """End up to `MAX_ROWS` holds of a writer's round; how many there were."""
    return db.execute(
        "DELETE FROM hold WHERE writer = ?1 AND round = ?2 AND chunk IN "
        "(SELECT chunk FROM hold WHERE writer = ?1 AND round = ?2 LIMIT ?3)",
        (writer, number, MAX_ROWS),
    ).rowcount


def _sweep(db: sqlite3.Connection) -> None:
    """Forget chunks without bytes that neither hold the tree together nor are being written."""
    for _ in range(SWEEP_LEVELS):
        if not db.execute(
            f"DELETE FROM chunk WHERE id IN (SELECT id {_EMPTY} LIMIT ?)",
            (MAX_ROWS // SWEEP_LEVELS,),
        ).rowcount:
            return
