"""A file store on file systems that fill up, turn read-only and go away: real ones, mounted here.

Without the right to mount these are skipped; tests/storage/test_files.py has the same with system
calls that are changed.
"""

import contextlib
import errno
import os
import re
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.security.planted import CELL, FILE, MIB, NAMESPACE, path_of
from tests.support.buffers import make_buffer, random_bytes
from tests.support.processes import open_files
from tests.support.store_contract import get_one, key_of, put_one
from tests.support.store_hooks import wait_complete
from vllm_kvpool.errors import ConfigError, StoreError, StoreUnreachable
from vllm_kvpool.storage.base import Buffer, ChunkRef, GetOutcome, PutOutcome
from vllm_kvpool.storage.eviction import POLICIES
from vllm_kvpool.storage.file.space import FORMAT_DIR
from vllm_kvpool.storage.file.store import FileStore, open_file_store

STORED, FULL, FAILED = PutOutcome.STORED, PutOutcome.FULL, PutOutcome.FAILED
COMMAND_LIMIT_S = 60  # to mount and unmount images a busy disk takes long


def run(*command: str | Path) -> None:
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, timeout=COMMAND_LIMIT_S
    )
    if done.returncode:
        raise OSError(f"{command[0]}: {done.stderr.strip() or done.returncode}")


