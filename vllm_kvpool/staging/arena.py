"""The memory of one worker that cells pass through and stay in: one allocation, registered once.

It is cut into equal slots at multiples of `SLOT_ALIGNMENT`: some for cells in flight, the others
for the host tier. Buffers are views that keep the memory alive. The first touch of a page costs
more than all later copies through it. So the slots for cells in flight are committed at once, the
host tier by `commit_in_background`: it takes seconds for many GiB.
"""

import contextlib
import ctypes
import fcntl
import logging
import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from vllm_kvpool.errors import ConfigError
from vllm_kvpool.host_memory import huge_pages_left
from vllm_kvpool.layout.pages import Int64s
from vllm_kvpool.staging.slots import Slot
from vllm_kvpool.storage.base import Buffer
from vllm_kvpool.storage.contents.cell_format import HEADER_BYTES

logger = logging.getLogger(__name__)

SLOT_ALIGNMENT = 4096
MIN_SLOTS = 8
MAX_SLOTS = 8192  # for cells in flight
COMMIT_STEP_BYTES = 64 << 20
CLOSE_WAIT_S = 2.0
HUGE_PAGE_BYTES = 2 << 20
_MAP_HUGETLB = 0x40000
MEMBER_BITS = 32  # of a slot's number; the bits above tell whose slot it is
_PLACE = (1 << MEMBER_BITS) - 1
_MADV_POPULATE_WRITE = 23  # since Linux 5.14


