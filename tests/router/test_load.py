"""The load generator against a small server that does as it is told."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from vllm_kvpool.errors import ConfigError
from vllm_kvpool.router import load as load_module
from vllm_kvpool.router.load import Progress, Target, run_load
from vllm_kvpool.router.load_stats import LoadResult, Outcome
from vllm_kvpool.router.load_trace import LoadSpec, arrivals

BOUND_S = 20.0
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
SHORT = {"prefix_words": 4, "prompt_words_max": 8, "output_tokens_max": 8}
STATE = {
    "now": 1.0,
    "replicas": [{"id": "r1", "state": "decode", "role": "decode", "locked": True, "more": 1}],
    "queue": {"requests": 2, "tokens": 30},
    "plan": None,
}


def spec(**changes: object) -> LoadSpec:
    fields = {"seconds": 0.4, "rate": 30.0, "burst_s": 0.0, "model": "m", **SHORT, **changes}
    return LoadSpec(**fields)  # type: ignore[arg-type]


class Stream:
    """An answer of several pieces."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})

    async def __aenter__(self) -> "Stream":
        await self._answer.prepare(self._request)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._answer.write_eof()

    async def say(self, *payloads: object) -> None:
        for payload in payloads:
            text = payload if isinstance(payload, str) else json.dumps(payload)
            await self._answer.write(f"data: {text}\n\n".encode())

    @property
    def answer(self) -> web.StreamResponse:
        return self._answer


async def complete(request: web.Request) -> web.StreamResponse:
    """All tokens that are wanted, in two pieces, and their count."""
    body = await request.json()
    usage = {
        "prompt_tokens": 12,
        "completion_tokens": body["max_tokens"],
        "prompt_tokens_details": {"cached_tokens": 5},
    }
    async with Stream(request) as stream:
        await stream.say({"choices": [{"text": "a"}]}, {"choices": [{"text": "b"}]})
        await stream.say({"choices": [], "usage": usage}, "[DONE]")
    return stream.answer


@asynccontextmanager
async def served(
    completions: Handler = complete, state: Handler | None = None, models: object = None
) -> AsyncIterator[str]:
    async def named(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "first"}]} if models is None else models)

    app = web.Application()
    app.router.add_post("/v1/completions", completions)
    app.router.add_post("/v1/chat/completions", completions)
    app.router.add_get("/v1/models", named)
    if state is not None:
        app.router.add_get("/state", state)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def loaded(load: LoadSpec, completions: Handler = complete) -> LoadResult:
    async def story() -> LoadResult:
        async with served(completions) as url:
            return await asyncio.wait_for(run_load(load, url), BOUND_S)

    return asyncio.run(story())


def test_every_request_is_sent_as_it_was_drawn_and_measured() -> None:
    load = spec()
    bodies = []

    async def remember(request: web.Request) -> web.StreamResponse:
        bodies.append(await request.json())
        return await complete(request)

    result = loaded(load, remember)
    expected = list(arrivals(load))
    assert len(expected) > 4
    assert sorted(body["prompt"] for body in bodies) == sorted(a.prompt for a in expected)
    assert {body["model"] for body in bodies} == {"m"}
    assert all(body["stream"] and body["ignore_eos"] for body in bodies)
    assert [each.at_s for each in result.requests] == [a.at_s for a in expected]
    assert [each.output_tokens for each in result.requests] == [a.output_tokens for a in expected]
    for each in result.requests:
        assert (each.outcome, each.status, each.why) == (Outcome.COMPLETED, 200, "")
        assert (each.prompt_tokens, each.cached_tokens, len(each.gaps_s)) == (12, 5, 1)
        assert each.ttft_s is not None
        assert 0 < each.ttft_s <= each.end_s - each.at_s
    assert result.seconds >= load.seconds


