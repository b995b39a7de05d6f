"""The chain of chunk hashes: the names of a request's tokens and all else that shapes their KV.

Our own chain, with a fixed root and a portable encoding, so that it does not depend on a hash
seed, on vLLM's hash algorithm, on the block size or on the release. Link i digests link i-1 and
everything that enters the KV of chunk i: token ids, prompt embeddings, the multimodal items that
overlap the chunk and where. What holds for a whole request (LoRA adapter, cache salt) is in the
root. Every field is length-prefixed, so no two inputs encode alike. Pure; a chain belongs to one
thread at a time.
"""

import hashlib
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

HASH_BYTES = 20
SCHEME = b"kvpool-chain-1"


@dataclass(frozen=True, slots=True)
class MediaItem:
    """A multimodal item: a content identifier and the half-open token range it fills."""

    identifier: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class EmbedRows:
    """Prompt embeddings: `digests[i]` for token i, empty where the token id counts instead."""

    digests: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class RequestIdentity:
    """All that shapes a request's KV besides its token ids. `adapter` is a content digest."""

    adapter: bytes = b""
    cache_salt: str = ""
    media: tuple[MediaItem, ...] = ()
    embeds: EmbedRows | None = None


def _field(data: bytes) -> bytes:
    return len(data).to_bytes(8, "little") + data


def _tokens_le(tokens: Sequence[int]) -> bytes:
    encoded = array("I", tokens)
    if sys.byteorder == "big":
        encoded.byteswap()
    return encoded.tobytes()


class ChunkChain:
    """The hashes of a request's full chunks, extended as tokens become known."""

    __slots__ = ("_chunk_tokens", "_identity", "_root", "hashes")

    def __init__(self, chunk_tokens: int, identity: RequestIdentity) -> None:
        assert chunk_tokens > 0
        self._chunk_tokens = chunk_tokens
        self._identity = identity
        root = b"".join(
            (
                _field(SCHEME),
                chunk_tokens.to_bytes(4, "little"),
                _field(identity.adapter),
                _field(identity.cache_salt.encode()),
            )
        )
        self._root = hashlib.blake2b(root, digest_size=HASH_BYTES).digest()
        self.hashes: list[bytes] = []

    def __len__(self) -> int:
        return len(self.hashes)

    def extend(self, tokens: Sequence[int]) -> None:
        """Hash the chunks that `tokens`, all tokens of the request so far, newly fill."""
        size = self._chunk_tokens
        for index in range(len(self.hashes), len(tokens) // size):
            start = index * size
            self.hashes.append(self._link(start, tokens[start : start + size]))

    def _link(self, start: int, tokens: Sequence[int]) -> bytes:
        parent = self.hashes[-1] if self.hashes else self._root
        digest = hashlib.blake2b(parent, digest_size=HASH_BYTES)
        embeds = self._identity.embeds
        rows = embeds.digests[start : start + len(tokens)] if embeds else ()
        if any(rows):
            # Where an embedding stands in, the token id is a placeholder whose value differs
            # between releases; it counts as zero.
            tokens = [0 if row else token for token, row in zip(tokens, rows, strict=False)] + list(
                tokens[len(rows) :]
            )
        digest.update(_field(_tokens_le(tokens)))
        for offset, row in enumerate(rows):
            if row:
                digest.update(b"embed" + offset.to_bytes(4, "little") + _field(row))
        for item in self._identity.media:
            if item.start < start + len(tokens) and start < item.stop:
                # Signed: an item may have begun in an earlier chunk.
                place = (item.start - start).to_bytes(8, "little", signed=True)
                length = (item.stop - item.start).to_bytes(8, "little")
                digest.update(b"media" + place + length + _field(item.identifier.encode()))
        return digest.digest()
