"""Operators of `torch_npu` that eager models of vLLM-Ascend call, in torch's own operations.

Legend: T tokens, N query heads, K KV heads, D key size, E value size; of a latent L numbers without
rope and R with it.
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
    "npu_attention_update",
    "npu_fast_gelu",
    "npu_fused_infer_attention_score",
    "npu_fused_infer_attention_score_v2",
    "npu_fusion_attention",
    "npu_gather_pa_kv_cache",
    "npu_interleave_rope",
    "npu_kv_rmsnorm_rope_cache",
    "npu_rms_norm",
    "npu_rotary_mul",
    "npu_scatter_pa_kv_cache",
    "npu_swiglu",
    "npu_transpose_batchmatmul",
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


def npu_fast_gelu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


def npu_rotary_mul(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn the first half of each row `[..., D]` with the second."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


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


def npu_scatter_pa_kv_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    cache_mode: str = "Norm",
) -> None:
    """Write rows of tokens into pages; the name that 0.26.0rc1 calls."""
    assert cache_mode == "Norm", cache_mode
    _npu_reshape_and_cache(key, value, key_cache, value_cache, slot_mapping)


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
    query_rope: torch.Tensor | None = None,
    key_rope: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    block_size: int = 0,
    input_layout: str = "TND",
    sparse_mode: int = 0,
    pre_tokens: int = 2**31 - 1,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of `[T, N, D]`; lengths of queries are summed up, those of pages are not.

    Returns the answers `[T, N, E]` and the logarithms of their sums `[T, N, 1]`. Rope's part of
    queries and keys may stand apart.
    """
    assert input_layout == "TND", input_layout
    if query_rope is not None and key_rope is not None:
        query, key = torch.cat((query, query_rope), -1), torch.cat((key, key_rope), -1)
    answers, start, kv_start = [], 0, 0
    for i, stop in enumerate(map(int, actual_seq_lengths)):
        if block_table is None:
            kv_stop = int(actual_seq_lengths_kv[i])
            keys, values = key[kv_start:kv_stop], value[kv_start:kv_stop]
            kv_start = kv_stop
        else:
            count = int(actual_seq_lengths_kv[i])
            keys, values = (
                _paged(pages.flatten(2), block_table[i], count).view(count, num_key_value_heads, -1)
                for pages in (key, value)
            )
        repeats = num_heads // num_key_value_heads
        part = query[start:stop]
        answers.append(_attention(part, keys, values, repeats, scale, sparse_mode, pre_tokens))
        start = stop
    values_of, sums = zip(*answers, strict=True)
    return torch.cat(values_of), torch.cat(sums)


