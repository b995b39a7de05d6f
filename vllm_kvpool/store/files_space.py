"""The space of a `file://` store: who may write how much, shared by every process on a directory.

Owns `{root}/v2`: `usage` (bytes charged, a flock around each change), `evict.lock` (held by
whoever deletes objects or counts them), `hand_down.lock`, `writers/{id}/` (one per open store,
with its claims and unpublished files), `spares/` and `objects/`, whose names files.py makes.

Invariants: bytes are charged before they are written, so what lies on the disk never exceeds what
is charged; a count that is wrong is too high, and the next count heals it; a kill at any point
leaves no lock and only files that the next eviction or opener removes.
Any thread of any process may call. A count may run in a thread of its own, which `close` ends.
"""

import contextlib
import errno
import heapq
import logging
import os
import stat
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from vllm_kvpool.errors import StoreError
from vllm_kvpool.store.files_entries import (
    Ways,
    directories,
    entries,
    make_directory,
    rename_new,
    set_worth,
    take_away_foreign,
)
from vllm_kvpool.store.files_lock import (
    Claim,
    LockTimeout,
    Usage,
    Writer,
    claimed_bytes,
    dead_writers,
    locked,
    read_usage,
    reclaim,
    write_usage,
)
from vllm_kvpool.store.files_order import MAX_CANDIDATES, Candidate, Candidates, is_possible
from vllm_kvpool.store.files_spares import Spares

logger = logging.getLogger(__name__)

FORMAT_DIR = "v2"
LOW_WATERMARK = 0.9  # an eviction goes on until this part of the size is in use
RESERVE_ATTEMPTS = 4  # others may take the room that an eviction made
PUBLISH_ATTEMPTS = 4  # others may remove the directory that was made for an object
USAGE_WAIT_S = 10.0  # the usage lock is held for microseconds
EVICT_WAIT_S = 10.0
COUNT_END_S = 2.0  # a count looks after each directory whether it is to end

_NO_RENAME_NEW = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EPERM})


class Closing(Exception):
    """A count that was told to end."""


