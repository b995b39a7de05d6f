"""ARCHITECTURE.md names what is there; it and modules' docstrings stay short enough to be read."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "vllm_kvpool"
TEXT = (ROOT / "ARCHITECTURE.md").read_text()
MAX_WORDS = 5_000
MAX_DOCSTRING_LINES = 10
OUTSIDE = ("tests/", "docs/")


def files(name: str) -> list[Path]:
    """The files whose path ends so: of the package, unless it names another folder."""
    if name.startswith(OUTSIDE):
        return [path for path in [ROOT / name] if path.is_file()]
    return [path for path in PACKAGE.rglob("*.py") if f"/{path}".endswith(f"/{name}")]


def looked_up() -> Iterator[tuple[str, str]]:
    """File and name of each "`file.py: name`", and of further names behind it: ", `other`"."""
    for file, first, others in re.findall(r"`([\w/]+\.py): ([\w.]+)`((?:, `\w+`)*)", TEXT):
        for name in [*first.split("."), *re.findall(r"\w+", others)]:
            yield file, name


def defines(path: Path, name: str) -> bool:
    pattern = rf"(def|class) {name}\b|^ *(self\.)?{name}\b[^=\n]*[=:]"
    return re.search(pattern, path.read_text(), re.MULTILINE) is not None


def test_it_is_short_enough_to_be_read() -> None:
    assert len(TEXT.split()) <= MAX_WORDS


def test_files_that_it_names_are_there() -> None:
    names = set(re.findall(r"`([\w/]+\.py)\b", TEXT))
    assert len(names) > 50
    assert [name for name in sorted(names) if not files(name)] == []


def test_names_that_it_looks_up_are_defined_in_their_files() -> None:
    found = set(looked_up())
    assert len(found) > 30
    missing = [(f, n) for f, n in sorted(found) if not any(defines(p, n) for p in files(f))]
    assert missing == []


def test_docstrings_of_modules_are_short_enough_to_be_read() -> None:
    trees = {path: ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}
    lengths = {
        path: len((ast.get_docstring(each) or "").splitlines()) for path, each in trees.items()
    }
    assert [str(path) for path, each in lengths.items() if each > MAX_DOCSTRING_LINES] == []
