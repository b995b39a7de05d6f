"""Mooncake's published wheel for NPUs over `ascend`, on the emulated CANN (`cann.cpp`).

The engine is the one that vLLM-Ascend's own connectors use in this process.
"""

import ctypes
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
import torch
from vllm_ascend.distributed.kv_transfer.utils import mooncake_transfer_engine

from tests.emulated_npu.mooncake_reader import NpuArena, options_of
from tests.support.buffers import BufferArena, random_bytes
from tests.support.mooncake_master import MooncakeMaster
from tests.support.store_contract import StoreContract, key_of, new_namespace
from vllm_kvpool.errors import StoreError
from vllm_kvpool.staging.devices import NpuDevice
from vllm_kvpool.storage.base import Buffer, ChunkRef, GetOutcome, PutOutcome
from vllm_kvpool.storage.mooncake import MooncakeStore
from vllm_kvpool.storage.mooncake_engine import shared_engine
from vllm_kvpool.vllm_adapt import ascend

pytestmark = pytest.mark.ascend

CHILD_LIMIT_S = 120
PAGE_BYTES = 64 << 10  # memory on the start of a page of the runtime's is not refused for its place
OVERLAPPED = -7  # Mooncake's ERR_ADDRESS_OVERLAPPED


@pytest.fixture(scope="module")
def device() -> NpuDevice:
    device = NpuDevice(torch.device("npu", 0))
    device.enter_thread()
    return device


@pytest.fixture(scope="module")
def master(device: NpuDevice) -> Iterator[MooncakeMaster]:
    ascend.share_engine()
    with MooncakeMaster() as master:
        yield master


@pytest.fixture(scope="module")
def shared_store(master: MooncakeMaster) -> Iterator[MooncakeStore]:
    store = MooncakeStore(options_of(master.address, "1GiB"), segment=True)
    yield store
    store.close()


@pytest.fixture
def store(shared_store: MooncakeStore) -> MooncakeStore:
    return shared_store


@pytest.fixture
def registered(store: MooncakeStore, device: NpuDevice) -> Iterator[NpuArena]:
    arena = NpuArena(device)
    store.register(arena.buffer)
    yield arena
    store.unregister(arena.buffer)


class TestMooncakeStore(StoreContract):
    @pytest.fixture
    def arena(self, registered: NpuArena) -> BufferArena:
        return registered


def test_stores_use_the_engine_of_vllm_ascend(store: MooncakeStore, master: MooncakeMaster) -> None:
    """A scheduler's client takes neither a segment nor a buffer; the engine stays the same."""
    own = mooncake_transfer_engine.global_te.transfer_engine
    scheduler = MooncakeStore(options_of(master.address, "1GiB"), segment=False)
    assert scheduler.exists([key_of(new_namespace(), 0)]) == [False]
    scheduler.close()
    assert shared_engine("ascend").open("elsewhere") is own


def test_memory_that_cannot_be_registered_is_said(
    store: MooncakeStore, registered: NpuArena, device: NpuDevice
) -> None:
    """Memory of other allocators, memory off a page's start, and memory that is registered."""
    unaligned = device.host_memory(1 << 20)
    assert unaligned is not None
    refused = [
        BufferArena(1 << 20).buffer,
        Buffer(ctypes.addressof(ctypes.c_char.from_buffer(unaligned)), unaligned),
    ]
    for buffer in refused:
        with pytest.raises(StoreError, match="cannot register"):
            store.register(buffer)
    registered.take(PAGE_BYTES)
    with pytest.raises(StoreError, match=rf"\(code {OVERLAPPED}\)"):
        store.register(registered.take(PAGE_BYTES))


def test_a_thread_without_a_device_cannot_register(store: MooncakeStore, device: NpuDevice) -> None:
    arena, met = NpuArena(device), []

    def register() -> None:
        try:
            store.register(arena.buffer)
        except StoreError as error:
            met.append(str(error))

    thread = threading.Thread(target=register)
    thread.start()
    thread.join()
    assert len(met) == 1


def test_what_one_card_has_put_another_cards_process_gets(
    store: MooncakeStore, registered: NpuArena, master: MooncakeMaster
) -> None:
    key, content = key_of(new_namespace(), 0), random_bytes(5000, 1)
    assert store.put([key], [registered.holding(content)], [ChunkRef("g")]) == [PutOutcome.STORED]
    reader = "tests.emulated_npu.mooncake_reader"
    command = [sys.executable, "-m", reader, master.address, key, str(len(content))]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=CHILD_LIMIT_S, check=True
    )
    assert done.stdout.splitlines()[-1] == f"{GetOutcome.OK.name} {content.hex()}"
