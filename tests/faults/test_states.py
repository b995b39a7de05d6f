"""Models with recurrent states, over vLLM's real scheduler and KV cache manager ("align")."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.faults.audit import (
    LIMIT_S,
    end,
    serve,
)
from tests.faults.model import STATES
from tests.faults.rig import BLOCK, RigSpec
from tests.faults.scene import tokens
from tests.faults.workshop import Workshop
from tests.support.faults import Fault
from tests.support.memory_store import MemoryStore

SPEC = RigSpec(model=STATES, num_blocks=300, options={"chunk_tokens": BLOCK})
STATE = "@kind:state"  # in keys


PROMPT = tokens(5, 300)


def last_boundary(prompt: Sequence[int]) -> int:
    """Return the last block boundary of a prompt that leaves a token to compute; vLLM keeps a state
    there."""
    return (len(prompt) - 1) // BLOCK * BLOCK


def test_the_engine_has_groups_as_expected(workshop: Workshop) -> None:
    rig = workshop.rig(replace(SPEC, pool=False))
    groups = rig.scheduler.kv_cache_manager.kv_cache_config.kv_cache_groups
    assert [len(group.layer_names) for group in groups] == [2, 2, 2]
    ids = [rig.add(PROMPT), rig.add(PROMPT[:200])]
    rig.run(LIMIT_S)
    rig.expect(ids)
    rig.shutdown()


def test_chunks_larger_than_blocks_have_states_at_their_ends(workshop: Workshop) -> None:
    """vLLM by itself keeps a state after the last block, which may end within a chunk."""
    store = workshop.memory()
    spec = replace(SPEC, options={"chunk_tokens": 2 * BLOCK})
    writer = workshop.rig(spec, store)
    even, odd = tokens(1, 8 * BLOCK + 1), tokens(2, 9 * BLOCK + 1)
    serve(writer, even, odd)
    reader = workshop.rig(spec, store)
    assert serve(reader, even) == 8 * BLOCK
    assert serve(reader, odd) == 8 * BLOCK
    end(workshop, writer, reader)


def test_turns_of_a_conversation_go_on_from_the_last_one(workshop: Workshop) -> None:
    """Any engine recomputes at most one block of the last turn."""
    store = workshop.memory()
    rigs = [workshop.rig(replace(SPEC, tp=tp), store) for tp in (1, 2)]
    turn = tokens(1, 100)
    found = []
    for number in range(4):
        rig = rigs[number % 2]
        before = rig.count("kvpool_hit_tokens")
        request_id = rig.add(turn, 5)
        rig.run(LIMIT_S)
        rig.expect([request_id])
        rig.settle()
        found.append((rig.count("kvpool_hit_tokens") - before, last_boundary(turn)))
        assert rig.reset()
        turn = turn + rig.answers[request_id].tokens + tokens(10 + number, 70)
    assert [hit for hit, _ in found] == [0, *(boundary for _, boundary in found[:-1])]
    end(workshop, *rigs)


def test_a_shared_prefix_gets_a_state_once_a_second_request_has_it(workshop: Workshop) -> None:
    """vLLM sees shared prefixes only in its own cache. The pool reports those that it has
    stored."""
    store = workshop.memory()
    system = tokens(1, 8 * BLOCK)
    hits = []
    rigs = [workshop.rig(SPEC, store) for _ in range(4)]
    for number, rig in enumerate(rigs):
        hits.append(serve(rig, system + tokens(10 + number, 60)))
        rig.settle()
    assert hits == [0, 0, len(system), len(system)]
    end(workshop, *rigs)


def test_an_engine_without_a_load_of_its_own_tokens_keeps_its_states(workshop: Workshop) -> None:
    """The deeper hit of vLLM's own cache and the pool is taken, and nothing is stored twice."""
    store = workshop.memory()
    rig = workshop.rig(SPEC, store)
    serve(rig, PROMPT)
    saved = rig.count("kvpool_saved_states")
    assert saved == 1
    assert serve(rig, PROMPT) == 0  # hit in the engine's own cache
    assert rig.reset()
    assert serve(rig, PROMPT) == last_boundary(PROMPT)
    assert rig.count("kvpool_saved_states") == saved
    end(workshop, rig)


def test_a_hit_pins_the_state_that_it_loads(workshop: Workshop) -> None:
    """The pin covers the state, too: a pinned prefix is of no use without its state."""
    store = workshop.memory()
    writer, reader = workshop.rig(SPEC, store), workshop.rig(SPEC, store)
    serve(writer, PROMPT)
    writer.settle()
    pinned = reader.add(PROMPT, pin_s=60.0)
    reader.run(LIMIT_S)
    reader.expect([pinned])
    assert reader.count("kvpool_hit_tokens") == last_boundary(PROMPT)
    assert reader.count("kvpool_saved_states") == 1
    end(workshop, writer, reader)


