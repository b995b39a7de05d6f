"""What a router costs in CPU, a short request and a streamed token, beside others.

    VLLM_ROUTER=PATH HAPROXY=PATH NGINX=PATH python benchmarks/bench_router_cpu.py [--json FILE]

CPU seconds of the router's processes alone, before four engines (`cheap_engine`) and clients that
cost next to nothing; so a machine that others use as well changes little. A short request is
a completion of one token in one piece; streams are read one token at a time, as they come from an
engine. The data plane alone has no controller: requests go to the engines in turn. The bare proxy
and the pass-through decide nothing: the least that Python does over httptools and with aiohttp.
Others are measured where their program is named; haproxy and nginx, in C, go in turn, too.
`limited by` is about short requests.
"""

import asyncio
import contextlib
import itertools
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import psutil  # type: ignore[import-untyped]
import uvloop
from aiohttp import ClientSession, TCPConnector, web

from benchmarks.common import LIMITED_BY, Result, Row, Target, run_script
from benchmarks.limits import Meter
from benchmarks.router_sides import (
    IMPORTED,
    TOKEN,
    peer_release,
    process,
    router_command,
    toml,
    wait_ready,
    wait_serving,
)
from tests.support.server_process import free_ports
from vllm_kvpool.router.config import read_config
from vllm_kvpool.router.control.events import Decode
from vllm_kvpool.router.control.requests import RequestId, RequestSpec
from vllm_kvpool.router.control.states import ReplicaId
from vllm_kvpool.router.dataplane.control_plane import ControlPlane, RequestEvent
from vllm_kvpool.router.dataplane.data_plane import DataPlane, upstream_of
from vllm_kvpool.router.dataplane.request_handler import RequestHandler
from vllm_kvpool.router.ops.request_log import RequestLog

ENGINES = 4
TICK_S = 0.005
CLIENTS, STREAMS, STREAM_TOKENS = 4, 16, 200
MAX_REQUEST_US, MAX_TOKEN_US = 200.0, 35.0
OURS, ALONE, PASS = "ours", "ours, data plane alone", "aiohttp pass-through"
BARE = "bare proxy"
THEIRS, HAPROXY, NGINX = "vllm-router", "haproxy", "nginx"
PROGRAMS = {THEIRS: "VLLM_ROUTER", HAPROXY: "HAPROXY", NGINX: "NGINX"}
"""Environment variables with the paths of other proxies."""
STREAMED = "streams"
_BODY = b'{"model":"scripted","prompt":"a short prompt","max_tokens":%d,"stream":%b}'
_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)


@contextlib.contextmanager
def side(name: str, scratch: Path) -> Iterator[tuple[str, int]]:
    """Engines and a router before them; its address and its process."""
    ports, (front, admin) = free_ports(ENGINES), free_ports(2)
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    with contextlib.ExitStack() as stack:
        for port in ports:
            engine = [sys.executable, "-m", "benchmarks.cheap_engine", str(port), str(TICK_S)]
            stack.enter_context(process(engine, scratch / "engine.log"))
        if name == OURS:
            config = scratch / "router.toml"
            replicas = [{"in": "replicas", "url": url, "role": "both"} for url in urls]
            sections: dict[str, dict[str, object]] = {
                "front": {
                    "listen": f"127.0.0.1:{front}",
                },
                "admin": {"listen": f"127.0.0.1:{admin}", "token": TOKEN},
            }
            config.write_text(toml(sections, replicas))
            command = router_command(config)
        elif name == BARE:
            command = [sys.executable, "-m", "benchmarks.bare_proxy", str(front), *urls]
        elif name in (ALONE, PASS):
            mode = "alone" if name == ALONE else "pass"
            command = [sys.executable, "-m", "benchmarks.bench_router_cpu", mode]
            command += [str(front), *urls]
        else:
            command = [os.environ[PROGRAMS[name]], *_arguments(name, scratch, front, admin, urls)]
        pid = stack.enter_context(process(command, scratch / "router.log"))
        wait_ready(f"http://127.0.0.1:{front}", scratch / "router.log")
        if name == OURS:
            wait_serving(f"http://127.0.0.1:{admin}", ENGINES, scratch / "router.log")
        yield f"127.0.0.1:{front}", pid


