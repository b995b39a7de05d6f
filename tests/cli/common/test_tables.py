"""Tables for people, at the width of a terminal."""

import pytest

from vllm_kvpool.cli.common.tables import PROSE_CHARS, TextTable

NAME = "Llama-3.1-70B-Instruct@fmt:a1b2c3d4e5f6"
TABLE = TextTable(
    "engines",
    ("namespace", "weights", "cells", "notes"),
    ((NAME, "sample:0123", "12", "tier s3 is away; its log has the reason"),),
    optional=("weights", "cells"),
    prose="notes",
)
WITHOUT = len(NAME) + PROSE_CHARS + 4 * 2
"""Columns and the space between them; of the notes at least so much."""


@pytest.mark.parametrize(
    ("width", "columns", "title"),
    [
        (200, ("namespace", "weights", "cells", "notes"), "engines"),
        (WITHOUT + 16, ("namespace", "weights", "cells", "notes"), "engines"),
        (WITHOUT + 15, ("namespace", "cells", "notes"), "engines (too narrow for weights)"),
        (WITHOUT + 2, ("namespace", "notes"), "engines (too narrow for weights, cells)"),
        (10, ("namespace", "notes"), "engines (too narrow for weights, cells)"),
    ],
)
def test_what_there_is_no_room_for_is_left_out_and_named(
    width: int, columns: tuple[str, ...], title: str
) -> None:
    fitted = TABLE.fitted(width)
    assert (fitted.columns, fitted.title) == (columns, title)
    [row] = fitted.rows
    assert row == tuple(TABLE.rows[0][TABLE.columns.index(each)] for each in columns), "uncut"


def test_a_pipe_gets_every_column() -> None:
    assert TABLE.as_text().splitlines()[1].split() == list(TABLE.columns)
