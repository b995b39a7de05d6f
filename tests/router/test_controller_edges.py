"""Every edge of a replica, by events alone."""

import pytest

from tests.router.scripts import Example
from vllm_kvpool.router.control.states import EDGES, Cause, State

GIVEN = "with prefill_requests=1 ttft_target_s=1e6 max_queue=10000"
NEW = "fleet p / d; start prefill"
ASSIGNED = f"{NEW}; ask first; ask r; ask s; loaded n-1"
STANDBY = "serve x prefill; drain x"
COMPUTING = "fleet x / d; ask r"
FAILED = "serve x decode; failed x"
QUARANTINED = f"{FAILED}; tick; failed x; tick; failed x"

REACH: dict[str, tuple[str, str]] = {
    "inactive": ("x", "add x"),
    "loading_prefill": ("x", "add x prefill"),
    "loading_decode": ("x", "add x decode"),
    "loading_prefill_assigned": ("n-1", NEW),
    "prefill_assigned": ("n-1", ASSIGNED),
    "prefill": ("x", "serve x prefill"),
    "prefill_stealing": ("p", NEW),
    "warming_prefill": ("x", f"{STANDBY}; set x prefill"),
    "decode": ("x", "serve x decode"),
    "warming_decode": ("x", f"{STANDBY}; set x decode"),
    "prefill_to_decode": ("x", f"{COMPUTING}; set x decode"),
    "draining_prefill": ("x", f"{COMPUTING}; drain x"),
    "draining_decode": ("x", "serve x decode; ask r; drain x"),
    "standby": ("x", STANDBY),
    "failed": ("x", FAILED),
    "quarantined": ("x", QUARANTINED),
}
"""By state: a replica, and the steps that bring it there."""

CAUSES: dict[tuple[str, str], str] = {
    ("inactive", "load_prefill"): "set x prefill",
    ("inactive", "load_decode"): "set x decode",
    ("inactive", "take_over"): "serve p prefill; start prefill",
    ("loading_prefill", "loaded"): "loaded x",
    ("loading_prefill", "give_up"): "drain x",
    ("loading_decode", "loaded"): "loaded x",
    ("loading_decode", "give_up"): "drain x",
    ("loading_prefill_assigned", "loaded"): "loaded n-1",
    ("loading_prefill_assigned", "give_up"): "set n-1 decode",
    ("prefill_assigned", "relayed"): "prefilled r n-1",
    ("prefill", "pair"): "start prefill",
    ("prefill_stealing", "unpair"): "drain n-1",
    ("prefill", "mutate"): "set x decode",
    ("prefill_to_decode", "flushed"): "prefilled r x",
    ("prefill", "deactivate"): "drain x",
    ("draining_prefill", "revive"): "set x prefill",
    ("draining_prefill", "drained"): "prefilled r x",
    ("decode", "deactivate"): "drain x",
    ("decode", "idle"): """with mode=automatic
        serve p prefill; serve y decode
        each 0-199: tick; measure p; measure x; measure y""",
    ("draining_decode", "revive"): "set x decode",
    ("draining_decode", "drained"): "decoded r x",
    ("standby", "use_prefill"): "set x prefill",
    ("standby", "use_decode"): "set x decode",
    ("standby", "expire"): "remove x",
    ("warming_prefill", "ready"): "warmed x",
    ("warming_decode", "ready"): "warmed x",
    ("failed", "quarantine"): "tick; failed x; tick; failed x",
    ("failed", "use_prefill"): "set x prefill; tick; loaded x",
    ("failed", "use_decode"): "tick; loaded x",
    ("failed", "reset"): "drain x; tick",
    ("failed", "fail"): "tick; failed x",  # it is tried again
    ("quarantined", "retry"): "tick 60",
    ("quarantined", "reset"): "drain x; tick 60",
}


@pytest.mark.parametrize(
    ("state", "cause"), EDGES, ids=[f"{state.value}-{cause.value}" for state, cause in EDGES]
)
def test_every_edge_is_followed(state: State, cause: Cause) -> None:
    name, reach = REACH[state.value]
    script = CAUSES.get((state.value, cause.value), f"failed {name}")
    lines = (*(each.strip() for each in script.splitlines()),)
    counts = [
        Example(str(cause), (GIVEN, reach, *part)).play().controller.state.fleet.counts
        for part in ((), lines)
    ]
    assert counts[1][state, cause] > counts[0][state, cause]
    assert set(counts[1]) <= set(EDGES)
