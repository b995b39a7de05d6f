"""A directory of a `file://` store on a bench: cells by number, and what lies on the disk."""

import contextlib
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.support.buffers import make_buffer
from tests.support.store_contract import key_of, new_namespace
from vllm_kvpool.storage.base import Buffer, ChunkRef, GetOutcome, PutOutcome
from vllm_kvpool.storage.eviction import POLICIES
from vllm_kvpool.storage.file.index import Reservation
from vllm_kvpool.storage.file.rows import StoredCell, new_cell
from vllm_kvpool.storage.file.space import FORMAT_DIR, FileSpace, object_name
from vllm_kvpool.storage.file.store import FileStore

FILE = 64 << 10
CELL = FILE - 500  # with its key and footer, just such a file
CHILD_LIMIT_S = 60


class FileBench:
    """Stores of one directory. Each cell is a chunk and a file of its own."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.namespace = new_namespace()
        self._open: list[FileStore | FileSpace] = []

    def store(self, files: int = 16, io: str = "auto", **options: Any) -> FileStore:
        """Open a store with room for some files. The test's end closes it."""
        store = FileStore(str(self.root), files * FILE, io, **options)
        self._open.append(store)
        return store

    def space(self, files: int = 16) -> FileSpace:
        """Open a directory's space as another process does."""
        self.root.mkdir(mode=0o700, exist_ok=True)
        space = FileSpace(str(self.root), files * FILE, POLICIES["lru"], time.time_ns)
        self._open.append(space)
        return space

    def close(self, *stores: FileStore | FileSpace) -> None:
        """Close some stores, or all."""
        for each in stores or tuple(self._open):
            self._open.remove(each)
            each.close()

    def abandon(self, space: FileSpace) -> None:
        """Leave a space as a killed process leaves it."""
        self._open.remove(space)
        space._closing.set()
        space._woken.set()
        assert space._thread is not None
        space._thread.join()
        space.index.close()
        space._own[-1]._lock.release()

    # Cells

    def key(self, number: int) -> str:
        return key_of(self.namespace, number)

    def keys(self, numbers: Iterable[int]) -> list[str]:
        return [self.key(number) for number in numbers]

    def put(
        self, store: FileStore, numbers: Iterable[int], buffer: Buffer | None = None
    ) -> list[PutOutcome]:
        """Put cells in one call."""
        keys = self.keys(numbers)
        refs = [ChunkRef("")] * len(keys)
        return store.put(keys, [buffer or make_buffer(CELL)] * len(keys), refs)

    def fill(self, store: FileStore, numbers: Iterable[int]) -> None:
        """Put cells, a call each. Each is stored."""
        for number in numbers:
            assert self.put(store, [number]) == [PutOutcome.STORED], number

    def get(self, store: FileStore, numbers: Iterable[int]) -> list[GetOutcome]:
        keys = self.keys(numbers)
        return store.get(keys, [make_buffer(CELL) for _ in keys])

    def has(self, store: FileStore, numbers: Iterable[int]) -> list[bool]:
        return store.exists(self.keys(numbers))

    # The directory

    def path(self, number: int) -> Path:
        return self.root / FORMAT_DIR / "objects" / object_name(self.key(number))

    def objects(self) -> list[Path]:
        return [each for each in (self.root / FORMAT_DIR / "objects").rglob("*") if each.is_file()]

    def recycled(self) -> list[Path]:
        found = self.root.glob(f"{FORMAT_DIR}/writers/*/*")
        return [path for path in found if path.name != "lock"]

    def writers(self) -> list[Path]:
        return list((self.root / FORMAT_DIR / "writers").iterdir())

    def used_bytes(self) -> int:
        """Return the bytes that the index counts."""
        with contextlib.closing(sqlite3.connect(self.root / FORMAT_DIR / "index", 10)) as db:
            return int(db.execute("SELECT used_bytes FROM store").fetchone()[0])

    def disk_bytes(self) -> int:
        return disk_bytes(self.root)

    def assert_counted(self) -> None:
        """Assert that the index counts what the files take."""
        sizes = [path.stat().st_size for path in self.objects() + self.recycled()]
        assert self.used_bytes() == sum(-(-size // 4096) * 4096 for size in sizes)

    def start_child(self, code: str, files: int) -> "subprocess.Popen[str]":
        """Start a process that opens a store of its own and runs the code."""
        options = [str(self.root), self.namespace, str(CELL), str(files * FILE)]
        pipe = subprocess.PIPE
        return subprocess.Popen(
            [sys.executable, "-c", CHILD + code, *options], stdin=pipe, stdout=pipe, text=True
        )


CHILD = """
import os, sys
from vllm_kvpool.storage.base import ChunkRef, GetOutcome, PutOutcome
from vllm_kvpool.storage.file.store import FileStore
from tests.support.store_contract import key_of
from tests.support.buffers import make_buffer, random_bytes
root, namespace, cell, size = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
store = FileStore(root, size)
buffer = make_buffer(cell)
"""


def disk_bytes(root: Path) -> int:
    """Return the disk bytes of objects and unpublished files; a file that moves counts once."""
    blocks: dict[int, int] = {}
    for directory, _, names in os.walk(root / FORMAT_DIR):
        for name in names:
            if name != "lock" and not name.startswith("index"):
                with contextlib.suppress(FileNotFoundError):  # just published
                    status = os.lstat(os.path.join(directory, name))
                    blocks[status.st_ino] = status.st_blocks
    return 512 * sum(blocks.values())


def cells_for(*numbers: int) -> list[StoredCell]:
    """Return cells of a file and a chunk each, under another namespace than a bench's."""
    return [
        new_cell(ChunkRef(f"reserved {n}"), "m@fmt:0123456789ab", n.to_bytes(20, "big"), FILE)
        for n in numbers
    ]


def reserve(space: FileSpace, *numbers: int) -> Reservation:
    """Reserve room for a file each."""
    reservation = space.reserve(cells_for(*numbers), [FILE] * len(numbers))
    assert reservation is not None
    return reservation
