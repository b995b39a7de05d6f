"""The tables of a file store's index in SQLite, and the rows of one transaction.

A row for each chunk, with its cells; a row of `round` for what a writer holds and evicts. `Rows`
reads and writes them and keeps the sums; `index.py` decides what changes.
"""

import contextlib
import heapq
import operator
import os
import sqlite3
import stat
import struct
from array import array
from collections import Counter
from collections.abc import Container, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from hashlib import blake2b
from typing import Any, NamedTuple
from urllib.parse import quote

from vllm_kvpool.errors import StoreError, StoreUnreachable
from vllm_kvpool.identity.keys import Namespace, chunk_id_of_key, is_namespace, manifest_key
from vllm_kvpool.storage.base import (
    NO_RETENTION,
    ChunkRef,
    NamespaceUsage,
    OwnerUsage,
    Retention,
)
from vllm_kvpool.storage.file.file_system import file_system_of
from vllm_kvpool.storage.file.format import MAX_POSITION

WAIT_S = 10.0  # for the transactions of other processes, which take milliseconds each
MAX_ROWS = 128  # cells or hits of one transaction, and chunks that it deletes
MAX_EVICTED = 32  # chunks, in one transaction
ID_BYTES = 16
FOREIGN = "foreign"  # the directory of keys outside every namespace, whose names have an `@`
APPLICATION_ID = 0x4B56504C
SCHEMA_VERSION = 9
MOST = 1 << 62  # of a number in a row, either way: sums of two still fit into SQLite's integers
MOST_CHUNK_BYTES = 1 << 53
MAX_TIME_NS = MOST - 1  # in the year 2116; later times count as this one
LEAVING = -1  # `holders` of a chunk that is being evicted; its bytes are not in `used_bytes`

_SCHEMA = f"""
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS store (
    id INTEGER PRIMARY KEY, used_bytes INTEGER NOT NULL DEFAULT 0,
    found_bytes INTEGER NOT NULL DEFAULT 0,
    incomplete_since INTEGER NOT NULL,  -- 0 if every file is known
    evicted_bytes INTEGER NOT NULL DEFAULT 0, forgotten_bytes INTEGER NOT NULL DEFAULT 0,
    boot TEXT NOT NULL DEFAULT '');
INSERT OR IGNORE INTO store (id, incomplete_since, boot) VALUES (1, {{now_ns}}, '{{boot}}');
CREATE TABLE IF NOT EXISTS namespace (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE);
-- A parent's position is lower than its child's, so there are no cycles. `evicted` is the store's
-- `evicted_bytes` after the chunk's last eviction, 0 if it was never evicted. Chunks evicted up to
-- `forgotten_bytes` need not be remembered. A row without bytes remembers the
-- score of an evicted chunk, or links a chunk to the chunks before it. `hits` counts the cells
-- that were read since the chunk was written.
CREATE TABLE IF NOT EXISTS chunk (
    id INTEGER PRIMARY KEY, name BLOB NOT NULL UNIQUE, namespace INTEGER NOT NULL,
    position INTEGER NOT NULL, parent INTEGER, children INTEGER NOT NULL,
    holders INTEGER NOT NULL, bytes INTEGER NOT NULL, score INTEGER NOT NULL,
    evicted INTEGER NOT NULL, pinned_until INTEGER NOT NULL, expires INTEGER NOT NULL,
    owner INTEGER NOT NULL, hits INTEGER NOT NULL, cells BLOB NOT NULL);
-- Tenants or namespaces that share the room; without shares chunks have owner 0, which has no row.
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
-- `held` and `evicted` are arrays of 64-bit chunk ids; `unwritten` is charged for files that the
-- disk may not have yet.
CREATE TABLE IF NOT EXISTS round (
    id INTEGER PRIMARY KEY, writer TEXT NOT NULL, held BLOB NOT NULL, evicted BLOB NOT NULL,
    unwritten INTEGER NOT NULL DEFAULT 0);
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {SCHEMA_VERSION};
COMMIT;
"""
_COLUMNS = "id, name, namespace, position, parent, children, holders, bytes, score, evicted, "
_COLUMNS += "pinned_until, expires, owner, hits, cells"
_SUMS = "used_bytes, found_bytes, incomplete_since, evicted_bytes, forgotten_bytes"
_LEAVES = "FROM chunk INDEXED BY leaf WHERE children = 0 AND holders = 0 AND bytes > 0"
_LEAVES += " AND pinned_until = 0"
_EMPTY = "FROM chunk INDEXED BY empty WHERE children = 0 AND holders = 0 AND bytes = 0"
_WAL_AT = 18  # where SQLite's header has a 2 for WAL, else a 1
_SCORE = 8  # its place in `_COLUMNS`
NAME_DIGEST_BYTES = 20  # in the name of a cell's file
CELL_ENTRY = struct.Struct(f"<{NAME_DIGEST_BYTES}sq")  # an entry of `cells`: the digest, bytes


