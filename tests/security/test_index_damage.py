"""Damage of a file store's index: how it is recognised, and how the index is replaced.

Only an error from SQLite or a row that no release can have written is damage. A damaged index is
renamed and kept. No call of a user and no file in the directory damages the index.
"""

import os
import sqlite3
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.security.planted import CELL, FILE, MIB, NAMESPACE, fill, path_of
from tests.support.buffers import make_buffer
from tests.support.store_contract import get_one, key_of
from tests.support.store_hooks import wait_complete
from vllm_kvpool.errors import StoreError
from vllm_kvpool.storage.base import ChunkRef, GetOutcome, PutOutcome, Retention
from vllm_kvpool.storage.file import space as space_module
from vllm_kvpool.storage.file.paths import SET_ASIDE, set_aside
from vllm_kvpool.storage.file.rows import MAX_TIME_NS, usage_in
from vllm_kvpool.storage.file.space import FORMAT_DIR
from vllm_kvpool.storage.file.store import FileStore, ReadOnlyFileStore

LIMIT_S = 20.0
MEMORY = "/dev/shm"
KEY = key_of(NAMESPACE, 0)


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """Return a directory in memory where possible: files there may have almost any size."""
    if not os.access(MEMORY, os.W_OK):
        yield tmp_path / "pool"
        return
    with tempfile.TemporaryDirectory(dir=MEMORY, prefix="kvpool-test-") as directory:
        yield Path(directory) / "pool"


@pytest.fixture
def store(root: Path) -> Iterator[FileStore]:
    store = FileStore(str(root), MIB)
    fill(store, 8)
    assert store.pin([KEY], 2_000_000_000 * 10**9) == 1
    yield store
    store.close()


def index_of(root: Path) -> Path:
    return root / FORMAT_DIR / "index"


def kept(root: Path) -> list[Path]:
    return sorted((root / FORMAT_DIR).glob("index.aside-*"))


def pins(root: Path) -> int:
    with sqlite3.connect(index_of(root)) as db:
        return int(db.execute("SELECT count(*) FROM chunk WHERE pinned_until > 0").fetchone()[0])


FAR = 1 << 80
ASKED: dict[str, Callable[[FileStore], object]] = {
    "a pin beyond all numbers": lambda store: store.pin([KEY], FAR),
    "a pin of a prompt that is no text": lambda store: store.pin(["\ud800"], FAR),
    "a put that lives and is pinned for ever": lambda store: store.put(
        [key_of(NAMESPACE, 100)],
        [make_buffer(CELL)],
        [ChunkRef("g", "p", FAR, retention=Retention(FAR, FAR))],
    ),
    "a put of a chunk that is no text": lambda store: store.put(
        ["\ud800"], [make_buffer(CELL)], [ChunkRef("\ud800", "\udfff")]
    ),
    "a chunk before the first": lambda store: store.put(
        [key_of(NAMESPACE, 101)], [make_buffer(CELL)], [ChunkRef("g", "p", -FAR)]
    ),
    "a namespace that is no text": lambda store: store.remove_namespace("\ud800"),
    "keys older than all time": lambda store: list(store.keys_written_before(NAMESPACE, FAR)),
}


@pytest.mark.parametrize("what", ASKED)
def test_nothing_that_is_asked_of_a_store_damages_its_index(
    store: FileStore, root: Path, what: str
) -> None:
    inode = index_of(root).stat().st_ino
    ASKED[what](store)
    assert index_of(root).stat().st_ino == inode
    assert kept(root) == []
    assert pins(root) >= 1
    assert fill(store, 60)[-20:].count(PutOutcome.STORED) == 20


@pytest.mark.parametrize("error", [ValueError, TypeError, OverflowError])
def test_a_mistake_within_a_transaction_is_the_callers(
    store: FileStore, root: Path, error: type[Exception]
) -> None:
    inode = index_of(root).stat().st_ino
    index = store._space.index

    def fail() -> None:
        with index._writing() as rows:
            rows.set_recycled("w", 4096)
            raise error

    with pytest.raises(error):
        fail()
    with pytest.raises(sqlite3.ProgrammingError), index._reading() as db:
        db.execute("SELECT ?", ())
    assert index_of(root).stat().st_ino == inode
    assert pins(root) == 1


def test_a_pin_that_is_too_far_away_lasts_to_the_last_time(store: FileStore, root: Path) -> None:
    store.pin([key_of(NAMESPACE, 1)], FAR)
    with sqlite3.connect(index_of(root)) as db:
        query = "SELECT max(pinned_until) FROM chunk"
        assert db.execute(query).fetchone() == (MAX_TIME_NS,)


