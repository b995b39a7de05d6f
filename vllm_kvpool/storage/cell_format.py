"""The bytes of a stored cell: a fixed header, then the canonical payload (pure).

Header, little endian, `HEADER_BYTES` long:
    magic 8 | format version u16 | header bytes u16 | flags u32 (0) | payload bytes u64
    | key digest 16 | payload checksum (xxh3-64) u64 | header checksum (xxh3-64) u64 | zero
The key digest reveals a swapped object, the lengths a truncated one, the checksum a changed one.
"""

import struct
from enum import Enum

import xxhash

from vllm_kvpool.identity.keys import KEY_DIGEST_BYTES

MAGIC = b"KVPOOLC1"
FORMAT_VERSION = 1
HEADER_BYTES = 64

_FIELDS = struct.Struct(f"<8sHHIQ{KEY_DIGEST_BYTES}sQ")
_HEADER_CHECKSUM = struct.Struct("<Q")
assert _FIELDS.size + _HEADER_CHECKSUM.size <= HEADER_BYTES


class CellFault(Enum):
    """Why the bytes of a cell are not those of its key."""

    MAGIC = "magic"
    HEADER_CHECKSUM = "header_checksum"
    VERSION = "version"
    LENGTH = "length"
    KEY = "key"
    CHECKSUM = "checksum"


def write_header(cell: memoryview, key_digest: bytes) -> None:
    """Write the header in front of the payload that already lies in `cell`."""
    payload = cell[HEADER_BYTES:]
    fields = _FIELDS.pack(
        MAGIC,
        FORMAT_VERSION,
        HEADER_BYTES,
        0,
        payload.nbytes,
        key_digest,
        xxhash.xxh3_64_intdigest(payload),
    )
    cell[:HEADER_BYTES] = bytes(HEADER_BYTES)
    cell[: _FIELDS.size] = fields
    checksum = xxhash.xxh3_64_intdigest(fields)
    _HEADER_CHECKSUM.pack_into(cell, _FIELDS.size, checksum)


def verify(cell: memoryview, key_digest: bytes, *, checksum: bool) -> CellFault | None:
    """Check a cell that was read against its key; None if it is sound.

    `checksum=False` checks the header only (`verify: length`).
    """
    if cell.nbytes < HEADER_BYTES:
        return CellFault.LENGTH
    fields = bytes(cell[: _FIELDS.size])
    magic, version, header_bytes, _, payload_bytes, stored_digest, payload_sum = _FIELDS.unpack(
        fields
    )
    if magic != MAGIC:
        return CellFault.MAGIC
    (header_sum,) = _HEADER_CHECKSUM.unpack_from(cell, _FIELDS.size)
    if xxhash.xxh3_64_intdigest(fields) != header_sum:
        return CellFault.HEADER_CHECKSUM
    if version != FORMAT_VERSION or header_bytes != HEADER_BYTES:
        return CellFault.VERSION
    if payload_bytes != cell.nbytes - HEADER_BYTES:
        return CellFault.LENGTH
    if stored_digest != key_digest:
        return CellFault.KEY
    if checksum and xxhash.xxh3_64_intdigest(cell[HEADER_BYTES:]) != payload_sum:
        return CellFault.CHECKSUM
    return None
