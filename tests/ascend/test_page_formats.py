"""Tensors that vLLM-Ascend may register: they match the configuration's format or are refused."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.npu import FakeNpu
from vllm_kvpool.errors import ConfigError
from vllm_kvpool.staging.devices import HostDevice, NpuDevice
from vllm_kvpool.vllm_adapt import ascend
from vllm_kvpool.vllm_adapt.ascend import Expected

# B blocks, N tokens of a kernel block, H heads, D and E rows of K and V in elements.
B, N, H, D, E = 6, 32, 4, 24, 40
BF16 = torch.bfloat16
EXPECTED = Expected(
    num_blocks=B, block_size=N, num_heads=H, key_bytes=D * 2, value_bytes=E * 2, is_latent=False
)
LATENT = replace(EXPECTED, num_heads=1, key_bytes=(512 + 64) * 2, value_bytes=0, is_latent=True)
FRACTAL_NZ = 29


def pages(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def read(value: Any, expected: Expected = EXPECTED) -> Any:
    return ascend.from_registered("layer.3", value, expected, HostDevice())


def test_a_pair_of_different_rows() -> None:
    key, value = pages(B, N, H, D), pages(B, N, H, E)
    got = read((key, value))
    assert got.row_bytes == (D + E) * 2
    assert [run.base for run in got.runs] == [key.data_ptr(), value.data_ptr()]
    assert (got.tokens_per_block, got.num_heads, got.blocks_per_id) == (N, H, 1)


def test_k_and_v_of_different_types() -> None:
    expected = replace(EXPECTED, key_bytes=D)
    got = read((pages(B, N, H, D, dtype=torch.int8), pages(B, N, H, E)), expected)
    assert [run.nbytes for run in got.runs] == [D, E * 2]


@pytest.mark.parametrize("quantised", [False, True])
def test_a_latent_in_two_parts(quantised: bool) -> None:
    """The two parts form one row, in the order that vLLM uses when it keeps them in one tensor."""
    nope = pages(B, N, 1, 512, dtype=torch.int8 if quantised else BF16)
    rope = pages(B, N, 1, 64)
    key_bytes = 512 + 128 if quantised else (512 + 64) * 2
    got = read((nope, rope), replace(LATENT, key_bytes=key_bytes))
    assert [run.base for run in got.runs] == [nope.data_ptr(), rope.data_ptr()]
    assert (got.row_bytes, got.num_heads) == (key_bytes, 1)


@pytest.mark.parametrize("ratio", [1, 2, 4])
def test_kernel_blocks_smaller_than_the_schedulers_and_more_than_it_uses(ratio: int) -> None:
    """Cards with more memory than the smallest of the engine have blocks left over."""
    shape = ((B + 2) * ratio, N // ratio, H)
    got = read((pages(*shape, D), pages(*shape, E)))
    assert (got.tokens_per_block, got.blocks_per_id) == (N // ratio, ratio)


@pytest.mark.parametrize("shape", [(2, B, N, H, D), (B, 2, N, H, D)])
def test_one_tensor_of_five_dimensions(shape: tuple[int, ...]) -> None:
    whole = pages(*shape)
    got = read(whole, replace(EXPECTED, value_bytes=D * 2))
    step = whole.stride(shape.index(2)) * 2
    assert got.runs[1].base - got.runs[0].base == step
    assert got.runs[0].block_stride == whole.stride(shape.index(B)) * 2


REFUSED = {
    "310P's NZ order": ((pages(B, H * D // 16, N, 16), pages(B, H * D // 16, N, 16)), "310P"),
    "310P's NZ order in one": (pages(2, B, H * D // 16, N, 16), "310P"),
    "heads before tokens": ((pages(B, H, N, D), pages(B, H, N, E)), "4 heads in the third"),
    "heads before tokens in one": (pages(2, B, H, N, D), "4 heads in the third"),
    "an index": ((pages(B, N, 1, 128),), "SFA"),
    "an index with scales": ((pages(B, N, 1, 128), pages(B, N, 1, 1)), "4 heads in the third"),
    "three tensors": ([pages(B, N, 1, 128)] * 3, "DeepSeek V4"),
    "states": ([pages(B, 3, 128), pages(B, 8, 64, 128)], "Mamba"),
    "one tensor": (pages(B, N, D), "cannot be told apart"),
    "two blocks in one tensor": (pages(2, 2, N, H, D), "must be 2"),
    "neither first nor second": (pages(3, 4, N, H, D), "must be 2"),
    "no tensors": ((None, None), "no tensors"),
    "nothing": (None, "no tensors"),
    "rows of another size": ((pages(B, N, H, D), pages(B, N, H, D)), "48 and 48 bytes where"),
    "k and v in the wrong order": ((pages(B, N, H, E), pages(B, N, H, D)), "80 and 48 bytes"),
    "too few blocks": ((pages(B - 1, N, H, D), pages(B - 1, N, H, E)), "hands out 6"),
    "tokens that do not divide": ((pages(B, 24, H, D), pages(B, 24, H, E)), "block size 32"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_shared_is_refused_by_name(case: str) -> None:
    value, words = REFUSED[case]
    with pytest.raises(ConfigError, match=words) as error:
        read(value)
    assert "layer.3" in str(error.value)
    assert "KVPoolConnector" in str(error.value)


def test_a_latent_with_an_index_beside_it_is_refused() -> None:
    """The pair of an index and its scales has one head too, but another size."""
    with pytest.raises(ConfigError, match="128 and 1 bytes"):
        read((pages(B, N, 1, 128, dtype=torch.int8), pages(B, N, 1, 1, dtype=torch.int8)), LATENT)


def test_private_formats_of_npus_are_refused() -> None:
    device = NpuDevice(torch.device("cpu"), FakeNpu(), format_of=lambda _: FRACTAL_NZ)
    pair = (pages(B, N, H, D), pages(B, N, H, E))
    with pytest.raises(ConfigError, match="FRACTAL_NZ"):
        ascend.from_registered("layer.3", pair, EXPECTED, device)


def test_options_that_change_bytes_but_no_shape_are_refused() -> None:
    ascend.refuse_options({})
    ascend.refuse_options(None)
    ascend.refuse_options({"enable_kv_nz": False, "weight_nz_mode": 1})
    with pytest.raises(ConfigError, match="enable_kv_nz"):
        ascend.refuse_options({"enable_kv_nz": True})


def test_layers_that_repeat_pointers() -> None:
    own, other = (pages(B, N, H, D), pages(B, N, H, D)), (pages(B, N, H, D), pages(B, N, H, D))
    caches = {"a": own, "b": other, "shares a": own}
    ascend.refuse_repeated(["a", "b"], caches)
    with pytest.raises(ConfigError, match="shares a and a are in one KV cache group"):
        ascend.refuse_repeated(["a", "b", "shares a"], caches)


@pytest.mark.parametrize(
    ("changes", "is_plain"),
    [
        ({}, True),
        ({"scale_dim": 1}, False),
        ({"cache_sparse_sfa_c8": True}, False),
        ({"store_on_host": True}, False),
        ({"cache_sparse_li_c8": True}, False),
        ({"sparse_head_dim": (512, 64, 128)}, False),
    ],
)
def test_only_plain_latents_of_vllm_ascend_are_taken(
    changes: dict[str, Any], is_plain: bool
) -> None:
    kind = type("AscendMLAAttentionSpec", (SimpleNamespace,), {})
    values = {"scale_dim": 0, "cache_sparse_sfa_c8": False, **changes}
    assert ascend.is_plain_latent(kind(**values)) is is_plain
    assert not ascend.is_plain_latent(SimpleNamespace(**values))
