"""A stand-in for `torch_npu` with pages in host memory, for tests without the emulated device.

Apart from the hardware, it is as strict as the real runtime may be:

* A stream runs its work only when a thread waits for it, as on a slow device. Work that reads pages
  too early therefore reads old bytes, and a copy that no thread waits for has not happened. New
  device memory holds `POISON`.
* A thread that has not called `set_device` may not use the device.
* Mooncake's wheel is the version that vLLM-Ascend's documentation pins (0.3.11.post1). It has no
  groups and no `location` of memory. Its engine accepts host memory only from the runtime, aligned
  to 64 KiB, and moves bytes only between registered regions.

Any thread may call. One lock guards the device, so its work runs one piece at a time.
"""

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map_only

POISON = 0x5A
HOST_PAGE = 64 << 10

# Operations that only make or describe tensors, and so happen when they are called.
_AT_ONCE = frozenset({"aten::set_", "aten::lift_fresh", "aten::detach", "aten::alias"})
_ALLOCATING = frozenset({"aten::empty", "aten::empty_like", "aten::empty_strided"})


class NoDeviceContext(RuntimeError):
    """The runtime's error for a thread that has not called `set_device` (error 107002)."""


class FakeNpu:
    """A stand-in for `torch.npu`; also makes streams and events, like the real module."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # guards every stream
        self._thread = threading.local()
        self._pinned: list[torch.Tensor] = []
        self.model_stream = FakeStream(self)

    def set_device(self, device: Any) -> None:
        """Enter the device with the calling thread."""
        self._thread.device = device

    def check_thread(self) -> None:
        """Raise NoDeviceContext unless the calling thread has entered the device."""
        if getattr(self._thread, "device", None) is None:
            name = threading.current_thread().name
            raise NoDeviceContext(f"thread {name} has not called set_device")

    def Stream(self, device: Any = None) -> "FakeStream":
        self.check_thread()
        return FakeStream(self)

    def Event(self) -> "FakeEvent":
        self.check_thread()
        return FakeEvent(self)

    def current_stream(self) -> "FakeStream":
        """Return the calling thread's stream."""
        self.check_thread()
        return getattr(self._thread, "stream", None) or self.model_stream

    @contextmanager
    def stream(self, stream: "FakeStream") -> Iterator["FakeStream"]:
        """Launch the calling thread's operations on `stream` within the `with`."""
        self.check_thread()
        before = getattr(self._thread, "stream", None)
        self._thread.stream = stream
        try:
            with _Launching(stream):
                yield stream
        finally:
            self._thread.stream = before

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Return host memory of the runtime, aligned to 64 bytes but not to a page."""
        self.check_thread()
        memory = torch.zeros(nbytes + 2 * HOST_PAGE, dtype=torch.uint8)
        self._pinned.append(memory)
        start = -memory.data_ptr() % HOST_PAGE + 64
        return memory[start : start + nbytes]

    def knows(self, address: int, nbytes: int) -> bool:
        """Return True if the runtime has allocated this host memory."""
        return any(
            memory.data_ptr() <= address and address + nbytes <= memory.data_ptr() + memory.nbytes
            for memory in self._pinned
        )


class FakeStream:
    """Work in order. A piece runs only when a thread waits for it."""

    def __init__(self, npu: FakeNpu) -> None:
        self._npu = npu
        self._work: deque[Callable[[], None]] = deque()
        self._num_done = 0

    def give(self, work: Callable[[], Any]) -> None:
        """Launch work."""
        self._npu.check_thread()
        with self._npu._lock:
            self._work.append(work)

    def mark(self) -> int:
        """Return the number of pieces of work launched so far."""
        with self._npu._lock:
            return self._num_done + len(self._work)

    def run_to(self, mark: int) -> None:
        """Run the work launched before the mark."""
        with self._npu._lock, _disable_current_modes():
            while self._num_done < mark:
                work = self._work.popleft()
                self._num_done += 1
                work()

    def wait_event(self, event: "FakeEvent") -> None:
        """Let work launched from now on run after the event."""
        self.give(event.happen)

    def synchronize(self) -> None:
        """Wait for all work launched so far."""
        self._npu.check_thread()
        self.run_to(self.mark())


class FakeEvent:
    """A position in a stream. An event that was never recorded has happened."""

    def __init__(self, npu: FakeNpu) -> None:
        self._npu = npu
        self._stream: FakeStream | None = None
        self._mark = 0

    def record(self, stream: FakeStream | None = None) -> None:
        self._stream = self._npu.current_stream() if stream is None else stream
        self._mark = self._stream.mark()

    def happen(self) -> None:
        """Run all work before the event."""
        if self._stream is not None:
            self._stream.run_to(self._mark)

    def synchronize(self) -> None:
        self._npu.check_thread()
        self.happen()


def _poison(made: torch.Tensor) -> None:
    ctypes.memset(made.untyped_storage().data_ptr(), POISON, made.untyped_storage().nbytes())


class _Launching(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch annotates neither
    """Sends every operation that reads or writes elements to a stream."""

    def __init__(self, stream: FakeStream) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._stream = stream

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        if name in _ALLOCATING:
            made = func(*args, **kwargs)
            _poison(made)
            return made
        if name in _AT_ONCE or func.is_view:
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            self._stream.give(partial(func, *args, **kwargs))
            return kwargs.get("out", args[0])
        if [type(each.type) for each in func._schema.returns] != [torch.TensorType]:
            self._stream.synchronize()  # the host waits for a number
            return func(*args, **kwargs)
        to_meta = partial(tree_map_only, torch.Tensor, lambda t: t.to("meta"))
        shape = func(*to_meta(args), **to_meta(kwargs))
        made = torch.empty_like(shape, device="cpu")
        _poison(made)
        self._stream.give(lambda: made.copy_(func(*args, **kwargs)))
        return made


# Mooncake's wheel for NPUs


class FakeNpuWheel:
    """`mooncake.store` of the NPU wheel 0.3.11.post1, with the calls in use, and its engine.

    Represents a whole cluster: all clients of one wheel see the same objects.
    """

    def __init__(self, npu: FakeNpu) -> None:
        self.npu = npu
        self.objects: dict[str, bytes] = {}
        self.engine = FakeNpuEngine(npu)
        self.setups: list[dict[str, Any]] = []

    def ReplicateConfig(self) -> Any:
        return _OldReplicateConfig()

    def MooncakeDistributedStore(self) -> "_FakeNpuClient":
        return _FakeNpuClient(self)


class _OldReplicateConfig:
    """A config without `group_ids`; newer wheels have `soft_pin_action` for `with_soft_pin`."""

    __slots__ = ("preferred_segment", "replica_num", "with_soft_pin")


class FakeNpuEngine:
    """`mooncake.engine.TransferEngine` over `ascend`."""

    RPC_PORT = 15_555

    def __init__(self, npu: FakeNpu) -> None:
        self._npu = npu
        self.num_opened = 0
        self.regions: dict[int, int] = {}
        self._num_writes = 0

    def open(self, host: str) -> "FakeNpuEngine":
        """Return this engine, like vLLM-Ascend's `get_transfer_engine`."""
        self._npu.check_thread()
        self.num_opened += 1
        return self

    def initialize(self, hostname: str, metadata: str, protocol: str, device: str) -> int:
        self._npu.check_thread()
        return 0 if (metadata, protocol, device) == ("P2PHANDSHAKE", "ascend", "") else -1

    def get_rpc_port(self) -> int:
        return self.RPC_PORT

    def get_engine(self) -> object:
        return self

    def register_memory(self, address: int, nbytes: int) -> int:
        self._npu.check_thread()
        if any(a < address + nbytes and address < a + n for a, n in self.regions.items()):
            return -7  # overlaps
        if address % HOST_PAGE or not self._npu.knows(address, nbytes):
            return -1
        self.regions[address] = nbytes
        return 0

    def unregister_memory(self, address: int) -> int:
        self._npu.check_thread()
        return 0 if self.regions.pop(address, None) is not None else -1

    def send_probe(self, session: str) -> int:
        self._npu.check_thread()
        return 0

    def transfer_submit_write(self, session: str, source: int, target: int, nbytes: int) -> int:
        """Write at once. Every session is this engine."""
        self._npu.check_thread()
        assert nbytes > 0
        if not (self.covers(source, nbytes) and self.covers(target, nbytes)):
            return 0
        ctypes.memmove(target, source, nbytes)
        self._num_writes += 1
        return self._num_writes

    def transfer_check_status(self, number: int) -> int:
        self._npu.check_thread()
        return 1

    def covers(self, address: int, nbytes: int) -> bool:
        """Return True if the memory is registered."""
        return any(a <= address and address + nbytes <= a + n for a, n in self.regions.items())


