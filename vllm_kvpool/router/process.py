"""The router's process: its limit of open files, its event loop, its garbage collector."""

import asyncio
import contextlib
import gc
import logging
import resource
from collections.abc import Callable

from vllm_kvpool.router.config import RouterConfig
from vllm_kvpool.router.run import serve_router

log = logging.getLogger(__name__)

SPARE_FILES = 512
GC_THRESHOLD = 10_000
"""New objects until the youngest are searched for cycles; Python's 700 are those of one request."""


def allow_connections(max_connections: int) -> int:
    """Let the process have so many of clients, and as many to engines; how many files it may have.

    What the system does not allow is said in the log: further connections will then be refused.
    """
    wanted = 2 * max_connections + SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return soft
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < wanted:
        log.warning(
            "%d open files are allowed, %d connections may need %d; raise the limit (ulimit -n)",
            allowed,
            max_connections,
            wanted,
        )
    return allowed


def serve(config: RouterConfig, read: Callable[[], RouterConfig]) -> None:
    """Run a router until SIGINT or SIGTERM; ConfigError if it cannot start.

    On SIGHUP replicas (by `read`) and keys are read again.
    """
    allow_connections(config.front.max_connections)
    new_loop = None
    with contextlib.suppress(ImportError):
        import uvloop

        new_loop = uvloop.new_event_loop
    # A request makes a thousand objects: those there are from the start are not looked at again.
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(serve_router(config, read))
