"""Every call of the package that may remove or change a file, and why the file is its own.

A file is the package's own in one of three cases:

- This process made it, under a new name.
- It lies below the store's `FORMAT_DIR`, has a name that the store gives, and belongs to the user.
- The operator named it, and its content is of a kind that only the package writes.

Everything else beside it stays.
"""

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import vllm_kvpool
from tests.security.planted import CELL, MIB, NAMESPACE, fill, path_of, snapshot
from tests.support.buffers import make_buffer
from tests.support.store_contract import key_of
from tests.support.store_hooks import wait_complete
from vllm_kvpool.embeds.dataplane import shared_memory
from vllm_kvpool.router.config import AdminConfig, RouterConfig
from vllm_kvpool.router.run import admin_token
from vllm_kvpool.staging import arena
from vllm_kvpool.storage.base import ChunkRef, Retention
from vllm_kvpool.storage.file.paths import SET_ASIDE
from vllm_kvpool.storage.file.space import FORMAT_DIR
from vllm_kvpool.storage.file.store import FileStore

PACKAGE = Path(vllm_kvpool.__file__).parent
LIMIT_S = 20.0

# Reasons why a file is the package's own, or the fate of its content otherwise.
NEW = "this process made it, under a name that nothing had"
PLACE = "it has a name that the store gives, in the store's directory, and is this user's"
KEPT = "it is renamed to a name that nothing has, or nothing but an earlier file of this kind"
UNCHANGED = "it is opened and not changed: a lock, or an index that SQLite has checked"
CONTENT = "what is there was written by the package, or no byte is there"

# Tests that plant foreign files at the place.
STORE = "security/test_removals.py::test_what_others_put_anywhere_in_a_store_stays"
LINKS = "security/test_planted.py::test_a_symbolic_link_anywhere_leads_nowhere"
ASIDE = "security/test_index_damage.py::test_only_own_files_make_room_for_what_is_set_aside"
NAMED = "storage/test_files.py::test_of_two_writers_of_one_key_the_first_to_finish_wins"
USERS = (
    "security/test_other_users.py::test_what_another_user_puts_in_the_place_of_a_part_is_not_read"
)
HARD = "security/test_planted.py::test_a_file_with_a_second_name_is_not_written_over"
LOCKS = "security/test_planted.py::test_a_lock_or_index_that_is_another_name_of_a_file_outside"
STATS = "test_metrics.py::test_a_file_that_is_not_of_counters_stays"
TRACE = "transfer/test_trace.py::test_a_file_that_is_no_trace_stays"
TOKEN = "security/test_removals.py::test_a_token_file_that_is_there_is_read_only"
BESIDE = "security/test_removals.py::test_what_lies_where_new_files_are_made_stays"
SHM = "security/test_removals.py::test_what_others_put_into_shared_memory_stays"

TRY = "cli/test_try_model.py::test_try_with_a_store_leaves_its_directory_as_it_is"

