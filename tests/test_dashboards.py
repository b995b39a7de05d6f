"""Dashboards and alert rules ask for metrics and labels that exist."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from vllm_kvpool.metrics import METRICS, MetricKind
from vllm_kvpool.router.ops.metrics import PREFIX, ROUTER_METRICS
from vllm_kvpool.storage.contents.cell_format import CellFault

CONFIGS = Path(__file__).parents[1] / "configs"
SUFFIXES = {
    MetricKind.COUNTER: ("_total",),
    MetricKind.GAUGE: ("",),
    MetricKind.HISTOGRAM: ("_bucket", "_sum", "_count"),
}
# What Prometheus and vLLM add.
OTHER_LABELS = {"instance", "le", "model_name", "engine"}
NAME = re.compile(r"(?:vllm:)?kvpool_[a-z_]+")
SELECTOR = re.compile(r"((?:vllm:)?kvpool_[a-z_]+)\{([^}]*)\}")
BY = re.compile(r"by \(([^)]*)\)")


class Query(NamedTuple):
    where: str
    text: str
    legend: str = ""


def known() -> Mapping[str, frozenset[str]]:
    """Names as Prometheus has them, and their labels."""
    rows = [("vllm:" + name, row) for name, row in METRICS.items()]
    rows += [(PREFIX + name, row) for name, row in ROUTER_METRICS.items()]
    return {
        name + suffix: frozenset(row.labels) for name, row in rows for suffix in SUFFIXES[row.kind]
    }


def queries() -> Iterator[Query]:
    for path in sorted((CONFIGS / "grafana").glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel.get("targets", ()):
                yield Query(
                    f"{path.stem}: {panel['title']}", target["expr"], target["legendFormat"]
                )
    for group in yaml.safe_load((CONFIGS / "prometheus/alerts.yaml").read_text())["groups"]:
        for rule in group["rules"]:
            yield Query(f"alerts: {rule['alert']}", rule["expr"], str(rule["annotations"]))


@pytest.mark.parametrize("name", ["pool", "router"])
def test_each_panel_has_a_description(name: str) -> None:
    panels = json.loads((CONFIGS / "grafana" / f"{name}.json").read_text())["panels"]
    bare = [each["title"] for each in panels if each["type"] != "row" and not each["description"]]
    assert not bare


@pytest.mark.parametrize("query", list(queries()), ids=lambda query: query.where)
def test_a_query_asks_for_what_there_is(query: Query) -> None:
    metrics = known()
    names = NAME.findall(query.text)
    assert names, query.text
    assert not [name for name in names if name not in metrics]
    labels = frozenset().union(*(metrics[name] for name in names)) | OTHER_LABELS
    for name, selector in SELECTOR.findall(query.text):
        asked = set(re.findall(r"(\w+)(?:=~|!=|!~|=)", selector))
        assert asked <= metrics[name] | OTHER_LABELS, (name, asked)
    grouped = {label.strip() for by in BY.findall(query.text) for label in by.split(",")}
    assert grouped <= labels
    shown = set(re.findall(r"\{\{ ?(?:\$labels\.)?(\w+) ?\}\}", query.legend))
    assert shown <= grouped, "a label that the query has added up"
    assert query.text.count("(") == query.text.count(")")


NOT_SHOWN = {
    "vllm:kvpool_seconds_total": "kvpool_op_seconds has the same time by lane and tier",
    "vllm:kvpool_page_locked_share": "1 after an engine's first minute, on GPUs only",
    "vllm:kvpool_notices_info": "endpoints, which the router reads",
    "vllm:kvpool_trace_dropped_total": "of a trace that somebody records, who reads it there",
    "kvpool_router_locked": "kvpool_router_locked_replicas counts them; the status page names them",
    "kvpool_router_rate": "of the planner, which the status page shows",
    "kvpool_router_planner_mode": "an option, which the status page shows",
    "kvpool_router_plan_steps": "of the planner, which the status page shows",
}
"""Metrics that no panel and no rule asks for, with the reason."""


def test_each_metric_is_asked_for_or_left_out_with_a_reason() -> None:
    asked = {name for query in queries() for name in NAME.findall(query.text)}
    known_rows = [("vllm:" + name, row) for name, row in METRICS.items()]
    known_rows += [(PREFIX + name, row) for name, row in ROUTER_METRICS.items()]
    unasked = {
        name + SUFFIXES[row.kind][0]
        for name, row in known_rows
        if not asked & {name + suffix for suffix in SUFFIXES[row.kind]}
    }
    assert unasked == set(NOT_SHOWN)


def test_panels_do_not_overlap() -> None:
    for path in sorted((CONFIGS / "grafana").glob("*.json")):
        taken: set[tuple[int, int]] = set()
        panels = json.loads(path.read_text())["panels"]
        for panel in panels:
            x, y, w, h = (panel["gridPos"][name] for name in "xywh")
            squares = {(i, j) for i in range(x, x + w) for j in range(y, y + h)}
            assert not squares & taken, panel["title"]
            assert x + w <= 24, panel["title"]
            taken |= squares
        assert len({panel["id"] for panel in panels}) == len(panels)


OTHER_ENGINES = (CellFault.VERSION, CellFault.UNKNOWN_KEY)
"""Faults of cells whose engines differ in release or encryption key. All others are damage."""


@pytest.mark.parametrize("fault", CellFault)
def test_an_alert_of_damage_fires_on_damage_alone(fault: CellFault) -> None:
    """An upgrade or a new encryption key is none."""
    fires = {
        query.where
        for query in queries()
        for pattern in re.findall(r'kvpool_failures_total\{kind=~"([^"]*)"', query.text)
        if query.where.startswith("alerts") and re.fullmatch(pattern, f"cell_{fault.value}")
    }
    rule = "KVPoolCellsOfOtherEngines" if fault in OTHER_ENGINES else "KVPoolDamagedCells"
    assert fires == {f"alerts: {rule}"}
