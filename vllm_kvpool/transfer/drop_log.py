"""The log lines that say that cells were not saved, why, and what to do.

A first drop of a kind is logged at once, later ones as a number every `QUIET_S`: a full disk drops
cells in every step. Owned by the engine thread.
"""

import logging
from collections import Counter
from collections.abc import Sequence

from vllm_kvpool.transfer.ops import HOST, CellOutcome

logger = logging.getLogger(__name__)

QUIET_S = 60.0

Drops = Counter[tuple[int, CellOutcome]]
"""Cells by the tier that did not take them and the outcome; `HOST` where no tier was asked."""

_REASONS = {
    CellOutcome.FULL: "it has no room: raise its size, or free what else fills its disk or memory",
    CellOutcome.FAILED: "its calls fail: its own lines in the log and `kvpool doctor` say why",
    CellOutcome.UNREACHABLE: "it cannot be reached: `kvpool doctor` says why",
    CellOutcome.TIMED_OUT: "its calls take longer than call_timeout_s",
}
_REASONS_OF_NONE = {
    CellOutcome.FULL: (
        "stores take cells more slowly than the engine computes them: raise staging_bytes, or put "
        "a faster store first"
    ),
    CellOutcome.UNREACHABLE: "no store can be written to: `kvpool doctor` says why",
}


class DropLog:
    """Logs the drops of one rank; `tiers` are the names of its stores."""

    def __init__(self, tiers: Sequence[str]) -> None:
        self._tiers = tiers
        self._quiet_until: dict[tuple[int, CellOutcome], float] = {}

    def tell(self, drops: Drops, now: float) -> None:
        """Log what is due, and take it out of `drops`."""
        for kind in list(drops):
            if now >= self._quiet_until.get(kind, now):
                self._warn(*kind, drops.pop(kind), is_first=kind not in self._quiet_until)
                self._quiet_until[kind] = now + QUIET_S

    def _warn(self, tier: int, outcome: CellOutcome, count: int, *, is_first: bool) -> None:
        reasons = _REASONS_OF_NONE if tier == HOST else _REASONS
        logger.warning(
            "kvpool: %d cells were not saved%s (%s): %s%s",
            count,
            "" if tier == HOST else f" to tier {self._tiers[tier]}",
            outcome.value,
            reasons.get(outcome, "a part of the pool has failed; the lines before this one say it"),
            f"; said again in {QUIET_S:g} s if more follow" if is_first else "",
        )
