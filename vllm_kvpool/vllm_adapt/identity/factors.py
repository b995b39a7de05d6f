"""Parts of vLLM's configuration and environment that change the values that an engine computes.

Every field of every configuration object counts if its value is not the running release's default.
So does every environment variable of vLLM that is set. A table names the exceptions, each with
a reason. A test (`test_factors.py`) walks all of both tested releases.

A field at its default is not written: it would keep an engine apart from the releases that lack the
field. What the defaults mean is known of the releases in `compat.EQUAL_RELEASES`; any other release
counts by its version. So a new release of vLLM can cost hits, never give wrong bytes. Values have
one form in all releases (`canonical`).
"""

import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from vllm_kvpool.config import environment
from vllm_kvpool.vllm_adapt import compat
from vllm_kvpool.vllm_adapt.identity import ascend_options

if TYPE_CHECKING:
    from vllm.config import VllmConfig

Table = Mapping[str, str]
Form = Callable[[Any, "VllmConfig"], Any]

FILE_DIGEST_BYTES = 16

# Reasons that several fields share.
_ACCESS = "says what requests may do; what they do is part of their hash"
_BY_CONTENT = "a name or path; files count by what is in them"
_DERIVED = "derived from fields and files that count"
_EVENTS = "says what is recorded or told to others"
_KERNEL = "the same operation in other pieces: results differ by rounding alone, as with other TP"
_LOADING = "says how weights are read, not which"
_MEDIA_NAMES = "names of media, and how they are kept; media are part of a request's hash"
_MEMORY = "says how much memory there is, or where something lies in it"
_OUTPUT = "says what is done with what the model has computed"
_PARALLEL = "the same computation on other ranks"
_SAMPLING = "says how tokens are chosen; prompts are compared by their tokens"
_TOKENS = "says how text becomes tokens; prompts are compared by their tokens"

