"""Caches of a given number of chunks, to count what of a trace each would have had.

The baselines are written after their papers, and get what helps them: a request's chunks are used
from the last to the first, so that a prompt's end is older than its beginning. Times in ns.

* `Lru`, `Belady` (which also turns away what is used later than all that it has);
* `TwoQueues`: probation and protected segments with a memory of what left (2Q, Johnson and Shasha
  1994; SLRU, Karedla et al. 1994), which the host tier had before;
* `Credit`: each hit is worth five minutes, which files had before;
* `Arc` (Megiddo and Modha, FAST 2003), `Lirs` (Jiang and Zhang, SIGMETRICS 2002), `WTinyLfu`
  (Einziger et al., TOS 2017, with exact counts), `S3Fifo` (Yang et al., SOSP 2023), `Sieve` (Zhang
  et al., NSDI 2024), `Lfuda` (Arlitt et al. 2000; GDSF where sizes and costs are equal).

`Scored` is what stores do: a policy of vllm_kvpool/storage/eviction.py, and only a chunk that
nothing comes after may leave.
"""

import heapq
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

from vllm_kvpool.storage.eviction import EvictedScores, EvictionPolicy


class Request(NamedTuple):
    """Its time, and the chunks of its prompt: equal numbers are equal prompts up to there."""

    now_ns: int
    chunks: tuple[int, ...]


class Cache(Protocol):
    """What `play` needs of it."""

    def __contains__(self, chunk: int) -> bool: ...

    def serve(self, request: Request, found: int) -> None:
        """Take the request's chunks in, of which so many were found."""


class Played(NamedTuple):
    """Chunks asked for and found, in the first half of the time and in the second."""

    asked: tuple[int, int]
    found: tuple[int, int]

    @property
    def ratio(self) -> float:
        return sum(self.found) / sum(self.asked)

    def ratio_of(self, half: int) -> float:
        return self.found[half] / self.asked[half] if self.asked[half] else 0.0


def play(cache: Cache, requests: Sequence[Request]) -> Played:
    """A chunk counts as found if all before it are: without its beginning a prompt is computed."""
    middle = (requests[0].now_ns + requests[-1].now_ns) // 2
    asked, found = [0, 0], [0, 0]
    for request in requests:
        chunks, hits = request.chunks, 0
        while hits < len(chunks) and chunks[hits] in cache:
            hits += 1
        half = request.now_ns >= middle
        asked[half] += len(chunks)
        found[half] += hits
        cache.serve(request, hits)
    return Played((asked[0], asked[1]), (found[0], found[1]))


class Unbounded:
    def __init__(self) -> None:
        self._chunks: set[int] = set()

    def __contains__(self, chunk: int) -> bool:
        return chunk in self._chunks

    def serve(self, request: Request, found: int) -> None:
        self._chunks.update(request.chunks)


class Scored:
    """Leaves leave by score: `policy` is a store's."""

    def __init__(self, capacity: int, policy: EvictionPolicy, *, remembers: bool = True) -> None:
        self._capacity = capacity
        self._policy = policy
        self._evicted = EvictedScores(capacity * policy.remembered * remembers)
        self._scores: dict[int, int] = {}
        self._parents: dict[int, int] = {}
        self._children: Counter[int] = Counter()
        self._leaves: list[tuple[int, int, int]] = []  # score, minus position, chunk

    def __contains__(self, chunk: int) -> bool:
        return chunk in self._scores

    def serve(self, request: Request, found: int) -> None:
        now_ns, chunks = request.now_ns, request.chunks[: self._capacity]
        for chunk in chunks[:found]:
            self._scores[chunk] = self._policy.on_hit(self._scores[chunk], now_ns)
        for position in range(found, len(chunks)):
            self._put(chunks, position, now_ns)
        if chunks and not self._children[chunks[-1]]:
            self._line_up(chunks[-1], len(chunks) - 1)

    def _put(self, chunks: Sequence[int], position: int, now_ns: int) -> None:
        chunk = chunks[position]
        parent = chunks[position - 1] if position else -1
        self._children[parent] += 1  # so that it stays while room is made
        if len(self._scores) >= self._capacity:
            self._evict()
        known = self._evicted.take(str(chunk))
        policy = self._policy
        self._scores[chunk] = (
            policy.on_put(now_ns) if known is None else policy.on_hit(known, now_ns)
        )
        self._parents[chunk] = parent

    def _line_up(self, chunk: int, position: int) -> None:
        heapq.heappush(self._leaves, (self._scores[chunk], -position, chunk))

    def _evict(self) -> None:
        while True:
            score, minus_position, chunk = heapq.heappop(self._leaves)
            if self._scores.get(chunk) != score or self._children[chunk]:
                continue  # its place is stale
            self._evicted.remember(str(chunk), self._scores.pop(chunk))
            del self._children[chunk]
            parent = self._parents.pop(chunk)
            self._children[parent] -= 1
            if parent >= 0 and not self._children[parent]:
                self._line_up(parent, -minus_position - 1)
            return


