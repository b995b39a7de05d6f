"""One `get` or one `put` of a `file://` store: from keys to transfers, from their ends to outcomes.

`DiskIO` draws from `transfers`, which opens one file after another, and each `Done` goes to
`finish`, so there are never more files open than transfers in flight. `close` releases what an
exception left open. A batch belongs to one thread.

With O_DIRECT the body goes straight between disk and the caller's buffer, if that starts on a page;
the tail always goes through a page of ours.
"""

import contextlib
import errno
import mmap
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np

from vllm_kvpool.storage.base import Buffer, ChunkRef, GetOutcome, PutOutcome
from vllm_kvpool.storage.file.format import (
    MAX_TAIL_BYTES,
    PAGE_BYTES,
    body_bytes,
    is_of,
    read_footer,
    tail_bytes,
    write_tail,
)
from vllm_kvpool.storage.file.index import CellRow, IndexBusy
from vllm_kvpool.storage.file.io import Done, Transfer
from vllm_kvpool.storage.file.paths import is_foreign
from vllm_kvpool.storage.file.space import FileSpace, SpaceReservation, row_of

TAILS_AT_A_TIME = 32
ROUND_BYTES = 4 << 20  # of a put: room for the next is made while the disk writes the last
ROUND_CELLS = 16  # and at most so many cells, as others wait for the index meanwhile
NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})

NO_FILE = frozenset({errno.ELOOP, errno.ENXIO})  # what opening a link or a socket says
# A directory or FIFO, opened for direct I/O; a file without permissions.
MAYBE_NO_FILE = frozenset({errno.EINVAL, errno.EACCES})

_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # or a FIFO would block


class Tails:
    """Memory for tails, each `MAX_TAIL_BYTES` from a page on; any thread.

    There are as many as transfers were ever in flight at a time, rounded up.
    """

    def __init__(self) -> None:
        self._free: list[Buffer] = []

    def take(self) -> Buffer:
        try:
            return self._free.pop()
        except IndexError:
            self._free += self._make()
            return self._free.pop()

    def give_back(self, tail: Buffer) -> None:
        self._free.append(tail)

    @staticmethod
    def _make() -> list[Buffer]:
        view = memoryview(mmap.mmap(-1, TAILS_AT_A_TIME * MAX_TAIL_BYTES))
        address = int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])
        starts = range(0, view.nbytes, MAX_TAIL_BYTES)
        return [Buffer(address + start, view[start : start + MAX_TAIL_BYTES]) for start in starts]


class Cell(NamedTuple):
    """A key with its buffer, and what follows from them."""

    key: str
    buffer: Buffer
    row: CellRow
    path: str
    body_bytes: int
    tail_bytes: int

    @classmethod
    def of(cls, key: str, buffer: Buffer, chunk: ChunkRef, space: FileSpace) -> Self:
        """A cell that is read or written, with its file's size."""
        body, tail = body_bytes(buffer.nbytes), tail_bytes(buffer.nbytes, key)
        row = row_of(key, chunk, space.charge_of(body + tail))
        return cls(key, buffer, row, space.path_of(row.namespace, row.name), body, tail)

    @property
    def file_bytes(self) -> int:
        return self.body_bytes + self.tail_bytes

    def parts(self, tail: Buffer) -> tuple[Buffer, ...]:
        """The file's memory: the body in the buffer, the tail in a page of ours."""
        end = Buffer(tail.address, tail.view[: self.tail_bytes])
        if self.body_bytes == 0:
            return (end,)
        return Buffer(self.buffer.address, self.buffer.view[: self.body_bytes]), end


def parts_of(
    cells: Mapping[int, Cell], most_bytes: int, most_cells: int
) -> Iterator[dict[int, Cell]]:
    """Cells in order, in parts of so many cells and bytes of files at most, or of one cell."""
    part: dict[int, Cell] = {}
    part_bytes = 0
    for i, cell in cells.items():
        if part and (part_bytes + cell.file_bytes > most_bytes or len(part) == most_cells):
            yield part
            part, part_bytes = {}, 0
        part[i] = cell
        part_bytes += cell.file_bytes
    if part:
        yield part


