"""Layers with recurrent states as vLLM makes them: shapes, views and each rank's part.

Shapes come from vLLM's `MambaStateShapeCalculator`, views from its `MambaBase.bind_kv_cache`. A
rank's channels of a convolution come from the loaders that distribute its weights.

Legend: B blocks, C bytes of a block, W channels of the convolution, R rows of its window.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.mamba_mixer2 import mamba_v2_sharded_weight_loader
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import MambaSpec

QUERY_HEADS = 8
KERNEL = 4
BLOCK_TOKENS = 256
Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Kind:
    """A kind of state of a whole model.

    `shapes(tp_size, drafts)` are vLLM's shapes for a rank. `shards(tp_size)` are the shards of the
    convolution for a number of ranks, each as `mamba_v2_sharded_weight_loader` takes it: (channels,
    extra channels, is shared).
    """

    type: MambaAttentionBackendEnum
    shapes: Callable[[int, int], Shapes]
    dtypes: tuple[torch.dtype, ...]
    shards: Callable[[int], list[tuple[int, int, bool]]] = lambda _: []
    groups: int | None = None
    replicated: bool = False
    most_ranks: int = 8

    def spec(self, tp_size: int, drafts: int = 0, padded: int | None = None) -> MambaSpec:
        """Return vLLM's spec of one rank."""
        return MambaSpec(
            block_size=BLOCK_TOKENS,
            shapes=self.shapes(1 if self.replicated else tp_size, drafts),
            dtypes=self.dtypes,
            page_size_padded=padded,
            mamba_type=self.type,
            mamba_cache_mode="align",
            tp_replicated=self.replicated,
            num_speculative_blocks=drafts,
        )


_calculate: Any = MambaStateShapeCalculator
BF16, F32 = torch.bfloat16, torch.float32

KINDS = {
    "short convolution": Kind(
        MambaAttentionBackendEnum.SHORT_CONV,
        lambda tp, drafts: _calculate.short_conv_state_shape(tp, 64, 3, drafts),
        (F32,),
        lambda _: [(64, 0, False)],
    ),
    "short convolution on every rank": Kind(
        MambaAttentionBackendEnum.SHORT_CONV,
        lambda tp, drafts: _calculate.short_conv_state_shape(1, 24, 3, drafts),
        (BF16,),
        lambda _: [(24, 0, False)],
        replicated=True,
    ),
    "Mamba1": Kind(
        MambaAttentionBackendEnum.MAMBA1,
        lambda tp, drafts: _calculate.mamba1_state_shape(tp, 48, 16, KERNEL),
        (BF16, F32),
        lambda _: [(48, 0, False)],
    ),
    "Mamba2": Kind(
        MambaAttentionBackendEnum.MAMBA2,
        lambda tp, drafts: _calculate.mamba2_state_shape(tp, 128, 8, 16, 8, 4, KERNEL, drafts),
        (BF16, F32),
        lambda _: [(128, 0, False), (32, 0, False), (32, 0, False)],
        groups=8,
    ),
    "Mamba2 with few groups": Kind(
        MambaAttentionBackendEnum.MAMBA2,
        lambda tp, drafts: _calculate.mamba2_state_shape(tp, 128, 2, 16, 8, 4, KERNEL, drafts),
        (F32, F32),
        lambda _: [(128, 0, False), (8, 0, False), (8, 0, False)],
        groups=2,
        most_ranks=2,
    ),
    "Mamba2 with one group": Kind(
        MambaAttentionBackendEnum.MAMBA2,
        lambda tp, drafts: _calculate.mamba2_state_shape(tp, 128, 1, 16, 8, 4, KERNEL, drafts),
        (BF16, BF16),
        lambda tp: [(128, 0, False), *[(4 * tp, 4 * (tp - 1), True)] * 2],
        groups=1,
    ),
    "GDN": Kind(
        MambaAttentionBackendEnum.GDN_ATTN,
        lambda tp, drafts: _calculate.gated_delta_net_state_shape(tp, 4, 8, 8, 6, KERNEL, drafts),
        (BF16, F32),
        lambda _: [(32, 0, False), (32, 0, False), (48, 0, False)],
        most_ranks=4,
    ),
    "KDA": Kind(
        MambaAttentionBackendEnum.GDN_ATTN,
        lambda tp, drafts: _calculate.kda_state_shape(tp, 8, 8, num_spec=drafts),
        (BF16, F32),
        lambda _: [(64, 0, False)] * 3,
    ),
    "linear attention": Kind(
        MambaAttentionBackendEnum.LINEAR,
        lambda tp, drafts: _calculate.linear_attention_state_shape(8, tp, 6),
        (F32,),
    ),
}


def engine_of(kind: Kind, tp_size: int, drafts: int = 0) -> Any:
    """Return the part of vLLM's configuration that the pool reads for an engine of the model."""
    return SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=tp_size),
        num_speculative_tokens=drafts,
        model_config=SimpleNamespace(
            model_arch_config=SimpleNamespace(total_num_attention_heads=QUERY_HEADS),
            hf_text_config=SimpleNamespace(mamba_n_groups=kind.groups),
        ),
    )


class Layer(MambaBase):
    """A layer whose states vLLM binds; it computes nothing."""

    def __init__(self, spec: MambaSpec) -> None:
        self._spec = spec

    def get_state_shape(self) -> Iterable[tuple[int, ...]]:
        return self._spec.shapes

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        return self._spec.dtypes

    @property
    def mamba_type(self) -> MambaAttentionBackendEnum:
        return self._spec.mamba_type


@dataclass(frozen=True)
class WholeState:
    """A whole model's state in one layer. The window has rows, without the rows for drafts."""

    window_wr: torch.Tensor | None
    recurrent: torch.Tensor | None

    @staticmethod
    def random(kind: Kind, seed: int) -> "WholeState":
        generator = torch.Generator().manual_seed(seed)

        def some(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        shapes = kind.shapes(1, 0)
        has_window = bool(kind.shards(1))
        window = None
        if has_window:
            channels = sum(channels for channels, *_ in kind.shards(1))
            rows = torch.Size(shapes[0]).numel() // channels
            window = some((channels, rows), kind.dtypes[0])
        rest = shapes[has_window:]
        return WholeState(window, some(rest[0], kind.dtypes[-1]) if rest else None)

    def put(
        self, kind: Kind, layer: Layer, block: int, place: tuple[int, int], dim_first: bool
    ) -> None:
        """Put a rank's part into a block of its layer; `place` is (rank, number of ranks)."""
        tp_rank, tp_size = (0, 1) if kind.replicated else place
        states = list(layer.kv_cache)
        if self.window_wr is not None:
            state = states.pop(0)[block]
            state_wr = state if dim_first else state.T
            rows = self.window_wr.shape[1]
            mine_wr = torch.empty(state_wr.shape[0], rows, dtype=state.dtype)
            loader: Any = mamba_v2_sharded_weight_loader(kind.shards(tp_size), tp_size, tp_rank)
            loader(torch.nn.Parameter(mine_wr, requires_grad=False), self.window_wr)
            state_wr[:, :rows] = mine_wr
        if self.recurrent is not None:
            [state] = states
            state[block] = self.recurrent.chunk(tp_size)[tp_rank]
