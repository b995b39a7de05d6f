"""Invariants of the pool's state machines. Tests assert them after each call.

`check(state)` knows the class of the state.
"""

from collections import Counter
from collections.abc import Collection
from functools import singledispatch

from vllm_kvpool.handover import producer, watches
from vllm_kvpool.scheduler import kv_event_tracker
from vllm_kvpool.scheduler.blocks import PinLedger
from vllm_kvpool.scheduler.kv_event_tracker import KVEventTracker
from vllm_kvpool.scheduler.pool_scheduler import PoolScheduler
from vllm_kvpool.scheduler.states import AdmissionState, LookupState, RetryState
from vllm_kvpool.staging.slots import SlotPool
from vllm_kvpool.transfer.engine import Engine, HungCalls
from vllm_kvpool.transfer.fetches import Fetch, Fetches
from vllm_kvpool.transfer.graph import Op, OpState, Scheduler
from vllm_kvpool.transfer.host_cache import CacheEntry, CacheEntryState, HostCache
from vllm_kvpool.transfer.loads import Loads
from vllm_kvpool.transfer.loans import Loans
from vllm_kvpool.transfer.ops import OpKind
from vllm_kvpool.transfer.progress import SaveProgress


@singledispatch
def check(state: object) -> None:
    """Assert what holds of a state between calls."""
    raise TypeError(f"no invariants of {type(state)} are known")


@check.register
def _(hand_overs: producer.HandOvers) -> None:
    pairs = {(peer, topic) for peer, topics in hand_overs._watches.items() for topic in topics}
    assert pairs == {(p, topic) for topic, peers in hand_overs._watchers.items() for p in peers}
    assert hand_overs.num_watches == len(pairs) <= producer.MAX_WATCHES
    assert all(hand_overs._watches.values())
    assert all(hand_overs._watchers.values())
    assert len(hand_overs._watches) <= producer.MAX_PEERS
    assert len(hand_overs._topics) <= producer.MAX_TOPICS
    assert all(
        len(topics) <= producer.MAX_WATCHES_OF_PEER for topics in hand_overs._watches.values()
    )


@check.register
def _(watched: watches.Watches) -> None:
    at = {(endpoint, topic) for endpoint, topics in watched._at.items() for topic in topics}
    assert at == {(e, topic) for topic, state in watched._topics.items() for e in state.at}
    assert all(watched._at.values())
    for state in watched._topics.values():
        assert state.num_watches > 0
        assert state.said.keys() <= state.at
        assert not state.groups or state.told == state.merged()


@check.register
def _(ledger: PinLedger) -> None:
    assert ledger.num_blocks == sum(len(p.block_ids) for p in ledger._pinned.values())
    assert ledger.num_held == sum(len(held) for held in ledger._held.values())
    assert 0 <= ledger.num_blocks + ledger.num_held <= ledger._max_blocks
    assert 0 <= ledger.num_held <= ledger._max_held
    assert all(p.ranks_left > 0 for p in ledger._pinned.values())


@check.register
def _(tracker: KVEventTracker) -> None:
    assert len(tracker._chunks) <= kv_event_tracker.MAX_CHUNKS
    assert len(tracker._waiting) <= kv_event_tracker.MAX_WAITING
    for content in tracker._media.values():
        there = [tracker._chunks[chunk] for chunk in content.chunks]
        assert content.counts == Counter(
            block for each in there for block in each.blocks[content.start_of(each) :]
        )
    assert tracker._followers.keys() == {
        need for each in tracker._chunks.values() for need in each.needs
    }


