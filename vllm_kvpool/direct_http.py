"""HTTP of commands and clients to engines and `kvpool serve`, past the proxies of the environment.

An engine stands on this machine or in its cluster: a proxy of `http_proxy` cannot reach it, and
would answer in its place.
"""

import time
import urllib.request
from http.client import HTTPResponse, IncompleteRead

MAX_ANSWER_BYTES = 64 << 20
READ_BYTES = 1 << 20

_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def open_directly(request: str | urllib.request.Request, timeout_s: float) -> HTTPResponse:
    """Open a URL without a proxy; raises as `urllib.request.urlopen` does. Blocks."""
    answer: HTTPResponse = _direct.open(request, timeout=timeout_s)
    return answer


def read_whole(answer: HTTPResponse, timeout_s: float) -> bytes:
    """Return the body of an answer. Blocks for at most twice `timeout_s`, if it was opened with it.

    TimeoutError for a body that has not ended then, OSError beyond MAX_ANSWER_BYTES, HTTPException
    for one that breaks off.
    """
    deadline, body = time.monotonic() + timeout_s, bytearray()
    while part := answer.read1(READ_BYTES):
        body += part
        if len(body) > MAX_ANSWER_BYTES:
            raise OSError(f"the answer is larger than {MAX_ANSWER_BYTES} bytes")
        if time.monotonic() > deadline:
            raise TimeoutError(f"the answer has not ended within {timeout_s:g} s")
    if answer.length:
        raise IncompleteRead(bytes(body), answer.length)
    return bytes(body)