def _arguments(name: str, scratch: Path, front: int, admin: int, urls: list[str]) -> list[str]:
    """Of another proxy with one worker."""
    if name == THEIRS:
        given = ["--host", "127.0.0.1", "--port", str(front), "--log-level", "error"]
        return [*given, "--prometheus-port", str(admin), "--worker-urls", *urls]
    config, places = scratch / "proxy.conf", [url.removeprefix("http://") for url in urls]
    if name == HAPROXY:
        servers = "".join(f" server s{n} {each}\n" for n, each in enumerate(places))
        config.write_text(HAPROXY_CONF.format(front=front, servers=servers))
        return ["-db", "-f", str(config)]
    servers = "".join(f"server {each};" for each in places)
    config.write_text(NGINX_CONF.format(front=front, servers=servers, scratch=scratch))
    return ["-e", str(scratch / "error.log"), "-c", str(config)]


HAPROXY_CONF = """\
global
 nbthread 1
defaults
 mode http
 timeout connect 5s
 timeout client 120s
 timeout server 120s
 http-reuse always
listen router
 bind 127.0.0.1:{front}
 balance roundrobin
{servers}"""
NGINX_CONF = """\
daemon off;
master_process off;
pid {scratch}/nginx.pid;
events {{ worker_connections 4096; }}
http {{
 access_log off;
 client_body_temp_path {scratch}/body;
 proxy_temp_path {scratch}/proxy;
 fastcgi_temp_path {scratch}/fastcgi;
 uwsgi_temp_path {scratch}/uwsgi;
 scgi_temp_path {scratch}/scgi;
 keepalive_requests 1000000000;
 upstream engines {{ {servers} keepalive 64; keepalive_requests 1000000000; }}
 server {{
  listen 127.0.0.1:{front};
  location / {{
   proxy_pass http://engines;
   proxy_http_version 1.1;
   proxy_set_header Connection "";
   proxy_buffering off;
  }}
 }}
}}
"""


async def _pass_through(port: int, urls: list[str]) -> None:
    """A proxy that copies what comes."""
    turn = 0
    session = ClientSession(connector=TCPConnector(limit=0))

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        nonlocal turn
        turn += 1
        body = await request.read()
        headers = {"Content-Type": "application/json"}
        url = urls[turn % len(urls)] + request.path
        async with session.request(request.method, url, data=body, headers=headers) as got:
            response = web.StreamResponse(status=got.status)
            response.headers["Content-Type"] = got.headers.get("Content-Type", "")
            response.enable_chunked_encoding()
            await response.prepare(request)
            async for data in got.content.iter_any():
                await response.write(data)
            await response.write_eof()
            return response

    await asyncio.get_running_loop().create_server(web.Server(handle), "127.0.0.1", port)
    await asyncio.Event().wait()


class _Turns:
    """A control plane that sends requests to engines in turn."""

    tokens_per_byte = 0.25

    def __init__(self, urls: list[str]) -> None:
        self.urls = urls
        self.numbers = itertools.count()

    def model_length(self, model: str) -> int | None:
        return None

    def begin(self, ask: RequestSpec, handler: RequestHandler) -> None:
        number = str(next(self.numbers) % len(self.urls))
        handler.enqueue(Decode(ask.request_id, ReplicaId(number), 0))

    def post(self, event: RequestEvent) -> None:
        pass

    def over(self, request_id: RequestId, course: RequestLog) -> None:
        pass

    def url_of(self, replica: ReplicaId) -> str:
        return self.urls[int(replica)]

    def health(self) -> tuple[int, bytes]:
        return 200, b""


async def _data_plane_alone(port: int, urls: list[str]) -> None:
    """The router's own server, requests and connections, with a controller that takes turns."""
    listen = {"listen": f"127.0.0.1:{port}"}
    replicas = [{"url": url, "role": "both"} for url in urls]
    config = read_config({"front": listen, "replicas": replicas})
    control = cast("ControlPlane", _Turns(urls))
    await DataPlane(config, control, upstream_of(config), None).start()
    await asyncio.Event().wait()


