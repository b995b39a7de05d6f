"""The table of docs/router_failover.md says what the code does."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from vllm_kvpool.router.dataplane.request_body import READ, ApiPath, ClientRequest, parse_request
from vllm_kvpool.router.dataplane.resume import whole_answer
from vllm_kvpool.router.dataplane.resume.policy import Detokenize, ResumeMode, goes_on_elsewhere
from vllm_kvpool.router.dataplane.resume.stream_resumer import Refusal, Resume, StreamResumer

DOCUMENT = Path(__file__).parent.parent.parent / "docs" / "router_failover.md"
KINDS = {"completion": [ApiPath.COMPLETION], "chat": [ApiPath.CHAT], "both": list(READ)}
TEXT = "abcdef"
WORDS = {ResumeMode.RESUME: "resumed", ResumeMode.REPLAY: "begun again"}


def rows() -> list[tuple[ApiPath, str, str, str]]:
    found = []
    for line in DOCUMENT.read_text().splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) == 5 and cells[0].startswith("`{"):
            found += [(kind, cells[0].strip("`"), *cells[2:4]) for kind in KINDS[cells[1]]]
    assert len(found) > 30
    return found


def chunk(kind: ApiPath, text: str, token: int) -> bytes:
    choice: dict[str, Any] = {"index": 0, "finish_reason": None, "token_ids": [token]}
    if kind is ApiPath.CHAT:
        choice |= {"delta": {"content": text}}
    else:
        choice |= {"text": text}
    choice["logprobs"] = {"text_offset": [token], "tokens": [text], "content": [{"token": text}]}
    return json.dumps({"id": "1", "choices": [choice], "prompt_token_ids": [7]}).encode()


def asked(
    kind: ApiPath, fields: dict[str, Any], temperature: float, *, stream: bool = True
) -> ClientRequest:
    body: dict[str, Any] = {"model": "m", "stream": stream, "temperature": temperature}
    body |= {"prompt": "p"} if kind is ApiPath.COMPLETION else {"messages": []}
    return parse_request(kind, json.dumps(body | fields).encode())


def outcome(kind: ApiPath, fields: dict[str, Any], temperature: float) -> str:
    request = asked(kind, fields, temperature)
    resumer = StreamResumer(request)
    for token, text in enumerate(TEXT):
        resumer.feed(chunk(kind, text, token))
    step = resumer.lost()
    while isinstance(step, Detokenize):
        withheld = "c" * resumer.answer.withheld_chars
        step = resumer.detokenized(TEXT + withheld)
    if isinstance(step, Refusal):
        return "error"
    assert isinstance(step, Resume)
    return WORDS[step.mode]


@pytest.mark.parametrize(("kind", "fields", "greedy", "sampled"), rows())
def test_the_table(kind: ApiPath, fields: str, greedy: str, sampled: str) -> None:
    read = json.loads(fields)
    assert (outcome(kind, read, 0), outcome(kind, read, 0.8)) == (greedy, sampled)


@pytest.mark.parametrize(("kind", "fields", "greedy", "sampled"), rows())
def test_a_drain_waits_for_what_the_table_calls_an_error(
    kind: ApiPath, fields: str, greedy: str, sampled: str
) -> None:
    read = json.loads(fields)
    for temperature, becomes in ((0.0, greedy), (0.8, sampled)):
        # A stream with tools goes on as long as it has no tool call.
        may_call = "tools" in read and "tool_choice" not in read
        goes_on = becomes != "error" and not may_call
        assert goes_on_elsewhere(asked(kind, read, temperature)) is goes_on
        assert goes_on_elsewhere(asked(kind, read, temperature, stream=False))


@pytest.mark.parametrize("kind", [each for each in ApiPath if each not in READ])
def test_a_drain_waits_for_streams_that_are_passed_on(kind: ApiPath) -> None:
    for stream in (True, False):
        assert goes_on_elsewhere(asked(kind, {"input": "p"}, 0.0, stream=stream)) is not stream


def test_named_bounds_exist() -> None:
    import vllm_kvpool.router.dataplane.resume.stream_resumer as resumer

    for name in re.findall(r"`(MAX_[A-Z_]+)`", DOCUMENT.read_text()):
        assert name in vars(resumer)


def test_what_is_asked_for_in_one_piece_is_listed() -> None:
    table = DOCUMENT.read_text().partition("| Request has |")[2].partition("\n\n")[0]
    listed = re.findall(r"`(\w+)`", table)
    assert {*whole_answer._NOT_STREAMED, "tools"} <= set(listed)
