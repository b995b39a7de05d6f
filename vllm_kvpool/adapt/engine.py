"""vLLM's configuration and pages -> our values.

`adapt/`, `connector.py` and `plugin.py` alone import vLLM; nothing of its types goes further down.
What cannot be shared correctly is refused here, by name, before the engine starts.
"""

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.utils import get_pp_indices
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, MLAAttentionSpec

from vllm_kvpool.adapt import epochs, releases
from vllm_kvpool.adapt.namespace import engine_namespace
from vllm_kvpool.config import KVPoolConfig, LoadFailure, Role
from vllm_kvpool.errors import ConfigError
from vllm_kvpool.layout import formats
from vllm_kvpool.layout.pages import LayerPages
from vllm_kvpool.layout.topology import Topology, default_layer_span
from vllm_kvpool.pool.sides import ModelShape, RankPlace
from vllm_kvpool.staging.copier import Copier

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool

logger = logging.getLogger(__name__)

CPU_ISAS_WITH_PLAIN_PAGES = ("vec", "vec16")


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What the pool needs to know of an engine; the same on its scheduler's side and its ranks'."""

    shape: ModelShape
    key_bytes: int
    value_bytes: int
    is_latent: bool
    media_are_named: bool


def role_of(vllm_config: "VllmConfig") -> Role:
    """vLLM's `kv_role`."""
    assert vllm_config.kv_transfer_config is not None
    return Role(vllm_config.kv_transfer_config.kv_role)


def first_epoch(vllm_config: "VllmConfig") -> str:
    """What the weights are that the engine starts with, in the words of `epochs.py`."""
    model = vllm_config.model_config
    if str(vllm_config.load_config.load_format) == "dummy":
        return ""
    return epochs.epoch_of_files(str(model.model), model.revision)


def extra_config(vllm_config: "VllmConfig") -> Mapping[str, Any]:
    """`kv_connector_extra_config` as the user wrote it."""
    assert vllm_config.kv_transfer_config is not None
    return vllm_config.kv_transfer_config.kv_connector_extra_config or {}


