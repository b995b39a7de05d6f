"""Tests written as scripts: examples whose steps are verbs with words, and what each step says.

    load of which a tier {lacks: missing|cannot read: failed} a chunk
        on disk; load 1 a b -> 0 get-0 a b
        ends 0 done {} -> check a; slots 3 1 0

A line that is not indented names an example. `{x: s|y: t}` in the name makes one example of each,
with `s` or `t` for `{}` in the steps (`{x|y}`: with `x` or `y`). A deeper line continues the one
before; a line with `#` is a comment. The first step makes the scene, the others act on it. `a=3` is
an option. `each 0-3 x: load $ a` repeats its steps with 0, 1, 2, 3 and x for `$`.

`-> a | b` compares all lines that a step says; `-> ... a | b` finds them among its lines;
`-> any order a | b` compares them in any order; `-> last a` and `-> first a` compare one of them;
`-> only a | b` compares those that begin with a word of theirs; `-> no a` finds no line that begins
so, and `-> nothing` no line. `told a` is no step: it compares the lines of the step before once
more. The number that a line begins with may be left out.
"""

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import pytest

Verbs = Mapping[str, Callable[..., Any]]


class Example(NamedTuple):
    name: str
    lines: tuple[str, ...]
    begin: Callable[..., Any]
    """Function that makes the scene from the words and options of the first step."""
    verbs: Verbs

    def play(self) -> Any:
        """Run all steps and return the scene. AssertionError at the first unexpected result."""
        scene: Any = None
        said: list[str] = []
        for line in self.lines:
            for step in unrolled(line):
                try:
                    words, _, expected = (each.strip() for each in step.partition("->"))
                    if words.startswith("told "):
                        compare(said, words.removeprefix("told "))
                        continue
                    verb, *arguments = words.split()
                    positional, options = arguments_of(arguments)
                    if scene is None:
                        scene = self.begin(verb, *positional, **options)
                    else:
                        said = self.verbs[verb](scene, *positional, **options) or []
                    if expected:
                        compare(said, expected)
                except Exception as error:
                    error.add_note(f"{self.name}: {step}")
                    raise
        return scene


def examples(
    text: str, begin: Callable[..., Any], verbs: Verbs, given: str = ""
) -> pytest.MarkDecorator:
    """Return a mark that parametrizes `example` with each example; `given`: a step before each."""
    found: list[Example] = []
    text = re.sub(r"\n {5,}", " ", text.strip())
    for part in re.split(r"\n(?=\S)", text):
        name, *lines = part.splitlines()
        steps = [given, *(each.strip() for each in lines if "#" not in each)]
        choices = re.search(r"\{(.+)\}", name)
        for choice in choices[1].split("|") if choices else [""]:
            label, _, words = choice.partition(": ")
            filled = tuple(each.replace("{}", words or label) for each in steps if each)
            title = name.replace(choices[0], label) if choices else name
            found.append(Example(title, filled, begin, verbs))
    return pytest.mark.parametrize("example", found, ids=[each.name for each in found])


def arguments_of(words: list[str]) -> tuple[list[str], dict[str, Any]]:
    """Return the words without options, and the options by name."""
    options = {}
    positional = []
    for word in words:
        name, is_option, value = word.partition("=")
        if is_option:
            options[name] = _literal(value)
        else:
            positional.append(word)
    return positional, options


def compare(said: list[str], expected: str) -> None:
    """Assert that a step's lines match the text after its arrow."""
    how = next((each for each in HOWS if f"{expected} ".startswith(f"{each} ")), "")
    wanted = [each.strip() for each in expected.removeprefix(how).split(" | ")]
    match how:
        case "nothing":
            assert said == []
        case "no":
            assert not any(_bare(each).startswith(wanted[0]) for each in said), said
        case "last" | "first":
            assert _is_said(said[-1 if how == "last" else 0], wanted[0]), said
        case "only":
            begin = tuple({f"{WORD.match(each)[0]}" for each in wanted})  # type: ignore[index]
            assert [_bare(each) for each in said if _bare(each).startswith(begin)] == wanted, said
        case "..." | "any order":
            left = list(said)
            for each in wanted:
                found = [line for line in left if _is_said(line, each)]
                assert found, (each, said)
                left.remove(found[0])
            assert how == "..." or not left, left
        case _:
            are_same = [_is_said(*pair) for pair in zip(said, wanted, strict=False)]
            assert len(said) == len(wanted), said
            assert all(are_same), said


HOWS = ("nothing", "no", "...", "any order", "only", "last", "first")
WORD = re.compile("[a-z]+")


def _is_said(line: str, wanted: str) -> bool:
    return wanted in (line, _bare(line))


def _bare(line: str) -> str:
    return line.lstrip("0123456789 ")


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def unrolled(line: str) -> Iterator[str]:
    """Yield the steps of a line."""
    items = [""]
    if line.startswith("each "):
        names, _, line = line.removeprefix("each ").partition(": ")
        items = []
        for name in names.split():
            ends = re.fullmatch(r"(\d+)-(\d+)", name)
            items += map(str, range(int(ends[1]), int(ends[2]) + 1)) if ends else [name]
    for item in items:
        yield from (each.strip().replace("$", item) for each in line.split(";"))
