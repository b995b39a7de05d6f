"""Faults of the operating system: calls of `os` that are refused or answered otherwise."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest


class OsFaults:
    """Faults of `os`, for all threads of the process. `heal` ends them."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch

    def replace(self, name: str, call: Callable[..., Any]) -> None:
        """Call `call` with the real function and its arguments instead of `os.<name>`."""
        real = getattr(os, name)
        self._patch.setattr(os, name, lambda *args, **more: call(real, *args, **more))

    def refuse(
        self, name: str, number: int, when: Callable[..., object] = lambda *args: True
    ) -> list[str]:
        """Fail calls whose arguments `when` accepts. Return their paths, as they are refused."""
        refused: list[str] = []

        def call(real: Callable[..., Any], *args: Any, **more: Any) -> Any:
            if when(*args):
                refused.append(str(args[0]))
                raise OSError(number, os.strerror(number), args[0])
            return real(*args, **more)

        self.replace(name, call)
        return refused

    def refuse_direct(self) -> None:
        """The file system has no direct I/O."""
        self.refuse("open", 22, lambda path, flags, *mode: flags & os.O_DIRECT)

    def heal(self) -> None:
        self._patch.undo()


@contextmanager
def os_faults() -> Iterator[OsFaults]:
    """Yield faults that end with the block."""
    with pytest.MonkeyPatch.context() as patch:
        yield OsFaults(patch)
