"""An engine without a model: vLLM's real scheduler and connector, and what lies between them.

One rank, in this process. The forward pass is what the caller makes of it; every hook of both
connector objects is timed. vLLM is imported where it is used, so that a parent process needs none.
"""

import json
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.models import LlamaShape
from tests.support.mooncake_master import HOST, free_port

NOT_HOOKS = ("register_kv_caches", "shutdown", "role")
IMPORTED = (  # what an engine imports as it starts
    "vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.connector",
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector",
    "vllm.engine.arg_utils",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.structured_output",
    "vllm.v1.worker.cpu.shm",
    "vllm.v1.worker.kv_connector_model_runner_mixin",
    "vllm_kvpool.connector",
)
GATHER = "waiting for its gather"  # beside the hooks of the model's thread, a part of one
LOCAL_BUFFER_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True)
class EngineShape:
    """What the engine is built of; pages are float32, K and V of one width."""

    model: LlamaShape
    block: int
    num_blocks: int
    max_seqs: int
    max_model_len: int
    max_batched_tokens: int = 4096


class HookClock:
    """Sums the time spent in a connector's public methods; a hook that calls a hook counts once."""

    def __init__(self, connector: Any) -> None:
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

        self.by_hook: dict[str, float] = defaultdict(float)
        self._inside = False
        for name in [*dir(KVConnectorBase_V1), "request_finished_all_groups"]:
            if name.startswith("_") or name in NOT_HOOKS:
                continue
            if isinstance(getattr(type(connector), name, None), property):
                continue
            hook = getattr(connector, name, None)
            if callable(hook):
                setattr(connector, name, self._timed(name, hook))

    def _timed(self, name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return hook(*args, **kwargs)
            self._inside = True
            start = time.perf_counter()
            try:
                return hook(*args, **kwargs)
            finally:
                self.by_hook[name] += time.perf_counter() - start
                self._inside = False

        return timed

    def time_gathers(self, executor: Any) -> None:
        """Count apart what a hook waits for the gathers of its step."""
        wait = executor.wait

        def timed(*args: Any) -> Any:
            start = time.perf_counter()
            try:
                return wait(*args)
            finally:
                self.by_hook[GATHER] += time.perf_counter() - start

        executor.wait = timed

    def take(self) -> dict[str, float]:
        """Microseconds by hook since the last call."""
        spent = {name: 1e6 * seconds for name, seconds in self.by_hook.items()}
        self.by_hook.clear()
        return spent


def engine_config(
    shape: EngineShape, connector: str, extra: dict[str, Any], model: str
) -> tuple[Any, Any]:
    """The configuration that an engine with this connector would have, and its KV cache's."""
    import torch
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        KVCacheTensor,
    )

    config = EngineArgs(
        model=model,
        dtype="float32",
        block_size=shape.block,
        max_model_len=shape.max_model_len,
        max_num_seqs=shape.max_seqs,
        max_num_batched_tokens=shape.max_batched_tokens,
        skip_tokenizer_init=True,
        enforce_eager=True,
        async_scheduling=False,
        kv_transfer_config=KVTransferConfig(
            kv_connector=connector, kv_role="kv_both", kv_connector_extra_config=extra
        ),
    ).create_engine_config()
    config.cache_config.num_gpu_blocks = shape.num_blocks
    config.cache_config.kv_cache_layout = "LBHNC"
    spec = FullAttentionSpec(
        block_size=shape.block,
        num_kv_heads=shape.model.kv_heads,
        head_size=shape.model.head_dim,
        dtype=torch.float32,
    )
    names = [f"model.layers.{i}.self_attn.attn" for i in range(shape.model.layers)]
    layer_bytes = shape.num_blocks * spec.page_size_bytes
    caches = KVCacheConfig(
        num_blocks=shape.num_blocks,
        kv_cache_tensors=[
            KVCacheTensor(
                len(names) * layer_bytes,
                names,
                layer_stride=layer_bytes,
                block_stride=spec.page_size_bytes,
            )
        ],
        kv_cache_groups=[KVCacheGroupSpec(names, spec)],
        hash_block_size=shape.block,
        cache_hit_alignment_tokens=shape.block,
    )
    return config, caches


