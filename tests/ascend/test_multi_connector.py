"""Requirements of vLLM-Ascend's MultiConnector on the connectors beneath it.

`tests/emulated_npu/test_multi_connector.py` runs the published class.
"""

from types import SimpleNamespace

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import SupportsHMA, supports_hma

from vllm_kvpool.config import read_config
from vllm_kvpool.connector import KVPoolConnector
from vllm_kvpool.errors import ConfigError
from vllm_kvpool.vllm_adapt import engine_config

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def test_ours_is_a_child_that_vllm_ascend_accepts() -> None:
    assert issubclass(KVPoolConnector, SupportsHMA)
    assert supports_hma(KVPoolConnector)


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