def read_engine(
    vllm_config: "VllmConfig", kv_cache_config: KVCacheConfig, config: KVPoolConfig
) -> EngineFacts:
    """Check that this engine can share, and gather what the pool must know of it."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    spec = _attention_spec(kv_cache_config)
    context = parallel.decode_context_parallel_size * parallel.prefill_context_parallel_size
    if context != 1:
        raise ConfigError(
            "context parallelism (decode or prefill) is not supported yet; set "
            "decode_context_parallel_size and prefill_context_parallel_size to 1"
        )
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        raise ConfigError(
            "calculate_kv_scales computes scales at run time that other engines cannot know; use "
            "a checkpoint with static scales or another kv_cache_dtype"
        )
    is_latent = isinstance(spec, MLAAttentionSpec)
    num_heads = 1 if is_latent else model.get_total_num_kv_heads()
    stages = _stages(vllm_config, kv_cache_config)
    num_layers = stages[-1][1]
    item = torch.empty((), dtype=spec.dtype).element_size()
    row_bytes = releases.row_bytes(spec)
    is_whole = is_latent or releases.has_own_content(spec)
    key_bytes = row_bytes if is_whole else spec.head_size * item
    topology = Topology(
        num_heads=num_heads,
        tp_size=parallel.tensor_parallel_size,
        stages=stages,
        layer_span=config.layer_span
        or default_layer_span(num_layers, row_bytes, config.chunk_tokens),
        per_head=config.per_head_storage,
    )
    if spec.num_kv_heads != topology.heads_per_rank:
        raise ConfigError(
            f"a rank holds {spec.num_kv_heads} KV heads where {topology.heads_per_rank} were "
            "expected; this model's heads cannot be shared"
        )
    cache = vllm_config.cache_config
    media_are_named = bool(cache.enable_prefix_caching) or _processor_cache_gb(vllm_config) > 0
    shape = ModelShape(
        namespace=engine_namespace(vllm_config, config, spec, topology),
        topology=topology,
        block_size=spec.block_size,
        num_blocks=kv_cache_config.num_blocks,
        num_ranks=topology.tp_size * len(stages),
        row_bytes=row_bytes,
    )
    return EngineFacts(
        shape=shape,
        key_bytes=key_bytes,
        value_bytes=row_bytes - key_bytes,
        is_latent=is_latent,
        media_are_named=media_are_named,
    )


def _attention_spec(kv_cache_config: KVCacheConfig) -> FullAttentionSpec:
    """The one attention spec, if its pages can be cut by token and head."""
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        kinds = ", ".join(sorted({type(g.kv_cache_spec).__name__ for g in groups}))
        raise ConfigError(
            f"this model has {len(groups)} KV cache groups ({kinds}); only models with one "
            "full-attention group are supported yet. If they are full and sliding-window "
            "attention, --disable-hybrid-kv-cache-manager makes one group of them"
        )
    spec = groups[0].kv_cache_spec
    if type(spec) not in (FullAttentionSpec, MLAAttentionSpec):
        raise ConfigError(f"KV cache format {type(spec).__name__} cannot be shared yet")
    assert isinstance(spec, FullAttentionSpec)
    if releases.packs_heads(spec):
        raise ConfigError(
            "this attention backend packs several KV heads together, so its pages cannot be cut "
            "by head; choose another backend with --attention-backend or another kv_cache_dtype"
        )
    if (tokens := releases.tokens_per_state(spec)) != 1:
        raise ConfigError(
            f"this model keeps one KV state for {tokens} tokens, which cannot be cut by token; it "
            "cannot be shared yet"
        )
    return spec


def _stages(
    vllm_config: "VllmConfig", kv_cache_config: KVCacheConfig
) -> tuple[tuple[int, int], ...]:
    """The layer range of each pipeline rank. The scheduler sees one stage's layer names only."""
    total = vllm_config.model_config.get_total_num_hidden_layers()
    pp_size = vllm_config.parallel_config.pipeline_parallel_size
    if pp_size == 1:
        return ((0, len(local_layer_names(kv_cache_config, total))),)
    return tuple(get_pp_indices(total, rank, pp_size) for rank in range(pp_size))


def local_layer_names(kv_cache_config: KVCacheConfig, total_layers: int) -> list[str]:
    """This rank's target-model attention layers in model order.

    Layers of a draft model are left out: their KV belongs to no position of the target.
    """
    names = [
        name
        for name in kv_cache_config.kv_cache_groups[0].layer_names
        if extract_layer_index(name) < total_layers and not name.startswith("draft_model.")
    ]
    return sorted(names, key=extract_layer_index)


def _processor_cache_gb(vllm_config: "VllmConfig") -> float:
    media = vllm_config.model_config.multimodal_config
    return float(media.mm_processor_cache_gb) if media is not None else 0.0


# Pages


def layer_pages(
    kv_caches: Mapping[str, torch.Tensor],
    kv_cache_config: KVCacheConfig,
    facts: EngineFacts,
    vllm_config: "VllmConfig",
) -> tuple[LayerPages, ...]:
    """The page format of every local layer, in model order."""
    total = vllm_config.model_config.get_total_num_hidden_layers()
    pages = []
    for name in local_layer_names(kv_cache_config, total):
        tensor = kv_caches[name]
        # Pages may be cut finer for the attention kernel than the scheduler's blocks.
        ratio = facts.shape.block_size // tensor.shape[2]
        if tensor.device.type == "cpu" and not facts.is_latent:
            _refuse_tiled_cpu_pages(vllm_config, facts.shape.block_size)
            item = tensor.element_size()
            key_dim, value_dim = facts.key_bytes // item, facts.value_bytes // item
            pages.append(
                formats.from_cpu_attention(tensor, key_dim, value_dim, blocks_per_id=ratio)
            )
        else:
            pages.append(formats.from_token_content(tensor, blocks_per_id=ratio))
    return tuple(pages)


