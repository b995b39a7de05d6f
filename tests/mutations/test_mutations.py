"""The table of deliberate errors: each still names code that is there, and tests that exist."""

import ast
import shlex
from pathlib import Path

import pytest

from tests.mutations.run import (
    CAUGHT,
    NO_TESTS,
    ROOT,
    SURVIVED,
    VOID,
    Mutation,
    outcomes,
    read_mutations,
)

MUTATIONS = read_mutations()


@pytest.mark.parametrize("mutation", MUTATIONS, ids=[each.name for each in MUTATIONS])
def test_mutation_names_code_that_occurs_once_and_tests_that_exist(mutation: Mutation) -> None:
    text = (ROOT / mutation.file).read_text()
    assert text.count(mutation.old) == 1
    assert mutation.old != mutation.new
    ast.parse(text.replace(mutation.old, mutation.new))
    for each in shlex.split(mutation.tests):
        if each.startswith("tests/"):
            path, _, name = each.partition("::")
            assert (ROOT / path).exists()
            assert not name or f"def {name}(" in (ROOT / path).read_text()


def test_names_of_mutations_differ() -> None:
    assert len({each.name for each in MUTATIONS}) == len(MUTATIONS)


FILE = "vllm_kvpool/sizes.py"


@pytest.mark.parametrize(
    ("without", "with_error", "expected"),
    [
        (True, False, CAUGHT),
        (True, True, SURVIVED),
        (True, None, NO_TESTS),
        (False, False, VOID),
        (None, False, NO_TESTS),
    ],
)
def test_error_counts_only_if_its_tests_pass_without_it(
    tmp_path: Path, without: bool | None, with_error: bool | None, expected: str
) -> None:
    copy = tmp_path / FILE
    copy.parent.mkdir()
    whole = (ROOT / FILE).read_text()
    copy.write_text(whole)
    mutation = Mutation("an error", FILE, whole, "", "tests/test_sizes.py")
    runs: list[str] = []

    def run(root: Path, tests: str) -> bool | None:
        assert (root, tests) == (tmp_path, mutation.tests)
        runs.append((root / FILE).read_text())
        return without if runs[-1] else with_error

    found = list(outcomes(tmp_path, [mutation, mutation], run))
    assert found == [(mutation, expected)] * 2
    assert runs == ([whole, "", ""] if without else [whole])
    assert copy.read_text() == whole
