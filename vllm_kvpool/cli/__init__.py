"""The command `kvpool`."""

import os
import signal

if os.getpid() == 1:
    # In a container. The kernel drops signals that its process 1 has no handler for, and importing
    # what follows takes half a second. What serves sets handlers of its own later.
    signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))

from vllm_kvpool.cli.main import main as main
