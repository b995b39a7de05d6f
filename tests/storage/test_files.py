"""FileStore: the contract, and what only real processes, kills and full disks can show."""

import contextlib
import errno
import itertools
import os
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
import time
import types
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.buffers import make_buffer, random_bytes
from tests.support.processes import open_files
from tests.support.store_contract import StoreContract, get_one, key_of, new_namespace, put_one
from tests.support.store_hooks import wait_complete
from vllm_kvpool.errors import ConfigError, StoreError
from vllm_kvpool.storage.backends import open_store
from vllm_kvpool.storage.base import (
    Buffer,
    ChunkRef,
    GetOutcome,
    PutOutcome,
    Retention,
    Store,
)
from vllm_kvpool.storage.eviction import POLICIES
from vllm_kvpool.storage.file import index as index_module
from vllm_kvpool.storage.file import io as io_module
from vllm_kvpool.storage.file import paths as paths_module
from vllm_kvpool.storage.file import space as space_module
from vllm_kvpool.storage.file import store as store_module
from vllm_kvpool.storage.file.file_system import FileSystem
from vllm_kvpool.storage.file.index import FileIndex, IndexBusy, Reservation
from vllm_kvpool.storage.file.io import Disk, Done, Transfer, move
from vllm_kvpool.storage.file.rows import StoredCell, new_cell
from vllm_kvpool.storage.file.space import (
    FORMAT_DIR,
    OPENING_S,
    FileSpace,
    cell_of,
    object_name,
)
from vllm_kvpool.storage.file.store import FileStore
from vllm_kvpool.storage.url import parse_store_url

MIB = 1 << 20
FILE = 64 << 10
CELL = FILE - 500  # with its key and footer, just such a file
CHILD_LIMIT_S = 60


class TestFileStore(StoreContract):
    @pytest.fixture
    def store(self, root: Path) -> Iterator[Store]:
        store = FileStore(str(root), 64 * MIB)
        yield store
        assert_counted(root)
        store.close()
        assert list((root / FORMAT_DIR / "writers").iterdir()) == []


class TestFileStoreWithThreads(StoreContract):
    @pytest.fixture
    def store(self, root: Path) -> Iterator[Store]:
        store = FileStore(str(root), 64 * MIB, "threads")
        yield store
        assert_counted(root)
        store.close()


class TestFileStoreThroughThePageCache(StoreContract):
    @pytest.fixture(params=["auto", "threads"])
    def store(
        self, root: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
    ) -> Iterator[Store]:
        os_open = os.open

        def refuse_direct(path: str, flags: int, mode: int = 0o777) -> int:
            if flags & os.O_DIRECT:
                raise OSError(errno.EINVAL, "Invalid argument")
            return os_open(path, flags, mode)

        monkeypatch.setattr(os, "open", refuse_direct)
        store = FileStore(str(root), 64 * MIB, request.param)
        assert not store.direct
        yield store
        assert_counted(root)
        store.close()


class TestLruFileStore(StoreContract):
    @pytest.fixture
    def store(self, root: Path) -> Iterator[Store]:
        store = FileStore(str(root), 64 * MIB, policy=POLICIES["lru"])
        yield store
        assert_counted(root)
        store.close()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "pool"


