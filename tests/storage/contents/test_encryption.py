"""Encrypted cells: what is read is what was written under that key, or a fault is named."""

import base64
import multiprocessing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.buffers import make_buffer
from tests.support.memory_store import MemoryStore
from vllm_kvpool.errors import ConfigError
from vllm_kvpool.storage.base import ChunkRef, GetOutcome, PutOutcome
from vllm_kvpool.storage.contents import encryption
from vllm_kvpool.storage.contents.cell_format import (
    HEADER_BYTES,
    CellFault,
    EncryptedHeader,
    is_encrypted,
    read_encrypted_header,
    write_header,
)
from vllm_kvpool.storage.contents.encryption import CellCipher, EncryptedCells, read_keys

OLD, NEW, OTHERS = (bytes([i]) * 32 for i in range(3))
PAYLOAD = bytes(range(256)) * 3
KEY = "model@fmt:1@head:0@aa"


def encrypted(cipher: CellCipher, payload: bytes = PAYLOAD, key: str = KEY) -> bytearray:
    cell = bytearray(HEADER_BYTES + len(payload))
    cipher.encrypt(key, memoryview(bytes(HEADER_BYTES) + payload), memoryview(cell))
    return cell


def header_of(cell: bytearray) -> EncryptedHeader:
    header = read_encrypted_header(memoryview(cell))
    assert isinstance(header, EncryptedHeader)
    return header


@given(st.binary(max_size=2000), st.text(max_size=20))
def test_what_was_encrypted_is_decrypted_in_place(payload: bytes, key: str) -> None:
    cell = encrypted(CellCipher([NEW]), payload, key)
    assert is_encrypted(memoryview(cell))
    assert len(payload) < 8 or payload not in bytes(cell[HEADER_BYTES:])
    assert CellCipher([OLD, NEW]).decrypt(key, memoryview(cell)) is None
    assert bytes(cell[HEADER_BYTES:]) == payload


def test_every_flipped_bit_is_found_and_is_not_taken_for_an_unknown_key() -> None:
    cipher = CellCipher([NEW])
    whole = encrypted(cipher, PAYLOAD[:40])
    for bit in range(len(whole) * 8):
        cell = bytearray(whole)
        cell[bit // 8] ^= 1 << bit % 8
        fault = cipher.decrypt(KEY, memoryview(cell))
        assert fault not in (None, CellFault.UNKNOWN_KEY), bit


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda cell: cell[:-1], CellFault.LENGTH),
        (lambda cell: cell + b"\0", CellFault.LENGTH),
        (lambda cell: cell[:20], CellFault.LENGTH),
        (lambda cell: bytearray(len(cell)), CellFault.MAGIC),
    ],
)
def test_a_cell_of_another_form_is_named(change: object, fault: CellFault) -> None:
    cipher = CellCipher([NEW])
    cell = change(encrypted(cipher))  # type: ignore[operator]
    assert cipher.decrypt(KEY, memoryview(cell)) is fault


def test_a_plain_cell_is_refused_where_cells_are_encrypted() -> None:
    cell = bytearray(HEADER_BYTES) + PAYLOAD
    write_header(memoryview(cell), bytes(16))
    assert CellCipher([NEW]).decrypt(KEY, memoryview(cell)) is CellFault.MAGIC


def test_bytes_of_another_cell_do_not_pass_under_this_key() -> None:
    cipher = CellCipher([NEW])
    cell = encrypted(cipher, key="another cell")
    assert cipher.decrypt(KEY, memoryview(cell)) is CellFault.AUTHENTICATION


def test_a_wrong_key_is_unknown_and_leaves_the_cell_as_it_is() -> None:
    cell = encrypted(CellCipher([OTHERS]))
    before = bytes(cell)
    assert CellCipher([NEW, OLD]).decrypt(KEY, memoryview(cell)) is CellFault.UNKNOWN_KEY
    assert bytes(cell) == before


def test_each_unknown_key_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    cipher = CellCipher([NEW])
    for i in range(1, 20):
        for _ in range(3):
            cell = encrypted(CellCipher([bytes([100 + i]) * 32]))
            assert cipher.decrypt(KEY, memoryview(cell)) is CellFault.UNKNOWN_KEY
    assert len(caplog.records) == encryption.MAX_WARNED
    assert "which this engine was not given" in caplog.text


