"""A stand-in for Mooncake's transfer engine in one process. The test decides how writes end.

A write copies its bytes when it ends, not when it begins. Memory that is reused too early therefore
shows wrong bytes. Misuse that the real engine does not tolerate is an AssertionError:

* Registered regions overlap.
* A write has no bytes.
* A write uses unregistered memory.
* A write reads memory that another write still reads.
* A status check follows the report of a write's end.

Any thread may call.
"""

import ctypes
import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum


class Fate(Enum):
    """The outcome of a write."""

    LANDS = "lands"
    """The write ends at the second status check."""
    FAILS = "fails"
    HANGS = "hangs"
    """The write ends when the test calls `land`."""
    IS_REFUSED = "is_refused"


@dataclass(slots=True)
class FakeWrite:
    """A write; `num_asked` is the number of status checks."""

    source: int
    target: int
    nbytes: int
    fate: Fate
    num_asked: int = 0
    is_over: bool = False
    is_told: bool = False


class FakeTransferEngine:
    """The engine; `fate` returns the outcome of each write, given its index."""

    RPC_PORT = 12_345

    def __init__(self, fate: Callable[[int], Fate] = lambda index: Fate.LANDS) -> None:
        self.fate = fate
        self.is_reachable = True
        self.num_probes = 0
        self.regions: dict[int, int] = {}
        self.writes: list[FakeWrite] = []
        self._lock = threading.Lock()

    def open(self, host: str) -> "FakeTransferEngine":
        """Return this engine, for `use_engine_of`."""
        return self

    def initialize(self, hostname: str, metadata: str, protocol: str, device: str) -> int:
        return 0

    def get_rpc_port(self) -> int:
        return self.RPC_PORT

    def get_engine(self) -> object:
        return self

    def register_memory(self, address: int, nbytes: int) -> int:
        with self._lock:
            assert nbytes > 0
            for start, size in self.regions.items():
                assert address + nbytes <= start or start + size <= address, "regions overlap"
            self.regions[address] = nbytes
        return 0

    def unregister_memory(self, address: int) -> int:
        with self._lock:
            del self.regions[address]
        return 0

    def send_probe(self, session: str) -> int:
        self.num_probes += 1
        return 0 if self.is_reachable else -1

    def transfer_submit_write(self, session: str, source: int, target: int, nbytes: int) -> int:
        with self._lock:
            fate = self.fate(len(self.writes))
            assert nbytes > 0
            assert self._covers(source, nbytes), "the source is not registered"
            assert self._covers(target, nbytes), "the target is not registered"
            for other in self.writes:
                if not other.is_over:
                    apart = other.source + other.nbytes <= source or source + nbytes <= other.source
                    assert apart, "another write still reads this memory"
            if fate is Fate.IS_REFUSED:
                return 0
            self.writes.append(FakeWrite(source, target, nbytes, fate))
            return len(self.writes)

    def transfer_check_status(self, number: int) -> int:
        with self._lock:
            write = self.writes[number - 1]
            assert not write.is_told, "asked about after its end"
            write.num_asked += 1
            if write.fate is Fate.FAILS:
                write.is_over = write.is_told = True
                return -1
            if write.fate is Fate.LANDS and write.num_asked == 2:
                self._move(write)
            write.is_told = write.is_over
            return 1 if write.is_over else 0

    def land(self, write: FakeWrite) -> None:
        """End a hanging write: copy its memory's present bytes."""
        with self._lock:
            assert write.fate is Fate.HANGS
            assert not write.is_over
            self._move(write)

    def flying_bytes(self) -> int:
        """Return the number of bytes in writes that have not ended."""
        with self._lock:
            return sum(write.nbytes for write in self.writes if not write.is_over)

    def _move(self, write: FakeWrite) -> None:
        ctypes.memmove(write.target, write.source, write.nbytes)
        write.is_over = True

    def _covers(self, address: int, nbytes: int) -> bool:
        return any(a <= address and address + nbytes <= a + n for a, n in self.regions.items())
