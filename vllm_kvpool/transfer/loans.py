"""Loans of host memory between the ranks of a host that hold the same KV (pure; engine thread's).

One of these ranks fetches and checks a chunk. The others scatter it straight out of its slots:

    borrower's engine                             lender's engine
    Ask (loans, slabs, generation)   ──────────▶  fetches absent slabs, pins
                                     ◀──────────  Lent (slots; none: it has not got the slab)
    scatters, then looks at the time
    Returned (loans)                 ──────────▶  unpins
"""

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from vllm_kvpool.identity.keys import layer_group_of
from vllm_kvpool.transfer.context import Marker, TransferContext
from vllm_kvpool.transfer.fetches import Fetch, Fetches
from vllm_kvpool.transfer.graph import Batch, Owner, Priority
from vllm_kvpool.transfer.host_cache import CacheEntry, CacheEntryState
from vllm_kvpool.transfer.ops import (
    REPLICA,
    Ask,
    CellOutcome,
    Lent,
    Loan,
    OpKind,
    Returned,
    Slab,
)

if TYPE_CHECKING:
    from vllm_kvpool.staging.slots import Slot

HOLD_S = 2.0


@dataclass(frozen=True, slots=True)
class ReplicaSet:
    """The limits of loans, and the layer groups that other ranks on this host hold as well."""

    layer_groups: Collection[str]
    ask_s: float
    loan_s: float  # longer than `ask_s`
    max_retained: int  # slots