def slot_bytes(cell_bytes: int) -> int:
    """Return the size of a slot for cells of so many bytes."""
    return -(-cell_bytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT


class Arena:
    """Slots of one cell of `cell_bytes` each, in host memory.

    `staging_nbytes` are for cells in flight, `host_nbytes` for the host tier, `spare_nbytes` for
    other uses (`spare`). The arena begins and ends at multiples of `alignment` bytes, a power of
    two. `memory_from(n)` may provide n bytes as writable uint8; with None the arena allocates them:
    in huge pages if the system has set any aside, else in transparent ones if it grants them; if
    `shared` in a memory file without a name, which other ranks on this host map (`add_member`).
    """

    def __init__(
        self,
        staging_nbytes: int,
        cell_bytes: int,
        host_nbytes: int = 0,
        *,
        spare_nbytes: int = 0,
        alignment: int = SLOT_ALIGNMENT,
        memory_from: Callable[[int], memoryview | None] = lambda nbytes: None,
        shared: bool = False,
    ) -> None:
        assert alignment % SLOT_ALIGNMENT == 0, alignment
        self.slot_bytes = slot_bytes(cell_bytes)
        count = min(staging_nbytes // self.slot_bytes, MAX_SLOTS)
        if count < MIN_SLOTS:
            raise ConfigError(
                f"staging_bytes holds {count} cells of {cell_bytes} bytes, {MIN_SLOTS} are needed; "
                f"set staging_bytes to {MIN_SLOTS * self.slot_bytes} or more, or lower layer_span "
                "or chunk_tokens"
            )
        self.num_kept = host_nbytes // self.slot_bytes
        if host_nbytes and not self.num_kept:
            raise ConfigError(
                f"host://{host_nbytes} holds no cell of {cell_bytes} bytes; give it "
                f"{self.slot_bytes} bytes or more, or lower layer_span or chunk_tokens"
            )
        self.num_slots = count + self.num_kept
        slots_nbytes = self.num_slots * self.slot_bytes
        nbytes = -(-(slots_nbytes + spare_nbytes) // alignment) * alignment
        slack = alignment if alignment > SLOT_ALIGNMENT else 0
        given = memory_from(nbytes + alignment)
        self.descriptor: int | None = None
        """The descriptor of the memory file, if the arena is one; owned by the arena."""
        self._memory: mmap.mmap | memoryview
        if given is not None:
            self._memory = given
        else:
            try:
                self._memory, self.descriptor = _allocate(nbytes + slack, self.num_kept > 0, shared)
            except OSError as error:
                raise ConfigError(
                    f"staging_bytes={staging_nbytes} and host://{host_nbytes} ask for memory that "
                    f"the system refuses ({error}); lower them, or raise its limit (ulimit -v, "
                    "vm.overcommit_memory)"
                ) from error
        address = int(np.frombuffer(self._memory, np.uint8).__array_interface__["data"][0])
        start = self.file_start = -address % alignment
        # By owner: this rank, then members by number: addresses of first slots, bytes of a slot.
        self._owners = np.array([[address + start, self.slot_bytes]], np.int64)
        self._num_slots_of: dict[int, int] = {}
        self._mapped: list[Buffer] = []  # slots of members
        self.whole = Buffer(address + start, memoryview(self._memory)[start : start + nbytes])
        self.spare = Buffer(
            self.whole.address + slots_nbytes,
            self.whole.view[slots_nbytes : slots_nbytes + spare_nbytes],
        )
        self._committed = 0
        self._threads: list[threading.Thread] = []
        self._acting = threading.Lock()
        self._closing = False
        self._commit(count * self.slot_bytes)

    def buffers(self, slots: Sequence[Slot], sizes: Sequence[int]) -> list[Buffer]:
        """Return the first bytes of slots, as many of each as `sizes` says."""
        address, step = self.whole.address, self.slot_bytes
        numbered = zip(slots, self.views(slots, sizes), strict=True)
        return [Buffer(address + slot * step, view) for slot, view in numbered]

    def views(self, slots: Sequence[Slot], sizes: Sequence[int]) -> list[memoryview]:
        """Return the views of `buffers`, without their addresses."""
        view, step = self.whole.view, self.slot_bytes
        return [
            view[slot * step : slot * step + nbytes]
            for slot, nbytes in zip(slots, sizes, strict=True)
        ]

    def payload_addresses(self, slots: Sequence[Slot]) -> Int64s:
        """Return the addresses of the cell payloads in these slots, as int64."""
        numbers = np.array(slots, np.int64)
        owners = self._owners[numbers >> MEMBER_BITS]
        addresses: Int64s = (numbers & _PLACE) * owners[:, 1] + owners[:, 0] + HEADER_BYTES
        return addresses

    def add_member(
        self,
        number: int,
        descriptor: int,
        start: int,
        slot_bytes: int,
        num_slots: int,
        on_mapped: Callable[[Buffer], None] | None,
    ) -> None:
        """Map the memory file of another rank, whose slots begin at `start`; ValueError if short.

        The mapping is read-only, unless `on_mapped`, which page-locks it part by part, is called.
        """
        if not 0 <= start <= start + num_slots * slot_bytes <= os.fstat(descriptor).st_size:
            raise ValueError("its memory file is shorter than its slots")
        prot = mmap.PROT_READ | (mmap.PROT_WRITE if on_mapped else 0)
        memory = mmap.mmap(descriptor, 0, prot=prot)
        address = int(np.frombuffer(memory, np.uint8).__array_interface__["data"][0]) + start
        owners = np.zeros((max(len(self._owners), number + 2), 2), np.int64)
        owners[: len(self._owners)] = self._owners
        owners[number + 1] = address, slot_bytes
        self._owners, self._num_slots_of[number] = owners, num_slots
        slots = Buffer(address, memoryview(memory)[start : start + num_slots * slot_bytes])
        self._mapped.append(slots)
        if on_mapped:
            self._in_background(self._each_part, slots, slot_bytes, on_mapped)

    @property
    def num_mapped_bytes(self) -> int:
        """Bytes of this arena, and of other ranks' slots."""
        return self.whole.nbytes + sum(slots.nbytes for slots in self._mapped)

    def member_slots(self, number: int, slots: Sequence[int]) -> tuple[Slot, ...]:
        """Return the slots of another rank as `payload_addresses` takes them, or ValueError."""
        if slots and not 0 <= min(slots) <= max(slots) < self._num_slots_of.get(number, 0):
            raise ValueError("slots beyond the end of its memory")
        return tuple(Slot((number + 1 << MEMBER_BITS) + slot) for slot in slots)

    def commit_in_background(self, then: Callable[[Buffer], None] | None = None) -> None:
        """Commit the rest, in a thread that ends when it is done or the arena is closed.

        It calls `then` with each part, of whole slots, of the whole arena in order.
        """
        if then is not None or self._committed < self.whole.nbytes:
            self._in_background(self._commit_rest, then)

    def _in_background(self, work: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=work, args=args, name="kvpool-arena", daemon=True)
        self._threads.append(thread)
        thread.start()

    def close(self) -> bool:
        """End the thread that commits memory; False if it does not end within `CLOSE_WAIT_S`."""
        self._closing = True
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None
        until = time.monotonic() + CLOSE_WAIT_S
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _commit_rest(self, then: Callable[[Buffer], None] | None) -> None:
        began = time.monotonic()

        def commit(part: Buffer) -> None:
            stop = part.address + part.nbytes - self.whole.address
            if stop > self._committed:
                self._commit(stop)
            if then is not None:
                then(part)

        self._each_part(self.whole, self.slot_bytes, commit)
        logger.info(
            "kvpool: staging memory and host tier are committed: %d MiB in %.1f s",
            self._committed >> 20,
            time.monotonic() - began,
        )

    def _each_part(self, whole: Buffer, slot_bytes: int, act: Callable[[Buffer], None]) -> None:
        """Call `act` with parts of whole slots, in order, until the arena is closed.

        One thread calls at a time.
        """
        step = max(1, COMMIT_STEP_BYTES // slot_bytes) * slot_bytes
        for start in range(0, whole.nbytes, step):
            if self._closing:
                return
            with self._acting:
                act(Buffer(whole.address + start, whole.view[start : start + step]))

    def _commit(self, stop: int) -> None:
        start, self._committed = self._committed, stop
        first = start - start % mmap.PAGESIZE
        # Without the GIL, and without changing the contents of slots in use.
        if _madvise(self.whole.address + first, stop - first, _MADV_POPULATE_WRITE):
            return
        if start == 0:  # an old kernel: writing is safe only before slots are in use
            np.frombuffer(self.whole.view[:stop], np.uint8)[:: mmap.PAGESIZE] = 0


def _madvise(address: int, nbytes: int, advice: int) -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    result = libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), ctypes.c_int(advice))
    return bool(result == 0)


Mapped = tuple[mmap.mmap, int | None]
"""Memory, and its descriptor if it is a memory file."""


def _allocate(nbytes: int, large: bool, shared: bool) -> Mapped:
    if shared:
        try:
            return _in_large_pages(nbytes, large, _mapped_file)
        except OSError as error:
            logger.warning(
                "kvpool: staging memory cannot be shared with other ranks on this host: %s", error
            )
    return _in_large_pages(nbytes, large, _mapped_privately)


def _in_large_pages(nbytes: int, large: bool, mapped: Callable[[int, bool], Mapped]) -> Mapped:
    """Return memory in huge pages if `large` is set and enough are free.

    Otherwise return memory in transparent huge pages.
    """
    rounded = -(-nbytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    if large and rounded <= huge_pages_left():
        try:
            memory = mapped(rounded, True)
        except OSError:
            logger.info("kvpool: no huge pages are set aside; trying transparent ones")
        else:
            logger.info("kvpool: %d MiB of staging memory in huge pages", rounded >> 20)
            return memory
    memory = mapped(nbytes, False)
    with contextlib.suppress(OSError):  # a kernel without transparent huge pages
        memory[0].madvise(mmap.MADV_HUGEPAGE)
    return memory


def _mapped_privately(nbytes: int, is_huge: bool) -> Mapped:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (_MAP_HUGETLB if is_huge else 0)
    return mmap.mmap(-1, nbytes, flags), None


def _mapped_file(nbytes: int, is_huge: bool) -> Mapped:
    """Return memory without a name, which ends with the last process that maps it."""
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | (os.MFD_HUGETLB if is_huge else 0)
    descriptor = os.memfd_create("kvpool", flags)
    try:
        os.ftruncate(descriptor, nbytes)
        memory = mmap.mmap(descriptor, nbytes)
        # No one may shrink it, which would kill its readers.
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except OSError:
        os.close(descriptor)
        raise
    return memory, descriptor
