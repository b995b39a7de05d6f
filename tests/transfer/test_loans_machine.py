"""Three ranks of a host with the same KV; messages, copies and ends come in any order.

The test knows the bytes in each slot: a write begins with garbage, and ends with a cell. A scatter
has read the lent bytes if its slots had the cell at its beginning and were not written until its
end was reported. A rank may hang (its thread takes no event, its copies continue) or be killed.
"""

from collections import deque

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.support.fakes import FakeClock
from tests.transfer.engine_bench import DISK, DONE, MISSING, Bench, load_job
from vllm_kvpool.staging.slots import Slot
from vllm_kvpool.transfer.engine import Event, Message
from vllm_kvpool.transfer.graph import Batch, BatchDone
from vllm_kvpool.transfer.loans import HOLD_S, ReplicaSet
from vllm_kvpool.transfer.ops import (
    Ask,
    BorrowerGone,
    CellOutcome,
    DropSaves,
    LenderGone,
    Lent,
    OpKind,
    TimePassed,
)

RANKS = range(3)
CHUNKS = "abcdefg"
ASK_S, LOAN_S = 3.0, 6.0
MEMBER = 1 << 32

rank_numbers = st.sampled_from(RANKS)


class Rank(Bench):
    """A rank's engine, the bytes in its slots, and the bytes that its copies have read."""

    def __init__(self, number: int, clock: FakeClock, keep: int) -> None:
        replicas = ReplicaSet(("",), ASK_S, LOAN_S, max_retained=2)
        super().__init__(DISK, replicas=replicas, keep=keep, slots=4)
        self.clock = clock
        self.number = number
        self.bytes = [("", 0)] * 4  # by slot: the cell, and how often it was written
        self.inbox: deque[Event] = deque()  # taken once the rank resumes
        self.is_hung = self.is_dead = False
        self.job = self.generation = 0
        self.reads: dict[int, list[tuple[int, int, tuple[str, int], str]]] = {}  # by batch
        self.torn: set[tuple[int, int]] = set()  # jobs and chunks whose pages have wrong bytes

    def write(self, slot: int, cell: str) -> None:
        self.bytes[slot] = cell, self.bytes[slot][1] + 1


