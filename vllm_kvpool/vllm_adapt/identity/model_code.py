"""Code outside vLLM that computes a model: general plugins, and classes registered with vLLM.

A plugin may replace any part of vLLM, so each counts by name and version, but for those of a table.
The class of a model counts by the source of its package, since users register classes without a
plugin, too, and work on them under one version. Models that transformers computes count by its
release.
"""

import hashlib
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint, entry_points, version
from pathlib import Path
from typing import Any

from vllm_kvpool.config import environment

GROUP = "vllm.general_plugins"
DIGEST_BYTES = 16

PACKAGES_LEFT_OUT = {
    "vllm": "its releases share; its plugins find LoRA adapters, which count by content",
    "vllm_kvpool": "connectors move KV and change none",
    "vllm_ascend": "runs vLLM on NPUs, as vLLM itself does on other devices",
}
"""Packages whose general plugins and models do not count."""


def code_outside_vllm(model: Any) -> dict[str, Any]:
    """The plugins, the release of transformers, and the model's class that count; empty where all
    is vLLM's. `model`: vLLM's configuration of it."""
    code: dict[str, Any] = {}
    if plugins := sorted(_version_of(each) for each in _loaded_plugins()):
        code["plugins"] = plugins
    if model.using_transformers_backend():
        code["transformers"] = version("transformers")
    name = _class_of(model)
    if name and _package_of(name) not in PACKAGES_LEFT_OUT:
        code["model"] = {"class": name, "source": _source_digest(_package_of(name))}
    return code


def _loaded_plugins() -> Iterator[EntryPoint]:
    """By vLLM's rule: all that are installed, or those that VLLM_PLUGINS names."""
    named = environment().get("VLLM_PLUGINS")
    for each in entry_points(group=GROUP):
        is_loaded = named is None or each.name in named.split(",")
        if is_loaded and _package_of(each.value) not in PACKAGES_LEFT_OUT:
            yield each


def _version_of(plugin: EntryPoint) -> str:
    version = plugin.dist.version if plugin.dist is not None else ""
    return f"{plugin.name} {plugin.value} {version}"


def _package_of(name: str) -> str:
    return name.partition(":")[0].partition(".")[0]


def _class_of(model: Any) -> str:
    """Module and class of what is registered for the model's architecture; "" if nothing is."""
    from vllm.model_executor.models import ModelRegistry

    registered = ModelRegistry.models.get(model.architecture)
    if registered is None:
        return ""
    if hasattr(registered, "model_cls"):
        return f"{registered.model_cls.__module__}:{registered.model_cls.__qualname__}"
    return f"{registered.module_name}:{registered.class_name}"


def _source_digest(package: str) -> str:
    """A digest of the Python files of an imported package or script; "" if there are none."""
    module = sys.modules.get(package)
    folders = [Path(each) for each in getattr(module, "__path__", ())]
    files = [(path.relative_to(f), path) for f in folders for path in f.rglob("*.py")]
    if not folders and (file := getattr(module, "__file__", None)):
        files = [(Path(Path(file).name), Path(file))]
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for name, path in sorted(files):
        content = path.read_bytes()
        digest.update(f"{name}:{len(content)}\n".encode() + content)
    return digest.hexdigest() if files else ""
