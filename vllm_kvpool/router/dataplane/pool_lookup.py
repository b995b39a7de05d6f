"""Asks a `kvpool serve` how much the pool has of prompts that the router has not seen.

An answer is an estimate of what need not be computed: nothing is wrong without one, so it is
waited for only as long as it may save, and a service that fails is left alone for a while.
"""

import logging
import re
from collections.abc import Callable

import msgspec
from msgspec.structs import replace

from vllm_kvpool.client import LookupAnswer
from vllm_kvpool.parsing import UNREADABLE
from vllm_kvpool.router.control.requests import Ask, PoolLookupOutcome
from vllm_kvpool.router.dataplane.request_body import ApiPath, ClientRequest
from vllm_kvpool.router.dataplane.responses import EngineLost
from vllm_kvpool.router.dataplane.upstream import EngineLate, Upstream
from vllm_kvpool.storage.breaker import Breaker

log = logging.getLogger(__name__)

LEAST_TOKENS = 2048
"""That are not known to be in the pool: fewer are computed in about the time of a lookup."""
WAIT_S_PER_TOKEN = 10e-6
"""A tokenizer takes about 4, the fastest engines 25 or more for one that they compute."""
MAX_WAIT_S = 0.25
MAX_AT_ONCE = 8
"""More would wait for each other: `kvpool serve` tokenizes so many texts at a time."""
MAX_ANSWER_BYTES = 1 << 20
_HEADERS = {"Content-Type": "application/json"}
"""No key: it is not an engine."""
_UNTOLD = frozenset(
    {
        *("chat_template", "documents", "add_special_tokens", "mm_processor_kwargs"),
        *("add_generation_prompt", "continue_final_message", "reasoning_effort"),
        *("truncate_prompt_tokens", "prompt_embeds"),
    }
)
"""Fields that change what a prompt's tokens are, and that a lookup has not."""
_MEDIA = re.compile(rb'"(image|video|audio|input_audio)\w*"\s*:')
_decode = msgspec.json.Decoder(LookupAnswer).decode


class PoolLookup:
    """Owned by its data plane's loop. `url` is the service's."""

    def __init__(self, url: str, upstream: Upstream, clock: Callable[[], float]) -> None:
        self._url = url.rstrip("/")
        self._upstream = upstream
        self._clock = clock
        self._breaker = Breaker()
        self._has_failed = False
        """Whether the log has said so, and has not said since that it is back."""
        self._num_running = 0

    async def ask(self, request: ClientRequest, ask: Ask) -> Ask:
        """`ask` with what the pool has of its prompt; never raises."""
        body = lookup_body(request)
        if body is None:
            return ask
        if self._breaker.is_open(self._clock()) or self._num_running >= MAX_AT_ONCE:
            return replace(ask, lookup=PoolLookupOutcome.SKIPPED)
        self._num_running += 1
        try:
            outcome, tokens = await self._ask(body, ask.prompt_tokens)
        finally:
            self._num_running -= 1
        return replace(ask, lookup=outcome, pooled_tokens=tokens)

    async def _ask(self, body: bytes, prompt_tokens: int) -> tuple[PoolLookupOutcome, int]:
        wait_s = min(WAIT_S_PER_TOKEN * prompt_tokens, MAX_WAIT_S)
        url = f"{self._url}/lookup"
        try:
            answer = await self._upstream.post(url, body, _HEADERS, wait_s, MAX_ANSWER_BYTES)
            if answer.status != 200:
                return self._failed(PoolLookupOutcome.FAILED, f"it answers {answer.status}")
            found = _decode(answer.body)
        except EngineLate as error:
            return self._failed(PoolLookupOutcome.LATE, str(error))
        except EngineLost as error:
            return self._failed(PoolLookupOutcome.FAILED, str(error))
        except UNREADABLE:
            return self._failed(PoolLookupOutcome.FAILED, "its answer is not that of kvpool serve")
        self._breaker.succeeded()
        if self._has_failed:
            self._has_failed = False
            log.info("%s answers again: prompts are looked up (flow.lookup_url)", url)
        if not found.namespace:
            return PoolLookupOutcome.UNKNOWN_MODEL, 0
        # A share, as the prompt's tokens are estimated here and counted there.
        covered = max(0, min(found.covered_tokens, found.tokens))
        tokens = prompt_tokens * covered // found.tokens if covered else 0
        return PoolLookupOutcome.COVERED if tokens else PoolLookupOutcome.ABSENT, tokens

    def _failed(self, outcome: PoolLookupOutcome, why: str) -> tuple[PoolLookupOutcome, int]:
        if self._breaker.failed(self._clock()) and not self._has_failed:
            self._has_failed = True
            log.warning(
                "%s/lookup fails: %s; prompts that only the pool has seen count as not computed "
                "until it answers (flow.lookup_url)",
                self._url,
                why,
            )
        return outcome, 0


def lookup_body(request: ClientRequest) -> bytes | None:
    """The body of `POST /lookup` for a request's prompt; None where its tokens would be others.

    The prompt's JSON is copied and not decoded.
    """
    fields, ids = request.fields, request.prompt_ids
    if not (request.wants_handoff and request.model) or not _UNTOLD.isdisjoint(fields):
        return None
    if request.api_path is ApiPath.CHAT:
        if _MEDIA.search(bytes(fields["messages"])):
            return None
        names = ("model", "messages", "tools", "chat_template_kwargs", "cache_salt")
        asked = {name: fields[name] for name in names if name in fields}
    else:
        if ids is None and not bytes(fields["prompt"]).startswith(b'"'):
            return None
        asked = {name: fields[name] for name in ("model", "cache_salt") if name in fields}
        asked["text" if ids is None else "tokens"] = fields["prompt"]
    return msgspec.json.encode(asked)
