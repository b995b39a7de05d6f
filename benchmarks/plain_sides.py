"""Movers of plain buffers over Mooncake's own client, for what the transport itself can do."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import xxhash

from benchmarks.sides import native_client
from tests.support.buffers import make_buffer
from vllm_kvpool.storage.mooncake import import_wheel


class PlainSide:
    """One buffer per key."""

    def __init__(
        self, master: str, num_keys: int, key_bytes: int, batch: int, own_host: str = ""
    ) -> None:
        self._native = native_client(master, 0, own_host)
        self._num_keys, self._key_bytes, self._batch = num_keys, key_bytes, batch
        self._arena = make_buffer(num_keys * key_bytes)
        self._bytes = np.frombuffer(self._arena.view, np.uint8)
        self._wanted = np.random.default_rng(0).integers(0, 256, len(self._bytes), np.uint8)
        self._bytes[:] = self._wanted
        assert self._native.register_buffer(self._arena.address, self._arena.nbytes) == 0

    def shape(self) -> tuple[int, int]:
        return self._num_keys, self._key_bytes

    def wipe(self) -> None:
        self._bytes[:] = 0

    def check(self) -> None:
        assert np.array_equal(self._bytes, self._wanted)

    def save(self, seed: int, limit_s: float) -> float:
        config = import_wheel().ReplicateConfig()
        put = self._native.batch_put_from
        return self._move(seed, lambda _, *lists: put(*lists, config), wanted=0)

    def load(self, seed: int, limit_s: float) -> float:
        get = self._native.batch_get_into
        return self._move(seed, lambda _, *lists: get(*lists), wanted=self._key_bytes)

    def _move(self, seed: int, call: Callable[..., list[int]], wanted: int) -> float:
        """Seconds of all calls; each is told its first key's number, keys, addresses and sizes."""
        keys = [f"plain {seed} {i}" for i in range(self._num_keys)]
        addresses = [self._arena.address + i * self._key_bytes for i in range(self._num_keys)]
        sizes = [self._key_bytes] * self._num_keys
        start = time.perf_counter()
        for first in range(0, self._num_keys, self._batch):
            part = slice(first, first + self._batch)
            codes = call(first, keys[part], addresses[part], sizes[part])
            if any(code != wanted for code in codes):
                raise RuntimeError(f"codes {sorted(set(codes))}")
        return time.perf_counter() - start


class CopiedSide(PlainSide):
    """One buffer per key, copied and hashed before its put, hashed and copied after its get."""

    def __init__(self, master: str, num_keys: int, key_bytes: int, batch: int) -> None:
        super().__init__(master, num_keys, key_bytes, batch)
        self._pages = self._wanted.copy()
        self._sums = [0] * num_keys
        self._thread = ThreadPoolExecutor(1)

    def wipe(self) -> None:
        super().wipe()
        self._pages[:] = 0

    def check(self) -> None:
        super().check()
        assert np.array_equal(self._pages, self._wanted)

    def save(self, seed: int, limit_s: float) -> float:
        start = time.perf_counter()
        filled = [self._thread.submit(self._fill, part) for part in self._parts()]
        config = import_wheel().ReplicateConfig()

        def put(first: int, *lists: list[Any]) -> list[int]:
            filled[first // self._batch].result()
            return self._native.batch_put_from(*lists, config)  # type: ignore[no-any-return]

        self._move(seed, put, wanted=0)
        return time.perf_counter() - start

    def load(self, seed: int, limit_s: float) -> float:
        start = time.perf_counter()
        drained: list[Future[None]] = []
        parts = self._parts()

        def get(first: int, *lists: list[Any]) -> list[int]:
            codes: list[int] = self._native.batch_get_into(*lists)
            drained.append(self._thread.submit(self._drain, parts[first // self._batch]))
            return codes

        self._move(seed, get, wanted=self._key_bytes)
        for future in drained:
            future.result()
        return time.perf_counter() - start

    def _parts(self) -> list[range]:
        """The keys of each batch."""
        starts = range(0, self._num_keys, self._batch)
        return [range(i, min(i + self._batch, self._num_keys)) for i in starts]

    def _fill(self, keys: range) -> None:
        for i in keys:
            place = slice(i * self._key_bytes, (i + 1) * self._key_bytes)
            np.copyto(self._bytes[place], self._pages[place])
            self._sums[i] = xxhash.xxh3_64_intdigest(self._bytes[place].data)

    def _drain(self, keys: range) -> None:
        for i in keys:
            place = slice(i * self._key_bytes, (i + 1) * self._key_bytes)
            assert xxhash.xxh3_64_intdigest(self._bytes[place].data) == self._sums[i]
            np.copyto(self._pages[place], self._bytes[place])
