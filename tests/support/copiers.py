"""Copiers that have been compiled before a test's first step, which has limits of time."""

from collections.abc import Sequence
from typing import Any

from vllm_kvpool.staging.copy_cpu import CpuCopier


def warm_copier(layers: Sequence[Any]) -> CpuCopier:
    """One for these `LayerPages`.

    In a fresh checkout it compiles here, for seconds, and the end of a rank would not wait for it.
    """
    copier = CpuCopier(layers)
    copier.warm_up()
    return copier
