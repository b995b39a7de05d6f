"""The report of `make demo` on two engines' answers, and the source of its model."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.support.real_model import NAME, ModelUnavailable, real_model

DEMO = Path(__file__).parent.parent / "examples" / "demo.py"


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo", DEMO)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


def answer(**changed: Any) -> dict[str, Any]:
    return {
        "prompt_tokens": 1_500,
        "tokens": [7, 8],
        "logprobs": [-0.1, -0.2],
        "from_pool": 0,
        "first_token_s": 1.0,
    } | changed


def compare(demo: ModuleType, tmp_path: Path, **changed: Any) -> list[Any]:
    conversation = demo.of_random_tokens(tmp_path)
    count = len(conversation.turns)
    with_pool = answer(from_pool=1_280, first_token_s=0.25) | changed
    written = {"with": [answer()] * count}
    read = {"without": [answer()] * count, "with": [with_pool] * count}
    turns: list[Any] = demo.compare(conversation, written, read)
    return turns


@pytest.mark.parametrize(
    ("changed", "is_good"),
    [
        ({}, True),
        ({"logprobs": [-0.1, -0.2001]}, True),  # rounding
        ({"logprobs": [-0.1, -0.21]}, False),
        ({"tokens": [7, 9]}, False),
        ({"from_pool": 0}, False),
    ],
)
def test_an_answer_that_differs_or_came_without_the_pool_is_found(
    demo: ModuleType, tmp_path: Path, changed: dict[str, Any], is_good: bool
) -> None:
    turns = compare(demo, tmp_path, **changed)
    assert {turn.is_good for turn in turns} == {is_good}


def test_the_picture_has_each_turn_and_its_times(demo: ModuleType, tmp_path: Path) -> None:
    turns = compare(demo, tmp_path)
    picture = tmp_path / "new" / "demo.svg"
    demo.draw(turns, picture)
    drawn = ElementTree.parse(picture).iter("{http://www.w3.org/2000/svg}text")
    title, *texts = [each.text or "" for each in drawn]
    assert title == "Time to the first token: computed, and with the pool"
    assert texts.count("1000 ms: computed") == len(turns)
    assert texts.count("250 ms: 1280 of 1500 tokens from the pool") == len(turns)
    assert all(f"{turn.question}  {turn.answer}" in texts for turn in turns)


def test_a_model_that_cannot_be_installed_is_said_to_be_unavailable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ModelUnavailable, match="No matching distribution"):
        real_model(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_model_that_is_there_is_not_made_again(tmp_path: Path) -> None:
    (tmp_path / NAME).mkdir()
    assert real_model(tmp_path) == tmp_path / NAME
