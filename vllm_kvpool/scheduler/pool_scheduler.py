"""The pool in the scheduler's process: lookups, loads and saves that vLLM's calls lead to.

Owned by the scheduler's thread. A request's life, in the states of `states.py`:
    add -> lookup pending -> answered -> (offer -> load planned -> load ended) -> saving -> finish
* `match` may be called any number of times; only `allocated` turns an offer into a load.
* A request that expects tokens of a producer is offered them before they are stored, a promise.
  Its load streams (`Landed`): chunks that never come end it as a lost cell does.
* After a load that stopped early the request is offered the tokens that were loaded, and no more
  (`limit_tokens`). The next lookup asks for every cell (`_ask`) and may offer more, once.
* KV of old weights is never saved under new ones.
"""

import itertools
import logging
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from vllm_kvpool.config import KVPoolConfig, KVRole, LoadPolicy, RequestOptions
from vllm_kvpool.metrics import MetricsRegistry
from vllm_kvpool.scheduler.blocks import BlockPins, BlockTable, GroupTables
from vllm_kvpool.scheduler.loads import LoadCostModel, RequestLoad, RequestLoads, idle_wait_s
from vllm_kvpool.scheduler.lookup import LookupOutcome, LookupResult
from vllm_kvpool.scheduler.lookup_service import LookupService
from vllm_kvpool.scheduler.messages import Loaded, StepPlan, StepReport
from vllm_kvpool.scheduler.request import (
    LoadOffer,
    PoolShape,
    RequestState,
    RequestView,
    ScheduledStep,
)
from vllm_kvpool.scheduler.request_lookups import RequestLookups
from vllm_kvpool.scheduler.save_outcomes import EndedSave, SaveOutcomes
from vllm_kvpool.scheduler.save_planner import SavePlanner
from vllm_kvpool.scheduler.states import AdmissionState, LookupState, RetryState, moved
from vllm_kvpool.scheduler.validity import Validity
from vllm_kvpool.storage.base import Retention
from vllm_kvpool.transfer.ops import JobId, LoadPlan, PrefetchPlan

logger = logging.getLogger(__name__)

RESET_WAIT_S = 5.0
# In a step that an answer or an arrival ends at once.
WATCHED_WAIT_S = 30.0
# While a stream is loaded: its early end comes with a step. The wait is a quarter of
# the time since a chunk has landed.
STREAM_WAIT_MIN_S = 0.05
STREAM_WAIT_S = 10.0
# `match` is called for each request that waits. Python 3.11 is slow to look up members of an Enum.
_RUNNING, _DUE, _PENDING = AdmissionState.RUNNING, RetryState.DUE, LookupState.PENDING


