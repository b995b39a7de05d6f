"""Links, FIFOs and other things in a store's directory: nothing outside it is touched."""

import contextlib
import os
import resource
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.security.planted import (
    CELL,
    FILE,
    MIB,
    NAMESPACE,
    OLD_NS,
    fill,
    make_outside,
    path_of,
    snapshot,
    use_and_open_again,
    within_limit,
)
from tests.support.buffers import make_buffer, random_bytes
from tests.support.store_contract import get_one, key_of, put_one
from vllm_kvpool.errors import ConfigError, StoreError
from vllm_kvpool.storage.base import ChunkRef, GetOutcome, PutOutcome
from vllm_kvpool.storage.file.paths import DirectoryGuard
from vllm_kvpool.storage.file.space import FORMAT_DIR
from vllm_kvpool.storage.file.store import FileStore

MEMORY = "/dev/shm"
KEY = key_of(NAMESPACE, 0)
SHARD = os.path.relpath(path_of(Path("/"), KEY).parent, f"/{FORMAT_DIR}")
PLACES = (
    *("", "objects", "writers", f"objects/{NAMESPACE}", SHARD, "writers/other"),
    *("index", "index-wal", "rebuild.lock", f"{SHARD}/{'c' * 38}"),
)


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    """Return a directory in memory where possible: some disks take a while to free blocks."""
    if not os.access(MEMORY, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=MEMORY, prefix="kvpool-test-") as directory:
        yield Path(directory)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "pool"


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    return make_outside(tmp_path / "outside")


@pytest.fixture
def store(root: Path) -> Iterator[FileStore]:
    """Return a full store with spares and objects of 20 shards. The test closes it."""
    store = FileStore(str(root), MIB)
    fill(store)
    yield store
    with contextlib.suppress(OSError):  # closed
        store.close()


def put_in_place(place: Path, plant: Callable[[Path], None]) -> None:
    """Remove the object at a place, and plant something else there."""
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place)
    else:
        place.unlink(missing_ok=True)
    place.parent.mkdir(parents=True, exist_ok=True)
    plant(place)


def own_writer(root: Path) -> str:
    [writer] = (root / FORMAT_DIR / "writers").iterdir()
    return f"writers/{writer.name}"


@pytest.mark.parametrize("place", [*PLACES, "own writer", "own lock"])
@pytest.mark.parametrize("to", ["", "c" * 38, "nothing"])
def test_a_symbolic_link_anywhere_leads_nowhere(
    store: FileStore, root: Path, outside: Path, place: str, to: str
) -> None:
    """Links are planted under a running store: to a directory, to a file and to nothing."""
    own = own_writer(root)
    place = {"own writer": own, "own lock": f"{own}/lock"}.get(place, place)
    target = outside / to if to else outside
    put_in_place(root / FORMAT_DIR / place, lambda path: path.symlink_to(target))
    before = snapshot(outside)
    within_limit(lambda: use_and_open_again(store, root))
    assert snapshot(outside) == before


def test_a_root_that_becomes_a_link_is_refused(store: FileStore, root: Path, outside: Path) -> None:
    root.rename(root.with_name("moved"))
    root.symlink_to(outside)
    before = snapshot(outside)
    within_limit(lambda: use_and_open_again(store, root))
    assert snapshot(outside) == before
    with pytest.raises(ConfigError, match="symbolic link"):
        FileStore(str(root), MIB)


@pytest.mark.parametrize("place", ["objects", "writers"])
def test_opening_a_store_whose_parts_are_links_is_refused_by_name(
    root: Path, outside: Path, place: str
) -> None:
    FileStore(str(root), MIB).close()
    put_in_place(root / FORMAT_DIR / place, lambda path: path.symlink_to(outside / place))
    with pytest.raises(ConfigError, match=f"cannot be used.*{FORMAT_DIR}/{place}"):
        FileStore(str(root), MIB)


def test_a_link_to_an_object_is_not_read(root: Path, tmp_path: Path) -> None:
    """The object is sound now, but the link's owner may change it later."""
    store = FileStore(str(root), MIB)
    buffer = make_buffer(CELL)
    put_one(store, KEY, buffer)
    path = path_of(root, KEY)
    elsewhere = tmp_path / "object"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    assert get_one(store, KEY, buffer) is GetOutcome.WRONG_SIZE
    path.unlink()
    path.parent.rename(tmp_path / "shard")
    elsewhere.rename(tmp_path / "shard" / path.name)
    path.parent.symlink_to(tmp_path / "shard")
    assert get_one(store, KEY, buffer) is GetOutcome.FAILED
    with pytest.raises(StoreError, match="symbolic link"):
        store.remove([KEY])
    assert put_one(store, KEY, buffer) in (PutOutcome.EXISTED, PutOutcome.FAILED)
    store.close()
    assert (tmp_path / "shard" / path.name).exists()


def plant_socket(path: Path) -> None:
    directory = os.open(path.parent, os.O_RDONLY)  # a socket's own path may have 107 bytes
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"/proc/self/fd/{directory}/{path.name}")
    os.close(directory)


def plant_full_directory(path: Path) -> None:
    path.mkdir()
    (path / "file").write_bytes(b"x")


def plant_sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


def plant_unreadable(path: Path) -> None:
    path.write_bytes(bytes(FILE))
    path.chmod(0)


