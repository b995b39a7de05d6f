"""Makes `LayerPages` from an engine's tensors.

Only address and strides of a tensor are used, so dtype and device do not matter. Strides are
trusted over sizes: pages may be padded, transposed or interleaved with other layers.

Legend: B kernel blocks, H KV heads, N tokens per kernel block, D key row, E value row, C = D + E.
MLA's latent is token content with one head. A recurrent state is one row a block, its units the
heads.
"""

import math
from dataclasses import dataclass, replace

import torch

from vllm_kvpool.errors import ConfigError
from vllm_kvpool.layout.pages import LayerPages, Run
from vllm_kvpool.layout.states import StateForm


def from_token_content(pages_bhnc: torch.Tensor, *, blocks_per_id: int = 1) -> LayerPages:
    """Return the pages of a layer in vLLM's logical view, `K | V` per token.

    The layer may have any `KVCacheLayout`.
    """
    _check_view("token content", pages_bhnc, blocks_per_id)
    num_heads, num_tokens = pages_bhnc.shape[1:3]
    rows = _whole_rows(pages_bhnc, head_dim=1, token_dim=2)
    return LayerPages((rows,), num_heads, num_tokens, blocks_per_id, (pages_bhnc,))


MAX_WORD_BYTES = 8


@dataclass(frozen=True, slots=True)
class CpuForm:
    """The packing of K and V by CPU attention in each head of a block: all of K, then all of V.

    K lies in tiles of `key_tile` tokens, which take turns with `key_word` elements each; V in
    groups of `value_group` elements, and each group in tiles of `value_tile` tokens, which take
    turns with one element each. None: all tokens of a block, all elements of a row.
    """

    key_tile: int | None = None
    key_word: int = 1
    value_tile: int = 1
    value_group: int | None = None

    def fits(self, num_tokens: int, key_dim: int, value_dim: int, elem_bytes: int) -> bool:
        """Return True if blocks of such rows are whole tiles of words that a copier moves."""
        return not (
            num_tokens % math.lcm(self.key_tile or 1, self.value_tile)
            or key_dim % self.key_word
            or value_dim % (self.value_group or 1)
            or self.key_word * elem_bytes > MAX_WORD_BYTES
        )


# By the instructions that they are made for.
PLAIN_CPU_FORM = CpuForm()  # "vec", "vec16" and most others: K transposed, V as it is
AMX_FORM = CpuForm(key_tile=16, key_word=2, value_tile=2, value_group=16)
BFMMLA_FORM = CpuForm(key_tile=8, key_word=4, value_tile=4, value_group=2)  # bfloat16 on ARM
CPU_FORMS = (PLAIN_CPU_FORM, AMX_FORM, BFMMLA_FORM)


def from_cpu_attention(
    pages_bhnc: torch.Tensor,
    key_dim: int,
    value_dim: int,
    *,
    form: CpuForm = PLAIN_CPU_FORM,
    blocks_per_id: int = 1,
) -> LayerPages:
    """Return the pages of vLLM's CPU attention, `[B, H, N, C]` by size alone."""
    _check_view("CPU attention", pages_bhnc, blocks_per_id)
    num_heads, num_tokens, content = pages_bhnc.shape[1:]
    if content != key_dim + value_dim:
        raise ConfigError(
            f"CPU attention pages hold {content} elements per token, but the model has "
            f"{key_dim} for K and {value_dim} for V; set per_head_storage: false"
        )
    if num_tokens > 1 and pages_bhnc.stride(2) != content:
        raise ConfigError(
            f"CPU attention pages need each head of a block contiguous, got strides "
            f"{pages_bhnc.stride()}; unset VLLM_KV_CACHE_LAYOUT or set it to HND"
        )
    elem = pages_bhnc.element_size()
    key_bytes, value_bytes = key_dim * elem, value_dim * elem
    key_tile, key_word = form.key_tile or num_tokens, form.key_word * elem
    group_dim = form.value_group or value_dim
    if not form.fits(num_tokens, key_dim, value_dim, elem):
        raise ConfigError(
            f"CPU attention packs {key_tile} tokens and {group_dim} elements together, but blocks "
            f"have {num_tokens} tokens, and rows {key_dim} and {value_dim} elements of {elem} "
            "bytes; set --block-size to a multiple of 32"
        )
    base = pages_bhnc.data_ptr()
    block_stride, head_stride = (s * elem for s in pages_bhnc.stride()[:2])
    key = Run.of_bytes(base, block_stride, head_stride, key_bytes, key_bytes)
    runs = [key.interleaved(key_tile, key_word, num_tokens)]
    group_bytes = group_dim * elem
    for at in range(key_bytes, key_bytes + value_bytes, group_bytes):
        start = base + at * num_tokens
        run = Run.of_bytes(start, block_stride, head_stride, group_bytes, group_bytes, at)
        is_tiled = form.value_tile > 1
        runs.append(run.interleaved(form.value_tile, elem, num_tokens) if is_tiled else run)
    return LayerPages(tuple(runs), num_heads, num_tokens, blocks_per_id, (pages_bhnc,))


