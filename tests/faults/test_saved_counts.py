"""Counters of saved tokens equal the content of the stores: a full store, a dead one, host
memory."""

import pytest

from tests.faults.rig import CHUNK, RigSpec
from tests.faults.scene import tokens
from tests.faults.workshop import Workshop
from tests.support.faults import Fault

LIMIT_S = 20.0
NUM_CHUNKS = 3
PROMPT = tokens(1, NUM_CHUNKS * CHUNK + 4)
TOKENS = NUM_CHUNKS * CHUNK


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(
    ("fault", "reason"),
    [(None, ""), (Fault.FULL, "full"), (Fault.ERROR, "failed"), (Fault.UNREACHABLE, "unreachable")],
)
def test_tokens_count_as_saved_where_every_rank_has_stored_them(
    workshop: Workshop, fault: Fault | None, reason: str, tp: int
) -> None:
    """The counters are right after the last request, without a further request."""
    if fault is not None:
        workshop.faults.inject(fault, "put")
    rig = workshop.rig(RigSpec(tp=tp, max_batched_tokens=512), workshop.memory())
    rig.add(PROMPT, max_tokens=1)
    rig.run(LIMIT_S)
    assert rig.count("kvpool_saved_tokens") == (0 if reason else TOKENS)
    assert rig.count("kvpool_unsaved_tokens") == (TOKENS if reason else 0)
    if reason:
        assert rig.count("kvpool_unsaved_tokens", f"reason={reason}") == TOKENS


def test_a_chunk_that_one_rank_could_not_store_is_not_saved(workshop: Workshop) -> None:
    rig = workshop.rig(RigSpec(tp=2, max_batched_tokens=512), workshop.memory())
    workshop.faults.inject(Fault.FULL, "put", times=1)
    rig.add(PROMPT, max_tokens=1)
    rig.run(LIMIT_S)
    unsaved = rig.count("kvpool_unsaved_tokens")
    assert unsaved >= CHUNK
    assert rig.count("kvpool_saved_tokens") == TOKENS - unsaved


def test_what_is_written_back_later_counts_as_in_host_memory(workshop: Workshop) -> None:
    spec = RigSpec(max_batched_tokens=512, options={"write_policy": "back"})
    rig = workshop.rig(spec, ["host://1MiB", workshop.memory()])
    rig.add(PROMPT, max_tokens=1)
    rig.run(LIMIT_S)
    assert rig.count("kvpool_host_saved_tokens") == TOKENS
    assert rig.count("kvpool_saved_tokens") == 0