@pytest.fixture
def no_upkeep(monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread looks after a store: its first look may come at any time."""
    monkeypatch.setattr(FileSpace, "_maintain", lambda space: None)


def object_files(root: Path) -> list[Path]:
    return [path for path in (root / FORMAT_DIR / "objects").rglob("*") if path.is_file()]


def recycled_files(root: Path) -> list[Path]:
    return [path for path in root.glob(f"{FORMAT_DIR}/writers/*/*") if path.name != "lock"]


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


def used_bytes(root: Path) -> int:
    with contextlib.closing(sqlite3.connect(root / FORMAT_DIR / "index", timeout=10)) as db:
        return int(db.execute("SELECT used_bytes FROM store").fetchone()[0])


def assert_counted(root: Path) -> None:
    files = object_files(root) + recycled_files(root)
    assert used_bytes(root) == sum(-(-path.stat().st_size // 4096) * 4096 for path in files)


def cells_for(*numbers: int) -> list[StoredCell]:
    """Cells of a file and a chunk each."""
    return [
        new_cell(ChunkRef(f"reserved {n}"), "m@fmt:0123456789ab", n.to_bytes(20, "big"), FILE)
        for n in numbers
    ]


def reserve(space: FileSpace, *numbers: int) -> Reservation:
    """Room for a file each."""
    reservation = space.reserve(cells_for(*numbers), [FILE] * len(numbers))
    assert reservation is not None
    return reservation


def path_of(root: Path, key: str) -> Path:
    return root / FORMAT_DIR / "objects" / object_name(key)


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


def start_child(code: str, root: Path, namespace: str, size: int) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", CHILD + code, str(root), namespace, str(CELL), str(size)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_processes_together_keep_the_size_and_never_read_half_an_object(root: Path) -> None:
    size = 2 * MIB
    namespace = new_namespace()
    code = """
got = full = 0
me = int(sys.stdin.readline())
for step in range(250):
    number = (step * 7 + me * 13) % 90
    buffer.view[:] = random_bytes(cell, number)
    [put] = store.put([key_of(namespace, number)], [buffer], [ChunkRef("g")])
    assert put in (PutOutcome.STORED, PutOutcome.EXISTED, PutOutcome.FULL), put
    full += put is PutOutcome.FULL
    number = (step * 5 + me) % 90
    [get] = store.get([key_of(namespace, number)], [buffer])
    assert get in (GetOutcome.OK, GetOutcome.MISSING), get
    if get is GetOutcome.OK:
        got += 1
        assert bytes(buffer.view) == random_bytes(cell, number)
store.close()
print(got, full)
"""
    children = [start_child(code, root, namespace, size) for _ in range(3)]
    for number, child in enumerate(children):
        assert child.stdin is not None
        child.stdin.write(f"{number}\n")
        child.stdin.flush()
    while not list(root.glob(f"{FORMAT_DIR}/objects/*")):
        assert all(child.poll() is None for child in children)
    peak_bytes = 0
    while any(child.poll() is None for child in children):
        peak_bytes = max(peak_bytes, disk_bytes(root))
        with contextlib.suppress(subprocess.TimeoutExpired):
            children[0].wait(0.005)
    results = [child.communicate(timeout=CHILD_LIMIT_S)[0].split() for child in children]
    assert [child.returncode for child in children] == [0, 0, 0]
    assert all(int(got) > 0 and int(full) < 25 for got, full in results), results
    # Not exact: a walk is no moment, and may count a file that is then deleted and, for each
    # child, the one that is written for it. What the index says at the end is exact.
    assert peak_bytes <= size + len(children) * FILE
    assert size // 2 < disk_bytes(root) <= used_bytes(root) <= size
    assert list((root / FORMAT_DIR / "writers").iterdir()) == []


@pytest.mark.usefixtures("no_upkeep")
def test_a_lock_that_the_file_system_cannot_give_leaves_no_descriptor(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory of a killed writer is tried again every few seconds."""
    store = FileStore(str(root), MIB)
    (root / FORMAT_DIR / "writers" / ("d" * 16)).mkdir(mode=0o700)
    with monkeypatch.context() as patch:

        def refuse(fd: int, operation: int) -> None:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

        patch.setattr(paths_module.fcntl, "flock", refuse)
        before = open_files(root)
        for _ in range(20):
            assert not store._space._reclaim()
        assert open_files(root) == before
    assert store._space._reclaim()
    store.close()


def test_a_store_is_read_where_nothing_is_told_of_its_file_system(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, written, read = key_of(new_namespace(), 0), make_buffer(CELL), make_buffer(CELL)
    written.view[:] = random_bytes(CELL, 1)
    store = FileStore(str(root), MIB)
    assert put_one(store, key, written) is PutOutcome.STORED
    store.close()

    def refuse(path: str) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    monkeypatch.setattr(os, "statvfs", refuse)
    reader = open_store(parse_store_url(f"file://{root}?size=1MiB"), segment=False)
    assert not reader.capabilities.writable
    assert get_one(reader, key, read) is GetOutcome.OK
    assert read.view == written.view
    reader.close()


def test_what_a_killed_writer_left_goes_with_the_next_opener(root: Path) -> None:
    size = 8 * MIB
    namespace = new_namespace()
    # The child reserves and half writes ten cells, as if in ten threads, and hangs in them.
    code = """
from tests.storage.test_files import reserve
reservations = [reserve(store._space, n) for n in range(10)]
for reservation in reservations:
    fd, _ = store._space.open_temp(cell, 0)
    os.write(fd, bytes(cell // 2))
store.put([key_of(namespace, 0)], [buffer], [ChunkRef("g")])
print("ready", flush=True)
sys.stdin.read()
"""
    child = start_child(code, root, namespace, size)
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    assert used_bytes(root) == 11 * FILE
    alive = FileStore(str(root), size)
    assert used_bytes(root) == 11 * FILE, "a living writer's reservations were taken"
    child.send_signal(signal.SIGKILL)
    child.communicate(timeout=CHILD_LIMIT_S)
    store = FileStore(str(root), size)
    assert used_bytes(root) == FILE
    assert store.exists([key_of(namespace, 0)]) == [True]
    assert len(list((root / FORMAT_DIR / "writers").iterdir())) == 2
    assert disk_bytes(root) == FILE
    store.close()
    alive.close()


@pytest.mark.parametrize(
    "where",
    [
        *("space.rename_new", "os.close", "index.FileIndex.close_reservation", "space.create_file"),
        *("space.FileSpace.delete", "stores.write_tail", "io.Ring.wait"),
    ],
)
def test_a_kill_anywhere_in_a_put_leaves_no_lock_and_no_charge(root: Path, where: str) -> None:
    namespace = new_namespace()
    num_before = 0 if where == "space.create_file" else 16  # a full store makes no new files
    code = f"""
from vllm_kvpool.storage.file import index, io, space
from vllm_kvpool.storage.file import store as stores
store.put([key_of(namespace, n) for n in range(100, 100 + {num_before})],
          [buffer] * {num_before}, [ChunkRef("")] * {num_before})
def die(*args, **kwargs):
    os.kill(os.getpid(), 9)
{where} = die
store.put([key_of(namespace, n) for n in range(2)], [buffer] * 2, [ChunkRef("g")] * 2)
"""
    child = start_child(code, root, namespace, MIB)
    child.communicate(timeout=CHILD_LIMIT_S)
    assert child.returncode == -signal.SIGKILL
    store = FileStore(str(root), MIB)
    assert_counted(root)
    buffer = make_buffer(CELL)
    for number in range(2, 40):  # more than fits: evictions too work as before
        assert put_one(store, key_of(namespace, number), buffer) is PutOutcome.STORED
        assert disk_bytes(root) <= MIB
    store.close()


def test_a_smaller_size_takes_effect_at_the_next_put(root: Path) -> None:
    namespace = new_namespace()
    buffer = make_buffer(CELL)
    large = FileStore(str(root), 2 * MIB)
    large.put([key_of(namespace, n) for n in range(30)], [buffer] * 30, [ChunkRef("g")] * 30)
    small = FileStore(str(root), MIB)
    assert put_one(small, key_of(namespace, 30), buffer) is PutOutcome.STORED
    assert disk_bytes(root) <= MIB
    small.close()
    large.close()


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077, 0o777])
def test_only_the_owner_has_access_whatever_the_umask(root: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        store = FileStore(str(root), MIB)
        put_one(store, key_of(new_namespace(), 0), make_buffer(CELL))
        store.close()
    finally:
        os.umask(before)
    modes = {True: set[int](), False: set[int]()}
    for path in [root, *root.rglob("*")]:
        modes[path.is_dir()].add(stat.S_IMODE(path.lstat().st_mode))
    assert modes == {True: {0o700}, False: {0o600}}  # the index and locks too


def test_a_directory_that_others_can_write_is_refused(root: Path) -> None:
    root.mkdir()
    root.chmod(0o770)
    with pytest.raises(ConfigError, match=rf"0770\); run: chmod 700 {root}"):
        FileStore(str(root), MIB)
    root.chmod(0o755)
    FileStore(str(root), MIB).close()


def test_a_directory_of_somebody_else_is_refused(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root.mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: root.stat().st_uid + 1)
    with pytest.raises(ConfigError, match="a directory of your own"):
        FileStore(str(root), MIB)


def test_a_path_that_cannot_be_made_is_refused(root: Path, tmp_path: Path) -> None:
    root.write_bytes(b"")
    with pytest.raises(ConfigError, match="not a directory"):
        FileStore(str(root), MIB)
    with pytest.raises(ConfigError, match=f"file store {root}/below cannot be used: File exists"):
        FileStore(str(root / "below"), MIB)
    with pytest.raises(ConfigError, match="cannot be used"):
        FileStore("/proc/kvpool", MIB)


@pytest.mark.parametrize("part", ["", FORMAT_DIR, f"{FORMAT_DIR}/writers"])
def test_a_directory_that_loses_a_part_while_it_is_opened_is_opened_again(
    root: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """Another process removes the directory's files while an engine opens it."""
    removed = []

    def make(name: str) -> None:
        make_directory(name)
        if name == f"{root}/{FORMAT_DIR}/writers" and not removed:
            removed.append(name)
            shutil.rmtree(root / part)

    make_directory = space_module.make_directory
    monkeypatch.setattr(space_module, "make_directory", make)
    store = FileStore(str(root), MIB)
    assert removed
    assert put_one(store, key_of(new_namespace(), 1), make_buffer(100)) is PutOutcome.STORED
    store.close()


@pytest.mark.parametrize(("module", "name"), [(space_module, "check_root"), (os.path, "lexists")])
def test_a_directory_that_is_removed_while_it_is_checked_is_made_anew(
    root: Path, monkeypatch: pytest.MonkeyPatch, module: Any, name: str
) -> None:
    FileStore(str(root), MIB).close()
    check = getattr(module, name)
    removed = []

    def check_and_remove(path: str) -> Any:
        is_now = path == str(root) and not removed
        found = check(path) if name == "lexists" or not is_now else None
        if is_now:
            removed.append(shutil.rmtree(root))
            return found if name == "lexists" else check(path)
        return found

    monkeypatch.setattr(module, name, check_and_remove)
    FileStore(str(root), MIB).close()
    assert removed


def test_an_index_that_is_removed_while_it_is_opened_is_made_anew(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite calls it an error of the disk, twice in a row here."""
    removed = []

    def prepare_and_lose(db: sqlite3.Connection, path: str, *rest: Any) -> None:
        if len(removed) < 2:
            removed.append(os.unlink(path))
            error = sqlite3.OperationalError("disk I/O error")
            error.sqlite_errorcode = sqlite3.SQLITE_IOERR
            raise error
        prepare(db, path, *rest)

    prepare = index_module.prepare
    monkeypatch.setattr(index_module, "prepare", prepare_and_lose)
    store = FileStore(str(root), MIB)
    assert put_one(store, key_of(new_namespace(), 1), make_buffer(100)) is PutOutcome.STORED
    store.close()


class FaultyDisk:
    """Threads, whose system calls a test changes; as a full or broken disk would answer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, root: Path, size_bytes: int = MIB) -> None:
        self.store = FileStore(str(root), size_bytes, "threads")
        self.monkeypatch = monkeypatch
        self.pwritev, self.preadv = os.pwritev, os.preadv


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch, root: Path) -> Iterator[FaultyDisk]:
    disk = FaultyDisk(monkeypatch, root)
    yield disk
    disk.store.close()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_full_and_gives_the_charge_back(
    root: Path, faulty: FaultyDisk, number: int
) -> None:
    store = faulty.store
    keys = [key_of(new_namespace(), n) for n in range(4)]
    buffer = make_buffer(CELL)
    full_inodes: set[int] = set()

    def pwritev_to_two(fd: int, views: list[memoryview], at: int) -> int:
        inode = os.fstat(fd).st_ino
        if len(full_inodes | {inode}) > 2:
            raise OSError(number, os.strerror(number))
        full_inodes.add(inode)
        return faulty.pwritev(fd, [views[0][: FILE // 2]], at)  # short writes too

    faulty.monkeypatch.setattr(os, "pwritev", pwritev_to_two)
    outcomes = store.put(keys, [buffer] * 4, [ChunkRef("g")] * 4)
    assert sorted(outcomes, key=str) == [PutOutcome.FULL] * 2 + [PutOutcome.STORED] * 2
    assert used_bytes(root) == disk_bytes(root) == 2 * FILE
    faulty.monkeypatch.undo()
    assert set(store.put(keys, [buffer] * 4, [ChunkRef("g")] * 4)) == {
        PutOutcome.STORED,
        PutOutcome.EXISTED,
    }


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_quota_smaller_than_the_size_evicts(root: Path, faulty: FaultyDisk, number: int) -> None:
    """`statvfs` shows no quota, so its size is what the file system gave until it refused."""
    quota = 10 * FILE

    def pwritev(fd: int, views: list[memoryview], at: int) -> int:
        if disk_bytes(root) + sum(view.nbytes for view in views) > quota:
            raise OSError(number, os.strerror(number))
        return faulty.pwritev(fd, views, at)

    faulty.monkeypatch.setattr(os, "pwritev", pwritev)
    namespace, buffer = new_namespace(), make_buffer(CELL)
    keys = [key_of(namespace, n) for n in range(40)]
    for n, key in enumerate(keys):
        assert faulty.store.put([key], [buffer], [ChunkRef(f"c{n}")]) == [PutOutcome.STORED], n
    assert faulty.store.exists(keys)[-8:] == [True] * 8
    assert_counted(root)
    faulty.monkeypatch.undo()  # the quota is raised
    more = [key_of(namespace, n) for n in range(40, 52)]
    outcomes = faulty.store.put(more, [buffer] * 12, [ChunkRef(f"c{n}") for n in range(12)])
    assert outcomes == [PutOutcome.STORED] * 12
    assert used_bytes(root) > quota


def test_quota_that_refuses_a_file_as_it_is_closed_evicts(root: Path, faulty: FaultyDisk) -> None:
    """NFS without direct I/O writes then; what is published before that is damaged."""
    quota, close = 10 * FILE, os.close

    def close_within(fd: int) -> None:
        is_beyond = os.fstat(fd).st_size == FILE and disk_bytes(root) > quota
        close(fd)
        if is_beyond:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    faulty.monkeypatch.setattr(os, "close", close_within)
    namespace, buffer = new_namespace(), make_buffer(CELL)
    keys = [key_of(namespace, n) for n in range(30)]
    for n, key in enumerate(keys):
        assert faulty.store.put([key], [buffer], [ChunkRef(f"c{n}")]) == [PutOutcome.STORED], n
    assert disk_bytes(root) <= quota
    faulty.monkeypatch.undo()
    assert_counted(root)


def test_quota_that_refuses_the_index_evicts(
    root: Path, monkeypatch: pytest.MonkeyPatch, faulty: FaultyDisk
) -> None:
    """The store evicts without writing the index, and updates the index once it has room."""
    store, namespace, buffer = faulty.store, new_namespace(), make_buffer(CELL)
    keys = [key_of(namespace, n) for n in range(40)]
    chunks = [ChunkRef(f"c{n}") for n in range(40)]
    monkeypatch.setattr(space_module, "INDEX_ROOM_BYTES", 3 * FILE)
    assert set(store.put(keys[:10], [buffer] * 10, chunks[:10])) == {PutOutcome.STORED}
    reserve = FileIndex.reserve

    def refuse(self: FileIndex, *args: Any, **kwargs: Any) -> Reservation | None:
        if disk_bytes(root) > 8 * FILE:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        return reserve(self, *args, **kwargs)

    monkeypatch.setattr(FileIndex, "reserve", refuse)
    assert store.put(keys[10:11], [buffer], chunks[10:11]) == [PutOutcome.STORED]
    assert store.exists(keys[:11]) == [False] * 3 + [True] * 8
    assert_counted(root)


@pytest.mark.parametrize("refused", [errno.EDQUOT, errno.ENOSPC, errno.EIO])
def test_index_that_cannot_be_written_is_full_where_bytes_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: int
) -> None:
    """SQLite says the same of a quota as of a broken disk."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(refused, os.strerror(refused))

    assert not index_module._is_full(str(tmp_path / "index"))
    monkeypatch.setattr(index_module.tempfile, "TemporaryFile", refuse)
    assert index_module._is_full(str(tmp_path / "index")) is (refused != errno.EIO)


def give_disk(
    root: Path, left: Callable[[], int], capacity: int, patch: pytest.MonkeyPatch
) -> None:
    """Let the store's disk have `capacity` bytes, of which `left()` are not other files'."""
    real = os.statvfs
    unit = real(root).f_frsize

    def statvfs(path: str) -> types.SimpleNamespace:
        free = max(left() - disk_bytes(root), 0) // unit
        known = {name: getattr(real(path), name) for name in dir(real(path)) if name[:2] == "f_"}
        return types.SimpleNamespace(**known | {"f_bavail": free, "f_blocks": capacity // unit})

    patch.setattr(os, "statvfs", statvfs)


def test_files_under_way_count_on_a_disk_smaller_than_the_size(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk does not have them yet, and a disk that is full to the last page stays so: nothing
    can be evicted, since the index cannot be written."""
    root.mkdir(mode=0o700)
    capacity = 10 * FILE
    give_disk(root, lambda: capacity, capacity, monkeypatch)
    one, other = (FileSpace(str(root), MIB, POLICIES["lru"], time.time_ns) for _ in range(2))
    held = reserve(one, *range(6))
    assert other.reserve(cells_for(*range(6, 12)), [FILE] * 6) is None
    other.close_reservation(reserve(other, 6, 7, 8))
    one.close_reservation(held)  # nothing was written
    other.close_reservation(reserve(other, *range(6, 12)))
    one.close()
    other.close()


def test_a_disk_smaller_than_the_size_is_never_filled(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks are evicted while the index can still be written; else no prompt would be stored
    until somebody deletes files."""
    store = FileStore(str(root), MIB, "threads")
    others, capacity = 0, 10 * FILE
    give_disk(root, lambda: capacity - others, capacity, monkeypatch)
    namespace, buffer = new_namespace(), make_buffer(CELL)
    keys = [key_of(namespace, n) for n in range(30)]
    for n, key in enumerate(keys):
        assert store.put([key], [buffer], [ChunkRef(f"c{n}")]) == [PutOutcome.STORED]
        assert disk_bytes(root) < capacity
    assert store.exists(keys)[-8:] == [True] * 8
    for n in itertools.count(30):
        others += capacity // 50  # somebody else writes there, too
        if others > 6 * FILE:
            break
        assert store.put([key_of(namespace, n)], [buffer], [ChunkRef(f"c{n}")]) == [
            PutOutcome.STORED
        ]
        assert disk_bytes(root) + others < capacity
    store.close()


def test_disk_with_inodes_for_fewer_files_than_the_size_evicts(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FileStore(str(root), 64 * MIB, "threads")
    real, most_files = os.statvfs, 10
    kept_free = 100  # 2 % of the disk's

    def statvfs(path: str) -> types.SimpleNamespace:
        known = {name: getattr(real(path), name) for name in dir(real(path)) if name[:2] == "f_"}
        left = most_files + kept_free - len(object_files(root)) - len(recycled_files(root))
        return types.SimpleNamespace(**known | {"f_files": 50 * kept_free, "f_favail": left})

    monkeypatch.setattr(os, "statvfs", statvfs)
    namespace, buffer = new_namespace(), make_buffer(CELL)
    keys = [key_of(namespace, n) for n in range(30)]
    for n, key in enumerate(keys):
        assert store.put([key], [buffer], [ChunkRef(f"c{n}")]) == [PutOutcome.STORED]
        assert len(object_files(root)) <= most_files
    assert store.exists(keys)[-9:] == [True] * 9
    store.close()


def test_an_unwritable_disk_fails_the_key_and_says_so_once(
    root: Path, faulty: FaultyDisk, caplog: pytest.LogCaptureFixture
) -> None:
    keys = [key_of(new_namespace(), n) for n in range(3)]
    buffer = make_buffer(CELL)

    def pwritev(fd: int, views: list[memoryview], at: int) -> int:
        raise OSError(errno.EIO, "Input/output error")

    faulty.monkeypatch.setattr(os, "pwritev", pwritev)
    outcomes = faulty.store.put(keys, [buffer] * 3, [ChunkRef("g")] * 3)
    assert outcomes == [PutOutcome.FAILED] * 3
    assert [record.getMessage().count("Input/output") for record in caplog.records] == [1]
    assert used_bytes(root) == disk_bytes(root) == 0


def keep(patch: pytest.MonkeyPatch, kept: Path) -> None:
    """The disk fails to delete or move this file."""

    def refusing(real: Callable[..., None]) -> Callable[..., None]:
        def call(path: str, *others: str) -> None:
            if path == str(kept):
                raise OSError(errno.EIO, "Input/output error")
            real(path, *others)

        return call

    for name in ("rename", "unlink"):
        patch.setattr(os, name, refusing(getattr(os, name)))


def test_an_evicted_file_that_cannot_be_deleted_stays_charged(
    root: Path, faulty: FaultyDisk
) -> None:
    """Each time it is tried a put fails, and others go on: its chunk counts as new."""
    store, namespace, buffer = faulty.store, new_namespace(), make_buffer(CELL)
    keys = [key_of(namespace, n) for n in range(60)]

    def put(part: list[str]) -> list[PutOutcome]:
        return [store.put([key], [buffer], [ChunkRef("")])[0] for key in part]

    keep(faulty.monkeypatch, path_of(root, keys[0]))
    outcomes = put(keys[:20])
    assert outcomes.count(PutOutcome.FAILED) == 1
    assert outcomes.count(PutOutcome.STORED) == 19
    assert store.exists(keys[:1]) == [True]
    assert_counted(root)
    faulty.monkeypatch.undo()
    assert set(put(keys[20:])) == {PutOutcome.STORED}
    assert store.exists(keys[:1]) == [False]
    assert_counted(root)


def test_an_expired_file_that_cannot_be_deleted_is_tried_again(
    root: Path, faulty: FaultyDisk
) -> None:
    store, (key,) = faulty.store, [key_of(new_namespace(), 0)]
    store.put([key], [make_buffer(CELL)], [ChunkRef("", retention=Retention(expires_ns=1))])
    keep(faulty.monkeypatch, path_of(root, key))
    with pytest.raises(OSError, match="Input/output"):
        store._space._expire()
    assert store.exists([key]) == [True]
    assert_counted(root)
    faulty.monkeypatch.undo()
    store._space._expire()
    assert store.exists([key]) == [False]
    assert_counted(root)


def test_a_file_that_a_killed_writer_evicted_and_nobody_can_delete_stays_charged(
    root: Path, faulty: FaultyDisk
) -> None:
    space, keys = faulty.store._space, [key_of(new_namespace(), n) for n in range(2)]
    for key in keys:
        faulty.store.put([key], [make_buffer(CELL)], [ChunkRef("")])
    own = cell_of(key_of(new_namespace(), 0), ChunkRef(""), FILE)
    left = space.index.reserve("d" * 16, [own], FILE)
    assert left is not None
    assert len(left.evicted) == 2
    keep(faulty.monkeypatch, path_of(root, keys[1]))
    space._reclaim_writer(str(root / FORMAT_DIR / "writers" / ("d" * 16)))
    assert faulty.store.exists(keys) == [False, True]
    assert_counted(root)


def test_a_file_that_ends_early_while_read_fails(faulty: FaultyDisk) -> None:
    store, preadv = faulty.store, faulty.preadv
    key = key_of(new_namespace(), 0)
    buffer = make_buffer(CELL)
    put_one(store, key, buffer)
    faulty.monkeypatch.setattr(
        os, "preadv", lambda fd, views, at: preadv(fd, [views[0][: max(8192 - at, 0)]], at)
    )
    assert get_one(store, key, buffer) is GetOutcome.FAILED
    faulty.monkeypatch.setattr(os, "preadv", lambda fd, v, at: preadv(fd, [v[0][:4096]], at))
    buffer.view[:] = b"x" * CELL
    assert get_one(store, key, buffer) is GetOutcome.OK
    assert bytes(buffer.view) == bytes(CELL)


def test_a_directory_that_vanishes_is_a_store_error(root: Path) -> None:
    store = FileStore(str(root), MIB)
    key = key_of(new_namespace(), 0)
    buffer = make_buffer(CELL)
    put_one(store, key, buffer)
    root.rename(root.with_name("moved"))
    with pytest.raises(StoreError, match="is gone"):
        store.exists([key])
    with pytest.raises(StoreError, match="is gone"):
        store.put([key], [buffer], [ChunkRef("g")])
    with pytest.raises(StoreError, match="is gone"):
        store.get([key], [buffer])
    with pytest.raises(StoreError, match="is gone"):
        store.remove([key])
    root.with_name("moved").rename(root)
    assert get_one(store, key, buffer) is GetOutcome.OK
    root.rename(root.with_name("moved"))
    store.close()


@pytest.mark.parametrize("lost", ["", "/objects", "/writers", "/index"])
def test_lost_parts_are_made_again(root: Path, lost: str) -> None:
    store = FileStore(str(root), MIB)
    keys = [key_of(new_namespace(), number) for number in range(20)]
    buffer = make_buffer(CELL)
    put_one(store, keys[0], buffer)
    (root / f"{FORMAT_DIR}{lost}").rename(root / "lost")
    store.put(keys[1:2], [buffer], [ChunkRef("g")])
    assert wait_complete(store, CHILD_LIMIT_S)
    store.remove(keys[1:2])
    assert store.put(keys[1:], [buffer] * 19, [ChunkRef("g")] * 19) == [PutOutcome.STORED] * 19
    assert get_one(store, keys[19], buffer) is GetOutcome.OK
    assert disk_bytes(root) <= used_bytes(root) <= MIB
    store.close()


def test_a_lock_that_stays_taken_makes_the_batch_full_after_a_bound(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FileStore(str(root), MIB)
    namespace = new_namespace()
    buffer = make_buffer(CELL)
    put_one(store, key_of(namespace, 0), buffer)
    keys = [key_of(namespace, n) for n in range(16, 20)]
    with (
        contextlib.closing(sqlite3.connect(root / FORMAT_DIR / "index")) as db,
        monkeypatch.context() as patch,
    ):
        db.isolation_level = None
        db.execute("BEGIN IMMEDIATE")
        patch.setattr(index_module, "WAIT_S", 0.05)
        assert store.put(keys, [buffer] * 4, [ChunkRef("g")] * 4) == [PutOutcome.FULL] * 4
        assert get_one(store, key_of(namespace, 0), buffer) is GetOutcome.OK
    assert store.put(keys, [buffer] * 4, [ChunkRef("g")] * 4) == [PutOutcome.STORED] * 4
    store.close()


def test_an_object_larger_than_the_store_is_full_and_evicts_nothing(root: Path) -> None:
    store = FileStore(str(root), MIB)
    namespace = new_namespace()
    put_one(store, key_of(namespace, 0), make_buffer(CELL))
    assert put_one(store, key_of(namespace, 1), make_buffer(MIB + 1)) is PutOutcome.FULL
    assert store.exists([key_of(namespace, 0)]) == [True]
    assert put_one(store, key_of(namespace, 1), make_buffer(MIB - 500)) is PutOutcome.STORED
    store.close()


@pytest.mark.parametrize("renames_new", [True, False])
def test_of_two_writers_of_one_key_the_first_to_finish_wins(root: Path, renames_new: bool) -> None:
    spaces = [FileStore(str(root), MIB)._space for _ in range(2)]
    path = path_of(root, key_of(new_namespace(), 0))
    reservations = [reserve(space, 0) for space in spaces]
    published = []
    for space, reservation, letter in zip(spaces, reservations, (b"a", b"b"), strict=True):
        space._renames_new = renames_new
        fd, temp_path = space.open_temp(FILE, 0)
        os.write(fd, letter * FILE)
        os.close(fd)
        published.append(space.publish(temp_path, str(path)))
        reservation.stored.add(reservation.cells[0].name)
        space.close_reservation(reservation)
    assert published == [True, False]
    assert path.read_bytes() == b"a" * FILE
    assert used_bytes(root) == disk_bytes(root) == FILE
    for space in spaces:
        space.close()


def test_a_cell_that_is_stored_again_while_it_is_removed_stays_charged(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remover, writer = FileStore(str(root), 64 * MIB), FileStore(str(root), 64 * MIB)
    namespace = new_namespace()
    keys = [key_of(namespace, number) for number in range(4)]
    put_many(writer, keys, make_buffer(CELL))
    delete = remover._space.delete

    def delete_then_store(*arguments: Any) -> bool:
        deleted = delete(*arguments)
        put_many(writer, [key for key in keys if not writer.exists([key])[0]], make_buffer(CELL))
        return deleted

    monkeypatch.setattr(remover._space, "delete", delete_then_store)
    assert remover.remove(keys) == len(keys)
    assert writer.exists(keys) == [True] * 4
    assert used_bytes(root) == disk_bytes(root) == 4 * FILE
    monkeypatch.setattr(remover._space, "delete", delete)
    remove = remover._space.index.remove_namespace

    def store_then_remove(name: str) -> None:
        put_many(writer, keys, make_buffer(CELL))
        remove(name)

    monkeypatch.setattr(remover._space.index, "remove_namespace", store_then_remove)
    assert remover.remove_namespace(namespace) == len(keys)
    assert writer.exists(keys) == [True] * 4
    assert used_bytes(root) == disk_bytes(root) == 4 * FILE
    remover.close()
    writer.close()


def test_a_writer_that_gives_up_ends_no_charge_of_one_that_was_killed_after_publishing(
    root: Path,
) -> None:
    root.mkdir(mode=0o700)
    killed, other = (FileSpace(str(root), MIB, POLICIES["lru"], time.time_ns) for _ in range(2))
    key = key_of(new_namespace(), 0)
    cell = cell_of(key, ChunkRef(""), FILE)
    first, second = (space.reserve([cell], [FILE]) for space in (killed, other))
    assert first is not None
    assert second is not None
    other.close_reservation(second)  # it has not written the cell
    fd, temp_path = killed.open_temp(FILE, 0)
    os.write(fd, bytes(FILE))
    os.close(fd)
    assert killed.publish(temp_path, str(path_of(root, key)))
    abandon(killed)
    other._reclaim()
    assert used_bytes(root) == disk_bytes(root) == FILE
    other.close()


def abandon(space: FileSpace) -> None:
    """Leave a space as a killed process leaves it."""
    space._closing.set()
    space._woken.set()
    assert space._thread is not None
    space._thread.join()
    space.index.close()
    space._own[-1]._lock.release()


def test_an_eviction_counts_what_others_are_writing(root: Path) -> None:
    store = FileStore(str(root), 16 * FILE)
    other = FileSpace(str(root), 16 * FILE, POLICIES["lru"], time.time_ns)
    namespace = new_namespace()
    buffer = make_buffer(CELL)
    reservations = [reserve(other, n) for n in range(8)]
    keys = [key_of(namespace, number) for number in range(20)]
    assert store.put(keys, [buffer] * 20, [ChunkRef("g")] * 20) == [PutOutcome.STORED] * 20
    kept = len(object_files(root)) + len(recycled_files(root))
    assert used_bytes(root) == (8 + kept) * FILE <= 16 * FILE
    for reservation in reservations:
        other.close_reservation(reservation)
    assert_counted(root)
    other.close()
    store.close()


# Batches.


def put_many(store: FileStore, keys: list[str], buffer: Buffer) -> None:
    outcomes = store.put(keys, [buffer] * len(keys), [ChunkRef("")] * len(keys))
    assert set(outcomes) == {PutOutcome.STORED}, outcomes


def test_room_for_more_is_made_while_the_disk_writes(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "ROUND_BYTES", 2 * FILE)
    store = FileStore(str(root), 64 * FILE)
    put_many(store, [key_of(new_namespace(), n) for n in range(64)], make_buffer(CELL))  # full
    events: list[str] = []
    for name in ("reserve", "publish"):
        method = getattr(store._space, name)
        monkeypatch.setattr(
            store._space,
            name,
            lambda *args, name=name, method=method, **options: (
                events.append(name),
                method(*args, **options),
            )[1],
        )
    put_many(store, [key_of(new_namespace(), n) for n in range(8)], make_buffer(CELL))
    assert events == ["reserve"] * 4 + ["publish"] * 8  # the queue is longer than that
    assert_counted(root)
    store.close()


def test_where_no_room_can_be_made_what_is_being_written_is_stored(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "ROUND_BYTES", 2 * FILE)
    store = FileStore(str(root), 64 * FILE)  # puts of more than 8 are made in parts
    reserve_, num_calls = store._space.reserve, itertools.count()

    def locked_out(
        rows: Sequence[StoredCell], sizes: Sequence[int], **options: bool
    ) -> Reservation | None:
        if next(num_calls) == 2:
            raise IndexBusy("somebody holds it")
        return reserve_(rows, sizes, **options)

    monkeypatch.setattr(store._space, "reserve", locked_out)
    keys = [key_of(new_namespace(), n) for n in range(20)]
    outcomes = store.put(keys, [make_buffer(CELL)] * 20, [ChunkRef("")] * 20)
    assert outcomes == [PutOutcome.STORED] * 4 + [PutOutcome.FULL] * 16
    assert store.exists(keys) == [True] * 4 + [False] * 16
    assert next(num_calls) == 3, "each would wait as long again"
    assert_counted(root)
    store.close()


@pytest.mark.usefixtures("no_upkeep")
def test_no_file_stays_open(root: Path) -> None:
    store = FileStore(str(root), 64 * MIB)
    keys = [key_of(new_namespace(), n) for n in range(100)]
    buffer = make_buffer(CELL)
    put_many(store, keys[:1], buffer)
    before = open_files(root)
    put_many(store, keys[1:], buffer)
    store.get([*keys, "absent"], [buffer] * 101)
    store.get(keys, [make_buffer(CELL + 1)] * 100)
    os.truncate(path_of(root, keys[0]), FILE - 4096)
    store.get(keys, [buffer] * 100)
    assert open_files(root) == before
    store.close()


def test_an_error_between_two_cells_waits_and_gives_all_back(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FileStore(str(root), 64 * MIB)
    keys = [key_of(new_namespace(), n) for n in range(20)]
    buffers = [make_buffer(CELL) for _ in keys]
    write_tail = store_module.write_tail
    calls: list[str] = []

    def break_at_the_tenth(tail: memoryview, data: memoryview, key: str, *chunk: object) -> None:
        calls.append(key)
        if len(calls) == 10:
            raise ZeroDivisionError
        write_tail(tail, data, key, *chunk)

    monkeypatch.setattr(store_module, "write_tail", break_at_the_tenth)
    with pytest.raises(ZeroDivisionError):
        store.put(keys, buffers, [ChunkRef("")] * 20)
    monkeypatch.undo()
    assert_counted(root)
    [writer] = (root / FORMAT_DIR / "writers").iterdir()
    assert [path.name for path in writer.iterdir()] == ["lock"]
    outcomes = store.put(keys, buffers, [ChunkRef("")] * 20)
    assert set(outcomes) <= {PutOutcome.STORED, PutOutcome.EXISTED}
    assert store.get(keys, buffers) == [GetOutcome.OK] * 20
    store.close()


def test_processes_that_put_the_same_keys_store_each_once(root: Path) -> None:
    namespace = new_namespace()
    code = """
sys.stdin.readline()
keys = [key_of(namespace, n) for n in range(200)]
buffers = [make_buffer(cell) for n in range(200)]
for n, buffer in enumerate(buffers):
    buffer.view[:] = random_bytes(cell, n)
outcomes = store.put(keys, buffers, [ChunkRef("")] * 200)
assert set(outcomes) <= {PutOutcome.STORED, PutOutcome.EXISTED}, outcomes
store.close()
print(sum(outcome is PutOutcome.STORED for outcome in outcomes))
"""
    children = [start_child(code, root, namespace, 64 * MIB) for _ in range(3)]
    for child in children:
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()
    stored = [int(child.communicate(timeout=CHILD_LIMIT_S)[0]) for child in children]
    assert sum(stored) == 200
    store = FileStore(str(root), 64 * MIB)
    buffers = [make_buffer(CELL) for _ in range(200)]
    keys = [key_of(namespace, n) for n in range(200)]
    assert store.get(keys, buffers) == [GetOutcome.OK] * 200
    for n, buffer in enumerate(buffers):
        assert bytes(buffer.view) == random_bytes(CELL, n)
    assert_counted(root)
    store.close()


class LastFirst(Disk):
    """A disk that performs and reports in the reverse of the order it was asked."""

    def run(self, transfers: Iterable[Transfer]) -> Generator[Done, None, None]:
        for transfer in reversed(list(transfers)):
            assert move(transfer, 0) == transfer.nbytes
            yield Done(transfer.tag, 0)


def test_the_first_of_a_key_in_one_put_stays_in_whatever_order_writes_end(root: Path) -> None:
    store = FileStore(str(root), 64 * MIB)
    store._disk = LastFirst()
    buffers = [make_buffer(CELL) for _ in range(3)]
    for letter, buffer in zip(b"abc", buffers, strict=True):
        buffer.view[:] = bytes([letter]) * CELL
    outcomes = store.put(["one", "two", "one"], buffers, [ChunkRef("")] * 3)
    assert outcomes == [PutOutcome.STORED, PutOutcome.STORED, PutOutcome.EXISTED]
    assert get_one(store, "one", buffers[2]) is GetOutcome.OK
    assert bytes(buffers[2].view) == b"a" * CELL
    store.close()


# Order of eviction.


class Clock:
    """Nanoseconds, set by the test; begins before any file's real time."""

    def __init__(self) -> None:
        self.now_ns = 10**18

    def __call__(self) -> int:
        return self.now_ns

    def advance(self, seconds: float) -> None:
        self.now_ns += int(seconds * 10**9)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_frequent_cells_outlive_those_used_once(root: Path, clock: Clock) -> None:
    namespace = new_namespace()
    buffer = make_buffer(CELL)
    survivors = {}
    for policy in POLICIES:
        store = FileStore(str(root / policy), 10 * FILE, policy=POLICIES[policy], clock_ns=clock)
        often = key_of(namespace, 0)
        put_one(store, often, buffer)
        for _ in range(5):
            clock.advance(1)
            assert get_one(store, often, buffer) is GetOutcome.OK
        for number in range(1, 60):  # a scan of cells that nobody wants again
            clock.advance(1)
            put_one(store, key_of(namespace, number), buffer)
        survivors[policy] = store.exists([often])
        store.close()
    assert survivors == {"lru": [False], "lrfu": [True]}


@pytest.mark.parametrize(("policy", "is_left"), [("lru", False), ("lrfu", True)])
def test_a_chunk_that_comes_back_after_its_eviction_counts_as_used_twice(
    root: Path, clock: Clock, policy: str, is_left: bool
) -> None:
    store = FileStore(str(root), 10 * FILE, policy=POLICIES[policy], clock_ns=clock)
    namespace = new_namespace()
    buffer = make_buffer(CELL)
    again = key_of(namespace, 0)

    def put(numbers: Iterable[int]) -> None:
        for number in numbers:
            clock.advance(1)
            put_one(store, key_of(namespace, number), buffer)

    put(range(13))
    assert store.exists([again]) == [False]
    put([0, *range(13, 60)])
    assert store.exists([again]) == [is_left]
    store.close()


@pytest.mark.parametrize(("policy", "is_left"), [("lru", False), ("lrfu", True)])
def test_large_chunk_that_comes_back_counts_as_used_twice_though_many_small_ones_left(
    root: Path, clock: Clock, policy: str, is_left: bool
) -> None:
    """Aliases, drafters' cells and ends of prompts are smaller than other cells."""
    large = 16
    store = FileStore(str(root), 7 * (large + 7) * FILE, policy=POLICIES[policy], clock_ns=clock)
    namespace = new_namespace()
    buffer, small = make_buffer(CELL + (large - 1) * FILE), make_buffer(CELL)
    again = key_of(namespace, 0)

    def put(numbers: Iterable[int]) -> None:
        for number in numbers:
            clock.advance(1)
            put_one(store, key_of(namespace, 8 * number), buffer)
            put_many(store, [key_of(namespace, 8 * number + n) for n in range(1, 8)], small)

    put(range(20))
    assert store.exists([again]) == [False]
    put([0, *range(20, 40)])
    assert store.exists([again]) == [is_left]
    store.close()


def test_as_many_evicted_chunks_are_remembered_as_the_policy_asks_for(
    root: Path, clock: Clock
) -> None:
    policy = POLICIES["lrfu"]
    store = FileStore(str(root), 10 * FILE, policy=policy, clock_ns=clock)
    put_many(store, [key_of(new_namespace(), n) for n in range(200)], make_buffer(CELL))
    store.close()
    with contextlib.closing(sqlite3.connect(root / FORMAT_DIR / "index")) as db:
        [count] = db.execute("SELECT count(*) FROM chunk WHERE bytes = 0").fetchone()
    assert 9 * policy.remembered <= count <= 11 * policy.remembered


# Files written over.


def test_a_full_store_writes_over_the_files_of_evicted_cells(root: Path, clock: Clock) -> None:
    store = FileStore(str(root), 100 * FILE, clock_ns=clock)
    namespace = new_namespace()
    buffer = make_buffer(CELL)
    inodes: set[int] = set()
    for number in range(400):
        clock.advance(1)
        buffer.view[:] = random_bytes(CELL, number)
        put_one(store, key_of(namespace, number), buffer)
        inodes.add(path_of(root, key_of(namespace, number)).stat().st_ino)
        assert disk_bytes(root) <= 100 * FILE
    assert len(inodes) <= 110
    for number in range(350, 400):
        assert get_one(store, key_of(namespace, number), buffer) is GetOutcome.OK
        assert bytes(buffer.view) == random_bytes(CELL, number)
    assert_counted(root)
    store.close()


@pytest.mark.parametrize("put_again", [False, True])
def test_a_cell_written_over_while_it_is_read_is_missing(
    root: Path, monkeypatch: pytest.MonkeyPatch, put_again: bool
) -> None:
    store = FileStore(str(root), 100 * FILE, "threads")
    other = FileStore(str(root), FILE, "threads")  # where each takes the room of the one before
    namespace = new_namespace()
    first, second = key_of(namespace, 0), key_of(namespace, 1)
    buffer, fresh = make_buffer(CELL), make_buffer(CELL)
    put_one(store, first, buffer)
    preadv = os.preadv
    inode = path_of(root, first).stat().st_ino

    def read_the_tail_then_be_overtaken(fd: int, views: list[memoryview], at: int) -> int:
        monkeypatch.undo()
        tail_at = FILE - 4096
        preadv(fd, views[1:], tail_at)  # a device may do the last part first
        fresh.view[:] = b"z" * CELL
        put_one(other, second, fresh)
        assert path_of(root, second).stat().st_ino == inode
        if put_again:
            put_one(store, first, buffer)
        return preadv(fd, views[:1], 0) + 4096

    monkeypatch.setattr(os, "preadv", read_the_tail_then_be_overtaken)
    assert get_one(store, first, buffer) is GetOutcome.MISSING
    other.close()
    store.close()


def test_nothing_is_written_over_where_other_hosts_may_read(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(space_module, "file_system_of", lambda path: FileSystem("", 4096))
    store = FileStore(str(root), 20 * FILE)
    namespace = new_namespace()
    buffer = make_buffer(CELL)
    for number in range(60):
        held = [os.open(path, os.O_RDONLY) for path in object_files(root)]
        before = [os.pread(fd, 4096, 0) for fd in held]
        buffer.view[:] = random_bytes(CELL, number)
        put_one(store, key_of(namespace, number), buffer)
        assert [os.pread(fd, 4096, 0) for fd in held] == before
        for fd in held:
            os.close(fd)
    assert recycled_files(root) == []
    assert_counted(root)
    store.close()


# Restarts.


@pytest.mark.usefixtures("no_upkeep")
def test_a_writer_that_is_being_opened_is_not_taken_for_a_dead_one(root: Path) -> None:
    store = FileStore(str(root), MIB)
    opening = root / FORMAT_DIR / "writers" / f".{'e' * 16}"
    opening.mkdir()
    assert not store._space._reclaim()
    long_ago = time.time() - OPENING_S - 1
    os.utime(opening, (long_ago, long_ago))
    assert store._space._reclaim()
    assert not opening.exists()
    store.close()


def test_the_choice_is_logged_once_and_the_url_makes_it(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "vllm_kvpool")
    spec = parse_store_url(f"file://{root}?io=threads&policy=lru")
    store = open_store(spec, segment=False)
    assert isinstance(store, FileStore)
    assert store._space.index._policy is POLICIES["lru"]
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert f"file store {root}: threads, as configured" in caplog.text
    store.close()
    with pytest.raises(ConfigError, match="io=ring; did you mean 'uring'"):
        parse_store_url("file:///x?io=ring")
    with pytest.raises(ConfigError, match="policy=lfu; "):
        parse_store_url("file:///x?policy=lfu")


def test_a_ring_that_was_asked_for_and_does_not_work(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(io_module, "_system_call", lambda *args: -errno.EPERM)
    with pytest.raises(ConfigError, match=rf"{root}: io=uring does not work here: Operation not"):
        FileStore(str(root), MIB, "uring")
    assert list((root / FORMAT_DIR / "writers").iterdir()) == []
    store = FileStore(str(root), MIB)
    assert put_one(store, "key", make_buffer(CELL)) is PutOutcome.STORED
    store.close()
