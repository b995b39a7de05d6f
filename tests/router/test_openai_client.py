"""The `openai` package as clients use it: whole answers, streams, errors, an engine that dies."""

import asyncio
from dataclasses import replace
from typing import Any

import openai
import pytest

from tests.support.router_rig import FAST, RouterRig

MESSAGES: Any = [{"role": "user", "content": "tell me of the sea"}]
ASK: Any = {"model": "scripted", "messages": MESSAGES, "temperature": 0, "max_tokens": 40}


def client(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


@pytest.mark.parametrize("dies", [False, True])
async def test_chats_and_completions_are_those_of_the_engine(dies: bool) -> None:
    """Also where the engine that decodes dies after the fifth chunk."""
    async with RouterRig(1, 2) as rig, client(rig.url) as ours, client(rig.reference.url) as its:
        assert [each.id async for each in ours.models.list()] == ["scripted"]
        whole = await ours.chat.completions.create(**ASK)
        expected = await its.chat.completions.create(**ASK)
        assert whole.choices[0].message == expected.choices[0].message
        assert whole.usage.completion_tokens == 40
        text, finish, chunks = "", None, 0
        asked = {**ASK, "stream": True, "stream_options": {"include_usage": True}}
        async for chunk in await ours.chat.completions.create(**asked):
            for choice in chunk.choices:
                text += choice.delta.content or ""
                finish = choice.finish_reason or finish
            chunks += 1
            if dies and chunks == 5:
                [busy] = rig.holders()
                rig.kill(busy)
        assert (text, finish) == (expected.choices[0].message.content, "length")
        assert rig.counts["resumed"] == dies
        given: Any = {"model": "scripted", "prompt": "the sea", "temperature": 0, "max_tokens": 9}
        answers = [await each.completions.create(**given) for each in (ours, its)]
        assert answers[0].choices[0].text == answers[1].choices[0].text


async def test_errors_are_those_that_the_package_knows() -> None:
    async with RouterRig(0, 1) as rig, client(rig.url) as ours:
        with pytest.raises(openai.NotFoundError):
            await ours.chat.completions.create(**{**ASK, "model": "other"})
        with pytest.raises(openai.BadRequestError, match="max_tokens"):
            await ours.chat.completions.create(**{**ASK, "max_tokens": -1})
    async with RouterRig(0, 1, front={"max_body_bytes": 100}) as rig, client(rig.url) as ours:
        with pytest.raises(openai.APIStatusError) as raised:
            await ours.chat.completions.create(**{**ASK, "user": "x" * 200})
        assert raised.value.status_code == 413


async def test_chats_of_several_turns_at_once_find_their_beginning_again() -> None:
    """Six chats of five turns; all but the first turn have most of the prompt cached."""

    async def talk(ours: openai.AsyncOpenAI, number: int) -> list[float]:
        shares = []
        messages: Any = [{"role": "user", "content": f"chat {number}: " + "of the sea " * 400}]
        for turn in range(5):
            answer = await ours.chat.completions.create(
                model="scripted", messages=messages, temperature=0, max_tokens=24
            )
            usage, text = answer.usage, answer.choices[0].message.content
            shares.append((usage.prompt_tokens_details.cached_tokens or 0) / usage.prompt_tokens)
            messages += [{"role": "assistant", "content": text}]
            messages += [{"role": "user", "content": f"and then, {turn}?"}]
        return shares

    spec = replace(FAST, enable_prompt_tokens_details=True)
    async with RouterRig(0, 3, spec=spec) as rig, client(rig.url) as ours:
        found = await asyncio.gather(*(talk(ours, number) for number in range(6)))
        assert rig.counts["served"] == 30
    for shares in found:
        assert shares[0] < 0.2, shares
        assert min(shares[1:]) > 0.5, shares
