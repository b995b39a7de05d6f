"""What goes wrong with a scripted engine, as its clients see it."""

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import aiohttp
import pytest

from tests.support.scripted_engine import Listener, ScriptedEngine
from tests.support.scripted_spec import Fault, FaultBoard, FaultKind, RequestFaults, ScriptedSpec

if TYPE_CHECKING:
    from tests.support.scripted_http import Handler

SPEC = ScriptedSpec(step_base_s=0.002, decode_sequence_s=0, default_temperature=0.0)
BOUND_S = 10.0
SHORT_S = 0.15  # after which a client gives up on what never comes
POLL_S = 0.005
COMPLETIONS = "/v1/completions"
ASKED: dict[str, Any] = {"prompt": "once", "max_tokens": 8}
T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    # Not uvloop: its `close` never ends for a server that was cancelled as it began to listen.
    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
        return runner.run(asyncio.wait_for(main, 2 * BOUND_S))


class Outcome(NamedTuple):
    """What came of a request: the status, the type, the events, and how it ended."""

    status: int
    kind: str
    events: list[str]
    end: str


class Client(NamedTuple):
    engine: ScriptedEngine
    session: aiohttp.ClientSession

    async def ask(
        self, stream: bool = True, timeout_s: float = BOUND_S, request_id: str = "", **body: Any
    ) -> Outcome:
        """Ask for tokens, whatever comes of it."""
        said, status, kind = b"", 0, ""
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        headers = {"X-Request-Id": request_id} if request_id else {}
        asked = {**ASKED, **body, "stream": stream}
        end = "well"
        try:
            async with self.session.post(
                COMPLETIONS, json=asked, timeout=timeout, headers=headers
            ) as answer:
                status, kind = answer.status, answer.content_type
                async for part in answer.content.iter_any():
                    said += part
        except TimeoutError:
            end = "timeout"
        except aiohttp.ClientError as error:
            end = type(error).__name__
        parts = said.decode().split("\n\n") if stream else [said.decode()]
        return Outcome(status, kind, [part.removeprefix("data: ") for part in parts if part], end)

    async def status(self, path: str, timeout_s: float = BOUND_S) -> int:
        """Of a GET; 0 if there is no answer, -1 if there is nobody."""
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self.session.get(path, timeout=timeout) as answer:
                return answer.status
        except aiohttp.ClientConnectorError:
            return -1
        except (TimeoutError, aiohttp.ClientError):
            return 0


@contextlib.asynccontextmanager
async def served(spec: ScriptedSpec = SPEC) -> AsyncIterator[Client]:
    engine = ScriptedEngine(spec)
    url = await engine.start()
    try:
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(url, connector=connector) as session:
            yield Client(engine, session)
    finally:
        await engine.stop()


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(BOUND_S):
        while not holds():
            await asyncio.sleep(POLL_S)


def tokens(outcome: Outcome) -> int:
    """Whole chunks with tokens."""
    return sum('"object":"text_completion","created":' in event for event in outcome.events)


# Streams and answers in one piece: (fault, status, type, tokens, is there [DONE], end)
SPOILED: list[tuple[Fault, int, str, int, bool, str]] = [
    (Fault(kind=FaultKind.CUT, after_tokens=3), 200, "text/event-stream", 3, False, "cut"),
    (Fault(kind=FaultKind.CUT), 200, "text/event-stream", 0, False, "cut"),
    (Fault(kind=FaultKind.DIE, after_tokens=3), 200, "text/event-stream", 3, False, "cut"),
    (Fault(kind=FaultKind.STALL, after_tokens=3), 200, "text/event-stream", 3, False, "timeout"),
    (Fault(kind=FaultKind.STALL), 200, "text/event-stream", 0, False, "timeout"),
    (Fault(kind=FaultKind.NO_DONE), 200, "text/event-stream", 8, False, "well"),
    (Fault(kind=FaultKind.NO_DONE, after_tokens=0), 200, "text/event-stream", 0, False, "well"),
    (Fault(kind=FaultKind.ERROR, after_tokens=3), 200, "text/event-stream", 3, True, "well"),
    (Fault(kind=FaultKind.HANG), 0, "", 0, False, "timeout"),
    (Fault(kind=FaultKind.STATUS), 500, "text/html", 0, False, "well"),
    (Fault(kind=FaultKind.BUSY), 503, "application/json", 0, False, "well"),
    (Fault(kind=FaultKind.NOT_HTTP), 0, "", 0, False, "ServerDisconnectedError"),
    (Fault(kind=FaultKind.WRONG_TYPE), 200, "text/html", 8, True, "well"),
]


