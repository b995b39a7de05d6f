"""A client that reads a stream, and a router's loop that has one engine die after another."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from vllm_kvpool.router.dataplane.responses import EngineLost
from vllm_kvpool.router.dataplane.resume.policy import Detokenize
from vllm_kvpool.router.dataplane.resume.stream_resumer import Finish, Refusal, Step, StreamResumer
from vllm_kvpool.router.dataplane.sse import Events, frames

Stream = Callable[[str, bytes], list[bytes]]
"""An engine: returns its stream's payloads for a path and a body."""


@dataclass
class Transcript:
    """An answer as a client sees it, independent of its division into chunks."""

    heads: set[tuple[Any, ...]] = field(default_factory=set)
    texts: dict[str, str] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    roles: list[str] = field(default_factory=list)
    prompt_ids: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    logprobs: dict[str, list[Any]] = field(default_factory=dict)
    ends: list[tuple[str, Any]] = field(default_factory=list)
    usage: dict[str, Any] | None = None
    """The last usage of the stream."""
    counts: list[int] = field(default_factory=list, compare=False)
    """Tokens of the answer after each chunk, if the request asks for continuous usage."""
    error: dict[str, Any] | None = None
    num_done: int = 0


def transcript(payloads: Sequence[bytes]) -> Transcript:
    """Read a stream; fail if no server would write it."""
    seen = Transcript()
    times: set[int] = set()
    for payload in payloads:
        assert not seen.num_done, payloads
        if payload == b"[DONE]":
            seen.num_done += 1
            continue
        chunk = json.loads(payload)
        if "error" in chunk:
            seen.error = chunk["error"]
            continue
        seen.heads.add(tuple(chunk[name] for name in ("id", "object", "model")))
        times.add(chunk["created"])
        _see_usage(seen, chunk.get("usage"))
        seen.prompt_ids += chunk.get("prompt_token_ids") or []
        assert len(chunk["choices"]) <= 1
        for choice in chunk["choices"]:
            assert not seen.ends, payloads
            assert choice["index"] == 0
            _see_choice(seen, choice)
    assert len(times) <= 1, payloads
    return seen


def _see_usage(seen: Transcript, usage: dict[str, Any] | None) -> None:
    if usage is None:
        return
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    if seen.usage is not None:
        assert usage["prompt_tokens"] == seen.usage["prompt_tokens"]
    seen.counts.append(usage["completion_tokens"])
    seen.usage = usage


def _see_choice(seen: Transcript, choice: dict[str, Any]) -> None:
    delta = choice.get("delta", {})
    if delta.get("role"):
        seen.roles.append(delta["role"])
    pieces = {"text": choice.get("text"), **delta}
    for name in ("text", "reasoning", "content"):
        if text := pieces.get(name):
            seen.texts[name] = seen.texts.get(name, "") + text
            if seen.order[-1:] != [name]:
                seen.order.append(name)
    seen.prompt_ids += choice.get("prompt_token_ids") or []
    seen.ids += choice.get("token_ids") or []
    for name, values in (choice.get("logprobs") or {}).items():
        seen.logprobs.setdefault(name, []).extend(values)
    if choice["finish_reason"]:
        seen.ends.append((choice["finish_reason"], choice.get("stop_reason")))


@dataclass
class Router:
    """Feeds `resumer` from engines that die, the n-th after `cuts[n]` bytes; then none does."""

    resumer: StreamResumer
    engine: Stream
    cuts: Sequence[int] = ()
    detokenize: Callable[[bytes], str | None] = lambda body: None
    told: list[bytes] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)

    def run(self, path: str, body: bytes) -> list[bytes]:
        """Return all payloads that the client is sent."""
        cuts = list(self.cuts)
        while True:
            wire = frames(self.engine(path, body))
            if self._feed(wire[: cuts.pop(0)] if cuts else wire):
                return self.told
            step = self.resumer.lost()
            self.steps.append(step)
            while isinstance(step, Detokenize):
                step = self.resumer.detokenized(self.detokenize(step.body))
                self.steps.append(step)
            if isinstance(step, Finish | Refusal):
                assert self.resumer.ended
                return [*self.told, *step.payloads]
            body = step.body

    def _feed(self, wire: bytes) -> bool:
        try:
            for payload in Events().feed(wire):
                self.told += self.resumer.feed(payload)
        except EngineLost:
            return False
        return self.resumer.ended


def chunk_ends(payloads: Sequence[bytes]) -> list[int]:
    """Return the offsets in bytes of the stream's events, 0 first and without the end."""
    ends = list(accumulate((len(frames((each,))) for each in payloads), initial=0))
    return ends[:-1]
