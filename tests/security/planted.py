"""Foreign things for a file store's directory, and the store's use with them in place."""

import contextlib
import hashlib
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path

from tests.support.buffers import make_buffer
from tests.support.store_contract import get_one, key_of, put_one
from vllm_kvpool.errors import ConfigError, StoreError
from vllm_kvpool.storage.base import PutOutcome
from vllm_kvpool.storage.file.space import FORMAT_DIR, object_name
from vllm_kvpool.storage.file.store import FileStore

MIB = 1 << 20
FILE = 64 << 10
CELL = FILE - 300  # with its key and footer, just such a file
LIMIT_S = 20.0
OLD_NS = 10**9  # colder than any object
NAMESPACE = "planted@fmt:0123456789ab"

Snapshot = dict[str, tuple[int, int, int, str]]


def path_of(root: Path, key: str) -> Path:
    return root / FORMAT_DIR / "objects" / object_name(key)


def make_outside(directory: Path) -> Path:
    """Make files that look like parts of a store, at every depth, older than its objects."""
    shard = f"{NAMESPACE}/ab"
    for place in ("", "ab", shard, f"objects/{shard}", "objects", "writers/dead"):
        (directory / place).mkdir(parents=True, exist_ok=True)
        for name in ("lock", "index", f"{FILE}", "c" * 38):
            (directory / place / name).write_bytes(b"precious" * (FILE // 8))
            os.utime(directory / place / name, ns=(OLD_NS, OLD_NS))
    return directory


def snapshot(directory: Path) -> Snapshot:
    """Return everything visible of a tree, including the times of its directories."""
    seen: Snapshot = {}
    for path in [directory, *sorted(directory.rglob("*"))]:
        status = path.lstat()
        is_file = stat.S_ISREG(status.st_mode)
        digest = hashlib.sha256(path.read_bytes()).hexdigest() if is_file else ""
        seen[str(path.relative_to(directory))] = (
            status.st_mode,
            status.st_mtime_ns,
            status.st_size,
            digest,
        )
    return seen


def within_limit(call: Callable[[], None]) -> None:
    """Fail instead of hanging, and pass on what the call raises."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    assert not thread.is_alive(), "the call hangs"
    if raised:
        raise raised[0]


def fill(store: FileStore, count: int = 20) -> list[PutOutcome]:
    """Put more than a store of 1 MiB holds."""
    buffer = make_buffer(CELL)
    outcomes = []
    for number in range(count):
        buffer.view[:4] = number.to_bytes(4, "little")
        outcomes.append(put_one(store, key_of(NAMESPACE, number), buffer))
    return outcomes


def use(store: FileStore) -> None:
    """Call every method, with evictions. A store may report failures and nothing else."""
    buffer = make_buffer(CELL)
    keys = [key_of(NAMESPACE, number) for number in range(20)]
    for call in (
        lambda: store.exists(keys),
        lambda: fill(store),
        lambda: [get_one(store, key, buffer) for key in keys],
        lambda: store.remove(keys[:4]),
        lambda: store.remove_namespace(NAMESPACE),
        lambda: fill(store),
    ):
        with contextlib.suppress(StoreError):
            call()


def use_and_open_again(store: FileStore, root: Path) -> None:
    """Use a store, close it, and do so once more with another, if it can be opened."""
    use(store)
    store.close()
    with contextlib.suppress(ConfigError, StoreError):
        again = FileStore(str(root), MIB)
        use(again)
        again.close()
