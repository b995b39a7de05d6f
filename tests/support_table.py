"""What is shared between engines, and what shows it: the rows behind docs/support.md.

Adding what is supported is adding a row. `tests/test_support.py` sees to it that every test named
here exists and that the document says what stands here, `tests/vllm_adapt/test_refusals.py` that
what is refused is refused in these words. To write the document again:

    python -m tests.support_table > docs/support.md
"""

from dataclasses import dataclass
from enum import Enum


class How(Enum):
    """What a cell of the table rests on, the strongest first."""

    ENGINE = "real engine"
    TENSORS = "tensors"
    STAND_IN = "stand-in"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Cell:
    """`test` is a pytest node; of what is refused, `words` are part of what the user is told."""

    how: How
    test: str
    words: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """One format in one kind of group on one device; no cell where nothing shows it yet."""

    format: str
    group: str
    device: str
    newer: Cell | None = None  # vLLM 0.32.0
    older: Cell | None = None  # vLLM 0.27.1


@dataclass(frozen=True, slots=True)
class Family:
    """Models that keep KV alike, by the names that vLLM's registry has for their architectures.

    `device` says in brackets which model has run, where not all have.
    """

    name: str
    architectures: tuple[str, ...]
    keeps: str
    device: str
    newer: Cell | None = None
    older: Cell | None = None


def engine(test: str) -> Cell:
    """Two real engines share, and the second's log-probabilities are the first's."""
    return Cell(How.ENGINE, f"tests/e2e/{test}")


def tensors(test: str) -> Cell:
    """Byte for byte on vLLM's own page views, without an engine."""
    return Cell(How.TENSORS, f"tests/{test}")


def stand_in(test: str) -> Cell:
    """On a stand-in for the device's library: same shapes, same order of calls."""
    return Cell(How.STAND_IN, f"tests/{test}")


def refused(name: str, words: str) -> Cell:
    """At start, by ConfigError."""
    return Cell(How.REFUSED, f"tests/vllm_adapt/test_refusals.py::test_refused[{name}]", words)


def pages(content: str) -> Cell:
    return tensors(
        "vllm_adapt/test_page_formats.py::"
        f"test_every_format_reads_what_every_format_has_written[{content}]"
    )


SHARING = "test_sharing.py::test_other_tensor_parallel_size_reads"
BY_SOURCE = "by their kernels' sources; not run on a GPU"
PACKED = (
    "vllm_adapt/test_packed_pages.py::test_any_form_and_number_of_ranks_reads_what_any_has_written"
)
COMPRESSED = (
    "vllm_adapt/kv_cache_specs/test_deepseek_v4.py::test_a_hit_brings_what_the_next_token_needs"
)
STATE_FAMILIES = "test_state_families.py::test_another_engine_goes_on_from_its_states"
BLOCK_A_STEP = "where no step is longer than a block (vLLM's Mamba2 for CPUs, see models.md)"
WRITTEN = "test_what_kernels_write_is_read_as_rows"
ANY = "any layout"
FULL, MLA, STATES = "full attention", "MLA", "recurrent state"

