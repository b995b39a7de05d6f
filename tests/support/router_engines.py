"""Engines in virtual time, as the router sees them: the scripted engine's model, with faults.

An engine can crash, hang, be slow, refuse work or sleep. `tell` sets its time, and `due`
returns the time of its next change. Hours of virtual time have millions of steps.
Consecutive steps that only decode are therefore computed at once. An engine behind HTTP cannot do
this: its clients wait for every token.
"""

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field, replace
from typing import Any

from tests.support.scripted_batch import Batch, Phase, ScriptedPool, Sequence, Step
from tests.support.scripted_spec import ScriptedSpec
from vllm_kvpool.config import RequestOptions
from vllm_kvpool.router.control.events import Outcome, ReplicaSpec, Sample
from vllm_kvpool.router.control.prefix_index import spans_of
from vllm_kvpool.router.control.requests import RequestSpec

TOKEN = 0  # the id of every token; no client reads it


def engine_spec(**values: Any) -> ScriptedSpec:
    """Return a small, slow engine that accepts each request that its blocks can hold."""
    speeds: dict[str, Any] = {
        **{"prefill_tokens_per_s": 8_000.0, "step_base_s": 0.02, "decode_sequence_s": 0.001},
        **{"load_tokens_per_s": 80_000.0, "load_latency_s": 0.01, "load_s": 20.0},
        **{"kv_blocks": 2_000, "block_size": 16},
    }
    given = speeds | values
    return ScriptedSpec(max_model_len=given["kv_blocks"] * given["block_size"], **given)


class PromptChain:
    """Names of a prompt's chunks: shared within the common prefix, then unique to the request."""

    def __init__(self, ask: RequestSpec, chunk_tokens: int) -> None:
        self._ask = ask
        self._chunk_tokens = chunk_tokens
        self._ends = [spans_of(n + 1) * ask.prefix_tokens for n in range(len(ask.prefix))]
        self._hashes: list[bytes] = []

    def hashes(self, tokens: Tokens[int], num_tokens: int) -> list[bytes]:
        count, prefix = num_tokens // self._chunk_tokens, self._ask.prefix
        for number in range(len(self._hashes), count):
            depth = bisect_left(self._ends, (number + 1) * self._chunk_tokens)
            owner = prefix[depth] if depth < len(prefix) else self._ask.request_id
            self._hashes.append(f"{owner}:{number}".encode())
        return self._hashes[:count]


@dataclass(slots=True, eq=False, kw_only=True)
class Call:
    """A prefill or decode, from the router's action to the event that answers it."""

    ask: RequestSpec
    spec: ReplicaSpec
    is_prefill: bool
    prompt_tokens: int
    """Tokens to compute before the first output token, earlier output of the request included."""
    expect_tokens: int = 0
    expect_timeout_ms: int = 10_000
    output_tokens: int = 1
    sequence: Sequence | None = None
    """None until the engine accepts the call."""
    saved_tokens: int = 0
    outcome: Outcome | None = None

    @property
    def generated(self) -> int:
        """Number of tokens that the call has generated for the client."""
        return 0 if self.sequence is None else len(self.sequence.tokens) - self.prompt_tokens


