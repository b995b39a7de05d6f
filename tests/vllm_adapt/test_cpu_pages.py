"""CPU attention's pages: what vLLM's own kernels write is what is read as rows."""

import ctypes
from pathlib import Path

import pytest
import torch
from vllm import _custom_ops as ops
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs

from tests.support.models import LlamaShape, make_model
from vllm_kvpool.layout.pages import LayerPages
from vllm_kvpool.vllm_adapt import page_specs

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

# Legend: B blocks, H heads, N tokens per block, D elements of K and of V, T tokens.
BLOCKS, HEADS = 3, 2
HALF_TYPES = (torch.float16, torch.bfloat16)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models"), LlamaShape(kv_heads=4, layers=1))


def config_of(model: Path, dtype: torch.dtype) -> VllmConfig:
    name = str(dtype).removeprefix("torch.")
    arguments = EngineArgs(model=str(model), dtype=name, skip_tokenizer_init=True)
    return arguments.create_engine_config()


def row_at(pages: LayerPages, block: int, head: int, token: int) -> bytes:
    """A row, element by element at the addresses that the runs say."""
    row = bytearray(pages.row_bytes)
    for run in pages.runs:
        at = run.base + block * run.block_stride + head * run.head_stride + token * run.token_stride
        for i in range(run.num_elems):
            start = run.row_offset + i * run.elem_bytes
            elem = ctypes.string_at(at + i * run.elem_stride, run.elem_bytes)
            row[start : start + run.elem_bytes] = elem
    return bytes(row)


@pytest.mark.parametrize(("isa", "block"), [("vec", 32), ("vec", 128), ("vec16", 48)])
@pytest.mark.parametrize("head_dim", [32, 80])
@pytest.mark.parametrize("dtype", [torch.float32, *HALF_TYPES], ids=str)
def test_kernels_write_plain_pages(
    model: Path, dtype: torch.dtype, head_dim: int, isa: str, block: int
) -> None:
    if head_dim % 32 and isa == "vec":
        isa = "vec16"  # the only kernel for such heads
    cache_bhnc = torch.zeros(BLOCKS, HEADS, block, 2 * head_dim, dtype=dtype)
    k_thd, v_thd = torch.randn(2, BLOCKS * block, HEADS, head_dim).to(dtype)
    halves = cache_bhnc.view(BLOCKS, HEADS, 2 * block, -1).chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(k_thd, v_thd, *halves, torch.arange(BLOCKS * block), isa)
    row_half = head_dim * dtype.itemsize
    pages = page_specs.cpu_layer_pages(cache_bhnc, row_half, row_half, config_of(model, dtype))
    for token in (0, 1, block - 1, block, BLOCKS * block - 1):
        for head in range(HEADS):
            k, v = (
                x[token, head].contiguous().view(torch.uint8).numpy().tobytes()
                for x in (k_thd, v_thd)
            )
            assert row_at(pages, token // block, head, token % block) == k + v


@pytest.mark.parametrize("cache_dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_bytes_in_plain_pages(model: Path, cache_dtype: torch.dtype) -> None:
    """vLLM writes these only on processors with AVX-512; the form is that of "vec"."""
    block, head_dim = 64, 32
    values = torch.arange(BLOCKS * HEADS * 2 * block * head_dim).remainder(251).to(torch.uint8)
    cache_bhnc = values.view(BLOCKS, HEADS, block, 2 * head_dim).view(cache_dtype)
    pages = page_specs.cpu_layer_pages(
        cache_bhnc, head_dim, head_dim, config_of(model, torch.float32)
    )
    flat = values.view(BLOCKS, HEADS, 2, block * head_dim)
    for b, h, t in ((0, 0, 0), (1, 1, 5), (2, 0, block - 1)):
        k = flat[b, h, 0].view(head_dim, block)[:, t]
        v = flat[b, h, 1].view(block, head_dim)[t]
        assert row_at(pages, b, h, t) == torch.cat([k, v]).numpy().tobytes()


@pytest.mark.parametrize("isa", page_specs.ISAS_WITH_PLAIN_PAGES)
def test_isas_with_plain_pages(isa: str) -> None:
    for dtype in (torch.float32, *HALF_TYPES):
        if (isa, dtype) != ("neon", torch.bfloat16):
            page_specs.check_isa(isa, dtype)
