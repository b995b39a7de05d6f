"""vLLM's objects -> our values. With connector.py and plugin.py the only importer of vLLM.

Reads `VllmConfig`, `KVCacheConfig` and `Request`; nothing of theirs goes further down. What cannot
be shared correctly is refused here, by name, before the engine starts.
"""

import hashlib
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.utils import get_pp_indices
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, MLAAttentionSpec
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from vllm_kvpool.cells import FORMAT_VERSION
from vllm_kvpool.config import KVPoolConfig, RequestOptions, Role, read_request_options
from vllm_kvpool.errors import ConfigError
from vllm_kvpool.hashing import SCHEME, EmbedRows, MediaItem, RequestIdentity
from vllm_kvpool.keys import Namespace, make_namespace
from vllm_kvpool.layout import formats
from vllm_kvpool.layout.pages import LayerPages
from vllm_kvpool.layout.topology import Topology, default_layer_span
from vllm_kvpool.pool.sides import ModelShape, RankPlace
from vllm_kvpool.staging.copier import Copier
from vllm_kvpool.weights import digest_adapter, sample_weights

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

FORMAT_DIGEST_BYTES = 16
MAX_ADAPTERS = 4096
CPU_ISAS_WITH_PLAIN_PAGES = ("vec", "vec16")

# Values of a model's configuration that change its KV. Not `to_dict()`: that carries the version
# of the library that wrote it, which differs between environments.
_ARCHITECTURE_FIELDS = (
    "model_type hidden_size intermediate_size vocab_size num_hidden_layers num_attention_heads "
    "num_key_value_heads head_dim v_head_dim qk_rope_head_dim qk_nope_head_dim kv_lora_rank "
    "q_lora_rank rms_norm_eps layer_norm_eps layer_norm_epsilon hidden_act activation_function "
    "attention_bias attention_multiplier embedding_multiplier residual_multiplier use_qk_norm "
    "qk_layernorm sliding_window use_sliding_window layer_types no_rope_layers "
    "attn_logit_softcapping query_pre_attn_scalar position_embedding_type alibi "
    "partial_rotary_factor rotary_pct rotary_dim rope_local_base_freq num_experts "
    "num_experts_per_tok num_local_experts n_routed_experts n_shared_experts moe_intermediate_size "
    "original_max_position_embeddings"
).split()
_COUNTER_IDENTIFIER = re.compile(r"renderer\d+-mm-\d+-")


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What the pool needs to know of an engine, the same on the scheduler's side and on a rank's."""

    shape: ModelShape
    key_bytes: int
    value_bytes: int
    is_latent: bool
    media_are_named: bool


def role_of(vllm_config: "VllmConfig") -> Role:
    """vLLM's `kv_role`."""
    assert vllm_config.kv_transfer_config is not None
    return Role(vllm_config.kv_transfer_config.kv_role)


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
    row_bytes = spec.state_content_size_bytes
    key_bytes = row_bytes if is_latent or spec.state_content_bytes else spec.head_size * item
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
        namespace=_namespace(vllm_config, config, spec, topology),
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
    if spec.num_head_slots is not None or spec.kv_quant_mode.is_nvfp4:
        raise ConfigError(
            "this attention backend packs several KV heads together, so its pages cannot be cut "
            "by head; choose another backend with --attention-backend or another kv_cache_dtype"
        )
    if spec.tokens_per_state != 1:
        raise ConfigError(
            f"this model keeps one KV state for {spec.tokens_per_state} tokens, which cannot be "
            "cut by token; it cannot be shared yet"
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


# The namespace


def _namespace(
    vllm_config: "VllmConfig",
    config: KVPoolConfig,
    spec: FullAttentionSpec,
    topology: Topology,
) -> Namespace:
    model = vllm_config.model_config
    text = model.hf_text_config
    values = {
        "format": FORMAT_VERSION,
        "scheme": SCHEME.decode(),
        "chunk_tokens": config.chunk_tokens,
        "namespace": config.namespace,
        "weights": config.weights_id or weights_identity(vllm_config),
        "architecture": {f: getattr(text, f) for f in _ARCHITECTURE_FIELDS if hasattr(text, f)},
        "rope": _rope(text, model.max_model_len),
        "overrides": model.hf_overrides if isinstance(model.hf_overrides, dict) else "",
        "heads": topology.num_heads,
        "layers": topology.stages[-1][1],
        "row_bytes": spec.state_content_size_bytes,
        "head_sizes": (spec.head_size, spec.head_size_v),
        "kv_dtype": (
            str(spec.dtype),
            spec.kv_quant_mode.name,
            vllm_config.cache_config.cache_dtype,
        ),
        "latent": isinstance(spec, MLAAttentionSpec),
        "dtype": str(model.dtype),
        "quantization": model.quantization or "",
    }
    if not topology.per_head:
        values["rank_cells_of_tp"] = topology.tp_size
    encoded = json.dumps(values, sort_keys=True, default=str).encode()
    digest = hashlib.blake2b(encoded, digest_size=FORMAT_DIGEST_BYTES).hexdigest()
    name = str(model.served_model_name or model.model)
    logger.debug("kvpool: format of %s: %s", name, encoded.decode())
    return make_namespace(Path(str(model.model)).name or name, digest)


def _rope(text: Any, max_model_len: int) -> dict[str, Any]:
    """Rotary embedding in one form, whichever fields the library's release keeps it in."""
    rope = dict(getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {})
    rope.setdefault("rope_theta", getattr(text, "rope_theta", None))
    original = rope.get("original_max_position_embeddings") or getattr(
        text, "original_max_position_embeddings", None
    )
    # Long-rope models choose their factors by whether the engine allows long prompts.
    rope["long"] = bool(original) and max_model_len > original
    return rope


def weights_identity(vllm_config: "VllmConfig") -> str:
    """The weights' identity: a sample of their files, or the next best thing that is known."""
    model = vllm_config.model_config
    load_format = str(vllm_config.load_config.load_format)
    if load_format == "dummy":
        # Random weights are drawn per rank.
        tp = vllm_config.parallel_config.tensor_parallel_size
        return f"dummy:{model.seed}:tp{tp}"
    directory = local_directory(str(model.model), model.revision)
    sampled = sample_weights(directory) if directory is not None else None
    if sampled is not None:
        return f"sample:{sampled}"
    logger.warning(
        "kvpool: the weights of %s are not in local files, so engines are taken to have the same "
        "weights if name and revision are the same; set weights_id to say what they are",
        model.model,
    )
    return f"name:{model.model}@{model.revision}"


def local_directory(name: str, revision: str | None) -> Path | None:
    """Where the files of a model or an adapter lie, without asking any network."""
    path = Path(name)
    if path.is_dir():
        return path
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
    except ImportError:
        return None
    try:
        return Path(snapshot_download(name, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError, OSError):
        return None


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
    """References on blocks of vLLM's pool. Scheduler thread."""

    def __init__(self, pool: "BlockPool") -> None:
        self._pool = pool

    def pin(self, block_ids: Sequence[int]) -> None:
        """Keep blocks from reuse."""
        self._pool.touch([self._pool.blocks[i] for i in block_ids])

    def unpin(self, block_ids: Sequence[int]) -> None:
        """Drop the references; last block first, so that a prefix is evicted last."""
        self._pool.free_blocks(self._pool.blocks[i] for i in reversed(block_ids))


# Requests


class AdapterDigests:
    """Content digests of LoRA adapters as they were when this engine first met them.

    Owned by the probe thread. Keyed by the adapter's id too: another content at the same path
    comes with another id, or says `load_inplace`.
    """

    def __init__(self) -> None:
        self._digests: dict[tuple[int, str], bytes] = {}

    def of(self, adapter_id: int, path: str, reload: bool) -> bytes:
        """The digest; reads the adapter's files at first sight. Raises OSError."""
        key = (adapter_id, path)
        if reload or key not in self._digests:
            directory = local_directory(path, None)
            if directory is None:
                raise FileNotFoundError(f"the LoRA adapter {path} is not in local files")
            if len(self._digests) >= MAX_ADAPTERS:
                self._digests.clear()
            self._digests[key] = digest_adapter(directory)
        return self._digests[key]


class VllmRequest:
    """A `RequestView` of vLLM's Request."""

    def __init__(self, request: "Request", adapters: AdapterDigests, media_are_named: bool) -> None:
        self._request = request
        self._adapters = adapters
        self.request_id: str = request.request_id
        self.options = _options(request)
        self.reads_cache = not request.skip_reading_prefix_cache
        media_named = media_are_named and not any(
            _COUNTER_IDENTIFIER.match(f.identifier) for f in request.mm_features
        )
        # A streaming request rewrites its tokens in place.
        self.shareable = not request.resumable and (media_named or not request.mm_features)

    @property
    def num_prompt_tokens(self) -> int:
        return self._request.num_prompt_tokens

    @property
    def num_tokens(self) -> int:
        return self._request.num_tokens

    @property
    def num_computed_tokens(self) -> int:
        return self._request.num_computed_tokens

    @property
    def num_preemptions(self) -> int:
        return self._request.num_preemptions

    def tokens(self) -> Sequence[int]:
        """All known tokens."""
        return self._request.all_token_ids

    def identity(self) -> RequestIdentity | None:
        """What shapes this request's KV besides its tokens. Probe thread; raises OSError."""
        request = self._request
        adapter = b""
        if (lora := request.lora_request) is not None:
            adapter = self._adapters.of(lora.lora_int_id, lora.lora_path, lora.load_inplace)
        media = tuple(
            MediaItem(
                f.identifier,
                f.mm_position.offset,
                f.mm_position.offset + f.mm_position.length,
            )
            for f in request.mm_features
        )
        return RequestIdentity(adapter, request.cache_salt or "", media, _embed_rows(request))


def _options(request: "Request") -> RequestOptions:
    try:
        return read_request_options(request.kv_transfer_params)
    except ConfigError as error:
        # The request itself is fine; only its wishes for the pool are not understood.
        logger.warning("kvpool: request %s: %s; using the defaults", request.request_id, error)
        return RequestOptions()


def _embed_rows(request: "Request") -> EmbedRows | None:
    embeds = request.prompt_embeds
    if embeds is None:
        return None
    is_token = request.prompt_is_token_ids or [False] * embeds.shape[0]
    rows = embeds.contiguous().cpu().view(torch.uint8).numpy()
    return EmbedRows(
        tuple(
            b"" if token else hashlib.blake2b(row.tobytes(), digest_size=16).digest()
            for token, row in zip(is_token, rows, strict=True)
        )
    )


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
    """Make failed loads be computed instead of failing their request.

    vLLM's own default is "fail", and whether a user has written it cannot be told from it having
    been left out; `load_failure: fail` in our configuration asks for it.
    """
    transfer = vllm_config.kv_transfer_config
    assert transfer is not None
    transfer.kv_load_failure_policy = config.load_failure.value


def block_tables(output: "SchedulerOutput") -> Callable[[str], Sequence[int]]:
    """The current block table of a request scheduled in this step."""
    state = output.kv_connector_block_state
    assert state is not None

    def table(request_id: str) -> Sequence[int]:
        block_ids = state.get_block_ids(request_id)
        return () if block_ids is None else block_ids[0]

    return table


def hit_source(store_name: str) -> CacheHitSource:
    """What vLLM calls the place that hits come from."""
    sources = {"file": CacheHitSource.DISK, "memory": CacheHitSource.HOST}
    return sources.get(store_name, CacheHitSource.EXTERNAL_UNSPECIFIED)
