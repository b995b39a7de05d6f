"""Ways to hand a computed prompt from a prefill engine to a decode engine, and the proxy of all.

A `Way` says what both servers are started with and what the proxy tells them about a request; a
`Pair` is the two servers of one way. `hand_over` is the whole proxy.
"""

import asyncio
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import aiohttp
import torch

from benchmarks.common import DidNotFinish, late
from benchmarks.served import MODEL, Server
from tests.support.server_process import HOST, free_port

REQUIREMENTS = Path(__file__).parents[1] / "requirements" / "nixl.txt"
INSTALL_LIMIT_S = 300.0
NIXL_PAUSE_US = 1000
"""Pause of NIXL's progress thread between two polls; NIXL's default is none."""
STILL_AFTER_S = 0.01
"""With 0 workers miss notices at times, and wait for 5 s."""
DECODE_TOKENS = 4
ABORT_S = 60
"""After which MooncakeConnector's prefill gives up a request that decode has not fetched, and makes
steps until then; 480 by default."""


class NotInstalled(Exception):
    """A peer's package cannot be had; the text says why."""


def nixl_folder(requirements: Path = REQUIREMENTS, cache: Path = Path(sys.prefix)) -> Path:
    """NIXL's packages, installed beside the environment where they are missing; NotInstalled.

    Not into the environment: vLLM would find NIXL there in every other run.
    """
    target = cache / "kvpool-nixl"
    if target.is_dir():
        return target
    part = target.with_name(f"{target.name}.{os.getpid()}")
    command = [
        *(sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"),
        *("--no-input", "--no-deps", "--target", str(part), "--requirement", str(requirements)),
    ]
    try:
        done = subprocess.run(
            command, timeout=INSTALL_LIMIT_S, capture_output=True, text=True, check=False
        )
        if done.returncode:
            last = done.stderr.strip().splitlines()[-1:] or [f"status {done.returncode}"]
            raise NotInstalled(f"pip cannot install requirements/{requirements.name}: {last[0]}")
        part.rename(target)
    except subprocess.TimeoutExpired:
        raise NotInstalled(f"pip took more than {INSTALL_LIMIT_S:g} s") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return target


def prepare_nixl(folder: Path, pause_us: int) -> None:
    """Let a server find NIXL, whose progress thread pauses between two polls.

    vLLM would move all ranks to the last core of the machine, and NIXL's threads with them. Here a
    rank keeps its core, and NIXL's threads may use all.
    """
    sys.path.append(str(folder))
    import nixl._api as api  # type: ignore[import-not-found]
    import nixl._bindings as bindings  # type: ignore[import-not-found]
    from vllm.platforms.cpu import CpuPlatform

    make, start = bindings.nixlAgent, api.nixl_agent.__init__

    def agent(name: str, config: Any) -> Any:
        config.pthrDelay = pause_us
        return make(name, config)

    def start_anywhere(*args: Any, **kwargs: Any) -> None:
        own = os.sched_getaffinity(0)
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
        try:
            start(*args, **kwargs)
        finally:
            os.sched_setaffinity(0, own)

    bindings.nixlAgent = agent
    api.nixl_agent.__init__ = start_anywhere
    CpuPlatform.discover_numa_topology = classmethod(lambda cls: [])


def prepare_mooncake_connector() -> None:
    """Let vLLM's MooncakeConnector, which asks for its GPU's number, start without a GPU."""
    torch.accelerator.current_device_index = lambda: 0


def prepare_without_spin(prepare: Callable[[], None] | None) -> None:
    """Let vLLM's workers poll for their next step for `STILL_AFTER_S`, not for a second."""
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    start = functools.partialmethod(SpinCondition.__init__, busy_loop_s=STILL_AFTER_S)
    SpinCondition.__init__ = start  # type: ignore[method-assign, assignment]
    if prepare is not None:
        prepare()


WHOLE_PROMPT = 1 << 30  # tokens; the engine takes the prompt's own number


class Way:
    """How a prompt's KV gets from prefill to decode; this one is the pool's."""

    connector = "KVPoolConnector"
    roles: ClassVar[tuple[str, str]] = ("kv_both", "kv_both")
    prepare: Callable[[], None] | None = None
    """What each server does first."""
    polls = False
    """Whether threads poll where nothing is to be done."""
    asks_early: bool = True
    """True if the proxy asks decode when it asks prefill."""

    def __init__(self, name: str, store: str) -> None:
        self.name = name
        self._store = store

    def extra(self) -> dict[str, Any]:
        """Options of the connector; all others have their defaults."""
        return {"store": self._store}

    def config(self, *, is_decode: bool) -> dict[str, Any]:
        """Of one server."""
        return {
            "kv_connector": self.connector,
            "kv_role": self.roles[is_decode],
            "kv_connector_extra_config": self.extra(),
        }

    def env(self) -> dict[str, str]:
        """Of one server."""
        return {}

    def to_prefill(self, request_id: str) -> dict[str, Any]:
        """`kv_transfer_params` of the prompt at prefill."""
        return {"kvpool": {"hand_over": True}}

    def to_decode(
        self, request_id: str, answered: Mapping[str, Any], notices: Sequence[str] = ()
    ) -> dict[str, Any]:
        """`kv_transfer_params` of the prompt at decode.

        Where it asks early, `answered` is empty, and prefill tells at `notices` what is stored.
        """
        return {"kvpool": {"expect_tokens": WHOLE_PROMPT, "notices": list(notices)}}


class NixlWay(Way):
    """vLLM's NixlConnector: decode reads prefill's blocks."""

    connector = "NixlConnector"
    polls = True

    asks_early = False

    def __init__(self, folder: Path) -> None:
        super().__init__(f"NixlConnector, a poll each {NIXL_PAUSE_US / 1000:g} ms", "")
        self.prepare = functools.partial(prepare_nixl, folder, NIXL_PAUSE_US)

    def extra(self) -> dict[str, Any]:
        return {}

    def config(self, *, is_decode: bool) -> dict[str, Any]:
        return {**super().config(is_decode=is_decode), "kv_buffer_device": "cpu"}

    def env(self) -> dict[str, str]:
        return {
            "VLLM_NIXL_SIDE_CHANNEL_HOST": HOST,
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
            "UCX_RCACHE_MAX_UNRELEASED": "1024",  # as vLLM sets it where it imports NIXL first
        }

    def to_prefill(self, request_id: str) -> dict[str, Any]:
        return {"do_remote_decode": True, "do_remote_prefill": False}

    def to_decode(
        self, request_id: str, answered: Mapping[str, Any], notices: Sequence[str] = ()
    ) -> dict[str, Any]:
        return dict(answered["kv_transfer_params"])


class MooncakeWay(Way):
    """vLLM's MooncakeConnector: prefill writes into decode's blocks once decode asks."""

    connector = "MooncakeConnector"
    roles = ("kv_producer", "kv_consumer")

    asks_early = False

    def __init__(self) -> None:
        super().__init__("MooncakeConnector", "")
        self.prepare = prepare_mooncake_connector
        self._engine = uuid.uuid4().hex
        self._bootstrap_port = free_port()

    def extra(self) -> dict[str, Any]:
        return {"mooncake_protocol": "tcp"}

    def config(self, *, is_decode: bool) -> dict[str, Any]:
        own = {} if is_decode else {"engine_id": self._engine}
        return {**super().config(is_decode=is_decode), **own}

    def env(self) -> dict[str, str]:
        return {
            "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(self._bootstrap_port),
            "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": str(ABORT_S),
        }

    def to_prefill(self, request_id: str) -> dict[str, Any]:
        return {"do_remote_decode": True, "transfer_id": request_id}

    def to_decode(
        self, request_id: str, answered: Mapping[str, Any], notices: Sequence[str] = ()
    ) -> dict[str, Any]:
        return {
            "do_remote_prefill": True,
            "transfer_id": request_id,
            "remote_engine_id": self._engine,
            "remote_bootstrap_addr": f"http://{HOST}:{self._bootstrap_port}",
        }


@dataclass(frozen=True)
class Shape:
    """What an engine is started with beside the model."""

    block: int
    ranks: int = 1
    spins: bool = True
    """Whether its worker polls for its next step for a second, as vLLM has it."""

    def __str__(self) -> str:
        ranks = f", TP {self.ranks}" if self.ranks > 1 else ""
        return f"blocks of {self.block}{ranks}" + ("" if self.spins else ", no spinning")


@dataclass
class Pair:
    """Two servers of one way. `failure` says why no more is asked of them."""

    way: Way
    prefill: Server
    decode: Server
    failure: str = ""
    notices: list[str] = field(default_factory=list)
    """Where prefill tells what is stored, from its metrics, as a router reads them."""

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Let the servers run. Outside of a turn servers that poll stand still, and servers that
        have failed, as a request without an end keeps an engine making steps.
        """
        self._send_signal(signal.SIGCONT)
        try:
            yield
        finally:
            if self.way.polls or self.failure:
                self._send_signal(signal.SIGSTOP)

    def _send_signal(self, number: signal.Signals) -> None:
        for each in (self.prefill, self.decode):
            each.send_signal(number)

    def cpu_seconds(self) -> float:
        """Of both servers and their engines so far."""
        return self.prefill.cpu_seconds() + self.decode.cpu_seconds()

    def loaded_tokens(self) -> float:
        """Prompt tokens that decode's connector has brought so far."""
        return self.decode.counters()["vllm:external_prefix_cache_hits_total"]


@dataclass(frozen=True)
class Servers:
    """Starts servers of one model; their logs are in the directory."""

    model: Path
    directory: Path
    arguments: Sequence[str]

    def start(self, way: Way, shape: Shape, *, is_decode: bool) -> Server:
        """Start a server of a way, on the core of its kind; with more ranks, on all cores."""
        options = (
            *self.arguments,
            *("--block-size", str(shape.block), "--tensor-parallel-size", str(shape.ranks)),
            *("--kv-transfer-config", json.dumps(way.config(is_decode=is_decode))),
        )
        core = "|".join("01") if shape.ranks > 1 else str(int(is_decode))
        log = self.directory / f"{uuid.uuid4().hex}.log"
        prepare = way.prepare
        if not shape.spins:
            prepare = functools.partial(prepare_without_spin, way.prepare)
        return Server(self.model, core, options, way.env(), log, prepare)


def ways(
    master: str, directory: Path, segment: int, nixl: Callable[[], Path] = nixl_folder
) -> tuple[list[Way], dict[str, str]]:
    """All ways that there are here, the pool's first; why others are not, by their names.

    Each engine gives `segment` bytes of memory to Mooncake.
    """
    found = [
        Way("kvpool, Mooncake", f"mooncake://{master}?segment={segment}"),
        Way("kvpool, files", f"file://{directory}/pool?size=8GiB"),
        MooncakeWay(),
    ]
    missing = {}
    try:
        found.append(NixlWay(nixl()))
    except NotInstalled as error:
        missing[NixlWay.connector] = str(error)
    return found, missing


@contextmanager
def started(
    servers: Servers, some: Sequence[Way], shape: Shape, *, is_decode: bool
) -> Iterator[list[Server]]:
    """A server of each way; those of ways that poll then stand still.

    Servers of one rank start together, those of more one after another.
    """
    with ExitStack() as stack:
        made = []
        for way in some:
            made.append(stack.enter_context(servers.start(way, shape, is_decode=is_decode)))
            if shape.ranks > 1:
                made[-1].wait_ready()
        for way, each in zip(some, made, strict=True):
            each.wait_ready()
            stack.callback(each.send_signal, signal.SIGCONT)
            if way.polls:
                each.send_signal(signal.SIGSTOP)
        yield made


@asynccontextmanager
async def in_time(limit_s: float) -> AsyncIterator[None]:
    """DidNotFinish if a connection ends early, or all of it takes longer."""
    try:
        async with asyncio.timeout(limit_s):
            yield
    except TimeoutError:
        raise late(limit_s) from None
    except aiohttp.ClientError as error:
        raise DidNotFinish(f"{type(error).__name__}: {error}") from None


async def ask(
    session: aiohttp.ClientSession, at: Server, ids: Sequence[int], **more: Any
) -> aiohttp.ClientResponse:
    """Send a prompt; DidNotFinish if the server refuses it."""
    body = {"model": MODEL, "prompt": ids, "temperature": 0.0, "ignore_eos": True, **more}
    answer = await session.post(f"{at.url}/v1/completions", json=body)
    if answer.status != 200:
        raise DidNotFinish(f"HTTP {answer.status}")
    return answer


async def first_token(
    session: aiohttp.ClientSession, at: Server, ids: Sequence[int], **more: Any
) -> float:
    """The moment of the first token of a stream, which is then read to its end."""
    async with await ask(session, at, ids, max_tokens=DECODE_TOKENS, stream=True, **more) as answer:
        line = await answer.content.readline()
        moment = time.perf_counter()
        error = json.loads(line.removeprefix(b"data: ") or b"{}").get("error")
        if error:
            raise DidNotFinish(f"error {error['code']} in the stream: {error['message']}")
        await answer.read()
    return moment


async def hand_over(
    session: aiohttp.ClientSession,
    pair: Pair,
    ids: Sequence[int],
    limit_s: float,
    *,
    kill_prefill: bool = False,
) -> float:
    """The proxy of one request: seconds from prefill's answer to decode's first token.

    The prompt goes to prefill for one token, and to decode with what the way makes of prefill's
    answer or, where the way asks early, at the same time. With `kill_prefill` prefill is killed
    right after its answer. DidNotFinish if a server refuses, ends the connection or does not answer
    in `limit_s`.
    """
    request_id, way = uuid.uuid4().hex, pair.way

    def decode(answered: Mapping[str, Any]) -> asyncio.Task[float]:
        told = way.to_decode(request_id, answered, pair.notices)
        asked = first_token(session, pair.decode, ids, kv_transfer_params=told)
        return asyncio.create_task(asked)

    if way.asks_early and not pair.notices:
        pair.notices = pair.prefill.notice_endpoints()
    decoding = decode({}) if way.asks_early else None
    try:
        async with in_time(limit_s):
            told = way.to_prefill(request_id)
            async with await ask(
                session, pair.prefill, ids, max_tokens=1, kv_transfer_params=told
            ) as answer:
                answered = await answer.json()
            moment = time.perf_counter()
            if kill_prefill:
                pair.prefill.kill()
            decoding = decoding or decode(answered)
            return await decoding - moment
    finally:
        if decoding is not None:
            decoding.cancel()
