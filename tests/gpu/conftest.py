"""Places where the tests of GPU copiers run: Triton's interpreter or a GPU."""

import os
import zlib
from typing import TYPE_CHECKING, Any, Protocol

import pytest
import torch

from vllm_kvpool.layout.pages import LayerPages
from vllm_kvpool.staging.copier import Copier
from vllm_kvpool.staging.devices import Fence, device_for

if TYPE_CHECKING:
    from vllm_kvpool.staging.copy_triton import TritonCopier

BUFFER_BYTES = 64 << 10  # in the interpreter: larger than most calls of these tests


class Place(Protocol):
    """A device, or a stand-in for one."""

    device: torch.device

    def copier(self, layers: list[LayerPages], **options: Any) -> Copier: ...

    def wait_for_model(self) -> None:
        """Wait for all work of the model's stream, as the fence lane does."""


class Interpreter:
    """Kernels run on the host, all work as late as streams allow. `streams` are the last made."""

    device = torch.device("cpu")

    def __init__(self, seed: int) -> None:
        if os.environ.get("TRITON_INTERPRET") != "1":
            pytest.fail("needs TRITON_INTERPRET=1 and Triton; run `make test-triton`")
        from tests.support.late_streams import LateStreams

        self._new_streams = LateStreams
        self._seed = seed

    def copier(self, layers: list[LayerPages], **options: Any) -> Copier:
        from vllm_kvpool.staging.copy_triton import TritonCopier

        self._seed += 1
        self.streams = self._new_streams(self._seed)
        return TritonCopier(layers, self.streams, **{"buffer_bytes": BUFFER_BYTES, **options})

    def wait_for_model(self) -> None:
        self.streams.model_event().synchronize()


class Gpu:
    """The first GPU."""

    device = torch.device("cuda", 0)

    def copier(self, layers: list[LayerPages], **options: Any) -> "TritonCopier":
        from vllm_kvpool.staging.copy_triton import TritonCopier
        from vllm_kvpool.staging.cuda_streams import CudaStreams

        return TritonCopier(layers, CudaStreams(self.device), **options)

    def fence(self) -> Fence:
        """Return the fence that a plan takes with it."""
        fence = device_for(self.device).new_event()
        assert fence is not None
        return fence

    def wait_for_model(self) -> None:
        self.fence().synchronize()


@pytest.fixture
def interpreter(request: pytest.FixtureRequest) -> Interpreter:
    return Interpreter(zlib.crc32(request.node.name.encode()))


@pytest.fixture
def gpu() -> Gpu:
    return Gpu()


@pytest.fixture(
    params=[
        pytest.param("interpreter", marks=pytest.mark.triton),
        pytest.param("gpu", marks=pytest.mark.gpu),
    ]
)
def place(request: pytest.FixtureRequest) -> Place:
    found: Place = request.getfixturevalue(request.param)
    return found
