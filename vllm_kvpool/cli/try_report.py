"""The report of `kvpool try`: figures, advice and text. Pure."""

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from statistics import fmean, quantiles

import msgspec

from vllm_kvpool.cli.common.tables import TextTable, size_text, texts
from vllm_kvpool.cli.sharing import UNSAVED

WITHOUT, POOL = "no pool", "pool"  # names of the two engines
COLUMNS = (
    *("prompts", "requests", "tokens", "side", "found", "TTFT mean", "TTFT p99"),
    *("times sooner", "tokens/s", "CPU s"),
)
LEGEND = """\
Both engines ran at once with the same options but for the pool, and got the same prompts in turns,
one at a time. Both used vLLM's own prefix cache, which a restart empties; stores stay.
found: share of prompt tokens that were not computed. times sooner: time to the first token (TTFT)
without the pool over that with it, median of the requests (quartiles). CPU s: of all processes of
the engine for a request, waiting included."""
BAR_CHARS = 40
CLEAR = 0.05  # a median ratio nearer to 1 is no difference
LOST_SHARE = 0.1  # of known tokens, that advice is given for


class Kind(Enum):
    """Kinds of prompts, by the computation that an engine may save."""

    NEW = "new"
    SEEN = "seen by this engine"
    RESTARTED = "seen before a restart"


class TimedAnswer(msgspec.Struct, frozen=True):
    """An engine's answer to a prompt, and its times."""

    ttft_s: float
    tokens_per_s: float | None
    """Speed after the first token; None for answers of one token."""
    found_tokens: int
    """Prompt tokens that the engine did not compute."""
    cpu_s: float = 0.0
    """CPU time of the engine's processes from this request until the next one."""


class TriedPrompt(msgspec.Struct, frozen=True):
    """A prompt, and the answers of both engines."""

    kind: Kind
    prompt_tokens: int
    known_tokens: int
    """Leading tokens of the prompt that were computed before."""
    without: TimedAnswer
    pool: TimedAnswer
    first: str = WITHOUT
    """The side that was asked first."""


class PoolCounts(msgspec.Struct, frozen=True):
    """Counters of the engine with the pool, over all its lives."""

    saved_tokens: float = 0.0
    file_bytes: float = 0.0
    """Bytes put into the `file://` tier."""
    missed: Mapping[str, float] = {}
    """Tokens by the reason that they were not loaded, after the restart."""
    unsaved: Mapping[str, float] = {}
    """Tokens by the reason that they were not saved."""
    failures: Mapping[str, float] = {}


class PoolSetup(msgspec.Struct, frozen=True):
    """The options of the pool that advice is about."""

    chunk_tokens: int
    is_auto: bool
    """`load_policy` is `auto`."""
    has_stores: bool
    file_bytes: int = 0
    """Size of the `file://` tier; 0 without one."""


class SideFigures(msgspec.Struct, frozen=True):
    """Figures of one engine over the prompts of one kind."""

    found: float
    """Share of the prompts' tokens that the engine did not compute."""
    ttft_mean_s: float
    ttft_p99_s: float
    tokens_per_s: float | None
    cpu_s: float
    """Mean CPU time of a request."""


class Comparison(msgspec.Struct, frozen=True):
    """Ratio of the engine without the pool to the engine with it, over requests."""

    median: float
    low: float
    """Lower quartile."""
    high: float
    """Upper quartile."""

    @property
    def is_better(self) -> bool:
        """True if the pool is faster for three of four requests, and clearly so."""
        return self.low > 1 and self.median > 1 + CLEAR

    @property
    def is_worse(self) -> bool:
        """True if the pool slows the engine clearly, by the median and the interval's upper end."""
        return self.high < 1 and self.median < 1 - CLEAR

    @property
    def is_equal(self) -> bool:
        """True if the median is near 1. A ratio that is none of the three is too uneven."""
        return abs(self.median - 1) <= CLEAR

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f})"


