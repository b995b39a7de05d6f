"""The one model of an engine: what a step computes, how long it takes, what caches and pool have.

Continuous batching as vLLM's scheduler does it: running sequences first, each one token or the
next part of its prompt, then waiting ones in the order of their arrival, all within one budget of
tokens and the blocks that are free. When running sequences need more, the newest is preempted and
computed again. Waiting sequences look up their prefix in the own cache and in the pool; what the
pool alone has is loaded beside the steps. `ScriptedPool` is one for the engines of a process,
`DirectoryPool` for those of several: one empty file a chunk.

`scripted_core` performs the steps in real time behind HTTP, `router_engines` in virtual time.

Simpler than vLLM: equal prefixes do not share blocks, the own cache keeps as many tokens as there
are blocks, whoever uses them, and the pool evicts nothing. Pure but for the directory: time comes
in. `check` holds after each call. One thread at a time.
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
    """Names of a sequence's chunks; equal names stand for equal tokens up to a chunk's end."""

    def hashes(self, tokens: Tokens[int], num_tokens: int) -> list[bytes]:
        """The names of the whole chunks of the first `num_tokens`, of which none ever changes."""
        ...


class ChunkChain:
    """Names made of the tokens."""

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
    """A set of chunks. While it is not `up` nothing is found and nothing saved."""

    def __init__(self) -> None:
        self.up = True
        self._stored: set[bytes] = set()

    def is_up(self) -> bool:
        """Whether it answers."""
        return self.up

    def count(self, hashes: Tokens[bytes]) -> int:
        """How many of the hashes are stored before the first that is not."""
        if not self.is_up():
            return 0
        for number, chunk in enumerate(hashes):
            if not self._has(chunk):
                return number
        return len(hashes)

    def put(self, hashes: Tokens[bytes]) -> int:
        """Store chunks; how many were taken."""
        if not self.is_up():
            return 0
        for chunk in hashes:
            self._add(chunk)
        return len(hashes)

    def clear(self) -> None:
        """Forget all."""
        self._stored.clear()

    def _has(self, chunk: bytes) -> bool:
        return chunk in self._stored

    def _add(self, chunk: bytes) -> None:
        self._stored.add(chunk)


class DirectoryPool(ScriptedPool):
    """The same in a directory, where a file `down` takes it down for all processes."""

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


POLL_S = 0.005  # how often the pool is asked again for what a sequence expects


class Phase(Enum):
    WAITING = "waiting"
    LOADING = "loading"
    LOADED = "loaded"
    RUNNING = "running"
    GONE = "gone"


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens and what has been computed of them; all but `tokens` is the batch's own."""

    tokens: list[int]
    options: RequestOptions
    chain: Chain
    arrival_s: float
    num_prompt: int = 0
    phase: Phase = Phase.WAITING
    num_computed: int = 0
    num_blocks: int = 0
    num_cached: int | None = None  # what did not have to be computed when it first ran
    num_saved_chunks: int = 0
    loaded_s: float = 0.0  # when the load is over

    def __post_init__(self) -> None:
        self.num_prompt = len(self.tokens)


@dataclass(slots=True)
class Step:
    """What one step does: who gets a token at its end, and which chunks may then be saved."""

    seconds: float = 0.0
    num_tokens: int = 0
    sampled: list[Sequence] = field(default_factory=list)
    computed_chunks: list[bytes] = field(default_factory=list)
    is_steady: bool = False
    """Every running sequence decodes one token, and none was preempted."""


class Found(NamedTuple):
    """Tokens that need not be computed; `stored_chunks` is what the pool has of the sequence."""

    local: int
    total: int
    stored_chunks: int


