"""Scheduler side of layered loads (pure; owned by the scheduler's thread).

The request of such a load runs in the step in which it begins, so vLLM takes the blocks for
computed at once, and its prefix cache shows them to others. Until the step has ended well

* no other request is let in that would read them (`would_share`): vLLM lets it go on in the next
  step, whether those blocks have been computed again by then or not;
* nothing that the step computes of the request is saved: it is wrong where any rank's load failed;
* if it has failed, the prefix cache forgets the request's blocks from the first one not loaded.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from vllm_kvpool.transfer.ops import SavePlan


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

    def take(self) -> Iterator[LayeredLoad]:
        """The step has ended, and every rank has reported: its loads."""
        loads, self._loads = self._loads, {}
        return iter(loads.values())
