"""What the cells of a prompt are called, told by an engine to who cannot know (values).

An engine answers it to a request that asks (`name_cells`), the router remembers it, and a process
beside an engine that still loads brings those cells nearer. The key of a cell is its prefix and the
hash of its chunk (`keys.py: key_with_prefix`).
"""

from typing import Annotated

import msgspec

MAX_NAMED_CHUNKS = 2048
"""Of one prompt; what comes behind them is not named."""
MAX_KEY_PREFIXES = 4096
MAX_KEY_PREFIX_CHARS = 512
MAX_HASH_CHARS = 128


class KeyPrefix(msgspec.Struct, frozen=True, array_like=True):
    """What the keys of one head (or rank) and one span of layers have in common."""

    key_prefix: Annotated[str, msgspec.Meta(max_length=MAX_KEY_PREFIX_CHARS)]
    nbytes: int
    """Of each of those cells, header included."""


class ChunkNames(msgspec.Struct, frozen=True):
    """The cells of the first chunks of a prompt: every key prefix with every chunk."""

    key_prefixes: Annotated[tuple[KeyPrefix, ...], msgspec.Meta(max_length=MAX_KEY_PREFIXES)] = (
        msgspec.field(name="stems")
    )
    chunks: Annotated[
        tuple[Annotated[str, msgspec.Meta(max_length=MAX_HASH_CHARS)], ...],
        msgspec.Meta(max_length=MAX_NAMED_CHUNKS),
    ]
    """Their hashes in hexadecimal, from the start of the prompt on."""


class Brought(msgspec.Struct, frozen=True, kw_only=True):
    """What became of some cells that were to be brought nearer."""

    brought: int = 0
    nbytes: int = 0
    """Of those, and of what came damaged: what has crossed the network."""
    near: int = 0
    """Were there already."""
    missing: int = 0
    """No far tier has them whole, or none answers."""
    bad: int = 0
    """Came with other bytes than they were stored with, and were dropped."""
    unkept: int = 0
    """The near tier did not take them."""

    def __add__(self, other: "Brought") -> "Brought":
        names = self.__struct_fields__
        return Brought(**{name: getattr(self, name) + getattr(other, name) for name in names})
