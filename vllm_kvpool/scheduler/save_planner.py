"""Saves in the scheduler part: which chunks of which request are due, and the blocks they need.

* Blocks of a save are pinned from the plan of its step until every rank has gathered them. Requests
  that there is no room for wait in line: a step looks at no more of them than there is room for.
* Where layers read only the last tokens, the blocks of an incomplete chunk are held: the engine
  frees them before the chunk is complete.
* Recurrent states are saved from the blocks that a step offers; without room an offer is lost.
* An end, a partial chunk, is saved where a prompt that is handed over ends. With aliases, which
  lead other prompts to it, every prompt's end is saved, or with `save_decode` every answer's.
* A request's last save goes with the plan of the step after its end. Scheduler's thread.
"""

import math
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, islice
from typing import NamedTuple

from vllm_kvpool.metrics import MetricsRegistry
from vllm_kvpool.scheduler.blocks import BlockPins, BlockTable, GroupTables, PinLedger, all_blocks
from vllm_kvpool.scheduler.draft_gaps import DraftGaps
from vllm_kvpool.scheduler.loads import RequestLoads
from vllm_kvpool.scheduler.request import PoolShape, RequestState, ScheduledStep, StateOffer
from vllm_kvpool.scheduler.save_outcomes import SaveOutcomes
from vllm_kvpool.scheduler.validity import Validity
from vllm_kvpool.storage.base import Retention
from vllm_kvpool.transfer.ops import HandOverEnd, JobId, JobPages, SavePlan

END_TTL_S = 120.0
"""Time to live of a prompt's end: the engine that the request is handed to loads it at once."""
ALIASED_END_TTL_S = 3600.0
"""The same where aliases lead to it: the next turn of a conversation begins with it. By then its
chunk is mostly stored whole."""


class _RequestBlocks(NamedTuple):
    """A request's block tables.

    With them, the number of computed tokens when vLLM last freed blocks of the request.
    """

    tables: Callable[[], Sequence[BlockTable]]
    freed_at: int


def topic_of(state: RequestState) -> bytes:
    """Return the topic of the notices about a request's prompt.

    It is empty if the request is not handed over, or not hashed yet.
    """
    view = state.view
    if view.options.hand_over and state.chain is not None and not state.topic:
        state.topic = state.chain.topic(view.tokens()[: view.num_prompt_tokens]) or b""
    return state.topic


