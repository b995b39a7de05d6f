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
import time
import types
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.storage.file_bench import CELL, CHILD_LIMIT_S, FILE, FileBench, cells_for, reserve
from tests.support.buffers import make_buffer, random_bytes
from tests.support.fakes import FakeClock
from tests.support.os_faults import OsFaults, os_faults
from tests.support.processes import open_files
from tests.support.store_contract import StoreContract, get_one, key_of
from tests.support.store_hooks import wait_complete
from vllm_kvpool.errors import ConfigError, StoreError
from vllm_kvpool.storage.backends import open_store
from vllm_kvpool.storage.base import ChunkRef, GetOutcome, PutOutcome, Retention, Store
from vllm_kvpool.storage.eviction import POLICIES
from vllm_kvpool.storage.file import index as index_module
from vllm_kvpool.storage.file import io as io_module
from vllm_kvpool.storage.file import paths as paths_module
from vllm_kvpool.storage.file import space as space_module
from vllm_kvpool.storage.file import store as store_module
from vllm_kvpool.storage.file.file_system import FileSystem
from vllm_kvpool.storage.file.index import FileIndex, IndexBusy, Reservation
from vllm_kvpool.storage.file.io import Disk, Done, Transfer, move
from vllm_kvpool.storage.file.rows import StoredCell
from vllm_kvpool.storage.file.space import FORMAT_DIR, OPENING_S, FileSpace, cell_of
from vllm_kvpool.storage.file.store import FileStore
from vllm_kvpool.storage.url import parse_store_url

STORED, EXISTED, FULL, FAILED = (
    *(PutOutcome.STORED, PutOutcome.EXISTED),
    *(PutOutcome.FULL, PutOutcome.FAILED),
)
OK, MISSING = GetOutcome.OK, GetOutcome.MISSING
ROOMY = 1024
"""Room for so many files that none is evicted."""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "pool"


@pytest.fixture
def bench(root: Path) -> Iterator[FileBench]:
    made = FileBench(root)
    yield made
    made.close()


@pytest.fixture
def faults() -> Iterator[OsFaults]:
    with os_faults() as faults:
        yield faults


class FileStoreContract(StoreContract):
    options: ClassVar[dict[str, Any]] = {}

    @pytest.fixture
    def store(self, bench: FileBench) -> Iterator[Store]:
        store = bench.store(ROOMY, **self.options)
        yield store
        bench.assert_counted()
        bench.close(store)
        assert bench.writers() == []


class TestFileStore(FileStoreContract):
    pass


class TestFileStoreWithThreads(FileStoreContract):
    options: ClassVar = {"io": "threads"}


class TestLruFileStore(FileStoreContract):
    options: ClassVar = {"policy": POLICIES["lru"]}


class TestFileStoreThroughThePageCache(StoreContract):
    @pytest.fixture(params=["auto", "threads"])
    def store(self, bench: FileBench, faults: OsFaults, request: pytest.FixtureRequest) -> Store:
        faults.refuse_direct()
        store = bench.store(ROOMY, request.param)
        assert not store.direct
        return store


