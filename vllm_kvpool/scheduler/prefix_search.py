"""The length of a prompt's stored prefix, found by few questions (pure).

A few chunks are asked for whole, at once. Of many, the first round asks for the last chunk, and for
one cell each of the first and up to `SAMPLES` chunks between; the second for all cells of the
chunks between the last sample found and the first missing. So two batched `exists` suffice for up
to 900 chunks. Eviction can leave a hole that no question meets; loads verify.

Layers that read only the last tokens need only the last chunks. So a prefix counts if the other
layers have all its chunks and these layers have the last ones; the longest such prefix is the hit.
With recurrent states the hit is cut to the largest boundary that has a state of every layer.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, cast

from vllm_kvpool.identity.keys import (
    CellKey,
    KeyMaker,
    LayerSpan,
    Namespace,
    chunk_id_of,
    with_weights,
)
from vllm_kvpool.layout.topology import LayerGroup
from vllm_kvpool.storage.contents.cell_format import HEADER_BYTES
from vllm_kvpool.transfer.ops import HostCacheChange

FANOUT = 7  # chunks asked for whole in a round
SAMPLES = 127  # chunks of which one cell is asked for in a round
WINDOW_SCAN = 64  # chunks asked for in a round, once some that windows need are missing


class ChunkQuestion(NamedTuple):
    """The question if a chunk is stored: all of its cells (`whole`), or one of them."""

    chunk: int
    whole: bool


class PrefixSearch:
    """Narrows [found, absent): chunks before `found` count as stored, chunk `absent` is not.

    With `gaps` a chunk may be stored although earlier ones are not; no samples are taken.
    """

    def __init__(self, num_chunks: int, *, gaps: bool = False) -> None:
        self.found = 0
        self._likely = 0  # chunks before it are stored by the samples; at least `found`
        self._absent = num_chunks
        self._first_round = True
        self._gaps = gaps
        self._samples = not gaps

    @property
    def done(self) -> bool:
        """True if the length is known."""
        return self.found >= self._absent

    def questions(self) -> tuple[ChunkQuestion, ...]:
        """Return the next questions, in ascending order; empty when the search is done."""
        if self.done:
            return ()
        low, high = self._likely, self._absent
        if self._first_round:
            if high - low <= FANOUT + 1:
                return tuple(ChunkQuestion(x, True) for x in range(low, high))
            last = ChunkQuestion(high - 1, True)
            if self._gaps:
                return (*(ChunkQuestion(x, True) for x in _spread(low, high - 1, FANOUT)), last)
            samples = (low, *_spread(low + 1, high - 1, SAMPLES))
            return (*(ChunkQuestion(x, False) for x in samples), last)
        if high - low > FANOUT:
            count = SAMPLES if self._samples else FANOUT
            return tuple(ChunkQuestion(x, not self._samples) for x in _spread(low, high, count))
        # The chunk of the last sample found, too: its other cells may be missing.
        return tuple(ChunkQuestion(x, True) for x in range(max(self.found, low - 1), high))

    def answer(
        self, questions: "Sequence[ChunkQuestion | Question]", present: Sequence[bool]
    ) -> None:
        """Take the answers to `questions`."""
        self._first_round = False
        for question, there in zip(questions, present, strict=True):
            if there:
                self._likely = question.chunk + 1
                if question.whole:
                    self.found = question.chunk + 1
            elif not self._gaps:
                self._absent = question.chunk
                break
        if self._gaps:
            later = [each.chunk for each in questions if each.chunk >= self.found]
            self._absent = min(later, default=self._absent)
        if self._likely > self._absent:  # a sample was found, its chunk is not whole
            self._likely = self.found
            self._samples = False


def _spread(start: int, stop: int, count: int) -> tuple[int, ...]:
    """Return up to `count` numbers of [start, stop), evenly apart."""
    width = max(0, stop - start)
    if width <= count:
        return tuple(range(start, stop))
    return tuple(start + width * i // (count + 1) for i in range(1, count + 1))


class Question(NamedTuple):
    """The question if a chunk's cells in a layer group (its index) are stored: all, or one."""

    chunk: int
    layer_group: int
    whole: bool = True


