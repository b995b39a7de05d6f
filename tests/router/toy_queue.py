"""A toy deployment behind a shedder: prompts are computed in their order, blocks are held a while.

Events one after the other, no ticks. What the shedder believes of the speeds may be wrong.
"""

import heapq
import random
from collections import deque
from dataclasses import dataclass, field

from vllm_kvpool.router.control.overload import (
    AdmissionRequest,
    Pressure,
    Rejection,
    Shedder,
)
from vllm_kvpool.router.control.rates import Rates

BLOCK_TOKENS = 16
WATERMARK = 0.9


@dataclass(frozen=True, slots=True)
class ToySpeeds:
    """How fast the deployment is, and what it is asked: lengths vary by half of their means."""

    prefills: int = 2
    prefill_tokens_per_s: float = 10_000.0
    decodes: int = 4
    blocks: int = 4000
    prompt_tokens: int = 1000
    answer_tokens: int = 200
    request_tokens_per_s: float = 50.0
    handoff_s: float = 0.05

    @property
    def room_blocks(self) -> float:
        return WATERMARK * self.decodes * self.blocks

    @property
    def requests_per_s(self) -> float:
        """At most, by the narrower of prefill and decode."""
        computed = self.prefills * self.prefill_tokens_per_s / self.prompt_tokens
        held = self.room_blocks / self.blocks_of(self.prompt_tokens)
        return min(computed, held * self.request_tokens_per_s / self.answer_tokens)

    def blocks_of(self, prompt_tokens: int) -> int:
        return (prompt_tokens + self.answer_tokens) // BLOCK_TOKENS + 1

    def rates(self, wrong_by: float = 1.0) -> Rates:
        return Rates(
            prefill_tokens_per_s=self.prefill_tokens_per_s * wrong_by,
            step_base_s=1 / (self.request_tokens_per_s * wrong_by),
            handoff_overhead_s=self.handoff_s,
            handoff_s_per_token=0.0,
            output_tokens_per_request=float(self.answer_tokens),
        )


@dataclass(slots=True)
class ToyRequest:
    """One that was let in. Times are seconds."""

    arrived: float
    tokens: int
    answer_tokens: int
    blocks: int
    priority: int
    started: float = 0.0
    computed: float = 0.0
    taken: float = float("inf")  # by a decode replica

    @property
    def wait_s(self) -> float:
        """To its first token, its own prompt's time aside: queue, hand-over, room."""
        return self.started - self.arrived + self.taken - self.computed


@dataclass(slots=True)
class ToyQueue:
    """See the module docstring."""

    speeds: ToySpeeds
    rates: Rates
    shedder: Shedder
    seed: int
    urgent_share: float = 0.0
    now: float = 0.0
    answers: list[tuple[float, int, Rejection | None]] = field(default_factory=list)
    let_in: list[ToyRequest] = field(default_factory=list)
    done: list[ToyRequest] = field(default_factory=list)
    _events: list[tuple[float, int, ToyRequest]] = field(default_factory=list)
    _queue: deque[ToyRequest] = field(default_factory=deque)
    _incoming: deque[ToyRequest] = field(default_factory=deque)
    _computing: int = 0
    _to_come: int = 0  # blocks of those let in that no decode replica has
    _held: int = 0
    _running: int = 0

    def run(self, per_second: float, seconds: float) -> None:
        chance = random.Random(self.seed)
        end, arrives = self.now + seconds, self.now + chance.expovariate(per_second)
        while True:
            due = self._events[0][0] if self._events else end
            self.now = min(due, arrives, end)
            if self.now >= end:
                return
            if self.now == arrives:
                self._arrive(chance)
                arrives += chance.expovariate(per_second)
            else:
                self._happen(heapq.heappop(self._events)[2])
            self._go_on()

    def _arrive(self, chance: random.Random) -> None:
        tokens = int(self.speeds.prompt_tokens * chance.uniform(0.5, 1.5))
        answer_tokens = int(self.speeds.answer_tokens * chance.uniform(0.5, 1.5))
        priority = -1 if chance.random() < self.urgent_share else 0
        blocks = self.speeds.blocks_of(tokens)
        answer = self.shedder.decide(
            self._pressure(), AdmissionRequest(tokens, tokens, blocks, priority)
        )
        self.answers.append((self.now, priority, answer))
        if answer is None:
            request = ToyRequest(self.now, tokens, answer_tokens, blocks, priority)
            self.let_in.append(request)
            self._to_come += blocks
            if priority < 0:
                self._queue.appendleft(request)
            else:
                self._queue.append(request)

    def _happen(self, request: ToyRequest) -> None:
        if not request.computed:
            request.computed = self.now
            self._computing -= 1
            self._later(self.speeds.handoff_s, request)
        elif request.taken == float("inf"):
            self._incoming.append(request)
        else:
            self._held -= request.blocks
            self._running -= 1
            self.done.append(request)

    def _go_on(self) -> None:
        while self._queue and self._computing < self.speeds.prefills:
            request = self._queue.popleft()
            request.started = self.now
            self._computing += 1
            self._later(request.tokens / self.speeds.prefill_tokens_per_s, request)
        while self._incoming and self._held + self._incoming[0].blocks <= self.speeds.room_blocks:
            request = self._incoming.popleft()
            request.taken = self.now
            self._held += request.blocks
            self._running += 1
            self._to_come -= request.blocks
            self._later(request.answer_tokens / self.speeds.request_tokens_per_s, request)

    def _later(self, seconds: float, request: ToyRequest) -> None:
        heapq.heappush(self._events, (self.now + seconds, id(request), request))

    def _pressure(self) -> Pressure:
        return Pressure(
            queued_requests=len(self._queue),
            queued_tokens=sum(request.tokens for request in self._queue),
            prefill_replicas=self.speeds.prefills,
            decode_replicas=self.speeds.decodes,
            queued_blocks=self._to_come,
            room_blocks=self.speeds.room_blocks - self._held,
            committed_blocks=self._held,
            committed_requests=self._running,
            is_saturated=False,
            rates=self.rates,
        )
