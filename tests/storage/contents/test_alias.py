"""The bytes of an alias."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_kvpool.identity.keys import alias_prefix, chunk_id_of_key, key_digest, make_namespace
from vllm_kvpool.storage.contents.alias import (
    MAX_ALIASES,
    Alias,
    alias_bytes,
    alias_step,
    read_alias,
    write_alias,
)
from vllm_kvpool.storage.contents.cell_format import HEADER_BYTES, verify

CHUNK = 8
NAMESPACE = make_namespace("model", "0" * 12)
KEY = alias_prefix(NAMESPACE) + "ab" * 20
IDS = st.integers(0, (1 << 32) - 1)


@given(st.binary(min_size=20, max_size=20), st.lists(IDS, min_size=1, max_size=CHUNK))
def test_alias_is_read_as_it_was_written(chunk_hash: bytes, tokens: list[int]) -> None:
    cell = bytearray(alias_bytes(CHUNK))
    write_alias(memoryview(cell), KEY, Alias(chunk_hash, tokens))
    assert verify(memoryview(cell), key_digest(KEY), checksum=True) is None
    alias = read_alias(bytes(cell))
    assert alias is not None
    assert (alias.chunk_hash, list(alias.tokens)) == (chunk_hash, tokens)


@pytest.mark.parametrize("count", [0, CHUNK + 1, (1 << 32) - 1])
def test_impossible_number_of_tokens_is_no_alias(count: int) -> None:
    cell = bytearray(alias_bytes(CHUNK))
    write_alias(memoryview(cell), KEY, Alias(b"h" * 20, [1]))
    cell[HEADER_BYTES + 20 : HEADER_BYTES + 24] = count.to_bytes(4, "little")
    assert read_alias(bytes(cell)) is None


@pytest.mark.parametrize(
    ("alias_tokens", "chunk_tokens", "step"),
    [
        (0, 256, 0),
        (64, 256, 64),
        (100, 256, 100),
        (255, 256, 255),
        (256, 256, 0),
        (1000, 256, 0),
        (1, 256, 32),
        (1, 16_384, 2048),
        (1, 17, 3),
    ],
)
def test_step_gives_a_chunk_a_bounded_number_of_aliases(
    alias_tokens: int, chunk_tokens: int, step: int
) -> None:
    assert alias_step(alias_tokens, chunk_tokens) == step
    if step:
        assert 1 <= len(range(step, chunk_tokens, step)) <= MAX_ALIASES


def test_alias_is_of_another_chunk_than_the_cells_of_its_hash() -> None:
    """A prompt's end may have the hash of an alias: a store must not take them for one chunk."""
    end = f"{NAMESPACE}@dcp0of1@head:0@layers:0-1@" + "ab" * 20
    assert chunk_id_of_key(KEY) != chunk_id_of_key(end)
