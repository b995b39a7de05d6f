"""What a full tier finds if a conversation's turn supersedes the turn before it.

    python benchmarks/bench_turns.py --trace conversation_trace.jsonl --json turns.json

Simulated: blocks of 512 tokens in a tier that evicts as `storage/eviction.py` scores, leaves first.
A block counts as found if all blocks before it are. `turns supersede`: after each turn, blocks of
the former prompt that this prompt lacks get the lowest score, so they leave the tier first.

* `trace`: Mooncake's (`FAST25-release/traces/conversation_trace.jsonl`, FAST'25), which is not part
  of this project; `CONVERSATION_TRACE` names it to run_all.py. Without it a full run measures
  nothing, so that the kept result stays whole. The trace has no sessions. A request
  is taken as the next turn of the latest prompt of which it has all blocks but the last, at least
  two, if it has more tokens than that prompt.
* `agents`: made up, with sessions that are known. 150 sessions begin within an hour and have 36
  turns in the median. A prompt is 16 blocks at first, of which 12 are one of three system prompts;
  a turn adds one or two. A prompt's end is a block of its own, which no later prompt has. In 44 %
  of the sessions one turn goes back to an earlier turn, and what came after that one is never asked
  for again. Capacities are shares of all blocks.
"""

import heapq
import json
import os
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.common import Result, Row, run_script
from vllm_kvpool.storage.eviction import DEFAULT_POLICY, POLICIES, EvictedScores

VARIABLE = "CONVERSATION_TRACE"
CAPACITIES, QUICK_CAPACITIES = (1_000, 5_000, 10_000, 30_000), (1_000,)
QUICK_REQUESTS = 1_000
SHARES = (0.05, 0.1, 0.2)
SESSIONS, QUICK_SESSIONS = 150, 15
HOUR_NS, SECOND_NS = 3_600 * 10**9, 10**9
EPOCH_NS = 10**18  # of the first request: scores are times, and the lowest score is older
MEDIAN_TURNS, TURNS_SIGMA, MOST_TURNS = 36, 0.6, 200
SYSTEM_PROMPTS, SYSTEM_BLOCKS, FIRST_BLOCKS = 3, 12, 4
BRANCHES = 0.44
PAUSE_S, PAUSE_SIGMA = 10.0, 1.0
LOWEST = 0
SEED = 19


class Turn(NamedTuple):
    """A request: its time, its prompt's blocks, and the prompt that it follows on."""

    now_ns: int
    blocks: tuple[int, ...]
    former: tuple[int, ...] = ()


class Tier:
    """Blocks of which the leaf with the lowest score leaves."""

    def __init__(self, capacity: int) -> None:
        self._policy = POLICIES[DEFAULT_POLICY]
        self._capacity = capacity
        self._evicted = EvictedScores(capacity * self._policy.remembered)
        self._scores: dict[int, int] = {}
        self._places: dict[int, tuple[int, int]] = {}  # the block before it, and its position
        self._children: Counter[int] = Counter()
        self._leaves: list[tuple[int, int, int]] = []  # score, minus position, block

    def serve(self, turn: Turn) -> int:
        """Store the blocks that are not here and return how many were found."""
        blocks, now_ns, parent = turn.blocks[: self._capacity], turn.now_ns, -1
        found = 0
        while found < len(blocks) and blocks[found] in self._scores:
            self._scores[blocks[found]] = self._policy.on_hit(self._scores[blocks[found]], now_ns)
            parent, found = blocks[found], found + 1
        for position, block in enumerate(blocks[found:], found):
            self._children[parent] += 1  # the parent is no leaf while room is made
            if len(self._scores) >= self._capacity:
                self._evict()
            known = self._evicted.take(str(block))
            self._scores[block] = (
                self._policy.on_put(now_ns) if known is None else self._policy.on_hit(known, now_ns)
            )
            self._raise(parent, self._scores[block])
            self._places[block] = parent, position
            parent = block
        self._queue(parent)
        return found

    def supersede(self, turn: Turn) -> None:
        """Give the lowest score to what the former prompt has and this one has not."""
        for block in set(turn.former).difference(turn.blocks) & self._scores.keys():
            self._scores[block] = LOWEST
            self._queue(block)

    def _raise(self, block: int, score: int) -> None:
        """Give a block, and those before it, at least the score of a block after it."""
        while block in self._scores and self._scores[block] < score:
            self._scores[block] = score
            block = self._places[block][0]

    def _queue(self, block: int) -> None:
        if block in self._scores and not self._children[block]:
            entry = (self._scores[block], -self._places[block][1], block)
            heapq.heappush(self._leaves, entry)

    def _evict(self) -> None:
        while True:
            score, _, block = heapq.heappop(self._leaves)
            if self._scores.get(block) == score and not self._children[block]:
                break  # else the entry is out of date
        self._evicted.remember(str(block), self._scores.pop(block))
        parent, _ = self._places.pop(block)
        self._children[parent] -= 1
        self._queue(parent)