ROWS = {
    "text for a number": "UPDATE chunk SET score = 'x'",
    "a number for cells": "UPDATE chunk SET cells = 7",
    "cells cut short": "UPDATE chunk SET cells = substr(cells, 2)",
    "bytes that are not the cells'": "UPDATE chunk SET bytes = bytes + 1",
    "a huge number": f"UPDATE chunk SET hits = {2**63 - 1}",
    "a huge sum": f"UPDATE store SET used_bytes = {2**63 - 1}",
    "no sum": "DELETE FROM store",
    "a sum that is no number": "UPDATE store SET found_bytes = x'00'",
    "a parent that is missing": "UPDATE chunk SET parent = 999999",
    "a namespace that leads out": "UPDATE namespace SET name = '../../../outside'",
    "a namespace that is no text": "UPDATE namespace SET name = x'ff'",
    "a namespace that is not UTF-8": "UPDATE namespace SET name = CAST(x'ff' AS TEXT)",
    "a table that is missing": "DROP TABLE round",
    "another version": "PRAGMA user_version = 1",
}


@pytest.mark.parametrize("what", ROWS)
def test_rows_that_nobody_can_have_written_are_damage_and_kept(root: Path, what: str) -> None:
    store = FileStore(str(root), MIB)
    fill(store, 8)
    store.close()
    with sqlite3.connect(index_of(root), isolation_level=None) as db:
        db.execute(ROWS[what])
    db.close()
    inode = index_of(root).stat().st_ino
    again = FileStore(str(root), MIB)
    fill(again, 60)
    assert wait_complete(again, LIMIT_S)
    assert fill(again, 60)[-20:].count(PutOutcome.FULL) == 0
    again.close()
    assert [path.stat().st_ino for path in kept(root)] == [inode]
    assert usage_in(str(index_of(root)))


def test_a_damaged_index_is_kept_a_bounded_number_of_times(root: Path) -> None:
    for number in range(SET_ASIDE + 2):
        FileStore(str(root), MIB).close()
        index_of(root).write_bytes(b"%d" % number * 9000)
        os.utime(index_of(root), (number, number))
    FileStore(str(root), MIB).close()
    contents = {path.read_bytes()[:1] for path in kept(root)}
    assert contents == {b"%d" % number for number in range(2, SET_ASIDE + 2)}


def test_only_own_files_make_room_for_what_is_set_aside(root: Path) -> None:
    root.mkdir()
    path = root / "index"
    places = [Path(f"{path}.aside-{number}") for number in range(SET_ASIDE)]
    places[0].mkdir()
    places[1].symlink_to("elsewhere")
    places[2].write_bytes(b"ours")
    path.write_bytes(b"new")
    assert set_aside(str(path)) == str(places[2])
    assert places[0].is_dir()
    assert places[1].is_symlink()
    places[2].rename(root / "one")
    os.link(root / "one", places[2])
    path.write_bytes(b"newer")
    with pytest.raises(OSError, match="no name is free"):
        set_aside(str(path))
    assert path.read_bytes() == b"newer"
    assert (root / "one").read_bytes() == b"new"


def test_an_index_that_another_process_has_replaced_is_not_set_aside(
    store: FileStore, root: Path
) -> None:
    """The other process saw the damage first, so its new index is whole."""
    other = FileStore(str(root), MIB)
    index_of(root).rename(root / "damaged")
    fill(other)
    whole = index_of(root).stat().st_ino
    store._space.index._set_aside(ValueError("seen in the one before"))
    assert index_of(root).stat().st_ino == whole
    assert kept(root) == []
    other.close()


def sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 62)


def dated(year: int) -> Callable[[Path], None]:
    seconds = (year - 1970) * 366 * 86_400

    def date(path: Path) -> None:
        path.write_bytes(bytes(FILE))
        os.utime(path, (seconds, seconds))

    return date


FILES: dict[str, tuple[str, Callable[[Path], None]]] = {
    "a cell dated after 2262": ("ab/" + "c" * 38, dated(2400)),
    "a cell dated before 1970": ("ab/" + "c" * 38, dated(1930)),
    "a file of all sizes": ("ab/" + "c" * 38, sparse),
    "a short name": ("ab/cd", Path.touch),
    "a shard that is no shard": ("abcd/" + "c" * 36, Path.touch),
}
SPACES = (os.fsencode(NAMESPACE), b"\xff\xfe", b"new\nline", b"..@fmt", b"foreign", b".git")


@pytest.mark.parametrize("namespace", SPACES)
@pytest.mark.parametrize("kind", FILES)
def test_a_file_stops_no_opening_and_no_rebuild(root: Path, kind: str, namespace: bytes) -> None:
    FileStore(str(root), MIB).close()
    objects = root / FORMAT_DIR / "objects"
    name, plant = FILES[kind]
    for number in range(3):
        path = objects / os.fsdecode(namespace) / name.replace("c", str(number))
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            plant(path)
        except OSError:
            pytest.skip("the file system has no such files")
    for each in index_of(root).parent.glob("index*"):
        each.unlink()
    store = FileStore(str(root), MIB)
    assert wait_complete(store, LIMIT_S)
    assert kept(root) == []
    assert fill(store, 60)[-15:].count(PutOutcome.STORED) == 15
    assert get_one(store, key_of(NAMESPACE, 59), make_buffer(CELL)) is GetOutcome.OK
    assert store._space._thread is not None
    assert store._space._thread.is_alive()
    store.close()


