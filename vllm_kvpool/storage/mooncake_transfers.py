"""Transfers of a Mooncake client over TCP whose waits sleep.

The client's batch calls poll without a pause until their transfer is done, and take a core from the
engine meanwhile. What is here returns what they return: a code for each key.
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any, Final, NamedTuple, Protocol, TypeGuard

from vllm_kvpool.storage.mooncake_engine import FAILED, REFUSED, WRITTEN, NativeEngine

OK: Final = 0
NOT_FOUND: Final = -704
TRANSFER_FAILED: Final = -800
READ_FAILED: Final = -1  # none of Mooncake's, as the master need not be asked for the size

TRANSFER_KEYS = 8  # of one native call
STALL_S = 4.0  # below `ENVIRONMENT`'s MC_TCP_PROGRESS_TIMEOUT_SEC

MAX_READS = 16  # in flight
# Reads of a peer that are in flight until one read has succeeded: Mooncake moves so many at a time.
FIRST_READS = 4
MIN_PAUSE_S = 50e-6
MAX_PAUSE_S = 1e-3
PAUSE_SHARE = 0.125  # of a read's time so far: its end is seen so late at most

Ranges = list[list[int]]  # by key


class PutClient(Protocol):
    """The part of the wheel's `MooncakeDistributedStore` that `PutSessions` uses."""

    def batch_put_from(
        self, keys: list[str], addresses: list[int], sizes: list[int], config: object
    ) -> list[int]:
        """Put whole objects; return for each key 0 or a negative error code."""

    def batch_put_session_start(
        self, keys: list[str], sizes: list[int], config: object
    ) -> list[int]:
        """Allocate space for puts; return for each key 0 or a negative error code."""

    def batch_put_from_multi_buffer_ranges(
        self, keys: list[str], addresses: Ranges, sizes: Ranges, offsets: Ranges
    ) -> list[int]:
        """Write parts of each object at `offsets`; return for each key bytes or an error."""

    def batch_put_session_end(self, keys: list[str]) -> list[int]:
        """Publish the objects; return for each key 0 or a negative error code."""

    def batch_put_session_revoke(self, keys: list[str]) -> list[int]:
        """Free the space of unpublished objects; return for each key 0 or an error."""