TABLE: dict[str, tuple[str, str]] = {
    "cli/try_model.py _start .open for writing": (NEW, TRY),
    "embeds/dataplane/shared_memory.py SharedLandingWindow.__init__ os.posix_fallocate": (NEW, SHM),
    "embeds/dataplane/shared_memory.py SharedLandingWindow.close .unlink": (NEW, SHM),
    "embeds/dataplane/shared_memory.py _create_locked os.open O_RDWR": (NEW, SHM),
    "embeds/dataplane/shared_memory.py _opened os.open O_RDWR": (UNCHANGED, SHM),
    "embeds/dataplane/shared_memory.py _removed .unlink": (PLACE, SHM),
    "private_files.py create_secret open for writing": (NEW, TOKEN),
    "private_files.py create_secret os.open _CREATE": (NEW, TOKEN),
    "private_files.py open_to_write open for writing": (CONTENT, TRACE),
    "private_files.py open_to_write os.ftruncate": (CONTENT, TRACE),
    "private_files.py open_to_write os.open _CREATE": (UNCHANGED, TRACE),
    "private_files.py replace_file .replace": (CONTENT, STATS),
    "private_files.py replace_file .unlink": (NEW, STATS),
    "private_files.py replace_file open for writing": (NEW, STATS),
    "private_files.py replace_file os.open _CREATE": (NEW, STATS),
    "staging/arena.py _mapped_file os.ftruncate": (NEW, BESIDE),  # memory without a name
    "storage/file/index.py FileIndex._connected sqlite3.connect": (UNCHANGED, STORE),
    "storage/file/io.py probe os.open O_RDWR": (NEW, STORE),
    "storage/file/io.py probe os.unlink": (NEW, STORE),
    "storage/file/paths.py create_file os.fchmod": (NEW, STORE),
    "storage/file/paths.py create_file os.open _CREATE": (NEW, STORE),
    "storage/file/paths.py make_directory os.chmod": (NEW, STORE),
    "storage/file/paths.py open_lock os.open _CREATE": (UNCHANGED, LOCKS),
    "storage/file/paths.py open_to_overwrite os.open O_WRONLY": (PLACE, HARD),
    "storage/file/paths.py rename_new _renameat2": (NEW, NAMED),
    "storage/file/paths.py set_aside os.rename": (KEPT, ASIDE),
    "storage/file/paths.py take_away_foreign os.rmdir": (PLACE, LINKS),
    "storage/file/paths.py take_away_foreign os.unlink": (PLACE, LINKS),
    "storage/file/rows.py _read_only sqlite3.connect": (UNCHANGED, STORE),
    "storage/file/space.py FileSpace._name os.rename": (NEW, NAMED),
    "storage/file/space.py FileSpace._name rename_new": (NEW, NAMED),
    "storage/file/space.py FileSpace.delete os.rename": (PLACE, USERS),
    "storage/file/space.py FileSpace.delete os.unlink": (PLACE, USERS),
    "storage/file/space.py FileSpace.discard os.unlink": (NEW, STORE),
    "storage/file/space.py RecycledFiles.trim os.unlink": (NEW, STORE),
    "storage/file/space.py WriterDirectory.__init__ os.rename": (NEW, STORE),
    "storage/file/space.py _delete_temps os.unlink": (PLACE, STORE),
    "storage/file/space.py _remove_writer os.rmdir": (PLACE, STORE),
    "storage/file/space.py _remove_writer os.unlink": (PLACE, STORE),
    "storage/file/store.py FileStore.remove_namespace os.rmdir": (PLACE, STORE),
}
NO_FILES = {  # methods of the package's own objects; the null device
    "cli/common/command.py hide_native_logs os.open O_WRONLY",
    "router/ops/tenants.py Tenants.__init__ .replace",
    "router/ops/tenants.py Tenants.reload .replace",
    "vllm_adapt/engine_config.py PoolPins.pin .touch",
}

METHODS = {"unlink", "rmdir", "rename", "rmtree", "truncate", "touch", "write_text", "write_bytes"}
MODULES = {
    "os": {"unlink", "remove", "rmdir", "removedirs", "rename", "renames", "replace", "truncate"}
    | {"ftruncate", "posix_fallocate", "chmod", "fchmod", "chown", "utime", "link", "symlink"},
    "shutil": {"rmtree", "move", "copy", "copy2", "copyfile", "copytree", "chown"},
    "sqlite3": {"connect"},
}
FUNCTIONS = {"rename_new", "_renameat2"}
FLAGS = {"O_WRONLY", "O_RDWR", "O_CREAT", "O_TRUNC", "O_APPEND", "_CREATE"}