def _refuse_tiled_cpu_pages(vllm_config: "VllmConfig", block_size: int) -> None:
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    model = vllm_config.model_config
    isa = _get_attn_isa(
        model.dtype, block_size, model.get_head_size(), vllm_config.cache_config.cache_dtype
    )
    if isa not in CPU_ISAS_WITH_PLAIN_PAGES:
        raise ConfigError(
            f"CPU attention keeps its pages in the {isa!r} form on this machine, which cannot be "
            "cut by token yet; run with --dtype float32 or --dtype float16"
        )


class PoolPins:
    """References on blocks of vLLM's pool. Scheduler thread.

    `let_go` is called before vLLM empties the pool's prefix cache, which it does only when nobody
    holds a block; `on_reset` is told afterwards whether it has.
    """

    def __init__(
        self,
        pool: "BlockPool",
        on_reset: Callable[[bool], None],
        let_go: Callable[[], None] = lambda: None,
    ) -> None:
        self._pool = pool
        reset = pool.reset_prefix_cache

        @functools.wraps(reset)
        def reset_prefix_cache() -> bool:
            let_go()
            done = bool(reset())
            on_reset(done)
            return done

        pool.reset_prefix_cache = reset_prefix_cache

    def pin(self, block_ids: Sequence[int]) -> None:
        """Keep blocks from reuse."""
        self._pool.touch([self._pool.blocks[i] for i in block_ids])

    def unpin(self, block_ids: Sequence[int]) -> None:
        """Drop the references; last block first, so that a prefix is evicted last."""
        self._pool.free_blocks(self._pool.blocks[i] for i in reversed(block_ids))


# The engine's surroundings


def rank_place(vllm_config: "VllmConfig") -> RankPlace:
    """Which worker this process is: ranks run over tensor parallelism first."""
    parallel = vllm_config.parallel_config
    tp_size, pp_size = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    rank = parallel.rank
    return RankPlace(rank % tp_size, rank // tp_size % pp_size, rank)


def on_cpu(kv_caches: Mapping[str, torch.Tensor]) -> bool:
    """Whether the pages lie in host memory."""
    return all(tensor.device.type == "cpu" for tensor in kv_caches.values())


def make_copier(pages: Sequence[LayerPages]) -> Copier:
    """The copier for the device that the pages are on."""
    device = pages[0].owner[0].device
    if device.type == "cpu":
        from vllm_kvpool.staging.copy_cpu import CpuCopier

        copier = CpuCopier(pages)
        copier.warm_up()
        return copier
    from vllm_kvpool.staging.copy_torch import TorchCopier

    return TorchCopier(pages, device)


def preferred_layout(vllm_config: "VllmConfig") -> str | None:
    """Head-major pages, where heads exist. A preference: vLLM may resolve another."""
    if vllm_config.model_config is None or vllm_config.model_config.use_mla:
        return None
    return "LBHNC"


def prefer_recompute(vllm_config: "VllmConfig", config: KVPoolConfig) -> None:
    """Make failed loads be computed instead of failing their request, unless that is asked for.

    vLLM's own default is "fail", and whether a user has written it cannot be told from it having
    been left out; `load_failure: fail` in our configuration asks for it.
    """
    transfer = vllm_config.kv_transfer_config
    assert transfer is not None
    if config.load_failure is not None:
        transfer.kv_load_failure_policy = config.load_failure.value
    elif transfer.kv_load_failure_policy != LoadFailure.RECOMPUTE.value:
        logger.info(
            "kvpool: kv_load_failure_policy is %r, which is vLLM's default; what cannot be loaded "
            "is computed instead. load_failure: fail in kv_connector_extra_config ends such "
            "requests with an error",
            transfer.kv_load_failure_policy,
        )
        transfer.kv_load_failure_policy = LoadFailure.RECOMPUTE.value
