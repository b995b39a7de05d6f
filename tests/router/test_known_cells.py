"""What cells are called is remembered by the beginnings of prompts."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from vllm_kvpool.identity.cell_names import ChunkNames, KeyPrefix
from vllm_kvpool.router.control.prefetch import MAX_LAYOUTS, KnownCells
from vllm_kvpool.router.control.prefix_index import SPAN_BYTES

STEMS = (KeyPrefix("a@", 100), KeyPrefix("b@", 100))
SPAN = SPAN_BYTES


def prefix_of(text: str) -> tuple[int, ...]:
    """As `bodies.py` makes it of a prompt of so many spans: a letter is a span."""
    return tuple(hash(text[: end + 1]) for end in range(len(text)))


def chunks_of(text: str, per_span: int = 2) -> tuple[str, ...]:
    """A chunk's name is of all tokens up to its end."""
    return tuple(f"{text[: end + 1]}{i}" for end in range(len(text)) for i in range(per_span))


def learn(known: KnownCells, text: str, tail_bytes: int = 0, per_span: int = 2) -> None:
    names = ChunkNames(STEMS, chunks_of(text, per_span))
    known.learn(prefix_of(text), len(text) * SPAN + tail_bytes, names)
    known.check()


def found(known: KnownCells, text: str) -> Sequence[str]:
    names = known.find(prefix_of(text))
    return () if names is None else names.chunks


def test_the_same_prompt_has_the_same_cells() -> None:
    known = KnownCells()
    learn(known, "abcd")
    assert known.find(prefix_of("abcd")) == ChunkNames(STEMS, chunks_of("abcd"))
    assert found(known, "abcdxyz") == chunks_of("abcd")


def test_prompts_that_begin_alike_share_their_first_cells() -> None:
    known = KnownCells()
    learn(known, "abcdefgh")
    # Two chunks a span, and the one that has begun where they part.
    assert found(known, "abx") == chunks_of("abcdefgh")[:5]
    assert found(known, "xbc") == ()


def test_a_prompt_longer_than_its_beginnings_is_cut_by_its_bytes() -> None:
    known = KnownCells()
    learn(known, "ab", tail_bytes=2 * SPAN, per_span=8)  # 16 chunks in four spans
    assert len(found(known, "ax")) == 5
    assert len(found(known, "ab")) == 16


def test_what_says_nothing_is_not_kept() -> None:
    known = KnownCells()
    known.learn((), 100, ChunkNames(STEMS, ("x",)))
    known.learn((1,), 100, ChunkNames((), ("x",)))
    known.learn((1,), 100, ChunkNames(STEMS, ()))
    assert len(known) == 0
    assert known.find((1,)) is None
    assert known.find(()) is None


def test_stems_are_kept_once_and_few_of_them() -> None:
    known = KnownCells()
    for number in range(MAX_LAYOUTS + 3):
        for prompt in range(2):
            key_prefixes = (KeyPrefix(f"{number}@", 100),)
            known.learn((number, prompt), 2 * SPAN, ChunkNames(key_prefixes, ("x",)))
        names = [known.find((number, prompt)) for prompt in range(2)]
        assert names[0] is not None
        assert names[1] is not None
        assert names[0].key_prefixes is names[1].key_prefixes


TEXTS = st.text("ab", min_size=1, max_size=6)


@given(st.lists(TEXTS, max_size=30), st.integers(1, 30), st.integers(1, 20), TEXTS)
def test_the_bounds_hold_and_what_is_found_is_true(
    texts: list[str], max_chunks: int, max_spans: int, asked: str
) -> None:
    known = KnownCells(max_chunks, max_spans)
    for text in texts:
        learn(known, text)
    chunks = found(known, asked)
    # Of the part that is alike nothing is wrong; beyond it there is at most one chunk.
    alike = [name for name in chunks if name in chunks_of(asked)]
    assert list(chunks[: len(alike)]) == alike == list(chunks_of(asked)[: len(alike)])
    longer = [text for text in texts if text.startswith(asked)]
    assert len(chunks) <= len(alike) + 1 + (2 * 6 if longer else 0)
    if texts and len(texts[-1]) * 2 <= max_chunks and len(texts[-1]) <= max_spans:
        assert found(known, texts[-1]) == chunks_of(texts[-1])


@given(st.lists(TEXTS, max_size=12), TEXTS)
def test_with_room_for_all_the_longest_beginning_is_found(texts: list[str], asked: str) -> None:
    known = KnownCells()
    for text in texts:
        learn(known, text)

    def alike(text: str) -> int:
        pairs = zip(text, asked, strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(text), len(asked)))

    longest = max(map(alike, texts), default=0)
    assert len(found(known, asked)) >= 2 * longest
    assert found(known, asked)[: 2 * longest] == chunks_of(asked)[: 2 * longest]
