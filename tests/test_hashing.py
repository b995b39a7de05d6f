"""The hash chain: the same everywhere for the same KV, and another for any other KV."""

import hashlib
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_kvpool.identity.chunk_hash import (
    HASH_BYTES,
    ChunkChain,
    MediaItem,
    RequestIdentity,
    tenant_of,
)

CHUNK = 4
TOKENS = list(range(100, 100 + 5 * CHUNK))
PLAIN = RequestIdentity()


def hashes(
    tokens: Sequence[int], identity: RequestIdentity = PLAIN, chunk_tokens: int = CHUNK
) -> list[bytes]:
    chain = ChunkChain(chunk_tokens, identity)
    chain.extend(tokens)
    assert len(chain) == len(tokens) // chunk_tokens
    return chain.hashes


def common(one: list[bytes], other: list[bytes]) -> int:
    """Return the number of equal hashes at the start; all others must differ."""
    same = [a == b for a, b in zip(one, other, strict=False)]
    count = same.index(False) if False in same else len(same)
    assert not any(same[count:])
    return count


RELEASES = "vllm 0.32.0"


def image(identifier: str, start: int, stop: int, releases: str = RELEASES) -> MediaItem:
    return MediaItem(identifier, start, stop, releases)


# This encoding is what pools hold. A change of what text is hashed to also changes SCHEME.
FULL_IDENTITY = RequestIdentity(
    adapter=b"adapter",
    cache_salt="salt",
    media=(image("image", 2, 8),),
    embeds=(b"", b"row", b""),
)

CHILD = """
from vllm_kvpool.identity.chunk_hash import *
identity = RequestIdentity(b"adapter", "salt", (MediaItem("image", 2, 8, "vllm 0.32.0"),),
                           (b"", b"row", b""))
chain = ChunkChain(4, identity)
chain.extend(range(1000, 1012))
print(*(h.hex() for h in chain.hashes))
"""


def test_the_bytes_are_those_of_the_scheme() -> None:
    def field(data: bytes) -> bytes:
        return len(data).to_bytes(8, "little") + data

    def digest(data: bytes) -> bytes:
        return hashlib.sha256(data).digest()[:HASH_BYTES]

    def tokens(*ids: int) -> bytes:
        return field(b"".join(i.to_bytes(4, "little") for i in ids))

    def item(place: int) -> bytes:
        start = place.to_bytes(8, "little", signed=True)
        names = field(b"image") + field(b"vllm 0.32.0")
        return b"media" + start + (6).to_bytes(8, "little") + names

    root = field(b"kvpool-chain-2") + (4).to_bytes(4, "little") + field(b"adapter") + field(b"salt")
    embed = b"embed" + (1).to_bytes(4, "little") + field(b"row")
    first = digest(digest(root) + tokens(1000, 0, 1002, 1003) + embed + item(2))
    second = digest(first + tokens(1004, 1005, 1006, 1007) + item(-2))
    third = digest(second + tokens(1008, 1009, 1010, 1011))
    assert hashes(range(1000, 1012), FULL_IDENTITY) == [first, second, third]


