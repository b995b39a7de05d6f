"""Resume points of an answer, and the comparison with the text of the next engine."""

import pytest

from vllm_kvpool.router.dataplane.resume.answer import Answer, Overlap, ResumePoint


def told(answer: Answer, *chunks: tuple[int, str]) -> Answer:
    """Add chunks, given as (number of tokens, text), to the answer."""
    for num_tokens, text in chunks:
        answer.ids.extend([1] * num_tokens)
        if text:
            answer.add_text([("text", text)], num_tokens, len(answer.ids))
    return answer


def resume_points(answer: Answer) -> list[ResumePoint]:
    found = [answer.last_resume_point(chars) for chars in range(answer.num_chars + 1)]
    return sorted({resume_point for resume_point in found if resume_point is not None})


@pytest.mark.parametrize(
    ("chunks", "expected"),
    [
        ([], []),
        ([(1, "ab"), (1, "é")], [(1, 2), (2, 3)]),
        # What a chunk without text has begun is ended by the next with text.
        ([(1, "a"), (1, ""), (1, "日")], [(1, 1), (3, 2)]),
        # Whether the last of several tokens has begun a character is seen at the next text.
        ([(2, "a")], []),
        ([(2, "a"), (2, "b")], [(2, 1)]),
        ([(2, "a"), (2, "é")], []),
        ([(2, "a"), (2, "\ufffd")], []),
        ([(2, "a"), (1, "é")], [(3, 2)]),
        ([(2, "a"), (1, ""), (1, "b")], [(2, 1), (4, 2)]),
        # Text without tokens says nothing.
        ([(0, "echo"), (1, "a")], [(1, 5)]),
    ],
)
def test_resume_points(chunks: list[tuple[int, str]], expected: list[tuple[int, int]]) -> None:
    assert resume_points(told(Answer((), withholds=True), *chunks)) == expected


def test_what_is_echoed_comes_before_all_tokens() -> None:
    assert told(Answer((), withholds=True), (0, "echo"), (1, "a")).num_echoed == 4
    assert told(Answer((), withholds=True), (1, "a"), (0, "b")).num_echoed == 0
    unknown = Answer((), withholds=True)
    unknown.has_ids = False
    assert told(unknown, (0, "a")).num_echoed == 0


def test_with_stop_strings_a_resume_point_is_further_on_by_what_is_withheld() -> None:
    answer = told(Answer(["x", "xyz"], withholds=True), (1, "ab"), (1, "c"), (2, "d"), (1, "e"))
    # Nothing is known of the end of several tokens: what they say first is withheld.
    assert resume_points(answer) == [(1, 4), (2, 5)]
    assert answer.exact_resume_point() == (2, 5)
    assert told(answer, (1, "f")).exact_resume_point() is None
    assert told(Answer(["xyz"], withholds=False), (1, "ab")).exact_resume_point() == (1, 2)


def test_resume_points_do_not_go_across_a_marker() -> None:
    answer = Answer((), withholds=True)
    answer.add_text([("reasoning", "so")], 1, 1)
    answer.add_text([("reasoning", "?")], 2, 3)
    assert resume_points(answer) == [(1, 2)]
    answer.add_text([("content", "yes")], 1, 5)
    assert resume_points(answer) == [(5, 6)]
    answer.add_text([("reasoning", "a"), ("content", "b")], 1, 6)
    assert resume_points(answer) == []
    assert answer.text_after(1) == [
        *(("reasoning", "o?"), ("content", "yes"), ("reasoning", "a"), ("content", "b"))
    ]


def test_other_tokens_have_no_resume_points_of_the_old_ones() -> None:
    answer = told(Answer((), withholds=True), (1, "a"), (1, "b"), (1, "c"))
    answer.replace_after(1, [1, 1], [])
    assert resume_points(answer) == [(1, 1), (2, 2), (3, 3)]
    answer.replace_after(1, [9], [])
    assert resume_points(answer) == [(1, 1)]
    assert answer.ids.tolist() == [1, 9]


@pytest.mark.parametrize(
    ("text", "more", "expected"),
    [
        ("a", "", 0),
        ("ax", "", 1),
        ("axy", "", 2),
        ("axyz", "", 0),
        ("ax", "y", 2),
        ("a", "##", 2),
        ("a#", "#x", 1),
        ("axy#", "", 1),
    ],
)
def test_what_may_begin_a_stop_string(text: str, more: str, expected: int) -> None:
    answer = told(Answer(["xyz", "###"], withholds=False), *((1, char) for char in text))
    assert answer.open_chars(more) == expected


def test_the_tail_is_of_the_last_kind() -> None:
    answer = Answer((), withholds=True)
    assert answer.tail(3) == ""
    answer.add_text([("reasoning", "abc"), ("content", "de")], 1, 1)
    assert (answer.tail(3), answer.tail(1), answer.tail(0)) == ("de", "e", "")
    answer.add_text([("content", "fg")], 1, 2)
    assert (answer.tail(3), answer.tail(9)) == ("efg", "defg")


def test_what_the_client_has_is_cut_and_anything_else_found_out() -> None:
    overlap = Overlap([("reasoning", "ab"), ("content", "cd")])
    assert overlap.cut([("reasoning", "a")]) == []
    assert overlap.cut([("reasoning", "b"), ("content", "c")]) == []
    assert overlap
    assert overlap.cut([("content", "de"), ("reasoning", "f")]) == [
        ("content", "e"),
        ("reasoning", "f"),
    ]
    assert not overlap
    assert overlap.cut([("content", "g")]) == [("content", "g")]
    assert Overlap([("reasoning", "ab"), ("content", "cd")]).cut([("reasoning", "abc")]) is None
    assert Overlap([("content", "ab")]).cut([("content", "ax")]) is None
    assert Overlap([("content", "ab")]).cut([("reasoning", "ab")]) is None
