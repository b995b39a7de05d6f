"""Values as a file, an environment or a request may hold them, hostile ones included."""

import math
import string
from typing import Any

from hypothesis import strategies as st

LEVELS = 10_000


def nested(levels: int = LEVELS) -> list[Any]:
    """Lists in lists, deeper than any parser goes."""
    inner: list[Any] = []
    for _ in range(levels):
        inner = [inner]
    return inner


def nested_objects(levels: int = LEVELS) -> dict[str, Any]:
    inner: dict[str, Any] = {}
    for _ in range(levels):
        inner = {"a": inner}
    return inner


DEEP = (nested(), nested_objects(), [nested()], 10**5000, -(10**5000))  # not even shown
FLAT = (
    *(math.nan, math.inf, -math.inf, 10**400, -(10**400)),
    *("\0", "\ud800", "9" * 5000, "9" * 5000 + "GiB", "x" * 100_000, "", " ", "\n", "\u0663"),
    *(True, None, -1, 0, 2**63, -(2**63), 1e308, -0.0, [], {}, [[]], {"": {}}, "[" * LEVELS),
)

texts = st.text(st.characters(), max_size=20)  # lone surrogates and NUL too
HOSTILE = (*DEEP, *FLAT)
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | texts
    | st.sampled_from(FLAT)
    | st.text(string.digits + ".eE-+KMGTiB ", max_size=12)
)
trees = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=8,
)
