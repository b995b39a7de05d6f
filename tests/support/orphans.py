"""Child processes that end with their parent: Linux signals them when the parent thread ends.

For processes that would otherwise survive when their parent is killed.
"""

import ctypes
import os
import shutil
import signal
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1

_libc = ctypes.CDLL(None, use_errno=True)


def end_with_parent() -> None:
    """Kill this process when its parent ends, and each process that it forks when this one ends."""
    _ask_for_death()
    os.register_at_fork(after_in_child=_ask_for_death)


def ending_with_parent(command: Sequence[str]) -> list[str]:
    """Return the command so that it dies with its parent, if `setpriv` exists."""
    setpriv = shutil.which("setpriv")
    return [*([setpriv, "--pdeathsig", "KILL", "--"] if setpriv else []), *command]


def _ask_for_death() -> None:
    if _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")
