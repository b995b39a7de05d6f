"""What caches find of a trace of prompts: a cache without bounds, and a clairvoyant one."""

import heapq
import json
import math
from collections import deque
from collections.abc import Sequence
from pathlib import Path

Prompt = tuple[int, ...]
"""Ids of a prompt's blocks: equal ids are equal prompts up to there."""


def read_trace(path: Path) -> list[Prompt]:
    """Read the prompts of a trace: a JSON object a line, with `hash_ids`."""
    with path.open() as lines:
        return [tuple(json.loads(line)["hash_ids"]) for line in lines]


def found_without_bounds(prompts: Sequence[Prompt]) -> float:
    """Return the share of blocks found if nothing is ever evicted."""
    return _found(prompts, math.inf)


def found_by_clairvoyance(prompts: Sequence[Prompt], capacity: int) -> float:
    """Return the share found if the block that is used latest from now is evicted (Belady 1966)."""
    return _found(prompts, capacity)


def _found(prompts: Sequence[Prompt], capacity: float) -> float:
    """A block counts as found if all before it are: without its beginning a prompt is computed."""
    uses: dict[int, deque[float]] = {}
    for number, prompt in enumerate(prompts):
        for block in prompt:
            uses.setdefault(block, deque()).append(number)
    next_use: dict[int, float] = {}
    line: list[tuple[float, int]] = []
    asked = found = 0
    for prompt in prompts:
        hits = 0
        while hits < len(prompt) and prompt[hits] in next_use:
            hits += 1
        asked, found = asked + len(prompt), found + hits
        for block in prompt:
            uses[block].popleft()
            next_use[block] = uses[block][0] if uses[block] else math.inf
            heapq.heappush(line, (-next_use[block], block))
        while len(next_use) > capacity:
            minus_next, block = heapq.heappop(line)
            if next_use.get(block) == -minus_next:
                del next_use[block]
    return found / asked
