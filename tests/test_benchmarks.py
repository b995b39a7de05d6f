"""Shared code of the benchmarks: the rule for a row's bottleneck, and the tables of results."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from benchmarks.bench_device import Costs
from benchmarks.bench_router_cpu import stream_rows
from benchmarks.bench_scale import index_costs
from benchmarks.common import Row, missing, spread
from benchmarks.limits import FULL, HAND_OVERS, Meter, Usage, limited_by
from benchmarks.run_all import (
    HERE,
    RESULTS,
    SUMMARY,
    benchmarks,
    kept_summary,
    markdown,
    summary,
)
from benchmarks.store_room import put_for
from benchmarks.trace_caches import found_by_clairvoyance, found_without_bounds
from vllm_kvpool.router.dataplane.request_body import READ, ApiPath

FREE = Usage(wall_s=10.0, cores_s=20.0)


@pytest.mark.parametrize(
    ("used", "link", "text"),
    [
        (Usage(used_s=19.0, thread_s=10.0), 0.0, "CPU (all cores, 95%)"),
        (Usage(used_s=11.0, thread_s=9.9), 0.0, "CPU (one thread, 99%)"),
        (Usage(used_s=3.0, disk_s=9.0), 0.0, "disk (90%)"),
        (
            Usage(used_s=6.0, thread_s=5.0, disk_s=4.0),
            0.0,
            "CPU and disk in turn (a thread 50%, a disk 40%)",
        ),
        (Usage(used_s=19.0, disk_s=9.0), 0.0, "disk (90%) and CPU (all cores, 95%)"),
        (
            Usage(used_s=12.0, thread_s=10.0),
            0.93,
            "link (93% of its rate) and CPU (one thread, 100%)",
        ),
        (
            Usage(used_s=8.0, thread_s=4.0),
            0.78,
            "waits (cores 40% in use, a thread 40%, a disk 0%)",
        ),
        (
            Usage(used_s=8.0, thread_s=4.0, switches=11 * HAND_OVERS),
            0.0,
            "hand-overs (11 thousand a second)",
        ),
        (
            Usage(used_s=20.0 * FULL - 0.1, thread_s=10 * FULL - 0.1),
            0.0,
            "waits (cores 84% in use, a thread 84%, a disk 0%)",
        ),
    ],
)
def test_a_row_is_limited_by_what_was_full(used: Usage, link: float, text: str) -> None:
    assert limited_by(FREE + used, {"link": link}) == text


def test_a_thread_that_computes_and_one_that_sleeps_are_told_apart() -> None:
    meter = Meter()
    for _ in range(2):
        with meter.of("computes"):
            until = time.thread_time() + 0.2  # however long it has to wait for a core
            while time.thread_time() < until:
                pass
        with meter.of("sleeps"):
            time.sleep(0.2)
    computed = meter.used["computes"]
    assert computed.thread_s > 0.35
    slept = meter.used["sleeps"]
    assert slept.wall_s - slept.thread_s > 0.35  # it may wait for a core when it wakes up
    assert meter.limited_by("computes") == limited_by(computed)


def shown(*rows: Row) -> list[str]:
    result = {"command": "c", "rows": list(rows), "machine": {"cores": "2"}}
    return list(markdown(result, {"cores": "2"}))


def test_what_limits_all_rows_is_said_once() -> None:
    def of(*limits: str) -> list[str]:
        return shown(*({"n": n, "limited by": each} for n, each in enumerate(limits)))

    assert "| n | limited by |" in of("disk", "link")
    alike = of("disk", "disk")
    assert "| n |" in alike
    assert "All rows limited by disk." in alike


def test_rows_of_other_columns_are_a_table_of_their_own() -> None:
    lines = shown(
        {"what": "a", "ms": 1.0},
        {"what": "b", "ms": 1234.5, "ratio": 2.0},
        {"what": "c", "cells": 3, "bytes": 4},
    )
    assert [line for line in lines if line.startswith("| ")] == [
        "| what | ms | ratio |",
        "| a | 1 |  |",
        "| b | 1230 | 2 |",
        "| what | cells | bytes |",
        "| c | 3 | 4 |",
    ]


def test_a_result_of_another_machine_says_so() -> None:
    result = {"command": "c", "rows": [], "machine": {"cores": "96", "python": "3.11"}}
    lines = list(markdown(result, {"cores": "2", "python": "3.11"}))
    assert "Measured elsewhere: cores 96." in lines


def test_missed_targets_come_first() -> None:
    targets = [{"reached": each == "b", "text": each} for each in "abc"]
    text = summary({"x": {"command": "c", "rows": [], "targets": targets}}, {})
    assert "Missed, 2 of 3:\n\n* x: a\n* x: c\n\nReached:\n\n* x: b\n" in text


def test_a_latency_has_its_mean_and_p99_and_a_row_what_limited_it() -> None:
    row: Row = {"side": "ours", "limited by": "link", **spread("held", "us", [1.0, 2.0, 6.0])}
    assert row["held mean us"] == 3.0
    assert missing(row) == []
    assert missing({"in-tree p50 / p50": 2.0, "limited by": "link"}) == []
    for name in ("held mean us", "held p99 us", "limited by"):
        assert missing({each: row[each] for each in row if each != name}) == [name]


@pytest.mark.parametrize("name", sorted(each.stem for each in RESULTS.glob("*.json")))
def test_kept_results_say_how_they_were_measured_and_what_limited_them(name: str) -> None:
    result = json.loads((RESULTS / f"{name}.json").read_text())
    assert result["command"]
    assert {"cpu", "cores", "memory", "python", "torch"} <= result["machine"].keys()
    assert result["rows"]
    if name != "soak":
        assert [missing(row) for row in result["rows"]] == [[]] * len(result["rows"])


def test_a_benchmark_is_a_script_or_one_of_its_functions() -> None:
    known = benchmarks()
    assert (known["chat"].script.name, known["chat"].name) == ("bench_chat.py", "")
    assert (known["gather"].script.name, known["gather"].name) == ("bench_cells.py", "gather")
    assert known["gather"].doc.startswith("Gather and scatter")


@pytest.mark.parametrize("name", sorted(benchmarks()))
def test_a_benchmark_says_what_it_measures_and_has_a_kept_result_of_its_command(name: str) -> None:
    each = benchmarks()[name]
    assert each.doc
    kept = json.loads((RESULTS / f"{name}.json").read_text())
    assert kept["command"] == f"python benchmarks/{each.script.name} {each.name}".strip()


def test_scripts_that_texts_name_exist() -> None:
    """docs/models.md named a script that had become a function of another one."""
    root = HERE.parent
    folders = (".ci", ".github", "benchmarks", "docs", "scripts", "tests", "vllm_kvpool")
    kinds = {".jinja", ".md", ".py", ".sh", ".yml"}
    texts = [root / "Makefile", root / ".ci" / "run", *root.glob("*.md")]
    texts += [each for name in folders for each in (root / name).rglob("*") if each.suffix in kinds]
    named = {
        (each.name, name)
        for each in texts
        if each != Path(__file__)
        for name in re.findall(r"\bbenchmarks/\w+\.py|\bbench_\w+\.py", each.read_text())
    }
    assert named
    missing = {pair for pair in named if not (HERE / pair[1].removeprefix("benchmarks/")).exists()}
    assert not missing


def test_all_kept_results_but_the_soak_are_of_benchmarks() -> None:
    """A benchmark that was renamed or deleted left its result, and the documents its figures."""
    assert {path.stem for path in RESULTS.glob("*.json")} - {"soak"} == benchmarks().keys()


def test_summary_is_what_benchmarks_say_of_themselves_and_the_kept_results() -> None:
    """It still said how a benchmark had measured before it was changed."""
    assert SUMMARY.read_text() == kept_summary()


def test_what_a_script_leaves_behind_is_ended() -> None:
    """Servers lead sessions of their own, and a script that is killed does not end them."""
    command = "setsid sleep 60 >/dev/null 2>&1 & echo $!"
    code = f"""
