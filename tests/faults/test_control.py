"""Faults that another process is told of."""

import threading
from pathlib import Path

import pytest

from tests.support.faults import ControlledFaults, Fault, FaultControl, FaultyStore
from vllm_kvpool.errors import StoreUnreachable
from vllm_kvpool.storage.memory import MemoryStore

LIMIT_S = 10.0


@pytest.fixture
def control(tmp_path: Path) -> FaultControl:
    return FaultControl(tmp_path)


@pytest.fixture
def store(control: FaultControl) -> FaultyStore:
    """As it is in the other process."""
    return FaultyStore(MemoryStore("", 1 << 20), faults=ControlledFaults(control.directory))


def test_without_orders_nothing_fails(store: FaultyStore) -> None:
    assert store.exists(["a"]) == [False]


def test_an_order_counts_from_the_next_call_on_until_all_is_healed(
    control: FaultControl, store: FaultyStore
) -> None:
    control.inject(Fault.UNREACHABLE)
    assert not control.struck(Fault.UNREACHABLE)
    with pytest.raises(StoreUnreachable):
        store.exists(["a"])
    assert control.struck(Fault.UNREACHABLE)
    control.heal()
    assert store.exists(["a"]) == [False]
    assert not control.struck(Fault.UNREACHABLE)


def test_a_fault_that_has_struck_often_enough_is_not_renewed_by_other_orders(
    control: FaultControl, store: FaultyStore
) -> None:
    control.inject(Fault.UNREACHABLE, "exists", times=1)
    with pytest.raises(StoreUnreachable):
        store.exists(["a"])
    control.inject(Fault.UNREACHABLE, "get", times=1)
    assert store.exists(["a"]) == [False]


def test_a_call_that_is_blocked_goes_on_when_it_is_released(
    control: FaultControl, store: FaultyStore
) -> None:
    control.inject(Fault.BLOCKED, "exists")
    thread = threading.Thread(target=store.exists, args=(["a"],))
    thread.start()
    assert store.entered.wait(LIMIT_S)
    control.release()
    thread.join(LIMIT_S)
    assert not thread.is_alive()
