"""The scheduler part's view of a request, a step and the engine."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple, Protocol

from vllm_kvpool.config import RequestOptions
from vllm_kvpool.identity.chunk_hash import ChunkChain, RequestIdentity
from vllm_kvpool.layout.topology import KVCacheGroup
from vllm_kvpool.scheduler.lookup import LookupOutcome, LookupResult
from vllm_kvpool.scheduler.states import AdmissionState, LookupState, RetryState
from vllm_kvpool.storage.base import NO_RETENTION, Retention


@dataclass(frozen=True, slots=True)
class PoolShape:
    """The engine as the scheduler part sees it."""

    chunk_tokens: int
    groups: tuple[KVCacheGroup, ...]
    num_ranks: int
    max_pinned_blocks: int
    num_replicas: int = 1  # most ranks of a pipeline stage that hold the same KV
    prefetches: bool = False  # workers have host memory to prefetch cells into
    loads: bool = True  # False where the engine does not survive a failed load
    stops_at_first: bool = False  # a request without blocks holds up those behind it
    in_lockstep: bool = False  # data-parallel engines step together: one that waits holds up all
    has_ends: bool = False  # the end of a prompt can be a cell of its own
    alias_step: int = 0  # tokens between the ends of hits inside a chunk; 0: hits end with chunks
    state_stride: int = 0
    """Tokens between the recurrent states of an answer that are asked for; 0: none."""
    has_drafts: bool = False  # a drafter's layers are stored, too
    lookahead: int = 0  # later tokens that a row may depend on
    max_drafted_tokens: int | None = None
    """The drafter computes nothing in a step in which a request comes to have more tokens."""
    max_promised_blocks: int = 0  # allocated for chunks that another engine has not stored yet


class LoadOffer(NamedTuple):
    """Tokens [start, stop) offered to the engine. `all_blocks`: its blocks if all were free."""

    start: int
    stop: int
    all_blocks: int


class OwnKV(NamedTuple):
    """Trust in the engine's own caches: True where their content has the request's identity."""

    blocks: bool = True
    embeddings: bool = True


class RequestView(Protocol):
    """The pool's view of an engine's request; counts are read at every use."""

    @property
    def request_id(self) -> str:
        """The engine's name of the request, unique while it runs."""

    @property
    def options(self) -> RequestOptions:
        """The options that the client set for this request."""

    @property
    def shareable(self) -> bool:
        """False for requests that are neither loaded nor saved."""

    @property
    def reads_cache(self) -> bool:
        """False where cached KV must not be used (prompt log-probabilities)."""

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt, without output."""

    @property
    def num_tokens(self) -> int:
        """Tokens known by value, prompt and output."""

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose KV earlier steps have computed or are computing."""

    @property
    def num_preemptions(self) -> int:
        """Number of times that the engine has taken the request's blocks away."""

    def tokens(self) -> Sequence[int]:
        """Return the known tokens; the sequence may grow later but does not change."""

    @property
    def tenant(self) -> str:
        """The tenant of its chunks: a name or the digest of a salt; "" for none."""

    @property
    def reads_files(self) -> bool:
        """True if `identity` reads files."""

    @property
    def has_media(self) -> bool:
        """True if its KV depends on embeddings that the engine may have cached."""

    def identity(self) -> RequestIdentity | None:
        """Return the inputs of the KV besides the tokens; None if other engines cannot know them.

        Runs on a thread of the lookup service. Raises OSError.
        """

    def admit(self) -> OwnKV:
        """Note that the engine is about to compute the request, whether it is shared or not.

        Returns whether blocks and embeddings that it finds in its own caches are of the identity
        that the pool knows: the engine's names for them may be coarser. Scheduler's thread.
        """

    def keep_state_at(self, boundary: int) -> None:
        """Have the engine keep the recurrent state after so many tokens. Scheduler's thread."""

    @property
    def trace_headers(self) -> Mapping[str, str] | None:
        """The headers that name the request's trace, if it is traced."""

    def record_span(self, name: str, seconds: float, attributes: Mapping[str, int | str]) -> None:
        """Add to the request's trace, if it has one, a span that ends now. Scheduler's thread."""


class StateOffer(NamedTuple):
    """A block that holds the recurrent state after `boundary` tokens once the step has ended.

    It holds for one step: the next one may free the block or go on in it.
    """

    group: int
    block_id: int
    boundary: int


