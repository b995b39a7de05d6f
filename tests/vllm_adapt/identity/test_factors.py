"""Every field of vLLM's configuration counts, or is left out by name and with a reason.

Runs under both releases: a field that one of them adds and nobody has classified counts.
"""

import dataclasses
import json
import logging
import re
import shutil
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import transformers
import vllm
from vllm.config import (
    AttentionConfig,
    KVTransferConfig,
    LoRAConfig,
    ModelConfig,
    MultiModalConfig,
    VllmConfig,
)
from vllm.config.quantization import QuantizationConfigArgs
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVQuantMode,
    MLAAttentionSpec,
)

from tests.cache_tensors import tensors_of
from tests.support.models import GemmaShape, LlamaShape, LlavaShape, make_model
from tests.support.releases import LLAVA, NEWEST, since
from vllm_kvpool.config import read_config
from vllm_kvpool.errors import ConfigError
from vllm_kvpool.layout.topology import LayerGroup, Topology
from vllm_kvpool.vllm_adapt import compat
from vllm_kvpool.vllm_adapt.engine_config import read_engine
from vllm_kvpool.vllm_adapt.identity import ascend_options
from vllm_kvpool.vllm_adapt.identity import namespace as identity_namespace
from vllm_kvpool.vllm_adapt.identity.factors import (
    ENVIRONMENT_LEFT_OUT,
    LEFT_OUT_OF_EMBEDDINGS,
    LEFT_OUT_OF_KV,
    LIBRARY_VARIABLES,
    canonical,
    default_of,
    environment_factors,
    factors,
)
from vllm_kvpool.vllm_adapt.identity.namespace import (
    _NAMES_LEFT_OUT,
    _rope,
    engine_namespace,
    model_values,
    weights_identity,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    # Readers of variables that a release is about to remove.
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

NEWER = vllm.__version__ == NEWEST
SPEC = FullAttentionSpec(block_size=32, num_kv_heads=4, head_size=32, dtype=torch.float32)
UNSEEN = "a value that no release has"

# Names in the table that the newer release lacks: fields of 0.23.0, of 0.28 to 0.31, and of 0.33,
# which has no build for CPUs.
OF_OTHER_RELEASES = {
    "CacheConfig.user_specified_mamba_block_size",
    "ModelConfig.enable_return_routed_experts",
    "CacheConfig.enable_mamba_fine_grained_prefix_cache",
    "AttentionConfig.indexer_tp_shard_min_rows",
    "AttentionConfig.minimax_m3_indexer_cp",
    "CacheConfig.simple_cpu_offload_num_blocks",
    "VllmConfig.watchdog_config",
}
NEWER_ALONE = pytest.mark.skipif(not NEWER, reason="the tables are of the newest release")
# Defaults of counting fields that mean more than an unset option.
DEFAULTS: dict[str, Any] = {
    # In 0.26.0, which reads it for MiniMax M3 alone: 0.32.0 calls the same "auto".
    "AttentionConfig.indexer_kv_dtype": "bf16",
    "CacheConfig.replayssm_buffer_len": 16,
    "LoadConfig.ignore_patterns": ["original/**/*"],
    "AttentionConfig.trtllm_ragged_backend": "trtllm-gen",
    "AttentionConfig.minimax_m3_msa_decode_backend": "triton",
    "CacheConfig.swa_bounded_replay": True,
    "MambaConfig.backend": "TRITON",
    "MultiModalConfig.mm_device_do_normalize": True,
    "MultiModalConfig.video_pruning_method": "evs",
}
NOTHING_ASKED: tuple[Any, ...] = (None, False, "auto", {}, [])


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def engine(model: Path, **arguments: Any) -> VllmConfig:
    values = {"dtype": "float32", "skip_tokenizer_init": True, "block_size": 32} | arguments
    return EngineArgs(model=str(model), **values).create_engine_config()


@pytest.fixture(scope="module")
def whole(directory: Path) -> VllmConfig:
    """Return an engine's configuration with every object that a table names."""
    config = engine(make_model(directory, LlamaShape()), enable_lora=True)
    config.model_config.multimodal_config = MultiModalConfig()
    config.model_config.quantization_config = QuantizationConfigArgs()
    return config


def namespace(config: VllmConfig, **options: Any) -> str:
    return str(engine_namespace(config, read_config(options, env={}), [], []).namespace)


class Field(NamedTuple):
    owner: Any
    name: str
    field: Any

    @property
    def full_name(self) -> str:
        return f"{type(self.owner).__name__}.{self.name}"


def fields_of(owner: Any, left_out: Any = LEFT_OUT_OF_KV) -> Iterator[Field]:
    """Yield every field of a configuration and of its objects, except fields left out whole."""
    for field in dataclasses.fields(owner):
        each = Field(owner, field.name, field)
        value = getattr(owner, field.name, None)
        is_object = dataclasses.is_dataclass(value) and "vllm.config" in type(value).__module__
        if is_object and each.full_name not in left_out:
            yield from fields_of(value, left_out)
        else:
            yield each


def changed(each: Field, read: Callable[[], Any]) -> bool:
    """Return True if another value of a field changes what is read."""
    before, value = read(), getattr(each.owner, each.name, None)
    had_it = hasattr(each.owner, each.name)
    unseen = {UNSEEN: UNSEEN} if isinstance(value, dict) else UNSEEN
    object.__setattr__(each.owner, each.name, unseen)
    try:
        return bool(read() != before)
    finally:
        if had_it:
            object.__setattr__(each.owner, each.name, value)
        else:
            object.__delattr__(each.owner, each.name)


def test_every_field_counts_or_is_left_out_with_a_reason(whole: VllmConfig) -> None:
    for each in fields_of(whole):
        if each.full_name in LEFT_OUT_OF_KV:
            assert len(LEFT_OUT_OF_KV[each.full_name]) > 5, each.full_name
        else:
            assert changed(each, lambda: namespace(whole)), each.full_name


@pytest.mark.parametrize(
    ("section", "name", "default", "value", "counts"),
    [
        ("AttentionConfig", "use_fp4_indexer_cache", None, True, True),
        ("AttentionConfig", "indexer_kv_dtype", "bf16", "fp8", True),
        ("CacheConfig", "enable_mamba_fine_grained_prefix_cache", False, True, False),
    ],
)
def test_fields_of_releases_that_no_test_runs(
    section: str, name: str, default: Any, value: Any, counts: bool
) -> None:
    field = (name, Any, dataclasses.field(default=default))
    make = dataclasses.make_dataclass(section, [field])
    assert factors(make()) == factors(make(default)) == {}
    assert factors(make(value)) == ({name: value} if counts else {})


def test_what_is_left_out_is_not_seen(whole: VllmConfig) -> None:
    """Whole objects are excepted: other options are read from them."""
    for each in fields_of(whole):
        if each.full_name in LEFT_OUT_OF_KV and not each.full_name.startswith("VllmConfig."):
            assert not changed(each, lambda: factors(whole)), each.full_name


def test_every_field_counts_for_embeddings_or_is_left_out_with_a_reason(whole: VllmConfig) -> None:
    for each in fields_of(whole, LEFT_OUT_OF_EMBEDDINGS):
        if each.full_name not in LEFT_OUT_OF_EMBEDDINGS:
            read = lambda: model_values(whole, "", "", LEFT_OUT_OF_EMBEDDINGS)  # noqa: E731
            assert changed(each, read), each.full_name


@NEWER_ALONE
def test_the_tables_name_only_what_there_is(whole: VllmConfig) -> None:
    names = {each.full_name for each in fields_of(whole, {})}
    names |= {f"VllmConfig.{field.name}" for field in dataclasses.fields(whole)}
    assert "ModelConfig.enforce_eager" in names
    elsewhere = set(LEFT_OUT_OF_EMBEDDINGS) - names - {"KernelConfig.ir_op_priority"}
    assert elsewhere == OF_OTHER_RELEASES


def test_the_defaults_of_a_release_that_counts_as_equal_are_known(whole: VllmConfig) -> None:
    """Defaults are not written down, so all of `EQUAL_RELEASES` must mean the same by them."""
    assert not compat.release_apart()
    counted = [each for each in fields_of(whole) if each.full_name not in LEFT_OUT_OF_KV]
    plain = {each.full_name: canonical(default_of(each.field)) for each in counted}
    unusual = {name: value for name, value in plain.items() if value not in NOTHING_ASKED}
    assert unusual == {name: DEFAULTS.get(name, "(not known)") for name in unusual}


EQUAL = (
    *("0.23.0", "0.32.0+cu129", "0.32.0+cpu", "0.26.0+empty", "0.32.0+rocm700"),
    "0.33.0+cu130.precompiled",
)
APART_FROM_OTHERS = (
    *("0.32.1", "0.34.0", "0.32.0rc1", "0.33.1.dev5+gabc.cu129", "0.32.0+fork", "dev"),
)


@pytest.mark.parametrize("release", [*EQUAL, *APART_FROM_OTHERS])
def test_a_release_counts_unless_it_is_known_to_be_equal(
    whole: VllmConfig, monkeypatch: pytest.MonkeyPatch, release: str
) -> None:
    before = namespace(whole)
    monkeypatch.setattr(vllm, "__version__", release)
    assert compat.release_apart() == ("" if release in EQUAL else release)
    assert (namespace(whole) == before) is (release in EQUAL)


def test_media_count_every_release_and_no_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """Releases that share text with each other do not share media."""
    seen = {compat.media_releases()}
    for build in ("0.33.0", "0.33.0+cpu", "0.33.0+cu130.precompiled"):
        monkeypatch.setattr(vllm, "__version__", build)
        seen.add(compat.media_releases())
    assert len(seen) == 2
    monkeypatch.setattr(transformers, "__version__", "4.57.1")
    assert compat.media_releases() not in seen


@pytest.mark.parametrize("owner", [ModelConfig, AttentionConfig, LoRAConfig, VllmConfig])
@pytest.mark.parametrize("value", [False, True])
def test_a_field_that_nobody_knows_counts_if_it_is_set(
    whole: VllmConfig, monkeypatch: pytest.MonkeyPatch, owner: type, value: bool
) -> None:
    """A later release may add such a field, with any default."""
    fields = [("later", bool, dataclasses.field(default=not value))]
    later = dataclasses.make_dataclass("Later", fields)
    before = namespace(whole)
    monkeypatch.setitem(
        owner.__dataclass_fields__,  # type: ignore[attr-defined]
        "later",
        dataclasses.fields(later)[0],
    )
    monkeypatch.setattr(owner, "later", not value, raising=False)
    assert namespace(whole) == before
    monkeypatch.setattr(owner, "later", value, raising=False)
    assert namespace(whole) != before


@pytest.mark.parametrize(
    "field", [dataclasses.field(), *(dataclasses.field(default=value) for value in (0, False))]
)
def test_a_field_without_a_default_or_of_another_type_counts(field: Any) -> None:
    """Python treats 0.0, 0 and False as equal."""
    make = dataclasses.make_dataclass("LoadConfig", [("later", Any, field)])
    assert factors(make(0.0)) == {"later": 0.0}


# The environment

# Patterns of the table that match nothing in one of the releases, or are vLLM-Ascend's.
PATTERNS_OF_OTHERS = {
    *ascend_options.VARIABLES_LEFT_OUT,
    *("ASCEND_HOME_PATH", "COMPILE_CUSTOM_KERNELS", "CXX_COMPILER", "C_COMPILER", "DYNAMIC_EPLB"),
    *("HCCL_SO_PATH", "SOC_VERSION", "VLLM_VERSION"),
}
PATTERNS_OF_OLDER = {"VLLM_MM_HASHER_ALGORITHM", "VLLM_PREFIX_CACHE_RETENTION_INTERVAL"}


def leaves_out(name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in ENVIRONMENT_LEFT_OUT)


def test_every_variable_of_vllms_counts_or_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    known = compat.environment_variables()
    for name in known:
        monkeypatch.delenv(name, raising=False)
    assert environment_factors(known) == {}
    for name in known:
        monkeypatch.setenv(name, "1")
        assert list(environment_factors(known)) == ([] if leaves_out(name) else [name])
        monkeypatch.delenv(name)


def test_images_that_a_cpu_computes_causally_keep_engines_apart(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The images are Gemma 3's.

    A GPU's backend lets an image's tokens attend to the whole image.
    """
    config = engine(make_model(directory, LlamaShape()))
    monkeypatch.setattr(type(config.model_config), "is_mm_prefix_lm", True)
    on_cpu = namespace(config)
    monkeypatch.setattr(compat, "device_type", lambda: "cuda")
    assert namespace(config) != on_cpu


@NEWER_ALONE
def test_the_patterns_match_only_what_there_is() -> None:
    known = compat.environment_variables()
    unused = {p for p in ENVIRONMENT_LEFT_OUT if not any(fnmatchcase(n, p) for n in known)}
    assert unused == PATTERNS_OF_OTHERS | PATTERNS_OF_OLDER


@pytest.mark.parametrize(
    "name",
    [
        *LIBRARY_VARIABLES,
        *("VLLM_CPU_INT4_W4A8", "VLLM_MARLIN_INPUT_DTYPE", "VLLM_MOE_ROUTING_SIMULATION_STRATEGY"),
        *("VLLM_ROCM_QUICK_REDUCE_QUANTIZATION", "VLLM_ROCM_USE_AITER_FP4BMM"),
        *("VLLM_FLOAT32_MATMUL_PRECISION", "VLLM_USE_DEEP_GEMM_E8M0", "VLLM_VIDEO_LOADER_BACKEND"),
        *("VLLM_TEST_FORCE_LOAD_FORMAT", "VLLM_USE_MODELSCOPE", "VLLM_HUMMING_ONLINE_QUANT_CONFIG"),
        *("VLLM_DISABLED_KERNELS", "VLLM_PLUGINS", "VLLM_MEDIA_CONNECTOR"),
    ],
)
def test_variables_that_change_what_is_computed_keep_engines_apart(
    whole: VllmConfig, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Such variables choose a library's kernels, quantised activations, weights or video frames."""
    monkeypatch.delenv(name, raising=False)
    before = namespace(whole)
    monkeypatch.setenv(name, "1")
    assert namespace(whole) != before


def test_a_variable_that_vllm_does_not_know_counts_as_none(
    whole: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kubernetes gives every pod the addresses of a service named vllm."""
    before = namespace(whole)
    monkeypatch.setenv("VLLM_SERVICE_HOST", "10.0.0.1")
    assert namespace(whole) == before


def test_pages_that_aiter_shuffles_are_refused(
    whole: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT", "1")
    with pytest.raises(ConfigError, match="VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT"):
        read_engine(whole, None, read_config({}, env={}))  # type: ignore[arg-type]


# Options that are left out, and that the code of some models reads

# By module of vLLM's: why what it reads of them changes no KV, or where it counts.
READERS_OF_LEFT_OUT = {
    "model_executor/models/llama4.py": "`attn_temperature_tuning` counts",
    "model_executor/layers/rotary_embedding/phi3_long_rope_scaled_rope.py": "`rope` counts",
    "model_executor/models/config.py": "limits of models that have no KV cache; output tokens",
    "model_executor/models/voxtral_realtime.py": "ends a stream",
    "model_executor/models/diffusion_gemma.py": "how tokens are chosen",
    "model_executor/models/gemma4_mm.py": "tokens that are never chosen",
    "model_executor/models/gemma4_mtp.py": "tokens that are never chosen",
    "model_executor/models/gemma4_unified.py": "tokens that are never chosen",
    "models/deepseek_v4/common/ops/cache_utils.py": "sizes of buffers",
    "models/deepseek_v4/sparse_mla.py": "sizes of buffers",
}
READS = re.compile(
    r"max_model_len\s*[<>]|[<>]=?\s*[\w.]*max_model_len|override_generation_config"
    r"|try_get_generation_config"
)


def sources_of_models() -> Iterator[tuple[str, str]]:
    """Yield names and text of vLLM's modules that compute models."""
    root = Path(vllm.__file__).parent
    for part in ("model_executor/models", "model_executor/layers", "models"):
        for path in (root / part).rglob("*.py"):
            yield str(path.relative_to(root)), path.read_text()


# By module: why the options that it writes as it builds a model keep no engines apart. Schedulers
# see them where they are one process with the model, at TP 1, and nowhere else.
WRITERS_OF_COUNTED = {
    "model_executor/models/config.py": "all processes write them, as the configuration is made",
    "model_executor/layers/attention/attention.py": "written before, as the configuration is made",
    "model_executor/layers/attention/mla_attention.py": "`cache_dtype` of sparse attention",
    "models/deepseek_v4/attention.py": "`cache_dtype` of sparse attention",
    "models/deepseek_v41/attention.py": "`cache_dtype` of sparse attention",
    "models/dots3_note/nvidia/model.py": "into a copy",
    "models/hy_v4/nvidia/attention.py": "known: with sinks, TP 1 shares with no other",
}
WRITES = re.compile(r"\b((?:cache|model|attention|kernel|mamba|load)_config)\.(\w+) = ")


def test_models_that_write_options_that_count_are_known() -> None:
    found = {
        name
        for name, text in sources_of_models()
        for section, field in WRITES.findall(text)
        if f"{section.title().replace('_', '')}.{field}" not in LEFT_OUT_OF_KV
    }
    assert found <= WRITERS_OF_COUNTED.keys()


def test_models_that_compute_by_options_that_are_left_out_are_known() -> None:
    """Such models compute by a limit of lengths, or by an option of sampling."""
    found = {name for name, text in sources_of_models() if READS.search(text)}
    assert found <= READERS_OF_LEFT_OUT.keys()


# By module: why what it reads of a configuration's names that are left out changes no KV.
READERS_OF_NAMES_LEFT_OUT = {
    "model_executor/models/deepencoder2.py": "of a class of transformers'",
    "model_executor/models/hrm_text.py": "refused: prompts attend to later tokens",
    "model_executor/models/longcat_flash.py": "defaults of a class of configurations",
    "model_executor/models/minicpmv.py": "an argument of a tokenizer, in 0.28",
    "model_executor/models/phi4mm.py": "handed to an encoder that does not read it",
    "model_executor/models/phimoe.py": "defaults of a class of configurations",
    "model_executor/models/transformers/base.py": "of a class of transformers'",
    "models/dots3_note/nvidia/vision.py": "defaults of a class of configurations",
}


def test_models_that_read_names_that_are_left_out_are_known() -> None:
    """A release may add a model that computes by one of these names."""
    named = {*_NAMES_LEFT_OUT} - {"dtype", "torch_dtype"}  # vLLM casts what is computed to its own
    reads = re.compile(rf"""\b({"|".join(named)})\b""")
    found = {name for name, text in sources_of_models() if reads.search(text)}
    assert found <= READERS_OF_NAMES_LEFT_OUT.keys()


@pytest.mark.parametrize(
    ("one", "other", "is_seen"),
    [
        ({"max_model_len": 32768}, {"max_model_len": 32769}, True),
        ({"max_model_len": 4096}, {"max_model_len": 32768}, False),
        (
            {"max_model_len": 4096},
            {
                "max_model_len": 4096,
                "override_generation_config": {"attn_temperature_tuning": True},
            },
            True,
        ),
        (
            {"max_model_len": 4096},
            {"max_model_len": 4096, "override_generation_config": {"temperature": 0.5}},
            False,
        ),
    ],
)
def test_what_scales_the_queries_of_llama_4_keeps_engines_apart(
    directory: Path, one: dict[str, Any], other: dict[str, Any], is_seen: bool
) -> None:
    model = make_model(directory, LlamaShape(max_position=65536))
    configs = [engine(model, **each) for each in (one, other)]
    assert namespace(configs[0]) == namespace(configs[1])
    for config in configs:
        config.model_config.hf_text_config.model_type = "llama4_text"
    assert (namespace(configs[0]) != namespace(configs[1])) is is_seen


@pytest.mark.parametrize("kind", ["llama4_text", "long rope"])
def test_a_length_that_was_fitted_to_memory_counts_as_the_model_was_built(
    directory: Path, kind: str
) -> None:
    """vLLM lowers an "auto" length after the model was built with the long one."""
    model = make_model(directory, LlamaShape(max_position=65536))
    fitted, whole, short = (engine(model, max_model_len=length) for length in (-1, -1, 4096))
    fitted.model_config.max_model_len = 4096  # as `_auto_fit_max_model_len` does
    for config in (fitted, whole, short):
        if kind == "llama4_text":
            config.model_config.hf_text_config.model_type = kind
        else:
            config.model_config.hf_overrides = {"original_max_position_embeddings": 8192}
    assert namespace(fitted) == namespace(whole) != namespace(short)


ROPES: dict[str, dict[str, Any]] = {
    "llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {},
    "longrope": {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16},
}


@pytest.mark.parametrize(
    ("kind", "is_seen"), [("llama3", False), ("yarn", False), ("longrope", True)]
)
def test_how_long_prompts_may_be_counts_only_where_rope_depends_on_it(
    directory: Path, kind: str, is_seen: bool
) -> None:
    model = make_model(directory, LlamaShape(max_position=65536))
    rope = {"rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 8192}
    overrides = {"rope_parameters": {"rope_type": kind, **rope, **ROPES[kind]}}
    one, other = (
        engine(model, max_model_len=length, hf_overrides=overrides) for length in (8192, 16384)
    )
    assert (namespace(one) != namespace(other)) is is_seen


@pytest.mark.parametrize(
    ("model_type", "kind", "is_seen"),
    [
        ("minimax_m2", "dynamic", True),
        ("plamo3", "dynamic", True),
        ("cohere_compass_text", "dynamic", True),
        ("minimax_m2", "default", False),
        ("llama", "dynamic", False),
    ],
)
def test_how_long_prompts_may_be_counts_where_a_model_builds_its_rope_for_them(
    directory: Path, model_type: str, kind: str, is_seen: bool
) -> None:
    model = make_model(directory, LlamaShape(max_position=65536))
    one, other = (engine(model, max_model_len=length) for length in (8192, 16384))
    for config in (one, other):
        rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}
        config.model_config.hf_overrides = {"model_type": model_type, "rope_parameters": rope}
    assert (namespace(one) != namespace(other)) is is_seen


def test_yarn_of_mla_is_deepseeks_but_for_models_with_another() -> None:
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096}
    fields = {"mscale": 0.5, "mscale_all_dim": 1.0, "attn_factor": 2.0}  # the newer's, the older's
    deepseek, minicpm, llama = (
        _rope(
            SimpleNamespace(rope_parameters=yarn | fields, model_type=name, kv_lora_rank=latent),
            8192,
        )
        for name, latent in (("deepseek_v3", 512), ("minicpm3", 512), ("llama", None))
    )
    assert minicpm["scale"] == llama["scale"] != deepseek.get("scale")


def test_what_a_release_makes_of_yarn_counts_for_each_type_of_layers() -> None:
    """A field that a release does not read changes nothing in it."""
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096}
    fields = {"attention_factor": 1.0, "apply_yarn_scaling": False}  # the newer's, the older's
    one = SimpleNamespace(rope_parameters={**yarn, **fields}, model_type="llama")
    assert _rope(one, 4096)["scale"] == 1.0
    several = {"full_attention": {**yarn, **fields}, "sliding_attention": {"rope_theta": 1e4}}
    made = _rope(SimpleNamespace(rope_parameters=several, model_type="olmo3"), 4096)
    assert made["full_attention"]["scale"] == 1.0
    assert "scale" not in made["sliding_attention"]
    usual = SimpleNamespace(rope_parameters={**yarn, "attention_factor": None}, model_type="llama")
    assert "scale" not in _rope(usual, 4096)


def test_a_window_counts_where_layers_with_one_are_kept_with_others(directory: Path) -> None:
    """An option puts all layers into one KV cache group.

    A window may differ by release (Cohere 2).
    """
    config = engine(make_model(directory, LlamaShape()))
    layers = [f"model.layers.{i}.self_attn.attn" for i in range(4)]
    seen = set()
    for window in (None, 96, 97):
        spec = dataclasses.replace(SPEC, sliding_window=window)
        cache = KVCacheConfig(
            num_blocks=100,
            kv_cache_tensors=tensors_of(layers),
            kv_cache_groups=[KVCacheGroupSpec(layers, spec)],
        )
        seen.add(read_engine(config, cache, read_config({}, env={})).shape.namespace)
    assert len(seen) == 3


def test_a_file_of_quantisation_counts_by_content(directory: Path, tmp_path: Path) -> None:
    file = tmp_path / "quantization.json"
    config = engine(make_model(directory, LlamaShape()))
    config.model_config.hf_overrides = {"quantization_config_file": str(file)}
    names = []
    for bits in (4, 8, 4):
        file.write_text(json.dumps({"bits": bits}))
        names.append(namespace(config))
    assert names[0] == names[2] != names[1]


def test_weights_in_two_forms_count_by_which_are_read(copied: Path) -> None:
    """vLLM reads Mistral's own files by default where they exist."""

    def names() -> list[str]:
        formats = ("auto", "mistral", "safetensors", "hf")
        return [namespace(engine(copied, load_format=name)) for name in formats]

    assert len(set(names())) == 1
    [weights] = copied.glob("*.safetensors")
    shutil.copy(weights, copied / "consolidated.safetensors")
    assert names()[0] == names()[1] != names()[2] == names()[3]


# Engines that differ


class Case(NamedTuple):
    """Two engines of one model."""

    name: str
    one: dict[str, Any]
    other: dict[str, Any]
    vision: bool = False


FP8 = "fp8_per_block_static"
HALF = {"dtype": "bfloat16"}
ONLINE: dict[str, Any] = {
    **HALF,
    "quantization": "online",
    "quantization_config": {"linear": {"weight": FP8}},
}
LORA = {"enable_lora": True}
APART = [
    Case("LoRA targets", LORA, {**LORA, "lora_target_modules": ["o_proj"]}),
    Case("LoRA dtype", LORA, {**LORA, "lora_dtype": "bfloat16"}),
    Case("online quantisation", HALF, ONLINE),
    Case(
        "layers that online quantisation ignores",
        ONLINE,
        {
            **ONLINE,
            "quantization_config": {"linear": {"weight": FP8}, "ignore": ["re:.*"]},
        },
    ),
    Case("a processor's options", {}, {"mm_processor_kwargs": {"do_normalize": False}}, True),
    Case("media options", {}, {"media_io_kwargs": {"video": {"num_frames": 4}}}, True),
    Case("video pruning", {}, {"video_pruning_rate": 0.5}, True),
    Case("the encoder's layer", {}, {"hf_overrides": {"vision_feature_layer": -2}}, True),
    Case("FP8 of another kind", {"kv_cache_dtype": "fp8"}, {"kv_cache_dtype": "fp8_e5m2"}),
    Case("KV in FP8", HALF, {**HALF, "kv_cache_dtype": "fp8_e4m3"}),
    Case("a kernel that quantises", {}, {"attention_backend": "FLASH_ATTN"}),
    Case("the implementation", {}, {"model_impl": "transformers"}),
]
TOGETHER = [
    Case("eager or compiled", {}, {"enforce_eager": True}),
    Case("memory", {}, {"gpu_memory_utilization": 0.5, "max_num_seqs": 3}),
    Case("loaders", {}, {"load_format": "safetensors"}),
    Case("LoRA or none, for requests without", {}, LORA),
    Case("room for adapters", LORA, {**LORA, "max_loras": 3, "max_lora_rank": 64}),
    Case(
        "LoRA targets in another order",
        *(
            {**LORA, "lora_target_modules": names}
            for names in (["o_proj", "q_proj"], ["q_proj", "o_proj"])
        ),
    ),
    Case("either name of FP8", {"kv_cache_dtype": "fp8"}, {"kv_cache_dtype": "fp8_e4m3"}),
    Case("KV in the model's own type", HALF, {**HALF, "kv_cache_dtype": "bfloat16"}),
    Case("limits of media", {}, {"limit_mm_per_prompt": {"image": 3}}, True),
    Case("names and caches of media", {}, {"mm_processor_cache_gb": 0}, True),
    Case("names", {}, {"served_model_name": "another"}),
]


QUANTISED: dict[str, dict[str, Any]] = {
    "weights in FP8": {**HALF, "quantization": "fp8"},
    "weights that are quantised as they are loaded": ONLINE,
}


@pytest.mark.parametrize("arguments", QUANTISED.values(), ids=QUANTISED)
def test_quantised_models_of_unlike_devices_do_not_share(
    directory: Path, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any]
) -> None:
    """A GPU without FP8 numbers keeps activations in 16 bits. Other GPUs round them."""
    seen: dict[str, set[str]] = {"plain": set(), "quantised": set()}
    for device in ("cuda 8.0", "cuda 9.0"):
        monkeypatch.setattr(compat, "quantising_device", lambda each=device: each)
        for name, options in (("plain", HALF), ("quantised", arguments)):
            config = engine(make_model(directory, LlamaShape()), **options)
            seen[name].add(namespace(config))
    assert {name: len(each) for name, each in seen.items()} == {"plain": 1, "quantised": 2}