class ModelFreeEngine:
    """See the module docstring. `extra` are the connector's options, `model` is a folder."""

    def __init__(
        self, shape: EngineShape, connector: str, extra: dict[str, Any], model: str
    ) -> None:
        # vLLM's CPU worker replaces what it needs of torch.cuda in this module.
        import vllm.v1.worker.cpu.shm  # noqa: F401
        from vllm.config import set_current_vllm_config
        from vllm.distributed import parallel_state
        from vllm.distributed.kv_transfer import ensure_kv_transfer_initialized
        from vllm.distributed.kv_transfer.kv_transfer_state import get_kv_transfer_group
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core import kv_cache_utils
        from vllm.v1.structured_output import StructuredOutputManager

        self._config, caches = engine_config(shape, connector, extra, model)
        with set_current_vllm_config(self._config):
            address = f"tcp://{HOST}:{free_port()}"
            parallel_state.init_distributed_environment(1, 0, address, 0, "gloo")
            parallel_state.ensure_model_parallel_initialized(1, 1)
            ensure_kv_transfer_initialized(self._config, caches)
        worker = get_kv_transfer_group()
        self._shape = shape
        self.pages = self._allocate(caches.kv_cache_groups[0].layer_names)
        worker.register_kv_caches(self.pages)
        sizes = kv_cache_utils.resolve_kv_cache_block_sizes(caches, self._config)
        self.scheduler = self._config.scheduler_config.get_scheduler_cls()(
            vllm_config=self._config,
            kv_cache_config=caches,
            structured_output_manager=StructuredOutputManager(self._config),
            block_size=sizes[0],
            hash_block_size=sizes[1],
            log_stats=True,
        )
        hash_name = self._config.cache_config.prefix_caching_hash_algo
        hash_function = get_hash_fn_by_name(hash_name)
        kv_cache_utils.init_none_hash(hash_function)
        self._hasher = kv_cache_utils.get_request_block_hasher(sizes[1], hash_function)
        self.worker_clock = HookClock(worker)
        self.scheduler_clock = HookClock(self.scheduler.connector)
        if connector == "KVPoolConnector":
            self.worker_clock.time_gathers(worker._worker_part.worker._executor)
        self._count = self.num_loads = 0

    def _allocate(self, names: list[str]) -> dict[str, Any]:
        import torch

        shape = self._shape
        size = (shape.num_blocks, shape.model.kv_heads, shape.block, 2 * shape.model.head_dim)
        # One allocation, as vLLM's: layer after layer.
        return dict(zip(names, torch.zeros((len(names), *size)), strict=True))

    def add(self, tokens: list[int], output_tokens: int) -> str:
        """A request arrives; its id."""
        from vllm import SamplingParams
        from vllm.v1.request import Request

        self._count += 1
        sampling = SamplingParams(max_tokens=output_tokens, ignore_eos=True)
        request = Request(f"r{self._count}", tokens, sampling, None, block_hasher=self._hasher)
        self.scheduler.add_request(request)
        return request.request_id

    def step(self, forward: Callable[[Mapping[str, int]], None]) -> int:
        """One engine step; how many requests it computed.

        `forward` is given the number of tokens scheduled of each request.
        """
        from vllm.distributed.kv_transfer.kv_transfer_state import get_kv_transfer_group
        from vllm.forward_context import set_forward_context
        from vllm.v1.outputs import ModelRunnerOutput
        from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

        output = self.scheduler.schedule()
        # Saves of blocks that this step gives to others must have read them.
        get_kv_transfer_group().handle_preemptions(output.kv_connector_metadata)
        around = KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(output)
        with set_forward_context(None, self._config), around as reported:
            forward(output.num_scheduled_tokens)
        self.num_loads += len(reported.finished_recving or ())
        ids = list(output.num_scheduled_tokens)
        requests = [self.scheduler.requests[i] for i in ids]
        # A prompt that is not computed whole yields no token.
        sampled = [[7] if r.num_computed_tokens >= r.num_tokens else [] for r in requests]
        self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=ids,
                req_id_to_index={request_id: i for i, request_id in enumerate(ids)},
                sampled_token_ids=sampled,
                kv_connector_output=reported,
            ),
        )
        return len(ids)


def mooncake_environment(master: str, directory: Path, segment_bytes: int) -> dict[str, str]:
    """What vLLM's MooncakeStoreConnector reads in the environment."""
    config = {
        "mode": "embedded",
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": master,
        "protocol": "tcp",
        "device_name": "",
        "global_segment_size": segment_bytes,
        "local_buffer_size": LOCAL_BUFFER_BYTES,
    }
    (directory / "mooncake.json").write_text(json.dumps(config))
    return {
        "MOONCAKE_CONFIG_PATH": str(directory / "mooncake.json"),
        "VLLM_RPC_BASE_PATH": str(directory),
        "VLLM_HOST_IP": HOST,
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