def test_the_model_is_asked_for_and_chat_is_spoken() -> None:
    bodies = []

    async def chat(request: web.Request) -> web.StreamResponse:
        assert request.path == "/v1/chat/completions"
        assert request.headers["Authorization"] == "Bearer key"
        bodies.append(await request.json())
        async with Stream(request) as stream:
            await stream.say({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
            await asyncio.sleep(0.05)
            await stream.say({"choices": [{"delta": {"content": "a"}}]})
            await stream.say({"choices": [{"delta": {"reasoning": "b"}}]}, "[DONE]")
        return stream.answer

    async def story() -> LoadResult:
        async with served(chat) as url:
            load = spec(endpoint="chat", model="", ignore_eos=False)
            return await asyncio.wait_for(run_load(load, Target(url, "key")), BOUND_S)

    result = asyncio.run(story())
    assert result.model == "first"
    assert bodies[0]["model"] == "first"
    assert bodies[0]["messages"][0]["role"] == "user"
    assert "ignore_eos" not in bodies[0]
    for each in result.requests:
        # Without counts of the server, pieces are counted; the announced role is none.
        assert (each.outcome, each.output_tokens) == (Outcome.COMPLETED, 2)
        assert each.ttft_s is not None
        assert each.ttft_s >= 0.05


@pytest.mark.parametrize("status", [429, 503])
def test_who_is_refused_is_counted_and_does_not_come_again(status: int) -> None:
    calls = []

    async def refuse(request: web.Request) -> web.Response:
        calls.append(request)
        return web.Response(status=status, headers={"Retry-After": "0"}, text="busy")

    load = spec()
    result = loaded(load, refuse)
    assert len(calls) == len(list(arrivals(load)))
    assert {each.outcome for each in result.requests} == {Outcome.SHED}
    assert {(each.status, each.why) for each in result.requests} == {(status, "busy")}


async def _error_in_stream(stream: Stream) -> None:
    await stream.say({"error": {"message": "out of memory"}}, "[DONE]")


async def _end_early(stream: Stream) -> None:
    await stream.say({"choices": [{"text": "b"}]})


async def _rubbish(stream: Stream) -> None:
    await stream.say("{not json", "[DONE]")


async def _cut(stream: Stream) -> None:
    assert stream._request.transport
    stream._request.transport.close()


@pytest.mark.parametrize(
    ("act", "why", "pieces"),
    [
        (_error_in_stream, "out of memory", 1),
        (_end_early, "the stream ended early, after 2 pieces", 2),
        (_rubbish, "DecodeError", 1),
        (_cut, "Client", 1),
    ],
)
def test_a_stream_that_breaks_is_a_failure(
    act: Callable[[Stream], Awaitable[None]], why: str, pieces: int
) -> None:
    async def broken(request: web.Request) -> web.StreamResponse:
        async with Stream(request) as stream:
            await stream.say({"choices": [{"text": "a"}]})
            await act(stream)
        return stream.answer

    result = loaded(spec(), broken)
    for each in result.requests:
        assert each.outcome is Outcome.FAILED
        assert why in each.why
        assert each.output_tokens == pieces


def test_another_status_is_a_failure_with_its_words() -> None:
    async def refuse(_: web.Request) -> web.Response:
        return web.Response(status=400, text="no such model")

    for each in loaded(spec(), refuse).requests:
        assert (each.outcome, each.status, each.why) == (Outcome.FAILED, 400, "no such model")


def test_nobody_there_is_a_failure_of_each() -> None:
    result = asyncio.run(run_load(spec(), "http://127.0.0.1:9"))
    assert {(each.outcome, each.status) for each in result.requests} == {(Outcome.FAILED, 0)}
    assert "Connect" in result.requests[0].why


def test_requests_do_not_wait_for_each_other() -> None:
    """An open loop: all are there at once, though none is answered before the last has come."""
    load = spec()
    total = len(list(arrivals(load)))
    here = 0
    all_here = asyncio.Event()

    async def wait_for_all(request: web.Request) -> web.StreamResponse:
        nonlocal here
        here += 1
        if here == total:
            all_here.set()
        await all_here.wait()
        return await complete(request)

    result = loaded(load, wait_for_all)
    assert {each.outcome for each in result.requests} == {Outcome.COMPLETED}
    last = result.requests[-1].at_s
    # Each waited from its own arrival for the last one's, and none was asked to come later.
    assert all(each.ttft_s and each.ttft_s >= last - each.at_s for each in result.requests)


async def hang(request: web.Request) -> web.StreamResponse:
    async with Stream(request) as stream:
        await stream.say({"choices": [{"text": "a"}]})
        await asyncio.sleep(300)
    return stream.answer


def test_what_takes_too_long_is_given_up() -> None:
    result = loaded(spec(request_timeout_s=0.3), hang)
    assert {(each.outcome, each.output_tokens) for each in result.requests} == {
        (Outcome.TIMED_OUT, 1)
    }


def test_no_more_are_under_way_than_allowed() -> None:
    result = loaded(spec(max_in_flight=3, request_timeout_s=1.0), hang)
    outcomes = [each.outcome for each in result.requests]
    assert outcomes[:3] == [Outcome.TIMED_OUT] * 3
    assert set(outcomes[3:]) == {Outcome.NOT_SENT}


def test_a_load_can_be_ended_early() -> None:
    async def story() -> LoadResult:
        stop = asyncio.Event()
        asyncio.get_running_loop().call_later(0.3, stop.set)
        async with served(hang) as url:
            load = run_load(spec(seconds=300.0), url, stop=stop)
            return await asyncio.wait_for(load, BOUND_S)

    result = asyncio.run(story())
    assert result.seconds < 5
    assert {each.outcome for each in result.requests} == {Outcome.UNFINISHED}


def test_a_load_that_is_cancelled_leaves_nothing_behind() -> None:
    async def story() -> set[str]:
        async with served(hang) as url:
            load = asyncio.create_task(run_load(spec(seconds=300.0), url, show=lambda _: None))
            await asyncio.sleep(0.3)
            load.cancel()
            await asyncio.gather(load, return_exceptions=True)
            assert load.cancelled()
            return {task.get_coro().__qualname__ for task in asyncio.all_tasks()}  # type: ignore[union-attr]

    assert not [name for name in asyncio.run(story()) if name.startswith("_Load")]


def test_the_router_is_watched_and_its_absence_tolerated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_module, "STATE_POLL_S", 0.05)
    answers = iter([web.json_response(STATE), web.Response(status=500), web.Response(text="{")])
    shown: list[tuple[int, bool]] = []

    async def state(request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == "Bearer secret"
        return next(answers, None) or web.json_response(STATE)

    def show(progress: Progress) -> None:
        shown.append((len(progress.states), progress.is_state_stale))

    async def story() -> LoadResult:
        async with served(state=state) as url:
            target = Target(url, admin_url=url, admin_token="secret")
            load = run_load(spec(seconds=1.0), target, show=show, show_every_s=0.01)
            return await asyncio.wait_for(load, BOUND_S)

    result = asyncio.run(story())
    assert len(result.states) >= 2
    router = result.states[0].router
    assert (router.replicas[0].id, router.replicas[0].locked, router.queue.tokens) == (
        "r1",
        True,
        30,
    )
    assert (router.migration.requests, router.plan) == (0, None)
    assert (1, True) in shown
    assert shown[-1] == (len(result.states), False)
    assert {each.outcome for each in result.requests} == {Outcome.COMPLETED}


@pytest.mark.parametrize("models", [{"data": []}, {"models": 1}, "x"])
def test_without_a_model_there_is_no_load(models: object) -> None:
    async def story() -> None:
        async with served(models=models) as url:
            await run_load(spec(model=""), url)

    with pytest.raises(ConfigError, match="names no model"):
        asyncio.run(story())