@pytest.mark.parametrize(
    ("method", "device", "counts"),
    [
        ("gptq_marlin", "cuda", False),
        ("awq_marlin", "cuda", False),
        ("compressed-tensors", "cuda", True),
        ("fp8", "cuda", True),
        ("gptq_marlin", "cpu", True),  # CPUs with AMX round activations, too
    ],
)
def test_methods_that_round_weights_alone_are_shared_between_gpus(
    directory: Path, monkeypatch: pytest.MonkeyPatch, method: str, device: str, counts: bool
) -> None:
    config = engine(make_model(directory, LlamaShape()))
    config.model_config.quantization = method
    monkeypatch.setattr(compat, "device_type", lambda: device)
    seen = set()
    for each in ("8.0", "9.0"):
        monkeypatch.setattr(compat, "quantising_device", lambda each=each: each)
        seen.add(namespace(config))
    assert (len(seen) == 2) is counts


@pytest.mark.parametrize("mode", [mode.name for mode in KVQuantMode])
def test_quantised_kv_of_unlike_devices_is_not_shared(
    whole: VllmConfig, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """Some devices also quantise queries in order to read quantised KV."""
    spec = dataclasses.replace(SPEC, dtype=torch.uint8, kv_quant_mode=KVQuantMode[mode])
    group = LayerGroup(Topology(num_heads=4, tp_size=1, stages=((0, 4),), layer_span=4), 64)
    seen = set()
    for device in ("cuda 8.0", "cuda 9.0"):
        monkeypatch.setattr(compat, "quantising_device", lambda each=device: each)
        identity = engine_namespace(whole, read_config({}, env={}), [spec], [group])
        seen.add(identity.values.get("device"))
    assert seen == ({None} if mode == "NONE" else {"cuda 8.0", "cuda 9.0"})


@pytest.mark.parametrize(
    ("spec", "kinds"),
    [
        (SPEC, 1),
        (dataclasses.replace(SPEC, sliding_window=64), 2),
        (MLAAttentionSpec(block_size=32, num_kv_heads=1, head_size=576, dtype=torch.float32), 2),
    ],
    ids=["full attention", "window", "latent"],
)
def test_values_of_npus_are_apart_where_vllm_ascend_computes_others(
    whole: VllmConfig, monkeypatch: pytest.MonkeyPatch, spec: FullAttentionSpec, kinds: int
) -> None:
    """vLLM-Ascend sets `pre_tokens=sliding_window`, which adds the token itself to the window.

    Its `npu_interleave_rope` reorders the numbers of a latent from 0, 1, 2, 3 to 0, 2, 1, 3.
    """
    group = LayerGroup(Topology(num_heads=4, tp_size=1, stages=((0, 4),), layer_span=4), 64)
    seen = set()
    for device in ("cpu", "cuda", "npu"):
        monkeypatch.setattr(compat, "device_type", lambda each=device: each)
        seen.add(engine_namespace(whole, read_config({}, env={}), [spec], [group]).namespace)
    assert len(seen) == kinds


def test_the_device_is_named_by_what_it_can_multiply(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.platforms import current_platform
    from vllm.platforms.interface import DeviceCapability

    names = []
    for has_amx in (False, True):
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda each=has_amx: each)
        names.append(compat.quantising_device())
    monkeypatch.setattr(compat, "device_type", lambda: "cuda")
    for capability in (DeviceCapability(8, 0), DeviceCapability(9, 0), None):
        answer = staticmethod(lambda each=capability: each)
        monkeypatch.setattr(type(current_platform), "get_device_capability", answer)
        names.append(compat.quantising_device())
    assert len(set(names)) == len(names)


def test_random_weights_are_equal_where_they_are_drawn_alike(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM draws a tensor by its size on a rank, with the device's generator.

    Integer tensors keep the content of uninitialised memory.
    """
    model = make_model(directory, LlamaShape())

    def drawn(**changes: Any) -> str:
        config = engine(model, load_format="dummy")
        monkeypatch.setattr(type(config.model_config), "is_moe", changes.pop("is_moe", False))
        for name, value in changes.items():
            section = config.model_config if name == "quantization" else config.parallel_config
            object.__setattr__(section, name, value)
        return weights_identity(config)

    assert drawn() == drawn() == drawn(data_parallel_size=2)
    assert drawn(quantization="fp8") == drawn()
    experts = {"is_moe": True}

    def of_rank(rank: int) -> str:
        """Return the identity of a data-parallel rank, named as vLLM names it."""
        one.kv_transfer_config = KVTransferConfig(engine_id=f"one_dp{rank}")
        return weights_identity(one)

    one = engine(model, load_format="dummy")
    one.model_config.quantization = "gptq"
    known = [
        of_rank(0),
        of_rank(1),
        drawn(),
        drawn(tensor_parallel_size=2),
        drawn(**experts),
        drawn(**experts, data_parallel_size=2),
        drawn(**experts, data_parallel_size=2, enable_expert_parallel=True),
        *(drawn(quantization="gptq") for _ in range(2)),
    ]
    monkeypatch.setattr(compat, "source_of_random_weights", lambda: "vllm 0.1, another device")
    known.append(drawn())
    assert len(set(known)) == len(known)


def test_an_fp8_number_of_another_device_has_one_name_there(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On some devices "fp8" does not mean "fp8_e4m3"."""
    model = make_model(directory, LlamaShape())
    one, other = (engine(model, kv_cache_dtype=name) for name in ("fp8", "fp8_e4m3"))
    monkeypatch.setattr(compat, "fp8_name", lambda: "float8_e5m2")
    assert namespace(one) != namespace(other)


def here(cases: list[Case]) -> list[Case]:
    """Return the cases, without LLaVA where this release cannot import it."""
    return [case for case in cases if since(LLAVA, vllm.__version__) or not case.vision]


@pytest.mark.parametrize("case", here(APART), ids=lambda case: case.name)
def test_engines_that_compute_otherwise_do_not_share(directory: Path, case: Case) -> None:
    one, other = both(directory, case)
    assert namespace(one) != namespace(other)


@pytest.mark.parametrize("case", here(TOGETHER), ids=lambda case: case.name)
def test_engines_that_compute_the_same_share(directory: Path, case: Case) -> None:
    one, other = both(directory, case)
    assert namespace(one) == namespace(other)


def both(directory: Path, case: Case) -> tuple[VllmConfig, VllmConfig]:
    model = (
        make_model(directory, LlavaShape()) if case.vision else make_model(directory, LlamaShape())
    )
    return engine(model, **case.one), engine(model, **case.other)


# Files


@pytest.fixture
def copied(directory: Path, tmp_path: Path) -> Path:
    """Return a model whose files may be changed, with the files that media models have."""
    copy = Path(shutil.copytree(make_model(directory, LlamaShape()), tmp_path / "llama"))
    for name in (
        "preprocessor_config.json",
        "video_preprocessor_config.json",
        "processor_config.json",
    ):
        (copy / name).write_text(json.dumps({"do_normalize": True}))
    (copy / "tokenizer_config.json").write_text("{}")
    return copy


def rewrite(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values, indent=7))


@pytest.mark.parametrize(
    ("name", "values", "is_seen"),
    [
        ("preprocessor_config.json", {"do_normalize": False}, True),
        ("processor_config.json", {"vision_feature_select_strategy": "full"}, True),
        ("config.json", {"vision_feature_layer": -2}, True),
        ("video_preprocessor_config.json", {"fps": 3}, True),
        ("config.json", {"transformers_version": "0.0"}, False),
        ("config.json", {}, False),  # spelt otherwise
        # LongCat's embeddings stop at the end of a text, Moondream 3 puts its beginning before an
        # image.
        ("config.json", {"eos_token_id": 3}, True),
        ("config.json", {"bos_token_id": 3}, True),
        ("config.json", {"pad_token_id": 3}, True),
        ("tokenizer_config.json", {"padding_side": "left"}, False),
    ],
)
def test_files_of_a_model_count_by_what_they_say(
    copied: Path, name: str, values: dict[str, Any], is_seen: bool
) -> None:
    before = namespace(engine(copied))
    rewrite(copied / name, **values)
    assert (namespace(engine(copied)) != before) is is_seen


def test_files_that_nobody_knows_count(copied: Path) -> None:
    """Scales and options of quantisation lie in files of many names."""
    before = namespace(engine(copied))
    for name, is_seen in (("kv_scales.json", True), ("generation_config.json", False)):
        (copied / name).write_text("{}")
        assert (namespace(engine(copied)) != before) is is_seen
        (copied / name).unlink()


def test_a_models_own_code_counts_where_it_may_run(copied: Path) -> None:
    before = namespace(engine(copied))
    (copied / "modeling.py").write_text("pass")
    config = engine(copied)
    assert namespace(config) == before
    config.model_config.trust_remote_code = True
    assert namespace(config) != before


def test_the_same_files_elsewhere_are_the_same_model(copied: Path, directory: Path) -> None:
    there = Path(shutil.copytree(copied, directory / "elsewhere" / copied.name))
    assert namespace(engine(there)) == namespace(engine(copied))


def test_the_same_files_elsewhere_are_the_same_model_to_a_function(
    copied: Path, directory: Path
) -> None:
    """A function in `hf_overrides` counts by its result, which contains the path."""
    there = Path(shutil.copytree(copied, directory / "to a function" / copied.name))
    names = [
        namespace(engine(path, hf_overrides=lambda config: config)) for path in (copied, there)
    ]
    assert names[0] == names[1]


def test_weights_count_as_vllm_has_downloaded_them(
    copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model of the same name in Hugging Face's own cache does not count."""
    own, other = tmp_path / "cache", tmp_path / "downloads"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(own))

    def download(to: Path, last_byte: int) -> None:
        repository = to / "models--org--model"
        shutil.copytree(copied, repository / "snapshots" / "c0ffee")
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text("c0ffee")
        [weights] = repository.rglob("*.safetensors")
        weights.write_bytes(weights.read_bytes()[:-1] + bytes([last_byte]))

    def identity(download_dir: Path | None) -> str:
        config = engine(copied)
        config.model_config.model = "org/model"
        config.load_config.download_dir = download_dir and str(download_dir)
        return weights_identity(config)

    download(own, 1)
    assert identity(other) == "name:org/model@None"
    download(other, 2)
    seen = {identity(None), identity(other)}
    assert len(seen) == 2
    assert all(each.startswith("sample:") for each in seen)
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "True")
    assert identity(None) == identity(other) == "name:org/model@None"


