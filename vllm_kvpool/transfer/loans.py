"""Cells that replicas on this host copy out of this rank's host memory (pure; engine thread).

Of the ranks on a host that hold the same KV one fetches a chunk, and lends its cells to the others.
A loan pins cells until its borrower says that it has copied them, has gone, or is late
(`ReplicaSet.loan_s`). A cell that is not here is fetched, from stores alone: who asks a replica is
never asked in turn, so no two wait for each other.

Every member gets the same plans, but not at the same moment. Without a host tier a cell would be
gone before the last member asks for it; so it is kept until each has asked once, for `HOLD_S` at
most. What is kept takes `ReplicaSet.max_kept` slots at most, then the rank fetches nothing further
for its set until something of it goes. For a member that did not ask in that time nothing is kept
until it asks for something: who is gone must not hold up the others.
"""

from collections import deque
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from vllm_kvpool.identity.keys import layer_group_of
from vllm_kvpool.staging.slots import Slot
from vllm_kvpool.transfer.context import TransferContext
from vllm_kvpool.transfer.fetches import Fetch, Fetches
from vllm_kvpool.transfer.graph import Graph, Op, Priority
from vllm_kvpool.transfer.host_cache import CacheEntry, CacheEntryState
from vllm_kvpool.transfer.ops import (
    NOBODY,
    REPLICA,
    Cell,
    Lend,
    Lent,
    LoanEnded,
    LoanOver,
)

HOLD_S = 2.0


@dataclass(frozen=True, slots=True)
class ReplicaSet:
    """The ranks on this host that hold the same KV as this one, by number, this one (`me`) too.

    `members` has a set for each layer group that is replicated here.
    """

    me: int
    members: Mapping[str, frozenset[int]]
    loan_s: float
    max_kept: int  # slots


@dataclass(slots=True, eq=False)
class _Loan:
    loan_id: int
    until: float
    slots: list[Slot | None]
    cells: list["Borrowed"] = field(default_factory=list)
    num_open: int = 0  # cells that are still on their way here


@dataclass(slots=True, eq=False)
class Borrowed:
    """A cell of a loan: what the marker after its fetch is about."""

    loan: _Loan
    place: int
    entry: CacheEntry
    op: Op | None = None
    over: bool = False


@dataclass(slots=True, eq=False)
class Kept:
    """A cell that stays for those of the set who have not asked; what the marker is about."""

    entry: CacheEntry
    left: AbstractSet[int]
    until: float | None = None  # set while it is pinned


