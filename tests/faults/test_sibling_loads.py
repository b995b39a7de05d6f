"""The pool beside a connector whose loads bring nothing: its cells are right for other engines.

The engine itself may answer wrongly, because vLLM lets requests continue from blocks that another
request is to recompute. A second engine that reads the pool always reads right rows.
"""

import random

import pytest

from tests.faults.audit import check_nothing_leaked, serve
from tests.faults.rig import CHUNK, Rig, RigSpec, Sibling
from tests.faults.scene import COUSIN, PREFIX, READER, tokens
from tests.faults.workshop import Workshop
from tests.support.invariants import check
from tests.support.seeds import seeds

LIMIT_S = 20.0
ROUNDS = 8
STEPS = 150
LOADED = len(PREFIX)

SIBLINGS = [
    Sibling(asynchronous=asynchronous, policy=policy)
    for asynchronous in (False, True)
    for policy in ("recompute", "fail")
]


def engines(workshop: Workshop, spec: RigSpec) -> tuple[Rig, Rig]:
    """Return an engine with the sibling connector, and a reader without it, over the same store."""
    store = workshop.memory()
    return workshop.rig(spec, store), workshop.rig(RigSpec(tp=spec.tp), store, name="reader")


@pytest.mark.parametrize("sibling", SIBLINGS, ids=str)
@pytest.mark.parametrize("max_tokens", [1, 6])
def test_a_load_that_fails(workshop: Workshop, sibling: Sibling, max_tokens: int) -> None:
    rig, reader = engines(workshop, RigSpec(sibling=sibling))
    ids = [rig.add(prompt, max_tokens, promised=LOADED) for prompt in (READER, COUSIN)]
    rig.run(LIMIT_S)
    rig.settle()
    hits = serve(reader, READER)
    if sibling.policy == "recompute":
        rig.expect(ids)
        # The pool does not save tokens loaded within a step. vLLM waits for asynchronous loads.
        assert hits == (len(READER) // CHUNK * CHUNK if sibling.asynchronous else 0)
    else:
        assert {rig.answers[each].ended for each in ids} == {"error"}
        assert hits == 0
    check_nothing_leaked(rig)


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_request_that_is_aborted_while_it_waits_for_its_load(
    workshop: Workshop, policy: str
) -> None:
    rig, reader = engines(workshop, RigSpec(sibling=Sibling(asynchronous=True, policy=policy)))
    aborted = rig.add(READER, promised=LOADED)
    waiting = rig.scheduler.requests[aborted]
    rig.run(LIMIT_S, until=lambda: waiting.num_computed_tokens == LOADED)
    rig.abort(aborted)
    rig.run(LIMIT_S)
    rig.settle()
    assert serve(reader, READER) == 0
    check_nothing_leaked(rig)


@pytest.mark.slow
@pytest.mark.parametrize("seed", seeds(4, 30))
def test_random_steps(workshop: Workshop, seed: int) -> None:
    rng = random.Random(seed)
    spec = RigSpec(
        tp=rng.choice([1, 2]),
        num_blocks=rng.choice([24, 40, 96]),
        sibling=rng.choice(SIBLINGS),
        options={"save_decode": rng.random() < 0.5},
    )
    rig, reader = engines(workshop, spec)
    for _ in range(ROUNDS):
        prompts = [
            tokens(root, 2 * CHUNK) + tokens(rng.randrange(6), rng.randrange(4 * CHUNK))
            for root in range(3)
        ]
        live: list[str] = []
        for _ in range(STEPS):
            live = [each for each in live if not rig.answers[each].ended]
            chance = rng.random()
            if chance < 0.4 and len(live) < 5:
                prompt = rng.choice(prompts)
                promised = rng.choice([0, rng.randrange(len(prompt))]) // 16 * 16
                live.append(rig.add(prompt, rng.choice([1, 2, 8, 40]), promised=promised))
            elif chance < 0.5 and live:
                rig.abort(rng.choice(live))
            elif chance < 0.55:
                rig.reset()
            rig.step()
            check(rig.pool)
        rig.run(LIMIT_S)
        rig.settle()
        answered = [rig.answers[each] for each in rig.answers][-12:]
        serve(reader, *prompts, *([*a.prompt, *a.tokens] for a in answered))
        assert reader.reset()
    assert reader.count("kvpool_hit_tokens") > 0
    check_nothing_leaked(rig)
    check_nothing_leaked(reader)
