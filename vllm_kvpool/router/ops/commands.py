"""Runs an operator's `start` and `stop` commands of a replica, each for a limited time.

What a command prints goes to the router's standard error, beside its log; so does what an engine
prints that a script has left in the background.
"""

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence

from vllm_kvpool.router.control.states import ReplicaId
from vllm_kvpool.router.dataplane.responses import EngineLost

log = logging.getLogger(__name__)


async def run_command(
    replica: ReplicaId, name: str, command: Sequence[str], timeout_s: float
) -> None:
    """Run a command until it ends. EngineLost if it cannot be run, fails or takes too long.

    One that takes longer than `timeout_s`, or whose task is cancelled, is killed with all that it
    has started; one that ends leaves behind what runs in the background.
    """
    log.info("%s: %s: %s", replica, name, " ".join(command))
    began = time.monotonic()
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=sys.__stderr__,
            stderr=sys.__stderr__,
            start_new_session=True,
        )
    except OSError as error:
        raise EngineLost(f"{name}: {command[0]} cannot be run: {error.strerror}") from None
    try:
        async with asyncio.timeout(timeout_s):
            code = await process.wait()
    except TimeoutError:
        why = f"{name}: no end within {timeout_s:g} s (health.command_timeout_s)"
        raise EngineLost(why) from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    if code:
        how = f"exit code {code}" if code > 0 else f"signal {-code}"
        raise EngineLost(f"{name}: {how}")
    log.info("%s: %s: done after %.1f s", replica, name, time.monotonic() - began)
