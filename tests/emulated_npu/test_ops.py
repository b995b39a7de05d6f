"""Operators of the emulated `torch_npu` that are more than one call of torch's."""

import math

import pytest
import torch
from torch_npu import ops

pytestmark = pytest.mark.ascend

HEADS, SIZE, TOKENS = 4, 32, 50
SCALE = 1 / math.sqrt(SIZE)


@pytest.fixture(autouse=True)
def _drawn() -> None:
    torch.manual_seed(7)


def turned_in_place(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Pairs of neighbours as complex numbers: rope of DeepSeek on other devices."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)


def test_rope_of_a_latent_has_the_values_of_other_devices_in_another_order() -> None:
    """So scores are equal, and cells are not: `latent_of` in the namespace."""
    x, angles = torch.randn(TOKENS, SIZE), torch.rand(TOKENS, SIZE // 2) * 6
    cos, sin = (f(torch.cat((angles, angles), -1)) for f in (torch.cos, torch.sin))
    here, elsewhere = ops.npu_interleave_rope(x, cos, sin), turned_in_place(x, angles)
    assert not torch.allclose(here, elsewhere, atol=1e-2)
    in_order = torch.stack(here.chunk(2, -1), -1).flatten(-2)
    torch.testing.assert_close(in_order, elsewhere, atol=1e-5, rtol=0)
    torch.testing.assert_close(here @ here.T, elsewhere @ elsewhere.T, atol=1e-4, rtol=0)


def test_attention_to_parts_of_a_prompt_adds_up_to_the_whole() -> None:
    query = torch.randn(3, HEADS, SIZE)
    keys, values = torch.randn(2, TOKENS, HEADS, SIZE).unbind(0)

    def attend(start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        return ops.npu_fused_infer_attention_score(
            query,
            keys[start:stop],
            values[start:stop],
            actual_seq_lengths=[len(query)],
            actual_seq_lengths_kv=[stop - start],
            num_heads=HEADS,
            num_key_value_heads=HEADS,
            scale=SCALE,
        )

    parts = [attend(0, 20), attend(20, TOKENS)]
    sums = [each.flatten() for _, each in parts]
    answers = [each.flatten(0, 1) for each, _ in parts]
    both, _ = ops.npu_attention_update(sums, answers, 0)
    torch.testing.assert_close(both.view_as(query), attend(0, TOKENS)[0], atol=1e-5, rtol=0)


def test_rows_of_requests_come_out_of_their_pages() -> None:
    latents, ropes = torch.randn(6, 8, 1, 16), torch.randn(6, 8, 1, 4)
    tables = torch.tensor([[5, 1, 0], [2, 4, 3]])
    lengths, starts = torch.tensor([11, 6]), torch.tensor([2, 9])
    keys, values = torch.empty(17, 1, 16), torch.empty(17, 1, 4)
    ops.npu_paged_cache_load(
        latents, ropes, tables, lengths, seq_starts=starts, key=keys, value=values
    )
    for rows, pages in ((keys, latents), (values, ropes)):
        first, second = (pages[table].flatten(0, 1) for table in tables)
        assert rows.equal(torch.cat((first[2:13], second[9:15])))
