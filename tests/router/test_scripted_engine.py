"""A scripted engine as a client sees it, over real connections."""

import asyncio
import contextlib
import json
import re
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest

from tests.router.scripted_client import (
    CHAT,
    COMPLETIONS,
    QUICK,
    STEADY,
    events,
    run,
    served,
    until,
)
from tests.support.scripted_batch import DirectoryPool, ScriptedPool
from tests.support.scripted_core import CATCH_UP_S
from tests.support.scripted_spec import FaultKind
from tests.support.scripted_words import encode


def tokens_of(data: bytes) -> list[int]:
    return [
        token_id
        for event in events(data)
        for choice in event["choices"]
        for token_id in choice["token_ids"]
    ]


def text_of(data: bytes) -> str:
    return "".join(choice["text"] for event in events(data) for choice in event["choices"])


# What it says


@pytest.mark.parametrize("prompt", ["once upon a time", "caf\xe9 \u2192", "\U0001f600", "x" * 600])
def test_another_engine_continues_a_stream(prompt: str) -> None:
    async def main() -> None:
        spec = replace(QUICK, wide_probability=0.3, eos_probability=0.005)
        asked = {"stream": True, "return_token_ids": True, "max_tokens": 60}
        async with served(spec) as first, served(spec) as second:
            whole = await first.post(COMPLETIONS, prompt=prompt, **asked)
            tokens, text = tokens_of(whole), text_of(whole)
            boundaries = [
                number
                for number, event in enumerate(events(whole), 1)
                if event["choices"][0]["text"] and number < len(tokens)
            ]
            for number in boundaries[::7]:
                given = encode(prompt) + tokens[:number]
                rest = await second.post(
                    COMPLETIONS, **{**asked, "prompt": given, "max_tokens": 60 - number}
                )
                assert tokens_of(rest) == tokens[number:]
                so_far = "".join(e["choices"][0]["text"] for e in events(whole)[:number])
                assert so_far + text_of(rest) == text
                assert (
                    events(rest)[-1]["choices"][0]["finish_reason"]
                    == (events(whole)[-1]["choices"][0]["finish_reason"])
                )

    run(main())


def test_a_chat_goes_on_with_its_last_message() -> None:
    async def main() -> None:
        async with served() as client:
            question = {"role": "user", "content": [{"type": "text", "text": "hello"}]}
            whole = json.loads(await client.post(CHAT, messages=[question], max_tokens=20))
            answer = whole["choices"][0]["message"]["content"]
            begun = {"role": "assistant", "content": answer[:25]}
            rest = json.loads(
                await client.post(
                    CHAT,
                    messages=[question, begun],
                    max_completion_tokens=15,
                    add_generation_prompt=False,
                    continue_final_message=True,
                )
            )
            assert answer[:25] + rest["choices"][0]["message"]["content"] == answer

    run(main())


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_token_ids_change_nothing_else(path: str) -> None:
    async def main() -> None:
        async with served(replace(QUICK, wide_probability=0.3)) as client:
            asked = {
                "prompt": "once upon",
                "messages": [{"role": "user", "content": "hello"}],
                "stream": True,
                "max_tokens": 30,
                "stop": ["zz"],
            }
            answers = [
                await client.post(path, {"X-Request-Id": "one"}, **asked, return_token_ids=ids)
                for ids in (False, True)
            ]
            without, with_ids = (re.sub(rb'"created":\d+', b"", each) for each in answers)
            assert b"[" in re.sub(rb"choices.:\[|\[DONE\]", b"", with_ids)
            assert re.sub(rb'_ids":\[[\d,]+\]', b'_ids":null', with_ids) == without

    run(main())


def test_answers_carry_the_request_id() -> None:
    async def main() -> None:
        async with served() as client:
            asked = {"prompt": "a", "max_tokens": 1, "request_id": "body"}
            header = json.loads(await client.post(COMPLETIONS, {"X-Request-Id": "head"}, **asked))
            assert header["id"] == "cmpl-head"
            assert (await client.whole(**asked))["id"] == "cmpl-body"
            del asked["request_id"]
            first, second = [(await client.whole(**asked))["id"] for _ in range(2)]
            assert first != second
            assert first.startswith("cmpl-")

    run(main())


def test_random_answers_differ_and_seeded_ones_do_not() -> None:
    async def main() -> None:
        async with served() as client:
            asked = {"prompt": "once", "max_tokens": 12, "temperature": 0.7}
            texts = [(await client.whole(**asked))["choices"][0]["text"] for _ in range(2)]
            assert texts[0] != texts[1]
            texts = [(await client.whole(**asked, seed=5))["choices"][0]["text"] for _ in range(2)]
            assert texts[0] == texts[1]
            choices = (await client.whole(**asked, seed=5, n=2))["choices"]
            assert choices[0]["text"] == texts[0] != choices[1]["text"]

    run(main())


