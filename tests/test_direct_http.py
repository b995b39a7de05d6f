"""HTTP to engines goes past the proxies of the environment, from whatever part of the package."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.client import IncompleteRead
from pathlib import Path

import pytest

import vllm_kvpool
from tests.support.http_answers import http_server
from vllm_kvpool import direct_http
from vllm_kvpool.cli.common.engine_metrics import scrape
from vllm_kvpool.cli.common.tokenizer import tokenize
from vllm_kvpool.client import LookupClient
from vllm_kvpool.direct_http import open_directly, read_whole
from vllm_kvpool.errors import ConfigError

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


ENDLESS = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\n"
BROKEN = b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{}"


@contextmanager
def says(data: bytes, *, goes_on: bool) -> Iterator[str]:
    """A server that says this to one client, and more until the client has gone."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection, suppress(OSError):
                connection.recv(4096)
                connection.sendall(data)
                while goes_on:
                    connection.sendall(b"#" * 1000)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join()


@pytest.mark.parametrize(
    ("timeout_s", "most_bytes", "error"), [(0.05, 1 << 60, TimeoutError), (60.0, 9_999, OSError)]
)
def test_an_answer_without_end_is_given_up(
    timeout_s: float, most_bytes: int, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct_http, "MAX_ANSWER_BYTES", most_bytes)
    with says(ENDLESS, goes_on=True) as url, open_directly(url, 60.0) as answer:
        with pytest.raises(error):
            read_whole(answer, timeout_s)
        answer.close()


def test_an_answer_that_breaks_off_is_an_error() -> None:
    with (
        says(BROKEN, goes_on=False) as url,
        open_directly(url, 60.0) as answer,
        pytest.raises(IncompleteRead),
    ):
        read_whole(answer, 60.0)


def test_every_answer_is_read_with_a_bound() -> None:
    package = Path(vllm_kvpool.__file__).parent
    assert [path.name for path in package.rglob("*.py") if "answer.read(" in path.read_text()] == []


def test_a_url_that_is_none_is_named() -> None:
    with pytest.raises(ConfigError, match="Invalid IPv6"):
        tokenize("a", "http://[::1")
