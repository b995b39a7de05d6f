"""The pool below the published `AscendMultiConnector`, which asks more of its children.

There, only one child may answer a finished request.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from tests.cache_tensors import tensors_of
from tests.support.models import LlamaShape, make_model

pytestmark = [
    pytest.mark.ascend,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning"),
]

P2P_ANSWER = {"do_remote_prefill": True, "remote_port": 20_001}
SHAPE = LlamaShape()


class AnsweringConnector(KVConnectorBase_V1, SupportsHMA):
    """A connector between two engines that answers requests addressed to it."""

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        asked = (request.kv_transfer_params or {}).get("do_remote_decode")
        return (True, dict(P2P_ANSWER)) if asked else (False, None)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Do nothing."""

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Do nothing."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing."""

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""

    def wait_for_save(self) -> None:
        """Do nothing."""


@pytest.fixture
def multi(tmp_path: Path) -> Iterator[Any]:
    """Return the scheduler's side, with a connector between engines before the pool's."""
    ours = {
        "kv_connector": "KVPoolConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"store": f"file://{tmp_path}/pool?size=64MiB"},
    }
    theirs = {
        "kv_connector": "AnsweringConnector",
        "kv_connector_module_path": __name__,
        "kv_role": "kv_both",
    }
    config = EngineArgs(
        model=str(make_model(tmp_path, SHAPE)),
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=True,
        kv_transfer_config={
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"connectors": [theirs, ours]},
        },
    ).create_engine_config()
    names = [f"model.layers.{i}.self_attn.attn" for i in range(SHAPE.layers)]
    spec = FullAttentionSpec(
        block_size=128,
        num_kv_heads=SHAPE.kv_heads,
        head_size=SHAPE.head_dim,
        dtype=torch.float32,
    )
    caches = KVCacheConfig(
        num_blocks=4,
        kv_cache_tensors=tensors_of(names),
        kv_cache_groups=[KVCacheGroupSpec(names, spec)],
    )
    made = KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, caches)
    assert type(made).__name__ == "AscendMultiConnector"
    yield made
    made.shutdown()


@pytest.mark.parametrize(
    ("params", "answer"),
    [
        (None, {"kvpool": {"tokens": 0}}),
        ({"kvpool": {"load": False}}, {"kvpool": {"tokens": 0}}),
        ({"do_remote_decode": True}, P2P_ANSWER),
    ],
)
def test_one_child_alone_answers_a_request(multi: Any, params: Any, answer: dict[str, Any]) -> None:
    sampling = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": params})
    asked = Request(
        request_id="r",
        prompt_token_ids=list(range(100)),
        sampling_params=sampling,
        pooling_params=None,
    )
    multi.on_new_request(asked)
    asked.status = asked.status.FINISHED_STOPPED
    _, answered = multi.request_finished_all_groups(asked, ([1, 2, 3],))
    assert answered == answer