class SavePlanner:
    """Plans saves and holds their blocks. `new_id` gives job numbers."""

    def __init__(
        self,
        shape: PoolShape,
        tables: GroupTables,
        validity: Validity,
        registry: MetricsRegistry,
        new_id: Callable[[], int],
        outcomes: SaveOutcomes,
        pins: BlockPins,
        *,
        save_decode: bool,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self.outcomes = outcomes
        self._pins = pins
        self.draft_gaps = DraftGaps(shape)
        self._wall_ns = wall_ns
        self._shape = shape
        self._tables = tables
        self._validity = validity
        self._registry = registry
        self._new_id = new_id
        self._save_decode = save_decode
        self.ledger = PinLedger(shape.max_pinned_blocks, shape.num_ranks, pins)
        # Requests with chunks still to save -> tokens to schedule until the next may be due.
        self._until_due: dict[str, float] = {}
        # Requests that wait for room -> blocks of their next chunk; the longest wait first.
        self._in_line: dict[str, int] = {}
        self._late: list[SavePlan] = []  # of finished requests, for the next plan
        # Of finished requests whose load may not be whole.
        self._unconfirmed: dict[str, list[SavePlan]] = {}
        self._hand_over_ends: list[HandOverEnd] = []  # for the next plan

    def mark_due(self, state: RequestState) -> None:
        """Check in the request's next step which chunks are due."""
        if state.may_save and state.chain is not None and self._tables.has_attention:
            self._until_due[state.view.request_id] = 0

    def drop_request(self, request_id: str) -> None:
        """Save nothing more of the request."""
        self._until_due.pop(request_id, None)
        self._in_line.pop(request_id, None)
        self.ledger.release_all_held(request_id)

    def of_step(
        self,
        step: ScheduledStep,
        requests: Mapping[str, RequestState],
        loads: RequestLoads,
    ) -> tuple[SavePlan, ...]:
        """Return the saves of the step, and those of requests that have ended.

        The blocks of these saves are pinned.
        """
        saves, self._late = self._late, []
        for request_id, offers in step.states.items():
            state = requests.get(request_id)
            if state is not None:
                # The next step starts those of requests with drafts.
                due = self._late if request_id in step.drafted else saves
                due += self._of_states(state, offers)
        if self._in_line:
            self._admit_waiting()
        if self._shape.has_drafts:
            self.draft_gaps.step(step.scheduled, requests)
        until_due = self._until_due
        # Most requests that run have nothing to save, and many that have do not run.
        few, many = sorted((until_due, step.scheduled), key=len)
        for request_id in tuple(few):
            if request_id not in many:
                continue
            left, count = until_due[request_id], step.scheduled[request_id]
            if left > count:
                until_due[request_id] = left - count
            elif not loads.is_layered(request_id):  # else it is planned once its load has ended
                saves += self._if_due(requests[request_id], count, step.block_tables)
        for request_id in step.preempted:
            self.ledger.release_all_held(request_id)
        return tuple(saves)

    def _of_states(self, state: RequestState, offers: Sequence[StateOffer]) -> Iterator[SavePlan]:
        """Yield the saves of the recurrent states that a request's blocks hold after the step."""
        if not state.may_save or state.chain is None or state.stale or self._validity.reset.pending:
            return
        blocks_at: dict[int, dict[int, int]] = {}  # boundary -> KV cache group -> block
        for offer in offers:
            blocks_at.setdefault(offer.boundary, {})[offer.group] = offer.block_id
        for boundary in sorted(blocks_at.keys() - state.saved_states):
            stop, rest = divmod(boundary, self._shape.chunk_tokens)
            # A key names whole chunks: the tail of a prompt within one (which vLLM offers with
            # `prefix_match_unit`, and in `register_finished_partial_tail`) has no name.
            if rest or boundary > self._savable_tokens(state):
                continue
            if len(state.chain) < stop:
                state.chain.extend(state.view.tokens())
            pages = self._tables.of_states(blocks_at[boundary], boundary)
            if not 0 < len(all_blocks(pages)) <= self.ledger.room:
                continue
            state.saved_states.add(boundary)
            yield self._pinned(state, stop - 1, stop, pages, is_state=True)

    def _admit_waiting(self) -> None:
        """Look again at as many of the waiting requests as there is room for."""
        room = self.ledger.room
        for request_id, num_blocks in list(islice(self._in_line.items(), max(0, room))):
            room -= num_blocks
            if room < 0:
                break
            del self._in_line[request_id]
            self._until_due[request_id] = 0

    def _if_due(
        self,
        state: RequestState,
        scheduled: int,
        block_tables: Callable[[str], Sequence[BlockTable]],
    ) -> list[SavePlan]:
        """Return the saves of chunks that are final once `scheduled` more tokens are computed."""
        request_id, chunk = state.view.request_id, self._shape.chunk_tokens
        before = state.view.num_computed_tokens
        computed = before + scheduled
        final = min(computed, self._savable_tokens(state))
        blocks = _RequestBlocks(partial(block_tables, request_id), before)
        save = self._plan(state, final, blocks)
        end = self._plan_prompt_end(state, computed, blocks)
        if self._all_saved(state):
            if state.stale:
                self.end_hand_over(state)
            self.drop_request(request_id)
        elif self._tables.forgets:
            self._hold(state, block_tables(request_id), before, computed)
            self._until_due[request_id] = 1
        elif save is None and (num_blocks := self._blocks_without_room(state, final)):
            self._in_line[request_id] = num_blocks
            self._until_due[request_id] = math.inf
        else:
            self._in_line.pop(request_id, None)
            due = (state.next_save + 1) * chunk
            if self._seeks_end(state):
                due = min(due, state.view.num_prompt_tokens)
            self._until_due[request_id] = max(1, due - computed)
        return [each for each in (save, end) if each is not None]

    def _blocks_without_room(self, state: RequestState, final: int) -> int:
        """Return the number of blocks of the next chunk if they cannot be pinned; else 0.

        The result is 0, too, for a chunk that ends behind token `final`.
        """
        start = state.next_save * self._shape.chunk_tokens
        stop = start + self._shape.chunk_tokens
        num_blocks = self._tables.num_blocks(start, stop)
        has_room = stop > final or self._validity.reset.pending or num_blocks <= self.ledger.room
        return 0 if has_room else num_blocks

    def _hold(
        self, state: RequestState, tables: Sequence[BlockTable], before: int, computed: int
    ) -> None:
        """Hold the blocks of chunks still to save that the engine may free, and no others."""
        request_id, start = state.view.request_id, state.next_save * self._shape.chunk_tokens
        groups = self._shape.groups
        over = [
            place
            for place in self.ledger.held(request_id)
            if (place.block + 1) * groups[place.group].block_size <= start
        ]
        self.ledger.release_held(request_id, over)
        for place, block_id in self._tables.of_incomplete(tables, start, computed, before):
            if not self.ledger.hold(request_id, place, block_id):
                break

    def _savable_tokens(self, state: RequestState) -> int:
        """Return the number of tokens that may be saved once they are computed.

        Drafts and tokens in flight are not known by value, and do not count.
        """
        view = state.view
        return view.num_tokens if self._save_decode else view.num_prompt_tokens

    def _all_saved(self, state: RequestState) -> bool:
        """Return True if every chunk is saved; a preemption or failed load may undo that."""
        all_prompt = not self._save_decode and state.next_save >= self._prompt_chunks(state)
        return state.stale or (all_prompt and not self._seeks_end(state))

    def _prompt_chunks(self, state: RequestState) -> int:
        """Return the number of whole chunks in the prompt."""
        return state.view.num_prompt_tokens // self._shape.chunk_tokens

    def _seeks_end(self, state: RequestState) -> bool:
        """Return True if the prompt has an end that is still to be saved."""
        shape = self._shape
        rest = state.view.num_prompt_tokens % shape.chunk_tokens
        if not (shape.has_ends and rest) or state.has_saved_end:
            return False
        if state.view.options.hand_over:
            return True
        if self._save_decode or not 0 < shape.alias_step <= rest:
            return False
        # An end that begins like a stored chunk would get no alias of its own.
        tail, found = state.answer.tail, 0
        if tail is not None and self._prompt_chunks(state) == tail.position:
            found = tail.tokens if state.answer.found_chunks > tail.position else 0
        return found // shape.alias_step < rest // shape.alias_step

    def _plan_prompt_end(
        self, state: RequestState, computed: int, blocks: _RequestBlocks
    ) -> SavePlan | None:
        """Return the save of the prompt's end; None if nothing is due or no block can be pinned."""
        prompt = state.view.num_prompt_tokens
        if computed < prompt or not self._seeks_end(state):
            return None
        save = self._save(state, self._prompt_chunks(state), prompt, blocks)
        state.has_saved_end = save is not None
        return save

    def _plan(self, state: RequestState, final: int, blocks: _RequestBlocks) -> SavePlan | None:
        """Return the save of as many chunks as can be pinned; None if the save has to wait.

        The chunks end at or before token `final`.
        """
        chunk, first = self._shape.chunk_tokens, state.next_save
        num_chunks = bisect_right(
            range(first + 1, final // chunk + 1),
            self.ledger.room,
            key=lambda end: self._tables.num_blocks(first * chunk, end * chunk),
        )
        save = self._save(state, first, (first + num_chunks) * chunk, blocks)
        if save is not None:
            state.next_save = first + num_chunks
        return save

    def _save(
        self, state: RequestState, first: int, stop: int, blocks: _RequestBlocks
    ) -> SavePlan | None:
        """Return the save of the tokens before `stop` from the chunk `first` on.

        They are whole chunks, or the part of one. None if nothing may be saved, or its blocks
        cannot be pinned.
        """
        start = first * self._shape.chunk_tokens
        whole, rest = divmod(stop, self._shape.chunk_tokens)
        if start >= stop or state.stale or self._validity.reset.pending or state.chain is None:
            return None
        if self._tables.num_blocks(start, stop) > self.ledger.room:
            return None
        tokens = state.view.tokens()
        if len(state.chain) < whole:
            state.chain.extend(tokens)
        held = self.ledger.held(state.view.request_id)
        pages = self._tables.of_save(blocks.tables(), start, stop, blocks.freed_at, held)
        if pages is None:
            return None
        chunks = range(first, whole + bool(rest))
        state.gaps |= self._tables.gaps(pages, chunks, state.answer.whole_chunks)
        end = (state.chain.hash_of_part(first, tokens[start:stop]), rest) if rest else None
        return self._pinned(state, first, chunks.stop, pages, end=end)

    def save_from_host(self, state: RequestState, stop: int) -> None:
        """Save the chunks before `stop`, which host memory has, without blocks."""
        if state.may_save and state.next_save < stop:
            self._late.append(self._pinned(state, state.next_save, stop, ()))
            state.next_save = stop

    def _pinned(
        self,
        state: RequestState,
        first: int,
        stop: int,
        pages: tuple[JobPages, ...],
        *,
        is_state: bool = False,
        end: tuple[bytes, int] | None = None,
    ) -> SavePlan:
        """Return the save of chunks [first, stop), whose blocks are pinned from now on.

        `end`: hash and tokens of the only chunk, if it is an end.
        """
        assert state.chain is not None
        job_id, hashes = JobId(self._new_id()), state.chain.hashes
        retention, end_tokens = state.retention, 0
        if end is not None:
            end_hash, end_tokens = end
            hashes = [*hashes[:first], end_hash]
            ttl_s = ALIASED_END_TTL_S if self._shape.alias_step else END_TTL_S
            expires_ns = self._wall_ns() + int(ttl_s * 1e9)
            retention = Retention(0, min(expires_ns, retention.expires_ns or expires_ns))
        if state.first_save is None and not is_state:
            state.first_save = min(first, state.next_save)
        topic = topic_of(state)
        draft_stop = None
        if self._shape.has_drafts and pages and not is_state:
            draft_stop = self.draft_gaps.stop_of(state, first, stop)
        self.ledger.pin(job_id, all_blocks(pages))
        self._registry.set("kvpool_pinned_blocks", self.ledger.num_blocks)
        plan = SavePlan(
            job_id=job_id,
            request_id=state.view.request_id,
            first_chunk=first,
            hashes=tuple(hashes[first:stop]),
            pages=pages,
            weights_version=self._validity.weights_version,
            before=tuple(hashes[max(0, first - self._shape.num_replicas) : first]),
            is_state=is_state,
            retention=retention,
            end_tokens=end_tokens,
            tenant=state.view.tenant,
            trace_headers=state.view.trace_headers,
            topic=topic,
            found=(state.first_save or 0) if topic else 0,
            host_windows=state.answer.stored.host_windows,
            draft_stop=draft_stop,
        )
        is_aliased = self._shape.alias_step > 0 and not is_state
        prompt = (state.chain, state.view.tokens()) if is_aliased else None
        self.outcomes.planned(plan, prompt)
        return plan

    def finish(
        self,
        state: RequestState,
        tables: Sequence[BlockTable],
        *,
        is_loading: bool,
    ) -> None:
        """Save the last chunks of a request that has ended, with the next step.

        `is_loading`: it has run, and whether its load is whole is known once its step has ended.
        """
        if state.chain is not None and self._tables.has_attention:
            # The last token sampled has no KV.
            computed = min(state.view.num_computed_tokens, state.view.num_tokens - 1)
            final = min(computed, self._savable_tokens(state))
            # These tables are the engine's own, in which empty places are marked.
            blocks = _RequestBlocks(lambda: tables, 0)
            plans = [
                self._plan(state, final, blocks),
                self._plan_prompt_end(state, computed, blocks),
            ]
            plans.append(self._plan_answer_end(state, final, blocks))
            saves = [each for each in plans if each is not None]
            if saves and is_loading:
                self._unconfirmed[state.view.request_id] = saves
            else:
                self._late += saves
        self.drop_request(state.view.request_id)

    def _plan_answer_end(
        self, state: RequestState, final: int, blocks: _RequestBlocks
    ) -> SavePlan | None:
        """Return the save of the end of an answer with `final` tokens; None without any."""
        chunks, rest = divmod(final, self._shape.chunk_tokens)
        is_aliased = self._shape.has_ends and 0 < self._shape.alias_step <= rest
        is_wanted = is_aliased and self._save_decode and state.next_save == chunks
        if not is_wanted or (state.has_saved_end and final == state.view.num_prompt_tokens):
            return None
        return self._save(state, chunks, final, blocks)

    def end_hand_over(self, state: RequestState) -> None:
        """Tell the workers that a hand-over saves nothing beyond what is planned.

        Where it may not save what it computes, nothing is expected of its saves in progress either.
        """
        topic = topic_of(state)
        if topic and not state.hand_over_ended:
            state.hand_over_ended = True
            chunks = 0 if state.stale else state.next_save
            if state.has_saved_end and chunks == self._prompt_chunks(state):
                chunks += 1
            found = state.next_save if state.first_save is None else state.first_save
            if not self._tables.has_attention:  # the last state stands for all before it
                chunks = found = max(state.saved_states, default=0) // self._shape.chunk_tokens
            self._hand_over_ends.append(HandOverEnd(state.view.request_id, topic, found, chunks))

    def take_hand_over_ends(self) -> tuple[HandOverEnd, ...]:
        """Remove and return the ends of hand-overs for the plan of a step, after its saves."""
        ends, self._hand_over_ends = tuple(self._hand_over_ends), []
        return ends

    def step_load_ended(self, request_id: str, lost_blocks: Sequence[int]) -> None:
        """Save what the step of a load has computed, which has ended.

        A load that failed has lost blocks: nothing is saved, and they leave vLLM's prefix cache.
        """
        saves = self._unconfirmed.pop(request_id, [])
        if not lost_blocks:
            self._late += saves
            return
        self._pins.evict(lost_blocks)
        for save in saves:
            self._drop(save)

    def _drop(self, save: SavePlan) -> None:
        if save.topic:
            first = save.first_chunk
            self._hand_over_ends.append(HandOverEnd(save.request_id, save.topic, first, first))
        self.ledger.release(save.job_id, self._shape.num_ranks)
        self.outcomes.dropped(save.job_id)

    def gathered(self, ranks_by_job: Mapping[JobId, int]) -> None:
        """Release the blocks of saves, as ranks have gathered them."""
        for job_id, ranks in ranks_by_job.items():
            self.ledger.release(job_id, ranks)
        if ranks_by_job:
            self._registry.set("kvpool_pinned_blocks", self.ledger.num_blocks)

    def drop_late(self) -> None:
        """Drop saves that wait for a further step, which may not come, and release all holds."""
        self.ledger.release_all_held()
        for save in (*self._late, *chain.from_iterable(self._unconfirmed.values())):
            self._drop(save)
        self._late.clear()
        self._unconfirmed.clear()

    @property
    def has_pins(self) -> bool:
        """True if blocks are pinned for saves."""
        return self.ledger.num_blocks > 0

    @property
    def has_pending(self) -> bool:
        """True if a further step is needed, to release blocks or to end hand-overs."""
        return self.has_pins or bool(self._late or self._hand_over_ends)
