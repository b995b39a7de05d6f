"""A decode engine's end of the notices' channel whose calls are in a queue."""

import queue
from collections.abc import Callable

from tests.support.waiting import wait_until
from vllm_kvpool.handover.consumer import NoticeClient
from vllm_kvpool.metrics import MetricsRegistry
from vllm_kvpool.network.allowed_peers import AllowedPeers

SOON_S = 20.0
QUIET_S = 0.3
LOST = "lost"
Heard = tuple[bytes, int, int | None] | tuple[bytes, str]


class Client:
    """A client whose calls are in a queue; `answers`: topics of which nothing is stored yet."""

    def __init__(self, allowed: AllowedPeers | None = None) -> None:
        self.registry = MetricsRegistry()
        self._heard: queue.SimpleQueue[Heard] = queue.SimpleQueue()
        self.answers: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.client = NoticeClient(
            allowed or AllowedPeers(),
            self.registry,
            self._hear,
            lambda topic: self._heard.put((topic, LOST)),
        )
        self.watch, self.unwatch, self.close = (
            self.client.watch,
            self.client.unwatch,
            self.client.close,
        )

    def _hear(self, topic: bytes, stored: int, ended: int | None) -> None:
        if (stored, ended) == (0, None):
            self.answers.put(topic)
        else:
            self._heard.put((topic, stored, ended))

    def hears(self, timeout_s: float = SOON_S) -> Heard:
        return self._heard.get(timeout=timeout_s)

    def hears_nothing(self) -> bool:
        try:
            self._heard.get(timeout=QUIET_S)
        except queue.Empty:
            return True
        return False

    def count(self, event: str) -> float:
        return self.registry.snapshot().get(f"kvpool_notices{{side=decode,event={event}}}", 0)


def wait_for(is_so: Callable[[], bool]) -> None:
    wait_until(is_so, SOON_S)
