"""States of items and grants: which may follow which, as docs/embeddings.md lists them."""

import re
from enum import Enum
from pathlib import Path

import pytest

from tests.support.state_tables import assert_moves_along, pairs_of, reached_from
from vllm_kvpool.embeds.machines.items import Item
from vllm_kvpool.embeds.machines.states import TRANSITIONS, GrantState, TransferState, moved

DOCUMENT = Path(__file__).parents[2] / "docs" / "embeddings.md"
FIRST = (TransferState.BOOTSTRAPPING, GrantState.GRANTED)
ENDS = (TransferState.FAILED, TransferState.CANCELLED)


@pytest.mark.parametrize(("old", "new"), pairs_of(*FIRST), ids=str)
def test_state_moves_along_the_table_alone(old: Enum, new: Enum) -> None:
    assert_moves_along(TRANSITIONS, moved, old, new)


@pytest.mark.parametrize("first", FIRST, ids=str)
def test_every_state_is_reached_from_the_first(first: Enum) -> None:
    assert reached_from(TRANSITIONS, first) == set(type(first))


def test_the_documents_list_of_moves_is_that_of_the_code() -> None:
    (rows,) = re.findall(
        r"\| from \| to \| when \|\n\|---\|---\|---\|\n(.*?)\n\n", DOCUMENT.read_text(), re.DOTALL
    )
    listed = re.findall(r"^\| (\w+) \| (\w+) \|", rows, re.MULTILINE)
    states = set(TransferState).difference(ENDS)
    moves = {
        (old.value, new.value) for old in states for new in set(TRANSITIONS[old]).difference(ENDS)
    }
    assert sorted(listed) == sorted(moves)
    for old in states:
        assert set(TRANSITIONS[old]).issuperset(ENDS), (
            "every state can also end as failed or cancelled"
        )


@pytest.mark.parametrize("end", ENDS, ids=str)
@pytest.mark.parametrize("later", TransferState, ids=str)
def test_item_that_has_ended_stays_ended(end: TransferState, later: TransferState) -> None:
    """A status that another rank overwrites would revive a failed item."""
    item = Item("image", 0.0)
    item.move(end)
    if later is not end:
        with pytest.raises(AssertionError):
            item.move(later)
    assert item.state is end
