"""Replaces vLLM's Triton kernel by the emulated device's, as the module that has it is imported.

Not by a plugin of vLLM: the pool counts plugins as code of the model.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Sequence

from torch_npu.ops import slot_mapping

MODULE, KERNEL = "vllm.v1.worker.block_table", "_compute_slot_mapping_kernel"


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != MODULE:
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
    """Wait for the module."""
    sys.meta_path.insert(0, _Finder())
