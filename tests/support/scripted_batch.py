"""The engine model: what a step computes, how long it takes, what caches and the pool hold.

`Batch` schedules like vLLM's continuous batching. A step first serves running sequences: each
computes one token or the next part of its prompt. Waiting sequences follow in the order of arrival.
One token budget and the free blocks limit the step. If a running sequence lacks blocks, the newest
running sequence is preempted and computed again later. Waiting sequences look up their prefix in
the engine's own cache and in the pool. Tokens that only the pool has are loaded asynchronously.

`ScriptedPool` is shared by the engines of one process. `DirectoryPool` is shared by engines of
several processes; it holds one empty file per chunk.

`scripted_core` performs the steps in real time behind HTTP, `router_engines` in virtual time.

Simpler than vLLM: sequences with equal prefixes do not share blocks. The own cache keeps as many
tokens as the engine's blocks hold, even while the blocks are in use. The pool evicts nothing.

Callers pass the time, and only `DirectoryPool` does I/O. `check` holds after each call. Not
thread-safe.
"""

import hashlib
import struct
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import NamedTuple, Protocol

from tests.support.scripted_spec import ScriptedSpec
from vllm_kvpool.config import RequestOptions

HASH_BYTES = 16


class Chain(Protocol):
    """Names of a sequence's chunks. Equal names stand for equal tokens up to the chunk's end."""

    def hashes(self, tokens: Tokens[int], num_tokens: int) -> list[bytes]:
        """Return the names of the whole chunks in the first `num_tokens`. A name never changes."""
        ...


class ChunkChain:
    """Chunk names that are hashes of the model, the salt and the tokens."""

    def __init__(self, model: str, salt: str, chunk_tokens: int) -> None:
        self._chunk_tokens = chunk_tokens
        self._last = self._digest(model.encode() + b"\0" + salt.encode(errors="surrogatepass"))
        self._hashes: list[bytes] = []

    @staticmethod
    def _digest(data: bytes) -> bytes:
        return hashlib.blake2b(data, digest_size=HASH_BYTES).digest()

    def hashes(self, tokens: Tokens[int], num_tokens: int) -> list[bytes]:
        size = self._chunk_tokens
        count = num_tokens // size
        for start in range(len(self._hashes) * size, count * size, size):
            chunk = struct.pack(f"<{size}I", *tokens[start : start + size])
            self._last = self._digest(self._last + chunk)
            self._hashes.append(self._last)
        return self._hashes[:count]


class ScriptedPool:
    """A set of chunks. While it is not `up`, it finds and saves nothing."""

    def __init__(self) -> None:
        self.up = True
        self._stored: set[bytes] = set()

    def is_up(self) -> bool:
        """Return True if the pool answers."""
        return self.up

    def count(self, hashes: Tokens[bytes]) -> int:
        """Return the number of leading hashes that are stored."""
        if not self.is_up():
            return 0
        for number, chunk in enumerate(hashes):
            if not self._has(chunk):
                return number
        return len(hashes)

    def put(self, hashes: Tokens[bytes]) -> int:
        """Store chunks, and return the number of chunks that were accepted."""
        if not self.is_up():
            return 0
        for chunk in hashes:
            self._add(chunk)
        return len(hashes)

    def clear(self) -> None:
        """Remove all chunks."""
        self._stored.clear()

    def _has(self, chunk: bytes) -> bool:
        return chunk in self._stored

    def _add(self, chunk: bytes) -> None:
        self._stored.add(chunk)


class DirectoryPool(ScriptedPool):
    """A pool in a directory. A file `down` takes it down for all processes."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    def is_up(self) -> bool:
        return self.up and not (self._directory / "down").exists()

    def clear(self) -> None:
        for path in self._directory.iterdir():
            path.unlink(missing_ok=True)

    def _has(self, chunk: bytes) -> bool:
        return (self._directory / chunk.hex()).exists()

    def _add(self, chunk: bytes) -> None:
        (self._directory / chunk.hex()).touch()


POLL_S = 0.005  # interval of the lookups for expected chunks


class Phase(Enum):
    WAITING = "waiting"
    LOADING = "loading"
    LOADED = "loaded"
    RUNNING = "running"
    GONE = "gone"


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens, and how many are computed. The batch owns every field except `tokens`."""

    tokens: list[int]
    options: RequestOptions
    chain: Chain
    arrival_s: float
    num_prompt: int = 0
    phase: Phase = Phase.WAITING
    num_computed: int = 0
    num_blocks: int = 0
    num_cached: int | None = None  # tokens found when it was first admitted
    num_saved_chunks: int = 0
    loaded_s: float = 0.0  # time at which the load ends

    def __post_init__(self) -> None:
        self.num_prompt = len(self.tokens)


