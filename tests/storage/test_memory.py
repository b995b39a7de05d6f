"""MemoryStore: the contract, sharing by name and the order of eviction."""

from collections.abc import Iterator

import pytest

from tests.support.buffers import make_buffer
from tests.support.memory_store import MemoryStore
from tests.support.store_contract import StoreContract, get_one, put_one
from vllm_kvpool.errors import ConfigError
from vllm_kvpool.storage.base import GetOutcome, PutOutcome, Store

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


def test_what_cannot_fit_is_full_and_evicts_nothing() -> None:
    store = MemoryStore("", MIB)
    small, large = make_buffer(100), make_buffer(MIB + 1)
    put_one(store, "small", small)
    assert put_one(store, "large", large) is PutOutcome.FULL
    assert get_one(store, "small", small) is GetOutcome.OK
