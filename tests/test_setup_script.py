"""The functions of scripts/setup.sh that install packages, with a recorder in place of Python."""

import itertools
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support.processes import is_alive
from tests.support.waiting import wait_until

ROOT = Path(__file__).parent.parent
NAMES = [f"package-{number}" for number in range(7)]
# Keeps the requirements that one pip was given and the options; fails where one is unknown.
RECORDER = """#!/usr/bin/env bash
list="${@: -1}"
echo "$*" >>"$RECORDS/options"
cat "$list" >"$RECORDS/list-$(basename "$list")"
! grep -q unknown "$list"
"""


def install_pinned(
    tmp_path: Path, *, names: list[str], before: str = ""
) -> tuple[int, list[list[str]], list[str]]:
    """Return the exit status, each list that pip was given, and the options of each call."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(RECORDER)
    python.chmod(0o755)
    first, second = tmp_path / "first.txt", tmp_path / "second.txt"
    first.write_text("# A comment.\n" + "\n".join(names[:4]) + "\n")
    second.write_text("\n".join(names[4:]) + "\n")
    script = f"source {ROOT}/scripts/setup.sh; {before} install_pinned {first} {second}"
    status = subprocess.run(
        ["bash", "-c", script],
        env={"PATH": "/usr/bin:/bin", "VENV": str(tmp_path), "RECORDS": str(tmp_path)},
        capture_output=True,
        check=False,
    ).returncode
    lists = [path.read_text().split() for path in sorted(tmp_path.glob("list-*"))]
    return status, lists, (tmp_path / "options").read_text().splitlines()


def test_pinned_requirements_are_divided_between_two_processes(tmp_path: Path) -> None:
    status, lists, options = install_pinned(tmp_path, names=NAMES)
    assert status == 0
    assert sorted(map(len, lists)) == [3, 4]
    assert sorted(lists[0] + lists[1]) == NAMES
    assert len(options) == 2


@pytest.mark.parametrize("option", ["--compile", "--no-compile"])
def test_install_compiles_as_told_and_resolves_nothing(tmp_path: Path, option: str) -> None:
    before = "" if option == "--compile" else "COMPILE=--no-compile;"
    _, _, options = install_pinned(tmp_path, names=NAMES, before=before)
    assert all({option, "--no-deps"} <= set(call.split()) for call in options)


@pytest.mark.parametrize("place", [0, 1, 6])
def test_install_fails_if_one_of_the_processes_fails(tmp_path: Path, place: int) -> None:
    names = [*NAMES]
    names[place] = "unknown"
    status, _, _ = install_pinned(tmp_path, names=names)
    assert status != 0


# Lists that one environment is made of.
TOGETHER = [
    ("base", "build", "test"),
    ("base", "build", "test", "demo"),
    ("base", "build", "test", "nixl"),
]


def pins_of(name: str) -> dict[str, str]:
    """Return the versions of a list of requirements, by the package's normal name."""
    lines = (ROOT / "requirements" / f"{name}.txt").read_text().splitlines()
    pins = (line.partition("==") for line in lines if line[:1].isalnum())
    return {
        re.sub(r"[-_.]+", "-", package).lower(): version.split()[0] for package, _, version in pins
    }


@pytest.mark.parametrize("names", TOGETHER, ids=" ".join)
def test_no_package_has_two_versions_in_one_environment(names: tuple[str, ...]) -> None:
    """Two processes of pip would install both over each other."""
    for first, second in itertools.combinations(names, 2):
        ours, theirs = pins_of(first), pins_of(second)
        assert {each: ours[each] for each in ours.keys() & theirs.keys()} == {
            each: theirs[each] for each in ours.keys() & theirs.keys()
        }


def test_no_package_is_named_twice_in_what_two_processes_install() -> None:
    names = [each for name in ("base", "build", "test") for each in pins_of(name)]
    assert len(names) == len(set(names))


def sourced(tmp_path: Path, commands: str) -> "subprocess.CompletedProcess[str]":
    """Run commands with the functions of the script, in an environment at `tmp_path`."""
    return subprocess.run(
        ["bash", "-c", f"source {ROOT}/scripts/setup.sh; {commands}"],
        env={"PATH": os.environ["PATH"], "VENV": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_step_that_fails_shows_the_end_of_its_output_and_fails(tmp_path: Path) -> None:
    done = sourced(tmp_path, "step trying 1s bash -c 'seq 99; exit 3'; echo went on")
    assert done.returncode != 0
    assert done.stderr.split() == [str(number) for number in range(85, 100)]
    assert "went on" not in done.stdout


def test_step_that_succeeds_is_quiet(tmp_path: Path) -> None:
    done = sourced(tmp_path, "step trying '1 s' seq 99; echo went on")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("trying (usually 1 s)\nwent on\n")
    assert "99" not in done.stdout


def test_interrupted_step_ends_with_its_processes(tmp_path: Path) -> None:
    """The child of the step's own child, too."""
    pid_file = tmp_path / "pid"
    inner = f"sleep 600 & echo $! >{pid_file}.part; mv {pid_file}.part {pid_file}; wait"
    script = f"source {ROOT}/scripts/setup.sh; step trying 1s bash -c '{inner}'"
    with subprocess.Popen(
        ["bash", "-c", script],
        env={"PATH": os.environ["PATH"], "VENV": str(tmp_path)},
        stdout=subprocess.DEVNULL,
    ) as process:
        wait_until(pid_file.exists, what="the step runs")
        process.send_signal(signal.SIGTERM)
        process.wait()
    wait_until(lambda: not is_alive(int(pid_file.read_text())), what="the step has ended")


@pytest.mark.parametrize(
    ("stamp", "python", "is_done"),
    [("wanted", True, True), ("other", True, False), (None, True, False), ("wanted", False, False)],
)
def test_environment_is_ready_only_by_the_stamp_of_these_files(
    tmp_path: Path, stamp: str | None, python: bool, is_done: bool
) -> None:
    if stamp is not None:
        (tmp_path / ".kvpool-setup").write_text(stamp)
    if python:
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin" / "python").touch(0o755)
    commands = "missing_packages() { :; }; is_done $STAMP wanted"
    assert (sourced(tmp_path, commands).returncode == 0) is is_done


def test_environment_that_lacks_a_system_package_is_not_ready(tmp_path: Path) -> None:
    (tmp_path / ".kvpool-setup").write_text("wanted")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch(0o755)
    commands = "missing_packages() { echo libnuma1; }; is_done $STAMP wanted"
    assert sourced(tmp_path, commands).returncode != 0


@pytest.mark.parametrize("changed", ["requirements/test.txt", "scripts/setup.sh", "pyproject.toml"])
def test_changed_file_makes_the_environment_anew(tmp_path: Path, changed: str) -> None:
    tree = tmp_path / "tree"
    for part in ("requirements", "scripts", "tests/hooks"):
        shutil.copytree(ROOT / part, tree / part)
    shutil.copy(ROOT / "pyproject.toml", tree)
    command = f"source {tree}/scripts/setup.sh; fingerprint"
    before = subprocess.check_output(["bash", "-c", command])
    assert subprocess.check_output(["bash", "-c", command]) == before
    with (tree / changed).open("a") as file:
        file.write("# A comment.\n")
    assert subprocess.check_output(["bash", "-c", command]) != before