@dataclass(slots=True)
class Step:
    """The work of one step: the sequences that get a token, and the chunks that are complete."""

    seconds: float = 0.0
    num_tokens: int = 0
    sampled: list[Sequence] = field(default_factory=list)
    computed_chunks: list[bytes] = field(default_factory=list)
    is_steady: bool = False
    """True if every running sequence decodes one token, and none was preempted."""


class Found(NamedTuple):
    """Tokens that need no computation; `stored_chunks` is the number of chunks in the pool."""

    local: int
    total: int
    stored_chunks: int


@dataclass(slots=True)
class BatchCounts:
    preemptions: int = 0
    expected: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Number of prompts with `expect_tokens`, by `expect_from` and outcome."""
    pool_hit_tokens: int = 0
    max_running: int = 0


class PrefixCache:
    """The engine's own cache of chunks, which evicts the least recently used chunk."""

    def __init__(self, max_chunks: int) -> None:
        self._max_chunks = max_chunks
        self._chunks: OrderedDict[bytes, None] = OrderedDict()

    def count(self, hashes: Tokens[bytes]) -> int:
        """Return the number of leading hashes in the cache."""
        for number, chunk in enumerate(hashes):
            if chunk not in self._chunks:
                return number
        return len(hashes)

    def add(self, hashes: Tokens[bytes]) -> None:
        for chunk in hashes:
            self._chunks[chunk] = None
            self._chunks.move_to_end(chunk)
        while len(self._chunks) > self._max_chunks:
            self._chunks.popitem(last=False)


