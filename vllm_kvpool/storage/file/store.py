"""`file:///path?size=50GiB`: cells as files, shared by every process that opens the directory.

Owns the names: `{objects}/{namespace}/{2 hex}/{38 hex}`, a digest of the whole key, so that no key
leaves the directory or collides with another. format.py defines a file, index.py what is stored and
evicted, space.py reserves and publishes, io.py moves bytes.

Any thread may call; there is no lock here. A file is written under a temporary name, published
whole and never changed afterwards. Nothing is synced: after a power loss a file may be short or
hold zeros, which its footer and the cell's checksum reveal.
"""

import contextlib
import dataclasses
import errno
import logging
import os
import stat
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from vllm_kvpool.errors import ConfigError, StoreError, StoreUnreachable
from vllm_kvpool.identity.keys import hash_of_key, is_manifest, is_namespace, namespace_of
from vllm_kvpool.storage.base import (
    Buffer,
    Capabilities,
    ChunkRef,
    ChunkUsage,
    GetOutcome,
    NamespaceUsage,
    OwnerUsage,
    PutOutcome,
    Store,
    map_buffer,
)
from vllm_kvpool.storage.eviction import DEFAULT_POLICY, POLICIES, EvictionPolicy, Shares
from vllm_kvpool.storage.file.file_system import NO_ROOM
from vllm_kvpool.storage.file.format import (
    MAX_TAIL_BYTES,
    PAGE_BYTES,
    Footer,
    body_bytes,
    is_of,
    read_footer,
    tail_bytes,
    write_tail,
)
from vllm_kvpool.storage.file.index import IndexBusy, Reservation
from vllm_kvpool.storage.file.io import Disk, Done, Transfer, choose_disk
from vllm_kvpool.storage.file.paths import (
    DirectoryGuard,
    check_parents,
    check_root,
    closed_on_error,
    directories,
    is_foreign,
    is_own,
    is_there,
    is_volume,
    make_directory,
)
from vllm_kvpool.storage.file.rows import (
    FOREIGN,
    StoredCell,
    cells_by_chunk,
    chunks_in,
    owners_in,
    usage_in,
    used_in,
)
from vllm_kvpool.storage.file.space import (
    FORMAT_DIR,
    INDEX_FILE,
    READ_FLAGS,
    FileSpace,
    cell_files,
    cell_of,
    cell_path,
    charge_of,
    object_name,
    read_file_footer,
    shards,
)

logger = logging.getLogger(__name__)

UNKNOWN_CHUNK = ChunkRef("")
WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
PARTS_PER_SIZE = 8  # a put of more than an eighth of the size is made in parts
ROUND_BYTES = 4 << 20  # of a put; space for a round is reserved while the one before is written
ROUND_CELLS = 16  # of a put; other processes wait for the index meanwhile

NOT_WRITABLE = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})
REMOVED = frozenset({errno.ENOENT, errno.ESTALE})
OPEN_ATTEMPTS = 3
NO_FILE = frozenset({errno.ELOOP, errno.ENXIO})  # a symbolic link, a socket
# A directory or FIFO with O_DIRECT; a file without permissions.
MAYBE_NO_FILE = frozenset({errno.EINVAL, errno.EACCES})

CAPABILITIES = Capabilities(
    name="file",
    durable=True,
    remote=False,
    parallel_gets=2,
    parallel_puts=1,  # a put reserves and publishes while the disk writes: two would take turns
    batches_per_put=2,  # it waits for the disk at its beginning and end
    pins=True,
)
READ_ONLY = dataclasses.replace(CAPABILITIES, writable=False, pins=False)

_warned_lock = threading.Lock()
_warned: set[str] = set()  # read-only directories that this process has warned of


