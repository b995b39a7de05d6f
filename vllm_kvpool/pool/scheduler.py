"""The scheduler side: per request, what is known of the pool, what is loaded, what is saved.

Owned by the scheduler's thread; the probe thread answers lookups. A request's life:

    add -> lookup pending -> answered -> (offer -> load planned -> load reported) -> saving -> end

* `match` may be called any number of times; only `allocated` makes an offer a load.
* A load that stopped early leaves `limit_tokens`: the same request never asks for more again.
* Blocks of a save are pinned from `plan_step` until every rank has gathered them, at most
  `max_pinned_blocks` of them; a save that would exceed that waits for a later step.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from vllm_kvpool.config import KVPoolConfig, LoadPolicy, RequestOptions, Role
from vllm_kvpool.hashing import ChunkChain, RequestIdentity
from vllm_kvpool.metrics import Tally
from vllm_kvpool.pool.metadata import StepPlan, StepReport
from vllm_kvpool.pool.pace import Pace
from vllm_kvpool.pool.probe import Answer, Lookup, LookupOutcome, Probe
from vllm_kvpool.transfer.ops import JobId, LoadPlan, SavePlan

IDLE_WAIT_S = 0.001
RESET_WAIT_S = 5.0
NULL_BLOCK = 0


class RequestView(Protocol):
    """What the pool needs of an engine's request; counts are read fresh at every use."""

    @property
    def request_id(self) -> str: ...
    @property
    def options(self) -> RequestOptions: ...
    @property
    def shareable(self) -> bool:
        """False for requests that must stay out of the pool altogether."""

    @property
    def reads_cache(self) -> bool:
        """False where cached KV must not be used (prompt log-probabilities)."""

    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def num_tokens(self) -> int:
        """Tokens known by value, prompt and output."""

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose KV earlier steps have computed or are computing."""

    @property
    def num_preemptions(self) -> int: ...
    def tokens(self) -> Sequence[int]:
        """All known tokens; the sequence may grow later but does not change."""

    def identity(self) -> RequestIdentity | None:
        """Runs on the probe thread; may read files."""


class BlockPins(Protocol):
    """References on the engine's blocks."""

    def pin(self, block_ids: Sequence[int]) -> None: ...
    def unpin(self, block_ids: Sequence[int]) -> None: ...


@dataclass(frozen=True, slots=True)
class PoolShape:
    """The sizes that the scheduler side counts in."""

    chunk_tokens: int
    block_size: int
    num_ranks: int
    max_pinned_blocks: int


@dataclass(slots=True)
class _State:
    view: RequestView
    may_load: bool
    may_save: bool
    ticket: int = -1
    asked_at: float = 0.0
    deadline: float = 0.0
    preemptions: int = 0
    answer: LookupOutcome | None = None  # None while the lookup is pending
    chain: ChunkChain | None = None
    found_chunks: int = 0
    limit_tokens: int | None = None
    offer: tuple[int, int] | None = None  # tokens [start, stop) that match() offered
    load: tuple[int, int] | None = None  # tokens [start, stop) being loaded
    counted: bool = False
    next_save: int = 0  # chunks before it are stored or on their way


@dataclass(slots=True)
class _Pinned:
    block_ids: tuple[int, ...]
    ranks_left: int


@dataclass(frozen=True, slots=True)
class Step:
    """One engine step: tokens scheduled by request, and access to block tables."""

    scheduled: Mapping[str, int]
    block_table: Callable[[str], Sequence[int]]


@dataclass(slots=True)
class _Pending:
    """What the next plan carries besides the saves of running requests."""

    loads: list[LoadPlan] = field(default_factory=list)
    saves: list[SavePlan] = field(default_factory=list)