@pytest.mark.parametrize("seed", ["0", "1", "random"])
def test_another_process_says_the_same(seed: str) -> None:
    printed = subprocess.run(
        [sys.executable, "-c", CHILD],
        env={"PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert [bytes.fromhex(h) for h in printed] == hashes(range(1000, 1012), FULL_IDENTITY)


@pytest.mark.parametrize(
    ("identity", "first_different"),
    [
        (RequestIdentity(adapter=b"a"), 0),
        (RequestIdentity(cache_salt="a"), 0),
        (RequestIdentity(media=(image("a", 0, 1),)), 0),
        (RequestIdentity(media=(image("a", CHUNK - 1, CHUNK + 1),)), 0),
        (RequestIdentity(media=(image("a", CHUNK, CHUNK + 1),)), 1),
        (RequestIdentity(media=(image("a", 3 * CHUNK + 1, 3 * CHUNK + 2),)), 3),
        (RequestIdentity(media=(image("a", 5 * CHUNK, 5 * CHUNK + 1),)), 5),
        (RequestIdentity(embeds=(b"row",)), 0),
        (RequestIdentity(embeds=(b"",) * (2 * CHUNK + 1) + (b"row",)), 2),
        (RequestIdentity(embeds=(b"",) * len(TOKENS)), 5),
        (RequestIdentity(embeds=()), 5),
        (PLAIN, 5),
    ],
)
def test_what_shapes_the_kv_changes_the_hashes_from_there_on(
    identity: RequestIdentity, first_different: int
) -> None:
    assert common(hashes(TOKENS), hashes(TOKENS, identity)) == first_different


ITEM = image("a", CHUNK + 1, 2 * CHUNK + 1)


@pytest.mark.parametrize(
    ("item", "first_different"),
    [
        (replace(ITEM, identifier="b"), 1),
        (replace(ITEM, releases="vllm 0.33.0"), 1),
        (replace(ITEM, start=ITEM.start + 1), 1),
        (replace(ITEM, start=ITEM.start - 1), 1),
        (replace(ITEM, start=0), 0),
        (replace(ITEM, stop=ITEM.stop + 1), 1),
        (image("a", ITEM.start + CHUNK, ITEM.stop + CHUNK), 1),
    ],
)
def test_media_count_by_name_place_length_and_releases(
    item: MediaItem, first_different: int
) -> None:
    one = hashes(TOKENS, RequestIdentity(media=(ITEM,)))
    assert common(one, hashes(TOKENS, RequestIdentity(media=(item,)))) == first_different


def test_two_adapters_and_two_salts_differ() -> None:
    identities = [
        RequestIdentity(adapter, salt) for adapter in (b"", b"a", b"b") for salt in ("", "a", "b")
    ]
    assert len({hashes(TOKENS, identity)[0] for identity in identities}) == len(identities)


def test_the_chunk_size_changes_every_hash() -> None:
    assert not set(hashes(TOKENS, chunk_tokens=4)) & set(hashes(TOKENS, chunk_tokens=5))
    # The tokens and the parents of these two differ in nothing but where a chunk ends.
    assert hashes([0] * 4, chunk_tokens=4)[-1] != hashes([0] * 4, chunk_tokens=2)[-1]


def test_the_placeholder_under_an_embedding_does_not_count() -> None:
    identity = RequestIdentity(embeds=(b"", b"one", b"two"))
    assert hashes([5, 0, 0, 6], identity) == hashes([5, 7, 8, 6], identity)
    assert hashes([5, 7, 8, 6], identity) != hashes([4, 7, 8, 6], identity)
    assert hashes([5, 7, 8, 6], identity) != hashes([5, 7, 8, 0], identity)
    swapped = RequestIdentity(embeds=(b"", b"two", b"one"))
    assert hashes([5, 0, 0, 6], identity) != hashes([5, 0, 0, 6], swapped)
    assert hashes([5, 0, 0, 6], identity) != hashes([5, 0, 0, 6])


tokens_lists = st.lists(st.integers(0, 3), max_size=6 * CHUNK)


@given(tokens_lists, tokens_lists)
def test_prefixes_of_chunks_agree_as_far_as_the_tokens(one: list[int], other: list[int]) -> None:
    same = next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )
    assert common(hashes(one), hashes(other)) == same // CHUNK


@given(tokens_lists, st.lists(st.integers(0, 6 * CHUNK), max_size=5), st.integers(1, 6))
def test_extending_step_by_step_is_extending_at_once(
    tokens: list[int], stops: list[int], chunk_tokens: int
) -> None:
    chain = ChunkChain(chunk_tokens, FULL_IDENTITY)
    for stop in (*sorted(stops), len(tokens)):
        chain.extend(tokens[:stop])
    assert chain.hashes == hashes(tokens, FULL_IDENTITY, chunk_tokens)


class Growing(Sequence[int]):
    """A sequence that grows after each `len`, as if a thread appended to vLLM's token list."""

    def __init__(self, tokens: list[int], later: list[int]) -> None:
        self._tokens, self._later = list(tokens), list(later)

    def __len__(self) -> int:
        length = len(self._tokens)
        if self._later:
            self._tokens.append(self._later.pop(0))
        return length

    def __getitem__(self, index: Any) -> Any:
        return self._tokens[index]


@given(tokens_lists, tokens_lists, st.sampled_from((1, CHUNK, 2 * CHUNK, 100)))
def test_a_sequence_that_grows_is_hashed_in_pieces_like_a_list(
    tokens: list[int], later: list[int], piece: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vllm_kvpool.identity.chunk_hash.PIECE_TOKENS", piece)
        chain = ChunkChain(CHUNK, FULL_IDENTITY)
        chain.extend(Growing(tokens, later))
    assert chain.hashes == hashes(tokens, FULL_IDENTITY)


class GrowingList(list[int]):
    """A list to which another thread adds a chunk after every look at its length."""

    def __len__(self) -> int:
        length = super().__len__()
        super().extend(range(CHUNK))
        return length


def test_what_a_list_has_got_meanwhile_waits_for_the_next_time() -> None:
    chain = ChunkChain(CHUNK, FULL_IDENTITY)
    chain.extend(GrowingList(TOKENS))
    assert chain.hashes == hashes(TOKENS, FULL_IDENTITY)


# Short fields over few letters, so that fields that run into one another would collide.
short_bytes = st.text("am", max_size=3).map(str.encode)
media = st.builds(
    lambda name, start, length, releases: image(name, start, start + length, releases),
    st.text("em", max_size=2),
    st.integers(0, CHUNK - 1),
    st.integers(1, 2),
    st.text("em", max_size=2),
)
identities = st.builds(
    RequestIdentity,
    short_bytes,
    st.text("am", max_size=3),
    st.lists(media, max_size=2).map(tuple),
    st.lists(short_bytes, min_size=CHUNK, max_size=CHUNK).map(tuple),
)
chunks = st.lists(st.integers(0, 2), min_size=CHUNK, max_size=CHUNK)


@given(identities, identities, chunks, chunks)
def test_no_two_inputs_encode_alike(
    one: RequestIdentity, other: RequestIdentity, one_tokens: list[int], other_tokens: list[int]
) -> None:
    def seen(identity: RequestIdentity, tokens: list[int]) -> object:
        assert identity.embeds is not None
        rows = identity.embeds
        return identity, [0 if row else token for row, token in zip(rows, tokens, strict=True)]

    alike = seen(one, one_tokens) == seen(other, other_tokens)
    assert (hashes(one_tokens, one) == hashes(other_tokens, other)) == alike


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (RequestIdentity(b"ab", "c"), RequestIdentity(b"a", "bc")),
        (RequestIdentity(b"ab"), RequestIdentity(cache_salt="ab")),
        (
            RequestIdentity(media=(image("ab", 0, 1, "c"),)),
            RequestIdentity(media=(image("a", 0, 1, "bc"),)),
        ),
        (
            RequestIdentity(media=(image("a", 0, 1), image("b", 0, 1))),
            RequestIdentity(media=(image("ab", 0, 1),)),
        ),
        (
            RequestIdentity(embeds=(b"a", b"b")),
            RequestIdentity(embeds=(b"ab", b"")),
        ),
        (
            RequestIdentity(embeds=(b"x", b"")),
            RequestIdentity(embeds=(b"", b"x")),
        ),
    ],
)
def test_fields_do_not_run_into_one_another(one: RequestIdentity, other: RequestIdentity) -> None:
    assert not set(hashes([0] * CHUNK, one)) & set(hashes([0] * CHUNK, other))


