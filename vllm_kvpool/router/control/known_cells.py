"""What the cells of prompts are called, as engines have told of those they have computed (pure).

A table of prompts by the hashes of their beginnings (`Ask.prefix`). Two prompts that begin alike
have the same first chunks, so what was told of one serves the other as far as they are alike.
Bounded: the prompts told least lately are forgotten.

An approximation: how many chunks a beginning has is reckoned from its bytes, and a chunk too many
is a chunk that nobody asks for.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_kvpool.identity.cell_names import ChunkNames, KeyPrefix
from vllm_kvpool.router.control.prefix_index import SPAN_BYTES, spans_of

MAX_CHUNKS = 1 << 17
MAX_SPANS = 1 << 16
MAX_LAYOUTS = 16
"""Different sets of stems: of models, adapters apart, and of engines' configurations."""


@dataclass(frozen=True, slots=True)
class _Prompt:
    prefix: tuple[int, ...]
    prompt_bytes: int
    key_prefixes: tuple[KeyPrefix, ...]
    chunks: tuple[str, ...]


class KnownCells:
    """Owned by the router's loop."""

    def __init__(self, max_chunks: int = MAX_CHUNKS, max_spans: int = MAX_SPANS) -> None:
        self._max_chunks = max_chunks
        self._max_spans = max_spans
        self._prompts: OrderedDict[int, _Prompt] = OrderedDict()  # by their longest beginning
        self._by_span: dict[int, int] = {}  # beginning -> a prompt that has it
        self._layouts: OrderedDict[tuple[KeyPrefix, ...], tuple[KeyPrefix, ...]] = OrderedDict()
        self.num_chunks = 0

    def __len__(self) -> int:
        return len(self._prompts)

    def learn(self, prefix: Sequence[int], prompt_bytes: int, names: ChunkNames) -> None:
        """An engine has told what a prompt's cells are called."""
        if not prefix or not names.chunks or not names.key_prefixes:
            return
        key = prefix[-1]
        self._forget(key)
        key_prefixes = self._interned(names.key_prefixes)
        self._prompts[key] = _Prompt(tuple(prefix), prompt_bytes, key_prefixes, names.chunks)
        self.num_chunks += len(names.chunks)
        for span in prefix:
            self._by_span[span] = key
        while self.num_chunks > self._max_chunks or len(self._by_span) > self._max_spans:
            self._forget(next(iter(self._prompts)))

    def find(self, prefix: Sequence[int]) -> ChunkNames | None:
        """The cells of the longest beginning that is known; None if none is."""
        for place in reversed(range(len(prefix))):
            key = self._by_span.get(prefix[place])
            if key is not None:
                prompt = self._prompts[key]
                return ChunkNames(prompt.key_prefixes, prompt.chunks[: _count(prompt, place + 1)])
        return None

    def _interned(self, key_prefixes: tuple[KeyPrefix, ...]) -> tuple[KeyPrefix, ...]:
        """The same, once in memory for all prompts."""
        known = self._layouts.setdefault(key_prefixes, key_prefixes)
        self._layouts.move_to_end(known)
        if len(self._layouts) > MAX_LAYOUTS:
            self._layouts.popitem(last=False)
        return known

    def _forget(self, key: int) -> None:
        prompt = self._prompts.pop(key, None)
        if prompt is None:
            return
        self.num_chunks -= len(prompt.chunks)
        for span in prompt.prefix:
            if self._by_span.get(span) == key:
                del self._by_span[span]

    def check(self) -> None:
        """What always holds."""
        assert self.num_chunks == sum(len(each.chunks) for each in self._prompts.values())
        assert self.num_chunks <= self._max_chunks
        assert len(self._by_span) <= self._max_spans
        assert all(span in self._prompts[key].prefix for span, key in self._by_span.items())


def _count(prompt: _Prompt, depth: int) -> int:
    """How many of a prompt's chunks so many of its beginnings have, begun ones included."""
    if depth == len(prompt.prefix):
        return len(prompt.chunks)
    share = spans_of(depth) * SPAN_BYTES / max(1, prompt.prompt_bytes)
    return min(len(prompt.chunks), int(len(prompt.chunks) * share) + 1)