LEFT_OUT_OF_KV: Table = {
    f"{section}.{name}": reason
    for section, reasons in {
        "VllmConfig": {
            _DERIVED: "quant_config",
            _EVENTS: "observability_config logging_config profiler_config kv_events_config",
            _KERNEL: "compilation_config optimization_level performance_mode",
            _MEMORY: "offload_config engram_config ec_manager_config",
            _OUTPUT: "aux_output_config",
            _PARALLEL: "parallel_config",
            _SAMPLING: "watermark_config structured_outputs_config reasoning_config",
            "says which tokens are computed when": "scheduler_config",
            "the same computation elsewhere; KV dtype and byte order count": "device_config",
            "drafts are verified; keys name the drafter of its layers' cells": "speculative_config",
            "connectors move KV and change none; options that do count": "kv_transfer_config",
            "connectors move embeddings and change none": "ec_transfer_config",
            "weights that change begin a namespace of their own": "weight_transfer_config",
            "a name": "instance_id",
            "says when an engine ends": "shutdown_timeout",
            "says when a step that hangs is reported": "watchdog_config",
        },
        "ModelConfig": {
            _ACCESS: "allowed_local_media_path allowed_media_domains enable_prompt_embeds",
            _BY_CONTENT: "model model_weights hf_config_path revision",
            _DERIVED: "is_submodel_config word_embeddings_untied_by_checkpoint",
            _KERNEL: "enforce_eager disable_cascade_attn",
            _MEMORY: """enable_sleep_mode sleep_preserve_parameter_names sleep_mode_backend
                sleep_mode_offload_cudagraph enable_nccl_comm_suspend enable_cumem_allocator""",
            _OUTPUT: """return_sampling_mask enable_return_routed_experts max_logprobs
                logprobs_mode pooler_config""",
            _SAMPLING: "use_fp64_gumbel enable_trace_replay logits_processors",
            _SAMPLING + "; of random weights it is in their identity": "seed",
            _SAMPLING
            + "; what Llama 4 makes of it counts": "generation_config override_generation_config",
            _TOKENS: """tokenizer tokenizer_mode tokenizer_revision skip_tokenizer_init
                io_processor_plugin""",
            "a name": "served_model_name",
            "the files that it is read from count, and hf_overrides": "hf_config hf_text_config",
            "the model's own code counts by content where it may run": "trust_remote_code",
            "a limit; what long rope and Llama 4 make of it counts": "max_model_len",
            "a limit": "spec_target_max_model_len",
            "a permission": "allow_deprecated_quantization",
            "a permission, and a secret": "hf_token",
            "says how many threads prepare requests": "renderer_num_workers",
        },
        "CacheConfig": {
            _DERIVED: "is_attention_free sliding_window",
            _MEMORY: """block_size user_specified_block_size _block_size_resolved kv_cache_layout
                gpu_memory_utilization kv_cache_memory_bytes num_gpu_blocks num_cpu_blocks
                num_gpu_blocks_override kv_cache_size_tokens kv_cache_max_concurrency
                kv_offloading_size kv_offloading_backend mamba_block_size
                user_specified_mamba_block_size mamba_page_size_padded skip_page_size_padded
                mamba_cache_mode enable_mamba_shared_prefix_checkpoint
                enable_mamba_fine_grained_prefix_cache
                effective_attention_block_size simple_cpu_offload_num_blocks""",
            "the types of recurrent states, which count with their layers": """mamba_cache_dtype
                mamba_ssm_cache_dtype""",
            "says what the engine itself keeps": """enable_prefix_caching
                prefix_cache_retention_interval""",
            "the engine's own names of blocks": "prefix_caching_hash_algo",
            "says where the engine's own hits may end": """prefix_match_unit hash_block_size
                cache_hit_alignment_tokens""",
        },
        "LoRAConfig": {
            _KERNEL: "specialize_active_lora",
            _PARALLEL: "fully_sharded_loras",
            "a limit; adapters are part of a request's hash": """max_lora_rank max_loras
                max_cpu_loras""",
            "adapters are part of a request's hash": "default_mm_loras",
        },
        "MultiModalConfig": {
            _ACCESS: "limit_per_prompt enable_mm_embeds allow_missing_mm_embeddings",
            _MEDIA_NAMES: """mm_processor_cache_gb mm_processor_cache_type
                mm_shm_cache_max_object_size_mb mm_hasher_algorithm mm_tensor_ipc""",
            _MEMORY: "mm_ipc_gpu_memory_gb skip_mm_profiling",
            _PARALLEL: "mm_encoder_tp_mode",
            _TOKENS: "interleave_mm_strings",
            "says where scales are written": "mm_encoder_fp8_scale_save_path",
            "says what scales are written": "mm_encoder_fp8_scale_save_margin",
        },
        "AttentionConfig": {
            _KERNEL: """flash_attn_max_num_splits_for_cuda_graph tokenspeed_mla_min_split_kv
                tq_max_kv_splits_for_cuda_graph flex_attn_block_m flex_attn_block_n
                flex_attn_q_block_size flex_attn_kv_block_size""",
            _MEMORY: "sparse_mla_prefill_workspace_factor hisparse_config",
            _PARALLEL: "indexer_tp_shard_min_rows minimax_m3_indexer_cp",
        },
        "KernelConfig": {
            _KERNEL: """ir_op_priority enable_flashinfer_autotune
                enable_rocm_segmented_attn_autotune enable_cutedsl_warmup enable_jit_warmup""",
        },
        "LoadConfig": {
            _BY_CONTENT: "download_dir",
            _LOADING: """safetensors_load_strategy safetensors_prefetch_num_threads
                safetensors_prefetch_block_size device use_tqdm_on_load pt_load_map_location""",
        },
    }.items()
    for reason, names in reasons.items()
    for name in names.split()
}

LEFT_OUT_OF_EMBEDDINGS: Table = {
    **LEFT_OUT_OF_KV,
    "VllmConfig.cache_config": "embeddings are no KV",
    "VllmConfig.lora_config": "adapters of the language model; those of encoders are refused",
    "MultiModalConfig.mm_encoder_only": "says that the language model is not here",
    "MultiModalConfig.language_model_only": "says that the encoder is not here",
}

_BUILD = "says how vLLM was built or installed"
_COMMUNICATION = "says how processes find each other and exchange the same values"
_COMPILER = "the same operations, compiled or started otherwise"
_FETCHING = "says how media are fetched; they count by content"
_HARDWARE = "says which of the machine's devices and cores are used"
_RUNNER = "chooses what prepares a step, not what its layers compute"
_PLACES = "says where caches and files are kept"
_SERVER = "says which requests are taken, and how they are answered"

