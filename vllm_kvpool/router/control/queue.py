"""Requests that wait for a replica to compute their prompts (pure).

Ordered by priority, then by arrival. Tokens are counted exactly: whatever leaves the queue, by
being taken, cancelled or out of time, takes its tokens with it.
"""

import heapq

from vllm_kvpool.router.control.requests import Request, RequestId

SLACK = 64  # entries of requests that have left, before they are cleared away


class PromptQueue:
    """Owned by the controller. Operations cost about the logarithm of its length."""

    def __init__(self) -> None:
        self._waiting: dict[RequestId, Request] = {}
        # Entries whose request has left stay until they come up, or are too many.
        self._heap: list[tuple[tuple[int, int], RequestId]] = []
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
        heapq.heappush(self._heap, (request.order, request_id))
        self.tokens += request.ask.prompt_tokens
        self.uncached_tokens += request.uncached

    def head(self) -> Request | None:
        """Who is next."""
        while self._heap:
            request = self._waiting.get(self._heap[0][1])
            if request is not None:
                return request
            heapq.heappop(self._heap)
        return None

    def remove(self, request_id: RequestId) -> Request | None:
        """Take a request out, wherever it stands; None if it does not wait here."""
        request = self._waiting.pop(request_id, None)
        if request is not None:
            self.tokens -= request.ask.prompt_tokens
            self.uncached_tokens -= request.uncached
            if len(self._heap) > 2 * len(self._waiting) + SLACK:
                self._heap = [(each.order, key) for key, each in self._waiting.items()]
                heapq.heapify(self._heap)
        return request

    def check(self) -> None:
        """The counts are those of what waits, and little else is kept."""
        assert self.tokens == sum(each.ask.prompt_tokens for each in self._waiting.values())
        assert self.uncached_tokens == sum(each.uncached for each in self._waiting.values())
        assert {request_id for _, request_id in self._heap} >= self._waiting.keys()
        assert len(self._heap) <= 2 * len(self._waiting) + SLACK + 1
