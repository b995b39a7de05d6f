"""Engines that accept media without pixels. A step that also lacks embeddings ends an engine."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs

from tests.support.models import LlavaShape, make_model
from vllm_kvpool.plugin import register

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.skipif(
        not hasattr(VllmConfig, "_resolve_mm_embedding_inputs"),
        reason="this vLLM takes none from anybody",
    ),
]

POOL = {"kv_connector": "KVPoolConnector"}
CHILDREN = {"connectors": [POOL | {"kv_role": "kv_both"}]}
EC = {"ec_connector": "KVPoolECConnector"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models"), LlavaShape())


@pytest.mark.parametrize(
    ("arguments", "allowed"),
    [
        ({}, False),
        ({"kv_transfer_config": POOL | {"kv_role": "kv_both"}}, False),
        ({"kv_transfer_config": POOL | {"kv_role": "kv_producer"}}, False),
        # An engine that only loads leaves prompts, and so pixels, to the engines that save.
        ({"kv_transfer_config": POOL | {"kv_role": "kv_consumer"}}, True),
        (
            {
                "kv_transfer_config": POOL | {"kv_role": "kv_both"},
                "ec_transfer_config": EC | {"ec_role": "ec_consumer"},
            },
            True,
        ),
        # vLLM's own decision stays where other connectors load.
        ({"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}}, True),
        (
            {
                "kv_transfer_config": {
                    "kv_connector": "MultiConnector",
                    "kv_role": "kv_both",
                    "kv_connector_extra_config": CHILDREN,
                }
            },
            True,
        ),
    ],
)
def test_missing_embeddings_are_allowed_where_another_engine_is_to_bring_them(
    model: Path, arguments: Mapping[str, Any], allowed: bool
) -> None:
    register()
    config = EngineArgs(model=str(model), **arguments).create_engine_config()
    media = config.model_config.multimodal_config
    assert media is not None
    assert media.allow_missing_mm_embeddings is allowed
    assert media.enable_mm_embeds is allowed
    if transfer := arguments.get("kv_transfer_config"):
        assert config.kv_transfer_config.kv_connector == transfer["kv_connector"]


def test_embeddings_that_are_asked_for_are_taken_whole(model: Path) -> None:
    config = EngineArgs(
        model=str(model),
        enable_mm_embeds=True,
        kv_transfer_config=POOL | {"kv_role": "kv_both"},
    ).create_engine_config()
    media = config.model_config.multimodal_config
    assert media is not None
    assert (media.enable_mm_embeds, media.allow_missing_mm_embeddings) == (True, False)
