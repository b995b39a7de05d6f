"""The calls to engines of one request: what is known of each while it runs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm_kvpool.router.control.events import Decode, Prefill
from vllm_kvpool.router.dataplane.responses import EngineLost, TokenCounts, read_usage
from vllm_kvpool.router.dataplane.resume.stream_resumer import StreamResumer
from vllm_kvpool.router.dataplane.sse import Events

if TYPE_CHECKING:
    import asyncio


@dataclass(slots=True, eq=False)
class PromptCall:
    """The call that has the prompt computed; its task runs beside the request's."""

    directive: Prefill
    task: "asyncio.Task[None]"


@dataclass(slots=True, eq=False)
class AnswerCall:
    """A call to an engine that answers, from the directive to the report of its end."""

    directive: Decode
    is_aborted: bool = False
    """True once the controller does not want the call any more."""
    task: "asyncio.Task[None] | None" = None
    """The request's task, while it makes the call and has not been cancelled."""
    is_in_one_piece: bool = False
    """True once the engine was asked for an answer without a stream."""
    num_payloads: int = 0
    """Events of the stream so far."""
    num_delivered: int = 0
    """Tokens that the client had before this call."""
    begins: bool = False
    """True while the first event is in hand, and the controller does not know yet."""
    counts: TokenCounts = field(default_factory=TokenCounts)
    """Counts that a stream which is passed on has told so far."""
    is_reported: bool = False
    """True once the controller knows the call's end; the client may still take the rest."""

    def abort(self) -> None:
        """Give the call up, begun or not; without effect the second time."""
        if self.task is not None and not self.is_aborted:
            # Not from here, which may be that task itself: it might get past the call uncancelled.
            self.task.get_loop().call_soon(self._cancel)
        self.is_aborted = True

    def _cancel(self) -> None:
        if self.task is not None and not self.is_reported:
            self.task.cancel()
            self.task = None


@dataclass(slots=True, eq=False)
class AnswerStream:
    """An engine's stream of events while it is read."""

    call: AnswerCall
    resumer: StreamResumer
    headers: Mapping[str, str]
    """Headers of the client's answer."""
    events: Events = field(default_factory=Events)
    last: list[bytes] = field(default_factory=list)
    """The payloads at the stream's end, which the client has not been sent yet."""

    def feed(self, data: bytes) -> tuple[list[bytes], EngineLost | None]:
        """Read bytes of the engine; return the client's payloads, and why the engine is lost.

        The client must be sent the payloads also if the engine is lost after them.
        """
        out: list[bytes] = []
        for payload in self.events.feed(data):
            try:
                out += self.resumer.feed(payload)
            except EngineLost as error:
                return out, error
            self.call.begins |= self.call.num_payloads == 0
            self.call.num_payloads += 1
            if self.resumer.ended:
                break  # an engine's events after the end of its answer are dropped
        return out, None


@dataclass(slots=True, eq=False)
class PassedStream:
    """A stream that is passed on as it comes; only its counts are read."""

    call: AnswerCall
    headers: Mapping[str, str]
    """Headers of the client's answer."""
    events: Events | None = field(default_factory=Events)
    """None once the stream cannot be read."""

    def feed(self, data: bytes) -> None:
        """Note the counts of the last event that has a usage."""
        if self.events is None:
            return
        try:
            payloads = self.events.feed(data)
        except EngineLost:
            self.events = None
            return
        for payload in payloads:
            if b'"usage"' in payload and (counts := read_usage(payload)).prompt_tokens:
                self.call.counts = counts
