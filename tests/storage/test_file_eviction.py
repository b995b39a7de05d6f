"""A full store keeps the beginnings of prompts, and what room costs does not grow with it."""

import builtins
import contextlib
import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.security.planted import snapshot
from tests.storage.file_bench import disk_bytes
from tests.support.buffers import make_buffer
from tests.support.memory_store import MemoryStore
from tests.support.store_hooks import wait_complete
from vllm_kvpool.errors import StoreError
from vllm_kvpool.identity.keys import chunk_id_of_key
from vllm_kvpool.storage.base import ChunkRef, GetOutcome, PutOutcome, Retention, Store
from vllm_kvpool.storage.eviction import POLICIES
from vllm_kvpool.storage.file import index as index_module
from vllm_kvpool.storage.file import rows as rows_module
from vllm_kvpool.storage.file.file_system import FileSystem
from vllm_kvpool.storage.file.index import (
    SOFT_SHARE,
    FileIndex,
)
from vllm_kvpool.storage.file.rows import CELL_ENTRY, MAX_ROWS, Rows, new_cell
from vllm_kvpool.storage.file.space import FORMAT_DIR, FileSpace
from vllm_kvpool.storage.file.store import FileStore

FILE = 8192
CELL = FILE - 500
LIMIT_S = 60
NAMESPACE = "m@fmt:0123456789ab"
KINDS = ("", "@kind:window")
Prompt = tuple[int, ...]


def key_of(prompt: Prompt, kind: str, head: int) -> str:
    """The key of a prompt's last chunk: what its tokens are so far is its hash."""
    digest = "".join(f"{token:02x}" for token in prompt)
    return f"{NAMESPACE}@dcp0of1@head:{head}@layers:0-4{kind}@{digest}"


def ref_of(prompt: Prompt, kind: str) -> ChunkRef:
    parent = chunk_id_of_key(key_of(prompt[:-1], kind, 0)) if len(prompt) > 1 else ""
    return ChunkRef(chunk_id_of_key(key_of(prompt, kind, 0)), parent, len(prompt) - 1)


def save(store: Store, prompt: Prompt, first: int, heads: range, nbytes: int = CELL) -> None:
    cells = [
        (key_of(prompt[:stop], kind, head), ref_of(prompt[:stop], kind))
        for stop in range(first + 1, len(prompt) + 1)
        for kind in KINDS
        for head in heads
    ]
    buffer = make_buffer(nbytes)
    store.put([key for key, _ in cells], [buffer] * len(cells), [ref for _, ref in cells])


def load(store: Store, prompt: Prompt, nbytes: int = CELL) -> None:
    keys = [key_of(prompt[:stop], KINDS[0], 0) for stop in range(1, len(prompt) + 1)]
    store.get(keys, [make_buffer(nbytes) for _ in keys])


def orphans(store: Store, seen: set[Prompt], heads: range) -> list[Prompt]:
    """Chunks that are there without one before them."""
    found = []
    for kind in KINDS:
        there = {
            prompt
            for prompt in seen
            if any(store.exists([key_of(prompt, kind, head) for head in heads]))
        }
        found += [p for p in there if len(p) > 1 and p[:-1] not in there]
    return found


prompts = st.lists(st.integers(0, 1), min_size=1, max_size=9).map(tuple)
steps = st.lists(
    st.tuples(st.sampled_from(["save", "save", "load", "restart"]), prompts, st.integers(0, 1)),
    min_size=5,
    max_size=40,
)


def walk(walked: list[tuple[str, Prompt, int]], stores: list[Store], reopen: object) -> None:
    """Two writers share prompts' beginnings; each saves what of a prompt it does not find."""
    heads = range(2)
    seen: set[Prompt] = set()
    for what, prompt, writer in walked:
        store = stores[writer]
        if what == "save":
            there = [
                all(store.exists([key_of(prompt[:n], kind, h) for kind in KINDS for h in heads]))
                for n in range(1, len(prompt) + 1)
            ]
            first = there.index(False) if False in there else len(prompt)
            save(store, prompt, first, heads)
            seen |= {prompt[:n] for n in range(1, len(prompt) + 1)}
        elif what == "load":
            load(store, prompt)
        else:
            stores[writer] = reopen(writer)  # type: ignore[operator]
        assert orphans(store, seen, heads) == []


