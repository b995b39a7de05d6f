"""What the router costs in CPU: beside others, an event of its controller, a body and a stream.

    python benchmarks/bench_router_cpu.py router_cpu|router_steps|splice [--json FILE] [--quick]

All figures are processor time, so a machine that others use as well changes little.
"""

import asyncio
import contextlib
import gc
import itertools
import json
import os
import random
import re
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import psutil  # type: ignore[import-untyped]
import uvloop
from aiohttp import ClientSession, TCPConnector, web

from benchmarks.common import LIMITED_BY, Result, Row, Target, run_script, spread
from benchmarks.limits import Meter
from benchmarks.router_sides import (
    IMPORTED,
    other_router,
    our_router,
    peer_arguments,
    peer_release,
    process,
)
from tests.support.router_engines import engine_spec
from tests.support.router_world import World
from tests.support.server_process import free_ports
from vllm_kvpool.router.config import read_config
from vllm_kvpool.router.control.controller import Controller
from vllm_kvpool.router.control.events import Action, Decode, Event, Mode, RequestEvent
from vllm_kvpool.router.control.requests import RequestId, RequestSpec
from vllm_kvpool.router.control.settings import PlannerConfig
from vllm_kvpool.router.control.states import ReplicaId, Role
from vllm_kvpool.router.dataplane.data_plane import DataPlane, upstream_of
from vllm_kvpool.router.dataplane.request_body import READ, ApiPath, parse_request
from vllm_kvpool.router.dataplane.request_handler import RequestHandler
from vllm_kvpool.router.dataplane.resume.policy import joined_ids, resume_body
from vllm_kvpool.router.dataplane.resume.stream_resumer import Resume, StreamResumer
from vllm_kvpool.router.dataplane.sse import Events, frames
from vllm_kvpool.router.ops.request_log import RequestLog
from vllm_kvpool.router.run import GC_THRESHOLD

if TYPE_CHECKING:
    from vllm_kvpool.router.dataplane.control_plane import ControlPlane

ENGINES = 4
TICK_S = 0.005
CLIENTS, STREAMS, STREAM_TOKENS = 4, 16, 200
MAX_REQUEST_US, MAX_TOKEN_US = 200.0, 35.0
OURS, ALONE, PASS = "ours", "ours, data plane alone", "aiohttp pass-through"
BARE = "bare proxy"
THEIRS = "vllm-router"
PEER = "VLLM_ROUTER"  # the environment variable with its path
MODES = {
    BARE: "benchmarks.bare_proxy",
    ALONE: "benchmarks.bench_router_cpu alone",
    PASS: "benchmarks.bench_router_cpu pass",
}
"""Modules with proxies of this project's own."""
STREAMED = "streams"
_BODY = b'{"model":"scripted","prompt":"a short prompt","max_tokens":%d,"stream":%b}'
_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)


@contextlib.contextmanager
def side(name: str, scratch: Path) -> Iterator[tuple[str, int]]:
    """Engines and a router before them; its address and its process."""
    ports = free_ports(ENGINES)
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    with contextlib.ExitStack() as stack:
        for port in ports:
            engine = [sys.executable, "-m", "benchmarks.cheap_engine", str(port), str(TICK_S)]
            stack.enter_context(process(engine, scratch / "engine.log"))
        if name == OURS:
            replicas = [{"url": url, "role": "both"} for url in urls]
            router = stack.enter_context(our_router(scratch, replicas, ENGINES))
            url, pid = router.url, router.pid
        else:
            command = partial(_command, name, urls)
            url, pid = stack.enter_context(other_router(command, scratch))
        yield url.removeprefix("http://"), pid


def _command(name: str, urls: list[str], front: int, admin: int) -> list[str]:
    """Of another proxy with one worker."""
    if name in MODES:
        return [sys.executable, "-m", *MODES[name].split(), str(front), *urls]
    return [os.environ[PEER], *peer_arguments(front, admin), "--worker-urls", *urls]


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


def bench_router_cpu(quick: bool) -> Result:
    """What a router costs in CPU, a short request and a streamed token, beside others.

    CPU seconds of the router's processes alone, before four engines (`cheap_engine`) and clients
    that cost next to nothing; so a machine that others use as well changes little. A short request
    is a completion of one token in one piece; streams are read one token at a time, as they come
    from an engine. The data plane alone has no controller: requests go to the engines in turn. The
    bare proxy and the pass-through decide nothing: the least that Python does over httptools and
    with aiohttp. vllm-router is measured where VLLM_ROUTER names it. `limited by` is about short
    requests.
    """
    seconds, repeats = (0.5, 1) if quick else (2.0, 2)
    names = [OURS, ALONE, BARE, PASS, *([THEIRS] if os.environ.get(PEER) else [])]
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
    if peer := os.environ.get(PEER):
        result.notes.append(peer_release(peer))
    return result


# The controller

