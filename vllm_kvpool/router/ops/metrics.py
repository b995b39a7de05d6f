"""The router's metrics for Prometheus: one table of names, and what fills it.

Counts and levels are read off the controller when they are asked for, at most once a second; only
the histograms are fed while the router serves. Used by the router's loop, which waits for it: text
and histograms are written here, in a quarter of the time that prometheus_client takes.
"""

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Set
from functools import lru_cache
from itertools import accumulate

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from vllm_kvpool.metrics import SECONDS, MetricKind, NameLabels
from vllm_kvpool.metrics import Metric as Row
from vllm_kvpool.router.control.controller import Controller
from vllm_kvpool.router.control.events import REFUSALS, Mode
from vllm_kvpool.router.control.handovers import ExpectedPrompts
from vllm_kvpool.router.control.states import BROKEN, State
from vllm_kvpool.router.ops.request_log import RequestLog
from vllm_kvpool.router.ops.snapshot import (
    OUTCOMES,
    RatesView,
    ReplicaView,
    RouterView,
    state_of,
    transition_counts,
)

PREFIX = "kvpool_router_"
MAX_AGE_S = 1.0
MAX_SERIES = 1 << 15
LONG_SECONDS = (*SECONDS, 60.0, 120.0, 300.0, 600.0)

_C, _G, _H = MetricKind.COUNTER, MetricKind.GAUGE, MetricKind.HISTOGRAM
ROUTER_METRICS = {
    row.name: row
    for row in (
        Row("arrivals", _C, (), "Requests that have arrived."),
        Row("requests", _C, ("outcome",), "Requests that have ended, by how."),
        Row("refusals", _C, ("status",), "Requests refused, by HTTP status."),
        Row("prompts", _C, ("path",), "Prompts, by whether they were handed over, or why not."),
        Row(
            "handovers",
            _C,
            ("outcome",),
            "Prompts handed over, by whether the decoding engine found them in the pool.",
        ),
        Row(
            "prompt_tokens",
            _C,
            ("tenant", "source"),
            "Prompt tokens of requests, by tenant and by whether an engine computed them.",
        ),
        Row("resumes", _C, (), "Requests that went on at another replica after a failure."),
        Row("steals", _C, (), "Requests taken over from a replica that was loading."),
        Row("locks", _C, (), "Decoders locked as overloaded."),
        Row("releases", _C, (), "Locks that have ended."),
        Row("transitions", _C, ("from", "cause", "to"), "Transitions of replicas."),
        Row("in_flight_requests", _G, (), "Requests that have arrived and not ended."),
        Row("queue_requests", _G, (), "Requests that wait for a replica to compute the prompt."),
        Row("queue_tokens", _G, (), "Their prompt tokens."),
        Row("migration_requests", _G, (), "Requests that wait for a replica to decode them."),
        Row("migration_tokens", _G, (), "Their prompt tokens."),
        Row("replicas", _G, ("state",), "Replicas by state."),
        Row("locked_replicas", _G, (), "Decoders that are locked now."),
        Row("locked", _G, ("replica",), "1 while the decoder is locked."),
        Row("blocks", _G, ("replica", "kind"), "Blocks used, committed and in total."),
        Row(
            "replica_requests",
            _G,
            ("replica", "kind"),
            "Requests given to it (prefill, decode, bound), and as it says (running, waiting).",
        ),
        Row("replica_queued_tokens", _G, ("replica",), "Prompt tokens it has yet to compute."),
        Row(
            "flow_bytes_per_second",
            _G,
            ("replica", "direction"),
            "Bytes from the pool (in) and to it (out).",
        ),
        Row(
            "flow_tokens_per_second",
            _G,
            ("replica", "kind"),
            "Prompt tokens and generated tokens of the engine.",
        ),
        Row("replica_down", _G, ("replica",), "1 from its failure until it answers again."),
        Row(
            "replica_mismatch",
            _G,
            ("replica", "mismatch"),
            "1 while the engine cannot share KV or models with the others, by why.",
        ),
        Row("replica_stale", _G, ("replica",), "1 while its metrics are missing or too old."),
        Row("pool_up", _G, (), "0 while all engines say that the pool is down."),
        Row("collapsed", _G, (), "1 while prompts are computed where they are decoded."),
        Row("rate", _G, ("name",), "Measured rates; units in the name. Absent until measured."),
        Row("planner_mode", _G, ("mode",), "1 for the mode that the planner is in."),
        Row("plan_replicas", _G, ("role",), "Replicas that the last plan has counted."),
        Row("plan_wanted", _G, ("role",), "Replicas that the last plan wants."),
        Row("plan_steps", _G, (), "Steps that the last plan takes, or would take."),
        Row("plan_held", _G, (), "1 while measurements are missing that a plan needs."),
        Row(
            "first_token_seconds",
            _H,
            (),
            "Time from a request's arrival to its first token.",
            LONG_SECONDS,
        ),
        Row(
            "added_seconds",
            _H,
            (),
            "Time that the router itself has added to a request, waiting in queues aside.",
            SECONDS,
        ),
        Row(
            "replica_first_token_seconds",
            _H,
            ("replica",),
            "Time from asking the engine for an answer, or from the end of the prefill that it "
            "waits for, to its first token.",
            (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
        ),
        Row(
            "replica_token_seconds",
            _H,
            ("replica",),
            "Mean time between the tokens of an answer.",
            (0.005, 0.01, 0.02, 0.035, 0.05, 0.1, 0.2, 0.5, 1.0),
        ),
        Row("request_seconds", _H, (), "Time from a request's arrival to its end.", LONG_SECONDS),
    )
}


_Labelled = tuple[tuple[str, ...], float]
"""A sample: its labels' values, and its own."""
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


class Telemetry:
    """Metrics of one router."""

    def __init__(
        self,
        controller: Controller,
        *,
        clock: Callable[[], float] = time.monotonic,
        max_age_s: float = MAX_AGE_S,
    ) -> None:
        """`clock` is that of the controller's events.

        Who asks within `max_age_s` is answered what was answered last.
        """
        self._controller = controller
        self._clock = clock
        self._max_age_s = max_age_s
        self._histograms = {
            row.name: Histogram(row)
            for row in ROUTER_METRICS.values()
            if row.kind is MetricKind.HISTOGRAM
        }
        self._tenants = NameLabels()
        self._prompt_tokens: Counter[tuple[str, str]] = Counter()
        """Prompt tokens by tenant's label and source."""
        self._last: dict[bool, tuple[float, bytes]] = {}

    def count_request(self, request: RequestLog) -> None:
        """Add an ended request to the histograms, and its prompt to its tenant's counters."""
        for each in request.observed:
            self._histograms[each.name].observe(each.replica, each.seconds)
        tokens = request.prompt_tokens
        if not tokens:
            return
        tenant = self._tenants.of(request.tenant)
        if request.cached_tokens is None:
            self._prompt_tokens[tenant, "unknown"] += tokens
            return
        cached = min(request.cached_tokens, tokens)
        self._prompt_tokens[tenant, "cached"] += cached
        self._prompt_tokens[tenant, "computed"] += tokens - cached

    def expose(self, *, with_names: bool = True) -> tuple[str, bytes]:
        """Return the content type and body.

        The body has all metrics, or those that name no replica and no tenant.
        """
        now = self._clock()
        at, body = self._last.get(with_names, (float("-inf"), b""))
        if now - at >= self._max_age_s:
            body = self._text(now, with_names)
            self._last[with_names] = now, body
        return CONTENT_TYPE_PLAIN_0_0_4, body

    def _text(self, now: float, with_names: bool) -> bytes:
        view = state_of(self._controller, now)
        values = _values(view) | {"transitions": list(transition_counts(self._controller))}
        lines: list[str] = []
        for name, samples in values.items():
            lines += _head(name)
            lines += (_line(name, labels, value) for labels, value in samples)
        if with_names:
            lines += _head("prompt_tokens")
            for labels, tokens in self._prompt_tokens.items():
                lines.append(_line("prompt_tokens", labels, tokens))
            for name, read in _PER_REPLICA.items():
                lines += _head(name)
                for each in view.replicas:
                    lines += (_line(name, (each.id, *more), value) for more, value in read(each))
        replica_ids = {each.id for each in view.replicas}
        for histogram in self._histograms.values():
            if with_names or not histogram.is_labelled:
                lines += histogram.lines(replica_ids)
        return ("\n".join(lines) + "\n").encode()


class Histogram:
    """A histogram over all replicas, or with a label one for each, as lists of counts."""

    def __init__(self, row: Row) -> None:
        self._row = row
        self.is_labelled = bool(row.labels)
        self._counts: dict[str, list[int]] = {}
        self._sums: dict[str, float] = {}
        if not self.is_labelled:
            self._add("")

    def observe(self, replica: str, value: float) -> None:
        """Count a value; `replica` is empty without a label."""
        counts = self._counts.get(replica) or self._add(replica)
        counts[bisect_left(self._row.bounds, value)] += 1
        self._sums[replica] += value

    def _add(self, replica: str) -> list[int]:
        self._sums[replica] = 0.0
        counts = self._counts[replica] = [0] * (len(self._row.bounds) + 1)
        return counts

    def lines(self, replica_ids: Set[str]) -> Iterator[str]:
        """Yield the lines of the exposition; replicas that are no more are forgotten."""
        name = PREFIX + self._row.name
        yield from _head(self._row.name)
        bounds = (*map(str, self._row.bounds), "+Inf")
        for replica in self._counts.keys() - replica_ids if self.is_labelled else ():
            del self._counts[replica], self._sums[replica]
        for replica, counts in self._counts.items():
            label = f'replica="{replica.translate(_ESCAPES)}"' if self.is_labelled else ""
            comma, labels = "," if label else "", f"{{{label}}}" if label else ""
            for bound, total in zip(bounds, accumulate(counts), strict=True):
                yield f'{name}_bucket{{{label}{comma}le="{bound}"}} {total}'
            yield f"{name}_count{labels} {sum(counts)}"
            yield f"{name}_sum{labels} {self._sums[replica]}"


def _exposed(name: str) -> str:
    return PREFIX + name + "_total" * (ROUTER_METRICS[name].kind is MetricKind.COUNTER)


def _head(name: str) -> tuple[str, str]:
    row, exposed = ROUTER_METRICS[name], _exposed(name)
    return f"# HELP {exposed} {row.help}", f"# TYPE {exposed} {row.kind.value}"


def _line(name: str, labels: tuple[str, ...], value: float) -> str:
    return f"{_series(name, labels)} {float(value)}"


@lru_cache(maxsize=MAX_SERIES)
def _series(name: str, labels: tuple[str, ...]) -> str:
    """Return the series, kept between expositions: most of the time would go here."""
    if not labels:
        return _exposed(name)
    named = zip(ROUTER_METRICS[name].labels, labels, strict=True)
    inside = ",".join([f'{label}="{given.translate(_ESCAPES)}"' for label, given in named])
    return f"{_exposed(name)}{{{inside}}}"


def _values(view: RouterView) -> dict[str, list[_Labelled]]:
    """Return the samples that name no replica, without transitions and histograms."""
    counts, plan = view.counts, view.plan
    states = Counter(each.state for each in view.replicas)
    wanted = {"prefill": plan.prefill, "decode": plan.decode}
    single = {
        "arrivals": counts["arrived"],
        "resumes": counts["resumed"],
        "steals": counts["stolen"],
        "locks": counts["locks"],
        "releases": counts["releases"],
        "in_flight_requests": view.in_flight,
        "queue_requests": view.queue.requests,
        "queue_tokens": view.queue.tokens,
        "migration_requests": view.migration.requests,
        "migration_tokens": view.migration.tokens,
        "locked_replicas": sum(each.locked for each in view.replicas),
        "pool_up": view.pool_is_up,
        "collapsed": view.is_collapsed,
        "plan_steps": len(plan.steps),
        "plan_held": bool(plan.held),
    }
    return {
        **{name: [((), float(value))] for name, value in single.items()},
        "requests": [((name,), counts[name]) for name in OUTCOMES],
        "refusals": [((str(status),), view.refusals.get(status, 0)) for status in REFUSALS],
        "prompts": [((path,), number) for path, number in view.prompts.items()],
        "handovers": [((name,), counts[f"handovers_{name}"]) for name in ExpectedPrompts._fields],
        "replicas": [((state.value,), states[state]) for state in State],
        "rate": list(_rates(view.rates)),
        "planner_mode": [((mode.value,), mode is plan.mode) for mode in Mode],
        # No sample without a plan: an autoscaler would scale to a 0.
        "plan_replicas": [((role,), each.have) for role, each in wanted.items() if plan.at],
        "plan_wanted": [((role,), each.wanted) for role, each in wanted.items() if plan.at],
    }


_PER_REPLICA: dict[str, Callable[[ReplicaView], list[_Labelled]]] = {
    "locked": lambda each: [((), each.locked)],
    "replica_down": lambda each: [((), each.state in BROKEN)],
    "blocks": lambda each: [
        (("used",), each.used_blocks),
        (("committed",), each.committed_blocks),
        (("total",), each.total_blocks),
    ],
    "replica_requests": lambda each: [
        (("prefill",), each.prefills),
        (("decode",), each.decodes),
        (("bound",), each.bound),
        (("running",), each.running),
        (("waiting",), each.waiting),
    ],
    "replica_queued_tokens": lambda each: [((), each.tokens_in)],
    "flow_bytes_per_second": lambda each: [
        (("in",), each.bytes_in_per_s),
        (("out",), each.bytes_out_per_s),
    ],
    "flow_tokens_per_second": lambda each: [
        (("prompt",), each.prompt_tokens_per_s),
        (("generated",), each.generated_tokens_per_s),
    ],
    "replica_mismatch": lambda each: [((each.mismatch,), 1)] if each.mismatch else [],
    "replica_stale": lambda each: [((), each.is_stale)],
}


def _rates(rates: RatesView) -> Iterator[_Labelled]:
    for name, value in rates.learned.items():
        if value is not None:
            yield (name,), value
    yield ("asked_tokens_per_s",), rates.asked_tokens_per_s
    yield ("handed_tokens_per_s",), rates.handed_tokens_per_s
