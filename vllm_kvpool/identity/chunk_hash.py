"""The chain of chunk hashes: names a request's tokens and all else that shapes their KV (pure).

No hash seed, hash algorithm or block size counts, and a release of vLLM for media alone. Link i
digests link i-1 and everything that enters the KV of chunk i: token ids, prompt embeddings, and the
media that overlap it, with their places and the releases that compute their rows. The LoRA adapter
and the cache salt are in the root. Fields are length-prefixed, so no two inputs encode alike: the
hash of a prompt's end, a chunk of fewer tokens, is never the hash of a whole chunk. A digest is
SHA-256, cut to `HASH_BYTES`. A chain belongs to one thread at a time.
"""

import hashlib
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

HASH_BYTES = 20
TENANT_BYTES = 6  # of a salt's digest, which names a tenant
TOKEN_BYTES = 4
SCHEME = b"kvpool-chain-2"
# Tokens that are copied and encoded at once: the copy stays in the core's cache.
PIECE_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class MediaItem:
    """A multimodal item: a content identifier and the half-open token range it fills.

    `releases` names the software that computes the rows of this range from the content.
    """

    identifier: str
    start: int
    stop: int
    releases: str


@dataclass(frozen=True, slots=True)
class RequestIdentity:
    """The inputs of a request's KV besides its token ids. `adapter` is a content digest."""

    adapter: bytes = b""
    cache_salt: str = ""
    media: tuple[MediaItem, ...] = ()
    embeds: tuple[bytes, ...] | None = None
    """Digests of prompt embeddings, one a token; empty where the token id counts instead."""


def _field(data: bytes) -> bytes:
    return len(data).to_bytes(8, "little") + data


def _encoded(text: str) -> bytes:
    """Encode as UTF-8; a request may hold half a surrogate pair."""
    return text.encode(errors="surrogatepass")


def tokens_le(tokens: Sequence[int]) -> memoryview:
    """Return token ids as u32, little endian, `TOKEN_BYTES` each."""
    encoded = array("I", tokens)
    if sys.byteorder == "big":
        encoded.byteswap()
    return memoryview(encoded).cast("B")


def tokens_of_le(encoded: bytes) -> Sequence[int]:
    """Return the token ids that `tokens_le` has encoded."""
    tokens = array("I", encoded)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens


def tenant_of(cache_salt: str) -> str:
    """Return the tenant of a salt: a digest that does not show it; "" without one."""
    if not cache_salt:
        return ""
    salt = cache_salt.encode(errors="surrogatepass")
    return hashlib.blake2b(salt, digest_size=TENANT_BYTES, person=b"kvpool tenant").hexdigest()


