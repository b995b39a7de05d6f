"""Stores and memory of Mooncake over `ascend`, and a process of the second card that gets a cell.

Run as `python -m tests.emulated_npu.mooncake_reader MASTER KEY BYTES`: prints the outcome, and the
cell's bytes.
"""

import os
import sys

import torch

from tests.support.buffers import BufferArena
from vllm_kvpool.staging.arena import Arena
from vllm_kvpool.staging.devices import HCCS_ALIGNMENT, NpuDevice
from vllm_kvpool.storage.mooncake import MooncakeOptions, MooncakeStore
from vllm_kvpool.storage.url import parse_store_url

ARENA_BYTES = 48 << 20


class NpuArena(BufferArena):
    """Buffers in memory of CANN's runtime, aligned as a worker's staging arena is."""

    def __init__(self, device: NpuDevice) -> None:
        super().__init__(1)
        arena = Arena(
            *(ARENA_BYTES, 1 << 20), alignment=HCCS_ALIGNMENT, memory_from=device.host_memory
        )
        self.buffer = arena.whole


def options_of(address: str, segment: str) -> MooncakeOptions:
    options = parse_store_url(f"mooncake://{address}?protocol=ascend&segment={segment}").options
    assert isinstance(options, MooncakeOptions)
    return options


def main(master: str, key: str, nbytes: str) -> None:
    """Get the cell into memory of the second card's runtime."""
    device = NpuDevice(torch.device("npu", 1))
    device.enter_thread()
    store = MooncakeStore(options_of(master, "0"), segment=True)
    arena = NpuArena(device)
    store.register(arena.buffer)
    target = arena.take(int(nbytes))
    [outcome] = store.get([key], [target])
    print(outcome.name, bytes(target.view).hex(), flush=True)
    store.close()
    os._exit(0)  # without the teardown of torch


if __name__ == "__main__":
    main(*sys.argv[1:])