@dataclass(slots=True)
class BatchCounts:
    preemptions: int = 0
    expected: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Prompts with `expect_tokens`, by `expect_from` and outcome."""
    pool_hit_tokens: int = 0
    max_running: int = 0


class PrefixCache:
    """Chunks that the engine has itself, the longest unused leaving first."""

    def __init__(self, max_chunks: int) -> None:
        self._max_chunks = max_chunks
        self._chunks: OrderedDict[bytes, None] = OrderedDict()

    def count(self, hashes: Tokens[bytes]) -> int:
        """How many of the hashes it has before the first that it has not."""
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
    """All unfinished sequences of an engine."""

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
        """All that do not run, those that load among them."""
        return len(self.waiting) + len(self.loading) + len(self.loaded)

    @property
    def pool_is_up(self) -> bool | None:
        """None without a pool."""
        return None if self._pool is None else self._pool.is_up()

    @property
    def usage(self) -> float:
        """The part of the blocks that is taken."""
        return 1 - self.free_blocks / self._spec.kv_blocks

    def add(self, sequence: Sequence) -> None:
        """A request arrives."""
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """A sequence has finished or is given up; nothing happens if it is gone already."""
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
        """How many tokens of it are in the pool or on their way there."""
        return sequence.num_saved_chunks * self._spec.chunk_tokens

    def step(self, now: float) -> Step | None:
        """Choose what to compute; None if there is nothing, until `wake_s` or the next change."""
        self._take_loaded(now)
        step = Step()
        preemptions = self.counts.preemptions
        index = 0
        while index < len(self.running) and step.num_tokens < self._spec.max_num_batched_tokens:
            self._advance(self.running[index], step)
            index += 1
        # Who was preempted does not come back in the same step, unless nobody else has one.
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
        """How often a step may be done again alike, until blocks run out or a chunk is full.

        Until then nothing changes unless a sequence comes, goes, or `wake_s` is reached.
        """
        if not step.is_steady:
            return 0
        size, chunk, running = self._spec.block_size, self._spec.chunk_tokens, self.running
        slack = min(each.num_blocks * size - each.num_computed for each in running)
        to_chunk = min(chunk - each.num_computed % chunk for each in running)
        return min(to_chunk, slack + self.free_blocks // len(running) * size)

    def repeat(self, step: Step) -> None:
        """Do a steady step again, once for each token that its sequences have since been given."""
        for sequence in step.sampled:
            num_new = len(sequence.tokens) - sequence.num_computed
            taken = self._take_blocks(sequence, len(sequence.tokens))
            assert taken, "`max_repeats` sees to that"
            self._extend(sequence, num_new, step)

    def wake_s(self, now: float) -> float | None:
        """When, without any change, a step may be possible that was not just before `now`.

        What a sequence expected then may have come since, or its time may be over.
        """
        times = [sequence.loaded_s for sequence in self.loading]
        times += [now + POLL_S for each in self.waiting if self._wanted_chunks(each)][:1]
        return min(times, default=None)

    def _num_new(self, sequence: Sequence, step: Step) -> int:
        missing = len(sequence.tokens) - sequence.num_computed
        return min(missing, self._spec.max_num_batched_tokens - step.num_tokens)

    def _has_room(self, step: Step) -> bool:
        """Whether one more sequence may run."""
        is_full = len(self.running) >= self._spec.max_num_seqs
        return not is_full and step.num_tokens < self._spec.max_num_batched_tokens

    def _advance(self, sequence: Sequence, step: Step) -> None:
        """Compute more of a running sequence, or preempt it."""
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
        """So much more of it is computed: whole chunks are kept, and saved."""
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
        """Compute the first part of a sequence; False if there are no blocks for it."""
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
        """Let waiting sequences run or load, in their order, as far as all fits."""
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
            # Only who runs uses the cache: tries that fail leave its order as it is.
            self._cache.add(sequence.chain.hashes(sequence.tokens, found.local))
            self._count(sequence, found)
            self.waiting.popleft()
        self.waiting.extendleft(reversed(deferred))

    def _wanted_chunks(self, sequence: Sequence) -> int:
        """How many chunks it may wait for to be in the pool."""
        options = sequence.options
        if self._pool is None or not options.load or sequence.num_cached is not None:
            return 0
        return min(options.expect_tokens, sequence.num_prompt) // self._spec.chunk_tokens

    def _expects(self, sequence: Sequence, now: float) -> bool:
        """Whether it waits until the pool has more of it."""
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
        # The last token is always computed: what follows it is wanted.
        local = min(self._cache.count(hashes) * chunk, num_tokens - 1)
        return Found(local, max(local, min(stored * chunk, num_tokens - 1)), stored)

    def _load(self, sequence: Sequence, found: Found, now: float) -> bool:
        """Begin to load; False if there are no blocks for it."""
        # All that it needs for its first token, so that no load waits for the end of another.
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
        """What always holds."""
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
