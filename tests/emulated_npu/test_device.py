"""The emulated NPU: late, ordered by events alone, strict with threads and devices."""

import ctypes
import faulthandler
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.ascend


@pytest.fixture(autouse=True)
def _entered() -> None:
    npu().set_device(0)


def npu() -> Any:
    return torch.npu  # type: ignore[attr-defined]


def met_by_a_thread(work: Callable[[], object]) -> list[str]:
    """Return the error that a new thread meets."""
    met = []

    def run() -> None:
        try:
            work()
        except RuntimeError as error:
            met.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return met


def test_nothing_runs_before_somebody_waits() -> None:
    memory = torch.zeros(1 << 10, device="npu")
    npu().synchronize()
    memory.fill_(3.0)
    stream = npu().current_stream()
    assert not stream.query()
    assert memory.cpu().tolist() == [3.0] * (1 << 10)
    assert stream.query()


def test_a_stream_that_does_not_wait_for_an_event_may_read_what_was_before() -> None:
    """Without its event, `Copier.fence` would read old data.

    The device draws the order of streams.
    """
    script = """
import torch
torch.npu.set_device(0)
side, pages = torch.npu.Stream(), torch.zeros(8, device="npu")
torch.npu.synchronize()
pages.fill_(5.0)
event = torch.npu.Event()
event.record()
if {waits}:
    side.wait_event(event)
with torch.npu.stream(side):
    seen = pages.clone()
    print(seen.cpu()[0].item())
"""

    def seen(waits: bool, seed: int) -> str:
        env = {**os.environ, "NPU_SEED": str(seed)}
        command = [sys.executable, "-c", script.format(waits=waits)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    assert seen(waits=False, seed=1) == "0.0"
    assert {seen(waits=True, seed=seed) for seed in (1, 2, 3)} == {"5.0"}


def test_memory_that_another_stream_uses_may_be_let_go() -> None:
    """The sampler of vllm-ascend 0.26.0rc1 draws on one stream and reads on another."""
    side = npu().Stream()
    with npu().stream(side):
        drawn = torch.full((8,), 2.0, device="npu")
    npu().current_stream().wait_stream(side)
    drawn.record_stream(npu().current_stream())
    read = drawn + 1
    del drawn
    torch.full((8,), 7.0, device="npu")
    assert read.cpu().tolist() == [3.0] * 8


def test_a_process_group_keeps_its_name_until_it_is_destroyed(tmp_path: Path) -> None:
    init = f"file://{tmp_path}/ranks"
    dist.init_process_group("hccl", init_method=init, rank=0, world_size=1)
    try:
        group = dist.new_group([0])
        assert group.group_name == dist._get_process_group_name(group)
        dist.destroy_process_group(group)
    finally:
        dist.destroy_process_group()


def test_a_thread_must_enter_the_device() -> None:
    memory = torch.zeros(4, device="npu")
    for work in (
        lambda: torch.empty(4, device="npu"),
        lambda: memory.add_(1),
        lambda: memory.cpu(),
        lambda: memory.record_stream(npu().current_stream()),
        npu().Stream,
        lambda: torch.empty(4, pin_memory=True),
    ):
        [error] = met_by_a_thread(work)
        assert "has not called torch.npu.set_device" in error

    def enter_first() -> None:
        npu().set_device(0)
        assert memory.cpu().tolist() == [0.0] * 4

    assert met_by_a_thread(enter_first) == []


def test_work_on_another_device_than_the_threads_is_refused() -> None:
    with pytest.raises(RuntimeError, match="a tensor of npu:1 is used on npu:0"):
        torch.zeros(4, device="npu:1")
    with pytest.raises(RuntimeError, match="npu:8 is not there"):
        npu().set_device(8)
    with pytest.raises(RuntimeError, match="this process is of npu:0, and a thread enters npu:1"):
        npu().set_device(1)


def test_the_host_cannot_read_an_address_of_the_device() -> None:
    address = torch.ones(4, device="npu").data_ptr()
    npu().synchronize()
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        ctypes.string_at(address, 1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGSEGV


def test_memory_of_the_host_is_refused_where_the_devices_is_due() -> None:
    with pytest.raises(RuntimeError, match="a tensor of cpu is used on npu:0"):
        torch.zeros(4, 4, device="npu") @ torch.ones(4, 4)


def test_convolutions_of_patches_are_the_hosts() -> None:
    pixels, weight, bias = torch.randn(2, 3, 28, 28), torch.randn(8, 3, 14, 14), torch.randn(8)
    on_host = torch.nn.functional.conv2d(pixels, weight, bias, stride=14)
    here = torch.nn.functional.conv2d(
        *(each.to("npu") for each in (pixels, weight, bias)), stride=14
    )
    torch.testing.assert_close(here.cpu(), on_host)


def test_pinned_memory_is_known_and_read_late() -> None:
    pinned = torch.ones(4, pin_memory=True)
    assert pinned.is_pinned()
    assert not torch.ones(4).is_pinned()
    plain = torch.ones(4)
    late, taken = torch.empty(4, device="npu"), torch.empty(4, device="npu")
    late.copy_(pinned, non_blocking=True)
    taken.copy_(plain, non_blocking=True)
    pinned.fill_(2.0)
    plain.fill_(2.0)
    assert (late.cpu().tolist(), taken.cpu().tolist()) == ([2.0] * 4, [1.0] * 4)


def test_a_copy_to_pinned_memory_has_not_ended_before_its_stream() -> None:
    pinned = torch.zeros(4, pin_memory=True)
    pinned.copy_(torch.ones(4, device="npu"), non_blocking=True)
    assert pinned.tolist() == [0.0] * 4
    npu().current_stream().synchronize()
    assert pinned.tolist() == [1.0] * 4
