"""`kvpool doctor` of an engine: what it shares with which others, what not, and how to change that.

It reads the metrics of a running engine, or the values that a start line gives, and the manifests
beside the cells of its model.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vllm_kvpool.cli.common.engine_metrics import Growth, Samples, scrape
from vllm_kvpool.cli.common.stores import NamedStore, manifests
from vllm_kvpool.cli.doctor import Finding, Status
from vllm_kvpool.cli.explain import REASONS
from vllm_kvpool.cli.inspect import NO_POOL, pool_info
from vllm_kvpool.config import set_where_unset
from vllm_kvpool.errors import ConfigError
from vllm_kvpool.identity.keys import Namespace
from vllm_kvpool.storage.base import Listing
from vllm_kvpool.storage.contents.manifest import (
    Manifest,
    cut_of,
    explain,
    is_of_same_model,
    short,
    short_pair,
)

MOST_NAMESPACES = 5
MOST_DIFFERENCES = 3
START_LINE = "start line"
HUB_LIMIT_S = 3.0

UNSAVED = {
    "full": "no room in a store (size=, its disk or memory), or in staging_bytes",
    "failed": "calls of a store failed; the engine's log has the reason",
    "unreachable": "no store could be reached; the engine's log has the reason",
    "timed_out": "calls of a store took longer than call_timeout_s",
    "cancelled": "a reset, a change of weights or a failed load came between",
}
"""Causes of dropped saves, by the label `reason` of `kvpool_unsaved_tokens`."""

_EXPECTED = frozenset(("absent", "not_needed", "short", "not_wanted"))  # reasons of a miss
_OFF = (
    ("tier_up", Status.FAILED, "is away from its workers; its log has the reason"),
    ("lookup_tier_up", Status.FAILED, "is away from its lookups; its log has the reason"),
    ("tier_writable", Status.WARNING, "takes no writes, so nothing is saved there"),
)


def examine_engine(url: str, stores: Sequence[NamedStore]) -> Iterator[Finding]:
    """Examine what the running engine at a URL shares, over the stores that it should use."""
    try:
        samples = scrape(url)
    except ConfigError as error:
        yield Finding(url, Status.FAILED, str(error).removeprefix(f"{url}: "))
        return
    namespace, findings = of_metrics(url, samples)
    yield from findings
    if namespace is None:
        return
    known = manifests(stores, [namespace])
    blind = [each.url for each in stores if not isinstance(each.store, Listing)]
    if blind:
        text = (
            f"{', '.join(blind)} cannot list: other namespaces of its model there are not compared"
        )
        yield Finding(url, Status.OK, text)
    if namespace in known:
        yield from of_values(url, known[namespace].values)
        yield from beside(url, known[namespace], list(known.values()))
    else:
        yield Finding(
            url,
            Status.WARNING,
            "these stores hold nothing of its namespace: it has saved nothing yet, or its store is "
            "another (give its --kv-transfer-config)",
        )


def examine_hub(models: Sequence[str], limit_s: float = HUB_LIMIT_S) -> Iterator[Finding]:
    """Warn if the hub of these models cannot be reached; vLLM then reads the hub's cache alone.

    The hub's client tries six times, for half a minute or more.
    """
    from huggingface_hub import constants, get_session

    if not models or constants.HF_HUB_OFFLINE:
        return
    reasons = [f"no answer within {limit_s:g} s"]

    def ask() -> None:
        try:
            get_session().head(constants.ENDPOINT, timeout=limit_s)
        except Exception as error:  # its client's errors have no base that all releases share
            reasons.append(str(error) or type(error).__name__)
        else:
            reasons.append("")

    # A name server that is silent takes longer than any limit of the request.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(limit_s)
    if reason := reasons[-1]:
        constants.HF_HUB_OFFLINE = True
        set_where_unset({"HF_HUB_OFFLINE": "1"})
        text = f"{constants.ENDPOINT} cannot be reached ({reason}): "
        text += f"{' and '.join(models)} is sought in Hugging Face's cache"
        yield Finding(START_LINE, Status.WARNING, text)


def examine_start_line(arguments: Sequence[str], stores: Sequence[NamedStore]) -> Iterator[Finding]:
    """Examine what an engine with these options would share; needs vLLM."""
    # Its log goes to standard output, where --json prints.
    set_where_unset({"VLLM_LOGGING_STREAM": "ext://sys.stderr", "VLLM_LOGGING_LEVEL": "ERROR"})
    try:
        from vllm_kvpool.vllm_adapt.start_line import models_of, read_start_line
    except ModuleNotFoundError as error:
        yield Finding(START_LINE, Status.FAILED, f"{error}: run it where vLLM is installed")
        return
    try:
        yield from examine_hub(models_of(arguments))
        planned = read_start_line(arguments)
    except (ConfigError, OSError) as error:
        yield Finding(START_LINE, Status.FAILED, str(error))
        return
    except Exception as error:  # of the hub's client, or of code that comes with the model
        yield Finding(START_LINE, Status.FAILED, f"{type(error).__name__}: {error}")
        return
    chunk_tokens = planned.values["chunk_tokens"]
    text = f"is accepted; shares with engines of {planned.model} and chunk_tokens={chunk_tokens}"
    yield Finding(START_LINE, Status.OK, text)
    for warning in planned.warnings:
        yield Finding(START_LINE, Status.WARNING, warning)
    yield from of_values(START_LINE, planned.values)
    # Pages are known once the model is loaded.
    name = Namespace(f"{planned.model}@")
    known = [
        each._replace(values={n: v for n, v in each.values.items() if n != "kinds"})
        for each in manifests(stores).values()
    ]
    yield from beside(START_LINE, Manifest(name, name, "", planned.values), known)


def of_metrics(url: str, samples: Samples) -> tuple[Namespace | None, list[Finding]]:
    """Return the engine's namespace, and what its metrics say since its start (pure)."""
    info = pool_info(samples)
    if info is None:
        return None, [Finding(url, Status.FAILED, NO_POOL)]
    namespace, chunk_tokens = info["namespace"], info["chunk_tokens"]
    text = (
        f"shares with engines of namespace {namespace} and chunk_tokens={chunk_tokens}, where "
        "layer_span is equal, too"
    )
    found = [Finding(url, Status.OK, text)]
    for name, status, why in _OFF:
        off = [dict(labels)["tier"] for (n, labels), up in samples.items() if n == name and not up]
        found += [Finding(url, status, f"tier {tier} {why}") for tier in off]
    growth = Growth({}, samples, 1.0)
    found += _tokens(url, growth)
    failures = growth.by("failures_total", "kind")
    if failures:
        counts = ", ".join(f"{kind} {count:.0f}" for kind, count in failures.items())
        found.append(Finding(url, Status.WARNING, f"failures since its start: {counts}"))
    return Namespace(namespace), found


