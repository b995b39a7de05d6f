"""Which beginnings of prompts somebody is known to have (pure)."""

from collections import OrderedDict
from collections.abc import Sequence


class PrefixMemory:
    """The hashes seen last, at most `max_hashes`; what was not seen for longest is forgotten.

    Of one prompt the longest beginnings go first, as an engine's cache lets go of a prompt's end
    first. So whatever is known, all that it begins with is known, too.

    An approximation of a replica's cache, or of the pool: it says where a prompt is likely to be
    found, nothing depends on its being right.
    """

    def __init__(self, max_hashes: int) -> None:
        self._max_hashes = max_hashes
        self._seen: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._seen)

    def add(self, prefix: Sequence[int]) -> None:
        for each in reversed(prefix):
            self._seen[each] = None
            self._seen.move_to_end(each)
        while len(self._seen) > self._max_hashes:
            self._seen.popitem(last=False)

    def match(self, prefix: Sequence[int]) -> int:
        """How many of the prompt's beginnings are known: the longest one's number.

        Each hash stands for the whole beginning up to it, so the longest known one decides; found
        by bisection.
        """
        low, high = 0, len(prefix)
        while low < high:
            middle = (low + high + 1) // 2
            if prefix[middle - 1] in self._seen:
                low = middle
            else:
                high = middle - 1
        return low

    def clear(self) -> None:
        self._seen.clear()
