"""A Mooncake client and a transfer engine with injected failures; they keep names, not bytes."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

NO_PARAMS = -600
FAILED = -800
RPC_FAILED = -900
NOT_FOUND = -704

REFUSED, ENDED, ENDED_BADLY = 0, 1, -1  # results of an engine's read


@dataclass(slots=True)
class FakeReplica:
    """A copy of an object, which is also its own descriptor."""

    transport_endpoint: str = "peer:1"
    buffer_address: int = 0
    size: int = 100
    is_in_memory: bool = True

    @property
    def buffer_descriptor(self) -> "FakeReplica":
        return self

    def is_memory_replica(self) -> bool:
        return self.is_in_memory

    def get_memory_descriptor(self) -> "FakeReplica":
        return self


class FakeMooncakeClient:
    """A client that keeps the size of each object; `calls` records each call and its keys."""

    def __init__(self) -> None:
        self.objects: dict[str, int] = {}
        self.calls: list[tuple[str, list[str]]] = []
        self.sessions: set[str] = set()
        self.start_codes: dict[str, int] = {}
        self.broken: set[str] = set()  # keys whose transfer fails
        self.ends = self.revokes = True  # False: the master does not answer these calls
        self.during_transfer: Callable[[], None] = lambda: None
        self.replicas: dict[str, list[FakeReplica]] = {}

    def _called(self, name: str, keys: list[str]) -> None:
        if keys:
            self.calls.append((name, keys))

    def batch_put_from(
        self, keys: list[str], addresses: list[int], sizes: list[int], config: object
    ) -> list[int]:
        self._called("put", keys)
        self.objects |= zip(keys, sizes, strict=True)
        return [0] * len(keys)

    def batch_put_session_start(
        self, keys: list[str], sizes: list[int], config: object
    ) -> list[int]:
        self._called("start", keys)
        codes = [
            NO_PARAMS if key in self.sessions else self.start_codes.get(key, 0) for key in keys
        ]
        self.sessions |= {key for key, code in zip(keys, codes, strict=True) if code == 0}
        return codes

    def batch_put_from_multi_buffer_ranges(
        self,
        keys: list[str],
        addresses: list[list[int]],
        sizes: list[list[int]],
        offsets: list[list[int]],
    ) -> list[int]:
        self._called("transfer", keys)
        self.during_transfer()
        assert offsets == [[0]] * len(keys)
        codes = []
        for key, [nbytes] in zip(keys, sizes, strict=True):
            is_open = key in self.sessions
            codes.append(FAILED if key in self.broken else nbytes if is_open else NO_PARAMS)
        return codes

    def batch_put_session_end(self, keys: list[str]) -> list[int]:
        self._called("end", keys)
        if not self.ends:
            return [RPC_FAILED] * len(keys)
        self.sessions -= set(keys)
        self.objects |= dict.fromkeys(keys, 0)
        return [0] * len(keys)

    def batch_put_session_revoke(self, keys: list[str]) -> list[int]:
        self._called("revoke", keys)
        if not self.revokes:
            return [RPC_FAILED] * len(keys)
        self.sessions -= set(keys)
        return [0] * len(keys)

    def batch_get_into(self, keys: list[str], addresses: list[int], sizes: list[int]) -> list[int]:
        self._called("get", keys)
        return [
            size if key in self.replicas else NOT_FOUND
            for key, size in zip(keys, sizes, strict=True)
        ]

    def batch_get_replica_desc(self, keys: list[str]) -> dict[str, list[FakeReplica]]:
        self._called("where", keys)
        return {key: self.replicas[key] for key in keys if key in self.replicas}


class FakeReadEngine:
    """An engine whose reads end in order, one for each `pause`. Keys are source addresses."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.refused: set[int] = set()
        self.broken: set[int] = set()
        self.most_flying = 0
        self.num_asked = 0
        self._num_landed = self._num_told = 0

    def batch_transfer_async_read(
        self, session: str, targets: list[int], sources: list[int], sizes: list[int]
    ) -> int:
        [source] = sources
        assert session in ("peer:1", "peer:2")
        if source in self.refused:
            return REFUSED
        self.begun.append(source)
        self.most_flying = max(self.most_flying, len(self.begun) - self._num_told)
        return len(self.begun)

    def transfer_check_status(self, number: int) -> int:
        self.num_asked += 1
        if number > self._num_landed:
            return 0
        self._num_told += 1
        return ENDED_BADLY if self.begun[number - 1] in self.broken else ENDED

    def pause(self, seconds: float) -> None:
        """End the next read; replaces `time.sleep`."""
        self._num_landed += 1