class PoolScheduler:
    """See the module docstring."""

    def __init__(
        self,
        config: KVPoolConfig,
        role: Role,
        shape: PoolShape,
        probe: Probe,
        tally: Tally,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._role = role
        self._shape = shape
        self._probe = probe
        self._tally = tally
        self._clock = clock
        self._pins: BlockPins | None = None
        self._requests: dict[str, _State] = {}
        self._tickets: dict[int, str] = {}
        self._pinned: dict[JobId, _Pinned] = {}
        self._pending = _Pending()
        self._next_id = 0
        self._generation = 0
        self._acks = 0
        self._idle = True
        self._pace = Pace()

    def bind_pins(self, pins: BlockPins) -> None:
        """The engine's block references; before the first save is planned."""
        self._pins = pins

    # Arrival and lookup

    def add(self, view: RequestView) -> None:
        """A request has arrived: hash its prompt and look it up, on the probe thread."""
        options = view.options
        saves = self._role is not Role.CONSUMER or self._config.save_decode
        state = _State(view, options.load and view.reads_cache, options.save and saves)
        if not view.shareable:
            state.may_load = state.may_save = False
        self._requests[view.request_id] = state
        if state.may_load or state.may_save:
            self._ask(state)
        else:
            state.answer = LookupOutcome.UNSHAREABLE

    def _ask(self, state: _State) -> None:
        now = self._clock()
        options = state.view.options
        timeout = self._config.lookup_timeout_ms / 1000
        if options.expect_tokens:
            timeout = max(timeout, options.expect_timeout_ms / 1000)
        state.ticket = self._take_id()
        state.asked_at, state.deadline = now, now + timeout
        state.preemptions = state.view.num_preemptions
        state.answer = None
        self._tickets[state.ticket] = state.view.request_id
        self._probe.submit(
            Lookup(
                ticket=state.ticket,
                identify=state.view.identity,
                tokens=list(state.view.tokens()),
                search=state.may_load,
                expect_chunks=options.expect_tokens // self._shape.chunk_tokens,
                deadline=state.deadline,
            )
        )

    def _take_id(self) -> int:
        self._next_id += 1
        return self._next_id

    def _take_answers(self) -> None:
        for answer in self._probe.take_answers():
            request_id = self._tickets.pop(answer.ticket, None)
            state = self._requests.get(request_id) if request_id is not None else None
            if state is not None and state.ticket == answer.ticket:
                self._answered(state, answer)

    def _answered(self, state: _State, answer: Answer) -> None:
        self._tally.add("kvpool_lookups", outcome=answer.outcome.value)
        self._tally.add("kvpool_lookup_seconds", self._clock() - state.asked_at)
        state.chain = answer.chain
        if answer.outcome is LookupOutcome.UNSHAREABLE:
            state.may_load = state.may_save = False
        if state.answer is None:
            state.answer = answer.outcome
            state.found_chunks = answer.found_chunks
        # What is stored need not be saved, unless a load of it has failed here.
        known = answer.found_chunks
        if state.limit_tokens is not None:
            known = min(known, state.limit_tokens // self._shape.chunk_tokens)
        state.next_save = max(state.next_save, known)

    def match(self, request_id: str, num_computed: int) -> tuple[int | None, bool]:
        """Tokens beyond `num_computed` (block aligned) that a load can bring.

        (None, False) while the lookup is pending; (0, False) when there is nothing to load.
        """
        state = self._requests.get(request_id)
        if state is None or not state.may_load:
            return 0, False
        if state.view.num_preemptions != state.preemptions:
            self._ask(state)
        self._take_answers()
        if state.answer is None and not self._wait_for_answer(state):
            return None, False
        stop = self._usable_tokens(state)
        if stop <= num_computed or not self._worth_loading(stop - num_computed):
            state.offer = None
            return 0, False
        state.offer = (num_computed, stop)
        return stop - num_computed, True

    def _wait_for_answer(self, state: _State) -> bool:
        """Whether the pending lookup has come to an end."""
        if self._idle and self._clock() < state.deadline:
            # Nothing is running: without a pause the engine would spin on the probe's core.
            self._probe.wait(IDLE_WAIT_S)
            self._take_answers()
        if state.answer is None and self._clock() >= state.deadline:
            state.answer = LookupOutcome.TIMED_OUT
            self._tally.add("kvpool_lookups", outcome=LookupOutcome.TIMED_OUT.value)
            self._probe.forget(state.ticket)
        return state.answer is not None

    def _usable_tokens(self, state: _State) -> int:
        """Stored tokens, floored to blocks, less the last token on a full hit."""
        tokens = state.found_chunks * self._shape.chunk_tokens
        if state.limit_tokens is not None:
            tokens = min(tokens, state.limit_tokens)
        tokens -= tokens % self._shape.block_size
        return min(tokens, state.view.num_tokens - 1)

    def _worth_loading(self, tokens: int) -> bool:
        if self._config.load_policy is LoadPolicy.ALWAYS:
            return True
        return self._pace.loading_beats_computing(tokens)

    def allocated(self, request_id: str, block_ids: Sequence[int], num_external: int) -> None:
        """Blocks are allocated; `num_external` of the offered tokens are to be loaded (or 0)."""
        state = self._requests.get(request_id)
        if state is None:
            return
        if not state.counted:
            self._count_misses(state, num_external)
        if num_external == 0 or state.offer is None or state.chain is None:
            return
        start, stop = state.offer
        assert num_external == stop - start, (num_external, state.offer)
        chunk, block = self._shape.chunk_tokens, self._shape.block_size
        first, last = start // chunk, -(-stop // chunk)
        state.offer, state.load = None, (start, stop)
        self._pending.loads.append(
            LoadPlan(
                job_id=JobId(self._take_id()),
                request_id=request_id,
                first_chunk=first,
                hashes=tuple(state.chain.hashes[first:last]),
                block_ids=tuple(block_ids[start // block : -(-stop // block)]),
                table_start=start // block * block,
                token_start=start,
                token_stop=stop,
            )
        )

    def _count_misses(self, state: _State, hit: int) -> None:
        """Prompt tokens that are not loaded, once, when the request is admitted."""
        state.counted = True
        prompt = state.view.num_prompt_tokens
        chunked = prompt // self._shape.chunk_tokens * self._shape.chunk_tokens
        if not state.view.options.load or not state.view.reads_cache:
            reason = "not_wanted"
        elif not state.view.shareable or state.answer is LookupOutcome.UNSHAREABLE:
            reason = "unshareable"
        elif state.answer in (LookupOutcome.STORE_ERROR, LookupOutcome.TIMED_OUT):
            reason = state.answer.value
        else:
            found = min(prompt, state.found_chunks * self._shape.chunk_tokens)
            # Tokens found but not loaded: computed here already, cut to blocks, or the last one.
            self._tally.add("kvpool_miss_tokens", max(0, found - hit), reason="not_needed")
            self._tally.add("kvpool_miss_tokens", max(0, chunked - found), reason="absent")
            self._tally.add("kvpool_miss_tokens", prompt - max(chunked, found), reason="short")
            return
        self._tally.add("kvpool_miss_tokens", prompt - hit, reason=reason)

    # Steps

    def plan_step(self, step: Step) -> StepPlan:
        """The loads that are allocated and the saves that are due; pins the saves' blocks."""
        self._take_answers()
        self._idle = not step.scheduled
        self._pace.step_planned(self._clock(), step.scheduled)
        pending, self._pending = self._pending, _Pending()
        for request_id, count in step.scheduled.items():
            state = self._requests.get(request_id)
            if state is not None and state.may_save and state.chain is not None:
                computed = state.view.num_computed_tokens + count
                save = self._plan_save(state, computed, lambda r=request_id: step.block_table(r))
                if save is not None:
                    pending.saves.append(save)
        return StepPlan(tuple(pending.loads), tuple(pending.saves), self._idle, self._generation)

    def _plan_save(
        self, state: _State, computed: int, block_table: Callable[[], Sequence[int]]
    ) -> SavePlan | None:
        """The save of the chunks that are final once `computed` tokens are.

        A token known by value whose KV is computed is final: drafts and tokens still in flight are
        not known yet.
        """
        shape, view = self._shape, state.view
        final = min(
            computed, view.num_tokens if self._config.save_decode else view.num_prompt_tokens
        )
        first, stop = state.next_save, final // shape.chunk_tokens
        if stop <= first:
            return None
        room = shape.max_pinned_blocks - self.num_pinned
        stop = min(
            stop, (first * shape.chunk_tokens + room * shape.block_size) // shape.chunk_tokens
        )
        if stop <= first:
            return None
        assert state.chain is not None
        if len(state.chain) < stop:
            state.chain.extend(view.tokens())
        start_block = first * shape.chunk_tokens // shape.block_size
        stop_block = -(-stop * shape.chunk_tokens // shape.block_size)
        block_ids = tuple(block_table()[start_block:stop_block])
        if len(block_ids) < stop_block - start_block or NULL_BLOCK in block_ids:
            return None
        state.next_save = stop
        job_id = JobId(self._take_id())
        self._pin(job_id, block_ids)
        self._tally.add("kvpool_saved_tokens", (stop - first) * shape.chunk_tokens)
        return SavePlan(
            job_id=job_id,
            request_id=view.request_id,
            first_chunk=first,
            hashes=tuple(state.chain.hashes[first:stop]),
            block_ids=block_ids,
            table_start=start_block * shape.block_size,
        )

    def _pin(self, job_id: JobId, block_ids: tuple[int, ...]) -> None:
        assert self._pins is not None, "blocks cannot be pinned before the pool is bound"
        self._pins.pin(block_ids)
        self._pinned[job_id] = _Pinned(block_ids, self._shape.num_ranks)
        self._tally.set("kvpool_pinned_blocks", self.num_pinned)

    def apply(self, report: StepReport) -> None:
        """Take the workers' report: unpin what every rank has gathered, remember failed loads."""
        for job_id, ranks in report.gathered.items():
            pinned = self._pinned[job_id]
            pinned.ranks_left -= ranks
            assert pinned.ranks_left >= 0, f"save {job_id} reported by too many ranks"
            if pinned.ranks_left == 0:
                del self._pinned[job_id]
                assert self._pins is not None
                self._pins.unpin(pinned.block_ids)
                self._tally.set("kvpool_pinned_blocks", self.num_pinned)
        for request_id, tokens in report.load_stops.items():
            state = self._requests.get(request_id)
            if state is not None:
                limit = tokens if state.limit_tokens is None else min(tokens, state.limit_tokens)
                state.limit_tokens = limit
                state.next_save = min(state.next_save, limit // self._shape.chunk_tokens)
        self._pace.loaded(report.load_tokens, report.load_seconds)
        self._acks += report.generation_acks
        if report.generation_acks and self._acks == self._shape.num_ranks:
            # Puts that were under way at the reset have landed or been dropped by now.
            self._probe.remove_all(lambda ok: None)

    def load_ended(self, request_id: str) -> None:
        """Every rank has reported the request's load."""
        state = self._requests.get(request_id)
        if state is None or state.load is None:
            return
        (start, stop), state.load = state.load, None
        kept = stop if state.limit_tokens is None else max(start, min(stop, state.limit_tokens))
        self._tally.add("kvpool_hit_tokens", kept - start)
        self._tally.add("kvpool_miss_tokens", stop - kept, reason="load_failed")

    # The end

    def finish(self, request_id: str, block_ids: Sequence[int]) -> dict[str, dict[str, int]] | None:
        """The request ends: plan what is still due, answer how many tokens are being saved."""
        state = self._requests.pop(request_id, None)
        if state is None:
            return None
        self._tickets.pop(state.ticket, None)
        if state.answer is None:
            self._probe.forget(state.ticket)
        if not state.may_save:
            return None
        if state.chain is not None and state.load is None:
            # The last token sampled has no KV.
            computed = min(state.view.num_computed_tokens, state.view.num_tokens - 1)
            save = self._plan_save(state, computed, lambda: block_ids)
            if save is not None:
                self._pending.saves.append(save)
        return {"kvpool": {"tokens": state.next_save * self._shape.chunk_tokens}}

    def reset(self) -> bool:
        """Forget every cell of the own namespace; whether the store has confirmed in time.

        Saves under way are dropped by the workers with the next step and the namespace is removed
        once more after that.
        """
        self._generation += 1
        self._acks = 0
        for state in self._requests.values():
            state.found_chunks = 0
            state.next_save = 0
        confirmed: list[bool] = []
        self._probe.remove_all(confirmed.append)
        deadline = self._clock() + RESET_WAIT_S
        while not confirmed and self._clock() < deadline:
            self._probe.wait(IDLE_WAIT_S)
        return confirmed == [True]

    @property
    def num_pinned(self) -> int:
        return sum(len(p.block_ids) for p in self._pinned.values())

    @property
    def has_pins(self) -> bool:
        return bool(self._pinned)

    @property
    def has_pending_work(self) -> bool:
        """Whether a further step is needed to release blocks."""
        return bool(self._pinned or self._pending.saves)

    def check(self) -> None:
        """What must hold between calls; tests call it after each."""
        assert self.num_pinned <= self._shape.max_pinned_blocks
        for ticket, request_id in self._tickets.items():
            state = self._requests.get(request_id)
            assert state is None or state.ticket >= ticket
        for state in self._requests.values():
            if state.chain is not None and state.answer is LookupOutcome.ANSWERED:
                assert state.found_chunks <= len(state.chain)
