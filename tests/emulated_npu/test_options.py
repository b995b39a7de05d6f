"""The options of vLLM-Ascend: what its published wheel reads, and what its platform writes."""

import ast
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import vllm_ascend
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm_ascend import envs

from tests.support.ascend_options import (
    OPTIONS,
    VARIABLES,
    VARIABLES_OF_NO_OPTION,
    written_by_platform,
    written_for_producers,
)
from tests.support.models import LlamaShape, Qwen3NextShape, make_model
from vllm_kvpool.config import read_config
from vllm_kvpool.errors import ConfigError
from vllm_kvpool.vllm_adapt import ascend, compat
from vllm_kvpool.vllm_adapt.identity.namespace import engine_namespace
from vllm_kvpool.vllm_adapt.kv_cache_specs.state_specs import check_engine

pytestmark = [
    pytest.mark.ascend,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning"),
]

RELEASE = version("vllm-ascend")
HOLDER = "additional_config"
PREFILL = {"enable_shared_expert_dp": True}
DECODE = {"recompute_scheduler_enable": True, "multistream_overlap_shared_expert": True}
DECODE_IN_SECTION = {"scheduler_config": {"recompute_scheduler_enable": True}}  # since 0.26.0rc1


def read_by(tree: ast.AST) -> Iterator[Any]:
    """Return the names that a module reads from `additional_config`, in any of four ways."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called.endswith((f"{HOLDER}.get", f"{HOLDER}.setdefault")):
                yield node.args[0]
            elif called.endswith("_get_config_value"):
                yield from (each for each in node.args if isinstance(each, ast.Constant))
        elif isinstance(node, ast.Compare) and ast.unparse(node.comparators[0]).endswith(HOLDER):
            yield node.left
        elif isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith(HOLDER):
            yield node.slice


def test_the_table_has_the_options_that_the_wheel_reads() -> None:
    found = set()
    for path in Path(vllm_ascend.__file__).parent.rglob("*.py"):
        text = path.read_text()
        if HOLDER in text:
            nodes = [each for each in read_by(ast.parse(text)) if isinstance(each, ast.Constant)]
            found |= {each.value for each in nodes if isinstance(each.value, str)}
    assert {name for name in found if not name.isupper()} == OPTIONS[RELEASE]


def test_the_table_has_the_variables_that_stand_for_options() -> None:
    named = {name for name in envs.env_variables if name.startswith("VLLM_ASCEND_")}
    known = VARIABLES[RELEASE] | VARIABLES_OF_NO_OPTION[RELEASE]
    assert named | {"MSMONITOR_USE_DAEMON"} == known


def configured(
    model: Path, role: str, eager: bool, additional: dict[str, Any], **transfer: Any
) -> VllmConfig:
    return EngineArgs(
        model=str(model),
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=eager,
        additional_config=additional,
        kv_transfer_config={"kv_connector": "KVPoolConnector", "kv_role": role, **transfer},
    ).create_engine_config()


def test_what_the_platform_writes_is_in_the_table_and_keeps_no_engines_apart(
    tmp_path: Path,
) -> None:
    """An eager producer and a consumer with graphs, as the platform itself configures them."""
    model = make_model(tmp_path, LlamaShape())
    asked = PREFILL | {"recompute_scheduler_enable": True}
    producer = configured(model, "kv_producer", True, dict(asked))
    consumer = configured(model, "kv_consumer", False, dict(DECODE))
    assert compat.device_type() == "npu"
    eager, graphs = (dict(written_by_platform(RELEASE, graphs=each)) for each in (False, True))
    assert producer.additional_config == asked | written_for_producers(RELEASE) | eager
    written = consumer.additional_config
    assert {name: written[name] for name in graphs} in (eager, graphs)
    engines = [producer, consumer]
    if "scheduler_config" in OPTIONS[RELEASE]:
        engines.append(configured(model, "kv_consumer", False, dict(DECODE_IN_SECTION)))
    names = {engine_namespace(each, read_config({}, env={}), [], []).namespace for each in engines}
    assert len(names) == 1


def test_models_with_recurrent_states_are_refused_by_name(tmp_path: Path) -> None:
    """By vLLM-Ascend, if they are asked to compute what cannot be loaded; else by the pool."""
    model = make_model(tmp_path, Qwen3NextShape())
    with pytest.raises(Exception, match="Hybrid models do not support recompute"):
        configured(model, "kv_both", True, {}, kv_load_failure_policy="recompute")
    with pytest.raises(ConfigError, match="not shared from Ascend NPUs"):
        check_engine(configured(model, "kv_both", True, {}))


def test_the_generation_is_that_of_the_wheel() -> None:
    assert ascend.generation() == "A2"
