"""Kind and block size of a path's file system, from statfs(2).

A page of a mapped file that gets no space on the disk ends the process (SIGBUS). SQLite writes the
last byte of each 4 KiB of a file before it maps them. That reserves the space where a block has 4
KiB or more and is written in place: on ext4, xfs and tmpfs. btrfs writes every block to a new
place, and an ext4 with blocks of 1 KiB has the last of four only. NFS and FUSE allow mappings, but
hosts do not see each other's.
"""

import ctypes
import errno
import os
from typing import NamedTuple

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})  # bytes, files or a quota are used up
SQLITE_MAPS_BYTES = 4096

_KINDS = {
    0xEF53: "ext4",  # ext2 and ext3, too
    0x01021994: "tmpfs",
    0x58465342: "xfs",
    0x9123683E: "btrfs",
    0xF2F52010: "f2fs",
}
_WRITES_IN_PLACE = frozenset({"ext4", "tmpfs", "xfs"})

_statfs = ctypes.CDLL(None, use_errno=True).statfs
_STATFS_WORDS = 32  # more than `struct statfs` has; it begins with the kind and the block size


class FileSystem(NamedTuple):
    """A file system's kind ("" if it is not of one host, or unknown) and block size."""

    kind: str
    block_bytes: int

    @property
    def is_local(self) -> bool:
        """True if it is of one host, where a rename is seen at once by all."""
        return bool(self.kind)

    @property
    def keeps_mapped_pages(self) -> bool:
        """True if pages that SQLite maps have their space on the disk."""
        return self.kind in _WRITES_IN_PLACE and self.block_bytes >= SQLITE_MAPS_BYTES


def file_system_of(path: str) -> FileSystem:
    """Return the file system of an existing path; OSError if it cannot be asked."""
    words = (ctypes.c_long * _STATFS_WORDS)()
    if _statfs(os.fsencode(path), words) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path)
    return FileSystem(_KINDS.get(words[0], ""), words[1])