class Belady:
    """The chunk used latest from now leaves first."""

    def __init__(self, capacity: int, requests: Sequence[Request]) -> None:
        self._capacity = capacity
        self._uses: dict[int, deque[int]] = {}
        for number, request in enumerate(requests):
            for chunk in request.chunks:
                self._uses.setdefault(chunk, deque()).append(number)
        self._next: dict[int, float] = {}
        self._line: list[tuple[float, int]] = []

    def __contains__(self, chunk: int) -> bool:
        return chunk in self._next

    def serve(self, request: Request, found: int) -> None:
        for chunk in request.chunks:
            uses = self._uses[chunk]
            uses.popleft()
            self._next[chunk] = uses[0] if uses else math.inf
            heapq.heappush(self._line, (-self._next[chunk], chunk))
        while len(self._next) > self._capacity:
            minus_next, chunk = heapq.heappop(self._line)
            if self._next.get(chunk) == -minus_next:
                del self._next[chunk]


class Flat:
    """A cache that knows of no prompts: single chunks, each used in its turn."""

    def serve(self, request: Request, found: int) -> None:
        for chunk in reversed(request.chunks):
            self.use(chunk, request.now_ns)

    def use(self, chunk: int, now_ns: int) -> None:
        """Hit the chunk, or put it and evict another."""
        raise NotImplementedError


Queue = OrderedDict[int, None]


def oldest(queue: Queue) -> int:
    return queue.popitem(last=False)[0]


class Lru(Flat):
    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._queue: Queue = OrderedDict()

    def __contains__(self, chunk: int) -> bool:
        return chunk in self._queue

    def use(self, chunk: int, now_ns: int) -> None:
        self._queue[chunk] = None
        self._queue.move_to_end(chunk)
        if len(self._queue) > self._capacity:
            oldest(self._queue)


class TwoQueues(Flat):
    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._probation: Queue = OrderedDict()
        self._protected: Queue = OrderedDict()
        self._remembered: Queue = OrderedDict()

    def __contains__(self, chunk: int) -> bool:
        return chunk in self._probation or chunk in self._protected

    def use(self, chunk: int, now_ns: int) -> None:
        if chunk in self or chunk in self._remembered:
            self._remembered.pop(chunk, None)
            self._probation.pop(chunk, None)
            self._protected[chunk] = None
            self._protected.move_to_end(chunk)
            if len(self._protected) > self._capacity * 3 // 4:
                self._probation[oldest(self._protected)] = None
        else:
            self._probation[chunk] = None
        if len(self._probation) + len(self._protected) > self._capacity:
            self._remembered[oldest(self._probation)] = None
            if len(self._remembered) > self._capacity:
                oldest(self._remembered)


