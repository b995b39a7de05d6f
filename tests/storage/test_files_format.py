"""The format of a file: round trips around whole pages, and what is not ours."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.buffers import random_bytes
from vllm_kvpool.storage.file.format import (
    MAX_KEY_BYTES,
    MAX_TAIL_BYTES,
    PAGE_BYTES,
    PARENT_BYTES,
    Footer,
    body_bytes,
    file_bytes,
    is_of,
    read_footer,
    tail_bytes,
    write_tail,
)

around_pages = st.builds(
    lambda pages, off: max(pages * PAGE_BYTES + off, 0), st.integers(0, 4), st.integers(-400, 400)
)
keys = st.text(max_size=300) | st.text("k", min_size=MAX_KEY_BYTES - 2, max_size=MAX_KEY_BYTES + 2)


def file_of(data: bytes, key: str, junk: bytes = b"\xaa") -> bytes:
    tail = bytearray(junk * tail_bytes(len(data), key))
    write_tail(memoryview(tail), memoryview(data), key)
    return data[: body_bytes(len(data))] + bytes(tail)


@given(around_pages, keys)
def test_an_object_and_its_key_come_back_from_whole_pages(nbytes: int, key: str) -> None:
    data = random_bytes(nbytes, 1)
    file = file_of(data, key)
    assert len(file) == file_bytes(nbytes, key)
    assert len(file) % PAGE_BYTES == 0
    assert len(file) - nbytes <= MAX_TAIL_BYTES
    footer = read_footer(file[-PAGE_BYTES:])
    assert footer is not None
    assert footer.object_bytes == nbytes
    assert footer.key == (
        key if 0 < len(key.encode("utf-8", "surrogatepass")) <= MAX_KEY_BYTES else None
    )
    assert is_of(footer, key, nbytes)
    assert file[:nbytes] == data
    assert file == file_of(data, key, junk=b"\x55"), "what was in memory before got into the file"


@given(around_pages, keys, st.integers(-2 * PAGE_BYTES, 2 * PAGE_BYTES).filter(bool))
def test_another_size_is_told_though_the_file_be_as_long(nbytes: int, key: str, off: int) -> None:
    file = file_of(random_bytes(nbytes, 1), key)
    assert not is_of(read_footer(file[-PAGE_BYTES:]), key, nbytes + off)


@given(around_pages, st.text(min_size=1, max_size=300), st.data())
def test_a_changed_footer_is_none(nbytes: int, key: str, data: st.DataObject) -> None:
    page = bytearray(file_of(random_bytes(nbytes, 1), key)[-PAGE_BYTES:])
    footer_bytes = len(key.encode("utf-8", "surrogatepass")) + 160
    at = data.draw(st.integers(1, footer_bytes))
    page[-at] ^= data.draw(st.integers(1, 255))
    assert read_footer(page) is None


@pytest.mark.parametrize("page", [b"", bytes(27), bytes(PAGE_BYTES), b"\xff" * PAGE_BYTES])
def test_what_is_not_ours_is_none(page: bytes) -> None:
    assert read_footer(page) is None
    assert not is_of(None, "key", 0)


def test_the_tail_grows_by_a_page_where_the_rest_leaves_no_room() -> None:
    key = "k" * 100
    room = PAGE_BYTES - 260
    assert [tail_bytes(n, key) for n in (0, room, room + 1, PAGE_BYTES)] == [
        *(PAGE_BYTES, PAGE_BYTES, MAX_TAIL_BYTES, PAGE_BYTES)
    ]


@given(st.text(max_size=40), st.integers(0, (1 << 32) - 1))
def test_where_a_chunk_stands_comes_back(parent: str, position: int) -> None:
    parent = parent.rstrip("\0")
    tail = bytearray(PAGE_BYTES)
    write_tail(memoryview(tail), memoryview(b"x"), "key", parent, position)
    kept = parent if len(parent.encode("utf-8", "surrogatepass")) <= PARENT_BYTES else ""
    assert read_footer(tail) == Footer("key", 1, kept, position)


def test_another_key_is_told() -> None:
    page = file_of(b"x", "one")
    assert read_footer(page) == Footer("one", 1)
    assert not is_of(read_footer(page), "two", 1)