ENVIRONMENT_LEFT_OUT: Table = {
    pattern: reason
    for reason, patterns in {
        _BUILD: """ASCEND_HOME_PATH CMAKE_BUILD_TYPE COMPILE_CUSTOM_KERNELS CUDA_HOME CXX_COMPILER
            C_COMPILER HCCL_SO_PATH LD_LIBRARY_PATH MAX_JOBS NVCC_THREADS SOC_VERSION VERBOSE
            VLLM_BUILD_* VLLM_CUDART_SO_PATH VLLM_CUDA_COMPATIBILITY_PATH VLLM_DOCKER_BUILD_CONTEXT
            VLLM_ENABLE_CUDA_COMPATIBILITY VLLM_IMAGE_TAG VLLM_MAIN_CUDA_VERSION
            VLLM_SKIP_PRECOMPILED_VERSION_SUFFIX VLLM_SKIP_VERSION_SUFFIX VLLM_TARGET_DEVICE
            VLLM_USE_PRECOMPILED* VLLM_VERSION""",
        _COMMUNICATION: """DYNAMIC_EPLB LOCAL_RANK MOONCAKE_* VLLM_ALLREDUCE_USE_*
            VLLM_DEEPEP_BUFFER_SIZE_MB VLLM_DISABLE_PYNCCL VLLM_DISTRIBUTED_USE_SPLIT_GROUP
            VLLM_DP_* VLLM_EC_SIDE_CHANNEL_* VLLM_ELASTIC_EP_*
            VLLM_ENABLE_V1_MULTIPROCESSING VLLM_FLASHINFER_ALLREDUCE_BACKEND
            VLLM_HOST_IP VLLM_LOOPBACK_IP VLLM_MOONCAKE_* VLLM_MQ_MAX_CHUNK_BYTES_MB
            VLLM_MSGPACK_ZERO_COPY_THRESHOLD VLLM_NCCL_*_PATH VLLM_NIXL_* VLLM_P2P_* VLLM_PORT
            VLLM_PP_LAYER_PARTITION VLLM_PROCESS_NAME_PREFIX VLLM_RAY_*
            VLLM_RINGBUFFER_WARNING_INTERVAL VLLM_RPC_BASE_PATH VLLM_SKIP_P2P_CHECK
            VLLM_USE_NCCL_SYMM_MEM VLLM_USE_RAY_* VLLM_USE_SPINLOOP_EXT VLLM_WORKER_*""",
        _COMPILER: """VLLM_COMPILE_CACHE_SAVE_FORMAT VLLM_DEEP_GEMM_WARMUP
            VLLM_DISABLE_COMPILE_CACHE VLLM_DISABLE_SHARED_EXPERTS_STREAM VLLM_ENABLE_CUDAGRAPH_GC
            VLLM_ENABLE_INDUCTOR_*
            VLLM_ENABLE_PREGRAD_PASSES VLLM_FLASHINFER_AUTOTUNE_SKIP_OPS VLLM_FORCE_AOT_LOAD
            VLLM_MULTI_STREAM_GEMM_TOKEN_THRESHOLD VLLM_SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD
            VLLM_TRITON_JIT_WARMUP_NUM_THREADS VLLM_USE_AOT_COMPILE VLLM_USE_BREAKABLE_CUDAGRAPH
            VLLM_USE_BYTECODE_HOOK VLLM_USE_LAYERNAME VLLM_USE_MEGA_AOT_ARTIFACT
            VLLM_USE_STANDALONE_COMPILE VLLM_XLA_*""",
        _RUNNER: "VLLM_USE_V2_MODEL_RUNNER",
        _EVENTS: """FORCE_COLOR NO_COLOR VLLM_CONFIGURE_LOGGING VLLM_CUSTOM_SCOPES_FOR_PROFILING
            VLLM_DEBUG_* VLLM_DISABLE_LOG_LOGO VLLM_DO_NOT_TRACK VLLM_GC_DEBUG VLLM_GPU_SYNC_CHECK
            VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES VLLM_LOGGING_* VLLM_LOG_* VLLM_NO_USAGE_STATS
            VLLM_NVTX_SCOPES_FOR_PROFILING VLLM_PATTERN_MATCH_DEBUG VLLM_TRACE_FUNCTION
            VLLM_USAGE_*""",
        _FETCHING: """VLLM_*_FETCH_TIMEOUT VLLM_MAX_AUDIO_CLIP_FILESIZE_MB
            VLLM_MAX_AUDIO_PREPROCESS_WORKERS VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB
            VLLM_MEDIA_CACHE* VLLM_MEDIA_FETCH_MAX_RETRIES VLLM_MEDIA_LOADING_THREAD_COUNT
            VLLM_MEDIA_URL_ALLOW_REDIRECTS VLLM_MM_HASHER_ALGORITHM""",
        _HARDWARE: """CUDA_VISIBLE_DEVICES VLLM_CPU_NUM_OF_RESERVED_CPU VLLM_CPU_OMP_THREADS_BIND
            VLLM_GPU_NIC_PCIE_MAPPING VLLM_NIC_SELECTION_VARS""",
        _MEMORY: """VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE
            VLLM_CPU_KVCACHE_SPACE VLLM_ENABLE_STARTUP_PLAN
            VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE VLLM_KV_CACHE_LAYOUT
            VLLM_KV_OFFLOAD_* VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS
            VLLM_PREFIX_CACHE_RETENTION_INTERVAL VLLM_ROCM_SLEEP_MEM_CHUNK_SIZE
            VLLM_SSM_CONV_STATE_LAYOUT VLLM_USE_SIMPLE_KV_OFFLOAD VLLM_WEIGHT_OFFLOADING_*
            VLLM_WSL2_ENABLE_PIN_MEMORY""",
        _PLACES: """S3_* VLLM_ASSETS_* VLLM_CACHE_ROOT VLLM_CONFIG_ROOT
            VLLM_FASTSAFETENSORS_QUEUE_SIZE VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR
            VLLM_MODEL_REDIRECT_PATH VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME
            VLLM_TUNED_CONFIG_FOLDER""",
        _SERVER: """VLLM_ALLOW_INSECURE_SERIALIZATION VLLM_ALLOW_LONG_MAX_MODEL_LEN
            VLLM_ALLOW_RUNTIME_LORA_UPDATING VLLM_API_KEY VLLM_CHAT_TEMPLATE_RENDER_TIMEOUT
            VLLM_COMPUTE_NANS_IN_LOGITS VLLM_DISABLE_REQUEST_ID_RANDOMIZATION VLLM_ENABLE_COHERE_API
            VLLM_ENABLE_RESPONSES_API_STORE VLLM_ENFORCE_STRICT_TOOL_CALLING
            VLLM_ENGINE_*_TIMEOUT_S VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS VLLM_GPT_OSS_*
            VLLM_HTTP_TIMEOUT_KEEP_ALIVE VLLM_KEEP_ALIVE_ON_ENGINE_DEATH VLLM_LORA_RESOLVER_*
            VLLM_MAX_BAD_WORDS_TOTAL_TOKENS VLLM_MAX_COMPLETION_PROMPTS VLLM_MAX_NUM_BAD_WORDS
            VLLM_MAX_N_SEQUENCES VLLM_MAX_STOP_STRINGS VLLM_RAISE_ON_LOGIT_NANS
            VLLM_RANDOMIZE_DP_DUMMY_INPUTS VLLM_REGEX_COMPILATION_TIMEOUT_S VLLM_RUST_FRONTEND_PATH
            VLLM_SERVER_DEV_MODE VLLM_SKIP_MODEL_NAME_VALIDATION VLLM_SYSTEM_START_DATE VLLM_TOOL_*
            VLLM_USE_EXPERIMENTAL_PARSER_CONTEXT VLLM_USE_FASTOKENS VLLM_USE_FLASHINFER_SAMPLER
            VLLM_USE_RUST_* VLLM_V1_OUTPUT_PROC_CHUNK_SIZE VLLM_V1_USE_OUTLINES_CACHE
            VLLM_XGRAMMAR_CACHE_MB VLLM_XPU_USE_SAMPLER_KERNEL""",
    }.items()
    for pattern in patterns.split()
} | dict(ascend_options.VARIABLES_LEFT_OUT)
"""Names of vLLM's environment variables, some as patterns. Variables that choose a kernel count:
many also choose what is quantised."""

