"""Operators of `torch_npu` that eager models of vLLM-Ascend call, in torch's own operations.

Legend: T tokens, N query heads, K KV heads, D head size.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = [
    "_npu_matmul_add_fp32",
    "_npu_reshape_and_cache",
    "_npu_rotary_embedding",
    "npu_add_rms_norm",
    "npu_fused_infer_attention_score",
    "npu_fusion_attention",
    "npu_rms_norm",
    "npu_swiglu",
    "slot_mapping",
]

CAUSAL, BAND = 3, 4  # `sparse_mode`


def npu_rms_norm(
    x: torch.Tensor, weight: torch.Tensor, epsilon: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return (wide * scale).to(x.dtype) * weight, scale


def npu_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    total = x + residual
    normed, scale = npu_rms_norm(total, weight, epsilon)
    return normed, scale, total


def npu_swiglu(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    gate, up = x.chunk(2, dim)
    return torch.nn.functional.silu(gate) * up


def _npu_matmul_add_fp32(x: torch.Tensor, weight: torch.Tensor, total: torch.Tensor) -> None:
    total.add_(x.float().t() @ weight.float())


def _npu_rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool = True,
) -> None:
    cos, sin = cos_sin_cache.index_select(0, positions.flatten()).chunk(2, -1)
    for each in (query, key):
        heads = each.view(each.shape[0], -1, head_size)
        first, second = heads.chunk(2, -1) if is_neox else (heads[..., ::2], heads[..., 1::2])
        of, by = (part.unsqueeze(1).to(heads.dtype) for part in (cos, sin))
        turned = (first * of - second * by, second * of + first * by)
        first.copy_(turned[0])
        second.copy_(turned[1])


def _npu_reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_indices: torch.Tensor,
) -> None:
    """Write rows of tokens into pages `[blocks, tokens, K, D]`; a slot below zero is padding."""
    slots = slot_indices.long()
    for rows, pages in ((key, key_cache), (value, value_cache)):
        flat = pages.view(-1, *pages.shape[2:])
        # The last slot stands for padding, and is written with what it has.
        at = torch.where(slots < 0, flat.shape[0] - 1, slots)
        keep = (slots < 0).view(-1, *[1] * (flat.dim() - 1))
        flat.index_put_((at,), torch.where(keep, flat.index_select(0, at), rows[: len(slots)]))


def npu_fused_infer_attention_score(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    actual_seq_lengths: Sequence[int],
    actual_seq_lengths_kv: Sequence[int],
    num_heads: int,
    num_key_value_heads: int,
    scale: float,
    block_table: torch.Tensor | None = None,
    block_size: int = 0,
    input_layout: str = "TND",
    sparse_mode: int = 0,
    pre_tokens: int = 2**31 - 1,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of `[T, N, D]`; lengths of queries are summed up, those of pages are not."""
    assert input_layout == "TND", input_layout
    answers, start, kv_start = [], 0, 0
    for i, stop in enumerate(map(int, actual_seq_lengths)):
        if block_table is None:
            kv_stop = int(actual_seq_lengths_kv[i])
            keys, values = key[kv_start:kv_stop], value[kv_start:kv_stop]
            kv_start = kv_stop
        else:
            count = int(actual_seq_lengths_kv[i])
            blocks = block_table[i, : math.ceil(count / block_size)].long()
            keys, values = (
                pages.index_select(0, blocks).view(-1, num_key_value_heads, query.shape[-1])[:count]
                for pages in (key, value)
            )
        answers.append(
            _attention(
                query[start:stop],
                keys,
                values,
                num_heads // num_key_value_heads,
                scale,
                sparse_mode,
                pre_tokens,
            )
        )
        start = stop
    return torch.cat(answers), torch.empty(0, device=query.device)


def _attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    repeats: int,
    scale: float,
    sparse_mode: int,
    pre_tokens: int,
) -> torch.Tensor:
    count, total = len(query), len(keys)
    wide = [each.repeat_interleave(repeats, 1).float().transpose(0, 1) for each in (keys, values)]
    scores = query.float().transpose(0, 1) @ wide[0].transpose(1, 2) * scale
    if sparse_mode in (CAUSAL, BAND):
        at = torch.arange(total - count, total, device=query.device).unsqueeze(1)
        of = torch.arange(total, device=query.device)
        hidden = of > at
        if sparse_mode == BAND:
            hidden = hidden | (of < at - pre_tokens)
        scores = scores.masked_fill(hidden, -math.inf)
    return (scores.softmax(-1) @ wide[1]).transpose(0, 1).to(query.dtype)


def npu_fusion_attention(*_: object, **__: object) -> None:
    raise NotImplementedError("training alone uses it")


class _SlotMapping:
    """vLLM's only Triton kernel of an eager step: the slots of a step's tokens."""

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        num_reqs = grid[0] - 1

        def launch(
            num_tokens: int,
            max_tokens: int,
            query_start_loc: torch.Tensor,
            positions: torch.Tensor,
            block_table: torch.Tensor,
            stride: int,
            block_size: int,
            slots: torch.Tensor,
            *,
            TOTAL_CP_WORLD_SIZE: int = 1,
            PAD_ID: int = -1,
            **_: Any,
        ) -> None:
            assert TOTAL_CP_WORLD_SIZE == 1
            starts = query_start_loc[: num_reqs + 1].long()
            at = torch.arange(num_tokens, device=slots.device)
            request = (torch.searchsorted(starts, at, right=True) - 1).clamp(0, num_reqs - 1)
            positions = positions[:num_tokens]
            found = block_table.flatten().index_select(
                0, request * stride + positions // block_size
            )
            mapped = found.long() * block_size + positions % block_size
            mapped = torch.where(at < starts[-1], mapped, PAD_ID)
            slots[:num_tokens].copy_(mapped.to(slots.dtype))
            slots[num_tokens:max_tokens].fill_(PAD_ID)

        return launch


slot_mapping = _SlotMapping()