class Loans:
    """The slabs that this rank borrows, lends and retains. A loan has the other member and an id.

    A loan lasts `loan_s`: for the borrower since before it asks, for the lender since it was asked.
    So a scatter that ends in time has read what was lent; one that ends later is a lost cell
    (`loads.py`). The lender unpins when the slab is returned, the borrower's process has ended, or
    `loan_s` is over. Slots of a dead lender keep their bytes: nobody hands them out. A borrower
    waits `ask_s` for an answer, then fetches for itself, and leaves that lender alone for a while.
    A lender fetches from stores only, so no two ranks wait for each other.

    Members get the same plans at different moments. So, without a host tier, the slabs that were
    fetched last are retained for `HOLD_S`, in at most `max_retained` slots.
    """

    def __init__(
        self, context: TransferContext, fetches: Fetches, replicas: ReplicaSet | None
    ) -> None:
        self._context = context
        self._fetches = fetches
        self._set = replicas or ReplicaSet((), 0.0, 0.0, 0)
        self._num_asked = 0
        # The oldest first: asks without an answer, since when; lent and retained slabs, until when.
        self._asked: dict[tuple[int, int], tuple[Batch, float]] = {}
        self._lent: dict[tuple[int, int], tuple[CacheEntry, float]] = {}
        self._retained: dict[CacheEntry, float] = {}
        self._num_retained = 0  # slots
        # To be sent, by member:
        self._asks: defaultdict[int, list[tuple[int, Slab]]] = defaultdict(list)
        self._answers: defaultdict[int, list[tuple[int, Sequence[Slot]]]] = defaultdict(list)

    @property
    def num_open(self) -> int:
        """The number of slabs that are asked for, lent or retained."""
        return len(self._asked) + len(self._lent) + len(self._retained)

    def take_messages(self) -> list[Ask | Lent | Returned]:
        """Return the messages of a step to other members."""
        returned = self._context.host_cache.take_ended_loans()
        if not (returned or self._asks or self._answers):
            return []
        by_lender: defaultdict[int, list[int]] = defaultdict(list)
        for loan in returned:
            by_lender[loan.lender].append(loan.loan_id)
        generation = self._context.generation
        asks, self._asks = self._asks, defaultdict(list)
        answers, self._answers = self._answers, defaultdict(list)
        return [
            *(Ask(member, tuple(loans), generation) for member, loans in asks.items()),
            *(Lent(member, tuple(loans)) for member, loans in answers.items()),
            *(Returned(member, tuple(loans)) for member, loans in by_lender.items()),
        ]

    # Borrowing

    def ask(self, batch: Batch) -> None:
        """Ask the member that fetches the slab of a batch's only op."""
        [op] = batch.ops
        lender = op.what.slab.fetcher
        self._num_asked += 1
        self._asked[lender, self._num_asked] = batch, self._context.now
        self._asks[lender].append((self._num_asked, op.what.slab))

    def lent(self, event: Lent) -> None:
        """Take a lender's answers; slots that come too late go back at once."""
        for loan_id, slots in event.loans:
            batch, asked_at = self._asked.get((event.member, loan_id), (None, 0.0))
            loan = Loan(event.member, loan_id, asked_at + self._set.loan_s)
            if batch is None:
                if slots:
                    self._context.host_cache.end_loan(loan)
                continue
            entry: CacheEntry = batch.ops[0].what.entry
            if len(slots) == entry.num_cells:
                entry.slots, entry.loan = list(slots), loan
            self._context.lenders[event.member].succeeded()
            outcome = CellOutcome.DONE if entry.slots else CellOutcome.MISSING
            self._end_ask((event.member, loan_id), outcome)

    def lender_gone(self, member: int) -> None:
        """Fetch for this rank what a member was asked for that answers no more."""
        self._context.lenders[member].hold_open()
        self._fetch_instead(member)
        for key in [key for key in self._asked if key[0] == member]:
            self._end_ask(key, CellOutcome.UNREACHABLE)

    def _fetch_instead(self, member: int) -> None:
        """Fetch from the tiers what waits to be asked of a member."""
        context = self._context
        for op in context.scheduler.waiting_in(context.lane(OpKind.GET, REPLICA)):
            if op.what.slab.fetcher == member:
                self._fetches.skip_tier(op)

    def _end_ask(self, key: tuple[int, int], outcome: CellOutcome) -> None:
        context, (batch, _) = self._context, self._asked.pop(key)
        [op] = batch.ops
        labels = {"direction": "load", "store": "replica"}
        context.count("kvpool_cells", op.size, **labels, outcome=outcome.value)
        if outcome is CellOutcome.DONE:
            context.count("kvpool_bytes", op.nbytes, **labels)
            context.hits[REPLICA] += op.size
        context.scheduler.batch_ended(batch)
        self._fetches.got(op, outcome)

    # Lending

    def lend(self, event: Ask) -> None:
        """Lend slabs, after fetching those that are not here; a `Lent` follows for each."""
        context, owner = self._context, Owner(Priority.LOAD)
        is_current = event.generation == context.generation
        for loan_id, slab in event.loans:
            key = event.member, loan_id
            entry = self._entry_of(slab, owner) if is_current and key not in self._lent else None
            if entry is None:
                self._answers[event.member].append((loan_id, ()))
                continue
            context.host_cache.pin(entry)
            self._lent[key] = entry, context.now + self._set.loan_s
            if entry.op is None:
                self._answer(key)
            else:  # the marker does nothing if the loan has ended before
                marker = Marker(partial(self._answer, key), partial(self._answer, key))
                context.scheduler.add(owner, None, marker, after=(entry.op,))

    def _entry_of(self, slab: Slab, owner: Owner) -> CacheEntry | None:
        entry = self._context.host_cache.get(slab.id)
        if entry is None:
            return self._fetches.start_fetch(slab, owner)
        if entry.slab.sizes != slab.sizes:
            return None
        if entry.op is not None:
            what = entry.op.what
            if isinstance(what, Fetch) and what.tier == REPLICA:
                return None
            self._context.scheduler.raise_priority(entry.op, Priority.LOAD)
        return entry

    def _answer(self, key: tuple[int, int]) -> None:
        """Tell the borrower the slots of a slab, or none if no tier has it."""
        if key not in self._lent:
            return
        entry, _ = self._lent[key]
        is_here = entry.state is CacheEntryState.PRESENT
        self._answers[key[0]].append((key[1], tuple(entry.slots) if is_here else ()))
        if not is_here:
            self._end_loan(key)

    def returned(self, event: Returned) -> None:
        """End loans whose slots the borrower reads no more."""
        for loan_id in event.loans:
            self._end_loan((event.member, loan_id))

    def borrower_gone(self, member: int) -> None:
        """End the loans to a member whose process has ended, or reads nothing any more."""
        for key in [key for key in self._lent if key[0] == member]:
            self._end_loan(key)

    def _end_loan(self, key: tuple[int, int]) -> None:
        if key not in self._lent:
            return
        entry, _ = self._lent.pop(key)
        self._context.host_cache.unpin(entry)
        if entry.op is not None:
            self._fetches.cancel_if_unwanted(entry)

    # Retaining, without a host tier

    def retain(self, entry: CacheEntry) -> None:
        """Keep a slab that has been fetched for all members a while, and drop the oldest one."""
        is_shared = layer_group_of(entry.slab.chunk.id) in self._set.layer_groups
        if not is_shared or self._context.host_cache.capacity:
            return
        if entry.state is CacheEntryState.PRESENT and entry.indexed:
            self._context.host_cache.pin(entry)
            self._retained[entry] = self._context.now + HOLD_S
            self._num_retained += entry.num_cells
        while self._num_retained > self._set.max_retained:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        entry = next(iter(self._retained))
        del self._retained[entry]
        self._num_retained -= entry.num_cells
        self._context.host_cache.unpin(entry)

    # Deadlines and resets

    def expire(self) -> None:
        """Give up asks, loans and retained slabs whose time is over."""
        now = self._context.now
        while self._asked:
            key, (_, asked_at) = next(iter(self._asked.items()))
            if asked_at + self._set.ask_s > now:
                break
            self._context.lenders[key[0]].tripped(now)
            self._fetch_instead(key[0])
            self._end_ask(key, CellOutcome.TIMED_OUT)
        while self._lent and (key := next(iter(self._lent))) and self._lent[key][1] <= now:
            self._end_loan(key)
        while self._retained and next(iter(self._retained.values())) <= now:
            self._drop_oldest()

    def next_time(self) -> float | None:
        """Return when the first of these times is over."""
        asks = [asked_at + self._set.ask_s for _, asked_at in self._asked.values()][:1]
        loans = [until for _, until in self._lent.values()][:1]
        return min((*asks, *loans, *list(self._retained.values())[:1]), default=None)

    def drop_retained(self) -> None:
        """Drop all retained slabs, after a reset. Loans go on, with slabs from before it."""
        while self._retained:
            self._drop_oldest()
