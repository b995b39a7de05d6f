"""Tiny models, tokenizers and LoRA adapters on disk, for tests, examples and benchmarks.

Weights are float32 and spread wide (`INITIALIZER_RANGE`). Engines of different tensor-parallel
sizes then agree to about 1e-5 in log-probability. One wrong cached token, or another image, changes
it by 1e-2. Comparing log-probabilities therefore finds wrong cache bytes.

Nothing is downloaded. Text models take token ids (`add_tokenizer` gives them a tokenizer). Image
models come with a tokenizer and a processor. Equal parameters always give equal bytes, and a
complete directory is not rewritten.
"""

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

Tensor = NDArray[np.float32]
Sizes = Iterator[tuple[str, tuple[int, ...]]]

INITIALIZER_RANGE = 0.12
LORA_SCALE = 0.05
GEMMA_ATTENTION_WEIGHT = 4
QWEN3_NEXT_RANGE = 0.05
DEFAULT_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
NORMS = ("norm.weight", "norm1.weight", "norm2.weight", "ln_q.weight")

# Prompts of random tokens never contain this id: their ids begin at 3 in all tests.
IMAGE_TOKEN_ID = 0
LLAVA_IMAGE = "<image>"
QWEN2_VL_IMAGE = "<|image_pad|>"
QWEN2_VL_LAST_TOKENS = ("<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
QWEN2_VL_FRAMES = 2
# Messages are copied unchanged. vLLM puts image tokens before the text of their message.
IMAGE_TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"

TEXT_VOCAB = 400
BEGIN, END = "<|begin|>", "<|end|>"
CORPUS = (
    "the pool holds what one engine has computed and another one finds it there",
    "a prompt is cut into chunks and every chunk into cells of one head and some layers",
    "requests are answered in the order in which they came unless somebody is in a hurry",
    "tell me a story about a router that never lost a token of any stream",
    "0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 100 200 300 1000",
)
TEXT_TEMPLATE = (
    "{% for message in messages %}<|begin|>{{ message['role'] }}: {{ message['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|begin|>assistant: {% endif %}"
)


@dataclass(frozen=True, kw_only=True)
class LlamaShape:
    """The parameters that determine a Llama's bytes; subclasses add those of other models."""

    kind: ClassVar[str] = "llama"

    kv_heads: int = 4
    heads: int = 8
    layers: int = 4
    head_dim: int = 32
    hidden: int = 128
    intermediate: int = 256
    vocab: int = 1024
    max_position: int = 4096
    seed: int = 0

    def __post_init__(self) -> None:
        assert self.heads % self.kv_heads == 0, self

    left_out: ClassVar[tuple[str, ...]] = ()
    """Parts of names of tensors that vLLM does not need."""
    renames: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Pairs of name prefixes: in transformers, and in checkpoints."""

    def sizes(self) -> Sizes:
        """Yield names and sizes of the tensors, in the order in which they are drawn."""
        for name, size in _sizes_of(self.config()):
            if not any(part in name for part in self.left_out):
                for ours, theirs in self.renames:
                    name = re.sub(f"^{re.escape(ours)}", theirs, name)
                yield name, size

    def tensor(self, rng: np.random.Generator, size: tuple[int, ...], name: str) -> Tensor:
        """Return the values of one tensor."""
        return np.ones(size, np.float32) if name.endswith(NORMS) else _normal(rng, size)

    def config(self) -> dict[str, Any]:
        """Return the content of config.json."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "dtype": "float32",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab,
            "max_position_embeddings": self.max_position,
            "rms_norm_eps": 1e-5,
            "initializer_range": INITIALIZER_RANGE,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }

    def add_files(self, path: Path) -> None:
        """Write what there is beside the weights and their configuration."""