class Tail(NamedTuple):
    """The last chunk of a hit that ends inside a chunk: an end, or another prompt's chunk.

    `position` counts the whole chunks before it. Its first `tokens` tokens are the prompt's.
    `cell_tokens`: tokens of an end, which has fewer than a chunk; 0: a whole chunk.
    """

    position: int
    chunk_hash: bytes
    tokens: int
    cell_tokens: int

    @property
    def is_end(self) -> bool:
        """True if all its tokens are the prompt's: it is named by them."""
        return self.tokens == self.cell_tokens


class TailSearch:
    """The search for the first of a few chunks that is stored whole.

    `found` counts this chunk and those behind it. A question's `chunk` is an index here. Layer
    groups whose cells are optional are left out.
    """

    def __init__(self, num_chunks: int, layer_groups: Sequence[LayerGroup]) -> None:
        needed = [i for i, each in enumerate(layer_groups) if not each.is_optional]
        self._width = len(needed)
        self._questions = tuple(Question(c, i) for c in range(num_chunks) for i in needed)
        self.found = 0
        self.done = False

    @property
    def attention(self) -> int:
        """The same chunks as `found`."""
        return self.found

    def questions(self) -> "tuple[Question, ...]":
        """Return all questions at once; none after the answer."""
        return () if self.done else self._questions

    def answer(self, questions: "Sequence[Question]", present: Sequence[bool]) -> None:
        """Take the answers to `questions`."""
        width = self._width
        whole = [all(present[i : i + width]) for i in range(0, len(present), width)]
        self.found = len(whole) - whole.index(True) if any(whole) else 0
        self.done = True


def largest_boundary(bound: int, step: int, is_missing: Callable[[int], bool]) -> int:
    """Return the largest multiple of `step` up to `bound` whose state is not missing.

    The result is 0 if there is none.
    Both count chunks before the boundary.
    """
    boundaries = range(bound - bound % step, 0, -step)
    return next((boundary for boundary in boundaries if not is_missing(boundary)), 0)