import subprocess
from benchmarks.run_all import adopt_orphans, end_descendants
adopt_orphans()
done = subprocess.run(["sh", "-c", {command!r}], stdout=-1, text=True)
print(done.stdout)
end_descendants()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert not psutil.pid_exists(int(done.stdout))


class Leader:
    """A process that leads a session of its own, as a server does, and one that it forks."""

    def __init__(self) -> None:
        os.setsid()
        self._forked = os.fork()
        if not self._forked:
            signal.pause()

    def pids(self) -> tuple[int, int]:
        return os.getpid(), self._forked

    def hang(self) -> None:
        signal.pause()


class Compiler:
    """A process that tells whether `torch.compile` calls a compiler."""

    def compiles(self) -> bool:
        import torch

        called = []

        @torch.compile(backend=lambda graph, _: called.append(graph) or graph.forward)
        def double(values: torch.Tensor) -> torch.Tensor:
            return values * 2

        double(torch.ones(2))
        return bool(called)


def test_child_forked_after_torch_with_compile_disabled_compiles_nothing(tmp_path: Path) -> None:
    """Torch reads the variable on import, and a child is forked from a process with torch.

    A decode with two ranks compiled a function with g++ within a measured request.
    """
    script = tmp_path / "script.py"
    script.write_text("""
from benchmarks.trace_caches import found_by_clairvoyance, found_without_bounds
from benchmarks.common import Child, Result, run_script
from tests.test_benchmarks import Compiler

def measure(quick):
    with Child(Compiler) as compiles, Child(Compiler, env={"TORCH_COMPILE_DISABLE": "1"}) as not_:
        print(compiles.call("compiles"), not_.call("compiles"), flush=True)
    return Result()

if __name__ == "__main__":
    run_script("", measure, ["torch._dynamo.config"])
""")
    env = {name: value for name, value in os.environ.items() if name != "TORCH_COMPILE_DISABLE"}
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=240,
        env=env | {"PYTHONPATH": str(HERE.parent)},
        check=True,
    )
    assert done.stdout.splitlines()[0] == "True False"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_script_that_is_ended_leaves_no_process(number: signal.Signals, tmp_path: Path) -> None:
    """Its children end with it while they work, and so does what they forked."""
    script = tmp_path / "script.py"
    script.write_text("""
from benchmarks.trace_caches import found_by_clairvoyance, found_without_bounds
from benchmarks.common import Child, run_script
from tests.test_benchmarks import Leader

def measure(quick):
    child = Child(Leader)
    print(*child.call("pids"), flush=True)
    child.call("hang")

if __name__ == "__main__":
    run_script("", measure)
""")
    with subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(HERE.parent)},
    ) as process:
        assert process.stdout is not None
        started = [psutil.Process(int(pid)) for pid in process.stdout.readline().split()]
        assert len(started) == 2
        process.send_signal(number)
        _, alive = psutil.wait_procs(started, 30)
        assert not alive


