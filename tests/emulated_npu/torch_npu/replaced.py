"""Replaces a Triton kernel by the emulated device's, as the module that has it is imported.

vLLM-Ascend 0.23.0 launches vLLM's kernel, 0.26.0rc1 its own of the same name.

Not by a plugin of vLLM: the pool counts plugins as code of the model.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Sequence

from torch_npu.ops import slot_mapping

KERNEL = "_compute_slot_mapping_kernel"
MODULES = {"vllm.v1.worker.block_table", "vllm_ascend.ops.triton.compute_slot_mapping"}


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """An import finder for one module, used once."""

    def __init__(self, module: str) -> None:
        self._module = module

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self._module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        self._loader.exec_module(module)
        setattr(module, KERNEL, slot_mapping)


def install() -> None:
    """Install finders that wait for the modules."""
    sys.meta_path[:0] = map(_Finder, MODULES)
