"""An engine without a neural network: vLLM's real scheduler, our real connectors, a fake model.

vLLM's scheduler makes its own connector. Every rank is a worker connector with its own pages. All
of them run in this thread. Each step writes the rows of the scheduled tokens, reads every row of
every scheduled request, and compares. A single wrong byte fails the step that would have used it.
`Workshop` builds rigs; several rigs may use one store in turn.
"""

import itertools
import pickle
import random
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_request_block_hasher,
    init_none_hash,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from tests.faults.model import FIRST_TOKEN, UNWRITTEN, Context, FakeModel, Pages
from tests.faults.rank import Rank, pool_in
from vllm_kvpool.scheduler.pool_scheduler import PoolScheduler

BLOCK = 16
CHUNK = 32
NUM_DRAFTS = 3
LOOKAHEADS: Mapping[str, Sequence[int]] = {
    "": (),
    "draft_model": (0, 0),
    "eagle": (1, 1),
    "mtp": range(1, NUM_DRAFTS + 1),
}
"""Drafter -> how many later tokens a row of each of its layers depends on. Each layer of MTP is a
module, which drafts a token."""
MAX_STEPS = 20_000
PAUSE_S = 0.001
RIGHT_DRAFTS = 0.7
SETTLE_S = 30.0  # a shared disk may delay a call by 10 s
HASH = get_hash_fn_by_name("sha256")
init_none_hash(HASH)
_ENGINES = itertools.count(1)


@dataclass(frozen=True, kw_only=True)
class Sibling:
    """`EmptyLoads` before the pool in a MultiConnector.

    Requests may continue from blocks that `EmptyLoads` has not loaded. So a rig with this sibling
    does not check the rows that requests read, and later tokens are wrong.
    """

    asynchronous: bool
    policy: str = "recompute"


@dataclass(frozen=True, kw_only=True)
class RigSpec:
    """The configuration of a rig. `options` are the connector's."""

    model: FakeModel = field(default_factory=FakeModel)
    tp: int = 1
    plans_ahead: bool = False
    """vLLM's asynchronous scheduling, which plans a step before it has the results of the last
    one."""
    drafter: str = ""
    """vLLM's method of speculative decoding, with `NUM_DRAFTS` tokens; "" for none. The drafter has
    KV layers behind the model's; in models with indexers it has none."""
    pp: int = 1
    num_blocks: int = 96
    max_batched_tokens: int = 96
    retention_interval: int = 0
    """Tokens between the additional states that vLLM keeps; 0: none."""
    pool: bool = True
    runner: str = "first"  # of `RUNNERS`
    events: bool = False  # vLLM's KV cache events
    options: dict[str, Any] = field(default_factory=dict)
    sibling: Sibling | None = None

    @property
    def lookaheads(self) -> Sequence[int]:
        """The look-ahead of each layer of the drafter."""
        return () if self.model.indexers else LOOKAHEADS[self.drafter]


@dataclass(slots=True)
class Answer:
    """A request's prompt, its output so far, and how it has ended."""

    prompt: list[int]
    max_tokens: int
    tokens: list[int] = field(default_factory=list)
    ended: str = ""
    params: dict[str, Any] | None = None


class Share(NamedTuple):
    """The part of a request that a step computes: tokens [start, stop), as they were planned.

    `known`: all tokens of a request that starts or restarts with the step. `drafts`: the last
    tokens, to be verified; -1 stands for a draft that the scheduler does not know.
    """

    context: Context
    tables: list[NDArray[np.intp]]
    start: int
    stop: int
    samples: bool
    known: int | None
    drafts: Sequence[int]


class Drafted(NamedTuple):
    """The rows that the drafter computes of a request in a step, from token `start` on."""

    tables: list[NDArray[np.intp]]
    start: int
    rows_lhtc: NDArray[np.floating]


