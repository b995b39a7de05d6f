"""Which chunks a `file://` store holds, how many bytes it uses and what goes next, in SQLite.

One row for each chunk and each cell, shared by every process on the directory. The rules:

* Only a chunk without children in the store is evicted (`leaf`), the lowest score first. So a
  prompt loses its end before its beginning, whoever writes, reads or restarts.
* Rows come before files and go after them: what lies on the disk is charged, and a kill at any
  point leaves a count that is too high until the chunk is evicted.
* A chunk that is being written or evicted is held by its writer, and no candidate.
* The index can be lost: it is made anew from the files (`is_complete`), which are read without it.

Every transaction is short and touches as many rows as its caller named, whatever is stored. Any
thread of any process may call; one connection, one lock. The file is not synced: after a power
loss it is checked and, if damaged, replaced.
"""

import contextlib
import errno
import logging
import os
import sqlite3
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import NamedTuple

from vllm_kvpool.errors import StoreError
from vllm_kvpool.store.base import ChunkRef
from vllm_kvpool.store.eviction import EvictionPolicy, highest_score
from vllm_kvpool.store.file.paths import FILE_MODE

logger = logging.getLogger(__name__)

WAIT_S = 10.0  # for another process's transaction, each of which takes milliseconds
POLL_S = 0.0005
APPLICATION_ID = 0x4B56504C
SCHEMA_VERSION = 1
MAX_HITS = 256  # written in one transaction
MAX_NOTED_HITS = 65_536  # and waiting to be; more are not counted
SOFT_SHARE = 0.02  # how much the size may be exceeded
REMOVED_AT_A_TIME = 500
LEAST_BYTES = 256 << 10  # an index and its journal need so much
LEAST_FILES = 3
MAX_NAMESPACES = 1024  # remembered
ID_BYTES = 16
BOOT_ID = "/proc/sys/kernel/random/boot_id"
LEAVING = -1  # `holders` of a chunk that is being evicted
NOBODY = 0  # the writer that holds what an index which is not complete has found

_SCHEMA = """
CREATE TABLE store (
    used_bytes INTEGER NOT NULL, found_bytes INTEGER NOT NULL, is_complete INTEGER NOT NULL,
    boot TEXT NOT NULL);
INSERT INTO store VALUES (0, 0, 0, '');
CREATE TABLE namespace (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE);
CREATE TABLE chunk (
    id INTEGER PRIMARY KEY, name BLOB NOT NULL UNIQUE, namespace INTEGER NOT NULL,
    parent INTEGER, position INTEGER NOT NULL, children INTEGER NOT NULL DEFAULT 0,
    holders INTEGER NOT NULL DEFAULT 0, bytes INTEGER NOT NULL DEFAULT 0,
    score INTEGER NOT NULL DEFAULT 0);
CREATE INDEX leaf ON chunk (score) WHERE children = 0 AND holders = 0;
CREATE TABLE cell (
    chunk INTEGER NOT NULL, name BLOB NOT NULL, bytes INTEGER NOT NULL,
    PRIMARY KEY (chunk, name)) WITHOUT ROWID;
CREATE TABLE evicted (id INTEGER PRIMARY KEY, name BLOB NOT NULL UNIQUE, score INTEGER NOT NULL);
CREATE TABLE writer (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, recycled INTEGER NOT NULL);
CREATE TABLE hold (
    writer INTEGER NOT NULL, chunk INTEGER NOT NULL, count INTEGER NOT NULL,
    PRIMARY KEY (writer, chunk)) WITHOUT ROWID;
"""
_ERRNOS = {
    sqlite3.SQLITE_FULL: errno.ENOSPC,
    sqlite3.SQLITE_IOERR: errno.EIO,
    sqlite3.SQLITE_NOMEM: errno.ENOMEM,
    sqlite3.SQLITE_PERM: errno.EACCES,
    sqlite3.SQLITE_CANTOPEN: errno.ENOENT,
    sqlite3.SQLITE_READONLY: errno.ESTALE,
}
_CANDIDATE = """
SELECT id, parent, bytes, name, score FROM chunk INDEXED BY leaf
WHERE children = 0 AND holders = 0 ORDER BY score LIMIT 1"""