PREFILL, DECODE, TIMES = 24, 40, (1, 8)
KIND = engine_spec(kv_blocks=16_000)
LOADS = (("bearable", 80.0), ("too high", 200.0))  # requests by second
WARM_S, MEASURED_S, QUICK_S = 25.0, 20.0, 2.0
PREFIXES, PREFIX_TOKENS = 200, 256
MAX_MEAN_US = 60.0


class TimedController(Controller):
    """Counts the CPU time of each step by kind of event."""

    def __init__(self) -> None:
        super().__init__(planner=PlannerConfig(mode=Mode.DRY_RUN))
        self.spent_s: defaultdict[str, float] = defaultdict(float)
        self.steps: Counter[str] = Counter()

    def step(self, event: Event, now: float) -> list[Action]:
        begun = time.thread_time()
        actions = super().step(event, now)
        self.spent_s[type(event).__name__] += time.thread_time() - begun
        self.steps[type(event).__name__] += 1
        return actions


def random_arrivals(world: World, per_second: float) -> Callable[[], None]:
    """Requests by chance, for ever."""
    chance = random.Random(1)

    def arrive() -> None:
        root = chance.randrange(PREFIXES)
        asked = RequestSpec(
            request_id=RequestId(f"r{world.num_steps}"),
            prompt_tokens=chance.randint(100, 3000),
            max_output_tokens=600,
            prefix=tuple(root * 100 + number for number in range(chance.randint(0, 11))),
            prefix_tokens=PREFIX_TOKENS,
        )
        world.arrive(asked, chance.randint(200, 600))
        world.timeline.after(chance.expovariate(per_second), arrive)

    return arrive


def cost(
    per_second: float, seconds: float, times: int, warm_s: float | None = None
) -> tuple[Row, float]:
    """A row, and the mean over all events, in microseconds; replicas and requests so many times."""
    # As the router's process does; and what is left of the row before is nothing of this row's.
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)
    controller = TimedController()
    world = World(controller, kind=KIND, check_every=0)
    for number in range(times * PREFILL):
        world.add(f"p{number}", Role.PREFILL)
    for number in range(times * DECODE):
        world.add(f"d{number}", Role.DECODE)
    world.run(2.0)
    random_arrivals(world, times * per_second)()
    world.run(WARM_S / times if warm_s is None else warm_s)
    controller.spent_s.clear()
    controller.steps.clear()
    world.run(seconds)
    row: Row = {
        "replicas": times * (PREFILL + DECODE),
        "requests/s": times * per_second,
        "in flight": len(world.calls.clients),
    }
    row["waiting"] = len(controller.state.queue) + len(controller.state.migration)
    mean_us = 1e6 * sum(controller.spent_s.values()) / controller.steps.total()
    row |= {"events": controller.steps.total(), "mean us": mean_us}
    row["cores"] = sum(controller.spent_s.values()) / seconds
    for kind, number in sorted(controller.steps.items()):
        row[f"{kind} us"] = 1e6 * controller.spent_s[kind] / number
    return row, mean_us


def bench_router_steps(quick: bool) -> Result:
    """The router's controller: what one event costs.

    Engines and clients are simulated in virtual time, nothing runs beside the controller.
    Microseconds of `Controller.step` by kind of event, with 24 prefill and 40 decode replicas and
    with eight times as many, requests by chance at a rate that they can bear, and at one that is
    too high for them (a part is refused, the rest waits).
    """
    result = Result()
    for times, (name, per_second) in itertools.product(TIMES, LOADS):
        row, mean_us = cost(per_second, (QUICK_S if quick else MEASURED_S) / times, times)
        result.rows.append({"load": name} | row)
        what = f"an event, {times * (PREFILL + DECODE)} replicas, load {name}"
        result.targets.append(Target(what, mean_us, MAX_MEAN_US, False, "us"))
    return result


# Bodies and streams

CHUNKS = 1000
CHARS_PER_TOKEN = 4
PROMPT_TOKENS = (1_000, 32_000, 128_000)
SPLICES, QUICK_SPLICES = 40, 3
MAX_CHUNK_US = 20.0
MAX_BODY_MS = 5.0


def chat_body(prompt_tokens: int, **fields: object) -> bytes:
    """As a client with `json.dumps` writes it."""
    word = "word " * (prompt_tokens * CHARS_PER_TOKEN // 5)
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": word}]
    return json.dumps({"model": "m", "messages": messages, "stream": True, **fields}).encode()


def completion_body(prompt_tokens: int, **fields: object) -> bytes:
    ids = list(range(10_000, 10_000 + prompt_tokens))
    return json.dumps({"model": "m", "prompt": ids, "stream": True, **fields}).encode()


def head(kind: ApiPath) -> str:
    name = "chat.completion.chunk" if kind is ApiPath.CHAT else "text_completion"
    return f'{{"id":"id-0123456789abcdef","object":"{name}","created":1700000000,"model":"m",'


def first_chunk(kind: ApiPath, ids: bytes) -> bytes:
    if kind is ApiPath.CHAT:
        choice = '{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,'
        choice += '"finish_reason":null}'
        text = f'{head(kind)}"choices":[{choice}],"prompt_token_ids":'
        return text.encode() + ids + b',"prompt_text":null}'
    return chunk(kind, 0).replace(b'"prompt_token_ids":null', b'"prompt_token_ids":' + ids)


def chunk(kind: ApiPath, turn: int) -> bytes:
    rest = '"finish_reason":null'
    if kind is ApiPath.CHAT:
        body = f'"delta":{{"content":" word{turn}"}},"logprobs":null,{rest}'
    else:
        body = f'"text":" word{turn}","logprobs":null,{rest},"stop_reason":null,'
        body += '"prompt_token_ids":null'
    choice = f'{{"index":0,{body},"token_ids":[{10_000 + turn}]}}'
    return f'{head(kind)}"choices":[{choice}]}}'.encode()


def timed(action: Callable[[], object], repeats: int) -> list[float]:
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - start)
    return seconds