class DamagedIndex(Exception):
    """Rows were read that this release cannot have written."""


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
    """Return a cell from its writer's description; numbers that no row can hold are cut."""
    parent = b"" if ref.parent in ("", ref.id) else chunk_name(namespace, ref.parent)
    chunk = chunk_name(namespace, ref.id)
    position = min(max(ref.position, 0), MAX_POSITION)
    until = Retention(*(min(each, MAX_TIME_NS) for each in ref.retention))
    return StoredCell(namespace, name, nbytes, chunk, parent, position, until, ref.tenant)


def is_directory_of_cells(name: object) -> bool:
    """Return True if a name is a namespace's, or `FOREIGN`."""
    return isinstance(name, str) and (name == FOREIGN or is_namespace(name))


def chunk_name(namespace: str, chunk_id: str) -> bytes:
    """Return the digest that names a chunk in the index."""
    text = f"{namespace}/{chunk_id}".encode("utf-8", "surrogatepass")
    return blake2b(text, digest_size=ID_BYTES).digest()


@dataclass(eq=False, slots=True)
class ChunkRow:
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
    hits: int = 0
    cells: bytes = b""

    @property
    def charged_bytes(self) -> int:
        """Bytes that count against the store's size: none once the chunk is being evicted."""
        return 0 if self.holders == LEAVING else self.nbytes

    def is_leaf(self) -> bool:
        """Return True if the chunk may be evicted: stored, unpinned, and nothing depends on it."""
        has_none = self.children == 0 and self.holders == 0
        return has_none and self.nbytes > 0 and self.pinned_until == 0

    def is_empty(self) -> bool:
        """Return True if the row may be deleted: no bytes, no children, no holders."""
        return self.children == 0 and self.holders == 0 and self.nbytes == 0

    def add(self, name: bytes, nbytes: int) -> None:
        """Add a cell unless it is there."""
        if name not in dict(CELL_ENTRY.iter_unpack(self.cells)):
            self.cells += CELL_ENTRY.pack(name, nbytes)
            self.nbytes += nbytes

    def remove(self, names: Container[bytes]) -> None:
        """Remove the cells of these names."""
        self._keep([cell for cell in CELL_ENTRY.iter_unpack(self.cells) if cell[0] not in names])

    def keep_only(self, names: Container[bytes]) -> None:
        """Remove all cells but those of these names."""
        self._keep([cell for cell in CELL_ENTRY.iter_unpack(self.cells) if cell[0] in names])

    def _keep(self, kept: Sequence[tuple[bytes, int]]) -> None:
        self.nbytes = sum(nbytes for _, nbytes in kept)
        self.cells = b"".join(CELL_ENTRY.pack(*cell) for cell in kept)


_row_of = operator.attrgetter(*(field.name for field in fields(ChunkRow)))  # as in `_COLUMNS`
_TYPES_OF_ROW = frozenset(
    tuple(
        {"name": bytes, "cells": bytes, "parent": parent}.get(field.name, int)
        for field in fields(ChunkRow)
    )
    for parent in (int, type(None))
)