@pytest.fixture
def no_upkeep(monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread looks after a store: its first look may come at any time."""
    monkeypatch.setattr(FileSpace, "_maintain", lambda space: None)


# Processes


def test_processes_together_keep_the_size_and_never_read_half_an_object(bench: FileBench) -> None:
    files = 32
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
    children = [bench.start_child(code, files) for _ in range(3)]
    for number, child in enumerate(children):
        assert child.stdin is not None
        child.stdin.write(f"{number}\n")
        child.stdin.flush()
    while not list(bench.root.glob(f"{FORMAT_DIR}/objects/*")):
        assert all(child.poll() is None for child in children)
    peak_bytes = 0
    while any(child.poll() is None for child in children):
        peak_bytes = max(peak_bytes, bench.disk_bytes())
        with contextlib.suppress(subprocess.TimeoutExpired):
            children[0].wait(0.005)
    results = [child.communicate(timeout=CHILD_LIMIT_S)[0].split() for child in children]
    assert [child.returncode for child in children] == [0, 0, 0]
    assert all(int(got) > 0 and int(full) < 25 for got, full in results), results
    # Not exact: a walk is no moment, and may count a file that is then deleted and, for each
    # child, the one that is written for it. What the index says at the end is exact.
    assert peak_bytes <= (files + len(children)) * FILE
    assert files // 2 * FILE < bench.disk_bytes() <= bench.used_bytes() <= files * FILE
    assert bench.writers() == []


def test_processes_that_put_the_same_keys_store_each_once(bench: FileBench) -> None:
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
    children = [bench.start_child(code, ROOMY) for _ in range(3)]
    for child in children:
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()
    stored = [int(child.communicate(timeout=CHILD_LIMIT_S)[0]) for child in children]
    assert sum(stored) == 200
    buffers = [make_buffer(CELL) for _ in range(200)]
    assert bench.store(ROOMY).get(bench.keys(range(200)), buffers) == [OK] * 200
    for n, buffer in enumerate(buffers):
        assert bytes(buffer.view) == random_bytes(CELL, n)
    bench.assert_counted()


def test_what_a_killed_writer_left_goes_with_the_next_opener(bench: FileBench) -> None:
    # The child reserves and half writes ten cells, as if in ten threads, and hangs in them.
    code = """
from tests.storage.file_bench import reserve
reservations = [reserve(store._space, n) for n in range(10)]
for reservation in reservations:
    fd, _ = store._space.open_temp(cell, 0)
    os.write(fd, bytes(cell // 2))
store.put([key_of(namespace, 0)], [buffer], [ChunkRef("g")])
print("ready", flush=True)
sys.stdin.read()
"""
    child = bench.start_child(code, 128)
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    assert bench.used_bytes() == 11 * FILE
    bench.store(128)
    assert bench.used_bytes() == 11 * FILE, "a living writer's reservations were taken"
    child.send_signal(signal.SIGKILL)
    child.communicate(timeout=CHILD_LIMIT_S)
    store = bench.store(128)
    assert bench.used_bytes() == bench.disk_bytes() == FILE
    assert bench.has(store, [0]) == [True]
    assert len(bench.writers()) == 2


@pytest.mark.parametrize(
    "where",
    [
        *("space.rename_new", "os.close", "index.FileIndex.close_reservation", "space.create_file"),
        *("space.FileSpace.delete", "stores.write_tail", "io.Ring.wait"),
    ],
)
def test_a_kill_anywhere_in_a_put_leaves_no_lock_and_no_charge(
    bench: FileBench, where: str
) -> None:
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
    child = bench.start_child(code, 16)
    child.communicate(timeout=CHILD_LIMIT_S)
    assert child.returncode == -signal.SIGKILL
    store = bench.store()
    bench.assert_counted()
    for number in range(2, 40):  # more than fits: evictions too work as before
        bench.fill(store, [number])
        assert bench.disk_bytes() <= 16 * FILE


@pytest.mark.usefixtures("no_upkeep")
def test_a_lock_that_the_file_system_cannot_give_leaves_no_descriptor(
    bench: FileBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory of a killed writer is tried again every few seconds."""
    store = bench.store()
    (bench.root / FORMAT_DIR / "writers" / ("d" * 16)).mkdir(mode=0o700)
    with monkeypatch.context() as patch:

        def refuse(fd: int, operation: int) -> None:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

        patch.setattr(paths_module.fcntl, "flock", refuse)
        before = open_files(bench.root)
        for _ in range(20):
            assert not store._space._reclaim()
        assert open_files(bench.root) == before
    assert store._space._reclaim()


@pytest.mark.usefixtures("no_upkeep")
def test_a_writer_that_is_being_opened_is_not_taken_for_a_dead_one(bench: FileBench) -> None:
    store = bench.store()
    opening = bench.root / FORMAT_DIR / "writers" / f".{'e' * 16}"
    opening.mkdir()
    assert not store._space._reclaim()
    long_ago = time.time() - OPENING_S - 1
    os.utime(opening, (long_ago, long_ago))
    assert store._space._reclaim()
    assert not opening.exists()


# Opening


def test_a_store_is_read_where_nothing_is_told_of_its_file_system(
    bench: FileBench, faults: OsFaults
) -> None:
    store = bench.store()
    bench.fill(store, [0])
    bench.close(store)
    faults.refuse("statvfs", errno.EACCES)
    reader = open_store(parse_store_url(f"file://{bench.root}?size=1MiB"), segment=False)
    assert not reader.capabilities.writable
    assert get_one(reader, bench.key(0), make_buffer(CELL)) is OK
    reader.close()


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077, 0o777])
def test_only_the_owner_has_access_whatever_the_umask(bench: FileBench, umask: int) -> None:
    before = os.umask(umask)
    try:
        bench.fill(bench.store(), [0])
        bench.close()
    finally:
        os.umask(before)
    modes = {True: set[int](), False: set[int]()}
    for path in [bench.root, *bench.root.rglob("*")]:
        modes[path.is_dir()].add(stat.S_IMODE(path.lstat().st_mode))
    assert modes == {True: {0o700}, False: {0o600}}  # the index and locks too


def test_a_directory_that_others_can_write_is_refused(bench: FileBench) -> None:
    bench.root.mkdir()
    bench.root.chmod(0o770)
    with pytest.raises(ConfigError, match=rf"0770\); run: chmod 700 {bench.root}"):
        bench.store()
    bench.root.chmod(0o755)
    bench.store()


def test_a_directory_of_somebody_else_is_refused(
    bench: FileBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.root.mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: bench.root.stat().st_uid + 1)
    with pytest.raises(ConfigError, match="a directory of your own"):
        bench.store()


def test_a_path_that_cannot_be_made_is_refused(root: Path) -> None:
    root.write_bytes(b"")
    for path, words in (
        (f"{root}", "not a directory"),
        (f"{root}/below", f"file store {root}/below cannot be used: File exists"),
        ("/proc/kvpool", "file store /proc/kvpool cannot be used: No such file"),
    ):
        with pytest.raises(ConfigError, match=words):
            open_store(parse_store_url(f"file://{path}"), segment=False)


@pytest.mark.parametrize("part", ["", FORMAT_DIR, f"{FORMAT_DIR}/writers"])
def test_a_directory_that_loses_a_part_while_it_is_opened_is_opened_again(
    bench: FileBench, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """Another process removes the directory's files while an engine opens it."""
    removed = []

    def make(name: str) -> None:
        make_directory(name)
        if name == f"{bench.root}/{FORMAT_DIR}/writers" and not removed:
            removed.append(name)
            shutil.rmtree(bench.root / part)

    make_directory = space_module.make_directory
    monkeypatch.setattr(space_module, "make_directory", make)
    store = bench.store()
    assert removed
    bench.fill(store, [1])


@pytest.mark.parametrize(("module", "name"), [(space_module, "check_root"), (os.path, "lexists")])
def test_a_directory_that_is_removed_while_it_is_checked_is_made_anew(
    bench: FileBench, monkeypatch: pytest.MonkeyPatch, module: Any, name: str
) -> None:
    bench.close(bench.store())
    check = getattr(module, name)
    removed = []

    def check_and_remove(path: str) -> Any:
        is_now = path == str(bench.root) and not removed
        found = check(path) if name == "lexists" or not is_now else None
        if is_now:
            removed.append(shutil.rmtree(bench.root))
            return found if name == "lexists" else check(path)
        return found

    monkeypatch.setattr(module, name, check_and_remove)
    bench.store()
    assert removed


def test_an_index_that_is_removed_while_it_is_opened_is_made_anew(
    bench: FileBench, monkeypatch: pytest.MonkeyPatch
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
    bench.fill(bench.store(), [1])


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
    bench: FileBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(io_module, "_system_call", lambda *args: -errno.EPERM)
    words = rf"{bench.root}: io=uring does not work here: Operation not"
    with pytest.raises(ConfigError, match=words):
        bench.store(io="uring")
    assert bench.writers() == []
    bench.fill(bench.store(), [0])


# A disk that is full


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_full_and_gives_the_charge_back(
    bench: FileBench, faults: OsFaults, number: int
) -> None:
    store = bench.store(io="threads")
    full_inodes: set[int] = set()

    def pwritev_to_two(real: Callable[..., int], fd: int, views: list[memoryview], at: int) -> int:
        inode = os.fstat(fd).st_ino
        if len(full_inodes | {inode}) > 2:
            raise OSError(number, os.strerror(number))
        full_inodes.add(inode)
        return real(fd, [views[0][: FILE // 2]], at)  # short writes too

    faults.replace("pwritev", pwritev_to_two)
    assert sorted(bench.put(store, range(4)), key=str) == [FULL] * 2 + [STORED] * 2
    assert bench.used_bytes() == bench.disk_bytes() == 2 * FILE
    faults.heal()
    assert set(bench.put(store, range(4))) == {STORED, EXISTED}


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_quota_smaller_than_the_size_evicts(
    bench: FileBench, faults: OsFaults, number: int
) -> None:
    """`statvfs` shows no quota, so its size is what the file system gave until it refused."""
    store, quota = bench.store(io="threads"), 10 * FILE
    faults.refuse(
        "pwritev",
        number,
        lambda fd, views, at: bench.disk_bytes() + sum(view.nbytes for view in views) > quota,
    )
    bench.fill(store, range(40))
    assert bench.has(store, range(32, 40)) == [True] * 8
    bench.assert_counted()
    faults.heal()  # the quota is raised
    assert bench.put(store, range(40, 52)) == [STORED] * 12
    assert bench.used_bytes() > quota


def test_quota_that_refuses_a_file_as_it_is_closed_evicts(
    bench: FileBench, faults: OsFaults
) -> None:
    """NFS without direct I/O writes then; what is published before that is damaged."""
    store, quota = bench.store(io="threads"), 10 * FILE

    def close_within(close: Callable[[int], None], fd: int) -> None:
        is_beyond = os.fstat(fd).st_size == FILE and bench.disk_bytes() > quota
        close(fd)
        if is_beyond:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    faults.replace("close", close_within)
    bench.fill(store, range(30))
    assert bench.disk_bytes() <= quota
    faults.heal()
    bench.assert_counted()


def test_quota_that_refuses_the_index_evicts(
    bench: FileBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store evicts without writing the index, and updates the index once it has room."""
    store = bench.store(io="threads")
    monkeypatch.setattr(space_module, "INDEX_ROOM_BYTES", 3 * FILE)
    assert bench.put(store, range(10)) == [STORED] * 10
    reserve = FileIndex.reserve

    def refuse(self: FileIndex, *args: Any, **kwargs: Any) -> Reservation | None:
        if bench.disk_bytes() > 8 * FILE:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        return reserve(self, *args, **kwargs)

    monkeypatch.setattr(FileIndex, "reserve", refuse)
    bench.fill(store, [10])
    assert bench.has(store, range(11)) == [False] * 3 + [True] * 8
    bench.assert_counted()


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


def let_statvfs_say(faults: OsFaults, **fields: Callable[[], int]) -> None:
    """Let the file system answer some fields of `statvfs` otherwise."""

    def statvfs(real: Callable[[str], Any], path: str) -> types.SimpleNamespace:
        found = real(path)
        known = {name: getattr(found, name) for name in dir(found) if name[:2] == "f_"}
        return types.SimpleNamespace(**known | {name: say() for name, say in fields.items()})

    faults.replace("statvfs", statvfs)


def give_disk(bench: FileBench, faults: OsFaults, left: Callable[[], int], capacity: int) -> None:
    """Let the store's disk have `capacity` bytes, of which `left()` are not other files'."""
    unit = os.statvfs(bench.root).f_frsize
    let_statvfs_say(
        faults,
        f_bavail=lambda: max(left() - bench.disk_bytes(), 0) // unit,
        f_blocks=lambda: capacity // unit,
    )


def test_files_under_way_count_on_a_disk_smaller_than_the_size(
    bench: FileBench, faults: OsFaults
) -> None:
    """The disk does not have them yet, and a disk that is full to the last page stays so: nothing
    can be evicted, since the index cannot be written."""
    bench.root.mkdir(mode=0o700)
    give_disk(bench, faults, lambda: 10 * FILE, 10 * FILE)
    one, other = bench.space(), bench.space()
    held = reserve(one, *range(6))
    assert other.reserve(cells_for(*range(6, 12)), [FILE] * 6) is None
    other.close_reservation(reserve(other, 6, 7, 8))
    one.close_reservation(held)  # nothing was written
    other.close_reservation(reserve(other, *range(6, 12)))


def test_a_disk_smaller_than_the_size_is_never_filled(bench: FileBench, faults: OsFaults) -> None:
    """Chunks are evicted while the index can still be written; else no prompt would be stored
    until somebody deletes files."""
    store = bench.store(io="threads")
    others, capacity = 0, 10 * FILE
    give_disk(bench, faults, lambda: capacity - others, capacity)
    for n in range(30):
        bench.fill(store, [n])
        assert bench.disk_bytes() < capacity
    assert bench.has(store, range(22, 30)) == [True] * 8
    for n in itertools.count(30):
        others += capacity // 50  # somebody else writes there, too
        if others > 6 * FILE:
            break
        bench.fill(store, [n])
        assert bench.disk_bytes() + others < capacity


def test_disk_with_inodes_for_fewer_files_than_the_size_evicts(
    bench: FileBench, faults: OsFaults
) -> None:
    store, most_files = bench.store(ROOMY, "threads"), 10
    kept_free = 100  # 2 % of the disk's
    let_statvfs_say(
        faults,
        f_files=lambda: 50 * kept_free,
        f_favail=lambda: most_files + kept_free - len(bench.objects()) - len(bench.recycled()),
    )
    for n in range(30):
        bench.fill(store, [n])
        assert len(bench.objects()) <= most_files
    assert bench.has(store, range(21, 30)) == [True] * 9


# A disk that fails


def test_an_unwritable_disk_fails_the_key_and_says_so_once(
    bench: FileBench, faults: OsFaults, caplog: pytest.LogCaptureFixture
) -> None:
    store = bench.store(io="threads")
    faults.refuse("pwritev", errno.EIO)
    assert bench.put(store, range(3)) == [FAILED] * 3
    assert [record.getMessage().count("Input/output") for record in caplog.records] == [1]
    assert bench.used_bytes() == bench.disk_bytes() == 0


def keep(faults: OsFaults, kept: Path) -> None:
    """The disk fails to delete or move this file."""
    for name in ("rename", "unlink"):
        faults.refuse(name, errno.EIO, lambda path, *others: path == str(kept))


def test_an_evicted_file_that_cannot_be_deleted_stays_charged(
    bench: FileBench, faults: OsFaults
) -> None:
    """Each time it is tried a put fails, and others go on: its chunk counts as new."""
    store = bench.store(io="threads")
    keep(faults, bench.path(0))
    outcomes = [bench.put(store, [n])[0] for n in range(20)]
    assert (outcomes.count(FAILED), outcomes.count(STORED)) == (1, 19)
    assert bench.has(store, [0]) == [True]
    bench.assert_counted()
    faults.heal()
    bench.fill(store, range(20, 60))
    assert bench.has(store, [0]) == [False]
    bench.assert_counted()


def test_an_expired_file_that_cannot_be_deleted_is_tried_again(
    bench: FileBench, faults: OsFaults
) -> None:
    store, ref = bench.store(), ChunkRef("", retention=Retention(expires_ns=1))
    store.put(bench.keys([0]), [make_buffer(CELL)], [ref])
    keep(faults, bench.path(0))
    with pytest.raises(OSError, match="Input/output"):
        store._space._expire()
    assert bench.has(store, [0]) == [True]
    bench.assert_counted()
    faults.heal()
    store._space._expire()
    assert bench.has(store, [0]) == [False]
    bench.assert_counted()


def test_a_file_that_a_killed_writer_evicted_and_nobody_can_delete_stays_charged(
    bench: FileBench, faults: OsFaults
) -> None:
    store = bench.store()
    bench.fill(store, range(2))
    own = cell_of(key_of("another@fmt:0123456789ab", 0), ChunkRef(""), FILE)
    left = store._space.index.reserve("d" * 16, [own], FILE)
    assert left is not None
    assert len(left.evicted) == 2
    keep(faults, bench.path(1))
    store._space._reclaim_writer(str(bench.root / FORMAT_DIR / "writers" / ("d" * 16)))
    assert bench.has(store, range(2)) == [False, True]
    bench.assert_counted()


def test_a_file_that_ends_early_while_read_fails(bench: FileBench, faults: OsFaults) -> None:
    store, buffer = bench.store(io="threads"), make_buffer(CELL)
    bench.fill(store, [0])
    faults.replace("preadv", lambda real, fd, v, at: real(fd, [v[0][: max(8192 - at, 0)]], at))
    assert bench.get(store, [0]) == [GetOutcome.FAILED]
    faults.heal()
    faults.replace("preadv", lambda real, fd, v, at: real(fd, [v[0][:4096]], at))
    buffer.view[:] = b"x" * CELL
    assert get_one(store, bench.key(0), buffer) is OK
    assert bytes(buffer.view) == bytes(CELL)


def test_a_directory_that_vanishes_is_a_store_error(bench: FileBench) -> None:
    store, moved = bench.store(), bench.root.with_name("moved")
    bench.fill(store, [0])
    bench.root.rename(moved)
    for call in (
        lambda: bench.has(store, [0]),
        lambda: bench.put(store, [0]),
        lambda: bench.get(store, [0]),
        lambda: store.remove(bench.keys([0])),
    ):
        with pytest.raises(StoreError, match="is gone"):
            call()
    moved.rename(bench.root)
    assert bench.get(store, [0]) == [OK]
    bench.root.rename(moved)
    bench.close(store)


@pytest.mark.parametrize("lost", ["", "/objects", "/writers", "/index"])
def test_lost_parts_are_made_again(bench: FileBench, lost: str) -> None:
    store = bench.store()
    bench.fill(store, [0])
    (bench.root / f"{FORMAT_DIR}{lost}").rename(bench.root / "lost")
    bench.put(store, [1])
    assert wait_complete(store, CHILD_LIMIT_S)
    store.remove(bench.keys([1]))
    assert bench.put(store, range(1, 20)) == [STORED] * 19
    assert bench.get(store, [19]) == [OK]
    assert bench.disk_bytes() <= bench.used_bytes() <= 16 * FILE


def test_a_lock_that_stays_taken_makes_the_batch_full_after_a_bound(
    bench: FileBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = bench.store()
    bench.fill(store, [0])
    with (
        contextlib.closing(sqlite3.connect(bench.root / FORMAT_DIR / "index")) as db,
        monkeypatch.context() as patch,
    ):
        db.isolation_level = None
        db.execute("BEGIN IMMEDIATE")
        patch.setattr(index_module, "WAIT_S", 0.05)
        assert bench.put(store, range(16, 20)) == [FULL] * 4
        assert bench.get(store, [0]) == [OK]
    assert bench.put(store, range(16, 20)) == [STORED] * 4


# Room


def test_a_smaller_size_takes_effect_at_the_next_put(bench: FileBench) -> None:
    bench.put(bench.store(32), range(30))
    bench.fill(bench.store(16), [30])
    assert bench.disk_bytes() <= 16 * FILE


def test_an_object_larger_than_the_store_is_full_and_evicts_nothing(bench: FileBench) -> None:
    store, size = bench.store(16), 16 * FILE
    bench.fill(store, [0])
    assert bench.put(store, [1], make_buffer(size + 1)) == [FULL]
    assert bench.has(store, [0]) == [True]
    assert bench.put(store, [1], make_buffer(size - 500)) == [STORED]


def test_an_eviction_counts_what_others_are_writing(bench: FileBench) -> None:
    store, other = bench.store(16), bench.space(16)
    reservations = [reserve(other, n) for n in range(8)]
    assert bench.put(store, range(20)) == [STORED] * 20
    kept = len(bench.objects()) + len(bench.recycled())
    assert bench.used_bytes() == (8 + kept) * FILE <= 16 * FILE
    for reservation in reservations:
        other.close_reservation(reservation)
    bench.assert_counted()


# Two writers of one key


def publish(space: FileSpace, path: Path, content: bytes) -> bool:
    """Write a file and publish it. Return True unless another was there before."""
    fd, temp_path = space.open_temp(FILE, 0)
    os.write(fd, content)
    os.close(fd)
    return space.publish(temp_path, str(path))


@pytest.mark.parametrize("renames_new", [True, False])
def test_of_two_writers_of_one_key_the_first_to_finish_wins(
    bench: FileBench, renames_new: bool
) -> None:
    spaces = [bench.store()._space for _ in range(2)]
    reservations = [reserve(space, 0) for space in spaces]
    published = []
    for space, reservation, letter in zip(spaces, reservations, (b"a", b"b"), strict=True):
        space._renames_new = renames_new
        published.append(publish(space, bench.path(0), letter * FILE))
        reservation.stored.add(reservation.cells[0].name)
        space.close_reservation(reservation)
    assert published == [True, False]
    assert bench.path(0).read_bytes() == b"a" * FILE
    assert bench.used_bytes() == bench.disk_bytes() == FILE


def test_a_cell_that_is_stored_again_while_it_is_removed_stays_charged(
    bench: FileBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    remover, writer, numbers = bench.store(ROOMY), bench.store(ROOMY), range(4)
    bench.fill(writer, numbers)
    delete, remove = remover._space.delete, remover._space.index.remove_namespace

    def delete_then_store(*arguments: Any) -> bool:
        deleted = delete(*arguments)
        bench.fill(writer, [n for n in numbers if not bench.has(writer, [n])[0]])
        return deleted

    def store_then_remove(name: str) -> None:
        bench.fill(writer, numbers)
        remove(name)

    with monkeypatch.context() as patch:
        patch.setattr(remover._space, "delete", delete_then_store)
        assert remover.remove(bench.keys(numbers)) == 4
    assert bench.has(writer, numbers) == [True] * 4
    assert bench.used_bytes() == bench.disk_bytes() == 4 * FILE
    monkeypatch.setattr(remover._space.index, "remove_namespace", store_then_remove)
    assert remover.remove_namespace(bench.namespace) == 4
    assert bench.has(writer, numbers) == [True] * 4
    assert bench.used_bytes() == bench.disk_bytes() == 4 * FILE


def test_a_writer_that_gives_up_ends_no_charge_of_one_that_was_killed_after_publishing(
    bench: FileBench,
) -> None:
    killed, other = bench.space(), bench.space()
    cell = cell_of(bench.key(0), ChunkRef(""), FILE)
    first, second = (space.reserve([cell], [FILE]) for space in (killed, other))
    assert first is not None
    assert second is not None
    other.close_reservation(second)  # it has not written the cell
    assert publish(killed, bench.path(0), bytes(FILE))
    bench.abandon(killed)
    other._reclaim()
    assert bench.used_bytes() == bench.disk_bytes() == FILE


# Batches


def test_room_for_more_is_made_while_the_disk_writes(
    bench: FileBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "ROUND_BYTES", 2 * FILE)
    store = bench.store(64)
    bench.put(store, range(64))  # full
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
    assert bench.put(store, range(64, 72)) == [STORED] * 8
    assert events == ["reserve"] * 4 + ["publish"] * 8  # the queue is longer than that
    bench.assert_counted()


def test_where_no_room_can_be_made_what_is_being_written_is_stored(
    bench: FileBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "ROUND_BYTES", 2 * FILE)
    store = bench.store(64)  # puts of more than 8 are made in parts
    reserve_, num_calls = store._space.reserve, itertools.count()

    def locked_out(
        rows: Sequence[StoredCell], sizes: Sequence[int], **options: bool
    ) -> Reservation | None:
        if next(num_calls) == 2:
            raise IndexBusy("somebody holds it")
        return reserve_(rows, sizes, **options)

    monkeypatch.setattr(store._space, "reserve", locked_out)
    assert bench.put(store, range(20)) == [STORED] * 4 + [FULL] * 16
    assert bench.has(store, range(20)) == [True] * 4 + [False] * 16
    assert next(num_calls) == 3, "each would wait as long again"
    bench.assert_counted()


@pytest.mark.usefixtures("no_upkeep")
def test_no_file_stays_open(bench: FileBench) -> None:
    store, numbers = bench.store(ROOMY), range(100)
    bench.fill(store, [0])
    before = open_files(bench.root)
    bench.put(store, numbers)
    bench.get(store, [*numbers, 1000])
    store.get(bench.keys(numbers), [make_buffer(CELL + 1)] * 100)
    os.truncate(bench.path(0), FILE - 4096)
    bench.get(store, numbers)
    assert open_files(bench.root) == before


def test_an_error_between_two_cells_waits_and_gives_all_back(
    bench: FileBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, numbers = bench.store(ROOMY), range(20)
    write_tail = store_module.write_tail
    calls: list[str] = []

    def break_at_the_tenth(tail: memoryview, data: memoryview, key: str, *chunk: object) -> None:
        calls.append(key)
        if len(calls) == 10:
            raise ZeroDivisionError
        write_tail(tail, data, key, *chunk)

    with monkeypatch.context() as patch:
        patch.setattr(store_module, "write_tail", break_at_the_tenth)
        with pytest.raises(ZeroDivisionError):
            bench.put(store, numbers)
    bench.assert_counted()
    [writer] = bench.writers()
    assert [path.name for path in writer.iterdir()] == ["lock"]
    assert set(bench.put(store, numbers)) <= {STORED, EXISTED}
    assert bench.get(store, numbers) == [OK] * 20


class LastFirst(Disk):
    """A disk that performs and reports in the reverse of the order it was asked."""

    def run(self, transfers: Iterable[Transfer]) -> Generator[Done, None, None]:
        for transfer in reversed(list(transfers)):
            assert move(transfer, 0) == transfer.nbytes
            yield Done(transfer.tag, 0)


def test_the_first_of_a_key_in_one_put_stays_in_whatever_order_writes_end(
    bench: FileBench,
) -> None:
    store = bench.store(ROOMY)
    store._disk = LastFirst()
    buffers = [make_buffer(CELL) for _ in range(3)]
    for letter, buffer in zip(b"abc", buffers, strict=True):
        buffer.view[:] = bytes([letter]) * CELL
    outcomes = store.put(["one", "two", "one"], buffers, [ChunkRef("")] * 3)
    assert outcomes == [STORED, STORED, EXISTED]
    assert get_one(store, "one", buffers[2]) is OK
    assert bytes(buffers[2].view) == b"a" * CELL


# Order of eviction


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(1e9)  # before any file's real time


POLICY_KEEPS = pytest.mark.parametrize(("policy", "is_left"), [("lru", False), ("lrfu", True)])


@POLICY_KEEPS
def test_frequent_cells_outlive_those_used_once(
    bench: FileBench, clock: FakeClock, policy: str, is_left: bool
) -> None:
    store = bench.store(10, policy=POLICIES[policy], clock_ns=clock.ns)
    bench.fill(store, [0])
    for _ in range(5):
        clock.advance(1)
        assert bench.get(store, [0]) == [OK]
    for number in range(1, 60):  # a scan of cells that nobody wants again
        clock.advance(1)
        bench.fill(store, [number])
    assert bench.has(store, [0]) == [is_left]


@POLICY_KEEPS
@pytest.mark.parametrize(
    ("large", "small", "first", "second"),
    [(1, 0, 13, 60), (16, 7, 20, 40)],  # aliases, drafters' cells and ends of prompts are smaller
    ids=["equal", "of many small ones"],
)
def test_a_chunk_that_comes_back_after_its_eviction_counts_as_used_twice(
    bench: FileBench,
    clock: FakeClock,
    large: int,
    small: int,
    first: int,
    second: int,
    policy: str,
    is_left: bool,
) -> None:
    room = 10 if not small else 7 * (large + small)
    store = bench.store(room, policy=POLICIES[policy], clock_ns=clock.ns)
    buffer = make_buffer(CELL + (large - 1) * FILE)

    def put(numbers: Iterable[int]) -> None:
        for number in numbers:
            clock.advance(1)
            assert bench.put(store, [8 * number], buffer) == [STORED]
            bench.put(store, range(8 * number + 1, 8 * number + 1 + small))

    put(range(first))
    assert bench.has(store, [0]) == [False]
    put([0, *range(first, second)])
    assert bench.has(store, [0]) == [is_left]


def test_as_many_evicted_chunks_are_remembered_as_the_policy_asks_for(
    bench: FileBench, clock: FakeClock
) -> None:
    policy = POLICIES["lrfu"]
    bench.put(bench.store(10, policy=policy, clock_ns=clock.ns), range(200))
    bench.close()
    with contextlib.closing(sqlite3.connect(bench.root / FORMAT_DIR / "index")) as db:
        [count] = db.execute("SELECT count(*) FROM chunk WHERE bytes = 0").fetchone()
    assert 9 * policy.remembered <= count <= 11 * policy.remembered


# Files written over


def test_a_full_store_writes_over_the_files_of_evicted_cells(
    bench: FileBench, clock: FakeClock
) -> None:
    store, buffer = bench.store(100, clock_ns=clock.ns), make_buffer(CELL)
    inodes: set[int] = set()
    for number in range(400):
        clock.advance(1)
        buffer.view[:] = random_bytes(CELL, number)
        bench.put(store, [number], buffer)
        inodes.add(bench.path(number).stat().st_ino)
        assert bench.disk_bytes() <= 100 * FILE
    assert len(inodes) <= 110
    for number in range(350, 400):
        assert get_one(store, bench.key(number), buffer) is OK
        assert bytes(buffer.view) == random_bytes(CELL, number)
    bench.assert_counted()


@pytest.mark.parametrize("put_again", [False, True])
def test_a_cell_written_over_while_it_is_read_is_missing(
    bench: FileBench, faults: OsFaults, put_again: bool
) -> None:
    store = bench.store(100, "threads")
    other = bench.store(1, "threads")  # where each takes the room of the one before
    buffer, fresh = make_buffer(CELL), make_buffer(CELL)
    fresh.view[:] = b"z" * CELL
    bench.put(store, [0], buffer)
    inode = bench.path(0).stat().st_ino

    def read_the_tail_then_be_overtaken(
        preadv: Callable[..., int], fd: int, views: list[memoryview], at: int
    ) -> int:
        faults.heal()
        preadv(fd, views[1:], FILE - 4096)  # a device may do the last part first
        bench.put(other, [1], fresh)
        assert bench.path(1).stat().st_ino == inode
        if put_again:
            bench.put(store, [0], buffer)
        return preadv(fd, views[:1], 0) + 4096

    faults.replace("preadv", read_the_tail_then_be_overtaken)
    assert get_one(store, bench.key(0), buffer) is MISSING


def test_nothing_is_written_over_where_other_hosts_may_read(
    bench: FileBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(space_module, "file_system_of", lambda path: FileSystem("", 4096))
    store, buffer = bench.store(20), make_buffer(CELL)
    for number in range(60):
        held = [os.open(path, os.O_RDONLY) for path in bench.objects()]
        before = [os.pread(fd, 4096, 0) for fd in held]
        buffer.view[:] = random_bytes(CELL, number)
        bench.put(store, [number], buffer)
        assert [os.pread(fd, 4096, 0) for fd in held] == before
        for fd in held:
            os.close(fd)
    assert bench.recycled() == []
    bench.assert_counted()
