"""Cells: what was stored is what is read, or a fault is named."""

import struct

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from vllm_kvpool.identity.keys import KEY_DIGEST_BYTES, key_digest
from vllm_kvpool.storage.contents.cell_format import (
    FORMAT_VERSION,
    HEADER_BYTES,
    MAGIC,
    CellFault,
    verify,
    write_header,
)

PAYLOAD = bytes(range(256)) * 3
DIGEST = key_digest("a key")
OTHER = key_digest("another key")
CHECKED_BYTES = 56  # the header up to its zero padding


def sealed(payload: bytes = PAYLOAD, digest: bytes = DIGEST) -> bytearray:
    cell = bytearray(b"\xff" * HEADER_BYTES + payload)
    write_header(memoryview(cell), digest)
    return cell


def fault(cell: bytes, digest: bytes = DIGEST, *, checksum: bool = True) -> CellFault | None:
    return verify(memoryview(cell), digest, checksum=checksum)


def with_fields(cell: bytearray, **fields: int) -> bytearray:
    """The cell with header fields replaced and the header's checksum made right again."""
    places = {"version": ("<H", 8), "header_bytes": ("<H", 10), "payload_bytes": ("<Q", 16)}
    for name, value in fields.items():
        form, offset = places[name]
        struct.pack_into(form, cell, offset, value)
    struct.pack_into("<Q", cell, 48, xxhash.xxh3_64_intdigest(bytes(cell[:48])))
    return cell


def changed(cell: bytearray, offset: int, mask: int = 1) -> bytearray:
    cell[offset] ^= mask
    return cell


def test_the_header_is_the_one_of_the_docstring() -> None:
    cell = sealed()
    fields = struct.pack(
        f"<8sHHIQ{KEY_DIGEST_BYTES}sQ",
        *(b"KVPOOLC1", 2, 64, 0, len(PAYLOAD), DIGEST, xxhash.xxh3_64_intdigest(PAYLOAD)),
    )
    header_sum = struct.pack("<Q", xxhash.xxh3_64_intdigest(fields))
    assert bytes(cell) == fields + header_sum + bytes(8) + PAYLOAD


@pytest.mark.parametrize("payload", [b"", b"\0", PAYLOAD, bytes(1 << 20)])
def test_a_sealed_cell_is_sound(payload: bytes) -> None:
    cell = sealed(payload)
    assert bytes(cell[HEADER_BYTES:]) == payload
    assert fault(cell) is None
    assert fault(cell, checksum=False) is None


def test_sealing_twice_changes_nothing() -> None:
    cell = sealed()
    once = bytes(cell)
    write_header(memoryview(cell), DIGEST)
    assert bytes(cell) == once


@pytest.mark.parametrize(
    ("cell", "expected"),
    [
        (changed(sealed(), 0), CellFault.MAGIC),
        (bytearray(HEADER_BYTES + len(PAYLOAD)), CellFault.MAGIC),
        (changed(sealed(), 16), CellFault.HEADER_CHECKSUM),
        (changed(sealed(), 50), CellFault.HEADER_CHECKSUM),
        (with_fields(sealed(), version=FORMAT_VERSION + 1), CellFault.VERSION),
        (with_fields(sealed(), version=0), CellFault.VERSION),
        (with_fields(sealed(), header_bytes=128), CellFault.VERSION),
        (with_fields(sealed(), payload_bytes=len(PAYLOAD) + 1), CellFault.LENGTH),
        (with_fields(sealed(), payload_bytes=2**64 - 1), CellFault.LENGTH),
        (sealed()[:-1], CellFault.LENGTH),
        (sealed() + b"\0", CellFault.LENGTH),
        (sealed()[:HEADER_BYTES], CellFault.LENGTH),
        (sealed()[: HEADER_BYTES - 1], CellFault.LENGTH),
        (bytearray(), CellFault.LENGTH),
        (sealed(digest=OTHER), CellFault.KEY),
        (changed(sealed(), HEADER_BYTES), CellFault.CHECKSUM),
        (changed(sealed(), -1), CellFault.CHECKSUM),
    ],
)
def test_each_fault_has_its_name(cell: bytearray, expected: CellFault) -> None:
    assert fault(cell) is expected
    quick = None if expected is CellFault.CHECKSUM else expected
    assert fault(cell, checksum=False) is quick


def test_every_flipped_bit_of_the_header_is_found() -> None:
    for offset in range(CHECKED_BYTES):
        for bit in range(8):
            assert fault(changed(sealed(), offset, 1 << bit), checksum=False) is not None


@given(st.binary(min_size=1, max_size=2000), st.data())
def test_any_flipped_bit_of_the_payload_is_found(payload: bytes, data: st.DataObject) -> None:
    bit = data.draw(st.integers(0, len(payload) * 8 - 1))
    cell = changed(sealed(payload), HEADER_BYTES + bit // 8, 1 << bit % 8)
    assert fault(cell) is CellFault.CHECKSUM


@given(st.binary(max_size=200), st.booleans(), st.booleans(), st.booleans())
def test_any_bytes_are_judged_without_an_exception(
    tail: bytes, has_magic: bool, is_signed: bool, checksum: bool
) -> None:
    cell = bytearray((MAGIC if has_magic else b"") + tail)
    if is_signed and len(cell) >= CHECKED_BYTES:
        cell = with_fields(cell)
    assert fault(cell, checksum=checksum) is not None


@given(st.integers(0, HEADER_BYTES + len(PAYLOAD)), st.binary(max_size=100))
def test_a_cut_or_spliced_cell_is_found(length: int, tail: bytes) -> None:
    whole = sealed()
    spliced = whole[:length] + tail
    padding = slice(CHECKED_BYTES, HEADER_BYTES)
    spliced[padding] = whole[padding] if len(spliced) >= HEADER_BYTES else spliced[padding]
    assert (fault(spliced) is None) == (spliced == whole)