class IndexBusy(StoreError):
    """Another process kept the index locked for too long."""


class CellRow(NamedTuple):
    """A cell as the index knows it: `name` is the digest in its file's name."""

    chunk: ChunkRef
    namespace: str
    name: bytes
    nbytes: int  # whole blocks of the file system

    @property
    def chunk_name(self) -> bytes:
        return chunk_name(self.namespace, self.chunk.id)

    @property
    def parent_name(self) -> bytes:
        return chunk_name(self.namespace, self.chunk.parent)


class EvictedCell(NamedTuple):
    """A file that its evictor has to delete."""

    namespace: str
    name: bytes
    nbytes: int


class Held(NamedTuple):
    """What one `reserve` has done: to be given to `settle`."""

    chunks: tuple[int, ...]
    evicted_chunks: tuple[int, ...]
    evicted: tuple[EvictedCell, ...]
    refused: frozenset[int]  # numbers of cells whose chunk, or its parent, is just being evicted
    room_bytes: int  # free after all
    opened: tuple[int, int, int]  # the file that the ids are of


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
        self.num_rows_read = 0  # candidates looked at, to show that it does not grow with the store
        with contextlib.suppress(OSError):
            self.used_bytes()
        self.used_bytes()  # if it was damaged it is new now

    def close(self) -> None:
        with self._lock:
            self._disconnect()

    # Puts

    def reserve(
        self, writer: str, cells: Sequence[CellRow], size_bytes: int, recycled_bytes: int = 0
    ) -> Held | None:
        """Charge the cells and hold their chunks, and make room for them; None if there is none.

        The caller deletes the files of `evicted` before it writes. `recycled_bytes` is what it
        will keep of files that it has evicted before. While the index is not complete, what came
        since may be as much as the bound is soft, and gives way to what comes next.
        """
        with contextlib.suppress(_NoRoom), self._writing() as db:
            me = self._writer(db, writer, recycled_bytes)
            self._write_hits(db, MAX_HITS)
            chunks: dict[bytes, int | None] = {}
            refused: set[int] = set()
            charged_bytes = 0
            for i, cell in enumerate(cells):
                name = cell.chunk_name
                if name not in chunks:
                    chunks[name] = self._hold(db, me, cell)
                chunk = chunks[name]
                if chunk is None:
                    refused.add(i)
                else:
                    charged_bytes += _add_cell(db, chunk, cell)
            [(used_bytes, found_bytes, is_complete)] = db.execute(
                "UPDATE store SET used_bytes = used_bytes + ? "
                "RETURNING used_bytes, found_bytes, is_complete",
                (charged_bytes,),
            ).fetchall()
            if not is_complete:
                slack_bytes = int(size_bytes * SOFT_SHARE)
                size_bytes = min(found_bytes, size_bytes) + slack_bytes
            evicted = self._evict(db, me, used_bytes, size_bytes)
            if evicted is None:
                raise _NoRoom
            assert self._opened is not None
            return Held(
                tuple(chunk for chunk in chunks.values() if chunk is not None),
                tuple(evicted),
                tuple(_files_of(db, evicted)),
                frozenset(refused),
                size_bytes - used_bytes + sum(evicted.values()),
                self._opened,
            )
        return None

    def hold(self, writer: str, chunks: Iterable[bytes], recycled_bytes: int) -> Held:
        """Keep chunks that are there from being evicted, until `settle`."""
        with self._writing() as db:
            me = self._writer(db, writer, recycled_bytes)
            held = []
            for name in dict.fromkeys(chunks):
                row = db.execute(
                    "SELECT id FROM chunk WHERE name = ? AND holders != ?",
                    (name, LEAVING),
                ).fetchone()
                if row is not None:
                    _hold(db, me, row[0])
                    held.append(row[0])
            assert self._opened is not None
            return Held(tuple(held), (), (), frozenset(), 0, self._opened)

    def settle(
        self,
        writer: str,
        held: Held,
        stored: Iterable[CellRow],
        unstored: Iterable[CellRow],
        recycled_bytes: int = 0,
    ) -> None:
        """The writes have ended, and the evicted files are gone; `unstored` have no file."""
        with self._writing() as db:
            me = self._writer(db, writer, recycled_bytes)
            if held.opened != self._opened:  # made anew since: it knows nothing of them
                self._add_stored(db, me, stored)
                return
            self._drop_evicted(db, held.evicted_chunks)
            for cell in unstored:
                self._drop_cell(db, cell.chunk_name, cell.name)
            for chunk in held.chunks:
                self._release(db, me, chunk)

    def _add_stored(self, db: sqlite3.Connection, me: int, cells: Iterable[CellRow]) -> None:
        for cell in cells:
            chunk = self._hold(db, me, cell)
            if chunk is not None:
                charged_bytes = _add_cell(db, chunk, cell)
                db.execute("UPDATE store SET used_bytes = used_bytes + ?", (charged_bytes,))
                self._release(db, me, chunk)

    def reclaim(
        self,
        writer: str,
        is_there: Callable[[EvictedCell], bool],
        delete: Callable[[EvictedCell], None],
    ) -> None:
        """End what a writer that was killed has begun: delete the files that it was about to.

        Cells that it was about to write are forgotten, unless `is_there`.
        """
        with self._writing() as db:
            row = db.execute("SELECT id, recycled FROM writer WHERE name = ?", (writer,)).fetchone()
            if row is None:
                return
            me = row[0]
            held = db.execute(
                "SELECT c.id, c.name, c.holders, n.name FROM hold AS h JOIN chunk AS c "
                "ON c.id = h.chunk JOIN namespace AS n ON n.id = c.namespace WHERE h.writer = ?",
                (me,),
            ).fetchall()
            for chunk, digest, holders, namespace in held:
                for name, nbytes in db.execute(
                    "SELECT name, bytes FROM cell WHERE chunk = ?", (chunk,)
                ).fetchall():
                    cell = EvictedCell(namespace, name, nbytes)
                    if holders == LEAVING:
                        delete(cell)
                    elif holders == 1 and not is_there(cell):
                        self._drop_cell(db, digest, name)
                if holders == LEAVING:
                    self._drop_evicted(db, (chunk,))
                else:
                    db.execute("UPDATE hold SET count = 1 WHERE writer = ?", (me,))
                    self._release(db, me, chunk)
            db.execute("UPDATE store SET used_bytes = used_bytes - ?", (row[1],))
            db.execute("DELETE FROM writer WHERE id = ?", (me,))

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
                self._write_hits(db, MAX_HITS)

    def used_bytes(self) -> int:
        with self._reading() as db:
            return int(db.execute("SELECT used_bytes FROM store").fetchone()[0])

    def coldest(self, max_cells: int) -> list[list[EvictedCell]]:
        """The cells of leaves, by chunk, in the order in which they would be evicted now.

        Whole chunks, so the last one may bring it above `max_cells`.
        """
        found: list[list[EvictedCell]] = []
        with self._reading() as db:
            leaves = db.execute(
                "SELECT id FROM chunk INDEXED BY leaf WHERE children = 0 AND holders = 0 "
                "ORDER BY score LIMIT ?",
                (max_cells,),
            ).fetchall()
            for leaf in leaves:
                found.append(list(_files_of(db, leaf)))
                max_cells -= len(found[-1])
                if max_cells <= 0:
                    break
        return found

    # Removals: their callers have deleted the files

    def remove_cells(self, cells: Sequence[tuple[bytes, bytes]]) -> None:
        """Forget cells, by the names of their chunks and their own."""
        for i in range(0, len(cells), REMOVED_AT_A_TIME):
            with self._writing() as db:
                for chunk, name in cells[i : i + REMOVED_AT_A_TIME]:
                    self._drop_cell(db, chunk, name)

    def remove_namespace(self, namespace: str) -> None:
        """Forget every cell of a namespace, some at a time; what is held goes in its turn."""
        last = 0
        while True:
            with self._writing() as db:
                rows = db.execute(
                    "SELECT id, name, namespace = (SELECT id FROM namespace WHERE name = ?), "
                    "holders FROM chunk WHERE id > ? ORDER BY id LIMIT ?",
                    (namespace, last, REMOVED_AT_A_TIME),
                ).fetchall()
                for chunk, digest, is_of_it, holders in rows:
                    last = chunk
                    if is_of_it and holders == 0:
                        cells = db.execute("SELECT name FROM cell WHERE chunk = ?", (chunk,))
                        for (name,) in cells.fetchall():
                            self._drop_cell(db, digest, name)
            if not rows:
                return

    # Making it anew

    @property
    def is_complete(self) -> bool:
        """Whether every file is known; a new index is not."""
        with self._reading() as db:
            return bool(db.execute("SELECT is_complete FROM store").fetchone()[0])

    def add_found(self, cells: Iterable[tuple[CellRow, int]]) -> None:
        """Add files that were found, with the times they were written; they are held until
        `complete`, as their children may still be found."""
        with self._writing() as db:
            for cell, written_ns in cells:
                chunk = self._find(db, cell)
                if chunk is None:
                    continue
                row = db.execute("SELECT score FROM chunk WHERE id = ?", (chunk,)).fetchone()
                charged_bytes = _add_cell(db, chunk, cell)
                if charged_bytes:
                    score = max(row[0], min(written_ns, self._clock_ns()))
                    db.execute("UPDATE chunk SET score = ? WHERE id = ?", (score, chunk))
                    db.execute(
                        "UPDATE store SET used_bytes = used_bytes + ?1, "
                        "found_bytes = found_bytes + ?1",
                        (charged_bytes,),
                    )
                    _hold(db, NOBODY, chunk)

    def complete(self) -> None:
        """Every file has been found."""
        num_held = REMOVED_AT_A_TIME
        while num_held == REMOVED_AT_A_TIME:
            with self._writing() as db:
                held = db.execute(
                    "SELECT chunk FROM hold WHERE writer = ? LIMIT ?", (NOBODY, REMOVED_AT_A_TIME)
                ).fetchall()
                num_held = len(held)
                for (chunk,) in held:
                    self._release(db, NOBODY, chunk)
                if num_held < REMOVED_AT_A_TIME:
                    db.execute("UPDATE store SET is_complete = 1, boot = ?", (_boot(),))

    def check_after_power_loss(self) -> None:
        """Where the machine has started anew since: look for damage; files may be unknown."""
        with self._reading() as db:
            if db.execute("SELECT boot FROM store").fetchone()[0] in ("", _boot()):
                return
        with self._replacing_damage(), contextlib.closing(sqlite3.connect(self._path)) as db:
            [first] = db.execute("PRAGMA quick_check(1)").fetchone()
            if first != "ok":
                raise sqlite3.DatabaseError(first)
        with self._writing() as db:
            db.execute(
                "UPDATE store SET is_complete = 0, found_bytes = used_bytes, boot = ?", (_boot(),)
            )

    # Rows

    def _writer(self, db: sqlite3.Connection, name: str, recycled_bytes: int) -> int:
        """A writer's row, which says how much it keeps in recycled files."""
        known = db.execute("SELECT id, recycled FROM writer WHERE name = ?", (name,)).fetchone()
        if known is None:
            known = (db.execute("INSERT INTO writer VALUES (NULL, ?, 0)", (name,)).lastrowid, 0)
        if known[1] != recycled_bytes:
            db.execute("UPDATE writer SET recycled = ? WHERE id = ?", (recycled_bytes, known[0]))
            db.execute("UPDATE store SET used_bytes = used_bytes + ?", (recycled_bytes - known[1],))
        return int(known[0])

    def _find(self, db: sqlite3.Connection, cell: CellRow) -> int | None:
        """The row of a cell's chunk, made if there is none, below its parent's.

        None if one of the two is being evicted.
        """
        ref, namespace = cell.chunk, self._namespace(db, cell.namespace)
        chunk, holders, parent, children = _row_of(db, cell.chunk_name, namespace, ref.position)
        if holders == LEAVING:
            return None
        is_root = ref.parent in ("", ref.id) or (
            children and self._is_above(db, chunk, cell.parent_name)
        )
        if parent is None and not is_root:
            # A parent that is not stored, or not yet, has a row without bytes.
            parent, holders, _, _ = _row_of(db, cell.parent_name, namespace, ref.position - 1)
            if holders == LEAVING:
                _drop_if_empty(db, chunk)
                return None
            db.execute("UPDATE chunk SET parent = ? WHERE id = ?", (parent, chunk))
            db.execute("UPDATE chunk SET children = children + 1 WHERE id = ?", (parent,))
        return chunk

    def _namespace(self, db: sqlite3.Connection, name: str) -> int:
        """A namespace's row; they are never deleted."""
        known = self._namespaces.get(name)
        if known is None:
            db.execute("INSERT OR IGNORE INTO namespace VALUES (NULL, ?)", (name,))
            [(known,)] = db.execute("SELECT id FROM namespace WHERE name = ?", (name,)).fetchall()
            if len(self._namespaces) < MAX_NAMESPACES:
                self._namespaces[name] = known
        return known

    @staticmethod
    def _is_above(db: sqlite3.Connection, chunk: int, parent_name: bytes) -> bool:
        """Whether a chunk is its parent's ancestor, which only a caller's error can make it."""
        above = db.execute("SELECT id, parent FROM chunk WHERE name = ?", (parent_name,)).fetchone()
        while above is not None and above[0] != chunk and above[1] is not None:
            above = db.execute("SELECT id, parent FROM chunk WHERE id = ?", (above[1],)).fetchone()
        return above is not None and above[0] == chunk

    def _hold(self, db: sqlite3.Connection, writer: int, cell: CellRow) -> int | None:
        """Hold a cell's chunk; None if it is being evicted."""
        chunk = self._find(db, cell)
        if chunk is None:
            return None
        [(nbytes,)] = db.execute("SELECT bytes FROM chunk WHERE id = ?", (chunk,)).fetchall()
        if not nbytes:
            db.execute(
                "UPDATE chunk SET score = ?, position = ? WHERE id = ?",
                (self._first_score(db, cell.chunk_name), cell.chunk.position, chunk),
            )
        _hold(db, writer, chunk)
        return chunk

    def _first_score(self, db: sqlite3.Connection, name: bytes) -> int:
        """The score of a chunk that comes, which may be one that was evicted lately."""
        now_ns = self._clock_ns()
        known = db.execute("DELETE FROM evicted WHERE name = ? RETURNING score", (name,)).fetchall()
        return self._policy.on_hit(known[0][0], now_ns) if known else self._policy.on_put(now_ns)

    def _release(self, db: sqlite3.Connection, writer: int, chunk: int) -> None:
        held = db.execute(
            "UPDATE hold SET count = count - 1 WHERE writer = ? AND chunk = ? RETURNING count",
            (writer, chunk),
        ).fetchall()
        if held == [(0,)]:
            db.execute("DELETE FROM hold WHERE writer = ? AND chunk = ?", (writer, chunk))
            db.execute("UPDATE chunk SET holders = holders - 1 WHERE id = ?", (chunk,))
            _drop_if_empty(db, chunk)

    def _evict(
        self, db: sqlite3.Connection, writer: int, used_bytes: int, size_bytes: int
    ) -> dict[int, int] | None:
        """Take leaves out of the tree until what is used fits; their rows stay for `settle`.

        Their bytes, by id; None if there are not enough. Their scores are remembered, of as many
        chunks as the policy asks for.
        """
        excess_bytes = used_bytes - size_bytes
        evicted: dict[int, int] = {}
        if excess_bytes > 0:
            self._repair_scores(db)
        while excess_bytes > 0:
            self.num_rows_read += 1
            row = db.execute(_CANDIDATE).fetchone()
            if row is None:
                return None
            chunk, parent, nbytes, name, score = row
            db.execute("UPDATE chunk SET holders = ?, parent = NULL WHERE id = ?", (LEAVING, chunk))
            _lose_child(db, parent)
            db.execute("INSERT INTO hold VALUES (?, ?, 1)", (writer, chunk))
            if self._policy.remembered:
                db.execute(
                    "INSERT OR REPLACE INTO evicted (name, score) VALUES (?, ?)", (name, score)
                )
            evicted[chunk] = nbytes
            excess_bytes -= nbytes
        if evicted:
            freed_bytes = sum(evicted.values())
            db.execute("UPDATE store SET used_bytes = used_bytes - ?", (freed_bytes,))
            # As many as fit if all are as large as these.
            num_chunks = used_bytes * len(evicted) // max(1, freed_bytes)
            db.execute(
                "DELETE FROM evicted WHERE id <= (SELECT max(id) FROM evicted) - ?",
                (self._policy.remembered * num_chunks,),
            )
        return evicted

    def _repair_scores(self, db: sqlite3.Connection) -> None:
        """Bring leaves down to now whose score no clock can have given."""
        now_ns = self._clock_ns()
        db.execute(
            "UPDATE chunk SET score = ? WHERE id IN (SELECT id FROM chunk INDEXED BY leaf "
            "WHERE children = 0 AND holders = 0 AND score > ? LIMIT ?)",
            (now_ns, highest_score(now_ns), MAX_HITS),
        )

    def _drop_evicted(self, db: sqlite3.Connection, chunks: Iterable[int]) -> None:
        for chunk in chunks:
            db.execute("DELETE FROM cell WHERE chunk = ?", (chunk,))
            db.execute("DELETE FROM chunk WHERE id = ?", (chunk,))
            db.execute("DELETE FROM hold WHERE chunk = ?", (chunk,))

    def _drop_cell(self, db: sqlite3.Connection, digest: bytes, name: bytes) -> None:
        row = db.execute("SELECT id, holders FROM chunk WHERE name = ?", (digest,)).fetchone()
        if row is None or row[1] == LEAVING:
            return
        for (nbytes,) in db.execute(
            "DELETE FROM cell WHERE chunk = ? AND name = ? RETURNING bytes", (row[0], name)
        ).fetchall():
            db.execute("UPDATE chunk SET bytes = bytes - ? WHERE id = ?", (nbytes, row[0]))
            db.execute("UPDATE store SET used_bytes = used_bytes - ?", (nbytes,))
        _drop_if_empty(db, row[0])

    def _write_hits(self, db: sqlite3.Connection, most: int) -> None:
        for _ in range(min(most, len(self._hits))):
            try:
                name = next(iter(self._hits))
                now_ns = self._hits.pop(name)
            except (StopIteration, KeyError, RuntimeError):  # readers add to it meanwhile
                return
            row = db.execute("SELECT id, score FROM chunk WHERE name = ?", (name,)).fetchone()
            if row is not None:
                chunk, score = row
                score = self._policy.on_hit(score, now_ns)
                db.execute("UPDATE chunk SET score = ? WHERE id = ?", (score, chunk))

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
    """An empty file that we alone may read, in place of anything that is no file of its own."""

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
    [application] = db.execute("PRAGMA application_id").fetchone()
    [version] = db.execute("PRAGMA user_version").fetchone()
    if (application, version) != (APPLICATION_ID, SCHEMA_VERSION):
        db.execute("BEGIN IMMEDIATE")
        try:
            [num_tables] = db.execute("SELECT count(*) FROM sqlite_master").fetchone()
            [application] = db.execute("PRAGMA application_id").fetchone()
            if num_tables and application != APPLICATION_ID:
                raise sqlite3.DatabaseError("it is no index of this release")
            if not num_tables:
                for statement in _SCHEMA.split(";\n"):
                    db.execute(statement)
                db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            db.execute("COMMIT")
        except BaseException:
            db.execute("ROLLBACK")
            raise
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


