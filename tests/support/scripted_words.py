"""The language of the scripted engine: its tokens, their text, and the continuation of a prompt.

A token is the end of the text, a byte, or a word of two to five characters. A word is at most four
lower case letters, with or without a leading space. Every token has a distinct text; only the end
of the text has none. Encoding the text of words and whole characters gives the same tokens again.

The next token follows from a hash of the model's name and all earlier tokens. A prompt followed by
a part of its continuation is therefore continued in the same way. Some tokens are bytes of longer
characters. Results are the same in every process.
"""

import re
import struct
from collections.abc import Sequence
from functools import lru_cache

import xxhash

EOS_ID = 0
_FIRST_BYTE = 1
_FIRST_WORD = _FIRST_BYTE + 256
_LETTERS = 26
_MOST_LETTERS = 4
_PIECE = re.compile(rb" ?[a-z]{1,4}|.", re.DOTALL)
_UNKNOWN = "\ufffd"  # text of an incomplete character
_LONGEST_CHAR = 4  # bytes
_ODDS = 1 << 16
_CACHED_WORDS = 1 << 16


def _kinds() -> list[tuple[int, bool, int]]:
    """Return (first id, has a space, letters) of each kind of word. A single letter is a byte."""
    kinds, first = [], _FIRST_WORD
    for space, fewest in ((False, 2), (True, 1)):
        for letters in range(fewest, _MOST_LETTERS + 1):
            kinds.append((first, space, letters))
            first += _LETTERS**letters
    return [*kinds, (first, False, 0)]


_KINDS = _kinds()
_FIRST_OF = {(space, letters): first for first, space, letters in _KINDS}
VOCAB_SIZE = _KINDS[-1][0]


@lru_cache(_CACHED_WORDS)
def _id_of(piece: bytes) -> int:
    if len(piece) == 1:
        return _FIRST_BYTE + piece[0]
    letters = piece.lstrip(b" ")
    value = 0
    for letter in letters:
        value = value * _LETTERS + letter - ord("a")
    return _FIRST_OF[len(letters) < len(piece), len(letters)] + value


@lru_cache(_CACHED_WORDS)
def token_bytes(token_id: int) -> bytes:
    """Return a token's text, possibly a part of a character. ValueError for an unknown id."""
    if not 0 <= token_id < VOCAB_SIZE:
        raise ValueError(f"Token id {token_id} is out of vocabulary")
    if token_id < _FIRST_WORD:
        return b"" if token_id == EOS_ID else bytes([token_id - _FIRST_BYTE])
    first, space, letters = next(kind for kind in reversed(_KINDS) if kind[0] <= token_id)
    value, word = token_id - first, b""
    for _ in range(letters):
        value, letter = divmod(value, _LETTERS)
        word = bytes([ord("a") + letter]) + word
    return b" " + word if space else word


def encode(text: str) -> list[int]:
    """Return the tokens of a text."""
    return [_id_of(piece) for piece in _PIECE.findall(text.encode(errors="surrogatepass"))]


def decode(token_ids: Sequence[int]) -> str:
    """Return the text of tokens, with replacement characters for invalid UTF-8."""
    return b"".join(map(token_bytes, token_ids)).decode(errors="replace")


def _last_bytes(token_ids: Sequence[int]) -> bytes:
    """Return the end of a text, including its whole last character. Tokens may have no text."""
    end = b""
    for token_id in reversed(token_ids):
        end = token_bytes(token_id) + end
        if len(end) >= _LONGEST_CHAR:
            break
    return end


def _spoken() -> tuple[int, ...]:
    """Return the words that are generated: a space and two syllables of consonant and vowel."""
    syllables = [c + v for c in "bdfgklmnprstvz" for v in "aeiou"]
    return tuple(_id_of(f" {one}{two}".encode()) for one in syllables for two in syllables)


_SPOKEN = _spoken()
# Bytes that may follow the first bytes of a character: accented letters, arrows, faces.
_REST = {
    b"\xc3": range(0xA0, 0xC0),
    b"\xe2": range(0x86, 0x87),
    b"\xe2\x86": range(0x90, 0x9A),
    b"\xf0": range(0x9F, 0xA0),
    b"\xf0\x9f": range(0x98, 0x99),
    b"\xf0\x9f\x98": range(0x80, 0x90),
}
_STARTS = tuple(first for first in _REST if len(first) == 1)


