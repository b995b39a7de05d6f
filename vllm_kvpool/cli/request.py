"""`kvpool explain --request`: why a request's tokens were taken from the pool or not, by what its
engine has logged (`log_requests`)."""

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

from vllm_kvpool.errors import ConfigError

MOST_SHOWN = 20

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
        "are not shared: media without identifiers, streaming input, or an adapter that cannot be "
        "read"
    ),
    "not_wanted": "were not to be loaded: kv_transfer_params, or prompt log-probabilities",
    "load_failed": (
        "were found and could not be read in time or were damaged (kvpool_failures says which), so "
        "they were computed"
    ),
}


class RequestReport(NamedTuple):
    """What an engine has logged of one request, in tokens."""

    request_id: str
    prompt: int
    to_load: int
    loaded: int | None
    """None where the log has no end of the load."""
    missed: dict[str, int]
    """By reason; `load_failed` are a part of `to_load`."""


def reports(lines: Iterable[str], request_id: str) -> list[RequestReport]:
    """The requests whose id contains this one, in the order of the log; ConfigError without any.

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


def as_json(found: Iterable[RequestReport]) -> list[dict[str, Any]]:
    """Reports as JSON."""
    return [each._asdict() for each in found]


def as_text(found: list[RequestReport]) -> str:
    """A paragraph for each of the first `MOST_SHOWN`."""
    more = len(found) - MOST_SHOWN
    ending = [f"{more} more; give more of the id"] if more > 0 else []
    return "\n\n".join([*map(_paragraph, found[:MOST_SHOWN]), *ending])


def _paragraph(report: RequestReport) -> str:
    if report.loaded is None:
        taken = f"{report.to_load} were found; the log does not have the end of their load"
    else:
        taken = f"{report.loaded or 'None'} were loaded from the pool"
    reasons = [f"{tokens} {REASONS[reason]}" for reason, tokens in report.missed.items()]
    sentences = [f"{report.request_id} has a prompt of {report.prompt} tokens", taken, *reasons]
    return ". ".join(sentences) + "."
