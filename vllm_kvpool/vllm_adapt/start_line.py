"""What the start line of an engine says of its sharing, before the engine starts."""

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm_kvpool.config import pool_options, read_config
from vllm_kvpool.errors import ConfigError
from vllm_kvpool.vllm_adapt import compat
from vllm_kvpool.vllm_adapt.engine_config import refuse_options
from vllm_kvpool.vllm_adapt.identity.namespace import engine_namespace


class PlannedEngine(NamedTuple):
    """An engine that a start line describes."""

    model: str
    """As its namespace begins."""
    values: Mapping[str, Any]
    """Those behind its namespace, but for `kinds`: pages are known once the model is loaded."""
    warnings: tuple[str, ...]


class _EngineParser(FlexibleArgumentParser):
    """Ignores the options of the server."""

    def parse_known_args(
        self, args: Any = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        known, _ = super().parse_known_args(args, namespace)
        return known, []

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def engine_arguments(words: Sequence[str]) -> list[str]:
    """vLLM's options in `vllm serve MODEL …` or `python -m vllm.entrypoints.… --model MODEL …`;
    ConfigError for other words."""
    words = list(words)
    for i, word in enumerate(words):
        if word == "serve":
            rest = words[i + 1 :]
            return ["--model", *rest] if rest and not rest[0].startswith("-") else rest
        if word.startswith("-") and word != "-m":
            return words[i:]
    raise ConfigError(
        f"{' '.join(words)!r} is no start line; expected vllm serve MODEL, or "
        "python -m vllm.entrypoints.openai.api_server --model MODEL, with options"
    )


def read_start_line(words: Sequence[str]) -> PlannedEngine:
    """What an engine that is started so shares; ConfigError if it would not start.

    Reads the model's files and a sample of its weights; raises OSError.
    """
    given = engine_arguments(words)
    parser = EngineArgs.add_cli_args(_EngineParser())
    try:
        arguments = EngineArgs.from_cli_args(parser.parse_args(given))
        vllm_config = arguments.create_engine_config()
    except (ValueError, TypeError) as error:
        raise ConfigError(f"vLLM refuses it: {error}") from None
    transfer = vllm_config.kv_transfer_config
    options = None
    if transfer is not None:
        extra = transfer.kv_connector_extra_config or {}
        connector = {"kv_connector": transfer.kv_connector, "kv_connector_extra_config": extra}
        options = pool_options(json.dumps(connector))
    if options is None:
        raise ConfigError("it names no KVPoolConnector; add --kv-transfer-config")
    refuse_options(vllm_config)
    identity = engine_namespace(vllm_config, read_config(options), [], [])
    values = {name: value for name, value in identity.values.items() if name != "kinds"}
    warnings = tuple(defect.warning for defect in compat.known_defects(vllm_config))
    return PlannedEngine(identity.namespace.partition("@")[0], values, warnings)