class Row(msgspec.Struct, frozen=True):
    """Both engines over the prompts of one kind."""

    kind: Kind
    requests: int
    prompt_tokens: float
    known_tokens: float
    without: SideFigures
    pool: SideFigures
    ttft_ratio: Comparison
    speed_ratio: Comparison | None
    """Seconds a generated token; None if every answer has one token."""


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which `share` of the values lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def rows_of(turns: Sequence[TriedPrompt]) -> list[Row]:
    """Return a row for each kind of prompt that there was."""
    rows = []
    for kind in Kind:
        of_kind = [turn for turn in turns if turn.kind is kind]
        if not of_kind:
            continue
        speeds = [
            turn.pool.tokens_per_s / turn.without.tokens_per_s
            for turn in of_kind
            if turn.pool.tokens_per_s and turn.without.tokens_per_s
        ]
        ratios = [turn.without.ttft_s / turn.pool.ttft_s for turn in of_kind]
        rows.append(
            Row(
                kind,
                len(of_kind),
                fmean(turn.prompt_tokens for turn in of_kind),
                fmean(turn.known_tokens for turn in of_kind),
                _figures(of_kind, lambda turn: turn.without),
                _figures(of_kind, lambda turn: turn.pool),
                _comparison(ratios),
                _comparison(speeds) if speeds else None,
            )
        )
    return rows


def _figures(
    turns: Sequence[TriedPrompt], side: Callable[[TriedPrompt], TimedAnswer]
) -> SideFigures:
    answers = [side(turn) for turn in turns]
    first = [answer.ttft_s for answer in answers]
    speeds = [answer.tokens_per_s for answer in answers if answer.tokens_per_s]
    found = sum(answer.found_tokens for answer in answers)
    return SideFigures(
        found / sum(turn.prompt_tokens for turn in turns),
        fmean(first),
        percentile(first, 0.99),
        fmean(speeds) if speeds else None,
        fmean(answer.cpu_s for answer in answers),
    )


def _comparison(ratios: Sequence[float]) -> Comparison:
    if len(ratios) == 1:
        return Comparison(ratios[0], ratios[0], ratios[0])
    low, median, high = quantiles(ratios, n=4, method="inclusive")
    return Comparison(median, low, high)


# Advice


def advice(rows: Sequence[Row], counts: PoolCounts, setup: PoolSetup) -> list[str]:
    """Return the meaning of the figures and the options to set, in one or two sentences each."""
    by_kind = {row.kind: row for row in rows}
    if not counts.saved_tokens:
        return _nothing_saved(counts, setup)
    said = []
    if Kind.RESTARTED in by_kind:
        said += _on_restart(by_kind[Kind.RESTARTED], counts, setup)
    if Kind.SEEN in by_kind:
        said += _on_seen(by_kind[Kind.SEEN])
    if Kind.NEW in by_kind:
        said += _on_new(by_kind[Kind.NEW])
    return said + _on_room(counts, setup) + _on_losses(counts)


def _nothing_saved(counts: PoolCounts, setup: PoolSetup) -> list[str]:
    return _on_losses(counts) or [
        "The pool saved nothing: prompts are shorter than a chunk (lower chunk_tokens, now "
        f"{setup.chunk_tokens}), or the engine's log says why it does not save."
    ]


def _on_restart(row: Row, counts: PoolCounts, setup: PoolSetup) -> list[str]:
    ratio = row.ttft_ratio
    if not row.pool.found:
        if not setup.has_stores:
            return [
                "After the restart nothing was found: host memory ends with its engine. Add a "
                "store that stays, for example --store file:///nvme/kvpool."
            ]
        why = ", ".join(f"{reason} {n:.0f}" for reason, n in sorted(counts.missed.items()))
        return [
            f"After the restart nothing was found; tokens missed by reason: {why or 'none'}. "
            "docs/troubleshooting.md explains each reason."
        ]
    said = []
    if ratio.is_better:
        said.append(
            f"After a restart, or on another engine, first tokens came {ratio.median:.1f} times "
            "sooner: the pool pays where engines restart or share their requests."
        )
    elif ratio.is_worse or ratio.is_equal:
        said.append(
            f"Loading was {'slower than' if ratio.is_worse else 'no faster than'} computing: this "
            "model gains nothing from the pool here. Try a faster store"
            + ("." if setup.is_auto else ", or set load_policy: auto, which then loads nothing.")
        )
    else:
        said.append(_uneven("After the restart", ratio))
    lost = row.known_tokens - row.pool.found * row.prompt_tokens
    if LOST_SHARE * row.known_tokens < lost < 2 * setup.chunk_tokens:
        said.append(
            f"Of {row.known_tokens:.0f} known tokens a prompt, {lost:.0f} were computed again: a "
            f"hit ends with a whole chunk of {setup.chunk_tokens} tokens. Set alias_tokens: 64, or "
            "lower chunk_tokens in all engines."
        )
    return said


