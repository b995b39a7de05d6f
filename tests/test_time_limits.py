"""A test that hangs fails after its limit; one that cannot be stopped ends its process."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PLUGINS = ("-p", "tests.conftest", "-p", "no:cacheprovider")
HEAD = """
import threading, time
import pytest
from tests import conftest

conftest.GRACE_S = 0.5
"""
WAITS = """
def test_waits():
    threading.Event().wait()

def test_is_run_after_it():
    pass
"""
CATCHES = """
def test_catches():
    while True:
        try:
            time.sleep(60)
        except BaseException:
            pass
"""
CANNOT_BE_UNDONE = """
@pytest.fixture
def engine():
    yield
    threading.Event().wait()

def test_fails(engine):
    raise AssertionError
"""


def run(tmp_path: Path, test: str) -> tuple[int, str]:
    path = tmp_path / "test_hung.py"
    path.write_text(HEAD + test)
    settings = ("-c", ROOT / "pyproject.toml", "-o", "timeout=0.5")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *settings, *PLUGINS, path],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout


def test_a_test_that_waits_for_ever_fails_and_the_next_is_run(tmp_path: Path) -> None:
    code, output = run(tmp_path, WAITS)
    assert code == 1
    assert "Failed: Timeout (>0.5s) from pytest-timeout." in output
    assert "1 failed, 1 passed" in output


@pytest.mark.parametrize(
    ("test", "where"), [(CATCHES, "test_catches"), (CANNOT_BE_UNDONE, "engine")]
)
def test_one_that_cannot_be_ended_ends_its_process(tmp_path: Path, test: str, where: str) -> None:
    code, output = run(tmp_path, test)
    assert code == 1
    assert "Timeout (0:00:01)!" in output
    assert f"in {where}" in output.rpartition("Timeout (0:00:01)!")[2]
    assert "passed in" not in output
    assert "failed in" not in output
