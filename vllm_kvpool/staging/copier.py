"""The function pair that moves cells between pages and staging memory, whatever the format."""

from collections.abc import Sequence
from typing import Protocol

from vllm_kvpool.layout.pages import CellMove


class Copier(Protocol):
    """Knows the pages of one rank. Called by one lane thread at a time, blocking, GIL released."""

    def gather(self, moves: Sequence[CellMove]) -> None:
        """Pages -> slots. On return the slots are filled and the pages may be overwritten."""

    def scatter(self, moves: Sequence[CellMove]) -> None:
        """Slots -> pages. On return the pages are filled and the slots may be overwritten."""
