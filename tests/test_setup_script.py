"""The functions of scripts/setup.sh that install packages, with a recorder in place of Python."""

import subprocess
from pathlib import Path

import pytest

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