@dataclass(frozen=True, slots=True)
class FileStoreContext:
    """What all batches of a store act on."""

    space: FileSpace
    tails: Tails
    direct: bool
    warn: Callable[[OSError], None]

    def direct_flag(self, buffer: Buffer) -> int:
        """O_DIRECT if the file system and the memory's address allow it."""
        is_aligned = buffer.address % PAGE_BYTES == 0 or buffer.nbytes < PAGE_BYTES
        return os.O_DIRECT if self.direct and is_aligned else 0


class _Reading(NamedTuple):
    """A file being read."""

    fd: int
    path: str
    tail: Buffer
    inode: int  # as it was when it was opened


class _Writing(NamedTuple):
    """A file being written."""

    fd: int
    path: str
    tail: Buffer
    reservation: SpaceReservation
    number: int  # of the cell, in the reservation


class ReadBatch:
    """A `get`: `outcomes` are complete after the last `finish`."""

    def __init__(self, context: FileStoreContext, cells: Sequence[Cell]) -> None:
        self.outcomes = [GetOutcome.FAILED] * len(cells)
        self._context = context
        self._cells = cells
        self._guard = context.space.guard()
        self._open: dict[int, _Reading] = {}
        self.in_use = False
        """Whether buffers may still be written, of cells whose transfer was given up."""

    def transfers(self) -> Iterator[Transfer]:
        for i, cell in enumerate(self._cells):
            try:
                self._guard.check(cell.path)
                fd = os.open(cell.path, _READ | self._context.direct_flag(cell.buffer))
            except FileNotFoundError:
                self.outcomes[i] = GetOutcome.MISSING
                continue
            except OSError as error:
                self._context.warn(error)
                number = error.errno
                if number in NO_FILE or (number in MAYBE_NO_FILE and is_foreign(cell.path)):
                    self.outcomes[i] = GetOutcome.WRONG_SIZE
                continue
            status = os.fstat(fd)
            if status.st_size != cell.file_bytes or not stat.S_ISREG(status.st_mode):
                os.close(fd)
                self.outcomes[i] = GetOutcome.WRONG_SIZE
                continue
            os.set_blocking(fd, True)  # a ring may answer EAGAIN to what may not block
            tail = self._context.tails.take()
            self._open[i] = _Reading(fd, cell.path, tail, status.st_ino)
            yield Transfer(i, fd, cell.parts(tail), writes=False)

    def finish(self, done: Done) -> None:
        file = self._open.pop(done.tag)
        self.in_use |= done.in_use
        try:
            if done.error:
                self._context.warn(OSError(done.error, os.strerror(done.error), file.path))
            else:
                self.outcomes[done.tag] = self._accept(file, self._cells[done.tag])
        finally:
            if not done.in_use:  # else its number, too, is never to be used again
                os.close(file.fd)
                self._context.tails.give_back(file.tail)

    def close(self) -> None:
        for file in self._open.values():
            if not self.in_use:
                os.close(file.fd)

    def _accept(self, file: _Reading, cell: Cell) -> GetOutcome:
        # An object that was evicted meanwhile may have been written over before it was read.
        try:
            if os.lstat(file.path).st_ino != file.inode:
                return GetOutcome.MISSING
        except (FileNotFoundError, NotADirectoryError):
            return GetOutcome.MISSING
        last_page = file.tail.view[cell.tail_bytes - PAGE_BYTES : cell.tail_bytes]
        # A damaged file has no size that could be the buffer's; the caller removes it as such.
        if not is_of(read_footer(last_page), cell.key, cell.buffer.nbytes):
            return GetOutcome.WRONG_SIZE
        num_rest_bytes = cell.buffer.nbytes - cell.body_bytes
        cell.buffer.view[cell.body_bytes :] = file.tail.view[:num_rest_bytes]
        return GetOutcome.OK