def open_file_store(
    path: str, size_bytes: int, io: str, policy: EvictionPolicy, shares: Shares = Shares.NONE
) -> Store:
    """Open the store of a directory, read-only if this process may not write there."""
    try:
        return FileStore(path, size_bytes, io, policy, shares=shares)
    except ConfigError as error:
        cause = error.__cause__
        is_refused = isinstance(cause, OSError) and cause.errno in NOT_WRITABLE
        if not is_refused or not os.path.isdir(path):
            raise
        assert isinstance(cause, OSError)
        with _warned_lock:
            is_first = path not in _warned
            _warned.add(path)
        if is_first:
            logger.warning(
                "file store %s is read-only (%s: %s): cells are read, none are saved; to save, "
                "make it writable for uid %d and restart the engine",
                path,
                cause.strerror,
                cause.filename or path,
                os.geteuid(),
            )
        return ReadOnlyFileStore(path)


def claim_root(path: str) -> None:
    """Create the store's directory, or check that it is safe to use.

    No other user may have written to it, or be able to put another directory in its place.
    """
    if not os.path.lexists(path):
        check_parents(path)
        _make_parents(path)
        make_directory(path)
    status = os.lstat(path)
    if stat.S_ISLNK(status.st_mode):
        raise ConfigError(
            f"file store {path} is a symbolic link; name the directory it points to, "
            f"{os.path.realpath(path)}, instead"
        )
    if not stat.S_ISDIR(status.st_mode):
        raise ConfigError(f"file store {path} is not a directory; name another path")
    below = f"file://{path.rstrip('/')}/kvpool"
    if not is_own(status):
        place = below if is_volume(path) else "a directory of your own"
        raise ConfigError(
            f"file store {path} belongs to uid {status.st_uid}, we are uid {os.geteuid()}; cached "
            f"KV must not be readable or replaceable by others: name {place}"
        )
    if status.st_mode & WRITABLE_BY_OTHERS:
        what = f"name {below}" if is_volume(path) else f"run: chmod 700 {path}"
        raise ConfigError(
            f"file store {path} can be written by group or others "
            f"(mode {stat.S_IMODE(status.st_mode):04o}); {what}"
        )
    check_parents(path)


def _open_space(
    path: str,
    size_bytes: int,
    policy: EvictionPolicy,
    clock_ns: Callable[[], int],
    shares: Shares,
    attempts: int = OPEN_ATTEMPTS,
) -> FileSpace:
    """Open a directory's space, and again if others remove all or a part of it meanwhile."""
    while True:
        attempts -= 1
        try:
            claim_root(path)
            return FileSpace(path, size_bytes, policy, clock_ns, shares)
        except (OSError, StoreError) as error:
            is_removed = isinstance(error, OSError) and error.errno in REMOVED
            if not attempts or not (is_removed or not os.path.lexists(path)):
                raise


def _make_parents(path: str) -> None:
    """Make the directories above the store's; nobody else may write there, whatever the umask."""
    parent = os.path.dirname(path)
    if not os.path.isdir(parent):
        _make_parents(parent)
        try:
            os.mkdir(parent, 0o755)
        except FileExistsError:  # by another process, unless it is a file
            if not os.path.isdir(parent):
                raise


class _Item(NamedTuple):
    """A key and buffer of a call, with their file."""

    key: str
    buffer: Buffer
    chunk: ChunkRef
    cell: StoredCell
    path: str
    body_bytes: int
    tail_bytes: int

    @property
    def file_bytes(self) -> int:
        return self.body_bytes + self.tail_bytes

    def parts(self, tail: Buffer) -> tuple[Buffer, ...]:
        """Return the file's memory: its body in the caller's buffer, its tail in `tail`."""
        end = tail.part(0, self.tail_bytes)
        return (self.buffer.part(0, self.body_bytes), end) if self.body_bytes else (end,)