class Host(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.ranks: list[Rank] = []
        self.network: dict[tuple[int, int], deque[Event]] = {}  # by sender and receiver

    @initialize(keep=st.sampled_from([0, 2]))
    def begin(self, keep: int) -> None:
        clock = FakeClock()
        self.ranks = [Rank(number, clock, keep) for number in RANKS]
        self.network = {(a, b): deque() for a in RANKS for b in RANKS if a != b}

    # The world around the engines

    def tell(self, rank: Rank, event: Event) -> None:
        """Pass an event to a rank, which takes it at once unless it hangs."""
        rank.inbox.append(event)
        while rank.inbox and not (rank.is_hung or rank.is_dead):
            self.step(rank, rank.inbox.popleft())

    def step(self, rank: Rank, event: Event) -> None:
        first, num_loaded = rank.num_batches, len(rank.loaded)
        rank.step(event)
        for number in range(first, rank.num_batches):
            self.begin_batch(rank, number, rank.running[number])
        for done in rank.loaded[num_loaded:]:
            wrong = {chunk for job, chunk in rank.torn if job == done.job_id}
            assert not any(chunk < done.ok_stop_chunk for chunk in wrong), (done, wrong)
        for message in rank.sent:
            self.send(rank, message)
        rank.sent.clear()

    def send(self, rank: Rank, message: Message) -> None:
        """Send a message as `ReplicaExchange` does."""
        sent: Event = message._replace(member=rank.number)
        if isinstance(message, Ask):
            asks = [(n, slab._replace(fetcher=None, pages=())) for n, slab in message.loans]
            sent = Ask(rank.number, tuple(asks), message.generation)
        elif isinstance(message, Lent):
            base = MEMBER * (rank.number + 1)
            loans = [(n, tuple(Slot(base + slot) for slot in s)) for n, s in message.loans]
            sent = Lent(rank.number, tuple(loans))
        self.network[rank.number, message.member].append(sent)

    def begin_batch(self, rank: Rank, number: int, batch: Batch) -> None:
        reads = rank.reads[number] = []
        for part in batch.parts:
            for slot, key in zip(part.slots, part.cell_keys(), strict=True):
                if batch.lane.kind is OpKind.GET:
                    assert slot < MEMBER, "nobody writes another rank's slots"
                    rank.write(slot, "garbage")
                elif batch.lane.kind is OpKind.SCATTER:
                    owner = self.ranks[slot // MEMBER - 1] if slot >= MEMBER else rank
                    reads.append((owner.number, slot % MEMBER, owner.bytes[slot % MEMBER], key))

    def end_batch(self, rank: Rank, number: int, outcome: CellOutcome) -> None:
        batch = rank.running.pop(number)
        reads = iter(rank.reads.pop(number))
        for part in batch.parts:
            for slot, key in zip(part.slots, part.cell_keys(), strict=True):
                if batch.lane.kind is OpKind.GET and outcome is DONE:
                    rank.write(slot, key)
                elif batch.lane.kind is OpKind.SCATTER:
                    owner, place, seen, _ = next(reads)
                    if seen[0] != key or self.ranks[owner].bytes[place] != seen:
                        job = part.slab.pages[0].block_ids[0]
                        rank.torn.add((job, part.slab.chunk.position))
        self.tell(rank, BatchDone(batch, (outcome,) * len(batch.ops)))

    # Rules

    @rule(
        number=rank_numbers, first=st.integers(0, 4), count=st.integers(1, 3), goes_on=st.booleans()
    )
    def load(self, number: int, first: int, count: int, goes_on: bool) -> None:
        rank = self.ranks[number]
        rank.job += 1
        job = load_job(rank.job, " ".join(CHUNKS[first : first + count]), first, timeout_s=60.0)
        fetchers = [(first + i) % len(RANKS) for i in range(count)]
        slabs = tuple(
            slab._replace(fetcher=None if fetcher == number else fetcher)
            for slab, fetcher in zip(job.slabs, fetchers, strict=True)
        )
        if not rank.is_dead:
            self.tell(rank, job._replace(slabs=slabs))
        if goes_on:
            self.go_on_but_for_scatters()

    @rule(
        number=rank_numbers,
        which=st.integers(0, 9),
        outcome=st.sampled_from([DONE] * 4 + [MISSING]),
    )
    def end(self, number: int, which: int, outcome: CellOutcome) -> None:
        rank = self.ranks[number]
        if rank.running:
            batch = sorted(rank.running)[which % len(rank.running)]
            is_get = rank.running[batch].lane.kind is OpKind.GET
            self.end_batch(rank, batch, outcome if is_get else DONE)

    @rule(sender=rank_numbers, receiver=rank_numbers, count=st.integers(1, 4))
    def deliver(self, sender: int, receiver: int, count: int) -> None:
        queue = self.network.get((sender, receiver), deque())
        for _ in range(min(count, len(queue))):
            self.tell(self.ranks[receiver], queue.popleft())

    @rule()
    def go_on_but_for_scatters(self) -> None:
        """Deliver all messages, and let all batches but scatters succeed."""
        for _ in RANKS:
            for (_, receiver), queue in self.network.items():
                while queue:
                    self.tell(self.ranks[receiver], queue.popleft())
            for rank in self.ranks:
                for number, batch in list(rank.running.items()):
                    if batch.lane.kind is not OpKind.SCATTER:
                        self.end_batch(rank, number, DONE)

    @rule(seconds=st.sampled_from([0.1, HOLD_S, ASK_S, LOAN_S - ASK_S, LOAN_S]))
    def advance(self, seconds: float) -> None:
        self.ranks[0].clock.advance(seconds)
        for rank in self.ranks:
            if not (rank.is_hung or rank.is_dead):
                self.step(rank, TimePassed())

    @precondition(lambda self: not any(rank.is_hung for rank in self.ranks))
    @rule(number=rank_numbers)
    def hang(self, number: int) -> None:
        self.ranks[number].is_hung = True

    @precondition(lambda self: any(rank.is_hung for rank in self.ranks))
    @rule()
    def go_on(self) -> None:
        """Resume hung ranks; each takes the messages of its inbox in order."""
        for rank in self.ranks:
            rank.is_hung = False
            while rank.inbox and not rank.is_dead:
                self.step(rank, rank.inbox.popleft())

    @precondition(lambda self: sum(not rank.is_dead for rank in self.ranks) > 1)
    @precondition(lambda self: sum(rank.job for rank in self.ranks) > 4)
    @rule(number=rank_numbers)
    def kill(self, number: int) -> None:
        """Kill a rank. Its copies end. Messages that it has sent still arrive, then the end of its
        links."""
        if not self.ranks[number].is_dead:
            self.ranks[number].is_dead = True
            self.ranks[number].running.clear()
            for other in RANKS:
                if other != number:
                    ends = LenderGone(number), BorrowerGone(number)
                    self.network[number, other] += ends

    @rule(number=rank_numbers)
    def reset(self, number: int) -> None:
        rank = self.ranks[number]
        rank.generation += 1
        if not rank.is_dead:
            self.tell(rank, DropSaves(forget=True, generation=rank.generation))

    @invariant()
    def lent_slots_are_not_written(self) -> None:
        """Assert that the slots of a loan keep their cell while it lasts, even if ranks die or
        hang."""
        for rank in self.ranks:
            now = rank.clock()
            for number, batch in rank.running.items():
                ends = [op.what.entry.loan for op in batch.ops if op.what.entry is not None]
                reads = iter(rank.reads[number])
                for part, loan in zip(batch.parts, ends, strict=False):
                    for _ in part.slots if batch.lane.kind is OpKind.SCATTER else ():
                        owner, place, seen, key = next(reads)
                        if loan is not None and now < loan.until and seen[0] == key:
                            assert self.ranks[owner].bytes[place] == seen

    def teardown(self) -> None:
        """Assert that all loads are reported, and that no live rank holds a slot or a loan."""
        if not self.ranks:
            return
        self.go_on()
        for _ in range(200):
            for (sender, receiver), queue in self.network.items():
                self.deliver(sender, receiver, len(queue) or 1)
            for rank in self.ranks:
                while rank.running:
                    self.end_batch(rank, min(rank.running), DONE)
            if all(rank.is_dead or rank.is_clean for rank in self.ranks):
                break
            self.advance(1.0)
        for rank in self.ranks:
            if not rank.is_dead:
                assert rank.is_clean, rank.number
                assert len({done.job_id for done in rank.loaded}) == rank.job


Host.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestHost = Host.TestCase
