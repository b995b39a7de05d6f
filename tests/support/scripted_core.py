"""The engine behind a scripted server: steps that give tokens to choices, and its metrics.

Owned by the event loop in which it is made. What a choice says is given to its `on_delta` with
every token, from the loop of steps and therefore to be taken quickly: None where there is nothing
to say yet, and last what has a reason to finish. Metrics have the names, labels and text of
vLLM 0.32, as far as the scripted engine knows them, and of the pool's those that a router reads.
"""

import asyncio
import random
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec

from tests.support.scripted_batch import Batch, ChunkChain, Phase, ScriptedPool, Sequence, Step
from tests.support.scripted_protocol import Ask, Delta
from tests.support.scripted_spec import STEMS, ScriptedSpec
from tests.support.scripted_words import EOS_ID, Continuation, Detokenizer
from vllm_kvpool.identity.cell_names import ChunkNames

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")
FIRST_TOKEN_BOUNDS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
STORE = "scripted"


@dataclass(slots=True)
class EngineStats:
    """What an engine has counted since it was started; `started_s` is the wall clock's."""

    started_s: float
    prompt_tokens: int = 0
    generation_tokens: int = 0
    saved_bytes: int = 0
    rejections: int = 0
    finished: dict[str, int] = field(default_factory=lambda: dict.fromkeys(FINISH_REASONS, 0))
    first_tokens: list[int] = field(default_factory=lambda: [0] * (len(FIRST_TOKEN_BOUNDS_S) + 1))
    first_token_s: float = 0.0

    def first_token(self, seconds: float) -> None:
        """A request got its first token so long after it came."""
        self.first_tokens[bisect_left(FIRST_TOKEN_BOUNDS_S, seconds)] += 1
        self.first_token_s += seconds


class _Text:
    """The exposition as it grows."""

    def __init__(
        self, base: Mapping[str, str], created: float, lines: list[str] | None = None
    ) -> None:
        self._base = base
        self._created = created
        self.lines: list[str] = [] if lines is None else lines

    def of(self, base: Mapping[str, str]) -> "_Text":
        """The same text, for samples with other labels."""
        return _Text(base, self._created, self.lines)

    def _sample(self, name: str, labels: Mapping[str, str], value: float) -> None:
        said = ",".join(f'{label}="{labels[label]}"' for label in sorted(labels))
        self.lines.append(f"{name}{{{said}}} {float(value)}")

    def _head(self, name: str, kind: str, told: str) -> None:
        self.lines += [f"# HELP {name} {told}", f"# TYPE {name} {kind}"]

    def gauge(self, name: str, told: str, value: float, **labels: str) -> None:
        self.gauges(name, told, [(labels, value)])

    def gauges(self, name: str, told: str, values: list[tuple[dict[str, str], float]]) -> None:
        self._head(name, "gauge", told)
        for labels, value in values:
            self._sample(name, {**self._base, **labels}, value)

    def info(self, name: str, told: str, labels: Mapping[str, str]) -> None:
        """A gauge of 1 whose labels are the information."""
        self._head(name, "gauge", told)
        self._sample(name, labels, 1)

    def counter(self, name: str, told: str, value: float) -> None:
        self.counters(name, told, [({}, value)])

    def counters(self, name: str, told: str, values: list[tuple[dict[str, str], float]]) -> None:
        self._head(f"{name}_total", "counter", told)
        for labels, value in values:
            self._sample(f"{name}_total", {**self._base, **labels}, value)
        self._head(f"{name}_created", "gauge", told)
        for labels, _ in values:
            self._sample(f"{name}_created", {**self._base, **labels}, self._created)

    def histogram(self, name: str, told: str, counts: list[int], total: float) -> None:
        """`counts` of each bucket of `FIRST_TOKEN_BOUNDS_S` and of what is above."""
        self._head(name, "histogram", told)
        seen = 0
        for bound, count in zip([*map(str, FIRST_TOKEN_BOUNDS_S), "+Inf"], counts, strict=True):
            seen += count
            self._sample(f"{name}_bucket", {**self._base, "le": bound}, seen)
        self._sample(f"{name}_count", self._base, seen)
        self._sample(f"{name}_sum", self._base, total)
        self._head(f"{name}_created", "gauge", told)
        self._sample(f"{name}_created", self._base, self._created)


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def metrics_text(
    spec: ScriptedSpec, batch: Batch, stats: EngineStats, sleep_level: int | None
) -> bytes:
    """The body of GET /metrics; `sleep_level` of an engine that sleeps."""
    model = _escaped(spec.model)
    text = _Text({"engine": "0", "model_name": model}, stats.started_s)
    _add_scheduler(text, batch, sleep_level)
    _add_caches(text, batch)
    _add_tokens(text, batch, stats)
    text.info("vllm:cache_config_info", "Information of the LLMEngine CacheConfig", _config(spec))
    if spec.has_connector:
        _add_pool(text, spec, batch, stats)
    _add_rejections(text, model, stats)
    return ("\n".join(text.lines) + "\n").encode()