def test_a_configuration_elsewhere_counts_instead_of_the_models(
    copied: Path, tmp_path: Path
) -> None:
    there = Path(shutil.copytree(copied, tmp_path / "there" / copied.name))
    config = engine(copied)
    before = namespace(config)
    config.model_config.hf_config_path = str(there)
    rewrite(copied / "config.json", routed_scaling_factor=2.5)
    assert namespace(config) == before
    rewrite(there / "config.json", routed_scaling_factor=2.5)
    assert namespace(config) != before


def test_weights_id_stands_for_the_files_that_say_how_weights_are_kept(copied: Path) -> None:
    before = namespace(engine(copied), weights_id="v1")
    rewrite(copied / "config.json", something_of_the_writer=1)
    assert namespace(engine(copied), weights_id="v1") == before
    rewrite(copied / "preprocessor_config.json", do_normalize=False)
    assert namespace(engine(copied), weights_id="v1") != before


def test_the_namespace_of_a_tenant_counts_as_it_is_written(whole: VllmConfig) -> None:
    """SECURITY.md says so about normal forms of Unicode."""
    names = ("caf\u00e9", "cafe\u0301", "\ud800", "\udfff", "a\0", "a", "@", "a@fmt:0123456789ab")
    assert len({namespace(whole, namespace=name) for name in names}) == len(names)


