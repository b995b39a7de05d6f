"""A store slower than the steps: saves wait for the store, steps do not."""

import time

from tests.faults.rig import CHUNK, RigSpec
from tests.faults.scene import SLACK_S, tokens
from tests.faults.workshop import Workshop
from tests.support.faults import Fault

PUT_S = 1.0
STEP_S = 0.5
"""Longer than a step of the rig, even on a busy machine, and shorter than a put."""
PROMPTS = [tokens(50 + number, 9 * CHUNK) for number in range(8)]


def test_no_step_waits_for_a_put(workshop: Workshop) -> None:
    workshop.slow_s = PUT_S
    workshop.faults.inject(Fault.SLOW, "put")
    rig = workshop.rig(RigSpec(options={"staging_bytes": "128KiB"}), workshop.memory())
    request_ids = [rig.add(prompt, 2) for prompt in PROMPTS]
    times = []
    while rig.busy:
        began = time.monotonic()
        rig.step()
        times.append(time.monotonic() - began)
    rig.expect(request_ids)
    slow = [seconds for seconds in times if seconds > STEP_S]
    assert workshop.faults.struck[Fault.SLOW]
    assert not slow, f"{len(slow)} of {len(times)} steps waited, {max(slow):.2f} s at most"
    workshop.faults.heal()
    rig.run(SLACK_S)
    rig.settle()
