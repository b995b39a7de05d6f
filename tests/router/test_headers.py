"""Headers that the router forwards, in requests and in answers."""

import pytest
from multidict import CIMultiDict

from vllm_kvpool.router.dataplane.headers import (
    RESERVED_HEADERS,
    answer_headers,
    request_headers,
    with_request_id,
)

KEPT = [
    ("Authorization", "Bearer x"),
    ("Content-Type", "application/json"),
    ("X-Request-Id", "1"),
    ("X-Session-ID", "a"),
    ("X-Session-ID", "b"),
    ("traceparent", "00-1"),
]


@pytest.mark.parametrize(
    "name",
    [
        *("Connection", "Keep-Alive", "Proxy-Authorization", "TE", "Trailer", "Upgrade"),
        *("Transfer-Encoding", "Content-Length", "Content-Encoding", "Proxy-Connection"),
        *("HOST", "accept-encoding", "Expect"),
    ],
)
def test_those_of_one_connection_stay_behind(name: str) -> None:
    kept = request_headers(CIMultiDict([*KEPT, (name, "anything")]))
    assert list(kept.items()) == KEPT


@pytest.mark.parametrize("name", RESERVED_HEADERS)
def test_reserved_header_of_untrusted_client_is_left_out(name: str) -> None:
    given = CIMultiDict([*KEPT, (name, "0"), (name.lower(), "-1")])
    assert list(request_headers(given).items()) == KEPT
    assert request_headers(given, is_trusted=True) == given


def test_a_connection_names_more_of_its_own() -> None:
    given = CIMultiDict([*KEPT, ("Connection", "close, X-One"), ("connection", "x-two")])
    given.extend([("X-One", "1"), ("x-TWO", "2"), ("X-Three", "3")])
    assert list(request_headers(given).items()) == [*KEPT, ("X-Three", "3")]


def test_answers_keep_what_tells_of_the_engine() -> None:
    given = CIMultiDict([("Server", "uvicorn"), ("Date", "today"), ("Set-Cookie", "a=1")])
    given.extend([("Set-Cookie", "b=2"), ("Content-Length", "5"), ("Transfer-Encoding", "chunked")])
    assert list(answer_headers(given).items()) == [
        *(("Server", "uvicorn"), ("Date", "today")),
        *(("Set-Cookie", "a=1"), ("Set-Cookie", "b=2")),
    ]


def test_another_id_leaves_the_first_one_as_it_is() -> None:
    given = CIMultiDict({"x-request-id": "abc", "A": "b"})
    assert with_request_id(given, "prefill") == {"X-Request-Id": "abc-prefill", "A": "b"}
    assert given["X-Request-Id"] == "abc"