@pytest.mark.parametrize("policy", list(POLICIES))
@given(walked=steps)
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_chunk_never_outlives_one_before_it(
    tmp_path_factory: pytest.TempPathFactory, policy: str, walked: list[tuple[str, Prompt, int]]
) -> None:
    root = tmp_path_factory.mktemp("pool") / "pool"
    clock = iter(range(1_000_000, 1 << 60, 1000)).__next__

    def open_store() -> FileStore:
        return FileStore(str(root), 40 * FILE, "threads", POLICIES[policy], clock)

    stores: list[Store] = [open_store(), open_store()]

    def reopen(writer: int) -> FileStore:
        stores[writer].close()
        return open_store()

    walk(walked, stores, reopen)
    for store in stores:
        store.close()


@given(walked=steps)
def test_nor_in_the_store_of_this_process(walked: list[tuple[str, Prompt, int]]) -> None:
    store = MemoryStore("", 40 * CELL)
    walk(walked, [store, store], lambda writer: store)
    store._table.check()


def test_after_an_overflow_the_beginning_is_there(tmp_path: Path) -> None:
    """28 of 40 chunks were left once, and no token of the prompt was of use."""
    store = FileStore(str(tmp_path / "pool"), 60 * FILE)
    prompt = tuple(range(40))
    save(store, prompt, 0, range(1))
    load(store, prompt)
    save(store, tuple(range(100, 105)), 0, range(1))
    left = [
        all(store.exists([key_of(prompt[:n], kind, 0) for kind in KINDS])) for n in range(1, 41)
    ]
    assert 20 <= sum(left) < 40
    assert left == sorted(left, reverse=True), "a chunk is there whose beginning is not"
    store.close()


def index_of(path: Path, chunks: int) -> FileIndex:
    """The index of a store that is full of prompts of ten chunks."""
    clock = iter(range(1, 1 << 60)).__next__
    index = FileIndex(str(path), POLICIES["lru"], clock, lambda path: None, lambda cell: False)
    index.complete()
    for first in range(0, chunks, 100):
        rows = [
            new_cell(
                ChunkRef(f"{n}", f"{n - 1}" if n % 10 else "", n % 10),
                NAMESPACE,
                n.to_bytes(20, "big"),
                FILE,
            )
            for n in range(first, first + 100)
        ]
        held = index.reserve("w", rows, chunks * FILE)
        assert held is not None
        held.stored.update(row.name for row in rows)
        index.close_reservation(held)
    return index


def test_room_costs_the_same_however_much_is_stored(tmp_path: Path) -> None:
    plans = []
    for chunks in (500, 20_000):
        index = index_of(tmp_path / f"index-{chunks}", chunks)
        steps = 0

        def count() -> int:
            nonlocal steps
            steps += 1
            return 0

        with index._reading() as db:
            db.set_progress_handler(count, 100)
        row = new_cell(ChunkRef("new"), NAMESPACE, b"n" * 20, FILE)
        held = index.reserve("w", [row], chunks * FILE)
        assert held is not None
        assert len(held.evicted) == 1
        held.stored.add(row.name)
        index.close_reservation(held)
        plans.append(steps)
        index.close()
    assert plans[1] <= plans[0] + 3, f"hundreds of steps of SQLite: {plans}"


@pytest.fixture
def space(tmp_path: Path) -> Iterator[FileSpace]:
    tmp_path.joinpath("pool").mkdir(mode=0o700)
    space = FileSpace(str(tmp_path / "pool"), 100 * FILE, POLICIES["lru"], lambda: 1)
    yield space
    space.close()


def cells_of(db: sqlite3.Connection) -> dict[bytes, int]:
    """The cells that an index knows, with their bytes."""
    blobs = [cells for (cells,) in db.execute("SELECT cells FROM chunk")]
    return dict(CELL_ENTRY.iter_unpack(b"".join(blobs)))


CHILD = """
import random, sys
from pathlib import Path
from tests.storage.test_file_eviction import FILE, load, save
from vllm_kvpool.storage.file.store import FileStore
root, size, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
assert sys.stdin.readline(), "the test has ended"
store = FileStore(root, size)
chance = random.Random(seed)
print("ready", flush=True)
while True:
    prompt = tuple(chance.randrange(3) for _ in range(chance.randrange(1, 12)))
    save(store, prompt, 0, range(2))
    load(store, prompt)
"""