def test_several_prompts_and_choices_are_answered_by_their_index() -> None:
    async def main() -> None:
        async with served() as client:
            asked = {"prompt": ["once", "twice"], "n": 2, "max_tokens": 4}
            whole = await client.whole(**asked)
            texts = [choice["text"] for choice in whole["choices"]]
            assert texts[0] == texts[1] != texts[2] == texts[3]
            assert whole["usage"]["completion_tokens"] == 16
            streamed = dict.fromkeys(range(4), "")
            for event in events(await client.post(COMPLETIONS, stream=True, **asked)):
                for choice in event["choices"]:
                    streamed[choice["index"]] += choice["text"]
            assert list(streamed.values()) == texts

    run(main())


# The engine behind


def test_requests_beyond_its_capacity_wait() -> None:
    async def main() -> None:
        async with served(replace(STEADY, kv_blocks=8, max_model_len=128)) as client:
            asked = {"prompt": [1] * 60, "max_tokens": 40}
            tasks = [asyncio.create_task(client.post(COMPLETIONS, **asked)) for _ in range(4)]
            await until(lambda: client.engine.counts.tokens > 8)
            metrics = await client.metrics()
            running, waiting = (
                metrics[f"vllm:num_requests_{state}"] for state in ("running", "waiting")
            )
            assert running + waiting == 4
            assert 1 <= running <= 2
            assert metrics["vllm:kv_cache_usage_perc"] >= 0.5
            answers = await asyncio.gather(*tasks)
            assert len({json.loads(each)["choices"][0]["text"] for each in answers}) == 1
            metrics = await client.metrics()
            assert metrics["vllm:request_success_total,finished_reason=length"] == 4
            assert metrics["vllm:generation_tokens_total"] == 160
            assert metrics["vllm:num_preemptions_total"] > 0
            assert client.engine.counts.max_running == 2

    run(main())


def test_a_client_that_goes_away_is_not_computed_for() -> None:
    async def main() -> None:
        async with served(STEADY) as client:
            core = client.engine.core
            assert core is not None
            asked = {"prompt": "a", "max_tokens": 4000}
            async with client.session.post(COMPLETIONS, json={**asked, "stream": True}) as answer:
                await answer.content.readany()
            await until(lambda: client.engine.counts.aborted == 1)
            with contextlib.suppress(TimeoutError):
                short = aiohttp.ClientTimeout(total=0.05)
                await client.session.post(COMPLETIONS, json=asked, timeout=short)
            await until(lambda: client.engine.counts.aborted == 2)
            assert core.batch.is_empty
            assert core.batch.usage == 0
            assert client.engine.counts.received[COMPLETIONS] == 2

    run(main())


def test_a_client_that_reads_late_loses_nothing() -> None:
    async def main() -> None:
        async with served() as client:
            asked = {"prompt": "a", "max_tokens": 4000, "stream": True, "return_token_ids": True}
            headers = {"X-Request-Id": "x" * 4000}  # much more than sockets hold
            async with client.session.post(COMPLETIONS, json=asked, headers=headers) as answer:
                await until(lambda: client.engine.counts.finished == 1)
                said = events(await answer.read())
            tokens = [token_id for each in said for token_id in each["choices"][0]["token_ids"]]
            assert len(tokens) == 4000
            assert len(said) < 3900  # many came together
            whole = await client.whole(**{**asked, "stream": False})
            assert whole["choices"][0]["token_ids"] == tokens
            text = "".join(each["choices"][0]["text"] for each in said)
            assert whole["choices"][0]["text"] == text

    run(main())


def test_tokens_do_not_come_faster_than_steps_end() -> None:
    async def main() -> None:
        async with served(STEADY) as client:
            began = asyncio.get_running_loop().time()
            await asyncio.gather(*(client.whole(prompt="a", max_tokens=40) for _ in range(2)))
            # The two may share all but a step.
            assert asyncio.get_running_loop().time() - began >= 40 * STEADY.step_base_s - CATCH_UP_S

    run(main())