def _uneven(where: str, ratio: Comparison) -> str:
    return (
        f"{where} first tokens came {ratio} times sooner with the pool: too uneven to judge. Try "
        "again on a quieter machine."
    )


def _on_seen(row: Row) -> list[str]:
    gained = row.pool.found - row.without.found
    if gained > CLEAR:
        return [
            f"vLLM's own cache lost {gained:.0%} of the tokens of prompts it had seen, and the "
            "pool had them: the pool also pays in one engine that does not restart."
        ]
    if row.ttft_ratio.is_worse:
        return [
            "Where vLLM's own cache holds a conversation the pool only costs: first tokens took "
            f"{1 / row.ttft_ratio.median:.2f} times as long."
        ]
    return []


def _on_new(row: Row) -> list[str]:
    costs = []
    if row.ttft_ratio.is_worse:
        costs.append(f"first tokens took {1 / row.ttft_ratio.median:.2f} times as long")
    if row.speed_ratio is not None and row.speed_ratio.is_worse:
        costs.append(f"tokens were generated at {row.speed_ratio.median:.2f} of the speed")
    if not costs:
        if row.ttft_ratio.is_better or row.ttft_ratio.is_equal:
            return ["Saving new prompts cost nothing that this run can show."]
        return [_uneven("Where new prompts were saved", row.ttft_ratio)]
    return [
        f"Saving new prompts costs: {' and '.join(costs)}. Requests whose prompts never come again "
        'can say so: {"kv_transfer_params": {"kvpool": {"save": false}}}.'
    ]


def _on_room(counts: PoolCounts, setup: PoolSetup) -> list[str]:
    if not (counts.file_bytes and setup.file_bytes):
        return []
    token_bytes = counts.file_bytes / counts.saved_tokens
    tokens = setup.file_bytes / token_bytes
    text = (
        f"A token takes {size_text(token_bytes)} in files: size={size_text(setup.file_bytes)} "
        f"holds about {tokens:,.0f} tokens."
    )
    if counts.file_bytes > setup.file_bytes:
        text += f" This run saved {size_text(counts.file_bytes)}: raise size=."
    return [text]


def _on_losses(counts: PoolCounts) -> list[str]:
    said = [
        f"{tokens:.0f} tokens were not saved: {UNSAVED.get(reason, reason)}."
        for reason, tokens in sorted(counts.unsaved.items())
    ]
    if counts.failures:
        kinds = ", ".join(f"{kind} {n:.0f}" for kind, n in sorted(counts.failures.items()))
        said.append(f"Failures in the pool: {kinds} (docs/failures.md).")
    return said


# Text


def as_text(rows: Sequence[Row], said: Sequence[str]) -> str:
    """Return the table, a bar for each mean time to the first token, and the advice."""
    lines = []
    for row in rows:
        for name, side in ((WITHOUT, row.without), (POOL, row.pool)):
            is_pool = name == POOL
            speed = "-" if side.tokens_per_s is None else f"{side.tokens_per_s:.1f}"
            lines.append(
                (
                    "" if is_pool else row.kind.value,
                    "" if is_pool else row.requests,
                    "" if is_pool else f"{row.prompt_tokens:.0f}",
                    name,
                    f"{side.found:.0%}",
                    _ms(side.ttft_mean_s),
                    _ms(side.ttft_p99_s),
                    str(row.ttft_ratio) if is_pool else "",
                    speed,
                    f"{side.cpu_s:.2f}",
                )
            )
    table = TextTable("", COLUMNS, texts(lines)).as_text()
    return "\n".join([table, "", LEGEND, "", *_bars(rows), "", *(f"* {each}" for each in said)])


def _bars(rows: Sequence[Row]) -> list[str]:
    longest = max(side.ttft_mean_s for row in rows for side in (row.without, row.pool))
    width = max(len(row.kind.value) for row in rows)
    lines = ["Mean time to the first token:"]
    for row in rows:
        for name, side in ((WITHOUT, row.without), (POOL, row.pool)):
            label = row.kind.value if name == WITHOUT else ""
            bar = "#" * max(1, round(BAR_CHARS * side.ttft_mean_s / longest))
            lines.append(f"  {label:{width}}  {name:{len(WITHOUT)}}  {bar} {_ms(side.ttft_mean_s)}")
    return lines


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f} ms"