@pytest.mark.parametrize(
    ("fault", "status", "kind", "num_tokens", "is_done", "end"),
    SPOILED,
    ids=[f"{row[0].kind.value} {row[0].after_tokens}" for row in SPOILED],
)
def test_a_stream_is_spoiled(
    fault: Fault, status: int, kind: str, num_tokens: int, is_done: bool, end: str
) -> None:
    async def main() -> None:
        async with served() as client:
            client.engine.fail(replace(fault, times=1))
            timeout_s = SHORT_S if end == "timeout" else BOUND_S
            outcome = await client.ask(timeout_s=timeout_s)
            ends = {"cut": ("ClientPayloadError",), "ServerDisconnectedError": ALIEN}
            assert outcome.end in ends.get(end, (end,))
            assert (outcome.status, outcome.kind) == (status, kind)
            assert tokens(outcome) == num_tokens
            assert ("[DONE]" in outcome.events) == is_done
            if fault.kind is FaultKind.DIE:
                assert await client.status("/health") == -1
            else:
                assert (await client.ask()).events[-1] == "[DONE]"
            assert client.engine.counts.aborted == (end == "timeout")

    run(main())


ALIEN = ("ServerDisconnectedError", "ClientResponseError", "ClientOSError")


def test_errors_within_a_stream_and_instead_of_it_are_vllms() -> None:
    async def main() -> None:
        async with served() as client:
            client.engine.fail(Fault(kind=FaultKind.ERROR, after_tokens=2))
            streamed, whole = await client.ask(), await client.ask(stream=False)
            assert whole.status == 500
            error = json.loads(whole.events[0])
            assert error == json.loads(streamed.events[-2])
            assert error["error"]["type"] == "InternalServerError"
            client.engine.board.clear()
            client.engine.fail(FaultKind.BUSY)
            busy = json.loads((await client.ask()).events[0])["error"]
            assert (busy["type"], busy["code"]) == ("Service Unavailable", 503)

    run(main())


@pytest.mark.parametrize("stream", [True, False])
def test_what_is_no_json_comes_once_among_what_is(stream: bool) -> None:
    async def main() -> None:
        async with served() as client:
            client.engine.fail(Fault(kind=FaultKind.BROKEN_JSON, after_tokens=2))
            outcome = await client.ask(stream)
            broken = []
            for event in outcome.events:
                try:
                    json.loads(event)
                except json.JSONDecodeError:
                    broken.append(event)
            assert len(broken) == (2 if stream else 1)  # [DONE] is none either
            assert (tokens(outcome), outcome.end) == (8 if stream else 1, "well")

    run(main())


@pytest.mark.parametrize(
    ("kind", "status", "end"),
    [(FaultKind.CUT, 0, "cut"), (FaultKind.STALL, 0, "timeout"), (FaultKind.NO_DONE, 200, "well")],
)
def test_answers_in_one_piece_are_spoiled_too(kind: FaultKind, status: int, end: str) -> None:
    async def main() -> None:
        async with served() as client:
            client.engine.fail(Fault(kind=kind, after_tokens=3 if status == 0 else None))
            outcome = await client.ask(False, SHORT_S if end == "timeout" else BOUND_S)
            assert outcome.status == status
            assert outcome.end in {"cut": ALIEN}.get(end, (end,))

    run(main())


