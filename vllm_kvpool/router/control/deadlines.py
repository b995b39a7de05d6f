"""When what waits has waited too long (pure)."""

import heapq
from collections.abc import Iterator

from vllm_kvpool.router.control.requests import RequestId

SLACK = 64  # entries of requests that wait no more, before they are cleared away


class Deadlines:
    """At most one for each request that waits. Owned by the controller."""

    def __init__(self) -> None:
        self._at: dict[RequestId, float] = {}
        # Entries that do not hold any more stay until they come up, or are too many.
        self._heap: list[tuple[float, RequestId]] = []

    def __len__(self) -> int:
        return len(self._at)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._at

    def set(self, request_id: RequestId, at: float) -> None:
        """It waits until then; for ever if that is infinite."""
        self.clear(request_id)
        if at < float("inf"):
            self._at[request_id] = at
            heapq.heappush(self._heap, (at, request_id))

    def clear(self, request_id: RequestId) -> None:
        """It does not wait any more."""
        self._at.pop(request_id, None)
        if len(self._heap) > 2 * len(self._at) + SLACK:
            self._heap = [(at, request_id) for request_id, at in self._at.items()]
            heapq.heapify(self._heap)

    def next(self) -> float:
        """When the first one passes."""
        while self._heap and self._at.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else float("inf")

    def take(self, now: float) -> Iterator[RequestId]:
        """Those that have passed, the first one first."""
        while self.next() <= now:
            request_id = self._heap[0][1]
            self.clear(request_id)
            yield request_id

    def check(self) -> None:
        """Each deadline will come up, and little else is kept."""
        assert {(at, request_id) for request_id, at in self._at.items()} <= set(self._heap)
        assert len(self._heap) <= 2 * len(self._at) + SLACK + 1
