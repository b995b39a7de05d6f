"""The pool of the scripted engines: which prefixes are stored, by the hashes of their chunks.

`ScriptedPool` is one for the engines of a process, `DirectoryPool` for those of several: one empty
file a chunk. Nothing is ever evicted. One thread at a time.
"""

import hashlib
import struct
from collections.abc import Sequence
from pathlib import Path

HASH_BYTES = 16


class ChunkChain:
    """The names of a sequence's chunks, each of them of all tokens up to its end."""

    def __init__(self, model: str, salt: str, chunk_tokens: int) -> None:
        self._chunk_tokens = chunk_tokens
        self._last = self._digest(model.encode() + b"\0" + salt.encode(errors="surrogatepass"))
        self._hashes: list[bytes] = []

    @staticmethod
    def _digest(data: bytes) -> bytes:
        return hashlib.blake2b(data, digest_size=HASH_BYTES).digest()

    def hashes(self, tokens: Sequence[int], num_tokens: int) -> list[bytes]:
        """The names of the whole chunks of the first `num_tokens`, of which none ever changes."""
        size = self._chunk_tokens
        count = num_tokens // size
        for start in range(len(self._hashes) * size, count * size, size):
            chunk = struct.pack(f"<{size}I", *tokens[start : start + size])
            self._last = self._digest(self._last + chunk)
            self._hashes.append(self._last)
        return self._hashes[:count]


class ScriptedPool:
    """A set of chunks. While it is not `up` nothing is found and nothing saved."""

    def __init__(self) -> None:
        self.up = True
        self._stored: set[bytes] = set()

    def is_up(self) -> bool:
        """Whether it answers."""
        return self.up

    def count(self, hashes: Sequence[bytes]) -> int:
        """How many of the hashes are stored before the first that is not."""
        if not self.is_up():
            return 0
        for number, chunk in enumerate(hashes):
            if not self._has(chunk):
                return number
        return len(hashes)

    def put(self, hashes: Sequence[bytes]) -> int:
        """Store chunks; how many were taken."""
        if not self.is_up():
            return 0
        for chunk in hashes:
            self._add(chunk)
        return len(hashes)

    def clear(self) -> None:
        """Forget all."""
        self._stored.clear()

    def _has(self, chunk: bytes) -> bool:
        return chunk in self._stored

    def _add(self, chunk: bytes) -> None:
        self._stored.add(chunk)


class DirectoryPool(ScriptedPool):
    """The same in a directory, where a file `down` takes it down for all processes."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    def is_up(self) -> bool:
        return self.up and not (self._directory / "down").exists()

    def clear(self) -> None:
        for path in self._directory.iterdir():
            path.unlink(missing_ok=True)

    def _has(self, chunk: bytes) -> bool:
        return (self._directory / chunk.hex()).exists()

    def _add(self, chunk: bytes) -> None:
        (self._directory / chunk.hex()).touch()
