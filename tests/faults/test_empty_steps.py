"""Steps without tokens: some releases skip hooks in these steps, but the work must be done."""

from typing import Any

import pytest

from tests.faults.audit import check_nothing_leaked
from tests.faults.rig import BLOCK, CHUNK, RigSpec
from tests.faults.scene import tokens
from tests.faults.workshop import Workshop

LIMIT_S = 20.0
NUM_CHUNKS = 3
PROMPT = tokens(1, NUM_CHUNKS * CHUNK + 4)
# A quarter of the blocks may be pinned at once: two of the three chunks fit.
CRAMPED = 4 * 2 * CHUNK // BLOCK


@pytest.mark.parametrize("tp", [1, 2])
def test_what_is_saved_at_the_end_of_the_last_request_needs_no_further_tokens(
    workshop: Workshop, tp: int
) -> None:
    store = workshop.memory()
    rig = workshop.rig(RigSpec(tp=tp, num_blocks=CRAMPED), store)
    request_id = rig.add(PROMPT)
    saves: list[Any] = []
    rig.on_scheduled.append(lambda output: saves.extend(output.kv_connector_metadata.plan.saves))
    rig.run(LIMIT_S, until=lambda: bool(saves))
    assert [len(save.hashes) for save in saves] == [2]
    rig.abort(request_id)
    rig.run(LIMIT_S)
    assert rig.count("kvpool_saved_tokens") == NUM_CHUNKS * CHUNK
    check_nothing_leaked(rig)
    rig.shutdown()
    reader = workshop.rig(RigSpec(), store, "reader")
    request_id = reader.add(PROMPT)
    reader.run(LIMIT_S)
    reader.expect([request_id])
    assert reader.count("kvpool_hit_tokens") == NUM_CHUNKS * CHUNK