def found(turns: Sequence[Turn], capacity: int, *, supersede: bool) -> float:
    """Return the share of all blocks that a tier of this capacity has when they are asked for."""
    tier, hits = Tier(capacity), 0
    for turn in turns:
        hits += tier.serve(turn)
        if supersede:
            tier.supersede(turn)
    return hits / sum(len(turn.blocks) for turn in turns)


def of_trace(path: Path) -> list[Turn]:
    """Read a trace; the former prompt of a request is guessed from the blocks."""
    turns: list[Turn] = []
    latest: dict[int, tuple[int, int]] = {}  # by a prompt's last block but one
    for line in path.read_text().splitlines():
        record = json.loads(line)
        blocks, tokens = tuple(record["hash_ids"]), record["input_length"]
        known = [latest[block] for block in blocks if block in latest]
        former = max((at for at, size in known if size < tokens), default=None)
        turns.append(
            Turn(
                EPOCH_NS + int(record["timestamp"]) * 10**6,
                blocks,
                () if former is None else turns[former].blocks,
            )
        )
        if len(blocks) > 2:
            latest[blocks[-2]] = len(turns) - 1, tokens
    return turns


def of_agents(sessions: int) -> list[Turn]:
    """Make up the sessions of agents, in the order of their turns."""
    order = random.Random(SEED)
    number = iter(range(10**9))
    systems = [take(number, SYSTEM_BLOCKS) for _ in range(SYSTEM_PROMPTS)]
    turns = [turn for _ in range(sessions) for turn in session(order, number, systems)]
    return sorted(turns)


def session(
    order: random.Random, number: Iterator[int], systems: Sequence[tuple[int, ...]]
) -> Iterator[Turn]:
    """Yield one agent's turns: each continues the one before, or once an earlier one."""
    count = min(MOST_TURNS, max(1, round(MEDIAN_TURNS * order.lognormvariate(0, TURNS_SIGMA))))
    branches_at = order.randrange(1, count) if count > 1 and order.random() < BRANCHES else 0
    now_ns = EPOCH_NS + order.randrange(HOUR_NS)
    states = [order.choice(systems) + take(number, FIRST_BLOCKS)]
    former: tuple[int, ...] = ()
    for at in range(count):
        begin = order.choice(states[:-1] or states) if at and at == branches_at else states[-1]
        states.append(begin + take(number, order.randint(1, 2)) if at else begin)
        blocks = states[-1] + take(number, 1)  # and the prompt's end
        yield Turn(now_ns, blocks, former)
        former = blocks
        now_ns += round(PAUSE_S * order.lognormvariate(0, PAUSE_SIGMA) * SECOND_NS)


def take(number: Iterator[int], count: int) -> tuple[int, ...]:
    return tuple(next(number) for _ in range(count))


def row(traffic: str, turns: Sequence[Turn], capacity: int) -> Row:
    now, then = (found(turns, capacity, supersede=supersede) for supersede in (False, True))
    return {
        "traffic": traffic,
        "capacity, blocks": capacity,
        "as now": f"{now:.4f}",
        "turns supersede": f"{then:.4f}",
        "gain": f"{then - now:+.4f}",
    }


def measure(quick: bool, trace: str) -> Result:
    result = Result()
    path = trace or os.environ.get(VARIABLE, "")
    if path:
        turns = of_trace(Path(path))[: QUICK_REQUESTS if quick else None]
        for capacity in QUICK_CAPACITIES if quick else CAPACITIES:
            result.rows.append(row("trace", turns, capacity))
        known = sum(bool(turn.former) for turn in turns)
        result.notes.append(f"trace: {known:,} of {len(turns):,} requests are taken as next turns")
    else:
        result.notes.append(f"no trace: name it with --trace or {VARIABLE}")
        if not quick:
            return result
    agents = of_agents(QUICK_SESSIONS if quick else SESSIONS)
    blocks = len({block for turn in agents for block in turn.blocks})
    for share in SHARES:
        result.rows.append(row(f"agents, {share:.0%} of all", agents, int(share * blocks)))
    result.notes.append(f"agents: {len(agents):,} turns, {blocks:,} blocks")
    return result


if __name__ == "__main__":
    run_script(__doc__, measure, trace=f"a trace of requests; also {VARIABLE}")