def parts_of(
    items: Mapping[int, _Item], most_bytes: int, most_items: int
) -> Iterator[dict[int, _Item]]:
    """Yield the items in order, cut into parts of one owner.

    A part has at most `most_bytes` and `most_items`, and at least one item.
    """
    part: dict[int, _Item] = {}
    part_bytes, owner = 0, ""
    for i, item in items.items():
        is_full = part_bytes + item.file_bytes > most_bytes or len(part) == most_items
        if part and (is_full or item.cell.owner != owner):
            yield part
            part, part_bytes = {}, 0
        owner = item.cell.owner
        part[i] = item
        part_bytes += item.file_bytes
    if part:
        yield part


class _OpenFile(NamedTuple):
    """A file in flight."""

    fd: int
    path: str
    tail: Buffer
    reservation: Reservation | None = None  # None while it is read


class _FileBatch(ABC):
    """The files of one `get` or `put`; one thread.

    `Disk` draws from `transfers`, which opens one file after another, and `finish` takes each
    `Done`, so no more files are open than transfers in flight. `close` releases the rest.

    With O_DIRECT the body moves directly between the disk and the caller's buffer if that is
    page-aligned; the tail always goes through a buffer of its own.
    """

    def __init__(self, reader: "DirectoryReader", items: Mapping[int, _Item]) -> None:
        self._reader = reader
        self._items = items
        self._guard = DirectoryGuard(reader.root)
        self._open: dict[int, _OpenFile] = {}

    @abstractmethod
    def transfers(self) -> Iterator[Transfer]:
        """Open one file after another, and yield what to move."""

    def finish(self, done: Done) -> None:
        file = self._open.pop(done.tag)
        try:
            try:
                if done.error:
                    raise OSError(done.error, os.strerror(done.error), file.path)
                self._moved(done.tag, file)
            finally:
                os.close(file.fd)  # a network file system may refuse room only now
            self._closed(done.tag, file)
        except OSError as error:
            self._failed(done.tag, file, error)
        finally:
            self._reader.tails.append(file.tail)

    def close(self) -> None:
        for file in self._open.values():
            os.close(file.fd)

    def _direct_flag(self, buffer: Buffer) -> int:
        """Return O_DIRECT if the file system and the buffer's address allow it."""
        is_aligned = buffer.address % PAGE_BYTES == 0 or buffer.nbytes < PAGE_BYTES
        return os.O_DIRECT if self._reader.direct and is_aligned else 0

    def _moved(self, i: int, file: _OpenFile) -> None:
        """Handle a file whose bytes are all moved. By default nothing."""
        return None

    def _closed(self, i: int, file: _OpenFile) -> None:
        """Handle a file that is closed, after `_moved`. By default nothing."""
        return None

    @abstractmethod
    def _failed(self, i: int, file: _OpenFile, error: OSError) -> None:
        """Handle a file whose bytes were not all moved, or that was not closed."""


class _GetBatch(_FileBatch):
    """The files of a `get`; `outcomes` are complete after the last `finish`."""

    def __init__(self, reader: "DirectoryReader", items: Mapping[int, _Item]) -> None:
        super().__init__(reader, items)
        self.outcomes = [GetOutcome.FAILED] * len(items)

    def transfers(self) -> Iterator[Transfer]:
        for i, item in self._items.items():
            try:
                self._guard.check(item.path)
                fd = os.open(item.path, READ_FLAGS | self._direct_flag(item.buffer))
                with closed_on_error(fd):
                    status = os.fstat(fd)
                    os.set_blocking(fd, True)  # io_uring may answer EAGAIN otherwise
            except FileNotFoundError:
                self.outcomes[i] = GetOutcome.MISSING
                continue
            except OSError as error:
                self._reader.warn(error)
                number = error.errno
                if number in NO_FILE or (number in MAYBE_NO_FILE and is_foreign(item.path)):
                    self.outcomes[i] = GetOutcome.WRONG_SIZE
                continue
            is_plain = stat.S_ISREG(status.st_mode) and is_own(status)
            if status.st_size != item.file_bytes or not is_plain:
                os.close(fd)
                self.outcomes[i] = GetOutcome.WRONG_SIZE
                continue
            tail = self._reader.take_tail()
            self._open[i] = _OpenFile(fd, item.path, tail)
            yield Transfer(i, fd, item.parts(tail), writes=False)

    def _moved(self, i: int, file: _OpenFile) -> None:
        self.outcomes[i] = self._accept(file, self._items[i])

    def _failed(self, i: int, file: _OpenFile, error: OSError) -> None:
        self._reader.warn(error)

    def _accept(self, file: _OpenFile, item: _Item) -> GetOutcome:
        # If the object was evicted meanwhile, its file may have been written over.
        try:
            if os.lstat(file.path).st_ino != os.fstat(file.fd).st_ino:
                return GetOutcome.MISSING
        except (FileNotFoundError, NotADirectoryError):
            return GetOutcome.MISSING
        last_page = file.tail.view[item.tail_bytes - PAGE_BYTES : item.tail_bytes]
        # A damaged file counts as one of another size; the caller removes it.
        if not is_of(read_footer(last_page), item.key, item.buffer.nbytes):
            return GetOutcome.WRONG_SIZE
        num_rest_bytes = item.buffer.nbytes - item.body_bytes
        item.buffer.view[item.body_bytes :] = file.tail.view[:num_rest_bytes]
        return GetOutcome.OK