def test_an_index_cannot_make_the_store_delete_a_file_outside(root: Path) -> None:
    """Namespaces in the index name directories. They are checked before they become paths."""
    store = FileStore(str(root), MIB)
    fill(store)
    store.close()
    names = [
        path.parent.name + "/" + path.name for path in path_of(root, KEY).parents[1].rglob("?" * 38)
    ]
    outside = root.parent / "repository" / "objects"
    for name in names:
        (outside / name).parent.mkdir(parents=True, exist_ok=True)
        (outside / name).write_bytes(b"precious")
    with sqlite3.connect(index_of(root)) as db:
        db.execute("UPDATE namespace SET name = '../../../repository/objects'")
    again = FileStore(str(root), MIB)
    fill(again, 60)
    again.remove([key_of(NAMESPACE, number) for number in range(60)])
    again.close()
    assert {path.read_bytes() for path in outside.rglob("?" * 38)} == {b"precious"}
    assert len(list(outside.rglob("?" * 38))) == len(names)


def test_a_key_in_a_footer_counts_only_where_it_belongs(store: FileStore, root: Path) -> None:
    """A copy of another namespace's cell must not lead `purge` to that namespace."""
    other = "other@fmt:0123456789ab"
    own = path_of(root, KEY)
    copy = path_of(root, key_of(other, 0))
    copy.parent.mkdir(parents=True)
    copy.write_bytes(own.read_bytes())
    os.utime(copy, (1, 1))
    os.utime(own, (1, 1))
    assert list(store.keys_written_before(other, 10**10)) == []
    assert list(store.keys_written_before(NAMESPACE, 10**10)) == [KEY]
    with sqlite3.connect(index_of(root)) as db:
        db.execute("INSERT INTO owner VALUES (NULL, 'tenant', 0)")
        db.execute("UPDATE chunk SET owner = (SELECT id FROM owner)")
    own.write_bytes(path_of(root, key_of(NAMESPACE, 1)).read_bytes())
    found = list(store.keys_of_owner(NAMESPACE, "tenant"))
    assert sorted(found) == sorted(key_of(NAMESPACE, number) for number in range(1, 8))
    assert KEY not in {each.key for each in store.chunks()}


def test_upkeep_goes_on_after_a_failure_that_nobody_expects(
    store: FileStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A bug that a file brings out must not end the thread that finishes what killed writers
    began."""
    monkeypatch.setattr(space_module, "HITS_EVERY_S", 0.001)
    calls, again = [], threading.Event()

    def fail() -> None:
        calls.append(1)
        if len(calls) > 2:
            again.set()
        raise RuntimeError("unexpected")

    monkeypatch.setattr(store._space.index, "write_hits", fail)
    store._space._woken.set()
    assert again.wait(LIMIT_S)
    monkeypatch.undo()
    assert "please report this" in caplog.text


@pytest.mark.parametrize("suffix", ["", "-wal", "-journal"])
@pytest.mark.parametrize("kind", ["fifo", "link"])
def test_what_stands_in_the_place_of_an_index_is_not_read(
    root: Path, tmp_path: Path, kind: str, suffix: str
) -> None:
    """Tools that list a store open its index for reading.

    A FIFO in its place blocked them for ever.
    """
    store = FileStore(str(root), MIB)
    fill(store, 2)
    store.close()
    place = Path(f"{index_of(root)}{suffix}")
    place.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(place)
    else:
        place.symlink_to(tmp_path / "outside")
        (tmp_path / "outside").touch()
    with pytest.raises(StoreError, match="no plain file"):
        ReadOnlyFileStore(str(root)).usage()


@pytest.mark.parametrize("part", ["", "/objects"])
def test_a_directory_that_is_a_link_is_not_listed(root: Path, part: str) -> None:
    """Listing fails. An empty result would be wrong."""
    store = FileStore(str(root), MIB)
    fill(store, 2)
    store.close()
    place = Path(f"{root}/{FORMAT_DIR}{part}")
    place.rename(root / "moved")
    place.symlink_to(root / "moved")
    reader = ReadOnlyFileStore(str(root))
    for listing in (
        reader.namespaces,
        reader.usage,
        reader.owners,
        lambda: list(reader.chunks()),
        lambda: list(reader.keys_of_owner(NAMESPACE, "")),
        lambda: list(reader.keys_written_before(NAMESPACE, MAX_TIME_NS)),
    ):
        with pytest.raises(StoreError, match="symbolic link"):
            listing()
