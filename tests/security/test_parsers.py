"""Malformed or too deeply nested input raises the reader's own error.

Parsers raise RecursionError on deep nesting, which is no ValueError. Each `try` around a parser
therefore names both, as `UNREADABLE`.
"""

import ast
import json
import tomllib
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from vllm_kvpool.parsing import UNREADABLE

ROOT = Path(__file__).parent.parent.parent / "vllm_kvpool"
PARSERS = frozenset(
    {
        *("json.load", "json.loads", "tomllib.load", "tomllib.loads"),
        *("msgspec.json.decode", "msgspec.msgpack.decode"),
    }
)
DEEP = "[" * 200_000

READ_BEFORE = {
    # Of the counter of fields: `fields_of` catches it.
    "router/dataplane/request_body.py": {"decode"},
    # `_Engine._errors` catches it.
    "cli/try_model.py": {"_call", "ask"},
    # After `chunks.read`.
    "router/dataplane/resume/chunks.py": {"_fields_of", "with_details", "patched"},
}
"""Functions whose text was parsed before, or that catch `UNREADABLE`'s errors by other names."""


def decoders(tree: ast.Module) -> Iterator[str]:
    """Return the names in a module that are bound to a decoder or to its `decode`."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        value = ast.unparse(node.value)
        if value.startswith(("msgspec.json.Decoder(", "msgspec.msgpack.Decoder(")):
            bound = "" if value.endswith(".decode") else ".decode"
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (f"{ast.unparse(target)}{bound}" for target in targets)


def calls(tree: ast.Module) -> Iterator[tuple[str, bool]]:
    """Yield the function of each parser call, and whether a `try` guards the call as required."""
    names = PARSERS | set(decoders(tree))

    def visit(node: ast.AST, function: str, is_caught: bool) -> Iterator[tuple[str, bool]]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function, is_caught = node.name, False
        if isinstance(node, ast.Call) and ast.unparse(node.func) in names:
            yield function, is_caught
        for field, value in ast.iter_fields(node):
            is_tried = isinstance(node, ast.Try) and field == "body"
            caught = is_caught or (is_tried and "UNREADABLE" in _caught_by(node))
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from visit(child, function, caught)

    yield from visit(tree, "", False)


def _caught_by(node: ast.AST) -> str:
    assert isinstance(node, ast.Try)
    return " ".join(ast.unparse(each.type) for each in node.handlers if each.type is not None)


def test_every_call_to_a_parser_is_in_a_try_for_all_that_it_raises() -> None:
    found = {
        (str(path.relative_to(ROOT)), function)
        for path in ROOT.rglob("*.py")
        for function, is_caught in calls(ast.parse(path.read_text()))
        if not is_caught
    }
    assert found == {(path, each) for path, names in READ_BEFORE.items() for each in names}


@pytest.mark.parametrize("parse", [json.loads, msgspec.json.decode, tomllib.loads])
@pytest.mark.parametrize("text", ["", "{", DEEP, f"x = {DEEP}", "\ud800"])
def test_that_is_all_that_they_raise(parse: object, text: str) -> None:
    assert callable(parse)
    if parse is tomllib.loads and not text:
        return
    with pytest.raises(UNREADABLE):
        parse(text)


def test_what_msgspec_raises_is_named_whatever_it_derives_from() -> None:
    """The error derives from ValueError since msgspec 0.21 only; pyproject.toml allows 0.19."""
    assert msgspec.DecodeError in UNREADABLE