def from_pair(k_bnhd: torch.Tensor, v_bnhe: torch.Tensor, *, blocks_per_id: int = 1) -> LayerPages:
    """Return the pages of separate K and V tensors (vLLM-Ascend).

    Of one tensor `[2, B, N, H, D]` they are the two halves.
    """
    _check_view("K of the pair", k_bnhd, blocks_per_id)
    _check_view("V of the pair", v_bnhe, blocks_per_id)
    if k_bnhd.shape[:3] != v_bnhe.shape[:3]:
        raise ConfigError(
            f"K and V pages must agree in blocks, tokens and heads, got {tuple(k_bnhd.shape)} and "
            f"{tuple(v_bnhe.shape)}; set per_head_storage: false"
        )
    key = _whole_rows(k_bnhd, head_dim=2, token_dim=1)
    value = _whole_rows(v_bnhe, head_dim=2, token_dim=1, row_offset=key.nbytes)
    _, num_tokens, num_heads, _ = k_bnhd.shape
    return LayerPages((key, value), num_heads, num_tokens, blocks_per_id, (k_bnhd, v_bnhe))


def from_state(
    pages_b11c: torch.Tensor,
    form: StateForm,
    num_units: int,
    *,
    dim_first: bool = False,
    draft_rows: int = 0,
) -> LayerPages:
    """Return the state of `num_units` units in each block.

    The convolution's window comes first, then the recurrent part.
    The window lies as `[rows, channels]`, with `dim_first` as `[channels, rows]`; `draft_rows` more
    rows follow it, which are no part of the state. Each part has the channels of all units.
    """
    _check_view("recurrent state", pages_b11c, 1)
    channels = [part.channels * (1 if part.is_shared else num_units) for part in form.parts]
    all_rows = form.window_rows + draft_rows
    all_bytes = sum(channels) * form.item_bytes  # of a row of the window
    expected = all_rows * all_bytes + num_units * form.recurrent_bytes
    elem = pages_b11c.element_size()
    if pages_b11c.shape[1:3] != (1, 1) or pages_b11c.shape[3] * elem != expected:
        raise ConfigError(
            f"recurrent state: a block holds {tuple(pages_b11c.shape[1:])} where {expected} bytes "
            "were expected; run this model without kvpool"
        )
    base, block_stride = pages_b11c.data_ptr(), pages_b11c.stride(0) * elem
    runs, row_offset, before = [], 0, 0
    for part, count in zip(form.parts, channels, strict=True):
        nbytes = part.channels * form.item_bytes
        unit_stride = 0 if part.is_shared else nbytes * (all_rows if dim_first else 1)
        for row in range(form.window_rows):
            if dim_first:
                start = base + before * all_rows + row * form.item_bytes
            else:
                start = base + before + row * all_bytes
            run = Run.of_bytes(start, block_stride, unit_stride, nbytes, nbytes, row_offset)
            runs.append(run.interleaved(all_rows, form.item_bytes, all_rows) if dim_first else run)
            row_offset += nbytes
        before += count * form.item_bytes
    if size := form.recurrent_bytes:
        start = base + all_rows * all_bytes
        runs.append(Run.of_bytes(start, block_stride, size, size, size, form.window_bytes))
    return LayerPages(tuple(runs), num_units, 1, 1, (pages_b11c,))


