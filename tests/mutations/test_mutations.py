"""The table of deliberate errors: each still names code that is there, and tests that exist."""

import ast
import shlex

import pytest

from tests.mutations.run import ROOT, Mutation, read_mutations

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
