"""Each format's address arithmetic, evaluated byte by byte, against plain tensor indexing."""

import ctypes
import itertools

import pytest
import torch

from vllm_kvpool.errors import ConfigError
from vllm_kvpool.layout.page_formats import from_cpu_attention, from_pair, from_token_content
from vllm_kvpool.layout.pages import LayerPages

# Legend: L layers, B blocks, H heads, N tokens per block, D key row, E value row, C = D + E.
LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int8)
SIZES = {"L": 2, "B": 6, "H": 3, "N": 4, "C": 10}
KEY_DIM, VALUE_DIM = 6, 4


def random_pages(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    shape_bytes = (*shape[:-1], shape[-1] * dtype.itemsize)
    return torch.randint(0, 256, shape_bytes, generator=generator, dtype=torch.uint8).view(dtype)


def row_at(pages: LayerPages, block: int, head: int, token: int) -> bytes:
    row = bytearray(pages.row_bytes)
    for run in pages.runs:
        at = run.base + block * run.block_stride + head * run.head_stride + token * run.token_stride
        for i in range(run.num_elems):
            elem = ctypes.string_at(at + i * run.elem_stride, run.elem_bytes)
            start = run.row_offset + i * run.elem_bytes
            row[start : start + run.elem_bytes] = elem
    return bytes(row)


def as_bytes(row: torch.Tensor) -> bytes:
    return row.contiguous().view(torch.uint8).numpy().tobytes()


def assert_rows(pages: LayerPages, rows_bhnc: torch.Tensor) -> None:
    num_blocks, num_heads, num_tokens, content = rows_bhnc.shape
    assert (pages.num_heads, pages.tokens_per_block) == (num_heads, num_tokens)
    assert pages.row_bytes == content * rows_bhnc.element_size()
    for b, h, n in itertools.product(range(num_blocks), range(num_heads), range(num_tokens)):
        assert row_at(pages, b, h, n) == as_bytes(rows_bhnc[b, h, n]), (b, h, n)


@pytest.mark.parametrize("padded", ["", "B", "H", "N", "C"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_token_content_in_every_layout(layout: str, padded: str) -> None:
    sizes = [SIZES[dim] + 2 * (dim == padded) for dim in layout]
    physical = random_pages(*sizes, dtype=torch.float16)
    if padded:
        physical = physical.narrow(layout.index(padded), 0, SIZES[padded])
    pages_lbhnc = physical.permute(*(layout.index(dim) for dim in "LBHNC"))
    for pages_bhnc in pages_lbhnc:
        assert_rows(from_token_content(pages_bhnc, blocks_per_id=3), pages_bhnc)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_token_content_of_every_dtype(dtype: torch.dtype) -> None:
    pages_bhnc = random_pages(4, 2, 3, 5, dtype=dtype)
    assert_rows(from_token_content(pages_bhnc), pages_bhnc)


def test_the_latent_of_mla_is_token_content_with_one_head() -> None:
    pages_bhnc = random_pages(4, 1, 16, 576, dtype=torch.bfloat16)
    assert_rows(from_token_content(pages_bhnc), pages_bhnc)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cpu_attention_holds_k_transposed_then_v(dtype: torch.dtype) -> None:
    content = KEY_DIM + VALUE_DIM
    pages_bhnc = random_pages(4, 3, 8, content, dtype=dtype)
    flat = pages_bhnc.view(torch.uint8).reshape(4, 3, 8 * content, dtype.itemsize)
    k = flat[:, :, : 8 * KEY_DIM].reshape(4, 3, KEY_DIM, 8, -1).transpose(2, 3)
    v = flat[:, :, 8 * KEY_DIM :].reshape(4, 3, 8, VALUE_DIM, -1)
    rows = torch.cat([k, v], 3).flatten(3)
    assert_rows(from_cpu_attention(pages_bhnc, KEY_DIM, VALUE_DIM), rows)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_pair_of_tensors(dtype: torch.dtype) -> None:
    k_bnhd = random_pages(4, 8, 3, KEY_DIM, dtype=dtype)
    v_bnhe = random_pages(4, 8, 3, VALUE_DIM, dtype=dtype)
    k, v = (x.view(torch.int8) for x in (k_bnhd, v_bnhe))
    assert_rows(from_pair(k_bnhd, v_bnhe), torch.cat([k, v], -1).transpose(1, 2))


def test_one_tensor_of_k_and_v_planes_is_a_pair() -> None:
    planes = random_pages(2, 4, 8, 3, KEY_DIM, dtype=torch.float16)
    rows = torch.cat([planes[0], planes[1]], -1).transpose(1, 2)
    assert_rows(from_pair(planes[0], planes[1]), rows)


def test_pages_keep_their_memory_alive() -> None:
    pages_bhnc = random_pages(4, 2, 3, 5, dtype=torch.float16)
    assert from_token_content(pages_bhnc).owner == (pages_bhnc,)


FLOATS = torch.zeros(4, 2, 8, 10)


@pytest.mark.parametrize(
    ("pages_bhnc", "blocks_per_id", "complaint"),
    [
        (FLOATS.transpose(2, 3), 1, "adjacent"),
        (FLOATS[0], 1, "four non-empty dimensions"),
        (FLOATS[:0], 1, "four non-empty dimensions"),
        (FLOATS[:, :1].expand(4, 2, 8, 10), 1, "share memory"),
        (FLOATS.view(-1).as_strided((4, 2, 8, 10), (160, 80, 8, 1)), 1, "share memory"),
        (FLOATS, 3, "no whole number"),
    ],
)
def test_token_content_that_cannot_be_cut_is_refused(
    pages_bhnc: torch.Tensor, blocks_per_id: int, complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        from_token_content(pages_bhnc, blocks_per_id=blocks_per_id)


def test_cpu_attention_refuses_other_sizes_and_token_major_pages() -> None:
    with pytest.raises(ConfigError, match="10 elements per token"):
        from_cpu_attention(FLOATS, 6, 6)
    with pytest.raises(ConfigError, match="contiguous"):
        from_cpu_attention(torch.zeros(4, 8, 2, 10).transpose(1, 2), 6, 4)


def test_a_pair_of_different_geometry_is_refused() -> None:
    with pytest.raises(ConfigError, match="agree"):
        from_pair(FLOATS, FLOATS[:, :, :4])