_FORMS_OF_SPARSE_LATENTS = ("fp8", "fp8_e4m3", "fp8_ds_mla")
_LOADERS_OF_ALL_FILES = (
    *("auto", "hf", "safetensors", "fastsafetensors", "instanttensor"),
    *("mistral", "runai_streamer", "dummy"),
)
_OPTIONS_OF_LOADERS = (
    *("concurrency", "distributed", "enable_multithread_load", "memory_limit", "num_threads"),
)


class UnstableValueError(Exception):
    """A value that other processes cannot compare with theirs."""


def factors(vllm_config: "VllmConfig", left_out: Table = LEFT_OUT_OF_KV) -> dict[str, Any]:
    """Return the fields that count and are not at their default, by path (`model_config.dtype`).

    Raises UnstableValueError, which names the field.
    """
    return dict(_factors(vllm_config, "", vllm_config, left_out))


def _factors(
    section: Any, path: str, vllm_config: "VllmConfig", left_out: Table
) -> Iterator[tuple[str, Any]]:
    for field in fields(section):
        name = f"{type(section).__name__}.{field.name}"
        if name in left_out or not hasattr(section, field.name):
            continue
        value, where = getattr(section, field.name), f"{path}{field.name}"
        if _is_section(value):
            yield from _factors(value, f"{where}.", vllm_config, left_out)
            continue
        form = _FORMS.get(name, lambda value, _: value)
        try:
            plain = canonical(form(value, vllm_config))
            default = default_of(field)
            if default is MISSING or encoded(plain) != encoded(
                canonical(form(default, vllm_config))
            ):
                yield where, plain
        except UnstableValueError as error:
            raise UnstableValueError(f"{where}: {error}") from None