class _PutBatch(_FileBatch):
    """The files of a `put`; sets the outcomes of its items, which are FULL before.

    Space is reserved one round at a time. `lost` are chunks for which there was none: chunks that
    come after them would be useless and are not written.
    """

    def __init__(
        self,
        store: "FileStore",
        items: Mapping[int, _Item],
        outcomes: list[PutOutcome],
        lost: set[bytes],
        *,
        were_refused: bool = False,
    ) -> None:
        super().__init__(store, items)
        self._were_refused = were_refused  # and nothing was evicted for them so far
        self.timeout: IndexBusy | None = None
        """The reason why items were not written, if the index was locked."""
        self.refused: dict[int, _Item] = {}
        """Items for which the file system had no room."""
        self._space = store._space
        self._outcomes = outcomes
        self._lost = lost
        self._reservations: list[Reservation] = []

    def transfers(self) -> Iterator[Transfer]:
        for items in parts_of(self._items, ROUND_BYTES, ROUND_CELLS):
            for i in [i for i, item in items.items() if self._is_lost(item.cell)]:
                del items[i]
            try:
                reservation = self._reserve(items) if items else None
            except IndexBusy as error:
                self.timeout = error  # the writes under way can still end
                return
            if reservation is None:
                self._lost.update(item.cell.chunk for item in items.values())
                continue
            accepted = frozenset(cell.name for cell in reservation.cells)
            for i, item in items.items():
                if item.cell.name in accepted:
                    yield from self._begin(i, item, reservation)

    def _is_lost(self, cell: StoredCell) -> bool:
        if cell.parent in self._lost:
            self._lost.add(cell.chunk)
        return cell.chunk in self._lost

    def _reserve(self, items: Mapping[int, _Item]) -> Reservation | None:
        cells = [item.cell for item in items.values()]
        try:
            sizes = [item.file_bytes for item in items.values()]
            made = self._space.reserve(cells, sizes, was_refused=self._were_refused)
            self._were_refused = False
        except OSError as error:
            self._reader.warn(error)
            for i in items:
                self._fail(i, error)
            return None
        if made is not None:
            self._reservations.append(made)
        return made

    def _begin(self, i: int, item: _Item, reservation: Reservation) -> Iterator[Transfer]:
        try:
            flag = self._direct_flag(item.buffer)
            fd, path = self._space.open_temp(item.file_bytes, flag)
        except OSError as error:
            self._fail(i, error)
            return
        tail = self._reader.take_tail()
        self._open[i] = _OpenFile(fd, path, tail, reservation)
        parts, chunk = item.parts(tail), item.chunk
        write_tail(parts[-1].view, item.buffer.view, item.key, chunk.parent, chunk.position)
        yield Transfer(i, fd, parts, writes=True)

    def close(self) -> None:
        with contextlib.ExitStack() as ends:
            for reservation in self._reservations:
                ends.callback(self._space.close_reservation, reservation)
            super().close()
            for file in self._open.values():
                self._space.discard(file.path)

    def _closed(self, i: int, file: _OpenFile) -> None:
        item = self._items[i]
        self._guard.check(item.path)
        published = self._space.publish(file.path, item.path)
        assert file.reservation is not None
        file.reservation.stored.add(item.cell.name)
        self._outcomes[i] = PutOutcome.STORED if published else PutOutcome.EXISTED

    def _failed(self, i: int, file: _OpenFile, error: OSError) -> None:
        self._space.discard(file.path)
        self._fail(i, error)

    def _fail(self, i: int, error: OSError) -> None:
        if error.errno in NO_ROOM:
            self.refused[i] = self._items[i]
        if error.errno in NO_ROOM or error.errno == errno.EFBIG:
            self._outcomes[i] = PutOutcome.FULL
        else:
            self._reader.warn(error)
            self._outcomes[i] = PutOutcome.FAILED


