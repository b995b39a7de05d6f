"""`kvpool` as process 1 of a container, from which the kernel keeps signals without a handler."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.server_process import CONTAINER

LIMIT_S = 20.0


@pytest.mark.parametrize("command", ["router", "serve"])
def test_sigterm_ends_it_while_it_imports(command: str, tmp_path: Path) -> None:
    """A module that everything needs is replaced by one that never ends."""
    fifo = tmp_path / "imported"
    os.mkfifo(fifo)
    (tmp_path / "click.py").write_text(f"open({str(fifo)!r}, 'rb').read()\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    with subprocess.Popen(
        [*CONTAINER, sys.executable, "-m", "vllm_kvpool", command],
        env={**os.environ, "PYTHONPATH": path},
    ) as container:
        try:
            with fifo.open("wb"):  # once the import has begun
                [first] = psutil.Process(container.pid).children()
                first.send_signal(signal.SIGTERM)
                assert container.wait(LIMIT_S) == 128 + signal.SIGTERM
        finally:
            container.kill()


def test_sigterm_ends_what_serves_with_0(tmp_path: Path) -> None:
    command = (sys.executable, "-m", "vllm_kvpool", "serve", "--port", "0", "--json")
    with subprocess.Popen(
        [*CONTAINER, *command, "--store", f"file://{tmp_path}"], stdout=subprocess.PIPE
    ) as container:
        try:
            assert container.stdout is not None
            assert json.loads(container.stdout.readline())["url"]
            [first] = psutil.Process(container.pid).children()
            first.send_signal(signal.SIGTERM)
            assert container.wait(LIMIT_S) == 0
        finally:
            container.kill()
