"""The documents' site: a page loads nothing from another host, so it is whole without a network.

Built by mkdocs, which is in the environment of scripts/setup-tools.sh.
"""

import re
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urlsplit

import pytest

pytestmark = pytest.mark.deploy

ROOT = Path(__file__).parents[2]
SITE = ROOT / "build" / "site"
LIMIT_S = 120.0
LOADED = {"script": "src", "img": "src", "iframe": "src", "link": "href"}
NAMED_ALONE = {"canonical"}
"""`rel` of a link that a browser does not load."""
FETCHED_BY_STYLE = re.compile(r"""@import|url\(\s*["']?(?:https?:)?//""", re.IGNORECASE)
FETCHED_BY_THE_THEME = "mermaid"
"""A class of elements for which the theme's script loads Mermaid from unpkg.com."""


class Loads(HTMLParser):
    """What a browser loads from other hosts to show a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._is_style = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note an element that is loaded from another host."""
        given = dict(attrs)
        self._is_style = tag == "style"
        target = given.get(LOADED.get(tag, "")) or ""
        if urlsplit(target).netloc and given.get("rel") not in NAMED_ALONE:
            self.found.append(target)
        self.found += FETCHED_BY_STYLE.findall(given.get("style") or "")
        if FETCHED_BY_THE_THEME in (given.get("class") or "").split():
            self.found.append(FETCHED_BY_THE_THEME)

    def handle_endtag(self, tag: str) -> None:
        """End a style."""
        self._is_style = False

    def handle_data(self, data: str) -> None:
        """Note what a style in the page loads from another host."""
        if self._is_style:
            self.found += FETCHED_BY_STYLE.findall(data)


def loads(page: str) -> list[str]:
    parser = Loads()
    parser.feed(page)
    return parser.found


@pytest.fixture(scope="module")
def site() -> Path:
    subprocess.run(["bash", ROOT / "scripts" / "build-docs.sh"], check=True, timeout=LIMIT_S)
    return SITE


def test_no_page_of_the_site_loads_anything_from_another_host(site: Path) -> None:
    found = {str(page.relative_to(site)): loads(page.read_text()) for page in site.rglob("*.html")}
    assert len(found) > 20
    assert {page: hosts for page, hosts in found.items() if hosts} == {}


def test_no_style_of_the_site_loads_anything_from_another_host(site: Path) -> None:
    styles = list(site.rglob("*.css"))
    assert len(styles) > 2
    found = {
        str(path.relative_to(site)): FETCHED_BY_STYLE.findall(path.read_text()) for path in styles
    }
    assert {path: hosts for path, hosts in found.items() if hosts} == {}


@pytest.mark.parametrize(
    "page",
    [
        '<script src="https://unpkg.com/mermaid"></script>',
        '<link rel="stylesheet" href="//fonts.example/roboto.css">',
        '<pre class="mermaid"><code>flowchart LR</code></pre>',
        '<style>@import "https://fonts.example/roboto.css";</style>',
        "<style>body { background: url(//images.example/sky.png) }</style>",
        """<p style="background: url('https://images.example/sky.png')">Sky</p>""",
    ],
)
def test_what_another_host_would_serve_is_found(page: str) -> None:
    assert len(loads(page)) == 1


@pytest.mark.parametrize(
    "page",
    [
        '<link rel="canonical" href="https://kvpool.example/README.html">',
        '<a href="https://github.com">code</a>',
        "<style>body { background: url(sky.png) }</style>",
    ],
)
def test_what_no_other_host_serves_is_not_found(page: str) -> None:
    assert not loads(page)
