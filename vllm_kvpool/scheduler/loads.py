"""Loads on the scheduler's side: whether one pays, and those within a single step (pure).

A request may run in the step in which its load begins (a layered one, or another connector's): vLLM
counts its blocks as computed and offers them to other requests. Until every rank has reported the
load as whole nothing of the request is saved, and no other that would read its blocks is scheduled
(`LayeredLoads.would_share`); of another connector's loads, others count as loaded as well.
If a load fails, its blocks leave the prefix cache and one request computes them again. Others that
share them go on at once, and compute wrong KV if that one is aborted: neither they nor who has
found blocks of theirs are saved. Scheduler's thread.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

WEIGHT = 0.3
MIN_PREFILL_TOKENS = 64
MAX_STEP_S = 30.0
RETRY_EVERY = 16
IDLE_WAIT_MIN_S = 0.001
IDLE_WAIT_MAX_S = 0.01
IDLE_WAIT_SHARE = 0.1


def idle_wait_s(waited_s: float) -> float:
    """How long an engine with nothing to compute may wait in a step.

    Grows with the time waited so far: a request that arrives meanwhile is held up.
    """
    return min(IDLE_WAIT_MAX_S, max(IDLE_WAIT_MIN_S, waited_s * IDLE_WAIT_SHARE))


class LoadCostModel:
    """Measured rates of computing and loading (`load_policy: auto`). Scheduler's thread."""

    def __init__(self) -> None:
        self._compute: float | None = None
        self._load: float | None = None
        self._last_step: tuple[float, int] | None = None
        self._refused = 0

    def step_planned(self, now: float, scheduled: Mapping[str, int]) -> None:
        """A step begins; the time since the one before gives that one's rate."""
        if self._last_step is not None:
            began, tokens = self._last_step
            if tokens >= MIN_PREFILL_TOKENS and 0 < now - began < MAX_STEP_S:
                self._compute = _mean(self._compute, tokens / (now - began))
        self._last_step = (now, sum(scheduled.values())) if scheduled else None

    def loaded(self, tokens: float, seconds: float) -> None:
        """A load has ended."""
        if seconds > 0 and tokens > 0:
            self._load = _mean(self._load, tokens / seconds)

    def loading_beats_computing(self, tokens: int) -> bool:
        """Whether to load; True every `RETRY_EVERY` times in any case, to measure the rate anew."""
        if tokens <= 0 or self._compute is None or self._load is None:
            return True
        if self._load >= self._compute:
            return True
        self._refused += 1
        return self._refused % RETRY_EVERY == 0


def _mean(old: float | None, new: float) -> float:
    return new if old is None else old + WEIGHT * (new - old)


