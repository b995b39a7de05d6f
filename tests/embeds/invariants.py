"""Invariants of the embeddings state machines; tests check them after each step."""

from collections.abc import Iterable

from vllm_kvpool.embeds.machines.admission import ItemAdmission
from vllm_kvpool.embeds.machines.consumer import Consumer
from vllm_kvpool.embeds.machines.encoded_items import EncodedItemCache
from vllm_kvpool.embeds.machines.items import Item
from vllm_kvpool.embeds.machines.producer import Producer
from vllm_kvpool.embeds.machines.states import TransferState
from vllm_kvpool.embeds.machines.window import WINDOWS_IN_FLIGHT, ExtentAllocator, WindowLedger
from vllm_kvpool.embeds.protocol.rows import Extent
from vllm_kvpool.embeds.scheduler import EmbedsScheduler


def check_consumer(machine: Consumer) -> None:
    check_window(machine.grants.window)
    for mm_hash, item in machine.items.items():
        shape = item.shape
        assert all(machine.grants.window[gid].mm_hash == mm_hash for gid in item.grants)
        assert item.state is state_of_facts(item)
        for granted in item.grants.values():
            if granted.ref[1]:
                assert shape is not None
                assert granted.row + granted.rows <= shape.rows
        num_granted = sum(granted.rows for granted in item.grants.values())
        assert len(item.covered()) == len(item.received) + num_granted, "rows are granted twice"
    check_admission(machine.admission, machine.items)
    for ref, item in machine.offers.open.items():
        assert machine.items[item.mm_hash] is item
        assert ref in item.offers


def describe(machine: Consumer, mm_hash: str) -> str:
    """Describe a consumer's item in a line."""
    item = machine.items.get(mm_hash)
    if item is None:
        return f"{mm_hash}: not known"
    rows = item.shape.rows if item.shape is not None else "?"
    return (
        f"{mm_hash}: {item.state.value}, {len(item.received)} of {rows} rows, "
        f"{len(item.grants)} grants, {len(item.offers)} offers"
    )


def state_of_facts(item: Item) -> TransferState:
    """Return the state that an item's rows, grants and offers imply."""
    is_offered = item.shape is not None
    if item.shape is not None and len(item.received) == item.shape.rows:
        assert not item.offers
        return TransferState.SUCCESS
    if not item.offers:
        return TransferState.SUSPENDED if is_offered else TransferState.BOOTSTRAPPING
    if item.grants:
        return TransferState.TRANSFERRING
    return TransferState.PARTIAL if item.received.spans else TransferState.WAITING


def check_window(window: WindowLedger) -> None:
    """Every byte of the window is in one place."""
    taken = (*window, *window._quarantined.values())
    check_arena(window._allocator, (extent for granted in taken for extent in granted.extents))


def check_arena(arena: ExtentAllocator, granted: Iterable[Extent]) -> None:
    """Every byte is in one place; `granted` is everything taken and not freed."""
    pieces = sorted((*arena._free, *granted))
    at = 0
    for piece in pieces:
        assert piece.offset == at, f"{piece} where {at} is next"
        assert piece.nbytes > 0
        at = piece.end
    assert at == arena.nbytes
    assert arena.free_bytes == sum(each.nbytes for each in arena._free)
    for low, high in zip(arena._free, arena._free[1:], strict=False):
        assert low.end < high.offset, "free extents are not merged"


def nbytes_of(item: Item) -> int:
    assert item.shape is not None
    return item.shape.nbytes


def check_admission(admission: ItemAdmission, items: dict[str, Item]) -> None:
    if not admission._unrequested_may_fit:
        assert not any(admission._fits(items[each]) for each in admission._queue.unrequested())
    requested = [item for item in items.values() if item.requested]
    assert admission._orders == sorted(item.order for item in requested)
    for mm_hash, item in items.items():
        assert (mm_hash in admission._active) == (item.admitted and bool(item.offers))
        if mm_hash in admission._active and mm_hash not in admission._grantable:
            assert item.shape is not None
            is_covered = not list(item.covered().gaps(item.shape.rows))
            assert is_covered or len(item.grants) >= WINDOWS_IN_FLIGHT, "never granted again"
    assert admission._grantable.keys() <= admission._active.keys() <= items.keys()
    admitted = [item for item in items.values() if item.admitted]
    assert admission._landing_bytes == sum(map(nbytes_of, admitted))
    unrequested = sum(nbytes_of(item) for item in admitted if not item.requested)
    assert admission._unrequested_bytes == unrequested <= admission._max_unrequested_bytes


def check_producer(machine: Producer) -> None:
    transfers = machine.transfers.values()
    assert machine.num_writes == sum(len(each.writing) for each in transfers)
    assert machine._writing_bytes == sum(sum(each.writing.values()) for each in transfers)
    assert machine.num_writes <= max(machine.limits.writers, machine.limits.max_writes)
    for tid, transfer in machine.transfers.items():
        assert tid in transfer.item.transfers
        assert transfer.writing or not transfer.is_ended
    check_cache(machine.cache, set(machine.transfers))


def check_cache(cache: EncodedItemCache, transfers: set[int]) -> None:
    """`transfers` are the ids of all transfers."""
    for item_id, item in cache.unreleased.items():
        assert item_id == item.item_id
        assert item.transfers <= transfers
        assert item.transfers or not item.is_prepared or item.mm_hash in cache.items
    held = (each for each in cache.items.values() if not each.is_spare)
    assert cache.held_bytes == sum(each.shape.nbytes for each in held)
    assert cache._kept_bytes == sum(each.shape.nbytes for each in cache.items.values())


def check_scheduler(scheduler: EmbedsScheduler) -> None:
    """Every record is needed, and found by the name that the workers know."""
    for mm_hash, item in scheduler._items.items():
        is_named = bool(item.requests or item.loading)
        assert item.mm_hash == mm_hash
        assert is_named or item.is_resident
        assert (scheduler._by_name.get(item.name) is item) == is_named
    for item in scheduler._by_name.values():
        assert scheduler._items[item.mm_hash] is item
