"""`stats_file`: one side's metrics in a file, for whoever does not ask vLLM for them."""

import time
from pathlib import Path

from vllm_kvpool.metrics import Tally, write_stats

STATS_EVERY_S = 1.0


class StatsFile:
    """Writes a tally's values where `stats_file` says: now and then, and at the end.

    Not only at the end, because a process may be killed before it. Never raises: a disk that is
    full must not stop an engine.
    """

    def __init__(self, stats_file: str, side: str, rank: int, tally: Tally) -> None:
        self._path = Path(f"{stats_file}.kv.{side}.{rank}") if stats_file else None
        self._tally = tally
        self._next = 0.0

    def write(self, *, force: bool = False) -> None:
        """Write if something is due."""
        now = time.monotonic()
        if self._path is None or (now < self._next and not force):
            return
        self._next = now + STATS_EVERY_S
        if not write_stats(self._path, self._tally.snapshot()):
            self._path = None
