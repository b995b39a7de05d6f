"""Page-locks staging memory, so that a GPU copies from and to it directly.

Without it copies are correct, but slow and not asynchronous; so a refusal is a warning, and what
was locked before stays so. Used by one thread at a time: the arena's, then the one that closes it.
"""

import logging
from collections.abc import Sequence
from typing import Any, Protocol

from vllm_kvpool.layout.pages import LayerPages
from vllm_kvpool.storage.base import Buffer

logger = logging.getLogger(__name__)

# cudaHostRegister: known to all contexts, and at the same address on the device.
_PORTABLE, _MAPPED = 1, 2


class Locker(Protocol):
    """What locks memory for a device."""

    def lock(self, address: int, nbytes: int) -> str:
        """Why it could not be locked; empty if it is."""

    def unlock(self, address: int) -> None:
        """What `lock` was given; nothing may be copying from or to it."""


class CudaLocker:
    """NVIDIA's driver, on behalf of one GPU."""

    def __init__(self, device_index: int) -> None:
        self._device_index = device_index

    def lock(self, address: int, nbytes: int) -> str:
        import torch

        # A new thread begins on device 0, and would claim memory there.
        torch.cuda.set_device(self._device_index)
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        result = runtime.cudaHostRegister(address, nbytes, _PORTABLE | _MAPPED)
        return str(runtime.cudaGetErrorString(result)) if int(result) else ""

    def unlock(self, address: int) -> None:
        import torch

        torch.cuda.set_device(self._device_index)
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        result = int(runtime.cudaHostUnregister(address))
        if result:
            logger.warning("kvpool: staging memory stays page-locked (CUDA error %d)", result)


class PageLock:
    """The parts of the arena that are locked."""

    def __init__(self, locker: Locker) -> None:
        self._locker = locker
        self._locked: list[int] = []
        self._refused = False

    def lock(self, part: Buffer) -> None:
        """Lock one part: whole slots, since no copy may cross from one part to another."""
        if self._refused:
            return
        reason = self._locker.lock(part.address, part.nbytes)
        if reason:
            self._refused = True
            logger.warning(
                "kvpool: staging memory cannot be page-locked (%s); copies between it and the GPU "
                "will be slow",
                reason,
            )
        else:
            self._locked.append(part.address)

    def close(self) -> None:
        """Unlock everything."""
        while self._locked:
            self._locker.unlock(self._locked.pop())


def page_lock_for(pages: Sequence[LayerPages]) -> PageLock | None:
    """What locks staging memory for the device that these pages are on, if it wants that."""
    device = pages[0].owner[0].device
    if device.type != "cuda":
        return None
    assert device.index is not None, device
    return PageLock(CudaLocker(device.index))
