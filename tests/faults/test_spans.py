"""The spans of a traced request, under vLLM's own scheduler and with the real worker side."""

import random

from tests.faults.rig import RigSpec
from tests.faults.workshop import Workshop
from tests.support.spans import HEADERS, TRACE_ID, exported

PROMPT = random.Random(1).choices(range(3, 1000), k=200)
LIMIT_S = 20.0


def test_lookup_load_and_saves_are_in_the_request_s_trace(workshop: Workshop) -> None:
    store = workshop.memory()
    rig = workshop.rig(RigSpec(), store)
    with exported() as exporter:
        for prompt in (PROMPT, PROMPT[:160] + PROMPT[:100]):  # the second has a hit
            rig.reset()  # of the engine's own cache
            traced, _ = rig.add(prompt), rig.add(PROMPT[100:])
            rig.scheduler.requests[traced].trace_headers = HEADERS
            rig.run(LIMIT_S)
            rig.settle()
        spans = [each for each in exporter.get_finished_spans() if each.name.startswith("kvpool.")]
    assert {each.context.trace_id for each in spans} == {int(TRACE_ID, 16)}
    names = [each.name for each in spans]
    assert names.count("kvpool.lookup") == 2
    assert names.count("kvpool.load") == 1
    saves = [dict(each.attributes or {}) for each in spans if each.name == "kvpool.save"]
    chunks = 192 // 32 + (256 - 160) // 32
    assert sum(int(str(each["kvpool.tokens"])) for each in saves) == chunks * 32
    assert all(each["kvpool.stored_cells"] and not each["kvpool.lost_cells"] for each in saves)
