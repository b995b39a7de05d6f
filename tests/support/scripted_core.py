"""The engine behind a scripted server: its steps, which give tokens to choices, and its metrics.

Owned by the event loop in which it is made. Each token calls the choice's `on_delta` from the loop
of steps, so the callback must be quick. It gets None if there is no text to send yet. The last
delta has a finish reason. Metrics have the names and help texts of vLLM 0.32.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec

from tests.support.scripted_batch import Batch, ChunkChain, Phase, ScriptedPool, Sequence, Step
from tests.support.scripted_protocol import Ask, Delta
from tests.support.scripted_spec import ScriptedSpec
from tests.support.scripted_words import EOS_ID, Continuation, Detokenizer

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
STORE = "scripted"


@dataclass(slots=True)
class EngineStats:
    """Counters of an engine since its start."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    saved_bytes: int = 0
    pending_chunks: int = 0
    """Chunks on their way into the pool."""


_Sample: TypeAlias = tuple[Mapping[str, str], float]


def metrics_text(spec: ScriptedSpec, batch: Batch, stats: EngineStats) -> bytes:
    """Return the body of GET /metrics: the metrics of vLLM and the pool that a router reads."""
    lines: list[str] = []
    base = {"engine": "0", "model_name": _escaped(spec.model)}

    def add(name: str, kind: str, told: str, *samples: _Sample) -> None:
        lines.extend((f"# HELP {name} {told}", f"# TYPE {name} {kind}"))
        for labels, value in samples:
            named = {**base, **labels}
            said = ",".join(f'{label}="{named[label]}"' for label in sorted(named))
            lines.append(f"{name}{{{said}}} {float(value)}")

    def counter(name: str, told: str, *samples: _Sample) -> None:
        add(f"{name}_total", "counter", told, *samples)

    running = "Number of requests in model execution batches."
    add("vllm:num_requests_running", "gauge", running, ({}, len(batch.running)))
    waiting = "Number of requests waiting to be processed."
    add("vllm:num_requests_waiting", "gauge", waiting, ({}, batch.num_waiting))
    usage = "KV-cache usage. 1 means 100 percent usage."
    add("vllm:kv_cache_usage_perc", "gauge", usage, ({}, batch.usage))
    prompt = "Number of prefill tokens processed."
    counter("vllm:prompt_tokens", prompt, ({}, stats.prompt_tokens))
    generated = "Number of generation tokens processed."
    counter("vllm:generation_tokens", generated, ({}, stats.generation_tokens))
    config = {"block_size": str(spec.block_size), "num_gpu_blocks": str(spec.kv_blocks)}
    cache = "Information of the LLMEngine CacheConfig"
    add("vllm:cache_config_info", "gauge", cache, (config, 1))
    if spec.has_connector:
        names = {"namespace": spec.namespace, "chunk_tokens": str(spec.chunk_tokens)}
        info = "1 for what cells are called now; engines share cells if both labels are equal."
        add("vllm:kvpool_info", "gauge", info, (names, 1))
        loaded_bytes = batch.counts.pool_hit_tokens * spec.kv_bytes_per_token
        counter(
            "vllm:kvpool_bytes",
            "Bytes moved to or from the store.",
            ({"direction": "save", "store": STORE}, stats.saved_bytes),
            ({"direction": "load", "store": STORE}, loaded_bytes),
        )
        saved = stats.saved_bytes / spec.kv_bytes_per_token
        counter("vllm:kvpool_saved_tokens", "Tokens that the store has.", ({}, saved))
        if (up := batch.pool_is_up) is not None:
            told = "1 while the tier is used, 0 while its breaker is open."
            add("vllm:kvpool_tier_up", "gauge", told, ({"tier": STORE}, up))
        hits = "Prompt tokens taken from the pool."
        counter("vllm:kvpool_hit_tokens", hits, ({}, batch.counts.pool_hit_tokens))
        pending = "Tokens of saves that have not ended."
        tokens = stats.pending_chunks * spec.chunk_tokens
        add("vllm:kvpool_pending_save_tokens", "gauge", pending, ({}, tokens))
        if spec.notices is not None:
            told = "1: an endpoint at which a rank tells what it has stored."
            ranks = ({"rank": str(n), "endpoint": each} for n, each in enumerate(spec.notices))
            add("vllm:kvpool_notices_info", "gauge", told, *((each, 1) for each in ranks))
        counter(
            "vllm:kvpool_expected_prompts",
            "Prompts with `expect_tokens`.",
            *(
                ({"source": source, "outcome": outcome}, number)
                for (source, outcome), number in batch.counts.expected.items()
            ),
        )
    return ("\n".join(lines) + "\n").encode()


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


