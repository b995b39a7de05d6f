"""A script that says something else than what happens fails."""

import pytest

from tests.router.scripts import Example, examples

FLEET = "fleet p / d; ask r"


@pytest.mark.parametrize(
    "line",
    [
        *(f"{FLEET} -> {wrong}" for wrong in ("nothing", "decode r d", "prefill r p, decode r d")),
        *(f"{FLEET} -> {wrong}" for wrong in ("... decode r d", "no prefill", "prefill r q")),
        *(f"{FLEET}; {wrong}" for wrong in ("phase r queued", "state p decode", "place r d")),
        *(f"{FLEET}; {wrong}" for wrong in ("count arrived 2", "locked d", "paths in_pool=1")),
        *(f"{FLEET}; {wrong}" for wrong in ("assert work('d')", "counted_as prefill 2 0 0")),
        "each 0-1: fleet d$ /; state d1 decode",
        "with no_such_setting=1",
    ],
)
def test_script_that_is_wrong_fails(line: str) -> None:
    with pytest.raises(AssertionError):
        Example("wrong", (line,)).play()


@pytest.mark.parametrize("line", ["nothing like it", "ask", "began r ->", f"{FLEET}; phase r"])
def test_step_that_cannot_be_read_fails(line: str) -> None:
    with pytest.raises((KeyError, TypeError)):
        Example("wrong", (line,)).play()


@examples(
    """
each of {two: ask r -> prefill r p|three: ask r 20 -> decode r d} is played
    with prefill_requests=1
    # A comment.
    fleet p /
        d; {}; count
        arrived 1
""",
    given="hands_over=True prefill_requests=2",
)
def test_script_has_alternatives_settings_and_long_lines(example: Example) -> None:
    assert example.name in ("each of two is played", "each of three is played")
    assert example.play().controller.state.settings.prefill_requests == 1
