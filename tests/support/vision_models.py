"""Tiny models of images and text on disk, for tests and examples.

Each comes with the processor of its images and a byte-level tokenizer, so that nothing is fetched.
The text part is the Llama of `models.py`, with weights as wide: another image moves the
log-probabilities of what follows by far more than engines differ among themselves.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers.pre_tokenizers import ByteLevel

from tests.support.models import (
    INITIALIZER_RANGE,
    LlamaShape,
    llama_config,
    llama_sizes,
    llama_tensor,
    once,
    write_json,
)

Sizes = Iterator[tuple[str, tuple[int, ...]]]

NORMS = tuple(f"{norm}.weight" for norm in ("layer_norm1", "layer_norm2", "norm1", "norm2", "ln_q"))

# No prompt of random tokens has it: those begin at 3, as everywhere in the tests.
IMAGE_TOKEN_ID = 0

LLAVA_IMAGE = "<image>"
QWEN2_VL_IMAGE = "<|image_pad|>"
QWEN2_VL_LAST_TOKENS = ("<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
QWEN2_VL_FRAMES = 2

# Each message as it is; vLLM puts the image tokens before the text they came with.
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LlavaShape(LlamaShape):
    """A LLaVA with the vision tower of CLIP; `image_size` and `patch` are in pixels."""

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


def make_llava(directory: Path, shape: LlavaShape) -> Path:
    """Write the model of `shape` below `directory`, unless it is there, and return its path."""

    def fill(path: Path) -> None:
        rng = np.random.default_rng(shape.seed)
        save_file(
            {name: _tensor(rng, size, name) for name, size in _llava_sizes(shape)},
            path / "model.safetensors",
            metadata={"format": "pt"},
        )
        write_json(path / "config.json", _llava_config(shape))
        write_json(path / "preprocessor_config.json", _clip_processor(shape))
        write_json(path / "processor_config.json", _llava_processor(shape))
        _write_tokenizer(path, shape.vocab, [LLAVA_IMAGE, "<s>", "</s>"])

    return once(directory, "llava", asdict(shape), fill)


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen2VLShape(LlamaShape):
    """A Qwen2-VL: images of any size, in rows of `merge` x `merge` patches of `patch` pixels."""

    kv_heads: int = 2
    heads: int = 4
    # Room for the tokens of videos beyond the ids that prompts of random tokens have.
    vocab: int = 1088
    patch: int = 14
    merge: int = 2
    max_image_rows: int = 256
    vision_layers: int = 2
    vision_heads: int = 2
    vision_hidden: int = 64

    def __post_init__(self) -> None:
        assert self.heads * self.head_dim == self.hidden, self

    def image_rows(self, width: int, height: int) -> int:
        """The rows of an image of so many pixels, each a multiple of what one row covers."""
        side = self.patch * self.merge
        assert width % side == height % side == 0, (width, height)
        return (width // side) * (height // side)


def make_qwen2_vl(directory: Path, shape: Qwen2VLShape) -> Path:
    """Write the model of `shape` below `directory`, unless it is there, and return its path."""

    def fill(path: Path) -> None:
        rng = np.random.default_rng(shape.seed)
        save_file(
            {name: _tensor(rng, size, name) for name, size in _qwen2_vl_sizes(shape)},
            path / "model.safetensors",
            metadata={"format": "pt"},
        )
        write_json(path / "config.json", _qwen2_vl_config(shape))
        pixels = {
            "patch_size": shape.patch,
            "temporal_patch_size": QWEN2_VL_FRAMES,
            "merge_size": shape.merge,
            "size": {
                "shortest_edge": (shape.patch * shape.merge) ** 2,
                "longest_edge": shape.max_image_rows * (shape.patch * shape.merge) ** 2,
            },
        }
        image = {"image_processor_type": "Qwen2VLImageProcessor", **pixels}
        video = {"video_processor_type": "Qwen2VLVideoProcessor", **pixels}
        write_json(path / "preprocessor_config.json", image)
        write_json(path / "video_preprocessor_config.json", video)
        write_json(path / "processor_config.json", {"processor_class": "Qwen2VLProcessor"})
        _write_tokenizer(path, shape.vocab, [QWEN2_VL_IMAGE, "<s>", "</s>"], QWEN2_VL_LAST_TOKENS)

    return once(directory, "qwen2-vl", asdict(shape), fill)


def _write_tokenizer(
    path: Path, vocab: int, first: Sequence[str], last: Sequence[str] = ()
) -> None:
    """Write a tokenizer of single bytes between special tokens, padded to `vocab` ids."""
    tokens = [*first, *sorted(ByteLevel.alphabet())]
    tokens += [f"<{number}>" for number in range(len(tokens), vocab - len(last))]
    tokens += last
    byte_level = {"add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [
            {
                **{"id": number, "content": token, "special": True, "normalized": False},
                **{"single_word": False, "lstrip": False, "rstrip": False},
            }
            for number, token in enumerate(tokens)
            if token in first or token in last
        ],
        "pre_tokenizer": {"type": "ByteLevel", **byte_level},
        "decoder": {"type": "ByteLevel", **byte_level},
        "model": {
            "type": "BPE",
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": [],
        },
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "</s>",
        "chat_template": CHAT_TEMPLATE,
    }
    write_json(path / "tokenizer.json", tokenizer)
    write_json(path / "tokenizer_config.json", config)


def _llava_sizes(shape: LlavaShape) -> Sizes:
    for name, size in llama_sizes(shape):
        yield f"language_model.{name}", size
    # As vLLM calls them: it has this level of names, newer releases of transformers have not.
    tower, hidden = "vision_tower.vision_model", shape.vision_hidden
    yield f"{tower}.embeddings.class_embedding", (hidden,)
    yield f"{tower}.embeddings.patch_embedding.weight", (hidden, 3, shape.patch, shape.patch)
    yield f"{tower}.embeddings.position_embedding.weight", (shape.image_rows + 1, hidden)
    yield from _with_bias(f"{tower}.pre_layrnorm", (hidden,))
    for layer in range(shape.vision_layers):
        prefix = f"{tower}.encoder.layers.{layer}"
        yield from _with_bias(f"{prefix}.layer_norm1", (hidden,))
        for part in ("q", "k", "v", "out"):
            yield from _with_bias(f"{prefix}.self_attn.{part}_proj", (hidden, hidden))
        yield from _with_bias(f"{prefix}.layer_norm2", (hidden,))
        yield from _with_bias(f"{prefix}.mlp.fc1", (shape.vision_intermediate, hidden))
        yield from _with_bias(f"{prefix}.mlp.fc2", (hidden, shape.vision_intermediate))
    yield from _with_bias("multi_modal_projector.linear_1", (shape.hidden, hidden))
    yield from _with_bias("multi_modal_projector.linear_2", (shape.hidden, shape.hidden))


def _with_bias(module: str, size: tuple[int, ...]) -> Sizes:
    yield f"{module}.weight", size
    yield f"{module}.bias", size[:1]


def _tensor(rng: np.random.Generator, size: tuple[int, ...], name: str) -> NDArray[np.float32]:
    if name.endswith(NORMS):
        return np.ones(size, dtype=np.float32)
    return llama_tensor(rng, size, name)


def _llava_config(shape: LlavaShape) -> dict[str, Any]:
    return {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "dtype": "float32",
        "image_token_index": IMAGE_TOKEN_ID,
        "image_seq_length": shape.image_rows,
        "projector_hidden_act": "gelu",
        "vision_feature_select_strategy": "default",
        "vision_feature_layer": -1,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "text_config": llama_config(shape),
        "vision_config": {
            "model_type": "clip_vision_model",
            "hidden_size": shape.vision_hidden,
            "intermediate_size": shape.vision_intermediate,
            "num_hidden_layers": shape.vision_layers,
            "num_attention_heads": shape.vision_heads,
            "projection_dim": shape.vision_hidden,
            "image_size": shape.image_size,
            "patch_size": shape.patch,
            "initializer_range": INITIALIZER_RANGE,
        },
    }


def _clip_processor(shape: LlavaShape) -> dict[str, Any]:
    return {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": shape.image_size},
        "crop_size": {"height": shape.image_size, "width": shape.image_size},
    }


def _llava_processor(shape: LlavaShape) -> dict[str, Any]:
    return {
        "processor_class": "LlavaProcessor",
        "patch_size": shape.patch,
        "vision_feature_select_strategy": "default",
        "num_additional_image_tokens": 1,
        "image_token": LLAVA_IMAGE,
    }


def _qwen2_vl_sizes(shape: Qwen2VLShape) -> Sizes:
    for name, size in llama_sizes(shape):
        yield name, size
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            yield name.replace("weight", "bias"), size[:1]
    hidden, merged = shape.vision_hidden, shape.vision_hidden * shape.merge**2
    patches = (hidden, 3, QWEN2_VL_FRAMES, shape.patch, shape.patch)
    yield "visual.patch_embed.proj.weight", patches
    for layer in range(shape.vision_layers):
        prefix = f"visual.blocks.{layer}"
        yield from _with_bias(f"{prefix}.norm1", (hidden,))
        yield from _with_bias(f"{prefix}.attn.qkv", (3 * hidden, hidden))
        yield from _with_bias(f"{prefix}.attn.proj", (hidden, hidden))
        yield from _with_bias(f"{prefix}.norm2", (hidden,))
        yield from _with_bias(f"{prefix}.mlp.fc1", (2 * hidden, hidden))
        yield from _with_bias(f"{prefix}.mlp.fc2", (hidden, 2 * hidden))
    yield from _with_bias("visual.merger.ln_q", (hidden,))
    yield from _with_bias("visual.merger.mlp.0", (merged, merged))
    yield from _with_bias("visual.merger.mlp.2", (shape.hidden, merged))


def _qwen2_vl_config(shape: Qwen2VLShape) -> dict[str, Any]:
    # The rotations are shared out among time, height and width.
    time, height = shape.head_dim // 8, shape.head_dim // 16 * 3
    text = llama_config(shape)
    for name in ("head_dim", "rope_theta", "attention_bias", "mlp_bias"):
        del text[name]
    video, start, end = range(shape.vocab - len(QWEN2_VL_LAST_TOKENS), shape.vocab)
    return {
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "model_type": "qwen2_vl",
        "dtype": "float32",
        "image_token_id": IMAGE_TOKEN_ID,
        "video_token_id": video,
        "vision_start_token_id": start,
        "vision_end_token_id": end,
        "tie_word_embeddings": False,
        "text_config": text
        | {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2_vl_text",
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [time, height, height],
            },
        },
        "vision_config": {
            "model_type": "qwen2_vl_vision",
            "depth": shape.vision_layers,
            "embed_dim": shape.vision_hidden,
            "hidden_size": shape.hidden,
            "num_heads": shape.vision_heads,
            "mlp_ratio": 2,
            "in_channels": 3,
            "patch_size": shape.patch,
            "spatial_merge_size": shape.merge,
            "temporal_patch_size": QWEN2_VL_FRAMES,
            "initializer_range": INITIALIZER_RANGE,
        },
    }
