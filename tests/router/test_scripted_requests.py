"""What a scripted engine refuses, as vLLM does."""

import asyncio
import json
from dataclasses import replace
from typing import Any

from tests.router.scripted_client import (
    CHAT,
    COMPLETIONS,
    QUICK,
    STEADY,
    run,
    served,
)

PROMPT = {"prompt": "a"}
REFUSED: list[tuple[str, Any, int, str, str | None]] = [
    (COMPLETIONS, {**PROMPT, "model": "other"}, 404, "NotFoundError", "model"),
    (COMPLETIONS, {}, 400, "Bad Request", "prompt"),
    (COMPLETIONS, {"prompt": ""}, 400, "Bad Request", "prompt"),
    (COMPLETIONS, {**PROMPT, "max_tokens": "x"}, 400, "Bad Request", "body.max_tokens"),
    (COMPLETIONS, {**PROMPT, "max_tokens": 0}, 400, "BadRequestError", "max_tokens"),
    (COMPLETIONS, {**PROMPT, "max_tokens": 9000}, 400, "BadRequestError", "max_tokens"),
    (COMPLETIONS, {**PROMPT, "temperature": 3}, 400, "BadRequestError", "temperature"),
    (COMPLETIONS, {**PROMPT, "n": 0}, 400, "BadRequestError", "n"),
    (COMPLETIONS, {**PROMPT, "n": 16385}, 400, "BadRequestError", "n"),
    (COMPLETIONS, {"prompt": [1, 1 << 40]}, 400, "BadRequestError", "prompt"),
    (COMPLETIONS, {"prompt": [1] * 8193}, 400, "BadRequestError", "input_tokens"),
    (COMPLETIONS, {**PROMPT, "stream_options": {}}, 400, "Bad Request", "stream_options"),
    (CHAT, {"messages": "hello"}, 400, "Bad Request", "body.messages"),
    (CHAT, {"messages": [{"content": [{"image_url": ""}]}]}, 400, "BadRequestError", "messages"),
    (CHAT, b"{", 400, "Bad Request", "body.0"),
    (CHAT, b"\xff{}", 400, "Bad Request", "body.0"),
    ("/nowhere", {}, 404, "Not Found", None),
    ("/v1/models", {}, 405, "Method Not Allowed", None),
]


def test_what_it_refuses_is_refused_as_vllm_does() -> None:
    async def main() -> None:
        async with served() as client:
            for path, body, status, kind, param in REFUSED:
                data = body if isinstance(body, bytes) else json.dumps(body).encode()
                headers = {"Content-Type": "application/json"}
                async with client.session.post(path, data=data, headers=headers) as answer:
                    error = (await answer.json())["error"]
                    told = (answer.status, error["type"], error["param"], error["code"])
                    assert told == (status, kind, param, status), (path, body, error)
                    assert list(error) == ["message", "type", "param", "code"]
            async with client.session.post(COMPLETIONS, data=b"{}") as answer:
                assert "Unsupported Media Type" in (await answer.json())["error"]["message"]
            assert client.engine.counts.refused == len(REFUSED) + 1

    run(main())


WITH_KEY = (("", 401), ("Bearer other", 401), ("Basic secret", 401), ("bearer secret", 200))


def test_without_the_key_there_is_no_answer() -> None:
    async def main() -> None:
        async with served(replace(QUICK, api_key="secret")) as client:
            for given, status in WITH_KEY:
                headers = {"Authorization": given}
                async with client.session.get("/v1/models", headers=headers) as answer:
                    assert answer.status == status
                    if status == 401:
                        assert await answer.read() == b'{"error":"Unauthorized"}'
            async with client.session.get("/health") as answer:
                assert (answer.status, await answer.read()) == (200, b"")

    run(main())


def test_more_than_its_queue_may_hold_is_refused() -> None:
    async def main() -> None:
        async with served(replace(STEADY, max_num_queued_reqs=2)) as client:
            asked = {"prompt": "a", "max_tokens": 40}
            answers = await asyncio.gather(*(client.post(COMPLETIONS, **asked) for _ in range(3)))
            codes = sorted(json.loads(each).get("error", {}).get("code", 200) for each in answers)
            assert codes == [200, 200, 503]
            key = "vllm:admission_rejections_total,reason=max_num_queued_reqs"
            assert (await client.metrics())[key] == 1

    run(main())