def splice_row(what: str, seconds: list[float], per: int = 1, of: str = "") -> Row:
    return {"what": what, "of": of, **spread("", "us", [1e6 * each / per for each in seconds])}


def stream_rows(kind: ApiPath, repeats: int) -> list[Row]:
    request = parse_request(kind, body_of(kind, 1_000))
    first = first_chunk(kind, b"[1,2,3]")
    chunks = [chunk(kind, turn) for turn in range(CHUNKS)]
    framed = [frames((each,)) for each in chunks]
    wire = b"".join(framed)

    def feed() -> None:
        resumer = StreamResumer(request)
        resumer.feed(first)
        for each in chunks:
            resumer.feed(each)

    def split() -> None:
        events = Events()
        for each in framed:
            events.feed(each)

    actions: dict[str, Callable[[], object]] = {
        "feed, a chunk": feed,
        "split, a chunk a read": split,
        "split, all in one read": lambda: Events().feed(wire),
    }
    of = kind.name.lower()
    return [
        splice_row(what, timed(action, repeats), CHUNKS, of) for what, action in actions.items()
    ]


def body_of(kind: ApiPath, prompt_tokens: int) -> bytes:
    make = chat_body if kind is ApiPath.CHAT else completion_body
    return make(prompt_tokens, max_tokens=2 * CHUNKS, temperature=0)


def size_rows(kind: ApiPath, prompt_tokens: int, repeats: int) -> list[Row]:
    of = f"{kind.name.lower()}, {prompt_tokens // 1000}k prompt tokens"
    raw = body_of(kind, prompt_tokens)
    request = parse_request(kind, raw)
    ids = json.dumps(list(range(10_000, 10_000 + prompt_tokens)), separators=(",", ":")).encode()
    first = first_chunk(kind, ids)
    fresh = [StreamResumer(request) for _ in range(repeats)]

    def resumed() -> None:
        resume_body(request, joined_ids(ids, range(500)), 500, 1, 1000)

    def lost() -> None:
        resumer = StreamResumer(request)
        resumer.feed(first)
        for turn in range(3):
            resumer.feed(chunk(kind, turn))
        assert isinstance(resumer.lost(), Resume)

    actions: dict[str, Callable[[], object]] = {
        "parse a body": lambda: parse_request(kind, raw),
        "prefill body": request.prefill_body,
        "whole body": lambda: request.whole_body(256, 1000, True),
        "feed, the first chunk": lambda: fresh.pop().feed(first),
        "resume body": resumed,
        "first chunk, three more, lost": lost,
    }
    return [splice_row(what, timed(action, repeats), of=of) for what, action in actions.items()]


def bench_splice(quick: bool) -> Result:
    """What the router does with bodies and streams, in time of its only thread.

    Bodies and chunks are vLLM's, byte for byte, without an engine. A chunk is measured as part of a
    stream of a thousand, whose first, which may carry the prompt's token ids, has rows of its own.
    """
    repeats = QUICK_SPLICES if quick else SPLICES
    rows = [each for kind in READ for each in stream_rows(kind, repeats)]
    for prompt_tokens in PROMPT_TOKENS:
        rows += [each for kind in READ for each in size_rows(kind, prompt_tokens, repeats)]
    values = {(each["what"], each["of"]): each["p50 us"] for each in rows}
    slowest = max(float(str(values["feed, a chunk", kind.name.lower()])) for kind in READ)
    parse = float(str(values["parse a body", "chat, 128k prompt tokens"])) / 1000
    targets = [
        Target("feed a chunk, p50", slowest, MAX_CHUNK_US, False, "us"),
        Target("parse a chat of 128k tokens, p50", parse, MAX_BODY_MS, False, "ms"),
    ]
    return Result(rows, targets, ["one thread; the memory of a body is not counted"])


if __name__ == "__main__":
    if sys.argv[1:2] in (["pass"], ["alone"]):
        serves = _pass_through if sys.argv[1] == "pass" else _data_plane_alone
        uvloop.install()
        asyncio.run(serves(int(sys.argv[2]), sys.argv[3:]))
    else:
        helpers = "benchmarks.bare_proxy", "benchmarks.cheap_engine"
        run_script(__doc__, preload=(*IMPORTED, *helpers))
