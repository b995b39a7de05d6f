"""A lookup of a request's prompt, and its answer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

from vllm_kvpool.identity.chunk_hash import ChunkChain, RequestIdentity
from vllm_kvpool.scheduler.prefix_search import Tail


class StoredChunks(NamedTuple):
    """The chunks that stores have by their own answers, whatever host memory has.

    `attention`: the chunks that could be loaded from stores if there were no recurrent states.
    `is_in_host`: host memory has the other chunks found, but for windows that no hit there needs.
    `host_windows`: ids of the chunks whose windows host memory had during the lookup.
    """

    chunks: int = 0
    attention: int = 0
    is_in_host: bool = False
    host_windows: frozenset[str] = frozenset()


NOTHING_STORED = StoredChunks()


class LookupOutcome(Enum):
    """The outcome of a lookup."""

    ANSWERED = "answered"
    UNSHAREABLE = "unshareable"  # the request has no identity that other engines know
    STORE_ERROR = "store_error"
    TIMED_OUT = "timed_out"  # nothing was found by the tiers that have answered in time


@dataclass(frozen=True, slots=True)
class Lookup:
    """The lookup of a request's prompt. Times are monotonic seconds.

    `identify` runs on the lookup thread or, with `reads_files`, on one for adapters. Without
    `search` only the hash chain is wanted. The lookup waits until `expect_until` for the first
    `expect_tokens` tokens, or the whole prompt if that is shorter. At `answer_by` it is answered
    with what is known. Chunks from `stop_chunk` on are not looked for. `exact`: a load of the
    request has failed, so all cells of what is found are asked for. `seeks_end`: `tokens` are a
    prompt whose end, a partial chunk, is looked for as well. `seeks_tail`: aliases are read, so
    that the hit may end inside a chunk. `seeks_stored`: stores are asked for the chunks in host
    memory, too.
    """

    lookup_id: int
    identify: Callable[[], RequestIdentity | None]
    tokens: Sequence[int]
    search: bool
    expect_tokens: int
    expect_until: float
    answer_by: float
    weights_version: str = ""
    reads_files: bool = False
    stop_chunk: int | None = None
    exact: bool = False
    seeks_end: bool = False
    seeks_tail: bool = False
    seeks_stored: bool = False
    notices: tuple[str, ...] = ()
    """Endpoints of the producer, one of each rank, that tell which chunks are stored."""
    request_id: str = ""
    """For messages."""

    def nothing_found(
        self,
        chain: ChunkChain | None = None,
        outcome: LookupOutcome = LookupOutcome.ANSWERED,
        *,
        is_final: bool = True,
    ) -> "LookupResult":
        """Return an answer without a hit; not `is_final`: a hit may follow."""
        version = self.weights_version
        return LookupResult(self.lookup_id, chain, 0, outcome, version, is_final=is_final)


@dataclass(frozen=True, slots=True)
class LookupResult:
    """The answer to a lookup, or its progress.

    `chain` belongs to the receiver, but the lookup thread reads the hashes of the lookup's tokens
    until the final answer; None if the request cannot be shared. `tail` is the prompt's end if the
    lookup seeks it, or the chunk inside which the hit ends; `found_chunks` counts it as one more
    chunk once it is found. `miss_reason` says why no more was found: `ANSWERED` if the tiers lack
    it. `attention_chunks` could be loaded if there were no recurrent states.
    """

    lookup_id: int
    chain: ChunkChain | None
    found_chunks: int
    outcome: LookupOutcome
    weights_version: str = ""
    miss_reason: LookupOutcome = LookupOutcome.ANSWERED
    attention_chunks: int = 0
    stored: StoredChunks = NOTHING_STORED
    """Empty unless the lookup seeks it."""
    lacks_expected: bool = False
    """True if the lookup ended without all chunks that the request expects."""
    tail: Tail | None = None
    is_final: bool = True
    """False while the lookup still waits for expected chunks."""
    expected_chunks: int = 0
    """Chunks that the lookup waits for."""
    has_lost_producer: bool = False
    """True if the connection to the producer has ended before the expected chunks came."""

    def tokens_of(self, chunks: int, chunk_tokens: int) -> int:
        """Return the tokens of the request's first chunks; the last one may be the tail."""
        tail = self.tail
        if tail is None or chunks <= tail.position:
            return chunks * chunk_tokens
        return tail.position * chunk_tokens + tail.tokens

    def without_hit(self) -> "LookupResult":
        """Return the answer with the hash chain alone, as if nothing were stored."""
        return replace(self, found_chunks=0, attention_chunks=0, stored=NOTHING_STORED)

    @property
    def whole_chunks(self) -> int:
        """The found chunks without the tail."""
        found, tail = self.found_chunks, self.tail
        return found if tail is None else min(found, tail.position)
