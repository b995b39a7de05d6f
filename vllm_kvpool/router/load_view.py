"""A load on a terminal while it runs: in place where the terminal can, else a line a second."""

from collections import Counter
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from vllm_kvpool.router.load import Progress
from vllm_kvpool.router.load_stats import (
    LoadResult,
    Outcome,
    ReplicaView,
    Summary,
    ended_since,
    summarize,
)

WINDOW_S = 10.0  # of the rates and percentiles
LONG_WINDOW_S = 60.0
SPARK_SECONDS = 40
SPARKS = " ▁▂▃▄▅▆▇█"
MAX_REPLICA_ROWS = 32
MAX_WHYS = 5
BAR_WIDTH = 12
ROLE_STYLES = {"prefill": "blue", "decode": "green", "both": "magenta"}


def line(progress: Progress) -> str:
    """One line of progress."""
    recent = _recent(progress)
    words = [
        f"{progress.now_s:6.1f} s",
        f"sent {progress.sent}",
        f"in flight {progress.in_flight}",
        f"done {recent.completed_per_s:.1f}/s",
        f"ttft p50 {_ms(recent.ttft_p50_s)} p99 {_ms(recent.ttft_p99_s)}",
        f"shed {recent.outcomes['shed']}",
        f"failed {_failed(recent)}",
    ]
    if progress.states:
        router = progress.states[-1].router
        roles = "".join(_letter(replica) for replica in router.replicas)
        words.append(f"replicas {roles} queue {router.queue.requests}")
    return "  ".join(words)


def report(result: LoadResult) -> str:
    """What a load has brought, in a few lines."""
    summary = result.summary()
    counts = ", ".join(f"{count} {name}" for name, count in summary.outcomes.items() if count)
    cached = summary.cached_tokens / max(summary.prompt_tokens, 1)
    lines = [
        f"{summary.requests} requests in {summary.seconds:.1f} s: {counts or 'nothing'}",
        f"completed {summary.completed_per_s:.2f}/s, {summary.output_tokens_per_s:.0f} tokens/s, "
        f"{cached:.0%} of prompt tokens cached",
        f"first token p50 {_ms(summary.ttft_p50_s)}, p99 {_ms(summary.ttft_p99_s)}; "
        f"between tokens p50 {_ms(summary.gap_p50_s)}, p99 {_ms(summary.gap_p99_s)}",
        f"refused within p99 {_ms(summary.shed_p99_s)}; sent late by p99 {_ms(summary.lag_p99_s)}",
    ]
    whys = Counter(r.why for r in result.requests if r.why and r.outcome is not Outcome.SHED)
    lines += [f"{count} times: {why}" for why, count in whys.most_common(MAX_WHYS)]
    return "\n".join(lines)


def render(progress: Progress) -> RenderableType:
    """The whole view."""
    parts: list[RenderableType] = [_head(progress), _numbers(progress), _spark(progress)]
    if progress.states:
        parts += [_replicas(progress), _router_line(progress)]
    return Group(*parts)


def spark(values: Sequence[float]) -> str:
    """A row of bars, the highest value filling its cell."""
    top = max(values, default=0.0)
    if top <= 0:
        return SPARKS[0] * len(values)
    steps = len(SPARKS) - 1
    return "".join(SPARKS[round(value / top * steps)] for value in values)


def _head(progress: Progress) -> RenderableType:
    spec = progress.spec
    grid = Table.grid(padding=(0, 1))
    at_s = progress.now_s % spec.burst_every_s
    is_burst = at_s >= spec.burst_every_s - spec.burst_s and progress.now_s < spec.seconds
    rate = spec.burst_rate if is_burst else spec.rate if progress.now_s < spec.seconds else 0.0
    grid.add_row(
        Text(f" {progress.target.url}", style="bold"),
        ProgressBar(
            total=spec.seconds, completed=min(progress.now_s, spec.seconds), width=BAR_WIDTH
        ),
        f"{progress.now_s:.0f} of {spec.seconds:.0f} s",
        Text(f"{rate:g} requests/s", style="bold red" if is_burst else ""),
        f"{progress.in_flight} in flight",
    )
    return grid


