"""Calls to engines: the only place that knows their HTTP.

Everything raises `EngineLost` where an engine cannot be reached, does not answer in time or answers
what is not HTTP. What it answers with a status is an answer.
"""

import asyncio
import errno
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from io import BytesIO
from math import isfinite
from typing import NamedTuple

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from vllm_kvpool.router.control.events import Sample
from vllm_kvpool.router.dataplane.headers import Headers

MAX_ANSWER_BYTES = 256 << 20  # prompt log-probabilities of a long prompt are large
MAX_METRICS_BYTES = 8 << 20
MAX_CALLS = 65_536
END_TIMEOUT_S = 0.1
LARGE_BODY_BYTES = 1 << 20
KEEP_ALIVE_S = 4.0  # less than the 5 s after which vLLM closes a connection that nobody uses
OWN_TIER = "host"  # of the engine alone


class EngineLost(Exception):
    """An engine does not answer as an engine does."""


class EngineUnreached(EngineLost):
    """There is no connection to it, so it has been sent nothing."""

    def __init__(self, why: str, *, is_refused: bool) -> None:
        super().__init__(why)
        self.is_refused = is_refused
        """Nobody listens there."""


class EngineBroke(EngineLost):
    """It was sent a request; then its connection has ended, or was silent for too long."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer."""

    status: int
    headers: Headers
    body: bytes