class ChunkChain:
    """The hashes of a request's full chunks, extended as tokens become known."""

    __slots__ = ("_has_extras", "_identity", "_link", "_root", "chunk_tokens", "hashes")

    def __init__(self, chunk_tokens: int, identity: RequestIdentity) -> None:
        assert chunk_tokens > 0
        self.chunk_tokens = chunk_tokens
        self._identity = identity
        self._has_extras = bool(identity.media) or identity.embeds is not None
        root = b"".join(
            (
                _field(SCHEME),
                chunk_tokens.to_bytes(4, "little"),
                _field(identity.adapter),
                _field(_encoded(identity.cache_salt)),
            )
        )
        self._root = hashlib.sha256(root).digest()[:HASH_BYTES]
        self._link = hashlib.sha256()  # of nothing; copied for every link
        self.hashes: list[bytes] = []

    def __len__(self) -> int:
        return len(self.hashes)

    def extend(self, tokens: Sequence[int]) -> None:
        """Hash the chunks that are newly filled. `tokens`: all tokens of the request so far.

        Another thread may append to the sequence meanwhile.
        """
        size = self.chunk_tokens
        stop = len(tokens) // size
        if not self.hashes and isinstance(tokens, list):  # as prompts are: nothing to copy
            self._extend(0, stop, tokens)
            return
        piece = max(1, PIECE_TOKENS // size)
        for first in range(len(self.hashes), stop, piece):
            until = min(first + piece, stop)
            self._extend(first, until, tokens[first * size : until * size])

    def end(self, prompt: Sequence[int]) -> bytes | None:
        """Return the hash of the prompt's tokens behind its last whole chunk; None without any.

        Args:
            prompt: all tokens of the prompt; `extend` has hashed its whole chunks.
        """
        first = len(prompt) // self.chunk_tokens
        start = first * self.chunk_tokens
        if start == len(prompt):
            return None
        return self.hash_of_part(first, prompt[start:])

    def hash_of_part(self, first: int, tokens: Sequence[int]) -> bytes:
        """Return the hash of a prompt that ends inside a chunk, or with it.

        Any thread may call while `extend` adds later chunks.

        Args:
            first: whole chunks before it, which are hashed.
            tokens: the tokens behind them, at least one and at most a chunk.
        """
        start = first * self.chunk_tokens
        encoded = self._encode(start, tokens)
        link = self._link.copy()
        parent = self.hashes[first - 1] if first else self._root
        link.update(parent + len(encoded).to_bytes(8, "little"))
        link.update(encoded)
        if self._has_extras:
            link.update(self._extras(start, len(tokens)))
        return link.digest()[:HASH_BYTES]

    def has_extras(self, chunk: int) -> bool:
        """Return True if media or embeddings shape a chunk, besides its token ids."""
        size = self.chunk_tokens
        return self._has_extras and bool(self._extras(chunk * size, size))

    def topic(self, prompt: Sequence[int]) -> bytes | None:
        """Return a hash that stands for the whole prompt; None for an empty one.

        Prefill and decode name a hand-over by it. Args as for `end`.
        """
        first = len(prompt) // self.chunk_tokens
        return self.end(prompt) or (self.hashes[first - 1] if first else None)

    def _encode(self, start: int, tokens: Sequence[int]) -> memoryview:
        """Encode the tokens from token `start` of the request on."""
        embeds = self._identity.embeds
        if embeds is not None:
            # Where an embedding stands in, the token id is a placeholder whose value differs
            # between releases; it counts as zero.
            rows = embeds[start : start + len(tokens)]
            tokens = [0 if i < len(rows) and rows[i] else token for i, token in enumerate(tokens)]
        return tokens_le(tokens)

    def _extend(self, first: int, stop: int, new: Sequence[int]) -> None:
        """Hash chunks [first, stop); `new` are the tokens from the first one on."""
        size = self.chunk_tokens
        encoded = self._encode(first * size, new)
        chunk_bytes = size * TOKEN_BYTES
        length = chunk_bytes.to_bytes(8, "little")
        hashes, has_extras, begin = self.hashes, self._has_extras, self._link.copy
        parent = hashes[-1] if hashes else self._root
        for place in range(0, (stop - first) * chunk_bytes, chunk_bytes):
            link = begin()
            link.update(parent + length)
            link.update(encoded[place : place + chunk_bytes])
            if has_extras:
                link.update(self._extras(len(hashes) * size, size))
            parent = link.digest()[:HASH_BYTES]
            hashes.append(parent)

    def _extras(self, start: int, size: int) -> bytes:
        """Return the inputs of the KV of tokens [start, start + size) besides their ids."""
        parts = []
        embeds = self._identity.embeds
        for offset, row in enumerate(embeds[start : start + size] if embeds else ()):
            if row:
                parts.append(b"embed" + offset.to_bytes(4, "little") + _field(row))
        for item in self._identity.media:
            if item.start < start + size and start < item.stop:
                # Signed: an item may have begun in an earlier chunk.
                place = (item.start - start).to_bytes(8, "little", signed=True)
                span = (item.stop - item.start).to_bytes(8, "little")
                names = _field(_encoded(item.identifier)) + _field(_encoded(item.releases))
                parts.append(b"media" + place + span + names)
        return b"".join(parts)