CATCH_UP_S = 0.05  # delay that later steps make up for; more is lost
SHORTEST_SLEEP_S = 0.0005  # a shorter delay is skipped, and made up for later
_SEED_BITS = 62


OnDelta: TypeAlias = Callable[["Choice", Delta | None], None]


@dataclass(slots=True, eq=False)
class Choice:
    """A sequence that answers a request."""

    index: int
    sequence: Sequence
    words: Continuation
    text: Detokenizer
    max_tokens: int
    ask: Ask
    on_delta: OnDelta
    num_tokens: int = 0
    given: list[int] = field(default_factory=list)  # tokens since the last delta

    @property
    def prompt(self) -> list[int]:
        return self.sequence.tokens[: self.sequence.num_prompt]

    def advance(self) -> Delta | None:
        """Generate a token. Return its delta, or None: without streaming only the last has one."""
        token_id, ask = self.words.next(), self.ask
        self.sequence.tokens.append(token_id)
        self.num_tokens += 1
        is_late = self.num_tokens >= ask.min_tokens
        ends_text = token_id == EOS_ID and not ask.ignore_eos and is_late
        is_stop = token_id in ask.stop_token_ids and is_late
        stop_reason: str | int | None = token_id if is_stop and not ends_text else None
        finish_reason = "stop" if ends_text or is_stop else None
        if finish_reason is None and self.num_tokens >= self.max_tokens:
            finish_reason = "length"
        if not (ends_text or is_stop) or ask.include_stop:
            stopped_by = self.text.add(token_id, self.num_tokens > ask.min_tokens)
            if stopped_by is not None:
                finish_reason, stop_reason = "stop", stopped_by
        self.given.append(token_id)
        if finish_reason is None and not ask.is_stream:
            return None
        return self._delta(finish_reason, stop_reason)

    def abort(self) -> Delta:
        """Return a last delta that says that the engine aborted the choice."""
        return self._delta("abort", None)

    def _delta(self, finish_reason: str | None, stop_reason: str | int | None) -> Delta:
        delta = Delta(
            self.text.take(finish_reason is not None), self.given, finish_reason, stop_reason
        )
        self.given = []
        return delta


@dataclass(slots=True)
class EngineCounts:
    """Counters of an engine over all its restarts."""

    received: Counter[str] = field(default_factory=Counter)  # requests by path
    finished: int = 0
    aborted: int = 0  # by clients that disconnected
    tokens: int = 0
    max_running: int = 0
    endless_bytes: int = 0  # of endless answers
    deaths: int = 0
    # The last request for tokens: header names in lower case, and the raw body.
    last_headers: dict[str, str] = field(default_factory=dict)
    last_body: bytes = b"null"
    # The last POST of each path.
    headers_of: dict[str, dict[str, str]] = field(default_factory=dict)
    body_of: dict[str, bytes] = field(default_factory=dict)

    @property
    def asked(self) -> dict[str, Any]:
        """The decoded body of the last request for tokens."""
        asked: dict[str, Any] = msgspec.json.decode(self.last_body)
        return asked


