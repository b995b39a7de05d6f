"""Any damage to any file of a store's directory, between any calls.

Store and cell check are tested together, as a lane uses them: what both accept are the bytes that
were put under the key. The store raises StoreError and nothing else, answers in time, and counts
right again after the next count.
"""

import contextlib
import os
import shutil
import struct
import tempfile
import threading
from pathlib import Path

import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.buffers import make_buffer, random_bytes
from tests.support.store_contract import get_one, key_of, put_one
from vllm_kvpool.errors import ConfigError, StoreError
from vllm_kvpool.identity.keys import key_digest
from vllm_kvpool.storage.base import Buffer, ChunkRef, GetOutcome, PutOutcome
from vllm_kvpool.storage.contents.cell_format import HEADER_BYTES, verify, write_header
from vllm_kvpool.storage.file.format import MAGIC, PAGE_BYTES, Footer, is_of, read_footer
from vllm_kvpool.storage.file.index import SOFT_SHARE
from vllm_kvpool.storage.file.space import FORMAT_DIR, object_name
from vllm_kvpool.storage.file.store import FileStore

NAMESPACE = "fuzzed@fmt:0123456789ab"
CELL = 12_000
FILE_BYTES = 12 << 10
SIZE = 1 << 20
KEYS = [key_of(NAMESPACE, number) for number in range(8)]
EXAMPLE_LIMIT_S = 20.0
MEMORY = "/dev/shm"

DAMAGE = ("truncate", "extend", "flip", "zero", "swap", "swap end", "garbage", "delete", "huge")
CALLS = ("put", "get", "remove", "reopen", "many", "remove all", "exists")
steps = st.lists(
    st.tuples(st.sampled_from(DAMAGE + CALLS), st.integers(0, 2**31), st.integers(0, 2**31)),
    max_size=12,
)


def cell_of(key: str, version: int) -> Buffer:
    """A sealed cell whose payload says which key it is of."""
    buffer = make_buffer(CELL)
    data = random_bytes(CELL - HEADER_BYTES - 8, KEYS.index(key) + 100 * version)
    buffer.view[HEADER_BYTES:-8] = data
    write_header(buffer.view, key_digest(key))
    return buffer


CELLS = {key: cell_of(key, 0) for key in KEYS}


class Bench:
    """A store that is used while its files are damaged."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.store = FileStore(str(root), SIZE)
        self.target = make_buffer(CELL)

    def files(self) -> list[Path]:
        """Return all files but the index: to close it here would drop this process's locks."""
        found = [p for p in self.root.rglob("*") if p.is_file() and not p.is_symlink()]
        return sorted((p for p in found if not p.name.startswith("index")), key=str)

    def call(self, what: str, a: int, b: int) -> None:
        key = KEYS[a % len(KEYS)]
        match what:
            case "put":
                put_one(self.store, key, CELLS[key])
            case "get":
                self.get(key)
            case "exists":
                self.store.exists(KEYS)
            case "remove":
                self.store.remove([key])
            case "remove all":
                self.store.remove_namespace(NAMESPACE)
            case "many":
                others = [key_of(NAMESPACE, 1000 + number) for number in range(100)]
                self.store.put(others, [self.target] * 100, [ChunkRef("g")] * 100)
            case "reopen":
                self.store.close()
                self.store = FileStore(str(self.root), SIZE)

    def get(self, key: str) -> None:
        if get_one(self.store, key, self.target) is not GetOutcome.OK:
            return
        if verify(self.target.view, key_digest(key), checksum=True) is None:
            assert self.target.view == CELLS[key].view, key

    def damage(self, how: str, a: int, b: int) -> None:
        files = self.files()
        if not files:
            return
        path, other = files[a % len(files)], files[b % len(files)]
        with path.open("r+b") as file:
            size = os.fstat(file.fileno()).st_size
            at = b % max(size, 1)
            match how:
                case "truncate":
                    file.truncate(at)
                case "extend":
                    file.truncate(size + b % 10_000)
                case "huge":
                    file.truncate(1 << 40)
                case "zero":
                    file.seek(at)
                    file.write(bytes(min(size - at, 5000)))
                case "garbage":
                    file.write(random_bytes(min(size or 64, 5000), b))
                case "flip" if size:
                    file.seek(at)
                    [byte] = file.read(1)
                    file.seek(at)
                    file.write(bytes([byte ^ (1 << (b % 8))]))
        if how == "delete":
            path.unlink()
        elif how == "swap" and other != path:
            os.rename(other, path)
        elif how == "swap end" and min(path.stat().st_size, other.stat().st_size) >= PAGE_BYTES:
            end = read_end(other)
            with path.open("r+b") as file:
                file.seek(-PAGE_BYTES, os.SEEK_END)
                file.write(end)


