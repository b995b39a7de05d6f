"""A `file://` store after a power loss that has lost and reordered its writes."""

import contextlib
import random
import sqlite3
from collections import defaultdict
from pathlib import Path

import pytest
import xxhash

from tests.support.buffers import make_buffer, random_bytes
from tests.support.power_loss import PowerLoss
from tests.support.seeds import seeds
from tests.support.store_contract import get_one, key_of
from vllm_kvpool.identity.keys import chunk_id_of_key, key_digest
from vllm_kvpool.storage.base import Buffer, ChunkRef, GetOutcome, PutOutcome
from vllm_kvpool.storage.contents.cell_format import HEADER_BYTES, verify, write_header
from vllm_kvpool.storage.eviction import Shares
from vllm_kvpool.storage.file import index as index_module
from vllm_kvpool.storage.file.space import FORMAT_DIR, FileSpace
from vllm_kvpool.storage.file.store import FileStore

NAMESPACE = "lost@fmt:0123456789ab"
CELL = 20_000
FILE = 20 << 10
SIZE = 40 * FILE
ALL = range(120)
KEYS = [key_of(NAMESPACE, number) for number in ALL]


def xxh3(cell: Buffer) -> int:
    return xxhash.xxh3_64_intdigest(cell.view)


def sealed(number: int, version: int) -> Buffer:
    """A cell with its checksum. Two versions of a key differ, as an engine computes it twice."""
    buffer = make_buffer(CELL)
    buffer.view[HEADER_BYTES:] = random_bytes(CELL - HEADER_BYTES, 1000 * version + number)
    write_header(buffer.view, key_digest(KEYS[number]))
    return buffer


def chunk_of(number: int) -> ChunkRef:
    """Prompts of ten chunks each."""
    parent = chunk_id_of_key(KEYS[number - 1]) if number % 10 else ""
    return ChunkRef(chunk_id_of_key(KEYS[number]), parent, number % 10)


class Bench:
    """A store, and all that was ever put under each key."""

    def __init__(self, root: Path, shares: Shares = Shares.NONE) -> None:
        self.root, self._shares = root, shares
        self.store = FileStore(str(root), SIZE, "threads", shares=shares)
        self.written = defaultdict[int, set[int]](set)  # checksums by number
        self._version = 0

    def put(self, numbers: range) -> list[PutOutcome]:
        self._version += 1
        cells = [sealed(number, self._version) for number in numbers]
        for number, cell in zip(numbers, cells, strict=True):
            self.written[number].add(xxh3(cell))
        chunks = [chunk_of(number) for number in numbers]
        return self.store.put([KEYS[number] for number in numbers], cells, chunks)

    def reopen(self, root: Path) -> None:
        self.store.close()
        self.root = root
        self.store = FileStore(str(root), SIZE, "threads", shares=self._shares)

    def read(self, numbers: range) -> int:
        """Get cells, verify them, remove bad ones, as a lane does; return how many are right."""
        count, buffer = 0, make_buffer(CELL)
        for number in numbers:
            outcome = get_one(self.store, KEYS[number], buffer)
            is_right = outcome is GetOutcome.OK and not verify(
                buffer.view, key_digest(KEYS[number]), checksum=True
            )
            assert not is_right or xxh3(buffer) in self.written[number], number
            if outcome is not GetOutcome.MISSING and not is_right:
                self.store.remove([KEYS[number]])
            count += is_right
        return count

    def stored_bytes(self) -> int:
        objects = self.root / FORMAT_DIR / "objects" / NAMESPACE
        return sum(path.stat().st_size for path in objects.rglob("*") if path.is_file())

    def step(self, chance: random.Random) -> None:
        what, at = chance.choice(("put", "put", "put", "read", "remove", "reopen")), chance.random()
        numbers = range(10 * int(at * 12), 10 * int(at * 12) + chance.randint(1, 10))
        match what:
            case "put":
                self.put(numbers)
            case "read":
                self.read(numbers)
            case "remove":
                self.store.remove([KEYS[number] for number in numbers])
            case "reopen":
                self.reopen(self.root)


@pytest.mark.parametrize("seed", seeds(20, 2000))
def test_power_loss_leaves_cells_whole_or_missing_and_a_store_that_keeps_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(FileSpace, "_maintain", lambda space: None)
    chance = random.Random(seed)
    bench = Bench(tmp_path / "pool")
    foreign = [Path("of somebody else"), Path(FORMAT_DIR, "objects", "notes", "ab", "12")]
    for path in foreign:
        (bench.root / path).parent.mkdir(parents=True, exist_ok=True)
        (bench.root / path).write_bytes(b"keep")
    loss = PowerLoss(bench.root)
    for _ in range(chance.randint(1, 30)):
        bench.step(chance)
        loss.record()
    loss.leave(tmp_path / "left", chance)
    monkeypatch.setattr(index_module, "_boot", lambda: "the boot after")
    bench.reopen(tmp_path / "left")
    bench.read(ALL)
    bench.store._space._look()  # adds all files to the index
    for number in ALL:
        [outcome] = bench.put(range(number, number + 1))
        assert outcome in (PutOutcome.STORED, PutOutcome.EXISTED), number
        assert bench.read(range(number, number + 1)) == 1, number
        if outcome is PutOutcome.STORED:  # names of removed files may have come back until then
            assert bench.stored_bytes() <= bench.store._space.index.used_bytes() <= SIZE
    for path in foreign:
        assert (bench.root / path).read_bytes() == b"keep"
    bench.store.close()


@pytest.mark.parametrize(
    "lost",
    [
        "UPDATE store SET used_bytes = 0",
        "UPDATE owner SET bytes = 0",
        "DELETE FROM owner",
        "DELETE FROM namespace",
        "UPDATE chunk SET children = 2 - 2 * position WHERE position < 2",
        "UPDATE chunk SET parent = 99, children = position WHERE position < 2",
        "UPDATE chunk SET holders = 1",
        "UPDATE chunk SET holders = -1, bytes = 0, cells = x''; UPDATE store SET used_bytes = 0; "
        "UPDATE owner SET bytes = 0",
        "INSERT INTO writer VALUES ('0123456789abcdef', 4096)",
        "UPDATE store SET incomplete_since = 1, used_bytes = 0",  # while it was rebuilt
    ],
)
def test_index_that_a_power_loss_has_left_in_parts_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    """Every row can be read, and rows do not agree."""
    monkeypatch.setattr(FileSpace, "_maintain", lambda space: None)
    bench = Bench(tmp_path / "pool", Shares.NAMESPACE)
    bench.put(range(10))
    with contextlib.closing(sqlite3.connect(bench.root / FORMAT_DIR / "index")) as db:
        db.executescript(lost)
    monkeypatch.setattr(index_module, "_boot", lambda: "the boot after")
    bench.reopen(bench.root)
    assert (bench.root / FORMAT_DIR / "index.aside-0").exists()
    bench.store._space._look()
    assert bench.stored_bytes() == bench.store._space.index.used_bytes()
    bench.store.close()