def _numbers(progress: Progress) -> RenderableType:
    table = Table(box=None, padding=(0, 1), header_style="dim")
    table.add_column("", no_wrap=True)
    for name in ("done/s", "tokens/s", "ttft p50", "ttft p99", "gap p99", "shed", "failed", "lag"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, seconds in ((f"last {WINDOW_S:.0f} s", WINDOW_S), ("last minute", LONG_WINDOW_S)):
        summary = _recent(progress, seconds)
        failed = _failed(summary)
        shed = summary.outcomes["shed"]
        table.add_row(
            name,
            f"{summary.completed_per_s:.1f}",
            f"{summary.output_tokens_per_s:.0f}",
            _ms(summary.ttft_p50_s),
            _ms(summary.ttft_p99_s),
            _ms(summary.gap_p99_s),
            Text(str(shed), style="yellow" if shed else ""),
            Text(str(failed), style="bold red" if failed else ""),
            _ms(summary.lag_p99_s),
        )
    return table


def _spark(progress: Progress) -> RenderableType:
    """The worst time to the first token in each of the last seconds."""
    now = int(progress.now_s)
    worst = [0.0] * SPARK_SECONDS
    for result in reversed(progress.results):
        place = int(result.end_s) - now + SPARK_SECONDS - 1
        if place < 0:
            break
        if result.ttft_s is not None and place < SPARK_SECONDS:
            worst[place] = max(worst[place], result.ttft_s)
    return Text(f" worst ttft by second  {spark(worst)}  {_ms(max(worst))}", style="cyan")


def _replicas(progress: Progress) -> RenderableType:
    table = Table(box=None, padding=(0, 1), header_style="dim")
    for name in ("replica", "state", "role", "lock"):
        table.add_column(name, no_wrap=True)
    table.add_column("blocks", width=BAR_WIDTH)
    for name in ("", "runs", "waits"):
        table.add_column(name, justify="right", no_wrap=True)
    replicas = progress.states[-1].router.replicas
    for replica in replicas[:MAX_REPLICA_ROWS]:
        table.add_row(
            Text(replica.id),
            Text(replica.state),
            Text(replica.role, style=ROLE_STYLES.get(replica.role, "")),
            Text("locked", style="bold red") if replica.locked else "",
            ProgressBar(
                total=max(replica.total_blocks, 1),
                completed=replica.used_blocks,
                width=BAR_WIDTH,
            ),
            f"{replica.used_blocks}/{replica.total_blocks}",
            str(replica.running),
            str(replica.waiting),
        )
    if len(replicas) > MAX_REPLICA_ROWS:
        table.add_row(f"and {len(replicas) - MAX_REPLICA_ROWS} more")
    return table


def _router_line(progress: Progress) -> RenderableType:
    router = progress.states[-1].router
    words = (
        f" queue {router.queue.requests} ({router.queue.tokens} tokens)"
        f"   migration {router.migration.requests} ({router.migration.tokens} tokens)"
    )
    if router.plan is not None:
        plan = router.plan
        words += f"\n plan {plan.prefill.wanted}P {plan.decode.wanted}D: {plan.why}"
    if progress.is_state_stale:
        words += "\n the router's admin address does not answer"
    return Text(words, style="dim", no_wrap=True, overflow="ellipsis")


def _recent(progress: Progress, window_s: float = WINDOW_S) -> Summary:
    seconds = min(max(progress.now_s, 1e-3), window_s)
    return summarize(ended_since(progress.results, progress.now_s - seconds), seconds)


def _failed(summary: Summary) -> int:
    return sum(
        summary.outcomes[o.value] for o in (Outcome.FAILED, Outcome.TIMED_OUT, Outcome.NOT_SENT)
    )


def _letter(replica: ReplicaView) -> str:
    letter = {"prefill": "P", "decode": "D", "both": "B"}.get(replica.role, "-")
    return letter.lower() if replica.locked else letter


def _ms(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1e3:.0f} ms" if seconds < 10 else f"{seconds:.1f} s"