class Engines:
    """Owned by the router's loop. Connections are kept and shared by all calls."""

    def __init__(
        self,
        *,
        connect_timeout_s: float,
        silence_timeout_s: float,
        answer_timeout_s: float,
        api_key: str,
    ) -> None:
        """`silence_timeout_s`: of a stream; `answer_timeout_s`: of an answer in one piece."""
        self._answer_timeout_s = answer_timeout_s
        self._session: aiohttp.ClientSession | None = None
        self._whole_timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_s)
        self._stream_timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=connect_timeout_s, sock_read=silence_timeout_s
        )
        self._own_headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    def start(self) -> None:
        """In the loop that will make the calls."""
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=MAX_CALLS, limit_per_host=0, keepalive_timeout=KEEP_ALIVE_S
            ),
            # Keys that clients send are theirs; none is kept for another client's request.
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("Accept-Encoding", "Content-Type", "User-Agent"),
            read_bufsize=256 << 10,
        )

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    @asynccontextmanager
    async def open(
        self, url: str, body: bytes, headers: Mapping[str, str]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """POST, for a stream; leaving the context before its end ends the engine's work on it."""
        call = _Call("POST", url, body, headers, self._stream_timeout)
        try:
            async with await self._begin(call) as response:
                yield response
        except (aiohttp.ClientError, ConnectionError) as error:
            raise _lost(error) from error

    async def post(
        self,
        url: str,
        body: bytes,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Answer:
        """POST, and read the whole answer. Without headers it is a request of the router's own."""
        if headers is None:
            headers = self._own_headers | {"Content-Type": "application/json"}
        limit_s = self._answer_timeout_s if timeout_s is None else timeout_s
        return await self._whole(_Call("POST", url, body, headers, self._whole_timeout), limit_s)

    async def get(
        self,
        url: str,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
        most_bytes: int = MAX_ANSWER_BYTES,
    ) -> Answer:
        """GET. Without headers it is a request of the router's own."""
        given = self._own_headers if headers is None else headers
        call = _Call("GET", url, None, given, self._whole_timeout)
        return await self._whole(call, timeout_s, most_bytes)

    async def sample(self, url: str, timeout_s: float) -> Sample:
        """What an engine's /metrics say."""
        answer = await self.get(f"{url}/metrics", timeout_s, most_bytes=MAX_METRICS_BYTES)
        if answer.status != 200:
            raise EngineLost(f"/metrics answers {answer.status}")
        return read_sample(answer.body.decode(errors="replace"))

    async def _whole(
        self, call: "_Call", timeout_s: float, most_bytes: int = MAX_ANSWER_BYTES
    ) -> Answer:
        try:
            async with asyncio.timeout(timeout_s), await self._begin(call) as response:
                return await read(response, most_bytes)
        except (aiohttp.ClientError, ConnectionError) as error:
            raise _lost(error) from error
        except TimeoutError as error:
            raise EngineBroke(f"no answer within {timeout_s:g} s") from error

    async def _begin(self, call: "_Call") -> aiohttp.ClientResponse:
        """Send a request. One on a connection that the engine has just closed is sent again."""
        try:
            return await self._send(call)
        except aiohttp.ClientConnectorError:
            raise
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
            broken = error
        try:
            return await self._send(call)
        except aiohttp.ClientError:
            # It may have had the first one, and may have ended because of it.
            raise broken from None

    async def _send(self, call: "_Call") -> aiohttp.ClientResponse:
        assert self._session is not None
        body = call.body
        return await self._session.request(
            call.method,
            call.url,
            # aiohttp warns of large bytes, which it hands to the connection in one piece.
            data=BytesIO(body) if body is not None and len(body) > LARGE_BODY_BYTES else body,
            headers=call.headers,
            timeout=call.timeout,
            # What follows would be sent the client's key.
            allow_redirects=False,
        )


class _Call(NamedTuple):
    method: str
    url: str
    body: bytes | None
    headers: Mapping[str, str]
    timeout: aiohttp.ClientTimeout


def _lost(error: Exception) -> EngineLost:
    why = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    match error:
        case aiohttp.ClientConnectorError():
            refused = error.os_error.errno == errno.ECONNREFUSED
            return EngineUnreached(why, is_refused=refused)
        case aiohttp.ConnectionTimeoutError():
            return EngineUnreached(why, is_refused=False)
        case aiohttp.ClientConnectionError() | aiohttp.ClientPayloadError() | ConnectionError():
            return EngineBroke(why)
    return EngineLost(why)


async def read(response: aiohttp.ClientResponse, most_bytes: int = MAX_ANSWER_BYTES) -> Answer:
    """The whole answer; EngineLost if it is larger than any engine's."""
    parts: list[bytes] = []
    size = 0
    async for part in response.content.iter_any():
        size += len(part)
        if size > most_bytes:
            raise EngineLost(f"answers more than {most_bytes} bytes")
        parts.append(part)
    return Answer(response.status, response.headers, b"".join(parts))


async def finish(response: aiohttp.ClientResponse) -> None:
    """Take the end of a stream of which all has come, so that its connection can be used again."""
    with suppress(TimeoutError, aiohttp.ClientError):
        async with asyncio.timeout(END_TIMEOUT_S):
            await response.content.readany()


_SUMS = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:prompt_tokens_total": "prompt_tokens",
    "vllm:generation_tokens_total": "generated_tokens",
}
_USAGE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
_DIRECTIONS = {"load": "bytes_in", "save": "bytes_out", "get": "bytes_in", "put": "bytes_out"}
_INFO, _OF_CONNECTOR = "vllm:kvpool_info", "vllm:kvpool_hit_tokens"
_WANTED = (
    *(*_SUMS, *_USAGE, _INFO),
    *("vllm:cache_config_info", "vllm:kvpool_bytes", "vllm:kvpool_tier_up"),
)


def read_sample(text: str) -> Sample:
    """Read Prometheus's text form; EngineLost where it is none. Engines of a process add up."""
    # vLLM has thousands of lines, most of them of histograms, and the parser is slow.
    lines = [line for line in text.split("\n") if line.startswith(_WANTED)]
    try:
        # vLLM exports a connector's metrics, if only their names, from its start.
        return _sum_up("\n".join(lines) + "\n" if lines else text, _OF_CONNECTOR in text)
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise EngineLost(f"/metrics cannot be read: {error}") from None


def _sum_up(text: str, has_connector: bool) -> Sample:
    sums = dict.fromkeys((*_SUMS.values(), "bytes_in", "bytes_out"), 0.0)
    usage: list[float] = []
    tiers: list[float] = []
    blocks = block_size = chunk_tokens = 0
    namespace = ""
    for family in text_string_to_metric_families(text):
        for name, labels, value, *_ in family.samples:
            if name in _SUMS:
                sums[_SUMS[name]] += value
            elif name in _USAGE:
                usage.append(value)
            elif name == "vllm:cache_config_info":
                blocks += _whole(labels.get("num_gpu_blocks", ""))
                block_size = _whole(labels.get("block_size", "")) or block_size
            elif name == "vllm:kvpool_bytes_total":
                field = _DIRECTIONS.get(labels.get("direction", ""))
                if field is not None:
                    sums[field] += value
            elif name == "vllm:kvpool_tier_up" and labels.get("tier") != OWN_TIER:
                tiers.append(value)
            elif name == _INFO and value:
                namespace = labels.get("namespace", "")
                chunk_tokens = _whole(labels.get("chunk_tokens", ""))
    if not all(map(isfinite, sums.values())):
        raise ValueError("a count is no number")
    share = sum(usage) / len(usage) if usage else 0.0
    return Sample(
        running=int(sums["running"]),
        waiting=int(sums["waiting"]),
        used_blocks=round(min(max(share, 0.0), 1.0) * blocks),
        total_blocks=blocks,
        block_size=block_size,
        prompt_tokens=sums["prompt_tokens"],
        generated_tokens=sums["generated_tokens"],
        bytes_in=sums["bytes_in"],
        bytes_out=sums["bytes_out"],
        # One tier that engines can share is enough; without any, nothing is known against it.
        pool_is_up=not tiers or any(tiers),
        has_connector=has_connector,
        namespace=namespace,
        chunk_tokens=chunk_tokens,
    )


def _whole(text: str) -> int:
    return int(text) if text.isdecimal() else 0
