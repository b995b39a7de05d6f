"""An index of the replicas, or of the pool, that are likely to have a prompt's beginning (pure).

A prompt is known by the hashes of its beginnings, `RequestSpec.prefix`, shortest first: one for
each SPAN_BYTES up to LINEAR_SPANS, then each longer than the one before by a share of GROWTH. So a
prompt of any length has at most some hundred hashes, and the common beginning of two prompts is
known to within that share. The index approximates caches: it says where to look first, and no
result depends on it.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_kvpool.router.control.requests import RequestSpec

SPAN_BYTES = 1024
LINEAR_SPANS = 32
GROWTH = 0.0625
MAX_SPANS = 1 << 16
MAX_HOLDERS = 16
"""Holders kept for a beginning, the last ones first. A beginning that all have helps no choice."""
MAX_HASHES = 1 << 18


def _segment_ends() -> Iterator[int]:
    end = 0
    while end < MAX_SPANS:
        end += max(1, int(end * GROWTH)) if end >= LINEAR_SPANS else 1
        yield end


SEGMENT_ENDS = tuple(_segment_ends())
"""Ends of the beginnings of a prompt, in spans."""


def spans_of(depth: int) -> int:
    """Return the spans that the first `depth` hashes of a prompt stand for."""
    return SEGMENT_ENDS[depth - 1] if depth else 0


@dataclass(slots=True, eq=False)
class Holder:
    """A cache, empty at first: an engine's that has been started again is another one."""

    owner: Any = None
    num_held: int = 0
    """Beginnings that it is taken to have."""
    is_gone: bool = False
    """Entries that have it go in time."""


class PrefixIndex:
    """Beginnings of prompts by who has them; those not seen for longest are forgotten first.

    Of one prompt the longest beginnings go first, as an engine's cache lets go of a prompt's end
    first. So what is known of a prompt is all that is shorter than some beginning.
    """

    def __init__(self, max_hashes: int = MAX_HASHES) -> None:
        self._max_hashes = max_hashes
        self._holders: OrderedDict[int, tuple[Holder, ...]] = OrderedDict()  # the last one first

    def __len__(self) -> int:
        return len(self._holders)

    def add(self, prefix: Sequence[int], holder: Holder) -> None:
        """Record that `holder` has these beginnings of one prompt, the shortest first."""
        holders = self._holders
        for each in reversed(prefix):
            known = holders.get(each, ())
            if holder not in known:
                holder.num_held += 1
                if len(known) == MAX_HOLDERS:
                    known[-1].num_held -= 1
                holders[each] = (holder, *known[: MAX_HOLDERS - 1])
            holders.move_to_end(each)
        while len(holders) > self._max_hashes:
            for gone in holders.popitem(last=False)[1]:
                gone.num_held -= 1

    def depth(self, prefix: Sequence[int]) -> int:
        """Return the number of the prompt's beginnings that any holder has."""
        low, high = 0, len(prefix)
        while low < high:
            middle = (low + high + 1) // 2
            if prefix[middle - 1] in self._holders:
                low = middle
            else:
                high = middle - 1
        return low

    def holders(self, prefix: Sequence[int], most: int) -> dict[Holder, int]:
        """Return at most `most` holders of the longest beginnings, and the number that each has."""
        found: dict[Holder, int] = {}
        for depth in range(self.depth(prefix), 0, -1):
            for holder in self._holders.get(prefix[depth - 1], ()):
                if holder not in found and not holder.is_gone:
                    found[holder] = depth
                    if len(found) == most:
                        return found
        return found


class PoolIndex:
    """The beginnings of prompts that the pool should have, and whether the pool is up."""

    def __init__(self) -> None:
        self.is_up = True
        self.prefixes = PrefixIndex()
        """Empty while the pool is down."""
        self._pool = Holder()

    def set_up(self, *, is_up: bool) -> bool:
        """Note whether the pool is up; return True if that has changed."""
        has_changed, self.is_up = is_up is not self.is_up, is_up
        if has_changed and not is_up:
            self.prefixes = PrefixIndex()  # the pool may come back empty
        return has_changed

    def add(self, prefix: Sequence[int]) -> None:
        """Note that the pool has a prompt. Without effect while the pool is down."""
        if self.is_up:
            self.prefixes.add(prefix, self._pool)

    def unknown_tokens(self, ask: "RequestSpec") -> int:
        """Return the number of prompt tokens that the pool is not known to have."""
        known = spans_of(self.prefixes.depth(ask.prefix)) * ask.prefix_tokens
        return max(0, ask.prompt_tokens - known)