class Space:
    """One process's hand on the shared directory; closed by its owner."""

    def __init__(self, root: str, size_bytes: int, clock_ns: Callable[[], int]) -> None:
        self.root = root
        self.size_bytes = size_bytes
        self.unit_bytes = os.statvfs(root).f_frsize
        self._clock_ns = clock_ns
        self._base = os.path.join(root, FORMAT_DIR)
        self.objects = os.path.join(self._base, "objects")
        self._writers = os.path.join(self._base, "writers")
        self._usage = os.path.join(self._base, "usage")
        self._evict_lock = os.path.join(self._base, "evict.lock")
        self.hand_down_lock = os.path.join(self._base, "hand_down.lock")
        self._renames_new = True  # some file systems of a network cannot
        self._restore_lock = threading.Lock()
        # The last is in use. Claims under way may still write to the locks of those before it.
        self._own: list[Writer] = []
        self._spares = Spares(root, os.path.join(self._base, "spares"), size_bytes)
        self._candidates = Candidates()
        self._count_thread: threading.Thread | None = None
        self._closing = threading.Event()
        try:
            self.restore()
        except Exception:  # it may be tried again and again
            self.close()
            raise

    def close(self) -> None:
        """Take our writer directory away; our claims must have ended."""
        self._closing.set()
        self.wait_counted(COUNT_END_S)
        for writer in self._own:
            writer.close()

    def wait_counted(self, timeout_s: float) -> None:
        """Wait for a count in the background, if there is one."""
        if self._count_thread is not None:
            self._count_thread.join(timeout_s)

    @property
    def own_directory(self) -> str:
        """Where our unpublished files go; what else is left in it goes with us."""
        return self._own[-1].path

    def check_root(self) -> None:
        """StoreError if the directory went away under us."""
        if os.path.islink(self.root) or not os.path.isdir(self.root):
            raise StoreError(f"file store {self.root} is gone; restore it or restart without it")

    def ways(self) -> Ways:
        """To check paths with, those of one batch."""
        return Ways(self.root)

    def restore(self) -> None:
        """Make what is missing below the root; count in the background if that is needed."""
        self.check_root()
        with self._restore_lock:
            for directory in (self._base, self.objects, self._writers, self._spares.directory):
                make_directory(directory)
            if not self._own or not self._own[-1].is_usable:
                self._own.append(Writer(self._writers))
            to_count = self.used_bytes() is None or any(dead_writers(self._writers))
            if to_count and not entries(self.objects):
                with locked(self._evict_lock, EVICT_WAIT_S):
                    reclaim(self._writers)
                    self._count()
                to_count = False
            if to_count and (self._count_thread is None or not self._count_thread.is_alive()):
                self._count_thread = threading.Thread(
                    target=self._count_apart, name="kvpool-count", daemon=True
                )
                self._count_thread.start()

    def charge_of(self, nbytes: int) -> int:
        """What a file occupies: whole blocks of the file system, at least one."""
        return max(-(-nbytes // self.unit_bytes), 1) * self.unit_bytes

    # Writing: reserve for a batch; per object open a temp, then publish or discard it; settle.

    def reserve(self, sizes: Sequence[int]) -> Claim | None:
        """Charge a batch of files of these bytes; evicts if needed; None if there is no room."""
        charge_bytes = sum(map(self.charge_of, sizes))
        if charge_bytes > self.size_bytes:
            return None
        wanted = Counter(sizes)
        claim: Claim | None = None
        try:
            for _ in range(RESERVE_ATTEMPTS):
                try:
                    claim = claim or self._new_claim()
                    self._take_spares(claim, wanted)
                    if self._charge(claim, charge_bytes - claim.outstanding_bytes):
                        reserved, claim = claim, None
                        return reserved
                    self._make_room(claim, wanted, charge_bytes)
                except FileNotFoundError:
                    self.restore()
                    if claim is not None:
                        self.settle(claim)
                        claim = None
            return None
        finally:
            if claim is not None:
                self.settle(claim)

    def publish(self, claim: Claim, charge_bytes: int, temp_path: str, path: str) -> bool:
        """Give a temp its name; False, and the temp deleted, if the name is taken."""
        for _ in range(PUBLISH_ATTEMPTS):
            try:
                published = self._name(temp_path, path)
            except FileNotFoundError:
                self.check_root()
                shard = os.path.dirname(path)
                for directory in (self._base, self.objects, os.path.dirname(shard), shard):
                    make_directory(directory)
                continue
            if published:
                claim.change(-charge_bytes)
            else:
                self.discard(temp_path)
            return published
        raise FileNotFoundError(errno.ENOENT, "removed while it was written", temp_path)

    def discard(self, temp_path: str) -> None:
        """Delete a temp; its charge goes back with the settling."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temp_path)

    def settle(self, claim: Claim) -> None:
        """End a claim whose temps are all published or discarded."""
        try:
            if claim.outstanding_bytes:
                self._give_back(claim.outstanding_bytes)
        finally:
            claim.end()

    def drop(self, paths: Iterable[str]) -> int:
        """Delete published objects; absent ones are skipped. Returns how many there were."""
        num_dropped = freed_bytes = 0
        ways = self.ways()
        ways.check(self._evict_lock)
        with locked(self._evict_lock, EVICT_WAIT_S):
            self._spares.look()
            try:
                for path in paths:
                    ways.check(path)
                    with contextlib.suppress(FileNotFoundError):
                        status = os.lstat(path)
                        if stat.S_ISREG(status.st_mode):
                            freed_bytes += self._take_away(path, status.st_size)
                        else:
                            take_away_foreign(path, status.st_mode)
                        num_dropped += 1
            finally:
                self._give_back(freed_bytes)
        return num_dropped

    def used_bytes(self) -> int | None:
        """What is charged; None while nobody has counted."""
        with locked(self._usage, USAGE_WAIT_S) as fd:
            usage = read_usage(fd)
        return usage.used_bytes if usage is not None else None

    def excess_bytes(self, watermark: float) -> int:
        """What is charged beyond a part of the size; 0 while nobody has counted."""
        try:
            self.ways().check(self._usage)
            used_bytes = self.used_bytes()
        except FileNotFoundError:
            self.check_root()
            return 0
        return (used_bytes or 0) - self._spare_bytes() - int(watermark * self.size_bytes)

    def coldest(self, *, scan: bool) -> list[Candidate]:
        """Objects in the order in which they would be evicted, from the last scan or a new one."""
        if not scan:
            return self._candidates.peek()
        with locked(self._evict_lock, EVICT_WAIT_S):
            return self._count()[1]

    def _new_claim(self) -> Claim:
        writer = self._own[-1]
        self.ways().check(writer.lock_path)
        if not writer.is_usable:
            raise FileNotFoundError(errno.ENOENT, "our directory is gone", writer.path)
        return writer.claim()

    def _take_spares(self, claim: Claim, wanted: Counter[int]) -> None:
        """Move spares that fit into the claim, which grows by what they are charged."""
        missing = {n: count - claim.num_spares(n) for n, count in wanted.items()}
        if any(self._spares.known(nbytes) < count for nbytes, count in missing.items()):
            self._spares.look()
        for nbytes, count in missing.items():
            charge_bytes = self.charge_of(nbytes)
            for _ in range(min(count, self._spares.known(nbytes))):
                claim.change(charge_bytes)  # first: between the two a count sees both
                if not self._spares.take(nbytes, claim.new_spare(nbytes)):
                    claim.forget_spare(nbytes)
                    claim.change(-charge_bytes)
                    break

    def _charge(self, claim: Claim, charge_bytes: int) -> bool:
        """False if there is no room, or nobody has counted."""
        if charge_bytes <= 0:
            return True
        with locked(self._usage, USAGE_WAIT_S) as usage_fd:
            usage = read_usage(usage_fd)
            if usage is None or usage.used_bytes + charge_bytes > self.size_bytes:
                return False
            # Charged first: a kill between the two leaves a charge without a claim.
            charged_bytes = usage.charged_bytes + charge_bytes
            write_usage(usage_fd, usage._replace(charged_bytes=charged_bytes))
            claim.change(charge_bytes)
        return True

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
        with locked(self._usage, USAGE_WAIT_S):  # one namer at a time: rename would replace
            if os.path.lexists(path):
                return False
            os.rename(temp_path, path)
            return True

    def _give_back(self, nbytes: int) -> None:
        with locked(self._usage, USAGE_WAIT_S) as fd:
            usage = read_usage(fd)
            if usage is not None:
                returned_bytes = usage.returned_bytes + nbytes
                write_usage(fd, usage._replace(returned_bytes=returned_bytes))

    def _make_room(self, claim: Claim, wanted: Counter[int], charge_bytes: int) -> None:
        """Evict what a claim lacks; or more, if it takes a scan to know what to evict."""
        with locked(self._evict_lock, EVICT_WAIT_S):
            needed_bytes = charge_bytes - claim.outstanding_bytes
            used_bytes = self.used_bytes()
            spares = self._spares.look()
            if used_bytes is not None:
                if used_bytes + needed_bytes <= self.size_bytes or wanted.keys() & spares.keys():
                    return  # somebody else made room while we waited
                for nbytes in spares:
                    freed_bytes = self._spares.delete(nbytes) * self.charge_of(nbytes)
                    self._give_back(freed_bytes)
                    used_bytes -= freed_bytes
            if not reclaim(self._writers) and used_bytes is not None:
                known = iter(self._candidates.take, None)
                excess_bytes = used_bytes + needed_bytes - self.size_bytes
                if self._evict(claim, wanted, known, excess_bytes, used_bytes) >= excess_bytes:
                    return
            used_bytes, coldest = self._count()
            needed_bytes = charge_bytes - claim.outstanding_bytes
            if used_bytes + needed_bytes > self.size_bytes:
                goal_bytes = max(int(self.size_bytes * LOW_WATERMARK) - needed_bytes, 0)
                excess_bytes = used_bytes - self._spare_bytes() - goal_bytes
                self._evict(claim, wanted, iter(coldest), excess_bytes, used_bytes)

    def _spare_bytes(self) -> int:
        return sum(self.charge_of(n) * count for n, count in self._spares.look().items())

    # Below, "counting" marks what must hold evict.lock.

    def _evict(
        self,
        claim: Claim,
        wanted: Counter[int],
        coldest_first: Iterator[Candidate],
        excess_bytes: int,
        used_bytes: int,
    ) -> int:
        """Counting: delete objects that nobody used since they were seen; their bytes.

        Files of the wanted sizes go into the claim or become spares, with their charge; but not
        of what is used beyond the size.
        """
        evicted_bytes = freed_bytes = moved_bytes = 0
        must_free_bytes = used_bytes - self.size_bytes
        sizes = wanted.keys() if self._spares.are_kept else set[int]()
        try:
            while evicted_bytes < excess_bytes:
                item = next(coldest_first, None)
                if item is None:
                    break
                with contextlib.suppress(FileNotFoundError):
                    status = os.lstat(item.path)
                    if status.st_mtime_ns != item.worth_ns or not stat.S_ISREG(status.st_mode):
                        continue
                    nbytes = status.st_size
                    if nbytes not in sizes or freed_bytes < must_free_bytes:
                        os.unlink(item.path)
                        freed_bytes += item.charge_bytes
                    elif claim.num_spares(nbytes) < wanted[nbytes]:
                        os.rename(item.path, claim.new_spare(nbytes))
                        moved_bytes += item.charge_bytes
                    else:
                        freed_bytes += self._take_away(item.path, nbytes)
                    evicted_bytes += item.charge_bytes
        finally:
            claim.change(moved_bytes)  # once for all: nobody counts meanwhile
        self._give_back(freed_bytes)
        return evicted_bytes

    def _take_away(self, path: str, nbytes: int) -> int:
        """Counting: make an object a spare, or delete it; the bytes to be given back."""
        if self._spares.has_room(nbytes):
            self._spares.keep(path, nbytes)
            return 0
        os.unlink(path)
        return self.charge_of(nbytes)

    def _count_apart(self) -> None:
        """The counting thread, from start to end."""
        try:
            with locked(self._evict_lock, EVICT_WAIT_S):
                if reclaim(self._writers) or self.used_bytes() is None:
                    self._count()
        except Closing:
            pass
        except (LockTimeout, OSError) as error:
            logger.info("file store %s is not counted yet: %s", self.root, error)

    def _count(self) -> tuple[int, list[Candidate]]:
        """Counting: set the charge to what is there; that, and the coldest objects, coldest first.

        Closing if the store is being closed meanwhile.
        """
        began_ns = self._clock_ns()
        with locked(self._usage, USAGE_WAIT_S) as fd:
            before = read_usage(fd) or Usage(0, 0)
        # In the order in which files move: from spares to claims to objects.
        seen_bytes = self._spare_bytes()
        writers = directories(self._writers)
        seen_bytes += sum(claimed_bytes(writer.path, self.unit_bytes) for writer in writers)
        charges: list[int] = []
        coldest = heapq.nsmallest(MAX_CANDIDATES, self._scan(charges))
        with locked(self._usage, USAGE_WAIT_S) as fd:
            now = read_usage(fd) or Usage(0, 0)
            charged_meanwhile = now.charged_bytes - before.charged_bytes
            usage = Usage(seen_bytes + sum(charges) + charged_meanwhile, 0)
            write_usage(fd, usage)
        self._candidates.refill(coldest, began_ns)
        return usage.used_bytes, coldest

    def _scan(self, charges: list[int]) -> Iterator[Candidate]:
        """Counting: every object; `charges` gets the bytes of each directory."""
        now_ns = self._clock_ns()
        for namespace in directories(self.objects):
            for shard in directories(namespace.path):
                if self._closing.is_set():
                    raise Closing
                shard_bytes = 0
                for entry in entries(shard.path):
                    if not entry.is_file(follow_symlinks=False):
                        continue
                    with contextlib.suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        charge_bytes = self.charge_of(status.st_size)
                        shard_bytes += charge_bytes
                        worth_ns = status.st_mtime_ns
                        if not is_possible(worth_ns, now_ns):
                            worth_ns = set_worth(entry.path, now_ns)
                        yield Candidate(worth_ns, charge_bytes, entry.path)
                charges.append(shard_bytes)
