"""Expected KV of a prompt, equal in every process (pure).

A row is a function of the tokens up to it, its position, its layer and its head, as in a model. No
two rows are equal, so a reader can tell whether a loaded row is the right one. Prompts are
numbered: `FAMILY` of them begin with the same chunks.

Legend: L layers, H heads, T tokens, W words of 8 bytes in a row.
"""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]

LAYERS, LAYER_SPAN, HEADS, ROW_WORDS = 8, 4, 4, 32
ROW_BYTES = ROW_WORDS * 8
CHUNK = 64
FAMILY = 4
SHARED_CHUNKS = 3
MOST_OWN_CHUNKS = 5
MOST_TOKENS = (SHARED_CHUNKS + MOST_OWN_CHUNKS + 1) * CHUNK
VOCABULARY = 50_000
CACHED_PROMPTS = 8  # of up to 4.5 MiB

_GOLDEN = 0x9E3779B97F4A7C15


def prompt(number: int) -> list[int]:
    """The tokens of a prompt; the last chunk is not full."""
    family = np.random.default_rng([1, number // FAMILY])
    own = np.random.default_rng([2, number])
    own_tokens = int(own.integers(1, MOST_OWN_CHUNKS + 1)) * CHUNK + int(own.integers(1, CHUNK))
    return [
        *family.integers(VOCABULARY, size=SHARED_CHUNKS * CHUNK).tolist(),
        *own.integers(VOCABULARY, size=own_tokens).tolist(),
    ]


@lru_cache(CACHED_PROMPTS)
def kv_lhtw(number: int) -> Words:
    """Return all rows of a prompt as a read-only array."""
    tokens = np.array(prompt(number), np.uint64)
    places = np.arange(len(tokens), dtype=np.uint64)
    so_far_t = np.cumsum(_mixed(tokens | places << np.uint64(32)), dtype=np.uint64)
    parts = np.arange(LAYERS * HEADS, dtype=np.uint64).reshape(LAYERS, HEADS, 1, 1)
    words = np.arange(ROW_WORDS, dtype=np.uint64)
    kv = _mixed(so_far_t[:, None] + (parts << np.uint64(40)) + (words << np.uint64(8)))
    kv.flags.writeable = False
    return kv


def _mixed(values: Words) -> Words:
    """Splitmix64: every bit of the result depends on every bit of the value."""
    values = values * np.uint64(_GOLDEN)
    values ^= values >> np.uint64(30)
    values *= np.uint64(0xBF58476D1CE4E5B9)
    values ^= values >> np.uint64(27)
    values *= np.uint64(0x94D049BB133111EB)
    values ^= values >> np.uint64(31)
    return values