class _Client(asyncio.Protocol):
    """Sends the same request again and again, and looks only for the end of each answer."""

    def __init__(self, request: bytes, is_over: asyncio.Event) -> None:
        self.request = request
        self.is_over = is_over
        self.done = asyncio.get_running_loop().create_future()
        self.count = 0
        self.unread = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        if not self.unread:
            assert data.startswith(b"HTTP/1.1 200"), data
        self.unread = (self.unread + data)[-4096:] if self.unread else data
        if self.unread.endswith(b"0\r\n\r\n") or self._has_all():
            self.count += 1
            self.unread = b""
            if self.is_over.is_set():
                self.transport.close()
                self.done.set_result(self.count)
            else:
                self.transport.write(self.request)

    def _has_all(self) -> bool:
        head, ended, body = self.unread.partition(b"\r\n\r\n")
        found = _LENGTH.search(head)
        return bool(ended and found and len(body) >= int(found[1]))


async def _load(address: str, clients: int, seconds: float, tokens: int, streams: bool) -> int:
    """Requests that were answered."""
    body = _BODY % (tokens, b"true" if streams else b"false")
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    request = head + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    host, port = address.split(":")
    is_over = asyncio.Event()
    loop = asyncio.get_running_loop()
    all_clients = []
    for _ in range(clients):
        _, client = await loop.create_connection(lambda: _Client(request, is_over), host, int(port))
        all_clients.append(client)
    await asyncio.sleep(seconds)
    is_over.set()
    return sum(await asyncio.gather(*(client.done for client in all_clients)))


def _cpu_s(pid: int) -> dict[int, float]:
    """Of each process of a router."""
    root = psutil.Process(pid)
    times = {each.pid: each.cpu_times() for each in (root, *root.children(recursive=True))}
    return {each: found.user + found.system for each, found in times.items()}


def _used_us(address: str, pid: int, seconds: float, streams: bool) -> tuple[float, float]:
    """CPU of a request: of all processes of a router, and of the busiest, which bounds it."""
    tokens, clients = (STREAM_TOKENS, STREAMS) if streams else (1, CLIENTS)
    asyncio.run(_load(address, clients, 0.5, tokens, streams))
    before = _cpu_s(pid)
    count = asyncio.run(_load(address, clients, seconds, tokens, streams))
    after = _cpu_s(pid)
    used_us = [1e6 * (after[each] - before[each]) / count for each in after]
    return sum(used_us), max(used_us)


def measure(quick: bool) -> Result:
    seconds, repeats = (0.5, 1) if quick else (2.0, 2)
    names = [OURS, ALONE, BARE, PASS]
    names += [name for name, variable in PROGRAMS.items() if os.environ.get(variable)]
    found: dict[tuple[str, bool], list[tuple[float, float]]] = {}
    meter = Meter()
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(repeats):
            for name in names:
                with side(name, Path(folder)) as (address, pid):
                    for streams in (False, True):
                        with meter.of(STREAMED if streams else name):
                            each = _used_us(address, pid, seconds, streams)
                        found.setdefault((name, streams), []).append(each)
    result = Result()
    for name in names:
        (request, busiest), (stream, busiest_stream) = (
            min(found[name, False]),
            min(found[name, True]),
        )
        row: Row = {
            "side": name,
            "us a short request": request,
            "us a streamed token": max(0.0, stream - request) / STREAM_TOKENS,
            "of a request, the busiest process's us": busiest,
            "of a token": max(0.0, busiest_stream - busiest) / STREAM_TOKENS,
            LIMITED_BY: meter.limited_by(name),
        }
        result.rows.append(row)
        if name == OURS:
            token = (stream - request) / STREAM_TOKENS
            result.targets += [
                Target("CPU of a short request", request, MAX_REQUEST_US, False, "us"),
                Target("CPU of a streamed token", token, MAX_TOKEN_US, False, "us"),
            ]
    result.notes.append(f"CPU of the router's processes; the best of {repeats}; {ENGINES} engines")
    if peer := os.environ.get(PROGRAMS[THEIRS]):
        result.notes.append(peer_release(peer))
    return result


if __name__ == "__main__":
    if sys.argv[1:2] in (["pass"], ["alone"]):
        serves = _pass_through if sys.argv[1] == "pass" else _data_plane_alone
        uvloop.install()
        asyncio.run(serves(int(sys.argv[2]), sys.argv[3:]))
    else:
        run_script(
            __doc__, measure, (*IMPORTED, "benchmarks.bare_proxy", "benchmarks.cheap_engine")
        )
