"""An engine that costs next to nothing: canned streams over a bare protocol, one token a tick.

    python -m benchmarks.cheap_engine PORT TICK_S

Speaks as much of vLLM's HTTP as a router needs. An answer of one token is one write.
"""

import asyncio
import re
import sys
from typing import cast

import uvloop

_HEAD = (
    b"HTTP/1.1 200 OK\r\ndate: Wed, 25 Nov 2026 00:00:00 GMT\r\nserver: uvicorn\r\n"
    b"content-type: text/event-stream; charset=utf-8\r\nx-request-id: 1\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
_CHUNK = (
    b'{"id":"cmpl-0123456789abcdef0123456789abcdef","object":"text_completion",'
    b'"created":1700000000,"model":"scripted","choices":[{"index":0,"text":" word%d",'
    b'"logprobs":null,"finish_reason":%b,"stop_reason":null,"prompt_token_ids":%b,'
    b'"token_ids":[%d]}]}'
)
_USAGE = (
    b'{"id":"cmpl-0123456789abcdef0123456789abcdef","object":"text_completion",'
    b'"created":1700000000,"model":"scripted","choices":[],'
    b'"usage":{"prompt_tokens":5,"total_tokens":%d,"completion_tokens":%d}}'
)
SHORT = 3  # a token, usage, the end
_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_TOKENS = re.compile(rb'"max_tokens": ?(\d+)')
_PAGES = {
    b"/v1/models": b'{"object":"list","data":[{"id":"scripted","object":"model"}]}',
    b"/metrics": b'vllm:cache_config_info{block_size="16",num_gpu_blocks="100000"} 1.0\n'
    b"vllm:num_requests_running 0.0\nvllm:num_requests_waiting 0.0\n"
    b"vllm:kv_cache_usage_perc 0.0\nvllm:prompt_tokens_total 0.0\n"
    b"vllm:generation_tokens_total 0.0\n",
}


def _event(payload: bytes) -> bytes:
    data = b"data: %b\n\n" % payload
    return b"%x\r\n%b\r\n" % (len(data), data)


def events_of(body: bytes) -> list[bytes]:
    """The stream's events, framed as chunks; the last has the end of the body."""
    found = _TOKENS.search(body)
    tokens = int(found[1]) if found else 1
    events = []
    for turn in range(tokens):
        ends = b'"length"' if turn == tokens - 1 else b"null"
        ids = b"null" if turn else b"[1,2,3,4,5]"
        events.append(_event(_CHUNK % (turn, ends, ids, 10_000 + turn)))
    if b"include_usage" in body:
        events.append(_event(_USAGE % (5 + tokens, tokens)))
    events.append(_event(b"[DONE]") + b"0\r\n\r\n")
    return events


_streams: "dict[Engine, None]" = {}
"""Those that have a stream to write."""


class Engine(asyncio.Protocol):
    """One connection."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.unread = b""
        self.left: list[bytes] = []

    def connection_lost(self, exc: Exception | None) -> None:
        _streams.pop(self, None)

    def data_received(self, data: bytes) -> None:
        self.unread += data
        head, ended, rest = self.unread.partition(b"\r\n\r\n")
        found = _LENGTH.search(head)
        length = int(found[1]) if found else 0
        if not ended or len(rest) < length:
            return
        self.unread = rest[length:]
        if head.startswith(b"GET"):
            body = _PAGES.get(head.split(b" ")[1], b"")
            self.transport.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
                b"content-length: %d\r\n\r\n%b" % (len(body), body)
            )
            return
        events = events_of(rest[:length])
        if len(events) <= SHORT:
            self.transport.write(_HEAD + b"".join(events))
            return
        self.transport.write(_HEAD)
        self.left = events[::-1]
        _streams[self] = None


async def _serve(port: int, tick_s: float) -> None:
    loop = asyncio.get_running_loop()

    def tick() -> None:
        for each in tuple(_streams):
            each.transport.write(each.left.pop())
            if not each.left:
                _streams.pop(each, None)
        loop.call_later(tick_s, tick)

    tick()
    server = await loop.create_server(Engine, "127.0.0.1", port, backlog=1024)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.install()
    asyncio.run(_serve(int(sys.argv[1]), float(sys.argv[2])))