class Mount:
    """A tmpfs at `path`, and what is laid over it; all of it goes at the end of the test."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_mounts = 0

    def image(self, nbytes: int, *mkfs: str) -> None:
        """A file system of its own kind in a file beside it; skips without loop devices."""
        image = self.path.with_name("image")
        with image.open("wb") as file:
            file.truncate(nbytes)
        run(*mkfs, image)
        try:
            self._mount("-o", "loop", image, self.path)
        except OSError as error:
            pytest.skip(f"no image can be mounted here: {error}")
        self.path.chmod(0o700)

    def tmpfs(self, options: str) -> None:
        self._mount("-t", "tmpfs", "-o", f"mode=700,{options}", "tmpfs", self.path)

    def lay_read_only_over(self) -> None:
        """Remount read-only, as after a disk error: open files stay, no path can be written."""
        self._mount("--bind", self.path, self.path)
        run("mount", "-o", "remount,bind,ro", self.path)

    def take_off(self) -> None:
        """Unmount lazily, even while files below the mount are open."""
        run("umount", "--lazy", self.path)
        self.num_mounts -= 1

    def _mount(self, *arguments: str | Path) -> None:
        run("mount", *arguments)
        self.num_mounts += 1


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    path = tmp_path / "mounted"
    path.mkdir(mode=0o700)
    mount = Mount(path)
    try:
        mount.tmpfs("size=64k")
    except OSError as error:
        pytest.skip(f"no file system can be mounted here: {error}")
    mount.take_off()
    yield mount
    while mount.num_mounts:
        mount.take_off()


@pytest.fixture
def buffer() -> Buffer:
    buffer = make_buffer(CELL)
    buffer.view[:] = random_bytes(CELL, 1)
    return buffer


def keys_of(start: int, stop: int) -> list[str]:
    return [key_of(NAMESPACE, number) for number in range(start, stop)]


def used_bytes(root: Path) -> int:
    with contextlib.closing(sqlite3.connect(root / FORMAT_DIR / "index", timeout=10)) as db:
        return int(db.execute("SELECT used_bytes FROM store").fetchone()[0])


def assert_whole_or_missing(store: FileStore, keys: list[str], expected: Buffer) -> None:
    buffer = make_buffer(CELL)
    for key in keys:
        if get_one(store, key, buffer) is GetOutcome.OK:
            assert buffer.view == expected.view


@pytest.mark.parametrize("io", ["auto", "threads"])
def test_a_disk_that_is_full_in_mid_batch_and_has_room_again(
    mount: Mount, buffer: Buffer, io: str
) -> None:
    mount.tmpfs("size=1m")
    other = mount.path / "of somebody else"
    other.write_bytes(bytes(MIB // 2))
    store = FileStore(str(mount.path / "pool"), 64 * MIB, io)
    first = store.put(keys_of(0, 20), [buffer] * 20, [ChunkRef("g")] * 20)
    assert {STORED, FULL} == set(first)
    assert FULL in store.put(keys_of(0, 20), [buffer] * 20, [ChunkRef("g")] * 20)
    num_stored = store.exists(keys_of(0, 20)).count(True)
    assert_whole_or_missing(store, keys_of(0, 20), buffer)
    other.unlink()
    again = store.put(keys_of(20, 24), [buffer] * 4, [ChunkRef("g")] * 4)
    assert again == [STORED] * 4
    assert store.exists(keys_of(20, 24)) == [True] * 4
    assert used_bytes(mount.path / "pool") == (num_stored + 4) * FILE
    store.close()


def test_puts_into_a_full_disk_use_up_nothing(mount: Mount, buffer: Buffer) -> None:
    """A failed put gives its reserved bytes back, at the latest with the next index write."""
    mount.tmpfs("size=1m")
    root = mount.path / "pool"
    store = FileStore(str(root), 64 * MIB, "threads")
    other = mount.path / "of somebody else"
    with contextlib.suppress(OSError), other.open("wb", 0) as file:
        while True:
            file.write(bytes(4096))
    for _ in range(10):
        assert put_one(store, key_of(NAMESPACE, 0), buffer) is FULL
    other.unlink()
    assert put_one(store, key_of(NAMESPACE, 0), buffer) is STORED
    assert used_bytes(root) == FILE
    store.close()


def test_a_disk_without_inodes_and_with_some_again(mount: Mount, buffer: Buffer) -> None:
    mount.tmpfs("size=8m,nr_inodes=60")
    store = FileStore(str(mount.path / "pool"), 64 * MIB)
    first = store.put(keys_of(0, 40), [buffer] * 40, [ChunkRef("g")] * 40)
    assert {STORED, FULL} == set(first)
    assert_whole_or_missing(store, keys_of(0, 40), buffer)
    num_stored = store.exists(keys_of(0, 40)).count(True)
    assert num_stored > 10, "each has an inode, and most a directory"
    assert store.remove(keys_of(0, 40)) == num_stored
    run("mount", "-o", "remount,nr_inodes=200", mount.path)
    assert store.put(keys_of(20, 24), [buffer] * 4, [ChunkRef("g")] * 4) == [STORED] * 4
    store.close()


def put_chunks(store: FileStore, start: int, stop: int, buffer: Buffer) -> list[PutOutcome]:
    """Put cells of a chunk each, one at a time."""
    return [store.put([key], [buffer], [ChunkRef(key)])[0] for key in keys_of(start, stop)]


def test_disk_that_others_have_filled_is_opened_and_read(mount: Mount, buffer: Buffer) -> None:
    """Otherwise, an engine that starts on the full disk would find none of the stored cells."""
    mount.tmpfs("size=4m")
    root = mount.path / "pool"
    store = FileStore(str(root), 64 * MIB)
    assert set(put_chunks(store, 0, 30, buffer)) == {STORED}
    store.close()
    # A file older than every cell, with a cell's name, in a directory of no namespace.
    strangers = Path(store._space.objects) / "backup" / "ab" / ("0" * 38)
    strangers.parent.mkdir(parents=True)
    strangers.write_bytes(bytes(4096))
    os.utime(strangers, (1, 1))
    with contextlib.suppress(OSError), (mount.path / "of somebody else").open("wb", 0) as other:
        while True:
            other.write(bytes(4096))
    store = FileStore(str(root), 64 * MIB)
    there = store.exists(keys_of(0, 30))
    assert there == [False] * 16 + [True] * 14, "1 MiB of the oldest"
    assert get_one(store, key_of(NAMESPACE, 29), make_buffer(CELL)) is GetOutcome.OK
    assert wait_complete(store, 10)
    assert strangers.exists()
    store.close()


def test_disk_that_runs_out_of_inodes_before_bytes_evicts(mount: Mount, buffer: Buffer) -> None:
    """A public report: the store kept its first cells for ever and took no others."""
    mount.image(64 * MIB, "mkfs.ext4", "-q", "-F", "-N", "700")
    store = FileStore(str(mount.path / "pool"), 512 * MIB)
    small = make_buffer(3000)
    assert set(put_chunks(store, 0, 900, small)) == {STORED}
    left = os.statvfs(mount.path)
    assert left.f_bavail * left.f_frsize > 16 * MIB
    assert store.exists(keys_of(700, 900)) == [True] * 200
    assert not store.exists(keys_of(0, 1))[0]
    store.close()


def test_quota_smaller_than_the_size_evicts(mount: Mount, buffer: Buffer) -> None:
    """A public report: puts were refused for ever, or the engine was ended by SIGBUS."""
    mount.image(160 * MIB, "mkfs.btrfs", "-q")
    volume = mount.path / "volume"
    run("btrfs", "quota", "enable", mount.path)
    run("btrfs", "subvolume", "create", volume)
    run("btrfs", "qgroup", "limit", "12M", volume)
    volume.chmod(0o700)
    store = FileStore(str(volume / "pool"), 512 * MIB)
    outcomes = put_chunks(store, 0, 400, buffer)
    assert outcomes.count(STORED) > 390, "now and then the index lacks room, too"
    assert store.exists(keys_of(300, 400)).count(True) > 90
    assert used_bytes(volume / "pool") < 12 * MIB
    store.close()


PUTS_WHILE_OTHERS_FILL = """
import sys
from pathlib import Path
from tests.security.test_file_systems import *
mounted, buffer = Path(sys.argv[1]), make_buffer(CELL)
store = FileStore(str(mounted / "pool"), 64 * MIB)
put_chunks(store, 0, 100, buffer)
with (mounted / "of somebody else").open("wb", 0) as other:
    for step in range(6):
        for nbytes in (MIB, 4096, 1):
            with contextlib.suppress(OSError):
                while True:
                    other.write(os.urandom(nbytes))
        assert set(put_chunks(store, 100 + 30 * step, 130 + 30 * step, buffer)) <= {STORED, FULL}
        os.sync()
