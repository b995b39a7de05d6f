"""An alias: an object that leads from a prompt that ends inside a chunk to a stored chunk (pure).

A cell's first n rows are right for every prompt that shares the first n tokens of the chunk. The
chunk's hash, however, names all tokens of the chunk. So aliases lie under the hash of the prompt at
every `step` tokens of the chunk. Readers hash the tokens in an alias themselves, so no alias needs
trust. It may be out of date: `exists` of the chunk's cells decides.

An object of `alias_bytes`: a cell's header and, little endian:
    chunk hash 20 | number of tokens u32 (fewer than a chunk's in an end) | token ids u32 | zeros
"""

import struct
from collections.abc import Sequence
from typing import NamedTuple

from vllm_kvpool.identity.chunk_hash import HASH_BYTES, TOKEN_BYTES, tokens_le, tokens_of_le
from vllm_kvpool.identity.keys import key_digest
from vllm_kvpool.storage.contents.cell_format import HEADER_BYTES, write_header

MAX_ALIASES = 7  # of a chunk

_FIELDS = struct.Struct(f"<{HASH_BYTES}sI")


class Alias(NamedTuple):
    """A stored chunk: its hash and its token ids."""

    chunk_hash: bytes
    tokens: Sequence[int]


def alias_step(alias_tokens: int, chunk_tokens: int) -> int:
    """Return the tokens between two aliases of a chunk; 0 if a chunk has none."""
    step = max(alias_tokens, -(-chunk_tokens // (MAX_ALIASES + 1)))
    return step if alias_tokens > 0 and step < chunk_tokens else 0


def alias_bytes(chunk_tokens: int) -> int:
    """Return the size of every alias of chunks of so many tokens."""
    return HEADER_BYTES + _FIELDS.size + chunk_tokens * TOKEN_BYTES


def write_alias(cell: memoryview, key: str, alias: Alias) -> None:
    """Write an alias of `alias_bytes` with its header."""
    content = _FIELDS.pack(alias.chunk_hash, len(alias.tokens)) + tokens_le(alias.tokens)
    payload = cell[HEADER_BYTES:]
    payload[:] = content.ljust(payload.nbytes, b"\0")
    write_header(cell, key_digest(key))


def read_alias(cell: bytes) -> Alias | None:
    """Read an alias whose header was checked; None if its content cannot be one."""
    chunk_hash, count = _FIELDS.unpack_from(cell, HEADER_BYTES)
    ids = cell[HEADER_BYTES + _FIELDS.size :]
    if not 0 < count <= len(ids) // TOKEN_BYTES:
        return None
    return Alias(chunk_hash, tokens_of_le(ids[: count * TOKEN_BYTES]))