def test_a_hit_in_the_engines_own_cache_pins_its_state_too(workshop: Workshop) -> None:
    """vLLM does not offer the state of such a hit: it offered the state when it was computed."""
    rig = workshop.rig(SPEC, workshop.memory())
    serve(rig, PROMPT)
    assert rig.count("kvpool_saved_states") == 1
    pinned = rig.add(PROMPT, pin_s=60.0)
    rig.run(LIMIT_S)
    rig.expect([pinned])
    assert rig.count("kvpool_saved_states") == 2
    serve(rig, PROMPT)
    assert rig.count("kvpool_saved_states") == 2
    rig.settle()
    assert rig.reset()
    assert serve(rig, PROMPT) == last_boundary(PROMPT)  # the state is the right one
    end(workshop, rig)


@pytest.mark.parametrize("part", [STATE, ""])
def test_what_the_pool_has_lost_is_stored_again_from_the_engines_own_cache(
    workshop: Workshop, part: str
) -> None:
    """The state is stored again, too. vLLM has offered it only when it was computed."""
    store = workshop.memory()
    writer = workshop.rig(SPEC, store)
    serve(writer, PROMPT)
    writer.settle()
    plain = workshop.plain_store(store)
    assert isinstance(plain, MemoryStore)
    plain.remove([key for key in plain._table.list_keys() if part in key])
    assert serve(writer, PROMPT) == 0  # hit in the engine's own cache
    writer.settle()
    reader = workshop.rig(replace(SPEC, tp=2), store)
    assert serve(reader, PROMPT) == last_boundary(PROMPT)
    end(workshop, writer, reader)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("part", [STATE, ""])
def test_after_a_failed_load_an_earlier_boundary_is_loaded(
    workshop: Workshop, tp: int, part: str
) -> None:
    store = workshop.memory()
    first, second = tokens(1, 100), tokens(1, 100) + tokens(2, 100)
    writer = workshop.rig(SPEC, store)
    serve(writer, first)
    before = set(workshop.plain_store(store)._table.list_keys())  # type: ignore[attr-defined]
    serve(writer, second)
    writer.settle()
    after = set(workshop.plain_store(store)._table.list_keys())  # type: ignore[attr-defined]
    key = min(key for key in after - before if part in key)
    reader = workshop.rig(replace(SPEC, tp=tp), store)
    workshop.faults.inject(Fault.FLIPPED, "get", key)
    assert serve(reader, second) == last_boundary(first)
    assert reader.count("kvpool_miss_tokens", "load_failed") == last_boundary(
        second
    ) - last_boundary(first)
    workshop.faults.heal()
    reader.settle()
    assert reader.reset()
    assert serve(reader, second) == last_boundary(second)  # what was bad is saved again
    end(workshop, writer, reader)


def test_a_client_is_told_what_another_engine_can_load(workshop: Workshop) -> None:
    """After a hand-over from prefill to decode, at most one block is recomputed."""
    store = workshop.memory()
    prefill = workshop.rig(SPEC, store)
    request_id = prefill.add(PROMPT, 1)
    decode = workshop.rig(replace(SPEC, tp=2), store)
    prefill.run(LIMIT_S)
    params = prefill.answers[request_id].params
    assert params is not None
    assert params["kvpool"]["tokens"] == last_boundary(PROMPT)
    decoded = decode.add(PROMPT, expect_tokens=params["kvpool"]["tokens"], expect_timeout_ms=5000)
    decode.run(LIMIT_S)
    decode.expect([decoded])
    assert decode.count("kvpool_hit_tokens") == last_boundary(PROMPT)
    end(workshop, prefill, decode)


def test_a_decoding_engine_waits_for_the_state(workshop: Workshop) -> None:
    store = workshop.memory()
    prefill, decode = workshop.rig(SPEC, store), workshop.rig(SPEC, store)
    decoded = decode.add(PROMPT, expect_tokens=len(PROMPT), expect_timeout_ms=20_000)
    for _ in range(3):
        decode.step()
    serve(prefill, PROMPT)
    decode.run(LIMIT_S)
    decode.expect([decoded])
    assert decode.count("kvpool_hit_tokens") == last_boundary(PROMPT)
    end(workshop, prefill, decode)