@check.register
def _(pool: PoolScheduler) -> None:
    saves = pool.saves
    check(saves.ledger)
    for request_id in saves._until_due:
        assert pool._requests[request_id].may_save
        assert pool._requests[request_id].chain is not None
    assert saves._in_line.keys() <= saves._until_due.keys()
    for lookup_id, state in pool._lookups._open.items():
        assert lookup_id == state.answer.lookup_id
        is_unnamed = state.lookup.state is LookupState.UNNAMED
        assert is_unnamed != (state is pool._requests.get(state.view.request_id))
    starting = {AdmissionState.ALLOCATED, AdmissionState.WAITING, AdmissionState.LOADED}
    assert pool._starting == {
        request_id: state
        for request_id, state in pool._requests.items()
        if state.admission in starting
    }
    for state in pool._requests.values():
        assert state.retry is not RetryState.NONE or state.limit_tokens is None
        answer, is_ended = state.answer, state.lookup.state is LookupState.ENDED
        assert is_ended != (answer.lookup_id in pool._lookups._open)
        if state.chain is not None:
            assert answer.found_chunks <= len(state.chain) + (answer.tail is not None)
    for request_id, load in pool._loads._loads.items():
        assert load.plan.request_id == request_id
        assert load.plan.layered or request_id in pool._requests
        assert load.plan.token_start <= load.end.tokens <= load.plan.token_stop


@check.register
def _(pool: SlotPool) -> None:
    places = [*pool._free, *pool._held, *pool._quarantined]
    assert sorted(places) == list(range(pool.count)), places


@check.register
def _(engine: Engine) -> None:
    check(engine.context.host_cache)
    check(engine.saves.progress)
    check(engine.loads)
    check(engine._fetches)
    check(engine.loans)
    followers = Counter(id(c.entry) for c in engine.saves._copies if is_fetched(c.entry))
    fetched = [entry for entry in engine.context.host_cache if is_fetched(entry)]
    assert all(entry.num_followers == followers[id(entry)] for entry in fetched)
    moving = [batch for batch in engine.running if batch.parts]
    running = [op for batch in moving for op in batch.ops]
    held = [op.what.entry for op in running if op.what.entry is not None]
    assert all(len(entry.slots) == entry.num_cells for entry in held)
    if engine.idle:
        host_cache = engine.context.host_cache
        hung = engine.hung_calls
        assert all(e.pins == pins_of(hung, e) or e.prefetched for e in host_cache)
        assert host_cache.slots.num_quarantined == num_slots_written(hung)
        known = {slot for entry in host_cache for slot in entry.slots} | hung.slots_read
        assert host_cache.slots.num_held == len(known)


@check.register
def _(fetches: Fetches) -> None:
    for entry in filter(is_fetched, fetches._context.host_cache):
        assert entry.op is not None
        has_slots = entry.op.state is OpState.RUNNING or entry.slots
        is_wanted = entry.is_awaited or (entry.prefetched and not entry.num_followers)
        assert has_slots or is_wanted, "saves alone wait for slots"
    for tier, key in fetches._removing:
        lane = fetches._context.lane(OpKind.REMOVE, tier)
        ready = fetches._context.scheduler.waiting_in(lane)
        waiting = [key for op in ready for key in op.what.part.cell_keys()]
        assert lane.num_batches or key in waiting, "it would never be asked for again"


@check.register
def _(cache: HostCache) -> None:
    check(cache.slots)
    slots = [slot for entry in cache for slot in entry.slots]
    assert len(set(slots)) == len(slots)
    assert all(len(e.slots) in (0, e.num_cells) for e in cache)
    assert all(not e.slab.pages for e in cache)
    assert all(e.op is not None or e.state is CacheEntryState.PRESENT for e in cache)
    idle = [entry for entry in cache if not entry.pins]
    assert all(e.state is CacheEntryState.PRESENT and e.slots for e in idle)
    assert sum(e.num_cells for e in idle) == cache.num_idle
    assert sum(e.num_cells * e.dirty for e in idle) == cache.num_dirty
    assert cache.num_idle - cache.num_dirty <= cache.capacity
    if cache.capacity:
        present = [e for e in cache if e.state is CacheEntryState.PRESENT]
        slabs = Counter(e.slab.chunk.id for e in present)
        children = Counter(c.parent.chunk_id for c in cache._chunks.values() if c.parent)
        for chunk_id, chunk in cache._chunks.items():
            assert chunk.num_slabs == slabs[chunk_id]
            assert chunk.num_children == children[chunk_id]
            assert chunk.num_slabs or chunk.num_children
            if (parent := chunk.parent) is not None:
                assert parent.score >= chunk.score
                assert parent.pinned_until_ns >= chunk.pinned_until_ns
        assert slabs.keys() | children.keys() == cache._chunks.keys()
        heaps = [(True, cache._dirty), *((False, each) for each in cache._clean.values())]
        places = [(d, p) for d, heap in heaps for p in heap if cache._is_current(p, d)]
        cells = Counter[str]()
        for e in present:
            cells[cache._tenant_of(e)] += e.num_cells
        assert cache.num_cells == cells
        in_heaps = {rank[2]: (dirty, rank) for dirty, rank in places}
        kept = {slab_id for *_, slab_id in cache._kept} - in_heaps.keys()
        ranked = [e for e in idle if e.slab.id not in kept]
        assert all(in_heaps[e.slab.id][0] == e.dirty for e in ranked)
        assert all(in_heaps[e.slab.id][1] <= cache._eviction_rank(e) for e in ranked)
        assert not any(e.dirty for e in idle if e.slab.id in kept)


