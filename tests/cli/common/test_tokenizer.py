"""Prompts as text and as messages: an engine's `/tokenize`, or a model's own tokenizer."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.http_answers import http_server
from tests.support.models import BEGIN, add_tokenizer
from vllm_kvpool.cli.common.tokenizer import read_messages, tokenize
from vllm_kvpool.errors import ConfigError

MESSAGES = [{"role": "user", "content": "Which river?"}]


def answer(path: str, content: bytes) -> tuple[int, bytes]:
    """`POST /tokenize` as vLLM has it: a token for each character; messages are one text."""
    body = json.loads(content)
    text = str(body.get("model", "")) + "".join(body.get("tools", ()))
    text += body.get("prompt") or "".join(each["content"] for each in body["messages"])
    tokens = json.dumps({"tokens": [ord(each) for each in text], "count": len(text)}).encode()
    return 200 if path == "/tokenize" else 404, tokens


@pytest.fixture
def engine() -> Iterator[str]:
    with http_server(answer) as url:
        yield url


def test_an_engine_makes_the_tokens(engine: str) -> None:
    assert tokenize("abc", f"{engine}/") == [97, 98, 99]
    assert tokenize([{"role": "user", "content": "ab"}], engine) == [97, 98]
    chat = [{"role": "user", "content": "ab"}]
    assert tokenize(chat, engine, {"model": "m", "tools": ["t"]}) == [*map(ord, "mtab")]
    with pytest.raises(ConfigError, match="404"):
        tokenize("abc", f"{engine}/nowhere")


def test_a_model_s_own_tokenizer_makes_the_tokens(tmp_path: Path) -> None:
    model = str(add_tokenizer(tmp_path))
    text = tokenize("Which river?", model)
    chat = tokenize(MESSAGES, model)
    assert text
    assert chat[0] == tokenize(BEGIN, model)[-1]
    assert len(chat) > len(text)


def test_what_cannot_be_used_is_named() -> None:
    with pytest.raises(ConfigError, match=r"/tokenize.*refused"):
        tokenize("abc", "http://127.0.0.1:1")
    with pytest.raises(ConfigError, match="no directory /no/such/model"):
        tokenize("abc", "/no/such/model")


@pytest.mark.parametrize("text", [json.dumps(MESSAGES), json.dumps({"messages": MESSAGES})])
def test_messages_are_a_list_or_a_request(text: str) -> None:
    assert read_messages(text) == MESSAGES


@pytest.mark.parametrize("text", ["{", "{}", "[1]", '"x"'])
def test_messages_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expected a JSON list of messages"):
        read_messages(text)
