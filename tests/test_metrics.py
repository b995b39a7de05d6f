"""Counting: growth is reported once, whoever counts."""

import json
import threading
from pathlib import Path

import pytest

from vllm_kvpool.metrics import (
    METRICS,
    Kind,
    Tally,
    is_counter,
    merge_samples,
    parse_sample,
    sample_name,
    write_stats,
)

THREADS, ADDS = 4, 500


@pytest.mark.parametrize("name", METRICS)
def test_a_sample_reads_back_as_it_was_named(name: str) -> None:
    metric = METRICS[name]
    labels = {label: f"value_of-{label}" for label in metric.labels}
    sample = sample_name(name, dict(reversed(labels.items())))
    assert parse_sample(sample) == (metric, tuple(labels.values()))
    assert is_counter(sample) == (metric.kind is Kind.COUNTER)


def test_labels_are_exactly_the_tables() -> None:
    tally = Tally()
    for labels in ({}, {"kind": "x", "more": "y"}, {"reason": "x"}):
        with pytest.raises(AssertionError):
            tally.add("kvpool_failures", **labels)
    with pytest.raises(KeyError):
        tally.add("kvpool_unheard_of")
    assert tally.snapshot() == {}


def test_changes_are_told_once() -> None:
    tally = Tally()
    assert tally.take_changes() == {}
    tally.add("kvpool_hit_tokens", 5)
    tally.add("kvpool_failures", kind="a")
    tally.set("kvpool_pinned_blocks", 3)
    first = {"kvpool_hit_tokens": 5, "kvpool_failures{kind=a}": 1, "kvpool_pinned_blocks": 3}
    assert tally.take_changes() == first
    assert tally.take_changes() == {}
    tally.add("kvpool_hit_tokens", 2)
    tally.set("kvpool_pinned_blocks", 3)
    assert tally.take_changes() == {"kvpool_hit_tokens": 2}
    tally.set("kvpool_pinned_blocks", 0)
    assert tally.take_changes() == {"kvpool_pinned_blocks": 0}
    assert tally.snapshot() == first | {"kvpool_hit_tokens": 7, "kvpool_pinned_blocks": 0}


def test_a_snapshot_is_a_copy() -> None:
    tally = Tally()
    tally.add("kvpool_hit_tokens")
    tally.snapshot().clear()
    assert tally.snapshot() == {"kvpool_hit_tokens": 1}


def test_no_count_is_lost_between_threads() -> None:
    tally = Tally()
    taken: dict[str, float] = {}

    def count() -> None:
        for _ in range(ADDS):
            tally.add("kvpool_failures", kind="x")

    threads = [threading.Thread(target=count) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        merge_samples(taken, tally.take_changes())
    merge_samples(taken, tally.take_changes())
    assert taken == tally.snapshot() == {"kvpool_failures{kind=x}": THREADS * ADDS}


def test_processes_add_up_and_gauges_take_the_highest() -> None:
    total: dict[str, float] = {}
    for samples in (
        {"kvpool_hit_tokens": 1, "kvpool_slots{state=free}": 5},
        {"kvpool_hit_tokens": 2, "kvpool_slots{state=free}": 4, "kvpool_pinned_blocks": -1},
    ):
        merge_samples(total, samples)
    assert total == {
        "kvpool_hit_tokens": 3,
        "kvpool_slots{state=free}": 5,
        "kvpool_pinned_blocks": -1,
    }


def test_the_stats_file_is_one_object_and_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "stats.kv.worker.0"
    for count in (1, 2):
        samples = {"kvpool_slots{state=free}": 1.5, "kvpool_hit_tokens": count}
        write_stats(path, samples)
        assert json.loads(path.read_text()) == samples
        assert list(json.loads(path.read_text())) == sorted(samples)
    assert list(tmp_path.iterdir()) == [path]
