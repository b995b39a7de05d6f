"""Requests whose prompts are in the pool, waiting for a replica that decodes (pure).

What BlitzScale's migration queue does between two replicas' memories, through the pool: the source
has let go of its blocks as soon as they were gathered, so an entry holds a handle, not memory. A
prompt computed in two parts, cut between two of the pool's chunks, is appended in two parts; it is
ready when both are there.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from vllm_kvpool.router.requests import Request, RequestId
from vllm_kvpool.router.states import ReplicaId


@dataclass(slots=True)
class _Entry:
    request: Request
    source: ReplicaId | None  # of the last part; None: nobody has computed it before
    tokens: int
    is_ready: bool


class MigrationQueue:
    """Owned by the controller."""

    def __init__(self) -> None:
        self._entries: dict[RequestId, _Entry] = {}
        self._ready: list[tuple[tuple[int, int], RequestId]] = []  # in order
        self._sources: Counter[ReplicaId | None] = Counter()
        self.tokens = 0
        """Prompt tokens of all that wait, of those ready and not."""

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._entries

    def append(self, request: Request, source: ReplicaId | None) -> None:
        """A prompt is there whole."""
        self._add(request, source, request.ask.prompt_tokens, is_ready=True)

    def append_first(self, request: Request, source: ReplicaId) -> None:
        """The first part of a prompt is there; the other one follows."""
        assert 0 < request.split_at < request.ask.prompt_tokens
        self._add(request, source, request.split_at, is_ready=False)

    def append_second(self, request: Request, source: ReplicaId) -> None:
        """The rest is there, too, whoever has computed it."""
        first = self._entries[request.ask.request_id]
        assert not first.is_ready
        self.remove(request.ask.request_id)
        self.append(request, source)

    def _add(
        self, request: Request, source: ReplicaId | None, tokens: int, *, is_ready: bool
    ) -> None:
        request_id = request.ask.request_id
        assert request_id not in self._entries
        self._entries[request_id] = _Entry(request, source, tokens, is_ready)
        self.tokens += tokens
        self._sources[source] += 1
        if is_ready:
            insort(self._ready, (request.order, request_id))

    def ready(self, most: int | None = None) -> list[Request]:
        """What may be handed over, in the order of priority and arrival; the first so many."""
        return [self._entries[request_id].request for _, request_id in self._ready[:most]]

    def consume(self, request_id: RequestId) -> ReplicaId | None:
        """Take a ready entry out; its source."""
        entry = self._entries[request_id]
        assert entry.is_ready
        self.remove(request_id)
        return entry.source

    def remove(self, request_id: RequestId) -> bool:
        """Take an entry out, ready or not; False if there is none."""
        entry = self._entries.pop(request_id, None)
        if entry is None:
            return False
        self.tokens -= entry.tokens
        if entry.is_ready:
            del self._ready[bisect_left(self._ready, (entry.request.order, request_id))]
        self._sources[entry.source] -= 1
        if not self._sources[entry.source]:
            del self._sources[entry.source]
        return True

    def flush(self, source: ReplicaId) -> Iterator[Request]:
        """Those ready that a replica has computed, which is about to decode them itself."""
        for request in self.ready():
            if self._entries[request.ask.request_id].source == source:
                yield request

    def num_from(self, source: ReplicaId | None) -> int:
        """Entries, ready or not, that a replica has computed, or (None) nobody."""
        return self._sources[source]

    def check(self) -> None:
        """The counts are those of the entries."""
        entries = self._entries.items()
        assert self.tokens == sum(each.tokens for _, each in entries)
        assert self._ready == sorted((e.request.order, key) for key, e in entries if e.is_ready)
        sources = Counter(each.source for _, each in entries)
        assert self._sources == sources
        assert len(self._sources) == len(sources)
