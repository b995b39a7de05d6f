"""Sends a load to an OpenAI server and keeps what comes of it.

Owns the loop in which a load runs: one task a request, bounded by `max_in_flight`, one that asks
the router's admin address for its state, and one that shows progress. Nothing is sent again, and
nothing waits for an answer: 429 and 503 are counted, whatever they ask for.
"""

import asyncio
import itertools
import signal
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import aiohttp
import msgspec

from vllm_kvpool.errors import ConfigError, ProtocolError
from vllm_kvpool.router.load_stats import (
    LoadResult,
    Outcome,
    RequestResult,
    RouterView,
    StateSample,
)
from vllm_kvpool.router.load_trace import Arrival, LoadSpec, arrivals
from vllm_kvpool.router.sse import Events

SHED_STATUSES = frozenset({429, 503})
STATE_POLL_S = 1.0
STATE_TIMEOUT_S = 2.0
MAX_STATE_BYTES = 8 << 20
MAX_ERROR_BYTES = 2000
MODELS_TIMEOUT_S = 10.0
CONNECT_TIMEOUT_S = 10.0
DONE = b"[DONE]"


class Target(NamedTuple):
    """What a load is sent to, and the router's admin address, if its state is to be watched."""

    url: str
    api_key: str = ""
    admin_url: str = ""
    admin_token: str = ""


@dataclass(slots=True)
class Progress:
    """A load while it runs; lists grow."""

    spec: LoadSpec
    target: Target
    now_s: float = 0.0
    in_flight: int = 0
    sent: int = 0
    results: list[RequestResult] = field(default_factory=list)
    states: list[StateSample] = field(default_factory=list)
    is_state_stale: bool = False
    """The admin address has not answered when it was last asked."""


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: Any = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None

    @property
    def is_piece(self) -> bool:
        """Whether it is a part of the answer, not the announcement of a role."""
        delta = self.delta
        if delta is None:
            return self.text is not None
        return bool(delta.content or delta.reasoning or delta.reasoning_content or delta.tool_calls)


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


_CHUNK = msgspec.json.Decoder(_Chunk)
_STATE = msgspec.json.Decoder(RouterView)


class _Broken(Exception):
    """The answer is none of an OpenAI server, or stopped before its end."""


async def run_load(
    spec: LoadSpec,
    target: Target | str,
    *,
    show: Callable[[Progress], None] | None = None,
    show_every_s: float = 0.5,
    stop: asyncio.Event | None = None,
) -> LoadResult:
    """Run a load to its end, or until `stop` is set: then what is under way counts as unfinished.

    `show` is called in the loop, often. ConfigError if no model is given and none can be found.
    """
    if isinstance(target, str):
        target = Target(target)
    progress = Progress(spec, target)
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None, connect=CONNECT_TIMEOUT_S),
    ) as session:
        load = _Load(session, progress, spec.model or await _first_model(session, target))
        beside = [asyncio.create_task(load.show(show, show_every_s))] if show else []
        if target.admin_url:
            beside.append(asyncio.create_task(load.watch_router()))
        began_at = time.time()
        try:
            await load.run(stop or asyncio.Event())
        finally:
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)
    if show:
        show(progress)
    return LoadResult(
        spec=spec,
        url=target.url,
        model=load.model,
        began_at=began_at,
        seconds=progress.now_s,
        requests=tuple(sorted(progress.results, key=lambda result: result.at_s)),
        states=tuple(progress.states),
    )


def run_in_loop(make: Callable[[asyncio.Event], Coroutine[Any, Any, LoadResult]]) -> LoadResult:
    """Run a load in a loop of its own; an interrupt stops it early, with what it has."""

    async def run() -> LoadResult:
        stop = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, stop.set)
        return await make(stop)

    return asyncio.run(run())


