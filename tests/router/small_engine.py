"""A small model of an engine's stream, written from what vLLM's does, quirks included.

A token is one to three bytes, its id a 1 before them: any cut of a text into tokens is a tokenizer.
The detokenizer waits for the rest of a character; primed in the middle of one, it gives out all of
its prompt at once, as the one of `tokenizers` does. For stop strings it withholds as many
characters as the longest has, less one.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

EOS = 0
UNFINISHED = "\ufffd"
COMPLETION_MAX_TOKENS, LONGEST = 16, 10_000

NextToken = Callable[[Sequence[int]], int]


def token_of(data: bytes) -> int:
    assert 1 <= len(data) <= 3
    return int.from_bytes(b"\x01" + data, "big")


def bytes_of(token: int) -> bytes:
    return b"" if token == EOS else token.to_bytes(4, "big").lstrip(b"\0")[1:]


def tokens_of(text: str, sizes: Sequence[int] = (2,)) -> list[int]:
    """Cut into tokens of these sizes in turn."""
    data, tokens, turn = text.encode(), [], 0
    while data:
        size = sizes[turn % len(sizes)]
        tokens.append(token_of(data[:size]))
        data, turn = data[size:], turn + 1
    return tokens


def text_of(tokens: Sequence[int]) -> str:
    return b"".join(map(bytes_of, tokens)).decode("utf-8", "replace")


class Detokenizer:
    """Text as it may be given out."""

    def __init__(self, prompt: Sequence[int], body: dict[str, Any]) -> None:
        self._tokens = list(prompt)
        before = text_of(prompt)
        self._shown = 0 if before.endswith(UNFINISHED) else len(before)
        stop = body.get("stop") or []
        self._stops = [stop] if isinstance(stop, str) else stop
        self._includes = bool(body.get("include_stop_str_in_output"))
        self._withheld = 0 if self._includes else max(map(len, self._stops), default=1) - 1
        self._min_tokens = body.get("min_tokens") or 0
        self._num_tokens = 0
        self._text = ""
        self._given = 0

    def add(self, token: int) -> str | None:
        """One more token; the stop string that it completes."""
        self._num_tokens += 1
        self._tokens.append(token)
        whole = text_of(self._tokens)
        new = "" if whole.endswith(UNFINISHED) else whole[self._shown :]
        self._shown += len(new)
        self._text += new
        if not new or self._num_tokens <= self._min_tokens:
            return None
        found = []
        for stop in self._stops:
            at = self._text.find(stop, max(0, len(self._text) - len(new) - len(stop) + 1))
            if at >= 0:
                found.append((at + len(stop), self._stops.index(stop), at))
        if not found:
            return None
        end, index, begin = min(found)
        self._text = self._text[: end if self._includes else begin]
        return self._stops[index]

    def take(self, is_end: bool) -> str:
        until = len(self._text) - (0 if is_end else self._withheld)
        new = self._text[self._given : until] if until > self._given else ""
        self._given += len(new)
        return new


@dataclass
class SmallEngine:
    """Streams of one engine. `steps` are the tokens that come at once, in turn, again and again."""

    next_token: NextToken
    steps: Sequence[int] = (1,)
    created: int = 1
    takes_ids: bool = True
    """Whether it goes on from tokens in a chat."""
    bodies: list[dict[str, Any]] = field(default_factory=list)

    def stream(self, path: str, raw: bytes) -> list[bytes]:
        body = json.loads(raw)
        self.bodies.append(body)
        is_chat = "chat" in path
        prompt = self._prompt(body, is_chat)
        head = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-1",
            "object": "chat.completion.chunk" if is_chat else "text_completion",
            "created": self.created,
            "model": body["model"],
        }
        return [_dumped(head | chunk) for chunk in self._chunks(body, prompt, is_chat)] + [
            b"[DONE]"
        ]

    def detokenize(self, raw: bytes) -> str:
        return text_of(json.loads(raw)["tokens"])

    def _prompt(self, body: dict[str, Any], is_chat: bool) -> list[int]:
        if not is_chat:
            prompt = body["prompt"]
            return prompt if isinstance(prompt, list) else tokens_of(prompt)
        ids = (body.get("kv_transfer_params") or {}).get("prompt_token_ids")
        if ids is not None and self.takes_ids:
            return list(ids)
        return tokens_of("".join(f"{m['role']}: {m['content']}\n" for m in body["messages"]))

    def _chunks(
        self, body: dict[str, Any], prompt: list[int], is_chat: bool
    ) -> Iterator[dict[str, Any]]:
        gives_ids = bool(body.get("return_token_ids"))
        options = body.get("stream_options") or {}
        counts = bool(options.get("continuous_usage_stats")) and options.get("include_usage")
        if is_chat:
            choice = {"index": 0, "delta": {"role": "assistant", "content": ""}}
            choice |= {"logprobs": None, "finish_reason": None}
            usage = {"usage": _usage(len(prompt), 0)} if counts else {}
            ids = prompt if gives_ids else None
            yield {"choices": [choice], **usage, "prompt_token_ids": ids, "prompt_text": None}
        total, is_first = 0, True
        for new, text, end in self._outputs(body, prompt, is_chat):
            total += len(new)
            reason = {"logprobs": None, "finish_reason": end and end[0]}
            ids = new if gives_ids else None
            if is_chat:
                stop = {} if end is None else {"stop_reason": end[1]}
                choice = {"index": 0, "delta": {"content": text}, **reason, **stop}
            else:
                prompt_ids = prompt if gives_ids and is_first else None
                stop = {"stop_reason": end and end[1], "prompt_token_ids": prompt_ids}
                choice = {"index": 0, "text": text, **reason, **stop}
            is_first = False
            usage = {"usage": _usage(len(prompt), total)} if counts else {}
            yield {"choices": [{**choice, "token_ids": ids}], **usage}
        if options.get("include_usage"):
            yield {"choices": [], "usage": _usage(len(prompt), total)}

    def _outputs(
        self, body: dict[str, Any], prompt: list[int], is_chat: bool
    ) -> Iterator[tuple[list[int], str, tuple[str, Any] | None]]:
        detokenizer = Detokenizer(prompt, body)
        asked = body.get("max_tokens")
        max_tokens = (LONGEST if is_chat else COMPLETION_MAX_TOKENS) if asked is None else asked
        tokens, turn, end = list(prompt), 0, None
        while end is None:
            new: list[int] = []
            for _ in range(self.steps[turn % len(self.steps)]):
                token = self.next_token(tokens)
                tokens.append(token)
                new.append(token)
                if token == EOS:
                    end = ("stop", None)
                elif stop := detokenizer.add(token):
                    end = ("stop", stop)
                elif len(tokens) - len(prompt) == max_tokens:
                    end = ("length", None)
                if end:
                    break
            turn += 1
            yield new, detokenizer.take(end is not None), end


def _usage(prompt_tokens: int, tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + tokens,
        "completion_tokens": tokens,
    }


def _dumped(chunk: dict[str, Any]) -> bytes:
    return json.dumps(chunk, ensure_ascii=False, separators=(",", ":")).encode()
