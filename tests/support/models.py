"""Tiny Llama and Gemma models and LoRA adapters on disk, for tests and examples.

Weights are float32 and spread wide (`INITIALIZER_RANGE`): engines of different tensor-parallel
sizes then agree to about 1e-5 in log-probability, while one wrong cached token moves it by 1e-2,
so comparing log-probabilities finds wrong cache bytes. There is no tokenizer; prompts are token
ids. The same values always give the same bytes, and a directory that is complete is not rewritten.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

Weights = dict[str, NDArray[np.float32]]

INITIALIZER_RANGE = 0.12
LORA_SCALE = 0.05
GEMMA_ATTENTION_WEIGHT = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaShape:
    """All that decides the bytes of a model."""

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


def make_llama(directory: Path, shape: LlamaShape) -> Path:
    """Write the model of `shape` below `directory`, unless it is there, and return its path."""

    def fill(path: Path) -> None:
        rng = np.random.default_rng(shape.seed)
        save_file(
            {name: llama_tensor(rng, size, name) for name, size in llama_sizes(shape)},
            path / "model.safetensors",
            metadata={"format": "pt"},
        )
        write_json(path / "config.json", llama_config(shape))

    return once(directory, "llama", asdict(shape), fill)


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmaShape(LlamaShape):
    """A Gemma 4 of full attention, whose last `sharing_layers` attend to the KV of another."""

    sharing_layers: int = 2


def make_gemma(directory: Path, shape: GemmaShape) -> Path:
    """Write the model of `shape` below `directory`, unless it is there, and return its path."""

    def fill(path: Path) -> None:
        rng = np.random.default_rng(shape.seed)
        weights = {name: llama_tensor(rng, size, name) for name, size in _gemma_sizes(shape)}
        for name, tensor in weights.items():
            # Otherwise the token before decides alone, and wrong KV would go unnoticed.
            if name.endswith("post_attention_layernorm.weight"):
                tensor *= GEMMA_ATTENTION_WEIGHT
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
        write_json(path / "config.json", _gemma_config(shape))

    return once(directory, "gemma", asdict(shape), fill)


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridShape(LlamaShape):
    """A model of which every `full_every`th layer sees all tokens, and the others a window."""

    layers: int = 6
    window: int = 96
    full_every: int = 3


def make_hybrid(directory: Path, shape: HybridShape) -> Path:
    """Write the model of `shape` below `directory`, unless it is there, and return its path."""

    sizes, config = _hybrid_sizes(shape), _hybrid_config(shape)
    return make_model(directory, "hybrid", shape, sizes, config, _hybrid_tensor)


class Seeded(Protocol):
    """A dataclass of a model's sizes."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def seed(self) -> int: ...


def make_model(
    directory: Path,
    kind: str,
    shape: Seeded,
    sizes: Iterable[tuple[str, tuple[int, ...]]],
    config: Mapping[str, Any],
    tensor: Callable[[np.random.Generator, tuple[int, ...], str], Any],
) -> Path:
    """Write a model of these tensors, each made by `tensor`, unless it is there; its path."""

    def fill(path: Path) -> None:
        rng = np.random.default_rng(shape.seed)
        weights = {name: tensor(rng, size, name) for name, size in sizes}
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
        write_json(path / "config.json", config)

    return once(directory, kind, asdict(shape), fill)


def make_lora(directory: Path, shape: LlamaShape, *, rank: int = 8, seed: int = 1) -> Path:
    """Write a LoRA adapter for the attention of `shape`, and return its path.

    It touches the key and value projections, so that the adapter changes the cached bytes.
    """
    q_size, kv_size = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    out_sizes = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}

    def fill(path: Path) -> None:
        rng = np.random.default_rng(seed)
        weights: Weights = {}
        for layer in range(shape.layers):
            for module, out_size in out_sizes.items():
                prefix = f"base_model.model.model.layers.{layer}.self_attn.{module}"
                weights[f"{prefix}.lora_A.weight"] = _normal(rng, (rank, shape.hidden), 1.0)
                weights[f"{prefix}.lora_B.weight"] = _normal(rng, (out_size, rank), LORA_SCALE)
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
        write_json(path / "adapter_config.json", config)

    return once(directory, "lora", {**asdict(shape), "rank": rank, "lora_seed": seed}, fill)


