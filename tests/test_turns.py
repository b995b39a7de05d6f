"""benchmarks/bench_turns.py: the simulated tier evicts as the host tier does."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.bench_turns import (
    EPOCH_NS,
    SECOND_NS,
    VARIABLE,
    Tier,
    Turn,
    found,
    measure,
    of_agents,
    of_trace,
)
from vllm_kvpool.staging.slots import SlotPool, SlotUse
from vllm_kvpool.storage.base import ChunkRef
from vllm_kvpool.storage.eviction import DEFAULT_POLICY, POLICIES
from vllm_kvpool.transfer.host_cache import HostCache
from vllm_kvpool.transfer.ops import Slab, SlabKind

KIND = SlabKind(("",), (1,))  # a chunk is one cell


def found_by_the_host_tier(turns: Sequence[Turn], capacity: int) -> float:
    host = HostCache(SlotPool(capacity + 2, 1), capacity, POLICIES[DEFAULT_POLICY], {"": 1})
    hits = 0
    for turn in turns:
        is_prefix, parent, held = True, "", []
        for position, block in enumerate(turn.blocks):
            key = str(block)
            is_prefix = is_prefix and host.get(key) is not None
            if is_prefix:
                host.hit(key, turn.now_ns)
                hits += 1
            else:
                entry = host.add(Slab.of(KIND, ChunkRef(key, parent, position), key))
                assert host.assign_slots(entry, SlotUse.SAVE)
                host.arrived(entry, turn.now_ns)
                held.append(entry)  # as a save holds its chunks
            parent = key
        for entry in held:
            host.unpin(entry)
    return hits / sum(len(turn.blocks) for turn in turns)


@pytest.mark.parametrize("capacity", [300, 400, 800])
def test_tier_finds_what_the_host_tier_finds(capacity: int) -> None:
    turns = [turn for turn in of_agents(10) if len(turn.blocks) < capacity]
    simulated = found(turns, capacity, supersede=False)
    assert simulated == pytest.approx(found_by_the_host_tier(turns, capacity), abs=0.0005)


def test_full_run_without_a_trace_has_no_rows_to_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of agents alone would replace the trace's, which docs/decisions.md judges."""
    monkeypatch.delenv(VARIABLE, raising=False)
    assert not measure(quick=False, trace="").rows


def test_superseded_blocks_leave_before_older_ones() -> None:
    tier = Tier(6)

    def serve(second: int, *blocks: int, former: tuple[int, ...] = ()) -> int:
        turn = Turn(EPOCH_NS + second * SECOND_NS, blocks, former)
        hits = tier.serve(turn)
        tier.supersede(turn)
        return hits

    serve(0, 9)
    serve(1, 1, 2, 3)
    serve(2, 1, 2, 4, former=(1, 2, 3))  # 3 is of no use any more
    serve(3, 5)
    serve(4, 6)
    assert serve(5, 9) == 1
    assert serve(6, 1, 2, 3) == 2


def test_trace_former_prompt_is_the_latest_one_that_a_request_continues(tmp_path: Path) -> None:
    requests = [
        (3000, [0, 1, 2, 3]),
        (3100, [0, 1, 2, 4]),
        (3600, [0, 1, 2, 5, 6]),  # of both before
        (900, [0, 7]),  # too short to say anything
        (3000, [0, 1, 2, 8]),  # shorter than what it would continue
        (1600, [0, 7, 9]),
    ]
    lines = [
        json.dumps({"timestamp": 0, "input_length": tokens, "hash_ids": blocks})
        for tokens, blocks in requests
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(lines) + "\n")
    formers = [turn.former for turn in of_trace(path)]
    assert formers == [(), (0, 1, 2, 3), (0, 1, 2, 4), (), (), ()]