@pytest.mark.parametrize(("name", "value"), [("FORMAT_VERSION", 3), ("SCHEME", b"other")])
def test_another_format_is_another_namespace(
    whole: VllmConfig, monkeypatch: pytest.MonkeyPatch, name: str, value: object
) -> None:
    before = namespace(whole)
    monkeypatch.setattr(identity_namespace, name, value)
    assert namespace(whole) != before


# Values that nobody can compare


def test_sizes_that_differ_by_layer_count(directory: Path) -> None:
    """Transformers raises an error if such a configuration is asked for one size of all layers."""
    sizes = (32, 64, 64)
    models = [make_model(directory, GemmaShape(global_head_dim=size)) for size in sizes]
    equal, other, again = (namespace(engine(model), weights_id="w") for model in models)
    assert equal != other == again


def test_a_function_counts_by_what_it_does(directory: Path) -> None:
    def slower(config: Any, theta: float) -> Any:
        if hasattr(config, "rope_parameters"):  # vLLM tries it on an empty one, too
            config.rope_parameters["rope_theta"] = theta
        return config

    model = make_model(directory, LlamaShape())
    names = [
        namespace(engine(model, hf_overrides=override))
        for override in (
            lambda config: slower(config, 5e3),
            lambda config: slower(config, 5e3),
            lambda config: slower(config, 7e3),
        )
    ]
    assert names[0] == names[1] != names[2]


