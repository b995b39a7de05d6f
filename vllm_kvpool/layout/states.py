"""The units into which a recurrent state is cut, in the place of KV heads (pure).

A layer's state at a boundary is the window of a convolution (its last inputs), a recurrent state,
or both. Tensor parallelism deals out heads or channels; a unit is what no allowed size cuts. Its
**row** is the same whatever an engine's parallelism and layout:

    [part of the window][row of the window][channel], then the recurrent state
"""

import math
from dataclasses import dataclass

MAX_TP_SIZE = 16
"""The largest tensor-parallel size that units are made for."""


def num_units(*counts: int) -> int:
    """Return the units of a state, of which tensor parallelism cuts each of `counts` evenly.

    The least number that every allowed size up to `MAX_TP_SIZE` divides; equal for all engines.
    """
    whole = math.gcd(*counts)
    return math.lcm(*(size for size in range(1, MAX_TP_SIZE + 1) if whole % size == 0))


@dataclass(frozen=True, slots=True)
class WindowPart:
    """Inputs of a convolution that a unit has beside each other, in channels.

    `is_shared`: a rank keeps one copy for all of its units (the only B and C of Mamba2).
    """

    channels: int
    is_shared: bool = False


@dataclass(frozen=True, slots=True)
class StateForm:
    """The part of a state that a unit has in a layer.

    The window has `window_rows` rows of `item_bytes` a channel. `recurrent_bytes` are contiguous,
    those of the next unit of a rank behind them.
    """

    num_units: int
    window_rows: int = 0
    item_bytes: int = 0
    parts: tuple[WindowPart, ...] = ()
    recurrent_bytes: int = 0

    @property
    def window_bytes(self) -> int:
        """Bytes of a unit's convolution window."""
        return self.window_rows * self.item_bytes * sum(part.channels for part in self.parts)

    @property
    def row_bytes(self) -> int:
        """Bytes of one unit in one layer."""
        return self.window_bytes + self.recurrent_bytes