def read_end(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(-PAGE_BYTES, os.SEEK_END)
        return file.read()


def heals(bench: Bench) -> None:
    """With everything removed and the store full once more, all is as in a new one."""
    for _ in range(3):  # a damaged count is noticed, counted anew, and room made
        with contextlib.suppress(StoreError):
            bench.call("many", 0, 0)
            bench.call("remove all", 0, 0)
            bench.call("reopen", 0, 0)
    bench.store.remove(KEYS)
    for key in KEYS:
        assert put_one(bench.store, key, CELLS[key]) is PutOutcome.STORED, key
        assert get_one(bench.store, key, bench.target) is GetOutcome.OK
        assert bench.target.view == CELLS[key].view
    used_bytes = bench.store._space.index.used_bytes()
    objects = [p for p in bench.files() if "objects" in p.parts]
    assert sum(path.stat().st_size for path in objects) <= used_bytes <= SIZE


def play(root: Path, todo: list[tuple[str, int, int]]) -> None:
    bench = Bench(root)
    for key in KEYS:
        put_one(bench.store, key, CELLS[key])
    for what, a, b in todo:
        if what in DAMAGE:
            bench.damage(what, a, b)
        else:
            with contextlib.suppress(StoreError):
                bench.call(what, a, b)
        for key in KEYS[:3]:
            with contextlib.suppress(StoreError):
                bench.get(key)
    heals(bench)
    bench.store.close()


@settings(max_examples=12, suppress_health_check=list(HealthCheck))
@given(steps)
def test_no_damage_gives_wrong_bytes_or_lasts(todo: list[tuple[str, int, int]]) -> None:
    place = MEMORY if os.access(MEMORY, os.W_OK) else None
    directory = tempfile.mkdtemp(dir=place, prefix="kvpool-fuzz-")
    raised: list[BaseException] = []

    def run() -> None:
        try:
            play(Path(directory) / "pool", todo)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(EXAMPLE_LIMIT_S)
    hangs = thread.is_alive()
    shutil.rmtree(directory, ignore_errors=True)
    assert not hangs
    if raised:
        raise raised[0]


def signed(fields: bytes) -> bytes:
    """Return a last page with any fields and a valid checksum."""
    end = struct.pack("<Q8s", xxhash.xxh3_64_intdigest(fields), MAGIC)
    return bytes(PAGE_BYTES - len(fields) - len(end)) + fields + end


@given(
    st.binary(max_size=200),
    st.sampled_from([0, 1, 4096, 2**31, 2**63, 2**64 - 1]),
    st.integers(0, 2**16 - 1),
    st.sampled_from([0, 1, 2, 3, 2**16 - 1]),
)
def test_any_footer_with_a_sound_checksum(
    key: bytes, object_bytes: int, key_bytes: int, version: int
) -> None:
    """Any process that may write in the directory can make such a footer."""
    for length in (len(key), key_bytes):
        page = signed(key + struct.pack("<QHH", object_bytes, length, version))
        footer = read_footer(page)
        assert footer is None or isinstance(footer, Footer)
        assert not is_of(footer, KEYS[0], CELL)


def test_a_key_that_is_no_text_is_damage(tmp_path: Path) -> None:
    """The file has the right size and name, and a valid checksum."""
    store = FileStore(str(tmp_path / "pool"), SIZE)
    key = KEYS[0]
    put_one(store, key, CELLS[key])
    path = tmp_path / "pool" / FORMAT_DIR / "objects" / object_name(key)
    page = signed(b"\xff\xfe" + struct.pack("<128sQIHH", b"", CELL, 0, 2, 3))
    with path.open("r+b") as file:
        file.seek(-PAGE_BYTES, os.SEEK_END)
        file.write(page)
    assert get_one(store, key, make_buffer(CELL)) is GetOutcome.WRONG_SIZE
    store.close()


def test_opening_any_directory_says_no_more_than_config_error(tmp_path: Path) -> None:
    for number, plant in enumerate((b"", b"x", bytes(16), b"\xff" * 16, bytes(1 << 20))):
        root = tmp_path / str(number)
        FileStore(str(root), SIZE).close()
        for path in root.rglob("*"):
            if path.is_file():
                path.write_bytes(plant)
        try:
            store = FileStore(str(root), SIZE)
        except ConfigError:
            continue
        outcomes = store.put(KEYS, [CELLS[key] for key in KEYS], [ChunkRef("g")] * len(KEYS))
        assert set(outcomes) == {PutOutcome.STORED}
        store.close()


@given(at=st.integers(0, 40_000), junk=st.binary(min_size=1, max_size=200), opened=st.booleans())
@settings(max_examples=30)
def test_a_damaged_index_is_made_anew(
    tmp_path_factory: pytest.TempPathFactory, at: int, junk: bytes, opened: bool
) -> None:
    """The store keeps the index if it reads none of the damaged bytes."""
    root = tmp_path_factory.mktemp("pool") / "pool"
    store = FileStore(str(root), SIZE, "threads")
    keys = [key_of(NAMESPACE, 1000 + number) for number in range(20)]
    for key in keys:
        put_one(store, key, CELLS[KEYS[0]])
    if not opened:
        store.close()
    with (root / FORMAT_DIR / "index").open("r+b") as file:
        file.seek(at)
        file.write(junk)
    if not opened:
        store = FileStore(str(root), SIZE, "threads")
    assert get_one(store, keys[0], make_buffer(CELL)) is GetOutcome.OK
    for number in range(30):
        with contextlib.suppress(StoreError):
            put_one(store, key_of(NAMESPACE, 2000 + number), CELLS[KEYS[0]])
    store.close()
    objects = [path for path in (root / FORMAT_DIR / "objects").rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in objects) <= SIZE * (1 + SOFT_SHARE) + CELL + 8192
