"""When the weights of a running engine change, and when vLLM empties its caches on its own account.

vLLM tells connectors neither. So the methods of its engine through which users reach the weights
are wrapped, once in a process, where they exist; they run in the scheduler's process, between two
steps. A call that is not known to be harmless counts as a change, also if it fails: it may have
changed some of the weights. Models of this process are looked at besides (`models.py`).

While vLLM pauses or puts an engine to sleep it resets the connector along with its own caches. The
pool is not the engine's own: `is_pausing` tells such a reset from one that the user asked for.
"""

import functools
import logging
import secrets
import sys
from collections.abc import Callable
from typing import Any, Protocol
from weakref import WeakSet

from vllm_kvpool.adapt.models import Models
from vllm_kvpool.adapt.namespace import local_directory
from vllm_kvpool.weights import sample_weights

logger = logging.getLogger(__name__)

EPOCH_BYTES = 16
SLEEP = 1  # vLLM's level from which on weights are not in the device's memory
SLEEP_WITHOUT_WEIGHTS = 2  # and from which on they are discarded
MARK = "_kvpool_watches"

# Calls to all workers that leave the weights alone. Any other name, and any function, may change
# them; one too many costs hits, one too few gives wrong ones.
HARMLESS = frozenset(
    (
        "add_lora",
        "check_health",
        "compute_weight_checksums",
        "determine_available_memory",
        "execute_dummy_batch",
        "get_cache_block_size_bytes",
        "get_model_inspection",
        "get_supported_tasks",
        "init_weight_transfer_engine",
        "list_loras",
        "pin_lora",
        "profile",
        "release_late_interaction_query_cache",
        "remove_lora",
        "reset_encoder_cache",
        "reset_mm_cache",
        "save_sharded_state",
        "shutdown_weight_transfer_engine",
        "supports_draft_weight_updates",
        "synchronize_device",
        "update_max_model_len",
    )
)


class Watcher(Protocol):
    """Who is told."""

    def weights_changed(self, epoch: str) -> None:
        """The weights are others now; `epoch` says which, or is drawn by chance."""


_watchers: "WeakSet[Watcher]" = WeakSet()
_num_pauses = 0


def watch(watcher: Watcher) -> None:
    """Tell `watcher` of every change from now on, in the thread that makes it."""
    _watchers.add(watcher)


def is_pausing() -> bool:
    """Whether vLLM empties its caches now because it pauses or goes to sleep."""
    return _num_pauses > 0


def epoch_of_files(model: str, revision: str | None = None) -> str:
    """The epoch of weights that were read from files; drawn by chance if those are not at hand."""
    try:
        directory = local_directory(model, revision)
        sampled = sample_weights(directory) if directory is not None else None
    except OSError:
        sampled = None
    return f"sample:{sampled}" if sampled else _drawn()


def _drawn() -> str:
    return f"drawn:{secrets.token_hex(EPOCH_BYTES)}"


def tell(epoch: str, why: str) -> None:
    """The weights of this process's engines have changed."""
    models.look()
    for watcher in list(_watchers):
        logger.info("kvpool: the weights change (%s): what was saved before is not used", why)
        watcher.weights_changed(epoch)


def own_cache_was_reset() -> None:
    """vLLM has emptied an engine's own prefix cache: has somebody set weights before?"""
    if models.have_changed():
        tell(_drawn(), "parameters were set")


models = Models(on_load=lambda: tell(_drawn(), "load_weights"))


def install() -> None:
    """Wrap the methods of vLLM's engine, if this process has one; a second call does nothing."""
    module = sys.modules.get("vllm.v1.engine.core")
    core = getattr(module, "EngineCore", None)
    for name, around in _AROUND.items() if core is not None else ():
        _wrap(core, name, around)


def _wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Let `around(method, self, ...)` stand for a method, if there is such a method."""
    method = getattr(owner, name, None)
    if method is None or hasattr(method, MARK):
        return

    @functools.wraps(method)  # vLLM reads the signature
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(method, self, *args, **kwargs)

    setattr(wrapper, MARK, True)
    setattr(owner, name, wrapper)


def _rpc(
    method: Callable[..., Any],
    core: Any,
    name: Any,
    timeout: float | None = None,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
) -> Any:
    if isinstance(name, str) and name in HARMLESS:
        return method(core, name, timeout, args, kwargs)
    why = name if isinstance(name, str) else getattr(name, "__name__", "a function")
    epoch = _drawn()
    try:
        result = method(core, name, timeout, args, kwargs)
        if name == "reload_weights" and not args:
            epoch = _epoch_of_reload(core, **(kwargs or {}))
        return result
    finally:
        tell(epoch, str(why))


def _epoch_of_reload(
    core: Any, weights_iterator: Any = None, weights_path: str | None = None, **rest: Any
) -> str:
    if weights_iterator is not None:
        return _drawn()
    if weights_path is not None:
        # The workers' configuration names this path from now on, the scheduler's may not.
        setattr(core, f"{MARK}_path", weights_path)
        return epoch_of_files(weights_path)
    path = getattr(core, f"{MARK}_path", None)
    model = core.vllm_config.model_config
    return epoch_of_files(path) if path else epoch_of_files(str(model.model), model.revision)


def _sleep(method: Callable[..., Any], core: Any, level: int = 1, *args: Any, **rest: Any) -> Any:
    try:
        return method(core, level, *args, **rest)
    finally:
        models.asleep = models.asleep or level >= SLEEP
        if level >= SLEEP_WITHOUT_WEIGHTS:
            tell(_drawn(), f"sleep level {level}")


def _wake_up(method: Callable[..., Any], core: Any, *args: Any, **kwargs: Any) -> Any:
    result = method(core, *args, **kwargs)
    models.asleep = bool(core.model_executor.is_sleeping)  # it may wake up in parts
    return result


def _set_version(method: Callable[..., Any], core: Any, version: str) -> Any:
    tell(_drawn(), f"version {version}")
    return method(core, version)


def _reset_caches(method: Callable[..., Any], core: Any, *args: Any, **kwargs: Any) -> Any:
    global _num_pauses
    _num_pauses += 1
    try:
        return method(core, *args, **kwargs)
    finally:
        _num_pauses -= 1


_AROUND: dict[str, Callable[..., Any]] = {
    "collective_rpc": _rpc,
    "sleep": _sleep,
    "wake_up": _wake_up,
    "set_weight_version": _set_version,
    "_reset_caches": _reset_caches,
}