def test_two_engines_hand_a_prompt_over_by_the_pool() -> None:
    async def main() -> None:
        spec = replace(QUICK, chunk_tokens=16, put_s=0.15, enable_prompt_tokens_details=True)
        pool = ScriptedPool()
        async with served(spec, pool) as first, served(spec, pool) as second:
            loop = asyncio.get_running_loop()
            asked = {"prompt": list(range(1, 51)), "max_tokens": 1}
            produced = await first.whole(**asked)
            params = produced["kv_transfer_params"]
            assert params == {"kvpool": {"tokens": 48}}
            began = loop.time()
            consumed = await second.whole(**asked, kv_transfer_params=params)
            assert loop.time() - began > 0.1
            assert consumed["usage"]["prompt_tokens_details"]["cached_tokens"] == 48
            assert consumed["choices"] == produced["choices"]
            metrics = await first.metrics()
            saved = metrics["vllm:kvpool_bytes_total,direction=save,store=scripted"]
            assert saved == 48 * spec.kv_bytes_per_token
            assert (await second.metrics())["vllm:kvpool_hit_tokens_total"] == 48
            odd = {"kvpool": {"sav": False}}  # the connector warns, and saves nothing
            answer = await second.whole(**asked, kv_transfer_params=odd)
            assert answer["kv_transfer_params"] is None
            off = {"kvpool": {"save": False, "load": False}}
            unsaved = await second.whole(prompt=[7] * 50, max_tokens=1, kv_transfer_params=off)
            assert unsaved["kv_transfer_params"] is None

    run(main())


def test_what_was_not_put_before_a_death_is_not_there() -> None:
    async def main() -> None:
        spec = replace(QUICK, chunk_tokens=16, put_s=0.05, enable_prompt_tokens_details=True)
        pool = ScriptedPool()
        async with served(spec, pool) as first, served(spec, pool) as second:
            asked = {"prompt": list(range(1, 51)), "max_tokens": 1}
            await first.whole(**asked)
            first.engine.fail(FaultKind.DIE)
            params = {"kvpool": {"expect_tokens": 48, "expect_timeout_ms": 150}}
            consumed = await second.whole(**asked, kv_transfer_params=params)
            assert consumed["usage"]["prompt_tokens_details"]["cached_tokens"] == 0

    run(main())


def test_a_directory_is_a_pool_of_several_processes(tmp_path: Path) -> None:
    one, other = DirectoryPool(tmp_path), DirectoryPool(tmp_path)
    one.put([b"a" * 16, b"b" * 16])
    assert other.count([b"a" * 16, b"b" * 16, b"c" * 16]) == 2
    (tmp_path / "down").touch()
    assert (one.count([b"a" * 16]), other.put([b"c" * 16])) == (0, 0)
    (tmp_path / "down").unlink()
    assert other.count([b"c" * 16]) == 0
    one.clear()
    assert other.count([b"a" * 16]) == 0


def test_its_time_may_pass_faster() -> None:
    async def main() -> None:
        async with served(replace(QUICK, step_base_s=1.0, time_scale=1000)) as client:
            await client.whole(prompt="a", max_tokens=30)
            seconds = (await client.metrics())["vllm:time_to_first_token_seconds_sum"]
            assert 1.0 <= seconds < 1000
            buckets = [
                value
                for name, value in (await client.metrics()).items()
                if name.startswith("vllm:time_to_first_token_seconds_bucket")
            ]
            assert buckets == sorted(buckets)
            assert (buckets[0], buckets[-1]) == (0, 1)

    run(main())


def test_it_sleeps_and_wakes() -> None:
    async def main() -> None:
        async with served(STEADY) as client:
            asked = {"prompt": "a", "max_tokens": 2000}
            task = asyncio.create_task(client.whole(**asked))
            await until(lambda: client.engine.counts.tokens > 0)
            assert json.loads(await client.post("/sleep?level=1")) == {
                "status": "sleeping",
                "level": 1,
            }
            assert (await task)["choices"][0]["finish_reason"] == "abort"
            state = "vllm:engine_sleep_state,sleep_state="
            assert (await client.metrics())[f"{state}weights_offloaded"] == 1
            task = asyncio.create_task(client.whole(prompt="a", max_tokens=2))
            async with client.session.get("/is_sleeping") as answer:
                assert await answer.json() == {"is_sleeping": True}
            await until(lambda: client.engine.counts.received[COMPLETIONS] == 2)
            tokens = client.engine.counts.tokens
            await client.post("/wake_up")
            assert (await task)["usage"]["completion_tokens"] == 2
            assert client.engine.counts.tokens == tokens + 2
            assert (await client.metrics())[f"{state}awake"] == 1

    run(main())


def test_the_rest_of_its_endpoints() -> None:
    async def main() -> None:
        async with served() as client:
            tokens = json.loads(await client.post("/tokenize", prompt="once upon a time"))
            assert tokens == {
                "count": 4,
                "max_model_len": 8192,
                "tokens": encode("once upon a time"),
                "token_strs": None,
            }
            text = json.loads(await client.post("/detokenize", tokens=tokens["tokens"]))
            assert text == {"prompt": "once upon a time"}
            async with client.session.get("/v1/models") as answer:
                card = (await answer.json())["data"][0]
            assert (card["id"], card["max_model_len"]) == ("scripted", 8192)
            async with client.session.get("/version") as answer:
                assert await answer.json() == {"version": "0.32.0"}
            await client.post("/v1/completions", prompt="a", max_tokens=1)
            assert client.engine.counts.last_headers["host"]

    run(main())