def test_an_engine_with_a_value_that_cannot_be_compared_is_alone(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    configs = [engine(make_model(directory, LlamaShape())) for _ in range(2)]
    for config in configs:
        config.additional_config = {"made": object()}
    with caplog.at_level(logging.WARNING, "vllm_kvpool"):
        one, other = map(namespace, configs)
    assert one != other
    assert one == namespace(configs[0])
    assert "additional_config: object objects cannot be compared" in caplog.text


READ_AS_LIMITS = {
    # for buffers, and for what a prompt may hold
    *("colpali", "deepseek_ocr", "deepseek_v2", "diffusion_gemma"),
    *("embedding_gemma2", "ernie45_vl", "gemma3_mm", "gemma4_mm", "glm4_1v", "idefics3"),
    *("internvl", "kimi_k25", "kimi_vl", "lfm2_vl", "minicpmv", "mllama4"),
    *("parakeet", "qwen2_5_vl", "qwen2_vl", "qwen3_vl", "step3_vl", "voxtral"),
    "voxtral_realtime",
    "config",  # of encoders, and of pages
    "nano_nemotron_vl",  # images are cut to fit; hashes have the number of their tokens
    "dots3_note",  # frames of videos are chosen to fit; hashes have the number of their tokens
    *("deepseek_v32", "deepseek_v4", "deepseek_v41", "glm5next", "hy_v4", "inkling", "kimi_k3"),
    "minimax_m3",
}
READ_FOR_KV = {"llama4"}
READ_FOR_SOME_ROPES = {"cohere_compass", "minimax_m2", "minimax_text_01", "plamo2", "plamo3"}


def test_models_that_read_max_model_len_are_known() -> None:
    """A new model that reads `max_model_len` must be classified: does it change the KV?"""
    readers = {
        Path(name).stem if name.startswith("model_executor") else name.split("/")[1]
        for name, text in sources_of_models()
        if "max_model_len" in text and not name.startswith("model_executor/layers")
    }
    assert READ_FOR_KV <= readers <= READ_AS_LIMITS | READ_FOR_KV | READ_FOR_SOME_ROPES
