"""Every order in which model runners call the connector: equal bytes, and each report once.

Each step is a step of vLLM's scheduler, over random requests and plans. Every row that is read is
compared. A save that is posted during the forward pass fails the step.
"""

import random
from collections.abc import Mapping

import pytest

from tests.faults.audit import check_nothing_leaked, serve
from tests.faults.rig import CHUNK, Drafted, RigSpec, Share
from tests.faults.runners import RUNNERS
from tests.faults.scene import tokens
from tests.faults.test_random_steps import Prompts
from tests.faults.workshop import Workshop
from tests.support.invariants import check

STEPS = 120
END_S = 30.0


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("runner", RUNNERS)
def test_steps_in_the_order_of_a_runner(workshop: Workshop, runner: str, tp: int) -> None:
    rng = random.Random(f"{runner} {tp}")
    options = {"save_decode": True, "write_policy": rng.choice(["back", "through"])}
    # Few blocks: preempted requests resume from their own saves.
    spec = RigSpec(
        tp=tp, num_blocks=28, runner=runner, plans_ahead=rng.random() < 0.5, options=options
    )
    rig = workshop.rig(spec, [*rng.choice([["host://1MiB"], []]), workshop.memory()])
    prompts = Prompts(rng)
    stored = prompts.draw()
    rig.add(stored, 1)
    rig.run(END_S)
    rig.settle()
    rig.reset()
    rig.add(stored, 40)  # loads among the other requests, even if these are fast
    for _ in range(STEPS):
        live = [r for r, answer in rig.answers.items() if not answer.ended]
        if len(live) < 4 and rng.random() < 0.4:
            rig.add(prompts.draw(), rng.choice([1, 2, 8, 40]))
        if live and rng.random() < 0.02:
            rig.abort(rng.choice(live))
        if rng.random() < 0.05:
            rig.reset()
        rig.step()
        check(rig.pool)
    rig.run(END_S)
    rig.expect(r for r, answer in rig.answers.items() if answer.ended != "abort")
    assert rig.count("kvpool_hit_tokens") > 0
    check_nothing_leaked(rig)


@pytest.mark.parametrize("runner", RUNNERS)
def test_what_one_runner_saves_every_other_loads(workshop: Workshop, runner: str) -> None:
    store = workshop.memory()
    prompt = tokens(1, 3 * CHUNK + 5)
    writer = workshop.rig(RigSpec(runner=runner), store)
    serve(writer, prompt)
    writer.settle()
    for other in RUNNERS:
        reader = workshop.rig(RigSpec(runner=other, tp=2), store)
        assert serve(reader, prompt) == 3 * CHUNK
        check_nothing_leaked(reader)
        reader.shutdown()


class OutOfMemoryError(Exception):
    """The device runs out of memory in the middle of a forward pass."""


@pytest.mark.parametrize("goes_on", [False, True])
@pytest.mark.parametrize("runner", RUNNERS)
def test_step_that_fails_stores_nothing(workshop: Workshop, runner: str, goes_on: bool) -> None:
    """vLLM's first runner still waits for the saves, and the engine flushes them when it ends. A
    program may catch the error and continue with an engine in its own process."""
    store = workshop.memory()
    prompt = tokens(1, 3 * CHUNK + 5)
    writer = workshop.rig(RigSpec(runner=runner, max_batched_tokens=2 * CHUNK), store)
    writer.add(prompt, 1)

    def fail(shares: Mapping[str, Share]) -> tuple[dict[str, list[int]], list[Drafted]]:
        if shares:
            raise OutOfMemoryError
        return {}, []

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "_forward", fail)
        with pytest.raises(OutOfMemoryError):
            writer.run(END_S)
    if goes_on:
        with pytest.MonkeyPatch.context() as patch:
            # The failed step's rows are wrong in vLLM as well.
            patch.setattr(writer, "_read", lambda request_id, share: [1])
            writer.run(END_S)
        check_nothing_leaked(writer)
    writer.shutdown()
    reader = workshop.rig(RigSpec(), store)
    assert serve(reader, prompt) == 0
    check_nothing_leaked(reader)
