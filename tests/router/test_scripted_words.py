"""Tokens of the scripted engine: their text, and what follows."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.scripted_words import (
    EOS_ID,
    VOCAB_SIZE,
    Continuation,
    Detokenizer,
    decode,
    encode,
    token_bytes,
)

texts = st.text(alphabet=st.characters(codec="utf-8"), max_size=40)
seeds = st.none() | st.integers(0, 1 << 40)


def follow(prompt: Sequence[int], count: int, seed: int | None = None) -> list[int]:
    words = Continuation("m", prompt, eos_probability=0.05, wide_probability=0.4, seed=seed)
    return [words.next() for _ in range(count)]


def say(prompt: Sequence[int], answer: Sequence[int], stop: Sequence[str] = ()) -> list[str]:
    """The text after each token, up to a stop string."""
    text, said = Detokenizer(prompt, stop), []
    for number, token_id in enumerate(answer, 1):
        stopped = text.add(token_id) is not None
        said.append(text.take(stopped or number == len(answer)))
        if stopped:
            break
    return said


@given(texts)
def test_a_text_is_its_tokens(text: str) -> None:
    assert decode(encode(text)) == text


@given(st.integers(1, VOCAB_SIZE - 1))
def test_no_two_tokens_have_the_same_text(token_id: int) -> None:
    text = token_bytes(token_id)
    if text.isascii():
        assert encode(text.decode()) == [token_id]
    else:
        assert token_id == text[0] + 1


@pytest.mark.parametrize("token_id", [-1, VOCAB_SIZE])
def test_there_are_no_others(token_id: int) -> None:
    with pytest.raises(ValueError, match="out of vocabulary"):
        token_bytes(token_id)


def test_english_has_a_token_for_each_short_word() -> None:
    assert len(encode("once upon a time there was")) == 7  # there is two


@given(texts.filter(bool).map(encode), st.integers(0, 30), st.integers(0, 30))
def test_a_prompt_with_half_its_answer_gets_the_other_half(
    prompt: list[int], first: int, rest: int
) -> None:
    answer = follow(prompt, first + rest)
    assert follow(prompt + answer[:first], rest) == answer[first:]


@given(texts.filter(bool).map(encode))
def test_what_follows_is_whole_characters_in_the_end(prompt: list[int]) -> None:
    answer = [token_id for token_id in follow(prompt, 60) if token_id != EOS_ID]
    whole = next(n for n in range(4) if "\ufffd" not in decode(answer[: len(answer) - n]))
    text = decode(answer[: len(answer) - whole])
    assert encode(text) == answer[: len(answer) - whole]


def test_every_token_before_counts() -> None:
    prompt = encode("once upon a time")
    others = [prompt[:i] + prompt[i + 1 :] for i in range(len(prompt))]
    assert len({tuple(follow(each, 8)) for each in [prompt, *others]}) == len(prompt) + 1


def test_seeds_differ_and_do_not_survive_a_change_of_engines() -> None:
    prompt = encode("once upon a time")
    assert follow(prompt, 8, seed=1) == follow(prompt, 8, seed=1)
    assert follow(prompt, 8, seed=1) != follow(prompt, 8, seed=2)
    first = follow(prompt, 8, seed=1)
    assert follow(prompt + first[:4], 4, seed=1) != first[4:]


@given(texts.filter(bool).map(encode), st.integers(1, 40))
def test_pieces_are_the_text_without_half_a_character(prompt: list[int], count: int) -> None:
    answer = follow(prompt, count)
    whole = b"".join(map(token_bytes, answer)).decode(errors="ignore")
    assert "".join(say(prompt, answer)) == whole


def test_a_character_of_several_tokens_comes_with_its_last_one() -> None:
    assert say(encode("x"), encode("\u2192 ab")) == ["", "", "\u2192", " ab"]


def test_a_prompt_that_ends_within_a_character_is_said_again() -> None:
    arrow = encode("\u2192")
    assert say(encode("once") + arrow[:2], [arrow[2], *encode(" ab")]) == ["once\u2192", " ab"]


stops = st.sampled_from(["a", " b", "i k", "o ta", "\u2192", "zz"])


@given(texts.filter(bool).map(encode), stops, st.integers(1, 40))
def test_nothing_of_a_stop_string_is_said(prompt: list[int], stop: str, count: int) -> None:
    answer = follow(prompt, count)
    said = say(prompt, answer, [stop])
    text = "".join(say(prompt, answer))
    assert "".join(said) == text.partition(stop)[0]
    for number in range(1, len(said)):
        so_far = "".join(say(prompt, answer[:number]))
        withheld = len(so_far) - len("".join(said[:number]))
        assert withheld == min(len(stop) - 1, len(so_far))


def test_a_stop_string_may_be_kept() -> None:
    text = Detokenizer([1], [" ab"], include_stop=True)
    assert [text.add(token_id) for token_id in encode(" kofa abc")] == [None, " ab"]
    assert text.take(finished=True) == " kofa ab"
