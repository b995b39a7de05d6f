"""The report of a GPU without one: limits, failures, missing packages, and the simulated replay."""

import json
import zipfile
from pathlib import Path

import pytest

from benchmarks import gpu_report
from benchmarks.gpu_report import DONE, Step, perform_all, set_up
from tests.support.processes import session

ROW = 'print(\'{"what": "load", "ms": 1.5}\', flush=True)'
CHILD = (
    "import os, signal; print('{\"pid\": %d}' % os.getpid(), flush=True); os.fork(); signal.pause()"
)
LIMIT_S = 5.0  # Python starts in less


def script(name: str, text: str, limit_s: float = 60.0) -> Step:
    return Step(name, limit_s, ("-S", "-c", text))


def steps_of(report: Path) -> list[dict[str, object]]:
    steps: list[dict[str, object]] = json.loads(report.read_text())["steps"]
    return steps


def test_a_step_that_fails_keeps_its_rows_and_the_next_step_runs(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    failing = script("first", f"{ROW}; raise ValueError('no such kernel')")
    assert not perform_all([failing, script("second", ROW)], 60.0, report)
    first, second = steps_of(report)
    assert first["outcome"] == "failed with exit status 1"
    assert first["rows"] == second["rows"] == [{"what": "load", "ms": 1.5}]
    assert "no such kernel" in str(first["log"])
    assert second["outcome"] == DONE
    assert "log" not in second


def test_a_step_that_hangs_is_killed_with_its_children_at_its_limit(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    steps = [script("hangs", CHILD, LIMIT_S), script("next", ROW)]
    assert not perform_all(steps, 60.0, report)
    hung, after = steps_of(report)
    assert hung["outcome"] == "not ended within 5 s"
    (row,) = hung["rows"]  # type: ignore[misc]
    assert not session(row["pid"])
    assert after["outcome"] == DONE


def test_steps_after_the_end_of_all_time_are_named_as_not_begun(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    assert not perform_all([script("late", ROW)], 0.0, report)
    assert steps_of(report)[0]["outcome"] == "not begun: 0 s were over (--seconds)"


def test_a_piece_without_a_gpu_fails_and_says_why(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    assert not perform_all([gpu_report.piece("start", 60.0)], 60.0, report)
    (step,) = steps_of(report)
    assert step["outcome"] == "failed with exit status 1"
    assert "no NVIDIA GPU here" in str(step["log"])


def test_a_package_that_is_missing_comes_from_the_wheels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    info = "kvpool_missing-1.0.dist-info"
    with zipfile.ZipFile(wheels / "kvpool_missing-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("kvpool_missing.py", "")
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: kvpool-missing\nVersion: 1.0\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    requirements = tmp_path / "gpu.txt"
    requirements.write_text("# packages\npytest==0.0.1\nkvpool-missing==1.0\n")
    monkeypatch.setattr(gpu_report, "WHEELS", wheels)
    monkeypatch.setattr(gpu_report, "SITE", tmp_path / "site")
    monkeypatch.setattr(gpu_report, "REQUIREMENTS", requirements)
    set_up()
    assert (tmp_path / "site" / "kvpool_missing.py").exists()
    assert not list((tmp_path / "site").glob("pytest*"))  # in whatever version, it was there


def test_the_replay_gives_a_row_for_each_side_and_situation(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    command = ("benchmarks/gpu_pieces.py", "replay", "--simulated")
    assert perform_all([Step("replay", 120.0, command)], 120.0, report), report.read_text()
    (step,) = steps_of(report)
    rows: list[dict[str, object]] = step["rows"]  # type: ignore[assignment]
    found = {(r["what"], r["situation"], r["by"]) for r in rows if "by" in r}
    sides = ("kvpool", "list of blocks")
    situations = ("alone", "beside a busy thread", "under steps")
    assert found == {(w, s, b) for w in ("load", "save") for s in situations for b in sides} | {
        (w, "alone", "plain") for w in ("load", "save")
    }
    assert all(float(str(r["ms"])) > 0 for r in rows if "by" in r)
    gaps = [r for r in rows if "longest gap ms" in r]
    assert len(gaps) == 1 + 4