def _checked_row(row: tuple[Any, ...]) -> ChunkRow:
    """Return the chunk of a row of `_COLUMNS`; DamagedIndex if it cannot have been written."""
    if tuple(map(type, row)) not in _TYPES_OF_ROW or len(row[-1]) % CELL_ENTRY.size:
        raise DamagedIndex("a row of a chunk cannot be read")
    numbers = row[2:4] + row[5:-1]  # without ids, which are not added to
    if min(numbers) < -MOST or max(numbers) > MOST:
        raise DamagedIndex("a number is out of range")
    chunk = ChunkRow(*row)
    sizes = [nbytes for _, nbytes in CELL_ENTRY.iter_unpack(chunk.cells)]
    if sum(sizes) != chunk.nbytes or not 0 <= chunk.nbytes <= MOST_CHUNK_BYTES:
        raise DamagedIndex("the cells of a chunk do not add up to its bytes")
    return chunk


def _check_numbers(values: Iterable[object]) -> None:
    if not all(type(value) is int and -MOST <= value <= MOST for value in values):
        raise DamagedIndex("a number is out of range")


def number_in(row: tuple[Any, ...] | None) -> int:
    """Return the number that a query has answered; DamagedIndex if it is none."""
    if row is None:
        raise DamagedIndex("a row is missing")
    _check_numbers(row[:1])
    return int(row[0])


# Each query counts rows that whole transactions cannot leave.
_DISAGREEMENTS = (
    "SELECT used_bytes != (SELECT ifnull(sum(bytes), 0) FROM chunk WHERE holders >= 0) "
    "+ (SELECT ifnull(sum(recycled), 0) FROM writer) FROM store",
    "SELECT count(*) FROM owner LEFT JOIN (SELECT owner, sum(bytes) AS used FROM chunk "
    "WHERE holders >= 0 GROUP BY owner) AS own ON own.owner = owner.id "
    "WHERE owner.bytes != ifnull(used, 0)",
    "SELECT count(*) FROM chunk LEFT JOIN (SELECT parent AS id, count(*) AS number FROM chunk "
    "GROUP BY parent) AS child ON child.id = chunk.id WHERE children != ifnull(number, 0)",
    "SELECT count(parent) != ifnull(sum(children), 0) FROM chunk",
    "SELECT count(*) FROM chunk WHERE namespace NOT IN (SELECT id FROM namespace) "
    "OR owner NOT IN (SELECT 0 UNION SELECT id FROM owner)",
)


def check_consistency(db: sqlite3.Connection) -> None:
    """Read every row; raise DamagedIndex or sqlite3.Error unless rows, sums and links agree."""
    [found] = db.execute("PRAGMA integrity_check(1)").fetchone()
    if found != "ok":
        raise DamagedIndex(found)
    for query in _DISAGREEMENTS:
        if number_in(db.execute(query).fetchone()):
            raise DamagedIndex("sums or links of chunks do not agree")
    rows, holders = Rows(db), Counter[int]()
    for number, writer in db.execute("SELECT id, writer FROM round").fetchall():
        held, evicted = rows.round(writer, number)
        holders.update(chunk.id for chunk in held)
        holders.update({chunk.id: LEAVING for chunk in evicted})
    if dict(db.execute("SELECT id, holders FROM chunk WHERE holders != 0")) != dict(holders):
        raise DamagedIndex("rounds do not agree with the chunks that they hold")


