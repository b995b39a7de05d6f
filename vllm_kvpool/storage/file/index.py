"""The index of a `file://` store in SQLite: what is stored, how much, and what is evicted next.

Every process on the directory shares it: a row for each chunk, with its cells. Only leaves, chunks
that no stored chunk comes after, are evicted, lowest score first. Rows are written before files and
removed after them, so that `kill -9` leaves a count that is too high, never too low. What a writer
holds or evicts is a row of `round`, so that others can finish what a killed writer began. The
charge of a cell ends only in a transaction that finds no file of it and no other writer that holds
its chunk; a writer publishes files of chunks that it holds. A transaction changes about `MAX_ROWS`
rows and touches no file but the index, except to ask for files of cells whose charge may end.

Nothing is synced: after a power loss the index is checked, and replaced if it is damaged. A lost
index is rebuilt from the files, which are read without it.
"""

import contextlib
import errno
import heapq
import logging
import os
import sqlite3
import stat
import struct
import sys
import threading
import time
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, NamedTuple
from urllib.parse import quote

from vllm_kvpool.errors import StoreError
from vllm_kvpool.storage.base import (
    NO_RETENTION,
    ChunkRef,
    NamespaceUsage,
    OwnerUsage,
    Retention,
)
from vllm_kvpool.storage.eviction import EvictionPolicy, highest_score
from vllm_kvpool.storage.file.paths import FILE_MODE

logger = logging.getLogger(__name__)

WAIT_S = 10.0  # for the transactions of other processes, which take milliseconds each
POLL_S = 0.0005
APPLICATION_ID = 0x4B56504C
SCHEMA_VERSION = 6
MAX_ROWS = 128  # cells or hits of one transaction, and chunks that it deletes
MAX_EVICTED = 32  # chunks, in one transaction
MAX_NOTED_HITS = 65_536  # waiting to be written; further hits are dropped
SOFT_SHARE = 0.02  # of the size, by which it may be exceeded
PINNED_SHARE = 0.5  # of the size, at most, is pinned
LEAST_BYTES = 256 << 10  # free space that an index and its journal need
LEAST_FILES = 3
MAX_NAMESPACES = 1024  # cached
ID_BYTES = 16
BOOT_ID = "/proc/sys/kernel/random/boot_id"
LEAVING = -1  # `holders` of a chunk that is being evicted; its bytes are not in `used_bytes`

_SCHEMA = f"""
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS store (
    id INTEGER PRIMARY KEY, used_bytes INTEGER NOT NULL DEFAULT 0,
    found_bytes INTEGER NOT NULL DEFAULT 0,
    incomplete_since INTEGER NOT NULL,  -- 0 if every file is known
    num_evicted INTEGER NOT NULL DEFAULT 0, num_forgotten INTEGER NOT NULL DEFAULT 0,
    boot TEXT NOT NULL DEFAULT '');
INSERT OR IGNORE INTO store (id, incomplete_since) VALUES (1, {{now_ns}});
CREATE TABLE IF NOT EXISTS namespace (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE);
-- A parent's position is lower than its child's, so there are no cycles. `evicted` is the sequence
-- number of the chunk's last eviction, 0 if it was never evicted. A row without bytes remembers the
-- score of an evicted chunk, or links a chunk to the chunks before it.
CREATE TABLE IF NOT EXISTS chunk (
    id INTEGER PRIMARY KEY, name BLOB NOT NULL UNIQUE, namespace INTEGER NOT NULL,
    position INTEGER NOT NULL, parent INTEGER, children INTEGER NOT NULL,
    holders INTEGER NOT NULL, bytes INTEGER NOT NULL, score INTEGER NOT NULL,
    evicted INTEGER NOT NULL, pinned_until INTEGER NOT NULL, expires INTEGER NOT NULL,
    owner INTEGER NOT NULL, cells BLOB NOT NULL);
-- Who shares the room; chunks of stores without shares have owner 0, which has no row.
CREATE TABLE IF NOT EXISTS owner (
    id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, bytes INTEGER NOT NULL);
CREATE INDEX IF NOT EXISTS leaf ON chunk (owner, score)
    WHERE children = 0 AND holders = 0 AND bytes > 0 AND pinned_until = 0;
CREATE INDEX IF NOT EXISTS pinned ON chunk (pinned_until) WHERE pinned_until > 0;
CREATE INDEX IF NOT EXISTS expiring ON chunk (expires) WHERE expires > 0;
CREATE INDEX IF NOT EXISTS empty ON chunk (evicted)
    WHERE children = 0 AND holders = 0 AND bytes = 0;
CREATE TABLE IF NOT EXISTS writer (
    name TEXT PRIMARY KEY, recycled INTEGER NOT NULL) WITHOUT ROWID;
-- `held` and `evicted` are arrays of 64-bit chunk ids.
CREATE TABLE IF NOT EXISTS round (
    id INTEGER PRIMARY KEY, writer TEXT NOT NULL, held BLOB NOT NULL, evicted BLOB NOT NULL);
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
_DAMAGE = (sqlite3.Error, struct.error, ValueError, TypeError, OverflowError)
_COLUMNS = "id, name, namespace, position, parent, children, holders, bytes, score, evicted, "
_COLUMNS += "pinned_until, expires, owner, cells"
_SUMS = "used_bytes, found_bytes, incomplete_since, num_evicted, num_forgotten"
_LEAVES = "FROM chunk INDEXED BY leaf WHERE children = 0 AND holders = 0 AND bytes > 0"
_LEAVES += " AND pinned_until = 0"
_EMPTY = "FROM chunk INDEXED BY empty WHERE children = 0 AND holders = 0 AND bytes = 0"
_SCORE = 8  # its place in `_COLUMNS`
CELL_ENTRY = struct.Struct("<20sq")  # an entry of `cells`: the digest in the file's name, bytes


class IndexBusy(StoreError):
    """Another process or thread has held the index for `WAIT_S`."""


class StoredCell(NamedTuple):
    """A cell of the store: its file, its charge and its chunk."""

    namespace: str
    name: bytes  # the digest in its file's name
    nbytes: int  # its charge: whole blocks of the file system
    chunk: bytes  # see `chunk_name`
    parent: bytes = b""  # the chunk before it in its prompt; b"" if none or unknown
    position: int = 0
    retention: Retention = NO_RETENTION
    owner: str = ""  # whose share of the room it takes; "" without shares


def new_cell(ref: ChunkRef, namespace: str, name: bytes, nbytes: int) -> StoredCell:
    """A cell from its writer's description."""
    parent = b"" if ref.parent in ("", ref.id) else chunk_name(namespace, ref.parent)
    chunk = chunk_name(namespace, ref.id)
    return StoredCell(
        *(namespace, name, nbytes, chunk, parent, ref.position, ref.retention, ref.tenant)
    )


