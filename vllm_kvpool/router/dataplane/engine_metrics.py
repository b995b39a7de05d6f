"""Reader of an engine's /metrics."""

from collections.abc import Collection, Sequence
from math import isfinite

from prometheus_client.parser import text_string_to_metric_families

from vllm_kvpool.config import MAX_ENDPOINT_CHARS, MAX_NOTICES
from vllm_kvpool.router.control.events import Sample
from vllm_kvpool.router.control.handovers import NONE_EXPECTED, ExpectedPrompts
from vllm_kvpool.router.dataplane.responses import EngineLost
from vllm_kvpool.router.dataplane.upstream import Upstream

MAX_METRICS_BYTES = 8 << 20
OWN_TIER = "host"  # of the engine alone


async def sample(upstream: Upstream, url: str, timeout_s: float) -> Sample:
    """Ask an engine for its metrics; EngineLost where it does not answer with them."""
    answer = await upstream.ask(f"{url}/metrics", timeout_s=timeout_s, most_bytes=MAX_METRICS_BYTES)
    if answer.status != 200:
        raise EngineLost(f"/metrics answers {answer.status}")
    return read_sample(answer.body.decode(errors="replace"))


_SUMS = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:prompt_tokens_total": "prompt_tokens",
    "vllm:generation_tokens_total": "generated_tokens",
}
_USAGE = "vllm:kv_cache_usage_perc"
_DIRECTIONS = {"load": "bytes_in", "save": "bytes_out", "get": "bytes_in", "put": "bytes_out"}
_INFO, _OF_CONNECTOR = "vllm:kvpool_info", "vllm:kvpool_hit_tokens"
_EXPECTED = "vllm:kvpool_expected_prompts"
_PENDING = "vllm:kvpool_pending_save_tokens"
_NOTICES = "vllm:kvpool_notices_info"
_WANTED = (
    *(*_SUMS, _USAGE, _INFO),
    *("vllm:cache_config_info", "vllm:kvpool_bytes", "vllm:kvpool_tier_up", _EXPECTED, _PENDING),
    _NOTICES,
)


def read_sample(text: str) -> Sample:
    """Read Prometheus's text form; EngineLost where it is none. Engines of a process add up."""
    try:
        return _sum_up(text)
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise EngineLost(f"/metrics cannot be read: {error}") from None


def _sum_up(text: str) -> Sample:
    # vLLM has thousands of lines, most of them of histograms, and the parser is slow.
    lines = [line for line in text.split("\n") if line.startswith(_WANTED)]
    sums = dict.fromkeys((*_SUMS.values(), "bytes_in", "bytes_out"), 0.0)
    usage: list[float] = []
    tiers: list[float] = []
    blocks = block_size = chunk_tokens = 0
    namespace = ""
    expected: dict[str, ExpectedPrompts] = {}
    endpoints: dict[str, dict[str, None]] = {}
    pending: int | None = None
    for family in text_string_to_metric_families("\n".join(lines) + "\n" if lines else text):
        for name, labels, value, *_ in family.samples:
            if name in _SUMS:
                sums[_SUMS[name]] += value
            elif name == _USAGE:
                usage.append(value)
            elif name == "vllm:cache_config_info":
                blocks += _whole(labels.get("num_gpu_blocks", ""))
                block_size = _whole(labels.get("block_size", "")) or block_size
            elif name == "vllm:kvpool_bytes_total":
                field = _DIRECTIONS.get(labels.get("direction", ""))
                if field is not None:
                    sums[field] += value
            elif name == "vllm:kvpool_tier_up" and labels.get("tier") != OWN_TIER:
                tiers.append(value)
            elif name == f"{_EXPECTED}_total":
                source, outcome = labels.get("source", ""), labels.get("outcome", "")
                counted = expected.get(source, NONE_EXPECTED)
                if outcome in ExpectedPrompts._fields:
                    more = getattr(counted, outcome) + int(value)
                    expected[source] = counted._replace(**{outcome: more})
            elif name == _PENDING:
                pending = (pending or 0) + int(value)
            elif name == _NOTICES and value:
                of_engine = endpoints.setdefault(labels.get("engine", ""), {})
                of_engine[labels.get("endpoint", "")] = None
            elif name == _INFO and value:
                namespace = labels.get("namespace", "")
                chunk_tokens = _whole(labels.get("chunk_tokens", ""))
    if not all(map(isfinite, sums.values())):
        raise ValueError("a counter is not finite")
    share = sum(usage) / len(usage) if usage else 0.0
    return Sample(
        running=int(sums["running"]),
        waiting=int(sums["waiting"]),
        used_blocks=round(min(max(share, 0.0), 1.0) * blocks),
        total_blocks=blocks,
        block_size=block_size,
        prompt_tokens=sums["prompt_tokens"],
        generated_tokens=sums["generated_tokens"],
        bytes_in=sums["bytes_in"],
        bytes_out=sums["bytes_out"],
        # One tier that engines can share is enough; without any, nothing is known against it.
        pool_is_up=not tiers or any(tiers),
        # vLLM exports a connector's metrics, if only their names, from its start.
        has_connector=_OF_CONNECTOR in text,
        namespace=namespace,
        chunk_tokens=chunk_tokens,
        pending_save_tokens=pending,
        expected=expected if _EXPECTED in text else None,
        notices=_notices(list(endpoints.values())) if _NOTICES in text else None,
    )


def _notices(engines: Sequence[Collection[str]]) -> tuple[str, ...]:
    """Return the endpoints of the one engine of a server; with several, any may get a request."""
    if len(engines) != 1 or len(engines[0]) > MAX_NOTICES:
        return ()
    found = tuple(engines[0])
    return found if all(0 < len(each) <= MAX_ENDPOINT_CHARS for each in found) else ()


def _whole(text: str) -> int:
    return int(text) if text.isdecimal() else 0
