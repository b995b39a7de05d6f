"""The options of vLLM-Ascend (`additional_config`) that change the values an engine computes.

`NPUPlatform` writes options into `additional_config` by itself, by graph mode and role, so the
field cannot count as it stands. Every option counts, except those that a table leaves out with a
reason. An option that counts and has the value of
`NEUTRAL` counts as not set. `tests/support/ascend_options.py` has the options of each release of
vLLM-Ascend that is tested.
"""

from collections.abc import Iterator, Mapping
from typing import Any

Table = Mapping[str, str]

_KERNEL = "the same operation in other pieces: results differ by rounding alone"
_MEMORY = "says where something lies, or for how long"
_OUTPUT = "says what is recorded or written out"
_PARALLEL = "the same computation on other ranks"
_SAMPLING = "says how tokens are chosen; prompts are compared by their tokens"
_SCHEDULING = "says which tokens are computed when"
_STREAMS = "says what runs beside what"
_TRANSPORT = "says how ranks exchange the same values"

LEFT_OUT: Table = {
    name: reason
    for reason, names in {
        _KERNEL: """ascend_compilation_config.enable_npugraph_ex
            ascend_compilation_config.enable_static_kernel
            ascend_compilation_config.fuse_allreduce_rms ascend_compilation_config.fuse_muls_add
            ascend_compilation_config.fuse_norm_quant ascend_compilation_config.fuse_qknorm_rope
            ascend_fusion_config.fusion_ops_gmmswigluquant c8_enable_reshape_optim
            enable_matmul_allreduce enable_mlapo""",
        _MEMORY: "enable_sleep_mode_extra_cleanup weight_prefetch_config",
        _OUTPUT: "ascend_log_path dump_config dump_config_path msmonitor_use_daemon",
        _PARALLEL: """enable_flashcomm1 enable_flashcomm2_parallel_size enable_shared_expert_dp
            eplb_config finegrained_tp_config layer_sharding""",
        _SAMPLING: "enable_async_exponential enable_reduce_sample rejection_sampler_config",
        _SCHEDULING: """SLO_limits_for_dynamic_batch batch_job_sched_config
            enable_balance_scheduling profiling_chunk_config recompute_scheduler_enable
            scheduler_config short_request_first_config""",
        _STREAMS: """multistream_dsv4_dsa_overlap multistream_overlap_gate
            multistream_overlap_shared_expert""",
        _TRANSPORT: """dp_allreduce_on_npu enable_mc2_hierarchy_comm enable_prefill_mc2
            mc2_comm_alg""",
        "drafts are verified; layers of drafters are not shared": "draft_window_size",
        "moves KV of vLLM-Ascend's own connectors": "enable_transpose_kv_cache_by_block",
        "says which cores are used": "enable_cpu_binding",
        "says when vLLM-Ascend reads its options again": "refresh",
    }.items()
    for name in names.split()
}
"""Options by name, with the reason why they do not count; an option of a section by its path."""

NEUTRAL: Mapping[str, Any] = {
    "enable_dsa_cp": False,
    "enable_fused_mc2": 0,
    "enable_hamming_sparse": False,
    "enable_kv_nz": False,
    "enable_sparse_li_c8": False,
    "enable_sparse_sfa_c8": False,
    "hamming_sparse.enabled": False,
    "hamming_sparse.sparse_json_location": "",
    "mega_moe_max_tokens": 65536,
    "mix_placement": False,
    "pa_shape_list": [],
    "sparse_kv_offload_config.enabled": False,
    "sparse_kv_offload_config.keep_device_kv_cache": False,
    "weight_nz_mode": 1,
    "xlite_graph_config.enabled": False,
    "xlite_graph_config.full_mode": False,
}
"""Defaults of options that count: an engine that writes them out computes as one that does not.
vLLM-Ascend declares them in code alone."""

VARIABLES: Table = {
    "MSMONITOR_USE_DAEMON": "msmonitor_use_daemon",
    "VLLM_ASCEND_BALANCE_SCHEDULING": "enable_balance_scheduling",
    "VLLM_ASCEND_ENABLE_FLASHCOMM1": "enable_flashcomm1",
    "VLLM_ASCEND_ENABLE_FUSED_MC2": "enable_fused_mc2",
    "VLLM_ASCEND_ENABLE_MATMUL_ALLREDUCE": "enable_matmul_allreduce",
    "VLLM_ASCEND_ENABLE_MLAPO": "enable_mlapo",
    "VLLM_ASCEND_ENABLE_NZ": "weight_nz_mode",
    "VLLM_ASCEND_FLASHCOMM2_PARALLEL_SIZE": "enable_flashcomm2_parallel_size",
    "VLLM_ASCEND_FUSION_OP_TRANSPOSE_KV_CACHE_BY_BLOCK": "enable_transpose_kv_cache_by_block",
}
"""Environment variables -> the option that each stands for, and counts as."""

VARIABLES_LEFT_OUT: Table = {
    "VLLM_ASCEND_ENABLE_BATCH_MEMCPY": "says how vLLM-Ascend copies what it offloads",
    # Since 0.26.0rc1, on A5: attention of MLA to a request's blocks in up to 16 parts, whose sums
    # are added up, as `flash_attn_max_num_splits_for_cuda_graph` does on other devices.
    "VLLM_ASCEND_MLA_FIA_SPLIT": _KERNEL,
} | {name: "its option does not count" for name, option in VARIABLES.items() if option in LEFT_OUT}
"""Environment variables that do not count, with the reason."""

_SECTIONS = frozenset(name.partition(".")[0] for name in (*LEFT_OUT, *NEUTRAL) if "." in name)


def counting(additional_config: Any) -> Any:
    """Return the options that count, by name; an object that is no mapping as it is."""
    if not isinstance(additional_config, Mapping):
        return additional_config
    return {name: value for name, value in _options(additional_config) if not _is_out(name, value)}


def _options(additional_config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield each option, those of sections by their path (`ascend_compilation_config.fuse_x`)."""
    for name, value in additional_config.items():
        if name in _SECTIONS and isinstance(value, Mapping):
            yield from ((f"{name}.{each}", of) for each, of in value.items())
        else:
            yield name, value


def _is_out(name: str, value: Any) -> bool:
    return name in LEFT_OUT or (name in NEUTRAL and NEUTRAL[name] == value)