@dataclass(eq=False, slots=True)
class Reservation:
    """Space for one round of a put, from `reserve` to `settle`; one thread at a time."""

    writer: str
    round: int = 0
    opened: tuple[int, int, int] | None = None  # identifies the index file it was made in
    cells: tuple[StoredCell, ...] = ()
    """The cells that were charged: all but those whose chunk or its parent is being evicted."""
    evicted: tuple[StoredCell, ...] = ()
    """Cells whose files the caller must delete before it writes."""
    room_bytes: int = 0
    """Free space after `cells`. If negative, nothing was charged: settle and reserve again."""
    stored: set[bytes] = field(default_factory=set)
    """Names of the cells whose file exists, whichever writer wrote it."""

    def unstored(self) -> list[StoredCell]:
        return [cell for cell in self.cells if cell.name not in self.stored]


def chunk_name(namespace: str, chunk_id: str) -> bytes:
    """The digest that names a chunk in the index."""
    text = f"{namespace}/{chunk_id}".encode("utf-8", "surrogatepass")
    return blake2b(text, digest_size=ID_BYTES).digest()


class _Namespaces:
    """A cache of the table `namespace`, whose rows are never changed or deleted."""

    def __init__(self) -> None:
        self.ids: dict[str, int] = {}
        self.names: dict[int, str] = {}

    def clear(self) -> None:
        self.ids.clear()
        self.names.clear()

    def add(self, number: int, name: str) -> None:
        if len(self.ids) >= MAX_NAMESPACES:
            self.clear()
        self.ids[name], self.names[number] = number, name


@dataclass(eq=False, slots=True)
class _ChunkRow:
    """A row of `chunk`, with the changes of the current transaction."""

    id: int
    name: bytes
    namespace: int
    position: int
    parent: int | None = None
    children: int = 0
    holders: int = 0
    nbytes: int = 0
    score: int = 0
    evicted: int = 0
    pinned_until: int = 0
    expires: int = 0
    owner: int = 0
    cells: bytes = b""

    @property
    def charged_bytes(self) -> int:
        return 0 if self.holders == LEAVING else self.nbytes

    def is_leaf(self) -> bool:
        has_none = self.children == 0 and self.holders == 0
        return has_none and self.nbytes > 0 and self.pinned_until == 0

    def is_empty(self) -> bool:
        return self.children == 0 and self.holders == 0 and self.nbytes == 0

    def add(self, name: bytes, nbytes: int) -> None:
        """Add a cell unless it is there."""
        if name not in dict(CELL_ENTRY.iter_unpack(self.cells)):
            self.cells += CELL_ENTRY.pack(name, nbytes)
            self.nbytes += nbytes

    def remove(self, names: Container[bytes]) -> None:
        """Remove the cells of these names."""
        kept = [cell for cell in CELL_ENTRY.iter_unpack(self.cells) if cell[0] not in names]
        self.nbytes = sum(nbytes for _, nbytes in kept)
        self.cells = b"".join(CELL_ENTRY.pack(*cell) for cell in kept)

    def row(self) -> tuple[object, ...]:
        return (
            *(self.id, self.name, self.namespace, self.position, self.parent, self.children),
            *(self.holders, self.nbytes, self.score, self.evicted),
            *(self.pinned_until, self.expires, self.owner, self.cells),
        )