def test_a_late_answer_is_late_and_right() -> None:
    async def main() -> None:
        async with served() as client:
            client.engine.fail(Fault(kind=FaultKind.SLOW, seconds=0.1, times=1))
            began = asyncio.get_running_loop().time()
            assert tokens(await client.ask()) == 8
            assert asyncio.get_running_loop().time() - began >= 0.1

    run(main())


def test_faults_may_be_of_other_paths() -> None:
    async def main() -> None:
        async with served() as client:
            rubbish = Fault(
                kind=FaultKind.STATUS, status=200, body="{not metrics", paths=("/metrics",)
            )
            client.engine.fail(rubbish)
            client.engine.fail(Fault(kind=FaultKind.HANG, paths=("/health",)))
            async with client.session.get("/metrics") as answer:
                assert (answer.status, await answer.text()) == (200, "{not metrics")
            assert await client.status("/health", SHORT_S) == 0
            assert tokens(await client.ask()) == 8
            assert client.engine.board.faults()[0] == rubbish

    run(main())


def test_a_fault_may_be_of_one_request() -> None:
    async def main() -> None:
        async with served() as client:
            client.engine.fail(Fault(kind=FaultKind.CUT, after_tokens=2, request_id="one"))
            one, other = await asyncio.gather(
                client.ask(request_id="one"), client.ask(request_id="other")
            )
            assert (tokens(one), tokens(other)) == (2, 8)

    run(main())


def test_faults_are_used_up() -> None:
    seen: list[Fault] = []
    board = FaultBoard(seen.append)
    busy = Fault(kind=FaultKind.BUSY, times=2)
    board.set(busy)
    assert [board.at_arrival(COMPLETIONS, "") for _ in range(3)] == [[busy], [busy], []]
    assert board.faults() == []
    die = Fault(kind=FaultKind.DIE, after_tokens=3)
    board.set(die)
    assert board.has_streams
    request, other = RequestFaults(board, COMPLETIONS, "x"), RequestFaults(board, "/health", "x")
    assert [request.under_way(count) for count in (0, 2, 3, 4)] == [[], [], [die], []]
    assert (seen, other.under_way(3)) == ([die], [])
    board.clear()
    assert not board.has_streams
    board.set(Fault(kind=FaultKind.REFUSE))
    assert (len(seen), board.faults()) == (2, [])


# The engine as a whole


def test_a_death_ends_everything_and_what_comes_back_is_new() -> None:
    async def main() -> None:
        async with served() as client:
            engine = client.engine
            assert tokens(await client.ask()) == 8
            asking = [asyncio.create_task(client.ask(max_tokens=4000)) for _ in range(5)]
            await until(lambda: engine.counts.tokens > 60)
            engine.fail(Fault(kind=FaultKind.DIE, seconds=0.2))
            outcomes = await asyncio.gather(*asking)
            assert {outcome.end for outcome in outcomes} == {"ClientPayloadError"}
            assert all(tokens(outcome) > 0 for outcome in outcomes)
            assert await client.status("/health") == -1
            await asyncio.wait_for(engine.ready(), BOUND_S)
            assert tokens(await client.ask()) == 8
            assert engine.core is not None
            assert engine.core.stats.generation_tokens == 8
            assert (engine.counts.deaths, engine.counts.aborted) == (1, 0)

    run(main())


def test_who_is_refused_does_not_disturb_who_is_there() -> None:
    async def main() -> None:
        async with served() as client:
            asking = asyncio.create_task(client.ask(max_tokens=100))
            await until(lambda: client.engine.counts.tokens > 3)
            client.engine.fail(FaultKind.REFUSE)
            assert await client.status("/health") == -1
            assert tokens(await asking) == 100
            client.engine.recover()
            await client.engine.ready()
            assert await client.status("/health") == 200

    run(main())


