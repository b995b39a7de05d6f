"""What we share with vLLM-Ascend where it runs us. `vllm_ascend` is imported here alone, lazily."""

from typing import Any, cast

from vllm.platforms import current_platform

from vllm_kvpool.storage.mooncake_engine import NativeEngine, use_engine_of


def share_engine() -> None:
    """On NPUs, use the process's one Mooncake engine that vLLM-Ascend's connectors use too."""
    if current_platform.device_type == "npu":
        use_engine_of("ascend", _engine_of_vllm_ascend)


def _engine_of_vllm_ascend(host: str) -> NativeEngine:
    from vllm_ascend.distributed.kv_transfer.utils import mooncake_transfer_engine

    shared: Any = mooncake_transfer_engine.global_te
    # Its `register_buffer` works once in a process, for whoever comes first: we register ourselves.
    return cast("NativeEngine", shared.get_transfer_engine(host, device_name=None))
