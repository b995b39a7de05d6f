"""Two builds of this package with different indexes on one `file://` directory."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import vllm_kvpool
from vllm_kvpool.storage.file.rows import SCHEMA_VERSION
from vllm_kvpool.storage.file.space import FORMAT_DIR

LIMIT_S = 60
CELL = 20_000
FILE = 20 << 10
SIZE = 40 * FILE
REPOSITORY = Path(__file__).parents[2]

CHILD = f"""
import sys
from tests.support.buffers import make_buffer, random_bytes
from tests.support.store_contract import key_of, get_one, put_one
from tests.support.store_hooks import wait_complete
from vllm_kvpool.errors import StoreUnreachable
from vllm_kvpool.storage.file.store import FileStore

def cell(number):
    buffer = make_buffer({CELL})
    buffer.view[:] = random_bytes({CELL}, number)
    return buffer

store = None
for line in sys.stdin:
    what, first, last = line.split()
    numbers = range(int(first), int(last))
    keys = [key_of("upgraded@fmt:0123456789ab", number) for number in numbers]
    try:
        if what == "open":
            store = FileStore(sys.argv[1], {SIZE})
            print(wait_complete(store, {LIMIT_S}), flush=True)
        elif what == "put":
            print(*[put_one(store, key, cell(n)).name for n, key in zip(numbers, keys)], flush=True)
        elif what == "get":
            target = make_buffer({CELL})
            print(sum(get_one(store, key, target).name == "OK" and target.view == cell(n).view
                      for n, key in zip(numbers, keys)), flush=True)
        elif what == "close":
            print(store.close(), flush=True)
    except StoreUnreachable as error:
        print("unreachable:", error, flush=True)
"""


class Build:
    """A process of one build, told one call a line."""

    def __init__(self, package: Path, root: Path) -> None:
        environment = os.environ | {"PYTHONPATH": f"{package}:{REPOSITORY}"}
        self._child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(root)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=package,
        )

    def call(self, what: str, first: int = 0, last: int = 0) -> str:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.write(f"{what} {first} {last}\n")
        self._child.stdin.flush()
        return self._child.stdout.readline().strip()

    def kill(self) -> None:
        self._child.kill()
        self._child.communicate(timeout=LIMIT_S)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "pool"


@pytest.fixture
def start(tmp_path: Path, root: Path) -> Iterator[Callable[[int], Build]]:
    """Start a process of the build whose index has this version."""
    builds: list[Build] = []

    def start(version: int) -> Build:
        package = tmp_path / str(version)
        if not package.exists():
            source = Path(vllm_kvpool.__file__).parent
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, package / "vllm_kvpool", ignore=ignored)
            rows = package / "vllm_kvpool" / "storage" / "file" / "rows.py"
            text = rows.read_text()
            assert f"SCHEMA_VERSION = {SCHEMA_VERSION}\n" in text
            text = text.replace(
                f"SCHEMA_VERSION = {SCHEMA_VERSION}\n", f"SCHEMA_VERSION = {version}\n"
            )
            # A column more, as a version has that differs.
            rows.write_text(
                text.replace("boot TEXT NOT NULL", f"of_{version} TEXT, boot TEXT NOT NULL")
            )
        builds.append(Build(package, root))
        return builds[-1]

    yield start
    for build in builds:
        build.kill()


def set_aside(root: Path) -> list[str]:
    return sorted(path.name for path in (root / FORMAT_DIR).glob("index.aside-*"))


def stored_bytes(root: Path) -> int:
    objects = root / FORMAT_DIR / "objects"
    return sum(path.stat().st_size for path in objects.rglob("*") if path.is_file())


def test_builds_with_other_indexes_in_turns_read_each_others_cells(
    root: Path, start: Callable[[int], Build]
) -> None:
    for turn, version in enumerate((SCHEMA_VERSION, SCHEMA_VERSION + 1, SCHEMA_VERSION)):
        build = start(version)
        assert build.call("open") == "True"
        assert build.call("get", 0, 10 * turn) == str(10 * turn)
        assert set(build.call("put", 10 * turn, 10 * turn + 10).split()) == {"STORED"}
        assert build.call("close") == "None"
        assert len(set_aside(root)) == turn
    assert build.call("open") == "True"
    assert set(build.call("put", 100, 160).split()) == {"STORED"}
    assert stored_bytes(root) <= SIZE


@pytest.mark.parametrize("step", [1, -1])
def test_build_with_another_index_waits_until_the_index_is_out_of_use(
    root: Path, start: Callable[[int], Build], step: int
) -> None:
    """Newer beside older and older beside newer: each would rename the other's index for ever."""
    first, second = start(SCHEMA_VERSION), start(SCHEMA_VERSION + step)
    assert first.call("open") == "True"
    assert set(first.call("put", 0, 10).split()) == {"STORED"}
    for number in range(10, 13):
        refusal = second.call("open")
        assert refusal.startswith("unreachable:")
        assert (
            f"it has version {SCHEMA_VERSION}, this release has {SCHEMA_VERSION + step}" in refusal
        )
        assert first.call("put", number, number + 1) == "STORED"
    assert first.call("get", 0, 13) == "13"
    assert set_aside(root) == []
    assert first.call("close") == "None"
    assert second.call("open") == "True"
    assert second.call("get", 0, 13) == "13"
    assert first.call("open").startswith("unreachable:")
    assert second.call("put", 100, 101) == "STORED"
    assert set_aside(root) == ["index.aside-0"]


def test_build_with_another_index_replaces_the_index_of_a_killed_engine(
    root: Path, start: Callable[[int], Build]
) -> None:
    first, second = start(SCHEMA_VERSION), start(SCHEMA_VERSION + 1)
    assert first.call("open") == "True"
    assert set(first.call("put", 0, 10).split()) == {"STORED"}
    first.kill()
    assert second.call("open") == "True"
    assert second.call("get", 0, 10) == "10"
