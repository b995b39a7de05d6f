"""Lookups of requests: what each asks for, until when it waits, and the answers.

Scheduler's thread; `lookup_service.py` has the threads that ask the stores.
"""

from collections.abc import Callable
from dataclasses import replace

from vllm_kvpool.config import KVPoolConfig
from vllm_kvpool.metrics import MAX_SOURCES, MetricsRegistry, NameLabels
from vllm_kvpool.scheduler.lookup import Lookup, LookupOutcome, LookupResult
from vllm_kvpool.scheduler.lookup_service import LookupService
from vllm_kvpool.scheduler.request import PoolShape, RequestLookup, RequestState
from vllm_kvpool.scheduler.states import LookupState, RetryState, moved
from vllm_kvpool.scheduler.validity import Validity

ANSWER_SHARE = 0.9  # of the timeout: answers come before the request stops waiting


class RequestLookups:
    """The lookups that are not answered. Each request has one at most, its newest."""

    def __init__(
        self,
        service: LookupService,
        config: KVPoolConfig,
        shape: PoolShape,
        validity: Validity,
        registry: MetricsRegistry,
        clock: Callable[[], float],
        new_id: Callable[[], int],
    ) -> None:
        self._service = service
        self._timeout_s = config.lookup_timeout_ms / 1000
        self._shape = shape
        self._validity = validity
        self._registry = registry
        self._clock = clock
        self._new_id = new_id
        self._sources = NameLabels(MAX_SOURCES)
        self._open: dict[int, RequestState] = {}

    def ask(self, state: RequestState) -> None:
        """Have the request's tokens hashed and looked up; an earlier lookup counts no more."""
        self._close(state.lookup)
        now, view, options = self._clock(), state.view, state.view.options
        # Tokens that have not come in time are computed: a preemption does not wait for them again.
        expect_tokens = 0 if state.has_expected else options.expect_tokens
        expect_until = now + (options.expect_timeout_ms / 1000 if expect_tokens else 0.0)
        has_failed, limit = state.retry is not RetryState.NONE, state.limit_tokens
        lookup = Lookup(
            lookup_id=self._new_id(),
            request_id=view.request_id,
            identify=view.identity,
            tokens=view.tokens(),
            search=state.may_load,
            expect_tokens=expect_tokens,
            expect_until=expect_until,
            answer_by=expect_until + self._timeout_s * ANSWER_SHARE,
            weights_version=self._validity.weights_version,
            reads_files=view.reads_files,
            stop_chunk=None if limit is None else limit // self._shape.chunk_tokens,
            exact=has_failed,
            seeks_end=self._expects_end(state, expect_tokens),
            # A load that has failed counts whole chunks, and so does one of expected tokens.
            seeks_tail=self._shape.alias_step > 0 and not (has_failed or expect_tokens),
            # Another engine that goes on with the prompt reads stores alone.
            seeks_stored=options.hand_over and state.may_save,
            notices=options.notices if expect_tokens else (),
        )
        state.lookup = RequestLookup(
            lookup.nothing_found(is_final=False),
            asked_at=now,
            deadline=expect_until + self._timeout_s,
            num_preemptions=view.num_preemptions,
            state=LookupState.PENDING,
        )
        self._open[lookup.lookup_id] = state
        self._service.submit(lookup)

    def _expects_end(self, state: RequestState, expect_tokens: int) -> bool:
        """Return True if the prompt's end is stored, or will be, by the engine that computes it."""
        num_tokens = state.view.num_tokens
        if not self._shape.has_ends or num_tokens != state.view.num_prompt_tokens:
            return False
        is_whole = expect_tokens == num_tokens and state.view.options.expect_end
        return is_whole or expect_tokens > num_tokens

    def take(self, answer: LookupResult) -> tuple[RequestState | None, LookupResult]:
        """Take an answer, or the progress of a lookup that waits for expected chunks.

        Returns its request, which may have ended (`finish`), and what it has found: nothing, if it
        is outdated. None if the request does not wait for it.
        """
        state = self._open.get(answer.lookup_id)
        if state is None or (state.lookup.state is LookupState.LATE and not answer.is_final):
            return None, answer
        if not self._validity.finds(answer.weights_version):
            answer = answer.without_hit()
        state.chain = answer.chain
        if state.lookup.state is LookupState.UNNAMED:
            self.give_up(state)
        elif answer.is_final:
            self._answered(state, answer)
        else:
            state.lookup.answer = answer
        return state, answer

    def _answered(self, state: RequestState, answer: LookupResult) -> None:
        lookup = state.lookup
        self._registry.add("kvpool_lookups", outcome=answer.outcome.value)
        self._registry.add("kvpool_lookup_seconds", self._clock() - lookup.asked_at)
        if lookup.state is LookupState.PENDING:
            tokens = answer.tokens_of(answer.found_chunks, self._shape.chunk_tokens)
            self._record_span(state, answer.outcome, tokens)
            lookup.answer = answer
            if answer.chain is not None:
                self.count_expected(state, is_found=not answer.lacks_expected)
        self._close(lookup)

    def time_out(self, state: RequestState) -> None:
        """Let the request go on without the answer, which is still taken for its hashes."""
        lookup = state.lookup
        self._record_span(state, LookupOutcome.TIMED_OUT, 0)
        lookup.answer = replace(lookup.answer, outcome=LookupOutcome.TIMED_OUT)
        lookup.state = moved(lookup.state, LookupState.LATE)
        self.count_expected(state, is_found=False)
        self._registry.add("kvpool_lookups", outcome=LookupOutcome.TIMED_OUT.value)

    def give_up(self, state: RequestState) -> None:
        """End a lookup whose answer has no use any more."""
        state.has_expected |= state.lookup.state is LookupState.PENDING
        if self._close(state.lookup):
            self._service.cancel(state.answer.lookup_id)

    def finish(self, state: RequestState) -> None:
        """Drop the lookups of a request that has ended.

        A hand-over still waits for the name of its prompt.
        """
        is_named = state.chain is not None or not state.view.options.hand_over
        if is_named or state.lookup.state is LookupState.ENDED:
            self.give_up(state)
        else:
            state.lookup.state = moved(state.lookup.state, LookupState.UNNAMED)

    def _close(self, lookup: RequestLookup) -> bool:
        """End a lookup. Returns True if it was open."""
        if self._open.pop(lookup.answer.lookup_id, None) is None:
            return False
        lookup.state = moved(lookup.state, LookupState.ENDED)
        return True

    def count_expected(self, state: RequestState, *, is_found: bool) -> None:
        """Count whether the tokens that a request expects were found, once."""
        options = state.view.options
        if not options.expect_tokens or not state.may_load or state.has_expected:
            return
        state.has_expected = True
        self._registry.add(
            "kvpool_expected_prompts",
            source=self._sources.of(options.expect_from),
            outcome="found" if is_found else "missing",
        )

    def _record_span(self, state: RequestState, outcome: LookupOutcome, tokens: int) -> None:
        attributes = {"kvpool.outcome": outcome.value, "kvpool.found_tokens": tokens}
        seconds = self._clock() - state.lookup.asked_at
        state.view.record_span("kvpool.lookup", seconds, attributes)

    @property
    def pending(self) -> list[RequestLookup]:
        """The lookups that requests wait for."""
        lookups = [state.lookup for state in self._open.values()]
        return [each for each in lookups if each.state is LookupState.PENDING]

    @property
    def has_unnamed(self) -> bool:
        """True if a request that has ended waits for the name of its prompt."""
        return any(each.lookup.state is LookupState.UNNAMED for each in self._open.values())