class Ranked(Flat):
    """The chunk with the lowest rank leaves, of equal ones that whose turn was first."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._ranks: dict[int, tuple[float, int]] = {}
        self._line: list[tuple[tuple[float, int], int]] = []
        self._turn = 0

    def __contains__(self, chunk: int) -> bool:
        return chunk in self._ranks

    def use(self, chunk: int, now_ns: int) -> None:
        if chunk not in self._ranks and len(self._ranks) >= self._capacity:
            while True:
                rank, victim = heapq.heappop(self._line)
                if self._ranks.get(victim) == rank:
                    break
            del self._ranks[victim]
            self.left(victim, rank[0])
        self._turn += 1
        rank = (self.rank(chunk, now_ns), self._turn)
        self._ranks[chunk] = rank
        heapq.heappush(self._line, (rank, chunk))

    def rank(self, chunk: int, now_ns: int) -> float:
        raise NotImplementedError

    def left(self, chunk: int, rank: float) -> None:
        pass


class Credit(Ranked):
    def rank(self, chunk: int, now_ns: int) -> float:
        now_s = now_ns / 1e9
        if chunk not in self._ranks:
            return now_s
        return min(max(self._ranks[chunk][0], now_s) + 300.0, now_s + 6 * 3600.0)


class Lfuda(Ranked):
    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._uses: Counter[int] = Counter()
        self._age = 0.0

    def rank(self, chunk: int, now_ns: int) -> float:
        self._uses[chunk] += 1
        return self._age + self._uses[chunk]

    def left(self, chunk: int, rank: float) -> None:
        del self._uses[chunk]
        self._age = rank


class Arc(Flat):
    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._target = 0.0  # of those used once
        self._once: Queue = OrderedDict()
        self._often: Queue = OrderedDict()
        self._once_gone: Queue = OrderedDict()
        self._often_gone: Queue = OrderedDict()

    def __contains__(self, chunk: int) -> bool:
        return chunk in self._once or chunk in self._often

    def use(self, chunk: int, now_ns: int) -> None:
        once_gone, often_gone = self._once_gone, self._often_gone
        if chunk in self:
            self._once.pop(chunk, None)
        elif chunk in once_gone:
            step = max(1.0, len(often_gone) / len(once_gone))
            self._target = min(self._target + step, self._capacity)
            self._replace(was_often=False)
            del once_gone[chunk]
        elif chunk in often_gone:
            step = max(1.0, len(once_gone) / len(often_gone))
            self._target = max(self._target - step, 0.0)
            self._replace(was_often=True)
            del often_gone[chunk]
        else:
            self._make_room()
            self._once[chunk] = None
            return
        self._often[chunk] = None
        self._often.move_to_end(chunk)

    def _make_room(self) -> None:
        of_once = len(self._once) + len(self._once_gone)
        every = of_once + len(self._often) + len(self._often_gone)
        if of_once >= self._capacity:
            if len(self._once) < self._capacity:
                oldest(self._once_gone)
                self._replace(was_often=False)
            else:
                oldest(self._once)
        elif every >= self._capacity:
            if every >= 2 * self._capacity:
                oldest(self._often_gone)
            self._replace(was_often=False)

    def _replace(self, *, was_often: bool) -> None:
        if len(self._once) + len(self._often) < self._capacity:
            return
        num_once = len(self._once)
        if num_once and (num_once > self._target or (was_often and num_once == self._target)):
            self._once_gone[oldest(self._once)] = None
        elif self._often:
            self._often_gone[oldest(self._often)] = None
        else:
            self._once_gone[oldest(self._once)] = None


class Lirs(Flat):
    """1 % for chunks with a long recency; of the stack's others at most twice the capacity."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._most_low = capacity - max(1, capacity // 100)
        self._stack: OrderedDict[int, bool] = OrderedDict()  # whether its recency is low
        self._num_low = 0
        self._resident: Queue = OrderedDict()  # those with a high one
        self._gone: Queue = OrderedDict()  # in the stack, not here

    def __contains__(self, chunk: int) -> bool:
        return self._stack.get(chunk, False) or chunk in self._resident

    def use(self, chunk: int, now_ns: int) -> None:
        stack = self._stack
        if stack.get(chunk, False):
            stack.move_to_end(chunk)
            self._prune()
            return
        is_here = chunk in self._resident
        if not is_here and self._num_low + len(self._resident) >= self._capacity:
            victim = oldest(self._resident)
            if victim in stack:
                self._gone[victim] = None
        if chunk in stack or self._num_low < self._most_low:
            self._gone.pop(chunk, None)
            self._resident.pop(chunk, None)
            stack[chunk] = True
            stack.move_to_end(chunk)
            self._num_low += 1
            if self._num_low > self._most_low:
                demoted = next(iter(stack))
                del stack[demoted]
                self._num_low -= 1
                self._resident[demoted] = None
                self._prune()
        else:
            stack[chunk] = False
            self._resident[chunk] = None
            self._resident.move_to_end(chunk)
        if len(self._gone) > 2 * self._capacity:
            del stack[oldest(self._gone)]

    def _prune(self) -> None:
        while self._stack:
            chunk, is_low = next(iter(self._stack.items()))
            if is_low:
                return
            del self._stack[chunk]
            self._gone.pop(chunk, None)


