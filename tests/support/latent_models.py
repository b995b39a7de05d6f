"""Tiny DeepSeek models on disk, whose KV is MLA's latent: one row for all heads of a token.

As in `models.py`: weights are spread wide, so that a wrong cached token shows in log-probabilities.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.models import LlamaShape, llama_config, llama_tensor, make_model


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekShape:
    """All that decides the bytes of a model. A row of its KV is `latent` and `rope_dim` numbers.

    vLLM's CPU kernels take no other row than the one of these defaults.
    """

    heads: int = 4
    layers: int = 3
    latent: int = 512
    rope_dim: int = 64
    nope_dim: int = 32
    value_dim: int = 32
    hidden: int = 128
    intermediate: int = 256
    vocab: int = 1024
    max_position: int = 4096
    seed: int = 0


def make_deepseek(directory: Path, shape: DeepseekShape) -> Path:
    """Write the model of `shape` below `directory`, unless it is there, and return its path."""

    return make_model(directory, "deepseek", shape, _sizes(shape), _config(shape), llama_tensor)


def _sizes(shape: DeepseekShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "model.embed_tokens.weight", (shape.vocab, shape.hidden)
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}"
        attention = f"{prefix}.self_attn"
        queries = shape.heads * (shape.nope_dim + shape.rope_dim)
        keys_and_values = shape.heads * (shape.nope_dim + shape.value_dim)
        yield f"{prefix}.input_layernorm.weight", (shape.hidden,)
        yield f"{attention}.q_proj.weight", (queries, shape.hidden)
        row = shape.latent + shape.rope_dim
        yield f"{attention}.kv_a_proj_with_mqa.weight", (row, shape.hidden)
        yield f"{attention}.kv_a_layernorm.weight", (shape.latent,)
        yield f"{attention}.kv_b_proj.weight", (keys_and_values, shape.latent)
        yield f"{attention}.o_proj.weight", (shape.hidden, shape.heads * shape.value_dim)
        yield f"{prefix}.post_attention_layernorm.weight", (shape.hidden,)
        yield f"{prefix}.mlp.gate_proj.weight", (shape.intermediate, shape.hidden)
        yield f"{prefix}.mlp.up_proj.weight", (shape.intermediate, shape.hidden)
        yield f"{prefix}.mlp.down_proj.weight", (shape.hidden, shape.intermediate)
    yield "model.norm.weight", (shape.hidden,)
    yield "lm_head.weight", (shape.vocab, shape.hidden)


def _config(shape: DeepseekShape) -> dict[str, Any]:
    llama = llama_config(
        LlamaShape(
            kv_heads=shape.heads,
            heads=shape.heads,
            layers=shape.layers,
            hidden=shape.hidden,
            intermediate=shape.intermediate,
            vocab=shape.vocab,
            max_position=shape.max_position,
        )
    )
    for name in ("head_dim", "mlp_bias"):
        del llama[name]
    return llama | {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "kv_lora_rank": shape.latent,
        "q_lora_rank": None,
        "qk_nope_head_dim": shape.nope_dim,
        "qk_rope_head_dim": shape.rope_dim,
        "v_head_dim": shape.value_dim,
        # No layer has experts; vLLM reads what they would be all the same.
        "first_k_dense_replace": shape.layers,
        "moe_layer_freq": 1,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "topk_method": "greedy",
        "norm_topk_prob": False,
    }
