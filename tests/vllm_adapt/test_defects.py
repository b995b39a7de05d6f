"""Known wrong results of vLLM: the pool finds each row's defect, and none in its neighbours."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm
from vllm.config import LoRAConfig, PoolerConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.ops import torch_ops
from vllm.model_executor.models.registry import ModelRegistry
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
)

from tests.cache_tensors import tensors_of
from tests.support.models import (
    DeepseekShape,
    Lfm2Shape,
    LlamaShape,
    PureMambaShape,
    Qwen2VLShape,
    make_model,
)
from tests.support.releases import since
from vllm_kvpool.config import read_config
from vllm_kvpool.vllm_adapt import compat, engine_config

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

ROOT = Path(__file__).parent.parent.parent
SHAPE = LlamaShape(kv_heads=4, layers=4)
SPEC = FullAttentionSpec(block_size=32, num_kv_heads=4, head_size=32, dtype=torch.float32)
LATENT = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.float32)
MLA, POOLING, OUTPUTS, LORA, ROTARY, PRUNING, PREPARED, EMBEDDINGS, SESSIONS, FAULTS = (
    each.name for each in compat.DEFECTS
)
Make = Callable[[Path], VllmConfig]


def llama(**arguments: Any) -> Make:
    return lambda directory: _config(make_model(directory, SHAPE), **arguments)


def deepseek(*, chunks: bool, prefixes: bool) -> Make:
    def make(directory: Path) -> VllmConfig:
        config = _config(make_model(directory, DeepseekShape()))
        config.scheduler_config.enable_chunked_prefill = chunks
        config.cache_config.enable_prefix_caching = prefixes
        return config

    return make


def with_lora(directory: Path) -> VllmConfig:
    config = llama()(directory)
    config.lora_config = LoRAConfig(max_lora_rank=8)
    return config


def hidden_states(directory: Path) -> VllmConfig:
    return llama(
        speculative_config={
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [1, 2]}},
        }
    )(directory)


def routed_experts(directory: Path) -> VllmConfig:
    config = llama()(directory)
    config.aux_output_config.enable_return_routed_experts = True  # unchecked: it wants a GPU
    return config


def fault_tolerant(directory: Path) -> VllmConfig:
    config = llama()(directory)
    config.parallel_config.enable_fault_tolerance = True  # unchecked: it wants data parallelism
    return config


def lfm2(*custom_ops: str) -> Make:
    def make(directory: Path) -> VllmConfig:
        config = _config(make_model(directory, Lfm2Shape()))
        config.compilation_config.custom_ops = list(custom_ops)
        return config

    return make


def mamba(directory: Path) -> VllmConfig:
    config = _config(make_model(directory, PureMambaShape()), enable_prefix_caching=False)
    config.cache_config.enable_prefix_caching = True  # unchecked: vLLM 0.23 refuses it beside AMX
    return config


def videos(pruning_rate: float | None) -> Make:
    return lambda directory: _config(
        make_model(directory, Qwen2VLShape()),
        video_pruning_rate=pruning_rate,
        skip_tokenizer_init=False,
    )


def of_images(architecture: str) -> Make:
    """Return a Qwen2-VL with another model's name, whose processor is looked at."""
    return lambda directory: _config(
        make_model(directory, Qwen2VLShape()),
        hf_overrides={"architectures": [architecture]},
        skip_tokenizer_init=False,
    )


def pooling(kind: str) -> Make:
    return llama(runner="pooling", pooler_config=PoolerConfig(seq_pooling_type=kind))


def _config(model: Path, **arguments: Any) -> VllmConfig:
    values = {"dtype": "float32", "skip_tokenizer_init": True} | arguments
    return EngineArgs(model=str(model), **values).create_engine_config()


# vLLM 0.23.0 caches no prefixes of models with recurrent states unless it is asked to.
OF_HYBRIDS = since({"0.23.0": [POOLING], "0.26.0": []}, vllm.__version__)

# An engine, the device it runs on, its defects, and whether it loads, and saves requests without
# and with an adapter.
ENGINES: list[tuple[Make, str, list[str], tuple[bool, bool, bool]]] = [
    (llama(), "cpu", [], (True, True, True)),
    # Without AMX the platform turns both off.
    (deepseek(chunks=False, prefixes=False), "cpu", [MLA], (False, True, True)),
    (deepseek(chunks=True, prefixes=False), "cpu", [], (True, True, True)),
    (deepseek(chunks=False, prefixes=True), "cpu", [], (True, True, True)),
    (deepseek(chunks=False, prefixes=False), "npu", [], (True, True, True)),
    # A mean of what is computed behind a hit is none of the prompt; vLLM ends the engine.
    (pooling("MEAN"), "cpu", [POOLING], (False, True, True)),
    (pooling("CLS"), "cpu", [POOLING], (False, True, True)),
    (pooling("LAST"), "cpu", [], (True, True, True)),
    # vLLM calls it experimental, and caches prefixes where it is asked to.
    (mamba, "cpu", [], (True, True, True)),
    (hidden_states, "cpu", [OUTPUTS], (False, True, True)),
    (with_lora, "cpu", [LORA], (True, False, True)),
    (fault_tolerant, "cpu", [FAULTS], (True, False, False)),
    (lfm2("all"), "cpu", [*OF_HYBRIDS, ROTARY], (False, False, False)),
    (lfm2("all", "-rotary_embedding"), "cpu", OF_HYBRIDS, (not OF_HYBRIDS, True, True)),
    (lfm2("none"), "cpu", OF_HYBRIDS, (not OF_HYBRIDS, True, True)),
    (lfm2("all"), "cuda", OF_HYBRIDS, (not OF_HYBRIDS, True, True)),
    (videos(0.5), "cuda", [PRUNING], (True, True, True)),
    (videos(0.0), "cuda", [], (True, True, True)),
    (videos(None), "cuda", [], (True, True, True)),
    # Beside other images an image is cut into fewer pieces. vLLM's own prefix cache confuses the
    # first of them with pieces of the image alone.
    (of_images("H2OVLChatModel"), "cpu", [PREPARED], (True, True, True)),
    (of_images("DeepseekVLV2ForCausalLM"), "cpu", [PREPARED], (True, True, True)),
    (llama(enable_prompt_embeds=True), "cpu", [EMBEDDINGS], (True, True, True)),
    (
        llama(enable_prompt_embeds=True, enable_prefix_caching=False),
        "cpu",
        [],
        (True, True, True),
    ),
    # Processors with a step of their own that caches all the same.
    (of_images("JinaVLForRanking"), "cpu", [], (True, True, True)),
]


