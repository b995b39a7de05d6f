"""A load as a picture: latency, rates, roles and locks, memory and queues over one time axis."""

from pathlib import Path
from typing import Literal, TypedDict

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import LogFormatter

from vllm_kvpool.router.load_stats import (
    LoadResult,
    Outcome,
    ReplicaView,
    StateSample,
    per_second,
    ttft_by_window,
)
from vllm_kvpool.router.load_trace import bursts


class LegendPlace(TypedDict):
    """Of a legend, as matplotlib takes it."""

    loc: Literal["upper left"]
    bbox_to_anchor: tuple[float, float]
    fontsize: int


WINDOWS = 60  # of percentiles, along the axis
BESIDE: LegendPlace = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0), "fontsize": 8}
LAST_SAMPLE_S = 1.0  # how long the last state is drawn
ROLE_COLOURS = {"prefill": "#4477aa", "decode": "#228833", "both": "#aa3377"}
IDLE_COLOUR = "#bbbbbb"  # of a replica that serves nothing
OUTCOME_COLOURS = {
    Outcome.COMPLETED: "#228833",
    Outcome.SHED: "#ccbb44",
    Outcome.FAILED: "#ee6677",
    Outcome.TIMED_OUT: "#aa3377",
    Outcome.NOT_SENT: "#000000",
}
UP_STATES = frozenset(
    {"prefill", "decode", "old_prefill", "refractory_prefill", "new_prefill", "both"}
)


def write_plot(result: LoadResult, path: Path) -> None:
    """Draw a load into a file, whose ending says the format."""
    num_replicas = len(_replica_ids(result.states))
    heights = [3.0, 1.6, *((0.6 + 0.22 * num_replicas, 1.6) if num_replicas else ())]
    figure = Figure(figsize=(11, 1.4 + 1.1 * sum(heights)), layout="constrained")
    FigureCanvasAgg(figure)
    rows = figure.subplots(
        len(heights), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights}
    )[:, 0]
    draw = [_draw_latency, _draw_rates, *((_draw_replicas, _draw_backlog) if num_replicas else ())]
    for axes, panel in zip(rows, draw, strict=True):
        panel(axes, result)
        for begin, end in bursts(result.spec):
            axes.axvspan(begin, end, color="#000000", alpha=0.06, linewidth=0, zorder=0)
    rows[0].set_title(_title(result), fontsize=10, loc="left")
    rows[-1].set_xlabel("seconds (bursts are shaded)")
    rows[-1].set_xlim(0, result.seconds)
    figure.savefig(path, dpi=110)


def _title(result: LoadResult) -> str:
    summary = result.summary()
    counts = ", ".join(f"{n} {name}" for name, n in summary.outcomes.items() if n)
    return f"{result.url}   {result.model}   {summary.requests} requests: {counts}"


def _draw_latency(axes: Axes, result: LoadResult) -> None:
    ttfts = {r.at_s: r.ttft_s * 1e3 for r in result.requests if r.ttft_s is not None}
    if ttfts:
        axes.scatter(
            list(ttfts), list(ttfts.values()), s=5, color="#66ccee", linewidths=0, label="each"
        )
    window_s = max(result.seconds / WINDOWS, 1.0)
    for percent, colour in ((50, "#4477aa"), (99, "#ee6677")):
        line = ttft_by_window(result.requests, result.seconds, window_s, percent)
        if line:
            middles, values = zip(*line, strict=True)
            milliseconds = [value * 1e3 for value in values]
            axes.plot(middles, milliseconds, color=colour, linewidth=1.3, label=f"p{percent}")
    axes.set_ylabel("time to first\ntoken, ms")
    if ttfts:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(LogFormatter())
        axes.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.5)))
        axes.legend(**BESIDE)


def _draw_rates(axes: Axes, result: LoadResult) -> None:
    offered = [0] * len(per_second((), Outcome.COMPLETED, result.seconds))
    for request in result.requests:
        offered[min(int(request.at_s), len(offered) - 1)] += 1
    seconds = [second + 0.5 for second in range(len(offered))]
    axes.step(seconds, offered, where="mid", color="#888888", linewidth=1, label="offered")
    for outcome, colour in OUTCOME_COLOURS.items():
        counts = per_second(result.requests, outcome, result.seconds)
        if any(counts):
            axes.step(seconds, counts, where="mid", color=colour, linewidth=1, label=outcome.value)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("requests/s")
    axes.legend(**BESIDE)


def _draw_replicas(axes: Axes, result: LoadResult) -> None:
    ids = _replica_ids(result.states)
    rows = {replica_id: row for row, replica_id in enumerate(ids)}
    # Intervals of the same look are drawn as one.
    for replica_id, row in rows.items():
        for begin, end, replica in stretches(result, replica_id):
            axes.barh(
                row,
                end - begin,
                left=begin,
                height=0.8,
                color=_colour(replica),
                hatch="////" if replica.locked else None,
                edgecolor="#cc0000" if replica.locked else "white",
                linewidth=0.4,
            )
    axes.set_yticks(list(rows.values()), list(rows), fontsize=8)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_ylabel("roles, locks")
    axes.legend(
        handles=[
            *(Patch(color=colour, label=role) for role, colour in ROLE_COLOURS.items()),
            Patch(color=IDLE_COLOUR, label="serves nothing"),
            Patch(facecolor="white", edgecolor="#cc0000", hatch="////", label="locked"),
        ],
        **BESIDE,
    )


def _draw_backlog(axes: Axes, result: LoadResult) -> None:
    times = [sample.at_s for sample in result.states]
    for name, colour, values in (
        ("queue", "#4477aa", [s.router.queue.requests for s in result.states]),
        ("migration", "#228833", [s.router.migration.requests for s in result.states]),
    ):
        axes.step(times, values, where="post", color=colour, linewidth=1, label=name)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("requests\nthat wait")
    shares = axes.twinx()
    shares.plot(times, [_fullest(s) for s in result.states], color="#aa3377", linewidth=1)
    shares.set_ylim(0, 1.05)
    shares.set_ylabel("blocks used,\nfullest replica", color="#aa3377")
    axes.legend(loc="upper left", fontsize=8, ncols=2)


def _replica_ids(states: tuple[StateSample, ...]) -> list[str]:
    """In the order in which they were first seen."""
    return list(dict.fromkeys(each.id for sample in states for each in sample.router.replicas))


def stretches(result: LoadResult, replica_id: str) -> list[tuple[float, float, ReplicaView]]:
    """Begin, end and look of a replica, as long as it looks the same and is there."""
    found: list[tuple[float, float, ReplicaView]] = []
    ends = [sample.at_s for sample in result.states[1:]]
    for sample, end in zip(
        result.states, [*ends, result.states[-1].at_s + LAST_SAMPLE_S], strict=True
    ):
        replica = next((each for each in sample.router.replicas if each.id == replica_id), None)
        if replica is None:
            continue
        if found and found[-1][1] == sample.at_s and _look(found[-1][2]) == _look(replica):
            found[-1] = (found[-1][0], end, replica)
        else:
            found.append((sample.at_s, end, replica))
    return found


def _look(replica: ReplicaView) -> tuple[str, bool]:
    return _colour(replica), replica.locked


def _colour(replica: ReplicaView) -> str:
    if replica.state and replica.state not in UP_STATES:
        return IDLE_COLOUR
    return ROLE_COLOURS.get(replica.role, IDLE_COLOUR)


def _fullest(sample: StateSample) -> float:
    replicas = [each for each in sample.router.replicas if each.total_blocks]
    return max((each.used_blocks / each.total_blocks for each in replicas), default=0.0)
