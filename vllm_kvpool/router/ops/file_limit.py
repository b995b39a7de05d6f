"""How many files, and so connections, this process may have open."""

import logging
import resource

log = logging.getLogger(__name__)

SPARE_FILES = 512


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
            *(allowed, max_connections, wanted),
        )
    return allowed
