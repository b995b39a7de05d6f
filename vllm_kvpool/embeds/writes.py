"""One write: rows of an item that go to extents of somebody else's window (pure)."""

from collections.abc import Sequence

import msgspec

from vllm_kvpool.embeds.rows import ItemShape, Run
from vllm_kvpool.embeds.run_bytes import Bytes


class WriteError(Exception):
    """The rows do not all lie in the window. Unless `quiesced`, some of them may still arrive."""

    def __init__(self, text: str, *, quiesced: bool) -> None:
        super().__init__(text)
        self.quiesced = quiesced


class RowWrite(msgspec.Struct, frozen=True, gc=False):
    """Runs of an item; `planes` are the item's own memory and stay unchanged during the write."""

    planes: Sequence[Bytes]
    shape: ItemShape
    runs: Sequence[Run]
    seed: int

    def check(self, window_nbytes: int) -> None:
        """WriteError for a run that is not of the item or not in the window: a peer named it."""
        for run in self.runs:
            end = run.offset + run.rows * self.shape.row_bytes
            if not (run.rows > 0 and run.row >= 0 and run.row + run.rows <= self.shape.rows):
                raise WriteError(
                    f"rows [{run.row}, {run.row + run.rows}) of an item of {self.shape.rows}",
                    quiesced=True,
                )
            if not 0 <= run.offset < end <= window_nbytes:
                raise WriteError(
                    f"bytes [{run.offset}, {end}) of a window of {window_nbytes}", quiesced=True
                )
