"""A client of scripted engines, for their tests."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from tests.support.scripted_batch import ScriptedPool
from tests.support.scripted_engine import ScriptedEngine
from tests.support.scripted_spec import ScriptedSpec

QUICK = ScriptedSpec(step_base_s=0, decode_sequence_s=0, default_temperature=0.0)
STEADY = replace(QUICK, step_base_s=0.005)  # slow enough that something can happen in between
BOUND_S = 10.0
POLL_S = 0.005
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(main, 2 * BOUND_S))


class Client(NamedTuple):
    """An engine, and a session whose paths are the engine's."""

    engine: ScriptedEngine
    session: aiohttp.ClientSession

    async def post(self, path: str, headers: dict[str, str] | None = None, **body: Any) -> bytes:
        async with self.session.post(path, json=body, headers=headers) as answer:
            return await answer.read()

    async def whole(self, **body: Any) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(await self.post(COMPLETIONS, **body))
        return answer

    async def metrics(self) -> dict[str, float]:
        """Samples by their name and what labels they have besides the engine and the model."""
        async with self.session.get("/metrics") as answer:
            text = await answer.text()
        return {
            sample.name
            + "".join(
                f",{name}={value}"
                for name, value in sorted(sample.labels.items())
                if name not in ("engine", "model_name") and "config" not in sample.name
            ): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }


@contextlib.asynccontextmanager
async def served(
    spec: ScriptedSpec = QUICK, pool: ScriptedPool | None = None
) -> AsyncIterator[Client]:
    engine = ScriptedEngine(spec, pool)
    url = await engine.start()
    timeout = aiohttp.ClientTimeout(total=BOUND_S)
    try:
        async with aiohttp.ClientSession(url, timeout=timeout) as session:
            yield Client(engine, session)
    finally:
        await engine.stop()


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(BOUND_S):
        while not holds():
            await asyncio.sleep(POLL_S)


def events(data: bytes) -> list[dict[str, Any]]:
    """The events of a stream that ended well."""
    parts = data.decode().split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""]
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]
