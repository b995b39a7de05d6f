"""An emulated `torch_npu`: the part of it that vLLM-Ascend runs in eager mode.

torch imports the package by its entry point (`torch.backends`) in every process. `device.cpp` is
the device, compiled by `scripts/setup-ascend.sh`; operators are in `ops.py`.
"""

import sys
import types

import torch

from torch_npu import hccl, npu, ops, replaced

torch.utils.rename_privateuse1_backend("npu")
torch._register_device_module("npu", npu)
torch.utils.generate_methods_for_privateuse1_backend(
    for_tensor=True, for_module=True, for_packed_sequence=False, for_storage=True
)
sys.modules["torch.npu"] = npu
__version__ = "2.10.0.post4"

for _name in ops.__all__:
    globals()[_name] = getattr(ops, _name)


def _module(name: str, **members: object) -> types.ModuleType:
    """Return a submodule that is imported and whose members do nothing here."""
    module = types.ModuleType(f"torch_npu.{name}")
    vars(module).update(members)
    sys.modules[module.__name__] = module
    return module


def _unused(*arguments: object, **named: object) -> None:
    raise NotImplementedError("the emulated NPU has no such function")


multiprocessing = _module("multiprocessing")
_module("multiprocessing.reductions", rebuild_npu_tensor=_unused)
profiler = _module("profiler")
profiler.dynamic_profile = _module("profiler.dynamic_profile")  # type: ignore[attr-defined]
op_plugin = _module("op_plugin")
_module("op_plugin.atb")
_module("_inductor")
_module("op_plugin.atb._atb_ops", _register_atb_extensions=lambda: None)
atb = _module("atb", npu_paged_cache_load=ops.npu_paged_cache_load)

_C = _module("_C", _NPUTaskGroupHandle=object, _weak_ref_tensor=_unused)
_C._distributed_c10d = _module(  # type: ignore[attr-defined]
    "_C._distributed_c10d", ProcessGroupHCCL=hccl.Hccl
)

sys.modules["acl"] = types.ModuleType("acl")  # CANN's own module
sys.modules["acl.rt"] = types.ModuleType("acl.rt")
sys.modules["acl.rt"].memcpy = _unused  # type: ignore[attr-defined]


def get_npu_format(tensor: torch.Tensor) -> int:
    """Return 2, the ND format: the device has no other."""
    return 2


def npu_format_cast(tensor: torch.Tensor, number: int, *_: object) -> torch.Tensor:
    """Return the tensor unchanged: formats are not emulated."""
    return tensor


hccl.register()
replaced.install()


def _autoload() -> None:
    """Do nothing: torch calls this hook while it is imported."""