def _row_of(
    db: sqlite3.Connection, name: bytes, namespace: int, position: int
) -> tuple[int, int, int | None, int]:
    """A chunk's id, holders, parent and number of children; it is made if there is none."""
    row = db.execute(
        "SELECT id, holders, parent, children FROM chunk WHERE name = ?", (name,)
    ).fetchone()
    if row is not None:
        return row  # type: ignore[no-any-return]
    new = db.execute(
        "INSERT INTO chunk (name, namespace, position) VALUES (?, ?, ?)",
        (name, namespace, position),
    )
    return int(new.lastrowid or 0), 0, None, 0


def _files_of(db: sqlite3.Connection, chunks: Iterable[int]) -> Iterator[EvictedCell]:
    for chunk in chunks:
        yield from map(
            EvictedCell._make,
            db.execute(
                "SELECT n.name, cell.name, cell.bytes FROM cell "
                "JOIN chunk AS c ON c.id = cell.chunk JOIN namespace AS n ON n.id = c.namespace "
                "WHERE cell.chunk = ?",
                (chunk,),
            ).fetchall(),
        )


def _add_cell(db: sqlite3.Connection, chunk: int, cell: CellRow) -> int:
    """Charge a cell to its chunk, unless that has been done; how much that is."""
    if not db.execute(
        "INSERT OR IGNORE INTO cell VALUES (?, ?, ?)", (chunk, cell.name, cell.nbytes)
    ).rowcount:
        return 0
    db.execute("UPDATE chunk SET bytes = bytes + ? WHERE id = ?", (cell.nbytes, chunk))
    return cell.nbytes


