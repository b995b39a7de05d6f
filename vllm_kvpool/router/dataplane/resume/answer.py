"""An answer: its tokens, its text, and the points from which an engine can go on.

Characters are counted over all text delivered. A resume point is a number of tokens after which the
engine's detokenizer had given out all text but what it withholds for stop strings: another engine
that is given these tokens as prompt goes on exactly there. A chunk of one token that brings text
ends at one; so does any chunk whose next text begins with an ASCII character, if nothing is
withheld (a character that was waited for has several bytes). With stop strings vLLM withholds one
character less than the longest has, and the point stands that much further in the text. None lies
across a change of the kind of text, such as a chat's reasoning and its content.
"""

from array import array
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from vllm_kvpool.router.dataplane.resume.chunks import Piece

MAX_RESUME_POINTS = 512


class ResumePoint(NamedTuple):
    """After so many tokens, and characters of text delivered, another engine can go on exactly."""

    num_tokens: int
    num_chars: int


BEGINNING = ResumePoint(0, 0)


class Answer:
    """A client's answer so far. Owned by its `StreamResumer`."""

    def __init__(self, stops: Sequence[str], withholds: bool) -> None:
        self.prompt_ids = b""
        """The JSON of the prompt's, as the first engine has sent them: they are never decoded."""
        self.ids = array("i")
        """Tokens from engines that nothing has contradicted; the last may be undelivered."""
        self.ends = array("q")
        """Offset of each token's end in the text, as `text_offset` counts; empty if unknown."""
        self.num_delivered = 0
        """Tokens whose chunk has been delivered."""
        self.num_chars = 0
        self.num_echoed = 0
        """Characters at the beginning that are of the prompt."""
        self.has_ids = True
        """True if all tokens so far are in `ids`."""
        self.has_tool_calls = False
        self.num_reasoning_tokens = 0
        """Tokens of chunks that had reasoning."""
        self.is_parsed = False
        """True if the engine has parsed the answer for more than text."""
        self._runs: list[tuple[str, list[str]]] = []
        self._stops = stops
        longest = max(map(len, stops), default=1)
        self.withheld_chars = longest - 1 if withholds else 0
        self._resume_points: deque[ResumePoint] = deque(maxlen=MAX_RESUME_POINTS)
        self._likely: ResumePoint | None = None  # the end of a chunk of several tokens

    @property
    def kind(self) -> str | None:
        """The field of the last text."""
        return self._runs[-1][0] if self._runs else None

    def add_text(self, pieces: Sequence[Piece], tokens_of_chunk: int, num_tokens: int) -> None:
        """Add a chunk's text that was delivered, with its tokens and `num_tokens` so far."""
        for kind, text in pieces:
            if kind != self.kind:
                self._runs.append((kind, []))
                self._resume_points.clear()
                self._likely = None
            if text[0] < "\x80":
                self._keep(self._likely)
            self._likely = None
            self._runs[-1][1].append(text)
            self.num_chars += len(text)
        if self.has_ids and not num_tokens:
            self.num_echoed = self.num_chars
        if len(pieces) != 1 or not tokens_of_chunk:
            return
        point = ResumePoint(num_tokens, self.num_chars + self.withheld_chars)
        if tokens_of_chunk == 1:
            self._keep(point)
        elif not self.withheld_chars:
            self._likely = point

    def _keep(self, point: ResumePoint | None) -> None:
        if point is not None and (not self._resume_points or self._resume_points[-1] < point):
            self._resume_points.append(point)

    def last_resume_point(self, max_chars: int) -> ResumePoint | None:
        """Return the last resume point in so much of the text."""
        return next(
            (point for point in reversed(self._resume_points) if point.num_chars <= max_chars),
            None,
        )

    def exact_resume_point(self) -> ResumePoint | None:
        """Return the resume point at the end of the delivered text, if there is one."""
        point = self.last_resume_point(self.num_chars)
        return point if point is not None and point.num_chars == self.num_chars else None

    def replace_after(self, num_tokens: int, ids: Sequence[int], ends: Sequence[int]) -> None:
        """Replace tokens by those that another engine has generated for the same text."""
        if self.ids[num_tokens:] != array("i", ids):
            kept = [point for point in self._resume_points if point.num_tokens <= num_tokens]
            self._resume_points = deque(kept, MAX_RESUME_POINTS)
            self._likely = None
        del self.ids[num_tokens:], self.ends[num_tokens:]
        self.ids.extend(ids)
        self.ends.extend(ends)

    def text_after(self, num_chars: int) -> list[Piece]:
        """Return the delivered text after `num_chars` characters, as runs of one kind each."""
        found: list[Piece] = []
        for kind, texts in self._runs:
            text = "".join(texts)
            if num_chars < len(text):
                found.append((kind, text[num_chars:]))
            num_chars = max(0, num_chars - len(text))
        return found

    def tail(self, num_chars: int) -> str:
        """Return the last characters of the same kind, at most so many."""
        found = ""
        for text in reversed(self._runs[-1][1]) if self._runs else ():
            found = text + found
            if len(found) >= num_chars:
                break
        return found[max(0, len(found) - num_chars) :]

    def open_chars(self, more: str = "") -> int:
        """Return the number of last characters that may begin a stop string, `more` appended."""
        longest = max(map(len, self._stops), default=1)
        text = self.tail(longest - 1) + more
        for length in range(min(longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops if len(stop) > length):
                return length
        return 0


class Overlap:
    """The part of an engine's coming text that the client has already."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._left = deque(pieces)

    def __bool__(self) -> bool:
        return bool(self._left)

    def cut(self, pieces: Sequence[Piece]) -> list[Piece] | None:
        """Return the pieces that are new; None if the others differ from the client's text."""
        new: list[Piece] = []
        for kind, text in pieces:
            while text and self._left:
                known_kind, known = self._left.popleft()
                common = min(len(known), len(text))
                if kind != known_kind or known[:common] != text[:common]:
                    return None
                if common < len(known):
                    self._left.appendleft((kind, known[common:]))
                text = text[common:]
            if text:
                new.append((kind, text))
        return new