def llama_sizes(shape: LlamaShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    q_size, kv_size = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    yield "model.embed_tokens.weight", (shape.vocab, shape.hidden)
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (shape.hidden,)
        yield f"{prefix}.self_attn.q_proj.weight", (q_size, shape.hidden)
        yield f"{prefix}.self_attn.k_proj.weight", (kv_size, shape.hidden)
        yield f"{prefix}.self_attn.v_proj.weight", (kv_size, shape.hidden)
        yield f"{prefix}.self_attn.o_proj.weight", (shape.hidden, q_size)
        yield f"{prefix}.post_attention_layernorm.weight", (shape.hidden,)
        yield f"{prefix}.mlp.gate_proj.weight", (shape.intermediate, shape.hidden)
        yield f"{prefix}.mlp.up_proj.weight", (shape.intermediate, shape.hidden)
        yield f"{prefix}.mlp.down_proj.weight", (shape.hidden, shape.intermediate)
    yield "model.norm.weight", (shape.hidden,)
    yield "lm_head.weight", (shape.vocab, shape.hidden)


def _gemma_sizes(shape: GemmaShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    q_size, kv_size = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    yield "model.embed_tokens.weight", (shape.vocab, shape.hidden)
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.self_attn.q_proj.weight", (q_size, shape.hidden)
        yield f"{prefix}.self_attn.q_norm.weight", (shape.head_dim,)
        if layer < shape.layers - shape.sharing_layers:
            yield f"{prefix}.self_attn.k_proj.weight", (kv_size, shape.hidden)
            yield f"{prefix}.self_attn.v_proj.weight", (kv_size, shape.hidden)
            yield f"{prefix}.self_attn.k_norm.weight", (shape.head_dim,)
        yield f"{prefix}.self_attn.o_proj.weight", (shape.hidden, q_size)
        yield f"{prefix}.mlp.gate_proj.weight", (shape.intermediate, shape.hidden)
        yield f"{prefix}.mlp.up_proj.weight", (shape.intermediate, shape.hidden)
        yield f"{prefix}.mlp.down_proj.weight", (shape.hidden, shape.intermediate)
        for place in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            yield f"{prefix}.{place}_layernorm.weight", (shape.hidden,)
    yield "model.norm.weight", (shape.hidden,)


def _gemma_config(shape: GemmaShape) -> dict[str, Any]:
    llama = llama_config(shape)
    for name in ("hidden_act", "mlp_bias", "rope_theta"):
        del llama[name]
    return llama | {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "global_head_dim": shape.head_dim,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": shape.vocab,
        "num_kv_shared_layers": shape.sharing_layers,
        "layer_types": ["full_attention"] * shape.layers,
        "tie_word_embeddings": True,
    }


def llama_config(shape: LlamaShape) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.max_position,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "initializer_range": INITIALIZER_RANGE,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def _hybrid_sizes(shape: HybridShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name, size in llama_sizes(shape):
        if name != "lm_head.weight":  # tied to the embeddings
            yield name, size
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.self_attn.q_norm.weight", (shape.head_dim,)
        yield f"{prefix}.self_attn.k_norm.weight", (shape.head_dim,)
        yield f"{prefix}.pre_feedforward_layernorm.weight", (shape.hidden,)
        yield f"{prefix}.post_feedforward_layernorm.weight", (shape.hidden,)


def _hybrid_config(shape: HybridShape) -> dict[str, Any]:
    is_full = [(layer + 1) % shape.full_every == 0 for layer in range(shape.layers)]
    return llama_config(shape) | {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": shape.head_dim,
        "rope_local_base_freq": 10000.0,
        "sliding_window": shape.window,
        "layer_types": ["full_attention" if full else "sliding_attention" for full in is_full],
        "tie_word_embeddings": True,
    }


def _hybrid_tensor(
    rng: np.random.Generator, size: tuple[int, ...], name: str
) -> NDArray[np.float32]:
    if name.endswith("post_attention_layernorm.weight"):
        return np.full(size, GEMMA_ATTENTION_WEIGHT, dtype=np.float32)
    if name.endswith("norm.weight"):
        return np.zeros(size, dtype=np.float32)  # this Gemma's norms add one
    return _normal(rng, size, INITIALIZER_RANGE)


def llama_tensor(rng: np.random.Generator, size: tuple[int, ...], name: str) -> NDArray[np.float32]:
    if name.endswith("norm.weight"):
        return np.ones(size, dtype=np.float32)
    return _normal(rng, size, INITIALIZER_RANGE)


def _normal(rng: np.random.Generator, size: tuple[int, ...], scale: float) -> NDArray[np.float32]:
    return rng.standard_normal(size, dtype=np.float32) * np.float32(scale)


def once(directory: Path, kind: str, values: dict[str, Any], fill: Callable[[Path], None]) -> Path:
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


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, sort_keys=True) + "\n")