def make_model(directory: Path, shape: LlamaShape) -> Path:
    """Write the model of `shape` below `directory`, unless it is there, and return its path."""

    def fill(path: Path) -> None:
        rng = np.random.default_rng(shape.seed)
        weights = {name: shape.tensor(rng, size, name) for name, size in shape.sizes()}
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
        _write_json(path / "config.json", shape.config())
        shape.add_files(path)

    return _once(directory, shape.kind, asdict(shape), fill)


# Models of text


def _layer_types(layers: int, every: int, other: str) -> list[str]:
    """Return the layers' types: full attention in each `every`th layer, `other` elsewhere."""
    return [other if (layer + 1) % every else "full_attention" for layer in range(layers)]


@dataclass(frozen=True, kw_only=True)
class WindowShape(LlamaShape):
    """A model with full attention in each `full_every`th layer, sliding windows in the others."""

    layers: int = 6
    window: int = 96
    full_every: int = 3

    def layer_types(self) -> list[str]:
        return _layer_types(self.layers, self.full_every, "sliding_attention")


@dataclass(frozen=True, kw_only=True)
class SlidingLlamaShape(WindowShape):
    """A Llama whose configuration names its windows."""

    kind: ClassVar[str] = "sliding_llama"

    def config(self) -> dict[str, Any]:
        return super().config() | {
            "sliding_window": self.window,
            "layer_types": self.layer_types(),
        }


@dataclass(frozen=True, kw_only=True)
class GemmaShape(WindowShape):
    """A Gemma 4 whose last `sharing_layers` layers reuse the KV of earlier layers.

    Full attention has another head size than sliding windows. With `global_kv_heads`, it also has
    that number of KV heads, and its V equals its K.
    """

    kind: ClassVar[str] = "gemma"
    left_out: ClassVar[tuple[str, ...]] = ("layer_scalar",)

    sharing_layers: int = 2
    global_head_dim: int = 64
    global_kv_heads: int = 0

    def tensor(self, rng: np.random.Generator, size: tuple[int, ...], name: str) -> Tensor:
        # Otherwise the previous token alone decides, and wrong KV would go unnoticed.
        weight = GEMMA_ATTENTION_WEIGHT if name.endswith("post_attention_layernorm.weight") else 1
        return super().tensor(rng, size, name) * np.float32(weight)

    def config(self) -> dict[str, Any]:
        return super().config() | {
            "architectures": ["Gemma4ForCausalLM"],
            "model_type": "gemma4_text",
            "global_head_dim": self.global_head_dim,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": self.vocab,
            "num_kv_shared_layers": self.sharing_layers,
            "attention_k_eq_v": self.global_kv_heads > 0,
            "num_global_key_value_heads": self.global_kv_heads or None,
            "sliding_window": self.window,
            "layer_types": self.layer_types(),
        }


@dataclass(frozen=True, kw_only=True)
class HybridShape(WindowShape):
    """A Gemma 3."""

    kind: ClassVar[str] = "hybrid"

    def tensor(self, rng: np.random.Generator, size: tuple[int, ...], name: str) -> Tensor:
        if name.endswith("post_attention_layernorm.weight"):
            return np.full(size, GEMMA_ATTENTION_WEIGHT, dtype=np.float32)
        if name.endswith(NORMS):
            return np.zeros(size, dtype=np.float32)  # this Gemma's norms add one
        return super().tensor(rng, size, name)

    def config(self) -> dict[str, Any]:
        return super().config() | {
            "architectures": ["Gemma3ForCausalLM"],
            "model_type": "gemma3_text",
            "query_pre_attn_scalar": self.head_dim,
            "rope_theta": 10000.0,
            "sliding_window": self.window,
            "layer_types": self.layer_types(),
        }