def _add_scheduler(text: _Text, batch: Batch, sleep_level: int | None) -> None:
    deferred = len(batch.loading) + len(batch.loaded)
    text.gauge(
        "vllm:num_requests_running",
        "Number of requests in model execution batches.",
        len(batch.running),
    )
    text.gauge(
        "vllm:num_requests_waiting",
        "Number of requests waiting to be processed.",
        batch.num_waiting,
    )
    text.gauges(
        "vllm:num_requests_waiting_by_reason",
        "Number of waiting requests by reason.",
        [
            ({"reason": "capacity"}, batch.num_waiting - deferred),
            ({"reason": "deferred"}, deferred),
        ],
    )
    text.gauges(
        "vllm:num_requests_kv_fetch_by_stage",
        "Number of waiting requests by async KV load stage.",
        [
            ({"stage": "waiting_to_start"}, 0),
            ({"stage": "in_progress"}, len(batch.loading)),
            ({"stage": "completed_waiting"}, len(batch.loaded)),
        ],
    )
    text.gauges(
        "vllm:engine_sleep_state",
        "Engine sleep state; awake = 0 means engine is sleeping; awake = 1 means engine is awake; "
        "weights_offloaded = 1 means sleep level 1; discard_all = 1 means sleep level 2.",
        [
            ({"sleep_state": "awake"}, sleep_level is None),
            ({"sleep_state": "weights_offloaded"}, sleep_level == 1),
            ({"sleep_state": "discard_all"}, sleep_level == 2),
        ],
    )
    text.gauge(
        "vllm:kv_cache_usage_perc",
        "KV-cache usage. 1 means 100 percent usage.",
        batch.usage,
    )


def _add_caches(text: _Text, batch: Batch) -> None:
    counts = batch.counts
    text.counter(
        "vllm:prefix_cache_queries",
        "Prefix cache queries, in terms of number of queried tokens.",
        counts.looked_up_tokens,
    )
    text.counter(
        "vllm:prefix_cache_hits",
        "Prefix cache hits, in terms of number of cached tokens.",
        counts.local_hit_tokens,
    )
    text.counter(
        "vllm:external_prefix_cache_queries",
        "External prefix cache queries from KV connector cross-instance cache sharing, in terms of "
        "number of queried tokens.",
        counts.looked_up_tokens - counts.local_hit_tokens,
    )
    text.counter(
        "vllm:external_prefix_cache_hits",
        "External prefix cache hits from KV connector cross-instance cache sharing, in terms of "
        "number of cached tokens.",
        counts.pool_hit_tokens,
    )


def _add_tokens(text: _Text, batch: Batch, stats: EngineStats) -> None:
    counts = batch.counts
    text.counter(
        "vllm:num_preemptions",
        "Cumulative number of preemption from the engine.",
        counts.preemptions,
    )
    text.counter("vllm:prompt_tokens", "Number of prefill tokens processed.", stats.prompt_tokens)
    text.counter(
        "vllm:generation_tokens",
        "Number of generation tokens processed.",
        stats.generation_tokens,
    )
    text.counters(
        "vllm:request_success",
        "Count of successfully processed requests.",
        [({"finished_reason": reason}, count) for reason, count in stats.finished.items()],
    )
    text.histogram(
        "vllm:time_to_first_token_seconds",
        "Histogram of time to first token in seconds.",
        stats.first_tokens,
        stats.first_token_s,
    )


