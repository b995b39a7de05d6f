"""The file of one object (pure).

    | body: the object's whole pages | tail: the rest of the object, zeros, key, footer |

The tail is one page, or two if the rest leaves no room for the footer. So a file consists of whole
pages, and its body can move directly between the disk and a slot. `read_footer` needs the last page
alone to tell which object a file holds, or that it is damaged.
"""

import struct
from typing import NamedTuple

import xxhash

PAGE_BYTES = 4096
MAX_TAIL_BYTES = 2 * PAGE_BYTES
MAX_KEY_BYTES = 1024  # keys of cells have 200 to 300
MAX_POSITION = (1 << 32) - 1

PARENT_BYTES = 128  # a digest, a hash and the name of a layer group

MAGIC = b"KVPOOLF3"
FORMAT_VERSION = 3

# The footer at the end of the file, little endian. The parent is the id of the chunk before the
# object's, padded; the position is the number of chunks before it. A key of more than
# `MAX_KEY_BYTES` or a parent of more than `PARENT_BYTES` is left out.
#     parent | object bytes u64 | position u32 | key bytes u16 | version u16
#     checksum (xxh3-64) u64, of the key and these fields | magic 8
_FIELDS = struct.Struct(f"<{PARENT_BYTES}sQIHH")
_END = struct.Struct("<Q8s")
_FOOTER_BYTES = _FIELDS.size + _END.size
assert MAX_KEY_BYTES + _FOOTER_BYTES <= PAGE_BYTES


class Footer(NamedTuple):
    """A file's description of its object; `key` is None if it was too long."""

    key: str | None
    object_bytes: int
    parent: str = ""
    position: int = 0


def body_bytes(object_bytes: int) -> int:
    """Return the length of the body of an object's file."""
    return object_bytes // PAGE_BYTES * PAGE_BYTES


def tail_bytes(object_bytes: int, key: str) -> int:
    """Return the length of the tail of an object's file."""
    used_bytes = object_bytes % PAGE_BYTES + len(_kept(key)) + _FOOTER_BYTES
    return PAGE_BYTES if used_bytes <= PAGE_BYTES else MAX_TAIL_BYTES


def file_bytes(object_bytes: int, key: str) -> int:
    """Return the length of an object's file."""
    return body_bytes(object_bytes) + tail_bytes(object_bytes, key)


def write_tail(
    tail: memoryview, data: memoryview, key: str, parent: str = "", position: int = 0
) -> None:
    """Fill a tail of `tail_bytes` for the object `data`."""
    rest = data[body_bytes(data.nbytes) :]
    kept = _kept(key)
    above = parent.encode("utf-8", "surrogatepass")
    above = above if len(above) <= PARENT_BYTES else b""
    position = min(max(position, 0), MAX_POSITION)
    fields = kept + _FIELDS.pack(above, data.nbytes, position, len(kept), FORMAT_VERSION)
    end = _END.pack(xxhash.xxh3_64_intdigest(fields), MAGIC)
    padding = bytes(tail.nbytes - rest.nbytes - len(fields) - len(end))
    tail[: rest.nbytes] = rest
    tail[rest.nbytes :] = padding + fields + end


def read_footer(page: bytes | memoryview) -> Footer | None:
    """Read the last page of a file; None if it is damaged or of another format."""
    end_at = len(page) - _END.size
    fields_at = end_at - _FIELDS.size
    if fields_at < 0:
        return None
    checksum, magic = _END.unpack_from(page, end_at)
    above, object_bytes, position, key_bytes, version = _FIELDS.unpack_from(page, fields_at)
    key_at = fields_at - key_bytes
    if magic != MAGIC or version != FORMAT_VERSION or key_at < 0:
        return None
    if xxhash.xxh3_64_intdigest(page[key_at:end_at]) != checksum:
        return None
    kept = bytes(page[key_at:fields_at])
    try:
        key = kept.decode("utf-8", "surrogatepass")
        parent = above.rstrip(b"\0").decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return None
    return Footer(key or None, object_bytes, parent, position)


def is_of(footer: Footer | None, key: str, object_bytes: int) -> bool:
    """Return True if a file holds the object that was asked for."""
    return footer is not None and footer[:2] == (key if _kept(key) else None, object_bytes)


def _kept(key: str) -> bytes:
    encoded = key.encode("utf-8", "surrogatepass")
    return encoded if len(encoded) <= MAX_KEY_BYTES else b""
