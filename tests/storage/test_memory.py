"""MemoryStore: the contract, sharing by name and the order of eviction."""

from collections.abc import Iterator

import pytest

from tests.support.buffers import make_buffer
from tests.support.memory_store import LruTable, MemoryStore
from tests.support.store_contract import StoreContract, get_one, key_of, new_namespace, put_one
from vllm_kvpool.errors import ConfigError
from vllm_kvpool.identity.keys import chunk_id_of_key
from vllm_kvpool.storage.base import ChunkRef, GetOutcome, PutOutcome, Store

MIB = 1 << 20


class TestMemoryStore(StoreContract):
    @pytest.fixture
    def store(self) -> Iterator[Store]:
        store = MemoryStore("", 64 * MIB)
        yield store
        store._table.check()
        store.close()


def test_stores_of_one_name_share_and_others_do_not() -> None:
    buffer = make_buffer(100)
    put_one(MemoryStore("one", MIB), "key", buffer)
    assert MemoryStore("one", MIB).exists(["key"]) == [True]
    assert MemoryStore("two", MIB).exists(["key"]) == [False]
    assert MemoryStore("", MIB).exists(["key"]) == [False]
    assert MemoryStore("", MIB).exists(["key"]) == [False]


def test_a_name_has_one_size() -> None:
    MemoryStore("sized", MIB)
    with pytest.raises(ConfigError, match="size=1048576"):
        MemoryStore("sized", 2 * MIB)


def test_the_least_recently_used_goes_first() -> None:
    shelf = LruTable(300)
    for key in "abc":
        assert shelf.add([(key, bytes(100), ChunkRef(key))]) == [PutOutcome.STORED]
    assert shelf.take("a") is not None
    assert shelf.add([("d", bytes(150), ChunkRef("d"))]) == [PutOutcome.STORED]
    assert shelf.list_keys() == ["a", "d"]
    shelf.check()


def test_a_chunk_that_gets_another_cell_has_been_used() -> None:
    shelf = LruTable(300)
    first = key_of(new_namespace(), 0)
    second = first.replace("head:0", "head:1")
    assert chunk_id_of_key(first) == chunk_id_of_key(second)
    for key in (first, "other", second):
        shelf.add([(key, bytes(100), ChunkRef(chunk_id_of_key(key)))])
    assert shelf.list_keys() == ["other", first, second]


def test_a_prompts_end_goes_before_its_beginning() -> None:
    table = LruTable(300)
    for ref in (ChunkRef("a"), ChunkRef("b", "a", 1), ChunkRef("c", "b", 2)):
        assert table.add([(ref.id, bytes(100), ref)]) == [PutOutcome.STORED]
    assert table.take("c") is not None  # the last that was used
    for number, left in enumerate((["a", "b"], ["a"], [])):
        key = f"other{number}"
        assert table.add([(key, bytes(100), ChunkRef(key))]) == [PutOutcome.STORED]
        assert [each for each in table.list_keys() if each in "abc"] == left
        assert table.take("a") is None or left
        for other in range(number + 1):
            assert table.take(f"other{other}") is not None
    table.check()


def test_the_parent_of_what_is_put_stays() -> None:
    table = LruTable(300)
    for key in "abc":
        table.add([(key, bytes(100), ChunkRef(key))])
    assert table.add([("d", bytes(100), ChunkRef("d", "a", 1))]) == [PutOutcome.STORED]
    assert table.list_keys() == ["a", "c", "d"]


def test_chunks_that_name_each_other_as_parent_can_be_evicted() -> None:
    table = LruTable(200)
    for key, parent in ("ab", "ba"):
        assert table.add([(key, bytes(100), ChunkRef(key, parent))]) == [PutOutcome.STORED]
    assert table.add([("c", bytes(200), ChunkRef("c"))]) == [PutOutcome.STORED]
    assert table.list_keys() == ["c"]


def test_what_cannot_fit_is_full_and_evicts_nothing() -> None:
    store = MemoryStore("", MIB)
    small, large = make_buffer(100), make_buffer(MIB + 1)
    put_one(store, "small", small)
    assert put_one(store, "large", large) is PutOutcome.FULL
    assert get_one(store, "small", small) is GetOutcome.OK


def test_of_two_writers_of_one_key_the_first_wins() -> None:
    shelf = LruTable(300)
    assert shelf.add([("a", b"first", ChunkRef("a"))]) == [PutOutcome.STORED]
    assert shelf.add([("a", b"other bytes", ChunkRef("a"))]) == [PutOutcome.EXISTED]
    assert shelf.take("a") == b"first"
    shelf.check()
