"""What happened to a request, for a person who asks why (pure; owned by the engine thread).

Bounded: the last `MAX_REQUESTS` requests, the first `MAX_LINES` lines of each.
"""

from collections import OrderedDict
from typing import NamedTuple

MAX_REQUESTS = 256
MAX_LINES = 64


class StoryLine(NamedTuple):
    """`at` is on the engine's clock, in seconds."""

    at: float
    text: str


class Stories:
    """See the module docstring."""

    def __init__(self) -> None:
        self._lines: OrderedDict[str, list[tuple[float, str, tuple[object, ...]]]] = OrderedDict()

    def note(self, request_id: str, at: float, form: str, *parts: object) -> None:
        """Add a line to a request's story: `form.format(*parts)`, made when somebody asks."""
        lines = self._lines.get(request_id)
        if lines is None:
            lines = self._lines[request_id] = []
            if len(self._lines) > MAX_REQUESTS:
                self._lines.popitem(last=False)
        if len(lines) < MAX_LINES:
            lines.append((at, form, parts))

    def of(self, request_id: str) -> tuple[StoryLine, ...]:
        """The request's story; empty for one that is unknown, or too long ago."""
        lines = self._lines.get(request_id, ())
        return tuple(StoryLine(at, form.format(*parts)) for at, form, parts in lines)
