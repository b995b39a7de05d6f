"""Answers to requests for tokens: what the choices say, as chunks on the wire or as one body.

A reply belongs to one request and its event loop. Chunks go straight to the transport, framed as
chunks of HTTP, so that a token costs no task; a client that reads too slowly gets several tokens in
one, as vLLM does it. What faults do to a request under way is done here, too.
"""

import asyncio
from enum import Enum
from typing import NamedTuple

from tests.support.scripted_bodies import CompletionForm, Delta, Usage
from tests.support.scripted_core import Choice, EngineCore
from tests.support.scripted_faults import RequestFaults
from tests.support.scripted_spec import Fault, FaultKind, ScriptedSpec

MAX_BUFFER_BYTES = 64 << 10  # beyond it the transport gets nothing but the last tokens
_GARBLED = b'data: {"id":"cmpl-","object":"text_compl\n\n'


class Ending(Enum):
    """How a reply ends."""

    DONE = "done"
    WITHOUT_DONE = "without_done"
    ERROR = "error"
    NEVER = "never"  # nothing more is said
    GONE = "gone"  # nor is there a connection


class Said(NamedTuple):
    """A choice and its last delta."""

    choice: Choice
    delta: Delta


class Reply:
    """The answer to one request as it grows; once `over` is set, `ending` says how it ended."""

    def __init__(
        self,
        core: EngineCore,
        form: CompletionForm,
        transport: asyncio.Transport,
        faults: RequestFaults,
    ) -> None:
        self.over = asyncio.Event()
        self.ending = Ending.NEVER
        self.is_garbled = False
        self._core = core
        self._form = form
        self._ask = form.head.ask
        self._transport = transport
        self._faults = faults
        self._choices: list[Choice] = []
        self._said: dict[int, Said] = {}
        self._begun: set[int] = set()
        self._held: dict[int, Delta] = {}

    def begin(self) -> None:
        """Let the engine compute."""
        self._choices = self._core.submit(self._ask, self._take)
        self.suffer(0)

    def give_up(self) -> bool:
        """Let the engine forget it; whether it was at it."""
        return self._core.abort(self._choices)

    def suffer(self, num_tokens: int, is_over: bool = False) -> None:
        """Do what faults there are now."""
        for fault in self._faults.under_way(num_tokens, is_over):
            ending = self._spoil(fault)
            if ending is not None:
                self._end(ending)

    def _spoil(self, fault: Fault) -> Ending | None:
        match fault.kind:
            case FaultKind.STALL:
                return Ending.NEVER
            case FaultKind.NO_DONE:
                return Ending.WITHOUT_DONE
            case FaultKind.ERROR:
                return Ending.ERROR
            case FaultKind.BROKEN_JSON:
                self.is_garbled = True
                if self._ask.is_stream:
                    self._send(_GARBLED)
                return None
            case FaultKind.CUT:
                self._transport.close()
        return Ending.GONE

    def _end(self, ending: Ending) -> None:
        self.give_up()
        if not self.over.is_set():
            self.ending = ending
            self.over.set()

    def _take(self, choice: Choice, delta: Delta | None) -> None:
        """A choice has one more token."""
        if self.over.is_set():
            return
        if delta is not None:
            if self._ask.is_stream:
                self._write(choice, delta)
            if delta.finish_reason is not None:
                self._said[choice.index] = Said(choice, delta)
        self.suffer(choice.num_tokens, is_over=len(self._said) == len(self._choices))
        if len(self._said) == len(self._choices):
            self._end(Ending.DONE)

    def _write(self, choice: Choice, delta: Delta) -> None:
        held = self._held.pop(choice.index, None)
        if held is not None:
            delta = held.then(delta)
        is_last = delta.finish_reason is not None
        if not is_last and self._transport.get_write_buffer_size() > MAX_BUFFER_BYTES:
            self._held[choice.index] = delta
            return
        usage = Usage(choice.sequence.num_prompt, choice.num_tokens)
        prompt = None
        if choice.index not in self._begun:
            self._begun.add(choice.index)
            prompt = choice.prompt
            opening = self._form.opening(choice.index, prompt, usage._replace(completion_tokens=0))
            if opening:
                self._send(opening)
        self._send(self._form.chunk(choice.index, delta, usage, prompt))

    def _send(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def usage(self, spec: ScriptedSpec) -> Usage:
        """Of the whole request, once it is over."""
        usage = Usage(
            prompt_tokens=sum(map(len, self._ask.prompts)),
            completion_tokens=sum(choice.num_tokens for choice in self._choices),
        )
        first = self._choices[0].sequence
        if not spec.enable_prompt_tokens_details or first.num_cached is None:
            return usage
        whole_blocks = first.num_prompt // spec.block_size * spec.block_size
        return usage._replace(
            cached_tokens=first.num_cached, created_tokens=max(0, whole_blocks - first.num_cached)
        )

    def body(self, spec: ScriptedSpec) -> bytes:
        """The answer in one piece, once it is over."""
        said = [self._said[choice.index] for choice in self._choices]
        return self._form.answer(
            [(choice.prompt, delta) for choice, delta in said],
            self.usage(spec),
            self._core.saved_tokens(self._choices[0]),
        )
