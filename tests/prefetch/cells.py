"""Sealed cells by the names that an engine would tell."""

from collections.abc import Iterable, Sequence

from tests.support.buffers import make_buffer, random_bytes
from tests.support.store_contract import new_namespace
from vllm_kvpool.identity.keys import chunk_id_of_key, key_digest, key_with_prefix
from vllm_kvpool.prefetch import PromptCells
from vllm_kvpool.storage.base import Buffer, ChunkRef, GetOutcome, PutOutcome, Store
from vllm_kvpool.storage.contents.cell_format import HEADER_BYTES, write_header


def names_of(chunks: int, heads: int = 2, nbytes: int = HEADER_BYTES + 1000) -> PromptCells:
    """Return the cell names of a new prompt; each further head's cells are 8 bytes larger."""
    namespace = new_namespace("prefetched")
    key_prefixes = tuple(
        (f"{namespace}@dcp0of1@head:{head}@layers:0-4@", nbytes + 8 * head) for head in range(heads)
    )
    return PromptCells(key_prefixes, tuple(f"{chunk:040x}" for chunk in range(chunks)))


def keys_of(names: PromptCells) -> dict[str, int]:
    """Every key, chunk by chunk, with the cell's bytes."""
    return {
        key_with_prefix(key_prefix, chunk): nbytes
        for chunk in names.chunks
        for key_prefix, nbytes in names.key_prefixes
    }


def sealed(key: str, nbytes: int) -> Buffer:
    """The cell of that name, as an engine would store it."""
    buffer = make_buffer(nbytes)
    buffer.view[HEADER_BYTES:] = random_bytes(nbytes - HEADER_BYTES, sum(key.encode()))
    write_header(buffer.view, key_digest(key))
    return buffer


def put(store: Store, cells: Iterable[tuple[str, Buffer]]) -> None:
    for key, buffer in cells:
        store.register(buffer)
        assert store.put([key], [buffer], [ChunkRef(chunk_id_of_key(key))]) == [PutOutcome.STORED]
        store.unregister(buffer)


def fill(store: Store, names: PromptCells, damaged: Sequence[str] = ()) -> None:
    """Store all cells, some of them with a bit that differs."""
    for key, nbytes in keys_of(names).items():
        buffer = sealed(key, nbytes)
        if key in damaged:
            buffer.view[-1] ^= 1
        put(store, [(key, buffer)])


def is_held(store: Store, key: str, nbytes: int) -> bool:
    """Return True if the store has the cell; fail if the cell's bytes differ."""
    buffer = make_buffer(nbytes)
    store.register(buffer)
    try:
        [outcome] = store.get([key], [buffer])
    finally:
        store.unregister(buffer)
    if outcome is GetOutcome.MISSING:
        return False
    assert outcome is GetOutcome.OK
    assert buffer.view == sealed(key, nbytes).view, key
    return True
