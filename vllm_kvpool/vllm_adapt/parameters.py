"""Whether somebody has written into the parameters of a model in this process.

Where worker and scheduler share a process, a training loop may set weights without any call of the
engine's. `load_weights` is wrapped; what writes into parameters directly is found by looking at a
few bytes of each, whenever the engine's own prefix cache is emptied: whoever changes weights has to
do that anyway. An update that spares all of those bytes is not seen.
"""

import functools
import hashlib
import sys
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch

BYTES_OF_EACH = 64
ITEMS_OF_EACH = 8  # in every dimension, where a parameter is not in one piece
MOST_FRAMES = 16
MARK = "_kvpool_watched"


class Models:
    """The models of this process. Scheduler's thread, which is the model's where both matter."""

    def __init__(self, on_load: Callable[[], None], is_asleep: Callable[[], bool]) -> None:
        self._on_load = on_load
        self._is_asleep = is_asleep  # their memory must not be touched
        self._seen: WeakKeyDictionary[Any, bytes] = WeakKeyDictionary()

    def watch_callers(self) -> None:
        """Watch the model of the worker that calls us, up the stack: vLLM hands connectors no
        reference to it."""
        for owner in _selves_of_callers():
            get_model = getattr(owner, "get_model", None)
            model = get_model() if get_model is not None else None
            if isinstance(model, torch.nn.Module):
                self._watch(model)
                return

    def have_changed(self) -> bool:
        """Whether any parameter differs from what it was when last looked at."""
        before = dict(self._seen)
        self.look()
        return any(seen != before[model] for model, seen in self._seen.items() if model in before)

    def look(self) -> None:
        """Remember how the parameters are now."""
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


def _selves_of_callers() -> Iterator[Any]:
    frame = sys._getframe(2)
    for _ in range(MOST_FRAMES):
        yield frame.f_locals.get("self")
        if frame.f_back is None:
            return
        frame = frame.f_back


def _sample(model: torch.nn.Module) -> bytes:
    """A digest of a few bytes of every parameter."""
    digest = hashlib.blake2b(digest_size=16)
    for parameter in model.parameters():
        if parameter.numel() and not parameter.is_meta:
            digest.update(_some_bytes(parameter.detach()).cpu().numpy().tobytes())
    return digest.digest()


def _some_bytes(data: torch.Tensor) -> torch.Tensor:
    """Bytes at about equal distances. `data` may be a part of a storage that others share."""
    item = data.element_size()
    span = 1 + sum((n - 1) * s for n, s in zip(data.shape, data.stride(), strict=True))
    if span != data.numel():  # with gaps
        steps = (slice(None, None, _step(n, ITEMS_OF_EACH)) for n in data.shape)
        return data[tuple(steps)].flatten().view(torch.uint8)
    whole = torch.empty(0, dtype=torch.uint8, device=data.device)
    whole.set_(data.untyped_storage(), data.storage_offset() * item, (span * item,), (1,))
    return whole[:: _step(span * item, BYTES_OF_EACH)][: BYTES_OF_EACH * 2]


def _step(count: int, wanted: int) -> int:
    """An odd step meets other bytes of the elements than only their first."""
    return max(1, count // wanted) | 1
