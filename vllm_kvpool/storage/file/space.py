"""The space of a `file://` store: reserving it, temporary files, publishing, deleting; thread-safe.

Owns in `{root}/kvpool-v4` `index` (index.py), `objects/` (names are store.py's), `writers/{id}/`
(one for each open store: its temporary and recycled files, and a lock held meanwhile) and locks. A
put reserves, deletes the files of evicted chunks, writes, publishes and closes the reservation; no
lock is held while a file is written, read or deleted. Evicted files are written over, as that takes
a fifth of the time of deleting and creating. A reader with an open file checks after the read that
the name still leads to this file; the check is reliable on file systems of one host only.

One thread writes hits, finishes what killed writers began and rebuilds the index; `close` ends it.
"""

import contextlib
import errno
import fcntl
import logging
import os
import re
import secrets
import stat
import struct
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from hashlib import blake2b
from itertools import count, islice

from vllm_kvpool.errors import StoreError
from vllm_kvpool.identity.keys import chunk_id_of_key, namespace_of
from vllm_kvpool.storage.base import ChunkRef
from vllm_kvpool.storage.eviction import EvictionPolicy, Shares
from vllm_kvpool.storage.file.file_system import NO_ROOM, file_system_of
from vllm_kvpool.storage.file.format import PAGE_BYTES, Footer, file_bytes, read_footer
from vllm_kvpool.storage.file.index import FileIndex, Reservation
from vllm_kvpool.storage.file.paths import (
    DirectoryGuard,
    HeldLock,
    OnUnlisted,
    check_root,
    create_file,
    directories,
    entries,
    is_own,
    make_directory,
    may_be_there,
    open_lock,
    open_to_overwrite,
    rename_new,
    take_away_foreign,
)
from vllm_kvpool.storage.file.rows import (
    FOREIGN,
    ID_BYTES,
    MAX_ROWS,
    MAX_TIME_NS,
    NAME_DIGEST_BYTES,
    StoredCell,
    is_directory_of_cells,
    new_cell,
)

logger = logging.getLogger(__name__)

FORMAT_DIR = "kvpool-v4"
INDEX_FILE = "index"
LOCK_FILE = "lock"  # of a writer's directory
NO_TENANT = "-"  # the owner of cells without a tenant, where tenants share the room
RESERVE_ATTEMPTS = 3  # the directory or its index may be missing at first
PUBLISH_ATTEMPTS = 4  # others may remove the directory made for an object
DISK_FREE_SHARE = 0.02  # of the disk stays free, so that the index can be written
DISK_FREE_BYTES = 1 << 30  # at most
DISK_FREE_FILES = 1024  # at most; the share is of the files, too
REFUSED_BYTES = 64 << 20  # evicted at most, beyond what is needed, once a file is refused
INDEX_ROOM_BYTES = 1 << 20  # freed at a time, without the index, where it has no room
MAX_LISTED = 4096  # files, of which the oldest then go
RECYCLED_SHARE = 1 / 64  # of the size; at most so much is kept for later puts
HITS_EVERY_S = 1.0  # how late other processes learn of hits
LOOK_EVERY_S = 10.0  # for killed writers and an incomplete index
OPENING_S = 60.0  # a writer's directory that is unnamed for longer was abandoned
SHRINK_STEPS = 64  # transactions that evict for one reservation
END_S = 2.0

_NO_RENAME_NEW = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EPERM})
_FOUND = struct.Struct(f">q{NAME_DIGEST_BYTES}sq{ID_BYTES}s{ID_BYTES}sI")  # sorts by time
_NO_PARENT = bytes(ID_BYTES)
READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # or a FIFO would block


class Closing(Exception):
    """The store is being closed while its index is rebuilt."""


