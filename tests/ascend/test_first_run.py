"""The script for the first run on a card, where nothing answers.

`tests/e2e/test_ascend.py` runs it on the emulated NPU.
"""

import json
import signal
import subprocess
import sys
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from tests.support.waiting import wait_until

SCRIPT = Path(__file__).parents[2] / "examples" / "ascend" / "first_run.py"
LIMIT_S = 60


def test_engines_that_do_not_answer_in_time_are_in_the_report(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), str(tmp_path), "--limit", "0.1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 1, done.stderr
    printed, _, verdict = done.stdout.rstrip().rpartition("\n")
    report = json.loads(printed)
    for name in ("without", "saves", "loads"):
        assert report[name]["failed"].endswith("ended after 0.1 s (--limit)")
    assert verdict == "FAILED: without, saves, loads. Send the report above."


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_ends_its_engine(tmp_path: Path, number: signal.Signals) -> None:
    """An interrupted script kills the engine's process group, which holds the card."""
    with subprocess.Popen([sys.executable, str(SCRIPT), str(tmp_path)]) as run:
        me = psutil.Process(run.pid)
        wait_until(lambda: [each for each in me.children() if each.cpu_times().user > 0.2], LIMIT_S)
        (engine,) = me.children()
        run.send_signal(number)
        assert run.wait(LIMIT_S) != 0
    assert not engine.is_running()