def _add_pool(text: _Text, spec: ScriptedSpec, batch: Batch, stats: EngineStats) -> None:
    text.gauge(
        "vllm:kvpool_info",
        "1 for what cells are called now; engines share cells if both labels are equal.",
        1,
        namespace=spec.namespace,
        chunk_tokens=str(spec.chunk_tokens),
    )
    loaded_bytes = batch.counts.pool_hit_tokens * spec.kv_bytes_per_token
    text.counters(
        "vllm:kvpool_bytes",
        "Bytes moved to or from the store.",
        [
            ({"direction": "save", "store": STORE}, stats.saved_bytes),
            ({"direction": "load", "store": STORE}, loaded_bytes),
        ],
    )
    up = batch.pool_is_up
    if up is not None:
        told = "1 while the tier is used, 0 while its breaker is open."
        text.gauge("vllm:kvpool_tier_up", told, up, tier=STORE)
    text.counter(
        "vllm:kvpool_hit_tokens",
        "Prompt tokens taken from the pool.",
        batch.counts.pool_hit_tokens,
    )


def _add_rejections(text: _Text, model: str, stats: EngineStats) -> None:
    # Counted before a request has an engine, hence without that label.
    front = text.of({"model_name": model})
    front.counters(
        "vllm:admission_rejections",
        "Number of admission attempts rejected by a queue limit, by reason.",
        [({"reason": "max_num_queued_reqs"}, stats.rejections)],
    )


def _config(spec: ScriptedSpec) -> dict[str, str]:
    """Labels of `vllm:cache_config_info`, which has every value of vLLM's cache configuration."""
    return {
        "block_size": str(spec.block_size),
        "cache_dtype": "auto",
        "enable_prefix_caching": str(spec.prefix_caching),
        "engine": "0",
        "gpu_memory_utilization": "0.92",
        "kv_cache_size_tokens": str(spec.kv_blocks * spec.block_size),
        "num_cpu_blocks": "None",
        "num_gpu_blocks": str(spec.kv_blocks),
        "num_gpu_blocks_override": "None",
        "prefix_caching_hash_algo": "sha256",
        "sliding_window": "None",
    }


CATCH_UP_S = 0.05  # steps that are later than this are late for good
SHORTEST_SLEEP_S = 0.0005  # less is not slept but made up for later
_SEED_BITS = 62


OnDelta: TypeAlias = Callable[["Choice", Delta | None], None]


@dataclass(slots=True, eq=False)
class Choice:
    """One sequence that answers a request."""

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
        """One more token; what there is to say of it: of answers in one piece only the whole."""
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
        """The end, by the engine's own decision."""
        return self._delta("abort", None)

    def _delta(self, finish_reason: str | None, stop_reason: str | int | None) -> Delta:
        delta = Delta(
            self.text.take(finish_reason is not None), self.given, finish_reason, stop_reason
        )
        self.given = []
        return delta


@dataclass(slots=True)
class EngineCounts:
    """What happened to an engine in all its lives."""

    received: Counter[str] = field(default_factory=Counter)  # requests by path
    finished: int = 0
    aborted: int = 0  # by clients that went away
    refused: int = 0
    tokens: int = 0
    max_running: int = 0
    deaths: int = 0
    # Of the last request for tokens: header names in lower case, and the body as it came.
    last_headers: dict[str, str] = field(default_factory=dict)
    last_body: bytes = b"null"

    @property
    def asked(self) -> dict[str, Any]:
        """The last body."""
        asked: dict[str, Any] = msgspec.json.decode(self.last_body)
        return asked


