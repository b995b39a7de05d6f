"""The report of `make demo` on two engines' answers, and the source of its model."""

import importlib.util
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar
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


PICTURES = [None, Path(__file__).parent.parent / "docs" / "images" / "demo.svg"]


@pytest.mark.parametrize("kept", PICTURES, ids=["drawn", "kept"])
def test_the_labels_of_the_picture_stand_beside_the_bars_and_within_the_picture(
    demo: ModuleType, tmp_path: Path, kept: Path | None
) -> None:
    """The kept picture has the questions and the form that the demo draws today."""
    picture = kept or tmp_path / "demo.svg"
    if kept is None:
        demo.draw(compare(demo, tmp_path), picture)
    root = ElementTree.parse(picture).getroot()
    texts, bars = (
        [each for each in root.iter(f"{{http://www.w3.org/2000/svg}}{tag}") if each.get("x")]
        for tag in ("text", "rect")
    )
    labels = [each for each in texts if re.match(r"\d+ ms: ", each.text or "")]
    assert len(bars) == len(labels) == 2 * len(demo.QUESTIONS)
    for bar, label in zip(bars, labels, strict=True):
        assert float(label.attrib["x"]) >= float(bar.attrib["x"]) + float(bar.attrib["width"]) + 5
        top, height = float(bar.attrib["y"]), float(bar.attrib["height"])
        assert top < float(label.attrib["y"]) < top + height
    for text in texts:
        widest_px = 0.62 * int(re.findall(r"(\d+)px", text.attrib["style"])[0])  # of a letter
        end = float(text.attrib["x"]) + widest_px * len(text.text or "")
        assert end <= float(root.attrib["width"]), text.text
    if kept:
        told = " ".join(each.text or "" for each in texts)
        assert all(question in told for question in demo.QUESTIONS)


class RecordedTimer:
    """A timer that never fires and records how many of its kind were started and cancelled."""

    calls: ClassVar[list[str]] = []

    def __init__(self, _seconds: float, _function: Callable[[], None]) -> None:
        pass

    def start(self) -> None:
        self.calls.append("start")

    def cancel(self) -> None:
        self.calls.append("cancel")


def test_limit_of_an_engine_begins_anew_with_each_line(
    demo: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo.threading, "Timer", RecordedTimer)
    RecordedTimer.calls.clear()
    command = [sys.executable, "-c", "print(1, 2, 3, sep='\\n')"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert list(demo.lines_of(process, 1.0)) == ["1\n", "2\n", "3\n"]
    assert RecordedTimer.calls == ["start", "cancel"] * 4


def test_engine_that_prints_nothing_is_killed_and_the_reason_is_printed(
    demo: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [sys.executable, "-c", "input()"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert list(demo.lines_of(process, 0.1)) == []
    assert process.returncode == -signal.SIGKILL
    assert "the engine printed nothing for 0.1 s" in capsys.readouterr().out


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