class WriteBatch:
    """A `put`; fills in the outcomes of `cells`, by their numbers. They are FULL before.

    Room is made for one round at a time, each with a reservation of its own. `lost` are chunks for
    which there was no room: what comes after them is worth nothing, and not written.
    """

    def __init__(
        self,
        context: FileStoreContext,
        cells: Mapping[int, Cell],
        outcomes: list[PutOutcome],
        lost: set[str],
    ) -> None:
        self._context = context
        self._guard = context.space.guard()
        self._cells = cells
        self._outcomes = outcomes
        self._lost = lost
        self._open: dict[int, _Writing] = {}
        self._reservations: list[SpaceReservation] = []
        self.timeout: IndexBusy | None = None
        """Why some cells were not begun with."""
        self.in_use = False
        """Whether buffers may still be read, of cells whose transfer was given up."""

    def transfers(self) -> Iterator[Transfer]:
        for cells in parts_of(self._cells, ROUND_BYTES, ROUND_CELLS):
            for i in [i for i, cell in cells.items() if self._is_lost(cell.row.chunk)]:
                del cells[i]
            try:
                reservation = self._reserve(cells) if cells else None
            except IndexBusy as error:
                self.timeout = error  # what is being written can still end
                return
            if reservation is None:
                self._lost.update(cell.row.chunk.id for cell in cells.values())
                continue
            for number, i in enumerate(cells):
                transfer = self._begin(i, reservation, number)
                if transfer is not None:
                    yield transfer

    def _is_lost(self, chunk: ChunkRef) -> bool:
        if chunk.parent in self._lost:
            self._lost.add(chunk.id)
        return chunk.id in self._lost

    def _reserve(self, cells: Mapping[int, Cell]) -> SpaceReservation | None:
        space = self._context.space
        rows = [cell.row for cell in cells.values()]
        try:
            reservation = space.reserve(rows, [cell.file_bytes for cell in cells.values()])
        except OSError as error:
            self._context.warn(error)
            for i in cells:
                self._fail(i, error)
            return None
        if reservation is not None:
            self._reservations.append(reservation)
        return reservation

    def _begin(self, i: int, reservation: SpaceReservation, number: int) -> Transfer | None:
        if reservation.is_refused(number):
            return None
        cell = self._cells[i]
        try:
            flag = self._context.direct_flag(cell.buffer)
            fd, path = reservation.open_temp(cell.file_bytes, flag)
        except OSError as error:
            self._fail(i, error)
            return None
        tail = self._context.tails.take()
        self._open[i] = _Writing(fd, path, tail, reservation, number)
        parts = cell.parts(tail)
        chunk = cell.row.chunk
        write_tail(parts[-1].view, cell.buffer.view, cell.key, chunk.parent, chunk.position)
        return Transfer(i, fd, parts, writes=True)

    def finish(self, done: Done) -> None:
        i = done.tag
        file = self._open.pop(i)
        self.in_use |= done.in_use
        try:
            if done.error:
                raise OSError(done.error, os.strerror(done.error), file.path)
            cell = self._cells[i]
            self._guard.check(cell.path)
            published = self._context.space.publish(file.path, cell.path)
            file.reservation.stored.add(file.number)
            self._outcomes[i] = PutOutcome.STORED if published else PutOutcome.EXISTED
        except OSError as error:
            self._context.space.discard(file.path)
            self._fail(i, error)
        finally:
            if not done.in_use:  # else its number, too, is never to be used again
                os.close(file.fd)
                self._context.tails.give_back(file.tail)

    def close(self) -> None:
        with contextlib.ExitStack() as ends:
            for reservation in self._reservations:
                ends.callback(self._context.space.settle, reservation)
            for file in self._open.values():
                if not self.in_use:
                    os.close(file.fd)
                self._context.space.discard(file.path)

    def _fail(self, i: int, error: OSError) -> None:
        if error.errno in NO_ROOM:
            self._outcomes[i] = PutOutcome.FULL
        else:
            self._context.warn(error)
            self._outcomes[i] = PutOutcome.FAILED