class PutSessions:
    """Puts in sessions, whose transfers sleep 10 us between two polls. Any thread may call.

    A client has one session of a key, so a call with a key that another call has one of goes by
    the batch call. So do for ever keys whose session could not be revoked, as the master was away:
    the client keeps it.
    """

    def __init__(self, client: PutClient, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._clock = clock
        self._lock = threading.Lock()  # guards what follows
        self._keys: set[str] = set()  # with a session

    def put(
        self, keys: list[str], addresses: list[int], sizes: list[int], config: object
    ) -> list[int]:
        """Store objects under different keys; as `batch_put_from`."""
        client = self._client
        left_open: list[str] = []
        with self._claim(keys, left_open) as is_claimed:
            if not is_claimed:
                return client.batch_put_from(keys, addresses, sizes, config)
            codes = client.batch_put_session_start(keys, sizes, config)
            started = [i for i, code in enumerate(codes) if code == OK]
            if not started:
                return codes
            for i, code in zip(started, self._move(keys, addresses, sizes, started), strict=True):
                codes[i] = code
            whole = [keys[i] for i in started if codes[i] == OK]
            ended = dict(zip(whole, client.batch_put_session_end(whole), strict=True))
            codes = [ended.get(key, code) for key, code in zip(keys, codes, strict=True)]
            failed = [keys[i] for i in started if codes[i] != OK]
            revoked = client.batch_put_session_revoke(failed)
            left_open += [k for k, code in zip(failed, revoked, strict=True) if code != OK]
            return codes

    def _move(
        self, keys: list[str], addresses: list[int], sizes: list[int], which: list[int]
    ) -> list[int]:
        """Write the bytes of those that have a session; OK or TRANSFER_FAILED for each.

        The client writes one object after the other, and waits long for each if its peer has
        fallen silent (`MC_TCP_PROGRESS_TIMEOUT_SEC`). So after a stall the rest fails at once.
        """
        codes: list[int] = []
        for start in range(0, len(which), TRANSFER_KEYS):
            part = which[start : start + TRANSFER_KEYS]
            began = self._clock()
            moved = self._client.batch_put_from_multi_buffer_ranges(
                [keys[i] for i in part],
                [[addresses[i]] for i in part],
                [[sizes[i]] for i in part],
                [[0] for _ in part],
            )
            wanted = [sizes[i] for i in part]
            pairs = zip(moved, wanted, strict=True)
            codes += [OK if nbytes == size else TRANSFER_FAILED for nbytes, size in pairs]
            if moved != wanted and self._clock() - began > STALL_S:
                break
        return codes + [TRANSFER_FAILED] * (len(which) - len(codes))

    @contextlib.contextmanager
    def _claim(self, keys: list[str], left_open: Sequence[str]) -> Iterator[bool]:
        """Hold the keys; yields True if no other call has a session of them.

        No other call gets a session of the keys meanwhile, nor later of keys in `left_open`.
        """
        with self._lock:
            is_free = self._keys.isdisjoint(keys)
            if is_free:
                self._keys.update(keys)
        try:
            yield is_free
        finally:
            if is_free:
                with self._lock:
                    self._keys.difference_update(set(keys).difference(left_open))


class GetClient(Protocol):
    """The part of the wheel's `MooncakeDistributedStore` that `EngineReads` uses."""

    def batch_get_into(self, keys: list[str], addresses: list[int], sizes: list[int]) -> list[int]:
        """Read whole objects; return for each key its bytes or a negative error code."""

    def batch_get_replica_desc(self, keys: list[str]) -> dict[str, Sequence[Any]]:
        """Return the complete copies of the keys that are there, and give these a lease.

        A copy is in memory or on a disk (`_in_memory`).
        """


class _Place(NamedTuple):
    session: str
    address: int
    nbytes: int


class _Read(NamedTuple):
    at: int  # of its key in the call
    target: int
    place: _Place


class _Flying(NamedTuple):
    at: int
    session: str
    number: int
    began: float


class EngineReads:
    """Gets by reads of a transfer engine, submitted and polled with pauses. Any thread may call.

    The master tells where objects lie, and at the end whether they lie there still: then they were
    not evicted meanwhile. `batch_get_into` copies objects of this process's own segment, whose
    session is `own_session`. It also gets objects that have no place in memory (any more), and
    tells which are missing.
    """

    def __init__(
        self,
        client: GetClient,
        open_engine: Callable[[], NativeEngine],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        own_session: str = "",
    ) -> None:
        self._client = client
        self._open_engine = open_engine
        self._own_session = own_session
        self._clock = clock
        self._sleep = sleep

    def get(self, keys: list[str], addresses: list[int], sizes: list[int]) -> list[int]:
        """Fetch objects of different keys into buffers of their size; as `batch_get_into`."""
        places = self._places(keys)
        reads = [
            _Read(i, addresses[i], place)
            for i, place in enumerate(places)
            if self._is_elsewhere(place) and place.nbytes == sizes[i]
        ]
        codes = [NOT_FOUND if place is None else place.nbytes for place in places]
        rest = [i for i, place in enumerate(places) if not self._is_elsewhere(place)]
        if reads:
            failed = self._read(reads)
            places_now = self._places([keys[read.at] for read in reads])
            for read, place_now in zip(reads, places_now, strict=True):
                if place_now is None:
                    rest.append(read.at)
                elif read.at in failed or place_now != read.place:
                    codes[read.at] = READ_FAILED
        if rest:
            got = self._client.batch_get_into(
                [keys[i] for i in rest], [addresses[i] for i in rest], [sizes[i] for i in rest]
            )
            for i, code in zip(rest, got, strict=True):
                codes[i] = code
        return codes

    def _is_elsewhere(self, place: _Place | None) -> TypeGuard[_Place]:
        """Return True if the object is in the memory of another process."""
        return place is not None and place.session != self._own_session

    def _places(self, keys: list[str]) -> list[_Place | None]:
        """Return the address of each key's object in memory."""
        replicas = self._client.batch_get_replica_desc(keys)
        return [_in_memory(replicas.get(key, ())) for key in keys]

    def _read(self, reads: Sequence[_Read]) -> set[int]:
        """Read objects; the places in the call of those that failed.

        After a stall the rest fails at once. Does not end before its reads do: of a silent
        peer, those behind the first four would stall after them.
        """
        engine, clock = self._open_engine(), self._clock
        waiting = deque(reads)
        flying: deque[_Flying] = deque()
        answered: set[str] = set()  # sessions of which a read has succeeded
        failed: set[int] = set()
        try:
            while waiting or flying:
                if waiting and _may_begin(waiting[0].place.session, flying, answered):
                    at, target, place = waiting.popleft()
                    began = clock()
                    number = engine.batch_transfer_async_read(
                        place.session, [target], [place.address], [place.nbytes]
                    )
                    if number != REFUSED:
                        flying.append(_Flying(at, place.session, number, began))
                        continue
                else:
                    at, session, _, began = flying[0]
                    is_whole = self._wait_for(engine, flying[0])
                    flying.popleft()
                    if is_whole:
                        answered.add(session)
                        continue
                failed.add(at)
                if clock() - began > STALL_S:
                    failed.update(read.at for read in waiting)
                    waiting.clear()
        finally:
            for each in flying:
                self._wait_for(engine, each)
        return failed

    def _wait_for(self, engine: NativeEngine, read: _Flying) -> bool:
        """Wait for the end of a read; whether it has moved all."""
        while True:
            status = engine.transfer_check_status(read.number)
            if status in (WRITTEN, FAILED):
                return status == WRITTEN
            pause_s = PAUSE_SHARE * (self._clock() - read.began)
            self._sleep(min(max(pause_s, MIN_PAUSE_S), MAX_PAUSE_S))


def _may_begin(session: str, flying: Sequence[_Flying], answered: Set[str]) -> bool:
    """Return True if a read of a session may begin beside those in flight."""
    num_of_it = sum(read.session == session for read in flying)
    return len(flying) < MAX_READS and (session in answered or num_of_it < FIRST_READS)


def _in_memory(replicas: Sequence[Any]) -> _Place | None:
    """Return the place of the first replica in memory."""
    for replica in replicas:
        if replica.is_memory_replica():
            found = replica.get_memory_descriptor().buffer_descriptor
            return _Place(found.transport_endpoint, found.buffer_address, found.size)
    return None
