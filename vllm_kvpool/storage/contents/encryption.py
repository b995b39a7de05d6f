"""Encrypted and authenticated cells: AES-256-GCM with keys from a file.

Each process draws a salt, derives a key of its own from the given key and the salt (HKDF-SHA256),
and counts the cells it encrypts: the count is the nonce, so no nonce is used twice under one key.
The associated data are the fields of the header and the cell's key in the pool. A key's id is
derived from it: cells of a key that was not given have an unknown id.
"""

import base64
import binascii
import itertools
import logging
import os
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from vllm_kvpool.errors import ConfigError
from vllm_kvpool.private_files import read_secret
from vllm_kvpool.storage.base import Buffer, ChunkRef, PutOutcome, Store, map_buffer
from vllm_kvpool.storage.contents.cell_format import (
    HEADER_BYTES,
    SALT_BYTES,
    CellFault,
    EncryptedHeader,
    read_encrypted_header,
    tag_of,
)

logger = logging.getLogger(__name__)

KEY_BYTES = 32
NONCE_BYTES = 12
MAX_CELLS_PER_SALT = 2**32  # the counter in a header; then a process draws another salt
MAX_WARNED = 8  # ids of unknown keys
MAX_DERIVED_KEYS = 4096  # of other processes, remembered
ALIGNMENT = 4096  # of cells in memory, for direct I/O


def read_keys(path: Path) -> list[bytes]:
    """Return the keys of a file that its owner alone may read, as of `parse_keys`."""
    where = f"encryption_key_file {path}"
    content = read_secret(path, "encryption_key_file")
    try:
        text = content.decode("ascii")
    except ValueError:
        raise ConfigError(f"{where} is not ASCII text") from None
    return parse_keys(text, where)


def parse_keys(text: str, where: str) -> list[bytes]:
    """Return keys in order: a line is 32 bytes in base64, `#` begins a comment.

    Raises ConfigError, which names `where` and never shows a key.
    """
    keys: list[bytes] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not (encoded := line.partition("#")[0].strip()):
            continue
        try:
            key = base64.b64decode(encoded, validate=True)
        except binascii.Error:
            key = b""
        if len(key) != KEY_BYTES:
            raise ConfigError(
                f"{where}, line {number}: expected {KEY_BYTES} bytes in base64, such as "
                f"`openssl rand -base64 {KEY_BYTES}` prints"
            )
        keys.append(key)
    if not keys:
        raise ConfigError(f"{where} has no key; `openssl rand -base64 {KEY_BYTES}` prints one")
    return keys


class CellCipher:
    """Encrypts cells with the first of several keys, and decrypts those of any; thread-safe."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        """Prepare the keys; ConfigError if two keys have one id."""
        self._keys = {_key_id(key): key for key in keys}
        if len(self._keys) != len(keys):
            raise ConfigError("encryption: two keys are equal or have one id; replace one")
        self._write_id = _key_id(keys[0])
        self._process_key = _ProcessKey(keys[0])
        self._derived: dict[tuple[int, bytes], bytes] = {}
        self._unknown: set[int] = set()  # ids that were warned of

    @property
    def key_ids(self) -> list[int]:
        """The ids of the keys, that of the one which encrypts first."""
        return list(self._keys)

    def encrypt(self, key: str, plain: memoryview, encrypted: memoryview) -> None:
        """Write the encrypted form of the cell `plain`, whose own header does not count."""
        process, counter = self._next_nonce()
        header = EncryptedHeader(self._write_id, plain.nbytes - HEADER_BYTES, process.salt, counter)
        encryptor = Cipher(algorithms.AES(process.key), modes.GCM(_nonce(counter))).encryptor()
        encryptor.authenticate_additional_data(header.pack() + key.encode())
        encryptor.update_into(plain[HEADER_BYTES:], encrypted[HEADER_BYTES:])
        encryptor.finalize()
        header.write(encrypted, encryptor.tag)

    def decrypt(self, key: str, cell: memoryview) -> CellFault | None:
        """Decrypt a cell's payload in place; after a fault its bytes are undefined."""
        header = read_encrypted_header(cell)
        if isinstance(header, CellFault):
            return header
        if header.key_id not in self._keys:
            self._warn_of_unknown(header.key_id)
            return CellFault.UNKNOWN_KEY
        derived = self._derived_key(header.key_id, header.salt)
        mode = modes.GCM(_nonce(header.counter), tag_of(cell))
        decryptor = Cipher(algorithms.AES(derived), mode).decryptor()
        decryptor.authenticate_additional_data(header.pack() + key.encode())
        payload = cell[HEADER_BYTES:]
        decryptor.update_into(payload, payload)
        try:
            decryptor.finalize()
        except InvalidTag:
            return CellFault.AUTHENTICATION
        return None

    def _warn_of_unknown(self, key_id: int) -> None:
        """Warn once of each of the first ids: a flood of others fills neither log nor memory."""
        if key_id not in self._unknown and len(self._unknown) < MAX_WARNED:
            self._unknown.add(key_id)
            logger.warning(
                "kvpool: the store has cells of key id %08x, which this engine was not given; they "
                "count as missing. Add the key to encryption_key_file, or give engines with other "
                "keys another `namespace`",
                key_id,
            )

    def _next_nonce(self) -> "tuple[_ProcessKey, int]":
        while True:
            key = self._process_key
            if key.pid == os.getpid():  # a process that was forked draws its own salt
                counter = next(key.counter)
                if counter < MAX_CELLS_PER_SALT:
                    return key, counter
            self._process_key = _ProcessKey(self._keys[self._write_id])

    def _derived_key(self, key_id: int, salt: bytes) -> bytes:
        derived = self._derived.get((key_id, salt))
        if derived is None:
            if len(self._derived) >= MAX_DERIVED_KEYS:
                self._derived.clear()
            derived = self._derived[key_id, salt] = _derive(self._keys[key_id], salt)
        return derived


