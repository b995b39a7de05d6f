"""A client of the router that records the content of each stream."""

import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.support.deployment import MODEL

CALL_TIMEOUT_S = 180.0


@dataclass(slots=True)
class Told:
    """The data that a client received in a stream."""

    status: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish: str | None = None
    usage: Mapping[str, Any] | None = None
    error: Mapping[str, Any] | None = None
    is_done: bool = False
    chunks: int = 0


def words(seed: int, count: int) -> str:
    """Return a prompt whose beginning is unique to the seed."""
    return " ".join(f"{seed} story {(seed * 7919 + n * 104_729) % 1000}" for n in range(count))


def complete(
    front: str, prompt: str, on_chunk: Callable[[Told], None] | None = None, **more: Any
) -> Told:
    """Stream a completion; call `on_chunk` after each chunk."""
    body = {
        **{"model": MODEL, "prompt": prompt, "temperature": 0, "stream": True},
        **{"return_token_ids": True, "ignore_eos": True, **more},
        "stream_options": {"include_usage": True},
    }
    return _stream(f"{front}/v1/completions", body, on_chunk)


def chat(
    front: str, content: str, on_chunk: Callable[[Told], None] | None = None, **more: Any
) -> Told:
    """Stream a chat; call `on_chunk` after each chunk."""
    body = {
        **{"model": MODEL, "messages": [{"role": "user", "content": content}]},
        **{"temperature": 0, "stream": True, "ignore_eos": True, **more},
        "stream_options": {"include_usage": True},
    }
    return _stream(f"{front}/v1/chat/completions", body, on_chunk)


def _stream(url: str, body: Mapping[str, Any], on_chunk: Callable[[Told], None] | None) -> Told:
    told = Told()
    with httpx.stream("POST", url, json=body, timeout=CALL_TIMEOUT_S) as answer:
        told.status = answer.status_code
        for line in answer.iter_lines():
            if line == "data: [DONE]":
                told.is_done = True
            elif line.startswith("data: "):
                _take(told, json.loads(line[6:]))
                if on_chunk is not None:
                    on_chunk(told)
            elif line.startswith("{"):
                told.error = json.loads(line).get("error")
    return told


def _take(told: Told, chunk: Mapping[str, Any]) -> None:
    told.chunks += 1
    told.error = chunk.get("error", told.error)
    told.usage = chunk.get("usage") or told.usage
    for choice in chunk.get("choices", ()):
        told.text += choice.get("text") or (choice.get("delta") or {}).get("content") or ""
        told.token_ids += choice.get("token_ids") or ()
        told.finish = choice.get("finish_reason") or told.finish


def once_at(chunk: int, do: Callable[[], None]) -> Callable[[Told], None]:
    """Return a callback that calls `do` once, when the stream has this many chunks."""
    is_done = threading.Event()

    def look(told: Told) -> None:
        if told.chunks >= chunk and not is_done.is_set():
            is_done.set()
            do()

    return look