class HitSearch:
    """The search for chunks that can be loaded, over all layer groups of a model.

    Loads begin and end at multiples of `block` tokens, or one token before the prompt's end. With
    recurrent states they end at a boundary, a multiple of `block` whose state is stored: the caller
    leaves out chunks after which no token would be left to compute. Up to the first `exact_chunks`
    chunks of what is found are asked for whole. `num_tokens`: all tokens, where the last chunk may
    have fewer than the others (a prompt's end). Layer groups whose cells are optional are left out.
    """

    def __init__(
        self,
        num_chunks: int,
        layer_groups: Sequence[LayerGroup],
        chunk_tokens: int,
        block: int,
        exact_chunks: int = 0,
        *,
        num_tokens: int | None = None,
    ) -> None:
        self._num_tokens = num_chunks * chunk_tokens if num_tokens is None else num_tokens
        needed = [(i, each) for i, each in enumerate(layer_groups) if not each.is_optional]
        self._states = [i for i, each in needed if each.is_state]
        attention = [(i, each) for i, each in needed if not each.is_state]
        self._windows = [i for i, each in attention if not each.window.is_full]
        whole = [i for i, each in attention if each.window.is_full]
        self._anchors = whole or self._windows
        self._whole = whole
        self._exact_chunks = exact_chunks
        self._prefix = PrefixSearch(num_chunks, gaps=not whole)
        self._tails = {i for i, each in attention if each.tail_tokens}
        self._window_of = [layer_group.window for layer_group in layer_groups]
        self._chunk_tokens = chunk_tokens
        self._block = block
        self._step = math.lcm(chunk_tokens, block) // chunk_tokens  # chunks between boundaries
        self._known: dict[Question, bool] = {}
        # Chunks, once the prefix of the layers that read all is known.
        self._bound: int | None = None if self._anchors else num_chunks
        self._attention: int | None = None  # chunks, once the windows are known, too
        self._scan = False
        self._narrow()

    @property
    def found(self) -> int:
        """The number of chunks that can be loaded, by the answers so far; final when `done`."""
        return self._prefix.found if self._bound is None else self._bound

    @property
    def attention(self) -> int:
        """The number of chunks that could be loaded without recurrent states."""
        return self.found if self._attention is None else self._attention

    @property
    def done(self) -> bool:
        """True if no answer can make the hit longer."""
        return self._bound is not None and not self._unknown() and not self._unknown_states()

    def questions(self) -> tuple[Question, ...]:
        """Return the next questions; empty when the search is done."""
        if self._bound is None:
            return tuple(
                Question(chunk, layer_group, whole)
                for chunk, whole in self._prefix.questions()
                for layer_group in self._anchors
            )
        unknown = self._unknown()
        if not unknown:
            return self._state_questions()
        if self._scan:
            first = max(0, self._bound - WINDOW_SCAN)
            around = [Question(c, k) for c in range(first, self._bound) for k in self._windows]
            unknown = sorted({*unknown, *(q for q in around if q not in self._known)})
        return tuple(unknown)

    def answer(self, questions: Sequence[Question], present: Sequence[bool]) -> None:
        """Take the answers to `questions`."""
        if self._bound is None:
            width = len(self._anchors)
            there = [all(present[i : i + width]) for i in range(0, len(present), width)]
            self._prefix.answer(questions[::width], there)
        self._known.update(zip(questions, present, strict=True))
        self._narrow()

    def _narrow(self) -> None:
        if self._bound is None:
            if not self._prefix.done:
                return
            self._bound = self._prefix.found
        while True:
            # A missing chunk is needed by every later end, too.
            while missing := [q.chunk for q in self._wanted() if self._known.get(q) is False]:
                self._bound = min(missing)
                self._scan = True
            if self._unknown():
                return
            if self._attention is None:
                self._attention = self._bound
            if not self._states:
                return
            boundary = largest_boundary(self._bound, self._step, self._has_no_state)
            if boundary == self._bound:
                return
            self._bound = boundary

    def _has_no_state(self, boundary: int) -> bool:
        """Return True if a cell of the states after so many chunks is known to be missing."""
        chunk = boundary - 1
        return self._known.get(self._sample(chunk)) is False or any(
            self._known.get(Question(chunk, layer_group)) is False for layer_group in self._states
        )

    def _sample(self, chunk: int) -> Question:
        return Question(chunk, self._states[0], whole=False)

    def _unknown_states(self) -> list[Question]:
        """Return the questions about states at the bound that have no answer yet."""
        if not self._bound:
            return []
        wanted = [Question(self._bound - 1, layer_group) for layer_group in self._states]
        return [question for question in wanted if question not in self._known]

    def _state_questions(self) -> tuple[Question, ...]:
        """Return questions for every state at the bound, and one for each earlier boundary."""
        unknown = self._unknown_states()
        if not unknown:
            return ()
        assert self._bound is not None
        if self._known.get(self._sample(self._bound - 1)) is None:
            earlier = range(self._bound - self._step, 0, -self._step)[:SAMPLES]
            samples = [self._sample(boundary - 1) for boundary in earlier]
            unknown += [question for question in samples if question not in self._known]
        return tuple(unknown)

    def _wanted(self) -> list[Question]:
        """Return the cells that a load up to the bound needs and no question has covered.

        Of layers that read all: the chunks of an exact search that were not asked for whole. Of
        other layers: the chunks in their windows.
        """
        assert self._bound is not None
        exact = range(min(self._bound, self._exact_chunks))
        wanted = [Question(chunk, layer_group) for chunk in exact for layer_group in self._whole]
        # The load ends there or, without states, up to a block before.
        slack = 0 if self._states else self._block
        stop = max(0, min(self._bound * self._chunk_tokens, self._num_tokens) - slack)
        for layer_group in self._windows:
            if layer_group in self._tails:
                wanted += [Question(self._bound - 1, layer_group)] if self._bound else []
                continue
            first = self._window_of[layer_group].first_read(stop) // self._block * self._block
            chunks = range(first // self._chunk_tokens, self._bound)
            wanted += [Question(chunk, layer_group) for chunk in chunks]
        return wanted

    def _unknown(self) -> list[Question]:
        return [question for question in self._wanted() if question not in self._known]


class HostCacheIndex:
    """The chunks that ranks have reported to be in their host memory.

    The scheduler's thread writes; the lookup thread reads, by one operation of a dictionary and one
    of a set. An entry that is out of date costs a call to a store, or a load that fetches from it.
    """

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._ranks_of: dict[str, set[int]] = {}  # by chunk id

    def apply(self, rank: int, change: HostCacheChange) -> None:
        """Record the chunks that came into a rank's host memory, and those that left."""
        for chunk_id in change.added:
            self._ranks_of.setdefault(chunk_id, set()).add(rank)
        for chunk_id in change.removed:
            ranks = self._ranks_of.get(chunk_id)
            if ranks is not None:
                ranks.discard(rank)
                if not ranks:
                    del self._ranks_of[chunk_id]

    def has(self, chunk_id: str) -> bool:
        """Return True if every rank has the chunk."""
        return len(self._ranks_of.get(chunk_id, ())) == self.num_ranks > 0

    def clear(self) -> None:
        """Forget all chunks of all ranks."""
        self._ranks_of.clear()


class CellNames:
    """The keys of all cells of a chunk: all heads, spans and context-parallel ranks."""

    def __init__(self, namespace: Namespace, layer_groups: Sequence[LayerGroup]) -> None:
        self.namespace = namespace
        self.layer_groups = tuple(layer_groups)
        self._key_prefixes = tuple(
            tuple(key_prefix for key_prefix, _ in self._cells_of(layer_group))
            for layer_group in layer_groups
        )

    def _cells_of(self, layer_group: LayerGroup) -> Iterator[tuple[str, LayerSpan]]:
        """Yield the key prefix and the span of each cell of a chunk."""
        for rank in layer_group.topology.context.all_ranks():
            keys = KeyMaker(self.namespace, rank)
            for span in layer_group.topology.all_spans():
                for shard in layer_group.topology.all_shards():
                    yield keys.key_prefix(shard, span), span

    @property
    def anchor(self) -> int:
        """The layer group that stands for a chunk: its layers read the whole prompt, if any do."""
        needed = [i for i, each in enumerate(self.layer_groups) if not each.is_optional]
        return min(needed, key=lambda i: not self.layer_groups[i].window.is_full)

    def with_weights(self, weights_version: str) -> "CellNames":
        """Return the same cells under another version of the weights."""
        if not weights_version:
            return self
        return CellNames(with_weights(self.namespace, weights_version), self.layer_groups)

    def chunk_id(self, chunk_hash: bytes, layer_group: int = 0) -> str:
        """Return the id of a chunk's cells of one layer group together."""
        return chunk_id_of(self.namespace, chunk_hash.hex(), self.layer_groups[layer_group].name)

    def are_in(self, host: HostCacheIndex, chunk_hash: bytes) -> bool:
        """Return True if host memory has the cells of a chunk that each later token reads."""
        return all(
            host.has(self.chunk_id(chunk_hash, i))
            for i, each in enumerate(self.layer_groups)
            if each.window.is_full and not (each.is_state or each.is_optional)
        )

    def of_questions(
        self, questions: Iterable[Question], hashes: Sequence[bytes]
    ) -> tuple[list[CellKey], list[int]]:
        """Return the keys to ask for, and where those of each question end.

        `hashes`: of all chunks.
        A loop without calls, for hundreds of questions at a time.
        """
        keys: list[str] = []
        ends: list[int] = []
        for chunk, layer_group, whole in questions:
            text = hashes[chunk].hex()
            key_prefixes = self._key_prefixes[layer_group]
            if whole:
                keys += [key_prefix + text for key_prefix in key_prefixes]
            else:
                # Another cell for each chunk, so that cells missing of all chunks are noticed.
                keys.append(key_prefixes[chunk % len(key_prefixes)] + text)
            ends.append(len(keys))
        return cast("list[CellKey]", keys), ends

    def exact_chunks(self, max_keys: int) -> int:
        """Return the number of chunks whose every key fits into `max_keys`."""
        cells = sum(
            len(key_prefixes)
            for layer_group, key_prefixes in zip(self.layer_groups, self._key_prefixes, strict=True)
            if not (layer_group.is_state or layer_group.is_optional) and layer_group.window.is_full
        )
        return max_keys // cells if cells else 0

    def key_prefixes(self, chunk_tokens: int) -> tuple[tuple[str, int], ...]:
        """Return the key prefixes of every chunk's cells, with the bytes of those cells."""
        return tuple(
            (key_prefix, HEADER_BYTES + layer_group.payload_bytes(span, chunk_tokens))
            for layer_group in self.layer_groups
            for key_prefix, span in self._cells_of(layer_group)
        )

    def of_chunk(self, chunk_hash: bytes, layer_group: int = 0) -> list[CellKey]:
        """Return the keys of a chunk's cells in a layer group."""
        return self.of_questions((Question(0, layer_group),), (chunk_hash,))[0]
