"""The documents as a site (`make docs`): what they link to and the commands they name are there.

mkdocs itself, which also checks anchors, is in an environment that CI alone makes.
"""

import re
from pathlib import Path

import pytest

from tests.support.commands import all_commands
from vllm_kvpool.cli import main

ROOT = Path(__file__).parent.parent
# The demo's document is what the model reads.
LEFT_OUT = {"examples/demo_guide.md"}
PAGES = set(re.findall(r"^ *- (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))


def documents() -> set[str]:
    folders = ("benchmarks", "configs", "docs", "examples")
    found = [
        *ROOT.glob("*.md"),
        *(each for name in folders for each in (ROOT / name).rglob("*.md")),
    ]
    return {str(path.relative_to(ROOT)) for path in found} - LEFT_OUT


def test_the_site_has_every_document() -> None:
    assert documents() == PAGES


@pytest.mark.parametrize("path", sorted(PAGES))
def test_every_link_leads_to_a_file(path: str) -> None:
    """A file, not a folder: a site has no page for one."""
    text = re.sub(r"^```.*?^```", "", (ROOT / path).read_text(), flags=re.MULTILINE | re.DOTALL)
    targets = re.findall(r"\]\((?!https?:|#)([^)\s#]+)[^)]*\)", text)
    missing = [each for each in targets if not (ROOT / path).parent.joinpath(each).is_file()]
    assert missing == []


@pytest.mark.parametrize(
    "path", ["ARCHITECTURE.md", "SECURITY.md", "docs/decisions.md", "docs/failures.md"]
)
def test_every_file_of_ours_that_a_document_names_is_there(path: str) -> None:
    ours = [
        str(each.relative_to(ROOT))
        for folder in ("vllm_kvpool", "tests", "benchmarks", "examples", "configs", "scripts")
        for each in (ROOT / folder).rglob("*.*")
    ]
    named = re.findall(r"`([\w./-]+\.(?:py|sh|yaml))\b[^`]*`", (ROOT / path).read_text())
    assert named
    missing = {name for name in named if not any(f"/{each}".endswith(f"/{name}") for each in ours)}
    assert not missing


VALUE = r"\**[-+]?\d[\d,.]*(?: ?(?:%|x|ms|µs|us|s|s/GB|[KMGT]i?B(?:/s)?|keys|tokens))?\**"
VALUES = re.compile(rf"{VALUE}(?:(?:,|;| ?/| and| or) {VALUE})+")
TIME_OR_RATE = r"\d (?:ms|µs|us|s|s/GB|GB/s|MB/s)\b"
TIMES = re.compile(rf"{TIME_OR_RATE}.*[,;/(].*{TIME_OR_RATE}")


def holds_several_values(cell: str, *, is_first: bool = False) -> bool:
    """Return True for a list of numbers, and for several times or rates outside a sentence.

    A range is one value. A row's first cell may name sizes.
    """
    is_sentence = ". " in cell
    return bool(VALUES.fullmatch(cell) or (TIMES.search(cell) and not is_first | is_sentence))


@pytest.mark.parametrize("path", sorted(PAGES - {"CHANGELOG.md"}))
def test_a_tables_cell_has_one_value(path: str) -> None:
    text = re.sub(r"^ *```.*?^ *```", "", (ROOT / path).read_text(), flags=re.MULTILINE | re.DOTALL)
    found = []
    for line in re.findall(r"^ *\|.*\|$", text, re.MULTILINE):
        for place, cell in enumerate(re.split(r"(?<!\\)\|", line.strip())[1:-1]):
            if holds_several_values(cell.strip(), is_first=not place):
                found.append(cell)
    assert found == []


@pytest.mark.parametrize(
    ("cell", "expected"),
    [
        ("1.59, 6.26 s; 10; 2.61", True),
        ("**0.74**, **0.79**; 1.1", True),
        ("0.02 / 0.3 ms", True),
        ("no pool 1,396 ms, host memory alone 1,342 ms", True),
        ("1,396 ms", False),
        ("0.2 to 1.4 ms", False),
        ("tiers of 96 MiB, 256 MiB and 1 GiB", False),
        ("It waits for 70 s. Then (after 5 s more) it ends.", False),
    ],
)
def test_several_values_in_a_cell_are_found(cell: str, expected: bool) -> None:
    assert holds_several_values(cell) is expected


def commands(program: str) -> list[tuple[str, list[str]]]:
    """Each command of `program` in a document's code, with the document's name."""
    found = []
    for page in sorted(PAGES - {"CHANGELOG.md"}):  # which also names what is gone
        text = (ROOT / page).read_text()
        code = re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        code += re.findall(r"(?<!`)`([^`\n]+)`(?!`)", text)
        lines = "\n".join(code).replace("\\\n", " ").splitlines()
        for line in lines:
            said = line.split(" #")[0].split()
            if said[:1] == [program] and len(said) > 1:
                found.append((page, said[1:]))
    return found


def test_every_command_in_a_document_has_the_options_that_it_is_given() -> None:
    unknown = []
    found = commands("kvpool")
    for page, (name, *rest) in found:
        command = main if name.startswith("-") else all_commands().get(name)
        options = {option for each in getattr(command, "params", ()) for option in each.opts}
        own = [name, *rest]
        own = own[: own.index("--")] if "--" in own else own  # an engine's options follow
        used = {word.partition("=")[0] for word in own if word.startswith("--")}
        if command is None or not used <= options | {"--help", "--version"}:
            unknown.append((page, name, *rest))
    assert len(found) > 20
    assert unknown == []


def test_every_target_that_a_document_names_is_in_the_makefile() -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    found = commands("make")
    assert len(found) > 10
    assert {said[0] for _, said in found} <= set(targets)