class Rows:
    """The rows that a transaction has read or made, one object each; `write` saves the changes.

    Decisions are made on the objects, which are ahead of the database, and sums follow from them.
    """

    def __init__(self, db: sqlite3.Connection, namespaces: _Namespaces) -> None:
        self.db = db
        self.by_name: dict[bytes, _ChunkRow] = {}
        self._by_id: dict[int, _ChunkRow] = {}
        self._read: dict[int, tuple[object, ...]] = {}  # as they were read
        self._namespaces = namespaces
        self._next_id = 0
        [row] = db.execute(f"SELECT {_SUMS} FROM store").fetchall()
        self._sums: tuple[int, ...] = row
        used, self.found_bytes, self.incomplete_since, self.num_evicted, self.num_forgotten = row
        self._used_bytes: int = used  # of chunks without an object
        self._owned_bytes: Counter[int] = Counter()  # the same of owners, as a change

    @property
    def used_bytes(self) -> int:
        return self._used_bytes + sum(chunk.charged_bytes for chunk in self._by_id.values())

    # Chunks

    def of(self, row: tuple[Any, ...]) -> _ChunkRow:
        """The object for a row of `_COLUMNS`."""
        chunk = self._by_id.get(row[0])
        if chunk is None:
            chunk = self._by_id[row[0]] = self.by_name[row[1]] = _ChunkRow(*row)
            self._read[row[0]] = row
            self._used_bytes -= chunk.charged_bytes
            self._owned_bytes[chunk.owner] -= chunk.charged_bytes
        return chunk

    def named(self, names: Iterable[bytes]) -> list[_ChunkRow]:
        """The chunks with these names that have a row."""
        names = dict.fromkeys(names)
        self._select("name", [name for name in names if name not in self.by_name])
        return [self.by_name[name] for name in names if name in self.by_name]

    def with_ids(self, ids: Sequence[int]) -> list[_ChunkRow]:
        """The chunks with these ids; ValueError if a row is missing: the index is damaged."""
        self._select("id", [each for each in ids if each not in self._by_id])
        if not self._by_id.keys() >= set(ids):
            raise ValueError("a chunk is missing")
        return [self._by_id[each] for each in ids]

    def _select(self, column: str, values: Sequence[object]) -> None:
        # Padded to multiples of 16, so that few statements are prepared.
        places = -(-len(values) // 16) * 16
        if values:
            query = f"SELECT {_COLUMNS} FROM chunk WHERE {column} IN ({'?, ' * (places - 1)}?)"
            padded = [*values, *[None] * (places - len(values))]
            for row in self.db.execute(query, padded).fetchall():
                self.of(row)

    def new(self, name: bytes, namespace: str, position: int) -> _ChunkRow:
        """A new chunk, whose row `write` inserts."""
        if self._next_id == 0:
            [(last,)] = self.db.execute("SELECT ifnull(max(id), 0) FROM chunk").fetchall()
            self._next_id = last + 1
        chunk = _ChunkRow(self._next_id, name, self.namespace(namespace), position)
        self._by_id[chunk.id] = self.by_name[name] = chunk
        self._next_id += 1
        return chunk

    def take_leaves(self, owners: Sequence[int]) -> Generator[_ChunkRow, None, None]:
        """Mark leaves as leaving and yield them, one owner's after the other's, lowest score
        first; the caller closes it.

        A chunk whose last child has been taken is a leaf, too.
        """
        for owner in owners:
            yield from self._take_leaves_of(owner)

    def _take_leaves_of(self, owner: int) -> Generator[_ChunkRow, None, None]:
        oldest = self.incomplete_since or -1
        query = f"SELECT {_COLUMNS} {_LEAVES} AND owner = ? AND score > ? ORDER BY score"
        later: list[tuple[int, int]] = []  # a heap of leaves that the query misplaces: score, id
        with contextlib.closing(self.db.execute(query, (owner, oldest))) as found:
            row = found.fetchone()
            while row is not None or later:
                if later and (row is None or later[0][0] <= row[_SCORE]):
                    chunk = self._by_id[heapq.heappop(later)[1]]
                else:
                    chunk, read_score = self.of(row), row[_SCORE]
                    row = found.fetchone()
                    if chunk.score != read_score:  # hit in this transaction
                        heapq.heappush(later, (chunk.score, chunk.id))
                        continue
                if not chunk.is_leaf():
                    continue
                parent = self.leave(chunk)
                is_next = parent is not None and parent.is_leaf() and parent.owner == owner
                if parent is not None and is_next and parent.score > oldest:
                    heapq.heappush(later, (parent.score, parent.id))
                yield chunk

    def leave(self, chunk: _ChunkRow) -> _ChunkRow | None:
        """Mark a leaf as leaving; its parent."""
        self.num_evicted += 1
        chunk.holders, chunk.evicted = LEAVING, self.num_evicted
        chunk.expires = 0
        return self._leave_parent(chunk)

    def end_pins(self, now_ns: int) -> None:
        """End up to `MAX_ROWS` pins whose time is over, in the database alone: objects follow when
        they are read again."""
        query = (
            "UPDATE chunk SET pinned_until = 0 WHERE id IN (SELECT id FROM chunk INDEXED BY pinned "
            "WHERE pinned_until > 0 AND pinned_until <= ? LIMIT ?)"
        )
        self.db.execute(query, (now_ns, MAX_ROWS))

    def pinned_bytes(self) -> int:
        """The charge of pinned chunks."""
        query = "SELECT ifnull(sum(bytes), 0) FROM chunk INDEXED BY pinned WHERE pinned_until > 0"
        return int(self.db.execute(query).fetchone()[0])

    def expired_leaves(self, now_ns: int, count: int) -> list[_ChunkRow]:
        """Leaves whose time to live has ended."""
        query = (
            f"SELECT {_COLUMNS} FROM chunk INDEXED BY expiring WHERE expires > 0 AND expires <= ? "
            "AND children = 0 AND holders = 0 AND bytes > 0 AND pinned_until = 0 "
            "LIMIT ?"
        )
        return [self.of(row) for row in self.db.execute(query, (now_ns, count)).fetchall()]

    def _leave_parent(self, chunk: _ChunkRow) -> _ChunkRow | None:
        if chunk.parent is None:
            return None
        [parent] = self.with_ids([chunk.parent])
        chunk.parent = None
        parent.children -= 1
        return parent

    def cells_of(self, chunks: Iterable[_ChunkRow]) -> tuple[StoredCell, ...]:
        return tuple(
            StoredCell(self._namespace_name(chunk.namespace), name, nbytes, chunk.name)
            for chunk in chunks
            for name, nbytes in CELL_ENTRY.iter_unpack(chunk.cells)
        )

    # Namespaces

    def namespace(self, name: str) -> int:
        """The id of a namespace, which is added if it is new."""
        known = self._namespaces.ids.get(name)
        if known is None:
            self.db.execute("INSERT OR IGNORE INTO namespace VALUES (NULL, ?)", (name,))
            query = "SELECT id FROM namespace WHERE name = ?"
            [(known,)] = self.db.execute(query, (name,)).fetchall()
            self._namespaces.add(known, name)
        return known

    def _namespace_name(self, number: int) -> str:
        known = self._namespaces.names.get(number)
        if known is None:
            query = "SELECT name FROM namespace WHERE id = ?"
            [(known,)] = self.db.execute(query, (number,)).fetchall()
            self._namespaces.add(number, known)
        return known

    # Owners

    def owner(self, name: str) -> int:
        """The id of an owner, who is added if new; 0 for ""."""
        if not name:
            return 0
        self.db.execute("INSERT OR IGNORE INTO owner VALUES (NULL, ?, 0)", (name,))
        query = "SELECT id FROM owner WHERE name = ?"
        return int(self.db.execute(query, (name,)).fetchone()[0])

    def owners_by_use(self, owner: int, nbytes: int) -> list[int]:
        """All who have chunks, the one with the most bytes first; `owner` is about to have
        `nbytes` more."""
        used: Counter[int] = Counter(self._owned_bytes)
        for chunk in self._by_id.values():
            used[chunk.owner] += chunk.charged_bytes
        owned = dict(self.db.execute("SELECT id, bytes FROM owner WHERE bytes > 0").fetchall())
        used.update(owned)
        used[0] += self._sums[0] - sum(owned.values())
        used[owner] += nbytes
        return [each for each, count in used.most_common() if count > 0]

    # Writers and their rounds

    def set_recycled(self, writer: str, recycled_bytes: int) -> None:
        """Charge a writer for the files of evicted cells that it keeps."""
        query = "SELECT recycled FROM writer WHERE name = ?"
        row = self.db.execute(query, (writer,)).fetchone() or (0,)
        if recycled_bytes != row[0]:
            self.db.execute("INSERT OR REPLACE INTO writer VALUES (?, ?)", (writer, recycled_bytes))
            self._used_bytes += recycled_bytes - row[0]

    def add_round(
        self, writer: str, held: Iterable[_ChunkRow], evicted: Iterable[_ChunkRow]
    ) -> int:
        """Record what a writer holds and evicts; the number of the round."""
        ids = [array("q", [chunk.id for chunk in each]).tobytes() for each in (held, evicted)]
        new = self.db.execute("INSERT INTO round VALUES (NULL, ?, ?, ?)", (writer, *ids))
        return int(new.lastrowid or 0)

    def round_of(self, writer: str) -> int | None:
        """The number of an unfinished round of a writer."""
        query = "SELECT id FROM round WHERE writer = ? LIMIT 1"
        row = self.db.execute(query, (writer,)).fetchone()
        return None if row is None else row[0]

    def round(self, writer: str, number: int) -> tuple[list[_ChunkRow], list[_ChunkRow]]:
        """The chunks that a round holds and those that it evicts; none if it has ended.

        Numbers are reused, so the writer must be the round's.
        """
        query = "SELECT held, evicted FROM round WHERE id = ? AND writer = ?"
        row = self.db.execute(query, (number, writer)).fetchone() or (b"", b"")
        held, evicted = (self.with_ids(array("q", ids)) for ids in row)
        return held, evicted

    def remove_round(self, writer: str, number: int) -> None:
        self.db.execute("DELETE FROM round WHERE id = ? AND writer = ?", (number, writer))

    # Saving

    def write(self) -> None:
        """Save all changes."""
        forgotten = self._forget()
        self.db.executemany("DELETE FROM chunk WHERE id = ?", [(each,) for each in forgotten])
        new, changed = [], []
        for chunk in self._by_id.values():
            row, before = chunk.row(), self._read.get(chunk.id)
            if before is None:
                new.append(row)
            elif row != before:
                changed.append((*row[4:], chunk.id))
        if new:
            self.db.executemany(f"INSERT INTO chunk VALUES ({'?, ' * 13}?)", new)
        if changed:
            self.db.executemany(
                "UPDATE chunk SET parent = ?, children = ?, holders = ?, bytes = ?, score = ?, "
                "evicted = ?, pinned_until = ?, expires = ?, owner = ?, cells = ? WHERE id = ?",
                changed,
            )
        for chunk in self._by_id.values():
            self._owned_bytes[chunk.owner] += chunk.charged_bytes
        self.db.executemany(
            "UPDATE owner SET bytes = bytes + ? WHERE id = ?",
            [(change, owner) for owner, change in self._owned_bytes.items() if owner and change],
        )
        sums = (
            *(self.used_bytes, self.found_bytes, self.incomplete_since),
            *(self.num_evicted, self.num_forgotten),
        )
        if sums != self._sums:
            self.db.execute(f"UPDATE store SET ({_SUMS}) = (?, ?, ?, ?, ?)", sums)

    def _forget(self) -> list[int]:
        """Delete up to `MAX_ROWS` empty chunks whose score need not be remembered; their ids.

        Later transactions delete the rest.
        """
        newest = max(self.num_forgotten, 0)
        query = f"SELECT {_COLUMNS} {_EMPTY} AND evicted <= ? LIMIT ?"
        for row in self.db.execute(query, (newest, 2 * MAX_EVICTED)).fetchall():
            self.of(row)
        forgotten: list[int] = []
        todo = [*self._by_id.values()]
        while todo and len(forgotten) < MAX_ROWS:
            chunk = todo.pop()
            if chunk.is_empty() and chunk.evicted <= newest and chunk.id in self._by_id:
                parent = self._leave_parent(chunk)
                todo += [] if parent is None else [parent]
                del self._by_id[chunk.id]
                if chunk.id in self._read:
                    forgotten.append(chunk.id)
        return forgotten


class FileIndex:
    """The index, as one open store uses it: one connection, under a lock; any thread may call.

    `check_path` raises OSError if the path to the index passes a symbolic link; `has_file` is False
    for a cell that certainly has no file.
    """

    def __init__(
        self,
        path: str,
        policy: EvictionPolicy,
        clock_ns: Callable[[], int],
        check_path: Callable[[str], None] = lambda path: None,
        has_file: Callable[[StoredCell], bool] = lambda cell: False,
    ) -> None:
        self._path = path
        self._has_file = has_file
        self._check_path = check_path
        self._policy = policy
        self._clock_ns = clock_ns
        self._lock = threading.Lock()  # guards the connection
        self._pid = os.getpid()
        self._db: sqlite3.Connection | None = None
        self._opened: tuple[int, int, int] | None = None  # device, inode, process
        self._namespaces = _Namespaces()  # of this file
        self._hits: dict[bytes, int] = {}  # chunk -> time of its last read, not written yet
        with contextlib.suppress(OSError):
            self.used_bytes()  # replaces a damaged index
        self.used_bytes()

    def close(self) -> None:
        with self._lock:
            self._disconnect()

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
        deletes the files of `evicted`, writes its own and settles. If one transaction
        cannot evict enough (`room_bytes` < 0), the caller settles and calls again.
        `recycled_bytes` are those of files that the writer keeps, `disk_bytes` what the disk has
        for more files (below 0: it needs some of what is here). While the index is incomplete,
        new chunks may take `SOFT_SHARE` of the size and are evicted for each other only.
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
            fitting_bytes = min(size_bytes, rows.used_bytes + disk_bytes)
            evicted, room_bytes = self._evict(rows, fitting_bytes, accepted)
            made = Reservation(writer, rows.add_round(writer, chunks.values(), evicted))
            made.opened, made.room_bytes = self._opened, room_bytes
            made.evicted = rows.cells_of(evicted)
            if room_bytes >= 0:
                self._charge(rows, chunks, accepted, size_bytes)
                made.cells = accepted
            else:  # no other writer may use this space before the files are deleted
                freed_bytes = sum(chunk.nbytes for chunk in evicted)
                rows.set_recycled(writer, recycled_bytes + freed_bytes)
            return made
        return None

    def hold(self, writer: str, chunks: Sequence[bytes], recycled_bytes: int) -> Reservation:
        """Protect up to `MAX_ROWS` stored chunks from eviction until `settle`."""
        assert len(chunks) <= MAX_ROWS, len(chunks)
        with self._writing() as rows:
            rows.set_recycled(writer, recycled_bytes)
            held = [chunk for chunk in rows.named(chunks) if chunk.holders != LEAVING]
            for chunk in held:
                chunk.holders += 1
            return Reservation(writer, rows.add_round(writer, held, ()), self._opened)

    def settle(self, reservation: Reservation, recycled_bytes: int | None = None) -> None:
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
            for chunk in evicted:
                chunk.holders, chunk.nbytes, chunk.cells = 0, 0, b""
            chunks = {chunk.name: chunk for chunk in held}
            for chunk in held:
                chunk.holders = max(chunk.holders - 1, 0)
            self._end_charges(chunks, reservation.unstored())
            for cell in stored:  # damaged files may have been removed meanwhile
                if cell.chunk in chunks:
                    chunks[cell.chunk].add(cell.name, cell.nbytes)

    def expire(self, writer: str) -> Reservation | None:
        """Evict up to `MAX_EVICTED` chunks whose time to live has ended; None if there are none.

        The caller deletes the files of `evicted` and settles.
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
                rows.leave(chunk)
            number = rows.add_round(writer, (), evicted)
            return Reservation(writer, number, self._opened, evicted=rows.cells_of(evicted))

    def pin(self, chunks: Sequence[bytes], until_ns: int, size_bytes: int) -> int:
        """Pin stored chunks until a time, within `PINNED_SHARE` of the size; 0 ends their pins.

        Returns the number of chunks that are pinned, or were unpinned.
        """
        count = 0
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
        """A round that a killed writer has not settled; None if there is none left.

        Its `cells` are those that no other writer holds. The caller deletes the files of `evicted`
        and settles.
        """
        with self._writing() as rows:
            number = rows.round_of(writer)
            if number is None:
                return None
            held, evicted = rows.round(writer, number)
            begun = rows.cells_of(chunk for chunk in held if chunk.holders == 1)
            return Reservation(writer, number, self._opened, begun, rows.cells_of(evicted))

    def remove_writer(self, writer: str) -> None:
        """Forget a writer that has settled all rounds, and its recycled files."""
        with self._writing() as rows:
            rows.set_recycled(writer, 0)
            rows.db.execute("DELETE FROM writer WHERE name = ?", (writer,))

    # Reads

    def note_hits(self, chunks: Iterable[bytes]) -> None:
        """Remember that chunks were read; written by the next put or `write_hits`."""
        now_ns = self._clock_ns()
        for name in dict.fromkeys(chunks) if len(self._hits) < MAX_NOTED_HITS else ():
            self._hits[name] = now_ns

    def write_hits(self) -> None:
        """Write the hits so far, `MAX_ROWS` in a transaction."""
        for _ in range(0, len(self._hits), MAX_ROWS):
            with self._writing() as rows:
                self._write_hits(rows)

    def used_bytes(self) -> int:
        with self._reading() as db:
            return int(db.execute("SELECT used_bytes FROM store").fetchone()[0])

    def coldest(self, max_cells: int) -> list[tuple[StoredCell, ...]]:
        """The cells of leaves, a tuple for each chunk, in order of eviction.

        Whole chunks, so there may be more than `max_cells`.
        """
        found: list[tuple[StoredCell, ...]] = []
        with self._reading() as db:
            rows = Rows(db, self._namespaces)
            query = f"SELECT {_COLUMNS} {_LEAVES} AND owner = ? ORDER BY score LIMIT ?"
            for owner in rows.owners_by_use(0, 0):
                for row in db.execute(query, (owner, max_cells)).fetchall():
                    found.append(rows.cells_of([rows.of(row)]))
                    max_cells -= len(found[-1])
                    if max_cells <= 0:
                        return found
        return found

    # Removals: the callers have deleted the files. Charges of chunks that a writer holds stay until
    # the writer settles them or the chunk is evicted.

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
                query = f"SELECT {_COLUMNS} FROM chunk WHERE id > ? ORDER BY id LIMIT ?"
                found = rows.db.execute(query, (last, MAX_ROWS)).fetchall()
                chunks = [rows.of(row) for row in found]
                own = {chunk.name: chunk for chunk in chunks if chunk.namespace == number}
                self._end_charges(own, rows.cells_of(own.values()))
            if not chunks:
                return
            last = chunks[-1].id

    # Rebuilding

    @property
    def is_complete(self) -> bool:
        """Whether the index lists every file; a new one does not."""
        with self._reading() as db:
            return not db.execute("SELECT incomplete_since FROM store").fetchone()[0]

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
                    chunk.score = max(chunk.score, min(written_ns, rows.incomplete_since))
            rows.found_bytes += rows.used_bytes - used_bytes

    def complete(self) -> None:
        """Every file has been added."""
        boot = _boot()
        with self._writing() as rows:
            rows.incomplete_since = 0
            rows.db.execute("UPDATE store SET boot = ?", (boot,))

    def check_after_power_loss(self) -> None:
        """After a reboot replace a damaged index, and mark a sound one incomplete."""
        boot = _boot()
        with self._reading() as db:
            if db.execute("SELECT boot FROM store").fetchone()[0] in ("", boot):
                return
        with self._replacing_damage(), contextlib.closing(sqlite3.connect(self._path)) as db:
            [first] = db.execute("PRAGMA quick_check(1)").fetchone()
            if first != "ok":
                raise sqlite3.DatabaseError(first)
        with self._writing() as rows:
            rows.incomplete_since, rows.found_bytes = self._clock_ns(), rows.used_bytes
            rows.db.execute("UPDATE store SET boot = ?", (boot,))

    # Decisions within a transaction

    def _find(self, rows: Rows, cells: Sequence[StoredCell]) -> dict[bytes, _ChunkRow]:
        """The chunks of cells by name; new ones are made.

        Without those that are being evicted or whose parent is.
        """
        rows.named(name for cell in cells for name in (cell.chunk, cell.parent))
        found: dict[bytes, _ChunkRow] = {}
        for cell in cells:
            if cell.chunk not in found:
                chunk = self._find_one(rows, cell)
                if chunk is not None:
                    found[cell.chunk] = chunk
        return found

    def _find_one(self, rows: Rows, cell: StoredCell) -> _ChunkRow | None:
        chunk = rows.by_name.get(cell.chunk)
        if chunk is not None and chunk.holders == LEAVING:
            return None
        parent: _ChunkRow | None = None
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
        chunks: Mapping[bytes, _ChunkRow],
        cells: Sequence[StoredCell],
        size_bytes: int,
    ) -> None:
        """Add cells. A chunk that had none gets its first score, or counts as hit if its last
        eviction is remembered, and the time to live of its first writer."""
        now_ns = self._clock_ns()
        first = {cell.chunk: cell for cell in reversed(cells)}
        owners = {name: rows.owner(name) for name in {cell.owner for cell in cells}}
        for chunk in chunks.values():
            if chunk.nbytes == 0:
                is_known, chunk.evicted = chunk.evicted > 0, 0
                score = self._policy.on_hit(chunk.score, now_ns) if is_known else None
                chunk.score = self._policy.on_put(now_ns) if score is None else score
                chunk.pinned_until = chunk.expires = 0
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

    def _end_charges(self, chunks: Mapping[bytes, _ChunkRow], cells: Iterable[StoredCell]) -> None:
        """Remove those of cells that have no file and whose chunk no writer holds."""
        ended: defaultdict[bytes, set[bytes]] = defaultdict(set)
        for cell in cells:
            chunk = chunks.get(cell.chunk)
            if chunk is not None and chunk.holders == 0 and not self._has_file(cell):
                ended[cell.chunk].add(cell.name)
        for name, names in ended.items():
            chunks[name].remove(names)

    def _pin(self, rows: Rows, chunks: Iterable[_ChunkRow], until_ns: int, size_bytes: int) -> int:
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
    ) -> tuple[list[_ChunkRow], int]:
        """Evict up to `MAX_EVICTED` leaves until there is room for cells; _NoRoom if too few.

        Returns them, and the free space after `cells`. Their rows stay until `settle`, and then as
        many as the policy asks for, to remember their scores.
        """
        if rows.incomplete_since:
            size_bytes = min(rows.found_bytes, size_bytes) + int(size_bytes * SOFT_SHARE)
        used_bytes = rows.used_bytes
        free_bytes = room_bytes = size_bytes - used_bytes - sum(cell.nbytes for cell in cells)
        evicted: list[_ChunkRow] = []
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
            # The number of chunks that fit, if all are as large as these.
            num_chunks = used_bytes * len(evicted) // (room_bytes - free_bytes)
            rows.num_forgotten = rows.num_evicted - self._policy.remembered * num_chunks
        return evicted, room_bytes

    def _repair_scores(self, rows: Rows) -> None:
        """Lower the scores of leaves that only a wrong clock can have given."""
        now_ns = self._clock_ns()
        query = f"SELECT {_COLUMNS} {_LEAVES} AND owner = ? AND score > ? LIMIT ?"
        for owner in rows.owners_by_use(0, 0):
            values = (owner, highest_score(now_ns), MAX_ROWS)
            for row in rows.db.execute(query, values).fetchall():
                rows.of(row).score = now_ns

    def _write_hits(self, rows: Rows) -> None:
        if rows.incomplete_since:  # a raised score would expose found chunks to eviction
            return
        hits = dict(self._hits.popitem() for _ in range(min(MAX_ROWS, len(self._hits))))
        for chunk in rows.named(hits):
            chunk.score = self._policy.on_hit(chunk.score, hits[chunk.name])

    # The connection

    @contextlib.contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        with self._locked(), self._replacing_damage():
            yield self._connected()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[Rows]:
        """A transaction, ended by `Rows.write`; an exception rolls it back."""
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
                rows = Rows(db, self._namespaces)
                yield rows
                rows.write()
                db.execute("COMMIT")
            except BaseException:
                self._namespaces.clear()  # a new one is undone, too
                if db.in_transaction:
                    db.execute("ROLLBACK")
                raise

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        if self._pid != os.getpid():  # after a fork: a thread of the parent may have held it
            self._lock, self._pid = threading.Lock(), os.getpid()
        if not self._lock.acquire(timeout=WAIT_S):
            raise IndexBusy(f"{self._path} was in use by another thread for {WAIT_S:g} s")
        try:
            yield
        finally:
            self._lock.release()

    @contextlib.contextmanager
    def _replacing_damage(self) -> Iterator[None]:
        """Replace a damaged index; the call fails with OSError ESTALE."""
        try:
            yield
        except _DAMAGE as error:
            code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF
            if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                raise IndexBusy(f"{self._path} is locked by another process") from None
            if code in _ERRNOS:
                number, text = _ERRNOS[code], f"the index cannot be used: {error}"
                if _is_full(self._path):  # SQLite may say SQLITE_IOERR then
                    number, text = errno.ENOSPC, os.strerror(errno.ENOSPC)
                raise OSError(number, text, self._path) from error
            logger.warning("file store index %s is damaged and replaced: %s", self._path, error)
            self._disconnect()
            _delete(self._path)
            raise OSError(errno.ESTALE, f"the index was damaged: {error}", self._path) from error

    def _connected(self) -> sqlite3.Connection:
        """The connection; a new one if the file was replaced, or after a fork."""
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
            _prepare(db, self._clock_ns())
        except BaseException:
            db.close()
            raise
        self._db, self._opened = db, (status.st_dev, status.st_ino, os.getpid())
        return db

    def _disconnect(self) -> None:
        # After a fork the connection is the parent's to close.
        if self._db is not None and self._opened is not None and self._opened[2] == os.getpid():
            self._db.close()
        self._db = self._opened = None
        self._namespaces.clear()


def usage_in(path: str) -> list[NamespaceUsage]:
    """What each namespace has, read from an index that is not changed; StoreError if it cannot."""
    query = (
        f"SELECT name, count(*), sum(length(cells)) / {CELL_ENTRY.size}, sum(bytes) FROM ("
        "SELECT namespace.name AS name, cells, bytes FROM chunk JOIN namespace "
        "ON namespace.id = chunk.namespace WHERE bytes > 0) GROUP BY name"
    )
    return [NamespaceUsage(*row) for row in _read_only(path, query)]


def owners_in(path: str) -> list[OwnerUsage]:
    """What each owner has, read as in `usage_in`."""
    query = (
        "SELECT owner.name, count(*), sum(chunk.bytes) FROM chunk JOIN owner "
        "ON owner.id = chunk.owner WHERE chunk.bytes > 0 GROUP BY owner.name"
    )
    return [OwnerUsage(*row) for row in _read_only(path, query)]


class StoredChunk(NamedTuple):
    """A row of a chunk that has cells."""

    namespace: str
    id: int
    parent: int | None
    nbytes: int
    score: int
    pinned_until: int
    num_cells: int
    first_cell: bytes


def chunks_in(path: str) -> Iterator[StoredChunk]:
    """Every chunk, a parent before its children, read as in `usage_in`."""
    query = (
        "SELECT namespace.name, chunk.id, parent, bytes, score, pinned_until, cells FROM chunk "
        "JOIN namespace ON namespace.id = chunk.namespace WHERE bytes > 0 ORDER BY position"
    )
    for row in _read_only(path, query):
        cells: bytes = row[-1]
        first, _ = CELL_ENTRY.unpack_from(cells)
        yield StoredChunk._make((*row[:-1], len(cells) // CELL_ENTRY.size, first))


def cells_of_owner(path: str, namespace: str, owner: str) -> Iterator[StoredCell]:
    """The cells of an owner in a namespace, read as in `usage_in`."""
    query = (
        "SELECT chunk.name, cells FROM chunk JOIN owner ON owner.id = chunk.owner "
        "JOIN namespace ON namespace.id = chunk.namespace "
        "WHERE chunk.bytes > 0 AND owner.name = ? AND namespace.name = ?"
    )
    for chunk, cells in _read_only(path, query, owner, namespace):
        for name, nbytes in CELL_ENTRY.iter_unpack(cells):
            yield StoredCell(namespace, name, nbytes, chunk)


def _read_only(path: str, query: str, *values: object) -> list[tuple[Any, ...]]:
    try:
        with contextlib.closing(sqlite3.connect(f"file:{quote(path)}?mode=ro", uri=True)) as db:
            return db.execute(query, values).fetchall()
    except sqlite3.Error as error:
        raise StoreError(f"the index {path} cannot be read: {error}") from error


class _NoRoom(Exception):
    """There are too few leaves; rolls the transaction back."""


def create_safely(path: str) -> None:
    """Create an index that only this user may read, unless a plain file with one name is there."""
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


def _prepare(db: sqlite3.Connection, now_ns: int) -> None:
    """Set up the connection and missing tables; DatabaseError if the file is of another version."""
    db.execute(f"PRAGMA busy_timeout = {int(WAIT_S * 1000)}")
    # Network file systems refuse WAL, as their hosts share no memory. With a rollback journal
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
            raise sqlite3.DatabaseError("not an index of this release")
        db.executescript(_SCHEMA.format(now_ns=now_ns))  # idempotent: others may do the same
    if mode == "wal":
        db.execute("PRAGMA busy_timeout = 0")


def _is_full(path: str) -> bool:
    """Whether the file system of a path is out of blocks or inodes."""
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