@pytest.fixture
def writers(tmp_path: Path) -> Iterator[list["subprocess.Popen[str]"]]:
    """Ten processes that put cells into one pool, from a line on stdin until they are killed. They
    import before any of them puts, which would keep the cores busy; none outlives the test."""
    command = [sys.executable, "-c", CHILD, str(tmp_path / "pool"), str(400 * FILE)]
    pipe = subprocess.PIPE
    writers = [
        subprocess.Popen([*command, str(seed)], stdin=pipe, stdout=pipe, text=True)
        for seed in range(10)
    ]
    yield writers
    for writer in writers:
        writer.kill()
    for writer in writers:
        writer.communicate(timeout=LIMIT_S)


def test_kills_keep_the_bound_and_the_index(
    tmp_path: Path, writers: list["subprocess.Popen[str]"]
) -> None:
    """Four processes, of which one is killed and another takes its place, again and again."""
    root, size = tmp_path / "pool", 400 * FILE
    chance = random.Random(5)
    waiting = [*writers]

    def start() -> "subprocess.Popen[str]":
        child = waiting.pop(0)
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write("\n")
        child.stdin.flush()
        assert child.stdout.readline() == "ready\n"
        return child

    children = [start() for _ in range(4)]
    highest, deadline = 0, time.monotonic() + LIMIT_S
    while highest <= size / 2:
        assert time.monotonic() < deadline, "they do not fill it"
        highest = max(highest, min(disk_bytes(root), disk_bytes(root)))
    while waiting:
        for _ in range(5):
            # A walk that writers overtake counts files that were never there together.
            highest = max(highest, min(disk_bytes(root), disk_bytes(root)))
        victim = children.pop(chance.randrange(4))
        victim.send_signal(signal.SIGKILL)
        victim.wait(LIMIT_S)
        children.append(start())
    for child in children:
        child.kill()
        child.wait(LIMIT_S)
    assert highest <= size * (1 + SOFT_SHARE)
    store = FileStore(str(root), size)
    with store._space.index._reading() as db:
        [(used, chunks)] = db.execute(
            "SELECT used_bytes, (SELECT sum(bytes) FROM chunk) FROM store"
        )
        cells = cells_of(db)
        assert used == chunks == sum(cells.values())
        assert db.execute("SELECT count(*) FROM round").fetchone() == (0,)
        assert db.execute(
            "SELECT count(*) FROM chunk AS c WHERE children != "
            "(SELECT count(*) FROM chunk AS d WHERE d.parent = c.id)"
        ).fetchone() == (0,)
        files = [path for path in (root / FORMAT_DIR / "objects").rglob("*") if path.is_file()]
    assert {path.parent.name + path.name for path in files} == {name.hex() for name in cells}
    assert used == sum(path.stat().st_size for path in files) <= size * (1 + SOFT_SHARE)
    put = store.put([key_of((7,), "", 0)], [make_buffer(CELL)], [ref_of((7,), "")])
    assert put == [PutOutcome.STORED]
    store.close()


def test_a_lost_index_is_made_anew_while_puts_and_gets_go_on(tmp_path: Path) -> None:
    root = tmp_path / "pool"
    prompt = tuple(range(30))
    store = FileStore(str(root), 400 * FILE)
    save(store, prompt, 0, range(1))
    used = store._space.index.used_bytes()
    store.close()
    for name in ("index", "index-wal", "index-shm"):
        (root / FORMAT_DIR / name).unlink(missing_ok=True)
    (root / FORMAT_DIR / "index").write_bytes(b"no database" * 1000)
    store = FileStore(str(root), 400 * FILE)
    keys = [key_of(prompt[:n], "", 0) for n in range(1, 31)]
    buffers = [make_buffer(CELL) for _ in keys]
    assert store.get(keys, buffers) == [GetOutcome.OK] * 30
    assert put_new(store, 0) is PutOutcome.STORED
    assert wait_complete(store, LIMIT_S)
    assert store._space.index.used_bytes() == used + FILE
    small = FileStore(str(root), 40 * FILE)  # parents are known from the files again
    put_new(small, 1)
    assert orphans(small, {prompt[:n] for n in range(1, 31)}, range(1)) == []
    assert small._space.index.used_bytes() <= 40 * FILE
    assert small.exists(keys[:5]) == [True] * 5
    small.close()
    store.close()


def put_new(store: FileStore, number: int) -> PutOutcome:
    prompt = (200 + number,)
    [outcome] = store.put([key_of(prompt, "", 0)], [make_buffer(CELL)], [ref_of(prompt, "")])
    return outcome


