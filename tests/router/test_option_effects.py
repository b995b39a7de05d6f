"""Every option of the router's file has an effect, seen from outside.

An option by which the controller decides has a row in `DECISIONS`: steps of a controller that is
made from a file, and what comes of them with the option and without. Each other option names a test
in `SHOWN` that fails if the option is ignored; `make mutations` ignores each of them once.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from tests.router.scripts import take
from tests.support.player import player
from tests.support.router_rig import QUICK, RouterRig, quick_router
from tests.support.router_steps import Steps, spec
from tests.support.waiting import until
from vllm_kvpool.router.config import (
    FrontConfig,
    ReplicaConfig,
    RouterConfig,
    TenantConfig,
    controller_of,
    read_config,
)
from vllm_kvpool.router.control.events import Added
from vllm_kvpool.router.control.settings import Section
from vllm_kvpool.router.control.states import ReplicaId, State
from vllm_kvpool.router.run import Router

ROOT = Path(__file__).parents[2]
ENGINE = {"url": "http://a:1", "role": "both"}
NAME = ReplicaId("engine")
SHORT_S, LONG_S = 0.05, 3600.0


class Decision(NamedTuple):
    """A decision that depends on an option. Steps are those of `scripts.py`."""

    value: Any
    steps: str
    with_option: str
    without: str
    beside: str = ""
    """Another option that both controllers have: `section.name=value`."""
    spares: int = 0


BUSY = "flow.decode_requests=1"
AUTOMATIC = "planner.mode=automatic"
DECISIONS = {
    "planner.mode": Decision(
        "automatic", "fleet / d", "tick -> load s-1 prefill", "tick -> nothing", spares=1
    ),
    "planner.min_prefill": Decision(
        2,
        "fleet p / d; pass 9",
        "state s-1 loading_prefill_assigned",
        "state s-1 inactive",
        AUTOMATIC,
        spares=1,
    ),
    "planner.min_decode": Decision(
        2,
        "fleet p / d; pass 9",
        "state s-1 loading_decode",
        "state s-1 inactive",
        AUTOMATIC,
        spares=1,
    ),
    "planner.down_hold_s": Decision(
        5.0, "fleet p q / d; pass 60", "state p standby", "state p prefill", AUTOMATIC
    ),
    "planner.standby_ttl_s": Decision(
        10.0,
        "fleet p q / d; plan_drains q; pass 20",
        "state q inactive",
        "state q standby",
        AUTOMATIC,
    ),
    "planner.live_takeover": Decision(
        False,
        "fleet p / d; ask r; start prefill",
        "state n-1 loading_prefill",
        "state n-1 loading_prefill_assigned",
    ),
    "overload.ttft_target_s": Decision(
        1.0, "fleet / d; ask r 20; ask s 20", "tick 3 -> refuse s 503", "tick 3 -> nothing", BUSY
    ),
    "overload.max_queue": Decision(
        2,
        "fleet / d; ask r 20; ask s 20; ask t 20",
        "ask u 20 -> refuse u 429",
        "ask u 20 -> nothing",
        BUSY,
    ),
    "flow.prefill_tokens": Decision(
        1500, "fleet p / d; ask r", "ask s -> nothing", "ask s -> prefill s p"
    ),
    "flow.decode_requests": Decision(
        1, "fleet / d; ask r 20", "ask s 20 -> nothing", "ask s 20 -> decode s d"
    ),
    "flow.headroom": Decision(
        0.5,
        "fleet / d; measure d blocks=20; ask r 20",
        "ask s 20 -> nothing",
        "ask s 20 -> decode s d",
    ),
    "flow.max_attempts": Decision(
        1,
        "fleet p q / d; ask r",
        "prefilled r p failed -> ... refuse r 502",
        "prefilled r p failed -> ... prefill r q",
    ),
    "flow.max_lost": Decision(
        1,
        "fleet p q / d; ask r",
        "prefilled r p lost -> ... refuse r 502",
        "prefilled r p lost -> ... prefill r q",
    ),
    "flow.drain_timeout_s": Decision(
        10.0,
        "fleet / d e; ask r 20; place r d; began r; drain d",
        "tick 11 -> abort r d",
        "tick 11 -> nothing",
    ),
    "flow.hands_over": Decision(
        False, "fleet p / d", "ask r -> decode r d", "ask r -> prefill r p"
    ),
    "health.max_failures": Decision(
        1, "fleet p / d; failed p; tick", "state p quarantined", "state p failed"
    ),
    "health.quarantine_s": Decision(
        5.0,
        "fleet p / d; failed p; tick; failed p; tick; failed p",
        "tick 6 -> load p prefill",
        "tick 6 -> nothing",
    ),
}


def controller_with(options: dict[str, Any], spares: int) -> Steps:
    """Return the steps of a controller that a file's options make."""
    file: dict[str, Any] = {"replicas": [ENGINE]}
    for name, value in options.items():
        section, _, option = name.partition(".")
        file.setdefault(section, {})[option] = value
    steps = Steps()
    steps.controller = controller_of(read_config(file))
    for number in range(1, spares + 1):
        steps.step(Added(spec=spec(f"s-{number}", is_started=True)))
    return steps


@pytest.mark.parametrize("option", DECISIONS)
@pytest.mark.parametrize("is_set", [True, False])
def test_controller_decides_by_an_option_of_its_file(option: str, is_set: bool) -> None:
    row = DECISIONS[option]
    name, _, value = row.beside.partition("=")
    beside = {name: msgspec.json.decode(value) if value.isdigit() else value} if name else {}
    steps = controller_with({**beside, option: row.value} if is_set else beside, row.spares)
    for step in [*row.steps.split("; "), row.with_option if is_set else row.without]:
        take(steps, step)
