"""The report of `kvpool try`: rows, quartiles, advice and text."""

from collections.abc import Mapping
from typing import Any

import pytest
from msgspec.structs import replace

from vllm_kvpool.cli.try_report import (
    Comparison,
    Kind,
    PoolCounts,
    PoolSetup,
    TimedAnswer,
    TriedPrompt,
    advice,
    as_text,
    percentile,
    rows_of,
)

SETUP = PoolSetup(256, is_auto=False, has_stores=True, file_bytes=20 << 30)
COUNTS = PoolCounts(saved_tokens=16_384, file_bytes=16_384 * 20_480)


def turn(kind: Kind, *, ratio: float, speed: float = 1.0, **values: Any) -> TriedPrompt:
    """A prompt of 2,000 tokens; the pool's first token comes `ratio` times sooner."""
    known = 0 if kind is Kind.NEW else 1_900
    found = values.get("found", (known, known))
    return TriedPrompt(
        kind,
        prompt_tokens=2_000,
        known_tokens=known,
        without=TimedAnswer(1.0, 20.0, found[0], 2.0),
        pool=TimedAnswer(1.0 / ratio, 20.0 * speed, found[1], 3.0),
    )


def said(*turns: TriedPrompt, counts: PoolCounts = COUNTS, setup: PoolSetup = SETUP) -> str:
    return "\n".join(advice(rows_of(turns), counts, setup))


@pytest.mark.parametrize(
    ("count", "share", "value"), [(1, 0.99, 0), (100, 0.99, 99), (200, 0.99, 198), (4, 0.5, 2)]
)
def test_percentile_of_counted_values_is_one_of_them(count: int, share: float, value: int) -> None:
    assert percentile(range(count)[::-1], share) == value


def test_rows_of_turns_compare_each_request_with_itself() -> None:
    """Ratios of pairs: a slow minute of the machine changes none of them."""
    turns = [turn(Kind.RESTARTED, ratio=ratio, found=(0, 1_792)) for ratio in (1, 2, 3, 4, 5)]
    slow = [
        replace(
            each,
            without=replace(each.without, ttft_s=each.without.ttft_s * 8),
            pool=replace(each.pool, ttft_s=each.pool.ttft_s * 8),
        )
        for each in turns
    ]
    [row], [slow_row] = rows_of(turns), rows_of(slow)
    assert row.ttft_ratio == slow_row.ttft_ratio == Comparison(3, 2, 4)
    assert (row.requests, row.without.found, row.pool.found) == (5, 0, 0.896)
    assert (row.without.ttft_mean_s, slow_row.without.ttft_p99_s) == (1.0, 8.0)
    assert (row.without.cpu_s, row.pool.cpu_s) == (2.0, 3.0)


def test_rows_without_generated_tokens_have_no_speed() -> None:
    silent = turn(Kind.NEW, ratio=1)
    silent = replace(silent, pool=replace(silent.pool, tokens_per_s=None))
    [row] = rows_of([silent])
    assert (row.speed_ratio, row.pool.tokens_per_s) == (None, None)
    assert " - " in as_text([row], [])


RESTARTED: dict[str, tuple[Mapping[str, Any], PoolSetup, str]] = {
    "faster": ({"ratio": 3.0}, SETUP, "3.0 times sooner"),
    "slower": ({"ratio": 0.5}, SETUP, "slower than computing"),
    "equal": ({"ratio": 1.02}, SETUP, "no faster than computing"),
    "always loads": ({"ratio": 0.5}, SETUP, "load_policy: auto"),
    "host memory alone": (
        {"ratio": 1.0, "found": (0, 0)},
        replace(SETUP, has_stores=False),
        "host memory ends with its engine",
    ),
    "absent": ({"ratio": 1.0, "found": (0, 0)}, SETUP, "absent 512"),
    "chunk's end": ({"ratio": 3.0, "found": (0, 1_536)}, SETUP, "alias_tokens: 64"),
}


