"""No process without its parent: Linux signals a process when the thread that started it ends.

For processes that nobody else would end if the one that started them is killed.
"""

import ctypes
import os
import shutil
import signal
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1

_libc = ctypes.CDLL(None, use_errno=True)


def end_with_parent() -> None:
    """Have this process killed when its parent ends, and each that it forks when it ends itself."""
    _ask_for_death()
    os.register_at_fork(after_in_child=_ask_for_death)


def ending_with_parent(command: Sequence[str]) -> list[str]:
    """Return a command that is killed when the process that starts it ends, where `setpriv` is."""
    setpriv = shutil.which("setpriv")
    return [*([setpriv, "--pdeathsig", "KILL", "--"] if setpriv else []), *command]


def _ask_for_death() -> None:
    if _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")
