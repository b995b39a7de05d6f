"""The process group `hccl`, carried by gloo through copies on the host."""

from typing import Any

import torch
import torch.distributed as dist


class _Done(dist.Work):
    def __init__(self, result: list[torch.Tensor]) -> None:
        super().__init__()
        self._result = result

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def result(self) -> list[torch.Tensor]:
        return self._result

    def get_future(self) -> Any:
        future: Any = torch.futures.Future()
        future.set_result(self._result)
        return future


class Hccl(dist.ProcessGroup):
    class Options(torch._C._distributed_c10d.Backend.Options):
        def __init__(self, *_: Any) -> None:
            super().__init__("hccl")
            self.hccl_config: dict[str, Any] = {}

    def __init__(self, gloo: Any, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._set_group_name(f"hccl-{id(gloo)}")
        self._gloo = gloo

    # torch asks for the name in C++ of the group's backends, and this group has none.
    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        return self._name

    def getBackendName(self) -> str:
        return "hccl"

    def _through(self, tensors: list[torch.Tensor], call: Any) -> _Done:
        hosts = [tensor.cpu() for tensor in tensors]
        call(hosts).wait()
        for tensor, host in zip(tensors, hosts, strict=True):
            tensor.copy_(host)
        return _Done(tensors)

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> _Done:
        options = dist.AllreduceOptions() if opts is None else opts
        return self._through(tensors, lambda hosts: self._gloo.allreduce(hosts, options))

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> _Done:
        return self._through(tensors, lambda hosts: self._gloo.broadcast(hosts, opts))

    def barrier(self, opts: Any = None) -> _Done:
        self._gloo.barrier(dist.BarrierOptions()).wait()
        return _Done([])

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> _Done:
        hosts = [[each.cpu() for each in group] for group in outputs]
        self._gloo.allgather(hosts, [each.cpu() for each in inputs]).wait()
        for group, host in zip(outputs, hosts, strict=True):
            for each, of in zip(group, host, strict=True):
                each.copy_(of)
        return _Done(outputs[0])

    def _allgather_base(self, output: torch.Tensor, own: torch.Tensor, opts: Any = None) -> _Done:
        parts = list(output.view(self.size(), *own.shape).unbind(0))
        return self.allgather([parts], [own])

    def send(self, tensors: list[torch.Tensor], to: int, tag: int = 0) -> _Done:
        return self._through(tensors, lambda hosts: self._gloo.send(hosts, to, tag))

    def recv(self, tensors: list[torch.Tensor], of: int, tag: int = 0) -> _Done:
        return self._through(tensors, lambda hosts: self._gloo.recv(hosts, of, tag))


def _create(store: Any, rank: int, size: int, timeout: Any) -> Hccl:
    gloo = dist.ProcessGroupGloo(dist.PrefixStore("hccl", store), rank, size, timeout)
    return Hccl(gloo, rank, size)


def register() -> None:
    """Make `hccl` the process group of NPUs."""
    dist.is_hccl_available = lambda: True  # type: ignore[attr-defined]
    dist.Backend.register_backend("hccl", _create, devices=["npu"])
