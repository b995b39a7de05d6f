"""FileStore: the contract, and what only real processes, kills and full disks can show."""

import contextlib
import errno
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_kvpool.errors import ConfigError, StoreError
from vllm_kvpool.store import files_space
from vllm_kvpool.store.base import GetOutcome, PutOutcome, Store
from vllm_kvpool.store.files import FileStore, object_name
from vllm_kvpool.store.files_space import Space, locked, read_usage, write_usage
from vllm_kvpool.testing.contract import StoreContract, get_one, key_of, new_namespace, put_one
from vllm_kvpool.testing.memory import make_buffer, random_bytes

MIB = 1 << 20
CELL = 64 << 10
CHILD_LIMIT_S = 60


class TestFileStore(StoreContract):
    @pytest.fixture
    def store(self, root: Path) -> Iterator[Store]:
        store = FileStore(str(root), 64 * MIB)
        yield store
        assert_counted(root)
        store.close()
        assert list((root / "v1" / "writers").iterdir()) == []


class TestFileStoreWithoutHardLinks(StoreContract):
    @pytest.fixture
    def store(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
        def link(source: str, target: str) -> None:
            raise OSError(errno.EPERM, "Operation not permitted")

        monkeypatch.setattr(os, "link", link)
        store = FileStore(str(root), 64 * MIB)
        yield store
        assert_counted(root)
        store.close()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "pool"


def object_files(root: Path) -> list[Path]:
    return [path for path in (root / "v1" / "objects").rglob("*") if path.is_file()]


def disk_bytes(root: Path) -> int:
    """What objects and unpublished files occupy.

    Under both locks nothing is deleted or begun, or a walk could add a deleted file to the one
    that was written in its place.
    """
    base = root / "v1"
    blocks: dict[int, int] = {}
    with locked(str(base / "evict.lock"), 10), locked(str(base / "usage"), 10):
        for directory, _, names in os.walk(base):
            for name in names:
                if name not in ("lock", "usage", "evict.lock"):
                    with contextlib.suppress(FileNotFoundError):  # just published
                        status = os.lstat(os.path.join(directory, name))
                        blocks[status.st_ino] = status.st_blocks
    return 512 * sum(blocks.values())


def used_bytes(root: Path) -> int:
    with locked(str(root / "v1" / "usage"), 1) as fd:
        usage = read_usage(fd)
    assert usage is not None
    return usage.used_bytes


def assert_counted(root: Path) -> None:
    assert used_bytes(root) == sum(-(-p.stat().st_size // 4096) * 4096 for p in object_files(root))


def set_used(path: Path, age_s: int) -> None:
    then = 1_700_000_000 - age_s
    os.utime(path, (then, then))


def path_of(root: Path, key: str) -> Path:
    return root / "v1" / "objects" / object_name(key)


CHILD = """
import os, sys
from vllm_kvpool.store.base import GetOutcome, PutOutcome
from vllm_kvpool.store.files import FileStore
from vllm_kvpool.testing.contract import key_of
from vllm_kvpool.testing.memory import make_buffer, random_bytes
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
    [put] = store.put([key_of(namespace, number)], [buffer], ["g"])
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
    while not list(root.glob("v1/objects/*")):
        assert all(child.poll() is None for child in children)
    peak_bytes = 0
    while any(child.poll() is None for child in children):
        peak_bytes = max(peak_bytes, disk_bytes(root))
        with contextlib.suppress(subprocess.TimeoutExpired):
            children[0].wait(0.005)
    results = [child.communicate(timeout=CHILD_LIMIT_S)[0].split() for child in children]
    assert [child.returncode for child in children] == [0, 0, 0]
    assert all(int(got) > 0 and int(full) < 25 for got, full in results), results
    assert size // 2 < peak_bytes <= size
    assert 0 < disk_bytes(root) <= used_bytes(root) <= size
    assert list((root / "v1" / "writers").iterdir()) == []


def test_what_a_killed_writer_left_goes_with_the_next_opener(root: Path) -> None:
    size = 8 * MIB
    namespace = new_namespace()
    # The child reserves and half writes ten cells, as if in ten threads, and hangs in them.
    code = """
from vllm_kvpool.store import files
temps = [store._space.reserve(cell) for _ in range(10)]
for temp in temps:
    os.write(temp.fd, bytes(cell // 2))
store.put([key_of(namespace, 0)], [buffer], ["g"])
print("ready", flush=True)
sys.stdin.read()
"""
    child = start_child(code, root, namespace, size)
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    assert used_bytes(root) == 11 * CELL
    alive = FileStore(str(root), size)
    assert used_bytes(root) == 11 * CELL, "a living writer's reservations were taken"
    child.send_signal(signal.SIGKILL)
    child.communicate(timeout=CHILD_LIMIT_S)
    store = FileStore(str(root), size)
    assert used_bytes(root) == CELL
    assert store.exists([key_of(namespace, 0)]) == [True]
    assert len(list((root / "v1" / "writers").iterdir())) == 2
    assert disk_bytes(root) == CELL
    store.close()
    alive.close()


@pytest.mark.parametrize("where", ["os.link", "os.unlink", "os.writev", "files_space.write_usage"])
def test_a_kill_anywhere_in_a_put_leaves_no_lock_and_no_charge(root: Path, where: str) -> None:
    namespace = new_namespace()
    code = f"""
from vllm_kvpool.store import files_space
def die(*args):
    os.kill(os.getpid(), 9)
{where} = die
store.put([key_of(namespace, 0)], [buffer], ["g"])
"""
    child = start_child(code, root, namespace, MIB)
    child.communicate(timeout=CHILD_LIMIT_S)
    assert child.returncode == -signal.SIGKILL
    store = FileStore(str(root), MIB)
    assert_counted(root)
    buffer = make_buffer(CELL)
    for number in range(1, 40):  # more than fits: evictions too work as before
        assert put_one(store, key_of(namespace, number), buffer) is PutOutcome.STORED
        assert disk_bytes(root) <= MIB
    store.close()


def test_the_next_eviction_cleans_up_too(root: Path) -> None:
    namespace = new_namespace()
    store = FileStore(str(root), MIB)  # 16 cells
    code = "temps = [store._space.reserve(cell) for _ in range(14)]; os.kill(os.getpid(), 9)"
    start_child(code, root, namespace, MIB).communicate(timeout=CHILD_LIMIT_S)
    assert used_bytes(root) == 14 * CELL
    buffer = make_buffer(CELL)
    keys = [key_of(namespace, number) for number in range(14)]
    assert store.put(keys, [buffer] * 14, ["g"] * 14) == [PutOutcome.STORED] * 14
    assert store.exists(keys) == [True] * 14, "cells were evicted for a dead writer's reservations"
    store.close()


def test_a_wrong_count_heals_at_the_next_eviction(root: Path) -> None:
    store = FileStore(str(root), MIB)
    namespace = new_namespace()
    with locked(str(root / "v1" / "usage"), 1) as fd:
        write_usage(fd, files_space.Usage(MIB, 0))
    assert put_one(store, key_of(namespace, 0), make_buffer(CELL)) is PutOutcome.STORED
    assert_counted(root)
    store.close()


def test_the_least_recently_used_go_first(root: Path) -> None:
    store = FileStore(str(root), 10 * CELL)
    namespace = new_namespace()
    keys = [key_of(namespace, number) for number in range(11)]
    buffer = make_buffer(CELL)
    for age, key in enumerate(keys[:10]):
        put_one(store, key, buffer)
        set_used(path_of(root, key), age_s=age * 100)
    # Oldest by writing are 9, 8, ...; a read makes 9 the youngest.
    assert get_one(store, keys[9], buffer) is GetOutcome.OK
    assert put_one(store, keys[10], buffer) is PutOutcome.STORED
    assert store.exists(keys) == [number not in (7, 8) for number in range(11)]
    store.close()


def test_objects_survive_a_restart_and_other_processes_see_them(root: Path) -> None:
    namespace = new_namespace()
    keys = [key_of(namespace, number) for number in range(3)]
    store = FileStore(str(root), MIB)
    buffer = make_buffer(CELL)
    buffer.view[:] = random_bytes(CELL, 5)
    store.put(keys, [buffer] * 3, ["g"] * 3)
    store.close()
    code = """
keys = [key_of(namespace, number) for number in range(3)]
print(store.exists(keys), store.get(keys[:1], [buffer])[0].value, end=" ")
print(bytes(buffer.view) == random_bytes(cell, 5))
"""
    output, _ = start_child(code, root, namespace, MIB).communicate(timeout=CHILD_LIMIT_S)
    assert output == "[True, True, True] ok True\n"


def test_a_smaller_size_takes_effect_at_the_next_put(root: Path) -> None:
    namespace = new_namespace()
    buffer = make_buffer(CELL)
    large = FileStore(str(root), 2 * MIB)
    large.put([key_of(namespace, n) for n in range(30)], [buffer] * 30, ["g"] * 30)
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
    modes = {stat.S_IMODE(root.stat().st_mode)}
    modes |= {stat.S_IMODE(path.stat().st_mode) for path in root.rglob("*") if path.is_dir()}
    assert modes == {0o700}
    assert {stat.S_IMODE(path.stat().st_mode) for path in object_files(root)} == {0o600}


def test_a_symbolic_link_is_refused(root: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    root.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"symbolic link; name .*/elsewhere"):
        FileStore(str(root), MIB)


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


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_full_and_gives_the_charge_back(
    root: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    store = FileStore(str(root), MIB)
    keys = [key_of(new_namespace(), n) for n in range(4)]
    buffer = make_buffer(CELL)
    writev = os.writev
    room = [2 * CELL + 1000]

    def writev_until_full(fd: int, views: list[memoryview]) -> int:
        nbytes = min(room[0], 3000, views[0].nbytes)  # short writes too
        if nbytes == 0:
            raise OSError(number, os.strerror(number))
        room[0] -= nbytes
        return writev(fd, [views[0][:nbytes]])

    monkeypatch.setattr(os, "writev", writev_until_full)
    full = [PutOutcome.FULL] * 2
    assert store.put(keys, [buffer] * 4, ["g"] * 4) == [PutOutcome.STORED] * 2 + full
    assert used_bytes(root) == disk_bytes(root) == 2 * CELL
    monkeypatch.undo()
    assert put_one(store, keys[3], buffer) is PutOutcome.STORED
    store.close()


def test_an_unwritable_disk_fails_the_key_and_says_so_once(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = FileStore(str(root), MIB)
    keys = [key_of(new_namespace(), n) for n in range(3)]
    buffer = make_buffer(CELL)

    def writev(fd: int, views: list[memoryview]) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "writev", writev)
    assert store.put(keys, [buffer] * 3, ["g"] * 3) == [PutOutcome.FAILED] * 3
    assert [record.getMessage().count("Input/output") for record in caplog.records] == [1]
    assert used_bytes(root) == disk_bytes(root) == 0
    store.close()


def test_a_file_that_ends_early_while_read_fails(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FileStore(str(root), MIB)
    key = key_of(new_namespace(), 0)
    buffer = make_buffer(CELL)
    put_one(store, key, buffer)
    preadv = os.preadv
    monkeypatch.setattr(
        os, "preadv", lambda fd, views, at: preadv(fd, [views[0][: max(5000 - at, 0)]], at)
    )
    assert get_one(store, key, buffer) is GetOutcome.FAILED
    monkeypatch.setattr(os, "preadv", lambda fd, v, at: preadv(fd, [v[0][:3000]], at))
    buffer.view[:] = b"x" * CELL
    assert get_one(store, key, buffer) is GetOutcome.OK
    assert bytes(buffer.view) == bytes(CELL)
    store.close()


def test_a_truncated_object_is_of_wrong_size_until_removed(root: Path) -> None:
    store = FileStore(str(root), MIB)
    key = key_of(new_namespace(), 0)
    buffer = make_buffer(CELL)
    put_one(store, key, buffer)
    os.truncate(path_of(root, key), 100)
    assert get_one(store, key, buffer) is GetOutcome.WRONG_SIZE
    assert store.remove([key]) == 1
    assert put_one(store, key, buffer) is PutOutcome.STORED
    assert get_one(store, key, buffer) is GetOutcome.OK
    store.close()


def test_a_directory_that_vanishes_is_a_store_error(root: Path) -> None:
    store = FileStore(str(root), MIB)
    key = key_of(new_namespace(), 0)
    buffer = make_buffer(CELL)
    put_one(store, key, buffer)
    root.rename(root.with_name("moved"))
    with pytest.raises(StoreError, match="is gone"):
        store.exists([key])
    with pytest.raises(StoreError, match="is gone"):
        store.put([key], [buffer], ["g"])
    with pytest.raises(StoreError, match="is gone"):
        store.get([key], [buffer])
    with pytest.raises(StoreError, match="is gone"):
        store.remove([key])
    root.with_name("moved").rename(root)
    assert get_one(store, key, buffer) is GetOutcome.OK
    root.rename(root.with_name("moved"))
    store.close()


@pytest.mark.parametrize("lost", ["v1", "v1/objects", "v1/writers", "v1/usage", "v1/evict.lock"])
def test_lost_parts_are_made_again(root: Path, lost: str) -> None:
    store = FileStore(str(root), MIB)
    keys = [key_of(new_namespace(), number) for number in range(20)]
    buffer = make_buffer(CELL)
    put_one(store, keys[0], buffer)
    (root / lost).rename(root / "lost")
    assert store.put(keys[1:], [buffer] * 19, ["g"] * 19) == [PutOutcome.STORED] * 19
    assert get_one(store, keys[19], buffer) is GetOutcome.OK
    assert disk_bytes(root) <= used_bytes(root) <= MIB
    store.close()


def test_a_lock_that_stays_taken_makes_the_batch_full_after_a_bound(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files_space, "EVICT_WAIT_S", 0.05)
    store = FileStore(str(root), MIB)
    namespace = new_namespace()
    buffer = make_buffer(CELL)
    store.put([key_of(namespace, n) for n in range(16)], [buffer] * 16, ["g"] * 16)
    keys = [key_of(namespace, n) for n in range(16, 20)]
    with locked(str(root / "v1" / "evict.lock"), 1):
        assert store.put(keys, [buffer] * 4, ["g"] * 4) == [PutOutcome.FULL] * 4
    assert store.put(keys, [buffer] * 4, ["g"] * 4) == [PutOutcome.STORED] * 4
    store.close()


def test_an_object_larger_than_the_store_is_full_and_evicts_nothing(root: Path) -> None:
    store = FileStore(str(root), MIB)
    namespace = new_namespace()
    put_one(store, key_of(namespace, 0), make_buffer(CELL))
    assert put_one(store, key_of(namespace, 1), make_buffer(MIB + 1)) is PutOutcome.FULL
    assert store.exists([key_of(namespace, 0)]) == [True]
    assert put_one(store, key_of(namespace, 1), make_buffer(MIB)) is PutOutcome.STORED
    store.close()


def test_a_forked_child_may_use_the_store_and_the_parent_goes_on(root: Path) -> None:
    store = FileStore(str(root), MIB)
    namespace = new_namespace()
    buffer = make_buffer(CELL)
    assert threading.active_count() == 1
    pid = os.fork()
    if pid == 0:
        ok = put_one(store, key_of(namespace, 0), buffer) is PutOutcome.STORED
        os._exit(0 if ok else 1)
    assert put_one(store, key_of(namespace, 1), buffer) is PutOutcome.STORED
    assert os.waitpid(pid, 0)[1] == 0
    assert store.exists([key_of(namespace, n) for n in range(2)]) == [True, True]
    assert_counted(root)
    store.close()


@pytest.mark.parametrize("has_links", [True, False])
def test_of_two_writers_of_one_key_the_first_to_finish_wins(root: Path, has_links: bool) -> None:
    spaces = [FileStore(str(root), MIB)._space for _ in range(2)]
    path = path_of(root, key_of(new_namespace(), 0))
    temps = [space.reserve(CELL) for space in spaces]
    published = []
    for space, temp, letter in zip(spaces, temps, (b"a", b"b"), strict=True):
        assert temp is not None
        space._has_links = has_links
        os.write(temp.fd, letter * CELL)
        os.close(temp.fd)
        published.append(space.publish(temp, str(path)))
    assert published == [True, False]
    assert path.read_bytes() == b"a" * CELL
    assert used_bytes(root) == disk_bytes(root) == CELL
    for space in spaces:
        space.close()


def test_an_eviction_counts_what_others_are_writing(root: Path) -> None:
    store = FileStore(str(root), 16 * CELL)
    other = Space(str(root), 16 * CELL)
    namespace = new_namespace()
    buffer = make_buffer(CELL)
    temps = [other.reserve(CELL) for _ in range(8)]
    keys = [key_of(namespace, number) for number in range(20)]
    assert store.put(keys, [buffer] * 20, ["g"] * 20) == [PutOutcome.STORED] * 20
    assert used_bytes(root) == (8 + len(object_files(root))) * CELL <= 16 * CELL
    for temp in temps:
        assert temp is not None
        os.close(temp.fd)
        other.release(temp)
    assert_counted(root)
    other.close()
    store.close()