@dataclass(frozen=True, kw_only=True)
class UnevenShape(WindowShape):
    """A MiMo V2, whose windows have `window_kv_heads`; the configuration gives the others first."""

    kind: ClassVar[str] = "uneven"
    left_out: ClassVar[tuple[str, ...]] = ("sinks",)

    kv_heads: int = 1
    window_kv_heads: int = 2

    def config(self) -> dict[str, Any]:
        types = self.layer_types()
        return super().config() | {
            "architectures": ["MiMoV2FlashForCausalLM"],
            "model_type": "mimo_v2_flash",
            "swa_num_attention_heads": self.heads,
            "swa_num_key_value_heads": self.window_kv_heads,
            "v_head_dim": self.head_dim,
            "swa_head_dim": self.head_dim,
            "swa_v_head_dim": self.head_dim,
            "rope_theta": 10000.0,
            "swa_rope_theta": 10000.0,
            "partial_rotary_factor": 1.0,
            "attention_value_scale": None,
            "sliding_window": self.window,
            "sliding_window_size": self.window,
            "hybrid_layer_pattern": [int(each == "sliding_attention") for each in types],
            "layer_types": types,
            "mlp_layer_types": ["dense"] * self.layers,
            "layernorm_epsilon": 1e-5,
        }


@dataclass(frozen=True, kw_only=True)
class Lfm2Shape(LlamaShape):
    """An LFM2: layers with a short convolution, whose state is recurrent, beside full attention."""

    kind: ClassVar[str] = "lfm2"

    layers: int = 6
    hidden: int = 256
    attention_every: int = 3
    kernel: int = 3

    def layer_types(self) -> list[str]:
        return _layer_types(self.layers, self.attention_every, "conv")

    def config(self) -> dict[str, Any]:
        return _without(super().config(), "head_dim", "rms_norm_eps") | {
            "architectures": ["Lfm2ForCausalLM"],
            "model_type": "lfm2",
            "rope_parameters": DEFAULT_ROPE,
            "layer_types": self.layer_types(),
            "conv_L_cache": self.kernel,
            "conv_dim": self.hidden,
            "conv_dim_out": self.hidden,
            "block_dim": self.hidden,
            "block_ff_dim": self.intermediate,
            "block_multiple_of": 1,
            "block_norm_eps": 1e-5,
            "block_auto_adjust_ff_dim": False,
            "block_use_swiglu": True,
        }


@dataclass(frozen=True, kw_only=True)
class Qwen3NextShape(LlamaShape):
    """A Qwen3-Next: gated delta networks (GDN) beside full attention, with experts.

    All of its few experts are chosen, and weights are narrow: rounding must choose no other.
    """

    kind: ClassVar[str] = "qwen3_next"

    heads: int = 4
    kv_heads: int = 2
    attention_every: int = 4
    key_heads: int = 2
    value_heads: int = 4
    linear_dim: int = 64
    kernel: int = 4
    experts: int = 2
    expert_size: int = 64

    def layer_types(self) -> list[str]:
        return _layer_types(self.layers, self.attention_every, "linear_attention")

    def sizes(self) -> Sizes:
        rows, hidden = self.expert_size, self.hidden
        sizes = {
            "gate_proj": (rows, hidden),
            "up_proj": (rows, hidden),
            "down_proj": (hidden, rows),
        }
        for name, size in super().sizes():
            prefix, _, part = name.partition(".experts.")
            if not part:
                yield name, size
            elif part == "down_proj":  # holds all experts, like `gate_up_proj`
                for i in range(self.experts):
                    yield from ((f"{prefix}.experts.{i}.{p}.weight", sizes[p]) for p in sizes)

    def tensor(self, rng: np.random.Generator, size: tuple[int, ...], name: str) -> Tensor:
        if name.endswith(("linear_attn.norm.weight", "dt_bias")):
            return np.ones(size, np.float32)
        if name.endswith("A_log"):  # how fast a head forgets
            return np.log(rng.uniform(0.01, 0.1, size)).astype(np.float32)
        if name.endswith(NORMS):
            return np.zeros(size, np.float32)  # these norms add one
        return _normal(rng, size, QWEN3_NEXT_RANGE)

    def config(self) -> dict[str, Any]:
        return super().config() | {
            "architectures": ["Qwen3NextForCausalLM"],
            "model_type": "qwen3_next",
            "dtype": "bfloat16",
            "initializer_range": QWEN3_NEXT_RANGE,
            "rope_parameters": DEFAULT_ROPE | {"partial_rotary_factor": 0.25},
            "layer_types": self.layer_types(),
            "linear_conv_kernel_dim": self.kernel,
            "linear_key_head_dim": self.linear_dim,
            "linear_value_head_dim": self.linear_dim,
            "linear_num_key_heads": self.key_heads,
            "linear_num_value_heads": self.value_heads,
            "num_experts": self.experts,
            "num_experts_per_tok": self.experts,
            "moe_intermediate_size": self.expert_size,
            "shared_expert_intermediate_size": self.expert_size,
        }