def test_an_index_that_is_lost_under_us_is_made_anew(tmp_path: Path) -> None:
    root = tmp_path / "pool"
    store, other = (FileStore(str(root), 400 * FILE) for _ in range(2))
    save(store, (1, 2, 3), 0, range(1))
    for name in ("index", "index-wal", "index-shm"):
        (root / FORMAT_DIR / name).unlink(missing_ok=True)
    assert [put_new(each, n) for n, each in enumerate((store, other))] == [PutOutcome.STORED] * 2
    assert wait_complete(store, LIMIT_S)
    assert store._space.index.used_bytes() == other._space.index.used_bytes() == 8 * FILE
    store.close()
    other.close()


@pytest.mark.parametrize("name", ["v1", "v2", "v3", "data"])
def test_what_lies_beside_the_store_stays(tmp_path: Path, name: str) -> None:
    """Also while the index is rebuilt: the root may be a directory of the user's."""
    root = tmp_path / "pool"
    (root / name / "objects").mkdir(parents=True)
    (root / name / "objects" / "report").write_bytes(b"precious")
    root.chmod(0o700)
    before = snapshot(root / name)
    for _ in range(2):
        store = FileStore(str(root), 100 * FILE)
        assert wait_complete(store, LIMIT_S)
        store.close()
        (root / FORMAT_DIR / "index").unlink()
    assert snapshot(root / name) == before


@pytest.fixture
def unmapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every directory is on a file system that does not keep what is mapped."""
    monkeypatch.setattr(rows_module, "file_system_of", lambda path: FileSystem("", 4096))


def maps(path: Path) -> bool:
    """Return True if this process has a mapping of a file in a directory."""
    return str(path) in Path("/proc/self/maps").read_text()


@pytest.mark.usefixtures("unmapped")
def test_index_on_a_file_system_that_keeps_no_mapped_pages_maps_nothing(tmp_path: Path) -> None:
    """A page of the WAL's index that the disk has no space for would end the engine (SIGBUS)."""
    stores = [FileStore(str(tmp_path / "pool"), 40 * FILE) for _ in range(2)]
    with stores[0]._space.index._reading() as db:
        assert db.execute("PRAGMA journal_mode").fetchone() == ("persist",)
    walked = [("save", tuple(random.Random(n).choices(range(3), k=6)), n % 2) for n in range(20)]
    walk(walked, list(stores), None)
    assert not maps(tmp_path)
    for store in stores:
        store.close()


