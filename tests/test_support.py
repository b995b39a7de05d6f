"""docs/support.md says what tests show."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.version import Version

from tests.conftest import COLLECTED
from tests.support.releases import FEATURES_BY_RELEASE, NEWEST, since

ROOT = Path(__file__).parent.parent
DOCUMENT = (ROOT / "docs" / "support.md").read_text()
COLLECT_TIMEOUT_S = 300


@pytest.mark.slow
def test_every_test_that_is_named_exists(request: pytest.FixtureRequest) -> None:
    """pytest fails for a full name that it does not find; it is asked for those not found yet."""
    found = request.config.stash[COLLECTED]
    found |= {name.partition("[")[0] for name in found}
    named = dict.fromkeys(re.findall(r"`(tests/\S+::[^`]+)`", DOCUMENT))
    assert len(named) > 50
    missing = [name for name in named if name not in found]
    if not missing:
        return
    options = ("--collect-only", "-q", "-p", "no:cacheprovider")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *missing],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=COLLECT_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]


def test_what_real_engines_show_is_shown_by_engines() -> None:
    rows = [line for line in DOCUMENT.splitlines() if "| real engine |" in line]
    assert len(rows) > 20
    assert [row for row in rows if not re.search("`tests/(e2e|deploy)/", row)] == []


def test_families_are_models_that_vllm_has() -> None:
    from vllm.model_executor.models.registry import ModelRegistry

    named = re.findall(r"`(\w+For(?:CausalLM|ConditionalGeneration))`", DOCUMENT)
    assert len(named) > 20
    assert not set(named) - set(ModelRegistry.get_supported_archs())
    assert len(set(named)) == len(named)


def test_features_by_release_are_those_of_the_tests() -> None:
    """Compare the columns of tested releases; test_compat.py compares the others."""
    text = DOCUMENT.partition("\n| feature | ")[2].partition("\n\n")[0]
    columns, _, *rows = [line.strip("| ").split(" | ") for line in text.splitlines()]
    releases = [each for each in columns if Version(each) <= Version(NEWEST)]
    assert len(releases) > 2
    told = {name: values[: len(releases)] for name, *values in rows}
    assert set(told.pop("KV and tensor parallelism, block sizes, tiers, failures")) == {"on"}
    words = {False: "off", True: "on"}
    assert told == {
        name: [words[since(table, release)] for release in releases]
        for name, table in FEATURES_BY_RELEASE.items()
    }


def test_no_row_stands_twice() -> None:
    rows = [line.split(" | ")[:3] for line in DOCUMENT.splitlines() if line.startswith("| ")]
    heads = (["| ---", "---", "---"], ["| format", "group", "device"])
    named = [row for row in rows if row not in heads]
    assert [row for row in named if named.count(row) > 1] == []