class _FakeNpuClient:
    def __init__(self, wheel: FakeNpuWheel) -> None:
        self._wheel = wheel
        self._fabric = False
        self._name = self._own_segment = ""

    def setup(
        self,
        local_hostname: str,
        metadata_server: str,
        global_segment_size: int,
        local_buffer_size: int,
        protocol: str,
        rdma_devices: str,
        master_server_addr: str,
        engine: object = None,
    ) -> int:
        self._wheel.npu.check_thread()
        self._fabric = engine is None
        self._name = local_hostname
        self._own_segment = local_hostname if global_segment_size else ""
        self._wheel.setups.append(
            {
                "name": local_hostname,
                "segment": global_segment_size,
                "buffer": local_buffer_size,
                "protocol": protocol,
                "engine": engine,
            }
        )
        return 0

    def register_buffer(self, address: int, nbytes: int) -> int:
        raise AssertionError("memory is registered with the shared engine")

    def get_hostname(self) -> str:
        return self._name

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        self._wheel.npu.check_thread()
        return [int(key in self._wheel.objects) for key in keys]

    def batch_put_from(
        self, keys: list[str], addresses: list[int], sizes: list[int], config: Any
    ) -> list[int]:
        self._wheel.npu.check_thread()
        assert config.preferred_segment == self._own_segment
        codes = []
        for key, address, nbytes in zip(keys, addresses, sizes, strict=True):
            if not (self._fabric or self._wheel.engine.covers(address, nbytes)):
                codes.append(-800)
                continue
            self._wheel.objects.setdefault(key, ctypes.string_at(address, nbytes))
            codes.append(0)
        return codes

    def batch_get_into(self, keys: list[str], addresses: list[int], sizes: list[int]) -> list[int]:
        self._wheel.npu.check_thread()
        codes = []
        for key, address, nbytes in zip(keys, addresses, sizes, strict=True):
            data = self._wheel.objects.get(key)
            if data is None or not (self._fabric or self._wheel.engine.covers(address, nbytes)):
                codes.append(-704 if data is None else -800)
                continue
            if len(data) != nbytes:
                codes.append(-600)
                continue
            ctypes.memmove(address, data, nbytes)
            codes.append(nbytes)
        return codes

    def get_size(self, key: str) -> int:
        return len(self._wheel.objects.get(key, b"")) or -704

    def batch_remove(self, keys: list[str], force: bool) -> list[int]:
        self._wheel.npu.check_thread()
        return [0 if self._wheel.objects.pop(key, None) is not None else -704 for key in keys]

    def close(self) -> int:
        self._wheel.npu.check_thread()
        return 0
