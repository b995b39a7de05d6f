"""Loans of this rank's host memory to replicas on the same host (pure; the engine thread's).

Of the ranks of a host that hold the same KV one fetches a chunk, and lends its slabs to the others.
A loan pins slabs until its borrower has copied them, has gone, or is late (`ReplicaSet.loan_s`).
A lender fetches from stores only, never from a replica, so no two ranks wait for each other.

All members get the same plans, but at different moments. Without a host tier a fetched slab is
retained until each member has asked once, for `HOLD_S` at most; no more than
`ReplicaSet.max_retained` slots hold such slabs, and further fetches for the set wait. For a member
that let that time pass nothing is retained until it asks again: it may have died.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

from vllm_kvpool.identity.keys import layer_group_of
from vllm_kvpool.staging.slots import Slot
from vllm_kvpool.transfer.context import Marker, TransferContext
from vllm_kvpool.transfer.fetches import Fetch, Fetches
from vllm_kvpool.transfer.graph import Op, Owner, Priority
from vllm_kvpool.transfer.host_cache import CacheEntry, CacheEntryState
from vllm_kvpool.transfer.ops import (
    REPLICA,
    Lend,
    Lent,
    LoanEnded,
    LoanOver,
    Slab,
)

HOLD_S = 2.0


@dataclass(frozen=True, slots=True)
class ReplicaSet:
    """The ranks on this host that hold the same KV, by number, `me` included.

    `members` has one set for each layer group that is replicated on this host.
    """

    me: int
    members: Mapping[str, frozenset[int]]
    loan_s: float
    max_retained: int  # slots


@dataclass(slots=True, eq=False)
class _Loan:
    loan_id: int
    until: float
    slots: list[Sequence[Slot]]
    slabs: list["_Borrowed"] = field(default_factory=list)
    num_open: int = 0  # slabs that are still being fetched


@dataclass(slots=True, eq=False)
class _Borrowed:
    """A slab of a loan; `op` is a marker after its fetch."""

    loan: _Loan
    place: int
    entry: CacheEntry
    op: Op | None = None
    over: bool = False


@dataclass(slots=True, eq=False)
class _Retained:
    """A slab that is retained for members that have not asked for it (`left`)."""

    entry: CacheEntry
    left: AbstractSet[int]
    until: float | None = None  # while it is pinned


class Loans:
    """The loans and retained slabs."""

    def __init__(
        self, context: TransferContext, fetches: Fetches, replicas: ReplicaSet | None
    ) -> None:
        self._context = context
        self._fetches = fetches
        self._replicas = replicas
        self._loans: dict[int, _Loan] = {}  # in order of their deadlines
        self._retained: dict[str, _Retained] = {}  # by slab, from the first member that wants it
        self._slots_retained: dict[str, int] = {}  # their slots, of those that have any
        self._in_order: deque[_Retained] = deque()  # by deadline, dropped ones too
        self._silent: set[int] = set()  # members that let retained slabs expire

    @property
    def num_open(self) -> int:
        """The number of loans, and of retained slabs that hold a pin."""
        return len(self._loans) + sum(each.until is not None for each in self._retained.values())

    def lend(self, event: Lend) -> None:
        """Lend slabs, after fetching those that are not here; `Lent` follows."""
        context, replicas = self._context, self._replicas
        assert replicas is not None
        slabs = event.slabs if event.generation == context.generation else ()
        slots: list[Sequence[Slot]] = [()] * len(event.slabs)
        loan = _Loan(event.loan_id, context.now + replicas.loan_s, slots)
        self._loans[loan.loan_id] = loan
        owner = Owner(Priority.LOAD)
        for place, slab in enumerate(slabs):
            entry = self._entry_of(slab, owner)
            if entry is None:
                continue
            context.host_cache.pin(entry)  # before `_retain`, which may drop its own pin
            self._retain(entry, owner, event.borrower)
            borrowed = _Borrowed(loan, place, entry)
            after = () if entry.op is None else (entry.op,)
            marker = Marker(partial(self._arrived, borrowed), partial(self._lost, borrowed))
            borrowed.op = context.scheduler.add(owner, None, marker, after=after)
            loan.slabs.append(borrowed)
            loan.num_open += 1
        self._answer(loan)

    def _entry_of(self, slab: Slab, owner: Owner) -> CacheEntry | None:
        entry = self._context.host_cache.get(slab.id)
        if entry is None:
            return self._fetches.begin(slab, owner)
        if entry.slab.sizes != slab.sizes:
            return None
        if entry.op is not None:
            what = entry.op.what
            if isinstance(what, Fetch) and what.tier == REPLICA:
                return None
            self._context.scheduler.raise_priority(entry.op, Priority.LOAD)
        return entry

    def over(self, event: LoanOver) -> None:
        """The borrower has copied the slabs or is gone; `LoanEnded` follows."""
        loan = self._loans.pop(event.loan_id, None)
        if loan is not None:
            self._release(loan)
        self._context.reports.append(LoanEnded(event.loan_id, loan is not None))

    def _arrived(self, borrowed: _Borrowed) -> None:
        """A lent slab has arrived in host memory."""
        if borrowed.over:
            return
        loan, entry = borrowed.loan, borrowed.entry
        loan.slots[borrowed.place] = entry.slots if entry.state is CacheEntryState.PRESENT else ()
        loan.num_open -= 1
        self._answer(loan)

    def _lost(self, borrowed: _Borrowed) -> None:
        """No tier has the slab."""
        if borrowed.over:
            return
        borrowed.over = True
        self._context.host_cache.unpin(borrowed.entry)
        borrowed.loan.num_open -= 1
        self._answer(borrowed.loan)

    def _answer(self, loan: _Loan) -> None:
        if not loan.num_open:
            self._context.reports.append(Lent(loan.loan_id, tuple(loan.slots)))

    def _release(self, loan: _Loan) -> None:
        for borrowed in loan.slabs:
            if borrowed.over:
                continue
            borrowed.over = True
            if borrowed.op is not None:
                self._context.scheduler.cancel(borrowed.op)
            self._context.host_cache.unpin(borrowed.entry)
            if borrowed.entry.op is not None:
                self._fetches.release(borrowed.entry)

    # Retained slabs

    def wanted(self, entry: CacheEntry, owner: Owner) -> None:
        """A load of this rank wants a slab that it fetches for its set."""
        if self._replicas is not None:
            self._retain(entry, owner, self._replicas.me)

    def _retain(self, entry: CacheEntry, owner: Owner, member: int) -> None:
        context, replicas = self._context, self._replicas
        assert replicas is not None
        slab_id = entry.slab.id
        members = replicas.members.get(layer_group_of(entry.slab.chunk.id))
        if members is None or context.host_cache.capacity:
            return
        self._silent.discard(member)
        retained = self._retained.get(slab_id)
        if retained is None or retained.entry is not entry:
            if retained is not None:
                self._drop(retained)
            left = members - self._silent - {member}
            if not left:
                return
            retained = self._retained[slab_id] = _Retained(entry, left)
            after = () if entry.op is None else (entry.op,)
            marker = Marker(partial(self._pin, retained), partial(self._forget, retained))
            context.scheduler.add(owner, None, marker, after=after)
            return
        retained.left -= {member}
        if not retained.left and retained.until is not None:
            self._drop(retained)

    def may_begin(self, entry: CacheEntry) -> bool:
        """Return True if a fetch may take slots: not while `max_retained` are of such slabs."""
        slab_id = entry.slab.id
        retained = self._retained.get(slab_id)
        if retained is None or retained.entry is not entry or slab_id in self._slots_retained:
            return True
        assert self._replicas is not None
        return sum(self._slots_retained.values()) < self._replicas.max_retained

    def has_begun(self, entry: CacheEntry) -> None:
        """The fetch has taken its slots."""
        retained = self._retained.get(entry.slab.id)
        if retained is not None and retained.entry is entry:
            self._slots_retained[entry.slab.id] = entry.num_cells

    def _pin(self, retained: _Retained) -> None:
        """A slab to retain is in host memory."""
        entry = retained.entry
        if self._retained.get(entry.slab.id) is not retained:
            return
        if not retained.left or entry.state is not CacheEntryState.PRESENT or not entry.indexed:
            self._drop(retained)
            return
        self._context.host_cache.pin(entry)
        retained.until = self._context.now + HOLD_S
        self._in_order.append(retained)

    def _forget(self, retained: _Retained) -> None:
        """The fetch of a slab to retain has failed or was cancelled."""
        if self._retained.get(retained.entry.slab.id) is retained:
            self._drop(retained)

    def _drop(self, retained: _Retained) -> None:
        del self._retained[retained.entry.slab.id]
        self._slots_retained.pop(retained.entry.slab.id, None)
        if retained.until is not None:
            retained.until = None
            self._context.host_cache.unpin(retained.entry)

    # Deadlines and resets

    def expire(self) -> None:
        """Release loans and retained slabs whose time is over."""
        now = self._context.now
        while self._loans and (loan := next(iter(self._loans.values()))).until <= now:
            del self._loans[loan.loan_id]
            self._release(loan)
        while self._in_order and ((until := self._in_order[0].until) is None or until <= now):
            retained = self._in_order.popleft()
            if retained.until is not None:
                self._drop(retained)
                self._expect_no_more(retained.left)

    def _expect_no_more(self, members: AbstractSet[int]) -> None:
        """Retain nothing for members that let slabs expire."""
        if members <= self._silent:
            return
        self._silent |= members
        for retained in list(self._retained.values()):
            retained.left -= self._silent
            if not retained.left and retained.until is not None:
                self._drop(retained)

    def next_time(self) -> float | None:
        while self._in_order and self._in_order[0].until is None:
            self._in_order.popleft()
        due = [loan.until for loan in islice(self._loans.values(), 1)]
        if self._in_order and (until := self._in_order[0].until) is not None:
            due.append(until)
        return min(due, default=None)

    def forget(self) -> None:
        """A reset: drop all retained slabs. Loans go on, with slabs from before it."""
        for retained in list(self._retained.values()):
            self._drop(retained)