def test_rotation_writes_with_the_first_key_and_reads_with_all() -> None:
    before, during, after = CellCipher([OLD]), CellCipher([NEW, OLD]), CellCipher([NEW])
    assert during.decrypt(KEY, memoryview(encrypted(before))) is None
    cell = encrypted(during)
    assert header_of(cell).key_id == header_of(encrypted(after)).key_id
    assert after.decrypt(KEY, memoryview(cell)) is None
    assert after.decrypt(KEY, memoryview(encrypted(before))) is CellFault.UNKNOWN_KEY


def test_no_nonce_is_used_twice_with_one_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encryption, "MAX_CELLS_PER_SALT", 3)
    ciphers = [CellCipher([NEW]) for _ in range(2)]
    used = [header_of(encrypted(ciphers[i % 2])) for i in range(20)]
    assert len({(each.salt, each.counter) for each in used}) == len(used)
    assert {each.counter for each in used} == {0, 1, 2}


def test_a_forked_process_draws_a_salt_of_its_own() -> None:
    cipher = CellCipher([NEW])
    before = header_of(encrypted(cipher)).salt
    context = multiprocessing.get_context("fork")
    answer = context.SimpleQueue()
    child = context.Process(target=lambda: answer.put(header_of(encrypted(cipher)).salt))
    child.start()
    assert answer.get() != before
    child.join()
    assert header_of(encrypted(cipher)).salt == before


def test_keys_of_many_writers_are_forgotten_and_derived_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(encryption, "MAX_DERIVED_KEYS", 2)
    cells = [encrypted(CellCipher([NEW])) for _ in range(5)]
    reader = CellCipher([NEW])
    assert [reader.decrypt(KEY, memoryview(bytearray(cell))) for cell in cells] == [None] * 5
    assert [reader.decrypt(KEY, memoryview(cell)) for cell in cells] == [None] * 5


# The key file


def key_file(tmp_path: Path, text: str, mode: int = 0o600) -> Path:
    path = tmp_path / "cell.keys"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_a_key_file_has_a_key_a_line(tmp_path: Path) -> None:
    first, second = (base64.b64encode(key).decode() for key in (NEW, OLD))
    path = key_file(tmp_path, f"# of 2026\n{first}\n\n  {second}  # until May\n")
    assert read_keys(path) == [NEW, OLD]


@pytest.mark.parametrize(
    ("text", "mode", "message"),
    [
        ("", 0o600, "has no key"),
        ("# nothing\n", 0o600, "has no key"),
        ("secretsecret\n", 0o600, "line 1: expected 32 bytes"),
        (base64.b64encode(bytes(16)).decode(), 0o600, "line 1: expected 32 bytes"),
        ("\N{SNOWMAN}", 0o600, "not ASCII"),
        (base64.b64encode(NEW).decode(), 0o640, "others can read it; chmod 600"),
    ],
)
def test_a_key_file_that_cannot_be_used_is_an_error_without_its_content(
    tmp_path: Path, text: str, mode: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        read_keys(key_file(tmp_path, text, mode))
    assert len(text) < 3 or text.strip() not in str(error.value)


def test_a_key_file_that_is_missing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"encryption_key_file .*cannot be read"):
        read_keys(tmp_path / "absent")


def test_equal_keys_are_an_error() -> None:
    with pytest.raises(ConfigError, match="two keys"):
        CellCipher([NEW, NEW])


# Puts


def test_a_put_stores_encrypted_copies_and_changes_no_buffer() -> None:
    stores = [MemoryStore("", 1 << 20) for _ in range(2)]
    cells = EncryptedCells(CellCipher([NEW]), stores)
    buffers = [make_buffer(HEADER_BYTES + n) for n in (1000, 5000)]
    for buffer in buffers:
        buffer.view[HEADER_BYTES:] = bytes(buffer.nbytes - HEADER_BYTES - 4) + b"KEEP"
    for keys in (["a", "b"], ["c", "d"]):
        outcomes = cells.put(1, keys, buffers, [ChunkRef("")] * 2)
        assert outcomes == [PutOutcome.STORED] * 2
    cells.put(1, ["e"], [make_buffer(HEADER_BYTES + 20_000)], [ChunkRef("")])
    assert stores[0].exists(["a"]) == [False]
    for i, key in enumerate("ab"):
        got = make_buffer(buffers[i].nbytes)
        assert stores[1].get([key], [got]) == [GetOutcome.OK]
        assert b"KEEP" not in bytes(got.view)
        assert cells.decrypt(key, got.view) is None
        assert got.view[HEADER_BYTES:] == buffers[i].view[HEADER_BYTES:]
    cells.close()
