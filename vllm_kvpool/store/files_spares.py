"""Spare files of a `file://` store: those of evicted objects, kept with their blocks.

A full store deletes as much as it writes. Freeing a file's blocks and making a file can cost
milliseconds (discards; ext4 passes over inodes that were deleted in the last minutes); writing
over a file of the same size costs neither. Spares stay charged; they lie in one directory, named
`{bytes}.{unique}`, and belong to whoever renames them away.

Somebody may still be reading the object that a spare was. So a reader looks, when it has read all,
whether its file still has its name; that this tells the truth needs a file system of one host.
"""

import contextlib
import os
import re
import secrets
from collections import defaultdict
from itertools import count

from vllm_kvpool.store.files_entries import entries

MAX_SPARES = 8192
MAX_SPARES_PER_SIZE = 0.25  # more than an eviction frees, or the rest would be deleted after all
_NAME = re.compile(r"(\d{1,18})\..+", re.ASCII)
LOCAL_FILE_SYSTEMS = frozenset({"btrfs", "ext2", "ext3", "ext4", "f2fs", "tmpfs", "xfs"})


def is_local(path: str) -> bool:
    """Whether a path is on a file system whose names change for all its readers at once."""
    device = os.stat(path).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    with contextlib.suppress(OSError), open("/proc/self/mountinfo") as mounts:
        for line in mounts:
            fields = line.split()
            if fields[2] == number:
                return fields[fields.index("-") + 1] in LOCAL_FILE_SYSTEMS
    return False


class Spares:
    """The directory, and what this process knows of it; any thread may call."""

    def __init__(self, root: str, directory: str, store_bytes: int) -> None:
        self.directory = directory
        share = MAX_SPARES_PER_SIZE if is_local(root) else 0
        self._max_bytes = int(store_bytes * share)
        self._known: dict[int, list[str]] = {}
        self._id = secrets.token_hex(8)
        self._numbers = count()

    @property
    def are_kept(self) -> bool:
        """False where files must not be written over."""
        return self._max_bytes > 0

    def look(self) -> dict[int, int]:
        """Read the directory; how many spares there are of each size."""
        known: defaultdict[int, list[str]] = defaultdict(list)
        for entry in entries(self.directory):
            name = _NAME.fullmatch(entry.name)
            if name and entry.is_file(follow_symlinks=False):
                known[int(name[1])].append(entry.path)
        self._known = known
        return {nbytes: len(paths) for nbytes, paths in known.items()}

    def take(self, nbytes: int, path: str) -> bool:
        """Move a known spare of this size to `path`; False if there is none."""
        paths = self._known.get(nbytes, [])
        while paths:
            with contextlib.suppress(FileNotFoundError, IndexError):
                os.rename(paths.pop(), path)
                return True
        return False

    def known(self, nbytes: int) -> int:
        """How many of this size `take` may find."""
        return len(self._known.get(nbytes, []))

    def has_room(self, nbytes: int) -> bool:
        """Whether one more may be kept, as far as is known."""
        if os.path.islink(self.directory):
            return False
        total_bytes = sum(size * len(paths) for size, paths in self._known.items())
        num_spares = sum(map(len, self._known.values()))
        return num_spares < MAX_SPARES and total_bytes + nbytes <= self._max_bytes

    def keep(self, path: str, nbytes: int) -> None:
        """Make an object, which loses its name, a spare."""
        spare = f"{self.directory}/{nbytes}.{os.getpid()}-{self._id}-{next(self._numbers)}"
        os.rename(path, spare)
        self._known.setdefault(nbytes, []).append(spare)

    def delete(self, nbytes: int) -> int:
        """Delete all known ones of a size; how many there were."""
        num_deleted = 0
        for path in self._known.pop(nbytes, []):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
                num_deleted += 1
        return num_deleted
