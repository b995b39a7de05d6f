"""Counting: growth is reported once, whoever counts; a histogram is counts and sums of buckets."""

import json
import math
import threading
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import msgspec
import pytest

from vllm_kvpool import metrics
from vllm_kvpool.metrics import (
    MAX_TENANTS,
    METRICS,
    SECONDS,
    MetricKind,
    MetricSeries,
    MetricsRegistry,
    NameLabels,
    Samples,
    StatsFile,
    merge_samples,
    named_values,
    write_stats,
)

THREADS, ADDS = 4, 500
LIMIT_S = 30.0


HISTOGRAMS = [name for name, metric in METRICS.items() if metric.kind is MetricKind.HISTOGRAM]
NASTY = ["", ",", "a=b,c=d", "{}", "x}.count", "%2C", "100%", "ü,\n", "value_of-x/y:z"]


def named(samples: Samples) -> dict[str, float]:
    return dict(named_values(samples))


def test_label_values_that_look_like_grammar_are_told_apart_in_names() -> None:
    samples: Samples = {"kvpool_retries": {(a, b): 1 for a in NASTY for b in NASTY}}
    names = list(named(samples))
    assert len(names) == len(NASTY) ** 2
    for name in names:
        inside = name.removeprefix("kvpool_retries{").removesuffix("}")
        lane, tier = inside.split(",")
        found = unquote(lane.removeprefix("lane=")), unquote(tier.removeprefix("tier="))
        assert found in samples["kvpool_retries"]


def test_labels_are_exactly_the_tables() -> None:
    registry = MetricsRegistry()
    for labels in ({}, {"kind": "x", "more": "y"}, {"reason": "x"}):
        with pytest.raises(AssertionError):
            registry.add("kvpool_failures", **labels)
    with pytest.raises(KeyError):
        registry.add("kvpool_unheard_of")
    for labels in ({"lane": "get"}, {"lane": "get", "tier": "x", "le": "1"}):
        with pytest.raises(AssertionError):
            registry.observe("kvpool_op_seconds", 1.0, **labels)
    assert registry.snapshot() == {}


def test_only_histograms_are_observed_and_only_they_have_bounds() -> None:
    registry = MetricsRegistry()
    for name, metric in METRICS.items():
        labels = dict.fromkeys(metric.labels, "x")
        assert (name in HISTOGRAMS) == bool(metric.bounds)
        assert list(metric.bounds) == sorted(set(metric.bounds))
        call = registry.add if name in HISTOGRAMS else registry.observe
        with pytest.raises(AssertionError):
            call(name, 1.0, **labels)
    for value in (-1e-9, math.nan):
        with pytest.raises(AssertionError):
            registry.observe("kvpool_load_seconds", value)
    assert not any(registry.snapshot().values())


def test_a_value_falls_into_the_bucket_whose_bound_it_does_not_exceed() -> None:
    registry = MetricsRegistry()
    expected: dict[str, float] = {}
    for bound in (*SECONDS, math.inf):
        name = "0.00005" if bound == 0.00005 else f"{bound:g}"
        values = [bound, math.nextafter(bound, 0)] if bound < math.inf else [30.1, 1e6]
        for value in values:
            registry.observe("kvpool_load_seconds", value)
        for part, number_of in (("count", 2), ("sum", sum(values))):
            expected[f"kvpool_load_seconds{{le={name}}}.{part}"] = number_of
    assert registry.snapshot() == expected
    assert registry.take_changes() != {}
    registry.observe("kvpool_load_seconds", 0.0)
    assert registry.take_changes() == {"kvpool_load_seconds": {(): {0: (1, 0.0)}}}


def test_labels_in_any_order_are_one_series() -> None:
    registry = MetricsRegistry()
    registry.observe("kvpool_op_seconds", 0.002, lane="get", tier="a,b")
    registry.observe("kvpool_op_seconds", 0.002, tier="a,b", lane="get")
    name = "kvpool_op_seconds{lane=get,tier=a%2Cb,le=0.0025}"
    assert registry.snapshot() == {f"{name}.count": 2, f"{name}.sum": 0.004}
    place = SECONDS.index(0.0025)
    growth = {("get", "a,b"): {place: (2, 0.004)}}
    assert registry.take_changes() == {"kvpool_op_seconds": growth}