def test_a_frozen_engine_says_nothing_until_it_thaws() -> None:
    async def main() -> None:
        async with served() as client:
            asking = asyncio.create_task(client.ask(max_tokens=50))
            await until(lambda: client.engine.counts.tokens > 3)
            client.engine.fail(FaultKind.FREEZE)
            num_tokens = client.engine.counts.tokens
            assert await client.status("/health", SHORT_S) == 0
            assert await client.status("/metrics", SHORT_S) == 0
            assert client.engine.counts.tokens == num_tokens
            client.engine.recover()
            assert tokens(await asking) == 50
            client.engine.fail(Fault(kind=FaultKind.FREEZE, seconds=0.05))
            assert tokens(await client.ask()) == 8

    run(main())


@pytest.mark.parametrize("listens", [False, True])
def test_an_engine_that_loads_is_not_there(listens: bool) -> None:
    async def main() -> None:
        spec = replace(SPEC, load_s=0.3, listens_while_loading=listens)
        async with served(spec) as client:
            assert await client.status("/health") == (503 if listens else -1)
            assert (await client.ask()).status == (503 if listens else 0)
            await asyncio.wait_for(client.engine.ready(), BOUND_S)
            assert await client.status("/health") == 200
            assert tokens(await client.ask()) == 8

    run(main())


def test_a_death_while_it_loads_is_one() -> None:
    async def main() -> None:
        async with served(replace(SPEC, load_s=0.05)) as client:
            client.engine.fail(FaultKind.DIE)
            await asyncio.sleep(0.1)
            assert await client.status("/health") == -1

    run(main())


# Processes


def test_a_process_of_engines_is_told_what_goes_wrong_by_http() -> None:
    async def main() -> None:
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.support.scripted_engine"),
            *("--port", "0", "--count", "2", "--step-base-s", "0", "--no-prefix-caching"),
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            assert child.stdout is not None
            lines = [(await child.stdout.readline()).decode().strip() for _ in range(3)]
            assert lines[2] == "ready"
            async with aiohttp.ClientSession() as session:
                fault = {"kind": "busy", "times": 1}
                for body, status in ((fault, 200), ({"kind": "x"}, 400), ({**fault, "x": 1}, 400)):
                    async with session.post(f"{lines[0]}/faults", json=body) as answer:
                        assert answer.status == status
                async with session.get(f"{lines[0]}/faults") as answer:
                    told = asdict(Fault(kind=FaultKind.BUSY, times=1))
                    assert await answer.json() == [
                        {**told, "kind": "busy", "paths": list(told["paths"])}
                    ]
                statuses = []
                for url in (lines[0], lines[0], lines[1]):
                    async with session.post(f"{url}{COMPLETIONS}", json=ASKED) as answer:
                        statuses.append(answer.status)
                assert statuses == [503, 200, 200]
                async with session.get(f"{lines[0]}/counts") as answer:
                    counts = await answer.json()
                assert (counts["received"], counts["refused"]) == ({COMPLETIONS: 2}, 1)
                assert counts["last_body"] == ASKED
                async with session.delete(f"{lines[0]}/faults") as answer:
                    assert answer.status == 200
            child.send_signal(signal.SIGTERM)
            assert await child.wait() == 0
        finally:
            if child.returncode is None:
                child.kill()
                await child.wait()

    run(main())


def test_one_process_carries_many_engines_and_streams() -> None:
    async def main() -> None:
        async with contextlib.AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(served()) for _ in range(16)]
            outcomes = await asyncio.gather(
                *(client.ask(max_tokens=25) for client in clients for _ in range(8))
            )
            assert {tokens(outcome) for outcome in outcomes} == {25}
            assert sum(client.engine.counts.tokens for client in clients) == 16 * 8 * 25

    run(main())


def test_who_is_stopped_as_it_begins_to_listen_listens_no_more() -> None:
    """An engine that comes back may die just then."""

    async def handle(request: object) -> None:
        raise AssertionError("nobody asks")

    async def main() -> None:
        listener = Listener(cast("Handler", handle), "127.0.0.1", 0, 5.0)
        opening = asyncio.create_task(listener.open())
        await asyncio.sleep(0)  # asyncio listens, and waits for a turn of the loop
        opening.cancel()
        await asyncio.wait([opening])
        assert opening.cancelled()
        await listener.give_up()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", listener.port)

    run(main())