def from_planes(
    pages_bsnc: torch.Tensor, num_heads: int, *, pack_bytes: int = 0, blocks_per_id: int = 1
) -> LayerPages:
    """Return the pages of K and V in a plane of a block each, `[B, 2, N, H * D]` by size.

    A plane has all heads.
    Without `pack_bytes` a plane is `[N, H, D]`. With it, as for ROCm's kernels: K
    `[H, D / pack, N, pack]`, V `[H, D, N]`.
    """
    _check_view("K and V planes", pages_bsnc, blocks_per_id)
    _, planes, num_tokens, content = pages_bsnc.shape
    elem = pages_bsnc.element_size()
    half = content * elem // num_heads
    is_dense = num_tokens == 1 or pages_bsnc.stride(2) == content
    if planes != 2 or content % num_heads or (pack_bytes and (half % pack_bytes or not is_dense)):
        raise ConfigError(
            f"K and V planes of {num_heads} heads cannot have the shape {tuple(pages_bsnc.shape)} "
            f"and strides {pages_bsnc.stride()}; choose another --attention-backend"
        )
    block, plane, token, _ = (stride * elem for stride in pages_bsnc.stride())
    head = half * (num_tokens if pack_bytes else 1)
    base = pages_bsnc.data_ptr()
    key, value = (
        Run.of_bytes(base + i * plane, block, head, token, half, i * half) for i in range(2)
    )
    if pack_bytes:
        key = key.interleaved(num_tokens, pack_bytes, num_tokens)
        value = value.interleaved(num_tokens, elem, num_tokens)
    return LayerPages((key, value), num_heads, num_tokens, blocks_per_id, (pages_bsnc,))


def from_nvfp4(
    pages_bsnc: torch.Tensor, num_heads: int, *, swizzled: bool, blocks_per_id: int = 1
) -> LayerPages:
    """Return the pages of NVFP4, `[B, 2 * H, N, C]` by size.

    They are: data of K, scales of K, data of V, scales of V.
    Each of them is `[H, N, bytes]` or `[N, H, bytes]`, as the strides say; eight bytes of data have
    one scale. `swizzled`: V's scales of four tokens are mixed, as trtllm's kernels want them:
    those of a token lie in four quarters, each in the place of another token.
    """
    _check_view("NVFP4", pages_bsnc, blocks_per_id)
    _, slots, num_tokens, content = pages_bsnc.shape
    by_head = pages_bsnc.stride()[1:] == (num_tokens * content, content, 1)
    by_token = not swizzled and pages_bsnc.stride()[1:] == (content, slots * content, 1)
    scale_bytes, rest = divmod(content, 9)
    mixed = 4 if swizzled else 1
    if slots != 2 * num_heads or rest or not (by_head or by_token) or scale_bytes % mixed:
        raise ConfigError(
            f"NVFP4 pages of {num_heads} heads cannot have the shape {tuple(pages_bsnc.shape)} and "
            f"strides {pages_bsnc.stride()}; choose another --kv-cache-dtype, such as fp8"
        )
    if num_tokens % mixed:
        raise ConfigError(
            f"NVFP4 mixes four tokens' scales, but blocks have {num_tokens} tokens; set "
            "--block-size to a multiple of 16"
        )
    block_stride, side = pages_bsnc.stride(0), num_heads * num_tokens * content
    base = pages_bsnc.data_ptr()

    def run(offset: int, nbytes: int, row_offset: int) -> Run:
        head, token = (num_tokens, 1) if by_head else (1, num_heads)
        return Run.of_bytes(
            base + offset, block_stride, nbytes * head, nbytes * token, nbytes, row_offset
        )

    data_bytes = content - scale_bytes
    scales_at = num_heads * num_tokens * data_bytes
    runs = [
        run(0, data_bytes, 0),
        run(scales_at, scale_bytes, data_bytes),
        run(side, data_bytes, content),
    ]
    scales = run(side + scales_at, scale_bytes, content + data_bytes)
    if swizzled:
        quarter = scale_bytes // mixed
        in_turns = scales.interleaved(mixed, 1, num_tokens)
        runs += [
            replace(
                in_turns,
                base=scales.base + i * scale_bytes,
                num_elems=quarter,
                row_offset=scales.row_offset + i * quarter,
            )
            for i in range(mixed)
        ]
    else:
        runs.append(scales)
    return LayerPages(tuple(runs), num_heads, num_tokens, blocks_per_id, (pages_bsnc,))