def over_the_wire(samples: Samples) -> Samples:
    """Return samples as vLLM's front end decodes them, without type information."""
    found: Samples = msgspec.msgpack.decode(msgspec.msgpack.encode(samples))
    assert named(found) == named(samples)
    return found


def test_histograms_of_ranks_and_intervals_add_up() -> None:
    ranks = [MetricsRegistry(), MetricsRegistry()]
    total: Samples = {}
    values = [0.001, 0.0011, 0.5, 0.75, 100.0]
    for i, value in enumerate(values):
        ranks[i % 2].observe("kvpool_save_seconds", value)
        if i % 3 == 0:
            merge_samples(total, over_the_wire(ranks[0].take_changes()))
    for rank in ranks:
        merge_samples(total, rank.take_changes())
    alone = MetricsRegistry()
    for value in values:
        alone.observe("kvpool_save_seconds", value)
    assert named(total) == pytest.approx(alone.snapshot())


def test_changes_are_told_once() -> None:
    registry = MetricsRegistry()
    assert registry.take_changes() == {}
    registry.add("kvpool_hit_tokens", 5)
    registry.add("kvpool_failures", kind="a")
    registry.set("kvpool_pinned_blocks", 3)
    first = {"kvpool_hit_tokens": 5, "kvpool_failures{kind=a}": 1, "kvpool_pinned_blocks": 3}
    assert named(registry.take_changes()) == first
    assert registry.take_changes() == {}
    registry.add("kvpool_hit_tokens", 2)
    registry.set("kvpool_pinned_blocks", 3)
    assert named(registry.take_changes()) == {"kvpool_hit_tokens": 2}
    registry.set("kvpool_pinned_blocks", 0)
    assert named(registry.take_changes()) == {"kvpool_pinned_blocks": 0}
    assert registry.snapshot() == first | {"kvpool_hit_tokens": 7, "kvpool_pinned_blocks": 0}


def test_telling_changes_looks_at_nothing_else() -> None:
    registry = MetricsRegistry()
    for number in range(1000):
        registry.add("kvpool_failures", kind=str(number))
    registry.take_changes()

    class Untouchable(dict[tuple[object, ...], MetricSeries]):
        def items(self) -> Any:
            raise AssertionError("all samples are looked at")

        __iter__ = keys = values = items

    registry._series = Untouchable(registry._series)
    registry.add("kvpool_failures", kind="7")
    registry.set("kvpool_pinned_blocks", 2)
    changes = named(registry.take_changes())
    assert changes == {"kvpool_failures{kind=7}": 1, "kvpool_pinned_blocks": 2}


def test_a_snapshot_is_a_copy() -> None:
    registry = MetricsRegistry()
    registry.add("kvpool_hit_tokens")
    registry.snapshot().clear()
    assert registry.snapshot() == {"kvpool_hit_tokens": 1}


