"""docs/support.md says what tests show."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests import support_table
from tests.conftest import COLLECTED

ROOT = Path(__file__).parent.parent
COLLECT_TIMEOUT_S = 300


def test_the_document_is_what_the_table_says() -> None:
    assert (ROOT / "docs" / "support.md").read_text() == support_table.document()


@pytest.mark.slow
def test_every_test_that_is_named_exists(request: pytest.FixtureRequest) -> None:
    """pytest fails for a full name that it does not find; it is asked for those not found yet."""
    found = request.config.stash[COLLECTED]
    found |= {name.partition("[")[0] for name in found}
    missing = [name for name in support_table.tests() if name not in found]
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


def test_families_are_models_that_vllm_has() -> None:
    from vllm.model_executor.models.registry import ModelRegistry

    known = ModelRegistry.get_supported_archs()
    named = [name for family in support_table.FAMILIES for name in family.architectures]
    assert not set(named) - set(known)
    assert len(set(named)) == len(named)


def test_what_families_are_refused_with_is_a_refusal() -> None:
    words = support_table.refusals()
    for family in support_table.FAMILIES:
        if family.newer is not None and family.newer.how is support_table.How.REFUSED:
            name = family.newer.test.partition("[")[2][:-1]
            assert family.newer.words in words[name]


def test_no_row_stands_twice() -> None:
    rows = [(row.format, row.group, row.device) for row in support_table.ROWS]
    assert len(set(rows)) == len(rows)
    beside = [what for what, _ in support_table.COMPOSED]
    assert len(set(beside)) == len(beside)
    for row in support_table.ROWS:
        assert row.newer or row.older, row