def _tokens(url: str, growth: Growth) -> Iterator[Finding]:
    loaded, saved, in_host = (
        growth.total(f"{name}_tokens_total") for name in ("hit", "saved", "host_saved")
    )
    unsaved = growth.by("unsaved_tokens_total", "reason")
    text = f"since its start {loaded:.0f} tokens were loaded and {saved:.0f} saved in stores"
    if in_host:
        text += f", {in_host:.0f} in host memory alone"
    if saved or in_host:
        yield Finding(url, Status.OK, text)
    elif not unsaved:
        yield Finding(
            url,
            Status.WARNING,
            f"{text}: prompts are shorter than chunk_tokens, kv_role is kv_consumer, or requests "
            "asked for no save",
        )
    for reason, tokens in unsaved.items():
        status = Status.OK if reason == "cancelled" else Status.WARNING
        text = f"{tokens:.0f} tokens were to be saved and were not: {UNSAVED.get(reason, reason)}"
        yield Finding(url, status, text)
    for reason, tokens in growth.by("miss_tokens_total", "reason").items():
        status = Status.OK if reason in _EXPECTED else Status.WARNING
        yield Finding(url, status, f"{tokens:.0f} tokens {REASONS.get(reason, reason)}")


def of_values(check: str, values: Mapping[str, Any]) -> Iterator[Finding]:
    """Return with which other engines one of these values shares (pure)."""
    weights = str(values.get("weights", ""))
    limits = (
        (
            "alone" in values,
            "shares with no other engine: an option cannot be compared; its log names it",
        ),
        (
            "rank_cells_of_tp" in values,
            f"shares with engines of tensor_parallel_size {values.get('rank_cells_of_tp')} alone; "
            "for any size set per_head_storage to true",
        ),
        (
            weights.startswith("dummy:"),
            "its weights are random: it shares with engines of the same seed, "
            "tensor_parallel_size, releases and kind of device, if its weights are no whole "
            "numbers; load real weights",
        ),
        (
            weights.startswith("name:"),
            "its weights are compared by name and revision, as they are not in local files; set "
            "weights_id to tell others apart",
        ),
        (
            bool(values.get("namespace")),
            f"shares with engines of the option namespace={values.get('namespace')!r}",
        ),
        (
            bool(values.get("encrypted_cells")),
            "shares with engines that have one of its encryption keys",
        ),
    )
    for applies, text in limits:
        if applies:
            yield Finding(check, Status.WARNING, text)


def beside(check: str, one: Manifest, known: Sequence[Manifest]) -> Iterator[Finding]:
    """Yield the namespaces of `one`'s model from which it takes nothing (pure).

    Each finding says what to change.
    """
    others = [each for each in known if is_of_same_model(one, each)]
    found = sorted(
        ((explain(one, other), other) for other in others),
        key=lambda pair: len(pair[0].differences),
    )
    for (_, name, differences), other in found[:MOST_NAMESPACES]:
        if not differences:
            cut = [f"{each} is {short(value)}" for each, value in cut_of(other).items()]
            text = f"shares with {name} where pages have one dtype and kv_cache_dtype"
            text += "".join(f", {each}" for each in cut)
            yield Finding(check, Status.OK, text)
            continue
        told = [
            f"{each.name} is {one} here and {two} there ({each.remedy})"
            for each in differences[:MOST_DIFFERENCES]
            for one, two in [short_pair(each.first, each.second)]
        ]
        more = len(differences) - MOST_DIFFERENCES
        ending = [f"{more} more, by `kvpool explain`"] if more > 0 else []
        words = "; ".join([*told, *ending])
        yield Finding(check, Status.WARNING, f"shares nothing with {name}: {words}")
    if len(found) > MOST_NAMESPACES:
        more = len(found) - MOST_NAMESPACES
        yield Finding(check, Status.WARNING, f"{more} more namespaces, by `kvpool explain`")
