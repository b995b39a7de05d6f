"""Operators of the emulated `torch_npu` that are more than one call of torch's."""

import math
from collections.abc import Callable

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
    """Scores are equal and cells are not, so `latent_of` is part of the namespace."""
    x, angles = torch.randn(TOKENS, SIZE), torch.rand(TOKENS, SIZE // 2) * 6
    cos, sin = (f(torch.cat((angles, angles), -1)) for f in (torch.cos, torch.sin))
    here, elsewhere = ops.npu_interleave_rope(x, cos, sin), turned_in_place(x, angles)
    assert not torch.allclose(here, elsewhere, atol=1e-2)
    in_order = torch.stack(here.chunk(2, -1), -1).flatten(-2)
    torch.testing.assert_close(in_order, elsewhere, atol=1e-5, rtol=0)
    torch.testing.assert_close(here @ here.T, elsewhere @ elsewhere.T, atol=1e-4, rtol=0)


def test_fast_gelu_is_that_of_its_documentation() -> None:
    x = torch.randn(TOKENS, SIZE)
    size = x.abs()
    documented = x / (1 + (-1.702 * size).exp()) * (0.851 * (x - size)).exp()
    torch.testing.assert_close(ops.npu_fast_gelu(x), documented)


def test_rope_by_halves_turns_as_on_other_devices() -> None:
    x, angles = torch.randn(TOKENS, SIZE), torch.rand(TOKENS, SIZE // 2) * 6
    cos, sin = (f(torch.cat((angles, angles), -1)) for f in (torch.cos, torch.sin))
    halves = torch.stack(x.chunk(2, -1), -1).flatten(-2)
    turned = torch.cat(turned_in_place(halves, angles).unflatten(-1, (-1, 2)).unbind(-1), -1)
    torch.testing.assert_close(ops.npu_rotary_mul(x, cos, sin), turned, atol=1e-5, rtol=0)


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


@pytest.mark.parametrize(
    ("load", "starts_at"),
    [(ops.npu_paged_cache_load, "seq_starts"), (ops.npu_gather_pa_kv_cache, "seq_offset")],
    ids=["0.23.0", "0.26.0rc1"],
)
def test_rows_of_requests_come_out_of_their_pages(
    load: Callable[..., None], starts_at: str
) -> None:
    latents, ropes = torch.randn(6, 8, 1, 16), torch.randn(6, 8, 1, 4)
    tables = torch.tensor([[5, 1, 0], [2, 4, 3]])
    lengths, starts = torch.tensor([11, 6]), torch.tensor([2, 9])
    keys, values = torch.empty(17, 1, 16), torch.empty(17, 1, 4)
    load(latents, ropes, tables, lengths, **{starts_at: starts}, key=keys, value=values)
    for rows, pages in ((keys, latents), (values, ropes)):
        first, second = (pages[table].flatten(0, 1) for table in tables)
        assert rows.equal(torch.cat((first[2:13], second[9:15])))


@pytest.mark.parametrize("write", [ops._npu_reshape_and_cache, ops.npu_scatter_pa_kv_cache])
def test_rows_of_tokens_are_written_to_their_slots_and_padding_nowhere(
    write: Callable[..., None],
) -> None:
    keys, values = torch.randn(2, 4, HEADS, SIZE).unbind(0)
    key_pages, value_pages = torch.zeros(2, 3, 8, HEADS, SIZE).unbind(0)
    slots = torch.tensor([9, 0, -1, 17], dtype=torch.int32)
    write(keys, values, key_pages, value_pages, slots)
    for rows, pages in ((keys, key_pages), (values, value_pages)):
        flat = pages.flatten(0, 1)
        assert flat[[9, 0, 17]].equal(rows[[0, 1, 3]])
        assert flat.count_nonzero() == 3 * HEADS * SIZE


def test_slots_are_those_of_both_releases_kernels() -> None:
    """0.26.0rc1 passes sizes of kernel blocks besides."""
    starts, positions = torch.tensor([0, 3, 5]), torch.tensor([6, 7, 8, 0, 1])
    tables = torch.tensor([[4, 2], [1, 0]])
    padding = 2
    for sizes in ({}, {"KV_CACHE_BLOCK_SIZE": 16, "BLOCKS_PER_KV_BLOCK": 2, "TOTAL_CP_RANK": 0}):
        slots = torch.zeros(len(positions) + padding, dtype=torch.int32)
        ops.slot_mapping[(3,)](
            *(len(positions), len(slots), starts, positions, tables, tables.stride(0), 8, slots),
            **{"TOTAL_CP_WORLD_SIZE": 1, "PAD_ID": -1, "TILE_BLOCK_SIZE": 1024, **sizes},
        )
        assert slots.tolist() == [38, 39, 16, 8, 9, -1, -1]
