"""The process that runs an engine of the soak; `crew.py` starts it and talks to it.

Reads `Serve` and `Quit` from a pipe, answers with `Started`, `Answer` and `Ended`. It is forked
from a process that has imported all that is slow to import (`preload.py`), so that a killed one is
replaced at once. It ends with its parent. Its log takes what it prints and, on SIGUSR1, the stacks
of all its threads.
"""

import faulthandler
import gc
import logging
import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

from tests.soak.engine import Engine, EngineSpec, Served
from tests.support.namespaces import enter
from tests.support.orphans import end_with_parent


class Serve(NamedTuple):
    """Run requests for these prompts side by side."""

    numbers: tuple[int, ...]


class Quit(NamedTuple):
    """Close the engine and end."""


class Started(NamedTuple):
    """The engine is there."""

    seconds: float


class Answer(NamedTuple):
    """The results of served requests, and the engine's counters so far."""

    served: tuple[Served, ...]
    counted: dict[str, float]


class Ended(NamedTuple):
    """The engine is closed."""

    seconds: float


def run(spec: EngineSpec, pipe: Connection, log: Path, namespace: str) -> None:
    """The process from start to end."""
    end_with_parent()
    _log_to(log)
    if namespace:
        enter(namespace)
    os.environ.update(spec.environment)
    began = time.monotonic()
    engine = Engine(spec)
    pipe.send(Started(time.monotonic() - began))
    while isinstance(message := pipe.recv(), Serve):
        served = engine.serve(message.numbers)
        gc.collect()  # so that a growing memory is a leak
        pipe.send(Answer(tuple(served), engine.counted()))
    began = time.monotonic()
    engine.close()
    pipe.send(Ended(time.monotonic() - began))


def _log_to(log: Path) -> None:
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(out, 1)
    os.dup2(out, 2)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s", force=True
    )