class EngineCore:
    """An engine process from start to end: computes requests at the speed of the spec."""

    def __init__(self, spec: ScriptedSpec, pool: ScriptedPool | None, counts: EngineCounts) -> None:
        self.batch = Batch(spec, pool)
        self.stats = EngineStats()
        self.sleep_level: int | None = None
        self._spec = spec
        self._pool = pool
        self._counts = counts
        self._choices: dict[Sequence, Choice] = {}
        self._puts: dict[int, asyncio.TimerHandle] = {}
        self._num_puts = 0
        self._is_frozen = False
        self._changed = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._task = self._loop.create_task(self._run())

    def stop(self) -> None:
        """Drop all work in progress, including chunks on their way into the pool."""
        self._task.cancel()
        for put in self._puts.values():
            put.cancel()
        self._puts.clear()

    def submit(self, ask: Ask, on_delta: OnDelta) -> list[Choice]:
        """Queue `n` choices for each prompt of a request."""
        choices: list[Choice] = []
        for prompt, max_tokens in zip(ask.prompts, ask.max_tokens, strict=True):
            for _ in range(ask.n):
                choice = self._choice(ask, prompt, max_tokens, len(choices), on_delta)
                choices.append(choice)
                self._choices[choice.sequence] = choice
                self.batch.add(choice.sequence)
        self._changed.set()
        return choices

    def _choice(
        self, ask: Ask, prompt: list[int], max_tokens: int, index: int, on_delta: OnDelta
    ) -> Choice:
        seed = None
        if ask.is_random:
            seed = random.getrandbits(_SEED_BITS) if ask.seed is None else ask.seed + index
        spec = self._spec
        return Choice(
            index=index,
            sequence=Sequence(
                tokens=list(prompt),
                options=ask.options,
                chain=ChunkChain(spec.model, ask.salt, spec.chunk_tokens),
                arrival_s=self._now_s(),
            ),
            words=Continuation(
                spec.model,
                prompt,
                eos_probability=spec.eos_probability,
                wide_probability=spec.wide_probability,
                seed=seed,
            ),
            text=Detokenizer(prompt, ask.stop, ask.include_stop),
            max_tokens=max_tokens,
            ask=ask,
            on_delta=on_delta,
        )

    def abort(self, choices: Iterable[Choice]) -> bool:
        """Remove unfinished choices. Return True if there were any."""
        left = [choice for choice in choices if self._choices.pop(choice.sequence, None)]
        for choice in left:
            self.batch.remove(choice.sequence)
        self._changed.set()
        return bool(left)

    def freeze(self, frozen: bool) -> None:
        """Stop computing, or resume."""
        self._is_frozen = frozen
        self._changed.set()

    def sleep(self, level: int, mode: str) -> None:
        """Go to sleep. Mode `abort` ends unfinished choices, `keep` lets them wait."""
        self.sleep_level = level
        for choice in list(self._choices.values()) if mode == "abort" else []:
            self._retire(choice)
            choice.on_delta(choice, choice.abort())

    def wake(self) -> None:
        """Resume computing after `sleep`."""
        self.sleep_level = None
        self._changed.set()

    def saved_tokens(self, choice: Choice) -> dict[str, dict[str, Any]] | None:
        """Return the connector's parameters for a finished request, or None if nothing is saved."""
        if self._pool is None or not choice.ask.options.save:
            return None
        answer: dict[str, Any] = {"tokens": self.batch.saved_tokens(choice.sequence)}
        if self._spec.notices:
            answer["notices"] = self._spec.notices
        return {"kvpool": answer}

    def _now_s(self) -> float:
        return self._loop.time()

    @property
    def _is_paused(self) -> bool:
        return self._is_frozen or self.sleep_level is not None

    async def _run(self) -> None:
        due = self._loop.time()
        while True:
            step = None if self._is_paused else self.batch.step(self._now_s())
            if step is None:
                await self._wait()
                due = self._loop.time()
                continue
            due = max(due, self._loop.time() - CATCH_UP_S) + step.seconds
            delay = due - self._loop.time()
            await asyncio.sleep(delay if delay > SHORTEST_SLEEP_S else 0)
            while self._is_frozen:
                self._changed.clear()
                await self._changed.wait()
            self._finish(step)

    async def _wait(self) -> None:
        """Wait for a change, or until the batch's `wake_s`."""
        self._changed.clear()
        timer = None
        wake_s = None if self._is_paused else self.batch.wake_s(self._now_s())
        if wake_s is not None:
            delay = wake_s - self._now_s()
            timer = self._loop.call_later(max(delay, SHORTEST_SLEEP_S), self._changed.set)
        await self._changed.wait()
        if timer is not None:
            timer.cancel()

    def _finish(self, step: Step) -> None:
        """Finish a step: deliver its tokens, and send its chunks to the pool."""
        self._counts.max_running = max(self._counts.max_running, self.batch.counts.max_running)
        if step.computed_chunks:
            self._num_puts += 1
            self.stats.pending_chunks += len(step.computed_chunks)
            self._puts[self._num_puts] = self._loop.call_later(
                self._spec.put_s, self._put, self._num_puts, step.computed_chunks
            )
        for sequence in step.sampled:
            if sequence.phase is Phase.RUNNING:  # and not removed during the step
                self._give_token(self._choices[sequence])

    def _give_token(self, choice: Choice) -> None:
        if not choice.num_tokens:
            self.stats.prompt_tokens += choice.sequence.num_prompt
        delta = choice.advance()
        self.stats.generation_tokens += 1
        self._counts.tokens += 1
        if delta is not None and delta.finish_reason is not None:
            self._retire(choice)
            self._counts.finished += 1
        choice.on_delta(choice, delta)

    def _retire(self, choice: Choice) -> None:
        self.batch.remove(choice.sequence)
        del self._choices[choice.sequence]

    def _put(self, number: int, chunks: list[bytes]) -> None:
        del self._puts[number]
        self.stats.pending_chunks -= len(chunks)
        assert self._pool is not None
        num_tokens = self._pool.put(chunks) * self._spec.chunk_tokens
        self.stats.saved_bytes += num_tokens * self._spec.kv_bytes_per_token
