"""A toy deployment that carries plans out: arrivals by chance, queued tokens, blocks held.

Replicas that are added serve after a while, those taken away leave at once. Nothing is shed: what
cannot be served waits.
"""

import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

from vllm_kvpool.router.control.planner import Counts, Plan, PlanInputs, PlanMemory, plan
from vllm_kvpool.router.control.rates import Rates
from vllm_kvpool.router.control.settings import PlannerConfig
from vllm_kvpool.router.control.states import Role

TICK_S = 1.0
LOAD_S, FLIP_S, RESIDENCE_S = 20.0, 3.0, 6.0
RATE_WINDOW = 20  # ticks that rates of arrival are taken over
BLOCK_TOKENS, BLOCKS = 16, 4000
OUTPUT_TOKENS = 240
RATES = Rates(prefill_tokens_per_s=10_000.0, transfer_tokens_per_s=40_000.0)


@dataclass
class ToyFleet:
    """See the module docstring. `load` gives requests by second and tokens of a prompt."""

    limits: PlannerConfig
    load: Callable[[float], tuple[float, int]]
    seed: int
    now: float = 0.0
    memory: PlanMemory = field(default_factory=PlanMemory)
    plans: list[tuple[float, Plan]] = field(default_factory=list)
    worst_queue_s: float = 0.0

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.serving = Counter({Role.PREFILL: 1, Role.DECODE: 1})
        self.coming: list[tuple[float, Role, bool]] = []  # when, as what, by a flip
        self.queue: deque[int] = deque()  # prompts, tokens to go
        self.incoming: deque[int] = deque()  # prompts in the pool
        self.held: deque[tuple[float, int]] = deque()  # until when, blocks
        self.asked: deque[int] = deque(maxlen=RATE_WINDOW)
        self.handed: deque[int] = deque(maxlen=RATE_WINDOW)

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += TICK_S
            self._serve()
            self._plan()

    def _arrivals(self, per_second: float) -> int:
        count, left = 0, TICK_S
        while per_second > 0 and (left := left - self.chance.expovariate(per_second)) > 0:
            count += 1
        return count

    def _serve(self) -> None:
        per_second, tokens = self.load(self.now)
        arrived = [
            int(tokens * self.chance.uniform(0.5, 1.5)) for _ in range(self._arrivals(per_second))
        ]
        self.queue.extend(arrived)
        self.asked.append(sum(arrived))
        able = self.serving[Role.PREFILL] * RATES.prefill_tokens_per_s * TICK_S
        handed = 0
        # A deployment whose pool is full of what decode cannot take stops computing.
        while self.queue and able > 0 and len(self.incoming) < 50:
            taken = int(min(able, self.queue[0]))
            able -= taken
            handed += taken
            if taken == self.queue[0]:
                self.incoming.append(self.queue.popleft())
            else:
                self.queue[0] -= taken
        self.handed.append(handed)
        while self.held and self.held[0][0] <= self.now:
            self.held.popleft()
        while self.incoming:
            blocks = (self.incoming[0] + OUTPUT_TOKENS) // BLOCK_TOKENS + 1
            if self.used + blocks > self.serving[Role.DECODE] * BLOCKS:
                break
            self.incoming.popleft()
            self.held.append((self.now + RESIDENCE_S, blocks))

    @property
    def used(self) -> int:
        return sum(blocks for _, blocks in self.held)

    def counts(self, role: Role) -> Counts:
        flips = [flip for _, coming, flip in self.coming if coming is role]
        return Counts(self.serving[role], len(flips) - sum(flips), sum(flips))

    def _plan(self) -> None:
        for due in [due for due in self.coming if due[0] <= self.now]:
            self.coming.remove(due)
            self.serving[due[1]] += 1
        inputs = PlanInputs(
            now=self.now,
            metrics_age_s=0.0,
            prefill=self.counts(Role.PREFILL),
            decode=self.counts(Role.DECODE),
            used_blocks=self.used,
            blocks_per_replica=BLOCKS,
            block_tokens=BLOCK_TOKENS,
            waiting_tokens=sum(self.queue),
            prompt_tokens_per_s=sum(self.asked) / len(self.asked) / TICK_S,
            incoming_tokens=sum(self.incoming),
            handoff_tokens_per_s=sum(self.handed) / len(self.handed) / TICK_S,
            rates=RATES,
        )
        made, self.memory = plan(inputs, self.limits, self.memory)
        if made.prefill.delta or made.decode.delta:
            self.plans.append((self.now, made))
        for role in Role:
            delta = made.of(role).delta
            if delta < 0:
                self.serving[role] += delta
            for number in range(delta):
                flip = number == 0 and made.flip_to is role
                self.coming.append((self.now + (FLIP_S if flip else LOAD_S), role, flip))
        able = self.serving[Role.PREFILL] * RATES.prefill_tokens_per_s
        self.worst_queue_s = max(self.worst_queue_s, sum(self.queue) / able)

    def turns(self, role: Role, after: float = 0.0) -> int:
        """How often a plan went the other way than the one before it."""
        signs = [
            made.of(role).delta > 0
            for now, made in self.plans
            if made.of(role).delta and now > after
        ]
        return sum(one != two for one, two in pairwise(signs))