class Rows:
    """The rows that a transaction has read or made, one object each; `write` saves the changes.

    Decisions are made on the objects, which are ahead of the database, and sums follow from them.
    """

    def __init__(self, db: sqlite3.Connection) -> None:
        self.db = db
        self.by_name: dict[bytes, ChunkRow] = {}
        self._by_id: dict[int, ChunkRow] = {}
        self._read: dict[int, tuple[object, ...]] = {}  # as they were read
        self._namespaces: dict[str, int] = {}
        self._namespace_names: dict[int, str] = {}
        self._next_id = 0
        row = db.execute(f"SELECT {_SUMS} FROM store").fetchone()
        if row is None:
            raise DamagedIndex("the row of the store is missing")
        _check_numbers(row)
        self._sums: tuple[int, ...] = row
        used, self.found_bytes, self.incomplete_since, self.evicted_bytes, self.forgotten_bytes = (
            row
        )
        self._used_bytes: int = used  # of chunks without an object
        self._owned_bytes: Counter[int] = Counter()  # the same of owners, as a change

    @property
    def used_bytes(self) -> int:
        """Bytes of the store after the transaction's changes."""
        return self._used_bytes + sum(chunk.charged_bytes for chunk in self._by_id.values())

    # Chunks

    def of(self, row: tuple[Any, ...]) -> ChunkRow:
        """Return the object for a row of `_COLUMNS`."""
        chunk = self._by_id.get(row[0])
        if chunk is None:
            chunk = self._by_id[row[0]] = self.by_name[row[1]] = _checked_row(row)
            self._read[row[0]] = row
            self._used_bytes -= chunk.charged_bytes
            self._owned_bytes[chunk.owner] -= chunk.charged_bytes
        return chunk

    def named(self, names: Iterable[bytes]) -> list[ChunkRow]:
        """Return the chunks with these names that have a row."""
        names = dict.fromkeys(names)
        self._select("name", [name for name in names if name not in self.by_name])
        return [self.by_name[name] for name in names if name in self.by_name]

    def with_ids(self, ids: Sequence[int]) -> list[ChunkRow]:
        """Return the chunks with these ids; DamagedIndex if a row is missing."""
        self._select("id", [each for each in ids if each not in self._by_id])
        if not self._by_id.keys() >= set(ids):
            raise DamagedIndex("a chunk is missing")
        return [self._by_id[each] for each in ids]

    def _select(self, column: str, values: Sequence[object]) -> None:
        # Padded to multiples of 16, so that few statements are prepared.
        places = -(-len(values) // 16) * 16
        if values:
            query = f"SELECT {_COLUMNS} FROM chunk WHERE {column} IN ({'?, ' * (places - 1)}?)"
            padded = [*values, *[None] * (places - len(values))]
            for row in self.db.execute(query, padded).fetchall():
                self.of(row)

    def new(self, name: bytes, namespace: str, position: int) -> ChunkRow:
        """Return a new chunk, whose row `write` inserts."""
        if self._next_id == 0:
            last = self.db.execute("SELECT ifnull(max(id), 0) FROM chunk").fetchone()
            self._next_id = number_in(last) + 1
        chunk = ChunkRow(self._next_id, name, self.namespace(namespace), position)
        self._by_id[chunk.id] = self.by_name[name] = chunk
        self._next_id += 1
        return chunk

    def after(self, last_id: int) -> list[ChunkRow]:
        """Return the next `MAX_ROWS` chunks in the order of their ids."""
        query = f"SELECT {_COLUMNS} FROM chunk WHERE id > ? ORDER BY id LIMIT ?"
        return [self.of(row) for row in self.db.execute(query, (last_id, MAX_ROWS)).fetchall()]

    def leaves(self, owner: int, count: int, above: int = -1) -> list[ChunkRow]:
        """Return the leaves of an owner with the lowest scores above one."""
        query = f"SELECT {_COLUMNS} {_LEAVES} AND owner = ? AND score > ? ORDER BY score LIMIT ?"
        found = self.db.execute(query, (owner, above, count)).fetchall()
        return [self.of(row) for row in found]

    def take_leaves(self, owners: Sequence[int]) -> Generator[ChunkRow, None, None]:
        """Mark leaves as leaving and yield them, one owner's after the other's, lowest score first.

        The caller closes the generator. A chunk whose last child has been taken is a leaf, too.
        """
        for owner in owners:
            yield from self._take_leaves_of(owner)

    def _take_leaves_of(self, owner: int) -> Generator[ChunkRow, None, None]:
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
                parent = self.evict(chunk)
                is_next = parent is not None and parent.is_leaf() and parent.owner == owner
                if parent is not None and is_next and parent.score > oldest:
                    heapq.heappush(later, (parent.score, parent.id))
                yield chunk

    def evict(self, chunk: ChunkRow) -> ChunkRow | None:
        """Mark a leaf as leaving; its parent."""
        self.evicted_bytes += chunk.nbytes
        chunk.holders, chunk.evicted = LEAVING, self.evicted_bytes
        return self._leave_parent(chunk)

    def end_pins(self, now_ns: int) -> None:
        """End up to `MAX_ROWS` pins whose time is over, in the database alone.

        Objects follow when they are read again.
        """
        query = (
            "UPDATE chunk SET pinned_until = 0 WHERE id IN (SELECT id FROM chunk INDEXED BY pinned "
            "WHERE pinned_until > 0 AND pinned_until <= ? LIMIT ?)"
        )
        self.db.execute(query, (now_ns, MAX_ROWS))

    def pinned_bytes(self) -> int:
        """Return the charge of pinned chunks."""
        query = "SELECT ifnull(sum(bytes), 0) FROM chunk INDEXED BY pinned WHERE pinned_until > 0"
        return number_in(self.db.execute(query).fetchone())

    def expired_leaves(self, now_ns: int, count: int) -> list[ChunkRow]:
        """Return the leaves whose time to live has ended."""
        query = (
            f"SELECT {_COLUMNS} FROM chunk INDEXED BY expiring WHERE expires > 0 AND expires <= ? "
            "AND children = 0 AND holders = 0 AND bytes > 0 AND pinned_until = 0 "
            "LIMIT ?"
        )
        return [self.of(row) for row in self.db.execute(query, (now_ns, count)).fetchall()]

    def _leave_parent(self, chunk: ChunkRow) -> ChunkRow | None:
        if chunk.parent is None:
            return None
        [parent] = self.with_ids([chunk.parent])
        chunk.parent = None
        parent.children -= 1
        return parent

    def cells_of(self, chunks: Iterable[ChunkRow]) -> tuple[StoredCell, ...]:
        """Return the stored cells of `chunks`, in their order."""
        return tuple(
            StoredCell(self._namespace_name(chunk.namespace), name, nbytes, chunk.name)
            for chunk in chunks
            for name, nbytes in CELL_ENTRY.iter_unpack(chunk.cells)
        )

    # Namespaces

    def namespace(self, name: str) -> int:
        """Return the id of a namespace, which is added if it is new."""
        known = self._namespaces.get(name)
        if known is None:
            query = "SELECT id FROM namespace WHERE name = ?"
            row = self.db.execute(query, (name,)).fetchone()
            if row is None:
                new = self.db.execute("INSERT INTO namespace VALUES (NULL, ?)", (name,))
                row = (int(new.lastrowid or 0),)
            known = self._namespaces[name] = number_in(row)
        return known

    def _namespace_name(self, number: int) -> str:
        """Return the name of a namespace, which is a directory's.

        Raises DamagedIndex if it could be no such.
        """
        known = self._namespace_names.get(number)
        if known is None:
            query = "SELECT name FROM namespace WHERE id = ?"
            row = self.db.execute(query, (number,)).fetchone()
            if row is None or not is_directory_of_cells(row[0]):
                raise DamagedIndex("the namespace of a chunk is missing, or has no such name")
            known = self._namespace_names[number] = row[0]
        return known

    # Owners

    def owner(self, name: str) -> int:
        """Return the id of an owner, which is added if it is new; 0 for ""."""
        if not name:
            return 0
        self.db.execute("INSERT OR IGNORE INTO owner VALUES (NULL, ?, 0)", (name,))
        query = "SELECT id FROM owner WHERE name = ?"
        return number_in(self.db.execute(query, (name,)).fetchone())

    def owners_by_use(self, owner: int, nbytes: int) -> list[int]:
        """Return all owners of chunks, the one with the most bytes first.

        `owner` is about to have `nbytes` more.
        """
        used: Counter[int] = Counter(self._owned_bytes)
        for chunk in self._by_id.values():
            used[chunk.owner] += chunk.charged_bytes
        owned = dict(self.db.execute("SELECT id, bytes FROM owner WHERE bytes > 0").fetchall())
        _check_numbers(owned.values())
        used.update(owned)
        used[0] += self._sums[0] - sum(owned.values())
        used[owner] += nbytes
        return [each for each, count in used.most_common() if count > 0]

    # Writers and their rounds

    def set_recycled(self, writer: str, recycled_bytes: int) -> None:
        """Charge a writer for the files of evicted cells that it keeps."""
        query = "SELECT recycled FROM writer WHERE name = ?"
        before = number_in(self.db.execute(query, (writer,)).fetchone() or (0,))
        if recycled_bytes != before:
            self.db.execute("INSERT OR REPLACE INTO writer VALUES (?, ?)", (writer, recycled_bytes))
            self._used_bytes += recycled_bytes - before

    def remove_writer(self, writer: str) -> None:
        """Delete a writer's row, and free the space of its recycled files."""
        self.set_recycled(writer, 0)
        self.db.execute("DELETE FROM writer WHERE name = ?", (writer,))

    def add_round(self, writer: str, held: Iterable[ChunkRow], evicted: Iterable[ChunkRow]) -> int:
        """Record what a writer holds and evicts; the number of the round."""
        ids = [array("q", [chunk.id for chunk in each]).tobytes() for each in (held, evicted)]
        new = self.db.execute(
            "INSERT INTO round (writer, held, evicted) VALUES (?, ?, ?)", (writer, *ids)
        )
        return int(new.lastrowid or 0)

    def set_unwritten(self, number: int, nbytes: int) -> None:
        """Record what a round is charged for files that it writes now."""
        self.db.execute("UPDATE round SET unwritten = ? WHERE id = ?", (nbytes, number))

    def unwritten_bytes(self) -> int:
        """Return the charge of all unfinished rounds for files that may not be on the disk yet."""
        query = "SELECT coalesce(sum(unwritten), 0) FROM round"
        return number_in(self.db.execute(query).fetchone())

    def round_of(self, writer: str) -> int | None:
        """Return the number of an unfinished round of a writer."""
        query = "SELECT id FROM round WHERE writer = ? LIMIT 1"
        row = self.db.execute(query, (writer,)).fetchone()
        return None if row is None else number_in(row)

    def round(self, writer: str, number: int) -> tuple[list[ChunkRow], list[ChunkRow]]:
        """Return the chunks that a round holds and those that it evicts; none if it has ended.

        Numbers are reused, so the writer must be the round's.
        """
        query = "SELECT held, evicted FROM round WHERE id = ? AND writer = ?"
        row = self.db.execute(query, (number, writer)).fetchone() or (b"", b"")
        if not all(isinstance(ids, bytes) and len(ids) % 8 == 0 for ids in row):
            raise DamagedIndex("the chunks of a round cannot be read")
        held, evicted = (self.with_ids(array("q", ids)) for ids in row)
        return held, evicted

    def remove_round(self, writer: str, number: int) -> None:
        """Delete the row of a writer's round of a put."""
        self.db.execute("DELETE FROM round WHERE id = ? AND writer = ?", (number, writer))

    # Saving

    def write(self) -> None:
        """Save all changes."""
        forgotten = self._forget()
        self.db.executemany("DELETE FROM chunk WHERE id = ?", [(each,) for each in forgotten])
        new, changed = [], []
        for chunk in self._by_id.values():
            row, before = _row_of(chunk), self._read.get(chunk.id)
            if before is None:
                new.append(row)
            elif row != before:
                changed.append((*row[4:], chunk.id))
        if new:
            self.db.executemany(f"INSERT INTO chunk VALUES ({'?, ' * 14}?)", new)
        if changed:
            self.db.executemany(
                "UPDATE chunk SET parent = ?, children = ?, holders = ?, bytes = ?, score = ?, "
                "evicted = ?, pinned_until = ?, expires = ?, owner = ?, hits = ?, cells = ? "
                "WHERE id = ?",
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
            *(self.evicted_bytes, self.forgotten_bytes),
        )
        if sums != self._sums:
            self.db.execute(f"UPDATE store SET ({_SUMS}) = (?, ?, ?, ?, ?)", sums)

    def _forget(self) -> list[int]:
        """Delete up to `MAX_ROWS` empty chunks whose score need not be remembered; their ids.

        Later transactions delete the rest.
        """
        newest = max(self.forgotten_bytes, 0)
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


def prepare(db: sqlite3.Connection, path: str, now_ns: int, boot: str) -> None:
    """Set up the connection and missing tables.

    DamagedIndex if the file is of another version, StoreUnreachable if processes of that version
    have it open. StoreError if others have it open with mapped files, and its file system does not
    keep these here.
    """
    db.execute(f"PRAGMA busy_timeout = {int(WAIT_S * 1000)}")
    mode = _choose_journal(db, path)
    db.execute("PRAGMA synchronous = OFF")
    db.execute("PRAGMA temp_store = MEMORY")
    db.execute("BEGIN")
    asked = ("PRAGMA application_id", "PRAGMA user_version", "SELECT count(*) FROM sqlite_master")
    application, version, num_tables = (db.execute(query).fetchone()[0] for query in asked)
    db.execute("COMMIT")
    if (application, version) != (APPLICATION_ID, SCHEMA_VERSION):
        if num_tables:
            text = f"it has version {version}, this release has {SCHEMA_VERSION}"
            _check_unused(db, path, text)
            raise DamagedIndex(text)
        db.executescript(
            _SCHEMA.format(now_ns=now_ns, boot=boot)
        )  # idempotent: others may do the same
    if mode == "wal":
        db.execute("PRAGMA busy_timeout = 0")


def _check_unused(db: sqlite3.Connection, path: str, text: str) -> None:
    """Raise StoreUnreachable if another process has an index of another version open.

    Without WAL only a transaction under way is noticed.
    """
    db.execute("PRAGMA busy_timeout = 0")
    try:
        db.execute("PRAGMA journal_mode = DELETE")  # needs the file alone
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY:
            raise
        raise StoreUnreachable(
            f"the index {path} is in use by engines of another release ({text}); this engine uses "
            "the store once they have ended, or name another directory"
        ) from error


def _choose_journal(db: sqlite3.Connection, path: str) -> str:
    """Choose how transactions are kept apart; the mode.

    WAL maps a file that all processes share. Where the file system does not keep what is mapped, a
    rollback journal does it, with which readers and writers wait for each other. It is not deleted
    between transactions, so that a full disk has room for it.
    """
    if file_system_of(path).keeps_mapped_pages:
        with contextlib.suppress(sqlite3.OperationalError):  # locked by one without WAL
            return str(db.execute("PRAGMA journal_mode = WAL").fetchone()[0])
        return ""
    was_wal = _is_wal(path)
    if was_wal:  # converted without mapping anything, which SQLite does if it is exclusive
        db.execute("PRAGMA locking_mode = EXCLUSIVE")
    try:
        [mode] = db.execute("PRAGMA journal_mode = PERSIST").fetchone()
    except sqlite3.OperationalError as error:
        if not was_wal or error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY:
            raise
        raise StoreError(
            f"the index {path} is in use by an engine that maps it, as on a network file system "
            "the host does that has the disk; end that engine, and start it again after this one"
        ) from error
    db.execute("PRAGMA locking_mode = NORMAL")
    return str(mode)


def usage_in(path: str) -> list[NamespaceUsage]:
    """Read the usage of each namespace; changes nothing. Raises StoreError."""
    query = (
        f"SELECT name, sum(is_cells), sum(is_cells * length(cells)) / {CELL_ENTRY.size}, "
        f"sum(bytes), sum(is_cells * hits), sum(is_cells * (length(cells) = {CELL_ENTRY.size})) "
        "FROM (SELECT namespace.name AS name, cells, bytes, hits, "
        f"{_NO_MANIFEST} AS is_cells FROM chunk JOIN namespace "
        "ON namespace.id = chunk.namespace WHERE bytes > 0) GROUP BY name"
    )
    return [NamespaceUsage(*row) for row in _read_only(path, query)]


def used_in(path: str) -> int:
    """Read what counts against the size: cells, reservations and recycled files. As `usage_in`."""
    return sum(used for (used,) in _read_only(path, "SELECT used_bytes FROM store"))


def owners_in(path: str) -> list[OwnerUsage]:
    """Read the usage of each owner, as `usage_in` does."""
    query = (
        f"SELECT owner.name, sum({_NO_MANIFEST} * (length(cells) / {CELL_ENTRY.size})), "
        "sum(chunk.bytes) FROM chunk JOIN owner "
        "ON owner.id = chunk.owner WHERE chunk.bytes > 0 GROUP BY owner.name"
    )
    return [OwnerUsage(*row) for row in _read_only(path, query)]


def chunks_in(path: str) -> list[tuple[Any, ...]]:
    """Return every chunk, a parent before its children, read as in `usage_in`.

    A row: namespace, name of the first cell, id, parent's id, position, cells, bytes, hits and the
    end of the pin.
    """
    query = (
        f"SELECT namespace.name, substr(cells, 1, {NAME_DIGEST_BYTES}), chunk.id, parent, "
        f"position, length(cells) / {CELL_ENTRY.size}, bytes, hits, pinned_until FROM chunk "
        f"JOIN namespace ON namespace.id = chunk.namespace WHERE bytes > 0 AND {_NO_MANIFEST} "
        "ORDER BY position"
    )
    return _read_only(path, query)


def cells_by_chunk(
    path: str, namespace: str, owner: str | None = None
) -> Iterator[list[StoredCell]]:
    """Yield the cells of each chunk in a namespace, read as in `usage_in`.

    With `owner` the chunks of this owner alone.
    """
    query = (
        "SELECT chunk.name, cells FROM chunk JOIN namespace ON namespace.id = chunk.namespace "
        f"WHERE bytes > 0 AND namespace.name = ? AND {_NO_MANIFEST}"
    )
    values = [namespace]
    if owner is not None:
        query += " AND chunk.owner = (SELECT id FROM owner WHERE name = ?)"
        values.append(owner)
    for chunk, cells in _read_only(path, query, *values):
        entries = CELL_ENTRY.iter_unpack(cells)
        yield [StoredCell(namespace, name, nbytes, chunk) for name, nbytes in entries]


_NO_MANIFEST = "chunk.name NOT IN manifest"  # in the queries of `_read_only`


def _manifest_name(namespace: str) -> bytes:
    return chunk_name(namespace, chunk_id_of_key(manifest_key(Namespace(namespace))))


def _is_wal(path: str) -> bool:
    with open(path, "rb") as file:
        return file.read(_WAL_AT + 1)[_WAL_AT:] == b"\2"


def files_of(path: str) -> tuple[str, ...]:
    """Return an index and what SQLite keeps beside it."""
    return (path, f"{path}-wal", f"{path}-shm", f"{path}-journal")


def _read_only_uri(path: str) -> str:
    """Return the URI with which SQLite reads an index; StoreError if it is no plain file.

    SQLite would wait for a FIFO without end, and follow a symbolic link.
    """
    there = []
    for each in files_of(path):
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISREG(os.lstat(each).st_mode):
                raise StoreError(f"{each} is no plain file, so the index is not read")
            there.append(each)
    # Of a WAL, SQLite makes the files that are missing. Without them nobody has the index open.
    is_alone = there == [path] and not os.access(os.path.dirname(path), os.W_OK)
    return f"file:{quote(os.fsencode(path))}?mode=ro{'&immutable=1' if is_alone else ''}"


def _read_only(path: str, query: str, *values: object) -> list[tuple[Any, ...]]:
    try:
        uri = _read_only_uri(path)
        if not file_system_of(path).keeps_mapped_pages and _is_wal(path):
            raise StoreError(
                f"the index {path} is one that processes map, which its file system does not allow "
                "safely; read it on the host that has the disk, or after an engine has opened it"
            )
        with contextlib.closing(sqlite3.connect(uri, uri=True)) as db:
            db.execute("PRAGMA temp_store = MEMORY")
            db.execute("CREATE TEMP TABLE manifest (name BLOB PRIMARY KEY) WITHOUT ROWID")
            names = db.execute("SELECT name FROM namespace").fetchall()
            if not all(isinstance(each, str) for (each,) in names):
                raise DamagedIndex("the name of a namespace is no text")
            manifests = ((_manifest_name(each),) for (each,) in names)
            db.executemany("INSERT INTO manifest VALUES (?)", manifests)
            return db.execute(query, values).fetchall()
    except FileNotFoundError as error:
        raise StoreError(
            f"there is no index {path}; an engine that opens the store makes one from its files"
        ) from error
    except OSError as error:
        raise StoreError(f"the index {path} cannot be read: {error.strerror}") from error
    except (sqlite3.Error, DamagedIndex) as error:
        raise StoreError(
            f"the index {path} cannot be read ({error}); an engine that opens the store keeps it "
            "aside and makes a new one"
        ) from error
