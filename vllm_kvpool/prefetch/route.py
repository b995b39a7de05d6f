"""Which tiers cells are prefetched from, and to which (pure).

The near tier is `file://`, which processes share and which outlives them, so that an engine finds
there what was prefetched before it could serve. The far tiers stand behind it and cross a network.
Without both there is nothing to prefetch.
"""

from collections.abc import Sequence
from typing import NamedTuple

NEAR = "file"
FAR = ("mooncake", "s3")


class Route(NamedTuple):
    """Positions in a list of tiers."""

    near: int
    far: tuple[int, ...]


def route_of(schemes: Sequence[str]) -> Route | None:
    """The route among tiers of these schemes, nearest first; None if there is none."""
    if NEAR not in schemes:
        return None
    near = schemes.index(NEAR)
    far = tuple(i for i, scheme in enumerate(schemes) if i > near and scheme in FAR)
    return Route(near, far) if far else None
