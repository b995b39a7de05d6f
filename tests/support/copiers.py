"""CPU copiers for tests, compiled before the first step of a test."""

from collections.abc import Sequence
from typing import Any

from vllm_kvpool.staging.copy_cpu import CpuCopier


def warm_copier(layers: Sequence[Any]) -> CpuCopier:
    """Return a copier for these `LayerPages` that is already compiled.

    In a fresh checkout, the compilation takes seconds. Without this warm-up it would run within the
    first step, whose time is limited.
    """
    copier = CpuCopier(layers)
    copier.warm_up()
    return copier