class Batch:
    """The unfinished sequences of an engine."""

    def __init__(self, spec: ScriptedSpec, pool: ScriptedPool | None) -> None:
        self._spec = spec
        self._pool = pool
        self.waiting: deque[Sequence] = deque()
        self.loading: list[Sequence] = []
        self.loaded: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.free_blocks = spec.kv_blocks
        self.counts = BatchCounts()
        self._cache = PrefixCache(spec.kv_blocks * spec.block_size // spec.chunk_tokens)

    @property
    def is_empty(self) -> bool:
        return self.num_unfinished == 0

    @property
    def num_unfinished(self) -> int:
        return self.num_waiting + len(self.running)

    @property
    def num_waiting(self) -> int:
        """Number of sequences that are not running, including those that load."""
        return len(self.waiting) + len(self.loading) + len(self.loaded)

    @property
    def pool_is_up(self) -> bool | None:
        """True if the pool answers; None without a pool."""
        return None if self._pool is None else self._pool.is_up()

    @property
    def usage(self) -> float:
        """Share of the blocks in use."""
        return 1 - self.free_blocks / self._spec.kv_blocks

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a finished or cancelled sequence, unless it has been removed before."""
        if sequence.phase is Phase.GONE:
            return
        match sequence.phase:
            case Phase.RUNNING:
                self.running.remove(sequence)
            case Phase.LOADING:
                self.loading.remove(sequence)
            case Phase.LOADED:
                self.loaded.remove(sequence)
            case _:
                self.waiting.remove(sequence)
        self._free(sequence)
        sequence.phase = Phase.GONE

    def saved_tokens(self, sequence: Sequence) -> int:
        """Return the number of the sequence's tokens in the pool or on their way there."""
        return sequence.num_saved_chunks * self._spec.chunk_tokens

    def step(self, now: float) -> Step | None:
        """Choose the next step. None: nothing can be computed before `wake_s` or another change."""
        self._take_loaded(now)
        step = Step()
        preemptions = self.counts.preemptions
        index = 0
        while index < len(self.running) and step.num_tokens < self._spec.max_num_batched_tokens:
            self._advance(self.running[index], step)
            index += 1
        # A preempted sequence does not return in the same step, unless no other sequence runs.
        if preemptions == self.counts.preemptions or not step.num_tokens:
            self._admit_loaded(step)
            self._admit_waiting(now, step)
        if not step.num_tokens:
            return None
        step.seconds += self._spec.step_base_s
        step.is_steady = (
            preemptions == self.counts.preemptions
            and step.num_tokens == len(step.sampled) == len(self.running)
            and all(each.num_computed > each.num_prompt for each in self.running)
        )
        self.counts.max_running = max(self.counts.max_running, len(self.running))
        return step

    def max_repeats(self, step: Step) -> int:
        """Return how often a step can repeat before blocks run out or a chunk is complete.

        Until then nothing changes unless a sequence comes, goes, or `wake_s` is reached.
        """
        if not step.is_steady:
            return 0
        size, chunk, running = self._spec.block_size, self._spec.chunk_tokens, self.running
        slack = min(each.num_blocks * size - each.num_computed for each in running)
        to_chunk = min(chunk - each.num_computed % chunk for each in running)
        return min(to_chunk, slack + self.free_blocks // len(running) * size)

    def repeat(self, step: Step) -> None:
        """Repeat a steady step, once for each token that its sequences have been given since."""
        for sequence in step.sampled:
            num_new = len(sequence.tokens) - sequence.num_computed
            taken = self._take_blocks(sequence, len(sequence.tokens))
            assert taken, "`max_repeats` sees to that"
            self._extend(sequence, num_new, step)

    def wake_s(self, now: float) -> float | None:
        """Return the time at which a step may become possible without other changes.

        By then a load has ended, expected chunks may have arrived, or the wait for them may be
        over.
        """
        times = [sequence.loaded_s for sequence in self.loading]
        times += [now + POLL_S for each in self.waiting if self._wanted_chunks(each)][:1]
        return min(times, default=None)

    def _num_new(self, sequence: Sequence, step: Step) -> int:
        missing = len(sequence.tokens) - sequence.num_computed
        return min(missing, self._spec.max_num_batched_tokens - step.num_tokens)

    def _has_room(self, step: Step) -> bool:
        """Return True if one more sequence may run."""
        is_full = len(self.running) >= self._spec.max_num_seqs
        return not is_full and step.num_tokens < self._spec.max_num_batched_tokens

    def _advance(self, sequence: Sequence, step: Step) -> None:
        """Compute more of a running sequence; preempt the newest sequences if blocks run out."""
        num_new = self._num_new(sequence, step)
        while not self._take_blocks(sequence, sequence.num_computed + num_new):
            newest = self.running[-1]
            self._preempt(newest)
            if newest is sequence:
                return
        self._compute(sequence, num_new, step)

    def _compute(self, sequence: Sequence, num_new: int, step: Step) -> None:
        is_prefill = sequence.num_computed < sequence.num_prompt or num_new > 1
        step.num_tokens += num_new
        if is_prefill:
            step.seconds += num_new / self._spec.prefill_tokens_per_s
        else:
            step.seconds += self._spec.decode_sequence_s
        if sequence.num_computed + num_new == len(sequence.tokens):
            step.sampled.append(sequence)
        self._extend(sequence, num_new, step)

    def _extend(self, sequence: Sequence, num_new: int, step: Step) -> None:
        """Count computed tokens, and cache and save the chunks that they complete."""
        before = sequence.num_computed
        sequence.num_computed += num_new
        chunk = self._spec.chunk_tokens
        if sequence.num_computed // chunk > before // chunk:
            self._keep_chunks(sequence)
        if self._pool is not None and sequence.options.save:
            self._save_chunks(sequence, step)

    def _keep_chunks(self, sequence: Sequence) -> None:
        self._cache.add(sequence.chain.hashes(sequence.tokens, sequence.num_computed))

    def _save_chunks(self, sequence: Sequence, step: Step) -> None:
        computed = min(sequence.num_computed, sequence.num_prompt)
        if computed // self._spec.chunk_tokens > sequence.num_saved_chunks:
            hashes = sequence.chain.hashes(sequence.tokens, computed)
            step.computed_chunks += hashes[sequence.num_saved_chunks :]
            sequence.num_saved_chunks = len(hashes)

    def _run(self, sequence: Sequence, step: Step) -> bool:
        """Compute the first part of a sequence. Return False if blocks are missing."""
        num_new = self._num_new(sequence, step)
        if not self._take_blocks(sequence, sequence.num_computed + num_new):
            return False
        self.running.append(sequence)
        sequence.phase = Phase.RUNNING
        self._compute(sequence, num_new, step)
        return True

    def _admit_loaded(self, step: Step) -> None:
        while self.loaded and self._has_room(step):
            sequence = self.loaded.popleft()
            fits = self._run(sequence, step)
            assert fits, "a load takes the blocks of the whole sequence"

    def _admit_waiting(self, now: float, step: Step) -> None:
        """Admit waiting sequences in their order, to run or to load, until one does not fit."""
        deferred: list[Sequence] = []
        while self.waiting and self._has_room(step):
            sequence = self.waiting[0]
            if self._expects(sequence, now):
                deferred.append(self.waiting.popleft())
                continue
            found = self._look_up(sequence)
            sequence.num_saved_chunks = max(sequence.num_saved_chunks, found.stored_chunks)
            if found.total > found.local:
                begins = self._load(sequence, found, now)
            else:
                sequence.num_computed = found.total
                begins = self._run(sequence, step)
            if not begins:
                break
            # Only admitted sequences count as a use: failed attempts leave the LRU order unchanged.
            self._cache.add(sequence.chain.hashes(sequence.tokens, found.local))
            self._count(sequence, found)
            self.waiting.popleft()
        self.waiting.extendleft(reversed(deferred))

    def _wanted_chunks(self, sequence: Sequence) -> int:
        """Return the number of chunks that the sequence may wait for in the pool."""
        options = sequence.options
        if self._pool is None or not options.load or sequence.num_cached is not None:
            return 0
        return min(options.expect_tokens, sequence.num_prompt) // self._spec.chunk_tokens

    def _expects(self, sequence: Sequence, now: float) -> bool:
        """Return True if the sequence waits for chunks that the pool does not have yet."""
        options, wanted = sequence.options, self._wanted_chunks(sequence)
        if self._pool is None or not wanted:
            return False
        if now >= sequence.arrival_s + options.expect_timeout_ms / 1000 or not self._pool.is_up():
            return False
        hashes = sequence.chain.hashes(sequence.tokens, wanted * self._spec.chunk_tokens)
        return self._pool.count(hashes) < wanted

    def _look_up(self, sequence: Sequence) -> Found:
        chunk, num_tokens = self._spec.chunk_tokens, len(sequence.tokens)
        hashes = sequence.chain.hashes(sequence.tokens, num_tokens)
        stored = 0
        if self._pool is not None and sequence.options.load:
            stored = self._pool.count(hashes)
        # The last token is always computed: it yields the next token.
        local = min(self._cache.count(hashes) * chunk, num_tokens - 1)
        return Found(local, max(local, min(stored * chunk, num_tokens - 1)), stored)

    def _load(self, sequence: Sequence, found: Found, now: float) -> bool:
        """Begin a load. Return False if blocks are missing."""
        # Take all blocks for the first token, so that no load waits for another to end.
        if not self._take_blocks(sequence, len(sequence.tokens)):
            return False
        seconds = (found.total - found.local) / self._spec.load_tokens_per_s
        sequence.loaded_s = now + self._spec.load_latency_s + seconds
        sequence.num_computed = found.total
        sequence.phase = Phase.LOADING
        self.loading.append(sequence)
        return True

    def _count(self, sequence: Sequence, found: Found) -> None:
        if sequence.num_cached is None:
            if wanted := self._wanted_chunks(sequence):
                outcome = "found" if found.stored_chunks >= wanted else "missing"
                self.counts.expected[sequence.options.expect_from or "-", outcome] += 1
            sequence.num_cached = found.total
            self.counts.pool_hit_tokens += found.total - found.local

    def _take_loaded(self, now: float) -> None:
        for sequence in [each for each in self.loading if each.loaded_s <= now]:
            self.loading.remove(sequence)
            self.loaded.append(sequence)
            sequence.phase = Phase.LOADED
            self._keep_chunks(sequence)

    def _missing_blocks(self, sequence: Sequence, num_tokens: int) -> int:
        return -(-num_tokens // self._spec.block_size) - sequence.num_blocks

    def _take_blocks(self, sequence: Sequence, num_tokens: int) -> bool:
        missing = max(0, self._missing_blocks(sequence, num_tokens))
        if missing > self.free_blocks:
            return False
        self.free_blocks -= missing
        sequence.num_blocks += missing
        return True

    def _free(self, sequence: Sequence) -> None:
        self.free_blocks += sequence.num_blocks
        sequence.num_blocks = 0

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._free(sequence)
        sequence.num_computed = 0
        sequence.phase = Phase.WAITING
        self.waiting.appendleft(sequence)
        self.counts.preemptions += 1

    def check(self) -> None:
        """Assert the invariants."""
        kinds = {
            Phase.WAITING: list(self.waiting),
            Phase.LOADING: self.loading,
            Phase.LOADED: list(self.loaded),
            Phase.RUNNING: self.running,
        }
        for phase, sequences in kinds.items():
            assert all(sequence.phase is phase for sequence in sequences)
        everyone = [sequence for sequences in kinds.values() for sequence in sequences]
        assert len(set(map(id, everyone))) == len(everyone)
        taken = sum(sequence.num_blocks for sequence in everyone)
        assert taken + self.free_blocks == self._spec.kv_blocks
        assert self.free_blocks >= 0
        for sequence in everyone:
            assert 0 <= sequence.num_computed <= len(sequence.tokens)
            if sequence.phase is Phase.RUNNING:
                assert sequence.num_blocks * self._spec.block_size >= sequence.num_computed