if "UnlimitedOCRForCausalLM" in ModelRegistry.get_supported_archs():
    ENGINES += [(of_images("UnlimitedOCRForCausalLM"), "cpu", [PREPARED], (True, True, True))]

if hasattr(VllmConfig, "aux_output_config"):  # vLLM 0.27.1 refuses it beside any connector
    ENGINES += [(routed_experts, "cpu", [OUTPUTS], (False, True, True))]


def names(config: VllmConfig) -> list[str]:
    """Return an engine's defects, without the defect of every release that caches prefixes."""
    return [each.name for each in compat.known_defects(config) if each.name != SESSIONS]


def test_deepseek_without_mla_gives_the_rotary_kernel_its_heads_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_MLA_DISABLE", "1")
    monkeypatch.setattr(compat, "device_type", lambda: "cpu")
    config = deepseek(chunks=True, prefixes=True)(tmp_path)
    config.compilation_config.custom_ops = ["all"]
    assert names(config) == [ROTARY]
    config.compilation_config.custom_ops = ["all", "-rotary_embedding"]
    assert names(config) == []


@pytest.mark.parametrize(("make", "device", "expected", "allowed"), ENGINES)
def test_what_an_engine_computes_wrongly_is_left_alone(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    make: Make,
    device: str,
    expected: list[str],
    allowed: tuple[bool, bool, bool],
) -> None:
    config = make(tmp_path)
    monkeypatch.setattr(compat, "device_type", lambda: device)
    layers = [f"model.layers.{i}.self_attn.attn" for i in range(4)]
    spec = LATENT if config.model_config.use_mla else SPEC
    cache = KVCacheConfig(
        num_blocks=100,
        kv_cache_tensors=tensors_of(layers),
        kv_cache_groups=[KVCacheGroupSpec(layers, spec)],
    )
    facts = engine_config.read_engine(config, cache, read_config({}, env={}))
    assert facts.defects == compat.known_defects(config)
    assert names(config) == expected
    assert (SESSIONS in [each.name for each in facts.defects]) is (
        compat._keeps_names_of_sessions() and config.cache_config.enable_prefix_caching
    )
    saves_base = all(defect.saves_base for defect in facts.defects)
    saves_adapters = all(defect.saves_adapters for defect in facts.defects)
    assert (facts.shape.loads, saves_base, saves_adapters) == allowed


def test_every_row_has_an_engine_and_a_line_in_the_documents() -> None:
    assert {SESSIONS, *(name for _, _, names, _ in ENGINES for name in names)} == {
        defect.name for defect in compat.DEFECTS
    }
    rows = (ROOT / "docs" / "failures.md").read_text().splitlines()
    for defect in compat.DEFECTS:
        [row] = [row for row in rows if row.startswith(f"| {defect.name} |")]
        assert ("nothing is loaded" in row) is not defect.loads
        assert ("are not saved" in row) is not (
            defect.saves_base and defect.saves_adapters and _trusts_all_hits(defect)
        )
        assert ("with media share nothing" in row) is not defect.shares_media


def _trusts_all_hits(defect: compat.Defect) -> bool:
    asked: Any = SimpleNamespace(prompt_embeds=torch.zeros(1), resumable=True)
    return defect.trusts_hits(asked) and defect.trusts_later_hits(asked)


def test_lora_kernels_that_leave_base_tokens_alone_are_no_defect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels of a later release may do so."""
    right = torch_ops.sgmv_expand

    def sgmv_expand(inputs: Any, weights: Any, output: Any, *rest: Any) -> None:
        before = output.clone()
        right(inputs, weights, output, *rest)
        adapters = rest[2].repeat_interleave(rest[1])
        output[adapters < 0] = before[adapters < 0]

    monkeypatch.setattr(torch_ops, "sgmv_expand", sgmv_expand)
    assert names(with_lora(tmp_path)) == []


def test_lora_kernels_of_a_gpu_are_no_defect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.lora.punica_wrapper.punica_base import PunicaWrapperBase
    from vllm.platforms import current_platform

    config = with_lora(tmp_path)
    other = f"{PunicaWrapperBase.__module__}.{PunicaWrapperBase.__qualname__}"
    monkeypatch.setattr(type(current_platform), "get_punica_wrapper", lambda *_: other)
    assert names(config) == []