def from_values_and_scales(
    pages_bhnc: torch.Tensor, scale_bytes: int, *, shuffled: bool = False, blocks_per_id: int = 1
) -> LayerPages:
    """Return the pages of rows without heads, `[B, 1, N, C]` by size.

    The values of all tokens come first, then their scales.
    `shuffled`: 16 tokens take turns with 16 bytes of their values, as aiter's kernels want them.
    """
    _check_view("values and scales", pages_bhnc, blocks_per_id)
    _, num_heads, num_tokens, content = pages_bhnc.shape
    elem = pages_bhnc.element_size()
    row_bytes, block_stride = content * elem, pages_bhnc.stride(0) * elem
    value_bytes = row_bytes - scale_bytes
    is_dense = num_tokens == 1 or pages_bhnc.stride(2) == content
    pack = 16
    if num_heads != 1 or not is_dense or (shuffled and (value_bytes % pack or num_tokens % pack)):
        raise ConfigError(
            f"values and scales cannot have the shape {tuple(pages_bhnc.shape)} and strides "
            f"{pages_bhnc.stride()}; set --block-size to a multiple of 64"
        )
    base = pages_bhnc.data_ptr()
    values = Run.of_bytes(base, block_stride, block_stride, value_bytes, value_bytes)
    if shuffled:
        values = values.interleaved(pack, pack, num_tokens)
    start = base + num_tokens * value_bytes
    scales = Run.of_bytes(start, block_stride, block_stride, scale_bytes, scale_bytes, value_bytes)
    return LayerPages((values, scales), 1, num_tokens, blocks_per_id, (pages_bhnc,))


def _whole_rows(pages: torch.Tensor, *, head_dim: int, token_dim: int, row_offset: int = 0) -> Run:
    """Return the run of a 4-D tensor whose last dimension is one contiguous piece of the row."""
    elem = pages.element_size()
    block, head, token = (pages.stride(dim) * elem for dim in (0, head_dim, token_dim))
    nbytes = pages.shape[3] * elem
    return Run.of_bytes(pages.data_ptr(), block, head, token, nbytes, row_offset)


def _check_view(name: str, pages: torch.Tensor, blocks_per_id: int) -> None:
    """Refuse a tensor whose rows cannot be addressed, or whose rows share memory."""
    shape, strides = tuple(pages.shape), pages.stride()
    remedy = "use a backend with plain per-head pages, or set per_head_storage: false"
    if len(shape) != 4 or 0 in shape:
        raise ConfigError(
            f"{name}: pages must have four non-empty dimensions, got {shape}; {remedy}"
        )
    if shape[3] > 1 and strides[3] != 1:
        raise ConfigError(
            f"{name}: the elements of a row must be adjacent, got strides {strides} for shape "
            f"{shape}; {remedy}"
        )
    if _rows_overlap(shape, strides):
        raise ConfigError(f"{name}: rows share memory, strides {strides} of {shape}; {remedy}")
    if blocks_per_id < 1 or shape[0] % blocks_per_id:
        raise ConfigError(
            f"{name}: {shape[0]} kernel blocks are no whole number of blocks of {blocks_per_id}; "
            "set the block size to a multiple of the attention backend's"
        )


def _rows_overlap(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Return True if a dimension, by stride, steps into what the smaller ones span."""
    extent = 1
    for stride, size in sorted((s, n) for s, n in zip(strides, shape, strict=True) if n > 1):
        if stride < extent:
            return True
        extent += stride * (size - 1)
    return False
