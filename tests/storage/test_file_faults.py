"""FileStore: every call to the file system fails once, in every operation."""

import contextlib
import errno
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.buffers import make_buffer, random_bytes
from tests.support.os_faults import os_faults
from tests.support.processes import open_files
from tests.support.store_contract import key_of
from vllm_kvpool.errors import StoreError
from vllm_kvpool.storage.base import ChunkRef, GetOutcome, PutOutcome
from vllm_kvpool.storage.file.space import FORMAT_DIR, FileSpace
from vllm_kvpool.storage.file.store import FileStore

NAMESPACE = "m@fmt:0123456789ab"
FILE = 64 << 10
CELL = FILE - 500  # with its key and footer, just such a file
ROOM = 4  # files
KEYS = [key_of(NAMESPACE, n) for n in range(2 * ROOM)]
CONTENTS = [random_bytes(CELL, n) for n in range(len(KEYS))]
CALLS = (
    *("open", "fstat", "lstat", "fchmod", "set_blocking", "statvfs"),
    *("unlink", "rename", "mkdir", "chmod", "scandir", "rmdir"),
)


def put(store: FileStore, which: range) -> list[PutOutcome]:
    buffers = [make_buffer(CELL) for _ in which]
    for n, buffer in zip(which, buffers, strict=True):
        buffer.view[:] = CONTENTS[n]
    return store.put([KEYS[n] for n in which], buffers, [ChunkRef("") for _ in which])


def get(store: FileStore, which: range) -> list[GetOutcome]:
    buffers = [make_buffer(CELL) for _ in which]
    found = store.get([KEYS[n] for n in which], buffers)
    for n, outcome, buffer in zip(which, found, buffers, strict=True):
        assert outcome is not GetOutcome.OK or bytes(buffer.view) == CONTENTS[n]
    return found


OPERATIONS: dict[str, Callable[[FileStore], object]] = {
    "put": lambda store: put(store, range(ROOM + 2)),  # into room
    "put_evicting": lambda store: put(store, range(ROOM, 2 * ROOM)),
    "get": lambda store: get(store, range(2)),
    "exists": lambda store: store.exists(KEYS[:2]),
    "remove": lambda store: store.remove(KEYS[:2]),
    "remove_namespace": lambda store: store.remove_namespace(NAMESPACE),
    "pin": lambda store: store.pin(KEYS[:2], 1 << 61),
}


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FileStore]:
    """No thread looks after it: its first look may come at any time."""
    monkeypatch.setattr(FileSpace, "_maintain", lambda space: None)
    store = FileStore(str(tmp_path / "pool"), (ROOM + 2) * FILE)
    yield store
    store.close()


@contextlib.contextmanager
def failing(name: str, at: int) -> Iterator[list[str]]:
    """The file system refuses the `at`-th of these calls, if there is one: its path."""
    calls = iter(range(1, 1 << 30))
    with os_faults() as faults:
        yield faults.refuse(name, errno.EIO, lambda *args: next(calls) == at)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_call_that_the_file_system_refuses_costs_cells_and_leaves_nothing_open(
    store: FileStore, operation: str, name: str
) -> None:
    for at in range(1, 1000):
        store.remove_namespace(NAMESPACE)
        assert put(store, range(ROOM)) == [PutOutcome.STORED] * ROOM
        before = open_files(Path(store.root))
        with failing(name, at) as refused, contextlib.suppress(StoreError):
            OPERATIONS[operation](store)
        assert open_files(Path(store.root)) == before
        get(store, range(len(KEYS)))
        if not refused:
            break


def files_of(store: FileStore) -> list[Path]:
    objects = Path(store.root) / FORMAT_DIR / "objects"
    return sorted(path for path in objects.rglob("*") if path.is_file())


REMOVALS: dict[str, Callable[[FileStore], int]] = {
    "remove": lambda store: store.remove(KEYS[:ROOM]),
    "remove_namespace": lambda store: store.remove_namespace(NAMESPACE),
}


@pytest.mark.parametrize("how", REMOVALS)
def test_file_that_cannot_be_deleted_keeps_no_other_from_its_removal(
    store: FileStore, how: str
) -> None:
    put(store, range(ROOM))
    with failing("unlink", at=3) as kept, pytest.raises(StoreError, match="Input/outp"):
        REMOVALS[how](store)
    assert files_of(store) == [Path(path) for path in kept]
    assert store._space.index.used_bytes() == FILE
    assert store.remove_namespace(NAMESPACE) == 1
    assert store._space.index.used_bytes() == 0


@pytest.fixture
def unindexed(store: FileStore) -> FileStore:
    """A store with cells, whose index has been lost."""
    put(store, range(ROOM))
    (Path(store.root) / FORMAT_DIR / "index").unlink()
    assert not store._space.index.is_complete
    return store


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.EUCLEAN])
def test_rebuild_leaves_out_a_directory_that_cannot_be_listed(
    unindexed: FileStore, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    """Another user's, or one that the disk has lost."""
    shard = files_of(unindexed)[0].parent
    lost = len(os.listdir(shard))
    with os_faults() as faults, caplog.at_level(logging.WARNING):
        faults.refuse("scandir", number, lambda path: path == str(shard))
        unindexed._space._look()
    assert unindexed._space.index.is_complete
    assert f"{shard}'" in caplog.text
    assert unindexed._space.index.used_bytes() == (ROOM - lost) * FILE
    assert put(unindexed, range(ROOM, 2 * ROOM)) == [PutOutcome.STORED] * ROOM


def test_rebuild_of_a_process_without_descriptors_is_tried_again(unindexed: FileStore) -> None:
    shard = files_of(unindexed)[0].parent
    with os_faults() as faults:
        faults.refuse("scandir", errno.EMFILE, lambda path: path == str(shard))
        with pytest.raises(OSError, match="open files"):
            unindexed._space._look()
    assert not unindexed._space.index.is_complete
    unindexed._space._look()
    assert unindexed._space.index.used_bytes() == ROOM * FILE