@dataclass(slots=True)
class Batch:
    """A planned step, and the workers' output once they have run it."""

    output: SchedulerOutput
    shares: dict[str, Share]
    done: ModelRunnerOutput | None = None


class Rig:
    """An engine; see the module docstring. `workshop.rig(spec)` makes a rig."""

    def __init__(
        self,
        spec: RigSpec,
        config: Any,
        caches: Sequence[Any],
        rank_config: Callable[[int], Any],
    ) -> None:
        """Make an engine; `caches`: of each pipeline stage, as vLLM tells its workers."""
        self.spec = spec
        self.answers: dict[str, Answer] = {}
        self.on_scheduled: list[Callable[[SchedulerOutput], None]] = []
        self.on_stepped: list[Callable[[SchedulerOutput], None]] = []
        self.companions: list[Rig] = []
        """Other engines; each takes a step after each step of this engine."""
        self.num_steps = 0
        self.closed = False
        self.log: defaultdict[str, list[str]] = defaultdict(list)
        self._contexts: dict[str, Context] = {}
        self._numbers = itertools.count()
        self._hasher = get_request_block_hasher(BLOCK, HASH)
        self._planned: deque[Batch] = deque()  # the scheduler has not taken their results
        self._chance = random.Random(spec.num_blocks)
        self._engine = next(_ENGINES)
        self._state_columns: dict[str, tuple[int, int]] = {}
        """Request -> columns of its block tables: of its running states, and accepted drafts after
        it (vLLM's `mamba_utils`)."""
        self.draft_rows: Counter[str] = Counter()
        """Drafter's rows that steps have found: right, missing, spoiled."""
        self.scheduler = (AsyncScheduler if spec.plans_ahead else Scheduler)(
            config,
            generate_scheduler_kv_cache_config(list(caches)),
            StructuredOutputManager(config),
            BLOCK,
            log_stats=True,
        )
        self.ranks = [
            Rank(
                rank_config(rank),
                caches[rank // spec.tp],
                self._make_pages(
                    caches[rank // spec.tp], spec.model.heads_of(rank % spec.tp, spec.tp)
                ),
                spec.runner,
            )
            for rank in range(spec.tp * spec.pp)
            if spec.pool
        ]
        self.pages = [rank.pages for rank in self.ranks] or [
            self._make_pages(caches[0], slice(0, spec.model.heads))
        ]
        self._aggregator = KVOutputAggregator(spec.tp * spec.pp)
        self.block_pool = self.scheduler.kv_cache_manager.block_pool
        self.free_at_start = self.block_pool.get_num_free_blocks()

    def _make_pages(self, cache: Any, heads: slice) -> Pages:
        """Return pages of the layers in a stage."""
        groups = [
            [int(name.split(".")[2]) for name in group.layer_names if "tail_cache" not in name]
            for group in cache.kv_cache_groups
        ]
        return Pages(self.spec.model, self.spec.num_blocks, BLOCK, heads, groups)

    # External actions

    def add(
        self,
        prompt: Sequence[int],
        max_tokens: int = 6,
        *,
        salt: str | None = None,
        promised: int = 0,
        **kvpool: Any,
    ) -> str:
        """Add a request. `kvpool` are its `kv_transfer_params`.

        `promised`: number of its tokens that the sibling claims to load.
        """
        request_id = f"r{next(self._numbers)}"
        params: dict[str, Any] = {"kvpool": kvpool} if kvpool else {}
        if promised:
            params["empty_loads"] = promised
        request = Request(
            request_id,
            list(prompt),
            SamplingParams(
                max_tokens=max_tokens,
                temperature=0.0,
                ignore_eos=True,
                extra_args={"kv_transfer_params": params} if params else None,
            ),
            None,
            cache_salt=salt,
            block_hasher=self._hasher,
        )
        self.answers[request_id] = Answer(list(prompt), max_tokens)
        self._contexts[request_id] = Context(self.spec.model, prompt, self.spec.lookaheads)
        self.scheduler.add_request(request)
        return request_id

    def abort(self, request_id: str) -> None:
        if self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED):
            self._ended(request_id, "abort", None)

    def reset(self, *, connector: bool = False, running: bool = False) -> bool:
        """Empty the engine's own prefix cache; with `connector` remove the pool's cells, too."""
        return self.scheduler.reset_prefix_cache(
            reset_running_requests=running, reset_connector=connector
        )

    def sleep(self) -> None:
        """Pause, keep all requests, and lose the content of the pages (`EngineCore.sleep`).

        Raises RuntimeError, as vLLM does, if anything but running requests holds blocks. The pages
        are then unchanged. `wake_up` ends the pause in both cases.
        """
        self.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        self.run(SETTLE_S)
        core = SimpleNamespace(
            reset_prefix_cache=self.scheduler.reset_prefix_cache,
            reset_mm_cache=lambda: None,
            reset_encoder_cache=lambda: None,
        )
        EngineCore._reset_caches(cast("EngineCore", core))
        for pages in self.pages:
            pages.fill(UNWRITTEN)

    def wake_up(self) -> None:
        self.scheduler.set_pause_state(PauseState.UNPAUSED)

    def shutdown(self) -> None:
        """Shut down as an engine does: the scheduler's side first, then the ranks."""
        if not self.closed:
            self.closed = True
            self.scheduler.shutdown()
            for rank in self.ranks:
                rank.connector.shutdown()

    # Steps

    def step(self) -> None:
        """Run one step as vLLM's `EngineCoreProc` does, with its pause after steps that compute
        nothing. In the pause, threads of the pool and other tests can use the core."""
        self.num_steps += 1
        if self._plan():
            self._take_results()
        for companion in self.companions:
            if companion.busy:
                companion.step()

    def _plan(self) -> bool:
        """Plan a step, if there is anything to plan. Return True if results are to be taken
        next."""
        if self._planned and not self.scheduler.has_requests():
            return True
        output = self.scheduler.schedule()
        self._planned.append(
            Batch(output, {r: self._share(r, output) for r in output.num_scheduled_tokens})
        )
        for tell in list(self.on_scheduled):
            tell(output)
        if self._chance.random() < 0.5:  # else the workers lag and begin it later
            for batch in self._planned:
                self._execute(batch)
        return (
            not self.spec.plans_ahead
            or len(self._planned) > 1
            or not (output.total_num_scheduled_tokens or self.scheduler.has_requests())
        )

    def _take_results(self) -> None:
        """Pass the results of the oldest step to the scheduler."""
        batch = self._planned.popleft()
        output, done = batch.output, self._execute(batch)
        sampled = list(done.req_id_to_index)
        for answers in self.scheduler.update_from_output(output, done).values():
            for answer in answers.outputs:
                known = self.answers[answer.request_id]
                known.tokens += answer.new_token_ids
                if answer.finish_reason is not None:
                    reason = str(answer.finish_reason)
                    self._ended(answer.request_id, reason, answer.kv_transfer_params)
        if self.spec.drafter and not self.spec.plans_ahead:
            drafted = [each for each in sampled if each in self._contexts]
            drafts = [self._draft(self._context(each), NUM_DRAFTS) for each in drafted]
            self.scheduler.update_draft_token_ids(DraftTokenIds(drafted, drafts))
        if not output.total_num_scheduled_tokens and self.scheduler.has_requests():
            time.sleep(PAUSE_S)
        for tell in list(self.on_stepped):
            tell(output)

    def drain(self) -> None:
        """Take the results of all steps that are planned."""
        while self._planned:
            self._take_results()

    def run(self, limit_s: float, until: Callable[[], bool] = lambda: False) -> float:
        """Step until no work is left or `until` is true, and return the seconds taken.

        Fail after `limit_s`, or after too many steps.
        """
        began, first = time.monotonic(), self.num_steps
        while self.busy and not until():
            self.step()
            seconds = time.monotonic() - began
            assert seconds < limit_s, f"not done after {seconds:.1f} s: {self.describe()}"
            assert self.num_steps - first < MAX_STEPS, f"steps go on for nothing: {self.describe()}"
        return time.monotonic() - began

    @property
    def busy(self) -> bool:
        own = self.scheduler.has_requests() or bool(self._planned)
        return own or any(rig.busy for rig in self.companions)

    def settle(self) -> None:
        """Wait until no transfer and no reset is in progress, and take the workers' reports."""
        self.drain()
        deadline = time.monotonic() + SETTLE_S
        for rank in self.ranks:
            while rank.executor is not None and not rank.executor.idle:
                assert time.monotonic() < deadline, f"transfers do not end: {self.describe()}"
                time.sleep(0.001)
        self.take_reports()
        while self.spec.pool and self.pool._validity.reset.pending:
            assert time.monotonic() < deadline, f"a reset does not end: {self.describe()}"
            self.take_reports()
            time.sleep(PAUSE_S)

    def take_reports(self) -> None:
        """Take the workers' reports, by a step."""
        self.step()
        self.drain()

    def _context(self, request_id: str) -> Context:
        """Return a request's context, with all tokens that the scheduler knows."""
        context = self._contexts[request_id]
        context.extend(self.scheduler.requests[request_id].all_token_ids[len(context.tokens) :])
        return context

    def _share(self, request_id: str, output: SchedulerOutput) -> Share:
        request, context = self.scheduler.requests[request_id], self._context(request_id)
        stop = request.num_computed_tokens
        start = stop - output.num_scheduled_tokens[request_id]
        tables = self.scheduler.kv_cache_manager.get_block_ids(request_id)
        ids = [np.array(each, dtype=np.intp) for each in tables]
        new = [each.req_id for each in output.scheduled_new_reqs]
        starts = request_id in new or request_id in output.scheduled_cached_reqs.resumed_req_ids
        known = request.num_tokens if starts else None
        drafts = output.scheduled_spec_decode_tokens.get(request_id, ())
        return Share(context, ids, start, stop, not request.is_prefill_chunk, known, drafts)

    def _draft(self, context: Context, count: int) -> list[int]:
        """Return tokens that may follow the context; most of them do."""
        known, next_token = len(context.tokens), self.spec.model.next_token
        for _ in range(count):
            is_right = self._chance.random() < RIGHT_DRAFTS
            context.extend([next_token(context.rows()) if is_right else FIRST_TOKEN])
        drafts = context.tokens[known:]
        context.cut(known)
        return drafts

    def _execute(self, batch: Batch) -> ModelRunnerOutput:
        """Run the workers' part of a step, unless it has run, and return its output."""
        if batch.done is None:
            batch.done = self._run_model(batch.output, batch.shares)
        return batch.done

    def _run_model(self, output: SchedulerOutput, shares: Mapping[str, Share]) -> ModelRunnerOutput:
        for pages in self.pages:
            pages.zero(getattr(output, "new_block_ids_to_zero", None) or ())
        for rank in self.ranks:
            rank.begin(output)
        try:
            sampled, drafted = self._forward(shares)
        except Exception as error:
            for rank in self.ranks:
                rank.give_up(error)
            self._planned.clear()
            raise
        if not self.ranks:
            self._write_drafts(self.pages[0], drafted)
            ids = list(sampled)
            index = {request_id: i for i, request_id in enumerate(ids)}
            return ModelRunnerOutput(ids, index, [sampled[request_id] for request_id in ids])
        outputs = [
            rank.end(output, sampled, partial(self._write_drafts, rank.pages, drafted))
            for rank in self.ranks
        ]
        if len(outputs) == 1:
            return outputs[0]
        # With several workers, each is a process, and all of its output comes pickled.
        merged = self._aggregator.aggregate(pickle.loads(pickle.dumps(outputs)))
        assert merged is not None
        return merged

    def _forward(self, shares: Mapping[str, Share]) -> tuple[dict[str, list[int]], list[Drafted]]:
        """Write the new rows and states, then read everything; read states before they are written.

        First wait for the loads of each layer, as attention layers do. Return the tokens that
        requests get, and the rows that the drafter computes next.
        """
        for rank in self.ranks if shares else ():
            rank.wait_for_layers()
        shares = {request_id: self._at_last(share) for request_id, share in shares.items()}
        for request_id, share in shares.items():
            rows, tables, start = share.context.rows(), share.tables, share.start
            if self.spec.sibling is not None and not self._is_right(tables, rows[:, :, :start]):
                rows = np.full_like(rows, UNWRITTEN)
            for pages in self.pages if start else ():
                assert pages.ring_is(tables, rows[:, :, :start]), (
                    f"{request_id} goes on without the tokens that have no key yet"
                )
            for pages in self.pages:
                pages.write(tables, start, rows[:, :, start : share.stop])
            if self.spec.model.states:
                self._run_states(request_id, share)
        sampled = {
            request_id: self._read(request_id, share) for request_id, share in shares.items()
        }
        drafted = list[Drafted]()
        kinds = dict[int, str]()
        for request_id, share in shares.items():
            if self.spec.model.states:
                self._keep_states(request_id, share, len(sampled[request_id]))
            if self._is_drafting:
                drafted.append(self._drafted(request_id, share, sampled[request_id], kinds))
            if share.samples and not self.spec.plans_ahead:
                share.context.cut(share.stop - len(share.drafts))
        return sampled, drafted

    def _run_states(self, request_id: str, share: Share) -> None:
        """Read a request's states, and write those after its last token and after each draft.

        As vLLM does (`preprocess_mamba`): the running states are in the block of the last token,
        and states after drafts in the blocks behind it.
        """
        tables, start, stop, drafts = share.tables, share.start, share.stop, share.drafts
        rows = share.context.rows()
        if share.known is not None:
            self._state_columns.pop(request_id, None)
        before, accepted = self._state_columns.get(request_id, ((start - 1) // BLOCK, 0))
        column = (stop - 1) // BLOCK
        for pages in self.pages:
            assert not start or pages.states_are(
                tables, rows[:, :, start - 1], before + accepted
            ), f"{request_id} goes on from wrong states after {start} tokens"
        for pages in self.pages:
            for place in range(len(drafts) + 1):
                last = rows[:, :, stop - len(drafts) + place - 1]
                pages.write_states(tables, last, column + place)
        self._state_columns[request_id] = column, 0

    def _keep_states(self, request_id: str, share: Share, num_sampled: int) -> None:
        """Copy the states at a boundary that accepted drafts have crossed to the boundary's block.

        As vLLM does after sampling (`postprocess_mamba_fused_kernel`).
        """
        column, _ = self._state_columns[request_id]
        accepted = max(0, num_sampled - 1)
        running = share.stop - len(share.drafts)
        aligned = (running + accepted) // BLOCK * BLOCK
        if aligned >= running:
            kept = aligned // BLOCK - 1
            for pages in self.pages:
                pages.copy_states(share.tables, column + aligned - running, kept)
            if kept == column:
                accepted = 0
        self._state_columns[request_id] = column, accepted

    @property
    def _is_drafting(self) -> bool:
        """True if the drafter's rows are checked: the pool stores them, or there is no pool."""
        return bool(self.spec.lookaheads) and (not self.spec.pool or self.pool._shape.has_drafts)

    def _drafted(
        self, request_id: str, share: Share, sampled: Sequence[int], kinds_of_blocks: dict[int, str]
    ) -> Drafted:
        """Check the drafter's rows before a share, and return those that it computes.

        `kinds_of_blocks`: blocks that the step's shares before this one write, with the kind of
        their rows. vLLM's cache gives such blocks to later requests of the same step.

        A row that is neither right nor missing, nor spoiled (computed by this engine behind a
        missing row), is another request's. With several modules the last rows depend on drafts, so
        they are `UNWRITTEN` until the next step, which computes them again. With states, hits end
        at boundaries, and no step computes the rows before the boundary again, which depend on
        tokens behind. These rows are missing, or in vLLM's own cache those of a prompt that parts
        there. They spoil no other row.
        """
        context, tables, ahead = share.context, share.tables, max(self.spec.lookaheads)
        again = 0 if share.known is not None else max(0, ahead - 1)
        start = max(0, share.start - again)
        right = context.draft_rows(share.stop - len(share.drafts) + max(0, len(sampled) - 1))
        spoiled = right - 2 - self._engine % 200
        is_spoiled = False
        if start:
            pages = self.pages[-self.spec.tp :]  # of the last stage
            read = np.concatenate([each.read_drafts(tables, start) for each in pages], axis=1)
            kinds = {"right": right, "missing": np.zeros_like(right), "spoiled": spoiled}
            by_kind = {
                kind: (
                    read == np.concatenate([rows[:, each.heads, :start] for each in pages], axis=1)
                ).all(axis=3)
                for kind, rows in kinds.items()
            }
            for table in tables:
                for token, block in enumerate(np.repeat(table, BLOCK)[:start]):
                    if int(block) in kinds_of_blocks:
                        for kind, each in by_kind.items():
                            each[:, :, token] = kind == kinds_of_blocks[int(block)]
            known = np.any(list(by_kind.values()), axis=0)
            is_bad = ~by_kind["right"].all(axis=(0, 1))
            if self.spec.model.states:
                ends = np.arange(start) % BLOCK >= BLOCK - ahead
                at_ends = read[:, :, ends]  # not NaN, and written
                known[:, :, ends] |= (np.isfinite(at_ends) & (at_ends != UNWRITTEN)).all(axis=3)
                is_bad[ends] = by_kind["spoiled"].any(axis=(0, 1))[ends]
            assert known.all(), (
                f"{request_id} drafts from rows of others at tokens "
                f"{np.unique(np.argwhere(~known)[:, 2])} of {start}"
            )
            is_spoiled = bool(is_bad.any())
            if share.known is not None:
                self.draft_rows.update(
                    {kind: int(each.any(axis=(0, 1)).sum()) for kind, each in by_kind.items()}
                )
        for table in tables:
            new = (int(block) for block in table[start // BLOCK :] if block)
            kinds_of_blocks.update(dict.fromkeys(new, "spoiled" if is_spoiled else "right"))
        return Drafted(tables, start, (spoiled if is_spoiled else right)[:, :, start:])

    def _write_drafts(self, pages: Pages, drafted: Sequence[Drafted]) -> None:
        """Write the rows that the drafter computes once the step's tokens are sampled."""
        for tables, start, rows in drafted:
            pages.write_drafts(tables, start, rows)

    def _at_last(self, share: Share) -> Share:
        """Return the share as its step computes it, once the results of all before it are known.

        The scheduler plans ahead as if all drafts were accepted. The drafts end the context.
        """
        context, drafts = share.context, share.drafts
        if share.known is not None:
            context.cut(share.known)
        if not share.samples:
            return share
        if self.spec.plans_ahead and share.known is None:
            drafts = self._draft(context, len(drafts))
        context.extend(drafts)
        stop = len(context.tokens)
        return share._replace(start=stop - (share.stop - share.start), stop=stop, drafts=drafts)

    def _is_right(self, tables: list[NDArray[np.intp]], rows: NDArray[np.floating]) -> bool:
        return all(
            np.array_equal(pages.read(tables, rows.shape[2]), rows[:, pages.heads])
            for pages in self.pages
        )

    def _read(self, request_id: str, share: Share) -> list[int]:
        context, tables, start, stop, samples, _, drafts = share
        tp, held = self.spec.tp, [pages.read(tables, stop) for pages in self.pages]
        stages = [np.concatenate(held[i : i + tp], axis=1) for i in range(0, len(held), tp)]
        read, rows = np.concatenate(stages), context.rows()[:, :, :stop]
        expected = np.concatenate([rows[:, pages.heads] for pages in self.pages[:tp]], axis=1)
        for layer, window in enumerate(self.spec.model.windows):
            if window:  # the step's first token looks back furthest
                unseen = max(0, start - window + 1)
                read[layer, :, :unseen] = expected[layer, :, :unseen]
        for layer in (*self.spec.model.states, *self.spec.model.indexers):  # read in other ways
            read[layer] = expected[layer]
        for pages in self.pages:
            assert pages.keys_are(tables, rows), f"{request_id} reads wrong keys of {stop} tokens"
        if self.spec.sibling is None and not np.array_equal(read, expected):
            wrong = np.argwhere((read != expected).any(axis=3))
            layer, head, token = wrong[wrong[:, 2].argmin()]
            raise AssertionError(
                f"{request_id} reads {len(wrong)} wrong rows of {stop} tokens, the first of token "
                f"{token}, layer {layer}, head {head}"
            )
        if not samples:
            return []
        known, sampled = stop - len(drafts), list[int]()
        for draft in (*drafts, None):
            rows = read[:, : self.spec.model.heads, : known + len(sampled)]
            sampled.append(self.spec.model.next_token(rows))
            if sampled[-1] != draft:
                break
        context.cut(known)
        context.extend(sampled)
        return sampled

    def _ended(self, request_id: str, reason: str, params: dict[str, Any] | None) -> None:
        self.answers[request_id].ended = reason
        self.answers[request_id].params = params
        self._contexts.pop(request_id, None)

    # State for tests

    @property
    def pool(self) -> PoolScheduler:
        part = pool_in(self.scheduler.connector)._scheduler_part
        assert part is not None
        return part.scheduler

    @property
    def executors(self) -> list[Any]:
        return [rank.executor for rank in self.ranks if rank.executor is not None]

    def counted(self, name: str) -> dict[str, float]:
        """Return the values of a metric by its labels, over both sides and all ranks."""
        registries = [self.pool._registry, *(rank.part.registry for rank in self.ranks)]
        sums: dict[str, float] = defaultdict(float)
        for registry in registries:
            for key, value in registry.snapshot().items():
                if key == name or key.startswith(f"{name}{{"):
                    sums[key[len(name) :].strip("{}")] += value
        return dict(sums)

    def count(self, name: str, label: str = "") -> float:
        """Return the sum of a metric's values whose labels contain `label`."""
        return sum(value for labels, value in self.counted(name).items() if label in labels)

    def expect(self, request_ids: Iterable[str]) -> None:
        """Assert that these requests have ended with the same output as without a pool."""
        for request_id in request_ids:
            answer = self.answers[request_id]
            assert answer.ended == "length", f"{request_id} ended as {answer.ended!r}"
            expected = self.spec.model.complete(answer.prompt, answer.max_tokens)
            assert answer.tokens == expected, f"{request_id} has another output"

    def describe(self) -> str:
        """Return the rig's state, for the message of a test that fails."""
        requests = {
            request_id: f"{request.status.name}, {request.num_computed_tokens} computed"
            for request_id, request in self.scheduler.requests.items()
        }
        told = [f"step {self.num_steps}", f"requests {requests}"]
        if self.ranks:
            told.append(
                f"pins {self.pool.saves.ledger.num_blocks}, lookups {self.pool._lookups._open}"
            )
        told += [
            f"owed {executor.unreported}, running {[str(b.lane) for b in executor.engine.running]}"
            for executor in self.executors
        ]
        told.append(f"threads {sorted(t.name for t in threading.enumerate())}")
        return "\n".join(told)