def npu_fused_infer_attention_score_v2(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    query_rope: torch.Tensor,
    key_rope: torch.Tensor,
    actual_seq_kvlen: Sequence[int],
    block_table: torch.Tensor,
    softmax_scale: float,
    input_layout: str,
    num_key_value_heads: int = 1,
    sparse_mode: int = 0,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one token `[T, N, 1, L]` a request to latents in pages `[blocks, 1, tokens, L]`.

    Returns `[N, T, 1, L]`, and nothing of worth.
    """
    assert (input_layout, num_key_value_heads, sparse_mode) == ("BNSD_NBSD", 1, 0)
    answers = []
    for i, count in enumerate(map(int, actual_seq_kvlen)):
        latents, ropes, values = (
            _paged(pages.squeeze(1), block_table[i], count).unsqueeze(1)
            for pages in (key, key_rope, value)
        )
        asked = torch.cat((query[i], query_rope[i]), -1).transpose(0, 1)
        keys = torch.cat((latents, ropes), -1)
        repeats = query.shape[1]
        answers.append(_attention(asked, keys, values, repeats, softmax_scale, 0, 0)[0])
    return torch.stack(answers).permute(2, 0, 1, 3), torch.empty(0, device=query.device)


def _paged(pages: torch.Tensor, block_ids: torch.Tensor, count: int) -> torch.Tensor:
    """Return the first rows `[count, ...]` of a request in pages `[blocks, tokens, ...]`."""
    blocks = block_ids[: math.ceil(count / pages.shape[1])].long()
    return pages.index_select(0, blocks).flatten(0, 1)[:count]


def _attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    repeats: int,
    scale: float,
    sparse_mode: int,
    pre_tokens: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`[t, N, E]` and the logarithms of sums, `[t, N, 1]`, of queries `[t, N, D]`."""
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
    sums = scores.logsumexp(-1, keepdim=True).transpose(0, 1)
    return (scores.softmax(-1) @ wide[1]).transpose(0, 1).to(query.dtype), sums


def npu_attention_update(
    sums: Sequence[torch.Tensor], answers: Sequence[torch.Tensor], kind: int
) -> tuple[torch.Tensor, None]:
    """Attention to several parts of a prompt `[rows, E]`, by the logarithms of their sums."""
    assert kind == 0
    weights = torch.stack(list(sums)).softmax(0).unsqueeze(-1)
    return (weights * torch.stack(list(answers))).sum(0), None


def npu_transpose_batchmatmul(
    x: torch.Tensor, weight: torch.Tensor, *, perm_y: Sequence[int]
) -> torch.Tensor:
    return (x @ weight).permute(*perm_y).contiguous()


def npu_interleave_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn pairs of neighbours `[..., R]`, and leave them apart: first all even numbers.

    The documentation of CANN (`aclnnInterleaveRope`) has this order.
    """
    first, second = x[..., ::2], x[..., 1::2]
    apart = torch.cat((first, second), -1)
    return (apart * cos + torch.cat((-second, first), -1) * sin).to(x.dtype)


def npu_kv_rmsnorm_rope_cache(
    kv: torch.Tensor,
    weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    rope_cache: torch.Tensor,
    latent_cache: torch.Tensor,
    *,
    epsilon: float,
    cache_mode: str,
    is_output_kv: bool = False,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Norm and turn rows `[T, 1, 1, L + R]`, and write them into both caches."""
    assert cache_mode == "PA", cache_mode
    latent, rope = kv.split([weight.numel(), kv.shape[-1] - weight.numel()], -1)
    normed, _scale = npu_rms_norm(latent, weight, epsilon)
    turned = npu_interleave_rope(rope, cos, sin)
    _npu_reshape_and_cache(normed[:, 0], turned[:, 0], latent_cache, rope_cache, slots)
    own = (turned, normed) if is_output_kv else (None, None)
    return rope_cache, latent_cache, *own


def npu_paged_cache_load(
    latent_cache: torch.Tensor,
    rope_cache: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    *,
    seq_starts: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
) -> None:
    """Copy rows of requests, `lengths` from `seq_starts` on, out of pages, one after another."""
    tokens = latent_cache.shape[1]
    stops = lengths.long().cumsum(0)
    row = torch.arange(key.shape[0], device=key.device)
    request = torch.searchsorted(stops, row, right=True)
    at = row - (stops - lengths).index_select(0, request) + seq_starts.index_select(0, request)
    blocks = (
        block_table.long().flatten().index_select(0, request * block_table.shape[1] + at // tokens)
    )
    slots = blocks * tokens + at % tokens
    for rows, pages in ((key, latent_cache), (value, rope_cache)):
        rows.copy_(pages.flatten(0, 1).index_select(0, slots))


def npu_gather_pa_kv_cache(
    latent_cache: torch.Tensor,
    rope_cache: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    *,
    seq_offset: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
) -> None:
    """Copy rows of requests out of pages; the name that 0.26.0rc1 calls."""
    npu_paged_cache_load(
        latent_cache, rope_cache, block_table, lengths, seq_starts=seq_offset, key=key, value=value
    )


def npu_fusion_attention(*_: object, **__: object) -> None:
    raise NotImplementedError("training alone uses it")


class _SlotMapping:
    """The only Triton kernel of an eager step: the slots of a step's tokens.

    0.26.0rc1 also passes sizes of kernel blocks. Without context parallelism they add nothing to
    `block_size`.
    """

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