class EngineCore:
    """One life of an engine process: computes what is submitted at the speed of the spec."""

    def __init__(self, spec: ScriptedSpec, pool: ScriptedPool | None, counts: EngineCounts) -> None:
        self.batch = Batch(spec, pool)
        self.stats = EngineStats(started_s=time.time())
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
        """Forget all that is under way, what was still to be put into the pool included."""
        self._task.cancel()
        for put in self._puts.values():
            put.cancel()
        self._puts.clear()

    def submit(self, ask: Ask, on_delta: OnDelta) -> list[Choice]:
        """Queue what a request asks for: of each prompt as many choices as it wants."""
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
        """Give up what has not finished; whether there was any."""
        left = [choice for choice in choices if self._choices.pop(choice.sequence, None)]
        for choice in left:
            self.batch.remove(choice.sequence)
        self._changed.set()
        return bool(left)

    def freeze(self, frozen: bool) -> None:
        """Stop computing, or go on."""
        self._is_frozen = frozen
        self._changed.set()

    def sleep(self, level: int, mode: str) -> None:
        """Go to sleep: `abort` ends what is under way, `keep` lets it wait."""
        self.sleep_level = level
        for choice in list(self._choices.values()) if mode == "abort" else []:
            self._retire(choice, "abort")
            choice.on_delta(choice, choice.abort())

    def wake(self) -> None:
        """Go on computing."""
        self.sleep_level = None
        self._changed.set()

    def saved_tokens(self, choice: Choice) -> dict[str, dict[str, Any]] | None:
        """What the connector answers of a finished request."""
        if self._pool is None or not choice.ask.options.save:
            return None
        answer: dict[str, Any] = {"tokens": self.batch.saved_tokens(choice.sequence)}
        if choice.ask.options.name_cells:
            chunks = [each.hex() for each in self.batch.saved_chunks(choice.sequence)]
            answer["cells"] = msgspec.to_builtins(ChunkNames(STEMS, tuple(chunks)))
        return {"kvpool": answer}

    def _now_s(self) -> float:
        return self._loop.time() * self._spec.time_scale

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
            due = max(due, self._loop.time() - CATCH_UP_S) + step.seconds / self._spec.time_scale
            delay = due - self._loop.time()
            await asyncio.sleep(delay if delay > SHORTEST_SLEEP_S else 0)
            while self._is_frozen:
                self._changed.clear()
                await self._changed.wait()
            self._finish(step)

    async def _wait(self) -> None:
        """Until something changes or the batch says so."""
        self._changed.clear()
        timer = None
        wake_s = None if self._is_paused else self.batch.wake_s(self._now_s())
        if wake_s is not None:
            delay = (wake_s - self._now_s()) / self._spec.time_scale
            timer = self._loop.call_later(max(delay, SHORTEST_SLEEP_S), self._changed.set)
        await self._changed.wait()
        if timer is not None:
            timer.cancel()

    def _finish(self, step: Step) -> None:
        """The step is over: its tokens are there, and its chunks are on their way."""
        self._counts.max_running = max(self._counts.max_running, self.batch.counts.max_running)
        if step.computed_chunks:
            self._num_puts += 1
            self._puts[self._num_puts] = self._loop.call_later(
                self._spec.put_s / self._spec.time_scale,
                self._put,
                self._num_puts,
                step.computed_chunks,
            )
        for sequence in step.sampled:
            if sequence.phase is Phase.RUNNING:  # and not given up in the meantime
                self._give_token(self._choices[sequence])

    def _give_token(self, choice: Choice) -> None:
        if not choice.num_tokens:
            self.stats.prompt_tokens += choice.sequence.num_prompt
            self.stats.first_token(self._now_s() - choice.sequence.arrival_s)
        delta = choice.advance()
        self.stats.generation_tokens += 1
        self._counts.tokens += 1
        if delta is not None and delta.finish_reason is not None:
            self._retire(choice, delta.finish_reason)
            self._counts.finished += 1
        choice.on_delta(choice, delta)

    def _retire(self, choice: Choice, finish_reason: str) -> None:
        self.batch.remove(choice.sequence)
        del self._choices[choice.sequence]
        self.stats.finished[finish_reason] += 1

    def _put(self, number: int, chunks: list[bytes]) -> None:
        del self._puts[number]
        assert self._pool is not None
        num_tokens = self._pool.put(chunks) * self._spec.chunk_tokens
        self.stats.saved_bytes += num_tokens * self._spec.kv_bytes_per_token
