"""Requests of web pages, which browsers send only where they are told that they may (pure).

As vLLM answers them (`--allowed-origins`). A browser asks first (a preflight), which no engine
hears of, and shows the page an answer only if its headers allow that. Engines say so in theirs,
which go on unchanged; here is what the router says in its own.
"""

from collections.abc import Sequence

from vllm_kvpool.router.dataplane.headers import Headers

ANY = "*"
MAX_AGE_S = 600


def shown_to(headers: Headers, allowed: Sequence[str]) -> dict[str, str]:
    """Headers with which the page that has sent a request with `headers` may read the answer."""
    origin = headers.get("Origin")
    if origin is None or not allowed:
        return {}
    if ANY in allowed:
        return {"Access-Control-Allow-Origin": ANY}
    vary = {"Vary": "Origin"}
    return {"Access-Control-Allow-Origin": origin, **vary} if origin in allowed else vary


def preflight(
    headers: Headers, allowed: Sequence[str], methods: Sequence[str]
) -> dict[str, str] | None:
    """Headers of the answer to a browser that asks before a request; None if it may not send it."""
    shown = shown_to(headers, allowed)
    if (
        "Access-Control-Allow-Origin" not in shown
        or headers.get("Access-Control-Request-Method") not in methods
    ):
        return None
    wanted = headers.get("Access-Control-Request-Headers")
    return {
        **shown,
        "Access-Control-Allow-Methods": ", ".join(methods),
        "Access-Control-Max-Age": str(MAX_AGE_S),
        **({"Access-Control-Allow-Headers": wanted} if wanted else {}),
    }
