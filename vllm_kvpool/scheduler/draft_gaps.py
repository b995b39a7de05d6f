"""Missing rows of a drafter's layers in the pages (pure; the scheduler's thread).

They are where a load found no cells of them, and where vLLM left its drafter out of a step. Rows
behind them are computed from them. Neither are stored, or every engine would draft badly behind
them; nor are rows of requests that begin with such blocks in the engine's own prefix cache.
"""

from collections import OrderedDict
from collections.abc import Collection, Mapping

from vllm_kvpool.scheduler.request import PoolShape, RequestState

MAX_GAPS = 8192  # chunks remembered, which are found in the engine's own cache while it has them


class DraftGaps:
    """The gaps of all requests; `RequestState.draft_stop` is the first chunk of a request's."""

    def __init__(self, shape: PoolShape) -> None:
        self._shape = shape
        self._hashes: OrderedDict[bytes, None] = OrderedDict()  # of chunks that have gaps

    def start_request(self, state: RequestState, num_computed: int) -> None:
        """Note a request that starts, maybe again, with `num_computed` tokens of the own cache."""
        state.draft_stop, state.cached_tokens = None, num_computed

    def step(self, scheduled: Mapping[str, int], requests: Mapping[str, RequestState]) -> None:
        """Note a step in which the drafter computes nothing: one of its requests is too long."""
        limit = self._shape.max_drafted_tokens
        if limit is None or not any(
            requests[each].view.num_computed_tokens + count > limit
            for each, count in scheduled.items()
            if each in requests
        ):
            return
        for request_id in scheduled.keys() & requests.keys():
            state = requests[request_id]
            self._stop(state, state.view.num_computed_tokens // self._shape.chunk_tokens)

    def cleared(self, state: RequestState, chunks: Collection[int]) -> None:
        """Note that a load of the request has filled rows of these chunks with zeros."""
        assert state.chain is not None
        for chunk in sorted(chunks):
            self._stop(state, chunk)
            if chunk < len(state.chain):
                self._add(state.chain.hashes[chunk])

    def stop_of(self, state: RequestState, first: int, stop: int) -> int | None:
        """Return the chunk from which on rows are not stored; None if there is none.

        Called for a save of chunks [first, stop).
        """
        assert state.chain is not None
        hashes = state.chain.hashes
        if self._hashes:
            cached = -(-state.cached_tokens // self._shape.chunk_tokens)
            for chunk, chunk_hash in enumerate(hashes[:cached]):
                if chunk_hash in self._hashes:
                    self._stop(state, chunk)
                    break
        whole = stop if state.draft_stop is None else min(stop, state.draft_stop)
        if self._hashes:
            for chunk_hash in hashes[first:whole]:
                self._hashes.pop(chunk_hash, None)
        for chunk_hash in hashes[max(first, whole) : stop]:
            self._add(chunk_hash)
        return state.draft_stop

    def own_cache_was_reset(self) -> None:
        """Forget all gaps, as the engine's own prefix cache is empty."""
        self._hashes.clear()

    def tokens_of(self, chunks: Collection[int], start: int, stop: int) -> int:
        """Return how many rows of [start, stop) are in the cells of these chunks."""
        size, ahead = self._shape.chunk_tokens, self._shape.lookahead
        return sum(
            max(0, min(stop, (chunk + 1) * size - ahead) - max(start, chunk * size - ahead))
            for chunk in chunks
        )

    def _stop(self, state: RequestState, chunk: int) -> None:
        state.draft_stop = chunk if state.draft_stop is None else min(chunk, state.draft_stop)

    def _add(self, chunk_hash: bytes) -> None:
        self._hashes[chunk_hash] = None
        self._hashes.move_to_end(chunk_hash)
        if len(self._hashes) > MAX_GAPS:
            self._hashes.popitem(last=False)
