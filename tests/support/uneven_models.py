"""A tiny model whose layers have different numbers of KV heads; see `models.py`."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.models import (
    HybridShape,
    llama_config,
    llama_sizes,
    llama_tensor,
    make_model,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnevenShape(HybridShape):
    """A MiMo V2, whose windows have `window_kv_heads`; the configuration gives the others first."""

    kv_heads: int = 1
    window_kv_heads: int = 2

    def is_full(self, layer: int) -> bool:
        return (layer + 1) % self.full_every == 0


def make_uneven(directory: Path, shape: UnevenShape) -> Path:
    """Write the model of `shape` below `directory`, unless it is there, and return its path."""
    return make_model(directory, "uneven", shape, _sizes(shape), _config(shape), llama_tensor)


def _sizes(shape: UnevenShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    windowed = tuple(
        f"model.layers.{layer}.self_attn.{kind}_proj.weight"
        for layer in range(shape.layers)
        for kind in ("k", "v")
        if not shape.is_full(layer)
    )
    for name, size in llama_sizes(shape):
        rows = shape.window_kv_heads * shape.head_dim
        yield name, (rows, shape.hidden) if name in windowed else size


def _config(shape: UnevenShape) -> dict[str, Any]:
    llama = llama_config(shape)
    del llama["mlp_bias"]
    windowed = [not shape.is_full(layer) for layer in range(shape.layers)]
    return llama | {
        "architectures": ["MiMoV2FlashForCausalLM"],
        "model_type": "mimo_v2_flash",
        "swa_num_attention_heads": shape.heads,
        "swa_num_key_value_heads": shape.window_kv_heads,
        "v_head_dim": shape.head_dim,
        "swa_head_dim": shape.head_dim,
        "swa_v_head_dim": shape.head_dim,
        "swa_rope_theta": 10000.0,
        "partial_rotary_factor": 1.0,
        "attention_value_scale": None,
        "sliding_window": shape.window,
        "sliding_window_size": shape.window,
        "hybrid_layer_pattern": [int(each) for each in windowed],
        "layer_types": ["sliding_attention" if each else "full_attention" for each in windowed],
        "mlp_layer_types": ["dense"] * shape.layers,
        "layernorm_epsilon": llama["rms_norm_eps"],
    }
