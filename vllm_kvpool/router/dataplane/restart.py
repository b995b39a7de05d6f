"""Where and in which manner an answer goes on whose engine is lost (pure).

Nothing delivered: the same request again. Else from tokens, at a mark of `Answer`:

- Greedy answers go on from the last mark that the stop strings allow; what is generated again is
  compared. In a chat at least one character is, since the engine's parsers may withhold text too.
- Sampled ones must not generate anything again, or they would rarely say the same. They go on after
  the last token; what its text is, an engine is asked first (`/detokenize`), unless a completion
  ends at a mark. If none can say, they go on from the last mark after all: what is generated until
  the delivered text is reached may come out the same, and then it is as good as any.

What cannot go on from tokens is begun again, if it is greedy, and compared as well.
"""

from typing import NamedTuple

import msgspec

from vllm_kvpool.router.dataplane.answer import BEGINNING, Answer, Mark
from vllm_kvpool.router.dataplane.bodies import ClientRequest, Kind
from vllm_kvpool.router.dataplane.recovery import Manner, is_greedy, why_hopeless, why_not_resumed
from vllm_kvpool.router.dataplane.steps import Detokenize

MAX_SPELLINGS = 4
"""Ends of the answer that are looked at: no character has more tokens."""
SPELLED_TOKENS = 80
COMPARED_CHARS = 16
_UNFINISHED = "\ufffd"


class Point(NamedTuple):
    """Where an engine is to go on."""

    manner: Manner
    mark: Mark = BEGINNING
    owed: str = ""
    """Text before the mark that no engine has given out."""


class Hopeless(NamedTuple):
    why: str


Way = Point | Detokenize | Hopeless


class Restart:
    """Decides for one answer, as often as it loses its engine. Owned by its `Splice`."""

    def __init__(self, request: ClientRequest, answer: Answer) -> None:
        self._request = request
        self._answer = answer
        self._num_spelled = 0  # tokens whose text has been asked for
        self._spellings_left = 0
        self._failed: set[Manner] = set()

    def failed(self, manner: Manner) -> None:
        """An engine has said something else than the client has been told."""
        # What is sampled may well come out another way the next time.
        if manner is Manner.REPLAY or is_greedy(self._request):
            self._failed.add(manner)

    def unable(self) -> None:
        """The engines do not go on from tokens."""
        self._failed.add(Manner.RESUME)

    def begin(self) -> Way:
        """The engine is lost: how to go on."""
        answer, request = self._answer, self._request
        if answer.num_chars == answer.num_echoed and not answer.has_tool_calls:
            return Point(Manner.REPEAT)
        if why := why_hopeless(request):
            return Hopeless(why)
        if answer.has_tool_calls:
            return Hopeless("an answer with tool calls cannot be continued")
        if why := self._why_not_resumed():
            return self._replay(why)
        if is_greedy(request):
            return self._from_mark(compares=True)
        exact = answer.exact_mark()
        if exact and request.kind is Kind.COMPLETION and not answer.open_chars():
            return Point(Manner.RESUME, exact)
        self._num_spelled, self._spellings_left = len(answer.ids), MAX_SPELLINGS
        return self._spell()

    def spelled(self, text: str | None) -> Way:
        """What the tokens are that `Detokenize` has named; None if nobody can say."""
        answer = self._answer
        if text is None:
            return self._from_mark(compares=False)
        if text.endswith(_UNFINISHED):
            # The last token has begun a character, of which nothing has been given out.
            self._num_spelled -= 1
            self._spellings_left -= 1
            if self._spellings_left and self._num_spelled:
                return self._spell()
            return self._from_mark(compares=True)
        num_known = len(text) - answer.withheld_chars
        owed = text[max(0, num_known) :]
        if num_known <= 0 or not self._is_end(text[:num_known]) or answer.open_chars(owed):
            return self._from_mark(compares=True)
        mark = Mark(self._num_spelled, answer.num_chars + len(owed))
        return Point(Manner.RESUME, mark, owed)

    def _why_not_resumed(self) -> str | None:
        if Manner.RESUME in self._failed:
            return "no engine has gone on from its tokens"
        if not self._answer.has_ids or not self._answer.prompt_ids:
            return "its token ids are not known"
        if self._answer.is_parsed and self._answer.withheld_chars:
            return "with stop strings its text lags behind the tokens that are looked for in it"
        return why_not_resumed(self._request)

    def _replay(self, why: str) -> Way:
        if not is_greedy(self._request):
            return Hopeless(f"{why}, and what is sampled cannot be begun again")
        if Manner.REPLAY in self._failed:
            return Hopeless(f"{why}, and begun again it came out another way")
        return Point(Manner.REPLAY)

    def _from_mark(self, *, compares: bool) -> Way:
        """`compares`: a chat has to generate something again, that it can be compared."""
        answer = self._answer
        max_chars = answer.num_chars - answer.open_chars()
        if compares and self._request.kind is Kind.CHAT:
            max_chars = min(max_chars, answer.num_chars - 1)
        mark = answer.last_mark(max_chars)
        if mark is None:
            return self._replay("it cannot be told which of its tokens have been delivered")
        return Point(Manner.RESUME, mark)

    def _spell(self) -> Detokenize:
        tokens = self._answer.ids[self._first_spelled : self._num_spelled].tolist()
        body = {"model": self._request.model, "tokens": tokens}
        return Detokenize(msgspec.json.encode(body))

    @property
    def _first_spelled(self) -> int:
        num_tokens = SPELLED_TOKENS + 4 * self._answer.withheld_chars
        return max(0, len(self._answer.ids) - num_tokens)

    def _is_end(self, text: str) -> bool:
        """Whether that is how the delivered text ends; all of it, where all tokens were named."""
        answer = self._answer
        if not self._first_spelled and not answer.is_parsed:
            told = answer.tail(answer.num_chars - answer.num_echoed)
            # Some tokenizers leave out a space at the beginning.
            return told in (text, f" {text}")
        told = answer.tail(COMPARED_CHARS)
        compared = min(len(told), len(text))
        is_enough = compared >= COMPARED_CHARS // 2
        return is_enough and text[-compared:] == told[-compared:]
