"""Notices when the weights of a running engine change, and why vLLM resets its caches.

vLLM tells connectors neither. So the engine's methods through which users reach the weights are
wrapped, once in a process. Any call that is not in `HARMLESS` counts as a change, even if it fails.

In an engine within the trainer's process, a training loop may set weights without a call. So
`load_weights` of its models is wrapped, too, and a few bytes of each parameter are compared
whenever the engine's prefix cache is reset (`Models`). An update that spares them is not noticed.

vLLM also resets connectors when it pauses or sleeps; `is_pausing` tells this from a user's reset.
"""

import contextlib
import functools
import hashlib
import logging
import os
import secrets
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar
from weakref import WeakKeyDictionary, WeakSet

import torch

from vllm_kvpool.identity.weights import FileState, adapter_stamp, sample_weights, tensor_shapes
from vllm_kvpool.vllm_adapt.compat import callers
from vllm_kvpool.vllm_adapt.identity.factors import digest_of
from vllm_kvpool.vllm_adapt.weight_sources import (
    WeightSources,
    local_directory,
    sample_at_start,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger(__name__)

BYTES_OF_EACH = 64  # of a parameter
ITEMS_OF_EACH = 8  # in every dimension, where a parameter is not in one piece
MAX_ADAPTERS = 4096


class Models:
    """The models of this process. Scheduler's thread, which is the model's where both matter."""

    def __init__(self, on_load: Callable[[], None], is_asleep: Callable[[], bool]) -> None:
        self._on_load = on_load
        self._is_asleep = is_asleep  # then their memory must not be read
        self._seen: WeakKeyDictionary[Any, bytes] = WeakKeyDictionary()

    def watch_callers(self) -> None:
        """Watch the model of the worker that calls.

        The model is found up the stack, since vLLM gives connectors no reference to it.
        """
        for owner in callers():
            get_model = getattr(owner, "get_model", None)
            model = get_model() if get_model is not None else None
            if isinstance(model, torch.nn.Module):
                self._watch(model)
                return

    def have_changed(self) -> bool:
        """Return True if any parameter has changed since the last look."""
        before = dict(self._seen)
        self.resample()
        return any(seen != before[model] for model, seen in self._seen.items() if model in before)

    def resample(self) -> None:
        """Remember samples of the parameters."""
        if not self._is_asleep():
            for model in list(self._seen):
                self._seen[model] = _sample(model)

    def _watch(self, model: torch.nn.Module) -> None:
        self._seen[model] = _sample(model)
        load = getattr(model, "load_weights", None)
        if load is None or hasattr(load, MARK):
            return

        @functools.wraps(load)
        def load_weights(*args: Any, **kwargs: Any) -> Any:
            try:
                return load(*args, **kwargs)
            finally:
                self._on_load()

        setattr(load_weights, MARK, True)
        model.__dict__["load_weights"] = load_weights  # beside its parameters, not among them


def _sample(model: torch.nn.Module) -> bytes:
    """Return a digest of a few bytes of every parameter."""
    digest = hashlib.blake2b(digest_size=16)
    for parameter in model.parameters():
        if parameter.numel() and not parameter.is_meta:
            digest.update(_some_bytes(parameter.detach()).cpu().numpy().tobytes())
    return digest.digest()


def _some_bytes(data: torch.Tensor) -> torch.Tensor:
    """Return bytes at about equal distances; `data` may be part of a larger storage."""
    item = data.element_size()
    span = 1 + sum((n - 1) * s for n, s in zip(data.shape, data.stride(), strict=True))
    if span != data.numel():  # with gaps
        steps = (slice(None, None, _step(n, ITEMS_OF_EACH)) for n in data.shape)
        return data[tuple(steps)].flatten().view(torch.uint8)
    whole = torch.empty(0, dtype=torch.uint8, device=data.device)
    whole.set_(data.untyped_storage(), data.storage_offset() * item, (span * item,), (1,))
    return whole[:: _step(span * item, BYTES_OF_EACH)][: BYTES_OF_EACH * 2]


def _step(count: int, wanted: int) -> int:
    """Return an odd step, so that not only the elements' first bytes are met."""
    return max(1, count // wanted) | 1


VERSION_BYTES = 16
SLEEP_WITHOUT_WEIGHTS = 2  # vLLM's level from which on weights are discarded
MARK = "_kvpool_watches"

W = TypeVar("W")  # a watcher

# Calls to all workers that do not change the weights. Any other name, and any function, may.
HARMLESS = frozenset(
    (
        *("add_lora", "check_health", "compute_weight_checksums", "determine_available_memory"),
        *("execute_dummy_batch", "get_cache_block_size_bytes", "get_model_inspection"),
        *("get_supported_tasks", "init_weight_transfer_engine", "list_loras", "pin_lora"),
        *("profile", "release_late_interaction_query_cache", "remove_lora", "reset_encoder_cache"),
        *("reset_mm_cache", "save_sharded_state", "shutdown_weight_transfer_engine"),
        *("supports_draft_weight_updates", "synchronize_device", "update_max_model_len"),
    )
)


class Watcher(Protocol):
    """Notified of changes of the weights."""

    def weights_changed(self, weights_version: str) -> None:
        """Take the new version of the weights, that of files or random."""


class Model(NamedTuple):
    """A watcher's model, and its weights when it began."""

    config: Any
    sources: WeightSources
    weights_version: str
    tensors: frozenset[tuple[int, str]]


class CacheWatcher(Protocol):
    """Notified of resets of an engine's encoder cache."""

    def encoder_cache_was_reset(self) -> None:
        """Take note that the encoder cache was emptied, on the thread that did it."""


class AdapterWatcher(Protocol):
    """Notified of the adapters that an engine is told to load or to remove."""

    def adapter_loaded(self, adapter_id: int, path: str, *, in_place: bool) -> None:
        """Take note of a load of the adapter; `in_place`: over the one of that id."""

    def adapter_removed(self, adapter_id: int) -> None:
        """Take note that the engine was told to remove the adapter."""


_adapter_watchers: "WeakKeyDictionary[AdapterWatcher, Any]" = WeakKeyDictionary()
_cache_watchers: "WeakKeyDictionary[CacheWatcher, Any]" = WeakKeyDictionary()
_watchers: "WeakKeyDictionary[Watcher, Model]" = WeakKeyDictionary()
_slept: "WeakSet[Any]" = WeakSet()  # engines that were told to sleep, at any time
_reloaded: "WeakKeyDictionary[Any, WeightSources | None]" = WeakKeyDictionary()
"""Sources of engines' weights since a reload; None: not known."""
_adapters: dict[tuple[int, str], tuple[FileState, ...]] = {}
"""By id and path: the state of the files of adapters that an engine loaded before any request."""
_num_pauses = 0


def watch(watcher: Watcher, vllm_config: "VllmConfig") -> None:
    """Notify `watcher` of every change from now on, on the thread that makes it.

    A process may have several engines.
    """
    sources = WeightSources.of(vllm_config)
    version = version_of_files(sources, sample_at_start)
    _watchers[watcher] = Model(vllm_config.model_config, sources, version, _tensors_of(sources))


def watch_encoder_cache(watcher: CacheWatcher, config: Any) -> None:
    """Notify `watcher` of every reset of its engine's encoder cache, after the reset.

    `config` is vLLM's configuration of the model.
    """
    _cache_watchers[watcher] = config


def watch_adapters(watcher: AdapterWatcher, config: Any) -> None:
    """Notify `watcher` of its engine's adapters, after each call. `config`: vLLM's of the model."""
    _adapter_watchers[watcher] = config


def adapter_as_loaded(adapter_id: int, path: str) -> tuple[FileState, ...] | None:
    """Return `adapter_stamp` from when an engine was told to load an adapter, or None."""
    return _adapters.get((adapter_id, path))


def is_pausing() -> bool:
    """Return True if vLLM resets its caches now because it pauses or goes to sleep."""
    return _num_pauses > 0


def version_of_files(
    sources: WeightSources, sample: Callable[[Path], str | None] = sample_weights
) -> str:
    """Return the version of weights that are read from files now; random if one is not local.

    With `sample_at_start`, of those that an engine starts with.
    """
    try:
        sampled = [sample(path) for path in sources.places() or ()]
    except OSError:
        return _drawn()
    if not sampled or None in sampled:
        return _drawn()
    own, *parts = map(str, sampled)
    return f"sample:{own if not parts else digest_of('.'.join((own, *parts)).encode())}"


def _tensors_of(sources: WeightSources) -> frozenset[tuple[int, str]]:
    """Return the names of the tensors in each place."""
    try:
        places = enumerate(sources.places() or ())
        return frozenset((i, name) for i, path in places for name in tensor_shapes(path))
    except OSError:
        return frozenset()


def _model_of(config: Any) -> Model | None:
    return next((model for model in _watchers.values() if model.config is config), None)


def _version_of_all(config: Any, sources: WeightSources) -> str | None:
    """Return the version of weights that all come from these files; None if some may be kept."""
    weights_version = version_of_files(sources)
    first = _model_of(config)
    if first is None or weights_version == first.weights_version:
        return weights_version
    return weights_version if first.tensors and first.tensors <= _tensors_of(sources) else None


def _drawn() -> str:
    return f"drawn:{secrets.token_hex(VERSION_BYTES)}"


def notify(why: str, weights_version: str | None = None, config: object = None) -> None:
    """Notify watchers that the weights of a model have changed.

    Engines get the same version only if they are known to have the same weights.
    """
    known = [watcher for watcher, model in _watchers.items() if model.config is config]
    told = known or list(_watchers)
    if len(told) == len(_watchers):
        models.resample()  # else other watchers would miss changes that it finds
    for watcher in told:
        logger.info("kvpool: the weights have changed (%s); cells saved before are not used", why)
        watcher.weights_changed(
            weights_version if known and weights_version is not None else _drawn()
        )


def own_cache_was_reset() -> None:
    """Notify watchers if parameters have changed, as vLLM resets an engine's own prefix cache."""
    if models.have_changed():
        notify("parameters were set")


def _weights_sleep() -> bool:
    return any("weights" in core.model_executor.sleeping_tags for core in _slept)


models = Models(on_load=lambda: notify("load_weights"), is_asleep=_weights_sleep)


def install() -> None:
    """Wrap the methods of vLLM's engine, if this process has one; a second call does nothing."""
    module = sys.modules.get("vllm.v1.engine.core")
    core = getattr(module, "EngineCore", None)
    for name, around in _AROUND.items() if core is not None else ():
        _wrap(core, name, around)


def _wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace a method by `around(method, self, ...)`, if there is such a method."""
    method = getattr(owner, name, None)
    if method is None or hasattr(method, MARK):
        return

    @functools.wraps(method)  # vLLM reads the signature
    def wrapper(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        return around(method, self, *args, **kwargs)

    setattr(wrapper, MARK, True)
    setattr(owner, name, wrapper)


# Replacements of vLLM's methods. Parameters have vLLM's names, since callers may use them.


def _rpc(
    call: Callable[..., Any],
    core: Any,
    /,
    method: Any,
    timeout: float | None = None,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
) -> Any:
    if isinstance(method, str) and method in HARMLESS:
        given = [each for each in (*args, *(kwargs or {}).values()) if hasattr(each, "lora_path")]
        if method == "add_lora" and given:
            return _add_lora(lambda *_: call(core, method, timeout, args, kwargs), core, given[0])
        return call(core, method, timeout, args, kwargs)
    why = method if isinstance(method, str) else getattr(method, "__name__", "a function")
    is_reload = method == "reload_weights"
    sources = _sources_of_reload(core, *args, **(kwargs or {})) if is_reload else None
    config = core.vllm_config.model_config
    before = sources and _version_of_all(config, sources)
    if sources is not None or not is_reload:
        _reloaded[core] = None
    weights_version = None
    try:
        result = call(core, method, timeout, args, kwargs)
        if sources is not None:
            _reloaded[core] = sources
            if before == _version_of_all(config, sources):  # else they were written to meanwhile
                weights_version = before
        return result
    finally:
        notify(str(why), weights_version, config)


def _sources_of_reload(
    core: Any,
    weights_iterator: Any = None,
    weights_path: str | None = None,
    is_checkpoint_format: bool = True,
    **rest: Any,
) -> WeightSources | None:
    """Return the sources that a reload reads; None if they are not known."""
    if weights_iterator is not None:
        return None
    config = core.vllm_config.model_config
    watched = _model_of(config)
    first = watched.sources if watched is not None else WeightSources.of(core.vllm_config)
    sources = _reloaded.get(core, first)
    if weights_path is not None:
        # The workers' configuration names this path from now on, the scheduler's may not. Of a
        # repository, releases differ in the revision that they read.
        is_known = os.path.exists(weights_path) and not getattr(config, "model_weights", "")
        sources = _reloaded[core] = first.moved_to(weights_path) if is_known else None
    return sources if is_checkpoint_format and not rest else None


def _sleep(
    call: Callable[..., Any], core: Any, /, level: int = 1, *args: Any, **kwargs: Any
) -> Any:
    _slept.add(core)
    try:
        return call(core, level, *args, **kwargs)
    finally:
        if level >= SLEEP_WITHOUT_WEIGHTS:
            notify(f"sleep level {level}", None, core.vllm_config.model_config)


def _set_version(call: Callable[..., Any], core: Any, /, weight_version: str) -> Any:
    notify(f"version {weight_version}", None, core.vllm_config.model_config)
    return call(core, weight_version)


def _reset_caches(call: Callable[..., Any], core: Any, /, *args: Any, **kwargs: Any) -> Any:
    global _num_pauses
    _num_pauses += 1
    try:
        return call(core, *args, **kwargs)
    finally:
        _num_pauses -= 1


def _reset_encoder_cache(call: Callable[..., Any], core: Any, /) -> Any:
    try:
        return call(core)
    finally:
        for watcher in _of_engine(core, _cache_watchers):
            watcher.encoder_cache_was_reset()


def _of_engine(core: Any, watchers: "WeakKeyDictionary[W, Any]") -> list[W]:
    """Return the watchers of an engine; all where none is known to be its own."""
    config = core.vllm_config.model_config
    return [each for each, its in watchers.items() if its is config] or list(watchers)


def _add_lora(call: Callable[..., Any], core: Any, /, lora_request: Any) -> Any:
    """Read an adapter when a server loads it, before any request names it.

    Its files may change in between.
    """
    key = (lora_request.lora_int_id, lora_request.lora_path)
    directory = local_directory(lora_request.lora_path, None)
    if directory is not None and (lora_request.load_inplace or key not in _adapters):
        if len(_adapters) >= MAX_ADAPTERS:
            del _adapters[next(iter(_adapters))]
        with contextlib.suppress(OSError):  # then the engine cannot read it either
            _adapters[key] = adapter_stamp(directory)
    try:
        return call(core, lora_request)
    finally:
        for watcher in _of_engine(core, _adapter_watchers):
            watcher.adapter_loaded(*key, in_place=lora_request.load_inplace)


def _remove_lora(call: Callable[..., Any], core: Any, /, lora_id: int) -> Any:
    for key in [key for key in _adapters if key[0] == lora_id]:
        del _adapters[key]
    try:
        return call(core, lora_id)
    finally:
        for watcher in _of_engine(core, _adapter_watchers):
            watcher.adapter_removed(lora_id)


_AROUND: dict[str, Callable[..., Any]] = {
    "collective_rpc": _rpc,
    "sleep": _sleep,
    "set_weight_version": _set_version,
    "_reset_caches": _reset_caches,
    "reset_encoder_cache": _reset_encoder_cache,
    "add_lora": _add_lora,
    "remove_lora": _remove_lora,
}