def test_index_with_mapped_files_is_not_read_where_they_are_not_kept(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """A reader of another host writes into the mapping, too."""
    store = FileStore(str(tmp_path / "pool"), 40 * FILE)
    save(store, (1, 2, 3), 0, range(1))
    assert store.usage()
    request.getfixturevalue("unmapped")
    with pytest.raises(StoreError, match="read it on the host that has the disk"):
        store.usage()
    store.close()


def test_index_with_mapped_files_is_converted_without_mapping_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """The directory was copied, or is also used by the host of its disk.

    While another process has the index open, the store is unavailable: two journal modes at once
    would damage the index.
    """
    root = tmp_path / "pool"
    local = FileIndex(
        str(tmp_path / "index"), POLICIES["lru"], time.time_ns, lambda path: None, lambda cell: True
    )
    root.mkdir(mode=0o700)
    (root / FORMAT_DIR).mkdir(mode=0o700)
    local.close()
    index = root / FORMAT_DIR / "index"
    (tmp_path / "index").rename(index)
    code = f"""
import sqlite3, sys
db = sqlite3.connect({str(index)!r}, isolation_level=None)
assert db.execute("PRAGMA journal_mode = WAL").fetchone() == ("wal",)
db.execute("UPDATE store SET used_bytes = used_bytes")
print("open", flush=True)
sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "open\n"
        request.getfixturevalue("unmapped")
        monkeypatch.setattr(rows_module, "WAIT_S", 0.1)
        with pytest.raises(StoreError, match="in use by an engine that maps it"):
            FileStore(str(root), 40 * FILE)
        child.kill()
    left = b"left by a kill".ljust(32 << 10)
    index.with_name("index-shm").write_bytes(left)  # what would be mapped, and then removed
    store = FileStore(str(root), 40 * FILE)
    save(store, (1, 2, 3), 0, range(1))
    assert store._space.index.used_bytes() == 6 * FILE
    assert index.with_name("index-shm").read_bytes() == left
    store.close()


@pytest.fixture
def transactions(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, list[str]]]:
    """Record each transaction of the index as (caller, rows changed, file calls)."""
    seen: list[tuple[str, int, list[str]]] = []
    under_way: dict[int, list[str]] = {}
    writing = FileIndex._writing

    @contextlib.contextmanager
    def watched(self: FileIndex) -> Iterator[Rows]:
        caller = sys._getframe(2).f_code.co_name
        calls: list[str] = []
        with writing(self) as rows:
            before = rows.db.total_changes
            under_way[threading.get_ident()] = calls
            yield rows
        del under_way[threading.get_ident()]
        seen.append((caller, rows.db.total_changes - before, calls))

    def watch(module: object, name: str) -> None:
        real = getattr(module, name)

        def call(*args: object, **kwargs: object) -> object:
            under_way.get(threading.get_ident(), []).append(name)
            return real(*args, **kwargs)

        monkeypatch.setattr(module, name, call)

    for name in ("access", "link", "listdir", "lstat", "mkdir", "open", "remove", "rename"):
        watch(os, name)
    for name in ("replace", "rmdir", "scandir", "stat", "statvfs", "unlink", "utime"):
        watch(os, name)
    watch(builtins, "open")
    monkeypatch.setattr(FileIndex, "_writing", watched)
    return seen


# Rows that a transaction may change: for each of `MAX_ROWS` cells a chunk and the chunk before it;
# those of chunks that are evicted and forgotten; the sums, a round, a writer and a namespace.
MOST_CHANGES = 4 * MAX_ROWS
TRANSACTIONS = frozenset(
    {
        *(
            "reserve",
            "hold",
            "close_reservation",
            "remove_writer",
            "write_hits",
            "remove_cells",
            "add_found",
        ),
        *("remove_namespace", "left_by", "complete", "_check_after_reboot"),
        *("pin", "expire"),
    }
)


MAY_ASK = frozenset(
    {"close_reservation", "remove_cells", "remove_namespace"}
)  # whether files are gone


def test_a_transaction_touches_no_file_and_changes_a_bounded_number_of_rows(
    tmp_path: Path,
    transactions: list[tuple[str, int, list[str]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    root = tmp_path / "pool"
    store = FileStore(str(root), 2000 * FILE)
    for first in range(5):  # more than one transaction may evict, hold or release
        save(store, tuple(range(first, first + 100)), 0, range(2))
    load(store, tuple(range(100)))
    store._space.index.write_hits()
    store.close()
    for name in ("index", "index-wal", "index-shm"):
        (root / FORMAT_DIR / name).unlink(missing_ok=True)
    store = FileStore(str(root), 100 * FILE)
    assert wait_complete(store, LIMIT_S)
    save(store, (250,), 0, range(2))  # evicts nearly all
    assert store._space.index.used_bytes() <= 100 * FILE
    code = CHILD.replace("while True", "while False") + KILLED_WITH_MUCH_BEGUN
    arguments = [str(root), str(100 * FILE), "0"]
    command = [sys.executable, "-c", code, *arguments]
    subprocess.run(command, check=False, input="\n", text=True, timeout=LIMIT_S)
    store._space._reclaim()
    store.remove([key_of((250,), KINDS[0], 0)])
    for token in range(100):  # more than one transaction expires
        key = key_of((token, token), KINDS[0], 0)
        ref = ChunkRef(chunk_id_of_key(key), retention=Retention(expires_ns=1))
        store.put([key], [make_buffer(1)], [ref])
        store.pin([key], 1 << 62)
        store.pin([key], 0)
    store._space._expire()
    store.remove_namespace(NAMESPACE)
    assert store._space.index.used_bytes() == 0
    monkeypatch.setattr(index_module, "_boot", lambda: "another boot")
    store._space.index._check_after_reboot()
    store.close()
    assert {name for name, _, _ in transactions} == TRANSACTIONS
    touched = {(name, call) for name, _, calls in transactions for call in calls}
    assert touched <= {(name, "lstat") for name in MAY_ASK}
    assert [each for each in transactions if each[1] > MOST_CHANGES] == []


KILLED_WITH_MUCH_BEGUN = """
import os
from vllm_kvpool.storage.base import ChunkRef
from vllm_kvpool.storage.file.rows import MAX_ROWS, new_cell
refs = [ChunkRef(f"{n}") for n in range(MAX_ROWS)]
rows = [new_cell(ref, "m@fmt:0123456789ab", bytes([n]) * 20, 4096) for n, ref in enumerate(refs)]
assert store._space.reserve(rows, [4096] * len(rows)) is not None
os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("damage", ["torn index", "torn cells"])
def test_after_a_power_loss_what_is_damaged_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    root, prompt = tmp_path / "pool", tuple(range(30))
    store = FileStore(str(root), 400 * FILE)
    save(store, prompt, 0, range(1))
    store.close()
    if damage == "torn index":
        index = root / FORMAT_DIR / "index"
        size = index.stat().st_size
        with index.open("r+b") as file:  # what was never written is zeros, but for the first page
            file.seek(4096)
            file.write(bytes(size - 4096))
    else:
        for path in sorted((root / FORMAT_DIR / "objects").rglob("*")):
            if path.is_file() and path.name[0] in "01234567":
                os.truncate(path, 100)
    monkeypatch.setattr(index_module, "_boot", lambda: "another boot")
    store = FileStore(str(root), 400 * FILE)
    keys = [key_of(prompt[:n], "", 0) for n in range(1, 31)]
    found = store.get(keys, [make_buffer(CELL) for _ in keys])  # needs no index
    whole = GetOutcome.OK if damage == "torn index" else GetOutcome.WRONG_SIZE
    assert set(found) <= {GetOutcome.OK, GetOutcome.WRONG_SIZE}
    assert whole in found
    store._space._woken.set()
    assert wait_complete(store, LIMIT_S)
    with store._space.index._reading() as db:
        assert db.execute("PRAGMA quick_check(1)").fetchone() == ("ok",)
    gone = [key for key, outcome in zip(keys, found, strict=True) if outcome is not GetOutcome.OK]
    store.remove(gone)
    save(store, prompt, 0, range(1))
    assert store.get(keys, [make_buffer(CELL) for _ in keys]) == [GetOutcome.OK] * 30
    store.close()


def test_directory_whose_name_is_not_utf8_is_listed_and_checked_after_a_reboot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite takes such paths in a URL's escapes alone; `kvpool doctor` ended in a traceback."""
    root = f"{tmp_path}/pool\udcff"
    store = FileStore(root, 400 * FILE)
    save(store, (1, 2, 3), 0, range(1))
    listed = store.usage()
    assert [each.num_chunks for each in listed] == [3 * len(KINDS)]
    assert wait_complete(store, LIMIT_S)
    store.close()
    monkeypatch.setattr(index_module, "_boot", lambda: "another boot")
    store = FileStore(root, 400 * FILE)
    assert wait_complete(store, LIMIT_S)
    assert store.usage() == listed
    store.close()


def hits(store: FileStore) -> list[tuple[int, int]]:
    """Return (cells read, score in the index) of each chunk, in the order of the prompt."""
    store._space.index.write_hits()
    with store._space.index._reading() as db:
        return db.execute("SELECT hits, score FROM chunk ORDER BY position").fetchall()


def test_cells_that_are_read_are_counted_and_many_of_a_chunk_at_once_are_one_use_of_it(
    tmp_path: Path,
) -> None:
    root = str(tmp_path / "pool")
    counted = {}
    for calls in (1, 2):  # more chunks than one transaction writes
        prompt = tuple(range(2 * MAX_ROWS))
        stores = [FileStore(f"{root}{calls}", 2000 * FILE) for _ in range(2)]
        for store in stores:
            store._space.index._clock_ns = lambda: 1000
        save(stores[0], prompt, 0, range(1))
        for _ in range(calls):
            load(stores[0], prompt)
        counted[calls] = hits(stores[0])[:: len(KINDS)]
        load(stores[1], prompt)  # of another process
        assert {num for num, _ in hits(stores[1])} == {0, calls + 1}
        for store in stores:
            store.close()
    assert {num for num, _ in counted[1]} | {num for num, _ in counted[2]} <= {0, 1, 2}
    assert {score for _, score in counted[1]} == {score for _, score in counted[2]}


def test_hits_of_a_chunk_that_is_written_again_begin_anew(tmp_path: Path) -> None:
    store = FileStore(str(tmp_path / "pool"), 400 * FILE)
    for _ in range(2):
        save(store, (1,), 0, range(1))
        load(store, (1,))
        assert sorted(num for num, _ in hits(store)) == [0, 1]
        store.remove([key_of((1,), kind, 0) for kind in KINDS])
    store.close()
