"""The work that a replica has: requests, tokens and blocks (pure)."""

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from vllm_kvpool.router.control.events import Sample
from vllm_kvpool.router.control.requests import Request, RequestId


class ActiveRequest(msgspec.Struct, eq=False, gc=False):
    """A request at the replica that decodes it."""

    blocks: int
    """Blocks committed for the request."""
    is_handed: bool
    """True if another replica has computed the prompt, or computes it."""
    has_first_token: bool = False
    decodes_since: float = 0.0
    """Time of the first token."""
    decoded_before: float = 0.0
    """The replica's `decoded_s` at the first token."""
    is_sent_away: bool = False
    """True if the call was aborted, so that the request goes on at another replica."""
    goes_on_elsewhere: bool | None = None
    """As the request's `RequestSpec` has answered; None until a drain has asked."""
    num_sequences: int = 1
    awaits_prompt: bool = False
    """True while it has no token and another replica computes its prompt."""


@dataclass(slots=True, eq=False)
class Work:
    """Requests that a replica has been given and has not ended. Owned by the controller."""

    mark_changed: Callable[[], object] = field(repr=False)
    """Called before each change, for `LoadTable`."""
    prefills: dict[RequestId, int] = field(default_factory=dict)
    """Prompts that the replica computes, with their tokens that its cache is likely to lack."""
    active: dict[RequestId, ActiveRequest] = field(default_factory=dict)
    """Requests that the replica decodes, or has been given whole."""
    num_sequences: int = 0
    """Sequences of all `active` requests."""
    prefill_tokens: int = 0
    """Sum of `prefills`."""
    committed_blocks: int = 0
    """Sum of the blocks of `active`."""
    most_committed: int = 0
    """Maximum of `committed_blocks` since the last sample but one."""
    foreign_blocks: int = 0
    """Blocks that the engine uses beside the committed ones, as of the last sample."""
    num_starting: int = 0
    """Number of `active` requests without a token."""
    num_computing: int = 0
    """Number of requests without a token whose prompts this replica computes itself."""
    num_awaiting: int = 0
    """Number of requests without a token whose prompts another replica still computes."""
    most_awaiting: int = 0
    """Maximum of `num_awaiting` since the last sample but one."""
    num_waiting: int = 0
    """Requests that wait in the engine as of the last sample, less `most_awaiting`."""
    alone: ActiveRequest | None = None
    """The last request to start, if no other started beside it: its times are its own."""
    bound: list[Request] = field(default_factory=list)
    """Requests that wait until the replica is loaded, in the order of the queue."""
    decoded_s: float = 0.0
    """Seconds of decoding up to `decoded_at`, summed over all requests."""
    decoded_at: float = 0.0
    prefill_since: float = 0.0
    """Time of the last computed prompt, or of the first prompt after a pause."""
    transfer_since: float = 0.0
    """Time of the last loaded prompt, or of the first hand-over after a pause."""

    def __bool__(self) -> bool:
        return bool(self.prefills or self.active or self.bound)

    @property
    def used_blocks(self) -> int:
        """Committed and foreign blocks.

        Metrics are late: blocks of requests that have ended since do not count.
        """
        return self.committed_blocks + self.foreign_blocks

    @property
    def num_ready(self) -> int:
        """Requests without a token yet that wait for no other replica."""
        return self.num_starting - self.num_awaiting

    def measured(self, sample: Sample) -> None:
        """Update the engine's blocks and queue from its metrics."""
        self.foreign_blocks = max(0, sample.used_blocks - self.most_committed)
        self.most_committed = self.committed_blocks
        # A request that awaits a prompt waits in the engine, but not for the engine.
        self.num_waiting = max(0, sample.waiting - self.most_awaiting)
        self.most_awaiting = self.num_awaiting

    def forget_engine(self) -> None:
        """Forget the metrics of an engine that has ended."""
        self.foreign_blocks = self.num_waiting = 0

    def assign(self, request: Request) -> None:
        """Bind a request to the replica, to be computed once the replica is loaded."""
        insort(self.bound, request, key=lambda each: each.order)

    def begin_prefill(self, request_id: RequestId, uncached_tokens: int, now: float) -> None:
        """Record a prefill that the replica is given, with the tokens that it must compute."""
        self.mark_changed()
        if not self.prefills:
            self.prefill_since = now
        self.prefills[request_id] = uncached_tokens
        self.prefill_tokens += uncached_tokens

    def end_prefill(self, request_id: RequestId) -> int:
        """Remove a prompt and return the uncached tokens with which it was added."""
        self.mark_changed()
        tokens = self.prefills.pop(request_id)
        self.prefill_tokens -= tokens
        return tokens

    def begin_decode(self, request_id: RequestId, active: ActiveRequest, now: float) -> None:
        """Record a request that the replica is given to decode, and commit its blocks."""
        self.mark_changed()
        if not active.awaits_prompt:
            self._note_start(active, now)
        self.active[request_id] = active
        self.num_sequences += active.num_sequences
        self.committed_blocks += active.blocks
        self.most_committed = max(self.most_committed, self.committed_blocks)
        self.num_starting += 1
        self.num_computing += not active.is_handed
        self.num_awaiting += active.awaits_prompt
        self.most_awaiting = max(self.most_awaiting, self.num_awaiting)

    def note_prompt(self, request_id: RequestId, now: float) -> None:
        """Note that another replica has computed the prompt that a request awaits."""
        active = self.active[request_id]
        if active.awaits_prompt:
            self.mark_changed()
            self._note_start(active, now)
            self._stop_awaiting(active)

    def _note_start(self, active: ActiveRequest, now: float) -> None:
        """Note that a request waits for this replica alone, before it counts as ready."""
        if active.is_handed and self.num_ready == self.num_computing:
            self.transfer_since = now
        self.alone = active if self.num_ready == 0 and self.num_waiting == 0 else None

    def _stop_awaiting(self, active: ActiveRequest) -> None:
        self.num_awaiting -= active.awaits_prompt
        active.awaits_prompt = False

    def note_first_token(self, request_id: RequestId, now: float) -> None:
        """Note a request's first token."""
        self.mark_changed()
        active = self.active[request_id]
        self._decode_until(now)
        self._started(active)
        active.has_first_token = True
        active.decodes_since, active.decoded_before = now, self.decoded_s

    def end_decode(self, request_id: RequestId, now: float) -> ActiveRequest:
        """Release a request's sequences and blocks, and return its record."""
        self.mark_changed()
        self._decode_until(now)
        active = self.active.pop(request_id)
        self.num_sequences -= active.num_sequences
        self.committed_blocks -= active.blocks
        self._started(active)
        return active

    def decoded_beside(self, active: ActiveRequest) -> float:
        """Return the mean number of requests decoded beside one that ends now, itself included."""
        seconds = self.decoded_at - active.decodes_since
        return (self.decoded_s - active.decoded_before) / seconds if seconds > 0.0 else 0.0

    def _decode_until(self, now: float) -> None:
        flowing = len(self.active) - self.num_starting
        self.decoded_s += flowing * (now - self.decoded_at)
        self.decoded_at = now

    def _started(self, active: ActiveRequest) -> None:
        self.num_starting -= not active.has_first_token
        self.num_computing -= not (active.has_first_token or active.is_handed)
        self._stop_awaiting(active)