class RecycledFiles:
    """Files of evicted cells in a writer's directory, to be written over; thread-safe.

    At most `max_bytes` are kept for later puts.
    """

    def __init__(self, max_bytes: int, unit_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._unit_bytes = unit_bytes
        self._lock = threading.Lock()
        self._paths: defaultdict[int, list[str]] = defaultdict(list)

    def charged_bytes(self, sizes: Iterable[int] = ()) -> int:
        """Return the files' charge, less that of the files which files of `sizes` will reuse."""
        wanted = Counter(sizes)
        with self._lock:
            return sum(
                max(len(paths) - wanted[size], 0) * charge_of(size, self._unit_bytes)
                for size, paths in self._paths.items()
            )

    def add(self, path: str, nbytes: int) -> None:
        """Keep a file of `nbytes` to be written over."""
        with self._lock:
            self._paths[nbytes].append(path)

    def take(self, nbytes: int) -> str | None:
        """Return the path of a kept file of exactly `nbytes`, which the caller owns, or None."""
        with self._lock:
            return self._paths[nbytes].pop() if self._paths[nbytes] else None

    def trim(self, room_bytes: int, sizes: Iterable[int]) -> None:
        """Delete the files that no put of `sizes` will reuse.

        As many more files of the same sizes stay as there is room for.
        """
        wanted = Counter(sizes)
        spare_bytes = min(self._max_bytes, room_bytes)
        with self._lock:
            for size, paths in self._paths.items():
                while len(paths) > wanted[size]:
                    charge_bytes = (len(paths) - wanted[size]) * charge_of(size, self._unit_bytes)
                    if size in wanted and charge_bytes <= spare_bytes:
                        spare_bytes -= charge_bytes
                        break
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(paths.pop())


class WriterDirectory:
    """The directory of one open store among the writers, until `close`."""

    def __init__(self, writers: str) -> None:
        # Its name begins with a dot until it is locked: others would take it for a dead writer's.
        self.name = secrets.token_hex(8)
        unlocked = os.path.join(writers, f".{self.name}")
        make_directory(unlocked)
        self.path = os.path.join(writers, self.name)
        with contextlib.ExitStack() as undo:
            undo.callback(_remove_writer, unlocked)
            self._lock = HeldLock(os.path.join(unlocked, LOCK_FILE))
            undo.callback(self._lock.release)
            self._lock.take()
            os.rename(unlocked, self.path)
            undo.pop_all()
        self._lock_path = os.path.join(self.path, LOCK_FILE)
        self._names = count()

    @property
    def is_usable(self) -> bool:
        """False if the directory was removed."""
        return not os.path.islink(self.path) and os.path.exists(self._lock_path)

    def name_temp(self) -> str:
        """Return a path that this writer has not used before."""
        return f"{self.path}/{next(self._names)}"

    def close(self) -> None:
        """Remove the directory; every reservation must be closed."""
        _remove_writer(self.path)
        self._lock.release()


_WRITER = re.compile(r"\.?[0-9a-f]{16}", re.ASCII)
_TEMP = re.compile(r"[0-9]{1,20}|probe-[0-9a-f]{16}", re.ASCII)  # `name_temp`, `io.probe`


def _remove_writer(writer: str) -> None:
    """Remove a writer's directory, unless it holds files of others."""
    _delete_temps(writer)
    with contextlib.suppress(OSError):
        if not os.path.islink(writer) and os.listdir(writer) == [LOCK_FILE]:
            os.unlink(os.path.join(writer, LOCK_FILE))
    with contextlib.suppress(OSError):
        if not os.path.islink(writer):
            os.rmdir(writer)


def _delete_temps(writer: str) -> None:
    """Delete the temporary and recycled files of a writer."""
    with contextlib.suppress(OSError):
        for entry in entries(writer):
            with contextlib.suppress(OSError):
                if _TEMP.fullmatch(entry.name) and is_own(entry.stat(follow_symlinks=False)):
                    os.unlink(entry.path)


def disk_room(root: str, file_bytes: int) -> int:
    """Return the bytes that the disk has for more files of `file_bytes` each.

    The result is below 0 where the disk has too few bytes or inodes left.
    """
    disk = os.statvfs(root)
    left_free = min(int(disk.f_blocks * DISK_FREE_SHARE) * disk.f_frsize, DISK_FREE_BYTES)
    room_bytes = disk.f_bavail * disk.f_frsize - left_free
    if disk.f_files:  # 0 where inodes are made as they are needed
        kept_files = min(int(disk.f_files * DISK_FREE_SHARE), DISK_FREE_FILES)
        room_bytes = min(room_bytes, (disk.f_favail - kept_files) * file_bytes)
    return room_bytes


class FileSpace:
    """The space of one open store; its owner closes it."""

    def __init__(
        self,
        root: str,
        size_bytes: int,
        policy: EvictionPolicy,
        clock_ns: Callable[[], int],
        shares: Shares = Shares.NONE,
    ) -> None:
        self.root = root
        self._shares = shares
        self.size_bytes = size_bytes
        self.unit_bytes = os.statvfs(root).f_frsize
        self._base = os.path.join(root, FORMAT_DIR)
        self.objects = os.path.join(self._base, "objects")
        self._writers = os.path.join(self._base, "writers")
        self._rebuild_lock = HeldLock(os.path.join(self._base, "rebuild.lock"))
        self._renames_new = True  # False where the file system lacks RENAME_NOREPLACE
        self._name_lock = os.path.join(self._base, "name.lock")
        self._restore_lock = threading.Lock()
        # The last one is in use; earlier ones may still have files of reservations under way.
        self._own: list[WriterDirectory] = []
        self._is_local = file_system_of(root).is_local
        self._recycled = RecycledFiles(int(size_bytes * RECYCLED_SHARE), self.unit_bytes)
        self._unclosed: deque[Reservation] = deque()
        self._has_quota = False  # as far as is known
        self._closing = threading.Event()
        self._woken = threading.Event()
        self._index: FileIndex | None = None
        self._thread: threading.Thread | None = None
        try:
            try:
                self._open_index(policy, clock_ns)
            except OSError as error:
                if error.errno not in NO_ROOM or not self._make_room_to_open():
                    raise
                self._open_index(policy, clock_ns)
            self._reclaim()
            self._complete_if_empty()
        except BaseException:  # the caller may retry
            self.close()
            raise
        self._thread = threading.Thread(target=self._maintain, name="kvpool-files", daemon=True)
        self._thread.start()

    def _open_index(self, policy: EvictionPolicy, clock_ns: Callable[[], int]) -> None:
        self.restore()
        self._index = FileIndex(
            os.path.join(self._base, INDEX_FILE),
            policy,
            clock_ns,
            lambda path: DirectoryGuard(self.root).check(path),
            lambda cell: may_be_there(self.path_of(cell)),
        )

    def _make_room_to_open(self) -> bool:
        """Delete the oldest of some cells, `INDEX_ROOM_BYTES` of them; False if there are none.

        Others have filled the disk: without an index nothing tells which cells go next, and those
        that stay could not be read. The charges of these end when they are evicted.
        """
        guard, freed_bytes = DirectoryGuard(self.root), 0
        namespaces = cell_directories(self.objects)
        files = (
            entry for each in namespaces for _, entry in cell_files(each.path, self._warn_unlisted)
        )
        found = [(entry.stat(follow_symlinks=False), entry) for entry in islice(files, MAX_LISTED)]
        for status, entry in sorted(found, key=lambda each: each[0].st_mtime_ns):
            if freed_bytes < INDEX_ROOM_BYTES and self.delete(entry.path, guard):
                freed_bytes += 512 * status.st_blocks
        return freed_bytes > 0

    @property
    def index(self) -> FileIndex:
        """The store's index; the space must be open."""
        assert self._index is not None
        return self._index

    def close(self) -> None:
        """Remove the writer's directory; all reservations must be closed."""
        self._closing.set()
        self._woken.set()
        if self._thread is not None:
            self._thread.join(END_S)
        if self._index is not None:
            with contextlib.suppress(OSError, StoreError):
                self._close_reservations()
                self._index.write_hits()
                for writer in self._own:
                    self._reclaim_writer(writer.path)
            self._index.close()
        for writer in self._own:
            writer.close()
        self._rebuild_lock.release()

    @property
    def own_directory(self) -> str:
        """The directory of unpublished files, removed by `close`."""
        return self._own[-1].path

    def restore(self) -> None:
        """Create the directories that are missing below the root."""
        check_root(self.root)
        with self._restore_lock:
            for directory in (self._base, self.objects, self._writers):
                make_directory(directory)
            if not self._own or not self._own[-1].is_usable:
                self._own.append(WriterDirectory(self._writers))
        if self._index is not None and not self._index.is_complete:
            self._complete_if_empty()

    def _complete_if_empty(self) -> None:
        unlisted: list[OSError] = []
        namespaces = cell_directories(self.objects)
        has_files = any(any(cell_files(each.path, unlisted.append)) for each in namespaces)
        if not has_files and not unlisted:
            self.index.complete()

    def owner_of(self, namespace: str, tenant: str) -> str:
        """Return the owner whose share a cell takes; "" without shares."""
        match self._shares:
            case Shares.TENANT:
                return tenant or NO_TENANT
            case Shares.NAMESPACE:
                return namespace
        return ""

    def path_of(self, cell: StoredCell) -> str:
        """Return the path of a cell's file."""
        return cell_path(self.objects, cell)

    # Writing: reserve; per object open a temporary file, then publish or discard it; close.

    def reserve(
        self, cells: Sequence[StoredCell], sizes: Sequence[int], *, was_refused: bool = False
    ) -> Reservation | None:
        """Charge cells, given the sizes of their files, and evict for them; None if full.

        `was_refused`: the file system has just refused these files room, whatever it says is free.
        """
        for attempt in range(RESERVE_ATTEMPTS):
            try:
                DirectoryGuard(self.root).check(f"{self.own_directory}/")
                self._close_reservations()
                if not self._own[-1].is_usable:
                    raise FileNotFoundError(
                        errno.ENOENT, "the directory of this writer was removed"
                    )
                reservation = self._make_room(cells, sizes, was_refused=was_refused)
                if reservation is not None:
                    return reservation
                if attempt > 0 or not self._reclaim():
                    if not self.index.is_complete:
                        self._woken.set()
                    return None
            except OSError as error:
                if error.errno in NO_ROOM and self._make_room_for_index():
                    continue
                is_lost = error.errno in (errno.ENOENT, errno.ESTALE)
                if attempt + 1 == RESERVE_ATTEMPTS or not is_lost:
                    raise
                self.restore()
                self._woken.set()
        return None

    def _make_room(
        self, cells: Sequence[StoredCell], sizes: Sequence[int], *, was_refused: bool
    ) -> Reservation | None:
        """Evict chunks and delete their files until the cells have room."""
        self._recycled.trim(self.size_bytes, sizes)
        needed_bytes = sum(cell.nbytes for cell in cells)
        file_bytes = -(-needed_bytes // len(cells))
        limit_bytes = self.size_bytes
        if was_refused and disk_room(self.root, file_bytes) >= needed_bytes:  # a quota
            limit_bytes = self._give(self.index.written_bytes())
        for _ in range(SHRINK_STEPS):
            kept_bytes = self._recycled.charged_bytes(sizes)
            room_bytes = disk_room(self.root, file_bytes)
            reservation = self.index.reserve(
                self._own[-1].name, cells, limit_bytes, kept_bytes, room_bytes
            )
            if reservation is None:
                return None
            with contextlib.ExitStack() as undo:
                undo.callback(self.close_reservation, reservation)
                self._delete_evicted(reservation, frozenset(sizes))
                self._recycled.trim(reservation.room_bytes, sizes)
                if reservation.room_bytes >= 0:
                    undo.pop_all()
                    return reservation
        return None

    def _give(self, written_bytes: int) -> int:
        """Return the most bytes used where `written_bytes` is all that the file system gives."""
        if not self._has_quota:
            self._has_quota = True
            logger.warning(
                "file store %s: its file system gives %d MiB of size=%d MiB and then refuses more, "
                "as with a quota; chunks are evicted for new ones",
                self.root,
                written_bytes >> 20,
                self.size_bytes >> 20,
            )
        return written_bytes - min(int(written_bytes * DISK_FREE_SHARE), REFUSED_BYTES)

    def _make_room_for_index(self) -> bool:
        """Delete files so that the index can be written; False if there are none.

        Then chunks can be evicted. Files of evicted cells go first, then those of cells that go
        next. The charge of these is too high until the index can be written.
        """
        if self._recycled.charged_bytes():
            self._recycled.trim(0, ())
            return True
        if not self.index.is_complete:
            return False
        guard, freed = DirectoryGuard(self.root), list[StoredCell]()
        for cells in self.index.coldest(MAX_ROWS):
            for cell in cells:
                self.delete(self.path_of(cell), guard)
            freed += cells
            if sum(cell.nbytes for cell in freed) >= INDEX_ROOM_BYTES:
                break
        with contextlib.suppress(OSError):
            self.index.remove_cells(freed)
        return bool(freed)

    @contextlib.contextmanager
    def holding(self, chunks: Sequence[bytes]) -> Iterator[None]:
        """Protect chunks from eviction while chunks that come after them are written."""
        with contextlib.ExitStack() as ends:
            with contextlib.suppress(OSError):  # the put meets the same error and reports it
                recycled_bytes = self._recycled.charged_bytes()
                for i in range(0, len(chunks), MAX_ROWS):
                    part = chunks[i : i + MAX_ROWS]
                    held = self.index.hold(self._own[-1].name, part, recycled_bytes)
                    ends.callback(self.close_reservation, held)
            yield

    def open_temp(self, nbytes: int, flags: int) -> tuple[int, str]:
        """Open a recycled or new file for `nbytes`; its descriptor and path."""
        while (path := self._recycled.take(nbytes)) is not None:
            fd = open_to_overwrite(path, nbytes, flags)
            if fd is not None:
                return fd, path
            self.discard(path)
        path = self._own[-1].name_temp()
        return create_file(path, flags), path

    def publish(self, temp_path: str, path: str) -> bool:
        """Give a temporary file its name; if that is taken, delete the file and return False."""
        for _ in range(PUBLISH_ATTEMPTS):
            try:
                published = self._name(temp_path, path)
            except FileNotFoundError:
                check_root(self.root)
                shard = os.path.dirname(path)
                for directory in (self._base, self.objects, os.path.dirname(shard), shard):
                    make_directory(directory)
                continue
            if not published:
                self.discard(temp_path)
            return published
        raise FileNotFoundError(errno.ENOENT, "its directory is removed again and again", temp_path)

    def discard(self, temp_path: str) -> None:
        """Delete a temporary file; `close_reservation` returns its charge."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temp_path)

    def close_reservation(self, reservation: Reservation) -> None:
        """End a reservation whose files are all published or discarded.

        If the index cannot be written, as its disk is full, this is repeated later.
        """
        self._unclosed.append(reservation)
        self._close_reservations()

    def _close_reservations(self) -> None:
        while self._unclosed:
            ended = self._unclosed.popleft()
            try:
                self.index.close_reservation(ended, self._recycled.charged_bytes())
            except (OSError, StoreError) as error:
                self._unclosed.append(ended)
                logger.debug("file store %s: a reservation is closed later: %s", self.root, error)
                return

    def delete(
        self, path: str, guard: DirectoryGuard, recycled_sizes: Collection[int] = ()
    ) -> bool:
        """Delete the file of an object, or recycle it if it has one of these sizes.

        Returns False if nothing is there.
        """
        with contextlib.suppress(FileNotFoundError):
            guard.check(path)
            status = os.lstat(path)
            if not is_own(status):
                raise OSError(errno.EPERM, f"it belongs to uid {status.st_uid}", path)
            if not stat.S_ISREG(status.st_mode):
                take_away_foreign(path, status.st_mode)
            elif self._is_local and status.st_size in recycled_sizes:
                temp_path = self._own[-1].name_temp()
                os.rename(path, temp_path)
                self._recycled.add(temp_path, status.st_size)
            else:
                os.unlink(path)
            return True
        return False

    def delete_all(self, paths: Iterable[str]) -> int:
        """Delete the files of objects; the number there were, or the first OSError at the end."""
        guard, num_deleted = DirectoryGuard(self.root), 0
        failure: OSError | None = None
        for path in paths:
            try:
                num_deleted += self.delete(path, guard)
            except OSError as error:
                failure = failure or error
        if failure is not None:
            raise failure
        return num_deleted

    def _delete_evicted(
        self, reservation: Reservation, recycled_sizes: Collection[int] = ()
    ) -> None:
        """Delete or recycle the files of evicted cells; the first OSError after all were tried."""
        guard, errors = DirectoryGuard(self.root), []
        for cell in reservation.evicted:
            try:
                self.delete(self.path_of(cell), guard, recycled_sizes)
            except OSError as error:
                errors.append(error)
                if error.errno != errno.ENOTDIR:  # then the path leads out of the store
                    reservation.undeleted.add(cell.name)
        if errors:
            raise errors[0]

    def _name(self, temp_path: str, path: str) -> bool:
        if self._renames_new:
            try:
                rename_new(temp_path, path)
                return True
            except FileExistsError:
                return False
            except OSError as error:
                if error.errno not in _NO_RENAME_NEW:
                    raise
                self._renames_new = False
        fd = open_lock(self._name_lock)
        try:  # rename replaces, so one process at a time checks and renames
            fcntl.flock(fd, fcntl.LOCK_EX)
            if os.path.lexists(path):
                return False
            os.rename(temp_path, path)
            return True
        finally:
            os.close(fd)

    # Killed writers

    def _reclaim(self) -> bool:
        """Finish what killed writers began; whether there were any."""
        had_any = False
        for writer, lock in self._dead_writers():
            had_any = True
            try:
                self._reclaim_writer(writer)
                _remove_writer(writer)
            finally:
                lock.release()
        return had_any

    def _reclaim_writer(self, writer: str) -> None:
        """Delete what a writer was writing and evicting, then end its charges."""
        _delete_temps(writer)
        name = os.path.basename(writer)
        while (left := self.index.left_by(name)) is not None:
            try:
                self._delete_evicted(left)
            except OSError as error:
                logger.warning(
                    "file store %s: an evicted file cannot be deleted: %s", self.root, error
                )
            self.index.close_reservation(left)
        self.index.remove_writer(name)

    def _dead_writers(self) -> Iterator[tuple[str, HeldLock]]:
        """Yield the directories of killed writers, each with its lock.

        The caller releases the lock.
        """
        for writer in directories(self._writers):
            if not _WRITER.fullmatch(writer.name):
                continue
            if writer.name.startswith(".") and _age_s(writer) < OPENING_S:
                continue
            lock = HeldLock(os.path.join(writer.path, LOCK_FILE))
            with contextlib.suppress(OSError):  # just closed by its owner, or no lock to be had
                if lock.take():
                    yield writer.path, lock

    # The maintenance thread

    def _maintain(self) -> None:
        next_scan_at = 0.0
        while not self._closing.is_set():
            try:
                self._close_reservations()
                self.index.write_hits()
                if time.monotonic() >= next_scan_at or self._woken.is_set():
                    self._woken.clear()
                    next_scan_at = time.monotonic() + LOOK_EVERY_S
                    self._look()
                    self._expire()
            except Closing:
                return
            except (OSError, StoreError) as error:
                logger.info(
                    "file store %s: the index could not be updated, retried every %g s: %s",
                    self.root,
                    HITS_EVERY_S,
                    error,
                )
            except Exception:
                logger.exception(
                    "file store %s: upkeep of the index has failed and is tried again in %g s; "
                    "please report this",
                    *(self.root, HITS_EVERY_S),
                )
            if not self._closing.is_set():  # `_woken` may have been cleared above
                self._woken.wait(HITS_EVERY_S)

    def _look(self) -> None:
        self._reclaim()
        if not self.index.is_complete and self._rebuild_lock.take():
            try:
                self._rebuild()
            finally:
                self._rebuild_lock.release()

    def _expire(self) -> None:
        """Delete chunks whose time to live has ended."""
        while not self._closing.is_set():
            reservation = self.index.expire(self._own[-1].name)
            if reservation is None:
                return
            with contextlib.ExitStack() as ends:
                ends.callback(self.close_reservation, reservation)
                self._delete_evicted(reservation)

    def _rebuild(self) -> None:
        """Add every file to the index, while puts and gets go on."""
        num_files = 0
        for namespace in cell_directories(self.objects):
            found: list[bytes] = []
            for file in self._found(namespace):
                self._stop_if_closing()
                found.append(file)
            # By time: chunks of a prompt were mostly written together, and rows of a prompt that
            # are added together cost a third less.
            found.sort()
            num_files += len(found)
            owner = self.owner_of(namespace.name, "")  # tenants of files are not known
            for i in range(0, len(found), MAX_ROWS):
                self._stop_if_closing()
                part = [_unpacked(each, namespace.name, owner) for each in found[i : i + MAX_ROWS]]
                self.index.add_found(part)
        self.index.complete()
        logger.info("file store %s: index rebuilt from %d files", self.root, num_files)

    def _stop_if_closing(self) -> None:
        if self._closing.is_set():
            raise Closing

    def _found(self, namespace: os.DirEntry[str]) -> Iterator[bytes]:
        """Return every published file of a namespace, packed, as there may be millions."""
        disk = os.statvfs(self.objects)
        most_bytes = min(self.size_bytes, disk.f_blocks * disk.f_frsize)
        for name, entry in cell_files(namespace.path, self._warn_unlisted):
            with contextlib.suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                if not stat.S_ISREG(status.st_mode) or not is_own(status):
                    continue
                chunk = _chunk_of(read_file_footer(entry.path), namespace.name, name)
                # A file larger than the disk has holes.
                nbytes = status.st_size if status.st_size <= most_bytes else 512 * status.st_blocks
                cell = new_cell(chunk, namespace.name, name, charge_of(nbytes, self.unit_bytes))
                written_ns = min(max(status.st_mtime_ns, 0), MAX_TIME_NS)
                yield _FOUND.pack(written_ns, *cell[1:6])

    def _warn_unlisted(self, error: OSError) -> None:
        logger.warning(
            "file store %s: a directory cannot be listed, so its cells do not count in size: %s",
            *(self.root, error),
        )


def _unpacked(found: bytes, namespace: str, owner: str) -> tuple[StoredCell, int]:
    """Return the cell of a file, and its time of writing."""
    written_ns, name, nbytes, chunk, parent, position = _FOUND.unpack(found)
    parent = b"" if parent == _NO_PARENT else parent
    return StoredCell(namespace, name, nbytes, chunk, parent, position, owner=owner), written_ns


def charge_of(nbytes: int, unit_bytes: int) -> int:
    """Return the charge of a file: whole blocks of the file system, at least one."""
    return max(-(-nbytes // unit_bytes), 1) * unit_bytes


def object_name(key: str) -> str:
    """Return the path of a key's object below the objects directory."""
    return _object_name(namespace_of(key) or FOREIGN, name_digest(key))


def cell_path(objects: str, cell: StoredCell) -> str:
    """Return the path of a cell's file."""
    return f"{objects}/{_object_name(cell.namespace, cell.name)}"


def _object_name(namespace: str, name: bytes) -> str:
    digits = name.hex()
    return f"{namespace}/{digits[:2]}/{digits[2:]}"


def name_digest(key: str) -> bytes:
    """Return the digest that names a key's file."""
    return blake2b(key.encode("utf-8", "surrogatepass"), digest_size=NAME_DIGEST_BYTES).digest()


def cell_of(key: str, chunk: ChunkRef, nbytes: int) -> StoredCell:
    """Return a key's cell; the id of its chunk is derived from the key."""
    ref = chunk._replace(id=chunk_id_of_key(key))
    return new_cell(ref, namespace_of(key) or FOREIGN, name_digest(key), nbytes)


def read_file_footer(path: str) -> Footer | None:
    """Return the footer of a file; None if the file is missing or damaged."""
    try:
        fd = os.open(path, READ_FLAGS)
    except OSError:
        return None
    try:
        size = os.fstat(fd).st_size
        if size < PAGE_BYTES:
            return None
        footer = read_footer(os.pread(fd, PAGE_BYTES, size - PAGE_BYTES))
        # Callers allocate as many bytes as the footer says.
        if footer and file_bytes(footer.object_bytes, footer.key or "") != size:
            return None
        return footer
    except OSError:
        return None
    finally:
        os.close(fd)


def _chunk_of(footer: Footer | None, namespace: str, name: bytes) -> ChunkRef:
    """Return the chunk of a file; a file whose key is unknown is a chunk of its own."""
    if footer is None or footer.key is None:
        return ChunkRef(f"file:{name.hex()}")
    if object_name(footer.key) != _object_name(namespace, name):
        return ChunkRef(f"file:{name.hex()}")
    return ChunkRef(chunk_id_of_key(footer.key), footer.parent, footer.position)


def cell_directories(objects: str) -> list[os.DirEntry[str]]:
    """Return the directories of namespaces, and that of keys without one."""
    return [entry for entry in directories(objects) if is_directory_of_cells(entry.name)]


def cell_files(
    directory: str, on_unlisted: OnUnlisted | None = None
) -> Iterator[tuple[bytes, os.DirEntry[str]]]:
    """Yield the digest and entry of each file with a cell's name in a namespace's directory."""
    for shard in shards(directory, on_unlisted):
        for entry in entries(shard.path, on_unlisted):
            digits = shard.name + entry.name
            if _DIGEST.fullmatch(digits):
                yield bytes.fromhex(digits), entry


def shards(directory: str, on_unlisted: OnUnlisted | None = None) -> list[os.DirEntry[str]]:
    """Return the directories of files in a namespace's directory."""
    found = directories(directory, on_unlisted)
    return [entry for entry in found if _SHARD.fullmatch(entry.name)]


_SHARD = re.compile(r"[0-9a-f]{2}", re.ASCII)
_DIGEST = re.compile(rf"[0-9a-f]{{{2 * NAME_DIGEST_BYTES}}}", re.ASCII)


def _age_s(entry: os.DirEntry[str]) -> float:
    try:
        return time.time() - entry.stat(follow_symlinks=False).st_mtime
    except FileNotFoundError:
        return 0.0