(mounted / "of somebody else").unlink()
os.sync()
assert STORED in put_chunks(store, 300, 330, buffer)
store.close()
"""


@pytest.mark.parametrize(
    "mkfs",
    [
        pytest.param(("mkfs.btrfs", "-q"), id="btrfs"),
        pytest.param(("mkfs.ext4", "-q", "-F", "-b", "1024"), id="ext4 in blocks of 1 KiB"),
    ],
)
def test_process_survives_others_that_fill_its_disk(mount: Mount, mkfs: tuple[str, ...]) -> None:
    """A public report: the engine was ended by SIGBUS, in a page of the index that was mapped."""
    mount.image(160 * MIB, *mkfs)
    done = subprocess.run(
        [sys.executable, "-c", PUTS_WHILE_OTHERS_FILL, mount.path],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("left", [0, 1, 2, 3, 4, 5, 6])
def test_a_disk_too_full_to_open_a_store_says_so_and_others_may_make_room(
    mount: Mount, left: int
) -> None:
    """A step that lacks an inode leaves nothing behind, so the start can be repeated."""
    mount.tmpfs(f"size=1m,nr_inodes={left + 2}")
    root = mount.path / "pool"
    where = re.escape(str(root))
    for _ in range(3):
        with pytest.raises(
            StoreUnreachable, match=rf"No space left on device \({where}.*; free space"
        ):
            FileStore(str(root), MIB, "threads")
        assert not open_files(mount.path)
        assert not [*root.glob(f"{FORMAT_DIR}/writers/*")]
    run("mount", "-o", "remount,nr_inodes=200", mount.path)
    FileStore(str(root), MIB, "threads").close()


def test_a_directory_whose_name_cannot_be_changed_is_taken_away_again(
    mount: Mount, monkeypatch: pytest.MonkeyPatch
) -> None:
    mount.tmpfs("size=1m")

    def no_room(old: str, new: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), old)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", no_room)
        with pytest.raises(StoreUnreachable):
            FileStore(str(mount.path / "pool"), MIB, "threads")
    assert not open_files(mount.path)
    assert not [*(mount.path / "pool" / FORMAT_DIR / "writers").iterdir()]


def test_a_disk_that_turns_read_only_still_gives(
    mount: Mount, buffer: Buffer, caplog: pytest.LogCaptureFixture
) -> None:
    mount.tmpfs("size=8m")
    root = mount.path / "pool"
    store = FileStore(str(root), 4 * MIB)
    assert put_one(store, key_of(NAMESPACE, 0), buffer) is STORED
    mount.lay_read_only_over()
    caplog.clear()
    for _ in range(3):
        assert store.put(keys_of(1, 4), [buffer] * 3, [ChunkRef("g")] * 3) == [FAILED] * 3
        assert store.exists(keys_of(0, 4)) == [True, False, False, False]
        target = make_buffer(CELL)
        assert get_one(store, key_of(NAMESPACE, 0), target) is GetOutcome.OK
        assert target.view == buffer.view
    assert len(caplog.records) == 1, caplog.text
    assert "Read-only file system" in caplog.text
    with pytest.raises(StoreError, match="Read-only file system"):
        store.remove(keys_of(0, 1))
    with pytest.raises(StoreError, match="Read-only file system"):
        store.remove_namespace(NAMESPACE)
    with pytest.raises(ConfigError, match="Read-only file system"):
        FileStore(str(root), MIB)
    reader = open_file_store(str(root), MIB, "auto", POLICIES["lru"])
    assert get_one(reader, key_of(NAMESPACE, 0), target) is GetOutcome.OK
    reader.close()
    mount.take_off()
    assert store.put(keys_of(1, 4), [buffer] * 3, [ChunkRef("g")] * 3) == [STORED] * 3
    store.close()


def test_a_disk_that_is_unmounted_and_mounted_again(mount: Mount, buffer: Buffer) -> None:
    """While the mount is gone, the root is gone too: the store's directory lies below the mount."""
    mount.tmpfs("size=8m")
    root = mount.path / "pool"
    store = FileStore(str(root), 4 * MIB)
    put_one(store, key_of(NAMESPACE, 0), buffer)
    mount.take_off()
    for call in (
        lambda: store.exists(keys_of(0, 2)),
        lambda: store.put(keys_of(0, 2), [buffer] * 2, [ChunkRef("g")] * 2),
        lambda: store.get(keys_of(0, 2), [buffer] * 2),
        lambda: store.remove(keys_of(0, 2)),
    ):
        with pytest.raises(StoreError, match="is gone"):
            call()
    mount.tmpfs("size=8m")  # another disk, empty
    root.mkdir(mode=0o700)
    assert store.exists(keys_of(0, 2)) == [False, False]
    assert store.put(keys_of(0, 2), [buffer] * 2, [ChunkRef("g")] * 2) == [STORED] * 2
    assert get_one(store, key_of(NAMESPACE, 1), make_buffer(CELL)) is GetOutcome.OK
    assert store.remove_namespace(NAMESPACE) == 2
    store.close()