ROWS = (
    # Real engines on CPU, which keep K transposed.
    Row("float32", FULL, "CPU, vec", engine(SHARING), engine(SHARING)),
    Row("float16", FULL, "CPU, vec16", engine("test_formats.py::test_engines_share[float16]")),
    Row("bfloat16", FULL, "CPU, vec", engine("test_formats.py::test_engines_share[bfloat16]")),
    Row(
        "float32",
        "full attention, layers that share KV",
        "CPU, vec",
        engine("test_formats.py::test_layers_that_share_kv"),
    ),
    Row(
        "float32, one fetch for ranks that hold the same KV",
        FULL,
        "CPU, vec",
        engine("test_replicas.py::test_a_prompt_is_fetched_once_for_both_ranks[]"),
        engine("test_replicas.py::test_a_prompt_is_fetched_once_for_both_ranks[]"),
    ),
    Row(
        "float32, layer by layer",
        FULL,
        "CPU, vec",
        engine("test_layerwise.py::test_a_hit_runs_in_the_step_that_loads_it"),
    ),
    Row(
        "float32, layer by layer, loads that fail",
        FULL,
        "CPU, vec",
        engine("test_layerwise.py::test_a_cell_that_is_bad_in_mid_step_is_computed_again"),
    ),
    # Recurrent states.
    Row(
        "float32, short convolution (LFM2), TP 1 and 2",
        STATES,
        "CPU",
        engine("test_states.py::test_other_tensor_parallel_size_reads[LFM2-1-2]"),
    ),
    Row(
        "bfloat16, GDN with experts (Qwen3-Next), TP 1 and 2",
        STATES,
        "CPU",
        engine("test_states.py::test_other_tensor_parallel_size_reads[Qwen3-Next-1-2]"),
    ),
    Row(
        "bfloat16, GDN beside images (Qwen 3.5), TP 1 and 2",
        STATES,
        "CPU",
        engine("test_states.py::test_a_state_counts_the_images_before_it[Qwen3.5]"),
    ),
    Row(
        "float32, Mamba2 (Granite 4), TP 1 and 2",
        STATES,
        "CPU",
        engine("test_states.py::test_other_tensor_parallel_size_reads[Granite 4-1-2]"),
    ),
    Row(
        "float32, Mamba2 (Falcon-H1, one group), TP 1 and 2",
        STATES,
        "CPU",
        engine(f"{STATE_FAMILIES}[Falcon-H1]"),
    ),
    Row(
        "float32, Mamba2 (Nemotron-H, two groups), TP 1 and 2",
        STATES,
        "CPU",
        engine(f"{STATE_FAMILIES}[Nemotron-H]"),
    ),
    Row(
        "float32, states or the attention before them evicted by a full store",
        STATES,
        "CPU",
        engine("test_state_eviction.py::test_another_engine_reads_what_a_full_directory_has_kept"),
    ),
    Row(
        "float32 and bfloat16, states that are bad or gone",
        STATES,
        "CPU",
        engine("test_states.py::test_states_that_are_bad_or_gone_are_computed"),
    ),
    Row(
        "float32, blocks of vLLM's own size and of 256 tokens",
        STATES,
        "CPU",
        engine("test_states.py::test_blocks_of_vllms_own_size"),
    ),
    *(
        Row(
            "any tensor parallelism, both layouts, with and without drafts",
            f"{STATES}: {kind}",
            "any",
            tensors(
                "vllm_adapt/kv_cache_specs/test_state_specs.py::"
                f"test_every_engine_writes_the_same_cells_and_reads_those_of_any_other[{kind}]"
            ),
        )
        for kind in (
            "short convolution",
            "Mamba1",
            "Mamba2",
            "Mamba2 with one group",
            "GDN",
            "KDA",
            "linear attention",
        )
    ),
    # MLA, in as many ranks as no engine here has.
    *(
        Row(what, MLA, "any, by vLLM's scheduler and KV cache manager", tensors(f"faults/{test}"))
        for what, test in (
            (
                "float32, any tensor parallelism",
                "test_latents.py::test_any_number_of_ranks_reads_what_any_number_has_written",
            ),
            (
                "float32, ranks take turns in storing",
                "test_latents.py::test_ranks_take_turns_and_store_nothing_twice",
            ),
            (
                "float32, loads that fail",
                "test_latents.py::test_a_load_that_fails_is_computed_from_there_on",
            ),
        )
    ),
    Row(
        "float32, saved and not loaded",
        MLA,
        "CPU without AMX, whose kernels compute wrong values after a given prefix",
        *2
        * [
            tensors(
                "vllm_adapt/test_defects.py::test_what_an_engine_computes_wrongly_is_left_alone"
            )
        ],
    ),
    # Contents that CPU attention has no kernel for on every machine, on its pages all the same.
    *(
        Row(isa_dtype, FULL, f"CPU, {isa}", tensors(f"vllm_adapt/test_cpu_pages.py::{test}"))
        for isa_dtype, isa, test in (
            ("float32, float16, bfloat16", "vec, vec16", WRITTEN),
            ("bfloat16", "amx (its kernel packs on any x86 with AVX-512)", WRITTEN),
            ("fp8_e4m3, fp8_e5m2", "vec, amx", "test_bytes_of_fp8_are_read_as_rows"),
            (
                "bfloat16",
                "neon with matrix instructions (by its kernel's source)",
                "test_a_form_is_known_by_what_is_written",
            ),
            (
                "float32, float16, bfloat16",
                "neon, rvv, vsx, vxe, nnpa (by their kernels' sources)",
                "test_a_form_is_known_by_what_is_written",
            ),
        )
    ),
    # Each of these in six layouts, with kernel blocks, padding and alignment.
    *(
        Row(f"{content}, {ANY}", FULL, "GPU views in host memory", pages(content))
        for content in (
            *("float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2", "int8"),
            *("K and V of different size", "int8, scales in the row", "fp8, scales in the row"),
            *("int4, scales in the row", "TurboQuant", "UltraQuant"),
        )
    ),
    *(
        Row(f"{content}, {ANY}", MLA, "GPU views in host memory", pages(content))
        for content in ("MLA", "MLA fp8_ds_mla", "MLA nvfp4_ds_mla")
    ),
    Row(
        f"float16, {ANY}",
        "full attention, layers that share KV",
        "any",
        tensors("vllm_adapt/test_kv_sharing.py::test_layers_without_pages_are_not_counted"),
    ),
    # Several groups: full attention beside layers that read only the last tokens.
    Row(
        "float32",
        "full attention and sliding window",
        "CPU, vec",
        engine("test_groups.py::test_other_tensor_parallel_size_reads"),
    ),
    Row(
        "float32, loads that fail, full hits, decoded tokens",
        "full attention and sliding window",
        "CPU, vec",
        engine("test_groups.py::test_a_load_that_fails_begins_again"),
    ),
    Row(
        "float32, different numbers of heads, any tensor parallelism",
        "full attention and sliding window",
        "CPU, vec",
        engine("test_groups.py::test_ranks_that_hold_one_head_of_each_kind"),
    ),
    Row(
        "any, whatever groups its layers are in",
        "full attention and sliding window",
        "any",
        tensors("test_sides_groups.py::test_any_grouping_of_the_layers_is_read_by_any_other"),
    ),
    Row(
        "any",
        "chunked local attention",
        "any",
        tensors(
            "layout/test_topology_groups.py::test_what_is_not_read_any_more_is_never_read_again"
        ),
    ),
    Row(
        "any",
        "decode context parallelism of equal size",
        "any",
        tensors(
            "test_sides_groups.py::"
            "test_tokens_that_are_dealt_out_are_read_where_they_are_dealt_out_alike"
        ),
    ),
    Row(
        "any",
        "prefill context parallelism",
        "any",
        tensors("test_sides_groups.py::test_ranks_of_prefill_context_parallelism_hold_the_same"),
    ),
    Row(
        f"1, 2, 4 and 8 bytes an element, {ANY}",
        FULL,
        "NVIDIA H200, and in Triton's interpreter",
        tensors("gpu/test_copy_triton.py::test_every_format_and_dtype"),
    ),
    Row(
        "MLA",
        MLA,
        "NVIDIA H200, and in Triton's interpreter",
        tensors("gpu/test_copy_triton.py::test_an_opaque_latent"),
    ),
    Row(
        "tokens in tiles",
        FULL,
        "NVIDIA H200, and in Triton's interpreter",
        tensors("gpu/test_copy_triton.py::test_tokens_in_tiles"),
    ),
    Row(
        "units of states, both layouts",
        STATES,
        "NVIDIA H200, and in Triton's interpreter",
        tensors("gpu/test_copy_states.py::test_states_are_moved_as_on_the_host"),
    ),
    Row(
        "separate (k, v) tensors",
        FULL,
        "Ascend NPU",
        stand_in("ascend/test_sharing.py::test_npus_write_hosts_read_and_back"),
    ),
    Row(
        "fp8 and float32",
        "one group of unequal layers (kv_cache_dtype_skip_layers)",
        "CPU, vec",
        *2
        * [
            tensors(
                "vllm_adapt/test_unequal_layers.py::"
                "test_unequal_layers_pass_through_pages_of_another_block_size"
            )
        ],
    ),
    # Packed pages of GPUs, by their kernels' sources.
    *(
        Row(f"{what}, any tensor parallelism", group, device, tensors(PACKED))
        for what, group, device in (
            (
                "bfloat16, K and V planes beside plain rows",
                FULL,
                f"GPU (B12X, ROCM_ATTN), {BY_SOURCE}",
            ),
            ("NVFP4, scales mixed and not", FULL, f"NVIDIA GPU, {BY_SOURCE}"),
            ("indexer of DeepSeek V3.2 and GLM-5", MLA, f"NVIDIA and AMD GPU, {BY_SOURCE}"),
            ("indexer of GLM 5 Next", MLA, f"NVIDIA and AMD GPU, {BY_SOURCE}"),
        )
    ),
    Row(
        "indexer of DeepSeek V3.2 and GLM-5, any latents",
        "MLA and indexer in one group",
        "any, by vLLM's groups",
        tensors("vllm_adapt/test_packed_pages.py::test_an_indexer_beside_latents_is_a_layer_group"),
    ),
    Row(
        "indexer of GLM 5 Next beside latents and KDA",
        "MLA, indexer and recurrent state",
        "any, by vLLM's groups",
        tensors(
            "vllm_adapt/test_packed_pages.py::"
            "test_an_indexer_with_one_key_for_several_tokens_beside_states"
        ),
    ),
    Row(
        "DeepSeek V4's caches, packed and not, any tensor parallelism",
        "MLA, indexer and sliding windows",
        f"NVIDIA GPU, {BY_SOURCE}",
        tensors(COMPRESSED),
    ),
    Row(
        "windows of which a chunk's end is stored, with faults",
        "full attention and sliding window",
        "any",
        tensors("faults/test_ends.py::test_a_load_that_fails_starts_again_and_ends_well"),
    ),
    Row(
        "keys for several tokens beside states and a ring, every fault at every moment",
        "MLA, indexer and recurrent state",
        "any",
        tensors("faults/test_indexers.py::test_matrix"),
    ),
    # Refused.
    Row(
        "heads packed otherwise",
        FULL,
        "any",
        refused("heads packed otherwise", "in a form that is not known here"),
    ),
    Row(
        "K and V planes of another backend",
        FULL,
        "GPU",
        refused("planes of another backend", "ROCM_AITER_FA keeps K and V in planes"),
    ),
    Row(
        "packed pages",
        "any",
        "other than NVIDIA and AMD GPUs",
        refused("indexer on a host", "known on NVIDIA and AMD GPUs alone"),
    ),
    Row(
        "indexer, mxfp4",
        MLA,
        "any",
        refused("indexer in four bits", "set --attention-config.indexer_kv_dtype to fp8"),
    ),
    Row("unknown content", FULL, "any", refused("unknown content", "in a way of its own")),
    Row("unknown latent", MLA, "any", refused("unknown latent", "'new_ds_mla' is not known here")),
    Row(
        "DeepSeek V4's latents in another model",
        MLA,
        "any",
        refused("DeepSeek V4.1", "in deepseek_v4's form and is another one"),
    ),
    Row("compressed states", MLA, "any", refused("compressed", "one KV state for 4 tokens")),
    Row(
        "indexer with one key for several tokens, without recurrent states",
        MLA,
        "any",
        refused("pooled indexer", "16 tokens, within which a hit may end"),
    ),
    Row("indexer, other sizes", MLA, "any", refused("indexer", "have 100 bytes a token here")),
    Row(
        "without prefix caching",
        STATES,
        "any",
        refused(
            "states without prefix caching", "turn prefix caching on (--enable-prefix-caching)"
        ),
    ),
    Row(
        "decode context parallelism",
        STATES,
        "any",
        refused("states, decode context", "set decode_context_parallel_size to 1"),
    ),
    Row(
        "prefill context parallelism",
        STATES,
        "any",
        refused("states, prefill context", "set prefill_context_parallel_size to 1"),
    ),
    Row(
        "blocks that chunks do not meet",
        STATES,
        "any",
        refused("states between chunks", "set --block-size 256"),
    ),
    Row(
        "layer by layer",
        STATES,
        "any",
        refused("states, layer by layer", "needs a model with one KV cache group"),
    ),
    Row(
        "rings of recent inputs (ReplaySSM, RecoverSSM)",
        STATES,
        "any",
        refused("states with rings", "leave out --use-replayssm"),
    ),
    Row("unknown kinds", STATES, "any", refused("unknown states", "of kind CUSTOM are not known")),
    Row(
        "any", "prefix LM", "any", refused("prefix LM", "tokens of a prompt attend to those behind")
    ),
    Row(
        "rows of different sizes",
        "one group of unequal layers, not by kv_cache_dtype_skip_layers alone",
        "any",
        refused("unequal layers", "KV of different forms in a group"),
    ),
    Row(
        "scales computed at run time",
        FULL,
        "any",
        refused("scales at run time", "calculate_kv_scales computes scales at run time"),
    ),
    Row(
        "any",
        "several ranks that each have a scheduler (`external_launcher`)",
        "any",
        refused("ranks that plan by themselves", "set it to mp or ray"),
    ),
    Row(
        "any",
        "layers that share KV, pipeline parallelism",
        "any",
        refused("KV sharing over stages", "set pipeline_parallel_size to 1"),
    ),
    Row(
        "kv_cache_dtype_skip_layers",
        "pipeline parallelism",
        "any",
        refused("skipped layers over stages", "names layers, whose KV is shared without pipeline"),
    ),
    Row(
        "layer by layer",
        "sliding window, several groups",
        "any",
        refused("layer by layer, window", "needs a model with one KV cache group"),
    ),
    Row(
        "layer by layer, asynchronous scheduling",
        "any",
        "any",
        refused("layer by layer, asynchronous", "set async_scheduling to false"),
    ),
    Row(
        "layer by layer, pipeline parallelism",
        "any",
        "any",
        refused("layer by layer, stages", "set pipeline_parallel_size to 1"),
    ),
    Row(
        "layer by layer, inside MultiConnector",
        "any",
        "any",
        refused("layer by layer, beside others", "does not work with other connectors"),
    ),
    Row("any", FULL, "CPU, other forms", refused("unknown CPU form", "in the 'new' form")),
    Row(
        "K and V of different size",
        FULL,
        "CPU",
        refused("halves of CPU pages", "halves its pages into K and V"),
    ),
)

