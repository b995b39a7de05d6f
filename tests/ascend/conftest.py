"""Fixtures of the Ascend tests: a stand-in device, and vLLM's real configuration objects."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.npu import FakeNpu
from vllm_kvpool.staging import devices

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs

    import vllm_kvpool.connector  # noqa: F401 - imported for its effect

from tests.support.models import LlamaShape, make_model

ND_FORMAT = 2
SHAPE = LlamaShape(kv_heads=4, layers=4)


@pytest.fixture
def npu() -> FakeNpu:
    """A card that the test's own thread, the model's, has entered."""
    fake = FakeNpu()
    fake.set_device("npu:0")
    return fake


@pytest.fixture
def device(npu: FakeNpu) -> devices.NpuDevice:
    """The seam over the stand-in; its pages are host tensors."""
    return devices.NpuDevice(torch.device("cpu"), npu, npu.pinned, lambda pages: ND_FORMAT)


@pytest.fixture
def on_npu(device: devices.NpuDevice, monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """`on_npu(True)`: engines made from now on take host tensors for an NPU's."""

    def switch(on: bool) -> None:
        makers = devices._MAKERS
        monkeypatch.setitem(
            makers, "cpu", (lambda _: device) if on else (lambda _: devices.HostDevice())
        )

    return switch


@pytest.fixture(scope="session")
def vllm_config(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., VllmConfig]:
    """`vllm_config(store, block, tp_size, rank)` of a tiny model."""
    directory = tmp_path_factory.mktemp("models")

    def build(store: Any, block: int = 32, tp_size: int = 1, rank: int = 0) -> VllmConfig:
        model = make_model(directory, SHAPE)
        extra = {"store": store, "chunk_tokens": 32, "staging_bytes": "2MiB"}
        config = EngineArgs(
            model=str(model),
            dtype="float32",
            skip_tokenizer_init=True,
            block_size=block,
            kv_transfer_config={
                "kv_connector": "KVPoolConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": extra,
            },
        ).create_engine_config()
        config.parallel_config.tensor_parallel_size = tp_size
        config.parallel_config.rank = rank
        return config

    return build