class EncryptedCells:
    """Puts encrypted copies of cells, and decrypts cells that were read; thread-safe.

    A put takes memory of its own, registered with its store, as large as the largest put before.
    """

    def __init__(self, cipher: CellCipher, stores: Sequence[Store]) -> None:
        self.decrypt = cipher.decrypt
        self._cipher = cipher
        self._stores = stores
        self._free: list[list[Buffer]] = [[] for _ in stores]

    def put(
        self, tier: int, keys: Sequence[str], buffers: Sequence[Buffer], chunks: Sequence[ChunkRef]
    ) -> list[PutOutcome]:
        """Put the encrypted forms of plain cells, as `Store.put`."""
        ends = list(accumulate(-(-buffer.nbytes // ALIGNMENT) * ALIGNMENT for buffer in buffers))
        starts = [0, *ends[:-1]]
        memory = self._take(tier, ends[-1])
        copies = [
            memory.part(start, start + buffer.nbytes)
            for start, buffer in zip(starts, buffers, strict=True)
        ]
        for key, buffer, copy in zip(keys, buffers, copies, strict=True):
            self._cipher.encrypt(key, buffer.view, copy.view)
        try:
            return self._stores[tier].put(keys, copies, chunks)
        finally:
            self._free[tier].append(memory)

    def _take(self, tier: int, nbytes: int) -> Buffer:
        store, free = self._stores[tier], self._free[tier]
        try:
            memory = free.pop()
        except IndexError:
            pass
        else:
            if memory.nbytes >= nbytes:
                return memory
            store.unregister(memory)
        memory = map_buffer(nbytes)
        store.register(memory)
        return memory

    def close(self) -> None:
        """Take the memory back from the stores, before they are closed."""
        for store, free in zip(self._stores, self._free, strict=True):
            while free:
                store.unregister(free.pop())


class _ProcessKey:
    """A process's salt, the key derived with it, and the count of its cells."""

    def __init__(self, key: bytes) -> None:
        self.pid = os.getpid()
        self.salt = os.urandom(SALT_BYTES)
        self.key = _derive(key, self.salt)
        self.counter = itertools.count()


def _nonce(counter: int) -> bytes:
    return counter.to_bytes(NONCE_BYTES, "little")


def _derive(key: bytes, salt: bytes) -> bytes:
    return HKDF(SHA256(), KEY_BYTES, salt, b"kvpool cell 1").derive(key)


def _key_id(key: bytes) -> int:
    return int.from_bytes(HKDF(SHA256(), 4, None, b"kvpool key id 1").derive(key), "little")
