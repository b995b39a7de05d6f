"""What a piece of work costs, in lines of Python that run: the same on any machine."""

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
    """The number of lines, of files below a directory, that run in the calls of the block.

    Without collections of garbage: hypothesis has lines of its own run at each of them.
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