def test_a_mount_point_that_is_the_root_itself(mount: Mount, buffer: Buffer) -> None:
    """Unmounted, the mount point is an empty directory.

    The store uses it until the disk is back.
    """
    mount.tmpfs("size=8m")
    store = FileStore(str(mount.path), 4 * MIB)
    put_one(store, key_of(NAMESPACE, 0), buffer)
    mount.take_off()
    assert store.exists(keys_of(0, 1)) == [False]
    assert store.put(keys_of(0, 80), [buffer] * 80, [ChunkRef("g")] * 80) == [STORED] * 80
    assert used_bytes(mount.path) <= 4 * MIB
    mount.tmpfs("size=8m")
    assert store.put(keys_of(0, 2), [buffer] * 2, [ChunkRef("g")] * 2) == [STORED] * 2
    assert used_bytes(mount.path) == 2 * FILE
    store.close()


def test_a_directory_that_is_deleted_and_made_again(tmp_path: Path, buffer: Buffer) -> None:
    """The store recovers without being opened again. This case needs no mount."""
    root = tmp_path / "pool"
    store = FileStore(str(root), MIB)
    for _ in range(2):
        assert store.put(keys_of(0, 30), [buffer] * 30, [ChunkRef("g")] * 30).count(STORED) == 30
        run("rm", "-rf", root)
        with pytest.raises(StoreError, match="is gone"):
            store.put(keys_of(0, 2), [buffer] * 2, [ChunkRef("g")] * 2)
        with pytest.raises(StoreError, match="is gone"):
            store.exists(keys_of(0, 2))
        root.mkdir(mode=0o700)
        assert store.exists(keys_of(0, 2)) == [False, False]
    assert store.put(keys_of(0, 2), [buffer] * 2, [ChunkRef("g")] * 2) == [STORED] * 2
    assert used_bytes(root) == 2 * FILE
    assert path_of(root, key_of(NAMESPACE, 0)).stat().st_mode & 0o777 == 0o600
    store.close()
    assert os.listdir(root / FORMAT_DIR / "writers") == []
