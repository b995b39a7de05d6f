"""Requests that wait for a replica to compute their prompts (pure).

Ordered by priority, then by arrival. Tokens are counted exactly: whatever leaves the queue, by
being taken, cancelled or out of time, takes its tokens with it.
"""

import heapq
from collections.abc import Collection

from vllm_kvpool.router.control.requests import Request, RequestId

SLACK = 64  # entries of requests that have left, before they are cleared away


class PromptQueue:
    """Owned by the controller. Operations cost about the logarithm of its length."""

    def __init__(self) -> None:
        self._waiting: dict[RequestId, Request] = {}
        # By model: a model's requests do not wait for those of another. Entries whose request has
        # left stay until they come up, or are too many.
        self._heaps: dict[str, list[tuple[tuple[int, int], RequestId]]] = {}
        self.tokens = 0
        """Prompt tokens of all that wait."""
        self.uncached_tokens = 0
        """Those of them to be computed."""

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._waiting

    def append(self, request: Request) -> None:
        request_id = request.ask.request_id
        assert request_id not in self._waiting
        self._waiting[request_id] = request
        heap = self._heaps.setdefault(request.ask.model, [])
        heapq.heappush(heap, (request.order, request_id))
        self.tokens += request.ask.prompt_tokens
        self.uncached_tokens += request.uncached

    def head(self, without: Collection[str] = ()) -> Request | None:
        """Who is next, of all models but some."""
        heads = [self._head(model) for model in list(self._heaps) if model not in without]
        return min((each for each in heads if each), key=lambda each: each.order, default=None)

    def _head(self, model: str) -> Request | None:
        heap = self._heaps[model]
        while heap:
            request = self._waiting.get(heap[0][1])
            if request is not None:
                return request
            heapq.heappop(heap)
        del self._heaps[model]
        return None

    def remove(self, request_id: RequestId) -> Request | None:
        """Take a request out, wherever it stands; None if it does not wait here."""
        request = self._waiting.pop(request_id, None)
        if request is not None:
            self.tokens -= request.ask.prompt_tokens
            self.uncached_tokens -= request.uncached
            if sum(map(len, self._heaps.values())) > 2 * len(self._waiting) + SLACK:
                self._heaps.clear()
                for key, each in self._waiting.items():
                    self._heaps.setdefault(each.ask.model, []).append((each.order, key))
                for heap in self._heaps.values():
                    heapq.heapify(heap)
        return request

    def check(self) -> None:
        """The counts are those of what waits, and little else is kept."""
        assert self.tokens == sum(each.ask.prompt_tokens for each in self._waiting.values())
        assert self.uncached_tokens == sum(each.uncached for each in self._waiting.values())
        entries = [key for heap in self._heaps.values() for _, key in heap]
        assert set(entries) >= self._waiting.keys()
        assert len(entries) <= 2 * len(self._waiting) + SLACK + 1
