"""The player of scripts: it plays every step, and fails on output that a step does not state."""

import pytest

from tests.support import scripts

TWO = ["0 get a", "1 put b"]


@pytest.mark.parametrize("expected", ["get a | 1 put b", "any order put b | get a", "... put b"])
def test_what_a_step_says_is_found(expected: str) -> None:
    scripts.compare(TWO, expected)


@pytest.mark.parametrize(
    "expected",
    [
        *("get a", "put b | get a", "1 get a | put b", "get a | put b | put c", "any order put b"),
        *(
            "... put c",
            "... put b | put b",
            "last get a",
            "first put b",
            "only put a",
            "only get c",
        ),
        *("only get c", "no put", "nothing"),
    ],
)
def test_what_a_step_does_not_say_is_an_error(expected: str) -> None:
    with pytest.raises(AssertionError):
        scripts.compare(TWO, expected)


def test_every_step_of_every_choice_is_taken() -> None:
    text = """
name {x: 1|2}
    scene a=3; say {}
    # Why.
    each 0-1 b: say $; say end
"""
    mark = scripts.examples(text, lambda verb, a: [verb, str(a)], {"say": list.append})
    played = {each.name: " ".join(each.play()) for each in mark.args[1]}
    assert played == {
        "name x": "scene 3 1 0 end 1 end b end",
        "name 2": "scene 3 2 0 end 1 end b end",
    }