def is_fetched(entry: CacheEntry) -> bool:
    """Return True if a fetch is bringing the slab."""
    return entry.op is not None and isinstance(entry.op.what, Fetch)


def is_naming(engine: Engine) -> bool:
    """Return True if slabs of a load or save are not named yet: a further step is due."""
    return bool(engine.loads._growing or engine.saves._growing)


def num_slots_written(hung: HungCalls) -> int:
    """Return the number of slots that hung calls may write."""
    return sum(len(written) for written in hung._batches.values())


def pins_of(hung: HungCalls, entry: CacheEntry) -> int:
    """Return the number of hung calls that pin an entry, as they may read its slots."""
    readers = [batch for batch in hung._batches if batch.lane.kind is not OpKind.GET]
    return sum(op.what.entry is entry for batch in readers for op in batch.ops)


@check.register
def _(loads: Loads) -> None:
    for load in loads._loads.values():
        still = [scatter for scatter in load.scatters if not scatter.over]
        assert load.num_open == len(still)
        assert still or load.later or load.rest is not None or loads._is_removing(load)
        for entry in (scatter.entry for scatter in still):
            assert entry is None or (entry.pins and entry.state is not CacheEntryState.GONE)


@check.register
def _(loans: Loans) -> None:
    for entry, _ in loans._lent.values():
        assert entry.pins
        assert entry.state is not CacheEntryState.GONE
    assert loans._num_retained == sum(entry.num_cells for entry in loans._retained)
    for entry in loans._retained:
        assert entry.pins
        assert entry.state is CacheEntryState.PRESENT
    assert not loans._context.host_cache._ended_loans, "a loan is not given back"


@check.register
def _(progress: SaveProgress) -> None:
    for topic in progress._hand_overs.values():
        assert topic.requests
        for request in topic.requests.values():
            assert not request.is_over
            assert list(request.open) == sorted(request.open)
            assert all(count > 0 for count in request.open.values())


def check_graph(scheduler: Scheduler, ops: Collection[Op]) -> None:
    """Assert the invariants of a graph; `ops` are all that have not ended."""
    ready = dict.fromkeys(scheduler.lanes.values(), 0)
    running = dict.fromkeys(scheduler.lanes.values(), 0)
    for op in ops:
        assert (op.pending > 0) == (op.state is OpState.WAITING) or op.state in (
            OpState.FAILED,
            OpState.CANCELLED,
        )
        if op.lane is not None and op.state is OpState.READY:
            ready[op.lane] += op.size
        elif op.lane is not None and op.state is OpState.RUNNING:
            running[op.lane] += op.nbytes
    for lane in scheduler.lanes.values():
        assert lane.num_ready == ready[lane], (lane.key, lane.num_ready, ready[lane])
        assert lane.running_bytes == running[lane]
        assert 0 <= lane.num_batches <= lane.limits.batches
        if lane.num_batches > 1:
            assert lane.running_bytes <= lane.limits.budget_bytes
