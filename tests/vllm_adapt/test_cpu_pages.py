"""Pages of CPU attention: the rows that vLLM's kernels write are the rows that the pool reads."""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from vllm import _custom_ops as ops
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs

from tests.support.models import LlamaShape, make_model
from tests.support.moves import cell_move
from vllm_kvpool.layout.page_formats import BFMMLA_FORM, PLAIN_CPU_FORM, CpuForm
from vllm_kvpool.layout.pages import LayerPages
from vllm_kvpool.staging.copy_cpu import CpuCopier
from vllm_kvpool.vllm_adapt.kv_cache_specs import page_specs

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

# Legend: B blocks, H heads, N tokens per block, D elements of K and of V, T tokens.
BLOCKS, HEADS = 3, 2
HALF_TYPES = (torch.float16, torch.bfloat16)
Write = Callable[[torch.Tensor, torch.Tensor, Sequence[torch.Tensor]], None]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models"), LlamaShape(kv_heads=4, layers=1))


def config_of(model: Path, dtype: torch.dtype) -> VllmConfig:
    name = str(dtype).removeprefix("torch.")
    arguments = EngineArgs(model=str(model), dtype=name, skip_tokenizer_init=True)
    return arguments.create_engine_config()


def rows_of(pages: LayerPages) -> torch.Tensor:
    """Return all rows `[H, B * N, R]`, read by the host copier."""
    tokens = BLOCKS * pages.tokens_per_block
    rows = torch.empty(HEADS, tokens, pages.row_bytes, dtype=torch.uint8)
    ids = list(range(BLOCKS))
    move = cell_move(rows.data_ptr(), (0, 1, 0, HEADS), ids, chunk_tokens=tokens)
    CpuCopier([pages]).gather([move])
    return rows


def halves_of(cache_bhnc: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return K and V as vLLM's CPU attention cuts them."""
    return cache_bhnc.view(*cache_bhnc.shape[:2], 2 * cache_bhnc.shape[2], -1).chunk(2, dim=2)


# As many as vLLM has kernels for: "vec" for heads of whole 32, "amx" for bfloat16 as well.
KERNELS = [
    (isa, block, head_dim, dtype)
    for isa, block, dims, dtypes in (
        ("vec", 32, (32, 128), (torch.float32, *HALF_TYPES)),
        ("vec", 128, (32, 128), (torch.float32, *HALF_TYPES)),
        ("vec16", 48, (32, 80), (torch.float32, *HALF_TYPES)),
        ("amx", 32, (32, 128), (torch.bfloat16,)),
        ("amx", 96, (32, 128), (torch.bfloat16,)),
    )
    for head_dim in dims
    for dtype in dtypes
]


def skip_without_kernels(isa: str) -> None:
    if isa == "amx" and not torch.cpu._is_avx512_bf16_supported():
        pytest.skip("vLLM's library for processors without AVX-512 BF16 has no kernels of amx")


@pytest.mark.parametrize(("isa", "block", "head_dim", "dtype"), KERNELS, ids=str)
def test_what_kernels_write_is_read_as_rows(
    model: Path, isa: str, block: int, head_dim: int, dtype: torch.dtype
) -> None:
    skip_without_kernels(isa)
    cache_bhnc = torch.zeros(BLOCKS, HEADS, block, 2 * head_dim, dtype=dtype)
    k_thd, v_thd = torch.randn(2, BLOCKS * block, HEADS, head_dim).to(dtype)
    slots = torch.arange(BLOCKS * block)
    ops.cpu_attn_reshape_and_cache(k_thd, v_thd, *halves_of(cache_bhnc), slots, isa)
    row_half = head_dim * dtype.itemsize
    pages = page_specs.cpu_layer_pages(
        cache_bhnc, row_half, row_half, config_of(model, dtype), isa=isa
    )
    wanted = torch.cat([k_thd, v_thd], 2).transpose(0, 1).contiguous().view(torch.uint8)
    assert torch.equal(rows_of(pages), wanted)


@pytest.mark.parametrize("isa", ["vec", "amx"])
@pytest.mark.parametrize("cache_dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_bytes_of_fp8_are_read_as_rows(model: Path, cache_dtype: str, isa: str) -> None:
    if not torch.cpu._is_avx512_supported():
        pytest.skip("vLLM writes fp8 on processors with AVX-512 alone")
    skip_without_kernels(isa)
    block, head_dim = 64, 32
    number_type = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}[cache_dtype]
    # The kernels round numbers so small that fp8 has no exponent for them.
    numbers = (1 + torch.rand(2, BLOCKS * block, HEADS, head_dim)).to(number_type)
    cache_bhnc = torch.zeros(BLOCKS, HEADS, block, 2 * head_dim, dtype=torch.uint8)
    rows, slots = numbers.to(torch.bfloat16), torch.arange(BLOCKS * block)
    ops.cpu_attn_reshape_and_cache(
        *rows, *halves_of(cache_bhnc), slots, isa, kv_cache_dtype=cache_dtype
    )
    config = config_of(model, torch.bfloat16)
    config.cache_config.cache_dtype = cache_dtype
    pages = page_specs.cpu_layer_pages(cache_bhnc, head_dim, head_dim, config, isa=isa)
    wanted = torch.cat([*numbers.view(torch.uint8)], 2).transpose(0, 1)
    assert torch.equal(rows_of(pages), wanted)


def write_as_bfmmla(
    k_thd: torch.Tensor, v_thd: torch.Tensor, halves: Sequence[torch.Tensor]
) -> None:
    """Write as vLLM's kernel for ARM does, `cpu_attn_neon_bfmmla.hpp`, element by element."""
    keys, values = (half.flatten() for half in halves)
    tokens, _, dim = k_thd.shape
    for token, elem in itertools.product(range(tokens), range(dim)):
        key_group = token // 8 * (dim // 4 * 32)
        keys[key_group + elem // 4 * 32 + token % 8 // 2 * 8 + token % 2 * 4 + elem % 4] = k_thd[
            token, 0, elem
        ]
        pair = elem // 2 * (tokens // 4 * 8) + token // 4 * 8
        values[pair + token % 4 + elem % 2 * 4] = v_thd[token, 0, elem]


def write_plainly(k_thd: torch.Tensor, v_thd: torch.Tensor, halves: Sequence[torch.Tensor]) -> None:
    """Write as vLLM's kernels for "neon" without matrix instructions, "rvv", "vsx" and "vxe" do.

    Later releases also have such a kernel for "nnpa".
    """
    keys, values = halves
    keys.view(k_thd.shape[2], len(k_thd)).copy_(k_thd[:, 0].T)
    values[0, 0] = v_thd[:, 0]


def write_backwards(
    k_thd: torch.Tensor, v_thd: torch.Tensor, halves: Sequence[torch.Tensor]
) -> None:
    """Write the elements of each row in reverse order, as no kernel does."""
    for half, rows in zip(halves, (k_thd, v_thd), strict=True):
        half[0, 0] = rows[:, 0].flip(1)


@pytest.mark.parametrize(
    ("write", "form"),
    [
        (write_as_bfmmla, BFMMLA_FORM),
        (write_plainly, PLAIN_CPU_FORM),
        (write_backwards, None),
    ],
)
def test_a_form_is_known_by_what_is_written(write: Write, form: CpuForm | None) -> None:
    for block, dim in ((32, 32), (64, 128)):
        found = page_specs.form_written_by(write, block, dim, torch.bfloat16, torch.bfloat16)
        assert found == form
