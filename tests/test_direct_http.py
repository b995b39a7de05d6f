"""HTTP to engines goes past the proxies of the environment, from whatever part of the package."""

from collections.abc import Callable
from pathlib import Path

import pytest

import vllm_kvpool
from tests.support.http_answers import http_server
from vllm_kvpool.cli.common.engine_metrics import scrape
from vllm_kvpool.cli.common.tokenizer import tokenize
from vllm_kvpool.client import LookupClient

NOWHERE = "http://127.0.0.1:9"


def answer(path: str, body: bytes) -> tuple[int, bytes]:
    return 200, {"/metrics": b"", "/tokenize": b'{"tokens": [1, 2]}', "/healthz": b"{}"}[path]


@pytest.mark.parametrize(
    "ask",
    [
        lambda url: scrape(url),
        lambda url: tokenize("a", url),
        lambda url: LookupClient(url).health(),
    ],
    ids=["metrics", "tokenizer", "lookup"],
)
def test_an_engine_is_asked_although_the_environment_names_a_proxy(
    ask: Callable[[str], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, NOWHERE)
    monkeypatch.delenv("no_proxy", raising=False)
    with http_server(answer) as url:
        ask(url)


def test_nothing_else_opens_urls() -> None:
    package = Path(vllm_kvpool.__file__).parent
    found = [path.name for path in package.rglob("*.py") if "urlopen(" in path.read_text()]
    assert found == []
