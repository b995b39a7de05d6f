"""The specification of a scripted engine: its size, its speed, and the faults to inject.

No I/O, no clock.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum

GENERATION_PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")


_POSITIVE = (
    *("max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "chunk_tokens"),
    *("prefill_tokens_per_s", "load_tokens_per_s"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedSpec:
    """The parameters of one engine. ValueError for values that vLLM would not start with."""

    model: str = "scripted"
    version: str = "0.32.0"
    max_model_len: int = 8192
    max_num_seqs: int = 256
    api_key: str = ""
    """Key required after `Authorization: Bearer`; empty: no key."""
    enable_prompt_tokens_details: bool = False
    keep_alive_s: float = 5.0
    """Seconds until an idle connection is closed, as in vLLM."""

    eos_probability: float = 0.0
    wide_probability: float = 0.02
    """Probability that a token begins a character of several tokens."""
    default_temperature: float = 1.0
    """Default of vLLM: only requests for temperature 0 are greedy."""

    step_base_s: float = 0.004
    decode_sequence_s: float = 0.0002
    """Time that each decoding sequence adds to a step."""
    prefill_tokens_per_s: float = 20_000.0
    max_num_batched_tokens: int = 2048

    block_size: int = 16
    kv_blocks: int = 4096
    kv_bytes_per_token: int = 65_536

    chunk_tokens: int = 256
    namespace: str = "scripted@fmt:000000000000"
    has_connector: bool = True
    notices: tuple[str, ...] | None = ("tcp://127.0.0.1:5555",)
    """Endpoints at which the engine announces stored chunks; None: its release has no notices."""
    put_s: float = 0.02
    """Time from the end of a step until the pool has the step's chunks."""
    load_tokens_per_s: float = 200_000.0
    load_latency_s: float = 0.002

    load_s: float = 0.0
    """Time from the start until the model is loaded."""
    listens_while_loading: bool = False
    """Answer 503 while loading; vLLM itself does not listen."""

    def __post_init__(self) -> None:
        if self.max_model_len > self.kv_blocks * self.block_size:
            raise ValueError(
                f"max_model_len {self.max_model_len} exceeds the {self.kv_blocks} blocks of "
                f"{self.block_size} tokens"
            )
        for name in _POSITIVE:
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive")
        if not 0 <= self.eos_probability + self.wide_probability <= 1:
            raise ValueError("eos_probability and wide_probability must be together 0 to 1")


class FaultKind(Enum):
    """Kinds of faults. Faults of streams apply to answers in one piece, too."""

    # The engine as a whole, at once or when a request has `after_tokens` tokens
    DIE = "die"  # the port closes, connections end, chunks not in the pool yet are lost
    # The engine as a whole, at once
    REFUSE = "refuse"  # the port closes; requests in progress go on
    FREEZE = "freeze"  # accepts connections and requests, computes nothing
    # Requests when they arrive
    HANG = "hang"  # no answer
    SLOW = "slow"  # the answer begins `seconds` late
    STATUS = "status"  # `status`, `body` and `content_type` instead of an answer
    BUSY = "busy"  # vLLM's refusal of a request when its queue is full
    NOT_HTTP = "not_http"  # invalid HTTP, then the end of the connection
    # Requests that have `after_tokens` tokens
    STALL = "stall"  # no more bytes, the connection stays
    CUT = "cut"  # the connection ends
    NO_DONE = "no_done"  # the stream ends regularly, but without [DONE]
    BROKEN_JSON = "broken_json"  # one event with invalid JSON, then the stream goes on
    ERROR = "error"  # vLLM's own error within a stream
    # Requests when they arrive
    ENDLESS = "endless"  # an answer whose tokens do not end


