"""Tiny models with drafters that predict exactly as the models do: acceptance is known.

All embeddings have the length one. The norm before the first layer then changes nothing, which
matters for EAGLE: its first layer has no such norm. A drafter ignores the model's hidden state and
is a copy of the model, one token ahead. EAGLE copies all layers. MTP and EAGLE3 copy the single
layer. EAGLE3 does not add the embedding after its attention; attention is scaled up here
(`AttentiveShape.strength`), so the embedding hardly matters.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from safetensors.numpy import save_file

from tests.support.models import LlamaShape, Tensor, _once, _write_json


@dataclass(frozen=True, kw_only=True)
class EvenShape(LlamaShape):
    """A Llama whose embeddings all have the length one."""

    kind: ClassVar[str] = "even"

    def tensor(self, rng: np.random.Generator, size: tuple[int, ...], name: str) -> Tensor:
        values = super().tensor(rng, size, name)
        if name == "model.embed_tokens.weight":
            values /= np.sqrt(np.mean(values**2, axis=1, keepdims=True))
        return values

    def weights(self) -> dict[str, Tensor]:
        """Return all tensors by name."""
        rng = np.random.default_rng(self.seed)
        return {name: self.tensor(rng, size, name) for name, size in self.sizes()}


def make_eagle(directory: Path, shape: EvenShape, version: int = 0) -> Path:
    """Write an EAGLE drafter for the model of `shape`; another `version` computes other KV."""

    def fill(path: Path) -> None:
        weights = {
            name.removeprefix("model."): values
            for name, values in shape.weights().items()
            if name.startswith(("model.layers.", "model.embed_tokens."))
        }
        del weights["layers.0.input_layernorm.weight"]
        one = np.eye(shape.hidden, dtype=np.float32)
        weights["fc.weight"] = np.concatenate([one * (1 + version), 0 * one], axis=1)
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
        _write_json(path / "config.json", shape.config())

    return _once(directory, "eagle", {**asdict(shape), "version": version}, fill)


@dataclass(frozen=True, kw_only=True)
class AttentiveShape(EvenShape):
    """A model of one layer whose output depends almost only on its attention."""

    kind: ClassVar[str] = "attentive"

    layers: int = 1
    strength: float = 30.0

    def tensor(self, rng: np.random.Generator, size: tuple[int, ...], name: str) -> Tensor:
        values = super().tensor(rng, size, name)
        return values * np.float32(self.strength) if "o_proj" in name else values


def make_eagle3(directory: Path, shape: AttentiveShape) -> Path:
    """Write an EAGLE3 drafter for the model of `shape`."""

    def fill(path: Path) -> None:
        weights = {
            name.removeprefix("model."): values
            for name, values in shape.weights().items()
            if name != "model.embed_tokens.weight"  # vLLM shares the model's embedding
        }
        for name in ("q_proj", "k_proj", "v_proj"):
            of_embeddings = weights[f"layers.0.self_attn.{name}.weight"]
            both = np.concatenate([of_embeddings, 0 * of_embeddings], axis=1)
            weights[f"layers.0.self_attn.{name}.weight"] = both
        weights["layers.0.hidden_norm.weight"] = np.ones(shape.hidden, np.float32)
        weights["fc.weight"] = np.zeros((shape.hidden, shape.hidden), np.float32)
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
        layers = {"eagle_aux_hidden_state_layer_ids": [0], "num_aux_hidden_states": 1}
        _write_json(path / "config.json", shape.config() | layers)

    return _once(directory, "eagle3", asdict(shape), fill)


@dataclass(frozen=True, kw_only=True)
class MimoShape(EvenShape):
    """A MiMo with modules for multi-token prediction (MTP), all alike.

    Layers behind the first one change nothing. vLLM's loader needs at least as many layers as
    modules: it numbers these on from the layers, one after another.
    """

    kind: ClassVar[str] = "mimo"

    layers: int = 1
    heads: int = 4  # `heads` x `head_dim` equals `hidden`
    modules: int = 1

    def weights(self) -> dict[str, Tensor]:
        own = super().weights()
        for name in own:
            is_first = name.startswith("model.layers.0.")
            if not is_first and name.endswith(("o_proj.weight", "down_proj.weight")):
                own[name] = 0 * own[name]
        modules = [self._module(f"model.mtp_layers.{i}", own) for i in range(self.modules)]
        return {name: values for each in (own, *modules) for name, values in each.items()}

    def _module(self, module: str, own: dict[str, Tensor]) -> dict[str, Tensor]:
        one = np.eye(self.hidden, dtype=np.float32)
        ones = np.ones(self.hidden, np.float32)
        norms = dict.fromkeys(("token_layernorm", "hidden_layernorm", "final_layernorm"), ones)
        weights = {f"{module}.{name}.weight": values.copy() for name, values in norms.items()}
        weights[f"{module}.input_proj.weight"] = np.concatenate([0 * one, one], axis=1)
        layer = "model.layers.0."
        return weights | {
            f"{module}.{name.removeprefix(layer)}": values.copy()
            for name, values in own.items()
            if name.startswith(layer)
        }

    def config(self) -> dict[str, Any]:
        return super().config() | {
            "architectures": ["MiMoForCausalLM"],
            "model_type": "qwen2",
            "num_nextn_predict_layers": self.modules,
        }


def make_mimo(directory: Path, shape: MimoShape) -> Path:
    """Write the model of `shape` with its MTP modules."""

    def fill(path: Path) -> None:
        save_file(shape.weights(), path / "model.safetensors", metadata={"format": "pt"})
        _write_json(path / "config.json", shape.config())

    return _once(directory, shape.kind, asdict(shape), fill)


def speculation(method: str, model: Path, tokens: int, **more: Any) -> Mapping[str, Any]:
    """Return vLLM's `speculative_config`. MTP names none: its modules are the target's."""
    named = {} if method == "mtp" else {"model": str(model)}
    return {"method": method, "num_speculative_tokens": tokens, **named, **more}
