"""The sharing of an engine by its start line, before the engine starts."""

import json
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from vllm import envs
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm_kvpool.config import read_engine_config
from vllm_kvpool.errors import ConfigError
from vllm_kvpool.vllm_adapt import compat
from vllm_kvpool.vllm_adapt.engine_config import refuse_layerwise_options, refuse_options
from vllm_kvpool.vllm_adapt.identity.namespace import engine_namespace


class PlannedEngine(NamedTuple):
    """An engine that a start line describes."""

    model: str
    """The model's name, as in the namespace."""
    values: Mapping[str, Any]
    """Values behind the namespace, but for `kinds`: pages are known once the model is loaded."""
    warnings: tuple[str, ...]


class _Parser(FlexibleArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def models_of(arguments: Sequence[str]) -> list[str]:
    """Return the models that vLLM asks Hugging Face's hub for; ConfigError for a wrong line."""
    given = _parsed(arguments)
    named = [given.model, (given.speculative_config or {}).get("model")]
    return [
        name
        for name in named
        if name and not (envs.VLLM_USE_MODELSCOPE or "://" in name or Path(name).exists())
    ]


def _parsed(arguments: Sequence[str]) -> Namespace:
    parser = compat.add_server_options(_Parser(add_help=False))
    try:
        given: Namespace = parser.parse_args(list(arguments))
    except (ValueError, TypeError) as error:
        raise ConfigError(f"vLLM refuses it: {error}") from None
    given.model = given.model_tag or given.model  # the former without an option, as of vllm serve
    return given


def read_start_line(arguments: Sequence[str]) -> PlannedEngine:
    """Return the sharing of an engine with these options; ConfigError if it would not start.

    Reads the model's files and a sample of its weights; raises OSError.
    """
    parsed = _parsed(arguments)
    try:
        vllm_config = EngineArgs.from_cli_args(parsed).create_engine_config()
    except (ValueError, TypeError) as error:
        raise ConfigError(f"vLLM refuses it: {error}") from None
    transfer = vllm_config.kv_transfer_config
    connector = (
        {}
        if transfer is None
        else {
            "kv_connector": transfer.kv_connector,
            "kv_role": transfer.kv_role,
            "kv_connector_extra_config": transfer.kv_connector_extra_config or {},
        }
    )
    config = read_engine_config(json.dumps(connector))
    refuse_options(vllm_config)
    if config.layerwise:
        refuse_layerwise_options(vllm_config)
    identity = engine_namespace(vllm_config, config, [], [])
    values = {name: value for name, value in identity.values.items() if name != "kinds"}
    warnings = tuple(defect.warning for defect in compat.known_defects(vllm_config))
    return PlannedEngine(identity.namespace.partition("@")[0], values, warnings)