@pytest.mark.parametrize(("values", "setup", "words"), RESTARTED.values(), ids=RESTARTED)
def test_advice_after_a_restart_follows_from_hits_and_times(
    values: Mapping[str, Any], setup: PoolSetup, words: str
) -> None:
    counts = replace(COUNTS, missed={"absent": 512.0})
    assert words in said(turn(Kind.RESTARTED, **values), counts=counts, setup=setup)


def test_advice_leaves_out_what_is_set_already() -> None:
    slower = turn(Kind.RESTARTED, ratio=0.5)
    text = said(slower, setup=replace(SETUP, is_auto=True))
    assert "slower" in text
    assert "load_policy" not in text


@pytest.mark.parametrize("kind", [Kind.NEW, Kind.RESTARTED])
@pytest.mark.parametrize("ratios", [(0.5, 0.9, 3.0), (0.3, 1.5, 3.0)])
def test_advice_on_uneven_times_judges_nothing(kind: Kind, ratios: tuple[float, ...]) -> None:
    text = said(*(turn(kind, ratio=ratio, found=(0, 1_792)) for ratio in ratios))
    assert "too uneven to judge" in text
    assert "gains nothing" not in text
    assert "cost" not in text


def test_advice_on_few_tokens_behind_the_last_chunk_is_none() -> None:
    assert "alias_tokens" not in said(turn(Kind.RESTARTED, ratio=3.0, found=(0, 1_792)))


def test_advice_on_many_lost_chunks_does_not_blame_the_chunk() -> None:
    assert "alias_tokens" not in said(turn(Kind.RESTARTED, ratio=3.0, found=(0, 768)))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"ratio": 1.0}, "cost nothing that this run can show"),
        ({"ratio": 0.8}, "took 1.25 times as long"),
        ({"ratio": 1.0, "speed": 0.9}, "0.90 of the speed"),
    ],
)
def test_advice_on_new_prompts_says_what_saving_costs(
    values: Mapping[str, Any], words: str
) -> None:
    assert words in said(turn(Kind.NEW, **values))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"ratio": 0.8}, "the pool only costs: first tokens took 1.25 times"),
        ({"ratio": 2.0, "found": (1_000, 1_800)}, "vLLM's own cache lost 40%"),
    ],
)
def test_advice_on_seen_prompts_compares_with_vllms_own_cache(
    values: Mapping[str, Any], words: str
) -> None:
    assert words in said(turn(Kind.SEEN, **values))


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        (COUNTS, "A token takes 20 KiB in files: size=20 GiB holds about 1,048,576 tokens"),
        (replace(COUNTS, file_bytes=float(30 << 30)), "raise size="),
        (replace(COUNTS, unsaved={"full": 512.0}), "512 tokens were not saved: no room"),
        (replace(COUNTS, failures={"load_missing": 2.0}), "load_missing 2"),
        (PoolCounts(), "saved nothing: prompts are shorter than a chunk"),
        (PoolCounts(unsaved={"unreachable": 9.0}), "no store could be reached"),
    ],
)
def test_advice_names_room_and_losses(counts: PoolCounts, words: str) -> None:
    assert words in said(turn(Kind.NEW, ratio=1.0), counts=counts)


def test_one_request_of_a_kind_is_no_proof_but_has_a_row() -> None:
    [row] = rows_of([turn(Kind.NEW, ratio=2.0)])
    assert str(row.ttft_ratio) == "2.00 (2.00 to 2.00)"


def test_text_has_a_row_a_bar_and_the_advice_of_each() -> None:
    rows = rows_of([turn(kind, ratio=4.0) for kind in Kind])
    lines = as_text(rows, ["set nothing"]).splitlines()
    bars = [line.split() for line in lines if line.endswith("# 250 ms")]
    assert bars == [["pool", "#" * 10, "250", "ms"]] * 3
    assert lines[-1] == "* set nothing"
    assert sum("4.00 (4.00 to 4.00)" in line for line in lines) == 3