def test_prompt_end_is_hashed_with_the_number_of_its_tokens() -> None:
    """No tokens with what follows them in the encoding can be taken for a whole chunk."""
    chain = ChunkChain(CHUNK, RequestIdentity())
    tokens = list(range(CHUNK + 2))
    chain.extend(tokens)
    encoded = b"".join(token.to_bytes(4, "little") for token in tokens[CHUNK:])
    link = chain.hashes[0] + len(encoded).to_bytes(8, "little") + encoded
    assert chain.end(tokens) == hashlib.sha256(link).digest()[:HASH_BYTES]
    assert chain.topic(tokens) == chain.end(tokens)
    assert chain.topic(tokens[:CHUNK]) == chain.hashes[0]
    assert chain.topic([]) is None


def end_of(tokens: list[int], identity: RequestIdentity) -> bytes | None:
    chain = ChunkChain(CHUNK, identity)
    chain.extend(tokens)
    return chain.end(tokens)


@given(identities, identities, st.lists(st.integers(0, 2), max_size=3 * CHUNK), st.integers(0, 9))
def test_prompt_end_has_the_hash_of_no_other_tokens(
    one: RequestIdentity, other: RequestIdentity, tokens: list[int], change: int
) -> None:
    """A prompt end's hash has the inputs of a whole chunk's hash, and the number of its tokens."""
    end = end_of(tokens, one)
    assert (end is None) == (len(tokens) % CHUNK == 0)
    if end is None:
        return
    assert end not in hashes([*tokens, *[0] * CHUNK], one)
    assert end != end_of(tokens[:-1], one)
    place = change % len(tokens)
    changed = [*tokens[:place], tokens[place] + 3, *tokens[place + 1 :]]
    assert one.embeds is not None
    is_placeholder = place < CHUNK and bool(one.embeds[place])
    assert (end == end_of(changed, one)) == is_placeholder
    if (one.adapter, one.cache_salt) != (other.adapter, other.cache_salt):
        assert end != end_of(tokens, other)


def test_a_token_that_is_no_32_bit_number_is_refused() -> None:
    with pytest.raises(OverflowError):
        hashes([-1] * CHUNK)


def test_a_tenant_is_known_by_a_digest_of_its_salt() -> None:
    one, other = tenant_of("a salt"), tenant_of("another")
    assert one != other
    assert re.fullmatch("[0-9a-f]{12}", one)
    assert tenant_of("") == ""
    assert tenant_of("\udc80") not in (one, other)