STATES_OF_ALL = (
    "vllm_adapt/kv_cache_specs/test_state_specs.py::"
    "test_every_engine_writes_the_same_cells_and_reads_those_of_any_other"
)
LATENTS = "faults/test_latents.py::test_any_number_of_ranks_reads_what_any_number_has_written"
WINDOWS = "test_sides_groups.py::test_any_grouping_of_the_layers_is_read_by_any_other"

FAMILIES = (
    Family(
        "Llama 2 and 3, Mistral, Mixtral, Qwen 2 and 3, Phi 3, OLMo 2, GLM 4",
        (
            *("LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM", "Qwen2ForCausalLM"),
            *("Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "Phi3ForCausalLM", "Olmo2ForCausalLM"),
            *("Glm4ForCausalLM", "Glm4MoeForCausalLM"),
        ),
        FULL,
        "CPU (Llama)",
        engine(SHARING),
        engine(SHARING),
    ),
    Family(
        "LLaVA",
        ("LlavaForConditionalGeneration",),
        "full attention; images by content",
        "CPU",
        engine("test_identity.py::test_images_that_are_prepared_otherwise_do_not_meet"),
    ),
    Family(
        "Gemma 3",
        ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
        "full attention and sliding window",
        "CPU",
        engine("test_groups.py::test_other_tensor_parallel_size_reads"),
    ),
    Family(
        "Gemma 4",
        ("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"),
        "full attention and sliding window, heads of two sizes, layers that share KV",
        "CPU",
        engine("test_formats.py::test_layers_that_share_kv"),
    ),
    Family(
        "Gemma 2, gpt-oss, Cohere 2, OLMo 3",
        ("Gemma2ForCausalLM", "GptOssForCausalLM", "Cohere2ForCausalLM", "Olmo3ForCausalLM"),
        "full attention and sliding window",
        "any",
        tensors(WINDOWS),
    ),
    Family(
        "Llama 4",
        ("Llama4ForCausalLM", "Llama4ForConditionalGeneration"),
        "full and chunked local attention",
        "any",
        tensors(
            "layout/test_topology_groups.py::test_what_is_not_read_any_more_is_never_read_again"
        ),
    ),
    Family(
        "MiMo V2, Step 3.5",
        ("MiMoV2FlashForCausalLM", "MiMoV2ForCausalLM", "Step3p5ForCausalLM"),
        "full attention and sliding window with different numbers of KV heads",
        "CPU (MiMo V2)",
        engine("test_groups.py::test_ranks_that_hold_one_head_of_each_kind"),
    ),
    Family(
        "DeepSeek V2, V3 and R1, Kimi K2",
        ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"),
        "MLA",
        "any; on CPUs without AMX saved and not loaded",
        tensors(LATENTS),
    ),
    Family(
        "DeepSeek V3.2, GLM 5",
        ("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM"),
        "MLA and a sparse-attention indexer",
        f"NVIDIA and AMD GPU, {BY_SOURCE}",
        tensors(PACKED),
    ),
    Family(
        "DeepSeek V4",
        ("DeepseekV4ForCausalLM",),
        "latents for 1, 4 and 128 tokens, an indexer, inputs of compressors",
        f"NVIDIA GPU, {BY_SOURCE}",
        tensors(COMPRESSED),
    ),
    Family(
        "DeepSeek V4.1",
        ("DeepseekV41ForCausalLM",),
        "as DeepSeek V4, with windows that are computed again after a hit",
        "any",
        refused("DeepSeek V4.1", "in deepseek_v4's form and is another one"),
    ),
    Family(
        "GLM 5 Next",
        ("Glm5NextForCausalLM",),
        "MLA, an indexer with one key for 16 tokens, and Kimi delta attention (KDA)",
        f"NVIDIA and AMD GPU, {BY_SOURCE}",
        tensors(PACKED),
    ),
    Family(
        "LFM2",
        ("Lfm2ForCausalLM", "Lfm2MoeForCausalLM"),
        "full attention and short convolution",
        "CPU (LFM2)",
        engine("test_states.py::test_other_tensor_parallel_size_reads"),
    ),
    Family(
        "Qwen3-Next, Qwen 3.5",
        (
            *("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"),
            *("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"),
        ),
        "full attention and gated delta networks (GDN); images by content",
        "CPU (Qwen3-Next, Qwen 3.5)",
        engine("test_states.py::test_other_tensor_parallel_size_reads[Qwen3.5-1-2]"),
    ),
    Family(
        "Granite 4",
        ("GraniteMoeHybridForCausalLM",),
        "full attention and Mamba2",
        f"CPU, {BLOCK_A_STEP}",
        engine("test_states.py::test_other_tensor_parallel_size_reads[Granite 4-1-2]"),
    ),
    Family(
        "Falcon-H1",
        ("FalconH1ForCausalLM",),
        "full attention and Mamba2 in every layer",
        f"CPU, {BLOCK_A_STEP}",
        engine(f"{STATE_FAMILIES}[Falcon-H1]"),
    ),
    Family(
        "Nemotron-H and 3",
        ("NemotronHForCausalLM",),
        "full attention and Mamba2",
        f"CPU (Nemotron-H), {BLOCK_A_STEP}",
        engine(f"{STATE_FAMILIES}[Nemotron-H]"),
    ),
    Family(
        "Mamba 2, with `--enable-prefix-caching`",
        ("Mamba2ForCausalLM",),
        "Mamba2",
        f"CPU, {BLOCK_A_STEP}",
        engine(f"{STATE_FAMILIES}[Mamba 2]"),
    ),
    Family(
        "Zamba 2",
        ("Zamba2ForCausalLM",),
        "full attention and Mamba2",
        "any",
        tensors(f"{STATES_OF_ALL}[Mamba2]"),
    ),
    Family(
        "Jamba",
        ("JambaForCausalLM",),
        "full attention and Mamba1",
        "any but CPUs, for which vLLM builds no `selective_scan_fwd`",
        tensors(f"{STATES_OF_ALL}[Mamba1]"),
    ),
    Family(
        "Bailing 2.5",
        ("BailingMoeV2_5ForCausalLM",),
        "full attention and linear attention",
        "any but CPUs: vLLM's `lightning_attn` is written in Triton",
        tensors(f"{STATES_OF_ALL}[linear attention]"),
    ),
    Family(
        "OLMo Hybrid",
        ("OlmoHybridForCausalLM",),
        "full attention and gated delta networks (GDN)",
        "any but CPUs: vLLM's `flash_linear_attention` is written in Triton",
        tensors(f"{STATES_OF_ALL}[GDN]"),
    ),
    Family(
        "Qwen 4 (experimental)",
        ("Qwen4ExpForCausalLM", "Qwen4ExpForConditionalGeneration"),
        "full attention, one compressed key for several tokens, GDN and short convolution",
        "any",
        refused("compressed", "one KV state for 4 tokens"),
    ),
    Family(
        "Kimi Linear, Kimi K3, Bailing 3",
        (
            *("KimiLinearForCausalLM", "KimiK3ForConditionalGeneration"),
            *("BailingMoeV3ForCausalLM", "BailingMoeV3VLForConditionalGeneration"),
        ),
        "MLA and Kimi delta attention (KDA); images by content",
        "any but CPUs: vLLM's `flash_linear_attention` is written in Triton",
        tensors(f"{STATES_OF_ALL}[KDA]"),
    ),
    Family(
        "HRM Text",
        ("HrmTextForCausalLM",),
        "prompts that attend to later tokens",
        "any",
        refused("prefix LM", "tokens of a prompt attend to those behind"),
    ),
)

DRAFTS = (
    "test_composition.py::"
    "test_what_is_saved_under_drafts_and_preemptions_is_what_anybody_would_compute"
)
EVENTS = "test_what_is_stored_and_removed_is_told_with_vllms_own_hashes"

# Beside the rest of vLLM: what, and what shows it under vLLM 0.32.0.
COMPOSED = (
    (
        "real weights (SmolLM2-135M): perplexity and answers at TP 1 and 3, blocks of 32 to 128, "
        "with chunked prefill, speculative decoding, preemption and LoRA",
        engine("test_real_weights.py::test_perplexity_and_answers_are_those_without_a_pool"),
    ),
    ("speculative decoding, preemption, LoRA", engine(f"{DRAFTS}[lora]")),
    ("speculative decoding, preemption, chunked prefill", engine(f"{DRAFTS}[chunked]")),
    (
        "requests without an adapter beside LoRA on CPU, which are not saved",
        engine("test_identity.py::test_values_of_an_adapter_are_not_handed_to_the_base_model"),
    ),
    (
        "MultiConnector beside ExampleConnector: both orders, loads that fail "
        "under `recompute` and `fail`",
        engine("test_multi_connector.py::test_beside_another_connector"),
    ),
    (
        "MultiConnector beside a connector whose own loads fail",
        engine("test_sibling_failures.py::test_what_another_connector_failed_to_load_is_not_saved"),
    ),
    (
        "loads that fail under `load_failure: fail`",
        tensors("faults/test_resume.py::test_a_request_may_fail_with_its_load"),
    ),
    (
        "data-parallel engines behind one server",
        Cell(
            How.ENGINE,
            "tests/deploy/test_data_parallel.py::test_one_engine_reads_what_another_has_written",
        ),
    ),
    ("KV events; hits by source, `host`", engine(f"test_events.py::{EVENTS}")),
    ("hits by source, `disk`", engine(f"{DRAFTS}[chunked]")),
    (
        "hits by source, by tier and kind of store",
        tensors("vllm_adapt/test_hit_sources.py::test_tokens_are_divided_by_chunk"),
    ),
    (
        "KV events of saves that fail and cells that host memory evicts",
        tensors("faults/test_events.py::test_a_listener_believes_what_is_so"),
    ),
    (
        "KV events of what stores evict, or lose to others",
        tensors("faults/test_events.py::test_what_a_store_evicts_is_taken_back"),
    ),
    (
        "both of vLLM's model runners, with and without drafts, in the order of either release",
        tensors("faults/test_runners.py::test_steps_in_the_order_of_a_runner"),
    ),
)

INTRODUCTION = """\
# What is shared, and what shows it

Written by `python -m tests.support_table > docs/support.md` from the table that the tests check:
every test named here exists, and what is refused is refused in these words.

- **real engine**: two real vLLM engines share a pool, and the second answers as the first.
- **tensors**: byte for byte on pages that vLLM's own functions allocated, without an engine; every
  format with this content reads what every other has written. In `tests/faults`: vLLM's own
  scheduler and KV cache manager, and real worker sides over pages that every step compares.
- **stand-in**: on a stand-in for the device's library. It has not run on the hardware.
- **refused**: the engine does not start; the message says what to do.
- An empty cell: nothing shows it.

A family's row names the strongest test of what its models keep. The models beside the one that has
run keep the same by vLLM's own description of their KV.

What differs in content is in another namespace, so it can only miss; where the bytes lie (layout,
block size, kernel blocks, padding) may differ between engines that share.
"""

RELEASES = ("0.32.0", "0.27.1")


def document() -> str:
    """The whole of docs/support.md."""
    releases = [f"vLLM {release}" for release in RELEASES]
    head = ("models", "keep", "device", *releases, "test")
    families = [(f.name, f.keeps, f.device, *_tested(f.newer, f.older)) for f in FAMILIES]
    lines = [INTRODUCTION, "## By model family", "", *_table(head, families)]
    lines += ["", "## By format", ""]
    head = ("format", "group", "device", *releases, "test")
    lines += [*_table(head, [_cells(row) for row in ROWS if not _is_refused(row)])]
    head = ("beside", "vLLM 0.32.0", "test")
    composed = [(what, cell.how.value, f"`{cell.test}`") for what, cell in COMPOSED]
    lines += ["", "## Beside the rest of vLLM", "", *_table(head, composed)]
    lines += ["", "## Refused", ""]
    head = ("format", "group", "device", "in these words")
    refusals = [(r.format, r.group, r.device, _words(r)) for r in ROWS if _is_refused(r)]
    return "\n".join([*lines, *_table(head, refusals), ""])


def tests() -> list[str]:
    """Every pytest node that a row rests on, once."""
    pairs = [(family.newer, family.older) for family in FAMILIES]
    pairs += [(row.newer, row.older) for row in ROWS]
    cells = [cell for pair in pairs for cell in pair if cell is not None]
    cells += [cell for _, cell in COMPOSED]
    return list(dict.fromkeys(cell.test for cell in cells))


def refusals() -> dict[str, str]:
    """The words of each refusal, by its name."""
    cells = (cell for row in ROWS for cell in (row.newer, row.older) if cell is not None)
    return {
        cell.test.partition("[")[2][:-1]: cell.words for cell in cells if cell.how is How.REFUSED
    }


def _is_refused(row: Row) -> bool:
    return row.newer is not None and row.newer.how is How.REFUSED


def _words(row: Row) -> str:
    assert row.newer is not None
    return f"… {row.newer.words} …"


def _cells(row: Row) -> tuple[str, ...]:
    return (row.format, row.group, row.device, *_tested(row.newer, row.older))


def _tested(*cells: Cell | None) -> tuple[str, ...]:
    """What shows it for each release, and the tests."""
    releases = ("" if cell is None else cell.how.value for cell in cells)
    nodes = dict.fromkeys(cell.test for cell in cells if cell is not None)
    return (*releases, ", ".join(f"`{node}`" for node in nodes))


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    return ["| " + " | ".join(cells) + " |" for cells in (head, ("---",) * len(head), *rows)]


if __name__ == "__main__":
    print(document(), end="")