def _hold(db: sqlite3.Connection, writer: int, chunk: int) -> None:
    """Hold a chunk, for the first time or once more."""
    [(num_holds,)] = db.execute(
        "INSERT INTO hold VALUES (?, ?, 1) "
        "ON CONFLICT (writer, chunk) DO UPDATE SET count = count + 1 RETURNING count",
        (writer, chunk),
    ).fetchall()
    if num_holds == 1:
        db.execute("UPDATE chunk SET holders = holders + 1 WHERE id = ?", (chunk,))


def _lose_child(db: sqlite3.Connection, parent: int | None) -> None:
    if parent is not None:
        db.execute("UPDATE chunk SET children = children - 1 WHERE id = ?", (parent,))
        _drop_if_empty(db, parent)


def _drop_if_empty(db: sqlite3.Connection, chunk: int | None) -> None:
    """Forget a chunk without bytes, unless it holds the tree together or is being written."""
    while chunk is not None:
        gone = db.execute(
            "DELETE FROM chunk WHERE id = ? AND bytes = 0 AND children = 0 AND holders = 0 "
            "RETURNING parent",
            (chunk,),
        ).fetchall()
        chunk = gone[0][0] if gone else None
        if chunk is not None:
            db.execute("UPDATE chunk SET children = children - 1 WHERE id = ?", (chunk,))
