"""The options of vLLM-Ascend by release, as its published wheels read them.

`tests/emulated_npu/test_options.py` compares the table with the wheel that is installed there.
"""

from collections.abc import Mapping
from typing import Any

SECTIONS = {
    "0.23.0": {
        "ascend_compilation_config": {
            *("enable_npugraph_ex", "enable_static_kernel", "fuse_allreduce_rms", "fuse_muls_add"),
            *("fuse_norm_quant", "fuse_qknorm_rope"),
        },
        "ascend_fusion_config": {"fusion_ops_gmmswigluquant"},
        "hamming_sparse": {"enabled", "sparse_json_location"},
        "xlite_graph_config": {"enabled", "full_mode"},
    },
    "0.26.0rc1": {
        "ascend_compilation_config": {
            *("enable_npugraph_ex", "enable_static_kernel", "fuse_muls_add", "fuse_norm_quant"),
            "fuse_qknorm_rope",
        },
        "ascend_fusion_config": {"fusion_ops_gmmswigluquant"},
        "sparse_kv_offload_config": {
            *("dram_size_per_dp_GB", "enabled", "keep_device_kv_cache", "topk_buffer_size"),
        },
        "xlite_graph_config": {"enabled", "full_mode"},
    },
}
"""Options within the sections of which each option is judged by itself."""

_BOTH = {
    *("ascend_compilation_config", "ascend_fusion_config", "ascend_log_path"),
    *("c8_enable_reshape_optim", "dump_config", "dump_config_path", "enable_balance_scheduling"),
    *("enable_cpu_binding", "enable_dsa_cp", "enable_flashcomm1", "enable_fused_mc2"),
    *("enable_kv_nz", "enable_mc2_hierarchy_comm", "enable_mlapo", "enable_prefill_mc2"),
    *("enable_reduce_sample", "enable_shared_expert_dp", "enable_sleep_mode_extra_cleanup"),
    *("enable_sparse_li_c8", "enable_sparse_sfa_c8", "enable_transpose_kv_cache_by_block"),
    *("eplb_config", "finegrained_tp_config", "mega_moe_max_tokens", "mix_placement"),
    *("msmonitor_use_daemon", "multistream_dsv4_dsa_overlap", "multistream_overlap_shared_expert"),
    *("pa_shape_list", "profiling_chunk_config", "recompute_scheduler_enable", "refresh"),
    *("rejection_sampler_config", "weight_nz_mode", "xlite_graph_config"),
}

OPTIONS = {
    "0.23.0": _BOTH
    | {
        *("SLO_limits_for_dynamic_batch", "dp_allreduce_on_npu", "enable_async_exponential"),
        *("enable_flashcomm2_parallel_size", "enable_hamming_sparse", "enable_matmul_allreduce"),
        *("hamming_sparse", "layer_sharding", "multistream_overlap_gate", "weight_prefetch_config"),
    },
    "0.26.0rc1": _BOTH
    | {
        *("batch_job_sched_config", "draft_window_size", "mc2_comm_alg", "scheduler_config"),
        *("short_request_first_config", "sparse_kv_offload_config"),
    },
}
"""Options of `additional_config`, by release."""

_VARIABLES_OF_BOTH = {
    *("MSMONITOR_USE_DAEMON", "VLLM_ASCEND_BALANCE_SCHEDULING", "VLLM_ASCEND_ENABLE_FLASHCOMM1"),
    *("VLLM_ASCEND_ENABLE_FUSED_MC2", "VLLM_ASCEND_ENABLE_MLAPO", "VLLM_ASCEND_ENABLE_NZ"),
    "VLLM_ASCEND_FUSION_OP_TRANSPOSE_KV_CACHE_BY_BLOCK",
}

VARIABLES = {
    "0.23.0": _VARIABLES_OF_BOTH
    | {"VLLM_ASCEND_ENABLE_MATMUL_ALLREDUCE", "VLLM_ASCEND_FLASHCOMM2_PARALLEL_SIZE"},
    "0.26.0rc1": _VARIABLES_OF_BOTH,
}
"""Environment variables that stand for an option, by release."""

VARIABLES_OF_NO_OPTION = {
    "0.23.0": {"VLLM_ASCEND_ENABLE_BATCH_MEMCPY"},
    "0.26.0rc1": {"VLLM_ASCEND_ENABLE_BATCH_MEMCPY", "VLLM_ASCEND_MLA_FIA_SPLIT"},
}
"""The other environment variables of vLLM-Ascend that an engine reads, by release."""


def paths(release: str) -> set[str]:
    """Return the options of a release; those of sections that are judged singly by their path."""
    sections = SECTIONS[release]
    within = {f"{section}.{name}" for section, names in sections.items() for name in names}
    return (OPTIONS[release] - sections.keys()) | within


def written_by_platform(release: str, *, graphs: bool) -> Mapping[str, Any]:
    """Return what `NPUPlatform` of a release writes into an empty `additional_config`."""
    defaults = dict.fromkeys(SECTIONS[release]["ascend_compilation_config"], True)
    defaults |= {"fuse_allreduce_rms": False} if "fuse_allreduce_rms" in defaults else {}
    return {
        "ascend_compilation_config": defaults
        | {"enable_npugraph_ex": graphs, "enable_static_kernel": False},
        "ascend_fusion_config": {"fusion_ops_gmmswigluquant": True},
    }


def written_for_producers(release: str) -> Mapping[str, Any]:
    """Return what `NPUPlatform` writes to switch `recompute_scheduler_enable` off for producers."""
    written = {"recompute_scheduler_enable": False}
    return written if release == "0.23.0" else {"scheduler_config": written}