@dataclass(frozen=True, kw_only=True)
class QwenImages:
    """Models for images of any size, in rows of `merge` x `merge` patches of `patch` pixels."""

    # Beyond the ids of random prompts there must be room for the video tokens.
    vocab: int = 1088
    patch: int = 14
    merge: int = 2
    max_image_rows: int = 256
    vision_layers: int = 2
    vision_heads: int = 2
    vision_hidden: int = 64

    def image_config(self) -> dict[str, Any]:
        """Return the configuration beside those of the text model and the image encoder."""
        video, start, end = range(self.vocab - len(QWEN2_VL_LAST_TOKENS), self.vocab)
        return {
            "image_token_id": IMAGE_TOKEN_ID,
            "video_token_id": video,
            "vision_start_token_id": start,
            "vision_end_token_id": end,
        }

    def vision_config(self) -> dict[str, Any]:
        return {
            "depth": self.vision_layers,
            "num_heads": self.vision_heads,
            "patch_size": self.patch,
            "spatial_merge_size": self.merge,
            "initializer_range": INITIALIZER_RANGE,
        }

    def add_processor(self, path: Path, kind: str) -> None:
        """Write the files of a processor, and a tokenizer."""
        side = self.patch * self.merge
        pixels = {
            "patch_size": self.patch,
            "temporal_patch_size": QWEN2_VL_FRAMES,
            "merge_size": self.merge,
            "size": {"shortest_edge": side**2, "longest_edge": self.max_image_rows * side**2},
        }
        image = {"image_processor_type": "Qwen2VLImageProcessor", **pixels}
        video = {"video_processor_type": f"{kind}VideoProcessor", **pixels}
        _write_json(path / "preprocessor_config.json", image)
        _write_json(path / "video_preprocessor_config.json", video)
        _write_json(path / "processor_config.json", {"processor_class": f"{kind}Processor"})
        _add_byte_tokenizer(path, self.vocab, [QWEN2_VL_IMAGE, "<s>", "</s>"], QWEN2_VL_LAST_TOKENS)


