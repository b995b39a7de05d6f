"""The requests of `kvpool try`: conversations that fit the model, and traces line by line."""

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from vllm_kvpool.cli.try_report import Kind
from vllm_kvpool.cli.try_workload import (
    ANSWER_TOKENS,
    CONVERSATIONS,
    TURNS,
    TraceRequest,
    Workload,
    conversations,
    of_trace,
    read_trace,
)
from vllm_kvpool.errors import ConfigError

WORDS = range(3, 100)


@pytest.mark.parametrize("max_tokens", [600, 2_048, 131_072])
def test_conversations_fit_into_the_model_to_the_last_answer(max_tokens: int) -> None:
    work = conversations(WORDS, max_tokens, 256, random.Random(0))
    said: Counter[int] = Counter()
    for request in (*work.before, *work.after):
        said[request.session] += len(request.new_tokens) + ANSWER_TOKENS
    assert len(said) == CONVERSATIONS
    assert 300 < max(said.values()) <= max_tokens


def test_conversations_restart_before_their_last_turn() -> None:
    work = conversations(WORDS, 4_096, 256, random.Random(0))
    kinds = Counter(each.kind for each in work.before)
    assert kinds == {Kind.NEW: CONVERSATIONS, Kind.SEEN: (TURNS - 1) * CONVERSATIONS}
    assert [each.kind for each in work.after] == [Kind.RESTARTED] * CONVERSATIONS


def test_conversations_of_a_short_model_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"chunk_tokens=256.*raise --max-model-len"):
        conversations(WORDS, 400, 256, random.Random(0))


def line(length: int, ids: list[int], answer: int = 5) -> TraceRequest:
    return TraceRequest(length, answer, ids)


TRACE = [
    line(1024, [0, 1]),
    line(1536, [0, 1, 2]),
    line(1500, [0, 1, 2]),
    line(1600, [0, 1, 3, 4]),
    line(600, [0, 9], answer=500),
    line(512, [7]),
]


def kinds(work: Workload) -> list[list[Kind]]:
    return [[each.kind for each in life] for life in work]


def test_trace_requests_are_seen_if_half_of_their_blocks_were() -> None:
    assert kinds(of_trace(TRACE, WORDS, 4_096, 0)) == [
        [Kind.NEW, Kind.SEEN, Kind.SEEN],
        [Kind.RESTARTED, Kind.SEEN, Kind.NEW],
    ]


def test_trace_prompts_share_tokens_exactly_where_they_share_ids() -> None:
    work = of_trace(TRACE, WORDS, 4_096, 0)
    first, second, third = (each.new_tokens for each in work.before)
    assert list(map(len, (first, second, third))) == [1024, 1536, 1500]
    assert second[:1024] == first
    assert second[:1500] == third
    assert [each.known_tokens for each in work.before] == [0, 1024, 1500]
    assert len({each.session for life in work for each in life}) == len(TRACE)
    assert of_trace(TRACE, WORDS, 4_096, 1).before[0].new_tokens != first


def test_trace_answers_are_cut_and_long_prompts_left_out() -> None:
    work = of_trace(TRACE, WORDS, 1_100, 0)
    assert [len(each.new_tokens) for life in work for each in life] == [1024, 600, 512]
    assert work.after[0].answer_tokens == 64
    with pytest.raises(ConfigError, match="1 of 6 requests fit"):
        of_trace(TRACE, WORDS, 520, 0)


GOOD = {"timestamp": 0, "input_length": 600, "output_length": 2, "hash_ids": [1, 2]}


def test_trace_in_mooncakes_format_is_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{json.dumps(GOOD)}\n{json.dumps(GOOD)}\n")
    assert read_trace(str(path)) == [TraceRequest(600, 2, [1, 2])] * 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"input_length": 2_000}, "line 2: expected"),
        ({"input_length": 0}, "line 2: expected"),
        ({"output_length": 0}, "line 2: expected"),
        ({"input_length": "many"}, "line 2: "),
        ({"hash_ids": None}, "line 2: "),
    ],
)
def test_trace_with_a_wrong_line_is_refused_by_its_number(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{json.dumps(GOOD)}\n{json.dumps(GOOD | change)}\n")
    with pytest.raises(ConfigError, match=words):
        read_trace(str(path))


@pytest.mark.parametrize("text", ["", json.dumps(GOOD), "not json\n" * 2])
def test_trace_without_two_requests_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=str(path)):
        read_trace(str(path))
    with pytest.raises(ConfigError, match="No such file"):
        read_trace(str(tmp_path / "none"))