def default_of(field: "Field[Any]") -> Any:
    """Return a field's default in the running release; MISSING if it has none."""
    if field.default_factory is not MISSING:
        return field.default_factory()
    # Pydantic's fields keep theirs within.
    inner = getattr(field.default, "get_default", None)
    return field.default if inner is None else inner(call_default_factory=True)


LIBRARY_VARIABLES: Table = {
    "NVIDIA_TF32_OVERRIDE": "whether cuBLAS multiplies float32 in TF32",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "the same",
    "HIPBLASLT_ALLOW_TF32": "the same on AMD's GPUs",
    "TRITON_F32_DEFAULT": "whether Triton's kernels do",
    "ONEDNN_DEFAULT_FPMATH_MODE": "whether CPUs multiply float32 in bfloat16",
    "DNNL_DEFAULT_FPMATH_MODE": "its older name",
    "FLA_TRIL_PRECISION": "how vLLM's kernels of linear attention multiply",
    "XHS_VIDEO_JPEG_QUALITY": "what frames of videos lose",
}
"""Variables of other libraries that count, with what they change. They count as written."""


def environment_factors(known: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    """Return the environment variables that are set and count, by name.

    vLLM's, and those of `LIBRARY_VARIABLES`. `known`: vLLM's readers of its variables. A value that
    a reader refuses counts as written.
    """
    given = environment()
    of_vllm = {
        name: _value_of(read, given[name])
        for name, read in known.items()
        if name in given and not any(fnmatchcase(name, pattern) for pattern in ENVIRONMENT_LEFT_OUT)
    }
    return of_vllm | {name: given[name] for name in LIBRARY_VARIABLES if name in given}


def _value_of(read: Callable[[], Any], text: str) -> Any:
    try:
        return canonical(read())
    except (ValueError, UnstableValueError):
        return text


def _is_section(value: Any) -> bool:
    return (
        is_dataclass(value)
        and not isinstance(value, type)
        and type(value).__module__.startswith("vllm.config")
    )


def canonical(value: Any) -> Any:
    """Return a value in JSON's types, equal in every process and release.

    Raises UnstableValueError.
    """
    if isinstance(value, Enum):
        return value.name
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.dtype | Path):
        return str(value)
    if isinstance(value, bytes | bytearray):
        return value.hex()
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if hasattr(value, "compute_hash"):  # vLLM's own digest
        return str(value.compute_hash())
    if isinstance(value, Mapping):
        if all(isinstance(name, str) for name in value):
            return {name: canonical(value[name]) for name in sorted(value)}
        return sorted(([canonical(k), canonical(v)] for k, v in value.items()), key=encoded)
    if isinstance(value, Set):
        return sorted(map(canonical, value), key=encoded)
    if isinstance(value, Sequence):
        return [canonical(each) for each in value]
    if is_dataclass(value):
        return {each.name: canonical(getattr(value, each.name)) for each in fields(value)}
    if hasattr(value, "to_dict"):
        return canonical(value.to_dict())
    raise UnstableValueError(
        f"{type(value).__qualname__} objects cannot be compared; "
        "leave the option out, or write it as plain values"
    )


