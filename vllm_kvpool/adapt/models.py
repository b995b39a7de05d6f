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
MOST_FRAMES = 16
MARK = "_kvpool_watched"


class Models:
    """The models of this process. Scheduler's thread, which is the model's where both matter."""

    def __init__(self, on_load: Callable[[], None]) -> None:
        self._on_load = on_load
        self._seen: WeakKeyDictionary[Any, bytes] = WeakKeyDictionary()
        self.asleep = False  # their memory must not be touched

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
        if not self.asleep:
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
    """A digest of a few bytes of every parameter, at equal distances."""
    digest = hashlib.blake2b(digest_size=16)
    for parameter in model.parameters():
        whole = torch.empty(0, dtype=torch.uint8, device=parameter.device)
        whole.set_(parameter.untyped_storage())
        count = whole.numel()
        if count:
            # A prime step meets other bytes of the elements than only their first.
            step = max(1, count // BYTES_OF_EACH) | 1
            digest.update(whole[::step][: BYTES_OF_EACH * 2].cpu().numpy().tobytes())
    return digest.digest()
