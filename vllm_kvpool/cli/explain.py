"""`kvpool explain`: why two namespaces share nothing, or why a request hit the pool or missed it.

Namespaces are compared by their manifests. A request is explained from its engine's log
(`log_requests`).
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from vllm_kvpool.cli.common.stores import NamedStore, manifest_named, manifests
from vllm_kvpool.errors import ConfigError
from vllm_kvpool.identity.keys import Namespace
from vllm_kvpool.storage.base import Listing, Store
from vllm_kvpool.storage.contents.manifest import (
    Explanation,
    explain,
    is_of_same_model,
    manifest_in,
    short_pair,
)

MOST_REQUESTS = 20  # in words

# Namespaces


def explanations(stores: Sequence[NamedStore], names: Sequence[str]) -> list[Explanation]:
    """Return the differences between namespaces.

    Two names: between these. One name: to each other namespace of its model. No name: between
    each pair of one model. Raises ConfigError for unknown names.
    """
    known = manifests(stores)
    chosen = [manifest_named(stores, name, known) for name in names]
    if len(chosen) == 2:
        if chosen[0] == chosen[1]:
            raise ConfigError(f"both names are of {chosen[0].namespace}; give two, or one of them")
        return [explain(*chosen)]
    found = []
    ordered = chosen or sorted(known.values())
    for i, one in enumerate(ordered):
        others = known.values() if chosen else ordered[i + 1 :]
        found += [explain(one, other) for other in others if is_of_same_model(one, other)]
    return found


def explanations_json(found: Sequence[Explanation]) -> list[dict[str, Any]]:
    """Return the explanations as JSON."""
    return [
        {
            "first": first,
            "second": second,
            "differences": [{**each._asdict(), "remedy": each.remedy} for each in differences],
        }
        for first, second, differences in found
    ]


def explanations_text(found: Sequence[Explanation], stores: Sequence[NamedStore]) -> str:
    """Return the explanations in words; without any, the reason for each store."""
    if found:
        return "\n\n".join(map(_in_words, found))
    nothing = "no two namespaces of one model to compare:"
    return "\n".join([nothing, *(f"  {each.url}: {_why_nothing(each.store)}" for each in stores)])


def _why_nothing(store: Store) -> str:
    """Return why a store shows no two namespaces of a model: unlisted, empty, or all equal."""
    if not isinstance(store, Listing):
        return (
            "it cannot list what it holds; give the names of two namespaces, which engines log at "
            "their start"
        )
    names = sorted(store.namespaces())
    if not names:
        return (
            "it is empty: no engine has saved there. `kvpool doctor http://ENGINE` says why; is it "
            "the store of the engines?"
        )
    known = [name for name in names if manifest_in(store, Namespace(name)) is not None]
    if unknown := [name for name in names if name not in known]:
        return (
            f"of {', '.join(unknown)} it has no manifest, whose values could be compared; an "
            "engine of the namespace writes it when it starts"
        )
    if len(names) == 1:
        return f"all its engines have one namespace, {names[0]}, and share"
    return f"each model has one namespace there ({', '.join(names)}), whose engines share"


def _in_words(explanation: Explanation) -> str:
    first, second, differences = explanation
    if not differences:
        return f"{first}\n{second}\nhave equal values: releases of vllm-kvpool differ"
    many = "1 value" if len(differences) == 1 else f"{len(differences)} values"
    lines = [first, second, f"share nothing, as they differ in {many}:"]
    for each in differences:
        one, other = short_pair(each.first, each.second)
        lines += [f"  {each.name}", f"    {one}", f"    {other}", f"    -> {each.remedy}"]
    return "\n".join(lines)


# Requests

_LINE = re.compile(r"kvpool: request (\S+): ((?:\w+=\d+ ?)+)")

REASONS = {
    "absent": (
        "were not in the pool: another request has to save them first, they were evicted, or the "
        "prompt differs before them (a date, another salt, template or adapter)"
    ),
    "not_needed": (
        "were in the pool and were not loaded: the engine's own prefix cache had them, they ended "
        "within a block, it was the last token, or load_policy=auto found computing faster"
    ),
    "short": "are less than a chunk at the prompt's end (chunk_tokens)",
    "timed_out": "were not known in time: the stores answered after lookup_timeout_ms",
    "store_error": "were not known: a store failed, which the log names",
    "unshareable": (
        "are not shared: media without identifiers or where videos are pruned, streaming input, or "
        "an adapter that cannot be read"
    ),
    "not_wanted": "were not to be loaded: kv_transfer_params, or prompt log-probabilities",
    "load_failed": (
        "were found and could not be read in time or were damaged (kvpool_failures says which), so "
        "they were computed"
    ),
}


class RequestReport(msgspec.Struct, frozen=True):
    """An engine's log of one request, in tokens."""

    request_id: str
    prompt: int
    to_load: int
    loaded: int | None
    """None where the log has no end of the load."""
    missed: dict[str, int]
    """By reason; `load_failed` are a part of `to_load`."""


def reports(lines: Iterable[str], request_id: str) -> list[RequestReport]:
    """Return the requests whose id contains this one, in the order of the log.

    Raises ConfigError without any.
    vLLM puts more around the id that a client gives.
    """
    values: dict[str, Counter[str]] = {}
    for line in lines:
        match = _LINE.search(line)
        if match and request_id in match[1]:
            counts = values.setdefault(match[1], Counter())
            counts.update({k: int(v) for k, v in (each.split("=") for each in match[2].split())})
    if not values:
        raise ConfigError(
            f"--log has nothing of a request {request_id!r}; the engine needs log_requests=true"
        )
    return [_report(each, counts) for each, counts in values.items()]


def _report(request_id: str, counts: Counter[str]) -> RequestReport:
    return RequestReport(
        request_id,
        counts["prompt"],
        counts["to_load"],
        counts["loaded"] if "loaded" in counts else (None if counts["to_load"] else 0),
        {reason: counts[reason] for reason in REASONS if counts[reason]},
    )


def requests_text(found: list[RequestReport]) -> str:
    """Return a paragraph for each of the first `MOST_REQUESTS`."""
    more = len(found) - MOST_REQUESTS
    ending = [f"{more} more; give more of the id"] if more > 0 else []
    return "\n\n".join([*map(_paragraph, found[:MOST_REQUESTS]), *ending])


def _paragraph(report: RequestReport) -> str:
    if report.loaded is None:
        taken = f"{report.to_load} were found; the log does not have the end of their load"
    else:
        taken = f"{report.loaded or 'None'} were loaded from the pool"
    reasons = [f"{tokens} {REASONS[reason]}" for reason, tokens in report.missed.items()]
    sentences = [f"{report.request_id} has a prompt of {report.prompt} tokens", taken, *reasons]
    return ". ".join(sentences) + "."
