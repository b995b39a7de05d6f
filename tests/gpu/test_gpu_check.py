"""The check of `kvpool doctor`: exact copies pass, and a wrong byte on either way does not."""

from collections.abc import Sequence

import pytest
import torch

from tests.gpu.conftest import Place
from vllm_kvpool.layout.pages import LayerPages, SlabMove
from vllm_kvpool.staging.copier import Copier
from vllm_kvpool.staging.copy_torch import TorchCopier
from vllm_kvpool.staging.gpu_check import check_gpus, copies_exactly

CPU = torch.device("cpu")


class SpoilingCopier(TorchCopier):
    """A copier that leaves out the last token of gathers or of scatters."""

    def __init__(self, layers: Sequence[LayerPages], spoiled: str) -> None:
        super().__init__(layers, CPU)
        self._spoiled = spoiled

    def gather(self, moves: Sequence[SlabMove]) -> None:
        super().gather(self._cut(moves) if self._spoiled == "gather" else moves)

    def scatter(self, moves: Sequence[SlabMove]) -> None:
        super().scatter(self._cut(moves) if self._spoiled == "scatter" else moves)

    def _cut(self, moves: Sequence[SlabMove]) -> list[SlabMove]:
        return [move._replace(token_stop=move.token_stop - 1) for move in moves]


@pytest.mark.parametrize(("spoiled", "exact"), [("", True), ("gather", False), ("scatter", False)])
def test_a_copy_that_is_not_exact_is_found(spoiled: str, exact: bool) -> None:
    assert copies_exactly(CPU, lambda layers: SpoilingCopier(layers, spoiled)) is exact


def test_the_kernels_copy_exactly(place: Place) -> None:
    def make(layers: Sequence[LayerPages]) -> Copier:
        return place.copier(list(layers))

    assert copies_exactly(place.device, make)


@pytest.mark.gpu
def test_each_gpu_is_checked_with_triton() -> None:
    found = list(check_gpus())
    assert len(found) == torch.cuda.device_count()
    assert {(each.copier, each.problem) for each in found} == {("Triton", "")}
