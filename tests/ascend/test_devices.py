"""The seam between devices: threads, memory, and who takes which."""

import threading
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.memory_store import CAPABILITIES, MemoryStore
from tests.support.npu import FakeNpu, NoDeviceContext
from vllm_kvpool.errors import ConfigError
from vllm_kvpool.metrics import MetricsRegistry
from vllm_kvpool.staging import devices
from vllm_kvpool.staging.arena import SLOT_ALIGNMENT, Arena
from vllm_kvpool.staging.devices import HCCS_ALIGNMENT, HostDevice, NpuDevice
from vllm_kvpool.staging.slots import Slot
from vllm_kvpool.storage.guarded import BoundedCalls, CallTimeouts, GuardedStore
from vllm_kvpool.storage.url import parse_store_url
from vllm_kvpool.transfer.graph import Batch, BatchDone
from vllm_kvpool.transfer.lane_pool import LaneThread
from vllm_kvpool.transfer.ops import LaneName, OpKind
from vllm_kvpool.worker.worker_part import memory_source

LIMIT_S = 20.0
TIMEOUTS = CallTimeouts(call_s=LIMIT_S, answer_s=LIMIT_S)


def fail() -> None:
    raise NoDeviceContext("no such card")


def test_torch_npu_is_missed_only_where_there_is_an_npu() -> None:
    assert devices.device_for(torch.device("cpu")).is_host
    assert not devices.device_for(torch.device("cuda", 0)).is_host
    with pytest.raises(ConfigError, match="torch_npu"):
        NpuDevice(torch.device("cpu"))


@pytest.mark.parametrize("alignment", [SLOT_ALIGNMENT, devices.HOST_ALIGNMENT, HCCS_ALIGNMENT])
@pytest.mark.parametrize("from_runtime", [False, True])
def test_the_arena_begins_and_ends_where_transfers_want_it(
    npu: FakeNpu, device: NpuDevice, alignment: int, from_runtime: bool
) -> None:
    source = device.host_memory if from_runtime else HostDevice().host_memory
    arena = Arena(1 << 20, 5000, 1 << 20, alignment=alignment, memory_from=source)
    assert arena.whole.address % alignment == 0
    assert arena.whole.nbytes % alignment == 0
    assert npu.knows(arena.whole.address, arena.whole.nbytes) is from_runtime
    last = arena.buffers([Slot(arena.num_slots - 1)], [arena.slot_bytes])[0]
    last.view[:] = b"\7" * arena.slot_bytes
    where = np.frombuffer(arena.whole.view, np.uint8)
    assert last.address + last.nbytes <= arena.whole.address + arena.whole.nbytes
    assert where.__array_interface__["data"][0] == arena.whole.address
    assert int(where.sum()) == 7 * arena.slot_bytes


@pytest.mark.parametrize(
    ("urls", "from_runtime"),
    [
        ([], True),
        (["memory://a"], True),
        (["file:///tmp/a"], False),
        (["memory://a", "file:///tmp/a"], False),
        (["file:///tmp/a", "mooncake://h:1?protocol=ascend"], True),
        (["file:///tmp/a", "mooncake://h:1"], False),
    ],
)
def test_memory_of_the_runtime_where_it_serves(
    device: NpuDevice, urls: list[str], from_runtime: bool
) -> None:
    source = memory_source(device, [parse_store_url(url) for url in urls])
    assert (source(4096) is not None) is from_runtime
    assert memory_source(HostDevice(), [])(4096) is None


def test_every_thread_of_a_guard_starts_as_told() -> None:
    started: set[threading.Thread] = set()
    asked: list[threading.Thread] = []

    class Watched(MemoryStore):
        def exists(self, keys: Any) -> list[bool]:
            asked.append(threading.current_thread())
            return super().exists(keys)

    def opened() -> MemoryStore:
        asked.append(threading.current_thread())
        return Watched("", 1 << 20)

    guard = GuardedStore(
        opened,
        CAPABILITIES,
        "memory",
        TIMEOUTS,
        on_start=lambda: started.add(threading.current_thread()),
    )
    guard.exists(["k"])
    guard.close()
    assert len(set(asked)) == 2
    assert set(asked) <= started


def test_a_guard_whose_thread_cannot_start_says_why() -> None:
    with pytest.raises(NoDeviceContext, match="no such card"):
        GuardedStore(lambda: MemoryStore("", 1 << 20), CAPABILITIES, "m", TIMEOUTS, on_start=fail)


def test_calls_on_a_thread_that_cannot_start_fail_and_do_not_hang() -> None:
    calls = BoundedCalls("calls", fail)
    for _ in range(2):
        with pytest.raises(NoDeviceContext):
            calls.run(lambda: 1, LIMIT_S)
    assert calls.close(LIMIT_S)


def test_a_lane_that_cannot_enter_the_device_fails_each_batch(
    caplog: pytest.LogCaptureFixture,
) -> None:
    inbox: SimpleQueue[Batch | None] = SimpleQueue()
    outbox: SimpleQueue[Any] = SimpleQueue()
    registry = MetricsRegistry()
    gather = LaneName(OpKind.GATHER, -1)
    lane = LaneThread(gather, "lane", lambda batch: (), inbox, outbox, registry, fail)
    for _ in range(2):
        batch = Batch(gather, (), 0)
        inbox.put(batch)
        assert outbox.get(timeout=LIMIT_S) == BatchDone(batch, [])
    inbox.put(None)
    lane.thread.join(LIMIT_S)
    assert registry.snapshot()["kvpool_failures{kind=lane}"] >= 2
    assert "no such card" in caplog.text


# The stand-in itself


def test_nothing_happens_on_a_stream_before_somebody_waits(npu: FakeNpu) -> None:
    side, pages = npu.Stream(), torch.zeros(8)
    with npu.stream(npu.model_stream):
        pages.fill_(3.0)
        event = npu.Event()
        event.record()
        pages.fill_(4.0)
    with npu.stream(side):
        early = pages.clone()
        side.wait_event(event)
        late = pages.clone()
    assert pages.tolist() == [0.0] * 8
    assert late.tolist() != [3.0] * 8
    side.synchronize()
    assert (early.tolist(), late.tolist()) == ([0.0] * 8, [3.0] * 8)
    npu.model_stream.synchronize()
    assert pages.tolist() == [4.0] * 8


def test_a_number_for_the_host_waits_for_its_stream(npu: FakeNpu) -> None:
    pages = torch.zeros(2)
    with npu.stream(npu.model_stream):
        pages.fill_(5.0)
        assert float(pages[1]) == 5.0


def test_a_thread_must_enter_the_device(npu: FakeNpu) -> None:
    met: list[type[Exception]] = []

    def work() -> None:
        try:
            npu.Stream()
        except NoDeviceContext as error:
            met.append(type(error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(LIMIT_S)
    assert met == [NoDeviceContext]