def call_of(node: ast.Call) -> str:
    """Return what a call does to a file, "" if it changes none."""
    function = node.func
    if isinstance(function, ast.Name):
        if function.id in FUNCTIONS:
            return function.id
        if function.id == "open" and any(writes(each) for each in arguments_of(node)):
            return "open for writing"
    if not isinstance(function, ast.Attribute):
        return ""
    module = function.value.id if isinstance(function.value, ast.Name) else ""
    if module in MODULES:
        if (module, function.attr) == ("os", "open"):
            flags = {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}
            flags |= {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
            found = sorted(flags & FLAGS)
            return f"os.open {found[-1]}" if found else ""
        return f"{module}.{function.attr}" if function.attr in MODULES[module] else ""
    if function.attr in METHODS:
        return f".{function.attr}"
    if function.attr == "replace" and len(node.args) == 1 and not node.keywords:
        return ".replace"  # of a path: that of a string has two arguments
    if function.attr == "open" and any(writes(each) for each in arguments_of(node)):
        return ".open for writing"
    return ""


def arguments_of(node: ast.Call) -> list[ast.expr]:
    return [*node.args, *(each.value for each in node.keywords)]


def writes(mode: ast.expr) -> bool:
    """Return True if an argument is a mode of `open` that writes."""
    text = mode.value if isinstance(mode, ast.Constant) else None
    is_mode = isinstance(text, str) and 0 < len(text) <= 3 and set(text) <= set("rwxabt+")
    return is_mode and not set(str(text)).isdisjoint("wxa+")


SHELL = re.compile(r"^\s*(rm|mv|cp|rmdir|truncate) |>\"?\$", re.MULTILINE)


def calls() -> Iterator[str]:
    """Yield each such call (module, function, effect), and each module with a shell command."""
    for path in sorted(PACKAGE.rglob("*.py")):
        module = str(path.relative_to(PACKAGE))
        tree = ast.parse(path.read_text())
        yield from calls_in(tree, module, "")
        texts = [each.value for each in ast.walk(tree) if isinstance(each, ast.Constant)]
        if any(isinstance(text, str) and SHELL.search(text) for text in texts):
            yield f"{module} shell"


def calls_in(node: ast.AST, module: str, name: str) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        inner = name
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = f"{name}.{child.name}".lstrip(".")
        elif isinstance(child, ast.Call) and (what := call_of(child)):
            yield f"{module} {name} {what}"
        yield from calls_in(child, module, inner)


def test_every_call_that_may_take_away_a_file_is_in_the_table() -> None:
    found = set(calls()) - NO_FILES
    assert sorted(found - TABLE.keys()) == []
    assert sorted(TABLE.keys() - found) == []


def test_every_test_of_the_table_is_there() -> None:
    tests = Path(__file__).parents[1]
    for _, test in TABLE.values():
        path, _, name = test.partition("::")
        assert f"def {name}(" in (tests / path).read_text(), test


# A store that lives its whole life beside foreign files.

SHARD = path_of(Path("/"), key_of(NAMESPACE, 0)).parent.relative_to("/")
DEAD = f"{FORMAT_DIR}/writers/{'d' * 16}"
NAMES = ("precious", "lock", "index", "7", "c" * 38, "c" * 16, "v3", "CACHEDIR.TAG")
BELOW: dict[str, tuple[str, ...]] = {  # directories, and names that are the store's there
    "": (),
    FORMAT_DIR: ("index",),
    f"{FORMAT_DIR}/objects": (),
    f"{FORMAT_DIR}/objects/data": (),
    f"{FORMAT_DIR}/objects/data/ab": (),
    f"{FORMAT_DIR}/objects/.git/objects/ab": (),
    f"{FORMAT_DIR}/objects/{NAMESPACE}": (),
    f"{FORMAT_DIR}/objects/{NAMESPACE}/data": (),
    f"{FORMAT_DIR}/objects/{NAMESPACE}/AB": (),
    str(SHARD): ("c" * 38,),
    f"{FORMAT_DIR}/writers": ("c" * 16,),
    f"{FORMAT_DIR}/writers/data": (),
    DEAD: ("lock", "7"),
}


def plant(root: Path) -> list[Path]:
    """Plant foreign files and directories under every kind of name that is not the store's."""
    planted = []
    for place, taken in BELOW.items():
        for name in NAMES:
            if name in taken:
                continue
            path = root / place / name
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            if not path.exists():
                path.write_bytes(b"precious")
            (root / place / f"{name}.d").mkdir(exist_ok=True)
            (root / place / f"{name}.d" / "file").write_bytes(b"precious")
            planted += [path, root / place / f"{name}.d" / "file"]
    (root / FORMAT_DIR / "writers" / "alone").mkdir()
    (root / FORMAT_DIR / "writers" / "alone" / "lock").write_bytes(b"precious")
    planted.append(root / FORMAT_DIR / "writers" / "alone" / "lock")
    for lock in ("rebuild.lock", "name.lock"):
        (root / FORMAT_DIR / lock).write_bytes(b"precious")
        planted.append(root / FORMAT_DIR / lock)
    return planted


def live(root: Path, clock: list[int]) -> None:
    """Delete and rename in every way: eviction, expiry, a killed writer, a damaged index."""
    store = FileStore(str(root), MIB, clock_ns=lambda: clock[0])
    fill(store, 60)
    keys = [key_of(NAMESPACE, number) for number in range(100, 104)]
    refs = [ChunkRef(key, retention=Retention(0, clock[0] + 10**9)) for key in keys]
    store.put(keys, [make_buffer(CELL)] * 4, refs)
    clock[0] += 10**10
    store._space._expire()
    store._space._reclaim()
    store.remove([key_of(NAMESPACE, number) for number in range(30)])
    store.remove_namespace(NAMESPACE)
    fill(store, 8)
    store.close()


def test_what_others_put_anywhere_in_a_store_stays(tmp_path: Path) -> None:
    root, clock = tmp_path / "pool", [10**18]
    FileStore(str(root), MIB).close()
    planted = plant(root)
    (root / DEAD / "7").write_bytes(b"of a killed writer")
    assert len(planted) > 150
    for number in range(SET_ASIDE + 2):
        live(root, clock)
        (root / FORMAT_DIR / "index").write_bytes(b"%d" % number * 9000)
    again = FileStore(str(root), MIB)
    assert wait_complete(again, LIMIT_S)
    again.close()
    assert [str(path) for path in planted if not path.exists()] == []
    assert {path.read_bytes() for path in planted} == {b"precious"}
    assert not (root / DEAD / "7").exists()


def test_what_lies_where_new_files_are_made_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A `memfd` has no name in a directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kvpool-arena").write_bytes(b"precious")
    before = snapshot(tmp_path)
    _, descriptor = arena._mapped_file(1 << 20, 0)
    os.close(descriptor)
    assert snapshot(tmp_path) == before


def test_a_token_file_that_is_there_is_read_only(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_bytes(b"precious")
    path.chmod(0o600)
    config = RouterConfig(admin=AdminConfig(token_file=str(path)))
    assert admin_token(config) == "precious"
    assert path.read_bytes() == b"precious"


def test_what_others_put_into_shared_memory_stays(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A leftover has a window's name, belongs to this user, and its owner holds no lock."""
    monkeypatch.setattr(shared_memory, "DIRECTORY", tmp_path)
    names = ("precious", "kvpool-ec-", "kvpool-ec-1-precious", f"kvpool-ec-x-{'a' * 32}")
    for name in names:
        (tmp_path / name).write_bytes(b"precious")
    dead = tmp_path / f"kvpool-ec-1-{'a' * 32}"
    dead.touch()
    window = shared_memory.SharedLandingWindow(4096)
    window.close()
    assert {path.name for path in tmp_path.iterdir()} == set(names)
    assert {path.read_bytes() for path in tmp_path.iterdir()} == {b"precious"}