class _Load:
    """The tasks of one load. Owned by its loop."""

    def __init__(self, session: aiohttp.ClientSession, progress: Progress, model: str) -> None:
        self.model = model
        self._session = session
        self._progress = progress
        self._spec = progress.spec
        self._zero = time.monotonic()

    def now_s(self) -> float:
        return time.monotonic() - self._zero

    async def run(self, stop: asyncio.Event) -> None:
        """Send everything, and wait for what was sent; after `stop`, for nothing."""
        under_way: set[asyncio.Task[None]] = set()
        stopped = asyncio.create_task(stop.wait())
        try:
            for arrival in arrivals(self._spec):
                # Also where it is late already: requests under way are to go on.
                await asyncio.wait({stopped}, timeout=max(arrival.at_s - self.now_s(), 0))
                if stopped.done():
                    break
                if len(under_way) >= self._spec.max_in_flight:
                    self._keep(self._result(arrival, Outcome.NOT_SENT))
                    continue
                task = asyncio.create_task(self._one(arrival))
                under_way.add(task)
                task.add_done_callback(under_way.discard)
            while under_way and not stopped.done():
                await asyncio.wait({stopped, *under_way}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            rest = [stopped, *under_way]
            for each in rest:
                each.cancel()
            await asyncio.gather(*rest, return_exceptions=True)
        self._progress.now_s = self.now_s()
        if not stop.is_set():
            self._progress.now_s = max(self.now_s(), self._spec.seconds)

    async def show(self, show: Callable[[Progress], None], every_s: float) -> None:
        while True:
            self._progress.now_s = self.now_s()
            show(self._progress)
            await asyncio.sleep(every_s)

    async def watch_router(self) -> None:
        """Ask the router for its state; without an answer the load goes on."""
        target = self._progress.target
        headers = _bearer(target.admin_token)
        while True:
            try:
                async with asyncio.timeout(STATE_TIMEOUT_S):
                    url = f"{target.admin_url.rstrip('/')}/state"
                    async with self._session.get(url, headers=headers) as answer:
                        answer.raise_for_status()
                        state = _STATE.decode(await answer.content.read(MAX_STATE_BYTES))
                self._progress.states.append(StateSample(self.now_s(), state))
                self._progress.is_state_stale = False
            except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError):
                self._progress.is_state_stale = True
            await asyncio.sleep(STATE_POLL_S)

    async def _one(self, arrival: Arrival) -> None:
        """One request, to its end, whatever that is."""
        progress = self._progress
        progress.sent += 1
        progress.in_flight += 1
        request = _Request(arrival, self.now_s)
        try:
            async with asyncio.timeout(self._spec.request_timeout_s):
                await request.run(self._session, self._progress.target, self._body(arrival))
            outcome = Outcome.SHED if request.status in SHED_STATUSES else Outcome.COMPLETED
        except TimeoutError:
            outcome = Outcome.TIMED_OUT
        except asyncio.CancelledError:
            outcome = Outcome.UNFINISHED
        except (aiohttp.ClientError, ProtocolError, _Broken, msgspec.DecodeError) as error:
            outcome = Outcome.FAILED
            request.why = request.why or f"{type(error).__name__}: {error}"
        progress.in_flight -= 1
        self._keep(self._result(arrival, outcome, request))

    def _keep(self, result: RequestResult) -> None:
        self._progress.results.append(result)

    def _result(
        self, arrival: Arrival, outcome: Outcome, request: "_Request | None" = None
    ) -> RequestResult:
        now_s = self.now_s()
        if request is None:
            return RequestResult(
                at_s=arrival.at_s, end_s=now_s, outcome=outcome, prefix=arrival.prefix
            )
        usage = request.usage or _Usage(completion_tokens=len(request.times))
        details = usage.prompt_tokens_details or _PromptDetails()
        times = request.times
        return RequestResult(
            at_s=arrival.at_s,
            end_s=now_s,
            outcome=outcome,
            prefix=arrival.prefix,
            lag_s=max(request.sent_s - arrival.at_s, 0.0),
            status=request.status,
            ttft_s=times[0] - arrival.at_s if times else None,
            gaps_s=tuple(later - sooner for sooner, later in itertools.pairwise(times)),
            output_tokens=usage.completion_tokens,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=details.cached_tokens or 0,
            why=request.why,
        )

    def _body(self, arrival: Arrival) -> tuple[str, bytes]:
        """Path and body of a request."""
        body: dict[str, object] = {
            "model": self.model,
            "max_tokens": arrival.output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._spec.ignore_eos:
            body["ignore_eos"] = True
        if self._spec.endpoint == "chat":
            body["messages"] = [{"role": "user", "content": arrival.prompt}]
            return "/v1/chat/completions", msgspec.json.encode(body)
        body["prompt"] = arrival.prompt
        return "/v1/completions", msgspec.json.encode(body)


class _Request:
    """What is known of a request so far. Owned by its task."""

    def __init__(self, arrival: Arrival, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self.sent_s = now_s()
        self.status = 0
        self.times: list[float] = []
        self.usage: _Usage | None = None
        self.why = ""

    async def run(
        self, session: aiohttp.ClientSession, target: Target, body: tuple[str, bytes]
    ) -> None:
        path, data = body
        headers = {"Content-Type": "application/json", **_bearer(target.api_key)}
        url = f"{target.url.rstrip('/')}{path}"
        async with session.post(url, data=data, headers=headers) as answer:
            self.status = answer.status
            if answer.status != 200:
                self.why = (await answer.content.read(MAX_ERROR_BYTES)).decode(errors="replace")
                if answer.status not in SHED_STATUSES:
                    raise _Broken(f"status {answer.status}")
                return
            await self._read(answer)

    async def _read(self, answer: aiohttp.ClientResponse) -> None:
        events, is_done = Events(), False
        # To the end of the answer, not just of the events, or its connection could not be reused.
        async for data in answer.content.iter_any():
            for event in events.feed(data):
                is_done = is_done or event == DONE
                if not is_done:
                    self._take(_CHUNK.decode(event))
        if not is_done:
            raise _Broken(f"the stream ended early, after {len(self.times)} pieces")

    def _take(self, chunk: _Chunk) -> None:
        if chunk.error is not None:
            raise _Broken(f"error in the stream: {chunk.error}"[:MAX_ERROR_BYTES])
        if any(choice.is_piece for choice in chunk.choices):
            self.times.append(self._now_s())
        self.usage = chunk.usage or self.usage


async def _first_model(session: aiohttp.ClientSession, target: Target) -> str:
    url = f"{target.url.rstrip('/')}/v1/models"
    try:
        async with (
            asyncio.timeout(MODELS_TIMEOUT_S),
            session.get(url, headers=_bearer(target.api_key)) as answer,
        ):
            answer.raise_for_status()
            models = msgspec.json.decode(await answer.content.read(), type=_Models)
            return models.data[0].id
    except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError, IndexError) as error:
        raise ConfigError(
            f"{url} names no model ({type(error).__name__}: {error}); is the server up? "
            "Else give the model"
        ) from error


def _bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"} if token else {}
