"""The names of a prompt's cells, as an engine sends them to others (values).

An engine answers them to a request with `name_cells`, and `kvpool prefetch` fetches those cells.
A key is a prefix and the hash of a chunk (`keys.py: key_with_prefix`).
"""

from typing import Annotated

import msgspec

MAX_NAMED_CHUNKS = 2048
"""Of one prompt; later chunks are not named."""
MAX_KEY_PREFIXES = 4096
MAX_KEY_PREFIX_CHARS = 512
MAX_HASH_CHARS = 128


class KeyPrefix(msgspec.Struct, frozen=True, array_like=True):
    """The common beginning of the keys of one head (or rank) and one span of layers."""

    key_prefix: Annotated[str, msgspec.Meta(max_length=MAX_KEY_PREFIX_CHARS)]
    nbytes: int
    """Of each of those cells, header included."""


class ChunkNames(msgspec.Struct, frozen=True):
    """The cells of the first chunks of a prompt: each key prefix with each chunk."""

    key_prefixes: Annotated[tuple[KeyPrefix, ...], msgspec.Meta(max_length=MAX_KEY_PREFIXES)]
    chunks: Annotated[
        tuple[Annotated[str, msgspec.Meta(max_length=MAX_HASH_CHARS)], ...],
        msgspec.Meta(max_length=MAX_NAMED_CHUNKS),
    ]
    """Their hashes in hexadecimal, from the start of the prompt on."""


class Brought(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a prefetch, in cells."""

    brought: int = 0
    nbytes: int = 0
    """Bytes that crossed the network, damaged cells included."""
    near: int = 0
    """Were in the near tier already."""
    missing: int = 0
    """No far tier has them, or none answers."""
    bad: int = 0
    """Were damaged, and dropped."""
    unkept: int = 0
    """The near tier did not take them."""

    def __add__(self, other: "Brought") -> "Brought":
        names = self.__struct_fields__
        return Brought(**{name: getattr(self, name) + getattr(other, name) for name in names})
