"""The documents as a site (`make docs`): what it names and what documents link to is there.

mkdocs itself, which also checks anchors, is in an environment that CI alone makes.
"""

import re
from pathlib import Path

import pytest

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
