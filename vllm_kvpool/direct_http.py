"""HTTP of commands and clients to engines and `kvpool serve`, past the proxies of the environment.

An engine stands on this machine or in its cluster: a proxy of `http_proxy` cannot reach it, and
would answer in its place.
"""

import urllib.request
from http.client import HTTPResponse

_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def open_directly(request: str | urllib.request.Request, timeout_s: float) -> HTTPResponse:
    """Open a URL without a proxy; raises as `urllib.request.urlopen` does. Blocks."""
    answer: HTTPResponse = _direct.open(request, timeout=timeout_s)
    return answer
