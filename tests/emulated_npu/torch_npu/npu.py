"""`torch.npu`: devices, streams and events."""

import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import _npu_device as _device
import torch

GIB = 1 << 30
MEMORY_BYTES = 1 * GIB


def _index(device: Any = None) -> int:
    if device is None:
        return current_device()
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return current_device() if index is None else index


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def _is_in_bad_fork() -> bool:
    return False


def init() -> None:
    pass


_lazy_init = init


def device_count() -> int:
    return int(_device.device_count())


def current_device() -> int:
    return int(_device.current_device())


def set_device(device: Any) -> None:
    _device.set_device(_index(device))


def synchronize(device: Any = None) -> None:
    _device.synchronize()


def get_device_name(device: Any = None) -> str:
    return "Ascend910B (emulated)"


def get_device_properties(device: Any = None) -> Any:
    return types.SimpleNamespace(
        name=get_device_name(),
        total_memory=MEMORY_BYTES,
        multi_processor_count=8,
        cube_core_num=8,
        vector_core_num=8,
        L2_cache_size=1 << 20,
    )


def get_soc_version() -> int:
    """Return the number of an A2, for which the published wheel is built."""
    return 220


def get_device_capability(device: Any = None) -> None:
    return None


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16]


class device:
    """A context manager that makes another device the thread's current device."""

    def __init__(self, device: Any) -> None:
        self._index, self._before = _index(device), -1

    def __enter__(self) -> None:
        self._before = current_device()
        set_device(self._index)

    def __exit__(self, *_: object) -> None:
        set_device(self._before)


class Stream(torch.Stream):
    def __new__(cls, device: Any = None, priority: int = 0, **more: Any) -> "Stream":
        if "stream_id" in more:
            return super().__new__(cls, **more)
        return super().__new__(cls, torch.device("npu", _index(device)))

    def __init__(self, *_: Any, **__: Any) -> None:
        pass


class Event(torch.Event):
    def __new__(cls, enable_timing: bool = False, **_: Any) -> "Event":
        return super().__new__(cls, torch.device("npu", current_device()))

    def __init__(self, *_: Any, **__: Any) -> None:
        pass


class ExternalEvent(Event):
    pass


def current_stream(device: Any = None) -> torch.Stream:
    return torch.accelerator.current_stream(torch.device("npu", _index(device)))


def default_stream(device: Any = None) -> torch.Stream:
    at = torch.device("npu", _index(device))
    return torch.Stream(stream_id=0, device_index=at.index, device_type=20)


def set_stream(stream: torch.Stream) -> None:
    torch.accelerator.set_stream(stream)


@contextmanager
def stream(stream: torch.Stream | None) -> Iterator[None]:
    if stream is None:
        yield
        return
    before = current_stream(stream.device)
    set_stream(stream)
    try:
        yield
    finally:
        set_stream(before)


def mem_get_info(device: Any = None) -> tuple[int, int]:
    return MEMORY_BYTES - memory_allocated(), MEMORY_BYTES


def memory_allocated(device: Any = None) -> int:
    return int(_device.memory_allocated())


memory_reserved = max_memory_allocated = max_memory_reserved = memory_allocated


def memory_stats(device: Any = None) -> dict[str, int]:
    return {
        "allocated_bytes.all.peak": memory_allocated(),
        "allocated_bytes.all.current": memory_allocated(),
    }


def empty_cache() -> None:
    pass


def reset_peak_memory_stats(device: Any = None) -> None:
    pass


def is_current_stream_capturing() -> bool:
    return False


def set_compile_mode(**_: Any) -> None:
    pass


def manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)


manual_seed_all = manual_seed


def get_rng_state(device: Any = None) -> torch.Tensor:
    return torch.default_generator.get_state()


def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    torch.default_generator.set_state(state)


class NPUGraph:
    """A graph of the NPU, not emulated: eager mode makes none."""


config = types.SimpleNamespace(allow_internal_format=False)
memory = types.ModuleType("torch.npu.memory")
memory.NPUPluggableAllocator = object  # type: ignore[attr-defined]
memory.MemPool = object  # type: ignore[attr-defined]