class PoolScheduler:
    """The state of all requests. `can_save`: whether any tier takes saves, as far as is known."""

    def __init__(
        self,
        config: KVPoolConfig,
        role: KVRole,
        shape: PoolShape,
        lookups: LookupService,
        registry: MetricsRegistry,
        pins: BlockPins,
        clock: Callable[[], float] = time.monotonic,
        can_save: Callable[[], bool] = lambda: True,
        wall_ns: Callable[[], int] = time.time_ns,
        has_arrivals: Callable[[], bool] | None = None,
    ) -> None:
        self._has_arrivals = has_arrivals
        self._pins = pins
        self._config = config
        self._shape = shape
        self._service = lookups
        self.host = lookups.host
        """The chunks that ranks have in host memory."""
        self._registry = registry
        self._clock = clock
        self._wall_ns = wall_ns
        self._role_saves = role is not KVRole.CONSUMER or config.save_decode
        self._can_save = can_save
        self._tables = GroupTables(shape.groups, shape.chunk_tokens)
        self._validity = Validity(shape.num_ranks)
        self._new_id = partial(next, itertools.count(1))  # of lookups and jobs
        self.saves = SavePlanner(
            shape,
            self._tables,
            self._validity,
            registry,
            self._new_id,
            SaveOutcomes(shape, registry, clock, has_host=lookups.host.num_ranks > 0),
            pins,
            save_decode=config.save_decode,
            wall_ns=wall_ns,
        )
        self._requests: dict[str, RequestState] = {}
        self._lookups = RequestLookups(
            lookups, config, shape, self._validity, registry, clock, self._new_id
        )
        self._loads = RequestLoads(registry)
        self._prefetches: dict[str, PrefetchPlan] = {}  # of requests whose turn has not come
        # Requests -> tokens of the state in the engine's own cache that they go on from, and that
        # is to be stored: it is pinned (`pin_s`), or the pool lacks it.
        self._own_states: dict[str, int] = {}
        self._starting: dict[str, RequestState] = {}  # requests that have blocks, and have not run
        self._has_given_way = False  # a request, since the last step was planned
        self._idle = True
        self._landed_at = 0.0  # the workers were last told of chunks to load
        self._notices: dict[int, str] = {}  # rank -> where it tells of hand-overs
        self._load_costs = LoadCostModel()

    @property
    def weights_version(self) -> str:
        """The version of the engine's weights; "" for the weights of its start."""
        return self._validity.weights_version

    # Arrival and lookup

    def add(self, view: RequestView) -> None:
        """Have an arrived request's prompt hashed and looked up, on the lookup thread."""
        options = view.options
        state = RequestState(
            view,
            may_load=view.shareable and view.reads_cache and options.load and self._shape.loads,
            may_save=view.shareable and self._role_saves and options.save and self._can_save(),
            retention=self._retention_of(options),
        )
        self._requests[view.request_id] = state
        if state.may_load or state.may_save:
            self._ask(state)

    def _retention_of(self, options: RequestOptions) -> Retention:
        now_ns, times_s = self._wall_ns(), (options.pin_s, options.ttl_s)
        return Retention(*(now_ns + int(each * 1e9) if each else 0 for each in times_s))

    def _ask(self, state: RequestState) -> None:
        # Once after a failed load: where the engine starts the request again, up to the first
        # missing chunk or, with recurrent states, an earlier boundary; else all, once preempted.
        if state.retry is RetryState.LIMITED:  # it has computed and saved what was missing
            state.limit_tokens = None
        if state.retry is not RetryState.NONE:
            state.retry = moved(state.retry, RetryState.DONE)
        self.saves.ledger.release_all_held(state.view.request_id)
        self._lookups.ask(state)

    def _take_answers(self) -> bool:
        """Take what lookups have found; returns whether any of it is to be acted on."""
        is_of_use = False
        for result in self._service.take_results():
            state, answer = self._lookups.take(result)
            if state is None:
                continue
            if self._requests.get(state.view.request_id) is not state:  # it has ended
                self.saves.end_hand_over(state)
                continue
            is_of_use |= answer.is_final or answer.found_chunks > 0
            if answer.chain is None:
                self._leave_out(state)
                continue
            self._note_found(state, answer)
            if answer.is_final and self._shape.prefetches and state.answer.found_chunks:
                self._prefetch(state)
        return is_of_use

    def _prefetch(self, state: RequestState) -> None:
        """Have the workers fetch what was found while the request waits for its turn."""
        request_id = state.view.request_id
        if state.may_load and self._loads.get(request_id) is None:
            assert state.chain is not None
            hashes = tuple(state.chain.hashes[: state.answer.whole_chunks])
            self._prefetches[request_id] = PrefetchPlan(
                request_id, hashes, self.weights_version, state.view.tenant
            )

    def _note_found(self, state: RequestState, answer: LookupResult) -> None:
        """Take what a lookup has found so far: it is not saved, and a load of it may go on."""
        found = answer.found_chunks
        # What is stored need not be saved, unless a load of it has failed. vLLM offers a state that
        # it has loaded.
        kept, attention = self._kept_chunks(state, answer)
        known = max(kept, attention)
        tail = answer.tail
        if tail is not None and known > tail.position:
            known = tail.position
            stop = known * self._shape.chunk_tokens + tail.tokens
            state.has_saved_end |= tail.is_end and stop == state.view.num_prompt_tokens
        if kept:
            state.saved_states.add(kept * self._shape.chunk_tokens)
        if state.limit_tokens is not None:
            known = min(known, state.limit_tokens // self._shape.chunk_tokens)
        state.next_save = max(state.next_save, known)
        has_others = answer.stored.is_in_host and answer.stored.attention <= state.next_save
        if has_others and answer.is_final and state.limit_tokens is None:
            self.saves.save_from_host(state, answer.attention_chunks)
        self.saves.mark_due(state)
        load = self._loads.get(state.view.request_id)
        if load is not None and load.landed_stop is not None:
            is_final = answer.is_final or not self._validity.finds(answer.weights_version)
            self._loads.land(load, found, is_final, is_urgent=answer.has_lost_producer)

    @staticmethod
    def _kept_chunks(state: RequestState, answer: LookupResult) -> tuple[int, int]:
        """Return the chunks found that need not be saved, with states and in attention alone.

        None if they are pinned: a put pins what is stored already. Of a prompt that is handed over
        those in stores: host memory is this engine's alone.
        """
        if state.retention.pinned_until_ns:
            return 0, 0
        if state.view.options.hand_over:
            return answer.stored.chunks, answer.stored.attention
        return answer.found_chunks, answer.attention_chunks

    def _chunks_to_offer(self, state: RequestState, num_computed: int) -> int | None:
        """Return how many chunks to offer a request now; None if it waits for its lookup.

        While the lookup waits, the chunks that the producer has promised are offered, once the
        first chunk is stored. Blocks for promises are limited; one request may always have more.
        """
        answer = state.lookup.answer
        if state.lookup.state is not _PENDING:
            return answer.found_chunks
        chunks = answer.expected_chunks
        if not chunks or self._tables.has_states:
            return None
        stop = self._usable(state, chunks)
        if stop <= num_computed:  # in the engine's own cache
            self._lookups.give_up(state)
            return 0
        if self._config.layerwise or self._validity.reset.pending:
            return None
        if self._usable(state, answer.found_chunks) <= num_computed:
            return None
        num_blocks = self._loads.num_promised + self._tables.num_blocks(num_computed, stop)
        has_room = not self._loads.streaming or num_blocks <= self._shape.max_promised_blocks
        return chunks if has_room else None

    def _usable(self, state: RequestState, chunks: int) -> int:
        """Return the tokens that a load of the first chunks can bring: whole blocks.

        A full hit leaves the last token to be computed. Where rows depend on later tokens
        (`lookahead`), the last ones are left, too: those rows are not stored. With recurrent states
        a hit ends where it was found, or is none. Nor does it end within one of this engine's
        blocks, whose states vLLM itself keeps and hashes at their ends alone.
        """
        tokens = found = state.answer.tokens_of(chunks, self._shape.chunk_tokens)
        num_tokens, block_size = state.view.num_tokens, self._tables.block_size
        limit = num_tokens if state.limit_tokens is None else state.limit_tokens
        if self._tables.has_states:
            limit = min(limit, num_tokens - 1)
            return tokens if tokens <= limit and tokens % block_size == 0 else 0
        tokens = min(tokens, limit)
        if tokens < num_tokens or state.answer.tail is None:
            tokens -= tokens % block_size
        return min(tokens, num_tokens - 1, max(0, found - self._shape.lookahead))

    def _leave_out(self, state: RequestState) -> None:
        """Load and save nothing more of a request."""
        self.saves.end_hand_over(state)
        state.may_load = state.may_save = False
        self.saves.drop_request(state.view.request_id)

    def match(self, request_id: str, num_computed: int) -> tuple[int | None, bool]:
        """Return the tokens beyond `num_computed` (block aligned) that a load can bring.

        (None, False) while the lookup is pending; (0, False) when there is nothing to load.
        """
        state = self._requests.get(request_id)
        if state is None:
            return 0, False
        state.own_tokens = num_computed
        self.saves.draft_gaps.start_request(state, num_computed)
        before = state.admission
        if self._starting.pop(request_id, None) or before is _RUNNING:
            # Its load has brought nothing, or it was preempted: vLLM starts it again.
            state.admission = moved(before, AdmissionState.QUEUED)
        has_old_embeddings = state.view.has_media and self._validity.use_embeddings()
        if self._loads.would_share(state.view.tokens, num_computed, self._tables.block_size):
            return None, False
        if self._must_give_way(before):
            return None, False
        if not (state.may_load or state.may_save):
            state.view.admit()
            state.admission = moved(state.admission, AdmissionState.MATCHED)
            return 0, False
        lookup = state.lookup
        if (
            state.view.num_preemptions != lookup.num_preemptions
            or state.retry is _DUE
            or lookup.answer.weights_version != self._validity.weights_version
        ):
            self._ask(state)
        self._take_answers()
        chunks = self._chunks_to_offer(state, num_computed)
        if chunks is None:
            if self._clock() < state.lookup.deadline:
                return None, False
            self._lookups.time_out(state)
            chunks = state.answer.found_chunks
        own = state.view.admit()
        state.trusts_names = own.blocks
        # Its computed tokens come from the engine's own prefix cache.
        is_doubtful = self._validity.has_doubtful_blocks or not own.blocks
        has_others_blocks = num_computed > 0 and is_doubtful
        state.stale = has_old_embeddings or not own.embeddings or has_others_blocks
        self.saves.mark_due(state)
        self._prefetches.pop(request_id, None)  # the request is loaded now, or not at all
        self._own_states.pop(request_id, None)
        state.admission = moved(state.admission, AdmissionState.MATCHED)
        has_no_load = self._validity.reset.pending or self._is_refused(state)
        stop = 0 if has_no_load else self._usable(state, chunks)
        is_worth = self._config.load_policy is LoadPolicy.ALWAYS
        count = stop - num_computed
        if count <= 0 or not (is_worth or self._load_costs.loading_beats_computing(count)):
            state.offer = None
            if num_computed and self._tables.has_states and self._stores_own(state, num_computed):
                self._own_states[request_id] = num_computed
            return 0, False
        state.offer = LoadOffer(num_computed, stop, self._pins.num_if_all_free())
        return count, not self._config.layerwise

    def _stores_own(self, state: RequestState, num_computed: int) -> bool:
        """Return True if the own cache's state after so many tokens is to be stored."""
        is_known = state.may_load and state.answer.outcome is LookupOutcome.ANSWERED
        kept, _ = self._kept_chunks(state, state.answer)
        is_lacking = is_known and kept * self._shape.chunk_tokens < num_computed
        return is_lacking or bool(state.retention.pinned_until_ns)

    def wanted_boundary(self, request_id: str, own_boundary: int = 0) -> int:
        """Return the tokens after which the engine should keep one more recurrent state; or 0.

        Either a prefix without a state that other requests have in common, of which the pool has
        the attention, or the engine's own cache (`own_boundary`): a state after it serves them all.
        Or, where the engine's choice, the last whole block, may lie between the ends of chunks, the
        last boundary that does not.
        """
        state = self._requests.get(request_id)
        if state is None or not (self._tables.has_states and state.may_save):
            return 0
        chunk, block = self._shape.chunk_tokens, self._tables.block_size
        step = math.lcm(chunk, block)
        found = state.answer.found_chunks * chunk
        common = max(state.answer.attention_chunks * chunk, own_boundary)
        last = state.view.num_prompt_tokens - 1 if step > block else 0
        wanted = [boundary - boundary % step for boundary in (common, last)]
        return next((boundary for boundary in wanted if boundary > found), 0)

    def _is_refused(self, state: RequestState) -> bool:
        """Return True if vLLM has no room for the request's load, although all blocks are free.

        For a load, but not for a step, vLLM keeps more blocks free: for drafts, and for each
        request whose load has failed, the same one included. If the engine has as many blocks, the
        offer was not taken because the request waits for embeddings.
        """
        if state.offer is None or not state.offer.all_blocks:
            return False
        sizes = [group.block_size for group in self._shape.groups]
        others = (each for each in self._requests.values() if each is not state)
        failed = (each for each in others if each.retry is not RetryState.NONE)
        requests = (state, state, *failed)  # its load, and blocks kept free
        most = sum(-(-each.view.num_tokens // size) for each in requests for size in sizes)
        return most > state.offer.all_blocks

    def _must_give_way(self, admission: AdmissionState) -> bool:
        """Return True if a request in this state has to wait for requests that have loaded.

        vLLM 0.27 schedules nothing behind the first request that it has no blocks for. If the
        blocks are held by loaded requests behind it, and nothing runs, nothing ever would. Requests
        that have not loaded must not pass it either.
        """
        if not (self._shape.stops_at_first and self._idle) or admission is AdmissionState.LOADED:
            return False
        if all(each.admission is not AdmissionState.LOADED for each in self._starting.values()):
            return False
        self._has_given_way |= admission is AdmissionState.MATCHED
        return self._has_given_way

    # Loads

    def allocated(self, request_id: str, tables: Sequence[BlockTable], num_external: int) -> None:
        """Take the allocated blocks; `num_external` of the offered tokens are to be loaded (or 0).

        `tables`: the request's block table in each KV cache group.
        """
        state = self._requests.get(request_id)
        if state is None:
            return
        has_waited = state.admission in (AdmissionState.WAITING, AdmissionState.LOADED)
        to = AdmissionState.WAITING if has_waited else AdmissionState.ALLOCATED
        state.admission = moved(state.admission, to)
        self._starting[request_id] = state
        if not state.counted:
            state.counted = True
            missed = state.missed_tokens(num_external, self._shape.chunk_tokens)
            prompt = ("prompt", state.view.num_prompt_tokens)
            self._count_missed(request_id, missed, prompt, ("to_load", num_external))
        if state.lost_tokens > num_external:
            self._count_missed(request_id, [("load_failed", state.lost_tokens - num_external)])
        state.lost_tokens = 0
        offer, state.offer = state.offer, None
        if num_external == 0 or offer is None or state.chain is None:
            return
        start, offered, _ = offer
        stop = start + num_external
        # vLLM 0.33 cuts some hits to whole blocks. It cuts none of models with recurrent states.
        assert stop == offered or (stop < offered and not self._tables.has_states), (start, stop)
        state.own_tokens = stop
        state.lacks_drafts = False
        chunk, tail = self._shape.chunk_tokens, state.answer.tail
        first, last = start // chunk, -(-stop // chunk)
        hashes, end_tokens = state.chain.hashes, 0
        if tail is not None and last > tail.position:
            hashes, end_tokens = [*hashes[: tail.position], tail.chunk_hash], tail.cell_tokens
        else:
            tail = None
        found, is_layered = state.answer.found_chunks, self._config.layerwise
        plan = LoadPlan(
            job_id=JobId(self._new_id()),
            request_id=request_id,
            first_chunk=first,
            hashes=tuple(hashes[first:last]),
            pages=self._tables.of_load(tables, start, stop),
            token_start=start,
            token_stop=stop,
            weights_version=state.answer.weights_version,
            layered=is_layered,
            before=tuple(state.chain.hashes[max(0, first - self._shape.num_replicas) : first]),
            tenant=state.view.tenant,
            landed_stop=found if last > found else None,
            end_tokens=end_tokens,
            is_last_other=tail is not None,
        )
        load = RequestLoad(
            plan,
            Loaded(stop),
            num_blocks=self._tables.num_blocks(start, stop),
            landed_stop=plan.landed_stop,
            tokens=state.view.tokens() if is_layered else (),
            table=tuple(tables[0]) if is_layered else (),
        )
        self._loads.start(load)
        if load.landed_stop is not None and state.lookup.state is not _PENDING:
            self._loads.land(load, found, True)  # the lookup has ended since the offer

    def step_ended(self) -> None:
        """End the layered loads of a step that every rank has reported; call `apply` first."""
        for load in self._loads.pop_layered():
            lost_blocks = load.lost_blocks(self._tables.block_size)
            self.saves.step_load_ended(load.plan.request_id, lost_blocks)
            self._count_load(load)

    def load_ended(self, request_id: str) -> None:
        """End a load that every rank has reported; call `apply` first."""
        load = self._loads.get(request_id)
        if load is None or load.plan.layered:
            return
        state = self._requests[request_id]
        if request_id in self._starting:
            state.admission = moved(state.admission, AdmissionState.LOADED)
        self._loads.pop(request_id)
        if load.landed_stop is not None:  # a cell was lost, or no rank needs a later chunk
            self._lookups.count_expected(state, is_found=load.is_whole)
            self._lookups.give_up(state)
        self._count_load(load)

    def _count_load(self, load: RequestLoad) -> None:
        """Count a load that has ended in every rank."""
        request_id, tenant = load.plan.request_id, load.plan.tenant
        start, kept, stop = load.plan.token_start, load.end.tokens, load.plan.token_stop
        if load.is_whole:
            self._load_costs.loaded(stop - start, load.end.seconds)
        state = self._requests.get(request_id)
        if state is not None:
            self.saves.mark_due(state)  # its computed tokens have jumped
            attributes = {
                "kvpool.loaded_tokens": kept - start,
                "kvpool.wanted_tokens": stop - start,
            }
            state.view.record_span("kvpool.load", load.end.seconds, attributes)
            if state.retry is RetryState.DUE:  # counted once it is known what is loaded instead
                state.lost_tokens = stop - start
                return
            if kept < stop and not self._tables.resumes:
                kept = start  # the engine starts the request again
            self.saves.outcomes.count_tenant(tenant, "load", kept - start)
            if self._shape.has_drafts:
                missing = self.saves.draft_gaps.tokens_of(load.end.cleared, start, kept)
                self._load_costs.drafts_loaded(kept - start, missing)
                self._registry.add("kvpool_draft_tokens", missing, outcome="missing")
                self._registry.add("kvpool_draft_tokens", kept - start - missing, outcome="loaded")
        self._registry.add("kvpool_hit_tokens", kept - start)
        self._count_missed(request_id, [("load_failed", stop - kept)], ("loaded", kept - start))

    def _count_missed(
        self, request_id: str, missed: Sequence[tuple[str, int]], *others: tuple[str, int]
    ) -> None:
        """Count tokens that are not loaded, by reason.

        They are logged behind others, in the form that `cli/explain.py` reads.
        """
        for reason, tokens in missed:
            if tokens:
                self._registry.add("kvpool_miss_tokens", tokens, reason=reason)
        if self._config.log_requests:
            words = " ".join(f"{name}={count}" for name, count in (*others, *missed))
            logger.info("kvpool: request %s: %s", request_id, words)

    # Steps

    def plan_step(self, step: ScheduledStep) -> StepPlan:
        """Plan the loads that are allocated and the saves that are due; pins the saves' blocks.

        Where there is no other work it waits for lookups (`_wait_for_lookups`).
        """
        self._take_answers()
        was_idle, self._idle = self._idle, not step.scheduled
        self._has_given_way = False
        if self._config.load_policy is LoadPolicy.AUTO:
            waits_for_layers = self._config.layerwise and self._loads.has_news
            self._load_costs.step_planned(self._clock(), {} if waits_for_layers else step.scheduled)
            if self._shape.has_drafts:
                self._note_answers(step)
        if self._own_states:
            step = self._with_own_states(step)
        if self._starting:
            self._note_starts(step)
        saves = self.saves.of_step(step, self._requests, self._loads)
        if self._shape.state_stride:
            self._keep_states_of_answers(step)
        prefetches = tuple(self._prefetches.values())
        self._prefetches.clear()
        # While streams are all that is loaded, the next chunk to land is waited for here.
        waits_here = self._idle and self._loads.num_stored == 0
        ends = self.saves.take_hand_over_ends()
        if waits_here and not (self._loads.has_news or saves or prefetches or ends):
            self._wait_for_lookups(was_idle=was_idle)
        loads, landed = self._loads.take_news()
        if landed or loads:
            self._landed_at = self._clock()
        may_wait = self._idle and not self._shape.in_lockstep
        may_wait &= not (waits_here and self._loads.streaming)
        generation = self._validity.reset.generation
        return StepPlan(loads, saves, prefetches, may_wait, landed, ends, generation)

    def _keep_states_of_answers(self, step: ScheduledStep) -> None:
        """Have the engine keep the next state of each request that generates tokens.

        It decides in a later step, once the last token before the boundary is known.
        """
        stride = self._shape.state_stride
        for request_id, count in step.scheduled.items():
            state = self._requests.get(request_id)
            if state is None or not state.may_save:
                continue
            view = state.view
            known = min(view.num_computed_tokens + count, view.num_tokens)
            if known >= view.num_prompt_tokens:
                view.keep_state_at((known // stride + 1) * stride)

    @property
    def has_pending(self) -> bool:
        """True if a further step is needed: to release blocks, or to end hand-overs or a reset."""
        is_resetting = self._validity.reset.needs_step
        return self.saves.has_pending or self._lookups.has_unnamed or is_resetting

    def _note_starts(self, step: ScheduledStep) -> None:
        """Note which requests run in the step, or wait, and those that another connector loads for.

        Such a load within the step may fail after later steps are planned, and vLLM's prefix cache
        shows its blocks at once. So the request is not saved, nor are requests that begin in that
        cache, until it is reset. A load that vLLM waits for needs neither: its blocks are shown
        once they are filled.
        """
        states = self._starting.values()
        admitted = [each for each in states if each.admission is AdmissionState.ALLOCATED]
        is_foreign = False
        for request_id in self._starting.keys() & step.scheduled.keys():
            state = self._starting.pop(request_id)
            # vLLM counts more tokens as computed than it has and the pool brings.
            if state.view.num_computed_tokens > state.own_tokens:
                # Another connector may know blocks by vLLM's hashes, too.
                state.stale |= not state.trusts_names
                is_foreign |= state.admission is AdmissionState.ALLOCATED
            state.admission = moved(state.admission, AdmissionState.RUNNING)
        for state in self._starting.values():
            if state.admission is AdmissionState.ALLOCATED:
                state.admission = moved(state.admission, AdmissionState.WAITING)
        if is_foreign:
            self._validity.foreign_load_started()
            for state in admitted:
                # The request may have found blocks of the load.
                state.stale |= state.view.num_computed_tokens > 0

    def _note_answers(self, step: ScheduledStep) -> None:
        """Note the requests of the step whose answers have begun."""
        for request_id in step.scheduled.keys() & self._requests.keys():
            state = self._requests[request_id]
            if state.first_answer is None:
                num_tokens = state.view.num_tokens
                if num_tokens > state.view.num_prompt_tokens:
                    state.first_answer = self._clock(), num_tokens

    def _with_own_states(self, step: ScheduledStep) -> ScheduledStep:
        """Return the step with one more offer for each request of `_own_states`.

        vLLM offers no state that its own cache has already.
        """
        states = dict(step.states)
        for request_id in self._own_states.keys() & step.scheduled.keys():
            boundary = self._own_states.pop(request_id)
            offers = self._tables.of_own_states(step.block_tables(request_id), boundary)
            states[request_id] = [*states.get(request_id, ()), *offers]
        return step._replace(states=states)

    def _wait_for_lookups(self, *, was_idle: bool) -> None:
        """Wait for lookups in a step without work, unless results of the one before are to come.

        Otherwise an in-process engine would spin on the cores that compute the answer. While a
        load of stored chunks is under way the workers wait for it instead.
        """
        pending = self._lookups.pending
        if self._shape.in_lockstep or not pending:
            return
        if not was_idle and any(state.counted for state in self._requests.values()):
            return
        # A request that has its answer may be in a step whose results the engine has not taken, or
        # wait for another connector or a grammar: nothing says when.
        has_more = len(pending) < len(self._requests) or self.saves.outcomes.is_awaited
        if self._has_arrivals is None or has_more or self.has_pending:
            if was_idle:
                newest = max(lookup.asked_at for lookup in pending)
                self._service.wait(idle_wait_s(self._clock() - newest))
            return
        wait_s = WATCHED_WAIT_S
        if self._loads.streaming:
            since_landed_s = self._clock() - self._landed_at
            wait_s = min(STREAM_WAIT_S, max(STREAM_WAIT_MIN_S, since_landed_s / 4))
        has_arrivals = self._has_arrivals
        while self._service.wait(self._until_deadline(wait_s), has_arrivals):
            if has_arrivals() or self._take_answers():
                return

    def _until_deadline(self, longest_s: float) -> float:
        """Return the seconds until the first request stops waiting for its lookup.

        A lookup that is not opened yet, as its adapter is being read, does not answer by then. A
        deadline that has passed is left out: vLLM may not ask for that request in an idle step.
        """
        now = self._clock()
        left = (lookup.deadline - now for lookup in self._lookups.pending)
        return min([longest_s, *(each for each in left if each > 0)])

    def apply(self, report: StepReport) -> list[EndedSave]:
        """Take the workers' report: unpin gathered blocks, note loads that stopped.

        Returns the saves that have ended in every rank.
        """
        self.saves.gathered(report.gathered)
        outcomes = self.saves.outcomes
        ended = [outcomes.ended(job_id, how) for job_id, how in report.stored.items()]
        for save in ended:
            if save is not None and save.prompt is not None and save.how.tiers:
                self._service.write_aliases(save)
        for request_id, loaded in report.loads.items():
            load, state = self._loads.get(request_id), self._requests.get(request_id)
            if load is not None:
                load.end = load.end.merged(loaded)
                if state is not None and not load.is_whole:
                    self._load_failed(state, load)
                if state is not None and loaded.cleared:
                    state.lacks_drafts = True
                    self.saves.draft_gaps.cleared(state, loaded.cleared)
        for rank, change in report.host.items():
            self.host.apply(rank, change)
        for rank, endpoint in report.notices.items():
            self._notices[rank] = endpoint
            self._registry.set("kvpool_notices_info", 1, rank=str(rank), endpoint=endpoint)
        reset = self._validity.reset
        if reset.acked(report.dropped.get(reset.generation, 0)):
            end = partial(reset.finish, reset.generation)
            self._service.remove_all(end, reset.take_weights_versions())
        return [save for save in ended if save is not None]

    def _load_failed(self, state: RequestState, load: RequestLoad) -> None:
        """Limit what the request is offered: a rank has not loaded all tokens of its load."""
        tokens = load.end.tokens
        resumes, has_states = self._tables.resumes, self._tables.has_states
        # Unless it resumes, the engine starts the request again.
        kept = tokens if resumes else 0
        if has_states:
            state.saved_states = {each for each in state.saved_states if each <= tokens}
        # Only once, as a load may take its whole timeout. Every rank reports the same load, each in
        # its own step.
        if (has_states or not resumes) and state.retry is not RetryState.DONE:
            kept = load.plan.token_stop - 1 if has_states else tokens
            state.retry = moved(state.retry, RetryState.DUE)
        elif state.retry is RetryState.NONE:
            state.retry = moved(state.retry, RetryState.LIMITED)
        limit = kept if state.limit_tokens is None else min(kept, state.limit_tokens)
        state.limit_tokens = limit
        kept = min(limit, tokens) if self._tables.has_states else limit
        state.next_save = min(state.next_save, kept // self._shape.chunk_tokens)
        self.saves.mark_due(state)

    # The end

    def finish(
        self, request_id: str, tables: Sequence[BlockTable]
    ) -> dict[str, dict[str, Any]] | None:
        """Plan what is still to be saved of a request that has ended.

        Returns the answer to the client: how many tokens are being saved.
        """
        state = self._requests.pop(request_id, None)
        has_run = self._starting.pop(request_id, None) is None
        self._prefetches.pop(request_id, None)
        self._own_states.pop(request_id, None)
        if state is None:
            return None
        if state.first_answer is not None:
            began, had = state.first_answer
            tokens, seconds = state.view.num_tokens - had, self._clock() - began
            self._load_costs.answered(tokens, seconds, has_drafts=not state.lacks_drafts)
        load = self._loads.get(request_id)
        if load is not None and not load.plan.layered:
            self._loads.pop(request_id)
        self._lookups.finish(state)
        if state.may_save and has_run and (load is None or load.plan.layered):
            self.saves.finish(state, tables, is_loading=load is not None)
        else:  # another connector may be filling its blocks
            self.saves.drop_request(request_id)
        self.saves.end_hand_over(state)
        if not state.may_save:
            return None
        tokens = state.next_save * self._shape.chunk_tokens
        prompt = state.view.num_prompt_tokens
        if state.has_saved_end and tokens == prompt - prompt % self._shape.chunk_tokens:
            tokens = prompt
        tokens = self._tables.loadable(tokens, state.gaps)
        if self._tables.has_states:  # what another engine can load
            whole = [
                boundary
                for boundary in state.saved_states
                if boundary <= tokens or not self._tables.has_attention
            ]
            tokens = max(whole, default=0)
        answer: dict[str, Any] = {"tokens": tokens}
        if state.hand_over_ended and len(self._notices) == self._shape.num_ranks:
            answer["notices"] = [self._notices[rank] for rank in sorted(self._notices)]
        return {"kvpool": answer}

    def reset(self) -> bool:
        """Remove every cell of the own namespace; False if a store did not confirm it in time.

        Waits at most `RESET_WAIT_S`. Workers drop their saves with the next step (`Reset`).
        """
        self._validity.reset.start(self.weights_version)
        self.saves.drop_late()
        self._discard_hits()
        confirmed: SimpleQueue[bool] = SimpleQueue()
        self._service.remove_all(confirmed.put, (self.weights_version,))
        try:
            return confirmed.get(timeout=RESET_WAIT_S)
        except Empty:
            return False

    def _discard_hits(self) -> None:
        self._prefetches.clear()
        for load in self._loads.streaming:
            self._loads.land(load, 0, True)
        for state in self._requests.values():
            state.lookup.answer = state.answer.without_hit()
            state.next_save = 0
            state.saved_states.clear()
            # The weights may change next: what was computed before is not saved.
            is_loading = self._loads.get(state.view.request_id) is not None
            state.stale = state.stale or state.view.num_computed_tokens > 0 or is_loading
            self.saves.mark_due(state)

    def weights_changed(self, weights_version: str) -> None:
        """Set the version of the weights; "" names those that the engine started with.

        Saves that are planned go on under the old version. Stored cells of it stay: other engines
        may have those weights.
        """
        self._validity.weights_changed(weights_version)
        self._discard_hits()

    def adapter_was_replaced(self) -> None:
        """Load and save no request with an adapter, since a LoRA adapter was replaced in place.

        The content with which such a request is computed is not known.
        """
        for state in self._requests.values():
            if state.view.reads_files:
                self._leave_out(state)

    def own_cache_was_reset(self) -> None:
        """Save hits of the engine's own prefix cache again, as it is empty now."""
        self._validity.own_cache_was_reset()
        self.saves.draft_gaps.own_cache_was_reset()

    def encoder_cache_was_reset(self) -> None:
        """Note that embeddings of media are forgotten, but no KV that was computed from them."""
        self._validity.encoder_cache_was_reset()

    def load_of(self, request_id: str) -> LoadPlan | None:
        """Return the request's load, if one is in progress."""
        load = self._loads.get(request_id)
        return None if load is None else load.plan