HEALING: dict[str, Callable[[Path], None]] = {
    "fifo": os.mkfifo,
    "socket": plant_socket,
    "directory": Path.mkdir,
    "sparse": plant_sparse,
    "dangling link": lambda path: path.symlink_to("/nowhere"),
    "link to itself": lambda path: path.symlink_to(path),
    "link to a device": lambda path: path.symlink_to("/dev/zero"),
    "unreadable": plant_unreadable,
}
LASTING: dict[str, Callable[[Path], None]] = {"full directory": plant_full_directory}


@pytest.mark.parametrize("kind", HEALING)
def test_what_bears_an_objects_name_is_a_damaged_object(root: Path, kind: str) -> None:
    """The thing counts as an unreadable object. Its removal makes room, and no call waits on it.

    Reported as a failure, it would stay and count against the store.
    """
    store = FileStore(str(root), MIB)
    buffer = make_buffer(CELL)
    put_one(store, KEY, buffer)
    put_in_place(path_of(root, KEY), HEALING[kind])

    def heal() -> None:
        assert store.exists([KEY]) == [True]
        assert put_one(store, KEY, buffer) is PutOutcome.EXISTED
        assert get_one(store, KEY, buffer) is GetOutcome.WRONG_SIZE
        assert store.remove([KEY]) == 1
        assert put_one(store, KEY, buffer) is PutOutcome.STORED
        assert get_one(store, KEY, buffer) is GetOutcome.OK

    within_limit(heal)
    store.close()


@pytest.mark.parametrize("kind", ["fifo", "socket", "sparse", "link to itself", *LASTING])
@pytest.mark.parametrize("place", PLACES)
def test_nothing_is_waited_for_and_the_store_says_only_what_it_may(
    store: FileStore, root: Path, place: str, kind: str
) -> None:
    put_in_place(root / FORMAT_DIR / place, (HEALING | LASTING)[kind])
    within_limit(lambda: use_and_open_again(store, root))


NAMES = (b"\xff\xfe", b"new\nline", b"n" * 255, b".hidden", b"-5.x", "٣.x".encode(), b"4096.")


@pytest.mark.parametrize("kind", ["file", *HEALING, *LASTING, "link out"])
def test_what_is_not_ours_does_not_stop_the_store(root: Path, outside: Path, kind: str) -> None:
    plants = HEALING | LASTING
    plants |= {"file": Path.touch, "link out": lambda path: path.symlink_to(outside)}
    store = FileStore(str(root), MIB)
    fill(store, 4)
    for place in ("", "objects", f"objects/{NAMESPACE}", "writers", own_writer(root)):
        for name in NAMES:
            path = root / FORMAT_DIR / place / os.fsdecode(name)
            if not (kind == "socket" and len(name) == 255):
                plants[kind](path)
    before = snapshot(outside)

    def work() -> None:
        for opened in (store, FileStore(str(root), MIB)):
            assert fill(opened, 40)[-20:].count(PutOutcome.STORED) >= 15
            assert get_one(opened, key_of(NAMESPACE, 39), make_buffer(CELL)) is GetOutcome.OK
            assert opened.remove_namespace(NAMESPACE) > 0
            opened.close()

    within_limit(work)
    assert snapshot(outside) == before


def test_a_sparse_terabyte_takes_no_memory_and_leaves(root: Path) -> None:
    store = FileStore(str(root), MIB)
    fill(store, 8)
    for number in (0, 1):
        os.truncate(path_of(root, key_of(NAMESPACE, number)), 1 << 40)
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    buffer = make_buffer(CELL)
    assert get_one(store, KEY, buffer) is GetOutcome.WRONG_SIZE
    assert fill(store, 60).count(PutOutcome.STORED) >= 50
    store.close()
    again = FileStore(str(root), MIB)
    assert fill(again, 60)[-20:].count(PutOutcome.FULL) == 0
    again.close()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 64 << 10


def test_a_file_with_a_second_name_is_not_written_over(root: Path, tmp_path: Path) -> None:
    """A backup of hard links, as `cp -al` makes one, keeps its content."""
    store = FileStore(str(root), MIB)
    fill(store)
    backup = tmp_path / "backup"
    shutil.copytree(root / FORMAT_DIR / "objects", backup, copy_function=os.link)
    held = {path: path.read_bytes() for path in backup.rglob("*") if path.is_file()}
    assert len(held) > 10
    buffer = make_buffer(CELL)
    buffer.view[:] = random_bytes(CELL, 1)
    keys = [key_of(NAMESPACE, number) for number in range(100, 160)]
    assert set(store.put(keys, [buffer] * 60, [ChunkRef("g")] * 60)) == {PutOutcome.STORED}
    store.close()
    assert {path: path.read_bytes() for path in held} == held


@pytest.mark.parametrize("place", ["index", "index-wal", "rebuild.lock"])
def test_a_lock_or_index_that_is_another_name_of_a_file_outside(
    store: FileStore, root: Path, outside: Path, place: str
) -> None:
    file = outside / ("c" * 38)
    put_in_place(root / FORMAT_DIR / place, lambda path: os.link(file, path))
    before = file.read_bytes()
    within_limit(lambda: use_and_open_again(store, root))
    assert file.read_bytes() == before
    assert file.stat().st_mtime_ns == OLD_NS


def test_a_directory_below_the_root_of_all_is_checked() -> None:
    """The parent directory of `/pool` is `/`, whose path has no components."""
    DirectoryGuard("/pool-that-is-not-there").check("/pool-that-is-not-there/kvpool-v4/index")
    with pytest.raises(NotADirectoryError):
        DirectoryGuard("/dev").check("/dev/null/index")
