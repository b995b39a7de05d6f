"""Checks of a `file://` directory that must pass at any time, whichever process was killed.

The checks run in a process that does not use the store. Objects are whole and match their keys,
and every lock can be acquired. All files are charged, and the charge is within the size. `rot`
damages an object in place, as a bad disk would. Damaged objects are recognized by their bytes,
since a store overwrites the files of evicted objects.
"""

import contextlib
import os
import sqlite3
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

import numpy as np
import xxhash

from tests.soak.content import CHUNK, HEADS, LAYERS, ROW_WORDS, kv_lhtw, prompt
from tests.soak.crew import Trouble
from tests.support.store_hooks import wait_complete
from vllm_kvpool.identity.chunk_hash import ChunkChain, RequestIdentity
from vllm_kvpool.identity.keys import HeadShard, ParsedKey, key_digest
from vllm_kvpool.storage.contents.cell_format import HEADER_BYTES, verify
from vllm_kvpool.storage.file.format import PAGE_BYTES, read_footer
from vllm_kvpool.storage.file.index import SOFT_SHARE
from vllm_kvpool.storage.file.paths import HeldLock, entries
from vllm_kvpool.storage.file.space import (
    FORMAT_DIR,
    LOOK_EVERY_S,
    OPENING_S,
    object_name,
)
from vllm_kvpool.storage.file.store import FileStore

LOCK_LIMIT_S = 5.0
SETTLE_LIMIT_S = 15.0
OPENING_LIMIT_S = OPENING_S + LOOK_EVERY_S + SETTLE_LIMIT_S
POLL_S = 0.05
BLOCK_BYTES = 512  # of `st_blocks`


@dataclass(frozen=True, slots=True)
class Found:
    """Result of a check of the directory."""

    files: int  # objects, and what writers write and keep
    disk_bytes: int
    charged_bytes: int
    index_bytes: int
    objects: int | None = None  # by a check in depth
    rotten: int | None = None