@pytest.mark.parametrize(
    ("prompts", "capacity", "found"),
    [
        ([(1, 2), (1, 2)], 2, 0.5),
        ([(1, 2), (3, 2)], 3, 0.0),  # without its beginning a prompt is computed
        ([(1,), (2,), (3,), (1,)], 2, 0.25),
        ([(1,), (2,), (1,), (2,)], 1, 0.25),
    ],
)
def test_clairvoyance_on_small_traces_finds_the_most(
    prompts: list[tuple[int, ...]], capacity: int, found: float
) -> None:
    assert found_by_clairvoyance(prompts, capacity) == found
    assert found <= found_without_bounds(prompts)


@pytest.mark.parametrize("kind", READ)
def test_rows_of_streams_are_measured_on_the_routers_own_resumer(kind: ApiPath) -> None:
    """The resumer refused the streams: they were longer than their request had asked for."""
    rows = stream_rows(kind, 1)
    assert rows[0]["what"] == "feed, a chunk"


def test_costs_of_the_simulated_device_are_the_smallest_of_turns() -> None:
    """Seven repeats in a row were as slow as their second was: 3.1 to 5.3 us in three runs."""
    costs = Costs()
    for _ in range(3):
        costs.turn()
    rows = costs.rows()
    costs.close()
    assert [(row["what"], row["through"]) for row in rows] == [
        (what, through) for through in ("host memory", "a store") for what in ("load", "save")
    ]
    for row in rows:
        smallest, median = float(str(row["together us a MiB"])), float(str(row["median us a MiB"]))
        assert 0 < smallest <= median
        assert row["together / yardstick"] == smallest / float(str(row["yardstick us a MiB"]))


def test_index_of_many_cells_evicts_what_the_benchmark_wrote(tmp_path: Path) -> None:
    """The index refused its rows: their namespace had no namespace's name."""
    row = index_costs(10_000, 2, str(tmp_path / "index"))
    assert float(str(row["put and evict ms"])) > 0


def test_room_for_prompts_is_timed_in_the_file_store_itself(tmp_path: Path) -> None:
    """The clock around the reservation did not take an argument that the store gives."""
    found = put_for(str(tmp_path), 1 << 20, 2, seed=0)
    assert len(found["wall"]) == len(found["cpu"]) >= 2
    assert found["hold"]
