"""One state of a router as operators see it: its metrics and its snapshot, value by value.

`busy_scene.txt` has both of `busy_scene`, but for transitions, the plan's words, and what is 0,
empty or false. After a change that is meant, write there what the failing test shows.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from tests.router.scenes import busy_scene
from vllm_kvpool.router.ops.metrics import PREFIX, Telemetry
from vllm_kvpool.router.ops.snapshot import state_of

GOLDEN = Path(__file__).with_name("busy_scene.txt")


def in_words(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def leaves(view: Any, path: str = "") -> Iterator[str]:
    """Yield a line for each value: its path, with replicas by their ids, and the value."""
    if not isinstance(view, dict | list):
        if view:
            yield f"{path} {in_words(view)}"
        return
    items = view.items() if isinstance(view, dict) else enumerate(view)
    for key, each in items:
        name = each.get("id", key) if isinstance(each, dict) else key
        if key not in ("id", "why", "transitions"):
            yield from leaves(each, f"{path}.{name}" if path else str(name))


def test_metrics_and_snapshot_of_a_busy_router_are_the_golden_ones() -> None:
    scene = busy_scene()
    telemetry = Telemetry(scene.controller, clock=scene.clock, max_age_s=0.0)
    shown = [
        f"{sample.name.removeprefix(PREFIX)} {' '.join(map('='.join, sample.labels.items()))} "
        f"{in_words(sample.value)}".replace("  ", " ")
        for family in text_string_to_metric_families(telemetry.expose()[1].decode())
        for sample in family.samples
        if sample.value
    ]
    view = msgspec.json.encode(state_of(scene.controller, scene.now))
    shown += ["", *leaves(msgspec.json.decode(view))]
    assert shown == GOLDEN.read_text().splitlines()
