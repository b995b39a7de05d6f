"""`/metrics` of a scripted engine: names, labels and text as vLLM 0.32 has them.

What a stock engine exposes of itself is there as far as the scripted one knows it, and of the
pool's metrics those that a router reads.
"""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field

from tests.support.scripted_batch import Batch
from tests.support.scripted_spec import ScriptedSpec

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
        """A gauge of 1 with labels of its own."""
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
