"""Beneath vLLM-Ascend's MultiConnector, which asks more of its children than vLLM's.

The stand-in repeats what `AscendMultiConnector` does at the commit docs/devices.md names: the
signature of its children, that all support several KV cache groups, the order in which it asks for
a hit, and that one child alone may answer a finished request.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
    supports_hma,
)
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.platforms import current_platform

from vllm_kvpool.config import read_config
from vllm_kvpool.connector import KVPoolConnector
from vllm_kvpool.errors import ConfigError
from vllm_kvpool.plugin import register
from vllm_kvpool.vllm_adapt import engine_config

from .test_sharing import Pool, cache_config

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

P2P_ANSWER = {"do_remote_prefill": True, "remote_port": 20_001}


class StandInP2P(KVConnectorBase_V1, SupportsHMA):
    """A connector between two engines; answers requests that speak to it."""

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        asked = (request.kv_transfer_params or {}).get("do_remote_decode")
        return (True, dict(P2P_ANSWER)) if asked else (False, None)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Nothing."""

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing."""

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        """Nothing."""

    def wait_for_save(self) -> None:
        """Nothing."""


class StandInAscendMulti(MultiConnector, SupportsHMA):
    """See the module docstring."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        assert all(supports_hma(child) for child in self._connectors)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        is_kept, answer = False, None
        for child in self._connectors:
            assert isinstance(child, SupportsHMA)
            kept, answered = child.request_finished_all_groups(request, block_ids)
            is_kept = is_kept or kept
            if answered is not None and answer is not None:
                raise RuntimeError("Only one connector can produce KV transfer params")
            answer = answered if answer is None else answer
        return is_kept, answer


@pytest.fixture
def multi(
    vllm_config: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., StandInAscendMulti]:
    """`multi(pool)`: the scheduler's side, with a connector between engines before ours."""
    register()

    def build(pool: Pool) -> StandInAscendMulti:
        config = vllm_config(pool.url)
        ours = {
            "kv_connector": "KVPoolConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": config.kv_transfer_config.kv_connector_extra_config,
        }
        theirs = {
            "kv_connector": "StandInP2P",
            "kv_connector_module_path": __name__,
            "kv_role": "kv_both",
        }
        config.kv_transfer_config.kv_connector = "MultiConnector"
        config.kv_transfer_config.kv_connector_extra_config = {"connectors": [theirs, ours]}
        made = StandInAscendMulti(config, KVConnectorRole.SCHEDULER, cache_config(4, 32))
        # For the rest of the test; stores were opened on the host.
        monkeypatch.setattr(type(current_platform), "device_type", "npu")
        return made

    return build


def request(name: str, params: dict[str, Any] | None) -> Any:
    """As much of vLLM's request as a finished one is asked for."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    sampling = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": params})
    made = Request(
        request_id=name,
        prompt_token_ids=list(range(100)),
        sampling_params=sampling,
        pooling_params=None,
    )
    return made


def test_ours_is_a_child_that_vllm_ascend_accepts() -> None:
    assert issubclass(KVPoolConnector, SupportsHMA)
    assert supports_hma(KVPoolConnector)


@pytest.mark.parametrize(
    ("params", "answer"),
    [
        (None, {"kvpool": {"tokens": 0}}),
        ({"kvpool": {"load": False}}, {"kvpool": {"tokens": 0}}),
        ({"do_remote_decode": True}, P2P_ANSWER),
    ],
)
def test_one_child_alone_answers_a_request(
    multi: Callable[..., StandInAscendMulti], params: Any, answer: dict[str, Any]
) -> None:
    pool = Pool()
    both = multi(pool)
    asked = request("r", params)
    both.on_new_request(asked)
    asked.status = asked.status.FINISHED_STOPPED
    _, answered = both.request_finished_all_groups(asked, ([1, 2, 3],))
    assert answered == answer
    both.shutdown()
    pool.shared.close()


def test_where_answers_are_merged_ours_is_never_kept_back(monkeypatch: pytest.MonkeyPatch) -> None:
    both = SimpleNamespace(kv_transfer_params={"do_remote_decode": True, "kvpool": {}})
    monkeypatch.setattr(engine_config.compat, "merges_answers", lambda: True)
    assert engine_config.may_answer(both)  # type: ignore[arg-type]
    monkeypatch.setattr(engine_config.compat, "merges_answers", lambda: False)
    assert not engine_config.may_answer(both)  # type: ignore[arg-type]
    assert engine_config.may_answer(SimpleNamespace(kv_transfer_params=None))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("prefill", "without knowing of each other"),
        ("decode_tp_size", "without knowing of each other"),
        ("prefill_pp_layer_partition", "without knowing of each other"),
        ("lookup_rpc_port", "no port"),
        ("backend", "protocol=ascend"),
        ("save_decode_cache", "save_decode"),
        ("connectors", "MultiConnector"),
    ],
)
def test_options_of_other_connectors_are_named(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        read_config({name: {"tp_size": 8}}, env={})
    assert name in str(error.value)
    assert "other connectors" in str(error.value)
