"""vLLM's descriptions of KV cache tensors, as each release spells them."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from vllm.v1.kv_cache_interface import KVCacheTensor


def tensors_of(names: Sequence[str]) -> list[KVCacheTensor]:
    """Return the KV cache tensors of layers that share no pages, in any vLLM release."""
    if "shared_by" in {field.name for field in fields(KVCacheTensor)}:
        older: Any = KVCacheTensor
        return [older(size=0, shared_by=[name]) for name in names]
    return [KVCacheTensor(size=0, layers=list(names), layer_stride=0, block_stride=0)]