Gap = tuple[int, int]
"""A KV cache group, and a chunk that had lost blocks of it before the chunk was saved."""


class ScheduledStep(NamedTuple):
    """A step of the engine; `block_tables` gives a request's table in each KV cache group."""

    scheduled: Mapping[str, int]
    block_tables: Callable[[str], Sequence[Sequence[int]]]
    preempted: Collection[str] = ()
    states: Mapping[str, Sequence[StateOffer]] = MappingProxyType({})
    drafted: Collection[str] = ()
    """Requests with drafts in the step. Their states are in their blocks once it has ended."""


NOTHING_FOUND = LookupResult(-1, None, 0, LookupOutcome.UNSHAREABLE)


@dataclass(slots=True)
class RequestLookup:
    """The newest lookup of a request. `answer`: what it has found so far."""

    answer: LookupResult = NOTHING_FOUND
    asked_at: float = 0.0
    deadline: float = 0.0
    num_preemptions: int = 0
    """Preemptions of the request before the lookup was asked."""
    state: LookupState = LookupState.ENDED


@dataclass(slots=True)
class RequestState:
    """Owned by the scheduler's thread, from the request's arrival to its end."""

    view: RequestView
    may_load: bool
    may_save: bool
    retention: Retention = NO_RETENTION  # of what it saves
    lookup: RequestLookup = field(default_factory=RequestLookup)
    has_expected: bool = False  # a lookup has waited for the tokens it expects, and has ended
    chain: ChunkChain | None = None
    limit_tokens: int | None = None  # a load has failed here: ask for no more
    retry: RetryState = RetryState.NONE
    lost_tokens: int = 0  # of a failed load, until it is known what is loaded instead
    offer: LoadOffer | None = None  # not taken yet
    admission: AdmissionState = AdmissionState.QUEUED
    own_tokens: int = 0  # of the engine's own cache or of its load, when it was last admitted
    cached_tokens: int = 0  # of the engine's own cache, when it was last started
    draft_stop: int | None = None  # from this chunk on rows of a drafter are missing, or behind it
    first_answer: tuple[float, int] | None = None  # when its answer began, and its tokens then
    lacks_drafts: bool = False  # its load has not found all rows of a drafter
    counted: bool = False  # its hit and miss are in the metrics
    next_save: int = 0  # chunks before it are stored or on their way
    first_save: int | None = None  # chunks before it were in the pool when it first saved
    topic: bytes = b""  # names its prompt, if it is handed over
    hand_over_ended: bool = False  # workers know that it saves nothing more
    saved_states: set[int] = field(default_factory=set)  # boundaries, stored or on their way
    gaps: set[Gap] = field(default_factory=set)  # chunks that neither the pool nor its blocks have
    has_saved_end: bool = False  # the prompt's end is stored or on its way
    stale: bool = False  # its KV is from before a reset, of other weights or another's: not saved
    trusts_names: bool = True  # blocks that are found by vLLM's hashes are its own

    @property
    def answer(self) -> LookupResult:
        """The answer of the newest lookup so far."""
        return self.lookup.answer

    def missed_tokens(self, hit: int, chunk_tokens: int) -> list[tuple[str, int]]:
        """Return the prompt tokens that are not loaded, by reason; `hit` tokens are."""
        view, answer = self.view, self.answer
        prompt = view.num_prompt_tokens
        if not view.options.load or not view.reads_cache:
            missed = {"not_wanted": prompt - hit}
        elif not view.shareable or answer.outcome is LookupOutcome.UNSHAREABLE:
            missed = {"unshareable": prompt - hit}
        elif answer.outcome is not LookupOutcome.ANSWERED:
            missed = {answer.outcome.value: prompt - hit}
        else:
            promised = -(-self.offer.stop // chunk_tokens) if hit and self.offer else 0
            chunks = max(answer.found_chunks, promised)
            found = min(prompt, answer.tokens_of(chunks, chunk_tokens))
            chunked = max(found, prompt // chunk_tokens * chunk_tokens)
            reason = answer.miss_reason
            why = "absent" if reason is LookupOutcome.ANSWERED else reason.value
            missed = {
                "not_needed": found - hit,  # computed here, cut to blocks, or the last one
                why: chunked - found,
                "short": prompt - chunked,  # no full chunk
            }
        return [(reason, tokens) for reason, tokens in missed.items() if tokens > 0]
