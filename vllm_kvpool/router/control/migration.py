"""Requests whose prompts are in the pool, waiting for a replica that decodes (pure).

What BlitzScale's migration queue does between two replicas' memories, through the pool: the source
has let go of its blocks as soon as they were gathered, so an entry holds a handle, not memory.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from vllm_kvpool.router.control.requests import Request, RequestId
from vllm_kvpool.router.control.states import ReplicaId


class _Entry(NamedTuple):
    request: Request
    source: ReplicaId | None  # None: not computed yet


class MigrationQueue:
    """Owned by the controller."""

    def __init__(self) -> None:
        self._entries: dict[RequestId, _Entry] = {}
        self._ready: list[tuple[tuple[int, int], RequestId]] = []  # in order
        self._sources: Counter[ReplicaId | None] = Counter()
        self.tokens = 0
        """Prompt tokens of all that wait."""

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._entries

    def append(self, request: Request, source: ReplicaId | None) -> None:
        """A prompt is in the pool, or needs not be."""
        request_id = request.ask.request_id
        assert request_id not in self._entries
        self._entries[request_id] = _Entry(request, source)
        self.tokens += request.ask.prompt_tokens
        self._sources[source] += 1
        insort(self._ready, (request.order, request_id))

    def ready(self, most: int | None = None) -> list[Request]:
        """What may be handed over, in the order of priority and arrival; the first so many."""
        return [self._entries[request_id].request for _, request_id in self._ready[:most]]

    def remove(self, request_id: RequestId) -> bool:
        """Take an entry out; False if there is none."""
        entry = self._entries.pop(request_id, None)
        if entry is None:
            return False
        self.tokens -= entry.request.ask.prompt_tokens
        del self._ready[bisect_left(self._ready, (entry.request.order, request_id))]
        self._sources[entry.source] -= 1
        if not self._sources[entry.source]:
            del self._sources[entry.source]
        return True

    def flush(self, source: ReplicaId) -> Iterator[Request]:
        """Those that a replica has computed, which is about to decode them itself."""
        for request in self.ready():
            if self._entries[request.ask.request_id].source == source:
                yield request

    def num_from(self, source: ReplicaId | None) -> int:
        """Entries that this replica has computed; with None those not computed yet."""
        return self._sources[source]

    def check(self) -> None:
        """The counts are those of the entries."""
        entries = self._entries.items()
        assert self.tokens == sum(each.request.ask.prompt_tokens for _, each in entries)
        assert self._ready == sorted((each.request.order, key) for key, each in entries)
        sources = Counter(each.source for _, each in entries)
        assert self._sources == sources
        assert len(self._sources) == len(sources)
