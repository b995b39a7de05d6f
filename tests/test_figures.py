"""benchmarks/figures.py: the documents have the figures of the kept results."""

import json
import re
from pathlib import Path

import pytest

from benchmarks.figures import (
    COMPARISON,
    DECISIONS,
    PERFORMANCE,
    README,
    SECTIONS,
    Kept,
    at_most,
    documents,
    headline,
    times,
)
from benchmarks.scale import RESULTS, filled


@pytest.mark.parametrize("document", [README, PERFORMANCE, COMPARISON, DECISIONS], ids=lambda path: path.name)
def test_a_document_has_the_tables_of_the_kept_results(document: Path) -> None:
    text = document.read_text()
    assert filled(text, documents(Kept())[document]) == text


def test_all_tables_of_figures_are_made() -> None:
    assert PERFORMANCE.read_text().count("<!-- end -->") == len(SECTIONS)


def test_headline_beside_the_mooncake_connector_has_random_and_real_weights() -> None:
    """The row with random weights alone promised 2.5 times; with real weights it is a draw."""
    rows = [row for row in headline(Kept()) if "First token" in row["figure"]]
    beside = [row for row in rows if "MooncakeStoreConnector" in row["compared with"]]
    assert [row["figure"].rpartition("; ")[2].split(" (")[0] for row in beside] == [
        "random weights",
        "real weights",
    ]


def test_headline_cells_have_one_value() -> None:
    for row in headline(Kept()):
        for name in ("vllm-kvpool", "compared with", "times better"):
            assert len(re.findall(r"(?<![-\w])[\d.,]*\d", row[name])) == 1, row


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
        Kept()("chat", tiers="none")
    with pytest.raises(LookupError, match="rows with"):
        Kept()("hooks", side="kvpool")


def test_what_is_worse_is_bold() -> None:
    assert times(2.345, 0.951, 12.6) == "2.3, **0.95**, 13"
    assert at_most(1.5, 1.44, 1.52) == "1.44, **1.52**"
