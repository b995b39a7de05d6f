"""The function pair that moves cells between pages and staging memory, whatever the format."""

from collections.abc import Sequence
from typing import Protocol

from vllm_kvpool.layout.pages import CellMove


class Copier(Protocol):
    """Knows the pages of one rank. Moves are made by one lane thread at a time, blocking, with the
    GIL released."""

    def fence(self) -> None:
        """Moves that begin from now on come after what the model has been told to compute so far.

        Called on the model's thread, which it does not hold up.
        """

    def gather(self, moves: Sequence[CellMove]) -> None:
        """Pages -> slots. On return the slots are filled and the pages may be overwritten."""

    def scatter(self, moves: Sequence[CellMove]) -> None:
        """Slots -> pages. On return the pages are filled and the slots may be overwritten."""