@dataclass(slots=True)
class Directory:
    """A store's directory and its size."""

    path: Path
    size_bytes: int
    _rotten: set[int] = field(default_factory=set)  # digests of damaged files
    _maybe_rotten: set[int] = field(default_factory=set)  # inodes of those evicted meanwhile
    _places: dict[bytes, tuple[int, int]] = field(default_factory=dict)  # hash -> prompt, chunk
    _num_prompts: int = 0

    @property
    def url(self) -> str:
        return f"file://{self.path}?size={self.size_bytes}"

    @property
    def _base(self) -> Path:
        return self.path / FORMAT_DIR

    def rot(self, chance: Random) -> str:
        """Damage some object; how. "" if there was none."""
        paths = list(self._objects())
        if not paths:
            return ""
        path = chance.choice(paths)
        how = chance.choice(["flip", "cut", "zero"])
        try:
            with path.open("r+b") as file:
                status = os.fstat(file.fileno())
                place = chance.randrange(status.st_size)
                file.seek(place)
                if how == "cut":
                    file.truncate()
                else:
                    old = file.read(1 if how == "flip" else PAGE_BYTES)
                    file.seek(place)
                    file.write(bytes([old[0] ^ 1]) if how == "flip" else bytes(len(old)))
                file.seek(0)
                self._rotten.add(xxhash.xxh3_64_intdigest(file.read()))
                if not is_file(path, status.st_ino):  # written over by another object, maybe
                    self._maybe_rotten.add(status.st_ino)
        except FileNotFoundError:  # evicted meanwhile
            return ""
        return how

    def is_rotten(self, path: Path) -> bool:
        """Return True if a file holds bytes damaged by `rot`."""
        return xxhash.xxh3_64_intdigest(path.read_bytes()) in self._rotten

    def num_half_written(self) -> int:
        """Files that killed processes were writing."""
        dead = dead_writers([Path(each.path) for each in entries(str(self._base / "writers"))])
        return sum(file.name != "lock" for writer in dead for file in entries(str(writer)))

    def check(self, num_stores: int) -> Found:
        """Look at locks, sums and sizes, while little is written; Trouble for what must not be.

        `num_stores`: how many stores are open on it.
        """
        self._check_index()
        self._wait_for_writers(num_stores)
        return self._check_bytes()

    def check_in_depth(self, num_stores: int, num_prompts: int) -> Found:
        """Read every object as well. Prompts below `num_prompts` may be in it."""
        self._learn(num_prompts)
        objects, rotten = self._check_objects()
        return replace(self.check(num_stores), objects=objects, rotten=rotten)

    def check_after_all(self, num_prompts: int) -> Found:
        """Once every user has ended: the next opener finds, or makes, everything in order."""
        self._learn(num_prompts)
        store = FileStore(str(self.path), self.size_bytes)
        try:
            if not wait_complete(store, SETTLE_LIMIT_S):
                raise Trouble("the index is not made anew")
            found = self.check(1)
            objects, rotten = self._check_objects()
        finally:
            store.close()
        if found.charged_bytes < found.disk_bytes:
            raise Trouble(f"counted {found.charged_bytes} bytes where {found.disk_bytes} lie")
        left = [entry.path for entry in entries(str(self._base / "writers"))]
        if [path for path in left if not os.path.basename(path).startswith(".")]:
            raise Trouble(f"writers' directories are left: {left}")
        return replace(found, objects=objects, rotten=rotten)

    def _objects(self) -> Iterator[Path]:
        return (self._base / "objects").glob("*/*/*")

    def _learn(self, num_prompts: int) -> None:
        """Record the prompt and chunk of each hash, for the first `num_prompts` prompts."""
        for number in range(self._num_prompts, num_prompts):
            chain = ChunkChain(CHUNK, RequestIdentity())
            chain.extend(prompt(number))
            for chunk, chunk_hash in enumerate(chain.hashes):
                self._places.setdefault(chunk_hash, (number, chunk))
        self._num_prompts = max(self._num_prompts, num_prompts)

    def _check_index(self) -> None:
        """Check that the index can be locked and that its sums are right."""
        with closing(sqlite3.connect(self._base / "index", timeout=LOCK_LIMIT_S)) as db:
            db.isolation_level = None
            db.execute("BEGIN IMMEDIATE")
            [sums] = db.execute(
                "SELECT used_bytes - (SELECT ifnull(sum(recycled), 0) FROM writer), "
                "(SELECT ifnull(sum(bytes), 0) FROM chunk WHERE holders >= 0), "
                "(SELECT count(*) FROM chunk AS c WHERE children != "
                "(SELECT count(*) FROM chunk AS d WHERE d.parent = c.id)) FROM store"
            )
            db.execute("ROLLBACK")
        if sums[0] != sums[1] or sums[2]:
            raise Trouble(f"the index has {sums}")

    def _charged_bytes(self) -> int:
        with closing(sqlite3.connect(self._base / "index", timeout=LOCK_LIMIT_S)) as db:
            return int(db.execute("SELECT used_bytes FROM store").fetchone()[0])

    def _wait_for_writers(self, num_stores: int) -> None:
        """Wait until the directories of killed writers are gone.

        The store that opens last removes them. A store killed while it opened is cleaned up later.
        """
        writers = self._base / "writers"
        deadline = time.monotonic() + SETTLE_LIMIT_S
        while True:
            named, opening = [], []
            for writer in entries(str(writers)):
                (opening if writer.name.startswith(".") else named).append(Path(writer.path))
            old = [path for path in opening if age_s(path) > OPENING_LIMIT_S]
            if len(named) <= num_stores and not dead_writers(named) and not old:
                return
            if time.monotonic() > deadline:
                raise Trouble(
                    f"{len(named)} writers' directories, but {num_stores} open stores; of killed "
                    f"ones: {dead_writers(named)}, of stores that never opened: {old}"
                )
            time.sleep(POLL_S)

    def _check_objects(self) -> tuple[int, int]:
        """Check all objects and return (number of objects, number known to be damaged)."""
        num_objects = num_rotten = 0
        by_prompt: dict[int, list[tuple[Path, ParsedKey, bytes]]] = defaultdict(list)
        for path in self._objects():
            try:
                with path.open("rb") as file:
                    inode = os.fstat(file.fileno()).st_ino
                    data = file.read()
            except FileNotFoundError:  # evicted meanwhile
                continue
            if not is_file(path, inode):
                continue
            num_objects += 1
            if inode in self._maybe_rotten or xxhash.xxh3_64_intdigest(data) in self._rotten:
                num_rotten += 1
                continue
            parsed, cell = self._read_whole(path, data)
            number, _ = self._places[parsed.chunk_hash]
            by_prompt[number].append((path, parsed, cell))
        for number, cells in by_prompt.items():
            for path, parsed, cell in cells:
                self._check_content(path, number, parsed, cell)
        return num_objects, num_rotten

    def _read_whole(self, path: Path, data: bytes) -> tuple[ParsedKey, bytes]:
        """The key and the cell of an object's file; Trouble if it is not whole."""
        footer = read_footer(data[-PAGE_BYTES:])
        if footer is None or footer.key is None:
            raise Trouble(f"{path} ({len(data)} bytes) is not a whole object")
        cell = data[: footer.object_bytes]
        if fault := verify(memoryview(cell), key_digest(footer.key), checksum=True):
            raise Trouble(f"{path}: the cell of {footer.key} is damaged: {fault.value}")
        if not str(path).endswith(object_name(footer.key)):
            raise Trouble(f"{path} holds {footer.key}, which belongs elsewhere")
        return ParsedKey.parse(footer.key), cell

    def _check_content(self, path: Path, number: int, parsed: ParsedKey, cell: bytes) -> None:
        assert isinstance(parsed.shard, HeadShard), parsed
        _, chunk = self._places[parsed.chunk_hash]
        layers, head = slice(parsed.span.start, parsed.span.stop), parsed.shard.head
        assert layers.stop <= LAYERS, parsed
        assert head < HEADS, parsed
        expected = kv_lhtw(number)[layers, head, chunk * CHUNK : (chunk + 1) * CHUNK]
        payload = np.frombuffer(cell, np.uint64, offset=HEADER_BYTES)
        if not np.array_equal(payload.reshape(-1, CHUNK, ROW_WORDS), expected):
            raise Trouble(f"{path} does not hold chunk {chunk} of prompt {number}: {parsed}")

    def _check_bytes(self) -> Found:
        """Charge and what lies there; files move while they are counted, so look again."""
        deadline = time.monotonic() + SETTLE_LIMIT_S
        while True:
            files, disk = self._on_disk("objects", "writers")
            charged = self._charged_bytes()
            most = self.size_bytes * (1 + SOFT_SHARE)
            if 0 <= charged <= most and disk <= most:
                return Found(files, disk, charged, os.stat(self._base / "index").st_size)
            if time.monotonic() > deadline:
                raise Trouble(f"{disk} bytes lie there, {charged} charged, of {self.size_bytes}")
            time.sleep(POLL_S)

    def _on_disk(self, *directories: str) -> tuple[int, int]:
        """Files and their bytes."""
        count = total = 0
        for name in directories:
            for directory, _, files in os.walk(self._base / name):
                for file in files:
                    try:
                        status = os.stat(os.path.join(directory, file))
                    except FileNotFoundError:
                        continue
                    if file != "lock":
                        count += 1
                        total += status.st_blocks * BLOCK_BYTES
        return count, total


def is_file(path: Path, inode: int) -> bool:
    """Return True if the path still names the file with this inode."""
    try:
        return os.stat(path).st_ino == inode
    except FileNotFoundError:
        return False


def age_s(path: Path) -> float:
    """Return the seconds since a file was last changed; 0 if it is gone."""
    try:
        return time.time() - os.stat(path).st_mtime
    except FileNotFoundError:
        return 0.0


def dead_writers(writers: Iterable[Path]) -> list[Path]:
    """Return the writers' directories whose process was killed."""
    found = []
    for writer in writers:
        lock = HeldLock(str(writer / "lock"))
        with contextlib.suppress(OSError):
            if lock.take():
                found.append(writer)
                lock.release()
    return found
