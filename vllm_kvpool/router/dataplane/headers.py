"""Headers of HTTP: how large they may be, and which the router passes on (pure)."""

from collections.abc import Mapping

from multidict import CIMultiDict, CIMultiDictProxy

Headers = CIMultiDict[str] | CIMultiDictProxy[str]

REQUEST_ID = "X-Request-Id"
JSON, EVENT_STREAM = "application/json", "text/event-stream"
SERVER = "kvpool"
"""`Server` header of the router's own answers."""
STREAM_HEADERS = {"Content-Type": EVENT_STREAM, "Server": SERVER}
JSON_HEADERS = {"Content-Type": JSON, "Server": SERVER}

MAX_HEADER_BYTES = 16 << 10
"""Limit of a request line and of each header, of clients and of engines."""
MAX_HEAD_BYTES = 64 << 10
MAX_HEADERS = 128

_OF_ONE_CONNECTION = frozenset(
    {
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te"),
        *("proxy-connection", "trailer", "transfer-encoding", "upgrade"),
    }
)
_OF_THE_BODY = frozenset({"content-length", "content-encoding"})
"""The body goes on decoded, and may be another one."""
_OF_REQUESTS = _OF_ONE_CONNECTION | _OF_THE_BODY | {"host", "accept-encoding", "expect"}
STEERING_HEADERS = ("X-data-parallel-rank", "X-Vllm-Priority")
ORIGIN_HEADERS = (
    *("Forwarded", "Via", "X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Port"),
    *("X-Forwarded-Prefix", "X-Forwarded-Proto", "X-Forwarded-Server", "X-Forwarded-Uri"),
    *("X-Original-Forwarded-For", "X-Original-Host", "X-Original-URL", "X-Originating-IP"),
    *("X-Real-IP", "X-Client-IP", "X-Cluster-Client-IP", "X-Envoy-External-Address"),
    *("X-Envoy-Internal", "X-Azure-ClientIP", "X-Azure-SocketIP", "CF-Connecting-IP"),
    *("True-Client-IP", "Fastly-Client-IP", "Fly-Client-IP"),
)
"""Headers that name a request's origin. vLLM's server trusts `X-Forwarded-For` from its host."""
RESERVED_HEADERS = (*STEERING_HEADERS, *ORIGIN_HEADERS)
"""Headers that only the router or a trusted client may send to an engine."""
_RESERVED = frozenset(map(str.lower, RESERVED_HEADERS))
_OF_ORIGINS = frozenset({"access-control-allow-origin", "access-control-allow-credentials"})
"""Headers by which engines let pages of other sites read answers: by default vLLM lets all."""
_OF_ANSWERS = _OF_ONE_CONNECTION | _OF_THE_BODY | _OF_ORIGINS


def request_headers(headers: Headers, *, is_trusted: bool = False) -> CIMultiDict[str]:
    """Return the headers of a client's request that an engine is sent."""
    return _without(headers, _OF_REQUESTS if is_trusted else _OF_REQUESTS | _RESERVED)


def answer_headers(headers: Headers) -> CIMultiDict[str]:
    """Return the headers of an engine's answer that the client is sent."""
    return _without(headers, _OF_ANSWERS)


def _without(headers: Headers, left_out: frozenset[str]) -> CIMultiDict[str]:
    named = headers.getall("Connection", None)
    if named:
        # A connection may have more headers of its own, which it names.
        own = ",".join(named).lower().split(",")
        left_out = left_out | {each.strip() for each in own}
    kept = [pair for pair in headers.items() if pair[0].lower() not in left_out]
    return CIMultiDict(kept)


def bearer_token(authorization: str) -> str | None:
    """Return the token of an `Authorization: Bearer` header; None for another scheme."""
    scheme, space, token = authorization.partition(" ")
    return token.strip() if space and scheme.lower() == "bearer" else None


def with_headers(headers: Mapping[str, str], more: Mapping[str, str]) -> Mapping[str, str]:
    """Return the headers with `more`, which count where both have one."""
    if not more:
        return headers
    changed = CIMultiDict(headers)
    changed.update(more)
    return changed


def encode_headers(headers: Mapping[str, str]) -> bytes:
    """Return the headers' lines; ValueError where one has more than its own line in it."""
    text = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
    if text.count("\n") != len(headers) or text.count("\r") != len(headers):
        raise ValueError("a header has a line end in it")
    return text.encode("latin-1")


def with_request_id(headers: Mapping[str, str], suffix: str) -> Mapping[str, str]:
    """Return the headers with another id, for the calls that a client does not know of."""
    return with_headers(headers, {REQUEST_ID: f"{headers[REQUEST_ID]}-{suffix}"})
