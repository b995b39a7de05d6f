"""The workflow files: the targets they call are there, and what they may do is said."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def workflow(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(path.read_text())
    return loaded


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_calls_targets_that_exist(path: Path) -> None:
    steps = [step for job in workflow(path)["jobs"].values() for step in job["steps"]]
    called = [
        word
        for step in steps
        for line in step.get("run", "").splitlines()
        if line.startswith("make ")
        for word in line.split()[1:]
        if "=" not in word
    ]
    assert called
    assert set(called) <= TARGETS


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_reads_only_and_ends_in_time(path: Path) -> None:
    loaded = workflow(path)
    assert loaded["permissions"] == {"contents": "read"}
    for job in loaded["jobs"].values():
        assert "timeout-minutes" in job
        assert job.get("permissions", {"contents": "write"}) == {"contents": "write"}


def test_the_workflow_of_nights_runs_what_ci_runs() -> None:
    """Each job of a night makes the environments that its target needs."""
    ran = (ROOT / ".ci" / "run").read_text()
    text = (ROOT / ".github" / "workflows" / "nightly.yml").read_text()
    for line in re.findall(r"^make (.+)$", ran, re.MULTILINE):
        words = [word for word in line.split() if not word.startswith("--")]
        variables = [word for word in words if "=" in word]
        for target in words:
            if target not in (*variables, "setup", "environments"):
                assert f"run: {' '.join(['make', target, *variables])}\n" in text


def test_ci_runs_the_oldest_release_before_the_long_suite() -> None:
    ran = (ROOT / ".ci" / "run").read_text()
    assert ran.index("\nmake test-matrix ") < ran.index("\nmake test\n")


@pytest.mark.parametrize(
    "release",
    workflow(ROOT / ".github" / "workflows" / "nightly.yml")["jobs"]["older-vllm"]["strategy"][
        "matrix"
    ]["release"],
)
def test_older_release_of_a_night_is_the_one_that_the_tests_of_two_releases_want(
    release: str,
) -> None:
    code = (
        "from tests.e2e.test_releases import OLDER_PYTHON, RELEASES; print(OLDER_PYTHON, RELEASES)"
    )
    env = {name: value for name, value in os.environ.items() if name != "KVPOOL_OLDER_PYTHON"}
    found = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=env | {"OLDER_VLLM": release},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert f"/.venv-{release}/" in found
    assert f"'older': '{release}'" in found


def test_release_needs_a_nightly_run_of_its_commit() -> None:
    steps = workflow(ROOT / ".github" / "workflows" / "release.yml")["jobs"]["release"]["steps"]
    commands = [step.get("run", "") for step in steps]
    nightly = next(i for i, each in enumerate(commands) if "nightly.yml" in each)
    assert '--commit "$GITHUB_SHA" --status success' in commands[nightly]
    assert commands[nightly].rstrip().endswith("| grep .")  # no such run ends the job
    assert nightly < commands.index("make dist")


def test_the_map_of_contributing_names_every_part_and_tests_that_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text().partition("| changed | run |")[2]
    rows = [line.split("|")[1:3] for line in text.partition("\n\n")[0].splitlines()[2:]]
    changed, run = (
        set(re.findall(r"`([^`]+)`", " ".join(column))) for column in zip(*rows, strict=True)
    )
    assert changed == {
        f"{path.name}/" if path.is_dir() else path.name
        for path in (ROOT / "vllm_kvpool").iterdir()
        if not path.name.startswith("__") and (path.is_dir() or path.suffix == ".py")
    }
    missing = [each for each in run if not each.startswith("make ") and not (ROOT / each).exists()]
    assert not missing