class DirectoryReader(Store):
    """Reading from a directory, with or without permission to write; implements `Listing`."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.tails: list[Buffer] = []  # not in use, each of `MAX_TAIL_BYTES`
        self.direct = False
        self._unit_bytes = 1  # a file is charged for where it may be written
        self._objects = f"{root}/{FORMAT_DIR}/objects"
        self._index_path = f"{root}/{FORMAT_DIR}/{INDEX_FILE}"
        self._disk = Disk()
        self._warned_errnos: set[int] = set()

    def take_tail(self) -> Buffer:
        """Return a buffer for a file's last bytes; the caller puts it back into `tails`."""
        try:
            return self.tails.pop()
        except IndexError:
            return map_buffer(MAX_TAIL_BYTES)

    def exists(self, keys: Sequence[str]) -> list[bool]:
        """Return for each key whether its file exists; raise if the directory is gone."""
        found = [is_there(self._path(key)) for key in keys]
        if not all(found):
            check_root(self.root)
        return found

    def get(self, keys: Sequence[str], buffers: Sequence[Buffer]) -> list[GetOutcome]:
        """Read the cells' files into `buffers`, and record hits of the cells that were read."""
        assert len(keys) == len(buffers), (len(keys), len(buffers))
        items = {
            i: self._item(key, buffer, UNKNOWN_CHUNK)
            for i, (key, buffer) in enumerate(zip(keys, buffers, strict=True))
        }
        batch = _GetBatch(self, items)
        self._perform(batch)
        if GetOutcome.MISSING in batch.outcomes:
            check_root(self.root)
        self._read([items[i].cell for i, o in enumerate(batch.outcomes) if o is GetOutcome.OK])
        return batch.outcomes

    def namespaces(self) -> list[str]:
        """Return the namespaces that have a directory, those without cells too."""
        self._check_listed()
        found = (entry.name for entry in directories(self._objects))
        return [name for name in found if is_namespace(name)]

    def usage(self) -> list[NamespaceUsage]:
        """Return the usage of each namespace by the index, without reading directories."""
        if self._is_unused():
            return []
        # Other files have no namespace.
        return [each for each in usage_in(self._index_path) if is_namespace(each.namespace)]

    def used_bytes(self) -> int:
        """Return the bytes that count against the directory's size."""
        return 0 if self._is_unused() else used_in(self._index_path)

    def keys_written_before(self, namespace: str, time_ns: int) -> Iterator[str]:
        """Yield the keys of a namespace's cells that were written before a time of the wall clock.

        Manifests are no cells, here and below. Reads the footer of each older file.
        """
        self._check_listed()
        if not is_namespace(namespace):
            return
        for _, entry in cell_files(os.path.join(self._objects, namespace)):
            with contextlib.suppress(FileNotFoundError):
                if entry.stat(follow_symlinks=False).st_mtime_ns < time_ns:
                    found = self._read_at(entry.path)
                    if found is not None and not is_manifest(found[0]):
                        yield found[0]

    def keys_of_owner(self, namespace: str, owner: str) -> Iterator[str]:
        """Yield the keys of a namespace's cells that take an owner's share of the room.

        Reads the footer of each file.
        """
        self._check_listed()
        for cells in cells_by_chunk(self._index_path, namespace, owner):
            yield from self._keys_of(cells)

    def keys_of_chunks(self, namespace: str, hashes: Collection[str]) -> Iterator[str]:
        """Yield the keys of all cells of these chunks: of every layer group and layer span.

        `hashes` are in hexadecimal. Reads the footer of a file of each chunk of the namespace.
        """
        self._check_listed()
        for cells in cells_by_chunk(self._index_path, namespace):
            for key in self._keys_of(cells):
                if hash_of_key(key) not in hashes:
                    break
                yield key

    def _keys_of(self, cells: Iterable[StoredCell]) -> Iterator[str]:
        for cell in cells:
            found = self._read_at(cell_path(self._objects, cell))
            if found is not None:
                yield found[0]

    def chunks(self) -> Iterator[ChunkUsage]:
        """Yield every chunk, a parent before its children.

        Reads the footer of one file of each chunk. A million chunks take 0.4 GB of memory, and 17 s
        from the page cache or two minutes from an SSD.
        """
        for namespace, first, *values in [] if self._is_unused() else chunks_in(self._index_path):
            path = cell_path(self._objects, StoredCell(namespace, first, 0, b""))
            found = self._read_at(path) if is_namespace(namespace) else None
            if found is not None:
                with contextlib.suppress(FileNotFoundError):
                    written_ns = os.stat(path, follow_symlinks=False).st_mtime_ns
                    yield ChunkUsage._make((namespace, *values, written_ns, found[0]))

    def owners(self) -> list[OwnerUsage]:
        """Return the usage of each owner; empty without shares. May take seconds."""
        return [] if self._is_unused() else owners_in(self._index_path)

    def _is_unused(self) -> bool:
        """Return True if no engine has ever written here."""
        return not self.namespaces() and not os.path.exists(self._index_path)

    def _check_listed(self) -> None:
        """Raise StoreError if a directory on the way to the cells is refused.

        It is not just empty.
        """
        try:
            DirectoryGuard(self.root).check(f"{self._objects}/")
        except OSError as error:
            raise StoreError(f"file store {self.root} cannot be listed: {error}") from error

    def _read(self, cells: Sequence[StoredCell]) -> None:
        """Handle the cells that a `get` has read. By default nothing."""

    def warn(self, error: OSError) -> None:
        """Log an error, each errno once: a bad disk fails every call."""
        number = error.errno or 0
        if number not in self._warned_errnos:
            self._warned_errnos.add(number)
            logger.warning("file store %s: %s", self.root, error)

    def _path(self, key: str) -> str:
        return f"{self._objects}/{object_name(key)}"

    def _read_at(self, path: str) -> tuple[str, Footer] | None:
        """Return the key and footer of a file; None unless it stands where its key belongs."""
        footer = read_file_footer(path)
        if footer is None or footer.key is None or self._path(footer.key) != path:
            return None
        return footer.key, footer

    def _item(self, key: str, buffer: Buffer, chunk: ChunkRef) -> _Item:
        body, tail = body_bytes(buffer.nbytes), tail_bytes(buffer.nbytes, key)
        cell = cell_of(key, chunk, charge_of(body + tail, self._unit_bytes))
        return _Item(key, buffer, chunk, cell, cell_path(self._objects, cell), body, tail)

    def _perform(self, batch: _FileBatch) -> None:
        run = self._disk.run(batch.transfers())
        with contextlib.closing(batch), contextlib.closing(run):
            for done in run:
                batch.finish(done)


