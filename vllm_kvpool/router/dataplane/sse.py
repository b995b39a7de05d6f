"""Server-sent events, split from a byte stream and framed into one (pure).

Only `data:` matters here: the other fields are skipped. Comments (vLLM's keep-alives are some) are
no events, and are given out apart. An event that its stream does not finish is never given out.
"""

from collections.abc import Iterable

from vllm_kvpool.router.dataplane.responses import EngineLost

MAX_EVENT_BYTES = 64 << 20
"""Limit of one event: a stream's first chunk may carry all token ids of a long prompt."""

_CR, _LF, _END = b"\r", b"\n", b"\n\n"


class Events:
    """Splits one stream into events; owned by the task that reads the stream."""

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max_event_bytes = max_event_bytes
        self._unread = bytearray()
        """Bytes of the event that has not ended."""
        self._ends_in_cr = False
        self._comment = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Return the payloads of all events that end in `data`; EngineLost beyond the bound.

        Several `data:` lines of one event are joined by a newline. After an error the splitter is
        of no use any more.
        """
        if _CR in data or self._ends_in_cr:
            data = self._with_newlines(data)
        unread = self._unread
        if unread or not data.endswith(_END):
            searched = max(0, len(unread) - 1)
            unread += data
            end = unread.rfind(_END, searched)
            if end < 0:
                if len(unread) > self._max_event_bytes:
                    raise EngineLost(f"an event is larger than {self._max_event_bytes} bytes")
                return []
            data = bytes(unread[: end + 2])
            del unread[: end + 2]
        payloads: list[bytes] = []
        for event in data[:-2].split(_END):
            if event.startswith(b"data: ") and _LF not in event:
                payloads.append(event[6:])  # as vLLM writes them
            else:
                self._lines(event.split(_LF), payloads)
        return payloads

    def take_comment(self) -> bytes:
        """Return the last comment that has come since this was asked, framed; empty if none has."""
        comment, self._comment = self._comment, b""
        return b"%b\n\n" % comment if comment else b""

    def _with_newlines(self, data: bytes) -> bytes:
        """Return the data with LF as the only line end; CR LF may come in two pieces."""
        if self._ends_in_cr and data.startswith(_LF):
            data = data[1:]
            self._ends_in_cr = False
        if data:
            self._ends_in_cr = data.endswith(_CR)
        return data.replace(b"\r\n", _LF).replace(_CR, _LF)

    def _lines(self, lines: list[bytes], payloads: list[bytes]) -> None:
        found: list[bytes] = []
        for line in lines:
            if line.startswith(b"data:") or line == b"data":
                found.append(line[6 if line[5:6] == b" " else 5 :])
            elif line.startswith(b":"):
                self._comment = line
        if found:
            payloads.append(_LF.join(found))


def frames(payloads: Iterable[bytes]) -> bytes:
    """Return events with these payloads, as vLLM writes them. A payload has no line ends in it."""
    return b"".join([b"data: %b\n\n" % payload for payload in payloads])
