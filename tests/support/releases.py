"""Releases of vLLM under test, and the differences between them."""

import os
from collections.abc import Mapping
from typing import TypeVar

from packaging.version import Version

OLDEST, NEWEST = "0.23.0", "0.32.0"
"""The oldest and newest release under full test."""

OLDER = os.environ.get("OLDER_VLLM", OLDEST)
"""The release that `make test-matrix` runs, and that shares a pool with the newest there."""

T = TypeVar("T")


def since(table: Mapping[str, T], release: str) -> T:
    """Return the entry of the newest release in a table that is not newer than `release`."""
    known = [each for each in table if Version(each) <= Version(release)]
    return table[max(known, key=Version)]


LAYERWISE = {"0.23.0": False, "0.29.0": True}
"""True if `layerwise` works. Other releases refuse the option by name."""

KV_EVENTS = {"0.23.0": False, "0.26.0": True}
"""True if the pool publishes KV events."""

FEATURES_BY_RELEASE = {
    "KV events of the pool": KV_EVENTS,
    "loads of models with several KV cache groups": {"0.23.0": False, "0.30.0": True},
    "recurrent states": {"0.23.0": False, "0.29.0": True},
    "`layerwise`": LAYERWISE,
    "embeddings (`KVPoolECConnector`)": {"0.23.0": False, "0.31.0": True},
}
"""What releases lack. docs/support.md has the same rows."""

LLAVA = {"0.23.0": False, "0.31.0": True}
"""True if the release's LLaVA can be imported with the pinned transformers."""

DRAWN_DRAFTS = {"0.23.0": False, "0.26.0": True}
"""True if engines on CPUs start with drafts that are drawn from the drafter's probabilities."""

SLEEPING_WORKERS = {"0.23.0": False, "0.27.0": True}
"""True if a worker looks for its next step again after a lost wake-up, so that it may sleep."""
