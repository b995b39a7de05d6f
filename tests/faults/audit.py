"""Checks of a rig that has nothing left to do: no slot, block, pin or thread is held."""

import time
from collections.abc import Sequence

from tests.faults.rig import Rig
from tests.faults.workshop import Workshop
from tests.support.invariants import check

END_S = 5.0
LIMIT_S = 60.0  # limit for requests
FOUND_S = 120.0  # longer than any pause in which a store is left alone

# The request queues of vLLM's scheduler; a release has one of the last two.
QUEUES = ("running", "waiting", "kv_holding_waiting", "skipped_waiting")


def check_nothing_leaked(rig: Rig, *, stuck: bool = False) -> None:
    """Assert that an idle, running rig holds no resources. With `stuck`, a store call hangs on
    purpose and may keep its slots."""
    if stuck:
        rig.take_reports()
    else:
        rig.settle()
    _check_requests(rig)
    for rank in rig.ranks:
        worker, executor = rank.part.worker, rank.executor
        assert not worker._loads, f"open loads\n{rig.describe()}"
        if executor is None:
            continue
        assert not executor.unreported, f"never reported: {executor.unreported}\n{rig.describe()}"
        if not stuck:
            host_cache = executor.engine.context.host_cache
            kept = sum(len(entry.slots) for entry in host_cache)
            assert host_cache.slots.num_held == kept, f"{host_cache.slots.num_held} slots, {kept}"
            assert host_cache.slots.num_quarantined == 0
            assert kept <= host_cache.capacity, "slots are kept although there is no host tier"
            check(executor.engine)
    _check_blocks(rig)


def check_saves_are_found(rig: Rig, prompt: Sequence[int]) -> None:
    """Assert that a prompt's saved KV is found again once the stores answer. The first tries may
    miss."""
    before, deadline = rig.count("kvpool_hit_tokens"), time.monotonic() + FOUND_S
    while rig.count("kvpool_hit_tokens") == before:
        assert time.monotonic() < deadline, f"nothing is found again\n{rig.describe()}"
        request_id = rig.add(prompt, 1)
        rig.run(LIMIT_S)
        rig.expect([request_id])
        rig.settle()
        rig.reset()


def check_tokens(rig: Rig) -> None:
    """Assert that every prompt token counts as a hit or a miss. Not for rigs with preemptions or
    aborts."""
    told = sum(len(answer.prompt) for answer in rig.answers.values())
    hits, misses = rig.count("kvpool_hit_tokens"), rig.count("kvpool_miss_tokens")
    assert hits + misses == told, (hits, rig.counted("kvpool_miss_tokens"), told)


def check_threads(workshop: Workshop, num_stuck: int = 0) -> None:
    """Assert that a shutdown leaves no thread of the pool, except `num_stuck` ones."""
    deadline = time.monotonic() + END_S
    while len(threads := workshop.pool_threads()) > num_stuck:
        assert time.monotonic() < deadline, f"left behind: {[thread.name for thread in threads]}"
        threads[0].join(0.001)


def _check_requests(rig: Rig) -> None:
    scheduler, pool = rig.scheduler, rig.pool
    assert not scheduler.has_requests(), rig.describe()
    assert not scheduler.requests, rig.describe()
    assert not [queue for queue in QUEUES if getattr(scheduler, queue, None)], rig.describe()
    assert not scheduler.finished_recving_kv_req_ids
    assert not scheduler.failed_recving_kv_req_ids
    check(pool)
    assert not pool._requests
    assert not pool._lookups._open
    assert not pool._loads._loads
    assert not pool._prefetches
    assert not pool.saves._late
    assert not pool.saves._unconfirmed
    assert not pool.saves._until_due
    assert pool.saves.ledger.num_held == 0, f"held blocks\n{rig.describe()}"
    assert pool.saves.ledger.num_blocks == 0, f"pinned blocks\n{rig.describe()}"


def _check_blocks(rig: Rig) -> None:
    held = [b for b in rig.block_pool.blocks if b.ref_cnt and not b.is_null]
    assert not held, f"blocks are still referenced: {held}"
    assert rig.reset(), "the prefix cache cannot be emptied"
    assert rig.block_pool.get_num_free_blocks() == rig.free_at_start


def serve(rig: Rig, *prompts: Sequence[int], max_tokens: int = 6) -> float:
    """Run these requests to their end, and return their hit tokens.

    Assert that they answer as without a pool.
    """
    before = rig.count("kvpool_hit_tokens")
    ids = [rig.add(prompt, max_tokens) for prompt in prompts]
    rig.run(LIMIT_S)
    rig.expect(ids)
    return rig.count("kvpool_hit_tokens") - before


def end(workshop: Workshop, *rigs: Rig) -> None:
    """Assert that these rigs leak nothing, stop them, and assert that no thread is left."""
    for rig in rigs:
        check_nothing_leaked(rig)
        check_tokens(rig)
    for rig in rigs:
        rig.shutdown()
    check_threads(workshop)