@dataclass(slots=True)
class LayeredLoad:
    """A load of tokens [start, stop) into the request's only block table."""

    request_id: str
    tokens: Sequence[int]
    table: tuple[int, ...]
    start: int
    stop: int
    kept: int  # tokens that every rank has loaded

    def lost_blocks(self, block_size: int) -> tuple[int, ...]:
        """The blocks of tokens that were not loaded, or were computed after them."""
        return self.table[self.kept // block_size :] if self.kept < self.stop else ()


class LayeredLoads:
    """The layered loads of a step, from their allocation to the end of the step."""

    def __init__(self) -> None:
        self._loads: dict[str, LayeredLoad] = {}

    def begin(
        self, request_id: str, tokens: Sequence[int], table: Sequence[int], start: int, stop: int
    ) -> None:
        """Blocks are allocated; `table` has all of the request's."""
        load = LayeredLoad(request_id, tokens, tuple(table), start, stop, stop)
        self._loads[request_id] = load

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._loads

    def would_share(
        self, tokens: Callable[[], Sequence[int]], computed: int, block_size: int
    ) -> bool:
        """Whether a request of which `computed` tokens are in the engine's own cache may read
        blocks that are being loaded. It compares tokens alone, so it may say True too often."""
        for load in self._loads.values():
            stop = load.start + block_size
            if computed > load.start and tokens()[:stop] == load.tokens[:stop]:
                return True
        return False

    def stopped(self, request_id: str, tokens: int) -> None:
        """A rank has loaded only the first `tokens` tokens of the request."""
        load = self._loads.get(request_id)
        if load is not None:
            load.kept = max(load.start, min(load.kept, tokens))

    def take(self) -> Collection[LayeredLoad]:
        """The loads of the step, which has ended; every rank has reported."""
        if not self._loads:
            return ()
        loads, self._loads = self._loads, {}
        return loads.values()


NEVER = math.inf


@dataclass(slots=True)
class ForeignLoad:
    """A request that has started from blocks that another connector may not have filled."""

    request_id: str | None  # None: it has left its blocks; vLLM's prefix cache may still have them
    step: float  # after which it is known; `NEVER` if it goes on from lost blocks
    table: Sequence[int]  # the first KV cache group's: of several, vLLM takes no blocks back
    kept: int | None = None  # tokens before the first block that was not filled; None: all were

    def lost_blocks(self, block_size: int) -> tuple[int, ...]:
        """The blocks of tokens that were not loaded, or were computed after them."""
        return () if self.kept is None else tuple(self.table[self.kept // block_size :])

    def lose(self, block_ids: Set[int], block_size: int) -> None:
        """These blocks are not filled."""
        stop = len(self.table) if self.kept is None else self.kept // block_size
        for index, block_id in enumerate(self.table[:stop]):
            if block_id in block_ids:
                self.kept = index * block_size
                return


class ForeignLoads:
    """Requests that have started from loads of other connectors, until these are known to be whole.

    With asynchronous scheduling, and over a pipeline, further steps are planned before.
    """

    def __init__(self) -> None:
        self._loads: dict[str, ForeignLoad] = {}
        self._left: list[ForeignLoad] = []

    def __bool__(self) -> bool:
        return bool(self._loads or self._left)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._loads

    def begin(self, request_id: str, step: int, table: Sequence[int]) -> None:
        """The request starts in this step."""
        self._loads[request_id] = ForeignLoad(request_id, step, tuple(table))

    def grow(self, request_id: str, table: Sequence[int]) -> None:
        """The request goes on before its load is known to be whole."""
        self._loads[request_id].table = tuple(table)

    def requests(self) -> Set[str]:
        """Those whose loads are not known to be whole."""
        return self._loads.keys()

    def is_lost(self, request_id: str) -> bool:
        """Whether the request goes on from blocks that are lost."""
        load = self._loads.get(request_id)
        return load is not None and load.step == NEVER

    @property
    def any_lost(self) -> bool:
        """Whether any request goes on from blocks that are lost."""
        return any(load.kept is not None for load in (*self._loads.values(), *self._left))

    def lose(self, request_id: str, table: Sequence[int] = (), kept: int = 0) -> None:
        """The request goes on from blocks of which those after `kept` tokens are lost."""
        self._loads[request_id] = ForeignLoad(request_id, NEVER, tuple(table), kept)

    def leave(self, request_id: str, step: int) -> ForeignLoad | None:
        """The request has left its blocks: others may have found them in steps before this one."""
        load = self._loads.pop(request_id, None)
        if load is not None:
            load.request_id, load.step = None, step
            self._left.append(load)
        return load

    @property
    def has_left(self) -> bool:
        """Whether a step's end is to be known because of requests that have left their blocks."""
        return bool(self._left)

    def note_invalid(self, invalid: Set[int], block_size: int) -> Set[int]:
        """A step has ended with these blocks not filled; all blocks that are lost since."""
        if not invalid and not self.any_lost:
            return frozenset()
        every, lost, known = [*self._loads.values(), *self._left], set(invalid), -1
        while known < len(lost):  # they may have found each other's blocks in the prefix cache
            known = len(lost)
            for load in every:
                load.lose(lost, block_size)
                lost.update(load.lost_blocks(block_size))
        return lost

    def take(self, step: int) -> Iterator[ForeignLoad]:
        """The loads of steps up to this one, which has ended; call `note_invalid` first."""
        every = [*self._loads.values(), *self._left]
        self._loads = {each: load for each, load in self._loads.items() if load.step > step}
        self._left = [load for load in self._left if load.step > step]
        return (load for load in every if load.step <= step)