ENGINE_KINDS = frozenset({FaultKind.DIE, FaultKind.REFUSE, FaultKind.FREEZE})
STREAM_KINDS = frozenset(
    {FaultKind.DIE, FaultKind.STALL, FaultKind.CUT}
    | {FaultKind.NO_DONE, FaultKind.BROKEN_JSON, FaultKind.ERROR}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault, in effect from `set` until it is cleared or used up."""

    kind: FaultKind
    after_tokens: int | None = None
    """Generated tokens of a request after which the fault strikes.

    None means at the end for `NO_DONE`, and at once for faults of the whole engine. For other kinds
    it means 0: before the first token.
    """
    times: int = 0
    """Number of requests that the fault strikes; 0: no limit."""
    seconds: float = 0.0
    """Seconds until the engine is back after `DIE`, `REFUSE` and `FREEZE`; 0: it stays away.

    For `SLOW`, the delay of the answer.
    """
    paths: tuple[str, ...] = GENERATION_PATHS
    """Path prefixes of the requests that the fault can strike."""
    request_id: str = ""
    """If set, only the request with this `X-Request-Id` is struck."""
    status: int = 500
    body: str = "<html>oops</html>"
    content_type: str = "text/html"

    def at_once(self) -> bool:
        """Return True if the fault strikes the whole engine without waiting for a request."""
        return self.kind in ENGINE_KINDS and self.after_tokens is None


@dataclass(slots=True)
class _Armed:
    fault: Fault
    num_hit: int = 0

    @property
    def is_used_up(self) -> bool:
        return 0 < self.fault.times <= self.num_hit

    def concerns(self, path: str, request_id: str) -> bool:
        fault = self.fault
        if self.is_used_up or (fault.request_id and fault.request_id != request_id):
            return False
        return path.startswith(fault.paths)


class FaultBoard:
    """The active faults. `on_engine` is called with each fault of the whole engine when due."""

    def __init__(self, on_engine: Callable[[Fault], None]) -> None:
        self._on_engine = on_engine
        self._armed: list[_Armed] = []
        self.has_streams = False
        """True if a fault can strike a request in progress."""

    def set(self, fault: Fault) -> None:
        """Activate a fault. A fault with `at_once()` strikes immediately."""
        if fault.at_once():
            self._on_engine(fault)
        else:
            self._armed.append(_Armed(fault))
            self._sweep()

    def clear(self) -> None:
        """Remove all faults, without undoing their effects."""
        self._armed.clear()
        self._sweep()

    def faults(self) -> list[Fault]:
        """Return the active faults."""
        return [armed.fault for armed in self._armed]

    def _sweep(self) -> None:
        self._armed = [armed for armed in self._armed if not armed.is_used_up]
        self.has_streams = any(armed.fault.kind in STREAM_KINDS for armed in self._armed)

    def _hits(self, path: str, request_id: str) -> Iterator[_Armed]:
        return (armed for armed in self._armed if armed.concerns(path, request_id))

    def at_arrival(self, path: str, request_id: str) -> list[Fault]:
        """Return the faults that strike a new request, in the order in which they were set."""
        hits = [
            armed
            for armed in self._hits(path, request_id)
            if armed.fault.kind not in STREAM_KINDS | ENGINE_KINDS
        ]
        return self._use(hits)

    def under_way(self, request: "RequestFaults", num_tokens: int, is_over: bool) -> list[Fault]:
        """Return the faults that strike a request at this number of tokens, each only once."""
        hits = [
            armed
            for armed in self._hits(request.path, request.request_id)
            if armed.fault.kind in STREAM_KINDS
            and armed.fault not in request.suffered
            and self._is_due(armed.fault, num_tokens, is_over)
        ]
        faults = self._use(hits)
        for fault in faults:
            if fault.kind is FaultKind.DIE:
                self._on_engine(fault)
        return faults

    @staticmethod
    def _is_due(fault: Fault, num_tokens: int, is_over: bool) -> bool:
        if fault.after_tokens is None:
            return is_over or fault.kind is not FaultKind.NO_DONE
        return num_tokens >= fault.after_tokens

    def _use(self, hits: list[_Armed]) -> list[Fault]:
        for armed in hits:
            armed.num_hit += 1
        if hits:
            self._sweep()
        return [armed.fault for armed in hits]


@dataclass(slots=True)
class RequestFaults:
    """The faults of one request, and those that have struck it."""

    board: FaultBoard
    path: str
    request_id: str
    suffered: list[Fault] = field(default_factory=list)

    def at_arrival(self) -> list[Fault]:
        """Return the faults that strike the request before it is read."""
        return self.board.at_arrival(self.path, self.request_id)

    def under_way(self, num_tokens: int, is_over: bool = False) -> list[Fault]:
        """Return the faults that strike at `num_tokens`; `is_over`: the answer is complete."""
        if not self.board.has_streams:
            return []
        faults = self.board.under_way(self, num_tokens, is_over)
        self.suffered += faults
        return faults
