"""The documents' site: a page loads nothing from another host, so it is whole without a network.

Built by mkdocs, which is in the environment of scripts/setup-tools.sh.
"""

import subprocess
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urlsplit

import pytest

pytestmark = pytest.mark.deploy

ROOT = Path(__file__).parents[2]
SITE = ROOT / "build" / "site"
LIMIT_S = 120.0
LOADED = {"script": "src", "img": "src", "iframe": "src", "link": "href"}
FETCHED_BY_THE_THEME = "mermaid"
"""A class of elements for which the theme's script loads Mermaid from unpkg.com."""


class Loads(HTMLParser):
    """What a browser loads from other hosts to show a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note an element that is loaded from another host."""
        given = dict(attrs)
        target = given.get(LOADED.get(tag, "")) or ""
        if urlsplit(target).netloc:
            self.found.append(target)
        if FETCHED_BY_THE_THEME in (given.get("class") or "").split():
            self.found.append(FETCHED_BY_THE_THEME)


def loads(page: str) -> list[str]:
    parser = Loads()
    parser.feed(page)
    return parser.found


def pages() -> Iterator[Path]:
    subprocess.run(["bash", ROOT / "scripts" / "build-docs.sh"], check=True, timeout=LIMIT_S)
    yield from SITE.rglob("*.html")


def test_no_page_of_the_site_loads_anything_from_another_host() -> None:
    found = {str(page.relative_to(SITE)): loads(page.read_text()) for page in pages()}
    assert len(found) > 20
    assert {page: hosts for page, hosts in found.items() if hosts} == {}


@pytest.mark.parametrize(
    "page",
    [
        '<script src="https://unpkg.com/mermaid"></script>',
        '<link rel="stylesheet" href="//fonts.example/roboto.css">',
        '<pre class="mermaid"><code>flowchart LR</code></pre>',
    ],
)
def test_what_another_host_would_serve_is_found(page: str) -> None:
    assert len(loads(page)) == 1
