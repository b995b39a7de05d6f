"""Code outside vLLM that computes a model: plugins, and classes of models and workers.

A plugin may replace any part of vLLM, so each counts by name and version, but for those of a table.
A model's class counts by the source of its package, since users register classes without a plugin,
too, and work on them under one version; whatever its architecture, since models consist of others.

Code in development (an editable install, a folder on the path) counts by its source. Its imports
outside Python and vLLM count, too: code in development by its source, releases by their version.
Imports of a release are not followed. Nothing is imported for that. Models that transformers
computes count by its release.
"""

import ast
import hashlib
import os
import re
import sys
from collections.abc import Iterable, Iterator, Set
from importlib.metadata import (
    EntryPoint,
    distribution,
    entry_points,
    packages_distributions,
    requires,
    version,
)
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vllm_kvpool.config import environment
from vllm_kvpool.vllm_adapt import compat
from vllm_kvpool.vllm_adapt.identity.factors import UnstableValueError

GROUP = "vllm.general_plugins"
DIGEST_BYTES = 16
SOURCE_SUFFIXES = (".py", ".so")
_NAME = re.compile(r"[\w.-]+")  # at the beginning of a requirement

PACKAGES_LEFT_OUT = {
    "vllm": "its releases share; its plugins find LoRA adapters, which count by content",
    "vllm_kvpool": "connectors move KV and change none",
    "vllm_ascend": "runs vLLM on NPUs, as vLLM itself does on other devices",
}
"""Packages whose general plugins and models do not count."""


# Options of vLLM's ParallelConfig that name a class, which may do anything to the model it runs.
_NAMES_OF_WORKERS = ("worker_cls", "worker_extension_cls", "distributed_executor_backend")


def code_outside_vllm(model: Any, parallel: Any) -> dict[str, Any]:
    """Return the plugins, the release of transformers, the classes and the source that count.

    The result is empty where all is vLLM's. `model`, `parallel`: vLLM's configurations.

    Raises OSError, and UnstableValueError if the source of a class is not found.
    """
    code: dict[str, Any] = {}
    plugins = list(_loaded_plugins())
    if plugins:
        code["plugins"] = sorted(map(_version_of, plugins))
    if model.using_transformers_backend():
        code["transformers"] = version("transformers")
    if classes := _registered_classes(model):
        code["classes"] = classes
    if workers := _classes_of_workers(parallel):
        code["workers"] = workers
    of_classes = {_package_of(name) for name in classes.values()}
    of_workers = {_package_of(name) for name in workers.values()}
    of_plugins = {_package_of(each.value) for each in plugins}
    if sources := _sources(of_classes, of_plugins, of_workers):
        code["sources"] = sources
    return code


def source_files(folder: Path) -> dict[str, Path]:
    """Return the Python files and compiled modules below a folder, by their path from it."""
    found: dict[str, Path] = {}
    seen = set()
    for here, folders, names in os.walk(folder, followlinks=True):
        folders.sort()  # of two links to one folder always the same is followed
        if os.path.realpath(here) in seen:
            folders.clear()
            continue
        seen.add(os.path.realpath(here))
        paths = (Path(here, name) for name in names if name.endswith(SOURCE_SUFFIXES))
        found |= {path.relative_to(folder).as_posix(): path for path in paths}
    return found


def _loaded_plugins() -> Iterator[EntryPoint]:
    """Return the plugins by vLLM's rule: all installed ones, or those that VLLM_PLUGINS names."""
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


def _registered_classes(model: Any) -> dict[str, str]:
    """Return the module and class of what is registered from outside vLLM, by architecture."""
    from vllm.model_executor.models import ModelRegistry

    named = {
        architecture: f"{each.model_cls.__module__}:{each.model_cls.__qualname__}"
        if hasattr(each, "model_cls")
        else f"{each.module_name}:{each.class_name}"
        for architecture, each in ModelRegistry.models.items()
    }
    named |= compat.model_class_overrides(model)  # which ranks register once they need them
    return {a: name for a, name in named.items() if _package_of(name) not in PACKAGES_LEFT_OUT}


def _classes_of_workers(parallel: Any) -> dict[str, str]:
    """Return the classes from outside vLLM that run a model, by the option that names them."""
    named = {option: getattr(parallel, option) for option in _NAMES_OF_WORKERS}
    classes = {
        option: f"{each.__module__}.{each.__qualname__}" if isinstance(each, type) else str(each)
        for option, each in named.items()
    }
    return {
        option: name
        for option, name in classes.items()
        # Other values are names of vLLM's own.
        if "." in name and _package_of(name) not in PACKAGES_LEFT_OUT
    }


def _sources(classes: Set[str], plugins: Set[str], workers: Set[str]) -> dict[str, str]:
    """Return digests of packages of classes and of code in development, and versions of others.

    The others are what these packages import, and workers. Plugins that are releases count by their
    version already.
    """
    waiting = [*classes, *plugins, *workers]
    if not waiting:
        return {}
    releases = packages_distributions()
    needed = [each for name in releases.get("vllm", ()) for each in requires(name) or ()]
    known = {_canonical(match[0]) for each in needed if (match := _NAME.match(each))}
    found: dict[str, str] = {}
    while waiting:
        package = waiting.pop()
        names = {_canonical(name) for name in releases.get(package, ())}
        is_known = package in PACKAGES_LEFT_OUT.keys() | sys.stdlib_module_names
        if package in found or (package not in classes and (is_known or names & known)):
            continue
        places = _places_of(package)
        release = _release_of(places, names)
        if package in classes or (places and not release):
            files = sorted(each for place in places for each in _files_of(place).items())
            if not files:
                raise UnstableValueError(f"the source of the package {package} is not found")
            found[package] = _digest(files)
            waiting.extend({name for _, path in files for name in _imports(path)})
        elif release and package not in plugins:
            found[package] = release
    return found


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _places_of(package: str) -> list[Path]:
    """Return the folders of a package, or the file of a module or script.

    The result is empty if there is none.
    """
    module = sys.modules.get(package)
    spec = getattr(module, "__spec__", None) or (find_spec(package) if module is None else None)
    file = getattr(module, "__file__", None) or getattr(spec, "origin", None)
    folders = getattr(module, "__path__", None) or getattr(spec, "submodule_search_locations", None)
    places = map(Path, folders if folders is not None else [file] if file else [])
    return [path for path in places if path.exists()]


def _files_of(place: Path) -> dict[str, Path]:
    return source_files(place) if place.is_dir() else {place.name: place}


def _release_of(places: list[Path], names: Iterable[str]) -> str:
    """Return the releases that have brought a package here; "" if it is in development."""
    found = []
    for name in sorted(names):
        of = distribution(name)
        if of.read_text("RECORD") is None:  # the folder of a source
            continue
        tops = {each.parts[0] for each in of.files or ()}
        own = {Path(str(of.locate_file(top))).resolve() for top in tops}
        if not own.isdisjoint(place.resolve() for place in places):
            found.append(f"{name} {of.version}")
    return ", ".join(found)


def _digest(files: Iterable[tuple[str, Path]]) -> str:
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for name, path in files:
        content = path.read_bytes()
        digest.update(f"{name}:{len(content)}\n".encode() + content)
    return digest.hexdigest()


def _imports(path: Path) -> Iterator[str]:
    """Yield the packages that a file imports anywhere; nothing of what is no source."""
    if path.suffix != ".py":
        return
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (_package_of(each.name) for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield _package_of(node.module)
