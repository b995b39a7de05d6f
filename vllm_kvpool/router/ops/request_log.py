"""The course of a request, for the access log, spans and histograms (pure).

Fed by the request's handler, from its arrival to its end. Times are the router's clock.
"""

import logging
from dataclasses import dataclass, field

import msgspec

from vllm_kvpool.router.control.events import Decode, DecodeEnded, Prefill, PrefillEnded

access_log = logging.getLogger("vllm_kvpool.router.access")


class Observation(msgspec.Struct, frozen=True, gc=False):
    """Seconds for a histogram (`ROUTER_METRICS`), of a replica where it is of one."""

    name: str
    seconds: float
    replica: str = ""


@dataclass(slots=True)
class RequestLog:
    """The log of one request."""

    began: float
    tenant: str = ""
    """Empty without keys."""
    prefill_asked: float = 0.0
    """When an engine was last asked for the prompt."""
    asked: float = 0.0
    """Since when nothing but the engine that was asked last has been waited for."""
    engine_s: float = 0.0
    """Seconds that engines took for the prompt."""
    waited_s: float = 0.0
    """In the controller's queues."""
    replicas: list[str] = field(default_factory=list)
    """The replicas that were asked, in order."""
    first_token: float | None = None
    decode_began: float | None = None
    """When the engine that answers now has brought its first token."""
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    """Prompt tokens found in a cache or the pool, as the client is told; None: unknown."""
    output_tokens: int = 0
    observed: list[Observation] = field(default_factory=list)

    def _observe(self, name: str, seconds: float, replica: str = "") -> None:
        self.observed.append(Observation(name, seconds, replica))

    def asks(self, call: Prefill | Decode, now: float) -> None:
        """Note a call to an engine."""
        self.asked, self.decode_began = now, None
        self.replicas.append(call.replica)
        if isinstance(call, Decode):
            self.waited_s = call.waited_s
        else:
            self.prefill_asked = now

    def decode_has_begun(self, now: float) -> None:
        """Note the first token of the engine that was asked last."""
        self.decode_began = now
        self._observe("replica_first_token_seconds", now - self.asked, self.replicas[-1])
        if self.first_token is None:
            self.first_token = now
            self._observe("first_token_seconds", now - self.began)
            own_s = self.asked - self.began - self.engine_s - self.waited_s
            self._observe("added_seconds", max(0.0, own_s))

    def call_ended(self, event: PrefillEnded | DecodeEnded, now: float) -> None:
        """Note that an engine that was asked has answered, or is lost."""
        self.prompt_tokens = max(self.prompt_tokens, event.prompt_tokens)
        if isinstance(event, PrefillEnded):
            # One that was asked for the answer meanwhile has waited for this.
            self.engine_s += now - self.prefill_asked
            self.asked = now
            return
        self.output_tokens += event.output_tokens
        if self.decode_began is not None and event.output_tokens > 1:
            each_s = (now - self.decode_began) / (event.output_tokens - 1)
            self._observe("replica_token_seconds", each_s, event.replica)

    def note_prompt(self, prompt_tokens: int, cached_tokens: int | None) -> None:
        """Note the counts of the prompt, also of an answer that its client has not taken whole."""
        self.prompt_tokens = max(self.prompt_tokens, prompt_tokens)
        self.cached_tokens = cached_tokens

    def end(self, now: float) -> None:
        """Note the end of the request."""
        self._observe("request_seconds", now - self.began)

    def line(
        self, request_id: str, *, client: str, path: str, model: str, status: int, now: float
    ) -> str:
        """Return one line of `name=value` pairs; an unknown value is `-`."""
        first = "-" if self.first_token is None else f"{self.first_token - self.began:.3f}"
        return (
            f"id={_quoted(request_id)} client={client or '-'} method=POST path={path} "
            f"model={_quoted(model)} replicas={','.join(self.replicas) or '-'} "
            f"status={status or '-'} ttft_s={first} prompt_tokens={self.prompt_tokens} "
            f"output_tokens={self.output_tokens} duration_s={now - self.began:.3f}"
        )


def _quoted(text: str) -> str:
    """Quote a client's text, so that it does not look like another field or line."""
    return text if text.isprintable() and " " not in text and text else ascii(text)
