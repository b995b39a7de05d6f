"""`memory://`: cells in this process's heap, for tests and for trying the package without a disk.

Owns shelves: a bounded table of immutable objects in order of use. Stores opened with one name
share one shelf, which lives as long as the process; a store without a name has its own.

Any thread may call; the shelf's lock guards the table only, bytes are copied outside it. An
object is replaced or dropped whole, so a reader that holds one is never disturbed.
Does not know urls (open.py) and survives nothing.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence

from vllm_kvpool.errors import ConfigError
from vllm_kvpool.store.base import Buffer, Capabilities, GetOutcome, PutOutcome

CAPABILITIES = Capabilities(
    name="memory",
    durable=False,
    remote=False,
    parallel_gets=1,
    parallel_puts=1,
    free_exists=True,
)


class Shelf:
    """At most `size_bytes` of objects; the least recently read or written go first."""

    def __init__(self, size_bytes: int) -> None:
        assert size_bytes > 0, size_bytes
        self.size_bytes = size_bytes
        self._lock = threading.Lock()
        self._objects: OrderedDict[str, bytes] = OrderedDict()
        self._used_bytes = 0

    def __contains__(self, key: str) -> bool:
        with self._lock:
            return key in self._objects

    def add(self, key: str, data: bytes) -> PutOutcome:
        """Keep `data` unless the key is taken, dropping the least recently used to make room."""
        with self._lock:
            if key in self._objects:
                return PutOutcome.EXISTED
            if len(data) > self.size_bytes:
                return PutOutcome.FULL
            while self._used_bytes + len(data) > self.size_bytes:
                _, dropped = self._objects.popitem(last=False)
                self._used_bytes -= len(dropped)
            self._objects[key] = data
            self._used_bytes += len(data)
            return PutOutcome.STORED

    def take(self, key: str) -> bytes | None:
        """The object, now the most recently used, or None."""
        with self._lock:
            data = self._objects.get(key)
            if data is not None:
                self._objects.move_to_end(key)
            return data

    def drop(self, key: str) -> bool:
        """Remove one key; False if it is absent."""
        with self._lock:
            data = self._objects.pop(key, None)
            self._used_bytes -= len(data or b"")
            return data is not None

    def list_keys(self) -> list[str]:
        """A copy of the keys, least recently used first."""
        with self._lock:
            return list(self._objects)

    def check(self) -> None:
        """Assert that the count equals the bytes held and keeps the bound."""
        with self._lock:
            held_bytes = sum(map(len, self._objects.values()))
            assert self._used_bytes == held_bytes <= self.size_bytes, (self._used_bytes, held_bytes)


_named: dict[str, Shelf] = {}
_named_lock = threading.Lock()


def open_shelf(name: str, size_bytes: int) -> Shelf:
    """The shelf of that name, made by the first who asks; without a name a new one."""
    if not name:
        return Shelf(size_bytes)
    with _named_lock:
        shelf = _named.setdefault(name, Shelf(size_bytes))
    if shelf.size_bytes != size_bytes:
        raise ConfigError(
            f"memory://{name} is already open in this process with size={shelf.size_bytes}; "
            f"use that size instead of {size_bytes}, or another name"
        )
    return shelf


class MemoryStore:
    """A view of one shelf; implements `Store`."""

    def __init__(self, name: str, size_bytes: int) -> None:
        self._shelf = open_shelf(name, size_bytes)

    @property
    def capabilities(self) -> Capabilities:
        return CAPABILITIES

    def register(self, buffer: Buffer) -> None:
        pass

    def unregister(self, buffer: Buffer) -> None:
        pass

    def exists(self, keys: Sequence[str]) -> list[bool]:
        return [key in self._shelf for key in keys]

    def put(
        self, keys: Sequence[str], buffers: Sequence[Buffer], groups: Sequence[str]
    ) -> list[PutOutcome]:
        assert len(keys) == len(buffers) == len(groups), (len(keys), len(buffers), len(groups))
        return [self._put(key, buffer) for key, buffer in zip(keys, buffers, strict=True)]

    def get(self, keys: Sequence[str], buffers: Sequence[Buffer]) -> list[GetOutcome]:
        assert len(keys) == len(buffers), (len(keys), len(buffers))
        return [self._get(key, buffer) for key, buffer in zip(keys, buffers, strict=True)]

    def remove(self, keys: Sequence[str]) -> int:
        return sum(self._shelf.drop(key) for key in keys)

    def remove_namespace(self, namespace: str) -> int:
        prefix = f"{namespace}@"
        return self.remove([key for key in self._shelf.list_keys() if key.startswith(prefix)])

    def close(self) -> None:
        pass

    def _put(self, key: str, buffer: Buffer) -> PutOutcome:
        if key in self._shelf:  # spares the copy; `add` decides
            return PutOutcome.EXISTED
        return self._shelf.add(key, buffer.view.tobytes())

    def _get(self, key: str, buffer: Buffer) -> GetOutcome:
        data = self._shelf.take(key)
        if data is None:
            return GetOutcome.MISSING
        if len(data) != buffer.nbytes:
            return GetOutcome.WRONG_SIZE
        buffer.view[:] = data
        return GetOutcome.OK
