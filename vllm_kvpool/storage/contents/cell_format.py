"""The bytes of a stored cell: a fixed header, then the canonical payload (pure).

Header, little endian, `HEADER_BYTES` long:
    magic 8 | format version u16 | header bytes u16 | flags u32 (0) | payload bytes u64
    | key digest 16 | payload checksum (xxh3-64) u64 | header checksum (xxh3-64) u64 | zero
The key digest reveals a swapped object, the lengths a truncated one, the checksum a changed one.

An encrypted cell (`encryption.py`) has the same size and another header:
    magic 8 | format version u16 | header bytes u16 | key id u32 | payload bytes u64
    | salt 12 | counter u32 | header checksum (xxh3-64) u64 | tag 16
"""

import struct
from enum import Enum
from typing import Any, NamedTuple

from xxhash import xxh3_64_intdigest as _checksum_of

from vllm_kvpool.identity.keys import KEY_DIGEST_BYTES

MAGIC = b"KVPOOLC1"
FORMAT_VERSION = 2
HEADER_BYTES = 64

_FIELDS = struct.Struct(f"<8sHHIQ{KEY_DIGEST_BYTES}sQ")
_HEADER_CHECKSUM = struct.Struct("<Q")
_HEADER = struct.Struct(f"<{_FIELDS.size}sQ{HEADER_BYTES - _FIELDS.size - 8}x")

ENCRYPTED_MAGIC = b"KVPOOLE1"
ENCRYPTED_VERSION = 1
SALT_BYTES = 12
TAG_BYTES = 16
_ENCRYPTED_FIELDS = struct.Struct(f"<8sHHIQ{SALT_BYTES}sI")
assert _ENCRYPTED_FIELDS.size + _HEADER_CHECKSUM.size + TAG_BYTES == HEADER_BYTES


class CellFault(Enum):
    """Reasons to reject a cell's bytes."""

    MAGIC = "magic"
    HEADER_CHECKSUM = "header_checksum"
    VERSION = "version"
    LENGTH = "length"
    KEY = "key"
    CHECKSUM = "checksum"
    UNKNOWN_KEY = "unknown_key"  # encrypted with a key that is not in the key file
    AUTHENTICATION = "authentication"  # changed since it was encrypted, or another cell's bytes


def write_header(cell: memoryview, key_digest: bytes) -> None:
    """Write the header in front of the payload that already lies in `cell`."""
    cell[:HEADER_BYTES] = _header_of(cell[HEADER_BYTES:], key_digest)


def _header_of(payload: memoryview, key_digest: bytes) -> bytes:
    """Return the header of a cell with this payload."""
    checksum = _checksum_of(payload)
    fields = _FIELDS.pack(
        MAGIC, FORMAT_VERSION, HEADER_BYTES, 0, payload.nbytes, key_digest, checksum
    )
    return _HEADER.pack(fields, _checksum_of(fields))


def _fields_of(
    cell: memoryview, layout: struct.Struct, magic: bytes, version: int
) -> tuple[Any, ...] | CellFault:
    """Return the fields of a header after its length, or what is wrong with it."""
    if cell.nbytes < HEADER_BYTES:
        return CellFault.LENGTH
    fields = bytes(cell[: layout.size])
    found_magic, found_version, header_bytes, *rest = layout.unpack(fields)
    if found_magic != magic:
        return CellFault.MAGIC
    (header_sum,) = _HEADER_CHECKSUM.unpack_from(cell, layout.size)
    if _checksum_of(fields) != header_sum:
        return CellFault.HEADER_CHECKSUM
    if found_version != version or header_bytes != HEADER_BYTES:
        return CellFault.VERSION
    return tuple(rest)


def verify(cell: memoryview, key_digest: bytes, *, checksum: bool) -> CellFault | None:
    """Check a cell that was read against its key; None if it is sound.

    `checksum=False` checks the header only (`verify: length`).
    """
    header, payload = cell[:HEADER_BYTES], cell[HEADER_BYTES:]
    if checksum and bytes(header) == _header_of(payload, key_digest):
        return None  # as nearly always; the fault is named below
    fields = _fields_of(cell, _FIELDS, MAGIC, FORMAT_VERSION)
    if isinstance(fields, CellFault):
        return fields
    _, payload_bytes, stored_digest, payload_sum = fields
    if payload_bytes != cell.nbytes - HEADER_BYTES:
        return CellFault.LENGTH
    if stored_digest != key_digest:
        return CellFault.KEY
    if checksum and _checksum_of(cell[HEADER_BYTES:]) != payload_sum:
        return CellFault.CHECKSUM
    return None


class EncryptedHeader(NamedTuple):
    """The header of an encrypted cell, without its tag."""

    key_id: int
    payload_bytes: int
    salt: bytes
    counter: int

    def pack(self) -> bytes:
        """Return the fields as they are stored and authenticated."""
        return _ENCRYPTED_FIELDS.pack(
            *(ENCRYPTED_MAGIC, ENCRYPTED_VERSION, HEADER_BYTES, self.key_id, self.payload_bytes),
            *(self.salt, self.counter),
        )

    def write(self, cell: memoryview, tag: bytes) -> None:
        """Write the header in front of the encrypted payload that already lies in `cell`."""
        fields = self.pack()
        checksum = _HEADER_CHECKSUM.pack(_checksum_of(fields))
        cell[:HEADER_BYTES] = fields + checksum + tag


def is_encrypted(cell: memoryview) -> bool:
    """Return True if a cell claims to be encrypted."""
    return bytes(cell[: len(ENCRYPTED_MAGIC)]) == ENCRYPTED_MAGIC


def read_encrypted_header(cell: memoryview) -> EncryptedHeader | CellFault:
    """Read and check the header of an encrypted cell; this needs no key."""
    fields = _fields_of(cell, _ENCRYPTED_FIELDS, ENCRYPTED_MAGIC, ENCRYPTED_VERSION)
    if isinstance(fields, CellFault):
        return fields
    header = EncryptedHeader(*fields)
    return header if header.payload_bytes == cell.nbytes - HEADER_BYTES else CellFault.LENGTH


def tag_of(cell: memoryview) -> bytes:
    """Return the tag of an encrypted cell, with a sound header."""
    return bytes(cell[HEADER_BYTES - TAG_BYTES : HEADER_BYTES])