def encoded(values: Any) -> bytes:
    """Return canonical values as bytes."""
    return json.dumps(values, sort_keys=True, separators=(",", ":")).encode()


def without(values: Any, left_out: Collection[str]) -> Any:
    """Return a mapping without some names; anything else as it is."""
    if not isinstance(values, Mapping):
        return values
    return {name: value for name, value in values.items() if name not in left_out}


def digest_of(content: bytes) -> str:
    """Return a hex digest of a file's content."""
    return hashlib.blake2b(content, digest_size=FILE_DIGEST_BYTES).hexdigest()


# Fields of which not the value as it stands counts (`_FORMS`)


def _overrides(value: Any, vllm_config: "VllmConfig") -> Any:
    """Return what counts of overrides: a function's configuration, a named file's content."""
    if isinstance(value, Mapping):
        named = "quantization_config_file"
        return {**value, named: _file(value[named])} if named in value else value
    if not callable(value):
        return value
    config = compat.configuration(vllm_config.model_config)
    kept = without(config.to_dict(), ("transformers_version", "_name_or_path"))
    return {"function": f"{type(config).__qualname__}", "configuration": kept}


def _cache_dtype(value: Any, vllm_config: "VllmConfig") -> Any:
    """Return one name for each type of KV cache. Layers' rows count besides, by their types.

    vLLM calls FP8 "fp8_e4m3" where a checkpoint asks for it, and "fp8" or so where the user does.
    Of sparse attention the rows say which form it is: an attention backend chooses it where the
    model is built and writes it here, which the scheduler sees at TP 1 alone.
    """
    model = vllm_config.model_config
    is_sparse = hasattr(model.hf_text_config, "index_topk")
    if is_sparse and value in _FORMS_OF_SPARSE_LATENTS:
        return "auto"
    if value == "fp8_e4m3" and compat.fp8_name() == "float8_e4m3fn":
        return "fp8"
    return "auto" if value == str(model.dtype).removeprefix("torch.") else value


def _file(value: Any) -> Any:
    """Return what counts of a file: its content."""
    if value is None:
        return None
    try:
        content = Path(str(value)).read_bytes()
    except OSError:
        return {"path": str(value)}
    return {"content": digest_of(content)}


_FORMS: Mapping[str, Form] = {
    # What the platform writes, and what the user gives it.
    "VllmConfig.additional_config": lambda value, _: ascend_options.counting(value or {}),
    "CacheConfig.cache_dtype": _cache_dtype,
    "ModelConfig.hf_overrides": _overrides,
    # Loaders of the same files count as one; dummy weights have an identity of their own.
    "LoadConfig.load_format": lambda value, _: (
        "auto" if str(value) in _LOADERS_OF_ALL_FILES else str(value)
    ),
    "LoadConfig.model_loader_extra_config": lambda value, _: without(value, _OPTIONS_OF_LOADERS),
    # The model's own type counts as "auto".
    "LoRAConfig.lora_dtype": lambda value, vllm_config: (
        "auto" if value == vllm_config.model_config.dtype else value
    ),
    "LoRAConfig.target_modules": lambda value, _: (
        sorted(set(value)) if isinstance(value, list) else value
    ),
    "MultiModalConfig.mm_processor_kwargs": lambda value, _: without(value, ("device",)) or None,
    "MultiModalConfig.mm_encoder_fp8_scale_path": lambda value, _: _file(value),
}
