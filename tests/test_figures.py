"""benchmarks/figures.py: the documents have the figures of the kept results."""

import json
import re
from pathlib import Path

import pytest

from benchmarks.figures import (
    COMPARISON,
    DECISIONS,
    DEVICES,
    PERFORMANCE,
    README,
    TEMPLATE,
    Figure,
    Kept,
    compare,
    documents,
    names_of,
    tables,
    times,
)
from benchmarks.scale import RESULTS, filled

NUMBER = r"(?<![-\w])[\d.,]*\d"
SECTIONS = [name for name in names_of(PERFORMANCE) if name != "hops"]


def figures(name: str) -> list[Figure]:
    """Return the rows of a table of figures."""
    rows = tables(Kept(), [name])[name].split("\n")[2:]
    return [Figure(*(cell.strip() for cell in row.strip("|").split("|"))) for row in rows]


@pytest.mark.parametrize(
    "document", [README, PERFORMANCE, COMPARISON, DECISIONS, DEVICES], ids=lambda path: path.name
)
def test_a_document_has_the_tables_of_the_kept_results(document: Path) -> None:
    text = document.read_text()
    assert filled(text, documents(Kept())[document]) == text


def test_each_block_of_the_template_is_a_table_of_a_document() -> None:
    blocks = re.findall(r"{% block (\w+) %}", TEMPLATE.read_text())
    names = [name for made in documents(Kept()).values() for name in made]
    assert sorted(blocks) == sorted(name.replace(" ", "_") for name in names)
    assert PERFORMANCE.read_text().count("<!-- end -->") == len(names_of(PERFORMANCE))


def test_headline_beside_the_mooncake_connector_has_random_and_real_weights() -> None:
    """The row with random weights alone promised 2.5 times; with real weights it is a draw."""
    rows = [row for row in figures("headline") if "First token" in row.what]
    beside = [row for row in rows if "MooncakeStoreConnector" in row.beside]
    assert [row.what.rpartition("; ")[2].split(" (")[0] for row in beside] == [
        "random weights",
        "real weights",
    ]


def test_figures_have_one_value_a_cell() -> None:
    for name in ("headline", *SECTIONS):
        for row in figures(name):
            cells = (row.ours, row.beside.rpartition(": ")[2], row.ratio)
            assert max(len(re.findall(NUMBER, each)) for each in cells) <= 1, row


@pytest.mark.parametrize("name", SECTIONS)
def test_section_with_a_row_that_is_worse_and_not_bold_names_its_target(name: str) -> None:
    about = PERFORMANCE.read_text().partition(f"<!-- {name} -->")[0].rpartition("<!-- end -->")[2]
    ratios = [row.ratio for row in figures(name)]
    passed = [ratio for ratio in ratios if re.fullmatch(r"0\.\d+", ratio)]
    assert not passed or re.search(r"wanted 0\.\d|no\s+target", about), passed


def test_named_minutes_are_about_those_of_the_kept_results() -> None:
    kept = [json.loads(path.read_text()).get("seconds", 0.0) for path in RESULTS.glob("*.json")]
    for document in (PERFORMANCE, PERFORMANCE.parents[1] / "Makefile"):
        [minutes] = re.findall(r"in about (\d+) minutes", document.read_text())
        assert int(minutes) == pytest.approx(sum(kept) / 60, rel=0.2)


def test_decision_on_sessions_names_the_gains_of_its_table() -> None:
    text = DECISIONS.read_text().partition("<!-- turns -->")[2].partition("\n## ")[0]
    gains = [(row["traffic"], float(row["gain"])) for row in Kept().rows("turns")]
    for traffic, said in (("trace", "The trace gains at most"), ("agents", "agents gain up to")):
        most = max(gain for name, gain in gains if name.startswith(traffic))
        assert f"{said} {most:.4f}" in text


def test_a_result_that_has_changed_shows(tmp_path: Path) -> None:
    for path in RESULTS.glob("*.json"):
        result = json.loads(path.read_text())
        for row in result["rows"]:
            if path.stem == "router_cpu" and row["side"] == "ours":
                row["us a short request"] *= 2
        (tmp_path / path.name).write_text(json.dumps(result))
    before, after = documents(Kept()), documents(Kept(tmp_path))
    assert after[README] == before[README]
    assert after[COMPARISON] == before[COMPARISON]
    assert [name for name in SECTIONS if after[PERFORMANCE][name] != before[PERFORMANCE][name]] == [
        "router"
    ]


def test_a_row_that_is_not_there_or_twice_is_an_error() -> None:
    with pytest.raises(LookupError, match="has 0 rows with"):
        Kept()("chat", "turn 3 ms", tiers="none")
    with pytest.raises(LookupError, match="rows with"):
        Kept()("hooks", "p50 us", side="kvpool")


def test_what_is_worse_is_bold() -> None:
    assert [times(ratio) for ratio in (2.345, 0.951, 12.6)] == ["2.3", "**0.95**", "13"]
    assert [times(ratio, at_least=1 / 1.5) for ratio in (0.68, 0.66)] == ["0.68", "**0.66**"]


def test_rates_and_times_are_compared_in_the_pools_favour() -> None:
    (rate,) = compare("Save", "GB/s", 2.0, {"peer": 1.0}, more_is_better=True)
    (time,) = compare("Save", "ms", 2.0, {"peer": 1.0})
    assert rate == ("Save", "2 GB/s", "peer: 1 GB/s", "2")
    assert time == ("Save", "2 ms", "peer: 1 ms", "**0.5**")


def test_a_figure_without_a_peers_time_has_no_ratio() -> None:
    (early,) = compare("First token", "ms", -40.0, {"peer": 131.0})
    (never,) = compare("First token", "ms", 71.0, {"peer": "no end in 60 s"})
    assert early.ratio == "comes first"
    assert (never.beside, never.ratio) == ("peer: no end in 60 s", "")
    assert compare("Put", "µs", 203.0) == [("Put", "203 µs", "", "")]
