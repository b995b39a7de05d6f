"""Loads on the scheduler's side: whether one pays, and those that begin and end in one step (pure).

The request of a layered load runs in the step in which the load begins, so vLLM takes the blocks
for computed at once, and its prefix cache shows them to others. Until the step has ended well

* no other request is let in that would read them (`would_share`): vLLM lets it go on in the next
  step, whether those blocks have been computed again by then or not;
* nothing that the step computes of the request is saved: it is wrong where any rank's load failed;
* if it has failed, the prefix cache forgets the request's blocks from the first one not loaded.

All of it belongs to the scheduler's thread.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from vllm_kvpool.transfer.ops import SavePlan

WEIGHT = 0.3
MIN_PREFILL_TOKENS = 64
MAX_STEP_S = 30.0
RETRY_EVERY = 16
IDLE_WAIT_MIN_S = 0.001
IDLE_WAIT_MAX_S = 0.01
IDLE_WAIT_SHARE = 0.1


def idle_wait_s(waited_s: float) -> float:
    """How long an engine with nothing to compute may block, once a step, on what it has waited for.

    What is waited for ends the wait at once; a request that arrives meanwhile is held up by it.
    """
    return min(IDLE_WAIT_MAX_S, max(IDLE_WAIT_MIN_S, waited_s * IDLE_WAIT_SHARE))


class LoadCostModel:
    """Owned by the scheduler's thread."""

    def __init__(self) -> None:
        self._compute: float | None = None
        self._load: float | None = None
        self._last_step: tuple[float, int] | None = None
        self._refused = 0

    def step_planned(self, now: float, scheduled: Mapping[str, int]) -> None:
        """A step begins; the time since the one before tells that one's rate."""
        if self._last_step is not None:
            began, tokens = self._last_step
            if tokens >= MIN_PREFILL_TOKENS and 0 < now - began < MAX_STEP_S:
                self._compute = _mean(self._compute, tokens / (now - began))
        self._last_step = (now, sum(scheduled.values())) if scheduled else None

    def loaded(self, tokens: float, seconds: float) -> None:
        """A load of so many tokens has taken so long."""
        if seconds > 0 and tokens > 0:
            self._load = _mean(self._load, tokens / seconds)

    def loading_beats_computing(self, tokens: int) -> bool:
        """Whether to load; now and then yes even if not, so that the rate stays current."""
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
    kept: int  # tokens that every rank has
    save: SavePlan | None = None  # of a request that has ended with the step

    @property
    def failed(self) -> bool:
        return self.kept < self.stop

    def lost_blocks(self, block_size: int) -> tuple[int, ...]:
        """The blocks that hold what was not loaded, or was computed from it."""
        return self.table[self.kept // block_size :] if self.failed else ()


class LayeredLoads:
    """Those of one step, from their allocation until the step has ended."""

    def __init__(self) -> None:
        self._loads: dict[str, LayeredLoad] = {}

    def begin(
        self, request_id: str, tokens: Sequence[int], table: Sequence[int], start: int, stop: int
    ) -> None:
        """Blocks are allocated: `table` names all of the request's."""
        load = LayeredLoad(request_id, tokens, tuple(table), start, stop, stop)
        self._loads[request_id] = load

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._loads

    def get(self, request_id: str) -> LayeredLoad | None:
        """The request's load in this step."""
        return self._loads.get(request_id)

    def would_share(
        self, tokens: Callable[[], Sequence[int]], computed: int, block_size: int
    ) -> bool:
        """Whether a request of which `computed` tokens are in the engine's own cache may read
        blocks that are being loaded. Says so too often where more than tokens tells KV apart."""
        for load in self._loads.values():
            stop = load.start + block_size
            if computed > load.start and tokens()[:stop] == load.tokens[:stop]:
                return True
        return False

    def stopped(self, request_id: str, tokens: int) -> None:
        """Some rank has only so many tokens of the request."""
        load = self._loads.get(request_id)
        if load is not None:
            load.kept = max(load.start, min(load.kept, tokens))

    def take(self) -> Collection[LayeredLoad]:
        """The step has ended, and every rank has reported: its loads."""
        if not self._loads:
            return ()
        loads, self._loads = self._loads, {}
        return loads.values()