@dataclass(slots=True, eq=False)
class Engine:
    """A simulated engine. Owned by a world."""

    spec: ReplicaSpec
    kind: ScriptedSpec
    pool: ScriptedPool
    began: Callable[[Call], None]
    ended: Callable[[Call], None]
    is_up: bool = True
    is_asleep: bool = False
    is_hung: bool = False
    slowness: float = 1.0
    refuses_until: float = 0.0
    has_notices: bool = True
    """False: the engine's release has no notices."""
    generated_tokens: int = 0
    _batch: Batch = field(init=False)
    _calls: dict[Sequence, Call] = field(default_factory=dict)
    _puts: deque[tuple[float, list[bytes]]] = field(default_factory=deque)
    """Chunks on their way into the pool, with the time at which each arrives."""
    _step: Step | None = None
    """The step in progress since `_begun`. It takes `_step_s`, then repeats `_repeats` times."""
    _begun: float = 0.0
    _step_s: float = 0.0
    _repeats: int = 0
    _wake_s: float = math.inf
    """Time of the next possible step while no step is in progress."""

    def __post_init__(self) -> None:
        self._batch = Batch(self.kind, self.pool)

    @property
    def notices(self) -> tuple[str, ...]:
        """Endpoints at which the engine announces stored chunks."""
        return (f"tcp://{self.spec.replica_id}",) if self.has_notices else ()

    @property
    def answers(self) -> bool:
        return self.is_up and not self.is_hung

    @property
    def calls(self) -> list[Call]:
        return list(self._calls.values())

    # Work

    def take(self, call: Call, now: float) -> None:
        """Accept a call, or reject it if it exceeds the context length."""
        self._stop_repeating(now)
        if call.prompt_tokens + call.output_tokens > self.kind.max_model_len:
            call.outcome = Outcome.REJECTED
            self.ended(call)
            return
        call.sequence = Sequence(
            tokens=[TOKEN] * call.prompt_tokens,
            options=RequestOptions(
                expect_tokens=call.expect_tokens, expect_timeout_ms=call.expect_timeout_ms
            ),
            chain=PromptChain(call.ask, self.kind.chunk_tokens),
            arrival_s=now,
        )
        self._calls[call.sequence] = call
        self._batch.add(call.sequence)
        self._begin(now)

    def drop(self, call: Call, outcome: Outcome, now: float) -> None:
        """End a call before it is complete."""
        self._stop_repeating(now)
        if call.outcome is None:
            self._end(call, outcome)
            self._begin(now)

    def hears(self, call: Call, now: float, expect_ms: int) -> None:
        """Set how long a call still waits for its prompt's chunks; 0 ends the wait."""
        self._stop_repeating(now)
        call.expect_timeout_ms = expect_ms
        if call.sequence is not None:
            until_ms = round(1000 * (now - call.sequence.arrival_s)) + expect_ms
            call.sequence.options = replace(call.sequence.options, expect_timeout_ms=until_ms)
        self._begin(now)

    def crash(self, now: float) -> None:
        """End the engine's process: fail its calls and lose its caches."""
        self._stop_repeating(now)
        for call in self.calls:
            self._end(call, Outcome.FAILED)
        self._batch = Batch(self.kind, self.pool)
        self._puts.clear()
        self._step, self._wake_s = None, math.inf
        self.is_up = self.is_hung = False

    def start(self, now: float) -> None:
        """Let the engine's process answer again."""
        self.tell(now)
        self.is_up, self.is_asleep, self.is_hung, self.slowness = True, False, False, 1.0
        self.refuses_until = 0.0

    # Time

    def change(self, now: float, *, is_hung: bool = False, slowness: float = 1.0) -> None:
        """Change the engine from the next step on. After a hang, the current step starts over."""
        self._stop_repeating(now)
        if self.is_hung:
            self._begun = now
        self.is_hung, self.slowness = is_hung, slowness

    def due(self) -> float:
        """Return the time of the next change, if no call comes in before."""
        due = self._puts[0][0] if self._puts else math.inf
        if self.is_hung or not self.is_up or self.is_asleep:
            return due
        return min(due, self._wake_s if self._step is None else self._end_s())

    def tell(self, now: float) -> None:
        """Set the time; finish all steps and puts that are due."""
        while (due := self.due()) <= now:
            if self._puts and self._puts[0][0] <= due:
                self.pool.put(self._puts.popleft()[1])
            else:
                self._finish(due)
                self._begin(due)

    def _end_s(self) -> float:
        return self._begun + (1 + self._repeats) * self._step_s

    def _begin(self, now: float) -> None:
        """Begin the next step, unless one is in progress or the engine cannot compute."""
        if self._step is not None or self.is_hung or not self.is_up or self.is_asleep:
            return
        step = self._step = self._batch.step(now)
        wake_s = self._batch.wake_s(now)
        self._wake_s = math.inf if wake_s is None else wake_s
        if step is None:
            return
        self._begun, self._step_s = now, step.seconds * self.slowness
        self._repeats = self._num_repeats(step)

    def _num_repeats(self, step: Step) -> int:
        """Return how many times a step repeats before a call ends, blocks run out or `_wake_s`."""
        if not step.is_steady:
            return 0
        left = min(self._left(self._calls[each]) for each in step.sampled) - 1
        until_wake = (self._wake_s - self._begun) / self._step_s
        return int(max(0, min(left, self._batch.max_repeats(step), until_wake)))

    @staticmethod
    def _left(call: Call) -> int:
        return call.output_tokens - call.generated

    def _stop_repeating(self, now: float) -> None:
        """Let the step in progress be the last of its repeats."""
        self._catch_up(now)
        self._repeats = 0

    def _catch_up(self, now: float) -> None:
        """Count the repeats that are complete by now."""
        self.tell(now)
        if self._step is None or self.is_hung:
            return
        number = min(int((now - self._begun) / self._step_s), self._repeats)
        self._repeat(self._step, number)
        self._begun += number * self._step_s
        self._repeats -= number

    def _repeat(self, step: Step, number: int) -> None:
        if number > 0:
            for sequence in step.sampled:
                sequence.tokens += [TOKEN] * number
            self.generated_tokens += number * len(step.sampled)
            self._batch.repeat(step)

    def _finish(self, now: float) -> None:
        """Finish the last repeat of the step in progress."""
        step, self._step = self._step, None
        if step is None:
            return
        self._repeat(step, self._repeats)
        for sequence in step.sampled:
            if sequence.phase is Phase.RUNNING:  # and not removed during the step
                self._give_token(self._calls[sequence])
        if step.computed_chunks:
            self._puts.append((now + self.kind.put_s, step.computed_chunks))

    def _give_token(self, call: Call) -> None:
        assert call.sequence is not None
        call.sequence.tokens.append(TOKEN)
        self.generated_tokens += 1
        if call.generated == 1 and not call.is_prefill:
            self.began(call)
        if not self._left(call):
            self._end(call, Outcome.OK)

    def _end(self, call: Call, outcome: Outcome) -> None:
        assert call.sequence is not None
        call.saved_tokens = self._batch.saved_tokens(call.sequence)
        self._batch.remove(call.sequence)
        del self._calls[call.sequence]
        call.outcome = outcome
        self.ended(call)

    def sample(self, now: float) -> Sample:
        """Return the metrics that the router would scrape."""
        self._catch_up(now)
        batch, kind = self._batch, self.kind
        return Sample(
            running=len(batch.running),
            waiting=batch.num_waiting,
            used_blocks=kind.kv_blocks - batch.free_blocks,
            total_blocks=kind.kv_blocks,
            block_size=kind.block_size,
            generated_tokens=self.generated_tokens,
            pool_is_up=self.pool.is_up(),
            notices=self.notices if self.has_notices else None,
        )
