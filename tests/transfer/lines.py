"""Cost of a piece of work in executed lines of Python, which is the same on any machine."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import vllm_kvpool

PACKAGE = str(Path(vllm_kvpool.__file__).parent)


@contextmanager
def counted_lines(below: str = "") -> Iterator[list[int]]:
    """Count the lines that run in the calls of the block, in files below a directory.

    Garbage collection is off meanwhile, because hypothesis runs lines of its own at each
    collection.
    """
    count = [0]

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        if not frame.f_code.co_filename.startswith(below):
            return None
        count[0] += event == "line"
        return trace

    before = sys.gettrace()
    gc.disable()
    sys.settrace(trace)
    try:
        yield count
    finally:
        sys.settrace(before)
        gc.enable()
