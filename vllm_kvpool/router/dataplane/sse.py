"""Server-sent events, split from a byte stream and framed into one (pure).

Only `data:` matters here: the other fields are skipped. Comments (vLLM's keep-alives are some) are
no events, and are given out apart. An event that its stream does not finish is never given out.
"""

from collections.abc import Iterable

from vllm_kvpool.errors import ProtocolError

MAX_EVENT_BYTES = 64 << 20
"""What one event may take: the first chunk of a stream may carry all token ids of a long prompt."""

_CR, _LF = b"\r", b"\n"


class EventTooLong(ProtocolError):
    """A peer sends an event that does not end."""


class Events:
    """Splits one stream into events; owned by the task that reads the stream."""

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max_event_bytes = max_event_bytes
        self._partial: list[bytes] = []  # of the line that has not ended
        self._data: list[bytes] = []  # of the event that has not ended
        self._partial_bytes = self._data_bytes = 0
        self._ends_in_cr = False
        self._comment = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The payloads of all events that end in `data`; EventTooLong beyond the bound.

        Several `data:` lines of one event are joined by a newline. After an error the splitter is
        of no use any more.
        """
        if (
            data.startswith(b"data: ")
            and data.endswith(b"\n\n")
            and not (self._partial or self._data or self._ends_in_cr)
            and len(data) <= self._max_event_bytes
            and _CR not in data
        ):
            whole = data[6:-2].split(b"\n\ndata: ")
            if data.count(_LF) == 2 * len(whole):
                return whole  # each of one line, as vLLM writes them
        if _CR in data or self._ends_in_cr:
            data = self._with_newlines(data)
        head, newline, rest = data.partition(_LF)
        payloads: list[bytes] = []
        if newline:
            lines = rest.split(_LF)
            tail = lines.pop()
            self._line(b"".join((*self._partial, head)), payloads)
            for line in lines:
                self._line(line, payloads)
            self._partial = [tail] if tail else []
            self._partial_bytes = len(tail)
        elif head:
            self._partial.append(head)
            self._partial_bytes += len(head)
        if self._partial_bytes + self._data_bytes > self._max_event_bytes:
            raise EventTooLong(f"an event of more than {self._max_event_bytes} bytes")
        return payloads

    def take_comment(self) -> bytes:
        """The last comment that has come since this was asked, framed; empty if none has."""
        comment, self._comment = self._comment, b""
        return b"%b\n\n" % comment if comment else b""

    def _with_newlines(self, data: bytes) -> bytes:
        """Lines may end in CR LF, LF or CR; the first may come in two pieces."""
        if self._ends_in_cr and data.startswith(_LF):
            data = data[1:]
            self._ends_in_cr = False
        if data:
            self._ends_in_cr = data.endswith(_CR)
        return data.replace(b"\r\n", _LF).replace(_CR, _LF)

    def _line(self, line: bytes, payloads: list[bytes]) -> None:
        if not line:
            if self._data:
                payloads.append(b"\n".join(self._data))
                self._data.clear()
                self._data_bytes = 0
        elif line.startswith(b"data:") or line == b"data":
            self._data.append(line[6 if line[5:6] == b" " else 5 :])
            self._data_bytes += len(line)
        elif line.startswith(b":"):
            self._comment = line


def frames(payloads: Iterable[bytes]) -> bytes:
    """Events with these payloads, as vLLM writes them. A payload has no line ends in it."""
    return b"".join([b"data: %b\n\n" % payload for payload in payloads])