def test_no_count_is_lost_between_threads() -> None:
    registry = MetricsRegistry()
    taken: Samples = {}

    def count() -> None:
        for _ in range(ADDS):
            registry.add("kvpool_failures", kind="x")
            registry.observe("kvpool_load_seconds", 0.5)

    threads = [threading.Thread(target=count) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        merge_samples(taken, registry.take_changes())
    merge_samples(taken, registry.take_changes())
    name = "kvpool_load_seconds{le=0.5}"
    assert named(taken) == registry.snapshot()
    assert named(taken) == {
        "kvpool_failures{kind=x}": THREADS * ADDS,
        f"{name}.count": THREADS * ADDS,
        f"{name}.sum": 0.5 * THREADS * ADDS,
    }


def test_processes_add_up_and_gauges_take_the_highest() -> None:
    total: Samples = {}
    first: Samples = {"kvpool_hit_tokens": {(): 1}, "kvpool_slots": {("free",): 5}}
    second: Samples = {
        "kvpool_hit_tokens": {(): 2},
        "kvpool_slots": {("free",): 4},
        "kvpool_pinned_blocks": {(): -1},
    }
    for samples in (first, second):
        merge_samples(total, samples)
    assert named(total) == {
        "kvpool_hit_tokens": 3,
        "kvpool_slots{state=free}": 5,
        "kvpool_pinned_blocks": -1,
    }
    assert first["kvpool_hit_tokens"] == {(): 1}, "what is added stays as it was"


def test_a_tier_that_is_down_on_one_rank_shows_as_down() -> None:
    total: Samples = {"kvpool_tier_up": {("a",): 1.0}}
    for up in (0, 1):
        merge_samples(total, {"kvpool_tier_up": {("a",): up, ("b",): 1}})
    assert total == {"kvpool_tier_up": {("a",): 0, ("b",): 1}}


def test_the_stats_file_is_one_object_and_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "stats.kv.worker.0"
    for count in (1, 2):
        registry = MetricsRegistry()
        registry.set("kvpool_slots", 1.5, state="free")
        registry.add("kvpool_hit_tokens", count)
        write_stats(path, registry.snapshot())
        written = json.loads(path.read_text())
        assert written == {"kvpool_hit_tokens": count, "kvpool_slots{state=free}": 1.5}
        assert list(written) == sorted(written)
    assert list(tmp_path.iterdir()) == [path]


def test_the_stats_file_has_buckets_from_the_fastest_to_the_slowest(tmp_path: Path) -> None:
    registry = MetricsRegistry()
    values = (*SECONDS, 31.0)
    for lane in ("put", "get"):
        for value in reversed(values):
            registry.observe("kvpool_op_seconds", value, lane=lane, tier="file")
    write_stats(tmp_path / "stats", registry.snapshot())
    assert json.loads((tmp_path / "stats").read_text()) == registry.snapshot()
    written = json.loads((tmp_path / "stats").read_text(), object_pairs_hook=list)
    sums = [(name, value) for name, value in written if name.endswith(".sum")]
    assert [value for _, value in sums] == [*values, *values]
    assert sums[0][0] == "kvpool_op_seconds{lane=get,tier=file,le=0.00005}.sum"
    assert sums[-1][0] == "kvpool_op_seconds{lane=put,tier=file,le=inf}.sum"


def test_the_stats_file_has_the_last_values(tmp_path: Path) -> None:
    registry = MetricsRegistry()
    stats = StatsFile(tmp_path / "stats", registry)
    registry.add("kvpool_hit_tokens", 5)
    stats.close()
    assert msgspec.json.decode((tmp_path / "stats").read_bytes()) == {"kvpool_hit_tokens": 5}


def test_a_disk_that_hangs_holds_up_neither_steps_nor_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk = threading.Event()
    monkeypatch.setattr(metrics, "write_stats", lambda *_: disk.wait(LIMIT_S))
    monkeypatch.setattr(metrics, "STATS_EVERY_S", 0.0)
    monkeypatch.setattr(metrics, "STATS_CLOSE_S", 0.05)
    stats = StatsFile(tmp_path / "stats", MetricsRegistry())
    stats.close()
    assert "were not written within" in caplog.text
    disk.set()
    stats._thread.join(LIMIT_S)


@pytest.mark.parametrize("text", ["notes", '{"mine": 1}', '{"kvpool_hit_tokens": "many"}', "[]"])
def test_a_file_that_is_not_of_counters_stays(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The name is a prefix of the user's and an end of ours: both may be taken."""
    path = tmp_path / "stats.kv.worker.0"
    for each in (path, tmp_path / f"{path.name}.tmp"):
        each.write_text(text)
    assert not write_stats(path, {"kvpool_hit_tokens": 1})
    assert {each.read_text() for each in tmp_path.iterdir()} == {text}
    assert "something other than the pool's counters is there" in caplog.text
    path.write_text("")
    assert write_stats(path, {"kvpool_hit_tokens": 1})
    assert write_stats(path, {"kvpool_hit_tokens": 2})
    assert (tmp_path / f"{path.name}.tmp").read_text() == text
    assert len(list(tmp_path.iterdir())) == 2


def test_a_stats_file_that_cannot_be_written_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    StatsFile(tmp_path / "no directory" / "stats", MetricsRegistry()).close()
    assert len(caplog.records) == 1


def test_only_the_first_tenants_have_a_label_of_their_own() -> None:
    labels = NameLabels()
    assert labels.of("") == "-"
    for number in range(MAX_TENANTS - 1):
        assert labels.of(f"t{number}") == f"t{number}"
    assert labels.of("one more") == "others"
    assert labels.of("t0") == "t0"