@dataclass(frozen=True, kw_only=True)
class Qwen35Shape(QwenImages, Qwen3NextShape):
    """A Qwen 3.5: images beside gated delta networks (GDN) and full attention, without experts."""

    kind: ClassVar[str] = "qwen3_5"

    vision_positions: int = 64

    def tensor(self, rng: np.random.Generator, size: tuple[int, ...], name: str) -> Tensor:
        if ".visual." in name:
            return LlamaShape.tensor(self, rng, size, name)
        return super().tensor(rng, size, name)

    def config(self) -> dict[str, Any]:
        third = self.head_dim // 32  # share of the rotations for height, and for width
        text = super().config()
        rope = text["rope_parameters"] | {
            "mrope_section": [self.head_dim // 8 - 2 * third, third, third],
            "mrope_interleaved": True,
        }
        experts = [name for name in text if "expert" in name or name.startswith("moe_")]
        text = _without(text, *experts)
        return self.image_config() | {
            "architectures": ["Qwen3_5ForConditionalGeneration"],
            "model_type": "qwen3_5",
            "dtype": "bfloat16",
            "text_config": text
            | {
                "architectures": ["Qwen3_5ForCausalLM"],
                "model_type": "qwen3_5_text",
                "rope_parameters": rope,
                "mamba_ssm_dtype": "float32",
            },
            "vision_config": self.vision_config()
            | {
                "model_type": "qwen3_5",
                "hidden_size": self.vision_hidden,
                "intermediate_size": 2 * self.vision_hidden,
                "out_hidden_size": self.hidden,
                "num_position_embeddings": self.vision_positions,
                "deepstack_visual_indexes": [],
            },
        }

    def add_files(self, path: Path) -> None:
        self.add_processor(path, "Qwen3VL")


@dataclass(frozen=True, kw_only=True)
class Mamba2Shape(LlamaShape):
    """The parameters and tensors that models with Mamba2 layers share."""

    heads: int = 4
    mamba_heads: int = 8
    mamba_dim: int = 32
    state: int = 64
    groups: ClassVar[int] = 1
    kernel: int = 4

    @property
    def inner(self) -> int:
        return self.mamba_heads * self.mamba_dim

    def mamba_config(self) -> dict[str, Any]:
        return {
            "mamba_n_heads": self.mamba_heads,
            "mamba_d_head": self.mamba_dim,
            "mamba_n_groups": self.groups,
            "mamba_d_state": self.state,
            "mamba_d_conv": self.kernel,
            "mamba_expand": self.inner // self.hidden,
            "mamba_chunk_size": 256,
        }

    def tensor(self, rng: np.random.Generator, size: tuple[int, ...], name: str) -> Tensor:
        if name.endswith(("dt_bias", ".D", "norm_f.weight")):
            return np.ones(size, np.float32)
        if name.endswith("A_log"):  # how fast a head forgets
            return np.log(rng.uniform(0.001, 0.01, size)).astype(np.float32)
        return super().tensor(rng, size, name)


@dataclass(frozen=True, kw_only=True)
class GraniteShape(Mamba2Shape):
    """A Granite 4: Mamba2 with one group beside full attention without positions."""

    kind: ClassVar[str] = "granite"

    attention_every: int = 4

    def layer_types(self) -> list[str]:
        attends = [(layer + 1) % self.attention_every == 0 for layer in range(self.layers)]
        return ["attention" if each else "mamba" for each in attends]

    def config(self) -> dict[str, Any]:
        return super().config() | {
            "architectures": ["GraniteMoeHybridForCausalLM"],
            "model_type": "granitemoehybrid",
            "layer_types": self.layer_types(),
            "position_embedding_type": "nope",
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": self.intermediate,
            "attention_multiplier": self.head_dim**-0.5,
            **self.mamba_config(),
        }


@dataclass(frozen=True, kw_only=True)
class FalconH1Shape(Mamba2Shape):
    """A Falcon-H1: every layer has both Mamba2, of one group, and full attention."""

    kind: ClassVar[str] = "falcon_h1"

    def config(self) -> dict[str, Any]:
        return super().config() | {
            "architectures": ["FalconH1ForCausalLM"],
            "model_type": "falcon_h1",
            "mamba_d_ssm": self.inner,
            **self.mamba_config(),
            "mamba_chunk_size": 64,
        }


@dataclass(frozen=True, kw_only=True)
class NemotronHShape(Mamba2Shape):
    """A Nemotron-H: layers of Mamba2 with two groups, of full attention and of neurons alone."""

    kind: ClassVar[str] = "nemotron_h"
    renames: ClassVar[tuple[tuple[str, str], ...]] = (("model.", "backbone."),)

    groups: ClassVar[int] = 2
    layer_types: ClassVar[tuple[str, ...]] = (
        *("linear_attention", "full_attention", "linear_attention", "mlp"),
        *("linear_attention", "full_attention", "mlp", "linear_attention"),
    )

    def config(self) -> dict[str, Any]:
        return _without(super().config(), "rms_norm_eps") | {
            "architectures": ["NemotronHForCausalLM"],
            "model_type": "nemotron_h",
            "num_hidden_layers": len(self.layer_types),
            "layers_block_type": list(self.layer_types),
            "mamba_num_heads": self.mamba_heads,
            "mamba_head_dim": self.mamba_dim,
            "n_groups": self.groups,
            "ssm_state_size": self.state,
            "conv_kernel": self.kernel,
            "chunk_size": 64,
        }


@dataclass(frozen=True, kw_only=True)
class PureMambaShape(Mamba2Shape):
    """A Mamba 2: no layer has attention."""

    kind: ClassVar[str] = "mamba2"

    def config(self) -> dict[str, Any]:
        llama = super().config()
        of_all = ("dtype", "hidden_size", "num_hidden_layers", "vocab_size", "initializer_range")
        return {name: llama[name] for name in (*of_all, "bos_token_id", "eos_token_id")} | {
            "architectures": ["Mamba2ForCausalLM"],
            "model_type": "mamba2",
            "num_heads": self.mamba_heads,
            "head_dim": self.mamba_dim,
            "n_groups": self.groups,
            "state_size": self.state,
            "conv_kernel": self.kernel,
            "expand": self.inner // self.hidden,
            "residual_in_fp32": False,
        }


@dataclass(frozen=True, kw_only=True)
class LoopedShape(LlamaShape):
    """An IQuest LoopCoder: runs through its layers twice, the second time with a window as well."""

    kind: ClassVar[str] = "looped"

    hidden: int = 256
    window: int = 64

    def sizes(self) -> Sizes:
        yield from super().sizes()
        for layer in range(self.layers):
            yield f"model.gate_projections.{layer}.weight", (self.heads, self.head_dim)
            yield f"model.gate_projections.{layer}.bias", (self.heads,)

    def config(self) -> dict[str, Any]:
        # The model's own type needs remote code. Llama's type has every field that vLLM reads.
        return super().config() | {
            "architectures": ["IQuestLoopCoderForCausalLM"],
            "rope_parameters": DEFAULT_ROPE,
            "loop_num": 2,
            "loop_window_size": self.window,
        }


@dataclass(frozen=True, kw_only=True)
class DeepseekShape(LlamaShape):
    """A DeepSeek V2 with MLA: its KV is one row of `latent` and `rope_dim` numbers for all heads.

    vLLM's CPU kernels take no other row than the one of these defaults.
    """

    kind: ClassVar[str] = "deepseek"

    heads: int = 4
    layers: int = 3
    latent: int = 512
    rope_dim: int = 64
    nope_dim: int = 32
    value_dim: int = 32

    def config(self) -> dict[str, Any]:
        return _without(super().config(), "head_dim") | {
            "architectures": ["DeepseekV2ForCausalLM"],
            "model_type": "deepseek_v2",
            "num_key_value_heads": self.heads,
            "kv_lora_rank": self.latent,
            "q_lora_rank": None,
            "qk_nope_head_dim": self.nope_dim,
            "qk_rope_head_dim": self.rope_dim,
            "v_head_dim": self.value_dim,
            # No layer has experts, but vLLM reads their parameters nevertheless.
            "first_k_dense_replace": self.layers,
            "moe_layer_freq": 1,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "n_group": 1,
            "topk_group": 1,
        }


# Models of images


@dataclass(frozen=True, kw_only=True)
class LlavaShape(LlamaShape):
    """A LLaVA with the vision tower of CLIP; `image_size` and `patch` are in pixels."""

    kind: ClassVar[str] = "llava"
    left_out: ClassVar[tuple[str, ...]] = ("post_layernorm",)
    # Names in vLLM have a level that newer releases of transformers do not have.
    renames: ClassVar[tuple[tuple[str, str], ...]] = (
        ("lm_head.", "language_model.lm_head."),
        ("model.language_model.", "language_model.model."),
        ("model.vision_tower.", "vision_tower.vision_model."),
        ("model.multi_modal_projector.", "multi_modal_projector."),
    )

    image_size: int = 56
    patch: int = 14
    vision_layers: int = 2
    vision_heads: int = 2
    vision_hidden: int = 64
    vision_intermediate: int = 128

    @property
    def image_rows(self) -> int:
        """The rows of one image's embedding, and the tokens that it takes in a prompt."""
        return (self.image_size // self.patch) ** 2

    def config(self) -> dict[str, Any]:
        return {
            "architectures": ["LlavaForConditionalGeneration"],
            "model_type": "llava",
            "dtype": "float32",
            "image_token_index": IMAGE_TOKEN_ID,
            "image_seq_length": self.image_rows,
            "vision_feature_layer": -1,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "text_config": super().config(),
            "vision_config": {
                "model_type": "clip_vision_model",
                "hidden_size": self.vision_hidden,
                "intermediate_size": self.vision_intermediate,
                "num_hidden_layers": self.vision_layers,
                "num_attention_heads": self.vision_heads,
                "projection_dim": self.vision_hidden,
                "image_size": self.image_size,
                "patch_size": self.patch,
                "initializer_range": INITIALIZER_RANGE,
            },
        }

    def add_files(self, path: Path) -> None:
        pixels = {
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": self.image_size},
            "crop_size": {"height": self.image_size, "width": self.image_size},
        }
        processor = {
            "processor_class": "LlavaProcessor",
            "patch_size": self.patch,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
            "image_token": LLAVA_IMAGE,
        }
        _write_json(path / "preprocessor_config.json", pixels)
        _write_json(path / "processor_config.json", processor)
        _add_byte_tokenizer(path, self.vocab, [LLAVA_IMAGE, "<s>", "</s>"])


@dataclass(frozen=True, kw_only=True)
class Qwen2VLShape(QwenImages, LlamaShape):
    """A Qwen2-VL."""

    kind: ClassVar[str] = "qwen2-vl"
    renames: ClassVar[tuple[tuple[str, str], ...]] = (
        ("model.language_model.", "model."),
        ("model.visual.", "visual."),
    )

    kv_heads: int = 2
    heads: int = 4

    def __post_init__(self) -> None:
        assert self.heads * self.head_dim == self.hidden, self

    def image_rows(self, width: int, height: int) -> int:
        """The rows of an image of so many pixels, each a multiple of what one row covers."""
        side = self.patch * self.merge
        assert width % side == height % side == 0, (width, height)
        return (width // side) * (height // side)

    def config(self) -> dict[str, Any]:
        # The rotations are divided among time, height and width.
        time, height = self.head_dim // 8, self.head_dim // 16 * 3
        text = _without(super().config(), "head_dim")
        return self.image_config() | {
            "architectures": ["Qwen2VLForConditionalGeneration"],
            "model_type": "qwen2_vl",
            "dtype": "float32",
            "text_config": text
            | {
                "architectures": ["Qwen2ForCausalLM"],
                "model_type": "qwen2_vl_text",
                "tie_word_embeddings": False,
                "rope_parameters": DEFAULT_ROPE | {"mrope_section": [time, height, height]},
            },
            "vision_config": self.vision_config()
            | {
                "model_type": "qwen2_vl_vision",
                "embed_dim": self.vision_hidden,
                "hidden_size": self.hidden,
                "mlp_ratio": 2,
            },
        }

    def add_files(self, path: Path) -> None:
        self.add_processor(path, "Qwen2VL")


# LoRA adapters and tokenizers


def make_lora(
    directory: Path, shape: LlamaShape, *, rank: int = 8, seed: int = 1, scale: float = LORA_SCALE
) -> Path:
    """Write a LoRA adapter for the attention of `shape`, and return its path.

    It touches the key and value projections, so that the adapter changes the cached bytes.
    """
    q_size, kv_size = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    out_sizes = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}

    def fill(path: Path) -> None:
        rng = np.random.default_rng(seed)
        weights: dict[str, Tensor] = {}
        for layer in range(shape.layers):
            for module, out_size in out_sizes.items():
                prefix = f"base_model.model.model.layers.{layer}.self_attn.{module}"
                weights[f"{prefix}.lora_A.weight"] = _normal(rng, (rank, shape.hidden), 1.0)
                weights[f"{prefix}.lora_B.weight"] = _normal(rng, (out_size, rank), scale)
        save_file(weights, path / "adapter_model.safetensors", metadata={"format": "pt"})
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": None,
            "bias": "none",
            "r": rank,
            "lora_alpha": rank,
            "lora_dropout": 0.0,
            "target_modules": list(out_sizes),
        }
        _write_json(path / "adapter_config.json", config)

    values = {**asdict(shape), "rank": rank, "lora_seed": seed, "scale": scale}
    return _once(directory, "lora", values, fill)


def add_tokenizer(model: Path, vocab: int = TEXT_VOCAB) -> Path:
    """Write a tokenizer of at most `vocab` tokens into a model's directory; returns it.

    Byte-level BPE, as Llama 3 and Qwen have: any bytes are tokens, and a character outside of ASCII
    may be several, which is what streams of text have to get right. Trained on `CORPUS`.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[BEGIN, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    _write_tokenizer(model, tokenizer, bos_token=BEGIN, eos_token=END, chat_template=TEXT_TEMPLATE)
    return model


def _add_byte_tokenizer(
    path: Path, vocab: int, first: Sequence[str], last: Sequence[str] = ()
) -> None:
    """Write a tokenizer of single bytes between special tokens, padded to `vocab` ids."""
    tokens = [*first, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokens += [f"<{number}>" for number in range(len(tokens), vocab - len(last))]
    tokens += last
    ids = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([*first, *last])
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}
    _write_tokenizer(path, tokenizer, **special, chat_template=IMAGE_TEMPLATE)


def _write_tokenizer(path: Path, tokenizer: Tokenizer, **config: str) -> None:
    tokenizer.save(str(path / "tokenizer.json"))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast"}
    _write_json(path / "tokenizer_config.json", kind | config)


def _sizes_of(config: Mapping[str, Any]) -> Sizes:
    """Yield names and sizes of the tensors of transformers' model, without their memory."""
    # Imported only when a model is written: most tests find theirs on disk.
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    kind = AutoModelForImageTextToText if "vision_config" in config else AutoModelForCausalLM
    made = AutoConfig.for_model(**config)
    with torch.device("meta"):
        model = kind.from_config(made)  # type: ignore[no-untyped-call]
    for name, values in model.state_dict().items():
        if name != "lm_head.weight" or not made.tie_word_embeddings:
            yield name, tuple(values.shape)


def _normal(
    rng: np.random.Generator, size: tuple[int, ...], scale: float = INITIALIZER_RANGE
) -> Tensor:
    return rng.standard_normal(size, dtype=np.float32) * np.float32(scale)


def _without(config: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in names}


def _once(directory: Path, kind: str, values: dict[str, Any], fill: Callable[[Path], None]) -> Path:
    """Fill a directory named after `values`; appear complete or not at all."""
    digest = hashlib.blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=6)
    target = directory / f"{kind}-{digest.hexdigest()}"
    if target.exists():
        return target
    directory.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{kind}-", dir=directory))
    try:
        fill(scratch)
        scratch.chmod(0o755)
        os.rename(scratch, target)
    except OSError:
        # Another process finished the same directory first.
        if not target.exists():
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, sort_keys=True) + "\n")