class ReadOnlyFileStore(DirectoryReader):
    """A directory that this process may not write: cells are read, none are saved.

    ConfigError as in `FileStore`. It creates no file, records no hits and removes nothing. Reads go
    through the page cache, as O_DIRECT cannot be tried.
    """

    capabilities = READ_ONLY

    def __init__(self, path: str) -> None:
        claim_root(path)  # it exists, so only its owner and mode are checked
        super().__init__(path)

    def put(
        self, keys: Sequence[str], buffers: Sequence[Buffer], chunks: Sequence[ChunkRef]
    ) -> list[PutOutcome]:
        """Return FAILED for every key."""
        return [PutOutcome.FAILED] * len(keys)

    def remove(self, keys: Sequence[str]) -> int:
        """Return 0 and remove nothing."""
        return 0

    def remove_namespace(self, namespace: str) -> int:
        """Raise StoreError: an operator must learn that nothing was removed."""
        raise StoreError(f"file store {self.root} is read-only: no cells were removed")

    def close(self) -> None:
        """Close the reader's threads and rings."""
        self._disk.close()


class FileStore(DirectoryReader):
    """A directory of at most `size_bytes`.

    `io` is one of `IO_CHOICES`. ConfigError if the directory cannot be used, or `uring` was asked
    for and does not work; StoreUnreachable if the disk has no space for a new directory.
    """

    capabilities = CAPABILITIES

    def __init__(
        self,
        path: str,
        size_bytes: int,
        io: str = "auto",
        policy: EvictionPolicy = POLICIES[DEFAULT_POLICY],
        clock_ns: Callable[[], int] = time.time_ns,
        shares: Shares = Shares.NONE,
    ) -> None:
        try:
            self._space = _open_space(path, size_bytes, policy, clock_ns, shares)
        except OSError as error:
            text = f"file store {path} cannot be used: {error.strerror} ({error.filename or path})"
            if error.errno in NO_ROOM:
                raise StoreUnreachable(
                    f"{text}; free space on its disk, or name a directory on another disk"
                ) from error
            raise ConfigError(f"{text}; name a directory that this user can write") from error
        try:
            choice = choose_disk(io, self._space.own_directory)
        except ConfigError as error:
            self._space.close()
            raise ConfigError(f"file store {path}: {error}") from None
        logger.info("file store %s: %s", path, choice.reason)
        super().__init__(path)
        self._unit_bytes = self._space.unit_bytes
        self._disk, self.direct = choice.disk, choice.direct

    def put(
        self, keys: Sequence[str], buffers: Sequence[Buffer], chunks: Sequence[ChunkRef]
    ) -> list[PutOutcome]:
        """Reserve space, write the absent cells to temporary files, and publish them by rename."""
        assert len(keys) == len(buffers) == len(chunks), (len(keys), len(buffers), len(chunks))
        outcomes = [PutOutcome.EXISTED] * len(keys)
        absent: dict[int, _Item] = {}
        first_of: dict[str, int] = {}  # of a key given twice the first buffer is stored
        for i, (key, buffer, chunk) in enumerate(zip(keys, buffers, chunks, strict=True)):
            if first_of.setdefault(key, i) != i:
                continue
            owner = self._space.owner_of(namespace_of(key) or FOREIGN, chunk.tenant)
            chunk = chunk if owner == chunk.tenant else chunk._replace(tenant=owner)
            item = self._item(key, buffer, chunk)
            if not is_there(item.path):
                absent[i] = item
                outcomes[i] = PutOutcome.FULL
        # Cells under way cannot be evicted, so a put that is large for the store is made in parts.
        most_bytes = self._space.size_bytes // PARTS_PER_SIZE
        parts = list(parts_of(absent, most_bytes, len(absent)))
        lost: set[bytes] = set()
        try:
            with self._holding(list(absent.values()), len(parts)):
                for items in parts:
                    refused = self._put_part(items, outcomes, lost)
                    if refused:
                        self._put_part(refused, outcomes, lost, were_refused=True)
        except IndexBusy as error:  # every further round would wait as long
            logger.warning(
                "file store %s: %s; the rest of the batch is not stored", self.root, error
            )
        if PutOutcome.FAILED in outcomes:
            check_root(self.root)
        for i, key in enumerate(keys):
            if first_of[key] != i and outcomes[first_of[key]] is not PutOutcome.STORED:
                outcomes[i] = outcomes[first_of[key]]
        return outcomes

    def _put_part(
        self,
        items: Mapping[int, _Item],
        outcomes: list[PutOutcome],
        lost: set[bytes],
        *,
        were_refused: bool = False,
    ) -> dict[int, _Item]:
        """Put some items and set their outcomes; return those that the file system refused room.

        `were_refused`: it did so before, and chunks are evicted for them.
        """
        batch = _PutBatch(self, items, outcomes, lost, were_refused=were_refused)
        self._perform(batch)
        if batch.timeout is not None:
            raise batch.timeout
        return batch.refused

    def _read(self, cells: Sequence[StoredCell]) -> None:
        self._space.index.note_hits(cell.chunk for cell in cells)

    def remove(self, keys: Sequence[str]) -> int:
        """Delete the cells' files and return how many there were."""
        cells = [cell_of(key, UNKNOWN_CHUNK, 0) for key in keys]
        num_removed = 0
        with self._store_errors("cannot remove"), contextlib.ExitStack() as ends:
            ends.callback(self._space.index.remove_cells, cells)
            num_removed = self._space.delete_all(map(self._space.path_of, cells))
        return num_removed

    def remove_namespace(self, namespace: str) -> int:
        """Delete a namespace's files; cells that another process puts meanwhile may stay."""
        if not is_namespace(namespace):
            return 0
        directory = os.path.join(self._objects, namespace)
        num_removed = 0
        with self._store_errors("cannot remove"), contextlib.ExitStack() as ends:
            ends.callback(self._space.index.remove_namespace, namespace)
            DirectoryGuard(self.root).check(f"{directory}/")
            unlisted: list[OSError] = []
            files = cell_files(directory, unlisted.append)
            num_removed = self._space.delete_all(entry.path for _, entry in files)
            if unlisted:
                raise unlisted[0]
        with contextlib.suppress(OSError):  # not empty: another process is putting into it
            for shard in shards(directory):
                os.rmdir(shard.path)
            os.rmdir(directory)
        return num_removed

    def pin(self, keys: Sequence[str], until_ns: int) -> int:
        """Pin chunks as `Store.pin` says; half of the size may be pinned (`index.PINNED_SHARE`)."""
        chunks = [cell_of(key, UNKNOWN_CHUNK, 0).chunk for key in keys]
        count = 0
        with self._store_errors("cannot pin"):
            count = self._space.index.pin(
                list(dict.fromkeys(chunks)), until_ns, self._space.size_bytes
            )
        return count

    def close(self) -> None:
        """Close the threads that read and write, then leave the store's writers."""
        self._disk.close()
        self._space.close()

    @contextlib.contextmanager
    def _store_errors(self, what: str) -> Iterator[None]:
        """Turn an OSError into a StoreError; FileNotFoundError only ends the block."""
        try:
            yield
        except FileNotFoundError:
            check_root(self.root)
        except OSError as error:
            raise StoreError(f"file store {self.root} {what}: {error}") from error

    def _holding(
        self, items: Sequence[_Item], num_parts: int
    ) -> contextlib.AbstractContextManager[None]:
        """Protect the parents of a put in several parts from eviction by its own parts."""
        nbytes = sum(item.file_bytes for item in items)
        if num_parts < 2 and nbytes <= ROUND_BYTES and len(items) <= ROUND_CELLS:
            return contextlib.nullcontext()
        parents = dict.fromkeys(item.cell.parent for item in items)
        return self._space.holding(list(parents))
