"""Other users of the machine, who may replace a file store or its parents.

Needs root, to act as several users.
"""

import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.security.planted import CELL, MIB, NAMESPACE, fill, path_of, snapshot, use
from tests.support.buffers import make_buffer
from tests.support.store_contract import get_one, key_of, put_one
from vllm_kvpool.errors import ConfigError, StoreError
from vllm_kvpool.storage.base import GetOutcome, PutOutcome
from vllm_kvpool.storage.file import paths
from vllm_kvpool.storage.file import store as store_module
from vllm_kvpool.storage.file.space import FORMAT_DIR
from vllm_kvpool.storage.file.store import FileStore, open_file_store
from vllm_kvpool.storage.url import parse_store_url

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be several users")

OTHER = 12_345
KEY = key_of(NAMESPACE, 0)


def as_user(uid: int, act: Callable[[], None]) -> None:
    """Run `act` as another user, in a child process."""
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
            act()
        except BaseException:
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory that every user reaches; a test makes it writable for them."""
    with tempfile.TemporaryDirectory(prefix="kvpool-test-") as directory:
        os.chmod(directory, 0o755)
        shared = Path(directory) / "shared"
        shared.mkdir(mode=0o755)
        yield shared


def forge(store_root: Path, content: bytes) -> Callable[[], None]:
    """Return an action that replaces a store by a forged one, with other bytes under the key."""

    def act() -> None:
        store_root.rename(store_root.with_name("taken"))
        store_module.check_parents = lambda path: None  # in this child alone
        forged = FileStore(str(store_root), MIB)
        buffer = make_buffer(CELL)
        buffer.view[: len(content)] = content
        assert put_one(forged, KEY, buffer) is PutOutcome.STORED
        forged.close()

    return act


@pytest.mark.parametrize("depth", ["root", "format", "objects", "namespace", "shard", "file"])
def test_what_another_user_puts_in_the_place_of_a_part_is_not_read(
    shared: Path, depth: str
) -> None:
    """The forged cells are whole and have the right keys."""
    root = shared / "pool"
    store = FileStore(str(root), MIB)
    buffer = make_buffer(CELL)
    put_one(store, KEY, buffer)
    shared.chmod(0o777)
    copy = shared / "copy"
    own = path_of(root, KEY)
    levels = {
        "root": root,
        "format": root / FORMAT_DIR,
        "objects": root / FORMAT_DIR / "objects",
        "namespace": own.parents[1],
        "shard": own.parent,
        "file": own,
    }
    level = levels[depth]
    level.rename(copy)
    if copy.is_dir():
        shutil.copytree(copy, level)
    else:
        shutil.copy2(copy, level)
    for path in [level, *level.rglob("*")]:
        os.chown(path, OTHER, OTHER)
    before = snapshot(level) if level.is_dir() else {}
    if depth == "root":
        with pytest.raises(StoreError, match=f"belongs to uid {OTHER}"):
            store.exists([key_of(NAMESPACE, 1)])
    assert get_one(store, KEY, buffer) is not GetOutcome.OK
    use(store)
    if level.is_dir():
        assert snapshot(level) == before
    else:
        assert level.stat().st_uid == OTHER
    store.close()


def test_a_running_store_that_another_user_replaces_gives_no_forged_cell(shared: Path) -> None:
    """The parent becomes writable by all after the start."""
    root = shared / "pool"
    store = FileStore(str(root), MIB)
    buffer = make_buffer(CELL)
    put_one(store, KEY, buffer)
    shared.chmod(0o777)
    as_user(OTHER, forge(root, b"forged"))
    try:
        outcome = get_one(store, KEY, buffer)
    except StoreError:
        outcome = GetOutcome.MISSING
    assert outcome is not GetOutcome.OK
    assert bytes(buffer.view[:6]) != b"forged"
    store.close()


REFUSED: dict[str, tuple[int, int, str]] = {
    "writable by all": (0o777, 0, r"can be written by all users \(mode 0777\); run: chmod \+t"),
    "another user's": (0o755, OTHER, f"belongs to uid {OTHER}, we are uid 0"),
    "another user's, sticky": (0o1777, OTHER, f"belongs to uid {OTHER}, we are uid 0"),
}
TAKEN = {
    "ours": (0o755, 0),
    "sticky": (0o1777, 0),
    "writable by a group": (0o2775, 0),
}


@pytest.mark.parametrize("is_there", [False, True])
@pytest.mark.parametrize("levels", [1, 2])
@pytest.mark.parametrize("kind", REFUSED)
def test_a_parent_in_which_others_may_replace_the_store_is_refused(
    shared: Path, kind: str, levels: int, is_there: bool
) -> None:
    mode, uid, words = REFUSED[kind]
    root = shared / "pool" if levels == 1 else shared / "mine" / "pool"
    if is_there:
        FileStore(str(root), MIB).close()
    os.chown(shared, uid, uid)
    shared.chmod(mode)
    with pytest.raises(ConfigError, match=f"{shared} {words}"):
        open_file_store(str(root), MIB, "auto", parse_store_url("file:///x").options.policy)
    assert root.exists() == is_there


@pytest.mark.parametrize("kind", TAKEN)
def test_other_parents_are_taken(shared: Path, kind: str) -> None:
    mode, uid = TAKEN[kind]
    os.chown(shared, uid, uid)
    shared.chmod(mode)
    FileStore(str(shared / "made" / "pool"), MIB).close()
    assert (shared / "made").stat().st_mode & 0o777 == 0o755


def test_a_parent_behind_a_link_counts_too(shared: Path) -> None:
    """The check covers the directory that has the link and all directories above its target."""
    real = shared / "real"
    real.mkdir()
    (shared / "link").symlink_to(real / "pools")
    (real / "pools").mkdir()
    FileStore(str(shared / "link" / "pool"), MIB).close()
    real.chmod(0o777)
    with pytest.raises(ConfigError, match=f"{real} can be written by all"):
        FileStore(str(shared / "link" / "pool"), MIB)
    real.chmod(0o755)
    os.lchown(shared / "link", OTHER, OTHER)
    with pytest.raises(ConfigError, match=f"{shared}/link belongs to uid {OTHER}"):
        FileStore(str(shared / "link" / "pool"), MIB)


def test_parents_are_made_for_the_user_alone_whatever_the_umask(shared: Path) -> None:
    before = os.umask(0)
    try:
        FileStore(str(shared / "a" / "b" / "pool"), MIB).close()
    finally:
        os.umask(before)
    assert stat.S_IMODE((shared / "a" / "b").stat().st_mode) == 0o755


@pytest.mark.parametrize(("mode", "uid"), [(0o777, 0), (0o2777, 0), (0o755, OTHER)])
def test_the_root_of_a_containers_volume_is_no_store_and_its_subdirectories_are(
    shared: Path, monkeypatch: pytest.MonkeyPatch, mode: int, uid: int
) -> None:
    """Kubernetes mounts volumes that all users may write, or that another user owns."""
    os.chown(shared, uid, uid)
    shared.chmod(mode)
    monkeypatch.setattr(paths, "_is_container", lambda: True)
    monkeypatch.setattr(os.path, "ismount", lambda path: path == str(shared))
    with pytest.raises(ConfigError, match=f"name file://{shared}/kvpool$"):
        FileStore(str(shared), MIB)
    store = FileStore(str(shared / "kvpool"), MIB)
    assert fill(store, 4) == [PutOutcome.STORED] * 4
    store.close()
    monkeypatch.setattr(paths, "_is_container", lambda: False)
    with pytest.raises(ConfigError, match="another user could replace it"):
        FileStore(str(shared / "kvpool"), MIB)


@pytest.mark.parametrize(("root", "expected"), [("overlay", True), ("ext4", False)])
def test_a_container_is_known_beside_a_mount_of_any_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, root: str, *, expected: bool
) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_bytes(
        b"31 23 0:28 / /mnt/caf\xe9 rw - cifs //nas/x rw\n"
        b"1 0 0:1 / / rw - " + root.encode() + b" none rw\n"
    )
    monkeypatch.setattr(paths, "MOUNTS", str(mounts))
    monkeypatch.setattr(os.path, "exists", lambda path: False)
    assert paths._is_container() is expected