class WTinyLfu(Flat):
    def __init__(self, capacity: int) -> None:
        self._most_new = max(1, capacity // 100)
        self._most = capacity - self._most_new
        self._most_protected = self._most * 8 // 10
        self._new: Queue = OrderedDict()
        self._probation: Queue = OrderedDict()
        self._protected: Queue = OrderedDict()
        self._counts: dict[int, int] = {}
        self._sample = 0
        self._period = 10 * capacity

    def __contains__(self, chunk: int) -> bool:
        return chunk in self._new or chunk in self._probation or chunk in self._protected

    def use(self, chunk: int, now_ns: int) -> None:
        self._count(chunk)
        if chunk in self._new:
            self._new.move_to_end(chunk)
        elif chunk in self._protected:
            self._protected.move_to_end(chunk)
        elif chunk in self._probation:
            del self._probation[chunk]
            self._protected[chunk] = None
            if len(self._protected) > self._most_protected:
                self._probation[oldest(self._protected)] = None
        else:
            self._new[chunk] = None
            if len(self._new) > self._most_new:
                self._admit(oldest(self._new))

    def _admit(self, chunk: int) -> None:
        if len(self._probation) + len(self._protected) >= self._most:
            victim = next(iter(self._probation or self._protected))
            if self._counts.get(chunk, 0) <= self._counts.get(victim, 0):
                return
            (self._probation if victim in self._probation else self._protected).pop(victim)
        self._probation[chunk] = None

    def _count(self, chunk: int) -> None:
        self._counts[chunk] = min(15, self._counts.get(chunk, 0) + 1)
        self._sample += 1
        if self._sample >= self._period:
            self._sample //= 2
            self._counts = {k: v // 2 for k, v in self._counts.items() if v > 1}


class S3Fifo(Flat):
    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._most_small = max(1, capacity // 10)
        self._small: Queue = OrderedDict()
        self._main: Queue = OrderedDict()
        self._gone: Queue = OrderedDict()
        self._uses: dict[int, int] = {}

    def __contains__(self, chunk: int) -> bool:
        return chunk in self._uses

    def use(self, chunk: int, now_ns: int) -> None:
        if chunk in self._uses:
            self._uses[chunk] = min(3, self._uses[chunk] + 1)
            return
        while len(self._uses) >= self._capacity:
            if len(self._small) >= self._most_small or not self._main:
                self._evict_small()
            else:
                self._evict_main()
        if chunk in self._gone:
            del self._gone[chunk]
            self._main[chunk] = None
        else:
            self._small[chunk] = None
        self._uses[chunk] = 0

    def _evict_small(self) -> None:
        while self._small:
            chunk = oldest(self._small)
            if self._uses[chunk] > 1:
                self._uses[chunk] = 0
                self._main[chunk] = None
                continue
            del self._uses[chunk]
            self._gone[chunk] = None
            if len(self._gone) > self._capacity - self._most_small:
                oldest(self._gone)
            return

    def _evict_main(self) -> None:
        while True:
            chunk = oldest(self._main)
            if not self._uses[chunk]:
                del self._uses[chunk]
                return
            self._uses[chunk] -= 1
            self._main[chunk] = None


class Sieve(Flat):
    """A FIFO queue, and a hand that goes from the oldest to the newest and passes what was used."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._is_used: dict[int, bool] = {}
        self._newer: dict[int, int] = {}
        self._older: dict[int, int] = {}
        self._oldest = self._newest = self._hand = -1

    def __contains__(self, chunk: int) -> bool:
        return chunk in self._is_used

    def use(self, chunk: int, now_ns: int) -> None:
        if chunk in self._is_used:
            self._is_used[chunk] = True
            return
        if len(self._is_used) >= self._capacity:
            self._evict()
        self._is_used[chunk] = False
        self._older[chunk], self._newer[chunk] = self._newest, -1
        if self._newest >= 0:
            self._newer[self._newest] = chunk
        else:
            self._oldest = chunk
        self._newest = chunk

    def _evict(self) -> None:
        hand = self._hand if self._hand >= 0 else self._oldest
        while self._is_used[hand]:
            self._is_used[hand] = False
            hand = self._newer[hand] if self._newer[hand] >= 0 else self._oldest
        older, newer = self._older.pop(hand), self._newer.pop(hand)
        if older >= 0:
            self._newer[older] = newer
        else:
            self._oldest = newer
        if newer >= 0:
            self._older[newer] = older
        else:
            self._newest = older
        del self._is_used[hand]
        self._hand = newer


BASELINES: dict[str, Callable[[int], Cache]] = {
    "2Q (host's `frequency` before)": TwoQueues,
    "credit (files' `frequency` before)": Credit,
    "LFUDA": Lfuda,
    "ARC": Arc,
    "LIRS": Lirs,
    "W-TinyLFU": WTinyLfu,
    "S3-FIFO": S3Fifo,
    "SIEVE": Sieve,
}


def total_chunks(requests: Iterable[Request]) -> int:
    return len({chunk for request in requests for chunk in request.chunks})
