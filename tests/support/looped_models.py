"""A tiny model that runs through its layers twice; see `models.py`."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.models import (
    LlamaShape,
    llama_config,
    llama_sizes,
    llama_tensor,
    make_model,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopedShape(LlamaShape):
    """An IQuest LoopCoder, whose layers see all tokens the first time, then a window as well."""

    hidden: int = 256
    window: int = 64


def make_looped(directory: Path, shape: LoopedShape) -> Path:
    """Write the model of `shape` below `directory`, unless it is there, and return its path."""
    return make_model(directory, "looped", shape, _sizes(shape), _config(shape), llama_tensor)


def _sizes(shape: LoopedShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield from llama_sizes(shape)
    for layer in range(shape.layers):
        yield f"model.gate_projections.{layer}.weight", (shape.heads, shape.head_dim)
        yield f"model.gate_projections.{layer}.bias", (shape.heads,)


def _config(shape: LoopedShape) -> dict[str, Any]:
    # The model's own type comes with code of its own; Llama's has all that vLLM reads.
    return llama_config(shape) | {
        "architectures": ["IQuestLoopCoderForCausalLM"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "loop_num": 2,
        "loop_window_size": shape.window,
    }
