"""Which cells are brought near for whom, and for how long (pure).

While replicas of a host load, the cells of the prompts they are bound to are brought into the files
of that host, by one process there: begun with the first prompt of which the cells are known, told
of each chunk once, ended when none of those replicas loads any more. `KnownCells` has what engines
have told of prompts that begin alike; it is an approximation.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from vllm_kvpool.identity.cell_names import ChunkNames, KeyPrefix
from vllm_kvpool.router.control.fleet import Fleet
from vllm_kvpool.router.control.prefix_index import SPAN_BYTES, spans_of
from vllm_kvpool.router.control.states import NEW

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


MAX_HOSTS = 16
"""At a time: as many processes at most."""
MAX_TOLD_CHUNKS = 1 << 16
"""To one process."""

Prefix = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Begin:
    """Start a process on a host."""

    host: str


@dataclass(frozen=True, slots=True)
class Bring:
    """Tell it of cells."""

    host: str
    names: ChunkNames


@dataclass(frozen=True, slots=True)
class End:
    """It is not wanted any more."""

    host: str


Wish = Begin | Bring | End


@dataclass(slots=True)
class _Host:
    told: set[str] = field(default_factory=set)
    """Chunks, by their hashes."""
    has_ended: bool = False


class HostPrefetches:
    """Owned by the router's loop. `hosts`: those on which there is anything to be brought."""

    def __init__(self, hosts: Iterable[str], known: KnownCells) -> None:
        self._hosts = frozenset(hosts)
        self._known = known
        self._begun: dict[str, _Host] = {}

    def look(self, fleet: Fleet) -> list[Wish]:
        """What is to be done by now, in this order."""
        new = fleet.in_states(NEW)
        if not new and not self._begun:
            return []
        bound: dict[str, list[Prefix]] = {}
        for replica in new:
            if replica.spec.is_ours and replica.spec.host in self._hosts:
                prefixes = [request.ask.prefix for request in replica.bound]
                bound.setdefault(replica.spec.host, []).extend(prefixes)
        return self.step(bound)

    def step(self, bound: Mapping[str, Sequence[Prefix]]) -> list[Wish]:
        """`bound`: the prompts that wait for replicas, by the host on which those load."""
        over = sorted(self._begun.keys() - bound.keys())
        wishes: list[Wish] = [End(name) for name in over if not self._begun.pop(name).has_ended]
        for name, prefixes in bound.items():
            for prefix in prefixes:
                wishes += self._of_prompt(name, prefix)
        return wishes

    def ended(self, host: str) -> None:
        """Its process is gone, by itself."""
        if host in self._begun:
            self._begun[host].has_ended = True

    def _of_prompt(self, name: str, prefix: Prefix) -> list[Wish]:
        host = self._begun.get(name)
        if (host is None and len(self._begun) >= MAX_HOSTS) or (host and host.has_ended):
            return []
        names = self._known.find(prefix)
        told: set[str] = host.told if host is not None else set()
        # A chunk's hash is of all tokens up to its end: it says enough.
        new = tuple(each for each in names.chunks if each not in told) if names else ()
        if names is None or not new or len(told) + len(new) > MAX_TOLD_CHUNKS:
            return []
        wishes: list[Wish] = [Bring(name, ChunkNames(names.key_prefixes, new))]
        if host is None:
            host = self._begun[name] = _Host()
            wishes.insert(0, Begin(name))
        host.told.update(new)
        return wishes