class Continuation:
    """The tokens that follow a prompt, one after the other.

    Greedy without a `seed`. With a seed, the tokens also depend on the prompt's length. An engine
    that gets the prompt and half an answer therefore draws different tokens for the rest.
    """

    __slots__ = ("_eos", "_hash", "_partial", "_wide")

    def __init__(
        self,
        model: str,
        prompt: Sequence[int],
        *,
        eos_probability: float,
        wide_probability: float,
        seed: int | None = None,
    ) -> None:
        drawn = "" if seed is None else f"{seed} {len(prompt)}"
        self._hash = xxhash.xxh64(f"{model}\0{drawn}\0".encode())
        self._hash.update(struct.pack(f"<{len(prompt)}I", *prompt))
        self._eos = round(eos_probability * _ODDS)
        self._wide = self._eos + round(wide_probability * _ODDS)
        end = _last_bytes(prompt)
        self._partial = next((p for p in _REST if end.endswith(p)), b"")

    def next(self) -> int:
        """Return the next token."""
        drawn = self._hash.intdigest()
        odds, choice = drawn % _ODDS, drawn // _ODDS
        if self._partial:
            token_id = self._continue_char(choice)
        elif odds < self._eos:
            token_id = EOS_ID
        elif odds < self._wide:
            self._partial = _STARTS[choice % len(_STARTS)]
            token_id = _FIRST_BYTE + self._partial[0]
        else:
            token_id = _SPOKEN[choice % len(_SPOKEN)]
        self._hash.update(token_id.to_bytes(4, "little"))
        return token_id

    def _continue_char(self, choice: int) -> int:
        options = _REST[self._partial]
        byte = options[choice % len(options)]
        so_far = self._partial + bytes([byte])
        self._partial = so_far if so_far in _REST else b""
        return _FIRST_BYTE + byte


@lru_cache(_CACHED_WORDS)
def _whole_text(token_id: int) -> str | None:
    """Return the text of a token that is whole characters, or None if bytes are missing."""
    try:
        return token_bytes(token_id).decode()
    except UnicodeDecodeError:
        return None


class Detokenizer:
    """Text of a growing answer, as vLLM's fast detokenizer gives it.

    Incomplete characters are withheld. With stop strings, so are the last characters that may begin
    one. If the prompt ends within a character, the text that completes it includes the text of the
    whole prompt. The decode stream of `tokenizers` (0.23) does the same: its prefix is then empty.
    """

    __slots__ = ("_bytes", "_given", "_hold_back", "_includes_stop", "_stop", "_text")

    def __init__(
        self, prompt: Sequence[int], stop: Sequence[str] = (), include_stop: bool = False
    ) -> None:
        self._bytes = b""
        if _last_bytes(prompt).decode(errors="replace").endswith(_UNKNOWN):
            self._bytes = b"".join(map(token_bytes, prompt))
        self._stop = tuple(stop)
        self._includes_stop = include_stop
        excluded = () if include_stop else self._stop
        self._hold_back = max((len(text) - 1 for text in excluded), default=0)
        self._text = ""
        self._given = 0

    def add(self, token_id: int, look_for_stop: bool = True) -> str | None:
        """Add a token. Return the stop string that it completes, if any; the text then ends."""
        new = None if self._bytes else _whole_text(token_id)
        if new is None:
            self._bytes += token_bytes(token_id)
            new = self._bytes.decode(errors="replace")
            if new.endswith(_UNKNOWN):
                new = ""
            else:
                self._bytes = b""
        self._text += new
        return self._find_stop(len(new)) if self._stop and look_for_stop and new else None

    def _find_stop(self, num_new: int) -> str | None:
        found: list[tuple[int, int, str]] = []
        for order, stop in enumerate(self._stop):
            start = self._text.find(stop, max(0, len(self._text) - num_new - len(stop) + 1))
            if start >= 0:
                found.append((start + len(stop), order, stop))
        if not found:
            return None
        end, _, stop = min(found)
        self._text = self._text[: end if self._includes_stop else end - len(stop)]
        return stop

    def take(self, finished: bool) -> str:
        """Return the text since the last call; all of it once the answer is finished."""
        end = len(self._text) - (0 if finished else self._hold_back)
        if end <= self._given:
            return ""
        text = self._text[self._given : end]
        if self._stop:
            self._given = end
        else:
            self._text = ""  # not needed again
        return text