class Loans:
    """See the module docstring."""

    def __init__(
        self, context: TransferContext, fetches: Fetches, replicas: ReplicaSet | None
    ) -> None:
        self._context = context
        self._fetches = fetches
        self._replicas = replicas
        self._loans: dict[int, _Loan] = {}  # in order of their deadlines
        self._kept: dict[str, Kept] = {}  # by key; from the first who wants the cell
        self._kept_slots: set[str] = set()  # those of them that have a slot
        self._in_order: deque[Kept] = deque()  # in order of their deadlines; the dropped ones too
        self._silent: set[int] = set()  # members for whom cells were kept in vain

    @property
    def num_open(self) -> int:
        """Loans and kept cells that hold a pin."""
        return len(self._loans) + sum(kept.until is not None for kept in self._kept.values())

    def lend(self, event: Lend) -> None:
        """A replica asks for cells: fetch what is not here; `Lent` follows."""
        context, replicas = self._context, self._replicas
        assert replicas is not None
        cells = event.cells if event.generation == context.generation else ()
        slots: list[Slot | None] = [None] * len(event.cells)
        loan = _Loan(event.loan_id, context.now + replicas.loan_s, slots)
        self._loans[loan.loan_id] = loan
        graph = Graph(NOBODY, Priority.LOAD)
        for place, cell in enumerate(cells):
            entry = self._entry_of(cell, graph)
            if entry is None:
                continue
            context.host_cache.pin(entry)  # first: it may be the last one that it is kept for
            self._keep(cell, entry, graph, event.borrower)
            borrowed = Borrowed(loan, place, entry)
            after = () if entry.op is None else (entry.op,)
            borrowed.op = context.scheduler.add(graph, None, borrowed, after=after)
            loan.cells.append(borrowed)
            loan.num_open += 1
        context.scheduler.close(graph)
        self._tell(loan)

    def _entry_of(self, cell: Cell, graph: Graph) -> CacheEntry | None:
        entry = self._context.host_cache.get(cell.key)
        if entry is None:
            return self._fetches.begin(cell, graph)
        if entry.nbytes != cell.nbytes:
            return None
        if entry.op is not None:
            what = entry.op.what
            if isinstance(what, Fetch) and what.tier == REPLICA:
                return None
            self._context.scheduler.raise_priority(entry.op, Priority.LOAD)
        return entry

    def over(self, event: LoanOver) -> None:
        """The borrower has copied the cells, or is gone; `LoanEnded` says whether in time."""
        loan = self._loans.pop(event.loan_id, None)
        if loan is not None:
            self._release(loan)
        self._context.reports.append(LoanEnded(event.loan_id, loan is not None))

    def here(self, borrowed: Borrowed) -> None:
        """The cell is in host memory."""
        if borrowed.over:
            return
        loan, entry = borrowed.loan, borrowed.entry
        loan.slots[borrowed.place] = entry.slot if entry.state is CacheEntryState.PRESENT else None
        loan.num_open -= 1
        self._tell(loan)

    def lost(self, borrowed: Borrowed) -> None:
        """No tier can give the cell."""
        if borrowed.over:
            return
        borrowed.over = True
        self._context.host_cache.unpin(borrowed.entry)
        borrowed.loan.num_open -= 1
        self._tell(borrowed.loan)

    def _tell(self, loan: _Loan) -> None:
        if not loan.num_open:
            self._context.reports.append(Lent(loan.loan_id, tuple(loan.slots)))

    def _release(self, loan: _Loan) -> None:
        for borrowed in loan.cells:
            if borrowed.over:
                continue
            borrowed.over = True
            if borrowed.op is not None:
                self._context.scheduler.cancel(borrowed.op)
            self._context.host_cache.unpin(borrowed.entry)
            if borrowed.entry.op is not None:
                self._fetches.let_go(borrowed.entry)

    # Cells that are kept for the others

    def wanted(self, cell: Cell, entry: CacheEntry, graph: Graph) -> None:
        """A load of this rank wants a cell that it fetches for its set, too."""
        if self._replicas is not None:
            self._keep(cell, entry, graph, self._replicas.me)

    def _keep(self, cell: Cell, entry: CacheEntry, graph: Graph, member: int) -> None:
        context, replicas = self._context, self._replicas
        assert replicas is not None
        members = replicas.members.get(layer_group_of(cell.chunk.id))
        if members is None or context.host_cache.keep:
            return
        self._silent.discard(member)
        kept = self._kept.get(cell.key)
        if kept is None or kept.entry is not entry:
            if kept is not None:
                self._drop(kept)
            left = members - self._silent - {member}
            if not left:
                return
            kept = self._kept[cell.key] = Kept(entry, left)
            after = () if entry.op is None else (entry.op,)
            context.scheduler.add(graph, None, kept, after=after)
            return
        kept.left -= {member}
        if not kept.left and kept.until is not None:
            self._drop(kept)

    def may_begin(self, entry: CacheEntry) -> bool:
        """Whether a fetch may have a slot: not where too many are kept for others already."""
        kept = self._kept.get(entry.key)
        if kept is None or kept.entry is not entry or entry.key in self._kept_slots:
            return True
        assert self._replicas is not None
        return len(self._kept_slots) < self._replicas.max_kept

    def has_begun(self, entry: CacheEntry) -> None:
        """The fetch has a slot."""
        kept = self._kept.get(entry.key)
        if kept is not None and kept.entry is entry:
            self._kept_slots.add(entry.key)

    def keep(self, kept: Kept) -> None:
        """The cell is in host memory."""
        entry = kept.entry
        if self._kept.get(entry.key) is not kept:
            return
        if not kept.left or entry.state is not CacheEntryState.PRESENT or not entry.wanted:
            self._drop(kept)
            return
        self._context.host_cache.pin(entry)
        kept.until = self._context.now + HOLD_S
        self._in_order.append(kept)

    def keep_nothing(self, kept: Kept) -> None:
        """No tier can give the cell, or nobody wants it any more."""
        if self._kept.get(kept.entry.key) is kept:
            self._drop(kept)

    def _drop(self, kept: Kept) -> None:
        del self._kept[kept.entry.key]
        self._kept_slots.discard(kept.entry.key)
        if kept.until is not None:
            kept.until = None
            self._context.host_cache.unpin(kept.entry)

    # Time, and resets

    def expire(self) -> None:
        """Release what others have not taken in time."""
        now = self._context.now
        while self._loans and (loan := next(iter(self._loans.values()))).until <= now:
            del self._loans[loan.loan_id]
            self._release(loan)
        while self._in_order and ((until := self._in_order[0].until) is None or until <= now):
            kept = self._in_order.popleft()
            if kept.until is not None:
                self._drop(kept)
                self._give_up(kept.left)

    def _give_up(self, members: AbstractSet[int]) -> None:
        """Keep nothing any more for members that do not ask."""
        if members <= self._silent:
            return
        self._silent |= members
        for kept in list(self._kept.values()):
            kept.left -= self._silent
            if not kept.left and kept.until is not None:
                self._drop(kept)

    def next_time(self) -> float | None:
        """When `expire` is due."""
        while self._in_order and self._in_order[0].until is None:
            self._in_order.popleft()
        due = [loan.until for loan in self._loans.values()][:1]
        if self._in_order:
            due += [kept.until for kept in (self._in_order[0],) if kept.until is not None]
        return min(due, default=None)

    def forget(self) -> None:
        """A reset: nothing stays for those who have not asked. Loans go on: of before."""
        for kept in list(self._kept.values()):
            self._drop(kept)

    def check(self) -> None:
        """The invariants of the module docstring."""
        assert self._kept_slots <= self._kept.keys()
        for loan in self._loans.values():
            held = [each for each in loan.cells if not each.over]
            assert all(
                each.entry.pins and each.entry.state is not CacheEntryState.GONE for each in held
            )
            assert loan.num_open == sum(loan.slots[each.place] is None for each in held)
        for kept in self._kept.values():
            assert kept.left or kept.until is None
            assert kept.until is None or kept.entry.pins
